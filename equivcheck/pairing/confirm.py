"""What numbers say of a pairing: each value must reproduce its own step of the model, on the values it was paired with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.models.onnx.isolate import real_in_codes
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.pairing.match import Match, Pairing, pair
from equivcheck.pairing.order import Order, layouts
from equivcheck.recording import Parameters, Recording
from equivcheck.truth import StepResults, specs_of

_ROUNDS = 16  # each settles at least one value, and those behind it may change
_WITHIN = 1.0  # LSB: every correct kernel that was measured stays within, and no value of another place does


@dataclass(frozen=True, eq=False)
class Confirmed:
    """A pairing that numbers have settled; `reproduced` are the values that their own step gives to within 1 LSB."""

    pairing: Pairing
    reproduced: frozenset[str]


def confirm(model: OnnxModel, pairing: Pairing, recording: Recording, fed: Mapping[str, Array]) -> Confirmed:
    """Settle what `pairing` leaves open by the numbers of one sample; `recording` is of the other file, `fed` the model's.

    Of rivals and layouts the one is taken that is nearest to what the model's own step gives on the paired inputs. A weak match
    is dropped where neither its own step gives its numbers nor any step that reads it is right on them.
    """
    decided: dict[str, str] = {}
    turned: dict[str, Order] = {}
    refused: set[str] = set()
    while True:
        values = {**values_of(pairing, recording), **fed}
        results = StepResults(model, specs_of(values)).evaluate(values)
        better = _better(model, pairing, recording, results, decided) if len(decided) < _ROUNDS else None
        reproduced = _reproduced(model, pairing, values, results)
        unlikely = _unlikely(pairing, reproduced) - refused
        if better is not None:
            name, decided[name], turned[name] = better
        elif unlikely:
            refused |= unlikely
        else:
            return Confirmed(pairing, reproduced)
        pairing = pair(pairing.own.graph, pairing.other.graph, decided=decided, turned=turned, refused=refused)


def _unlikely(pairing: Pairing, reproduced: Collection[str]) -> set[str]:
    """Weak matches that numbers speak against; of a faulty step the readers are right on what it made. Outputs stay paired."""
    side = pairing.own
    kept = {side.of[name].index for out in side.graph.outputs if (name := side.graph.store(out)) is not None}
    kept |= {source.index for name in reproduced for source in side.sources[side.of[name].index]}
    weak = [name for name, match in pairing.matches.items() if match.weak and name not in reproduced]
    return {name for name in weak if side.of[name].index not in kept}


def values_of(pairing: Pairing, recording: Recording) -> dict[str, Array]:
    """The model's stored values as the other file's recording gives them, in the model's codes and order.

    Those that it quantises otherwise are requantised: near enough to see whether they are the same reals.
    """
    found: dict[str, Array] = {}
    for name, match in pairing.matches.items():
        array = recording.values.get(match.theirs)
        if array is not None:
            turned = match.order.apply(array)
            found[name] = own_codes(pairing, name, turned) if match.same_grid else _requantised(pairing, match, turned)
    return found


def _requantised(pairing: Pairing, match: Match, codes: Array) -> Array:
    own, other = pairing.own.quantisation(match.own), pairing.other.quantisation(match.theirs)
    if own is None or other is None:
        return codes
    scale, zero = own.along(codes.ndim)
    their_scale, their_zero = other.along(codes.ndim)
    limits = np.iinfo(own.dtype)
    made = np.rint((codes - their_zero) * (their_scale / scale)) + zero
    return np.asarray(np.clip(made, limits.min, limits.max).astype(own.dtype))


def own_codes(pairing: Pairing, name: str, array: Array) -> Array:
    """Codes of the other signedness as the model's own; exact."""
    value = pairing.own.graph.values.get(name)
    dtype = None if value is None or value.dtype is None else value.dtype
    if dtype is None or {dtype, array.dtype.name} not in ({"int8", "uint8"}, {"int16", "uint16"}):
        return array
    half = 1 << (8 * array.dtype.itemsize - 1)
    return (array.astype(np.int32) + (half if array.dtype.kind == "i" else -half)).astype(dtype)


