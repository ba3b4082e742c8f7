"""How much memory a run of the virtual NPU takes beyond the compiled model, beside the model's activations.

    python tests/bench/vnpu_memory.py

Activations are the bytes of all stored values, the feeds apart: a recording keeps every one of them. The peak is the
process' largest resident set during the second run (Linux counts it from a reset), less what it had before; the first run
fills the allocators. Exits 1 where a peak is above three times the activations. Needs the folder of real models.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMIT = 3.0
PROFILES = ("exact", "ort", "tflite-reference")
MIB = 1 << 20


def main() -> int:
    if len(sys.argv) == 3:
        return measure(*sys.argv[1:])
    from real_models import REAL_MODELS, shared_folder

    shared = shared_folder()
    if shared is None:
        print("no folder of real models: set EQUIVCHECK_SHARED", file=sys.stderr)
        return 2
    chosen = [m.file for m in REAL_MODELS if m.file.startswith(("coral_tf2", "efficientnet_lite0_int8_qdq"))]
    above = [
        subprocess.run([sys.executable, __file__, str(shared / "models" / file), profile], check=False).returncode
        for file in chosen
        for profile in PROFILES
    ]
    return max(above)


def measure(path: str, profile: str) -> int:
    """In a process of its own: what one run adds to the resident set."""
    import numpy as np

    from equivcheck.backends.registry import backend
    from equivcheck.backends.vnpu import VnpuBackend
    from equivcheck.models.onnx.load import load_model

    model = load_model(path)
    chosen = backend(f"vnpu:profile={profile},target=all")
    assert isinstance(chosen, VnpuBackend)
    program = chosen.compile(model)
    (name,) = model.graph.inputs
    value = model.graph.values[name]
    shape = tuple(dim if isinstance(dim, int) else 1 for dim in value.shape or ())
    feeds = {name: np.random.default_rng(0).normal(size=shape).astype(value.dtype or "float32")}
    activations = sum(array.nbytes for key, array in program.run(feeds).items() if key != name)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    program.run(feeds)
    grown = resident("VmHWM") - before
    ratio = grown / activations
    print(
        f"{Path(path).stem[:40]:40} {profile:17} activations {activations / MIB:5.1f} MiB  peak {grown / MIB:5.1f} MiB"
        f"  ratio {ratio:4.1f}  (limit {LIMIT:g})"
    )
    return int(ratio > LIMIT)


def resident(key: str) -> int:
    """A row of /proc/self/status in bytes: VmRSS (now), VmHWM (the largest so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status: this bench needs Linux")


if __name__ == "__main__":
    sys.exit(main())
