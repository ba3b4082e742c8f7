"""IR operators by TFLite's reference kernels: which of them stands for which ONNX operator, and with which parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.vnpu import fixed_point, islands, real, resize, tflite_kernels, tflite_softmax, windows
from equivcheck.vnpu.ir import Binary, Clamp, Codes, Mean, Pool, Reduce, Resize, Softmax, Table
from equivcheck.vnpu.rounding import code_bounds

Bounds = tuple[int, int]


def binary_table(op: Binary, bounds: Bounds) -> Array:
    """256 x 256 codes by the raw bytes of a and b: ADD, SUB, MUL. TFLite has no integer DIV: float32, half away."""
    a, b = (o.codes.all().astype(np.int32) for o in (op.a, op.b))
    scales = (op.a.codes.scale, op.a.codes.zero, op.b.codes.scale, op.b.codes.zero, op.out.scale, op.out.zero)
    functions = {
        "Add": tflite_kernels.add_codes,
        "Sub": tflite_kernels.sub_codes,
        "Mul": tflite_kernels.mul_codes,
    }
    if op.kind in functions:
        return functions[op.kind](a[:, None], b[None, :], *scales, *bounds).astype(op.out.dtype)
    if op.kind == "PRelu":
        return tflite_kernels.prelu_codes(a[:, None], b[None, :], *scales, *bounds).astype(op.out.dtype)
    if op.kind in ("Max", "Min"):
        first, second = (rescale_table(o.codes, op.out).astype(np.int32) for o in (op.a, op.b))
        made = real.BINARY[op.kind](first[:, None], second[None, :])
        return np.clip(made, *bounds).astype(op.out.dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.divide(_float(op.a.codes)[:, None], _float(op.b.codes)[None, :])
    return _quantised(quotient, op.out, bounds)


def unary_table(op: Table) -> Array:
    """256 codes by the raw byte of the input code. Operators TFLite has no kernel of: float32 table, half away."""
    x, out = op.x.codes, op.out
    codes = x.all().astype(np.int32)
    bounds = (out.low, out.high)
    if op.kind == "QuantizeLinear":
        return rescale_table(x, out)
    if op.kind in ("Relu", "Clip"):  # the island of an infinite argument is the bound itself
        ends = islands.evaluate(op, np.array([-np.inf, np.inf]))
        limits = code_bounds(Clamp(float(ends[0]), float(ends[1])), out, "float32", "half-away")
        return tflite_kernels.relu_codes(codes, x.scale, x.zero, out.scale, out.zero, *limits).astype(out.dtype)
    if op.kind == "LeakyRelu":
        alpha = float(op.nodes[0].attributes.get("alpha", 0.01))
        made = tflite_kernels.leaky_relu_codes(codes, alpha, x.scale, x.zero, out.scale, out.zero, *bounds)
        return made.astype(out.dtype)
    if op.kind == "HardSwish":
        made = tflite_kernels.hard_swish_codes(codes, x.scale, x.zero, out.scale, out.zero, *bounds)
        return made.astype(out.dtype)
    pinned: dict[str, Callable[..., Array]] = {
        "Sigmoid": tflite_kernels.logistic_codes,
        "Tanh": tflite_kernels.tanh_codes,
    }
    if op.kind in pinned:
        narrow, shift = x.all().astype(x.dtype), out.low - x.low  # the kernel knows one kind of codes, its input's
        made = pinned[op.kind](narrow, x.scale, x.zero, out.scale, out.zero - shift)
        return (made.astype(np.int32) + shift).astype(out.dtype)
    return _quantised(islands.evaluate(op, _float(x).astype(np.float64)).astype(np.float32), out, bounds)


def rescale_table(source: Codes, out: Codes) -> Array:
    """256 codes of QUANTIZE from codes to codes."""
    codes = source.all().astype(np.int32)
    made = tflite_kernels.rescale_codes(codes, source.scale, source.zero, out.scale, out.zero, out.low, out.high)
    return made.astype(out.dtype)


def average_pool(op: Pool, codes: Array, bounds: Bounds) -> Array:
    """AVERAGE_POOL_2D; where the output's scale differs, which TFLite does not allow, MEAN's arithmetic over each window.

    Pooling in the input's scale and a QUANTIZE behind it would round twice: up to 0.83 LSB at three times the scale.
    """
    total = windows.summed(op, codes.astype(np.int32) - op.x.codes.zero)
    count = windows.counts(op, codes.shape[2:])
    inside = windows.counts(_uncounted(op), codes.shape[2:])
    if op.x.codes == op.out:
        return tflite_kernels.average_pool_codes(total + inside * op.x.codes.zero, count, *bounds).astype(op.out.dtype)
    x, out = op.x.codes, op.out
    counts = np.broadcast_to(count, total.shape)
    made = np.zeros(total.shape, out.dtype)
    for n in np.unique(counts):
        here = counts == n
        raw = total[here] + int(n) * x.zero
        made[here] = tflite_kernels.mean_codes(raw, int(n), x.scale, x.zero, out.scale, out.zero, *bounds)
    return made


def _uncounted(op: Pool) -> Pool:
    return Pool(op.kind, op.outputs, op.x, op.kernel, op.strides, op.pads, op.dilations, op.ceil_mode, False, op.auto_pad,
                op.clamp, op.out)  # fmt: skip


def mean(op: Mean, codes: Array, bounds: Bounds) -> Array:
    """MEAN, which is also what a GlobalAveragePool becomes on the way to TFLite."""
    axes, count = real.mean_axes(op, codes)
    total = codes.sum(axis=axes, dtype=np.int64, keepdims=op.keepdims)
    x, out = op.x.codes, op.out
    return tflite_kernels.mean_codes(total, count, x.scale, x.zero, out.scale, out.zero, *bounds).astype(out.dtype)


def total(op: Reduce, codes: Array, bounds: Bounds) -> Array:
    """SUM: the centred sum in one requantisation by sx / so (TFLite `QuantizedMeanOrSum`, reference/reduce.h)."""
    axes, count = real.mean_axes(op, codes)
    x, out = op.x.codes, op.out
    centred = codes.sum(axis=axes, dtype=np.int64, keepdims=op.keepdims) - count * x.zero
    m, shift = fixed_point.quantize_multiplier(float(np.float32(x.scale)) / float(np.float32(out.scale)))
    return fixed_point.output_codes(centred, m, shift, out.zero, *bounds, dtype=out.dtype.type)


def resize_linear(op: Resize) -> Callable[[Array], Array] | None:
    """RESIZE_BILINEAR in the input's codes, where ONNX's coordinates are one of its three; None elsewhere."""
    flags = {"align_corners": (True, False), "half_pixel": (False, True), "asymmetric": (False, False)}
    found = flags.get("half_pixel" if op.coordinates == "pytorch_half_pixel" else op.coordinates)
    grown = None if op.factors is None else [(axis, f) for axis, f in zip(op.axes, op.factors, strict=True) if f != 1]
    if op.coordinates == "pytorch_half_pixel" and any(
        size == 1 for axis, size in zip(op.axes, op.sizes or (), strict=False) if axis > 1
    ):
        return None
    if found is None or (grown is not None and any(f != int(f) for _, f in grown)):
        return None  # TFLite takes the ratio of the sizes: the same where a factor is whole

    def run(codes: Array) -> Array:
        sizes = resize.lengths(op, codes.shape)
        axes = [axis for axis, size in sizes.items() if size != codes.shape[axis]] or list(sizes)[-1:]
        first, second = axes if len(axes) > 1 else (axes[0] - 1, axes[0])
        shape = {**dict(enumerate(codes.shape)), **sizes}
        made = tflite_kernels.resize_bilinear_codes(
            codes,
            (shape[first], shape[second]),
            (first, second),
            align_corners=found[0],
            half_pixel_centers=found[1],
        )
        return made.astype(codes.dtype)

    return run


def softmax(op: Softmax, codes: Array) -> Array:
    """SOFTMAX to its pinned output (scale 1/256, lowest code); for any other, SOFTMAX to int16, then QUANTIZE.

    By way of the pinned 8-bit output a probability of 1 is cut off at 255/256 and rounded again: 0.65 LSB beyond
    rounding, which no step may add.
    """
    rows = np.ascontiguousarray(real.softmax_rows(op, codes))
    if op.out == Codes(1 / 256, op.x.codes.low, op.x.codes.signed):
        made = tflite_softmax.softmax_codes(rows, op.x.codes.scale).astype(op.x.codes.dtype)
    else:
        wide = tflite_softmax.softmax_codes(rows, op.x.codes.scale, wide_output=True) - np.iinfo(np.int16).min
        m, shift = fixed_point.quantize_multiplier(2.0**-16 / op.out.scale)
        made = fixed_point.output_codes(wide, m, shift, op.out.zero, op.out.low, op.out.high, dtype=op.out.dtype.type)
    return real.softmax_back(op, made, codes.shape)


def _float(codes: Codes) -> Array:
    return tflite_kernels.dequantise(codes.all(), codes.scale, codes.zero)


def _quantised(values: Array, out: Codes, bounds: Bounds) -> Array:
    made = tflite_kernels.quantise_float(np.nan_to_num(values, posinf=1e9, neginf=-1e9), out.scale, out.zero, *bounds)
    return made.astype(out.dtype)
