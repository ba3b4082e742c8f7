"""Faithful observation: what the ORT backend records is what the untouched model computes, or it is named absent.

Every model here is one in which ONNX Runtime moves, merges, renames or re-encodes values. Each recorded
value is judged by `oracle.Oracle`, which shares no code with equivcheck or ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from builder import Array, Qdq, code_spread, feeds
from equivcheck.backends.registry import backend
from equivcheck.errors import EngineRefused, UnknownOption
from equivcheck.models.onnx.load import OnnxModel, load_model, model_from_bytes
from equivcheck.recording import Recording
from equivcheck.result import Side
from oracle import Oracle
from random_models import RandomModel
from small_models import TRANSPOSED, TRAPS, end, start, zero_of

# (activations, opset, per channel): every opset and both kinds of scale with either sign
FORMS = [("uint8", 13, True), ("uint8", 21, False), ("int8", 17, False), ("int8", 19, True)]
# ONNX Runtime makes one of these values of them (the Qs in a row are merged into one), so they are not there to be seen.
MERGED = {
    "requantised_to_another_scale": {"conv_q", "conv_q_real_q"},
    "requantised_twice": {"conv_q", "conv_q_real_q", "conv_q_real_q_real_q"},
}
# Float fusions (FusedConv, NCHWc, QuickGelu) swallow every inner value of a float model.
FLOAT = {"float_model"}
# Values that ORT computes under another name: absent is honest, seen is better.
WEAK = {"one_float_into_two_equal_qs": {"conv_q"}, "slices_of_one_value_with_one_scale": {"slice_3_q"}}


def model_of(proto: onnx.ModelProto) -> OnnxModel:
    return model_from_bytes(proto.SerializeToString(), "small.onnx")


def untouched(proto: onnx.ModelProto, given: Mapping[str, Array]) -> dict[str, Array]:
    """The model's outputs as a session knows them that equivcheck never saw: default options, default level."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return dict(zip([port.name for port in session.get_outputs()], session.run(None, dict(given)), strict=True))


def record(model: OnnxModel, given: Mapping[str, Array], spec: str = "ort") -> tuple[Recording, Side]:
    with backend(spec).open(model) as session:
        recording = session.run("sample", given)
        return recording, session.side


def assert_same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Bit for bit, dtype and shape included."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == array.dtype


def assert_complete(model: OnnxModel, recording: Recording) -> None:
    """Every stored value is either there or named absent with a reason; never both."""
    assert set(recording.values) | set(recording.absent) == set(model.graph.stored)
    assert not set(recording.values) & set(recording.absent)
    assert all(recording.absent.values())
    assert set(recording.how) == set(recording.values)


def missing_before(model: OnnxModel, recording: Recording, name: str) -> bool:
    """True when a value that the step of `name` reads was not recorded: its step is then merged with another."""
    return any(read not in recording.values for read in model.graph.step_of_value[name].inputs)


def assert_local(model: OnnxModel, recording: Recording, given: Mapping[str, Array], merged_lsb: int = 16) -> None:
    """Each recorded value is within 1 LSB of its own step, evaluated by the oracle on the recorded inputs of that step."""
    oracle = Oracle(model.proto)
    for name, array in recording.values.items():
        if name in given:
            np.testing.assert_array_equal(array, given[name])
            continue
        expected = oracle.again(name, recording.values)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        if array.dtype.kind in "iu":
            distance = int(np.max(np.abs(array.astype(np.int64) - expected.astype(np.int64)), initial=0))
            limit = merged_lsb if missing_before(model, recording, name) else 1
            assert distance <= limit, f"{name}: {distance} LSB off, {recording.how[name]}"
        else:
            np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def factory(dtype: str, opset: int, per_channel: bool, **more: object) -> Qdq:
    return Qdq(dtype=dtype, opset=opset, per_channel=per_channel, seed=1, **more)  # type: ignore[arg-type]  # checked as it is called


