"""Faults of an engine, as data: what goes wrong (`KINDS`), at which step, and the seed of what is picked there.

Each kind is a mistake that int8 engines, compilers and drivers have been seen to make. It changes one step only: its IR
operator (weights, scales, pads), the profile it runs under (rounding, accumulator), what it reads, or what it stores.
The step is otherwise computed by the profile's own arithmetic, so that nothing but the fault is illegal there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from equivcheck.errors import UnknownOption, near
from equivcheck.models.graph import Array, Graph, Step
from equivcheck.vnpu.ir import Accumulate, Binary, Clamp, Codes, Mean, Move, Op, Operand, Pool, Quantise, Softmax, Table
from equivcheck.vnpu.kernels import Inputs, Kernel, Run, bounds_of
from equivcheck.vnpu.moves import move
from equivcheck.vnpu.profiles import Profile
from equivcheck.vnpu.requantise import channel_axis
from equivcheck.vnpu.rounding import saturated

LARGER, SLIGHTLY_LARGER = 1.02, 1.003  # what a scale is multiplied by
STALE_SHARE = 4  # one in so many parts of a buffer is not written
MULTIPLIER_BITS = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to plant. `at` is `#N` (a step), or the name of a value the step stores, or "" (a seeded choice)."""

    kind: str
    at: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownOption(
                f"no fault named '{self.kind}'",
                asked=self.kind,
                nearest=near(self.kind, KINDS),
                hint="kinds: " + ", ".join(KINDS),
            )


@dataclass(frozen=True, eq=False)
class Site:
    """Where a fault is planted: an operator, its profile, the rank of what it stores (None: unknown), and the seed."""

    op: Op
    profile: Profile
    rank: int | None
    seed: int

    def kernel(self, op: Op | None = None, **changed: Any) -> Kernel:
        """The operator (or `op` in its place) under the profile, `changed` by field."""
        return Kernel(op or self.op, replace(self.profile, **changed))

    def pick(self, count: int) -> int:
        return int(np.random.default_rng(self.seed).integers(count))

    @property
    def out(self) -> Codes:
        return out_codes(self.op)

    @property
    def bounds(self) -> tuple[int, int]:
        clamp = getattr(self.op, "clamp", Clamp())
        return bounds_of(clamp, self.out, self.profile)


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of fault: what it is in a few words, which operators can have it, and how it is built."""

    name: str
    summary: str
    applicable: Callable[[Op], bool]
    build: Callable[[Site], Run]


@dataclass(frozen=True, eq=False)
class Planted:
    """A fault in its place: `run` stands in for the step's kernel."""

    fault: Fault
    step: Step
    run: Run

    @property
    def text(self) -> str:
        """What a report says of the side that has it."""
        return f"A PLANTED FAULT: {self.fault.kind} at #{self.step.id} {self.step.op_type} (seed {self.fault.seed})"


def plant(fault: Fault, graph: Graph, on_npu: Mapping[int, Op], on_cpu: Mapping[int, str], profile: Profile) -> Planted:
    """Build the faulty kernel. `on_npu` are the operators the NPU runs by step, `on_cpu` why the others are not there.

    Raises UnknownOption where there is no such step, it runs on the CPU, or the kind cannot be planted there; the text
    lists the steps that can have it.
    """
    kind = KINDS[fault.kind]
    able = [step for step, op in on_npu.items() if kind.applicable(op)]
    step = _asked(fault, graph, able)
    if step.id not in able:
        raise _refusal(fault, step, able, on_cpu.get(step.id))
    op = on_npu[step.id]
    return Planted(fault, step, kind.build(Site(op, profile, _rank(graph, op), fault.seed)))


