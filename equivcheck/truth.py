"""The result of every step on given stored values: one run of the isolated model in float32, by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import onnx

from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineRefused
from equivcheck.models.graph import RANDOM, Array, Step
from equivcheck.models.onnx.cut import ArraySpec
from equivcheck.models.onnx.isolate import Isolated, isolate, spec_of
from equivcheck.models.onnx.load import OnnxModel

_PLAIN = {"optimization": "disable"}


class StepResults:
    """The isolated model, ready to run on recordings that deliver the values of `specs` (name -> dtype and shape).

    `steps`: which to evaluate (default all). `noise`: values outside `specs` that get noise before their Q, see `isolate`.
    """

    def __init__(
        self,
        model: OnnxModel,
        specs: Mapping[str, ArraySpec],
        steps: Iterable[Step] | None = None,
        noise: Collection[str] = (),
    ) -> None:
        self.specs = dict(specs)
        self.steps = None if steps is None else list(steps)
        self._model, self._noise = model, noise
        self._engine: OrtEngine | None = None

    @cached_property
    def isolated(self) -> Isolated:
        """The isolated model; built when it is first run, because a recording may bring its results along."""
        return isolate(self._model, self.specs, form="real", steps=self.steps, noise=self._noise)

    def fits(self, values: Mapping[str, Array]) -> bool:
        """Whether these values have the names, dtypes and shapes it was made for."""
        return self.specs == specs_of(values)

    def evaluate(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the float result (before its Q) of every step on `values`, by stored value; not yet in codes."""
        got: Mapping[str, Array] = {}
        if self.isolated.outputs:
            try:
                if self._engine is None:
                    self._engine = OrtEngine()
                    self._engine.load(self.isolated.proto.SerializeToString(), _PLAIN)
                    self.isolated = replace(self.isolated, proto=onnx.ModelProto())  # the engine has its own copy
                got = self._engine.run(self.isolated.feed(values))
            except Exception as error:  # onnxruntime raises its own classes, RuntimeError and ValueError
                words = " ".join(str(error).split())[:400]
                raise EngineRefused("the steps do not take these values", last_words=words) from error
        results = {
            name: got[shown] for name, shown in self.isolated.outputs.items() if isinstance(got[shown], np.ndarray)
        }
        return results | {name: values[source] for name, source in self.isolated.passthrough.items()}


def step_results(model: OnnxModel, specs: Mapping[str, ArraySpec], steps: Iterable[Step]) -> StepResults:
    """The `StepResults` of these steps; the model keeps the last one, because both sides mostly deliver the same values.

    Not where random numbers may be drawn: the second run of a session draws others than the first.
    """
    wanted = list(steps)
    if model.graph.inner or any(node.op_type in RANDOM for node in model.graph.nodes):
        return StepResults(model, specs, wanted)
    last = model.evaluator.get("last")
    if last is None or last.specs != specs or last.steps != wanted:
        last = model.evaluator["last"] = StepResults(model, specs, wanted)
    return last


def specs_of(values: Mapping[str, Array]) -> dict[str, ArraySpec]:
    """(dtype, shape) of every value."""
    return {name: spec_of(array) for name, array in values.items()}
