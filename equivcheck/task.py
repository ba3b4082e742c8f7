"""What a difference at the model's outputs means for the task: the same class, the same pixels, the same detections?

Pure: real values of both sides in, figures out. `TaskTally` gathers them one sample at a time and can be merged;
`finish` gives one `TaskFigures` an output, whose `text` is a sentence for the screen. No verdict hangs on any of this: it
says what a user of the model would notice.

What an output is for is guessed from its shape and the range of its values, because a model does not say it
(`task_figures.Kind` has the rules, and where they mislead). Where samples are read differently, only the distance is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from equivcheck.task_figures import (
    ClassFigures,
    Crossed,
    DistanceFigures,
    Flip,
    Kind,
    PixelFigures,
    ScoreFigures,
    TaskFigures,
)

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]
THRESHOLDS = (0.25, 0.5)  # what detectors commonly cut at: the default of YOLO's predict, and an even chance
TOP = 5
_SUMS_TO_ONE = 1e-2  # a softmax of 8 bits: up to half an LSB of 1/256 in each of a few channels that matter
_KEPT_FLIPS = 3


class TaskTally:
    """Gathers outputs of both sides, one sample at a time. `a + b` is what both have gathered, in that order."""

    def __init__(self) -> None:
        self._outputs: dict[str, _Output] = {}

    def add(self, outputs: Mapping[str, Pair], lsb: Mapping[str, float] | None = None, sample: str = "") -> None:
        """Add the outputs of one sample: name -> (reference, candidate), real values (dequantised), any float or integer dtype.

        `lsb` gives the quantisation step of an output where it has one, in real units. Outputs whose two shapes differ are
        left out: there is nothing to compare element by element.
        """
        for name, (reference, candidate) in outputs.items():
            if reference.shape == candidate.shape:
                known = self._outputs.get(name, _Output())
                self._outputs[name] = known + _measured(reference, candidate, (lsb or {}).get(name), sample)

    def __add__(self, other: TaskTally) -> TaskTally:
        merged = TaskTally()
        for name in dict.fromkeys([*self._outputs, *other._outputs]):
            merged._outputs[name] = self._outputs.get(name, _Output()) + other._outputs.get(name, _Output())
        return merged

    def finish(self) -> list[TaskFigures]:
        """The figures of every output, in the order in which they came first."""
        return [output.figures(name) for name, output in self._outputs.items()]


def kind_of(reference: Array, candidate: Array) -> Kind:
    """How an output is read, see `Kind`."""
    if reference.dtype.kind != "f" or not reference.size:
        return "distance"
    if _score_columns(reference, candidate) is not None:
        return "scores"
    if _class_shaped(reference.shape):
        return "classes"
    map_of_scores = reference.ndim == 4 and reference.shape[_channel_axis(reference.shape)] >= 2
    return "pixels" if map_of_scores else "distance"


def _added(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


# -- classes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Classes:
    n: int = 0
    same: int = 0
    tied: int = 0
    not_finite: int = 0
    margin: float = math.inf
    ranked: int = 0
    top_same: int = 0
    top_shared: int = 0
    labels: tuple[int, ...] = ()  # of rows that agree; one more than one is enough to know that it is not one
    flips: tuple[Flip, ...] = ()

    def __add__(self, other: _Classes) -> _Classes:
        return _Classes(
            n=self.n + other.n,
            same=self.same + other.same,
            tied=self.tied + other.tied,
            not_finite=self.not_finite + other.not_finite,
            margin=min(self.margin, other.margin),
            ranked=self.ranked + other.ranked,
            top_same=self.top_same + other.top_same,
            top_shared=self.top_shared + other.top_shared,
            labels=(self.labels + other.labels)[:2],
            flips=_worst(self.flips + other.flips),
        )

    def figures(self) -> ClassFigures:
        return ClassFigures(
            n=self.n,
            same=self.same,
            different=self.n - self.same - self.tied - self.not_finite,
            tied=self.tied,
            not_finite=self.not_finite,
            margin=self.margin if math.isfinite(self.margin) else None,
            top=TOP,
            top_same=self.top_same if self.ranked else None,
            top_shared=self.top_shared if self.ranked else None,
            label=self.labels[0] if self.n == self.same == 1 else None,
            flips=list(self.flips),
        )


def _worst(flips: Sequence[Flip]) -> tuple[Flip, ...]:
    """The flips that the reference was surest of."""
    return tuple(sorted(flips, key=lambda flip: -flip.reference_margin)[:_KEPT_FLIPS])


def _class_shaped(shape: tuple[int, ...]) -> bool:
    if len(shape) == 4:
        return (shape[2:] == (1, 1) or shape[1:3] == (1, 1)) and shape[1] * shape[3] >= 2
    return len(shape) in (1, 2) and shape[-1] >= 2


def _class_rows(array: Array) -> Array:
    """Class scores as [rows, C]."""
    return array[None] if array.ndim == 1 else array.reshape(array.shape[0], -1)


def _classes(reference: Array, candidate: Array, sample: str) -> _Classes:
    found = _Classes()
    for k, (r, c) in enumerate(zip(reference.astype(np.float64), candidate.astype(np.float64), strict=True)):
        found += _class_row(r, c, sample, k) if np.isfinite([r, c]).all() else _Classes(n=1, not_finite=1)
    return found


def _class_row(r: Array, c: Array, sample: str, row: int) -> _Classes:
    first, second = int(r.argmax()), int(c.argmax())
    tops_r, tops_c = r == r[first], c == c[second]
    ranked, top_same, top_shared = _top(r, c)
    best = _Classes(n=1, ranked=ranked, top_same=top_same, top_shared=top_shared)
    if not (tops_r & tops_c).any():
        flip = Flip(
            sample=sample,
            row=row,
            reference_class=first,
            candidate_class=second,
            reference_margin=float(r[first] - r[second]),
            candidate_margin=float(c[second] - c[first]),
        )
        return best + _Classes(margin=_margin(r), flips=(flip,))
    if tops_r.sum() > 1 or tops_c.sum() > 1:
        return best + _Classes(tied=1)
    return best + _Classes(same=1, margin=_margin(r), labels=(first,))


def _margin(scores: Array) -> float:
    second, first = np.partition(scores, -2)[-2:]
    return float(first - second)


def _top(r: Array, c: Array) -> tuple[int, int, int]:
    """(1, 1 if the best classes are the same set, how many they share); (0, 0, 0) where there are too few classes.

    Where classes tie for the last places, either side takes those of them that make the sets share the most.
    """
    if r.size <= TOP:
        return 0, 0, 0
    sure_r, tied_r, free_r = _best(r)
    sure_c, tied_c, free_c = _best(c)
    by_c = min(int((sure_r & tied_c).sum()), free_c)
    by_r = min(int((tied_r & sure_c).sum()), free_r)
    by_both = min(int((tied_r & tied_c).sum()), free_c - by_c, free_r - by_r)
    shared = int((sure_r & sure_c).sum()) + by_c + by_r + by_both
    return 1, int(shared == TOP), shared


def _best(scores: Array) -> tuple[Array, Array, int]:
    """Masks of the classes surely among the best and of those that tie for the last places, and how many places that is."""
    last = np.partition(scores, -TOP)[-TOP]
    sure = scores > last
    return sure, scores == last, TOP - int(sure.sum())


# -- pixels ------------------------------------------------------------------------------------------------------------


def _channel_axis(shape: tuple[int, ...]) -> int:
    """1, or 3 where only that reading makes the channels fewer than the rows and the columns."""
    _, a, b, c = shape
    return 3 if c < min(a, b) and not a < min(b, c) else 1


def _pixels(reference: Array, candidate: Array) -> tuple[int, int, int, int]:
    """(pixels, different, tied, not finite) of channels-first arrays."""
    finite = (np.isfinite(reference) & np.isfinite(candidate)).all(axis=0)
    tops_r, tops_c = reference == reference.max(axis=0), candidate == candidate.max(axis=0)
    meet = (tops_r & tops_c).any(axis=0)
    several = (tops_r.sum(axis=0) > 1) | (tops_c.sum(axis=0) > 1)
    counted = (finite & ~meet, finite & meet & several, ~finite)
    different, tied, not_finite = (int(np.count_nonzero(mask)) for mask in counted)
    return finite.size, different, tied, not_finite


# -- scores ------------------------------------------------------------------------------------------------------------


def _score_columns(reference: Array, candidate: Array) -> Pair | None:
    """What of an output is scores, or None: see `Kind`."""
    inside = _in_unit(reference) & _in_unit(candidate)
    if reference.ndim == 2 and reference.shape[1] == 1 and inside.all():
        return reference, candidate
    if reference.ndim == 4 and reference[0, 0].size > 1 and not _class_shaped(reference.shape) and inside.all():
        sums = reference.sum(axis=_channel_axis(reference.shape), dtype=np.float64)
        one_of = reference.shape[1] > 1 and np.nanmax(np.abs(sums - 1.0), initial=0.0) <= _SUMS_TO_ONE
        return None if one_of else (reference, candidate)
    if reference.ndim == 3:
        axis = 2 if reference.shape[2] <= reference.shape[1] else 1
        columns = inside.all(axis=tuple(k for k in range(3) if k != axis))
        if reference.shape[axis] != 4 and columns.any():
            chosen = np.flatnonzero(columns)
            return reference.take(chosen, axis), candidate.take(chosen, axis)
    return None


def _in_unit(array: Array) -> npt.NDArray[np.bool_]:
    """Elements in [0, 1]; NaN says nothing about the range, and is let pass."""
    return ~((array < 0.0) | (array > 1.0))


def _crossings(reference: Array, candidate: Array, threshold: float) -> tuple[int, int, int]:
    """(reference only, candidate only, either) at or above the threshold; NaN is not."""
    r, c = reference >= threshold, candidate >= threshold
    counted = (r & ~c, c & ~r, r | c)
    reference_only, candidate_only, either = (int(np.count_nonzero(mask)) for mask in counted)
    return reference_only, candidate_only, either


# -- distance ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sums:
    """Sums over the finite pairs, in float64; of squares beyond its range nothing is said."""

    n: int = 0
    not_finite: int = 0
    unequal: int = 0
    reference: float = 0.0
    candidate: float = 0.0
    error: float = 0.0
    dot: float = 0.0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*_added(astuple(self), astuple(other)))

    def figures(self) -> DistanceFigures:
        norm = math.sqrt(self.reference) * math.sqrt(self.candidate)
        cosine = self.dot / norm if 0.0 < norm < math.inf else None
        ratio = self.reference / self.error if self.error > 0.0 else 0.0
        return DistanceFigures(
            n=self.n,
            not_finite=self.not_finite,
            equal=self.unequal == 0,
            snr_db=10.0 * math.log10(ratio) if 0.0 < ratio < math.inf else None,
            cosine=cosine if cosine is not None and math.isfinite(cosine) else None,
        )


def _sums(reference: Array, candidate: Array) -> _Sums:
    r, c = (side.astype(np.float64).ravel() for side in (reference, candidate))
    finite = np.isfinite(r) & np.isfinite(c)
    same = (reference == candidate).ravel() | (np.isnan(r) & np.isnan(c))
    r, c = r[finite], c[finite]
    with np.errstate(over="ignore"):
        d = c - r
        return _Sums(
            n=r.size,
            not_finite=finite.size - r.size,
            unequal=int(np.count_nonzero(~same)),
            reference=float(r @ r),
            candidate=float(c @ c),
            error=float(d @ d),
            dot=float(r @ c),
        )


# -- one output --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """What is known of one output: sums for the distance always, and counts of the kinds its samples were read as."""

    samples: int = 0
    kinds: frozenset[Kind] = frozenset()
    steps: frozenset[float | None] = frozenset()
    sums: _Sums = field(default_factory=_Sums)
    classes: _Classes = field(default_factory=_Classes)
    pixels: tuple[int, ...] = (0, 0, 0, 0)  # n, different, tied, not finite
    scores: int = 0
    crossed: tuple[tuple[int, ...], ...] = ((0, 0, 0),) * len(THRESHOLDS)  # reference only, candidate only, either

    def __add__(self, other: _Output) -> _Output:
        return _Output(
            samples=self.samples + other.samples,
            kinds=self.kinds | other.kinds,
            steps=self.steps | other.steps,
            sums=self.sums + other.sums,
            classes=self.classes + other.classes,
            pixels=_added(self.pixels, other.pixels),
            scores=self.scores + other.scores,
            crossed=tuple(_added(a, b) for a, b in zip(self.crossed, other.crossed, strict=True)),
        )

    def figures(self, name: str) -> TaskFigures:
        kind: Kind = next(iter(self.kinds)) if len(self.kinds) == 1 else "distance"
        n, different, tied, not_finite = self.pixels
        return TaskFigures(
            name=name,
            kind=kind,
            samples=self.samples,
            distance=self.sums.figures(),
            lsb=next(iter(self.steps)) if len(self.steps) == 1 else None,
            classes=self.classes.figures() if kind == "classes" else None,
            pixels=PixelFigures(n=n, different=different, tied=tied, not_finite=not_finite)
            if kind == "pixels"
            else None,
            scores=ScoreFigures(n=self.scores, crossed=self._crossed()) if kind == "scores" else None,
        )

    def _crossed(self) -> list[Crossed]:
        return [
            Crossed(threshold=threshold, reference_only=reference, candidate_only=candidate, either=either)
            for threshold, (reference, candidate, either) in zip(THRESHOLDS, self.crossed, strict=True)
        ]


def _measured(reference: Array, candidate: Array, lsb: float | None, sample: str) -> _Output:
    kind = kind_of(reference, candidate)
    found = _Output(1, frozenset({kind}), frozenset({lsb}), _sums(reference, candidate))
    if kind == "scores" and (columns := _score_columns(reference, candidate)) is not None:
        crossed = tuple(_crossings(*columns, threshold) for threshold in THRESHOLDS)
        return replace(found, scores=columns[0].size, crossed=crossed)
    if kind == "classes":
        return replace(found, classes=_classes(_class_rows(reference), _class_rows(candidate), sample))
    if kind == "pixels":
        axis = _channel_axis(reference.shape)
        return replace(found, pixels=_pixels(np.moveaxis(reference, axis, 0), np.moveaxis(candidate, axis, 0)))
    return found


# -- words -------------------------------------------------------------------------------------------------------------
