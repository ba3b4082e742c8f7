"""Rewrites QOperator graphs to QDQ form: every QLinear node becomes DQ(s), its float operator, and a Q.

Stored values keep their names, so whatever is said of the QDQ form holds for the file. Operator definitions: ONNX
operators QLinearConv, QLinearMatMul; ONNX Runtime ContribOperators.md for the com.microsoft ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

MICROSOFT = "com.microsoft"


@dataclass(frozen=True, eq=False)
class QdqForm:
    """A model in QDQ form. `origins[i]` is the index of the file's node that `proto.graph.node[i]` came from."""

    proto: onnx.ModelProto
    origins: tuple[int, ...]


def to_qdq(proto: onnx.ModelProto) -> QdqForm:
    """Return `proto` in QDQ form; the very same object where it holds no QLinear operator."""
    if not any(node.op_type in _LOWERINGS for node in proto.graph.node):
        return QdqForm(proto, tuple(range(len(proto.graph.node))))
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    rewriter = _Rewriter(copy)
    nodes: list[onnx.NodeProto] = []
    origins: list[int] = []
    for index, node in enumerate(proto.graph.node):
        made = rewriter.lower(node)
        nodes += made
        origins += [index] * len(made)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return QdqForm(_at_opset(copy, 13), tuple(origins))


def _at_opset(proto: onnx.ModelProto, least: int) -> onnx.ModelProto:
    """Raise the default opset to `least`: DequantizeLinear knows `axis` from 13 on."""
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version < least:
            converted = onnx.version_converter.convert_version(proto, least)
            if len(converted.graph.node) == len(proto.graph.node):
                return converted
            entry.version = least
    return proto


