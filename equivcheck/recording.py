"""The values of one run, with how they were obtained. Everything is judged from recordings.

In memory a `Recording` holds the stored values of one sample. On disk a recording is a folder: `manifest.json` (schema
`equivcheck-recording/1`) and one .safetensors file a sample; it is written beside its place and moved there whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from equivcheck.errors import OutputError, RecordingError
from equivcheck.result import FeedInfo, Model, SampleInfo, Side

SCHEMA = "equivcheck-recording/1"
Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Parameters:
    """Scale and zero point as the recorded engine's own model declares them; see `models.graph.Quantisation`."""

    scale: Array
    zero_point: Array
    axis: int | None = None


@dataclass(frozen=True, eq=False)
class Recording:
    """The values of one run on one sample.

    `values` are stored values by name (codes for quantised ones), graph inputs included; `how` says how each was seen;
    `absent` and `failed` give the reason for those that are not there; `outputs` are the model's outputs as the untouched
    engine gave them; `off_grid` is the largest distance from the grid, in steps, of a value read as float; `results` are
    the float results of its own model's steps on these values, where the backend had to evaluate them anyway.
    """

    sample: str
    values: Mapping[str, Array]
    how: Mapping[str, str]
    outputs: Mapping[str, Array]
    absent: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    off_grid: Mapping[str, float] = field(default_factory=dict)
    quantisation: Mapping[str, Parameters] = field(default_factory=dict)
    disturbed: bool | None = None
    results: Mapping[str, Array] | None = None


class _SavedValue(msgspec.Struct, frozen=True):
    name: str
    key: str
    dtype: str
    shape: list[int]
    how: str
    scale: list[float] | None = None
    zero_point: list[int] | None = None
    axis: int | None = None
    node: str | None = None


class _SavedSample(msgspec.Struct, frozen=True):
    id: str
    feeds: list[FeedInfo]
    file: str


class _Manifest(msgspec.Struct, frozen=True):
    schema: str
    model: Model
    backend: Side
    samples: list[_SavedSample]
    values: list[_SavedValue]
    absent: dict[str, str]
    versions: dict[str, str]
    outputs: list[str] = []
    failed: dict[str, str] = {}


def save(
    folder: str | os.PathLike[str],
    recordings: Sequence[Recording],
    *,
    model: Model,
    side: Side,
    samples: Sequence[SampleInfo],
    versions: Mapping[str, str],
) -> Path:
    """Write `recordings` (one a sample) to `folder`, whole or not at all; an older recording there is replaced.

    Raises OutputError when it cannot be written, or when `folder` holds something that is not a recording.
    """
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())) and not (place / "manifest.json").exists():
        raise OutputError(f"{place} exists and is not a recording", asked=str(place), hint="name a new or empty folder")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise OutputError(f"cannot write to {place.parent}: {error.strerror}", asked=str(place)) from error
    try:
        _write(scratch, recordings, model=model, side=side, samples=samples, versions=versions)
        scratch.chmod(0o755)
        if place.exists():
            shutil.rmtree(place)
        scratch.replace(place)
    except OSError as error:
        raise OutputError(f"cannot write {place}: {error.strerror}", asked=str(place)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def _write(
    scratch: Path,
    recordings: Sequence[Recording],
    *,
    model: Model,
    side: Side,
    samples: Sequence[SampleInfo],
    versions: Mapping[str, str],
) -> None:
    from safetensors.numpy import save_file

    saved: list[_SavedSample] = []
    values: dict[str, _SavedValue] = {}
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}
    for number, (recording, sample) in enumerate(zip(recordings, samples, strict=True)):
        file = f"{number:04d}.safetensors"
        tensors: dict[str, Array] = {}
        for name, array in recording.values.items():
            key = key_of(name)
            values.setdefault(name, _saved_value(name, key, array, recording))
            tensors[key] = np.asarray(array, order="C")
        tensors |= {f"output/{key_of(name)}": np.asarray(array, order="C") for name, array in recording.outputs.items()}
        save_file(tensors, scratch / file)
        saved.append(_SavedSample(sample.id, sample.feeds, file))
        absent |= recording.absent
        failed |= recording.failed
    outputs = list(dict.fromkeys(name for recording in recordings for name in recording.outputs))
    manifest = _Manifest(SCHEMA, model, side, saved, list(values.values()), absent, dict(versions), outputs, failed)
    (scratch / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def key_of(name: str) -> str:
    """A key for a .safetensors file: names may be long and hold anything, so it is a digest (the manifest has the name)."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _saved_value(name: str, key: str, array: Array, recording: Recording) -> _SavedValue:
    parameters = recording.quantisation.get(name)
    return _SavedValue(
        name=name,
        key=key,
        dtype=str(array.dtype),
        shape=list(array.shape),
        how=recording.how.get(name, ""),
        scale=None if parameters is None else [float(s) for s in parameters.scale.ravel()],
        zero_point=None if parameters is None else [int(z) for z in parameters.zero_point.ravel()],
        axis=None if parameters is None else parameters.axis,
    )


@dataclass(frozen=True, eq=False)
class Saved:
    """A recording read back: one `Recording` a sample, and what made it."""

    model: Model
    side: Side
    samples: list[SampleInfo]
    recordings: list[Recording]


def load(folder: str | os.PathLike[str]) -> Saved:
    """Read a recording that `save` wrote.

    Raises RecordingError when it is not one, or when a file of it is missing or broken.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    place = Path(folder)
    try:
        manifest = msgspec.json.decode((place / "manifest.json").read_bytes(), type=_Manifest)
    except FileNotFoundError:
        raise RecordingError(f"{place} is not a recording: it has no manifest.json", asked=str(place)) from None
    except (OSError, msgspec.MsgspecError, json.JSONDecodeError) as error:
        raise RecordingError(f"{place}/manifest.json cannot be read: {error}", asked=str(place)) from error
    if manifest.schema != SCHEMA:
        raise RecordingError(f"{place} has schema '{manifest.schema}', this version reads '{SCHEMA}'", asked=str(place))
    names = {value.key: value for value in manifest.values}
    recordings = []
    for sample in manifest.samples:
        try:
            tensors = load_file(place / sample.file)
        except (OSError, SafetensorError) as error:
            raise RecordingError(f"{place}/{sample.file} cannot be read: {error}", asked=str(place)) from error
        recordings.append(_recording(sample.id, tensors, names, manifest))
    return Saved(
        manifest.model, manifest.backend, [SampleInfo(id=s.id, feeds=s.feeds) for s in manifest.samples], recordings
    )


def _recording(
    sample: str, tensors: Mapping[str, Array], names: Mapping[str, _SavedValue], manifest: _Manifest
) -> Recording:
    values = {names[key].name: array for key, array in tensors.items() if key in names}
    outputs = {
        name: tensors[f"output/{key_of(name)}"] for name in manifest.outputs if f"output/{key_of(name)}" in tensors
    }
    quantisation = {
        value.name: Parameters(
            np.asarray(value.scale, np.float32).reshape(() if len(value.scale) == 1 else (-1,)),
            np.asarray(value.zero_point, value.dtype).reshape(() if len(value.scale) == 1 else (-1,)),
            value.axis,
        )
        for value in manifest.values
        if value.scale is not None
    }
    return Recording(
        sample=sample,
        values=values,
        how={value.name: value.how for value in manifest.values},
        outputs=outputs,
        absent=manifest.absent,
        failed=manifest.failed,
        quantisation=quantisation,
        disturbed=manifest.backend.observation.disturbed,
    )
