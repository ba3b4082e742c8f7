"""The command line as the tests of commands call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from equivcheck.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command line in this process, in an empty folder; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def called(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return called


@pytest.fixture(scope="session")
def digits(fixtures_dir: Path) -> Path:
    """A small int8 model."""
    return fixtures_dir / "digits_qdq_s8.onnx"
