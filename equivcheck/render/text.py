"""The first screen: the answer, how much was judged, what ran where, both sides of the split, what to do next.

Plain aligned text, about 100 columns; no colour, so it reads the same in a terminal, a pipe, a log and an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from equivcheck.result import Culprit, Result, Side, StepError, Tensor
from equivcheck.words import counted

_SHOWN_POINTS = 4
_SHOWN_CULPRITS = 3
_SHOWN_TENSORS = 8
_SUMMING = ("Conv", "Gemm", "MatMul", "Pool", "Reduce")  # what sums products or codes
_SHOWN_TASKS = 3
_NAME_WIDTH = 26
_LABEL_WIDTH = 11
_QUANTISER_SUFFIXES = (
    "_QuantizeLinear_Output",
    "_QuantizeLinear_Output_0",
    "_quantized",
    "_DequantizeLinear_Output",
    "_output_0",
)


def first_screen(result: Result, *, verbose: bool = False) -> str:
    """Return the screen as text, without a final newline. `verbose` adds every judged tensor and full names."""
    parts = [
        headline(result),
        "",
        *_what_happened(result),
        *(line for culprit in result.culprits[:_SHOWN_CULPRITS] for line in _culprit(result, culprit)),
        *_more_culprits(result),
        *_provenance(result, verbose),
        "",
        *_split_table(result, verbose),
        "",
        *_remarks(result),
        *_next(result),
        *(_field("again", result.again) if result.again else []),
    ]
    if verbose:
        parts += ["", *_all_rows(result)]
    return "\n".join(line.rstrip() for line in parts)


def headline(result: Result) -> str:
    """One line: the verdict, then in plain words what it rests on."""
    coverage = result.coverage
    judged = f"{coverage.judged} of {coverage.steps} {'steps' if result.model.path else 'tensors'} judged"
    differing = coverage.compared - coverage.bitwise
    if result.verdict == "equivalent":
        wrong = result.reference_culprits
        if wrong:
            return (
                f"EQUIVALENT   {judged}; every judged step of the candidate is legal, BUT THE REFERENCE IS NOT THE MODEL at "
                f"#{wrong[0].step} {wrong[0].op_type}."
            )
        alone = result.reference.engine == "none"
        bits = "Every bit is equal too." if not differing else f"Bits differ in {differing}."
        if coverage.compared < coverage.steps:
            bits = f"Bits differ in {differing} of the {coverage.compared} that both sides delivered." * (not alone)
        return f"EQUIVALENT   {judged}; {result.reason}. {bits}"
    if result.verdict == "different":
        if not result.culprits:
            return f"DIFFERENT   {result.reason}. {judged}."
        first, count = result.culprits[0], len(result.culprits)
        many = "1 culprit" if count == 1 else f"{count} culprits, the first"
        legal = coverage.judged - count
        others = f"{counted(legal, 'other step')} {'is' if legal == 1 else 'are'} legal ({judged})"
        if len(first.steps) > 1:
            merged = f"steps #{first.steps[0]} to #{first.steps[-1]}, judged as one (values between were not delivered)"
            return f"DIFFERENT   {many}: {merged}. {others}."
        return f"DIFFERENT   {many}: step #{first.step} {first.op_type} '{_short(first.node)}'. {others}."
    return f"INCONCLUSIVE   {judged}; {result.reason}. No verdict."


# -- blocks ------------------------------------------------------------------------------------------------------------


def _field(label: str, text: str) -> list[str]:
    return [f"  {label:<{_LABEL_WIDTH - 1}} {text}"]


def _what_happened(result: Result) -> list[str]:
    failed = result.coverage.failed
    if not failed:
        return []
    lines = [f"{item.name}: {item.reason}" for item in failed[:3]]
    more = [f"and {len(failed) - 3} more (--json)"] if len(failed) > 3 else []
    return [*_block("failed", [*lines, *more]), ""]


def _block(label: str, lines: Sequence[str]) -> list[str]:
    return [line for k, text in enumerate(lines) for line in _field(label if k == 0 else "", text)]


def _culprit(result: Result, culprit: Culprit) -> list[str]:
    tensor = next(t for t in result.tensors if t.name == culprit.outputs[0])
    kind, error = _worst_error(culprit)
    shape = "x".join(map(str, tensor.candidate.shape or [])) or "scalar"
    lines = [
        f"  #{culprit.step} {culprit.op_type} {_short(culprit.node)}   {tensor.candidate.dtype} {shape}",
        f"      {culprit.reason}",
    ]
    if error is not None:
        lines += _evidence(culprit, tensor, error, kind)
    if tensor.would_pass_at:
        metric, value = next(iter(tensor.would_pass_at.items()))
        hides = f"; that would also hide {tensor.would_hide}" if tensor.would_hide else ""
        lines.append(f"      would pass at {metric} {value:.3g}{hides}")
    return [*lines, ""]


def _worst_error(culprit: Culprit) -> tuple[str, StepError | None]:
    """The candidate's own error where that is illegal, else the second opinion that is."""
    limit = culprit.limit.max if culprit.limit is not None and culprit.limit.max is not None else 0.0
    for kind in ("candidate", "fed", "stress"):
        error = getattr(culprit.local, kind)
        if error is not None and error.excess > limit:
            return kind, error
    return "candidate", culprit.local.candidate


