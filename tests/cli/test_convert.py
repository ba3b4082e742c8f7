"""`equivcheck convert`: exit codes, what is said, and that nothing is half-written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from builder import Qdq
from equivcheck.cli import convert as convert_cli
from equivcheck.cli import main
from equivcheck.models.tflite.load import read_flatbuffer
from equivcheck.twins.prove import Proof, Wrong

PROVED, NOT_THE_MODEL, TROUBLE = 0, 1, 2


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def small(folder: Path) -> Path:
    m = Qdq(dtype="uint8")
    x = m.dq(m.q(m.input("x", (1, 4, 8, 8)), 0.03, 128))
    m.channels[x] = 4
    onnx.save(m.model(m.q(m.conv(x, 4, stride=2), 0.2, 128, out="y")), folder / "model.onnx")
    return folder / "model.onnx"


def test_proved_is_0_and_the_file_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ai_edge_litert", reason="no ai-edge-litert: nothing runs a .tflite here")
    out = tmp_path / "twin.tflite"
    assert convert(small(tmp_path), "-o", out) == PROVED
    assert "y" in read_flatbuffer(out.read_bytes(), "twin").index_of
    shown = capsys.readouterr()
    assert shown.out.startswith("PROVED   ")
    assert "2 of 2 values: the very codes" in shown.out
    assert "1 step: PAD in front" in shown.out
    assert "uint8 codes are int8 in the twin" in shown.out
    assert "RANDOM (seed 0)" in shown.err


def test_without_a_tflite_the_file_is_written_and_said_to_be_unproved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_cli, "find_spec", lambda name: None)
    out = tmp_path / "twin.tflite"
    assert convert(small(tmp_path), "-o", out) == PROVED
    assert out.exists()
    assert "NOT PROVED" in capsys.readouterr().out


def test_a_wrong_twin_is_1_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Wrong("y", 2, "Conv", "3 LSB beyond rounding; the limit is 0.15")
    monkeypatch.setattr(convert_cli, "_runs_here", lambda: True)
    monkeypatch.setattr(convert_cli, "_proved", lambda *given: Proof(2, 1, 0, (wrong,)))
    out = tmp_path / "twin.tflite"
    out.write_bytes(b"older")
    assert convert(small(tmp_path), "-o", out) == NOT_THE_MODEL
    assert out.read_bytes() == b"older"
    shown = capsys.readouterr().out
    assert shown.startswith("NOT THE MODEL")
    assert "#2 Conv y: 3 LSB beyond rounding" in shown


def test_refused_steps_are_trouble_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    m = Qdq(dtype="int8")
    x = m.dq(m.q(m.input("x", (1, 4, 8)), 0.03, 0))
    onnx.save(m.model(m.q(m.op("LogSoftmax", [x], axis=1), 0.1, 0)), tmp_path / "model.onnx")
    assert convert(tmp_path / "model.onnx", "-o", tmp_path / "twin.tflite") == TROUBLE
    assert not (tmp_path / "twin.tflite").exists()
    assert "1 step cannot be written: #2 " in capsys.readouterr().err


def test_a_tflite_that_aborts_is_trouble_and_takes_nothing_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A SOFTMAX whose exponentials sum to 512 or more ends the process of ai-edge-litert 2.3 by SIGABRT."""
    pytest.importorskip("ai_edge_litert", reason="no ai-edge-litert: nothing runs a .tflite here")
    m = Qdq(dtype="int8")
    x = m.dq(m.q(m.input("x", (1, 1000)), 0.0001, 0))
    onnx.save(m.model(m.q(m.op("Softmax", [x], axis=-1), 1 / 256, -128)), tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", np.zeros((1, 1000), np.float32))
    assert convert(tmp_path / "model.onnx", "-o", tmp_path / "twin.tflite", "-i", tmp_path / "x.npy") == TROUBLE
    assert not (tmp_path / "twin.tflite").exists()
    assert "the engine failed" in capsys.readouterr().err


def test_a_tflite_model_has_no_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(small(tmp_path), "-o", tmp_path / "twin.tflite", "--no-prove") == PROVED
    assert "not asked for" in capsys.readouterr().out
    assert convert(tmp_path / "twin.tflite", "-o", tmp_path / "again.tflite") == TROUBLE
    assert "is a TFLite model" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_found_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("no such model", "-o", tmp_path / "nowhere" / "twin.tflite") == TROUBLE
    assert "cannot write" in capsys.readouterr().err
