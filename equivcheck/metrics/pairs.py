"""`tally`: two arrays against each other, block by block; one class for each domain in which a block is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from equivcheck.metrics.blocks import Array, Grid, Scratch, count_above, dot, total, unequal, walk
from equivcheck.metrics.tally import LADDER, Tally, rungs

_SMALLEST = 1e-290  # below, sums of squares have lost digits to underflow
_WAITING = 4  # unequal pairs wait until they fill a quarter of the scratch; a block's own still fit then
_ALIKE = 16.0  # squared norms that differ by less: their products follow from the squares
_SHIFT = 128  # turns uint8 codes into int8 ones


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
    `equivcheck.metrics.blocks.dot`; three roundings make a term): 1.3e-13 sum |t| for a block. Blocks are added, and squares
    that leave the range of float64 are taken, in extended precision.
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
        return _Floats(reference.shape, grids, close)
    same = grid is None or candidate_grid is None or candidate_grid is grid
    if same and reference.dtype == candidate.dtype and reference.itemsize == 1 and (grid is None or grid.uniform):
        return _Bytes(reference.shape, grid, close, unsigned=reference.dtype == np.uint8)
    return _Codes(reference.shape, [grid, grid if same else candidate_grid], close)


def is_coded(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this type are compared as integers: integers of any width, and bool."""
    return dtype.kind in "iub" or (dtype.isbuiltin == 2 and "int" in dtype.name)


class _Sums:
    """What blocks add up to. A block is split: pairs that are equal bit for bit need no difference.

    `parameters` walk along with the arrays: nothing, or scale and zero of the reference, then of the candidate.
    """

    blocks = 1

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
        if not self._few:
            return
        at, a, b, *parameters = (np.concatenate(part) if part[0].ndim else part[0] for part in zip(*self._few))
        self._few, self._waiting = [], 0
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

    def count(self, distance: Array, peak: Any) -> int:
        """Count the differences of codes above each rung of the ladder; return the sum of the counts."""
        counts = [count_above(distance, rung, self.scratch) for rung in LADDER if rung < peak]
        for k, count in enumerate(counts):
            self.exceeding[k] += count
        self.mismatched = self.exceeding[0]
        return sum(counts)

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

    The sums are of codes as int8 (uint8: code - 128), whose 1024 products float32 holds exactly; the zero point, and the
    scale, are worked in at the end.
    """

    blocks = 2  # float32 scratch: twice the elements in the same cache, half the calls

    def __init__(
        self, shape: tuple[int, ...], grid: Grid | None, close: tuple[float, float] | None, *, unsigned: bool
    ) -> None:
        super().__init__(shape, [None, None], close)
        self.grid = grid
        self.unsigned = unsigned
        self.zero = (0 if grid is None else int(grid.zero.item())) - (_SHIFT if unsigned else 0)  # of codes as int8
        self.a = self.b = self.aa = self.bb = self.ab = self.distances = 0

    def common(self, a: Array, but: Array, parameters: list[Array]) -> bool:
        x = self._float("a", a)
        x[but] = 0
        square = int(dot(x, x))
        if self.zero:  # else the sum of what is equal appears in no figure
            linear = int(total(x))
            self.a += linear
            self.b += linear
        self.aa += square
        self.bb += square
        self.ab += square
        return True

    def pairs(self, a: Array, b: Array, parameters: list[Array]) -> tuple[Any, int]:
        x, y = self._float("a", a), self._float("b", b)
        self.a += int(total(x))
        self.b += int(total(y))
        self.aa += int(dot(x, x))
        self.bb += int(dot(y, y))
        self.ab += int(dot(x, y))
        distance = np.maximum(a, b, out=self.scratch.get("high", a.dtype, a.size)).view(np.uint8)
        distance -= np.minimum(a, b, out=self.scratch.get("low", a.dtype, a.size)).view(np.uint8)
        k = int(distance.argmax())
        peak = int(distance[k])
        if peak:
            climbed = self.count(distance, peak)  # up to 4 there is a rung at every code: each adds one to the sum
            small = peak <= 4
            self.distances += climbed if small else int(total(self.scratch.cast("b", np.float32, distance)))
            self.count_far(distance, peak, a)
        return peak, k

    def _float(self, name: str, codes: Array) -> Array:
        """Codes as float32 integers of at most 128."""
        if self.unsigned:
            codes = np.bitwise_xor(codes, np.uint8(_SHIFT), out=self.scratch.get("low", np.uint8, codes.size))
        return self.scratch.cast(name, np.float32, codes.view(np.int8))

    def figures(self, n: int) -> dict[str, Any]:
        zero = self.zero
        square: float = 1 if self.grid is None else self.grid.scale.item() ** 2
        apart = self.aa - 2 * self.ab + self.bb
        return super().figures(n) | {
            "sum_abs": self.distances,
            "sum_sq": apart,
            "sum_d": self.b - self.a,
            "dot": square * (self.ab - zero * (self.a + self.b) + n * zero**2),
            "ref_sq": square * (self.aa - 2 * zero * self.a + n * zero**2),
            "cand_sq": square * (self.bb - 2 * zero * self.b + n * zero**2),
            "err_sq": square * apart,
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

    def __init__(self, shape: tuple[int, ...], grids: list[Grid | None], close: tuple[float, float] | None) -> None:
        super().__init__(shape, grids, close)
        self.nan, self.inf = [0, 0], [0, 0]
        self.nan_mismatch = self.inf_mismatch = self.apart = 0

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
        alike = _ALIKE * ref_sq >= cand_sq >= ref_sq / _ALIKE
        both = None if alike else dot(x, y)
        d = np.subtract(y, x, out=y)
        err_sq = dot(d, d)
        if must_fit and not _sound(err_sq, d):
            return None
        if both is None:  # 2 a b = a^2 + b^2 - (b - a)^2: a pass less, and no digit lost while the norms are alike
            both = (ref_sq + cand_sq - err_sq) / 2
        self.dot += both
        self.ref_sq += ref_sq
        self.cand_sq += cand_sq
        self.err_sq += err_sq
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


def _sound(square: Any, values: Array) -> bool:
    """Whether a sum of squares in float64 is what it should be: neither overflowed nor vanished."""
    return bool(np.isfinite(square)) and (square > _SMALLEST or not values.any())
