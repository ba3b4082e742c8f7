"""QOperator files as QDQ: every QLinear operator, and the QDQ form beside it, give the same codes within one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder import Array, Qdq, feeds
from equivcheck.engines.ort import OrtEngine
from equivcheck.models.onnx.load import load_model, model_from_bytes
from equivcheck.models.onnx.rewrite import TWINS, to_qdq
from oracle import Oracle
from small_models import TRAPS

MICROSOFT = "com.microsoft"
Make = Callable[["QOperator"], str]


class QOperator:
    """One QLinear operator between coded inputs and a coded output, all of `dtype`."""

    def __init__(self, dtype: str, opset: int = 17, per_channel: bool = False) -> None:
        self.m = Qdq(dtype=dtype, opset=opset, seed=5)
        self.dtype, self.opset, self.per_channel = dtype, opset, per_channel
        self.real = False
        limits = np.iinfo(dtype)
        self.zero = (int(limits.min) + int(limits.max) + 1) // 2

    def input(self, name: str, shape: tuple[int, ...], scale: float, shift: int = 0) -> list[str]:
        """A coded graph input with its scale and zero point."""
        self.m.input(name, shape, self.dtype)
        return [name, *self.ends(name, scale, shift)]

    def ends(self, name: str, scale: float, shift: int = 0) -> list[str]:
        zero = np.asarray(self.zero + shift, self.dtype)
        return [self.m.constant(np.float32(scale), f"{name}_s"), self.m.constant(zero, f"{name}_z")]

    def weight(self, shape: tuple[int, ...], channels: int, scale: float = 0.01) -> list[str]:
        codes = self.m.rng.integers(-127, 128, shape).astype(np.int8)
        scales = np.full(channels, scale, np.float32) * (1 + np.arange(channels, dtype=np.float32) % 3)
        if not self.per_channel:
            scales = scales[:1].reshape(())
        zeros = np.zeros(scales.shape, np.int8)
        return [self.m.constant(codes, "w"), self.m.constant(scales, "w_s"), self.m.constant(zeros, "w_z")]

    def bias(self, size: int) -> str:
        return self.m.constant(self.m.rng.integers(-3000, 3000, size).astype(np.int32), "bias")

    def op(self, op_type: str, inputs: list[str], domain: str = MICROSOFT, **attributes: object) -> str:
        return self.m.op(op_type, inputs, "y", name="/the/node", domain=domain, **attributes)

    def model(self) -> onnx.ModelProto:
        kind = TensorProto.FLOAT if self.real else helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        output = helper.make_tensor_value_info("y", kind, None)
        graph = helper.make_graph(self.m.nodes, "qop", self.m.ports, [output], self.m.initializers)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def conv(q: QOperator) -> str:
    x = q.input("x", (1, 4, 7, 7), 0.025)
    inputs = [*x, *q.weight((6, 4, 3, 3), 6), *q.ends("y", 0.09, 3), q.bias(6)]
    return q.op("QLinearConv", inputs, "", pads=[1] * 4, strides=[2, 2])


def conv_without_bias(q: QOperator) -> str:
    x = q.input("x", (2, 4, 7, 7), 0.025, -5)
    return q.op("QLinearConv", [*x, *q.weight((4, 1, 3, 3), 4), *q.ends("y", 0.03)], "", group=4, auto_pad="SAME_UPPER")


def matmul(q: QOperator) -> str:
    return q.op("QLinearMatMul", [*q.input("x", (2, 5, 8), 0.025), *q.weight((8, 6), 6), *q.ends("y", 0.06)], "")


def matmul_of_two_activations(q: QOperator) -> str:
    one, other = q.input("x", (2, 5, 8), 0.025), q.input("v", (2, 8, 5), 0.03, 4)
    return q.op("QLinearMatMul", [*one, *other, *q.ends("y", 0.05)], "")


def gemm(q: QOperator) -> str:
    return q.op("QGemm", [*q.input("x", (3, 8), 0.025), *q.weight((6, 8), 6), q.bias(6), *q.ends("y", 0.06)], transB=1)


def gemm_with_alpha(q: QOperator) -> str:
    return q.op("QGemm", [*q.input("x", (3, 8), 0.025), *q.weight((8, 6), 6), q.bias(6), *q.ends("y", 0.04)], alpha=0.5)


def gemm_to_float(q: QOperator) -> str:
    q.real = True
    return q.op("QGemm", [*q.input("x", (3, 8), 0.025), *q.weight((8, 6), 6), q.bias(6)])


def add(q: QOperator) -> str:
    return q.op("QLinearAdd", [*q.input("x", (2, 4, 5), 0.025), *q.input("v", (4, 5), 0.05, 9), *q.ends("y", 0.06, -7)])


def mul(q: QOperator) -> str:
    return q.op("QLinearMul", [*q.input("x", (2, 4, 5), 0.025), *q.input("v", (4, 1), 0.05, 9), *q.ends("y", 0.1)])


def concat(q: QOperator) -> str:
    parts = [*q.input("x", (1, 4, 5), 0.025), *q.input("v", (1, 2, 5), 0.05, 9)]
    return q.op("QLinearConcat", [*q.ends("y", 0.04), *parts], axis=1)


def global_average_pool(q: QOperator) -> str:
    return q.op("QLinearGlobalAveragePool", [*q.input("x", (2, 4, 5, 5), 0.025), *q.ends("y", 0.006)], channels_last=0)


def average_pool(q: QOperator) -> str:
    x = q.input("x", (1, 4, 6, 6), 0.025)
    return q.op("QLinearAveragePool", [*x, *q.ends("y", 0.02)], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)


def sigmoid(q: QOperator) -> str:
    low = -q.zero + int(np.iinfo(q.dtype).min)
    return q.op("QLinearSigmoid", [*q.input("x", (2, 64), 0.05), *q.ends("y", 1 / 256, low)])


def leaky_relu(q: QOperator) -> str:
    return q.op("QLinearLeakyRelu", [*q.input("x", (2, 64), 0.05), *q.ends("y", 0.04)], alpha=0.2)


def softmax(q: QOperator) -> str:
    low = -q.zero + int(np.iinfo(q.dtype).min)
    return q.op("QLinearSoftmax", [*q.input("x", (3, 10), 0.05), *q.ends("y", 1 / 256, low)], axis=-1, opset=13)


def reduce_mean(q: QOperator) -> str:
    return q.op("QLinearReduceMean", [*q.input("x", (2, 4, 5), 0.025), *q.ends("y", 0.012)], axes=[1], keepdims=1)


OPERATORS: list[Make] = [
    conv,
    conv_without_bias,
    matmul,
    matmul_of_two_activations,
    gemm,
    gemm_with_alpha,
    gemm_to_float,
    add,
    mul,
    concat,
    global_average_pool,
    average_pool,
    sigmoid,
    leaky_relu,
    softmax,
    reduce_mean,
]
PER_CHANNEL = [conv, conv_without_bias, matmul, gemm]
# ONNX Runtime 1.32 names QLinearReduceMean in its schemas and has no CPU kernel for it.
NO_KERNEL = {"reduce_mean"}


def run(proto: onnx.ModelProto, given: dict[str, Array]) -> Array:
    engine = OrtEngine()
    engine.load(proto.SerializeToString(), {"optimization": "disable"})
    (found,) = engine.run(given).values()
    return np.asarray(found)


def compare(proto: onnx.ModelProto) -> None:
    """The operator itself, its QDQ form on ORT, and its QDQ form by the oracle: within one code of one another."""
    given = feeds(proto, 7)
    form = to_qdq(proto)
    assert not any(node.op_type in TWINS for node in form.proto.graph.node)
    own, rewritten = run(proto, given), run(form.proto, given)
    by_hand = Oracle(form.proto).evaluate("y", given)
    assert own.dtype == rewritten.dtype == by_hand.dtype
    assert own.shape == rewritten.shape == by_hand.shape
    if own.dtype.kind == "f":
        np.testing.assert_allclose(rewritten, own, rtol=1e-5, atol=1e-5)
        return
    assert np.unique(own).size >= 4
    assert np.abs(own.astype(int) - rewritten.astype(int)).max() <= 1
    assert np.abs(own.astype(int) - by_hand.astype(int)).max() <= 1


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("make", OPERATORS, ids=lambda make: make.__name__)
def test_an_operator_and_its_qdq_form_give_the_same_codes(make: Make, dtype: str) -> None:
    q = QOperator(dtype)
    make(q)
    if make.__name__ in NO_KERNEL:
        # onnxruntime cannot run QLinearReduceMean at all, so nothing is there to compare with: only the rewriting is tried
        assert not any(node.op_type in TWINS for node in to_qdq(q.model()).proto.graph.node)
        return
    compare(q.model())


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("make", PER_CHANNEL, ids=lambda make: make.__name__)
def test_weights_with_a_scale_a_channel_are_rewritten_along_the_right_axis(make: Make, dtype: str) -> None:
    q = QOperator(dtype, per_channel=True)
    make(q)
    compare(q.model())


@pytest.mark.parametrize("opset", [10, 11, 12, 13, 18, 21])
def test_a_conv_of_any_opset_is_rewritten(opset: int) -> None:
    q = QOperator("uint8", opset=opset, per_channel=True)
    conv(q)
    compare(q.model())


@pytest.mark.parametrize("make", OPERATORS, ids=lambda make: make.__name__)
def test_names_of_values_and_nodes_are_kept_and_origins_point_at_the_file(make: Make) -> None:
    q = QOperator("uint8")
    make(q)
    proto = q.model()
    before = proto.SerializeToString()
    form = to_qdq(proto)
    assert proto.SerializeToString() == before, "the file itself was changed"
    made = {out for node in form.proto.graph.node for out in node.output}
    assert "y" in made
    assert [port.name for port in form.proto.graph.input] == [port.name for port in proto.graph.input]
    assert len(form.origins) == len(form.proto.graph.node)
    assert set(form.origins) == {0}
    names = [node.name for node in form.proto.graph.node]
    assert "/the/node" in names
    assert len(set(names)) == len(names)


def test_a_model_without_qlinear_operators_is_returned_as_it_is() -> None:
    proto = TRAPS["residual_adds"](lambda: Qdq(seed=1))
    form = to_qdq(proto)
    assert form.proto is proto
    assert form.origins == tuple(range(len(proto.graph.node)))


def test_new_names_avoid_those_of_the_model() -> None:
    q = QOperator("uint8")
    x = q.input("x", (2, 8), 0.05)
    q.m.nodes.append(helper.make_node("Identity", ["x"], ["y/real"], name="a"))
    q.m.nodes.append(helper.make_node("Identity", ["x"], ["x/dequantised"], name="b"))
    q.op("QLinearSigmoid", [*x, *q.ends("y", 1 / 256)])
    made = [out for node in to_qdq(q.model()).proto.graph.node for out in node.output]
    assert len(set(made)) == len(made)


def test_a_scale_that_two_operators_share_serves_both() -> None:
    q = QOperator("uint8")
    x = q.input("x", (1, 4, 6, 6), 0.025)
    shared = q.ends("shared", 0.05)
    q.m.op("QLinearAdd", [*x, *x, *shared], "mid", domain=MICROSOFT)
    q.op("QLinearGlobalAveragePool", ["mid", *shared, *shared], channels_last=0)
    compare(q.model())


@pytest.mark.parametrize("channels_last", [1])
def test_a_layout_that_has_no_float_twin_stays_as_it_is(channels_last: int) -> None:
    q = QOperator("uint8")
    x = q.input("x", (1, 5, 5, 4), 0.025)
    q.op("QLinearGlobalAveragePool", [*x, *q.ends("y", 0.01)], channels_last=channels_last)
    form = to_qdq(q.model())
    assert [node.op_type for node in form.proto.graph.node] == ["QLinearGlobalAveragePool"]
    graph = model_from_bytes(q.model().SerializeToString(), "m").graph
    assert graph.stored == ("x", "y")


def test_every_twin_is_an_operator_of_onnx() -> None:
    for quantised, plain in TWINS.items():
        assert quantised != plain
        assert onnx.defs.has(plain), plain


@pytest.mark.parametrize("name", ["digits_qop_u8", "detector_qop_u8"])
def test_a_whole_network_keeps_its_names_and_every_step_its_codes(fixtures_dir: Path, name: str) -> None:
    """Each step on the values the QOperator file itself computed: within one code, ORT against the oracle."""
    model = load_model(fixtures_dir / f"{name}.onnx")
    given = feeds(model.proto, 3, spread=0.5)
    made = [v for v in model.graph.stored if v not in given]
    copy = onnx.ModelProto()
    copy.CopyFrom(model.proto)
    have = {port.name for port in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=v) for v in made if v not in have)
    engine = OrtEngine()
    engine.load(copy.SerializeToString(), {"optimization": "disable"})
    values = {**given, **engine.run(given)}
    oracle = Oracle(model.qdq.proto)
    known = {v: values[v] for v in model.graph.stored}
    for value in made:
        again = oracle.again(value, known)
        assert (again.dtype, again.shape) == (values[value].dtype, values[value].shape)
        if again.dtype.kind in "iu":
            assert np.abs(again.astype(int) - values[value].astype(int)).max() <= 1, value
        else:
            np.testing.assert_allclose(again, values[value], rtol=1e-4, atol=1e-5, err_msg=value)


def test_a_bias_of_a_qgemm_is_dequantised_at_alpha_times_the_two_scales() -> None:
    """ContribOperators.md, QGemm: C's scale is alpha * a_scale * b_scale."""
    q = QOperator("uint8")
    gemm_with_alpha(q)
    form = to_qdq(q.model())
    node = next(n for n in form.proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == "bias")
    scale = next(t for t in form.proto.graph.initializer if t.name == node.input[1])
    found = onnx.numpy_helper.to_array(scale)
    assert found == pytest.approx(0.5 * 0.025 * 0.01, rel=1e-6)
    assert scale.data_type == TensorProto.FLOAT
