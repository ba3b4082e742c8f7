"""Files as `write_model` makes them, read by the flatbuffer module that comes with LiteRT and by equivcheck's own reader."""

import numpy as np
import pytest

from equivcheck.models.tflite.load import read_flatbuffer
from equivcheck.models.tflite.schema import CODES
from equivcheck.models.tflite.write import OPERATORS, Operator, Tensor, write_model

WEIGHTS = np.array([[1, -2], [3, 4], [-128, 127]], np.int8)


def content() -> bytes:
    scale, zero = np.float32([0.5]), np.array([-3])
    tensors = [
        Tensor("x", (1, 4, 4, 2), "int8", scale, zero),
        Tensor("w", (3, 1, 1, 2), "int8", np.float32([0.1, 0.2, 0.3]), np.zeros(3, int), 0, WEIGHTS),
        Tensor("b", (3,), "int32", np.float32([0.05, 0.1, 0.15]), np.zeros(3, int), 0, np.array([7, -8, 1 << 30], np.int32)),
        Tensor("y", (1, 2, 2, 3), "int8", np.float32([0.25]), np.array([5])),
        Tensor("z", (1, 2, 2, 3), "float32"),
    ]  # fmt: skip
    options = {
        "padding": 1, "stride_w": 2, "stride_h": 2, "dilation_w_factor": 1, "dilation_h_factor": 1,
        "fused_activation_function": 3,
    }  # fmt: skip
    operators = [
        Operator("CONV_2D", (0, 1, 2), (3,), options, version=5),
        Operator("DEQUANTIZE", (3,), (4,)),
    ]
    return write_model(tensors, operators, [0], [4], description="a twin", metadata={"kept": b"words"})


def test_litert_s_own_schema_reads_what_was_written() -> None:
    schema = pytest.importorskip("ai_edge_litert.schema_py_generated", reason="no ai-edge-litert here")
    model = schema.ModelT.InitFromPackedBuf(content(), 0)
    (graph,) = model.subgraphs
    assert (model.version, model.description, list(graph.inputs), list(graph.outputs)) == (3, b"a twin", [0], [4])
    assert [t.name for t in graph.tensors] == [b"x", b"w", b"b", b"y", b"z"]
    assert [list(t.shape) for t in graph.tensors][1] == [3, 1, 1, 2]
    assert [t.type for t in graph.tensors] == [9, 9, 2, 9, 0]
    weights = graph.tensors[1]
    np.testing.assert_array_equal(weights.quantization.scale, np.float32([0.1, 0.2, 0.3]))
    assert list(model.buffers[weights.buffer].data.view(np.int8)) == [1, -2, 3, 4, -128, 127]
    assert list(model.buffers[graph.tensors[2].buffer].data.view(np.int32)) == [7, -8, 1 << 30]
    assert list(graph.tensors[0].quantization.zeroPoint) == [-3]
    conv, dequantise = graph.operators
    assert (conv.builtinOptions.padding, conv.builtinOptions.strideH, conv.builtinOptions.fusedActivationFunction) == (
        1,
        2,
        3,
    )
    codes = [(c.builtinCode, c.version) for c in model.operatorCodes]
    assert [codes[conv.opcodeIndex], codes[dequantise.opcodeIndex]] == [(3, 5), (6, 2)]
    assert bytes(model.buffers[model.metadata[0].buffer].data) == b"words"


def test_the_own_reader_finds_the_same() -> None:
    file = read_flatbuffer(content(), "made")
    assert [operator.kind for operator in file.operators] == ["CONV_2D", "DEQUANTIZE"]
    weights = file.tensors[1]
    assert weights.quantisation is not None
    assert weights.quantisation.axis == 0
    np.testing.assert_array_equal(weights.constant, WEIGHTS.reshape(3, 1, 1, 2))
    assert file.operators[0].options["stride_h"] == 2


def test_weights_are_aligned_to_16_bytes() -> None:
    """LiteRT maps them in place; its schema asks for it."""
    whole = content()
    assert whole.index(bytes([1, 254, 3, 4, 128, 127])) % 16 == 0


def test_operators_are_those_of_the_schema() -> None:
    assert set(OPERATORS) <= set(CODES)
