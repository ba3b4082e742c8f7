"""Finds a model's stored values in the graph that ONNX Runtime made of it.

ONNX Runtime fuses DQ-op-Q into integer kernels, re-encodes s8 as u8 (code + 128), renames and moves values. Tapping the
model itself stops all that (measured: up to 29 LSB off), so the *optimised* graph is tapped; and since names do
not survive, every quantised value gets a scale initializer of its own before optimising. The fused kernel still reads
that scale, whatever it is called, and so says which value it makes.

A scale tag alone is no proof: Conv -> MaxPool -> Q moves the Q in front of the MaxPool (255 LSB off if the wrong one of two
is taken), and Transposes wander through Q and DQ, so that even node, name and scale survive on codes in another order. Hence
nodes get unique names as well, every value comes with all its candidates, best first, and `backends.ort` believes one only
when it reproduces its own step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from equivcheck.models.graph import MOVES, Array, Graph, Node, Quantisation
from equivcheck.models.onnx.load import OnnxModel

# Where each kernel keeps the scale of what it makes ...
_OUTPUT_SCALE = {
    "QuantizeLinear": 1,
    "QLinearConv": 6,
    "QLinearConvTranspose": 6,
    "QLinearMatMul": 6,
    "QLinearAdd": 6,
    "QLinearMul": 6,
    "QLinearConcat": 0,
    "QLinearWhere": 7,
    "QGemm": 7,
}
# ... and of what it reads: pairs (value input, scale input).
_TWO_OPERANDS = [(0, 1), (3, 4)]
_INPUT_SCALES = {
    "DequantizeLinear": [(0, 1)],
    "QLinearConv": [(0, 1)],
    "QLinearMatMul": _TWO_OPERANDS,
    "QLinearAdd": _TWO_OPERANDS,
    "QLinearMul": _TWO_OPERANDS,
    "QGemm": _TWO_OPERANDS,
}
_UNARY_OUTPUT_SCALE = 3
_FARTHEST = 8  # nodes between an operator and its Q; Relu, Clip, moves
_NODE_NAME = re.compile(r"eqvn(\d+)x")


@dataclass(frozen=True, eq=False)
class Tagged:
    """A copy of the model in which scales and nodes carry telling names. `tags[scale name]` is the stored value."""

    proto: onnx.ModelProto
    tags: Mapping[str, str]
    graph: Graph


@dataclass(frozen=True, slots=True)
class Located:
    """Where a stored value lives in the optimised graph. `offset` is added to its codes (u8 -> s8: -128)."""

    name: str
    how: str
    certain: bool
    offset: int = 0


def tag(model: OnnxModel) -> Tagged:
    """Give every quantised value a scale of its own and every node a unique name, in a copy."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph = model.graph
    made: dict[str, str] = {}
    stored = set(graph.stored)
    prefix = _unused_prefix(proto)
    for index, node in enumerate(proto.graph.node):
        node.name = f"eqvn{index}x"
        position = _output_scale(node)
        if position is None or position >= len(node.input) or not node.output:
            continue
        quantisation = graph.quantisation.get(node.output[0])
        if quantisation is None or node.output[0] not in stored:
            continue
        name = f"{prefix}{len(made)}x"
        scale = graph.constants.get(node.input[position])
        if scale is None:
            continue
        proto.graph.initializer.append(numpy_helper.from_array(scale, name))
        made[node.output[0]] = name
        node.input[position] = name
    for node in proto.graph.node:
        for value, scale_at in _input_scales(node):
            read = node.input[value]
            if read in made and _reads_same_scale(graph, node.input[scale_at], read):
                node.input[scale_at] = made[read]
    return Tagged(proto, {name: value for value, name in made.items()}, graph)


def _unused_prefix(proto: onnx.ModelProto) -> str:
    """A beginning that no name of the model has, so that tags cannot meet it."""
    taken = {name for node in proto.graph.node for name in [*node.input, *node.output]}
    taken |= {tensor.name for tensor in proto.graph.initializer}
    prefix = "eqvs"
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    return prefix


