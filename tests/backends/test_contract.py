"""What every backend must keep, whoever wrote it: the same tests for all of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from builder import Array, Qdq, feeds
from equivcheck.backends.base import Backend
from equivcheck.backends.fake import FakeBackend
from equivcheck.backends.registry import backend
from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineError
from equivcheck.models.onnx.cut import codes_of, head
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from equivcheck.recording import Recording
from small_models import TRAPS, end, start

SPECS = [
    "ort",
    "ort:optimization=disable",
    "ort:int8=native",
    "ort:observe=plain,optimization=disable",
    "vnpu",
    "vnpu:profile=exact,target=all",
    "vnpu:profile=ort",
    "fake",
    f"ort@python={sys.executable}",
    f"script:{Path(__file__).parent / 'scripts' / 'run_ort_unfused.py'}",
]
MODELS = [
    "conv_relu_chain",
    "residual_adds",
    "split_of_codes",
    "float_tail",
    "float_middle",
    "swish",
    "swish_with_inner_q",
    "if_body_with_codes",
    "codes_are_inputs_and_outputs",
    "codes_are_outputs",
    "inner_dequantised_value_is_an_output_too",
    "inner_float_value_is_an_output_too",
    "transpose_and_flatten",
    "pools_and_softmax",
    "where_and_min",
    "one_weight_for_two_convs",
    "two_readers",
    "dead_ends",
    "no_zero_points",
    "mixed_signs",
    "attention_like",
    "nearest_resize",
    "transposed_conv",
    "float_model",
]


@pytest.fixture(params=SPECS)
def engine(request: pytest.FixtureRequest) -> Backend:
    spec: str = request.param
    return FakeBackend() if spec == "fake" else backend(spec)


def model_of(proto: onnx.ModelProto) -> OnnxModel:
    return model_from_bytes(proto.SerializeToString(), "small.onnx")


def small(name: str = "residual_adds", dtype: str = "int8") -> OnnxModel:
    return model_of(TRAPS[name](lambda: Qdq(dtype=dtype, seed=1)))


def declared(model: OnnxModel, name: str) -> tuple[str | None, tuple[object, ...] | None]:
    value = model.graph.values[name]
    return value.dtype, value.shape


def assert_sound(model: OnnxModel, recording: Recording, given: Mapping[str, Array]) -> None:
    """The whole of what a recording promises about itself."""
    graph = model.graph
    assert set(recording.values) | set(recording.absent) | set(recording.failed) == set(graph.stored)
    assert not set(recording.values) & (set(recording.absent) | set(recording.failed))
    assert all(isinstance(reason, str) and reason for reason in recording.absent.values())
    assert set(recording.how) == set(recording.values)
    assert list(recording.outputs) == list(graph.outputs)
    for name, array in given.items():
        np.testing.assert_array_equal(recording.values[name], array)
    for name, array in recording.values.items():
        dtype, shape = declared(model, name)
        assert dtype in (None, str(array.dtype)), name
        assert shape is None or array.shape == shape, name
        if name in graph.quantisation:
            assert array.dtype == graph.quantisation[name].dtype, name
            assert np.array_equal(recording.quantisation[name].scale, graph.quantisation[name].scale)
    for name, array in recording.outputs.items():
        dtype, shape = declared(model, name)
        assert dtype in (None, str(array.dtype)), name
        assert shape is None or array.shape == shape, name


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_every_stored_value_is_recorded_as_the_model_has_it_or_named_absent(
    engine: Backend, name: str, dtype: str
) -> None:
    model = small(name, dtype)
    given = feeds(model.proto)
    with engine.open(model) as session:
        recording = session.run("one", given)
    assert recording.sample == "one"
    assert_sound(model, recording, given)


@pytest.mark.parametrize("name", ["residual_adds", "float_tail", "codes_are_outputs"])
def test_the_outputs_are_those_values(engine: Backend, name: str) -> None:
    """An output that is a stored value equals it; one that dequantises a stored value is (c - z) * s of it."""
    model = small(name)
    with engine.open(model) as session:
        recording = session.run("one", feeds(model.proto))
    for name, array in recording.outputs.items():
        stored = model.graph.store(name)
        assert stored is not None
        if stored not in recording.values:
            continue
        if stored == name:
            np.testing.assert_array_equal(array, recording.values[stored])
        else:
            codes, distance = codes_of(array, model.graph, stored)
            np.testing.assert_array_equal(codes, recording.values[stored])
            assert distance < 1e-3


def test_two_runs_are_equal_bit_for_bit_and_so_are_two_sessions(engine: Backend) -> None:
    model = small()
    given = feeds(model.proto)
    with engine.open(model) as session:
        runs = [session.run("one", given), session.run("two", given), session.run("three", given)]
    with engine.open(model) as session:
        runs.append(session.run("four", given))
    for other in runs[1:]:
        assert set(other.values) == set(runs[0].values)
        assert other.absent == runs[0].absent
        for name, array in runs[0].values.items():
            np.testing.assert_array_equal(array, other.values[name])
        for name, array in runs[0].outputs.items():
            np.testing.assert_array_equal(array, other.outputs[name])


def test_a_recording_is_not_overwritten_by_the_next_run(engine: Backend) -> None:
    model = small()
    with engine.open(model) as session:
        first = session.run("one", feeds(model.proto, 0))
        kept = {name: array.copy() for name, array in first.values.items()}
        second = session.run("two", feeds(model.proto, 1))
    for name, array in kept.items():
        np.testing.assert_array_equal(first.values[name], array)
    assert (first.sample, second.sample) == ("one", "two")
    assert any(not np.array_equal(second.values[name], array) for name, array in kept.items())
    assert_sound(model, second, feeds(model.proto, 1))


def test_the_feeds_are_left_as_they_were(engine: Backend) -> None:
    model = small()
    given = feeds(model.proto)
    before = {name: array.copy() for name, array in given.items()}
    for array in given.values():
        array.flags.writeable = False
    with engine.open(model) as session:
        session.run("one", given)
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])


def test_feeds_need_not_be_contiguous(engine: Backend) -> None:
    model = small()
    given = feeds(model.proto)
    strange = {name: np.asfortranarray(array) for name, array in given.items()}
    with engine.open(model) as session:
        one, other = session.run("one", given), session.run("other", strange)
    for name, array in one.values.items():
        np.testing.assert_array_equal(array, other.values[name])


def test_two_inputs_go_to_where_they_belong(engine: Backend) -> None:
    m = Qdq(dtype="uint8", seed=1)
    one, other = start(m, name="first"), start(m, name="second", scale=0.05)
    model = model_of(m.model(end(m, m.op("Add", [one, other]), 0.07)))
    given = feeds(model.proto)
    reversed_order = dict(reversed(given.items()))
    with engine.open(model) as session:
        recordings = [session.run("one", given), session.run("two", reversed_order)]
    for recording in recordings:
        assert_sound(model, recording, given)
        for name, scale in (("first", 0.025), ("second", 0.05)):
            codes = np.clip(np.rint(given[name] / np.float32(scale)) + 128, 0, 255)
            np.testing.assert_array_equal(recording.values[f"{name}_q"], codes)


def test_a_missing_feed_and_a_wrong_shape_are_errors_of_ours(engine: Backend) -> None:
    """Whoever calls checks feeds first; what slips through must not escape as a KeyError."""
    from equivcheck.errors import EquivcheckError

    model = small("where_and_min")
    given = feeds(model.proto)
    for bad in ({n: a for n, a in given.items() if n != "y"}, {**given, "x": np.zeros((1, 4, 9, 8), np.float32)}):
        with engine.open(model) as session, pytest.raises((EngineError, EquivcheckError)):
            session.run("bad", bad)


def test_a_model_that_cannot_be_computed_is_refused(engine: Backend) -> None:
    """An operator that no engine has."""
    m = Qdq(seed=1)
    y = m.op("Frobnicate", [start(m)], domain="nowhere")
    m.channels[y] = 4
    out = end(m, y, 0.1)
    port = onnx.helper.make_tensor_value_info(out, onnx.TensorProto.FLOAT, [1, 4, 8, 8])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("nowhere", 1)]
    graph = onnx.helper.make_graph(m.nodes, "g", m.ports, [port], m.initializers)
    model = model_of(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))
    with pytest.raises(EngineError), engine.open(model) as session:  # it may refuse early or late
        session.run("one", feeds(model.proto))


def test_a_head_is_deployed_and_ends_on_the_grid(engine: Backend) -> None:
    model = small("residual_adds")
    given = feeds(model.proto)
    if isinstance(engine, FakeBackend):  # it runs no other model, and says so
        with pytest.raises(EngineError, match="no other model"):
            engine.deploy(model.proto)
        return
    for value in [name for name in model.graph.stored if name in model.graph.quantisation][::2]:
        run = engine.deploy(head(model, [value]))
        (array,) = run(given).values()
        _, distance = codes_of(array, model.graph, value)
        assert distance < 1e-3


def test_what_is_deployed_gives_the_models_outputs_by_name(engine: Backend) -> None:
    if isinstance(engine, FakeBackend):
        with pytest.raises(EngineError):
            engine.deploy(small().proto)
        return
    model = small("two_readers")
    given = feeds(model.proto)
    found = engine.deploy(model.proto)(given)
    with engine.open(model) as session:
        expected = session.run("one", given).outputs
    assert list(found) == list(model.graph.outputs)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_closing_twice_is_no_mistake(engine: Backend) -> None:
    session = engine.open(small())
    session.run("one", feeds(small().proto))
    session.close()
    session.close()


def test_a_side_says_who_ran_what(engine: Backend) -> None:
    model = small()
    with engine.open(model) as session:
        session.run("one", feeds(model.proto))
        side = session.side
    assert side.spec == str(engine.spec)
    assert side.engine
    assert side.model_sha256 == model.sha256
    assert side.observation is not None
    assert side.observation.method


def test_leaving_a_session_by_an_error_does_not_hide_the_error(engine: Backend) -> None:
    with pytest.raises(ZeroDivisionError), engine.open(small()):
        raise ZeroDivisionError


def test_an_unbatched_and_an_empty_shape_are_taken(engine: Backend) -> None:
    m = Qdq(dtype="uint8", seed=1)
    y = m.q(m.op("Relu", [m.dq(m.q(m.input("x", (7,)), 0.03, 128))]), 0.03, 0)
    model = model_of(m.model(m.dq(y)))
    given = feeds(model.proto)
    with engine.open(model) as session:
        assert_sound(model, session.run("one", given), given)


@pytest.mark.parametrize("name", ["one_float_into_two_qs", "float_skip"])
def test_steps_that_share_a_float_are_run(engine: Backend, name: str) -> None:
    """A float that feeds two Qs, or a Q and the Add of a residual block."""
    if name == "float_skip":
        m = Qdq(seed=1)
        c = m.conv(start(m), 4, out="c")
        y = end(m, m.op("Relu", [m.conv(end(m, c, 0.07), 4)]), 0.2, 0.0)
        s = m.op("Add", [c, m.conv(y, 4)], "s")
        m.channels[s] = 4
        model = model_of(m.model(end(m, m.conv(end(m, s, 0.5), 4), 1.0)))
    else:
        model = small(name)
    given = feeds(model.proto)
    with engine.open(model) as session:
        assert_sound(model, session.run("one", given), given)


def test_a_float_that_is_stored_and_quantised_is_run(engine: Backend) -> None:
    """Relu feeds a Q and a float Add: both the float and the codes are stored by one step."""
    m = Qdq(seed=1)
    x = m.input("x", (1, 4, 8, 8))
    y = m.op("Relu", [x])
    m.channels[y] = 4
    z = m.conv(m.dq(m.q(y, 0.02, 0)), 4)
    model = model_of(m.model(m.op("Add", [y, z])))
    given = feeds(model.proto)
    with engine.open(model) as session:
        assert_sound(model, session.run("one", given), given)


@pytest.mark.parametrize("spec", ["vnpu:profile=exact,target=all", "vnpu:profile=ort,target=all"])
@pytest.mark.parametrize("name", ["conv_relu_chain", "depthwise_and_stride", "one_weight_for_two_convs"])
def test_a_conv_of_the_virtual_npu_is_onnx_runtimes_within_one_code(name: str, spec: str) -> None:
    """On the same inputs: the first Conv behind the input's Q, which both round alike."""
    model = small(name, "uint8")
    given = feeds(model.proto)
    with backend(spec).open(model) as session:
        npu = session.run("one", given)
    with backend("ort:optimization=disable").open(model) as session:
        cpu = session.run("one", given)
    first, second = [n for n in model.graph.stored if n not in given][:2]
    np.testing.assert_array_equal(npu.values[first], cpu.values[first])
    distance = np.abs(npu.values[second].astype(int) - cpu.values[second].astype(int))
    assert distance.max() <= 1


def test_the_engine_itself_runs_only_what_it_is_asked_for() -> None:
    model = small("two_readers")
    engine = OrtEngine()
    engine.load(model.proto.SerializeToString(), {"optimization": "disable"})
    one = model.graph.outputs[1]
    assert list(engine.run(feeds(model.proto), [one])) == [one]
