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

from equivcheck.models.onnx.cut import needed, part
from equivcheck.models.onnx.load import OnnxModel, captured_names, dtype_name
from equivcheck.models.select import Selected

Place = Literal["before", "after"]
TypeOracle = Callable[[onnx.ModelProto], Mapping[str, onnx.ValueInfoProto]]

# Types that numpy (and so a dump, and ONNX Runtime's Python) cannot hold, and what carries them without loss.
_EXCHANGE = {
    TensorProto.BFLOAT16: TensorProto.FLOAT,
    TensorProto.FLOAT8E4M3FN: TensorProto.FLOAT,
    TensorProto.FLOAT8E4M3FNUZ: TensorProto.FLOAT,
    TensorProto.FLOAT8E5M2: TensorProto.FLOAT,
    TensorProto.FLOAT8E5M2FNUZ: TensorProto.FLOAT,
    TensorProto.INT4: TensorProto.INT8,
    TensorProto.UINT4: TensorProto.UINT8,
}


@dataclass(frozen=True)
class Cut:
    """Where a model is cut, in the names of its file. `head_nodes` and `tail_nodes` index its nodes."""

    point: Selected
    place: Place
    boundary: tuple[str, ...]
    head_outputs: tuple[str, ...]
    tail_outputs: tuple[str, ...]
    head_nodes: tuple[int, ...]
    tail_nodes: tuple[int, ...]
    notes: tuple[str, ...] = ()


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
    read = {name for k in tail for name in _reads(proto.graph.node[k])}
    crossing = [name for name in _in_order(proto, made) if name in read]
    own_outputs = [name for name in outputs if name in made]
    return Cut(
        point=point,
        place=place,
        boundary=tuple(crossing),
        head_outputs=tuple(dict.fromkeys([*frontier, *crossing, *own_outputs])),
        tail_outputs=tuple(tail_outputs),
        head_nodes=tuple(head),
        tail_nodes=tuple(tail),
        notes=tuple(_notes(proto, point, frontier, made, read, tail)),
    )


def _frontier(point: Selected, place: Place) -> tuple[str, ...]:
    """The values that a cut is at; before a node that reads nothing but constants, those constants."""
    if place == "after" or point.node is None:
        return point.after
    return point.before or tuple(dict.fromkeys(name for name in point.node.inputs if name)) or point.after


def _reads(node: onnx.NodeProto) -> list[str]:
    return [*(name for name in node.input if name), *captured_names(node)]


def _constant_nodes(proto: onnx.ModelProto) -> set[int]:
    """Nodes that no model input reaches; both parts may have them, so nothing of theirs crosses."""
    known = {t.name for t in proto.graph.initializer} | {s.values.name for s in proto.graph.sparse_initializer}
    found: set[int] = set()
    for k, node in enumerate(proto.graph.node):
        if all(name in known for name in _reads(node)):
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
    if cut.tail_nodes or (cut.tail_outputs and cut.boundary):
        declared = onnx.ModelProto()
        declared.CopyFrom(proto)
        known = {port.name for port in [*declared.graph.value_info, *declared.graph.output, *declared.graph.input]}
        declared.graph.value_info.extend(types[name] for name in cut.boundary if name not in known and name in types)
        tail = part(declared, inputs=inputs | dict.fromkeys(cut.boundary), outputs=cut.tail_outputs)
        _type_outputs(tail, types)
    exotic = {name: types[name] for name in cut.head_outputs if _element(types.get(name)) in _EXCHANGE}
    for name, port in exotic.items():
        _cast_output(head, name, port)
        if tail is not None and name in cut.boundary:
            _cast_input(tail, name, port)
    return Parts(cut, head, tail, {name: dtype_name(_element(port)) for name, port in exotic.items()})


def _element(port: onnx.ValueInfoProto | None) -> int:
    return 0 if port is None else int(port.type.tensor_type.elem_type)


def _port_types(proto: onnx.ModelProto, names: Iterable[str], oracle: TypeOracle) -> dict[str, onnx.ValueInfoProto]:
    known = {
        port.name: port for port in [*proto.graph.value_info, *proto.graph.output, *proto.graph.input] if _typed(port)
    }
    missing = [name for name in dict.fromkeys(names) if name not in known]
    if missing:
        known |= _inferred(proto)
        missing = [name for name in missing if name not in known]
    if missing:
        inputs = {port.name: None for port in proto.graph.input}
        known |= oracle(part(proto, inputs=inputs, outputs=missing))
    return known


def _typed(port: onnx.ValueInfoProto) -> bool:
    return port.type.WhichOneof("value") is not None


def _inferred(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    try:
        graph = onnx.shape_inference.infer_shapes(proto).graph
    except Exception:  # contrib operators and the like: the oracle knows
        return {}
    return {port.name: port for port in graph.value_info if _typed(port)}


def _type_outputs(made: onnx.ModelProto, types: Mapping[str, onnx.ValueInfoProto]) -> None:
    ports = [types.get(port.name, port) for port in made.graph.output]
    del made.graph.output[:]
    made.graph.output.extend(ports)


def _cast_output(made: onnx.ModelProto, name: str, port: onnx.ValueInfoProto) -> None:
    """Hand `name` over in its exchange type: the node now makes an inner value, and a Cast makes `name`."""
    inner = _rename_everywhere(made, name, port)
    exchange = _EXCHANGE[port.type.tensor_type.elem_type]
    made.graph.node.append(helper.make_node("Cast", [inner], [name], name=f"{name}/exchange", to=exchange))
    for output in made.graph.output:
        if output.name == name:
            output.CopyFrom(_retyped(port, exchange))


def _cast_input(made: onnx.ModelProto, name: str, port: onnx.ValueInfoProto) -> None:
    """Take `name` in its exchange type, and cast it back before anything reads it."""
    inner = _rename_everywhere(made, name, port)
    element = port.type.tensor_type.elem_type
    made.graph.node.insert(0, helper.make_node("Cast", [name], [inner], name=f"{name}/exchange", to=element))
    for entry in made.graph.input:
        if entry.name == name:
            entry.CopyFrom(_retyped(port, _EXCHANGE[element]))


def _rename_everywhere(made: onnx.ModelProto, name: str, port: onnx.ValueInfoProto) -> str:
    inner = f"{name}/{dtype_name(port.type.tensor_type.elem_type)}"
    for node in made.graph.node:
        for names in (node.input, node.output):
            for j, found in enumerate(names):
                if found == name:
                    names[j] = inner
    return inner


def _retyped(port: onnx.ValueInfoProto, element: int) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(port)
    copy.type.tensor_type.elem_type = element
    return copy