def _asked(fault: Fault, graph: Graph, able: Sequence[int]) -> Step:
    steps = {step.id: step for step in graph.steps}
    if not fault.at:
        if not able:
            raise UnknownOption(f"no step on the NPU can have the fault {fault.kind}", asked=fault.kind)
        return steps[able[int(np.random.default_rng(fault.seed).integers(len(able)))]]
    if fault.at in graph.step_of_value:
        return graph.step_of_value[fault.at]
    number = fault.at.removeprefix("#")
    if not number.isdecimal() or int(number) not in steps:
        raise UnknownOption(f"at={fault.at}: no such step", asked=fault.at, hint=f"steps are #1 to #{len(steps)}")
    return steps[int(number)]


def _refusal(fault: Fault, step: Step, able: Sequence[int], on_cpu: str | None) -> UnknownOption:
    where = f"step #{step.id} {step.op_type}"
    problem = (
        f"{where} runs on the CPU ({on_cpu}), where the NPU has no fault"
        if on_cpu is not None
        else f"{where} cannot have the fault {fault.kind} ({KINDS[fault.kind].summary})"
    )
    can = f"steps that can: {_listed(able)}" if able else "no step of this model on the NPU can"
    return UnknownOption(problem, asked=f"at={fault.at}", hint=can)


def _listed(steps: Sequence[int], most: int = 40) -> str:
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return ", ".join(f"#{step}" for step in steps[:most]) + more


def _rank(graph: Graph, op: Op) -> int | None:
    if isinstance(op, Accumulate) and op.convolves and not isinstance(op.weight, Operand):
        return op.weight.ndim
    if isinstance(op, Pool):
        return 2 + len(op.kernel)
    value = graph.values.get(op.outputs[0])
    return None if value is None or value.shape is None else len(value.shape)


def out_codes(op: Op) -> Codes:
    """Quantisation of an operator's (first) output."""
    if isinstance(op, Move):
        return op.out[0] or op.inputs[0].codes
    return op.out  # type: ignore[attr-defined]  # all others have one


# -- which operators ---------------------------------------------------------------------------------------------------


def _computes(op: Op) -> bool:
    """Operators that round: all but moved and compared codes."""
    return not isinstance(op, Move) and op.kind != "MaxPool"


def _weighted(op: Op) -> bool:
    return isinstance(op, Accumulate) and isinstance(op.weight, np.ndarray)


def _slides(op: Op) -> bool:
    """Convolutions and pools with a window wider than one."""
    if isinstance(op, Pool):
        return max(op.kernel) > 1
    if not isinstance(op, Accumulate) or not op.convolves or op.kind != "Conv":
        return False
    return max(op.weight.shape[2:]) > 1  # type: ignore[union-attr]  # a Conv's weight is an array, never an operand


def _pads(op: Op) -> tuple[int, ...]:
    """Explicit pads (begins..., ends...) of a Conv or Pool; () where it has none, or an auto_pad."""
    if isinstance(op, Pool):
        return op.pads if op.auto_pad == "NOTSET" and any(op.pads) else ()
    if not isinstance(op, Accumulate) or op.kind != "Conv":
        return ()
    auto = op.attributes.get("auto_pad", b"NOTSET")
    pads = tuple(int(p) for p in op.attributes.get("pads", ()))
    return pads if auto in (b"NOTSET", "NOTSET", b"", "") and any(pads) and min(pads) >= 0 else ()


def _strides(op: Op) -> tuple[int, ...]:
    if isinstance(op, Pool):
        return op.strides
    if not isinstance(op, Accumulate) or op.kind != "Conv":
        return ()
    assert isinstance(op.weight, np.ndarray)
    return tuple(int(s) for s in op.attributes.get("strides", (1,) * (op.weight.ndim - 2)))


def _source(op: Op) -> Operand | None:
    """The operand a fault of reading is planted in."""
    if isinstance(op, Binary):
        return op.a
    found = getattr(op, "x", None)
    return found if isinstance(found, Operand) else None


def _with_source(op: Op, codes: Codes) -> Op:
    if isinstance(op, Binary):
        return replace(op, a=replace(op.a, codes=codes))
    return replace(op, x=replace(_source(op), codes=codes))  # type: ignore[call-arg,type-var]  # all have x


