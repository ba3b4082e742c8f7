"""Metrics against exact arithmetic: Python's integers and fractions, one element at a time."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from equivcheck.metrics import BLOCK, LADDER, Grid, StepTally, Tally, blocks, step_tally, tally
from equivcheck.result import Metrics

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]
EXOTIC = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Blocks of a few elements, so that small arrays have many; equal pairs are told from unequal ones in all of them."""
    with (
        mock.patch.object(blocks, "BLOCK", size),
        mock.patch.object(blocks, "_SMALL", 0),
        mock.patch.object(blocks, "_FEW", 2),
    ):
        yield


# -- the slow oracle ---------------------------------------------------------------------------------------------------


def exact(value: Any) -> Fraction | None:
    """The number an element stands for; None for NaN and Inf."""
    if isinstance(value, bool | np.bool_ | int | np.integer):
        return Fraction(int(value))
    number = float(value)
    return Fraction(number) if math.isfinite(number) else None


def root(square: Fraction) -> float:
    """The square root of a fraction, also where it does not fit in a float."""
    if square == 0:
        return 0.0
    shift = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(square / Fraction(4) ** shift), shift)
    except OverflowError:
        return math.inf


def decibels(share: Fraction) -> float:
    """10 log10 of a fraction of any size."""
    return 10 * (math.log10(share.numerator) - math.log10(share.denominator))


def oracle(ref: np.ndarray, cand: np.ndarray, scale: np.ndarray | None = None, zero: np.ndarray | None = None) -> dict:
    """Figures by the definitions in the cases' README, with fractions; `scale` and `zero` are broadcast."""
    scales = np.broadcast_to(np.ones(()) if scale is None else scale, ref.shape).ravel()
    zeros = np.broadcast_to(np.zeros((), int) if zero is None else zero, ref.shape).ravel()
    left, right = ref.ravel(), cand.ravel()
    pairs = []
    mismatched = nan_mismatch = inf_mismatch = 0
    for k, (a, b) in enumerate(zip(left, right, strict=True)):
        x, y = exact(a), exact(b)
        if x is not None and y is not None:
            pairs.append((k, x, y))
            mismatched += x != y
            continue
        fa, fb = float(a), float(b)
        same = fa == fb or (math.isnan(fa) and math.isnan(fb))
        mismatched += not same
        nan_mismatch += math.isnan(fa) != math.isnan(fb)
        inf_mismatch += not (math.isnan(fa) or math.isnan(fb) or fa == fb)
    found = {"n": ref.size, "mismatched": mismatched, "nan_mismatch": nan_mismatch, "inf_mismatch": inf_mismatch}
    if not pairs:
        return found | {"max_abs": None}
    errors = [y - x for _, x, y in pairs]
    distances = [abs(d) for d in errors]
    reals = [
        ((x - int(zeros[k])) * Fraction(float(scales[k])), (y - int(zeros[k])) * Fraction(float(scales[k])))
        for k, x, y in pairs
    ]
    aa, bb = sum(a * a for a, _ in reals), sum(b * b for _, b in reals)
    ab, dd = sum(a * b for a, b in reals), sum((b - a) ** 2 for a, b in reals)
    n = len(pairs)
    far = float(max(distances)) * (1 - 1e-15)  # elements that float64 cannot tell from the greatest
    return found | {
        "max_abs": float(max(distances)),
        "worst": {np.unravel_index(pairs[i][0], ref.shape) for i in range(n) if float(distances[i]) >= far},
        "mean_abs": float(sum(distances) / n),
        "rmse": root(sum(d * d for d in errors) / n),
        "bias": float(sum(errors) / n),
        "cosine": math.copysign(root(ab * ab / (aa * bb)), ab) if aa and bb else None,
        "ratio": root(max(aa, bb) / min(aa, bb)) if aa and bb else 1.0,
        "snr": "equal" if not dd else "reference is zero" if not aa else decibels(aa / dd),
        "distances": distances,
        "reals": [x for pair in reals for x in pair],
    }


def assert_same_figures(got: Metrics, wanted: dict, *, exactly: bool) -> None:
    for key in ("n", "mismatched", "nan_mismatch", "inf_mismatch"):
        assert getattr(got, key) == wanted[key], key
    assert got.identical == (wanted["mismatched"] == 0)
    assert sum(got.ladder.values()) in (0, got.n)
    if wanted["max_abs"] is None:
        assert (got.max_abs, got.argmax, got.mean_abs, got.rmse, got.bias) == (None,) * 5
        assert got.snr_note == "empty"
        return
    close = {"rel": 1e-9, "abs": 0.0 if exactly else 1e-300}
    assert got.max_abs == pytest.approx(wanted["max_abs"], **close)
    if wanted["max_abs"] > 0:
        assert tuple(got.argmax or ()) in wanted["worst"]
    spread = 1e-12 * max(1.0, wanted["max_abs"])  # a mean of cancelling terms has an absolute error
    assert got.mean_abs == pytest.approx(wanted["mean_abs"], **close)
    assert got.rmse == pytest.approx(wanted["rmse"], **close)
    assert got.bias == pytest.approx(wanted["bias"], rel=1e-9, abs=spread)
    if wanted["cosine"] is None:
        assert got.cosine is None
    else:
        # beyond that ratio of norms: test_a_cosine_of_very_unequal_norms_is_still_right
        assert got.cosine == pytest.approx(wanted["cosine"], abs=1e-9 if wanted["ratio"] < 1e5 else np.inf)
    if max(abs(float(a)) for a in (*wanted["reals"], 0.0)) > 2**52:
        return  # their squares are not exact: test_64_bit_values_that_differ_are_not_noted_as_equal
    if isinstance(wanted["snr"], str):
        assert (got.snr_note, got.snr_db) == (wanted["snr"], None)
    else:
        assert got.snr_note is None
        assert got.snr_db == pytest.approx(wanted["snr"], rel=1e-9, abs=1e-9)


