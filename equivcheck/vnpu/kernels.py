"""Kernels: an IR operator under a profile becomes a function from stored codes to stored codes.

Everything that depends on the model alone (weights, multipliers, tables) is made once, in `build`. A binary operator of
8-bit codes has 65,536 possible results and a unary one 256, so both are looked up, whatever the arithmetic; measured on
64 Ki elements: 1.3 and 0.6 ns an element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from equivcheck.engines.ort import OrtEngine
from equivcheck.models.graph import Array
from equivcheck.vnpu import islands, ort_arithmetic, real, tflite_arithmetic, windows
from equivcheck.vnpu import resize as resizing
from equivcheck.vnpu.accumulate import Accumulator
from equivcheck.vnpu.ir import (
    Accumulate,
    Binary,
    Chain,
    Clamp,
    Codes,
    Island,
    Mean,
    Move,
    Op,
    Operand,
    Pool,
    Quantise,
    Reduce,
    Resize,
    Softmax,
    Table,
    raw,
)
from equivcheck.vnpu.moves import move
from equivcheck.vnpu.profiles import Profile
from equivcheck.vnpu.requantise import output_stage
from equivcheck.vnpu.rounding import BLOCK, code_bounds, saturated

Inputs = Mapping[str, Array]
Run = Callable[[Inputs], dict[str, Array]]
Bounds = tuple[int, int]


class Kernel:
    """One operator, ready to run: `run(inputs)` under the profile, `real(inputs)` by definition (see real.py)."""

    def __init__(self, op: Op, profile: Profile, accumulator: Accumulator | None = None) -> None:
        self.op = op
        links = op.links if isinstance(op, Chain) else (op,)
        sums = next((link for link in links if isinstance(link, Accumulate)), None)
        self._accumulator = Accumulator(sums) if accumulator is None and sums is not None else accumulator
        self.run: Run = self._build(profile)

    def real(self, inputs: Inputs) -> dict[str, Array]:
        """Unrounded results in codes of each output, zero point included, before saturation (float64)."""
        zeros = self._zeros()
        return {
            name: value + zero
            for (name, value), zero in zip(real.real(self.op, inputs, self._accumulator).items(), zeros, strict=True)
        }

    def _zeros(self) -> list[int]:
        if isinstance(self.op, Move):  # the others have one output
            return [(codes or self.op.inputs[0].codes).zero for codes in self.op.out]
        return [self.op.out.zero]  # type: ignore[attr-defined]  # only a Move has several

    def _build(self, profile: Profile) -> Run:
        op = self.op
        if isinstance(op, Accumulate):
            assert self._accumulator is not None
            return _accumulate(op, profile, self._accumulator)
        if isinstance(op, Binary):
            return _binary(op, profile)
        if isinstance(op, Pool):
            return _max_pool(op, profile) if op.kind == "MaxPool" else _average_pool(op, profile)
        if isinstance(op, Mean):
            return _mean(op, profile)
        if isinstance(op, Table):
            return _one(op.outputs[0], op.x.name, _lookup(unary_table(op, profile)))
        if isinstance(op, Reduce):
            return _reduce(op, profile)
        if isinstance(op, Resize):
            return _one(op.outputs[0], op.x.name, _resize(op, profile))
        if isinstance(op, Island):
            return _island(op, profile)
        if isinstance(op, Chain):
            return _chain(op, profile, self._accumulator)
        if isinstance(op, Softmax):
            return _softmax(op, profile)
        if isinstance(op, Move):
            return _move(op, profile)
        assert isinstance(op, Quantise)
        return _quantise(op, profile)


def bounds_of(clamp: Clamp, out: Codes, profile: Profile) -> Bounds:
    return code_bounds(clamp, out, profile.quantise_precision, profile.quantise_rounding)


def _one(output: str, source: str, function: Callable[[Array], Array]) -> Run:
    return lambda inputs: {output: function(inputs[source])}


def _accumulate(op: Accumulate, profile: Profile, accumulator: Accumulator) -> Run:
    stage = output_stage(op, profile, accumulator.bounds)

    def run(inputs: Inputs) -> dict[str, Array]:
        other = inputs[op.weight.name] if isinstance(op.weight, Operand) else None
        return {op.outputs[0]: stage(accumulator.sums(inputs[op.x.name], other))}

    return run


# -- lookups -----------------------------------------------------------------------------------------------------------


def _lookup(table: Array) -> Callable[[Array], Array]:
    """Codes through a table. bytes.translate needs no index array: 0.6 ns an element against 1.1 of np.take."""
    if table.size > 256 or table.itemsize > 1:
        return lambda codes: np.take(table, raw(codes))
    entries = table.tobytes()

    def look_up(codes: Array) -> Array:
        found = bytearray(codes.tobytes()).translate(entries)
        return np.frombuffer(found, table.dtype).reshape(codes.shape)

    return look_up


def unary_table(op: Table, profile: Profile) -> Array:
    """The code each code becomes, by the raw bits of the input code."""
    bounds = (op.out.low, op.out.high)
    if profile.table_arithmetic == "float64":
        return saturated(real.tabulated(op), op.out, profile.table_rounding)
    if profile.table_arithmetic == "ort":
        x = ort_arithmetic.dequantised(op.x.codes, op.x.codes.all())
        return ort_arithmetic.quantised(islands.evaluate_float32(op, x), op.out, bounds)
    if wide(op.x.codes, op.out):
        return saturated(real.tabulated(op), op.out, profile.quantise_rounding)
    return tflite_arithmetic.unary_table(op)


def rescale_table(source: Codes, out: Codes, profile: Profile) -> Array | None:
    """DQ-Q between two scales as a table; None where nothing changes."""
    if source == out:
        return None
    if profile.table_arithmetic == "float64":
        return saturated(real.rescaled(source, out), out, profile.table_rounding)
    if profile.table_arithmetic == "ort":
        return ort_arithmetic.quantised(ort_arithmetic.dequantised(source, source.all()), out)
    if wide(source, out):
        return saturated(real.rescaled(source, out), out, profile.quantise_rounding)
    return tflite_arithmetic.rescale_table(source, out)


def wide(*codes: Codes) -> bool:
    """Whether 16-bit codes take part: the engines' 8-bit kernels do not apply."""
    return any(c.bits > 8 for c in codes)


