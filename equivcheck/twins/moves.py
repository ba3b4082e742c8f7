"""Data movement as TFLite has it, on tensors in any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.twins.draft import (
    CannotExpressError,
    Draft,
    Held,
    Layout,
    Shape,
    Stage,
    bounds,
    channels_last,
    in_kind,
    native,
)
from equivcheck.vnpu import real
from equivcheck.vnpu.ir import Clamp, Codes, Move
from equivcheck.vnpu.moves import move as moved

SHAPED = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")
SELECTS = ("Slice", "Split", "Gather", "Expand", "Tile")
Constants = Mapping[int, Array]
Attributes = Mapping[str, Any]


def move(draft: Draft, op: Move) -> None:
    """A Move of codes; requantised in front where all outputs have one scale, behind where they have not."""
    if op.kind == "Concat":
        _concatenate(draft, op)
        return
    forms = draft.forms.get(op.inputs[0].name)  # none: a constant
    held = forms[0].codes if forms else None
    signed = draft.signed if held is None else held.signed
    x = draft.read(op.inputs[0], signed)
    outs = [in_kind(codes or op.inputs[0].codes, signed) for codes in op.out]
    if all(codes == outs[0] for codes in outs) and x.codes != outs[0]:
        x = draft.after(x, Stage("QUANTIZE", draft.tensors[x.tensor].shape, outs[0]))
    for which, (name, out) in enumerate(zip(op.outputs, outs, strict=True)):
        if name:
            _move_one(draft, op, x, which, name, out)


def _move_one(draft: Draft, op: Move, x: Held, which: int, name: str, out: Codes) -> None:
    assert x.codes is not None
    if op.kind == "Pad":
        stages, layout = _pad(draft, op, x, out)
    elif op.kind in ("DepthToSpace", "SpaceToDepth"):
        x, stages, layout = _blocks(draft, op, x)
    else:
        move_held(draft, x, op.kind, op.attributes, op.constants, name, which, len(op.outputs), out)
        return
    draft.run((x.tensor,), stages or [draft.reshape(draft.tensors[x.tensor].shape, out)], name, layout)


def move_held(
    draft: Draft, x: Held, kind: str, attributes: Attributes, constants: Constants, name: str,
    which: int = 0, outputs: int = 1, out: Codes | None = None,
) -> None:  # fmt: skip
    """Move codes or floats; `which` of how many `outputs` (Split). Raises CannotExpressError for other kinds."""
    shape = draft.shape(x)
    if kind == "Transpose":
        _transpose(draft, x, attributes, name)
        return
    made = moved(kind, [np.broadcast_to(np.int8(0), shape)], attributes, constants, 0, outputs)[which].shape
    if kind in SHAPED:
        draft.run((draft.in_native_order(x),), [draft.reshape(made, x.codes)], name, native(len(made)))
        return
    if kind not in SELECTS:
        raise CannotExpressError(f"{kind} has no form there")
    if kind in ("Expand", "Tile") and len(made) > len(shape):
        shape = (1,) * (len(made) - len(shape)) + shape
        x = Held(draft.in_native_order(x), native(len(x.layout)), x.codes)
        x = Held(draft.after(x, draft.reshape(shape, x.codes)).tensor, native(len(shape)), x.codes)
    stages = selected(draft, x, _indices(kind, shape, attributes, constants, which, outputs))
    lies = stages[-1].shape if stages else draft.tensors[x.tensor].shape
    layout = x.layout
    if len(made) != len(lies):  # Gather by one index, or by a table of them
        if layout != native(len(lies)):
            x = draft.relaid(x, native(len(lies)))
            stages = selected(draft, x, _indices(kind, shape, attributes, constants, which, outputs))
        stages.append(draft.reshape(made, x.codes))
        lies, layout = made, native(len(made))
    if out is not None:
        stages += draft.requantise(lies, x.codes, out)
    draft.run((x.tensor,), stages or [draft.reshape(lies, x.codes)], name, layout)


def _transpose(draft: Draft, x: Held, attributes: Attributes, name: str) -> None:
    """No operator at all where the tensor, as it lies, is the result in TFLite's order or in ONNX's."""
    rank = len(x.layout)
    order = [int(v) for v in attributes.get("perm") or range(rank - 1, -1, -1)]
    seen = Held(x.tensor, tuple(order.index(axis) for axis in x.layout), x.codes)
    if seen.layout in (native(rank), channels_last(rank)):
        draft.hold(name, seen)
        return
    draft.run((x.tensor,), [draft.turn(seen, native(rank))], name, native(rank))


def _indices(
    kind: str, shape: Shape, attributes: Attributes, constants: Constants, which: int, outputs: int
) -> list[Array]:
    """Which elements along each axis a move takes: it takes whole slices, so each axis is its own."""
    if kind == "Gather":
        axis = int(attributes.get("axis", 0)) % len(shape)
        taken = constants[1].astype(np.int64).ravel() % shape[axis]
        return [taken if k == axis else np.arange(size) for k, size in enumerate(shape)]
    found = []
    for axis, size in enumerate(shape):
        line = np.arange(size).reshape([-1 if k == axis else 1 for k in range(len(shape))])
        made = moved(kind, [np.broadcast_to(line, shape)], attributes, constants, 0, outputs)[which]
        found.append(np.moveaxis(made, axis, 0).reshape(made.shape[axis], -1)[:, 0])
    return found


def selected(draft: Draft, x: Held, indices: Sequence[Array]) -> list[Stage]:
    """Stages that take the elements `indices` along each ONNX axis: one SLICE for runs, a GATHER for what is none."""
    shape = list(draft.tensors[x.tensor].shape)
    begins, sizes, gathers = [0] * len(shape), list(shape), []
    for place, axis in enumerate(x.layout):
        index = indices[axis]
        if index.size == 0:
            raise CannotExpressError("an empty value")
        if np.array_equal(index, np.arange(index[0], index[0] + index.size)):
            begins[place], sizes[place] = int(index[0]), index.size
        else:
            gathers.append((place, index))
    stages = []
    if sizes != shape:
        stages.append(Stage("SLICE", tuple(sizes), x.codes, (draft.ints(begins), draft.ints(sizes))))
    for place, index in gathers:
        sizes[place] = index.size
        stages.append(Stage("GATHER", tuple(sizes), x.codes, (draft.ints(index),), options={"axis": place}))
    return stages


def _pad(draft: Draft, op: Move, x: Held, out: Codes) -> tuple[list[Stage], Layout]:
    shape, layout = draft.shape(x), x.layout
    mode = op.attributes.get("mode", "constant")
    if mode not in ("constant", b"constant"):
        return selected(draft, x, _indices("Pad", shape, op.attributes, op.constants, 0, 1)), layout
    marks = []  # -1 is what Pad fills with
    for axis, size in enumerate(shape):
        line = np.arange(size).reshape([-1 if k == axis else 1 for k in range(len(shape))])
        flat = [shape[k] if k == axis else 1 for k in range(len(shape))]
        marks.append(_padded_line(op, np.broadcast_to(line, flat), axis, len(shape)))
    stages = selected(draft, x, [line[line >= 0] for line in marks])
    lies = stages[-1].shape if stages else draft.tensors[x.tensor].shape
    widths = []
    for axis in layout:
        inside = np.flatnonzero(marks[axis] >= 0)
        widths.append((int(inside[0]), int(marks[axis].size - 1 - inside[-1])))
    if any(map(any, widths)):
        made = tuple(size + a + b for size, (a, b) in zip(lies, widths, strict=True))
        fill = _fill(op, out)
        border = (
            (draft.ints(widths),) if fill == out.zero else (draft.ints(widths), draft.constant(np.asarray([fill]), out))
        )
        stages.append(Stage("PAD" if fill == out.zero else "PADV2", made, out, border))
    return stages, layout


def _padded_line(op: Move, line: Array, axis: int, rank: int) -> Array:
    """The elements along `axis` behind a Pad by constants, -1 where it fills."""
    pads = [int(v) for v in (op.constants[1].ravel() if 1 in op.constants else op.attributes["pads"])]
    axes = [int(a) % rank for a in op.constants[3].ravel()] if 3 in op.constants else list(range(rank))
    if axis not in axes:
        return np.asarray(line).ravel()
    before, behind = pads[axes.index(axis)], pads[axes.index(axis) + len(axes)]
    values = np.asarray(line).ravel()
    values = values[max(0, -before) : values.size + min(0, behind)]
    return np.pad(values, (max(0, before), max(0, behind)), constant_values=-1)


def _fill(op: Move, out: Codes) -> int:
    """The code Pad fills with; a Pad of codes names one in the model's own signedness."""
    if op.out[0] is not None:
        return bounds(Clamp(low=real.pad_real(op)), out)[0]
    given = int(op.constants[2].ravel()[0]) if 2 in op.constants and op.constants[2].size else 0
    return given + out.zero - op.inputs[0].codes.zero


