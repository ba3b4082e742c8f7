"""TFLite's reference SOFTMAX on int8 and uint8 codes: gemmlowp's fixed-point exponential and reciprocal, in numpy.

`Qi.f` is a signed 32-bit number with i integer and f fractional bits. Products of two such numbers go through
`saturating_rounding_doubling_high_mul`, which adds the integer bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equivcheck.vnpu.fixed_point import (
    Int32,
    code_range,
    quantize_multiplier,
    rounding_divide_by_pot,
)
from equivcheck.vnpu.fixed_point import saturating_rounding_doubling_high_mul as high_mul

__all__ = ["softmax_codes"]

DIFF_INTEGER_BITS = 5  # differences are Q5.26: kScaledDiffIntegerBits
SUM_INTEGER_BITS = 12  # sums of exponentials are Q12.19: kAccumulationIntegerBits
INT32_MAX = (1 << 31) - 1

EXP_MINUS_EIGHTH = round(np.exp(-1 / 8) * 2**31)
THIRD = round(2**31 / 3)
EXP_MINUS_POWERS = [(e, round(np.exp(-(2.0**e)) * 2**31)) for e in range(-2, DIFF_INTEGER_BITS)]
FORTY_EIGHT_SEVENTEENTHS = round(48 / 17 * 2**29)
MINUS_THIRTY_TWO_SEVENTEENTHS = round(-32 / 17 * 2**29)


def softmax_codes(codes: NDArray[Any], sx: float, beta: float = 1.0, *, wide_output: bool = False) -> Int32:
    """SOFTMAX over the last axis; the output has scale 1/256 and zero point -128 (int8) or 0 (uint8).

    `wide_output`: int16 codes of scale 1/65536 and zero point -32768, as its int8 to int16 form has them.

    codes: int8 or uint8, any shape; the input's zero point cancels. TFLite `Softmax` (reference/softmax.h), with
    gemmlowp `exp_on_negative_values` and `one_over_one_plus_x_for_x_in_0_1` (fixedpoint.h).

    Where a row's exponentials sum to 512 or more (a thousand classes at a small scale), the kernel of
    ai-edge-litert 2.3 aborts the process (it asserts a final shift of at most 31); here every code of such a row is 0
    above the lowest, which is also the nearest code.
    """
    low, high = code_range(np.int16 if wide_output else codes.dtype)
    wide = codes.astype(np.int32)
    below = wide.max(axis=-1, keepdims=True) - wide
    exponentials = _exponential_table(sx, beta)[below]
    sums = rounding_divide_by_pot(exponentials, SUM_INTEGER_BITS).sum(axis=-1, keepdims=True, dtype=np.int32)
    reciprocals, over_unit = _reciprocal(sums)
    scaled = rounding_divide_by_pot(high_mul(reciprocals, exponentials), over_unit + 31 - (16 if wide_output else 8))
    return np.clip(scaled + low, low, high).astype(np.int32)


def _exponential_table(sx: float, beta: float) -> Int32:
    """exp(-d * beta * sx) as Q0.31 for the 256 differences d below the row's greatest code.

    TFLite `PreprocessSoftmaxScaling`, `CalculateInputRadius` (quantization_util.cc): differences whose Q5.26 form
    would overflow count as nothing.
    """
    real = float(np.float32(beta)) * float(np.float32(sx)) * 2.0 ** (31 - DIFF_INTEGER_BITS)
    m, shift = quantize_multiplier(min(real, float(INT32_MAX)))
    radius = ((1 << DIFF_INTEGER_BITS) - 1) * 2.0 ** (31 - DIFF_INTEGER_BITS - int(shift))
    differences = np.arange(256, dtype=np.int64)
    within = differences <= np.floor(radius)
    shifted = np.where(within, -differences, 0) << int(shift)
    return np.where(within, _exp_on_negative_values(high_mul(shifted, m)), 0).astype(np.int32)


def _exp_on_negative_values(a: Int32) -> Int32:
    """exp(a) as Q0.31 for a <= 0 in Q5.26: a polynomial on [-1/4, 0), then one factor for each binary digit."""
    quarter = 1 << (29 - DIFF_INTEGER_BITS)
    remainder_of_quarter = (a & (quarter - 1)) - quarter
    result = _exp_on_last_quarter(remainder_of_quarter << DIFF_INTEGER_BITS)
    digits = remainder_of_quarter - a
    for exponent, factor in EXP_MINUS_POWERS:
        bit = 1 << (31 - DIFF_INTEGER_BITS + exponent)
        result = np.where(digits & bit, high_mul(result, factor), result)
    return np.where(a == 0, INT32_MAX, result).astype(np.int32)


def _exp_on_last_quarter(a: Int32) -> Int32:
    """exp(a) for a in [-1/4, 0) in Q0.31: the Taylor polynomial of degree 4 around -1/8."""
    x = a + (1 << 28)
    x2 = high_mul(x, x)
    x3 = high_mul(x2, x)
    quarter_x4 = rounding_divide_by_pot(high_mul(x2, x2), 2)
    tail = rounding_divide_by_pot(high_mul(quarter_x4 + x3, THIRD) + x2, 1)
    return np.asarray(EXP_MINUS_EIGHTH + high_mul(EXP_MINUS_EIGHTH, x + tail), np.int32)


def _reciprocal(sums: Int32) -> tuple[Int32, Int32]:
    """1 / sums (Q12.19) as Q0.31 and the power of two it is to be divided by. TFLite `GetReciprocal` (common.h)."""
    headroom = 32 - np.frexp(sums.astype(np.float64))[1]
    fraction = (sums.astype(np.int64) << headroom) - (1 << 31)
    return _one_over_one_plus(fraction), (SUM_INTEGER_BITS - headroom).astype(np.int32)


def _one_over_one_plus(a: NDArray[np.int64]) -> Int32:
    """1 / (1 + a) for a in [0, 1] in Q0.31: three Newton-Raphson steps in Q2.29 from 48/17 - 32/17 d."""
    half_denominator = (a + INT32_MAX + 1) >> 1
    x = FORTY_EIGHT_SEVENTEENTHS + high_mul(half_denominator, MINUS_THIRTY_TWO_SEVENTEENTHS)
    for _ in range(3):
        one_minus = (1 << 29) - high_mul(half_denominator, x)
        x = x + _saturating_left(high_mul(x, one_minus), 2)
    return _saturating_left(x, 1)


def _saturating_left(x: Int32, bits: int) -> Int32:
    return np.clip(x.astype(np.int64) << bits, -(1 << 31), INT32_MAX).astype(np.int32)
