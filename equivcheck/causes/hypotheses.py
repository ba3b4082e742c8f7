"""What a hypothesis is, what it is held against, and how one of several is chosen.

A hypothesis says what a step would have computed if one thing were wrong, as reals in codes. Stored codes fit it where
they are a legal rounding of those reals, by the same limit that convicted the step. It has to explain the wrong codes
and must not contradict the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.result import Cause

# Chosen on the bench (tests/bench/causes.py). What a true hypothesis leaves unexplained are codes where the engine's own
# legal rounding adds to the fault; a wrong one leaves a third of the codes or more.
EXPLAINED, BROKEN = 0.95, 0.05
MENDED = 0.5  # of the wrong codes are not only legal under a true hypothesis, but its correct rounding
FEWEST = 3  # wrong codes: one or two can be explained by anything, and so can a few more by what was fitted to them
CLEARLY = 1.5  # how many times more codes than the best a rival must miss
_TIE = 1e-3  # float32 error of a real value that stands between two codes


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One thing that may be wrong. `how` completes "...: explains N of M codes beyond the limit".

    `real()` gives the step's reals in codes under it, to be clipped to `low` and `high`. `fitted` counts what was read
    off the wrong codes themselves (a factor, a place): of two that explain alike, the one that guessed less is named.
    """

    kind: str
    how: str
    real: Callable[[], Array]
    low: float
    high: float
    fitted: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """A culprit: what it stored and what it should have stored.

    `codes` as stored. `real` its reals in codes, float64, before Relu, Clip and saturation where those are known; `low`
    and `high` the codes these leave. `zero` is the output's zero point, `least` and `most` its dtype's range. `limit`
    is the legal excess in LSB, shaped to broadcast.
    """

    codes: Array
    real: Array
    low: float
    high: float
    zero: int
    limit: Array

    @cached_property
    def stored(self) -> Array:
        return self.codes.astype(np.float64)

    @cached_property
    def least(self) -> float:
        return float(np.iinfo(self.codes.dtype).min)

    @cached_property
    def most(self) -> float:
        return float(np.iinfo(self.codes.dtype).max)

    @cached_property
    def expected(self) -> Array:
        """The correct codes, float64."""
        codes: Array = np.rint(np.clip(self.real, self.low, self.high))
        return codes

    @cached_property
    def allowed(self) -> Array:
        return 0.5 + self.limit + _TIE

    @cached_property
    def wrong(self) -> Array:
        """Where the stored code is no legal rounding of the real value."""
        made: Array = np.abs(self.stored - np.clip(self.real, self.low, self.high)) > self.allowed
        return made

    @cached_property
    def off_count(self) -> int:
        """Codes that are not the correct rounding, legal or not."""
        return int(np.count_nonzero(np.abs(self.stored - np.clip(self.real, self.low, self.high)) > 0.5 + _TIE))

    @cached_property
    def wrong_count(self) -> int:
        return int(np.count_nonzero(self.wrong))

    def supposing(
        self, kind: str, how: str, real: Callable[[], Array], *, fitted: int = 0,
        low: float | None = None, high: float | None = None,
    ) -> Hypothesis:  # fmt: skip
        """A hypothesis about this step; its bounds are the step's own unless given."""
        return Hypothesis(
            kind, how, real, self.low if low is None else low, self.high if high is None else high, fitted
        )


@dataclass(frozen=True, eq=False)
class Held:
    """A hypothesis held against the codes: wrong codes explained, right ones contradicted, codes not equal to its own."""

    hypothesis: Hypothesis
    explained: int
    broken: int
    missed: int


def hold(step: Step, hypothesis: Hypothesis) -> Held:
    """Count what `hypothesis` explains and contradicts."""
    distance = np.abs(step.stored - np.clip(hypothesis.real(), hypothesis.low, hypothesis.high))
    fits = distance <= step.allowed
    explained = int(np.count_nonzero(fits & step.wrong))
    broken = int(fits.size - np.count_nonzero(fits | step.wrong))
    return Held(hypothesis, explained, broken, int(np.count_nonzero(distance > 0.5 + _TIE)))


def choose(step: Step, hypotheses: Iterable[Hypothesis]) -> Cause | None:
    """The hypothesis that explains the wrong codes, as a cause; None where none does, or two of different kinds do."""
    held = [h for h in (hold(step, hypothesis) for hypothesis in hypotheses) if _sound(step, h)]
    if not held:
        return None
    least = min(h.missed for h in held)
    near = [h for h in held if h.missed <= CLEARLY * least + FEWEST]
    simplest = min(h.hypothesis.fitted for h in near)
    rivals = [h for h in near if h.hypothesis.fitted == simplest]
    best = min(rivals, key=lambda h: h.missed)
    if any(h.hypothesis.kind != best.hypothesis.kind for h in rivals):
        return None
    return Cause(
        kind=best.hypothesis.kind,
        evidence=f"{best.hypothesis.how}: explains {best.explained} of {step.wrong_count} codes beyond the limit",
        explains=[best.explained, step.wrong_count],
    )


def _sound(step: Step, held: Held) -> bool:
    count = step.wrong_count
    guessed = 1 + held.hypothesis.fitted
    mended = step.off_count - held.missed
    return (
        held.explained >= EXPLAINED * count
        and held.broken <= BROKEN * count
        and mended >= max(MENDED * count, FEWEST * guessed)
    )
