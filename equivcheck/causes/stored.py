"""Hypotheses that need only what was stored and the real value: rounding, offsets, saturation, places, foreign content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from equivcheck.causes.hypotheses import Hypothesis, Step
from equivcheck.models.graph import Array

_MATCHED = 256  # positions of a channel that are compared to find where it came from
_ALIKE = 0.9  # share of them that must agree
_SCALE_STEP = 5e-4  # a fitted factor nearer to 1 than this is no factor
_NO_SCALE = 0.02  # and one so near to 0 says that codes are all the same
_MOST = 0.9  # of the buffer; a stretch that is longer was not left out
_VARIED = 4  # codes
_WRONG = 0.1  # of a stretch that another value holds
_HALF = 0.498
_FAR = 4.0  # codes from the zero point: nearer ones tell nothing of a scale


def of_stored(step: Step, values: Mapping[str, Array]) -> Iterator[Hypothesis]:
    """All hypotheses about what was stored; `values` are those stored before it on that side, by what to call them."""
    everywhere = np.ones((1,) * step.codes.ndim, bool)
    yield from _rounding(step, everywhere, "", 0)
    yield from _offset(step)
    yield from _scale(step)
    yield from _clipping(step)
    for region, place in _slices(step):
        yield from _rounding(step, region, f" in {place} only", 1)
        yield from _local(step, region, place)
    yield from _permuted(step)
    yield from _layout(step)
    yield from _unwritten(step)
    yield from _stale(step, values)


# -- rounding, offset, scale -------------------------------------------------------------------------------------------


def _rounding(step: Step, region: Array, place: str, fitted: int) -> Iterator[Hypothesis]:
    """Floor(x) is x - 1/2 rounded to nearest, and so on: each rounding as a shift of the real value.

    A little less than 1/2, so that a real value that is a code stays one.
    """

    def away() -> Array:
        signs: Array = np.sign(step.real - step.zero)
        return signs

    shifts = (
        ("truncation", "rounded down instead of to nearest", lambda: np.float64(-_HALF)),
        ("truncation", "rounded toward zero instead of to nearest", lambda: -_HALF * away()),
        ("truncation", "rounded up instead of to nearest", lambda: np.float64(_HALF)),
        ("double_rounding", "rounded to half a code first, then again", lambda: 0.25 * away()),
    )
    for kind, how, shift in shifts:
        yield step.supposing(
            kind, how + place, partial(lambda s: np.where(region, step.real + s(), step.real), shift), fitted=fitted
        )


def _offset(step: Step) -> Iterator[Hypothesis]:
    """The output's zero point is another: everything is the same number of codes away, a Relu's bound with it."""
    inside = (step.stored > step.least) & (step.stored < step.most) & step.wrong
    if not inside.any():
        return
    by = float(np.median((step.stored - np.clip(step.real, step.low, step.high))[inside]))
    for shift in {int(np.rint(by)), int(np.floor(by)), int(np.ceil(by))} - {0}:
        how = f"recomputed with output zero point {step.zero + shift} instead of {step.zero}"
        for bounds in _moved_bounds(step, shift):
            yield step.supposing(
                "zero_point", how, partial(lambda s: step.real + s, shift), low=bounds[0], high=bounds[1]
            )


def _moved_bounds(step: Step, shift: int) -> set[tuple[float, float]]:
    """Bounds at the ends of the range are those of saturation, or of a Relu or Clip, which move along."""
    low, high = (float(np.clip(bound + shift, step.least, step.most)) for bound in (step.low, step.high))
    return {
        (first, last)
        for first in {low, step.low if step.low == step.least else low}
        for last in {high, step.high if step.high == step.most else high}
    }


def _scale(step: Step) -> Iterator[Hypothesis]:
    factor = _factor(step, np.ones((1,) * step.codes.ndim, bool))
    if factor is not None:
        yield step.supposing(
            "scale", f"the result is {factor:.4g} times what it should be, as by one wrong scale",
            lambda: (step.real - step.zero) * factor + step.zero, fitted=1,
        )  # fmt: skip


def _factor(step: Step, region: Array) -> float | None:
    """Least squares of stored against real values (both without zero point), where neither is clipped; None near 1."""
    x, y = step.real - step.zero, step.stored - step.zero
    use = (np.abs(x) > _FAR) & (step.stored > step.low) & (step.stored < step.high) & region
    use &= (step.real > step.low) & (step.real < step.high)
    power = float(np.sum(x * x, where=use))
    factor = float(np.sum(x * y, where=use)) / power if power else 1.0
    return None if abs(factor - 1) < _SCALE_STEP or abs(factor) < _NO_SCALE else factor


# -- clipping ----------------------------------------------------------------------------------------------------------


def _clipping(step: Step) -> Iterator[Hypothesis]:
    top, bottom = float(step.stored.max()), float(step.stored.min())
    raw = bottom == 0.0
    if bottom < top < step.high:
        yield step.supposing(
            "saturation", f"saturates early, at code {top:.0f} instead of {step.high:.0f}", lambda: step.real, high=top
        )
    if bottom > step.low and (raw or bottom < top):
        yield step.supposing(
            "clip" if raw else "saturation",
            "clamped at raw code 0, not at the zero point" if raw
            else f"saturates early, at code {bottom:.0f} instead of {step.low:.0f}",
            lambda: step.real, low=bottom,
        )  # fmt: skip
    if (step.low, step.high) != (step.least, step.most):
        yield step.supposing("clip", "without its Relu or Clip", lambda: step.real, low=step.least, high=step.most)
    span = step.most - step.least + 1
    yield step.supposing(
        "wrap", "codes wrap instead of saturating",
        lambda: step.real - span * np.floor((np.rint(step.real) - step.least) / span), low=step.least, high=step.most,
    )  # fmt: skip


# -- one channel, one row, one column ----------------------------------------------------------------------------------


def _slices(step: Step) -> Iterator[tuple[Array, str]]:
    """(mask, name) of the only channel, row or column that has wrong codes."""
    for axis in range(1, step.codes.ndim):
        size = step.codes.shape[axis]
        others = tuple(k for k in range(step.codes.ndim) if k != axis)
        at = np.flatnonzero(step.wrong.any(axis=others))
        if size > 1 and at.size == 1:
            shape = [1] * step.codes.ndim
            shape[axis] = size
            mask = (np.arange(size) == at[0]).reshape(shape)
            yield mask, f"{_axis_name(axis, step.codes.ndim)} {at[0]}"


def _axis_name(axis: int, ndim: int) -> str:
    return (
        {1: "channel", 2: "row", 3: "column"}[axis] if ndim == 4 else "channel" if axis == 1 else f"axis {axis}, index"
    )


def _local(step: Step, region: Array, place: str) -> Iterator[Hypothesis]:
    distances = (step.stored - step.expected)[step.wrong]
    shift = int(np.median(distances))
    if shift:
        yield step.supposing(
            "offset", f"{place} alone is {abs(shift)} code{'s' if abs(shift) > 1 else ''} too {'high' if shift > 0 else 'low'}",
            lambda: np.clip(step.real, step.low, step.high) + np.where(region, shift, 0), fitted=1,
        )  # fmt: skip
    factor = _factor(step, region)
    if factor is not None:
        yield step.supposing(
            "scale", f"{place} alone is {factor:.4g} times what it should be",
            lambda: np.where(region, (step.real - step.zero) * factor + step.zero, step.real), fitted=2,
        )  # fmt: skip


# -- places ------------------------------------------------------------------------------------------------------------


def _permuted(step: Step) -> Iterator[Hypothesis]:
    """Each channel with wrong codes is another one's result."""
    if step.codes.ndim < 2 or step.codes.shape[1] < 2:
        return
    mine, right = (_by_channel(array) for array in (step.stored, step.expected))
    others = (0, *range(2, step.codes.ndim))
    moved = np.flatnonzero(step.wrong.any(axis=others))
    if moved.size < 2:
        return
    source = np.arange(mine.shape[0])
    for channel in moved:
        alike = np.mean(np.abs(right - mine[channel]) <= 1, axis=1)
        alike[channel] = 0.0
        best = int(np.argmax(alike))
        if alike[best] < _ALIKE:
            return
        source[channel] = best
    if set(source[moved]) != set(moved):
        return  # several hold the same: no exchange
    yield step.supposing("swapped_channels", _swap_words(moved, source), lambda: step.real[:, source], fitted=1)


