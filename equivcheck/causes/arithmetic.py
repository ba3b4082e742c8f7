"""Hypotheses that recompute the step: one thing of its operator is changed, and the reals are evaluated anew.

The reals are those of `exact` (vnpu/real.py). What changes a convolution's requantisation alone reuses its sums; a zero
point or a pad of another value adds a multiple of one more convolution; only other weights, pads and strides are
convolved again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from equivcheck.causes.hypotheses import Hypothesis, Step
from equivcheck.models.graph import Array
from equivcheck.vnpu import real
from equivcheck.vnpu.accumulate import Accumulator
from equivcheck.vnpu.ir import Accumulate, Binary, Chain, Clamp, Codes, Mean, Move, Op, Operand, Pool, Table
from equivcheck.vnpu.moves import move
from equivcheck.vnpu.requantise import channel_axis, narrowed, product_scale

NARROW_BITS = range(6, 16)  # of a multiplier that is too narrow; fewer would be seen by eye
ACCUMULATOR_BITS = (16, 20, 24)
_MOST_INPUTS = 8  # of a Concat, tried one by one
_HALO_ROWS = 4  # a border between two tiles spoils no more rows than a kernel has


class Recomputed:
    """One step's operator on the inputs it had. `real(core)` evaluates the step with `core` in place of its own operator.

    A step may be a chain of moves around the operator that computes; that one is `core`.
    """

    def __init__(self, op: Op, inputs: Mapping[str, Array], output: str) -> None:
        self.inputs = inputs
        self.output = output
        self._op = op
        self._links = op.links if isinstance(op, Chain) else (op,)
        self._place = next((k for k, link in enumerate(self._links) if not _moves(link)), len(self._links) - 1)
        self.core = self._links[self._place]

    @property
    def out(self) -> Codes:
        if isinstance(self._op, Move):
            return self._op.out[self._op.outputs.index(self.output)] or self._op.inputs[0].codes
        found: Codes = self._op.out  # type: ignore[attr-defined]  # all others have one
        return found

    @property
    def clamp(self) -> Clamp:
        found: Clamp = getattr(self.core, "clamp", Clamp())
        return found

    @cached_property
    def unclamped(self) -> Any:
        """`core` without its Relu or Clip."""
        return self.core if self.clamp.idle else replace(self.core, clamp=Clamp())  # type: ignore[call-arg]  # it has one

    @cached_property
    def open(self) -> Array:
        """The real value before Relu, Clip and saturation, in codes."""
        return self.real(self.unclamped, sums=self.sums if self.has_weights else None)

    def real(self, core: Op, inputs: Mapping[str, Array] | None = None, sums: Array | None = None) -> Array:
        """Reals in codes of the step's output (float64, zero point included); `sums` stand in for the accumulated ones."""
        op = core
        if isinstance(self._op, Chain):
            op = replace(self._op, links=(*self._links[: self._place], core, *self._links[self._place + 1 :]))
        known = _Known(core, sums) if sums is not None and isinstance(core, Accumulate) else None
        return real.real(op, self.inputs if inputs is None else inputs, known)[self.output] + self.out.zero

    def reads(self, change: Callable[[Array], Array], core: Op | None = None) -> Array:
        """The same with what `core` reads as x changed."""
        source = self.core.x.name  # type: ignore[attr-defined]  # only asked where there is one
        return self.real(
            core or self.unclamped, {**self.inputs, source: np.ascontiguousarray(change(self.inputs[source]))}
        )

    # -- sums of a convolution or product with constant weights --------------------------------------------------------

    @property
    def has_weights(self) -> bool:
        """An Accumulate with constant weights whose x is a stored value."""
        core = self.core
        return isinstance(core, Accumulate) and isinstance(core.weight, np.ndarray) and core.x.name in self.inputs

    @cached_property
    def _accumulator(self) -> Accumulator:
        assert isinstance(self.core, Accumulate)
        return Accumulator(self.core)

    @cached_property
    def sums(self) -> Array:
        """The integer sums of the honest operator, float64."""
        assert isinstance(self.core, Accumulate)
        return self._accumulator.sums(self.inputs[self.core.x.name]).astype(np.float64)

    @cached_property
    def met_weights(self) -> Array:
        """For each sum, the weights that meet the input and not its pads, added up: what one code more of x adds."""
        assert isinstance(self.core, Accumulate)
        codes = self.core.x.codes
        one = 1 if codes.zero < codes.high else -1
        ones = np.full(self.inputs[self.core.x.name].shape, codes.zero + one, codes.dtype)
        return self._accumulator.sums(ones).astype(np.float64) * one

    @cached_property
    def all_weights(self) -> Array:
        """The weights of each output channel of a Conv added up, shaped to broadcast against `sums`."""
        assert isinstance(self.core, Accumulate)
        assert isinstance(self.core.weight, np.ndarray)
        weight = self.core.weight
        by_channel: Array = weight.reshape(weight.shape[0], -1).sum(axis=1)
        return by_channel.reshape(1, -1, *(1,) * (weight.ndim - 2))


