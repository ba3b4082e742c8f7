"""A QDQ or QOperator ONNX model becomes a .tflite twin: the same integers, scales and zero points, under the same names.

Every step is lowered to the integer IR and written as the TFLite operators that mean the same. 4-D values lie channels last;
a Transpose that only says so vanishes. uint8 codes become int8 (zero point 128 lower, which changes no real number), unless
the weights have a zero point of their own: then TFLite's uint8 kernels are the ones that can hold them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from equivcheck.errors import UnsupportedModel
from equivcheck.models.graph import DEQUANTIZE, MOVES, QUANTIZE, Array, Graph, Node, Quantisation, Step, Value
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.models.tflite.write import write_model
from equivcheck.twins import elementwise, moves, pools, sums
from equivcheck.twins.draft import CannotExpressError, Draft, Held, Layout, Stage, channels_last, native
from equivcheck.vnpu import islands
from equivcheck.vnpu.ir import (
    Accumulate,
    Binary,
    Chain,
    Codes,
    Island,
    Mean,
    Move,
    Op,
    Operand,
    Pool,
    Quantise,
    Reduce,
    Resize,
    Softmax,
    Table,
)
from equivcheck.vnpu.lower import lower
from equivcheck.words import counted

METADATA = "equivcheck.twin"
SHOWN = 3
_FOLLOWS = frozenset({"Relu", "Clip", "Sigmoid", "Add", "Mul", "Identity", *QUANTIZE, *DEQUANTIZE})
_IMAGES = frozenset({"Conv", "ConvTranspose", "AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool", "Resize"})


@dataclass(frozen=True, slots=True)
class Refused:
    """A step that has no exact form in TFLite: its number, its name in reports, and why."""

    step: int
    label: str
    reason: str


class ConvertError(UnsupportedModel):
    """Steps that TFLite cannot express; all that were found are in `refused`, in graph order."""

    def __init__(self, path: str, refused: Sequence[Refused], behind: int) -> None:
        self.refused = tuple(refused)
        self.behind = behind
        first = self.refused[0]
        listed = "; ".join(f"#{r.step} {r.label}: {r.reason}" for r in self.refused[:SHOWN])
        more = f"; and {len(self.refused) - SHOWN} more" if len(self.refused) > SHOWN else ""
        unreached = f"; {behind} behind them not tried" if behind else ""
        super().__init__(
            f"{path} has no TFLite twin: {counted(len(self.refused), 'step')} cannot be written: {listed}{more}{unreached}",
            asked=path,
            hint=f"`equivcheck split MODEL --at '#{first.step}' -o parts` cuts the model before it; convert the head",
        )


@dataclass(frozen=True, slots=True)
class Converted:
    """A twin. Everything is keyed by the names of the ONNX model's stored values.

    `content`: the .tflite file. `tensors`: value -> the tensor that holds it, of its own name unless a Transpose vanished.
    `layout`: axis k of the tensor is axis `layout[k]` of the value; left out where nothing is turned. `missing`: values
    without a tensor of their own name, and why. `notes`: what holds for the whole twin. `rewrites`: step number -> how it
    was rewritten, exactly.
    """

    content: bytes
    tensors: Mapping[str, str]
    layout: Mapping[str, Layout]
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rewrites: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def as_tensor(self, name: str, array: Array) -> Array:
        """A value of the ONNX model as its tensor lies, C-contiguous: what an input is fed."""
        return np.ascontiguousarray(array.transpose(self.layout[name]) if name in self.layout else array)

    def as_value(self, name: str, array: Array) -> Array:
        """The content of a value's tensor as the ONNX model has it, C-contiguous; codes as they are in the twin."""
        return np.ascontiguousarray(array.transpose(np.argsort(self.layout[name])) if name in self.layout else array)


def convert(model: OnnxModel, *, older_engines: bool = False) -> Converted:
    """Return the twin of `model`, with batch 1 where its first dimension is symbolic.

    `older_engines`: write nothing that TFLite 2.14 cannot read (FULLY_CONNECTED with a scale a channel becomes CONV_2D).

    Raises ConvertError with all steps that cannot be written, UnsupportedModel where an input has no fixed shape.
    """
    return _Conversion(model, older_engines).run()


