"""The format-free view of a quantised model: values, nodes, quantisation, aliases and steps.

Nothing here knows ONNX or TFLite; a loader fills `Value` and `Node`, and `Graph` derives the rest once:

* a *stored value* is what an engine keeps in memory: the output of a QuantizeLinear, of a QLinear operator, or a value
  that no Q follows. Its *aliases* (the DequantizeLinear output, the float before Q) name the same numbers;
* a *step* is the smallest piece between stored values: DQ-op(s)-Q, one QLinear node, or one float node. Ops that are
  joined by float values between DQs and Qs (Sigmoid and Mul of a swish, say) form one step;
* steps are numbered from 1 in graph order.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Dim = int | str | None

QUANTIZE = frozenset({"QuantizeLinear"})
DEQUANTIZE = frozenset({"DequantizeLinear"})
# Operators that make other numbers each time: without inputs, but no constants. What they make crosses like any value.
RANDOM = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli".split())
# Operators that only move codes: a value they make from a quantised value has the same scale and zero point.
MOVES = frozenset(
    "Reshape Flatten Squeeze Unsqueeze Transpose Slice Split Gather Identity Expand MaxPool "
    "DepthToSpace SpaceToDepth Tile Concat Pad".split()
)


@dataclass(frozen=True, slots=True, eq=False)
class Quantisation:
    """How codes of one value stand for reals: real = scale * (code - zero_point).

    `scale` is float32 (or as stored), 0-d for per tensor and 1-d for per channel along `axis`; `zero_point` has the same
    shape and the dtype of the codes. With `block`, every `block` codes along `axis` share one scale (opset 21).
    """

    scale: Array
    zero_point: Array
    axis: int | None = None
    block: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.zero_point.dtype

    @property
    def per_channel(self) -> bool:
        return self.scale.ndim == 1 and self.scale.size > 1

    def same_as(self, other: Quantisation | None) -> bool:
        """True when scale, zero point, dtype and axis are equal bit for bit."""
        return (
            other is not None
            and self.dtype == other.dtype
            and np.array_equal(self.scale.ravel(), other.scale.ravel())
            and np.array_equal(self.zero_point.ravel(), other.zero_point.ravel())
            and (not self.per_channel or self.axis == other.axis)
        )

    def along(self, ndim: int) -> tuple[Array, Array]:
        """Return scale (float64) and zero point (int64), shaped to broadcast against an array of `ndim` dimensions."""
        scale, zero = self.scale.astype(np.float64), self.zero_point.astype(np.int64)
        if scale.ndim > 1 and self.block:
            return np.repeat(scale, self.block, self.axis or 0), np.repeat(zero, self.block, self.axis or 0)
        if not self.per_channel:
            return scale.reshape(()), zero.reshape(())
        shape = [1] * ndim
        shape[self.axis or 0] = -1
        return scale.reshape(shape), zero.reshape(shape)


@dataclass(frozen=True, slots=True)
class Value:
    """An edge of the graph. `dtype` is a numpy-style name ("int8", "float32", "bfloat16", "int4") or None if unknown."""

    name: str
    dtype: str | None = None
    shape: tuple[Dim, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operator. `index` is its place in the graph; `origin` its place in the file, where that was rewritten."""

    index: int
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    origin: int = -1

    @property
    def label(self) -> str:
        """The node's name, or `OpType->first output` where it has none."""
        return self.name or f"{self.op_type}->{next(filter(None, self.outputs), '?')}"


@dataclass(frozen=True, slots=True)
class Step:
    """The smallest piece of the model between stored values. `nodes` are indices into `Graph.nodes`, in order.

    `inputs` and `outputs` name stored values (outputs in graph order); constants are not inputs. `ops` are the op_types
    of the work it does, without the Q and DQ around it (so a requantisation alone has ops ("QuantizeLinear",)).
    """

    id: int
    nodes: tuple[int, ...]
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    main: int

    @property
    def op_type(self) -> str:
        """What a table shows: the one operator (its Relu or Clip goes without saying), or `Sigmoid+Mul` for an island."""
        named = [op for op in self.ops if op not in ("Relu", "Clip", "DequantizeLinear")] or list(self.ops)
        return "+".join(dict.fromkeys(named))


