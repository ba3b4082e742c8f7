"""One model of the yardstick, ready for many runs: feeds, reference and honest kernels are made once and shared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from bench.oracle import StepOracle
from equivcheck import check, recorder
from equivcheck.backends.base import Backend, Runner, Session
from equivcheck.backends.ort import OrtBackend
from equivcheck.backends.spec import Spec, parse
from equivcheck.backends.vnpu import VnpuBackend, dequantised
from equivcheck.inputs import samples_from_python
from equivcheck.judge import KINDS, Case, step_limit
from equivcheck.models.graph import Array
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.recording import Recording
from equivcheck.result import Result, Side
from equivcheck.vnpu.faults import Fault
from equivcheck.vnpu.program import Program
from real_models import REAL_MODELS, shared_folder

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@dataclass(frozen=True)
class Source:
    """A model file, pictures and recipe; `twin` is its .tflite, where it has one."""

    name: str
    path: Path
    pictures: tuple[Path, ...]
    recipe: str

    @property
    def twin(self) -> Path | None:
        found = self.path.with_name(self.path.name.replace("_qdq.onnx", ".tflite"))
        return found if found.suffix == ".tflite" and found.exists() else None


def sources() -> list[Source]:
    """Fixtures and, where the shared folder is there, the real models."""
    found = [
        Source(f"detector_{form}", FIXTURES / f"detector_{form}.onnx",
               tuple(FIXTURES / "photos" / f"{p}.png" for p in ("china", "flower")), str(FIXTURES / "detector.toml"))
        for form in ("qdq_s8", "qdq_u8", "qop_u8")
    ] + [
        Source(f"digits_{form}", FIXTURES / f"digits_{form}.onnx",
               tuple(sorted((FIXTURES / "digits").glob("*.png")))[:2], str(FIXTURES / "digits.toml"))
        for form in ("qdq_s8", "qdq_u8", "qop_u8")
    ]  # fmt: skip
    shared = shared_folder()
    if shared is not None:
        found += [
            Source(m.name.removesuffix("_qdq"), shared / "models" / m.file,
                   tuple(shared / "models" / "images" / p for p in m.pictures), m.recipe)
            for m in REAL_MODELS
        ]  # fmt: skip
    return found


@dataclass(eq=False)
class _Kept:
    """A session whose recordings are made once a sample."""

    session: Session
    recordings: dict[str, Recording] = field(default_factory=dict)


class Replayed(OrtBackend):
    """ONNX Runtime as the product drives it, each sample run once: a fault of the candidate does not change it."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._kept: _Kept | None = None

    def open(self, model: OnnxModel) -> Session:
        if self._kept is None:
            self._kept = _Kept(super().open(model))
        return _ReplayedSession(self._kept)


class _ReplayedSession(Session):
    def __init__(self, kept: _Kept) -> None:
        self.kept = kept

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        if sample not in self.kept.recordings:
            self.kept.recordings[sample] = self.kept.session.run(sample, feeds)
        return self.kept.recordings[sample]

    @property
    def side(self) -> Side:
        return self.kept.session.side


class SharedKernels(VnpuBackend):
    """The virtual NPU; programs of one model and of its isolated form are compiled once, faults planted in copies."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.honest: dict[object, Program] = {}
        self.isolated: dict[bytes, OnnxModel] = {}

    def compile(self, model: OnnxModel, fault: Fault | None = None) -> Program:
        key = id(model)
        if key not in self.honest:
            self.honest[key] = super().compile(model)
        return self.honest[key] if fault is None else self.honest[key].with_fault(fault)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        key = hashlib.sha1(proto.SerializeToString(deterministic=True)).digest()
        model = self.isolated.setdefault(key, OnnxModel("isolated", "", proto))
        program = self.with_fault_of_isolated(self.compile(model))

        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            values = program.run(feeds)
            return {name: dequantised(model.graph, name, values) for name in model.graph.outputs}

        return run


@dataclass(frozen=True, eq=False)
class Run:
    """A finished comparison: the product's result, its evidence, and what both sides stored."""

    result: Result
    case: Case
    reference: Recording
    candidate: Recording


