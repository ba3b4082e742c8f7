"""Arrays of any dtype and layout, read together in blocks that stay in the cache; sums of products over one block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import ml_dtypes
import numkong
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BLOCK = 1 << 16  # elements: two float64 arrays of that size stay in L2 (measured: 32 to 64 Ki elements are best)
_ROW = 1024  # elements of one BLAS dot: OpenBLAS hands 10,000 and more to threads, which costs 7 ms on a busy machine
_WORD = 8  # bytes compared at once
_FEW = 8  # unequal words are picked out where they hold less than an eighth of the block ...
_SMALL = 1 << 12  # ... and the block has more elements: below, two sets of calls cost more than they save
_ONES = {dtype: np.ones(_ROW, dtype) for dtype in (np.dtype(np.float64), np.dtype(np.longdouble))}
_row_dots = getattr(np, "vecdot", partial(np.einsum, "ij,ij->i"))  # np.vecdot came with numpy 2.0


@dataclass(frozen=True, eq=False)
class Grid:
    """Scale and zero point that turn codes of an array into reals; shaped to broadcast against it (float64, int64)."""

    scale: Array
    zero: Array

    @property
    def step(self) -> float:
        """One LSB; the largest where it is per channel."""
        return float(np.max(self.scale))

    @property
    def uniform(self) -> bool:
        """Whether one scale and zero point hold for all elements."""
        return self.scale.size == 1 and self.zero.size == 1

    def over(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return scale and zero point for `walk`: 0-d where there is one for all, else views of `shape`."""
        if self.uniform:
            return self.scale.reshape(()).astype(np.float64), self.zero.reshape(()).astype(np.float64)
        return np.broadcast_to(self.scale, shape), np.broadcast_to(self.zero, shape)


class Scratch:
    """Memory that is written again for every block (of `blocks` times BLOCK elements), by name.

    Released, it serves the next tensor: memory that is new to the process costs a page fault every 4 KiB, 40 % of the time
    of a tensor of 25,000 elements.
    """

    _released: ClassVar[list[dict[tuple[str, npt.DTypeLike], Array]]] = []  # threads take from it and append to it

    def __init__(self, size: int, blocks: int = 1) -> None:
        self.size = min(size, blocks * BLOCK)
        try:
            self._kept = self._released.pop()
        except IndexError:
            self._kept = {}

    def get(self, name: str, dtype: npt.DTypeLike, size: int) -> Array:
        """Return `size` uninitialised elements; the next call with this name and dtype returns them again."""
        kept = self._kept.get((name, dtype))
        if kept is None or kept.size < size:
            kept = self._kept[name, dtype] = np.empty(self.size, dtype)
        return kept[:size]

    def release(self) -> None:
        """Hand the memory on. Nothing that `get` or `cast` returned may be used any more."""
        self._released.append(self._kept)
        self._kept = {}

    def cast(self, name: str, dtype: npt.DTypeLike, values: Array) -> Array:
        """Return 1-D `values` as `dtype`, in scratch."""
        out = self.get(name, dtype, values.size)
        np.copyto(out, values, casting="unsafe")
        return out


def walk(*arrays: Array, blocks: int = 1) -> Iterator[tuple[int, list[Array]]]:
    """Yield (index of the first element, 1-D blocks) of arrays of one shape, in C order, at most `blocks` * BLOCK each.

    Blocks are native, aligned and contiguous: views where the memory is so already, else copied into memory that the next block
    overwrites. bool comes as uint8, the small integers of ml_dtypes as int8 and uint8, its small floats as float32, all
    exactly. 0-d arrays beside others come as they are. Raises ValueError for complex numbers and what is no number.
    """
    arrays = tuple(np.asarray(array) for array in arrays)  # slicing np.memmap costs ten times as much
    shape = arrays[0].shape
    targets = [_native(array.dtype) for array in arrays]
    if arrays[0].size == 0:
        return
    plain = [_flat(array, target) if array.shape == shape else array for array, target in zip(arrays, targets)]
    if all(array is not None for array in plain):
        size, step = arrays[0].size, blocks * BLOCK
        for start in range(0, size, step):
            stop = min(size, start + step)
            yield start, [array[start:stop] if array.ndim else array for array in plain if array is not None]
        return
    scratch = Scratch(arrays[0].size, blocks)
    start = 0
    for piece in _pieces(shape, blocks * BLOCK):
        found = []
        for k, (array, target) in enumerate(zip(arrays, targets)):
            if array.shape != shape:
                found.append(array)
                continue
            part = array[piece]
            flat = _flat(part, target)
            if flat is None:
                flat = scratch.get(str(k), target, part.size)
                np.copyto(flat.reshape(part.shape), part, casting="unsafe")
            found.append(flat)
        yield start, found
        start += found[0].size
    scratch.release()


