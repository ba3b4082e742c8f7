"""Faults as data: each changes one step, in the way it says, and is found there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import equivcheck
from equivcheck.backends.registry import backend
from equivcheck.errors import SpecError, UnknownOption
from equivcheck.models.graph import Array, Step
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.vnpu.faults import KINDS as FAULT_KINDS
from equivcheck.vnpu.faults import Fault
from equivcheck.vnpu.ir import Accumulate
from equivcheck.vnpu.profiles import load_profile
from equivcheck.vnpu.program import Program, compile_program
from equivcheck.vnpu.targets import load_target

ROOT = Path(__file__).resolve().parents[2]
PICTURES = {"detector": "photos/china.png", "digits": "digits/08_8.png"}
MODELS = ("detector_qdq_s8", "detector_qdq_u8", "digits_qdq_s8", "digits_qdq_u8")


def no_fallback(step: Step, inputs: object) -> dict[str, Array]:
    raise NotImplementedError(step.op_type)


def fixture(name: str) -> OnnxModel:
    return load_model(ROOT / "fixtures" / f"{name}.onnx")


def compiled(name: str, profile: str = "exact") -> Program:
    model = fixture(name)
    return compile_program(
        model.graph, profile=load_profile(profile), target=load_target("all"),
        fallback=backend("vnpu").compile(model)._fallback,
    )  # fmt: skip


def values_of(program: Program, seed: int = 0) -> dict[str, Array]:
    """What an honest run stores for seeded random feeds."""
    (port,) = program.graph.inputs
    shape = program.graph.values[port].shape
    feed = np.random.default_rng(seed).uniform(-1, 1, [int(d) for d in shape]).astype(np.float32)
    return program.run({port: feed})


def diff(name: str, spec: str, **options: object) -> equivcheck.Result:
    stem = name.split("_")[0]
    return equivcheck.diff(
        ROOT / "fixtures" / f"{name}.onnx",
        inputs=str(ROOT / "fixtures" / PICTURES[stem]),
        preprocess=str(ROOT / "fixtures" / f"{stem}.toml"),
        candidate=spec,
        **options,
    )


def planted_at(program: Program, kind: str) -> list[int]:
    able = [s.id for s in program.graph.steps if (op := program.op(s)) is not None and FAULT_KINDS[kind].applicable(op)]
    on_npu = {p.step for p in program.placement if p.where == "npu"}
    return [step for step in able if step in on_npu]


def test_there_are_at_least_sixteen_kinds_each_with_a_name_and_a_sentence():
    assert len(FAULT_KINDS) >= 16
    assert all(kind.name == name and kind.summary for name, kind in FAULT_KINDS.items())


@pytest.mark.parametrize("profile", ["exact", "ort", "tflite-reference"])
@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_a_fault_keeps_shape_and_dtype_and_changes_something_somewhere(kind: str, profile: str):
    changed = 0
    for name in MODELS:
        program = compiled(name, profile)
        values = values_of(program)
        for step in planted_at(program, kind):
            faulty = program.with_fault(Fault(kind, f"#{step}", seed=1))
            made = faulty.run_step(program.graph.steps[step - 1], values)
            for out, array in made.items():
                assert array.dtype == values[out].dtype
                assert array.shape == values[out].shape
                assert array.flags.c_contiguous
                changed += not np.array_equal(array, values[out])
    assert changed, kind


def test_only_the_planted_step_is_changed():
    program = compiled("detector_qdq_s8")
    values = values_of(program)
    faulty = program.with_fault(Fault("floor", "#4"))
    for step in program.graph.steps:
        made = faulty.run_step(step, values)
        same = all(np.array_equal(made[out], values[out]) for out in step.outputs)
        assert same == (step.id != 4)
    assert program.planted is None


def conv(name: str = "detector_qdq_s8") -> tuple[Program, Step, Accumulate, dict[str, Array]]:
    program = compiled(name)
    step = next(s for s in program.graph.steps if s.op_type == "Conv" and s.id > 2)
    op = program.op(step)
    assert isinstance(op, Accumulate)
    return program, step, op, values_of(program)


def faulty_codes(program: Program, step: Step, values: dict[str, Array], kind: str, seed: int = 0) -> Array:
    return program.with_fault(Fault(kind, f"#{step.id}", seed)).run_step(step, values)[step.outputs[0]]


def real_of(program: Program, step: Step, values: dict[str, Array]) -> Array:
    found = program.real(step, values)
    assert found is not None
    return found[step.outputs[0]]


@pytest.mark.parametrize("seed", range(3))
def test_a_floor_is_the_floor_of_the_real_value(seed: int):
    program, step, op, _ = conv()
    values = values_of(program, seed)
    expected = np.clip(np.floor(real_of(program, step, values)), op.out.low, op.out.high)
    np.testing.assert_array_equal(faulty_codes(program, step, values, "floor"), expected)


def test_truncation_goes_toward_the_zero_point():
    program, step, op, values = conv()
    centred = real_of(program, step, values) - op.out.zero
    expected = np.clip(np.trunc(centred) + op.out.zero, op.out.low, op.out.high)
    np.testing.assert_array_equal(faulty_codes(program, step, values, "truncate"), expected)


def test_double_rounding_lands_up_to_three_quarters_of_a_code_away():
    program, step, op, values = conv()
    real = real_of(program, step, values)
    codes = faulty_codes(program, step, values, "double-rounding")
    distance = np.abs(codes - np.clip(real, op.out.low, op.out.high))
    assert 0.5 < distance.max() <= 0.75 + 1e-9


def test_a_dropped_bias_moves_every_channel_by_its_bias():
    program, step, op, values = conv()
    bias = (op.bias * op.bias_scale / op.out.scale).reshape(1, -1, 1, 1)
    expected = np.clip(np.rint(real_of(program, step, values) - bias), op.out.low, op.out.high)
    assert np.abs(faulty_codes(program, step, values, "dropped-bias") - expected).max() <= 1  # ties of the sum


def test_a_transposed_layout_is_the_nhwc_buffer_read_as_nchw():
    program, step, _, values = conv()
    honest = values[step.outputs[0]]
    read = np.frombuffer(honest.transpose(0, 2, 3, 1).tobytes(), honest.dtype).reshape(honest.shape)
    np.testing.assert_array_equal(faulty_codes(program, step, values, "transposed-layout"), read)


def test_small_faults_are_one_code_in_one_channel_column_or_at_the_top():
    program, step, op, values = conv()
    honest = values[step.outputs[0]].astype(int)
    up = faulty_codes(program, step, values, "one-channel-up") - honest
    assert np.unique(np.nonzero(up)[1]).size == 1
    assert up.max() == 1
    last = faulty_codes(program, step, values, "last-column-up") - honest
    assert not last[..., :-1].any()
    assert last[..., -1].max() == 1
    early = faulty_codes(program, step, values, "saturates-early")
    np.testing.assert_array_equal(early, np.minimum(honest, op.out.high - 1))


def test_a_stale_buffer_holds_what_an_earlier_step_left():
    program, step, _, values = conv()
    seen = {name: array for name, array in values.items() if name not in step.outputs}
    made = faulty_codes(program, step, seen, "stale-buffer").reshape(-1)
    honest = values[step.outputs[0]].reshape(-1)
    part = honest.size // 4
    np.testing.assert_array_equal(made[:-part], honest[:-part])
    older = [a.reshape(-1)[: honest.size][-part:] for a in seen.values() if a.dtype == honest.dtype]
    assert any(np.array_equal(made[-part:], left) for left in older)


def test_a_sixteen_bit_accumulator_saturates_or_wraps_beyond_its_range():
    program, step, op, values = conv("digits_qdq_s8")
    limit = 1 << 15
    acc = (real_of(program, step, values) - op.out.zero) * op.out.scale
    acc -= (op.bias * op.bias_scale).reshape(1, -1, 1, 1)
    sums = np.rint(acc / (op.x.codes.scale * op.weight_scale).reshape(1, -1, 1, 1))
    honest = values[step.outputs[0]]
    for kind in ("saturating-accumulator", "wrapping-accumulator"):
        made = faulty_codes(program, step, values, kind)
        inside = np.abs(sums) < limit
        np.testing.assert_array_equal(made[inside], honest[inside])


def test_the_same_seed_plants_the_same_fault():
    program = compiled("digits_qdq_s8")
    places = [program.with_fault(Fault("one-channel-up", seed=seed)).planted.step.id for seed in range(20)]
    again = [program.with_fault(Fault("one-channel-up", seed=seed)).planted.step.id for seed in range(20)]
    assert places == again
    assert len(set(places)) > 1


@pytest.mark.parametrize("second_opinion", [False, True])
def test_the_side_says_that_it_has_a_planted_fault_and_the_step_is_the_culprit(second_opinion: bool):
    result = diff("digits_qdq_s8", "vnpu:fault=floor,at=#3,seed=3", second_opinion=second_opinion)
    assert "A PLANTED FAULT: floor at #3 Conv (seed 3)" in result.candidate.notes
    assert [culprit.step for culprit in result.culprits] == [3]
    assert "A PLANTED FAULT" in str(result)


def test_a_second_opinion_has_the_fault_at_the_same_step():
    result = diff("digits_qdq_s8", "vnpu:profile=exact,fault=floor,at=#3")
    on_cpu = {placed.step for placed in result.candidate.placement if placed.where == "cpu"}
    assert len(on_cpu) < len(result.tensors)
    for tensor in result.tensors:
        for error in (tensor.local.fed, tensor.local.stress):
            if tensor.step in on_cpu:  # what the NPU would make of it is no opinion on what was deployed
                assert error is None
                continue
            assert error is not None
            assert (error.excess > 0.4) == (tensor.step == 3)


def test_a_second_opinion_leaves_a_fault_out_where_the_step_is_not_on_the_npu_of_the_isolated_model():
    result = diff("detector_qop_u8", "vnpu:target=all,fault=stale-buffer,at=#10", second_opinion=True)
    assert result.first_culprit == 10


def test_a_step_may_be_named_by_the_value_it_stores():
    name = fixture("digits_qdq_s8").graph.steps[2].outputs[0]
    result = diff("digits_qdq_s8", f"vnpu:fault=floor,at={name}")
    assert result.first_culprit == 3


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("vnpu:fault=flor", UnknownOption, "floor"),
        ("vnpu:fault=floor,seed=x", UnknownOption, "seed=x is not a number"),
        ("vnpu:at=#3", SpecError, "without fault="),
        ("vnpu:seed=3", SpecError, "without fault="),
    ],
)
def test_a_mistake_in_the_spec_is_said_at_once(spec: str, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        backend(spec)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fault=floor,at=#99", "at=#99: no such step; steps are #1 to #9"),
        ("fault=floor,at=seven", "at=seven: no such step"),
        ("fault=floor,at=#7", "step #7 GlobalAveragePool runs on the CPU .*steps that can: #1, #2"),
        ("fault=flipped-kernel,at=#9", "step #9 Gemm cannot have the fault flipped-kernel .*steps that can: #2"),
        ("fault=shifted-table", "no step on the NPU can have the fault shifted-table"),
    ],
)
def test_a_fault_that_cannot_be_planted_says_where_it_can(fault: str, words: str):
    with pytest.raises(UnknownOption, match=words):
        diff("digits_qdq_s8", f"vnpu:{fault}")


def test_an_unknown_kind_names_its_neighbours():
    with pytest.raises(UnknownOption) as caught:
        Fault("sign-flipped")
    assert "sign-flipped-channel" in caught.value.nearest


def test_the_quick_yardstick_finds_every_active_fault_and_blames_no_legal_engine():
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "bench" / "faults.py"), "--quick", "--no-peers"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "misses, wrong places and false alarms: none" in ran.stdout
