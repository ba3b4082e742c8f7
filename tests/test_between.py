"""Two results against each other: what is newly wrong, what no longer is, and whether they can be compared at all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import equivcheck
from equivcheck.between import SCHEMA, Between, compare_results
from equivcheck.errors import RecordingError
from equivcheck.result import Result, from_json

IMAGE = np.random.default_rng(0).random((1, 1, 8, 8)).astype(np.float32)
FAULT = "vnpu:fault=dropped-bias"


@pytest.fixture(scope="module")
def results(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("results")
    found = {}
    for name, spec in (("good", "vnpu"), ("bad", FAULT), ("other", "ort:optimization=disable")):
        found[name] = folder / f"{name}.json"
        result = equivcheck.diff(
            fixtures_dir / "digits_qdq_s8.onnx", inputs=IMAGE, candidate=spec, second_opinion=False
        )
        found[name].write_bytes(result.to_json())
    return found


def read(path: Path) -> Result:
    return from_json(path.read_bytes())


def written(path: Path, result: Result) -> Path:
    path.write_bytes(result.to_json())
    return path


def test_a_result_against_itself_changes_nothing(results: dict[str, Path]) -> None:
    for path in results.values():
        same = compare_results(path, path)
        assert (same.exit_code, same.changes, same.notes) == (0, [], [])
        assert same.unchanged == len(read(path).tensors)


def test_a_new_culprit_is_named_with_its_figures(results: dict[str, Path]) -> None:
    found = compare_results(results["good"], results["bad"])
    wrong = read(results["bad"]).culprits
    assert found.exit_code == 1
    assert found.verdicts == ("equivalent", "different")
    assert [(c.name, c.step, c.what) for c in found.changes] == [
        (culprit.outputs[0], culprit.step, "broken") for culprit in wrong
    ]
    first, second = found.changes[0].excess
    assert first is not None
    assert second is not None
    assert first < second
    assert str(found).startswith("EQUIVALENT became DIFFERENT; 1 of 9 values have another verdict.")
    assert "newly wrong" in str(found)


def test_the_other_way_round_it_is_mended(results: dict[str, Path]) -> None:
    found = compare_results(results["bad"], results["good"])
    assert [change.what for change in found.changes] == ["mended"]
    assert "no longer wrong" in str(found)
    assert found.exit_code == 1


def test_two_legal_engines_that_differ_in_bits_have_changed_nothing(results: dict[str, Path]) -> None:
    found = compare_results(results["good"], results["other"])
    assert (found.exit_code, found.changes) == (0, [])


def test_the_newly_wrong_come_first(results: dict[str, Path], tmp_path: Path) -> None:
    result = read(results["good"])
    rows = [
        msgspec.structs.replace(row, verdict="different" if number == 0 else row.verdict)
        for number, row in enumerate(result.tensors)
    ]
    mended_first = written(tmp_path / "a.json", msgspec.structs.replace(result, tensors=rows))
    assert [c.what for c in compare_results(mended_first, results["bad"]).changes] == ["broken", "mended"]


def test_values_that_one_result_lacks_are_listed_and_count(results: dict[str, Path], tmp_path: Path) -> None:
    result = read(results["good"])
    fewer = written(tmp_path / "a.json", msgspec.structs.replace(result, tensors=result.tensors[1:]))
    gone = result.tensors[0].name
    found = compare_results(results["good"], fewer)
    assert (found.only_first, found.only_second, found.exit_code) == ([gone], [], 1)
    assert f"only in the first: {gone}" in str(found)
    assert compare_results(fewer, results["good"]).only_second == [gone]


def test_what_makes_two_results_unlike_is_noted(results: dict[str, Path], tmp_path: Path, fixtures_dir: Path) -> None:
    other = equivcheck.diff(
        fixtures_dir / "digits_qdq_u8.onnx", inputs=IMAGE + 1, candidate="vnpu", tolerance="bitwise"
    )
    found = compare_results(results["good"], written(tmp_path / "u8.json", other))
    said = " ".join(found.notes)
    assert "different model files" in said
    assert "different inputs" in said
    assert "different tolerances: semantics, bitwise" in said


def test_results_without_a_model_are_compared_too(tmp_path: Path) -> None:
    for name, value in (("a", 0), ("b", 0), ("c", 1)):
        np.savez(tmp_path / f"{name}.npz", t=np.full(3, value, np.float32))
    paths = [
        written(tmp_path / f"{n}.json", equivcheck.compare(tmp_path / "a.npz", tmp_path / f"{n}.npz")) for n in "bc"
    ]
    found = compare_results(*paths)
    assert [change.what for change in found.changes] == ["broken"]
    assert "None" not in str(found), "a tensor without a step is not step #None"


def test_the_json_comes_back_as_it_was(results: dict[str, Path]) -> None:
    found = compare_results(results["good"], results["bad"])
    assert msgspec.json.decode(found.to_json(), type=Between) == found
    assert found.schema == SCHEMA


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"schema": "equivcheck/1"}', b"NaN", b"1" * 5000]
)
def test_what_is_no_result_is_said_with_the_way_out(results: dict[str, Path], tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    for paths in ((bad, results["good"]), (results["good"], bad)):
        with pytest.raises(RecordingError, match=r"bad.json is not a result of equivcheck.*diff --json FILE"):
            compare_results(*paths)


def test_a_result_of_another_schema_is_refused(results: dict[str, Path], tmp_path: Path) -> None:
    newer = written(tmp_path / "new.json", msgspec.structs.replace(read(results["good"]), schema="equivcheck/9"))
    with pytest.raises(RecordingError, match="equivcheck/9"):
        compare_results(results["good"], newer)


def test_the_comparison_of_two_results_is_itself_no_result(results: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "between.json").write_bytes(compare_results(results["good"], results["bad"]).to_json())
    with pytest.raises(RecordingError, match="not a result"):
        compare_results(tmp_path / "between.json", results["good"])


def test_a_missing_file_or_a_folder_is_said(results: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"no\.json cannot be read: No such file"):
        compare_results(tmp_path / "no.json", results["good"])
    with pytest.raises(RecordingError, match="cannot be read: Is a directory"):
        compare_results(tmp_path, results["good"])
