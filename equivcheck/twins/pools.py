"""Pools, means, reductions and Resize as TFLite has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.twins.draft import CannotExpressError, Draft, Held, Layout, Stage, channels_last, in_kind, native
from equivcheck.twins.moves import selected
from equivcheck.twins.sums import VALID, image_stages, ones_window, pad_stage, pool_of_image, window_of
from equivcheck.vnpu import resize as resizing
from equivcheck.vnpu import tflite_arithmetic, tflite_kernels, windows
from equivcheck.vnpu.ir import Codes, Mean, Pool, Reduce, Resize

# ONNX coordinates -> align_corners, half_pixel_centers
LINEAR = {
    "align_corners": (True, False),
    "half_pixel": (False, True),
    "pytorch_half_pixel": (False, True),
    "asymmetric": (False, False),
}


def pool(draft: Draft, op: Pool) -> None:
    signed = draft.signed
    rank = len(draft.shape_of(op.x))
    out, codes = in_kind(op.out, signed), in_kind(op.x.codes, signed)
    average = op.kind == "AveragePool"
    if average and codes != out:
        _average_into_another_scale(draft, op)
        return
    if any(d != 1 for d in op.dilations):
        raise CannotExpressError(f"{op.kind} with dilations")
    x = draft.read(op.x, signed, channels_last(rank))
    shape, stages = image_stages(draft, draft.tensors[x.tensor].shape, codes)
    flat = pool_of_image(op, rank)
    window = window_of(flat, shape[1:3])
    padding = window.padding
    if average and any(map(any, window.pads)):
        counts = windows.counts(flat, shape[1:3])
        if np.all(counts == np.prod(flat.kernel)):
            padding = None
        elif padding is None or not np.array_equal(
            counts, windows.counts(replace(flat, count_include_pad=False), shape[1:3])
        ):
            raise CannotExpressError("AveragePool with pads that are neither all counted nor TFLite's SAME")
    if padding is None:
        stages.append(_border(draft, shape, window.pads, codes, average))
        draft.rewrites.append(f"{stages[-1].kind} in front: TFLite's SAME and VALID have other pads")
        padding = VALID
    made = (shape[0], *window.out, shape[3])
    activation, limits = (
        draft.activated(op.clamp, made, out) if codes == out else (0, draft.limits(op.clamp, made, out))
    )
    options = {
        "padding": padding, "stride_h": flat.strides[0], "stride_w": flat.strides[1],
        "filter_height": flat.kernel[0], "filter_width": flat.kernel[1], "fused_activation_function": activation,
    }  # fmt: skip
    kind = "AVERAGE_POOL_2D" if average else "MAX_POOL_2D"
    stages += [Stage(kind, made, codes, options=options), *draft.requantise(made, codes, out), *limits]
    if rank == 3:
        stages.append(draft.reshape((made[0], *made[2:]), out))
    draft.run((x.tensor,), stages, op.outputs[0], channels_last(rank))


def _border(
    draft: Draft, shape: tuple[int, ...], pads: tuple[tuple[int, int], ...], codes: Codes, average: bool
) -> Stage:
    """Zeros around an average; around a maximum the lowest code, which wins nowhere."""
    stage = pad_stage(draft, shape, pads, codes)
    if average:
        return stage
    return replace(stage, kind="PADV2", behind=(*stage.behind, draft.constant(np.asarray([codes.low]), codes)))


def _average_into_another_scale(draft: Draft, op: Pool) -> None:
    sizes = draft.shape_of(op.x)[2:]
    counts = np.unique(windows.counts(op, sizes))
    if counts.size > 1 or op.ceil_mode:
        raise CannotExpressError("AveragePool into another scale, with windows of different sizes")
    why = "DEPTHWISE_CONV_2D of 1/n: AVERAGE_POOL_2D has one scale for both sides"
    ones_window(draft, op, 1 / int(counts[0]), why)


# -- means and reductions ----------------------------------------------------------------------------------------------


def mean(draft: Draft, op: Mean) -> None:
    out = in_kind(op.out, draft.signed)
    x, axes, layout, made = _reduced(draft, op)
    stage = Stage("MEAN", made, out, (draft.ints(axes),), options={"keep_dims": op.keepdims})
    draft.run((x.tensor,), [stage, *draft.limits(op.clamp, made, out)], op.outputs[0], layout)


def reduce(draft: Draft, op: Reduce) -> None:
    if op.kind == "ReduceSum":
        _sum(draft, op)
        return
    out = in_kind(op.out, draft.signed)
    x, axes, layout, made = _reduced(draft, op)
    kind = "REDUCE_MIN" if op.kind == "ReduceMin" else "REDUCE_MAX"
    stage = Stage(kind, made, x.codes, (draft.ints(axes),), options={"keep_dims": op.keepdims})
    stages = [stage, *draft.requantise(made, x.codes, out), *draft.limits(op.clamp, made, out)]
    draft.run((x.tensor,), stages, op.outputs[0], layout)


def _sum(draft: Draft, op: Reduce) -> None:
    """SUM of LiteRT 2.3's reference resolver is up to 154 codes off, so a convolution of ones adds."""
    shape = draft.shape_of(op.x)
    axes = sorted(_axes(op, len(shape)))
    if axes != list(range(2, len(shape))) or not op.keepdims or len(shape) not in (3, 4):
        raise CannotExpressError("ReduceSum over other than the spatial axes, kept")
    rank = len(axes)
    whole = Pool("AveragePool", op.outputs, op.x, shape[2:], (1,) * rank, (0,) * 2 * rank, (1,) * rank, False, False, "NOTSET",
                 op.clamp, op.out)  # fmt: skip
    ones_window(draft, whole, 1.0, "DEPTHWISE_CONV_2D of ones: the reference SUM is wrong")