def own_parameters(pairing: Pairing, name: str, theirs: Parameters | None) -> Parameters | None:
    """The other file's scale and zero point of a value, for codes that `own_codes` has made the model's."""
    quantisation = pairing.own.graph.quantisation.get(name)
    if theirs is None or quantisation is None or quantisation.dtype == theirs.zero_point.dtype:
        return theirs
    zero = own_codes(pairing, name, theirs.zero_point)
    return Parameters(theirs.scale, zero, theirs.axis)


def _better(
    model: OnnxModel,
    pairing: Pairing,
    recording: Recording,
    results: Mapping[str, Array],
    settled: Collection[str],
) -> tuple[str, str, Order] | None:
    """The first open value, in graph order, to which another choice is nearer: its name, that choice, and its order."""
    for match in pairing.open:
        if match.own in settled or match.own not in results:
            continue
        choices = [(match.theirs, match.order), *_choices(pairing, match)]
        near = [_distance(model, pairing, match.own, results, recording, *choice) for choice in choices]
        best = int(np.argmin(near))
        if near[best] < near[0]:
            return match.own, *choices[best]
    return None


def _choices(pairing: Pairing, match: Match) -> list[tuple[str, Order]]:
    """What else a value may be: the same in other layouts, and its rivals in all of theirs."""
    own, other = pairing.own.of[match.own], pairing.other.of
    found = [(other[match.theirs].first, order) for order in match.layouts]
    for rival in match.rivals:
        found += [(rival, order) for order in layouts(other[rival].shape or (), own.shape or ())]
    return found


def _distance(
    model: OnnxModel,
    pairing: Pairing,
    name: str,
    results: Mapping[str, Array],
    recording: Recording,
    theirs: str,
    order: Order,
) -> float:
    """Mean distance from the real value, in LSB (floats: in units of their own size)."""
    array = recording.values.get(theirs)
    if array is None:
        return np.inf
    return _off(model, name, own_codes(pairing, name, order.apply(array)), results[name])[0]


def _off(model: OnnxModel, name: str, stored: Array, result: Array) -> tuple[float, float]:
    """Mean and largest distance of what is stored from the real value: in LSB, and of floats in units of the largest."""
    quantisation = model.graph.quantisation.get(name)
    if stored.size != result.size or stored.size == 0:
        return np.inf, np.inf
    if quantisation is None or stored.dtype.kind not in "iu":
        real = result.reshape(stored.shape).astype(np.float64)
        size = float(np.max(np.abs(real), initial=0.0)) or 1.0
        off = np.abs(stored.astype(np.float64) - real) / size * 1e3  # 1e-3 of the largest counts as 1
    else:
        limits = np.iinfo(quantisation.dtype)
        real = np.clip(real_in_codes(model.graph, name, result).reshape(stored.shape), limits.min, limits.max)
        off = np.abs(stored - real)
    return float(np.mean(off)), float(np.max(off))


def _reproduced(
    model: OnnxModel, pairing: Pairing, values: Mapping[str, Array], results: Mapping[str, Array]
) -> frozenset[str]:
    shown = [name for name in results if name in pairing.matches and name in values]
    return frozenset(n for n in shown if _off(model, n, values[n], results[n])[1] <= _room(pairing, pairing.matches[n]))


def _room(pairing: Pairing, match: Match) -> float:
    """How far from the real value a value may be, in LSB: where it was requantised, its own LSB more."""
    own, other = pairing.own.quantisation(match.own), pairing.other.quantisation(match.theirs)
    if match.same_grid or own is None or other is None:
        return _WITHIN
    return _WITHIN + max(1.0, float(np.max(other.scale) / np.min(own.scale)))