def _by_channel(array: Array) -> Array:
    """(channels, at most _MATCHED evenly spread positions)."""
    flat = np.moveaxis(array, 1, 0).reshape(array.shape[1], -1)
    return flat[:, :: max(1, flat.shape[1] // _MATCHED)]


def _swap_words(moved: Array, source: Array) -> str:
    if moved.size == 2:
        return f"channels {moved[0]} and {moved[1]} exchanged"
    shown = ", ".join(f"{channel} holds {source[channel]}" for channel in moved[:4])
    return f"{moved.size} channels in other places ({shown}{', ...' if moved.size > 4 else ''})"


def _layout(step: Step) -> Iterator[Hypothesis]:
    shape, real = step.codes.shape, step.real
    if step.codes.ndim < 3:
        return
    last = (*shape[:1], *shape[2:], shape[1])
    yield step.supposing(
        "transposed_layout", "written channels last, read channels first",
        lambda: np.moveaxis(real, 1, -1).reshape(shape),
    )  # fmt: skip
    yield step.supposing(
        "transposed_layout", "written channels first, read channels last",
        lambda: np.moveaxis(real.reshape(last), -1, 1),
    )  # fmt: skip
    if step.codes.ndim == 4:
        yield step.supposing(
            "transposed_layout", "rows and columns exchanged", lambda: np.swapaxes(real, 2, 3).reshape(shape)
        )
        yield step.supposing("mirrored", "mirrored left to right", lambda: real[..., ::-1])
        yield step.supposing("mirrored", "mirrored upside down", lambda: real[:, :, ::-1])


# -- content that is not this step's -----------------------------------------------------------------------------------


def _named(step: Step, code: int) -> str:
    return " (its zero point)" if code == step.zero else " (raw 0)" if code == 0 else ""


def _unwritten(step: Step) -> Iterator[Hypothesis]:
    """The wrong codes are all the same: a row, a column, a channel or the end of the buffer was not written."""
    if not step.wrong_count:
        return
    found = step.codes[step.wrong]
    code = int(found[0])
    if np.count_nonzero(found != code) > found.size // 20:
        return
    if np.all(step.codes == code):
        how = f"every code is {code}{_named(step, code)}"
        yield step.supposing(
            "not_written", how, lambda: np.full(step.codes.shape, float(code)), low=step.least, high=step.most
        )
        return
    for region, place in _slices(step):
        if region.shape[1] > 1 and code in (step.low, step.high):
            return  # a channel at the end of its range was computed, wrongly
        yield step.supposing(
            "not_written", f"{place} holds code {code}{_named(step, code)} everywhere",
            partial(_filled, step, region, code), fitted=1, low=step.least, high=step.most,
        )  # fmt: skip
    start, stop = _extent(step)
    if stop - start > _MOST * step.codes.size:
        return  # something was computed, and made nearly all the same
    yield step.supposing(
        "not_written", f"elements {start} to {stop - 1} of {step.codes.size} in memory hold code {code}{_named(step, code)}",
        lambda: _patched(step, start, np.full(stop - start, float(code))), fitted=2,
    )  # fmt: skip


def _filled(step: Step, region: Array, code: int) -> Array:
    return np.where(region, float(code), np.clip(step.real, step.low, step.high))


def _extent(step: Step) -> tuple[int, int]:
    at = np.flatnonzero(step.wrong.reshape(-1))
    return int(at[0]), int(at[-1]) + 1


def _patched(step: Step, start: int, content: Array) -> Array:
    made = np.clip(step.real, step.low, step.high).reshape(-1)
    made[start : start + content.size] = content
    return made.reshape(step.codes.shape)


def _stale(step: Step, values: Mapping[str, Array]) -> Iterator[Hypothesis]:
    """The stretch of memory from the first to the last wrong code is what another value holds at that place.

    A few codes over and over are no content that could be recognised, and right codes in between would be a coincidence:
    another value may be nearly the same, one that was copied, say.
    """
    if not step.wrong_count:
        return
    start, stop = _extent(step)
    if step.wrong_count < _WRONG * (stop - start):
        return
    mine = np.ascontiguousarray(step.codes).reshape(-1)[start:stop]
    if np.unique(mine).size < min(_VARIED, mine.size):
        return
    for name, other in values.items():
        if other.dtype.itemsize != step.codes.dtype.itemsize or not other.size:
            continue
        content = np.resize(np.ascontiguousarray(other).reshape(-1).view(step.codes.dtype), stop)[start:]
        probe = slice(None, None, max(1, content.size // _MATCHED))
        if np.mean(content[probe] == mine[probe]) < _ALIKE:
            continue
        yield step.supposing(
            "stale_buffer", f"elements {start} to {stop - 1} of {step.codes.size} in memory are those of {name}",
            partial(_patched, step, start, content.astype(np.float64)), fitted=1, low=step.least, high=step.most,
        )  # fmt: skip
