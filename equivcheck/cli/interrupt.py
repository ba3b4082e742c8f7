"""What Ctrl-C leaves behind, and how to go on from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def saying_what_is_kept(*folders: Path) -> Iterator[None]:
    """Note on a KeyboardInterrupt what is kept of the recordings that were to come to `folders`; `main` prints it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        from equivcheck.recorder import left_behind

        kept = [text for folder in folders if (text := left_behind(folder))]
        if kept:
            stop.add_note(f"{' and '.join(kept)}; the same command goes on behind that")
        raise
