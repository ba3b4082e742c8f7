"""How often the first cause is right: faults planted as bench/faults.py does, each culprit explained.

    python tests/bench/causes.py [--held-back] [--unknown | --legal] [-m SUBSTRING] [-k KIND] [--sites N] [--seed N] [-v]

Held back, by a rule fixed before anything was tuned: every third model by name (the 3rd, 6th, ...), and every 16th kind
of fault by name (the 8th, 24th). Tuning looked at the other models and kinds only; `--held-back` runs what was held back:
all kinds on the models held back, and the kinds held back on all models.

A step runs faulty on the honest values before it, so one run of the model serves all faults. Only what the product
convicts is explained. Prints, per kind: faults convicted, causes right (the kind's family, `EXPECTED`), wrong, none.

The faults are those the causes were written with, so two more figures: `--unknown` withholds the true kinds of cause from
each fault, so that everything named is wrong, as if no hypothesis knew that fault; `--legal` accuses every step of the
legal profiles, held to no excess at all, and prints what they would be told.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.faults import SITES
from bench.planting import PROFILES, able
from bench.runs import Prepared, Source, sources
from equivcheck import causes
from equivcheck.causes import Causes
from equivcheck.judge import legal
from equivcheck.models.graph import Array
from equivcheck.models.onnx.isolate import real_in_codes, spec_of
from equivcheck.referee import ExactReferee
from equivcheck.result import Cause
from equivcheck.tolerance import Excess
from equivcheck.vnpu.faults import KINDS as FAULT_KINDS
from equivcheck.vnpu.faults import Fault
from equivcheck.weigh import Weigher

HELD_BACK_KINDS = tuple(sorted(FAULT_KINDS)[7::16])
# Fault -> the kinds of cause that name it. Several, where they are one and the same thing there.
EXPECTED: dict[str, tuple[str, ...]] = {
    "sign-flipped-channel": ("sign",),
    "dropped-bias": ("bias",),
    "narrow-bias": ("bias",),
    "per-tensor-scale": ("per_channel_scale",),
    "four-bit-weights": ("weight_bits",),
    "truncate": ("truncation",),
    "floor": ("truncation",),
    "double-rounding": ("double_rounding",),
    "zero-point-off": ("zero_point", "shifted_table"),  # the input of a table: its entries are shifted
    "output-zero-point-off": ("zero_point",),
    "scale-off": ("scale",),
    "scale-slightly-off": ("scale",),
    "narrow-multiplier": ("narrow_multiplier", "scale"),  # one multiplier for all channels: one wrong scale
    "raw-zero-padding": ("padding",),
    "saturating-accumulator": ("saturation",),
    "wrapping-accumulator": ("wrap",),
    "flipped-kernel": ("flipped_kernel",),
    "pool-in-input-scale": ("pool_in_input_scale",),
    "relu-at-raw-zero": ("clip",),
    "swapped-channels": ("swapped_channels",),
    "shifted-pads": ("padding",),
    "shifted-stride": ("stride",),
    "tile-border": ("not_written",),
    "tile-halo": ("tile_halo",),
    "stale-buffer": ("stale_buffer",),
    "transposed-layout": ("transposed_layout",),
    "rescale-left-out": ("scale",),
    "shifted-table": ("shifted_table",),
    "one-channel-up": ("offset",),
    "one-channel-floors": ("truncation",),
    "saturates-early": ("saturation",),
    "last-column-up": ("offset",),
}


@dataclass(frozen=True)
class Told:
    """One convicted fault and what was said of it."""

    model: str
    kind: str
    step: int
    op_type: str
    profile: str
    cause: Cause | None
    seconds: float

    @property
    def verdict(self) -> str:
        if self.cause is None:
            return "none"
        return "right" if self.cause.kind in EXPECTED[self.kind] else "wrong"


@contextmanager
def _withheld(kinds: Sequence[str]) -> Iterator[None]:
    """No hypothesis of these kinds is tried."""
    choose = causes.choose
    causes.choose = lambda step, hypotheses: choose(step, (h for h in hypotheses if h.kind not in kinds))
    try:
        yield
    finally:
        causes.choose = choose


class Model:
    """A model with honest values of each profile and sample, and the reals of every step on them."""

    def __init__(self, source: Source, unknown: bool = False) -> None:
        self.prepared = Prepared(source)
        self.graph = self.prepared.model.graph
        self.causes = Causes(self.prepared.model)
        self.unknown = unknown
        self._kept: dict[tuple[str, int], tuple[Mapping[str, Array], Mapping[str, Array]]] = {}
        self._weigher: Weigher | None = None

    def honest(self, profile: str, sample: int) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        """(stored values, float result of every step on them)."""
        if (profile, sample) not in self._kept:
            self._kept.clear()
            program = self.prepared.npu(profile).compile(self.prepared.model)
            values = program.run(self.prepared.samples[sample].arrays())
            self._kept[profile, sample] = values, self.weigher(values).steps.evaluate(values)
        return self._kept[profile, sample]

    def weigher(self, values: Mapping[str, Array]) -> Weigher:
        if self._weigher is None:
            specs = {name: spec_of(array) for name, array in values.items()}
            self._weigher = Weigher(self.prepared.model, specs, ExactReferee(self.graph), ())
        return self._weigher

    def told(self, fault: Fault, profile: str, sample: int) -> Iterator[Told]:
        values, results = self.honest(profile, sample)
        step = self.graph.steps[int(fault.at.removeprefix("#")) - 1]
        program = self.prepared.npu(profile).compile(self.prepared.model, fault)
        made = {n: s.id if (s := self.graph.step_of_value.get(n)) is not None else 0 for n in values}
        known = {n: a for n, a in values.items() if made[n] < step.id}
        for name, codes in program.run_step(step, known).items():
            if self.convicts(name, codes, values, results):
                real = real_in_codes(self.graph, name, results[name])
                started = time.perf_counter()
                with _withheld(EXPECTED[fault.kind] if self.unknown else ()):
                    cause = self.causes.explain(name, codes, {**values, name: codes}, real)
                yield Told(
                    self.prepared.source.name, fault.kind, step.id, step.op_type, profile, cause,
                    time.perf_counter() - started,
                )  # fmt: skip

    def convicts(self, name: str, codes: Array, values: Mapping[str, Array], results: Mapping[str, Array]) -> bool:
        tallies, _ = self.weigher(values).weigh_against(results, {name: codes}, values, [name], {})
        return name in tallies and not legal(self.graph, name, tallies[name], {})

    def accused(self, profile: str) -> Iterator[Told]:
        """What is said of every step of a legal profile, held to no excess at all."""
        values, results = self.honest(profile, 0)
        limit = causes.step_limit
        causes.step_limit = lambda *given: Excess(0.0, np.zeros(()), "none")
        try:
            for name in results:
                if values[name].shape == results[name].shape:
                    real = real_in_codes(self.graph, name, results[name])
                    started = time.perf_counter()
                    cause = self.causes.explain(name, values[name], values, real)
                    step = self.graph.step_of_value[name]
                    spent = time.perf_counter() - started
                    yield Told(self.prepared.source.name, "legal", step.id, step.op_type, profile, cause, spent)
        finally:
            causes.step_limit = limit


def faults_of(model: Model, kinds: Sequence[str], sites: int, seed: int) -> list[tuple[str, int, Fault]]:
    """(profile, sample, fault), sorted so that each run of the honest model is made once."""
    found = []
    for number, kind in enumerate(FAULT_KINDS):
        if kind not in kinds:
            continue
        name = model.prepared.source.name
        rng = np.random.default_rng([seed, zlib.crc32(name.encode()), zlib.crc32(kind.encode())])
        for k, step in enumerate(rng.permutation(able(model.prepared, kind))[:sites].tolist()):
            fault = Fault(kind, f"#{step}", int(rng.integers(1 << 16)))
            sample = (number + k) % len(model.prepared.samples)
            found.append((PROFILES[(number + k) % len(PROFILES)], sample, fault))
    return sorted(found, key=lambda entry: entry[:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--held-back", action="store_true", help="the models and kinds not tuned on")
    parser.add_argument("-m", "--model", default="")
    parser.add_argument("-k", "--kind", default="")
    parser.add_argument("--sites", type=int, default=0, help="faults a kind and model (default: as bench/faults.py)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unknown", action="store_true", help="withhold the true kinds of cause")
    parser.add_argument("--legal", action="store_true", help="what legal steps would be told")
    parser.add_argument("-v", "--verbose", action="store_true")
    arguments = parser.parse_args()
    everything = sorted(sources(), key=lambda s: s.name)
    held_models = {s.name for s in everything[2::3]}
    told: list[Told] = []
    if arguments.legal:
        print_legal(
            [s for s in everything if arguments.model in s.name and (s.name in held_models) == arguments.held_back]
        )
        return 0
    for source in everything:
        apart = source.name in held_models
        if apart:
            kinds = tuple(FAULT_KINDS) if arguments.held_back else ()
        else:
            kinds = tuple(k for k in FAULT_KINDS if (k in HELD_BACK_KINDS) == arguments.held_back)
        kinds = tuple(k for k in kinds if arguments.kind in k)
        if arguments.model not in source.name or not kinds:
            continue
        sites = arguments.sites or next(n for start, n in SITES.items() if source.name.startswith(start)) or 1
        model = Model(source, arguments.unknown)
        for profile, sample, fault in faults_of(model, kinds, sites, arguments.seed):
            for one in model.told(fault, profile, sample):
                told.append(one)
                if arguments.verbose or one.verdict == "wrong":
                    cause = "none" if one.cause is None else f"{one.cause.kind}: {one.cause.evidence}"
                    print(
                        f"{one.verdict:6}{one.kind:24}{one.model[:24]:25}#{one.step} {one.op_type} {profile}: {cause}",
                        flush=True,
                    )
    print_table(told)
    return 0


def print_legal(chosen: Sequence[Source]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for source in chosen:
        model = Model(source)
        for profile in PROFILES:
            for one in model.accused(profile):
                kind = "none" if one.cause is None else one.cause.kind
                counts[profile, kind] += 1
                if one.cause is not None:
                    print(
                        f"{one.model[:24]:25}#{one.step} {one.op_type} {profile}: {kind}: {one.cause.evidence}",
                        flush=True,
                    )
    for (profile, kind), count in sorted(counts.items()):
        print(f"{profile:20}{kind:24}{count:6}")


def print_table(told: Sequence[Told]) -> None:
    print(f"{'kind':24}{'convicted':>10}{'right':>7}{'wrong':>7}{'none':>7}")
    for kind in [*FAULT_KINDS, ""]:
        counts = Counter(t.verdict for t in told if not kind or t.kind == kind)
        total = sum(counts.values())
        if total:
            print(f"{kind or 'ALL':24}{total:10}{counts['right']:7}{counts['wrong']:7}{counts['none']:7}")
    seconds = sorted(t.seconds for t in told)
    if seconds:
        print(f"\nexplaining one: median {seconds[len(seconds) // 2]:.2f} s, the slowest {seconds[-1]:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
