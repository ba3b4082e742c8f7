"""The virtual NPU as a backend: integer arithmetic of a real engine, the operator list of a real NPU, no board."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx

from equivcheck.backends.base import Backend, Option, Runner, Session
from equivcheck.backends.ort import QLINEAR_SOFTMAX, parameters
from equivcheck.backends.spec import Spec
from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineError, EngineRefused, EquivcheckError, SpecError, UnknownOption
from equivcheck.models.graph import Array, Graph, Step
from equivcheck.models.onnx.isolate import spec_of, step_model
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Recording
from equivcheck.result import Crossing, Observation, Placement, Side
from equivcheck.vnpu.faults import KINDS, Fault
from equivcheck.vnpu.profiles import load_profile, profile_names
from equivcheck.vnpu.program import Program, compile_program
from equivcheck.vnpu.targets import load_target, target_names

# One thread: a model that falls back step by step has thousands of sessions, each with a thread pool of its own otherwise
# (3000 of them brought the machine to a load of 1500).
_ONE_STEP = {"optimization": "disable", "threads": 1}
# MultiplyByQuantizedMultiplier(int64_t, ...) of TFLite's common.h keeps 16 bits of the multiplier: a relative error of 2^-16
# of a code that may be 32768.
TFLITE_16X8 = (0.65, "TFLite's 16x8 kernels keep 16 bits of the multiplier, up to 1/2 LSB at the ends of the range")
_SIXTEEN_BY_EIGHT = ("Conv@16", "ConvTranspose@16", "Gemm@16", "MatMul@16")
NOT_YOUR_BOARD = "A SOFTWARE NPU, NOT YOUR BOARD (see: equivcheck backends)"


class VnpuBackend(Backend):
    """The embedded default candidate."""

    name = "vnpu"
    summary = "a software NPU, in this process: a real engine's integer arithmetic, a real NPU's operator list; not your board"
    options = {  # noqa: RUF012  # a constant
        "profile": Option("whose arithmetic", profile_names(), "tflite-reference"),
        "target": Option("which operators run on the NPU; the rest runs on the CPU", target_names(), "warboy"),
        "fault": Option("a mistake planted in one step, to see whether it is found", tuple(KINDS)),
        "at": Option("the step of the fault: #N, or a value it stores; without it a seeded choice"),
        "seed": Option("seed of what the fault picks (a channel, a side, a step)", kind=int),
    }

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.profile = load_profile(self.chosen["profile"])
        self.target = load_target(self.chosen["target"])
        self.fault = self._fault()
        self._planted_at: str | None = None

    def _check_value(self, key: str, option: Option, value: str) -> None:
        """Profiles and targets may be files of the user's own; load_profile and load_target read them."""
        if key not in ("profile", "target") or not value.endswith(".toml"):
            super()._check_value(key, option, value)

    def _fault(self) -> Fault | None:
        if "fault" not in self.chosen:
            stray = next((key for key in ("at", "seed") if key in self.chosen), None)
            if stray is not None:
                raise SpecError(f"{self.spec}: {stray}= says nothing without fault=", hint=f"kinds: {', '.join(KINDS)}")
            return None
        return Fault(self.chosen["fault"], self.chosen.get("at", ""), int(self.chosen.get("seed", "0")))

    def open(self, model: OnnxModel) -> Session:
        return _VnpuSession(self, model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        model = OnnxModel("isolated", "", proto)
        program = self.with_fault_of_isolated(self.compile(model))

        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            values = _computed(program, feeds)
            return {name: dequantised(model.graph, name, values) for name in model.graph.outputs}

        return run

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        """What the reproduced engines declare: QLinearSoftmax of `ort`, the 16x8 kernels of `tflite-reference`."""
        if self.profile.name == "ort":
            return {"Softmax": QLINEAR_SOFTMAX}
        return dict.fromkeys(_SIXTEEN_BY_EIGHT, TFLITE_16X8) if self.profile.name == "tflite-reference" else {}

    def compile(self, model: OnnxModel, fault: Fault | None = None) -> Program:
        """Compile `model` for this profile and target; steps that do not run on the NPU fall back to ONNX Runtime.

        Raises UnknownOption where `fault` cannot be planted in it.
        """
        return compile_program(
            model.graph, profile=self.profile, target=self.target, fallback=CpuFallback(model), fault=fault
        )

    def planted(self, program: Program) -> None:
        """Remember which value the faulty step stores: the isolated model has the fault there too."""
        if program.planted is not None:
            self._planted_at = program.planted.step.outputs[0]

    def with_fault_of_isolated(self, isolated: Program) -> Program:
        """The same fault at the step that stores the same value; `isolated` as it is where that is not on the NPU there.

        Leaving it out is safe: a second opinion only accuses. Codes that are merely moved, for one, have no scale of
        their own in an isolated model, and run on the CPU there.
        """
        if self.fault is None or self._planted_at not in isolated.graph.step_of_value:
            return isolated
        try:
            return isolated.with_fault(replace(self.fault, at=self._planted_at or ""))
        except UnknownOption:
            return isolated

    @classmethod
    def proofs(cls) -> list[str]:
        """One line for each (profile, operator): proved against what, or why not."""
        return [
            f"{name}: {proof.operator}: {'proved' if proof.proved else 'NOT PROVED'}: {proof.note}"
            for name in profile_names()
            for proof in load_profile(name).proofs.values()
        ]


def _computed(program: Program, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a program; what its kernels raise on feeds of another network becomes EngineRefused."""
    try:
        return program.run(feeds)
    except (EngineError, EquivcheckError):
        raise
    except Exception as error:  # numpy and onnxruntime raise their own
        words = " ".join(str(error).split())[:400]
        raise EngineRefused("the virtual NPU cannot compute this", last_words=words) from error


class CpuFallback:
    """Runs one step in float on the CPU: ONNX Runtime, unoptimised, on that step alone. Sessions are made when needed."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self._engines: dict[tuple[int, tuple[tuple[int, ...], ...]], OrtEngine] = {}

    def __call__(self, step: Step, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the stored values that `step` makes from the stored values `inputs`. Raises EngineRefused."""
        key = (step.id, tuple(array.shape for array in inputs.values()))
        try:
            if key not in self._engines:
                alone = step_model(self.model, step, {name: spec_of(array) for name, array in inputs.items()})
                engine = OrtEngine()
                engine.load(alone.SerializeToString(), _ONE_STEP)
                self._engines[key] = engine
            return self._engines[key].run(inputs)
        except Exception as error:  # onnxruntime raises its own classes, RuntimeError and ValueError
            words = " ".join(str(error).split())[:400]
            raise EngineRefused(f"step #{step.id} {step.op_type} on the CPU", last_words=words) from error


def dequantised(graph: Graph, name: str, values: Mapping[str, Array]) -> Array:
    """The value of graph output `name`: stored as it is, or (code - zero point) * scale in float32 as DQ defines it."""
    stored = graph.alias_of.get(name, name)
    array = values[stored]
    if stored == name:
        return array
    quantisation = graph.parameters(graph.producer[name])
    assert quantisation is not None
    _, zero = quantisation.along(array.ndim)
    shape = [1] * array.ndim
    if quantisation.per_channel:
        shape[quantisation.axis or 0] = -1
    scale = quantisation.scale.reshape(shape if quantisation.per_channel else ())
    return np.asarray((array.astype(np.int32) - zero.astype(np.int32)).astype(scale.dtype) * scale)


class _VnpuSession(Session):
    def __init__(self, backend: VnpuBackend, model: OnnxModel) -> None:
        started = time.perf_counter()
        self.backend = backend
        self.model = model
        self.program = backend.compile(model, backend.fault)
        backend.planted(self.program)
        self.timings = {"load": time.perf_counter() - started}
        self.shapes: dict[str, int] = {}

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        started = time.perf_counter()
        values = _computed(self.program, feeds)
        self.timings["run"] = time.perf_counter() - started
        self.shapes = {name: array.nbytes for name, array in values.items()}
        graph = self.model.graph
        return Recording(
            sample=sample,
            values=values,
            how={name: "fed" if name in feeds else "stored by the program" for name in values},
            outputs={name: dequantised(graph, name, values) for name in graph.outputs},
            quantisation=parameters(graph),
            disturbed=None,
        )

    @property
    def side(self) -> Side:
        profile, target = self.backend.profile, self.backend.target
        return Side(
            spec=str(self.backend.spec),
            engine=self.backend.name,
            version=profile.name,
            device=f"target {target.name}",
            model_sha256=self.model.sha256,
            observation=Observation(method="native", disturbed=None),
            placement=self._placement(),
            crossings=[
                Crossing(
                    value=c.value,
                    bytes=c.bytes or self.shapes.get(c.value, 0),
                    direction="npu->cpu" if c.direction == "npu->cpu" else "cpu->npu",
                )
                for c in self.program.crossings
                if not c.model_edge  # what any engine is fed and asked for
            ],
            notes=[*([planted.text] if (planted := self.program.planted) is not None else []), NOT_YOUR_BOARD],
            timings_s={key: round(value, 6) for key, value in self.timings.items()},
        )

    def _placement(self) -> list[Placement]:
        graph = self.model.graph
        found = []
        for placed in self.program.placement:
            step = graph.steps[placed.step - 1]
            node = graph.main_node(step)
            found.append(
                Placement(
                    node=node.label,
                    op_type=node.op_type,
                    where="npu" if placed.where == "npu" else "cpu",
                    step=step.id,
                    partition=placed.partition if placed.where == "npu" else None,
                    reason=placed.reason or None,
                )
            )
        return found
