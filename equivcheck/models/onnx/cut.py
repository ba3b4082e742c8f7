"""Cuts an ONNX graph: a part between given values, with only what that part needs.

One function, `part`, is behind heads, tails, single steps and the isolated model; they differ in what they cut and in
which value stands for which. Cuts are at names of the model it is given (its file or its QDQ form).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count

import numpy as np
import onnx
from onnx import helper

from equivcheck.errors import ModelError
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.load import OnnxModel, bodies, captured_names

ArraySpec = tuple[np.dtype, tuple[int, ...]]
_BLOCK = 1 << 15  # elements: their float64 scratch stays in the L2 cache


def part(
    proto: onnx.ModelProto,
    *,
    inputs: Mapping[str, ArraySpec | None],
    outputs: Sequence[str],
    rename_input: Callable[[str], str] = lambda name: name,
    edit: Callable[[onnx.NodeProto], list[onnx.NodeProto]] | None = None,
    types: Mapping[str, onnx.ValueInfoProto] | None = None,
) -> onnx.ModelProto:
    """Return the model that computes `outputs` from `inputs`, carrying over only the nodes and weights it needs.

    `inputs` maps value names to (dtype, shape), or to None to keep the type in `types` or the model. Each becomes a graph
    input called `rename_input(name)`; where that differs, the value's producer may stay in the part too (that is what
    makes the isolated model: a step's output is computed, while its readers read the fed copy). `edit` may replace a
    node by several. Opsets, IR version, used functions, metadata, doc strings and names are kept (of nodes that share a
    name all but the first get a new one: ONNX Runtime refuses them). Outputs are untyped; see `split` for typed ones.

    Raises ModelError when an output can be reached neither from nodes nor from `inputs`.
    """
    nodes = needed(proto, outputs, set(inputs))
    renamed = {name: new for name in inputs if (new := rename_input(name)) != name}
    made = onnx.ModelProto()
    for field in ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if proto.HasField(field):
            setattr(made, field, getattr(proto, field))
    made.opset_import.extend(proto.opset_import)
    made.metadata_props.extend(proto.metadata_props)
    made.graph.name = proto.graph.name or "part"
    made.graph.doc_string = proto.graph.doc_string
    made.graph.metadata_props.extend(proto.graph.metadata_props)
    for k in nodes:
        copies = _copied(proto.graph.node[k], renamed, edit)
        for copy in copies:  # a node kept for another of its outputs must not define a fed value a second time
            for j, name in enumerate(copy.output):
                if name in inputs and name not in renamed:
                    copy.output[j] = fresh(f"{name}/not_read", value_names(proto.graph.node))
        made.graph.node.extend(copies)
    _name_uniquely(made.graph.node)
    made.functions.extend(_used_functions(proto, made.graph.node))
    reads = {name for node in made.graph.node for name in [*node.input, *captured_names(node)] if name}
    _add_ports(made, proto, inputs, outputs, renamed, reads, types or {})
    _add_constants(made, proto, reads | set(outputs))
    return made


def needed(proto: onnx.ModelProto, outputs: Iterable[str], fed: Collection[str]) -> list[int]:
    """Indices, in graph order, of the nodes that `outputs` depend on, not looking behind the values in `fed`.

    A fed value that is itself an output is computed. Raises ModelError for a name that nothing makes.
    """
    graph = proto.graph
    producer = {out: k for k, node in enumerate(graph.node) for out in node.output if out}
    sources = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    sources |= {port.name for port in graph.input} | set(fed)
    wanted: set[int] = set()
    pending = list(outputs)
    while pending:
        name = pending.pop()
        k = producer.get(name)
        if k is None:
            if name not in sources:
                raise ModelError(f"no value '{name}' in the model", asked=name)
            continue
        if k not in wanted:
            wanted.add(k)
            reads = [*graph.node[k].input, *captured_names(graph.node[k])]
            pending += [read for read in reads if read and read not in fed]
    return sorted(wanted)


def _copied(
    node: onnx.NodeProto, renamed: Mapping[str, str], edit: Callable[[onnx.NodeProto], list[onnx.NodeProto]] | None
) -> list[onnx.NodeProto]:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    if renamed:
        for j, name in enumerate(copy.input):
            copy.input[j] = renamed.get(name, name)
        for name in captured_names(copy) & renamed.keys():
            rename_captured(copy, name, renamed[name])
    return edit(copy) if edit is not None else [copy]


def uniquely_named(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto`, or where node names repeat a copy in which they do not: ONNX Runtime refuses those."""
    names = [node.name for node in proto.graph.node if node.name]
    if len(set(names)) == len(names):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    _name_uniquely(copy.graph.node)
    return copy


def _name_uniquely(nodes: Iterable[onnx.NodeProto]) -> None:
    nodes = list(nodes)
    taken = {node.name for node in nodes}
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            node.name = fresh(node.name, taken)
            taken.add(node.name)
        if node.name:
            seen.add(node.name)


