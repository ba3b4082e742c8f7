"""`tally`: two arrays against each other, block by block; one class for each domain in which a block is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from equivcheck.metrics.blocks import Array, Grid, Scratch, count_above, dot, moments, total, unequal, walk
from equivcheck.metrics.tally import LADDER, Tally, rungs

_SMALLEST = 1e-290  # below, sums of squares have lost digits to underflow
_WAITING = 4  # unequal pairs wait until they fill a quarter of the scratch; a block's own still fit then
_DOUBLE = 1 << 23  # from a float32 to its double, read as integers
_FEW = 8  # pairs that are not near are picked out where they are at most an eighth
_ALIKE = 16.0  # squared norms that differ by less: their products follow from the squares


def tally(
    reference: Array,
    candidate: Array,
    grid: Grid | None = None,
    candidate_grid: Grid | None = None,
    close: tuple[float, float] | None = None,
) -> Tally:
    """Measure `candidate` against `reference`: arrays of one shape, both coded or both float, of any dtype and layout.

    `grid` is the reference's quantisation (None: stored as it is); `candidate_grid` the candidate's, where it differs.
    Cosine and SNR are of real values where a grid is given. `far` counts elements beyond atol + rtol * |reference| of
    `close`, in stored units (None: not counted). Raises ValueError when the
    shapes differ, and for complex numbers.

    Counts are exact, and so is `max_abs` of integers (of 64 bits, too). Sums over int8 and uint8 pairs with one grid are
    exact; other sums of n terms t are wrong by at most gamma(k) sum |t|, k = 1100 + n / BLOCK, u = 2^-53 (see
    `equivcheck.metrics.blocks.dot`; three roundings make a term): 1.3e-13 sum |t| for a block. Sums over float32 pairs, whose
    order is not known (`equivcheck.metrics.blocks.moments`), are bounded by k = 2 BLOCK + n / BLOCK: 1.5e-11; 1e-13 is what
    the tests hold them to. Blocks are added, and squares that leave the range of float64 are taken, in extended precision.
    """
    if reference.shape != candidate.shape:
        raise ValueError(f"shapes differ: {reference.shape} and {candidate.shape}")
    sums = _domain(reference, candidate, grid, candidate_grid, close)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start, (a, b, *parameters) in walk(reference, candidate, *sums.parameters, blocks=sums.blocks):
            sums.add(start, a, b, parameters)
        sums.flush()
    sums.scratch.release()
    floats, gridded = isinstance(sums, _Floats), grid is not None
    return Tally(
        shape=reference.shape,
        n=reference.size,
        real=floats or gridded,
        lsb=1.0 if gridded and not floats else None,
        **sums.figures(reference.size),
    )


def _domain(
    reference: Array,
    candidate: Array,
    grid: Grid | None,
    candidate_grid: Grid | None,
    close: tuple[float, float] | None,
) -> _Sums:
    """The class that computes pairs of these dtypes."""
    coded = [is_coded(array.dtype) for array in (reference, candidate)]
    if not all(coded):
        grids = [side if own else None for side, own in zip((grid, candidate_grid or grid), coded)]
        near = not any(grids) and reference.dtype == candidate.dtype == np.float32
        return _Floats(reference.shape, grids, close, near=near)
    same = grid is None or candidate_grid is None or candidate_grid is grid
    if same and reference.dtype == candidate.dtype and reference.itemsize == 1 and (grid is None or grid.uniform):
        return _Bytes(reference.shape, grid, close)
    return _Codes(reference.shape, [grid, grid if same else candidate_grid], close)


def is_coded(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this type are compared as integers: integers of any width, and bool."""
    return dtype.kind in "iub" or (dtype.isbuiltin == 2 and "int" in dtype.name)


