"""Runs a comparison: opens both sides, records, evaluates every step's real value, measures, and hands over to `judge`.

It prints nothing and parses nothing. One sample at a time: what stays in memory are the figures, not the values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equivcheck.backends.base import Backend
from equivcheck.backends.registry import backend as find_backend
from equivcheck.errors import EngineError, Inconclusive, ModelError
from equivcheck.inputs import Sample, samples_from_python
from equivcheck.judge import Case, Evidence, Kind, Look, SideEvidence, judge, legal, step_limit
from equivcheck.metrics import StepTally, Tally, is_coded, tally
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.isolate import real_in_codes
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.models.onnx.rewrite import TWINS
from equivcheck.models.select import select
from equivcheck.opinions import SecondOpinion, random_codes
from equivcheck.plan import Plan, Values, plan
from equivcheck.recorder import (
    Progress,
    Recorder,
    check_feeds,
    input_shapes,
    input_specs,
    model_info,
    versions,
    writer_for,
)
from equivcheck.recording import Recording
from equivcheck.referee import ExactReferee
from equivcheck.result import Place, Result
from equivcheck.structure import NOT_NUMBERS, Structure
from equivcheck.task import TaskTally
from equivcheck.thresholds import closeness
from equivcheck.tolerance import Tolerance, load_tolerance
from equivcheck.truth import specs_of
from equivcheck.weigh import Weighed, Weigher, grid_of

if TYPE_CHECKING:
    import os

_EXPLAINED = 5  # culprits whose cause is looked for, per sample and kind of evidence
DEFAULT_CANDIDATE = "vnpu:profile=tflite-reference,target=warboy"


def diff(
    model: str | os.PathLike[str] | OnnxModel,
    *,
    inputs: object = None,
    split_at: str | Sequence[str] = (),
    reference: str | Backend = "ort",
    candidate: str | Backend = DEFAULT_CANDIDATE,
    candidate_model: str | os.PathLike[str] | OnnxModel | None = None,
    preprocess: str | None = None,
    values: Values = "all",
    tolerance: str | os.PathLike[str] | Tolerance | None = None,
    second_opinion: bool | None = None,
    save_to: str | os.PathLike[str] | None = None,
    keep_going: bool = False,
    progress: Progress | None = None,
    again: str | None = None,
) -> Result:
    """Run `model` on both backends with the same feeds and judge every step.

    `inputs`: None (seeded random), a file, an array (of the only input), a dict by input name, or a list of these.
    `split_at`: selectors (see `equivcheck.models.select`). `second_opinion`: None asks each backend whether it is cheap.
    `keep_going`: an engine's failure on one sample does not end the run; the others are judged.
    Raises EquivcheckError for a mistake in what was asked; an engine's failure becomes an inconclusive Result.
    """
    whole = model if isinstance(model, OnnxModel) else load_model(model)
    loaded = samples_from_python(inputs, input_specs(whole.graph), recipe=preprocess)
    return run(
        Request(
            model=whole,
            samples=loaded.samples,
            split_at=[split_at] if isinstance(split_at, str) else list(split_at),
            reference=find_backend(reference),
            candidate=find_backend(candidate),
            candidate_model=_other_model(candidate_model),
            values=values,
            tolerance=load_tolerance(tolerance),
            second_opinion=second_opinion,
            save_to=Path(save_to) if save_to is not None else None,
            keep_going=keep_going,
            notes=loaded.notes,
            again=again or "",
            progress=progress or (lambda text: None),
        )
    )


def assert_equivalent(model: str | os.PathLike[str] | OnnxModel, **options: Any) -> Result:
    """Run `diff` and return its Result when it is equivalent.

    Raises AssertionError, whose text is the first screen, when they differ, and Inconclusive when there is no verdict.
    """
    __tracebackhide__ = True
    result = diff(model, **options)
    if result.verdict == "different":
        raise AssertionError(str(result))
    if result.verdict == "inconclusive":
        raise Inconclusive(str(result))
    return result


def _other_model(given: str | os.PathLike[str] | OnnxModel | None) -> OnnxModel | None:
    return given if given is None or isinstance(given, OnnxModel) else load_model(given)


@dataclass(frozen=True, eq=False)
class Request:
    """A comparison, ready to run: everything parsed and found."""

    model: OnnxModel
    samples: Sequence[Sample]
    split_at: Sequence[str]
    reference: Backend
    candidate: Backend
    candidate_model: OnnxModel | None = None
    values: Values = "all"
    tolerance: Tolerance = field(default_factory=Tolerance)
    second_opinion: bool | None = None
    save_to: Path | None = None
    keep_going: bool = False
    notes: Sequence[str] = ()
    again: str = ""
    progress: Progress = lambda text: None


def run(request: Request) -> Result:
    """Run a prepared comparison. Raises EquivcheckError; engine failures end in an inconclusive Result."""
    return _Run(request).result()


class _Side(Recorder):
    """One side of the comparison, and what weighs its values."""

    weigher: Weigher | None = None


class _Run:
    def __init__(self, request: Request) -> None:
        self.request = request
        shapes = input_shapes(request.samples)
        check_feeds(request.model.graph, request.samples)
        self.model = request.model.with_input_shapes(shapes)
        self.graph = self.model.graph
        candidate, candidate_model = request.candidate, self.model
        other = request.candidate_model
        paired = None if other is None else _paired(candidate, other, self.model)
        if paired is not None:
            candidate = paired
        elif other is not None:
            candidate_model = other.with_input_shapes(shapes)
            _same_inputs(self.graph, candidate_model.graph)
        self.paired = paired is not None
        self.plan: Plan = plan(self.graph, select(self.graph, request.split_at, TWINS), request.values)
        if not self.plan.rows:
            raise ModelError("this model computes nothing: it has no step", hint="is it the right file?")
        self.reference = self._side("reference", request.reference, self.model)
        self.candidate = self._side("candidate", candidate, candidate_model)
        self.structure = Structure(self.graph, self.plan.rows)
        self.notes: list[str] = list(request.notes)
        self.task = TaskTally()
        self.referee = ExactReferee(self.graph)
        self.second: SecondOpinion | None = None
        self.stressed: tuple[dict[str, StepTally], dict[str, float]] | None = None

    def _side(self, role: str, backend: Backend, model: OnnxModel) -> _Side:
        folder = self.request.save_to
        other = self.request.candidate_model if role == "candidate" else None
        runs = "" if other is None else other.sha256
        writer = None if folder is None else writer_for(folder / role, model, backend, runs=runs)
        return _Side(backend, model, writer, self.request.progress)

    # -- the whole run -------------------------------------------------------------------------------------------------

    def result(self) -> Result:
        request = self.request
        evidence: list[Evidence] = []
        try:
            for number, sample in enumerate(request.samples, 1):
                request.progress(f"sample {number} of {len(request.samples)}: {sample.id}")
                found = self._sample(sample, last=number == len(request.samples))
                if found is not None:
                    evidence.append(found)
                elif not (request.keep_going and self.reference.opened and self.candidate.opened):
                    break
            if len(evidence) == len(request.samples):
                self._keep()
        finally:
            self._close()
        if request.keep_going:
            self._tell_lost()
        if not evidence:
            evidence = [Evidence(sample.info, {}, {}, {}) for sample in request.samples]
        return judge(self._case(evidence))

    def _sample(self, sample: Sample, *, last: bool) -> Evidence | None:
        """Record `sample` on both sides and measure it; None where an engine failed."""
        ref, cand = self.reference.record(sample), self.candidate.record(sample)
        if last:  # their memory is free before the steps are evaluated
            self._close()
        if ref is None or cand is None:
            return None
        ref, cand = self.structure.in_model_codes(ref), self.structure.in_model_codes(cand)
        self.structure.check(ref, cand)
        self._add_task(sample.id, ref, cand)
        try:
            return self._measure(sample, ref, cand)
        except EngineError as error:
            self.candidate.lose(sample.id, f"its values could not be weighed: {error}")
            return None

    def _close(self) -> None:
        for side in (self.reference, self.candidate):
            side.close()

    def _tell_lost(self) -> None:
        """Name the samples on which a side failed, and how many they are."""
        for role, side in (("reference", self.reference), ("candidate", self.candidate)):
            self.notes += [f"the {role} failed on {sample}: {why}" for sample, why in side.lost.items()]
            if side.lost:
                first, why = next(iter(side.lost.items()))
                side.broke = (
                    f"{len(side.lost)} of {len(self.request.samples)} samples failed, the first is {first}: {why}"
                )

    def _add_task(self, sample: str, ref: Recording, cand: Recording) -> None:
        """What the difference at the outputs means: of the untouched outputs, or of what was stored of them."""
        pairs: dict[str, tuple[Array, Array]] = {}
        steps: dict[str, float] = {}
        for name in self.graph.outputs:
            stored = self.graph.store(name)
            quantisation = None if stored is None else self.graph.quantisation.get(stored)
            a, b = _output(self.graph, ref, name, stored), _output(self.graph, cand, name, stored)
            if a is not None and b is not None and a.shape == b.shape:
                pairs[name] = a, b
                if quantisation is not None and quantisation.scale.size == 1:
                    steps[name] = float(quantisation.scale.ravel()[0])
        self.task.add(pairs, steps, sample)

    def _keep(self) -> None:
        """Move what was recorded to its place; a run that broke leaves it beside, to go on from."""
        for side in (self.reference, self.candidate):
            if side.writer is not None:
                side.writer.finish(side.side)
                if side.resumed:
                    self.notes.append(
                        f"{side.resumed} samples of {side.backend.spec} were recorded before and not run again"
                    )

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _measure(self, sample: Sample, ref: Recording, cand: Recording) -> Evidence:
        self.request.progress(f"{sample.id}: every step against its real value")
        ref_values = self._usable(ref, ())
        cand_values = self._usable(cand, (*self.structure.incomparable, *self.structure.parameters_differ))
        reference = self._weigh(self.reference, ref, ref_values, {}, own_model=True)
        reals = reference.results
        candidate = self._weigh(
            self.candidate,
            cand,
            cand_values,
            self.structure.parameters_differ,
            own_model=self.candidate.model is self.model,
        )
        local: dict[Kind, Mapping[str, StepTally]] = {"reference": reference.tallies, "candidate": candidate.tallies}
        bounds: dict[Kind, Mapping[str, float]] = {"reference": reference.bounds, "candidate": candidate.bounds}
        looks: dict[Kind, Mapping[str, Look]] = {
            "reference": self._looks(self.reference, reference.tallies, ref_values, ref_values, reals),
            "candidate": self._looks(self.candidate, candidate.tallies, cand_values, cand_values, candidate.results),
        }
        if self._wants_second_opinion():
            self._second_opinion(local, bounds, looks, ref_values, reals)
        return Evidence(
            sample.info,
            self._accumulated(ref, cand),
            local,
            bounds,
            untrustworthy={"reference": reference.untrustworthy, "candidate": candidate.untrustworthy},
            looks=looks,
        )

    def _usable(self, recording: Recording, without: Collection[str]) -> dict[str, Array]:
        stored = set(self.graph.stored)
        return {
            name: array
            for name, array in recording.values.items()
            if name in stored and name not in without and array.dtype.kind not in NOT_NUMBERS
        }

    def _weigh(
        self, side: _Side, recording: Recording, values: dict[str, Array], unusable: Collection[str], *, own_model: bool
    ) -> Weighed:
        """Measure one side against the real values of its steps; without the values that were dumped wrong."""
        weigher, rows, declared = self._weigher(side, values, unusable), self.plan.rows, side.backend.legal_excess()
        found = weigher.weigh(values, recording, rows, declared, own_model=own_model)
        doubted = weigher.doubted(found.tallies, declared)
        if not doubted:
            return found
        fewer = {name: array for name, array in values.items() if name not in doubted}
        without = Weigher(self.model, specs_of(fewer), self.referee, unusable)
        again = without.weigh(fewer, recording, rows, declared, own_model=False)
        return self._told(side, weigher.believed(found, doubted, again, declared), found, values)

    def _told(self, side: _Side, believed: Weighed, found: Weighed, values: Mapping[str, Array]) -> Weighed:
        """Say of each untrustworthy value what it looks like, where that is confirmed: a wrong scale, another layout."""
        wrong = {name: found.tallies[name] for name in believed.untrustworthy}
        looks = self._looks(side, wrong, values, values, found.results)
        words = {
            name: f"{why}; it looks like this: {looks[name].cause.evidence}"  # type: ignore[union-attr]  # asked just here
            if name in looks and looks[name].cause is not None
            else why
            for name, why in believed.untrustworthy.items()
        }
        return replace(believed, untrustworthy=words)

    def _weigher(self, side: _Side, values: Mapping[str, Array], unusable: Collection[str]) -> Weigher:
        specs = specs_of(values)
        if side is self.candidate and self.reference.weigher is not None and self.reference.weigher.specs == specs:
            return self.reference.weigher  # both sides delivered the same values: one session serves both
        if side.weigher is None or side.weigher.specs != specs:
            side.weigher = Weigher(self.model, specs, self.referee, unusable)
        return side.weigher

    def _looks(
        self,
        side: _Side,
        tallies: Mapping[str, StepTally],
        stored: Mapping[str, Array],
        values: Mapping[str, Array],
        results: Mapping[str, Array],
    ) -> dict[str, Look]:
        """What the error of each illegal step looks like, and where it lies; only the first few are looked at."""
        declared = side.backend.legal_excess()
        wrong = [n for n, t in tallies.items() if not t.merged and not legal(self.graph, n, t, declared)]
        if not wrong:
            return {}
        from equivcheck.causes import Causes  # late: only where something is wrong
        from equivcheck.where import where

        self.request.progress("what the error looks like")
        explainer = Causes(self.model, declared)
        found = {}
        for name in wrong[:_EXPLAINED]:
            codes, real = stored[name], real_in_codes(self.graph, name, results[name]).reshape(stored[name].shape)
            limits = np.iinfo(self.graph.quantisation[name].dtype)
            allowed = 0.5 + float(step_limit(self.graph, name, declared).limits(tallies[name].by_channel.size).max())
            lies = where(codes - np.clip(real, limits.min, limits.max), allowed)
            place = Place(kind=lies.kind, text=lies.sentence, share=lies.share)
            found[name] = Look(explainer.explain(name, codes, values, real), place)
        return found

    def _accumulated(self, ref: Recording, cand: Recording) -> dict[str, Tally]:
        found: dict[str, Tally] = {}
        structure = self.structure
        for name in self.plan.rows:
            a, b = ref.values.get(name), cand.values.get(name)
            if (
                a is None
                or b is None
                or a.shape != b.shape
                or name in structure.incomparable
                or name in structure.not_numbers
            ):
                continue
            own = self.graph.quantisation.get(name)
            other = cand.quantisation.get(name)
            grid = None if own is None else grid_of(own, a.ndim)
            differs = name in structure.parameters_differ and other is not None
            step = self.graph.step_of_value[name]
            given = self.request.tolerance.given(name, self.graph.nodes[step.main].op_type, str(a.dtype), "accumulated")
            close = closeness(self.request.tolerance, given, coded=is_coded(a.dtype))
            found[name] = tally(a, b, grid, grid_of(other, a.ndim) if differs and other is not None else None, close)
        return found

    # -- second opinions -----------------------------------------------------------------------------------------------

    def _wants_second_opinion(self) -> bool:
        asked = self.request.second_opinion
        return self.candidate.backend.second_opinion if asked is None else asked

    def _second_opinion(
        self,
        local: dict[Kind, Mapping[str, StepTally]],
        bounds: dict[Kind, Mapping[str, float]],
        looks: dict[Kind, Mapping[str, Look]],
        ref_values: Mapping[str, Array],
        reals: Mapping[str, Array],
    ) -> None:
        """Run the candidate on the isolated model: fed the reference's values, and once on random codes. Never acquits."""
        weigher = self.reference.weigher
        assert weigher is not None
        declared = self.candidate.backend.legal_excess()
        odd = {*self.structure.incomparable, *self.structure.parameters_differ}
        usable = {name: array for name, array in ref_values.items() if name not in odd}
        try:
            if self.second is None:
                self.request.progress("second opinion: the candidate on the isolated model")
                self.second = SecondOpinion(self.candidate.backend, self.candidate.model, usable)
            got = self.second.run(ref_values)
            rows = self._askable(weigher)
            local["fed"], bounds["fed"] = weigher.weigh_against(reals, got, ref_values, rows, declared)
            looks["fed"] = self._looks(self.candidate, local["fed"], got, ref_values, reals)
            if self.stressed is None:
                codes = random_codes(self.graph, ref_values)
                reals, got = weigher.steps.evaluate(codes), self.second.run(codes)
                self.stressed = weigher.weigh_against(reals, got, codes, rows, declared)
                local["stress"], bounds["stress"] = self.stressed
                looks["stress"] = self._looks(self.candidate, local["stress"], got, codes, reals)
        except EngineError as error:
            if self.second is None or not self.second.failed:
                self.notes.append(f"no second opinion: the candidate would not run the isolated model ({error})")
            if self.second is not None:
                self.second.failed = True

    def _askable(self, weigher: Weigher) -> list[str]:
        """The rows a second opinion is about: steps the candidate itself ran when deployed, with all their inputs known."""
        on_cpu = {placed.step for placed in self.candidate.side.placement if placed.where == "cpu"}
        return [
            name
            for name in self.plan.rows
            if self.graph.step_of_value[name].id not in on_cpu and not weigher.merged.get(name)
        ]

    # -- handing over --------------------------------------------------------------------------------------------------

    def _paired_notes(self) -> list[str]:
        """How the values of another file were paired; the first note stands beside the candidate itself."""
        return self.candidate.side.notes[1:] if self.paired else []

    def _case(self, evidence: Sequence[Evidence]) -> Case:
        request = self.request
        return Case(
            graph=self.graph,
            plan=self.plan,
            tolerance=request.tolerance,
            model=model_info(self.model),
            reference=_evidence(self.reference, unreadable=True),
            candidate=_evidence(self.candidate),
            evidence=evidence,
            structure=self.structure,
            notes=[*self.notes, *self._paired_notes()],
            again=request.again,
            versions=versions(),
            task=self.task.finish(),
        )


