"""TFLite's 31-bit fixed-point arithmetic, bit for bit, in numpy.

TFLite's *reference* kernels (and Arm's NPUs, whose TOSA lowering is defined by them) scale an int32 accumulator by
`m * 2**(shift - 31)` and round **twice**: first to the nearest int32 with ties towards plus infinity (gemmlowp
`SaturatingRoundingDoublingHighMul`), then, if `shift` is negative, by a power of two with ties away from zero
(gemmlowp `RoundingDivideByPOT`). Measured on ai-edge-litert 2.3, reference resolver: every integer kernel is built
with this double rounding (`TFLITE_SINGLE_ROUNDING` off), except FULLY_CONNECTED, which scales in double instead
(`fully_connected_codes`); see `tests/vnpu/test_fixed_point.py`.

Notation of this package: `s*` scales (float32 as stored in the model), `z*` zero points, `low`, `high` the inclusive
range of the output codes. Everything is layout-free: per-channel parameters broadcast against the codes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Activation",
    "activation_range",
    "code_range",
    "conv_multiplier",
    "fully_connected_codes",
    "output_codes",
    "product_multiplier",
    "quantize_multiplier",
    "requantise",
    "round_half_away",
    "rounding_divide_by_pot",
    "saturating_rounding_doubling_high_mul",
]

Array = NDArray[Any]
Int32 = NDArray[np.int32]
Activation = Literal["none", "relu", "relu6", "relu_n1_to_1"]

BLOCK = 1 << 15
"""Elements handled at once: the 16 bytes of scratch an element takes stay in a 1 MiB level-2 cache."""

HIGH_WORD = 1 if sys.byteorder == "little" else 0


def quantize_multiplier(real: ArrayLike) -> tuple[Int32, Int32]:
    """The multiplier and shift with `real` = m * 2**(shift - 31), both of `real`'s shape.

    TFLite `QuantizeMultiplier` (quantization_util.cc): `frexp`, mantissa rounded half away from zero to 31 bits, a
    mantissa that rounds up to 2**31 halved again, and anything whose shift falls below -31 (about 2**-32) flushed to 0.

    real: float64, any shape, normally positive (a negative LeakyRelu slope is legal).
    """
    mantissa, exponent = np.frexp(np.asarray(real, np.float64))
    m = round_half_away(mantissa * 2.0**31).astype(np.int64)
    overflowed = m == 1 << 31
    m = np.where(overflowed, m // 2, m)
    shift = exponent.astype(np.int32) + overflowed
    vanished = shift < -31
    return np.where(vanished, 0, m).astype(np.int32), np.where(vanished, 0, shift).astype(np.int32)


def round_half_away(x: Array) -> Array:
    """The nearest integer, ties away from zero, in x's own float dtype. TFLite `TfLiteRound`, C++ `std::round`.

    `trunc(x + 0.5)` is not it: in float32 the addition lifts 0.49999997 to 1.
    """
    whole = np.trunc(x)
    return np.asarray(whole + np.copysign(np.abs(x - whole) >= 0.5, x, dtype=whole.dtype), whole.dtype)


def saturating_rounding_doubling_high_mul(a: ArrayLike, b: ArrayLike) -> Int32:
    """round(a * b / 2**31), ties towards plus infinity; INT32_MIN squared saturates (gemmlowp, same name).

    a, b: int32, broadcast against each other. gemmlowp writes it as a truncating division with a nudge that depends
    on the sign; that equals the floor of (a * b + 2**30) / 2**31 for both signs.
    """
    product = np.asarray(a, np.int64) * np.asarray(b, np.int64)
    return np.asarray(np.minimum((product + (1 << 30)) >> 31, (1 << 31) - 1), np.int32)


def rounding_divide_by_pot(x: ArrayLike, exponent: ArrayLike) -> Int32:
    """round(x / 2**exponent), ties away from zero (gemmlowp `RoundingDivideByPOT`).

    x: int32; exponent: integers 0 to 31, broadcast against x.
    """
    wide = np.asarray(x, np.int64)
    power = np.asarray(exponent, np.int64)
    half = (np.int64(1) << power) >> 1
    return np.asarray((wide + half - ((wide < 0) & (half > 0))) >> power, np.int32)


def requantise(acc: Array, m: ArrayLike, shift: ArrayLike) -> Int32:
    """`acc` scaled by m * 2**(shift - 31) with TFLite's two roundings: unclamped, without zero point, of `acc`'s shape.

    TFLite `MultiplyByQuantizedMultiplier(int32, int32, int)` (internal/common.cc, double-rounding branch); a positive
    shift is applied to the accumulator first and wraps as int32 does there.

    acc: int32 (or int64, float32, float64 holding integers of the int32 range); m, shift: from `quantize_multiplier`,
    scalars or arrays that broadcast against acc, e.g. (C, 1, 1) for NCHW, (C,) for NHWC.
    """
    out = np.empty(np.shape(acc), np.int32)
    _run(np.asarray(acc), out, _Stage.of(m, shift))
    return out


def output_codes(
    acc: Array,
    m: ArrayLike,
    shift: ArrayLike,
    zero: int,
    low: int,
    high: int,
    *,
    bias: ArrayLike | None = None,
    dtype: type[np.generic] = np.int32,
) -> Array:
    """The output stage of Conv, DepthwiseConv and BatchMatMul: clamp(requantise(acc + bias) + zero).

    TFLite reference `ConvPerChannel`, `DepthwiseConvPerChannel`, `BatchMatMul` (integer_ops/conv.h,
    integer_ops/depthwise_conv.h, batch_matmul.h) and the uint8 `Conv` and `DepthwiseConv` (conv.h,
    depthwiseconv_uint8.h). Measured exact over the whole int32 range, overflowing left shifts included.

    acc, m, shift: as for `requantise`; bias: int32, broadcasts like m, added with int32 wrap-around; zero: the
    output's zero point; low, high: from `activation_range`; dtype: of the result (int8 saves the caller a pass).
    """
    out = np.empty(np.shape(acc), dtype)
    _run(np.asarray(acc), out, _Stage.of(m, shift, bias=bias, zero=zero, low=low, high=high))
    return out


def conv_multiplier(sx: ArrayLike, sw: ArrayLike, so: ArrayLike) -> tuple[Int32, Int32]:
    """Multiplier and shift of an int8 Conv or DepthwiseConv, of `sw`'s shape: sx * sw / so in double.

    TFLite `PopulateConvolutionQuantizationParams` (kernel_util.cc): the three float32 scales are widened first.
    """
    return quantize_multiplier(_double(sx) * _double(sw) / _double(so))


def product_multiplier(sx: ArrayLike, sw: ArrayLike, so: ArrayLike) -> tuple[Int32, Int32]:
    """Multiplier and shift of a uint8 Conv or DepthwiseConv and of BatchMatMul: the product in *float32*.

    TFLite `GetQuantizedConvolutionMultipler` (kernel_util.cc): float32(sx * sw) widened, then divided by so in double.
    It differs from `conv_multiplier` in the last bits of m, which moves about one code in 10**6.
    """
    product = np.asarray(sx, np.float32) * np.asarray(sw, np.float32)
    return quantize_multiplier(_double(product) / _double(so))


def fully_connected_codes(
    acc: Array,
    sx: ArrayLike,
    sw: ArrayLike,
    so: ArrayLike,
    zero: int,
    low: int,
    high: int,
    *,
    bias: ArrayLike | None = None,
    dtype: type[np.generic] = np.int32,
) -> Array:
    """The output stage of FullyConnected: clamp(round((acc + bias) * (sx * sw / so)) + zero), in double, half away.

    Measured on ai-edge-litert 2.3, int8 and uint8, per tensor and per channel: no multiplier of 31 bits is involved
    (2.6 million accumulators each, ties and the ends of int32 included: no difference). The older published header,
    integer_ops/fully_connected.h, shows the fixed-point form, `output_codes`, which is one code off in 0.08 %. A
    result beyond int32 becomes INT32_MIN, as the x86 conversion has it, and the zero point is added with wrap-around.

    acc: as for `requantise`, (..., units); sw: scalar or (units,); the rest as for `output_codes`.
    """
    total = np.asarray(acc).astype(np.int64)
    if bias is not None:
        total = (total + np.asarray(bias, np.int64)).astype(np.int32)
    real = round_half_away(total * (_double(sx) * _double(sw) / _double(so)))
    converted = np.where(np.abs(real) < 2.0**31, real, -(2.0**31)).astype(np.int32)
    return np.asarray(np.clip(converted + np.int32(zero), low, high).astype(dtype))


def code_range(dtype: np.dtype[Any] | type[np.generic]) -> tuple[int, int]:
    """The lowest and highest code of an integer dtype: (-128, 127) for int8, (0, 255) for uint8."""
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def activation_range(
    activation: Activation, scale: float, zero: int, dtype: np.dtype[Any] | type[np.generic]
) -> tuple[int, int]:
    """The lowest and highest output code under a fused activation, for an output of `scale` and `zero`.

    TFLite `CalculateActivationRangeQuantized` (kernel_util.cc): the bounds are zero + round(bound / scale), the
    division in float32, ties away from zero, kept within the dtype.
    """
    low, high = code_range(dtype)
    bounds = {"none": (None, None), "relu": (0.0, None), "relu6": (0.0, 6.0), "relu_n1_to_1": (-1.0, 1.0)}
    floor, ceiling = bounds[activation]
    if floor is not None:
        low = max(low, zero + _round_to_int(floor, scale))
    if ceiling is not None:
        high = min(high, zero + _round_to_int(ceiling, scale))
    return low, high


def _round_to_int(value: float, scale: float) -> int:
    return int(round_half_away(np.asarray(np.float32(value) / np.float32(scale))))


def _double(scale: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(scale, np.float32).astype(np.float64)


@dataclass(frozen=True)
class _Stage:
    """Parameters of one requantisation: arrays that broadcast against the accumulator, None where they do nothing."""

    m2: Array  # int64: twice the multiplier, so that the first rounded product is the high word
    left: Array | None
    half_right: Array | None  # the right shift less one; at least 0
    unshifted: Array | None  # where the right shift is 0, although it is not everywhere
    bias: Array | None
    zero: int
    low: int | None
    high: int | None

    @classmethod
    def of(
        cls,
        m: ArrayLike,
        shift: ArrayLike,
        *,
        bias: ArrayLike | None = None,
        zero: int = 0,
        low: int | None = None,
        high: int | None = None,
    ) -> _Stage:
        shifts = np.asarray(shift, np.int32)
        right = np.maximum(-shifts, 0).astype(np.int32)
        return cls(
            m2=np.asarray(m, np.int64) * 2,
            left=np.maximum(shifts, 0).astype(np.int32) if np.any(shifts > 0) else None,
            half_right=np.maximum(right - 1, 0).astype(np.int32) if np.any(right > 0) else None,
            unshifted=right == 0 if np.any(right > 0) and np.any(right == 0) else None,
            bias=None if bias is None else np.asarray(bias, np.int32),
            zero=int(zero),
            low=low,
            high=high,
        )

    def arrays(self) -> dict[str, Array]:
        named = {name: getattr(self, name) for name in ("m2", "left", "half_right", "unshifted", "bias")}
        return {name: array for name, array in named.items() if array is not None}


@dataclass(frozen=True)
class _Scratch:
    wide: NDArray[np.int64]
    narrow: Int32
    sign: Int32

    @classmethod
    def of(cls, size: int) -> _Scratch:
        return cls(np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32))

    def shaped(self, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], Int32, Int32, Int32]:
        """Views of `shape`: the wide products, their high words, the narrow values and their signs."""
        size = int(np.prod(shape))
        high_words = self.wide[:size].view(np.int32)[HIGH_WORD::2]
        return (
            self.wide[:size].reshape(shape),
            high_words.reshape(shape),
            self.narrow[:size].reshape(shape),
            self.sign[:size].reshape(shape),
        )


def _run(acc: Array, out: Array, stage: _Stage) -> None:
    """Fill `out` block by block; contiguous accumulators are read in place."""
    if acc.size == 0:
        return
    before, channels, after = _frame(acc.shape, [array.shape for array in stage.arrays().values()])
    flat = {name: np.broadcast_to(a, acc.shape) if before == after == 1 else a for name, a in stage.arrays().items()}
    columns = {name: np.ascontiguousarray(a).reshape(-1) for name, a in flat.items()}
    source, target = acc.reshape(before, channels, after), out.reshape(before, channels, after)
    scratch = _Scratch.of(min(BLOCK + channels, acc.size) if after == 1 else min(BLOCK, acc.size))
    blocks = _rows(source, target, columns) if after == 1 else _planes(source, target, columns)
    for acc_block, out_block, parameters in blocks:
        _requantise_block(acc_block, out_block, parameters, stage, scratch)


def _frame(shape: tuple[int, ...], parameter_shapes: list[tuple[int, ...]]) -> tuple[int, int, int]:
    """The accumulator seen as (before, channels, after), the parameters varying along the middle only.

    Parameters that vary along several axes make every element a channel.
    """
    padded = [(1,) * (len(shape) - len(p)) + p for p in parameter_shapes]
    varying = [axis for axis in range(len(shape)) if any(p[axis] > 1 for p in padded)]
    if not varying:
        return 1, 1, int(np.prod(shape))
    if len(varying) > 1:
        return 1, int(np.prod(shape)), 1
    axis = varying[0]
    return int(np.prod(shape[:axis])), shape[axis], int(np.prod(shape[axis + 1 :]))


Block = tuple[Array, Array, dict[str, Array]]


def _rows(source: Array, target: Array, columns: dict[str, Array]) -> Iterator[Block]:
    """Channels last: runs of whole rows, the parameters tiled once so that every pass is one-dimensional."""
    before, channels, _ = source.shape
    rows = min(before, max(1, BLOCK // channels))
    if channels > BLOCK:
        for row in range(before):
            for start in range(0, channels, BLOCK):
                part = slice(start, start + BLOCK)
                yield source[row, part, 0], target[row, part, 0], _cut(columns, part)
        return
    tiles = {name: np.tile(a, rows) if a.size > 1 else a for name, a in columns.items()}
    flat_source, flat_target = source.reshape(-1), target.reshape(-1)
    for start in range(0, flat_source.size, rows * channels):
        run = slice(start, start + rows * channels)
        yield flat_source[run], flat_target[run], _cut(tiles, slice(0, flat_source[run].size))


def _planes(source: Array, target: Array, columns: dict[str, Array]) -> Iterator[Block]:
    """Channels first, or one channel: runs of channels, long planes cut as well."""
    before, channels, after = source.shape
    width, depth = min(after, BLOCK), max(1, BLOCK // after)
    upright = {name: a.reshape(-1, 1) for name, a in columns.items()}
    for index in range(before):
        for channel in range(0, channels, depth):
            part = slice(channel, channel + depth)
            parameters = _cut(upright, part)
            for start in range(0, after, width):
                run = slice(start, start + width)
                yield source[index, part, run], target[index, part, run], parameters


def _cut(columns: dict[str, Array], part: slice) -> dict[str, Array]:
    return {name: a[part] if a.size > 1 else a for name, a in columns.items()}


def _requantise_block(acc: Array, out: Array, p: dict[str, Array], stage: _Stage, scratch: _Scratch) -> None:
    """One cache-sized block. Half away from zero without overflow: (((y - (y < 0)) >> (n - 1)) + 1) >> 1."""
    wide, high_words, y, sign = scratch.shaped(acc.shape)
    if "bias" in p:
        np.add(acc, p["bias"], out=y, casting="unsafe", dtype=np.int32)
    else:
        np.copyto(y, acc, casting="unsafe")
    if "left" in p:
        y <<= p["left"]
    np.multiply(y, p["m2"], out=wide)
    wide += 1 << 31
    np.copyto(y, high_words)
    if "half_right" in p:
        np.right_shift(y, 31, out=sign)
        y += sign
        y >>= p["half_right"]
        y += 1
        y >>= 1
        if "unshifted" in p:
            np.copyto(y, high_words, where=p["unshifted"])
    if stage.zero:
        y += np.int32(stage.zero)
    if stage.low is not None and stage.high is not None:
        np.clip(y, np.int32(stage.low), np.int32(stage.high), out=y)
    np.copyto(out, y, casting="unsafe")
