"""The isolated model: fed with a run's own values, every step gives those values back.

The law is tried at ORT_DISABLE_ALL, where extra outputs change nothing, on every small model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder import Array, Qdq, feeds
from equivcheck.engines.ort import OrtEngine
from equivcheck.models.onnx.cut import codes_of
from equivcheck.models.onnx.isolate import NOISE_LSB, isolate, real_in_codes, spec_of
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from random_models import RandomModel
from small_models import TRANSPOSED, TRAPS, end, start, zero_of

MODELS = {**TRAPS, **TRANSPOSED}
FORMS = [("uint8", 13, True), ("int8", 21, False)]


def model_of(proto: onnx.ModelProto) -> OnnxModel:
    return model_from_bytes(proto.SerializeToString(), "small.onnx")


def run(proto: onnx.ModelProto, given: Mapping[str, Array], outputs: Collection[str] | None = None) -> dict[str, Array]:
    """Outputs of `proto`, or any of its values, without optimisation."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    have = {port.name for port in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs or () if name not in have)
    engine = OrtEngine()
    engine.load(copy.SerializeToString(), {"optimization": "disable"})
    return engine.run(given)


def plain_values(model: OnnxModel, given: Mapping[str, Array]) -> dict[str, Array]:
    """Every stored value, by extra outputs on the model itself."""
    made = [name for name in model.graph.stored if name not in given]
    found = run(model.qdq.proto, given, made)
    return {**given, **{name: found[name] for name in made}}


def isolated_values(
    model: OnnxModel, values: Mapping[str, Array], cuts: Collection[str], form: str
) -> tuple[dict[str, Array], dict[str, str]]:
    """What each output of the isolated model gives, by stored value; and what passes through."""
    made = isolate(model, {name: spec_of(values[name]) for name in cuts}, form=form)  # type: ignore[arg-type]  # checked as it is called
    feed = made.feed(values)
    assert set(feed) == {port.name for port in made.proto.graph.input}
    got = run(made.proto, feed) if made.outputs else {}
    shown = {name: got[port] for name, port in made.outputs.items()}
    shown |= {name: values[source] for name, source in made.passthrough.items()}
    return shown, dict(made.passthrough)


def assert_real(model: OnnxModel, values: Mapping[str, Array], name: str, result: Array) -> None:
    """The code is the correct rounding of the real value: at most 1/2 apart, and float32 noise."""
    array = values[name]
    if name not in model.graph.quantisation or array.dtype.kind not in "iu":
        np.testing.assert_allclose(array, result, rtol=1e-5, atol=1e-6, err_msg=name)
        return
    real = np.clip(real_in_codes(model.graph, name, result), *(float(v) for v in limits(array)))
    assert float(np.max(np.abs(array - real), initial=0.0)) <= 0.5 + 1e-2 * (array.dtype.itemsize > 1) + 1e-3, name


def limits(array: Array) -> tuple[int, int]:
    return int(np.iinfo(array.dtype).min), int(np.iinfo(array.dtype).max)


WIDE = "integer_activations_of_other_width"


@pytest.mark.parametrize(("dtype", "opset", "per_channel"), FORMS)
@pytest.mark.parametrize("name", [n for n in MODELS if n != WIDE])
def test_fed_with_a_runs_own_values_every_step_gives_them_back(
    name: str, dtype: str, opset: int, per_channel: bool
) -> None:
    assert_reproduced(MODELS[name](lambda: Qdq(dtype=dtype, opset=opset, per_channel=per_channel, seed=1)))


def assert_reproduced(proto: onnx.ModelProto, off_grid: float = 1e-3) -> None:
    model = model_of(proto)
    values = plain_values(model, feeds(proto))
    made = [v for v in model.graph.stored if v not in model.graph.inputs]
    for form in ("codes", "dequantised", "real"):
        shown, passed = isolated_values(model, values, list(values), form)
        assert set(shown) == set(made)
        for value in made:
            if form == "real":
                assert_real(model, values, value, shown[value])
            elif form == "dequantised" and value in model.graph.quantisation and shown[value].dtype.kind == "f":
                codes, distance = codes_of(shown[value], model.graph, value)
                assert distance < off_grid
                np.testing.assert_array_equal(codes, values[value], err_msg=value)
            else:
                np.testing.assert_array_equal(shown[value], values[value], err_msg=f"{value} {form} {passed}")


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_sixteen_bit_codes_of_the_contrib_domain_are_given_back(dtype: str) -> None:
    """Below opset 21 only com.microsoft's Q and DQ know 16 bits."""
    assert_reproduced(MODELS[WIDE](lambda: Qdq(dtype=dtype, opset=13, seed=1)), off_grid=4e-3)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_sixteen_bit_codes_are_given_back(dtype: str) -> None:
    """2^15 codes in float32 with its 2^-24: the grid itself is only 2^-9 of a step sharp."""
    assert_reproduced(MODELS[WIDE](lambda: Qdq(dtype=dtype, opset=21, seed=1)), off_grid=4e-3)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    "name", ["residual_adds", "swish_with_inner_q", "float_middle", "split_of_codes", "if_body_with_codes"]
)
def test_a_value_that_is_not_cut_is_computed_with_its_readers(name: str, dtype: str) -> None:
    model = model_of(MODELS[name](lambda: Qdq(dtype=dtype, seed=1)))
    values = plain_values(model, feeds(model.proto))
    inputs = model.graph.inputs
    for left_out in (v for v in model.graph.stored if v not in inputs):
        cuts = [v for v in values if v != left_out]
        shown, _ = isolated_values(model, values, cuts, "codes")
        assert set(shown) == {v for v in cuts if v not in inputs}
        for value, array in shown.items():
            np.testing.assert_array_equal(array, values[value], err_msg=f"{value} without {left_out}")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), size=st.integers(2, 8), picks=st.randoms(use_true_random=False))