@st.composite
def pairs_of(draw, dtypes: list[str], **elements: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one dtype and shape; often equal in places, sometimes strided or big-endian."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(SHAPES)
    values = hnp.from_dtype(dtype, **elements) if elements else hnp.from_dtype(dtype)
    a = draw(hnp.arrays(dtype, shape, elements=values))
    b = draw(hnp.arrays(dtype, shape, elements=values))
    if draw(st.booleans()):
        b = np.where(draw(hnp.arrays(bool, shape)), a, b)
    if draw(st.booleans()) and a.ndim:
        a, b = np.asfortranarray(a), b[::-1][::-1]
    if draw(st.booleans()):
        a = a.astype(dtype.newbyteorder(">"))
    return a, b


# -- two arrays --------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(pairs_of(INTEGERS), st.sampled_from([3, 28, BLOCK]))
def test_integers_are_measured_as_exact_arithmetic_does(pair: tuple[np.ndarray, np.ndarray], block: int) -> None:
    a, b = pair
    with blocks_of(block):
        got, wanted = tally(a, b).finish(), oracle(a, b)
    assert_same_figures(got, wanted, exactly=True)
    assert got.domain == "codes"
    assert got.max_lsb is None
    counts = dict.fromkeys(LADDER, 0)
    for distance in wanted.get("distances", []):
        counts[next((rung for rung in LADDER if distance <= rung), LADDER[-1])] += 1
    assert got.ladder == {str(rung): count for rung, count in counts.items() if count}


@settings(max_examples=80, deadline=None)
@given(pairs_of(["float16", "float32"]), st.sampled_from([3, 28, BLOCK]))
def test_floats_are_measured_over_their_finite_pairs_and_the_rest_by_position(
    pair: tuple[np.ndarray, np.ndarray], block: int
) -> None:
    a, b = pair
    with blocks_of(block):
        got = tally(a, b).finish()
    assert_same_figures(got, oracle(a, b), exactly=False)
    assert got.nan == [int(np.isnan(a).sum()), int(np.isnan(b).sum())]
    assert got.inf == [int(np.isinf(a).sum()), int(np.isinf(b).sum())]


@settings(max_examples=100, deadline=None)
@given(
    hnp.arrays(np.float64, SHAPES, elements=st.floats(-1e100, 1e100).filter(lambda x: x == 0 or abs(x) > 1e-100)),
    st.floats(-3.0, 3.0),
)
def test_doubles_are_measured_as_exact_arithmetic_does(a: np.ndarray, factor: float) -> None:
    b = a * factor
    got, wanted = tally(a, b).finish(), oracle(a, b)
    assert got.mismatched == wanted["mismatched"]
    if wanted["max_abs"] is not None:
        assert got.max_abs == pytest.approx(wanted["max_abs"], rel=1e-9)
        assert got.rmse == pytest.approx(wanted["rmse"], rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["int8", "uint8", "int16", "uint16", "int32"]).flatmap(
        lambda d: hnp.arrays(d, (2, 3, 2)).flatmap(lambda a: st.tuples(st.just(a), hnp.arrays(d, st.just(a.shape))))
    ),
    st.lists(st.floats(2**-10, 10, width=32), min_size=3, max_size=3),
    st.lists(st.integers(-100, 100), min_size=3, max_size=3),
    st.booleans(),
)
def test_cosine_and_snr_are_of_the_real_values_where_the_grid_is_known(pair, scales, zeros, per_channel: bool) -> None:
    a, b = pair
    scale = np.array(scales).reshape(1, 3, 1) if per_channel else np.array(scales[0])
    zero = np.array(zeros).reshape(1, 3, 1) if per_channel else np.array(zeros[0])
    got = tally(a, b, Grid(scale, zero)).finish()
    assert_same_figures(got, oracle(a, b, scale, zero), exactly=True)
    assert got.domain == "real"
    assert got.max_lsb == got.max_abs
    assert got.bias_lsb == got.bias


@pytest.mark.parametrize("dtype", EXOTIC)
def test_types_that_numpy_does_not_have_are_widened_without_loss(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype))
    codes = np.arange(256, dtype=np.uint8) if kind.itemsize == 1 else np.arange(0, 65536, 257, dtype=np.uint16)
    if "int4" in dtype:
        codes = codes[:16]
    every = codes.astype(kind) if "int4" in dtype else codes.view(kind)
    a, b = every, every[::-1].copy()
    wide = (lambda x: x.astype(int)) if "int4" in dtype else (lambda x: x.astype(np.float64))
    assert_same_figures(tally(a, b).finish(), oracle(wide(a), wide(b)), exactly=False)
    assert tally(a, a.copy()).finish().identical


def test_values_of_64_bits_beyond_2_53_are_told_apart() -> None:
    for dtype, a, b in (("int64", 2**53, 2**53 + 1), ("uint64", 2**64 - 1, 2**64 - 2), ("int64", -(2**63), 1 - 2**63)):
        got = tally(np.array([a], dtype), np.array([b], dtype)).finish()
        assert (got.mismatched, got.max_abs, abs(got.bias or 0)) == (1, 1.0, 1.0)


