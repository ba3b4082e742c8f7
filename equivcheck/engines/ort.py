"""ONNX Runtime, driven through its Python package. This file travels: stdlib, numpy and onnxruntime only, Python 3.8 clean."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import tempfile
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import onnxruntime as ort

LEVELS = {
    "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# x86 flags with a fused u8*s8 dot product in 32 bits; without one MLAS adds pairs in 16 bits, which saturate.
VNNI_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8")
Port = Tuple[str, str, List[Any]]


class OrtEngine:
    """One ONNX Runtime session at a time: `load` a serialised model, then `run` feeds."""

    name = "ort"

    def __init__(self) -> None:
        self._session: Any = None

    def info(self) -> Dict[str, Any]:
        """Engine name, version, execution providers, and which int8 path this CPU gives it."""
        return {
            "engine": "onnxruntime",
            "version": ort.__version__,
            "providers": list(ort.get_available_providers()),
            "machine": platform.machine(),
            "int8_path": int8_path(),
        }

    def optimise(self, model: bytes, options: Mapping[str, Any]) -> bytes:
        """Return the graph as ORT would run it at `options["optimization"]`, serialised.

        Raises whatever ORT raises for a model it cannot load, and OSError where the disk is full.
        """
        with tempfile.TemporaryDirectory(prefix="equivcheck-") as scratch:
            if shutil.disk_usage(scratch).free < len(model):  # onnxruntime would say "Protobuf serialization failed"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), scratch)
            path = os.path.join(scratch, "optimised.onnx")
            session_options = _session_options(options)
            session_options.optimized_model_filepath = path
            _session(model, session_options, options)
            with open(path, "rb") as file:
                return file.read()

    def load(self, model: Union[bytes, str], options: Mapping[str, Any]) -> Dict[str, List[Port]]:
        """Create the session from a serialised model, or from a path where it has external data.

        Returns `{"inputs": [(name, type, shape)], "outputs": [...]}`.
        """
        self._session = None
        self._session = _session(model, _session_options(options), options)
        return {
            "inputs": [(port.name, port.type, list(port.shape)) for port in self._session.get_inputs()],
            "outputs": [(port.name, port.type, list(port.shape or [])) for port in self._session.get_outputs()],
        }

    def run(self, feeds: Mapping[str, Any], outputs: Optional[Sequence[str]] = None) -> Dict[str, Any]:
        """Run once; return `{output name: array}` for `outputs`, or for all of them."""
        names = list(outputs) if outputs is not None else [port.name for port in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, dict(feeds))))

    def close(self) -> None:
        """Free the session."""
        self._session = None


def int8_path() -> str:
    """How u8*s8 products are summed on this CPU: "vnni", "pair-sums" (they can saturate at 16 bits) or "other"."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "other"
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return "other"
    return "vnni" if any(flag in flags for flag in VNNI_FLAGS) else "pair-sums"


def _session_options(options: Mapping[str, Any]) -> Any:
    chosen = ort.SessionOptions()
    chosen.log_severity_level = 4
    # Same numbers, less of the machine: waiting threads would spin (a third of the CPU seconds of a diff on 2 cores), and each
    # session would keep an arena as large as its run (95 MB of the 340 MB that a diff's engine calls need).
    chosen.add_session_config_entry("session.intra_op.allow_spinning", "0")
    chosen.enable_cpu_mem_arena = False
    chosen.graph_optimization_level = LEVELS[str(options.get("optimization", "all"))]
    if options.get("threads"):
        chosen.intra_op_num_threads = int(options["threads"])
    for key, value in dict(options.get("config", {})).items():
        chosen.add_session_config_entry(key, str(value))
    return chosen


def _session(model: Union[bytes, str], session_options: Any, options: Mapping[str, Any]) -> Any:
    disabled = list(options.get("disabled_optimizers", ()))
    provider = str(options.get("provider", "CPUExecutionProvider"))
    providers = [provider] if provider == "CPUExecutionProvider" else [provider, "CPUExecutionProvider"]
    more = {"disabled_optimizers": disabled} if disabled else {}
    return ort.InferenceSession(model, session_options, providers=providers, **more)
