"""Profile `tflite-reference`: ONNX operators as lowered, against LiteRT's reference kernels on the same integers.

The kernels themselves are proved over many more codes in test_fixed_point*.py; here it is the way from the ONNX
operator to them: layouts, clamps, which kernel, which parameters.
"""

import numpy as np
import pytest

from equivcheck.vnpu.ir import Clamp, Codes, Operand, Pool
from equivcheck.vnpu.kernels import Kernel
from equivcheck.vnpu.profiles import load_profile
from vnpu.cases import LOWEST, random_q
from vnpu.graphs import Q, Weight, compiled, quantised_model, random_codes

pytest.importorskip("ai_edge_litert", reason="the oracle is LiteRT: pip install equivcheck[tflite]")
from vnpu.litert_ops import Tensor, constant, run_reference

SEEDS = range(12)
NHWC, NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
RELU, RELU6 = 1, 3


def tensor(codes, q):
    return Tensor(np.ascontiguousarray(codes), np.float32(q.scale), q.zero)


def made_by(built, rng):
    """The program's codes: of its inputs, and of its result."""
    program = compiled(built.graph, "tflite-reference")
    feeds = {name: q.float_of(random_codes(rng, q, shape)) for name, q, shape in built.inputs}
    found = program.run(feeds)
    return [found[f"{name}_q"] for name, _, _ in built.inputs], found[built.outputs[0][0]]


def empty(shape, q):
    return Tensor(np.empty(shape, q.dtype), np.float32(q.scale), q.zero)


def channels_last(x):
    return np.ascontiguousarray(x.transpose(NHWC))


def convolution(rng, dtype, depthwise=False, activation=0):
    """(built, expected) of Conv, per channel for int8 and per tensor for uint8, as TFLite has them."""
    channels = int(rng.integers(1, 9))
    made = channels if depthwise else int(rng.integers(1, 9))
    k, stride, dilation = int(rng.integers(1, 4)), int(rng.integers(1, 3)), 1
    size = 4 * stride + k  # VALID padding: TFLite has no free pads
    x, out = random_q(rng, dtype), random_q(rng, dtype, 0.02, 1)
    if activation:
        out = Q(out.scale if activation == RELU else 6 / 255 * float(rng.uniform(0.5, 2)), LOWEST[dtype], dtype)
    scale = rng.uniform(0.001, 0.02, made if dtype == "int8" else 1).astype(np.float32)
    w = rng.integers(-127, 128, (made, 1 if depthwise else channels, k, k)) + (0 if dtype == "int8" else 128)
    w = w.astype(dtype)
    zero = 0 if dtype == "int8" else 128
    bias_scale = np.float32(x.scale) * scale
    bias = rng.integers(-5000, 5000, made).astype(np.int32)
    per_channel = dtype == "int8"
    inputs = [
        "x",
        Weight(w, scale if per_channel else scale[0], zero, 0 if per_channel else None),
        Weight(bias, bias_scale if per_channel else bias_scale[0], 0, 0 if per_channel else None),
    ]
    attributes = {"group": channels if depthwise else 1, "strides": [stride, stride]}
    nodes = [("Conv", inputs, ["y"], attributes)]
    if activation:
        clip = (
            ("Relu", ["y"], ["z"], {})
            if activation == RELU
            else ("Clip", ["y", np.float32(0), np.float32(6)], ["z"], {})
        )
        nodes.append(clip)
    built = quantised_model(nodes, {nodes[-1][2][0]: out}, {"x": (2, channels, size, size)}, {"x": x})
    (codes,), found = made_by(built, rng)
    weights = w.transpose(1, 2, 3, 0) if depthwise else w.transpose(0, 2, 3, 1)
    axis = 3 if depthwise else 0
    operator = "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D"
    options = {"depthMultiplier": 1} if depthwise else {}
    expected = run_reference(
        operator,
        [
            tensor(channels_last(codes), x),
            constant(np.ascontiguousarray(weights), scale, zero, axis),
            constant(bias, bias_scale),
        ],
        empty(channels_last(found).shape, out),
        padding=1,
        strideW=stride,
        strideH=stride,
        dilationWFactor=dilation,
        dilationHFactor=dilation,
        fusedActivationFunction=activation,
        **options,
    )
    return found, expected.transpose(NCHW)