def _evidence(culprit: Culprit, tensor: Tensor, error: StepError, kind: str) -> list[str]:
    where = {
        "candidate": "",
        "fed": " when fed with the reference's values",
        "stress": " on seeded random codes (your input does not show it)",
    }[kind]
    if tensor.candidate.scale is None:
        return [f"      a float{where}: worst at {error.worst}, {error.code} against {error.real}"]
    share = f"{error.off} of {error.n} elements ({_share(error.off, error.n)})"
    lines = [f"      off in {share}{where}, bias {error.bias_lsb:+.3f} LSB"]
    if error.code is not None and error.real is not None:
        lines.append(f"      worst   {error.worst}   candidate {error.code:g}   exact arithmetic {error.real:.4g}")
    if culprit.place is not None and culprit.place.kind not in ("everywhere", "scattered"):
        lines.append(f"      where   {culprit.place.text}")
    elif error.worst_channel is not None and 1 < tensor.channels < error.n:
        lines.append(f"      channel {error.worst_channel.index} of {tensor.channels} is the worst")
    reference = tensor.local.reference
    if reference is not None and tensor.candidate.scale is not None:
        rounds = f"is off in {reference.off} of" if reference.off else "rounds right on all"
        lines.append(f"      who     the reference {rounds} {reference.n}, by exact arithmetic on its own inputs")
    if culprit.cause is not None:
        lines.append(f"      looks   {culprit.cause.evidence}")
    if not error.merged and any(op in (culprit.op_type or "") for op in _SUMMING):
        lines.append("      not     the order of summation: int32 sums of int8 products are exact in any order")
    if error.merged:
        lines.append(f"      merged  with {', '.join(map(_short, error.merged))}: not delivered by this side")
    return lines


def _more_culprits(result: Result) -> list[str]:
    more = result.culprits[_SHOWN_CULPRITS:]
    if not more:
        return []
    names = ", ".join(f"#{c.step} {c.op_type}" for c in more[:6])
    return [f"  {len(more)} more culprits: {names}{' ...' if len(more) > 6 else ''} (--json -)", ""]


def _provenance(result: Result, verbose: bool) -> list[str]:
    model = result.model
    about = f"{_name(model.path)}, {model.scheme}, {model.nodes} nodes, sha256 {model.sha256[:8]}"
    lines = _field("model", about if model.path else "not given: tensors were paired by name")
    lines += _inputs(result)
    lines += _field("reference", _side(result.reference))
    lines += _field("candidate", _side(result.candidate))
    if model.sha256 and result.candidate.model_sha256 not in ("", model.sha256):
        lines += _field("", f"runs another model file, sha256 {result.candidate.model_sha256[:8]}")
    for side in (result.reference, result.candidate):
        for warning in side.warnings:
            lines += _field("", f"WARNING: {warning}")
    placed = _placed(result.candidate)
    if placed:
        lines += _field("ran on", placed)
    return lines