class Prepared:
    """A model opened for the bench."""

    def __init__(self, source: Source) -> None:
        self.source = source
        model = load_model(source.path)
        pictures = [str(p) for p in source.pictures]
        self.samples = samples_from_python(pictures, recorder.input_specs(model.graph), recipe=source.recipe).samples
        shapes = {name: array.shape for name, array in self.samples[0].arrays().items()}
        self.model = model.with_input_shapes(shapes)
        self.oracle = StepOracle(self.model.proto)
        self.reference = Replayed(parse("ort"))
        self._npus: dict[str, SharedKernels] = {}
        self._floats: dict[int, dict[str, Array]] = {}

    def npu(self, profile: str) -> SharedKernels:
        if profile not in self._npus:
            self._npus.clear()  # compiled programs of one profile at a time: 0.4 GiB each on a MobileNetV2 of 224
            self._npus[profile] = SharedKernels(parse(f"vnpu:profile={profile},target=all"))
        return self._npus[profile]

    def run(self, candidate: Backend, sample: int = 0, second_opinion: bool | None = None) -> Run:
        """The product's own comparison on one sample, with its evidence kept."""
        watched = _Watched(candidate)
        cases: list[Case] = []
        judge = check.judge

        def judged(case: Case) -> Result:
            cases.append(case)
            return judge(case)

        check.judge = judged
        try:
            result = check.run(
                check.Request(
                    model=self.model,
                    samples=[self.samples[sample]],
                    split_at=[],
                    reference=self.reference,
                    candidate=watched,
                    second_opinion=candidate.second_opinion if second_opinion is None else second_opinion,
                )
            )
        finally:
            check.judge = judge
        assert watched.last is not None, result.reason
        assert self.reference._kept is not None
        recorded = self.reference._kept.recordings[self.samples[sample].id]
        return Run(result, cases[-1], recorded, watched.last)

    def floats(self, recording: Recording) -> dict[str, Array]:
        """Stored values as reals (float32), as a tool that knows no codes is handed them."""
        return {
            name: self.real(name, array)
            for name, array in recording.values.items()
            if name in self.model.graph.step_of_value
        }

    def reference_floats(self, recording: Recording) -> dict[str, Array]:
        if id(recording) not in self._floats:
            self._floats[id(recording)] = self.floats(recording)
        return self._floats[id(recording)]

    def real(self, name: str, array: Array) -> Array:
        quantisation = self.model.graph.quantisation.get(name)
        if quantisation is None or array.dtype.kind not in "iu":
            return array
        scale, zero = quantisation.along(array.ndim)
        return ((array.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)).astype(np.float32)


class _Watched(Backend):
    """Passes everything on and keeps the last recording."""

    name = "watched"
    summary = ""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.spec = inner.spec
        self.second_opinion = inner.second_opinion  # type: ignore[misc]  # set on purpose
        self.last: Recording | None = None

    def open(self, model: OnnxModel) -> Session:
        session = self.inner.open(model)
        run = session.run

        def watch(sample: str, feeds: Mapping[str, Array]) -> Recording:
            self.last = run(sample, feeds)
            return self.last

        session.run = watch  # type: ignore[method-assign]  # watched on purpose
        return session

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        return self.inner.deploy(proto)

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        return self.inner.legal_excess()


def illegal(case: Case, kind: str, name: str) -> bool:
    """Does one kind of evidence (candidate: the photo; fed; stress) convict the step of `name`, by the product's limits?"""
    assert kind in KINDS
    tallies = [e.local[kind][name] for e in case.evidence if name in e.local.get(kind, {})]
    if not tallies or tallies[0].half == 0.0:
        return False
    limit = step_limit(case.graph, name, case.candidate.declared)
    return any(bool(np.any(t.by_channel - t.half > limit.limits(t.by_channel.size) + t.envelope)) for t in tallies)
