"""Dumps of other tools become recordings: .npz, .npy, raw, TensorProto and .safetensors, matched to the model's values.

`load_dump` looks at names and headers only; `DumpSample.recording()` reads the numbers of one sample.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from equivcheck.dumps.files import Array, Found, Tensor, samples_in
from equivcheck.dumps.names import LAYOUTS, Declared, Match, Matcher, Names, load_names
from equivcheck.dumps.values import Coded, Misfit, Placement, Target, coded, place
from equivcheck.errors import RecordingError, near
from equivcheck.models.graph import Graph
from equivcheck.recording import Parameters, Recording

__all__ = ["Dump", "DumpSample", "load_dump"]

Which = Literal["reference", "candidate"]
_LONG = 48  # characters of a name that a note shows, its end


@dataclass(frozen=True)
class Dump:
    """The samples of a dump, matched to the model; nothing but headers is in memory.

    `incomparable` gives, by value name, why a tensor's shape or size cannot be that value's, with the way out;
    `unmatched` are the dump's names that are no value of the model. What only the numbers show (NaN where codes are due,
    codes kept as floats) is in `Recording.failed`, as the shapes are.
    """

    source: str
    samples: tuple[DumpSample, ...]
    notes: tuple[str, ...] = ()
    incomparable: Mapping[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Planned:
    """A tensor that fits: which value it is, and how it becomes it."""

    tensor: Tensor
    target: Target
    declared: Declared
    placement: Placement

    def read(self) -> Coded:
        return coded(self.placement.read(self.tensor), self.target, self.declared)


@dataclass(frozen=True)
class _Showings:
    """The tensors that show one value, the nearest to its codes first."""

    tensors: tuple[_Planned, ...]

    def read(self) -> Coded:
        """The first that fits. Raises Misfit, with the reason of the first, when none does."""
        first: Misfit | None = None
        for planned in self.tensors:
            try:
                return planned.read()
            except Misfit as reason:
                first = first or reason
        assert first is not None
        raise first


@dataclass(frozen=True)
class DumpSample:
    """One sample of a dump: `values` shows stored values by name, `outputs` are the tensors named like graph outputs."""

    id: str
    values: Mapping[str, _Showings]
    outputs: Mapping[str, _Planned]
    misfits: Mapping[str, str]
    missing: tuple[str, ...]

    def read(self, name: str) -> Array | None:
        """One value as `recording` holds it, or None where it is not there. Raises RecordingError."""
        try:
            return self.values[name].read().array if name in self.values else None
        except Misfit:
            return None

    def recording(self) -> Recording:
        """Read the sample. Raises RecordingError when a file cannot be read.

        `values` holds codes for quantised values; `quantisation` is the dump's own where declared, else the model's;
        `incomparable` says which tensors cannot be that value by their shape or size, `failed` which by their numbers,
        `absent` which stored values the dump lacks.
        """
        read: dict[str, Coded] = {}
        failed: dict[str, str] = {}
        for name, showings in self.values.items():
            try:
                read[name] = showings.read()
            except Misfit as reason:
                failed[name] = str(reason)
        return Recording(
            sample=self.id,
            values={name: value.array for name, value in read.items()},
            how={name: value.how for name, value in read.items()},
            outputs=self._outputs(read),
            absent=dict.fromkeys(self.missing, "not in the dump"),
            failed=failed,
            incomparable=self.misfits,
            off_grid={name: value.off_grid for name, value in read.items() if value.off_grid is not None},
            quantisation=_parameters(read),
        )

    def _outputs(self, read: Mapping[str, Coded]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, planned in self.outputs.items():
            if name in self.values:  # the output is a stored value
                if name in read:
                    found[name] = read[name].array
                continue
            array = planned.placement.read(planned.tensor)
            if array.dtype.kind == "f":
                found[name] = array.astype(planned.target.dtype or array.dtype)
        return found


def _parameters(read: Mapping[str, Coded]) -> dict[str, Parameters]:
    return {name: value.parameters for name, value in read.items() if value.parameters is not None}


def load_dump(
    path: str | os.PathLike[str],
    graph: Graph | None = None,
    *,
    layout: str | None = None,
    names: str | os.PathLike[str] | None = None,
    side: Which = "candidate",
) -> Dump:
    """Find the samples under `path` and match their tensors to `graph`; without one, names and shapes stay as they are.

    `layout="nhwc"`: 4-D tensors have their channels last; they, and those of other ranks that only fit so, are turned to
    the model's NCHW. `names`: a names file (see `names.load_names`). `side` is the option that hints speak of.
    Raises RecordingError for a path, a file or a names file that cannot be used, and for two tensors of one value.
    """
    place_ = Path(path)
    if layout not in (None, *LAYOUTS):
        raise RecordingError(f"no layout '{layout}'", asked=layout, hint=f"one of {', '.join(LAYOUTS)}")
    if (place_ / "manifest.json").is_file():
        raise RecordingError(f"{place_} is a recording of equivcheck, not a dump", hint="read it with recording.load")
    file = load_names(Path(names) if names is not None else None)
    found = samples_in(place_)
    book = _Book(graph, file, layout, f"--{side}-layout")
    samples = tuple(book.sample(one) for one in found)
    if graph is not None and not any(sample.values or sample.misfits for sample in samples):
        nearest = [hit for name in list(book.unmatched)[:3] for hit in near(name, graph.stored, 1)]
        raise RecordingError(
            f"{place_}: none of its tensors ({_some(book.unmatched or book.inner)}) is a stored value of the model",
            asked=str(place_),
            nearest=nearest,
            hint="is it the same model? --names FILE maps names",
        )
    incomparable = {name: why for sample in samples for name, why in sample.misfits.items()}
    return Dump(str(place_), samples, (*_left_out(found), *book.notes(found)), incomparable, tuple(book.unmatched))


def _left_out(found: Sequence[Found]) -> list[str]:
    names = [name for sample in found for name in sample.left_out]
    return [f"{len(names)} other files left alone, such as {names[0]}"] if names else []


class _Book:
    """Matches the tensors of one sample after another, and keeps what there is to say of them all."""

    def __init__(self, graph: Graph | None, file: Names, layout: str | None, option: str) -> None:
        self.graph = graph
        self.file = file
        self.layout = layout
        self.option = option
        self.matcher = Matcher(graph, file.renamed) if graph is not None else None
        self.unmatched: dict[str, None] = {}
        self.inner: dict[str, None] = {}
        self.seconds: dict[str, str] = {}

    def sample(self, found: Found) -> DumpSample:
        """Match one sample. Raises RecordingError for two tensors of one value, and for raw files nothing is known of."""
        matched = [(tensor, match) for tensor in found.tensors if (match := self._match(tensor.name)) is not None]
        _refuse_twice(found.id, matched)
        if self.graph is None:
            return self._without_model(found.id, matched)
        outputs: dict[str, _Planned] = {}
        shown: dict[str, list[_Planned]] = defaultdict(list)
        misfits: dict[str, str] = {}
        for stored, tensors in _by_stored(matched, self.matcher).items():
            for tensor, match in tensors:
                try:
                    planned = self._planned(tensor, match)
                except Misfit as reason:
                    misfits.setdefault(stored, str(reason))
                    continue
                if match.name in self.graph.outputs:
                    outputs.setdefault(match.name, planned)
                elif stored in shown:
                    self.seconds.setdefault(tensor.name, shown[stored][0].tensor.name)
                shown[stored].append(planned)
        values = {name: _Showings(tuple(planned)) for name, planned in shown.items()}
        misfits = {name: why for name, why in misfits.items() if name not in values}
        have = {*values, *misfits, *self.graph.inputs}
        return DumpSample(found.id, values, outputs, misfits, tuple(n for n in self.graph.stored if n not in have))

    def _match(self, dumped: str) -> Match | None:
        if self.matcher is None:
            name = self.file.renamed.get(dumped, dumped)
            return Match(name, name)
        match = self.matcher.match(dumped)
        if match is None:
            self.unmatched[dumped] = None
        elif match.stored is None:
            self.inner[dumped] = None
            return None
        return match

    def _without_model(self, sample: str, matched: Sequence[tuple[Tensor, Match]]) -> DumpSample:
        values: dict[str, _Showings] = {}
        for tensor, match in matched:
            try:
                values[match.name] = _Showings((self._planned(tensor, match),))
            except Misfit as reason:
                raise RecordingError(
                    f"{tensor.source}: {reason}", asked=tensor.source, hint="or give --model MODEL, which says them"
                ) from None
        return DumpSample(sample, values, {}, {}, ())

    def _planned(self, tensor: Tensor, match: Match) -> _Planned:
        declared = self.file.of(tensor.name, match.name, match.stored or match.name)
        target = self._target(match)
        return _Planned(tensor, target, declared, place(tensor, target, declared, self.layout, self.option))

    def _target(self, match: Match) -> Target:
        graph, matcher, stored = self.graph, self.matcher, match.stored
        if graph is None or matcher is None or stored is None:
            return Target(match.name)
        value, codes = graph.values.get(match.name), graph.values.get(stored)
        shape = value.shape if value is not None and value.shape is not None else (codes.shape if codes else None)
        return Target(
            name=match.name,
            dtype=value.dtype if value is not None else None,
            shape=shape,
            quantised=graph.quantisation.get(stored),
            before_q=matcher.rank(match) == 3,
            native=match.native,
        )

    def notes(self, found: Sequence[Found]) -> list[str]:
        """What the user should know of the names, one line each."""
        said = []
        if self.inner:
            said.append(f"{_some(self.inner)}: weights, or values that no step stores: not compared")
        if self.unmatched:
            said.append(f"{_some(self.unmatched)}: no value of the model{self._nearest()}")
        if self.seconds:
            second, first = next(iter(self.seconds.items()))
            said.append(
                f"{_some(self.seconds)}: a second showing of a value ({second} of {first}): the first that fits is used"
            )
        there = {tensor.name for sample in found for tensor in sample.tensors}
        there |= set(self.matcher.known) if self.matcher is not None else set(self.file.renamed.values())
        unused = [name for name in (*self.file.renamed, *self.file.declared) if name not in there]
        if unused:
            near_by = near(unused[0], there)
            said.append(
                f"{_some(unused)}: in the names file, but in neither the dump nor the model"
                + (f" ({near_by[0]}?)" if near_by else "")
            )
        return said

    def _nearest(self) -> str:
        assert self.matcher is not None
        first = next(iter(self.unmatched))
        several = self.matcher.candidates(first)
        if several:
            return f"; {first} could be {' or '.join(several[:3])}: say which in --names"
        hits = near(first, self.matcher.graph.stored)
        return f"; nearest to {first}: {', '.join(hits)}" if hits else ""


def _some(names: Sequence[str] | Mapping[str, object]) -> str:
    listed = [name if len(name) <= _LONG else f"...{name[3 - _LONG :]}" for name in names]  # some reach 800 characters
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _refuse_twice(sample: str, matched: Sequence[tuple[Tensor, Match]]) -> None:
    """Two files for one value: which is meant is the user's to say."""
    first: dict[tuple[str, bool], Tensor] = {}
    for tensor, match in matched:
        other = first.setdefault((match.name, match.native), tensor)
        if other is not tensor:
            raise RecordingError(
                f"sample {sample}: {other.source} and {tensor.source} are both '{match.name}'",
                asked=match.name,
                hint="move one away, or name another value for it in --names",
            )


def _by_stored(
    matched: Sequence[tuple[Tensor, Match]], matcher: Matcher | None
) -> dict[str, list[tuple[Tensor, Match]]]:
    """The tensors that show each stored value, the nearest to its codes first."""
    assert matcher is not None
    found: dict[str, list[tuple[Tensor, Match]]] = defaultdict(list)
    for tensor, match in sorted(matched, key=lambda pair: matcher.rank(pair[1])):
        if match.stored is not None:
            found[match.stored].append((tensor, match))
    return found
