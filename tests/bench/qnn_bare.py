"""What Qualcomm's plugin does otherwise than the model, shown with models of one or two operators and nothing of ours.

Each demonstration takes an HTP architecture and returns one line; what is expected is plain numpy in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_qnn
from onnx import helper, numpy_helper

NAME = "bare-qnn"
IN_SCALE, WEIGHT_SCALE, MIDDLE = np.float32(0.02), np.float32(0.01), 128


def session(model: onnx.ModelProto, arch: str) -> ort.InferenceSession:
    """The model on the NPU, as the plugin's documentation has it."""
    if not any(device.ep_name == NAME for device in ort.get_ep_devices()):
        ort.register_execution_provider_library(NAME, onnxruntime_qnn.get_library_path())
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    device = next(device for device in ort.get_ep_devices() if device.ep_name == NAME)
    chosen = {
        "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
        "htp_arch": arch,
        "offload_graph_io_quantization": "1",
    }
    options.add_provider_for_devices([device], chosen)
    return ort.InferenceSession(model.SerializeToString(), options)


def on_npu(made: ort.InferenceSession) -> int:
    """How many nodes the plugin took."""
    return sum(len(g.get_nodes()) for g in made.get_provider_graph_assignment_info() if g.ep_name == NAME)


def q(real: str, scale: str, zero: str, codes: str) -> onnx.NodeProto:
    return helper.make_node("QuantizeLinear", [real, scale, zero], [codes])


def dq(codes: str, scale: str, zero: str, real: str, **more: int) -> onnx.NodeProto:
    return helper.make_node("DequantizeLinear", [codes, scale, *([zero] if zero else [])], [real], **more)


