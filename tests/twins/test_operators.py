"""Every operator of the virtual NPU's tests as a twin: the very codes on LiteRT, or a refusal that says why."""

import numpy as np
import pytest

from equivcheck.twins.convert import ConvertError, convert
from twins.proving import loaded, proved
from vnpu.cases import CASES

SEEDS = range(3)
# Legal, but not the profile's own codes: that has MEAN's arithmetic over each window, a convolution of 1/n is more exact.
MORE_EXACT = {("AveragePool", "counting pads")}
# A thousand classes at a small scale: the SOFTMAX of ai-edge-litert 2.3 aborts (tests/cli/test_convert.py has it contained).
ABORTS = {("Softmax", "long")}
REFUSED = {
    ("Conv", "u8 weights"): "weights with a zero point, and one scale a channel",
    ("Conv", "3-d"): "windows over 3 axes",
    ("AveragePool", "padded"): "windows of different sizes",
    ("AveragePool", "ceil"): "windows of different sizes",
    ("AveragePool", "same"): "windows of different sizes",
    ("ReduceSum", "dropped"): "ReduceSum over other than the spatial axes",
    ("ReduceSum", "all"): "ReduceSum over other than the spatial axes",
    ("Resize", "linear half_pixel_symmetric"): "linear Resize",
    ("Resize", "linear half_pixel_symmetric rescaled"): "linear Resize",
    ("Resize", "linear by (1.5, 0.7)"): "linear Resize",
    ("Resize", "crop"): "linear Resize",
    ("Resize", "crop nearest"): "tf_crop_and_resize",
    ("LogSoftmax", ""): "several operators in float",
    ("LogSoftmax", "axis 1"): "several operators in float",
    ("LpNormalization", ""): "several operators in float",
    ("LpNormalization", "p 1"): "several operators in float",
    ("AveragePool+Add", ""): "several operators in float",
    ("Softmax+Mul", ""): "several operators in float",
}  # fmt: skip


ALL = [(kind, case) for kind, cases in CASES.items() for case in cases if (kind, case) not in ABORTS]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(("kind", "case"), ALL)
def test_an_operator_has_the_very_codes_or_is_refused_for_a_reason(kind: str, case: str, dtype: str) -> None:
    reasons = []
    for seed in SEEDS:
        model = loaded(CASES[kind][case](np.random.default_rng(seed), dtype).model)
        try:
            twin = convert(model)
        except ConvertError as error:
            reasons.append(error.refused[0].reason)
            continue
        proof = proved(model, twin=twin)
        assert proof.proved, proof.wrong
        assert (kind, case) in MORE_EXACT or proof.equal == proof.compared
    assert bool(reasons) == ((kind, case) in REFUSED)
    assert all(REFUSED[kind, case] in reason for reason in reasons)
