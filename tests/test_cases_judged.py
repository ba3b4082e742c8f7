"""The `m*`, `q*` and `t22` cases of ../shared/cases through `compare`, and cases of the same kinds made here.

A case's code PASS is `equivalent`, FAIL is `different`. POLICY is ours: equal NaNs pass and are counted; a tensor that the
candidate lacks is a difference; a dump that its own readers contradict is `inconclusive`, and its step is no culprit. `tol` of
a case becomes a rule file. Without one a step is legal when it is within the legal excess of its operators; where that says
something else than the case, `OTHERWISE` says what and why, and both are asserted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import equivcheck
from builder import Qdq
from equivcheck.result import Result, Tensor

CODES = {"PASS": "equivalent", "FAIL": "different"}
POLICY = {
    "m08_nan_both_same_place": "equivalent",
    "m46_missing_and_extra_tensors": "different",
    "q20_ort_fusion_tie": "equivalent",
    "q31_reused_buffer_dump": "inconclusive",
}
WITHOUT_MODEL = [
    "m01_both_zero", "m03_ref_zero", "m05_constant_offset", "m07_shifted_uint8", "m08_nan_both_same_place",
    "m10_nan_ref_only", "m12_inf_sign_flip", "m14_uint8_wrap", "m16_int64_beyond_2_53", "m19_fp16_sum_overflow",
    "m21_f64_square_overflow", "m23_bfloat16", "m25_float8_e5m2_equal", "m27_uint4_wrap", "m28_empty_equal",
    "m30_scalar_vs_1", "m32_nhwc_candidate", "m34_reshaped_not_transposed", "m36_single_outlier",
    "m38_sparse_one_lsb", "m40_uint8_vs_int8_zp", "m42_relative_error_near_zero", "m44_one_dead_channel",
    "m46_missing_and_extra_tensors", "m48_argmax_tie", "m50_byte_order_and_strides",
]  # fmt: skip
WITH_MODEL = [
    "q01_per_channel_scale0", "q03_axis_minus_one_square", "q05_int16_activation_low_byte_lost",
    "q07_uint8_zp0_vs_int8_zp128", "q09_int32_bias_as_int16", "q12_u8s8_pair_saturation",
    "q13_dynamic_quant_convinteger", "q15_blocked_int4_nibble_swap", "q17_ties_away_from_zero", "q20_ort_fusion_tie",
    "q23_fault_at_layer_4", "q25_all_dumps_nhwc", "q26_wraps_instead_of_saturating", "q28_relu6_ignores_zero_point",
    "q31_reused_buffer_dump", "q32_fp16_division_precision", "t22_qdq_split_at_gap",
]  # fmt: skip
# case -> (verdict without its tolerance, culprits, why)
OTHERWISE = {
    "q17_ties_away_from_zero": ("equivalent", [], "both neighbours of a tie are correct rounding"),
    "q32_fp16_division_precision": ("equivalent", [], "0.03 LSB beyond the tie: the division's own precision"),
    "t22_qdq_split_at_gap": ("different", [["gap_q"]], "an average that is floored, not rounded, is no legal pool"),
    "q23_fault_at_layer_4": ("different", [["t2"], ["t4"]], "one LSB in 40 of 144 elements of one Conv is no rounding"),
}
CONSTANTS = {"q03_axis_minus_one_square": ("wd", "yq"), "q15_blocked_int4_nibble_swap": ("wd", "y")}


class Case:
    """A folder, with what the case expects."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.folder, self.made = folder, made
        self.expect: dict[str, Any] = json.loads((folder / "expect.json").read_text())["expect"]
        proto = (folder / "ref_t.pb").exists()
        self.candidate = folder / ("cand_t.pb" if proto else "cand.npz")
        self.reference = folder / ("ref_t.pb" if proto else "ref.npz")
        if not self.reference.exists():
            self.reference = folder / "expected.npz"

    def write(self, name: str, text: str) -> Path:
        path = self.made / name
        path.write_text(text)
        return path

    @property
    def tolerance(self) -> Path | None:
        """The case's tolerance as a rule file."""
        return None if "tol" not in self.expect else self.write("tol.toml", rules(self.expect["tol"]))

    @property
    def verdict(self) -> str:
        return POLICY.get(self.folder.name) or CODES[self.expect["verdict_code"]]

    def pair(self, **options: Any) -> Result:
        return equivcheck.compare(self.reference, self.candidate, **options)

    def with_model(self, *, alone: bool = False, **options: Any) -> Result:
        sides = (self.candidate,) if alone else (self.reference, self.candidate)
        name = self.folder.name
        if name.startswith("q25"):
            options.setdefault("candidate_layout", "nhwc")
        if name.startswith("q07"):
            quant = self.expect["quant"]["cand"]
            options.setdefault("names", self.write("names.toml", declared({n: tuple(q) for n, q in quant.items()})))
            options.setdefault("reference_names", self.write("none.toml", ""))
        return equivcheck.compare(
            *sides, model=self.folder / "model.onnx", inputs=str(self.folder / "inputs.npz"), **options
        )


