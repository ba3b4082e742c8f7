"""Anonymous memory of `equivcheck compare` on two large recordings: the values stay in mapped files.

    python tests/bench/recordings_memory.py [--gigabytes 4] [--folder DIR]

Writes two recordings of that size each (several samples; int8 and float32 tensors, some of several hundred MB, few
differences), compares them without a model in a child process, and prints the largest RssAnon that /proc showed while
it ran, beside the size of the recordings. Exits 1 above 400 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from equivcheck.recording import Parameters, Recording, Writer
from equivcheck.result import FeedInfo, Model, Observation, SampleInfo, Side, from_json

LIMIT_MB = 400
SAMPLES = 4
MODEL = Model(path="large.onnx", sha256="0" * 64, format="onnx", ir_version=8, opsets={"": 17}, nodes=4)
SIDE = Side(
    spec="made", engine="made", version="0", device="disk", model_sha256="0" * 64,
    observation=Observation(method="made"),
)  # fmt: skip


def write(folder: Path, gigabytes: float, seed: int) -> int:
    """A recording of about `gigabytes`; returns its size in bytes. `seed` decides which few elements differ."""
    writer = Writer(folder, model=MODEL, spec="made", versions={})
    elements = int(gigabytes * 2**30 / SAMPLES / (1 + 1 + 4))
    rng = np.random.default_rng(7)
    for number in range(SAMPLES):
        few = np.random.default_rng([seed, number])
        codes = rng.integers(-128, 128, (1, 64, elements // 64), np.int8)
        grid = rng.integers(-128, 128, elements, np.int8)
        reals = rng.standard_normal((1, 64, elements // 64), np.float32)
        for array in (codes, grid, reals):
            array.reshape(-1)[few.integers(0, array.size, 1000)] = few.integers(-3, 4)
        values = {"codes": codes, "grid": grid, "reals": reals}
        recording = Recording(
            f"s{number}", values, dict.fromkeys(values, "made"), {},
            quantisation={"grid": Parameters(np.float32(0.05), np.int8(3))},
        )  # fmt: skip
        feed = FeedInfo(name="x", dtype="int8", shape=[1], sha256=f"{number:064d}", source="made")
        writer.add(recording, SampleInfo(id=f"s{number}", feeds=[feed]), SIDE)
    writer.finish(SIDE)
    return sum(file.stat().st_size for file in folder.iterdir())


def largest_anonymous(command: list[str], out: Path) -> tuple[int, float, int]:
    """(RssAnon in MB at its highest, seconds, exit code) of a command; its stdout goes to `out`."""
    started = time.perf_counter()
    with out.open("wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL)
    highest = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        highest = max([highest, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))])
        time.sleep(0.02)
    return highest // 1024, time.perf_counter() - started, process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        places = [Path(scratch) / name for name in ("a", "b")]
        sizes = [write(place, arguments.gigabytes, seed) for seed, place in enumerate(places)]
        command = [sys.executable, "-m", "equivcheck", "compare", *map(str, places), "--json", "-"]
        out = Path(scratch) / "result.json"
        anonymous, seconds, code = largest_anonymous(command, out)
        tensors = from_json(out.read_bytes()).tensors
    print(f"two recordings of {sizes[0] / 2**30:.2f} and {sizes[1] / 2**30:.2f} GiB: exit {code}, {seconds:.1f} s")
    print(f"anonymous memory at its highest: {anonymous} MB (limit {LIMIT_MB} MB)")
    for tensor in tensors:
        figures = tensor.accumulated
        assert figures is not None
        print(f"  {tensor.name:<6} {figures.n:>12} elements, {figures.mismatched} differ, {tensor.verdict}")
    compared = sum(t.accumulated.n for t in tensors if t.accumulated is not None)
    print(f"  {compared / seconds / 1e6:.0f} million pairs a second, start and end of the process included")
    return 0 if anonymous < LIMIT_MB and code == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
