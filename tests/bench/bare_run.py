"""Replays the engine calls that a comparison made, and nothing else: the floor under what `equivcheck diff` can cost.

    python tests/bench/bare_run.py FOLDER [--defaults]

FOLDER holds `calls.json`, the serialised models and the feeds that `diff.py` recorded. Sessions are created and run with
the same options in the same order, and every output of every run is read once (its maximum). It imports numpy and
onnxruntime only; the models are ready on disk, so no model is parsed, cut or serialised in Python. `--defaults` leaves
ONNX Runtime's memory arena and spinning threads on, as in a script that sets nothing; without, they are off, as equivcheck
has them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

DEFAULTS = "--defaults" in sys.argv[2:]
LEVELS = {
    "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def replay(folder: Path) -> float:
    """Make every recorded call; return a number that depends on everything read."""
    sessions: dict[int, ort.InferenceSession] = {}
    seen = 0.0
    for call in json.loads((folder / "calls.json").read_text()):
        if call["do"] == "optimise":
            with tempfile.TemporaryDirectory() as scratch:
                written = Path(scratch) / "optimised.onnx"
                session(folder / call["model"], call["options"], written)
                seen += len(written.read_bytes())
        elif call["do"] == "load":
            sessions[call["engine"]] = session(folder / call["model"], call["options"])
        else:
            feeds = arrays(folder / call["feeds"], call["ports"])
            outputs = sessions[call["engine"]].run(None, feeds)
            seen += sum(float(np.max(array, initial=0)) for array in outputs)
    return seen


def session(model: Path, options: dict[str, Any], written: Path | None = None) -> ort.InferenceSession:
    chosen = ort.SessionOptions()
    chosen.log_severity_level = 4
    if not DEFAULTS:
        chosen.enable_cpu_mem_arena = False
        chosen.add_session_config_entry("session.intra_op.allow_spinning", "0")
    chosen.graph_optimization_level = LEVELS[options.get("optimization", "all")]
    if options.get("threads"):
        chosen.intra_op_num_threads = options["threads"]
    for key, value in options.get("config", {}).items():
        chosen.add_session_config_entry(key, value)
    if written is not None:
        chosen.optimized_model_filepath = str(written)
    disabled = options.get("disabled_optimizers")
    more = {"disabled_optimizers": disabled} if disabled else {}
    return ort.InferenceSession(model.read_bytes(), chosen, providers=["CPUExecutionProvider"], **more)


def arrays(file: Path, ports: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Feeds that lie one after the other in one file, as views of it."""
    content = file.read_bytes()
    return {
        port["name"]: np.frombuffer(content, port["dtype"], port["size"], port["at"]).reshape(port["shape"])
        for port in ports
    }


if __name__ == "__main__":
    print(replay(Path(sys.argv[1])))
