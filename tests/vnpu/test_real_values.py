"""`real` and the profile `exact`: against rational numbers where there are sums, against float32 engines elsewhere."""

from fractions import Fraction

import numpy as np
import pytest

from equivcheck.vnpu.ir import Accumulate
from vnpu.cases import CASES, conv, gemm
from vnpu.graphs import compiled, random_codes, run_ort
from vnpu.test_accumulate import convolution

# float32 evaluation of DQ-op-Q is off by some 2^-24 of the largest term, in codes; sums of 1,000 terms by more
FLOAT32_SLACK = 2e-3
# ONNX Runtime's definition at these cases is its own: NaN (Sqrt of a negative, 0 / 0) has no real value
NO_REAL = {"Sqrt", "Div", "Pow"}


def run_case(make, dtype, seed, profile="exact"):
    rng = np.random.default_rng(seed)
    built = make(rng, dtype)
    program = compiled(built.graph, profile)
    codes = {name: random_codes(rng, q, shape) for name, q, shape in built.inputs}
    feeds = {name: q.float_of(codes[name]) for name, q, _ in built.inputs}
    return built, program, program.run(feeds), feeds


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("operator", "special"), [(op, name) for op, cases in CASES.items() for name in cases if op not in NO_REAL]
)
def test_the_real_value_is_what_onnx_runtime_rounds_in_float(operator, special, dtype):
    for seed in range(2):
        built, program, found, feeds = run_case(CASES[operator][special], dtype, seed)
        step = built.graph.steps[-1]
        real = program.real(step, found)
        for name, expected in run_ort(built, feeds, "disable").items():
            limits = np.iinfo(found[name].dtype)
            assert np.abs(np.clip(real[name], limits.min, limits.max) - expected).max() <= 0.5 + FLOAT32_SLACK
            assert np.abs(np.clip(real[name], limits.min, limits.max) - found[name]).max() <= 0.5
            assert real[name].dtype == np.float64
            assert real[name].flags.c_contiguous
            assert real[name].shape == expected.shape


def rational_codes(op: Accumulate, sums):
    """(acc * sx * sw + bias * sb) / so as Fractions of the stored float32 scales, in codes."""
    real = []
    for channel in range(sums.shape[1]):
        sw = Fraction(float(op.weight_scale.ravel()[channel if op.weight_scale.size > 1 else 0]))
        sb = Fraction(float(op.bias_scale.ravel()[channel if op.bias_scale.size > 1 else 0]))
        offset = int(op.bias[channel]) * sb if op.bias is not None else Fraction(0)
        for acc in sums[:, channel].ravel():
            real.append((int(acc) * Fraction(op.x.codes.scale) * sw + offset) / Fraction(op.out.scale))
    return real


@pytest.mark.parametrize("maker", [conv, lambda rng, dtype: gemm(rng, dtype, own_bias=1.7)])
@pytest.mark.parametrize("seed", range(4))
def test_exact_rounds_the_rational_number_to_its_nearest_code(maker, seed):
    built, program, found, _ = run_case(maker, "int8", seed)
    step = built.graph.steps[-1]
    op = program.op(step)
    x = found[op.x.name].astype(np.int64) - op.x.codes.zero
    if op.kind == "Conv":
        keys = ("strides", "pads", "dilations", "group")
        sums = convolution(x, op.weight, **{key: op.attributes[key] for key in keys})
    else:
        sums = x @ op.weight
    made = np.stack([channel.ravel() for channel in np.moveaxis(found[op.outputs[0]], 1, 0)]).ravel()
    for code, real in zip(made, rational_codes(op, sums), strict=True):
        nearest = min(max(round(real) + op.out.zero, -128), 127)  # round() of a Fraction is half-even
        assert code == nearest


def test_a_tie_goes_to_the_even_quotient_before_the_zero_point_is_added():
    from vnpu.graphs import Q, quantised_model

    built = quantised_model([], {"x": Q(2.0, 5, "int8")}, {"x": (1, 4)}, {"x": Q(1.0, 0, "int8")})
    found = compiled(built.graph, "exact").run({"x": np.array([[1, 3, 5, -1]], np.float32)})
    np.testing.assert_array_equal(found["x_oq"], [[0 + 5, 2 + 5, 2 + 5, 0 + 5]])


@pytest.mark.parametrize("profile", ["exact", "ort", "tflite-reference"])
@pytest.mark.parametrize("seed", range(4))
def test_a_leaky_relu_in_the_step_of_its_convolution_is_one_operator(profile, seed):
    after = [("LeakyRelu", ["y"], ["z"], {"alpha": 0.1})]
    built, program, found, feeds = run_case(lambda r, d: conv(r, d, after=after), "int8", seed, profile)
    assert program.op(built.graph.steps[-1]).slope == np.float32(0.1)
    (name,) = built.graph.steps[-1].outputs
    real = np.clip(program.real(built.graph.steps[-1], found)[name], -128, 127)
    slack = 0.6 if profile == "tflite-reference" else 1e-3  # two roundings, the first at up to twice the scale
    assert np.abs(real - found[name]).max() <= 0.5 + slack
    assert np.abs(real - run_ort(built, feeds, "disable")[name]).max() <= 0.5 + FLOAT32_SLACK
