"""Sessions whose run is many runs of an engine, an hour on a slow board: they say how far they are, and lose nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from equivcheck.backends.base import Session
from equivcheck.errors import EquivcheckError, OutputError
from equivcheck.models.graph import Array
from equivcheck.recording import mapped


class KeptHeads:
    """Values of heads on disk, one file each, until the whole sample is recorded. `folder` is made when the first comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Array | None:
        """What an interrupted run kept under `key`, or None."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return mapped(path).get("value")
        except EquivcheckError:  # cut off with the machine: it is run again
            return None

    def put(self, key: str, array: Array) -> None:
        """Keep `array`. Raises OutputError when it cannot be written."""
        from safetensors.numpy import save_file

        path = self._path(key)
        half = path.with_suffix(".half")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({"value": array.copy(order="C")}, half)
            half.replace(path)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}", asked=str(path)) from error

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


class LongSession(Session):
    """A session that takes long: `tell` hears how far it is; `kept`, where given, holds what it need not run again.

    Both are set by whoever opened it, before the run of each sample.
    """

    tell: Callable[[str], None] = staticmethod(lambda text: None)
    kept: KeptHeads | None = None
