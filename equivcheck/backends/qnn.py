"""Qualcomm's NPU (HTP) as a backend, on a device or emulated on x86 by Qualcomm's own libraries.

The plugin takes QDQ models with fixed dimensions, and silently leaves to the CPU what it cannot run: a library that is not
there, an architecture that it does not know, every node. So what it said and where each node went is read back, always.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from equivcheck.backends import known
from equivcheck.backends.base import Backend, Option, Runner, Session
from equivcheck.backends.ort import QLINEAR_SOFTMAX, parameters
from equivcheck.backends.ort import not_for_python as not_for_python
from equivcheck.backends.placement import CPU, Loaded, crossings, few, tagged, untagged
from equivcheck.backends.remote import DEFAULT_LIMIT, EngineFailed, Place, RemoteEngine, Travelling
from equivcheck.backends.spec import Spec
from equivcheck.backends.vnpu import CpuFallback, dequantised
from equivcheck.errors import BackendUnavailable, EngineCrashed, EngineRefused, SpecError, UnknownOption
from equivcheck.models.graph import MOVES, Array, Graph, Step, Value
from equivcheck.models.onnx.cut import ArraySpec, part
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Recording
from equivcheck.result import Observation, Placement, Side

T = TypeVar("T")
_log = logging.getLogger(__name__)
PACKAGE = "onnxruntime-qnn"
# Those that the emulator tells apart or accepts; it takes any other number for its default, 68.
ARCHITECTURES = ("68", "69", "73", "75", "79", "81")
# What the plugin says, at warning level, of options that it does not understand, and then ignores ...
_MISUNDERSTOOD = re.compile(r"Invalid HTP architecture|Unrecognized soc_model|Invalid soc_model")
# ... and where nothing of it could be started.
_NOT_STARTED = re.compile(r"QNN SetupBackend failed (.*)")
# Constant over a channel, the larger the larger s_x * s_w / s_out: 0.33 LSB in a depthwise Conv of EfficientNet-Lite at 0.12.
HTP_OFFSET = (0.40, "the HTP adds a channel's bias and zero points in units of its own: an offset up to 0.33 LSB")
# 0.500 against the product as it is stored, 0.005 against the product as it was before its rounding.
HTP_DIV = (0.55, "the HTP divides a product by a constant before it rounds the product: up to 1/2 LSB")
# 0.80 on the two classes of a trained network; 1.95 on a thousand, where it loses a part of the tail, is not covered.
HTP_SOFTMAX = (1.0, f"the HTP's own exponential; and where it runs on the CPU, {QLINEAR_SOFTMAX[1]}")
_REFUSALS = (EngineRefused, EngineCrashed)
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class QnnBackend(Backend):
    """ONNX Runtime with the plugin of onnxruntime-qnn, in a process of its own."""

    name = "qnn"
    summary = "Qualcomm's NPU, or on x86 Qualcomm's own emulator of it; in a process of its own, here or elsewhere"
    options = {  # noqa: RUF012  # a constant
        "arch": Option("version of the HTP; without it that of the device, emulated: 68", ARCHITECTURES),
        "soc": Option("the chip in place of arch=: its name (SM8550) or number (43)"),
        "context": Option("a folder that keeps compiled models: the next load of the same one is quick"),
        "library": Option("path of libQnnHtp.so, in place of the one that onnxruntime-qnn brings"),
        "threads": Option("threads of what falls back to the CPU", kind=int),
    }
    travels = True

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if "arch" in self.chosen and "soc" in self.chosen:
            raise SpecError(f"{spec}: soc= says the architecture already", hint="give arch= or soc=")
        self._place = Place.of(spec)

    @classmethod
    def unavailable(cls) -> str | None:
        if find_spec("onnxruntime_qnn") is None:
            return f"{PACKAGE} is not installed; pip install 'equivcheck[qnn]' (Linux x86-64, Windows on Arm; Python >= 3.11)"
        return None

    def engine(self) -> RemoteEngine:
        """A new worker with the plugin in it."""
        limit = float(self.chosen.get("timeout", DEFAULT_LIMIT))
        return RemoteEngine(self._place, Travelling("qnn.py", "QnnEngine", needs=PACKAGE), limit)

    def open(self, model: OnnxModel) -> Session:
        return _QnnSession(self, model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        engine = self.engine()
        if not self.load(engine, tagged(proto)).uses_the_npu:
            raise EngineRefused("no node of the model runs on the NPU")

        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            return refusing(lambda: engine.run(feeds))

        return run

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        """What tests/bench/qnn.py measured on real models and, with one-step models, found to be the HTP's own way."""
        return {**dict.fromkeys(_WEIGHTED, HTP_OFFSET), "Div": HTP_DIV, "Softmax": HTP_SOFTMAX}

    def load(self, engine: RemoteEngine, proto: onnx.ModelProto) -> Loaded:
        """Load a model of `tagged` nodes.

        Raises EngineRefused in the engine's words, UnknownOption for an arch= or soc= it does not know, and
        BackendUnavailable where its library cannot be started.
        """
        options = {key: self.chosen.get(key) for key in ("arch", "soc", "context", "library", "threads")}
        answer = refusing(lambda: engine.load(proto.SerializeToString(), options))
        for said in answer["trouble"]:
            if _MISUNDERSTOOD.search(said):
                raise UnknownOption(
                    f"{self.spec}: {said}", asked=str(self.spec), hint=f"arch= {', '.join(ARCHITECTURES)}"
                )
            if not_started := _NOT_STARTED.search(said):
                raise BackendUnavailable(
                    f"{self.spec}: the NPU's library does not start: {not_started.group(1)}",
                    asked=str(self.spec),
                    hint="check library= and soc=, or pip install --force-reinstall " + PACKAGE,
                )
        return Loaded.of(answer)