def model_of(
    nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, np.ndarray], constants: Mapping[str, Any]
) -> onnx.ModelProto:
    """The model of `nodes` from inputs like `feeds` to "y", with codes of the same dtype."""
    element = helper.np_dtype_to_tensor_dtype(next(iter(feeds.values())).dtype)
    graph = helper.make_graph(
        list(nodes),
        "bare",
        [helper.make_tensor_value_info(name, element, array.shape) for name, array in feeds.items()],
        [helper.make_tensor_value_info("y", element, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def codes_of(
    nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, np.ndarray], constants: Mapping[str, Any], arch: str
) -> np.ndarray:
    """The codes that the NPU gives. Raises AssertionError where it left a node to the CPU."""
    made = session(model_of(nodes, feeds, constants), arch)
    assert on_npu(made) >= len(nodes), "a node stayed on the CPU: nothing is shown"
    return np.asarray(made.run(None, dict(feeds))[0])


def excess(got: np.ndarray, real: np.ndarray, axis: tuple[int, ...] | None = None) -> Any:
    """How far u8 codes are beyond correct rounding of the real values, in LSB; the greatest, or that along `axis`."""
    return np.max(np.abs(got - np.clip(real, 0, 255)) - 0.5, axis=axis)


def conv_codes(
    x: np.ndarray, weights: np.ndarray, zero: np.ndarray, scale: np.ndarray, bias: np.ndarray, out_scale: Any, arch: str
) -> np.ndarray:
    """A Conv of u8 codes with zero point 128, depthwise where the weights say so, with the bias at s_x * s_w."""
    nodes = [
        dq("x", "x_scale", "middle", "x_real"),
        dq("w", "w_scale", "w_zero", "w_real", axis=0),
        dq("b", "b_scale", "", "b_real", axis=0),
        helper.make_node("Conv", ["x_real", "w_real", "b_real"], ["real"], group=x.shape[1] // weights.shape[1]),
        q("real", "y_scale", "middle", "y"),
    ]
    constants = {
        "w": weights,
        "w_scale": scale,
        "w_zero": zero,
        "b": bias,
        "b_scale": IN_SCALE * scale,
        "x_scale": IN_SCALE,
        "y_scale": np.float32(out_scale),
        "middle": np.uint8(MIDDLE),
    }
    return codes_of(nodes, {"x": x}, constants, arch).astype(np.float64)


def outlier_weight(arch: str) -> str:
    """One u8 weight 151 above its zero point: its whole channel is computed with other weights."""
    random = np.random.default_rng(0)
    weights = random.integers(60, 150, (32, 24, 1, 1)).astype(np.uint8)
    weights[7, 3] = 255
    x = random.integers(0, 256, (1, 24, 16, 16)).astype(np.uint8)
    out_scale = np.float32(0.03)
    got = conv_codes(x, weights, np.uint8(104), WEIGHT_SCALE, np.zeros(32, np.int32), out_scale, arch)

    def by_channel(centred: np.ndarray) -> np.ndarray:
        factor = float(IN_SCALE) * float(WEIGHT_SCALE) / float(out_scale)
        sums = np.einsum("oc,nchw->nohw", centred, x.astype(np.float64) - MIDDLE)
        return np.asarray(excess(got, sums * factor + MIDDLE, (0, 2, 3)))

    centred = weights[:, :, 0, 0].astype(np.float64) - 104
    narrowed = centred.copy()
    narrowed[7] = np.rint(centred[7] * 127 / 151) * 151 / 127
    return (
        f"Conv with u8 weights, one of them 151 above its zero point: its channel {by_channel(centred)[7]:.2f} LSB beyond "
        f"rounding, the others {np.delete(by_channel(centred), 7).max():.2f}; that channel {by_channel(narrowed)[7]:.2f} "
        "against weights rounded to steps of 151 / 127"
    )


def offset_of_a_channel(arch: str) -> str:
    """A depthwise Conv whose sums are of the same order as its codes: the mean deviation of each channel."""
    random = np.random.default_rng(3)
    channels = 64
    weights = np.clip(np.rint(random.normal(0, 18, (channels, 1, 3, 3))), -127, 127).astype(np.int8)
    bias = random.integers(-700, 701, channels).astype(np.int32)
    x = random.integers(0, 256, (1, channels, 34, 34)).astype(np.uint8)
    scale, out_scale = np.full(channels, WEIGHT_SCALE), np.float32(float(IN_SCALE) * float(WEIGHT_SCALE) / 0.12)
    got = conv_codes(x, weights, np.zeros(channels, np.int8), scale, bias, out_scale, arch)[0]
    windows = np.lib.stride_tricks.sliding_window_view(x[0].astype(np.float64) - MIDDLE, (3, 3), (1, 2))
    sums = np.einsum("chwij,cij->chw", windows, weights[:, 0].astype(np.float64)) + bias[:, None, None]
    real = sums * (float(WEIGHT_SCALE) * float(IN_SCALE) / float(out_scale)) + MIDDLE
    inside = (real > 0) & (real < 255)
    means = np.array([(got - real)[c][inside[c]].mean() for c in range(channels) if inside[c].sum() > 300])
    return (
        f"depthwise Conv, s_x * s_w / s_out = 0.12: mean deviation of its channels {means.min():+.2f} to {means.max():+.2f} "
        f"LSB (more than 300 unsaturated elements each), {np.abs(got - real)[inside].max() - 0.5:.2f} beyond rounding"
    )


def bias_near_the_end(arch: str) -> str:
    """A depthwise Conv with one channel that is nearly dead, whose bias quantisers write near the end of int32."""
    random = np.random.default_rng(1)
    weights = random.integers(-127, 128, (8, 1, 3, 3)).astype(np.int8)
    scale, bias, out_scale = np.full(8, WEIGHT_SCALE), np.zeros(8, np.int32), np.float32(0.05)
    scale[3], bias[3] = 2.5e-8, 2_147_268_827
    x = random.integers(0, 256, (1, 8, 8, 8)).astype(np.uint8)
    got = conv_codes(x, weights, np.zeros(8, np.int8), scale, bias, out_scale, arch)[0, 3]
    real = float(bias[3]) * float(scale[3]) * float(IN_SCALE) / float(out_scale) + MIDDLE
    return f"depthwise Conv, a channel with bias {bias[3]}: real value {real:.2f} all over, codes {np.unique(got).tolist()}"


def pad_of_s8(arch: str) -> str:
    """A Pad of s8 values with zero point -128: the border must be the code of zero, -128."""
    nodes = [
        dq("x", "scale", "zero", "real"),
        helper.make_node("Pad", ["real", "pads"], ["padded"]),
        q("padded", "scale", "zero", "y"),
    ]
    constants = {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "scale": IN_SCALE, "zero": np.int8(-128)}
    got = codes_of(nodes, {"x": np.full((1, 4, 6, 6), 5, np.int8)}, constants, arch)[0, 0]
    return (
        f"Pad of s8, zero point -128: border {np.unique(got[0]).tolist()}, inside {np.unique(got[1:-1, 1:-1]).tolist()}"
    )


def product_then_div(arch: str) -> str:
    """A product in codes, divided by 6 into a scale six times finer (hard swish): is the product rounded in between?"""
    random = np.random.default_rng(2)
    x, gate = (random.integers(20, 140, (1, 8, 16, 16)).astype(np.uint8) for _ in range(2))
    scale, product_scale, zero = np.float32(0.05), np.float32(0.2), 30
    nodes = [
        dq("x", "scale", "zero", "x_real"),
        dq("gate", "scale", "zero", "gate_real"),
        helper.make_node("Mul", ["x_real", "gate_real"], ["product"]),
        q("product", "product_scale", "zero", "codes"),
        dq("codes", "product_scale", "zero", "product_real"),
        helper.make_node("Div", ["product_real", "six"], ["divided"]),
        q("divided", "y_scale", "zero", "y"),
    ]
    constants = {
        "scale": scale,
        "product_scale": product_scale,
        "y_scale": product_scale / np.float32(6),
        "zero": np.uint8(zero),
        "six": np.float32(6),
    }
    got = codes_of(nodes, {"x": x, "gate": gate}, constants, arch).astype(np.float64)
    product = (x.astype(np.float64) - zero) * (gate.astype(np.float64) - zero)
    real = product * float(scale) ** 2 / float(product_scale) + zero
    return (
        f"Mul, then Div by 6: {excess(got, np.rint(real)):.3f} LSB beyond rounding with the product rounded in between, as the "
        f"model has it; {excess(got, real):.3f} without"
    )


def softmax_with_a_tail(arch: str) -> str:
    """Softmax over 1001 s8 logits like those of a classifier: a few above a long tail."""
    codes = np.clip(np.random.default_rng(3).normal(-53, 16, (1, 1001)), -128, 127).astype(np.int8)
    codes[0, :4] = 113, 83, 65, 23
    scale = np.float32(0.0634)
    nodes = [
        dq("x", "scale", "zero", "real"),
        helper.make_node("Softmax", ["real"], ["shares"], axis=-1),
        q("shares", "y_scale", "y_zero", "y"),
    ]
    constants = {"scale": scale, "zero": np.int8(-53), "y_scale": np.float32(1 / 256), "y_zero": np.int8(-128)}
    got = codes_of(nodes, {"x": codes}, constants, arch)
    powers = np.exp((codes.astype(np.float64) - 113) * float(scale))
    real, without = (256 * powers[0, 0] / total - 128 for total in (powers.sum(), powers[0, :4].sum()))
    return f"Softmax of 1001: the greatest is {got[0, 0]}, real value {real:.2f} ({without:.2f} without the tail)"


def div_by_a_float(arch: str) -> str:
    """A Div by a float constant, as quantisers leave it, alone and in front of another operator."""
    div = [dq("x", "scale", "zero", "real"), helper.make_node("Div", ["real", "six"], ["divided"])]
    pool = [
        q("divided", "scale", "zero", "codes"),
        dq("codes", "scale", "zero", "codes_real"),
        helper.make_node("GlobalAveragePool", ["codes_real"], ["pooled"]),
    ]
    constants = {"scale": IN_SCALE, "zero": np.uint8(MIDDLE), "six": np.float32(6)}

    def tried(nodes: Sequence[onnx.NodeProto]) -> str:
        x = np.zeros((1, 8, 8, 8), np.uint8)
        try:
            return f"{on_npu(session(model_of(nodes, {'x': x}, constants), arch))} nodes on the NPU"
        except Exception as error:  # onnxruntime raises its own
            return f"refused: {str(error).splitlines()[0][:130]}"

    alone, followed = (
        tried([*div, q("divided", "scale", "zero", "y")]),
        tried([*div, *pool, q("pooled", "scale", "zero", "y")]),
    )
    return f"Div by a float constant: {alone}; GlobalAveragePool behind it: {followed}"


DEMONSTRATIONS: tuple[Callable[[str], str], ...] = (
    outlier_weight,
    offset_of_a_channel,
    bias_near_the_end,
    pad_of_s8,
    product_then_div,
    softmax_with_a_tail,
    div_by_a_float,
)
