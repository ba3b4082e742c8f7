"""Cuts every node of every ONNX model in a folder, before and after, and compares head + tail with the model, bit for bit.

    python tests/bench/split.py [--every N] [-m SUBSTRING] [FOLDER]

ONNX Runtime's optimisation is off. Prints cuts / equal / refused for each model; exits 1 where anything is wrong. The
default folder is the one with real models (EQUIVCHECK_SHARED, or `shared` beside the checkout). --every N takes every Nth
node only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equivcheck.errors import EquivcheckError
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.models.onnx.split import build_parts, find_cut
from equivcheck.models.select import Selected
from equivcheck.parts import _Proof, _types_by_engine
from real_models import shared_folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("-m", "--model", default="")
    arguments = parser.parse_args()
    shared = shared_folder()
    folder = arguments.folder or (shared / "models" if shared else None)
    if folder is None:
        print("no folder of real models: set EQUIVCHECK_SHARED", file=sys.stderr)
        return 2
    total: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.onnx")):
        if arguments.model in path.name:
            started = time.perf_counter()
            counts, problems = cut_everywhere(load_model(path), arguments.every)
            total += counts
            print(f"{path.name[:52]:52} {summary(counts)}  {time.perf_counter() - started:.1f} s", flush=True)
            for problem in problems:
                print(f"    {problem}")
    print(f"{'all':52} {summary(total)}")
    return 1 if total["wrong"] else 0


def summary(counts: Counter[str]) -> str:
    return (
        f"cuts {counts['cuts']:5}  equal {counts['equal']:5}  refused {counts['refused']:3}  wrong {counts['wrong']:3}"
    )


def cut_everywhere(model: OnnxModel, every: int = 1) -> tuple[Counter[str], list[str]]:
    """Cut before and after every Nth node; return (counts, what was refused or wrong, with the reason)."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    proof = _Proof(model, None)
    for node in model.graph.originals[::every]:
        constant = model.graph.constant_values
        before = tuple(dict.fromkeys(name for name in node.inputs if name and name not in constant))
        point = Selected(f"node:{node.label}", node, None, before, tuple(out for out in node.outputs if out))
        for place in ("before", "after"):
            counts["cuts"] += 1
            try:
                proved, note = proof.of(build_parts(model, find_cut(model, point, place), _types_by_engine))
            except EquivcheckError as error:
                counts["refused"] += 1
                problems.append(f"refused {place} {node.label}: {error}")
                continue
            counts["equal" if proved else "wrong"] += 1
            if not proved:
                problems.append(f"WRONG {place} {node.label[-40:]}: {note[:300]}")
    return counts, problems


if __name__ == "__main__":
    sys.exit(main())