class Graph:
    """A frozen view of a model's main graph, in the form with QDQ around every quantised operator.

    `originals` are the nodes as the file has them (a QOperator file differs from `nodes` there); selectors and reports
    speak of originals, steps are made of `nodes`. `constants` may decode its arrays when they are asked for. `inner` maps
    names inside bodies and local functions to what holds them: nothing can be cut there.
    """

    def __init__(
        self,
        *,
        nodes: Sequence[Node],
        values: Mapping[str, Value],
        inputs: Sequence[str],
        outputs: Sequence[str],
        constants: Mapping[str, Array],
        originals: Sequence[Node] | None = None,
        captured: Mapping[int, frozenset[str]] | None = None,
        inner: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        self.values = dict(values)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.constants = constants
        self.originals = tuple(originals) if originals is not None else self.nodes
        self.inner = dict(inner or {})
        self._captured = dict(captured or {})

    # -- plain topology ------------------------------------------------------------------------------------------------

    def reads(self, node: Node) -> tuple[str, ...]:
        """All values a node reads, those its bodies (If, Loop) capture from outside included."""
        return tuple(i for i in node.inputs if i) + tuple(sorted(self._captured.get(node.index, ())))

    @cached_property
    def producer(self) -> dict[str, Node]:
        return {out: node for node in self.nodes for out in node.outputs if out}

    @cached_property
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(self.reads(node)):
                found[name].append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def constant_values(self) -> frozenset[str]:
        """Names of values that no graph input reaches: initializers, and what nodes compute from them alone."""
        known = set(self.constants)
        for node in self.nodes:
            if all(name in known for name in self.reads(node)):
                known.update(out for out in node.outputs if out)
        return frozenset(known)

    @cached_property
    def live(self) -> frozenset[int]:
        """Indices of the nodes that some graph output depends on."""
        found: set[int] = set()
        pending = list(self.outputs)
        while pending:
            node = self.producer.get(pending.pop())
            if node is not None and node.index not in found:
                found.add(node.index)
                pending += self.reads(node)
        return frozenset(found)

    # -- quantisation --------------------------------------------------------------------------------------------------

    def parameters(self, node: Node) -> Quantisation | None:
        """Scale and zero point of a Q or DQ node, or None when they are not constants."""
        scale = self.constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
        if scale is None:
            return None
        if len(node.inputs) > 2 and node.inputs[2]:
            zero = self.constants.get(node.inputs[2])
            if zero is None:
                return None
        else:
            zero = np.zeros(scale.shape, self._codes_dtype(node))
        blocked = scale.ndim > 1
        axis = int(node.attributes.get("axis", 1)) if blocked or (scale.ndim == 1 and scale.size > 1) else None
        shape = self._shape_of(node.inputs[0])
        if axis is not None and axis < 0 and shape is not None:
            axis += len(shape)
        if blocked:
            return Quantisation(scale, zero, axis, int(node.attributes.get("block_size", 0)))
        scale, zero = (a.reshape(()) if a.size == 1 else a for a in (scale, zero))
        return Quantisation(scale, zero, axis)

    def _codes_dtype(self, node: Node) -> np.dtype[Any]:
        named = node.attributes.get("output_dtype_name") if node.op_type in QUANTIZE else None
        coded = self.values.get(node.inputs[0] if node.op_type in DEQUANTIZE else node.outputs[0])
        name = named or (coded.dtype if coded is not None else None) or "uint8"
        try:
            return np.dtype(name)
        except TypeError:  # int4 and friends have no numpy dtype: their codes are held as int8 or uint8
            return np.dtype("uint8" if name.startswith("u") else "int8")

    def _shape_of(self, name: str) -> tuple[Dim, ...] | None:
        value = self.values.get(name)
        if value is not None and value.shape is not None:
            return value.shape
        constant = self.constants.get(name)
        return None if constant is None else constant.shape

    @cached_property
    def quantisation(self) -> dict[str, Quantisation]:
        """Quantisation of every coded value: by its Q, through data movement, or (graph inputs) by its first DQ."""
        known: dict[str, Quantisation] = {}
        for name in self.inputs:
            for consumer in self.consumers.get(name, ()):
                if consumer.op_type in DEQUANTIZE and consumer.inputs[0] == name:
                    found = self.parameters(consumer)
                    if found is not None:
                        known.setdefault(name, found)
        for node in self.nodes:
            if node.op_type in QUANTIZE:
                found = self.parameters(node)
                if found is not None:
                    known[node.outputs[0]] = found
            elif node.op_type in MOVES and node.inputs and node.inputs[0] in known:
                source = known[node.inputs[0]]
                if not source.per_channel:
                    known.update((out, source) for out in node.outputs[: None if node.op_type == "Split" else 1] if out)
        for node in self.nodes:  # codes that come from elsewhere (ConvInteger, a body): their DQ says what they mean
            if (
                node.op_type in DEQUANTIZE
                and node.inputs[0] not in known
                and node.inputs[0] not in self.constant_values
            ):
                found = self.parameters(node)
                if found is not None:
                    known[node.inputs[0]] = found
        return known

    # -- aliases and stored values -------------------------------------------------------------------------------------

    @cached_property
    def alias_of(self) -> dict[str, str]:
        """Alias name -> the stored value it stands for: DQ outputs, and floats whose only readers are one Q."""
        found: dict[str, str] = {}
        outputs = set(self.outputs)
        for node in self.nodes:
            if node.op_type in DEQUANTIZE and node.inputs[0] not in self.constant_values:
                found[node.outputs[0]] = node.inputs[0]
        for node in self.nodes:
            if node.op_type not in QUANTIZE or node.inputs[0] in self.constant_values or node.inputs[0] in found:
                continue
            source = node.inputs[0]
            if source in self.inputs or source in outputs:
                continue
            if all(c.op_type in QUANTIZE for c in self.consumers[source]):
                found[source] = node.outputs[0]
        return found

    @cached_property
    def stored(self) -> tuple[str, ...]:
        """Stored values in graph order: the (fed) graph inputs, then what every step stores."""
        return tuple(dict.fromkeys([*self.inputs, *(out for step in self.steps for out in step.outputs)]))

    def store(self, name: str) -> str | None:
        """The stored value that `name` is or stands for, or None (a constant, an inner value of an island)."""
        resolved = self.alias_of.get(name, name)
        return resolved if resolved in self._stored_set else None

    @cached_property
    def _stored_set(self) -> frozenset[str]:
        return frozenset(self.stored)

    def aliases(self, stored: str) -> tuple[str, ...]:
        return self._aliases.get(stored, ())

    @cached_property
    def _aliases(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = defaultdict(list)
        for alias, stored in self.alias_of.items():
            found[stored].append(alias)
        return {stored: tuple(names) for stored, names in found.items()}

    # -- steps ---------------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return _Steps(self).build()

    @cached_property
    def step_of_node(self) -> dict[int, Step]:
        return {index: step for step in self.steps for index in step.nodes}

    @cached_property
    def step_of_value(self) -> dict[str, Step]:
        return {out: step for step in self.steps for out in step.outputs}

    def main_node(self, step: Step) -> Node:
        """The node a step is named after, as the file has it: its last worker (the Conv of DQ-Conv-Q)."""
        node = self.nodes[step.main]
        return self.originals[node.origin] if node.origin >= 0 else node


class _Steps:
    """Groups nodes into steps; see the module's docstring for what a step is.

    Two nodes are joined only while no path leaves their group and comes back: a float that is read on the other side of a
    Q (the residual skip of a TensorRT export) stays a stored value of its own, and steps never wait for each other.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.members: dict[int, list[Node]] = {}
        self.group: dict[int, int] = {}

    def build(self) -> tuple[Step, ...]:
        graph = self.graph
        live = [node for node in graph.nodes if self._works(node)]
        self.members = {node.index: [node] for node in live}
        self.group = {node.index: node.index for node in live}
        fusable = self._between_dq_and_q(live)
        for node in live:
            for name in graph.reads(node):
                source = graph.producer.get(name)
                if source is not None and source.index in self.group and self._belong(source, node, name, fusable):
                    self._join(source.index, node.index)
        groups = self._ordered([nodes for _, nodes in sorted(self.members.items())])
        return tuple(self._step(number, nodes) for number, nodes in enumerate(groups, 1))

    def _works(self, node: Node) -> bool:
        """Whether a node is work of a step: not constant, not an alias (DQ), and not dead."""
        graph = self.graph
        if node.index not in graph.live or all(out in graph.constant_values for out in node.outputs if out):
            return False
        return not (node.op_type in DEQUANTIZE and node.outputs[0] in graph.alias_of)

    def _belong(self, source: Node, node: Node, name: str, fusable: set[int]) -> bool:
        if not self._float(name):
            return False
        if node.op_type in QUANTIZE and source.op_type not in QUANTIZE and self.graph.parameters(node) is not None:
            return not self._leaves_and_returns(source.index, node.index)
        both = source.index in fusable and node.index in fusable
        return both and not self._leaves_and_returns(source.index, node.index)

    def _leaves_and_returns(self, one: int, other: int) -> bool:
        """Is there a path from one of the two groups to one of them through a node of neither?"""
        inside = {n.index for root in {self.group[one], self.group[other]} for n in self.members[root]}
        last = max(inside)
        pending = [
            reader.index
            for index in inside
            for out in self.graph.nodes[index].outputs
            for reader in self.graph.consumers.get(out, ())
            if reader.index not in inside
        ]
        seen: set[int] = set()
        while pending:
            index = pending.pop()
            if index in seen or index > last:
                continue
            seen.add(index)
            for out in self.graph.nodes[index].outputs:
                for reader in self.graph.consumers.get(out, ()):
                    if reader.index in inside:
                        return True
                    pending.append(reader.index)
        return False

    def _float(self, name: str) -> bool:
        value = self.graph.values.get(name)
        return value is None or value.dtype is None or value.dtype in ("float32", "float16", "float64", "bfloat16")

    def _between_dq_and_q(self, live: Sequence[Node]) -> set[int]:
        """Indices of float nodes that are fed by DQs and constants only and whose every float result ends in a Q."""
        fed: dict[int, bool] = {}
        for node in live:
            if node.op_type not in QUANTIZE:
                reads = self.graph.reads(node)
                moving = any(name not in self.graph.constant_values for name in reads)
                fed[node.index] = moving and all(self._from_dq(name, fed) for name in reads)
        ends: dict[int, bool] = {}
        for node in reversed(live):
            if node.op_type not in QUANTIZE:
                results = [out for out in node.outputs if out and self.graph.consumers.get(out)]
                ends[node.index] = bool(results) and all(self._into_q(out, ends) for out in results)
        return {index for index, is_fed in fed.items() if is_fed and ends[index]}

    def _from_dq(self, name: str, fed: Mapping[int, bool]) -> bool:
        source = self.graph.producer.get(name)
        if name in self.graph.constant_values:
            return True
        if source is None:
            return False
        return (name in self.graph.alias_of and source.op_type in DEQUANTIZE) or fed.get(source.index, False)

    def _into_q(self, name: str, ends: Mapping[int, bool]) -> bool:
        readers = self.graph.consumers[name]
        return name not in self.graph.outputs and all(
            reader.op_type in QUANTIZE or ends.get(reader.index, False) for reader in readers
        )

    def _join(self, one: int, other: int) -> None:
        a, b = sorted((self.group[one], self.group[other]))
        if a != b:
            moved = self.members.pop(b)
            self.members[a] = sorted([*self.members[a], *moved], key=lambda node: node.index)
            self.group.update((node.index, a) for node in moved)

    def _ordered(self, groups: Sequence[list[Node]]) -> list[list[Node]]:
        """Every group after those it reads from; among those that are ready, by place in the file."""
        root = {node.index: k for k, nodes in enumerate(groups) for node in nodes}
        waits: dict[int, set[int]] = {k: set() for k in range(len(groups))}
        for k, nodes in enumerate(groups):
            for node in nodes:
                for name in self.graph.reads(node):
                    source = self.graph.producer.get(self.graph.alias_of.get(name, name))
                    if source is not None and source.index in root and root[source.index] != k:
                        waits[k].add(root[source.index])
        readers: dict[int, list[int]] = defaultdict(list)
        for k, sources in waits.items():
            for source_group in sources:
                readers[source_group].append(k)
        ready = [(groups[k][-1].index, k) for k, sources in waits.items() if not sources]
        heapq.heapify(ready)
        found = []
        while ready:
            _, k = heapq.heappop(ready)
            found.append(groups[k])
            for reader in readers[k]:
                waits[reader].discard(k)
                if not waits[reader]:
                    heapq.heappush(ready, (groups[reader][-1].index, reader))
        return found

    def _step(self, number: int, nodes: Sequence[Node]) -> Step:
        graph = self.graph
        inside = {node.index for node in nodes}
        made = [out for node in nodes for out in node.outputs if out]
        inputs = dict.fromkeys(
            graph.alias_of.get(name, name)
            for node in nodes
            for name in graph.reads(node)
            if name not in made and name not in graph.constant_values
        )
        work = [node for node in nodes if node.op_type not in QUANTIZE] or list(nodes)
        return Step(
            id=number,
            nodes=tuple(node.index for node in nodes),
            ops=tuple(node.op_type for node in work),
            inputs=tuple(inputs),
            outputs=tuple(out for out in made if out not in graph.alias_of and self._kept(out, inside)),
            main=work[-1].index if len(work) == 1 else self._dominant(work).index,
        )

    def _kept(self, name: str, inside: Iterable[int]) -> bool:
        graph = self.graph
        readers = [reader for reader in graph.consumers.get(name, ()) if reader.index in graph.live]
        if graph.producer[name].op_type in QUANTIZE and readers:
            return True
        return name in graph.outputs or any(reader.index not in inside for reader in readers)

    def _dominant(self, work: Sequence[Node]) -> Node:
        """The node an island is named after: the one with weights, else the last."""
        heavy = [n for n in work if n.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")]
        return (heavy or list(work))[-1]
