"""Selectors: the text after --split-at, turned into nodes, steps or values of a graph.

Tried in this order: a prefix (`op:`, `node:`, `value:`; the rest literal), `#N` (step), exact op_type (with its quantised
twin, and ONNX's name of a TFLite operator; `domain::op_type` for the others), exact node name, exact value name, `Conv#2` (the
second Conv), glob. A name that means different things is an error that lists the prefixed forms.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from equivcheck.errors import SelectorError, near
from equivcheck.models.graph import Graph, Node, Step

_PREFIXES = ("op:", "node:", "value:")


@dataclass(frozen=True, slots=True)
class Selected:
    """One split point: at a node (`before` are the stored values that enter it, `after` those it makes), or at a value."""

    selector: str
    node: Node | None
    step: Step | None
    before: tuple[str, ...]
    after: tuple[str, ...]


def select(
    graph: Graph, selectors: Sequence[str], twins: Mapping[str, str], *, stored: bool = True
) -> tuple[Selected, ...]:
    """Return the split points of all `selectors`, in graph order, each once.

    `twins` maps a quantised op_type to its float one (QLinearConv -> Conv). With `stored`, nodes that belong to no step
    (constants, dead ones, DQs) cannot be selected, and `before` and `after` are stored values; without, any node and value
    of the main graph can, and they are the node's own. Raises SelectorError.
    """
    kind = _Selector if stored else _RawSelector
    found: dict[tuple[int, tuple[str, ...]], Selected] = {}
    finder = kind(graph, twins)
    for selector in selectors:
        for point in finder.points(selector):
            order = point.node.index if point.node is not None else -1
            found.setdefault((order, point.after), point)
    return tuple(sorted(found.values(), key=finder.place))


class _Selector:
    def __init__(self, graph: Graph, twins: Mapping[str, str]) -> None:
        self.graph = graph
        self.twins = twins
        self.nodes = graph.originals
        self.step_of = self._steps_by_original()

    def _steps_by_original(self) -> dict[int, Step]:
        found: dict[int, Step] = {}
        for step in self.graph.steps:
            for index in step.nodes:
                origin = self.graph.nodes[index].origin
                found.setdefault(origin if origin >= 0 else index, step)
        return found

    def points(self, selector: str) -> list[Selected]:
        if not selector:
            raise SelectorError(
                "an empty selector selects nothing", asked=selector, hint="for example: --split-at GlobalAveragePool"
            )
        for prefix, find in zip(_PREFIXES, (self._by_op, self._by_node, self._by_value), strict=True):
            if selector.startswith(prefix):
                return find(selector.removeprefix(prefix), selector) or self._nothing(selector)
        if re.fullmatch(r"#\d+", selector):
            return self._by_step(int(selector[1:]), selector)
        return self._plain(selector)

    def _plain(self, selector: str) -> list[Selected]:
        readings: list[tuple[str, list[Selected]]] = [
            ("op:", self._by_op(selector, selector)),
            ("node:", self._by_node(selector, selector)),
            ("value:", self._by_value(selector, selector)),
        ]
        some = [(prefix, points) for prefix, points in readings if points]
        if not some:
            return self._by_ordinal(selector) or self._by_glob(selector) or self._nothing(selector)
        (_, first), *others = some
        if any(not _same(first, points) and not _own_output(first, points) for _, points in others):
            raise SelectorError(
                f"'{selector}' means different things in this model",
                asked=selector,
                hint="say which: " + ", ".join(f"{prefix}{selector} ({_count(points)})" for prefix, points in some),
            )
        return first

    def _by_op(self, name: str, selector: str) -> list[Selected]:
        return [self._at_node(node, selector) for node in self.nodes if self._is_op(node, name) and self._at_step(node)]

    def _is_op(self, node: Node, name: str) -> bool:
        full = f"{node.domain or 'ai.onnx'}::{node.op_type}"
        return name in (node.op_type, full) or self.twins.get(node.op_type) == name or self._written_as(node, name)

    def _written_as(self, node: Node, op_type: str) -> bool:
        """Whether a node of another format stands in the graph as this operator: MEAN as GlobalAveragePool, say."""
        step = self.step_of.get(node.index)
        main = self.graph.nodes[step.main] if step is not None else None
        return main is not None and main.origin == node.index and main.op_type == op_type

    def _by_node(self, name: str, selector: str) -> list[Selected]:
        return [
            self._at_node(node, selector) for node in self.nodes if node.name == name and name and self._at_step(node)
        ]

    def _by_value(self, name: str, selector: str) -> list[Selected]:
        stored = self.graph.store(name)
        if stored is None:
            step = next(
                (
                    self.step_of[node.index]
                    for node in self.nodes
                    if name in node.outputs and node.index in self.step_of
                ),
                None,
            )
            if step is not None:
                raise SelectorError(
                    f"'{name}' is inside step #{step.id} ({step.op_type}): the deployed model never stores it",
                    asked=name,
                    nearest=[f"value:{out}" for out in step.outputs],
                    hint=f"split at the step: #{step.id}",
                )
            return []
        return [Selected(selector, None, self.graph.step_of_value.get(stored), (), (stored,))]

    def place(self, point: Selected) -> tuple[int, int]:
        """Where a split point comes in graph order."""
        return (point.step.id if point.step else 0, point.node.index if point.node else -1)

    def _by_step(self, number: int, selector: str) -> list[Selected]:
        steps = self.graph.steps
        if not 1 <= number <= len(steps):
            raise SelectorError(f"no step {selector}: this model has steps #1 to #{len(steps)}", asked=selector)
        step = steps[number - 1]
        node = self.graph.main_node(step)
        return [Selected(selector, node, step, step.inputs, step.outputs)]

    def _by_ordinal(self, selector: str) -> list[Selected]:
        match = re.fullmatch(r"(.+)#(\d+)", selector)
        if match is None:
            return []
        points = self._by_op(match[1], selector)
        number = int(match[2])
        if points and not 1 <= number <= len(points):
            raise SelectorError(f"no '{selector}': this model has {len(points)} {match[1]}", asked=selector)
        return points[number - 1 : number]

    def _by_glob(self, selector: str) -> list[Selected]:
        if not any(c in selector for c in "*?["):
            return []
        nodes = [n for n in self.nodes if self._at_step(n) and (_glob(n.name, selector) or _glob(n.op_type, selector))]
        if nodes:
            return [self._at_node(node, selector) for node in nodes]
        return [
            Selected(selector, None, self.graph.step_of_value.get(name), (), (name,))
            for name in self._values()
            if _glob(name, selector) or any(_glob(alias, selector) for alias in self.graph.aliases(name))
        ]

    def _values(self) -> Sequence[str]:
        return self.graph.stored

    def _at_step(self, node: Node) -> bool:
        return node.index in self.step_of

    def _at_node(self, node: Node, selector: str) -> Selected:
        step = self.step_of[node.index]
        return Selected(selector, node, step, step.inputs, step.outputs)

    def _nothing(self, selector: str) -> list[Selected]:
        bare = selector.split(":", 1)[1] if selector.startswith(_PREFIXES) else selector
        if bare in self.graph.inner:
            raise SelectorError(
                f"'{bare}' is inside {self.graph.inner[bare]}: nothing can be cut there",
                asked=selector,
                hint="split before or after that node",
            )
        ops = {node.op_type for node in self.nodes if self._at_step(node)}
        ops |= {self.twins[op] for op in ops if op in self.twins}
        names = [node.name for node in self.nodes if node.name and self._at_step(node)]
        values = [*self.graph.stored, *self.graph.alias_of]
        raise SelectorError(
            f"nothing in this model is called '{bare}'",
            asked=selector,
            nearest=[*near(bare, ops, 2), *near(bare, names, 2), *near(bare, values, 1)],
            hint="operators here: " + ", ".join(sorted(ops)),
        )


class _RawSelector(_Selector):
    """Selects any node and value of the main graph, as the file has them."""

    def __init__(self, graph: Graph, twins: Mapping[str, str]) -> None:
        super().__init__(graph, twins)
        self.made = {out: node for node in self.nodes for out in node.outputs if out}
        self.captured: dict[int, list[str]] = {}
        for node in graph.nodes:
            names = [name for name in graph.reads(node) if name not in node.inputs]
            if names:
                self.captured[node.origin if node.origin >= 0 else node.index] = names

    def _at_step(self, node: Node) -> bool:
        return True

    def _at_node(self, node: Node, selector: str) -> Selected:
        reads = [*node.inputs, *self.captured.get(node.index, ())]
        before = tuple(dict.fromkeys(name for name in reads if name and not self._constant(name)))
        return Selected(selector, node, self.step_of.get(node.index), before, tuple(out for out in node.outputs if out))

    def place(self, point: Selected) -> tuple[int, int]:
        node = point.node or self.made.get(point.after[0])
        return (node.index if node is not None else -1, 0 if point.node is not None else 1)

    def _constant(self, name: str) -> bool:
        return name in self.graph.constant_values

    def _by_value(self, name: str, selector: str) -> list[Selected]:
        if name not in self.made and name not in self.graph.inputs and name not in self.graph.constants:
            return []
        return [Selected(selector, None, None, (), (name,))]

    def _values(self) -> Sequence[str]:
        return [*self.graph.inputs, *self.made]


def _glob(name: str, pattern: str) -> bool:
    return bool(name) and fnmatch.fnmatchcase(name, pattern)


def _same(first: Sequence[Selected], other: Sequence[Selected]) -> bool:
    """A node and its own output are one thing; so are an op_type and the only node of that type."""
    key: Callable[[Sequence[Selected]], set[tuple[str, ...]]] = lambda points: {p.after for p in points}  # noqa: E731  # one of two
    return key(first) == key(other)


def _own_output(points: Sequence[Selected], other: Sequence[Selected]) -> bool:
    """Is the other reading one of the several outputs of the one node that the first reading means?"""
    return (
        len(points) == len(other) == 1
        and points[0].node is not None
        and other[0].node is None
        and set(other[0].after) <= set(points[0].after)
    )


def _count(points: Sequence[Selected]) -> str:
    kind = "value" if points[0].node is None else "node"
    return f"{len(points)} {kind}{'s' if len(points) != 1 else ''}"
