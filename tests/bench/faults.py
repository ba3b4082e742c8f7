"""The yardstick of the judgement: faults planted at random steps, legal engines beside them, and how both are judged.

    python tests/bench/faults.py [--quick] [--report DIR] [--seed N] [--workers N] [-m SUBSTRING] [--no-peers]

A float64 oracle of its own (oracle.py) first decides whether a planted fault is *active*: whether its step lies further
beyond rounding than its limit allows, on the inputs it had. Prints, per kind and in all: planted, active, found, exactly
localised (the planted step and no other is blamed) and false alarms; the same for Polygraphy's comparisons on the same
runs; every miss, one by one; and what one photo misses that random codes (stress) find. `--report` writes
legal_excess.md and legal_excess.svg. Exits 1 where an active fault is missed or a legal engine is blamed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import legal, peers, planting, report
from bench.runs import Source, sources
from equivcheck.vnpu.faults import KINDS as FAULT_KINDS

SMALL = ("scale-slightly-off", "one-channel-up", "one-channel-floors", "saturates-early", "last-column-up")
DETECTOR = "detector"
# Faults a kind and model: models of 224 pixels take 3 s a run, the fixtures 0.2 s.
SITES = {
    "detector": 3, "digits": 2, "furiosa": 2, "tiny": 3, "mcunet": 2, "st_mobilenet": 2, "ppocr": 2, "rapid": 1,
    "efficientnet_lite0_int8_qop": 0, "efficientnet_lite0_int8": 1, "coral_tf2": 0, "coral_mobilenet": 0,
}  # fmt: skip
QUICK = {"detector_qdq_s8": 1, "digits_qdq_u8": 1}
QUICK_ENGINES = ("ort:optimization=disable", "vnpu:profile=tflite-reference", "onnx-reference")
MINIMUM_ACTIVE, MINIMUM_MODELS = 300, 3


def main() -> int:
    arguments = _parser().parse_args()
    started = time.perf_counter()
    chosen = [s for s in sources() if arguments.model in s.name]
    if arguments.quick:
        chosen = [s for s in chosen if s.name in QUICK]
    with_peers = not arguments.no_peers and peers.available()
    jobs = _jobs(chosen, arguments, with_peers)
    outcomes, variants = _run(jobs, arguments.workers)
    print_faults(outcomes)
    print_legal(variants)
    print_peers(outcomes, variants, with_peers)
    print_stress(outcomes)
    problems = explain(outcomes, variants, arguments.quick or bool(arguments.model))
    if arguments.report:
        folder = Path(arguments.report)
        report.write(folder, outcomes, variants)
        print(f"\nwritten: {folder / 'legal_excess.md'}, {folder / 'legal_excess.svg'}")
    cpu, peak = _spent()
    print(
        f"\n{time.perf_counter() - started:.0f} s, {cpu:.0f} s of CPU, {arguments.workers} processes, {peak} MiB the largest, "
        f"seed {arguments.seed}"
    )
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two fixtures, below a minute")
    parser.add_argument("--report", metavar="DIR", help="write legal_excess.md and .svg there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-m", "--model", default="", help="only models whose name holds this")
    parser.add_argument("--no-peers", action="store_true", help="leave Polygraphy out")
    return parser


# -- running -----------------------------------------------------------------------------------------------------------

Job = tuple[Callable[..., list], tuple, dict]


def _jobs(chosen: Sequence[Source], arguments: argparse.Namespace, with_peers: bool) -> list[Job]:
    """The longest first, so that two processes end together; kinds of one model are split over several jobs."""
    found: list[tuple[float, Job]] = []
    engines = QUICK_ENGINES if arguments.quick else legal.names()
    for source in chosen:
        size = source.path.stat().st_size
        sites = QUICK.get(source.name, 0) if arguments.quick else _sites(source.name)
        options = {"sites": sites, "seed": arguments.seed, "with_peers": with_peers}
        pieces = 3 if size > 300_000 and not arguments.quick else 1
        for piece in range(pieces if sites else 0):
            kinds = tuple(FAULT_KINDS)[piece::pieces]
            found.append((size * sites, (planting.planted, (source,), {**options, "kinds": kinds})))
        found.append((size / 2, (legal.legal, (source,), {"engines": engines, "with_peers": with_peers})))
    return [job for _, job in sorted(found, key=lambda entry: -entry[0])]


def _sites(name: str) -> int:
    return next(count for start, count in SITES.items() if name.startswith(start))


def _run(jobs: Sequence[Job], workers: int) -> tuple[list[planting.Outcome], list[legal.Legal]]:
    outcomes: list[planting.Outcome] = []
    variants: list[legal.Legal] = []
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # one process a core; workers inherit it
        os.environ.setdefault(threads, "1")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        futures = [pool.submit(function, *given, **options) for function, given, options in jobs]
        for done, future in enumerate(futures, 1):
            for entry in future.result():
                (outcomes if isinstance(entry, planting.Outcome) else variants).append(entry)
            print(f"\r{done} of {len(futures)} jobs, {len(outcomes)} faults", end="", file=sys.stderr)
    print("", file=sys.stderr)
    order = {kind: k for k, kind in enumerate(FAULT_KINDS)}
    return (
        sorted(outcomes, key=lambda o: (order[o.kind], o.model, o.step)),
        sorted(variants, key=lambda v: (v.engine, v.model)),
    )


def _quiet() -> None:
    """LiteRT's C++ writes INFO lines to fd 2; workers have nothing to say there."""
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _spent() -> tuple[float, int]:
    """CPU seconds of the workers, and the largest one's memory in MiB."""
    import resource

    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime, spent.ru_maxrss // 1024


