"""Weighs what one side stored against the real value of every step, on the inputs that side itself had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from equivcheck.judge import step_limit
from equivcheck.metrics import Grid, StepTally, step_tally
from equivcheck.models.graph import Array, Quantisation
from equivcheck.models.onnx.isolate import real_in_codes
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.plan import merged
from equivcheck.recording import Parameters, Recording
from equivcheck.referee import ExactReferee, float32_bound, float_value_bound
from equivcheck.truth import StepResults

_ENVELOPE_RUNS = 8


class Weigher:
    """The real value of every step, given what one side stored: one run of the isolated model, in float32.

    Where its rounding error could decide (`referee.float32_bound`), the step is evaluated again exactly.
    """

    def __init__(
        self,
        model: OnnxModel,
        specs: Mapping[str, Any],
        referee: ExactReferee,
        declared: Mapping[str, tuple[float, str]],
        unusable: set[str],
    ) -> None:
        self.model = model
        self.graph = model.graph
        self.specs = dict(specs)
        self.referee = referee
        self.declared = declared
        self.merged = {
            name: missing for name, missing in merged(self.graph, specs).items() if not unusable.intersection(missing)
        }
        made = [s for s in self.graph.steps if any(out in self.merged for out in s.outputs)]
        self.steps = StepResults(model, self.specs, made)
        self._noisy: StepResults | None = None
        self.results: Mapping[str, Array] = {}
        self.envelopes: dict[str, float] = {}

    def weigh(
        self, values: Mapping[str, Array], recording: Recording, rows: Sequence[str], *, own_model: bool
    ) -> tuple[dict[str, StepTally], dict[str, float]]:
        """Measure stored `values` of a recording against the real values of their steps on those values.

        Returns (tallies, float bounds) by stored value. Results that a recording of this very model brings along are used.
        """
        known = recording.results if own_model else None
        whole = known is not None and self.merged.keys() <= known.keys() and values.keys() == recording.values.keys()
        self.results = known if known is not None and whole else self.steps.evaluate(values)
        self.envelopes = self._envelopes(values) if any(self.merged.values()) else {}
        tallies, bounds = self.weigh_against(self.results, values, values, rows)
        return {n: replace(t, off_grid=recording.off_grid.get(n, 0.0)) for n, t in tallies.items()}, bounds

    def weigh_against(
        self,
        results: Mapping[str, Array],
        stored: Mapping[str, Array],
        values: Mapping[str, Array],
        rows: Sequence[str],
    ) -> tuple[dict[str, StepTally], dict[str, float]]:
        tallies: dict[str, StepTally] = {}
        bounds: dict[str, float] = {}
        for name in rows:
            if name not in stored or name not in results or name not in self.merged:
                continue
            if stored[name].size != results[name].size:
                continue
            found = self._weigh_one(name, stored[name], results[name], values)
            tallies[name] = found
            if found.half == 0.0:
                bounds[name] = float_value_bound(self.graph, self.graph.step_of_value[name], values, results[name])
        return tallies, bounds

    def _weigh_one(self, name: str, codes: Array, result: Array, values: Mapping[str, Array]) -> StepTally:
        quantisation = self.graph.quantisation.get(name)
        if quantisation is None or codes.dtype.kind not in "iu":
            return step_tally(codes, result, None, None)
        grid = None if result.dtype.kind in "iu" else grid_of(quantisation, codes.ndim)
        limits = np.iinfo(quantisation.dtype)
        bounds = (float(limits.min), float(limits.max))
        stops = self._stops(name)
        found = step_tally(codes, result, grid, bounds, clamped_at=stops)
        found = replace(found, half=0.5, merged=self.merged[name], envelope=self.envelopes.get(name, 0.0))
        if found.merged or not self._undecided(name, found, values):
            return found
        real = self.referee.real(self.graph.step_of_value[name], values)
        if real is None or name not in real:
            return found
        exact = step_tally(codes, real[name], None, bounds, clamped_at=stops)
        return replace(exact, half=0.5, exact=True)

    def _undecided(self, name: str, found: StepTally, values: Mapping[str, Array]) -> bool:
        """Could the float32 error of the real value turn the verdict?"""
        step = self.graph.step_of_value[name]
        limit = step_limit(self.graph, name, self.declared).limits(found.by_channel.size)
        margin = np.abs(found.by_channel - 0.5 - limit)
        return bool(np.min(margin, initial=np.inf) <= float32_bound(self.graph, step, name, values))

    def _stops(self, name: str) -> tuple[float, ...]:
        """The code of real zero, where the step ends in a Relu or Clip: clamped there, a value says nothing."""
        step = self.graph.step_of_value[name]
        quantisation = self.graph.quantisation[name]
        if not any(op in ("Relu", "Clip") for op in step.ops) or quantisation.per_channel:
            return ()
        return (float(quantisation.zero_point.ravel()[0]),)

    def _envelopes(self, values: Mapping[str, Array]) -> dict[str, float]:
        """How far +-0.3 LSB of noise at the missing values moves each merged step, in codes: the largest of 8 runs."""
        missing = {m for names in self.merged.values() for m in names}
        chosen = [n for n, names in self.merged.items() if names]
        if self._noisy is None:
            merged_steps = [s for s in self.graph.steps if any(out in chosen for out in s.outputs)]
            self._noisy = StepResults(self.model, self.specs, merged_steps, noise=missing)
        found = dict.fromkeys(chosen, 0.0)
        for _ in range(_ENVELOPE_RUNS):
            got = self._noisy.evaluate(values)
            for name in chosen:
                if name in got and name in self.graph.quantisation:
                    found[name] = max(found[name], self._moved(name, got[name]))
        return found

    def _moved(self, name: str, result: Array) -> float:
        limits = np.iinfo(self.graph.quantisation[name].dtype)
        noisy = np.clip(real_in_codes(self.graph, name, result), limits.min, limits.max)
        still = np.clip(real_in_codes(self.graph, name, self.results[name]), limits.min, limits.max)
        return float(np.max(np.abs(noisy - still), initial=0.0))


def grid_of(quantisation: Quantisation | Parameters, ndim: int) -> Grid:
    scale, zero = Quantisation(quantisation.scale, quantisation.zero_point, quantisation.axis).along(ndim)
    return Grid(scale, zero)
