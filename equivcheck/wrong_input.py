"""Was it the same input? Finds what turns the picture one side should have had into the one it had.

Tried are the ways pictures go wrong before a model: layout (NCHW, NHWC, transposed or only relabelled), colour order, turned
and mirrored pictures, another scale and mean, signed for unsigned codes, and any of the first with any of the last. Another
resize filter, crop or decoder is never claimed: no formula turns one such picture into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.result import Cause

EXPLAINED = 0.99  # of all elements, and of those that differ: a fitted factor turns the rounding of a few codes
COLOURS = (3, 4)
_FEWEST = 16  # elements; fewer are explained by anything
_FLAT = 1e-6  # a spread below this share of the magnitude is no picture
_ROUNDED = 0.52  # codes: half, and the error of a fitted factor
_RELATIVE = 1e-3  # of the spread of floats: a quarter of a grey level
_ROUNDING = 1.0  # codes: a formula that moves nothing further is another rounding, not another input
_NEAR = 1e-3  # relative error of a factor that has a name; offsets, of the larger of 1 and the offset
_IMAGENET = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # mean, std of RGB in 0 to 1
_NAMED = {
    1 / 255: "1/255", 1 / 127.5: "1/127.5", 1 / 128: "1/128", 1 / 256: "1/256",
    255.0: "255", 127.5: "127.5", 128.0: "128", 256.0: "256", 2.0: "2", 0.5: "1/2",
}  # fmt: skip
_TURNS: tuple[tuple[str, Callable[[Array], Array]], ...] = (  # of the last two axes
    ("", lambda x: x),
    ("mirrored left to right", lambda x: x[..., ::-1]),
    ("upside down", lambda x: x[..., ::-1, :]),
    ("turned by 180 degrees", lambda x: x[..., ::-1, ::-1]),
    ("mirrored along its diagonal (rows for columns)", lambda x: np.swapaxes(x, -1, -2)),
    ("turned left by 90 degrees", lambda x: np.rot90(x, 1, (-2, -1))),
    ("turned right by 90 degrees", lambda x: np.rot90(x, -1, (-2, -1))),
    ("mirrored along its other diagonal", lambda x: np.swapaxes(x, -1, -2)[..., ::-1, ::-1]),
)


@dataclass(frozen=True, eq=False)
class _Moved:
    """The wanted picture with its elements in other places, and how; `channel` is the axis of its colours, if any.

    Its shape is that of its layout: where bytes were only relabelled, it is not the shape of what was got.
    """

    words: tuple[str, ...]
    picture: Array
    channel: int | None


def explain_input(wanted: Array, got: Array, *, scale: float = 1.0, zero_point: int = 0) -> Cause | None:
    """Return what turns `wanted` into `got`, as a cause of kind `wrong_input`; None where they agree or nothing does.

    Numbers of any dtype, pictures (NCHW, NHWC, CHW, HWC) or anything else (scale and offset only); shapes may be
    permutations of each other. Integer `got` may be rounded (to within half a code) and saturated. Of the changes that
    explain 99 % of the elements the simplest is named; `explains` counts those that differ. With the `scale` and
    `zero_point` of codes, the offset is told in the reals they stand for.
    """
    if wanted.size != got.size or got.size < _FEWEST or not _varies(wanted) or not _varies(got):
        return None
    reals, found = wanted.astype(np.float64), got.astype(np.float64)
    allowed = _ROUNDED if got.dtype.kind in "iu" else _RELATIVE * float(np.std(found))
    same = found - _stored(reals, got.dtype) if wanted.shape == got.shape else np.full(got.shape, np.inf)
    differs = np.abs(same) > allowed
    if not differs.any():
        return None
    best: tuple[int, tuple[str, ...], Array] | None = None
    for moved in sorted(_moves(reals, got.shape), key=lambda m: len(m.words)):
        if best is not None and len(moved.words) >= best[0]:
            break
        mine = found.reshape(moved.picture.shape)
        for cost, words, values in _valued(moved, mine, got.dtype, (scale, zero_point)):
            changes = len(moved.words) + cost
            if not changes or (best is not None and changes >= best[0]):
                continue
            fits = (np.abs(mine - values) <= allowed).reshape(got.shape)
            mended = np.count_nonzero(fits & differs) >= EXPLAINED * np.count_nonzero(differs)
            if mended and np.count_nonzero(fits) >= EXPLAINED * fits.size:
                best = changes, (*moved.words, *words), fits
    if best is None:
        return None
    count, total = int(np.count_nonzero(best[2] & differs)), int(np.count_nonzero(differs))
    evidence = f"what was stored is the input {', '.join(best[1])}: explains {count} of {total} elements that differ"
    return Cause(kind="wrong_input", evidence=evidence, explains=[count, total])


def _varies(array: Array) -> bool:
    if array.dtype.kind not in "iuf" or not np.all(np.isfinite(array)):
        return False
    low, high = float(array.min()), float(array.max())
    return high - low > _FLAT * max(abs(low), abs(high))


def _stored(values: Array, dtype: np.dtype[Any]) -> Array:
    """Saturated as `dtype` does; floats as they are."""
    if dtype.kind not in "iu":
        return values
    limits = np.iinfo(dtype)
    return np.clip(values, limits.min, limits.max)


# -- places ------------------------------------------------------------------------------------------------------------


def _moves(wanted: Array, shape: tuple[int, ...]) -> Iterator[_Moved]:
    """Every way the elements of `wanted` may have got elsewhere on their way into `shape`."""
    axis = _channel_axis(wanted.shape)
    if axis is None:
        if wanted.shape == shape:
            yield _Moved((), wanted, None)
        return
    first = np.moveaxis(wanted, axis, -3)  # (..., C, H, W)
    orders = (1, -1) if first.shape[-3] in COLOURS else (1,)
    for (turn, turned), order in product(_TURNS, orders):
        picture = turned(_reordered(first, order))
        words = [word for word in (turn, "in reversed colour order (BGR for RGB)" if order < 0 else "") if word]
        for layout in (axis - wanted.ndim, -4 - (axis - wanted.ndim)):  # -3 and -1: as it is, and the other
            yield from _laid_out(picture, words, layout, layout == axis - wanted.ndim, shape)


def _laid_out(first: Array, words: list[str], axis: int, kept: bool, shape: tuple[int, ...]) -> Iterator[_Moved]:
    """A channels-first picture with its channels at `axis`, its elements in memory order taken as `shape`."""
    picture = np.moveaxis(first, -3, axis)
    name = "channels last (NHWC)" if axis == -1 else "channels first (NCHW)"
    if picture.shape == shape:
        layout = "" if kept else f"transposed to {name}"
    elif first.shape[-3] == 1 and not kept:
        return  # one channel: the same bytes
    else:
        layout = f"laid out {name} in memory but read as shape {list(shape)}"
    yield _Moved((*filter(None, (layout,)), *words), picture, axis % picture.ndim)


def _reordered(first: Array, order: int) -> Array:
    """Colours reversed; a fourth channel (alpha) stays the last."""
    return first if order > 0 else np.concatenate([first[..., 2::-1, :, :], first[..., 3:, :, :]], -3)


def _channel_axis(shape: tuple[int, ...]) -> int | None:
    """The axis of 1, 3 or 4 channels of NCHW, NHWC, CHW or HWC; None where it is no such picture."""
    if len(shape) not in (3, 4):
        return None
    return next((axis for axis in (len(shape) - 3, len(shape) - 1) if shape[axis] in (1, *COLOURS)), None)


# -- values ------------------------------------------------------------------------------------------------------------


def _valued(
    moved: _Moved, got: Array, dtype: np.dtype[Any], unit: tuple[float, int]
) -> Iterator[tuple[int, tuple[str, ...], Array]]:
    """(number of changes, words, values): as they are, as other codes, scaled alike, and scaled by channel."""
    picture = moved.picture
    yield 0, (), _stored(picture, dtype)
    yield from _other_codes(picture, dtype)
    for cost, channel in ((1, None), (2, moved.channel)):
        if cost == 2 and (channel is None or picture.shape[channel] == 1):
            return
        factor, offset = _fit(picture, got, dtype, channel)
        values = _stored(picture * factor + offset, dtype)
        if moved.words or dtype.kind not in "iu" or np.max(np.abs(values - _stored(picture, dtype))) > _ROUNDING:
            scale, zero = unit
            yield cost, (_words(factor.ravel(), (offset.ravel() - zero + zero * factor.ravel()) * scale),), values


def _other_codes(picture: Array, dtype: np.dtype[Any]) -> Iterator[tuple[int, tuple[str, ...], Array]]:
    """Bytes of signed codes taken for unsigned ones, or the reverse."""
    if dtype.itemsize != 1 or dtype.kind not in "iu":
        return
    low = float(np.iinfo(dtype).min)
    codes = np.rint(picture)
    yield 1, ("with its bytes taken for the other signedness",), (codes - low) % 256 + low
    yield 1, ("with its codes 128 off (signed for unsigned)",), (codes + 128 - low) % 256 + low


def _fit(picture: Array, got: Array, dtype: np.dtype[Any], channel: int | None) -> tuple[Array, Array]:
    """Least squares of `got` = factor * `picture` + offset where `got` is not saturated, shaped to broadcast."""
    axes = tuple(k for k in range(picture.ndim) if k != channel)
    use = np.ones(got.shape, bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        use = (got > limits.min) & (got < limits.max)
    count = np.maximum(np.sum(use, axis=axes, keepdims=True), 1)
    x_mean, y_mean = (np.sum(a, axis=axes, keepdims=True, where=use) / count for a in (picture, got))
    x = picture - x_mean
    power = np.sum(x * x, axis=axes, keepdims=True, where=use)
    factor = np.sum(x * (got - y_mean), axis=axes, keepdims=True, where=use) / np.where(power > 0, power, 1.0)
    return factor, y_mean - factor * x_mean


def _words(factor: Array, offset: Array) -> str:
    known = _imagenet(factor, offset)
    if known:
        return known
    parts = []
    if not np.allclose(factor, 1, rtol=_NEAR):
        parts.append(f"times {_listed(factor, _name)}")
    if np.all(offset < -_NEAR):
        parts.append(f"minus {_listed(-offset, lambda v: f'{v:.4g}')}")
    elif not np.allclose(offset, 0, atol=_NEAR):
        parts.append(f"plus {_listed(offset, lambda v: f'{v:.4g}')}")
    return f"with its values {' and '.join(parts) or 'as they are'}"


def _listed(values: Array, text: Callable[[float], str]) -> str:
    if np.allclose(values, values[0], rtol=_NEAR, atol=_NEAR * float(np.abs(values[0]))):
        return text(float(values[0]))
    return f"[{', '.join(text(float(v)) for v in values)}] by channel"


def _name(factor: float) -> str:
    for value, name in _NAMED.items():
        if abs(factor / value - 1) < _NEAR:
            return f"{name} ({factor:.4g})" if "/" in name else name
    return f"{factor:.4g}"


def _imagenet(factor: Array, offset: Array) -> str:
    """ImageNet's mean and standard deviation, applied or left out, on values of 0 to 1 or 0 to 255."""
    mean, std = _IMAGENET
    if factor.size != mean.size:
        return ""
    for unit, words in ((1.0, "0 to 1"), (1 / 255, "0 to 255")):
        if _alike(factor, unit / std) and _alike(offset, -mean / std):
            return f"normalised by ImageNet's mean and std for values of {words}"
        if _alike(factor, std / unit) and _alike(offset, mean / unit):
            return f"without ImageNet's mean and std, as values of {words}"
    return ""


def _alike(values: Array, others: Array) -> bool:
    return bool(np.allclose(values, others, rtol=5 * _NEAR, atol=5 * _NEAR))
