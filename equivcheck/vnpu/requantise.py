"""The output stage of an Accumulate op: exact integer sums to codes, as each kind of profile does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.vnpu import fixed_point, rounding
from equivcheck.vnpu.accumulate import EXACT_FLOAT32
from equivcheck.vnpu.ir import Accumulate, Operand
from equivcheck.vnpu.profiles import Profile

Stage = Callable[[Array], Array]
Overflow = Callable[[Array], Array]
# Exporters write s_x * s_w rounded to float32: 2^-24 off. Ten times that is still the same scale.
SAME_SCALE = 1e-6
SMALL = (1 << 22) - 1


def channel_axis(op: Accumulate) -> int:
    return 1 if op.convolves else -1


def channels(op: Accumulate) -> int:
    """How many output channels have parameters of their own (1: all are per tensor)."""
    return max(op.weight_scale.size, op.bias.size if op.bias is not None else 1)


def output_stage(op: Accumulate, profile: Profile, bounds: Array | None) -> Stage:
    """Sums (float32 or float64 integers of at most `bounds`, one a channel) -> codes."""
    limits = rounding.code_bounds(op.clamp, op.out, profile.quantise_precision, profile.quantise_rounding)
    overflow = _overflow(profile, op, bounds)
    if profile.requantise_multiplier == "fixed":
        connected = not op.convolves and not isinstance(op.weight, Operand)
        if (
            connected
            and _is_reference(profile)
            and op.x.codes.bits == 8
            and (bounds is None or bounds.max(initial=0) < 1 << 31)
            and op.slope == 1
        ):
            return _fully_connected(op, profile, limits)
        stage = _Fixed(op, profile, limits, bounds, overflow)
        return stage if op.slope == 1 else _leaky(op, profile, stage, bounds, overflow)
    if profile.requantise_multiplier == "float32":
        return _float32(op, profile, limits, bounds, overflow)
    return _float64(op, profile, limits, overflow)


def product_scale(op: Accumulate) -> Array:
    """s_x * s_w, float64: exact, the factors being float32."""
    return op.x.codes.scale * op.weight_scale


def integer_bias(op: Accumulate, profile: Profile) -> Array | None:
    """The bias in units of s_x * s_w, where the arithmetic knows no other.

    "codes": as they are, whatever the bias' own scale says (ONNX Runtime's QGemm). "rescaled": rounded to that unit where
    the scales differ by more than float32 rounding (what a converter does; ONNX Runtime runs such a Conv in float).
    """
    if op.bias is None:
        return None
    ratio = op.bias_scale / product_scale(op)
    if _bias_rule(op, profile) == "codes" or np.all(np.abs(ratio - 1) < SAME_SCALE):
        return op.bias
    return np.rint(op.bias * ratio).astype(np.int64)


def _bias_rule(op: Accumulate, profile: Profile) -> str:
    return profile.bias_conv if op.convolves else profile.bias_gemm


def _overflow(profile: Profile, op: Accumulate, bounds: Array | None) -> Overflow | None:
    """What the accumulator does to sums beyond its width, applied to the final sum; None where none can reach it.

    A saturating accumulator could saturate on the way and come back; that order is not modelled. Run-time weights: 33,000
    terms of 255 * 255 make 2^31, beyond any layer seen.
    """
    bits = accumulator_bits(op, profile)
    limit = 1 << (bits - 1)
    biggest = _magnitude(op.bias, bounds).max(initial=0) if bounds is not None else 1 << 30
    if biggest < limit or bits >= 63:
        return None
    if profile.accumulator_overflow == "saturate":
        return lambda acc: np.clip(acc, -limit, limit - 1)
    return lambda acc: (acc.astype(np.int64) + limit) % (2 * limit) - limit


def accumulator_bits(op: Accumulate, profile: Profile) -> int:
    return profile.accumulator_wide_bits if op.x.codes.bits > 8 else profile.accumulator_bits


def _magnitude(bias: Array | None, bounds: Array) -> Array:
    return bounds if bias is None else bounds + np.abs(bias)


def _columns(values: Array, part: slice, last: bool) -> Array:
    if values.size == 1:
        return values.reshape(1, 1)
    cut = values.reshape(-1)[part]
    return cut[None, :] if last else cut[:, None]


def _float64(op: Accumulate, profile: Profile, limits: tuple[int, int], overflow: Overflow | None) -> Stage:
    """`exact`: acc * (s_x * s_w), + bias, / s_out; round; + zero point; saturate."""
    round_ = rounding.ROUNDINGS[profile.requantise_rounding]
    scale, count, axis = product_scale(op), channels(op), channel_axis(op)
    bias = real_bias(op, profile)
    inside = None if overflow is None or _bias_rule(op, profile) == "own" else integer_bias(op, profile)
    if inside is not None:  # the accumulator starts at the bias, so it takes part in the overflow
        bias = None
    zero, s_out = op.out.zero, op.out.scale

    def stage(acc: Array) -> Array:
        codes = np.empty(acc.shape, op.out.dtype)
        scratch = np.empty(min(acc.size, 2 * rounding.BLOCK), np.float64)
        for source, target, part, last in rounding.blocks(acc, codes, axis, count):
            real = _view(scratch, source.shape)
            total = source if inside is None else source.astype(np.float64) + _columns(inside, part, last)
            np.copyto(real, overflow(total) if overflow else total)
            real *= _columns(scale, part, last)
            if bias is not None:
                real += _columns(bias, part, last)
            if op.slope != 1:
                np.multiply(real, op.slope, out=real, where=real < 0)
            real /= s_out
            round_(real)
            real += zero
            np.clip(real, limits[0], limits[1], out=real)
            np.copyto(target, real, casting="unsafe")
        return codes

    return stage


def real_bias(op: Accumulate, profile: Profile | None = None) -> Array | None:
    """The bias as a real (float64), by its own scale unless the profile knows no other than s_x * s_w."""
    if op.bias is None:
        return None
    if profile is None or _bias_rule(op, profile) == "own":
        return op.bias * op.bias_scale
    return integer_bias(op, profile) * product_scale(op)


def _float32(
    op: Accumulate, profile: Profile, limits: tuple[int, int], bounds: Array | None, overflow: Overflow | None
) -> Stage:
    """ONNX Runtime (MlasRequantizeOutput): float32(acc + bias) * scale, clamped, half-even, + zero point.

    scale = s_x * s_w / s_out, each step rounded to float32 (ComputeOutputScale in qlinearconv.cc, quant_gemm.cc).
    """
    round_ = rounding.ROUNDINGS[profile.requantise_rounding]
    scale = np.float32(op.x.codes.scale) * op.weight_scale.astype(np.float32) / np.float32(op.out.scale)
    count, axis = channels(op), channel_axis(op)
    bias = integer_bias(op, profile)
    # float32(acc) + float32(bias) is rounded once, as the conversion of the exact int32 sum is, while both are exact
    wide = np.zeros(count, bool) if bias is None else np.broadcast_to(np.abs(bias) >= EXACT_FLOAT32, (count,))
    if overflow is not None:
        wide = wide | (
            _magnitude(bias, bounds) >= 1 << (accumulator_bits(op, profile) - 1) if bounds is not None else True
        )
    low, high = (np.float32(limit - op.out.zero) for limit in limits)
    zero = np.float32(op.out.zero)

    def stage(acc: Array) -> Array:
        codes = np.empty(acc.shape, op.out.dtype)
        scratch = np.empty(min(acc.size, 2 * rounding.BLOCK), np.float32)
        for source, target, part, last in rounding.blocks(acc, codes, axis, count):
            real = _view(scratch, source.shape)
            if source.dtype == np.float32 and not wide[part if wide.size > 1 else slice(None)].any():
                np.add(
                    source, np.float32(0) if bias is None else _columns(bias, part, last).astype(np.float32), out=real
                )
            else:
                total = source.astype(np.float64) + (0 if bias is None else _columns(bias, part, last))
                np.copyto(real, overflow(total) if overflow else total, casting="unsafe")
            real *= _columns(scale, part, last)
            if op.slope != 1:
                np.multiply(real, np.float32(op.slope), out=real, where=real < 0)
            np.clip(real, low, high, out=real)
            round_(real)
            real += zero
            np.copyto(target, real, casting="unsafe")
        return codes

    return stage


def _is_reference(profile: Profile) -> bool:
    return profile.requantise_rounding == "half-up" and profile.requantise_double_rounding


def _fully_connected(op: Accumulate, profile: Profile, limits: tuple[int, int]) -> Stage:
    """LiteRT's FULLY_CONNECTED, the one reference kernel that scales in double (see fixed_point.fully_connected_codes)."""
    scales = op.x.codes.scale, op.weight_scale, op.out.scale
    bias = integer_bias(op, profile)

    def stage(acc: Array) -> Array:
        return fixed_point.fully_connected_codes(acc, *scales, op.out.zero, *limits, bias=bias, dtype=op.out.dtype.type)

    return stage