def _with_attributes(op: Op, **changed: Any) -> Op:
    if isinstance(op, Pool):
        return replace(op, **changed)
    assert isinstance(op, Accumulate)
    return replace(op, attributes={**op.attributes, **changed})


# -- weights, biases, scales -------------------------------------------------------------------------------------------


def _edits(edit: Callable[[Any, Site], Op]) -> Callable[[Site], Run]:
    return lambda site: site.kernel(edit(site.op, site)).run


def _weight_axis(op: Accumulate) -> int:
    assert isinstance(op.weight, np.ndarray)
    return {"Conv": 0, "ConvTranspose": 1}.get(op.kind, op.weight.ndim - 1)


def _sign_flipped(op: Accumulate, site: Site) -> Op:
    assert isinstance(op.weight, np.ndarray)
    weight = np.moveaxis(op.weight.copy(), _weight_axis(op), 0)
    weight[site.pick(weight.shape[0])] *= -1
    return replace(op, weight=np.moveaxis(weight, 0, _weight_axis(op)))


def _narrow_bias(op: Accumulate, site: Site) -> Op:
    assert op.bias is not None
    return replace(op, bias=op.bias.astype(np.int16).astype(np.int64))


def _per_tensor(op: Accumulate, site: Site) -> Op:
    first = op.weight_scale.reshape(-1)[:1].reshape(())
    bias_scale = op.bias_scale.reshape(-1)[:1].reshape(()) if op.bias_scale.size > 1 else op.bias_scale
    return replace(op, weight_scale=first, bias_scale=bias_scale)


def _four_bits(op: Accumulate, site: Site) -> Op:
    assert isinstance(op.weight, np.ndarray)
    return replace(op, weight=(op.weight >> 4) << 4)


def _narrow_multiplier(op: Accumulate, site: Site) -> Op:
    wanted = op.x.codes.scale * op.weight_scale / op.out.scale
    mantissa, exponent = np.frexp(wanted)
    off = np.ldexp(np.rint(mantissa * 2.0**MULTIPLIER_BITS) / 2.0**MULTIPLIER_BITS, exponent) / wanted
    bias_scale = op.bias_scale * (off if op.bias_scale.size in (1, off.size) else 1.0)
    return replace(op, weight_scale=op.weight_scale * off, bias_scale=bias_scale)


def _flipped(op: Accumulate, site: Site) -> Op:
    assert isinstance(op.weight, np.ndarray)
    return replace(op, weight=np.flip(op.weight, tuple(range(2, op.weight.ndim))))


def _other_zero(op: Op, site: Site) -> Op:
    source = _source(op)
    assert source is not None
    return _with_source(op, _one_off(source.codes))


def _other_out_zero(op: Any, site: Site) -> Op:
    made: Op = replace(op, out=_one_off(op.out))
    return made


def _one_off(codes: Codes) -> Codes:
    return replace(codes, zero=codes.zero + (1 if codes.zero < codes.high else -1))


def _other_scale(factor: float) -> Callable[[Any, Site], Op]:
    return lambda op, site: replace(op, out=replace(op.out, scale=op.out.scale * factor))


def _unscaled(op: Op, site: Site) -> Op:
    if isinstance(op, Binary):
        return replace(op, b=replace(op.b, codes=op.a.codes))
    if isinstance(op, Table):
        return replace(op, x=replace(op.x, codes=op.out))
    assert isinstance(op, Move)
    out = op.out[0] or op.inputs[0].codes
    return replace(op, inputs=tuple(replace(operand, codes=out) for operand in op.inputs))


def _rescales(op: Op) -> bool:
    if isinstance(op, Binary):
        return op.a.codes != op.b.codes
    if isinstance(op, Table):
        return not op.nodes and op.x.codes != op.out
    return isinstance(op, Move) and op.out[0] is not None and any(o.codes != op.out[0] for o in op.inputs)


# -- rounding and accumulators -----------------------------------------------------------------------------------------