# -- printing ----------------------------------------------------------------------------------------------------------


def print_faults(outcomes: Sequence[planting.Outcome]) -> None:
    print(
        f"{'kind':24}{'planted':>8}{'active':>8}{'models':>8}{'found':>8}{'localised':>10}{'false alarms':>13}"
        f"{'inside the limit':>18}"
    )
    for kind in [*FAULT_KINDS, ""]:
        of_kind = [o for o in outcomes if not kind or o.kind == kind]
        active = [o for o in of_kind if o.active]
        hidden = sum(o.flat > 0.001 and not o.active for o in of_kind)
        print(
            f"{kind or 'ALL':24}{len(of_kind):8}{len(active):8}{len({o.model for o in active}):8}"
            f"{sum(o.found for o in active):8}{sum(o.localised for o in active):10}{sum(bool(o.others) for o in of_kind):13}"
            f"{hidden:18}"
        )
    small = [o for o in outcomes if o.kind in SMALL and o.active]
    print(f"\nsmall faults: {sum(o.found for o in small)} of {len(small)} active ones found")
    detector = [o for o in outcomes if o.model.startswith(DETECTOR)]
    absent = [kind for kind in FAULT_KINDS if kind not in {o.kind for o in detector}]
    print(
        f"detector fixtures: {len({o.kind for o in detector})} of {len(FAULT_KINDS)} kinds, "
        f"{sum(o.active for o in detector)} active, "
        f"{sum(o.found for o in detector if o.active)} found; no operator there for: {', '.join(absent) or 'none'}"
    )


def print_legal(variants: Sequence[legal.Legal]) -> None:
    print(f"\n{'legal engine':32}{'models':>7}{'steps judged':>13}{'false alarms':>13}  largest share of a limit used")
    for engine in dict.fromkeys(v.engine for v in variants):
        own = [v for v in variants if v.engine == engine]
        steps = [(s, v) for v in own for s in v.steps]
        step, of = max(steps, key=lambda pair: pair[0].used)
        print(
            f"{engine:32}{len(own):7}{sum(v.judged for v in own):13}{sum(bool(v.culprits) for v in own):13}"
            f"  {100 * step.used:.0f} %: {of.model} #{step.step} {step.op_type}, {step.twice_off:.3f} of {step.e:.2f} LSB"
        )


