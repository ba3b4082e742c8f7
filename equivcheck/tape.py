"""What can be played back instead of run: a recording of ours, what came back of a bundle, or a dump of another tool."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from equivcheck.carried import Carried, is_carried
from equivcheck.dumps import Dump, Which, load_dump
from equivcheck.errors import RecordingError
from equivcheck.inputs import Feed, Sample
from equivcheck.models.graph import Array, Graph
from equivcheck.recording import MANIFEST, Recording, Saved, load
from equivcheck.result import Model, Observation, SampleInfo, Side


@dataclass(frozen=True, eq=False)
class Tape:
    """Recorded samples in order. `read(k)` gives the recording of sample k, `feed(k, name)` one of its graph inputs or None.

    `model` is the recorded model file, None where the dump does not say. `notes` are for the user;
    `declared` are the limits that the recorded engine declares.
    """

    samples: Sequence[SampleInfo]
    read: Callable[[int], Recording]
    feed: Callable[[int, str], Array | None]
    side: Side
    model: Model | None
    notes: tuple[str, ...] = ()
    declared: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def as_samples(self, inputs: Sequence[str]) -> Sequence[Sample]:
        """The samples to judge, with those of the graph's `inputs` that were recorded; their arrays stay on disk."""
        return _Samples(self, inputs)


class _Samples(Sequence[Sample]):
    """Samples that are read when they are asked for: a recording may be larger than memory."""

    def __init__(self, tape: Tape, inputs: Sequence[str]) -> None:
        self.tape, self.inputs = tape, inputs

    def __len__(self) -> int:
        return len(self.tape.samples)

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:  # type: ignore[override]  # as list has it
        if isinstance(index, slice):
            return [self._sample(k) for k in range(len(self))[index]]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._sample(index % len(self))

    def _sample(self, number: int) -> Sample:
        info = self.tape.samples[number]
        known = {feed.name: feed for feed in info.feeds}
        feeds: dict[str, Feed] = {}
        for name in self.inputs:
            array = self.tape.feed(number, name)
            if array is not None:
                about = known.get(name)
                feeds[name] = Feed(name, array, about.source if about else "recorded", about.recipe if about else None)
        return Sample(info.id, feeds)


def open_tape(
    path: str | os.PathLike[str],
    graph: Graph | None,
    *,
    layout: str | None = None,
    names: str | os.PathLike[str] | None = None,
    which: Which = "candidate",
) -> Tape:
    """Open `path`: a recording of ours, the results of a bundle (needs `graph`), or any dump that `equivcheck.dumps` reads
    (matched to `graph`, where given).

    Raises RecordingError when it is none, or when `layout` or `names` are given for a recording, which has its own.
    """
    carried = is_carried(Path(path))
    if not carried and not (Path(path) / MANIFEST).is_file():
        return _of_dump(load_dump(path, graph, layout=layout, names=names, side=which))
    if layout or names:
        raise RecordingError(
            f"{path} is a recording of equivcheck: its layout and names are in it",
            asked=str(path),
            hint="leave out the layout and the names file",
        )
    return _of_carried(Carried(Path(path), graph)) if carried else _of_recording(load(path))


def _of_recording(saved: Saved) -> Tape:
    def feed(number: int, name: str) -> Array | None:
        return saved.recordings[number].values.get(name)

    return Tape(
        saved.samples,
        lambda number: saved.recordings[number],
        feed,
        saved.side,
        saved.model,
        declared=saved.declared,
    )


def _of_carried(carried: Carried) -> Tape:
    model = carried.packed.model
    return Tape(carried.samples, carried.recording, carried.feed, carried.side, model, declared=carried.declared)


def _of_dump(dump: Dump) -> Tape:
    def feed(number: int, name: str) -> Array | None:
        return dump.samples[number].read(name)

    side = Side(
        spec=f"recorded:{dump.source}",
        engine="dump",
        version="",
        device="another tool's dump",
        model_sha256="",
        observation=Observation(method="dump"),
    )
    samples = [SampleInfo(id=sample.id, feeds=[]) for sample in dump.samples]
    return Tape(samples, lambda number: dump.samples[number].recording(), feed, side, None, dump.notes)


def paired(wanted: Sequence[SampleInfo], tape: Tape) -> list[int]:
    """The sample of `tape` that belongs to each of `wanted`: by digest of the feeds, by id, else in order.

    Raises RecordingError when they cannot be paired.
    """
    have = list(tape.samples)
    for key in (_digests, _id):
        theirs = {key(sample): number for number, sample in enumerate(have)}
        if len(theirs) == len(have) and all(key(sample) in theirs and key(sample) for sample in wanted):
            return [theirs[key(sample)] for sample in wanted]
    if len(have) == len(wanted):
        return list(range(len(have)))
    raise RecordingError(
        f"the recordings hold different samples: {_listed(wanted)} against {_listed(have)}",
        hint="record the same inputs on both sides, or name the samples alike",
    )


def left_over(tape: Tape, order: Sequence[int]) -> list[str]:
    """A note of the samples of `tape` that `order` leaves out; none where there are none."""
    names = [sample.id for number, sample in enumerate(tape.samples) if number not in set(order)]
    if not names:
        return []
    more = " ..." if len(names) > 3 else ""
    return [
        f"{len(names)} samples of {tape.side.spec} have no partner and are not judged: {', '.join(names[:3])}{more}"
    ]


def _digests(sample: SampleInfo) -> tuple[tuple[str, str], ...]:
    return tuple((feed.name, feed.sha256) for feed in sample.feeds)


def _id(sample: SampleInfo) -> str:
    return sample.id


def _listed(samples: Sequence[SampleInfo]) -> str:
    more = f" and {len(samples) - 3} more" if len(samples) > 3 else ""
    return f"{len(samples)} ({', '.join(sample.id for sample in samples[:3])}{more})"


def completed(recording: Recording, feeds: Mapping[str, Array]) -> Recording:
    """`recording` with the graph inputs that it lacks taken from `feeds`, and said so."""
    lacking = {name: array for name, array in feeds.items() if name not in recording.values}
    if not lacking:
        return recording
    how = {**recording.how, **dict.fromkeys(lacking, "assumed: not recorded, taken from what was fed")}
    return replace(recording, values={**lacking, **recording.values}, how=how)
