"""Float operators that read more than one element at a time, in numpy float64, by ONNX's formulas: what islands are made of.

Operators of one element are islands.OPERATORS; data movement is moves.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from equivcheck.models.graph import Array, Node
from equivcheck.vnpu import windows
from equivcheck.vnpu.ir import Clamp, Codes, Operand, Pool

Formula = Callable[[Node, Sequence[Array | None]], Array]
NO_CODES = Codes(1.0, 0, True)


def _rows(node: Node, x: Array, axis: int = -1) -> tuple[Array, tuple[int, ...], int]:
    axis = int(node.attributes.get("axis", axis)) % x.ndim
    if node.attributes.get("flat", False):
        return x.reshape(int(np.prod(x.shape[:axis])), -1), x.shape, -1
    return x, x.shape, axis


def _log_softmax(node: Node, inputs: Sequence[Array | None]) -> Array:
    rows, shape, axis = _rows(node, _first(inputs))
    shifted = rows - rows.max(axis=axis, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))).reshape(shape)


def _softmax(node: Node, inputs: Sequence[Array | None]) -> Array:
    return np.exp(_log_softmax(node, inputs))


def _lp_normalization(node: Node, inputs: Sequence[Array | None]) -> Array:
    """X / norm; a row of zeros stays zero (ONNX Runtime and the ONNX reference agree)."""
    x, axis = _first(inputs), int(node.attributes.get("axis", -1))
    p = int(node.attributes.get("p", 2))
    norm = np.abs(x).sum(axis=axis, keepdims=True) if p == 1 else np.sqrt((x * x).sum(axis=axis, keepdims=True))
    return np.divide(x, norm, out=np.zeros_like(x), where=norm != 0)


def _layer_normalization(node: Node, inputs: Sequence[Array | None]) -> Array:
    x = _first(inputs)
    axes = tuple(range(int(node.attributes.get("axis", -1)) % x.ndim, x.ndim))
    made = _normalised(x, axes, float(node.attributes.get("epsilon", 1e-5)))
    if inputs[1] is not None:
        made = made * inputs[1]
    return made + inputs[2] if len(inputs) > 2 and inputs[2] is not None else made


def _instance_normalization(node: Node, inputs: Sequence[Array | None]) -> Array:
    x = _first(inputs)
    made = _normalised(x, tuple(range(2, x.ndim)), float(node.attributes.get("epsilon", 1e-5)))
    scale, bias = (np.reshape(part, (1, -1, *[1] * (x.ndim - 2))) for part in inputs[1:3] if part is not None)
    return np.asarray(made * scale + bias)


def _batch_normalization(node: Node, inputs: Sequence[Array | None]) -> Array:
    x = _first(inputs)
    scale, bias, mean, variance = (
        np.reshape(part, (1, -1, *[1] * (x.ndim - 2))) for part in inputs[1:5] if part is not None
    )
    return np.asarray((x - mean) / np.sqrt(variance + float(node.attributes.get("epsilon", 1e-5))) * scale + bias)


def _normalised(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    centred = x - x.mean(axis=axes, keepdims=True)
    return np.asarray(centred / np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + epsilon))


def _reduce(function: Callable[..., Array]) -> Formula:
    def run(node: Node, inputs: Sequence[Array | None]) -> Array:
        x = _first(inputs)
        given = inputs[1] if len(inputs) > 1 and inputs[1] is not None else node.attributes.get("axes")
        axes = tuple(int(a) for a in np.asarray([] if given is None else given).ravel())
        if not axes and node.attributes.get("noop_with_empty_axes", 0):
            return x
        kept = bool(node.attributes.get("keepdims", 1))
        return np.asarray(function(x, axis=axes or tuple(range(x.ndim)), keepdims=kept))

    return run


def _global(function: Callable[..., Array]) -> Formula:
    def run(node: Node, inputs: Sequence[Array | None]) -> Array:
        x = _first(inputs)
        return np.asarray(function(x, axis=tuple(range(2, x.ndim)), keepdims=True))

    return run


def _pool(node: Node, inputs: Sequence[Array | None]) -> Array:
    x = _first(inputs)
    op = pool_of(node, (), Operand("", NO_CODES), Clamp(), NO_CODES)
    if node.op_type == "MaxPool":
        return windows.maxima(op, x)
    return np.asarray(windows.summed(op, x) / windows.counts(op, x.shape[2:]))


def pool_of(node: Node, outputs: tuple[str, ...], x: Operand, clamp: Clamp, out: Codes) -> Pool:
    """AveragePool or MaxPool as an IR operator."""
    attributes: dict[str, Any] = dict(node.attributes)
    kernel = tuple(int(k) for k in attributes["kernel_shape"])
    rank = len(kernel)
    auto = attributes.get("auto_pad", "NOTSET")
    return Pool(
        node.op_type,
        outputs,
        x,
        kernel,
        tuple(attributes.get("strides", (1,) * rank)),
        tuple(attributes.get("pads", (0,) * 2 * rank)),
        tuple(attributes.get("dilations", (1,) * rank)),
        bool(attributes.get("ceil_mode", 0)),
        bool(attributes.get("count_include_pad", 0)),
        auto.decode() if isinstance(auto, bytes) else str(auto),
        clamp,
        out,
    )


def _first(inputs: Sequence[Array | None]) -> Array:
    assert inputs[0] is not None
    return inputs[0]


FORMULAS: dict[str, Formula] = {
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "LpNormalization": _lp_normalization,
    "LayerNormalization": _layer_normalization,
    "InstanceNormalization": _instance_normalization,
    "BatchNormalization": _batch_normalization,
    "ReduceMean": _reduce(np.mean),
    "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceL1": _reduce(lambda x, **kw: np.abs(x).sum(**kw)),
    "ReduceL2": _reduce(lambda x, **kw: np.sqrt((x * x).sum(**kw))),
    "ReduceSumSquare": _reduce(lambda x, **kw: (x * x).sum(**kw)),
    "ReduceLogSumExp": _reduce(lambda x, **kw: np.log(np.exp(x).sum(**kw))),
    "GlobalAveragePool": _global(np.mean),
    "GlobalMaxPool": _global(np.max),
    "AveragePool": _pool,
    "MaxPool": _pool,
    "MatMul": lambda node, inputs: np.matmul(_first(inputs), inputs[1]),  # type: ignore[arg-type]  # arrays by then
}
