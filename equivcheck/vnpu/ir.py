"""The integer IR: one frozen dataclass a kind of operator, independent of ONNX and of the profile.

Arithmetic is said once, in reals: a code `c` of an operand stands for `scale * (c - zero)`, scales being the exact
values of the stored float32. A profile (profiles.py) decides how the same operator is requantised, rounded, looked up.
Codes have 8 or 16 bits; 4-bit weights are widened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from equivcheck.models.graph import Array, Node


@dataclass(frozen=True, slots=True)
class Codes:
    """Per-tensor quantisation of 8- or 16-bit codes: real = scale * (code - zero)."""

    scale: float
    zero: int
    signed: bool
    bits: int = 8

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"{'int' if self.signed else 'uint'}{self.bits}")

    @property
    def low(self) -> int:
        return -(1 << self.bits - 1) if self.signed else 0

    @property
    def high(self) -> int:
        return (1 << self.bits - 1) - 1 if self.signed else (1 << self.bits) - 1

    def all(self) -> Array:
        """All codes (256 or 65,536), int64, in the order of their raw bits: entry `k` is the code whose bits are `k`."""
        return np.arange(1 << self.bits, dtype=f"uint{self.bits}").view(self.dtype).astype(np.int64)


def raw(codes: Array) -> Array:
    """The bits of codes as unsigned numbers: what tables over `Codes.all()` are indexed by."""
    contiguous = np.asarray(codes, order="C")
    return contiguous.view(f"uint{8 * codes.dtype.itemsize}")


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A quantised input: the stored value `name`, or `constant` codes held by the model (then `name` is "")."""

    name: str
    codes: Codes
    constant: Array | None = None


@dataclass(frozen=True, slots=True)
class Clamp:
    """What follows the operator before its Q: real bounds (Relu: 0 to inf). Q is monotone, so they become code bounds."""

    low: float = -np.inf
    high: float = np.inf

    @property
    def idle(self) -> bool:
        return self.low == -np.inf and self.high == np.inf


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """What all operators have: `kind` is the ONNX op_type the proofs table is keyed by; `outputs` are stored values."""

    kind: str
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Accumulate(Op):
    """Conv, ConvTranspose, Gemm, MatMul: sum of (x - zx) * (w - zw), + bias, clamped.

    `weight` is an operand (MatMul of two activations) or constant codes of the ONNX layout ((K, N) for products), then
    int64 with its zero point taken off. `weight_scale` is float64, 0-d or one an output channel; `bias` int64, one an
    output channel, with its own `bias_scale` (float64, likewise). `slope` multiplies negative results (LeakyRelu).
    """

    x: Operand
    weight: Array | Operand
    weight_scale: Array
    bias: Array | None
    bias_scale: Array
    attributes: Mapping[str, Any]
    clamp: Clamp
    out: Codes
    slope: float = 1.0

    @property
    def convolves(self) -> bool:
        return self.kind in ("Conv", "ConvTranspose")


@dataclass(frozen=True, slots=True, eq=False)
class Binary(Op):
    """Add, Sub, Mul, Div, Max, Min and PRelu (b is the slope) of two quantised operands, numpy broadcasting, clamped."""

    a: Operand
    b: Operand
    clamp: Clamp
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Pool(Op):
    """AveragePool and MaxPool over windows. `pads` are (begins..., ends...) as ONNX has them."""

    x: Operand
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    ceil_mode: bool
    count_include_pad: bool
    auto_pad: str
    clamp: Clamp
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Mean(Op):
    """GlobalAveragePool and ReduceMean: over `axes`, or over all behind the channel (None)."""

    x: Operand
    axes: tuple[int, ...] | None
    keepdims: bool
    clamp: Clamp
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Reduce(Op):
    """ReduceSum, ReduceMax, ReduceMin and GlobalMaxPool, over `axes` as for Mean."""

    x: Operand
    axes: tuple[int, ...] | None
    keepdims: bool
    clamp: Clamp
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Resize(Op):
    """Resize, "nearest" or "linear", along `axes` to `sizes` of them, or by `factors`.

    `coordinates` and `nearest` are ONNX's coordinate_transformation_mode and nearest_mode. `roi` (starts..., ends...) and
    `outside`, the real beyond the image, belong to tf_crop_and_resize.
    """

    x: Operand
    mode: str
    coordinates: str
    nearest: str
    axes: tuple[int, ...]
    sizes: tuple[int, ...] | None
    factors: tuple[float, ...] | None
    roi: tuple[float, ...] | None
    outside: float
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Table(Op):
    """Any function of one quantised value alone, element by element: 256 entries (65,536 of 16-bit codes).

    `nodes` are the float operators between DQ and Q in order (none: a requantisation); `feed` names the DQ outputs that
    stand for x, `result` the float that is quantised, `constants` what else they read.
    """

    x: Operand
    nodes: tuple[Node, ...]
    feed: tuple[str, ...]
    result: str
    constants: Mapping[str, Array]
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Softmax(Op):
    """Softmax along `axis`; below opset 13 (`flat`) over all axes from there on, taken as one."""

    x: Operand
    axis: int
    flat: bool
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Move(Op):
    """Reshape, Transpose, Concat ...: codes change place, and are requantised where scales differ.

    `out` has one entry an output, None for moves on codes (their outputs are quantised as their input). `constants` are
    the constant inputs by position (shape, axes, starts ...).
    """

    inputs: tuple[Operand, ...]
    attributes: Mapping[str, Any]
    constants: Mapping[int, Array]
    out: tuple[Codes | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Island(Op):
    """Float operators between DQs and one Q that no other operator covers (LogSoftmax, LpNormalization, Pool + Add ...).

    `sources` are the quantised operands by the float names they are read under; the rest as for Table.
    """

    sources: Mapping[str, Operand]
    nodes: tuple[Node, ...]
    result: str
    constants: Mapping[str, Array]
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Chain(Op):
    """Operators in a row within one step, the later ones data movement or MaxPool (or the earlier ones, on stored codes).

    Such a step has one Q, behind its last node. A Q is monotone and works element by element, so moving or comparing codes
    behind it gives what moving reals before it does: the values between are codes too, under names no one else sees.
    """

    links: tuple[Op, ...]
    out: Codes


@dataclass(frozen=True, slots=True, eq=False)
class Quantise(Op):
    """A stored float becomes codes."""

    name: str
    out: Codes
