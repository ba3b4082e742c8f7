"""Profiles: which engine's integer arithmetic the virtual NPU reproduces, as data (profiles/*.toml), and what is proved.

A profile of your own is a file named where a shipped one could be (`vnpu:profile=mine.toml`). Its keys, [section] by
[section]; those marked * may be left out, all may where `base` names a shipped profile whose values are taken then:

    name, engine*, summary*, proved_by*   texts; base* = "exact" | "ort" | "tflite-reference"
    [requantise]   sums to codes of Conv, ConvTranspose, Gemm, MatMul
      multiplier        "float64" | "float32" (s_x * s_w / s_out in that precision) | "fixed" (an integer and a shift)
      multiplier_bits*  bits of that integer without its sign (31): 15 is a 16-bit multiplier
      rounding          "half-even" | "half-up" | "half-away" | "floor" | "truncate"
      double_rounding   fixed: round the product to an integer before the shift, then again (half-up then means what
                        TFLite's reference kernels do: half-up first, half-away from zero second)
    [accumulator]  bits, wide_bits* (where activations have 16 bits; 64), overflow "wrap" | "saturate"
    [bias]         conv, gemm: "own" (the bias' own scale), "codes" (taken as s_x * s_w whatever its scale says),
                   "rescaled" (rounded to s_x * s_w where the scales differ)
    [elementwise]  Add, Sub, Mul, Div, Max, Min, PRelu    arithmetic "float64" | "ort" | "tflite"
    [pool]         AveragePool, GlobalAveragePool, ReduceMean, ReduceSum    arithmetic as above
      scale*            "output" | "input": round the mean to a code of the input first, then rescale that, as TOSA's
                        AVG_POOL2D does (AveragePool, GlobalAveragePool; not with arithmetic "ort")
    [table]        functions of one value, rescaling, linear Resize, islands    arithmetic as above
    [softmax]      arithmetic as above
      rounding*         of these four sections ("half-even"), with arithmetic "float64" only: the others bring their own
    [quantise]     floats to codes, and the bounds of Relu and Clip    precision "float32" | "float64", rounding
    [proved]*, [unproved]*   operator = "what it was compared with", or "why it was not"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from equivcheck.errors import UnknownOption, near
from equivcheck.vnpu import shipped

ROUNDINGS = ("half-even", "half-up", "half-away", "floor", "truncate")
ARITHMETICS = ("float64", "ort", "tflite")
# Every key a profile file may hold, with the values it may take (a type, where any value of it is allowed).
KEYS: dict[str, dict[str, Any]] = {
    "requantise": {
        "multiplier": ("float32", "float64", "fixed"),
        "multiplier_bits": range(2, 32),
        "rounding": ROUNDINGS,
        "double_rounding": bool,
    },
    "accumulator": {"bits": range(2, 65), "wide_bits": range(2, 65), "overflow": ("wrap", "saturate")},
    "bias": {"conv": ("own", "codes", "rescaled"), "gemm": ("own", "codes", "rescaled")},
    "elementwise": {"arithmetic": ARITHMETICS, "rounding": ROUNDINGS},
    "pool": {"arithmetic": ARITHMETICS, "rounding": ROUNDINGS, "scale": ("output", "input")},
    "table": {"arithmetic": ARITHMETICS, "rounding": ROUNDINGS},
    "softmax": {"arithmetic": ARITHMETICS, "rounding": ROUNDINGS},
    "quantise": {"precision": ("float32", "float64"), "rounding": ROUNDINGS},
}
DEFAULTS: dict[str, Any] = {
    "requantise.multiplier_bits": 31,
    "accumulator.wide_bits": 64,
    "elementwise.rounding": "half-even",
    "pool.rounding": "half-even",
    "pool.scale": "output",
    "table.rounding": "half-even",
    "softmax.rounding": "half-even",
}
TEXTS = ("name", "engine", "summary", "proved_by", "base")


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether one operator of a profile is bit-exact against its engine.

    `note` names what it was compared with (proved) or says why it was not. The test, the engine's version and how many
    codes were compared are the profile's `proved_by`.
    """

    operator: str
    proved: bool
    note: str


