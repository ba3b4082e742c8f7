"""Where wrong elements lie: faults with a shape are named by it, noise is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equivcheck.where import where

SHAPE = (1, 16, 12, 20)


def planted(index: tuple, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """An error of 2 at `index`, rounding of at most 1/2 elsewhere."""
    error = np.random.default_rng(0).uniform(-0.5, 0.5, shape)
    error[index] = -2.0
    return error


ALL = slice(None)


@pytest.mark.parametrize(
    ("index", "kind", "words"),
    [
        ((ALL, ALL, ALL, -1), "border", "the last column"),
        ((ALL, ALL, 0), "border", "the first row"),
        ((ALL, ALL, slice(0, 2)), "border", "the first rows"),
        ((ALL, ALL, slice(0, 4), slice(15, 20)), "corner", "rows 0 to 3, columns 15 to 19"),
        ((ALL, ALL, ALL, slice(1, None, 4)), "stripe", "every 4th column from 1 on"),
        ((ALL, ALL, slice(0, None, 2)), "stripe", "every 2nd row from 0 on"),
        ((ALL, ALL, slice(3, 7)), "stripe", "rows 3 to 6"),
        ((ALL, ALL, ALL, 8), "stripe", "column 8"),
        ((ALL, ALL, slice(2, 6), slice(8, 16)), "tile", "rows 2 to 5, columns 8 to 15"),
        ((ALL, 5), "channel", "channel 5"),
        ((ALL, [2, 3, 11]), "channel", "3 of 16 channels (2, 3, 11)"),
        ((ALL, slice(3, None, 4)), "channel", "every 4th channel from 3 on"),
        ((ALL, 5, ALL, -1), "border", "the last column of channel 5"),  # one of 20 columns is rarer than one of 16
    ],
)
def test_a_planted_region_is_named(index: tuple, kind: str, words: str) -> None:
    found = where(planted(index), 0.5)
    assert (found.kind, found.sentence.partition("all in ")[2].removeprefix("a corner, ")) == (kind, words)
    assert found.share == pytest.approx(np.count_nonzero(planted(index) == -2.0) / np.prod(SHAPE))


def test_a_frame_of_wrong_padding_is_the_border_also_where_some_of_it_is_right_by_luck() -> None:
    error = planted((ALL, ALL, [0, -1]))
    error[..., [0, -1]] = 3.0
    error[np.random.default_rng(1).random(SHAPE) < 0.3] = 0.0
    found = where(error, 0.5)
    assert (found.kind, "the border, 1 wide" in found.sentence) == ("border", True)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([SHAPE, (2, 8, 7, 7), (1, 64, 1, 1), (1, 1000), (4, 10, 30), (500,), (1, 3, 2, 9, 9)]),
    st.floats(0.0005, 0.4),
    st.integers(0, 2**32 - 1),
)
def test_noise_is_scattered(shape: tuple[int, ...], density: float, seed: int) -> None:
    error = (np.random.default_rng(seed).random(shape) < density) * 1.0
    assert where(error, 0.5).kind in (("scattered",) if error.any() else ("nowhere",))


def test_a_wrong_scale_is_everywhere() -> None:
    error = np.random.default_rng(2).normal(0, 2, SHAPE)
    assert where(error, 0.5).kind == "everywhere"


def test_nothing_beyond_the_limit_is_nowhere() -> None:
    found = where(np.full(SHAPE, 0.5), 0.5)
    assert (found.kind, found.share) == ("nowhere", 0.0)
    assert where(np.zeros((0, 3, 4, 4)), 0.5).kind == "nowhere"


def test_a_number_that_is_none_is_beyond_any_limit() -> None:
    error = np.zeros(SHAPE)
    error[0, 3] = np.nan
    assert where(error, np.inf).sentence.endswith("channel 3")


def test_a_single_element_has_no_shape() -> None:
    error = np.zeros(SHAPE)
    error[0, 3, 4, 5] = 9.0
    assert where(error, 0.5).kind == "scattered"
    assert where(np.array(2.0), 0.5).share == 1.0


@pytest.mark.parametrize(
    ("shape", "index", "kind", "words"),
    [
        ((256,), slice(0, 16), "channel", "channels 0 to 15"),
        ((3, 64), (ALL, slice(1, None, 8)), "channel", "every 8th channel from 1 on"),
        ((2, 8, 33), (ALL, ALL, 32), "border", "the last column"),
        ((1, 4, 3, 9, 9), (ALL, ALL, ALL, ALL, 0), "border", "the first column"),
    ],
)
def test_arrays_of_other_ranks_have_channels_and_rows_too(shape: tuple, index: tuple, kind: str, words: str) -> None:
    found = where(planted(index, shape), 0.5)
    assert (found.kind, found.sentence.partition("all in ")[2]) == (kind, words)


def test_the_order_of_samples_and_the_sign_of_errors_do_not_matter() -> None:
    error = planted((ALL, 5), (3, 16, 6, 6))
    assert where(error, 0.5) == where(-error[::-1], 0.5)
