"""Selectors, in their order: prefix, #N, op_type, node, value, Conv#2, glob; and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import Qdq
from equivcheck.errors import SelectorError
from equivcheck.models.graph import Graph
from equivcheck.models.onnx.load import load_model, model_from_bytes
from equivcheck.models.onnx.rewrite import TWINS
from equivcheck.models.select import Selected, select
from small_models import TRAPS, end, start, zero_of


def graph_of(proto: object) -> Graph:
    return model_from_bytes(proto.SerializeToString(), "small.onnx").graph  # type: ignore[attr-defined]  # outside of the public types


@pytest.fixture(scope="module")
def chain() -> Graph:
    """x_q, /head/Conv -> a_q, /body/Conv -> b_q, Sigmoid*Mul island -> c_q, GlobalAveragePool -> d_q."""
    m = Qdq(seed=1)
    x = start(m)
    m.channels["x_q_real"] = 4
    a = m.op("Conv", [x, m.weight((4, 4, 1, 1))], "a", name="/head/Conv")
    a = m.dq(m.q(a, 0.07, 128, out="a_q"))
    b = m.op("Conv", [a, m.weight((4, 4, 1, 1))], "b", name="/body/Conv")
    b = m.dq(m.q(m.op("Relu", [b], "b_relu", name="/body/Relu"), 0.07, 0, out="b_q"))
    c = m.op("Mul", [b, m.op("Sigmoid", [b], "gate", name="/body/Sigmoid")], "c", name="/body/Mul")
    c = m.dq(m.q(c, 0.07, 0, out="c_q"))
    d = m.op("GlobalAveragePool", [c], "d", name="/tail/GlobalAveragePool")
    return graph_of(m.model(m.dq(m.q(d, 0.05, 0, out="d_q"), out="y")))


def one(graph: Graph, selector: str) -> Selected:
    (point,) = select(graph, [selector], TWINS)
    return point


def after(graph: Graph, *selectors: str) -> list[tuple[str, ...]]:
    return [point.after for point in select(graph, selectors, TWINS)]


def test_an_op_type_selects_all_its_nodes_in_graph_order(chain: Graph) -> None:
    assert after(chain, "Conv") == [("a_q",), ("b_q",)]
    assert [p.before for p in select(chain, ["Conv"], TWINS)] == [("x_q",), ("a_q",)]


@pytest.mark.parametrize(
    "selector",
    [
        "GlobalAveragePool",
        "op:GlobalAveragePool",
        "ai.onnx::GlobalAveragePool",
        "/tail/GlobalAveragePool",
        "node:/tail/GlobalAveragePool",
        "#5",
        "GlobalAveragePool#1",
        "/tail/*",
        "*AveragePool",
    ],
)
def test_all_these_mean_the_pool(chain: Graph, selector: str) -> None:
    point = one(chain, selector)
    assert point.node is not None
    assert point.node.op_type == "GlobalAveragePool"
    assert (point.before, point.after) == (("c_q",), ("d_q",))
    assert point.step is not None
    assert point.step.id == 5
    assert point.selector == selector


@pytest.mark.parametrize("selector", ["d_q", "value:d_q", "d", "value:d", "y"])
def test_a_value_may_be_named_by_any_of_its_aliases(chain: Graph, selector: str) -> None:
    point = one(chain, selector)
    assert point.after == ("d_q",)
    assert (point.node, point.before) == (None, ())


@pytest.mark.parametrize(("selector", "expected"), [("Conv#1", "a_q"), ("Conv#2", "b_q"), ("#2", "a_q"), ("#1", "x_q")])
def test_the_nth_of_a_kind_and_the_nth_step_count_from_one(chain: Graph, selector: str, expected: str) -> None:
    assert after(chain, selector) == [(expected,)]


@pytest.mark.parametrize(
    ("selector", "words"), [("#0", "#1 to #5"), ("#6", "#1 to #5"), ("Conv#3", "2 Conv"), ("Conv#0", "2 Conv")]
)
def test_a_number_out_of_range_says_how_many_there_are(chain: Graph, selector: str, words: str) -> None:
    with pytest.raises(SelectorError, match=words):
        one(chain, selector)


def test_the_relu_of_a_conv_selects_the_same_step(chain: Graph) -> None:
    point = one(chain, "Relu")
    assert (point.before, point.after) == (("a_q",), ("b_q",))
    assert point.step == one(chain, "/body/Conv").step


def test_an_op_inside_an_island_selects_the_island(chain: Graph) -> None:
    assert one(chain, "Sigmoid").after == ("c_q",)
    assert one(chain, "/body/Mul").after == ("c_q",)


def test_a_value_inside_an_island_is_never_stored_and_the_error_says_where_to_split(chain: Graph) -> None:
    with pytest.raises(SelectorError, match=r"inside step #4 .*nearest: value:c_q.*#4"):
        one(chain, "value:gate")


def test_selectors_add_up_in_graph_order_each_once(chain: Graph) -> None:
    assert after(chain, "GlobalAveragePool", "Conv#2", "Conv", "#5") == [("a_q",), ("b_q",), ("d_q",)]


@pytest.mark.parametrize(
    ("selector", "near"),
    [
        ("GlobalAvgPool", "GlobalAveragePool"),
        ("globalaveragepool", "GlobalAveragePool"),
        ("op:Convv", "Conv"),
        ("node:/head/Conf", "/head/Conv"),
        ("value:d_qq", "d_q"),
        ("/tail/GlobalAveragePol", "/tail/GlobalAveragePool"),
    ],
)
def test_a_typo_is_answered_with_near_names(chain: Graph, selector: str, near: str) -> None:
    with pytest.raises(SelectorError) as caught:
        one(chain, selector)
    assert near in caught.value.nearest
    assert caught.value.asked == selector
    assert "Conv" in str(caught.value)


@pytest.mark.parametrize(
    "selector", ["", "nothing*", "[", "value:", "node:", "op:", "#", "#x", "Conv#", "Conv#-1", "weight", "value:weight"]
)
def test_what_selects_nothing_is_an_error(chain: Graph, selector: str) -> None:
    with pytest.raises(SelectorError):
        one(chain, selector)


def test_the_rest_of_a_prefixed_selector_is_literal(chain: Graph) -> None:
    for selector in ("op:Conv*", "node:/tail/*", "value:*_q", "op:Conv#2", "op:#2"):
        with pytest.raises(SelectorError):
            one(chain, selector)


def test_a_glob_takes_nodes_before_values(chain: Graph) -> None:
    assert after(chain, "/body/*") == [("b_q",), ("b_q",), ("c_q",), ("c_q",)] or after(chain, "/body/*") == [
        ("b_q",),
        ("c_q",),
    ]
    assert after(chain, "?_q") == [("x_q",), ("a_q",), ("b_q",), ("c_q",), ("d_q",)]


def test_a_node_and_its_own_output_of_one_name_are_one_thing() -> None:
    m = Qdq(seed=1)
    y = m.conv(start(m), 4, out="same")
    m.nodes[-1].name = "same"
    graph = graph_of(m.model(end(m, y, 0.07)))
    assert one(graph, "same").node is not None
    assert one(graph, "same").after == ("same_q",)


def test_different_things_under_one_name_are_refused_with_the_prefixed_forms() -> None:
    m = Qdq(seed=1)
    first = m.conv(start(m), 4, out="twice")
    y = m.conv(end(m, first, 0.07), 4)
    m.nodes[-1].name = "twice"
    graph = graph_of(m.model(end(m, y, 0.4)))
    with pytest.raises(SelectorError, match=r"node:twice.*value:twice"):
        one(graph, "twice")
    assert one(graph, "node:twice").after == ("conv_q",)
    assert one(graph, "value:twice").after == ("twice_q",)


def test_a_node_called_like_an_op_type_is_refused_unless_it_is_the_only_one() -> None:
    m = Qdq(seed=1)
    y = end(m, m.conv(start(m), 4), 0.07)
    y = end(m, m.op("Sigmoid", [y], name="Conv"), 1 / 256, 0.0)
    graph = graph_of(m.model(y))
    with pytest.raises(SelectorError, match=r"op:Conv \(1 node\), node:Conv \(1 node\)"):
        one(graph, "Conv")
    assert one(graph, "op:Conv").node.op_type == "Conv"  # type: ignore[union-attr]  # there, or the test fails
    assert one(graph, "node:Conv").node.op_type == "Sigmoid"  # type: ignore[union-attr]  # there, or the test fails


def test_two_nodes_of_one_name_are_both_selected() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: Qdq(seed=1))
    for node in proto.graph.node:
        if node.op_type == "Conv":
            node.name = "layer"
    assert after(graph_of(proto), "node:layer") == [("relu_q",), ("conv_2_q",)]


def test_a_contrib_op_is_selected_by_its_domain() -> None:
    m = Qdq(seed=1)
    y = m.op("Gelu", [start(m)], domain="com.microsoft")
    graph = graph_of(_gelu(m, y))
    assert one(graph, "com.microsoft::Gelu").after == ("gelu_q",)
    assert one(graph, "Gelu").after == ("gelu_q",)
    with pytest.raises(SelectorError):
        one(graph, "ai.onnx::Gelu")


def _gelu(m: Qdq, y: str) -> object:
    from onnx import TensorProto, helper

    out = end(m, y, 0.05)
    port = helper.make_tensor_value_info(out, TensorProto.FLOAT, [1, 4, 8, 8])
    graph = helper.make_graph(m.nodes, "g", m.ports, [port], m.initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def test_a_split_of_codes_is_one_point_with_two_values_after_it() -> None:
    graph = graph_of(TRAPS["split_of_codes"](lambda: Qdq(seed=1)))
    assert one(graph, "Split").after == ("left", "right")
    assert one(graph, "value:right").after == ("right",)


def test_an_input_may_be_selected_as_a_value() -> None:
    graph = graph_of(TRAPS["conv_relu_chain"](lambda: Qdq(seed=1)))
    assert one(graph, "value:x").after == ("x",)


def test_a_dead_quantised_conv_is_not_selected() -> None:
    graph = graph_of(TRAPS["dead_ends"](lambda: Qdq(seed=1)))
    assert len(after(graph, "Conv")) == 2


def test_dead_nodes_are_not_selected() -> None:
    graph = graph_of(TRAPS["dead_ends"](lambda: Qdq(seed=1)))
    with pytest.raises(SelectorError):
        one(graph, "Sigmoid")


def test_names_that_look_like_globs_or_numbers_are_exact_first() -> None:
    m = Qdq(seed=1)
    y = end(m, m.conv(start(m), 4, out="a[0]"), 0.07)
    y = end(m, m.op("Sigmoid", [y], "Conv#2", name="odd*name"), 1 / 256, 0.0)
    graph = graph_of(m.model(y))
    assert one(graph, "a[0]").after == ("a[0]_q",)
    assert one(graph, "Conv#2").after == ("Conv#2_q",)
    assert one(graph, "odd*name").after == ("Conv#2_q",)


@given(text=st.text(max_size=12))
def test_any_text_selects_something_or_is_a_selector_error(text: str) -> None:
    graph = _fixed()
    try:
        assert select(graph, [text], TWINS)
    except SelectorError:
        with pytest.raises(SelectorError, match=r".+"):
            select(graph, [text], TWINS)


def _fixed(memory: list[Graph] = []) -> Graph:  # noqa: B006  # built once
    if not memory:
        memory.append(graph_of(TRAPS["residual_adds"](lambda: Qdq(seed=1))))
    return memory[0]


@pytest.mark.parametrize("selector", ["GlobalAveragePool", "QLinearGlobalAveragePool", "op:GlobalAveragePool"])
def test_a_float_op_type_selects_its_quantised_twin(fixtures_dir: Path, selector: str) -> None:
    graph = load_model(fixtures_dir / "digits_qop_u8.onnx").graph
    point = one(graph, selector)
    assert point.node is not None
    assert point.node.op_type == "QLinearGlobalAveragePool"
    assert len(point.before) == len(point.after) == 1
    assert set(point.before + point.after) <= set(graph.stored)


def test_the_two_forms_of_one_network_are_split_at_as_many_places(fixtures_dir: Path) -> None:
    forms = [load_model(fixtures_dir / f"digits_{form}.onnx").graph for form in ("qdq_u8", "qop_u8")]
    assert len({len(select(graph, ["Conv"], TWINS)) for graph in forms}) == 1


def test_codes_of_a_selected_value_are_known() -> None:
    graph = graph_of(TRAPS["conv_relu_chain"](lambda: Qdq(dtype="int8", seed=1)))
    (name,) = one(graph, "Conv#2").after
    assert graph.quantisation[name].dtype == np.int8
    assert zero_of(Qdq(dtype="int8")) == int(graph.quantisation[name].zero_point)
