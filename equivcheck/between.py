"""Two results against each other: did another SDK, driver or export change what was found?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from equivcheck.errors import RecordingError
from equivcheck.result import SCHEMA as RESULT_SCHEMA
from equivcheck.result import Result, RunVerdict, Tensor, TensorVerdict, from_json

if TYPE_CHECKING:
    import os

SCHEMA = "equivcheck-between/1"
_SHOWN = 12
_LEGAL: tuple[TensorVerdict, ...] = ("identical", "equivalent")
_WORDS = {"broken": "newly wrong", "mended": "no longer wrong", "other": "another verdict"}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One stored value whose verdict is another in the second result. Pairs are (first, second); excess in LSB."""

    name: str
    step: int | None
    op_type: str | None
    what: Literal["broken", "mended", "other"]
    verdicts: tuple[TensorVerdict, TensorVerdict]
    excess: tuple[float | None, float | None]
    reason: str


class Between(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from one result to another. `str()` is the screen."""

    schema: str = SCHEMA
    verdicts: tuple[RunVerdict, RunVerdict]
    candidates: tuple[str, str]
    judged: tuple[int, int]
    changes: list[Change]
    unchanged: int
    only_first: list[str]
    only_second: list[str]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """0: the same verdict everywhere; 1: something changed."""
        same = self.verdicts[0] == self.verdicts[1] and not self.changes
        return 0 if same and not self.only_first and not self.only_second else 1

    def to_json(self) -> bytes:
        """Return it as JSON (UTF-8), indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def __str__(self) -> str:
        a, b = self.verdicts
        head = f"{a.upper()} in both" if a == b else f"{a.upper()} became {b.upper()}"
        lines = [
            f"{head}; {len(self.changes)} of {len(self.changes) + self.unchanged} values have another verdict.",
            "",
        ]
        lines += [
            f"  first      {self.candidates[0]}, {self.judged[0]} steps judged",
            f"  second     {self.candidates[1]}, {self.judged[1]} steps judged",
        ]
        for change in self.changes[:_SHOWN]:
            first, second = change.verdicts
            figures = " -> ".join("-" if value is None else f"{value:.2f}" for value in change.excess)
            lines.append(
                f"  {_WORDS[change.what]:<16} {f'#{change.step} {change.op_type} ' if change.step else ''}{change.name[-40:]}: "
                f"{first} -> {second}, {figures} LSB beyond rounding"
            )
        if len(self.changes) > _SHOWN:
            lines.append(f"  and {len(self.changes) - _SHOWN} more (--json -)")
        for which, names in (("first", self.only_first), ("second", self.only_second)):
            if names:
                lines.append(f"  only in the {which}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(lines)


def compare_results(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Between:
    """Compare two results that `diff --json` or `compare --json` wrote.

    Raises RecordingError when one is not a result.
    """
    a, b = _read(Path(first)), _read(Path(second))
    rows, others = {t.name: t for t in a.tensors}, {t.name: t for t in b.tensors}
    both = [name for name in rows if name in others]
    changes = [change for name in both if (change := _change(rows[name], others[name])) is not None]
    return Between(
        verdicts=(a.verdict, b.verdict),
        candidates=(_side(a), _side(b)),
        judged=(a.coverage.judged, b.coverage.judged),
        changes=sorted(changes, key=lambda change: change.what != "broken"),
        unchanged=len(both) - len(changes),
        only_first=[name for name in rows if name not in others],
        only_second=[name for name in others if name not in rows],
        notes=_notes(a, b),
    )


def _read(path: Path) -> Result:
    try:
        result = from_json(path.read_bytes())
        if result.schema != RESULT_SCHEMA:
            raise RecordingError(
                f"{path} has schema '{result.schema}', this version reads '{RESULT_SCHEMA}'", asked=str(path)
            )
        return result
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}", asked=str(path)) from error
    except msgspec.MsgspecError as error:
        raise RecordingError(
            f"{path} is not a result of equivcheck: {error}", asked=str(path), hint="write one with diff --json FILE"
        ) from error


def _change(a: Tensor, b: Tensor) -> Change | None:
    legal = (a.verdict in _LEGAL, b.verdict in _LEGAL)
    if a.verdict == b.verdict or all(legal):  # identical to another engine or not: both are legal
        return None
    what: Literal["broken", "mended", "other"] = "broken" if legal[0] else "mended" if legal[1] else "other"
    return Change(
        name=a.name,
        step=a.step,
        op_type=a.op_type,
        what=what,
        verdicts=(a.verdict, b.verdict),
        excess=(_excess(a), _excess(b)),
        reason=b.reason,
    )


def _excess(tensor: Tensor) -> float | None:
    return None if tensor.local.candidate is None else tensor.local.candidate.excess


def _side(result: Result) -> str:
    return f"{result.candidate.spec} {result.candidate.version}".strip()


def _notes(a: Result, b: Result) -> list[str]:
    notes = []
    if a.model.sha256 != b.model.sha256:
        notes.append("the two results are of different model files")
    feeds = [[(feed.name, feed.sha256) for sample in r.samples for feed in sample.feeds] for r in (a, b)]
    if feeds[0] != feeds[1]:
        notes.append("the two results are of different inputs")
    if a.tolerance != b.tolerance:
        notes.append(f"they were judged by different tolerances: {a.tolerance}, {b.tolerance}")
    return notes
