"""Cuts a model in two at a node or value: a head up to it, a tail from it, and all the tensors that cross.

Of a cut *before* a node the head computes what the node reads; *after* it, what the node makes. The tail computes every model
output that the head does not, and takes whatever crosses: skip connections past the cut are part of the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import onnx
from onnx import TensorProto, helper

from equivcheck.errors import EngineRefused
from equivcheck.models.graph import RANDOM
from equivcheck.models.onnx.cut import fresh, needed, part, rename_captured, value_names
from equivcheck.models.onnx.load import OnnxModel, captured_names, dtype_name
from equivcheck.models.select import Selected

Place = Literal["before", "after"]
TypeOracle = Callable[[onnx.ModelProto], Mapping[str, onnx.ValueInfoProto]]

# Types that numpy (and so a dump, and ONNX Runtime's Python) cannot hold, and what carries them without loss. By name:
# older releases of onnx do not know the last ones.
_EXCHANGE: dict[int, int] = {
    TensorProto.DataType.Value(narrow): wide
    for wide, narrows in {
        TensorProto.FLOAT: "BFLOAT16 FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ FLOAT8E8M0",
        TensorProto.INT8: "INT4 INT2",
        TensorProto.UINT8: "UINT4 UINT2",
    }.items()
    for narrow in narrows.split()
    if narrow in TensorProto.DataType.keys()  # noqa: SIM118  # not a dict
}


@dataclass(frozen=True)
class Cut:
    """Where a model is cut, in the names of its file. `head_nodes` and `tail_nodes` index its nodes.

    `empty` is the part that has nothing to compute, because the cut is at an input or behind the last node.
    """

    point: Selected
    place: Place
    boundary: tuple[str, ...]
    head_outputs: tuple[str, ...]
    tail_outputs: tuple[str, ...]
    head_nodes: tuple[int, ...]
    tail_nodes: tuple[int, ...]
    notes: tuple[str, ...] = ()
    empty: Literal["head", "tail"] | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """The two models of a cut; `tail` is None where nothing is left to compute. `exchanged` maps a boundary tensor to its
    own type, where it is handed over in a wider one.
    """

    cut: Cut
    head: onnx.ModelProto
    tail: onnx.ModelProto | None
    exchanged: Mapping[str, str] = field(default_factory=dict)


def find_cut(model: OnnxModel, point: Selected, place: Place) -> Cut:
    """Decide which nodes belong to the head and to the tail of a cut at `point`, and what crosses."""
    proto = model.proto
    frontier = _frontier(point, place)
    constants = _constant_nodes(proto)
    head = needed(proto, frontier, ())
    made = {out for k in head if k not in constants for out in proto.graph.node[k].output if out}
    outputs = [port.name for port in proto.graph.output]
    tail_outputs = [name for name in outputs if name not in made]
    tail = needed(proto, tail_outputs, made)
    own_outputs = [name for name in outputs if name in made]
    if not tail:  # outputs that no node computes (an input, a weight) are no reason for a tail
        own_outputs, tail_outputs = outputs, []
    read = {name for k in tail for name in _reads(proto.graph.node[k])}
    crossing = [name for name in _in_order(proto, made) if name in read]
    return Cut(
        point=point,
        place=place,
        boundary=tuple(crossing),
        head_outputs=tuple(dict.fromkeys([*frontier, *crossing, *own_outputs])),
        tail_outputs=tuple(tail_outputs),
        head_nodes=tuple(head),
        tail_nodes=tuple(tail),
        notes=tuple(_notes(proto, point, frontier, made, read, tail)),
        empty="head" if not made else "tail" if not tail else None,
    )


def _frontier(point: Selected, place: Place) -> tuple[str, ...]:
    """The values that a cut is at; before a node that reads nothing but constants, those constants."""
    if place == "after" or point.node is None:
        return point.after
    return point.before or tuple(dict.fromkeys(name for name in point.node.inputs if name)) or point.after


def _reads(node: onnx.NodeProto) -> list[str]:
    return [*(name for name in node.input if name), *captured_names(node)]


def _constant_nodes(proto: onnx.ModelProto) -> set[int]:
    """Nodes that no model input reaches and that are not random; both parts may have them, so nothing of theirs crosses."""
    known = {t.name for t in proto.graph.initializer} | {s.values.name for s in proto.graph.sparse_initializer}
    found: set[int] = set()
    for k, node in enumerate(proto.graph.node):
        if node.op_type not in RANDOM and all(name in known for name in _reads(node)):
            known.update(node.output)
            found.add(k)
    return found


def _in_order(proto: onnx.ModelProto, names: Iterable[str]) -> list[str]:
    wanted = set(names)
    return [out for node in proto.graph.node for out in node.output if out in wanted]


def _notes(
    proto: onnx.ModelProto,
    point: Selected,
    frontier: Sequence[str],
    made: set[str],
    read: set[str],
    tail: Sequence[int],
) -> list[str]:
    notes = []
    outputs = {port.name for port in proto.graph.output}
    if not made:
        notes.append("the head computes nothing: only inputs or constants lie before this cut")
    if not tail:
        notes.append("the head computes everything: no node is left for a tail")
    dead = [name for name in frontier if name in made and name not in read and name not in outputs]
    if dead and tail:
        notes.append(f"no model output depends on {', '.join(dead)}")
    return notes


def build_parts(model: OnnxModel, cut: Cut, oracle: TypeOracle) -> Parts:
    """Build head and tail. `oracle` gives the types of a model's outputs, for what shape inference does not know."""
    proto = model.proto
    types = _port_types(proto, [*cut.head_outputs, *cut.tail_outputs], oracle)
    inputs = dict.fromkeys(model.graph.inputs)
    head = part(proto, inputs=inputs, outputs=cut.head_outputs)
    _type_outputs(head, types)
    tail = None
    if cut.tail_nodes:
        tail = part(proto, inputs=inputs | dict.fromkeys(cut.boundary), outputs=cut.tail_outputs, types=types)
        _type_outputs(tail, types)
    exotic = _to_exchange(head)
    for name, port in exotic.items():
        _cast_output(head, name, port)
        if tail is not None and name in cut.boundary:
            _cast_input(tail, name, port)
    return Parts(cut, head, tail, {name: dtype_name(port.type.tensor_type.elem_type) for name, port in exotic.items()})


