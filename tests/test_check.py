"""Whole runs on real engines: edited models are convicted at the edited step, honest ones pass, odd ones end sensibly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import equivcheck
import planting
from builder import Qdq, feeds
from equivcheck.backends.fake import FakeBackend
from equivcheck.errors import EngineCrashed, EquivcheckError, InputError, ModelError
from equivcheck.recording import load
from equivcheck.result import Result, from_json, schema

PICTURES = {"digits": ("digits/03_3.png", "digits.toml"), "detector": ("photos/china.png", "detector.toml")}
IMAGE = np.random.default_rng(0).random((1, 1, 8, 8)).astype(np.float32)


def diff(fixtures_dir: Path, name: str, **options: Any) -> Result:
    picture, recipe = PICTURES[name.split("_")[0]]
    given = {"inputs": str(fixtures_dir / picture), "preprocess": str(fixtures_dir / recipe), **options}
    return equivcheck.diff(fixtures_dir / f"{name}.onnx", **given)


def saved(tmp_path: Path, model: onnx.ModelProto, name: str = "model.onnx") -> Path:
    path = tmp_path / name
    onnx.save(model, path)
    return path


# -- nothing planted ---------------------------------------------------------------------------------------------------

MODELS = [
    f"{net}_{form}" for net in ("digits", "detector") for form in ("qdq_s8", "qdq_u8", "qop_u8")
]  # every int8 form that the project keeps


@pytest.mark.parametrize("candidate", ["vnpu", "ort", "vnpu:profile=ort,target=all", "vnpu:profile=exact"])
@pytest.mark.parametrize("model", MODELS)
def test_an_unedited_model_is_equivalent_on_every_correct_engine(
    fixtures_dir: Path, model: str, candidate: str
) -> None:
    result = diff(fixtures_dir, model, candidate=candidate)
    assert result.equivalent, str(result)
    assert result.coverage.judged == result.coverage.steps == len(result.steps)
    assert result.reference_culprits == []


@pytest.mark.parametrize("model", ["digits_float", "detector_float"])
def test_a_float_model_is_equivalent_at_another_optimisation_level(fixtures_dir: Path, model: str) -> None:
    result = diff(fixtures_dir, model, candidate="ort:optimization=disable")
    assert result.equivalent, str(result)


def test_a_model_is_identical_to_itself(fixtures_dir: Path) -> None:
    result = diff(fixtures_dir, "detector_qdq_s8", candidate="ort")
    assert {t.verdict for t in result.tensors} == {"identical"}
    assert (result.first_mismatch, result.coverage.bitwise) == (None, result.coverage.steps)
    assert "Every bit is equal too." in str(result)


# -- edited copies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", planting.KINDS)
@pytest.mark.parametrize(("model", "candidate"), [("digits_qdq_s8", "vnpu"), ("detector_qdq_s8", "ort")])
def test_the_edited_step_and_no_other_is_the_culprit(
    fixtures_dir: Path, tmp_path: Path, model: str, candidate: str, kind: str
) -> None:
    planted = planting.plant(onnx.load(fixtures_dir / f"{model}.onnx"), kind, seed=len(kind))
    assert planted is not None
    edited, made = planted
    result = diff(fixtures_dir, model, candidate=candidate, candidate_model=saved(tmp_path, edited))
    assert result.verdict == "different"
    assert [c.outputs for c in result.culprits] == [[made]], str(result)
    assert result.first_culprit == result.tensor(made).step
    assert result.reference_culprits == []


def qdq_of(model: onnx.ModelProto, value: str) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if value in (n.output[0], n.input[0]) and "Linear" in n.op_type]


@pytest.mark.parametrize("candidate", ["ort", "vnpu"])
def test_a_changed_scale_of_a_value_is_named_as_a_changed_parameter(
    fixtures_dir: Path, tmp_path: Path, candidate: str
) -> None:
    model = onnx.load(fixtures_dir / "digits_qdq_s8.onnx")
    name = "down_relu_QuantizeLinear_Output"
    old = next(t for t in model.graph.initializer if t.name == qdq_of(model, name)[0].input[1])
    model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(old) * np.float32(1.1), "other_scale"))
    for node in qdq_of(model, name):
        node.input[1] = "other_scale"
    result = diff(fixtures_dir, "digits_qdq_s8", candidate=candidate, candidate_model=saved(tmp_path, model))
    assert result.verdict == "different"
    assert [c.outputs for c in result.culprits] == [[name]]
    assert "quantisation differs: scale" in result.tensor(name).reason


def test_padding_with_raw_code_0_is_found_where_the_zero_point_is_not_0(fixtures_dir: Path, tmp_path: Path) -> None:
    model = onnx.load(fixtures_dir / "digits_qdq_s8.onnx")
    conv = next(n for n in model.graph.node if n.op_type == "Conv")
    dequantise = next(n for n in model.graph.node if n.output[0] == conv.input[0])
    zero = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == dequantise.input[2])
    assert int(zero) != 0
    pads = next(a for a in conv.attribute if a.name == "pads")
    top, left, bottom, right = pads.ints
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([0, 0, top, left, 0, 0, bottom, right], np.int64), "raw_pads"),
            numpy_helper.from_array(np.array(0, zero.dtype), "raw_zero"),
        ]
    )
    pads.ints[:] = [0, 0, 0, 0]
    pad = helper.make_node("Pad", [dequantise.input[0], "raw_pads", "raw_zero"], ["raw_padded"], "raw_pad")
    model.graph.node.insert(next(k for k, n in enumerate(model.graph.node) if n.output[0] == dequantise.output[0]), pad)
    dequantise.input[0] = "raw_padded"
    result = diff(fixtures_dir, "digits_qdq_s8", candidate="ort", candidate_model=saved(tmp_path, model))
    assert result.verdict == "different"
    assert [c.outputs for c in result.culprits] == [["stem_relu_QuantizeLinear_Output"]]


def test_a_pool_that_rounds_down_is_found_though_the_label_stays(fixtures_dir: Path) -> None:
    result = diff(
        fixtures_dir, "digits_qdq_s8", candidate="ort", candidate_model=fixtures_dir / "digits_qdq_s8_floor.onnx"
    )
    assert [c.op_type for c in result.culprits] == ["GlobalAveragePool"]
    culprit = result.culprits[0]
    assert culprit.local.candidate is not None
    assert culprit.local.candidate.bias_lsb < -0.2
    assert "truncation" in (result.tensor(culprit.outputs[0]).would_hide or "")


def test_an_edit_of_the_reference_model_blames_the_candidate_that_runs_the_other(
    fixtures_dir: Path,
) -> None:
    """MODEL is what both should compute: whichever side does not compute it is at fault."""
    floor = fixtures_dir / "digits_qdq_s8_floor.onnx"
    result = equivcheck.diff(floor, inputs=IMAGE, candidate="ort", candidate_model=fixtures_dir / "digits_qdq_s8.onnx")
    assert result.verdict == "different"
    assert [result.steps[c.step - 1].outputs for c in result.culprits] == [["pooled_QuantizeLinear_Output"]]


def test_a_fault_that_only_another_picture_shows_is_found_by_random_codes(tmp_path: Path) -> None:
    """A black input leaves a kernel's weights unused; the second opinion's random codes do not."""

    def model(codes: np.ndarray) -> onnx.ModelProto:
        m = Qdq(dtype="int8", seed=1)
        x = m.dq(m.q(m.input("x", (1, 2, 5, 5)), 0.02, 0))
        made = m.op("Conv", [x, m.weight(codes.shape, codes=codes)], kernel_shape=[3, 3], pads=[1] * 4)
        return m.model(m.dq(m.q(made, 0.1, 0, out="y")))

    codes = np.random.default_rng(0).integers(-100, 100, (3, 2, 3, 3)).astype(np.int8)
    other = codes.copy()
    other[1] = -other[1]
    options = {
        "inputs": np.zeros((1, 2, 5, 5), np.float32),
        "candidate": "ort",
        "candidate_model": saved(tmp_path, model(other), "other.onnx"),
    }
    path = saved(tmp_path, model(codes))
    found = equivcheck.diff(path, **options)
    assert found.culprits[0].outputs == ["y"]
    assert "seeded random codes" in found.culprits[0].reason
    assert equivcheck.diff(path, second_opinion=False, **options).equivalent
    assert equivcheck.diff(path, second_opinion=False, **options).coverage.weak >= 0


def test_a_fault_on_one_of_several_pictures_is_still_a_culprit(fixtures_dir: Path, tmp_path: Path) -> None:
    planted = planting.plant(onnx.load(fixtures_dir / "digits_qdq_s8.onnx"), "weights_of_four_bits", 1)
    assert planted is not None
    path = saved(tmp_path, planted[0])
    run = {"candidate": "ort", "candidate_model": path, "second_opinion": False}
    black = np.zeros_like(IMAGE)
    result = equivcheck.diff(fixtures_dir / "digits_qdq_s8.onnx", inputs=[black, IMAGE, black], **run)
    assert [c.outputs for c in result.culprits] == [[planted[1]]]
    assert len(result.tensor(planted[1]).by_sample) == 3


# -- inputs that are awkward -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidate", ["ort", "vnpu"])
def test_nan_into_a_quantised_model_is_refused(fixtures_dir: Path, candidate: str) -> None:
    """ONNX leaves QuantizeLinear of NaN open, so nobody could be blamed for the code that an engine makes of it."""
    image = IMAGE.copy()
    image[0, 0, 3, 3] = np.nan
    with pytest.raises(InputError, match=r"holds 1 NaN, and step #1 QuantizeLinear"):
        diff(fixtures_dir, "digits_qdq_s8", candidate=candidate, inputs=image, preprocess=None)


def test_nan_through_a_float_model_on_one_engine_blames_nobody(fixtures_dir: Path) -> None:
    image = IMAGE.copy()
    image[0, 0, 3, 3] = np.nan
    result = diff(fixtures_dir, "digits_float", candidate="ort", inputs=image, preprocess=None)
    assert result.culprits == []
    assert result.verdict != "different"


def test_inf_into_a_quantised_model_saturates(fixtures_dir: Path) -> None:
    image = IMAGE.copy()
    image[0, 0, 3, 3] = np.inf
    result = diff(fixtures_dir, "digits_qdq_s8", inputs=image, preprocess=None)
    assert result.equivalent
    assert any("1 Inf" in note for note in result.notes)


@pytest.mark.parametrize(
    "candidate",
    [
        "ort",
        "vnpu",
    ],
)
def test_an_empty_batch_is_judged_without_a_crash(tmp_path: Path, candidate: str) -> None:
    m = Qdq(dtype="int8")
    path = saved(tmp_path, m.model(m.qdq(m.conv(m.qdq(m.input("x", ("N", 3, 4, 4)), 0.02), 4), 0.3)))
    result = equivcheck.diff(path, inputs=np.zeros((0, 3, 4, 4), np.float32), candidate=candidate)
    assert result.verdict in ("equivalent", "inconclusive")
    assert any("empty" in note for note in result.notes)


def test_samples_of_different_shapes_are_refused_with_both_named(tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    path = saved(tmp_path, m.model(m.qdq(m.conv(m.qdq(m.input("x", (1, 3, "H", "W")), 0.02), 4), 0.3)))
    shapes = [(1, 3, 4, 4), (1, 3, 5, 4)]
    with pytest.raises(InputError, match=r"\[1, 3, 5, 4\] in 2, \[1, 3, 4, 4\] in 1"):
        equivcheck.diff(path, inputs=[np.zeros(shape, np.float32) for shape in shapes])


# -- models that are awkward -------------------------------------------------------------------------------------------


def made_of(
    *nodes: onnx.NodeProto, kind: int = TensorProto.FLOAT, opset: int = 17, **constants: Any
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])],
        [helper.make_tensor_value_info("y", kind, [1, 3])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def test_a_model_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it has no step"):
        equivcheck.diff(saved(tmp_path, made_of(helper.make_node("Identity", ["c"], ["y"]), c=np.ones((1, 3), "f"))))


def test_a_model_with_a_string_output_ends_in_a_result_or_a_refusal(tmp_path: Path) -> None:
    model = made_of(helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING), kind=TensorProto.STRING)
    try:
        equivcheck.diff(saved(tmp_path, model), candidate="ort")
    except EquivcheckError as error:
        assert "y" in str(error)  # noqa: PT017  # either is sensible, another exception is not


def test_values_that_are_not_numbers_are_unjudged_not_different(tmp_path: Path) -> None:
    model = made_of(helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING), kind=TensorProto.STRING)
    assert equivcheck.diff(saved(tmp_path, model), candidate="ort").verdict == "inconclusive"


@pytest.mark.parametrize(
    "candidate",
    [
        "ort",
        "vnpu",
    ],
)
def test_a_model_with_a_sequence_output_ends_in_a_result_or_a_refusal(tmp_path: Path, candidate: str) -> None:
    model = made_of(helper.make_node("SequenceConstruct", ["x", "x"], ["y"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, [1, 3]))
    try:
        equivcheck.diff(saved(tmp_path, model), candidate=candidate)
    except EquivcheckError as error:
        assert "y" in str(error)  # noqa: PT017  # either is sensible, another exception is not


@pytest.mark.parametrize(("shape", "axis"), [((1, 4, 6), 2), ((4, 4, 6), 0), ((1, 4, 6), -1)])
def test_activations_quantised_along_any_axis_are_equivalent_on_one_engine(
    tmp_path: Path, shape: tuple[int, ...], axis: int
) -> None:
    m = Qdq(dtype="int8")
    x = m.input("x", shape)
    scale = m.constant((0.01 * (1 + np.arange(shape[axis]))).astype(np.float32), "s")
    zero = m.constant(np.zeros(shape[axis], np.int8), "z")
    m.op("QuantizeLinear", [x, scale, zero], "q", axis=axis)
    m.op("DequantizeLinear", ["q", scale, zero], "d", axis=axis)
    model = m.model(m.qdq(m.op("Relu", ["d"]), 0.02))
    result = equivcheck.diff(saved(tmp_path, model), inputs=feeds(model), candidate="ort")
    assert result.equivalent, str(result)


def sixteen_bits(dtype: str, zero: int) -> onnx.ModelProto:
    m = Qdq(dtype=dtype, opset=21)
    return m.model(m.qdq(m.conv(m.qdq(m.input("x", (1, 3, 8, 8)), 0.0002, zero), 4), 0.003, zero))


@pytest.mark.parametrize(("dtype", "zero"), [("int16", 0), ("uint16", 32768)])
@pytest.mark.parametrize(
    "candidate",
    [
        "ort:optimization=disable",
        "vnpu",
    ],
)
def test_a_model_of_16_bits_is_equivalent(tmp_path: Path, dtype: str, zero: int, candidate: str) -> None:
    model = sixteen_bits(dtype, zero)
    result = equivcheck.diff(saved(tmp_path, model), candidate=candidate)
    assert result.equivalent, str(result)


def int4_weights() -> onnx.ModelProto:
    model = made_of(
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"]),
        helper.make_node("MatMul", ["x", "wd"], ["y"]),
        opset=21,
        s=np.float32(0.1),
    )
    model.ir_version = 10
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.INT4, [3, 3], [1, -2, 3, -4, 5, -6, 7, -8, 0]))
    return model


@pytest.mark.parametrize("candidate", ["ort:optimization=disable", "vnpu"])
def test_weights_of_4_bits_are_equivalent_and_activations_end_sensibly(tmp_path: Path, candidate: str) -> None:
    plain = {"reference": "ort:optimization=disable", "candidate": candidate}
    assert equivcheck.diff(saved(tmp_path, int4_weights()), **plain).equivalent
    model = made_of(
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        opset=21,
        s=np.float32(0.1),
    )
    model.ir_version = 10
    model.graph.initializer.append(helper.make_tensor("z", TensorProto.INT4, [], [0]))
    assert equivcheck.diff(saved(tmp_path, model), **plain).verdict != "different"


def test_a_reference_that_is_itself_a_culprit_is_not_said_to_be_right(tmp_path: Path) -> None:
    """At ENABLE_ALL onnxruntime 1.32 makes MatMulNBits of it, which is 5e-4 off: both sides are at fault."""
    result = equivcheck.diff(saved(tmp_path, int4_weights()), candidate="ort")
    assert [c.step for c in result.reference_culprits] == [c.step for c in result.culprits] == [1]
    assert "the reference rounds right" not in str(result)


def test_several_inputs_are_fed_by_name_and_random_where_nothing_is_given(tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    a, b = (m.qdq(m.input(name, (1, 3, 4, 4)), 0.02) for name in "ab")
    model = m.model(m.qdq(m.op("Add", [a, b]), 0.04))
    path = saved(tmp_path, model)
    result = equivcheck.diff(path, inputs=feeds(model))
    assert result.equivalent
    assert [feed.name for feed in result.samples[0].feeds] == ["a", "b"]
    assert equivcheck.diff(path).equivalent
    with pytest.raises(InputError, match="b"):
        equivcheck.diff(path, inputs={"a": feeds(model)["a"]})


def test_a_symbolic_batch_takes_any_size_and_another_symbol_needs_a_shape(tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    path = saved(tmp_path, m.model(m.qdq(m.conv(m.qdq(m.input("x", ("N", 3, 4, 4)), 0.02), 4), 0.3)))
    two = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    assert equivcheck.diff(path, inputs=two).equivalent
    assert equivcheck.diff(path).samples[0].feeds[0].shape == [1, 3, 4, 4]
    m = Qdq(dtype="int8")
    path = saved(tmp_path, m.model(m.qdq(m.conv(m.qdq(m.input("x", (1, 3, "H", "W")), 0.02), 4), 0.3)))
    with pytest.raises(InputError, match="random:0:1x3x"):
        equivcheck.diff(path)


# -- another model for the candidate -----------------------------------------------------------------------------------


def test_a_candidate_model_with_an_input_that_the_model_lacks_is_refused(fixtures_dir: Path, tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    other = saved(tmp_path, m.model(m.qdq(m.input("somewhere", (1, 3, 9, 9)), 0.02)))
    with pytest.raises(ModelError, match="somewhere"):
        diff(fixtures_dir, "digits_qdq_s8", candidate_model=other)


@pytest.mark.parametrize(
    "candidate",
    [
        "ort",
        "vnpu",
    ],
)
def test_a_candidate_model_of_another_network_ends_without_a_verdict(fixtures_dir: Path, candidate: str) -> None:
    other = fixtures_dir / "detector_qdq_s8.onnx"  # its input has the same name, and another shape
    try:
        result = diff(fixtures_dir, "digits_qdq_s8", candidate=candidate, candidate_model=other)
    except ModelError as error:
        assert "image" in str(error)  # noqa: PT017  # either is sensible, another exception is not
    else:
        assert result.verdict == "inconclusive"


def test_a_float_candidate_of_an_int8_model_is_no_pass(fixtures_dir: Path) -> None:
    result = diff(fixtures_dir, "digits_qdq_s8", candidate="ort", candidate_model=fixtures_dir / "digits_float.onnx")
    assert result.verdict == "inconclusive"
    assert result.coverage.judged == 0


# -- a backend that misbehaves -----------------------------------------------------------------------------------------


def test_a_second_opinion_that_is_refused_is_a_note_not_a_verdict(fixtures_dir: Path) -> None:
    class Refusing(FakeBackend):
        second_opinion = True

    result = diff(fixtures_dir, "digits_qdq_s8", candidate=Refusing())
    assert result.equivalent
    assert any("no second opinion" in note for note in result.notes)


def test_a_second_opinion_may_convict_but_never_acquits(fixtures_dir: Path) -> None:
    class Lying(FakeBackend):
        """Its dumps are honest; what it runs when it is fed is wrong in every code."""

        second_opinion = True

        def deploy(self, proto: onnx.ModelProto) -> Any:
            from equivcheck.backends.registry import backend

            run = backend("ort").deploy(proto)
            return lambda feeds: {name: a + np.float32(10) for name, a in run(feeds).items()}

    result = diff(fixtures_dir, "digits_qdq_s8", candidate=Lying())
    assert result.verdict == "different"
    assert "fed with the reference's values" in result.culprits[0].reason
    assert diff(fixtures_dir, "digits_qdq_s8", candidate=Lying(), second_opinion=False).equivalent


def test_sessions_are_closed_even_when_a_run_fails(fixtures_dir: Path) -> None:
    closed = []

    class Closing(FakeBackend):
        def open(self, model):
            session = super().open(model)
            session.close = lambda: closed.append(True)

            def run(sample: str, feeds: Mapping[str, Any]) -> Any:
                raise EngineCrashed("gone")

            session.run = run
            return session

    diff(fixtures_dir, "digits_qdq_s8", candidate=Closing())
    assert closed == [True]


# -- assert_equivalent -------------------------------------------------------------------------------------------------


def test_assert_equivalent_returns_raises_or_gives_up(fixtures_dir: Path) -> None:
    model = fixtures_dir / "digits_qdq_s8.onnx"
    assert equivcheck.assert_equivalent(model, inputs=IMAGE).equivalent
    floor = fixtures_dir / "digits_qdq_s8_floor.onnx"
    with pytest.raises(AssertionError, match="DIFFERENT   1 culprit: step #7 GlobalAveragePool"):
        equivcheck.assert_equivalent(model, inputs=IMAGE, candidate="ort", candidate_model=floor)
    with pytest.raises(equivcheck.Inconclusive, match="INCONCLUSIVE   0 of 9") as caught:
        equivcheck.assert_equivalent(model, inputs=IMAGE, candidate=FakeBackend(refuse="no"))
    assert not isinstance(caught.value, AssertionError | EquivcheckError)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_save_to_keeps_both_recordings_and_may_be_repeated(fixtures_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for _ in range(2):
        result = diff(fixtures_dir, "digits_qdq_s8", candidate="ort", save_to=folder)
    kept = load(folder / "candidate")
    assert sorted(p.name for p in folder.iterdir()) == ["candidate", "reference"]
    assert [s.id for s in kept.samples] == [s.id for s in result.samples]
    values = kept.recordings[0].values
    for row in result.tensors:
        assert list(values[row.name].shape) == row.candidate.shape
        assert str(values[row.name].dtype) == row.candidate.dtype


# -- JSON --------------------------------------------------------------------------------------------------------------


def unfit(value: Any, rule: dict[str, Any], whole: dict[str, Any], path: str = "$") -> list[str]:
    """What in `value` does not fit a JSON schema, in the part of the language that msgspec writes."""
    if "$ref" in rule:
        return unfit(value, whole["$defs"][rule["$ref"].rsplit("/", 1)[1]], whole, path)
    if "anyOf" in rule:
        found = [unfit(value, option, whole, path) for option in rule["anyOf"]]
        return [] if [] in found else [f"{path}: fits none of anyOf: {found}"]
    if "enum" in rule:
        return [] if value in rule["enum"] else [f"{path}: {value!r} is not one of {rule['enum']}"]
    types = {
        "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "string": str, "array": list,
        "object": dict,
    }  # fmt: skip
    if "type" in rule and (
        not isinstance(value, types[rule["type"]]) or (isinstance(value, bool) and rule["type"] != "boolean")
    ):
        return [f"{path}: {value!r} is no {rule['type']}"]
    found = []
    if isinstance(value, dict):
        found += [f"{path}: no {key}" for key in rule.get("required", []) if key not in value]
        known = rule.get("properties", {})
        for key, inner in value.items():
            inner_rule = known.get(key, rule.get("additionalProperties", {}))
            found += unfit(inner, inner_rule, whole, f"{path}.{key}") if inner_rule else []
    if isinstance(value, list) and "items" in rule:
        found += [text for k, item in enumerate(value) for text in unfit(item, rule["items"], whole, f"{path}[{k}]")]
    return found


def no_constant(token: str) -> float:
    raise AssertionError(f"{token} in JSON")


def a_result(fixtures_dir: Path, which: str) -> Result:
    model = fixtures_dir / "digits_qdq_s8.onnx"
    if which == "equivalent":
        return equivcheck.diff(model, inputs=[IMAGE, IMAGE], split_at="Conv")
    if which == "different":
        return equivcheck.diff(model, candidate="ort", candidate_model=fixtures_dir / "digits_qdq_s8_floor.onnx")
    if which == "inconclusive":
        return equivcheck.diff(model, candidate=FakeBackend(crash=["random:0"]))
    if which == "incomparable":
        return equivcheck.diff(model, candidate=FakeBackend(lambda v: {n: a.ravel() for n, a in v.items()}))
    if which == "absent":
        return equivcheck.diff(model, candidate=FakeBackend(lambda v: dict(list(v.items())[::2])))
    return equivcheck.diff(fixtures_dir / "digits_float.onnx", inputs=IMAGE, candidate="ort")


KINDS = ["equivalent", "different", "inconclusive", "incomparable", "absent", "float"]


@pytest.mark.parametrize("which", KINDS)
def test_a_result_comes_back_from_json_as_it_was(fixtures_dir: Path, which: str) -> None:
    result = a_result(fixtures_dir, which)
    content = result.to_json()
    assert from_json(content) == result
    parsed = json.loads(content, parse_constant=no_constant)
    assert unfit(parsed, schema(), schema()) == []
    assert parsed["schema"] == "equivcheck/1"
    assert str(from_json(content)) == str(result)


def test_a_result_with_an_infinite_distance_comes_back_from_json(fixtures_dir: Path) -> None:
    def nan(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.full_like(a, np.nan) if name == "logits" else a for name, a in values.items()}

    result = equivcheck.diff(fixtures_dir / "digits_float.onnx", inputs=IMAGE, candidate=FakeBackend(nan))
    assert result.verdict == "different"
    parsed = json.loads(result.to_json(), parse_constant=no_constant)
    assert unfit(parsed, schema(), schema()) == []
    assert from_json(result.to_json()).verdict == "different"


# -- nothing there -----------------------------------------------------------------------------------------------------


def test_nan_where_codes_are_due_is_a_difference_and_no_untrustworthy_dump(fixtures_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "nan.py"
    script.write_text(
        "import numpy, onnxruntime\n"
        "def run(path, feeds):\n"
        "    s = onnxruntime.InferenceSession(path)\n"
        "    names = [o.name for o in s.get_outputs()]\n"
        "    found = dict(zip(names, s.run(None, feeds)))\n"
        "    for a in found.values():\n"
        "        if a.ndim == 4 and a.shape[2] == 1:\n"
        "            a.flat[0] = numpy.nan\n"
        "    return found\n"
    )
    result = diff(fixtures_dir, "digits_qdq_s8", candidate=f"script:{script}")
    assert result.verdict == "different"
    assert "NaN where codes are due" in result.reason or any("NaN" in c.reason for c in result.culprits)