def _output(graph: Graph, recording: Recording, name: str, stored: str | None) -> Array | None:
    """A graph output in real values, as one side gave it; None where it has no numbers for it."""
    array = recording.outputs.get(name)
    if array is None and stored is not None:
        array = recording.values.get(stored)
    if not isinstance(array, np.ndarray) or array.dtype.kind in NOT_NUMBERS:
        return None
    quantisation = graph.quantisation.get(stored or name)
    if quantisation is None or array.dtype.kind not in "iu":
        return array
    scale, zero = quantisation.along(array.ndim)
    return np.asarray((array.astype(np.float64) - zero) * scale)


def _evidence(side: _Side, *, unreadable: bool = False) -> SideEvidence:
    """What a side delivered. `unreadable` names incomparable values among the failed: of the candidate, structure does."""
    last = side.last
    failed = {} if last is None else {**last.failed, **(last.incomparable if unreadable else {})}
    return SideEvidence(
        side=side.side,
        values=side.delivered,
        how={} if last is None else last.how,
        absent=side.absent,
        failed=failed,
        declared=side.backend.legal_excess(),
        broke=side.broke,
    )


def _paired(candidate: Backend, other: OnnxModel, own: OnnxModel) -> Backend | None:
    """The candidate that runs another tool's file, its values in the model's names; None where the names are the same."""
    from equivcheck.backends.paired import PairedBackend, is_foreign  # late: it brings TFLite along

    return PairedBackend(candidate, other, own) if is_foreign(own, other) else None


def _same_inputs(own: Graph, other: Graph) -> None:
    if set(own.inputs) != set(other.inputs):
        raise ModelError(
            f"the candidate model has inputs {', '.join(other.inputs)}, the model has {', '.join(own.inputs)}",
            hint="--candidate-model takes another file of the same network, with the same input names",
        )