def _used_functions(proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> list[onnx.FunctionProto]:
    """Local functions that `nodes` call, directly, from bodies, or from other functions."""
    known = {(f.domain, f.name, f.overload): f for f in proto.functions}
    used: set[tuple[str, str, str]] = set()
    pending = list(nodes) if known else []
    while pending:
        node = pending.pop()
        key = (node.domain, node.op_type, node.overload)
        if key in known and key not in used:
            used.add(key)
            pending += known[key].node
        pending += [inner for body in bodies(node) for inner in body.node]
    return [function for key, function in known.items() if key in used]


def _add_ports(
    made: onnx.ModelProto,
    proto: onnx.ModelProto,
    inputs: Mapping[str, ArraySpec | None],
    outputs: Sequence[str],
    renamed: Mapping[str, str],
    reads: set[str],
    types: Mapping[str, onnx.ValueInfoProto],
) -> None:
    declared = {port.name: port for port in [*proto.graph.value_info, *proto.graph.output, *proto.graph.input]}
    declared |= types
    wanted = reads | set(outputs)
    constants = {t.name for t in proto.graph.initializer}
    for port in proto.graph.input:  # an input that is not fed stays one; so does a weight that is also an input (IR 3)
        if port.name not in inputs and port.name in wanted and (port.name not in constants or proto.ir_version < 4):
            made.graph.input.append(port)
    for name, spec in inputs.items():
        port_name = renamed.get(name, name)
        if port_name not in wanted:
            continue
        if spec is None:
            if name not in declared:
                raise ModelError(f"the type of value '{name}' is not known", asked=name)
            made.graph.input.append(_renamed_port(declared[name], port_name))
        else:
            dtype, shape = spec
            element = helper.np_dtype_to_tensor_dtype(dtype)
            made.graph.input.append(helper.make_tensor_value_info(port_name, element, shape))
    for name in dict.fromkeys(outputs):
        made.graph.output.append(onnx.ValueInfoProto(name=name))


def _add_constants(made: onnx.ModelProto, proto: onnx.ModelProto, wanted: Collection[str]) -> None:
    fed = {port.name for port in made.graph.input} if proto.ir_version >= 4 else set()
    made.graph.initializer.extend(t for t in proto.graph.initializer if t.name in wanted and t.name not in fed)
    made.graph.sparse_initializer.extend(
        s for s in proto.graph.sparse_initializer if s.values.name in wanted and s.values.name not in fed
    )
    made.graph.quantization_annotation.extend(a for a in proto.graph.quantization_annotation if a.tensor_name in wanted)


def _renamed_port(port: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(port)
    copy.name = name
    return copy


def fresh(name: str, taken: Collection[str]) -> str:
    """`name`, or `name_2`, `name_3` ... where that is taken."""
    numbered = (f"{name}_{k}" for k in count(2))
    return name if name not in taken else next(other for other in numbered if other not in taken)


def value_names(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """All names of values that `nodes` read and make, those of their bodies at any depth included."""
    found: set[str] = set()
    for node in nodes:
        found.update(node.input, node.output)
        for body in bodies(node):
            found.update(port.name for port in [*body.input, *body.output])
            found.update(tensor.name for tensor in body.initializer)
            found |= value_names(body.node)
    return found


def rename_captured(node: onnx.NodeProto, old: str, new: str) -> None:
    """Let the bodies of `node` read `new` where they read `old` of the graph around them."""
    for body in bodies(node):
        own = {port.name for port in body.input} | {t.name for t in body.initializer}
        if old in own | {out for inner in body.node for out in inner.output}:
            continue  # shadowed: in there the name means something else
        for inner in body.node:
            for j, name in enumerate(inner.input):
                if name == old:
                    inner.input[j] = new
            rename_captured(inner, old, new)
        for port in body.output:
            if port.name == old:  # a body may pass an outer value on
                body.node.append(helper.make_node("Identity", [new], [old]))


def head(model: OnnxModel, values: Iterable[str]) -> onnx.ModelProto:
    """Return the model from its start to the stored `values`, each ended at a DequantizeLinear output.

    Ending at the int8 value would leave the last operator unfused, and at the float before Q it would not be
    quantised at all (both give other numbers than the deployed model). `head_outputs` names the outputs.
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
    codes = np.empty(array.shape, quantisation.dtype)
    if scale.size > 1:
        return codes, _into_codes(array, scale, zero, codes)
    reals, flat = array.reshape(-1), codes.reshape(-1)
    blocks = (slice(start, start + _BLOCK) for start in range(0, array.size, _BLOCK))
    return codes, max((_into_codes(reals[k], scale, zero, flat[k]) for k in blocks), default=0.0)


def _into_codes(reals: Array, scale: Array, zero: Array, codes: Array) -> float:
    """Fill `codes`; return the largest distance from the grid in steps, beyond the rounding of scale * code itself.

    It is infinite where there is NaN.
    """
    if reals.dtype == np.float32 and _dequantise_to(reals, scale.astype(np.float32), zero.astype(np.float32), codes):
        return 0.0
    steps = reals.astype(np.float64)
    steps /= scale
    own_rounding = np.abs(steps) * np.finfo(reals.dtype).eps
    steps += zero
    rounded = np.rint(steps)
    steps -= rounded
    off = np.abs(steps, out=steps)
    nan = np.isnan(rounded)
    if nan.any():  # no code stands for it
        rounded[nan] = 0.0
        off[nan], own_rounding[nan] = np.inf, 0.0
    bounds = np.iinfo(codes.dtype)
    codes[...] = np.clip(rounded, bounds.min, bounds.max, out=rounded)
    return float(np.max(off, where=off > own_rounding, initial=0.0))


def _dequantise_to(reals: Array, scale: Array, zero: Array, codes: Array) -> bool:
    """Fill `codes` in float32 and say whether (code - zero) * scale gives back every bit of `reals`.

    That is how a DequantizeLinear makes them; it takes a seventh of the time that float64 takes.
    """
    # NaN, and what no code stands for, become any code, which does not give it back
    with np.errstate(invalid="ignore"):
        steps = np.rint(reals / scale)
        steps += zero
        np.copyto(codes, steps, casting="unsafe")
    np.copyto(steps, codes, casting="unsafe")
    steps -= zero
    steps *= scale
    return np.array_equal(steps, reals)
