"""ONNX Runtime's QLinear arithmetic on x86-64, in numpy float32: the formulas of its kernels, in their order.

Sources (onnxruntime 1.2x, MIT): core/mlas/lib/intrinsics/avx2/qladd_avx2.cpp, core/mlas/lib/qlmul.cpp, qlgavgpool.cpp,
contrib_ops/cpu/quantization/qlinear_pool.cc, qlinear_softmax.cc, qlinear_concat.cc, qlinear_lookup_table.cc. int8 graphs
are rewritten to uint8 (code + 128) before any of them runs, so codes are taken to uint8 first here too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from equivcheck.engines.ort import OrtEngine
from equivcheck.models.graph import Array
from equivcheck.vnpu import real, windows
from equivcheck.vnpu.ir import Binary, Codes, Mean, Pool, Resize, Softmax
from equivcheck.vnpu.rounding import saturated

F = np.float32


def unsigned(codes: Codes) -> Codes:
    return Codes(codes.scale, codes.zero + (1 << codes.bits - 1), False, codes.bits) if codes.signed else codes


def dequantised(codes: Codes, values: Array) -> Array:
    """DequantizeLinear: float32(code - zero) * scale."""
    return (values.astype(np.int64) - codes.zero).astype(F) * F(codes.scale)


def quantised(values: Array, out: Codes, bounds: tuple[int, int] | None = None) -> Array:
    """QuantizeLinear (MlasQuantizeLinear): rint(x / scale) + zero, the division in float32. NaN becomes the lowest code."""
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = values.astype(F, copy=False) / F(out.scale)
    return saturated(np.where(np.isnan(quotient), F(-1e9), quotient), out, bounds=bounds)


def fused(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add, one rounding of a * b + c to float32.

    In float64 the product is exact (8 + 24 bits), and so is the sum unless the exponents lie 21 apart.
    """
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(F)


def binary_table(op: Binary, bounds: tuple[int, int], scalar: str = "") -> Array:
    """256 x 256 codes by the raw bytes of a and b. `scalar` names the side ("a", "b") that is one element a span."""
    a, b = np.meshgrid(op.a.codes.all(), op.b.codes.all(), indexing="ij")
    if op.kind == "Add":
        return _add(op, a, b, bounds, scalar)
    if op.kind == "Mul":
        return _mul(op, a, b, bounds)
    return float32_binary(op, dequantised(op.a.codes, a), dequantised(op.b.codes, b), bounds)


