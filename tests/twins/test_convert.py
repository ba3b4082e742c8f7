"""Twins: the same integers, scales, zero points and names; what is rewritten, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import random_models
import small_models
from builder import Qdq
from equivcheck.errors import UnsupportedModel
from equivcheck.models.onnx.load import load_model
from equivcheck.models.tflite.load import read_flatbuffer
from equivcheck.models.tflite.schema import ACTIVATIONS, Reader
from equivcheck.twins.convert import METADATA, Converted, ConvertError, convert
from real_models import REAL_MODELS
from twins.proving import loaded, proved
from vnpu.graphs import Q, Weight, quantised_model

FIXTURES = [f"{net}_{form}" for net in ("digits", "detector") for form in ("qdq_s8", "qdq_u8", "qop_u8")]
IMAGE = (1, 4, 9, 10)
X = Q(0.03, 7, "int8")


def operators(twin: Converted) -> list[str]:
    return [operator.kind for operator in read_flatbuffer(twin.content, "the twin").operators]


def tensor(twin: Converted, name: str):
    file = read_flatbuffer(twin.content, "the twin")
    return file.tensors[file.index_of[name]]


def one(op_type, inputs, attributes=None, out=Q(0.2, -5, "int8"), shape=IMAGE, x=X, after=()):  # noqa: B008  # frozen
    """A model of one operator, maybe with others behind it before the Q."""
    nodes = [(op_type, ["x", *inputs], ["y"], attributes or {}), *after]
    return loaded(quantised_model(nodes, {nodes[-1][2][0]: out}, {"x": shape}, {"x": x}).model)


def weights(*shape: int, scale=0.01, zero=0, dtype="int8", axis=None) -> Weight:
    limits = np.iinfo(dtype)
    return Weight(np.random.default_rng(0).integers(limits.min, limits.max + 1, shape).astype(dtype), scale, zero, axis)


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXTURES)
def test_a_fixture_s_twin_has_the_very_codes(name: str, fixtures_dir: Path) -> None:
    model = load_model(fixtures_dir / f"{name}.onnx")
    twin = convert(model)
    proof = proved(model, twin=twin)
    assert (proof.equal, proof.legal, proof.wrong) == (proof.compared, 0, ())
    assert not twin.missing


@pytest.mark.parametrize("real", REAL_MODELS, ids=lambda real: real.name)
def test_a_real_model_s_twin_has_the_very_codes(real, shared: Path) -> None:
    model = load_model(shared / "models" / real.file)
    proof = proved(model)
    assert (proof.equal, proof.legal, proof.wrong) == (proof.compared, 0, ())
    assert proof.compared == sum(len(step.outputs) for step in model.graph.steps)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", small_models.TRAPS)
def test_a_small_model_has_the_very_codes_or_is_refused(name: str, dtype: str, per_channel: bool) -> None:
    model = loaded(small_models.TRAPS[name](lambda: Qdq(dtype=dtype, per_channel=per_channel, seed=1)))
    if name in REFUSED_SMALL:
        with pytest.raises(UnsupportedModel, match=REFUSED_SMALL[name]):
            convert(model)
        return
    proof = proved(model)
    assert (proof.equal, proof.wrong) == (proof.compared, ())


REFUSED_SMALL = {
    "if_body_with_codes": "input flag is bool",
    "if_body_with_floats": "input flag is bool",
    "where_and_min": "input mask is bool",
    "matmul_and_add_become_a_gemm": "several operators in float|a bias that is not int32 codes",
    "read_with_another_scale_than_written": r"Conv\+Add has no integer kernel as one step",
    "split_in_two": r"Conv\+Add has no integer kernel as one step",
    "input_quantised_twice": r"Conv\+Add has no integer kernel as one step",
    "split_of_codes": r"Conv\+Mul has no integer kernel as one step",
    "slices_of_one_value_with_one_scale": r"Conv\+Add\+Mul has no integer kernel as one step",
    "inner_float_value_is_an_output_too": "before_q is stored as a float too",
    "one_float_into_two_qs": "its result is quantised twice",
    "one_float_into_two_equal_qs": "its result is quantised twice",
    "float_bias": "a bias that is not int32 codes",
    "float_tail": "its result is a float",
    "float_middle": "its result is a float",
    "float_model": "its result is a float",
    "weights_only": "its result is a float",
    "float_convs_in_channel_blocks": "constant is a float",
    "layer_norm_and_gelu_in_float": "several operators in float",
    "integer_activations_of_other_width": "16-bit codes",
    "identity_and_dropout": "Dropout has no integer kernel",
}


@pytest.mark.parametrize("seed", range(40))
def test_a_random_model_is_proved_or_refused(seed: int) -> None:
    model = loaded(random_models.RandomModel(seed, 8).model())
    refused = ""
    try:
        twin = convert(model)
    except ConvertError as error:
        refused = str(error)
    if refused:
        assert "AveragePool into another scale, with windows of different sizes" in refused
        return
    proof = proved(model, twin=twin)
    assert proof.proved, proof.wrong
    pools = sum("1/n" in text for texts in twin.rewrites.values() for text in texts)
    assert proof.legal <= pools  # where the profile has MEAN's arithmetic, which is less exact


# -- integers, scales, zero points -------------------------------------------------------------------------------------


def test_weights_biases_and_scales_are_those_of_the_model() -> None:
    scales = np.array([0.01, 0.02, 0.03], np.float32)
    weight, bias = weights(3, 4, 3, 3, scale=scales, axis=0), np.array([100, -200, 1 << 20], np.int32)
    twin = convert(one("Conv", [weight, Weight(bias, np.float32(X.scale) * scales, 0, 0)]))
    held = tensor(twin, "y_oq/weights")
    np.testing.assert_array_equal(held.constant, weight.codes.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(held.quantisation.scale, scales)
    np.testing.assert_array_equal(tensor(twin, "y_oq/bias").constant, bias)
    for name, q in (("x_q", X), ("y_oq", Q(0.2, -5, "int8"))):
        found = tensor(twin, name).quantisation
        assert (found.scale, found.zero_point, found.dtype) == (np.float32(q.scale), q.zero, "int8")


def test_uint8_codes_become_int8_and_that_is_said() -> None:
    model = one("Relu", [], x=Q(0.03, 100, "uint8"), out=Q(0.03, 0, "uint8"))
    twin = convert(model)
    assert tensor(twin, "x_q").quantisation.zero_point == 100 - 128
    assert tensor(twin, "y_oq").quantisation.zero_point == -128
    assert "uint8 codes are int8 in the twin" in twin.notes[0]
    assert proved(model).proved


def test_weights_with_a_zero_point_keep_their_codes_in_uint8() -> None:
    weight = weights(3, 4, 3, 3, zero=151, dtype="uint8")
    model = one("Conv", [weight], x=Q(0.03, 100, "uint8"), out=Q(0.3, 128, "uint8"))
    twin = convert(model)
    np.testing.assert_array_equal(tensor(twin, "y_oq/weights").constant, weight.codes.transpose(0, 2, 3, 1))
    assert tensor(twin, "y_oq/weights").quantisation.zero_point.ravel()[0] == 151
    assert tensor(twin, "x_q").dtype == tensor(twin, "y_oq").dtype == "uint8"
    assert proved(model).equal == 2


def test_int8_weights_with_a_zero_point_go_through_the_uint8_kernel() -> None:
    model = one("Gemm", [weights(10, 6, zero=-9)], shape=(5, 10))
    twin = convert(model)
    assert tensor(twin, "y_oq/weights").quantisation.zero_point.ravel()[0] == -9 + 128
    assert proved(model).equal == 2


def test_a_bias_of_its_own_scale_is_rounded_and_the_error_named() -> None:
    scale = np.float32(X.scale) * np.float32(0.01)
    bias = Weight(np.array([1000, -1001, 7], np.int32), scale * np.float32(1.37), 0)
    model = one("Conv", [weights(3, 4, 3, 3), bias])
    (text,) = convert(model).rewrites[2]
    assert "a scale of its own" in text
    assert "LSB" in text
    assert proved(model).proved


# -- layout and names --------------------------------------------------------------------------------------------------


def test_images_lie_channels_last_under_their_own_names() -> None:
    twin = convert(one("Conv", [weights(3, 4, 3, 3)]))
    assert twin.layout == dict.fromkeys(("x", "x_q", "y_oq"), (0, 2, 3, 1))
    assert twin.tensors == {name: name for name in ("x", "x_q", "y_oq")}
    assert tensor(twin, "x").shape == (1, 9, 10, 4)
    assert operators(twin) == ["QUANTIZE", "CONV_2D", "DEQUANTIZE"]


def test_the_file_says_how_its_values_lie() -> None:
    twin = convert(one("Conv", [weights(3, 4, 3, 3)]))
    start = twin.content.index(b'{"model_sha256"')
    kept, _ = json.JSONDecoder().raw_decode(twin.content[start:].decode(errors="replace"))
    assert {name: tuple(order) for name, order in kept["layout"].items()} == twin.layout
    assert METADATA.encode() in twin.content


def test_a_transpose_that_only_turns_the_layout_vanishes() -> None:
    m = Qdq(dtype="int8")
    turned = m.op("Transpose", [m.input("x", (1, 8, 8, 4), "int8")], "turned", perm=[0, 3, 1, 2])
    m.channels["real"] = 4
    m.dq(turned, 0.03, 0, out="real")
    y = m.q(m.conv("real", 6), 0.2, 0, out="y")
    m.op("Transpose", [m.moved(y, y)], "back", perm=[0, 2, 3, 1])
    m.q(m.dq(m.moved("back", y)), 0.2, 0, out="end")
    model = loaded(m.model("end", "back"))
    twin = convert(model)
    assert "TRANSPOSE" not in operators(twin)
    assert twin.missing == {"turned": "the Transpose vanishes: tensor x, read in another order"}
    assert twin.tensors["turned"] == "x"
    assert twin.layout["turned"] == (0, 2, 3, 1)
    assert twin.tensors["back"] == "back"  # an output keeps its name
    assert proved(model, twin=twin).equal == 4


def test_a_value_keeps_its_name_where_a_helper_would_take_it() -> None:
    m = Qdq(dtype="int8")
    x = m.dq(m.q(m.input("x", (1, 4, 8, 8)), 0.03, 0))
    m.channels[x] = 4
    first = m.q(m.conv(x, 4, stride=2), 0.2, 0, out="y")
    real = m.dq(first)
    m.channels[real] = 4
    model = loaded(
        m.model(m.q(m.conv(real, 4), 0.5, 0, out="y/weights"), m.q(m.op("Relu", [real]), 0.2, 0, out="constant"))
    )
    twin = convert(model)
    assert set(twin.tensors) == set(twin.tensors.values())
    assert proved(model, twin=twin).proved


# -- how operators are written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "size", "padded"),
    [
        ({"pads": [1, 1, 1, 1]}, 9, False),  # SAME
        ({"pads": [1, 1, 1, 1], "strides": [2, 2]}, 9, False),  # SAME of an odd image
        ({"pads": [1, 1, 1, 1], "strides": [2, 2]}, 10, True),  # SAME of an even image pads only at the end
        ({"pads": [0, 0, 1, 1], "strides": [2, 2]}, 10, False),
        ({"pads": [2, 2, 2, 2], "dilations": [2, 2]}, 9, False),
        ({"auto_pad": "SAME_UPPER", "strides": [2, 2]}, 10, False),
        ({"auto_pad": "SAME_LOWER", "strides": [2, 2]}, 10, True),
        ({}, 9, False),
        ({"strides": [2, 2]}, 10, False),
        ({"pads": [1, 0, 0, 1]}, 9, True),
    ],
)
@pytest.mark.parametrize("kind", ["Conv", "MaxPool"])
def test_a_pad_of_its_own_stands_where_tflite_has_no_such_pads(kind, attributes, size, padded) -> None:
    window = {"kernel_shape": [3, 3], **attributes}
    if kind == "MaxPool":  # TFLite's pools know no dilations
        window = {key: value for key, value in window.items() if key != "dilations"}
        padded = padded or "dilations" in attributes
    inputs = [weights(3, 4, 3, 3)] if kind == "Conv" else []
    model = one(kind, inputs, window, out=X if kind == "MaxPool" else Q(0.3, 4, "int8"), shape=(1, 4, size, size))
    assert any(op.startswith("PAD") for op in operators(convert(model))) == padded
    assert proved(model).equal == 2


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero", "fused", "behind"),
    [
        (0, 6, 0.05, -100, "RELU6", []),
        (-1, 1, 0.02, 0, "RELU_N1_TO_1", []),
        (0, 100, 0.05, -100, "RELU", []),  # no code reaches 100
        (-100, 100, 0.05, 0, "NONE", []),
        (-0.5, 1.5, 0.05, 0, "NONE", ["MAXIMUM", "MINIMUM"]),
        (-100, 1.5, 0.05, 0, "NONE", ["MINIMUM"]),
    ],
)
def test_a_clip_is_fused_where_tflite_has_it_and_two_codes_else(low, high, scale, zero, fused, behind) -> None:
    clip = ("Clip", ["y", np.float32(low), np.float32(high)], ["z"], {})
    model = one("Conv", [weights(3, 4, 3, 3)], out=Q(scale, zero, "int8"), after=[clip])
    twin = convert(model)
    conv = next(op for op in read_flatbuffer(twin.content, "t").operators if op.kind == "CONV_2D")
    assert conv.options["fused_activation_function"] == ACTIVATIONS.index(fused)
    assert operators(twin)[2:-1] == behind
    assert proved(model).equal == 2


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("columns", [4, 8])
def test_groups_are_depthwise_or_grouped_convolutions(group: int, columns: int) -> None:
    model = one("Conv", [weights(columns, 4 // group, 3, 3)], {"group": group})
    assert ("DEPTHWISE_CONV_2D" if group == 4 else "CONV_2D") in operators(convert(model))
    assert proved(model).equal == 2


@pytest.mark.parametrize("attributes", [{}, {"output_padding": [1, 1]}, {"pads": [1, 0, 1, 2]}])
def test_a_transposed_convolution_is_cut_or_grown(attributes) -> None:
    model = one("ConvTranspose", [weights(4, 5, 3, 3)], {"strides": [2, 2], **attributes})
    assert ("SLICE" in operators(convert(model))) == ("pads" in attributes)
    assert proved(model).equal == 2


def test_operators_of_one_axis_go_through_images_of_height_one() -> None:
    for kind, inputs in (("Conv", [weights(5, 4, 3)]), ("ConvTranspose", [weights(4, 5, 3)]), ("MaxPool", [])):
        out = X if kind == "MaxPool" else Q(0.2, 3, "int8")
        model = one(kind, inputs, {"kernel_shape": [3], "strides": [2]}, shape=(2, 4, 11), out=out)
        assert convert(model).layout["y_oq"] == (0, 2, 1)
        assert proved(model).equal == 2


def test_a_product_with_one_scale_a_column_needs_a_newer_engine_or_becomes_a_convolution() -> None:
    """tflite-runtime 2.14 reads version 4 of FULLY_CONNECTED and all scales but the first as if they were not there."""
    model = one("Gemm", [weights(10, 6, scale=np.linspace(0.01, 0.02, 6).astype(np.float32), axis=1)], shape=(5, 10))
    assert versions(convert(model))["FULLY_CONNECTED"] == 12
    older = convert(model, older_engines=True)
    assert operators(older) == ["QUANTIZE", "RESHAPE", "CONV_2D", "RESHAPE", "DEQUANTIZE"]
    assert proved(model, twin=older).proved


def versions(twin: Converted) -> dict[str, int]:
    file, root = read_flatbuffer(twin.content, "the twin"), Reader.root(twin.content)
    codes = root.tables("operator_codes", "OperatorCode")
    kinds = list(dict.fromkeys(operator.kind for operator in file.operators))
    return dict(zip(kinds, (int(code.number("version")) for code in codes), strict=True))


def test_a_function_tflite_has_in_another_quantisation_is_a_table() -> None:
    pinned = one("Sigmoid", [], out=Q(1 / 256, -128, "int8"))
    other = one("Sigmoid", [], out=Q(1 / 255, -128, "int8"))
    assert "LOGISTIC" in operators(convert(pinned))
    assert "GATHER" in operators(convert(other))
    assert proved(pinned).equal == proved(other).equal == 2


def test_a_function_of_two_values_is_a_table_of_pairs() -> None:
    a, b = Q(0.03, 7, "int8"), Q(0.02, 100, "uint8")
    nodes = [("Sigmoid", ["b"], ["s"], {}), ("Mul", ["a", "s"], ["y"], {})]
    shapes = {"a": (2, 3, 5, 7), "b": (3, 1, 1)}
    model = loaded(quantised_model(nodes, {"y": Q(0.03, 2, "int8")}, shapes, {"a": a, "b": b}).model)
    assert operators(convert(model)).count("GATHER") == 1
    assert proved(model).equal == 3


def test_codes_read_with_another_scale_are_given_it_by_a_reshape() -> None:
    m = Qdq(dtype="int8")
    q = m.q(m.input("x", (2, 5)), 0.07, 3, out="codes")
    model = loaded(m.model(m.q(m.op("Relu", [m.dq(q, 0.05, -4)]), 0.05, -128, out="y"), m.dq(q, 0.09, 1, out="seen")))
    assert operators(convert(model)).count("RESHAPE") == 2
    assert proved(model).equal == 2


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_all_refused_steps_are_listed_and_the_way_out_is_given() -> None:
    m = Qdq(dtype="int8")
    x = m.dq(m.q(m.input("x", (1, 4, 8, 8)), 0.03, 0))
    three = m.q(m.op("LpNormalization", [x], axis=1), 0.01, 0, out="one")
    four = m.q(m.op("LogSoftmax", [x], axis=1), 0.1, 0, out="other")
    end = m.q(m.op("Add", [m.dq(three), m.dq(four)]), 0.1, 0, out="end")
    with pytest.raises(
        ConvertError, match=r"2 steps cannot be written: #2 .*float.*1 behind them not tried.*split MODEL"
    ):
        convert(loaded(m.model(end)))


def test_a_symbolic_batch_is_one_and_any_other_open_size_is_refused() -> None:
    model = one("Relu", [])
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    twin = convert(loaded(proto))
    assert twin.notes == ("input x: the first dimension, batch, is 1",)
    assert tensor(twin, "x").shape[0] == 1
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    with pytest.raises(UnsupportedModel, match="input x has no fixed shape"):
        convert(loaded(proto))


@pytest.mark.parametrize("shape", [(1, 8), (1, 3, 4, 5)])
def test_a_real_that_is_only_handed_on_is_dequantised_first(shape: tuple[int, ...]) -> None:
    m = Qdq(dtype="int8", seed=3)
    real = m.qdq(m.op("Relu", [m.qdq(m.input("x", shape), 0.02)]), 0.03)
    model = loaded(m.model(m.op("Identity", [real])))
    proof = proved(model)
    assert proof.proved, proof.wrong
    assert operators(convert(model))[-2:] == ["DEQUANTIZE", "RESHAPE"]
