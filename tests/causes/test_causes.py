"""Each mistake, made here in plain numpy, is named with its evidence; what no hypothesis explains has no cause."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bench.causes import EXPECTED, Model, faults_of
from bench.runs import sources
from builder import Qdq
from equivcheck.causes import Causes
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.vnpu.faults import KINDS as FAULT_KINDS

X_SCALE, X_ZERO, W_SCALE, OUT_SCALE, OUT_ZERO = 0.02, 100, 0.01, 0.06, 120


WIDEST = 0.15 + 0.25  # what no Conv's legal excess is beyond


def quantised(real: np.ndarray, low: float = 0, high: float = 255) -> np.ndarray:
    return np.clip(np.rint(real), low, high).astype(np.uint8)


@dataclass
class Conv:
    """A 3x3 'same' Conv of uint8 codes, per channel, with Relu or without, evaluated tap by tap in int64 and float64."""

    relu: bool = False

    def __post_init__(self) -> None:
        m = Qdq(dtype="uint8", per_channel=True, seed=3)
        real = m.conv(
            m.dq(m.q(m.input("x", (1, 3, 12, 10)), X_SCALE, X_ZERO, out="xq")), 6, x_scale=X_SCALE, w_scale=W_SCALE
        )
        real = m.op("Relu", [real]) if self.relu else real
        self.proto = m.model(m.dq(m.q(real, OUT_SCALE, OUT_ZERO, out="yq")))
        self.model = OnnxModel("conv", "", self.proto)
        constants = {k: v.astype(np.int64) for k, v in self.model.graph.constants.items() if v.dtype.kind == "i"}
        self.weight, self.bias = constants["weight"], constants["bias"]
        self.w_scale = self.model.graph.constants["weight_scale"].astype(np.float64)
        self.x = np.random.default_rng(1).integers(0, 256, (1, 3, 12, 10)).astype(np.uint8)

    def sums(self, x_zero: int = X_ZERO, fill: int | None = None, weight: np.ndarray | None = None) -> np.ndarray:
        w = self.weight if weight is None else weight
        rows, columns = self.x.shape[2:]
        padded = np.pad(
            self.x.astype(np.int64), [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=x_zero if fill is None else fill
        )
        total = np.zeros((1, w.shape[0], rows, columns), np.int64)
        for i in range(3):
            for j in range(3):
                total += np.einsum("nchw,oc->nohw", padded[:, :, i : i + rows, j : j + columns] - x_zero, w[:, :, i, j])
        return total

    def real(
        self,
        total: np.ndarray,
        *,
        bias: np.ndarray | None = None,
        w_scale: np.ndarray | None = None,
        zero: int = OUT_ZERO,
    ) -> np.ndarray:
        """Codes before rounding, Relu and saturation, from sums without bias."""
        b = (self.bias if bias is None else bias).reshape(-1, 1, 1)
        w = (self.w_scale if w_scale is None else w_scale).reshape(-1, 1, 1)
        s_x, s_out = np.float64(np.float32(X_SCALE)), np.float64(np.float32(OUT_SCALE))
        return (total + b) * (s_x * w) / s_out + zero

    @cached_property
    def right(self) -> np.ndarray:
        return self.real(self.sums())

    @property
    def low(self) -> int:
        return OUT_ZERO if self.relu else 0

    def explain(self, codes: np.ndarray, *, without_input: bool = False, more: Mapping[str, Any] | None = None) -> Any:
        values = {"yq": codes, **(more or {})} | ({} if without_input else {"xq": self.x})
        real = np.maximum(self.right, OUT_ZERO) if self.relu else self.right
        return Causes(self.model).explain("yq", codes, values, real)


def mistakes(c: Conv) -> dict[str, tuple[np.ndarray, str, str]]:
    """Name -> (real in codes of a wrong evaluation, or codes; the kind; what the evidence says)."""
    sums = c.sums()
    flipped = c.weight.copy()
    flipped[2] *= -1
    first = np.full_like(c.w_scale, c.w_scale[0])
    swapped = c.right[:, [0, 1, 2, 5, 4, 3]]
    multipliers = np.frexp(c.w_scale * X_SCALE / OUT_SCALE)[0]
    narrow = c.w_scale * np.rint(multipliers * 64) / 64 / multipliers
    fourth = (np.arange(6) == 4).reshape(6, 1, 1)
    wrapped = (sums + c.bias.reshape(-1, 1, 1) + 32768) % 65536 - 32768
    column = np.rint(c.right)
    column[..., -1] = OUT_ZERO
    up = np.clip(c.right, c.low, 255)
    return {
        "floor": (np.floor(c.right), "truncation", "rounded down"),
        "toward zero": (np.trunc(c.right - OUT_ZERO) + OUT_ZERO, "truncation", "toward zero" if not c.relu else "rounded down"),
        "one channel floors": (np.where(fourth, np.floor(c.right), c.right), "truncation", "channel 4 only"),
        "input zero point ignored": (c.real(c.sums(0)), "zero_point", "input zero point 0 instead of 100"),
        "input zero point off": (c.real(c.sums(101)), "zero_point", "input zero point 101 instead of 100"),
        "input zero point elsewhere": (c.real(c.sums(90)), "zero_point", "input zero point 90 instead of 100"),
        "output zero point off": (c.real(sums, zero=121), "zero_point", "output zero point 121 instead of 120"),
        "scale": ((c.right - OUT_ZERO) / 1.02 + OUT_ZERO, "scale", "0.9(80|79)"),
        "first scale for all": (c.real(sums, w_scale=first), "per_channel_scale", "first channel's"),
        "scales shifted": (c.real(sums, w_scale=np.roll(c.w_scale, 1)), "per_channel_scale", "one before"),
        "narrow multiplier": (c.real(sums, w_scale=narrow), "narrow_multiplier", "6 bits"),
        "no bias": (c.real(sums, bias=0 * c.bias), "bias", "without its bias"),
        "bias twice": (c.real(sums, bias=2 * c.bias), "bias", "added twice"),
        "pads of 0": (c.real(c.sums(fill=0)), "padding", "pads of code 0 instead of zero point 100"),
        "pads of 128": (c.real(c.sums(fill=128)), "padding", "pads of code 128"),
        "kernel mirrored": (c.real(c.sums(weight=c.weight[:, :, ::-1, ::-1])), "flipped_kernel", "mirrored"),
        "kernel transposed": (c.real(c.sums(weight=np.swapaxes(c.weight, 2, 3))), "flipped_kernel", "exchanged"),
        "four bits": (c.real(c.sums(weight=(c.weight >> 4) << 4)), "weight_bits", "four bits"),
        "sign of a channel": (c.real(c.sums(weight=flipped)), "sign", "channel 2"),
        "accumulator wraps": (c.real(wrapped, bias=0 * c.bias), "wrap", "wraps at 16 bits"),
        "accumulator saturates": (c.real(np.clip(sums, -32768, 32767)), "saturation", "saturates at 16 bits"),
        "channels exchanged": (swapped, "swapped_channels", "channels 3 and 5 exchanged"),
        "channels last": (np.moveaxis(c.right, 1, -1).reshape(c.right.shape), "transposed_layout", "channels last"),
        "rows and columns": (np.swapaxes(c.right, 2, 3).reshape(c.right.shape), "transposed_layout", "rows and columns"),
        "mirrored": (c.right[..., ::-1], "mirrored", "left to right"),
        "one channel up": (up + fourth, "offset", "channel 4 alone is 1 code too high"),
        "column not written": (column, "not_written", f"column 9 holds code {OUT_ZERO} \\(its zero point\\)"),
    }  # fmt: skip


PLAIN, RELU = Conv(), Conv(relu=True)


@pytest.mark.parametrize("conv", [PLAIN, RELU], ids=["plain", "relu"])
@pytest.mark.parametrize("mistake", mistakes(PLAIN))
def test_a_mistake_is_named_and_its_evidence_counts_the_wrong_codes(conv: Conv, mistake: str) -> None:
    made, kind, words = mistakes(conv)[mistake]
    low = OUT_ZERO + ("output zero" in mistake) if conv.relu else 0
    codes = quantised(made, low)
    cause = conv.explain(codes)
    assert cause is not None
    assert (cause.kind, bool(re.search(words, cause.evidence))) == (kind, True), cause.evidence
    surely_wrong = np.abs(codes - np.clip(conv.right, conv.low, 255)) > 0.5 + WIDEST
    explained, of = cause.explains
    assert np.count_nonzero(surely_wrong) <= of <= np.count_nonzero(codes != quantised(conv.right, conv.low))
    assert 0.95 * of <= explained <= of
    assert f"explains {explained} of {of} codes beyond the limit" in cause.evidence


def test_a_relu_left_out_or_at_raw_zero_and_early_saturation_are_told_apart() -> None:
    assert RELU.explain(quantised(RELU.right)).kind == "clip"
    early = RELU.explain(quantised(RELU.right, OUT_ZERO, 200))
    assert (early.kind, "at code 200 instead of 255" in early.evidence) == ("saturation", True)


def test_codes_that_wrap_are_not_saturated() -> None:
    wrapped = (np.rint(PLAIN.right).astype(np.int64) % 256).astype(np.uint8)
    assert PLAIN.explain(wrapped).kind == "wrap"


def test_what_another_step_left_in_the_buffer_is_recognised_by_its_content() -> None:
    codes = quantised(PLAIN.right)
    left = np.random.default_rng(2).integers(0, 256, codes.size).astype(np.uint8)
    codes.reshape(-1)[500:] = left[500:]
    cause = PLAIN.explain(codes, more={"before": left})
    assert cause.kind == "stale_buffer"
    assert "before" in cause.evidence


def test_a_dump_without_the_steps_input_is_still_explained_by_what_was_stored() -> None:
    assert PLAIN.explain(quantised(np.floor(PLAIN.right)), without_input=True).kind == "truncation"
    assert PLAIN.explain(quantised(PLAIN.real(PLAIN.sums(0))), without_input=True) is None


@pytest.mark.parametrize("seed", range(5))
def test_noise_other_content_and_two_mistakes_at_once_have_no_cause(seed: int) -> None:
    rng = np.random.default_rng(seed)
    noisy = quantised(PLAIN.right + rng.integers(-3, 4, PLAIN.right.shape))
    assert PLAIN.explain(noisy) is None
    assert PLAIN.explain(rng.integers(0, 256, noisy.shape).astype(np.uint8)) is None
    both = PLAIN.real(PLAIN.sums(101, weight=(PLAIN.weight >> 4) << 4), bias=0 * PLAIN.bias)
    assert PLAIN.explain(quantised(both)) is None


def test_a_channel_that_is_all_at_its_zero_point_was_computed_wrongly_not_left_out() -> None:
    codes = quantised(RELU.right, OUT_ZERO)
    codes[:, 2] = OUT_ZERO
    assert RELU.explain(codes) is None
    codes[:, 2] = OUT_ZERO + 5
    assert RELU.explain(codes).kind == "not_written"


def test_right_codes_and_legal_rounding_have_no_cause() -> None:
    assert PLAIN.explain(quantised(PLAIN.right)) is None
    assert PLAIN.explain(quantised(PLAIN.right + 0.1)) is None


def test_one_or_two_wrong_codes_have_no_cause() -> None:
    codes = quantised(PLAIN.right)
    codes[0, 1, 2, 3] += 9
    codes[0, 1, 2, 4] += 9
    assert PLAIN.explain(codes) is None


# -- other operators ---------------------------------------------------------------------------------------------------


def two_inputs() -> tuple[OnnxModel, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """An Add of two scales: model, stored inputs, and the reals of both in codes of the output, zero point 30 apart."""
    m = Qdq(dtype="uint8", seed=5)
    a = m.dq(m.q(m.input("a", (1, 4, 6, 6)), 0.02, 60, out="aq"))
    b = m.dq(m.q(m.input("b", (1, 4, 6, 6)), 0.05, 90, out="bq"))
    proto = m.model(m.dq(m.q(m.op("Add", [a, b]), 0.07, 30, out="yq")))
    rng = np.random.default_rng(0)
    stored = {name: rng.integers(90, 200, (1, 4, 6, 6)).astype(np.uint8) for name in ("aq", "bq")}
    scales = [np.float64(np.float32(s)) for s in (0.02, 0.05, 0.07)]
    parts = (
        (stored["aq"].astype(float) - 60) * scales[0] / scales[2],
        (stored["bq"].astype(float) - 90) * scales[1] / scales[2],
    )
    return OnnxModel("add", "", proto), stored, parts[0], parts[1]


@pytest.mark.parametrize(
    ("mistake", "kind", "words"),
    [
        (lambda a, b: a, "missing_operand", "without its second input"),
        (lambda a, b: b, "missing_operand", "without its first input"),
        (lambda a, b: a + 0.9 * b, "scale", "second input times 0."),
        (lambda a, b: a + b - 0.05 / 0.07, "zero_point", "second input zero point 91 instead of 90"),
    ],
)
def test_a_sum_of_two_inputs(mistake: Any, kind: str, words: str) -> None:
    model, stored, a, b = two_inputs()
    codes = quantised(mistake(a, b) + 30)
    cause = Causes(model).explain("yq", codes, {**stored, "yq": codes}, a + b + 30)
    assert cause is not None
    assert (cause.kind, words in cause.evidence) == (kind, True), cause.evidence


def test_a_table_read_one_entry_further() -> None:
    m = Qdq(dtype="uint8", seed=5)
    real = m.op("Sigmoid", [m.dq(m.q(m.input("x", (1, 4, 8, 8)), 0.03, 120, out="xq"))])
    model = OnnxModel("table", "", m.model(m.dq(m.q(real, 1 / 256, 0, out="yq"))))
    x = np.random.default_rng(0).integers(40, 220, (1, 4, 8, 8)).astype(np.uint8)

    def sigmoid(codes: np.ndarray) -> np.ndarray:
        return 256 / (1 + np.exp(-(codes.astype(float) - 120) * np.float64(np.float32(0.03))))

    codes = quantised(sigmoid(x + 1))
    cause = Causes(model).explain("yq", codes, {"xq": x, "yq": codes}, sigmoid(x))
    assert cause is not None
    assert (cause.kind, "one entry further" in cause.evidence) == ("shifted_table", True)


def test_a_quantised_picture_in_another_colour_order_is_a_wrong_input(fixtures_dir: Path) -> None:
    picture = np.asarray(Image.open(fixtures_dir / "photos" / "china.png").convert("RGB"))
    m = Qdq(dtype="int8", seed=5)
    rows, columns = picture.shape[:2]
    xq = m.q(m.input("x", (1, 3, rows, columns)), 1 / 127, 0, out="xq")
    model = OnnxModel("input", "", m.model(m.dq(xq)))
    x = (picture.transpose(2, 0, 1)[None] / np.float32(127.5) - 1).astype(np.float32)
    real = x.astype(np.float64) / np.float64(np.float32(1 / 127))
    codes = np.clip(np.rint(real[:, ::-1]), -128, 127).astype(np.int8)
    cause = Causes(model).explain("xq", codes, {"x": x, "xq": codes}, real)
    assert cause is not None
    assert (cause.kind, "reversed colour order" in cause.evidence) == ("wrong_input", True)


@pytest.mark.parametrize("name", ["detector_qdq_u8", "digits_qop_u8"])
def test_no_planted_fault_of_the_virtual_npu_is_given_another_cause(name: str) -> None:
    model = Model(next(s for s in sources() if s.name == name))
    assert EXPECTED.keys() == FAULT_KINDS.keys()
    told = [
        one for planted in faults_of(model, tuple(FAULT_KINDS), 1, 0) for one in model.told(planted[2], *planted[:2])
    ]
    assert [one for one in told if one.verdict == "wrong"] == []
    assert sum(one.verdict == "right" for one in told) >= 0.8 * len(told)
