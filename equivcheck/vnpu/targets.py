"""Targets: which operators an NPU runs, and under which conditions, as data (targets/*.toml). The rest runs on the CPU.

A target of your own is a file named where a shipped one could be (`vnpu:target=mine.toml`). Its keys: name, summary,
source (where its list is from), everything = true (whatever has a kernel), and a table [operators] from ONNX op_type to its
conditions; all of them must hold, and a number is the most that is allowed:

    max_batch, max_dilation, max_stride, max_kernel (elements of the window), max_elements (of one sample of the input)
    max_group_unless_depthwise        groups of a Conv, depthwise ones apart
    max_stride_unless_valid           longer strides only without pads and dilation, and not in a depthwise Conv
    max_rank                          axes longer than one
    axis = "height"; no_batch = true (reduces, pads or moves along other axes than the first)
    factors = [2, 4, 8]               of a Resize, the same along both axes
    after = "Conv"                    the op_type of the node before it
    bits = 8                          width of the codes it reads
    equal_scales = true               what it reads and makes has one scale and zero point
    p, mode, axes_only                attributes: p = 2, mode = "linear"; axes_only = [2, 3]

QuantizeLinear and DequantizeLinear are the NPU's own boundary: they are never a reason to leave it, so a step that only
quantises a graph input runs on the NPU side.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from equivcheck.errors import UnknownOption, near
from equivcheck.models.graph import Dim, Graph, Node, Step
from equivcheck.vnpu import shipped

FREE = frozenset({"QuantizeLinear", "DequantizeLinear"})
HEIGHT_AXIS = 2  # N, C, H, W
KEYS = ("name", "summary", "source", "everything", "operators")
Condition = Callable[[Graph, Step, Node, Any], str]


@dataclass(frozen=True, slots=True)
class Target:
    """`operators` maps an op_type to its conditions; `everything` means whatever has a kernel."""

    name: str
    summary: str
    everything: bool
    source: str = ""
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
    return shipped.names("target")


def load_target(name: str) -> Target:
    """Return the shipped target `name`, or the one in the file `name` (ending in .toml).

    Raises UnknownOption with the nearest names where there is none, or with the key where the file is wrong.
    """
    return parse_target(shipped.text("target", name))


def parse_target(text: str) -> Target:
    """Read one target from TOML text; UnknownOption names a condition that is not known."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnknownOption(f"the target is no TOML: {error}") from error
    for key in found:
        if key not in KEYS:
            raise UnknownOption(f"unknown target key {key}", asked=key, nearest=near(key, KEYS))
    if not found.get("name"):
        raise UnknownOption("the target has no name", hint='it needs name = "..." at the top')
    operators: dict[str, Mapping[str, Any]] = found.get("operators", {})
    for op_type, conditions in operators.items():
        if not isinstance(conditions, dict):
            raise UnknownOption(f"target key operators.{op_type} is {conditions!r}; it must be a table", asked=op_type)
        for key in conditions:
            if key not in CONDITIONS:
                raise UnknownOption(
                    f"unknown condition operators.{op_type}.{key}", asked=key, nearest=near(key, CONDITIONS)
                )
    everything = bool(found.get("everything", False))
    if not operators and not everything:
        raise UnknownOption("the target runs nothing", hint="it needs [operators], or everything = true")
    return Target(found["name"], str(found.get("summary", "")), everything, str(found.get("source", "")), operators)


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


def _max_stride(graph: Graph, step: Step, node: Node, limit: int) -> str:
    stride = max(node.attributes.get("strides", (1,)))
    return f"stride {stride} > {limit}" if stride > limit else ""


def _max_stride_unless_valid(graph: Graph, step: Step, node: Node, limit: int) -> str:
    pads, dilations = node.attributes.get("pads", (0,)), node.attributes.get("dilations", (1,))
    same = str(node.attributes.get("auto_pad", "NOTSET")).startswith("SAME")
    if not any(pads) and max(dilations) == 1 and not same and int(node.attributes.get("group", 1)) == 1:
        return ""
    return _max_stride(graph, step, node, limit)


def _max_kernel(graph: Graph, step: Step, node: Node, limit: int) -> str:
    area = prod(node.attributes.get("kernel_shape", (1,)))
    return f"a window of {area} > {limit}" if area > limit else ""


def _known_shape(graph: Graph, node: Node) -> list[int] | None:
    """Of what the node reads; symbolic axes are left out."""
    shape = _shape(graph, node.inputs[0])
    return None if shape is None else [dim for dim in shape if isinstance(dim, int)]


