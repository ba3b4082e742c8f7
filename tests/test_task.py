"""What a difference means for the task, against hand-made outputs and laws that hold for any."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from equivcheck.task import ClassFigures, Flip, TaskFigures, TaskTally, kind_of

SCORES = st.floats(-8.0, 8.0, width=32)
ANY = hnp.arrays(
    np.float32,
    st.sampled_from([(4,), (2, 7), (1, 1), (2, 3, 1, 1), (1, 3, 4, 2), (2, 9, 5), (1, 4, 6), (0, 3), ()]),
    elements=st.floats(width=32),
)


def only(reference: object, candidate: object, lsb: float | None = None) -> TaskFigures:
    tally = TaskTally()
    pair = np.asarray(reference, np.float32), np.asarray(candidate, np.float32)
    tally.add({"out": pair}, {} if lsb is None else {"out": lsb}, sample="cat")
    (figures,) = tally.finish()
    return figures


def classes(reference: object, candidate: object) -> ClassFigures:
    figures = only(reference, candidate).classes
    assert figures is not None
    return figures


# -- classes -----------------------------------------------------------------------------------------------------------


def test_the_same_class_is_said_with_the_margin_that_decided() -> None:
    figures = only([[0.0, 3.0, 1.0]], [[0.5, 2.5, 1.0]], lsb=0.5)
    assert figures.text == "top-1 the same (1), margin 4 LSB"
    assert figures.classes is not None
    assert (figures.classes.same, figures.classes.margin, figures.classes.label) == (1, 2.0, 1)


def test_without_a_step_the_margin_is_in_the_outputs_own_unit() -> None:
    assert only([0.0, 0.75, 0.25], [0.0, 0.75, 0.25]).text == "top-1 the same (1), margin 0.5"


def test_another_class_is_said_with_how_much_each_side_prefers_its_own() -> None:
    figures = only([[1.0, 3.0, 2.5, 0.0]], [[1.0, 2.0, 4.0, 0.0]], lsb=0.25)
    assert figures.classes is not None
    flip = Flip(sample="cat", row=0, reference_class=1, candidate_class=2, reference_margin=0.5, candidate_margin=2.0)
    assert figures.classes.flips == [flip]
    assert figures.classes.different == 1
    assert figures.text == "top-1 differs: 1 by 2 LSB on the reference, 2 by 8 LSB on the candidate"


def test_a_tie_at_the_top_leaves_top_1_undecided() -> None:
    found = classes([[0.1, 0.7, 0.7, 0.2]], [[0.1, 0.69999, 0.70001, 0.2]])
    assert (found.tied, found.same, found.different, found.margin) == (1, 0, 0, None)
    assert only([[1.0, 2.0]], [[2.0, 2.0]]).text == "top-1 undecided: several classes tie at the top"


def test_a_tie_of_two_other_classes_is_a_difference_all_the_same() -> None:
    found = classes([[9.0, 1.0, 1.0]], [[1.0, 5.0, 5.0]])
    assert (found.tied, found.different) == (0, 1)


def test_the_shared_tie_is_counted_apart(shared: Path) -> None:
    folder = shared / "cases" / "m48_argmax_tie"
    found = classes(np.load(folder / "ref.npz")["t"], np.load(folder / "cand.npz")["t"])
    assert (found.n, found.tied, found.different) == (1, 1, 0)


def test_top_5_is_a_set() -> None:
    reference = np.arange(10.0)
    swapped = reference[[0, 1, 2, 3, 4, 6, 5, 9, 8, 7]]
    assert only(reference, swapped).text.endswith("; top-5 5 of 5")
    lost = np.where(reference == 5.0, 0.5, np.where(reference == 4.0, 5.5, reference))
    assert only(reference, lost).text == "top-1 the same (9), margin 1; top-5 4 of 5"


def test_top_5_does_not_care_which_of_tied_classes_was_taken() -> None:
    reference = np.array([9.0, 8.0, 7.0, 6.0, 5.0, 5.0, 0.0])
    candidate = np.array([9.0, 8.0, 7.0, 6.0, 4.9, 5.0, 0.0])
    found = classes(reference, candidate)
    assert (found.top_same, found.top_shared) == (1, 5)
    assert classes(candidate, reference).top_same == 1


@given(hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(6, 9)), elements=st.integers(-2, 3).map(float)))
def test_top_5_shares_the_most_that_any_choice_among_ties_could(sides: np.ndarray) -> None:
    def choices(scores: np.ndarray) -> list[set[int]]:
        last = np.sort(scores)[-5]
        sure = set(np.flatnonzero(scores > last).tolist())
        tied = np.flatnonzero(scores == last).tolist()
        return [sure | set(some) for some in itertools.combinations(tied, 5 - len(sure))]

    most = max(len(one & other) for one in choices(sides[0]) for other in choices(sides[1]))
    assert classes(*sides).top_shared == most


def test_five_classes_have_no_top_5() -> None:
    assert classes(np.arange(5.0), np.arange(5.0)).top_same is None


def test_over_samples_the_share_that_agrees_and_the_surest_that_differs() -> None:
    tally = TaskTally()
    for sample, reference, candidate in (
        ("a", [0.0, 4.0], [0.0, 4.0]),
        ("b", [3.0, 0.0], [0.0, 1.0]),
        ("c", [1.0, 0.0], [0.0, 1.0]),
        ("d", [2.0, 2.0], [0.0, 1.0]),
        ("e", [2.0, np.nan], [0.0, 1.0]),
    ):
        tally.add({"out": (np.array([reference]), np.array([candidate]))}, sample=sample)
    (figures,) = tally.finish()
    assert figures.text == (
        "top-1 the same in 1 of 5 (1 tied, 1 with NaN or Inf), "
        "the surest that differs: 0 by 3 on the reference, 1 by 1 on the candidate"
    )
    assert figures.classes is not None
    assert [flip.sample for flip in figures.classes.flips] == ["b", "c"]


@pytest.mark.parametrize("shape", [(6,), (1, 6), (1, 6, 1, 1), (1, 1, 1, 6)])
def test_class_scores_come_in_four_shapes(shape: tuple[int, ...]) -> None:
    scores = np.array([0.0, 5.0, -1.0, 2.0, 7.0, 1.0]).reshape(shape)
    figures = only(scores, scores)
    assert figures.kind == "classes"
    assert figures.text == "top-1 the same (4), margin 2; top-5 5 of 5"


@given(st.data(), st.integers(2, 12), st.integers(1, 3))
def test_permuting_classes_changes_no_count(data: st.DataObject, width: int, rows: int) -> None:
    # few distinct values: ties are the hard part
    draw = hnp.arrays(np.float32, (rows, width), elements=st.integers(-3, 3).map(float))
    reference, candidate = data.draw(draw), data.draw(draw)
    order = np.array(data.draw(st.permutations(range(width))))
    plain, moved = classes(reference, candidate), classes(reference[:, order], candidate[:, order])
    assert (plain.same, plain.different, plain.tied) == (moved.same, moved.different, moved.tied)
    assert (plain.margin, plain.top_same, plain.top_shared) == (moved.margin, moved.top_same, moved.top_shared)


@given(hnp.arrays(np.float32, (3, 9), elements=SCORES), st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling_the_candidate_changes_no_class(reference: np.ndarray, factor: float) -> None:
    found = classes(reference, reference * np.float32(factor))
    assert (found.different, found.top_same) == (0, 3)


# -- pixels, scores, distance ------------------------------------------------------------------------------------------


def test_pixels_whose_largest_channel_differs_are_counted() -> None:
    reference = np.zeros((1, 3, 4, 5))
    reference[0, 1] = 2.0
    candidate = reference.copy()
    candidate[0, 2, 0, :3] = 3.0  # another channel wins
    candidate[0, 2, 1, 0] = 2.0  # a tie
    candidate[0, 0, 2, 0] = np.nan
    figures = only(reference, candidate)
    assert figures.kind == "pixels"
    assert figures.text == "the largest channel differs in 3 of 20 pixels (15 %); 1 tied; 1 with NaN or Inf"


def test_channels_last_maps_are_read_along_their_last_axis() -> None:
    reference = np.zeros((2, 8, 9, 3))
    reference[..., 1] = 2.0
    candidate = reference.copy()
    candidate[0, 0, 0, 2] = 3.0
    figures = only(reference, candidate)
    assert figures.pixels is not None
    assert (figures.pixels.n, figures.pixels.different) == (2 * 8 * 9, 1)


def test_a_softmax_over_channels_is_a_segmentation_and_independent_scores_are_not() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 4, 6, 6))
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert kind_of(softmax, softmax) == "pixels"
    sigmoid = 1.0 / (1.0 + np.exp(-logits))
    assert kind_of(sigmoid, sigmoid) == "scores"
    assert kind_of(sigmoid[:, :1], sigmoid[:, :1]) == "scores"


@pytest.mark.parametrize("axis", [1, 2])
def test_scores_of_boxes_count_where_they_cross_on_one_side_only(axis: int) -> None:
    reference = np.zeros((1, 20, 6))
    reference[0, :, :4] = 100.0  # coordinates in pixels are no scores
    candidate = reference.copy()
    reference[0, 0, 4:] = [0.6, 0.3]
    candidate[0, 0, 4:] = [0.45, 0.2]  # both drop: one below 0.5, one below 0.25
    candidate[0, 1, 4] = 0.5
    figures = only(np.moveaxis(reference, 2, axis), np.moveaxis(candidate, 2, axis))
    assert figures.scores is not None
    assert figures.scores.n == 40
    low, high = figures.scores.crossed
    assert (low.reference_only, low.candidate_only, low.either) == (1, 1, 3)
    assert (high.reference_only, high.candidate_only, high.either) == (1, 1, 2)
    assert figures.text == "2 of 3 scores pass 0.25 on one side only; 2 of 2 scores pass 0.5 on one side only"


def test_bare_coordinates_are_no_scores() -> None:
    boxes = np.full((1, 50, 4), 0.5)
    assert kind_of(boxes, boxes) == "distance"


def test_scores_that_nobody_would_detect_are_said_to_be_none() -> None:
    quiet = np.full((1, 50, 6), 0.1)
    assert only(quiet, quiet).text == "no score of 300 passes 0.25 on either side"


def test_anything_else_is_a_distance() -> None:
    reference = np.array([[[3.0, 4.0, 5.0]] * 4])
    figures = only(reference, reference * 1.1)
    assert figures.kind == "distance"
    assert figures.distance.snr_db == pytest.approx(20.0, abs=1e-4)  # the error is a tenth
    assert figures.distance.cosine == pytest.approx(1.0, abs=1e-6)
    assert figures.text == "SNR 20.0 dB, cosine 1"


def test_integers_are_compared_as_they_are() -> None:
    tally = TaskTally()
    tally.add({"labels": (np.array([2**53 + 1, 7]), np.array([2**53, 7]))})  # equal in float64
    (figures,) = tally.finish()
    assert figures.kind == "distance"
    assert not figures.distance.equal


def test_samples_that_are_read_differently_leave_the_distance() -> None:
    tally = TaskTally()
    for sample in (np.full((1, 1, 6, 6), 0.5), np.full((1, 2, 6, 6), 4.0)):
        tally.add({"out": (sample, sample)})
    (figures,) = tally.finish()
    assert (figures.kind, figures.samples, figures.text) == ("distance", 2, "equal")


def test_an_empty_output_and_another_shape_are_nothing_to_compare() -> None:
    assert only(np.zeros((0, 3)), np.zeros((0, 3))).text == "nothing to compare: the output is empty"
    tally = TaskTally()
    tally.add({"out": (np.zeros(3), np.zeros(4))})
    assert tally.finish() == []


@pytest.mark.parametrize("shape", [(1, 4), (1, 3, 4, 4), (1, 20, 6), (7, 2, 2, 2, 2)])
def test_nothing_but_nan_has_no_figure(shape: tuple[int, ...]) -> None:
    nothing = np.full(shape, np.nan)
    figures = only(nothing, nothing)
    assert figures.distance.n == 0
    assert figures.distance.not_finite == math.prod(shape)
    assert figures.distance.snr_db is None
    assert figures.text


@given(ANY, st.data())
def test_any_floats_give_figures_that_json_can_hold_and_a_sentence(reference: np.ndarray, data: st.DataObject) -> None:
    candidate = data.draw(hnp.arrays(np.float32, reference.shape, elements=st.floats(width=32)))
    figures = only(reference, candidate)
    assert figures.text
    assert msgspec.json.decode(msgspec.json.encode(figures), type=TaskFigures) == figures


@given(ANY)
def test_the_same_on_both_sides_differs_nowhere(output: np.ndarray) -> None:
    figures = only(output, output)
    assert figures.distance.equal
    assert figures.classes is None or figures.classes.different == 0
    assert figures.pixels is None or figures.pixels.different == 0
    assert figures.scores is None or not any(c.reference_only or c.candidate_only for c in figures.scores.crossed)


@given(
    st.lists(hnp.arrays(np.float32, (2, 2, 7), elements=st.integers(-9, 9).map(float)), max_size=4), st.integers(0, 4)
)
def test_merging_two_halves_is_gathering_all(samples: list[np.ndarray], cut: int) -> None:
    """Integers: their sums are exact in any order."""

    def gathered(part: list[np.ndarray], start: int) -> TaskTally:
        tally = TaskTally()
        for k, (reference, candidate) in enumerate(part, start):
            tally.add({"out": (reference, candidate)}, {"out": 0.5}, sample=str(k))
        return tally

    merged = gathered(samples[:cut], 0) + gathered(samples[cut:], len(samples[:cut]))
    assert merged.finish() == gathered(samples, 0).finish()
