"""Two files of one network, written by different tools. Truth is what made the second file: a renaming, or a conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import equivcheck
from builder import Qdq, feeds
from equivcheck.backends.fake import FakeBackend
from equivcheck.backends.paired import PairedBackend, is_foreign
from equivcheck.backends.registry import backend
from equivcheck.errors import ModelError, UnsupportedModel
from equivcheck.models.graph import Quantisation
from equivcheck.models.onnx.load import OnnxModel, captured_names, load_model
from equivcheck.models.tflite.load import tflite_from_bytes
from equivcheck.pairing.feeds import feeds_for
from equivcheck.pairing.match import foreign, pair
from equivcheck.pairing.order import Order, Reshape, Turn, layouts
from equivcheck.pairing.weights import different_weights
from equivcheck.recording import Recording
from equivcheck.twins.convert import convert
from random_models import RandomModel
from small_models import TRAPS, end, start

Change = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]


def loaded(proto: onnx.ModelProto, name: str = "model.onnx") -> OnnxModel:
    return OnnxModel(name, name, proto)


def renamed(proto: onnx.ModelProto, seed: int = 0) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The same model with other names everywhere and its nodes in another order; old name -> new name."""
    rng = np.random.default_rng(seed)
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    names: dict[str, str] = {"": ""}

    def new(name: str) -> str:
        return names.setdefault(name, f"v{rng.integers(1 << 30)}_{len(names)}")

    def rename(graph: onnx.GraphProto) -> None:
        for port in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            port.name = new(port.name)
        for node in graph.node:
            node.name = f"n{rng.integers(1 << 40)}"
            node.input[:] = [new(name) for name in node.input]
            node.output[:] = [new(name) for name in node.output]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename(attribute.g)

    rename(made.graph)
    left = list(made.graph.node)
    known = {"", *(port.name for port in (*made.graph.input, *made.graph.initializer))}
    del made.graph.node[:]
    while left:
        ready = [node for node in left if {*node.input, *captured_names(node)} <= known]
        chosen = ready[int(rng.integers(len(ready)))]
        left.remove(chosen)
        known.update(chosen.output)
        made.graph.node.append(chosen)
    return made, names


def paired(own: onnx.ModelProto, other: onnx.ModelProto, change: Change = lambda values: values) -> PairedBackend:
    return PairedBackend(FakeBackend(change), loaded(other, "other.onnx"), loaded(own))


def recorded(candidate: PairedBackend, given: Mapping[str, np.ndarray]) -> Recording:
    with candidate.open(candidate.own) as session:
        return session.run("s", given)


def truth(model: onnx.ModelProto, given: Mapping[str, np.ndarray]) -> Recording:
    with FakeBackend().open(loaded(model)) as session:
        return session.run("s", given)