class _Sums:
    """What blocks add up to. A block is split: pairs that are equal bit for bit need no difference.

    `parameters` walk along with the arrays: nothing, or scale and zero of the reference, then of the candidate.
    """

    blocks = 1  # of BLOCK elements, at once

    def __init__(self, shape: tuple[int, ...], grids: list[Grid | None], close: tuple[float, float] | None) -> None:
        self.parameters: list[Array] = []
        if any(grids):
            one, none = np.ones(()), np.zeros(())
            for grid in grids:
                self.parameters += (one, none) if grid is None else grid.over(shape)
        self.same_grid = grids[0] is grids[1]
        self.close = close
        self.scratch = Scratch(math.prod(shape), self.blocks)
        self.exceeding = [0] * len(LADDER)
        self.peak: Any = 0
        self._few: list[list[Array]] = []
        self._waiting = 0
        self.at = self.mismatched = self.far = 0
        self.sum_abs = self.sum_sq = self.sum_d = np.longdouble(0)
        self.dot = self.ref_sq = self.cand_sq = self.err_sq = np.longdouble(0)

    def add(self, start: int, a: Array, b: Array, parameters: list[Array]) -> None:
        """Add a block of pairs, the first of which has the flat index `start`."""
        where = unequal(a, b) if a.dtype == b.dtype and self.same_grid else None
        if where is None or not self.common(a, where, parameters):
            peak, k = self.pairs(a, b, parameters)
            self._note(peak, start + k)
        elif where.size:
            self._few.append([where + start, a[where], b[where], *(p[where] if p.ndim else p for p in parameters)])
            self._waiting += where.size
            if self._waiting >= self.scratch.size // _WAITING:
                self.flush()

    def flush(self) -> None:
        """Add the unequal pairs that were picked out of many blocks, all at once."""
        self._waiting = 0
        if not self._few:
            return
        at, a, b, *parameters = (np.concatenate(part) if part[0].ndim else part[0] for part in zip(*self._few))
        self._few = []
        peak, k = self.pairs(a, b, parameters)
        self._note(peak, int(at[k]))

    def _note(self, peak: Any, at: int) -> None:
        if peak > self.peak or (peak == self.peak and at < self.at):
            self.peak, self.at = peak, at

    def common(self, a: Array, but: Array, parameters: list[Array]) -> bool:
        """Add what both sides have in common, all elements but those at `but`; False where that cannot be told apart."""
        raise NotImplementedError

    def pairs(self, a: Array, b: Array, parameters: list[Array]) -> tuple[Any, int]:
        """Add pairs; return the largest difference and its first position."""
        raise NotImplementedError

    def figures(self, n: int) -> dict[str, Any]:
        """The fields of `Tally` for `n` pairs."""
        names = ("mismatched", "far", "at", "sum_abs", "sum_sq", "sum_d", "dot", "ref_sq", "cand_sq", "err_sq")
        return {name: getattr(self, name) for name in names} | {
            "finite": n,
            "max_abs": self.peak,
            "ladder": rungs(n, self.exceeding),
        }

    def count(self, distance: Array, peak: Any) -> None:
        """Count the differences of codes above each rung of the ladder."""
        for k, rung in enumerate(LADDER):
            if rung < peak:
                self.exceeding[k] += count_above(distance, rung, self.scratch)
        self.mismatched = self.exceeding[0]

    def count_far(self, distance: Array, peak: Any, reference: Array) -> None:
        """Count the differences beyond atol + rtol |reference|, where that is asked for."""
        if self.close is None:
            return
        atol, rtol = self.close
        if (atol, rtol) == (0.0, 0.0):
            self.far = self.mismatched
        elif peak > atol:
            limit = self.scratch.cast("limit", max(reference.dtype, np.dtype(np.float64)), reference)
            np.abs(limit, out=limit)
            limit *= rtol
            limit += atol
            self.far += count_above(distance, limit, self.scratch)

    def cast(self, name: str, values: Array) -> Array:
        """Values of one side as float64, in scratch."""
        return self.scratch.cast(name, np.float64, values)


def _scaled(values: Array, scale_and_zero: list[Array]) -> Array:
    """Codes as reals, in place, where they have a grid."""
    if scale_and_zero:
        values -= scale_and_zero[1]
        values *= scale_and_zero[0]
    return values


