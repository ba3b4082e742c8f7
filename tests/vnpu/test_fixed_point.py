"""The fixed-point arithmetic against exact integers, and the output stages against LiteRT's reference kernels.

The trick of the stage proofs: an input at its zero point makes the accumulator equal the bias, so any int32 can be put
through the kernel, and the ones where two candidate formulas disagree are picked on purpose.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.vnpu import fixed_point as fp

pytest.importorskip("ai_edge_litert", reason="the oracle is LiteRT: pip install equivcheck[tflite]")
from vnpu.litert_ops import Tensor, constant, run_reference

INT32 = st.integers(-(2**31), 2**31 - 1)
INT32_MAX = 2**31 - 1
ACTIVATIONS = {"none": 0, "relu": 1, "relu_n1_to_1": 2, "relu6": 3}
UNIT = {"padding": 1, "strideW": 1, "strideH": 1, "dilationWFactor": 1, "dilationHFactor": 1}


def exact_requantise(x: int, m: int, shift: int) -> int:
    """gemmlowp's two definitions in unbounded integers: halves up, then halves away from zero."""
    x = (x << max(shift, 0)) + 2**31 & 0xFFFFFFFF
    y = ((x - 2**31) * m + 2**30) // 2**31
    right = max(-shift, 0)
    half = 2**right // 2
    return (y + half) >> right if y >= 0 else -((-y + half) >> right)


def single_rounding(x, m, shift):
    return (x * np.int64(m) + (1 << (30 - int(shift)))) >> (31 - int(shift))


@given(INT32, st.integers(2**30, INT32_MAX), st.integers(-31, 20))
def test_requantise_is_gemmlowps_double_rounding_for_every_int32(x, m, shift):
    assert fp.requantise(np.array([x], np.int32), m, shift)[0] == exact_requantise(x, m, shift)


@pytest.mark.parametrize("x", [-(2**31), -(2**31) + 1, -3, -2, -1, 0, 1, 2, 3, INT32_MAX - 1, INT32_MAX])
@pytest.mark.parametrize("m", [2**30, 2**30 + 1, INT32_MAX - 1, INT32_MAX, 0])
@pytest.mark.parametrize("shift", [-31, -30, -2, -1, 0, 1, 2, 7])
def test_requantise_does_not_overflow_at_the_ends(x, m, shift):
    assert fp.requantise(np.array([x], np.int32), m, shift)[0] == exact_requantise(x, m, shift)


@given(st.floats(1e-12, 1e6))
def test_the_multiplier_has_31_bits_of_the_real_one(real):
    m, shift = fp.quantize_multiplier(real)
    if real < 2.0**-32.5:
        assert (int(m), int(shift)) == (0, 0)
    elif real >= 2.0**-32:
        assert 2**30 <= m <= INT32_MAX
        assert abs(float(m) * 2.0 ** (int(shift) - 31) / real - 1) <= 2.0**-31