class _Rewriter:
    """Turns one node at a time; remembers the names it may not use and the constants it adds."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.graph = proto.graph
        self.constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        for node in proto.graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        self.taken = {name for node in proto.graph.node for name in [*node.input, *node.output]} | set(self.constants)
        self.opset = max((e.version for e in proto.opset_import if e.domain in ("", "ai.onnx")), default=13)

    def lower(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        lowering = _LOWERINGS.get(node.op_type)
        made = lowering(self, node) if lowering is not None else None
        return made if made is not None else [node]

    def fresh(self, stem: str) -> str:
        name, k = stem, 1
        while name in self.taken:
            name, k = f"{stem}_{k}", k + 1
        self.taken.add(name)
        return name

    def array(self, name: str) -> np.ndarray | None:
        tensor = self.constants.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def constant(self, array: np.ndarray, stem: str) -> str:
        name = self.fresh(stem)
        tensor = numpy_helper.from_array(array, name)
        self.graph.initializer.append(tensor)
        self.constants[name] = tensor
        return name

    def dequantise(self, codes: str, scale: str, zero: str, axis: int | None = None) -> tuple[str, onnx.NodeProto]:
        """DQ of `codes`; `axis` counts only where the scale is per channel."""
        out = self.fresh(f"{codes}/dequantised")
        per_channel = self.size(scale) != 1
        extra = {"axis": axis} if axis is not None and per_channel else {}
        return out, helper.make_node(
            "DequantizeLinear",
            [codes, scale, zero] if zero else [codes, scale],
            [out],
            name=f"{out}/DequantizeLinear",
            **extra,
        )

    def size(self, name: str) -> int:
        tensor = self.constants.get(name)
        return int(np.prod(tensor.dims)) if tensor is not None else 1

    def operator(
        self,
        node: onnx.NodeProto,
        op_type: str,
        inputs: Sequence[str],
        scale: str,
        zero: str,
        keep: Iterable[str] = (),
        **new: object,
    ) -> list[onnx.NodeProto]:
        """The float operator of `node` (attributes `keep` and `new`), followed by its Q where it has a scale."""
        quantised = bool(scale)
        out = self.fresh(f"{node.output[0]}/real") if quantised else node.output[0]
        made = helper.make_node(op_type, list(inputs), [out], name=node.name or f"{node.output[0]}/{op_type}", **new)
        wanted = set(keep)
        made.attribute.extend(attribute for attribute in node.attribute if attribute.name in wanted)
        if not quantised:
            return [made]
        quantise = helper.make_node(
            "QuantizeLinear",
            [out, scale, zero] if zero else [out, scale],
            [node.output[0]],
            name=f"{node.output[0]}/QuantizeLinear",
        )
        return [made, quantise]


_Lowering = Callable[[_Rewriter, onnx.NodeProto], list[onnx.NodeProto] | None]


def _input(node: onnx.NodeProto, k: int) -> str:
    return node.input[k] if k < len(node.input) else ""


def _attribute(node: onnx.NodeProto, name: str, default: int | float) -> int | float:
    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def _bias(
    rewriter: _Rewriter, bias: str, x_scale: str, w_scale: str, factor: float = 1.0
) -> tuple[str, list[onnx.NodeProto]] | None:
    """DQ of an int32 bias at scale x_scale * w_scale (QLinearConv's definition), kept in float32."""
    x, w = rewriter.array(x_scale), rewriter.array(w_scale)
    if x is None or w is None:
        return None
    product = (x.astype(np.float64).ravel() * w.astype(np.float64).ravel() * factor).astype(np.float32)
    scale = rewriter.constant(product.reshape(()) if product.size == 1 else product, f"{bias}/scale")
    name, node = rewriter.dequantise(bias, scale, "", axis=0)
    return name, [node]


def _conv(rewriter: _Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (_input(node, k) for k in range(8))
    transposed = node.op_type == "QLinearConvTranspose"
    xf, xdq = rewriter.dequantise(x, x_scale, x_zero)
    wf, wdq = rewriter.dequantise(w, w_scale, w_zero, axis=1 if transposed else 0)
    inputs, made = [xf, wf], [xdq, wdq]
    if _input(node, 8):
        bias = _bias(rewriter, node.input[8], x_scale, w_scale)
        if bias is None:
            return None
        inputs.append(bias[0])
        made += bias[1]
    keep = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides", "output_padding", "output_shape")
    return made + rewriter.operator(node, "ConvTranspose" if transposed else "Conv", inputs, y_scale, y_zero, keep)


def _matmul(rewriter: _Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (_input(node, k) for k in range(8))
    af, adq = rewriter.dequantise(a, a_scale, a_zero)
    tensor = rewriter.constants.get(b)
    bf, bdq = rewriter.dequantise(b, b_scale, b_zero, axis=len(tensor.dims) - 1 if tensor is not None else 1)
    return [adq, bdq, *rewriter.operator(node, "MatMul", [af, bf], y_scale, y_zero)]


def _gemm(rewriter: _Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = (_input(node, k) for k in range(9))
    af, adq = rewriter.dequantise(a, a_scale, a_zero)
    bf, bdq = rewriter.dequantise(b, b_scale, b_zero, axis=0 if _attribute(node, "transB", 0) else 1)
    inputs, made = [af, bf], [adq, bdq]
    if c:
        bias = _bias(rewriter, c, a_scale, b_scale, float(_attribute(node, "alpha", 1.0)))
        if bias is None:
            return None
        inputs.append(bias[0])
        made += bias[1]
    return made + rewriter.operator(node, "Gemm", inputs, y_scale, y_zero, ("alpha", "transA", "transB"))


def _binary(op_type: str) -> _Lowering:
    def lower(rewriter: _Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (_input(node, k) for k in range(8))
        af, adq = rewriter.dequantise(a, a_scale, a_zero)
        bf, bdq = rewriter.dequantise(b, b_scale, b_zero)
        return [adq, bdq, *rewriter.operator(node, op_type, [af, bf], y_scale, y_zero)]

    return lower


def _unary(op_type: str, keep: Iterable[str] = ()) -> _Lowering:
    def lower(rewriter: _Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if _attribute(node, "channels_last", 0):
            return None
        x, x_scale, x_zero, y_scale, y_zero = (_input(node, k) for k in range(5))
        xf, xdq = rewriter.dequantise(x, x_scale, x_zero)
        return [xdq, *rewriter.operator(node, op_type, [xf], y_scale, y_zero, keep)]

    return lower


def _softmax(rewriter: _Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    if int(_attribute(node, "opset", rewriter.opset)) < 13 <= rewriter.opset:
        return None  # it softmaxes over all trailing axes, which no opset 13 Softmax does in one node
    return _unary("Softmax", ("axis",))(rewriter, node)


def _reduce_mean(rewriter: _Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    x, x_scale, x_zero, y_scale, y_zero = (_input(node, k) for k in range(5))
    xf, xdq = rewriter.dequantise(x, x_scale, x_zero)
    if rewriter.opset < 18:
        return [xdq, *rewriter.operator(node, "ReduceMean", [xf], y_scale, y_zero, ("axes", "keepdims"))]
    axes = [a for a in node.attribute if a.name == "axes"]
    inputs = [xf, *([rewriter.constant(np.asarray(axes[0].ints, np.int64), f"{node.output[0]}/axes")] if axes else [])]
    return [xdq, *rewriter.operator(node, "ReduceMean", inputs, y_scale, y_zero, ("keepdims",))]


def _concat(rewriter: _Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    inputs, made = [], []
    for k in range(2, len(node.input), 3):
        real, dq = rewriter.dequantise(node.input[k], node.input[k + 1], node.input[k + 2])
        inputs.append(real)
        made.append(dq)
    return made + rewriter.operator(node, "Concat", inputs, node.input[0], node.input[1], ("axis",))


_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_LOWERINGS: dict[str, _Lowering] = {
    "QLinearConv": _conv,
    "QLinearConvTranspose": _conv,
    "QLinearMatMul": _matmul,
    "QGemm": _gemm,
    "QLinearAdd": _binary("Add"),
    "QLinearMul": _binary("Mul"),
    "QLinearConcat": _concat,
    "QLinearGlobalAveragePool": _unary("GlobalAveragePool"),
    "QLinearAveragePool": _unary("AveragePool", _POOL),
    "QLinearSigmoid": _unary("Sigmoid"),
    "QLinearLeakyRelu": _unary("LeakyRelu", ("alpha",)),
    "QLinearSoftmax": _softmax,
    "QLinearReduceMean": _reduce_mean,
}
# The float operator that each quantised twin stands for; a selector for one finds the other.
TWINS = {
    "QLinearConv": "Conv",
    "QLinearConvTranspose": "ConvTranspose",
    "QLinearMatMul": "MatMul",
    "QGemm": "Gemm",
    "QLinearAdd": "Add",
    "QLinearMul": "Mul",
    "QLinearConcat": "Concat",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "QLinearAveragePool": "AveragePool",
    "QLinearSigmoid": "Sigmoid",
    "QLinearLeakyRelu": "LeakyRelu",
    "QLinearSoftmax": "Softmax",
    "QLinearReduceMean": "ReduceMean",
}