def fully_connected(rng, dtype):
    terms, columns = int(rng.integers(1, 40)), int(rng.integers(1, 20))
    x, out = random_q(rng, dtype), random_q(rng, dtype, 0.02, 1)
    scale = np.float32(rng.uniform(0.001, 0.02))
    zero = 0 if dtype == "int8" else 128
    w = (rng.integers(-127, 128, (columns, terms)) + zero).astype(dtype)
    bias, bias_scale = rng.integers(-5000, 5000, columns).astype(np.int32), np.float32(x.scale) * scale
    nodes = [("Gemm", ["x", Weight(w, scale, zero), Weight(bias, bias_scale)], ["y"], {"transB": 1})]
    built = quantised_model(nodes, {"y": out}, {"x": (5, terms)}, {"x": x})
    (codes,), found = made_by(built, rng)
    inputs = [tensor(codes, x), constant(w, scale, zero), constant(bias, bias_scale)]
    return found, run_reference("FULLY_CONNECTED", inputs, empty(found.shape, out))


def batch_matmul(rng, dtype):
    """Two activations: BATCH_MATMUL. uint8 has no such kernel there."""
    terms = int(rng.integers(1, 40))
    a, b, out = random_q(rng, "int8"), random_q(rng, "int8"), random_q(rng, "int8", 0.02, 1)
    shapes = {"a": (2, 5, terms), "b": (2, terms, 4)}
    built = quantised_model([("MatMul", ["a", "b"], ["y"], {})], {"y": out}, shapes, {"a": a, "b": b})
    (first, second), found = made_by(built, rng)
    return found, run_reference("BATCH_MATMUL", [tensor(first, a), tensor(second, b)], empty(found.shape, out))


def binary(kind, operator):
    def make(rng, dtype):
        a, b = random_q(rng, dtype), random_q(rng, dtype)
        out = random_q(rng, dtype, 0.05, 0.2)
        activation = RELU if rng.random() < 0.3 else 0
        nodes = [(kind, ["a", "b"], ["y"], {})] + ([("Relu", ["y"], ["z"], {})] if activation else [])
        shapes = {"a": (2, 37, 40), "b": (2, 37, 40) if rng.random() < 0.5 else (2, 37, 1)}
        built = quantised_model(nodes, {nodes[-1][2][0]: out}, shapes, {"a": a, "b": b})
        (first, second), found = made_by(built, rng)
        inputs = [tensor(first, a), tensor(second, b)]
        return found, run_reference(operator, inputs, empty(found.shape, out), fusedActivationFunction=activation)

    return make


def unary(kind, operator, attributes=None, options=None, pinned=None, extra=(), shape=(7, 60)):
    def make(rng, dtype):
        x = random_q(rng, dtype, 0.01, 0.2)
        out = random_q(rng, dtype, 0.02, 0.2)
        if pinned:
            out = Q(pinned[0], LOWEST[dtype] + pinned[1], dtype)
        built = quantised_model([(kind, ["x", *extra], ["y"], attributes or {})], {"y": out}, {"x": shape}, {"x": x})
        (codes,), found = made_by(built, rng)
        return found, run_reference(operator, [tensor(codes, x)], empty(found.shape, out), **(options or {}))

    return make


def requantise(rng, dtype):
    x, out = random_q(rng, dtype), random_q(rng, dtype)
    built = quantised_model([], {"x": out}, {"x": (7, 60)}, {"x": x})
    (codes,), found = made_by(built, rng)
    return found, run_reference("QUANTIZE", [tensor(codes, x)], empty(found.shape, out))


def mean(kind):
    def make(rng, dtype):
        x, out = random_q(rng, dtype), random_q(rng, dtype, 1e-3, 0.1)
        shape = (2, 9, int(rng.integers(2, 9)), int(rng.integers(2, 9)))
        extra = [np.array([2, 3])] if kind == "ReduceMean" else []
        built = quantised_model([(kind, ["x", *extra], ["y"], {})], {"y": out}, {"x": shape}, {"x": x})
        (codes,), found = made_by(built, rng)
        axes = constant(np.array([1, 2], np.int32))
        expected = run_reference(
            "MEAN", [tensor(channels_last(codes), x), axes], empty((2, 1, 1, 9), out), keepDims=True
        )
        return found, expected.transpose(NCHW)

    return make


