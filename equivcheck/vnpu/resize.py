"""Resize: where every output element lies in the input, by ONNX's formulas, and its real value there.

Positions of nearest are computed in float32, as every engine does: there a position decides between two elements, and a
tie that float64 would not see moves an image by a pixel. Positions of linear are float64: there they are a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.vnpu.ir import Resize

COORDINATES = frozenset(
    "half_pixel half_pixel_symmetric pytorch_half_pixel asymmetric align_corners tf_half_pixel_for_nn "
    "tf_crop_and_resize".split()
)
NEAREST = frozenset("round_prefer_floor round_prefer_ceil floor ceil".split())


def lengths(op: Resize, shape: tuple[int, ...]) -> dict[int, int]:
    """The output's length along each axis that is resized."""
    if op.sizes is not None:
        return dict(zip(op.axes, op.sizes, strict=True))
    assert op.factors is not None
    grown = (np.float32(shape[axis]) * np.float32(factor) for axis, factor in zip(op.axes, op.factors, strict=True))
    return {axis: int(np.floor(length)) for axis, length in zip(op.axes, grown, strict=True)}


def positions(op: Resize, shape: tuple[int, ...], kind: Any) -> Iterator[tuple[int, Array]]:
    """Axis, and where along it each output element lies, in `kind` (float32 or float64); axes of one scale are left out."""
    for k, (axis, out) in enumerate(lengths(op, shape).items()):
        size = shape[axis]
        crops = op.coordinates == "tf_crop_and_resize"
        if out == size and not crops:
            continue
        scale = kind(op.factors[k]) if op.factors is not None else kind(out) / kind(size)
        index = np.arange(out, dtype=kind)
        half = kind(0.5)
        if crops:
            assert op.roi is not None
            start, end = kind(op.roi[k]), kind(op.roi[k + len(op.axes)])
            last = kind(size - 1)
            step = (end - start) * last / kind(out - 1) if out > 1 else kind(0)
            yield axis, start * last + index * step if out > 1 else half * (start + end) * last + index
        elif op.coordinates == "align_corners":
            yield axis, index * kind(size - 1) / kind(out - 1) if out > 1 else index * kind(0)
        elif op.coordinates == "asymmetric":
            yield axis, index / scale
        elif op.coordinates == "tf_half_pixel_for_nn":
            yield axis, (index + half) / scale
        elif op.coordinates == "pytorch_half_pixel" and out == 1:
            yield axis, index * kind(0)
        else:
            offset = kind(0)
            if op.coordinates == "half_pixel_symmetric":
                offset = kind(size) / kind(2) * (kind(1) - kind(out) / (scale * kind(size)))
            yield axis, offset + (index + half) / scale - half


def nearest(op: Resize, x: Array, outside: Any) -> Array:
    """The elements of `x` (of any dtype) that nearest takes; `outside` where tf_crop_and_resize leaves the image."""
    return _resized(op, x, outside, np.float32)


def linear(op: Resize, x: Array, outside: float) -> Array:
    """`x` (float64) interpolated along one axis after the other; beyond the first and last element it is constant."""
    return _resized(op, x, outside, np.float64)


def _resized(op: Resize, x: Array, outside: Any, kind: Any) -> Array:
    beyond: list[tuple[int, Array]] = []
    shape = x.shape
    for axis, place in positions(op, shape, kind):
        last = shape[axis] - 1
        if op.coordinates == "tf_crop_and_resize":
            beyond.append((axis, (place < 0) | (place > last)))
        if op.mode == "nearest":
            x = np.take(x, np.clip(_rounded(op.nearest, place), 0, last).astype(np.int64), axis)
            continue
        place = np.clip(place, 0, last)
        lower = np.minimum(np.floor(place).astype(np.int64), max(last - 1, 0))
        weight = (place - lower).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        x = np.take(x, lower, axis) * (1 - weight) + np.take(x, np.minimum(lower + 1, last), axis) * weight
    for axis, off in beyond:
        x[(slice(None),) * axis + (off,)] = outside
    return np.asarray(x, order="C")


def _rounded(mode: str, place: Array) -> Array:
    if mode == "floor":
        return np.asarray(np.floor(place))
    if mode == "ceil":
        return np.asarray(np.ceil(place))
    half = place.dtype.type(0.5)
    return np.asarray(np.ceil(place - half) if mode == "round_prefer_floor" else np.floor(place + half))