def _leaky(op: Accumulate, profile: Profile, above: Stage, bounds: Array | None, overflow: Overflow | None) -> Stage:
    """LeakyRelu in the output stage: a second multiplier, slope * s_x * s_w / s_out, where the result is negative."""
    scaled = replace(op, weight_scale=op.weight_scale * op.slope, bias_scale=op.bias_scale * op.slope, slope=1.0)
    below = _Fixed(scaled, profile, (op.out.low, op.out.high), bounds, overflow)

    def stage(acc: Array) -> Array:
        high = above(acc)
        return np.where(high >= op.out.zero, high, below(acc))

    return stage


class _Fixed:
    """TFLite: an integer multiplier (31 bits, unless the profile has fewer) and a shift, rounded as the profile says.

    `reference` is the two roundings of fixed_point.py; `_in_floats` is a faster form of it for channels whose sums stay
    below 2^22 (all channels of 46 and of 52 of the 53 convolutions of two MobileNetV2): 5 ns an element against 8.
    """

    def __init__(
        self, op: Accumulate, profile: Profile, limits: tuple[int, int], bounds: Array | None, overflow: Overflow | None
    ) -> None:
        self.op, self.profile, self.limits = op, profile, limits
        sx, sw, so = np.float32(op.x.codes.scale), op.weight_scale.astype(np.float32), np.float32(op.out.scale)
        in_double = (op.convolves and op.x.codes.signed) or sw.size > 1
        multiplier = fixed_point.conv_multiplier if in_double else fixed_point.product_multiplier
        m, shift = (np.atleast_1d(values) for values in multiplier(sx, sw, so))
        self.m, self.shift = narrowed(m, bits_of(op, profile)), shift
        bias = integer_bias(op, profile)
        self.bias = np.zeros(1, np.int64) if bias is None else bias
        self.reference = _is_reference(profile) and op.x.codes.bits == 8
        fits = bounds is None or int(bounds.max(initial=0)) < 1 << 31
        native = fits and accumulator_bits(op, profile) == 32 and profile.accumulator_overflow == "wrap"
        self.overflow = None if native and self.reference else overflow  # output_codes adds the bias with wrap-around
        small = np.zeros(1, bool) if bounds is None else _magnitude(self.bias, bounds) < SMALL
        self.small = (small & (self.shift <= 0)) if self.reference and self.overflow is None else np.zeros(1, bool)
        self.scale = self.m * 2.0**-31
        self.offset = self.bias * self.scale + 0.5
        self.right = np.exp2(self.shift.astype(np.float64)) * (1 + 2.0**-26)

    def __call__(self, acc: Array) -> Array:
        codes = np.empty(acc.shape, self.op.out.dtype)
        scratch = np.empty(min(acc.size, rounding.BLOCK), np.float64)
        for source, target, part, last in rounding.blocks(acc, codes, channel_axis(self.op), channels(self.op)):
            if (
                self.small.size > 1
                and self.small[part].all()
                and source.dtype == np.float32
                and source.size <= rounding.BLOCK
            ):
                self._in_floats(source, target, part, last, scratch)
            else:
                self._in_integers(source, target, part, last)
        return codes

    def _in_floats(self, acc: Array, codes: Array, part: slice, last: bool, scratch: Array) -> None:
        """Acc * m is below 2^53 and so exact in float64, and half-up is floor(y + 1/2), the half added with the bias.

        Then y is an integer below 2^22 and y / 2^n is off a tie by at least 2^-n, so a factor of 1 + 2^-26 moves nothing
        but ties, away from zero: half-even of the product is half-away of the quotient.
        """
        y = _view(scratch, acc.shape)
        np.copyto(y, acc)
        y *= _columns(self.scale, part, last)
        y += _columns(self.offset, part, last)
        np.floor(y, out=y)
        y *= _columns(self.right, part, last)
        rounding.store(y, codes, self.op.out.zero, *self.limits)

    def _in_integers(self, acc: Array, codes: Array, part: slice, last: bool) -> None:
        m, shift, bias = (_columns(values, part, last) for values in (self.m, self.shift, self.bias))
        zero, (low, high) = self.op.out.zero, self.limits
        if self.reference and self.overflow is None:
            wrapped = bias.astype(np.int32)
            codes[...] = fixed_point.output_codes(acc, m, shift, zero, low, high, bias=wrapped, dtype=codes.dtype.type)
            return
        total = acc.astype(np.int64) + bias
        total = self.overflow(total) if self.overflow is not None else total
        if self.reference:
            codes[...] = fixed_point.output_codes(total, m, shift, zero, low, high, dtype=codes.dtype.type)
        else:
            scaled = _wide_scaled if self.op.x.codes.bits > 8 else _scaled
            codes[...] = np.clip(scaled(total, m, shift, self.profile) + zero, low, high)


