"""Which value of the model a dumped tensor is: by its name, as tools change names, or by the user's names file."""

from __future__ import annotations

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equivcheck.dumps.files import Shape, numpy_dtype, readable
from equivcheck.errors import RecordingError, near
from equivcheck.models.graph import DEQUANTIZE, Graph

LAYOUTS = ("nhwc", "nchw")
_NATIVE = "_native"  # qnn-net-run --use_native_output_files: the engine's own codes
# What librknnrt calls a tensor that a board dumps: 025_ConvClip_385_shape_1_384_14_14_float
# (https://github.com/airockchip/rknn_model_zoo/issues/163)
_RKNN_RUNTIME = re.compile(r"\d+_[A-Za-z0-9]+_(.+)_shape_[0-9_]+_[a-z0-9]+")


@dataclass(frozen=True)
class Declared:
    """What the user says of one tensor of the dump; None where nothing is said.

    `dtype` is what the numbers are, whatever they are kept in; `axis` counts in the model's shape.
    """

    dtype: np.dtype[Any] | None = None
    shape: Shape | None = None
    scale: tuple[float, ...] | None = None
    zero_point: tuple[int, ...] | None = None
    axis: int | None = None
    layout: str | None = None


@dataclass(frozen=True)
class Names:
    """A names file: `renamed` is dump name -> model name, `declared` is by either name."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, Declared] = field(default_factory=dict)

    def of(self, *names: str) -> Declared:
        """What is declared under the first of `names` that is."""
        return next((self.declared[name] for name in names if name in self.declared), Declared())


def load_names(path: Path | None) -> Names:
    """Read a names file (TOML): `[names]` maps dump names to model names, each `[[tensor]]` declares one tensor.

    Raises RecordingError that names the key.
    """
    if path is None:
        return Names()
    with readable(path):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    _known_keys(content, ("names", "tensor"), str(path))
    renamed = content.get("names", {})
    tensors = content.get("tensor", [])
    if not isinstance(renamed, dict) or not all(isinstance(name, str) for name in renamed.values()):
        raise _wrong(f"{path}: [names] maps dump names to model names", '[names] "conv1_out" = "/conv1/Conv_output_0"')
    if not isinstance(tensors, list) or not all(
        isinstance(t, dict) and isinstance(t.get("name"), str) for t in tensors
    ):
        raise _wrong(f"{path}: every tensor is a table with a name", '[[tensor]] name = "conv1_out"')
    return Names(renamed, {table["name"]: _declared(table, f"{path}: tensor {table['name']}") for table in tensors})


def _declared(table: Mapping[str, Any], where: str) -> Declared:
    _known_keys(table, ("name", "dtype", "shape", "scale", "zero_point", "axis", "layout"), where)
    layout = table.get("layout")
    if layout not in (None, *LAYOUTS):
        raise _wrong(f"{where}: layout {layout!r} is unknown", "nhwc (channels last) or nchw")
    axis = table.get("axis")
    if axis is not None and (not isinstance(axis, int) or axis < 0):
        raise _wrong(f"{where}: axis {axis!r} is no number from 0 on", "axis = 1")
    scale = _numbers(table, "scale", (int, float), where)
    if scale is not None and not all(0 < number < math.inf for number in scale):
        raise _wrong(f"{where}: scale {table['scale']!r} is not positive", f"scale = {_EXAMPLE['scale']}")
    return Declared(
        dtype=_dtype(table.get("dtype"), where),
        shape=_numbers(table, "shape", int, where),
        scale=scale,
        zero_point=_numbers(table, "zero_point", int, where),
        axis=axis,
        layout=layout,
    )


def _dtype(name: object, where: str) -> np.dtype[Any] | None:
    if name is None:
        return None
    try:
        if isinstance(name, str):
            return numpy_dtype(name)
    except TypeError:
        pass
    raise _wrong(f"{where}: dtype {name!r} is unknown", 'dtype = "int8", "uint8", "float32" ...')


def _numbers(table: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    if key not in table:
        return None
    given = table[key] if isinstance(table[key], list) else [table[key]]
    if not all(isinstance(number, kind) and not isinstance(number, bool) for number in given):
        raise _wrong(f"{where}: {key} = {table[key]!r} is no number or list of numbers", f"{key} = {_EXAMPLE[key]}")
    return tuple(given)


_EXAMPLE = {"shape": "[1, 3, 8, 8]", "scale": "0.02", "zero_point": "128"}


def _known_keys(table: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise RecordingError(
                f"{where}: unknown key '{key}'",
                asked=key,
                nearest=near(key, allowed),
                hint=f"keys: {', '.join(allowed)}",
            )


def _wrong(message: str, example: str) -> RecordingError:
    return RecordingError(message, hint=f"write it so: {example}")


# -- matching ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """The model value that a dumped tensor is. `stored` is the stored value it is or stands for, None for neither.

    `native`: its name says that it holds the engine's own codes.
    """

    name: str
    stored: str | None
    native: bool = False


class Matcher:
    """Finds model values by the names that tools give them.

    In this order: the names file, the name itself, the name as tools write it into files (every character but letters
    and digits is `_`), and the same with runs of `_` as one and none at the ends. Only a single value is a match.
    """

    def __init__(self, graph: Graph, renamed: Mapping[str, str]) -> None:
        self.graph = graph
        self.renamed = renamed
        self.known = {*graph.values, *graph.producer, *graph.inputs, *graph.constants}
        named = [*graph.stored, *graph.alias_of]
        inner = [name for name in self.known if name not in set(named)]
        self.tiers = [(key, _keyed(names, key)) for key in (sanitised, collapsed) for names in (named, inner)]
        for name in renamed.values():
            if name not in self.known:
                raise RecordingError(
                    f"the names file speaks of '{name}', which is no value of the model",
                    asked=name,
                    nearest=near(name, self.known),
                    hint="inspect MODEL lists the values",
                )

    def match(self, dumped: str) -> Match | None:
        """The value that `dumped` is, or None."""
        if dumped in self.renamed:
            return self._matched(self.renamed[dumped], dumped)
        for name in _forms(dumped):
            if name in self.known:
                return self._matched(name, dumped)
        found = self.candidates(dumped)
        return self._matched(found[0], dumped) if len(found) == 1 else None

    def candidates(self, dumped: str) -> list[str]:
        """The values whose name a tool would write as `dumped`."""
        tries = ((key(name), names) for key, names in self.tiers for name in _forms(dumped))
        return next((names[written] for written, names in tries if written in names), [])

    def _matched(self, name: str, dumped: str) -> Match:
        return Match(name, self.graph.store(name), dumped.endswith(_NATIVE) and not name.endswith(_NATIVE))

    def rank(self, match: Match) -> int:
        """How near to the stored codes a name is: native codes, the stored value, the DQ output, the float before Q."""
        if match.native:
            return 0
        if match.name == match.stored:
            return 1
        return 2 if self.graph.producer[match.name].op_type in DEQUANTIZE else 3


def sanitised(name: str) -> str:
    """`/conv/Conv_output_0:0` as a file or C name: `_conv_Conv_output_0_0`."""
    return re.sub(r"[^0-9A-Za-z]", "_", name)


def collapsed(name: str) -> str:
    """The same with runs of `_` as one, and none at the ends (tools put one before a leading digit)."""
    return re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_")


def _keyed(names: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        found[key(name)].append(name)
    return dict(found)


def _forms(dumped: str) -> list[str]:
    """The name, and what is left of it without what tools add."""
    forms = [dumped]
    if dumped.endswith(_NATIVE):
        forms.append(dumped.removesuffix(_NATIVE))
    if runtime := _RKNN_RUNTIME.fullmatch(dumped):
        forms.append(runtime[1])
    return forms
