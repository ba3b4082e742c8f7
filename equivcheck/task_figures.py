"""What a difference at a model's output means for its task: the figures, and a sentence for each.

Data of the result; `equivcheck.task` measures them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["classes", "pixels", "scores", "distance"]
"""How an output is read. Floats only; the first rule that fits counts.

* `scores`: [N, boxes, K] or [N, K, boxes] with a column of K (the shorter axis) whose values all lie in [0, 1] on both sides,
  but not K = 4 (bare coordinates); [N, C, H, W] in [0, 1] whose channels do not sum to 1; [N, 1] in [0, 1]. Counted is what
  crosses a threshold on one side only; boxes are not decoded. Misleads where coordinates are normalised to [0, 1] (they
  are counted as scores), and for images in [0, 1].
* `classes`: [C], [N, C], [N, C, 1, 1] or [N, 1, 1, C] with C >= 2. Misleads for embeddings, landmarks and other regressions:
  the place of their largest element means nothing.
* `pixels`: [N, C, H, W] with C >= 2 and more than one pixel; [N, H, W, C] where C is smaller than both H and W, and axis 1
  is not smaller than both others. Misleads for images and feature maps.
* `distance`: anything else, integers included.
"""


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """A top-1 that differs. Margins are between the two contenders: by how much each side prefers its own."""

    sample: str
    row: int
    reference_class: int
    candidate_class: int
    reference_margin: float
    candidate_margin: float


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Top-1 and top-5 over `n` rows of scores. `n` = same + different + tied + not_finite.

    A row is tied (undecided) where several classes share the top of a side and one of them is at the top of the other.
    `margin` is the reference's smallest top-1 minus top-2 over the rows that are not tied, in real units. `top_same` counts
    rows whose `top` best classes are the same set, `top_shared` the members that the sets share, over all finite rows;
    None where there are no more than `top` classes. `label` is the class of the only row, where both sides agree on it.
    """

    n: int
    same: int
    different: int
    tied: int
    not_finite: int
    margin: float | None
    top: int
    top_same: int | None
    top_shared: int | None
    label: int | None
    flips: list[Flip]


class PixelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Pixels whose largest channel differs. Tied pixels (as in `ClassFigures`) and those with NaN or Inf are counted apart."""

    n: int
    different: int
    tied: int
    not_finite: int


class Crossed(msgspec.Struct, frozen=True, kw_only=True):
    """Scores at or above `threshold` on the reference only and on the candidate only, and on either side."""

    threshold: float
    reference_only: int
    candidate_only: int
    either: int


class ScoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    crossed: list[Crossed]


class DistanceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Over the `n` pairs in which both sides are finite; of `not_finite` pairs at least one side is not.

    `snr_db` = 10 log10(sum r^2 / sum (c - r)^2); None where both are equal, the reference is zero, or nothing is finite.
    `cosine` is None where a side is zero.
    """

    n: int
    not_finite: int
    equal: bool
    snr_db: float | None
    cosine: float | None


class TaskFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the difference at one output means. Of `classes`, `pixels` and `scores` only that of `kind` is there.

    `lsb`: one quantisation step of the output in real units, None where it has none or its samples differ in it.
    """

    name: str
    kind: Kind
    samples: int
    distance: DistanceFigures
    lsb: float | None = None
    classes: ClassFigures | None = None
    pixels: PixelFigures | None = None
    scores: ScoreFigures | None = None

    @property
    def text(self) -> str:
        """One sentence for the screen, without the output's name."""
        if self.classes is not None:
            return _class_text(self.classes, self.lsb)
        if self.pixels is not None:
            return _pixel_text(self.pixels)
        if self.scores is not None:
            return _score_text(self.scores)
        return _distance_text(self.distance)


def _class_text(figures: ClassFigures, lsb: float | None) -> str:
    parts = [_top_one(figures, lsb)]
    if figures.top_same is not None and figures.top_shared is not None:
        several = f"top-{figures.top} the same in {figures.top_same} of {figures.n - figures.not_finite}"
        parts.append(f"top-{figures.top} {figures.top_shared} of {figures.top}" if figures.n == 1 else several)
    return "; ".join(parts)


def _top_one(figures: ClassFigures, lsb: float | None) -> str:
    if figures.n == 1:
        return _only_row(figures, lsb)
    text = f"top-1 the same in {figures.same} of {figures.n}"
    apart = [(figures.tied, "tied"), (figures.not_finite, "with NaN or Inf")]
    said = [f"{count} {why}" for count, why in apart if count]
    text += f" ({', '.join(said)})" if said else ""
    if figures.flips:
        return f"{text}, the surest that differs: {_flip(figures.flips[0], lsb)}"
    return text + ("" if figures.margin is None else f", smallest margin {_amount(figures.margin, lsb)}")


def _only_row(figures: ClassFigures, lsb: float | None) -> str:
    if figures.not_finite:
        return "top-1 not compared: NaN or Inf among the scores"
    if figures.tied:
        return "top-1 undecided: several classes tie at the top"
    if figures.flips:
        return f"top-1 differs: {_flip(figures.flips[0], lsb)}"
    margin = "" if figures.margin is None else f", margin {_amount(figures.margin, lsb)}"
    return f"top-1 the same ({figures.label}){margin}"


def _flip(flip: Flip, lsb: float | None) -> str:
    return (
        f"{flip.reference_class} by {_amount(flip.reference_margin, lsb)} on the reference, "
        f"{flip.candidate_class} by {_amount(flip.candidate_margin, lsb)} on the candidate"
    )


def _amount(margin: float, lsb: float | None) -> str:
    """A margin in LSB where the output has them, else in its own unit."""
    return f"{margin:.3g}" if not lsb else f"{margin / lsb:.3g} LSB"


def _pixel_text(figures: PixelFigures) -> str:
    text = f"the largest channel differs in {figures.different} of {figures.n} pixels"
    text += f" ({_percent(figures.different, figures.n)})" if figures.different else ""
    apart = [(figures.tied, "tied"), (figures.not_finite, "with NaN or Inf")]
    return "; ".join([text, *(f"{count} {why}" for count, why in apart if count)])


def _score_text(figures: ScoreFigures) -> str:
    said = [
        f"{each.reference_only + each.candidate_only} of {each.either} scores pass {each.threshold:g} on one side only"
        for each in figures.crossed
        if each.either
    ]
    return "; ".join(said) or f"no score of {figures.n} passes {figures.crossed[0].threshold:g} on either side"


def _distance_text(figures: DistanceFigures) -> str:
    apart = f"; {figures.not_finite} pairs with NaN or Inf" if figures.not_finite else ""
    if not figures.n and not figures.not_finite:
        return "nothing to compare: the output is empty"
    if figures.equal:
        return "equal" + apart
    said = [] if figures.snr_db is None else [f"SNR {figures.snr_db:.1f} dB"]
    said += [] if figures.cosine is None else [f"cosine {figures.cosine:.6g}"]
    return (", ".join(said) or "differs") + apart


def _percent(count: int, of: int) -> str:
    return f"{100.0 * count / of:.2g} %"
