"""TFLite's reference kernels on int8 and uint8 codes, one function an operator, bit for bit, in numpy.

Codes come as int8, uint8 or int32 arrays of any shape and go back as clamped int32; scales are taken as float32, the
form the model stores. What each function is proved on is counted by `tests/vnpu/test_fixed_point_kernels.py` against
ai-edge-litert 2.3's reference resolver: no code differs.

Conv, DepthwiseConv, FullyConnected and BatchMatMul have their output stage in `fixed_point.output_codes`; theirs and
everybody's accumulator is plain integer arithmetic on (code - zero point).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equivcheck.vnpu.fixed_point import (
    Int32,
    code_range,
    output_codes,
    quantize_multiplier,
    requantise,
    round_half_away,
    rounding_divide_by_pot,
)

__all__ = [
    "add_codes",
    "average_pool_codes",
    "concat_codes",
    "dequantise",
    "hard_swish_codes",
    "leaky_relu_codes",
    "logistic_codes",
    "mean_codes",
    "mul_codes",
    "pad_codes",
    "prelu_codes",
    "quantise_float",
    "relu_codes",
    "rescale_codes",
    "resize_bilinear_codes",
    "resize_nearest_codes",
    "sub_codes",
    "tanh_codes",
]

Codes = NDArray[Any]
Unary = Callable[[Int32], Int32]
ADD_LEFT_SHIFT = 20


def add_codes(
    a: Codes, b: Codes, sa: float, za: int, sb: float, zb: int, so: float, zo: int, low: int, high: int
) -> Int32:
    """Sum of a and b, broadcast. TFLite ADD (add.cc, reference/add.h and integer_ops/add.h; int8 and uint8 alike).

    Both inputs are shifted left by 20 and scaled by s / (2 max(sa, sb)), which is at most 1/2; the int32 sum is scaled
    by 2 max(sa, sb) / (2**20 so). Three double-rounded requantisations; those of the inputs depend on the code alone.
    """
    left, right = _aligned(a, b, sa, za, sb, zb)
    return _combined(left + right, sa, sb, so, zo, low, high)


def sub_codes(
    a: Codes, b: Codes, sa: float, za: int, sb: float, zb: int, so: float, zo: int, low: int, high: int
) -> Int32:
    """Difference a - b, broadcast: `add_codes` with the scaled inputs subtracted. TFLite SUB (reference/sub.h)."""
    left, right = _aligned(a, b, sa, za, sb, zb)
    return _combined(left - right, sa, sb, so, zo, low, high)


def _twice_larger(sa: float, sb: float) -> float:
    return 2.0 * max(_wide(sa), _wide(sb))


def _aligned(a: Codes, b: Codes, sa: float, za: int, sb: float, zb: int) -> tuple[Int32, Int32]:
    def scaled(codes: Codes, scale: float, zero: int) -> Int32:
        m, shift = quantize_multiplier(_wide(scale) / _twice_larger(sa, sb))
        return _by_code(codes, lambda every: requantise((every - zero) << ADD_LEFT_SHIFT, m, shift))

    return scaled(a, sa, za), scaled(b, sb, zb)


def _combined(total: Int32, sa: float, sb: float, so: float, zo: int, low: int, high: int) -> Int32:
    m, shift = quantize_multiplier(_twice_larger(sa, sb) / ((1 << ADD_LEFT_SHIFT) * _wide(so)))
    return output_codes(total, m, shift, zo, low, high)


def mul_codes(
    a: Codes, b: Codes, sa: float, za: int, sb: float, zb: int, so: float, zo: int, low: int, high: int
) -> Int32:
    """Product of a and b, broadcast, in one requantisation. TFLite MUL (mul.cc, reference/mul.h, integer_ops/mul.h).

    The multiplier sa * sb / so is computed in float32.
    """
    m, shift = quantize_multiplier(np.float32(sa) * np.float32(sb) / np.float32(so))
    product = np.multiply(a.astype(np.int32) - np.int32(za), b.astype(np.int32) - np.int32(zb))
    return output_codes(product, m, shift, zo, low, high)


def average_pool_codes(total: Codes, count: Codes | int, low: int, high: int) -> Int32:
    """AVERAGE_POOL_2D of equally scaled input and output: total / count, ties away from zero, clamped.

    total: int32 sums of the window's *codes* (zero point not removed); count: elements inside the window and the
    image (padding is not counted), broadcast. TFLite reference `AveragePool` (integer_ops/pooling.h for int8,
    reference/pooling.h for uint8, where no sum is negative and the formula is the same).
    """
    wide = np.asarray(total, np.int64)
    counts = np.asarray(count, np.int64)
    nearest = np.sign(wide) * ((np.abs(wide) + counts // 2) // counts)
    return np.clip(nearest, low, high).astype(np.int32)


def mean_codes(total: Codes, count: int, sx: float, zx: int, so: float, zo: int, low: int, high: int) -> Int32:
    """MEAN over any axes: the sum less count * zx, scaled by sx / (so * count) in one requantisation.

    total: int32 sums of `count` codes. TFLite `QuantizedMeanOrSum` (reference/reduce.h): the multiplier of sx / so is
    divided by count with truncation, after a left shift by floor(log2(count)), so it has as few as 30 good bits.
    """
    m, shift = quantize_multiplier(_wide(sx) / _wide(so))
    left = min(count.bit_length() - 1, 32, 31 + int(shift))
    divided = (int(m) << left) // count
    centred = np.asarray(total, np.int64) - zx * count
    return output_codes(centred, divided, int(shift) - left, zo, low, high)


def rescale_codes(codes: Codes, sx: float, zx: int, so: float, zo: int, low: int, high: int) -> Int32:
    """QUANTIZE from codes to codes (int8 or uint8 to either). TFLite `Requantize` (reference/requantize.h)."""
    m, shift = quantize_multiplier(_wide(sx) / _wide(so))
    return _by_code(codes, lambda every: output_codes(every - zx, m, shift, zo, low, high))


def quantise_float(x: NDArray[np.float32], scale: float, zero: int, low: int, high: int) -> Int32:
    """QUANTIZE from float32: round(x / scale) + zero, the division in float32, ties away from zero.

    TFLite reference `AffineQuantize` (reference/quantize.h). Quotients beyond the int32 range are undefined there
    and saturate here.
    """
    quotient = np.asarray(x, np.float32) / np.float32(scale)
    return np.clip(round_half_away(quotient).astype(np.float64) + zero, low, high).astype(np.int32)


def dequantise(codes: Codes, scale: float, zero: int) -> NDArray[np.float32]:
    """Real values scale * (code - zero) as float32, rounded once. TFLite `Dequantize` (reference/dequantize.h)."""
    return np.asarray((codes.astype(np.int32) - np.int32(zero)).astype(np.float32) * np.float32(scale), np.float32)


def relu_codes(codes: Codes, sx: float, zx: int, so: float, zo: int, low: int, high: int) -> Int32:
    """RELU, RELU6, RELU_N1_TO_1 as operators of their own; `low`, `high` from `activation_range` of the output.

    TFLite `ReluX` (reference/reference_ops.h): the multiplier sx / so is computed in float32.
    """
    m, shift = quantize_multiplier(np.float32(sx) / np.float32(so))
    return _by_code(codes, lambda every: output_codes(every - zx, m, shift, zo, low, high))


def leaky_relu_codes(codes: Codes, alpha: float, sx: float, zx: int, so: float, zo: int, low: int, high: int) -> Int32:
    """LEAKY_RELU: two requantisations, sx / so above the zero point, sx * alpha / so below (both in float32).

    TFLite `QuantizeLeakyRelu` (reference/leaky_relu.h).
    """
    above = quantize_multiplier(np.float32(sx) / np.float32(so))
    below = quantize_multiplier(np.float32(sx) * np.float32(alpha) / np.float32(so))

    def exact(every: Int32) -> Int32:
        centred = every - np.int32(zx)
        scaled = np.where(centred >= 0, requantise(centred, *above), requantise(centred, *below))
        return np.clip(scaled + zo, low, high).astype(np.int32)

    return _by_code(codes, exact)


def prelu_codes(
    codes: Codes, slopes: Codes, sx: float, zx: int, sa: float, za: int, so: float, zo: int, low: int, high: int
) -> Int32:
    """PRELU: as `leaky_relu_codes`, the slope a code of its own that broadcasts against `codes`.

    TFLite `BroadcastPrelu4DSlow` (reference/prelu.h): below the zero point the int32 product of both centred codes is
    scaled by sx * sa / so (float32).
    """
    above = quantize_multiplier(np.float32(sx) / np.float32(so))
    below = quantize_multiplier(np.float32(sx) * np.float32(sa) / np.float32(so))
    centred = codes.astype(np.int32) - np.int32(zx)
    product = np.multiply(centred, slopes.astype(np.int32) - np.int32(za))
    scaled = np.where(centred >= 0, requantise(centred, *above), requantise(product, *below))
    return np.clip(scaled + zo, low, high).astype(np.int32)


def logistic_codes(codes: Codes, sx: float, zx: int, so: float = 1 / 256, zo: int = -128) -> Int32:
    """LOGISTIC through a table of 256 float32 evaluations; TFLite pins the output to 1/256 (zero point -128 or 0).

    TFLite `LUTPopulate` (internal/common.h) in the builtin *and* the reference resolver.
    """
    one = np.float32(1)
    return _table_codes(codes, lambda x: np.asarray(one / (one + _exp(-x)), np.float32), sx, zx, so, zo)


def tanh_codes(codes: Codes, sx: float, zx: int, so: float = 1 / 128, zo: int = 0) -> Int32:
    """TANH through a table of 256 float32 evaluations. TFLite `LUTPopulate` (internal/common.h)."""
    return _table_codes(codes, lambda x: np.tanh(x.astype(np.float64)).astype(np.float32), sx, zx, so, zo)


def _exp(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Correctly rounded, as the C library's `expf` nearly always is; overflow is infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.exp(x.astype(np.float64)).astype(np.float32))


def _table_codes(
    codes: Codes, function: Callable[[NDArray[np.float32]], NDArray[np.float32]], sx: float, zx: int, so: float, zo: int
) -> Int32:
    low, high = code_range(codes.dtype)

    def exact(every: Int32) -> Int32:
        x = np.float32(sx) * (every - np.int32(zx)).astype(np.float32)
        scaled = function(x) * (np.float32(1) / np.float32(so))
        return np.clip(round_half_away(scaled) + zo, low, high).astype(np.int32)

    return _by_code(codes, exact)


def hard_swish_codes(codes: Codes, sx: float, zx: int, so: float, zo: int, low: int, high: int) -> Int32:
    """HARD_SWISH in 16-bit fixed point. TFLite reference `HardSwish` (reference/hard_swish.h).

    x * 2**7 goes two ways: to the output's scale (not yet shifted), and to a relu-ish factor, (x / 3 + 1) / 2 in
    [0, 1] at 15 bits; their product is truncated, then shifted with ties away from zero.
    """
    hires = np.float32(1 / 128) * np.float32(sx)
    out_m, out_exponent = _int16_multiplier(hires / np.float32(so))
    relu_m, relu_exponent = _int16_multiplier(hires / np.float32(3 / 32768))

    def exact(every: Int32) -> Int32:
        x = (every - np.int32(zx)) << 7
        preshift = _high_mul16(x, out_m)
        reluish = _saturate16(x.astype(np.int64) << max(relu_exponent - 1, 0))
        reluish = _high_mul16(reluish, relu_m)
        if relu_exponent > 0:
            reluish = _saturate16(reluish.astype(np.int64) << 1)
        if relu_exponent < 0:
            reluish = rounding_divide_by_pot(reluish, -relu_exponent)
        product = ((reluish + (1 << 15)) >> 1) * preshift
        truncated = np.sign(product) * (np.abs(product) >> 15)
        return np.clip(rounding_divide_by_pot(truncated, -out_exponent) + zo, low, high).astype(np.int32)

    return _by_code(codes, exact)


def _int16_multiplier(real: np.float32) -> tuple[int, int]:
    """TFLite `DownScaleInt32ToInt16Multiplier` after `QuantizeMultiplier`."""
    m, exponent = quantize_multiplier(real)
    return min((int(m) + (1 << 15)) >> 16, 32767), int(exponent)


def _high_mul16(x: Int32, m: int) -> Int32:
    return np.asarray((x * np.int32(m) + (1 << 14)) >> 15, np.int32)


def _saturate16(x: NDArray[np.int64]) -> Int32:
    return np.clip(x, -32768, 32767).astype(np.int32)


def concat_codes(codes: Codes, sx: float, zx: int, so: float, zo: int) -> Int32:
    """One input of a uint8 CONCATENATION whose scale differs from the output's: round(code * (sx / so) + bias) + zo.

    TFLite `ConcatenationWithScaling` (reference/concatenation.h), in float32: sx * (1 / so), and bias -zx times that.
    An int8 CONCATENATION has equal scales by contract and copies.
    """
    if np.float32(sx) == np.float32(so) and zx == zo:
        return codes.astype(np.int32)
    scale = np.float32(sx) * (np.float32(1) / np.float32(so))
    bias = np.float32(-zx) * scale

    def exact(every: Int32) -> Int32:
        real = every.astype(np.float32) * scale + bias
        return np.clip(round_half_away(real) + zo, 0, 255).astype(np.int32)

    return _by_code(codes, exact)


def pad_codes(codes: Codes, pads: list[tuple[int, int]], zero: int) -> Codes:
    """PAD: the border is the zero point. TFLite `Pad` (reference/pad.h); pads: (before, after) for each axis."""
    return np.pad(codes, pads, constant_values=zero)


def resize_bilinear_codes(
    codes: Codes, size: tuple[int, int], axes: tuple[int, int], *, align_corners: bool, half_pixel_centers: bool
) -> Int32:
    """RESIZE_BILINEAR to (height, width) along `axes`; input and output share scale and zero point.

    TFLite `ResizeBilinear` (reference/resize_bilinear.h). int8: weights of 10 bits, ties away from zero; the ratio of
    the sizes is rounded to 1/1024 first, which moves positions by up to half a pixel over a large image. uint8:
    float32 throughout, rounded to nearest. int32 codes are taken as int8.
    """
    if codes.dtype == np.uint8:
        return _bilinear_float(codes, size, axes, align_corners, half_pixel_centers)
    wide = codes.astype(np.int64)
    for axis, length in zip(axes, size, strict=True):
        lower, upper, position = _bilinear_positions(codes.shape[axis], length, align_corners, half_pixel_centers)
        weight = _along(position - (lower << 10), axis, codes.ndim)
        wide = np.take(wide, lower, axis) * ((1 << 10) - weight) + np.take(wide, upper, axis) * weight
    return np.asarray((wide + (1 << 19) - (wide < 0)) >> 20, np.int32)


def _along(values: Codes, axis: int, ndim: int) -> Codes:
    """A vector as an array of `ndim` axes that lies along `axis`."""
    shape = [1] * ndim
    shape[axis] = values.size
    return values.reshape(shape)


def _bilinear_float(
    codes: Codes, size: tuple[int, int], axes: tuple[int, int], align_corners: bool, half_pixel_centers: bool
) -> Int32:
    """The four corners weighted and summed in float32, in the kernel's order."""
    (row, column), real = axes, codes.astype(np.float32)
    places = [
        _float_positions(codes.shape[axis], length, align_corners, half_pixel_centers)
        for axis, length in zip(axes, size, strict=True)
    ]
    (top, bottom, y), (left, right, x) = places
    down, across = (
        _along(y - top.astype(np.float32), row, codes.ndim),
        _along(x - left.astype(np.float32), column, codes.ndim),
    )
    one = np.float32(1)
    upper, lower = np.take(real, top, row), np.take(real, bottom, row)
    mixed = np.take(upper, left, column) * (one - down) * (one - across)
    mixed = mixed + np.take(lower, left, column) * down * (one - across)
    mixed = mixed + np.take(upper, right, column) * (one - down) * across
    mixed = mixed + np.take(lower, right, column) * down * across
    return round_half_away(mixed).astype(np.int32)


