"""TensorFlow Lite as a backend: the reference kernels, the built-in ones, XNNPACK, or a delegate, in a process of its own.

A .tflite file is run as it is, an ONNX model through its twin, and both are cut in the flatbuffer itself. What is inside is
seen in one of three ways, the first that leaves the final outputs and the placement as an untouched run has them:

* `preserve`: the interpreter keeps all tensors (LiteRT; tflite-runtime 2.14 hands back overwritten inputs of ADD and MUL);
* `outputs`: one copy of the file in which every tensor is an output; the whole run of a model costs no more than twice;
* `head`: one truncated model a value, for a delegate that compiles what it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

from equivcheck.backends.base import Backend, Option, Runner, Session
from equivcheck.backends.ort import parameters
from equivcheck.backends.remote import DEFAULT_LIMIT, EngineFailed, Place, RemoteEngine, Travelling
from equivcheck.backends.spec import Spec
from equivcheck.backends.tflite_file import CutFile, File, cut_from, file_of, nodes_by_output
from equivcheck.backends.vnpu import TFLITE_16X8
from equivcheck.errors import EngineCrashed, EngineError, EngineRefused, EngineTimeout, SpecError, UnknownOption, near
from equivcheck.models.graph import Array
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.models.tflite import cut
from equivcheck.models.tflite.load import Flatbuffer
from equivcheck.recording import Recording
from equivcheck.result import Crossing, Observation, Placement, Side
from equivcheck.tolerance import legal_table

T = TypeVar("T")
_PREFIX = "delegate."
_GIVE_UP = 2  # values in a row on which the engine died or hung: every further one would take as long
_OVERWRITES = ("tflite-runtime",)  # with preserve-all, 2.14 hands back overwritten inputs of ADD and MUL: measured
_SIXTEEN_BY_EIGHT = ("Conv@16", "ConvTranspose@16", "Gemm@16", "MatMul@16")
MEAN = (0.65, "LiteRT's built-in MEAN rounds its multiplier and its sum: 0.59 LSB measured")
# Codes into codes of another scale, r = s_in / s_out (tests/bench/requantise.py: every code of XNNPACK is that of its formula).
# TFLite: r = m * 2^-k, 1/2 <= m < 1; (q - z_in) * m is rounded before it is shifted, which costs up to 2^-(k+1) for k >= 1.
TWICE = (
    0.2501,
    "TFLite's requantising rounds before its shift and behind it: 1/4 LSB at worst, for s_in / s_out below 1/2",
)
# XNNPACK: floor((q - z_in) * rint(256 r) / 256 + 1/2) + z_out, so up to |q - z_in| * |rint(256 r) / 256 - r| <= 255 / 512.
# Its LEAKY_RELU does the same with one multiplier for each slope.
EIGHT_BITS = (0.4981, "XNNPACK requantises by s_in / s_out with 8 bits behind the point: 255/512 LSB at worst")


class TfliteBackend(Backend):
    """TFLite through ai-edge-litert, tflite-runtime or tensorflow, whichever the interpreter has."""

    name = "tflite"
    summary = "TensorFlow Lite: reference, built-in or XNNPACK kernels, or a delegate; here or elsewhere"
    travels = True
    options = {  # noqa: RUF012  # a constant
        "kernels": Option(
            "xnnpack: what a plain interpreter takes (default); with a delegate, for what that leaves: builtin",
            ("reference", "builtin", "xnnpack"),
        ),
        "delegate": Option("path or name of a delegate's shared object; delegate.KEY=VALUE are its options"),
        "observe": Option(
            "preserve: tensors kept by the interpreter; outputs: all tensors as outputs; head: one truncated model a value",
            ("auto", "preserve", "outputs", "head"),
            "auto",
        ),
        "threads": Option("threads of the kernels", None, "1", int),
    }

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._place = Place.of(spec)
        self.delegate = self._delegate()
        self._opened: list[tuple[OnnxModel, File]] = []

    def _checked(self, spec: Spec) -> dict[str, str]:
        """As for every backend, but for delegate.KEY=VALUE: which keys there are, only the delegate knows."""
        passed = {key: value for key, value in spec.options.items() if key.startswith(_PREFIX)}
        others = {key: value for key, value in spec.options.items() if key not in passed}
        if passed and "delegate" not in others:
            key = next(iter(passed))
            raise SpecError(f"{key}= without a delegate", asked=key, hint="name it: delegate=PATH")
        return {**super()._checked(replace(spec, options=others)), **passed}

    def _delegate(self) -> str | None:
        """What to load. A path on this machine must be there; a bare name is the loader's to find."""
        given = self.chosen.get("delegate")
        if given is None or self.spec.ssh is not None:
            return given
        path = Path(given).expanduser()
        if path.exists():
            return str(path.absolute())
        if "/" in given or given == "":
            beside = [other.name for other in path.parent.glob("*.so*")] if path.parent.is_dir() else []
            raise UnknownOption(f"there is no delegate at {given}", asked=given, nearest=near(path.name, beside))
        return given

    @classmethod
    def unavailable(cls) -> str | None:
        from importlib.util import find_spec

        if any(find_spec(name) for name in ("ai_edge_litert", "tflite_runtime", "tensorflow")):
            return None
        return "none of ai-edge-litert, tflite-runtime and tensorflow is installed: pip install 'equivcheck[tflite]'"

    def engine(self) -> RemoteEngine:
        """A new worker where the SPEC wants it; also for this interpreter: native kernels and delegates may crash."""
        limit = float(self.chosen.get("timeout", DEFAULT_LIMIT))
        return RemoteEngine(self._place, Travelling("tflite.py", "TfliteEngine", needs="ai-edge-litert"), limit)

    @property
    def kernels(self) -> str:
        return self.chosen.get("kernels") or ("builtin" if self.delegate else "xnnpack")

    @property
    def delegates(self) -> bool:
        """Whether operators may run elsewhere than in TFLite's own kernels."""
        return self.delegate is not None or self.kernels == "xnnpack"

    def engine_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"kernels": self.kernels, "threads": int(self.chosen["threads"])}
        if self.delegate is not None:
            passed = {k.removeprefix(_PREFIX): v for k, v in self.chosen.items() if k.startswith(_PREFIX)}
            options |= {"delegate": self.delegate, "delegate_options": passed}
        return options

    def open(self, model: OnnxModel) -> Session:
        file = file_of(model)
        self._opened.append((model, file))
        return _TfliteSession(self, model, file)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        """Run what was cut from a model opened before as the same cut of its file; anything else as its own twin."""
        runs: File | CutFile | None = None
        for model, file in self._opened:
            own = nodes_by_output(model)
            if cut_from(proto, model, own):
                runs = CutFile(file, own, proto)
        runs = runs or file_of(OnnxModel("this model", "", proto))
        part = runs.part if isinstance(runs, CutFile) else cut.whole(runs.source)
        engine = self.engine()
        loaded(engine, part, self.engine_options())
        return lambda feeds: runs.outputs(translated(lambda: engine.run(runs.fed(feeds))))

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        """The 16x8 kernels; requantising; the built-in MEAN, to which XNNPACK leaves what it does not take.

        QUANTIZE stands in a twin in front of whatever has one scale on both sides in TFLite: CONCATENATION, moved codes. Where
        nothing is requantised these limits excuse nothing: a wrong code is then 1/2 LSB beyond rounding or more.
        """
        requantising = [op for op, row in legal_table().items() if row.kind in ("movement", "requantise")]
        limits = {**dict.fromkeys(_SIXTEEN_BY_EIGHT, TFLITE_16X8), **dict.fromkeys(requantising, TWICE)}
        if self.kernels == "reference":
            return limits
        limits |= {"GlobalAveragePool": MEAN, "ReduceMean": MEAN}
        if self.kernels == "xnnpack":
            limits |= {f"{op}@8": EIGHT_BITS for op in (*requantising, "LeakyRelu")}
        return limits


