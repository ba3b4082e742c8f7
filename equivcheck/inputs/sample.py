"""What a model asks for (`InputSpec`) and what it gets (`Feed`, `Sample`), as plain frozen data."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equivcheck.result import FeedInfo, SampleInfo

Array = NDArray[Any]
Dim = int | str | None


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a model. `dtype` is numpy's name; a str or None in `shape` is a symbolic or unknown dimension."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {shape_text(self.shape)})"


@dataclass(frozen=True, eq=False)
class Feed:
    """The array one input gets, C-contiguous and read-only, with where it came from.

    `source` is the path as the user gave it, "random:SEED", or "array" for one given in Python. `recipe` is the inline
    form of the preprocessing that was applied, with Pillow's version; None when the array was taken as it is.
    """

    name: str
    array: Array
    source: str
    recipe: str | None = None

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the elements in C order, little-endian."""
        stored = self.array.byteswap() if sys.byteorder == "big" else self.array
        return hashlib.sha256(stored.tobytes()).hexdigest()

    @property
    def info(self) -> FeedInfo:
        """What a report and a recording say of it."""
        return FeedInfo(
            name=self.name,
            dtype=str(self.array.dtype),
            shape=list(self.array.shape),
            sha256=self.sha256,
            source=self.source,
            recipe=self.recipe,
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """One complete set of feeds, in the order of the model's inputs. `id` is unique within a run."""

    id: str
    feeds: Mapping[str, Feed]

    def arrays(self) -> dict[str, Array]:
        """`{input name: array}`, as an engine's `run` takes it."""
        return {name: feed.array for name, feed in self.feeds.items()}

    @property
    def info(self) -> SampleInfo:
        """Name, type, digest and source of every feed."""
        return SampleInfo(id=self.id, feeds=[feed.info for feed in self.feeds.values()])


@dataclass(frozen=True, eq=False)
class Loaded:
    """The samples of a run, and what the user should hear about them (one line a note)."""

    samples: list[Sample]
    notes: list[str]


class Notes:
    """Collects remarks; the same remark on many files becomes one line."""

    def __init__(self) -> None:
        self._sources: dict[str, list[str]] = {}

    def add(self, text: str, source: str | None = None) -> None:
        """Keep `text`; `source` is the file or feed it is about."""
        sources = self._sources.setdefault(text, [])
        if source is not None and source not in sources:
            sources.append(source)

    def lines(self) -> list[str]:
        """One line per remark, in the order of their first appearance."""
        return [text if not sources else f"{_listed(sources)}: {text}" for text, sources in self._sources.items()]


def known(dim: Dim) -> bool:
    """Whether a dimension is a fixed size (exporters also write -1 for "any")."""
    return isinstance(dim, int) and dim >= 0


def shape_text(shape: Sequence[Dim]) -> str:
    """`1x3x48xW`, as `random:SEED:SHAPE` takes it; "scalar" for rank 0, "?" for an unnamed dimension."""
    if not shape:
        return "scalar"
    return "x".join(str(dim) if known(dim) or (isinstance(dim, str) and dim) else "?" for dim in shape)


def frozen(array: Array) -> Array:
    """A copy in native byte order, C-contiguous and read-only, so that both sides get the same bytes.

    0-d stays 0-d (`np.ascontiguousarray` would make it 1-d).
    """
    native = array.dtype.newbyteorder("=") if array.dtype.kind in "iufc" else array.dtype
    result: Array = np.array(array, dtype=native, order="C", copy=True)
    result.setflags(write=False)
    return result


def _listed(sources: Sequence[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