class _Conversion:
    def __init__(self, model: OnnxModel, older_engines: bool) -> None:
        self.model = model
        self.graph = model.graph
        self.lowered = {step.id: _lowered(self.graph, step) for step in self.graph.steps}
        names = {*self.graph.stored, *self.graph.outputs}
        self.draft = Draft(_prefers_int8(self.lowered.values()), names, older_engines)
        self.refused: list[Refused] = []
        self.behind = 0
        self.notes: list[str] = []
        self.rewrites: dict[int, tuple[str, ...]] = {}

    def run(self) -> Converted:
        inputs = [self._input(name) for name in self.graph.inputs]
        for step in self.graph.steps:
            self._step(step)
        outputs = [] if self.refused else [self._output(name) for name in self.graph.outputs]
        if self.refused:
            raise ConvertError(self.model.path, self.refused, self.behind)
        self._say_kind()
        tensors, layout, missing = self._pairs()
        kept = {"model_sha256": self.model.sha256, "tensors": tensors, "layout": layout}
        content = write_model(
            self.draft.tensors,
            self.draft.operators,
            inputs,
            outputs,
            description=f"equivcheck: twin of an ONNX model, sha256 {self.model.sha256}",
            metadata={METADATA: json.dumps(kept).encode()},
        )
        return Converted(content, tensors, layout, missing, tuple(self.notes), self.rewrites)

    # -- inputs and outputs --------------------------------------------------------------------------------------------

    def _input(self, name: str) -> int:
        value = self.graph.values[name]
        sizes = list(value.shape or ())
        if value.shape is None or any(not isinstance(size, int) for size in sizes[1:]):
            raise UnsupportedModel(
                f"input {name} has no fixed shape",
                asked=name,
                hint="a TFLite file needs one; fix the model's input shape",
            )
        if sizes and not isinstance(sizes[0], int):
            self.notes.append(f"input {name}: the first dimension, {sizes[0] or 'unknown'}, is 1")
            sizes[0] = 1
        shape = tuple(int(size) for size in sizes if isinstance(size, int))
        quantisation = self._quantisation(name)
        if value.dtype not in ("float32", "int8", "uint8") or (quantisation is None and value.dtype != "float32"):
            bare = " without a quantisation" if value.dtype in ("int8", "uint8") else ""
            raise UnsupportedModel(
                f"input {name} is {value.dtype}{bare}", asked=name, hint="a twin reads float32, int8 or uint8"
            )
        codes = None if quantisation is None else codes_of(quantisation)
        rank = len(shape)
        layout = channels_last(rank) if rank == 4 and self._is_image(name) else native(rank)
        tensor = self.draft.tensor(name, tuple(shape[axis] for axis in layout), codes, value=True)
        return self.draft.hold(name, Held(tensor, layout, codes)).tensor

    def _quantisation(self, name: str) -> Quantisation | None:
        """That of an input, or of what is made of it by moving its codes."""
        while name not in self.graph.quantisation:
            readers = self.graph.consumers.get(name, ())
            if len(readers) != 1 or readers[0].op_type not in MOVES:
                return None
            name = readers[0].outputs[0]
        return self.graph.quantisation[name]

    def _is_image(self, name: str) -> bool:
        """Whether the first operator with an opinion that reads `name` is one whose images TFLite has channels last."""
        pending, seen = [name], set()
        while pending:
            for node in self.graph.consumers.get(pending.pop(0), ()):
                if node.op_type in _IMAGES:
                    return True
                if node.op_type not in _FOLLOWS:
                    return False
                if node.index not in seen:
                    seen.add(node.index)
                    pending += node.outputs
        return False

    def _output(self, name: str) -> int:
        stored = self.graph.store(name)
        if stored is None or stored not in self.draft.forms:
            raise UnsupportedModel(f"output {name} is no value that a step stores", asked=name)
        held = self.draft.forms[stored][0]
        shape = self.draft.tensors[held.tensor].shape
        if name == stored:
            if self.draft.tensors[held.tensor].name != name:  # a Transpose that vanished: an output keeps its name
                held = self.draft.run((held.tensor,), [self.draft.reshape(shape, held.codes)], name, held.layout)
                self.draft.forms[name].insert(0, held)
            return held.tensor
        node = self.graph.producer[name]
        quantisation = self.graph.parameters(node)
        if node.op_type not in DEQUANTIZE or quantisation is None or held.codes is None:
            raise UnsupportedModel(f"output {name} is no DequantizeLinear of a stored value", asked=name)
        held = self.draft.read(Operand(stored, codes_of(quantisation)), held.codes.signed)
        return self.draft.run((held.tensor,), [Stage("DEQUANTIZE", shape, None)], name, held.layout).tensor

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        if any(name not in self.draft.forms for name in step.inputs):
            self.behind += 1
            return
        self.draft.rewrites = []
        op = self.lowered[step.id]
        try:
            if isinstance(op, str):
                self._floats(step, op)
            else:
                emit(self.draft, op, weight_zero(self.graph, step))
        except CannotExpressError as reason:
            self.refused.append(Refused(step.id, self.graph.main_node(step).label, str(reason)))
            return
        if self.draft.rewrites:
            self.rewrites[step.id] = tuple(dict.fromkeys(self.draft.rewrites))

    def _floats(self, step: Step, reason: str) -> None:
        """A stored float, or codes that no DQ explains, only moved (a Transpose in front); anything else is refused."""
        node = self.graph.nodes[step.nodes[0]]
        held = self.draft.forms[step.inputs[0]][0] if step.inputs else None
        kinds = (*moves.SHAPED, "Transpose")
        if len(step.nodes) != 1 or held is None or node.op_type not in kinds:
            raise CannotExpressError(reason)
        if held.codes is not None and node.inputs[0] != step.inputs[0]:  # it moves what the codes stand for
            held = self.draft.after(held, Stage("DEQUANTIZE", self.draft.tensors[held.tensor].shape, None))
        moves.move_held(self.draft, held, node.op_type, node.attributes, _constants(self.graph, node), step.outputs[0])

    # -- what came of it -----------------------------------------------------------------------------------------------

    def _say_kind(self) -> None:
        kinds = {q.dtype.name for name, q in self.graph.quantisation.items() if name in self.draft.forms}
        if self.draft.signed and "uint8" in kinds:
            self.notes.append("uint8 codes are int8 in the twin, zero points 128 lower: the same numbers")
        if not self.draft.signed:
            self.notes.append("uint8 kernels: the weights have a zero point, which TFLite's int8 kernels have not")
            if "int8" in kinds:
                self.notes.append("int8 codes are uint8 in the twin, zero points 128 higher: the same numbers")

    def _pairs(self) -> tuple[dict[str, str], dict[str, Layout], dict[str, str]]:
        tensors, layout, missing = {}, {}, {}
        for name in self.graph.stored:
            held = self.draft.forms[name][0]
            tensors[name] = self.draft.tensors[held.tensor].name
            if held.layout != native(len(held.layout)):
                layout[name] = held.layout
            if tensors[name] != name:
                missing[name] = f"the Transpose vanishes: tensor {tensors[name]}, read in another order"
        return tensors, layout, missing


