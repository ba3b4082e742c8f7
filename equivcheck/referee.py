"""Who is right: the exact real value of a step, and how far a float32 evaluation of it may be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from equivcheck.models.graph import MOVES, Array, Graph, Node, Quantisation, Step

_UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_FUNCTION_ULPS = 64  # a few ulp for exp, tanh and the like as ONNX Runtime evaluates them, with room
_CODE_RANGE = {1: 256.0, 2: 65536.0}


def gamma(n: int, unit: float) -> float:
    """gamma_n = n u / (1 - n u): the relative error of a sum of n products in any order (Higham 2002, section 3.1)."""
    return n * unit / (1.0 - n * unit) if n * unit < 0.5 else 1.0


def float32_bound(graph: Graph, step: Step, name: str, values: Mapping[str, Array]) -> float:
    """Bound, in LSB of `name`, on the rounding error of the step's float32 evaluation.

    For linear operators 6 sqrt(K+3) u * sum |a||b| / s_out, the probabilistic bound of Higham and Mary (A new approach to
    probabilistic rounding error analysis, 2019: fails with probability below 2 exp(-18) a sum), with sum |a||b| bounded
    by max |a| * max over channels of sum |w|; a few ulp of the code range for everything else.
    """
    quantisation = graph.quantisation[name]
    lsb = float(np.min(quantisation.scale))
    unit = _UNIT_ROUNDOFF["float32"]
    small = gamma(_FUNCTION_ULPS, unit) * _CODE_RANGE.get(quantisation.dtype.itemsize, 65536.0)
    linear = [graph.nodes[i] for i in step.nodes if graph.nodes[i].op_type in _LINEAR]
    total = sum(_linear_bound(graph, node, values, lambda n: 6.0 * math.sqrt(n) * unit) for node in linear)
    return small + total / lsb


def float_value_bound(graph: Graph, step: Step, values: Mapping[str, Array], result: Array) -> float:
    """A-priori bound on |engine - our evaluation| of a float value, both summing in their own order (Higham 2002, 3.1).

    In the value's own unit. 0 for integers and for pure data movement: those must be equal.
    """
    if result.dtype.kind != "f":
        return 0.0
    unit = _UNIT_ROUNDOFF.get(str(result.dtype), _UNIT_ROUNDOFF["float32"])
    nodes = [graph.nodes[i] for i in step.nodes]
    if all(node.op_type in _MOVES for node in nodes):
        return 0.0
    linear = sum(
        _linear_bound(graph, node, values, lambda n: gamma(n, unit)) for node in nodes if node.op_type in _LINEAR
    )
    inputs = max((_magnitude(graph, name, values) for name in step.inputs), default=0.0)
    finite = result[np.isfinite(result)]
    own = max(float(np.max(np.abs(finite), initial=0.0)), inputs if step.ops[-1] in ("Add", "Sub") else 0.0)
    return 2.0 * (linear + gamma(_FUNCTION_ULPS + _longest_sum(graph, nodes, values), unit) * own)


_MOVES = MOVES | {"Relu", "Clip", "Shape"}


def _longest_sum(graph: Graph, nodes: list[Node], values: Mapping[str, Array]) -> int:
    """How many terms a pool, mean or softmax of these nodes may add: at most the size of an input."""
    if not any(node.op_type in _SUMS for node in nodes):
        return 0
    sizes = [values[s].size for node in nodes for i in node.inputs if (s := graph.alias_of.get(i, i)) in values]
    return min(max(sizes, default=0), 1 << 16)


_SUMS = frozenset(
    "GlobalAveragePool AveragePool ReduceMean ReduceSum Softmax LogSoftmax LpNormalization ReduceL2".split()
)


def _linear_bound(graph: Graph, node: Node, values: Mapping[str, Array], growth: Callable[[int], float]) -> float:
    """growth(K+3) * (max |a| * max_channel sum |w| + max |bias|), in real units."""
    a = _magnitude(graph, node.inputs[0], values)
    sizes = _weight_sizes(graph, node)
    if sizes is not None:
        terms, sum_w, bias = sizes
        return growth(terms + 3) * (a * sum_w + bias)
    other = graph.alias_of.get(node.inputs[1], node.inputs[1])
    terms = values[other].shape[-2] if other in values and values[other].ndim > 1 else 1 << 12
    return growth(terms + 3) * a * _magnitude(graph, node.inputs[1], values) * terms


@lru_cache(maxsize=4096)
def _weight_sizes(graph: Graph, node: Node) -> tuple[int, float, float] | None:
    """(terms of a sum, the largest sum of |w| over channels, the largest |bias|) of a linear node with constant weights."""
    weights = _stored_constant(graph, node.inputs[1])
    if weights is None:
        return None
    codes, quantisation = weights
    axis = _output_axis(node, codes.ndim)
    others = tuple(k for k in range(codes.ndim) if k != axis % codes.ndim)
    if quantisation is not None and codes.dtype in (
        np.int8,
        np.uint8,
    ):  # in integers: a quarter of the memory, and of the time
        scale, zero = quantisation.along(codes.ndim)
        # within a channel the scale may vary, by blocks: then this is a bound
        scale = np.max(scale, axis=others) if scale.size > 1 else scale
        largest = np.abs(codes.astype(np.int16) - zero.astype(np.int16)).sum(axis=others, dtype=np.int64) * scale
    else:
        largest = np.abs(_real(codes, quantisation)).sum(axis=others, dtype=np.float64)
    bias = _constant(graph, node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    return (
        codes.size // max(1, codes.shape[axis]),
        float(largest.max(initial=0.0)),
        0.0 if bias is None else float(np.max(np.abs(bias), initial=0.0)),
    )


def _output_axis(node: Node, ndim: int) -> int:
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    return 0 if node.op_type == "Gemm" and node.attributes.get("transB", 0) else ndim - 1


def _magnitude(graph: Graph, name: str, values: Mapping[str, Array]) -> float:
    """Max |x| of a value in real units; for an inner value of an island, the largest its quantised inputs could be."""
    stored = graph.alias_of.get(name, name)
    array = values.get(stored)
    if array is None:
        constant = _constant(graph, name)
        if constant is not None:
            return float(np.max(np.abs(constant), initial=0.0))
        return 256.0 * max((float(np.max(q.scale)) for q in graph.quantisation.values()), default=1.0)
    if array.size == 0:
        return 0.0
    quantisation = graph.quantisation.get(stored)
    if quantisation is None or array.dtype.kind not in "iu":
        finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
        return float(np.max(np.abs(finite.astype(np.float64)), initial=0.0))
    zero = quantisation.zero_point.astype(np.int64)
    far = max(abs(int(array.max()) - int(zero.min())), abs(int(array.min()) - int(zero.max())))
    return far * float(np.max(quantisation.scale))


def _constant(graph: Graph, name: str) -> Array | None:
    """The real value of a constant: an initializer, or the DQ of one (float64)."""
    found = _stored_constant(graph, name)
    return None if found is None else _real(*found)


def _real(codes: Array, quantisation: Quantisation | None) -> Array:
    """What stored numbers stand for (float64)."""
    if quantisation is None:
        return codes.astype(np.float64)
    scale, zero = quantisation.along(codes.ndim)
    return np.asarray((codes.astype(np.float64) - zero) * scale)


def _stored_constant(graph: Graph, name: str) -> tuple[Array, Quantisation | None] | None:
    """A constant as it is stored: an initializer, or the codes that a DQ turns into reals, with their quantisation."""
    if name in graph.constants:
        return graph.constants[name], None
    node = graph.producer.get(name)
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] not in graph.constants:
        return None
    quantisation = graph.parameters(node)
    return None if quantisation is None else (graph.constants[node.inputs[0]], quantisation)


class ExactReferee:
    """Evaluates single steps exactly, by the virtual NPU's `exact` arithmetic. Kernels are made when a step is asked for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._kernels: dict[int, Any] = {}

    def real(self, step: Step, values: Mapping[str, Array]) -> dict[str, Array] | None:
        """Return the real value in codes (float64, unrounded, unclipped) of each output, or None where it cannot."""
        if step.id not in self._kernels:
            self._kernels[step.id] = self._kernel(step)
        kernel = self._kernels[step.id]
        return None if kernel is None else kernel.real(values)

    def _kernel(self, step: Step) -> Any:
        from equivcheck.vnpu.kernels import Kernel  # late: most models need no step evaluated exactly
        from equivcheck.vnpu.lower import lower
        from equivcheck.vnpu.profiles import load_profile

        op = lower(self.graph, step)
        return None if isinstance(op, str) else Kernel(op, load_profile("exact"))