def refusing(call: Callable[[], T]) -> T:
    """Let what the engine raised be an EngineRefused."""
    try:
        return call()
    except EngineFailed as error:
        words = " ".join(str(error).split())
        raise EngineRefused("refused by QNN", last_words=words[:600]) from error


def _moves_in_qdq(proto: onnx.ModelProto, graph: Graph) -> onnx.ModelProto:
    """Put what moves bare codes (Flatten, MaxPool) between a DQ and a Q of the same scale, in place; `proto` is `tagged`.

    The plugin takes no tensor of codes that no Q or DQ describes, and the QDQ form of a QOperator file has such.
    """
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    for node in nodes:
        coded = [name for name in [*node.input, *node.output] if name in graph.quantisation]
        if node.op_type not in MOVES or not coded or any(graph.quantisation[name].per_channel for name in coded):
            proto.graph.node.append(node)
            continue
        before: list[onnx.NodeProto] = []
        after: list[onnx.NodeProto] = []
        for names, made in ((node.input, before), (node.output, after)):
            for k, codes in enumerate(names):
                if codes in graph.quantisation:
                    names[k] = f"{codes}/{node.name}"
                    made.append(_converter(proto, graph, codes, names[k], node.name, reading=made is before))
        proto.graph.node.extend([*before, node, *after])
    return proto


def _converter(
    proto: onnx.ModelProto, graph: Graph, codes: str, real: str, owner: str, *, reading: bool
) -> onnx.NodeProto:
    """The DQ that makes `real` of `codes`, or the Q the other way round, with constants of its own."""
    quantisation = graph.quantisation[codes]
    parameters = [f"{real}/scale", f"{real}/zero_point"]
    for name, array in zip(parameters, (quantisation.scale, quantisation.zero_point), strict=True):
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    op_type, source, made = ("DequantizeLinear", codes, real) if reading else ("QuantizeLinear", real, codes)
    return helper.make_node(
        op_type, [source, *parameters], [made], name=f"{owner}_{op_type}_{len(proto.graph.initializer)}"
    )


@dataclass(frozen=True, eq=False)
class _Piece:
    """Consecutive steps that run as one model; without `loaded`, one step that the engine refused with those `words`."""

    steps: tuple[Step, ...]
    proto: onnx.ModelProto
    loaded: Loaded | None = None
    words: str = ""


