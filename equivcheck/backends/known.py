"""Versions of engines that are known to compute something else than the model: the data file `known_broken.toml`."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

import msgspec

_PART = re.compile(r"(\d+|[a-z]+)")
_CLAUSE = re.compile(r"(<=|>=|==|!=|<|>)\s*([\w.+-]+)")
_ALL = "*"
_WORD, _NUMBER = -1, 1  # what sorts before and behind the end of a version
_ZERO, _END = (_NUMBER, 0, ""), (0, 0, "")


class Broken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One defect. `versions` as in "<2.6.0-1" or ">=2.5,<2.6" or "*"; `source` is where it was measured or reported.

    `always` says that it concerns every run of those versions; the others need an operator or an option that `what` names.
    """

    engine: str
    versions: str
    what: str
    reason: str
    cure: str
    source: str
    always: bool = False

    def includes(self, version: str) -> bool:
        """Is `version` one of them? ==2.14 means all versions that begin with it."""
        if self.versions == _ALL:
            return True
        return all(_holds(version, sign, bound) for sign, bound in _clauses(self.versions))


def _clauses(versions: str) -> list[tuple[str, str]]:
    found = []
    for clause in versions.split(","):
        match = _CLAUSE.fullmatch(clause.strip())
        if match is None:
            raise ValueError(f"known_broken.toml: {versions!r} is no list of versions")
        found.append((match.group(1), match.group(2)))
    return found


def _holds(version: str, sign: str, bound: str) -> bool:
    if sign in ("==", "!="):
        limit = _parts(bound)
        have = [*_parts(version), *[_ZERO] * len(limit)]
        return (have[: len(limit)] == limit) == (sign == "==")
    one, other = _ordered(version), _ordered(bound)
    return {"<": one < other, "<=": one <= other, ">": one > other, ">=": one >= other}[sign]


def _ordered(version: str) -> list[tuple[int, int, str]]:
    """Parts of a version in the order of releases: 3.0rc1 is before 3.0, which is 3, which is before 3.0-1."""
    parts = _parts(version)
    numbers = next((k for k, part in enumerate(parts) if part[0] == _WORD), len(parts))
    release, rest = parts[:numbers], parts[numbers:]
    while release and release[-1] == _ZERO:
        release.pop()
    return [*release, *rest, _END]


def _parts(version: str) -> list[tuple[int, int, str]]:
    found = _PART.findall(version.lower())
    return [(_NUMBER, int(part), "") if part.isdigit() else (_WORD, 0, part) for part in found]


@cache
def defects() -> tuple[Broken, ...]:
    """All known defects, in the order of the file."""
    text = resources.files("equivcheck").joinpath("known_broken.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["broken"], list[Broken]))


def broken(engine: str, version: str | None = None) -> list[Broken]:
    """The known defects of an engine at `version`, or of all its versions."""
    return [defect for defect in defects() if defect.engine == engine and (version is None or defect.includes(version))]


def warnings(engine: str, version: str) -> list[str]:
    """One line for each defect that concerns every run of this version."""
    return [f"{engine} {version}: {d.what}; {d.cure}" for d in broken(engine, version) if d.always]
