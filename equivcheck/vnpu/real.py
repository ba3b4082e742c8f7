"""Reals: what each operator's result would be without rounding, float64, in codes of its output without zero point.

This is the definition of `exact`; the referee of every verdict. Clamps (Relu, Clip) are applied to
the real, saturation is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.vnpu import islands, windows
from equivcheck.vnpu import resize as resizing
from equivcheck.vnpu.accumulate import Accumulator
from equivcheck.vnpu.ir import (
    Accumulate,
    Binary,
    Chain,
    Clamp,
    Codes,
    Island,
    Mean,
    Move,
    Op,
    Operand,
    Pool,
    Quantise,
    Reduce,
    Resize,
    Softmax,
    Table,
    raw,
)
from equivcheck.vnpu.moves import move
from equivcheck.vnpu.requantise import channel_axis, product_scale, real_bias

Inputs = Mapping[str, Array]


def real(op: Op, inputs: Inputs, accumulator: Accumulator | None = None) -> dict[str, Array]:
    """Output name -> v / s_out (float64). `inputs` are the stored values (codes; floats for Quantise) by name."""
    if isinstance(op, Move):
        return _moved(op, inputs)
    if isinstance(op, Chain):
        return _chained(op, inputs, accumulator)
    if isinstance(op, Accumulate):
        found = accumulated(op, inputs, accumulator or Accumulator(op))
    elif isinstance(op, Binary):
        found = binary(op, dequantised(op.a, inputs), dequantised(op.b, inputs))
    elif isinstance(op, Pool):
        found = _pooled(op, inputs)
    elif isinstance(op, Mean):
        found = averaged(op, inputs[op.x.name])
    elif isinstance(op, Table):
        found = tabulated(op)[raw(inputs[op.x.name])]
    elif isinstance(op, Reduce):
        found = reduced(op, inputs[op.x.name])
    elif isinstance(op, Resize):
        found = resized(op, inputs[op.x.name])
    elif isinstance(op, Island):
        reals = {name: dequantised(operand, inputs) for name, operand in op.sources.items()}
        found = islands.evaluate_island(op, reals) / op.out.scale
    elif isinstance(op, Softmax):
        found = softmax(op, inputs[op.x.name])
    else:
        assert isinstance(op, Quantise)
        found = inputs[op.name].astype(np.float64) / op.out.scale
    return {op.outputs[0]: np.ascontiguousarray(found)}


def dequantised(operand: Operand, inputs: Inputs) -> Array:
    codes = operand.constant if operand.constant is not None else inputs[operand.name]
    return (codes.astype(np.float64) - operand.codes.zero) * operand.codes.scale


def _clamped(value: Array, clamp: Clamp) -> Array:
    return value if clamp.idle else np.clip(value, clamp.low, clamp.high)


def accumulated(op: Accumulate, inputs: Inputs, accumulator: Accumulator) -> Array:
    """(acc * (s_x * s_w) + bias) / s_out, clamped before the division."""
    other = inputs[op.weight.name] if isinstance(op.weight, Operand) else None
    value = accumulator.sums(inputs[op.x.name], other).astype(np.float64)
    shape = [1] * value.ndim
    if value.ndim:
        shape[channel_axis(op)] = -1
    value *= product_scale(op).reshape(shape) if op.weight_scale.size > 1 else product_scale(op)
    bias = real_bias(op)
    if bias is not None:
        value += bias.reshape(shape) if bias.size > 1 else bias.reshape(())
    if op.slope != 1:
        np.multiply(value, op.slope, out=value, where=value < 0)
    return _clamped(value, op.clamp) / op.out.scale


def binary(op: Binary, a: Array, b: Array) -> Array:
    """A op b / s_out on reals; a division by zero is inf or NaN, as in IEEE 754."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _clamped(BINARY[op.kind](a, b), op.clamp) / op.out.scale


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Max": np.maximum,
    "Min": np.minimum,
    "PRelu": lambda a, b: np.where(a >= 0, a, a * b),
}


def averaged(op: Mean, codes: Array) -> Array:
    axes, count = mean_axes(op, codes)
    total = codes.sum(axis=axes, dtype=np.int64, keepdims=op.keepdims) - count * op.x.codes.zero
    return _in_codes(total / count, op)


def reduced(op: Reduce, codes: Array) -> Array:
    axes, count = mean_axes(op, codes)
    if op.kind == "ReduceSum":
        total = codes.sum(axis=axes, dtype=np.int64, keepdims=op.keepdims) - count * op.x.codes.zero
    else:
        total = extreme(op, codes).astype(np.int64) - op.x.codes.zero
    return _in_codes(np.asarray(total, np.float64), op)


def _in_codes(value: Array, op: Mean | Reduce | Pool) -> Array:
    """A mean, sum or maximum of centred codes of the input, in codes of the output.

    Equal scales are not multiplied and divided by: that would move half of a code off the tie it is.
    """
    x, out = op.x.codes, op.out
    if op.clamp.idle and x.scale == out.scale:
        return value
    return _clamped(value * x.scale, op.clamp) / out.scale


def extreme(op: Reduce, codes: Array) -> Array:
    """The largest (or smallest) codes: DQ is monotone, so they are those of the largest reals."""
    axes, _ = mean_axes(op, codes)
    find = codes.min if op.kind == "ReduceMin" else codes.max
    return np.asarray(find(axis=axes, keepdims=op.keepdims))