def _reads_same_scale(graph: Graph, scale: str, value: str) -> bool:
    """A DQ may read codes with another scale than they were made with; such a reader must keep its own."""
    constant = graph.constants.get(scale)
    return constant is not None and np.array_equal(constant.ravel(), graph.quantisation[value].scale.ravel())


def _output_scale(node: onnx.NodeProto) -> int | None:
    if node.op_type in _OUTPUT_SCALE:
        return _OUTPUT_SCALE[node.op_type]
    return _UNARY_OUTPUT_SCALE if node.op_type.startswith("QLinear") else None


def _input_scales(node: onnx.NodeProto) -> list[tuple[int, int]]:
    if node.op_type in _INPUT_SCALES:
        pairs = _INPUT_SCALES[node.op_type]
    elif node.op_type == "QLinearConcat":
        pairs = [(k, k + 1) for k in range(2, len(node.input), 3)]
    elif node.op_type.startswith("QLinear"):
        pairs = [(0, 1)]
    else:
        return []
    return [(value, scale) for value, scale in pairs if scale < len(node.input)]


def locate(tagged: Tagged, optimised: onnx.ModelProto) -> tuple[dict[str, list[Located]], dict[str, str]]:
    """Return (stored value -> where it may be, best first; stored value -> why it was not found)."""
    return _Locator(tagged, optimised).locate()


