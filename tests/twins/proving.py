"""Runs twins in the tests: the proof, on the reference kernels of whichever TFLite is here."""

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from equivcheck.backends.vnpu import CpuFallback
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from equivcheck.twins.convert import Converted, convert
from equivcheck.twins.prove import Proof, prove


def engine():
    pytest.importorskip("ai_edge_litert", reason="no ai-edge-litert: nothing runs a .tflite here")
    from equivcheck.engines.tflite import TfliteEngine

    return TfliteEngine()


def random_feeds(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Normal floats, and codes over the whole range; 1 where a dimension is open."""
    rng = np.random.default_rng(seed)
    found = {}
    for name in graph.inputs:
        value = graph.values[name]
        shape = tuple(size if isinstance(size, int) else 1 for size in value.shape)
        if value.dtype == "float32":
            found[name] = rng.normal(size=shape).astype(np.float32)
        else:
            found[name] = rng.integers(0, 256, shape).astype(np.uint8).view(value.dtype)
    return found


def proved(model: OnnxModel, feeds: Mapping[str, Array] | None = None, twin: Converted | None = None) -> Proof:
    made = twin or convert(model)
    return prove(model, made, engine(), feeds or random_feeds(model.graph), CpuFallback(model))


def loaded(proto: onnx.ModelProto | bytes, name: str = "model.onnx") -> OnnxModel:
    return model_from_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString(), name)
