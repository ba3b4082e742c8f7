"""Targets: which operators an NPU runs, and under which conditions, as data (targets/*.toml). The rest runs on the CPU.

QuantizeLinear and DequantizeLinear are the NPU's own boundary: they are never a reason to leave it, so a step that only
quantises a graph input runs on the NPU side.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from equivcheck.errors import UnknownOption, near
from equivcheck.models.graph import Dim, Graph, Node, Step

FREE = frozenset({"QuantizeLinear", "DequantizeLinear"})
HEIGHT_AXIS = 2  # N, C, H, W
Condition = Callable[[Graph, Step, Node, Any], str]


@dataclass(frozen=True, slots=True)
class Target:
    """`operators` maps an op_type to its conditions; `everything` means whatever has a kernel."""

    name: str
    summary: str
    everything: bool
    operators: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def refuses(self, graph: Graph, step: Step) -> str:
        """Why this step does not run on the NPU, in words; empty where it does."""
        if self.everything:
            return ""
        for node in (graph.nodes[index] for index in step.nodes):
            if node.op_type in FREE:
                continue
            conditions = self.operators.get(node.op_type)
            if conditions is None:
                return f"{node.op_type} is not on {self.name}'s list"
            for key, limit in conditions.items():
                found = CONDITIONS[key](graph, step, node, limit)
                if found:
                    return f"{node.op_type} with {found} is outside of {self.name}'s list"
        return ""


def target_names() -> tuple[str, ...]:
    """Names of the targets that ship with equivcheck."""
    folder = resources.files(__package__) / "targets"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def load_target(name: str) -> Target:
    """Return the shipped target `name`; UnknownOption with the nearest names otherwise."""
    known = target_names()
    if name not in known:
        raise UnknownOption(
            f"no target named {name!r}", asked=name, nearest=near(name, known), hint="targets: " + ", ".join(known)
        )
    return parse_target((resources.files(__package__) / "targets" / f"{name}.toml").read_text(encoding="utf-8"))


def parse_target(text: str) -> Target:
    """Read one target from TOML text; UnknownOption names a condition that is not known."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnknownOption(f"the target is no TOML: {error}") from error
    operators: dict[str, Mapping[str, Any]] = found.get("operators", {})
    for op_type, conditions in operators.items():
        for key in conditions:
            if key not in CONDITIONS:
                raise UnknownOption(f"unknown condition {key} of {op_type}", asked=key, nearest=near(key, CONDITIONS))
    return Target(found["name"], found["summary"], bool(found.get("everything", False)), operators)


def _shape(graph: Graph, name: str) -> tuple[Dim, ...] | None:
    value = graph.values.get(name)
    return value.shape if value is not None else None


def _max_group(graph: Graph, step: Step, node: Node, limit: int) -> str:
    group = int(node.attributes.get("group", 1))
    shape = graph.constants.get(node.inputs[1])
    weights = shape.shape if shape is not None else _shape(graph, node.inputs[1])
    depthwise = bool(weights) and weights is not None and weights[1] == 1
    return f"group {group} > {limit}" if group > limit and not depthwise else ""


def _max_dilation(graph: Graph, step: Step, node: Node, limit: int) -> str:
    dilation = max(node.attributes.get("dilations", (1,)))
    return f"dilation {dilation} > {limit}" if dilation > limit else ""


def _axis(graph: Graph, step: Step, node: Node, wanted: str) -> str:
    axes = _axes(graph, node)
    shape = _shape(graph, node.inputs[0])
    if axes is None or shape is None:
        return "an axis that is not known"
    off = [a % len(shape) for a in axes if len(shape) != 4 or a % len(shape) != HEIGHT_AXIS]
    return f"axis {off[0]}, not the {wanted} axis" if off else ""


def _axes(graph: Graph, node: Node) -> tuple[int, ...] | None:
    if node.op_type == "Slice" and len(node.inputs) > 1:
        if len(node.inputs) > 3 and node.inputs[3]:
            axes = graph.constants.get(node.inputs[3])
        else:
            starts = graph.constants.get(node.inputs[1])
            return None if starts is None else tuple(range(starts.size))
        return None if axes is None else tuple(int(a) for a in axes.ravel())
    if "axes" in node.attributes:
        return tuple(int(a) for a in node.attributes["axes"])
    return (int(node.attributes.get("axis", 0)),)


def _max_batch(graph: Graph, step: Step, node: Node, limit: int) -> str:
    shape = _shape(graph, node.inputs[0])
    if not shape or not isinstance(shape[0], int):
        return "" if shape else "a batch that is not known"
    return f"batch {shape[0]} > {limit}" if shape[0] > limit else ""


def _after(graph: Graph, step: Step, node: Node, wanted: str) -> str:
    source = graph.producer.get(node.inputs[0])
    return "" if source is not None and source.op_type == wanted else f"no {wanted} before it"


def _attribute(name: str) -> Condition:
    def check(graph: Graph, step: Step, node: Node, wanted: Any) -> str:
        found = node.attributes.get(name, {"p": 2, "mode": "DCR"}[name])
        found = found.decode() if isinstance(found, bytes) else found
        return "" if found == wanted else f"{name} {found}, not {wanted}"

    return check


CONDITIONS: dict[str, Condition] = {
    "max_group_unless_depthwise": _max_group,
    "max_dilation": _max_dilation,
    "axis": _axis,
    "max_batch": _max_batch,
    "after": _after,
    "p": _attribute("p"),
    "mode": _attribute("mode"),
}
