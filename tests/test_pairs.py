"""`compare` without a model: tensors by name, over samples, whatever their kind - and nothing passes unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equivcheck
from equivcheck.result import Result, from_json

ONE = np.arange(1, 13, dtype=np.float32).reshape(1, 3, 4)
EMPTY = np.zeros((0, 4), np.float32)
Sample = dict[str, Any]


def dump(place: Path, *samples: Sample) -> Path:
    """One .npz, or a folder with one a sample."""
    if len(samples) == 1:
        np.savez(place.with_suffix(".npz"), **samples[0])
        return place.with_suffix(".npz")
    place.mkdir()
    for number, sample in enumerate(samples):
        np.savez(place / f"Result_{number}.npz", **sample)
    return place


def pair(folder: Path, ref: Sample, cand: Sample, **options: Any) -> Result:
    return equivcheck.compare(dump(folder / "ref", ref), dump(folder / "cand", cand), **options)


def rules(folder: Path, text: str) -> Path:
    (folder / "rules.toml").write_text(text)
    return folder / "rules.toml"


def verdicts(result: Result) -> dict[str, str]:
    return {tensor.name: tensor.verdict for tensor in result.tensors}


# -- kinds of tensors --------------------------------------------------------------------------------------------------

KINDS = {
    "scalar": np.float32(2),
    "empty": EMPTY,
    "bool": np.array([True, False]),
    "float16": ONE.astype(np.float16),
    "float64": ONE.astype(np.float64),
    "int4 range": np.arange(-8, 8, dtype=np.int8),
    "uint64 top": np.array([2**64 - 1, 0], np.uint64),
    "int64 ends": np.array([-(2**63), 2**63 - 1]),
    "nan": np.array([np.nan, 1, np.inf, -np.inf], np.float32),
    "nothing but nan": np.full(3, np.nan, np.float32),
    "six dimensions": np.ones((1, 2, 1, 3, 1, 2)),
    "fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.array([1.5, -2], ">f4"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tolerance", [None, "close", "bitwise"])
def test_a_dump_against_its_copy_is_identical(tmp_path: Path, kind: str, tolerance: str | None) -> None:
    result = pair(tmp_path, {"a/b:0": KINDS[kind]}, {"a/b:0": np.array(KINDS[kind])}, tolerance=tolerance)
    assert (result.verdict, verdicts(result)) == ("equivalent", {"a/b:0": "identical"})
    assert from_json(result.to_json()) == result


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("empty", "nothing but nan")])
def test_one_changed_element_is_different_and_found(tmp_path: Path, kind: str) -> None:
    changed = np.array(KINDS[kind])
    where = tuple(0 for _ in changed.shape)
    changed[where] = not changed[where] if changed.dtype == bool else 0 if changed[where] != 0 else 1
    result = pair(tmp_path, {"t": KINDS[kind]}, {"t": changed})
    assert result.verdict == "different"
    found = result.tensors[0].accumulated
    assert found is not None
    assert found.mismatched == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "limit", ["max_abs = 0.1", "rtol = 0.1", "mismatch_share = 0.0", "cosine = 0.9", "snr_db = 20"]
)
def test_a_rule_is_met_where_every_element_is_equal(tmp_path: Path, kind: str, limit: str) -> None:
    """A figure that does not exist, because there is nothing to differ, breaks no limit."""
    result = pair(
        tmp_path, {"t": KINDS[kind]}, {"t": np.array(KINDS[kind])}, tolerance=rules(tmp_path, f"[[rule]]\n{limit}\n")
    )
    assert verdicts(result) == {"t": "identical"}, result.reason


@pytest.mark.parametrize(
    ("ref", "cand", "said"),
    [
        (np.float32(1), np.ones(1, np.float32), "shape [1] against []"),
        (ONE, ONE.astype(np.float64), "dtype float64 against float32"),
        (np.zeros(2, np.int8), np.zeros(2, np.int16), "declare scale and zero point"),
        (ONE, np.moveaxis(ONE, 1, 2).copy(), "channels last"),
        (np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3).T.copy(), "transposed by [1, 0]"),
        (np.ones((2, 3)), np.ones(6), "reshaped"),
        (np.ones((2, 3)), np.ones((2, 4)), "shape [2, 4] against [2, 3]"),
        (EMPTY, np.zeros((4, 0), np.float32), "shape [4, 0] against [0, 4]"),
    ],
)
def test_another_shape_or_dtype_is_a_difference_with_a_hint(
    tmp_path: Path, ref: np.ndarray, cand: np.ndarray, said: str
) -> None:
    result = pair(tmp_path, {"t": ref}, {"t": cand})
    assert (result.verdict, verdicts(result)) == ("different", {"t": "incomparable"})
    assert said in result.reason


def test_a_transposition_is_only_hinted_at_where_the_numbers_agree(tmp_path: Path) -> None:
    image = np.random.default_rng(0).normal(size=(1, 3, 4, 6)).astype(np.float32)
    turned = pair(tmp_path, {"t": image}, {"t": image.transpose(0, 2, 3, 1)})
    assert "channels last" in turned.reason
    labelled = pair(tmp_path, {"t": image}, {"t": image.reshape(1, 4, 6, 3)})
    assert "reshape" in labelled.reason
    assert "channels last" not in labelled.reason


def test_the_worst_element_of_a_different_tensor_is_in_the_reason(tmp_path: Path) -> None:
    wrong = ONE.copy()
    wrong[0, 2, 1] += 5
    assert "[0, 2, 1]" in pair(tmp_path, {"t": ONE}, {"t": wrong}).reason


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_that_only_one_side_has(tmp_path: Path) -> None:
    result = pair(tmp_path, {"a": ONE, "gone": ONE}, {"a": ONE, "more": ONE})
    assert verdicts(result) == {"a": "identical", "gone": "different", "more": "unjudged"}
    assert result.reason == "gone: the candidate does not have it"
    assert any(note == "only in the candidate: more" for note in result.notes)
    assert (result.coverage.steps, result.coverage.judged) == (2, 2)


def test_nothing_in_common_is_a_difference(tmp_path: Path) -> None:
    assert pair(tmp_path, {"a": ONE}, {"b": ONE}).verdict == "different"


def test_only_more_in_the_candidate_is_equivalent(tmp_path: Path) -> None:
    assert pair(tmp_path, {"a": ONE}, {"a": ONE, "b": ONE}).verdict == "equivalent"


def test_a_names_file_pairs_other_names(tmp_path: Path) -> None:
    names = rules(tmp_path, '[names]\n"conv_out" = "a"\n')
    assert pair(tmp_path, {"a": ONE}, {"conv_out": ONE}, names=names).verdict == "equivalent"


# -- rules and presets -------------------------------------------------------------------------------------------------


def test_semantics_has_nothing_to_judge_by_without_a_model(tmp_path: Path) -> None:
    result = pair(tmp_path, {"t": ONE}, {"t": ONE}, tolerance="semantics")
    assert (result.verdict, verdicts(result)) == ("inconclusive", {"t": "unjudged"})


def test_a_tensor_that_no_rule_speaks_of_leaves_the_run_without_a_verdict(tmp_path: Path) -> None:
    tolerance = rules(tmp_path, '[[rule]]\ntensor = "a"\natol = 1\n')
    result = pair(tmp_path, {"a": ONE, "b": ONE}, {"a": ONE, "b": ONE}, tolerance=tolerance)
    assert (result.verdict, verdicts(result)) == ("inconclusive", {"a": "identical", "b": "unjudged"})


def test_a_rule_that_matches_no_tensor_is_said(tmp_path: Path) -> None:
    tolerance = rules(tmp_path, 'preset = "close"\n[[rule]]\ntensor = "conf*"\natol = 1\n')
    result = pair(tmp_path, {"conv": ONE}, {"conv": ONE}, tolerance=tolerance)
    assert any("conf*" in note and "matches no" in note for note in result.notes), result.notes


def test_a_rule_in_lsb_does_not_speak_of_tensors_without_lsb(tmp_path: Path) -> None:
    codes = np.array([[1, 2, 3]], np.int8)
    tolerance = rules(tmp_path, 'preset = "close"\n[[rule]]\nmax_lsb = 1\n')
    result = pair(tmp_path, {"q": codes, "y": ONE}, {"q": codes + np.int8(1), "y": ONE}, tolerance=tolerance)
    assert verdicts(result) == {"q": "equivalent", "y": "identical"}


@pytest.mark.parametrize(("sides", "verdict"), [((0, 0), "identical"), ((0, 1), "different"), ((1, 1), "identical")])
def test_nan_on_one_side_breaks_every_rule(tmp_path: Path, sides: tuple[int, int], verdict: str) -> None:
    arrays = [np.array([np.nan if nan else 1.0, 2.0], np.float32) for nan in sides]
    tolerance = rules(tmp_path, "[[rule]]\nmax_abs = 1e30\n")
    assert verdicts(pair(tmp_path, {"t": arrays[0]}, {"t": arrays[1]}, tolerance=tolerance)) == {"t": verdict}


# -- several samples ---------------------------------------------------------------------------------------------------


def samples(folder: Path, ref: list[Sample], cand: list[Sample], **options: Any) -> Result:
    return equivcheck.compare(dump(folder / "ref", *ref), dump(folder / "cand", *cand), **options)


@pytest.mark.parametrize("bad", range(3))
def test_a_difference_in_one_sample_of_three_is_found_and_shown_by_sample(tmp_path: Path, bad: int) -> None:
    wrong = [{"t": ONE + (number == bad)} for number in range(3)]
    result = samples(tmp_path, [{"t": ONE}] * 3, wrong)
    row = result.tensors[0]
    assert (result.verdict, row.verdict) == ("different", "different")
    assert row.accumulated is not None
    assert (row.accumulated.n, row.accumulated.mismatched) == (3 * ONE.size, ONE.size)
    shown = [(one.sample, one.accumulated.mismatched) for one in row.by_sample if one.accumulated is not None]
    assert shown == [(f"Result_{number}", ONE.size * (number == bad)) for number in range(3)]


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_tensor_that_one_sample_of_the_candidate_lacks_is_a_difference(tmp_path: Path, lacking: int) -> None:
    whole = {"t": ONE, "u": ONE}
    found = [whole if number != lacking else {"t": ONE} for number in range(3)]
    result = samples(tmp_path, [whole] * 3, found)
    assert (result.verdict, verdicts(result)) == ("different", {"t": "identical", "u": "different"})
    assert f"Result_{lacking}" in result.reason


def test_samples_that_only_the_candidate_has_are_not_dropped_in_silence(tmp_path: Path) -> None:
    ref, cand = tmp_path / "ref", dump(tmp_path / "cand", {"t": ONE}, {"t": ONE * 9})
    ref.mkdir()
    np.savez(ref / "Result_0.npz", t=ONE)
    result = equivcheck.compare(ref, cand)
    assert any("Result_1" in note for note in result.notes), result.notes


def test_samples_are_paired_by_name_in_whatever_order_they_were_dumped(tmp_path: Path) -> None:
    for side, names in (("ref", ["cat", "dog"]), ("cand", ["dog", "cat"])):
        (tmp_path / side).mkdir()
        for name in names:
            np.savez(tmp_path / side / f"{name}.npz", t=ONE * len(name) * (1 if name == "cat" else 2))
    assert equivcheck.compare(tmp_path / "ref", tmp_path / "cand").verdict == "equivalent"


def test_a_shape_that_changes_in_the_second_sample_is_a_difference(tmp_path: Path) -> None:
    result = samples(tmp_path, [{"t": ONE}] * 2, [{"t": ONE}, {"t": ONE[:, :2]}])
    assert (result.verdict, verdicts(result)) == ("different", {"t": "incomparable"})


# -- laws --------------------------------------------------------------------------------------------------------------

CODES = st.lists(st.integers(-128, 127), min_size=1, max_size=20)


@given(CODES, st.integers(0, 3))
def test_max_lsb_of_codes_without_scale_counts_codes(
    tmp_path_factory: pytest.TempPathFactory, codes: list[int], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("law")
    ref = np.array(codes, np.int8)
    cand = np.clip(ref.astype(int) + 2, -128, 127).astype(np.int8)
    worst = int(np.max(np.abs(ref.astype(int) - cand)))
    result = pair(folder, {"t": ref}, {"t": cand}, tolerance=rules(folder, f"[[rule]]\nmax_lsb = {limit}\n"))
    assert (result.verdict == "equivalent") == (worst <= limit)


@given(CODES, st.sampled_from([0.25, 0.1, 3.0]))
def test_the_same_reals_in_other_codes_are_equal_once_declared(
    tmp_path_factory: pytest.TempPathFactory, codes: list[int], scale: float
) -> None:
    folder = tmp_path_factory.mktemp("law")
    s8 = np.array(codes, np.int8)
    u8 = (s8.astype(int) + 128).astype(np.uint8)
    line = '[[tensor]]\nname = "t"\nscale = {}\nzero_point = {}\n'
    (folder / "s8.toml").write_text(line.format(scale, 0))
    (folder / "u8.toml").write_text(line.format(scale, 128))
    result = pair(folder, {"t": s8}, {"t": u8}, reference_names=folder / "s8.toml", names=folder / "u8.toml")
    assert verdicts(result) == {"t": "identical"}
