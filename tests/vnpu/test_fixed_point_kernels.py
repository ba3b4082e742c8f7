"""Every elementwise, pooling and resizing kernel against LiteRT's reference resolver: no code may differ.

Scales run over several decades, zero points over the whole range with its ends, and the codes are all 256 (all 65,536
pairs of them for binary operators) wherever that is feasible.
"""

import json

import numpy as np
import pytest

from equivcheck.vnpu import fixed_point as fp
from equivcheck.vnpu import tflite_kernels as kernels
from equivcheck.vnpu.ir import Codes, Operand, Softmax
from equivcheck.vnpu.kernels import Kernel
from equivcheck.vnpu.profiles import load_profile
from equivcheck.vnpu.tflite_softmax import softmax_codes

pytest.importorskip("ai_edge_litert", reason="the oracle is LiteRT: pip install equivcheck[tflite]")
from vnpu.litert_ops import Tensor, constant, run_reference


def scale(rng, low=-4, high=1):
    return float(np.float32(10 ** rng.uniform(low, high)))


def near(rng, value, low=-1.5, high=1.5):
    return float(np.float32(value * 10 ** rng.uniform(low, high)))


def zero_point(rng, dtype):
    low, high = fp.code_range(dtype)
    return int(rng.choice([low, high, (low + high + 1) // 2, rng.integers(low, high + 1)]))


def every_code(dtype):
    low, high = fp.code_range(dtype)
    return np.arange(low, high + 1).astype(dtype).reshape(2, 128)


def codes_of(rng, shape, dtype):
    low, high = fp.code_range(dtype)
    return rng.integers(low, high + 1, shape).astype(dtype)


def output(shape, dtype, so, zo):
    return Tensor(np.empty(shape, dtype), so, zo)


def binary(operator, function):
    def case(rng, dtype, index):
        a = np.broadcast_to(every_code(dtype).reshape(-1, 1), (256, 256)).copy()
        b = np.ascontiguousarray(a.T)
        if index % 3 == 0:  # broadcast
            a, b = a[:, :1].copy(), b[:1].copy()
        sa, za, zb, zo = scale(rng), *(zero_point(rng, dtype) for _ in range(3))
        sb = sa if index % 4 == 0 else near(rng, sa)
        so = near(rng, sa * sb, 0, 3) if operator == "MUL" else near(rng, max(sa, sb), -1, 1)
        activation = index % 3 * (index % 2)  # none, relu, relu_n1_to_1
        bounds = fp.activation_range(("none", "relu", "relu_n1_to_1")[activation], so, zo, dtype)
        want = function(a, b, sa, za, sb, zb, so, zo, *bounds)
        inputs = [Tensor(a, sa, za), Tensor(b, sb, zb)]
        got = run_reference(operator, inputs, output((256, 256), dtype, so, zo), fusedActivationFunction=activation)
        return want, got

    return case


def unary_parameters(rng, dtype, index, codes):
    sx, zx, zo = scale(rng), zero_point(rng, dtype), zero_point(rng, dtype)
    return codes, sx, zx, sx if index % 5 == 0 else near(rng, sx), zo


def relu(operator, activation):
    def case(rng, dtype, index):
        codes, sx, zx, so, zo = unary_parameters(rng, dtype, index, every_code(dtype))
        want = kernels.relu_codes(codes, sx, zx, so, zo, *fp.activation_range(activation, so, zo, dtype))
        return want, run_reference(operator, [Tensor(codes, sx, zx)], output(codes.shape, dtype, so, zo))

    return case


def rescale(mixed):
    def case(rng, dtype, index):
        codes, sx, zx, so, zo = unary_parameters(rng, dtype, index, codes_of(rng, (4, 256), dtype))
        target = {np.int8: np.uint8, np.uint8: np.int8}[dtype] if mixed else dtype
        if mixed:
            zo = zx + (128 if dtype == np.int8 else -128) if index % 10 == 0 else zero_point(rng, target)
        want = kernels.rescale_codes(codes, sx, zx, so, zo, *fp.code_range(target))
        return want, run_reference("QUANTIZE", [Tensor(codes, sx, zx)], output(codes.shape, target, so, zo))

    return case


def quantise(rng, dtype, index):
    scale_out, zero = scale(rng), zero_point(rng, dtype)
    x = rng.normal(0, 150 * scale_out, (3, 400)).astype(np.float32)
    x[0] = (rng.integers(-300, 300, 400) + 0.5).astype(np.float32) * np.float32(scale_out)
    want = kernels.quantise_float(x, scale_out, zero, *fp.code_range(dtype))
    return want, run_reference("QUANTIZE", [Tensor(x)], output(x.shape, dtype, scale_out, zero))


def dequantise(rng, dtype, index):
    codes, sx, zx = every_code(dtype), scale(rng), zero_point(rng, dtype)
    got = run_reference("DEQUANTIZE", [Tensor(codes, sx, zx)], Tensor(np.empty(codes.shape, np.float32)))
    return kernels.dequantise(codes, sx, zx).view(np.int32), got.view(np.int32)


def leaky_relu(rng, dtype, index):
    codes, sx, zx, so, zo = unary_parameters(rng, dtype, index, every_code(dtype))
    alpha = float(np.float32(rng.uniform(-0.5, 1.5)))
    want = kernels.leaky_relu_codes(codes, alpha, sx, zx, so, zo, *fp.code_range(dtype))
    return want, run_reference("LEAKY_RELU", [Tensor(codes, sx, zx)], output(codes.shape, dtype, so, zo), alpha=alpha)


def prelu(rng, dtype, index):
    codes, sx, zx, so, zo = unary_parameters(rng, dtype, index, codes_of(rng, (1, 9, 7, 32), dtype))
    slopes, sa, za = codes_of(rng, (1, 1, 32), dtype), scale(rng, -3, 0), zero_point(rng, dtype)
    want = kernels.prelu_codes(codes, slopes, sx, zx, sa, za, so, zo, *fp.code_range(dtype))
    inputs = [Tensor(codes, sx, zx), constant(slopes, sa, za)]
    return want, run_reference("PRELU", inputs, output(codes.shape, dtype, so, zo))


def hard_swish(rng, dtype, index):
    codes, sx, zx, so, zo = unary_parameters(rng, dtype, index, every_code(dtype))
    want = kernels.hard_swish_codes(codes, sx, zx, so, zo, *fp.code_range(dtype))
    return want, run_reference("HARD_SWISH", [Tensor(codes, sx, zx)], output(codes.shape, dtype, so, zo))


def logistic(rng, dtype, index):
    codes, sx, zx, zo = every_code(dtype), scale(rng, -3, 0.5), zero_point(rng, dtype), fp.code_range(dtype)[0]
    want = kernels.logistic_codes(codes, sx, zx, 1 / 256, zo)
    return want, run_reference("LOGISTIC", [Tensor(codes, sx, zx)], output(codes.shape, dtype, 1 / 256, zo))


def tanh(rng, dtype, index):
    codes, sx, zx, zo = every_code(dtype), scale(rng, -3, 0.5), zero_point(rng, dtype), zero_point(rng, dtype)
    so = 1 / 128 if index % 2 else near(rng, 1 / 128, -0.5, 0.5)
    want = kernels.tanh_codes(codes, sx, zx, so, zo)
    return want, run_reference("TANH", [Tensor(codes, sx, zx)], output(codes.shape, dtype, so, zo))


def softmax(rng, dtype, index):
    low, high = fp.code_range(dtype)
    depth, beta = int(rng.choice([1, 2, 10, 100, 400])), float(rng.choice([1.0, 1.0, 0.5, 2.5]))
    codes = codes_of(rng, (20, depth), dtype)
    if index % 2:  # rows that are not dominated by one code
        codes = np.clip(rng.normal((low + high) / 2, 10, codes.shape), low, high).astype(dtype)
    sx = scale(rng, -3, 1)
    want = softmax_codes(codes, sx, beta)
    inputs = [Tensor(codes, sx, zero_point(rng, dtype))]
    return want, run_reference("SOFTMAX", inputs, output(codes.shape, dtype, 1 / 256, low), beta=beta)


def average_pool(rng, dtype, index):
    """SAME padding as well: only the elements inside the image count."""
    height, width = (int(n) for n in rng.integers(1, 6, 2))
    x, sx, zx = codes_of(rng, (2, height + 5, width + 4, 12), dtype), scale(rng), zero_point(rng, dtype)
    activation = ("none", "relu", "relu6")[index % 3]
    inside = np.ones(x.shape[1:3], np.int64)
    pad = [((n - 1) // 2, n - 1 - (n - 1) // 2) if index % 2 else (0, 0) for n in (height, width)]
    inside, padded = np.pad(inside, pad), np.pad(x.astype(np.int64), [(0, 0), *pad, (0, 0)])
    total = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (1, 2)).sum((-1, -2))
    counts = np.lib.stride_tricks.sliding_window_view(inside, (height, width)).sum((-1, -2))[..., None]
    want = kernels.average_pool_codes(total, counts, *fp.activation_range(activation, sx, zx, dtype))
    options = {"padding": 0 if index % 2 else 1, "filterWidth": width, "filterHeight": height}
    options |= {"strideW": 1, "strideH": 1, "fusedActivationFunction": {"none": 0, "relu": 1, "relu6": 3}[activation]}
    out = output(total.shape, dtype, sx, zx)
    return want, run_reference("AVERAGE_POOL_2D", [Tensor(x, sx, zx)], out, **options)


def mean(axes, keep_dims):
    def case(rng, dtype, index):
        height, width = (int(n) for n in rng.integers(1, 20, 2))
        x = codes_of(rng, (3, height, width, 40), dtype)
        sx, zx, zo = scale(rng), zero_point(rng, dtype), zero_point(rng, dtype)
        so = near(rng, sx, -1, 0.5)
        if index % 3 == 0:
            so, zo = sx, zx
        total = x.astype(np.int64).sum(axes, keepdims=keep_dims)
        want = kernels.mean_codes(total, x.size // total.size, sx, zx, so, zo, *fp.code_range(dtype))
        inputs = [Tensor(x, sx, zx), constant(np.array(axes, np.int32))]
        return want, run_reference("MEAN", inputs, output(total.shape, dtype, so, zo), keepDims=keep_dims)

    return case


def resize(operator, function):
    def case(rng, dtype, index):
        x = codes_of(rng, (1, *rng.integers(1, 30, 2), 3), dtype)
        size = tuple(int(n) for n in rng.integers(1, 50, 2))
        corners, half = ((False, False), (True, False), (False, True))[index % 3]
        sx, zx = scale(rng), zero_point(rng, dtype)
        want = function(x, size, (1, 2), align_corners=corners, half_pixel_centers=half)
        inputs = [Tensor(x, sx, zx), constant(np.array(size, np.int32))]
        out = output((1, *size, 3), dtype, sx, zx)
        return want, run_reference(operator, inputs, out, alignCorners=corners, halfPixelCenters=half)

    return case


def concatenation(rng, dtype, index):
    """Unequal scales exist for uint8 alone; int8 copies."""
    parts = [codes_of(rng, (4, 256), dtype) for _ in range(2)]
    so, zo = scale(rng), zero_point(rng, dtype)
    scales, zeros = [so, so], [zo, zo]
    if dtype == np.uint8 and index % 4:
        scales, zeros = [near(rng, so) for _ in parts], [zero_point(rng, dtype) for _ in parts]
    want = [kernels.concat_codes(p, s, z, so, zo) for p, s, z in zip(parts, scales, zeros, strict=True)]
    inputs = [Tensor(p, s, z) for p, s, z in zip(parts, scales, zeros, strict=True)]
    return np.concatenate(want, 1), run_reference("CONCATENATION", inputs, output((4, 512), dtype, so, zo), axis=1)


def pad(rng, dtype, index):
    x, sx, zx = codes_of(rng, (1, 5, 6, 8), dtype), scale(rng), zero_point(rng, dtype)
    pads = [(0, 0), *(tuple(int(n) for n in rng.integers(0, 4, 2)) for _ in range(2)), (0, 0)]
    want = kernels.pad_codes(x, pads, zx)
    inputs = [Tensor(x, sx, zx), constant(np.array(pads, np.int32))]
    return want, run_reference("PAD", inputs, output(want.shape, dtype, sx, zx))


CASES = {
    "ADD": binary("ADD", kernels.add_codes),
    "SUB": binary("SUB", kernels.sub_codes),
    "MUL": binary("MUL", kernels.mul_codes),
    "QUANTIZE codes": rescale(mixed=False),
    "QUANTIZE to the other signedness": rescale(mixed=True),
    "QUANTIZE float": quantise,
    "DEQUANTIZE": dequantise,
    "RELU": relu("RELU", "relu"),
    "RELU6": relu("RELU6", "relu6"),
    "RELU_N1_TO_1": relu("RELU_N1_TO_1", "relu_n1_to_1"),
    "LEAKY_RELU": leaky_relu,
    "PRELU": prelu,
    "HARD_SWISH": hard_swish,
    "LOGISTIC": logistic,
    "TANH": tanh,
    "SOFTMAX": softmax,
    "AVERAGE_POOL_2D": average_pool,
    "MEAN over H and W": mean((1, 2), keep_dims=True),
    "MEAN over H and W, dropped": mean((1, 2), keep_dims=False),
    "MEAN over W": mean((2,), keep_dims=True),
    "MEAN over H, W and C": mean((1, 2, 3), keep_dims=False),
    "RESIZE_BILINEAR": resize("RESIZE_BILINEAR", kernels.resize_bilinear_codes),
    "RESIZE_NEAREST_NEIGHBOR": resize("RESIZE_NEAREST_NEIGHBOR", kernels.resize_nearest_codes),
    "CONCATENATION": concatenation,
    "PAD": pad,
}
REPEATS = 90


@pytest.mark.parametrize("dtype", [np.int8, np.uint8], ids=["int8", "uint8"])
@pytest.mark.parametrize("operator", CASES)
def test_no_code_differs_from_litert(operator, dtype, record_property):
    rng = np.random.default_rng(7)
    cases = elements = different = 0
    for index in range(REPEATS):
        want, got = CASES[operator](rng, dtype, index)
        cases, elements = cases + 1, elements + want.size
        different += np.count_nonzero(want != got)
    name = f"{operator} {np.dtype(dtype).name}"
    record_property("proof", json.dumps({"operator": name, "cases": cases, "elements": elements}))
    print(f"proved: {name}: {cases} cases, {elements} elements, {different} differ")
    assert different == 0


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_tables_and_element_by_element_evaluation_agree(dtype):
    rng = np.random.default_rng(1)
    codes = codes_of(rng, (40, 50), dtype)
    low, high = fp.code_range(dtype)
    arguments = (0.11, 5, 0.07, 9, low, high)
    np.testing.assert_array_equal(
        kernels.leaky_relu_codes(codes, 0.3, *arguments),
        kernels.leaky_relu_codes(codes.astype(np.int32), 0.3, *arguments),
    )


def test_the_exponential_tables_end_where_the_kernel_stops():
    """Differences whose fixed-point form would overflow count as nothing: at scale 1 those beyond 31."""
    row = np.array([[127, 127 - 31, 127 - 32, -128]], np.int8)
    assert softmax_codes(row, 1.0).tolist() == [[127, -128, -128, -128]]


@pytest.mark.parametrize("depth", [2, 10, 100])
def test_softmax_to_sixteen_bits_gives_the_codes_of_the_reference_kernel(depth):
    rng = np.random.default_rng(depth)
    codes = codes_of(rng, (50, depth), np.int8)
    for sx in (0.02, 0.08, 0.2):
        got = run_reference(
            "SOFTMAX", [Tensor(codes, sx, 3)], output(codes.shape, np.int16, 2.0**-16, -(1 << 15)), beta=1.0
        )
        np.testing.assert_array_equal(softmax_codes(codes, sx, wide_output=True), got)


def test_a_softmax_of_another_scale_rounds_once_and_reaches_probability_one():
    """By way of the 8-bit output of scale 1/256, 254.999 became 254: half a code beyond rounding."""
    op = Softmax("Softmax", ("y",), Operand("x", Codes(0.0828, 148, False)), -1, False, Codes(1 / 255, 0, False))
    kernel = Kernel(op, load_profile("tflite-reference"))
    x = np.random.default_rng(0).integers(0, 256, (2000, 5)).astype(np.uint8)
    distance = np.abs(kernel.run({"x": x})["y"] - np.clip(kernel.real({"x": x})["y"], 0, 255))
    assert distance.max() < 0.51