class _QnnSession(Session):
    """The model as deployed, untouched, and beside it the same one with every stored value as an extra output.

    What the engine refuses of these, it runs in the largest pieces that it takes, found by halving.
    """

    def __init__(self, backend: QnnBackend, model: OnnxModel) -> None:
        started = time.perf_counter()
        self.backend = backend
        self.model = model
        self.graph: Graph = model.graph
        self.untouched, self.observed = backend.engine(), backend.engine()
        self.runnable = tagged(model.qdq.proto)
        if model.qdq.proto is not model.proto:
            _moves_in_qdq(self.runnable, self.graph)
        wanted = [name for name in self.graph.stored if name not in self.graph.inputs]
        self.never = {name: why for name in wanted if (why := not_for_python(self.graph, name))}
        self.refused = ""
        self.disturbed: bool | None = None
        self.sizes: dict[str, int] = {}
        try:
            self.info = self.untouched.info()
            self.deployed = self._deployed()
            self.pieces = self._observable([name for name in wanted if name not in self.never])
            self._must_use_the_npu()
        except BaseException:
            self.close()
            raise
        self.timings = {"load": time.perf_counter() - started}

    # -- loading -------------------------------------------------------------------------------------------------------

    def _deployed(self) -> Loaded | None:
        """Load the model untouched; None where the engine refuses it as a whole."""
        try:
            return self.backend.load(self.untouched, self.runnable)
        except _REFUSALS as error:
            self.refused = self._readable(str(error))
            return None

    def _observable(self, wanted: Sequence[str]) -> list[_Piece]:
        steps = tuple(self.graph.steps)
        if self.deployed is not None:
            whole = _with_outputs(self.runnable, wanted)
            try:
                return [_Piece(steps, whole, self.backend.load(self.observed, whole))]
            except _REFUSALS as error:
                _log.info("%s: observed in pieces: %s", self.backend.spec, self._readable(str(error)))
        return self._divided(steps)

    def _divided(self, steps: Sequence[Step]) -> list[_Piece]:
        proto = self._part(steps)
        try:
            return [_Piece(tuple(steps), proto, self.backend.load(self.observed, proto))]
        except _REFUSALS as error:
            if len(steps) == 1:
                return [_Piece(tuple(steps), proto, words=self._readable(str(error)))]
        half = len(steps) // 2
        return [*self._divided(steps[:half]), *self._divided(steps[half:])]

    def _part(self, steps: Sequence[Step]) -> onnx.ModelProto:
        """`steps` alone, from the stored values they read to those they make. Raises EngineRefused where none can be cut."""
        made = [out for step in steps for out in step.outputs]
        reads = {name for step in steps for name in step.inputs if name not in made}
        unknown = [name for name in reads if not _is_fixed(self.graph.values.get(name))]
        if unknown or self.never:
            raise EngineRefused("QNN refused the model, and it cannot be cut into pieces", last_words=self.refused)
        return part(self.runnable, inputs={name: _spec(self.graph.values[name]) for name in reads}, outputs=made)

    def _must_use_the_npu(self) -> None:
        """Raise EngineRefused where the engine left every node to the CPU."""
        loaded = (
            [self.deployed] if self.deployed is not None else [p.loaded for p in self.pieces if p.loaded is not None]
        )
        if not any(where.uses_the_npu for where in loaded):
            reasons = self.refused or "; ".join(
                dict.fromkeys(why for where in loaded for why in where.reasons.values())
            )
            raise EngineRefused("no node of the model runs on the NPU", last_words=self._readable(reasons))

    def _readable(self, words: str) -> str:
        """The engine's words with the names that the file's nodes have."""

        def label(index: int) -> str:
            node = self.graph.nodes[index]
            return (self.graph.originals[node.origin] if node.origin >= 0 else node).label

        return untagged(words, label)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        started = time.perf_counter()
        untouched = refusing(lambda: self.untouched.run(feeds)) if self.deployed is not None else None
        self.timings["run"] = time.perf_counter() - started
        seen = self._run_pieces(feeds)
        shown = {
            name: seen[name] if name in seen else dequantised(self.graph, name, seen) for name in self.graph.outputs
        }
        if untouched is not None:
            self.disturbed = not all(_equal(untouched[name], shown[name]) for name in shown)
        self.sizes = {name: array.size for name, array in seen.items()}
        failed = self._failed()
        values = {name: seen[name] for name in self.graph.stored if name in seen and name not in failed}
        return Recording(
            sample=sample,
            values=values,
            how={name: "fed" if name in feeds else "extra output" for name in values},
            outputs=shown if untouched is None else {name: untouched[name] for name in shown},
            absent=self.never,
            failed=failed,
            quantisation=parameters(self.graph),
            disturbed=self.disturbed,
        )

    def _run_pieces(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run what is observed; of refused steps on the CPU, because the steps behind need their values."""
        values = dict(feeds)
        for piece in self.pieces:
            if piece.loaded is None:
                (step,) = piece.steps
                values.update(self._cpu(step, {name: values[name] for name in step.inputs}))
                continue
            if len(self.pieces) > 1:
                self.backend.load(self.observed, piece.proto)
            needs = {port.name: values[port.name] for port in piece.proto.graph.input if port.name in values}
            values.update(refusing(partial(self.observed.run, needs)))
        return values

    @cached_property
    def _cpu(self) -> CpuFallback:
        return CpuFallback(self.model)

    def _failed(self) -> dict[str, str]:
        """The values that the engine does not give: of refused steps, and the outputs of a model that it refuses whole."""
        failed = {out: p.words for p in self.pieces if p.loaded is None for step in p.steps for out in step.outputs}
        if self.refused:
            for name in self.graph.outputs:
                stored = self.graph.store(name)
                if stored is not None and stored not in self.graph.inputs:
                    failed.setdefault(stored, f"the model as a whole is {self.refused}")
        return failed

    def close(self) -> None:
        self.untouched.close()
        self.observed.close()

    # -- what it says of itself ----------------------------------------------------------------------------------------

    @property
    def side(self) -> Side:
        places = self._places()
        placement = [self._placement(step, places) for step in self.graph.steps]
        chosen = self.backend.chosen
        chip = f"soc {chosen['soc']}" if "soc" in chosen else f"HTP v{chosen['arch']}" if "arch" in chosen else "HTP"
        return Side(
            spec=str(self.backend.spec),
            engine=self.info["engine"],
            version=self.info["version"],
            device=f"{chip}, {self.info['device']}, onnxruntime {self.info['runtime']}",
            model_sha256=self.model.sha256,
            observation=Observation(method="plain", disturbed=self.disturbed, note=self._note()),
            placement=placement,
            crossings=crossings(self.graph, places, self.sizes),
            warnings=[
                *self._refusal(),
                *few(placement),
                *_wide_weights(self.graph),
                *known.warnings(self.info["engine"], self.info["version"]),
            ],
            timings_s={key: round(value, 6) for key, value in self.timings.items()},
        )

    def _places(self) -> dict[int, frozenset[int]]:
        """Where each node went, by index: as deployed, or in pieces with their partitions numbered on."""
        if self.deployed is not None:
            return dict(self.deployed.places)
        found: dict[int, frozenset[int]] = {}
        partitions = 0
        for piece in self.pieces:
            if piece.loaded is None:
                found.update((index, frozenset({CPU})) for step in piece.steps for index in step.nodes)
                continue
            for index, places in piece.loaded.places.items():
                moved = frozenset(place + partitions if place != CPU else CPU for place in places)
                found[index] = found.get(index, frozenset()) | moved
            partitions += piece.loaded.partitions
        return found

    def _placement(self, step: Step, places: Mapping[int, frozenset[int]]) -> Placement:
        main = self.graph.main_node(step)
        candidates = [step.main, *reversed(step.nodes)]
        index = next((index for index in candidates if index in places), None)
        if index is None:
            return Placement(
                node=main.label,
                op_type=main.op_type,
                where="fused",
                step=step.id,
                reason="optimised away before placement",
            )
        on_npu = sorted(places[index] - {CPU})
        return Placement(
            node=main.label,
            op_type=main.op_type,
            where="npu" if on_npu else "cpu",
            step=step.id,
            partition=on_npu[0] if on_npu else None,
            reason=None if on_npu else self._reason(index, step),
        )

    def _reason(self, index: int, step: Step) -> str:
        """Why the engine left a node to the CPU."""
        if self.deployed is not None:
            said = self.deployed.reasons.get(index)
        else:
            piece = next(piece for piece in self.pieces if step in piece.steps)
            said = piece.words if piece.loaded is None else piece.loaded.reasons.get(index)
        return self._readable(said) if said else f"QNN does not take {step.op_type}"

    def _refusal(self) -> list[str]:
        if not self.refused:
            return []
        return [f"the model as a whole is {_short(self.refused)}; it ran in {len(self.pieces)} pieces"]

    def _note(self) -> str | None:
        return f"in {len(self.pieces)} pieces" if len(self.pieces) > 1 else None


def _with_outputs(proto: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    have = {port.name for port in proto.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    return copy


def _wide_weights(graph: Graph) -> list[str]:
    """A line where u8 weights leave s8 around their zero point: the HTP rounds the weights of such a channel anew.

    Measured: one weight 151 above its zero point puts its channel 2 LSB off, and 0.01 against the weights rounded to steps of
    151 / 127; up to 9 LSB in a depthwise Conv of MobileNetV2.
    """
    wide: dict[int, Step] = {}
    for node in graph.nodes:
        source = graph.producer.get(node.inputs[1]) if node.op_type in _WEIGHTED and len(node.inputs) > 1 else None
        quantisation = graph.parameters(source) if source is not None and source.op_type == "DequantizeLinear" else None
        codes = graph.constants.get(source.inputs[0]) if source is not None else None
        if quantisation is None or codes is None or codes.dtype != np.uint8:
            continue
        centred = codes.astype(np.int64) - quantisation.along(codes.ndim)[1]
        if centred.min(initial=0) < -128 or centred.max(initial=0) > 127:
            step = graph.step_of_node[node.index]
            wide[step.id] = step
    if not wide:
        return []
    named = ", ".join(f"#{step.id} {step.op_type}" for step in list(wide.values())[:3])
    more = f" and {len(wide) - 3} more" if len(wide) > 3 else ""
    return [
        f"u8 weights of {named}{more} leave -128..127 around their zero point: the HTP rounds the weights of such a channel "
        "anew, and computes something else there (s8 weights cure it)"
    ]


def _short(words: str) -> str:
    """The first sentence: what else the engine guesses is among the failed values in full."""
    return words.split(". ")[0][:300]


def _is_fixed(value: Value | None) -> bool:
    return (
        value is not None
        and value.dtype is not None
        and value.shape is not None
        and all(isinstance(dim, int) for dim in value.shape)
    )


def _spec(value: Value) -> ArraySpec:
    return np.dtype(str(value.dtype)), tuple(dim for dim in value.shape or () if isinstance(dim, int))


def _equal(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
