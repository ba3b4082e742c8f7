"""Second opinions: the candidate's steps on inputs it did not make itself. They may add a culprit and never acquit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx

from equivcheck.backends.base import Backend, Runner
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.cut import codes_of
from equivcheck.models.onnx.isolate import isolate, spec_of
from equivcheck.models.onnx.load import OnnxModel

_STRESS_SEED = 0


class SecondOpinion:
    """The candidate's engine on the isolated model, ended at DequantizeLinear outputs."""

    def __init__(self, backend: Backend, model: OnnxModel, values: Mapping[str, Array]) -> None:
        self.graph = model.graph
        known = {name: spec_of(array) for name, array in values.items() if name in self.graph.stored}
        self.isolated = isolate(model, known, form="dequantised")
        self.failed = False
        self.runner: Runner = backend.deploy(self.isolated.proto)
        self.isolated = replace(self.isolated, proto=onnx.ModelProto())  # the runner has its own copy

    def run(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return codes (or floats, where not quantised) of every stored value it makes."""
        if self.failed:
            return {}
        got = self.runner(self.isolated.feed(values))
        found: dict[str, Array] = {}
        for name, shown in self.isolated.outputs.items():
            array = got.get(shown)
            if array is None:
                continue
            if name in self.graph.quantisation and array.dtype.kind == "f":
                array = codes_of(array, self.graph, name)[0]
            found[name] = array
        return found


def random_codes(graph: Graph, values: Mapping[str, Array]) -> dict[str, Array]:
    """Uniform codes over the whole range for every quantised value; anything else stays as the reference had it."""
    random = np.random.Generator(np.random.PCG64(_STRESS_SEED))
    found = dict(values)
    for name, array in values.items():
        if name in graph.quantisation and array.dtype.kind in "iu":
            limits = np.iinfo(array.dtype)
            found[name] = random.integers(limits.min, limits.max, array.shape, array.dtype, endpoint=True)
    return found
