"""Qualcomm's NPU through ONNX Runtime's plugin. This file travels: stdlib, numpy and onnxruntime only, Python 3.8 clean.

Beside an NPU the plugin's library prints and may abort: this engine belongs into a process of its own. It is driven as its
documentation has it (https://onnxruntime.ai/docs/execution-providers/QNN-ExecutionProvider.html); what it cannot run it leaves
to the CPU without an error, so `load` also returns where each node went, and the engine's own words about that.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import tempfile
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import onnxruntime as ort
import onnxruntime_qnn as qnn

# What the plugin logs of a group of nodes that stays on the CPU (qnn_execution_provider.cc, LogNodeSupport).
_REFUSED = re.compile(
    r"Validation FAILED for \d+ nodes in \w+ \((?P<op>\w+)\) :\n(?P<nodes>.*?)\tREASON : (?P<why>[^\n]*)", re.S
)
_NODE = re.compile(r"\tOperator type: \S+ Node name: (.*?) Node index: \d+\n")
_TROUBLE = re.compile(r"\[[WEF]:[^\]]*?\b(\w+\.cc:\d+) \w+\] (.+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_VERBOSE, _SILENT = 0, 4
_DECISIVE = ("arch", "soc", "library")


class QnnEngine:
    """Sessions on the first device of the plugin: `load` a serialised model, then `run` feeds through that one."""

    name = "qnn"

    def __init__(self) -> None:
        self._session: Any = None
        self._loaded: Dict[str, Tuple[Any, Dict[str, Any]]] = {}
        registered = qnn.get_ep_name()
        ort.register_execution_provider_library(registered, qnn.get_library_path())
        devices = [device for device in ort.get_ep_devices() if device.ep_name == registered]
        if not devices:
            raise RuntimeError(f"onnxruntime-qnn {qnn.__version__} finds no device here")
        npus = [device for device in devices if device.device.type.name == "NPU"]
        self._device = (npus or devices)[0]
        self._emulated = not npus and platform.machine() in ("x86_64", "AMD64")

    def info(self) -> Dict[str, Any]:
        """Engine name, version, the onnxruntime under it, and whether there is an NPU or Qualcomm's emulator of one."""
        return {
            "engine": "onnxruntime-qnn",
            "version": qnn.__version__,
            "runtime": ort.__version__,
            "machine": platform.machine(),
            "device": "HTP emulated on the CPU"
            if self._emulated
            else f"{self._device.device.vendor} {self._device.device.type.name}",
        }

    def load(self, model: bytes, options: Mapping[str, Any]) -> Dict[str, Any]:
        """Create the session from a serialised model, or take up one of this engine that was. `options`: arch, soc,
        library, threads, context (a folder), or None.

        Returns inputs and outputs; `npu`, the node names of each group that went to the NPU; `cpu`, the other names;
        `refused`: (op_type, node names, reason) of what the plugin would not take; `trouble`: its warnings and errors.
        Raises whatever onnxruntime raises.
        """
        key = self._key(model, options)
        if key not in self._loaded:
            self._loaded[key] = self._restored(key, options) or self._created(key, model, options)
        self._session, known = self._loaded[key]
        return {
            **known,
            "inputs": [(port.name, port.type, list(port.shape)) for port in self._session.get_inputs()],
            "outputs": [(port.name, port.type, list(port.shape or [])) for port in self._session.get_outputs()],
        }

    def run(self, feeds: Mapping[str, Any], outputs: Optional[Sequence[str]] = None) -> Dict[str, Any]:
        """Run once; return `{output name: array}` for `outputs`, or for all of them."""
        names = list(outputs) if outputs is not None else [port.name for port in self._session.get_outputs()]
        quiet = ort.RunOptions()
        quiet.log_severity_level = _SILENT
        return dict(zip(names, self._session.run(names, dict(feeds), quiet)))

    def close(self) -> None:
        """Free all sessions."""
        self._session = None
        self._loaded.clear()

    # -- creating ------------------------------------------------------------------------------------------------------

    def _key(self, model: bytes, options: Mapping[str, Any]) -> str:
        """A name that says all that the compiled form of `model` depends on."""
        depends = [qnn.__version__, ort.__version__, *(f"{key}={options.get(key)}" for key in _DECISIVE)]
        return hashlib.sha256("\n".join(depends).encode() + model).hexdigest()[:24]

    def _restored(self, key: str, options: Mapping[str, Any]) -> Optional[Tuple[Any, Dict[str, Any]]]:
        """The session that was compiled before, and what was known of it; None where the folder does not hold it whole."""
        compiled = _compiled(key, options)
        if compiled is None or not os.path.exists(compiled):
            return None
        try:
            with open(compiled + ".json", encoding="utf-8") as file:
                known = dict(json.load(file))
        except (OSError, ValueError):
            return None
        return ort.InferenceSession(compiled, sess_options=self._session_options(options, _SILENT)), known

    def _created(self, key: str, model: bytes, options: Mapping[str, Any]) -> Tuple[Any, Dict[str, Any]]:
        chosen = self._session_options(options, _VERBOSE)
        compiled = _compiled(key, options)
        if compiled is not None:
            os.makedirs(os.path.dirname(compiled), exist_ok=True)
            chosen.add_session_config_entry("ep.context_enable", "1")
            chosen.add_session_config_entry("ep.context_embed_mode", "1")
            chosen.add_session_config_entry("ep.context_file_path", compiled)
        with _Log() as log:
            session = ort.InferenceSession(model, sess_options=chosen)
        known = {**self._placement(session), **_said(log.text)}
        if compiled is not None and os.path.exists(compiled):
            with open(compiled + ".json", "w", encoding="utf-8") as file:
                json.dump(known, file)
        return session, known

    def _session_options(self, options: Mapping[str, Any], severity: int) -> Any:
        chosen = ort.SessionOptions()
        chosen.log_severity_level = severity
        chosen.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if options.get("threads"):
            chosen.intra_op_num_threads = int(options["threads"])
        provider = {
            "backend_path": options.get("library") or qnn.get_qnn_htp_path(),
            "offload_graph_io_quantization": "1",
            "htp_arch": options.get("arch"),
            "soc_model": options.get("soc"),
        }
        chosen.add_provider_for_devices([self._device], {key: text for key, text in provider.items() if text})
        return chosen

    def _placement(self, session: Any) -> Dict[str, List[Any]]:
        npu: List[List[str]] = []
        cpu: List[str] = []
        for group in session.get_provider_graph_assignment_info():
            names = [node.name for node in group.get_nodes()]
            if group.ep_name == self._device.ep_name:
                npu.append(names)
            else:
                cpu += names
        return {"npu": npu, "cpu": cpu}


