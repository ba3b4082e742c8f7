"""Are two recordings of the same thing? Everything that is checked before values are compared.

In this order: is it there, its dtype and shape, its quantisation parameters; and whether both sides were fed alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from equivcheck.models.graph import Array, Graph, Quantisation
from equivcheck.recording import Parameters, Recording

NOT_NUMBERS = "OUSMmc"  # dtype kinds that are recorded but not weighed: objects, text, times, complex


class Structure:
    """What two recordings of `graph` disagree on, by stored value, with the reason; gathered over the samples.

    `incomparable`: another shape or dtype. `parameters_differ`: another scale, zero point or axis; or NaN, for which
    there is no code. `not_numbers`: text and
    the like. `inputs_differ`: graph inputs that were not fed alike, and how one becomes the other where that is known.
    """

    def __init__(self, graph: Graph, rows: Sequence[str]) -> None:
        self.graph = graph
        self.rows = rows
        self.incomparable: dict[str, str] = {}
        self.parameters_differ: dict[str, str] = {}
        self.not_numbers: dict[str, str] = {}
        self.inputs_differ: dict[str, str] = {}

    def in_model_codes(self, recording: Recording) -> Recording:
        """Bring codes of the other signedness (u8 for s8, zero point 128 higher) to the model's own; exact."""
        changed: dict[str, Array] = {}
        for name, array in recording.values.items():
            own, theirs = self.graph.quantisation.get(name), recording.quantisation.get(name)
            if own is None or theirs is None or theirs.zero_point.dtype == own.dtype or array.dtype.kind not in "iu":
                continue
            shift = np.unique(own.zero_point.astype(np.int64).ravel() - theirs.zero_point.astype(np.int64).ravel())
            if (
                own.dtype.itemsize == array.dtype.itemsize
                and shift.size == 1
                and abs(int(shift[0])) == 1 << (8 * array.dtype.itemsize - 1)
            ):
                changed[name] = (array.astype(np.int64) + shift[0]).astype(own.dtype)
        if not changed:
            return recording
        own_parameters = {
            n: replace(recording.quantisation[n], zero_point=self.graph.quantisation[n].zero_point) for n in changed
        }
        return replace(
            recording,
            values={**recording.values, **changed},
            quantisation={**recording.quantisation, **own_parameters},
        )

    def check(self, ref: Recording, cand: Recording) -> None:
        """Take in one sample's pair of recordings."""
        self.incomparable |= {name: why for name, why in cand.incomparable.items() if name in self.rows}
        for name in self.rows:
            if name in cand.values:
                self._check_value(name, ref, cand)
        for name in self.graph.inputs:
            a, b = ref.values.get(name), cand.values.get(name)
            if a is not None and b is not None and a is not b and name not in self.inputs_differ and not _same(a, b):
                self.inputs_differ[name] = _how_inputs_differ(a, b)

    def _check_value(self, name: str, ref: Recording, cand: Recording) -> None:
        a, b = ref.values.get(name), cand.values[name]
        own, theirs = self.graph.quantisation.get(name), cand.quantisation.get(name)
        if a is not None and a.shape != b.shape:
            self.incomparable[name] = f"shape {list(b.shape)} against {list(a.shape)}{shape_hint(a, b)}"
        elif b.dtype.kind in NOT_NUMBERS:
            self.not_numbers[name] = f"{b.dtype} values are not numbers"
        elif a is not None and a.dtype != b.dtype:
            self.incomparable[name] = f"dtype {b.dtype} against {a.dtype}"
        elif np.isinf(cand.off_grid.get(name, 0.0)):
            self.parameters_differ[name] = "it holds NaN where codes are due"
        elif own is not None and theirs is not None and (text := _parameters_differ(own, theirs)):
            self.parameters_differ[name] = text


def shape_hint(wanted: Array, got: Array) -> str:
    """What turns `got` into the shape of `wanted`, as the tail of a sentence: by its numbers, else by its shape alone."""
    if wanted.dtype == got.dtype and wanted.size and _same(wanted.ravel(), got.ravel()):
        return "; the same numbers in the same order: only reshaped"
    return layout_hint(wanted.shape, got.shape)


def layout_hint(wanted: Sequence[int], got: Sequence[int]) -> str:
    """Say which transposition would turn shape `got` into `wanted`, if one would; as the tail of a sentence."""
    if len(wanted) != len(got) or not 2 <= len(got) <= 5 or sorted(wanted) != sorted(got):
        same_size = np.prod(wanted, dtype=np.int64) == np.prod(got, dtype=np.int64) and len(got)
        return "; the same number of elements: reshaped?" if same_size else ""
    rank = len(got)
    if tuple(got) == (*wanted[:1], *wanted[2:], wanted[1]):
        return "; the same with channels last (--candidate-layout nhwc)"
    order = next(p for p in permutations(range(rank)) if all(got[p[k]] == wanted[k] for k in range(rank)))
    return f"; the same transposed by {list(order)}"


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _how_inputs_differ(ref: Array, cand: Array) -> str:
    from equivcheck.wrong_input import explain_input  # late: only where something is wrong

    cause = explain_input(ref, cand)
    if cause is not None:
        return cause.evidence
    if ref.shape != cand.shape:
        return f"shape {list(cand.shape)} against {list(ref.shape)}{layout_hint(ref.shape, cand.shape)}"
    differing = int(np.count_nonzero(ref != cand))
    return f"{differing} of {ref.size} elements differ, and no change of layout, colour order or scale explains it"


def _parameters(quantisation: Quantisation) -> Parameters:
    return Parameters(quantisation.scale, quantisation.zero_point, quantisation.axis)


def _parameters_differ(own: Quantisation, theirs: Parameters) -> str | None:
    """A sentence when scale, zero point or axis differ, else None."""
    if own.same_as(Quantisation(theirs.scale, theirs.zero_point, theirs.axis)):
        return None
    if own.scale.size != theirs.scale.size:
        return f"quantisation differs: {theirs.scale.size} scales against {own.scale.size}"
    if not np.array_equal(own.scale.ravel(), theirs.scale.ravel()):
        k = int(np.argmax(np.abs(own.scale.ravel() - theirs.scale.ravel())))
        return f"quantisation differs: scale {theirs.scale.ravel()[k]:.8g} against {own.scale.ravel()[k]:.8g}"
    if not np.array_equal(own.zero_point.ravel(), theirs.zero_point.ravel()):
        k = int(np.argmax(own.zero_point.ravel() != theirs.zero_point.ravel()))
        return f"quantisation differs: zero point {theirs.zero_point.ravel()[k]} against {own.zero_point.ravel()[k]}"
    return f"quantisation differs: {theirs.zero_point.dtype} axis {theirs.axis} against {own.dtype} axis {own.axis}"