def print_peers(outcomes: Sequence[planting.Outcome], variants: Sequence[legal.Legal], measured: bool) -> None:
    if not measured:
        print("\npeers: not measured (pip install polygraphy)")
        return
    active = [o for o in outcomes if o.active]
    print(f"\n{'the same runs, judged by':32}{'found':>12}{'localised':>12}{'false alarms':>14}")
    rows = [("equivcheck", sum(o.found for o in active), sum(o.localised for o in active),
             sum(bool(v.culprits) for v in variants))]  # fmt: skip
    for kind in peers.COMPARISONS:
        rows.append(
            (
                f"Polygraphy {kind}",
                sum(o.peers[kind] > 0 for o in active),
                sum(o.peers[kind] == o.step for o in active),
                sum(v.peers[kind] > 0 for v in variants),
            )
        )
    for name, found, localised, alarms in rows:
        print(f"{name:32}{found:6}/{len(active):<5}{localised:6}/{len(active):<5}{alarms:7}/{len(variants):<6}")


def print_stress(outcomes: Sequence[planting.Outcome]) -> None:
    effective = [o for o in outcomes if o.photo or o.fed or o.stress]
    counts = Counter((o.photo or o.fed, o.stress) for o in effective)
    print(
        f"\nof {len(outcomes)} planted: both find {counts[True, True]}, the photo alone {counts[True, False]}, "
        f"random codes alone {counts[False, True]}, neither {len(outcomes) - len(effective)}"
    )
    missed = Counter(o.kind for o in effective if o.stress and not (o.photo or o.fed))
    print("random codes alone, by kind: " + (", ".join(f"{k} {n}" for k, n in missed.most_common()) or "none"))
    missed = Counter(o.kind for o in effective if not o.stress)
    print("the photo alone, by kind: " + (", ".join(f"{k} {n}" for k, n in missed.most_common()) or "none"))


def explain(outcomes: Sequence[planting.Outcome], variants: Sequence[legal.Legal], partial: bool) -> int:
    """Print what is not as it must be, one line each; return how many."""
    found = list(_explained(outcomes, variants, partial))
    print(f"\nmisses, wrong places and false alarms: {len(found) or 'none'}")
    for line in found:
        print(f"  {line}")
    return len(found)


def _explained(outcomes: Sequence[planting.Outcome], variants: Sequence[legal.Legal], partial: bool) -> Iterable[str]:
    for o in outcomes:
        where = f"{o.model} {o.kind} #{o.step} {o.op_type} seed {o.seed} {o.profile} picture {o.sample}"
        if o.active and not o.found:
            measured = f"oracle {o.margin:.4f} beyond the limit, product's excess {o.product_excess:.4f}"
            yield f"MISSED {where}: {measured}, {o.verdict}"
        if o.others:
            yield f"WRONG PLACE {where}: blames {', '.join(f'#{c}' for c in o.others)}"
        if o.photo != o.active and abs(o.margin) > 1e-3:
            yield f"DISAGREEMENT {where}: the oracle says {'active' if o.active else 'legal'} ({o.margin:.4f}), the product not"
    for v in variants:
        for culprit in v.culprits:
            yield f"FALSE ALARM {v.engine} on {v.model}: {culprit}"
        if v.verdict != "equivalent" and not v.culprits:
            yield f"NO VERDICT {v.engine} on {v.model}: {v.verdict}, {v.reason}"
    if partial:
        return
    active = [o for o in outcomes if o.active]
    if len(active) < MINIMUM_ACTIVE:
        yield f"only {len(active)} active faults, {MINIMUM_ACTIVE} wanted"
    by_kind: dict[str, set[str]] = defaultdict(set)
    for o in active:
        by_kind[o.kind].add(o.model)
    for kind in FAULT_KINDS:
        if len(by_kind[kind]) < MINIMUM_MODELS:
            yield f"{kind} was active on {len(by_kind[kind])} models, {MINIMUM_MODELS} wanted"


if __name__ == "__main__":
    sys.exit(main())
