"""How much slower the virtual NPU is than ONNX Runtime's plain inference, in one run on this machine.

    python tests/bench/vnpu.py [--runs N]

Prints, for each model and profile, the median of N alternating runs and their ratio; exits 1 where a ratio is above 12.
Needs the folder of real models (EQUIVCHECK_SHARED, or `shared` beside the checkout).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equivcheck.backends.registry import backend
from equivcheck.backends.vnpu import VnpuBackend
from equivcheck.engines.ort import OrtEngine
from equivcheck.inputs import load_samples
from equivcheck.models.onnx.load import load_model
from equivcheck.recorder import input_specs
from real_models import REAL_MODELS, shared_folder

LIMIT = 12.0
PROFILES = ("exact", "ort", "tflite-reference")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    shared = shared_folder()
    if shared is None:
        print("no folder of real models: set EQUIVCHECK_SHARED", file=sys.stderr)
        return 2
    slow = 0
    for model in (m for m in REAL_MODELS if m.file.startswith(("coral_tf2", "efficientnet_lite0_int8_qdq"))):
        loaded = load_model(shared / "models" / model.file)
        picture = str(shared / "models" / "images" / model.pictures[0])
        feeds = load_samples([picture], input_specs(loaded.graph), recipe=model.recipe).samples[0].arrays()
        plain = OrtEngine()
        plain.load(loaded.proto.SerializeToString(), {})
        for profile in PROFILES:
            chosen = backend(f"vnpu:profile={profile},target=all")
            assert isinstance(chosen, VnpuBackend)
            program = chosen.compile(loaded)
            ort_ms, vnpu_ms = medians_ms(runs, partial(plain.run, feeds), partial(program.run, feeds))
            ratio = vnpu_ms / ort_ms
            slow += ratio > LIMIT
            figures = f"ort {ort_ms:6.1f} ms  vnpu {vnpu_ms:6.1f} ms  ratio {ratio:5.1f}  (limit {LIMIT:g})"
            print(f"{model.name[:40]:40} {profile:17} {figures}")
    return 1 if slow else 0


def medians_ms(runs: int, *calls: Callable[[], object]) -> list[float]:
    """Median milliseconds of each call, run in turn, so that a change of the machine's speed meets all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs + 1):
        for kept, call in zip(times, calls, strict=True):
            started = time.perf_counter()
            call()
            kept.append(time.perf_counter() - started)
    return [1e3 * statistics.median(kept[1:]) for kept in times]


if __name__ == "__main__":
    sys.exit(main())
