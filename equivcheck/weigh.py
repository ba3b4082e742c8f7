"""Weighs what one side stored against the real value of every step, on the inputs that side itself had."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from equivcheck.judge import legal, step_limit
from equivcheck.metrics import INFINITE, Grid, StepTally, step_tally
from equivcheck.models.graph import Array, Quantisation
from equivcheck.models.onnx.isolate import real_in_codes
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.plan import merged
from equivcheck.recording import Parameters, Recording
from equivcheck.referee import ExactReferee, float32_bound, float_value_bound
from equivcheck.truth import StepResults, step_results

_ENVELOPE_RUNS = 8
_TELLING = 0.25  # an envelope above that share of the error tells nothing about it
Declared = Mapping[str, tuple[float, str]]


@dataclass(frozen=True, eq=False)
class Weighed:
    """What one side's values came to: figures and a-priori bounds (floats) by stored value, the steps' float results, and
    the values whose dump is not what the engine computed with, with the evidence.
    """

    tallies: Mapping[str, StepTally]
    bounds: Mapping[str, float]
    results: Mapping[str, Array]
    untrustworthy: Mapping[str, str] = field(default_factory=dict)


class Weigher:
    """The real value of every step, given what one side stored: one run of the isolated model, in float32.

    Where its rounding error could decide (`referee.float32_bound`), the step is evaluated again exactly.
    """

    def __init__(
        self, model: OnnxModel, specs: Mapping[str, Any], referee: ExactReferee, unusable: Collection[str]
    ) -> None:
        self.model = model
        self.graph = model.graph
        self.specs = dict(specs)
        self.referee = referee
        self.merged = {
            name: missing
            for name, missing in merged(self.graph, specs).items()
            if not any(m in unusable for m in missing)
        }
        made = [s for s in self.graph.steps if any(out in self.merged for out in s.outputs)]
        self.steps = step_results(model, self.specs, made)

    def weigh(
        self,
        values: Mapping[str, Array],
        recording: Recording,
        rows: Sequence[str],
        declared: Declared,
        *,
        own_model: bool,
    ) -> Weighed:
        """Measure stored `values` of a recording against the real values of their steps on those values.

        `declared` are the limits that the recorded engine declares. Results that a recording of this very model brings along
        are used.
        """
        known = recording.results if own_model else None
        whole = known is not None and self.merged.keys() <= known.keys() and values.keys() == recording.values.keys()
        results = known if known is not None and whole else self.steps.evaluate(values)
        envelopes = self._envelopes(values, results) if any(self.merged.values()) else {}
        tallies, bounds = self.weigh_against(results, values, values, rows, declared, envelopes)
        return Weighed(
            {n: replace(t, off_grid=recording.off_grid.get(n, 0.0)) for n, t in tallies.items()}, bounds, results
        )

    def weigh_against(
        self,
        results: Mapping[str, Array],
        stored: Mapping[str, Array],
        values: Mapping[str, Array],
        rows: Sequence[str],
        declared: Declared,
        envelopes: Mapping[str, float] | None = None,
    ) -> tuple[dict[str, StepTally], dict[str, float]]:
        """Measure `stored` against `results`, which the steps gave on `values`; (tallies, float bounds) by stored value."""
        tallies: dict[str, StepTally] = {}
        bounds: dict[str, float] = {}
        for name in rows:
            if name not in stored or name not in results or name not in self.merged:
                continue
            if stored[name].size != results[name].size:
                continue
            found = self._weigh_one(name, stored[name], results[name], values, declared)
            if envelopes:
                found = replace(found, envelope=envelopes.get(name, 0.0))
            tallies[name] = found
            if found.half == 0.0:
                bounds[name] = float_value_bound(self.graph, self.graph.step_of_value[name], values, results[name])
        return tallies, bounds

    # -- dumps that are not what the engine computed with --------------------------------------------------------------

    def doubted(self, tallies: Mapping[str, StepTally], declared: Declared) -> set[str]:
        """Values that are illegal and whose readers are illegal on them: a wrong step's readers are right on what it made.

        So either two steps in a row are wrong, or the dump is (memory that was used again); see `believed`.
        """
        wrong = {name for name, tally in tallies.items() if not legal(self.graph, name, tally, declared)}
        return {name for name in wrong if self._made_from(name) & wrong}

    def _made_from(self, name: str) -> set[str]:
        """The stored values made by the steps that read `name`."""
        return {out for step in self.graph.steps if name in step.inputs for out in step.outputs}

    def believed(self, found: Weighed, doubted: Collection[str], without: Weighed, declared: Declared) -> Weighed:
        """Take `without` (weighed without the doubted values) where it makes all their readers legal, else `found`.

        Only where the noise that the value left out may legally have is small beside the error that its dump makes: wide
        enough, it would acquit anything.
        """
        proved = {
            name
            for name in doubted
            if (made := self._made_from(name) & without.tallies.keys())
            and all(legal(self.graph, out, without.tallies[out], declared) for out in made)
            and any(without.tallies[out].envelope < _TELLING * found.tallies[out].excess for out in made)
        }
        if not proved:
            return found
        touched = {out for name in proved for out in self._made_from(name)} - proved
        tallies = {name: tally for name, tally in found.tallies.items() if name not in proved}
        tallies |= {name: without.tallies[name] for name in touched if name in without.tallies}
        words = {name: self._dump_words(name, found.tallies[name]) for name in proved}
        return Weighed(tallies, found.bounds, found.results, words)

    def _dump_words(self, name: str, tally: StepTally) -> str:
        readers = ", ".join(f"#{step.id} {step.op_type}" for step in self.graph.steps if name in step.inputs)
        return (
            f"this dump is not what the engine computed with: it is {min(tally.excess, INFINITE):.3g} LSB beyond rounding, "
            f"while {readers} is right only without it (memory used again before it was read, or written in other units?)"
        )

    def _weigh_one(
        self, name: str, codes: Array, result: Array, values: Mapping[str, Array], declared: Declared
    ) -> StepTally:
        quantisation = self.graph.quantisation.get(name)
        if quantisation is None or codes.dtype.kind not in "iu":
            return step_tally(codes, result, None, None)
        grid = None if result.dtype.kind in "iu" else grid_of(quantisation, codes.ndim)
        limits = np.iinfo(quantisation.dtype)
        bounds = (float(limits.min), float(limits.max))
        stops = self._stops(name)
        found = step_tally(codes, result, grid, bounds, clamped_at=stops)
        found = replace(found, half=0.5, merged=self.merged[name])
        if found.merged or not self._undecided(name, found, values, declared):
            return found
        real = self.referee.real(self.graph.step_of_value[name], values)
        if real is None or name not in real:
            return found
        exact = step_tally(codes, real[name], None, bounds, clamped_at=stops)
        return replace(exact, half=0.5, exact=True)

    def _undecided(self, name: str, found: StepTally, values: Mapping[str, Array], declared: Declared) -> bool:
        """Could the float32 error of the real value turn the verdict?"""
        step = self.graph.step_of_value[name]
        limit = step_limit(self.graph, name, declared).limits(found.by_channel.size)
        margin = np.abs(found.by_channel - 0.5 - limit)
        return bool(np.min(margin, initial=np.inf) <= float32_bound(self.graph, step, name, values))

    def _stops(self, name: str) -> tuple[float, ...]:
        """The code of real zero, where the step ends in a Relu or Clip: clamped there, a value says nothing."""
        step = self.graph.step_of_value[name]
        quantisation = self.graph.quantisation[name]
        if not any(op in ("Relu", "Clip") for op in step.ops) or quantisation.per_channel:
            return ()
        return (float(quantisation.zero_point.ravel()[0]),)

    def _envelopes(self, values: Mapping[str, Array], results: Mapping[str, Array]) -> dict[str, float]:
        """How far +-0.3 LSB of noise at the missing values moves each merged step, in codes: the largest of 8 runs."""
        missing = {m for names in self.merged.values() for m in names}
        chosen = [n for n, names in self.merged.items() if names]
        merged_steps = [s for s in self.graph.steps if any(out in chosen for out in s.outputs)]
        noisy = StepResults(self.model, self.specs, merged_steps, noise=missing)  # anew: its seeded noise starts again
        found = dict.fromkeys(chosen, 0.0)
        for _ in range(_ENVELOPE_RUNS):
            got = noisy.evaluate(values)
            for name in chosen:
                if name in got and name in self.graph.quantisation:
                    found[name] = max(found[name], self._moved(name, got[name], results[name]))
        return found

    def _moved(self, name: str, noisy_result: Array, result: Array) -> float:
        limits = np.iinfo(self.graph.quantisation[name].dtype)
        noisy = np.clip(real_in_codes(self.graph, name, noisy_result), limits.min, limits.max)
        still = np.clip(real_in_codes(self.graph, name, result), limits.min, limits.max)
        return float(np.max(np.abs(noisy - still), initial=0.0))


def grid_of(quantisation: Quantisation | Parameters, ndim: int) -> Grid:
    scale, zero = Quantisation(quantisation.scale, quantisation.zero_point, quantisation.axis).along(ndim)
    return Grid(scale, zero)