def _rounds(mode: str) -> Callable[[Site], Run]:
    """Another rounding: by the profile's own stage where it has one, else of the real value."""

    def build(site: Site) -> Run:
        if isinstance(site.op, Accumulate):
            return site.kernel(requantise_rounding=mode, requantise_double_rounding=False).run
        return _from_real(site, lambda real: saturated(real, site.out, mode, site.bounds))

    return build


def _from_real(site: Site, quantise: Callable[[Array], Array]) -> Run:
    """Codes by `quantise` of the step's real value (codes without zero point, float64)."""
    kernel = site.kernel()
    return lambda inputs: {name: quantise(real - site.out.zero) for name, real in kernel.real(inputs).items()}


def _rounds_twice(site: Site) -> Run:
    def quantise(real: Array) -> Array:
        halves = np.floor(np.abs(real) * 2.0 + 0.5) * 0.5
        return saturated(np.copysign(halves, real), site.out, "half-away", site.bounds)

    return _from_real(site, quantise)


def _accumulates(overflow: str) -> Callable[[Site], Run]:
    """A 16-bit accumulator. Rounded once: LiteRT's FULLY_CONNECTED stage, the only other, knows no overflow."""
    changed: dict[str, Any] = {
        "accumulator_bits": 16,
        "accumulator_overflow": overflow,
        "requantise_double_rounding": False,
    }
    return lambda site: site.kernel(**changed).run


def _pool_twice(site: Site) -> Run:
    """The mean is rounded in the input's scale, and that code rescaled: what an average pool without rescaling does."""
    op: Any = site.op
    first = replace(op, out=op.x.codes, clamp=Clamp())
    kernel = Kernel(first, replace(site.profile, pool_arithmetic="float64"))
    source, out = op.x.codes, op.out

    def run(inputs: Inputs) -> dict[str, Array]:
        codes = kernel.run(inputs)[op.outputs[0]].astype(np.float64)
        real = (codes - source.zero) * (source.scale / out.scale)
        return {op.outputs[0]: saturated(real, out, "half-even", site.bounds)}

    return run


def _relu_at_raw_zero(site: Site) -> Run:
    op: Any = site.op
    open_below = replace(op, clamp=replace(op.clamp, low=-np.inf)) if op.clamp.low == 0 else op
    kernel = site.kernel(open_below)
    return lambda inputs: {name: np.maximum(codes, 0) for name, codes in kernel.run(inputs).items()}


def _has_relu(op: Op) -> bool:
    """A Relu, written out or as the clipping of a Q whose zero point is its lowest code; raw 0 is somewhere else."""
    if not isinstance(op, Accumulate | Binary):
        return False
    return op.out.zero != 0 and (op.clamp.low == 0 or op.out.zero == op.out.low)


def _shifted_table(site: Site) -> Run:
    def change(codes: Array) -> Array:
        lifted: Array = np.minimum(codes, np.iinfo(codes.dtype).max - 1) + codes.dtype.type(1)
        return lifted

    return _reads(site, change)


# -- what is read ------------------------------------------------------------------------------------------------------


def _reads(site: Site, change: Callable[[Array], Array], op: Op | None = None) -> Run:
    """The honest operator (or `op`) on a changed source."""
    kernel = site.kernel(op)
    source = _source(site.op)
    assert source is not None
    name = source.name

    def run(inputs: Inputs) -> dict[str, Array]:
        return kernel.run({**inputs, name: np.ascontiguousarray(change(inputs[name]))})

    return run


def _raw_zero_pads(site: Site) -> Run:
    op = site.op
    if isinstance(op, Move):
        return _raw_zero_fill(site, op)
    pads = _pads(op)
    half = len(pads) // 2
    widths = [(0, 0), (0, 0), *zip(pads[:half], pads[half:], strict=True)]
    unpadded = _with_attributes(op, pads=(0,) * len(pads))
    return _reads(site, lambda x: np.pad(x, widths, constant_values=0), unpadded)


