"""Is a twin its model? It is run on TFLite's reference kernels, and every step of it judged on the inputs the twin itself had.

A step is right when its codes are those of the `tflite-reference` profile; where they are not (TFLite has no kernel that is
compared with it), when it is within the legal excess of its operators. The outputs must be those of an untouched run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from equivcheck.models.graph import Array, Graph, Step
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.models.tflite.load import Flatbuffer, read_flatbuffer
from equivcheck.tolerance import legal_excess
from equivcheck.twins.convert import Converted
from equivcheck.vnpu.ir import Accumulate, Chain, Op
from equivcheck.vnpu.profiles import load_profile
from equivcheck.vnpu.program import Fallback, Program, compile_program
from equivcheck.vnpu.requantise import channel_axis, product_scale
from equivcheck.vnpu.targets import load_target


class Engine(Protocol):
    """What runs the twin: `equivcheck.engines.tflite`, here or in a process of its own."""

    def load(self, model: bytes, options: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]: ...


@dataclass(frozen=True, slots=True)
class Wrong:
    """A value of the twin that is not what its step should make: why, and how far beyond rounding (LSB)."""

    value: str
    step: int
    op_type: str
    reason: str


@dataclass(frozen=True, slots=True)
class Proof:
    """How many stored values were compared, how many have the very codes expected, how many others are legal, and the wrong."""

    compared: int
    equal: int
    legal: int
    wrong: tuple[Wrong, ...] = field(default=())

    @property
    def proved(self) -> bool:
        return not self.wrong and self.compared > 0


def prove(model: OnnxModel, twin: Converted, engine: Engine, feeds: Mapping[str, Array], fallback: Fallback) -> Proof:
    """Run the twin on `feeds` (of the ONNX model, by its input names) and judge every step.

    Raises whatever the engine raises.
    """
    graph = model.graph
    file = read_flatbuffer(twin.content, "the twin")
    values, wrong = _run(graph, twin, file, engine, feeds)
    program = compile_program(
        graph, profile=load_profile("tflite-reference"), target=load_target("all"), fallback=fallback
    )
    equal = legal = 0
    for step in graph.steps:
        expected = program.run_step(step, {name: values[name] for name in step.inputs})
        for name in step.outputs:
            found = values[name]
            if found.dtype == expected[name].dtype and np.array_equal(found, expected[name]):
                equal += 1
                continue
            reason = _not_legal(program, step, name, values, expected[name])
            if reason is None:
                legal += 1
            else:
                wrong.append(Wrong(name, step.id, step.op_type, reason))
    return Proof(sum(len(step.outputs) for step in graph.steps), equal, legal, tuple(wrong))


def _run(
    graph: Graph, twin: Converted, file: Flatbuffer, engine: Engine, feeds: Mapping[str, Array]
) -> tuple[dict[str, Array], list[Wrong]]:
    """Every stored value in the model's layout and codes; and what is wrong beside the steps."""
    turned = {twin.tensors[name]: twin.as_tensor(name, feeds[name]) for name in graph.inputs}
    ends = [file.tensors[index].name for index in file.outputs]
    engine.load(twin.content, {"kernels": "reference", "preserve": False})
    untouched = engine.run(turned, ends)
    watched = dict.fromkeys([*twin.tensors.values(), *ends])
    engine.load(
        twin.content,
        {"kernels": "reference", "preserve": True, "outputs": {name: file.index_of[name] for name in watched}},
    )
    found = engine.run(turned, list(watched))
    values = {name: _own_codes(graph, name, twin.as_value(name, found[twin.tensors[name]])) for name in graph.stored}
    wrong = [
        Wrong(name, 0, "quantisation", why)
        for name in graph.stored
        if (why := _other_parameters(graph, twin, file, name))
    ]
    for name, end in zip(graph.outputs, ends, strict=True):
        if not np.array_equal(found[end], untouched[end]):
            wrong.append(Wrong(name, 0, "output", "the untouched twin ends in other numbers"))
        if name not in values and not np.array_equal(found[end], twin.as_tensor(*_dequantised(graph, name, values))):
            wrong.append(Wrong(name, 0, "output", "not the codes before it times their scale"))
    return values, wrong


def _other_parameters(graph: Graph, twin: Converted, file: Flatbuffer, name: str) -> str | None:
    own, held = graph.quantisation.get(name), file.tensors[file.index_of[twin.tensors[name]]].quantisation
    if own is None or held is None:
        return None
    kinds = {own.dtype.name: 0, held.dtype.name: 0} | ({"uint8": 128} if own.dtype != held.dtype else {})
    zeros = (
        int(own.zero_point.ravel()[0]) - kinds[own.dtype.name],
        int(held.zero_point.ravel()[0]) - kinds[held.dtype.name],
    )
    if own.scale.ravel()[0] == held.scale.ravel()[0] and zeros[0] == zeros[1]:
        return None
    return f"scale {held.scale.ravel()[0]:.8g}, zero point {held.zero_point.ravel()[0]} are not the model's"


def _dequantised(graph: Graph, name: str, values: Mapping[str, Array]) -> tuple[str, Array]:
    """The stored value that an output stands for, and the reals of its codes (float32, rounded once)."""
    stored, quantisation = graph.store(name), graph.parameters(graph.producer[name])
    assert stored is not None
    assert quantisation is not None
    centred = values[stored].astype(np.int64) - int(quantisation.zero_point.ravel()[0])
    return stored, centred.astype(np.float32) * np.float32(quantisation.scale.ravel()[0])


def _own_codes(graph: Graph, name: str, array: Array) -> Array:
    """In the signedness of the model: int8 codes are uint8 codes less 128."""
    value, own = graph.values.get(name), graph.quantisation.get(name)
    dtype = (
        own.dtype if own is not None else np.dtype(value.dtype) if value is not None and value.dtype else array.dtype
    )
    if {dtype.name, array.dtype.name} == {"int8", "uint8"}:
        return (array.astype(np.int64) + (128 if dtype.name == "uint8" else -128)).astype(dtype)
    return array


def _not_legal(program: Program, step: Step, name: str, values: Mapping[str, Array], expected: Array) -> str | None:
    found = values[name]
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    real = program.real(step, values)
    if real is None or found.dtype.kind not in "iu":
        return f"{np.count_nonzero(found != expected)} of {found.size} elements are not what ONNX Runtime makes of them"
    codes = np.iinfo(found.dtype)
    off = np.abs(found - np.clip(real[name], codes.min, codes.max)) - 0.5
    op = _sum_of(program.op(step))
    ops = tuple(op for op in step.ops if op not in ("Relu", "Clip", "DequantizeLinear")) or step.ops
    multiplier = None if op is None else product_scale(op) / op.out.scale
    excess = legal_excess(ops, multiplier)
    axis = 0 if op is None else channel_axis(op)
    channels = np.moveaxis(np.atleast_1d(off), axis, 0)
    over = channels.reshape(channels.shape[0], -1).max(axis=1) - excess.limits(channels.shape[0])
    if np.all(over <= 0):
        return None
    return f"{float(off.max()):.2g} LSB beyond rounding; {excess.rule} is {excess.base:g}"


def _sum_of(op: Op | None) -> Accumulate | None:
    """The convolution or product in a step."""
    links = op.links if isinstance(op, Chain) else (op,)
    return next((link for link in links if isinstance(link, Accumulate)), None)
