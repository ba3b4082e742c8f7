"""The yardstick's own reading of a step: its real value in float64, and the limit it is held to.

Owes nothing to equivcheck: the ONNX file is read with `onnx`, operators are written out from their definitions
(integers exactly, then float64), and legal_excess.toml is read as the data it is.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

Array = np.ndarray
TABLE = Path(__file__).resolve().parents[2] / "equivcheck" / "legal_excess.toml"
LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
QLINEAR = {
    "QLinearConv": "Conv", "QLinearMatMul": "MatMul", "QGemm": "Gemm", "QLinearAdd": "Add", "QLinearMul": "Mul",
    "QLinearGlobalAveragePool": "GlobalAveragePool", "QLinearAveragePool": "AveragePool",
    "QLinearSigmoid": "Sigmoid", "QLinearLeakyRelu": "LeakyRelu", "QLinearConcat": "Concat", "QLinearSoftmax": "Softmax",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reading:
    """One step measured: |code - clip(real)| - 1/2 of every channel, and the parts of its limit.

    `excess` and `twice` (2^-(k+1), 0 where a single rounding is due) are one a channel; `e` is the table's.
    """

    excess: Array
    twice: Array
    e: float

    @property
    def flat(self) -> float:
        return max(0.0, float(self.excess.max(initial=0.0)))

    @property
    def beyond_twice(self) -> float:
        return float((self.excess - self.twice).max(initial=-1.0))

    @property
    def margin(self) -> float:
        """How far beyond its limit the worst channel is; negative where it is legal."""
        return self.beyond_twice - self.e


class StepOracle:
    """Reads steps of one model, from the stored values some run recorded."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.constants: dict[str, Array] = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
        self.producer: dict[str, onnx.NodeProto] = {}
        for node in proto.graph.node:
            if node.op_type == "Constant":
                self.constants[node.output[0]] = _constant(node)
            self.producer.update({out: node for out in node.output if out})
        self.opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=13)
        rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["op"]
        self.legal = {op: float(row["e"]) for row in rows for op in row["op_types"]}

    def read(self, name: str, values: Mapping[str, Array], declared: Mapping[str, float] | None = None) -> Reading:
        """Measure stored value `name` of a run against its real value on that run's own inputs."""
        codes = values[name]
        real = self.real(name, {n: a for n, a in values.items() if n != name}).reshape(codes.shape)
        limits = np.iinfo(codes.dtype)
        distance = np.abs(codes.astype(np.float64) - np.clip(real, limits.min, limits.max))
        channels = codes.shape[1] if codes.ndim > 1 else 1
        by_channel = (np.moveaxis(distance, 1, 0) if codes.ndim > 1 else distance).reshape(channels, -1).max(axis=1)
        ops, multiplier = self.parts(name, values)
        e = max(max(self.legal.get(op, self.legal["*"]), (declared or {}).get(op, 0.0)) for op in ops)
        twice = np.zeros(channels)
        if multiplier is not None:
            terms = np.array([_twice(m) for m in np.atleast_1d(multiplier)])
            twice = terms if terms.size == channels else np.full(channels, terms.max())
        return Reading(by_channel - 0.5, twice, e)

    # -- the real value ------------------------------------------------------------------------------------------------

    def real(self, name: str, known: Mapping[str, Array]) -> Array:
        """What goes into the Q of `name`, in codes of `name`: not rounded, not clipped, float64."""
        node = self.producer[name]
        memory: dict[str, Array] = {}
        if node.op_type == "QuantizeLinear":
            source = self._value(node.input[0], known, memory)
            scale, zero = self._parameters(node, source.ndim, known, memory)
            return source / scale + zero
        if node.op_type in QLINEAR:
            return self._qlinear(node, known, memory)
        return self._value(name, known, memory)

    def _value(self, name: str, known: Mapping[str, Array], memory: dict[str, Array]) -> Array:
        if name in memory:
            return memory[name]
        if name in self.constants:
            found = self.constants[name]
            return found.astype(np.float64) if found.dtype.kind == "f" else found
        if name in known:
            return known[name].astype(np.float64)
        node = self.producer[name]
        if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            source = np.asarray(self._value(node.input[0], known, memory), np.float64)
            scale, zero = self._parameters(node, source.ndim, known, memory)
            if node.op_type == "DequantizeLinear":
                memory[name] = (source - zero) * scale
            else:
                limits = np.iinfo(self.constants[node.input[2]].dtype)
                memory[name] = np.clip(np.rint(source / scale) + zero, limits.min, limits.max)
            return memory[name]
        inputs = [self._value(i, known, memory) if i else None for i in node.input]
        attributes = {**_attributes(node), "outputs": len(node.output)}
        made = OPERATORS[node.op_type](attributes, self.opset, *inputs)
        made = made if isinstance(made, list) else [made]
        memory.update(zip(node.output, made, strict=False))
        return memory[name]

    def _parameters(
        self, node: onnx.NodeProto, ndim: int, known: Mapping[str, Array], memory: dict[str, Array]
    ) -> tuple[Array, Array]:
        scale = np.asarray(self._value(node.input[1], known, memory), np.float64)
        given = len(node.input) > 2 and node.input[2]
        zero = np.asarray(self._value(node.input[2], known, memory), np.float64) if given else np.zeros(scale.shape)
        return _along(scale, _attributes(node).get("axis", 1), ndim), _along(
            zero, _attributes(node).get("axis", 1), ndim
        )

    def _qlinear(self, node: onnx.NodeProto, known: Mapping[str, Array], memory: dict[str, Array]) -> Array:
        """A QOperator node: codes and their parameters come as inputs of its own."""
        v = [np.asarray(self._value(i, known, memory), np.float64) if i else None for i in node.input]
        attributes, kind = _attributes(node), QLINEAR[node.op_type]
        run = OPERATORS[kind]
        if node.op_type == "QLinearConv":
            x, sx, zx, w, sw, zw, sy, zy = v[:8]
            total = run(attributes, self.opset, x - zx, w - _along(zw, 0, w.ndim))
            if len(v) > 8:
                total = total + _along(v[8], 1, total.ndim)
            return total * _along(sx * sw, 1, total.ndim) / sy + zy
        if node.op_type == "QLinearMatMul":
            a, sa, za, b, sb, zb, sy, zy = v
            return np.matmul(a - za, b - zb) * (sa * sb) / sy + zy
        if node.op_type == "QGemm":
            a, sa, za, b, sb, zb, c, sy, zy = [*v[:6], v[6], v[7], v[8]]
            b = b - _along(zb, 0 if attributes.get("transB") else 1, 2)
            a, b = ((m.T if attributes.get(f"trans{n}") else m) for m, n in ((a - za, "A"), (b, "B")))
            return (np.matmul(a, b) + (0 if c is None else c)) * (sa * sb) * attributes.get("alpha", 1.0) / sy + zy
        if node.op_type in ("QLinearAdd", "QLinearMul"):
            a, sa, za, b, sb, zb, sy, zy = v
            return run(attributes, self.opset, (a - za) * sa, (b - zb) * sb) / sy + zy
        if node.op_type == "QLinearConcat":
            sy, zy, *rest = v
            reals = [(rest[k] - rest[k + 2]) * rest[k + 1] for k in range(0, len(rest), 3)]
            return run(attributes, self.opset, *reals) / sy + zy
        x, sx, zx, sy, zy = v
        return run(attributes, self.opset, (x - zx) * sx) / sy + zy

    # -- the limit -----------------------------------------------------------------------------------------------------

    def row(self, name: str, known: Mapping[str, Array]) -> str:
        """The op_type whose row of the table limits the step: the widest of its ops; "*" where none is listed."""
        ops, _ = self.parts(name, known)
        widest = max(ops, key=lambda op: self.legal.get(op, self.legal["*"]))
        return widest if widest in self.legal else "*"

    def parts(self, name: str, known: Mapping[str, Array]) -> tuple[list[str], Array | None]:
        """(op_types of the step that its limit depends on, s_in * s_w / s_out of its one linear operator or None)."""
        node = self.producer[name]
        if node.op_type in QLINEAR:
            return [QLINEAR[node.op_type]], self._qlinear_multiplier(node)
        ops: list[str] = []
        linear: list[onnx.NodeProto] = []
        stack = [node.input[0]] if node.op_type == "QuantizeLinear" else [name]
        seen: set[str] = set()
        while stack:
            wanted = stack.pop()
            made_by = self.producer.get(wanted)
            if wanted in seen or made_by is None or made_by.op_type in ("Constant", "DequantizeLinear"):
                continue
            if wanted in known and wanted != name:
                continue
            seen.add(wanted)
            ops.append(made_by.op_type)
            linear += [made_by] if made_by.op_type in LINEAR else []
            stack += [i for i in made_by.input if i]
        counted = [op for op in ops if op not in ("Relu", "Clip")] or ops or ["QuantizeLinear"]
        return counted, self._multiplier(node, linear)

    def _multiplier(self, quantise: onnx.NodeProto, linear: list[onnx.NodeProto]) -> Array | None:
        if len(linear) != 1 or quantise.op_type != "QuantizeLinear":
            return None
        scales = []
        for i in linear[0].input[:2]:
            made_by = self.producer.get(i)
            if made_by is None or made_by.op_type != "DequantizeLinear":
                return None
            scales.append(self.constants[made_by.input[1]].astype(np.float64).ravel())
        return scales[0] * scales[1] / self.constants[quantise.input[1]].astype(np.float64).ravel()

    def _qlinear_multiplier(self, node: onnx.NodeProto) -> Array | None:
        at = {"QLinearConv": (1, 4, 6), "QLinearMatMul": (1, 4, 6), "QGemm": (1, 4, 7)}.get(node.op_type)
        if at is None:
            return None
        a, b, out = (self.constants[node.input[k]].astype(np.float64).ravel() for k in at)
        return a * b / out


