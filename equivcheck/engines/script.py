"""A user's own file as an engine: `def run(model_path, feeds): return {name: array}`.

This file travels: stdlib and numpy only, Python 3.8 clean.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sys
import tempfile
import traceback
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np


class ScriptError(Exception):
    """The user's file cannot be used, or failed; the text says where in it."""


class ScriptEngine:
    """Writes each model to a file of its own and calls the script's `run` with that path.

    `source` is the script's text and `name` its file name. `folder` is where it stands, if that is on this machine: what lies
    beside it can be imported.

    Raises ScriptError when the script cannot be imported, or defines no `run`.
    """

    name = "script"

    def __init__(self, source: bytes, name: str, folder: Optional[str] = None) -> None:
        self.file = name
        self.digest = hashlib.sha256(source).hexdigest()
        self._scratch = tempfile.mkdtemp(prefix="script-")
        self._model: Optional[str] = None
        self._outputs: List[str] = []
        path = os.path.join(folder or self._scratch, name)
        if folder is None:
            with open(path, "wb") as file:
                file.write(source)
        sys.path.insert(0, os.path.dirname(path))
        self._module = self._imported(source, path)
        if not callable(getattr(self._module, "run", None)):
            raise ScriptError(f"{name} defines no function run(model_path, feeds)")

    def _imported(self, source: bytes, path: str) -> Any:
        """The module of exactly this source: an import would take one of the same size and second from Python's cache."""
        spec = importlib.util.spec_from_file_location("equivcheck_script", path)
        if spec is None:
            raise ScriptError(f"{self.file} is no Python file (its name must end in .py)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        except (Exception, SystemExit) as error:
            raise ScriptError(_last_lines(error, path)) from error
        return module

    def info(self) -> Dict[str, Any]:
        """The script's name; its `__version__`, or else the start of its sha256; the machine; its `LEGAL_EXCESS`.

        Raises ScriptError when LEGAL_EXCESS is not `{op_type: (limit in LSB, "reason")}`.
        """
        version = getattr(self._module, "__version__", None) or "sha256 " + self.digest[:12]
        declared = _legal_excess(self.file, getattr(self._module, "LEGAL_EXCESS", {}))
        about = {"engine": self.file, "version": str(version), "machine": platform.machine()}
        return {**about, "legal_excess": declared}

    def load(self, model: bytes, options: Mapping[str, Any]) -> Dict[str, List[Tuple[str, str, List[Any]]]]:
        """Write `model` to a file in place of the one before. `options["outputs"]` are its outputs, in order.

        Every model has its own path, so that a script may keep what it compiled by path.
        """
        if self._model is not None:
            os.unlink(self._model)
            self._model = None
        path = os.path.join(self._scratch, hashlib.sha256(model).hexdigest()[:16] + ".onnx")
        self._model = path
        with open(path, "wb") as file:
            file.write(model)
        self._outputs = list(options["outputs"])
        return {"inputs": [], "outputs": [(name, "", []) for name in self._outputs]}

    def run(self, feeds: Mapping[str, Any], outputs: Optional[List[str]] = None) -> Dict[str, Any]:
        """Call the script; return those of the model's outputs that it gave. It may write to the arrays it gets.

        Raises ScriptError when it raises, or returns something else than arrays by name or in order.
        """
        try:
            returned = self._module.run(self._model, {name: np.array(array) for name, array in feeds.items()})
            named = self._named(returned)
        except ScriptError:
            raise
        except (Exception, SystemExit) as error:
            raise ScriptError(_last_lines(error, self._module.__file__)) from error
        return {name: array for name, array in named.items() if outputs is None or name in outputs}

    def _named(self, returned: Any) -> Dict[str, Any]:
        wanted = ", ".join(self._outputs)
        if isinstance(returned, (list, tuple)):
            if len(returned) != len(self._outputs):
                raise ScriptError(f"run() returned {len(returned)} arrays for outputs {wanted}")
            returned = dict(zip(self._outputs, returned))
        if not isinstance(returned, Mapping):
            what = type(returned).__name__
            raise ScriptError(f"run() returned a {what}: return {{name: array}}, or a list in the order of the outputs")
        found = {name: _array(name, returned[name]) for name in self._outputs if name in returned}
        if not found:
            names = ", ".join(map(str, returned)) or "nothing"
            raise ScriptError(f"run() returned {names}; the model's outputs are {wanted}")
        return found


def _legal_excess(file: str, given: Any) -> Dict[str, Tuple[float, str]]:
    """Check what the script declares: the reason is printed wherever the limit is used, so there must be one."""
    shape = 'LEGAL_EXCESS must be {op_type: (limit in LSB, "reason")}, as in {"Softmax": (1.0, "rounds down")}'
    if not isinstance(given, Mapping):
        raise ScriptError(f"{file}: {shape}")
    found = {}
    for op_type, entry in given.items():
        pair = entry if isinstance(entry, (tuple, list)) and len(entry) == 2 else (None, None)
        limit, reason = pair
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool) and 0 <= limit < float("inf")
        if not isinstance(op_type, str) or not number or not isinstance(reason, str) or not reason.strip():
            raise ScriptError(f"{file}: {shape}; got {op_type!r}: {entry!r}")
        found[op_type] = (float(limit), reason)  # type: ignore[arg-type]  # `number` has looked
    return found


def _array(name: str, value: Any) -> Any:
    """A numpy array, or what becomes one without loss (a tensor of another framework)."""
    array = np.asarray(value) if hasattr(value, "__array__") else None
    if array is None or array.dtype.kind not in "biuf":
        what = type(value).__name__ if array is None else f"{array.dtype} array"
        raise ScriptError(f"run() returned a {what} for '{name}', not an array of numbers")
    return array


def _last_lines(error: BaseException, path: str) -> str:
    """What the traceback ends with, and the last line of the script itself that led there."""
    said = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if not own:
        return f"{os.path.basename(path)}: {said}"
    last = own[-1]
    return f"{os.path.basename(path)}, line {last.lineno}, in {last.name}: {last.line}: {said}"
