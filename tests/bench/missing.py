"""Faults in dumps that lack values: is the culprit still found, and is the merged step the right one?

    python tests/bench/missing.py [--seed N] [-m SUBSTRING] [--sites N] [--shares 10,30,50]

Plants every kind of fault as faults.py does, records the faulty side, drops a share of its values (never the graph's
inputs and outputs) and judges what is left by itself, as `compare CAND --model MODEL` does. A fault is *active* where an
independent float64 oracle says so (oracle.py). Where a value beside the faulty step is dropped, a fault can drown in
the noise that the missing value may legally have; it counts as *visible* where the first values that are left behind it differ
from a run without the fault by more than twice what moving every missing value by half a code, in 16 runs, moves them.
Legal dumps: LiteRT's kernels on three twins, and two profiles. Exits 1 where a visible fault is missed or a legal one blamed.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench import legal
from bench.planting import PROFILES, able
from bench.runs import Prepared, Source, sources
from equivcheck.backends.base import Backend, Runner, Session
from equivcheck.backends.recorded import NoReference
from equivcheck.backends.spec import Spec
from equivcheck.check import Request, run
from equivcheck.models.graph import Array
from equivcheck.recording import Recording
from equivcheck.result import Observation, Result, Side
from equivcheck.vnpu.faults import KINDS as FAULT_KINDS
from equivcheck.vnpu.faults import Fault

TWINS = ("coral_tf2", "mcunet_vww", "tiny_resnet8")
SMALL_ENOUGH = ("detector_qdq_s8", "digits_qdq_u8", "tiny", "mcunet", "st_mobilenet", "furiosa")
_NOISE_RUNS = 16


@dataclass(frozen=True)
class Outcome:
    model: str
    kind: str
    share: int
    visible: bool
    found: bool
    right: bool
    merged: int
    false: tuple[int, ...]


class Left(Backend):
    """What is left of one recording."""

    name = "left"
    summary = ""
    second_opinion = False

    def __init__(self, recording: Recording, declared: Mapping[str, tuple[float, str]]) -> None:
        super().__init__(Spec("left"))
        self.recording, self.declared = recording, declared

    def open(self, model: object) -> Session:
        return _Playing(self.recording)

    def deploy(self, proto: object) -> Runner:
        raise NotImplementedError

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        return self.declared


class _Playing(Session):
    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        return self.recording

    @property
    def side(self) -> Side:
        return Side(
            spec="left", engine="left", version="", device="", model_sha256="", observation=Observation(method="dump")
        )


def judged(prepared: Prepared, recording: Recording, declared: Mapping[str, tuple[float, str]], sample: int) -> Result:
    return run(
        Request(
            model=prepared.model,
            samples=[prepared.samples[sample]],
            split_at=[],
            reference=NoReference(),
            candidate=Left(recording, declared),
            second_opinion=False,
        )
    )


def dropped(prepared: Prepared, recording: Recording, share: int, rng: np.random.Generator) -> Recording:
    graph = prepared.model.graph
    kept_always = {*graph.inputs, *(graph.store(name) for name in graph.outputs)}
    droppable = [name for name in recording.values if name in graph.step_of_value and name not in kept_always]
    gone = set(rng.permutation(droppable)[: round(len(droppable) * share / 100)].tolist())
    values = {name: array for name, array in recording.values.items() if name not in gone}
    return replace(recording, values=values, results=None, absent=dict.fromkeys(gone, "dropped"))


def faults(prepared: Prepared, sites: int, seed: int) -> Iterator[tuple[str, Fault, int]]:
    """(profile, fault, sample): every kind at up to `sites` random steps."""
    for number, kind in enumerate(FAULT_KINDS):
        rng = np.random.default_rng([seed, zlib.crc32(prepared.source.name.encode()), zlib.crc32(kind.encode())])
        for k, step in enumerate(rng.permutation(able(prepared, kind))[:sites].tolist()):
            fault = Fault(kind, f"#{step}", int(rng.integers(1 << 16)))
            yield PROFILES[(number + k) % len(PROFILES)], fault, (number + k) % len(prepared.samples)


def planted(source: Source, shares: list[int], sites: int, seed: int) -> list[Outcome]:
    prepared = Prepared(source)
    graph = prepared.model.graph
    found: list[Outcome] = []
    for profile, fault, sample in sorted(faults(prepared, sites, seed), key=lambda entry: entry[0]):
        npu = prepared.npu(profile)
        feeds = prepared.samples[sample].arrays()
        npu.fault = None
        npu.fault = fault
        try:
            faulty = npu.open(prepared.model).run("s", feeds)
        finally:
            npu.fault = None
        step = graph.steps[int(fault.at.removeprefix("#")) - 1]
        declared = {op: limit for op, (limit, _) in npu.legal_excess().items()}
        if max(prepared.oracle.read(n, faulty.values, declared).margin for n in step.outputs) <= 0:
            continue
        for share in shares:
            rng = np.random.default_rng([seed, share, step.id, zlib.crc32(fault.kind.encode())])
            left = dropped(prepared, faulty, share, rng)
            result = judged(prepared, left, npu.legal_excess(), sample)
            holding = [c for c in result.culprits if step.id in c.steps]
            others = tuple(c.step for c in result.culprits if step.id not in c.steps)
            whole = all(n in left.values for n in (*step.inputs, *step.outputs))
            visible = whole or seen(prepared, npu, fault, left)
            found.append(
                Outcome(
                    source.name, fault.kind, share, visible,
                    found=bool(holding),
                    right=bool(result.culprits) and step.id in result.culprits[0].steps,
                    merged=max((len(c.steps) for c in holding), default=0),
                    false=others,
                )
            )  # fmt: skip
    return found


def seen(prepared: Prepared, npu, fault: Fault, left: Recording) -> bool:
    """Do the first values left behind the fault differ from a faultless run by more than legal noise can move them?"""
    graph = prepared.model.graph
    program = npu.compile(prepared.model)
    step = graph.steps[int(fault.at.removeprefix("#")) - 1]
    rng = np.random.default_rng(0)

    def behind(noise: bool) -> dict[str, Array]:
        values: dict[str, Array] = dict(left.values)
        out: dict[str, Array] = {}
        for one in graph.steps:
            made = program.run_step(one, values)
            for name, array in made.items():
                if name in left.values:
                    out[name] = array
                elif noise and array.dtype.kind in "iu":
                    limits = np.iinfo(array.dtype)
                    moved = array.astype(np.int32) + rng.integers(-1, 2, array.shape) * (rng.random(array.shape) < 0.5)
                    values[name] = moved.clip(limits.min, limits.max).astype(array.dtype)
                else:
                    values[name] = array
        return out

    still = behind(noise=False)
    spread = dict.fromkeys(still, 0.0)
    for _ in range(_NOISE_RUNS):
        for name, array in behind(noise=True).items():
            spread[name] = max(spread[name], float(np.max(np.abs(array.astype(float) - still[name].astype(float)))))
    return any(
        name in left.values
        and float(np.max(np.abs(left.values[name].astype(float) - still[name].astype(float)))) > 2 * spread[name] + 1
        for name in still
        if step.id <= graph.step_of_value[name].id
    )


def legal_dumps(chosen: list[Source], shares: list[int], seed: int) -> list[tuple[str, str, int, int, tuple[int, ...]]]:
    rows = []
    for source in chosen:
        prepared = Prepared(source)
        for engine in [name for name in legal.names() if name.startswith("litert:")]:
            backend = legal.engine(engine, source, prepared)
            if backend is None:
                continue
            for sample in range(len(prepared.samples)):
                recording = backend.open(prepared.model).run("s", prepared.samples[sample].arrays())
                for share in (0, *shares):
                    for draw in range(3 if share else 1):
                        rng = np.random.default_rng([seed, share, draw])
                        left = dropped(prepared, recording, share, rng)
                        result = judged(prepared, left, backend.legal_excess(), sample)
                        rows.append(
                            (source.name, engine, share, result.coverage.judged, tuple(c.step for c in result.culprits))
                        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--shares", default="10,30,50")
    parser.add_argument("-m", "--model", default="")
    arguments = parser.parse_args()
    shares = [int(share) for share in arguments.shares.split(",")]
    started = time.perf_counter()
    everything = [s for s in sources() if arguments.model in s.name]
    outcomes: list[Outcome] = []
    for source in everything:
        if source.name.startswith(SMALL_ENOUGH):
            outcomes += planted(source, shares, arguments.sites, arguments.seed)
            print(f"  {source.name}: {len(outcomes)} so far, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    bad = 0
    print(" share  faults  visible   found   right  others blamed  found though hidden")
    for share in shares:
        rows = [o for o in outcomes if o.share == share]
        seen_ = [o for o in rows if o.visible]
        found, right = sum(o.found for o in seen_), sum(o.right for o in seen_)
        false = sum(bool(o.false) for o in rows)
        hidden = [o for o in rows if not o.visible]
        lucky = sum(o.found for o in hidden)
        print(
            f"{share:>5}% {len(rows):>7} {len(seen_):>8} {found:>7} {right:>7} {false:>14} {lucky:>13} of {len(hidden)}"
        )
        bad += len(seen_) - found
    for o in outcomes:
        if (o.visible and not o.found) or o.false:
            print(f"  {'missed' if not o.found else 'blamed'} {o.model} {o.kind} {o.share}% {o.false or ''}")
    rows = legal_dumps([s for s in everything if s.name.startswith(TWINS)], shares, arguments.seed)
    wrong = [row for row in rows if row[4]]
    kinds = Counter((name, engine) for name, engine, *_ in rows)
    print(f"\nlegal dumps: {len(rows)} of {len(kinds)} model x engine, {len(wrong)} false alarms")
    for row in wrong[:20]:
        print("  false alarm", *row)
    print(f"{time.perf_counter() - started:.0f} s, seed {arguments.seed}")
    return 1 if bad or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
