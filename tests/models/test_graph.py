"""Stored values, aliases, quantisation and steps: what the graph says of models whose answer is known by reading them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from builder import Qdq
from equivcheck.models.graph import Graph
from equivcheck.models.onnx.load import load_model, model_from_bytes
from random_models import RandomModel
from small_models import TRAPS, end, start, zero_of


def graph_of(proto: onnx.ModelProto) -> Graph:
    return model_from_bytes(proto.SerializeToString(), "small.onnx").graph


def trap(name: str, **form: object) -> Graph:
    return graph_of(TRAPS[name](lambda: Qdq(seed=1, **form)))  # type: ignore[arg-type]  # checked as it is called


def ops(graph: Graph) -> list[str]:
    return [step.op_type for step in graph.steps]


def test_a_step_is_what_lies_between_two_stored_values() -> None:
    graph = trap("conv_relu_chain")
    assert graph.stored == ("x", "x_q", "relu_q", "conv_2_q")
    assert [step.ops for step in graph.steps] == [("QuantizeLinear",), ("Conv", "Relu"), ("Conv",)]
    assert [(step.id, step.inputs, step.outputs) for step in graph.steps] == [
        (1, ("x",), ("x_q",)),
        (2, ("x_q",), ("relu_q",)),
        (3, ("relu_q",), ("conv_2_q",)),
    ]
    assert ops(graph) == ["QuantizeLinear", "Conv", "Conv"]


def test_the_float_before_q_and_the_dq_behind_it_are_aliases() -> None:
    graph = trap("conv_relu_chain")
    assert set(graph.aliases("relu_q")) == {"relu", "relu_q_real"}
    assert graph.store("relu") == graph.store("relu_q_real") == graph.store("relu_q") == "relu_q"
    assert graph.store("weight") is None
    assert graph.store("conv") is None  # inside Conv-Relu-Q: never stored


def test_two_readers_of_one_value_have_a_dq_each_and_both_are_its_aliases() -> None:
    graph = trap("two_readers")
    assert set(graph.aliases("conv_q")) == {"conv", "conv_q_real", "conv_q_real_2"}
    readers = [step for step in graph.steps if step.inputs == ("conv_q",)]
    assert [step.op_type for step in readers] == ["Conv", "Sigmoid"]


def test_a_swish_without_an_inner_q_is_one_step_and_with_it_two() -> None:
    assert ops(trap("swish")) == ["QuantizeLinear", "Conv", "Sigmoid+Mul", "Conv"]
    assert ops(trap("swish_with_inner_q")) == ["QuantizeLinear", "Conv", "Sigmoid", "Mul", "Conv"]


def test_an_island_with_a_conv_in_it_is_named_after_the_conv() -> None:
    m = Qdq()
    x = start(m)
    y = m.op("Mul", [m.conv(x, 4), m.op("Sigmoid", [x])])
    graph = graph_of(m.model(end(m, y, 0.1)))
    (step,) = [s for s in graph.steps if len(s.ops) > 1]
    assert set(step.ops) == {"Conv", "Sigmoid", "Mul"}
    assert graph.main_node(step).op_type == "Conv"


def test_a_float_tail_is_one_step_a_node() -> None:
    graph = trap("float_tail")
    assert ops(graph) == ["QuantizeLinear", "Conv", "GlobalAveragePool", "Flatten", "Softmax"]
    assert graph.quantisation.keys() == {"x_q", "conv_q"}


def test_a_float_model_has_a_step_for_every_node_and_no_quantisation() -> None:
    graph = trap("float_model")
    assert len(graph.steps) == len(graph.nodes)
    assert graph.quantisation == {}
    assert graph.alias_of == {}
    assert graph.stored[0] == "x"
    assert set(graph.stored[1:]) == {out for node in graph.nodes for out in node.outputs}


def test_a_float_that_more_than_a_q_reads_is_stored_itself() -> None:
    graph = trap("float_middle")
    assert {"sub_q", "reducemax"} <= set(graph.stored)
    assert graph.store("sub") == "sub_q"
    assert graph.store("reducemax") == "reducemax"


def test_an_output_of_the_model_is_never_an_alias_when_it_is_the_float_before_q() -> None:
    graph = trap("inner_float_value_is_an_output_too")
    assert {"before_q", "before_q_q"} <= set(graph.stored)
    assert graph.store("before_q") == "before_q"


def test_a_dequantised_output_that_is_read_further_stands_for_its_codes() -> None:
    graph = trap("inner_dequantised_value_is_an_output_too")
    assert graph.outputs == ("conv_q_real", "conv_2_q_real")
    assert graph.store("conv_q_real") == "conv_q"
    assert ops(graph) == ["QuantizeLinear", "Conv", "Conv"]


def test_codes_as_inputs_are_quantised_as_their_dq_says() -> None:
    graph = trap("codes_are_inputs_and_outputs", dtype="int8")
    assert graph.quantisation["x"].dtype == np.int8
    assert graph.quantisation["x"].scale == np.float32(0.025)
    assert graph.stored == ("x", "conv_q", "conv_2_q")


def test_moved_codes_keep_their_quantisation_and_are_steps_of_their_own() -> None:
    graph = trap("split_of_codes", dtype="int8")
    step = next(s for s in graph.steps if s.op_type == "Split")
    assert step.outputs == ("left", "right")
    assert graph.quantisation["left"].same_as(graph.quantisation["conv_q"])
    assert graph.quantisation["right"].same_as(graph.quantisation["conv_q"])
    turned = trap("reshape_of_codes")
    assert turned.quantisation["turned"].same_as(turned.quantisation["conv_q"])


def test_a_split_of_floats_into_two_qs_is_one_step_with_two_outputs() -> None:
    graph = trap("split_in_two")
    step = next(s for s in graph.steps if "Split" in s.ops)
    assert step.outputs == ("left_q", "right_q")


def test_one_float_into_two_qs_is_one_step_with_both_as_outputs() -> None:
    graph = trap("one_float_into_two_qs")
    step = next(s for s in graph.steps if s.op_type == "Conv" and s.inputs == ("x_q",))
    assert set(step.outputs) == {"conv_q", "conv_q_2"}


def test_a_requantisation_alone_is_a_step() -> None:
    graph = trap("requantised_twice")
    assert ops(graph) == ["QuantizeLinear", "Conv", "QuantizeLinear", "QuantizeLinear", "Conv"]


def test_dead_nodes_make_no_steps() -> None:
    graph = trap("dead_ends")
    assert ops(graph) == ["QuantizeLinear", "Conv", "Conv"]
    assert "nobody_reads_this" not in graph.stored


def test_an_if_with_codes_inside_is_one_step_that_reads_what_its_bodies_capture() -> None:
    graph = trap("if_body_with_codes")
    step = next(s for s in graph.steps if s.op_type == "If")
    assert set(step.inputs) == {"flag", "conv_q"}
    assert step.outputs == ("chosen",)
    assert graph.quantisation["chosen"].dtype == np.uint8
    floats = trap("if_body_with_floats")
    assert any("conv_q" in s.inputs for s in floats.steps if "If" in s.ops)


def test_the_dq_of_a_weight_is_no_step_even_when_two_convs_share_it() -> None:
    graph = trap("one_weight_for_two_convs")
    assert ops(graph) == ["QuantizeLinear", "Conv", "Conv"]
    assert "weight" not in graph.stored
    assert "weight_real" in graph.constant_values


def test_weights_quantised_in_the_graph_are_constants() -> None:
    graph = trap("weights_quantised_in_the_graph")
    assert ops(graph) == ["QuantizeLinear", "Conv", "Conv"]
    assert not any("constant" in name for name in graph.stored)


def test_a_q_without_a_zero_point_makes_uint8_codes_around_zero() -> None:
    graph = trap("no_zero_points", opset=13)
    for name in ("x_q", "relu_q", "relu_2_q"):
        assert (graph.quantisation[name].dtype, int(graph.quantisation[name].zero_point)) == (np.uint8, 0)


def test_a_q_without_a_zero_point_may_name_its_dtype() -> None:
    m = Qdq(opset=21)
    x = m.input("x", (4,))
    scale = m.constant(np.float32(0.5))
    m.op("QuantizeLinear", [x, scale], "q", output_dtype=onnx.TensorProto.INT8)
    graph = graph_of(m.model(m.op("DequantizeLinear", ["q", scale])))
    assert graph.quantisation["q"].dtype == np.int8


def test_scales_in_constant_nodes_are_read() -> None:
    graph = trap("scales_in_constant_nodes")
    assert float(graph.quantisation["conv_q"].scale) == float(np.float32(0.07))
    assert ops(graph) == ["QuantizeLinear", "Conv", "Conv", "GlobalAveragePool"]


@pytest.mark.parametrize(("axis", "expected"), [(1, 1), (-3, 1), (3, 3), (-1, 3)])
def test_a_negative_axis_is_counted_from_the_end(axis: int, expected: int) -> None:
    m = Qdq(opset=13)
    m.input("x", (1, 3, 2, 3))
    ends = [m.constant(np.array([1, 2, 4], np.float32)), m.constant(np.zeros(3, np.int8))]
    m.op("QuantizeLinear", ["x", *ends], "q", axis=axis)
    graph = graph_of(m.model(m.op("DequantizeLinear", ["q", *ends], axis=axis)))
    assert graph.quantisation["q"].axis == expected
    shape = [1, 1, 1, 1]
    shape[expected] = 3
    assert graph.quantisation["q"].along(4)[0].shape == tuple(shape)


def test_one_scale_in_a_list_is_per_tensor() -> None:
    m = Qdq(opset=13)
    m.input("x", (1, 3))
    ends = [m.constant(np.array([2], np.float32)), m.constant(np.zeros(1, np.int8))]
    m.op("QuantizeLinear", ["x", *ends], "q")
    quantisation = graph_of(m.model(m.op("DequantizeLinear", ["q", *ends]))).quantisation["q"]
    assert not quantisation.per_channel
    assert quantisation.scale.shape == ()


def test_a_scale_that_is_computed_at_run_time_is_not_known_and_the_value_is_still_stored() -> None:
    """DynamicQuantizeLinear and its kin: no constant scale, so no codes to judge, but no crash either."""
    m = Qdq(opset=13)
    m.input("x", (2, 4))
    m.op("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero"])
    m.op("DequantizeLinear", ["codes", "scale", "zero"], "y")
    graph = graph_of(m.model(m.op("Relu", ["y"])))
    assert "codes" in graph.stored
    assert "codes" not in graph.quantisation
    assert [s.op_type for s in graph.steps][-1] == "Relu"


def test_symbolic_dimensions_are_kept_by_name() -> None:
    m = Qdq()
    x = m.dq(m.q(m.input("x", ("batch", 4, 8, 8)), 0.1, 128))
    m.channels[x] = 4
    model = model_from_bytes(m.model(end(m, m.conv(x, 4), 0.1)).SerializeToString(), "m.onnx")
    assert model.graph.values["x"].shape == ("batch", 4, 8, 8)
    fixed = model.with_input_shapes({"x": (2, 4, 8, 8)})
    assert fixed.graph.values["conv_q"].shape == (2, 4, 8, 8)
    assert model.graph.values["x"].shape == ("batch", 4, 8, 8)
    assert fixed.with_input_shapes({"x": (2, 4, 8, 8)}) is fixed


def test_initializers_listed_as_inputs_are_not_inputs() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: Qdq(seed=1))
    plain = graph_of(proto)
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    graph = graph_of(proto)
    assert graph.inputs == ("x",)
    assert graph.steps == plain.steps


def test_nodes_without_a_name_are_labelled_by_what_they_make() -> None:
    graph = trap("conv_relu_chain", unnamed=True)
    step = graph.steps[1]
    assert graph.main_node(step).label == "Relu->relu" or graph.main_node(step).label == "Conv->conv"
    assert all(node.name == "" for node in graph.nodes)


def test_an_output_that_no_node_makes_and_a_model_of_one_dq_are_taken() -> None:
    m = Qdq(dtype="int8")
    m.input("x", (4,), "int8")
    graph = graph_of(m.model(m.dq("x", 0.5, 1)))
    assert graph.stored == ("x",)
    assert graph.steps == ()
    assert graph.store(graph.outputs[0]) == "x"


def float_skip_over_a_quantised_branch(seed: int = 1) -> onnx.ModelProto:
    """A residual block whose skip is not quantised, as TensorRT's exporters write it: c feeds a Q and the Add."""
    m = Qdq(seed=seed)
    c = m.conv(start(m), 4, out="c")
    y = end(m, m.op("Relu", [m.conv(end(m, c, 0.07), 4)]), 0.2, 0.0)
    s = m.op("Add", [c, m.conv(y, 4)], "s")
    m.channels[s] = 4
    return m.model(end(m, m.conv(end(m, s, 0.5), 4), 1.0))