def translated(call: Callable[[], T]) -> T:
    """Let what the engine raised be an EngineRefused."""
    try:
        return call()
    except EngineFailed as error:
        words = " ".join(str(error).split())
        raise EngineRefused("TFLite refused the model", last_words=words[:600]) from error


def loaded(engine: RemoteEngine, part: cut.Part, options: Mapping[str, Any]) -> _Plan:
    """Load a part of a file; what was put where."""
    ports = {"inputs": dict(part.inputs), "outputs": dict(part.outputs)}
    got = translated(lambda: engine.load(part.content, {**options, **ports}))
    return _Plan(part.operators, got["plan"])


@dataclass(frozen=True)
class _Plan:
    """What the interpreter executes: the part's own operators, and behind them one entry for each delegated partition."""

    operators: tuple[int, ...]
    entries: Sequence[tuple[str, Sequence[int], Sequence[int]]]

    @cached_property
    def partitions(self) -> list[frozenset[int]]:
        """Of each partition the operators (indices in the whole file) that it took."""
        own = self.entries[: len(self.operators)]
        producer = {out: k for k, (_, _, outputs) in enumerate(own) for out in outputs}
        found = []
        for _, inputs, outputs in self.entries[len(self.operators) :]:
            taken: set[int] = set()
            pending = list(outputs)
            while pending:
                k = producer.get(pending.pop())
                if k is not None and k not in taken:
                    taken.add(k)
                    pending += [read for read in own[k][1] if read not in inputs]
            found.append(frozenset(self.operators[k] for k in taken))
        return found

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Tensors (of a whole file) that lie inside a partition: made and read there, and nowhere else."""
        own, delegates = self.entries[: len(self.operators)], self.entries[len(self.operators) :]
        made = {
            out
            for k, (_, _, outputs) in zip(self.operators, own, strict=True)
            if k in self.delegated
            for out in outputs
        }
        return frozenset(made.difference(*(outputs for _, _, outputs in delegates)))

    @property
    def delegated(self) -> frozenset[int]:
        return frozenset[int]().union(*self.partitions)


@dataclass
class _Seen:
    """What one way of looking showed: values as the file has them, by name."""

    values: dict[str, Array] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    how: str = ""
    disturbed: bool | None = None


class _TfliteSession(Session):
    def __init__(self, backend: TfliteBackend, model: OnnxModel, file: File) -> None:
        started = time.perf_counter()
        self.backend = backend
        self.model = model
        self.graph = model.graph
        self.file = file
        self.source: Flatbuffer = file.source
        self.options = backend.engine_options()
        self.whole = cut.whole(self.source)
        self.ends = list(self.whole.outputs)
        # tensors to see; a value that its input only moves may lie in that input's tensor
        self.wanted = [name for name in dict.fromkeys(self.file.tensors.values()) if name not in self.whole.inputs]
        self.untouched, self.watching = backend.engine(), backend.engine()
        self.method = ""
        self._watched: str | None = None
        self.disturbed: bool | None = None
        self.unsteady = False
        try:
            self.info = self.untouched.info()
            self.plan = loaded(self.untouched, self.whole, self.options)
        except BaseException:
            self.close()
            raise
        self.methods = self._methods()
        self.timings = {"load": time.perf_counter() - started}

    def _methods(self) -> list[str]:
        """The ways to look that this engine allows, cheapest first."""
        asked = self.backend.chosen["observe"]
        if asked != "auto":
            return [asked]
        if self.plan.partitions or self.backend.delegate is not None:
            return ["head"] if self.backend.delegate is not None else ["outputs", "head"]
        return ["outputs", "head"] if self.info["engine"] in _OVERWRITES else ["preserve", "outputs", "head"]

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        started = time.perf_counter()
        fed = self.file.fed(feeds)
        outputs = translated(lambda: self.untouched.run(fed))
        self.timings["run"] = time.perf_counter() - started
        seen = self._look(fed, outputs)
        self.disturbed = seen.disturbed
        values, how = dict(feeds), dict.fromkeys(feeds, "fed")
        absent: dict[str, str] = {}
        failed: dict[str, str] = {}
        tensors = {**fed, **seen.values}
        for name in self.graph.stored[len(self.graph.inputs) :]:
            tensor = self.file.tensors[name]
            if tensor in tensors:
                values[name], how[name] = self.file.value(name, tensors[tensor]), seen.how
            else:
                (failed if tensor in seen.failed else absent)[name] = {**seen.absent, **seen.failed}[tensor]
        return Recording(
            sample=sample,
            values=values,
            how=how,
            outputs=self.file.outputs(outputs),
            absent=absent,
            failed=failed,
            quantisation=parameters(self.graph),
            disturbed=seen.disturbed,
        )

    def _look(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> _Seen:
        """Look in the first way that is left and disturbs nothing; the last way is taken as it is.

        Where the untouched model does not reproduce its own outputs (tflite-runtime 2.14 on a FULLY_CONNECTED that is quantised
        per channel), no way can: then values of one and the same run are worth most, and whether it was disturbed is not known.
        """
        ways = {"preserve": self._preserved, "outputs": self._as_outputs, "head": self._heads}
        while True:
            self.method = self.methods[0]
            seen = ways[self.method](feeds, outputs)
            if seen.disturbed and self._unsteady(feeds, outputs):
                return replace(seen, disturbed=None)
            if not seen.disturbed or len(self.methods) == 1:
                return seen
            del self.methods[0]

    def _unsteady(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> bool:
        """Whether the untouched model gives other outputs when it is run again."""
        again = translated(lambda: self.untouched.run(feeds))
        self.unsteady = self.unsteady or not _equal(outputs, again, self.ends)
        return self.unsteady

    def _preserved(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> _Seen:
        every = replace(self.whole, outputs={**self.whole.outputs, **{n: self.source.index_of[n] for n in self.wanted}})
        seen = self._whole_run(every, {"preserve": True}, feeds, outputs, "kept by the interpreter")
        for name in [name for name in seen.values if self.source.index_of[name] in self.plan.hidden]:
            del seen.values[name]  # memory that nobody wrote
            seen.absent[name] = "inside a partition of the delegate: nothing is kept there"
        return seen

    def _as_outputs(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> _Seen:
        every = cut.part(
            self.source,
            inputs=self.whole.inputs,
            outputs=dict.fromkeys([*self.ends, *self.wanted]),
            operators=self.whole.operators,
        )
        return self._whole_run(every, {}, feeds, outputs, "extra output")

    def _whole_run(
        self,
        part: cut.Part,
        more: Mapping[str, Any],
        feeds: Mapping[str, Array],
        outputs: Mapping[str, Array],
        how: str,
    ) -> _Seen:
        if self._watched != how:
            self._placed = loaded(self.watching, part, {**self.options, **more}).partitions == self.plan.partitions
            self._watched = how
        got = translated(lambda: self.watching.run(feeds))
        disturbed = not self._placed or not _equal(outputs, got, self.ends)
        return _Seen({name: got[name] for name in self.wanted}, how=how, disturbed=disturbed)

    def _heads(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> _Seen:
        """One truncated model a value; one that is refused, or placed otherwise than the whole, costs that value only."""
        seen, lost = _Seen(how="truncated model"), 0
        self._watched = None
        for name in self.wanted:
            if lost >= _GIVE_UP:
                seen.failed[name] = f"not tried after the engine died or hung on {lost} values in a row"
                continue
            try:
                self._head(name, feeds, seen)
            except EngineError as error:
                seen.failed[name] = str(error)
                lost = lost + 1 if isinstance(error, (EngineCrashed, EngineTimeout)) else 0
                continue
            lost = 0
            if name in outputs and name in seen.values:
                seen.disturbed = bool(seen.disturbed) or not _equal(outputs, seen.values, [name])
        return seen

    def _head(self, name: str, feeds: Mapping[str, Array], seen: _Seen) -> None:
        part = cut.head(self.source, [name])
        plan = loaded(self.watching, part, self.options)
        elsewhere = plan.delegated ^ (self.plan.delegated & set(part.operators))
        if elsewhere:
            moved = ", ".join(self.source.operators[k].name for k in sorted(elsewhere)[:3])
            seen.absent[name] = f"in the model truncated there the delegate takes other operators ({moved})"
            return
        seen.values[name] = translated(lambda: self.watching.run(feeds))[name]

    def close(self) -> None:
        self.untouched.close()
        self.watching.close()

    # -- what it says of itself ----------------------------------------------------------------------------------------

    @property
    def side(self) -> Side:
        return Side(
            spec=str(self.backend.spec),
            engine=self.info["engine"],
            version=self.info["version"],
            device=self._device(),
            model_sha256=self.model.sha256,
            observation=Observation(method=self.method or self.methods[0], disturbed=self.disturbed),
            placement=self._placement(),
            crossings=self._crossings(),
            notes=list(self.file.notes),
            warnings=self._warnings(),
            timings_s={key: round(value, 6) for key, value in self.timings.items()},
        )

    def _device(self) -> str:
        name = "XNNPACK" if self.backend.kernels == "xnnpack" else f"{self.backend.kernels} kernels"
        on = f"{self.info['machine']} CPU, {name}"
        return on if self.backend.delegate is None else f"{Path(self.backend.delegate).name}, rest: {on}"

    def _warnings(self) -> list[str]:
        found = []
        if self.backend.delegates and not self.plan.partitions:
            who = Path(self.backend.delegate).name if self.backend.delegate is not None else "XNNPACK"
            found.append(f"{who} took none of the {len(self.source.operators)} operators: TFLite's own kernels ran all")
        if self.unsteady:
            found.append("the untouched model gives other outputs when it is run again on the same input")
        return found

    @property
    def _external(self) -> bool:
        return self.backend.delegate is not None

    def _placement(self) -> list[Placement]:
        """Every operator; none where only TFLite's own kernels may run."""
        if not self.backend.delegates:
            return []
        step_of = self._steps()
        partition = {k: n for n, taken in enumerate(self.plan.partitions, 1) for k in taken}
        return [
            Placement(
                node=operator.name,
                op_type=operator.kind,
                where="npu" if self._external and operator.index in partition else "cpu",
                step=step_of.get(operator.index),
                partition=partition.get(operator.index),
                reason=self._reason(operator.index in partition),
            )
            for operator in self.source.operators
        ]

    def _steps(self) -> dict[int, int]:
        """Operator -> step; of several operators that a twin has for one step, the last makes its value."""
        made = self.graph.step_of_value
        steps = {tensor: made[name].id for name, tensor in self.file.tensors.items() if name in made}
        ends = {tensor: self.graph.store(name) or name for name, tensor in self.file.ends.items()}
        steps |= {tensor: made[name].id for tensor, name in ends.items() if name in made}
        found: dict[int, int] = {}
        step: int | None = None
        for operator in reversed(self.source.operators):
            step = next((n for k in operator.outputs if (n := steps.get(self.source.tensors[k].name))), step)
            if step is not None:
                found[operator.index] = step
        return found

    def _reason(self, taken: bool) -> str | None:
        """Why an operator ran on the CPU; None where it did not."""
        if self._external:
            return None if taken else "not taken by the delegate"
        return "XNNPACK" if taken else "TFLite's own kernel"

    def _crossings(self) -> list[Crossing]:
        """Stored values between the delegate and the CPU."""
        if not self._external:
            return []
        found = []
        taken = self.plan.delegated
        readers: dict[int, list[bool]] = {}
        for operator in self.source.operators:
            for k in operator.inputs:
                readers.setdefault(k, []).append(operator.index in taken)
        for k, operator in self.source.producer.items():
            inside = operator.index in taken
            if any(reads != inside for reads in readers.get(k, [])):
                tensor = self.source.tensors[k]
                size = int(np.prod(tensor.shape)) * (tensor.numpy_dtype or np.dtype("int8")).itemsize
                found.append(Crossing(value=tensor.name, bytes=size, direction="npu->cpu" if inside else "cpu->npu"))
        return found


def _equal(one: Mapping[str, Array], other: Mapping[str, Array], names: Collection[str]) -> bool:
    """Whether both have the same numbers under `names`."""
    return all(np.array_equal(one[n], other[n], equal_nan=one[n].dtype.kind == "f") for n in names)
