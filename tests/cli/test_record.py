"""`equivcheck record` from outside: what it leaves behind, what it refuses, and how it goes on after an interruption."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from builder import Qdq
from equivcheck.recording import load

COMMAND = [sys.executable, "-m", "equivcheck"]
Run = Callable[..., tuple[int, str, str]]


def assert_trouble(got: tuple[int, str, str], *said: str) -> None:
    """Exit 2, nothing on stdout, and a last line on stderr that says all of `said`."""
    code, out, err = got
    assert (code, out) == (2, ""), got
    last = err.splitlines()[-1]
    assert last.startswith("equivcheck: ")
    assert "internal error" not in err, err
    for text in said:
        assert text in last, err


# -- what it makes -----------------------------------------------------------------------------------------------------


def test_it_says_where_and_how_to_go_on_and_that_works(run: Run, digits: Path) -> None:
    code, out, err = run("record", digits, "-b", "vnpu", "-i", "random:1", "-i", "random:2", "-o", "npu")
    assert (code, err) == (0, "")
    assert out.startswith("npu: 2 samples on vnpu, ")
    assert run("record", digits, "-i", "random:1", "-i", "random:2", "-o", "cpu")[0] == 0
    words = shlex.split(out.splitlines()[1].removeprefix("next: equivcheck ").replace("OTHER", "cpu"))
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert out.startswith("EQUIVALENT   9 of 9 steps judged")


def test_the_next_command_can_be_pasted_where_a_path_has_a_space(run: Run, digits: Path, tmp_path: Path) -> None:
    run("backends")  # changes into the empty folder
    shutil.copy(digits, tmp_path / "my model.onnx")
    _, out, _ = run("record", "my model.onnx", "-i", "random:1", "-o", "my run")
    words = shlex.split(out.splitlines()[1].removeprefix("next: equivcheck "))
    assert words == ["compare", "OTHER", "my run", "--model", "my model.onnx"]


def test_without_an_input_it_says_that_it_is_random(run: Run, digits: Path) -> None:
    code, out, err = run("record", digits, "-o", "r")
    assert code == 0
    assert err.startswith("equivcheck: RANDOM (seed 0)")
    assert out.startswith("r: 1 sample on ort")


def test_a_new_recording_replaces_an_old_one_whole(run: Run, digits: Path) -> None:
    run("record", digits, "-i", "random:1", "-i", "random:2", "-o", "r")
    run("record", digits, "-i", "random:3", "-o", "r")
    assert sorted(path.name for path in Path("r").iterdir()) == ["0000.safetensors", "manifest.json"]
    assert [path.name for path in Path.cwd().iterdir()] == ["r"]


def test_names_with_slashes_two_inputs_and_an_empty_value_are_kept(run: Run, tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    a = m.q(m.input("in/a:0", (1, 3, 4, 4)), 0.02, 1, out="q/a")
    b = m.q(m.input("in/b", (1, 3, 4, 4)), 0.02, 1, out="../q/b")
    added = m.q(m.op("Add", [m.dq(a), m.dq(b)]), 0.04, 0, out="sum'\"/x")
    onnx.save(m.model(m.dq(added)), tmp_path / "two.onnx")
    run("backends")
    feeds: dict[str, Any] = {name: np.ones((1, 3, 4, 4), np.float32) for name in ("in/a:0", "in/b")}
    np.savez("s.npz", **feeds)
    code, _, err = run("record", "two.onnx", "-i", "s.npz", "-o", "r")
    assert (code, err) == (0, "")
    kept = load("r").recordings[0].values
    assert {"in/a:0", "in/b", "q/a", "../q/b", "sum'\"/x"} <= kept.keys()
    code, out, _ = run("compare", "r", "--model", "two.onnx")
    assert (code, out.splitlines()[0].split()[:2]) == (0, ["EQUIVALENT", "3"])


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "no model": (["record"], ["Missing argument 'MODEL'"]),
    "no folder": (["record", "M"], ["Missing option '-o'"]),
    "empty folder name": (["record", "M", "-o", ""], ["--output is empty"]),
    "no such model": (["record", "no.onnx", "-o", "r"], ["no such model: no.onnx"]),
    "unknown backend": (["record", "M", "-o", "r", "-b", "orr"], ["unknown backend 'orr'", "nearest: ort"]),
    "bad input": (["record", "M", "-o", "r", "-i", "no.npy"], ["no file no.npy"]),
    "somebody's folder": (["record", "M", "-o", "mine"], ["mine exists and is not a recording"]),
    "a file": (["record", "M", "-o", "file"], ["file exists and is not a recording"]),
    "below a file": (["record", "M", "-o", "file/r"], ["cannot write file/r"]),
    "nowhere": (["record", "M", "-o", "/proc/nowhere/r"], ["cannot write /proc/nowhere/r"]),
    "here": (["record", "M", "-o", "."], ["not a recording"]),
    "the root": (["record", "M", "-o", "/"], ["not a recording"]),
    "NaN": (["record", "M", "-o", "r", "-i", "nan.npy"], ["holds 64 NaN", "no code for NaN"]),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(run: Run, digits: Path, tmp_path: Path, what: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    (tmp_path / "file").write_text("dear")
    np.save(tmp_path / "nan.npy", np.full((1, 1, 8, 8), np.nan, np.float32))
    before = sorted(tmp_path.rglob("*"))
    arguments, said = MISTAKES[what]
    assert_trouble(run(*(digits if a == "M" else a for a in arguments)), *said)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_help_has_examples_and_exit_codes(run: Run) -> None:
    code, out, err = run("record", "--help")
    assert (code, err) == (0, "")
    assert "\\b" not in out
    lines = [line.strip() for line in out.splitlines()]
    assert "equivcheck record model.onnx -b vnpu -i cat.npy -o npu" in lines
    assert any(line.startswith("Exit codes: 0 recorded, 2 trouble, 130 interrupted") for line in lines)


# -- interrupted -------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_what_is_finished_and_the_same_command_goes_on(fixtures_dir: Path, tmp_path: Path) -> None:
    samples = [word for k in range(1500) for word in ("-i", f"random:{k}")]
    command = [*COMMAND, "record", str(fixtures_dir / "digits_qdq_s8.onnx"), *samples, "-o", "r"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    scratch = tmp_path / ".r.unfinished"
    while len(list(scratch.glob("[0-9]*.json"))) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), err
    assert out == b""
    said = re.fullmatch(
        r"equivcheck: interrupted; (\d+) finished samples kept beside r; the same command goes on behind that\n",
        err.decode(),
    )
    assert said, err
    assert int(said[1]) == len(list(scratch.glob("[0-9]*.json")))
    assert [path.name for path in tmp_path.iterdir()] == [scratch.name]
    finished = {path.name: path.stat().st_mtime_ns for path in scratch.glob("*.safetensors")}
    assert 5 <= len(finished) <= 1500
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    saved = load(tmp_path / "r")
    assert [sample.id for sample in saved.samples] == [f"random:{k}" for k in range(1500)]
    kept = sum((tmp_path / "r" / name).stat().st_mtime_ns == when for name, when in finished.items())
    assert kept >= len(finished) - 1, "a finished sample was run again"


@pytest.mark.parametrize("harm", ["cut tensors", "zeroed tensors", "no tensors", "cut json", "empty json", "other job"])
def test_a_harmed_unfinished_sample_is_run_again(
    run: Run, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    from equivcheck.recording import Writer

    def interrupted(self: Writer, side: object) -> Path:
        raise KeyboardInterrupt

    words = ["record", digits, "-i", "random:1", "-i", "random:2", "-o", "r"]
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "finish", interrupted)
        assert run(*words)[0] == 130
    scratch = tmp_path / ".r.unfinished"
    tensors, about = scratch / "0000.safetensors", scratch / "0000.json"
    if harm == "cut tensors":
        os.truncate(tensors, tensors.stat().st_size - 8)
    elif harm == "zeroed tensors":  # as a machine that lost its power may leave a file
        content = tensors.read_bytes()
        tensors.write_bytes(content[:-64] + bytes(64))
    elif harm == "no tensors":
        tensors.unlink()
    elif harm == "cut json":
        os.truncate(about, about.stat().st_size // 2)
    elif harm == "empty json":
        about.write_bytes(b"")
    else:
        (scratch / "job.json").write_text(json.dumps({"model": "", "spec": "ort", "versions": {}}))
    code, out, err = run(*words)
    assert (code, err) == (0, ""), err
    assert out.startswith("r: 2 samples on ort")
    first = load("r").recordings[0]
    assert len(first.values) == len(load("r").recordings[1].values)
    assert run("compare", "r", "--model", digits)[0] == 0
