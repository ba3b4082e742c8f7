"""Codes of 16 bits and weights of 4: sums stay exact, tables are wide, and the engines that have such kernels agree."""

import ml_dtypes
import numpy as np
import pytest

from vnpu.cases import IMAGE, random_q
from vnpu.graphs import Q, Weight, compiled, quantised_model, random_codes, run_ort

WIDE = ("int16", "uint16")
SEEDS = range(4)


def wide(rng, dtype, low=1e-5, high=1e-3):
    limits = np.iinfo(dtype)
    return Q(
        float(np.exp(rng.uniform(np.log(low), np.log(high)))), int(rng.integers(limits.min, limits.max + 1)), dtype
    )


def run(built, profile, seed=0):
    rng = np.random.default_rng(seed)
    program = compiled(built.graph, profile)
    codes = {name: random_codes(rng, q, shape) for name, q, shape in built.inputs}
    feeds = {name: q.float_of(codes[name]) for name, q, _ in built.inputs}
    found = program.run(feeds)
    return program, found, feeds


def unary(kind, attributes=None, extra=(), shape=(3, 400), same=False):
    def make(rng, dtype):
        x = wide(rng, dtype)
        out = x if same else wide(rng, dtype)
        nodes = [(kind, ["x", *extra], ["y"], attributes or {})]
        return quantised_model(nodes, {"y": out}, {"x": shape}, {"x": x})

    return make


def binary(kind):
    def make(rng, dtype):
        shapes = {"a": (2, 37, 40), "b": (2, 37, 1)}
        quantisation = {"a": wide(rng, dtype), "b": random_q(rng, "uint8")}  # 16 bits and 8 may meet
        return quantised_model([(kind, ["a", "b"], ["y"], {})], {"y": wide(rng, dtype)}, shapes, quantisation)

    return make


def requantise(rng, dtype):
    return quantised_model([], {"x": random_q(rng, "int8")}, {"x": (3, 400)}, {"x": wide(rng, dtype)})


IN_ORT = {
    "Sigmoid": unary("Sigmoid"),
    "LeakyRelu": unary("LeakyRelu", {"alpha": 0.1}),
    "LogSoftmax": unary("LogSoftmax", {"axis": -1}),
    "Transpose": unary("Transpose", {"perm": [0, 2, 3, 1]}, (), IMAGE, same=True),
    "MaxPool": unary("MaxPool", {"kernel_shape": [2, 3]}, (), IMAGE),
    "Resize": unary(
        "Resize", {"mode": "linear"}, (np.zeros(0, np.float32), np.array([1, 1, 2, 1.5], np.float32)), IMAGE
    ),
    "Add": binary("Add"),
    "Mul": binary("Mul"),
    "Div": binary("Div"),
    "QuantizeLinear": requantise,
}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("case", IN_ORT)
def test_sixteen_bits_give_the_codes_of_onnx_runtime(case, dtype):
    """No int16 kernels there: DQ-op-Q in float32."""
    for seed in SEEDS:
        built = IN_ORT[case](np.random.default_rng(seed), dtype)
        _, found, feeds = run(built, "ort", seed)
        for name, expected in run_ort(built, feeds, "disable").items():
            np.testing.assert_array_equal(found[name], expected)


def conv(rng, x, out, weights=np.int8, channels=3, made=4, group=1):
    limits = ml_dtypes.iinfo(weights) if weights not in (np.int8, np.uint8) else np.iinfo(weights)
    w = rng.integers(int(limits.min), int(limits.max) + 1, (made, channels // group, 3, 2)).astype(weights)
    scales = rng.uniform(0.001, 0.02, made).astype(np.float32)
    zero = 0 if limits.min < 0 else int(limits.max) // 2
    bias = Weight(rng.integers(-5000, 5000, made).astype(np.int32), np.float32(x.scale) * scales, 0, 0)
    attributes = {"pads": [1, 0, 1, 1], "group": group}
    nodes = [("Conv", ["x", Weight(w, scales, zero, 0), bias], ["y"], attributes)]
    return quantised_model(nodes, {"y": out}, {"x": (2, channels, 9, 8)}, {"x": x})


@pytest.mark.parametrize("profile", ["exact", "ort", "tflite-reference"])
@pytest.mark.parametrize("dtype", WIDE)
def test_sums_of_sixteen_bit_activations_are_exact(dtype, profile):
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        built = conv(rng, wide(rng, dtype), wide(rng, dtype, 1e-3, 1e-2))
        program, found, _ = run(built, profile, seed)
        step = built.graph.steps[-1]
        op = program.op(step)
        x = found[op.x.name].astype(np.int64) - op.x.codes.zero
        sums = np.zeros(found["y_oq"].shape, np.int64)
        padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 1)])
        for i in range(3):
            for j in range(2):
                window = padded[:, :, i : i + sums.shape[2], j : j + sums.shape[3]]
                sums += np.einsum("mc,nchw->nmhw", op.weight[:, :, i, j], window)
        column = (1, -1, 1, 1)
        real = sums * (op.x.codes.scale * op.weight_scale).reshape(column) + (op.bias * op.bias_scale).reshape(column)
        real = real / op.out.scale + op.out.zero
        np.testing.assert_allclose(program.real(step, found)["y_oq"], real, rtol=1e-12)
        error = found["y_oq"] - np.clip(real, op.out.low, op.out.high)
        slack = 2.0**-15 * np.abs(real - op.out.zero) if profile == "tflite-reference" else 1e-2
        assert (np.abs(error) <= 0.5 + slack).all()


