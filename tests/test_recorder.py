"""One side while it runs: long samples are gone on with in the middle, and a failure on one sample need not end the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import equivcheck
from equivcheck.backends.long import KeptHeads
from equivcheck.cli import main
from equivcheck.errors import OutputError
from equivcheck.models.onnx.load import load_model
from equivcheck.recording import load

TEN_LINES = Path(__file__).parent / "backends" / "scripts" / "run_ort.py"
Script = Callable[[str], str]


@pytest.fixture
def digits(fixtures_dir: Path) -> Path:
    return fixtures_dir / "digits_qdq_s8.onnx"


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script of these lines, in which `ort(model_path, feeds)` is ONNX Runtime; its SPEC."""

    def written(text: str) -> str:
        path = tmp_path / "board.py"
        path.write_text(TEN_LINES.read_text().replace("def run(", "def ort(") + text)
        return f"script:{path}"

    return written


def counting(log: Path, more: str = "") -> str:
    """A script that keeps a line for each run."""
    return (
        f"\nimport time\ndef run(model_path, feeds):\n    print(model_path, file=open({str(log)!r}, 'a'))\n{more}"
        "    return ort(model_path, feeds)\n"
    )


# -- going on in the middle of a sample ----------------------------------------------------------------------------------


def stopped_after(runs: int, log: Path, *command: object) -> None:
    """Start the command line, and kill it once the script has run that often."""
    started = subprocess.Popen(
        [sys.executable, "-m", "equivcheck", *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )
    deadline = time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < runs:
        assert time.monotonic() < deadline
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()


@pytest.mark.parametrize("command", ["record", "diff"])
def test_heads_that_ran_before_an_interruption_do_not_run_again(
    digits: Path, tmp_path: Path, script: Script, command: str
) -> None:
    log = tmp_path / "log"
    spec = script(counting(log, "    time.sleep(0.15)\n"))
    here = tmp_path / "kept"
    options = ["-b", spec, "-o", here] if command == "record" else ["-c", spec, "--save", here]
    stopped_after(6, log, command, digits, "-i", "random:1", *options)
    before = len(log.read_text().splitlines())
    assert main([str(o) for o in (command, digits, "-i", "random:1", *options)]) == 0

    models = 1 + len([n for n in load_model(digits).graph.stored if n != "image"])
    again = len(log.read_text().splitlines()) - before
    assert (
        again <= models - 4
    )  # the whole model, and the heads that were not whole: of six runs at least four were kept
    expected = equivcheck.record(digits, backend="script:" + str(TEN_LINES), inputs="random:1", save_to=tmp_path / "e")
    found = load(here if command == "record" else here / "candidate").recordings[0]
    for name, array in load(expected).recordings[0].values.items():
        np.testing.assert_array_equal(found.values[name], array)
    assert not [path for path in [*tmp_path.iterdir(), *here.iterdir()] if path.name.startswith(".")]


def test_another_script_or_another_input_does_not_get_what_was_kept(
    digits: Path, tmp_path: Path, script: Script
) -> None:
    log = tmp_path / "log"
    options = ["-o", tmp_path / "kept", "-b", script(counting(log, "    time.sleep(0.15)\n"))]
    stopped_after(6, log, "record", digits, "-i", "random:1", *options)
    models = 1 + len([n for n in load_model(digits).graph.stored if n != "image"])

    log.unlink()
    assert main([str(o) for o in ("record", digits, "-i", "random:2", *options)]) == 0
    assert len(log.read_text().splitlines()) == models

    log.unlink()
    stopped_after(6, log, "record", digits, "-i", "random:1", *options)
    log.unlink()
    script(counting(log, "    feeds = {n: a * 0 for n, a in feeds.items()}\n"))
    assert main([str(o) for o in ("record", digits, "-i", "random:1", *options)]) == 0
    assert len(log.read_text().splitlines()) == models


def test_what_was_kept_of_a_head_and_cut_off_is_run_again(tmp_path: Path) -> None:
    kept = KeptHeads(tmp_path / "heads")
    assert kept.get("a") is None
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    kept.put("a", array)
    np.testing.assert_array_equal(kept.get("a"), array)
    path = next(kept.folder.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert kept.get("a") is None


def test_a_head_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "heads").touch()
    with pytest.raises(OutputError, match="cannot write"):
        KeptHeads(tmp_path / "heads").put("a", np.zeros(3))


# -- progress ------------------------------------------------------------------------------------------------------------


def test_long_samples_say_how_far_they_are_and_how_long_they_take(digits: Path, script: Script, tmp_path: Path) -> None:
    said: list[str] = []
    spec = script(
        "\nimport time\ndef run(model_path, feeds):\n    time.sleep(0.1)\n    return ort(model_path, feeds)\n"
    )
    equivcheck.diff(digits, candidate=spec, inputs="random:1", progress=said.append)
    heads = len([n for n in load_model(digits).graph.stored if n != "image"])
    told = [text.removeprefix("random:1, script: ") for text in said if text.startswith("random:1, script: ")]
    assert told[0] == f"{heads} heads, at most about 1 s"
    assert told[1].startswith(f"head 1 of {heads}: ")
    assert " left" not in told[1]
    assert told[-1].startswith(f"head {heads} of {heads}: ")
    assert told[-1].endswith("; about 1 s left")
    assert len(told) == heads + 1


# -- one sample that fails -----------------------------------------------------------------------------------------------


def failing(on: int) -> str:
    """A script that fails on the sample whose largest element is `on`."""
    return f"""
def run(model_path, feeds):
    if feeds["image"].max() == {on}:
        raise RuntimeError("overheated")
    return ort(model_path, feeds)
"""


def three() -> list[np.ndarray]:
    image = np.random.default_rng(0).random((1, 1, 8, 8)).astype(np.float32) * 0.9
    made = [image.copy() for _ in range(3)]
    for number, one in enumerate(made):
        one[0, 0, 0, 0] = number + 1  # its largest element names it
    return made


def test_without_keep_going_the_first_failure_ends_the_run(digits: Path, script: Script) -> None:
    result = equivcheck.diff(digits, candidate=script(failing(2)), inputs=three())
    assert (result.verdict, len(result.samples)) == ("inconclusive", 1)
    assert "overheated" in result.reason


def test_with_keep_going_the_other_samples_are_judged(digits: Path, script: Script) -> None:
    result = equivcheck.diff(digits, candidate=script(failing(2)), inputs=three(), keep_going=True)
    assert result.verdict == "inconclusive"
    assert len(result.samples) == 2
    assert result.coverage.judged == result.coverage.steps
    assert "1 of 3 samples failed, the first is " in result.reason
    assert "overheated" in result.reason
    assert any("the candidate failed on" in note and "overheated" in note for note in result.notes)


def test_a_model_that_an_engine_does_not_take_ends_the_run_at_once(tmp_path: Path) -> None:
    """Nothing would be gained by offering it once more for each sample."""
    node = onnx.helper.make_node("Rotate", ["x"], ["y"], domain="vendor")
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("vendor", 1)]
    graph = onnx.helper.make_graph([node], "rotated", ports[:1], ports[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "rotate.onnx")
    result = equivcheck.diff(
        tmp_path / "rotate.onnx", candidate="ort", inputs=[np.ones((1, 4), np.float32)] * 3, keep_going=True
    )
    assert result.verdict == "inconclusive"
    assert any("the reference failed on" in note for note in result.notes)
    assert "1 of 3 samples failed" in result.reason


def test_a_run_that_kept_going_is_finished_by_the_same_command(
    digits: Path, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, image in enumerate(three()):
        np.save(tmp_path / f"{number}.npy", image)
    command = ["diff", str(digits), "-i", str(tmp_path / "*.npy"), "--save", str(tmp_path / "kept"), "--keep-going"]
    command += ["--json", str(tmp_path / "result.json")]
    assert main([*command, "-c", script(failing(2))]) == 3
    assert not (tmp_path / "kept" / "candidate").exists()
    assert main([*command, "-c", script(failing(9))]) == 0
    assert len(json.loads((tmp_path / "result.json").read_text())["samples"]) == 3
    assert len(load(tmp_path / "kept" / "candidate").samples) == 3
    assert "were recorded before and not run again" in capsys.readouterr().out