def _blocks(draft: Draft, op: Move, x: Held) -> tuple[Held, list[Stage], Layout]:
    block = int(op.attributes["blocksize"])
    n, c, h, w = draft.shape(x)
    mode = op.attributes.get("mode", "DCR")
    if op.kind == "DepthToSpace" and mode not in ("DCR", b"DCR"):
        return x, _columns_first(draft, x, block), native(4)
    x = draft.relaid(x, channels_last(4))
    if op.kind == "DepthToSpace":
        made, kind = (n, h * block, w * block, c // block**2), "DEPTH_TO_SPACE"
    else:
        made, kind = (n, h // block, w // block, c * block**2), "SPACE_TO_DEPTH"
    return x, [Stage(kind, made, x.codes, options={"block_size": block})], channels_last(4)


def _columns_first(draft: Draft, x: Held, block: int) -> list[Stage]:
    """DepthToSpace in mode CRD: RESHAPE, TRANSPOSE of six axes, RESHAPE."""
    n, c, h, w = draft.shape(x)
    order = (0, 1, 4, 2, 5, 3)
    split = (n, c // block**2, block, block, h, w)
    draft.rewrites.append("RESHAPE and TRANSPOSE: DEPTH_TO_SPACE has the other order of channels")
    stages = [] if x.layout == native(4) else [draft.turn(x, native(4))]
    stages.append(draft.reshape(split, x.codes))
    stages.append(Stage("TRANSPOSE", tuple(split[k] for k in order), x.codes, (draft.ints(order),)))
    return [*stages, draft.reshape((n, c // block**2, h * block, w * block), x.codes)]


def _concatenate(draft: Draft, op: Move) -> None:
    """CONCATENATION wants one scale: what has another is requantised first."""
    signed = draft.signed
    out = in_kind(op.out[0] or op.inputs[0].codes, signed)
    rank = len(draft.shape_of(op.inputs[0]))
    layouts = [draft.layout_of(operand) for operand in op.inputs]
    layout = channels_last(rank) if channels_last(rank) in layouts else native(rank)
    tensors = []
    for operand in op.inputs:
        held = draft.read(operand, signed, layout)
        if held.codes != out:
            held = draft.after(held, Stage("QUANTIZE", draft.tensors[held.tensor].shape, out))
            draft.rewrites.append("QUANTIZE in front: CONCATENATION wants one scale")
        tensors.append(held.tensor)
    place = layout.index(int(op.attributes["axis"]) % rank)
    made = list(draft.tensors[tensors[0]].shape)
    made[place] = sum(draft.tensors[tensor].shape[place] for tensor in tensors)
    stage = Stage("CONCATENATION", tuple(made), out, options={"axis": place})
    draft.run(tensors, [stage], op.outputs[0], layout)
