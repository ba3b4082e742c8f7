"""Sums are exact: whatever the shapes, strides, pads, dilations, groups and zero points, against int64 loops of numpy."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equivcheck.vnpu.accumulate import EXACT_FLOAT32, Accumulator
from equivcheck.vnpu.ir import Accumulate, Clamp, Codes, Operand

OUT = Codes(1.0, 0, True)


def convolution(x, w, strides, pads, dilations, group):
    """int64 sums by the definition: out[m, o] = sum over c, k of x[c, o * stride + k * dilation - pad] * w[m, c, k]."""
    rank = w.ndim - 2
    padded = np.pad(x, [(0, 0), (0, 0), *((pads[k], pads[k + rank]) for k in range(rank))])
    kernel = w.shape[2:]
    out = [(padded.shape[2 + k] - dilations[k] * (kernel[k] - 1) - 1) // strides[k] + 1 for k in range(rank)]
    per = w.shape[0] // group
    total = np.zeros((x.shape[0], w.shape[0], *out), np.int64)
    for offsets in product(*map(range, kernel)):
        cut = tuple(
            slice(o * d, o * d + (n - 1) * s + 1, s)
            for o, d, n, s in zip(offsets, dilations, out, strides, strict=True)
        )
        window = padded[(slice(None), slice(None), *cut)]
        for g in range(group):
            inside = window[:, g * w.shape[1] : (g + 1) * w.shape[1]]
            taps = w[(slice(g * per, (g + 1) * per), slice(None), *offsets)]
            total[:, g * per : (g + 1) * per] += np.einsum("mc,nc...->nm...", taps, inside)
    return total


def op_of(kind, x_codes, weight, attributes=None):
    scale = np.asarray(1.0)
    return Accumulate(kind, ("y",), Operand("x", x_codes), weight, scale, None, scale, attributes or {}, Clamp(), OUT)


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 1, 2, 5]))
    channels = draw(st.integers(1, 3)) * group
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    dilations = [draw(st.integers(1, 2)) for _ in range(rank)]
    sizes = [draw(st.integers(d * (k - 1) + 1, d * (k - 1) + 5)) for k, d in zip(kernel, dilations, strict=True)]
    return {
        "shape": (draw(st.integers(1, 2)), channels, *sizes),
        "weights": (draw(st.integers(1, 3)) * group, channels // group, *kernel),
        "strides": [draw(st.integers(1, 2)) for _ in range(rank)],
        "pads": [draw(st.integers(0, 2)) for _ in range(2 * rank)],
        "dilations": dilations,
        "group": group,
        "signed": draw(st.booleans()),
        "zero": draw(st.integers(0, 255)),
        "weight_zero": draw(st.sampled_from([0, 0, -128, 127, 128])),
        "extreme": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=150, deadline=None)
@given(convolutions())
def test_a_convolution_sums_like_int64(case):
    rng = np.random.default_rng(case["seed"])
    low = -128 if case["signed"] else 0
    codes = Codes(1.0, case["zero"] + low, case["signed"])
    x = (
        rng.integers(low, low + 256, case["shape"])
        if not case["extreme"]
        else rng.choice([low, low + 255], case["shape"])
    )
    w = rng.integers(-128, 128, case["weights"]) if not case["extreme"] else rng.choice([-128, 127], case["weights"])
    w = w - case["weight_zero"]
    attributes = {key: case[key] for key in ("strides", "pads", "dilations", "group")}
    made = Accumulator(op_of("Conv", codes, w, attributes)).sums(x.astype(codes.dtype))
    np.testing.assert_array_equal(made, convolution(x - codes.zero, w, **attributes))


def test_a_sum_beyond_2_24_is_split_and_still_exact():
    rng = np.random.default_rng(0)
    codes = Codes(1.0, 0, False)
    w = rng.choice([-255, 255, 254], (5, 70, 3, 3))
    w[0] = 255
    x = rng.choice([255, 254, 0], (1, 70, 5, 6))
    accumulator = Accumulator(op_of("Conv", codes, w, {"pads": [1, 1, 1, 1]}))
    assert accumulator.bounds.max() > EXACT_FLOAT32
    expected = convolution(x, w, [1, 1], [1, 1, 1, 1], [1, 1], 1)
    assert expected.max() > EXACT_FLOAT32
    np.testing.assert_array_equal(accumulator.sums(x.astype(np.uint8)), expected)


def test_a_kernel_with_more_taps_than_one_piece_holds_is_split_inside_the_channel():
    rng = np.random.default_rng(1)
    codes = Codes(1.0, 0, False)
    w = rng.choice([255, 254], (2, 1, 19, 19))
    x = rng.choice([255, 254], (1, 1, 20, 19))
    made = Accumulator(op_of("Conv", codes, w)).sums(x.astype(np.uint8))
    np.testing.assert_array_equal(made, convolution(x, w, [1, 1], [0] * 4, [1, 1], 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(0, 2**31))
def test_matrix_products_sum_like_int64(terms, rows, columns, extreme, seed):
    rng = np.random.default_rng(seed)
    a_codes, b_codes = Codes(1.0, 0, False), Codes(1.0, -128, True)
    a = rng.integers(0, 256, (2, rows, terms)) if not extreme else np.full((2, rows, terms), 255)
    b = rng.integers(-128, 128, (2, terms, columns)) if not extreme else np.full((2, terms, columns), 127)
    expected = a.astype(np.int64) @ (b.astype(np.int64) + 128)
    made = Accumulator(op_of("MatMul", a_codes, Operand("b", b_codes))).sums(a.astype(np.uint8), b.astype(np.int8))
    np.testing.assert_array_equal(made, expected)
    constant = Accumulator(op_of("MatMul", a_codes, b[0] + 128)).sums(a.astype(np.uint8))
    np.testing.assert_array_equal(constant, a.astype(np.int64) @ (b[0].astype(np.int64) + 128))


def test_a_transposed_convolution_sums_like_int64():
    rng = np.random.default_rng(2)
    codes = Codes(1.0, 7, False)
    x = rng.integers(0, 256, (1, 3, 4, 5))
    w = rng.integers(-128, 128, (3, 2, 3, 3))
    expected = np.zeros((1, 2, 9, 11), np.int64)
    for i, j, p, q in product(range(4), range(5), range(3), range(3)):
        expected[0, :, 2 * i + p, 2 * j + q] += np.einsum("c,cm->m", x[0, :, i, j] - 7, w[:, :, p, q])
    made = Accumulator(op_of("ConvTranspose", codes, w, {"strides": [2, 2]})).sums(x.astype(np.uint8))
    np.testing.assert_array_equal(made, expected)
