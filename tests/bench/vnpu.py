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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equivcheck.backends.registry import backend
from equivcheck.backends.vnpu import VnpuBackend
from equivcheck.check import input_specs
from equivcheck.engines.ort import OrtEngine
from equivcheck.inputs import load_samples
from equivcheck.models.onnx.load import load_model
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
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(runs + 1):
                for kept, run in zip(times, (lambda: plain.run(feeds), lambda: program.run(feeds)), strict=True):
                    started = time.perf_counter()
                    run()
                    kept.append(time.perf_counter() - started)
            ort_ms, vnpu_ms = (1e3 * statistics.median(kept[1:]) for kept in times)
            ratio = vnpu_ms / ort_ms
            slow += ratio > LIMIT
            print(f"{model.name[:40]:40} {profile:17} ort {ort_ms:6.1f} ms  vnpu {vnpu_ms:6.1f} ms  ratio {ratio:5.1f}  (limit {LIMIT:g})")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