def codes_of(quantisation: Quantisation) -> Codes:
    """Per-tensor quantisation as the IR has it."""
    dtype = quantisation.dtype
    return Codes(
        float(quantisation.scale.ravel()[0]),
        int(quantisation.zero_point.ravel()[0]),
        dtype.kind == "i",
        8 * dtype.itemsize,
    )


def _prefers_int8(lowered: Iterable[Op | str]) -> bool:
    """int8, unless more sums have weights only a uint8 kernel can hold than have one scale a channel, which only int8 has."""
    links = [link for op in lowered for link in (op.links if isinstance(op, Chain) else (op,))]
    found = [link for link in links if isinstance(link, Accumulate)]
    in_uint8 = sum(not sums.fits_int8(op) for op in found)
    return not in_uint8 or sum(op.weight_scale.size > 1 for op in found) >= in_uint8


def _lowered(graph: Graph, step: Step) -> Op | str:
    """The IR operator of a step; a Resize of codes is taken as DQ-Resize-Q of one scale, which is the same."""
    found = lower(graph, step)
    node = graph.nodes[step.nodes[0]]
    if not isinstance(found, str) or len(step.nodes) != 1 or node.op_type != "Resize":
        return found
    q = graph.quantisation.get(node.inputs[0])
    if q is None or q.per_channel or not all(name in graph.constants for name in node.inputs[1:] if name):
        return found
    parameters = ("codes/scale", "codes/zero")
    nodes = (
        Node(0, "", "DequantizeLinear", "", (node.inputs[0], *parameters), ("codes/real",)),
        replace(node, index=1, inputs=("codes/real", *node.inputs[1:]), outputs=("codes/moved",)),
        Node(2, "", "QuantizeLinear", "", ("codes/moved", *parameters), node.outputs),
    )
    constants: dict[str, Array] = {name: graph.constants[name] for name in node.inputs[1:] if name}
    constants |= dict(zip(parameters, (q.scale, q.zero_point), strict=True))
    values: dict[str, Value] = {name: graph.values[name] for name in node.inputs if name in graph.values}
    alone = Graph(nodes=nodes, values=values, inputs=node.inputs[:1], outputs=node.outputs, constants=constants)
    return lower(alone, alone.steps[0])


