"""Writes what the yardstick measured: legal_excess.md (limits, measurements) and .svg (the curve). No number is typed."""

from __future__ import annotations

import platform
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.legal import HELD_OUT, SET_ON, Legal, LegalStep
from bench.oracle import TABLE
from bench.planting import Outcome

NOISE = 1e-3  # LSB: what float32 leaves of an exact result
ROOM = 0.05  # LSB added to a fitted limit
THRESHOLDS = tuple(k / 100 for k in range(101))
SHOWN = (0.0, 0.01, 0.02, 0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.40, 0.45, 0.50, 0.75, 1.00)


@dataclass(frozen=True)
class Rule:
    """A way to set the limit with one number t, and what it makes of a fault and of a legal step."""

    name: str
    colour: str
    beyond: Callable[[Outcome | LegalStep], float]


RULES = (
    Rule("t for every step", "#b5512f", lambda entry: entry.flat),
    Rule("t + 2^-(k+1)", "#2f6db5", lambda entry: entry.twice_off),
    Rule("the table + t", "#2f8f4e", lambda entry: entry.margin),
)


def write(folder: Path, outcomes: Sequence[Outcome], variants: Sequence[Legal]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    faults = [o for o in outcomes if o.flat > NOISE]
    (folder / "legal_excess.svg").write_text(_svg(faults, variants), encoding="utf-8")
    parts = [
        _head(outcomes, variants),
        _limits(variants),
        _curve(faults, variants),
        _held_out(faults, variants),
        _kinds(outcomes),
        _blind(outcomes),
    ]
    (folder / "legal_excess.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _head(outcomes: Sequence[Outcome], variants: Sequence[Legal]) -> str:
    import numpy
    import onnx
    import onnxruntime

    models = sorted({o.model for o in outcomes})
    versions = f"numpy {numpy.__version__}, onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}"
    return (
        "# Legal excess, measured\n"
        "Written by `python tests/bench/faults.py --report reports`; every number comes from that run. LSB throughout.\n\n"
        f"{len(outcomes)} faults planted in {len(models)} models ({', '.join(models)}), "
        f"{sum(o.active for o in outcomes)} active; {len(variants)} legal runs of {len({v.engine for v in variants})} engines "
        f"on {len({v.model for v in variants})} models, "
        f"{sum(len(v.steps) for v in variants)} steps. Python {platform.python_version()}, {versions}, {platform.machine()}."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


# -- the limits --------------------------------------------------------------------------------------------------------


def _limits(variants: Sequence[Legal]) -> str:
    """Each op_type with its limit, the largest excess of each engine, and what is left."""
    limit, kind = _legal_rows()
    engines = list(dict.fromkeys(v.engine for v in variants))
    worst: dict[str, dict[str, float]] = defaultdict(dict)
    count: Counter[str] = Counter()
    stress: dict[str, float] = defaultdict(float)
    for v in variants:
        for step in v.steps:
            worst[step.row][v.engine] = max(worst[step.row].get(v.engine, 0.0), step.twice_off, 0.0)
            count[step.row] += 1
            stress[step.row] = max(stress[step.row], step.stress)
    rows = []
    for op in sorted(worst, key=lambda op: (kind[op], op)):
        largest = max(worst[op].values())
        cells = [f"{worst[op][e]:.3f}" if e in worst[op] else "-" for e in engines]
        rows.append([op, kind[op], count[op], f"{limit[op]:.2f}", f"{largest:.3f}", f"{limit[op] - largest:.3f}", *cells,
                     f"{stress[op]:.3f}"])  # fmt: skip
    short = [
        e.replace("vnpu:profile=", "vnpu ").replace("ort:optimization=", "ort ").replace("ort:int8=", "ort ")
        for e in engines
    ]
    return (
        "## Each limit with its measurement\n"
        "Largest excess of correct engines on photos, beyond the 2^-(k+1) that double rounding explains (Conv, Gemm, MatMul); "
        "the last column is the product's own figure on random codes, double rounding included.\n\n"
        + _table(["op_type", "kind", "steps", "limit e", "largest", "left", *short, "random codes"], rows)
    )


def _legal_rows() -> tuple[dict[str, float], dict[str, str]]:
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["op"]
    limit = {op: float(row["e"]) for row in rows for op in row["op_types"]}
    return limit, {op: row["kind"] for row in rows for op in row["op_types"]}


# -- the curve ---------------------------------------------------------------------------------------------------------


def found_share(faults: Sequence[Outcome], rule: Rule, t: float) -> float:
    return sum(rule.beyond(o) > max(t, NOISE if rule is not RULES[2] else 0.0) for o in faults) / max(1, len(faults))


def alarm_share(variants: Sequence[Legal], rule: Rule, t: float) -> float:
    """Share of legal runs in which any step lies beyond the limit."""
    noise = NOISE if rule is not RULES[2] else 0.0
    return sum(any(rule.beyond(s) > max(t, noise) for s in v.steps) for v in variants) / max(1, len(variants))


def _curve(faults: Sequence[Outcome], variants: Sequence[Legal]) -> str:
    rows = []
    for t in SHOWN:
        cells: list[object] = [f"{t:.2f}"]
        for rule in RULES:
            cells += [f"{100 * found_share(faults, rule, t):.1f}", f"{100 * alarm_share(variants, rule, t):.1f}"]
        rows.append(cells)
    header = ["t", *(f"{what}, {rule.name}" for rule in RULES for what in ("found %", "false alarms %"))]
    return (
        "## Sensitivity against false alarms\n"
        f"Found: share of the {len(faults)} planted faults that move any code of their own step beyond correct rounding, "
        "judged on the photo alone. False alarms: share of the legal runs in which any step is beyond the limit.\n\n"
        "![curve](legal_excess.svg)\n\n" + _table(header, rows)
    )


def _svg(faults: Sequence[Outcome], variants: Sequence[Legal]) -> str:
    """Left: shares over the threshold. Right: found against false alarms. Drawn by hand: no plotting library."""
    width, height, size, top = 900, 430, 320, 50
    left, right = 60, 520
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _frame(left, top, size, "t, LSB", "share of faults found (line), of legal runs blamed (dashes)", "1"),
        _frame(right, top, size, "share of legal runs blamed", "share of faults found", "1"),
    ]
    for k, rule in enumerate(RULES):
        found = [found_share(faults, rule, t) for t in THRESHOLDS]
        alarms = [alarm_share(variants, rule, t) for t in THRESHOLDS]
        parts += [
            _line(zip(THRESHOLDS, found, strict=True), left, top, size, rule.colour),
            _line(zip(THRESHOLDS, alarms, strict=True), left, top, size, rule.colour, 'stroke-dasharray="5 4"'),
            _line(zip(alarms, found, strict=True), right, top, size, rule.colour),
            f'<text x="{right + 120}" y="{top + size - 60 + 18 * k}" fill="{rule.colour}">{rule.name}</text>',
        ]
    x, y = alarm_share(variants, RULES[2], 0.0), found_share(faults, RULES[2], 0.0)
    parts += [
        f'<circle cx="{right + x * size:.1f}" cy="{top + (1 - y) * size:.1f}" r="5" fill="{RULES[2].colour}"/>',
        f'<text x="{right + x * size + 9:.1f}" y="{top + (1 - y) * size + 16:.1f}">'
        f"the table: {100 * y:.1f} % found, {100 * x:.1f} % blamed</text>",
        f'<text x="{left}" y="24" font-size="14">{len(faults)} faults beyond rounding, {len(variants)} legal runs</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _frame(x: int, y: int, size: int, across: str, up: str, end: str) -> str:
    ticks = []
    for k in range(6):
        at = k / 5
        ticks.append(f'<text x="{x + at * size:.0f}" y="{y + size + 16}" text-anchor="middle">{at:.1f}</text>')
        ticks.append(f'<text x="{x - 6}" y="{y + (1 - at) * size + 4:.0f}" text-anchor="end">{at:.1f}</text>')
        ticks.append(
            f'<path d="M{x} {y + at * size:.0f}H{x + size}M{x + at * size:.0f} {y}V{y + size}" stroke="#ddd" fill="none"/>'
        )
    return (
        "".join(ticks)
        + f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="none" stroke="#555"/>'
        + f'<text x="{x + size / 2}" y="{y + size + 36}" text-anchor="middle">{across}</text>'
        + f'<text x="{x}" y="{y - 8}" font-size="11">{up}</text>'
    )


def _line(points: object, x: int, y: int, size: int, colour: str, more: str = "") -> str:
    shown = " ".join(f"{x + a * size:.1f},{y + (1 - b) * size:.1f}" for a, b in points)  # type: ignore[attr-defined]  # outside of the public types
    return f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="2" {more}/>'


# -- hold-out ----------------------------------------------------------------------------------------------------------


def _held_out(faults: Sequence[Outcome], variants: Sequence[Legal]) -> str:
    """The table on engines it was not set on, and limits fitted without an engine or a model tried on that one."""
    _, kind = _legal_rows()
    lines = [
        "## Held out",
        f"The table was set on {', '.join(SET_ON)} (and on OpenVINO and Qualcomm HTP, which do not run here). "
        f"Not set on: {', '.join(HELD_OUT)}, and our own profiles.",
        "",
    ]
    rows = []
    for engine in dict.fromkeys(v.engine for v in variants):
        own = [v for v in variants if v.engine == engine]
        rows.append(
            [engine, "no" if engine not in SET_ON else "yes", len(own), sum(len(v.steps) for v in own),
             sum(s.margin > 0 for v in own for s in v.steps)]
        )  # fmt: skip
    lines.append(_table(["engine", "set on it", "models", "steps", "beyond the table"], rows))
    lines += [
        "",
        f"Each kind's limit fitted to the largest excess of all *other* engines (models) + {ROOM} LSB (movement: + 0), then "
        "tried on the one left out:",
        "",
    ]
    rows = []
    for what, key in (("engine", lambda v: v.engine), ("model", lambda v: v.model)):
        for name in dict.fromkeys(key(v) for v in sorted(variants, key=key)):
            fitted = _fit([v for v in variants if key(v) != name], kind)
            own = [s for v in variants if key(v) == name for s in v.steps]
            beyond = [s for s in own if s.twice_off > fitted.get(kind[s.row], 0.5)]
            tried = [o for o in faults if what == "engine" or o.model == name]
            found = sum(o.twice_off > fitted.get(kind[o.row], 0.5) for o in tried)
            share = f"{100 * found / len(tried):.1f}" if tried else "-"
            why = ", ".join(f"{n} {op}" for op, n in Counter(s.op_type for s in beyond).most_common(3))
            rows.append([what, name, len(own), len(beyond), why or "-", share])
    lines.append(_table(["left out", "which", "its steps", "beyond the fit", "of", "faults found by the fit %"], rows))
    return "\n".join(lines)


def _fit(variants: Sequence[Legal], kind: dict[str, str]) -> dict[str, float]:
    fitted: dict[str, float] = defaultdict(float)
    for v in variants:
        for s in v.steps:
            fitted[kind[s.row]] = max(fitted[kind[s.row]], s.twice_off)
    return {name: value + (0.0 if name == "movement" else ROOM) for name, value in fitted.items()}


# -- faults ------------------------------------------------------------------------------------------------------------


def _kinds(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for name in [*dict.fromkeys(o.kind for o in outcomes), "all"]:
        own = [o for o in outcomes if name in (o.kind, "all")]
        active = [o for o in own if o.active]
        visible = sum(o.flat > NOISE for o in own)
        alone = sum(o.stress and not (o.photo or o.fed) for o in own)
        rows.append([name, len(own), visible, len(active), sum(o.found for o in active), sum(o.localised for o in active),
                     alone, sum(bool(o.others) for o in own)])  # fmt: skip
    header = [
        "kind",
        "planted",
        "beyond rounding",
        "active",
        "found",
        "exactly localised",
        "only random codes find it",
        "false alarms",
    ]
    return "## Planted faults\nActive: beyond the step's limit on the photo, by the oracle.\n\n" + _table(header, rows)


def _blind(outcomes: Sequence[Outcome]) -> str:
    """What the limits cost: faults beyond rounding but within the limit, by op_type."""
    hidden = [o for o in outcomes if o.flat > NOISE and not o.active]
    rows = []
    for row in sorted({o.row for o in hidden}):
        own = [o for o in hidden if o.row == row]
        kinds = ", ".join(f"{k} {n}" for k, n in Counter(o.kind for o in own).most_common(6))
        visible = sum(o.flat > NOISE and o.row == row for o in outcomes)
        rows.append([row, f"{len(own)} of {visible}", sum(o.found for o in own), kinds])
    table = _table(["op_type", "within the limit", "found all the same (random codes)", "kinds"], rows)
    return (
        "## What the limits hide\n"
        "Planted faults that change codes beyond correct rounding, yet stay within the limit of their step on that photo.\n\n"
        + table
    )