def _twice(multiplier: float) -> float:
    """2^-(k+1) for multiplier = m * 2^-k with 1/2 <= m < 1 and k >= 1."""
    k = -math.frexp(abs(float(multiplier)))[1]
    return 2.0 ** -(k + 1) if k >= 1 else 0.0


def _constant(node: onnx.NodeProto) -> Array:
    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def _along(values: Array, axis: int, ndim: int) -> Array:
    values = np.asarray(values)
    if values.size == 1:
        return values.reshape(())
    shape = [1] * ndim
    shape[axis] = -1
    return values.reshape(shape)


# -- operators, in float64 ---------------------------------------------------------------------------------------------


def _conv(a: Mapping[str, Any], opset: int, x: Array, w: Array, b: Array | None = None) -> Array:
    rank = w.ndim - 2
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    group = int(a.get("group", 1))
    kernel = w.shape[2:]
    out, padded = _padded(a, x, kernel, strides, dilations, 0.0)
    n, m = x.shape[0], w.shape[0]
    total = np.zeros((n, m, *out))
    per_out, per_in = m // group, w.shape[1]
    for at in product(*(range(k) for k in kernel)):
        cut = _window(padded, at, out, strides, dilations)
        weight = w[(slice(None), slice(None), *at)]
        if per_in == 1 and per_out == 1:
            total += cut * weight.reshape(1, m, *[1] * rank)
            continue
        for g in range(group):
            part = cut[:, g * per_in : (g + 1) * per_in].reshape(n, per_in, -1)
            made = np.matmul(weight[g * per_out : (g + 1) * per_out], part)
            total[:, g * per_out : (g + 1) * per_out] += made.reshape(n, per_out, *out)
    return total if b is None else total + b.reshape(1, -1, *[1] * rank)


