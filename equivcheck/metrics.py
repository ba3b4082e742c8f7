"""Two arrays -> figures, in one pass over each block of both, and mergeable over blocks and samples.

* `Tally`: candidate against reference ("since the input"); `finish` gives `Metrics`.
* `StepTally`: one value against the real value of its step ("this step"); `finish` gives `StepError`.

Integers are compared as integers, floats in float64; every figure is over the pairs in which both sides are finite, NaN
and Inf are counted apart, by position. The definitions stand beside the fields of `equivcheck.result.Metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from equivcheck.result import ChannelError, ChannelExcess, Metrics, StepError

Array = npt.NDArray[Any]
BLOCK = 1 << 16  # elements: 64 Ki float64 of scratch stay in L2 (measured: 32 to 64 Ki elements are best)
INFINITE = 1e300  # stands for "infinitely wrong" (NaN where a number is due) in figures that JSON must be able to hold
_CLOSE = (1e-3, 1e-3)
_SMALLEST = 1e-290  # below, sums of squares have lost digits to underflow
LADDER = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class Grid:
    """Scale and zero point that turn codes of an array into reals; shaped to broadcast against it (float64, int64)."""

    scale: Array
    zero: Array

    @property
    def step(self) -> float:
        """One LSB; the largest where it is per channel."""
        return float(np.max(self.scale))


@dataclass(frozen=True)
class Tally:
    """Sums behind `Metrics`. `a` is the reference, `b` the candidate, `d` = b - a in stored units."""

    shape: tuple[int, ...] = ()
    n: int = 0
    finite: int = 0
    mismatched: int = 0
    max_abs: float = 0.0
    at: int = 0
    sum_abs: float = 0.0
    sum_sq: float = 0.0
    sum_d: float = 0.0
    dot: float = 0.0
    ref_sq: float = 0.0
    cand_sq: float = 0.0
    err_sq: float = 0.0
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    nan_mismatch: int = 0
    inf_mismatch: int = 0
    ladder: tuple[int, ...] = ()
    lsb: float | None = None
    real: bool = False
    channel: tuple[int, float] | None = None
    far: int = 0

    def __add__(self, other: Tally) -> Tally:
        if self.n == 0:
            return other
        if other.n == 0:
            return self
        worst = self if self.max_abs >= other.max_abs else other
        counts = (
            tuple(x + y for x, y in zip(self.ladder, other.ladder, strict=False))
            if self.ladder and other.ladder
            else ()
        )
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in (
                "n", "finite", "mismatched", "sum_abs", "sum_sq", "sum_d", "dot", "ref_sq", "cand_sq", "err_sq",
                "nan_mismatch", "inf_mismatch", "far",
            )
        }  # fmt: skip
        return replace(
            worst,
            **sums,
            nan=(self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]),
            inf=(self.inf[0] + other.inf[0], self.inf[1] + other.inf[1]),
            ladder=counts,
        )

    def finish(self) -> Metrics:
        """Return the figures; those that do not exist (no finite pair, a zero norm) are None."""
        some = self.finite > 0
        max_abs = _finite(self.max_abs) if some else None
        bias = _finite(self.sum_d / self.finite) if some else None
        return Metrics(
            n=self.n,
            mismatched=self.mismatched,
            identical=self.mismatched == 0,
            max_abs=max_abs,
            argmax=[int(i) for i in np.unravel_index(self.at, self.shape)] if some and self.n else None,
            mean_abs=_finite(self.sum_abs / self.finite) if some else None,
            rmse=_finite(np.sqrt(np.longdouble(self.sum_sq) / self.finite)) if some else None,
            bias=bias,
            max_lsb=None if self.lsb is None or max_abs is None else max_abs * self.lsb,
            bias_lsb=None if self.lsb is None or bias is None else bias * self.lsb,
            cosine=self._cosine(),
            snr_db=self._snr(),
            snr_note=self._snr_note(),
            domain="real" if self.real else "codes",
            nan=list(self.nan),
            inf=list(self.inf),
            nan_mismatch=self.nan_mismatch,
            inf_mismatch=self.inf_mismatch,
            ladder={str(rung): count for rung, count in zip(LADDER, self.ladder, strict=False) if count},
            worst_channel=None
            if self.channel is None
            else ChannelError(index=self.channel[0], max_abs=self.channel[1]),
        )

    def _cosine(self) -> float | None:
        """1 - (|d|^2 - (|a| - |b|)^2) / (2 |a| |b|): keeps its digits close to 1, where dot / (|a| |b|) is noise.

        Where the norms differ much, that difference of squares is noise instead, and the plain quotient is good.
        """
        a, b = np.sqrt(np.longdouble(self.ref_sq)), np.sqrt(np.longdouble(self.cand_sq))
        if a == 0.0 or b == 0.0 or not np.isfinite(a) or not np.isfinite(b):
            return None
        if max(a, b) > 2.0 * min(a, b):
            return float(np.clip(np.longdouble(self.dot) / (a * b), -1.0, 1.0))
        return float(1.0 - (np.longdouble(self.err_sq) - (a - b) ** 2) / (2.0 * a * b))

    def _snr(self) -> float | None:
        """10 log10(sum a^2 / sum (b - a)^2) in dB, of real values where the quantisation is known."""
        if self._snr_note() is not None:
            return None
        ratio = np.longdouble(self.ref_sq) / np.longdouble(self.err_sq)
        return float(10.0 * np.log10(ratio)) if np.isfinite(ratio) and ratio > 0 else None

    def _snr_note(self) -> Any:
        if self.finite == 0:
            return "empty"
        if self.err_sq == 0.0:
            return "equal"
        return "reference is zero" if self.ref_sq == 0.0 else None


def tally(
    reference: Array,
    candidate: Array,
    grid: Grid | None = None,
    candidate_grid: Grid | None = None,
    close: tuple[float, float] | None = None,
) -> Tally:
    """Measure `candidate` against `reference`: arrays of one shape, both coded or both float.

    `grid` is the reference's quantisation (None: stored as it is); `candidate_grid` the candidate's, where it differs.
    Cosine and SNR are of real values where a grid is given. `far` counts elements beyond atol + rtol * |reference| of
    `close`, in stored units (None: unequal integers, floats beyond 1e-3 + 1e-3 |reference|). Raises ValueError when the
    shapes differ.
    """
    if reference.shape != candidate.shape:
        raise ValueError(f"shapes differ: {reference.shape} and {candidate.shape}")
    total = Tally(shape=reference.shape, real=grid is not None, lsb=None if grid is None else 1.0)
    ref, cand = _plain(reference), _plain(candidate)
    if np.issubdtype(ref.dtype, np.integer) and np.issubdtype(cand.dtype, np.integer):
        return _add_integers(total, ref, cand, grid, candidate_grid or grid, close)
    total = _add_floats(total, _reals(ref, grid), _reals(cand, candidate_grid or grid), close or _CLOSE)
    return replace(total, real=True, lsb=None, channel=_worst_channel(ref, cand))


def _plain(array: Array) -> Array:
    """Bring exotic types (bfloat16, float8, int4, bool, big-endian) to a native numpy type that holds them exactly."""
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    if array.dtype.kind == "c":
        raise ValueError("complex values are not compared")
    if array.dtype.kind in "iuf":
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return array.astype(np.int16) if "int" in array.dtype.name else array.astype(np.float32)


def _add_integers(
    total: Tally,
    ref: Array,
    cand: Array,
    grid: Grid | None,
    candidate_grid: Grid | None,
    close: tuple[float, float] | None,
) -> Tally:
    if ref.dtype.itemsize == 8 or cand.dtype.itemsize == 8:
        return replace(_add_wide(total, ref, cand, grid, candidate_grid, close), channel=_worst_channel(ref, cand))
    if any(g is not None and not _along_rows(g, ref.shape) for g in (grid, candidate_grid)):
        return replace(_add_wide(total, ref, cand, grid, candidate_grid, close), channel=_worst_channel(ref, cand))
    rows, channels = _rows(ref.shape)
    sums = _CodeSums(rows, channels, grid, candidate_grid, close)
    a, b = ref.reshape(rows, -1), cand.reshape(rows, -1)
    for block in _blocks(rows, a.shape[1]):
        sums.add(block, a[block].astype(np.float64), b[block].astype(np.float64))
    return sums.finish(replace(total, n=ref.size, finite=ref.size))


class _CodeSums:
    """Sums over blocks of integer pairs of at most 32 bits, held exactly in float64."""

    def __init__(
        self,
        rows: int,
        channels: int,
        grid: Grid | None,
        candidate_grid: Grid | None,
        close: tuple[float, float] | None,
    ) -> None:
        self.rows, self.channels = rows, channels
        self.grid, self.candidate_grid = grid, candidate_grid
        self.close = close or (0.0, 0.0)
        self.far = 0
        self.by_row = np.zeros(rows)
        self.exceeding = [0] * len(LADDER)
        self.peak, self.at = 0.0, 0
        self.sum_abs = self.sum_sq = self.sum_d = self.dot = self.ref_sq = self.cand_sq = self.err_sq = 0.0

    def add(self, block: slice, a: Array, b: Array) -> None:
        d = b - a
        distance = np.abs(d)
        self.by_row[block] = row_max = distance.max(axis=1, initial=0.0)
        peak = float(row_max.max(initial=0.0))
        if peak:
            self._add_unequal(block, d, distance, peak)
            self.far += int(np.count_nonzero(distance > self.close[0] + self.close[1] * np.abs(a)))
        self._add_reals(block, a, b, d)

    def _add_unequal(self, block: slice, d: Array, distance: Array, peak: float) -> None:
        if peak > self.peak:
            self.peak, self.at = peak, block.start * d.shape[1] + int(distance.argmax())
        for k, rung in enumerate(LADDER):
            if rung >= peak:
                break
            self.exceeding[k] += int(np.count_nonzero(distance > rung))
        self.sum_abs += float(distance.sum())
        self.sum_sq += _dot(d, d)
        self.sum_d += float(d.sum())

    def _add_reals(self, block: slice, a: Array, b: Array, d: Array) -> None:
        """Products of real values; with one grid for all, the scale comes out of the sums."""
        own, other = self.grid, self.candidate_grid
        if own is not None and (own is not other or own.scale.size > 1):
            other = other or own
            for values, grid in ((a, own), (b, other)):
                values -= _by_row(grid.zero, block, self.rows, self.channels)
                values *= _by_row(grid.scale, block, self.rows, self.channels)
            square, d = 1.0, b - a
        elif own is not None:
            a -= float(own.zero)
            b -= float(own.zero)
            square = float(own.scale) ** 2
        else:
            square = 1.0
        self.dot += _dot(a, b) * square
        self.ref_sq += _dot(a, a) * square
        self.cand_sq += _dot(b, b) * square
        self.err_sq += _dot(d, d) * square

    def finish(self, total: Tally) -> Tally:
        by_channel = self.by_row.reshape(-1, self.channels).max(axis=0, initial=0.0)
        worst = int(by_channel.argmax()) if by_channel.size else 0
        return replace(
            total,
            mismatched=self.exceeding[0],
            far=self.far,
            max_abs=self.peak,
            at=self.at,
            sum_abs=self.sum_abs,
            sum_sq=self.sum_sq,
            sum_d=self.sum_d,
            dot=self.dot,
            ref_sq=self.ref_sq,
            cand_sq=self.cand_sq,
            err_sq=self.err_sq,
            ladder=_rungs(total.n, self.exceeding),
            channel=(worst, float(by_channel[worst])) if self.channels > 1 and self.peak else None,
        )


def _dot(a: Array, b: Array) -> float:
    """Sum of products without BLAS: OpenBLAS hands even 64 Ki elements to threads, which costs 7 ms a call."""
    return float(np.einsum("ij,ij->", a, b))


def _rungs(n: int, exceeding: list[int]) -> tuple[int, ...]:
    """Counts in (previous rung, rung] from counts above each rung; the last rung takes all that is beyond."""
    above = [n, *exceeding[:-1], 0]
    return tuple(x - y for x, y in pairwise(above))


def _add_wide(
    total: Tally,
    ref: Array,
    cand: Array,
    grid: Grid | None,
    candidate_grid: Grid | None,
    close: tuple[float, float] | None,
) -> Tally:
    distance, signed = _wide_difference(ref, cand)
    flat = distance.ravel()
    at = int(flat.argmax()) if flat.size else 0
    a, b = _reals(ref, grid), _reals(cand, candidate_grid)
    if grid is candidate_grid:  # the difference is exact, whatever the values have lost in float64
        error = signed if grid is None else signed * grid.scale
    else:
        error = b - a
    exceeding = [int(np.count_nonzero(flat > rung)) for rung in LADDER]
    atol, rtol = close or (0.0, 0.0)
    return replace(
        total,
        n=ref.size,
        finite=ref.size,
        mismatched=exceeding[0],
        far=int(np.count_nonzero(distance > atol + rtol * np.abs(ref.astype(np.float64)))),
        max_abs=float(flat[at]) if flat.size else 0.0,
        at=at,
        sum_abs=float(flat.sum(dtype=np.float64)),
        sum_sq=float(np.square(signed).sum()),
        sum_d=float(signed.sum()),
        dot=float(np.vdot(a, b)),
        ref_sq=float(np.vdot(a, a)),
        cand_sq=float(np.vdot(b, b)),
        err_sq=float(np.vdot(error, error)),
        ladder=_rungs(ref.size, exceeding),
    )


def _wide_difference(ref: Array, cand: Array) -> tuple[Array, Array]:
    """|b - a| of 64-bit integers as uint64: exact also where the difference does not fit in int64."""
    a, b = ref.astype(object), cand.astype(object)
    signed = np.asarray(b - a, dtype=object)
    distance = np.asarray(np.abs(signed), dtype=np.uint64) if signed.size else np.zeros(signed.shape, np.uint64)
    return distance, signed.astype(np.float64)


def _reals(codes: Array, grid: Grid | None) -> Array:
    values = codes.astype(np.float64)
    if grid is not None and codes.dtype.kind in "iu":
        values -= grid.zero
        values *= grid.scale
    return values


def _add_floats(total: Tally, ref: Array, cand: Array, close: tuple[float, float]) -> Tally:
    nan_a, nan_b = np.isnan(ref), np.isnan(cand)
    inf_a, inf_b = np.isinf(ref), np.isinf(cand)
    finite = np.isfinite(ref) & np.isfinite(cand)
    nan_mismatch = int(np.count_nonzero(nan_a != nan_b))
    inf_mismatch = int(np.count_nonzero((inf_a | inf_b) & (ref != cand) & ~nan_a & ~nan_b))
    a, b = np.where(finite, ref, 0.0), np.where(finite, cand, 0.0)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        error = b - a
        if not np.isfinite(error).all():  # two halves of the range apart: the difference itself overflows float64
            error = np.asarray(np.longdouble(b) - np.longdouble(a))
        distance = np.abs(error).ravel()
        at = int(distance.argmax()) if distance.size else 0
        return replace(
            total,
            n=ref.size,
            finite=int(np.count_nonzero(finite)),
            mismatched=int(np.count_nonzero(distance))
            + int(np.count_nonzero(~finite & ~((ref == cand) | (nan_a & nan_b)))),
            far=int(np.count_nonzero(distance > (close[0] + close[1] * np.abs(a)).ravel()))
            + nan_mismatch
            + inf_mismatch,
            max_abs=distance[at] if distance.size else 0.0,
            at=at,
            sum_abs=_sum(distance),
            sum_sq=_products(error, error),
            sum_d=_sum(error),
            dot=_products(a, b),
            ref_sq=_products(a, a),
            cand_sq=_products(b, b),
            err_sq=_products(error, error),
            nan=(int(nan_a.sum()), int(nan_b.sum())),
            inf=(int(inf_a.sum()), int(inf_b.sum())),
            nan_mismatch=nan_mismatch,
            inf_mismatch=inf_mismatch,
        )


def _sum(values: Array) -> Any:
    total = values.sum()
    return float(total) if np.isfinite(total) and values.dtype == np.float64 else values.sum(dtype=np.longdouble)


def _products(a: Array, b: Array) -> Any:
    """Sum of products; in extended precision where float64 overflows, or where squares vanish in it."""
    total = (a * b).sum()
    if a.dtype == np.float64 and np.isfinite(total) and (abs(total) > _SMALLEST or not np.any(a) or not np.any(b)):
        return float(total)
    return (a.astype(np.longdouble) * b.astype(np.longdouble)).sum()


def _finite(figure: Any) -> float:
    """A figure that JSON can hold."""
    return float(np.clip(figure, -np.finfo(np.float64).max, np.finfo(np.float64).max))


def _worst_channel(ref: Array, cand: Array) -> tuple[int, float] | None:
    """Index along axis 1 with the largest difference, where there is such an axis and any difference."""
    if ref.ndim < 2 or ref.shape[1] < 2 or ref.size == 0:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        distance = np.abs(cand.astype(np.float64) - ref.astype(np.float64))
    distance = np.where(np.isfinite(distance), distance, 0.0)
    by_channel = np.moveaxis(distance, 1, 0).reshape(ref.shape[1], -1).max(axis=1)
    worst = int(by_channel.argmax())
    return (worst, float(by_channel[worst])) if by_channel[worst] > 0 else None


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
            off_grid=self.off_grid,
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
    rows, channels = _rows(codes.shape)
    half = 0.5 if grid is not None else 0.0
    if grid is not None and not _along_rows(grid, codes.shape):
        result, grid = result.reshape(codes.shape) / grid.scale + grid.zero, None
    flat = codes.reshape(rows, -1)
    wanted = result.reshape(rows, -1)
    by_row = np.zeros(rows)
    live_row = np.zeros(rows, bool)
    best, at, best_real = -1.0, 0, 0.0
    off, sum_bias, saturated = 0, 0.0, 0
    stops = [*(bounds or ()), *clamped_at]
    for block in _blocks(rows, flat.shape[1]):
        real = wanted[block].astype(np.float64)
        if grid is not None:
            real /= _by_row(grid.scale, block, rows, channels)
            real += _by_row(grid.zero, block, rows, channels)
        if bounds is not None:
            np.clip(real, *bounds, out=real)
        code = flat[block]
        with np.errstate(invalid="ignore"):  # Inf - Inf: see below
            error = np.subtract(code, real, dtype=np.float64)
        distance = np.abs(error)
        row_max = distance.max(axis=1, initial=0.0)
        if not np.isfinite(row_max).all():  # NaN or Inf as the step gives it is right; anything else infinitely wrong
            np.nan_to_num(distance, copy=False, nan=np.inf, posinf=np.inf)
            distance[(code == real) | (np.isnan(code) & np.isnan(real))] = 0.0
            row_max = distance.max(axis=1, initial=0.0)
        by_row[block] = np.maximum(by_row[block], row_max)
        if distance.size and row_max.max() > best:
            k = int(distance.argmax())
            best, at, best_real = float(distance.flat[k]), block.start * flat.shape[1] + k, float(real.flat[k])
        if distance.size and row_max.max() > 0.5:
            wrong = error[distance > 0.5]
            off += wrong.size
            finite = wrong[np.isfinite(wrong)]
            sum_bias += float((np.sign(finite) * np.ceil(np.abs(finite) - 0.5)).sum())
        if stops:
            stopped = code == stops[0]
            for stop in stops[1:]:
                stopped |= code == stop
            saturated += int(np.count_nonzero(stopped))
            live_row[block] |= ~stopped.all(axis=1)
        else:
            live_row[block] = True
    by_channel = by_row.reshape(-1, channels).max(axis=0) if rows else np.zeros(channels)
    return StepTally(
        shape=codes.shape,
        n=codes.size,
        by_channel=by_channel,
        live=np.asarray(live_row.reshape(-1, channels).any(axis=0) if rows else np.zeros(channels, bool)),
        worst=tuple(int(i) for i in np.unravel_index(at, codes.shape)) if codes.size else (),
        code=float(codes.flat[at]) if codes.size else None,
        real=best_real if codes.size and math.isfinite(best_real) else None,
        off=off,
        max_lsb=float(np.ceil(best - 0.5)) if best > 0.5 else 0.0,
        sum_bias=sum_bias,
        saturated=saturated,
        half=half,
    )


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, channels): an array seen as N * C rows of everything behind axis 1."""
    if len(shape) < 2 or 0 in shape:
        return 1, 1
    return shape[0] * shape[1], shape[1]


def _along_rows(grid: Grid, shape: tuple[int, ...]) -> bool:
    """Whether the grid is one for all, or has one scale for each index along axis 1 (of an array seen as rows)."""
    wide = [k for k, size in enumerate(grid.scale.shape) if size != 1]
    return grid.scale.size == 1 or (len(shape) > 1 and wide == [1] and grid.scale.ndim == len(shape) and 0 not in shape)


def _blocks(rows: int, width: int) -> Iterator[slice]:
    height = max(1, BLOCK // max(1, width))
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))


def _by_row(parameter: Array, block: slice, rows: int, channels: int) -> Array:
    """A scale or zero point for the rows of `block`: 0-d as it is; per channel along axis 1 as a column."""
    if parameter.size == 1:
        return parameter.reshape(())
    column = np.tile(parameter.ravel(), rows // channels) if parameter.size == channels else parameter.ravel()
    return column[block, None]
