"""Float islands of one quantised value: their operators in numpy float64, and as a model for an engine's own float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from equivcheck.engines.ort import OrtEngine
from equivcheck.models.graph import DEQUANTIZE, Array, Graph, Node
from equivcheck.vnpu.ir import Table

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


def evaluate_float32(table: Table, x: Array, opset: int = 18) -> Array:
    """The same in float32 by ONNX Runtime's own float kernels, unoptimised: what it computes where it has no int8 kernel."""
    from onnx import TensorProto, helper, numpy_helper

    if not table.nodes:
        return x.astype(np.float32)
    opset = 20 if any(node.op_type == "Gelu" for node in table.nodes) else opset
    nodes = [
        helper.make_node(n.op_type, list(n.inputs), list(n.outputs), domain=n.domain, **_known(n.attributes))
        for n in table.nodes
    ]
    scalars = {name: np.asarray(value, np.float32).reshape(()) for name, value in table.constants.items()}
    graph = helper.make_graph(
        nodes,
        "island",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [x.size]) for name in table.feed],
        [helper.make_tensor_value_info(table.result, TensorProto.FLOAT, [x.size])],
        [numpy_helper.from_array(value, name) for name, value in scalars.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    engine = OrtEngine()
    engine.load(
        bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()),
        {"optimization": "disable"},
    )
    fed = np.ascontiguousarray(x, np.float32)
    return engine.run(dict.fromkeys(table.feed, fed), [table.result])[table.result]


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