def _float_ratio(length_in: int, length_out: int, align_corners: bool) -> np.float32:
    if align_corners and length_out > 1:
        return np.float32(length_in - 1) / np.float32(length_out - 1)
    return np.float32(length_in) / np.float32(length_out)


def _float_positions(
    length_in: int, length_out: int, align_corners: bool, half_pixel_centers: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    half = np.float32(0.5 if half_pixel_centers else 0.0)
    ratio = _float_ratio(length_in, length_out, align_corners)
    position = np.asarray((np.arange(length_out, dtype=np.float32) + half) * ratio - half, np.float32)
    lower = np.maximum(np.floor(position).astype(np.int64), 0)
    upper = np.minimum(np.ceil(position).astype(np.int64), length_in - 1)
    return lower, upper, position


def _bilinear_positions(
    length_in: int, length_out: int, align_corners: bool, half_pixel_centers: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    aligned = align_corners and length_out > 1
    span_in, span_out = (length_in - 1, length_out - 1) if aligned else (length_in, length_out)
    scale = ((span_in << 10) + span_out // 2) // span_out
    position = np.arange(length_out, dtype=np.int64) * scale
    if half_pixel_centers:
        position += scale // 2 - (1 << 9)
    lower = np.maximum(position >> 10, 0)
    upper = np.minimum((position + (1 << 10) - 1) >> 10, length_in - 1)
    return lower, upper, position


def resize_nearest_codes(
    codes: Codes, size: tuple[int, int], axes: tuple[int, int], *, align_corners: bool, half_pixel_centers: bool
) -> Codes:
    """RESIZE_NEAREST_NEIGHBOR to (height, width) along `axes`, positions in float32.

    TFLite `ResizeNearestNeighbor` (reference/resize_nearest_neighbor.h).
    """
    for axis, length in zip(axes, size, strict=True):
        length_in = codes.shape[axis]
        offset = np.float32(0.5 if half_pixel_centers else 0.0)
        position = (np.arange(length, dtype=np.float32) + offset) * _float_ratio(length_in, length, align_corners)
        index = round_half_away(position) if align_corners else np.floor(position)
        codes = np.take(codes, np.clip(index.astype(np.int64), 0, length_in - 1), axis)
    return codes


def _wide(scale: float) -> float:
    return float(np.float32(scale))


def _by_code(codes: Codes, function: Unary) -> Int32:
    """`function` evaluated once for each of the 256 codes, then looked up; int32 codes are evaluated one by one."""
    if codes.dtype.itemsize > 1 or codes.size < 512:
        return function(codes.astype(np.int32))
    low, high = code_range(codes.dtype)
    table = np.roll(function(np.arange(low, high + 1, dtype=np.int32)), low)
    return np.take(table, codes.view(np.uint8))
