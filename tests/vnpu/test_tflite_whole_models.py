"""Real .tflite models, every stored value: the profiles against the kernels of TFLite whose arithmetic they are.

`tflite-reference` is run from the model's input and compared with the reference kernels. `ort` stands for ONNX Runtime, whose
convolutions XNNPACK reproduces; its sums it does not: XNNPACK adds in fixed point, ONNX Runtime in float32.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import equivcheck
from equivcheck.backends.registry import backend
from equivcheck.backends.spec import parse
from equivcheck.backends.vnpu import VnpuBackend
from equivcheck.inputs import samples_from_python
from equivcheck.models.onnx.load import load_model
from equivcheck.recorder import input_specs
from equivcheck.result import Result, Tensor

pytest.importorskip("ai_edge_litert.interpreter", reason="the oracle is LiteRT: pip install equivcheck[tflite]")

PHOTOS = ("cat_chelsea.jpg", "grace_hopper.jpg")
# model -> (how a photo becomes its input; None: sound, so seeded codes instead; values it stores, its input not counted)
MODELS = {
    "tiny_resnet8_cifar10_int8": ("resize=32x32,layout=NHWC", 16),
    "tiny_vww_96_int8": ("resize=96x96,layout=NHWC", 31),
    "tiny_kws_int8": (None, 13),
    "coral_tf2_mobilenet_v2_1.0_224_ptq": ("resize=224x224,layout=NHWC", 68),
}
WITH_ADDS = {"tiny_resnet8_cifar10_int8", "coral_tf2_mobilenet_v2_1.0_224_ptq"}
SHARE_OF_SUMS = 1e-3  # measured: 2 of 57,344 codes and 48 of 432,768


def pictures(shared: Path, name: str) -> list[str] | None:
    return [str(shared / "models" / "images" / photo) for photo in PHOTOS] if MODELS[name][0] else None


def compared(shared: Path, name: str, reference: str, candidate: str) -> Result:
    result = equivcheck.diff(
        shared / "models" / f"{name}.tflite",
        inputs=pictures(shared, name),
        preprocess=MODELS[name][0],
        reference=reference,
        candidate=f"{candidate},target=all",
    )
    assert {place.where for place in result.candidate.placement} == {"npu"}, "nothing was left to ONNX Runtime"
    assert len(result.tensors) == MODELS[name][1]
    assert {tensor.reference.dtype for tensor in result.tensors} <= {"int8", "uint8"}
    return result


def codes(tensors: list[Tensor]) -> tuple[int, int]:
    """(codes compared, codes that differ)."""
    figures = [tensor.accumulated for tensor in tensors]
    assert all(figures), "every stored value was seen on both sides"
    return sum(figure.n for figure in figures), sum(figure.mismatched for figure in figures)


@pytest.mark.parametrize("name", MODELS)
def test_tflite_reference_is_the_reference_kernels_on_every_code(
    shared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compared(shared, name, "tflite:kernels=reference", "vnpu:profile=tflite-reference")
    total, differing = codes(result.tensors)
    with capsys.disabled():
        print(f"\n{name}: {differing} of {total} codes differ, {len(result.tensors)} values")
    assert total > 10_000
    assert differing == 0
    assert result.verdict == "equivalent"


def test_another_profile_is_told_from_the_reference_kernels(shared: Path) -> None:
    result = compared(shared, "tiny_resnet8_cifar10_int8", "tflite:kernels=reference", "vnpu:profile=ort")
    assert codes(result.tensors)[1] > 0


@pytest.mark.parametrize("name", MODELS)
def test_ort_is_xnnpack_from_the_input_up_to_the_first_sum(
    shared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that differs while all that its step reads is equal begins a difference; only sums do."""
    result = compared(shared, name, "tflite:kernels=xnnpack", "vnpu:profile=ort")
    left = {place.op_type for place in result.reference.placement if place.reason != "XNNPACK"}
    total, differing = codes(result.tensors)
    off = {tensor.name for tensor in result.tensors if tensor.accumulated.mismatched}
    reads = {step.id: step.inputs for step in result.steps}
    begins = [t for t in result.tensors if t.name in off and off.isdisjoint(reads[t.step])]
    with capsys.disabled():
        first = ", ".join(f"#{t.step} {t.op_type} {t.accumulated.mismatched} of {t.accumulated.n}" for t in begins)
        print(f"\n{name}: {differing} of {total} codes differ; begins at {first or 'none'}")
        print(f"    left by XNNPACK to TFLite's own kernels: {', '.join(sorted(left)) or 'nothing'}")
    assert left.isdisjoint({"CONV_2D", "DEPTHWISE_CONV_2D", "ADD"})
    assert result.verdict == "equivalent"
    if name not in WITH_ADDS:
        assert (total > 10_000, differing) == (True, 0)
        return
    assert [t.op_type for t in begins] == ["ADD"] * len(begins)
    assert all(t.accumulated.max_lsb == 1 for t in begins)


@pytest.mark.parametrize("name", MODELS)
def test_on_what_xnnpack_fed_itself_ort_gives_its_codes_but_for_sums(
    shared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(shared / "models" / f"{name}.tflite")
    samples = samples_from_python(pictures(shared, name), input_specs(model.graph), recipe=MODELS[name][0]).samples
    program = VnpuBackend(parse("vnpu:profile=ort,target=all")).compile(model)
    total, differing, furthest = Counter[str](), Counter[str](), 0
    session = backend("tflite:kernels=xnnpack").open(model)
    try:
        for sample in samples:
            values = session.run(sample.id, sample.arrays()).values
            for step in model.graph.steps:
                for value, made in program.run_step(step, {read: values[read] for read in step.inputs}).items():
                    apart = np.abs(made.astype(np.int32) - values[value])
                    total[step.op_type] += apart.size
                    differing[step.op_type] += np.count_nonzero(apart)
                    furthest = max(furthest, int(apart.max()))
    finally:
        session.close()
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{op} {differing[op]} of {total[op]}" for op in total))
    assert total["Conv"] > 10_000
    assert {op for op in total if differing[op]} <= {"Add"}
    assert ("Add" in total) == (name in WITH_ADDS)
    assert differing["Add"] <= SHARE_OF_SUMS * total["Add"]
    assert furthest <= 1
