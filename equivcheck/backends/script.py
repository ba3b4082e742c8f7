"""A user's own file as a backend: ten lines that run a model on whatever they have make it a candidate.

The file defines `def run(model_path, feeds): return {output name: array}` (or a list in the order of the outputs). It runs
in a process of its own, here or elsewhere, never in this one. What is inside the model is seen by truncated models, one a
value: the engine compiles each as if it were the whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import onnx

from equivcheck.backends.base import Backend, Option, Runner, Session
from equivcheck.backends.long import LongSession
from equivcheck.backends.ort import parameters
from equivcheck.backends.remote import DEFAULT_LIMIT, EngineFailed, Place, RemoteEngine, Travelling
from equivcheck.backends.spec import Spec
from equivcheck.engines.bundle_runner import Clock, spoken
from equivcheck.errors import EngineCrashed, EngineError, EngineRefused, EngineTimeout, SpecError, near
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.cut import dequantised, uniquely_named
from equivcheck.models.onnx.heads import Seen, head_to, wanted_values
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Recording
from equivcheck.result import Observation, Side

T = TypeVar("T")
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
        self.path, self.source = _script(self.chosen.get("file"))
        self.digest = hashlib.sha256(self.source).hexdigest()
        self._place = Place.of(spec)

    def engine(self) -> RemoteEngine:
        """A new worker with the script in it."""
        folder = str(self.path.parent) if self._place.ssh is None else None
        settings = {"source": self.source, "name": self.path.name, "folder": folder}
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

    @cached_property
    def declared(self) -> Mapping[str, tuple[float, str]]:
        """See `legal_excess`. A session that is open has asked already; else a worker is started for the question."""
        with contextlib.closing(self.engine()) as engine:
            return declared_by(engine.info())

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        """What the script's `LEGAL_EXCESS` declares: op_type -> (LSB, reason)."""
        return self.declared

    def translated(self, call: Callable[[], T]) -> T:
        """Let what the script raised be an EngineRefused."""
        try:
            return call()
        except EngineFailed as error:
            raise EngineRefused(f"{self.path.name} failed", last_words=str(error)) from error


def declared_by(info: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """The wider limits that a script's `info` names, as `Backend.legal_excess` returns them."""
    return {op_type: (float(limit), str(reason)) for op_type, (limit, reason) in info["legal_excess"].items()}


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


class _ScriptSession(LongSession):
    def __init__(self, backend: ScriptBackend, model: OnnxModel) -> None:
        started = time.perf_counter()
        self.backend = backend
        self.model = model
        self.graph: Graph = model.graph
        self.observe = backend.chosen["observe"]
        self.whole = uniquely_named(model.proto)
        self.wanted = wanted_values(self.graph)
        self.engine = backend.engine()
        self.disturbed: bool | None = None
        try:
            self.info = self.engine.info()
        except BaseException:
            self.close()
            raise
        backend.declared = declared_by(self.info)
        self.timings = {"load": time.perf_counter() - started}

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        started = time.perf_counter()
        outputs = self._call(self.whole, feeds)
        self.timings["run"] = time.perf_counter() - started
        seen = Seen.of_feeds(self.graph, feeds)
        absent: dict[str, str] = {}
        if self.observe == "head":
            self._see_heads(seen, feeds, outputs)
        elif self.observe == "plain":
            self._see_extra_outputs(seen, feeds, outputs)
        else:
            absent = self._see_outputs(seen, outputs)
        self.disturbed = seen.disturbed
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

    def _see_heads(self, seen: Seen, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """One truncated model a value; one that the script refuses costs that value only."""
        lost = 0
        clock = Clock(len(self.wanted), "head")
        # a head is no larger than the model, but each is compiled anew
        self.tell(f"{len(self.wanted)} heads, at most about {spoken(len(self.wanted) * self.timings['run'])}")
        for done, name in enumerate(self.wanted):
            if lost >= _GIVE_UP:
                seen.failed[name] = f"not tried after the script died or hung on {lost} values in a row"
                continue
            self.tell(clock.at(done, name))
            shown = dequantised(self.graph, name)
            try:
                got = self._head(shown, feeds, clock)
            except EngineError as error:
                seen.failed[name] = str(error)
                lost = lost + 1 if isinstance(error, (EngineCrashed, EngineTimeout)) else 0
                continue
            lost = 0
            seen.compare_outputs(outputs, got)  # a head that ends where the model does
            seen.take(name, shown, got, "truncated model")

    def _head(self, shown: str, feeds: Mapping[str, Array], clock: Clock) -> dict[str, Array]:
        """Run the head that ends at `shown`, or take what an interrupted run kept of it."""
        made = head_to(self.model, [shown])
        if self.kept is None:
            return self._call(made, feeds)
        # what the engine says of itself is part of the key: another script, or version, is another run
        told = f"{self.info['engine']} {self.info['version']} {self.backend.digest}".encode()
        key = hashlib.sha256(told + made.SerializeToString(deterministic=True)).hexdigest()[:32]
        array = self.kept.get(key)
        if array is not None:
            clock.skip()
            return {shown: array}
        got = self._call(made, feeds)
        if shown in got:
            self.kept.put(key, got[shown])
        return got

    def _see_extra_outputs(self, seen: Seen, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        shown = {name: dequantised(self.graph, name) for name in self.wanted}
        got = self._call(head_to(self.model, [*self.graph.outputs, *shown.values()]), feeds)
        for name in self.wanted:
            seen.take(name, shown[name], got, "extra output")
        seen.compare_outputs(outputs, got)

    def _see_outputs(self, seen: Seen, outputs: Mapping[str, Array]) -> dict[str, str]:
        """Only what the model gives by itself; the reason for every other value."""
        shown = {stored: name for name in self.graph.outputs if (stored := self.graph.store(name)) is not None}
        for stored in self.wanted:
            if stored in shown:
                seen.take(stored, shown[stored], outputs, "the model's output")
        return {name: "inside the model: observe=outputs" for name in self.wanted if name not in shown}

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
