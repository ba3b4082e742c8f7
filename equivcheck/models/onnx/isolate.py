"""The isolated model: every step an island with inputs of its own, so that one run evaluates all of them.

Three forms of the same surgery:

* `real`: each step gives its float result before the Q, from which the real value in codes follows;
* `codes`: each step gives what its Q stores (for engines that do not mind);
* `dequantised`: each step ends at a DequantizeLinear output (for engines that fuse; see `cut.head`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx
from onnx import helper

from equivcheck.models.graph import Array, Graph, Step
from equivcheck.models.onnx.cut import ArraySpec, dequantised, part
from equivcheck.models.onnx.load import OnnxModel

Form = Literal["real", "codes", "dequantised"]
NOISE_LSB = 0.3  # measured: +-0.3 LSB before each missing Q covered all 16 legal dumps with values missing


@dataclass(frozen=True, eq=False)
class Isolated:
    """An isolated model. Feed `feeds[name]` with stored value `name`; read stored value `v` at output `outputs[v]`."""

    proto: onnx.ModelProto
    feeds: Mapping[str, str]
    outputs: Mapping[str, str]
    passthrough: Mapping[str, str] = field(default_factory=dict)

    def feed(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Pick and rename what this model needs from stored `values`."""
        return {port: values[name] for name, port in self.feeds.items()}


def isolate(
    model: OnnxModel,
    cuts: Mapping[str, ArraySpec],
    *,
    form: Form,
    steps: Iterable[Step] | None = None,
    noise: Collection[str] = (),
    wanted: Collection[str] = (),
) -> Isolated:
    """Cut `model` at every stored value of `cuts` (name -> dtype and shape) and keep `steps` (default all).

    Each step gives its outputs that are in `cuts` or in `wanted`.

    A stored value outside `cuts` is computed from its own step's inputs, inner Q and DQ kept: its step is merged with
    its readers. `noise` names such values that get uniform noise of +-0.3 LSB before their Q, anew at every run.
    """
    graph = model.graph
    chosen = list(graph.steps if steps is None else steps)
    given = [out for step in chosen for out in step.outputs if out in cuts or out in wanted]
    taken = set(graph.values) | set(graph.producer) | set(graph.constants) | set(graph.inputs)
    rename = {name: name if name in graph.inputs else _free(f"{name}/fed", taken) for name in cuts}
    outputs, passthrough = {}, {}
    for name in given:
        shown = _shown(graph, name, form)
        if (shown in cuts and form != "codes" and shown != name) or shown in graph.inputs:
            passthrough[name] = shown  # the real value is an input as it is: nothing to compute
        else:
            outputs[name] = shown
    extra = {shown: name for name, shown in outputs.items() if form == "dequantised" and shown != name}
    proto = part(
        model.qdq.proto,
        inputs=dict(cuts),
        outputs=list(dict.fromkeys([*(n for n in outputs.values() if n not in extra), *extra.values()])),
        rename_input=lambda name: rename[name],
        edit=_noisy(graph, frozenset(noise)) if noise else None,
    )
    if extra:
        _end_at_dequantise(proto, graph, extra, taken, outputs)
    ports = {port.name for port in proto.graph.input}
    return Isolated(proto, {name: port for name, port in rename.items() if port in ports}, outputs, passthrough)


def step_model(model: OnnxModel, step: Step, inputs: Mapping[str, ArraySpec]) -> onnx.ModelProto:
    """Return one step alone, from stored values `inputs` to the stored values it makes, names kept.

    Works in time of the step, not of the model: the CPU side of a placement may need thousands of these.
    """
    proto, graph = model.qdq.proto, model.graph
    wanted = set(step.nodes)
    pending = [name for index in step.nodes for name in graph.reads(graph.nodes[index])]
    reads: set[str] = set()
    while pending:
        name = pending.pop()
        source = graph.producer.get(name)
        if name in reads or name in inputs:
            continue
        reads.add(name)
        if source is not None and source.index not in wanted:
            wanted.add(source.index)
            pending += graph.reads(source)
    small = onnx.ModelProto(ir_version=proto.ir_version)
    small.opset_import.extend(proto.opset_import)
    small.functions.extend(proto.functions)
    small.graph.name = f"step {step.id}"
    small.graph.node.extend(proto.graph.node[index] for index in sorted(wanted))
    small.graph.initializer.extend(model.initializers[name] for name in sorted(reads & model.initializers.keys()))
    small.graph.sparse_initializer.extend(s for s in proto.graph.sparse_initializer if s.values.name in reads)
    return part(small, inputs=inputs, outputs=step.outputs)


def _free(stem: str, taken: set[str]) -> str:
    name = stem
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _shown(graph: Graph, name: str, form: Form) -> str:
    producer = graph.producer[name]
    if form == "codes" or producer.op_type != "QuantizeLinear" or graph.parameters(producer) is None:
        return name
    return producer.inputs[0] if form == "real" else dequantised(graph, name)


def _end_at_dequantise(
    proto: onnx.ModelProto, graph: Graph, extra: Mapping[str, str], taken: set[str], outputs: dict[str, str]
) -> None:
    """Replace each coded output by a DequantizeLinear of its own: the model's own DQ reads the fed copy."""
    coded = set(extra.values())
    kept = [port for port in proto.graph.output if port.name not in coded]
    for shown, name in extra.items():
        quantise = graph.producer[name]
        out = _free(f"{shown}/shown", taken)
        parameters = [i for i in quantise.inputs[1:3] if i]
        more = {"axis": quantise.attributes["axis"]} if "axis" in quantise.attributes else {}
        node = helper.make_node(
            "DequantizeLinear", [name, *parameters], [out], name=out, domain=quantise.domain, **more
        )
        proto.graph.node.append(node)
        kept.append(onnx.ValueInfoProto(name=out))
        outputs[name] = out
    del proto.graph.output[:]
    proto.graph.output.extend(kept)


def _noisy(graph: Graph, noisy: frozenset[str]) -> Callable[[onnx.NodeProto], list[onnx.NodeProto]]:
    """An edit that adds +-0.3 LSB of uniform noise before the Q of each value of `noisy`."""

    def edit(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if node.op_type != "QuantizeLinear" or node.output[0] not in noisy or node.output[0] not in graph.quantisation:
            return [node]
        width = NOISE_LSB * float(np.max(graph.quantisation[node.output[0]].scale))
        source, noise, sum_ = node.input[0], f"{node.output[0]}/noise", f"{node.output[0]}/noisy"
        node.input[0] = sum_
        seed = float(len(noise) + sum(noise.encode()) % 9973)
        return [
            helper.make_node("RandomUniformLike", [source], [noise], name=noise, low=-width, high=width, seed=seed),
            helper.make_node("Add", [source, noise], [sum_], name=sum_),
            node,
        ]

    return edit


def spec_of(array: Array) -> ArraySpec:
    """(dtype, shape) of an array, as `isolate` and `part` take it."""
    return array.dtype, tuple(array.shape)


def real_in_codes(graph: Graph, name: str, result: Array) -> Array:
    """Turn a step's float result into the real value in codes of stored value `name`: result / scale + zero point.

    float64; not rounded, not clipped. A value that is not quantised (float), or made of codes already, is returned as it is.
    """
    quantisation = graph.quantisation.get(name)
    if quantisation is None:
        return result
    if result.dtype.kind in "iu":
        return result.astype(np.float64)
    scale, zero = quantisation.along(result.ndim)
    real = result.astype(np.float64)
    real /= scale
    real += zero
    return real