class _Known(Accumulator):
    """Sums that are known already."""

    def __init__(self, op: Accumulate, sums: Array) -> None:
        self.op = op
        self.bounds = None
        self._sums = sums

    def sums(self, x: Array, weight: Array | None = None) -> Array:
        return self._sums


def _moves(link: Op) -> bool:
    return isinstance(link, Move) or (isinstance(link, Pool) and link.kind == "MaxPool")


def of_operator(step: Step, made: Recomputed) -> Iterator[Hypothesis]:
    """All hypotheses about how the step was computed."""
    core = made.core
    if not (isinstance(core, Table) and core.nodes):  # there it is a shifted table, and named so
        yield from _zero_points(step, made)
    if isinstance(core, Accumulate) and made.has_weights:
        yield from _of_biases(step, made, core)
        yield from _of_multipliers(step, made, core)
        yield from _of_accumulators(step, made, core)
        yield from _of_weights(step, made, core)
    source = getattr(core, "x", None)
    if isinstance(source, Operand) and source.name in made.inputs:
        if isinstance(core, Pool) or (isinstance(core, Accumulate) and core.kind == "Conv"):
            yield from _of_windows(step, made, core)
        yield from _of_reading(step, made)
    if isinstance(core, Pool | Mean):
        yield from _of_means(step, made, core)
    if isinstance(core, Table) and core.x.name in made.inputs:
        yield from _of_table(step, made, core)
    if isinstance(core, Binary):
        yield from _of_binary(step, made, core)
    if isinstance(core, Move):
        yield from _of_move(step, made, core)


# -- zero points -------------------------------------------------------------------------------------------------------


_OPERANDS = {"x": "input", "a": "first input", "b": "second input", "weight": "second input"}


def _zero_points(step: Step, made: Recomputed) -> Iterator[Hypothesis]:
    for field, named in _OPERANDS.items():
        operand = getattr(made.core, field, None)
        if not isinstance(operand, Operand):
            continue
        zero = operand.codes.zero
        usual = dict.fromkeys((0, zero + 1, zero - 1, zero + 128, zero - 128))
        measured = round(zero + _slope(step, _with_zero(made, field, zero + 1) - step.real))
        for other in dict.fromkeys((*usual, measured)):
            if other != zero:
                how = f"recomputed with {named} zero point {other} instead of {zero}"
                real_ = partial(_with_zero, made, field, other)
                yield step.supposing("zero_point", how, real_, fitted=0 if other in usual else 1)


def _slope(step: Step, per_unit: Array) -> float:
    """Least squares of what the stored codes are off, in units of `per_unit`, where nothing is clipped; 0 where all is."""
    use = (step.stored > step.low) & (step.stored < step.high)
    power = float(np.sum(per_unit * per_unit, where=use))
    return float(np.sum(per_unit * (step.stored - step.real), where=use)) / power if power else 0.0


def _with_zero(made: Recomputed, field: str, zero: int) -> Array:
    operand = getattr(made.core, field)
    if field == "x" and made.has_weights:
        return made.real(made.unclamped, sums=made.sums - (zero - operand.codes.zero) * made.met_weights)
    changed = {field: replace(operand, codes=replace(operand.codes, zero=zero))}
    return made.real(replace(made.unclamped, **changed))


# -- biases, multipliers, accumulators, weights ------------------------------------------------------------------------


def _requantised(step: Step, made: Recomputed, kind: str, how: str, **changed: Any) -> Hypothesis:
    """The honest sums under other fields of the operator."""
    return step.supposing(kind, how, lambda: made.real(replace(made.unclamped, **changed), sums=made.sums))


