"""A stranger's five-line test file, in a pytest run of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PASSING = """
def test_the_board_computes_what_the_model_says(equivcheck):
    result = equivcheck.assert_equivalent({model!r}, candidate="ort")
    assert result.coverage.judged == result.coverage.steps
    assert equivcheck.diff({model!r}, candidate="ort").verdict == "equivalent"
"""
FAILING = """
def test_the_board_computes_what_the_model_says(equivcheck):
    equivcheck.assert_equivalent({model!r}, candidate="ort", candidate_model={other!r})
"""
INCONCLUSIVE = """
import pytest, equivcheck as package

def test_no_verdict_is_no_assertion(equivcheck):
    with pytest.raises(package.Inconclusive) as caught:
        equivcheck.assert_equivalent({model!r}, candidate="ort", candidate_model={other!r})
    assert not isinstance(caught.value, AssertionError)
"""


def pytest_of(tmp_path: Path, text: str, *arguments: str) -> tuple[int, str]:
    """Run pytest on `text` in a folder of its own, without this project's configuration."""
    (tmp_path / "test_model.py").write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"COLUMNS": "300"}
    environment["COLUMNS"] = "300"  # pytest cuts its summary lines to the width of the terminal
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def models(fixtures_dir: Path) -> dict[str, str]:
    return {name: str(fixtures_dir / f"digits_{name}.onnx") for name in ("qdq_s8", "qdq_s8_floor", "float")}


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["serial", "two workers"])
def test_an_equivalent_model_passes(tmp_path: Path, models: dict[str, str], workers: list[str]) -> None:
    code, output = pytest_of(tmp_path, PASSING.format(model=models["qdq_s8"]), *workers)
    assert code == 0, output
    assert "1 passed" in output


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["serial", "two workers"])
def test_a_different_model_fails_with_the_headline_and_the_culprit(
    tmp_path: Path, models: dict[str, str], workers: list[str]
) -> None:
    text = FAILING.format(model=models["qdq_s8"], other=models["qdq_s8_floor"])
    code, output = pytest_of(tmp_path, text, *workers)
    assert code == 1
    assert "1 failed" in output
    assert "DIFFERENT   1 culprit: step #7 GlobalAveragePool 'GlobalAveragePool_pooled'" in output
    assert "beyond correct rounding, the limit is 0.30" in output
    assert "AssertionError" in output
    assert not re.search(r"(check|pytest_plugin)\.py:\d+", output), "our own frames are hidden"


def test_the_summary_line_of_pytest_says_what_is_different(tmp_path: Path, models: dict[str, str]) -> None:
    text = FAILING.format(model=models["qdq_s8"], other=models["qdq_s8_floor"])
    _, output = pytest_of(tmp_path, text)
    summary = next(line for line in output.splitlines() if line.startswith("FAILED"))
    assert "DIFFERENT" in summary


def test_no_verdict_is_raised_as_inconclusive_which_is_no_assertion_error(
    tmp_path: Path, models: dict[str, str]
) -> None:
    text = INCONCLUSIVE.format(model=models["qdq_s8"], other=models["float"])
    code, output = pytest_of(tmp_path, text)
    assert code == 0, output


def test_the_fixture_is_listed_with_what_it_does(tmp_path: Path) -> None:
    code, output = pytest_of(tmp_path, "", "--fixtures")
    assert code in (0, 5)
    assert "equivcheck [session scope]" in output
    assert "Numerical equivalence of a model on two backends" in output


def test_a_suite_that_does_not_use_the_fixture_loads_neither_numpy_nor_onnx(tmp_path: Path) -> None:
    text = (
        "import sys\ndef test_light():\n    assert not {'numpy', 'onnx', 'onnxruntime', 'msgspec'} & set(sys.modules)\n"
    )
    code, output = pytest_of(tmp_path, text, "-p", "no:hypothesispytest", "-p", "no:xdist")
    assert code == 0, output
