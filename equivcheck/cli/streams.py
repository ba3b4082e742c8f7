"""Where output goes: results to stdout, progress to a terminal's stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable


def progress_line() -> Callable[[str], None]:
    """One line that is overwritten, on a terminal's stderr; nothing in a pipe or a log."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\x1b[K{text[:98]}", end="", file=sys.stderr, flush=True)