def _padded(
    a: Mapping[str, Any], x: Array, kernel: Any, strides: Any, dilations: Any, fill: float
) -> tuple[Any, Array]:
    rank = len(kernel)
    pads = list(a.get("pads", [0] * 2 * rank))
    auto = a.get("auto_pad", "NOTSET")
    out = []
    for k in range(rank):
        reach = dilations[k] * (kernel[k] - 1) + 1
        size = x.shape[2 + k]
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            need = max(0, (-(-size // strides[k]) - 1) * strides[k] + reach - size)
            small = need // 2
            pads[k], pads[k + rank] = (small, need - small) if auto == "SAME_UPPER" else (need - small, small)
        elif auto == "VALID":
            pads[k] = pads[k + rank] = 0
        room = size + pads[k] + pads[k + rank] - reach
        count = room // strides[k] + 1
        if a.get("ceil_mode") and room % strides[k] and count * strides[k] < size + pads[k]:
            count += 1
        out.append(count)
    grown = []
    for k in range(rank):
        last = (out[k] - 1) * strides[k] + dilations[k] * (kernel[k] - 1) + 1
        grown.append((pads[k], max(pads[k + rank], last - x.shape[2 + k] - pads[k])))
    return tuple(out), np.pad(x, [(0, 0), (0, 0), *grown], constant_values=fill)


def _window(x: Array, at: Any, out: Any, strides: Any, dilations: Any) -> Array:
    cut = [slice(None), slice(None)]
    for k, offset in enumerate(at):
        start = offset * dilations[k]
        cut.append(slice(start, start + (out[k] - 1) * strides[k] + 1, strides[k]))
    return x[tuple(cut)]


def _max_pool(a: Mapping[str, Any], opset: int, x: Array) -> Array:
    kernel = a["kernel_shape"]
    strides, dilations = a.get("strides", [1] * len(kernel)), a.get("dilations", [1] * len(kernel))
    out, padded = _padded(a, np.asarray(x, np.float64), kernel, strides, dilations, -np.inf)
    return np.max([_window(padded, at, out, strides, dilations) for at in product(*map(range, kernel))], axis=0)


def _average_pool(a: Mapping[str, Any], opset: int, x: Array) -> Array:
    kernel = a["kernel_shape"]
    strides, dilations = a.get("strides", [1] * len(kernel)), a.get("dilations", [1] * len(kernel))
    out, padded = _padded(a, x, kernel, strides, dilations, 0.0)
    ones = np.ones_like(x)
    if a.get("count_include_pad"):
        pads, rank = a.get("pads", [0] * 2 * len(kernel)), len(kernel)
        ones = np.pad(ones, [(0, 0), (0, 0), *((pads[k], pads[k + rank]) for k in range(rank))], constant_values=1)
        counted = _padded({**a, "pads": [0] * 2 * rank}, ones, kernel, strides, dilations, 0.0)[1]
    else:
        counted = _padded(a, ones, kernel, strides, dilations, 0.0)[1]
    sums = [
        sum(_window(p, at, out, strides, dilations) for at in product(*map(range, kernel))) for p in (padded, counted)
    ]
    return sums[0] / sums[1]


def _gemm(a: Mapping[str, Any], opset: int, x: Array, w: Array, c: Array | None = None) -> Array:
    x, w = (x.T if a.get("transA") else x), (w.T if a.get("transB") else w)
    return a.get("alpha", 1.0) * np.matmul(x, w) + (0 if c is None else a.get("beta", 1.0) * c)


def _reduced(function: Callable[..., Array]) -> Callable[..., Array]:
    def run(a: Mapping[str, Any], opset: int, x: Array, axes: Array | None = None) -> Array:
        chosen = a.get("axes") if axes is None else axes.ravel().tolist()
        return function(x, axis=None if chosen is None else tuple(chosen), keepdims=bool(a.get("keepdims", 1)))

    return run


def _softmax(a: Mapping[str, Any], opset: int, x: Array) -> Array:
    shape = x.shape
    axis = a.get("axis", -1 if opset >= 13 else 1)
    if opset < 13:
        x = x.reshape(int(np.prod(shape[:axis])), -1)
        axis = -1
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return (powers / powers.sum(axis=axis, keepdims=True)).reshape(shape)


def _clip(a: Mapping[str, Any], opset: int, x: Array, low: Any = None, high: Any = None) -> Array:
    low = a.get("min", -np.inf) if low is None else low
    return np.clip(x, low, a.get("max", np.inf) if high is None else high)


def _reshape(a: Mapping[str, Any], opset: int, x: Array, shape: Array) -> Array:
    return x.reshape([x.shape[k] if s == 0 else int(s) for k, s in enumerate(shape.ravel().tolist())])


def _squeeze(a: Mapping[str, Any], opset: int, x: Array, axes: Array | None = None) -> Array:
    chosen = a.get("axes") if axes is None else axes.ravel().tolist()
    return np.squeeze(x, None if chosen is None else tuple(int(c) for c in chosen))


def _unsqueeze(a: Mapping[str, Any], opset: int, x: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(x, tuple(a["axes"] if axes is None else axes.ravel().tolist()))


def _split(a: Mapping[str, Any], opset: int, x: Array, sizes: Array | None = None) -> list[Array]:
    axis = a.get("axis", 0)
    wanted = a.get("split") if sizes is None else sizes.ravel().tolist()
    if wanted is None:
        wanted = [-(-x.shape[axis] // a["outputs"])] * a["outputs"]
    return np.split(x, np.cumsum(wanted)[:-1].astype(int), axis=axis)


def _pad(a: Mapping[str, Any], opset: int, x: Array, pads: Array | None = None, value: Array | None = None) -> Array:
    given = a["pads"] if pads is None else pads.ravel().tolist()
    assert a.get("mode", "constant") == "constant"
    rank = x.ndim
    fill = 0.0 if value is None or not np.size(value) else float(np.ravel(value)[0])
    return np.pad(x, [(int(given[k]), int(given[k + rank])) for k in range(rank)], constant_values=fill)


def _resize(
    a: Mapping[str, Any], opset: int, x: Array, roi: Any = None, scales: Any = None, sizes: Any = None
) -> Array:
    """Nearest, by whole factors: every rounding and coordinate rule agrees there."""
    wanted = sizes.ravel().tolist() if sizes is not None else [int(s * n) for s, n in zip(scales.ravel(), x.shape)]
    assert a.get("mode", "nearest") == "nearest"
    assert all(w % n == 0 for w, n in zip(wanted, x.shape, strict=True))
    for axis, (w, n) in enumerate(zip(wanted, x.shape, strict=True)):
        x = np.repeat(x, int(w // n), axis)
    return x


def _plain(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, opset, *inputs: function(*inputs)


OPERATORS: dict[str, Callable[..., Any]] = {
    "Conv": _conv, "Gemm": _gemm, "MatMul": _plain(np.matmul), "Add": _plain(np.add), "Sub": _plain(np.subtract),
    "Mul": _plain(np.multiply), "Div": _plain(np.divide), "MaxPool": _max_pool, "AveragePool": _average_pool,
    "GlobalAveragePool": lambda a, o, x: x.mean(axis=tuple(range(2, x.ndim)), keepdims=True),
    "ReduceMean": _reduced(np.mean), "ReduceSum": _reduced(np.sum), "Softmax": _softmax, "Clip": _clip,
    "Relu": lambda a, o, x: np.maximum(x, 0), "Sigmoid": lambda a, o, x: 1 / (1 + np.exp(-x)),
    "Tanh": _plain(np.tanh), "Exp": _plain(np.exp), "Sqrt": _plain(np.sqrt),
    "LeakyRelu": lambda a, o, x: np.where(x < 0, a.get("alpha", 0.01) * x, x),
    "HardSigmoid": lambda a, o, x: np.clip(a.get("alpha", 0.2) * x + a.get("beta", 0.5), 0, 1),
    "HardSwish": lambda a, o, x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Reshape": _reshape, "Flatten": lambda a, o, x: x.reshape(int(np.prod(x.shape[: a.get("axis", 1)])), -1),
    "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Transpose": lambda a, o, x: np.transpose(x, a.get("perm")),
    "Concat": lambda a, o, *xs: np.concatenate(xs, axis=a["axis"]), "Split": _split, "Pad": _pad, "Resize": _resize,
    "Identity": _plain(lambda x: x),
}  # fmt: skip
