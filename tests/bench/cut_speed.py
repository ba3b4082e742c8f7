"""How long cutting takes, and how much memory: a long chain, many diamonds, a part of a model with 2.25 GB of weights.

    python tests/bench/cut_speed.py [--only chain|diamonds|external]

Each runs in a process of its own; the seconds leave imports out, the memory is the peak of the whole process.
The weights are a sparse file in a temporary folder: it needs few blocks on disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import onnx
from onnx import TensorProto, helper

from equivcheck.models.onnx.cut import part
from equivcheck.models.onnx.load import load_model
from equivcheck.parts import split, write

Measured = dict[str, float]
BLOCK, TENSORS = 3 << 20, 192  # floats of a weight (12 MB), and how many of them: 2.25 GB
ROWS = 1024


def timed(work: Callable[[], object]) -> Measured:
    started = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - started, "megabytes": _peak()}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def chain(folder: Path) -> dict[str, Measured]:
    nodes = [helper.make_node("Relu", [f"v{k}"], [f"v{k + 1}"], name=f"n{k}") for k in range(3000)]
    path = _saved(nodes, "v0", "v3000", folder)
    return {"3000 nodes, cut in the middle": timed(lambda: split(load_model(path), "n1500", prove=False))}


def diamonds(folder: Path) -> dict[str, Measured]:
    nodes = []
    for k in range(48):
        nodes += [
            helper.make_node("Sigmoid", [f"v{k}"], [f"l{k}"]),
            helper.make_node("Neg", [f"v{k}"], [f"r{k}"]),
            helper.make_node("Add", [f"l{k}", f"r{k}"], [f"v{k + 1}"], name=f"join{k}"),
        ]
    path = _saved(nodes, "v0", "v48", folder)
    return {"48 diamonds, cut at every join": timed(lambda: split(load_model(path), "Add", prove=False))}


def _saved(nodes: list[onnx.NodeProto], source: str, end: str, folder: Path) -> Path:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in (source, end)]
    graph = helper.make_graph(nodes, "graph", ports[:1], ports[1:])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def big_model(folder: Path, tensors: int = TENSORS) -> Path:
    """Gather from one weight after the other, 12 MB each, all in one sparse file."""
    nodes, weights = [], []
    for k in range(tensors):
        tensor = TensorProto(
            name=f"w{k}", data_type=TensorProto.FLOAT, dims=[ROWS, BLOCK // ROWS], data_location=TensorProto.EXTERNAL
        )
        for key, value in (("location", "weights.bin"), ("offset", k * BLOCK * 4), ("length", BLOCK * 4)):
            tensor.external_data.add(key=key, value=str(value))
        weights.append(tensor)
        nodes.append(helper.make_node("Gather", [f"w{k}", f"i{k}"], [f"row{k}"], name=f"gather{k}"))
        nodes.append(helper.make_node("ArgMax", [f"row{k}"], [f"i{k + 1}"], axis=1, keepdims=0))
    ports = [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in ("i0", f"i{tensors}")]
    graph = helper.make_graph(nodes, "big", ports[:1], ports[1:], weights)
    path = folder / "model.onnx"
    path.write_bytes(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    )
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(tensors * BLOCK * 4)
        for k in range(tensors):  # something to read in each: the holes are between
            file.seek(k * BLOCK * 4 + 4 * k)
            file.write(b"\x00\x00\x80\x3f" * 64)
    return path


def external(folder: Path) -> dict[str, Measured]:
    path = big_model(folder)
    found = {}

    def api() -> None:
        model = load_model(path)
        part(model.proto, inputs=dict.fromkeys(model.graph.inputs), outputs=["i12"])

    def both() -> None:
        model = load_model(path)
        write(model, split(model, "gather12"), folder / "parts")

    found["2.25 GB, the part alone"] = timed(api)
    found["2.25 GB, head (6 %) and tail written"] = timed(both)
    head = folder / "parts" / "001_Gather" / "head-weights.bin"
    found["bytes of the head's weights on disk / named"] = {
        "seconds": 0.0,
        "megabytes": head.stat().st_blocks * 512 / 2**20,
        "named": head.stat().st_size / 2**20,
    }
    return found


WHAT = {"chain": chain, "diamonds": diamonds, "external": external}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=WHAT)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        with tempfile.TemporaryDirectory(prefix="equivcheck-bench-") as folder:
            print(json.dumps(WHAT[arguments.only](Path(folder))))
        return 0
    for name in [arguments.only] if arguments.only else WHAT:
        ran = subprocess.run(
            [sys.executable, __file__, "--here", "--only", name], check=True, capture_output=True, text=True
        )
        for what, measured in json.loads(ran.stdout).items():
            size = f"  of {measured['named']:7.1f} MB" if "named" in measured else ""
            print(f"{what:45} {measured['seconds']:6.2f} s  {measured['megabytes']:7.2f} MB{size}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
