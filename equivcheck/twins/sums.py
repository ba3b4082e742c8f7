"""Convolutions and matrix products as TFLite has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.models.tflite.schema import PADDINGS
from equivcheck.models.tflite.write import Tensor
from equivcheck.twins.draft import CannotExpressError, Draft, Shape, Stage, channels_last, in_kind, native
from equivcheck.vnpu import windows
from equivcheck.vnpu.ir import Accumulate, Clamp, Codes, Operand, Pool
from equivcheck.vnpu.requantise import SAME_SCALE, product_scale

SAME, VALID = PADDINGS.index("SAME"), PADDINGS.index("VALID")
# The first version whose contract has one scale an output channel: older engines ignore all scales but the first.
FULLY_CONNECTED_PER_CHANNEL = 12
ROUNDS_BETWEEN = "LeakyRelu in one step with its sum: TFLite rounds between the two"


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window over height and width: `out` sizes, and the pads (begin, end) it needs on each axis.

    `padding` is TFLite's where it has these pads, None where an operator of its own must add them.
    """

    out: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    padding: int | None


def window_of(pool: Pool, sizes: Sequence[int]) -> Window:
    """Where the windows lie, by ONNX's formulas, and whether TFLite's SAME or VALID is the same."""
    out, begins, _ = windows.geometry(pool, tuple(sizes))
    pads, same = [], []
    for k, size in enumerate(sizes):
        reach = pool.dilations[k] * (pool.kernel[k] - 1) + 1
        total = max(0, (out[k] - 1) * pool.strides[k] + reach - size)
        pads.append((begins[k], max(0, total - begins[k])))
        same.append(out[k] == -(-size // pool.strides[k]) and pads[-1] == (total // 2, total - total // 2))
    if not any(map(any, pads)):
        return Window(out, tuple(pads), VALID)
    return Window(out, tuple(pads), SAME if all(same) else None)


def pool_of_image(pool: Pool, rank: int) -> Pool:
    """A window along one axis as one of height 1; height and width stay as they are."""
    if rank == 4:
        return pool
    if rank != 3:
        raise CannotExpressError(f"windows over {rank - 2} axes")
    begin, end = pool.pads
    return replace(
        pool,
        kernel=(1, *pool.kernel),
        strides=(1, *pool.strides),
        pads=(0, begin, 0, end),
        dilations=(1, *pool.dilations),
    )


def image_stages(draft: Draft, shape: Shape, codes: Codes) -> tuple[Shape, list[Stage]]:
    """A channels-last tensor of one spatial axis as (N, 1, L, C); (N, H, W, C) stays."""
    if len(shape) == 4:
        return shape, []
    image = (shape[0], 1, *shape[1:])
    return image, [draft.reshape(image, codes)]


def pad_stage(draft: Draft, shape: Shape, pads: Sequence[tuple[int, int]], codes: Codes) -> Stage:
    """PAD of height and width with the zero point, which stands for 0."""
    widths = [(0, 0), *pads, (0, 0)]
    grown = tuple(size + a + b for size, (a, b) in zip(shape, widths, strict=True))
    return Stage("PAD", grown, codes, (draft.ints(widths),))


# -- weights -----------------------------------------------------------------------------------------------------------


def fits_int8(op: Accumulate) -> bool:
    """Whether the weights, their zero point taken off, are int8 codes of zero point 0: what TFLite's int8 kernels read."""
    weight = op.weight
    return isinstance(weight, Operand) or (weight.min(initial=0) >= -128 and weight.max(initial=0) <= 127)


def signed_for(draft: Draft, op: Accumulate) -> bool:
    """Whether the int8 kernel is to run; the uint8 kernel has one scale for all channels."""
    if not fits_int8(op):
        if op.weight_scale.size > 1:
            raise CannotExpressError("weights with a zero point, and one scale a channel: TFLite has no such kernel")
        return False
    return draft.signed or op.weight_scale.size > 1


def weight_tensor(draft: Draft, op: Accumulate, weight: Array, axis: int, signed: bool, zero: int | None) -> int:
    """The weights as they lie in TFLite: int8, or uint8 with the zero point they have in the model."""
    if signed:
        zero = 0
    elif zero is None or weight.min() + zero < 0 or weight.max() + zero > 255:
        zero = 128
    codes = weight + zero
    if codes.min(initial=0) < (-128 if signed else 0) or codes.max(initial=0) > (127 if signed else 255):
        raise CannotExpressError("weights that are neither int8 nor uint8 codes")
    scale = op.weight_scale.reshape(-1).astype(np.float32)
    dtype = "int8" if signed else "uint8"
    name = f"{op.outputs[0]}/weights"
    return draft.add_tensor(
        Tensor(name, codes.shape, dtype, scale, np.full(scale.size, zero), axis, codes.astype(dtype))
    )


def bias_tensor(draft: Draft, op: Accumulate, columns: int) -> int:
    """The bias in units of s_x * s_w, the only ones TFLite knows; zeros where there is none (CONV_2D needs one)."""
    unit = product_scale(op)
    codes = op.bias if op.bias is not None else np.zeros(1, np.int64)
    ratio = op.bias_scale / unit if op.bias is not None else np.asarray(1.0)
    if not np.all(np.abs(ratio - 1) < SAME_SCALE):
        exact = codes * ratio
        codes = np.rint(exact).astype(np.int64)
        off = float(np.max(np.abs(codes - exact) * unit)) / op.out.scale
        draft.rewrites.append(f"the bias, of a scale of its own, rounded to s_x * s_w: at most {off:.2g} LSB")
    if np.abs(codes).max(initial=0) >= 1 << 31:
        raise CannotExpressError("a bias beyond 32 bits")
    scale = np.broadcast_to(unit.reshape(-1), (op.weight_scale.size,)).astype(np.float32)
    values = np.broadcast_to(codes, (columns,)).astype(np.int32)
    zero = np.zeros(scale.size, np.int64)
    return draft.add_tensor(Tensor(f"{op.outputs[0]}/bias", (columns,), "int32", scale, zero, 0, values))


# -- convolutions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Image:
    """The input of a convolution as (N, H, W, C), the stages that made it so, and window and weights of two axes."""

    tensor: int
    shape: Shape
    codes: Codes
    stages: list[Stage]
    pool: Pool
    weight: Array


def _image(draft: Draft, op: Accumulate, signed: bool) -> _Image:
    assert not isinstance(op.weight, Operand)
    if op.slope != 1:
        raise CannotExpressError(ROUNDS_BETWEEN)
    x = draft.read(op.x, signed, channels_last(op.weight.ndim))
    assert x.codes is not None
    shape, stages = image_stages(draft, draft.tensors[x.tensor].shape, x.codes)
    pool = pool_of_image(_conv_window(op, op.weight), op.weight.ndim)
    weight = op.weight if op.weight.ndim == 4 else op.weight[:, :, None]
    return _Image(x.tensor, shape, x.codes, stages, pool, weight)


def convolve(draft: Draft, op: Accumulate, zero: int | None) -> None:
    """CONV_2D or DEPTHWISE_CONV_2D, behind a PAD where TFLite's own pads are others."""
    signed = signed_for(draft, op)
    x, out = _image(draft, op, signed), in_kind(op.out, signed)
    window = window_of(x.pool, x.shape[1:3])
    stages = [*x.stages]
    if window.padding is None:
        stages.append(pad_stage(draft, x.shape, window.pads, x.codes))
        draft.rewrites.append("PAD in front: TFLite's SAME and VALID have other pads")
    made = (x.shape[0], *window.out, x.weight.shape[0])
    activation, limits = draft.activated(op.clamp, made, out)
    options = {
        "padding": VALID if window.padding is None else window.padding,
        "stride_h": x.pool.strides[0],
        "stride_w": x.pool.strides[1],
        "dilation_h_factor": x.pool.dilations[0],
        "dilation_w_factor": x.pool.dilations[1],
        "fused_activation_function": activation,
    }
    group = int(op.attributes.get("group", 1))
    depthwise = 1 < group == x.shape[-1]
    if group > 1 and not depthwise and not signed:
        raise CannotExpressError(f"{group} groups in uint8")
    if depthwise:
        options["depth_multiplier"] = x.weight.shape[0] // group
    order, axis = ((1, 2, 3, 0), 3) if depthwise else ((0, 2, 3, 1), 0)
    weights = weight_tensor(draft, op, x.weight.transpose(order), axis, signed, zero)
    tensors = (weights, bias_tensor(draft, op, x.weight.shape[0]))
    stages.append(Stage("DEPTHWISE_CONV_2D" if depthwise else "CONV_2D", made, out, tensors, options=options))
    _finish(draft, op, x, [*stages, *limits], out)


def transpose_convolve(draft: Draft, op: Accumulate) -> None:
    """TRANSPOSE_CONV of the whole VALID output, and a SLICE where ONNX's pads take its edges off."""
    if int(op.attributes.get("group", 1)) != 1:
        raise CannotExpressError("ConvTranspose with groups")
    if not fits_int8(op):
        raise CannotExpressError("ConvTranspose with weights that are not int8")
    x, out = _image(draft, op, True), in_kind(op.out, True)
    if any(d != 1 for d in x.pool.dilations):
        raise CannotExpressError("ConvTranspose with dilations")
    if x.pool.auto_pad not in ("NOTSET", "VALID") or "output_shape" in op.attributes:
        raise CannotExpressError("ConvTranspose with auto_pad or output_shape")
    extra = [0, *(int(v) for v in op.attributes.get("output_padding", (0, 0)))][-2:]  # of one axis: none in height
    full = [  # the last `extra` rows and columns get the bias alone
        (x.shape[1 + k] - 1) * x.pool.strides[k] + x.pool.kernel[k] + extra[k] for k in range(2)
    ]
    begins, ends = x.pool.pads[:2], x.pool.pads[2:]
    columns = x.weight.shape[1]
    whole = (x.shape[0], *full, columns)
    made = (x.shape[0], *(full[k] - begins[k] - ends[k] for k in range(2)), columns)
    weights = weight_tensor(draft, op, x.weight.transpose(1, 2, 3, 0), 0, True, None)
    options = {"padding": VALID, "stride_h": x.pool.strides[0], "stride_w": x.pool.strides[1]}
    bias = bias_tensor(draft, op, columns)
    stages = [*x.stages, Stage("TRANSPOSE_CONV", whole, out, (bias,), (draft.ints(whole), weights), options)]
    if made != whole:
        stages.append(Stage("SLICE", made, out, (draft.ints((0, *begins, 0)), draft.ints(made))))
        draft.rewrites.append("SLICE behind: TRANSPOSE_CONV has no pads of its own")
    _finish(draft, op, x, [*stages, *draft.limits(op.clamp, made, out)], out)


def ones_window(draft: Draft, x: Pool, scale: float, why: str) -> None:
    """Window sums as a DEPTHWISE_CONV_2D of ones of that scale: 1 / n makes them means into any scale, rounded once."""
    rank = len(draft.shape_of(x.x))
    channels = draft.shape_of(x.x)[1]
    attributes = {
        "group": channels, "pads": x.pads, "strides": x.strides, "dilations": x.dilations, "auto_pad": x.auto_pad,
    }  # fmt: skip
    ones = np.ones((channels, 1, *x.kernel), np.int64)
    op = Accumulate(
        "Conv", x.outputs, x.x, ones, np.asarray(float(np.float32(scale))), None, np.asarray(1.0), attributes, x.clamp, x.out
    )  # fmt: skip
    if rank != ones.ndim:
        raise CannotExpressError(f"a window over {rank - 2} axes")
    draft.rewrites.append(why)
    convolve(draft, op, None)


def _conv_window(op: Accumulate, weight: Array) -> Pool:
    rank = weight.ndim - 2
    attributes = op.attributes

    def ints(key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(int(v) for v in attributes.get(key, default))

    return Pool(
        "Conv", op.outputs, op.x, weight.shape[2:], ints("strides", (1,) * rank), ints("pads", (0,) * 2 * rank),
        ints("dilations", (1,) * rank), False, False, str(attributes.get("auto_pad", "NOTSET")), Clamp(), op.out,
    )  # fmt: skip


def _finish(draft: Draft, op: Accumulate, x: _Image, stages: list[Stage], out: Codes) -> None:
    rank = len(draft.shape_of(op.x))
    if rank == 3:
        n, _, *rest = stages[-1].shape
        stages = [*stages, draft.reshape((n, *rest), out)]
    draft.run((x.tensor,), stages, op.outputs[0], channels_last(rank))


# -- products ----------------------------------------------------------------------------------------------------------


def multiply(draft: Draft, op: Accumulate, zero: int | None) -> None:
    if op.slope != 1:
        raise CannotExpressError(ROUNDS_BETWEEN)
    if isinstance(op.weight, Operand):
        batch_multiply(draft, op, op.weight)
    elif op.weight.ndim == 2:
        fully_connect(draft, op, op.weight, zero)
    elif op.weight.ndim > 2 and op.weight_scale.size == 1 and op.bias is None and fits_int8(op):
        codes = Codes(float(op.weight_scale.reshape(-1)[0]), 0, True)
        batch_multiply(draft, op, Operand("", codes, op.weight))
    else:
        raise CannotExpressError(f"constant weights of {op.weight.ndim} axes")


def fully_connect(draft: Draft, op: Accumulate, weight: Array, zero: int | None) -> None:
    signed = signed_for(draft, op)
    rank = len(draft.shape_of(op.x))
    if rank < 2:
        raise CannotExpressError("a vector times a matrix")
    x, out = draft.read(op.x, signed, native(rank)), in_kind(op.out, signed)
    lies = draft.tensors[x.tensor].shape
    made = (*lies[:-1], weight.shape[1])
    activation, limits = draft.activated(op.clamp, made, out)
    bias = bias_tensor(draft, op, weight.shape[1])
    if op.weight_scale.size > 1 and draft.older_engines:
        draft.rewrites.append("CONV_2D of 1x1: FULLY_CONNECTED with a scale a channel is newer")
        rows = int(np.prod(lies[:-1]))
        weights = weight_tensor(draft, op, weight.T[:, None, None, :], 0, signed, zero)
        options = _ONE_BY_ONE | {"fused_activation_function": activation}
        stages = [
            draft.reshape((rows, 1, 1, lies[-1]), x.codes),
            Stage("CONV_2D", (rows, 1, 1, made[-1]), out, (weights, bias), options=options),
            draft.reshape(made, out),
        ]
    else:
        version = 0
        if op.weight_scale.size > 1:
            version = FULLY_CONNECTED_PER_CHANNEL
            draft.rewrites.append(
                f"FULLY_CONNECTED with a scale a channel: version {version}, which older engines refuse (--older-engines)"
            )
        weights = weight_tensor(draft, op, weight.T, 0, signed, zero)
        options = {"fused_activation_function": activation, "keep_num_dims": rank != 2}
        stages = [Stage("FULLY_CONNECTED", made, out, (weights, bias), options=options, version=version)]
    draft.run((x.tensor,), [*stages, *limits], op.outputs[0], native(rank))


_ONE_BY_ONE = {"padding": VALID, "stride_h": 1, "stride_w": 1, "dilation_h_factor": 1, "dilation_w_factor": 1}


def batch_multiply(draft: Draft, op: Accumulate, other: Operand) -> None:
    """BATCH_MATMUL, which knows int8 only."""
    shapes = [draft.shape_of(op.x), draft.shape_of(other)]
    rank = max(map(len, shapes))
    if min(map(len, shapes)) < 2:
        raise CannotExpressError("a product with a vector")
    out = in_kind(op.out, True)
    tensors = []
    for operand, shape in zip((op.x, other), shapes, strict=True):
        held = draft.read(operand, True, native(len(shape)))
        if len(shape) < rank:
            held = draft.after(held, draft.reshape((1,) * (rank - len(shape)) + shape, held.codes))
        tensors.append(held.tensor)
    batch = np.broadcast_shapes(shapes[0][:-2], shapes[1][:-2])
    made = (*batch, shapes[0][-2], shapes[1][-1])
    options = {"adj_x": False, "adj_y": False}
    stage = Stage("BATCH_MATMUL", made, out, options=options)
    draft.run(tensors, [stage, *draft.limits(op.clamp, made, out)], op.outputs[0], native(rank))
