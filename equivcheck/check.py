"""Runs a comparison: opens both sides, records, evaluates every step's real value, measures, and hands over to `judge`.

It prints nothing and parses nothing. One sample at a time: what stays in memory are the figures, not the values.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equivcheck.backends.base import Backend, Session
from equivcheck.backends.registry import backend as find_backend
from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineError, Inconclusive, InputError, ModelError
from equivcheck.inputs import InputSpec, Sample, samples_from_python
from equivcheck.judge import KINDS, Case, Evidence, Kind, SideEvidence, judge
from equivcheck.metrics import StepTally, Tally, tally
from equivcheck.models.graph import Array, Graph, Quantisation
from equivcheck.models.onnx.isolate import spec_of
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.models.onnx.rewrite import TWINS
from equivcheck.models.select import select
from equivcheck.opinions import SecondOpinion, random_codes
from equivcheck.plan import Plan, Values, plan
from equivcheck.recording import Parameters, Recording, save
from equivcheck.referee import ExactReferee
from equivcheck.result import FeedInfo, Model, Observation, Result, SampleInfo, Side, ValueInfo
from equivcheck.tolerance import Tolerance, load_tolerance
from equivcheck.weigh import Weigher, grid_of

if TYPE_CHECKING:
    import os

Progress = Callable[[str], None]
_NOT_NUMBERS = "OUSMmc"  # dtype kinds that are recorded but not weighed: objects, text, times, complex
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
    progress: Progress | None = None,
    again: str | None = None,
) -> Result:
    """Run `model` on both backends with the same feeds and judge every step.

    `inputs`: None (seeded random), a file, an array (of the only input), a dict by input name, or a list of these.
    `split_at`: selectors (see `equivcheck.models.select`). `second_opinion`: None asks each backend whether it is cheap.
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


def input_specs(graph: Graph) -> list[InputSpec]:
    """What the model asks for, as the inputs package takes it."""
    specs = []
    for name in graph.inputs:
        value = graph.values.get(name)
        if value is None or value.dtype is None or value.shape is None:
            raise ModelError(
                f"input '{name}' has no type or shape in the model", asked=name, hint="declare it in the export"
            )
        specs.append(InputSpec(name, value.dtype, value.shape))
    return specs


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
    notes: Sequence[str] = ()
    again: str = ""
    progress: Progress = lambda text: None


def run(request: Request) -> Result:
    """Run a prepared comparison. Raises EquivcheckError; engine failures end in an inconclusive Result."""
    return _Run(request).result()


@dataclass(eq=False)
class _Open:
    """One side while it runs."""

    backend: Backend
    model: OnnxModel
    session: Session | None = None
    recordings: list[Recording] = field(default_factory=list)
    broke: str | None = None
    truth: Weigher | None = None
    last: Recording | None = None
    delivered: dict[str, ValueInfo] = field(default_factory=dict)