def test_64_bit_values_that_differ_are_not_noted_as_equal() -> None:
    got = tally(np.array([2**53, 1, 2]), np.array([2**53 + 1, 1, 2])).finish()
    assert got.mismatched == 1
    assert got.snr_note is None
    assert got.snr_db == pytest.approx(10 * math.log10(2.0**106))


def test_an_unsigned_difference_does_not_wrap() -> None:
    got = tally(np.array([[0, 0, 20]], np.uint8), np.array([[255, 254, 19]], np.uint8)).finish()
    assert (got.max_abs, got.argmax, got.bias) == (255.0, [0, 0], (255 + 254 - 1) / 3)


def test_arrays_of_different_shapes_are_refused_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) and \(1, 2\)"):
        tally(np.zeros(2, np.int8), np.zeros((1, 2), np.int8))
    with pytest.raises(ValueError, match="shapes differ"):
        tally(np.zeros((), np.float32), np.zeros(1, np.float32))


@pytest.mark.parametrize("dtype", ["int8", "int64", "float32", ">f4", "bfloat16", "int4"])
def test_an_empty_tensor_is_identical_and_says_that_it_is_empty(dtype: str) -> None:
    for shape in ((0,), (0, 4), (4, 0, 2)):
        empty = np.zeros(shape, getattr(ml_dtypes, dtype, dtype))
        got = tally(empty, empty.copy()).finish()
        assert (got.n, got.identical, got.max_abs, got.argmax, got.snr_note) == (0, True, None, None, "empty")


def test_cosine_keeps_its_digits_next_to_one() -> None:
    a = np.full((1, 10_000), 127, np.int8)
    b = a.copy()
    b[0, 5] -= 1
    # |a - b| = 1, so 1 - cos = (1 - (|a| - |b|)^2) / (2 |a| |b|)
    na, nb = math.sqrt(10_000 * 127**2), math.sqrt(9_999 * 127**2 + 126**2)
    assert 1.0 - (tally(a, b).finish().cosine or 0) == pytest.approx((1 - (na - nb) ** 2) / (2 * na * nb), rel=1e-6)


