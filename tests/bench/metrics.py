"""How fast two tensors are measured: nanoseconds an element, beside the fastest plain read and naive numpy.

    python tests/bench/metrics.py [largest size, default 1e8]

The read limit is the best of several reductions over the memory of both arrays, in the same run: nothing that looks at every
element can be faster. Naive is the same figures written as whole-array numpy in float64 (up to 1e7 elements: it needs eight
times the memory). One thread; least of several repetitions; `few`: one element in a thousand differs; `many`: half of
the int8 codes by one, all floats by 1e-5 of themselves; `noise`: all by a thousandth of their spread; `unrelated`:
independent values. Exits 1 where a target is missed at 1e6 elements and more: 11 times the read limit for int8, 4.5 for
float32 that differ by a share of themselves (few, many), 10 times faster than naive for all of these. `noise` and `unrelated`
of float32 have none: what is beyond a factor of two of each other must be picked out and subtracted in float64.

All of it is measured cold: copies of the pair take turns, so many that 256 MB lie between two looks at one of them. That is
how tensors are met: an engine has written all the others since, or they come from a file. Over one pair again and again the
"read limit" is the speed of whichever cache the pair fits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import numpy as np

from equivcheck.metrics import Grid, step_tally, tally

Pair = tuple[np.ndarray, np.ndarray]
GRID = Grid(np.array(0.05), np.array(3))
LADDER = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128)
NAIVE_UP_TO = 10_000_000
TARGETS = {("int8", how): 11.0 for how in ("few", "many", "unrelated")} | {
    ("float32", how): 4.5 for how in ("few", "many")
}  # times the read limit
TIMES_NAIVE = 10.0
FROM = 1_000_000  # elements
COLD = 1 << 28  # bytes between two looks at the same pair: eight times the largest cache this was run with


def least(*calls: Callable[[], object], budget_s: float = 0.6, at_once: int = 1) -> list[float]:
    """The least seconds of each call; the calls take turns, `at_once` in a row, so that a busy moment meets all of them."""
    best = [float("inf")] * len(calls)
    start = time.perf_counter()
    rounds = 0
    while rounds < 3 or (time.perf_counter() - start < budget_s and rounds < 2000):
        for k, call in enumerate(calls):
            for _ in range(at_once):
                before = time.perf_counter()
                call()
                best[k] = min(best[k], time.perf_counter() - before)
        rounds += 1
    return best


def cold(both: Pair, *calls: Callable[[Pair], object]) -> list[float]:
    """The least seconds of each call on a pair that no cache holds. Its own memory is warm from the pair before."""
    count = max(1, -(-COLD // sum(x.nbytes for x in both)))
    turns = cycle([both, *((both[0].copy(), both[1].copy()) for _ in range(count - 1))])
    return least(*(partial(_next, call, turns) for call in calls), budget_s=2.0, at_once=6)


def _next(call: Callable[[Pair], object], turns: Iterator[Pair]) -> object:
    return call(next(turns))


def words(both: Pair) -> list[np.ndarray]:
    """The memory of both, in words of 8 bytes."""
    return [x.reshape(-1)[: x.size // 8 * 8].view(np.uint64) for x in both]


def copied(both: Pair) -> None:
    """Copy both through 256 KiB."""
    out = np.empty(1 << 15, np.uint64)
    for x in words(both):
        for start in range(0, x.size, out.size):
            part = x[start : start + out.size]
            np.copyto(out[: part.size], part)


READS: dict[str, Callable[[Pair], object]] = {  # ways to look at every byte of both arrays once
    "max of the elements": lambda both: [x.max() for x in both],
    "max of the bytes": lambda both: [x.view(np.uint8).max() for x in both],
    "or of 8-byte words": lambda both: [np.bitwise_or.reduce(x) for x in words(both)],
    "sum of 8-byte words": lambda both: [np.add.reduce(x) for x in words(both)],
    "copy into 256 KiB": copied,
}


def naive(pair: Pair, grid: Grid | None) -> list[float]:
    """The figures of `Metrics` as one writes them down first."""
    a, b = (x.astype(np.float64) for x in pair)
    d = b - a
    distance = np.abs(d)
    found = [distance.max(), distance.argmax(), distance.mean(), np.sqrt((d * d).mean()), d.mean()]
    found += [np.count_nonzero(np.isnan(a)), np.count_nonzero(np.isnan(b)), np.count_nonzero(d)]
    found += [np.count_nonzero(distance > rung) for rung in LADDER] if grid is not None else []
    found += [distance.max(axis=(0, 2)).argmax()]
    if grid is not None:
        a, b = (a - grid.zero) * grid.scale, (b - grid.zero) * grid.scale
    return [float(x) for x in (*found, (a * b).sum(), (a * a).sum(), (b * b).sum(), ((b - a) ** 2).sum())]


def pair(dtype: str, size: int, how: str) -> Pair:
    rng = np.random.default_rng(size)
    shape = (1, 10, size // 10)
    if np.dtype(dtype).kind == "i":
        high = 100 if dtype == "int8" else 10**6
        a = rng.integers(-high, high, shape, dtype)
        b = a.copy().reshape(-1)
        b[:: 1000 if how == "few" else 2] += 1
        return (a, rng.integers(-high, high, shape, dtype)) if how == "unrelated" else (a, b.reshape(shape))
    a = rng.standard_normal(shape, np.float32).astype(dtype)
    if how in ("noise", "unrelated"):
        other = rng.standard_normal(shape, np.float32).astype(dtype)
        return a, (other if how == "unrelated" else a + np.asarray(1e-3, dtype) * other)
    b = a.copy().reshape(-1)
    b[:: 1000 if how == "few" else 1] *= np.asarray(1.00001 if dtype == "float32" else 1.01, dtype)
    return a, b.reshape(shape)


def row(dtype: str, size: int, how: str) -> bool:
    """Print the figures of one kind of pair; whether they meet their target."""
    both = pair(dtype, size, how)
    grid = GRID if dtype == "int8" else None
    slow = [lambda both: naive(both, grid)] if size <= NAIVE_UP_TO else []
    measured, *others = cold(both, lambda both: tally(*both, grid), *READS.values(), *slow)
    limits = others[: len(READS)]
    limit = min(limits)
    times, faster = measured / limit, others[-1] / measured if slow else np.inf
    line = f"{dtype:8} {how:9} {size:11,} {measured / size * 1e9:9.2f} {limit / size * 1e9:8.3f} {times:8.1f}"
    line += f" {others[-1] / size * 1e9:9.2f} {faster:6.1f}" if slow else f" {'-':>9} {'-':>6}"
    target = TARGETS.get((dtype, how), np.inf) if size >= FROM else np.inf
    met = target == np.inf or (times <= target and faster >= TIMES_NAIVE)
    print(
        f"{line}   {list(READS)[limits.index(limit)]}{'' if met else f'   MISSED: {target} and {TIMES_NAIVE}'}",
        flush=True,
    )
    return met


def overheads() -> None:
    """What one call costs for a tiny tensor, and `step_tally` on shapes of real networks."""
    print(f"\n{'step_tally, int8 codes':32} {'us a call':>10} {'ns/element':>11}")
    for shape in ((1, 4, 4, 4), (1, 1000), (1, 512, 7, 7), (1, 64, 56, 56), (1, 32, 112, 112), (1, 128, 768)):
        rng = np.random.default_rng(0)
        codes = rng.integers(-128, 128, shape, np.int8)
        real = ((codes - 3) * 0.05 + rng.normal(0, 0.01, shape)).astype(np.float32)
        (spent,) = least(partial(step_tally, codes, real, GRID, (-128.0, 127.0)))
        print(f"{shape!s:32} {spent * 1e6:10.1f} {spent / codes.size * 1e9:11.2f}")
    tiny = pair("int8", 60, "many")
    equal, unequal = least(lambda: tally(tiny[0], tiny[0], GRID), lambda: tally(*tiny, GRID))
    print(
        f"tally of 60 int8 elements: {equal * 1e6:.0f} us where they are equal, {unequal * 1e6:.0f} us where they are not"
    )


def main() -> int:
    largest = float(sys.argv[1]) if len(sys.argv) > 1 else 1e8
    met = True
    print("ns an element      elements     tally     read  times     naive  faster   fastest read")
    for dtype, hows, sizes in (
        ("int8", ("few", "many", "unrelated"), (1e4, 1e5, 1e6, 1e7, 1e8)),
        ("float32", ("few", "many", "noise", "unrelated"), (1e4, 1e5, 1e6, 1e7, 1e8)),
        ("float16", ("few", "many"), (1e6,)),
        ("int32", ("few", "many"), (1e6,)),
    ):
        for how in hows:
            for size in sizes:
                if size <= largest:
                    met &= row(dtype, int(size), how)
    overheads()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
