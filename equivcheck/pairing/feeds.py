"""The model's input as the other file takes it: codes for reals, reals for codes, another layout, another unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equivcheck.errors import ModelError
from equivcheck.models.graph import QUANTIZE, Array, Graph, Quantisation
from equivcheck.pairing.bundles import Bundles, grid_of
from equivcheck.pairing.match import Pairing, Port

# Two calibrations of one input differ by less, two units ([0, 255], [0, 1], [-1, 1], mean and deviation) by more.
_WIDER, _ASIDE = 1.6, 0.25  # how much wider a range may be, and how far aside its middle, in widths


@dataclass(frozen=True, eq=False)
class Feed:
    """How one input becomes the other's. `words` is a sentence for the report."""

    port: Port
    dtype: np.dtype[np.generic]
    mine: Quantisation | None
    theirs: Quantisation | None
    coded: bool
    words: str

    def of(self, array: Array) -> Array:
        """The other file's feed for the model's feed `array`."""
        turned = self.port.order.apply(array)
        if self.mine is None or self.theirs is None or (turned.dtype == self.dtype and self.mine.same_as(self.theirs)):
            return turned.astype(self.dtype, copy=False)
        if self.coded and array.dtype.kind in "iu" and grid_of(self.mine) == grid_of(self.theirs):
            shift = int(self.theirs.zero_point) - int(self.mine.zero_point)
            return (turned.astype(np.int64) + shift).astype(self.dtype)
        reals = turned if array.dtype.kind == "f" else _reals(turned, self.mine)
        reals = _in_unit(reals, self.mine, self.theirs)
        return _codes(reals, self.theirs) if self.coded else reals.astype(self.dtype)


def feeds_for(pairing: Pairing) -> dict[str, Feed]:
    """How every input of the other file is fed, by its name.

    Raises ModelError for an input that no input of the model is, or whose unit cannot be known.
    """
    found = {port.theirs: _feed(pairing, port) for port in pairing.ports}
    missing = [name for name in pairing.other.graph.inputs if name not in found]
    if missing:
        takes = ", ".join(pairing.own.graph.inputs)
        raise ModelError(
            f"input '{missing[0]}' of the candidate model fits no input of the model, which takes {takes}",
            asked=missing[0],
            hint="--candidate-model takes another file of the same network",
        )
    return found


def _feed(pairing: Pairing, port: Port) -> Feed:
    (mine, own_dtype), (theirs, dtype) = _grid(pairing.own, port.own), _grid(pairing.other, port.theirs)
    codes = [grid for grid, held in ((mine, own_dtype), (theirs, dtype)) if held.kind != "f"]
    if own_dtype != dtype and None in codes:
        raise ModelError(
            f"input '{port.own}' is {own_dtype}, input '{port.theirs}' of the candidate model {dtype}, and no scale says how "
            "one becomes the other",
            asked=port.own,
            hint="quantise the input in the model, or compare recordings",
        )
    if own_dtype.kind == "f":  # reals that one file does not quantise have the unit of the other's
        mine = mine or theirs
    if dtype.kind == "f":
        theirs = theirs or mine
    return Feed(port, dtype, mine, theirs, dtype.kind != "f", _words(port, own_dtype, dtype, mine, theirs))


def _grid(side: Bundles, name: str) -> tuple[Quantisation | None, np.dtype[np.generic]]:
    """How an input is quantised (by the file, or first thing in it) and the dtype it is fed in."""
    value = side.graph.values[name]
    dtype = np.dtype(value.dtype or "float32")
    return (_first_q(side.graph, name) if dtype.kind == "f" else side.quantisation(name)), dtype


def _first_q(graph: Graph, name: str) -> Quantisation | None:
    """The quantisation that a float input is given by those that read it, past what only reorders it."""
    for reader in graph.consumers.get(name, ()):
        if reader.op_type in QUANTIZE:
            return graph.quantisation.get(reader.outputs[0])
        if reader.op_type in ("Transpose", "Reshape"):
            return _first_q(graph, reader.outputs[0])
    return None


def _range(grid: Quantisation) -> tuple[float, float]:
    limits, scale, zero = np.iinfo(grid.dtype), float(grid.scale), int(grid.zero_point)
    return scale * (limits.min - zero), scale * (limits.max - zero)


def _same_unit(mine: Quantisation, theirs: Quantisation) -> bool:
    (low, high), (their_low, their_high) = _range(mine), _range(theirs)
    narrow, wide = sorted((high - low, their_high - their_low))
    return wide <= _WIDER * narrow and abs(low + high - their_low - their_high) / 2 <= _ASIDE * narrow


def _in_unit(reals: Array, mine: Quantisation, theirs: Quantisation) -> Array:
    """Reals of the model in the other file's unit: its range takes the place of the model's."""
    if _same_unit(mine, theirs):
        return reals
    (low, high), (their_low, their_high) = _range(mine), _range(theirs)
    return np.asarray(their_low + (reals.astype(np.float64) - low) * (their_high - their_low) / (high - low))


def _reals(codes: Array, grid: Quantisation) -> Array:
    return np.asarray((codes.astype(np.float32) - np.float32(grid.zero_point)) * grid.scale.astype(np.float32))


def _codes(reals: Array, grid: Quantisation) -> Array:
    """QuantizeLinear: rint(x / scale) in float32, half to even, then the zero point; saturating."""
    limits = np.iinfo(grid.dtype)
    codes = np.rint(reals.astype(np.float32) / grid.scale.astype(np.float32)) + np.float32(grid.zero_point)
    return np.clip(codes, limits.min, limits.max).astype(grid.dtype)


def _words(
    port: Port,
    own: np.dtype[np.generic],
    dtype: np.dtype[np.generic],
    mine: Quantisation | None,
    theirs: Quantisation | None,
) -> str:
    how = [port.order.words] if port.order.words else []
    if mine is not None and theirs is not None and not _same_unit(mine, theirs):
        low, high = (f"[{a:.4g}, {b:.4g}]" for a, b in (_range(mine), _range(theirs)))
        how.append(f"the range {low} is taken for {high}")
    if own.kind == "f" and dtype.kind != "f" and theirs is not None:
        how.append(f"codes of scale {float(theirs.scale):.6g}, zero point {int(theirs.zero_point)}")
    elif own.kind != "f" and dtype.kind == "f" and mine is not None:
        how.append(f"reals of scale {float(mine.scale):.6g}, zero point {int(mine.zero_point)}")
    elif mine is not None and theirs is not None and dtype.kind != "f" and not mine.same_as(theirs):
        how.append("the same codes with the other sign" if grid_of(mine) == grid_of(theirs) else "requantised")
    how += [port.doubt] if port.doubt else []
    name = f"'{port.own}'" if port.own == port.theirs else f"'{port.own}' as '{port.theirs}'"
    return f"input {name}: {own}" + (f" to {dtype}" if own != dtype else "") + f" ({', '.join(how) or 'as it is'})"