def bits_of(op: Accumulate, profile: Profile) -> int:
    """Multiplier bits: at most 15 beside 16-bit activations, whose sums leave no room in 64 (as in TFLite's 16x8)."""
    return min(15, profile.requantise_multiplier_bits) if op.x.codes.bits > 8 else profile.requantise_multiplier_bits


def narrowed(m: Array, bits: int) -> Array:
    """A 31-bit multiplier rounded to `bits`, ties up, and still counted in 2^-31: the low bits are zero.

    The largest stays (TFLite `MultiplyByQuantizedMultiplier` for int64 has it: 0x7FFF), rather than gain a bit.
    """
    drop = 31 - bits
    if drop == 0:
        return m
    kept = np.minimum((m.astype(np.int64) + (1 << drop - 1)) >> drop, (1 << bits) - 1)
    return np.asarray(kept << drop)


def _wide_scaled(acc: Array, m: Array, shift: Array, profile: Profile) -> Array:
    """One rounding of sums beyond 32 bits by a multiplier of 15 bits: the product fits 64 bits."""
    return _shifted(
        acc.astype(np.int64) * (m >> 16), np.maximum(15 - shift.astype(np.int64), 0), profile.requantise_rounding
    )


def _scaled(acc: Array, m: Array, shift: Array, profile: Profile) -> Array:
    """Scale by m * 2**(shift - 31) in int64 with the profile's rounding, once or (double rounding) in two steps."""
    product = acc.astype(np.int64) * m
    right = 31 - shift.astype(np.int64)
    if profile.requantise_double_rounding:
        product = _shifted(product << np.maximum(shift, 0).astype(np.int64), np.int64(31), profile.requantise_rounding)
        right = np.maximum(-shift, 0).astype(np.int64)
    return _shifted(product, right, profile.requantise_rounding)


def _shifted(x: Array, right: Array | np.int64, mode: str) -> Array:
    """Divide by 2**right, an integer again, by `mode`."""
    unit = np.left_shift(np.int64(1), right)
    half = unit >> 1
    if mode == "floor":
        return x >> right
    if mode == "truncate":
        return np.sign(x) * (np.abs(x) >> right)
    if mode == "half-away":
        return np.sign(x) * ((np.abs(x) + half) >> right)
    up = (x + half) >> right
    if mode == "half-even":
        tie = ((x & (unit - 1)) == half) & (half > 0)
        return up - (tie & ((up & 1) == 1))
    return up


def _view(scratch: Array, shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape))
    if size > scratch.size:
        return np.empty(shape, scratch.dtype)
    return scratch[:size].reshape(shape)