def resized(op: Resize, codes: Array) -> Array:
    x = op.x.codes
    place = resizing.nearest if op.mode == "nearest" else resizing.linear
    made = place(op, codes.astype(np.float64) - x.zero, op.outside / x.scale)
    return made if x.scale == op.out.scale else made * x.scale / op.out.scale


def mean_axes(op: Mean | Reduce, codes: Array) -> tuple[tuple[int, ...], int]:
    """The axes that are averaged (all of them, where ReduceMean names none) and how many elements that is."""
    axes = tuple(range(2, codes.ndim)) if op.axes is None else tuple(a % codes.ndim for a in op.axes)
    axes = axes or tuple(range(codes.ndim))
    return axes, int(np.prod([codes.shape[a] for a in axes]))


def _pooled(op: Pool, inputs: Inputs) -> Array:
    codes = inputs[op.x.name]
    if op.kind == "MaxPool":
        return _in_codes(windows.maxima(op, codes).astype(np.float64) - op.x.codes.zero, op)
    total = windows.summed(op, codes.astype(np.int64) - op.x.codes.zero)
    return _in_codes(total / windows.counts(op, codes.shape[2:]), op)


def tabulated(op: Table) -> Array:
    """One entry a code, by its raw bits."""
    x = (op.x.codes.all() - op.x.codes.zero) * op.x.codes.scale
    return islands.evaluate(op, x) / op.out.scale


def rescaled(source: Codes, out: Codes) -> Array:
    """One entry a code, by its raw bits: the same real in codes of `out`."""
    return (source.all() - source.zero) * source.scale / out.scale


def softmax(op: Softmax, codes: Array) -> Array:
    flat = softmax_rows(op, codes)
    shifted = (flat.astype(np.float64) - flat.max(axis=-1, keepdims=True)) * op.x.codes.scale
    powers = np.exp(shifted)
    return softmax_back(op, powers / powers.sum(axis=-1, keepdims=True) / op.out.scale, codes.shape)


def softmax_rows(op: Softmax, codes: Array) -> Array:
    """Codes with what is normalised together on the last axis."""
    axis = op.axis % codes.ndim
    if op.flat:
        return codes.reshape(int(np.prod(codes.shape[:axis])), -1)
    return np.moveaxis(codes, axis, -1)


def softmax_back(op: Softmax, rows: Array, shape: tuple[int, ...]) -> Array:
    if op.flat:
        return rows.reshape(shape)
    return np.ascontiguousarray(np.moveaxis(rows, -1, op.axis % len(shape)))


def _chained(op: Chain, inputs: Inputs, accumulator: Accumulator | None) -> dict[str, Array]:
    """Codes are moved up to the operator that computes; its real value is moved from there on."""
    known = dict(inputs)
    computes = next((k for k, link in enumerate(op.links) if not _only_moves(link)), len(op.links) - 1)
    for link in op.links[:computes]:
        known |= {name: _as_codes(values, link) for name, values in real(link, known).items()}
    made = real(op.links[computes], known, accumulator)
    for link in op.links[computes + 1 :]:
        (value,) = made.values()
        if isinstance(link, Pool):
            made = {link.outputs[0]: windows.maxima(link, value)}
        else:
            assert isinstance(link, Move)
            fill = pad_real(link) / op.out.scale if link.kind == "Pad" else 0.0
            made = {link.outputs[0]: move(link.kind, [value], link.attributes, link.constants, fill, 1)[0]}
    return made


def _only_moves(link: Op) -> bool:
    """Whether a link gives back codes as they are."""
    if isinstance(link, Move):
        return all(operand.codes == link.out[0] for operand in link.inputs)
    return isinstance(link, Pool) and link.kind == "MaxPool" and link.x.codes == link.out and link.clamp.idle


def _as_codes(values: Array, link: Op) -> Array:
    assert isinstance(link, Move | Pool)
    codes = link.out if isinstance(link, Pool) else link.inputs[0].codes
    return np.asarray(np.rint(values) + codes.zero).astype(codes.dtype)


def _moved(op: Move, inputs: Inputs) -> dict[str, Array]:
    arrays = [operand.constant if operand.constant is not None else inputs[operand.name] for operand in op.inputs]
    first = op.inputs[0].codes
    out = op.out[0] or first
    if op.kind == "Concat":
        values = [rescaled(o.codes, out)[raw(a)] for o, a in zip(op.inputs, arrays, strict=True)]
        return dict(zip(op.outputs, move(op.kind, values, op.attributes, op.constants, 0, 1), strict=True))
    values = [array.astype(np.float64) - first.zero for array in arrays]
    moved = move(op.kind, values, op.attributes, op.constants, 0, len(op.outputs))
    if op.kind == "Pad" and 2 in op.constants and op.constants[2].size:
        moved = move(op.kind, values, op.attributes, op.constants, pad_real(op) / first.scale, 1)
    return {
        name: value * first.scale / codes.scale if codes else value
        for name, value, codes in zip(op.outputs, moved, op.out, strict=True)
    }


def pad_real(op: Move) -> float:
    """The real Pad fills with; moves on codes are given a code there."""
    value = float(op.constants[2].ravel()[0]) if 2 in op.constants and op.constants[2].size else 0.0
    if op.out[0] is None:
        first = op.inputs[0].codes
        return (value - first.zero) * first.scale
    return value