class _Run:
    def __init__(self, request: Request) -> None:
        self.request = request
        shapes = _input_shapes(request.samples)
        _no_nan_into_codes(request.model.graph, request.samples)
        self.model = request.model.with_input_shapes(shapes)
        self.graph = self.model.graph
        other = request.candidate_model
        candidate_model = self.model if other is None else other.with_input_shapes(shapes)
        _same_inputs(self.graph, candidate_model.graph)
        self.plan: Plan = plan(self.graph, select(self.graph, request.split_at, TWINS), request.values)
        if not self.plan.rows:
            raise ModelError("this model computes nothing: it has no step", hint="is it the right file?")
        self.reference = _Open(request.reference, self.model)
        self.candidate = _Open(request.candidate, candidate_model)
        self.incomparable: dict[str, str] = {}
        self.parameters_differ: dict[str, str] = {}
        self.not_numbers: dict[str, str] = {}
        self.notes: list[str] = list(request.notes)
        self.referee = ExactReferee(self.graph)
        self.second: SecondOpinion | None = None
        self.stressed: tuple[dict[str, StepTally], dict[str, float]] | None = None

    # -- the whole run -------------------------------------------------------------------------------------------------

    def result(self) -> Result:
        request = self.request
        evidence: list[Evidence] = []
        try:
            self._open(self.reference, "reference")
            self._open(self.candidate, "candidate")
            for number, sample in enumerate(request.samples, 1):
                if self.reference.broke or self.candidate.broke:
                    break
                request.progress(f"sample {number} of {len(request.samples)}: {sample.id}")
                found = self._sample(sample)
                if found is not None:
                    evidence.append(found)
        finally:
            for side in (self.reference, self.candidate):
                if side.session is not None:
                    side.session.close()
        if not evidence:
            evidence = [Evidence(sample_info(sample), {}, {}, {}) for sample in request.samples]
        case = self._case(evidence)
        if request.save_to is not None:
            self._save(case, request.save_to)
        return judge(case)

    def _open(self, side: _Open, role: str) -> None:
        self.request.progress(f"opening the {role}: {side.backend.spec}")
        try:
            side.session = side.backend.open(side.model)
        except EngineError as error:
            side.broke = str(error)

    def _sample(self, sample: Sample) -> Evidence | None:
        feeds = sample.arrays()
        for side in (self.reference, self.candidate):
            assert side.session is not None
            try:
                side.last = _tensors_only(side.session.run(sample.id, feeds))
            except EngineError as error:
                side.broke = str(error)
                return None
            if self.request.save_to is not None:
                side.recordings.append(side.last)
        assert self.reference.last is not None
        assert self.candidate.last is not None
        self._note_delivered(self.reference)
        self._note_delivered(self.candidate)
        ref, cand = self.reference.last, self._in_model_codes(self.candidate.last)
        self._check_structure(ref, cand)
        try:
            return self._measure(sample, ref, cand)
        except EngineError as error:
            self.candidate.broke = f"its values could not be weighed: {error}"
            return None

    def _note_delivered(self, side: _Open) -> None:
        assert side.last is not None
        for name, array in side.last.values.items():
            side.delivered.setdefault(name, _value_info(array, side.last.quantisation.get(name)))

    # -- structure -----------------------------------------------------------------------------------------------------

    def _in_model_codes(self, recording: Recording) -> Recording:
        """Bring codes of the other signedness (u8 for s8, zero point 128 higher) to the model's own; exact."""
        changed: dict[str, Array] = {}
        for name, array in recording.values.items():
            own, theirs = self.graph.quantisation.get(name), recording.quantisation.get(name)
            if own is None or theirs is None or theirs.zero_point.dtype == own.dtype or array.dtype.kind not in "iu":
                continue
            shift = np.unique(own.zero_point.astype(np.int64).ravel() - theirs.zero_point.astype(np.int64).ravel())
            if (
                own.dtype.itemsize == array.dtype.itemsize
                and shift.size == 1
                and abs(int(shift[0])) == 1 << (8 * array.dtype.itemsize - 1)
            ):
                changed[name] = (array.astype(np.int64) + shift[0]).astype(own.dtype)
        if not changed:
            return recording
        parameters = {n: _parameters(self.graph.quantisation[n]) for n in changed}
        return replace(
            recording, values={**recording.values, **changed}, quantisation={**recording.quantisation, **parameters}
        )

    def _check_structure(self, ref: Recording, cand: Recording) -> None:
        for name in self.plan.rows:
            a, b = ref.values.get(name), cand.values.get(name)
            if b is None:
                continue
            own, theirs = self.graph.quantisation.get(name), cand.quantisation.get(name)
            if a is not None and a.shape != b.shape:
                self.incomparable[name] = f"shape {list(b.shape)} against {list(a.shape)}"
            elif b.dtype.kind in _NOT_NUMBERS:
                self.not_numbers[name] = f"{b.dtype} values are not numbers"
            elif a is not None and a.dtype != b.dtype:
                self.incomparable[name] = f"dtype {b.dtype} against {a.dtype}"
            elif own is not None and theirs is not None and (text := _parameters_differ(own, theirs)):
                self.parameters_differ[name] = text

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _measure(self, sample: Sample, ref: Recording, cand: Recording) -> Evidence:
        local: dict[Kind, dict[str, StepTally]] = {kind: {} for kind in KINDS}
        bounds: dict[Kind, dict[str, float]] = {kind: {} for kind in KINDS}
        self.request.progress(f"{sample.id}: every step against its real value")
        ref_values = self._usable(ref, set())
        cand_values = self._usable(cand, {*self.incomparable, *self.parameters_differ})
        truth = self._truth(self.reference, ref_values, {})
        local["reference"], bounds["reference"] = truth.weigh(ref_values, ref, self.plan.rows, own_model=True)
        reals = truth.results
        truth = self._truth(self.candidate, cand_values, self.parameters_differ)
        local["candidate"], bounds["candidate"] = truth.weigh(
            cand_values, cand, self.plan.rows, own_model=self.candidate.model is self.model
        )
        if self._wants_second_opinion():
            self._second_opinion(local, bounds, ref_values, reals)
        return Evidence(sample_info(sample), self._accumulated(ref, cand), local, bounds)

    def _usable(self, recording: Recording, without: set[str]) -> dict[str, Array]:
        stored = set(self.graph.stored)
        return {
            name: array
            for name, array in recording.values.items()
            if name in stored and name not in without and array.dtype.kind not in _NOT_NUMBERS
        }

    def _truth(self, side: _Open, values: Mapping[str, Array], unusable: Mapping[str, str]) -> Weigher:
        specs = {name: spec_of(array) for name, array in values.items()}
        if side is self.candidate and self.reference.truth is not None and self.reference.truth.specs == specs:
            return self.reference.truth  # both sides delivered the same values: one session serves both
        if side.truth is None or side.truth.specs != specs:
            side.truth = Weigher(self.model, specs, self.referee, side.backend.legal_excess(), set(unusable))
        return side.truth

    def _accumulated(self, ref: Recording, cand: Recording) -> dict[str, Tally]:
        found: dict[str, Tally] = {}
        for name in self.plan.rows:
            a, b = ref.values.get(name), cand.values.get(name)
            if a is None or b is None or a.shape != b.shape or name in self.incomparable or name in self.not_numbers:
                continue
            own = self.graph.quantisation.get(name)
            other = cand.quantisation.get(name)
            grid = None if own is None else grid_of(own, a.ndim)
            differs = name in self.parameters_differ and other is not None
            step = self.graph.step_of_value[name]
            given = self.request.tolerance.given(name, self.graph.nodes[step.main].op_type, str(a.dtype), "accumulated")
            close = (given.get("atol", 0.0), given.get("rtol", 0.0)) if "atol" in given or "rtol" in given else None
            found[name] = tally(a, b, grid, grid_of(other, a.ndim) if differs and other is not None else None, close)
        return found

    # -- second opinions -----------------------------------------------------------------------------------------------

    def _wants_second_opinion(self) -> bool:
        asked = self.request.second_opinion
        return self.request.candidate.second_opinion if asked is None else asked

    def _second_opinion(
        self,
        local: dict[Kind, dict[str, StepTally]],
        bounds: dict[Kind, dict[str, float]],
        ref_values: Mapping[str, Array],
        reals: Mapping[str, Array],
    ) -> None:
        """Run the candidate on the isolated model: fed the reference's values, and once on random codes. Never acquits."""
        truth = self.reference.truth
        assert truth is not None
        usable = {n: a for n, a in ref_values.items() if n not in self.incomparable and n not in self.parameters_differ}
        try:
            if self.second is None:
                self.request.progress("second opinion: the candidate on the isolated model")
                self.second = SecondOpinion(self.candidate.backend, self.candidate.model, usable)
            got = self.second.run(ref_values)
            local["fed"], bounds["fed"] = truth.weigh_against(reals, got, ref_values, self.plan.rows)
            if self.stressed is None:
                codes = random_codes(self.graph, ref_values)
                stress_reals = truth.steps.evaluate(codes)
                self.stressed = truth.weigh_against(stress_reals, self.second.run(codes), codes, self.plan.rows)
                local["stress"], bounds["stress"] = self.stressed
        except EngineError as error:
            if self.second is None or not self.second.failed:
                self.notes.append(f"no second opinion: the candidate would not run the isolated model ({error})")
            if self.second is not None:
                self.second.failed = True

    # -- handing over --------------------------------------------------------------------------------------------------

    def _case(self, evidence: Sequence[Evidence]) -> Case:
        request = self.request
        return Case(
            graph=self.graph,
            plan=self.plan,
            tolerance=request.tolerance,
            model=model_info(self.model),
            reference=self._side(self.reference),
            candidate=self._side(self.candidate),
            evidence=evidence,
            incomparable=self.incomparable,
            parameters_differ=self.parameters_differ,
            not_numbers=self.not_numbers,
            notes=self.notes,
            again=request.again,
            versions=versions(),
        )

    def _side(self, open_: _Open) -> SideEvidence:
        last = open_.last
        side = open_.session.side if open_.session is not None else _unopened(open_)
        return SideEvidence(
            side=side,
            values=open_.delivered,
            how={} if last is None else last.how,
            absent={} if last is None else last.absent,
            failed={} if last is None else last.failed,
            declared=open_.backend.legal_excess(),
            broke=open_.broke,
        )

    def _save(self, case: Case, folder: Path) -> None:
        for name, side in (("reference", self.reference), ("candidate", self.candidate)):
            if side.recordings:
                samples = [e.sample for e in case.evidence][: len(side.recordings)]
                described = case.reference.side if name == "reference" else case.candidate.side
                save(
                    folder / name,
                    side.recordings,
                    model=case.model,
                    side=described,
                    samples=samples,
                    versions=case.versions,
                )


