"""What a step may add beyond rounding, and how given thresholds are applied.

**Legal excess.** A step is legal when no code lies further than 1/2 + e LSB from the (clipped) real value of that step on
the inputs that side itself had. e stands in `legal_excess.toml`, one row an op_type, each with its source, the engines it
was measured on and the script that measures it again. It misleads where an engine computes something else that happens to
stay within e on these samples: hence the coverage figures and the stress codes.

**Double rounding.** Fixed-point engines round s_in * s_w / s_out = m * 2^-k (1/2 <= m < 1) once to 31 bits, then shift and
round again: that costs up to 2^-(k+1) for k >= 1 (gemmlowp's SaturatingRoundingDoublingHighMul then RoundingDivideByPOT).

**Rules** (TOML) replace the limit of the tensors they match. Later rules override key by key. What each limits, and when it
misleads (definitions: `equivcheck.result.Metrics` and `StepError`):

| key | on | what it limits, and when it misleads |
|---|---|---|
| excess | local | LSB of one step beyond correct rounding: what legal means. Blind to codes that this input clamps |
| max_lsb | both | largest distance in LSB. Grows with depth: correct engines reach 75 LSB inside a real network |
| max_abs | accumulated | the same in stored units; of codes it means nothing where the two sides are quantised differently |
| bias_lsb | both | mean distance, signed. Correct kernels reach 0.53 (double rounding); a fault of both signs has none |
| mismatch_share | both | share of unequal elements: says how often, never how far; 0.84 is reached by rounding alone |
| cosine | accumulated | a lower bound on the angle. One wrong channel of 64 leaves 0.994; a constant factor leaves 1 |
| snr_db | accumulated | a lower bound on signal to noise. Falls with depth for correct engines too (19 dB measured) |
| atol, rtol | accumulated | every element within atol + rtol * abs(reference); rtol means nothing near zero |

Cosine and SNR are of real values, not of codes: a large zero point makes any two code tensors look alike.
Sources: the figures are measured by `tests/bench/faults.py` and `tests/bench/legal.py`; isclose is numpy's definition.
"""

from __future__ import annotations

import fnmatch
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from equivcheck.errors import ToleranceError, near

PRESETS = {
    "semantics": "every step is a legal evaluation of that step (legal_excess.toml)",
    "bitwise": "every stored value equal bit for bit",
    "close": "integers equal, floats within atol 1e-3 + rtol 1e-3",
}
METRICS = ("excess", "max_abs", "max_lsb", "bias_lsb", "mismatch_share", "cosine", "snr_db", "atol", "rtol")
LOWER_BOUNDS = ("cosine", "snr_db")
_MATCHERS = ("tensor", "op_type", "dtype", "on")
_ON = ("local", "accumulated")


@dataclass(frozen=True, slots=True)
class Legal:
    """A row of legal_excess.toml. `e` in LSB; `double_rounding` adds 2^-(k+1)."""

    op_type: str
    kind: str
    e: float
    source: str
    measured: str
    script: str
    double_rounding: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One [[rule]] of a tolerance file: matchers (all given must hold) and limits."""

    limits: Mapping[str, float]
    tensor: str = "*"
    op_type: str = "*"
    dtype: str = "*"
    on: str | None = None

    def matches(self, tensor: str, op_type: str, dtype: str, on: str) -> bool:
        return (
            fnmatch.fnmatchcase(tensor, self.tensor)
            and fnmatch.fnmatchcase(op_type, self.op_type)
            and fnmatch.fnmatchcase(dtype, self.dtype)
            and self.on in (None, on)
        )


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A preset and the rules on top of it."""

    preset: str = "semantics"
    rules: Sequence[Rule] = field(default=())
    source: str = "semantics"

    def given(self, tensor: str, op_type: str, dtype: str, on: str) -> dict[str, float]:
        """Limits that rules give this tensor, key by key; empty where no rule matches."""
        found: dict[str, float] = {}
        for rule in self.rules:
            if rule.matches(tensor, op_type, dtype, on):
                found.update(rule.limits)
        return found


