"""`equivcheck split`: exit codes, streams, what is written, and that nothing is half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import cut_models
from cut_models import KINDS
from equivcheck import parts
from equivcheck.cli import main

PROVED, NOT_THE_MODEL, TROUBLE, INTERRUPTED = 0, 1, 2, 130


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(KINDS["skips_that_cross_every_cut"](), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def saved(name: str, folder: Path) -> str:
    onnx.save(KINDS[name](), folder / "model.onnx")
    return str(folder / "model.onnx")


def split(*arguments: object) -> int:
    return main(["split", *map(str, arguments)])


def test_proved_is_0_and_the_table_says_what_crosses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert split(model, "--at", "third", "--cut", "after", "-o", tmp_path / "parts") == PROVED
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines() == [
        "PROVED   after Add 'third'   head + tail = model, bit for bit",
        "  boundary  a, c",
        f"  head      {tmp_path}/parts/001_Add/head.onnx   3 nodes   x -> c, a",
        f"  tail      {tmp_path}/parts/001_Add/tail.onnx   2 nodes   x, a, c -> y",
    ]


def test_before_is_the_default(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert split(model, "--at", "third", "-o", tmp_path / "parts", "--json", "-") == PROVED
    (point,) = json.loads(capsys.readouterr().out)["split_points"]
    assert (point["cut"], point["boundary"]) == ("before", ["a", "b"])


def test_json_goes_to_stdout_alone_and_is_split_json(
    model: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert split(model, "--at", "Relu", "--at", "Add", "-o", tmp_path / "parts", "--json", "-") == PROVED
    said = capsysbinary.readouterr()
    assert said.out == (tmp_path / "parts" / "split.json").read_bytes()
    assert len(json.loads(said.out)["split_points"]) == 2


def test_json_may_be_a_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert split(model, "--at", "Sigmoid", "-o", tmp_path / "parts", "--json", tmp_path / "split.json") == PROVED
    assert (tmp_path / "split.json").read_bytes() == (tmp_path / "parts" / "split.json").read_bytes()
    assert capsys.readouterr().out.startswith("PROVED")


def test_a_part_that_does_not_reproduce_the_model_is_1_and_the_parts_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(cut_models.random_numbers_that_change(), tmp_path / "m.onnx")
    assert split(tmp_path / "m.onnx", "--at", "first", "--cut", "after", "-o", tmp_path / "parts") == NOT_THE_MODEL
    said = capsys.readouterr().out
    assert said.startswith("NOT THE MODEL   after Relu 'first'")
    assert "output 'y' differs" in said
    assert json.loads((tmp_path / "parts" / "split.json").read_text())["split_points"][0]["proved"] is False


def test_one_bad_split_point_of_several_is_1(tmp_path: Path) -> None:
    onnx.save(cut_models.random_numbers_that_change(), tmp_path / "m.onnx")
    assert split(tmp_path / "m.onnx", "--at", "end", "--at", "first", "--cut", "after", "-o", tmp_path / "p") == 1


def test_no_prove_is_0_and_says_not_proved(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert split(model, "--at", "Sigmoid", "-o", tmp_path / "parts", "--no-prove") == PROVED
    assert capsys.readouterr().out.startswith("not proved   before Sigmoid 'second'")


def test_above_1_gb_the_proof_is_off_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.cut_speed import big_model
    from equivcheck.models.onnx import load

    monkeypatch.setattr(load, "LARGEST_IN_MEMORY", 1000)
    path = big_model(tmp_path, tensors=3)
    assert split(path, "--at", "gather1", "-o", tmp_path / "parts") == PROVED
    assert capsys.readouterr().out.startswith("not proved")
    assert split(path, "--at", "gather1", "-o", tmp_path / "parts", "--prove") == PROVED
    assert capsys.readouterr().out.startswith("PROVED")


def test_an_input_may_be_given_for_the_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("symbolic_dimensions", tmp_path)
    np.savez(tmp_path / "x.npz", **cut_models.FEEDS["symbolic_dimensions"])
    assert split(path, "--at", "pool", "-o", tmp_path / "parts") == PROVED
    assert "needs a shape" in capsys.readouterr().out
    for given in (tmp_path / "x.npz", "random:3:2x3x5x7"):
        assert split(path, "--at", "pool", "-o", tmp_path / "parts", "-i", given) == PROVED
        assert capsys.readouterr().out.startswith("PROVED")


def test_notes_and_exchange_types_are_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("bfloat16_crosses_the_cut", tmp_path)
    np.savez(tmp_path / "x.npz", **cut_models.FEEDS["bfloat16_crosses_the_cut"])
    given = ("-i", tmp_path / "x.npz")
    assert split(path, "--at", "value:n", "-o", tmp_path / "parts", *given) == PROVED
    assert "exchange  n is bfloat16; it is handed over in a wider type, without loss" in capsys.readouterr().out
    assert split(path, "--at", "value:x", "--at", "value:n", "-o", tmp_path / "parts", *given) == PROVED
    assert "note      the head computes nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at", "value:x"], "nothing is computed before 'value:x': the tail would be the whole model; name a node"),
        (["--at", "value:y"], "nothing is computed after 'value:y': the head would be the whole model; name a node"),
        (
            ["--at", "first"],
            "nothing is computed before Relu 'first': the tail would be the whole model; --cut after cuts",
        ),
        (["--at", "fifth", "--cut", "after"], "the head would be the whole model; --cut before cuts in front of it"),
        (["--at", "value:x", "--at", "value:y"], "nothing is computed before 'value:x'"),
    ],
)
def test_where_there_is_nothing_to_split_it_is_2_with_the_way_out(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert split(model, *words, "-o", tmp_path / "parts") == TROUBLE
    got = capsys.readouterr()
    assert got.out == ""
    assert said in got.err
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_among_others_an_empty_part_is_not_called_proved(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert split(model, "--at", "first", "--at", "third", "--at", "value:y", "-o", tmp_path / "parts") == PROVED
    heads = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert heads == [
        "NO SPLIT   before Relu 'first'   nothing is computed before it: the tail is the whole model",
        "PROVED   before Add 'third'   head + tail = model, bit for bit",
        "NO SPLIT   at value 'value:y'   nothing is computed after it: the head is the whole model",
    ]
    points = json.loads((tmp_path / "parts" / "split.json").read_text())["split_points"]
    assert [point["empty"] for point in points] == ["head", None, "tail"]


def test_names_of_800_characters_with_slashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("names_with_slashes_of_800_characters", tmp_path)
    (node,) = [n.name for n in onnx.load(path).graph.node if n.op_type == "Mul"]
    assert len(node) > 780
    assert split(path, "--at", node, "-o", tmp_path / "parts", "--json", "-") == PROVED
    (point,) = json.loads(capsys.readouterr().out)["split_points"]
    assert point["node"] == node
    assert {p.name for p in (tmp_path / "parts").iterdir()} == {"split.json", "001_Mul"}


# -- trouble ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--at", "Relu"], "where to? give -o DIR"),
        (["-o", "parts"], "Missing option '--at'"),
        (["--at", "Reloo", "-o", "parts"], "nothing in this model is called 'Reloo'; nearest: Relu"),
        (["--at", "", "-o", "parts"], "an empty selector"),
        (["--at", "Relu", "-o", "parts", "--cut", "around"], "'around' is not one of"),
        (["--at", "Relu", "-o", "parts", "-i", "missing.npy"], "missing.npy"),
        (["--at", "Relu", "-o", "parts", "--json", "no/such/folder.json"], "no folder"),
    ],
)
def test_mistakes_are_2_one_line_on_stderr_and_nothing_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert split("model.onnx", *arguments) == TROUBLE
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert len(said.err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_a_missing_or_broken_model_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x08not a model")
    for name in ("missing.onnx", "broken.onnx"):
        assert split(tmp_path / name, "--at", "Relu", "-o", tmp_path / "parts") == TROUBLE
        assert name in capsys.readouterr().err
    assert not (tmp_path / "parts").exists()


def test_a_value_inside_a_body_is_2_and_names_the_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("an_if_whose_bodies_read_outer_values", tmp_path)
    assert split(path, "--at", "value:s", "-o", tmp_path / "parts") == TROUBLE
    assert "the body of If 'branch'" in capsys.readouterr().err


def test_a_folder_that_is_no_split_is_refused_before_any_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("a cat")
    monkeypatch.setattr(parts, "split", None)
    assert split(model, "--at", "Sigmoid", "-o", tmp_path / "photos") == TROUBLE
    assert "holds no earlier split" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_a_target_below_a_file_is_2(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert split(model, "--at", "Sigmoid", "-o", model / "parts") == TROUBLE
    assert "cannot write" in capsys.readouterr().err


def test_interrupted_is_130_and_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "_write_part", interrupt)
    assert split(model, "--at", "Sigmoid", "-o", tmp_path / "parts") == INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_the_command_works_as_a_process_from_another_directory(model: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "equivcheck", "split", "../model.onnx", "--at", "#2", "-o", "parts"],
        cwd=tmp_path / "elsewhere",
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (PROVED, "")
    assert (tmp_path / "elsewhere" / "parts" / "001_Sigmoid" / "tail.onnx").exists()
