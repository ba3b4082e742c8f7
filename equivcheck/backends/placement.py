"""Where the nodes of a model went that an engine divided between its NPU and the CPU, and what they hand to each other.

The engine says it by node names. So every node is named by its index before (`tagged`), and what comes back is read by that:
engines append to names when they copy or rewrite a node.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from equivcheck.models.graph import Graph, Node
from equivcheck.result import Crossing, Placement

CPU = 0  # a place; NPU partitions count from 1
_TAG = re.compile(r"eqvn(\d+)x")
_TAGGED_WORD = re.compile(r"eqvn(\d+)x\w*")
_FEW = 0.5  # share of steps on the NPU below which the first screen says so


def tagged(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose nodes are named by their index: names that are read back must be there, and be unique."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for index, node in enumerate(copy.graph.node):
        node.name = f"eqvn{index}x"
    return copy


def untagged(words: str, name: Callable[[int], str]) -> str:
    """An engine's words with the tags replaced by what `name` gives for the index of a node."""
    return _TAGGED_WORD.sub(lambda found: name(int(found.group(1))), words)


def _indices(names: Iterable[str]) -> set[int]:
    """Of the nodes that tagged `names` come from; the engine appends to them when it copies or rewrites a node."""
    return {int(found.group(1)) for name in names if (found := _TAG.match(name))}


@dataclass(frozen=True)
class Loaded:
    """Where a loaded model's nodes went.

    `places`: by node index, CPU or the number of an NPU partition; a node that was duplicated has several, one that was
    optimised away none. `reasons`: by node index, why the engine left it to the CPU, in its words.
    """

    places: Mapping[int, frozenset[int]]
    reasons: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Loaded:
        """Read what `QnnEngine.load` returned."""
        places: dict[int, set[int]] = defaultdict(set)
        for partition, group in enumerate([answer["cpu"], *answer["npu"]]):
            for index in _indices(group):
                places[index].add(partition)
        reasons: dict[int, str] = {}
        for _, group, why in answer["refused"]:
            said = next((line for line in answer["trouble"] if any(f"`{name}" in line for name in group)), why)
            reasons.update(dict.fromkeys(_indices(group), said.partition(": ")[2] or said))
        return cls({index: frozenset(found) for index, found in places.items()}, reasons)

    @property
    def partitions(self) -> int:
        """How many NPU partitions there are."""
        return max((place for found in self.places.values() for place in found), default=CPU)

    @property
    def uses_the_npu(self) -> bool:
        return self.partitions > 0


def crossings(graph: Graph, places: Mapping[int, frozenset[int]], sizes: Mapping[str, int]) -> list[Crossing]:
    """The values that NPU and CPU hand to each other once per inference; what any engine is fed and asked for left out.

    `places` by node index as in `Loaded`; `sizes` are elements by stored value. A node without a place was optimised away:
    a DQ goes with its readers, another one with what it reads. The bytes are those of the value that crosses: four a number
    where a DQ stayed on the other side.
    """
    at: dict[int, frozenset[int]] = {}
    found: dict[tuple[str, str], Crossing] = {}
    for node in graph.nodes:
        reads = [_behind_unplaced(graph, name, places) for name in graph.reads(node)]
        sources = [graph.producer[name] for name in reads if name in graph.producer]
        at[node.index] = places.get(node.index) or next((at[source.index] for source in sources), frozenset())
        if node.index not in places:
            continue
        for place, name in ((place, name) for place in at[node.index] for name in reads):
            source = graph.producer.get(name)
            if source is None or name in graph.constant_values or not at[source.index] or place in at[source.index]:
                continue
            if _is_edge(graph, node) or _is_edge(graph, source):
                continue
            if (crossing := _crossing(graph, name, sizes, place, at[source.index])) is not None:
                found[crossing.value, crossing.direction] = crossing
    return list(found.values())


def _behind_unplaced(graph: Graph, name: str, places: Mapping[int, frozenset[int]]) -> str:
    """The codes that an optimised-away DQ made `name` of, or `name`."""
    source = graph.producer.get(name)
    gone = source is not None and source.op_type == "DequantizeLinear" and source.index not in places
    return source.inputs[0] if source is not None and gone else name


def _crossing(
    graph: Graph, name: str, sizes: Mapping[str, int], place: int, sources: frozenset[int]
) -> Crossing | None:
    """`name` as it goes from one of `sources` to `place`, or None from one NPU partition to the next."""
    if place != CPU and CPU not in sources:
        return None
    stored = graph.store(name)
    quantisation = graph.quantisation.get(name)
    value = graph.values.get(name)
    dtype = (
        quantisation.dtype
        if quantisation is not None
        else np.dtype(value.dtype if value and value.dtype else "float32")
    )
    size = sizes.get(stored or name, 0)
    return Crossing(value=name, bytes=size * dtype.itemsize, direction="npu->cpu" if place == CPU else "cpu->npu")


def _is_edge(graph: Graph, node: Node) -> bool:
    """Is it the Q of a model's input, or the DQ of an output? The plugin leaves those to the CPU on purpose."""
    if node.op_type == "QuantizeLinear":
        return node.inputs[0] in graph.inputs
    return node.op_type == "DequantizeLinear" and node.outputs[0] in graph.outputs


def few(placement: Sequence[Placement]) -> list[str]:
    """A line where most of the model did not run on the NPU, which is then hardly what was judged."""
    on_npu = sum(place.where == "npu" for place in placement)
    if on_npu >= _FEW * len(placement):
        return []
    reasons = dict.fromkeys(f"{p.op_type}: {p.reason}" for p in placement if p.where == "cpu")
    return [
        f"only {on_npu} of {len(placement)} steps ran on the NPU, the rest on the CPU ({'; '.join(list(reasons)[:2])})"
    ]
