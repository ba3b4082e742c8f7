"""Two arrays -> figures, in one pass over each block of both, and mergeable over blocks and samples.

* `Tally`: candidate against reference ("since the input"); `finish` gives `Metrics`.
* `StepTally`: one value against the real value of its step ("this step"); `finish` gives `StepError`.

Integers are compared as integers, floats in float64; every figure is over the pairs in which both sides are finite, NaN
and Inf are counted apart, by position. The definitions stand beside the fields of `equivcheck.result.Metrics`.
"""

from equivcheck.metrics.blocks import BLOCK, Array, Grid
from equivcheck.metrics.pairs import is_coded, tally
from equivcheck.metrics.steps import INFINITE, StepTally, step_tally
from equivcheck.metrics.tally import LADDER, Tally

__all__ = ["BLOCK", "INFINITE", "LADDER", "Array", "Grid", "StepTally", "Tally", "is_coded", "step_tally", "tally"]
