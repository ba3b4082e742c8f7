"""Cutting: the head, and what follows it, are the model; nothing else comes along."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder import Qdq, feeds
from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import ModelError
from equivcheck.models.onnx.cut import codes_of, dequantised, head, part
from equivcheck.models.onnx.isolate import spec_of
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from small_models import TRAPS, end, start, zero_of

PLAIN = {"optimization": "disable"}


def model_of(proto: onnx.ModelProto) -> OnnxModel:
    return model_from_bytes(proto.SerializeToString(), "small.onnx")


def run(proto: onnx.ModelProto, given: dict[str, np.ndarray], optimization: str = "disable") -> dict[str, np.ndarray]:
    engine = OrtEngine()
    engine.load(proto.SerializeToString(), {"optimization": optimization})
    return engine.run({port.name: given[port.name] for port in proto.graph.input if port.name in given})


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("name", [n for n in TRAPS if n != "split_of_codes"])
def test_head_and_rest_are_the_model(name: str, dtype: str) -> None:
    """At stored values here and there; a tail that also needs the model's inputs has them."""
    assert_cuts_prove(model_of(TRAPS[name](lambda: Qdq(dtype=dtype, seed=1))))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_one_output_of_a_split_may_be_fed_while_the_other_is_computed(dtype: str) -> None:
    assert_cuts_prove(model_of(TRAPS["split_of_codes"](lambda: Qdq(dtype=dtype, seed=1))))


def assert_cuts_prove(model: OnnxModel) -> None:
    given, graph = feeds(model.proto), model.graph
    whole = run(model.proto, given)
    stored = [v for v in graph.stored if v not in graph.inputs and v not in graph.outputs]
    for value in stored[:: max(1, len(stored) // 4)]:
        first = part(model.proto, inputs=dict.fromkeys(graph.inputs), outputs=[value])
        codes = run(first, given)[value]
        rest = part(
            model.proto,
            inputs={**dict.fromkeys(graph.inputs), value: spec_of(codes)},
            outputs=list(graph.outputs),
        )
        again = run(rest, {**given, value: codes})
        assert list(again) == list(whole)
        for out, array in whole.items():
            np.testing.assert_array_equal(again[out], array, err_msg=f"{out} cut at {value}")
        assert len(first.graph.node) < len(model.proto.graph.node)


@pytest.mark.parametrize("name", ["conv_relu_chain", "residual_adds", "two_readers", "concat_of_two_scales"])
def test_a_head_ends_at_dequantised_values_that_lie_on_the_grid(name: str) -> None:
    model = model_of(TRAPS[name](lambda: Qdq(dtype="int8", seed=1)))
    graph, given = model.graph, feeds(model.proto)
    for value in (v for v in graph.stored if v not in graph.inputs):
        made = head(model, [value])
        assert [port.name for port in made.graph.output] == [dequantised(graph, value)]
        assert made.graph.node[-1].op_type == "DequantizeLinear"
        (array,) = run(made, given, "all").values()
        codes, distance = codes_of(array, graph, value)
        assert distance < 1e-3
        assert codes.dtype == graph.quantisation[value].dtype


def test_a_float_that_no_quantiser_made_is_off_the_grid() -> None:
    m = Qdq(dtype="int8")
    q = m.q(m.input("x", (4,)), 0.5, 3)
    graph = model_of(m.model(m.dq(q))).graph
    codes, distance = codes_of(np.array([0.0, 0.5, -0.25, 100.0], np.float32), graph, q)
    assert codes.tolist() == [3, 4, 2, 127]  # -0.25 / 0.5 + 3 = 2.5, half to even
    assert distance == 0.5


def test_per_channel_codes_come_back_with_each_channels_scale() -> None:
    m = Qdq(dtype="int8", opset=17)
    x = m.input("x", (1, 3, 2, 2))
    ends = [m.constant(np.array([0.5, 0.25, 2], np.float32)), m.constant(np.array([0, 1, -1], np.int8))]
    m.op("QuantizeLinear", [x, *ends], "q", axis=1)
    model = model_of(m.model(m.op("DequantizeLinear", ["q", *ends], axis=1)))
    codes = np.arange(-6, 6).reshape(1, 3, 2, 2).astype(np.int8)
    scale, zero = np.array([0.5, 0.25, 2]).reshape(1, 3, 1, 1), np.array([0, 1, -1]).reshape(1, 3, 1, 1)
    found, distance = codes_of(((codes - zero) * scale).astype(np.float32), model.graph, "q")
    np.testing.assert_array_equal(found, codes)
    assert distance == 0.0


def test_only_the_nodes_and_weights_of_the_part_come_along() -> None:
    model = model_of(TRAPS["residual_adds"](lambda: Qdq(seed=1)))
    first = next(v for v in model.graph.stored if v not in model.graph.inputs)
    made = part(model.proto, inputs=dict.fromkeys(model.graph.inputs), outputs=[first])
    assert [node.op_type for node in made.graph.node] == ["QuantizeLinear"]
    assert {t.name for t in made.graph.initializer} == {f"{first}_scale", f"{first}_zero"}


def test_a_part_keeps_opsets_ir_version_functions_and_metadata() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: Qdq(opset=17, seed=1))
    proto.metadata_props.add(key="author", value="a test")
    proto.doc_string = "kept"
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    made = part(proto, inputs={"x": None}, outputs=["conv"])
    assert (made.ir_version, made.doc_string, made.metadata_props[0].value) == (proto.ir_version, "kept", "a test")
    assert {e.domain: e.version for e in made.opset_import} == {"": 17, "com.microsoft": 1}


def test_a_cut_leaves_the_model_it_was_given_alone() -> None:
    proto = TRAPS["residual_adds"](lambda: Qdq(seed=1))
    before = proto.SerializeToString()
    part(proto, inputs={"x": None, "relu_q": (np.dtype(np.uint8), (1, 8, 8, 8))}, outputs=["add"])
    assert proto.SerializeToString() == before


def test_an_output_that_is_not_there_is_an_error_with_its_name() -> None:
    with pytest.raises(ModelError, match="no value 'cnov'"):
        part(TRAPS["conv_relu_chain"](lambda: Qdq(seed=1)), inputs={"x": None}, outputs=["cnov"])


def test_an_input_of_unknown_type_is_an_error_with_its_name() -> None:
    with pytest.raises(ModelError, match="type of value 'relu_q' is not known"):
        part(TRAPS["conv_relu_chain"](lambda: Qdq(seed=1)), inputs={"relu_q": None}, outputs=["conv_2"])


def test_forty_eight_diamonds_in_a_row_are_cut_at_once() -> None:
    """2**48 paths: a walk that remembers nothing never ends (onnx pull request 2994)."""
    m = Qdq()
    x = m.input("x", (4,))
    for _ in range(48):
        x = m.op("Add", [m.op("Neg", [x]), m.op("Abs", [x])])
    proto = m.model(x)
    made = part(proto, inputs={"x": None}, outputs=[x])
    assert len(made.graph.node) == len(proto.graph.node)
    assert len(model_of(proto).graph.steps) == len(proto.graph.node)


def test_a_chain_of_five_thousand_nodes_is_cut_without_recursion() -> None:
    m = Qdq()
    x = m.input("x", (2,))
    for _ in range(5000):
        x = m.op("Neg", [x])
    model = model_of(m.model(x))
    assert len(part(model.proto, inputs={"x": None}, outputs=[x]).graph.node) == 5000
    assert len(model.graph.steps) == 5000


def branch(name: str, op: str, read: str) -> onnx.GraphProto:
    port = helper.make_tensor_value_info(f"{name}_made", TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node(op, [read], [f"{name}_made"])], name, [], [port])


