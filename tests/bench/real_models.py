"""Every real model against several candidates, with real pictures: what was judged, and the worst excess by op_type.

    python tests/bench/real_models.py [-c SPEC]... [-m SUBSTRING]

Prints one row a model and candidate; exits 1 where a candidate step is a culprit, an output was disturbed, or less than
99 % of the stored values were observed on the reference.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import equivcheck
from equivcheck.result import Result
from real_models import REAL_MODELS, shared_folder

CANDIDATES = (
    "vnpu:profile=exact",
    "vnpu:profile=ort",
    "vnpu:profile=tflite-reference",
    "ort:optimization=disable",
    "ort:int8=native",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-c", "--candidate", action="append")
    parser.add_argument("-m", "--model", default="")
    arguments = parser.parse_args()
    shared = shared_folder()
    if shared is None:
        print("no folder of real models: set EQUIVCHECK_SHARED", file=sys.stderr)
        return 2
    bad = 0
    for model in REAL_MODELS:
        if arguments.model not in model.file:
            continue
        for candidate in arguments.candidate or CANDIDATES:
            result = equivcheck.diff(
                shared / "models" / model.file,
                inputs=[str(shared / "models" / "images" / picture) for picture in model.pictures],
                preprocess=model.recipe,
                split_at=model.split_at,
                candidate=candidate,
            )
            bad += not acceptable(result)
            print(row(model.name, candidate, result), flush=True)
    return 1 if bad else 0


def acceptable(result: Result) -> bool:
    """No culprit on the candidate, nothing disturbed, and at least 99 % of the values seen on the reference."""
    seen = sum(t.how.reference is not None for t in result.tensors)
    return (
        result.verdict == "equivalent"
        and not result.reference.observation.disturbed
        and seen >= 0.99 * len(result.tensors)
    )


def row(name: str, candidate: str, result: Result) -> str:
    coverage = result.coverage
    worst: dict[str, float] = defaultdict(float)
    off = elements = 0
    for tensor in result.tensors:
        if (
            (error := tensor.local.candidate) is not None
            and tensor.limit is not None
            and tensor.limit.metric == "excess"
        ):
            worst[tensor.op_type or "?"] = max(worst[tensor.op_type or "?"], error.excess)
            off += error.off
            elements += error.n
    shown = " ".join(
        f"{op}={excess:.3f}" for op, excess in sorted(worst.items(), key=lambda item: -item[1]) if excess >= 5e-4
    )
    seen = sum(t.how.reference is not None for t in result.tensors)
    reference = "".join(f" REFERENCE CULPRIT #{c.step} {c.op_type} {c.reason}" for c in result.reference_culprits)
    culprits = "".join(f" CULPRIT #{c.step} {c.op_type} {c.reason}" for c in result.culprits)
    return (
        f"{name[:34]:34} {candidate:30} {result.verdict:12} judged {coverage.judged}/{coverage.steps} "
        f"seen {seen}/{len(result.tensors)} disturbed {result.reference.observation.disturbed} "
        f"off {100 * off / max(1, elements):.3f} % worst {shown or '0'}{reference}{culprits}"
    )


if __name__ == "__main__":
    sys.exit(main())