def pool(kind, operator):
    def make(rng, dtype):
        x = random_q(rng, dtype)
        k, stride = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        same = bool(rng.random() < 0.5)
        attributes = {"kernel_shape": [k, k], "strides": [stride, stride]}
        if same:
            attributes["auto_pad"] = "SAME_UPPER"
        built = quantised_model([(kind, ["x"], ["y"], attributes)], {"y": x}, {"x": (2, 5, 10, 11)}, {"x": x})
        (codes,), found = made_by(built, rng)
        options = {
            "padding": 0 if same else 1,
            "strideW": stride,
            "strideH": stride,
            "filterWidth": k,
            "filterHeight": k,
        }
        expected = run_reference(
            operator, [tensor(channels_last(codes), x)], empty(channels_last(found).shape, x), **options
        )
        return found, expected.transpose(NCHW)

    return make


def concat(rng, dtype):
    x = random_q(rng, dtype)
    shapes = {"a": (2, 3, 40), "b": (2, 4, 40)}
    built = quantised_model([("Concat", ["a", "b"], ["y"], {"axis": 1})], {"y": x}, shapes, {"a": x, "b": x})
    codes, found = made_by(built, rng)
    return found, run_reference("CONCATENATION", [tensor(c, x) for c in codes], empty(found.shape, x), axis=1)


def transpose_conv(rng, dtype):
    """VALID padding; weights of ONNX (C, M, kh, kw) are (M, kh, kw, C) there."""
    channels, made, k, stride = (int(rng.integers(low, high)) for low, high in ((1, 7), (1, 7), (1, 4), (1, 3)))
    x, out = random_q(rng, "int8"), random_q(rng, "int8", 0.02, 1)
    scale = rng.uniform(0.001, 0.02, made).astype(np.float32)
    w = rng.integers(-127, 128, (channels, made, k, k)).astype(np.int8)
    bias, bias_scale = rng.integers(-5000, 5000, made).astype(np.int32), np.float32(x.scale) * scale
    inputs = ["x", Weight(w, scale, 0, 1), Weight(bias, bias_scale, 0, 0)]
    nodes = [("ConvTranspose", inputs, ["y"], {"strides": [stride, stride]})]
    built = quantised_model(nodes, {"y": out}, {"x": (1, channels, 5, 6)}, {"x": x})
    (codes,), found = made_by(built, rng)
    expected = run_reference(
        "TRANSPOSE_CONV",
        [
            constant(np.asarray(channels_last(found).shape, np.int32)),
            constant(np.ascontiguousarray(w.transpose(1, 2, 3, 0)), scale, 0, 0),
            tensor(channels_last(codes), x),
            constant(bias, bias_scale),
        ],
        empty(channels_last(found).shape, out),
        padding=1,
        strideW=stride,
        strideH=stride,
    )
    return found, expected.transpose(NCHW)


def reduction(kind, operator):
    def make(rng, dtype):
        x = out = random_q(rng, dtype)
        nodes = [(kind, ["x", np.array([2, 3])], ["y"], {})]
        built = quantised_model(nodes, {"y": out}, {"x": (2, 9, 5, 6)}, {"x": x})
        (codes,), found = made_by(built, rng)
        axes = constant(np.array([1, 2], np.int32))
        inputs = [tensor(channels_last(codes), x), axes]
        expected = run_reference(operator, inputs, empty((2, 1, 1, 9), out), keepDims=True)
        return found, expected.transpose(NCHW)

    return make


def alike(kind, operator):
    """Two values of one quantisation, as MAXIMUM and MINIMUM want them."""

    def make(rng, dtype):
        q = random_q(rng, dtype)
        shapes = {"a": (2, 37, 40), "b": (2, 37, 1)}
        built = quantised_model([(kind, ["a", "b"], ["y"], {})], {"y": q}, shapes, {"a": q, "b": q})
        codes, found = made_by(built, rng)
        return found, run_reference(operator, [tensor(c, q) for c in codes], empty(found.shape, q))

    return make