def _flat(array: Array, target: np.dtype[Any]) -> Array | None:
    """A 1-D view of native, aligned, contiguous memory; None where a copy is needed."""
    if not (array.flags.c_contiguous and array.flags.aligned):
        return None
    if array.dtype == target:
        return array.reshape(-1)
    return array.reshape(-1).view(target) if array.dtype.kind == "b" else None


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The plain numpy type that holds every value of `dtype`."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.isbuiltin == 2:  # registered by ml_dtypes
        if "int" not in dtype.name:
            return np.dtype(np.float32)
        return np.dtype(np.int8 if ml_dtypes.iinfo(dtype).min < 0 else np.uint8)
    if dtype.kind not in "iuf":
        raise ValueError(f"{'complex' if dtype.kind == 'c' else dtype} values are not compared")
    return dtype.newbyteorder("=")


def _pieces(shape: tuple[int, ...], most: int) -> Iterator[tuple[Any, ...]]:
    """Index blocks of at most so many elements: whole trailing axes, some of the axis before, one of each leading."""
    axis, width = len(shape), 1
    while axis and width * shape[axis - 1] <= most:
        axis -= 1
        width *= shape[axis]
    if axis == 0:
        yield (...,)
        return
    height = max(1, most // width)
    for leading in np.ndindex(*shape[: axis - 1]):
        for first in range(0, shape[axis - 1], height):
            yield (*leading, slice(first, first + height))


def unequal(a: Array, b: Array) -> Array | None:
    """Positions in two native blocks of one dtype at which they may differ; all others are equal bit for bit.

    None where picking them out does not pay: they are an eighth of the block or more, or the block is small.
    """
    each = _WORD // a.itemsize
    if each == 0:  # np.longdouble
        return None
    whole = a.size // each * each
    differs = a[:whole].view(np.uint64) != b[:whole].view(np.uint64)
    count = int(np.count_nonzero(differs))
    if count and (count * each * _FEW > a.size or a.size < _SMALL):
        return None
    rest = np.arange(whole, a.size)
    if count == 0:
        return rest
    found = (differs.nonzero()[0][:, None] * each + np.arange(each)).reshape(-1)
    return np.concatenate([found, rest]) if rest.size else found


def dot(a: Array, b: Array) -> Any:
    """Sum of products of two blocks of float64, or of np.longdouble.

    Rows of 1024 products are summed by BLAS, the row sums pairwise: |error| <= gamma(1024 + 64 + 1) sum |a b| in whatever
    order rows and row sums are added: gamma(k) = k u / (1 - k u), u the unit roundoff of the dtype (Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, eq. 3.5).
    """
    whole = a.size // _ROW * _ROW
    found: Any = np.dot(a[whole:], b[whole:]) if whole < a.size else 0.0
    if whole:
        rows = _row_dots(a[:whole].reshape(-1, _ROW), b[:whole].reshape(-1, _ROW))
        found = np.add.reduce(rows) + found
    return found


def moments(values: Array) -> tuple[Any, Any]:
    """(sum, sum of squares) of int8, uint8 or float32.

    Of integers both are exact: numkong is handed BLOCK codes at a time, whose squares fit an unsigned accumulator of 32 bits,
    so that none wraps whatever its kernel for this processor adds in. Of float32 the squares are exact in float64, and added
    there: |error| <= gamma(n) sum |t| in whatever order (see `dot`; measured: below 1e-14 sum |t|).
    `tests/test_moments.py` holds every kernel of this processor to both.
    """
    if values.size <= BLOCK or values.itemsize > 1:
        found: tuple[Any, Any] = numkong.moments(values)
        return found
    parts = [numkong.moments(values[k : k + BLOCK]) for k in range(0, values.size, BLOCK)]
    return sum(linear for linear, _ in parts), sum(square for _, square in parts)


def total(values: Array) -> Any:
    """Sum of a block, with the error bound of `dot` (the products are with 1)."""
    whole = values.size // _ROW * _ROW
    found: Any = np.add.reduce(values[whole:])
    if whole:
        rows = _row_dots(values[:whole].reshape(-1, _ROW), _ONES[values.dtype])
        found = np.add.reduce(rows) + found
    return found


def count_above(values: Array, limit: Any, scratch: Scratch) -> int:
    """How many elements of a block exceed a limit (one for all, or one each)."""
    above = np.greater(values, limit, out=scratch.get("above", np.bool_, values.size))
    return int(numkong.moments(above.view(np.uint8))[0])  # twice as fast as np.count_nonzero
