"""What follows from recordings: verdicts, culprits, coverage and notes, with the values of one side falsified in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equivcheck
from equivcheck.backends.fake import FakeBackend
from equivcheck.errors import EngineCrashed, EngineTimeout
from equivcheck.result import Result

POOLED = "pooled_QuantizeLinear_Output"
DOWN = "down_relu_QuantizeLinear_Output"
STEM = "stem_relu_QuantizeLinear_Output"
LOGITS = "logits_QuantizeLinear_Output"
IMAGE = np.random.default_rng(0).random((1, 1, 8, 8)).astype(np.float32)
Values = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def digits(fixtures_dir: Path) -> Path:
    return fixtures_dir / "digits_qdq_s8.onnx"


def shifted(by: int, channel: int = 5, name: str = POOLED) -> Callable[[Values], Values]:
    """Add `by` codes to one channel of one value."""

    def change(values: Values) -> Values:
        array = values[name].astype(int)
        array[:, channel] += by
        values[name] = array.clip(-128, 127).astype(np.int8)
        return values

    return change


def without(*names: str) -> Callable[[Values], Values]:
    return lambda values: {name: array for name, array in values.items() if name not in names}


def ran(digits: Path, change: Callable[[Values], Any] = lambda v: v, **options: Any) -> Result:
    return equivcheck.diff(digits, inputs=options.pop("inputs", IMAGE), candidate=FakeBackend(change), **options)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_an_honest_candidate_is_equivalent_at_every_step(digits: Path) -> None:
    result = ran(digits)
    assert result.equivalent
    assert (result.coverage.judged, result.coverage.steps) == (9, 9)
    assert (result.culprits, result.reference_culprits, result.first_culprit) == ([], [], None)
    assert {t.verdict for t in result.tensors} <= {"identical", "equivalent"}


def test_a_code_that_its_step_cannot_give_makes_that_step_the_culprit(digits: Path) -> None:
    result = ran(digits, shifted(5))
    assert result.verdict == "different"
    assert result.first_culprit == 7
    culprit = result.culprits[0]
    assert (culprit.op_type, culprit.outputs) == ("GlobalAveragePool", [POOLED])
    assert culprit.local.candidate is not None
    assert culprit.local.candidate.worst == [0, 5, 0, 0]
    assert culprit.local.candidate.off == 1
    assert 4.0 <= culprit.local.candidate.excess <= 5.0  # five codes, less the rounding that was there
    assert culprit.limit is not None
    assert culprit.limit.max == pytest.approx(0.30)
    assert result.tensor(POOLED).would_pass_at["excess"] == pytest.approx(culprit.local.candidate.excess)
    assert result.first_mismatch == POOLED
    assert [c.step for c in result.culprits] == [7]  # its readers were right on what it made


@pytest.mark.parametrize("samples", [1, 2])
def test_a_dump_whose_reader_is_right_only_without_it_is_untrustworthy(digits: Path, samples: int) -> None:
    result = equivcheck.diff(digits, inputs=[IMAGE] * samples, candidate=FakeBackend(shifted(5), stale=True))
    assert result.verdict == "inconclusive"
    assert result.culprits == []
    row = result.tensor(POOLED)
    assert (row.verdict, row.reason[:45]) == ("unjudged", "untrustworthy: this dump is not what the engin"[:45])
    others = [t for t in result.tensors if t.name != POOLED]
    assert {t.verdict for t in others} <= {"identical", "equivalent"}
    assert "Flatten" in row.reason


def test_two_wrong_steps_in_a_row_are_two_culprits_and_no_bad_dump(digits: Path) -> None:
    both = lambda values: shifted(9, 5, POOLED)(shifted(40, 2, LOGITS)(values))  # noqa: E731  # local and short
    result = equivcheck.diff(digits, inputs=IMAGE, candidate=FakeBackend(both))
    assert result.verdict == "different"
    assert [c.op_type for c in result.culprits] == ["GlobalAveragePool", "Gemm"]


def test_no_value_delivered_is_inconclusive_never_a_pass(digits: Path) -> None:
    result = ran(digits, lambda values: {})
    assert result.verdict == "inconclusive"
    assert result.coverage.judged == 0
    assert result.reason == "no step could be judged"
    assert {t.verdict for t in result.tensors} == {"unjudged"}


def test_a_disturbed_observation_proves_nothing(digits: Path) -> None:
    result = equivcheck.diff(digits, inputs=IMAGE, candidate=FakeBackend(disturbed=True))
    assert result.verdict == "inconclusive"
    assert "changed its final output" in result.reason
    convicted = equivcheck.diff(digits, inputs=IMAGE, candidate=FakeBackend(shifted(5), disturbed=True))
    assert convicted.verdict == "different"


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_an_engine_that_refuses_makes_the_run_inconclusive(digits: Path, role: str) -> None:
    sides = {"reference": "ort", "candidate": "ort"} | {role: FakeBackend(refuse="no kernel for Conv")}
    result = equivcheck.diff(digits, inputs=IMAGE, **sides)
    assert result.verdict == "inconclusive"
    assert f"the {role} did not finish" in result.reason
    assert "no kernel for Conv" in result.reason
    assert result.coverage.judged == 0
    assert "INCONCLUSIVE" in str(result)


@pytest.mark.parametrize("error", [EngineCrashed, EngineTimeout])
def test_an_engine_that_fails_while_running_makes_the_run_inconclusive(digits: Path, error: type) -> None:
    class Failing(FakeBackend):
        def open(self, model):
            session = super().open(model)

            def run(sample, feeds):
                raise error("the worker is gone", last_words="stride")

            session.run = run
            return session

    result = equivcheck.diff(digits, inputs=IMAGE, candidate=Failing())
    assert result.verdict == "inconclusive"
    assert "the worker is gone: stride" in result.reason


def test_what_was_found_before_a_crash_still_convicts(digits: Path) -> None:
    backend = FakeBackend(shifted(5), crash=["2"])
    result = equivcheck.diff(digits, inputs=[IMAGE, IMAGE], candidate=backend)
    assert (result.verdict, result.first_culprit) == ("different", 7)


def test_a_crash_on_a_later_sample_keeps_what_was_judged_before_it(digits: Path) -> None:
    result = equivcheck.diff(digits, inputs=[IMAGE, IMAGE], candidate=FakeBackend(crash=["2"]))
    assert result.verdict == "inconclusive"
    assert result.coverage.judged == 9


# -- structure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda a: a.reshape(1, 32),
            "shape [1, 32] against [1, 32, 1, 1]; the same numbers in the same order: only reshaped",
        ),
        (lambda a: a.astype(np.int32), "dtype int32 against int8"),
        (lambda a: a.astype(np.float32), "dtype float32 against int8"),
    ],
    ids=["shape", "width", "float"],
)
def test_another_shape_or_dtype_is_incomparable_and_different(digits: Path, change: Any, said: str) -> None:
    result = ran(digits, lambda values: {**values, POOLED: change(values[POOLED])})
    row = result.tensor(POOLED)
    assert (row.verdict, row.reason) == ("incomparable", said)
    assert result.verdict == "different"
    assert said in result.reason
    assert result.coverage.judged == 8
    assert all(t.verdict in ("identical", "equivalent") for t in result.tensors if t.name != POOLED)


def test_a_value_that_the_model_does_not_know_changes_nothing(digits: Path) -> None:
    result = ran(digits, lambda values: {**values, "scratch": np.zeros(3)})
    assert result.equivalent
    assert "scratch" not in {t.name for t in result.tensors}


# -- values that are missing -------------------------------------------------------------------------------------------


def test_a_missing_value_merges_its_step_with_its_reader_and_is_listed(digits: Path) -> None:
    result = ran(digits, without(STEM, "pointwise_QuantizeLinear_Output"))
    assert result.equivalent
    assert result.coverage.judged == 7
    absent = {item.name: item.reason for item in result.coverage.absent}
    assert absent.keys() == {STEM, "pointwise_QuantizeLinear_Output"}
    assert all("the fake left it out" in reason for reason in absent.values())
    reader = result.tensor("depthwise_relu_QuantizeLinear_Output")
    assert reader.local.candidate is not None
    assert reader.local.candidate.merged == [STEM]
    assert reader.local.candidate.envelope > 0
    assert reader.verdict in ("identical", "equivalent")


def test_a_fault_inside_a_merged_step_is_found_at_the_value_that_shows_it(digits: Path) -> None:
    def change(values: Values) -> Values:
        values = shifted(60, 3, "depthwise_relu_QuantizeLinear_Output")(values)
        return without(STEM)(values)

    result = ran(digits, change)
    assert result.verdict == "different"
    assert result.culprits[0].outputs == ["depthwise_relu_QuantizeLinear_Output"]
    assert result.culprits[0].local.candidate is not None
    assert result.culprits[0].local.candidate.merged == [STEM]


@pytest.mark.parametrize("first", [0, 1])
def test_half_of_the_values_missing_leaves_the_other_half_judged(digits: Path, first: int) -> None:
    names = [t.name for t in ran(digits).tensors]
    missing = [name for name in names[first::2] if name != LOGITS]
    result = ran(digits, without(*missing))
    assert result.equivalent, str(result)
    assert result.coverage.judged == 9 - len(missing)
    assert {item.name for item in result.coverage.absent} == set(missing)
    assert f"{9 - len(missing)} of 9 steps judged" in str(result)


def test_a_missing_value_at_a_split_point_leaves_no_verdict(digits: Path) -> None:
    result = ran(digits, without(POOLED), split_at="GlobalAveragePool")
    assert result.verdict == "inconclusive"
    assert POOLED in result.reason
    assert "the fake left it out" in result.reason


# -- who is wrong ------------------------------------------------------------------------------------------------------


def test_a_wrong_reference_is_reported_and_nobody_else_is_blamed(digits: Path) -> None:
    result = equivcheck.diff(digits, inputs=IMAGE, reference=FakeBackend(shifted(5)), candidate="ort")
    assert result.verdict == "equivalent"
    assert result.culprits == []
    assert [c.step for c in result.reference_culprits] == [7]
    assert "the reference is not the model here" in result.reference_culprits[0].reason
    assert "reference is not the model here: step #7 GlobalAveragePool" in str(result)


def test_a_wrong_reference_is_not_called_amplified_rounding(digits: Path) -> None:
    result = equivcheck.diff(digits, inputs=IMAGE, reference=FakeBackend(shifted(5)), candidate="ort")
    assert not [note for note in result.notes if "the network amplifies" in note]


def test_a_fault_of_both_sides_is_a_fault_of_both(digits: Path) -> None:
    result = equivcheck.diff(digits, inputs=IMAGE, reference=FakeBackend(shifted(5)), candidate=FakeBackend(shifted(5)))
    assert (result.verdict, result.first_culprit) == ("different", 7)
    assert result.reference_culprits[0].step == 7


# -- several samples ---------------------------------------------------------------------------------------------------


def test_a_fault_that_one_sample_of_three_shows_is_still_a_culprit(digits: Path) -> None:
    calls: list[int] = []

    def second_only(values: Values) -> Values:
        calls.append(1)
        return shifted(5)(values) if len(calls) == 2 else values

    result = ran(digits, second_only, inputs=[IMAGE, IMAGE * 0.5, IMAGE * 0.25])
    assert result.first_culprit == 7
    row = result.tensor(POOLED)
    excess = [r.local.candidate.excess for r in row.by_sample if r.local.candidate]
    assert [r.sample for r in row.by_sample] == [s.id for s in result.samples] == ["1", "2", "3"]
    assert excess[0] <= 0.3 < excess[1]
    assert excess[2] <= 0.3
    assert row.local.candidate is not None
    assert (row.local.candidate.n, row.local.candidate.excess) == (96, excess[1])
    assert row.accumulated is not None
    assert row.accumulated.n == 96


def test_a_value_that_one_sample_lacks_is_judged_on_the_others(digits: Path) -> None:
    calls: list[int] = []

    def second_lacks(values: Values) -> Values:
        calls.append(1)
        return without(POOLED)(values) if len(calls) == 2 else values

    result = ran(digits, second_lacks, inputs=[IMAGE, IMAGE * 0.5])
    row = result.tensor(POOLED)
    assert row.local.candidate is not None
    assert row.local.candidate.n == 32
    assert result.verdict in ("equivalent", "inconclusive")


# -- what is looked at -------------------------------------------------------------------------------------------------


def test_values_splits_judges_both_sides_of_the_split_and_the_outputs(digits: Path) -> None:
    result = ran(digits, shifted(5), split_at="GlobalAveragePool", values="splits")
    assert [t.name for t in result.tensors] == [DOWN, POOLED, LOGITS]
    assert [t.roles for t in result.tensors] == [["before"], ["after"], ["output"]]
    assert (result.first_culprit, result.coverage.steps) == (7, 3)


def test_values_outputs_judges_the_outputs_only(digits: Path) -> None:
    result = ran(digits, shifted(5), values="outputs")
    assert [t.name for t in result.tensors] == [LOGITS]
    assert result.coverage.steps == 1


def test_an_unknown_choice_of_values_is_refused(digits: Path) -> None:
    with pytest.raises(equivcheck.EquivcheckError):
        ran(digits, values="everything")


# -- given limits ------------------------------------------------------------------------------------------------------


def rules(tmp_path: Path, text: str) -> str:
    path = tmp_path / "limits.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_rule_on_the_step_wins_over_the_table(digits: Path, tmp_path: Path) -> None:
    wide = rules(
        tmp_path, f'[[rule]]\ntensor = "{POOLED}"\non = "local"\nexcess = 5\n[[rule]]\nop_type = "Flatten"\nexcess = 5'
    )
    assert ran(digits, shifted(5), tolerance=wide).equivalent
    narrow = rules(tmp_path, f'[[rule]]\ntensor = "{POOLED}"\nexcess = 0.9')
    assert ran(digits, shifted(1), tolerance=narrow).tensor(POOLED).verdict != "different"
    assert ran(digits, shifted(2), tolerance=narrow).tensor(POOLED).verdict == "different"


def test_a_rule_since_the_input_can_forbid_what_steps_allow(digits: Path, tmp_path: Path) -> None:
    limits = rules(tmp_path, f'[[rule]]\ntensor = "{LOGITS}"\non = "accumulated"\nmax_lsb = 0')
    result = equivcheck.diff(digits, inputs=IMAGE, candidate="vnpu", tolerance=limits)
    row = result.tensor(LOGITS)
    assert row.accumulated is not None
    assert (row.verdict == "different") == bool(row.accumulated.max_lsb)
    if row.verdict == "different":
        assert result.verdict == "different"
        assert result.culprits == []  # no step is wrong: the rule is stricter than rounding


LIMITS = {
    "max_abs = 5": True,
    "max_abs = 4.9": False,
    "max_lsb = 5": True,
    "max_lsb = 4": False,
    "mismatch_share = 0.032": True,
    "mismatch_share = 0.031": False,
    "bias_lsb = 0.2": True,
    "bias_lsb = 0.1": False,
    "cosine = 0.9": True,
    "cosine = 1.0": False,
    "snr_db = 1": True,
    "snr_db = 90": False,
    "atol = 4": False,
}


@pytest.mark.parametrize(("limit", "passes"), LIMITS.items())
@pytest.mark.parametrize("sign", [1, -1])
def test_every_limit_since_the_input_is_held(digits: Path, tmp_path: Path, limit: str, passes: bool, sign: int) -> None:
    """One of 32 codes is 5 off: max 5, bias 5/32 = 0.156, share 1/32 = 0.03125."""
    text = f'[[rule]]\non = "local"\nexcess = 9\n[[rule]]\ntensor = "{POOLED}"\non = "accumulated"\n{limit}'
    options = {"reference": FakeBackend(), "tolerance": rules(tmp_path, text), "values": "splits"}
    result = ran(digits, shifted(5 * sign), split_at=f"value:{POOLED}", **options)
    assert (result.tensor(POOLED).verdict == "equivalent") == passes, result.tensor(POOLED).reason


@pytest.mark.parametrize("limit", ["atol = 5", "rtol = 9"])
def test_atol_and_rtol_hold_for_codes_too(digits: Path, tmp_path: Path, limit: str) -> None:
    text = f'[[rule]]\non = "local"\nexcess = 9\n[[rule]]\ntensor = "{POOLED}"\non = "accumulated"\n{limit}'
    result = ran(digits, shifted(5), reference=FakeBackend(), tolerance=rules(tmp_path, text))
    assert result.tensor(POOLED).verdict == "equivalent"


@pytest.mark.parametrize("preset", ["bitwise", "close"])
def test_presets_hold_codes_to_equality(digits: Path, preset: str) -> None:
    same = ran(digits, reference=FakeBackend(), tolerance=preset)
    assert same.equivalent
    other = ran(digits, shifted(1), reference=FakeBackend(), tolerance=preset)
    assert other.verdict == "different"
    assert other.first_mismatch == POOLED
    assert other.tensor(POOLED).reason.startswith("1 of 32 elements")


def test_close_forgives_floats_what_bitwise_does_not(fixtures_dir: Path) -> None:
    def nudge(values: Values) -> Values:
        return {name: a * np.float32(1.0005) if name == "logits" else a for name, a in values.items()}

    model = fixtures_dir / "digits_float.onnx"
    run = {"inputs": IMAGE, "reference": FakeBackend()}
    assert equivcheck.diff(model, candidate=FakeBackend(nudge), tolerance="close", **run).equivalent
    assert equivcheck.diff(model, candidate=FakeBackend(nudge), tolerance="bitwise", **run).verdict == "different"


@pytest.mark.parametrize("limit", ["cosine = 0.99", "snr_db = 20"])
def test_a_rule_on_a_figure_that_does_not_exist_is_not_met(fixtures_dir: Path, tmp_path: Path, limit: str) -> None:
    """Against a reference of zeros, a candidate that is not zero has neither a cosine nor an SNR (-inf dB)."""

    def zeros(values: Values) -> Values:
        return {name: np.zeros_like(a) if name == "logits" else a for name, a in values.items()}

    text = f'[[rule]]\ntensor = "logits"\non = "accumulated"\n{limit}'
    result = equivcheck.diff(
        fixtures_dir / "digits_float.onnx",
        inputs=IMAGE,
        reference=FakeBackend(zeros),
        candidate=FakeBackend(),
        tolerance=rules(tmp_path, text),
    )
    assert result.tensor("logits").verdict == "different"


@pytest.mark.parametrize("limit", ["max_lsb = 0", "bias_lsb = 0", "mismatch_share = 0"])
def test_a_rule_on_the_step_holds_every_limit_that_it_gives(digits: Path, tmp_path: Path, limit: str) -> None:
    text = f'[[rule]]\ntensor = "{POOLED}"\non = "local"\nexcess = 9\n{limit}'
    try:
        result = ran(digits, shifted(5), tolerance=rules(tmp_path, text))
    except equivcheck.EquivcheckError:
        return  # refused: sensible too
    assert result.tensor(POOLED).verdict == "different"


def test_a_rule_that_matches_nothing_is_said(digits: Path, tmp_path: Path) -> None:
    result = ran(digits, tolerance=rules(tmp_path, '[[rule]]\ntensor = "poled*"\nexcess = 9'))
    assert any("poled*" in note for note in result.notes)
