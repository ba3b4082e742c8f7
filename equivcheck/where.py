"""Where in a tensor the wrong elements lie: at its border, in a corner, a stripe, a tile, some channels, or anywhere.

A fault of a kernel has a shape: padding gone wrong touches the border only, the remainder of a vector loop the last columns
or every k-th, one bad weight or table one channel. Rounding has none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Kind = Literal["nowhere", "border", "corner", "stripe", "tile", "channel", "everywhere", "scattered"]
_LARGEST = 0.75  # a region of more than that share of the tensor says little
_BY_CHANCE = math.log(1e-6)  # scattered elements fall into a believed region in fewer than one in a million tensors
_MANY = 0.5  # beyond that share, and in no region: everywhere
_NAMED = 8  # channels named in a sentence
_SIDES = ("first row", "last row", "first column", "last column")


@dataclass(frozen=True)
class Where:
    """Where the wrong elements lie. `share` is theirs of all elements; `sentence` says it, with indices from 0."""

    kind: Kind
    sentence: str
    share: float


@dataclass(frozen=True)
class _Region:
    """Indices that hold all wrong elements: their share of the axes, and of how many such regions it is one."""

    kind: Kind
    place: str
    share: float
    alternatives: float

    def chance(self, count: int) -> float:
        """Log of (at most) the probability that `count` scattered elements all fall into one of such regions."""
        return math.log(self.alternatives) + count * math.log(self.share)


def where(error: Array, limit: float) -> Where:
    """Say where the elements with abs(error) > `limit` (or NaN) lie in an error array (candidate minus wanted).

    The array is N C H W or of any rank: axis 1 is the channel (axis 0 of a 1-D array), the last two axes behind it are rows
    and columns; samples and any axes between are looked at together. Of the regions that hold all wrong elements the one is
    named into which scattered elements are least likely to fall, if that is below one in a million: the chance is at most
    (regions of that kind) * (share of the tensor)^(wrong elements). Without one the kind is "everywhere" where half of all
    elements are wrong, else "scattered"; "nowhere" where none is.
    """
    wrong = ~(np.abs(error) <= limit)
    count = int(np.count_nonzero(wrong))
    if count == 0:
        return Where("nowhere", f"no element is beyond {limit:g}", 0.0)
    share = count / wrong.size
    amount = f"{count} of {wrong.size} elements"
    channels, plane = _profiles(wrong)
    found = [
        region
        for regions in (_in_plane(plane), _along_channels(channels))
        if (region := min(regions, key=lambda r: r.chance(count), default=None)) and region.chance(count) < _BY_CHANCE
    ]
    if not found:
        kind: Kind = "everywhere" if share >= _MANY else "scattered"
        return Where(kind, f"{amount}, {kind}", share)
    kind = min(found, key=lambda region: region.chance(count)).kind
    return Where(kind, f"{amount}, all in {' of '.join(region.place for region in found)}", share)


def _profiles(wrong: Mask) -> tuple[Mask, Mask]:
    """(channels, rows x columns) in which any element is wrong."""
    if wrong.ndim < 2:
        return wrong.reshape(-1), np.ones((1, 1), bool)
    channels = wrong.any(axis=tuple(k for k in range(wrong.ndim) if k != 1))
    spatial = range(max(2, wrong.ndim - 2), wrong.ndim)
    plane = wrong.any(axis=tuple(k for k in range(wrong.ndim) if k not in spatial))
    return np.asarray(channels), np.atleast_2d(plane)


def _along_channels(hit: Mask) -> Iterator[_Region]:
    """The channels that are hit: as a set, as every k-th one, and as consecutive ones."""
    indices = np.flatnonzero(hit)
    share = indices.size / hit.size
    if share <= _LARGEST:
        names = ", ".join(str(k) for k in indices[:_NAMED]) + (", ..." if indices.size > _NAMED else "")
        place = f"channel {names}" if indices.size == 1 else f"{indices.size} of {hit.size} channels ({names})"
        yield _Region("channel", place, share, math.comb(hit.size, indices.size))
    yield from _every(hit, "channel", "channel")
    yield from _band(hit, "channel", "channel")


def _in_plane(plane: Mask) -> Iterator[_Region]:
    for axis, name in ((1, "row"), (0, "column")):
        hit: Mask = np.asarray(plane.any(axis=axis))
        yield from _every(hit, "stripe", name)
        yield from _band(hit, "stripe", name)
    yield from _borders(plane)
    yield from _boxes(plane)


def _every(hit: Mask, kind: Kind, name: str) -> Iterator[_Region]:
    """Every k-th index, from the first one hit."""
    indices = np.flatnonzero(hit)
    step = int(np.gcd.reduce(np.diff(indices))) if indices.size > 2 else 0
    if step > 1:
        first = int(indices[0]) % step
        share = len(range(first, hit.size, step)) / hit.size
        ordinal = {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
        yield _Region(kind, f"every {ordinal} {name} from {first} on", share, hit.size**2)


def _band(hit: Mask, kind: Kind, name: str) -> Iterator[_Region]:
    """Consecutive indices."""
    indices = np.flatnonzero(hit)
    first, last = int(indices[0]), int(indices[-1])
    share = (last - first + 1) / hit.size
    if share <= _LARGEST:
        place = f"{name} {first}" if first == last else f"{name}s {first} to {last}"
        yield _Region(kind, place, share, hit.size * (hit.size + 1) / 2)


def _borders(plane: Mask) -> Iterator[_Region]:
    """Up to two rows or columns at some of the four sides."""
    for width in (1, 2):
        sides = []
        for axis in (0, 1):
            if plane.shape[axis] > 2 * width:
                index = np.arange(plane.shape[axis]).reshape((-1, 1) if axis == 0 else (1, -1))
                sides += [(2 * axis, index < width), (2 * axis + 1, index >= plane.shape[axis] - width)]
        for count in range(1, len(sides) + 1):
            for chosen in itertools.combinations(sides, count):
                inside = np.zeros(plane.shape, bool)
                for _, side in chosen:
                    inside |= side
                share = float(inside.mean())
                if share <= _LARGEST and not np.any(plane & ~inside):
                    names = " and ".join(_SIDES[k] if width == 1 else f"{_SIDES[k]}s" for k, _ in chosen)
                    place = f"the {names}" if count < 4 else f"the border, {width} wide"
                    yield _Region("border", place, share, 2 * 15)


def _boxes(plane: Mask) -> Iterator[_Region]:
    """The rectangle around all; a corner where it ends at two sides."""
    rows, columns = np.nonzero(plane)
    top, bottom, left, right = int(rows.min()), int(rows.max()), int(columns.min()), int(columns.max())
    height, width = plane.shape
    share = (bottom - top + 1) * (right - left + 1) / plane.size
    if share > _LARGEST or 1 in plane.shape:
        return
    place = f"rows {top} to {bottom}, columns {left} to {right}"
    yield _Region("tile", place, share, height * (height + 1) * width * (width + 1) / 4)
    at_corner = (top == 0 or bottom == height - 1) and (left == 0 or right == width - 1)
    if at_corner and bottom - top + 1 <= height / 2 and right - left + 1 <= width / 2:
        yield _Region("corner", f"a corner, {place}", share, 4 * height * width)
