"""Recordings without a model: tensors are paired by name and held to thresholds. No step can be judged so.

Equal NaNs pass, and equal infinities (their counts are in the metrics). A tensor that the candidate lacks is a difference; one
that only the candidate has is a note. Codes are compared as codes; where the two sides declare different quantisations, as
the real values they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from equivcheck.metrics import Grid, Tally, is_coded, tally
from equivcheck.models.graph import Array, Quantisation
from equivcheck.recorder import Progress, value_info, versions
from equivcheck.recording import Parameters, Recording
from equivcheck.result import (
    Coverage,
    How,
    Local,
    Model,
    Result,
    RunVerdict,
    SampleRow,
    Tensor,
    ValueInfo,
)
from equivcheck.structure import NOT_NUMBERS, shape_hint
from equivcheck.tape import Tape, left_over, paired
from equivcheck.thresholds import CLOSE, Held, by_preset, by_rules, closeness
from equivcheck.tolerance import Tolerance

_NOTHING = ValueInfo(dtype=None, shape=None)


def compare_by_name(
    reference: Tape, candidate: Tape, tolerance: Tolerance, progress: Progress, again: str = ""
) -> Result:
    """Return the Result of comparing two recordings tensor by tensor; one sample is in memory at a time.

    With the preset `semantics` there is nothing to judge by but rules: tensors without one stay unjudged.
    """
    order = paired(reference.samples, candidate)
    rows: dict[str, _Row] = {}
    for number, sample in enumerate(reference.samples):
        progress(f"sample {number + 1} of {len(order)}: {sample.id}")
        ref, cand = reference.read(number), candidate.read(order[number])
        for name in dict.fromkeys([*ref.values, *cand.values, *cand.incomparable]):
            rows.setdefault(name, _Row(name)).take(sample.id, ref, cand, tolerance)
    return _result(reference, candidate, tolerance, rows, again, left_over(candidate, order))


@dataclass
class _Row:
    """One name, over the samples."""

    name: str
    reference: ValueInfo = _NOTHING
    candidate: ValueInfo = _NOTHING
    how: dict[str, str] = field(default_factory=dict)
    incomparable: str | None = None
    missing: str | None = None  # the first sample in which the candidate lacks it
    tallies: dict[str, Tally] = field(default_factory=dict)

    def take(self, sample: str, ref: Recording, cand: Recording, tolerance: Tolerance) -> None:
        a, b = ref.values.get(self.name), cand.values.get(self.name)
        own, theirs = ref.quantisation.get(self.name), cand.quantisation.get(self.name)
        if a is not None:
            self.reference = value_info(a, own)
            self.how.setdefault("reference", ref.how.get(self.name, ""))
        if b is not None:
            self.candidate = value_info(b, theirs)
            self.how.setdefault("candidate", cand.how.get(self.name, ""))
        if a is not None and b is None and self.name not in cand.incomparable:
            self.missing = self.missing or sample
        if self.name in cand.incomparable:
            self.incomparable = cand.incomparable[self.name]
        elif a is not None and b is not None:
            self.incomparable = self.incomparable or _not_comparable(a, b, own, theirs)
            if self.incomparable is None:
                close = closeness(tolerance, self._given(tolerance), coded=is_coded(a.dtype) and is_coded(b.dtype))
                self.tallies[sample] = _tally(a, b, own, theirs, close)

    def _given(self, tolerance: Tolerance) -> dict[str, float]:
        return tolerance.given(self.name, "", self.reference.dtype or "", "accumulated")

    @property
    def total(self) -> Tally | None:
        found: Tally | None = None
        for one in self.tallies.values():
            found = one if found is None else found + one
        return found

    def held(self, tolerance: Tolerance) -> Held:
        """(verdict, reason, limit)."""
        if self.candidate is _NOTHING and self.incomparable is None:
            return "different", "the candidate does not have it", None
        if self.missing is not None:
            return "different", f"the candidate does not have it in sample {self.missing}", None
        if self.reference is _NOTHING:
            return "unjudged", "only the candidate has it", None
        if self.incomparable is not None:
            return "incomparable", self.incomparable, None
        total = self.total
        by_rule = None if total is None else by_rules(self._given(tolerance), total, tolerance.source)
        if by_rule is not None:
            return by_rule
        if tolerance.preset == "semantics":
            return "unjudged", "without the model no step can be judged, and no rule speaks of this tensor", None
        return by_preset(tolerance, total)

    def tensor(self, tolerance: Tolerance) -> Tensor:
        verdict, reason, limit = self.held(tolerance)
        total = self.total
        many = len(self.tallies) > 1
        return Tensor(
            name=self.name,
            step=None,
            node=None,
            op_type=None,
            roles=["tap"],
            aliases=[],
            how=How(reference=self.how.get("reference"), candidate=self.how.get("candidate")),
            reference=self.reference,
            candidate=self.candidate,
            accumulated=None if total is None else total.finish(),
            local=Local(),
            verdict=verdict,
            reason=reason,
            limit=limit,
            by_sample=[
                SampleRow(sample=sample, accumulated=one.finish(), local=Local())
                for sample, one in self.tallies.items()
                if many
            ],
        )


def _not_comparable(a: Array, b: Array, own: Parameters | None, theirs: Parameters | None) -> str | None:
    if a.dtype.kind in NOT_NUMBERS or b.dtype.kind in NOT_NUMBERS:
        return f"{b.dtype} against {a.dtype}: not numbers"
    if a.shape != b.shape:
        return f"shape {list(b.shape)} against {list(a.shape)}{shape_hint(a, b)}"
    if (
        a.dtype != b.dtype
        and (own is None or theirs is None)
        and a.dtype.newbyteorder("=") != b.dtype.newbyteorder("=")
    ):
        hint = "; declare scale and zero point (--names) to compare what the codes stand for"
        return f"dtype {b.dtype} against {a.dtype}{hint if _are_codes(a, b) else ''}"
    return None


def _are_codes(a: Array, b: Array) -> bool:
    return a.dtype.kind in "iu" and b.dtype.kind in "iu"


def _tally(
    a: Array, b: Array, own: Parameters | None, theirs: Parameters | None, close: tuple[float, float] | None
) -> Tally:
    if own is None or theirs is None or not _are_codes(a, b):
        grid = _grid(own or theirs, a.ndim) if _are_codes(a, b) and (own or theirs) is not None else None
        return tally(a, b, grid, None, close)
    if a.dtype == b.dtype and _quantisation(own).same_as(_quantisation(theirs)):
        return tally(a, b, _grid(own, a.ndim), None, close)
    return tally(_real(a, own), _real(b, theirs), None, None, CLOSE if close == (0.0, 0.0) else close)


def _quantisation(parameters: Parameters) -> Quantisation:
    return Quantisation(parameters.scale, parameters.zero_point, parameters.axis)


def _grid(parameters: Parameters | None, ndim: int) -> Grid | None:
    return None if parameters is None else Grid(*_quantisation(parameters).along(ndim))


def _real(codes: Array, parameters: Parameters) -> Array:
    scale, zero = _quantisation(parameters).along(codes.ndim)
    return np.asarray((codes.astype(np.float64) - zero) * scale)


def _result(
    reference: Tape, candidate: Tape, tolerance: Tolerance, rows: Mapping[str, _Row], again: str, unpaired: list[str]
) -> Result:
    tensors = [row.tensor(tolerance) for row in rows.values()]
    verdict, reason = _verdict(tensors)
    judged = [t for t in tensors if t.verdict not in ("unjudged", "incomparable")]
    extra = [t.name for t in tensors if t.reference is _NOTHING]
    notes = [*reference.notes, *candidate.notes, *unpaired]
    notes += [
        f"{tolerance.source}: rule[{k}] (tensor '{rule.tensor}') matches no tensor"
        for k, rule in enumerate(tolerance.rules)
        if not any(rule.matches(t.name, "", t.reference.dtype or "", "accumulated") for t in tensors)
    ]
    if extra:
        notes.append(f"only in the candidate: {', '.join(extra[:5])}{' ...' if len(extra) > 5 else ''}")
    zero = [t.name for t in tensors if t.accumulated is not None and t.accumulated.snr_note == "empty"]
    if zero:
        notes.append(f"no finite pair of elements at all in: {', '.join(zero[:5])}{' ...' if len(zero) > 5 else ''}")
    notes.append("without the model no step can be judged: --model MODEL says which step is the first that is wrong")
    mismatch = next((t.name for t in tensors if t.accumulated is not None and t.accumulated.mismatched), None)
    return Result(
        verdict=verdict,
        reason=reason,
        model=Model(path="", sha256="", format="none", ir_version=0, opsets={}, nodes=0),
        samples=list(reference.samples),
        reference=reference.side,
        candidate=candidate.side,
        coverage=Coverage(
            steps=len(tensors) - len(extra),
            judged=len(judged),
            weak=0,
            silent_channels=0,
            channels=0,
            compared=sum(t.accumulated is not None for t in tensors),
            bitwise=sum(t.accumulated is not None and t.accumulated.identical for t in tensors),
            absent=[],
            failed=[],
        ),
        split_points=[],
        tensors=tensors,
        steps=[],
        first_mismatch=mismatch,
        first_culprit=None,
        culprits=[],
        reference_culprits=[],
        notes=notes,
        tolerance=tolerance.source,
        again=again,
        versions=versions(),
    )


def _verdict(tensors: list[Tensor]) -> tuple[RunVerdict, str]:
    differing = [t for t in tensors if t.verdict in ("different", "incomparable")]
    if differing:
        first = differing[0]
        more = f" (the first of {len(differing)} tensors)" if len(differing) > 1 else ""
        return "different", f"{first.name}: {first.reason}{more}"
    judged = [t for t in tensors if t.verdict in ("identical", "equivalent")]
    if not judged:
        return "inconclusive", "no tensor could be judged"
    unjudged = [t for t in tensors if t.verdict == "unjudged" and t.reference is not _NOTHING]
    if unjudged:
        return "inconclusive", f"{unjudged[0].name}: {unjudged[0].reason}"
    return "equivalent", "every tensor is within the tolerance"