def rules(tol: dict[str, float]) -> str:
    if "lsb" in tol:
        return f'[[rule]]\non = "local"\nexcess = {tol["lsb"]}\n[[rule]]\non = "accumulated"\nmax_lsb = {tol["lsb"]}\n'
    return "[[rule]]\n" + "".join(f"{key} = {value}\n" for key, value in tol.items())


def declared(quantised: dict[str, tuple[float, int]]) -> str:
    """A names file that says scale and zero point."""
    return "".join(
        f'[[tensor]]\nname = "{name}"\nscale = {scale}\nzero_point = {zero}\n'
        for name, (scale, zero) in quantised.items()
    )


def kind_of(dtype: str) -> np.dtype[Any]:
    """The type without its byte order: codes of two types are compared only where their scales are declared."""
    return np.dtype(dtype).newbyteorder("=")


def row(result: Result, name: str = "t") -> Tensor:
    return next(tensor for tensor in result.tensors if tensor.name == name)


def culprits(result: Result) -> list[list[str]]:
    return [culprit.outputs for culprit in result.culprits]


@pytest.fixture
def case(shared: Path, tmp_path: Path) -> Callable[[str], Case]:
    return lambda name: Case(next((shared / "cases").glob(f"{name}*")), tmp_path)


def test_every_case_of_the_folder_is_here(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = sorted(path.name for path in (shared / "cases").iterdir() if path.name[0] in "mq" or path.name[:3] == "t22")
    with capsys.disabled():
        print(f"\n{len(found)} cases judged: {len(WITHOUT_MODEL)} without a model, {len(WITH_MODEL)} with theirs")
    assert found == WITHOUT_MODEL + WITH_MODEL


# -- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_tensors_by_name_get_the_verdict_of_the_case(case: Callable[[str], Case], name: str) -> None:
    one = case(name)
    result = one.pair(tolerance=one.tolerance)
    assert result.verdict == one.verdict, result.reason
    for tensor, figures in one.expect.get("metrics", {}).items():
        got = row(result, tensor).accumulated
        if not figures["comparable"] or kind_of(figures["ref_dtype"]) != kind_of(figures["cand_dtype"]):
            assert (row(result, tensor).verdict, got) == ("incomparable", None)
            continue
        assert got is not None
        assert (got.n, got.mismatched) == (figures["n"], figures["n_mismatch"])
        assert (got.max_abs or 0.0) == pytest.approx(figures["max_abs"], rel=1e-12)
        assert got.nan == [figures.get("nan_ref", 0), figures.get("nan_cand", 0)]
        assert got.inf == [figures.get("inf_ref", 0), figures.get("inf_cand", 0)]


@pytest.mark.parametrize("alone", [False, True], ids=["pair", "alone"])
@pytest.mark.parametrize("name", WITH_MODEL)
def test_steps_get_the_verdict_of_the_case(case: Callable[[str], Case], name: str, alone: bool) -> None:
    one = case(name)
    result = one.with_model(alone=alone, tolerance=one.tolerance)
    assert result.verdict == one.verdict, result.reason


@pytest.mark.parametrize("alone", [False, True], ids=["pair", "alone"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_without_the_case_s_tolerance_a_step_is_held_to_what_is_legal(
    case: Callable[[str], Case], name: str, alone: bool
) -> None:
    verdict, blamed, _ = OTHERWISE[name]
    result = case(name).with_model(alone=alone)
    assert (result.verdict, culprits(result)) == (verdict, blamed)


@pytest.mark.parametrize("name", [n for n in WITH_MODEL if n not in CONSTANTS])
def test_the_first_value_that_differs_is_the_case_s_and_values_before_are_identical(
    case: Callable[[str], Case], name: str
) -> None:
    one = case(name)
    result = one.with_model()
    if "first_divergent" in one.expect:
        wanted = one.expect["first_divergent"]
        if wanted == "xz (or xq)":  # two outputs of one node
            wanted = "xq"
        assert result.first_mismatch == wanted
    if "first_bitwise_divergent" in one.expect:
        assert result.first_mismatch == one.expect["first_bitwise_divergent"]
    for equal in one.expect.get("equal", []):
        found = [tensor for tensor in result.tensors if equal in (tensor.name, *tensor.aliases)]
        assert all(tensor.accumulated is not None and tensor.accumulated.identical for tensor in found)
        assert all(tensor.verdict == "identical" for tensor in found)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_wrong_constant_shows_in_its_step_and_by_name_at_the_constant(case: Callable[[str], Case], name: str) -> None:
    constant, made = CONSTANTS[name]
    result = case(name).with_model()
    assert (result.first_mismatch, culprits(result)) == (made, [[made]])
    assert case(name).pair().first_mismatch == constant


@pytest.mark.parametrize("name", [n for n in WITH_MODEL if n.startswith(("q01", "q09"))])
def test_the_wrong_channels_are_named(case: Callable[[str], Case], name: str) -> None:
    one = case(name)
    blamed = row(one.with_model(), "yq").local.candidate
    assert blamed is not None
    assert blamed.worst_channel is not None
    assert blamed.worst_channel.index not in one.expect["equal_channels"]


def test_two_steps_off_by_an_lsb_do_not_hide_the_real_fault(case: Callable[[str], Case]) -> None:
    one = case("q23")
    result = one.with_model(tolerance=one.tolerance)
    assert culprits(result) == [["t4"]]
    found = {
        name: row(result, name).accumulated.max_lsb  # type: ignore[union-attr]  # all of them are in both dumps
        for name in one.expect["max_lsb"]
    }
    assert found == one.expect["max_lsb"]


# -- words -------------------------------------------------------------------------------------------------------------


def test_equal_nans_pass_and_are_counted(case: Callable[[str], Case]) -> None:
    found = row(case("m08").pair())
    assert found.verdict == "identical"
    assert found.accumulated is not None
    assert (found.accumulated.nan, found.accumulated.nan_mismatch) == ([1, 1], 0)
    assert "1 NaN" in found.reason


def test_missing_and_extra_tensors_are_listed(case: Callable[[str], Case]) -> None:
    result = case("m46").pair()
    assert "conv2: the candidate does not have it" in result.reason
    assert "only in the candidate: dbg" in str(result)
    assert {tensor.name: tensor.verdict for tensor in result.tensors} == {
        "conv1": "identical", "conv2": "different", "out": "identical", "dbg": "unjudged",
    }  # fmt: skip


def test_the_only_wrong_element_is_named(case: Callable[[str], Case]) -> None:
    result = case("m36").pair()
    found = row(result).accumulated
    assert found is not None
    assert found.argmax == [0, 500, 3, 3]
    assert found.cosine == pytest.approx(0.99995, abs=1e-6)
    assert "[0, 500, 3, 3]" in result.reason


def test_the_dead_channel_is_named(case: Callable[[str], Case]) -> None:
    found = row(case("m44").pair()).accumulated
    assert found is not None
    assert found.worst_channel is not None
    assert found.worst_channel.index == 17


def test_channels_last_is_hinted_at_and_passes_where_declared(case: Callable[[str], Case]) -> None:
    assert "--candidate-layout nhwc" in case("m32").pair().reason
    assert case("m32").pair(candidate_layout="nhwc").verdict == "equivalent"


def test_memory_that_was_labelled_anew_is_not_taken_for_channels_last(case: Callable[[str], Case]) -> None:
    """The shape alone would fit both; the numbers are the reference's in their order in memory."""
    reason = case("m34").pair().reason
    assert "reshape" in reason
    assert "nhwc" not in reason
    assert case("m34").pair(candidate_layout="nhwc").verdict == "different"


def test_a_dump_of_channels_last_is_no_verdict_on_any_step_but_a_hint(case: Callable[[str], Case]) -> None:
    for alone in (False, True):
        result = case("q25").with_model(alone=alone, candidate_layout=None)
        assert result.verdict in ("inconclusive", "different")
        assert result.culprits == []
        assert "--candidate-layout nhwc" in str(result)


def test_declared_quantisation_compares_what_codes_stand_for(case: Callable[[str], Case]) -> None:
    one = case("m40")
    (scale, zero), (_, other) = one.expect["quant"]["ref"], one.expect["quant"]["cand"]
    names = one.write("cand.toml", declared({"t": (scale, other)}))
    result = one.pair(names=names, reference_names=one.write("ref.toml", declared({"t": (scale, zero)})))
    assert (result.verdict, row(result).verdict) == ("equivalent", "identical")
    assert "declare scale and zero point (--names)" in one.pair().reason


def test_declared_quantisation_gives_the_figures_of_real_values(case: Callable[[str], Case]) -> None:
    one = case("m07")
    quant, real = one.expect["quant"], one.expect["metrics_dequantized"]
    result = one.pair(names=one.write("n.toml", declared({"t": (quant["scale"], quant["zero_point"])})))
    found = row(result).accumulated
    assert result.verdict == "different"
    assert found is not None
    assert found.domain == "real"
    assert found.cosine == pytest.approx(real["cosine"], rel=1e-9)
    assert found.snr_db == pytest.approx(real["snr_db"], rel=1e-9)
    assert found.max_abs == one.expect["metrics"]["t"]["max_abs"]


def test_a_dump_of_reused_memory_is_said_and_nobody_is_blamed(case: Callable[[str], Case]) -> None:
    result = case("q31").with_model()
    assert (result.verdict, result.culprits, result.first_mismatch) == ("inconclusive", [], "q0")
    assert "q0 is untrustworthy" in result.reason
    assert not any("amplifies" in note for note in result.notes), "the wrong dump is no rounding that grew"


def test_a_dump_of_inner_values_that_moved_the_output_is_told_by_its_output(case: Callable[[str], Case]) -> None:
    one = case("q20")
    looked_at = one.folder / "cand_instrumented.npz"
    result = equivcheck.compare(
        one.candidate, looked_at, model=one.folder / "model.onnx", inputs=str(one.folder / "inputs.npz")
    )
    moved = row(result, "pq")
    assert moved.accumulated is not None
    assert (moved.accumulated.max_lsb, moved.accumulated.mismatched) == (1.0, one.expect["metrics"]["y"]["n_mismatch"])


# -- the same kinds, made here -----------------------------------------------------------------------------------------


def dump(path: Path, **tensors: Any) -> Path:
    np.savez(path, **tensors)
    return path


@pytest.fixture
def net(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """x -> xq -> Conv -> cq -> GlobalAveragePool -> pq -> y, and every value as ONNX Runtime computes it unoptimised."""
    m = Qdq(dtype="int8", seed=4)
    xq = m.q(m.input("x", (1, 3, 6, 6)), 0.02, 3, out="xq")
    cq = m.q(m.conv(m.dq(xq), 4), 0.05, -1, out="cq")
    pq = m.q(m.op("GlobalAveragePool", [m.dq(cq)]), 0.01, 0, out="pq")
    path = tmp_path / "net.onnx"
    onnx.save(m.model(m.dq(pq)), path)
    x = np.random.default_rng(0).normal(size=(1, 3, 6, 6)).astype(np.float32)
    equivcheck.record(path, backend="ort:optimization=disable", inputs=x, save_to=tmp_path / "r")
    from equivcheck.recording import load

    return path, {name: array.copy() for name, array in load(tmp_path / "r").recordings[0].values.items()}


def test_channels_last_dumps_are_judged_once_declared(net: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    model, values = net
    turned = {n: np.ascontiguousarray(a.transpose(0, 2, 3, 1)) if a.ndim == 4 else a for n, a in values.items()}
    path = dump(tmp_path / "nhwc.npz", **turned)
    assert "--candidate-layout nhwc" in str(equivcheck.compare(path, model=model))
    result = equivcheck.compare(path, model=model, candidate_layout="nhwc")
    assert (result.verdict, result.coverage.judged) == ("equivalent", 3)


def test_codes_of_the_other_signedness_are_judged_once_declared(
    net: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    model, values = net
    shifted = {n: (a.astype(np.int16) + 128).astype(np.uint8) for n, a in values.items() if a.dtype == np.int8}
    path = dump(tmp_path / "u8.npz", x=values["x"], **shifted)
    assert "zero_point = 131" in str(equivcheck.compare(path, model=model, values="all"))
    names = tmp_path / "names.toml"
    names.write_text(declared({"xq": (0.02, 131), "cq": (0.05, 127), "pq": (0.01, 128)}))
    result = equivcheck.compare(path, model=model, names=names)
    assert (result.verdict, result.coverage.judged) == ("equivalent", 3)


@pytest.mark.parametrize("channel", range(4))
def test_one_channel_that_wraps_is_the_culprit_and_named(
    net: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, channel: int
) -> None:
    model, values = net
    wrong = values | {"cq": values["cq"].copy()}
    wrong["cq"][0, channel] ^= np.int8(-128)
    del wrong["pq"]
    result = equivcheck.compare(dump(tmp_path / "w.npz", **wrong), model=model)
    assert culprits(result) == [["cq"]]
    blamed = result.culprits[0].local.candidate
    assert blamed is not None
    assert blamed.worst_channel is not None
    assert blamed.worst_channel.index == channel


def test_an_overwritten_dump_between_right_steps_is_untrustworthy(
    net: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    model, values = net
    stale = values | {"cq": np.random.default_rng(1).integers(-128, 128, values["cq"].shape).astype(np.int8)}
    result = equivcheck.compare(dump(tmp_path / "s.npz", **stale), model=model)
    assert (result.verdict, result.culprits) == ("inconclusive", [])
    assert "cq is untrustworthy" in result.reason


@pytest.mark.parametrize("missing", [["cq"], ["xq"], ["xq", "cq"]])
def test_the_limit_over_missing_values_is_the_same_alone_and_beside_a_reference(
    net: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, missing: list[str]
) -> None:
    """The noise that stands for missing values must not depend on what was judged before."""
    model, values = net
    path = dump(tmp_path / "fewer.npz", **{name: array for name, array in values.items() if name not in missing})
    limits = [
        {tensor.name: tensor.limit.max for tensor in result.tensors if tensor.limit is not None}
        for result in (equivcheck.compare(path, model=model), equivcheck.compare(path, path, model=model))
    ]
    assert limits[0] == limits[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "uint4", "int4"])
def test_low_precision_protos_are_compared_by_their_numbers(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    one = np.array([[0, 1, 2, 3, 4, 5]], getattr(ml_dtypes, dtype))
    other = one.copy()
    other[0, 4] = 7
    for name, array in (("a", one), ("b", one.copy()), ("c", other)):
        (tmp_path / f"{name}.pb").write_bytes(numpy_helper.from_array(array, "t").SerializeToString())
    equal = equivcheck.compare(tmp_path / "a.pb", tmp_path / "b.pb")
    assert (equal.verdict, row(equal).verdict) == ("equivalent", "identical")
    wrong = equivcheck.compare(tmp_path / "a.pb", tmp_path / "c.pb")
    found = row(wrong).accumulated
    assert wrong.verdict == "different"
    assert found is not None
    wanted = abs(float(other[0, 4]) - 4.0)
    assert (found.mismatched, found.max_abs, found.argmax) == (1, wanted, [0, 4])
