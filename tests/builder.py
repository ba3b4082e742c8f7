"""Writes small quantised ONNX models for tests, node by node, and remembers how every value is quantised.

>>> m = Qdq(dtype="int8", seed=3)
>>> x = m.q(m.input("x", (1, 3, 8, 8)), 0.02)
>>> y = m.q(m.conv(m.dq(x), 4), 0.05)
>>> proto = m.model(m.dq(y))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Where = Literal["initializer", "constant", "value_float"]
Fill = Callable[[np.random.Generator, tuple[int, ...]], Array]
IR_VERSION = 8


@dataclass(frozen=True)
class Codes:
    """How codes of a value stand for reals: real = scale * (code - zero). `scale` is as stored (float32)."""

    scale: np.float32
    zero: int
    dtype: str


class Qdq:
    """A model in the making. Every method that adds a node returns the name of the value it makes.

    `dtype` is that of the activations' codes, `weights` that of the weights'. With `unnamed` no node has a name.
    """

    def __init__(
        self,
        *,
        dtype: str = "uint8",
        weights: str = "int8",
        opset: int = 17,
        per_channel: bool = False,
        seed: int = 0,
        unnamed: bool = False,
        ir_version: int = IR_VERSION,
    ) -> None:
        self.dtype = dtype
        self.weights = weights
        self.opset = opset
        self.per_channel = per_channel
        self.rng = np.random.default_rng(seed)
        self.unnamed = unnamed
        self.ir_version = ir_version
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.ports: list[onnx.ValueInfoProto] = []
        self.codes: dict[str, Codes] = {}
        self.parameters: dict[str, list[str]] = {}
        self.channels: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    # -- what a graph is made of ---------------------------------------------------------------------------------------

    def fresh(self, stem: str) -> str:
        """Return `stem`, or `stem_2`, `stem_3` ... when it is taken."""
        count = self._taken[stem] = self._taken.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}_{count}"

    def input(self, name: str, shape: Sequence[int | str], dtype: str = "float32") -> str:
        """Declare a graph input."""
        self._taken[name] = 1
        element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self.ports.append(helper.make_tensor_value_info(name, element, list(shape)))
        if len(shape) > 1 and isinstance(shape[1], int):
            self.channels[name] = shape[1]
        return name

    def constant(self, array: Any, stem: str = "constant", where: Where = "initializer") -> str:
        """Store an array as an initializer, or as a Constant node."""
        name = self.fresh(stem)
        if where == "initializer":
            self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        elif where == "constant":
            tensor = numpy_helper.from_array(np.asarray(array))
            self.nodes.append(helper.make_node("Constant", [], [name], name=self._node_name(name), value=tensor))
        else:
            self.nodes.append(
                helper.make_node("Constant", [], [name], name=self._node_name(name), value_float=float(array))
            )
        return name

    def op(
        self,
        op_type: str,
        inputs: Sequence[str],
        out: str | Sequence[str] | None = None,
        *,
        name: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add any node; return the name of its first output. `out` names the output(s)."""
        outs = [self.fresh(op_type.lower())] if out is None else [out] if isinstance(out, str) else list(out)
        label = self._node_name(name or f"{op_type}_{outs[0]}")
        self.nodes.append(helper.make_node(op_type, list(inputs), outs, name=label, domain=domain, **attributes))
        for made in outs:
            self.channels.setdefault(made, self.channels.get(inputs[0], 0) if inputs else 0)
        return outs[0]

    def _node_name(self, name: str) -> str:
        return "" if self.unnamed else name

    # -- quantisation --------------------------------------------------------------------------------------------------

    def q(
        self,
        real: str,
        scale: float,
        zero: int | None = None,
        *,
        out: str | None = None,
        dtype: str | None = None,
        where: Where = "initializer",
        like: str | None = None,
    ) -> str:
        """QuantizeLinear. `zero=None` leaves the zero point out (uint8, 0); `like` shares the scale of another value."""
        name = out or self.fresh(f"{real}_q")
        kind = (dtype or self.dtype) if zero is not None else "uint8"
        if like is not None:
            self.parameters[name], self.codes[name] = self.parameters[like], self.codes[like]
        else:
            made = [self.constant(np.float32(scale), f"{name}_scale", where)]
            if zero is not None:
                made.append(self.constant(np.asarray(zero, kind), f"{name}_zero"))
            self.parameters[name] = made
            self.codes[name] = Codes(np.float32(scale), zero or 0, kind)
        return self.op("QuantizeLinear", [real, *self.parameters[name]], name)

    def dq(self, coded: str, scale: float | None = None, zero: int | None = None, *, out: str | None = None) -> str:
        """DequantizeLinear with the parameters the codes were made with, or with others (`scale`, `zero`)."""
        name = out or self.fresh(f"{coded}_real")
        parameters = self.parameters.get(coded, [])
        if scale is not None:
            kind = self.codes[coded].dtype if coded in self.codes else self.dtype
            parameters = [
                self.constant(np.float32(scale), f"{name}_scale"),
                self.constant(np.asarray(zero or 0, kind), f"{name}_zero"),
            ]
        return self.op("DequantizeLinear", [coded, *parameters], name)

    def moved(self, coded: str, source: str) -> str:
        """Say that `coded`, made by moving codes, has the parameters of `source`; return it."""
        self.parameters[coded], self.codes[coded] = self.parameters[source], self.codes[source]
        return coded

    def qdq(self, real: str, scale: float, zero: int = 0) -> str:
        """Q and DQ in a row; the DQ's output."""
        return self.dq(self.q(real, scale, zero))

    def weight(
        self,
        shape: Sequence[int],
        scale: float = 0.01,
        *,
        axis: int = 0,
        stem: str = "weight",
        codes: Array | None = None,
    ) -> str:
        """DQ of random constant codes over the whole symmetric range; per channel along `axis` if the model is."""
        dtype = np.dtype(self.weights)
        limits = np.iinfo(dtype)
        if codes is None:
            codes = self.rng.integers(limits.min + 1, limits.max + 1, tuple(shape)).astype(dtype)
        zero = 128 if dtype == np.uint8 else 0
        name = self.constant(codes, stem)
        if not self.per_channel:
            scales, zeros, extra = np.float32(scale), np.asarray(zero, dtype), {}
        else:
            spread = 1 + np.arange(shape[axis]) % 5 / 4
            scales, zeros, extra = (
                (scale * spread).astype(np.float32),
                np.full(shape[axis], zero, dtype),
                {"axis": axis},
            )
        return self.op(
            "DequantizeLinear",
            [name, self.constant(scales, f"{name}_scale"), self.constant(zeros, f"{name}_zero")],
            f"{name}_real",
            **extra,
        )

    def bias(self, size: int, x_scale: float, w_scale: float = 0.01, spread: int = 3000) -> str:
        """DQ of int32 codes at scale x_scale * w_scale (per channel if the model is)."""
        codes = self.rng.integers(-spread, spread + 1, size).astype(np.int32)
        name = self.constant(codes, "bias")
        scales: Any = np.float32(np.float32(x_scale) * np.float32(w_scale))
        extra: dict[str, int] = {}
        if self.per_channel:
            channel = (w_scale * (1 + np.arange(size) % 5 / 4)).astype(np.float32)
            scales, extra = (np.float32(x_scale) * channel).astype(np.float32), {"axis": 0}
        return self.op("DequantizeLinear", [name, self.constant(scales, f"{name}_scale")], f"{name}_real", **extra)

    # -- operators with weights ----------------------------------------------------------------------------------------

    def conv(
        self,
        real: str,
        out_channels: int,
        kernel: int = 3,
        *,
        group: int = 1,
        stride: int = 1,
        x_scale: float | None = None,
        out: str | None = None,
        w_scale: float = 0.01,
    ) -> str:
        """A 'same' Conv of a dequantised value; with an int32 bias where `x_scale` is given."""
        weight = self.weight((out_channels, self.channels[real] // group, kernel, kernel), w_scale)
        inputs = [real, weight] if x_scale is None else [real, weight, self.bias(out_channels, x_scale, w_scale)]
        made = self.op(
            "Conv", inputs, out, kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4, strides=[stride] * 2, group=group
        )
        self.channels[made] = out_channels
        return made

    # -- done ----------------------------------------------------------------------------------------------------------

    def model(self, *outputs: str, opsets: Mapping[str, int] | None = None) -> onnx.ModelProto:
        """The finished model; its outputs' types come from shape inference where it knows them."""
        graph = helper.make_graph(
            self.nodes, "small", self.ports, [onnx.ValueInfoProto(name=name) for name in outputs], self.initializers
        )
        made = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(d, v) for d, v in {"": self.opset, **(opsets or {})}.items()],
            ir_version=self.ir_version if self.opset < 20 else max(self.ir_version, 10),
        )
        inferred = {v.name: v for v in onnx.shape_inference.infer_shapes(made, data_prop=True).graph.output}
        for port in made.graph.output:
            port.CopyFrom(inferred[port.name])
        return made


def feeds(proto: onnx.ModelProto, seed: int = 0, spread: float = 1.0) -> dict[str, Array]:
    """Seeded feeds for every input of `proto`: normal floats, codes over the whole range, true for bool."""
    rng = np.random.default_rng(seed)
    constants = {tensor.name for tensor in proto.graph.initializer}
    made: dict[str, Array] = {}
    for port in proto.graph.input:
        if port.name in constants:
            continue
        shape = tuple(d.dim_value or 1 for d in port.type.tensor_type.shape.dim)
        dtype = helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
        if dtype == np.bool_:
            made[port.name] = np.ones(shape, bool)
        elif dtype.kind in "iu":
            limits = np.iinfo(dtype)
            made[port.name] = rng.integers(limits.min, int(limits.max) + 1, shape).astype(dtype)
        else:
            made[port.name] = (rng.normal(0, spread, shape)).astype(dtype)
    return made


def code_spread(codes: Array) -> int:
    """How many different codes an array holds: a value that is all saturated tests nothing."""
    return int(np.unique(codes).size)


FLOAT = TensorProto.FLOAT
