"""The same numbers in another order: transposes and reshapes in a row, applied, reversed, and put in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from equivcheck.models.graph import Array

Shape = tuple[int, ...]
_NAMES = {
    (0, 3, 1, 2): "NHWC to NCHW",
    (0, 2, 3, 1): "NCHW to NHWC",
    (0, 2, 1): "channels exchanged with places",
    (0, 4, 1, 2, 3): "NDHWC to NCDHW",
    (0, 2, 3, 4, 1): "NCDHW to NDHWC",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A transpose: axis k of the result is axis `axes[k]` of what it takes."""

    axes: Shape

    def reverse(self) -> Turn:
        return Turn(tuple(int(k) for k in np.argsort(self.axes)))


@dataclass(frozen=True, slots=True)
class Reshape:
    """From shape `before` to shape `after`, the order in memory kept."""

    before: Shape
    after: Shape

    def reverse(self) -> Reshape:
        return Reshape(self.after, self.before)


@dataclass(frozen=True)
class Order:
    """What is done to an array, first to last. The empty order leaves it as it is."""

    moves: tuple[Turn | Reshape, ...] = ()

    def then(self, other: Order) -> Order:
        return Order(_shortened((*self.moves, *other.moves)))

    def reverse(self) -> Order:
        return Order(tuple(move.reverse() for move in reversed(self.moves)))

    def apply(self, array: Array) -> Array:
        """Return `array` in this order, contiguous; the same array where nothing moves."""
        for move in self.moves:
            array = array.transpose(move.axes) if isinstance(move, Turn) else array.reshape(move.after)
        return np.ascontiguousarray(array).reshape(array.shape)

    @property
    def turns(self) -> int:
        """How many transposes it takes."""
        return sum(isinstance(move, Turn) for move in self.moves)

    def plain(self, shape: Shape) -> Order:
        """The same for an array of `shape`, as one transpose or one reshape where it is no more than that."""
        axes = [k for k, n in enumerate(shape) if n != 1]  # the axes longer than 1, as they come to lie
        places: list[int | None] = [k if n != 1 else None for k, n in enumerate(shape)]
        for move in self.moves:
            if isinstance(move, Turn):
                places = [places[k] for k in move.axes]
                continue
            long = [k for k in places if k is not None]
            if [shape[k] for k in long] != [n for n in move.after if n != 1]:
                return self  # it joins axes, or splits one
            rest = iter(long)
            places = [next(rest) if n != 1 else None for n in move.after]
        now = [k for k in places if k is not None]
        after = tuple(1 if k is None else shape[k] for k in places)
        return _along(shape, after, tuple(axes.index(k) for k in now))

    @property
    def words(self) -> str:
        """Such as `NHWC to NCHW`; empty where nothing moves."""
        return ", ".join(
            _NAMES.get(move.axes, f"transposed by {list(move.axes)}")
            if isinstance(move, Turn)
            else f"{list(move.before)} as {list(move.after)}"
            for move in self.moves
        )


def layouts(before: Sequence[int], after: Sequence[int]) -> list[Order]:
    """Every way to turn shape `before` into `after` by moving whole axes; axes of size 1 are free. The least turned first.

    Five axes longer than 1 have 120 orders, and no network has more.
    """
    before, after = tuple(before), tuple(after)
    long, wanted = [n for n in before if n != 1], [n for n in after if n != 1]
    if sorted(long) != sorted(wanted) or len(long) > 5:
        return []
    found = [p for p in permutations(range(len(long))) if [long[k] for k in p] == wanted]
    return [_along(before, after, axes) for axes in sorted(found, key=_turned)]


def _turned(axes: Shape) -> tuple[int, Shape]:
    """How far from the order they were in: nothing, one axis moved to an end (channels), anything else."""
    rest = [k for k in range(len(axes)) if k != axes[0]]
    behind = [k for k in range(len(axes)) if k != axes[-1]]
    rank = 0 if list(axes) == sorted(axes) else 1 if list(axes[1:]) == rest or list(axes[:-1]) == behind else 2
    return rank, axes


def _along(before: Shape, after: Shape, axes: Shape) -> Order:
    """The order that takes the axes longer than 1 in the order `axes`; one plain transpose where the ranks allow it."""
    if list(axes) == sorted(axes):
        return Order(_shortened((Reshape(before, after),)))
    if len(before) == len(after):
        ones = [k for k, n in enumerate(before) if n == 1]
        places = [k for k, n in enumerate(before) if n != 1]
        long = iter([places[k] for k in axes])
        whole = tuple(ones.pop(0) if n == 1 else next(long) for n in after)
        return Order((Turn(whole),))
    short = tuple(n for n in before if n != 1)
    turned = tuple(short[k] for k in axes)
    return Order(_shortened((Reshape(before, short), Turn(axes), Reshape(turned, after))))


def _shortened(moves: Sequence[Turn | Reshape]) -> tuple[Turn | Reshape, ...]:
    """The same with neighbours of a kind as one, and without what moves nothing."""
    found: list[Turn | Reshape] = []
    for move in moves:
        last = found[-1] if found else None
        if isinstance(move, Turn) and isinstance(last, Turn):
            found[-1] = move = Turn(tuple(last.axes[k] for k in move.axes))
        elif isinstance(move, Reshape) and isinstance(last, Reshape):
            found[-1] = move = Reshape(last.before, move.after)
        else:
            found.append(move)
        if _idle(move):
            found.pop()
    return tuple(found)


def _idle(move: Turn | Reshape) -> bool:
    return list(move.axes) == sorted(move.axes) if isinstance(move, Turn) else move.before == move.after