@pytest.mark.parametrize(("dtype", "opset", "per_channel"), FORMS)
@pytest.mark.parametrize("name", [n for n in TRAPS if n != "names_like_our_own"])
def test_what_is_recorded_is_what_the_untouched_model_computes(
    name: str, dtype: str, opset: int, per_channel: bool
) -> None:
    proto = TRAPS[name](lambda: factory(dtype, opset, per_channel))
    given = feeds(proto)
    model = model_of(proto)
    recording, side = record(model, given)
    assert recording.disturbed is False
    assert side.observation is not None
    assert (side.observation.method, side.observation.disturbed) == ("faithful", False)
    assert_same(recording.outputs, untouched(proto, given))
    assert_complete(model, recording)
    assert_local(model, recording, given)
    if name not in FLOAT:
        assert set(recording.absent) <= MERGED.get(name, set()) | WEAK.get(name, set())
    for value, array in recording.values.items():
        assert array.dtype.kind == "b" or array.size < 4 or code_spread(array) >= 4, (
            f"{value} is too flat to test anything"
        )


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_value_that_ort_left_untransposed_is_not_passed_off_as_the_models(name: str, dtype: str) -> None:
    proto = TRANSPOSED[name](lambda: factory(dtype, 17, False))
    given = feeds(proto)
    model = model_of(proto)
    recording, _ = record(model, given)
    assert recording.disturbed is False
    assert_same(recording.outputs, untouched(proto, given))
    assert_complete(model, recording)
    assert_local(model, recording, given)


def test_a_first_sample_on_which_all_values_agree_confirms_nothing_for_the_next() -> None:
    proto = TRAPS["slices_of_one_value_with_one_scale"](lambda: factory("uint8", 17, False))
    model, given = model_of(proto), feeds(proto)
    with backend("ort").open(model) as session:
        session.run("black", {name: np.zeros_like(array) for name, array in given.items()})
        recording = session.run("picture", given)
    assert_complete(model, recording)
    assert_local(model, recording, given)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_model_may_use_the_names_that_the_observer_would_like_to_use(dtype: str) -> None:
    proto = TRAPS["names_like_our_own"](lambda: factory(dtype, 17, False))
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert_same(recording.outputs, untouched(proto, given))
    assert not recording.absent
    assert_local(model, recording, given)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), size=st.integers(2, 9))
def test_random_models_are_recorded_faithfully(seed: int, size: int) -> None:
    proto = RandomModel(seed, size, transposes=False).model()
    model, given = model_of(proto), feeds(proto, seed)
    recording, _ = record(model, given)
    assert recording.disturbed is False
    assert_same(recording.outputs, untouched(proto, given))
    assert_complete(model, recording)
    assert_local(model, recording, given, merged_lsb=255)


@pytest.mark.parametrize("seed", [14, 48, 144])
def test_random_models_with_transposes_are_recorded_faithfully(seed: int) -> None:
    proto = RandomModel(seed, 3 + seed % 10).model()
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert_complete(model, recording)
    assert_local(model, recording, given, merged_lsb=255)


@pytest.mark.parametrize(
    "spec", ["ort:int8=native", "ort:optimization=extended", "ort:optimization=basic", "ort:threads=1"]
)
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    "name", ["conv_relu_chain", "residual_adds", "conv_then_max_pool", "pools_and_softmax", "transpose_and_flatten"]
)
def test_other_ways_to_deploy_are_observed_as_faithfully(name: str, dtype: str, spec: str) -> None:
    proto = TRAPS[name](lambda: factory(dtype, 17, False))
    model, given = model_of(proto), feeds(proto)
    recording, side = record(model, given, spec)
    assert recording.disturbed is False
    assert side.spec == spec
    assert_complete(model, recording)
    assert_local(model, recording, given)


def test_plain_outputs_on_the_optimised_model_are_said_to_disturb_it() -> None:
    """s8, every value tapped: the Convs run in float, and the final codes move (up to 29 LSB inside)."""
    proto = TRAPS["residual_adds"](lambda: Qdq(dtype="int8", seed=2))
    model = model_of(proto)
    disturbed = []
    for seed in range(8):
        recording, side = record(model, feeds(proto, seed), "ort:observe=plain")
        assert side.observation is not None
        assert side.observation.method == "plain"
        assert_same(recording.outputs, untouched(proto, feeds(proto, seed)))
        disturbed.append(recording.disturbed)
    assert any(disturbed)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_without_optimisation_extra_outputs_change_nothing(dtype: str) -> None:
    proto = TRAPS["swish_with_inner_q"](lambda: factory(dtype, 17, True))
    model, given = model_of(proto), feeds(proto)
    recording, side = record(model, given, "ort:optimization=disable")
    assert side.observation is not None
    assert (side.observation.method, recording.disturbed, recording.absent) == ("plain", False, {})
    assert_local(model, recording, given)


