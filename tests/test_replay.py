"""`compare` with a model: the same verdicts and culprits as `diff`, from recordings alone; with values and inputs missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import equivcheck
from equivcheck.backends.fake import FakeBackend
from equivcheck.errors import EquivcheckError, RecordingError
from equivcheck.recording import load
from equivcheck.result import Result

POOLED = "pooled_QuantizeLinear_Output"
DOWN = "down_relu_QuantizeLinear_Output"
IMAGE = np.random.default_rng(0).random((1, 1, 8, 8)).astype(np.float32)
OTHER = np.random.default_rng(1).random((1, 1, 8, 8)).astype(np.float32)
FORMS = ["digits_qdq_s8", "digits_qdq_u8", "digits_qop_u8", "detector_qdq_s8", "detector_qop_u8"]


@pytest.fixture(scope="module")
def digits(fixtures_dir: Path) -> Path:
    return fixtures_dir / "digits_qdq_s8.onnx"


def judged(result: Result) -> dict[str, object]:
    """What must not depend on whether values came from a run or from a recording."""
    return {
        "verdict": result.verdict,
        "culprits": [(c.step, c.op_type, c.outputs) for c in result.culprits],
        "rows": [(t.name, t.verdict, t.local.candidate, t.local.reference, t.accumulated) for t in result.tensors],
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ["vnpu", "ort:optimization=disable", "vnpu:fault=dropped-bias"])
def test_compare_says_what_diff_says(fixtures_dir: Path, tmp_path: Path, form: str, engine: str) -> None:
    model = fixtures_dir / f"{form}.onnx"
    live = equivcheck.diff(model, candidate=engine, save_to=tmp_path, second_opinion=False)
    again = equivcheck.compare(tmp_path / "reference", tmp_path / "candidate", model=model)
    assert judged(again) == judged(live)
    assert [s.feeds for s in again.samples] == [s.feeds for s in live.samples]


def test_the_candidate_alone_is_judged_by_its_model(digits: Path, tmp_path: Path) -> None:
    live = equivcheck.diff(
        digits, inputs=[IMAGE, OTHER], candidate="vnpu:fault=dropped-bias", save_to=tmp_path, second_opinion=False
    )
    alone = equivcheck.compare(tmp_path / "candidate", model=digits)
    assert live.verdict == alone.verdict == "different"
    assert [c.step for c in alone.culprits] == [c.step for c in live.culprits]
    assert all(t.accumulated is None for t in alone.tensors)
    assert "none: every step is judged against its own real value" in str(alone)


def test_an_engine_keeps_what_it_declares_in_its_recording(fixtures_dir: Path, tmp_path: Path) -> None:
    equivcheck.record(fixtures_dir / "detector_qdq_s8.onnx", backend="ort", save_to=tmp_path / "r")
    assert "Softmax" in load(tmp_path / "r").declared


def test_different_inputs_are_named_with_the_change_that_would_make_them_match(digits: Path, tmp_path: Path) -> None:
    equivcheck.record(digits, backend="ort", inputs=IMAGE, save_to=tmp_path / "a")
    equivcheck.record(digits, backend="vnpu", inputs=IMAGE[..., ::-1].copy(), save_to=tmp_path / "b")
    result = equivcheck.compare(tmp_path / "a", tmp_path / "b", model=digits)
    assert result.verdict == "different"
    assert result.culprits == []
    assert "not fed the same 'image'" in result.reason
    assert all(
        t.local.candidate is None or t.verdict != "different" for t in result.tensors
    )  # no step is blamed for it


def test_a_dump_without_its_input_judges_the_steps_that_do_not_need_it(digits: Path, tmp_path: Path) -> None:
    equivcheck.record(digits, backend="vnpu", inputs=IMAGE, save_to=tmp_path / "r")
    values = load(tmp_path / "r").recordings[0].values
    np.savez(tmp_path / "dump.npz", **{name: array for name, array in values.items() if name != "image"})
    alone = equivcheck.compare(tmp_path / "dump.npz", model=digits)
    assert alone.coverage.judged == alone.coverage.steps - 1
    assert alone.tensors[0].verdict == "unjudged"
    assert alone.verdict == "equivalent"
    given = equivcheck.compare(tmp_path / "dump.npz", model=digits, inputs=IMAGE)
    assert (given.verdict, given.coverage.judged) == ("equivalent", given.coverage.steps)
    wrong = equivcheck.compare(tmp_path / "dump.npz", model=digits, inputs=IMAGE[..., ::-1].copy())
    assert (wrong.verdict, wrong.culprits[0].step) == ("different", 1)


def test_samples_are_paired_by_what_was_fed_not_by_their_order(digits: Path, tmp_path: Path) -> None:
    equivcheck.record(digits, backend="ort", inputs=[IMAGE, OTHER], save_to=tmp_path / "a")
    equivcheck.record(digits, backend="ort", inputs=[OTHER, IMAGE], save_to=tmp_path / "b")
    result = equivcheck.compare(tmp_path / "a", tmp_path / "b", model=digits)
    assert result.verdict == "equivalent"
    assert result.coverage.bitwise == result.coverage.steps


def test_recordings_of_another_number_of_samples_are_refused(digits: Path, tmp_path: Path) -> None:
    equivcheck.record(digits, backend="ort", inputs=[IMAGE, OTHER], save_to=tmp_path / "a")
    equivcheck.record(digits, backend="ort", inputs=IMAGE.copy(), save_to=tmp_path / "b")
    with pytest.raises(RecordingError, match="different samples: 2"):
        equivcheck.compare(tmp_path / "a", tmp_path / "b", model=digits)


def test_one_recording_alone_needs_its_model(digits: Path, tmp_path: Path) -> None:
    equivcheck.record(digits, inputs=IMAGE, save_to=tmp_path / "a")
    with pytest.raises(RecordingError, match="can only be judged with its model"):
        equivcheck.compare(tmp_path / "a")
    with pytest.raises(EquivcheckError, match="one or two recordings"):
        equivcheck.compare(tmp_path / "a", tmp_path / "a", tmp_path / "a")


# -- resuming ----------------------------------------------------------------------------------------------------------


class _Counting(FakeBackend):
    """Counts how many samples are really run."""

    def __init__(self, crash: tuple[str, ...] = ()) -> None:
        super().__init__(self._count, crash=crash)
        self.runs = 0

    def _count(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.runs += 1
        return values


def test_an_interrupted_diff_goes_on_behind_the_finished_samples(digits: Path, tmp_path: Path) -> None:
    inputs = [IMAGE, OTHER, IMAGE + 1]
    names = [sample.id for sample in equivcheck.diff(digits, inputs=inputs, candidate=_Counting()).samples]
    first, second = _Counting(crash=(names[2],)), _Counting()
    broken = equivcheck.diff(digits, inputs=inputs, candidate=first, save_to=tmp_path)
    assert (broken.verdict, first.runs) == ("inconclusive", 2)
    assert not (tmp_path / "candidate").exists()
    whole = equivcheck.diff(digits, inputs=inputs, candidate=second, save_to=tmp_path)
    assert (whole.verdict, second.runs) == ("equivalent", 1)
    assert [r.sample for r in load(tmp_path / "candidate").recordings] == names
    assert any("2 samples of fake were recorded before" in note for note in whole.notes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["candidate", "reference"]


def test_another_job_starts_afresh(digits: Path, fixtures_dir: Path, tmp_path: Path) -> None:
    equivcheck.record(digits, backend="ort", inputs=IMAGE, save_to=tmp_path / "r")
    equivcheck.record(digits, backend="vnpu", inputs=IMAGE, save_to=tmp_path / "r")
    assert load(tmp_path / "r").side.spec == "vnpu"
