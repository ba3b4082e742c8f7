"""What a worker on this machine costs: one sample of a model with 100 MB of values, recorded in process and in a worker.

    python tests/bench/worker.py [--runs N] [--python PATH]

Prints, for a whole recorded run (the job) and for the engine alone with all values as outputs (the bare carrying), the
median of N alternating runs and the ratio; exits 1 where that of the job is above 1.3.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import onnx

from builder import Qdq, feeds
from equivcheck.backends.registry import backend
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from vnpu import medians_ms

LIMIT = 1.3
CONVOLUTIONS = 24
SHAPE = (1, 16, 512, 512)  # 4 MiB of codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    chosen = parser.parse_args()
    model = chain()
    given = feeds(model.proto)
    here, there = backend("ort"), backend(f"ort@python={chosen.python}")
    with here.open(model) as near, there.open(model) as far:
        megabytes = sum(array.nbytes for array in far.run("warm", given).values.values()) / 1e6
        job = medians_ms(chosen.runs, partial(near.run, "one", given), partial(far.run, "one", given))
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model.proto)
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in model.graph.stored)
    engines = [here.deploy(tapped), there.deploy(tapped)]
    bare = medians_ms(chosen.runs, *(partial(run, given) for run in engines))
    for what, (inside, outside) in (("recorded run", job), ("engine alone", bare)):
        ratio = outside / inside
        print(f"{what}, {megabytes:.0f} MB: in process {inside:6.0f} ms  worker {outside:6.0f} ms  ratio {ratio:.2f}")
    return 1 if job[1] / job[0] > LIMIT else 0


def chain() -> OnnxModel:
    """Convolutions of 16 channels, each with its Relu and Q: what an int8 network mostly is."""
    m = Qdq(dtype="uint8", seed=1)
    y = m.dq(m.q(m.input("x", SHAPE), 0.025, 128))
    for _ in range(CONVOLUTIONS):
        y = m.dq(m.q(m.op("Relu", [m.conv(y, SHAPE[1])]), 0.05, 0))
    return model_from_bytes(m.model(y).SerializeToString(), "chain.onnx")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