def test_a_block_boundary_hides_nothing() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(-128, 128, (2, 3, BLOCK // 2 + 7)).astype(np.int8)
    b = a.copy()
    b[1, 2, -1] = np.int8(a[1, 2, -1] ^ 127)
    got = tally(a, b).finish()
    assert (got.mismatched, got.argmax) == (1, [1, 2, BLOCK // 2 + 6])
    assert got.worst_channel is not None
    assert (got.worst_channel.index, got.worst_channel.max_abs) == (2, got.max_abs)
    reals = a.astype(float).ravel(), b.astype(float).ravel()
    snr = 10 * math.log10(np.dot(reals[0], reals[0]) / ((reals[1] - reals[0]) ** 2).sum())
    assert got.snr_db == pytest.approx(snr, rel=1e-9)


def test_far_counts_what_lies_beyond_atol_plus_rtol_of_the_reference() -> None:
    a = np.array([0.0, 1.0, 100.0, np.nan, np.inf, np.inf], np.float64)
    b = np.array([0.0011, 1.0019, 100.2, np.nan, np.inf, -np.inf], np.float64)
    assert tally(a, b).far == 0
    assert tally(a, b, close=(1e-3, 1e-3)).far == 3  # 0.0011 > 0.001; 0.0019 < 0.002; 0.2 > 0.101; the two infinities
    assert tally(a, b, close=(1.0, 0.0)).far == 1


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["int8", "uint8", "int64", "float32"]),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_merging_samples_is_measuring_their_concatenation(dtype: str, count: int, seed: int, gridded: bool) -> None:
    rng = np.random.default_rng(seed)
    shape = (1, 3, 4)
    parts = [[(rng.normal(0, 40, shape)).clip(0, 99).astype(dtype) for _ in range(2)] for _ in range(count)]
    if dtype == "float32":
        parts[0][1][0, 0, 0] = np.nan
    grid = Grid(np.array(0.5), np.array(3)) if gridded and dtype != "float32" else None
    merged = tally(*parts[0], grid)
    for a, b in parts[1:]:
        merged = merged + tally(a, b, grid)
    whole = tally(*(np.concatenate([pair[k] for pair in parts]) for k in range(2)), grid)
    got, wanted = merged.finish(), whole.finish()
    for name in Metrics.__struct_fields__:
        if name == "argmax":
            continue
        one, other = getattr(got, name), getattr(wanted, name)
        if isinstance(one, float):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-12), name
        elif name == "worst_channel":  # of channels that tie, either
            assert (one and one.max_abs) == (other and other.max_abs)
        else:
            assert one == other, name
    assert merged.far == whole.far
    # the worst index is inside its own sample, and is the greatest there
    assert got.argmax is not None
    distances = [np.abs(np.float64(b) - np.float64(a))[tuple(got.argmax)] for a, b in parts]
    assert max((d for d in distances if d == d), default=0.0) == pytest.approx(got.max_abs)


# -- edges where floats run out ----------------------------------------------------------------------------------------


def test_doubles_whose_squares_overflow_still_have_a_cosine_and_an_snr() -> None:
    a = np.array([1e200, -3e200])
    got = tally(a, a * 1.001).finish()
    assert got.snr_db == pytest.approx(60.0, abs=1e-6)
    assert got.cosine == pytest.approx(1.0)
    assert got.rmse is not None
    assert math.isfinite(got.rmse)


def test_doubles_whose_squares_underflow_are_not_called_equal() -> None:
    got = tally(np.array([1e-200]), np.array([2e-200])).finish()
    assert got.mismatched == 1
    assert got.snr_note is None


@pytest.mark.parametrize("ratio", [1e8, 1e12, 1e17])
def test_a_cosine_of_very_unequal_norms_is_still_right(ratio: float) -> None:
    got = tally(np.array([3.0, 4.0]) * ratio, np.array([1.0, 1.0])).finish()
    assert got.cosine == pytest.approx(7 / (5 * math.sqrt(2)), abs=1e-9)


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        tally(np.array([1 + 2j]), np.array([1 + 3j]))


# -- laws --------------------------------------------------------------------------------------------------------------

EVERY = [*INTEGERS, "float16", "float32", "float64", ">i2", ">f4", ">i8", *EXOTIC]


def of_dtype(name: str, values: np.ndarray) -> np.ndarray:
    """Small integers as an array of any dtype, inside its range."""
    dtype = np.dtype(getattr(ml_dtypes, name)) if name in EXOTIC else np.dtype(name)
    low, high = {"bool": (0, 1), "int4": (-8, 7)}.get(name, (0 if "u" in name else -8, 15))
    return np.clip(values, low, high).astype(np.int8).astype(dtype)


def two(name: str, seed: int, shape: tuple[int, ...] = (3, 5, 40), share: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """A pair that differs in a share of its elements."""
    rng = np.random.default_rng(seed)
    a = rng.integers(-8, 16, shape)
    b = np.where(rng.random(shape) < share, rng.integers(-8, 16, shape), a)
    return of_dtype(name, a), of_dtype(name, b)


def assert_same(got: Tally, wanted: Tally, *but: str) -> None:
    """All figures equal: counts and maxima exactly, sums to 1e-12 (here they are of small integers)."""
    one, other = got.finish(), wanted.finish()
    assert got.far == wanted.far
    for name in set(Metrics.__struct_fields__) - set(but):
        x, y = getattr(one, name), getattr(other, name)
        assert x == (pytest.approx(y, rel=1e-12, abs=1e-15) if isinstance(y, float) else y), name


any_pair = st.tuples(st.sampled_from(EVERY), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.01, 0.1, 1.0]))


@settings(max_examples=60, deadline=None)
@given(any_pair, st.sampled_from([64, 100, 1000]))
def test_small_blocks_are_the_whole(case: tuple[str, int, float], block: int) -> None:
    name, seed, share = case
    a, b = two(name, seed, share=share)
    wanted = tally(a, b)
    assert wanted.finish().max_abs == float(np.abs(b.astype(float) - a.astype(float)).max())
    with blocks_of(block):
        assert_same(tally(a, b), wanted)


@settings(max_examples=60, deadline=None)
@given(any_pair, st.lists(st.integers(0, 600), max_size=4), st.booleans())
def test_any_split_merged_in_any_grouping_is_the_whole(
    case: tuple[str, int, float], cuts: list[int], right: bool
) -> None:
    name, seed, share = case
    a, b = two(name, seed, (600,), share)
    ends = [0, *sorted(cuts), 600]
    with blocks_of(64):
        parts = [tally(a[i:j], b[i:j]) for i, j in itertools.pairwise(ends)]
        merged = parts[-1] if right else parts[0]
        for part in reversed(parts[:-1]) if right else parts[1:]:
            merged = part + merged if right else merged + part
        assert_same(merged, tally(a, b), "argmax")  # an index inside its own part


@settings(max_examples=60, deadline=None)
@given(any_pair)
def test_swapping_sides_negates_the_bias_and_nothing_else(case: tuple[str, int, float]) -> None:
    a, b = two(case[0], case[1], share=case[2])
    got, swapped = tally(a, b), tally(b, a)
    assert_same(swapped, got, "bias", "snr_db", "snr_note")  # SNR is against the reference
    assert swapped.finish().bias == -(got.finish().bias or 0.0)


@settings(max_examples=60, deadline=None)
@given(any_pair)
def test_the_order_of_elements_moves_only_the_place_of_the_worst(case: tuple[str, int, float]) -> None:
    a, b = two(case[0], case[1], share=case[2])
    order = np.random.default_rng(case[1]).permutation(a.size)
    shuffled = [x.ravel()[order].reshape(x.shape) for x in (a, b)]
    assert_same(tally(*shuffled), tally(a, b), "argmax", "worst_channel")


@settings(max_examples=60, deadline=None)
@given(any_pair, st.integers(-100, 100))
def test_a_constant_on_both_integer_sides_cancels(case: tuple[str, int, float], constant: int) -> None:
    a, b = (x.astype(np.int64) for x in two("int8", case[1], share=case[2]))
    for dtype in ("int8", "int16", "int32", "int64"):
        moved = [(x + constant).astype(dtype) for x in (a, b)]
        assert_same(tally(*moved), tally(a, b), "cosine", "snr_db", "snr_note")


@settings(max_examples=60, deadline=None)
@given(any_pair, st.integers(-100, 100))
def test_a_power_of_two_scales_the_differences_and_leaves_cosine_and_snr(case: tuple, exponent: int) -> None:
    a, b = two("float32", case[1], share=case[2])
    factor = np.float32(2.0**exponent)
    got, wanted = tally(a * factor, b * factor).finish(), tally(a, b).finish()
    for name in ("max_abs", "mean_abs", "rmse", "bias"):
        assert getattr(got, name) == getattr(wanted, name) * float(factor), name
    assert (got.argmax, got.mismatched, got.snr_note) == (wanted.argmax, wanted.mismatched, wanted.snr_note)
    for name in ("cosine", "snr_db"):
        value = getattr(wanted, name)
        assert getattr(got, name) == (None if value is None else pytest.approx(value, rel=1e-12)), name


LAYOUTS = {
    "column order": np.asfortranarray,
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: x[::-1].copy()[::-1],
    "channels last": lambda x: np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERY)
def test_layouts_do_not_matter(name: str, layout: str) -> None:
    a, b = two(name, 7)
    wanted = tally(a, b)
    for block in (7, 64, BLOCK):
        with blocks_of(max(block, 64) if block != 7 else 28):
            assert_same(tally(a, LAYOUTS[layout](b)), wanted)
            assert_same(tally(LAYOUTS[layout](a), LAYOUTS[layout](b)), wanted)


@pytest.mark.parametrize("name", ["int16", "int64", "float32", "float64"])
def test_byte_orders_do_not_matter(name: str) -> None:
    a, b = two(name, 8)
    swapped = b.astype(b.dtype.newbyteorder(">"))
    assert_same(tally(a, swapped), tally(a, b))


@pytest.mark.parametrize("name", ["uint8", "float32"])
def test_a_mapped_file_is_measured_where_it_lies_also_at_an_odd_offset(name: str, tmp_path: Path) -> None:
    a, b = two(name, 9)
    (tmp_path / "b.raw").write_bytes(b"\0\0\0" + b.tobytes())
    mapped = np.memmap(tmp_path / "b.raw", b.dtype, "r", offset=3, shape=b.shape)
    with blocks_of(64):
        assert_same(tally(a, mapped), tally(a, b))


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_memory_does_not_grow_with_the_tensor(layout: str) -> None:
    """A tensor of 64 blocks takes no more memory than the scratch of some blocks, in every dtype."""
    size = 64 * BLOCK
    for name in ("int8", "float16", "float32", "float64", "int64", "bfloat16"):
        whole = np.zeros((1, 1, 2 * size), np.dtype(getattr(ml_dtypes, name, name)))
        a = whole[..., :size] if layout == "contiguous" else whole[..., ::2]
        b = a.copy()
        b[..., -1], b[..., : BLOCK // 2] = 1, 1
        tracemalloc.start()
        tally(a, b)
        step_tally(b, a, None, None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 12 * 8 * BLOCK, name  # of 64 * BLOCK elements; a float64 copy of one side would be 64 * 8 * BLOCK


HARD = {  # pairs of float32 that are not within a factor of two of each other, or at its edge
    "another sign": (1.5, -1.5),
    "zero and minus zero": (0.0, -0.0),
    "to zero": (3.0, 0.0),
    "from zero": (0.0, 1e-3),
    "a half": (1.0, 0.5),
    "just below a half": (1.0, 0.49999997),
    "a double": (1.25, 2.5),
    "just beyond a double": (1.9999999, 4.0),
    "half a digit lost": (1.0000001, 0.33333334),
    "subnormal": (1e-45, 3e-39),
    "subnormal of another sign": (-1e-45, 1e-45),
}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.sampled_from(sorted(HARD)), st.integers(0, 199), st.booleans()), max_size=24),
    st.sampled_from([0.0, 1e-7, 1e-3, 0.3]),
    st.sampled_from([1e-30, 1.0, 1e18]),
)
def test_float32_pairs_near_each_other_are_measured_as_exact_arithmetic_does(
    seed: int, hard: list[tuple[str, int, bool]], spread: float, size: float
) -> None:
    rng = np.random.default_rng(seed)
    a = (rng.normal(size=200) * size).astype(np.float32)
    b = (a * (1 + rng.uniform(-spread, spread, 200))).astype(np.float32)
    for kind, at, swapped in hard:
        a[at], b[at] = HARD[kind][::-1] if swapped else HARD[kind]
    with blocks_of(28):
        found, close = tally(a, b), tally(a, b, close=(1e-6, 1e-4))
    assert_same_figures(found.finish(), oracle(a, b), exactly=False)
    x, y = a.astype(np.longdouble), b.astype(np.longdouble)
    assert found.max_abs == float(np.abs(y - x).max())
    assert found.at == int(np.abs(y - x).argmax())
    assert close.far == np.count_nonzero(np.abs(y - x) > 1e-6 + 1e-4 * np.abs(x.astype(np.float64)))


