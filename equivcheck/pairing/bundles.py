"""A graph with the steps that only reorder numbers taken away: what two exports of one network have in common.

A *bundle* is a stored value with all stored values that are the same numbers in another order (what the Transposes and
Reshapes of an export make of it). Between bundles lies the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from equivcheck.models.graph import DEQUANTIZE, QUANTIZE, Array, Graph, Node, Quantisation, Step
from equivcheck.pairing.order import Order, Reshape, Shape, Turn

_RESHAPES = frozenset("Reshape Flatten Squeeze Unsqueeze".split())
_ORDERING = _RESHAPES | {"Transpose", "Identity"}
# What one tool writes as an operator of its own and another folds into a neighbour.
_LIGHT = _ORDERING | QUANTIZE | DEQUANTIZE | {"Pad", "Relu", "Clip", "Cast"}
_FAMILY = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul"), "linear"),
    **dict.fromkeys(("GlobalAveragePool", "AveragePool", "ReduceMean"), "mean"),
    **dict.fromkeys(("Split", "Slice"), "slice"),
}
Grid = tuple[object, ...]
LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_IMAGES = frozenset(
    "Conv ConvTranspose AveragePool MaxPool GlobalAveragePool GlobalMaxPool Resize DepthToSpace SpaceToDepth".split()
)


@dataclass(frozen=True, eq=False)
class Bundle:
    """`members`, the first made by `step` (None: a graph input), and how each lies seen from the first (`orders`)."""

    index: int
    members: tuple[str, ...]
    orders: Mapping[str, Order]
    shape: Shape | None
    dtype: str | None
    quantisation: Quantisation | None
    step: Step | None

    @property
    def first(self) -> str:
        return self.members[0]

    @cached_property
    def grid(self) -> Grid:
        """How codes stand for reals, whether they are signed or not; the dtype where there are no codes."""
        return grid_of(self.quantisation) if self.quantisation is not None else (self.dtype,)

    @cached_property
    def sizes(self) -> Shape | None:
        """The axes longer than 1, in no order."""
        return None if self.shape is None else tuple(sorted(n for n in self.shape if n != 1))


def grid_of(quantisation: Quantisation) -> Grid:
    """Scale and zero point to compare by: equal for int8 codes and uint8 codes 128 higher."""
    dtype = quantisation.dtype
    shift = 1 << (8 * dtype.itemsize - 1) if dtype.kind == "u" else 0
    zero = quantisation.zero_point.astype(np.int64) - shift
    return (dtype.itemsize, quantisation.scale.astype(np.float32).tobytes(), zero.ravel().tobytes())


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a step's linear operator: `codes` less their zero point (or floats), `scale` by channel."""

    codes: Array
    scale: Array | None
    bias: Array | None

    @cached_property
    def fingerprint(self) -> tuple[Shape, bytes]:
        """The same for the same numbers in another order."""
        shape = tuple(sorted(n for n in self.codes.shape if n != 1))
        if self.codes.dtype.kind == "f":
            return shape, np.sort(self.codes, axis=None).tobytes()
        return shape, np.bincount(self.codes.ravel() - int(self.codes.min(initial=0))).tobytes()


