"""Operators element by element, and Softmax: TFLite's own where it has the quantisation, a table of 256 codes where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.twins.draft import FUSED, CannotExpressError, Draft, Held, Layout, Stage, bounds, in_kind, native
from equivcheck.vnpu import islands
from equivcheck.vnpu.fixed_point import output_codes, quantize_multiplier
from equivcheck.vnpu.ir import Binary, Clamp, Codes, Island, Operand, Quantise, Softmax, Table
from equivcheck.vnpu.kernels import Kernel, unary_table
from equivcheck.vnpu.profiles import load_profile

BINARY = {"Add": "ADD", "Sub": "SUB", "Mul": "MUL", "Max": "MAXIMUM", "Min": "MINIMUM", "PRelu": "PRELU"}
FUSES = ("Add", "Sub", "Mul")
# What TFLite pins: output scale and zero point (int8)
SIGMOID, TANH = Codes(1 / 256, -128, True), Codes(1 / 128, 0, True)
WIDE_SOFTMAX = Codes(2.0**-16, -32768, True, 16)
CLIPS = ("RELU", "RELU_N1_TO_1", "RELU6")


def binary(draft: Draft, op: Binary) -> None:
    if op.kind not in BINARY:
        pairs(draft, op)
        return
    signed = draft.signed
    out = in_kind(op.out, signed)
    shapes = [draft.shape_of(operand) for operand in (op.a, op.b)]
    shape = np.broadcast_shapes(*shapes)
    layout = _common_layout(draft, (op.a, op.b), len(shape))
    held = [_broadcastable(draft, operand, signed, layout) for operand in (op.a, op.b)]
    if op.kind in ("Max", "Min"):
        held = [
            h if h.codes == out else draft.after(h, Stage("QUANTIZE", draft.tensors[h.tensor].shape, out)) for h in held
        ]
    made = tuple(shape[axis] for axis in layout)
    if op.kind in FUSES:
        activation, limits = draft.activated(op.clamp, made, out)
        stage = Stage(BINARY[op.kind], made, out, options={"fused_activation_function": activation})
    else:
        stage, limits = Stage(BINARY[op.kind], made, out), draft.limits(op.clamp, made, out)
    draft.run([h.tensor for h in held], [stage, *limits], op.outputs[0], layout)


def pairs(draft: Draft, op: Binary | Island) -> None:
    """A function of two values, element by element: CAST of uint8 codes, 256 a + b, and GATHER from 65,536 codes."""
    found = _two_operands(op)
    out = in_kind(op.out, draft.signed)
    shape = np.broadcast_shapes(*(draft.shape_of(operand) for operand in found))
    layout = _common_layout(draft, found, len(shape))
    made = tuple(shape[axis] for axis in layout)
    wide = []
    for operand in found:
        held = _broadcastable(draft, operand, False, layout)
        wide.append(draft.after(held, Stage("CAST", draft.tensors[held.tensor].shape, None, dtype="int32")).tensor)
    none = {"fused_activation_function": 0}
    high = Stage("MUL", draft.tensors[wide[0]].shape, None, (draft.ints([256]),), options=none, dtype="int32")
    first = draft.after(Held(wide[0], layout, None), high)
    stages = [
        Stage("ADD", made, None, options=none, dtype="int32"),
        Stage("GATHER", made, out, before=(draft.constant(_pair_codes(op, found, out), out),), options={"axis": 0}),
    ]
    draft.rewrites.append("a table of 65,536 codes: TFLite has no such int8 operator of two values")
    draft.run((first.tensor, wide[1]), stages, op.outputs[0], layout)


def _two_operands(op: Binary | Island) -> tuple[Operand, Operand]:
    if isinstance(op, Binary):
        return op.a, op.b
    operands = {operand.name: operand for operand in op.sources.values()}
    alone = all(node.op_type in islands.OPERATORS for node in op.nodes) and all(
        c.size == 1 for c in op.constants.values()
    )
    if len(operands) != 2 or not alone or any(o.codes != operands[o.name].codes for o in op.sources.values()):
        raise CannotExpressError("several operators in float, without a Q between")
    first, second = operands.values()
    return first, second


def _pair_codes(op: Binary | Island, found: tuple[Operand, Operand], out: Codes) -> Array:
    """What each pair of uint8 codes becomes, in the codes of the twin: entry 256 a + b."""
    every = [
        (np.arange(256) - (128 if operand.codes.signed else 0)).astype(operand.codes.dtype).reshape(shape)
        for operand, shape in zip(found, ((256, 1), (1, 256)), strict=True)
    ]
    if isinstance(op, Binary):
        found = Operand("a", found[0].codes), Operand("b", found[1].codes)
        op = replace(op, a=found[0], b=found[1])
    square = {o.name: np.ascontiguousarray(np.broadcast_to(e, (256, 256))) for o, e in zip(found, every, strict=True)}
    codes = Kernel(op, load_profile("tflite-reference")).run(square)[op.outputs[0]]
    return codes.astype(np.int64).ravel() + (out.zero - op.out.zero)


def _common_layout(draft: Draft, operands: Sequence[Operand], rank: int) -> Layout:
    """That of the operand with most elements among those of full rank."""
    full = [o for o in operands if o.constant is None and len(draft.shape_of(o)) == rank]
    if not full:
        return native(rank)
    return draft.layout_of(max(full, key=lambda operand: np.prod(draft.shape_of(operand))))


def _broadcastable(draft: Draft, operand: Operand, signed: bool, layout: Layout) -> Held:
    rank, shape = len(layout), draft.shape_of(operand)
    if operand.constant is not None:
        grown = operand.constant.reshape((1,) * (rank - len(shape)) + shape)
        return draft.read(replace(operand, constant=grown), signed, layout)
    if len(shape) == rank:
        return draft.read(operand, signed, layout)
    held = draft.read(operand, signed, native(len(shape)))
    held = draft.after(held, draft.reshape((1,) * (rank - len(shape)) + shape, held.codes))
    return draft.relaid(replace(held, layout=native(rank)), layout)


# -- functions of one value --------------------------------------------------------------------------------------------


def table(draft: Draft, op: Table) -> None:
    signed = draft.signed
    x, out = draft.read(op.x, signed), in_kind(op.out, signed)
    shape = draft.tensors[x.tensor].shape
    assert x.codes is not None
    rule = _OWN.get(op.kind)
    stages = rule(draft, op, x.codes, out, shape) if rule is not None else None
    if stages is None:
        x, stages = _looked_up(draft, op, shape)
        if op.kind in _OWN:
            draft.rewrites.append(f"a table of 256 codes: TFLite's {op.kind} has another quantisation")
        else:
            draft.rewrites.append("a table of 256 codes: TFLite has no such int8 operator")
    draft.run((x.tensor,), stages, op.outputs[0], x.layout)


Rule = Callable[[Draft, Table, Codes, Codes, "tuple[int, ...]"], "list[Stage] | None"]


def _requantise(draft: Draft, op: Table, x: Codes, out: Codes, shape: tuple[int, ...]) -> list[Stage]:
    return [Stage("QUANTIZE", shape, out)]


def _clip(draft: Draft, op: Table, x: Codes, out: Codes, shape: tuple[int, ...]) -> list[Stage]:
    low, high = islands.evaluate(op, np.array([-np.inf, np.inf]))
    clamp = Clamp(float(low), float(high))
    own = next((kind for kind in CLIPS if bounds(FUSED[kind], out) == bounds(clamp, out)), None)
    if own is not None:
        return [Stage(own, shape, out)]
    return [*draft.requantise(shape, x, out), *draft.limits(clamp, shape, out)] or [draft.reshape(shape, out)]


def _leaky(draft: Draft, op: Table, x: Codes, out: Codes, shape: tuple[int, ...]) -> list[Stage]:
    alpha = float(np.float32(op.nodes[0].attributes.get("alpha", 0.01)))
    return [Stage("LEAKY_RELU", shape, out, options={"alpha": alpha})]


def _plain(kind: str, pinned: Codes | None = None, int8_only: bool = False) -> Rule:
    def rule(draft: Draft, op: Table, x: Codes, out: Codes, shape: tuple[int, ...]) -> list[Stage] | None:
        if (pinned is not None and in_kind(out, True) != pinned) or (int8_only and not out.signed):
            return None
        return [Stage(kind, shape, out)]

    return rule


def _gelu(draft: Draft, op: Table, x: Codes, out: Codes, shape: tuple[int, ...]) -> list[Stage] | None:
    if op.nodes[0].attributes.get("approximate", "none") not in ("none", b"none"):
        return None
    return [Stage("GELU", shape, out, options={"approximate": False})]


_OWN: dict[str, Rule] = {
    "QuantizeLinear": _requantise,
    "Relu": _clip,
    "Clip": _clip,
    "LeakyRelu": _leaky,
    "HardSwish": _plain("HARD_SWISH"),
    "Sigmoid": _plain("LOGISTIC", SIGMOID),
    "Tanh": _plain("TANH", TANH),
    "Exp": _plain("EXP", int8_only=True),
    "Gelu": _gelu,
}


def _looked_up(draft: Draft, op: Table, shape: tuple[int, ...]) -> tuple[Held, list[Stage]]:
    """CAST of uint8 codes to int32, and GATHER from the codes they become."""
    x, out = draft.read(op.x, False), in_kind(op.out, draft.signed)
    codes = unary_table(op, load_profile("tflite-reference")).astype(np.int64) + (out.zero - op.out.zero)
    if op.x.codes.signed:  # entry k is that of raw bits k; uint8 code k is int8 code k - 128
        codes = np.roll(codes, 128)
    return x, [
        Stage("CAST", shape, None, dtype="int32"),
        Stage("GATHER", shape, out, before=(draft.constant(codes, out),), options={"axis": 0}),
    ]


def quantise(draft: Draft, op: Quantise) -> None:
    """A stored float becomes codes."""
    x, out = draft.forms[op.name][0], in_kind(op.out, draft.signed)
    draft.run((x.tensor,), [Stage("QUANTIZE", draft.tensors[x.tensor].shape, out)], op.outputs[0], x.layout)


# -- softmax -----------------------------------------------------------------------------------------------------------


def softmax(draft: Draft, op: Softmax) -> None:
    shape = draft.shape_of(op.x)
    axis = op.axis % len(shape)
    signed = draft.signed
    layout = draft.layout_of(op.x)
    flat = op.flat and any(size != 1 for size in shape[axis + 1 :])
    if flat:
        layout = native(len(shape))
    elif layout[-1] != axis:
        layout = (*(a for a in native(len(shape)) if a != axis), axis)
    out = in_kind(op.out, signed)
    pinned = in_kind(SIGMOID, signed)
    wide = out != pinned
    x = draft.read(op.x, signed or wide, layout)
    lies = draft.tensors[x.tensor].shape
    rows = (int(np.prod(lies[:axis])), int(np.prod(lies[axis:]))) if flat else lies
    stages = [draft.reshape(rows, x.codes)] if flat else []
    if wide:
        draft.rewrites.append("SOFTMAX to int16 and a table: to 8 bits it has the scale 1/256 alone")
        stages += _wide(draft, rows, out)
    else:
        stages.append(Stage("SOFTMAX", rows, out, options={"beta": 1.0}))
    if flat:
        stages.append(draft.reshape(lies, out))
    if layout in (native(len(shape)), draft.layout_of(op.x)):
        draft.run((x.tensor,), stages, op.outputs[0], layout)
        return
    made = draft.run((x.tensor,), stages, f"{op.outputs[0]}/rows", layout)
    draft.run((made.tensor,), [draft.turn(made, native(len(shape)))], op.outputs[0], native(len(shape)))


def _wide(draft: Draft, rows: tuple[int, ...], out: Codes) -> list[Stage]:
    """SOFTMAX to int16, and the code each of its 65,536 becomes."""
    every = np.arange(1 << 16)
    m, shift = quantize_multiplier(WIDE_SOFTMAX.scale / out.scale)
    codes: Array = output_codes(every, m, shift, out.zero, *bounds(Clamp(), out), dtype=out.dtype.type)
    return [
        Stage("SOFTMAX", rows, WIDE_SOFTMAX, options={"beta": 1.0}),
        Stage("CAST", rows, None, dtype="int32"),
        Stage("ADD", rows, None, (draft.ints([1 << 15]),), options={"fused_activation_function": 0}, dtype="int32"),
        Stage("GATHER", rows, out, before=(draft.constant(codes, out),), options={"axis": 0}),
    ]
