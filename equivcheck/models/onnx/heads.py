"""Heads: one truncated model a stored value, for engines that compile what they are given; and codes from what they return.

A head ends at a DequantizeLinear, so that the engine fuses its last operator as it does within the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.cut import codes_of, part
from equivcheck.models.onnx.load import OnnxModel

_TYPED = frozenset("float16 float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool".split())


def wanted_values(graph: Graph) -> list[str]:
    """The stored values that a run has to show: all but the graph's inputs."""
    return [name for name in graph.stored if name not in graph.inputs]


def head_to(model: OnnxModel, outputs: Sequence[str]) -> onnx.ModelProto:
    """The model from its start to `outputs`, with types on them where they are known: compilers want them."""
    made = part(model.qdq.proto, inputs=dict.fromkeys(model.graph.inputs), outputs=outputs)
    for k, port in enumerate(made.graph.output):
        value = model.graph.values.get(port.name)
        if value is not None and value.shape is not None and value.dtype in _TYPED:
            element = helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
            made.graph.output[k].CopyFrom(helper.make_tensor_value_info(port.name, element, value.shape))
    return made


@dataclass
class Seen:
    """What a run showed of the stored values of `graph`, in codes where they are quantised.

    `failed` has the reason for each that is missing; `off_grid` how far, in steps, a value read as float was from its grid;
    `disturbed` is whether a value shown at an output of the model differs from the untouched one (None: not compared).
    """

    graph: Graph
    values: dict[str, Array]
    how: dict[str, str]
    failed: dict[str, str] = field(default_factory=dict)
    off_grid: dict[str, float] = field(default_factory=dict)
    disturbed: bool | None = None

    @classmethod
    def of_feeds(cls, graph: Graph, feeds: Mapping[str, Array]) -> Seen:
        """What is known before anything ran."""
        return cls(graph, dict(feeds), dict.fromkeys(feeds, "fed"))

    def take(self, name: str, shown: str, got: Mapping[str, Array], how: str) -> None:
        """Keep what was returned for the stored value `name`, shown as `shown`, or say why not."""
        array = got.get(shown)
        problem = f"run() returned no '{shown}'" if array is None else _misfit(self.graph, name, shown, array)
        if problem or array is None:
            self.failed[name] = problem
            return
        quantisation = self.graph.quantisation.get(name)
        if quantisation is not None and array.dtype != quantisation.dtype:
            array, self.off_grid[name] = codes_of(array, self.graph, name)
        self.values[name], self.how[name] = array, how

    def compare_outputs(self, outputs: Mapping[str, Array], got: Mapping[str, Array]) -> None:
        """Hold what a head gave at an output of the model against the untouched one."""
        for name in outputs.keys() & got.keys():
            self.disturbed = bool(self.disturbed) or not _equal(outputs[name], got[name])


def _misfit(graph: Graph, name: str, shown: str, array: Array) -> str:
    """Why `array` cannot be the value `shown`, or nothing. Codes are taken in place of the reals they stand for."""
    value = graph.values.get(shown)
    shape = value.shape if value is not None else None
    fixed = tuple(dim for dim in shape or () if isinstance(dim, int))
    if shape is not None and len(fixed) == len(shape) and array.shape != fixed:
        hint = " (another layout?)" if sorted(array.shape) == sorted(fixed) else ""
        return f"run() returned shape {list(array.shape)} for '{shown}', the model says {list(fixed)}{hint}"
    quantisation = graph.quantisation.get(name)
    if quantisation is not None and array.dtype == quantisation.dtype:
        return ""
    if quantisation is not None and shown != name:
        return (
            ""
            if array.dtype.kind == "f"
            else f"run() returned {array.dtype} for '{shown}', neither reals nor its codes"
        )
    declared = value.dtype if value is not None else None
    same = declared is None or declared == str(array.dtype)
    return "" if same else f"run() returned {array.dtype} for '{shown}', the model says {declared}"


def _equal(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f" and other.dtype.kind == "f"))
