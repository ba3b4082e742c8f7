"""TensorFlow Lite, driven through whichever Python package has it: ai-edge-litert, tflite-runtime or tensorflow.

This file travels: stdlib, numpy and one of those packages only, Python 3.8 clean.
"""

from __future__ import annotations

import importlib
import platform
import sys
from importlib import metadata
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

# (package as pip calls it, module with Interpreter in it), the first that can be imported
PACKAGES = (
    ("ai-edge-litert", "ai_edge_litert.interpreter"),
    ("tflite-runtime", "tflite_runtime.interpreter"),
    ("tensorflow", "tensorflow.lite.python.interpreter"),
)
RESOLVERS = {"reference": "BUILTIN_REF", "builtin": "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "xnnpack": "AUTO"}
Port = Tuple[str, str, List[int]]


def _found() -> Tuple[str, Any]:
    """(package, module). Raises ImportError that says why none of them can be imported."""
    reasons = []
    for package, module in PACKAGES:
        try:
            return package, importlib.import_module(module)
        except ImportError as error:
            reasons.append(f"{package}: {error}")
    raise ImportError(f"none of ai-edge-litert, tflite-runtime, tensorflow can be imported ({'; '.join(reasons)})")


class TfliteEngine:
    """One TFLite interpreter at a time: `load` a .tflite file's bytes, then `run` feeds."""

    name = "tflite"

    def __init__(self) -> None:
        self.package, self._module = _found()
        self._interpreter: Any = None
        self._delegates: List[Any] = []
        self._inputs: Dict[str, int] = {}
        self._outputs: Dict[str, int] = {}

    def info(self) -> Dict[str, Any]:
        """Package, version, machine."""
        try:
            version = metadata.version(self.package)
        except metadata.PackageNotFoundError:  # tensorflow-cpu, or a board whose image has no package records
            version = str(getattr(sys.modules[self._module.__name__.split(".")[0]], "__version__", "unknown"))
        return {"engine": self.package, "version": version, "machine": platform.machine()}

    def load(self, model: bytes, options: Mapping[str, Any]) -> Dict[str, Any]:
        """Make the interpreter for a .tflite file.

        `options`: `kernels` (a key of RESOLVERS), `threads`, `delegate` (path of a shared object) and `delegate_options`,
        `preserve` (keep all tensors readable), and `inputs` and `outputs`: {name: tensor index}, where the names are not to be
        those of the file. An output that is none of the file's needs `preserve`.

        Returns `inputs` and `outputs` as [(name, dtype, shape)], and `plan`: the operators as (name, inputs, outputs), those
        of the file first, then one for every partition that a delegate took.

        Raises what the package raises, and ValueError for an output that could only be read from stale memory.
        """
        self.close()
        module = self._module
        self._delegates = self._loaded(options)
        more = {"experimental_preserve_all_tensors": True} if options.get("preserve") else {}
        self._interpreter = module.Interpreter(
            model_content=model,
            experimental_delegates=self._delegates or None,
            num_threads=int(options.get("threads") or 1),
            experimental_op_resolver_type=getattr(module.OpResolverType, RESOLVERS[options.get("kernels", "xnnpack")]),
            **more,
        )
        self._interpreter.allocate_tensors()
        self._name_ports(options)
        details = {detail["index"]: detail for detail in self._interpreter.get_tensor_details()}
        return {
            "inputs": [_port(name, details[index]) for name, index in self._inputs.items()],
            "outputs": [_port(name, details[index]) for name, index in self._outputs.items()],
            "plan": [
                (str(op["op_name"]), [int(k) for k in op["inputs"]], [int(k) for k in op["outputs"]])
                for op in self._interpreter._get_ops_details()
            ],
        }

    def _loaded(self, options: Mapping[str, Any]) -> List[Any]:
        path = options.get("delegate")
        if not path:
            return []
        try:
            return [self._module.load_delegate(path, dict(options.get("delegate_options", {})))]
        except OSError as error:  # the loader's words: no such file, invalid ELF header
            raise ValueError(f"the delegate cannot be loaded: {error}") from error
        except AttributeError as error:
            raise ValueError(f"{path} is no TFLite delegate: {error}") from error
        except ValueError as error:  # it returned NULL
            raise ValueError(f"the delegate {path} refused: {error}") from error

    def _name_ports(self, options: Mapping[str, Any]) -> None:
        interpreter = self._interpreter
        own_inputs = {detail["name"]: int(detail["index"]) for detail in interpreter.get_input_details()}
        own_outputs = {detail["name"]: int(detail["index"]) for detail in interpreter.get_output_details()}
        self._inputs = dict(options.get("inputs") or own_inputs)
        self._outputs = dict(options.get("outputs") or own_outputs)
        kept = set(own_outputs.values()) | set(own_inputs.values())
        stale = [name for name, index in self._outputs.items() if index not in kept]
        if stale and not options.get("preserve"):
            raise ValueError(f"{stale[0]} is no output: what stands in its memory is not its value")

    def run(self, feeds: Mapping[str, Any], outputs: Optional[Sequence[str]] = None) -> Dict[str, Any]:
        """Run once; return `{output name: array}` for `outputs`, or for all of them; arrays of their own."""
        interpreter = self._interpreter
        for name, index in self._inputs.items():
            if name not in feeds:
                raise ValueError(f"no feed for input '{name}'")
            interpreter.set_tensor(index, np.ascontiguousarray(feeds[name]))
        interpreter.invoke()
        names = self._outputs if outputs is None else outputs
        return {name: np.array(interpreter.get_tensor(self._outputs[name])) for name in names}

    def close(self) -> None:
        """Free the interpreter, then its delegates: they must outlive it."""
        self._interpreter = None
        self._delegates = []


def _port(name: str, detail: Mapping[str, Any]) -> Port:
    return (name, np.dtype(detail["dtype"]).name, [int(size) for size in detail["shape"]])
