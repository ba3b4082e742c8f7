"""Judges recordings instead of runs: `compare`. With a model every step is judged; without one, tensors by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from equivcheck.backends.recorded import NoReference, RecordedBackend
from equivcheck.check import Request, run
from equivcheck.errors import EquivcheckError, RecordingError
from equivcheck.inputs import Sample, samples_from_python
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.pairs import compare_by_name
from equivcheck.plan import Values
from equivcheck.recorder import Progress, input_specs
from equivcheck.result import Result
from equivcheck.tape import Tape, left_over, open_tape, paired
from equivcheck.tolerance import Tolerance, load_tolerance

if TYPE_CHECKING:
    import os

    Path_ = str | os.PathLike[str]


def compare(
    *recordings: Path_,
    model: Path_ | OnnxModel | None = None,
    inputs: object = None,
    preprocess: str | None = None,
    split_at: str | Sequence[str] = (),
    values: Values = "all",
    tolerance: Path_ | Tolerance | None = None,
    reference_layout: str | None = None,
    candidate_layout: str | None = None,
    names: Path_ | None = None,
    reference_names: Path_ | None = None,
    progress: Progress | None = None,
    again: str | None = None,
) -> Result:
    """Judge recordings: `compare(REF, CAND, model=M)`, `compare(CAND, model=M)`, or `compare(REF, CAND)`.

    A recording is a folder that `record` or `diff --save` wrote, or another tool's dump: .npz, .npy, raw, TensorProto (see
    `equivcheck.dumps`). With `model` each side's steps are judged as in `diff`, on the inputs that side itself had; `inputs`
    (as in `diff`) are for dumps that do not hold what was fed. Without it, tensors are paired by name and held to
    `tolerance`, by default the preset `close`. `*_layout`, `names` (`reference_names`, where
    they differ): how to read a foreign dump.
    Raises EquivcheckError for a recording that cannot be read, or that is of something else.
    """
    if not 1 <= len(recordings) <= 2:
        raise EquivcheckError(f"compare takes one or two recordings, got {len(recordings)}", hint="compare(REF, CAND)")
    if model is None and len(recordings) == 1:
        raise RecordingError(
            "one recording alone can only be judged with its model",
            asked=str(recordings[0]),
            hint="give --model MODEL (model= in Python)",
        )
    whole = model if model is None or isinstance(model, OnnxModel) else load_model(model)
    graph = None if whole is None else whole.graph
    *first, last = recordings
    candidate = open_tape(last, graph, layout=candidate_layout, names=names, which="candidate")
    reference = (
        open_tape(first[0], graph, layout=reference_layout, names=reference_names or names, which="reference")
        if first
        else None
    )
    if whole is None:
        assert reference is not None
        limits = load_tolerance("close" if tolerance is None else tolerance)
        return compare_by_name(reference, candidate, limits, progress or (lambda text: None), again or "")
    samples = _samples(whole, reference, candidate, inputs, preprocess)
    for tape in (reference, candidate):
        if tape is not None and tape.model is not None:
            _check_network(whole, tape)
    wanted = [sample.info for sample in samples]
    orders = [None if tape is None else paired(wanted, tape) for tape in (reference, candidate)]
    request = Request(
        model=whole,
        samples=samples,
        split_at=[split_at] if isinstance(split_at, str) else list(split_at),
        reference=NoReference() if reference is None else RecordedBackend.of(reference, paired(wanted, reference)),
        candidate=RecordedBackend.of(candidate, paired(wanted, candidate)),
        values=values,
        tolerance=load_tolerance(tolerance),
        second_opinion=False,
        notes=[
            *_notes(whole, reference, candidate),
            *(n for t, o in zip((reference, candidate), orders) if t and o for n in left_over(t, o)),
        ],
        again=again or "",
        progress=progress or (lambda text: None),
    )
    return run(request)


def _check_network(model: OnnxModel, tape: Tape) -> None:
    """Refuse a recording of another network: other values, or inputs of other shapes. Raises RecordingError."""
    recorded = (
        set(tape.read(0).values)
        if tape.samples and tape.model is not None and tape.model.sha256 != model.sha256
        else None
    )
    if recorded is not None and len(recorded.intersection(model.graph.stored)) * 2 < len(recorded):
        raise RecordingError(
            f"{tape.side.spec}: it was recorded from {Path(tape.model.path).name if tape.model else 'another model'}, "
            "and most of its values are not in this model",
            hint="give the model that it was recorded from",
        )
    for name in model.graph.inputs:
        array, value = tape.feed(0, name), model.graph.values.get(name)
        if array is None or value is None or value.shape is None:
            continue
        pairs = zip(array.shape, value.shape, strict=False)
        if array.ndim != len(value.shape) or any(isinstance(d, int) and 0 <= d != s for s, d in pairs):
            raise RecordingError(
                f"{tape.side.spec}: it was fed '{name}' of shape {list(array.shape)}, the model takes {list(value.shape)}",
                asked=name,
                hint=f"it was recorded from {Path(tape.model.path).name if tape.model else 'another model'}",
            )


def _samples(
    model: OnnxModel, reference: Tape | None, candidate: Tape, inputs: object, preprocess: str | None
) -> Sequence[Sample]:
    """What was fed: what the user says, else what the reference recorded, else the candidate."""
    if inputs is not None:
        return samples_from_python(inputs, input_specs(model.graph), recipe=preprocess).samples
    names = list(model.graph.inputs)
    tapes = [tape for tape in (reference, candidate) if tape is not None]
    holding = next((tape for tape in tapes if tape.samples and tape.as_samples(names)[0].feeds), tapes[0])
    if not holding.samples:
        raise RecordingError("the recording holds no sample", asked=holding.side.spec)
    return holding.as_samples(names)


def _notes(model: OnnxModel, reference: Tape | None, candidate: Tape) -> list[str]:
    notes: list[str] = []
    for role, tape in (("reference", reference), ("candidate", candidate)):
        if tape is None:
            continue
        notes += tape.notes
        if tape.model is not None and tape.model.sha256 != model.sha256:
            notes.append(
                f"the {role} was recorded from another model file: {Path(tape.model.path).name}, "
                f"sha256 {tape.model.sha256[:8]}"
            )
    return notes
