"""What comes back of a bundle: the folder of results that `run.py` filled on a board, read as a recording.

Everything that is needed lies in that folder: `bundle.json`, `run.json`, and for each sample a folder with what it was fed and
one .npz a model. Heads end at a DequantizeLinear; the codes follow from the model's scale and zero point.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from equivcheck.errors import RecordingError
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.heads import Seen
from equivcheck.recording import Parameters, Recording
from equivcheck.result import FeedInfo, Model, Observation, SampleInfo, Side

SCHEMA = "equivcheck-bundle/1"
BUNDLE = "bundle.json"
_RUN = "run.json"
_INPUTS = "inputs.npz"
T = TypeVar("T")


class PackedModel(msgspec.Struct, frozen=True):
    """One model of a bundle. `value` is the stored value that it shows, None for the whole model, which comes first.

    `weights` are (offset, bytes) of the initializers that are kept apart. `inputs` and `outputs` are names.
    """

    file: str
    label: str
    value: str | None
    inputs: list[str]
    outputs: list[str]
    weights: list[tuple[int, int]]


class PackedSample(msgspec.Struct, frozen=True):
    """One sample of a bundle: an .npz file keyed by the names of the inputs."""

    id: str
    feeds: list[FeedInfo]
    file: str


class Packed(msgspec.Struct, frozen=True):
    """`bundle.json`. `script` is the user's file in the bundle, None for ONNX Runtime; `options` are the engine's.

    `files` has the sha256 of every other file, `declared` the wider limits of legal excess: op_type -> (LSB, reason).
    """

    schema: str
    model: Model
    spec: str
    script: str | None
    options: dict[str, str | int | dict[str, str]]
    timeout: float
    models: list[PackedModel]
    weights: str
    samples: list[PackedSample]
    files: dict[str, str]
    declared: dict[str, tuple[float, str]]
    versions: dict[str, str]


class _Run(msgspec.Struct, frozen=True):
    """`run.json`: what the engine on the board said of itself."""

    engine: str
    version: str
    python: str
    node: str
    machine: str
    legal_excess: dict[str, tuple[float, str]] = {}


def is_carried(place: Path) -> bool:
    """Is this a bundle, or what came back of one?"""
    return (place / BUNDLE).is_file()


class Carried:
    """The results of a bundle. Raises RecordingError when they are not there or cannot be read."""

    def __init__(self, place: Path, graph: Graph | None) -> None:
        if (place / "run.py").is_file() and not (place / _RUN).is_file():
            place = place / "results"
        if graph is None:
            raise RecordingError(
                f"{place} holds the results of a bundle, which are judged with the model",
                asked=str(place),
                hint="give --model MODEL (model= in Python)",
            )
        if not (place / _RUN).is_file():
            raise RecordingError(
                f"{place} has no results",
                asked=str(place),
                hint="run `python3 run.py` on the board, and carry its folder results back",
            )
        self.place, self.graph = place, graph
        self.packed = self._read(BUNDLE, Packed)
        self.ran = self._read(_RUN, _Run)
        if self.packed.schema != SCHEMA:
            raise RecordingError(
                f"{place} has schema '{self.packed.schema}', this version reads '{SCHEMA}'", asked=str(place)
            )
        if not self.packed.samples or not self.packed.models:
            raise RecordingError(f"{place}/{BUNDLE} names no sample or no model", asked=str(place))
        self.disturbed = self._disturbed()

    def _read(self, name: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode((self.place / name).read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RecordingError(f"{self.place}/{name} cannot be read: {error}", asked=str(self.place)) from error

    @property
    def samples(self) -> list[SampleInfo]:
        return [SampleInfo(id=sample.id, feeds=sample.feeds) for sample in self.packed.samples]

    @property
    def declared(self) -> Mapping[str, tuple[float, str]]:
        """The limits that the engine declares, packed or on the board."""
        return {**self.packed.declared, **self.ran.legal_excess}

    @property
    def side(self) -> Side:
        """What ran, and where."""
        return Side(
            spec=self.packed.spec,
            engine=self.ran.engine,
            version=self.ran.version,
            device=f"{self.ran.node}, {self.ran.machine}, Python {self.ran.python}",
            model_sha256=self.packed.model.sha256,
            observation=Observation(method="head", disturbed=self.disturbed, note="from a bundle, run by hand"),
        )

    def recording(self, number: int) -> Recording:
        """Sample `number`; a value whose model did not run, or gave something else, is among the failed with the reason."""
        outputs = self._arrays(number, 0)
        seen = Seen.of_feeds(self.graph, self._inputs(number))
        for k, model in enumerate(self.packed.models[1:], 1):
            assert model.value is not None
            got = self._arrays(number, k)
            if got is None:
                seen.failed[model.value] = self._reason(number, k)
            else:
                seen.compare_outputs(outputs or {}, got)
                seen.take(model.value, model.outputs[0], got, "truncated model, run by hand")
        return Recording(
            sample=self.packed.samples[number].id,
            values=seen.values,
            how=seen.how,
            outputs=outputs or {},
            failed=seen.failed,
            off_grid=seen.off_grid,
            quantisation={
                name: Parameters(quantisation.scale, quantisation.zero_point, quantisation.axis)
                for name in seen.values
                if (quantisation := self.graph.quantisation.get(name)) is not None
            },
            disturbed=seen.disturbed,
        )

    def feed(self, number: int, name: str) -> Array | None:
        """What sample `number` was fed as `name`, or None."""
        return self._inputs(number).get(name)

    def _disturbed(self) -> bool | None:
        """Does a head that ends where the model does give another result than the untouched model? None: there is none."""
        found: bool | None = None
        for number in range(len(self.packed.samples)):
            outputs = self._arrays(number, 0) or {}
            seen = Seen(self.graph, {}, {}, disturbed=found)
            for k, model in enumerate(self.packed.models[1:], 1):
                if model.outputs[0] in outputs:
                    seen.compare_outputs(outputs, self._arrays(number, k) or {})
            found = seen.disturbed
        return found

    def _inputs(self, number: int) -> dict[str, Array]:
        path = self.place / f"{number:04d}" / _INPUTS
        found = _npz(path)
        if found is None:
            raise RecordingError(f"{path} is missing", asked=str(path), hint="carry the whole folder of results back")
        return found

    def _arrays(self, number: int, model: int) -> dict[str, Array] | None:
        """What a model gave on a sample by output name, or None where it did not run."""
        return _npz(self.place / f"{number:04d}" / f"{model:04d}.npz")

    def _reason(self, number: int, model: int) -> str:
        path = self.place / f"{number:04d}" / f"{model:04d}.failed"
        try:
            return f"on {self.ran.node}: {path.read_text(encoding='utf-8', errors='replace')}"
        except OSError:
            return "not run yet: start run.py again, it goes on where it was stopped"


def _npz(path: Path) -> dict[str, Array] | None:
    """The arrays of an .npz file, or None where there is none. Raises RecordingError when it is broken."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:  # of a broken one numpy closes nothing
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RecordingError(
            f"{path} cannot be read: {error}", asked=str(path), hint="carry it back once more, in binary mode"
        ) from error