@dataclass(frozen=True, slots=True)
class Profile:
    """One arithmetic. Field names are the TOML's `section_key`; `proofs` by operator (ONNX op_type)."""

    name: str
    engine: str
    summary: str
    requantise_multiplier: str
    requantise_multiplier_bits: int
    requantise_rounding: str
    requantise_double_rounding: bool
    accumulator_bits: int
    accumulator_wide_bits: int
    accumulator_overflow: str
    bias_conv: str
    bias_gemm: str
    elementwise_arithmetic: str
    elementwise_rounding: str
    pool_arithmetic: str
    pool_rounding: str
    pool_scale: str
    table_arithmetic: str
    table_rounding: str
    softmax_arithmetic: str
    softmax_rounding: str
    quantise_precision: str
    quantise_rounding: str
    proved_by: str = ""
    proofs: Mapping[str, Proof] = field(default_factory=dict)

    def proof(self, kind: str) -> Proof:
        """What is known of operator `kind`; unlisted ones are not proved."""
        return self.proofs.get(kind) or Proof(kind, False, "not compared with the engine")


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that ship with equivcheck."""
    return shipped.names("profile")


def load_profile(name: str) -> Profile:
    """Return the shipped profile `name`, or the one in the file `name` (ending in .toml).

    Raises UnknownOption with the nearest names where there is none, or with the key where the file is wrong.
    """
    return parse_profile(shipped.text("profile", name))


def parse_profile(text: str) -> Profile:
    """Read one profile from TOML text; UnknownOption names the key that is missing, unknown or out of range."""
    found = _parsed(text)
    _refuse_unknown(found)
    base = found.get("base")
    if base is not None:
        if base not in profile_names():
            raise UnknownOption(
                f"profile key base is {base!r}", asked=str(base), nearest=near(str(base), profile_names())
            )
        inherited = _parsed(shipped.text("profile", base))
        _drop_roundings(inherited, found)
        for section in KEYS:
            found[section] = {**inherited[section], **found.get(section, {})}
    _refuse_idle(found)
    fields = {f"{section}_{key}": _checked(found, section, key) for section, keys in KEYS.items() for key in keys}
    named: dict[str, Any] = {key: str(found.get(key, "")) for key in ("name", "engine", "summary", "proved_by")}
    if not named["name"]:
        raise UnknownOption("the profile has no name", hint='it needs name = "..." at the top')
    proofs = {
        kind: Proof(kind, section == "proved", note)
        for section in ("proved", "unproved")
        for kind, note in found.get(section, {}).items()
    }
    return Profile(**named, proofs=proofs, **fields)


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnknownOption(f"the profile is no TOML: {error}") from error


def _drop_roundings(inherited: dict[str, Any], found: Mapping[str, Any]) -> None:
    """A base's own rounding goes where another arithmetic is chosen that brings one."""
    for section in ("elementwise", "pool", "table", "softmax"):
        if found.get(section, {}).get("arithmetic", "float64") != "float64":
            inherited[section].pop("rounding", None)


def _checked(found: Mapping[str, Any], section: str, key: str) -> Any:
    allowed = KEYS[section][key]
    value = found.get(section, {}).get(key, DEFAULTS.get(f"{section}.{key}"))
    if isinstance(allowed, type):
        fits, wanted = isinstance(value, allowed), allowed.__name__
    elif isinstance(allowed, range):
        fits = isinstance(value, int) and not isinstance(value, bool) and value in allowed
        wanted = f"a whole number from {allowed.start} to {allowed.stop - 1}"
    else:
        fits, wanted = value in allowed, " | ".join(allowed)
    if not fits:
        raise UnknownOption(f"profile key {section}.{key} is {value!r}; it must be {wanted}", asked=str(value))
    return value


def _refuse_unknown(found: Mapping[str, Any]) -> None:
    for section, keys in found.items():
        if not isinstance(keys, dict):
            if section not in TEXTS:
                raise UnknownOption(f"unknown profile key {section}", asked=section, nearest=near(section, TEXTS))
            continue
        if section in ("proved", "unproved"):
            continue
        allowed = KEYS.get(section)
        if allowed is None:
            raise UnknownOption(f"unknown profile section [{section}]", asked=section, nearest=near(section, KEYS))
        for key in keys:
            if key not in allowed:
                raise UnknownOption(f"unknown profile key {section}.{key}", asked=key, nearest=near(key, allowed))


def _refuse_idle(found: Mapping[str, Any]) -> None:
    """A key that would change nothing is a mistake, not a wish."""
    for section in ("elementwise", "pool", "table", "softmax"):
        keys = found.get(section, {})
        arithmetic = keys.get("arithmetic")
        if "rounding" in keys and arithmetic != "float64":
            raise UnknownOption(f"profile key {section}.rounding: arithmetic {arithmetic!r} brings its own rounding")
        if keys.get("scale") == "input" and arithmetic == "ort":
            raise UnknownOption(f"profile key {section}.scale: arithmetic 'ort' rounds in the output's scale")
    fixed = found.get("requantise", {})
    if "multiplier_bits" in fixed and fixed.get("multiplier") != "fixed":
        raise UnknownOption('profile key requantise.multiplier_bits: only multiplier = "fixed" has bits')