def _inputs(result: Result) -> list[str]:
    lines = []
    for sample in result.samples[:2]:
        feeds = ", ".join(
            f"{feed.name} {'x'.join(map(str, feed.shape)) or 'scalar'} {feed.dtype}, sha256 {feed.sha256[:8]}"
            for feed in sample.feeds[:3]
        )
        alone = result.reference.engine == "none"
        both = "the candidate's made of it" if result.candidate.paired else "the same bytes for both"
        fed = "not recorded" if not feeds else feeds if alone else f"{feeds}; {both}"
        lines.append(f"{sample.id} -> {fed}")
    if len(result.samples) > 2:
        lines.append(f"and {len(result.samples) - 2} more samples")
    return _block("input", lines)


def _side(side: Side) -> str:
    if side.engine == "none":
        return "none: every step is judged against its own real value"
    if side.engine == "dump":
        return f"{side.spec.removeprefix('recorded:')}, {side.device}"
    seen = {
        False: "measuring did not change its result",
        True: "MEASURING CHANGED ITS RESULT",
        None: f"observed {side.observation.method}",
    }[side.observation.disturbed]
    note = f", {side.observation.note}" if side.observation.note else ""
    loud = f": {side.notes[0]}" if side.notes else ""
    tail = "" if side.notes and side.observation.disturbed is None else f"; {seen}"
    return f"{side.spec.split(':')[0]} {side.version}, {side.device}{note}{loud}{tail}"


def _placed(side: Side) -> str:
    if not side.placement:
        return ""
    npu = sum(p.where == "npu" for p in side.placement)
    cpu = [p for p in side.placement if p.where == "cpu"]
    fused = sum(p.where == "fused" for p in side.placement)
    text = f"NPU {npu} steps, CPU {len(cpu)}" if npu else f"CPU {len(cpu)} steps"
    if cpu:
        reasons = list(dict.fromkeys(f"{p.reason or p.op_type}" for p in cpu))
        text += f" ({'; '.join(reasons[:3])}{'; ...' if len(reasons) > 3 else ''})"
    if fused:
        text += f", fused {fused}"
    if side.crossings:
        text += f"; {len(side.crossings)} crossings, {_bytes(sum(c.bytes for c in side.crossings))} per inference"
    return text


# -- the table ---------------------------------------------------------------------------------------------------------

_HEADER = ("", "step", "", "type", "on", "beyond rounding (limit)", "off", "since the input", "SNR", "")


def _split_table(result: Result, verbose: bool) -> list[str]:
    if not result.model.path:
        return [] if verbose else _worst_rows(result)
    by_name = {tensor.name: tensor for tensor in result.tensors}
    points = result.split_points if verbose else result.split_points[:_SHOWN_POINTS]
    rows: list[tuple[str, ...] | str] = []
    shown: set[str] = set()
    for point in points:
        rows.append(f"  split {_short(point.node or point.selector)} ({point.op_type or 'value'})")
        for role, names in (("before", point.before), ("after", point.after)):
            for name in names:
                if name in by_name:
                    rows.append(_row(role, by_name[name], result))
                    shown.add(name)
    outputs = [t for t in result.tensors if "output" in t.roles and t.name not in shown]
    if outputs and points:
        rows.append("  model output")
    rows += [_row("output", tensor, result) for tensor in outputs]
    lines = _aligned([_HEADER, *rows])
    if len(points) < len(result.split_points):
        lines.append(f"    {len(result.split_points) - len(points)} more split points: -v")
    return lines


def _worst_rows(result: Result) -> list[str]:
    """Without a model: the tensors that differ, then the rest, as far as they fit."""
    rows = sorted(result.tensors, key=lambda t: t.verdict not in ("different", "incomparable"))
    lines = _aligned([_HEADER, *(_row("", tensor, result) for tensor in rows[:_SHOWN_TENSORS])])
    more = len(rows) - _SHOWN_TENSORS
    return [*lines, *([f"    {more} more tensors: -v"] if more > 0 else [])]