def test_whatever_is_left_out_the_rest_is_reproduced(seed: int, size: int, picks: object) -> None:
    model = model_of(RandomModel(seed, size).model())
    values = plain_values(model, feeds(model.proto))
    cuts = [v for v in values if v in model.graph.inputs or picks.random() < 0.6]  # type: ignore[attr-defined]  # outside of the public types
    for form in ("codes", "real"):
        shown, _ = isolated_values(model, values, cuts, form)
        for value, array in shown.items():
            if form == "real":
                assert_real(model, values, value, array)
            else:
                np.testing.assert_array_equal(array, values[value], err_msg=value)


def test_the_readers_read_the_fed_copy_and_not_what_is_computed() -> None:
    """Feed another value than the step makes: its reader follows the fed one, its own output stays."""
    model = model_of(TRAPS["conv_relu_chain"](lambda: Qdq(seed=1)))
    values = plain_values(model, feeds(model.proto))
    honest, _ = isolated_values(model, values, list(values), "codes")
    changed = {**values, "relu_q": np.ascontiguousarray(values["relu_q"][..., ::-1])}
    shown, _ = isolated_values(model, changed, list(values), "codes")
    np.testing.assert_array_equal(shown["relu_q"], honest["relu_q"])
    assert not np.array_equal(shown["conv_2_q"], honest["conv_2_q"])


def test_fed_names_avoid_those_that_the_model_has() -> None:
    m = Qdq(seed=1)
    q = m.q(m.conv(start(m), 4), 0.07, zero_of(m), out="v")
    y = m.q(m.conv(m.dq(q, out="v/fed"), 4), 0.4, zero_of(m), out="v/fed_")
    model = model_of(m.model(m.dq(y, out="v/fed/shown")))
    values = plain_values(model, feeds(model.proto))
    for form in ("codes", "dequantised"):
        shown, _ = isolated_values(model, values, list(values), form)
        assert set(shown) == {"x_q", "v", "v/fed_"}
    shown, _ = isolated_values(model, values, list(values), "codes")
    np.testing.assert_array_equal(shown["v/fed_"], values["v/fed_"])


@pytest.mark.parametrize("length", [800, 3000])
def test_names_may_be_long_and_hold_slashes(length: int) -> None:
    stem = "/model/layer.0/" + "attention/" * (length // 10)
    m = Qdq(seed=1)
    q = m.q(m.conv(start(m), 4, out=stem + "conv:0"), 0.07, zero_of(m), out=stem + "q;1")
    model = model_of(m.model(end(m, m.conv(m.dq(q), 4), 0.4)))
    values = plain_values(model, feeds(model.proto))
    shown, _ = isolated_values(model, values, list(values), "codes")
    np.testing.assert_array_equal(shown[stem + "q;1"], values[stem + "q;1"])


def test_a_choice_of_steps_needs_only_their_inputs() -> None:
    model = model_of(TRAPS["residual_adds"](lambda: Qdq(seed=1)))
    values = plain_values(model, feeds(model.proto))
    specs = {name: spec_of(array) for name, array in values.items()}
    for step in model.graph.steps:
        made = isolate(model, specs, form="codes", steps=[step])
        assert set(made.outputs) == set(step.outputs)
        assert set(made.feeds) == set(step.inputs)
        got = run(made.proto, made.feed(values))
        for name, port in made.outputs.items():
            np.testing.assert_array_equal(got[port], values[name])


def test_noise_before_a_missing_q_moves_its_code_by_at_most_one_and_differs_from_run_to_run() -> None:
    model = model_of(TRAPS["conv_relu_chain"](lambda: Qdq(seed=1)))
    values = plain_values(model, feeds(model.proto))
    cuts = {n: spec_of(a) for n, a in values.items() if n != "relu_q"}
    made = isolate(model, cuts, form="codes", noise={"relu_q"})
    proto = onnx.ModelProto()
    proto.CopyFrom(made.proto)
    proto.graph.output.append(onnx.ValueInfoProto(name="relu_q"))
    engine = OrtEngine()
    engine.load(proto.SerializeToString(), {"optimization": "disable"})
    runs = [engine.run(made.feed(values))["relu_q"].astype(int) for _ in range(4)]
    off = np.stack(runs) - values["relu_q"].astype(int)
    # 0.3 LSB before rounding changes a code by at most one, and in 2 * E|u| = 2 * 0.15 = 30 % of unsaturated elements
    assert np.abs(off).max() == 1
    inner = (values["relu_q"] > 1) & (values["relu_q"] < 254)
    assert 0.8 * NOISE_LSB / 2 < np.mean(off[:, inner] != 0) < 1.2 * NOISE_LSB
    assert any(not np.array_equal(runs[0], other) for other in runs[1:])


def test_the_real_value_is_in_codes_zero_point_included_and_not_clipped() -> None:
    m = Qdq(dtype="int8")
    m.input("x", (2, 2), "int8")
    y = m.op(
        "Gemm", [m.dq("x", 0.5, 3), m.weight((2, 2), 0.25, codes=np.array([[100, 0], [0, -2]], np.int8))], transB=1
    )
    q = m.q(y, 0.125, -7)
    model = model_of(m.model(q))
    x = np.array([[127, 5], [3, 4]], np.int8)
    shown, _ = isolated_values(model, {"x": x, q: np.zeros((2, 2), np.int8)}, ["x", q], "real")
    # (c - 3) * 0.5 * w * 0.25 / 0.125 - 7 = (c - 3) * w - 7
    assert real_in_codes(model.graph, q, shown[q]).tolist() == [[12393.0, -11.0], [-7.0, -9.0]]
