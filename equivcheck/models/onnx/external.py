"""External data: weights in files beside the model. Only the ranges that are needed are read and written."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from equivcheck.errors import ModelError, OutputError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # Windows has none

# One protobuf holds at most 2 GiB; above this, weights stay where they are and only `split` works on the model.
LARGEST_IN_MEMORY = 1 << 30
_ALIGNMENT = 64  # of a tensor in a data file we write; more than any dtype needs
_CHUNK = 1 << 24
_FICLONE = 0x40049409  # linux/fs.h


@dataclass(frozen=True, slots=True)
class Range:
    """Where a tensor's bytes lie: `length` bytes from `offset` of file `location` (relative to the model)."""

    location: str
    offset: int
    length: int | None


def is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def range_of(tensor: onnx.TensorProto) -> Range:
    """Read location, offset and length of an external tensor; length None means to the end of the file."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = entries.get("length")
    try:
        offset, size = int(entries.get("offset", 0)), None if length is None else int(length)
    except ValueError:
        offset, size = -1, None
    if offset < 0 or (size is not None and size < 0):
        raise ModelError(f"external data of '{tensor.name}' has no valid offset and length: {entries}")
    return Range(entries.get("location", ""), offset, size)


def external_tensors(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    """All external tensors of the main graph, of bodies and of Constant nodes."""
    return [tensor for tensor in all_tensors(proto) if is_external(tensor)]


def all_tensors(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    """All tensors that a model holds: initializers and attributes, those of bodies and local functions included."""
    found: list[onnx.TensorProto] = []
    pending: list[onnx.GraphProto] = [proto.graph]
    nodes = [node for function in proto.functions for node in function.node]
    while pending or nodes:
        if pending:
            graph = pending.pop()
            found += graph.initializer
            found += [sparse.values for sparse in graph.sparse_initializer]
            nodes += graph.node
            continue
        for attribute in nodes.pop().attribute:
            if attribute.HasField("t"):
                found.append(attribute.t)
            found += attribute.tensors
            pending += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    return found


def external_bytes(proto: onnx.ModelProto) -> int:
    """How many bytes of weights lie outside of the protobuf."""
    return sum(range_of(tensor).length or _declared_bytes(tensor) for tensor in external_tensors(proto))


def _declared_bytes(tensor: onnx.TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count * 8


def load_external(proto: onnx.ModelProto, folder: Path) -> None:
    """Read all external data of `proto` into it.

    Raises ModelError when a file is missing, too short, or lies outside of the model's folder.
    """
    for tensor in external_tensors(proto):
        place = range_of(tensor)
        path = _checked(folder, place, tensor.name)
        with path.open("rb") as file:
            file.seek(place.offset)
            content = file.read() if place.length is None else file.read(place.length)
        if place.length is not None and len(content) != place.length:
            raise ModelError(
                f"{path} ends before the data of '{tensor.name}' ({place.offset} + {place.length} bytes)",
                hint="the data file is cut short: copy it again",
            )
        tensor.raw_data = content
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def check_external(proto: onnx.ModelProto, folder: Path) -> None:
    """Raise ModelError when a file of external data is missing, or lies outside of the model's folder; nothing is read."""
    for tensor in external_tensors(proto):
        _checked(folder, range_of(tensor), tensor.name)


def _checked(folder: Path, place: Range, tensor: str) -> Path:
    path = folder / place.location
    inside = not Path(place.location).is_absolute() and ".." not in Path(place.location).parts
    if not place.location or not inside:
        raise ModelError(
            f"external data of '{tensor}' points outside of the model's folder: {place.location!r}",
            hint="external data must lie beside the model",
        )
    if not path.is_file():
        raise ModelError(f"external data of '{tensor}' is missing: {path}", hint="keep the data file beside the model")
    return path


def carry_external(part: onnx.ModelProto, source: Path, target: Path, prefix: str = "") -> None:
    """Bring the external data that `part` needs from folder `source` to folder `target`, and point `part` at it.

    Files get `prefix` before their name, so that several parts can share a folder. A file whose every byte is needed shares
    its blocks with the original where the file system can do that (not by a hard link: onnx 1.21 and later read no file with
    several of them, neither the part's nor then the model's own, github.com/onnx/onnx/pull/7717); of others only the needed
    ranges are copied, and holes stay holes. Raises ModelError, OutputError.
    """
    by_file: dict[str, list[onnx.TensorProto]] = defaultdict(list)
    for tensor in external_tensors(part):
        by_file[range_of(tensor).location].append(tensor)
    for location, tensors in by_file.items():
        origin = _checked(source, range_of(tensors[0]), tensors[0].name)
        moved = str(Path(location).with_name(prefix + Path(location).name))
        place = target / moved
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            size = origin.stat().st_size
            for tensor in tensors:
                _check_inside(tensor, origin, size)
            if _covers(tensors, size) and _cloned(origin, place):
                for tensor in tensors:
                    found = range_of(tensor)
                    _point(tensor, moved, found.offset, found.length)
                continue
            _copy_ranges(tensors, origin, place, moved)
        except OSError as error:
            raise OutputError(f"cannot write {place}: {error.strerror}", asked=str(place)) from error


def _covers(tensors: Iterable[onnx.TensorProto], size: int) -> bool:
    """Do these tensors use the whole file, but for padding between them?"""
    ranges = sorted({(r.offset, r.length if r.length is not None else size - r.offset) for r in map(range_of, tensors)})
    reached = 0
    for offset, length in ranges:
        if offset > reached + 4096:
            return False
        reached = max(reached, offset + length)
    return reached + 4096 > size


def _check_inside(tensor: onnx.TensorProto, origin: Path, size: int) -> None:
    found = range_of(tensor)
    if found.offset + (found.length or 0) > size:
        raise ModelError(
            f"{origin} ends before the data of '{tensor.name}' ({found.offset} + {found.length or 0} bytes)",
            hint="the data file is cut short: copy it again",
        )


def _cloned(origin: Path, place: Path) -> bool:
    """Make `place` a file of its own that shares its blocks with `origin` (Btrfs, XFS, bcachefs); False where that fails."""
    if fcntl is None:
        return False
    try:
        with origin.open("rb") as source, place.open("wb") as target:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True


def _copy_ranges(tensors: Iterable[onnx.TensorProto], origin: Path, place: Path, moved: str) -> None:
    written: dict[tuple[int, int], int] = {}
    with origin.open("rb") as source, place.open("wb") as target:
        size = os.fstat(source.fileno()).st_size
        end = 0
        for tensor in tensors:
            found = range_of(tensor)
            length = found.length if found.length is not None else size - found.offset
            key = (found.offset, length)
            if key not in written:
                written[key] = start = -(-end // _ALIGNMENT) * _ALIGNMENT
                _copy_range(source.fileno(), target.fileno(), found.offset, start, length)
                end = start + length
            _point(tensor, moved, written[key], length)
        target.truncate(end)


def _copy_range(source: int, target: int, offset: int, start: int, length: int) -> None:
    """Copy `length` bytes, leaving holes of the source as holes of the target."""
    at, stop = offset, offset + length
    while at < stop:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
            hole = min(os.lseek(source, at, os.SEEK_HOLE), stop)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            hole = stop  # a file system that knows no holes
        if at >= stop:
            return
        while at < hole:
            content = os.pread(source, min(_CHUNK, hole - at), at)
            if not content:
                return
            os.pwrite(target, content, start + at - offset)
            at += len(content)


def _point(tensor: onnx.TensorProto, location: str, offset: int, length: int | None) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))
