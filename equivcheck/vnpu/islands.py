"""Float islands between DQs and a Q: their operators in numpy float64, and as a model for an engine's own float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from equivcheck.engines.ort import OrtEngine
from equivcheck.models.graph import DEQUANTIZE, Array, Graph, Node
from equivcheck.vnpu.formulas import FORMULAS
from equivcheck.vnpu.ir import Island, Table
from equivcheck.vnpu.moves import MOVES, move

Function = Callable[..., Array]


def _sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _erf(x: Array) -> Array:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(x)


def _gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / np.sqrt(2.0)))


def _clip(
    x: Array, low: Array | None = None, high: Array | None = None, *, min: float = -np.inf, max: float = np.inf
) -> Array:
    bottom = min if low is None else float(low.ravel()[0])
    top = max if high is None else float(high.ravel()[0])
    return np.minimum(np.maximum(x, bottom), top)


# ONNX's formulas and defaults (onnx.ai/onnx/operators); attributes arrive by keyword.
OPERATORS: dict[str, Function] = {
    "Relu": lambda x: np.maximum(x, 0),
    "Clip": _clip,
    "LeakyRelu": lambda x, alpha=0.01: np.where(x >= 0, x, alpha * x),
    "PRelu": lambda x, slope: np.where(x >= 0, x, slope * x),
    "ThresholdedRelu": lambda x, alpha=1.0: np.where(x > alpha, x, 0),
    "Sigmoid": _sigmoid,
    "Tanh": np.tanh,
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Elu": lambda x, alpha=1.0: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0))),
    "Selu": lambda x, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875: (
        gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))
    ),
    "Celu": lambda x, alpha=1.0: np.maximum(0, x) + np.minimum(0, alpha * np.expm1(np.minimum(x, 0) / alpha)),
    "Gelu": _gelu,
    "Erf": _erf,
    "Softplus": lambda x: np.logaddexp(0, x),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "Exp": np.exp,
    "Log": np.log,
    "Sqrt": np.sqrt,
    "Reciprocal": lambda x: 1 / x,
    "Abs": np.abs,
    "Neg": np.negative,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Sign": np.sign,
    "Sin": np.sin,
    "Cos": np.cos,
    "Identity": lambda x: x,
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Min": lambda *xs: np.minimum.reduce(np.broadcast_arrays(*xs)),
    "Max": lambda *xs: np.maximum.reduce(np.broadcast_arrays(*xs)),
}
NAMES = {"approximate"}  # string attributes OPERATORS understand


def constant(graph: Graph, name: str) -> Array | None:
    """A float or integer constant by name, dequantised where it goes through a DequantizeLinear (float32, as ONNX does)."""
    found = graph.constants.get(name)
    if found is not None:
        return found
    producer = graph.producer.get(name)
    if producer is None or producer.op_type not in DEQUANTIZE:
        return None
    codes, quantisation = graph.constants.get(producer.inputs[0]), graph.parameters(producer)
    if codes is None or quantisation is None or quantisation.per_channel:
        return None
    zero = int(quantisation.zero_point.ravel()[0])
    return ((codes.astype(np.int64) - zero).astype(np.float32) * quantisation.scale.reshape(())).astype(np.float32)


def evaluate(table: Table, x: Array) -> Array:
    """The island's result for the reals `x` (float64, 1-d), before its Q; NaN and inf as the formulas give them."""
    values: dict[str, Array] = dict.fromkeys(table.feed, x)
    values |= {name: value.astype(np.float64).reshape(()) for name, value in table.constants.items()}
    with np.errstate(all="ignore"):
        for node in table.nodes:
            arguments = [values[name] if name else None for name in node.inputs]
            values[node.outputs[0]] = OPERATORS[node.op_type](*arguments, **_keywords(node))
    return np.broadcast_to(values[table.result], x.shape)