def test_an_island_never_reads_what_is_made_from_itself() -> None:
    assert_well_formed(graph_of(float_skip_over_a_quantised_branch()))


def test_a_step_with_two_qs_comes_before_the_readers_of_either() -> None:
    assert_well_formed(trap("one_float_into_two_qs"))


@pytest.mark.parametrize("name", [n for n in TRAPS if not n.startswith("one_float_into_two")])
def test_steps_partition_the_work_and_read_only_what_was_stored_before(name: str) -> None:
    assert_well_formed(trap(name, dtype="int8"))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), size=st.integers(1, 12))
def test_steps_of_random_models_are_well_formed(seed: int, size: int) -> None:
    assert_well_formed(graph_of(RandomModel(seed, size).model()))


def assert_well_formed(graph: Graph) -> None:
    """The laws: ids count from 1, each node in one step, inputs are stored earlier, no stored value made twice."""
    assert [step.id for step in graph.steps] == list(range(1, len(graph.steps) + 1))
    members = [index for step in graph.steps for index in step.nodes]
    assert len(members) == len(set(members))
    known = set(graph.inputs)
    for step in graph.steps:
        assert set(step.inputs) <= known, f"step {step.id} reads what is not stored before it"
        assert not set(step.outputs) & known
        known |= set(step.outputs)
        assert step.main in step.nodes
        assert step.outputs
        assert all(graph.step_of_value[out] is step for out in step.outputs)
    assert known == set(graph.stored)
    assert not set(graph.alias_of) & known, "an alias is not stored itself"
    for alias, stored in graph.alias_of.items():
        if stored in known:
            assert graph.store(alias) == stored
    for output in graph.outputs:
        assert graph.store(output) is not None, f"the output {output} stands for no stored value"