def test_a_mantissa_that_rounds_up_to_one_is_halved():
    m, shift = fp.quantize_multiplier([1 - 2.0**-40, 0.5, 0.0])
    assert m.tolist() == [2**30, 2**30, 0]
    assert shift.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ((2, 5, 33, 31), (5, 1, 1)),
        ((2, 33, 31, 5), (5,)),
        ((3, 4, 5), (3, 1, 5)),
        ((70_000,), ()),
        ((2, 40_000), (40_000,)),
        ((0, 4), (4,)),
        ((3, 70_000), (3, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_layout_blocks_and_accumulator_type_do_not_matter(shape, parameters, dtype):
    rng = np.random.default_rng(3)
    acc = rng.integers(-(2**20), 2**20, shape)
    m, shift = fp.quantize_multiplier(10.0 ** rng.uniform(-4, 0.5, parameters))
    bias = rng.integers(-1000, 1000, parameters)
    got = fp.output_codes(acc.astype(dtype), m, shift, -7, -128, 127, bias=bias, dtype=np.int8)
    left, right = np.maximum(shift, 0), np.maximum(-shift, 0)
    product = fp.saturating_rounding_doubling_high_mul((acc + bias) << left, m)
    want = np.clip(fp.rounding_divide_by_pot(product, right) - 7, -128, 127)
    assert got.dtype == np.int8
    assert got.shape == shape
    np.testing.assert_array_equal(got, want)


def test_halves_round_away_from_zero_and_just_below_does_not():
    below = np.nextafter(np.float32(0.5), np.float32(0))
    halves = np.array([0.5, -0.5, 1.5, -2.5, below, -below, 0.0], np.float32)
    assert fp.round_half_away(halves).tolist() == [1, -1, 2, -3, 0, 0, 0]


def bias_kernel(operator, dtype, acc, sx, sw, so, zo, per_channel):
    """`operator` of an all-zero-point input and weights: one channel an accumulator, each of them its bias."""
    count, zero = acc.size, 0 if dtype == np.int8 else 128
    scales = np.full(count, sw, np.float32) if per_channel else np.float32(sw)
    shapes = {
        "FULLY_CONNECTED": ((1, 1), (count, 1), (1, count), 0),
        "CONV_2D": ((1, 1, 1, 1), (count, 1, 1, 1), (1, 1, 1, count), 0),
        "DEPTHWISE_CONV_2D": ((1, 1, 1, count), (1, 1, 1, count), (1, 1, 1, count), 3),
    }
    x_shape, w_shape, out_shape, axis = shapes[operator]
    options = {} if operator == "FULLY_CONNECTED" else UNIT.copy()
    if operator == "DEPTHWISE_CONV_2D":
        options["depthMultiplier"] = 1
    inputs = [
        Tensor(np.full(x_shape, zero, dtype), sx, zero),
        constant(np.full(w_shape, zero, dtype), scales, zero, axis),
        constant(acc.astype(np.int32), np.float32(sx) * scales),
    ]
    return run_reference(operator, inputs, Tensor(np.empty(out_shape, dtype), so, zo), **options).reshape(-1)


def stage_codes(operator, dtype, acc, sx, sw, so, zo):
    low, high = fp.code_range(dtype)
    if operator == "FULLY_CONNECTED":
        return fp.fully_connected_codes(acc, sx, sw, so, zo, low, high)
    multiplier = fp.conv_multiplier if dtype == np.int8 else fp.product_multiplier
    return fp.output_codes(acc, *multiplier(sx, sw, so), zo, low, high)


def telling_accumulators(rng, sx, sw, so, low, high, zo):
    """Accumulators on which multiplier precision and rounding show, with the ends of int32 and ties among them."""
    real = float(np.float32(sx)) * float(np.float32(sw)) / float(np.float32(so))
    wide = np.round(rng.uniform(low - 5 - zo, high + 5 - zo, 50_000) / real)
    wide = wide[np.abs(wide) < INT32_MAX].astype(np.int64)
    in_double, in_single = fp.conv_multiplier(sx, sw, so), fp.product_multiplier(sx, sw, so)
    variants = [fp.requantise(wide, *in_double), fp.requantise(wide, *in_single)]
    if in_double[1] <= 0:
        variants.append(single_rounding(wide, *in_double))
    variants.append(np.rint(wide * real))
    differ = np.flatnonzero(np.any([v != variants[0] for v in variants], axis=0))
    ties = np.clip((rng.integers(-300, 300, 200) + 0.5) / real, -INT32_MAX, INT32_MAX).round().astype(np.int64)
    ends = np.array([-INT32_MAX - 1, -INT32_MAX, INT32_MAX - 1, INT32_MAX, 2**30, -(2**30), 0, 1, -1])
    anywhere = rng.integers(-(2**31), 2**31, 100)
    return np.concatenate([wide[rng.permutation(differ)[:300]], wide[:200], ties, ends, anywhere])


@pytest.mark.parametrize(
    ("operator", "dtype", "per_channel"),
    [
        (operator, dtype, per_channel)
        for operator in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
        for dtype, per_channel in ((np.int8, False), (np.int8, True), (np.uint8, False))
    ],
)
def test_the_output_stage_is_exact_on_the_accumulators_that_tell_formulas_apart(
    operator, dtype, per_channel, record_property
):
    rng = np.random.default_rng(20)
    low, high = fp.code_range(dtype)
    elements = different = 0
    for case in range(60):
        power = case % 3 == 0  # scales that are powers of two have exact ties
        sx, sw = (0.5, 0.25) if power else (float(np.float32(10 ** rng.uniform(-3, 0))) for _ in range(2))
        ratio = 2.0 ** int(rng.integers(-25, 4)) * (1 if power else rng.uniform(0.5, 1))
        so, zo = float(np.float32(sx * sw / ratio)), int(rng.integers(low, high + 1))
        acc = telling_accumulators(rng, sx, sw, so, low, high, zo)
        got = bias_kernel(operator, dtype, acc, sx, sw, so, zo, per_channel)
        different += np.count_nonzero(got != stage_codes(operator, dtype, acc, sx, sw, so, zo))
        elements += acc.size
    name = f"{operator} {np.dtype(dtype).name} {'per channel' if per_channel else 'per tensor'} stage"
    count(record_property, name, 60, elements, different)


def count(record_property, name, cases, elements, different):
    """The counts in the test report, and on stdout for `pytest -rP`; JSON strings survive xdist."""
    record_property("proof", json.dumps({"operator": name, "cases": cases, "elements": elements}))
    print(f"proved: {name}: {cases} cases, {elements} elements, {different} differ")
    assert different == 0
    assert elements > 1000


def scale(rng, low, high):
    return float(np.float32(10 ** rng.uniform(low, high)))


def codes_of(rng, shape, dtype):
    low, high = fp.code_range(dtype)
    codes = rng.integers(low, high + 1, shape).astype(dtype)
    codes.reshape(-1)[:2] = (low, high)[: codes.size]
    return codes


def windows(x, kernel, stride, dilation):
    """Valid windows of an NHWC array, (N, H, W, C, kh, kw)."""
    reach = [(k - 1) * dilation + 1 for k in kernel]
    view = np.lib.stride_tricks.sliding_window_view(x, reach, (1, 2))
    return view[:, ::stride, ::stride, :, ::dilation, ::dilation]


def whole_convolution(rng, dtype, depthwise, case):
    low, high = fp.code_range(dtype)
    kernel, stride, dilation = [int(k) for k in rng.integers(1, 4, 2)], int(rng.integers(1, 3)), int(rng.integers(1, 3))
    channels, units = int(rng.integers(1, 20)), int(rng.integers(1, 40))
    units = channels if depthwise else units
    x = codes_of(rng, (2, 9, 8, channels), dtype)
    w = codes_of(rng, (1, *kernel, channels) if depthwise else (units, *kernel, channels), dtype)
    zx, zw = (int(z) for z in rng.integers(low, high + 1, 2))
    zw = 0 if dtype == np.int8 else zw
    per_channel = dtype == np.int8 and case % 2 == 0
    sx, sw = scale(rng, -4, 1), (10 ** rng.uniform(-3, -1, units if per_channel else ())).astype(np.float32)
    bias = rng.integers(-5000, 5000, units).astype(np.int32)
    cut = windows(x.astype(np.int64) - zx, kernel, stride, dilation)
    centred = w.astype(np.int64) - zw
    acc = np.einsum("nhwcij,ijc->nhwc", cut, centred[0]) if depthwise else np.einsum("nhwcij,oijc->nhwo", cut, centred)
    so = float(np.float32(sx * float(np.mean(sw)) * np.abs(acc).max() / 100 * 10 ** rng.uniform(-1, 1)))
    zo, activation = int(rng.integers(low, high + 1)), list(ACTIVATIONS)[case % 4]
    bounds = fp.activation_range(activation, so, zo, dtype)
    multiplier = fp.conv_multiplier if dtype == np.int8 else fp.product_multiplier
    want = fp.output_codes(acc, *multiplier(sx, sw, so), zo, *bounds, bias=bias)
    steps = {"strideW": stride, "strideH": stride, "dilationWFactor": dilation, "dilationHFactor": dilation}
    options = UNIT | steps
    if depthwise:
        options["depthMultiplier"] = 1
    inputs = [Tensor(x, sx, zx), constant(w, sw, zw, 3 if depthwise else 0), constant(bias, np.float32(sx) * sw)]
    operator = "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D"
    out = Tensor(np.empty(acc.shape, dtype), so, zo)
    return want, run_reference(operator, inputs, out, fusedActivationFunction=ACTIVATIONS[activation], **options)


def whole_fully_connected(rng, dtype, case):
    low, high = fp.code_range(dtype)
    rows, inner, units = int(rng.choice([1, 2, 12])), int(rng.integers(2, 300)), int(rng.integers(1, 80))
    x, w = codes_of(rng, (rows, inner), dtype), codes_of(rng, (units, inner), dtype)
    zx, zw, zo = (int(z) for z in rng.integers(low, high + 1, 3))
    zw = 0 if dtype == np.int8 else zw
    per_channel = dtype == np.int8 and case % 2 == 0
    sx, sw = scale(rng, -4, 1), (10 ** rng.uniform(-3, -1, units if per_channel else ())).astype(np.float32)
    bias = rng.integers(-5000, 5000, units).astype(np.int32) if case % 3 else None
    acc = (x.astype(np.int64) - zx) @ (w.astype(np.int64) - zw).T
    so = float(np.float32(sx * float(np.mean(sw)) * np.abs(acc).max() / 100 * 10 ** rng.uniform(-1, 1)))
    activation = list(ACTIVATIONS)[case % 4]
    want = fp.fully_connected_codes(
        acc, sx, sw, so, zo, *fp.activation_range(activation, so, zo, dtype), bias=bias, dtype=dtype
    )
    inputs = [Tensor(x, sx, zx), constant(w, sw, zw), None if bias is None else constant(bias, np.float32(sx) * sw)]
    out = Tensor(np.empty(acc.shape, dtype), so, zo)
    return want, run_reference("FULLY_CONNECTED", inputs, out, fusedActivationFunction=ACTIVATIONS[activation])


def whole_batch_matmul(rng, dtype, case):
    inner = int(rng.integers(2, 64))
    x, y = codes_of(rng, (1, 200, inner), dtype), codes_of(rng, (1, 200, inner), dtype)
    zx, zy, zo = (int(z) for z in rng.integers(-128, 128, 3))
    sx, sy = scale(rng, -3, 0), scale(rng, -3, 0)
    acc = (x.astype(np.int64) - zx) @ (y.astype(np.int64) - zy).transpose(0, 2, 1)
    so = float(np.float32(sx * sy * acc.std() / 50))
    want = fp.output_codes(acc, *fp.product_multiplier(sx, sy, so), zo, -128, 127)
    out = Tensor(np.empty(acc.shape, dtype), so, zo)
    return want, run_reference("BATCH_MATMUL", [Tensor(x, sx, zx), Tensor(y, sy, zy)], out, adjY=True)


WHOLE = {
    "CONV_2D": lambda rng, dtype, case: whole_convolution(rng, dtype, False, case),
    "DEPTHWISE_CONV_2D": lambda rng, dtype, case: whole_convolution(rng, dtype, True, case),
    "FULLY_CONNECTED": whole_fully_connected,
    "BATCH_MATMUL": whole_batch_matmul,
}


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [(operator, dtype) for operator in WHOLE for dtype in (np.int8, np.uint8)][:-1],  # LiteRT has no uint8 BATCH_MATMUL
)
def test_a_whole_operator_gives_the_reference_kernels_codes(operator, dtype, record_property):
    rng = np.random.default_rng(21)
    elements = different = 0
    for case in range(60):
        want, got = WHOLE[operator](rng, dtype, case)
        different += np.count_nonzero(want != got)
        elements += want.size
    count(record_property, f"{operator} {np.dtype(dtype).name}", 60, elements, different)
