"""Cutting every kind of model at every node and value: head + tail = model, valid, minimal, and nothing of the model lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import TensorProto, helper, numpy_helper

import cut_models
from builder import feeds as random_feeds
from cut_models import KINDS, assert_kept, assert_minimal, assert_valid, assert_whole
from equivcheck import split
from equivcheck.errors import EngineRefused, SelectorError
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from equivcheck.models.onnx.split import find_cut
from equivcheck.models.select import Selected
from equivcheck.parts import SplitPart
from random_graphs import Drawn, graphs_and_cuts

# onnx's own shape inference cannot read these, whole or cut; the rest of the checker must still pass
NOT_INFERABLE = {"weights_in_sparse_initializers"}
OPSETS = [
    (7, 3),
    (8, 3),
    (9, 4),
    (10, 5),
    (11, 6),
    (12, 7),
    (13, 7),
    (15, 8),
    (17, 8),
    (19, 9),
    (21, 10),
    (23, 11),
    (24, 12),
]


def model_of(proto: onnx.ModelProto) -> OnnxModel:
    return model_from_bytes(proto.SerializeToString(), "small.onnx")


def feeds_of(name: str, proto: onnx.ModelProto) -> cut_models.Feeds:
    return cut_models.FEEDS.get(name) or random_feeds(proto)


def after(name: str, selector: str) -> SplitPart:
    proto = KINDS[name]()
    (part,) = split(model_of(proto), selector, cut="after", inputs=feeds_of(name, proto))
    return part


def before(name: str, selector: str) -> SplitPart:
    proto = KINDS[name]()
    (part,) = split(model_of(proto), selector, inputs=feeds_of(name, proto))
    return part


def assert_right(proto: onnx.ModelProto, part: SplitPart, feeds: cut_models.Feeds, *, full: bool = True) -> None:
    assert part.proved, part.note
    assert part.tail is not None or "the head computes everything" in part.note
    assert_whole(proto, part, feeds)
    for made in (part.head, *([part.tail] if part.tail is not None else [])):
        assert_kept(proto, made)
        assert_minimal(made)
        assert_valid(made, full=full)


# -- every kind, cut everywhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_can_be_cut_at_every_node_and_value(name: str) -> None:
    proto = KINDS[name]()
    model, feeds = model_of(proto), feeds_of(name, proto)
    cuts = 0
    for op_type in dict.fromkeys(f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in proto.graph.node):
        for place in ("before", "after"):
            for part in split(model, f"op:{op_type}", cut=place, inputs=feeds):
                assert_right(proto, part, feeds, full=name not in NOT_INFERABLE)
                cuts += 1
    for value in cut_models.values(proto):
        (part,) = split(model, f"value:{value}", inputs=feeds)
        assert_right(proto, part, feeds, full=name not in NOT_INFERABLE)
        cuts += 1
    assert cuts == 2 * len(proto.graph.node) + len(list(cut_models.values(proto)))


@pytest.mark.parametrize(("opset", "ir"), OPSETS)
def test_opsets_and_ir_versions_stay_as_they_are(opset: int, ir: int) -> None:
    proto = cut_models.chain_of_opset(opset, ir)
    feeds = random_feeds(proto)
    for part in split(model_of(proto), "*", cut="after", inputs=feeds):
        assert_right(proto, part, feeds)
        assert [entry.version for entry in part.head.opset_import] == [opset]
        assert part.head.ir_version == ir


def test_head_and_tail_share_no_node_that_the_input_reaches() -> None:
    """Nothing is computed twice, and nothing of what outputs need is left out."""
    for name in ("skips_that_cross_every_cut", "several_outputs_some_of_them_read_again", "diamonds", "dead_nodes"):
        model = model_of(KINDS[name]())
        for node in model.graph.originals:
            point = Selected("here", node, None, tuple(filter(None, node.inputs)), tuple(filter(None, node.outputs)))
            for place in ("before", "after"):
                cut = find_cut(model, point, place)
                assert not set(cut.head_nodes) & set(cut.tail_nodes)
                assert model.graph.live <= set(cut.head_nodes) | set(cut.tail_nodes)


# -- what crosses -------------------------------------------------------------------------------------------------------


def test_the_boundary_is_all_that_crosses_not_only_what_was_named() -> None:
    part = after("skips_that_cross_every_cut", "third")
    assert part.boundary == ("a", "c")
    assert part.tail is not None
    assert [port.name for port in part.tail.graph.input] == ["x", "a", "c"]


def test_an_output_that_the_head_makes_and_the_tail_reads_comes_out_of_the_head() -> None:
    part = after("several_outputs_some_of_them_read_again", "value:early")
    assert part.boundary == ("early",)
    assert part.tail is not None
    assert [port.name for port in part.tail.graph.output] == ["y", "apart"]


def test_before_an_if_crosses_what_its_bodies_read() -> None:
    """`before`: the head computes all that the node reads, bodies included."""
    assert before("an_if_whose_bodies_read_outer_values", "If").boundary == ("h", "late")
    assert set(before("an_if_that_computes_its_condition", "If").boundary) == {"h", "flag", "late"}
    assert before("an_if_with_a_constant_condition", "If").boundary == ("h", "late")
    assert set(before("an_if_in_a_loop_in_an_if", "branch").boundary) == {"h", "deep"}


def test_what_constants_alone_make_never_crosses() -> None:
    for selector in ("double", "square", "first"):
        part = after("weights_that_nodes_compute_from_initializers", selector)
        assert not {"doubled", "squared"} & set(part.boundary)


def test_random_numbers_cross_although_no_input_reaches_them() -> None:
    part = before("random_numbers_with_a_seed", "Relu")
    assert set(part.boundary) == {"a", "noise"}
    assert part.tail is not None
    assert "RandomNormal" not in {node.op_type for node in part.tail.graph.node}


def test_random_numbers_without_a_seed_are_not_the_model() -> None:
    (part,) = split(model_of(cut_models.random_numbers_that_change()), "first", cut="after")
    assert part.proved is False
    assert "output 'y' differs" in part.note


def test_outputs_that_no_node_computes_come_out_of_the_head_when_there_is_no_tail() -> None:
    part = after("outputs_that_no_node_computes_beside_one_that_is", "Relu")
    assert part.proved, part.note
    assert part.tail is None
    assert {port.name for port in part.head.graph.output} == {"w", "y", "through"}


def test_cuts_that_compute_nothing_or_everything_say_so() -> None:
    assert "the head computes nothing" in after("skips_that_cross_every_cut", "value:x").note
    assert "the head computes everything" in after("skips_that_cross_every_cut", "fifth").note
    assert "no model output depends on deader" in after("dead_nodes", "dead_too").note
    assert after("skips_that_cross_every_cut", "second").note == ""


# -- what comes along ---------------------------------------------------------------------------------------------------


def test_only_the_functions_that_a_part_calls_come_along() -> None:
    def functions(selector: str) -> tuple[set[str], set[str]]:
        part = after("nested_local_functions_without_value_info", selector)
        assert part.tail is not None
        return {f.name for f in part.head.functions}, {f.name for f in part.tail.functions}

    assert functions("scale") == (set(), {"Twice", "Quad", "Scaled"})
    assert functions("call") == ({"Twice", "Quad"}, {"Scaled"})
    part = after("a_local_function_that_only_a_body_calls", "If")
    assert {f.name for f in part.head.functions} == {"Twice", "Quad"}


def test_overloads_of_a_function_are_told_apart() -> None:
    part = after("two_overloads_of_one_local_function", "value:a")
    assert [f.overload for f in part.head.functions] == [""]
    assert part.tail is not None
    assert [f.overload for f in part.tail.functions] == ["other"]


def test_a_body_brings_the_weights_it_reads_and_no_others() -> None:
    part = after("an_if_whose_bodies_read_outer_values", "If")
    assert {t.name for t in part.head.graph.initializer} == {"weight"}
    assert part.tail is not None
    assert not part.tail.graph.initializer


def test_quantisation_annotations_follow_their_tensors() -> None:
    proto = KINDS["skips_that_cross_every_cut"]()
    for name in "abcd":
        annotation = proto.graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=f"{name}_scale")
    (part,) = split(model_of(proto), "second", cut="after")
    assert {a.tensor_name for a in part.head.graph.quantization_annotation} >= {"a", "b"}
    assert {a.tensor_name for a in part.head.graph.quantization_annotation} <= {"a", "b"}


def test_metadata_of_graph_and_nodes_is_kept() -> None:
    proto = KINDS["skips_that_cross_every_cut"]()
    proto.graph.metadata_props.add(key="of", value="the graph")
    for node in proto.graph.node:
        node.metadata_props.add(key="from", value=node.name)
    (part,) = split(model_of(proto), "second")
    for made in (part.head, part.tail):
        assert made is not None
        assert [(p.key, p.value) for p in made.graph.metadata_props] == [("of", "the graph")]
        assert all(p.value == node.name for node in made.graph.node for p in node.metadata_props)


# -- types --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cut_models.NARROW)
def test_narrow_types_are_handed_over_in_a_wider_one_and_come_back(name: str) -> None:
    part = after(f"{name}_crosses_the_cut", "to_narrow")
    assert part.parts.exchanged == {"n": name}
    wide = {"int4": TensorProto.INT8, "uint4": TensorProto.UINT8}.get(name, TensorProto.FLOAT)
    assert part.tail is not None
    for port in (*part.head.graph.output, *part.tail.graph.input):
        if port.name == "n":
            assert port.type.tensor_type.elem_type == wide
    (back,) = [node for node in part.tail.graph.node if list(node.input) == ["n"]]
    assert back.attribute[0].i == cut_models.NARROW[name][0]


def test_a_narrow_output_of_the_model_can_be_proved_though_numpy_cannot_hold_it() -> None:
    proto = cut_models.text("g (float[5] x) => (bfloat16[5] y) { h = Neg(x) n = Cast <to = 16> (h) y = Identity(n) }")
    for selector in ("value:h", "value:n", "value:y"):
        (part,) = split(model_of(proto), selector)
        assert part.proved, part.note
        for made in (part.head, *([part.tail] if part.tail else [])):
            assert_valid(made)


def test_a_narrow_input_passes_through_as_it_is() -> None:
    proto = cut_models.text("g (bfloat16[5] x) => (float[5] y) { h = Cast <to = 1> (x) y = Neg(h) }")
    (part,) = split(model_of(proto), "value:x", prove=False)
    assert_valid(part.head)
    cut_models.session(part.head)
    assert not part.parts.exchanged


def test_a_stale_value_info_does_not_stop_the_tail() -> None:
    """The batch was changed after the export; what is said of inner values is still of the old one."""
    proto = KINDS["skips_that_cross_every_cut"]()
    for port in (proto.graph.input[0], proto.graph.output[0]):
        port.type.tensor_type.shape.dim[0].dim_param = "N"
    proto.graph.value_info.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3]) for n in "abcd")
    (part,) = split(model_of(proto), "third", inputs=np.ones((4, 3), np.float32))
    assert part.proved, part.note
    assert_whole(proto, part, {"x": np.ones((4, 3), np.float32)})


def test_a_type_that_nobody_knows_is_an_error_that_names_the_operator() -> None:
    proto = cut_models.text(
        "g (float[3] x) => (float[3] y) { a = own.Mystery(x) b = own.Mystery(a) y = Neg(b) }", domains=', "own": 1'
    )
    with pytest.raises(EngineRefused, match="Mystery"):
        split(model_of(proto), "value:a", prove=False)


def test_types_do_not_depend_on_weights_that_are_too_big_to_hand_to_the_engine() -> None:
    """Of an untyped value behind a contrib operator, with an external weight that is nowhere to be found."""
    proto = KINDS["contrib_operators_without_shape_inference"]()
    (weight,) = [t for t in proto.graph.initializer if t.name == "weight"]
    weight.Clear()
    weight.name, weight.data_type, weight.data_location = "weight", TensorProto.FLOAT, TensorProto.EXTERNAL
    weight.dims.extend([4, 4])
    weight.external_data.add(key="location", value="nowhere.bin")
    (part,) = split(OnnxModel("small.onnx", "", proto), "value:a", prove=False)
    assert part.tail is not None
    assert [d.dim_value for d in part.tail.graph.input[0].type.tensor_type.shape.dim] == [2, 4]


# -- what cannot be cut -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "holder"),
    [
        ("an_if_whose_bodies_read_outer_values", "s", "the body of If 'branch'"),
        ("an_if_in_a_loop_in_an_if", "total", "the body of If 'branch'"),
        ("a_scan_that_reads_an_outer_value", "next", "the body of Scan 'scan'"),
        ("nested_local_functions_without_value_info", "w", "the local function"),
    ],
)
def test_a_value_inside_a_body_is_an_error_that_names_the_node_it_belongs_to(
    name: str, value: str, holder: str
) -> None:
    model = model_of(KINDS[name]())
    for selector in (f"value:{value}", value):
        with pytest.raises(SelectorError) as caught:
            split(model, selector)
        assert holder in str(caught.value)
        assert "before or after that node" in str(caught.value)


def test_a_node_that_is_called_like_one_of_its_outputs_is_meant_itself() -> None:
    part = after("a_node_called_like_the_first_of_its_outputs", "parts")
    assert part.parts.cut.point.after == ("parts", "rest")


def test_split_points_come_in_the_order_of_the_file() -> None:
    model = model_of(KINDS["dead_nodes"]())
    found = split(model, ["value:y", "Neg", "dead_node", "value:a", "dead_too"], cut="after", prove=False)
    assert [part.parts.cut.point.after[0] for part in found] == ["a", "dead", "deader", "y", "y"]


# -- random graphs ------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs_and_cuts())
def test_head_and_tail_of_any_graph_cut_anywhere_are_the_model(drawn: Drawn) -> None:
    model = model_of(drawn.proto)
    for part in split(model, drawn.selector, cut=drawn.place, inputs=drawn.feeds):
        assert_right(drawn.proto, part, drawn.feeds)


# -- size ---------------------------------------------------------------------------------------------------------------


def test_a_chain_of_3000_nodes_and_48_diamonds_take_no_time_to_speak_of() -> None:
    """In a process of their own; `tests/bench/cut_speed.py` says how long exactly. The limit is 20 times what it takes."""
    script = Path(__file__).resolve().parents[2] / "bench" / "cut_speed.py"
    for what in ("chain", "diamonds"):
        subprocess.run([sys.executable, str(script), "--only", what], check=True, timeout=40, capture_output=True)


def test_weights_of_the_other_part_are_not_copied() -> None:
    proto = KINDS["skips_that_cross_every_cut"]()
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(1 << 20, np.float32), "big"))
    proto.graph.node.append(helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0))
    proto.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, []))
    (part,) = split(model_of(proto), "third", prove=False)
    assert part.head.ByteSize() < 10_000