def readable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto`, or where numpy cannot hold an output of its, a copy that hands it over in its exchange type."""
    if not _to_exchange(proto):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for name, port in _to_exchange(copy).items():
        _cast_output(copy, name, port)
    return copy


def _to_exchange(made: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Outputs of a type that numpy cannot hold; an input that is passed on has to stay as it is."""
    inputs = {port.name for port in made.graph.input}
    found = {}
    for port in made.graph.output:
        if port.type.tensor_type.elem_type in _EXCHANGE and port.name not in inputs:
            found[port.name] = copy = onnx.ValueInfoProto()
            copy.CopyFrom(port)
    return found


def _port_types(proto: onnx.ModelProto, names: Iterable[str], oracle: TypeOracle) -> dict[str, onnx.ValueInfoProto]:
    """Types of the values `names`: as declared, else inferred, else by the oracle. A type without a shape is a last resort."""
    known: dict[str, onnx.ValueInfoProto] = {}

    def unknown_after(ports: Iterable[onnx.ValueInfoProto]) -> list[str]:
        for port in ports:
            if _typed(port) and (port.name not in known or (_shaped(port) and not _shaped(known[port.name]))):
                known[port.name] = port
        return [name for name in dict.fromkeys(names) if name not in known or not _shaped(known[name])]

    constants = (helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in proto.graph.initializer)
    missing = unknown_after([*proto.graph.value_info, *proto.graph.output, *proto.graph.input, *constants])
    if missing:
        missing = unknown_after(_inferred(proto))
    if missing:
        weights = {tensor.name for tensor in proto.graph.initializer}
        inputs = {port.name: None for port in proto.graph.input if port.name not in weights}
        try:
            unknown_after(oracle(part(proto, inputs=inputs, outputs=missing)).values())
        except EngineRefused:
            if any(name not in known for name in missing):
                raise
    return known


def _typed(port: onnx.ValueInfoProto) -> bool:
    kind = port.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or port.type.tensor_type.elem_type != TensorProto.UNDEFINED)


def _shaped(port: onnx.ValueInfoProto) -> bool:
    return not port.type.HasField("tensor_type") or port.type.tensor_type.HasField("shape")


def _inferred(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    try:
        return list(onnx.shape_inference.infer_shapes(proto).graph.value_info)
    except Exception:  # contrib operators and the like: the oracle knows
        return []


def _type_outputs(made: onnx.ModelProto, types: Mapping[str, onnx.ValueInfoProto]) -> None:
    ports = [types.get(port.name, port) for port in made.graph.output]
    del made.graph.output[:]
    made.graph.output.extend(ports)


def _cast_output(made: onnx.ModelProto, name: str, port: onnx.ValueInfoProto) -> None:
    """Hand `name` over in its exchange type: the node now makes an inner value, and a Cast makes `name`."""
    inner = _rename_everywhere(made, name, port)
    exchange = _EXCHANGE[port.type.tensor_type.elem_type]
    made.graph.node.append(helper.make_node("Cast", [inner], [name], name=_node_name(made, name), to=exchange))
    for output in made.graph.output:
        if output.name == name:
            output.CopyFrom(_retyped(port, exchange))


def _cast_input(made: onnx.ModelProto, name: str, port: onnx.ValueInfoProto) -> None:
    """Take `name` in its exchange type, and cast it back before anything reads it."""
    inner = _rename_everywhere(made, name, port)
    element = port.type.tensor_type.elem_type
    made.graph.node.insert(0, helper.make_node("Cast", [name], [inner], name=_node_name(made, name), to=element))
    for entry in made.graph.input:
        if entry.name == name:
            entry.CopyFrom(_retyped(port, _EXCHANGE[element]))


def _rename_everywhere(made: onnx.ModelProto, name: str, port: onnx.ValueInfoProto) -> str:
    taken = value_names(made.graph.node) | {port.name for port in [*made.graph.input, *made.graph.output]}
    inner = fresh(f"{name}/{dtype_name(port.type.tensor_type.elem_type)}", taken)
    for node in made.graph.node:
        for names in (node.input, node.output):
            for j, found in enumerate(names):
                if found == name:
                    names[j] = inner
        rename_captured(node, name, inner)
    for tensor in [*made.graph.initializer, *(s.values for s in made.graph.sparse_initializer)]:
        if tensor.name == name:
            tensor.name = inner
    return inner


def _node_name(made: onnx.ModelProto, name: str) -> str:
    return fresh(f"{name}/exchange", {node.name for node in made.graph.node})


def _retyped(port: onnx.ValueInfoProto, element: int) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(port)
    copy.type.tensor_type.elem_type = element
    return copy