def _keywords(node: Node) -> dict[str, Any]:
    found = {k: v for k, v in node.attributes.items() if k in NAMES or isinstance(v, int | float)}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def known(op_type: str) -> bool:
    """Whether an island may hold this operator."""
    return op_type in OPERATORS or op_type in FORMULAS or op_type in MOVES


def evaluate_island(island: Island, reals: Mapping[str, Array]) -> Array:
    """The island's result for the reals (float64) its sources stand for, by their float names; before its Q."""
    values: dict[str, Array] = dict(reals)
    values |= {
        name: value.astype(np.float64) if value.dtype.kind == "f" else value for name, value in island.constants.items()
    }
    with np.errstate(all="ignore"):
        for node in island.nodes:
            arguments = [values[name] if name else None for name in node.inputs]
            if node.op_type in MOVES:
                values |= _moved(node, arguments)
            elif node.op_type in FORMULAS:
                values[node.outputs[0]] = FORMULAS[node.op_type](node, arguments)
            else:
                values[node.outputs[0]] = OPERATORS[node.op_type](*arguments, **_keywords(node))
    return values[island.result]


def _moved(node: Node, arguments: Sequence[Array | None]) -> dict[str, Array]:
    if node.op_type == "Concat":
        arrays, constants = [a for a in arguments if a is not None], {}
    else:
        arrays = [a for a in arguments[:1] if a is not None]
        constants = {k: a for k, a in enumerate(arguments) if k and a is not None}
    fill = float(constants[2].ravel()[0]) if node.op_type == "Pad" and 2 in constants and constants[2].size else 0.0
    made = move(node.op_type, arrays, node.attributes, constants, fill, len(node.outputs))
    return dict(zip(node.outputs, made, strict=True))


class Float32:
    """Nodes as ONNX Runtime's own float32 kernels compute them, unoptimised: what it runs where it has no int8 kernel."""

    def __init__(
        self, nodes: Sequence[Node], feeds: Sequence[str], constants: Mapping[str, Array], result: str
    ) -> None:
        self._result = result
        self._engine = OrtEngine()
        self._engine.load(_model(nodes, feeds, constants, result), {"optimization": "disable", "threads": 1})

    def __call__(self, feeds: Mapping[str, Array]) -> Array:
        fed = {name: np.asarray(x, np.float32, order="C") for name, x in feeds.items()}
        return self._engine.run(fed, [self._result])[self._result]


def _model(nodes: Sequence[Node], feeds: Sequence[str], constants: Mapping[str, Array], result: str) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    made = [
        helper.make_node(n.op_type, list(n.inputs), list(n.outputs), domain=n.domain, **_known(n.attributes))
        for n in nodes
    ]
    narrow = {n: c.astype(np.float32) if c.dtype.kind == "f" else c for n, c in constants.items()}
    graph = helper.make_graph(
        made,
        "island",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in feeds],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in narrow.items()],
    )
    opsets = [helper.make_opsetid("", _opset(nodes)), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def _opset(nodes: Sequence[Node]) -> int:
    """An opset that has these nodes as they are written: lists moved from attributes to inputs in opsets 11, 13 and 18."""
    for node in nodes:
        listed = {"axes", "split", "starts", "pads", "min", "max"} & set(node.attributes)
        if node.op_type in ("Clip", "Slice", "Pad") and listed:
            return 9
        if node.op_type in ("Squeeze", "Unsqueeze", "Split", "ReduceSum") and listed:
            return 12
        if node.op_type.startswith("Reduce") and listed:
            return 17
        if node.op_type.endswith("Softmax") and node.attributes.get("flat"):
            return 12
    return 20


def evaluate_float32(table: Table, x: Array) -> Array:
    """The same in float32 by ONNX Runtime's own float kernels."""
    if not table.nodes:
        return x.astype(np.float32)
    scalars = {name: np.asarray(value, np.float32).reshape(()) for name, value in table.constants.items()}
    return Float32(table.nodes, table.feed, scalars, table.result)(dict.fromkeys(table.feed, x))


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None and key != "flat"}