def test_a_value_of_a_fused_pair_of_qs_is_absent_and_not_made_up() -> None:
    proto = TRAPS["requantised_to_another_scale"](lambda: factory("uint8", 17, False))
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert set(recording.absent) <= {"conv_q", "conv_q_real_q"}
    assert recording.absent
    assert "conv_2_q" in recording.values


def test_what_ort_fuses_in_a_float_model_is_absent_with_a_reason() -> None:
    proto = TRAPS["float_model"](lambda: factory("uint8", 17, False))
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert {"conv", "conv_2"} <= set(recording.absent)
    assert "optimised graph" in recording.absent["conv"]
    assert proto.graph.output[0].name in recording.values


def test_a_second_sample_is_judged_like_the_first() -> None:
    proto = TRAPS["residual_adds"](lambda: factory("int8", 17, True))
    model = model_of(proto)
    with backend("ort").open(model) as session:
        for seed in (0, 1, 2):
            given = feeds(proto, seed, spread=1 + seed)
            recording = session.run(f"sample {seed}", given)
            assert recording.sample == f"sample {seed}"
            assert_same(recording.outputs, untouched(proto, given))
            assert_complete(model, recording)
            assert_local(model, recording, given)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_value_of_unknown_batch_is_observed_once_its_shape_is_fixed(dtype: str) -> None:
    m = Qdq(dtype=dtype)
    x = m.dq(m.q(m.input("x", ("N", 4, 8, 8)), 0.025, zero_of(m)))
    m.channels[x] = 4
    proto = m.model(end(m, m.op("Relu", [m.conv(x, 4)]), 0.06, 0.0))
    given = {"x": np.random.default_rng(0).normal(0, 1, (3, 4, 8, 8)).astype(np.float32)}
    model = model_of(proto).with_input_shapes({"x": (3, 4, 8, 8)})
    recording, _ = record(model, given)
    assert_same(recording.outputs, untouched(proto, given))
    assert not recording.absent
    assert_local(model, recording, given)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_nodes_without_names_are_observed_too(dtype: str) -> None:
    proto = TRAPS["residual_adds"](lambda: Qdq(dtype=dtype, unnamed=True))
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert not recording.absent
    assert_local(model, recording, given)


def test_two_nodes_of_one_name_do_not_stop_the_run() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: factory("uint8", 17, False))
    for node in proto.graph.node:
        node.name = "layer"
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert not recording.absent
    assert_local(model, recording, given)


def test_an_int4_value_is_absent_and_the_rest_is_recorded() -> None:
    m = Qdq(dtype="uint8", opset=21)
    y = m.conv(start(m), 4)
    ends = [m.constant(np.float32(0.5))]
    m.initializers.append(helper.make_tensor("zero4", TensorProto.INT4, [], [0]))
    q = m.op("QuantizeLinear", [y, *ends, "zero4"], "nibbles")
    real = m.op("DequantizeLinear", [q, *ends, "zero4"], "nibbles_real")
    m.channels[real] = 4
    proto = m.model(end(m, m.conv(real, 4), 0.4))
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert set(recording.absent) == {"nibbles"}


def test_a_model_that_ort_itself_cannot_load_is_refused_in_its_own_words() -> None:
    """Two shapes that no broadcasting makes one."""
    m = Qdq(dtype="uint8")
    proto = m.model(end(m, m.op("Add", [start(m), start(m, (1, 3, 8, 8), "y")]), 0.1))
    with pytest.raises(EngineRefused, match="onnxruntime refused the model"):
        record(model_of(proto), feeds(proto))


def test_feeds_of_a_wrong_shape_are_refused_by_name() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: factory("uint8", 17, False))
    with pytest.raises(EngineRefused, match="x"):
        record(model_of(proto), {"x": np.zeros((1, 4, 9, 8), np.float32)})


