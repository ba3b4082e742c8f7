"""Presets, rules with the path of every mistake in them, and the limits of steps by their published formula."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.errors import EquivcheckError, ToleranceError
from equivcheck.tolerance import (
    METRICS,
    PRESETS,
    Rule,
    Tolerance,
    double_rounding,
    legal_excess,
    legal_table,
    load_tolerance,
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "limits.toml"
    path.write_text(text, encoding="utf-8")
    return path


# -- loading -----------------------------------------------------------------------------------------------------------


def test_nothing_given_means_semantics() -> None:
    assert load_tolerance(None) == Tolerance("semantics", (), "semantics")


@pytest.mark.parametrize("name", ["semantics", "bitwise", "close"])
def test_every_preset_loads_by_its_name(name: str) -> None:
    assert name in PRESETS
    assert (load_tolerance(name).preset, load_tolerance(name).source) == (name, name)


def test_a_tolerance_passes_through_as_it_is() -> None:
    given_one = Tolerance("close")
    assert load_tolerance(given_one) is given_one


def test_a_misspelt_preset_is_answered_with_the_near_one() -> None:
    with pytest.raises(
        ToleranceError, match=r"no such tolerance: bitwse; nearest: bitwise; a preset .* or a TOML file"
    ):
        load_tolerance("bitwse")


def test_rules_are_read_with_their_matchers_and_limits(tmp_path: Path) -> None:
    text = """
    preset = "close"
    [[rule]]
    tensor = "head/*"
    op_type = "Softmax"
    dtype = "uint8"
    on = "accumulated"
    max_lsb = 2
    cosine = 0.999
    """
    path = written(tmp_path, text)
    loaded = load_tolerance(path)
    limits = {"max_lsb": 2.0, "cosine": 0.999}
    assert loaded.preset == "close"
    assert loaded.source == str(path)
    assert list(loaded.rules) == [Rule(limits, "head/*", "Softmax", "uint8", "accumulated")]


def test_later_rules_override_key_by_key(tmp_path: Path) -> None:
    text = """
    [[rule]]
    excess = 1.0
    max_lsb = 3
    [[rule]]
    tensor = "b*"
    max_lsb = 9
    [[rule]]
    tensor = "bc"
    on = "local"
    excess = 0.25
    """
    loaded = load_tolerance(written(tmp_path, text))
    assert loaded.given("a", "Conv", "int8", "local") == {"excess": 1.0, "max_lsb": 3.0}
    assert loaded.given("bc", "Conv", "int8", "local") == {"excess": 0.25, "max_lsb": 9.0}
    assert loaded.given("bc", "Conv", "int8", "accumulated") == {"excess": 1.0, "max_lsb": 9.0}


@pytest.mark.parametrize("key", ["tensor", "op_type", "dtype"])
def test_all_matchers_of_a_rule_must_hold(key: str) -> None:
    asked = {"tensor": "x", "op_type": "Conv", "dtype": "int8", "on": "local"}
    rule = Rule({"excess": 1.0}, tensor="x", op_type="C*", dtype="int?", on="local")
    assert rule.matches(**asked)
    assert not rule.matches(**{**asked, key: "other"})
    assert not rule.matches(**{**asked, "on": "accumulated"})


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_may_be_limited(tmp_path: Path, metric: str) -> None:
    loaded = load_tolerance(written(tmp_path, f"[[rule]]\n{metric} = 1\n"))
    assert loaded.rules[0].limits == {metric: 1.0}


MISTAKES = {
    'presett = "close"': r"unknown key 'presett'; nearest: preset",
    'preset = "strict"': r"preset = 'strict' is not one of semantics, bitwise, close",
    "preset = 3": r"preset = '3' is not one of",
    "rule = 3": r"rule must be a list of tables; write \[\[rule\]\]",
    "[rule]\nexcess = 1": r"rule must be a list of tables; write \[\[rule\]\]",
    "[[rule]]\nexces = 1": r"rule\[0\]: unknown key 'exces'; nearest: excess",
    "[[rule]]\nexcess = 1\n[[rule]]\ntensr = 'x'\nexcess = 1": r"rule\[1\]: unknown key 'tensr'; nearest: tensor",
    "[[rule]]\nexcess = 'a'": r"rule\[0\].excess must be a number, got 'a'",
    "[[rule]]\nexcess = true": r"rule\[0\].excess must be a number, got True",
    "[[rule]]\ntensor = 3\nexcess = 1": r"rule\[0\].tensor must be text, got 3",
    "[[rule]]\non = 'everywhere'\nexcess = 1": r"rule\[0\].on = 'everywhere' is not one of local, accumulated",
    "[[rule]]\ntensor = 'x'": r"rule\[0\] sets no limit; limits: excess",
    "[[rule": r"cannot be read: .*(line 1|document)",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_named_with_its_path(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ToleranceError, match=MISTAKES[text]) as caught:
        load_tolerance(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "rule = [3]",
        "preset = ['close']",
        "[[rule]]\nexcess = nan",
        "[[rule]]\nmax_lsb = -1",
    ],
)
def test_values_that_make_no_limit_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(EquivcheckError):
        load_tolerance(written(tmp_path, text))


def test_a_file_that_is_not_utf8_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ToleranceError, match="cannot be read"):
        load_tolerance(path)


# -- legal excess ------------------------------------------------------------------------------------------------------


def published(multiplier: float) -> float:
    """2^-(k+1) where the multiplier is m * 2^-k with 1/2 <= m < 1, for k >= 1."""
    m, k = multiplier, 0
    while m < 0.5:
        m, k = m * 2, k + 1
    while m >= 1:
        m, k = m / 2, k - 1
    return 2.0 ** -(k + 1) if k >= 1 else 0.0


@pytest.mark.parametrize(
    ("multiplier", "wanted"),
    [
        (1.5, 0.0),  # m = 0.75, k = -1
        (1.0, 0.0),  # m = 0.5, k = -1
        (0.75, 0.0),  # k = 0
        (0.5, 0.0),  # m = 0.5, k = 0
        (0.49999999, 0.25),  # k = 1
        (0.25, 0.25),  # m = 0.5, k = 1
        (0.2, 0.125),  # m = 0.8, k = 2
        (2.0**-10, 2.0**-10),  # m = 0.5, k = 9
        (0.0, 0.0),
    ],
)
def test_double_rounding_costs_what_the_table_says(multiplier: float, wanted: float) -> None:
    assert float(double_rounding(np.array(multiplier))) == wanted


@given(st.floats(2.0**-40, 16.0))
def test_double_rounding_follows_the_formula(multiplier: float) -> None:
    assert float(double_rounding(np.array(multiplier))) == published(multiplier)


@given(st.floats(2.0**-30, 0.4999, exclude_max=True), st.integers(-(2**20), 2**20))
def test_a_value_rounded_twice_stays_within_the_double_rounding_limit(multiplier: float, accumulator: int) -> None:
    """gemmlowp's two steps in exact integers: a 31-bit multiplication that rounds, then a shift that rounds."""
    m, exponent = math.frexp(multiplier)
    fixed, k = round(m * 2**31), -exponent
    once = (accumulator * fixed + 2**30) >> 31
    twice = (once + (1 << (k - 1))) >> k
    distance = abs(twice - accumulator * multiplier)
    # the 31-bit multiplier itself is off by 2^-32, relative to m >= 1/2
    assert distance <= 0.5 + float(double_rounding(np.array(multiplier))) + abs(accumulator) * multiplier * 2.0**-31


