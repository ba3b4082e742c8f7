"""`step_tally`: one stored value against the real value of its step, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from equivcheck.metrics.blocks import Array, Grid, Scratch, walk
from equivcheck.result import ChannelExcess, StepError

_ONE, _NONE = np.ones(()), np.zeros(())
INFINITE = 1e300  # stands for "infinitely wrong" (NaN where a number is due) in figures that JSON must be able to hold


@dataclass(frozen=True, eq=False)
class StepTally:
    """Figures behind `StepError`: one value against the real value of its step.

    `by_channel` is the largest |code - clip(real)| of each channel (axis 1; one channel where there is none), in LSB, and
    `live` says of each channel whether any of its elements was not clamped.
    """

    shape: tuple[int, ...]
    n: int
    by_channel: Array
    live: Array
    worst: tuple[int, ...] = ()
    code: float | None = None
    real: float | None = None
    off: int = 0
    max_lsb: float = 0.0
    sum_bias: float = 0.0
    saturated: int = 0
    exact: bool = False
    merged: tuple[str, ...] = field(default=())
    envelope: float = 0.0
    off_grid: float = 0.0
    half: float = 0.5

    @property
    def distance(self) -> float:
        """The largest |code - clip(real)|, in LSB."""
        return float(np.max(self.by_channel, initial=0.0))

    @property
    def excess(self) -> float:
        """How far beyond rounding: distance - 1/2 (distance itself where nothing is rounded), at least 0."""
        return max(0.0, self.distance - self.half)

    def __add__(self, other: StepTally) -> StepTally:
        worst = self if self.distance >= other.distance else other
        same = self.by_channel.shape == other.by_channel.shape
        return replace(
            worst,
            n=self.n + other.n,
            by_channel=np.maximum(self.by_channel, other.by_channel) if same else worst.by_channel,
            live=self.live | other.live if same else worst.live,
            off=self.off + other.off,
            max_lsb=max(self.max_lsb, other.max_lsb),
            sum_bias=self.sum_bias + other.sum_bias,
            saturated=self.saturated + other.saturated,
            exact=self.exact and other.exact,
            envelope=max(self.envelope, other.envelope),
            off_grid=max(self.off_grid, other.off_grid),
        )

    def finish(self) -> StepError:
        channel = int(self.by_channel.argmax()) if self.by_channel.size > 1 and self.excess > 0 else None
        excess = min(self.excess, INFINITE)
        return StepError(
            n=self.n,
            excess=excess,
            worst=list(self.worst),
            worst_channel=None if channel is None else ChannelExcess(index=channel, excess=excess),
            off=self.off,
            max_lsb=min(self.max_lsb, INFINITE),
            bias_lsb=self.sum_bias / self.n if self.n else 0.0,
            saturated_share=self.saturated / self.n if self.n else 0.0,
            off_grid=min(self.off_grid, INFINITE),
            merged=list(self.merged),
            envelope=self.envelope,
            code=self.code,
            real=self.real,
            exact=self.exact,
        )


def step_tally(
    codes: Array,
    result: Array,
    grid: Grid | None,
    bounds: tuple[float, float] | None,
    *,
    clamped_at: tuple[float, ...] = (),
) -> StepTally:
    """Measure `codes` against the `result` of their step, before its Q.

    `codes`: what the engine stored. `result`: the step's real result, same number of elements; divided by `grid.scale` and
    shifted by `grid.zero` to be in codes (None: it is in the units of `codes` already). `bounds`: range of the codes
    (None: no clipping, as for floats). `clamped_at`: codes at which the step's own Relu or Clip stops.

    The distance is |code - clip(real)|: at most 1/2 for correct rounding, whichever neighbour of a tie was taken.
    """
    sums = _StepSums(codes.shape, bounds, [*(bounds or ()), *clamped_at])
    parameters = () if grid is None else grid.over(codes.shape)
    with np.errstate(invalid="ignore"):  # Inf - Inf: see _beyond_numbers
        for start, (code, real, *scale_and_zero) in walk(codes, result.reshape(codes.shape), *parameters):
            sums.add(start, code, real, scale_and_zero)
    return sums.finish(0.5 if grid is not None else 0.0)


class _StepSums:
    """What blocks of a step add up to. Rows are what lies behind axis 1: one row for each sample and channel."""

    def __init__(self, shape: tuple[int, ...], bounds: tuple[float, float] | None, stops: list[float]) -> None:
        self.shape, self.bounds = shape, bounds
        self.stops = [int(stop) if stop.is_integer() else stop for stop in stops]  # int8 == int: no cast of the codes
        self.n = math.prod(shape)
        channelled = len(shape) > 1 and self.n > 0
        self.channels, self.width = (shape[1], math.prod(shape[2:])) if channelled else (1, max(1, self.n))
        self.scratch = Scratch(self.n)
        self.by_channel = np.zeros(self.channels)
        self.live = np.full(self.channels, not self.stops)
        self.peak, self.at, self.code, self.real = -1.0, 0, 0.0, 0.0
        self.off = self.saturated = 0
        self.sum_bias = 0.0

    def add(self, start: int, code: Array, result: Array, scale_and_zero: list[Array]) -> None:
        """Add a block, the first element of which has the flat index `start`.

        Reals are compared, `result` and (code - zero) * scale, which float64 holds exactly where a float32 scale meets codes of
        up to 28 bits; what is found is divided by the scale. So ties stay ties, and a block is multiplied, which takes a third
        of the time that dividing it takes.
        """
        scale, zero = (_plain(parameter) for parameter in scale_and_zero or (_ONE, _NONE))
        real = self.scratch.cast("real", np.float64, result)
        if self.bounds is not None:
            np.clip(real, *((bound - zero) * scale for bound in self.bounds), out=real)
        distance = self.scratch.cast("distance", np.float64, code)
        if scale_and_zero:
            distance -= zero
            distance *= scale
        distance -= real
        np.abs(distance, out=distance)
        if isinstance(scale, float):
            lsb = scale
        else:
            distance /= scale
            lsb = 1.0
        rows = self._row_starts(start, code.size)
        by_row = _by_row(np.maximum, distance, rows)
        if not np.isfinite(by_row).all():
            by_row = _by_row(np.maximum, _beyond_numbers(distance, code, real), rows)
        by_row = by_row / lsb
        first = start // self.width
        self._fold(np.maximum, self.by_channel, first, by_row)
        peak = float(by_row.max())
        if peak > self.peak:
            k = int(distance.argmax())
            self.peak, self.at, self.code = peak, start + k, float(code[k])
            self.real = float(real[k] / _at(scale, k) + _at(zero, k))
        if peak > 0.5:
            where = np.greater(distance, 0.5 * lsb, out=self.scratch.get("stopped", np.bool_, code.size)).nonzero()[0]
            above = (code[where] - _at(zero, where)) * _at(scale, where) > real[where]
            self._add_off(distance[where] / lsb, above)
        self._add_stopped(code, first, rows)

    def _add_off(self, distance: Array, above: Array) -> None:
        """Count the elements beyond rounding: their distance, and whether the code is above the real value."""
        self.off += distance.size
        finite = np.isfinite(distance)
        steps = np.ceil(distance[finite] - 0.5)
        self.sum_bias += float(np.where(above[finite], steps, -steps).sum())

    def _add_stopped(self, code: Array, first: int, rows: Array) -> None:
        """Count the codes at which the step stops; a channel with any other code is live."""
        if not self.stops:
            return
        stopped = np.equal(code, self.stops[0], out=self.scratch.get("stopped", np.bool_, code.size))
        for stop in self.stops[1:]:
            stopped |= np.equal(code, stop, out=self.scratch.get("at stop", np.bool_, code.size))
        count = int(np.count_nonzero(stopped))
        self.saturated += count
        if not self.live.all():
            live_row = ~_by_row(np.logical_and, stopped, rows) if count else np.ones(rows.size, bool)
            self._fold(np.logical_or, self.live, first, live_row)

    def _row_starts(self, start: int, size: int) -> Array:
        """Positions in a block at which a row starts, the block's first element included."""
        following = np.arange(self.width - start % self.width, size, self.width)
        return np.concatenate([np.zeros(1, following.dtype), following])

    def _fold(self, operation: np.ufunc, by_channel: Array, first: int, by_row: Array) -> None:
        """Work figures of consecutive rows, from row `first` on, into those of their channels."""
        channel = first % self.channels
        head = by_row[: self.channels - channel]
        here = by_channel[channel : channel + head.size]
        operation(here, head, out=here)
        cycles, rest = divmod(by_row.size - head.size, self.channels)
        whole = by_row[head.size : head.size + cycles * self.channels].reshape(cycles, self.channels)
        if cycles:
            operation(by_channel, operation.reduce(whole, axis=0), out=by_channel)
        if rest:
            operation(by_channel[:rest], by_row[by_row.size - rest :], out=by_channel[:rest])

    def finish(self, half: float) -> StepTally:
        self.scratch.release()
        return StepTally(
            shape=self.shape,
            n=self.n,
            by_channel=self.by_channel,
            live=self.live,
            worst=tuple(int(i) for i in np.unravel_index(self.at, self.shape)) if self.n else (),
            code=self.code if self.n else None,
            real=self.real if self.n and math.isfinite(self.real) else None,
            off=self.off,
            max_lsb=float(np.ceil(self.peak - 0.5)) if self.peak > 0.5 else 0.0,
            sum_bias=self.sum_bias,
            saturated=self.saturated,
            half=half,
        )


def _by_row(operation: np.ufunc, values: Array, rows: Array) -> Array:
    """The figure of each row, given where the rows start."""
    found: Array = values if rows.size == values.size else operation.reduceat(values, rows)
    return found


def _beyond_numbers(distance: Array, code: Array, real: Array) -> Array:
    """NaN or Inf as the step gives it is right; any other is infinitely wrong. Writes into `distance`."""
    odd = ~np.isfinite(distance)
    right = (code == real) | (np.isnan(code) & np.isnan(real))
    distance[odd] = np.where(right[odd], 0.0, np.inf)
    return distance


def _plain(parameter: Array) -> Array | float:
    """A parameter that is one for all as a number: an array of no dimensions costs more in every operation."""
    return parameter if parameter.ndim else float(parameter)


def _at(parameter: Array | float, where: Any) -> Any:
    """A parameter of some elements: one for all, or one each."""
    return parameter if isinstance(parameter, float) else parameter[where]