@pytest.mark.parametrize(("far", "near"), [(5, 9), (9, 5)])
def test_of_a_near_and_a_far_pair_of_one_distance_the_first_is_named(far: int, near: int) -> None:
    a = np.full(200, 2.0, np.float32)
    b = a.copy()
    a[far], b[far], b[near] = 0.0, 0.5, 2.5
    assert (tally(a, b).max_abs, tally(a, b).at) == (0.5, 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
@pytest.mark.parametrize("at", [0, BLOCK - 1, 2 * BLOCK, 5 * BLOCK - 1])
def test_float32_that_are_no_numbers_or_overflow_are_told_in_every_block(bad: float, at: int) -> None:
    a = np.random.default_rng(0).normal(size=5 * BLOCK).astype(np.float32)
    b = a * np.float32(1.001)
    a[at] = bad
    got = tally(a, b)
    others = np.delete(np.arange(a.size), at)
    d = np.abs(b[others].astype(np.float64) - a[others])
    if np.isfinite(bad):
        assert (got.finite, got.max_abs, got.at) == (a.size, float(bad) - float(b[at]), at)
        return
    assert (got.finite, got.mismatched) == (a.size - 1, a.size)
    assert (got.nan[0] + got.inf[0], got.nan_mismatch + got.inf_mismatch) == (1, 1)
    assert (got.max_abs, got.at) == (d.max(), others[d.argmax()])
    assert float(got.sum_abs) == pytest.approx(d.sum(), rel=1e-12)


@pytest.mark.parametrize("name", ["int8", "uint8"])
@pytest.mark.parametrize("size", [4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 9 * BLOCK + 5])
@pytest.mark.parametrize("peak", [1, 2, 3, 255])
def test_bytes_are_counted_exactly_beyond_a_block(name: str, size: int, peak: int) -> None:
    rng = np.random.default_rng(size)
    low, high = np.iinfo(name).min, np.iinfo(name).max
    a = rng.integers(low, high + 1, size)
    b = np.clip(a + rng.integers(-peak, peak + 1, size), low, high)
    got = tally(a.astype(name), b.astype(name), Grid(np.array(0.5), np.array(3)))
    d = b - a
    assert got.ladder == tally(a, b, Grid(np.array(0.5), np.array(3))).ladder
    assert (got.mismatched, got.max_abs, got.at) == (np.count_nonzero(d), np.abs(d).max(), np.abs(d).argmax())
    assert (got.sum_abs, got.sum_sq, got.sum_d) == (np.abs(d).sum(), (d * d).sum(), d.sum())
    assert (got.dot, got.ref_sq) == (((a - 3) * (b - 3)).sum() / 4, ((a - 3) ** 2).sum() / 4)


@pytest.mark.parametrize("name", ["int8", "uint8"])
def test_bytes_are_summed_exactly_at_their_extremes(name: str) -> None:
    low, high = np.iinfo(name).min, np.iinfo(name).max
    n = 3 * BLOCK + 5
    for zero in (0, low, high):
        got = tally(np.full(n, low, name), np.full(n, high, name), Grid(np.array(1.0), np.array(zero)))
        assert (got.ref_sq, got.cand_sq) == (n * (low - zero) ** 2, n * (high - zero) ** 2)
        assert (got.dot, got.err_sq) == (n * (low - zero) * (high - zero), n * 255**2)
        assert (got.sum_abs, got.sum_sq, got.sum_d) == (n * 255, n * 255**2, n * 255)


def test_64_bit_differences_are_exact_up_to_the_whole_range() -> None:
    wide, signed = np.array([0, 5], np.uint64), np.array([-(2**63), 5], np.int64)
    assert tally(wide, np.array([2**64 - 1, 5], np.uint64)).max_abs == 2**64 - 1
    assert tally(signed, np.array([2**63 - 1, 5], np.int64)).max_abs == 2**64 - 1
    assert tally(signed, np.array([2**64 - 1, 5], np.uint64)).max_abs == 2**64 + 2**63 - 1  # no integer type holds both
    assert tally(signed, np.array([1, 5], np.int8)).max_abs == 2**63 + 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "float64"]), st.booleans())
