"""Where output goes: results to stdout, progress to a terminal's stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def progress_line() -> Callable[[str], None]:
    """One line that is overwritten, on a terminal's stderr; nothing in a pipe or a log."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\x1b[K{text[:98]}", end="", file=sys.stderr, flush=True)


def check_json(to: str | None, *read: str | None) -> None:
    """Find out that `--json` cannot be written before the work, not after; `read` are files that the command reads.

    Raises OutputError.
    """
    if to not in (None, "-"):
        from equivcheck.render.files import check_writable

        check_writable(Path(str(to)), read)


def write_json(content: bytes, to: str | None) -> bool:
    """Write what `--json` asks for to a file or stdout; True where stdout is taken by it."""
    if to == "-":
        sys.stdout.buffer.write(content)
    elif to is not None:
        from equivcheck.render.files import write_whole

        write_whole(Path(to), content)
    return to == "-"
