"""Profile `ort` against ONNX Runtime itself, operator by operator: no code differs. These are the proofs of ort.toml."""

import numpy as np
import pytest

from equivcheck.vnpu.profiles import load_profile
from vnpu.cases import CASES, gemm
from vnpu.graphs import compiled, random_codes, run_ort

SEEDS, FEW = 20, 5
# Operators whose integer arithmetic is written anew here; the others call ONNX Runtime's kernel or move codes.
QLINEAR = {
    "Conv",
    "Gemm",
    "MatMul",
    "Add",
    "Mul",
    "AveragePool",
    "GlobalAveragePool",
    "Softmax",
    "Sigmoid",
    "LeakyRelu",
}
# Q-DQ-Q-DQ with two scales is rewritten at ENABLE_ALL, so DQ-Q alone is compared with ONNX Runtime's own two kernels.
# onnxruntime 1.32 cannot load the int8 chain at ENABLE_ALL: "output_dtype INT8 does not match y_zero_point type UINT8".
UNOPTIMISED = {"QuantizeLinear", "Transpose+Sigmoid+Reshape"}


def codes_off(make, dtype, seeds, optimization="all"):
    """How many codes differ from ONNX Runtime's, of how many."""
    off = total = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        built = make(rng, dtype)
        program = compiled(built.graph, "ort")
        codes = {name: random_codes(rng, q, shape) for name, q, shape in built.inputs}
        feeds = {name: q.float_of(codes[name]) for name, q, _ in built.inputs}
        found = program.run(feeds)
        for name in codes:
            np.testing.assert_array_equal(found[f"{name}_q"], codes[name])
        for name, expected in run_ort(built, feeds, optimization).items():
            off += int((found[name].astype(np.int64) != expected).sum())
            total += expected.size
    return off, total


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(("operator", "special"), [(op, name) for op, cases in CASES.items() for name in cases])
def test_an_operator_gives_the_codes_of_onnx_runtime(operator, special, dtype, record_property):
    seeds = SEEDS if operator in QLINEAR and not special else FEW
    off, total = codes_off(CASES[operator][special], dtype, seeds, "disable" if operator in UNOPTIMISED else "all")
    record_property("codes", f"{total}")
    assert off == 0, f"{off} of {total} codes differ"


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_qgemm_ignores_the_scale_of_the_bias(dtype):
    off, _ = codes_off(lambda rng, d: gemm(rng, d, own_bias=1.7), dtype, SEEDS)
    assert off == 0


def test_every_proof_of_the_profile_has_its_cases():
    proved = {name for name, proof in load_profile("ort").proofs.items() if proof.proved}
    assert proved == set(CASES)