def test_float_sums_keep_their_stated_bound(seed: int, name: str, wild: bool) -> None:
    rng = np.random.default_rng(seed)
    n = 5003
    a = (rng.normal(size=n) * (10.0 ** rng.uniform(-8, 8, n) if wild else 1.0)).astype(name)
    b = (a * (1 + rng.normal(0, 1e-3, n))).astype(name)
    with blocks_of(2048):
        got = tally(a, b)
    u, k = Fraction(1, 2**53), 1100 + 3
    gamma = k * u / (1 - k * u)
    x, y = [Fraction(float(v)) for v in a], [Fraction(float(v)) for v in b]
    terms = {
        "sum_d": [q - p for p, q in zip(x, y, strict=True)],
        "sum_abs": [abs(q - p) for p, q in zip(x, y, strict=True)],
        "sum_sq": [(q - p) ** 2 for p, q in zip(x, y, strict=True)],
        "dot": [p * q for p, q in zip(x, y, strict=True)],
        "ref_sq": [p * p for p in x],
        "cand_sq": [q * q for q in y],
    }
    for field, values in terms.items():
        found = Fraction(*getattr(got, field).as_integer_ratio())
        assert abs(found - sum(values)) <= gamma * sum(abs(v) for v in values), field


def test_of_equal_differences_the_first_is_named() -> None:
    a = np.zeros((2, 3, 8 * BLOCK), np.int8)
    b = a.copy()
    b[0, 2, 5], b[0, 1, 0], b[1, 0, 1] = 3, -3, 3  # few in one block, and ...
    b[1, 1, :BLOCK] = 3  # ... a block of them
    got = tally(a, b).finish()
    assert (got.argmax, got.worst_channel and got.worst_channel.index) == ([0, 1, 0], 1)


# -- a value against the real value of its step ------------------------------------------------------------------------


def live_channels(codes, bounds) -> list[bool]:
    """Channels with any code inside the range; all, where there is none."""
    if bounds is None:
        return [True] * (codes.shape[1] if codes.ndim > 1 and codes.size else 1)
    inside = (codes != bounds[0]) & (codes != bounds[1])
    if codes.ndim < 2 or codes.size == 0:
        return [bool(inside.any())]
    return inside.any(axis=tuple(k for k in range(codes.ndim) if k != 1)).tolist()


