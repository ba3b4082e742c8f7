"""Where output goes: results to stdout, progress to a terminal's stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click

_PERIOD = 10.0  # seconds between two lines in a log


def progress_line() -> Callable[[str], None]:
    """What hears, as text, what is being done; empty text says that it is over, as does the end of the command.

    On a terminal it is one line of stderr that is overwritten; elsewhere, in the log of a CI job say, a line each ten seconds.
    """
    if sys.stderr is None:  # closed by the caller
        return lambda text: None
    tell = _overwrite if sys.stderr.isatty() else _Log().tell
    click.get_current_context().call_on_close(lambda: tell(""))
    return tell


def _overwrite(text: str) -> None:
    print(f"\r\x1b[K{text[:98]}", end="", file=sys.stderr, flush=True)


class _Log:
    """Prints what is being done and for how long it all takes so far, from a thread: one step may take minutes."""

    def __init__(self) -> None:
        self._text = ""
        self._started = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def tell(self, text: str) -> None:
        self._text = text
        if not text:
            self._over.set()
        elif not self._thread.ident:
            self._thread.start()

    def _print(self) -> None:
        while not self._over.wait(_PERIOD):
            passed = round(time.monotonic() - self._started)
            try:
                print(f"equivcheck: {passed // 60}:{passed % 60:02d} {self._text}", file=sys.stderr, flush=True)
            except (OSError, ValueError):  # nobody reads it any more
                return


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