def _constants(graph: Graph, node: Node) -> dict[int, Array]:
    found = {k: islands.constant(graph, name) for k, name in enumerate(node.inputs) if k and name}
    if any(value is None for value in found.values()):
        raise CannotExpressError(f"{node.op_type} with a shape known only at run time")
    return {k: value for k, value in found.items() if value is not None}


def weight_zero(graph: Graph, step: Step) -> int | None:
    """The zero point of a step's weights as uint8 codes, where they have one for all."""
    for index in step.nodes:
        node = graph.nodes[index]
        dequantiser = (
            graph.producer.get(node.inputs[1]) if len(node.inputs) > 1 and node.op_type not in DEQUANTIZE else None
        )
        found = graph.parameters(dequantiser) if dequantiser is not None and dequantiser.op_type in DEQUANTIZE else None
        if found is not None and found.dtype in (np.int8, np.uint8) and found.zero_point.size == 1:
            return int(found.zero_point.ravel()[0]) + (128 if found.dtype == np.int8 else 0)
    return None


def emit(draft: Draft, op: Op, zero: int | None) -> None:
    """Write one IR operator. Raises CannotExpressError."""
    if isinstance(op, Chain):
        for link in op.links:
            emit(draft, link, zero)
    elif isinstance(op, Accumulate) and op.kind == "Conv":
        sums.convolve(draft, op, zero)
    elif isinstance(op, Accumulate) and op.kind == "ConvTranspose":
        sums.transpose_convolve(draft, op)
    elif isinstance(op, Accumulate):
        sums.multiply(draft, op, zero)
    elif isinstance(op, Binary):
        elementwise.binary(draft, op)
    elif isinstance(op, Table):
        elementwise.table(draft, op)
    elif isinstance(op, Softmax):
        elementwise.softmax(draft, op)
    elif isinstance(op, Quantise):
        elementwise.quantise(draft, op)
    elif isinstance(op, Pool):
        pools.pool(draft, op)
    elif isinstance(op, Mean):
        pools.mean(draft, op)
    elif isinstance(op, Reduce):
        pools.reduce(draft, op)
    elif isinstance(op, Resize):
        pools.resize(draft, op)
    elif isinstance(op, Move):
        moves.move(draft, op)
    else:
        assert isinstance(op, Island)
        elementwise.pairs(draft, op)