def float32_binary(op: Binary, a: Array, b: Array, bounds: tuple[int, int]) -> Array:
    """DQ-op-Q in float32: operators (and widths of code) that have no QLinear kernel."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return quantised(real.BINARY[op.kind](a, b), op.out, bounds)


def _add(op: Binary, a: Array, b: Array, bounds: tuple[int, int], scalar: str) -> Array:
    """MlasQLinearAddKernelAvx2: fma(a, ra, fma(b, rb, fixed)), fixed = zc - (ra * za + rb * zb); half-even."""
    ca, cb, out = unsigned(op.a.codes), unsigned(op.b.codes), unsigned(op.out)
    a, b = a - op.a.codes.zero + ca.zero, b - op.b.codes.zero + cb.zero
    ra, rb = (np.asarray(F(codes.scale) / F(out.scale)) for codes in (ca, cb))
    inner = fused(np.asarray(ca.zero), ra, np.asarray(rb * F(cb.zero), F))
    fixed = np.asarray(F(out.zero) - inner)
    if scalar == "a":
        made = fused(b, rb, fused(a, ra, fixed))
    else:
        made = fused(a, ra, fused(b, rb, fixed))
    return _packed(made, out, op.out, bounds)


def _mul(op: Binary, a: Array, b: Array, bounds: tuple[int, int]) -> Array:
    """MlasQLinearMulKernel: float32((a - za) * (b - zb)) * (sa * sb / sc) + zc, three roundings; half-even."""
    out = unsigned(op.out)
    ratio = F(op.a.codes.scale) * F(op.b.codes.scale) / F(out.scale)
    products = ((a - op.a.codes.zero) * (b - op.b.codes.zero)).astype(F)
    return _packed(products * ratio + F(out.zero), out, op.out, bounds)


def _packed(with_zero: Array, worked: Codes, out: Codes, bounds: tuple[int, int]) -> Array:
    """Cvtps + packs: the zero point is inside already, so ties are rounded with it."""
    rounded = np.clip(np.rint(with_zero), -32768, 32767) - (worked.zero - out.zero)
    return np.clip(rounded, bounds[0], bounds[1]).astype(out.dtype)


def global_average(op: Mean, codes: Array, bounds: tuple[int, int]) -> Array:
    """MlasQLinearGlobalAveragePool: float32(sum - n zx) * (sx / (sy * n)); half-even."""
    axes, count = real.mean_axes(op, codes)
    total = codes.sum(axis=axes, dtype=np.int64, keepdims=op.keepdims) - count * op.x.codes.zero
    scale = F(op.x.codes.scale) / (F(op.out.scale) * F(count))
    return saturated(total.astype(F) * scale, op.out, bounds=bounds)


def average_pool(op: Pool, codes: Array, bounds: tuple[int, int]) -> Array:
    """QLinearAveragePool: float32 sum of dequantised codes in window order, / count; rint(y / sy + zy)."""
    out = unsigned(op.out)
    total = windows.summed(op, dequantised(op.x.codes, codes))
    area = int(np.prod(op.kernel))
    count = area if op.count_include_pad else windows.counts(op, codes.shape[2:])
    mean = total / np.asarray(count, F)
    return _packed(mean / F(out.scale) + F(out.zero), out, op.out, bounds)


def softmax(op: Softmax, codes: Array) -> Array:
    """QLinearSoftmax: a table of float32 exponentials moved so that the row's maximum meets its top, summed in order.

    The output scale becomes floor(1 / sy): 254 at sy = 1/255, which is why it is one code low there.
    """
    rows = real.softmax_rows(op, codes)
    length = rows.shape[-1]
    flat = rows.reshape(-1, length).astype(np.int64) + (128 if op.x.codes.signed else 0)
    reserve = np.log(F(np.finfo(F).max) / F(length)).astype(np.float64)
    bits = max(0.0, float(reserve) - 5) / op.x.codes.scale
    table = np.exp((np.arange(256) - 255 + bits) * op.x.codes.scale).astype(F)
    powers = table[flat + (255 - flat.max(axis=1, keepdims=True))]
    sums = np.add.accumulate(powers, axis=1, dtype=F)[:, -1:]
    top = np.floor(F(1) / F(op.out.scale)).astype(F)
    out = unsigned(op.out)
    made = np.minimum(np.rint(powers * top / sums) + out.zero, 255) - (out.zero - op.out.zero)
    return real.softmax_back(op, made.astype(op.out.dtype).reshape(rows.shape), codes.shape)


def resize(op: Resize) -> Callable[[Array], Array]:
    """Linear Resize has no int8 kernel in a QDQ graph: its own float32 kernel runs between DQ and Q. It is called here."""
    engine = OrtEngine()
    engine.load(_resize_model(op), {"optimization": "disable", "threads": 1})
    return lambda codes: quantised(engine.run({"x": dequantised(op.x.codes, codes)}, ["y"])["y"], op.out)


def _resize_model(op: Resize) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    given: dict[str, Array] = {"roi": np.asarray(op.roi or (), np.float32)}
    if op.sizes is None:
        given["scales"] = np.asarray(op.factors, np.float32)
    else:
        given["sizes"] = np.asarray(op.sizes, np.int64)
    names = ["x", "roi", "scales" if op.sizes is None else "", *(["sizes"] if op.sizes is not None else [])]
    node = helper.make_node(
        "Resize", names, ["y"], mode="linear", coordinate_transformation_mode=op.coordinates, axes=list(op.axes),
        extrapolation_value=op.outside,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in given.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    return bytes(model.SerializeToString())