def _of_biases(step: Step, made: Recomputed, core: Accumulate) -> Iterator[Hypothesis]:
    bias = core.bias
    if bias is None or not bias.any():
        return
    yield _requantised(step, made, "bias", "recomputed without its bias", bias=np.zeros_like(bias))
    yield _requantised(step, made, "bias", "recomputed with its bias added twice", bias=2 * bias)
    yield _requantised(step, made, "bias", "recomputed with its bias subtracted", bias=-bias)
    if np.any(np.abs(bias) > 32767):
        narrow = bias.astype(np.int16).astype(np.int64)
        yield _requantised(step, made, "bias", "recomputed with its bias cut to 16 bits", bias=narrow)
        clipped = np.clip(bias, -32768, 32767)
        yield _requantised(step, made, "bias", "recomputed with its bias saturated to 16 bits", bias=clipped)
    if not np.allclose(core.bias_scale, product_scale(core), rtol=1e-3):
        how = "recomputed with its bias taken as s_x * s_w, whatever its scale says"
        yield _requantised(step, made, "bias", how, bias_scale=product_scale(core))


def _of_multipliers(step: Step, made: Recomputed, core: Accumulate) -> Iterator[Hypothesis]:
    """Wrong scales of channels. One multiplier for all channels is a fitted factor instead (see stored.py)."""
    scale = core.weight_scale.reshape(-1)
    biases = core.bias_scale.reshape(-1)
    has_bias = core.bias is not None and bool(core.bias.any())
    if has_bias:
        share = made.real(replace(made.unclamped, bias=None), sums=made.sums) - made.out.zero
        by = _slope(step, share)
        yield step.supposing(
            "scale", f"recomputed with all but the bias times {1 + by:.4g}, as by one wrong weight or input scale",
            lambda: step.real + by * share, fitted=1,
        )  # fmt: skip
    if scale.size < 2:
        return

    def scaled(kind: str, how: str, factor: Array) -> Iterator[Hypothesis]:
        """The bias scaled along, as where it is added to the sums, and by its own scale, as where it is a real."""
        if biases.size == scale.size:
            yield _requantised(step, made, kind, how, weight_scale=scale * factor, bias_scale=biases * factor)
        if biases.size != scale.size or has_bias:
            yield _requantised(step, made, kind, how, weight_scale=scale * factor)

    for how, other in (
        ("the first channel's weight scale for all channels", np.full_like(scale, scale[0])),
        ("the last channel's weight scale for all channels", np.full_like(scale, scale[-1])),
        ("the largest weight scale for all channels", np.full_like(scale, scale.max())),
        ("each channel's weight scale taken from the one before", np.roll(scale, 1)),
        ("each channel's weight scale taken from the next one", np.roll(scale, -1)),
    ):
        yield from scaled("per_channel_scale", f"recomputed with {how}", other / scale)
    mantissa = np.frexp(product_scale(core).reshape(-1) / core.out.scale)[0]
    whole = np.rint(mantissa * 2.0**31)
    for bits in NARROW_BITS:
        how = f"recomputed with multipliers of {bits} bits"
        yield from scaled("narrow_multiplier", how, narrowed(whole.astype(np.int64), bits) / whole)


def _of_accumulators(step: Step, made: Recomputed, core: Accumulate) -> Iterator[Hypothesis]:
    shape = [1] * made.sums.ndim
    shape[channel_axis(core)] = -1
    bias = np.zeros(1) if core.bias is None else np.rint(core.bias * core.bias_scale / product_scale(core))
    total = made.sums + bias.reshape(shape)
    starts = (
        ("", replace(made.unclamped, bias=None), total),
        (", the bias added behind it", made.unclamped, made.sums),
    )
    for words, op, sums in starts:
        largest = np.abs(sums).max(initial=0)
        for bits in ACCUMULATOR_BITS:
            limit = 1 << (bits - 1)
            if largest < limit:
                continue
            yield step.supposing(
                "wrap", f"recomputed with an accumulator that wraps at {bits} bits{words}",
                partial(made.real, op, sums=(sums + limit) % (2 * limit) - limit),
            )  # fmt: skip
            yield step.supposing(
                "saturation", f"recomputed with an accumulator that saturates at {bits} bits{words}",
                partial(made.real, op, sums=np.clip(sums, -limit, limit - 1)),
            )  # fmt: skip


