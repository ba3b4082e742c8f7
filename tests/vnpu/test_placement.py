"""What runs where: lowering's reasons, targets' conditions, partitions and crossings."""

import numpy as np
import pytest

from equivcheck.errors import InputError, UnknownOption
from equivcheck.vnpu.profiles import load_profile
from equivcheck.vnpu.targets import load_target, parse_target, target_names
from vnpu.cases import chain, conv
from vnpu.graphs import Q, Weight, compiled, quantised_model, shared_model

A = Q(0.05, 3, "int8")


def conv_node(source, made, channels=4, group=1, dilation=1, seed=0):
    rng = np.random.default_rng(seed)
    w = rng.integers(-128, 128, (channels, channels // group, 1, 1)).astype(np.int8)
    weight = Weight(w, np.full(channels, 0.01), 0, 0)
    return ("Conv", [source, weight], [made], {"group": group, "dilations": [dilation, dilation]})


def quantised_between(nodes, shape=(1, 4, 5, 6)):
    """Each node's output goes through Q-DQ before the next reads it: one step a node."""
    from onnx import helper, numpy_helper

    from equivcheck.models.onnx.load import model_from_bytes

    built = quantised_model(nodes[:1], {nodes[0][2][0]: A}, {"x": shape}, {"x": A})
    if len(nodes) == 1:
        return built.graph
    import onnx

    proto = onnx.load_from_string(built.model)
    last = proto.graph.output[0].name
    for k, (op_type, inputs, outputs, attributes) in enumerate(nodes[1:]):
        names = [last]
        for j, extra in enumerate(inputs[1:]):
            array = extra.codes if isinstance(extra, Weight) else np.asarray(extra)
            stem = f"m{k}_{j}"
            proto.graph.initializer.append(numpy_helper.from_array(array, stem))
            if isinstance(extra, Weight):
                proto.graph.initializer.append(
                    numpy_helper.from_array(np.asarray(extra.scale, np.float32), f"{stem}_s")
                )
                proto.graph.node.append(
                    helper.make_node("DequantizeLinear", [stem, f"{stem}_s"], [f"{stem}_dq"], axis=extra.axis)
                )
                stem = f"{stem}_dq"
            names.append(stem)
        made = outputs[0]
        proto.graph.node.append(helper.make_node(op_type, names, [f"{made}_raw"], **attributes))
        ends = [proto.graph.node[0].input[1], proto.graph.node[0].input[2]]
        proto.graph.node.append(helper.make_node("QuantizeLinear", [f"{made}_raw", *ends], [f"{made}_q2"]))
        proto.graph.node.append(helper.make_node("DequantizeLinear", [f"{made}_q2", *ends], [f"{made}_float2"]))
        last = f"{made}_float2"
    proto.graph.output[0].name = last
    return model_from_bytes(onnx.shape_inference.infer_shapes(proto).SerializeToString(), "chain.onnx").graph


def fallback(step, inputs):
    return {name: np.zeros((1, 4, 1, 1), np.int8) for name in step.outputs}


def test_global_average_pool_between_two_convolutions_is_a_cpu_island_on_warboy():
    graph = quantised_between([conv_node("x", "c"), ("GlobalAveragePool", ["c"], ["g"], {}), conv_node("g", "d")])
    program = compiled(graph, "exact", "warboy", fallback)
    assert [(p.where, p.partition) for p in program.placement] == [("npu", 1), ("npu", 1), ("cpu", 1), ("npu", 2)]
    assert [p.reason for p in program.placement if p.where == "cpu"] == ["GlobalAveragePool is not on warboy's list"]
    crossings = [(c.value, c.direction, c.bytes, c.model_edge) for c in program.crossings]
    assert crossings == [
        ("x", "cpu->npu", 4 * 120, True),
        ("c_oq", "npu->cpu", 120, False),
        ("g_q2", "cpu->npu", 4, False),
        ("d_q2", "npu->cpu", 4, True),
    ]


def test_the_fallback_runs_the_cpu_steps_and_its_codes_go_on():
    graph = quantised_between([conv_node("x", "c"), ("GlobalAveragePool", ["c"], ["g"], {}), conv_node("g", "d")])
    whole = compiled(graph, "exact")
    seen = []

    def by_npu(step, inputs):
        seen.append((step.op_type, sorted(inputs)))
        return whole.run_step(step, inputs)

    feeds = {"x": np.random.default_rng(0).normal(size=(1, 4, 5, 6)).astype(np.float32)}
    mixed = compiled(graph, "exact", "warboy", by_npu).run(feeds)
    assert seen == [("GlobalAveragePool", ["c_oq"])]
    for name, codes in whole.run(feeds).items():
        np.testing.assert_array_equal(mixed[name], codes)


def test_a_step_on_the_cpu_still_has_its_real_value():
    graph = quantised_between([("GlobalAveragePool", ["x"], ["g"], {})])
    program = compiled(graph, "tflite-reference", "warboy", fallback)
    codes = np.arange(120, dtype=np.int8).reshape(1, 4, 5, 6)
    real = program.real(graph.steps[1], {"x_q": codes})
    np.testing.assert_allclose(real["g_oq"], codes.mean(axis=(2, 3), keepdims=True))


@pytest.mark.parametrize(
    ("node", "shape", "reason"),
    [
        (conv_node("x", "c", 400, 200), (1, 400, 2, 2), "Conv with group 200 > 128 is outside of warboy's list"),
        (conv_node("x", "c", 200, 200), (1, 200, 2, 2), ""),
        (conv_node("x", "c", 4, 1, 13), (1, 4, 5, 6), "Conv with dilation 13 > 12 is outside of warboy's list"),
        (("Softmax", ["x"], ["y"], {"axis": -1}), (3, 7), "Softmax with batch 3 > 2 is outside of warboy's list"),
        (("Softmax", ["x"], ["y"], {"axis": -1}), (2, 7), ""),
        (("Concat", ["x", "x"], ["y"], {"axis": 2}), (1, 4, 5, 6), ""),
        (
            ("Concat", ["x", "x"], ["y"], {"axis": 1}),
            (1, 4, 5, 6),
            "Concat with axis 1, not the height axis is outside of warboy's list",
        ),
        (("Tanh", ["x"], ["y"], {}), (1, 4), "Tanh is not on warboy's list"),
    ],
)
def test_warboy_runs_an_operator_under_its_conditions_only(node, shape, reason):
    built = quantised_model([node], {node[2][0]: A}, {"x": shape}, {"x": A})
    assert compiled(built.graph, "exact", "warboy", fallback).placement[-1].reason == reason


def strided(stride, pads):
    w = Weight(np.ones((4, 4, 3, 3), np.int8), np.full(4, 0.01), 0, 0)
    return ("Conv", ["x", w], ["c"], {"strides": [stride, stride], "pads": [pads] * 4})


def scaled(*size):
    extra = [np.zeros(0, np.float32), np.zeros(0, np.float32), np.array([1, 4, *size])]
    return ("Resize", ["x", *extra], ["y"], {"mode": "linear"})


IMAGE = (1, 4, 16, 16)


@pytest.mark.parametrize(
    ("target", "node", "shape", "reason"),
    [
        ("imx8mp-vx", ("GlobalAveragePool", ["x"], ["g"], {}), IMAGE, ""),
        ("imx8mp-vx", ("LogSoftmax", ["x"], ["y"], {}), (1, 7), "LogSoftmax is not on imx8mp-vx's list"),
        (
            "imx8mp-vx", ("DepthToSpace", ["x"], ["y"], {"blocksize": 2, "mode": "CRD"}), IMAGE,
            "DepthToSpace with mode CRD, not DCR is outside of imx8mp-vx's list",
        ),
        ("edgetpu", ("Transpose", ["x"], ["y"], {"perm": [0, 2, 3, 1]}), IMAGE, "Transpose is not on edgetpu's list"),
        ("edgetpu", ("Softmax", ["x"], ["y"], {}), (1, 1000), ""),
        (
            "edgetpu", ("Softmax", ["x"], ["y"], {}), (1, 20000),
            "Softmax with 20000 elements > 16000 is outside of edgetpu's list",
        ),
        (
            "edgetpu", ("Softmax", ["x"], ["y"], {}), (1, 4, 16),
            "Softmax with 2 axes longer than one > 1 is outside of edgetpu's list",
        ),
        ("edgetpu", ("Pad", ["x", np.array([0, 0, 1, 1, 0, 0, 1, 1])], ["y"], {}), IMAGE, ""),
        (
            "edgetpu", ("Pad", ["x", np.array([1, 0, 0, 0, 0, 0, 0, 0])], ["y"], {}), IMAGE,
            "Pad with the batch axis is outside of edgetpu's list",
        ),
        (
            "edgetpu", ("ReduceMean", ["x", np.array([0, 2])], ["y"], {}), IMAGE,
            "ReduceMean with the batch axis is outside of edgetpu's list",
        ),
        ("ethos-u55", strided(4, 0), IMAGE, ""),
        ("ethos-u55", strided(4, 1), IMAGE, "Conv with stride 4 > 3 is outside of ethos-u55's list"),
        ("ethos-u55", scaled(32, 32), IMAGE, ""),
        ("ethos-u55", scaled(48, 48), IMAGE, "Resize with a factor of 3 is outside of ethos-u55's list"),
        ("ethos-u55", scaled(32, 64), IMAGE, "Resize with a factor of 2 x 4 is outside of ethos-u55's list"),
        (
            "ethos-u55", ("GlobalAveragePool", ["x"], ["g"], {}), (2, 4, 16, 16),
            "GlobalAveragePool with batch 2 > 1 is outside of ethos-u55's list",
        ),
        ("ethos-u55", ("Sqrt", ["x"], ["y"], {}), IMAGE, "Sqrt is not on ethos-u55's list"),
    ],
)  # fmt: skip
def test_a_target_runs_what_its_public_list_says(target, node, shape, reason):
    built = quantised_model([node], {node[2][0]: A}, {"x": shape}, {"x": A})
    import onnx

    from equivcheck.models.onnx.load import model_from_bytes

    proto = onnx.shape_inference.infer_shapes(onnx.load_from_string(built.model))
    graph = model_from_bytes(proto.SerializeToString(), "one.onnx").graph
    assert compiled(graph, "exact", target, fallback).placement[-1].reason == reason


def test_conditions_of_codes_and_scales():
    text = 'name = "t"\n[operators]\nAdd = { equal_scales = true }\nSigmoid = { bits = 8 }\nReduceMax = { axes_only = [2] }\n'
    target = parse_target(text)

    def refused(node, quantisation, out, shape=(1, 4)):
        built = quantised_model([node], {"y": out}, dict.fromkeys(quantisation, shape), quantisation)
        return target.refuses(built.graph, built.graph.steps[-1])

    add = ("Add", ["x", "z"], ["y"], {})
    assert refused(add, {"x": A, "z": A}, A) == ""
    assert refused(add, {"x": A, "z": Q(0.06, 3, "int8")}, A) == "Add with unequal scales is outside of t's list"
    wide = Q(1e-4, 0, "int16")
    assert (
        refused(("Sigmoid", ["x"], ["y"], {}), {"x": wide}, wide) == "Sigmoid with int16 codes is outside of t's list"
    )
    over = ("ReduceMax", ["x", np.array([1, 2])], ["y"], {})
    assert refused(over, {"x": A}, A, (1, 4, 5)) == "ReduceMax with axis 1 is outside of t's list"


def test_every_target_names_its_source_and_operators_of_onnx():
    import onnx

    for name in set(target_names()) - {"all"}:
        target = load_target(name)
        assert "http" in target.source or "vela" in target.source
        assert [op for op in target.operators if not onnx.defs.has(op)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\noperator = 1\n', "unknown target key operator; nearest: operators"),
        ('summary = "x"\n', "the target has no name"),
        ('name = "x"\n', "the target runs nothing"),
        ('name = "x"\n[operators]\nConv = true\n', "target key operators.Conv is True; it must be a table"),
        ("name = ", "the target is no TOML"),
    ],
)
def test_a_wrong_target_is_refused_by_the_key(text, message):
    with pytest.raises(UnknownOption, match=message):
        parse_target(text)


def test_a_float_step_says_that_its_result_is_a_float():
    built = quantised_model([], {"x": A}, {"x": (1, 4)}, {"x": A})
    from onnx import TensorProto, helper, load_from_string

    from equivcheck.models.onnx.load import model_from_bytes

    proto = load_from_string(built.model)
    proto.graph.node.append(helper.make_node("Softmax", ["x_float"], ["soft"]))
    proto.graph.output.append(helper.make_tensor_value_info("soft", TensorProto.FLOAT, None))
    graph = model_from_bytes(proto.SerializeToString(), "float.onnx").graph
    placed = compiled(graph, "exact", "all", fallback).placement[-1]
    assert (placed.where, placed.reason) == ("cpu", "its result is a float")


@pytest.mark.parametrize("profile", ["exact", "ort", "tflite-reference"])
def test_an_island_of_one_value_is_one_table(profile):
    built = chain(np.random.default_rng(0), "int8")
    program = compiled(built.graph, profile)
    assert [type(program.op(step)).__name__ for step in built.graph.steps] == ["Quantise", "Table"]


def test_a_missing_feed_is_an_input_error():
    built = conv(np.random.default_rng(0), "int8")
    with pytest.raises(InputError, match="no feed for input x"):
        compiled(built.graph, "exact").run({})


def test_targets_and_profiles_are_listed_and_wrong_names_get_the_nearest():
    assert target_names() == ("all", "edgetpu", "ethos-u55", "imx8mp-vx", "warboy")
    with pytest.raises(UnknownOption, match=r"nearest: warboy"):
        load_target("warboi")
    with pytest.raises(UnknownOption, match=r"nearest: tflite-reference"):
        load_profile("tflite")


def test_an_unknown_condition_of_a_target_is_named():
    with pytest.raises(
        UnknownOption,
        match=r"unknown condition operators\.Conv\.max_groups; nearest: max_rank, max_group_unless_depthwise",
    ):
        parse_target('name = "x"\nsummary = ""\n[operators]\nConv = { max_groups = 1 }\n')


def test_efficientnet_lite0_leaves_warboy_for_its_global_average_pool_only():
    graph = shared_model("efficientnet_lite0_int8_qdq_s8s8_pc.onnx").graph
    program = compiled(graph, "exact", "warboy", fallback)
    assert [p.reason for p in program.placement if p.where == "cpu"] == ["GlobalAveragePool is not on warboy's list"]
    assert {p.partition for p in program.placement if p.where == "npu"} == {1, 2}
    inner = [crossing.bytes for crossing in program.crossings if not crossing.model_edge]
    assert inner == [1280 * 7 * 7, 1280]
