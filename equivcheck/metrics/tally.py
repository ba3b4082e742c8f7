"""The sums behind `Metrics`, how they merge, and the figures they give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from equivcheck.result import ChannelError, Metrics

LADDER = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128)
_ADDED = (
    "n", "finite", "mismatched", "sum_abs", "sum_sq", "sum_d", "dot", "ref_sq", "cand_sq", "err_sq", "nan_mismatch",
    "inf_mismatch", "far",
)  # fmt: skip


@dataclass(frozen=True)
class Tally:
    """Sums behind `Metrics`. `a` is the reference, `b` the candidate, `d` = b - a in stored units.

    `at` is the flat index of the first largest |d|. Sums are Python integers where they are exact, else np.longdouble.
    Tallies of samples add up: counts, maxima and integer sums exactly, in any grouping.
    """

    shape: tuple[int, ...] = ()
    n: int = 0
    finite: int = 0
    mismatched: int = 0
    max_abs: Any = 0
    at: int = 0
    sum_abs: Any = 0
    sum_sq: Any = 0
    sum_d: Any = 0
    dot: Any = 0
    ref_sq: Any = 0
    cand_sq: Any = 0
    err_sq: Any = 0
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    nan_mismatch: int = 0
    inf_mismatch: int = 0
    ladder: tuple[int, ...] = ()
    lsb: float | None = None
    real: bool = False
    far: int = 0

    def __add__(self, other: Tally) -> Tally:
        if self.n == 0:
            return other
        if other.n == 0:
            return self
        worst = self if self.max_abs >= other.max_abs else other
        both = self.ladder and other.ladder
        return replace(
            worst,
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
            nan=(self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]),
            inf=(self.inf[0] + other.inf[0], self.inf[1] + other.inf[1]),
            ladder=tuple(x + y for x, y in zip(self.ladder, other.ladder, strict=True)) if both else (),
        )

    def finish(self) -> Metrics:
        """Return the figures; those that do not exist (no finite pair, a zero norm) are None."""
        some = self.finite > 0
        max_abs = _finite(self.max_abs) if some else None
        bias = _finite(np.longdouble(self.sum_d) / self.finite) if some else None
        return Metrics(
            n=self.n,
            mismatched=self.mismatched,
            identical=self.mismatched == 0,
            max_abs=max_abs,
            argmax=[int(i) for i in np.unravel_index(self.at, self.shape)] if some else None,
            mean_abs=_finite(np.longdouble(self.sum_abs) / self.finite) if some else None,
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
            worst_channel=self._worst_channel(),
        )

    def _worst_channel(self) -> ChannelError | None:
        """The channel (index along axis 1) of the first largest difference, where there are channels."""
        if len(self.shape) < 2 or self.shape[1] < 2 or not self.max_abs:
            return None
        channel = self.at // math.prod(self.shape[2:]) % self.shape[1]
        return ChannelError(index=channel, max_abs=_finite(self.max_abs))

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
        if self.err_sq == 0:
            return "equal"
        return "reference is zero" if self.ref_sq == 0 else None


def rungs(n: int, exceeding: list[int]) -> tuple[int, ...]:
    """Counts in (previous rung, rung] from counts above each rung; the last rung takes all that is beyond."""
    above = [n, *exceeding[:-1], 0]
    return tuple(x - y for x, y in pairwise(above))


def _finite(figure: Any) -> float:
    """A figure that JSON can hold."""
    return float(np.clip(np.longdouble(figure), -np.finfo(np.float64).max, np.finfo(np.float64).max))
