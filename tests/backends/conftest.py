"""What tests of workers share: a watch over what they leave behind, and where workers may run."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.ssh_server import SshServer, ssh_server, why_not
from environments import PYTHON38

_MARK = "EQUIVCHECK_TEST_MARK"
_PATIENCE = 8.0  # seconds; a watchdog gives its worker three


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a folder of temporary files; afterwards it is empty, and no process that the test started lives."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    mark = uuid.uuid4().hex
    monkeypatch.setenv(_MARK, mark)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    deadline = time.monotonic() + _PATIENCE
    while (left := [*_processes(mark), *_files(folder)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _files(folder: Path) -> list[str]:
    """What lies there, but for the file with which the onnxruntime of this very process numbers its sessions."""
    return [path.name for path in folder.iterdir() if path.name != ".ses"]


def _processes(mark: str) -> list[str]:
    """Command lines of the living processes, other than this one, whose environment bears the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if marked and int(process.name) != os.getpid() and state != "Z":
                found.append((process / "cmdline").read_text(errors="replace").replace("\0", " ")[:200])
        except OSError:
            continue  # it ended meanwhile, or is somebody else's
    return found


@pytest.fixture
def board(tmp_path: Path, nothing_left: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    """A machine behind ssh, which the user's ssh reaches without a password."""
    reason = why_not()
    if reason is not None:
        print(reason)
        pytest.skip(reason)
    with ssh_server(tmp_path / "sshd", {"TMPDIR": str(nothing_left), _MARK: os.environ[_MARK]}) as server:
        monkeypatch.setenv("EQUIVCHECK_SSH", server.ssh)
        yield server


@pytest.fixture(scope="session")
def python38() -> str:
    """The interpreter of Python 3.8 with numpy and onnxruntime."""
    if not PYTHON38.ready:
        reason = f"no {PYTHON38.folder}: python tests/environments.py builds it"
        print(reason)
        pytest.skip(reason)
    return str(PYTHON38.interpreter)
