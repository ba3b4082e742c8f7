"""Cuts an ONNX graph: a part between given values, with only what that part needs.

One function, `part`, is behind heads, tails, single steps and the isolated model; they differ in what they cut and in
which value stands for which. Cuts are at names of the model it is given (its file or its QDQ form).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from equivcheck.errors import ModelError
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.load import OnnxModel, captured_names

ArraySpec = tuple[np.dtype, tuple[int, ...]]


def part(
    proto: onnx.ModelProto,
    *,
    inputs: Mapping[str, ArraySpec | None],
    outputs: Sequence[str],
    rename_input: Callable[[str], str] = lambda name: name,
    edit: Callable[[onnx.NodeProto], list[onnx.NodeProto]] | None = None,
) -> onnx.ModelProto:
    """Return the model that computes `outputs` from `inputs`, carrying over only the nodes and weights it needs.

    `inputs` maps value names to (dtype, shape), or to None to keep the type the model declares. Each becomes a graph
    input called `rename_input(name)`; where that differs, the value's producer may stay in the part too (that is what
    makes the isolated model: a step's output is computed, while its readers read the fed copy). `edit` may replace a
    node by several. Opsets, IR version, functions, metadata and doc string are kept.

    Raises ModelError when an output can be reached neither from nodes nor from `inputs`.
    """
    graph = proto.graph
    producer = {out: k for k, node in enumerate(graph.node) for out in node.output if out}
    constants = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    model_inputs = {port.name for port in graph.input}
    fed = set(inputs)
    wanted: set[int] = set()
    reached: set[str] = set()
    used: set[str] = set()
    pending = list(outputs)
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        if name not in producer:
            if name not in fed and name not in constants and name not in model_inputs:
                raise ModelError(f"no value '{name}' in the model", asked=name)
            used.add(name)
            continue
        k = producer[name]
        if k in wanted:
            continue
        wanted.add(k)
        for read in [*(i for i in graph.node[k].input if i), *captured_names(graph.node[k])]:
            if read in fed:
                used.add(read)
            else:
                pending.append(read)
    return _assemble(proto, sorted(wanted), used, inputs, outputs, rename_input, edit)


def _assemble(
    proto: onnx.ModelProto,
    nodes: Sequence[int],
    used: set[str],
    inputs: Mapping[str, ArraySpec | None],
    outputs: Sequence[str],
    rename_input: Callable[[str], str],
    edit: Callable[[onnx.NodeProto], list[onnx.NodeProto]] | None,
) -> onnx.ModelProto:
    graph = proto.graph
    made = onnx.ModelProto(ir_version=proto.ir_version, producer_name=proto.producer_name, doc_string=proto.doc_string)
    made.opset_import.extend(proto.opset_import)
    made.functions.extend(proto.functions)
    made.metadata_props.extend(proto.metadata_props)
    made.graph.name = graph.name or "part"
    made.graph.doc_string = graph.doc_string
    renamed = {name: rename_input(name) for name in inputs if rename_input(name) != name}
    reads: set[str] = set()
    for k in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(graph.node[k])
        for j, name in enumerate(copy.input):
            copy.input[j] = renamed.get(name, name)
        for body_reads in captured_names(copy):
            if body_reads in renamed:
                _rename_captured(copy, body_reads, renamed[body_reads])
        made.graph.node.extend(edit(copy) if edit is not None else [copy])
    for node in made.graph.node:
        reads.update(name for name in node.input if name)
        reads.update(captured_names(node))
    _add_ports(made, proto, inputs, outputs, renamed, reads)
    made.graph.initializer.extend(t for t in graph.initializer if t.name in reads or t.name in outputs)
    made.graph.sparse_initializer.extend(s for s in graph.sparse_initializer if s.values.name in reads)
    return made


def _add_ports(
    made: onnx.ModelProto,
    proto: onnx.ModelProto,
    inputs: Mapping[str, ArraySpec | None],
    outputs: Sequence[str],
    renamed: Mapping[str, str],
    reads: set[str],
) -> None:
    declared = {port.name: port for port in [*proto.graph.value_info, *proto.graph.output, *proto.graph.input]}
    constants = {t.name for t in proto.graph.initializer}
    for port in proto.graph.input:  # an input of the model that is neither fed nor a weight stays an input
        if port.name not in inputs and port.name in reads and port.name not in constants:
            made.graph.input.append(port)
    for name, spec in inputs.items():
        port_name = renamed.get(name, name)
        if port_name not in reads and port_name not in outputs:
            continue
        if spec is None:
            if name not in declared:
                raise ModelError(f"the type of value '{name}' is not known", asked=name)
            made.graph.input.append(_renamed_port(declared[name], port_name))
        else:
            dtype, shape = spec
            made.graph.input.append(
                helper.make_tensor_value_info(port_name, helper.np_dtype_to_tensor_dtype(dtype), shape)
            )
    for name in dict.fromkeys(outputs):
        made.graph.output.append(onnx.ValueInfoProto(name=name))


def _renamed_port(port: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(port)
    copy.name = name
    return copy


def _rename_captured(node: onnx.NodeProto, old: str, new: str) -> None:
    for attribute in node.attribute:
        for body in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            for inner in body.node:
                for j, name in enumerate(inner.input):
                    if name == old:
                        inner.input[j] = new
                _rename_captured(inner, old, new)


def head(model: OnnxModel, values: Iterable[str]) -> onnx.ModelProto:
    """Return the model from its start to the stored `values`, each ended at a DequantizeLinear output.

    Ending at the int8 value would leave the last operator unfused, and at the float before Q it would not be
    quantised at all (FACTS: both give other numbers than the deployed model). `head_outputs` names the outputs.
    """
    graph = model.graph
    return part(model.qdq.proto, inputs=dict.fromkeys(graph.inputs), outputs=[dequantised(graph, v) for v in values])


def dequantised(graph: Graph, stored: str) -> str:
    """Name of the DQ output that shows `stored`, or `stored` itself where no DQ reads it."""
    for node in graph.consumers.get(stored, ()):
        if node.op_type == "DequantizeLinear" and node.inputs[0] == stored:
            return node.outputs[0]
    return stored


def codes_of(array: Array, graph: Graph, stored: str) -> tuple[Array, float]:
    """Turn a dequantised float array back into codes of `stored`.

    Returns (codes, distance): the largest distance from the grid in steps; above 1e-3 the engine did not quantise there.
    """
    quantisation = graph.quantisation[stored]
    scale, zero = quantisation.along(array.ndim)
    exact = array.astype(np.float64) / scale + zero
    rounded = np.rint(exact)
    bounds = np.iinfo(quantisation.dtype)
    distance = float(np.max(np.abs(exact - rounded), initial=0.0))
    return np.clip(rounded, bounds.min, bounds.max).astype(quantisation.dtype), distance
