"""Output files: written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from equivcheck.errors import OutputError


def check_writable(path: Path, read: Iterable[str | None] = ()) -> None:
    """Raise OutputError when `path` cannot become a file, or is one of the files that the command reads."""
    for source in read:
        if source and path.exists() and Path(source).exists() and path.samefile(source):
            raise OutputError(f"cannot write {path}: the command reads it", asked=str(path), hint="name another file")
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder", asked=str(path), hint="name a file")
    stream = _is_stream(path)
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not stream and not folder.is_dir():
        raise OutputError(f"cannot write {path}: no folder {folder}", asked=str(path), hint="make it first")
    if not (stream or os.access(folder, os.W_OK)) or (path.exists() and not os.access(path, os.W_OK)):
        raise OutputError(f"cannot write {path}: permission denied", asked=str(path), hint="choose another place")


def check_folder(path: Path) -> None:
    """Raise OutputError when `path` is in the way of a folder."""
    if path.exists() and not path.is_dir():
        raise OutputError(f"cannot write to {path}: it is a file", asked=str(path), hint="name a new or empty folder")
    if (path / "manifest.json").exists():
        raise OutputError(
            f"cannot write to {path}: it is a recording", asked=str(path), hint="name a folder for both sides"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` beside the file that `path` names and move it there; a pipe or a device is written as it is.

    Raises OutputError; an older file stays as it was then.
    """
    check_writable(path)
    scratch = ""
    try:
        if _is_stream(path):
            path.write_bytes(content)
            return
        target = path.resolve()  # a link stays one
        handle, scratch = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(scratch).chmod(0o666 & ~umask)
        Path(scratch).replace(target)
    except OSError as error:
        if scratch:
            Path(scratch).unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}", asked=str(path)) from error


def _is_stream(path: Path) -> bool:
    """Whether `path` is there and no regular file: /dev/null, a pipe of the shell."""
    return path.exists() and not path.is_file() and not path.is_dir()