def _all_rows(result: Result) -> list[str]:
    rows = [_row("/".join(t.roles), tensor, result, full=True) for t in result.tensors for tensor in [t]]
    absent = [f"  absent   {item.name}: {item.reason}" for item in result.coverage.absent]
    return [*_aligned([_HEADER, *rows]), *absent]


def _row(role: str, tensor: Tensor, result: Result, *, full: bool = False) -> tuple[str, ...]:
    name = tensor.name if full else _short(tensor.name)
    verdict = tensor.verdict.upper() if tensor.verdict == "different" else tensor.verdict
    return (
        f"    {role}",
        f"#{tensor.step} {tensor.op_type}" if tensor.step is not None else "-",
        name,
        tensor.candidate.dtype or tensor.reference.dtype or "?",
        _where(tensor, result),
        *_local_cells(tensor),
        *_accumulated_cells(tensor),
        verdict,
    )


def _where(tensor: Tensor, result: Result) -> str:
    for placement in result.candidate.placement:
        if placement.step == tensor.step:
            return {"npu": "NPU", "cpu": "CPU", "fused": "fused"}[placement.where]
    return "CPU" if result.candidate.device.startswith("CPU") else "-"


def _local_cells(tensor: Tensor) -> tuple[str, str]:
    error = tensor.local.candidate
    if error is None:
        return "-", "-"
    if tensor.limit is not None and tensor.limit.max is not None and tensor.limit.metric in ("excess", "max_abs"):
        limit = f" ({tensor.limit.max:.2f})" if tensor.limit.metric == "excess" else f" ({tensor.limit.max:.1e})"
    else:
        limit = ""
    excess = f"{error.excess:.2f}" if tensor.limit is None or tensor.limit.metric == "excess" else f"{error.excess:.1e}"
    return f"{excess}{limit}", _share(error.off, error.n)


def _accumulated_cells(tensor: Tensor) -> tuple[str, str]:
    metrics = tensor.accumulated
    if metrics is None:
        return "-", "-"
    if metrics.max_lsb is not None:
        largest = f"{metrics.max_lsb:.0f} LSB"
    else:
        largest = "-" if metrics.max_abs is None else f"{metrics.max_abs:.3g}"
    if metrics.snr_db is not None:
        return largest, f"{metrics.snr_db:.1f} dB"
    return largest, metrics.snr_note or "-"