class _Locator:
    def __init__(self, tagged: Tagged, optimised: onnx.ModelProto) -> None:
        self.graph = tagged.graph
        self.tags = tagged.tags
        self.tagged_values = frozenset(tagged.tags.values())
        self.constants = {t.name: t for t in optimised.graph.initializer}
        self.candidates: dict[str, dict[str, onnx.NodeProto]] = defaultdict(dict)
        self.zeros: dict[tuple[str, str], Any] = {}
        self.descendants: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self.values: set[str] = {port.name for port in optimised.graph.input}
        for node in optimised.graph.node:
            self._index(node)

    def _index(self, node: onnx.NodeProto) -> None:
        self.values.update(node.output)
        origin = _NODE_NAME.match(node.name)
        if origin is not None:
            self.descendants[int(origin.group(1))].append(node)
        position = _output_scale(node)
        if position is not None and position < len(node.input) and node.input[position] in self.tags:
            self._candidate(self.tags[node.input[position]], node.output[0], node, position + 1)
        for value, scale_at in _input_scales(node):
            if node.input[scale_at] in self.tags:
                self._candidate(self.tags[node.input[scale_at]], node.input[value], None, scale_at + 1, node)

    def _candidate(
        self, stored: str, name: str, maker: onnx.NodeProto | None, zero_at: int, reader: onnx.NodeProto | None = None
    ) -> None:
        node = maker if maker is not None else reader
        assert node is not None
        zero = node.input[zero_at] if zero_at < len(node.input) else ""
        self.zeros.setdefault(
            (stored, name), numpy_helper.to_array(self.constants[zero]).ravel() if zero in self.constants else None
        )
        if maker is not None or name not in self.candidates[stored]:
            self.candidates[stored][name] = node

    def locate(self) -> tuple[dict[str, list[Located]], dict[str, str]]:
        found: dict[str, list[Located]] = {}
        missing: dict[str, str] = {}
        for stored in self.graph.stored:
            if stored in self.graph.inputs:
                continue
            places = self._places(stored)
            if places:
                found[stored] = places
            else:
                missing[stored] = self._why_not(stored)
        return found, missing

    def _why_not(self, stored: str) -> str:
        if stored not in self.graph.quantisation:
            return "no longer in the optimised graph"
        return "fused away: no kernel of the optimised graph makes it with its scale and zero point"

    def _places(self, stored: str) -> list[Located]:
        quantisation = self.graph.quantisation.get(stored)
        producer = self._file_producer(stored)
        if quantisation is None or stored not in self.tagged_values:
            return self._by_name(stored, producer)
        candidates = self.candidates.get(stored, {})
        places = self._by_descent(producer, candidates)
        places += [Located(name, "one of the values with its scale", certain=False) for name in candidates]
        if stored in self.values:
            places.append(Located(stored, "by name", certain=False))
        fitting: dict[str, Located] = {}
        for place in places:
            offset = self._offset(stored, place.name, quantisation)
            if offset is not None:
                fitting.setdefault(place.name, Located(place.name, place.how, place.certain, offset))
        return list(fitting.values())

    def _file_producer(self, stored: str) -> Node | None:
        node = self.graph.producer.get(stored)
        return self.graph.originals[node.origin] if node is not None and node.origin >= 0 else node

    def _by_name(self, stored: str, producer: Node | None) -> list[Located]:
        """Values without a scale tag: final outputs and floats keep their names; moves of codes may be re-encoded."""
        if stored in self.values:
            final = stored in self.graph.outputs and stored not in self.graph.quantisation
            return [Located(stored, "by name", certain=final)]
        if producer is not None and producer.op_type in MOVES:
            return self._moved(producer, producer.outputs.index(stored))
        return []

    def _by_descent(self, producer: Node | None, candidates: Mapping[str, onnx.NodeProto]) -> list[Located]:
        """Follow Q's input back through the file until a node has a descendant in the optimised graph that makes it."""
        if producer is None:
            return []
        for node in self.descendants[producer.index]:
            if node.output[0] in candidates:
                return [Located(node.output[0], f"made by {node.op_type}", certain=True)]
        name = producer.inputs[0] if producer.op_type == "QuantizeLinear" else None
        for _ in range(_FARTHEST):
            source = self._file_node(name) if name else None
            if name is None or source is None or source.op_type in ("QuantizeLinear", "DequantizeLinear"):
                return []
            at = source.outputs.index(name)
            for node in self.descendants[source.index]:
                if at < len(node.output) and node.output[at] in candidates:
                    return [Located(node.output[at], f"fused into {node.op_type}", certain=True)]
            if source.op_type in MOVES and (moved := self._moved(source, at)):
                return moved
            name = source.inputs[0] if source.inputs else None
        return []

    def _file_node(self, name: str) -> Node | None:
        node = self.graph.producer.get(name)
        return self.graph.originals[node.origin] if node is not None and node.origin >= 0 else node

    def _moved(self, source: Node, at: int) -> list[Located]:
        """Outputs of what a movement became: its own first, then the others (k Slices may become one Split)."""
        found = [
            Located(name, f"moved by {node.op_type}", certain=False)
            for node in self.descendants[source.index]
            if node.op_type in MOVES
            for name in [*node.output[at : at + 1], *node.output]
        ]
        return list(dict.fromkeys(found))

    def _offset(self, stored: str, name: str, quantisation: Quantisation) -> int | None:
        """What to add to the optimised graph's codes: 0, or -128/+128 where s8 was re-encoded as u8 or back."""
        zero = self.zeros.get((stored, name))
        if zero is None:
            return 0  # by movement or by name: the dtype of what comes out tells (see `recode`)
        differences = set((quantisation.zero_point.ravel().astype(np.int64) - zero.astype(np.int64)).tolist())
        return differences.pop() if len(differences) == 1 and differences <= {0, -128, 128} else None


def recode(array: Array, located: Located, dtype: np.dtype[Any]) -> Array | None:
    """Return `array` as codes of `dtype`, or None when it cannot be those codes (a float, another width)."""
    if array.dtype == dtype and located.offset == 0:
        return array
    if array.dtype.kind not in "iu" or array.dtype.itemsize != dtype.itemsize:
        return None
    half = 1 << (8 * dtype.itemsize - 1)
    shift = located.offset or (-half if dtype.kind == "i" else half if array.dtype != dtype else 0)
    moved = array.astype(np.int32) + shift
    bounds = np.iinfo(dtype)
    inside = not moved.size or (moved.min() >= bounds.min and moved.max() <= bounds.max)
    return moved.astype(dtype) if inside else None