def _raw_zero_fill(site: Site, op: Move) -> Run:
    kernel = site.kernel()

    def run(inputs: Inputs) -> dict[str, Array]:
        made = kernel.run(inputs)[op.outputs[0]]
        inside = np.ones(inputs[op.inputs[0].name].shape, np.int8)
        (covered,) = move("Pad", [inside], op.attributes, op.constants, 0, 1)
        return {op.outputs[0]: np.where(covered == 1, made, 0).astype(made.dtype)}

    return run


def _pads_with_zero_point(op: Op) -> bool:
    if isinstance(op, Move):
        mode = op.attributes.get("mode", b"constant")
        return op.kind == "Pad" and mode in (b"constant", "constant") and out_codes(op).zero != 0
    if isinstance(op, Pool):
        return op.kind == "MaxPool" and bool(_pads(op)) and op.x.codes.signed
    return isinstance(op, Accumulate) and bool(_pads(op)) and op.x.codes.zero != 0


def _shifted_pads(op: Op, site: Site) -> Op:
    pads = list(_pads(op))
    half = len(pads) // 2
    axes = [k for k in range(half) if pads[k] or pads[k + half]]
    axis = axes[site.pick(len(axes))]
    step = 1 if pads[axis + half] else -1
    pads[axis] += step
    pads[axis + half] -= step
    return _with_attributes(op, pads=tuple(pads))


def _shifted_stride(site: Site) -> Run:
    """Every window starts one element late along an axis that has a stride."""
    axes = [2 + k for k, stride in enumerate(_strides(site.op)) if stride > 1]
    axis = axes[site.pick(len(axes))]
    source = _source(site.op)
    assert source is not None

    def change(x: Array) -> Array:
        last = np.full_like(np.take(x, [0], axis), source.codes.zero)
        return np.concatenate([np.take(x, range(1, x.shape[axis]), axis), last], axis)

    return _reads(site, change)


def _no_halo(site: Site) -> Run:
    """Two tiles of rows, each without the rows of the other: at their border the zero point is read instead."""
    kernel = site.kernel()
    source = _source(site.op)
    assert source is not None
    stride = _strides(site.op)[0]

    def run(inputs: Inputs) -> dict[str, Array]:
        x = inputs[source.name]
        honest = next(iter(kernel.run(inputs).values()))
        border = honest.shape[2] // 2
        if border == 0 or border * stride >= x.shape[2]:
            return {site.op.outputs[0]: honest}
        upper, lower = x.copy(), x.copy()
        upper[:, :, border * stride :] = source.codes.zero
        lower[:, :, : border * stride] = source.codes.zero
        parts = [next(iter(kernel.run({**inputs, source.name: tile}).values())) for tile in (upper, lower)]
        made = np.concatenate([parts[0][:, :, :border], parts[1][:, :, border:]], 2)
        return {site.op.outputs[0]: np.ascontiguousarray(made)}

    return run


# -- what is stored ----------------------------------------------------------------------------------------------------


def _stores(change: Callable[[Array, Site], Array]) -> Callable[[Site], Run]:
    """The honest result, changed as it is written."""

    def build(site: Site) -> Run:
        kernel = site.kernel()

        def run(inputs: Inputs) -> dict[str, Array]:
            made = kernel.run(inputs)
            return {name: np.ascontiguousarray(change(codes.copy(), site)) for name, codes in made.items()}

        return run

    return build


def _channels(codes: Array, site: Site) -> Array:
    """A view of `codes` with its channels first."""
    axis = channel_axis(site.op) if isinstance(site.op, Accumulate) else min(1, codes.ndim - 1)
    return np.moveaxis(codes, axis, 0)


def _raise(codes: Array, site: Site) -> None:
    """One LSB up in place, saturating at the highest code."""
    np.add(codes, 1, out=codes, where=codes < site.bounds[1])


def _one_channel_up(codes: Array, site: Site) -> Array:
    view = _channels(codes, site)
    _raise(view[site.pick(view.shape[0])], site)
    return codes