def _compiled(key: str, options: Mapping[str, Any]) -> Optional[str]:
    """Where the compiled form is kept, or None without a folder for it."""
    folder = options.get("context")
    return os.path.join(os.path.abspath(folder), key + ".onnx") if folder else None


class _Log:
    """What native code writes to standard error meanwhile; it is passed on too, as the last words of one that dies."""

    def __enter__(self) -> _Log:
        self.text = ""
        self._file = tempfile.NamedTemporaryFile(prefix="equivcheck-", suffix=".log")
        self._kept = os.dup(2)
        self._tee = subprocess.Popen(["tee", self._file.name], stdin=subprocess.PIPE, stdout=self._kept)
        assert self._tee.stdin is not None
        os.dup2(self._tee.stdin.fileno(), 2)
        self._tee.stdin.close()
        return self

    def __exit__(self, *_: Any) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
        self._tee.wait()
        with self._file as file:
            self.text = _COLOURS.sub("", file.read().decode(errors="replace"))


def _said(log: str) -> Dict[str, List[Any]]:
    """The plugin's own words: groups of nodes that it refused, and its warnings and errors."""
    refused: Dict[Tuple[str, ...], Tuple[str, List[str], str]] = {}
    for found in _REFUSED.finditer(log):
        names = _NODE.findall(found["nodes"])
        refused[tuple(names)] = (found["op"], names, found["why"].strip())
    trouble = [f"{where}: {what.strip()}" for where, what in _TROUBLE.findall(log)]
    return {"refused": list(refused.values()), "trouble": list(dict.fromkeys(trouble))}
