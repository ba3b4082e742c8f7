"""Codes into codes of another scale: what TFLite's kernels and XNNPACK make of them is legal there, and a wrong one is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

import equivcheck
from bench.requantise import OPERATORS, SCALE_OUT, Case, cases
from builder import Qdq
from equivcheck.backends.registry import backend
from equivcheck.models.tflite.load import tflite_from_bytes
from equivcheck.result import Result
from equivcheck.twins.draft import Draft, Held, Stage
from tflite_graphs import TfliteGraph

KERNELS = ("reference", "builtin", "xnnpack")
# s_in / s_out: near 3/8 = 3/4 * 2^-1 rounding twice costs 1/4; 256 * 0.791 = 202.496 is nearly half way between two.
TWICE_OFF, EIGHT_BITS_OFF = 0.374, 0.791
EVERY = np.arange(-128, 128).astype(np.int8).reshape(1, 4, 8, 8)


def limit(op_type: str, kernels: str) -> float:
    declared = backend(f"tflite:kernels={kernels}").legal_excess()
    return max(declared[key][0] for key in (op_type, f"{op_type}@8") if key in declared)


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
def test_xnnpack_requantises_with_eight_bits_behind_the_point(operator: str) -> None:
    """Every code of it is that of the formula the limit is taken from; what it leaves to TFLite is not counted."""
    taken = 0
    for case in cases(operator, 170, seed=1):
        made, delegated = case.run("xnnpack")
        if delegated:
            taken += 1
            np.testing.assert_array_equal(made, case.eight_bits(), err_msg=str(case))
            assert case.excess(made) <= case.eight_bits_bound() + 1e-9 <= limit("QuantizeLinear", "xnnpack")
    assert taken > 80


@pytest.mark.parametrize("kernels", ["reference", "builtin"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_tflites_own_kernels_requantise_by_rounding_twice(operator: str, kernels: str) -> None:
    for case in cases(operator, 170, seed=2):
        made, delegated = case.run(kernels)
        assert not delegated
        assert case.excess(made) <= case.twice_bound() + 1e-6 <= limit("QuantizeLinear", kernels), str(case)


@pytest.mark.parametrize("op_type", ["QuantizeLinear", "LeakyRelu"])
def test_the_worst_that_xnnpack_does_needs_the_limit_that_is_declared(op_type: str) -> None:
    """Of all multipliers half way between two of 8 bits, with all codes on one side of the zero point."""
    alpha = None if op_type == "QuantizeLinear" else 0.1
    scales = [np.float32(SCALE_OUT * np.float32((k + 0.5) / 256)) for k in range(20, 250)]
    worst = max(
        (Case(scale, zero, zero, "int8", alpha) for scale in scales for zero in (-128, 127)),
        key=lambda case: case.excess(case.eight_bits()),
    )
    made, delegated = worst.run("xnnpack")
    assert delegated
    assert 0.45 < worst.excess(made) <= limit(op_type, "xnnpack") < 0.5


# -- in models ---------------------------------------------------------------------------------------------------------


def joined(tmp_path: Path, ratio: float, kernels: str, zero: int = -128) -> Result:
    """The verdict on a Concat of two inputs that have other scales than it, fed with every code."""
    m = Qdq(dtype="int8")
    inputs = [
        m.dq(m.input(name, EVERY.shape, "int8"), scale, zero) for name, scale in (("a", 0.05 * ratio), ("b", 0.045))
    ]
    path = tmp_path / "joined.onnx"
    onnx.save(m.model(m.dq(m.q(m.op("Concat", inputs, axis=1), 0.05, zero))), path)
    return equivcheck.diff(path, inputs={"a": EVERY, "b": EVERY}, candidate=f"tflite:kernels={kernels}")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ratio", [TWICE_OFF, EIGHT_BITS_OFF])
def test_a_concat_of_other_scales_is_legal_and_its_limit_says_why(tmp_path: Path, kernels: str, ratio: float) -> None:
    result = joined(tmp_path, ratio, kernels)
    assert result.verdict == "equivalent", str(result)
    assert result.coverage.judged == result.coverage.steps


@pytest.mark.parametrize(("kernels", "ratio"), [("reference", TWICE_OFF), ("xnnpack", EIGHT_BITS_OFF)])
def test_without_what_the_engine_declares_that_concat_would_be_blamed(
    tmp_path: Path, kernels: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the two ratios are ones that matter."""
    monkeypatch.setattr("equivcheck.backends.tflite.TfliteBackend.legal_excess", lambda self: {})
    result = joined(tmp_path, ratio, kernels)
    assert [culprit.op_type for culprit in result.culprits] == ["Concat"]


@pytest.mark.parametrize("up", [1, -1])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_quantize_that_is_one_code_off_is_found(
    tmp_path: Path, kernels: str, up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in the twin: QUANTIZE to a zero point beside the right one, and a RESHAPE that calls it the right one."""
    after = Draft.after

    def one_off(self: Draft, held: Held, stage: Stage) -> Held:
        if stage.kind != "QUANTIZE" or stage.codes is None:
            return after(self, held, stage)
        beside = dataclasses.replace(stage.codes, zero=stage.codes.zero + up)
        wrong = after(self, held, dataclasses.replace(stage, codes=beside))
        return after(self, wrong, self.reshape(stage.shape, stage.codes))

    monkeypatch.setattr(Draft, "after", one_off)
    result = joined(tmp_path, EIGHT_BITS_OFF, kernels, zero=-100)
    assert result.verdict == "different", str(result)
    assert [culprit.op_type for culprit in result.culprits] == ["Concat"]
    (culprit,) = result.culprits
    assert culprit.local.candidate is not None
    assert culprit.local.candidate.excess > 0.9


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_file_that_requantises_is_legal_on_all_kernels(kernels: str) -> None:
    g = TfliteGraph()
    x = g.input(EVERY.shape, 0.05 * EIGHT_BITS_OFF, -128, name="x")
    y = g.op("QUANTIZE", [x], EVERY.shape, 0.05, -128)
    z = g.op("QUANTIZE", [y], EVERY.shape, 0.05 / TWICE_OFF, -128, name="z")
    model = tflite_from_bytes(g.content(z), "requantises.tflite")
    sides = ("tflite:kernels=reference", f"tflite:kernels={kernels}")
    result = equivcheck.diff(model, inputs={"x": EVERY}, reference=sides[0], candidate=sides[1])
    assert result.verdict == "equivalent", str(result)
    assert result.coverage.judged == result.coverage.steps == 2
    worst = max(tensor.local.candidate.excess for tensor in result.tensors if tensor.local.candidate is not None)
    assert worst > (0.4 if kernels == "xnnpack" else 0.2)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_real_concat_that_xnnpack_requantises_is_not_blamed(shared: Path, kernels: str) -> None:
    model = shared / "models" / "engine_defects" / "ov_concat_conv_real.onnx"
    result = equivcheck.diff(model, candidate=f"tflite:kernels={kernels}")
    assert result.verdict == "equivalent", str(result)
    (tensor,) = [tensor for tensor in result.tensors if tensor.op_type == "Concat"]
    assert tensor.local.candidate is not None
    if kernels == "xnnpack":
        assert tensor.local.candidate.excess > 0.15
