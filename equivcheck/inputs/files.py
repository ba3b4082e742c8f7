"""Paths to arrays: find what an argument means on disk, and read .npy, .npz, TensorProto .pb and raw files."""

from __future__ import annotations

import glob
import math
import zipfile
import zlib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from equivcheck.errors import InputError, near
from equivcheck.inputs.sample import Array, InputSpec, Notes, known

RAW = (".raw", ".bin")
ARRAYS = (".npy", ".npz", ".pb", *RAW)
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, MemoryError, NotImplementedError, RuntimeError, zlib.error)


def suffix(path: str) -> str:
    """The lower-case ending that decides how a file is read."""
    return Path(path).suffix.lower()


def real(text: str) -> Path:
    """The path that the user's text means; `~` is expanded here, since the shell leaves that of `NAME=~/x` alone."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~nobody
        return Path(text)


def is_file(text: str) -> bool:
    """Whether there is such a file; False also for text that can be no path (an inline recipe of 300 characters)."""
    try:
        return real(text).is_file()
    except (OSError, ValueError):
        return False


def exists(text: str) -> bool:
    """Whether an argument leads to anything on disk: a file, a folder, or a glob that matches."""
    try:
        return bool(text) and (real(text).exists() or bool(_matches(text)))
    except (OSError, ValueError):
        return False


def find(text: str, notes: Notes) -> list[str]:
    """The files that a file, a folder or a glob stands for, sorted. Raises InputError when there are none."""
    if not text:
        raise InputError("an input without a path", asked=text, hint="-i FILE or -i NAME=FILE")
    if not exists(text):
        raise missing(text)
    if real(text).is_dir():
        return _in_folder(text, notes)
    return [text] if real(text).exists() else _matches(text)


def missing(text: str) -> InputError:
    """The error for a path that does not exist, with near names from its folder."""
    folder = real(text).parent
    if glob.has_magic(text):
        return InputError(f"no file matches {text}", asked=text, hint="quote a glob so that the shell leaves it alone")
    if not exists(str(folder)):
        return InputError(f"no file {text}: there is no folder {folder}", asked=text, hint="check the path")
    hint = "-i takes a file, a folder, a glob or random:SEED"
    return InputError(f"no file {text}", asked=text, nearest=neighbours(text), hint=hint)


def neighbours(path: str) -> list[str]:
    """Names that look like `path`'s in the same folder, each with that folder in front."""
    folder = Path(path).parent
    try:
        names = sorted(entry.name for entry in islice(real(str(folder)).iterdir(), 5000))
    except (OSError, ValueError):
        return []
    return [str(folder / hit) for hit in near(Path(path).name, names)]


def _matches(text: str) -> list[str]:
    if not glob.has_magic(text):
        return []
    hits = glob.glob(str(real(text)), recursive=True)  # noqa: PTH207  # Path.glob takes no absolute pattern
    return sorted(hit for hit in hits if is_file(hit))


def _in_folder(text: str, notes: Notes) -> list[str]:
    try:
        names = sorted(entry.name for entry in real(text).iterdir() if not entry.name.startswith("."))
    except OSError as error:
        message = f"folder {text} cannot be read: {error.strerror}"
        raise InputError(message, asked=text, hint="check its rights") from error
    files = [name for name in names if is_file(str(Path(text) / name))]
    pictures = picture_suffixes() if files else frozenset()
    usable = [name for name in files if suffix(name) in ARRAYS or suffix(name) in pictures]
    if not usable:
        found = f"{len(names)} entries, such as {names[0]}" if names else "nothing"
        message = f"folder {text} holds no picture, .npy, .npz, .pb or .raw (found: {found})"
        hint = f"a glob reaches deeper: -i '{Path(text) / '**/*.jpg'}'"
        raise InputError(message, asked=text, found=found, hint=hint)
    left_out = [name for name in names if name not in set(usable)]
    if left_out:
        notes.add(f"folder {text}: {len(left_out)} entries left out, such as {left_out[0]}")
    return [str(Path(text) / name) for name in usable]


def picture_suffixes() -> frozenset[str]:
    """Endings that Pillow can open."""
    from PIL import Image

    return frozenset(ending for ending, name in Image.registered_extensions().items() if name in Image.OPEN)


