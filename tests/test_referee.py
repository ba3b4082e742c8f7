"""What the referee says of a step's weights, against the reals themselves."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from equivcheck.models.onnx.load import model_from_bytes
from equivcheck.referee import _weight_sizes

SHAPE = (24, 6)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn])
def test_the_largest_sum_of_weights_is_that_of_their_reals(dtype: Any, per_channel: bool) -> None:
    random = np.random.default_rng(0)
    codes = random.uniform(0 if dtype is np.uint8 else -6, 7, SHAPE).astype(dtype)
    scale = random.uniform(0.01, 0.1, SHAPE[1] if per_channel else ()).astype(np.float32)
    zero = np.zeros(scale.shape, dtype) if dtype is not np.uint8 else np.full(scale.shape, 3, dtype)
    weights = [numpy_helper.from_array(array, name) for array, name in ((codes, "w"), (scale, "s"), (zero, "z"))]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["real"], axis=1),
        helper.make_node("MatMul", ["x", "real"], ["y"]),
    ]
    ports = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, size])
        for name, size in (("x", SHAPE[0]), ("y", SHAPE[1]))
    ]
    proto = helper.make_graph(nodes, "g", ports[:1], ports[1:], weights)
    made = helper.make_model(proto, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    graph = model_from_bytes(made.SerializeToString(), "weights.onnx").graph
    (node,) = [node for node in graph.nodes if node.op_type == "MatMul"]
    found = _weight_sizes(graph, node)
    assert found is not None
    terms, largest, bias = found
    reals = (codes.astype(np.float64) - zero.astype(np.float64)) * scale
    assert (terms, bias) == (SHAPE[0], 0.0)
    assert largest == pytest.approx(float(np.abs(reals).sum(axis=0).max()), rel=1e-12)