def test_an_unknown_execution_provider_is_refused_with_those_there_are() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: factory("uint8", 17, False))
    with pytest.raises(UnknownOption, match="CPUExecutionProvider"):
        record(model_of(proto), feeds(proto), "ort:provider=Abacus")


@pytest.mark.parametrize(
    "spec", ["ort:optimization=most", "ort:int8=s8", "ort:threads=many", "ort:observe=all", "ort:speed=9"]
)
def test_an_option_ort_does_not_have_is_a_mistake_of_the_user(spec: str) -> None:
    with pytest.raises(UnknownOption):
        backend(spec)


@pytest.mark.parametrize(
    "name", ["digits_qdq_s8", "digits_qdq_u8", "digits_qop_u8", "detector_qdq_s8", "detector_qop_u8"]
)
def test_the_projects_own_networks_are_observed_whole(fixtures_dir: Path, name: str) -> None:
    model = load_model(fixtures_dir / f"{name}.onnx")
    given = feeds(model.proto, spread=0.5)
    recording, side = record(model, given)
    assert side.observation is not None
    assert (side.observation.method, recording.disturbed) == ("faithful", False)
    assert_same(recording.outputs, untouched(model.proto, given))
    assert recording.absent == {}
    qdq = OnnxModel(model.path, model.sha256, model.qdq.proto)
    assert_local(qdq, recording, given)


@pytest.mark.parametrize("name", ["tiny_resnet8_cifar10_int8_qdq", "st_mobilenet_v2_035_flowers_int8_qdq_u8s8_pc"])
def test_real_networks_are_observed_whole(shared: Path, name: str) -> None:
    model = load_model(shared / "models" / f"{name}.onnx")
    given = feeds(model.proto)
    recording, _ = record(model.with_input_shapes({n: a.shape for n, a in given.items()}), given)
    assert (recording.disturbed, recording.absent) == (False, {})
    assert_same(recording.outputs, untouched(model.proto, given))


