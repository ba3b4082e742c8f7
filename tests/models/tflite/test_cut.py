"""Cuts of a .tflite file: every part computes what the whole computes there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from equivcheck.engines.tflite import TfliteEngine
from equivcheck.errors import ModelError, UnsupportedModel
from equivcheck.models.tflite.cut import Part, head, needed, part, tail, whole
from equivcheck.models.tflite.load import Flatbuffer, read_flatbuffer
from equivcheck.models.tflite.schema import Reader
from tflite_graphs import TfliteGraph, feeds_of, small_net

Values = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def source() -> Flatbuffer:
    return read_flatbuffer(small_net(), "net.tflite")


@pytest.fixture(scope="module")
def values(source: Flatbuffer) -> Values:
    """All values of the untouched file on one input, by an interpreter that keeps them."""
    every = {source.tensors[k].name: k for op in source.operators for k in op.outputs}
    feeds = feeds_of(source)
    engine = TfliteEngine()
    engine.load(
        source.content, {"kernels": "reference", "preserve": True, "inputs": whole(source).inputs, "outputs": every}
    )
    return {**feeds, **engine.run(feeds)}


def run(cut: Part, feeds: Mapping[str, np.ndarray], kernels: str = "reference") -> Values:
    engine = TfliteEngine()
    engine.load(cut.content, {"kernels": kernels, "inputs": cut.inputs, "outputs": cut.outputs})
    return engine.run({name: feeds[name] for name in cut.inputs})


def made(source: Flatbuffer) -> list[str]:
    return [source.tensors[k].name for op in source.operators for k in op.outputs]


def assert_same(found: Values, expected: Mapping[str, np.ndarray]) -> None:
    assert found
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_a_head_makes_every_value_the_whole_makes(source: Flatbuffer, values: Values) -> None:
    for name in made(source):
        cut = head(source, [name])
        assert list(cut.outputs) == [name]
        assert list(cut.inputs) == ["image"]
        assert_same(run(cut, values), values)


def test_a_tail_goes_on_from_every_value(source: Flatbuffer, values: Values) -> None:
    for name in made(source)[:-1]:
        cut = tail(source, [name])
        assert list(cut.outputs) == ["probabilities"]
        assert_same(run(cut, values), values)


def test_a_tail_that_needs_more_keeps_the_models_own_inputs(source: Flatbuffer) -> None:
    """The residual ADD reads what the depthwise conv reads: cutting behind that conv leaves a path to the input."""
    depthwise = source.tensors[source.operators[1].outputs[0]].name
    assert list(tail(source, [depthwise]).inputs) == [depthwise, "image"]


@pytest.mark.parametrize("kernels", ["reference", "builtin", "xnnpack"])
def test_the_isolated_model_computes_every_operator_on_what_it_is_fed(
    source: Flatbuffer, values: Values, kernels: str
) -> None:
    """Fed with other codes than it makes: each operator alone must give what it gives in the part of that operator."""
    random = np.random.default_rng(7)
    fed = {name: random.integers(-128, 128, array.shape).astype(np.int8) for name, array in values.items()}
    everything = part(source, inputs=fed, outputs=made(source), operators=range(len(source.operators)))
    assert len(everything.operators) == len(source.operators)
    found = run(everything, fed, kernels)
    assert set(found) == set(made(source))
    for operator in source.operators:
        reads = [source.tensors[k].name for k in operator.inputs if source.tensors[k].name in fed]
        alone = part(source, inputs=reads, outputs=[source.tensors[operator.outputs[0]].name])
        assert alone.operators == (operator.index,)
        assert_same(run(alone, fed, kernels), found)


def test_all_tensors_as_outputs_change_nothing(source: Flatbuffer, values: Values) -> None:
    cut = part(source, inputs=["image"], outputs=made(source))
    assert_same(run(cut, values), values)


def test_the_old_file_is_kept_byte_for_byte(source: Flatbuffer) -> None:
    cut = head(source, ["logits"])
    padded = source.content + bytes(-len(source.content) % 16)
    assert cut.content.endswith(padded)
    assert len(cut.content) - len(padded) < 2048
    again = read_flatbuffer(cut.content, "head.tflite")
    assert [op.kind for op in again.operators] == [op.kind for op in source.operators[:-1]]
    assert again.operators[0].options["stride_h"] == 2
    assert [again.tensors[k].name for k in again.outputs] == ["logits"]


def test_a_part_of_a_part_is_a_part(source: Flatbuffer, values: Values) -> None:
    first = read_flatbuffer(head(source, ["logits"]).content, "head.tflite")
    names = made(first)
    cut = part(first, inputs=names[:2], outputs=[names[3]])
    assert cut.operators == (2, 3)
    assert_same(run(cut, values), values)


def test_signatures_which_speak_of_the_old_ports_are_left_out() -> None:
    from ai_edge_litert import schema_py_generated as generated

    g = TfliteGraph()
    x = g.input((2, 3))
    y = g.op("LOGISTIC", [x], (2, 3), 1 / 256, -128)
    z = g.op("LOGISTIC", [y], (2, 3), 1 / 256, -128)
    signature = generated.SignatureDefT()
    signature.signatureKey, signature.inputs, signature.outputs = b"serving_default", [], []
    g.model.signatureDefs = [signature]
    content = g.content(z)
    assert Reader.root(content).has("signature_defs")
    cut = head(read_flatbuffer(content, "s.tflite"), [f"t{y}"])
    assert not Reader.root(cut.content).has("signature_defs")


def test_names_that_are_not_there_and_outputs_that_nothing_makes_are_errors(source: Flatbuffer) -> None:
    with pytest.raises(ModelError, match="no tensor 'nowhere'"):
        head(source, ["nowhere"])
    with pytest.raises(ModelError, match="nothing in this part makes 'logits'"):
        part(source, inputs=["image"], outputs=["logits"], operators=[0, 1])


def test_what_an_output_needs_stops_at_what_is_fed(source: Flatbuffer) -> None:
    names = made(source)
    assert needed(source, ["probabilities"], ["image"]) == list(range(8))
    assert needed(source, ["probabilities"], ["logits"]) == [7]
    assert needed(source, [names[2]], names[:2]) == [2]
    assert needed(source, [names[0]], [names[0]]) == [0]


def test_weights_outside_the_flatbuffer_are_refused() -> None:
    from ai_edge_litert import schema_py_generated as generated

    g = TfliteGraph()
    y = g.op("LOGISTIC", [g.input((2, 3))], (2, 3), 1 / 256, -128)
    outside = generated.BufferT()
    outside.offset, outside.size = 4096, 16
    g.model.buffers.append(outside)
    with pytest.raises(UnsupportedModel, match="2 GB"):
        head(read_flatbuffer(g.content(y), "large.tflite"), [f"t{y}"])