def _reduced(draft: Draft, op: Mean | Reduce) -> tuple[Held, list[int], Layout, tuple[int, ...]]:
    """The input, the axes as they lie, and layout and shape of the result."""
    rank = len(draft.shape_of(op.x))
    axes = _axes(op, rank)
    layout = draft.layout_of(op.x)
    if not op.keepdims and _left(layout, axes) not in (native(rank - len(axes)), channels_last(rank - len(axes))):
        layout = native(rank)
    x = draft.read(op.x, draft.signed, layout)
    shape = draft.tensors[x.tensor].shape
    places = [k for k, axis in enumerate(layout) if axis in axes]
    if op.keepdims:
        return x, places, layout, tuple(1 if k in places else size for k, size in enumerate(shape))
    made = tuple(size for k, size in enumerate(shape) if k not in places)
    return x, places, _left(layout, axes), made


def _axes(op: Mean | Reduce, rank: int) -> set[int]:
    """None: all behind the channel; empty: all."""
    return {axis % rank for axis in (range(2, rank) if op.axes is None else op.axes or range(rank))}


def _left(layout: Layout, axes: set[int]) -> Layout:
    """The layout of what is left when `axes` go."""
    kept = [axis for axis in layout if axis not in axes]
    return tuple(sorted(kept).index(axis) for axis in kept)


# -- resize ------------------------------------------------------------------------------------------------------------


def resize(draft: Draft, op: Resize) -> None:
    signed = draft.signed if op.mode == "nearest" else op.x.codes.signed
    if signed != draft.signed:
        draft.rewrites.append("RESIZE_BILINEAR in uint8, as in the model: its int8 kernel interpolates in 10 bits")
    shape = draft.shape_of(op.x)
    sizes = {**dict(enumerate(shape)), **resizing.lengths(op, shape)}
    made = tuple(sizes[k] for k in range(len(shape)))
    out, codes = in_kind(op.out, signed), in_kind(op.x.codes, signed)
    flags = None
    if len(shape) == 4 and made[:2] == shape[:2]:
        flags = _linear_flags(op) if op.mode == "linear" else _nearest_flags(op, shape, made)
    if flags is None and op.mode == "linear":
        raise CannotExpressError(
            f"linear Resize with {op.coordinates}, or with factors TFLite would take from the sizes"
        )
    if flags is None:
        if op.coordinates == "tf_crop_and_resize":
            raise CannotExpressError("Resize with tf_crop_and_resize")
        x = draft.read(op.x, signed)
        stages = selected(draft, x, [_nearest_index(op, shape, axis) for axis in range(len(shape))])
        draft.rewrites.append("GATHER: RESIZE_NEAREST_NEIGHBOR rounds positions otherwise")
    else:
        x = draft.read(op.x, signed, channels_last(4))
        kind = "RESIZE_BILINEAR" if op.mode == "linear" else "RESIZE_NEAREST_NEIGHBOR"
        options = {"align_corners": flags[0], "half_pixel_centers": flags[1]}
        stages = [Stage(kind, (made[0], *made[2:], made[1]), codes, (draft.ints(made[2:]),), options=options)]
    lies = tuple(made[axis] for axis in x.layout)
    draft.run((x.tensor,), [*stages, *draft.requantise(lies, codes, out)], op.outputs[0], x.layout)


def _linear_flags(op: Resize) -> tuple[bool, bool] | None:
    return LINEAR.get(op.coordinates) if tflite_arithmetic.resize_linear(op) is not None else None


def _nearest_index(op: Resize, shape: tuple[int, ...], axis: int) -> Array:
    """Which element along `axis` each output element takes."""
    line = np.arange(shape[axis]).reshape([-1 if k == axis else 1 for k in range(len(shape))])
    found = resizing.nearest(op, np.broadcast_to(line, shape), 0)
    return np.moveaxis(found, axis, 0).reshape(found.shape[axis], -1)[:, 0]


def _nearest_flags(op: Resize, shape: tuple[int, ...], made: tuple[int, ...]) -> tuple[bool, bool] | None:
    """Whichever of TFLite's three coordinates takes the same elements."""
    wanted = [_nearest_index(op, shape, axis) for axis in (2, 3)]
    for align, half in dict.fromkeys(LINEAR.values()):
        found = [
            tflite_kernels.resize_nearest_codes(
                np.arange(shape[axis])[:, None], (made[axis], 1), (0, 1), align_corners=align, half_pixel_centers=half
            )[:, 0]
            for axis in (2, 3)
        ]
        if all(map(np.array_equal, found, wanted)):
            return align, half
    return None