def test_where_ort_is_not_the_model_its_values_are_recorded_as_they_are() -> None:
    """QGemm ignores the bias' own scale: the reference is wrong there, and that must stay visible."""
    m = Qdq(dtype="uint8", seed=1)
    codes = m.constant(np.full(8, 1000, np.int32), "bias")
    bias = m.op("DequantizeLinear", [codes, m.constant(np.float32(0.002))], "bias_real")  # 2.0; QGemm makes it 0.25
    y = end(m, m.op("Gemm", [start(m, (2, 16)), m.weight((8, 16)), bias], transB=1), 0.1)
    proto = m.model(end(m, m.op("Sigmoid", [y]), 1 / 256, 0.0))
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert_same(recording.outputs, untouched(proto, given))
    assert recording.absent == {}
    oracle = Oracle(proto)
    off = recording.values["gemm_q"].astype(int) - oracle.again("gemm_q", recording.values).astype(int)
    assert set(np.abs(off).ravel().tolist()) <= {17, 18}  # (2 - 0.25) / 0.1 = 17.5 LSB, rounded either way
    after = recording.values["sigmoid_q"].astype(int) - oracle.again("sigmoid_q", recording.values).astype(int)
    assert np.abs(after).max() <= 1


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("flag", [True, False])
def test_a_quantised_conv_inside_a_body_does_not_stop_the_observation(dtype: str, flag: bool) -> None:
    """An If body on s8 makes ORT write a file that it cannot load."""
    m = Qdq(dtype=dtype, seed=1)
    q = m.q(m.conv(start(m), 4), 0.07, zero_of(m))
    weight = m.constant(m.rng.integers(-127, 128, (4, 4, 1, 1)).astype(np.int8))
    scale, none = m.constant(np.float32(0.01)), m.constant(np.int8(0))
    condition = m.input("flag", (), "bool")
    branches = {
        name: helper.make_graph(
            [
                helper.make_node("DequantizeLinear", [q, *m.parameters[q]], [f"{name}_x"]),
                helper.make_node("DequantizeLinear", [weight, scale, none], [f"{name}_w"]),
                helper.make_node("Conv", [f"{name}_x", f"{name}_w"], [f"{name}_c"]),
                helper.make_node(op, [f"{name}_c"], [f"{name}_made"]),
                helper.make_node("QuantizeLinear", [f"{name}_made", *m.parameters[q]], [f"{name}_q"]),
                helper.make_node("DequantizeLinear", [f"{name}_q", *m.parameters[q]], [f"{name}_real"]),
            ],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_real", TensorProto.FLOAT, None)],
        )
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    m.op("If", [condition], "chosen", then_branch=branches["then"], else_branch=branches["else"])
    m.channels["chosen"] = 4
    proto = m.model(end(m, m.conv(end(m, "chosen", 0.07), 4), 0.3))
    model, given = model_of(proto), {**feeds(proto), "flag": np.array(flag)}
    recording, _ = record(model, given)
    assert recording.disturbed is False
    assert_same(recording.outputs, untouched(proto, given))
    assert_complete(model, recording)
    assert "conv_2_q" in recording.values or "conv_q_2" in recording.values


def qoperator_model(dtype: str) -> onnx.ModelProto:
    """QuantizeLinear - QLinearConv - QLinearAdd - QLinearGlobalAveragePool - DequantizeLinear."""
    m = Qdq(dtype=dtype)
    zero = zero_of(m)
    x = m.q(m.input("x", (1, 4, 8, 8)), 0.025, zero, out="x_q")

    def ends(name: str, scale: float) -> list[str]:
        return [m.constant(np.float32(scale), f"{name}_scale"), m.constant(np.asarray(zero, dtype), f"{name}_zero")]

    weight = m.constant(m.rng.integers(-127, 128, (4, 4, 3, 3)).astype(np.int8), "weight")
    ends_w = [m.constant(np.float32(0.01), "weight_scale"), m.constant(np.int8(0), "weight_zero")]
    bias = m.constant(m.rng.integers(-2000, 2000, 4).astype(np.int32), "bias")
    conv = ends("conv", 0.07)
    m.op("QLinearConv", [x, *m.parameters[x], weight, *ends_w, *conv, bias], "conv_q", pads=[1] * 4)
    added = ends("add", 0.09)
    m.op("QLinearAdd", ["conv_q", *conv, x, *m.parameters[x], *added], "add_q", domain="com.microsoft")
    pooled = ends("pool", 0.02)
    m.op("QLinearGlobalAveragePool", ["add_q", *added, *pooled], "pool_q", domain="com.microsoft", channels_last=0)
    m.parameters["pool_q"] = pooled
    m.ports = m.ports[:1]
    graph = helper.make_graph(
        [*m.nodes, helper.make_node("DequantizeLinear", ["pool_q", *pooled], ["y"], name="last")],
        "qoperator",
        m.ports,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 1, 1])],
        m.initializers,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_qoperator_model_is_observed_under_its_own_names(dtype: str) -> None:
    proto = qoperator_model(dtype)
    model, given = model_of(proto), feeds(proto)
    recording, _ = record(model, given)
    assert_same(recording.outputs, untouched(proto, given))
    assert set(recording.values) == {"x", "x_q", "conv_q", "add_q", "pool_q"}
    assert_local(OnnxModel("", "", model.qdq.proto), recording, given)


def test_the_oracle_itself_knows_a_conv_by_hand() -> None:
    """2x2 codes, 1x1 kernel 3, scales 1/2 and 1/4: real 0.125 * acc, into steps of 1/2, ties to even."""
    m = Qdq(dtype="uint8")
    q = m.q(m.input("x", (1, 1, 2, 2)), 0.5, 10)
    y = m.op("Conv", [m.dq(q), m.weight((1, 1, 1, 1), 0.25, codes=np.full((1, 1, 1, 1), 3, np.int8))])
    out = m.q(y, 0.5, 20)
    oracle = Oracle(m.model(m.dq(out)))
    codes = np.array([10, 12, 8, 255], np.uint8).reshape(1, 1, 2, 2)
    # (c - 10) * 3 / 4 + 20 = 20, 21.5 -> 22, 18.5 -> 18, 203.75 -> 204
    assert oracle.evaluate(out, {q: codes}).ravel().tolist() == [20, 22, 18, 204]
    assert numpy_helper.to_array(m.initializers[0]) == np.float32(0.5)