def _precise(op: Op, profile: Profile, bounds: Bounds) -> Run:
    """The real value, rounded once as the profile quantises: where the engine has no integer kernel that is known."""
    out: Codes = op.out  # type: ignore[attr-defined]  # all that come here have one
    return lambda inputs: {
        name: saturated(value, out, profile.quantise_rounding, bounds) for name, value in real.real(op, inputs).items()
    }


def _rescaled(array: Array, source: Codes, out: Codes, profile: Profile) -> Array:
    table = rescale_table(source, out, profile)
    return array if table is None else _lookup(table)(array)


# -- two operands ------------------------------------------------------------------------------------------------------


def _binary(op: Binary, profile: Profile) -> Run:
    bounds = bounds_of(op.clamp, op.out, profile)
    if wide(op.a.codes, op.b.codes, op.out):
        return _wide_binary(op, profile, bounds)
    tables: dict[str, Array] = {}

    def table(scalar: str) -> Array:
        if scalar not in tables:
            tables[scalar] = binary_table(op, profile, bounds, scalar).reshape(-1)
        return tables[scalar]

    table("")

    def run(inputs: Inputs) -> dict[str, Array]:
        a, b = (o.constant if o.constant is not None else inputs[o.name] for o in (op.a, op.b))
        scalar = _scalar_side(a.shape, b.shape) if op.kind == "Add" and profile.elementwise_arithmetic == "ort" else ""
        return {op.outputs[0]: _pairs(a, b, table(scalar))}

    return run