def load_tolerance(given: str | os.PathLike[str] | Tolerance | None) -> Tolerance:
    """Return the tolerance that a preset's name or a TOML file gives.

    Raises ToleranceError for an unknown preset, an unreadable file, an unknown key (with its path) or a wrong type.
    """
    if given is None:
        return Tolerance()
    if isinstance(given, Tolerance):
        return given
    text = os.fspath(given)
    if text in PRESETS:
        return Tolerance(text, source=text)
    path = Path(text)
    if not text or not path.is_file():
        raise ToleranceError(
            f"no such tolerance: {text}",
            asked=text,
            nearest=near(text, PRESETS),
            hint=f"a preset ({', '.join(PRESETS)}) or a TOML file",
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ToleranceError(f"{text} cannot be read: {error}", asked=text) from error
    return _tolerance(content, text)


def _tolerance(content: Mapping[str, Any], source: str) -> Tolerance:
    for key in content:
        if key not in ("preset", "rule"):
            raise ToleranceError(f"{source}: unknown key '{key}'", asked=key, nearest=near(key, ("preset", "rule")))
    preset = content.get("preset", "semantics")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ToleranceError(f"{source}: preset = '{preset}' is not one of {', '.join(PRESETS)}", asked=str(preset))
    rules = content.get("rule", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise ToleranceError(f"{source}: rule must be a list of tables", hint="write [[rule]]")
    return Tolerance(preset, tuple(_rule(rule, f"{source}: rule[{k}]") for k, rule in enumerate(rules)), source)


def _rule(given: Mapping[str, Any], where: str) -> Rule:
    limits: dict[str, float] = {}
    matchers: dict[str, str] = {}
    for key, value in given.items():
        if key in _MATCHERS:
            if not isinstance(value, str):
                raise ToleranceError(f"{where}.{key} must be text, got {value!r}", asked=key)
            matchers[key] = value
        elif key in METRICS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ToleranceError(f"{where}.{key} must be a number, got {value!r}", asked=key)
            if not math.isfinite(value) or (value < 0 and key not in LOWER_BOUNDS):
                raise ToleranceError(
                    f"{where}.{key} = {value!r} can never hold", asked=key, hint="give a finite limit, 0 or more"
                )
            limits[key] = float(value)
        else:
            raise ToleranceError(f"{where}: unknown key '{key}'", asked=key, nearest=near(key, (*_MATCHERS, *METRICS)))
    if matchers.get("on", "local") not in _ON:
        raise ToleranceError(f"{where}.on = '{matchers['on']}' is not one of {', '.join(_ON)}", asked=matchers["on"])
    if not limits:
        raise ToleranceError(f"{where} sets no limit", hint="limits: " + ", ".join(METRICS))
    return Rule(limits, **matchers)


# -- legal excess ------------------------------------------------------------------------------------------------------


@cache
def legal_table() -> dict[str, Legal]:
    """The table of legal excess by op_type; `*` is the row for what is not listed."""
    content = tomllib.loads((files("equivcheck") / "legal_excess.toml").read_text(encoding="utf-8"))
    return {op: Legal(op_type=op, **row) for row in content["op"] for op in row.pop("op_types")}


@dataclass(frozen=True, eq=False)
class Excess:
    """The limit of one step, in LSB: `base`, plus `by_channel` (0-d or one an output channel). `rule` says why.

    `declared` is how much of `base` only the engine's own declaration grants, `reason` is that declaration.
    """

    base: float
    by_channel: npt.NDArray[np.float64]
    rule: str
    listed: bool = True
    declared: float = 0.0
    reason: str = ""

    def limits(self, channels: int) -> npt.NDArray[np.float64]:
        """The limit of each of `channels` channels."""
        if self.by_channel.size in (1, channels):
            return np.broadcast_to(self.base + self.by_channel.ravel(), (channels,)).astype(np.float64)
        return np.full(channels, self.base + float(self.by_channel.max()))


def legal_excess(
    ops: Sequence[str],
    multiplier: npt.NDArray[np.float64] | None,
    declared: Mapping[str, tuple[float, str]] | None = None,
    bits: int = 8,
) -> Excess:
    """Return what a step of `ops` may add beyond rounding.

    `multiplier` is s_in * s_w / s_out of a Conv, Gemm or MatMul (0-d or one a channel), None where there is none.
    `declared` are wider limits that an engine declares, with its reason, by op_type or `op_type@bits` of the output's codes.
    Of several ops the widest counts.
    """
    table = legal_table()
    rows = [table.get(op, table["*"]) for op in ops]
    widest = max(rows, key=lambda row: row.e)
    base, rule, reason = (
        widest.e,
        f"legal excess of {'an op that is not listed' if widest.op_type == '*' else widest.op_type}",
        "",
    )
    for key in [key for op in ops for key in (op, f"{op}@{bits}")]:
        if declared and key in declared and declared[key][0] > base:
            base, reason = declared[key]
            rule = f"declared by the engine for {key}: {reason}"
    extra: npt.NDArray[np.float64] = np.zeros(())
    if multiplier is not None and any(row.double_rounding for row in rows):
        extra = double_rounding(multiplier)
    return Excess(base, extra, rule, widest.op_type != "*", base - widest.e, reason)


def double_rounding(multiplier: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """2^-(k+1) where multiplier = m * 2^-k, 1/2 <= m < 1, for k >= 1; 0 otherwise (see the module's docstring)."""
    _, exponent = np.frexp(np.abs(multiplier))
    return np.where(exponent <= -1, np.ldexp(1.0, np.minimum(exponent, 0) - 1), 0.0)
