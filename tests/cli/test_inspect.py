"""`equivcheck inspect`: the text, the JSON, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from cut_models import KINDS
from equivcheck.cli import main
from equivcheck.models.onnx.load import load_model


def inspect(*arguments: object) -> int:
    return main(["inspect", *map(str, arguments)])


def test_the_text_says_what_a_model_is_made_of(fixtures_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fixtures_dir / "digits_qdq_s8.onnx"
    assert inspect(path) == 0
    said = capsys.readouterr()
    assert said.err == ""
    model = load_model(path)
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == [str(path)]
    rest = {words[0]: " ".join(words[1:]) for words in lines[1:] if words}
    assert rest["onnx"] == f"IR 8, ai.onnx 17, by onnx.quantize 0.1.0, sha256 {model.sha256[:8]}"
    assert rest["input"] == "image 1x1x8x8 float32"
    assert rest["quantised"] == "QDQ; values int8 per tensor 9"
    assert rest["GlobalAveragePool"] == "GlobalAveragePool, step #7"


def test_the_json_has_the_same_and_more(fixtures_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fixtures_dir / "detector_qop_u8.onnx"
    assert inspect(path, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "equivcheck-inspect/1"
    assert found["opsets"]["com.microsoft"] == 1
    assert found["scheme"]["form"] == "QOperator"
    assert found["ops"]["QLinearConv"] == 8
    assert found["nodes"] == len(load_model(path).proto.graph.node)


def test_the_json_may_be_a_file(fixtures_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(fixtures_dir / "digits_float.onnx", "--json", tmp_path / "made.json") == 0
    assert json.loads((tmp_path / "made.json").read_text())["scheme"]["form"] == "not quantised"
    assert "quantised  not quantised" in capsys.readouterr().out


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_has_a_text_and_ready_selectors(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(KINDS[name](), tmp_path / "m.onnx")
    assert inspect(tmp_path / "m.onnx") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "None" not in said.out
    assert inspect(tmp_path / "m.onnx", "--json", "-") == 0
    for number, point in enumerate(json.loads(capsys.readouterr().out)["split_points"]):
        arguments = ["--at", point["selector"], "-o", str(tmp_path / f"parts{number}"), "--no-prove"]
        code = main(["split", str(tmp_path / "m.onnx"), *arguments])
        said = capsys.readouterr()
        assert code == 0 or "nothing is computed before" in said.err


def test_trouble_is_2_and_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path / "missing.onnx") == 2
    assert "missing.onnx" in capsys.readouterr().err
    assert inspect(tmp_path / "missing.onnx", "--json", tmp_path / "no" / "such.json") == 2
    assert "no folder" in capsys.readouterr().err
