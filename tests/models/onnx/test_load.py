"""Reading a model: what is refused, in which words, and what is never changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from builder import Qdq
from equivcheck.errors import ModelError
from equivcheck.models.onnx.load import dtype_name, load_model, model_from_bytes
from small_models import TRAPS


def proto() -> onnx.ModelProto:
    return TRAPS["conv_relu_chain"](lambda: Qdq(seed=1))


def test_a_missing_file_is_answered_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "digits_qdq.onnx").write_bytes(proto().SerializeToString())
    with pytest.raises(ModelError, match="no such model") as caught:
        load_model(tmp_path / "digit_qdq.onnx")
    assert caught.value.nearest == ("digits_qdq.onnx",)


@pytest.mark.parametrize("content", [b"", b"hello, I am a text", b"\x00" * 100, b"PK\x03\x04 a zip file"])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not an ONNX model"):
        load_model(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_model_that_breaks_off_is_refused(share: float) -> None:
    content = proto().SerializeToString()
    with pytest.raises(ModelError, match=r"m\.onnx"):
        model_from_bytes(content[: int(len(content) * share)], "m.onnx")


def test_a_tflite_file_that_breaks_off_is_called_by_its_name() -> None:
    with pytest.raises(ModelError, match="not a TFLite model, or it breaks off"):
        model_from_bytes(b"\x1c\x00\x00\x00TFL3rest", "m.tflite")


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_model(tmp_path)


def test_external_data_is_read_and_its_loss_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(proto(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = load_model(path)
    weight = next(t for t in model.proto.graph.initializer if t.name == "weight")
    expected = next(t for t in proto().graph.initializer if t.name == "weight")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(weight), onnx.numpy_helper.to_array(expected))
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match="external data"):
        load_model(path)


def test_reading_everything_of_a_model_changes_nothing_of_it() -> None:
    content = proto().SerializeToString()
    model = model_from_bytes(content, "m")
    _ = model.graph.steps, model.graph.quantisation, model.qdq, model.opsets
    assert model.proto.SerializeToString() == content
    assert model.opsets == {"ai.onnx": 17}


@pytest.mark.parametrize(
    ("element", "name"),
    [
        (TensorProto.FLOAT, "float32"),
        (TensorProto.INT8, "int8"),
        (TensorProto.BFLOAT16, "bfloat16"),
        (TensorProto.INT4, "int4"),
        (TensorProto.UINT16, "uint16"),
        (TensorProto.BOOL, "bool"),
        (TensorProto.FLOAT8E4M3FN, "float8_e4m3fn"),
    ],
)
def test_element_types_have_the_names_numpy_gives_them(element: int, name: str) -> None:
    assert dtype_name(element) == name


@pytest.mark.parametrize("opset", [13, 15, 17, 19, 21])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_every_opset_has_the_same_steps(opset: int, dtype: str) -> None:
    model = model_from_bytes(TRAPS["residual_adds"](lambda: Qdq(dtype=dtype, opset=opset)).SerializeToString(), "m")
    assert len(model.graph.steps) == 10
    assert model.opsets["ai.onnx"] == opset


def test_a_dimension_of_minus_one_is_open() -> None:
    """Paddle exports write -1 where ONNX leaves a dimension without a value."""
    port = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [-1, 3])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [-1, 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [port], [out])
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = model_from_bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString(), "m")
    assert model.graph.values["x"].shape == (None, 3)
    assert model.with_input_shapes({"x": (2, 3)}).graph.values["x"].shape == (2, 3)