def read_array(path: str, spec: InputSpec) -> Array:
    """The array in a .npy, .pb or raw file; a raw one takes dtype and shape from `spec`. Raises InputError."""
    ending = suffix(path)
    if ending == ".npz":
        return _one_of_npz(path, spec)
    if ending == ".pb":
        return _read_tensor_proto(path)
    return _read_npy(path) if ending == ".npy" else _read_raw(path, spec)


def read_npz(path: str) -> dict[str, Array]:
    """All arrays of a .npz by key. Raises InputError."""
    arrays: dict[str, Array] = {}
    try:
        with real(path).open("rb") as content:  # first, for its reason: np.load calls every other file a pickle
            if not zipfile.is_zipfile(content):
                raise InputError(f"{path} is no .npz (a zip of .npy files)", asked=path, hint="write it with np.savez")
        with np.load(real(path), allow_pickle=False) as file:
            for key in file.files:
                value = file[key]
                if not isinstance(value, np.ndarray):
                    raise InputError(f"{path}: {key} is no .npy", asked=path, hint="write it with np.savez")
                arrays[key] = value
    except (*_UNREADABLE, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from error
    return arrays


def _one_of_npz(path: str, spec: InputSpec) -> Array:
    arrays = read_npz(path)
    if spec.name in arrays:
        return arrays[spec.name]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    message = f"{path} has no key {spec.name!r} (found: {', '.join(arrays) or 'nothing'})"
    hint = f"-i {spec.name}=FILE.npz takes its only array, or the one of that key"
    raise InputError(message, asked=spec.name, found=", ".join(arrays), nearest=near(spec.name, arrays), hint=hint)


def _read_npy(path: str) -> Array:
    try:
        with real(path).open("rb") as file:
            # not np.load: it calls every file without the magic string a pickle
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    return array


def _read_tensor_proto(path: str) -> Array:
    import onnx
    from onnx import numpy_helper

    try:
        with real(path).open("rb") as file:
            tensor = onnx.TensorProto.FromString(file.read())
        if tensor.data_type == onnx.TensorProto.UNDEFINED:
            raise ValueError("no data type in it")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ValueError("its data is in another file")
        return np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:  # protobuf's own DecodeError among them, and whatever to_array meets in a foreign file
        message = f"{path} is no readable ONNX TensorProto: {_one_line(error)}"
        raise InputError(message, asked=path, hint="write it with onnx.numpy_helper.from_array, or use .npy") from error


def _read_raw(path: str, spec: InputSpec) -> Array:
    dtype = numpy_dtype(spec)
    try:
        with real(path).open("rb") as file:
            content = file.read()
    except (OSError, MemoryError) as error:
        raise _unreadable(path, error) from error
    unknown = [axis for axis, dim in enumerate(spec.shape) if not known(dim)]
    row = math.prod(dim for dim in spec.shape if isinstance(dim, int) and dim >= 0) * dtype.itemsize
    shape = [dim if isinstance(dim, int) and dim >= 0 else 0 for dim in spec.shape]
    if len(unknown) == 1 and row and len(content) % row == 0:
        shape[unknown[0]] = len(content) // row
    elif unknown or len(content) != row:
        what = f"{'a multiple of ' if unknown else ''}{row} bytes"
        message = f"{path} has {len(content)} bytes; input {spec} needs {what}"
        hint = "a raw file holds the elements and nothing else; a .npy says its own shape (np.save)"
        raise InputError(message, asked=path, found=f"{len(content)} bytes", hint=hint)
    return np.frombuffer(content, dtype=dtype.newbyteorder("<")).reshape(shape)


def numpy_dtype(spec: InputSpec) -> np.dtype[Any]:
    """The spec's dtype. Raises InputError for one that plain numpy does not have (bfloat16, strings)."""
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biuf":
        message = f"input {spec.name} is {spec.dtype}, which can be neither raw nor random here"
        raise InputError(message, asked=spec.dtype, hint=f"give it as an ONNX TensorProto: -i {spec.name}=FILE.pb")
    return dtype


def _unreadable(path: str, error: BaseException) -> InputError:
    if "allow_pickle" in str(error) or "Object arrays" in str(error):
        message = f"{path} holds Python objects (a pickle), which can run code when loaded: refused"
        return InputError(message, asked=path, hint="save plain numbers: np.save(path, np.asarray(values, dtype=...))")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _one_line(error)
    hint = f"is it a whole {suffix(path)} file?"
    return InputError(f"{path} cannot be read: {reason}", asked=path, hint=hint)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