class _Bytes(_Sums):
    """int8 and uint8 pairs with one grid, in the byte domain: all sums are integers, and exact.

    Zero point and scale are worked in at the end. Reading a pair once costs less than finding out where it is unequal.
    """

    blocks = 6  # an eighth of the memory of float64, and calls cost as much as what they compute

    def __init__(self, shape: tuple[int, ...], grid: Grid | None, close: tuple[float, float] | None) -> None:
        super().__init__(shape, [None, None], close)
        self.grid = grid
        self.a = self.b = self.aa = self.bb = self.distances = self.apart = 0

    def add(self, start: int, a: Array, b: Array, parameters: list[Array]) -> None:
        peak, k = self.pairs(a, b, parameters)
        self._note(peak, start + k)

    def pairs(self, a: Array, b: Array, parameters: list[Array]) -> tuple[Any, int]:
        linear, square = moments(a)
        distance = np.maximum(a, b, out=self.scratch.get("high", a.dtype, a.size)).view(np.uint8)
        distance -= np.minimum(a, b, out=self.scratch.get("low", a.dtype, a.size)).view(np.uint8)
        k = int(distance.argmax())
        peak = int(distance[k])
        self.a += linear
        self.aa += square
        if not peak:
            self.b += linear
            self.bb += square
            return peak, k
        linear, square = moments(b)
        self.b += linear
        self.bb += square
        linear, square = moments(distance)
        self.distances += linear
        self.apart += square
        self._climb(distance, peak, linear, square)
        self.count_far(distance, peak, a)
        return peak, k

    def _climb(self, distance: Array, peak: int, linear: int, square: int) -> None:
        """Count what is above each rung: up to a peak of 2 the sums say how many ones and twos there are."""
        if peak > 2:
            self.count(distance, peak)
            return
        twos = (square - linear) // 2
        self.exceeding[0] += linear - twos
        self.exceeding[1] += twos
        self.mismatched = self.exceeding[0]

    def figures(self, n: int) -> dict[str, Any]:
        zero = 0 if self.grid is None else int(self.grid.zero.item())
        square: float = 1 if self.grid is None else self.grid.scale.item() ** 2
        products = (self.aa + self.bb - self.apart) // 2  # 2 a b = a^2 + b^2 - (b - a)^2
        return super().figures(n) | {
            "sum_abs": self.distances,
            "sum_sq": self.apart,
            "sum_d": self.b - self.a,
            "dot": square * (products - zero * (self.a + self.b) + n * zero**2),
            "ref_sq": square * (self.aa - 2 * zero * self.a + n * zero**2),
            "cand_sq": square * (self.bb - 2 * zero * self.b + n * zero**2),
            "err_sq": square * self.apart,
        }


class _Codes(_Sums):
    """All other integers, in float64; differences of 64-bit integers exactly, whatever float64 makes of their values."""

    def common(self, a: Array, but: Array, parameters: list[Array]) -> bool:
        x = _scaled(self.cast("a", a), parameters[:2])
        x[but] = 0.0
        square = dot(x, x)
        self.dot += square
        self.ref_sq += square
        self.cand_sq += square
        return True

    def pairs(self, a: Array, b: Array, parameters: list[Array]) -> tuple[Any, int]:
        x, y = self.cast("a", a), self.cast("b", b)
        if max(a.itemsize, b.itemsize) == 8:
            distance, d = _difference(a, b)
        else:
            d = np.subtract(y, x, out=self.scratch.get("d", np.float64, a.size))
            distance = np.abs(d, out=self.scratch.get("distance", np.float64, a.size))
        k = int(distance.argmax())
        peak = int(distance[k])
        if peak:
            self.count(distance, peak)
            self.count_far(distance, peak, a)
            self.sum_abs += total(distance if distance.dtype == np.float64 else np.abs(d))
            self.sum_d += total(d)
            self.sum_sq += dot(d, d)
        x, y = _scaled(x, parameters[:2]), _scaled(y, parameters[2:])
        if not self.same_grid:
            np.subtract(y, x, out=d)
        elif parameters:
            d *= parameters[0]
        self.dot += dot(x, y)
        self.ref_sq += dot(x, x)
        self.cand_sq += dot(y, y)
        self.err_sq += dot(d, d)
        return peak, k


