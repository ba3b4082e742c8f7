"""A first cause: what a culprit's error looks like, confirmed by recomputing the step that wrong way.

A cause is named only when a hypothesis explains nearly all wrong codes, contradicts none of the right ones, and no
hypothesis of another kind does as well; else there is none. No cause is better than a wrong one.

| kind | what was found |
|---|---|
| truncation | rounded down, up or toward zero instead of to nearest, everywhere or in one channel, row or column |
| double_rounding | rounded to half a code first, then again |
| zero_point | another zero point of an input (ignored, off by one, off by 128) or of the output |
| scale | one factor for all, one channel's own factor, or a rescale between two scales left out |
| per_channel_scale | the first, last or largest weight scale for all channels, or that of the channel beside |
| narrow_multiplier | requantisation multipliers with too few bits |
| bias | left out, doubled, subtracted, cut to 16 bits, or of the wrong scale |
| weight_bits, sign, flipped_kernel | weights cut to four bits; one channel's negated; a kernel mirrored or transposed |
| padding, stride, count_include_pad | pads of code 0 or at the other side; windows one element late; pads in a mean |
| saturation, wrap | an early end of the range, or an accumulator's; codes or sums that wrap instead of saturating |
| clip | Relu or Clip missing, or at raw code 0 |
| swapped_channels, transposed_layout, mirrored | results in each other's place; NHWC read as NCHW and the like |
| stale_buffer, not_written, tile_halo | another value's content; one code left standing; tiles that do not see each other |
| offset | one channel, row or column a whole number of codes away |
| shifted_table, pool_in_input_scale | a lookup table read beside its entry; a mean rounded in the input's scale first |
| missing_operand, swapped_operands | one input of Add or Sub left out; those of Sub or Div exchanged |
| wrong_input | the step quantises a graph input, and that input was another picture: see wrong_input.py |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from equivcheck.causes.arithmetic import Recomputed, of_operator
from equivcheck.causes.hypotheses import FEWEST, Hypothesis, Step, choose
from equivcheck.causes.stored import of_stored
from equivcheck.judge import step_limit
from equivcheck.models.graph import Array
from equivcheck.models.graph import Step as ModelStep
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.result import Cause
from equivcheck.vnpu.lower import lower
from equivcheck.vnpu.rounding import code_bounds
from equivcheck.wrong_input import explain_input

__all__ = ["Causes"]

_PLACES = ("swapped_channels", "transposed_layout", "mirrored")  # at an input, said better of it
_LARGEST = 1 << 23  # elements of an input; beyond, only what was stored is looked at
_SHOWN = 40  # characters of a value's name, the last
_SAME = 5e-2  # LSB between two evaluations of one real value: float32 against float64


class Causes:
    """Explains culprits of `model` from what one side stored; runs no engine of either side.

    `declared` are the wider limits that this side's engine declares, by op_type: what they allow is not wrong.
    """

    def __init__(self, model: OnnxModel, declared: Mapping[str, tuple[float, str]] | None = None) -> None:
        self.graph = model.graph
        self.declared = declared or {}

    def explain(self, name: str, codes: Array, values: Mapping[str, Array], real: Array) -> Cause | None:
        """Return the cause of the error at stored value `name`, or None where nothing explains it.

        `codes` are what was stored (any integer dtype), `values` all stored values of the same side by name, `real` the
        step's real value in codes (as `codes`, neither rounded nor clipped: `real_in_codes`). Values that are no codes,
        or are quantised per channel, have no cause.
        """
        quantisation = self.graph.quantisation.get(name)
        if quantisation is None or quantisation.scale.size != 1 or codes.dtype != quantisation.dtype:
            return None
        if codes.shape != real.shape or not codes.ndim or not codes.size:
            return None
        made_by = self.graph.step_of_value[name]
        recomputed = self._recomputed(made_by, name, values)
        step = self._step(name, codes, real, recomputed)
        if recomputed is not None and step.real is not recomputed.open:
            recomputed = None
        if step.wrong_count < FEWEST:
            return None
        others = self._before(made_by, values)
        cause = choose(step, _hypotheses(step, others, recomputed))
        quantises_input = made_by.ops == ("QuantizeLinear",) and set(made_by.inputs) <= set(self.graph.inputs)
        if quantises_input and (cause is None or cause.kind in _PLACES):
            return explain_input(real, codes, scale=float(quantisation.scale.ravel()[0]), zero_point=step.zero) or cause
        return cause

    def _before(self, step: ModelStep, values: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs and what earlier steps stored, by a name that fits in a sentence."""
        found = {}
        for name, array in values.items():
            maker = self.graph.step_of_value.get(name)
            if maker is None:
                found[f"input {name}"] = array
            elif maker.id < step.id:
                found[f"step #{maker.id} ({name[-_SHOWN:]})"] = array
        return found

    def _recomputed(self, step: ModelStep, name: str, values: Mapping[str, Array]) -> Recomputed | None:
        """The step's operator on its stored inputs; None where it has none, or an input was not delivered."""
        op = lower(self.graph, step)
        if isinstance(op, str) or not all(self._delivered(source, values) for source in step.inputs):
            return None
        return Recomputed(op, values, name)

    def _delivered(self, name: str, values: Mapping[str, Array]) -> bool:
        """In the model's own dtype, and not too large to be convolved twenty times."""
        array, quantisation = values.get(name), self.graph.quantisation.get(name)
        if array is None or array.size > _LARGEST:
            return False
        return quantisation is None or array.dtype == quantisation.dtype

    def _step(self, name: str, codes: Array, real: Array, recomputed: Recomputed | None) -> Step:
        """The operator's own reals, before its Relu or Clip, where they agree with `real`; else `real` as it is."""
        limits = np.iinfo(codes.dtype)
        low, high, open_ = float(limits.min), float(limits.max), np.asarray(real, np.float64)
        if recomputed is not None and recomputed.open.shape == codes.shape:
            out, clamp = recomputed.out, recomputed.clamp
            reals = (max(low, clamp.low / out.scale + out.zero), min(high, clamp.high / out.scale + out.zero))
            apart = np.abs(np.clip(recomputed.open, *reals) - np.clip(real, *reals))
            if float(np.max(apart, initial=0.0)) < _SAME:
                (low, high), open_ = code_bounds(clamp, out), recomputed.open
        channels = codes.shape[1] if codes.ndim > 1 else 1
        limit = step_limit(self.graph, name, self.declared).limits(channels)
        shape = (1, -1, *(1,) * (codes.ndim - 2)) if codes.ndim > 1 else (1,)
        zero = int(self.graph.quantisation[name].zero_point.ravel()[0])
        return Step(codes, open_, float(low), float(high), zero, limit.reshape(shape))


def _hypotheses(step: Step, values: Mapping[str, Array], recomputed: Recomputed | None) -> Iterator[Hypothesis]:
    yield from of_stored(step, values)
    if recomputed is not None:
        yield from of_operator(step, recomputed)
