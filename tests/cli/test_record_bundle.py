"""`record --bundle` from outside: what it says, and the walk there and back as a user does it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TEN_LINES = Path(__file__).parents[1] / "backends" / "scripts" / "run_ort.py"
Run = Callable[..., tuple[int, str, str]]


def on_the_board(folder: Path, *arguments: object) -> int:
    return subprocess.run([sys.executable, "run.py", *map(str, arguments)], cwd=folder, check=False).returncode


@pytest.mark.parametrize("spec", ["ort", f"script:{TEN_LINES}"])
def test_the_walk_there_and_back(run: Run, digits: Path, tmp_path: Path, spec: str) -> None:
    code, out, err = run("record", digits, "-b", spec, "-i", "random:1", "-i", "random:2", "--bundle", "carry it")
    assert (code, err) == (0, "")
    first, second, third = out.splitlines()
    assert first.startswith(f"carry it: 2 samples for {spec}, 0.1 MB")
    assert second == "carry it to the board, and there: python3 run.py"
    assert on_the_board(tmp_path / "carry it") == 0
    run()  # empties what the board has printed
    code, out, err = run(*shlex.split(third.rpartition(" back: equivcheck ")[2]))
    assert (code, err) == (0, "")
    assert out.startswith("EQUIVALENT   9 of 9 steps judged")
    assert "from a bundle, run by hand; measuring did not change its result" in out


def test_what_comes_back_is_compared_with_a_recording(run: Run, digits: Path, tmp_path: Path) -> None:
    assert run("record", digits, "-i", "random:1", "-o", "cpu")[0] == 0
    assert run("record", digits, "-i", "random:1", "--bundle", "carry")[0] == 0
    assert on_the_board(tmp_path / "carry") == 0
    run()
    code, out, err = run("compare", "cpu", "carry", "--model", digits, "--json", "-")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert all(tensor["accumulated"]["mismatched"] == 0 for tensor in result["tensors"])


def test_a_wrong_engine_is_found_as_in_a_live_run(run: Run, digits: Path, tmp_path: Path) -> None:
    """A script whose every answer is three codes too high on the last value."""
    script = tmp_path / "board.py"
    script.write_text(
        TEN_LINES.read_text().replace("def run(", "def ort(")
        + "\ndef run(model_path, feeds):\n    found = ort(model_path, feeds)\n"
        "    return {n: a - 3 * abs(a[a != 0]).min() * ('logits' in n) for n, a in found.items()}\n"
    )
    assert run("record", digits, "-b", f"script:{script}", "-i", "random:1", "--bundle", "carry")[0] == 0
    assert on_the_board(tmp_path / "carry") == 0
    run()
    code, out, _ = run("compare", "carry", "--model", digits)
    live, live_out, _ = run("diff", digits, "-c", f"script:{script}", "-i", "random:1")
    assert code == live == 1
    assert out.splitlines()[0] == live_out.splitlines()[0]


def test_results_that_are_incomplete_are_inconclusive(run: Run, digits: Path, tmp_path: Path) -> None:
    run("record", digits, "-i", "random:1", "--bundle", "carry")
    assert on_the_board(tmp_path / "carry") == 0
    (tmp_path / "carry" / "results" / "0000" / "0003.npz").unlink()
    run()
    code, out, _ = run("compare", "carry/results", "--model", digits)
    assert code == 3
    assert "not run yet" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bundle", "carry", "-o", "here"], "give one of them"),
        (["--bundle", ""], "--bundle is empty"),
        (["--bundle", "carry", "-b", "vnpu"], "a bundle runs ort or script:FILE"),
        (["--bundle", "carry", "-b", "script:none.py"], "No such file"),
        (["--bundle", "/proc/carry"], "cannot write /proc/carry"),
        ([], "Missing option"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    run: Run, digits: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, out, err = run("record", digits, "-i", "random:1", *arguments)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_results_without_the_model_say_that_it_is_needed(run: Run, digits: Path, tmp_path: Path) -> None:
    run("record", digits, "-i", "random:1", "--bundle", "carry")
    assert on_the_board(tmp_path / "carry") == 0
    run()
    code, _, err = run("compare", "carry", "carry")
    assert code == 2
    assert "give --model MODEL" in err
