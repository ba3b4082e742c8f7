"""What a model is made of: ports, operators, quantisation, weights, and where it is worth splitting it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from equivcheck.errors import SelectorError
from equivcheck.models.graph import Graph, Quantisation, Step
from equivcheck.models.onnx.external import all_tensors
from equivcheck.models.onnx.load import OnnxModel, dtype_name
from equivcheck.models.onnx.rewrite import TWINS
from equivcheck.models.select import select

SCHEMA = "equivcheck-inspect/1"
_SUGGESTED = 8
# Operators at which models are cut by hand most often: an NPU lacks them, or they end what it is good at.
_WORTH_TRYING = (
    "GlobalAveragePool AveragePool ReduceMean Resize Softmax Sigmoid HardSigmoid HardSwish LayerNormalization Concat Split "
    "ArgMax TopK NonMaxSuppression MatMul Gemm"
).split()
_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32}
_NARROW = {
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "bfloat16": 16,
}  # bits of what is not numpy's


class Port(msgspec.Struct, frozen=True):
    name: str
    dtype: str | None
    shape: list[int | str | None] | None
    scale: float | None = None
    zero_point: int | None = None


class Scheme(msgspec.Struct, frozen=True):
    """How it is quantised. `activations` and `weights` count values by kind ("int8 per tensor", "int8 per channel")."""

    form: str
    activations: dict[str, int]
    weights: dict[str, int]
    not_quantised: list[str]


class Suggestion(msgspec.Struct, frozen=True):
    """A selector that works for --split-at, what it selects, and the step it is at."""

    selector: str
    op_type: str
    count: int
    step: int


class Description(msgspec.Struct, frozen=True):
    """What a model is made of. Of a .tflite file `ir_version` is its schema's, `opsets` is empty and `nodes` are operators."""

    schema: str
    path: str
    format: str
    sha256: str
    ir_version: int
    opsets: dict[str, int]
    producer: str
    nodes: int
    steps: int
    inputs: list[Port]
    outputs: list[Port]
    ops: dict[str, int]
    functions: list[str]
    scheme: Scheme
    parameters: int
    weight_bytes: int
    external_bytes: int
    split_points: list[Suggestion]

    def to_json(self) -> bytes:
        """Return the description as JSON (UTF-8), indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def describe(model: OnnxModel) -> Description:
    """Return what `model` is made of. Reads no weights but scales and zero points."""
    graph, proto = model.graph, model.proto
    weights = all_tensors(proto)
    return Description(
        schema=SCHEMA,
        path=model.path,
        format=model.format,
        sha256=model.sha256,
        ir_version=model.ir_version,
        opsets=model.opsets,
        producer=model.producer,
        nodes=len(graph.originals),
        steps=len(graph.steps),
        inputs=[_port(graph, name) for name in graph.inputs],
        outputs=[_port(graph, name) for name in graph.outputs],
        ops=dict(Counter(_full_name(n.domain, n.op_type) for n in graph.originals).most_common()),
        functions=[function.name for function in proto.functions],
        scheme=_scheme(model),
        parameters=sum(int(np.prod(t.dims)) for t in weights),
        weight_bytes=sum(_bytes(t.data_type, int(np.prod(t.dims))) for t in weights),
        external_bytes=model.external_bytes,
        split_points=_suggestions(graph),
    )


def _full_name(domain: str, op_type: str) -> str:
    return f"{domain}::{op_type}" if domain else op_type


def _port(graph: Graph, name: str) -> Port:
    value = graph.values.get(name)
    stored = graph.store(name) or name
    found = graph.quantisation.get(stored)
    simple = found is not None and not found.per_channel
    return Port(
        name=name,
        dtype=value.dtype if value else None,
        shape=list(value.shape) if value is not None and value.shape is not None else None,
        scale=float(found.scale.ravel()[0]) if simple and found is not None else None,
        zero_point=int(found.zero_point.ravel()[0]) if simple and found is not None else None,
    )


def _bytes(element: int, count: int) -> int:
    name = dtype_name(element)
    if name.startswith("float8"):
        return count
    return -(-count * _NARROW[name] // 8) if name in _NARROW else count * np.dtype(name).itemsize


def _scheme(model: OnnxModel) -> Scheme:
    graph = model.graph
    activations = Counter(_kind(graph, q, name) for name in graph.stored if (q := graph.quantisation.get(name)))
    weights = Counter(_weights(graph))
    return Scheme(
        form=_form(model, bool(activations), bool(weights)),
        activations=dict(activations.most_common()),
        weights=dict(weights.most_common()),
        not_quantised=[
            f"#{s.id} {s.op_type}" for s in graph.steps if not any(out in graph.quantisation for out in s.outputs)
        ],
    )


def _form(model: OnnxModel, quantised: bool, weights: bool) -> str:
    if any(node.op_type == "DynamicQuantizeLinear" for node in model.graph.originals):
        return "dynamic"
    twins = any(node.op_type in TWINS for node in model.graph.originals)
    pairs = sum(node.op_type == "DequantizeLinear" for node in model.graph.originals) > len(model.graph.outputs)
    if twins:
        return "QOperator and QDQ mixed" if pairs else "QOperator"
    return "QDQ" if quantised else "weights only" if weights else "not quantised"


def _kind(graph: Graph, quantisation: Quantisation, name: str) -> str:
    value = graph.values.get(name)
    dtype = value.dtype if value is not None and value.dtype in _BITS else str(quantisation.dtype)
    return f"{dtype} per {'channel' if quantisation.per_channel else 'tensor'}"


def _weights(graph: Graph) -> Iterable[str]:
    """Kinds of the constants that a DequantizeLinear turns into weights or biases."""
    for node in graph.nodes:
        if node.op_type == "DequantizeLinear" and node.inputs[0] in graph.constant_values:
            found = graph.parameters(node)
            if found is not None:
                blocked = found.scale.ndim > 1
                kind = _kind(graph, found, node.inputs[0])
                yield f"{kind.split(' per ')[0]} per block" if blocked else kind


def _suggestions(graph: Graph) -> list[Suggestion]:
    """The operators worth splitting at, most telling first, and the last linear one; else the middle of the model."""
    by_op: dict[str, list[Step]] = {}
    for step in graph.steps:
        written = graph.nodes[step.main].op_type  # in ONNX's words, where the file is of another format
        for name in dict.fromkeys([*(_original(graph, index) for index in step.nodes), written]):
            by_op.setdefault(TWINS.get(name, name), []).append(step)
    found = [_suggestion(graph, op, steps[0]) for op in _WORTH_TRYING if (steps := by_op.get(op))]
    linear = [step for op in ("Conv", "Gemm", "MatMul") for step in by_op.get(op, [])]
    if linear:
        last = max(linear, key=lambda step: step.id)
        if last.id not in {point.step for point in found}:
            found.append(Suggestion(f"#{last.id}", _called(graph, last), 1, last.id))
    if not found and graph.steps:
        middle = graph.steps[len(graph.steps) // 2]
        found.append(Suggestion(f"#{middle.id}", middle.op_type, 1, middle.id))
    return found[:_SUGGESTED]


def _original(graph: Graph, index: int) -> str:
    node = graph.nodes[index]
    return graph.originals[node.origin].op_type if node.origin >= 0 else node.op_type


def _suggestion(graph: Graph, op: str, first: Step) -> Suggestion:
    """The shortest selector of the first `op` that means nothing else in this model."""
    points = select(graph, [f"op:{op}"], TWINS)
    step = points[0].step or first
    kind = _called(graph, step) if step.op_type == op else op
    for text in (kind, f"{kind}#1", op, f"{op}#1", f"op:{op}"):
        try:
            found = select(graph, [text], TWINS)
        except SelectorError:  # a node or value has that name too
            continue
        if len(found) == 1 and found[0].step is step:
            return Suggestion(text, kind, len(points), step.id)
    return Suggestion(f"#{step.id}", kind, len(points), step.id)


def _called(graph: Graph, step: Step) -> str:
    """What the file calls the operator of a step: MEAN in a .tflite file; Conv in ONNX, also where it is a QLinearConv."""
    kind = graph.main_node(step).op_type
    return TWINS.get(kind, kind)