def _parameters(quantisation: Quantisation) -> Parameters:
    return Parameters(quantisation.scale, quantisation.zero_point, quantisation.axis)


def _parameters_differ(own: Quantisation, theirs: Parameters) -> str | None:
    """A sentence when scale, zero point or axis differ, else None."""
    if own.same_as(Quantisation(theirs.scale, theirs.zero_point, theirs.axis)):
        return None
    if own.scale.size != theirs.scale.size:
        return f"quantisation differs: {theirs.scale.size} scales against {own.scale.size}"
    if not np.array_equal(own.scale.ravel(), theirs.scale.ravel()):
        k = int(np.argmax(np.abs(own.scale.ravel() - theirs.scale.ravel())))
        return f"quantisation differs: scale {theirs.scale.ravel()[k]:.8g} against {own.scale.ravel()[k]:.8g}"
    if not np.array_equal(own.zero_point.ravel(), theirs.zero_point.ravel()):
        k = int(np.argmax(own.zero_point.ravel() != theirs.zero_point.ravel()))
        return f"quantisation differs: zero point {theirs.zero_point.ravel()[k]} against {own.zero_point.ravel()[k]}"
    return f"quantisation differs: {theirs.zero_point.dtype} axis {theirs.axis} against {own.dtype} axis {own.axis}"