def _of_weights(step: Step, made: Recomputed, core: Accumulate) -> Iterator[Hypothesis]:
    assert isinstance(core.weight, np.ndarray)
    weight = core.weight
    yield from _of_channels(step, made, core)
    changed = {("weight_bits", "recomputed with the upper four bits of the weights alone"): (weight >> 4) << 4}
    if core.convolves and max(weight.shape[2:]) > 1:
        axes = tuple(range(2, weight.ndim))
        changed["flipped_kernel", "recomputed with the kernel mirrored"] = np.flip(weight, axes)
        if weight.ndim == 4 and weight.shape[2] == weight.shape[3]:
            changed["flipped_kernel", "recomputed with the kernel's rows and columns exchanged"] = np.swapaxes(
                weight, 2, 3
            )
    for (kind, how), other in changed.items():
        yield step.supposing(kind, how, partial(made.real, replace(made.unclamped, weight=other)))


def _of_channels(step: Step, made: Recomputed, core: Accumulate) -> Iterator[Hypothesis]:
    """One channel's weights negated, or those of two exchanged."""
    if made.sums.shape != step.codes.shape:
        return
    axis = channel_axis(core) % made.sums.ndim
    at = np.flatnonzero(step.wrong.any(axis=tuple(k for k in range(made.sums.ndim) if k != axis)))
    if at.size == 1:
        shape = [1] * made.sums.ndim
        shape[axis] = -1
        signs = np.ones(made.sums.shape[axis])
        signs[at[0]] = -1
        yield step.supposing(
            "sign", f"recomputed with the weights of channel {at[0]} negated",
            lambda: made.real(made.unclamped, sums=made.sums * signs.reshape(shape)), fitted=1,
        )  # fmt: skip
    if at.size == 2:
        order = np.arange(made.sums.shape[axis])
        order[at] = order[at[::-1]]
        yield step.supposing(
            "swapped_channels", f"recomputed with the weights of channels {at[0]} and {at[1]} exchanged",
            lambda: made.real(made.unclamped, sums=np.take(made.sums, order, axis)), fitted=1,
        )  # fmt: skip


# -- windows -----------------------------------------------------------------------------------------------------------


def _of_windows(step: Step, made: Recomputed, core: Any) -> Iterator[Hypothesis]:
    pads, strides = _geometry(core)
    half = len(strides)
    if isinstance(core, Accumulate):
        yield from _filled(step, made, core)
    elif isinstance(core, Pool) and any(pads):
        widths = [(0, 0), (0, 0), *zip(pads[:half], pads[half:], strict=True)]
        unpadded = replace(made.unclamped, pads=(0,) * len(pads))
        yield step.supposing(
            "padding", "recomputed with pads of code 0",
            lambda: made.reads(lambda x: np.pad(x, widths, constant_values=0), unpadded),
        )  # fmt: skip
    for how, other in _moved_pads(core, pads, half):
        yield step.supposing("padding", how, partial(made.real, _with(made.unclamped, **other)))
    for axis, stride in enumerate(strides, 2):
        if stride > 1:
            yield step.supposing(
                "stride", f"recomputed with windows that start one {_line(axis)} late",
                partial(made.reads, partial(_one_late, axis=axis, zero=core.x.codes.zero)),
            )  # fmt: skip
    if half == 2 and step.codes.ndim == 4:
        yield from _halo(step, made, core, strides[0])


def _filled(step: Step, made: Recomputed, core: Accumulate) -> Iterator[Hypothesis]:
    """Pads of another code than the zero point."""
    if not made.has_weights:
        return
    zero = core.x.codes.zero
    padded = made.all_weights - made.met_weights  # the weights that meet pads
    if not padded.any():
        return

    def filled(code: int) -> Array:
        return made.real(made.unclamped, sums=made.sums + (code - zero) * padded)

    measured = round(zero + _slope(step, filled(zero + 1) - step.real))
    for code in dict.fromkeys((0, measured)):
        if code != zero:
            how = f"recomputed with pads of code {code} instead of zero point {zero}"
            yield step.supposing("padding", how, partial(filled, code), fitted=int(code != 0))


def _line(axis: int) -> str:
    return {2: "row", 3: "column"}.get(axis, "element")