def direct(codes, real, scale, zero, bounds) -> dict[str, Any]:
    """The definition of excess, written out in numpy."""
    wanted = real.astype(np.float64) / scale + zero
    if bounds is not None:
        wanted = np.clip(wanted, *bounds)
    distance = np.abs(codes.astype(np.float64) - wanted)
    flat = distance.ravel()
    channels = codes.shape[1] if codes.ndim > 1 else 1
    moved = np.moveaxis(distance, 1, 0).reshape(channels, -1) if codes.ndim > 1 else flat.reshape(1, -1)
    return {
        "excess": max(0.0, float(flat.max(initial=0.0)) - 0.5),
        "off": int((flat > 0.5).sum()),
        "by_channel": moved.max(axis=1, initial=0.0),
        "worst": {np.unravel_index(int(k), codes.shape) for k in np.flatnonzero(flat == flat.max(initial=0.0))},
        "live": live_channels(codes, bounds),
        "saturated": 0 if bounds is None else int(((codes == bounds[0]) | (codes == bounds[1])).sum()),
        "bias": float((codes.astype(float) - np.rint(wanted)).mean()) if codes.size else 0.0,
        "max_lsb": float(np.abs(codes.astype(float) - np.rint(wanted)).max(initial=0.0)),
    }


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([(7,), (2, 3), (1, 4, 5), (2, 3, 2, 2), (1, 1, 3), (3, 1), (0, 4), (2, 3, 0)]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 3, 5, BLOCK]),
)
def test_a_step_is_measured_as_the_definition_says(
    shape, per_channel: bool, clipped: bool, seed: int, block: int
) -> None:
    rng = np.random.default_rng(seed)
    per_channel = per_channel and len(shape) > 1 and shape[1] > 1
    column = (1, shape[1], *[1] * (len(shape) - 2)) if len(shape) > 1 else ()
    scale = rng.uniform(0.01, 2, column) if per_channel else np.array(rng.uniform(0.01, 2))
    zero = rng.integers(-20, 20, column) if per_channel else np.array(rng.integers(-20, 20))
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    real = (codes - zero) * scale + rng.normal(0, 1.0, shape) * scale
    bounds = (-128.0, 127.0) if clipped else None
    with blocks_of(block):
        got, wanted = step_tally(codes, real, Grid(scale, zero), bounds), direct(codes, real, scale, zero, bounds)
        mixed = step_tally(np.asfortranarray(codes), real[::-1].copy()[::-1], Grid(scale, zero), bounds)
    error = got.finish()
    assert mixed.finish() == error
    assert got.live.tolist() == wanted["live"]
    assert error.n == codes.size
    assert error.excess == pytest.approx(wanted["excess"], abs=1e-9)
    assert error.off == wanted["off"]
    assert error.saturated_share == pytest.approx(wanted["saturated"] / codes.size if codes.size else 0.0)
    if codes.size:
        assert tuple(error.worst) in wanted["worst"]
        assert error.code == codes[tuple(error.worst)]
        assert error.bias_lsb == pytest.approx(wanted["bias"], abs=1e-9)
        assert error.max_lsb == pytest.approx(wanted["max_lsb"], abs=1e-9)
        assert got.by_channel == pytest.approx(wanted["by_channel"], abs=1e-9)
    if error.worst_channel is not None:
        assert error.worst_channel.index == int(np.argmax(wanted["by_channel"]))


@pytest.mark.parametrize("code", [2, 3])
def test_both_neighbours_of_a_tie_are_right(code: int) -> None:
    grid = Grid(np.array(1.0), np.array(0))
    error = step_tally(np.array([code], np.int8), np.array([2.5]), grid, (-128.0, 127.0)).finish()
    assert (error.excess, error.off, error.max_lsb, error.bias_lsb) == (0.0, 0, 0.0, 0.0)


def test_one_code_beyond_a_tie_is_off_by_one_code() -> None:
    grid = Grid(np.array(1.0), np.array(0))
    error = step_tally(np.array([3], np.int8), np.array([1.5]), grid, (-128.0, 127.0)).finish()
    assert (error.excess, error.off, error.max_lsb, error.bias_lsb) == (1.0, 1, 1.0, 1.0)


def test_saturation_is_no_error_and_is_counted() -> None:
    codes = np.array([[127, -128, 5]], np.int8)
    error = step_tally(codes, np.array([[900.0, -900.0, 5.0]]), Grid(np.array(1.0), np.array(0)), (-128.0, 127.0))
    assert error.excess == 0.0
    assert error.finish().saturated_share == pytest.approx(2 / 3)
    assert error.live.tolist() == [False, False, True]


def test_codes_at_a_relu_count_as_saturated() -> None:
    codes = np.array([[-5, -5, 7]], np.int8)
    grid = Grid(np.array(1.0), np.array(-5))
    error = step_tally(codes, np.array([[0.0, 0.0, 12.0]]), grid, (-128.0, 127.0), clamped_at=(-5.0,))
    assert error.finish().saturated_share == pytest.approx(2 / 3)


def test_a_stop_that_the_codes_cannot_hold_stops_none() -> None:
    codes = np.array([[0, 255, 7]], np.uint8)
    grid = Grid(np.array(1.0), np.array(0))
    error = step_tally(codes, codes * 1.0, grid, (0.0, 255.0), clamped_at=(-5.0, 300.0, 0.5))
    assert error.finish().saturated_share == pytest.approx(2 / 3)