def _value_info(array: Array, parameters: Parameters | None) -> ValueInfo:
    return ValueInfo(
        dtype=str(array.dtype),
        shape=list(array.shape),
        scale=None if parameters is None else [float(s) for s in parameters.scale.ravel()],
        zero_point=None if parameters is None else [int(z) for z in parameters.zero_point.ravel()],
        axis=None if parameters is None else parameters.axis,
    )


def _input_shapes(samples: Sequence[Sample]) -> dict[str, tuple[int, ...]]:
    """The shapes of the feeds; all samples must agree, because the model is fixed to them."""
    shapes = {name: array.shape for name, array in samples[0].arrays().items()}
    for sample in samples[1:]:
        for name, array in sample.arrays().items():
            if array.shape != shapes[name]:
                first = f"{list(shapes[name])} in {samples[0].id}"
                raise InputError(
                    f"samples differ in shape: '{name}' is {list(array.shape)} in {sample.id}, {first}",
                    hint="run them apart, or resize them alike (--preprocess)",
                )
    return shapes


def _no_nan_into_codes(graph: Graph, samples: Sequence[Sample]) -> None:
    """Refuse NaN in a feed that the model quantises: it has no code, and engines disagree on what to make of it."""
    for sample in samples:
        for name, array in sample.arrays().items():
            readers = graph.consumers.get(name, ())
            quantised = next((reader for reader in readers if reader.op_type == "QuantizeLinear"), None)
            count = int(np.count_nonzero(np.isnan(array))) if quantised is not None and array.dtype.kind == "f" else 0
            if count and quantised is not None:
                step = graph.step_of_node[quantised.index].id
                raise InputError(
                    f"input '{name}' of {sample.id} holds {count} NaN, and step #{step} QuantizeLinear has no code for NaN",
                    asked=name,
                    hint="clean the input, or look at what made it",
                )


