"""Cuts a .tflite file in two at an operator or tensor, as `models.onnx.split` does an ONNX model, in the flatbuffer itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from equivcheck.errors import SelectorError
from equivcheck.models.onnx.split import Cut, Place
from equivcheck.models.select import Selected
from equivcheck.models.tflite.cut import Part, needed, part
from equivcheck.models.tflite.load import Flatbuffer


@dataclass(frozen=True, eq=False)
class TfliteParts:
    """The two files of a cut; `tail` is None where no operator is left for it."""

    cut: Cut
    head: Part
    tail: Part | None


def build_parts(source: Flatbuffer, point: Selected, place: Place) -> TfliteParts:
    """Cut `source` at `point`. Raises SelectorError where that is a constant: no file can end there."""
    cut = find_cut(source, point, place)
    own = _names(source, source.inputs)
    head = part(source, inputs=own, outputs=cut.head_outputs)
    passed_on = [name for name in cut.tail_outputs if name in own]
    tail = part(source, inputs=[*passed_on, *cut.boundary], outputs=cut.tail_outputs) if cut.tail_nodes else None
    return TfliteParts(cut, head, tail)


def find_cut(source: Flatbuffer, point: Selected, place: Place) -> Cut:
    """Decide which operators belong to the head and to the tail of a cut at `point`, and which tensors cross.

    `head_nodes` and `tail_nodes` of the cut index the file's operators; both may have those that no input reaches.
    """
    moving = _moving(source)
    alive = {source.tensors[k].name for k in moving}
    point = replace(point, before=tuple(name for name in point.before if name in alive))
    frontier = point.before if place == "before" and point.before else point.after
    _refuse_constants(source, point, frontier)
    head = needed(source, frontier, ())
    made = {k for index in head for k in source.operators[index].outputs if k in moving}
    head_made = set(_names(source, made))
    outputs = _names(source, source.outputs)
    tail_outputs = [name for name in outputs if name not in head_made]
    tail = needed(source, tail_outputs, head_made)
    if not tail:  # outputs that no operator makes are no reason for a tail
        tail_outputs = []
    own_outputs = [name for name in outputs if name not in tail_outputs]
    read = {k for index in tail for k in source.operators[index].inputs}
    crossing = _names(source, [k for op in source.operators for k in op.outputs if k in made & read])
    return Cut(
        point=point,
        place=place,
        boundary=tuple(crossing),
        head_outputs=tuple(dict.fromkeys([*frontier, *crossing, *own_outputs])),
        tail_outputs=tuple(tail_outputs),
        head_nodes=tuple(head),
        tail_nodes=tuple(tail),
        empty="head" if not head_made else "tail" if not tail else None,
        notes=tuple(_notes(head_made, [n for n in frontier if n not in {*crossing, *outputs}], tail)),
    )


def _names(source: Flatbuffer, indices: Sequence[int] | set[int]) -> list[str]:
    return [source.tensors[k].name for k in indices]


def _moving(source: Flatbuffer) -> set[int]:
    """Tensors that depend on an input. What depends on none is never handed over: either part makes it itself."""
    found = set(source.inputs)
    for operator in source.operators:
        if not found.isdisjoint(operator.inputs):
            found.update(operator.outputs)
    return found


def _refuse_constants(source: Flatbuffer, point: Selected, frontier: Sequence[str]) -> None:
    for name in frontier:
        index = source.index_of.get(name)
        if index is None or (index not in source.producer and index not in source.inputs):
            raise SelectorError(
                f"'{name}' is a constant: nothing can be cut there",
                asked=point.selector,
                hint="split at what reads it",
            )


def _notes(head_made: set[str], dead: Sequence[str], tail: Sequence[int]) -> list[str]:
    notes = []
    if not head_made:
        notes.append("the head computes nothing: only inputs or constants lie before this cut")
    if not tail:
        notes.append("the head computes everything: no operator is left for a tail")
    unused = [name for name in dead if name in head_made]
    if unused and tail:
        notes.append(f"no model output depends on {', '.join(unused)}")
    return notes