def test_a_qoperator_file_has_the_steps_of_its_qdq_form_and_its_own_nodes(fixtures_dir: Path) -> None:
    model = load_model(fixtures_dir / "digits_qop_u8.onnx")
    graph = model.graph
    assert_well_formed(graph)
    mains = [graph.main_node(step).op_type for step in graph.steps]
    assert "QLinearConv" in mains
    assert "QLinearGlobalAveragePool" in mains
    names = {node.name for node in model.proto.graph.node}
    assert {graph.main_node(step).name for step in graph.steps} <= names
    made = {out for node in model.proto.graph.node for out in node.output}
    assert set(graph.stored) <= made | set(graph.inputs)


@pytest.mark.parametrize(
    "case",
    [
        "t03_op_type_five_times",
        "t07_multi_output_node",
        "t09_if_outer_scope",
        "t23_dead_node_and_typo",
        "t27_diamond_ladder",
        "t18_symbolic_dims",
        "t15_ir3_weights_are_inputs",
        "t05_duplicate_node_names",
    ],
)
def test_reported_models_have_well_formed_steps(shared: Path, case: str) -> None:
    assert_well_formed(load_model(shared / "cases" / case / "model.onnx").graph)


def test_equal_quantisation_is_equal_bit_for_bit() -> None:
    graph = trap("requantised_to_the_same_scale")
    one, other = graph.quantisation["conv_q"], graph.quantisation["conv_q_real_q"]
    assert one.same_as(other)
    assert not one.same_as(None)
    assert not one.same_as(graph.quantisation["x_q"])


def test_zero_of_is_the_middle() -> None:
    assert (zero_of(Qdq(dtype="uint8")), zero_of(Qdq(dtype="int8"))) == (128, 0)
