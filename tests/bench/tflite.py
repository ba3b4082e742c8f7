"""One .tflite file, two sets of kernels: TFLite's reference kernels against XNNPACK and against its built-in ones.

    python tests/bench/tflite.py [--model NAME] [--kernels NAME]

Prints, for every .tflite file with real pictures (seeded codes where the input is none), how many steps were judged, how many
codes differ from those of the reference kernels when each runs from the input, how far apart they are at most, and the verdict;
and for each operator the worst legal excess (LSB beyond rounding) of either side on its own inputs, with the limit of the step
that comes nearest to its limit. Exits 1 where a verdict is not `equivalent`. Needs the folder of real models
(EQUIVCHECK_SHARED, or `shared` beside the checkout).
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import equivcheck
from equivcheck.errors import UnsupportedModel
from equivcheck.inputs import samples_from_python
from equivcheck.models.graph import Array
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.recorder import input_specs
from equivcheck.result import Result
from real_models import shared_folder

KERNELS = ("xnnpack", "builtin")
SHOWN = 0.0005  # LSB; less is the error of a float32 multiplication
PHOTOS = ("cat_chelsea.jpg", "grace_hopper.jpg")
TORCH = "scale=1/255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225"


@dataclass(frozen=True)
class Pictured:
    """A file and its pictures. `reals`: the recipe gives real numbers, which the input's scale turns into its codes."""

    file: str
    recipe: str = ""
    pictures: tuple[str, ...] = PHOTOS
    reals: bool = False


MODELS = (
    Pictured("coral_tf2_mobilenet_v2_1.0_224_ptq", "resize=224x224,layout=NHWC"),
    Pictured("coral_mobilenet_v2_1.0_224_quant", "resize=224x224,layout=NHWC"),
    Pictured("coral_mobilenet_v1_0.25_128_quant", "resize=128x128,layout=NHWC"),
    Pictured("tflm_mobilenet_v2_quantized_1x3x224x224", f"resize=224x224,{TORCH}", reals=True),
    Pictured("mcunet_vww", "resize=80x80,scale=1/127.5,mean=1,layout=NHWC"),
    Pictured("tiny_resnet8_cifar10_int8", "resize=32x32,layout=NHWC"),
    Pictured("tiny_vww_96_int8", "resize=96x96,layout=NHWC"),
    Pictured("tiny_kws_int8", pictures=()),
    Pictured(
        "furiosa_MNISTnet_uint8_quant_without_softmax", "resize=28x28,color=GRAY,layout=NHWC", ("mnist_nine.bmp",)
    ),
    Pictured("engine_defects/small_s8_pc", "resize=32x32,scale=1/127.5,mean=1", reals=True),
    Pictured("engine_defects/attention_s8_pc", pictures=()),
    Pictured("pymicro_okay_nabu", pictures=()),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="only files whose name holds this")
    parser.add_argument("--kernels", choices=KERNELS, help="only these against the reference kernels")
    asked = parser.parse_args()
    shared = shared_folder()
    if shared is None:
        print("no folder of real models: set EQUIVCHECK_SHARED", file=sys.stderr)
        return 2
    header = (
        f"{'file':32} {'input':8} {'kernels':8} {'judged':>7} {'codes that differ':>21} {'since input':>11}  verdict"
    )
    print(header)
    failed = 0
    for found in MODELS:
        if asked.model in found.file:
            failed += show(found, shared / "models", [asked.kernels] if asked.kernels else KERNELS)
    return 1 if failed else 0


def show(found: Pictured, folder: Path, kernels: list[str] | tuple[str, ...]) -> int:
    """Print the rows of one file; how many of its verdicts are not `equivalent`."""
    name = found.file.rpartition("/")[2][:32]
    try:
        model = load_model(folder / f"{found.file}.tflite")
    except UnsupportedModel as error:
        print(f"{name:32} refused: {error.message.rpartition('/')[2]}")
        return 0
    inputs = codes(found, folder, model)
    failed = 0
    for kind in kernels:
        result = equivcheck.diff(
            model, inputs=inputs, reference="tflite:kernels=reference", candidate=f"tflite:kernels={kind}"
        )
        print_row(name, f"{len(inputs)} photos" if inputs else "seeded", kind, result)
        failed += result.verdict != "equivalent"
    return failed


def codes(found: Pictured, folder: Path, model: OnnxModel) -> list[dict[str, Array]] | None:
    """The pictures as the model takes them, or None where it takes none."""
    if not found.pictures:
        return None
    (spec,) = input_specs(model.graph)
    wanted = replace(spec, dtype="float32") if found.reals else spec
    paths = [str(folder / "images" / picture) for picture in found.pictures]
    arrays = [
        sample.arrays()[spec.name] for sample in samples_from_python(paths, [wanted], recipe=found.recipe).samples
    ]
    if found.reals:
        own = model.graph.quantisation[spec.name]
        ends = np.iinfo(own.dtype)
        arrays = [
            np.clip(np.rint(x / own.scale) + own.zero_point, ends.min, ends.max).astype(own.dtype) for x in arrays
        ]
    return [{spec.name: array} for array in arrays]


def print_row(name: str, fed: str, kernels: str, result: Result) -> None:
    figures = [tensor.accumulated for tensor in result.tensors if tensor.accumulated is not None]
    differing, total = sum(one.mismatched for one in figures), sum(one.n for one in figures)
    far = max(one.max_lsb or 0.0 for one in figures)
    judged = f"{result.coverage.judged}/{result.coverage.steps}"
    print(
        f"{name:32} {fed.replace('1 photos', '1 photo'):8} {kernels:8} {judged:>7} "
        f"{f'{differing} of {total}':>21} {far:>7.0f} LSB  {result.verdict}"
    )
    worst: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    nearest: dict[str, tuple[float, float]] = {}
    for tensor in result.tensors:
        sides = (tensor.local.reference, tensor.local.candidate)
        if tensor.op_type is None or tensor.limit is None or not tensor.limit.max or not all(sides):
            continue  # what only moves codes has a limit of 0: its verdict says enough
        reference, candidate = (side.excess for side in sides)
        limit = tensor.limit.max
        worst[tensor.op_type] = (max(worst[tensor.op_type][0], reference), max(worst[tensor.op_type][1], candidate))
        nearest[tensor.op_type] = max(
            nearest.get(tensor.op_type, (0.0, limit)), (max(reference, candidate) / limit, limit)
        )
    for op, (reference, candidate) in sorted(worst.items(), key=lambda item: -max(item[1])):
        if max(reference, candidate) >= SHOWN:
            print(f"    {op:24} reference {reference:.3f}, {kernels} {candidate:.3f}   limit {nearest[op][1]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
