"""A candidate that runs another file of the network, written by another tool: its values in the model's names and layout.

The wrapped backend opens that file and knows nothing of the model. Its feeds are made of the model's, and what it records is
handed on under the names of the values it was paired with (`equivcheck.pairing`); so it is weighed like any other recording.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from equivcheck.backends.base import Backend, Runner, Session
from equivcheck.backends.long import LongSession
from equivcheck.errors import EngineRefused
from equivcheck.models.graph import Array, Quantisation
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.models.tflite.load import TfliteModel
from equivcheck.models.tflite.view import IMAGE_AXES
from equivcheck.pairing.confirm import confirm, own_codes, own_parameters
from equivcheck.pairing.feeds import feeds_for
from equivcheck.pairing.match import REORDERED, Match, Pairing, foreign, pair
from equivcheck.pairing.order import Order, Turn
from equivcheck.pairing.weights import different_weights
from equivcheck.recording import Parameters, Recording
from equivcheck.result import Side
from equivcheck.words import counted

_LENGTH = 48  # characters of a name in a note
_SHOWN = 5  # unmatched values and differing weights in a note


def is_foreign(own: OnnxModel, other: OnnxModel) -> bool:
    """Whether `other` must be paired with `own`: another format, other inputs, or other names for most values."""
    return own.format != other.format or foreign(own.graph, other.graph)


class PairedBackend(Backend):
    """Runs `other` on `backend` and records it as `own`, the model that is opened.

    Pairs at once. Raises ModelError for an input of `other` that no input of the model is.
    """

    # A twin or part of the model would be run for it, not the other file.
    second_opinion = False

    def __init__(self, backend: Backend, other: OnnxModel, own: OnnxModel) -> None:
        self.backend, self.spec, self.chosen = backend, backend.spec, backend.chosen
        self.name = backend.name  # type: ignore[misc]  # reports call it what it wraps
        self.summary = backend.summary  # type: ignore[misc]  # as the name
        self.own, self.other = own, with_shapes_of(own, other)
        self.pairing = pair(own.graph, self.other.graph)
        self.feeds = feeds_for(self.pairing)

    def open(self, model: OnnxModel) -> Session:
        return _PairedSession(self, self.backend.open(self.other))

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        """Run what was cut from the model itself."""
        return self.backend.deploy(proto)

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        return self.backend.legal_excess()


def with_shapes_of(own: OnnxModel, other: OnnxModel) -> OnnxModel:
    """`other` with its symbolic input shapes fixed to what the model's inputs have. Its layouts are its own."""
    shapes: dict[str, tuple[int, ...]] = {}
    left = [(name, value.shape) for name in own.graph.inputs if (value := own.graph.values.get(name)) is not None]
    for name in other.graph.inputs:
        wanted = other.graph.values[name].shape
        for mine, shape in sorted(left, key=lambda entry: entry[0] != name):
            fitted = None if wanted is None or shape is None else _fitted(wanted, shape)
            if fitted is not None:
                shapes[name] = fitted
                left.remove((mine, shape))
                break
    return other.with_input_shapes(shapes)


def _fitted(symbolic: tuple[Any, ...], shape: tuple[Any, ...]) -> tuple[int, ...] | None:
    """`symbolic` filled from `shape`: the sizes it names must be there, what is left goes to its symbols in order."""
    left = list(shape)
    for size in symbolic:
        if isinstance(size, int):
            if size not in left:
                return None
            left.remove(size)
    if len(left) != sum(not isinstance(size, int) for size in symbolic):
        return None
    return tuple(size if isinstance(size, int) else left.pop(0) for size in symbolic)


class _PairedSession(LongSession):
    def __init__(self, backend: PairedBackend, session: Session) -> None:
        self.paired = backend
        self.session = session
        self.translation = _Translation(backend.pairing, backend, frozenset())
        self.weights: Mapping[str, str] = {}
        self.confirmed = False
        self.timings: dict[str, float] = {}

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        missing = [feed.port.own for feed in self.paired.feeds.values() if feed.port.own not in feeds]
        if missing:
            raise EngineRefused(f"no feed for input '{missing[0]}'")
        if isinstance(self.session, LongSession):
            self.session.tell, self.session.kept = self.tell, self.kept
        theirs = {name: feed.of(feeds[feed.port.own]) for name, feed in self.paired.feeds.items()}
        recording = self.session.run(sample, theirs)
        if not self.confirmed:
            self._confirm(recording, feeds)
        return self.translation.of(recording, feeds)

    def _confirm(self, recording: Recording, feeds: Mapping[str, Array]) -> None:
        started = time.perf_counter()
        settled = confirm(self.paired.own, self.paired.pairing, recording, feeds)
        self.translation = _Translation(settled.pairing, self.paired, settled.reproduced)
        self.weights = different_weights(settled.pairing)
        self.confirmed = True
        self.timings["pair"] = round(time.perf_counter() - started, 6)

    @property
    def side(self) -> Side:
        side, translation = self.session.side, self.translation
        return msgspec.structs.replace(
            side,
            paired=True,
            placement=[msgspec.structs.replace(p, step=translation.step(p.step)) for p in side.placement],
            crossings=[msgspec.structs.replace(c, value=translation.name(c.value)) for c in side.crossings],
            notes=[*side.notes, *translation.notes()],
            warnings=[*side.warnings, *(translation.warnings(self.weights) if self.confirmed else [])],
            timings_s={**side.timings_s, **self.timings},
        )

    def close(self) -> None:
        self.session.close()