def with_constant(proto: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> onnx.ModelProto:
    """A copy in which one initializer is another array."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    tensor = next(t for t in made.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(numpy_helper.to_array(tensor).copy())), name))
    return made


def chain(dtype: str = "int8", shape: tuple[int, ...] = (1, 4, 8, 8)) -> onnx.ModelProto:
    """Three Convs, a residual Add and a pool."""
    m = Qdq(dtype=dtype, seed=5)
    x = start(m, shape)
    a = end(m, m.op("Relu", [m.conv(x, 8, x_scale=0.025)]), 0.06, 0.0)
    b = end(m, m.conv(a, 8, x_scale=0.06), 0.4)
    c = end(m, m.op("Add", [a, b]), 0.41)
    d = end(m, m.op("GlobalAveragePool", [c]), 0.1)
    return m.model(end(m, m.conv(d, 4, kernel=1, x_scale=0.1), 0.07))


# -- place ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_values_of_a_renamed_and_reordered_random_model_are_found_by_what_they_hold(seed: int) -> None:
    model = RandomModel(seed, 12).model()
    other, names = renamed(model, seed)
    candidate, given = paired(model, other), feeds(model)
    got, want = recorded(candidate, {**given}), truth(model, given)
    assert set(got.values) == set(want.values), got.absent
    for name in want.values:
        np.testing.assert_array_equal(got.values[name], want.values[name], err_msg=f"{name} {got.how[name]}")
    for name in want.outputs:
        np.testing.assert_array_equal(got.outputs[name], want.outputs[name])
    assert names.keys() >= set(want.values)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", sorted(set(TRAPS) - {"integer_activations_of_other_width"}))
def test_a_small_model_s_values_are_found_under_other_names(name: str, dtype: str) -> None:
    model = TRAPS[name](lambda **options: Qdq(**{"dtype": dtype, **options}))
    other, names = renamed(model)
    found = pair(loaded(model).graph, loaded(other).graph)
    assert not found.unmatched
    for value, match in found.matches.items():
        assert match.theirs == names[value] or match.derived or match.rivals


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", sorted(TRAPS))
def test_a_twin_s_tensors_are_found_whatever_tflite_writes_for_an_operator(name: str, dtype: str) -> None:
    model = loaded(TRAPS[name](lambda **options: Qdq(**{"dtype": dtype, **options})))
    try:
        twin = convert(model)
    except UnsupportedModel:
        return  # there is no twin to be paired with
    found = pair(model.graph, tflite_from_bytes(twin.content, "twin.tflite").graph)
    assert set(found.unmatched) <= set(model.graph.inputs)  # floats that TFLite is fed as codes
    for value, match in found.matches.items():
        same = found.other.of[match.theirs] is found.other.of[twin.tensors[value]]
        assert same or match.rivals


@pytest.mark.parametrize("seed", range(40))
def test_a_random_twin_s_tensors_are_found_by_the_graphs_alone(seed: int) -> None:
    model = loaded(RandomModel(seed, 12).model())
    try:
        twin = convert(model)
    except UnsupportedModel:
        return  # there is no twin to be paired with
    found = pair(model.graph, tflite_from_bytes(twin.content, "twin.tflite").graph)
    assert set(found.unmatched) <= set(model.graph.inputs)
    for value, match in found.matches.items():
        assert found.other.of[match.theirs] is found.other.of[twin.tensors[value]] or match.rivals


@pytest.mark.parametrize("seed", [317, 322, 339])
def test_a_random_twin_s_values_are_those_of_the_twin_run_by_its_names(seed: int) -> None:
    """Cubes under transposes, and tables for sigmoids that share a grid with their neighbours: only numbers tell them."""
    model = loaded(RandomModel(seed, 12).model())
    given, engine = feeds(model.proto, seed), backend("tflite:kernels=reference")
    with engine.open(model) as session:
        want = session.run("s", given)
    got = recorded(PairedBackend(engine, tflite_from_bytes(convert(model).content, "twin.tflite"), model), given)
    assert set(got.values) == set(want.values)
    for name in want.values:
        np.testing.assert_array_equal(got.values[name], want.values[name], err_msg=f"{name} {got.how[name]}")
    for name in want.outputs:
        np.testing.assert_array_equal(got.outputs[name], want.outputs[name])


def test_values_in_another_order_of_the_file_are_not_paired_by_position() -> None:
    model = chain()
    for seed in range(5):
        other, names = renamed(model, seed)
        own, theirs = loaded(model).graph, loaded(other).graph
        assert [names[value] for value in own.stored] == [
            pair(own, theirs).matches[value].theirs for value in own.stored
        ]


def branches(weights: np.ndarray, swap: bool) -> onnx.ModelProto:
    """Two Convs of one shape and one grid on the same value, whose weights are the same numbers in another order."""
    m = Qdq(dtype="int8", seed=1)
    x = start(m)
    m.channels[x] = 4
    made = {}
    for name in ("second", "first") if swap else ("first", "second"):
        codes = weights if name == "first" else weights[::-1, :, ::-1]
        weight = m.weight(codes.shape, codes=np.ascontiguousarray(codes))
        made[name] = m.q(m.op("Conv", [x, weight], kernel_shape=[3, 3], pads=[1] * 4), 0.4, 0, out=f"{name}_q")
    y = m.op("Sub", [m.dq(made["first"]), m.dq(made["second"])])
    return m.model(end(m, y, 0.5))


def test_branches_that_only_numbers_tell_apart_are_told_apart_by_numbers() -> None:
    weights = np.random.default_rng(3).integers(-127, 128, (4, 4, 3, 3)).astype(np.int8)
    model = branches(weights, swap=False)
    for seed in range(4):
        other, _ = renamed(branches(weights, swap=True), seed)
        candidate, given = paired(model, other), feeds(model)
        assert candidate.pairing.matches["first_q"].rivals
        got, want = recorded(candidate, given), truth(model, given)
        for name in ("first_q", "second_q"):
            np.testing.assert_array_equal(got.values[name], want.values[name])
            assert "not confirmed" not in got.how[name]


def test_a_file_with_the_same_names_for_most_values_and_inputs_is_not_foreign() -> None:
    model = chain()
    own, other = loaded(model).graph, loaded(renamed(model)[0]).graph
    assert not foreign(own, own)
    assert foreign(own, other)
    twin = tflite_from_bytes(convert(loaded(model)).content, "twin.tflite")
    assert is_foreign(loaded(model), twin)


# -- judged --------------------------------------------------------------------------------------------------------------


def test_the_same_network_under_other_names_is_equivalent_and_says_how_it_was_paired() -> None:
    model = chain()
    candidate = paired(model, renamed(model)[0])
    result = equivcheck.diff(loaded(model), candidate=candidate, reference="ort:optimization=disable")
    assert result.verdict == "equivalent"
    assert result.coverage.judged == result.coverage.steps
    assert result.candidate.notes[0].startswith("6 of 6 values are paired with 7 of 7 of other.onnx")
    assert "6 are confirmed by their own step" in result.candidate.notes[0]
    assert not result.candidate.warnings


@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_a_fault_of_the_candidate_is_found_at_the_model_s_step(step: int) -> None:
    model = chain()
    other, names = renamed(model)
    name = loaded(model).graph.steps[step - 1].outputs[0]

    def off_by_three(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        shifted = np.clip(values[names[name]].astype(np.int16) + 3, -128, 127).astype(np.int8)
        return {**values, names[name]: shifted}

    result = equivcheck.diff(loaded(model), candidate=paired(model, other, off_by_three))
    assert result.verdict == "different"
    assert [culprit.step for culprit in result.culprits] == [step]


def test_a_value_the_candidate_did_not_deliver_is_absent_and_its_step_is_merged() -> None:
    model = chain()
    other, names = renamed(model)
    name = loaded(model).graph.steps[2].outputs[0]

    def without(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: array for key, array in values.items() if key != names[name]}

    result = equivcheck.diff(loaded(model), candidate=paired(model, other, without))
    assert result.verdict == "equivalent"
    assert [item.name for item in result.coverage.absent] == [name]
    assert names[name] in result.coverage.absent[0].reason


def test_other_weights_are_named_with_their_step_and_the_step_is_the_culprit() -> None:
    model = chain()
    weight = next(t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 4)

    def two_of_them(codes: np.ndarray) -> np.ndarray:
        codes[0, 0, :2, 0] = -codes[0, 0, :2, 0] + 5
        return codes

    other, _ = renamed(with_constant(model, weight, two_of_them))
    result = equivcheck.diff(loaded(model), candidate=paired(model, other))
    assert result.verdict == "different"
    assert [culprit.step for culprit in result.culprits] == [2]
    assert result.candidate.warnings == ["the candidate model has other weights at #2 Conv: 2 of 288 weights differ"]


def test_a_file_requantised_by_another_tool_is_another_model_and_says_where_first(fixtures_dir: Path) -> None:
    model, other = (load_model(fixtures_dir / f"digits_{form}.onnx") for form in ("qdq_s8", "qop_u8"))
    result = equivcheck.diff(model, candidate=PairedBackend(backend("ort"), other, model))
    assert result.verdict == "different"
    assert [culprit.step for culprit in result.culprits] == [2, 3, 4, 6, 9]
    (warning,) = result.candidate.warnings
    assert warning.startswith("the candidate model has other weights at #2 Conv: 139 of 144 weights differ; 16 of 16")
    assert warning.endswith("; and at 4 more: #3, #4, #6, #9")


def test_another_weight_scale_and_another_bias_are_other_weights() -> None:
    model = chain()
    own = loaded(model).graph
    names = [t.name for t in model.graph.initializer]
    scaled = with_constant(model, next(n for n in names if n.startswith("weight_scale")), lambda s: s * np.float32(1.5))
    found = different_weights(pair(own, loaded(renamed(scaled)[0]).graph))
    assert list(found.values()) == ["1 of 1 weight scales differ (such as 0.015 against 0.01)"]
    biased = with_constant(model, "bias", lambda codes: codes + 7)
    found = different_weights(pair(own, loaded(renamed(biased)[0]).graph))
    assert list(found.values()) == ["8 of 8 biases differ"]
    assert found.keys() == {own.steps[1].outputs[0]}
    assert not different_weights(pair(own, loaded(renamed(model)[0]).graph))


def test_a_value_that_the_candidate_quantises_otherwise_is_paired_by_place_and_reported() -> None:
    model = chain()
    own = loaded(model).graph
    value = own.steps[2].outputs[0]
    scale = own.producer[value].inputs[1]
    other, names = renamed(with_constant(model, scale, lambda s: s * np.float32(1.25)))
    match = pair(own, loaded(other).graph).matches[value]
    assert match.theirs == names[value]
    assert not match.same_grid
    result = equivcheck.diff(loaded(model), candidate=paired(model, other))
    assert result.verdict == "different"
    assert {tensor.name for tensor in result.tensors if tensor.verdict == "different"} == {value}
    assert "scale 0.5 against 0.4" in next(t.reason for t in result.tensors if t.name == value)


def activated(kind: str) -> onnx.ModelProto:
    m = Qdq(dtype="int8", seed=2)
    y = end(m, m.conv(start(m), 8), 0.05)
    return m.model(end(m, m.conv(m.qdq(m.op(kind, [y]), 1 / 128, 0), 4), 0.1))


def test_another_function_at_a_place_is_paired_where_its_reader_is_right_on_it_and_is_the_culprit() -> None:
    model = activated("Sigmoid")
    other, names = renamed(activated("Tanh"))
    value = loaded(model).graph.steps[2].outputs[0]
    candidate = paired(model, other)
    assert candidate.pairing.matches[value].weak
    result = equivcheck.diff(loaded(model), candidate=candidate)
    assert [culprit.op_type for culprit in result.culprits] == ["Sigmoid"]
    assert "not confirmed by its own step" in (next(t for t in result.tensors if t.name == value).how.candidate or "")
    assert names["tanh_q"] in (next(t for t in result.tensors if t.name == value).how.candidate or "")


def test_what_no_number_speaks_for_is_not_paired() -> None:
    """Its place is not sure, its numbers are not its step's, and the step that reads it is not right on them either."""
    model = activated("Sigmoid")
    other, names = renamed(activated("Tanh"))
    value = loaded(model).graph.steps[2].outputs[0]

    def noise(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        codes = values[names["tanh_q"]]
        return {**values, names["tanh_q"]: np.random.default_rng(0).integers(-128, 128, codes.shape).astype(np.int8)}

    candidate = PairedBackend(FakeBackend(noise, stale=True), loaded(other), loaded(model))
    got = recorded(candidate, feeds(model))
    assert value in got.absent
    assert value not in got.values


def test_placement_speaks_of_the_model_s_steps() -> None:
    model = chain()
    other, names = renamed(model, 3)
    candidate = PairedBackend(backend("vnpu:target=warboy"), loaded(other), loaded(model))
    with candidate.open(loaded(model)) as session:
        session.run("s", feeds(model))
        side = session.side
    own = loaded(model).graph
    cpu = [place.step for place in side.placement if place.where == "cpu"]
    assert [own.steps[step - 1].op_type for step in cpu if step is not None] == ["GlobalAveragePool"]
    assert {crossing.value for crossing in side.crossings} <= set(own.stored)
    assert side.crossings
    assert names.keys() >= {crossing.value for crossing in side.crossings}


# -- layout --------------------------------------------------------------------------------------------------------------


def test_a_cube_of_an_image_is_turned_as_its_readers_say_where_its_shape_does_not() -> None:
    m = Qdq(dtype="int8", seed=4)
    model = m.model(end(m, m.conv(end(m, m.conv(start(m, (1, 6, 6, 6)), 6), 0.1), 6), 0.2))
    twin = tflite_from_bytes(convert(loaded(model)).content, "twin.tflite")
    found = pair(loaded(model).graph, twin.graph)
    assert [(port.order.words, port.own) for port in found.ports] == [("NCHW to NHWC", "x")]
    candidate = PairedBackend(backend("tflite:kernels=reference"), twin, loaded(model))
    result = equivcheck.diff(loaded(model), candidate=candidate)
    assert result.verdict == "equivalent"
    assert "3 values of twin.tflite" in next(note for note in result.candidate.notes if note.startswith("NHWC to NCHW"))
    assert result.coverage.judged == 3


def nhwc_input(layout: str) -> onnx.ModelProto:
    """A Conv of stride 2 with pads on all sides, which TFLite writes as PAD and CONV_2D; its input lies as `layout`."""
    m = Qdq(dtype="int8", seed=4)
    if layout == "NCHW":
        real = start(m, (1, 4, 8, 10))
    else:
        coded = m.q(m.input("x", (1, 8, 10, 4)), 0.025, 0)
        real = m.dq(m.moved(m.op("Transpose", [coded], perm=[0, 3, 1, 2]), coded))
        m.channels[real] = 4
    return m.model(end(m, m.conv(real, 8, stride=2), 0.1))


def test_a_value_that_tflite_alone_stores_is_shown_and_what_onnx_only_reorders_is_derived() -> None:
    model = loaded(nhwc_input("NHWC"))
    twin = tflite_from_bytes(convert(loaded(nhwc_input("NCHW"))).content, "twin.tflite")
    candidate = PairedBackend(backend("tflite:kernels=reference"), twin, model)
    result = equivcheck.diff(model, candidate=candidate)
    assert result.verdict == "equivalent"
    assert result.coverage.judged == result.coverage.steps == 3
    derived = next(tensor for tensor in result.tensors if tensor.op_type == "Transpose")
    assert (derived.how.candidate or "").endswith("reordered as the model does")
    notes = "\n".join(result.candidate.notes)
    assert "1 value without a counterpart: the model only reorders there what twin.tflite stores once" in notes
    assert "in twin.tflite only: conv_q/pad (made by PAD:1)" in notes


def test_a_recording_of_another_file_is_kept_under_the_model_s_names(tmp_path: Path) -> None:
    model = chain()
    equivcheck.diff(loaded(model), candidate=paired(model, renamed(model)[0]), save_to=tmp_path)
    kept = equivcheck.compare(tmp_path / "reference", tmp_path / "candidate", model=loaded(model))
    assert kept.verdict == "equivalent"
    assert kept.coverage.judged == kept.coverage.steps == 6


def test_another_network_is_doubted() -> None:
    model = chain()
    m = Qdq(dtype="int8", seed=9)
    y = end(m, m.op("Relu", [m.conv(start(m), 8, x_scale=0.025)]), 0.06, 0.0)
    for _ in range(3):
        y = end(m, m.conv(y, 8, x_scale=0.06), 0.06)
    result = equivcheck.diff(loaded(model), candidate=paired(model, m.model(end(m, y, 0.3))))
    assert result.verdict != "equivalent"
    assert result.candidate.warnings[0].endswith("is other.onnx the same network?")


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 6, 6, 3), (4, 4, 4)])
def test_every_layout_is_another_order_of_whole_axes(shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    for after in {tuple(np.random.default_rng(k).permutation(shape).tolist()) for k in range(4)}:
        found = layouts(shape, after)
        made = [order.apply(array) for order in found]
        assert all(each.shape == after for each in made)
        assert len({each.tobytes() for each in made}) == len(found)
        for order, each in zip(found, made, strict=True):
            np.testing.assert_array_equal(order.reverse().apply(each), array)
            assert order.plain(shape) == order


def test_layouts_that_do_not_fit_are_none_and_axes_of_one_are_free() -> None:
    assert layouts((1, 3, 4), (1, 4, 4)) == []
    assert layouts((1, 32, 1, 1), (1, 32)) == [Order((Reshape((1, 32, 1, 1), (1, 32)),))]
    assert layouts((1, 5, 5, 3), (1, 3, 5, 5))[0] == Order((Turn((0, 3, 1, 2)),))


def test_an_order_is_put_as_simply_as_it_can_be() -> None:
    twice = Order((Turn((0, 2, 3, 1)),)).then(Order((Turn((0, 3, 1, 2)),)))
    assert twice == Order()
    around = Order((Reshape((1, 64), (1, 1, 1, 64)), Turn((0, 3, 1, 2)), Reshape((1, 64, 1, 1), (1, 64))))
    assert around.plain((1, 64)) == Order()
    flattened = Order((Turn((0, 3, 1, 2)), Reshape((1, 3, 2, 2), (1, 12))))
    assert flattened.plain((1, 2, 2, 3)) == flattened
    assert flattened.words == "NHWC to NCHW, [1, 3, 2, 2] as [1, 12]"


# -- inputs --------------------------------------------------------------------------------------------------------------


def fed_model(dtype: str, grid: Quantisation | None, shape: tuple[int, ...] = (1, 4, 8, 8)) -> onnx.ModelProto:
    """A Conv whose input is `dtype`, quantised as `grid` says."""
    kind = "int8" if grid is None else str(grid.dtype)
    m = Qdq(dtype=kind, seed=1)
    x = m.input("x" if dtype == "float32" else "codes", shape, dtype)
    if grid is not None and dtype == "float32":
        x = m.q(x, float(grid.scale), int(grid.zero_point))
    real = x if grid is None else m.dq(x, float(grid.scale), int(grid.zero_point))
    m.channels[real] = 4
    return m.model(end(m, m.conv(real, 4), 0.1))


def grid(scale: float, zero: int, dtype: str = "int8") -> Quantisation:
    return Quantisation(np.asarray(scale, np.float32), np.asarray(zero, dtype))


PIXELS = grid(1 / 127.5, -1)
FEEDS = {
    "as it is": (("float32", PIXELS), ("float32", PIXELS), [0.5, -1.0], [0.5, -1.0], "float32 (as it is)"),
    "reals as codes": (("float32", PIXELS), ("int8", PIXELS), [0.0, 1.0, 9.0], [-1, 126, 127], "float32 to int8 (codes of"),
    "codes as reals": (("int8", PIXELS), ("float32", PIXELS), [-1, 126], [0.0, 127 / 127.5], "int8 to float32 (reals of"),
    "the other sign": (
        ("int8", PIXELS), ("uint8", grid(1 / 127.5, 127, "uint8")), [-128, 0, 127], [0, 128, 255],
        "int8 to uint8 (the same codes with the other sign)",
    ),
    "another scale": (
        ("int8", grid(0.0100, 0)), ("int8", grid(0.0101, 0)), [0, 100, -127], [0, 99, -126], "(requantised)",
    ),
    "another calibration": (
        ("float32", grid(0.02, 0)), ("float32", grid(0.028, 5)), [0.5, -3.0], [0.5, -3.0], "float32 (as it is)",
    ),
    "pixels for normalised": (
        ("float32", PIXELS), ("uint8", grid(1.0, 0, "uint8")), [-127 / 127.5, 0.0, 128 / 127.5], [0, 127, 255],
        "the range [-0.9961, 1.004] is taken for [0, 255]",
    ),
    "normalised for pixels": (
        ("uint8", grid(1.0, 0, "uint8")), ("float32", PIXELS), [0, 127, 255], [-127 / 127.5, 0.0, 128 / 127.5],
        "the range [0, 255] is taken for [-0.9961, 1.004]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(FEEDS))
def test_an_input_is_fed_as_the_other_file_takes_it_and_that_is_said(case: str) -> None:
    mine, theirs, given, wanted, words = FEEDS[case]
    found = pair(loaded(fed_model(*mine)).graph, loaded(renamed(fed_model(*theirs))[0]).graph)
    (feed,) = feeds_for(found).values()
    array = np.resize(np.asarray(given, mine[0]), (1, 4, 8, 8))
    got = feed.of(array)
    assert got.dtype == np.dtype(theirs[0])
    np.testing.assert_allclose(got.ravel()[: len(given)], wanted, rtol=1e-6, atol=1e-6)
    assert words in feed.words


def test_codes_without_a_scale_are_not_guessed() -> None:
    m = Qdq(dtype="int8", seed=1)
    x = m.op("Cast", [m.input("pixels", (1, 4, 8, 8), "uint8")], to=onnx.TensorProto.FLOAT)
    m.channels[x] = 4
    plain = m.model(end(m, m.conv(m.dq(m.q(x, 1.0, 0)), 4), 9.0))
    own, other = loaded(plain).graph, loaded(renamed(fed_model("float32", PIXELS))[0]).graph
    with pytest.raises(ModelError, match="no scale says how one becomes the other"):
        feeds_for(pair(own, other))


def test_an_input_that_the_model_does_not_have_is_named() -> None:
    other = fed_model("float32", PIXELS, (1, 4, 9, 9))
    with pytest.raises(ModelError, match="input 'x' of the candidate model fits no input of the model, which takes x"):
        paired(fed_model("float32", PIXELS), other)


def two_inputs(swap: bool, names: tuple[str, str] = ("a", "b")) -> onnx.ModelProto:
    """Two inputs of one kind, each through a Conv of its own; `swap` declares the second first."""
    m = Qdq(dtype="int8", seed=8)
    made = [end(m, m.conv(start(m, name=name), 4), 0.3) for name in names]
    model = m.model(end(m, m.op("Sub", made), 0.5))
    if swap:
        model.graph.input.insert(0, model.graph.input.pop())
    return model


def test_inputs_of_one_kind_are_told_apart_by_what_reads_them_not_by_their_order() -> None:
    model = two_inputs(swap=False)
    other, names = renamed(two_inputs(swap=True))
    found = pair(loaded(model).graph, loaded(other).graph)
    assert {(port.own, port.theirs, port.doubt) for port in found.ports} == {
        ("a", names["a"], ""),
        ("b", names["b"], ""),
    }
    assert equivcheck.diff(loaded(model), candidate=paired(model, other)).verdict == "equivalent"


def test_an_input_that_only_its_order_tells_from_another_is_doubted() -> None:
    m = Qdq(dtype="int8", seed=8)
    made = [start(m, name=name) for name in ("a", "b")]
    model = m.model(end(m, m.op("Add", made), 0.1))
    candidate = paired(model, renamed(model)[0])
    words = [feed.words for feed in candidate.feeds.values()]
    assert "there are other inputs like it: the first was taken" in words[0]


def test_a_cube_that_nothing_reads_as_an_image_is_doubted() -> None:
    m = Qdq(dtype="int8", seed=8)
    model = m.model(end(m, m.op("Sigmoid", [start(m, (1, 4, 4))]), 1 / 256, 0.0))
    (feed,) = paired(model, renamed(model)[0]).feeds.values()
    assert (
        feed.words
        == "input 'x' as '" + feed.port.theirs + "': float32 (its axes could be others: what reads it does not say)"
    )


def test_a_symbolic_batch_of_the_other_file_is_the_model_s() -> None:
    model = chain()
    other, names = renamed(model)
    other.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    del other.graph.value_info[:]
    candidate = paired(model, other)
    assert candidate.other.graph.values[names["x"]].shape == (1, 4, 8, 8)
    assert not candidate.pairing.unmatched


# -- outputs -------------------------------------------------------------------------------------------------------------


def test_an_output_in_codes_is_given_in_reals_where_the_model_s_is_real() -> None:
    def ending(real: bool) -> onnx.ModelProto:
        m = Qdq(dtype="int8", seed=7)
        y = m.q(m.conv(start(m), 4), 0.1, 5)
        return m.model(m.dq(y) if real else y)

    given = feeds(ending(True))
    for real in (True, False):
        candidate = paired(ending(real), renamed(ending(not real))[0])
        (got,), (want,) = recorded(candidate, given).outputs.values(), truth(ending(True), given).outputs.values()
        np.testing.assert_allclose(got, want, rtol=1e-6)


# -- real pairs ----------------------------------------------------------------------------------------------------------

PAIRS = {
    "coral_mobilenet_v2_1.0_224_quant": 69,
    "coral_tf2_mobilenet_v2_1.0_224_ptq": 71,
    "mcunet_vww": 64,
    "tiny_resnet8_cifar10_int8": 18,
    "tiny_vww_96_int8": 33,
    "furiosa_MNISTnet_uint8": 11,
    "engine_defects/attention_s8_pc": 21,
    "engine_defects/small_s8_pc": 18,
}


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_every_value_of_a_real_pair_is_paired_with_the_one_of_its_name(name: str, shared: Path) -> None:
    """Both exports kept the names of most values; the pairing does not look at them."""
    model = load_model(shared / "models" / f"{name}_qdq.onnx")
    (path,) = (shared / "models").glob(f"{name}*.tflite")
    port = model.graph.values[model.graph.inputs[0]]
    model = model.with_input_shapes({port.name: tuple(n if isinstance(n, int) else 1 for n in port.shape or ())})
    found = pair(model.graph, load_model(path).graph)
    assert len(found.matches) == PAIRS[name]
    assert set(found.unmatched) <= set(model.graph.inputs)
    both = set(found.other.graph.stored) & set(found.matches)
    named = {value: found.matches[value].theirs for value in both}
    assert len(both) > PAIRS[name] - 6
    assert all(theirs == value for value, theirs in named.items())
    assert different_weights(found) == {}