@dataclass(eq=False)
class Bundles:
    """The bundles of `graph`, in graph order."""

    graph: Graph
    found: list[Bundle] = field(default_factory=list)

    def __post_init__(self) -> None:
        moved = {step.outputs[0]: order for step in self.graph.steps if (order := _ordering(self.graph, step))}
        members: dict[str, list[str]] = {}
        self._orders: dict[str, Order] = {}
        self._first: dict[str, str] = {}
        for name in self.graph.stored:
            step = self.graph.step_of_value.get(name)
            source = self._first[step.inputs[0]] if step is not None and name in moved else name
            self._first[name] = source
            members.setdefault(source, []).append(name)
            self._orders[name] = (
                Order() if source == name or step is None else self._orders[step.inputs[0]].then(moved[name])
            )
        self.found = [self._bundle(k, tuple(names)) for k, names in enumerate(members.values())]
        self.of = {name: bundle for bundle in self.found for name in bundle.members}

    def _bundle(self, index: int, members: tuple[str, ...]) -> Bundle:
        known = [self.graph.quantisation[name] for name in members if name in self.graph.quantisation]
        value = self.graph.values.get(members[0])
        return Bundle(
            index=index,
            members=members,
            orders={name: self._orders[name] for name in members},
            shape=fixed_shape(self.graph, members[0]),
            dtype=None if value is None else value.dtype,
            quantisation=known[0] if known else None,
            step=self.graph.step_of_value.get(members[0]),
        )

    def quantisation(self, name: str) -> Quantisation | None:
        """That of a stored value; where the model gives none, that of what it is reordered to."""
        return self.graph.quantisation.get(name) or self.of[name].quantisation

    # -- neighbours ----------------------------------------------------------------------------------------------------

    @cached_property
    def sources(self) -> list[tuple[Bundle, ...]]:
        """Of each bundle those its step reads."""
        return [
            tuple(dict.fromkeys(self.of[name] for name in bundle.step.inputs if name in self.of)) if bundle.step else ()
            for bundle in self.found
        ]

    @cached_property
    def readers(self) -> list[list[Bundle]]:
        """Of each bundle those that are made of it."""
        found: list[list[Bundle]] = [[] for _ in self.found]
        for bundle in self.found:
            for source in self.sources[bundle.index]:
                found[source.index].append(bundle)
        return found

    # -- what a step does ----------------------------------------------------------------------------------------------

    def work(self, bundle: Bundle) -> Counter[str]:
        """The operators that make it, by family; without those that tools fold into others."""
        if bundle.step is None:
            return Counter()
        nodes = [self.graph.nodes[k] for k in bundle.step.nodes]
        return Counter(
            _FAMILY.get(n.op_type, n.op_type) for n in nodes if n.op_type not in _LIGHT and not self._bias(n)
        )

    def _bias(self, node: Node) -> bool:
        """Whether it only adds or multiplies a constant: a bias or a scale, which tools fold into others."""
        constants = self.graph.constant_values
        return node.op_type in ("Add", "Mul") and any(name in constants for name in node.inputs)

    def slot(self, bundle: Bundle) -> int:
        """Which output of the operator that makes it (a Split, say) it is."""
        name, inside = bundle.first, () if bundle.step is None else bundle.step.nodes
        node = self.graph.producer.get(name)
        while node is not None and node.index in inside:
            if len(node.outputs) > 1:
                return node.outputs.index(name)
            name = node.inputs[0] if node.inputs else ""
            node = self.graph.producer.get(name)
        return 0

    def weights(self, bundle: Bundle) -> Weights | None:
        """The constant weights of its linear operator, if it has one."""
        if bundle.index not in self._weights:
            self._weights[bundle.index] = self._read_weights(bundle)
        return self._weights[bundle.index]

    @cached_property
    def _weights(self) -> dict[int, Weights | None]:
        return {}

    def _read_weights(self, bundle: Bundle) -> Weights | None:
        node = self._node(bundle, LINEAR)
        found = None if node is None else self._constant(node.inputs[1])
        if node is None or found is None:
            return None
        bias = self._constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
        return Weights(*found, None if bias is None else bias[0])

    def _node(self, bundle: Bundle, kinds: tuple[str, ...] | frozenset[str]) -> Node | None:
        if bundle.step is None:
            return None
        return next((n for k in bundle.step.nodes if (n := self.graph.nodes[k]).op_type in kinds), None)

    def _constant(self, name: str) -> tuple[Array, Array | None] | None:
        """The codes of a constant less their zero point, in the order it is read, and its scale."""
        graph, order = self.graph, Order()
        while name not in graph.constants:
            node = graph.producer.get(name)
            if node is None or node.op_type not in (*DEQUANTIZE, "Transpose"):
                return None
            if node.op_type in DEQUANTIZE:
                grid = graph.parameters(node)
                if grid is None or node.inputs[0] not in graph.constants:
                    return None
                codes = graph.constants[node.inputs[0]]
                return order.apply(codes.astype(np.int32) - grid.along(codes.ndim)[1].astype(np.int32)), grid.scale
            if node.op_type == "Transpose":
                order = Order((Turn(_axes(node, len(fixed_shape(graph, node.inputs[0]) or ()))),)).then(order)
            name = node.inputs[0]
        return order.apply(graph.constants[name]), None

    # -- how images lie ------------------------------------------------------------------------------------------------

    def made_as(self, bundle: Bundle) -> Order | None:
        """What turns the first member into the image (NCHW) that a spatial operator makes of it; None where none does.

        What is requantised or padded behind that lies as it was made.
        """
        node, sources = self._node(bundle, _IMAGES), self.sources[bundle.index]
        if node is not None:
            back = trace(self.graph, bundle.first, node.outputs[0])
            return None if back is None else back.reverse()
        if self.work(bundle) or len(sources) != 1:
            return None
        made, back = self.made_as(sources[0]), self._from(sources[0], bundle.first)
        return None if made is None or back is None else back.reverse().then(made)

    def read_as(self, bundle: Bundle) -> Iterator[tuple[Bundle, Order]]:
        """What turns the first member into the image that a spatial operator reads, with what that makes; requantised, padded
        or not.
        """
        for reader in self.readers[bundle.index]:
            node = self._node(reader, _IMAGES)
            there = self._from(bundle, reader.first if node is None else node.inputs[0])
            if there is not None and node is not None:
                yield reader, there
            elif there is not None and not self.work(reader):
                yield from ((last, there.then(beyond)) for last, beyond in self.read_as(reader))

    def _from(self, bundle: Bundle, name: str) -> Order | None:
        """How a value lies seen from the first member of `bundle`, which it is made of."""
        for member in bundle.members:
            there = trace(self.graph, name, member)
            if there is not None:
                return bundle.orders[member].then(there)
        return None