def _wide_binary(op: Binary, profile: Profile, bounds: Bounds) -> Run:
    if profile.elementwise_arithmetic != "ort":
        return _precise(op, replace(profile, quantise_rounding=_elementwise_rounding(profile)), bounds)

    def run(inputs: Inputs) -> dict[str, Array]:
        a, b = (
            ort_arithmetic.dequantised(o.codes, o.constant if o.constant is not None else inputs[o.name])
            for o in (op.a, op.b)
        )
        return {op.outputs[0]: ort_arithmetic.float32_binary(op, a, b, bounds)}

    return run


def _elementwise_rounding(profile: Profile) -> str:
    return profile.elementwise_rounding if profile.elementwise_arithmetic == "float64" else profile.quantise_rounding


def binary_table(op: Binary, profile: Profile, bounds: Bounds, scalar: str = "") -> Array:
    """256 x 256 codes, by the raw bytes of a and b."""
    if profile.elementwise_arithmetic == "float64":
        a, b = ((o.codes.all() - o.codes.zero) * o.codes.scale for o in (op.a, op.b))
        return saturated(real.binary(op, a[:, None], b[None, :]), op.out, profile.elementwise_rounding)
    if profile.elementwise_arithmetic == "ort":
        return ort_arithmetic.binary_table(op, bounds, scalar)
    return tflite_arithmetic.binary_table(op, bounds)


