"""Sliding windows of AveragePool and MaxPool over N, C, spatial... arrays, any spatial rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.vnpu.ir import Pool


def geometry(op: Pool, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Output sizes and the pads at both ends, by ONNX's formulas (auto_pad, ceil_mode: no window starts in the end pad)."""
    rank = len(sizes)
    out, begins, ends = [], [], []
    for k in range(rank):
        reach = op.dilations[k] * (op.kernel[k] - 1) + 1
        stride = op.strides[k]
        begin, end = (0, 0) if op.auto_pad == "VALID" else (op.pads[k], op.pads[k + rank])
        if op.auto_pad.startswith("SAME"):
            count = -(-sizes[k] // stride)
            total = max(0, (count - 1) * stride + reach - sizes[k])
            begin = total // 2 if op.auto_pad == "SAME_UPPER" else total - total // 2
            end = total - begin
        room = sizes[k] + begin + end - reach
        count = room // stride + 1
        if op.ceil_mode and room % stride:
            count = -(-room // stride) + 1
            if (count - 1) * stride >= sizes[k] + begin:
                count -= 1
        out.append(count)
        begins.append(begin)
        ends.append(end)
    return tuple(out), tuple(begins), tuple(ends)


def taps(op: Pool, x: Array, fill: float, out: tuple[int, ...], begins: tuple[int, ...]) -> Iterator[Array]:
    """The window's elements in order, each an `out`-shaped view of `x` padded with `fill`."""
    widths = [(0, 0), (0, 0)]
    for k, size in enumerate(x.shape[2:]):
        reach = (out[k] - 1) * op.strides[k] + op.dilations[k] * (op.kernel[k] - 1) + 1
        widths.append((begins[k], max(0, reach - size - begins[k])))
    padded = np.pad(x, widths, constant_values=fill) if any(map(any, widths)) else x
    for offsets in product(*(range(k) for k in op.kernel)):
        cut = [slice(None), slice(None)]
        for k, offset in enumerate(offsets):
            start = offset * op.dilations[k]
            cut.append(slice(start, start + (out[k] - 1) * op.strides[k] + 1, op.strides[k]))
        yield padded[tuple(cut)]


def summed(op: Pool, x: Array) -> Array:
    """Window sums of `x` with zero padding, added in window order in x's own dtype."""
    out, begins, _ = geometry(op, x.shape[2:])
    return _total(taps(op, x, 0, out, begins))


def _total(parts: Iterator[Array]) -> Array:
    total = np.array(next(parts), copy=True)
    for part in parts:
        total += part
    return total


def counts(op: Pool, sizes: tuple[int, ...]) -> Array:
    """How many elements each window averages over: (1, 1, out...) int64. Pads count where `count_include_pad` says so.

    Cells beyond the end pad, which a ceil_mode window may cover, never count.
    """
    ones = np.ones((1, 1, *sizes), np.int64)
    out, begins, ends = geometry(op, sizes)
    if op.count_include_pad:
        ones = np.pad(ones, [(0, 0), (0, 0), *zip(begins, ends, strict=True)], constant_values=1)
        begins = (0,) * len(sizes)
    return _total(taps(op, ones, 0, out, begins))


def maxima(op: Pool, x: Array) -> Array:
    """Window maxima of codes, or of reals."""
    out, begins, _ = geometry(op, x.shape[2:])
    lowest = -np.inf if x.dtype.kind == "f" else int(np.iinfo(x.dtype).min)
    parts = taps(op, x, lowest, out, begins)
    best = np.array(next(parts), copy=True)
    for part in parts:
        np.maximum(best, part, out=best)
    return best
