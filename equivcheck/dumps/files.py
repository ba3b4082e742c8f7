"""What lies on disk: the samples of a dump and their tensors, found by their headers and read one at a time."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from equivcheck.errors import RecordingError, near

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

RAW = (".raw", ".bin")
SINGLE = (".npy", ".pb", *RAW)  # one tensor a file
CONTAINERS = (".npz", ".safetensors")  # one sample a file
FORMATS = ".npy, .npz, .raw, .bin, .pb or .safetensors"
RKNN_MAP = "map_name_to_file.txt"
RKNN_SIDES = ("golden", "simulator", "runtime")
_SAFETENSORS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor of a dump, not read yet. A raw file says neither `dtype` nor `shape`; `size` is its bytes on disk."""

    name: str
    path: Path
    dtype: np.dtype[Any] | None
    shape: Shape | None
    size: int
    key: str | None = None

    @property
    def source(self) -> str:
        """Where it lies, for messages."""
        return str(self.path) if self.key is None else f"{self.path}:{self.key}"


@dataclass(frozen=True)
class Found:
    """The tensors of one sample, and how many files beside them were left alone."""

    id: str
    tensors: tuple[Tensor, ...]
    left_out: tuple[str, ...] = ()


def samples_in(path: Path) -> list[Found]:
    """The samples that `path` holds, in natural order (Result_2 before Result_10); only headers are read.

    A file is one sample. A folder of .npz or .safetensors is one sample a file; a folder of single tensors is one sample,
    folders below it being parts of names; a folder of nothing but folders holds samples in each of them.
    Raises RecordingError when there is nothing to read, or when a file is not what its name says.
    """
    if path.is_file():
        if path.suffix.lower() not in (*SINGLE, *CONTAINERS):
            raise RecordingError(f"{path} is no dump", asked=str(path), hint=f"give a folder, or a {FORMATS} file")
        return [Found(path.stem, _tensors_of(path, path.stem))]
    if not path.is_dir():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = [str(path.parent / name) for name in near(path.name, names)]
        raise RecordingError(f"no dump {path}", asked=str(path), nearest=nearest, hint="give a folder or a file")
    _refuse_whole_snapshot(path)
    found = _in_folder(path, "")
    if not found:
        raise RecordingError(f"{path} holds no tensors", asked=str(path), hint=f"a dump holds {FORMATS} files")
    return found


def _in_folder(folder: Path, above: str) -> list[Found]:
    with readable(folder):
        entries = sorted((e for e in folder.iterdir() if not e.name.startswith(".")), key=_natural)
    singles = [e for e in entries if e.is_file() and e.suffix.lower() in SINGLE]
    containers = [e for e in entries if e.is_file() and e.suffix.lower() in CONTAINERS]
    if singles and containers:
        raise RecordingError(
            f"{folder} holds both {containers[0].name} (a sample of its own) and {singles[0].name} (one tensor)",
            asked=str(folder),
            hint="give one of them, or keep them in folders of their own",
        )
    if containers:
        stems = [c.stem for c in containers]
        ids = [c.stem if stems.count(c.stem) == 1 else c.name for c in containers]
        if above:
            ids = [above] if len(containers) == 1 else [f"{above}/{name}" for name in ids]
        return [Found(name, _tensors_of(c, c.stem)) for name, c in zip(ids, containers, strict=True)]
    if singles:
        return [_one_sample(folder, above or folder.resolve().name)]
    folders = [entry for entry in entries if entry.is_dir()]
    return [found for sub in folders for found in _in_folder(sub, f"{above}{'/' if above else ''}{sub.name}")]