def _difference(a: Array, b: Array) -> tuple[Array, Array]:
    """(|b - a| exactly, b - a in float64) of integers of 64 bits."""
    both = np.result_type(a, b)
    if both.kind == "f":  # uint64 beside a signed type: no integer type holds both
        exact = b.astype(object) - a.astype(object)
        return np.abs(exact), exact.astype(np.float64)
    a, b = a.astype(both, copy=False), b.astype(both, copy=False)
    distance = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    d = distance.astype(np.float64)
    return distance, np.negative(d, out=d, where=b < a)


class _Floats(_Sums):
    """Floats in float64, and in extended precision where that overflows or underflows; NaN and Inf are counted apart."""

    def __init__(
        self, shape: tuple[int, ...], grids: list[Grid | None], close: tuple[float, float] | None, *, near: bool
    ) -> None:
        self.blocks = 2 if near else 1  # half the memory a block, half the calls
        super().__init__(shape, grids, close)
        self.nan, self.inf = [0, 0], [0, 0]
        self.nan_mismatch = self.inf_mismatch = self.apart = 0
        self.near = near
        self._others: list[list[Array]] = []

    def add(self, start: int, a: Array, b: Array, parameters: list[Array]) -> None:
        if self.near:
            self.near = self._add_near(start, a, b)
        if not self.near:
            super().add(start, a, b, parameters)

    def flush(self) -> None:
        super().flush()
        if not self._others:
            return
        at, a, b = (np.concatenate(part) for part in zip(*self._others))
        self._others = []
        x, d = a.astype(np.float64), b.astype(np.float64)
        d -= x
        self._add_squares(0.0, 0.0, dot(d, d))
        peak, k = self._differences(x, d)
        self._note(peak, int(at[k]))

    def common(self, a: Array, but: Array, parameters: list[Array]) -> bool:
        x = _scaled(self.cast("a", a), parameters[:2])
        x[but] = 0.0
        square = dot(x, x)
        if not _sound(square, x):
            return False
        self.dot += square
        self.ref_sq += square
        self.cand_sq += square
        return True

    def pairs(self, a: Array, b: Array, parameters: list[Array]) -> tuple[Any, int]:
        found = self._measure(*self._both(a, b, parameters))
        if found is None:
            x, y = self._both(a, b, parameters)
            self._set_apart(x, y)
            wide = x.astype(np.longdouble), y.astype(np.longdouble)
            found = self._measure(x, y) or self._measure(*wide)
        assert found is not None  # extended precision always answers
        return found

    def _add_near(self, start: int, a: Array, b: Array) -> bool:
        """Add pairs of float32 of which most are near each other; False where they are not, or not finite.

        Read as integers, floats of one sign that differ by 2^23 at most are within a factor of two of each other, or are as
        small as the least normal numbers: their difference is exact in float32 (Sterbenz, Floating-Point Computation, 1974,
        theorem 4.3.1). The differences of all others wait for float64; their squares neither overflow nor vanish there.
        """
        ref_sq, cand_sq = moments(a)[1], moments(b)[1]
        d = self.scratch.get("d", np.float32, a.size)
        steps = np.subtract(b.view(np.int32), a.view(np.int32), out=d.view(np.int32))
        low, high = np.minimum.reduce(steps), np.maximum.reduce(steps)
        if low == high == 0 and math.isfinite(ref_sq):
            self._add_squares(ref_sq, cand_sq, 0.0)
            return True
        others = None
        if low < -_DOUBLE or high > _DOUBLE:
            others = ((steps < -_DOUBLE) | (steps > _DOUBLE)).nonzero()[0]
            if others.size * _FEW > a.size:
                return False
        np.subtract(b, a, out=d)
        if others is not None:
            d[others] = 0
        linear, err_sq = moments(d)
        if not (math.isfinite(ref_sq + cand_sq + err_sq) and _alike(ref_sq, cand_sq)):
            return False
        self._add_squares(ref_sq, cand_sq, err_sq)
        self.sum_d += linear
        distance = np.abs(d, out=d)
        k = int(distance.argmax())
        peak = float(distance[k])
        self.sum_abs += moments(distance)[0]
        self.mismatched += count_above(distance, 0, self.scratch)
        self.count_far(distance, peak, a)
        self._note(peak, start + k)
        if others is not None:
            self._others.append([others + start, a[others], b[others]])
            self._waiting += others.size
            if self._waiting >= self.scratch.size // _WAITING:
                self.flush()
        return True

    def _add_squares(self, ref_sq: Any, cand_sq: Any, err_sq: Any, both: Any = None) -> None:
        """Add sums of squares and of products; where norms are alike these follow: 2 a b = a^2 + b^2 - (b - a)^2."""
        self.dot += (ref_sq + cand_sq - err_sq) / 2 if both is None else both
        self.ref_sq += ref_sq
        self.cand_sq += cand_sq
        self.err_sq += err_sq

    def _both(self, a: Array, b: Array, parameters: list[Array]) -> tuple[Array, Array]:
        return _scaled(self.cast("a", a), parameters[:2]), _scaled(self.cast("b", b), parameters[2:])

    def _set_apart(self, x: Array, y: Array) -> None:
        """Count pairs with NaN or Inf, and zero them."""
        finite = np.isfinite(x) & np.isfinite(y)
        if finite.all():
            return
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        self.nan = [self.nan[0] + int(np.count_nonzero(nan_x)), self.nan[1] + int(np.count_nonzero(nan_y))]
        self.inf = [n + int(np.count_nonzero(np.isinf(side))) for n, side in zip(self.inf, (x, y))]
        nan_mismatch = int(np.count_nonzero(nan_x != nan_y))
        inf_mismatch = int(np.count_nonzero(~finite & ~nan_x & ~nan_y & (x != y)))
        self.nan_mismatch += nan_mismatch
        self.inf_mismatch += inf_mismatch
        self.mismatched += nan_mismatch + inf_mismatch
        self.far += nan_mismatch + inf_mismatch if self.close is not None else 0
        self.apart += x.size - int(np.count_nonzero(finite))
        x[~finite] = 0.0
        y[~finite] = 0.0

    def _measure(self, x: Array, y: Array) -> tuple[Any, int] | None:
        """Add pairs of float64, or None where a sum does not fit; of np.longdouble in any case. Overwrites `y`."""
        must_fit = x.dtype == np.float64
        ref_sq, cand_sq = dot(x, x), dot(y, y)
        if must_fit and not (_sound(ref_sq, x) and _sound(cand_sq, y)):
            return None
        both = None if _alike(ref_sq, cand_sq) else dot(x, y)
        d = np.subtract(y, x, out=y)
        err_sq = dot(d, d)
        if must_fit and not _sound(err_sq, d):
            return None
        self._add_squares(ref_sq, cand_sq, err_sq, both)
        return self._differences(x, d)

    def _differences(self, x: Array, d: Array) -> tuple[Any, int]:
        """Add what is of differences `d` alone, but for their squares; the largest and its position. Overwrites `d`."""
        self.sum_d += total(d)
        distance = np.abs(d, out=d)
        k = int(distance.argmax())
        peak = distance[k]
        if peak:
            self.sum_abs += total(distance)
            self.mismatched += count_above(distance, 0, self.scratch)
            self.count_far(distance, peak, x)
        return peak, k

    def figures(self, n: int) -> dict[str, Any]:
        return super().figures(n) | {
            "finite": n - self.apart,
            "sum_sq": self.err_sq,
            "nan": (self.nan[0], self.nan[1]),
            "inf": (self.inf[0], self.inf[1]),
            "nan_mismatch": self.nan_mismatch,
            "inf_mismatch": self.inf_mismatch,
            "ladder": (),
        }


def _alike(ref_sq: Any, cand_sq: Any) -> bool:
    """Whether the product of two arrays with these squared norms may be taken from them and the difference."""
    return bool(_ALIKE * ref_sq >= cand_sq >= ref_sq / _ALIKE)


def _sound(square: Any, values: Array) -> bool:
    """Whether a sum of squares in float64 is what it should be: neither overflowed nor vanished."""
    return bool(np.isfinite(square)) and (square > _SMALLEST or not values.any())