def trace(graph: Graph, name: str, source: str) -> Order | None:
    """How `name` lies seen from `source`, where only what tools fold away lies between; None where more does."""
    moves: list[Turn | Reshape] = []
    for node in _back(graph, name, source):
        if node is None or node.op_type not in _LIGHT:
            return None
        shapes = fixed_shape(graph, node.inputs[0]), fixed_shape(graph, node.outputs[0])
        if node.op_type == "Transpose":
            moves.append(Turn(_axes(node, len(shapes[0] or ()))))
        elif node.op_type in _RESHAPES:
            if shapes[0] is None or shapes[1] is None:
                return None
            moves.append(Reshape(shapes[0], shapes[1]))
    return Order().then(Order(tuple(reversed(moves))))


def _back(graph: Graph, name: str, source: str) -> Iterator[Node | None]:
    while name != source:
        node = graph.producer.get(name)
        yield node
        if node is None:
            return
        name = node.inputs[0]


def _axes(node: Node, rank: int) -> Shape:
    return tuple(int(k) for k in node.attributes.get("perm", range(rank - 1, -1, -1)))


def _ordering(graph: Graph, step: Step) -> Order | None:
    """How a step that only reorders its one input does so; None for a step that does work. Another sign of codes is no work."""
    if len(step.inputs) != 1 or len(step.outputs) != 1 or not set(step.ops) <= _ORDERING | QUANTIZE:
        return None
    before, after = (graph.quantisation.get(name) for name in (step.inputs[0], step.outputs[0]))
    if any(graph.nodes[k].op_type in QUANTIZE for k in step.nodes) and (
        before is None or after is None or grid_of(before) != grid_of(after)
    ):
        return None
    return trace(graph, step.outputs[0], step.inputs[0])


def fixed_shape(graph: Graph, name: str) -> Shape | None:
    """The shape of a value where the model gives all of it."""
    value = graph.values.get(name)
    if value is None or value.shape is None or not all(isinstance(n, int) for n in value.shape):
        return None
    return tuple(int(n) for n in value.shape if n is not None)