class _Translation:
    """From the other file's names, layout and steps to the model's; and what there is to say about that."""

    def __init__(self, pairing: Pairing, backend: PairedBackend, reproduced: frozenset[str]) -> None:
        self.pairing = pairing
        self.backend = backend
        self.reproduced = reproduced
        self.own, self.other = pairing.own.graph, pairing.other.graph

    # -- recordings ----------------------------------------------------------------------------------------------------

    def of(self, recording: Recording, fed: Mapping[str, Array]) -> Recording:
        values, how = dict(fed), dict.fromkeys(fed, "fed")
        absent = dict(self.pairing.unmatched)
        failed: dict[str, str] = {}
        parameters: dict[str, Parameters] = {}
        off_grid: dict[str, float] = {}
        for name, match in self.pairing.matches.items():
            theirs = match.theirs
            if name in fed:
                continue
            if theirs in recording.values:
                values[name] = own_codes(self.pairing, name, match.order.apply(recording.values[theirs]))
                how[name] = self.how(match, recording.how.get(theirs, ""))
            else:
                why = recording.failed.get(theirs, recording.absent.get(theirs, "it was not recorded"))
                (failed if theirs in recording.failed else absent)[name] = f"'{theirs}' of the candidate model: {why}"
            found = own_parameters(self.pairing, name, recording.quantisation.get(theirs))
            if found is not None:
                parameters[name] = found
            if theirs in recording.off_grid:
                off_grid[name] = recording.off_grid[theirs]
        return Recording(
            sample=recording.sample,
            values=values,
            how=how,
            outputs=self.outputs(recording),
            absent={name: why for name, why in absent.items() if name not in values},
            failed=failed,
            off_grid=off_grid,
            quantisation=parameters,
            disturbed=recording.disturbed,
        )

    def outputs(self, recording: Recording) -> dict[str, Array]:
        """The model's outputs in its own order: codes of its own grid, else reals."""
        found: dict[str, Array] = {}
        for name in self.own.outputs:
            match = self.pairing.matches.get(self.own.store(name) or name)
            ends = {} if match is None else self._ends(match)
            shown = [out for out in recording.outputs if out in ends]
            if match is not None and shown:
                coded = name == match.own  # of codes and their reals, what the model gives
                end = min(shown, key=lambda out: (recording.outputs[out].dtype.kind in "iu") != coded)
                theirs = self.pairing.other.quantisation(self.other.store(end) or end)
                found[name] = self._output(name, match, ends[end].apply(recording.outputs[end]), theirs)
        return found

    def _ends(self, match: Match) -> dict[str, Order]:
        """The other file's outputs that hold the numbers of a match, with their order."""
        bundle = self.pairing.other.of[match.theirs]
        found = {}
        for name in self.other.outputs:
            stored = self.other.store(name) or name
            if stored in bundle.orders:
                found[name] = bundle.orders[stored].reverse().then(bundle.orders[match.theirs]).then(match.order)
        return found

    def _output(self, name: str, match: Match, array: Array, theirs: Quantisation | None) -> Array:
        if theirs is None or array.dtype.kind not in "iu":
            return array
        coded = name == match.own and match.same_grid
        if coded:
            return own_codes(self.pairing, name, array)
        scale, zero = Quantisation(theirs.scale, theirs.zero_point, theirs.axis).along(array.ndim)
        return np.asarray((array.astype(np.float64) - zero) * scale, np.float32)

    # -- words ---------------------------------------------------------------------------------------------------------

    def how(self, match: Match, seen: str) -> str:
        """How a value was got: how its tensor was seen, and what was done to that."""
        words = [seen or "recorded", f"from '{match.theirs}'"]
        turned = self._in_file(match).words
        words += [turned] if turned else []
        words += ["reordered as the model does"] if match.derived else []
        if not match.derived and match.own not in self.reproduced:
            words.append("not confirmed by its own step")
        return ", ".join(words)

    def _in_file(self, match: Match) -> Order:
        """The order from what lies in the file itself: of a .tflite file, images are read as NCHW already."""
        model, shape = self.backend.other, self.other.values[match.theirs].shape
        if not isinstance(model, TfliteModel) or shape is None:
            return match.order
        index = model.flatbuffer.index_of.get(match.theirs)
        if index is None or index not in model.images:
            return match.order
        stored = model.flatbuffer.tensors[index].shape
        return Order((Turn(IMAGE_AXES),)).then(match.order).plain(stored)

    def notes(self) -> list[str]:
        """What was paired and how, what is fed, and what the model does not have."""
        pairing, name = self.pairing, Path(self.backend.other.path).name
        made = [value for value in self.own.stored if value not in self.own.inputs]
        matches = [pairing.matches[value] for value in made if value in pairing.matches]
        theirs = len(self.other.stored)
        found = [
            f"{len(matches)} of {len(made)} values are paired with {theirs - len(pairing.unmatched_theirs)} of {theirs} of "
            f"{name} by scale, zero point, shape and place; {len(self.reproduced)} are confirmed by their own step"
        ]
        found += [feed.words for feed in self.backend.feeds.values()]
        derived = sum(match.derived for match in matches)
        if derived:
            found.append(
                f"{counted(derived, 'value')} without a counterpart: the model only reorders there what {name} stores once"
            )
        turned = Counter(words for match in matches if not match.derived and (words := self._in_file(match).words))
        found += [f"{words}: {counted(count, 'value')} of {name}" for words, count in turned.most_common(_SHOWN)]
        again = sum(why == REORDERED for why in pairing.unmatched_theirs.values())
        found += (
            [
                f"{counted(again, 'value')} of {name} without a counterpart: there it only reorders what the model stores once"
            ]
            if again
            else []
        )
        fed = {port.theirs for port in pairing.ports}
        rest = {_short(n): why for n, why in pairing.unmatched_theirs.items() if why != REORDERED and n not in fed}
        return [*found, *_listed(f"in {name} only", rest)]

    def warnings(self, weights: Mapping[str, str]) -> list[str]:
        """Where the two files are not the same network: other weights, or hardly a value paired or confirmed."""
        name = Path(self.backend.other.path).name
        made = [value for value in self.own.stored if value not in self.own.inputs]
        matches = [value for value in made if value in self.pairing.matches]
        if 2 * len(matches) < len(made):
            return [f"only {len(matches)} of {len(made)} values have a counterpart: is {name} the same network?"]
        if weights:
            return [self._other_weights(weights)]
        if 2 * len(self.reproduced) < len(matches):
            share = f"{len(self.reproduced)} of {len(matches)}"
            return [f"only {share} paired values are what the model's own steps give: is {name} the same network?"]
        return []

    def _other_weights(self, weights: Mapping[str, str]) -> str:
        steps = [self.own.step_of_value[value] for value in weights]
        more = ", ".join(f"#{step.id}" for step in steps[1 : 1 + _SHOWN]) + (" ..." if len(steps) > 1 + _SHOWN else "")
        first = f"the candidate model has other weights at #{steps[0].id} {steps[0].op_type}: {next(iter(weights.values()))}"
        return first + (f"; and at {len(steps) - 1} more: {more}" if more else "")

    def step(self, theirs: int | None) -> int | None:
        """The model's step that makes what step `theirs` of the other file makes, or None."""
        return self._steps.get(theirs) if theirs is not None else None

    @cached_property
    def _steps(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for match in self.pairing.matches.values():
            step, other = self.own.step_of_value.get(match.own), self.other.step_of_value.get(match.theirs)
            if step is not None and other is not None and not match.derived:
                found.setdefault(other.id, step.id)
        return found

    def name(self, theirs: str) -> str:
        """The model's value that `theirs` is paired with; itself where it is with none."""
        return next((m.own for m in self.pairing.matches.values() if m.theirs == theirs and not m.derived), theirs)


def _short(name: str) -> str:
    """The last piece of a name: real names reach 800 characters."""
    return name if len(name) <= _LENGTH else f"...{name[-_LENGTH:]}"


def _listed(what: str, reasons: Mapping[str, str]) -> list[str]:
    if not reasons:
        return []
    shown = [f"{name} ({why})" for name, why in list(reasons.items())[:_SHOWN]]
    more = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    return [f"{what}: {', '.join(shown)}{more}"]
