"""Two exports of one network: an .onnx on ONNX Runtime against the .tflite beside it on TFLite's reference kernels and XNNPACK.

    python tests/bench/pairs_tflite.py [--model NAME] [--unmatched]

Prints, for each pair and its real pictures (seeded numbers where the input is none), how many values were paired and
confirmed, the largest difference since the input, the verdict, and the worst excess of the candidate by operator. Values of
the same name in both files are a check that the pairing did not use: `names` counts those paired with their namesake, and
those paired with another. Exits 1 where a verdict is not `equivalent`. Needs the folder of real models (EQUIVCHECK_SHARED,
or `shared` beside the checkout).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import equivcheck
from equivcheck.backends.paired import PairedBackend
from equivcheck.backends.registry import backend
from equivcheck.backends.spec import parse
from equivcheck.backends.tflite import TfliteBackend
from equivcheck.inputs import samples_from_python
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.recorder import input_shapes, input_specs
from equivcheck.result import Result
from real_models import REAL_MODELS, RealModel, shared_folder

KERNELS = ("reference", "xnnpack")
DEFECTS = (
    RealModel("engine_defects/attention_s8_pc_qdq.onnx", "", "", ()),
    RealModel("engine_defects/small_s8_pc_qdq.onnx", "", "resize=32x32,scale=1/127.5,mean=1"),
)


def twin_of(model: Path) -> Path | None:
    """The .tflite file of the same stem, or None."""
    stem = model.name.removesuffix("_qdq.onnx")
    return next((path for path in sorted(model.parent.glob("*.tflite")) if path.stem.startswith(stem)), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="only pairs whose name holds this")
    parser.add_argument(
        "--unmatched", action="store_true", help="list the values that were not paired, with the reason"
    )
    asked = parser.parse_args()
    shared = shared_folder()
    if shared is None:
        print("no folder of real models: set EQUIVCHECK_SHARED", file=sys.stderr)
        return 2
    print(
        f"{'pair':34} {'kernels':9} {'paired':>8} {'theirs':>8} {'conf.':>5} {'names':>7}  {'since input':>11}  verdict"
    )
    failed = 0
    for found in (*REAL_MODELS, *DEFECTS):
        path = shared / "models" / found.file
        other = twin_of(path)
        if other is not None and asked.model in found.file:
            failed += sum(show(found, shared, path, other, kernels, asked.unmatched) for kernels in KERNELS)
    return 1 if failed else 0


def show(found: RealModel, shared: Path, path: Path, other: Path, kernels: str, unmatched: bool) -> bool:
    """Print the row of one pair; True where it is not equivalent."""
    pictures = [str(shared / "models" / "images" / name) for name in found.pictures]
    model = load_model(path)
    loaded = samples_from_python(pictures or None, input_specs(model.graph), recipe=found.recipe or None)
    model = model.with_input_shapes(input_shapes(loaded.samples))
    candidate = PairedBackend(TfliteBackend(parse(f"tflite:kernels={kernels}")), load_model(other), model)
    result = equivcheck.diff(
        model,
        inputs=pictures or None,
        preprocess=found.recipe or None,
        reference=backend("ort"),
        candidate=candidate,
    )
    print_row(found.name.removesuffix("_qdq").removeprefix("engine_defects/"), kernels, model, candidate, result)
    for name, why in candidate.pairing.unmatched_theirs.items() if unmatched else ():
        print(f"    in the .tflite only: {name}: {why}")
    for warning in result.candidate.warnings:
        print(f"    {warning}")
    return result.verdict != "equivalent"


def print_row(name: str, kernels: str, model: OnnxModel, candidate: PairedBackend, result: Result) -> None:
    pairing = candidate.pairing
    made = [value for value in model.graph.stored if value not in model.graph.inputs]
    both = set(model.graph.stored) & set(candidate.other.graph.stored)
    kept = [pairing.matches[value].theirs == value for value in both if value in pairing.matches]
    theirs = len(candidate.other.graph.stored)
    worst: dict[str, float] = {}
    for tensor in result.tensors:
        if tensor.op_type is not None and tensor.local.candidate is not None:
            worst[tensor.op_type] = max(worst.get(tensor.op_type, 0.0), tensor.local.candidate.excess)
    far = max((t.accumulated.max_lsb or 0.0 for t in result.tensors if t.accumulated is not None), default=0.0)
    unsure = sum("not confirmed" in (tensor.how.candidate or "") for tensor in result.tensors)
    paired = f"{sum(value in pairing.matches for value in made)}/{len(made)}"
    print(
        f"{name[:34]:34} {kernels:9} {paired:>8} {f'{theirs - len(pairing.unmatched_theirs)}/{theirs}':>8} "
        f"{len(made) - unsure:>5} {f'{sum(kept)}+{len(kept) - sum(kept)}':>7}  {far:>7.0f} LSB  {result.verdict}"
    )
    print(
        f"    {', '.join(f'{op} {excess:.3f}' for op, excess in sorted(worst.items(), key=lambda item: -item[1]) if excess)}"
    )


if __name__ == "__main__":
    sys.exit(main())
