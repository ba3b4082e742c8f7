"""Evidence and a tolerance in, a Result out. Pure: runs nothing, reads no clock, touches no file.

Order of checks for every stored value: structure, dtype and shape, quantisation parameters, then values - this step's
error against the real value, on the inputs that side itself had. A rule of the tolerance wins where it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import Literal

import numpy as np

from equivcheck.metrics import INFINITE, StepTally, Tally
from equivcheck.models.graph import Graph, Step
from equivcheck.plan import Plan, merged_steps
from equivcheck.result import (
    Cause,
    Coverage,
    Culprit,
    How,
    Limit,
    Local,
    Model,
    Named,
    Place,
    Result,
    RunVerdict,
    SampleInfo,
    SampleRow,
    Side,
    SplitPoint,
    StepInfo,
    Tensor,
    ValueInfo,
)
from equivcheck.structure import Structure
from equivcheck.task_figures import TaskFigures
from equivcheck.thresholds import Held, by_preset, by_rules, figures
from equivcheck.tolerance import Excess, Tolerance, legal_excess

Kind = Literal["reference", "candidate", "fed", "stress"]
KINDS: tuple[Kind, ...] = ("reference", "candidate", "fed", "stress")
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_THIN_SHARE = 0.01  # a step with fewer unclamped elements than this saw almost nothing of its own arithmetic
_AMPLIFIED_LSB = 2.0
_ON_GRID = 1e-3  # steps: a code times its scale, computed in float32, stays closer
_FLOOR_EXCESS = 0.45  # truncation and floor land up to 1 LSB from the real value: an excess of nearly 1/2


@dataclass(frozen=True)
class Look:
    """What an illegal step's error looks like: its cause, where one was confirmed, and where in the tensor it lies."""

    cause: Cause | None
    place: Place