def _one_channel_floors(site: Site) -> Run:
    honest, floors = site.kernel(), _rounds("floor")(site)

    def run(inputs: Inputs) -> dict[str, Array]:
        codes = next(iter(honest.run(inputs).values())).copy()
        floored = next(iter(floors(inputs).values()))
        channel = site.pick(_channels(codes, site).shape[0])
        _channels(codes, site)[channel] = _channels(floored, site)[channel]
        return {site.op.outputs[0]: codes}

    return run


def _early(codes: Array, site: Site) -> Array:
    return np.minimum(codes, site.bounds[1] - 1).astype(codes.dtype)


def _last_column_up(codes: Array, site: Site) -> Array:
    _raise(codes[..., -1:], site)
    return codes


def _swapped(codes: Array, site: Site) -> Array:
    view = _channels(codes, site)
    first = site.pick(view.shape[0])
    other = (first + 1) % view.shape[0]
    view[[first, other]] = view[[other, first]]
    return codes


def _border_left_out(codes: Array, site: Site) -> Array:
    edge = codes[..., -1:] if site.pick(2) else codes[:, :, -1:]
    edge[...] = site.out.zero
    return codes


def _moved_layout(codes: Array, site: Site) -> Array:
    """Written channels last, read channels first."""
    return np.moveaxis(codes, 1, -1).reshape(codes.shape)