def _tensors_only(recording: Recording) -> Recording:
    """Name sequences, maps and optionals among the absent: they are no tensors."""
    others = {
        n: f"a {type(v).__name__} is no tensor" for n, v in recording.values.items() if not isinstance(v, np.ndarray)
    }
    if not others:
        return recording
    kept = {name: array for name, array in recording.values.items() if name not in others}
    return replace(recording, values=kept, absent={**recording.absent, **others})


def _same_inputs(own: Graph, other: Graph) -> None:
    if set(own.inputs) != set(other.inputs):
        raise ModelError(
            f"the candidate model has inputs {', '.join(other.inputs)}, the model has {', '.join(own.inputs)}",
            hint="--candidate-model takes another file of the same network, with the same input names",
        )


def _unopened(side: _Open) -> Side:
    return Side(
        spec=str(side.backend.spec),
        engine=side.backend.name,
        version="?",
        device="?",
        model_sha256=side.model.sha256,
        observation=Observation(method="none"),
    )


def sample_info(sample: Sample) -> SampleInfo:
    feeds = [
        FeedInfo(
            name=feed.name,
            dtype=str(feed.array.dtype),
            shape=list(feed.array.shape),
            sha256=feed.sha256,
            source=feed.source,
            recipe=feed.recipe,
        )
        for feed in sample.feeds.values()
    ]
    return SampleInfo(id=sample.id, feeds=feeds)


def model_info(model: OnnxModel) -> Model:
    return Model(
        path=model.path,
        sha256=model.sha256,
        format=model.format,
        ir_version=model.proto.ir_version,
        opsets=model.opsets,
        nodes=len(model.proto.graph.node),
        scheme=scheme(model),
    )


def scheme(model: OnnxModel) -> str:
    """How the model is quantised, in a word: `int8 QDQ`, `uint8 QOperator`, `float`."""
    counts: dict[str, int] = {}
    for name in model.graph.stored:
        quantisation = model.graph.quantisation.get(name)
        if quantisation is not None:
            counts[str(quantisation.dtype)] = counts.get(str(quantisation.dtype), 0) + 1
    if not counts:
        return "not quantised"
    form = "QDQ" if model.qdq.proto is model.proto else "QOperator"
    return f"{max(counts, key=lambda d: counts[d])} {form}"


def versions() -> dict[str, str]:
    """Versions of what decided the figures."""
    import onnx

    from equivcheck import __version__

    return {
        "equivcheck": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": OrtEngine().info()["version"],
    }