def _aligned(rows: Sequence[tuple[str, ...] | str]) -> list[str]:
    """Pad the cells of tuples to common widths; strings are lines of their own. Figures go to the right."""
    cells = [row for row in rows if isinstance(row, tuple)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(_HEADER))] if cells else []
    right = {5, 6, 7, 8}
    lines = []
    for row in rows:
        if isinstance(row, str):
            lines.append(row)
            continue
        lines.append(
            "  ".join(
                c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        )
    return lines


# -- remarks and what to do next ---------------------------------------------------------------------------------------


def _remarks(result: Result) -> list[str]:
    lines = []
    nearest = _nearest(result)
    if nearest is not None and nearest.local.candidate is not None and nearest.limit is not None:
        lines += _field(
            "nearest",
            f"to its limit: #{nearest.step} {nearest.op_type} {_short(nearest.name)}, "
            f"{nearest.local.candidate.excess:.3f} LSB beyond rounding (limit {nearest.limit.max:.2f})",
        )
    lines += _thin(result)
    inputs = {feed.name for sample in result.samples for feed in sample.feeds}
    coverage = result.coverage
    absent = [item for item in coverage.absent if item.reason.startswith("candidate") and item.name not in inputs]
    if absent:
        lines += _field(
            "absent",
            f"{len(absent)} values the candidate does not store, e.g. {absent[0].name[-_NAME_WIDTH:]}: {absent[0].reason}",
        )
    lines += _task(result)
    for note in result.notes:
        lines += _field("note", note)
    lsb = "LSB = one quantisation step of that tensor; " if result.model.path else ""
    legend = f"{lsb}limits: {result.tolerance}"
    return [*lines, f"  {legend}"]


def _task(result: Result) -> list[str]:
    many = len(result.task) > 1
    lines = [f"{_short(figures.name)}: {figures.text}" if many else figures.text for figures in result.task]
    more = [f"and {len(lines) - _SHOWN_TASKS} more outputs (--json)"] if len(lines) > _SHOWN_TASKS else []
    return _block("task", [*lines[:_SHOWN_TASKS], *more])


def _thin(result: Result) -> list[str]:
    coverage = result.coverage
    said = []
    if coverage.weak:
        said.append(f"{counted(coverage.weak, 'step')} saw only clamped values")
    if coverage.silent_channels:
        said.append(f"{coverage.silent_channels} of {coverage.channels} channels never exercised by this input")
    return _field("thin", "evidence: " + "; ".join(said)) if said else []


def _nearest(result: Result) -> Tensor | None:
    """The legal tensor that is nearest to its limit, where any excess is there at all."""

    def closeness(tensor: Tensor) -> float:
        error, limit = tensor.local.candidate, tensor.limit
        if error is None or limit is None or not limit.max or limit.metric != "excess" or error.excess > limit.max:
            return 0.0
        return error.excess / limit.max

    best = max(result.tensors, key=closeness, default=None)
    return best if best is not None and closeness(best) > 0.1 else None


def _next(result: Result) -> list[str]:
    steps: list[str] = []
    if result.culprits:
        first = result.culprits[0]
        steps.append(
            f"--split-at '#{first.step}' (both sides of the culprit)   -v (all steps)   --json - (every figure)"
        )
        steps.append("--tolerance FILE (a rule for this tensor, if you decide that it may)")
    elif not result.model.path:
        steps.append(
            "--model MODEL judges every step   -v (all tensors)   --tolerance FILE (rules by tensor)   --json -"
        )
    elif result.verdict == "inconclusive":
        steps.append("-v (what was judged)   --json - (every reason)")
    elif not result.split_points:
        steps.append("--split-at OP shows both sides of a node, e.g. --split-at " + _suggestion(result))
    else:
        steps.append(f"-v all {result.coverage.steps} steps   --json -   --save DIR keeps the recordings")
    return _block("next", steps)


def _suggestion(result: Result) -> str:
    ops = {tensor.op_type for tensor in result.tensors if tensor.op_type}
    for wanted in ("GlobalAveragePool", "QLinearGlobalAveragePool", "AveragePool", "ReduceMean"):
        if wanted in ops:
            return wanted
    return f"'#{max(1, len(result.steps) - 1)}'"


# -- words -------------------------------------------------------------------------------------------------------------


def _short(name: str) -> str:
    """The last piece of a name: real names reach 800 characters."""
    piece = name.rstrip("/").replace(";", "/").split("/")[-1] or name
    for suffix in _QUANTISER_SUFFIXES:
        piece = piece.removesuffix(suffix) or piece
    return piece if len(piece) <= _NAME_WIDTH else "..." + piece[-(_NAME_WIDTH - 3) :]


def _name(path: str) -> str:
    return path.replace("\\", "/").split("/")[-1]


def _share(count: int, of: int) -> str:
    if not count or not of:
        return "0"
    share = 100.0 * count / of
    return f"{share:.1f} %" if share >= 0.1 else f"{share:.1g} %"


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KB" if count < 1024 * 1024 else f"{count / 1024 / 1024:.1f} MB"


def tsv(result: Result) -> str:
    """Every judged tensor as tab-separated text with full names, for scripts."""
    header = "step\top_type\tname\tverdict\texcess\tlimit\toff\tmax_lsb\tsnr_db\treason"
    return "\n".join([header, *("\t".join(_tsv_row(t)) for t in result.tensors)])


def _tsv_row(tensor: Tensor) -> Iterable[str]:
    error, metrics, limit = tensor.local.candidate, tensor.accumulated, tensor.limit
    cells = (
        tensor.step,
        tensor.op_type,
        tensor.name,
        tensor.verdict,
        error.excess if error else None,
        limit.max if limit else None,
        error.off if error else None,
        metrics.max_lsb if metrics else None,
        metrics.snr_db if metrics else None,
        tensor.reason,
    )
    return ("" if cell is None else str(cell) for cell in cells)
