"""The values of one run, with how they were obtained. Everything is judged from recordings.

In memory a `Recording` holds the stored values of one sample. On disk a recording is a folder: `manifest.json` (schema
`equivcheck-recording/1`) and one .safetensors file a sample. `Writer` adds sample by sample beside the final place and
moves the whole there at the end: what is finished survives an interruption and need not run again. `load` maps the files,
so a recording may be larger than memory. The manifest has a checksum of each file: a copy that broke on its way from a board
would else be taken for a wrong engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from equivcheck.errors import OutputError, RecordingError
from equivcheck.result import FeedInfo, Model, SampleInfo, Side

SCHEMA = "equivcheck-recording/1"
MANIFEST = "manifest.json"
_JOB = "job.json"
_BLOCK = 1 << 18  # bytes that a checksum reads at once
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
    `absent` and `failed` give the reason for those that are not there, `incomparable` for what was delivered but cannot be
    that value (a dump of another shape); `outputs` are the model's outputs as the untouched
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
    incomparable: Mapping[str, str] = field(default_factory=dict)


class _SavedValue(msgspec.Struct, frozen=True):
    name: str
    key: str
    dtype: str
    shape: list[int]
    how: str
    scale: list[float] | None = None
    zero_point: list[int] | None = None
    axis: int | None = None


class _SavedSample(msgspec.Struct, frozen=True):
    id: str
    feeds: list[FeedInfo]
    file: str
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}
    off_grid: dict[str, float] = {}
    disturbed: bool | None = None
    crc32: str | None = None  # None: written before there was one


class _Manifest(msgspec.Struct, frozen=True):
    schema: str
    model: Model
    backend: Side
    samples: list[_SavedSample]
    values: list[_SavedValue]
    absent: dict[str, str]
    versions: dict[str, str]
    outputs: list[str] = []
    declared: dict[str, tuple[float, str]] = {}


class _Finished(msgspec.Struct, frozen=True):
    """What lies beside the file of a finished sample, until all are there."""

    sample: _SavedSample
    values: list[_SavedValue]
    outputs: list[str]
    side: Side


class _Job(msgspec.Struct, frozen=True):
    """What an unfinished recording is of: another job does not go on with it."""

    model: str
    spec: str
    versions: dict[str, str]


class Writer:
    """Writes a recording sample by sample to `folder`; it appears there whole, at `finish`.

    Samples that an interrupted job of the same model, backend and versions has finished are found by `finished`, not run
    again. `model` is the recorded file; `spec` the backend's. Raises OutputError when it cannot write, or when `folder` holds
    something that is not a recording.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: Model,
        spec: str,
        versions: Mapping[str, str],
        declared: Mapping[str, tuple[float, str]] | None = None,
    ) -> None:
        self.place = place = Path(folder)
        self.model, self.versions, self.declared = model, dict(versions), dict(declared or {})
        if self.place.name in ("", ".."):
            raise OutputError(
                f"{place} exists and is not a recording", asked=str(folder), hint="name a new or empty folder"
            )
        self.scratch = unfinished(place)
        self._done: list[_Finished] = []
        self._job = _Job(model.sha256, spec, self.versions)
        if place.exists() and (not place.is_dir() or any(place.iterdir())) and not (place / MANIFEST).exists():
            raise OutputError(
                f"{place} exists and is not a recording", asked=str(place), hint="name a new or empty folder"
            )
        self._refuse_another_model()
        with self._telling():
            self._start()

    def _refuse_another_model(self) -> None:
        """A recording of another model is not replaced: the folder's name was a slip."""
        if not (self.place / MANIFEST).exists():
            return
        there = load(self.place).model
        if there.sha256 != self.model.sha256:
            raise OutputError(
                f"{self.place} holds a recording of another model ({Path(there.path).name})",
                asked=str(self.place),
                hint="name a new folder, or remove that one",
            )

    def _start(self) -> None:
        job = msgspec.json.encode(self._job)
        with contextlib.suppress(FileNotFoundError):
            if (self.scratch / _JOB).read_bytes() == job:
                return
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        (self.scratch / _JOB).write_bytes(job)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Turn what the file system says into an error with the place in it."""
        try:
            yield
        except OSError as error:
            raise OutputError(f"cannot write {self.place}: {error.strerror or error}", asked=str(self.place)) from error

    def finished(self, sample: SampleInfo) -> tuple[Recording, Side] | None:
        """What an interrupted job has already recorded of `sample` (same id and same feeds), or None."""
        stem = self._stem(len(self._done))
        try:
            done = msgspec.json.decode((self.scratch / f"{stem}.json").read_bytes(), type=_Finished)
            tensors = mapped(self.scratch / done.sample.file)
            _check(self.scratch / done.sample.file, done.sample.crc32)
        except (OSError, msgspec.MsgspecError, RecordingError):  # cut off with the machine: it is run again
            return None
        if (done.sample.id, done.sample.feeds) != (sample.id, sample.feeds):
            return None
        self._done.append(done)
        return _recording(done.sample, tensors, done.values, done.outputs), done.side

    def add(self, recording: Recording, sample: SampleInfo, side: Side) -> None:
        """Write one sample; `side` is what its session says of itself by now."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        stem = self._stem(len(self._done))
        tensors = {key_of(name): np.asarray(array, order="C") for name, array in recording.values.items()}
        tensors |= {f"output/{key_of(name)}": np.asarray(array, order="C") for name, array in recording.outputs.items()}
        file = self.scratch / f"{stem}.safetensors"
        values = [_saved_value(name, array, recording) for name, array in recording.values.items()]
        with self._telling():
            try:
                save_file(tensors, file)
            except SafetensorError as error:  # the disk is full, say
                raise OSError(str(error)) from error
            saved = _SavedSample(
                sample.id,
                sample.feeds,
                file.name,
                dict(recording.absent),
                dict(recording.failed),
                dict(recording.off_grid),
                recording.disturbed,
                _crc32(file),
            )
            done = _Finished(saved, values, list(recording.outputs), side)
            half = self.scratch / f"{stem}.json.half"
            half.write_bytes(msgspec.json.encode(done))
            half.replace(self.scratch / f"{stem}.json")
        self._done.append(done)

    @staticmethod
    def _stem(number: int) -> str:
        return f"{number:04d}"

    def abandon(self) -> None:
        """Leave what is finished for the next attempt; nothing, where nothing is."""
        if not self._done:
            shutil.rmtree(self.scratch, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty, or not ours
                self.place.parent.rmdir()

    def finish(self, side: Side) -> Path:
        """Move the whole to its place (an older recording of the same model is replaced) and return that."""
        values: dict[str, _SavedValue] = {}
        absent: dict[str, str] = {}
        for done in self._done:
            values = {value.name: value for value in done.values} | values
            absent |= done.sample.absent
        outputs = list(dict.fromkeys(name for done in self._done for name in done.outputs))
        manifest = _Manifest(
            SCHEMA,
            self.model,
            side,
            [done.sample for done in self._done],
            list(values.values()),
            absent,
            self.versions,
            outputs,
            self.declared,
        )
        keep = {MANIFEST, *(done.sample.file for done in self._done)}
        with self._telling():
            (self.scratch / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            for file in self.scratch.iterdir():
                if file.name not in keep:
                    file.unlink()
            older = self.place.with_name(f".{self.place.name}.older")
            if self.place.exists():
                self.place.rename(older)
            self.scratch.replace(self.place)
            shutil.rmtree(older, ignore_errors=True)
        return self.place


def unfinished(folder: Path) -> Path:
    """Where the samples of an unfinished recording lie until it comes to `folder` whole."""
    return folder.with_name(f".{folder.name}.unfinished")


def finished_samples(folder: Path) -> int:
    """How many samples an interrupted job has left of the recording that was to come to `folder`."""
    return sum(1 for _ in unfinished(folder).glob("[0-9]*.json"))


def save(
    folder: str | os.PathLike[str],
    recordings: Sequence[Recording],
    *,
    model: Model,
    side: Side,
    samples: Sequence[SampleInfo],
    versions: Mapping[str, str],
) -> Path:
    """Write `recordings` (one a sample) to `folder`, whole or not at all. Raises OutputError, see `Writer`."""
    writer = Writer(folder, model=model, spec=side.spec, versions=versions)
    try:
        for recording, sample in zip(recordings, samples, strict=True):
            writer.add(recording, sample, side)
        return writer.finish(side)
    finally:
        shutil.rmtree(writer.scratch, ignore_errors=True)


def key_of(name: str) -> str:
    """A key for a .safetensors file: names may be long and hold anything, so it is a digest (the manifest has the name)."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _saved_value(name: str, array: Array, recording: Recording) -> _SavedValue:
    parameters = recording.quantisation.get(name)
    return _SavedValue(
        name=name,
        key=key_of(name),
        dtype=str(array.dtype),
        shape=list(array.shape),
        how=recording.how.get(name, ""),
        scale=None if parameters is None else [float(s) for s in parameters.scale.ravel()],
        zero_point=None if parameters is None else [int(z) for z in parameters.zero_point.ravel()],
        axis=None if parameters is None else parameters.axis,
    )


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Saved:
    """A recording read back: one `Recording` a sample (mapped when it is asked for), and what made it.

    `declared` are the wider limits of legal excess that its engine declares: op_type -> (LSB, reason).
    """

    model: Model
    side: Side
    samples: list[SampleInfo]
    recordings: Sequence[Recording]
    declared: Mapping[str, tuple[float, str]]


class _Mapped(Sequence[Recording]):
    """The recordings of a folder; each sample's file is mapped when it is asked for, and let go with its arrays.

    The first time, it is checked whether the file is what was written. Raises RecordingError.
    """

    def __init__(self, place: Path, manifest: _Manifest) -> None:
        self.place, self.manifest = place, manifest
        self._checked: set[str] = set()

    def __len__(self) -> int:
        return len(self.manifest.samples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(len(self))[index]]
        sample = self.manifest.samples[index]
        path = self.place / sample.file
        if sample.file not in self._checked:
            _check(path, sample.crc32)
            self._checked.add(sample.file)
        return _recording(sample, mapped(path), self.manifest.values, self.manifest.outputs)


def load(folder: str | os.PathLike[str]) -> Saved:
    """Read a recording that `Writer` wrote; its arrays are read-only and mapped from the files.

    Raises RecordingError when it is not one, or when a file of it is missing or cut off; a file that is not what was
    written makes the first access to its recording raise it.
    """
    place = Path(folder)
    try:
        manifest = msgspec.json.decode((place / MANIFEST).read_bytes(), type=_Manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise RecordingError(f"{place} is not a recording: it has no {MANIFEST}", asked=str(place)) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordingError(f"{place}/{MANIFEST} cannot be read: {error}", asked=str(place)) from error
    if manifest.schema != SCHEMA:
        raise RecordingError(f"{place} has schema '{manifest.schema}', this version reads '{SCHEMA}'", asked=str(place))
    for sample in manifest.samples:
        _header(place / sample.file)
    for value in manifest.values:
        if value.scale is not None:
            try:
                _parameters(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise RecordingError(f"{place}/{MANIFEST}: value '{value.name}': {error}", asked=value.name) from error
    samples = [SampleInfo(id=s.id, feeds=s.feeds) for s in manifest.samples]
    return Saved(manifest.model, manifest.backend, samples, _Mapped(place, manifest), manifest.declared)


def _recording(
    sample: _SavedSample, tensors: Mapping[str, Array], values: Sequence[_SavedValue], outputs: Sequence[str]
) -> Recording:
    here = [value for value in values if value.key in tensors]
    return Recording(
        sample=sample.id,
        values={value.name: tensors[value.key] for value in here},
        how={value.name: value.how for value in here},
        outputs={name: tensors[key] for name in outputs if (key := f"output/{key_of(name)}") in tensors},
        absent=sample.absent,
        failed=sample.failed,
        off_grid=sample.off_grid,
        quantisation={value.name: _parameters(value) for value in here if value.scale is not None},
        disturbed=sample.disturbed,
    )


def _parameters(value: _SavedValue) -> Parameters:
    scale = np.asarray(value.scale, np.float32)
    zero = np.asarray(value.zero_point, value.dtype)
    one = value.axis is None and scale.size == 1
    return Parameters(scale.reshape(()) if one else scale, zero.reshape(()) if one else zero, value.axis)


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the table of a .safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _header(path: Path) -> tuple[dict[str, _Entry], int]:
    """(tensor table, offset of the data) of a .safetensors file: an u64 length, JSON of that length, then the data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 0 < length <= size - 8:
                raise ValueError("its header is cut off")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        table = {key: msgspec.json.decode(entry, type=_Entry) for key, entry in raw.items()}
        end = max((entry.data_offsets[1] for entry in table.values()), default=0)
        if end > size - 8 - length:
            raise ValueError(f"it is cut off: {size} bytes, {8 + length + end} are due")
        for key, entry in table.items():
            first, last = entry.data_offsets
            if first < 0 or last - first != math.prod(entry.shape) * _numpy_type(entry.dtype, path).itemsize:
                raise ValueError(f"tensor {key} is {entry.dtype} {entry.shape}, and has bytes {first} to {last}")
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise RecordingError(f"{path} cannot be read: {error}", asked=str(path)) from error
    return table, 8 + length


def mapped(path: Path) -> dict[str, Array]:
    """The tensors of a .safetensors file as read-only arrays over one mapping: nothing is read before it is used.

    The file's own library copies every tensor it hands to numpy, which is why the table is read here.
    Raises RecordingError.
    """
    table, start = _header(path)
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    found: dict[str, Array] = {}
    for key, entry in table.items():
        first, last = entry.data_offsets
        data = content[start + first : start + last]
        found[key] = data.view(_numpy_type(entry.dtype, path)).reshape(entry.shape)
    return found


def _check(path: Path, crc32: str | None) -> None:
    """Raise RecordingError where the file is not what was written; without a checksum there is nothing to go by."""
    if crc32 is None:
        return
    try:
        found = _crc32(path)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error}", asked=str(path)) from error
    if found != crc32:
        raise RecordingError(
            f"{path} is not what was recorded: its crc32 is {found}, {MANIFEST} says {crc32}",
            asked=crc32,
            found=found,
            hint="copy it again, in binary mode",
        )


def _crc32(path: Path) -> str:
    """The CRC-32 of a file, eight hexadecimal digits.

    2.7 GB a second, against 0.9 for SHA-256: a file is to be guarded against accidents, and `compare` without a model
    takes no more than 2.2 GB a second itself.
    """
    found, block = 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            found = zlib.crc32(block[:count], found)
    return f"{found:08x}"


def _numpy_type(name: str, path: Path) -> np.dtype[Any]:
    """The numpy type of a .safetensors dtype."""
    if name in _TYPES:
        return np.dtype(_TYPES[name])
    if name in _ML_TYPES:
        import ml_dtypes  # late: only these types need it

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_TYPES[name]))
        return found
    raise RecordingError(f"{path} holds a tensor of type {name}, which is not known here", asked=name)


_TYPES = {
    "BOOL": "bool", "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
_ML_TYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