def _geometry(core: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(explicit pads, begins then ends; strides) of a Conv or Pool; no pads where it has an auto_pad."""
    if isinstance(core, Pool):
        return core.pads if core.auto_pad == "NOTSET" else (0,) * len(core.pads), core.strides
    rank = core.weight.ndim - 2
    given = core.attributes.get("pads") if _auto(core) == "NOTSET" else None
    strides = core.attributes.get("strides", (1,) * rank)
    return tuple(int(p) for p in given or (0,) * (2 * rank)), tuple(int(s) for s in strides)


def _auto(core: Any) -> str:
    found = core.auto_pad if isinstance(core, Pool) else core.attributes.get("auto_pad", "NOTSET")
    return (found.decode() if isinstance(found, bytes) else str(found)) or "NOTSET"


def _with(core: Any, **changed: Any) -> Any:
    if isinstance(core, Pool):
        return replace(core, **changed)
    return replace(core, attributes={**core.attributes, **changed})


def _moved_pads(core: Any, pads: tuple[int, ...], half: int) -> Iterator[tuple[str, dict[str, Any]]]:
    swapped = {"SAME_UPPER": "SAME_LOWER", "SAME_LOWER": "SAME_UPPER"}.get(_auto(core))
    if swapped:
        yield f"recomputed with auto_pad {swapped} instead of {_auto(core)}", {"auto_pad": swapped}
    axes = [k for k in range(half) if pads[k] or pads[k + half]]
    for moved in ([k] for k in axes) if len(axes) < 2 else (*([k] for k in axes), axes):
        for by in (1, -1):
            other = list(pads)
            for k in moved:
                other[k] += by
                other[k + half] -= by
            if min(other) >= 0:
                yield f"recomputed with pads {other} instead of {list(pads)}", {"pads": tuple(other)}


def _one_late(x: Array, axis: int, zero: int) -> Array:
    last = np.full_like(np.take(x, [0], axis), zero)
    return np.concatenate([np.take(x, range(1, x.shape[axis]), axis), last], axis)


def _halo(step: Step, made: Recomputed, core: Any, stride: int) -> Iterator[Hypothesis]:
    """Rows are computed in two tiles, each of which reads zero points where the other's rows are."""
    rows = np.flatnonzero(step.wrong.any(axis=(0, 1, 3)))
    if not rows.size or rows[-1] - rows[0] >= _HALO_ROWS:
        return
    zero = core.x.codes.zero

    def tiled(border: int) -> Array:
        def upper(x: Array) -> Array:
            return np.where(np.arange(x.shape[2])[:, None] < border * stride, x, x.dtype.type(zero))

        def lower(x: Array) -> Array:
            return np.where(np.arange(x.shape[2])[:, None] >= border * stride, x, x.dtype.type(zero))

        return np.concatenate([made.reads(upper)[:, :, :border], made.reads(lower)[:, :, border:]], 2)

    for border in range(int(rows[0]), int(rows[-1]) + 2):
        if 0 < border < step.codes.shape[2]:
            how = f"recomputed in two tiles that meet at row {border} and do not read each other's rows"
            yield step.supposing("tile_halo", how, partial(tiled, border), fitted=1)


# -- what is read ------------------------------------------------------------------------------------------------------


def _of_reading(step: Step, made: Recomputed) -> Iterator[Hypothesis]:
    """The input in another layout."""
    x = made.inputs[made.core.x.name]  # type: ignore[attr-defined]  # asked for where there is one
    if x.ndim != 4 or x.shape[1] == 1 or x.shape[2:] == (1, 1):
        return
    n, c, h, w = x.shape
    layouts: tuple[tuple[str, Callable[[Array], Array]], ...] = (
        ("channels last, read channels first", lambda a: np.moveaxis(a, 1, -1).reshape(a.shape)),
        ("channels first, read channels last", lambda a: np.moveaxis(a.reshape(n, h, w, c), -1, 1)),
    )
    for words, change in layouts:
        yield step.supposing(
            "transposed_layout", f"recomputed with its input {words}", partial(made.reads, change)
        )  # fmt: skip


# -- means, tables, two operands, moves --------------------------------------------------------------------------------


def _of_means(step: Step, made: Recomputed, core: Pool | Mean) -> Iterator[Hypothesis]:
    if core.kind == "MaxPool":
        return
    if core.x.codes != core.out:
        yield step.supposing(
            "pool_in_input_scale", "recomputed with the mean rounded to a code of the input first, then rescaled",
            lambda: _twice(made, core),
        )  # fmt: skip
    if isinstance(core, Pool) and (any(core.pads) or _auto(core) != "NOTSET"):
        counted = core.count_include_pad
        words = "not counted" if counted else "counted"
        yield step.supposing(
            "count_include_pad", f"recomputed with pads {words} in the mean",
            lambda: made.real(replace(made.unclamped, count_include_pad=not counted)),
        )  # fmt: skip


def _twice(made: Recomputed, core: Pool | Mean) -> Array:
    x = core.x.codes
    inner = made.real(replace(made.unclamped, out=x)) - made.out.zero  # codes of x without zero point
    first = np.clip(np.rint(inner), x.low - x.zero, x.high - x.zero)
    return np.asarray(first * (x.scale / core.out.scale) + made.out.zero)


def _of_table(step: Step, made: Recomputed, core: Table) -> Iterator[Hypothesis]:
    if not core.nodes:
        yield from _rescale(step, made, core.x.codes, x=replace(core.x, codes=core.out))
        return
    low, high, dtype = core.x.codes.low, core.x.codes.high, core.x.codes.dtype

    def beside(x: Array, by: int) -> Array:
        return np.asarray(np.clip(x.astype(np.int64) + by, low, high).astype(dtype))

    for by, words in ((1, "one entry further"), (-1, "one entry before")):
        how = f"recomputed with the lookup table read {words}"
        yield step.supposing("shifted_table", how, partial(made.reads, partial(beside, by=by)))
    half = 1 << (core.x.codes.bits - 1)
    yield step.supposing(
        "shifted_table", "recomputed with the lookup table read as if its input had the other signedness",
        lambda: made.reads(lambda x: ((x.astype(np.int64) - low + half) % (2 * half) + low).astype(dtype)),
    )  # fmt: skip


def _rescale(step: Step, made: Recomputed, source: Codes, **changed: Any) -> Iterator[Hypothesis]:
    how = f"recomputed with codes of scale {source.scale:.6g} taken as they are, the rescale left out"
    yield step.supposing("scale", how, lambda: made.real(replace(made.unclamped, **changed)))


def _of_binary(step: Step, made: Recomputed, core: Binary) -> Iterator[Hypothesis]:
    if core.a.codes != core.b.codes:
        yield from _rescale(step, made, core.b.codes, b=replace(core.b, codes=core.a.codes))
        yield from _rescale(step, made, core.a.codes, a=replace(core.a, codes=core.b.codes))
    if core.kind in ("Add", "Sub"):
        for field in ("a", "b"):
            yield from _share(step, made, field, getattr(core, field))
    if core.kind in ("Sub", "Div"):
        yield step.supposing(
            "swapped_operands", "recomputed with its inputs exchanged",
            lambda: made.real(replace(made.unclamped, a=core.b, b=core.a)),
        )  # fmt: skip


def _share(step: Step, made: Recomputed, field: str, operand: Operand) -> Iterator[Hypothesis]:
    """One input of a sum left out, or scaled by another factor."""
    if operand.name not in made.inputs:
        return
    gone = {**made.inputs, operand.name: np.full_like(made.inputs[operand.name], operand.codes.zero)}
    without = made.real(made.unclamped, gone)
    named, share = _OPERANDS[field], step.real - without
    yield step.supposing("missing_operand", f"recomputed without its {named}", lambda: without)
    factor = 1 + _slope(step, share)
    yield step.supposing(
        "scale", f"recomputed with its {named} times {factor:.4g}, as by one wrong scale",
        lambda: without + factor * share, fitted=2,
    )  # fmt: skip


def _of_move(step: Step, made: Recomputed, core: Move) -> Iterator[Hypothesis]:
    out = made.out
    different = [k for k, operand in enumerate(core.inputs) if operand.codes != out]
    if different:
        yield from _rescale(
            step, made, core.inputs[different[0]].codes, inputs=tuple(replace(o, codes=out) for o in core.inputs)
        )
    if 1 < len(different) <= _MOST_INPUTS:
        for k in different:
            inputs = tuple(replace(o, codes=out) if j == k else o for j, o in enumerate(core.inputs))
            yield from _rescale(step, made, core.inputs[k].codes, inputs=inputs)
    if core.kind == "Pad" and core.inputs[0].name in made.inputs:
        inside = np.ones(made.inputs[core.inputs[0].name].shape, np.int8)
        (covered,) = move("Pad", [inside], core.attributes, core.constants, 0, 1)
        yield step.supposing(
            "padding", "recomputed with pads of code 0", lambda: np.where(covered == 1, step.real, 0.0)
        )
