"""An in-memory backend for tests: a function in place of an engine, with every failure that an engine can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from equivcheck.backends.base import Backend, Runner, Session
from equivcheck.backends.ort import OrtBackend, parameters
from equivcheck.backends.spec import Spec
from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineCrashed, EngineRefused
from equivcheck.models.graph import Array
from equivcheck.models.onnx.cut import part
from equivcheck.models.onnx.isolate import spec_of
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Recording
from equivcheck.result import Observation, Side

Change = Callable[[dict[str, Array]], Mapping[str, Array]]


class FakeBackend(Backend):
    """Records what ONNX Runtime computes without optimisation, then lets `change` falsify it.

    `change` takes all stored values (arrays it may write to) and returns those to deliver; a value it leaves out is
    absent. What it changes, later values are computed from, as in an engine whose step is wrong; with `stale`, only the dump
    of that value is wrong, as of memory that was used again. `refuse` and `crash` make loading, or the run of the named
    sample, fail as an engine would. It can run no other model, so it gives no second opinion.
    """

    name = "fake"
    summary = "an in-memory backend for tests"
    second_opinion = False

    def __init__(
        self,
        change: Change = lambda values: values,
        *,
        refuse: str | None = None,
        crash: Sequence[str] = (),
        disturbed: bool = False,
        stale: bool = False,
    ) -> None:
        super().__init__(Spec("fake"))
        self.change = change
        self.refuse = refuse
        self.crash = frozenset(crash)
        self.disturbed = disturbed
        self.stale = stale

    def open(self, model: OnnxModel) -> Session:
        if self.refuse is not None:
            raise EngineRefused("the engine refused the model", last_words=self.refuse)
        return _FakeSession(self, model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        raise EngineRefused("a fake runs no other model")


class _FakeSession(Session):
    def __init__(self, backend: FakeBackend, model: OnnxModel) -> None:
        self.backend = backend
        self.model = model
        self.engine = OrtBackend(Spec("ort", {"optimization": "disable"})).open(model)

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        if sample in self.backend.crash:
            raise EngineCrashed("the worker ended with SIGSEGV", last_words="as the test asked")
        honest = self.engine.run(sample, feeds)
        values: dict[str, Any] = {name: array.copy() for name, array in honest.values.items()}
        delivered = dict(self.backend.change(values))
        if not self.backend.stale:
            delivered |= self._rippled(honest.values, delivered)
        return Recording(
            sample=sample,
            values=delivered,
            how=dict.fromkeys(delivered, "told"),
            outputs=honest.outputs,
            absent={name: "the fake left it out" for name in honest.values if name not in delivered},
            quantisation=parameters(self.model.graph),
            disturbed=self.backend.disturbed,
        )

    def _rippled(self, honest: Mapping[str, Array], delivered: Mapping[str, Array]) -> dict[str, Array]:
        """The delivered values that `change` left alone, computed again from those that it changed."""
        changed = {
            n: a
            for n, a in delivered.items()
            if n in honest
            and a.dtype == honest[n].dtype
            and a.shape == honest[n].shape
            and not np.array_equal(a, honest[n])
        }
        left = [name for name in delivered if name not in changed and name in self.model.graph.producer]
        if not changed or not left:
            return {}
        given = {**{name: honest[name] for name in self.model.graph.inputs}, **changed}
        proto = part(self.model.proto, inputs={name: spec_of(array) for name, array in given.items()}, outputs=left)
        engine = OrtEngine()
        engine.load(proto.SerializeToString(), {"optimization": "disable"})
        needed = {port.name for port in proto.graph.input}
        got = engine.run({name: array for name, array in given.items() if name in needed})
        return {name: got[name].astype(delivered[name].dtype, copy=False) for name in left}

    @property
    def side(self) -> Side:
        return Side(
            spec="fake",
            engine="fake",
            version="0",
            device="memory",
            model_sha256=self.model.sha256,
            observation=Observation(method="told", disturbed=self.backend.disturbed),
        )
