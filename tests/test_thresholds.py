"""Thresholds on a tensor's error since the input: which figure is held against which limit, and what is said."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.metrics import Grid, tally
from equivcheck.thresholds import by_preset, by_rules, figures, not_finite_alike
from equivcheck.tolerance import Tolerance

FLOATS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30)
GRID = Grid(np.array(0.5), np.array(0.0))


def codes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int8)


@given(FLOATS, st.integers(0, 2**32 - 1), st.sampled_from(["max_abs", "mismatch_share", "cosine", "snr_db"]))
def test_a_tensor_passes_at_its_own_figure_and_fails_just_inside(numbers: list[float], seed: int, metric: str) -> None:
    ref = np.array(numbers, np.float32)
    cand = ref + np.random.default_rng(seed).normal(size=ref.shape).astype(np.float32)
    found = tally(ref, cand)
    value = figures(found)[metric]
    if value is None or found.mismatched == 0:
        return
    at = by_rules({metric: value}, found, "f.toml")
    assert at is not None
    assert at[0] in ("identical", "equivalent")
    tighter = np.nextafter(value, math.inf if metric in ("cosine", "snr_db") else -math.inf)
    inside = by_rules({metric: float(tighter)}, found, "f.toml")
    assert inside is not None
    assert inside[0] == "different"


@given(FLOATS, FLOATS, st.floats(0, 10), st.floats(0, 1))
def test_atol_and_rtol_are_those_of_numpy(a: list[float], b: list[float], atol: float, rtol: float) -> None:
    size = min(len(a), len(b))
    ref, cand = np.array(a[:size]), np.array(b[:size])
    far = int(np.count_nonzero(np.abs(cand - ref) > atol + rtol * np.abs(ref)))
    got = by_rules({"atol": atol, "rtol": rtol}, tally(ref, cand, close=(atol, rtol)), "f.toml")
    assert got is not None
    assert (got[0] == "different") == (far > 0)
    assert far == 0 or got[1].startswith(f"{far} of {size} elements")


def test_figures_in_lsb_are_in_steps_of_the_grid() -> None:
    found = figures(tally(codes(0, 0, 0, 0), codes(0, 1, 2, -3), GRID))
    assert (found["max_lsb"], found["max_abs"], found["bias_lsb"], found["mismatch_share"]) == (3, 3, 0, 0.75)


def test_a_code_of_an_unknown_scale_is_a_step() -> None:
    found = figures(tally(codes(0, 0), codes(2, 0)))
    assert (found["max_lsb"], found["bias_lsb"]) == (2, 1)


def test_a_negative_bias_breaks_a_limit_as_a_positive_one() -> None:
    got = by_rules({"bias_lsb": 0.5}, tally(codes(1, 1), codes(0, 0), GRID), "f.toml")
    assert got is not None
    assert got[0] == "different"
    assert got[2] is not None
    assert (got[2].metric, got[2].max, got[2].rule) == ("bias_lsb", 0.5, "rule of f.toml")


def test_a_lower_bound_is_a_minimum_in_the_limit() -> None:
    got = by_rules({"cosine": 0.999}, tally(np.array([1.0, 0.0]), np.array([0.0, 1.0])), "f.toml")
    assert got is not None
    assert got[2] is not None
    assert (got[0], got[2].min, got[2].max) == ("different", 0.999, None)


def test_no_rule_is_no_verdict_and_excess_is_not_of_the_whole_way() -> None:
    found = tally(codes(0), codes(9), GRID)
    assert by_rules({}, found, "f.toml") is None
    assert by_rules({"excess": 0.1}, found, "f.toml") is None


@pytest.mark.parametrize("metric", ["max_abs", "max_lsb", "bias_lsb", "mismatch_share", "cosine", "snr_db", "atol"])
@pytest.mark.parametrize("kind", ["empty", "nan", "zeros"])
def test_equal_tensors_meet_every_limit(metric: str, kind: str) -> None:
    array = {"empty": np.zeros((0, 3), np.float32), "nan": np.full(2, np.nan), "zeros": np.zeros(2)}[kind]
    got = by_rules({metric: 0.0}, tally(array, array.copy()), "f.toml")
    assert got is None or got[0] == "identical", got


def test_every_limit_of_several_must_hold() -> None:
    found = tally(codes(0, 0), codes(1, 0), GRID)
    assert by_rules({"max_lsb": 1, "mismatch_share": 0.5}, found, "f")[0] == "equivalent"  # type: ignore[index]  # given
    assert by_rules({"max_lsb": 1, "mismatch_share": 0.4}, found, "f")[0] == "different"  # type: ignore[index]  # given
    both = by_rules({"atol": 1.0, "mismatch_share": 0.4}, tally(codes(0, 0), codes(1, 0), GRID, close=(1.0, 0.0)), "f")
    assert both is not None
    assert both[0] == "different"


@pytest.mark.parametrize(
    ("ref", "cand", "said"),
    [
        ([np.nan, 1.0], [1.0, 1.0], "NaN in 1 places on one side only (reference 1, candidate 0)"),
        ([np.nan, 1.0], [1.0, np.nan], "NaN in 2 places"),
        ([np.inf, 1.0], [-np.inf, 1.0], "infinities disagree in 1 places"),
        ([np.inf, 1.0], [3e38, 1.0], "infinities disagree in 1 places"),
        ([np.nan, np.inf], [np.nan, np.inf], None),
    ],
)
def test_nan_and_infinity_must_lie_alike(ref: list[float], cand: list[float], said: str | None) -> None:
    found = tally(np.array(ref), np.array(cand))
    text = not_finite_alike(found)
    assert (text is None) == (said is None)
    assert said is None or said in (text or "")
    for preset in ("bitwise", "close"):
        assert (by_preset(Tolerance(preset, source=preset), found)[0] == "different") == (said is not None)


def test_presets_differ_where_a_float_is_close() -> None:
    found = tally(np.array([1.0, 2.0]), np.array([1.0, 2.0 + 1e-4]), close=(1e-3, 1e-3))
    assert by_preset(Tolerance("close", source="close"), found)[0] == "equivalent"
    assert by_preset(Tolerance("bitwise", source="bitwise"), found)[0] == "different"
    assert by_preset(Tolerance("close", source="close"), None)[0] == "unjudged"
    assert (
        by_preset(Tolerance("close", source="close"), tally(codes(1), codes(2), GRID, close=(0.0, 0.0)))[0]
        == "different"
    )
