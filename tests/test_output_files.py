"""What `--json`, `-o` and their like write to: files whole or not at all, links and pipes as what they are."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from equivcheck.errors import OutputError
from equivcheck.render.files import check_writable, write_whole


def test_a_pipe_is_written_and_stays_a_pipe(tmp_path: Path) -> None:
    """Moved over like a file, it would be gone: as root, /dev/null too."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    check_writable(pipe)
    write_whole(pipe, b"result")
    reader.join(10)
    assert got == [b"result"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_a_device_is_written_in_a_folder_that_is_not_ours() -> None:
    check_writable(Path("/dev/null"))
    write_whole(Path("/dev/null"), b"result")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link_and_its_file_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "result.json", tmp_path / "latest.json"
    if there:
        target.write_bytes(b"before")
    link.symlink_to(target)
    check_writable(link)
    write_whole(link, b"after")
    assert link.is_symlink()
    assert target.read_bytes() == b"after"


def test_a_link_into_no_folder_is_told_with_that_folder(tmp_path: Path) -> None:
    (tmp_path / "latest.json").symlink_to(tmp_path / "gone" / "result.json")
    with pytest.raises(OutputError, match=f"no folder {tmp_path / 'gone'}"):
        check_writable(tmp_path / "latest.json")


def test_a_device_that_is_full_is_an_error() -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full here")
    with pytest.raises(OutputError, match="No space left"):
        write_whole(Path("/dev/full"), b"result")