def test_what_only_a_body_reads_comes_along_and_follows_a_renamed_input() -> None:
    proto = TRAPS["if_body_with_floats"](lambda: Qdq(seed=1))
    model, given = model_of(proto), feeds(proto)
    whole = run(proto, given)
    made = part(proto, inputs=dict.fromkeys(model.graph.inputs), outputs=["chosen"])
    assert "Conv" in [node.op_type for node in made.graph.node]
    codes = run(part(proto, inputs={"x": None}, outputs=["conv_q"]), given)["conv_q"]
    real = run(part(proto, inputs={"x": None}, outputs=["conv_q_real"]), given)["conv_q_real"]
    renamed = part(
        proto,
        inputs={"flag": None, "conv_q_real": spec_of(real)},
        outputs=list(model.graph.outputs),
        rename_input=lambda name: f"{name}/fed" if name == "conv_q_real" else name,
    )
    again = run(renamed, {"flag": given["flag"], "conv_q_real/fed": real})
    np.testing.assert_array_equal(*again.values(), *whole.values())
    assert codes.dtype == np.uint8


def test_a_body_that_has_a_value_of_the_same_name_keeps_its_own() -> None:
    """ONNX forbids shadowing, but Loop and Scan bodies have inputs of their own: those are not captured."""
    m = Qdq()
    x = m.input("x", (3,))
    y = m.op("Neg", [x], "state")
    body = helper.make_graph(
        [
            helper.make_node("Add", ["carried", y], ["sum"]),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, [3]),
        ],
    )
    trips, go = m.constant(np.array(3, np.int64)), m.constant(np.array(True))
    m.op("Loop", [trips, go, x], "looped", body=body)
    proto = m.model(m.op("Abs", ["looped"]))
    given = {"x": np.array([1, -2, 3], np.float32)}
    made = part(
        proto,
        inputs={"state": (np.dtype(np.float32), (3,)), "x": None},
        outputs=["looped"],
        rename_input=lambda n: f"{n}/fed" if n == "state" else n,
    )
    found = run(made, {"x": given["x"], "state/fed": np.array([10, 10, 10], np.float32)})
    assert found["looped"].tolist() == [31, 28, 33]
    assert model_of(proto).graph.reads(proto_node(proto, "Loop")) == (trips, go, "x", "state")


def proto_node(proto: onnx.ModelProto, op_type: str):
    return next(node for node in model_of(proto).graph.nodes if node.op_type == op_type)


def test_initializers_listed_as_inputs_as_in_ir_3_stay_weights() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: Qdq(opset=13, seed=1))
    given = feeds(proto)
    whole = run(proto, given)
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    proto.ir_version = 3
    model = model_of(proto)
    assert model.graph.inputs == ("x",)
    made = part(proto, inputs={"x": None}, outputs=list(model.graph.outputs))
    # IR 3 wants every initializer among the inputs: a part that drops them is refused by the checker
    again = run(made, given)
    np.testing.assert_array_equal(*again.values(), *whole.values())


def test_a_cut_weight_may_itself_be_an_output() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: Qdq(seed=1))
    made = part(proto, inputs={"x": None}, outputs=["weight_real"])
    weight = next(numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == "weight")
    np.testing.assert_allclose(run(made, {})["weight_real"], weight * np.float32(0.01), rtol=1e-6)


def test_a_dequantised_name_is_found_for_every_coded_value() -> None:
    m = Qdq()
    q = m.q(m.conv(start(m), 4), 0.07, zero_of(m))
    model = model_of(m.model(q, end(m, m.conv(m.dq(q), 4), 0.4)))
    assert dequantised(model.graph, q) == f"{q}_real"
    assert dequantised(model.graph, "x") == "x"