def _scalar_side(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    """Which side ONNX Runtime's broadcaster hands over as one element a span: the one broadcast along the last axis."""
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    for left, right in zip(reversed(a), reversed(b), strict=True):
        if left != right:
            return "a" if left == 1 else "b"
        if left > 1:
            return ""
    return "b"


def _pairs(a: Array, b: Array, table: Array) -> Array:
    """table[a, b] in cache-sized blocks, the 16-bit index made in place."""
    if a.shape != b.shape:
        a, b = np.broadcast_arrays(a, b)
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    out = np.empty(first.size, table.dtype)
    index = np.empty(min(BLOCK, first.size), np.uint16)
    for start in range(0, first.size, BLOCK):
        part = slice(start, start + BLOCK)
        at = index[: first[part].size]
        np.copyto(at, first[part])
        np.left_shift(at, 8, out=at)
        np.bitwise_or(at, second[part], out=at)
        np.take(table, at, out=out[part], mode="clip")
    return out.reshape(a.shape)


# -- pools and means ---------------------------------------------------------------------------------------------------


def _max_pool(op: Pool, profile: Profile) -> Run:
    bounds = bounds_of(op.clamp, op.out, profile)

    def run(inputs: Inputs) -> dict[str, Array]:
        made = _rescaled(windows.maxima(op, inputs[op.x.name]), op.x.codes, op.out, profile)
        return {op.outputs[0]: made if op.clamp.idle else np.clip(made, *bounds).astype(op.out.dtype)}

    return run


def _average_pool(op: Pool, profile: Profile) -> Run:
    bounds = bounds_of(op.clamp, op.out, profile)
    if profile.pool_arithmetic == "float64" and profile.pool_scale == "input":
        return _in_input_scale(op, profile, bounds)
    if profile.pool_arithmetic == "float64":
        return _precise(op, replace(profile, quantise_rounding=profile.pool_rounding), bounds)
    if wide(op.x.codes, op.out):
        return _precise(op, profile, bounds)
    pool = ort_arithmetic.average_pool if profile.pool_arithmetic == "ort" else tflite_arithmetic.average_pool
    return _one(op.outputs[0], op.x.name, lambda codes: pool(op, codes, bounds))


def _in_input_scale(op: Pool | Mean, profile: Profile, bounds: Bounds) -> Run:
    """The mean is rounded to a code of the input, and that code rescaled: what TOSA's AVG_POOL2D does to a pool."""
    first = replace(op, out=op.x.codes, clamp=Clamp())
    mean = _precise(first, replace(profile, quantise_rounding=profile.pool_rounding), (first.out.low, first.out.high))

    def run(inputs: Inputs) -> dict[str, Array]:
        made = _rescaled(mean(inputs)[op.outputs[0]], op.x.codes, op.out, profile)
        return {op.outputs[0]: made if op.clamp.idle else np.clip(made, *bounds).astype(op.out.dtype)}

    return run


def _mean(op: Mean, profile: Profile) -> Run:
    bounds = bounds_of(op.clamp, op.out, profile)
    if profile.pool_scale == "input" and op.kind == "GlobalAveragePool":
        half_away = replace(profile, pool_rounding="half-away")  # the rounding of TFLite's AVERAGE_POOL_2D
        return _in_input_scale(op, half_away if profile.pool_arithmetic == "tflite" else profile, bounds)
    if profile.pool_arithmetic == "float64":
        return _precise(op, replace(profile, quantise_rounding=profile.pool_rounding), bounds)
    if wide(op.x.codes, op.out):
        return _precise(op, profile, bounds)
    if profile.pool_arithmetic == "ort":
        return _one(op.outputs[0], op.x.name, _ort_mean(op, bounds))
    return _one(op.outputs[0], op.x.name, lambda codes: tflite_arithmetic.mean(op, codes, bounds))


def _reduce(op: Reduce, profile: Profile) -> Run:
    bounds = bounds_of(op.clamp, op.out, profile)
    if op.kind != "ReduceSum":

        def largest(codes: Array) -> Array:
            made = _rescaled(real.extreme(op, codes), op.x.codes, op.out, profile)
            return made if op.clamp.idle else np.clip(made, *bounds).astype(op.out.dtype)

        return _one(op.outputs[0], op.x.name, largest)
    if profile.pool_arithmetic == "float64":
        return _precise(op, replace(profile, quantise_rounding=profile.pool_rounding), bounds)
    if wide(op.x.codes, op.out):
        return _precise(op, profile, bounds)
    if profile.pool_arithmetic == "ort":
        return _one(op.outputs[0], op.x.name, _ort_mean(op, bounds))
    return _one(op.outputs[0], op.x.name, lambda codes: tflite_arithmetic.total(op, codes, bounds))


def _ort_mean(op: Mean | Reduce, bounds: Bounds) -> Callable[[Array], Array]:
    """GlobalAveragePool has an int8 kernel; the others have none, so their own float32 kernel runs between DQ and Q."""
    if isinstance(op, Mean) and op.kind == "GlobalAveragePool":
        return lambda codes: ort_arithmetic.global_average(op, codes, bounds)
    engine = OrtEngine()
    engine.load(_reduce_model(op), {"optimization": "disable", "threads": 1})

    def run(codes: Array) -> Array:
        x = ort_arithmetic.dequantised(op.x.codes, codes)
        return ort_arithmetic.quantised(engine.run({"x": x}, ["y"])["y"], op.out, bounds)

    return run


def _reduce_model(op: Mean | Reduce) -> bytes:
    from onnx import TensorProto, helper

    axes = {"axes": list(op.axes)} if op.axes else {}
    node = helper.make_node(op.kind, ["x"], ["y"], keepdims=int(op.keepdims), **axes)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    graph = helper.make_graph([node], "mean", ports[:1], ports[1:])
    opset = 11 if op.kind == "ReduceSum" else 17  # the last with axes as an attribute
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return bytes(model.SerializeToString())


def _softmax(op: Softmax, profile: Profile) -> Run:
    everything = (op.out.low, op.out.high)
    if profile.softmax_arithmetic == "float64":
        return _precise(op, replace(profile, quantise_rounding=profile.softmax_rounding), everything)
    if wide(op.x.codes, op.out):
        return _precise(op, profile, everything)
    made = {
        "ort": lambda codes: ort_arithmetic.softmax(op, codes),
        "tflite": lambda codes: tflite_arithmetic.softmax(op, codes),
    }[profile.softmax_arithmetic]
    return _one(op.outputs[0], op.x.name, made)


# -- resizing, islands, chains ----------------------------------------------------------------------------------------


def _resize(op: Resize, profile: Profile) -> Callable[[Array], Array]:
    if op.mode == "nearest":
        return _nearest(op, profile)
    if profile.table_arithmetic == "ort":
        return ort_arithmetic.resize(op)
    if profile.table_arithmetic == "tflite" and not wide(op.x.codes, op.out):
        made = tflite_arithmetic.resize_linear(op)
        if made is not None:
            return lambda codes: _rescaled(made(codes), op.x.codes, op.out, profile)
    rounding = profile.table_rounding if profile.table_arithmetic == "float64" else profile.quantise_rounding
    return lambda codes: saturated(real.resized(op, codes), op.out, rounding)


def _nearest(op: Resize, profile: Profile) -> Callable[[Array], Array]:
    """Codes change place, then scale."""
    outside = code_bounds(Clamp(low=op.outside), op.x.codes, profile.quantise_precision, profile.quantise_rounding)[0]
    return lambda codes: _rescaled(resizing.nearest(op, codes, outside), op.x.codes, op.out, profile)


def _island(op: Island, profile: Profile) -> Run:
    everything = (op.out.low, op.out.high)
    if profile.table_arithmetic == "float64":
        return _precise(op, replace(profile, quantise_rounding=profile.table_rounding), everything)
    if profile.table_arithmetic != "ort":
        return _precise(op, profile, everything)
    nodes = islands.Float32(op.nodes, tuple(op.sources), op.constants, op.result)

    def run(inputs: Inputs) -> dict[str, Array]:
        feeds = {name: ort_arithmetic.dequantised(o.codes, inputs[o.name]) for name, o in op.sources.items()}
        return {op.outputs[0]: ort_arithmetic.quantised(nodes(feeds), op.out, everything)}

    return run


def _chain(op: Chain, profile: Profile, accumulator: Accumulator | None) -> Run:
    kernels = [Kernel(link, profile, accumulator if isinstance(link, Accumulate) else None) for link in op.links]

    def run(inputs: Inputs) -> dict[str, Array]:
        known = dict(inputs)
        for kernel in kernels:
            known |= kernel.run(known)
        return {name: known[name] for name in op.outputs}

    return run


# -- movement and the float boundary -----------------------------------------------------------------------------------


def _move(op: Move, profile: Profile) -> Run:
    out = [codes or op.inputs[0].codes for codes in op.out]
    alike = all(codes == out[0] for codes in out)
    fill = int(op.constants[2].ravel()[0]) if 2 in op.constants and op.constants[2].size and op.kind == "Pad" else 0
    if op.kind == "Pad" and op.out[0] is not None:
        fill = code_bounds(Clamp(low=real.pad_real(op)), out[0], profile.quantise_precision, profile.quantise_rounding)[
            0
        ]
    if op.kind == "Concat" or alike:  # requantised first: Pad then fills with codes of the output
        tables = [rescale_table(operand.codes, out[0], profile) for operand in op.inputs]
        late: list[Array | None] = [None] * len(out)
    else:
        tables, late = [None], [rescale_table(op.inputs[0].codes, codes, profile) for codes in out]

    def run(inputs: Inputs) -> dict[str, Array]:
        arrays = [operand.constant if operand.constant is not None else inputs[operand.name] for operand in op.inputs]
        arrays = [a if t is None else _lookup(t)(a) for a, t in zip(arrays, tables, strict=True)]
        moved = move(op.kind, arrays, op.attributes, op.constants, fill, len(out))
        moved = [m if t is None else _lookup(t)(m) for m, t in zip(moved, late, strict=True)]
        return dict(zip(op.outputs, moved, strict=True))

    return run


def _quantise(op: Quantise, profile: Profile) -> Run:
    kind = np.dtype(profile.quantise_precision)
    scale = np.asarray(op.out.scale, kind)

    def run(inputs: Inputs) -> dict[str, Array]:
        x = inputs[op.name]
        codes = np.empty(x.shape, op.out.dtype)
        flat, target = np.ascontiguousarray(x).reshape(-1), codes.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            part = slice(start, start + BLOCK)
            with np.errstate(over="ignore"):
                target[part] = saturated(flat[part].astype(kind) / scale, op.out, profile.quantise_rounding)
        return {op.outputs[0]: codes}

    return run