STATED = {  # limits as they were first measured
    **dict.fromkeys("Reshape Flatten Squeeze Unsqueeze Transpose Slice Gather MaxPool DepthToSpace".split(), 0.0),
    **dict.fromkeys("Conv Gemm MatMul".split(), 0.15),
    **dict.fromkeys("Add Mul Sigmoid Tanh Gelu".split(), 0.05),
    **dict.fromkeys("ReduceMean GlobalAveragePool AveragePool".split(), 0.30),
    "LeakyRelu": 0.45,
    "HardSwish": 0.10,
    "Softmax": 0.40,
    "NobodyKnowsThis": 0.5,
}


@pytest.mark.parametrize("op_type", STATED)
def test_the_legal_excess_of_an_operator_is_the_stated_one(op_type: str) -> None:
    found = legal_excess([op_type], None)
    assert found.limits(3).tolist() == [STATED[op_type]] * 3
    assert found.listed == (op_type != "NobodyKnowsThis")


def test_every_row_of_the_table_says_where_it_comes_from() -> None:
    for row in legal_table().values():
        assert row.source, row
        assert row.measured, row
        assert row.script.endswith(".py"), row
        assert 0.0 <= row.e <= 0.5, "beyond 1/2 a step would not even be faithful rounding"


def test_only_linear_operators_pay_for_double_rounding() -> None:
    multiplier = np.array(0.25)
    assert legal_excess(["Conv"], multiplier).limits(1).tolist() == [pytest.approx(0.15 + 0.25)]
    assert legal_excess(["Add"], multiplier).limits(1).tolist() == [0.05]


def test_per_channel_multipliers_give_a_limit_for_each_channel() -> None:
    found = legal_excess(["Conv"], np.array([1.0, 0.4, 0.2]))
    assert found.limits(3) == pytest.approx([0.15, 0.15 + 0.25, 0.15 + 0.125])


def test_multipliers_that_do_not_fit_the_channels_give_the_widest_limit_to_all() -> None:
    assert legal_excess(["Conv"], np.array([1.0, 0.4, 0.2])).limits(2) == pytest.approx([0.4, 0.4])


def test_of_several_operators_the_widest_limit_counts() -> None:
    assert legal_excess(["Sigmoid", "Mul"], None).base == 0.05
    assert legal_excess(["Add", "LeakyRelu"], None).base == 0.45


def test_a_declaration_widens_and_says_so_but_never_narrows() -> None:
    wide = legal_excess(["GlobalAveragePool"], None, {"GlobalAveragePool": (0.65, "builtin MEAN")})
    assert (wide.base, wide.reason) == (0.65, "builtin MEAN")
    assert wide.declared == pytest.approx(0.35)
    assert "declared by the engine for GlobalAveragePool: builtin MEAN" in wide.rule
    narrow = legal_excess(["GlobalAveragePool"], None, {"GlobalAveragePool": (0.01, "better")})
    assert (narrow.base, narrow.reason) == (0.30, "")
    assert legal_excess(["Conv"], None, {"Softmax": (1.0, "not this one")}).base == 0.15