def prelu(rng, dtype):
    x, out = random_q(rng, dtype, 0.01, 0.2), random_q(rng, dtype, 0.02, 0.2)
    scale, zero = float(rng.uniform(0.001, 0.02)), int(rng.integers(LOWEST[dtype], LOWEST[dtype] + 256))
    slope = (rng.integers(0, 256, (9, 1, 1)) + LOWEST[dtype]).astype(dtype)
    nodes = [("PRelu", ["x", Weight(slope, scale, zero)], ["y"], {})]
    built = quantised_model(nodes, {"y": out}, {"x": (2, 9, 5, 6)}, {"x": x})
    (codes,), found = made_by(built, rng)
    inputs = [tensor(channels_last(codes), x), constant(slope.reshape(1, 1, 9), np.float32(scale), zero)]
    return found, run_reference("PRELU", inputs, empty(channels_last(found).shape, out)).transpose(NCHW)


def resize(mode, operator):
    """The coordinates TFLite has. The nearest mode beside each is the one that rounds as TFLite does."""

    def make(rng, dtype):
        x, size = random_q(rng, dtype), tuple(int(v) for v in rng.integers(1, 20, 2))
        coordinates, nearest = [
            ("asymmetric", "floor"), ("half_pixel", "round_prefer_ceil"), ("align_corners", "round_prefer_ceil"),
        ][int(rng.integers(3))]  # fmt: skip
        attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
        inputs = ["x", np.zeros(0, np.float32), np.zeros(0, np.float32), np.array([2, 3, *size])]
        built = quantised_model([("Resize", inputs, ["y"], attributes)], {"y": x}, {"x": (2, 3, 9, 10)}, {"x": x})
        (codes,), found = made_by(built, rng)
        expected = run_reference(
            operator,
            [tensor(channels_last(codes), x), constant(np.asarray(size, np.int32))],
            empty(channels_last(found).shape, x),
            alignCorners=coordinates == "align_corners",
            halfPixelCenters=coordinates == "half_pixel",
        )
        return found, expected.transpose(NCHW)

    return make


def moved(kind, operator, attributes, shape, extra=(), inputs=(), channels=False, **options):
    """Data movement; `channels` where TFLite's form of it is channels last."""

    def make(rng, dtype):
        x = random_q(rng, dtype)
        built = quantised_model([(kind, ["x", *extra], ["y"], attributes)], {"y": x}, {"x": shape}, {"x": x})
        (codes,), found = made_by(built, rng)
        fed, result = (channels_last(codes), channels_last(found)) if channels else (codes, found)
        expected = run_reference(operator, [tensor(fed, x), *inputs], empty(result.shape, x), **options)
        return found, expected.transpose(NCHW) if channels else expected

    return make


def ints(*values):
    return constant(np.asarray(values, np.int32))


