"""Shapes, dtypes, quantisation and inputs of two recordings: what makes values incomparable, in words with the way out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import Qdq
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from equivcheck.recording import Parameters, Recording
from equivcheck.structure import Structure, layout_hint

SCALE = np.array(0.05, np.float32)


@pytest.fixture(scope="module")
def model() -> OnnxModel:
    """x -> xq -> Conv -> cq (scale 0.05, zero point -1) -> y; 1x3x4x5 in, 1x4x4x5 out."""
    m = Qdq(dtype="int8", seed=2)
    xq = m.q(m.input("x", (1, 3, 4, 5)), 0.02, 3, out="xq")
    cq = m.q(m.conv(m.dq(xq), 4), float(SCALE), -1, out="cq")
    return model_from_bytes(m.model(m.dq(cq)).SerializeToString(), "net.onnx")


@pytest.fixture
def structure(model: OnnxModel) -> Structure:
    return Structure(model.graph, ["xq", "cq"])


def recording(dtype: str = "int8", zero: int = -1, scale: float = float(SCALE), **more: np.ndarray) -> Recording:
    codes = np.random.default_rng(0).integers(0, 100, (1, 4, 4, 5)).astype(dtype)
    values = {"x": np.ones((1, 3, 4, 5), np.float32), "cq": codes} | more
    parameters = {"cq": Parameters(np.array(scale, np.float32), np.array(zero, dtype))}
    return Recording("1", values, {}, {}, quantisation=parameters)


def test_two_alike_disagree_on_nothing(structure: Structure) -> None:
    structure.check(recording(), recording())
    assert not any(
        (structure.incomparable, structure.parameters_differ, structure.not_numbers, structure.inputs_differ)
    )


# -- codes of the other signedness -------------------------------------------------------------------------------------


def test_unsigned_codes_of_the_same_reals_become_the_model_s_exactly(structure: Structure) -> None:
    signed = np.array([-128, -1, 0, 127], np.int8)
    moved = (signed.astype(int) + 128).astype(np.uint8)
    given = Recording("1", {"cq": moved}, {}, {}, quantisation={"cq": Parameters(SCALE, np.array(127, np.uint8))})
    got = structure.in_model_codes(given)
    np.testing.assert_array_equal(got.values["cq"], signed)
    assert got.values["cq"].dtype == np.int8
    assert int(got.quantisation["cq"].zero_point) == -1
    assert given.values["cq"] is moved, "the given recording is left as it was"


@pytest.mark.parametrize("zero", [0, 126, 128, 255])
def test_unsigned_codes_with_another_zero_point_are_not_shifted(structure: Structure, zero: int) -> None:
    given = recording("uint8", zero)
    assert structure.in_model_codes(given) is given
    structure.check(recording(), given)
    assert "dtype uint8 against int8" in structure.incomparable["cq"]


def test_wider_codes_are_not_shifted(structure: Structure) -> None:
    given = recording("int16", -1)
    assert structure.in_model_codes(given) is given


def test_a_scale_that_differs_is_still_seen_after_the_shift(structure: Structure) -> None:
    """Codes are shifted by their zero point; a scale of their own is a difference, and must not be lost by that."""
    shifted = structure.in_model_codes(recording("uint8", 127, scale=0.0625))
    structure.check(recording(), shifted)
    assert "scale 0.0625" in structure.parameters_differ["cq"]


# -- shape, dtype, parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((1, 4, 5, 4), np.int8), "channels last (--candidate-layout nhwc)"),
        (np.zeros((1, 80), np.int8), "reshaped?"),
        (np.zeros((1, 4, 4, 6), np.int8), "shape [1, 4, 4, 6] against [1, 4, 4, 5]"),
        (np.zeros((), np.int8), "shape [] against [1, 4, 4, 5]"),
        (np.zeros((1, 4, 4, 5), np.float32), "dtype float32 against int8"),
        (np.zeros((1, 4, 4, 5), np.int16), "dtype int16 against int8"),
    ],
)
def test_another_shape_or_dtype_is_incomparable(structure: Structure, array: np.ndarray, said: str) -> None:
    structure.check(recording(), recording(cq=array))
    assert said in structure.incomparable["cq"]
    assert not structure.parameters_differ


@pytest.mark.parametrize(
    ("scale", "zero", "said"),
    [(0.0625, -1, "scale 0.0625"), (float(SCALE), 4, "zero point 4 against -1"), (0.0625, 4, "scale 0.0625")],
)
def test_another_scale_or_zero_point_is_said_with_both_numbers(
    structure: Structure, scale: float, zero: int, said: str
) -> None:
    structure.check(recording(), recording(zero=zero, scale=scale))
    assert said in structure.parameters_differ["cq"]
    assert not structure.incomparable


def test_the_scale_furthest_off_of_many_is_the_one_that_is_said(structure: Structure) -> None:
    scales = np.full(4, SCALE)
    many = replace(recording(), quantisation={"cq": Parameters(scales, np.full(4, -1, np.int8), 1)})
    structure.check(recording(), many)
    assert "4 scales against 1" in structure.parameters_differ["cq"]


@pytest.mark.parametrize("kind", ["U", "O", "M8[s]", "c8"])
def test_text_objects_times_and_complex_are_no_numbers(structure: Structure, kind: str) -> None:
    odd = np.zeros((1, 4, 4, 5)).astype(kind)
    structure.check(recording(), recording(cq=odd))
    assert "not numbers" in structure.not_numbers["cq"]


def test_one_sample_that_disagrees_is_enough_and_the_first_reason_stays_readable(structure: Structure) -> None:
    structure.check(recording(), recording())
    structure.check(recording(), recording(cq=np.zeros((1, 4, 4, 6), np.int8)))
    structure.check(recording(), recording())
    assert "shape [1, 4, 4, 6]" in structure.incomparable["cq"]


def test_what_the_recording_itself_calls_incomparable_is_kept(structure: Structure) -> None:
    structure.check(recording(), replace(recording(), values={}, incomparable={"cq": "64 bytes", "no row": "x"}))
    assert structure.incomparable == {"cq": "64 bytes"}


# -- inputs ------------------------------------------------------------------------------------------------------------

IMAGE = np.random.default_rng(3).random((1, 3, 4, 5)).astype(np.float32)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (IMAGE[:, ::-1].copy(), ""),
        (IMAGE.transpose(0, 2, 3, 1).copy(), ""),
        (IMAGE + np.float32(1e-6), ""),
        (np.random.default_rng(9).random(IMAGE.shape).astype(np.float32), "60 of 60 elements differ"),
        (IMAGE.astype(np.float64), ""),
    ],
)
def test_inputs_that_differ_in_anything_are_named(structure: Structure, other: np.ndarray, said: str) -> None:
    structure.check(recording(x=IMAGE), recording(x=other))
    assert said in structure.inputs_differ["x"]
    assert structure.inputs_differ["x"] != ""


def test_inputs_with_the_same_nan_are_the_same(structure: Structure) -> None:
    holed = IMAGE.copy()
    holed[0, 0, 0, 0] = np.nan
    structure.check(recording(x=holed), recording(x=holed.copy()))
    assert not structure.inputs_differ


# -- hints -------------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 4), min_size=2, max_size=5)


@given(SHAPES, st.randoms(use_true_random=False))
def test_a_hinted_transposition_does_turn_the_shape(shape: list[int], random: object) -> None:
    got = list(shape)
    random.shuffle(got)  # type: ignore[attr-defined]  # hypothesis hands out a random.Random
    hint = layout_hint(tuple(shape), tuple(got))
    if "channels last" in hint:
        assert [got[0], got[-1], *got[1:-1]] == shape
    else:
        order = [int(k) for k in hint.rpartition("[")[2].rstrip("]").split(",")]
        assert [got[k] for k in order] == shape
        assert sorted(order) == list(range(len(shape)))


@given(SHAPES)
def test_channels_last_is_seen_for_tuples_and_lists_alike(shape: list[int]) -> None:
    turned = [shape[0], *shape[2:], shape[1]]
    assert layout_hint(shape, turned) == layout_hint(tuple(shape), tuple(turned))


@pytest.mark.parametrize(("a", "b"), [((), (2,)), ((3,), (4,)), ((0, 4), (4, 1)), ((2, 3), (7,))])
def test_shapes_of_other_sizes_get_no_hint(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert layout_hint(a, b) == ""
