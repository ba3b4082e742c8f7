"""A user's own file as a backend: ten lines that run a model on whatever they have make it a candidate.

The file defines `def run(model_path, feeds): return {output name: array}` (or a list in the order of the outputs). It runs
in a process of its own, here or elsewhere, never in this one. What is inside the model is seen by truncated models, one a
value: the engine compiles each as if it were the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
from onnx import helper

from equivcheck.backends.base import Backend, Option, Runner, Session
from equivcheck.backends.ort import parameters
from equivcheck.backends.remote import DEFAULT_LIMIT, EngineFailed, Place, RemoteEngine, Travelling
from equivcheck.backends.spec import Spec
from equivcheck.errors import EngineCrashed, EngineError, EngineRefused, EngineTimeout, SpecError, near
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.cut import codes_of, dequantised, part, uniquely_named
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Recording
from equivcheck.result import Observation, Side

T = TypeVar("T")
_TYPED = frozenset("float16 float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool".split())
_GIVE_UP = 2  # values in a row on which the script died or hung: every further one would take as long


class ScriptBackend(Backend):
    """Runs what a user's file runs."""

    name = "script"
    summary = "your own file with run(model_path, feeds), in a process of its own; here or elsewhere"
    options = {  # noqa: RUF012  # a constant
        "file": Option("the Python file; script:FILE for short"),
        "observe": Option(
            "head: one truncated model a value; plain: one model with all values as extra outputs, fast; outputs: "
            "nothing but the model's outputs",
            ("head", "plain", "outputs"),
            "head",
        ),
    }
    positional = "file"
    second_opinion = False
    travels = True

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.path, self._source = _script(self.chosen.get("file"))
        self._place = Place.of(spec)

    def engine(self) -> RemoteEngine:
        """A new worker with the script in it."""
        folder = str(self.path.parent) if self._place.ssh is None else None
        settings = {"source": self._source, "name": self.path.name, "folder": folder}
        limit = float(self.chosen.get("timeout", DEFAULT_LIMIT))
        return RemoteEngine(self._place, Travelling("script.py", "ScriptEngine", settings), limit)

    def open(self, model: OnnxModel) -> Session:
        return _ScriptSession(self, model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        engine = self.engine()
        self.load(engine, proto)
        return lambda feeds: self.translated(lambda: engine.run(feeds))

    def load(self, engine: RemoteEngine, proto: onnx.ModelProto) -> None:
        """Hand `proto` to the script. Raises EngineError."""
        outputs = [port.name for port in proto.graph.output]
        self.translated(lambda: engine.load(proto.SerializeToString(), {"outputs": outputs}))

    def translated(self, call: Callable[[], T]) -> T:
        """Let what the script raised be an EngineRefused."""
        try:
            return call()
        except EngineFailed as error:
            raise EngineRefused(f"{self.path.name} failed", last_words=str(error)) from error


def _script(given: str | None) -> tuple[Path, bytes]:
    """The script's path and text. Raises SpecError when there is none."""
    if not given:
        raise SpecError("script: which file?", hint="script:FILE, a Python file with run(model_path, feeds)")
    path = Path(given).expanduser().absolute()
    try:
        return path, path.read_bytes()
    except OSError as error:
        beside = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise SpecError(
            f"script:{given}: {error.strerror}",
            asked=given,
            nearest=near(path.name, beside),
            hint="script:FILE takes a Python file with run(model_path, feeds)",
        ) from error


@dataclass
class _Seen:
    """What a run showed of the stored values, in codes where they are quantised."""

    values: dict[str, Array]
    how: dict[str, str]
    failed: dict[str, str] = field(default_factory=dict)
    off_grid: dict[str, float] = field(default_factory=dict)


class _ScriptSession(Session):
    def __init__(self, backend: ScriptBackend, model: OnnxModel) -> None:
        started = time.perf_counter()
        self.backend = backend
        self.model = model
        self.graph: Graph = model.graph
        self.observe = backend.chosen["observe"]
        self.whole = uniquely_named(model.proto)
        self.wanted = [name for name in self.graph.stored if name not in self.graph.inputs]
        self.engine = backend.engine()
        self.disturbed: bool | None = None
        try:
            self.info = self.engine.info()
        except BaseException:
            self.close()
            raise
        self.timings = {"load": time.perf_counter() - started}

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        started = time.perf_counter()
        outputs = self._call(self.whole, feeds)
        self.timings["run"] = time.perf_counter() - started
        seen = _Seen(dict(feeds), dict.fromkeys(feeds, "fed"))
        absent: dict[str, str] = {}
        if self.observe == "head":
            self._see_heads(seen, feeds, outputs)
        elif self.observe == "plain":
            self._see_extra_outputs(seen, feeds, outputs)
        else:
            absent = self._see_outputs(seen, outputs)
        return Recording(
            sample=sample,
            values=seen.values,
            how=seen.how,
            outputs={name: outputs[name] for name in self.graph.outputs if name in outputs},
            absent=absent,
            failed=seen.failed,
            off_grid=seen.off_grid,
            quantisation=parameters(self.graph),
            disturbed=self.disturbed,
        )

    def _call(self, proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.backend.load(self.engine, proto)
        needs = [port.name for port in proto.graph.input if port.name in feeds]
        return self.backend.translated(lambda: self.engine.run({name: feeds[name] for name in needs}))

    # -- observing -----------------------------------------------------------------------------------------------------

    def _see_heads(self, seen: _Seen, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """One truncated model a value; one that the script refuses costs that value only."""
        lost = 0
        self.disturbed = None
        for name in self.wanted:
            if lost >= _GIVE_UP:
                seen.failed[name] = f"not tried after the script died or hung on {lost} values in a row"
                continue
            shown = dequantised(self.graph, name)
            try:
                got = self._call(self._part([shown]), feeds)
            except EngineError as error:
                seen.failed[name] = str(error)
                lost = lost + 1 if isinstance(error, (EngineCrashed, EngineTimeout)) else 0
                continue
            lost = 0
            if shown in outputs and shown in got:  # a head that ends where the model does
                self.disturbed = bool(self.disturbed) or not _equal(outputs[shown], got[shown])
            self._take(seen, name, shown, got, "truncated model")

    def _see_extra_outputs(self, seen: _Seen, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        shown = {name: dequantised(self.graph, name) for name in self.wanted}
        got = self._call(self._part([*self.graph.outputs, *shown.values()]), feeds)
        for name in self.wanted:
            self._take(seen, name, shown[name], got, "extra output")
        both = outputs.keys() & got.keys()
        self.disturbed = not all(_equal(outputs[name], got[name]) for name in both) if both else None

    def _see_outputs(self, seen: _Seen, outputs: Mapping[str, Array]) -> dict[str, str]:
        """Only what the model gives by itself; the reason for every other value."""
        shown = {stored: name for name in self.graph.outputs if (stored := self.graph.store(name)) is not None}
        for stored in self.wanted:
            if stored in shown:
                self._take(seen, stored, shown[stored], outputs, "the model's output")
        return {name: "inside the model: observe=outputs" for name in self.wanted if name not in shown}

    def _part(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The model from its start to `outputs`, with types on them where they are known: compilers want them."""
        made = part(self.model.qdq.proto, inputs=dict.fromkeys(self.graph.inputs), outputs=outputs)
        for k, port in enumerate(made.graph.output):
            value = self.graph.values.get(port.name)
            if value is not None and value.shape is not None and value.dtype in _TYPED:
                element = helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
                made.graph.output[k].CopyFrom(helper.make_tensor_value_info(port.name, element, value.shape))
        return made

    def _take(self, seen: _Seen, name: str, shown: str, got: Mapping[str, Array], how: str) -> None:
        """Keep what was returned for the stored value `name`, shown as `shown`, or say why not."""
        array = got.get(shown)
        problem = f"run() returned no '{shown}'" if array is None else _misfit(self.graph, name, shown, array)
        if problem or array is None:
            seen.failed[name] = problem
            return
        quantisation = self.graph.quantisation.get(name)
        if quantisation is not None and array.dtype != quantisation.dtype:
            array, seen.off_grid[name] = codes_of(array, self.graph, name)
        seen.values[name], seen.how[name] = array, how

    # -- the rest ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.engine.close()

    @property
    def side(self) -> Side:
        return Side(
            spec=str(self.backend.spec),
            engine=self.info["engine"],
            version=self.info["version"],
            device=f"{self.info['node']}, {self.info['machine']}, Python {self.info['python']}",
            model_sha256=self.model.sha256,
            observation=Observation(method=self.observe, disturbed=self.disturbed),
            timings_s={key: round(value, 6) for key, value in self.timings.items()},
        )


def _misfit(graph: Graph, name: str, shown: str, array: Array) -> str:
    """Why `array` cannot be the value `shown`, or nothing. Codes are taken in place of the reals they stand for."""
    value = graph.values.get(shown)
    shape = value.shape if value is not None else None
    fixed = tuple(dim for dim in shape or () if isinstance(dim, int))
    if shape is not None and len(fixed) == len(shape) and array.shape != fixed:
        hint = " (another layout?)" if sorted(array.shape) == sorted(fixed) else ""
        return f"run() returned shape {list(array.shape)} for '{shown}', the model says {list(fixed)}{hint}"
    quantisation = graph.quantisation.get(name)
    if quantisation is not None and array.dtype == quantisation.dtype:
        return ""
    if quantisation is not None and shown != name:
        return (
            ""
            if array.dtype.kind == "f"
            else f"run() returned {array.dtype} for '{shown}', neither reals nor its codes"
        )
    declared = value.dtype if value is not None else None
    same = declared is None or declared == str(array.dtype)
    return "" if same else f"run() returned {array.dtype} for '{shown}', the model says {declared}"


def _equal(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f" and other.dtype.kind == "f"))
