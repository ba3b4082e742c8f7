"""What the README shows is what the commands print, and its Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SESSIONS = re.findall(r"```console\n\$ (.+?)\n(.*?)```", README, re.S)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def _without_this_machine(text: str) -> list[str]:
    """Drop what depends on the machine and the versions installed, and on how wide that makes a column."""
    text = re.sub(r"ort [\d.]+, CPU \w+ VNNI", "ort", text)
    text = re.sub(r" +note +the software of a real NPU is here too.*\n", "", text)
    return [re.sub(r" +", " ", line).strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("command", "shown"), SESSIONS, ids=[f"session {k}" for k in range(1, len(SESSIONS) + 1)])
def test_a_session_prints_what_the_readme_shows(command: str, shown: str) -> None:
    words = shlex.split(command)
    ran = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert _without_this_machine(ran.stdout) == _without_this_machine(shown)
    assert ran.returncode == (1 if "DIFFERENT" in shown else 0)


def test_the_readme_has_sessions_and_python() -> None:
    assert len(SESSIONS) >= 2
    assert len(PYTHON) >= 2


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(PYTHON[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("equivalent ")


def test_the_pytest_of_the_readme_passes(tmp_path: Path) -> None:
    (tmp_path / "test_readme_example.py").write_text(
        PYTHON[1].replace("fixtures/", f"{ROOT}/fixtures/"), encoding="utf-8"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
