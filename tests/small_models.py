"""Small models in which ONNX Runtime moves, merges, renames or re-encodes values: every trap of tapping an optimised graph.

Each function takes how it is to be quantised (a factory of `Qdq`) and returns the model. `TRAPS` names them all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder import Qdq

Factory = Callable[[], Qdq]
Trap = Callable[[Factory], onnx.ModelProto]
TRAPS: dict[str, Trap] = {}


def trap(make: Trap) -> Trap:
    TRAPS[make.__name__] = make
    return make


def zero_of(m: Qdq, share: float = 0.5) -> int:
    """A zero point at `share` of the way from the least to the greatest code: 128 of uint8, 0 of int8, at one half."""
    limits = np.iinfo(m.dtype)
    return round(limits.min + share * (int(limits.max) - limits.min + 1))


def start(m: Qdq, shape: tuple[int, ...] = (1, 4, 8, 8), name: str = "x", scale: float = 0.025) -> str:
    """An input and its Q-DQ: about +-3.2 in 256 codes."""
    return m.dq(m.q(m.input(name, shape), scale, zero_of(m), out=f"{name}_q"))


def end(m: Qdq, real: str, scale: float, share: float = 0.5) -> str:
    return m.dq(m.q(real, scale, zero_of(m, share)))


@trap
def conv_relu_chain(new: Factory) -> onnx.ModelProto:
    m = new()
    x = start(m)
    y = end(m, m.op("Relu", [m.conv(x, 8, x_scale=0.025)]), 0.06, 0.0)
    return m.model(end(m, m.conv(y, 4, x_scale=0.06), 0.4))


@trap
def conv_clip_to_six(new: Factory) -> onnx.ModelProto:
    m = new()
    low, high = m.constant(np.float32(0)), m.constant(np.float32(6))
    y = m.op("Clip", [m.conv(start(m), 8), low, high])
    return m.model(end(m, m.conv(end(m, y, 6 / 255, 0.0), 4), 0.2))


@trap
def conv_then_max_pool(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.op("MaxPool", [m.conv(start(m), 8, x_scale=0.025)], kernel_shape=[2, 2], strides=[2, 2])
    return m.model(end(m, m.conv(end(m, y, 0.07), 4, x_scale=0.07), 0.4))


@trap
def conv_then_transpose(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.op("Transpose", [m.conv(start(m), 8)], perm=[0, 1, 3, 2])
    return m.model(end(m, m.conv(end(m, y, 0.07), 4), 0.4))


@trap
def conv_then_slice(new: Factory) -> onnx.ModelProto:
    m = new()
    c = m.conv(start(m), 8)
    bounds = [m.constant(np.array([k], np.int64)) for k in (1, 6, 3)]
    y = m.op("Slice", [c, *bounds])
    m.channels[y] = 8
    return m.model(end(m, m.conv(end(m, y, 0.07), 4), 0.4))


@trap
def conv_then_reshape_then_max_pool(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.op("Reshape", [m.conv(start(m), 8), m.constant(np.array([1, 8, 4, 16], np.int64))])
    m.channels[y] = 8
    y = m.op("MaxPool", [y], kernel_shape=[2, 2], strides=[2, 2])
    return m.model(end(m, m.conv(end(m, y, 0.07), 4), 0.4))


@trap
def conv_quantised_then_pool_quantised(new: Factory) -> onnx.ModelProto:
    """Conv-Q-DQ-MaxPool-Q with one and the same scale: two values that only their place tells apart."""
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    y = end(m, m.op("MaxPool", [y], kernel_shape=[2, 2], strides=[2, 2]), 0.07)
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def requantised_to_another_scale(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    y = end(m, y, 0.05, 0.4)
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def requantised_twice(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    y = end(m, end(m, y, 0.11, 0.3), 0.06)
    return m.model(end(m, m.op("Relu", [m.conv(y, 4)]), 0.3))


@trap
def requantised_to_the_same_scale(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, end(m, m.conv(start(m), 8), 0.07), 0.07)
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def matmul_and_add_become_a_gemm(new: Factory) -> onnx.ModelProto:
    m = new()
    x = start(m, (1, 3, 16))
    weight = m.weight((16, 8), axis=1)
    y = m.op("Add", [m.op("MatMul", [x, weight]), m.constant(m.rng.normal(0, 1, 8).astype(np.float32))])
    y = end(m, y, 0.1)
    return m.model(end(m, m.op("MatMul", [y, m.weight((8, 5), axis=1)]), 0.3))


@trap
def gemm_with_quantised_bias(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.op("Gemm", [start(m, (2, 16)), m.weight((8, 16)), m.bias(8, 0.025)], transB=1)
    y = end(m, m.op("Relu", [y]), 0.05, 0.0)
    return m.model(end(m, m.op("Gemm", [y, m.weight((5, 8)), m.bias(5, 0.05)], transB=1), 0.1))


@trap
def gemm_with_equal_weight_and_activation_scales(new: Factory) -> onnx.ModelProto:
    m = new()
    x = start(m, (2, 16), scale=0.025)
    y = end(m, m.op("Gemm", [x, m.weight((8, 16), 0.025), m.bias(8, 0.025, 0.025)], transB=1), 0.025)
    return m.model(end(m, m.op("Gemm", [y, m.weight((8, 8), 0.025)], transB=1), 0.025))


@trap
def read_with_another_scale_than_written(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.conv(start(m), 8), 0.07, zero_of(m))
    one, other = m.dq(q), m.dq(q, 0.05, zero_of(m, 0.45))
    y = end(m, m.op("Add", [m.conv(one, 4), m.conv(other, 4)]), 0.5)
    return m.model(y)


@trap
def read_with_another_scale_only(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.conv(start(m), 8), 0.07, zero_of(m))
    return m.model(end(m, m.conv(m.dq(q, 0.05, zero_of(m, 0.45)), 4), 0.3))


@trap
def scales_in_constant_nodes(new: Factory) -> onnx.ModelProto:
    m = new()
    x = m.dq(m.q(m.input("x", (1, 4, 8, 8)), 0.025, zero_of(m), where="value_float"))
    y = m.dq(m.q(m.conv(x, 8), 0.07, zero_of(m), where="value_float"))
    y = m.dq(m.q(m.op("Relu", [m.conv(y, 4)]), 0.2, zero_of(m, 0.0), where="constant"))
    return m.model(m.dq(m.q(m.op("GlobalAveragePool", [y]), 0.1, zero_of(m, 0.0), where="value_float")))


@trap
def no_zero_points(new: Factory) -> onnx.ModelProto:
    """Without a zero point the codes are uint8 and zero is 0, whatever else the model does."""
    m = new()
    m.dtype = "uint8"
    x = m.dq(m.q(m.input("x", (1, 4, 8, 8)), 0.012))
    y = m.dq(m.q(m.op("Relu", [m.conv(x, 8)]), 0.05))
    return m.model(m.dq(m.q(m.op("Relu", [m.conv(y, 4)]), 0.1)))


@trap
def nearest_resize(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    factors = m.constant(np.array([1, 1, 2, 2], np.float32))
    y = m.op(
        "Resize", [y, "", factors], mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    return m.model(end(m, m.conv(end(m, y, 0.07), 4), 0.4))


@trap
def split_in_two(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    extra = {"num_outputs": 2} if m.opset >= 18 else {}
    m.op("Split", [y], ["left", "right"], axis=1, **extra)
    m.channels["left"] = m.channels["right"] = 4
    left, right = end(m, "left", 0.07), end(m, "right", 0.07)
    return m.model(end(m, m.op("Add", [m.conv(left, 4), m.conv(right, 4)]), 0.5))


@trap
def split_of_codes(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.conv(start(m), 8), 0.07, zero_of(m))
    extra = {"num_outputs": 2} if m.opset >= 18 else {}
    m.op("Split", [q], ["left", "right"], axis=1, **extra)
    m.channels["left"] = m.channels["right"] = 4
    left, right = m.dq(m.moved("left", q)), m.dq(m.moved("right", q))
    return m.model(end(m, m.op("Mul", [m.conv(left, 4), right]), 0.5))


@trap
def slice_of_a_quantised_value(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    y = m.op("Slice", [y, *(m.constant(np.array([k], np.int64)) for k in (2, 6, 1))])
    m.channels[y] = 4
    return m.model(end(m, m.conv(end(m, y, 0.07), 4), 0.3))


@trap
def transpose_and_flatten(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 4, stride=2), 0.07)
    y = end(m, m.op("Transpose", [y], perm=[0, 2, 3, 1]), 0.07)
    y = end(m, m.op("Flatten", [y], axis=1), 0.07)
    return m.model(end(m, m.op("Gemm", [y, m.weight((5, 64))], transB=1), 0.3))


@trap
def pool_then_flatten(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.op("GlobalAveragePool", [end(m, m.conv(start(m), 8), 0.07)]), 0.02)
    y = end(m, m.op("Flatten", [y], axis=1), 0.02)
    return m.model(end(m, m.op("Gemm", [y, m.weight((5, 8)), m.bias(5, 0.02)], transB=1), 0.02))


@trap
def if_body_with_codes(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.conv(start(m), 4), 0.07, zero_of(m))
    condition = m.input("flag", (), "bool")
    branches = {
        name: helper.make_graph(
            [
                helper.make_node("DequantizeLinear", [q, *m.parameters[q]], [f"{name}_real"]),
                helper.make_node(op, [f"{name}_real"], [f"{name}_made"]),
                helper.make_node("QuantizeLinear", [f"{name}_made", *m.parameters[q]], [f"{name}_q"]),
            ],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_q", helper.np_dtype_to_tensor_dtype(np.dtype(m.dtype)), None)],
        )
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    m.op("If", [condition], "chosen", then_branch=branches["then"], else_branch=branches["else"])
    m.channels["chosen"] = 4
    return m.model(end(m, m.conv(m.dq(m.moved("chosen", q)), 4), 0.3))


@trap
def if_body_with_floats(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 4), 0.07)
    condition = m.input("flag", (), "bool")
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, [y], [f"{name}_made"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_made", TensorProto.FLOAT, None)],
        )
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    m.op("If", [condition], "chosen", then_branch=branches["then"], else_branch=branches["else"])
    m.channels["chosen"] = 4
    return m.model(end(m, m.conv(end(m, "chosen", 0.05), 4), 0.3))


@trap
def codes_are_outputs(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.conv(start(m), 8), 0.07, zero_of(m))
    last = m.q(m.conv(m.dq(q), 4), 0.4, zero_of(m))
    return m.model(q, last)


@trap
def codes_are_inputs_and_outputs(new: Factory) -> onnx.ModelProto:
    m = new()
    m.input("x", (1, 4, 8, 8), m.dtype)
    x = m.dq("x", 0.025, zero_of(m))
    m.channels[x] = 4
    return m.model(m.q(m.conv(end(m, m.conv(x, 8), 0.07), 4), 0.4, zero_of(m)))


@trap
def inner_dequantised_value_is_an_output_too(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    return m.model(y, end(m, m.conv(y, 4), 0.4))


@trap
def inner_float_value_is_an_output_too(new: Factory) -> onnx.ModelProto:
    m = new()
    c = m.conv(start(m), 8, out="before_q")
    return m.model("before_q", end(m, m.conv(end(m, c, 0.07), 4), 0.4))


@trap
def two_readers(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.conv(start(m), 8), 0.07, zero_of(m))
    return m.model(end(m, m.conv(m.dq(q), 4), 0.4), end(m, m.op("Sigmoid", [m.dq(q)]), 1 / 256, 0.0))


@trap
def one_float_into_two_qs(new: Factory) -> onnx.ModelProto:
    m = new()
    c = m.conv(start(m), 8)
    return m.model(end(m, m.conv(end(m, c, 0.07), 4), 0.4), end(m, m.conv(end(m, c, 0.03, 0.4), 4), 0.2))


@trap
def residual_adds(new: Factory) -> onnx.ModelProto:
    m = new()
    x = start(m)
    for _ in range(3):
        y = end(m, m.op("Relu", [m.conv(x, 8 if x.startswith("x") else 4)]), 0.06, 0.0)
        y = end(m, m.conv(y, 4), 0.2)
        x = end(m, m.op("Add", [x, y]), 0.2)
        m.channels[x] = 4
    return m.model(x)


@trap
def residual_adds_that_share_one_scale(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.input("x", (1, 4, 8, 8)), 0.08, zero_of(m))
    for _ in range(2):
        y = m.q(m.conv(m.dq(q), 4), 0, zero_of(m), like=q)
        y = m.q(m.conv(m.dq(y), 4), 0, zero_of(m), like=q)
        q = m.q(m.op("Add", [m.dq(q), m.dq(y)]), 0, zero_of(m), like=q)
    return m.model(m.dq(q))


@trap
def a_value_added_to_itself(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 4), 0.07)
    return m.model(end(m, m.op("Add", [y, y]), 0.15))


@trap
def swish(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    y = end(m, m.op("Mul", [y, m.op("Sigmoid", [y])]), 0.04, 0.05)
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def swish_with_inner_q(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    y = end(m, m.op("Mul", [y, end(m, m.op("Sigmoid", [y]), 1 / 256, 0.0)]), 0.04, 0.05)
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def concat_of_two_scales(new: Factory) -> onnx.ModelProto:
    m = new()
    x = start(m)
    one, other = end(m, m.conv(x, 4), 0.07), end(m, m.conv(x, 4), 0.05)
    y = m.op("Concat", [one, other], axis=1)
    m.channels[y] = 8
    return m.model(end(m, m.conv(end(m, y, 0.07), 4), 0.4))


@trap
def pools_and_softmax(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.op("AveragePool", [end(m, m.conv(start(m), 8), 0.07)], kernel_shape=[2, 2], strides=[2, 2]), 0.04)
    y = end(m, m.op("LeakyRelu", [y], alpha=0.1), 0.04, 0.2)
    y = end(m, m.op("GlobalAveragePool", [y]), 0.01)
    y = end(m, m.op("Softmax", [end(m, m.op("Flatten", [y], axis=1), 0.01)], axis=1), 1 / 256, 0.0)
    return m.model(y)


@trap
def float_tail(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.op("GlobalAveragePool", [end(m, m.conv(start(m), 8), 0.07)])
    return m.model(m.op("Softmax", [m.op("Flatten", [y], axis=1)], axis=1))


@trap
def float_middle(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.op("Erf", [end(m, m.conv(start(m), 8), 0.07)])
    extra = m.op("ReduceMax", [y], keepdims=1)
    y = m.op("Sub", [y, extra])
    m.channels[y] = 8
    return m.model(end(m, m.conv(end(m, y, 0.01, 0.9), 4), 0.4), extra)


@trap
def one_weight_for_two_convs(new: Factory) -> onnx.ModelProto:
    m = new()
    weight = m.weight((4, 4, 3, 3))
    y = start(m)
    for scale in (0.07, 0.3):
        y = end(m, m.op("Conv", [y, weight], kernel_shape=[3, 3], pads=[1] * 4), scale)
    return m.model(y)


@trap
def depthwise_and_stride(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.op("Relu", [m.conv(start(m), 4, group=4, stride=2, x_scale=0.025)]), 0.03, 0.0)
    return m.model(end(m, m.conv(y, 8, 1, x_scale=0.03), 0.05))


@trap
def reshape_of_codes(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.conv(start(m), 8), 0.07, zero_of(m))
    y = m.op("Reshape", [q, m.constant(np.array([1, 8, 4, 16], np.int64))], "reshaped")
    y = m.op("Transpose", [y], "turned", perm=[0, 1, 3, 2])
    real = m.dq(m.moved(y, q))
    m.channels[real] = 8
    return m.model(end(m, m.conv(real, 4), 0.4))


@trap
def pad_and_conv(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.op("Pad", [start(m), m.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)), m.constant(np.float32(0))])
    m.channels[y] = 4
    return m.model(end(m, m.conv(end(m, y, 0.025), 4), 0.07))


@trap
def transposed_conv(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.op("ConvTranspose", [start(m), m.weight((4, 6, 2, 2), axis=1)], kernel_shape=[2, 2], strides=[2, 2])
    return m.model(end(m, m.op("Relu", [end(m, y, 0.03)]), 0.03, 0.0))


@trap
def relu_between_q_and_dq_pairs(new: Factory) -> onnx.ModelProto:
    """Q-DQ-Relu-Q-DQ: ONNX Runtime drops a Relu that the next Q clips anyway."""
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    y = end(m, m.op("Relu", [y]), 0.07, 0.0)
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def attention_like(new: Factory) -> onnx.ModelProto:
    m = new()
    x = start(m, (1, 6, 8))
    one = end(m, m.op("MatMul", [x, m.weight((8, 8), axis=1)]), 0.1)
    other = end(m, m.op("MatMul", [x, m.weight((8, 8), axis=1)]), 0.1)
    turned = m.op("Transpose", [other], perm=[0, 2, 1])
    scores = end(m, m.op("MatMul", [one, turned]), 0.8)
    shares = end(m, m.op("Softmax", [scores], axis=-1), 1 / 256, 0.0)
    return m.model(end(m, m.op("MatMul", [shares, other]), 0.1))


@trap
def one_float_into_two_equal_qs(new: Factory) -> onnx.ModelProto:
    """Untouched, ORT merges the two equal Qs and fuses; with a scale of their own each, they must not stay apart."""
    m = new()
    c = m.conv(start(m), 8)
    one = m.q(c, 0.07, zero_of(m))
    other = m.q(c, 0, zero_of(m), like=one)
    return m.model(end(m, m.conv(m.dq(one), 4), 0.4), end(m, m.conv(m.dq(other), 4), 0.4))


@trap
def equal_branches(new: Factory) -> onnx.ModelProto:
    """Two branches of equal work, which common subexpression elimination makes one."""
    m = new()
    x, weight = start(m), m.weight((4, 4, 3, 3))
    parts = [m.op("Conv", [x, weight], kernel_shape=[3, 3], pads=[1] * 4) for _ in range(2)]
    first = m.q(parts[0], 0.07, zero_of(m))
    second = m.q(parts[1], 0, zero_of(m), like=first)
    return m.model(end(m, m.op("Add", [m.dq(first), m.dq(second)]), 0.15))


@trap
def input_quantised_twice(new: Factory) -> onnx.ModelProto:
    m = new()
    m.input("x", (1, 4, 8, 8))
    one = m.q("x", 0.025, zero_of(m))
    other = m.q("x", 0, zero_of(m), like=one)
    m.channels[one] = m.channels[other] = 4
    return m.model(end(m, m.op("Add", [m.conv(m.dq(one), 4), m.conv(m.dq(other), 4)]), 0.3))


@trap
def weights_quantised_in_the_graph(new: Factory) -> onnx.ModelProto:
    """Float weights with a Q and a DQ of their own, as quantisation-aware training exports them."""
    m = new()
    real = m.constant(m.rng.normal(0, 0.4, (8, 4, 3, 3)).astype(np.float32))
    weight = m.dq(m.q(real, 0.01, 0, dtype="int8"))
    y = m.op("Conv", [start(m), weight], kernel_shape=[3, 3], pads=[1] * 4)
    m.channels[y] = 8
    return m.model(end(m, m.conv(end(m, y, 0.07), 4), 0.4))


@trap
def float_bias(new: Factory) -> onnx.ModelProto:
    m = new()
    bias = m.constant(m.rng.normal(0, 1, 8).astype(np.float32))
    y = m.op("Conv", [start(m), m.weight((8, 4, 3, 3)), bias], kernel_shape=[3, 3], pads=[1] * 4)
    m.channels[y] = 8
    return m.model(end(m, m.conv(end(m, y, 0.07), 4), 0.4))


@trap
def float_convs_in_channel_blocks(new: Factory) -> onnx.ModelProto:
    """Float Convs of 16 channels, which ENABLE_ALL lays out in blocks (NCHWc), between quantised ones."""
    m = new()
    y = end(m, m.conv(start(m), 16), 0.07)
    for _ in range(2):
        weight = m.constant(m.rng.normal(0, 0.1, (16, 16, 3, 3)).astype(np.float32))
        y = m.op("Relu", [m.op("Conv", [y, weight], kernel_shape=[3, 3], pads=[1] * 4)])
    y = m.op("MaxPool", [y], kernel_shape=[2, 2], strides=[2, 2])
    return m.model(end(m, m.conv(end(m, y, 0.06, 0.0), 4), 0.4))


@trap
def float_model(new: Factory) -> onnx.ModelProto:
    m = new()
    y = m.input("x", (1, 4, 8, 8))
    for channels in (4, 16, 16):
        weight = m.constant(m.rng.normal(0, 0.1, (16, channels, 3, 3)).astype(np.float32))
        y = m.op("Relu", [m.op("Conv", [y, weight], kernel_shape=[3, 3], pads=[1] * 4)])
    y = m.op("Add", [y, m.op("Sigmoid", [y])])
    return m.model(m.op("Softmax", [m.op("Flatten", [m.op("GlobalAveragePool", [y])], axis=1)], axis=1))


@trap
def layer_norm_and_gelu_in_float(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.op("MatMul", [start(m, (1, 6, 16)), m.weight((16, 16), axis=1)]), 0.1)
    mean = m.op("ReduceMean", [y], keepdims=1) if m.opset >= 18 else m.op("ReduceMean", [y], axes=[-1], keepdims=1)
    centred = m.op("Sub", [y, mean])
    y = m.op(
        "Div", [centred, m.op("Sqrt", [m.op("Add", [m.op("Mul", [centred, centred]), m.constant(np.float32(1))])])]
    )
    y = end(m, y, 0.01)
    half = m.op(
        "Mul",
        [m.op("Add", [m.op("Erf", [m.op("Div", [y, m.constant(np.float32(2**0.5))])]), m.constant(np.float32(1))]), y],
    )
    return m.model(end(m, m.op("Mul", [half, m.constant(np.float32(0.5))]), 0.01))


@trap
def integer_activations_of_other_width(new: Factory) -> onnx.ModelProto:
    """16-bit codes inside: contrib Q and DQ below opset 21, standard from there on."""
    m = new()
    kind = "uint16" if m.dtype == "uint8" else "int16"
    y = m.conv(start(m), 8)
    zero = 32768 if kind == "uint16" else 0
    ends = [m.constant(np.float32(0.0003)), m.constant(np.asarray(zero, kind))]
    domain = "" if m.opset >= 21 else "com.microsoft"
    q = m.op("QuantizeLinear", [y, *ends], "wide_q", domain=domain)
    real = m.op("DequantizeLinear", [q, *ends], "wide_real", domain=domain)
    m.channels[real] = 8
    return m.model(end(m, m.conv(real, 4), 0.4), opsets={"com.microsoft": 1})


@trap
def weights_only(new: Factory) -> onnx.ModelProto:
    """Float activations, int8 weights: MatMul becomes MatMulNBits."""
    m = new()
    y = m.op("MatMul", [m.input("x", (1, 6, 32)), m.weight((32, 16), axis=1)])
    return m.model(end(m, m.op("Relu", [y]), 0.1))


@trap
def mixed_signs(new: Factory) -> onnx.ModelProto:
    """Some values uint8 and some int8 in one model."""
    m = new()
    x = start(m)
    m.dtype = "int8" if m.dtype == "uint8" else "uint8"
    y = end(m, m.conv(x, 8), 0.07)
    m.dtype = "int8" if m.dtype == "uint8" else "uint8"
    z = end(m, m.conv(y, 4), 0.3)
    return m.model(end(m, m.op("Add", [x, z]), 0.3))


@trap
def sign_changed_by_requantisation(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    m.dtype = "int8" if m.dtype == "uint8" else "uint8"
    y = end(m, y, 0.07)
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def odd_zero_points(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.05, 0.3)
    y = end(m, m.op("Add", [y, end(m, m.conv(y, 8), 0.3, 0.7)]), 0.31, 0.62)
    return m.model(end(m, m.op("GlobalAveragePool", [y]), 0.05, 0.41))


@trap
def dead_ends(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    m.op("Sigmoid", [y], "nobody_reads_this")
    end(m, m.conv(y, 4), 0.4)
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def identity_and_dropout(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.op("Identity", [m.conv(start(m), 8)]), 0.07)
    y = m.op("Dropout", [m.op("Identity", [y])])
    return m.model(m.op("Identity", [end(m, m.conv(y, 4), 0.4)]))


@trap
def names_like_our_own(new: Factory) -> onnx.ModelProto:
    """Values, scales and nodes that bear the names an observer could want to use itself."""
    m = new()
    x = m.dq(m.q(m.input("eqvs1x", (1, 4, 8, 8)), 0.025, zero_of(m), out="eqvs0x"), out="eqvn0x")
    y = m.dq(m.q(m.conv(x, 8, out="eqvs2x"), 0.07, zero_of(m), out="eqvs2x_fed"), out="eqvs3x")
    return m.model(end(m, m.conv(y, 4, out="eqvs4x"), 0.4))


@trap
def squeeze_and_unsqueeze(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.op("GlobalAveragePool", [end(m, m.conv(start(m), 8), 0.07)]), 0.02)
    axes = m.constant(np.array([2, 3], np.int64))
    y = end(m, m.op("Squeeze", [y, axes]), 0.02)
    y = end(m, m.op("Unsqueeze", [y, axes]), 0.02)
    m.channels[y] = 8
    return m.model(end(m, m.conv(y, 4, 1), 0.05))


@trap
def slices_of_one_value_with_one_scale(new: Factory) -> onnx.ModelProto:
    """Three aliases of one shape and one scale: only their nodes tell them apart."""
    m = new()
    q = m.q(m.conv(start(m), 12), 0.07, zero_of(m))
    parts = []
    for k in range(3):
        bounds = [m.constant(np.array([v], np.int64)) for v in (4 * k, 4 * k + 4, 1)]
        s = m.op("Slice", [m.dq(q), *bounds])
        m.channels[s] = 4
        parts.append(m.dq(m.q(s, 0, zero_of(m), like=q)))
        m.channels[parts[-1]] = 4
    y = m.op("Mul", [m.conv(parts[0], 4), m.op("Add", [parts[1], parts[2]])])
    return m.model(end(m, y, 0.5))


@trap
def gather_and_expand(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.conv(start(m), 8), 0.07)
    y = end(m, m.op("Gather", [y, m.constant(np.array([5, 1, 1, 0], np.int64))], axis=1), 0.07)
    m.channels[y] = 4
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def depth_to_space(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, m.op("DepthToSpace", [end(m, m.conv(start(m), 8), 0.07)], blocksize=2), 0.07)
    m.channels[y] = 2
    return m.model(end(m, m.conv(y, 4), 0.4))


@trap
def relu_between_equal_pairs(new: Factory) -> onnx.ModelProto:
    """Q(zero at least code)-DQ-Relu-Q with equal parameters: the Relu changes nothing and goes."""
    m = new()
    q = m.q(m.conv(start(m), 8), 0.04, zero_of(m, 0.0))
    r = m.q(m.op("Relu", [m.dq(q)]), 0, zero_of(m, 0.0), like=q)
    return m.model(end(m, m.conv(m.dq(r), 4), 0.4))


@trap
def several_pools_of_one_scale(new: Factory) -> onnx.ModelProto:
    m = new()
    q = m.q(m.conv(start(m), 8), 0.07, zero_of(m))
    values = [q]
    for _ in range(3):
        p = m.op("MaxPool", [m.dq(values[-1])], kernel_shape=[3, 3], pads=[1] * 4)
        values.append(m.q(p, 0, zero_of(m), like=q))
    y = m.op("Concat", [m.dq(v) for v in values], axis=1)
    m.channels[y] = 32
    return m.model(end(m, m.conv(m.dq(m.q(y, 0, zero_of(m), like=q)), 4), 0.9))


@trap
def where_and_min(new: Factory) -> onnx.ModelProto:
    m = new()
    one, other = (end(m, m.conv(start(m, name=n), 4), 0.07) for n in ("x", "y"))
    mask = m.input("mask", (1, 4, 8, 8), "bool")
    y = end(m, m.op("Where", [mask, one, other]), 0.07)
    return m.model(end(m, m.op("Min", [y, one]), 0.07))


# ONNX Runtime moves Transposes through Q, DQ and what lies between: a kept node name and a kept scale then lie.
TRANSPOSED: dict[str, Trap] = {}


def transposed(make: Trap) -> Trap:
    TRANSPOSED[make.__name__] = make
    return make


def turned(m: Qdq, real: str, perm: list[int]) -> str:
    made = m.op("Transpose", [real], perm=perm)
    m.channels[made] = 4
    return made


TO_NHWC, TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]


@transposed
def q_between_two_transposes(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, turned(m, m.conv(start(m, (1, 4, 6, 5)), 4), [0, 1, 3, 2]), 0.07)
    return m.model(end(m, m.conv(turned(m, y, [0, 1, 3, 2]), 4), 0.4))


@transposed
def square_q_between_two_transposes(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, turned(m, m.conv(start(m, (1, 4, 4, 4)), 4), [0, 1, 3, 2]), 0.07)
    return m.model(end(m, m.conv(turned(m, y, [0, 1, 3, 2]), 4), 0.4))


@transposed
def leaky_relu_in_nhwc(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, turned(m, m.conv(start(m, (1, 4, 4, 4)), 4), TO_NHWC), 0.07)
    y = end(m, m.op("LeakyRelu", [y], alpha=0.1), 0.05)
    return m.model(end(m, m.conv(turned(m, y, TO_NCHW), 4), 0.4))


@transposed
def add_in_nhwc(new: Factory) -> onnx.ModelProto:
    m = new()
    y = end(m, turned(m, m.conv(start(m, (1, 4, 4, 4)), 4), TO_NHWC), 0.07)
    y = end(m, m.op("Add", [y, y]), 0.14)
    return m.model(end(m, m.conv(turned(m, y, TO_NCHW), 4), 0.8))


@transposed
def concat_in_nhwc(new: Factory) -> onnx.ModelProto:
    m = new()
    x = start(m, (1, 4, 4, 4))
    one, other = (end(m, turned(m, m.conv(x, 4), TO_NHWC), s) for s in (0.07, 0.05))
    y = turned(m, end(m, m.op("Concat", [one, other], axis=3), 0.07), TO_NCHW)
    m.channels[y] = 8
    return m.model(end(m, m.conv(y, 4), 0.8))


@transposed
def requantised_between_transposes(new: Factory) -> onnx.ModelProto:
    m = new()
    x = m.q(m.input("x", (1, 4, 4, 4)), 0.025, zero_of(m))
    y = end(m, turned(m, m.dq(x), [0, 1, 3, 2]), 0.035)
    return m.model(end(m, turned(m, y, [0, 1, 3, 2]), 0.05), y)