def _stale(site: Site) -> Run:
    """The last part of the buffer still holds what an earlier step stored there, not one that this step reads."""
    kernel = site.kernel()
    operands = [getattr(site.op, field, None) for field in ("x", "a", "b", "weight")]
    own = {o.name for o in (*operands, *getattr(site.op, "inputs", ())) if isinstance(o, Operand)}

    def run(inputs: Inputs) -> dict[str, Array]:
        (name, codes), *others = kernel.run(inputs).items()
        flat = codes.copy().reshape(-1)
        part = max(1, flat.size // STALE_SHARE)
        older = [a for n, a in inputs.items() if a.dtype.itemsize == 1 and n not in own] or list(inputs.values())
        large = [a for a in older if a.size >= flat.size] or older
        if large:
            left = np.resize(large[-1].reshape(-1).view(codes.dtype), flat.size)
            flat[-part:] = left[-part:]
        return {name: flat.reshape(codes.shape), **dict(others)}

    return run


# -- the list ----------------------------------------------------------------------------------------------------------


def _images(op: Op) -> bool:
    """Operators whose result surely has rows and columns."""
    if isinstance(op, Pool):
        return len(op.kernel) == 2
    return isinstance(op, Accumulate) and op.convolves and isinstance(op.weight, np.ndarray) and op.weight.ndim == 4


def _pools(op: Op) -> bool:
    return isinstance(op, Mean) or (isinstance(op, Pool) and op.kind == "AveragePool")


def _many_channels(op: Op) -> bool:
    if not _weighted(op):
        return False
    assert isinstance(op, Accumulate)
    assert isinstance(op.weight, np.ndarray)
    return op.weight.ndim > 1 and op.weight.shape[_weight_axis(op)] > 1


def _stored_codes(op: Op) -> bool:
    return not isinstance(op, Quantise)


_LIST: tuple[tuple[str, str, Callable[[Op], bool], Callable[[Site], Run]], ...] = (
    ("sign-flipped-channel", "the weights of one output channel are negated", _weighted, _edits(_sign_flipped)),
    (
        "dropped-bias", "the bias is not added",
        lambda op: isinstance(op, Accumulate) and op.bias is not None and bool(np.any(op.bias)),
        _edits(lambda op, site: replace(op, bias=np.zeros_like(op.bias))),
    ),
    (
        "narrow-bias", "the int32 bias is stored in 16 bits",
        lambda op: isinstance(op, Accumulate) and op.bias is not None and bool(np.any(np.abs(op.bias) > 32767)),
        _edits(_narrow_bias),
    ),
    (
        "per-tensor-scale", "the first of the per-channel weight scales is used for all channels",
        lambda op: isinstance(op, Accumulate) and op.weight_scale.size > 1, _edits(_per_tensor),
    ),
    ("four-bit-weights", "the low four bits of the weights are lost", _weighted, _edits(_four_bits)),
    ("truncate", "the result is rounded toward zero", _computes, _rounds("truncate")),
    ("floor", "the result is rounded down", _computes, _rounds("floor")),
    ("double-rounding", "the result is rounded to half a code first, then again", _computes, _rounds_twice),
    (
        "zero-point-off", "the input's zero point is off by one",
        lambda op: _computes(op) and _source(op) is not None and not isinstance(op, Softmax), _edits(_other_zero),
    ),
    ("output-zero-point-off", "the output's zero point is off by one", _computes, _edits(_other_out_zero)),
    ("scale-off", "the output's scale is off by 2 %", _computes, _edits(_other_scale(LARGER))),
    ("scale-slightly-off", "the output's scale is off by 0.3 %", _computes, _edits(_other_scale(SLIGHTLY_LARGER))),
    (
        "narrow-multiplier", "the requantisation multiplier has 8 bits",
        lambda op: isinstance(op, Accumulate), _edits(_narrow_multiplier),
    ),
    ("raw-zero-padding", "pads are filled with raw 0, not the zero point", _pads_with_zero_point, _raw_zero_pads),
    (
        "saturating-accumulator", "sums saturate at 16 bits",
        lambda op: isinstance(op, Accumulate), _accumulates("saturate"),
    ),
    (
        "wrapping-accumulator", "sums wrap at 16 bits",
        lambda op: isinstance(op, Accumulate), _accumulates("wrap"),
    ),
    (
        "flipped-kernel", "the kernel is mirrored (convolution for correlation)",
        lambda op: isinstance(op, Accumulate) and _slides(op), _edits(_flipped),
    ),
    (
        "pool-in-input-scale", "the mean is rounded in the input's scale, then rescaled",
        lambda op: _pools(op) and op.x.codes != op.out, _pool_twice,  # type: ignore[attr-defined]  # pools have both
    ),
    ("relu-at-raw-zero", "Relu clamps at raw 0, not at the zero point", _has_relu, _relu_at_raw_zero),
    ("swapped-channels", "two neighbouring channels are exchanged", _many_channels, _stores(_swapped)),
    ("shifted-pads", "the pad of one side is on the other", lambda op: bool(_pads(op)), _edits(_shifted_pads)),
    (
        "shifted-stride", "strided windows start one element late",
        lambda op: any(s > 1 for s in _strides(op)), _shifted_stride,
    ),
    ("tile-border", "the last row or column is not computed", _images, _stores(_border_left_out)),
    ("tile-halo", "two tiles of rows do not see each other's border", lambda op: _images(op) and _slides(op), _no_halo),
    ("stale-buffer", "a quarter of the result is what an earlier step left there", _stored_codes, _stale),
    (
        "transposed-layout", "written channels last, read channels first",
        lambda op: _images(op) and (_many_channels(op) or isinstance(op, Pool)), _stores(_moved_layout),
    ),
    ("rescale-left-out", "codes of one scale are taken as codes of another", _rescales, _edits(_unscaled)),
    (
        "shifted-table", "the lookup table is read one entry further",
        lambda op: isinstance(op, Table) and bool(op.nodes), _shifted_table,
    ),
    ("one-channel-up", "one channel is one code too high", _many_channels, _stores(_one_channel_up)),
    ("one-channel-floors", "one channel is rounded down", _many_channels, _one_channel_floors),
    ("saturates-early", "the highest code is never reached", _computes, _stores(_early)),
    ("last-column-up", "the last column is one code too high", _images, _stores(_last_column_up)),
)  # fmt: skip

KINDS: dict[str, Kind] = {name: Kind(name, summary, able, build) for name, summary, able, build in _LIST}