def test_a_wrapped_code_is_as_wrong_as_it_is_far() -> None:
    error = step_tally(np.array([-126], np.int8), np.array([130.0]), Grid(np.array(1.0), np.array(0)), (-128.0, 127.0))
    assert error.finish().excess == 127 + 126 - 0.5


def test_a_real_value_that_is_not_a_number_is_never_matched() -> None:
    error = step_tally(np.array([0], np.int8), np.array([np.nan]), Grid(np.array(1.0), np.array(0)), (-128.0, 127.0))
    assert error.excess == math.inf
    assert error.finish().real is None


def test_a_float_that_is_nan_where_its_step_gives_nan_is_right() -> None:
    error = step_tally(np.array([1.0, np.nan]), np.array([1.0, np.nan]), None, None)
    assert error.excess == 0.0


def test_a_float_that_is_inf_where_its_step_gives_inf_is_right() -> None:
    error = step_tally(np.array([1.0, np.inf]), np.array([1.0, np.inf]), None, None)
    assert error.excess == 0.0


def test_the_worst_element_is_found_behind_the_first_block() -> None:
    shape = (1, 3, BLOCK + 11)
    codes = np.zeros(shape, np.int8)
    codes[0, 1, BLOCK + 3] = 9
    got = step_tally(codes, np.zeros(shape, np.float32), Grid(np.array(1.0), np.array(0)), (-128.0, 127.0))
    error = got.finish()
    assert (error.worst, error.off, error.code, error.real) == ([0, 1, BLOCK + 3], 1, 9.0, 0.0)
    assert got.by_channel.tolist() == [0.0, 9.0, 0.0]


def test_per_channel_scales_meet_their_channels_in_every_block() -> None:
    rng = np.random.default_rng(1)
    shape = (3, 5, BLOCK // 4)
    scale = (0.1 * (1 + np.arange(5))).reshape(1, 5, 1)
    zero = np.arange(5).reshape(1, 5, 1)
    codes = rng.integers(-100, 100, shape).astype(np.int8)
    real = (codes - zero) * scale
    assert step_tally(codes, real, Grid(scale, zero), (-128.0, 127.0)).distance == pytest.approx(0.0, abs=1e-9)
    other = np.roll(codes, 1)
    got = tally(codes, other, Grid(scale, zero)).finish()
    a, b = real, (other - zero) * scale
    assert got.snr_db == pytest.approx(10 * math.log10((a**2).sum() / ((b - a) ** 2).sum()), rel=1e-9)


@pytest.mark.parametrize(("shape", "axis"), [((4, 4, 5), 0), ((4, 4, 5), 2), ((2, 3, 5), 0), ((2, 3, 5), 2), ((3,), 0)])
def test_per_channel_scales_are_read_along_their_own_axis(shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(2)
    column = [1] * len(shape)
    column[axis] = -1
    scale = (0.1 * 2.0 ** np.arange(shape[axis])).reshape(column)
    grid = Grid(scale, np.arange(shape[axis]).reshape(column))
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for _ in range(2))
    real = (a - grid.zero) * scale
    got = tally(a, b, grid).finish()
    other = (b - grid.zero) * scale
    assert got.snr_db == pytest.approx(10 * math.log10((real**2).sum() / ((other - real) ** 2).sum()), rel=1e-9)
    assert step_tally(a, real, grid, (-128.0, 127.0)).distance == pytest.approx(0.0, abs=1e-9)


def test_merged_step_tallies_keep_the_worst_sample_and_add_the_counts() -> None:
    rng = np.random.default_rng(3)
    grid = Grid(np.array(0.5), np.array(1))
    codes = [rng.integers(-128, 128, (1, 3, 4)).astype(np.int8) for _ in range(4)]
    reals = [(c - 1) * 0.5 + rng.normal(0, 0.4, c.shape) for c in codes]
    merged = step_tally(codes[0], reals[0], grid, (-128.0, 127.0))
    for c, r in itertools.islice(zip(codes, reals, strict=True), 1, None):
        merged = merged + step_tally(c, r, grid, (-128.0, 127.0))
    whole = step_tally(np.concatenate(codes), np.concatenate(reals), grid, (-128.0, 127.0))
    one, other = merged.finish(), whole.finish()
    assert one.excess == other.excess
    for name in ("n", "off", "max_lsb", "bias_lsb", "saturated_share", "code", "real"):
        assert getattr(one, name) == pytest.approx(getattr(other, name)), name
    assert one.worst_channel == other.worst_channel
    assert merged.live.tolist() == whole.live.tolist()


def test_an_empty_step_is_measured_without_a_worst_element() -> None:
    for shape, dtype in (((0,), "int8"), ((0, 4), ">i2"), ((4, 0, 3), "int8")):
        error = step_tally(np.zeros(shape, dtype), np.zeros(shape), None, (-128.0, 127.0)).finish()
        assert (error.n, error.excess, error.worst, error.code) == (0, 0.0, [], None)


def test_a_tally_says_distance_of_floats_in_their_own_unit() -> None:
    error = step_tally(np.array([1.0, 2.5]), np.array([1.0, 2.0]), None, None)
    assert isinstance(error, StepTally)
    assert error.excess == 0.5  # nothing is rounded, so nothing is forgiven
