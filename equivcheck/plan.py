"""What to look at, decided before anything runs: split points, roles of values, and which steps merge. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from equivcheck.errors import EquivcheckError
from equivcheck.models.graph import Graph, Step
from equivcheck.models.select import Selected

Values = Literal["all", "splits", "outputs"]


@dataclass(frozen=True)
class Plan:
    """`rows` are the stored values that get a row and a judgement, in graph order; `roles` says why each matters."""

    points: tuple[Selected, ...]
    rows: tuple[str, ...]
    roles: dict[str, tuple[str, ...]]

    @property
    def decisive(self) -> tuple[str, ...]:
        """Values at a split point or output: without a judgement on these there is no verdict."""
        return tuple(name for name in self.rows if self.roles[name] != ("tap",))


def plan(graph: Graph, points: Sequence[Selected], values: Values = "all") -> Plan:
    """Decide which stored values are judged: all, those at split points and outputs, or outputs only."""
    if values not in ("all", "splits", "outputs"):
        raise EquivcheckError(f"values='{values}' is not one of all, splits, outputs", asked=values)
    before = {name for point in points for name in point.before}
    after = {name for point in points for name in point.after}
    outputs = {stored for name in graph.outputs if (stored := graph.store(name)) is not None}
    roles: dict[str, tuple[str, ...]] = {}
    for name in graph.stored:
        found = [role for role, names in (("before", before), ("after", after), ("output", outputs)) if name in names]
        roles[name] = tuple(found) or ("tap",)
    wanted = [n for n in graph.stored if n not in graph.inputs]
    if values == "splits":
        wanted = [n for n in wanted if roles[n] != ("tap",)]
    elif values == "outputs":
        wanted = [n for n in wanted if "output" in roles[n]]
    return Plan(tuple(points), tuple(wanted), roles)


def merged(graph: Graph, delivered: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each delivered value, the missing values its step is merged with (those that were not delivered).

    A missing value is not a cut: its own step is evaluated together with its readers, as far back as values are missing.
    A graph input that was not delivered cannot be made again: steps that need it are left out.
    """
    have = set(delivered)
    lost = set(graph.inputs) - have
    behind: dict[str, tuple[str, ...]] = {}
    found: dict[str, tuple[str, ...]] = {}
    for step in graph.steps:
        blind = not lost.isdisjoint(step.inputs)
        missing: dict[str, None] = {}
        for name in step.inputs:
            if name not in have:
                missing.update(dict.fromkeys([*behind.get(name, ()), name]))
        for out in step.outputs:
            if out not in have:
                behind[out] = tuple(missing)
                if blind:
                    lost.add(out)
            elif not blind:
                found[out] = tuple(missing)
    return found


def merged_steps(graph: Graph, name: str, missing: Sequence[str]) -> tuple[Step, ...]:
    """The steps that are evaluated as one for `name` when `missing` values lie inside."""
    own = graph.step_of_value[name]
    return (*(graph.step_of_value[m] for m in missing if m in graph.step_of_value), own)
