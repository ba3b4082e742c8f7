"""Plants faults in one model and measures what is made of each: by the oracle, the product, and the peers."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field

import numpy as np

from bench import peers
from bench.runs import Prepared, Run, Source, illegal
from equivcheck.vnpu.faults import KINDS as FAULT_KINDS
from equivcheck.vnpu.faults import Fault

PROFILES = ("tflite-reference", "exact", "ort")


@dataclass(frozen=True)
class Outcome:
    """One planted fault. `flat`, `twice_off` and `margin` are the oracle's excess at its step: as it is, beyond what
    double rounding explains, and beyond the limit (`active` where that is positive)."""

    model: str
    kind: str
    step: int
    op_type: str
    row: str
    seed: int
    profile: str
    sample: int
    flat: float
    twice_off: float
    margin: float
    verdict: str
    culprits: tuple[int, ...]
    photo: bool
    fed: bool
    stress: bool
    product_excess: float
    peers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def active(self) -> bool:
        return self.margin > 0

    @property
    def found(self) -> bool:
        return self.verdict == "different" and self.step in self.culprits

    @property
    def localised(self) -> bool:
        return self.found and self.culprits == (self.step,)

    @property
    def others(self) -> tuple[int, ...]:
        """Steps blamed that are not faulty: false alarms."""
        return tuple(c for c in self.culprits if c != self.step)


def planted(source: Source, *, sites: int, seed: int, with_peers: bool, kinds: tuple[str, ...]) -> list[Outcome]:
    """Plant every kind at up to `sites` random steps of a model."""
    prepared = Prepared(source)
    wanted: list[tuple[str, Fault, int]] = []
    for number, kind in enumerate(kinds):
        rng = np.random.default_rng([seed, zlib.crc32(source.name.encode()), zlib.crc32(kind.encode())])
        steps = able(prepared, kind)
        for k, step in enumerate(rng.permutation(steps)[:sites].tolist()):
            fault = Fault(kind, f"#{step}", int(rng.integers(1 << 16)))
            wanted.append((PROFILES[(number + k) % len(PROFILES)], fault, (number + k) % len(prepared.samples)))
    found = []
    for profile, fault, sample in sorted(wanted, key=lambda entry: entry[0]):
        try:
            found.append(one(prepared, fault, profile, sample, with_peers))
        except Exception as error:  # one broken run must not take the others along: `crashed` is printed as a miss
            found.append(crashed(prepared, fault, profile, sample, error))
    return found


def crashed(prepared: Prepared, fault: Fault, profile: str, sample: int, error: Exception) -> Outcome:
    """An outcome for a run that ended in an exception: active and not found."""
    step = prepared.model.graph.steps[int(fault.at.removeprefix("#")) - 1]
    return Outcome(
        prepared.source.name, fault.kind, step.id, step.op_type, "*", fault.seed, profile, sample,
        flat=1.0, twice_off=1.0, margin=1.0, verdict=f"crashed: {type(error).__name__}: {error}", culprits=(),
        photo=False, fed=False, stress=False, product_excess=0.0, peers=dict.fromkeys(peers.COMPARISONS, 0),
    )  # fmt: skip


def able(prepared: Prepared, kind: str) -> list[int]:
    """The steps of a model that can have a fault of `kind`."""
    program = prepared.npu("exact").compile(prepared.model)
    operators = {step.id: program.op(step) for step in program.graph.steps}
    on_npu = {placed.step for placed in program.placement if placed.where == "npu"}
    return [s for s, op in operators.items() if s in on_npu and op is not None and FAULT_KINDS[kind].applicable(op)]


def one(prepared: Prepared, fault: Fault, profile: str, sample: int, with_peers: bool) -> Outcome:
    started = time.perf_counter()
    npu = prepared.npu(profile)
    npu.fault = fault
    try:
        run = prepared.run(npu, sample)
    finally:
        npu.fault = None
    seconds = time.perf_counter() - started
    graph = prepared.model.graph
    step = graph.steps[int(fault.at.removeprefix("#")) - 1]
    declared = {op: limit for op, (limit, _) in npu.legal_excess().items()}
    readings = [prepared.oracle.read(name, run.candidate.values, declared) for name in step.outputs]
    return Outcome(
        model=prepared.source.name,
        kind=fault.kind,
        step=step.id,
        op_type=step.op_type,
        row=prepared.oracle.row(step.outputs[0], run.candidate.values),
        seed=fault.seed,
        profile=profile,
        sample=sample,
        flat=max(r.flat for r in readings),
        twice_off=max(r.beyond_twice for r in readings),
        margin=max(r.margin for r in readings),
        verdict=run.result.verdict,
        culprits=tuple(c.step for c in run.result.culprits),
        photo=any(illegal(run.case, "candidate", n) for n in step.outputs),
        fed=any(illegal(run.case, "fed", n) for n in step.outputs),
        stress=any(illegal(run.case, "stress", n) for n in step.outputs),
        product_excess=max(
            t.local.candidate.excess for t in run.result.tensors if t.step == step.id and t.local.candidate is not None
        ),
        peers=_peers(prepared, run) if with_peers else {},
        seconds=seconds,
    )


def _peers(prepared: Prepared, run: Run) -> dict[str, int]:
    """Comparison -> the step of the first tensor that fails (0: none does)."""
    graph = prepared.model.graph
    failing = peers.first_failing(
        prepared.reference_floats(run.reference), prepared.floats(run.candidate), run.case.plan.rows
    )
    return {kind: graph.step_of_value[name].id if name else 0 for kind, name in failing.items()}