@dataclass(frozen=True, eq=False)
class Evidence:
    """All that was measured on one sample. `local[kind][value]`, and for float values the a-priori bound beside it.

    `untrustworthy` and `looks` are by kind and value too: why a dump is not what the engine computed with, and what an
    illegal step's error looks like.
    """

    sample: SampleInfo
    accumulated: Mapping[str, Tally]
    local: Mapping[Kind, Mapping[str, StepTally]]
    bounds: Mapping[Kind, Mapping[str, float]]
    untrustworthy: Mapping[Kind, Mapping[str, str]] = field(default_factory=dict)
    looks: Mapping[Kind, Mapping[str, Look]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SideEvidence:
    """What one side delivered: shapes and dtypes, how, and why not."""

    side: Side
    values: Mapping[str, ValueInfo]
    how: Mapping[str, str]
    absent: Mapping[str, str]
    failed: Mapping[str, str]
    declared: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    broke: str | None = None  # the engine's last words, where it did not finish


@dataclass(frozen=True, eq=False)
class Case:
    """Everything a verdict depends on."""

    graph: Graph
    plan: Plan
    tolerance: Tolerance
    model: Model
    reference: SideEvidence
    candidate: SideEvidence
    evidence: Sequence[Evidence]
    structure: Structure
    notes: Sequence[str]
    again: str
    versions: Mapping[str, str]
    task: Sequence[TaskFigures] = ()


def judge(case: Case) -> Result:
    """Return the Result for `case`."""
    return _Judge(case).result()


def step_limit(graph: Graph, name: str, declared: Mapping[str, tuple[float, str]]) -> Excess:
    """The legal excess of the step that makes stored value `name`."""
    step = graph.step_of_value[name]
    quantisation = graph.quantisation.get(name)
    bits = 8 if quantisation is None else 8 * quantisation.dtype.itemsize
    return legal_excess(_counted(step), _multiplier(graph, step, name), declared, bits)


def legal(graph: Graph, name: str, tally: StepTally, declared: Mapping[str, tuple[float, str]]) -> bool:
    """Whether a step with quantised output is within its legal excess, its envelope included; True for float outputs."""
    if tally.half == 0.0 or not tally.by_channel.size:
        return True
    limits = step_limit(graph, name, declared).limits(tally.by_channel.size) + tally.envelope
    return bool(np.all(tally.by_channel - tally.half <= limits))


def _counted(step: Step) -> tuple[str, ...]:
    """The ops of a step that its limit depends on: a Relu or Clip behind another op adds nothing."""
    return tuple(op for op in step.ops if op not in ("Relu", "Clip", "DequantizeLinear")) or step.ops


def _multiplier(graph: Graph, step: Step, name: str) -> np.ndarray | None:
    """s_in * s_w / s_out of the step's linear operator (float64, 0-d or one an output channel), or None."""
    linear = [graph.nodes[index] for index in step.nodes if graph.nodes[index].op_type in _LINEAR]
    out = graph.quantisation.get(name)
    if len(linear) != 1 or out is None:
        return None
    scales = [out_scale for i in linear[0].inputs[:2] if (out_scale := _scale_of(graph, i)) is not None]
    if len(scales) != 2:
        return None
    product = (
        scales[0].astype(np.float64).ravel()
        * scales[1].astype(np.float64).ravel()
        / out.scale.astype(np.float64).ravel()
    )
    return np.asarray(product)


def _scale_of(graph: Graph, name: str) -> np.ndarray | None:
    """Scale behind a float value: of the stored value it stands for, or of a constant's DQ."""
    stored = graph.alias_of.get(name)
    if stored is not None and stored in graph.quantisation:
        return graph.quantisation[stored].scale
    node = graph.producer.get(name)
    found = graph.parameters(node) if node is not None and node.op_type == "DequantizeLinear" else None
    return None if found is None else found.scale


@dataclass(frozen=True)
class _Finding:
    """How one value's local error stands to its limit, at the channel that is nearest to it or furthest beyond."""

    excess: float
    limit: float
    rule: str
    legal: bool
    declared: str = ""  # the engine's own words, where only its declaration makes the step legal


class _Judge:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.graph = case.graph
        self.local: dict[Kind, dict[str, StepTally]] = {kind: self._merge_local(kind) for kind in KINDS}
        self.bounds: dict[Kind, dict[str, float]] = {
            kind: {n: max(e.bounds.get(kind, {}).get(n, 0.0) for e in case.evidence) for n in self.local[kind]}
            for kind in KINDS
        }
        self.accumulated = self._merge_accumulated()

    def _merge_local(self, kind: Kind) -> dict[str, StepTally]:
        found: dict[str, StepTally] = {}
        for evidence in self.case.evidence:
            for name, tally in evidence.local.get(kind, {}).items():
                found[name] = found[name] + tally if name in found else tally
        return found

    def _merge_accumulated(self) -> dict[str, Tally]:
        names = dict.fromkeys(name for evidence in self.case.evidence for name in evidence.accumulated)
        return {
            name: reduce(add, (e.accumulated[name] for e in self.case.evidence if name in e.accumulated))
            for name in names
        }

    # -- one value -----------------------------------------------------------------------------------------------------

    def finding(self, kind: Kind, name: str) -> _Finding | None:
        """Judge one local error; None where it was not measured."""
        tally = self.local[kind].get(name)
        if tally is None:
            return None
        if tally.half == 0.0:  # a float, or codes without quantisation: the a-priori bound of its operator
            bound = self.bounds[kind].get(name, 0.0)
            rule = "a-priori bound of float32 summation (Higham)"
            return _Finding(tally.excess, bound, rule, tally.excess <= bound)
        declared = (self.case.reference if kind == "reference" else self.case.candidate).declared
        excess = step_limit(self.graph, name, declared)
        limits = excess.limits(tally.by_channel.size) + tally.envelope
        given = self._given(name, "local").get("excess")
        rule = excess.rule
        if given is not None:
            limits, rule = np.full_like(limits, given), f"rule of {self.case.tolerance.source}"
        elif tally.merged:
            rule += f", and the envelope of {len(tally.merged)} missing value{'s' if len(tally.merged) > 1 else ''}"
        by_channel = np.maximum(tally.by_channel - tally.half, 0.0)
        worst = int(np.argmax(by_channel - limits)) if by_channel.size else 0
        if not by_channel.size:
            return _Finding(0.0, excess.base, rule, True)
        legal = bool(by_channel[worst] <= limits[worst])
        leaning = legal and given is None and bool(np.any(by_channel > limits - excess.declared))
        return _Finding(float(by_channel[worst]), float(limits[worst]), rule, legal, excess.reason if leaning else "")

    @cached_property
    def untrustworthy(self) -> dict[str, str]:
        """Values that the candidate's recording shows wrong, with the evidence: no verdict rests on them."""
        return {name: why for e in self.case.evidence for name, why in e.untrustworthy.get("candidate", {}).items()}

    @cached_property
    def findings(self) -> dict[tuple[Kind, str], _Finding]:
        return {
            (kind, name): found
            for kind in KINDS
            for name in self.case.plan.rows
            if (found := self.finding(kind, name)) is not None
        }

    def _given(self, name: str, on: str) -> dict[str, float]:
        step = self.graph.step_of_value[name]
        info = self.case.reference.values.get(name) or self.case.candidate.values.get(name)
        main = self.graph.nodes[step.main].op_type
        return self.case.tolerance.given(name, main, info.dtype or "" if info else "", on)

    def verdict(self, name: str) -> Held:
        """(verdict, reason in a sentence, the limit it was held against)."""
        case = self.case
        if name in case.structure.incomparable:
            return "incomparable", case.structure.incomparable[name], None
        if name in case.structure.parameters_differ:
            return "different", case.structure.parameters_differ[name], None
        if name in case.structure.not_numbers:
            return "unjudged", case.structure.not_numbers[name], None
        if name not in case.candidate.values:
            return "unjudged", self._missing(name), None
        if name in self.untrustworthy:
            return "unjudged", f"untrustworthy: {self.untrustworthy[name]}", None
        by_rule = self._by_accumulated(name)
        if by_rule is not None and (by_rule[0] == "different" or ("candidate", name) not in self.findings):
            return by_rule
        if case.tolerance.preset != "semantics" and by_rule is None:
            return by_preset(case.tolerance, self.accumulated.get(name))
        return self._by_step(name, by_rule)

    def _missing(self, name: str) -> str:
        case = self.case
        if name in case.candidate.failed:
            return f"the candidate failed here: {case.candidate.failed[name]}"
        if case.candidate.broke:
            return "not reached: the candidate broke before"
        return f"not observed on the candidate: {case.candidate.absent.get(name, 'it does not deliver it')}"

    def _by_step(self, name: str, by_rule: Held | None) -> Held:
        second = next(
            (
                (kind, f)
                for kind in ("fed", "stress")
                if (f := self.findings.get((kind, name))) is not None and not f.legal
            ),
            None,
        )
        own = self.findings.get(("candidate", name))
        if own is None:
            return "unjudged", "its step could not be evaluated on the candidate's own inputs", None
        metric = "excess" if self.local["candidate"][name].half else "max_abs"
        limit = Limit(metric=metric, rule=own.rule, max=own.limit)
        if not own.legal:
            return (
                "different",
                f"on its own input the candidate is {_held(own, metric)}",
                limit,
            )
        if second is not None:
            kind, found = second
            inputs = "the reference's values" if kind == "fed" else "seeded random codes"
            text = f"fed with {inputs}, the candidate's step is {_held(found, metric)}"
            return "different", text, Limit(metric=metric, rule=found.rule, max=found.limit)
        broken = self._by_local_rule(name)
        if broken is not None:
            return broken
        if by_rule is not None:
            return by_rule
        same = self.accumulated.get(name)
        if same is not None and same.mismatched == 0:
            return "identical", "every code is equal to the reference's, and its step is legal", limit
        return (
            "equivalent",
            f"its step is legal: {_held(own, metric)}",
            limit,
        )

    def _by_local_rule(self, name: str) -> Held | None:
        """A limit that rules give this step beside its excess, and that it does not hold; None where it holds all."""
        error = self.local["candidate"][name].finish()
        figures = {
            "max_lsb": error.max_lsb,
            "bias_lsb": abs(error.bias_lsb),
            "mismatch_share": error.off / error.n if error.n else 0.0,
        }
        for metric, limit in self._given(name, "local").items():
            if metric in figures and figures[metric] > limit:
                held = Limit(metric=metric, rule=f"rule of {self.case.tolerance.source}", max=limit)
                return "different", f"{metric} of this step is {figures[metric]:.6g}, the rule allows {limit:g}", held
        return None

    def _by_accumulated(self, name: str) -> Held | None:
        """Apply the accumulated limits that rules give this tensor; None where none is given."""
        tally = self.accumulated.get(name)
        return None if tally is None else by_rules(self._given(name, "accumulated"), tally, self.case.tolerance.source)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def row(self, name: str) -> Tensor:
        case, step = self.case, self.graph.step_of_value[name]
        node = self.graph.main_node(step)
        verdict, reason, limit = self.verdict(name)
        own = self.local["candidate"].get(name)
        tally = self.accumulated.get(name)
        would = _would_pass(limit, self.findings, name, tally)
        return Tensor(
            name=name,
            step=step.id,
            node=node.label,
            op_type=self._op_type(step),
            roles=list(case.plan.roles[name]),
            aliases=list(self.graph.aliases(name)),
            how=How(reference=case.reference.how.get(name), candidate=case.candidate.how.get(name)),
            reference=case.reference.values.get(name) or _declared(self.graph, name),
            candidate=case.candidate.values.get(name) or ValueInfo(dtype=None, shape=None),
            accumulated=None if tally is None else tally.finish(),
            local=self._local(name),
            verdict=verdict,
            reason=reason,
            limit=limit,
            would_pass_at=would,
            would_hide=_would_hide(would.get("excess")) if verdict == "different" else None,
            unsaturated_share=None if own is None or not own.n else 1.0 - own.saturated / own.n,
            silent_channels=0 if own is None else int(np.count_nonzero(~own.live)),
            channels=0 if own is None else int(own.live.size),
            by_sample=self._by_sample(name),
        )

    def _op_type(self, step: Step) -> str:
        """The operator's name as the file has it (QLinearConv), or the island's."""
        node = self.graph.main_node(step)
        return node.op_type if "+" not in step.op_type and node.op_type != "QuantizeLinear" else step.op_type

    def _local(self, name: str) -> Local:
        return Local(**{kind: tally.finish() for kind in KINDS if (tally := self.local[kind].get(name)) is not None})

    def _by_sample(self, name: str) -> list[SampleRow]:
        if len(self.case.evidence) < 2:
            return []
        return [
            SampleRow(
                sample=e.sample.id,
                accumulated=e.accumulated[name].finish() if name in e.accumulated else None,
                local=Local(**{k: e.local[k][name].finish() for k in KINDS if name in e.local.get(k, {})}),
            )
            for e in self.case.evidence
        ]

    # -- the run -------------------------------------------------------------------------------------------------------

    def result(self) -> Result:
        case = self.case
        rows = [self.row(name) for name in case.plan.rows]
        culprits = self.culprits(rows)
        reference_culprits = self.reference_culprits()
        coverage = self.coverage(rows)
        verdict, reason = self.run_verdict(rows, culprits, coverage)
        mismatch = next((r.name for r in rows if r.accumulated is not None and r.accumulated.mismatched), None)
        return Result(
            verdict=verdict,
            reason=reason,
            model=case.model,
            samples=[evidence.sample for evidence in case.evidence],
            reference=case.reference.side,
            candidate=case.candidate.side,
            coverage=coverage,
            split_points=[
                SplitPoint(
                    selector=point.selector,
                    node=point.node.label if point.node else None,
                    op_type=point.node.op_type if point.node else None,
                    step=point.step.id if point.step else None,
                    before=list(point.before),
                    after=list(point.after),
                )
                for point in case.plan.points
            ],
            tensors=rows,
            steps=[
                StepInfo(
                    id=step.id,
                    ops=list(step.ops),
                    nodes=[self.graph.nodes[index].label for index in step.nodes],
                    inputs=list(step.inputs),
                    outputs=list(step.outputs),
                )
                for step in self.graph.steps
            ],
            first_mismatch=mismatch,
            first_culprit=culprits[0].step if culprits else None,
            culprits=culprits,
            reference_culprits=reference_culprits,
            notes=[*case.notes, *self.notes(rows, culprits, reference_culprits)],
            tolerance=case.tolerance.source,
            again=case.again,
            versions=dict(case.versions),
            task=list(case.task),
        )

    def culprits(self, rows: Iterable[Tensor]) -> list[Culprit]:
        found: dict[int, list[Tensor]] = {}
        for row in rows:
            if row.verdict == "different" and row.step is not None and self._blames_step(row):
                found.setdefault(row.step, []).append(row)
        return [self._culprit(step, tensors) for step, tensors in sorted(found.items())]

    def _blames_step(self, row: Tensor) -> bool:
        """A step is a culprit for its own error or parameters; a difference since the input alone blames none."""
        if row.name in self.case.structure.parameters_differ:
            return True
        kinds: tuple[Kind, ...] = ("candidate", "fed", "stress")
        return any(not f.legal for kind in kinds if (f := self.findings.get((kind, row.name))) is not None)

    def _culprit(self, step: int, tensors: Sequence[Tensor]) -> Culprit:
        worst = max(tensors, key=lambda t: t.local.candidate.excess if t.local.candidate else 0.0)
        look = self._look(worst.name, ("candidate", "fed", "stress"))
        return Culprit(
            step=step,
            steps=self._steps_of(worst.name, "candidate"),
            node=worst.node or "",
            op_type=worst.op_type or "",
            outputs=[t.name for t in tensors],
            local=worst.local,
            limit=worst.limit,
            reason=worst.reason,
            cause=look.cause if look else None,
            place=look.place if look else None,
        )

    def _look(self, name: str, kinds: Sequence[Kind]) -> Look | None:
        """What the error at `name` looks like: by the first evidence with a cause, else the first there is."""
        found = [look for kind in kinds for e in self.case.evidence if (look := e.looks.get(kind, {}).get(name))]
        return next((look for look in found if look.cause is not None), found[0] if found else None)

    def _steps_of(self, name: str, kind: Kind) -> list[int]:
        """Ids of the steps that were judged as one for `name`."""
        tally = self.local[kind].get(name)
        return sorted({step.id for step in merged_steps(self.graph, name, () if tally is None else tally.merged)})

    def reference_culprits(self) -> list[Culprit]:
        found = []
        for name in self.case.plan.rows:
            finding = self.findings.get(("reference", name))
            if finding is None or finding.legal:
                continue
            step = self.graph.step_of_value[name]
            metric = "excess" if self.local["reference"][name].half else "max_abs"
            look = self._look(name, ("reference",))
            found.append(
                Culprit(
                    step=step.id,
                    steps=self._steps_of(name, "reference"),
                    node=self.graph.main_node(step).label,
                    op_type=self._op_type(step),
                    outputs=[name],
                    local=self._local(name),
                    limit=Limit(metric=metric, rule=finding.rule, max=finding.limit),
                    reason=f"the reference is not the model here: {_held(finding, metric)}",
                    cause=look.cause if look else None,
                    place=look.place if look else None,
                )
            )
        return found

    def coverage(self, rows: Sequence[Tensor]) -> Coverage:
        case = self.case
        by_step: dict[int, list[Tensor]] = {}
        for row in rows:
            by_step.setdefault(row.step or 0, []).append(row)
        judged = [
            step
            for step, tensors in by_step.items()
            if all(t.verdict not in ("unjudged", "incomparable") for t in tensors)
        ]
        thin = [
            step
            for step, tensors in by_step.items()
            if any(t.unsaturated_share is not None and t.unsaturated_share < _THIN_SHARE for t in tensors)
        ]
        return Coverage(
            steps=len(by_step),
            judged=len(judged),
            weak=len(thin),
            silent_channels=sum(t.silent_channels for t in rows),
            channels=sum(t.channels for t in rows),
            compared=sum(all(t.accumulated is not None for t in ts) for ts in by_step.values()),
            bitwise=sum(
                all(t.accumulated is not None and t.accumulated.identical for t in ts) for ts in by_step.values()
            ),
            absent=[
                Named(name=name, reason=f"{who}: {reason}")
                for who, side in (("reference", case.reference), ("candidate", case.candidate))
                for name, reason in side.absent.items()
                if name in case.plan.roles
            ],
            failed=[
                *(Named(name=name, reason=reason) for name, reason in case.candidate.failed.items()),
                *(Named(name=name, reason=f"reference: {why}") for name, why in case.reference.failed.items()),
            ],
        )

    def run_verdict(
        self, rows: Sequence[Tensor], culprits: Sequence[Culprit], coverage: Coverage
    ) -> tuple[RunVerdict, str]:
        case = self.case
        if culprits:
            many = f"{len(culprits)} culprits, the first is" if len(culprits) > 1 else "1 culprit:"
            return "different", f"{many} step #{culprits[0].step} {culprits[0].op_type} '{culprits[0].node}'"
        differing = [row for row in rows if row.verdict in ("different", "incomparable")]
        if differing:
            return "different", f"{differing[0].name}: {differing[0].reason}"
        for name, how in case.structure.inputs_differ.items():
            return "different", f"the two sides were not fed the same '{name}': {how}"
        broke = case.candidate.broke or case.reference.broke
        if broke:
            side = "candidate" if case.candidate.broke else "reference"
            return "inconclusive", f"the {side} did not finish: {broke}"
        if case.candidate.failed:
            name, why = next(iter(case.candidate.failed.items()))
            count = len(case.candidate.failed)
            return (
                "inconclusive",
                f"{count} value{'s' * (count > 1)} failed on the candidate, the first is {name}: {why}",
            )
        if self.untrustworthy:
            name, why = next(iter(self.untrustworthy.items()))
            return "inconclusive", f"the candidate's dump of {name} is untrustworthy: {why}"
        if not coverage.judged:
            return "inconclusive", "no step could be judged"
        if all(tally.n == 0 for tally in self.local["candidate"].values()):
            return "inconclusive", "no element was judged: the tensors are empty"
        unseen = [row for row in rows if row.roles != ["tap"] and row.verdict == "unjudged"]
        if unseen:
            return "inconclusive", f"{unseen[0].name} ({', '.join(unseen[0].roles)}) was not judged: {unseen[0].reason}"
        for seen in (case.reference.side, case.candidate.side):
            if seen.observation.disturbed:
                return (
                    "inconclusive",
                    f"observing {seen.spec} changed its final output, so its inner values prove nothing",
                )
        return "equivalent", "every judged step is a legal evaluation of the model"

    def notes(
        self, rows: Sequence[Tensor], culprits: Sequence[Culprit], reference_culprits: Sequence[Culprit]
    ) -> list[str]:
        found = []
        fed_alike = not self.case.structure.inputs_differ
        legal_rows = [r for r in rows if fed_alike and r.verdict in ("identical", "equivalent")]
        measured = [r for r in legal_rows if r.accumulated is not None and r.accumulated.max_lsb is not None]
        worst = max(measured, key=lambda r: r.accumulated.max_lsb or 0.0, default=None) if measured else None  # type: ignore[union-attr]  # filtered above
        if (
            worst is not None
            and worst.accumulated is not None
            and not culprits
            and not reference_culprits
            and (worst.accumulated.max_lsb or 0) > _AMPLIFIED_LSB
        ):
            found.append(
                f"the network amplifies: legal rounding grows to {worst.accumulated.max_lsb:.0f} LSB by #{worst.step}; "
                "that is this network, not an error"
            )
        found += self._declarations()
        found += self._off_grid()
        found += self._idle_rules()
        if reference_culprits:
            first = reference_culprits[0]
            found.append(
                f"reference is not the model here: step #{first.step} {first.op_type} '{first.node}' ({first.reason}); "
                "nobody else is blamed for it"
            )
        return found

    def _idle_rules(self) -> list[str]:
        """Rules of the tolerance that match no judged tensor: a misspelt name would pass unseen."""
        used = set()
        for name in self.case.plan.rows:
            main = self.graph.nodes[self.graph.step_of_value[name].main].op_type
            info = self.case.reference.values.get(name) or self.case.candidate.values.get(name)
            dtype = info.dtype or "" if info else ""
            used |= {
                k
                for k, rule in enumerate(self.case.tolerance.rules)
                if any(rule.matches(name, main, dtype, on) for on in ("local", "accumulated"))
            }
        source = self.case.tolerance.source
        return [
            f"{source}: rule[{k}] (tensor '{rule.tensor}', op_type '{rule.op_type}') matches no judged tensor"
            for k, rule in enumerate(self.case.tolerance.rules)
            if k not in used
        ]

    def _off_grid(self) -> list[str]:
        """Values that were read as floats and lie off their grid: the engine did not quantise there."""
        found = []
        for side in ("candidate", "reference"):
            off = {n: t.off_grid for n, t in self.local[side].items() if t.off_grid > _ON_GRID}
            if off:
                worst = max(off, key=lambda name: off[name])
                found.append(
                    f"the {side} did not quantise {len(off)} of the values it delivered as floats: {worst} lies "
                    f"{off[worst]:.2g} of a step off its grid; it was judged by the nearest code"
                )
        return found

    def _declarations(self) -> list[str]:
        """Steps that are legal only because their engine declares a wider limit: said, once an op_type and side."""
        found: dict[tuple[str, str], str] = {}
        for (kind, name), finding in self.findings.items():
            if finding.declared:
                step = self.graph.step_of_value[name]
                side = "reference" if kind == "reference" else "candidate"
                found.setdefault(
                    (side, step.op_type),
                    f"{side} #{step.id} {step.op_type}: {finding.excess:.2f} LSB beyond rounding passes only because its "
                    f"engine declares {finding.limit:.2f}: {finding.declared}",
                )
        return list(found.values())


def _would_pass(
    limit: Limit | None, findings: Mapping[tuple[Kind, str], _Finding], name: str, tally: Tally | None
) -> dict[str, float]:
    if limit is None:
        return {}
    if limit.metric in ("excess", "max_abs"):
        kinds: tuple[Kind, ...] = ("candidate", "fed", "stress")
        values = [findings[kind, name].excess for kind in kinds if (kind, name) in findings]
        return {limit.metric: min(max(values), INFINITE)} if values else {}
    value = figures(tally).get(limit.metric) if tally is not None else None
    return {} if value is None or value == float("inf") else {limit.metric: value}


def _would_hide(excess: float | None) -> str | None:
    if excess is None or excess < _FLOOR_EXCESS:
        return None
    if excess >= INFINITE:
        return "anything at all"
    return "truncation in this step" if excess < 1.0 else f"truncation and any code off by {int(excess)} in this step"


def _declared(graph: Graph, name: str) -> ValueInfo:
    value = graph.values.get(name)
    return ValueInfo(dtype=value.dtype if value else None, shape=None)


def _held(finding: _Finding, metric: str) -> str:
    """How far a step is from its real value, and how far it may be, in words."""
    if metric == "excess":
        return f"{finding.excess:.2f} LSB beyond correct rounding, the limit is {finding.limit:.2f}"
    return f"{finding.excess:.3g} away from the exact result, the limit is {finding.limit:.3g}"