@pytest.mark.parametrize("weights", [ml_dtypes.int4, ml_dtypes.uint4], ids=["int4", "uint4"])
@pytest.mark.parametrize("profile", ["exact", "ort", "tflite-reference"])
def test_four_bit_weights_are_widened(weights, profile):
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        built = conv(rng, random_q(rng, "int8"), random_q(rng, "int8", 0.005, 0.1), weights)
        program, found, feeds = run(built, profile, seed)
        step = built.graph.steps[-1]
        real = np.clip(program.real(step, found)["y_oq"], -128, 127)
        assert np.abs(real - run_ort(built, feeds, "disable")["y_oq"]).max() <= 0.5 + 2e-3
        assert np.abs(real - found["y_oq"]).max() <= 0.5 + (0.51 if profile == "tflite-reference" else 2e-3)


def test_int16_convolution_gives_the_codes_of_the_reference_kernel():
    """TFLite's 16x8: symmetric int16, int64 bias, a multiplier of 15 bits and one rounding."""
    pytest.importorskip("ai_edge_litert", reason="the oracle is LiteRT: pip install equivcheck[tflite]")
    from vnpu.litert_ops import Tensor, constant, run_reference

    for seed in range(12):
        rng = np.random.default_rng(seed)
        x, out = (Q(wide(rng, "int16").scale, 0, "int16") for _ in range(2))
        out = Q(x.scale * float(rng.uniform(0.5, 20)), 0, "int16")
        channels, made = (int(v) for v in rng.integers(1, 9, 2))
        w = rng.integers(-127, 128, (made, channels, 2, 3)).astype(np.int8)
        scales = rng.uniform(0.001, 0.02, made).astype(np.float32)
        bias, bias_scale = rng.integers(-500000, 500000, made).astype(np.int32), np.float32(x.scale) * scales
        nodes = [("Conv", ["x", Weight(w, scales, 0, 0), Weight(bias, bias_scale, 0, 0)], ["y"], {})]
        built = quantised_model(nodes, {"y": out}, {"x": (2, channels, 7, 8)}, {"x": x})
        _, found, _ = run(built, "tflite-reference", seed)
        nhwc = np.ascontiguousarray(found["x_q"].transpose(0, 2, 3, 1))
        codes = found["y_oq"].transpose(0, 2, 3, 1)
        expected = run_reference(
            "CONV_2D",
            [
                Tensor(nhwc, np.float32(x.scale)),
                constant(np.ascontiguousarray(w.transpose(0, 2, 3, 1)), scales, 0, 0),
                constant(bias.astype(np.int64), bias_scale),
            ],
            Tensor(np.empty(codes.shape, np.int16), np.float32(out.scale)),
            padding=1,
            strideW=1,
            strideH=1,
            dilationWFactor=1,
            dilationHFactor=1,
        )
        np.testing.assert_array_equal(codes, expected)


def test_a_wide_accumulator_has_bits_of_its_own():
    from dataclasses import replace

    from equivcheck.vnpu.ir import Accumulate, Clamp, Codes, Operand
    from equivcheck.vnpu.kernels import Kernel
    from equivcheck.vnpu.profiles import load_profile

    scale, w = np.asarray(1.0), np.full((1, 8, 1, 1), 127, np.int64)
    x_codes, out = Codes(1.0, 0, True, 16), Codes(1024.0, 0, True, 16)
    op = Accumulate("Conv", ("y",), Operand("x", x_codes), w, scale, None, scale, {}, Clamp(), out)
    x = np.full((1, 8, 1, 1), 32767, np.int16)  # 8 * 127 * 32767 = 33,291,272, beyond 2^24 = 16,777,216
    profile = replace(load_profile("exact"), accumulator_wide_bits=25)
    assert Kernel(op, profile).run({"x": x})["y"].item() == round((33_291_272 - 2**25) / 1024)
    saturating = replace(profile, accumulator_overflow="saturate")
    assert Kernel(op, saturating).run({"x": x})["y"].item() == round((2**24 - 1) / 1024)