def _one_sample(folder: Path, sample: str) -> Found:
    files = sorted((p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")), key=_natural)
    names = _rknn_names(folder, [p for p in files if p.suffix.lower() in SINGLE])
    tensors = [
        tensor
        for path in files
        if path.suffix.lower() in SINGLE
        for tensor in _tensors_of(path, names.get(path.stem) or path.relative_to(folder).with_suffix("").as_posix())
    ]
    left_out = tuple(p.name for p in files if p.suffix.lower() not in SINGLE and p.name != RKNN_MAP)
    return Found(sample, tuple(tensors), left_out)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() and p.isascii() else (-1, p) for p in re.split(r"([0-9]+)", str(path))]


# -- Rockchip's accuracy_analysis --------------------------------------------------------------------------------------


def _refuse_whole_snapshot(folder: Path) -> None:
    sides = [side for side in RKNN_SIDES if (folder / side).is_dir()]
    if sides and ((folder / RKNN_MAP).is_file() or len(sides) > 1):
        raise RecordingError(
            f"{folder} is a whole accuracy_analysis snapshot, with {' and '.join(sides)}",
            asked=str(folder),
            hint="name one side: " + " or ".join(str(folder / side) for side in sides),
        )


def _rknn_names(folder: Path, files: list[Path]) -> dict[str, str]:
    """File stem -> layer name, from the map that accuracy_analysis writes one or two folders up.

    That it writes such a map is documented; how a line of it looks is not. So a line counts when exactly one of its words
    names a file here, and exactly one other word is left beside an operator in brackets.
    """
    above = (place / RKNN_MAP for place in (folder, folder.parent, folder.parent.parent))
    path = next((p for p in above if p.is_file()), None)
    if path is None:
        return {}
    stems = {p.stem for p in files}
    found: dict[str, str] = {}
    with readable(path):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = [word.strip("'\"{},") for word in re.sub(r"\[\w+\]|->|=|\|", " ", line).replace(": ", " ").split()]
            hits = [word for word in words if Path(word).name.removesuffix(".npy").removesuffix(".txt") in stems]
            others = [word for word in words if word not in hits[-1:]]
            if hits and len(others) == 1:
                found[Path(hits[-1]).name.removesuffix(".npy").removesuffix(".txt")] = others[0]
    return found


# -- headers -----------------------------------------------------------------------------------------------------------


def _tensors_of(path: Path, name: str) -> tuple[Tensor, ...]:
    with readable(path):
        return tuple(_HEADERS[path.suffix.lower()](path, name))


def _raw_header(path: Path, name: str) -> Iterator[Tensor]:
    yield Tensor(name, path, None, None, path.stat().st_size)


def _npy_header(path: Path, name: str) -> Iterator[Tensor]:
    with path.open("rb") as stream:
        dtype, shape = _npy_dtype_and_shape(stream, str(path))
        there = path.stat().st_size - stream.tell()
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if there < size:
        raise RecordingError(
            f"{path} breaks off: {there} bytes of numbers, its header says {size}",
            asked=str(path),
            found=f"{there} bytes",
            hint="dump or copy it again",
        )
    yield Tensor(name, path, dtype, shape, size)


def _npy_dtype_and_shape(stream: IO[bytes], source: str) -> tuple[np.dtype[Any], Shape]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise RecordingError(
            f"{source} holds Python objects (a pickle), which can run code when loaded: refused",
            asked=source,
            hint="save plain numbers: np.save(path, np.asarray(values, dtype=...))",
        )
    return dtype, shape


def _npz_headers(path: Path, name: str) -> Iterator[Tensor]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                raise RecordingError(
                    f"{path}: {member.filename} is no .npy", asked=str(path), hint="write it with np.savez"
                )
            key = member.filename.removesuffix(".npy")
            with archive.open(member) as stream:
                dtype, shape = _npy_dtype_and_shape(stream, f"{path}:{key}")
            yield Tensor(key, path, dtype, shape, member.file_size, key)


def _safetensors_headers(path: Path, name: str) -> Iterator[Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        for key in file.keys():  # noqa: SIM118  # safe_open is no mapping: it cannot be iterated
            view = file.get_slice(key)
            named = _SAFETENSORS.get(view.get_dtype())
            if named is None:
                raise RecordingError(
                    f"{path}:{key} is {view.get_dtype()}, which cannot be read here",
                    asked=str(path),
                    hint="dump it as float32 or as an ONNX TensorProto (.pb)",
                )
            dtype, shape = numpy_dtype(named), tuple(view.get_shape())
            yield Tensor(key, path, dtype, shape, dtype.itemsize * int(np.prod(shape, dtype=np.int64)), key)


def _pb_header(path: Path, name: str) -> Iterator[Tensor]:
    from onnx import helper

    tensor = _tensor_proto(path)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    yield Tensor(tensor.name or name, path, dtype, tuple(tensor.dims), path.stat().st_size)


def _tensor_proto(path: Path) -> Any:
    import onnx

    tensor = onnx.TensorProto.FromString(path.read_bytes())
    if tensor.data_type == onnx.TensorProto.UNDEFINED:
        raise ValueError("no data type in it, so it is no ONNX TensorProto")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ValueError("its numbers lie in another file")
    return tensor


_HEADERS: dict[str, Callable[[Path, str], Iterator[Tensor]]] = {
    ".npy": _npy_header,
    ".npz": _npz_headers,
    ".pb": _pb_header,
    ".safetensors": _safetensors_headers,
    **dict.fromkeys(RAW, _raw_header),
}


# -- numbers -----------------------------------------------------------------------------------------------------------


def read(tensor: Tensor, dtype: np.dtype[Any], shape: Shape) -> Array:
    """The tensor's numbers in this machine's byte order; .npy and raw files are mapped, not copied.

    `dtype` and `shape` are what a raw file (little-endian) holds. Raises RecordingError.
    """
    ending = tensor.path.suffix.lower()
    with readable(tensor.path):
        if ending in RAW:
            array = _raw(tensor, dtype.newbyteorder("<"), shape)
        elif ending == ".npy":
            array = np.asarray(np.load(tensor.path, mmap_mode="r", allow_pickle=False))
        elif ending == ".npz":
            with zipfile.ZipFile(tensor.path) as archive, archive.open(f"{tensor.key}.npy") as stream:
                array = np.lib.format.read_array(stream, allow_pickle=False)
        elif ending == ".safetensors":
            from safetensors import safe_open

            with safe_open(tensor.path, framework="np") as file:
                array = file.get_tensor(tensor.key)
        else:
            from onnx import numpy_helper

            array = np.asarray(numpy_helper.to_array(_tensor_proto(tensor.path)))
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _raw(tensor: Tensor, dtype: np.dtype[Any], shape: Shape) -> Array:
    if tensor.size == 0:  # an empty file cannot be mapped
        return np.zeros(shape, dtype)
    return np.asarray(np.memmap(tensor.path, dtype, "r", shape=shape))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """A dtype by name, those of ml_dtypes (bfloat16, int4, ...) included. Raises TypeError for an unknown one."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found = getattr(ml_dtypes, name, None)
        if not isinstance(found, type):
            raise
        return np.dtype(found)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Translate what a foreign file makes its reader raise (OS, zip, protobuf, safetensors, numpy) into RecordingError."""
    try:
        yield
    except RecordingError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise RecordingError(
            f"{path} cannot be read: {reason or type(error).__name__}",
            asked=str(path),
            hint=f"is it a whole {path.suffix} file?" if path.suffix else "check its rights",
        ) from error
