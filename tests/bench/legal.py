"""Legal variants: engines that are right, on every model. Whatever is blamed here is a false alarm.

Independent engines beside our own profiles: ONNX Runtime at each level and with its native s8 kernels, LiteRT's reference,
builtin and XNNPACK kernels on the .tflite twin, and onnx's own reference evaluator, on which no limit was set.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util

import numpy as np
import onnx

from bench import peers
from bench.litert import KERNELS, RUNTIME, LitertBackend
from bench.runs import Prepared, Run, Source
from equivcheck.backends.base import Backend, Runner, Session
from equivcheck.backends.ort import parameters
from equivcheck.backends.registry import backend
from equivcheck.backends.spec import Spec
from equivcheck.errors import EngineRefused
from equivcheck.models.graph import Array
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Recording
from equivcheck.result import Observation, Side
from oracle import Oracle

IN_PROCESS = ("ort:optimization=disable", "ort:optimization=extended", "ort:int8=native")
OWN = ("vnpu:profile=exact", "vnpu:profile=ort", "vnpu:profile=tflite-reference")
LARGEST_FOR_NUMPY = 3e6  # stored elements: onnx's evaluator takes a minute on a MobileNetV2 of 224
# What the limits of legal_excess.toml were set on (its own header); everything else was held out.
SET_ON = ("ort:optimization=disable", "ort:optimization=extended", "ort:int8=native", "litert:reference",
          "litert:builtin", "litert:xnnpack")  # fmt: skip
HELD_OUT = ("onnx-reference", "litert:runtime-2.14")


@dataclass(frozen=True)
class LegalStep:
    """What a correct engine's step adds beyond rounding: by the oracle on its own inputs, by the product under stress."""

    step: int
    op_type: str
    row: str
    flat: float
    twice_off: float
    margin: float
    stress: float

    @property
    def e(self) -> float:
        """The limit it was held to, the part for double rounding aside."""
        return self.twice_off - self.margin

    @property
    def used(self) -> float:
        """Share of that limit; 0 where nothing is allowed and nothing was added."""
        return max(self.twice_off, 0.0) / self.e if self.e > 0 else float(self.twice_off > 0)


@dataclass(frozen=True)
class Legal:
    """One legal variant on one model and picture."""

    engine: str
    model: str
    verdict: str
    reason: str
    culprits: tuple[str, ...]
    reference_culprits: tuple[str, ...]
    judged: int
    steps: tuple[LegalStep, ...]
    peers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def legal(source: Source, *, engines: tuple[str, ...], with_peers: bool, samples: int = 1) -> list[Legal]:
    """Run every engine that can run this model."""
    prepared = Prepared(source)
    found = []
    for name in engines:
        candidate = engine(name, source, prepared)
        if candidate is None:
            continue
        found += [_one(name, prepared, candidate, k, with_peers) for k in range(min(samples, len(prepared.samples)))]
    return found


def names() -> tuple[str, ...]:
    return (*IN_PROCESS, *OWN, *(f"litert:{k}" for k in KERNELS if RUNTIME or k != "runtime-2.14"), "onnx-reference")


def engine(name: str, source: Source, prepared: Prepared) -> Backend | None:
    """The legal engine of that name, where it can run this model; else None."""
    if name.startswith("litert:"):
        there = source.twin is not None and util.find_spec("ai_edge_litert") is not None
        return LitertBackend(name.partition(":")[2], source.twin) if there and source.twin is not None else None
    if name == "onnx-reference":
        return OnnxReference() if _stored_elements(prepared) <= LARGEST_FOR_NUMPY and "qop" not in source.name else None
    return prepared.npu(name.partition("=")[2]) if name in OWN else backend(name)


def _stored_elements(prepared: Prepared) -> int:
    recording = prepared.reference.open(prepared.model).run(prepared.samples[0].id, prepared.samples[0].arrays())
    return sum(array.size for array in recording.values.values())


def _one(name: str, prepared: Prepared, candidate: Backend, sample: int, with_peers: bool) -> Legal:
    started = time.perf_counter()
    run = prepared.run(candidate, sample)
    seconds = time.perf_counter() - started
    result = run.result
    graph = prepared.model.graph
    failing = {}
    if with_peers:
        failing = peers.first_failing(
            prepared.reference_floats(run.reference), prepared.floats(run.candidate), run.case.plan.rows
        )
    return Legal(
        engine=name,
        model=prepared.source.name,
        verdict=result.verdict,
        reason=result.reason,
        culprits=tuple(f"#{c.step} {c.op_type}: {c.reason}" for c in result.culprits),
        reference_culprits=tuple(f"#{c.step} {c.op_type}: {c.reason}" for c in result.reference_culprits),
        judged=result.coverage.judged,
        steps=tuple(_steps(prepared, run)),
        peers={kind: graph.step_of_value[name].id if name else 0 for kind, name in failing.items()},
        seconds=seconds,
    )


def _steps(prepared: Prepared, run: Run) -> list[LegalStep]:
    found = []
    values = run.candidate.values
    declared = {op: limit for op, (limit, _) in run.case.candidate.declared.items()}
    for row in run.result.tensors:
        name = row.name
        if name not in values or values[name].dtype.kind not in "iu" or row.local.candidate is None or not row.step:
            continue
        if row.local.candidate.merged or name not in prepared.model.graph.quantisation:
            continue
        reading = prepared.oracle.read(name, values, declared)
        step = prepared.model.graph.steps[row.step - 1]
        widest = prepared.oracle.row(name, values)
        stress = row.local.stress.excess if row.local.stress is not None else 0.0
        found.append(
            LegalStep(step.id, step.op_type, widest, reading.flat, reading.beyond_twice, reading.margin, stress)
        )
    return found


class OnnxReference(Backend):
    """onnx's ReferenceEvaluator, node by node in float32, Q and DQ from their definitions (tests/oracle.py)."""

    name = "onnx-reference"
    summary = "onnx's reference evaluator, in the bench"
    second_opinion = False

    def __init__(self) -> None:
        super().__init__(Spec("onnx-reference"))

    def open(self, model: OnnxModel) -> Session:
        return _OnnxReferenceSession(model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        raise EngineRefused("too slow for a second opinion")


class _OnnxReferenceSession(Session):
    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.oracle = Oracle(model.proto)

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        graph = self.model.graph
        values = {name: np.asarray(array) for name, array in feeds.items()}
        for step in graph.steps:
            values.update({name: self.oracle.evaluate(name, values) for name in step.outputs})
        kept = {name: values[name] for name in graph.stored}
        return Recording(
            sample, kept, dict.fromkeys(kept, "evaluated"), {}, quantisation=parameters(graph), disturbed=None
        )

    @property
    def side(self) -> Side:
        return Side(
            spec="onnx-reference",
            engine="onnx",
            version=onnx.__version__,
            device=f"python {sys.version_info.major}.{sys.version_info.minor}",
            model_sha256=self.model.sha256,
            observation=Observation(method="evaluated"),
        )