def _max_elements(graph: Graph, step: Step, node: Node, limit: int) -> str:
    shape = _known_shape(graph, node)
    if shape is None:
        return "a shape that is not known"
    return f"{prod(shape[1:])} elements > {limit}" if prod(shape[1:]) > limit else ""


def _max_rank(graph: Graph, step: Step, node: Node, limit: int) -> str:
    shape = _known_shape(graph, node)
    if shape is None:
        return "a shape that is not known"
    long = sum(dim > 1 for dim in shape)
    return f"{long} axes longer than one > {limit}" if long > limit else ""


def _changed_axes(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The axes a Reduce, Slice, Concat, Split ... works along, or Pad pads; negative ones resolved."""
    shape = _shape(graph, node.inputs[0])
    if node.op_type == "Pad":
        given = graph.constants.get(node.inputs[1]) if len(node.inputs) > 1 else node.attributes.get("pads")
        if given is None:
            return None
        pads = [int(p) for p in given]
        return tuple(k % (len(pads) // 2) for k, p in enumerate(pads) if p)
    axes = _axes(graph, node)
    if node.op_type.startswith("Reduce") and len(node.inputs) > 1 and node.inputs[1]:
        found = graph.constants.get(node.inputs[1])
        axes = None if found is None else tuple(int(a) for a in found.ravel())
    elif node.op_type.startswith("Reduce") and "axes" not in node.attributes:
        axes = None if shape is None else tuple(range(len(shape)))
    if axes is None or shape is None:
        return axes if axes is not None and min(axes) >= 0 else None
    return tuple(a % len(shape) for a in axes)


def _no_batch(graph: Graph, step: Step, node: Node, wanted: bool) -> str:
    axes = _changed_axes(graph, node)
    if axes is None:
        return "an axis that is not known"
    return "the batch axis" if 0 in axes and wanted else ""


def _axes_only(graph: Graph, step: Step, node: Node, wanted: list[int]) -> str:
    axes = _changed_axes(graph, node)
    if axes is None:
        return "an axis that is not known"
    off = [a for a in axes if a not in wanted]
    return f"axis {off[0]}" if off else ""


def _factors(graph: Graph, step: Step, node: Node, wanted: list[int]) -> str:
    before, after = _shape(graph, node.inputs[0]), _shape(graph, node.outputs[0])
    if before is None or after is None or not all(isinstance(d, int) for d in (*before[2:], *after[2:])):
        return "a size that is not known"
    found = {b / a for a, b in zip(before[2:], after[2:], strict=True) if isinstance(a, int) and isinstance(b, int)}
    fits = len(found) == 1 and (found <= {float(w) for w in wanted} or found == {1.0})
    return "" if fits else "a factor of " + " x ".join(f"{f:g}" for f in sorted(found))


def _bits(graph: Graph, step: Step, node: Node, wanted: int) -> str:
    for name in (*step.inputs, *step.outputs):
        quantisation = graph.quantisation.get(name)
        if quantisation is not None and 8 * quantisation.dtype.itemsize > wanted:
            return f"{quantisation.dtype.name} codes"
    return ""


def _equal_scales(graph: Graph, step: Step, node: Node, wanted: bool) -> str:
    found = [q for q in map(graph.quantisation.get, (*step.inputs, *step.outputs)) if q is not None]
    return "unequal scales" if wanted and any(not q.same_as(found[0]) for q in found) else ""


def _attribute(name: str) -> Condition:
    def check(graph: Graph, step: Step, node: Node, wanted: Any) -> str:
        found = node.attributes.get(name, _DEFAULTS.get((node.op_type, name)))
        found = found.decode() if isinstance(found, bytes) else found
        return "" if found == wanted else f"{name} {found}, not {wanted}"

    return check


_DEFAULTS = {
    ("LpNormalization", "p"): 2,
    ("DepthToSpace", "mode"): "DCR",
    ("Resize", "mode"): "nearest",
    ("Pad", "mode"): "constant",
}
CONDITIONS: dict[str, Condition] = {
    "max_group_unless_depthwise": _max_group,
    "max_dilation": _max_dilation,
    "axis": _axis,
    "max_batch": _max_batch,
    "max_stride": _max_stride,
    "max_stride_unless_valid": _max_stride_unless_valid,
    "max_kernel": _max_kernel,
    "max_elements": _max_elements,
    "max_rank": _max_rank,
    "no_batch": _no_batch,
    "axes_only": _axes_only,
    "factors": _factors,
    "bits": _bits,
    "equal_scales": _equal_scales,
    "after": _after,
    "p": _attribute("p"),
    "mode": _attribute("mode"),
}
