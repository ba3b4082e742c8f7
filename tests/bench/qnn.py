"""Qualcomm's HTP (emulated on x86, or a device) on real int8 models with real pictures, and its defects shown bare.

    python tests/bench/qnn.py [-a ARCH]... [-m SUBSTRING] [--bare]

One row a model and architecture: steps on the NPU, steps judged, share of codes off, the worst excess by op_type, verdict,
culprits, refusals. Then one-step models that run through onnxruntime-qnn alone: what is the engine's, not ours. Exits 1 where
a culprit is not explained by one of those defects.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qnn_bare import DEMONSTRATIONS

import equivcheck
from equivcheck.result import Result
from real_models import REAL_MODELS, RealModel, shared_folder

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("68", "73")
OWN = tuple(
    (ROOT / "fixtures" / file, str(ROOT / "fixtures" / pictures), ROOT / "fixtures" / recipe)
    for pictures, recipe, files in (
        ("digits", "digits.toml", ("digits_qdq_s8.onnx", "digits_qdq_u8.onnx", "digits_qop_u8.onnx")),
        ("photos", "detector.toml", ("detector_qdq_s8.onnx", "detector_qdq_u8.onnx", "detector_qop_u8.onnx")),
    )
    for file in files
)
# Which culprits of which models are the engine's own, and the demonstration in `qnn_bare` that shows it.
EXPLAINED = {
    ("coral_mobilenet_v2_1.0_224_quant_qdq.onnx", "Conv"): "outlier_weight",
    ("detector_qop_u8.onnx", "QLinearConv"): "outlier_weight",
    ("digits_qop_u8.onnx", "QLinearConv"): "outlier_weight",
    ("digits_qop_u8.onnx", "QGemm"): "outlier_weight",
    ("furiosa_MNISTnet_uint8_qdq.onnx", "Conv"): "outlier_weight",
    ("efficientnet_lite0_int8_qdq_s8s8_pc.onnx", "Conv"): "bias_near_the_end",
    ("efficientnet_lite0_int8_qop_u8s8_pc.onnx", "QLinearConv"): "bias_near_the_end",
    ("mcunet_vww_qdq.onnx", "Pad"): "pad_of_s8",
    ("coral_tf2_mobilenet_v2_1.0_224_ptq_qdq.onnx", "Softmax"): "softmax_with_a_tail",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-a", "--arch", action="append")
    parser.add_argument("-m", "--model", default="")
    parser.add_argument("--bare", action="store_true", help="the one-step models only")
    chosen = parser.parse_args()
    bad = 0
    if not chosen.bare:
        for file, pictures, recipe in (*OWN, *_real()):
            if chosen.model in file.name:
                for arch in chosen.arch or ARCHITECTURES:
                    started = time.perf_counter()
                    result = equivcheck.diff(
                        file, inputs=pictures, preprocess=str(recipe), candidate=f"qnn:arch={arch}"
                    )
                    print(row(file.stem, arch, result, time.perf_counter() - started), flush=True)
                    bad += any((file.name, culprit.op_type) not in EXPLAINED for culprit in result.culprits)
    for demonstration in DEMONSTRATIONS:
        for arch in chosen.arch or ARCHITECTURES:
            print(f"bare, arch {arch}: {demonstration(arch)}", flush=True)
    return 1 if bad else 0


def _real() -> list[tuple[Path, list[str], str]]:
    shared = shared_folder()
    if shared is None:
        print("no folder of real models: set EQUIVCHECK_SHARED", file=sys.stderr)
        return []

    def pictures(model: RealModel) -> list[str]:
        return [str(shared / "models" / "images" / picture) for picture in model.pictures]

    return [(shared / "models" / model.file, pictures(model), model.recipe) for model in REAL_MODELS]


def row(name: str, arch: str, result: Result, seconds: float) -> str:
    """What one run says, in one line."""
    worst: dict[str, float] = defaultdict(float)
    off = elements = 0
    for tensor in result.tensors:
        error = tensor.local.candidate
        if error is not None and not error.merged and tensor.limit is not None and tensor.limit.metric == "excess":
            worst[tensor.op_type or "?"] = max(worst[tensor.op_type or "?"], error.excess)
            off += error.off
            elements += error.n
    side = result.candidate
    on_npu = sum(place.where == "npu" for place in side.placement)
    shown = " ".join(
        f"{op} {excess:.3f}" for op, excess in sorted(worst.items(), key=lambda kv: -kv[1]) if excess >= 5e-4
    )
    refused = "".join(f" | refused: {failed.name}: {failed.reason[:110]}" for failed in result.coverage.failed)
    culprits = ", ".join(f"#{culprit.step} {culprit.op_type}" for culprit in result.culprits[:6])
    return (
        f"{name[:40]:40} {arch} NPU {on_npu}/{len(side.placement)} judged {result.coverage.judged}/{result.coverage.steps} "
        f"off {100 * off / max(1, elements):.2f} % worst {shown or '0'}; disturbed {side.observation.disturbed}; "
        f"{result.verdict} ({len(result.culprits)} culprits{': ' if culprits else ''}{culprits}) {seconds:.0f} s{refused}"
    )


if __name__ == "__main__":
    sys.exit(main())
