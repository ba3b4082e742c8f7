"""What a model is made of: counts and sizes from the model itself, and suggestions that really select."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import cut_models
from builder import Qdq
from cut_models import KINDS
from equivcheck import split
from equivcheck.describe import Description, describe
from equivcheck.models.onnx.load import OnnxModel, load_model, model_from_bytes
from equivcheck.models.onnx.rewrite import TWINS
from equivcheck.models.select import select
from small_models import TRAPS, end, start


def model_of(proto: onnx.ModelProto) -> OnnxModel:
    return model_from_bytes(proto.SerializeToString(), "small.onnx")


def described(proto: onnx.ModelProto) -> Description:
    return describe(model_of(proto))


def assert_suggestions_select(model: OnnxModel, found: Description) -> None:
    for point in found.split_points:
        (selected,) = select(model.graph, [point.selector], TWINS)
        assert selected.step is not None
        assert selected.step.id == point.step
        assert split(model, point.selector, prove=False)


@pytest.mark.parametrize("name", [*TRAPS, *KINDS])
def test_every_model_can_be_described_and_its_suggestions_are_ready_selectors(name: str) -> None:
    model = model_of(KINDS[name]() if name in KINDS else TRAPS[name](lambda: Qdq(dtype="int8", seed=1)))
    found = describe(model)
    assert found.to_json()
    assert found.nodes == len(model.proto.graph.node) == sum(found.ops.values())
    assert bool(found.split_points) == bool(model.graph.steps)
    assert_suggestions_select(model, found)


@pytest.mark.parametrize(
    ("name", "form", "activations"),
    [
        ("digits_float", "not quantised", {}),
        ("digits_qdq_s8", "QDQ", {"int8 per tensor": 9}),
        ("digits_qdq_u8", "QDQ", {"uint8 per tensor": 9}),
        ("digits_qop_u8", "QOperator", {"uint8 per tensor": 9}),
        ("detector_qop_u8", "QOperator", {"uint8 per tensor": 14}),
    ],
)
def test_the_form_and_the_codes_of_the_fixtures(
    fixtures_dir: Path, name: str, form: str, activations: dict[str, int]
) -> None:
    found = describe(load_model(fixtures_dir / f"{name}.onnx"))
    assert found.scheme.form == form
    assert found.scheme.activations == activations


def test_weights_per_channel_are_told_from_those_per_tensor() -> None:
    for per_channel, kind in ((False, "int8 per tensor"), (True, "int8 per channel")):
        m = Qdq(dtype="uint8", per_channel=per_channel)
        assert described(m.model(end(m, m.conv(start(m), 8), 0.07))).scheme.weights == {kind: 1}


def test_16_bit_codes_4_bit_weights_and_float_islands_are_named() -> None:
    wide = described(TRAPS["integer_activations_of_other_width"](lambda: Qdq(dtype="int8", opset=21)))
    assert wide.scheme.activations["int16 per tensor"] == 1
    blocks = described(KINDS["int4_weights_in_blocks"]())
    assert blocks.scheme.weights == {"int4 per block": 1}
    assert blocks.scheme.form == "weights only"
    islands = described(TRAPS["float_middle"](lambda: Qdq(dtype="int8")))
    assert [label.split()[1] for label in islands.scheme.not_quantised] == ["Erf", "ReduceMax"]


def test_a_dynamically_quantised_model_is_not_called_unquantised() -> None:
    proto = cut_models.text("""
        g (float[2,3] x) => (int32[2,2] y) <uint8[3,2] w = {1, 2, 3, 4, 5, 6}> {
            q, scale, zero = DynamicQuantizeLinear(x)
            y = MatMulInteger(q, w, zero)
        }""")
    assert described(proto).scheme.form == "dynamic"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (TensorProto.FLOAT, 20), (TensorProto.DOUBLE, 40), (TensorProto.FLOAT16, 10), (TensorProto.BFLOAT16, 10),
        (TensorProto.BOOL, 5), (TensorProto.INT64, 40), (TensorProto.COMPLEX128, 80), (TensorProto.INT8, 5),
        (TensorProto.FLOAT8E4M3FN, 5), (TensorProto.INT4, 3), (TensorProto.UINT4, 3),
    ],
)  # fmt: skip
def test_bytes_of_weights_follow_their_type(dtype: int, size: int) -> None:
    """Five elements; 4-bit ones are packed in pairs (onnx.proto3)."""
    proto = cut_models.text("g (float[2] x) => (float[2] y) { y = Neg(x) }", opset=21, ir=10)
    proto.graph.initializer.append(helper.make_tensor("w", dtype, [5], bytes(size), raw=True))
    found = described(proto)
    assert (found.parameters, found.weight_bytes) == (5, size)


def test_weights_in_constant_nodes_and_bodies_count_as_parameters() -> None:
    proto = KINDS["a_body_with_initializers_and_inputs_of_outer_names"]()
    weight = numpy_helper.from_array(np.ones((3, 5), np.float32))
    proto.graph.node.append(helper.make_node("Constant", [], ["unused"], value=weight))
    found = described(proto)
    assert (found.parameters, found.weight_bytes) == (6 + 15, 4 * (6 + 15))


def test_external_bytes_are_named_though_the_weights_were_read(tmp_path: Path) -> None:
    proto = KINDS["weights_that_nodes_compute_from_initializers"]()
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(3, np.float32), "w"))  # raw, or it stays inside
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert describe(load_model(tmp_path / "m.onnx")).external_bytes == 12


def test_functions_opsets_and_domains_are_listed() -> None:
    found = described(KINDS["nested_local_functions_without_value_info"]())
    assert found.functions == ["Twice", "Quad", "Scaled", "Unused"]
    assert found.opsets == {"ai.onnx": 17, "local": 1}
    assert found.ops == {"Sigmoid": 1, "local::Quad": 1, "local::Scaled": 1, "Sub": 1}
    assert found.producer == "maker 7"


def test_ports_say_how_they_are_quantised_and_what_is_open() -> None:
    found = described(KINDS["symbolic_dimensions"]())
    assert found.inputs[0].shape == ["N", 3, "H", "W"]
    m = Qdq(dtype="int8")
    codes = described(m.model(end(m, m.conv(start(m), 8), 0.07)))
    assert codes.outputs[0].scale == pytest.approx(0.07)
    assert [port.name for port in described(KINDS["ir_3_where_weights_are_inputs"]()).inputs] == ["x"]


def test_a_suggestion_is_never_ambiguous() -> None:
    """An operator whose name another node and a value bear too."""
    proto = cut_models.text("""
        g (float[1,2,4,4] x) => (float[1,2,1,1] y, float[1,2,4,4] Softmax) {
            [Softmax] a = Relu(x)
            [Sigmoid] Softmax = Sigmoid(a)
            b = Softmax <axis = 1> (Softmax)
            [GlobalAveragePool] c = Sigmoid(b)
            y = GlobalAveragePool(c)
        }""")
    model = model_of(proto)
    found = describe(model)
    assert_suggestions_select(model, found)
    assert {point.op_type for point in found.split_points} == {"GlobalAveragePool", "Softmax", "Sigmoid"}


def test_operators_inside_of_an_island_are_suggested_too() -> None:
    m = Qdq(dtype="int8")
    real = end(m, m.conv(start(m), 8), 0.07)
    pooled = m.op("Add", [m.op("GlobalAveragePool", [real]), m.constant(np.float32(0.5))])
    found = described(m.model(end(m, pooled, 0.02)))
    assert "GlobalAveragePool" in {point.selector for point in found.split_points}