CASES = {
    "Conv": convolution,
    "Conv depthwise": lambda rng, dtype: convolution(rng, dtype, depthwise=True),
    "Conv Relu": lambda rng, dtype: convolution(rng, dtype, activation=RELU),
    "Conv Clip": lambda rng, dtype: convolution(rng, dtype, activation=RELU6),
    "Gemm": fully_connected,
    "MatMul": batch_matmul,
    "Add": binary("Add", "ADD"),
    "Sub": binary("Sub", "SUB"),
    "Mul": binary("Mul", "MUL"),
    "AveragePool": pool("AveragePool", "AVERAGE_POOL_2D"),
    "MaxPool": pool("MaxPool", "MAX_POOL_2D"),
    "GlobalAveragePool": mean("GlobalAveragePool"),
    "ReduceMean": mean("ReduceMean"),
    "Softmax": unary("Softmax", "SOFTMAX", {"axis": -1}, {"beta": 1.0}, (1 / 256, 0)),
    "Sigmoid": unary("Sigmoid", "LOGISTIC", pinned=(1 / 256, 0)),
    "Tanh": unary("Tanh", "TANH", pinned=(1 / 128, 128)),
    "Relu": unary("Relu", "RELU"),
    "Clip": unary("Clip", "RELU6", extra=(np.float32(0), np.float32(6))),
    "Clip -1": unary("Clip", "RELU_N1_TO_1", extra=(np.float32(-1), np.float32(1))),
    "LeakyRelu": unary("LeakyRelu", "LEAKY_RELU", {"alpha": 0.1}, {"alpha": 0.1}),
    "HardSwish": unary("HardSwish", "HARD_SWISH"),
    "QuantizeLinear": requantise,
    "Concat": concat,
    "ConvTranspose": transpose_conv,
    "ReduceMax": reduction("ReduceMax", "REDUCE_MAX"),
    "ReduceMin": reduction("ReduceMin", "REDUCE_MIN"),
    "Max": alike("Max", "MAXIMUM"),
    "Min": alike("Min", "MINIMUM"),
    "PRelu": prelu,
    "Resize": resize("linear", "RESIZE_BILINEAR"),
    "Resize nearest": resize("nearest", "RESIZE_NEAREST_NEIGHBOR"),
    "Exp": unary("Exp", "EXP"),
    "Gelu": unary("Gelu", "GELU", {}, {"approximate": False}),
    "Pad": moved(
        "Pad",
        "PAD",
        {},
        (3, 4, 5),
        (np.array([0, 1, 0, 2, 0, 1]),),
        (constant(np.array([[0, 2], [1, 0], [0, 1]], np.int32)),),
    ),
    "DepthToSpace": moved("DepthToSpace", "DEPTH_TO_SPACE", {"blocksize": 2}, (2, 8, 3, 5), channels=True, blockSize=2),
    "SpaceToDepth": moved("SpaceToDepth", "SPACE_TO_DEPTH", {"blocksize": 2}, (2, 3, 6, 4), channels=True, blockSize=2),
    "Transpose": moved("Transpose", "TRANSPOSE", {"perm": [0, 2, 3, 1]}, (2, 3, 6, 4), (), (ints(0, 2, 3, 1),)),
    "Gather": moved("Gather", "GATHER", {"axis": 1}, (2, 5, 6), (np.array([3, 0, 4]),), (ints(3, 0, 4),), axis=1),
    "Slice": moved("Slice", "SLICE", {}, (5, 6), (np.array([1, 2]), np.array([4, 6])), (ints(1, 2), ints(3, 4))),
    "Reshape": moved("Reshape", "RESHAPE", {}, (5, 6), (np.array([3, 10]),), (ints(3, 10),)),
}
INT8_ONLY = {"ConvTranspose", "Exp"}


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("case", CASES)
def test_an_operator_gives_the_codes_of_the_reference_kernel(case, dtype):
    if case in INT8_ONLY and dtype == "uint8":
        dtype = "int8"  # TFLite has no uint8 kernel, or another one
    for seed in SEEDS:
        found, expected = CASES[case](np.random.default_rng(seed), dtype)
        np.testing.assert_array_equal(found, expected)


def test_every_proof_of_the_profile_has_its_cases():
    proved = {name for name, proof in load_profile("tflite-reference").proofs.items() if proof.proved}
    assert proved == {case.split()[0] for case in CASES}


@pytest.mark.parametrize("ratio", [1.01, 1.5, 3.0])
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 1, 1, 1)])
def test_a_pool_into_another_scale_rounds_once(ratio: float, pads: tuple[int, ...]) -> None:
    """The limit of pools is 0.30 LSB; pooling in the input's scale and requantising was up to 0.83 beyond rounding."""
    x, out = Codes(float(np.float32(0.05 * ratio)), 3, True), Codes(float(np.float32(0.05)), -5, True)
    op = Pool(
        "AveragePool", ("y",), Operand("x", x), (3, 3), (1, 1), pads, (1, 1), False, False, "NOTSET", Clamp(), out
    )
    kernel = Kernel(op, load_profile("tflite-reference"))
    codes = np.random.default_rng(0).integers(-60, 60, (1, 8, 32, 32)).astype(np.int8)
    real = np.clip(kernel.real({"x": codes})["y"], -128, 127)
    assert np.max(np.abs(kernel.run({"x": codes})["y"] - real)) <= 0.5 + 0.30
