"""Lowering: one step of a Graph becomes one IR operator, or a sentence that says why it runs on the CPU instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from equivcheck.models.graph import DEQUANTIZE, QUANTIZE, Array, Graph, Node, Quantisation, Step
from equivcheck.vnpu import islands
from equivcheck.vnpu.formulas import pool_of
from equivcheck.vnpu.ir import (
    Accumulate,
    Binary,
    Chain,
    Clamp,
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
from equivcheck.vnpu.moves import MOVES
from equivcheck.vnpu.resize import COORDINATES, NEAREST

BITS = {"int8": 8, "uint8": 8, "int16": 16, "uint16": 16}
WEIGHTS = ("int8", "uint8", "int4", "uint4", "int2", "uint2")
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu")


class CannotLowerError(Exception):
    """Why a step has no integer kernel; its text completes "runs on the CPU: ..."."""


def lower(graph: Graph, step: Step) -> Op | str:
    """Return the IR operator of `step`, or the reason in words why there is none."""
    try:
        op = _Lowering(graph, step).lower()
    except CannotLowerError as reason:
        return str(reason)
    missing = [name for name in step.outputs if name not in op.outputs]
    return f"{missing[0]} is stored as a float too" if missing else op


class _Lowering:
    def __init__(self, graph: Graph, step: Step) -> None:
        self.graph = graph
        self.step = step
        nodes = [graph.nodes[index] for index in step.nodes]
        self.quantisers = [n for n in nodes if n.op_type in QUANTIZE]
        self.work = [n for n in nodes if n.op_type not in QUANTIZE]
        self.hidden: dict[str, Operand] = {}  # moved codes inside the step, by the float they stand for
        self.result = self.quantisers[0].inputs[0] if self.quantisers else ""
        self.made = ""  # the name its result has where operators of this step follow

    def lower(self) -> Op:
        if not self.work:
            return self._only_quantises()
        for node in self.work:
            if node.domain not in ("", "ai.onnx", "com.microsoft"):
                raise CannotLowerError(f"{node.domain}.{node.op_type} has no integer kernel")
        if not self.quantisers:
            return self._on_codes()
        first, last = self._moves_before(), self._moves_behind()
        op = self._core()
        return (
            Chain(self.step.op_type, last[-1].outputs if last else op.outputs, (*first, op, *last), self._out())
            if (first or last)
            else op
        )

    def _core(self) -> Op:
        head = self.work[0]
        rules: dict[str, Callable[[Node], Op]] = {
            "Conv": self._convolution, "ConvTranspose": self._convolution, "Gemm": self._gemm, "MatMul": self._matmul,
            "AveragePool": self._pool, "MaxPool": self._pool, "GlobalAveragePool": self._mean, "ReduceMean": self._mean,
            "ReduceSum": self._reduce, "ReduceMax": self._reduce, "ReduceMin": self._reduce, "GlobalMaxPool": self._reduce,
            "Softmax": self._softmax, "Resize": self._resize,
        }  # fmt: skip
        if head.op_type in MOVES and len(self.work) == 1:
            return self._move(head)
        try:
            if head.op_type in rules:
                return rules[head.op_type](head)
            if head.op_type in BINARY and self._quantised_operands(head) == len(head.inputs) == 2:
                return self._binary(head)
            return self._table()
        except CannotLowerError as reason:
            island = self._island()
            if island is None:
                raise reason from None
            return island

    # -- moves before and behind ---------------------------------------------------------------------------------------

    def _moves_before(self) -> list[Op]:
        """Data movement and MaxPool on stored codes; what follows reads the moved codes."""
        found: list[Op] = []
        while len(self.work) > 1 and len(self.quantisers) == 1:
            node = next((n for n in self.work if self._moves_codes(n)), None)
            if node is None:
                break
            operands = [self._needed(name) for name in self._moved_inputs(node)]
            codes = operands[0].codes
            made = Operand(node.outputs[0], codes)
            found.append(self._link(node, tuple(operands), made))
            self.hidden[node.outputs[0]] = made
            self.work.remove(node)
        return found

    def _moves_codes(self, node: Node) -> bool:
        if not self._moves_alone(node) or node.outputs[0] == self.result:
            return False
        operands = [self._operand(name) for name in self._moved_inputs(node)]
        if any(o is None or o.constant is not None for o in operands):
            return False
        if node.op_type == "Pad" and len(node.inputs) > 2 and node.inputs[2]:
            fill = islands.constant(self.graph, node.inputs[2])  # only a zero has a code in every quantisation
            if fill is None or (fill.size and float(fill.ravel()[0]) != 0):
                return False
        return len({o.codes for o in operands if o is not None}) == 1

    def _moves_behind(self) -> list[Op]:
        """Data movement and MaxPool between the last operator and the Q: they move the Q's codes just as well."""
        found: list[Op] = []
        while len(self.work) > 1 and len(self.quantisers) == 1:
            node = next((n for n in self.work if n.outputs[0] == self.result), None)
            source = node.inputs[0] if node is not None else ""
            inside = next((n for n in self.work if n.outputs and n.outputs[0] == source), None)
            if node is None or inside is None or not self._moves_alone(node) or node.op_type == "Concat":
                break
            if sum(name == source for n in self.work for name in n.inputs) > 1:
                break
            name = self._outputs()[0]
            found.insert(0, self._link(node, (Operand(source, self._out()),), Operand(name, self._out())))
            self.made = self.result = source
            self.work.remove(node)
        return found

    def _moves_alone(self, node: Node) -> bool:
        return node.op_type in (*MOVES, "MaxPool") and node.op_type != "Split" and len(node.outputs) == 1

    def _moved_inputs(self, node: Node) -> tuple[str, ...]:
        return node.inputs if node.op_type == "Concat" else node.inputs[:1]

    def _link(self, node: Node, operands: tuple[Operand, ...], made: Operand) -> Op:
        if node.op_type == "MaxPool":
            return self._window(node, (made.name,), operands[0], Clamp(), made.codes)
        return Move(node.op_type, (made.name,), operands, node.attributes, self._constants(node), (made.codes,))

    # -- operands ------------------------------------------------------------------------------------------------------

    def _codes(self, quantisation: Quantisation | None, name: str) -> Codes:
        if quantisation is None:
            raise CannotLowerError(f"{name} is a float")
        bits = BITS.get(quantisation.dtype.name)
        if bits is None:
            raise CannotLowerError(f"{name} has {quantisation.dtype.name} codes; the NPU has 8 and 16 bits")
        if quantisation.scale.size != 1:
            raise CannotLowerError(f"activation {name} is quantised per channel")
        scale = float(quantisation.scale.ravel()[0])
        return Codes(scale, int(quantisation.zero_point.ravel()[0]), quantisation.dtype.name.startswith("int"), bits)

    def _constant(self, name: str) -> tuple[Array, Quantisation] | None:
        """Codes and quantisation of a constant that goes through a DequantizeLinear."""
        producer = self.graph.producer.get(name)
        if producer is None or producer.op_type not in DEQUANTIZE or name not in self.graph.constant_values:
            return None
        quantisation = self.graph.parameters(producer)
        if quantisation is None or "block_size" in producer.attributes:
            return None
        codes = self.graph.constants.get(producer.inputs[0])
        if codes is None:
            codes = self._folded(producer.inputs[0])
        if codes is not None and not producer.inputs[2:3] and codes.dtype == np.int32:
            quantisation = Quantisation(
                quantisation.scale, np.zeros(quantisation.scale.shape, np.int32), quantisation.axis
            )
        return None if codes is None else (codes, quantisation)

    def _folded(self, name: str) -> Array | None:
        """Codes of a float initializer that goes through a QuantizeLinear (models trained with fake quantisation)."""
        producer = self.graph.producer.get(name)
        if producer is None or producer.op_type not in QUANTIZE:
            return None
        source, quantisation = self.graph.constants.get(producer.inputs[0]), self.graph.parameters(producer)
        if source is None or quantisation is None:
            return None
        shape = [1] * source.ndim
        if quantisation.per_channel:
            shape[quantisation.axis or 0] = -1
        scale = quantisation.scale.reshape(shape) if quantisation.per_channel else quantisation.scale.reshape(())
        zero = quantisation.zero_point.astype(np.int64).reshape(scale.shape)
        limits = np.iinfo(quantisation.dtype)
        return np.clip(np.rint(source / scale) + zero, limits.min, limits.max).astype(quantisation.dtype)

    def _operand(self, name: str) -> Operand | None:
        """A quantised input of this step, or None (a float constant, a value made inside)."""
        if name in self.hidden:
            return self.hidden[name]
        constant = self._constant(name)
        if constant is not None:
            return Operand("", self._codes(constant[1], name), constant[0])
        stored = self.graph.alias_of.get(name)
        producer = self.graph.producer.get(name)
        if stored is None or producer is None or producer.op_type not in DEQUANTIZE:
            return None
        return Operand(stored, self._codes(self.graph.parameters(producer), stored))

    def _needed(self, name: str) -> Operand:
        found = self._operand(name)
        if found is None:
            raise CannotLowerError(f"{name} is a float")
        return found

    def _quantised_operands(self, node: Node) -> int:
        return sum(self._operand(name) is not None for name in node.inputs)

    def _out(self) -> Codes:
        if len(self.quantisers) != 1:
            raise CannotLowerError("its result is quantised twice")
        return self._quantised_by(self.quantisers[0])

    def _quantised_by(self, node: Node) -> Codes:
        return self._codes(self.graph.parameters(node), node.outputs[0])

    def _clamp(self, rest: Sequence[Node], made: str) -> Clamp:
        """Real bounds of the Relu and Clip that follow; anything else stays float."""
        low, high = -np.inf, np.inf
        for node in rest:
            if node.inputs[0] != made or node.op_type not in ("Relu", "Clip"):
                raise CannotLowerError(f"{self.step.op_type} has no integer kernel as one step")
            bounds = (0.0, np.inf) if node.op_type == "Relu" else self._bounds(node)
            low, high = min(max(low, bounds[0]), bounds[1]), max(min(high, bounds[1]), bounds[0])
            made = node.outputs[0]
        if self.quantisers and self.result != made:
            raise CannotLowerError(f"{self.step.op_type} has no integer kernel as one step")
        return Clamp(float(low), float(high))

    def _activation(self, rest: Sequence[Node], made: str) -> tuple[Clamp, float]:
        """What follows a sum: Relu and Clip as bounds, or one LeakyRelu as the slope below zero."""
        if len(rest) == 1 and rest[0].op_type == "LeakyRelu" and rest[0].inputs[0] == made:
            slope = float(np.float32(rest[0].attributes.get("alpha", 0.01)))
            if slope <= 0:
                raise CannotLowerError("LeakyRelu with a slope that is not positive, as one step with its sum")
            return self._clamp((), rest[0].outputs[0]), slope
        return self._clamp(rest, made), 1.0

    def _bounds(self, node: Node) -> tuple[float, float]:
        if "min" in node.attributes or "max" in node.attributes:
            return float(node.attributes.get("min", -np.inf)), float(node.attributes.get("max", np.inf))
        found = [-np.inf, np.inf]
        for k in (0, 1):
            name = node.inputs[k + 1] if len(node.inputs) > k + 1 else ""
            if name:
                bound = islands.constant(self.graph, name)
                if bound is None or bound.size != 1:
                    raise CannotLowerError("Clip with bounds that are not constant")
                found[k] = float(bound.ravel()[0])
        return found[0], found[1]

    def _outputs(self) -> tuple[str, ...]:
        """The one value an operator makes: its Q's output (or what stands in for it), or a code-moving node's own."""
        if self.made:
            return (self.made,)
        return (self.quantisers[0].outputs[0] if self.quantisers else self.work[0].outputs[0],)

    # -- operators -----------------------------------------------------------------------------------------------------

    def _only_quantises(self) -> Op:
        if len(self.quantisers) != 1:
            raise CannotLowerError("its result is quantised twice")
        node = self.quantisers[0]
        out, operand = self._quantised_by(node), self._operand(node.inputs[0])
        if operand is not None:
            return Table("QuantizeLinear", self._outputs(), operand, (), (node.inputs[0],), node.inputs[0], {}, out)
        if self.graph.store(node.inputs[0]) is None:
            raise CannotLowerError(f"{node.inputs[0]} is not a stored value")
        return Quantise("QuantizeLinear", self._outputs(), self.graph.store(node.inputs[0]) or "", out)

    def _on_codes(self) -> Op:
        """One node that works on stored codes without any DQ (or a float operator, which is refused)."""
        node = self.work[0]
        stored = self.graph.store(node.inputs[0]) if node.inputs and node.inputs[0] else None
        quantisation = self.graph.quantisation.get(stored or "")
        if len(self.work) > 1 or stored != node.inputs[0] or quantisation is None:
            raise CannotLowerError("its result is a float")
        codes = self._codes(quantisation, node.inputs[0])
        if node.op_type == "MaxPool":
            return self._window(node, node.outputs[:1], Operand(node.inputs[0], codes), Clamp(), codes)
        if node.op_type not in MOVES or any(self.graph.store(n) for n in node.inputs[1:] if node.op_type != "Concat"):
            raise CannotLowerError(f"{node.op_type} has no integer kernel")
        names = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        inputs = tuple(Operand(name, self._codes(self.graph.quantisation.get(name), name)) for name in names)
        if any(operand.codes != codes for operand in inputs):
            raise CannotLowerError("codes of different scales are joined without a rescale")
        return Move(
            node.op_type, node.outputs, inputs, node.attributes, self._constants(node), (None,) * len(node.outputs)
        )

    def _constants(self, node: Node) -> dict[int, Array]:
        first = len(node.inputs) if node.op_type == "Concat" else 1
        found: dict[int, Array] = {}
        for k, name in enumerate(node.inputs):
            if k < first or not name:
                continue
            value = islands.constant(self.graph, name)
            if value is None:
                raise CannotLowerError(f"{node.op_type} with {name} known only at run time")
            found[k] = value
        return found

    def _move(self, node: Node) -> Op:
        names = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        inputs = tuple(self._needed(name) for name in names)
        by_float = {q.inputs[0]: q for q in self.quantisers}
        order = [by_float.get(name) for name in node.outputs]
        if any(q is None for q in order) or len(self.quantisers) != len(order):
            raise CannotLowerError("its result is quantised twice, or not everywhere")
        out = tuple(self._quantised_by(q) for q in order if q is not None)
        outputs = self._outputs() if len(order) == 1 else tuple(q.outputs[0] for q in order if q is not None)
        return Move(node.op_type, outputs, inputs, node.attributes, self._constants(node), out)

    def _convolution(self, node: Node) -> Op:
        x = self._needed(node.inputs[0])
        transposed = node.op_type == "ConvTranspose"
        weight, scale = self._weight(node.inputs[1], 1 if transposed else 0)
        if not isinstance(weight, np.ndarray):
            raise CannotLowerError("Conv with weights known only at run time")
        if not 3 <= weight.ndim <= 5:
            raise CannotLowerError(f"{node.op_type} over {weight.ndim - 2} axes")
        group = int(node.attributes.get("group", 1))
        if transposed and group > 1 and scale.size > 1:
            raise CannotLowerError("grouped ConvTranspose with weights quantised per channel")
        bias, bias_scale = self._bias(node.inputs[2] if len(node.inputs) > 2 else "")
        clamp, slope = self._activation(self.work[1:], node.outputs[0])
        return Accumulate(
            node.op_type,
            self._outputs(),
            x,
            weight,
            scale,
            bias,
            bias_scale,
            node.attributes,
            clamp,
            self._out(),
            slope,
        )

    def _weight(self, name: str, channel_axis: int) -> tuple[Array | Operand, Array]:
        """Weights with their zero point taken off (int64), or a run-time operand; and their scale (float64)."""
        constant = self._constant(name)
        if constant is None:
            producer = self.graph.producer.get(name)
            if producer is not None and "block_size" in producer.attributes:
                raise CannotLowerError(f"weights {name} are quantised in blocks")
            operand = self._needed(name)
            return operand, np.asarray(operand.codes.scale, np.float64)
        codes, quantisation = constant
        if quantisation.dtype.name not in WEIGHTS:
            raise CannotLowerError(f"weights {name} have {quantisation.dtype.name} codes")
        scale, zero = quantisation.along(codes.ndim)
        if quantisation.per_channel and (quantisation.axis or 0) % codes.ndim != channel_axis % codes.ndim:
            raise CannotLowerError(f"weights {name} are quantised along axis {quantisation.axis}")
        return codes.astype(np.int64) - zero, scale.reshape(-1) if quantisation.per_channel else scale.reshape(())

    def _bias(self, name: str) -> tuple[Array | None, Array]:
        if not name:
            return None, np.asarray(1.0)
        constant = self._constant(name)
        if constant is None:
            raise CannotLowerError("a bias that is not int32 codes")
        codes, quantisation = constant
        flat = codes.reshape(-1).astype(np.int64) - quantisation.zero_point.astype(np.int64).reshape(-1)
        scale = quantisation.scale.astype(np.float64).reshape(-1)
        return flat, scale if scale.size > 1 else scale.reshape(())

    def _gemm(self, node: Node) -> Op:
        attributes = node.attributes
        if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
            raise CannotLowerError("Gemm with transA, alpha or beta")
        transposed = bool(attributes.get("transB", 0))
        weight, scale = self._weight(node.inputs[1], 0 if transposed else 1)
        if not isinstance(weight, np.ndarray):
            raise CannotLowerError("Gemm with weights known only at run time")
        bias, bias_scale = self._bias(node.inputs[2] if len(node.inputs) > 2 else "")
        return self._product(
            node, weight.T if transposed else weight, scale, bias, bias_scale, self.work[1:], node.outputs[0]
        )

    def _matmul(self, node: Node) -> Op:
        weight, scale = self._weight(node.inputs[1], -1)
        rest, made = self.work[1:], node.outputs[0]
        bias, bias_scale = self._bias("")
        if rest and rest[0].op_type == "Add" and made in rest[0].inputs:
            (other,) = [name for name in rest[0].inputs if name != made] or [""]
            bias, bias_scale = self._bias(other)
            if isinstance(weight, np.ndarray) and weight.ndim != 2:
                raise CannotLowerError("MatMul of more than two axes with a bias")
            rest, made = rest[1:], rest[0].outputs[0]
        return self._product(node, weight, scale, bias, bias_scale, rest, made)

    def _product(
        self, node: Node, weight: Array | Operand, scale: Array, bias: Array | None, bias_scale: Array,
        rest: Sequence[Node], made: str,
    ) -> Op:  # fmt: skip
        columns = weight.shape[-1] if isinstance(weight, np.ndarray) and weight.ndim > 1 else 1
        if bias is not None and bias.size not in (1, columns):
            raise CannotLowerError("a bias that is not one number a column")
        if scale.size not in (1, columns):
            raise CannotLowerError("weights with a scale that is not one a column")
        clamp, slope = self._activation(rest, made)
        x = self._needed(node.inputs[0])
        return Accumulate(
            node.op_type, self._outputs(), x, weight, scale, bias, bias_scale, {}, clamp, self._out(), slope
        )

    def _binary(self, node: Node) -> Op:
        a, b = (self._needed(name) for name in node.inputs)
        clamp = self._clamp(self.work[1:], node.outputs[0])
        return Binary(node.op_type, self._outputs(), a, b, clamp, self._out())

    def _pool(self, node: Node) -> Op:
        if len([name for name in node.outputs if name]) > 1:
            raise CannotLowerError("MaxPool with indices")
        clamp = self._clamp(self.work[1:], node.outputs[0])
        return self._window(node, self._outputs(), self._needed(node.inputs[0]), clamp, self._out())

    def _window(self, node: Node, outputs: tuple[str, ...], x: Operand, clamp: Clamp, out: Codes) -> Pool:
        if node.attributes.get("storage_order", 0):
            raise CannotLowerError("MaxPool in column-major order")
        return pool_of(node, outputs, x, clamp, out)

    def _mean(self, node: Node) -> Op:
        axes, keepdims = self._reduced(node)
        clamp = self._clamp(self.work[1:], node.outputs[0])
        return Mean(node.op_type, self._outputs(), self._needed(node.inputs[0]), axes, keepdims, clamp, self._out())

    def _reduce(self, node: Node) -> Op:
        axes, keepdims = self._reduced(node)
        clamp = self._clamp(self.work[1:], node.outputs[0])
        return Reduce(node.op_type, self._outputs(), self._needed(node.inputs[0]), axes, keepdims, clamp, self._out())

    def _reduced(self, node: Node) -> tuple[tuple[int, ...] | None, bool]:
        """The axes (None: all behind the channel; empty: all) and whether they are kept."""
        if node.op_type.startswith("Global"):
            return None, True
        given = node.attributes.get("axes")
        if len(node.inputs) > 1 and node.inputs[1]:
            given = islands.constant(self.graph, node.inputs[1])
            if given is None:
                raise CannotLowerError(f"{node.op_type} over axes that are not constant")
        axes = () if given is None else tuple(int(a) for a in np.asarray(given).ravel())
        if not axes and node.attributes.get("noop_with_empty_axes", 0):
            raise CannotLowerError(f"{node.op_type} over no axis")
        return axes, bool(node.attributes.get("keepdims", 1))

    def _resize(self, node: Node) -> Op:
        attributes = node.attributes
        mode = str(attributes.get("mode", "nearest"))
        coordinates = str(attributes.get("coordinate_transformation_mode", "half_pixel"))
        rounding = str(attributes.get("nearest_mode", "round_prefer_floor"))
        if len(self.work) > 1:
            raise CannotLowerError(f"{self.step.op_type} has no integer kernel as one step")
        if mode not in ("nearest", "linear") or coordinates not in COORDINATES or rounding not in NEAREST:
            raise CannotLowerError(f"Resize with mode {mode}, {coordinates}, {rounding} has no integer kernel")
        if attributes.get("antialias", 0):
            raise CannotLowerError("Resize with antialias has no integer kernel")
        if attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise CannotLowerError("Resize that keeps the aspect ratio has no integer kernel")
        roi, factors, sizes = (self._listed(node, k) for k in (1, 2, 3))
        given = sizes if sizes is not None else factors
        if given is None:
            raise CannotLowerError("Resize to a size known only at run time")
        axes = tuple(int(a) for a in attributes.get("axes", range(len(given))))
        crops = coordinates == "tf_crop_and_resize"
        return Resize(
            "Resize",
            self._outputs(),
            self._needed(node.inputs[0]),
            mode,
            coordinates,
            rounding,
            axes,
            None if sizes is None else tuple(int(v) for v in sizes),
            None if sizes is not None or factors is None else tuple(float(v) for v in factors),
            tuple(float(v) for v in roi) if crops and roi is not None else None,
            float(attributes.get("extrapolation_value", 0.0)),
            self._out(),
        )

    def _listed(self, node: Node, position: int) -> Array | None:
        """A constant list input, or None where it is left out or empty."""
        name = node.inputs[position] if len(node.inputs) > position else ""
        found = islands.constant(self.graph, name) if name else None
        if name and found is None:
            raise CannotLowerError(f"{node.op_type} with {name} known only at run time")
        return None if found is None or found.size == 0 else found.ravel()

    def _softmax(self, node: Node) -> Op:
        if len(self.work) > 1:
            raise CannotLowerError(f"{self.step.op_type} has no integer kernel as one step")
        flat = bool(node.attributes.get("flat", False))
        axis = int(node.attributes.get("axis", -1))
        return Softmax("Softmax", self._outputs(), self._needed(node.inputs[0]), axis, flat, self._out())

    def _table(self) -> Op:
        out = self._out()
        sources: dict[str, Operand] = {}
        constants: dict[str, Array] = {}
        made: set[str] = set()
        for node in self.work:
            if node.op_type not in islands.OPERATORS:
                raise CannotLowerError(f"{node.op_type} has no integer kernel")
            for name in filter(None, node.inputs):
                if name not in made:
                    self._table_input(node, name, sources, constants)
            made.update(node.outputs)
        names = {operand.name for operand in sources.values()}
        quantisations = {operand.codes for operand in sources.values()}
        if len(names) != 1 or len(quantisations) != 1:
            raise CannotLowerError(f"{self.step.op_type} reads {len(names)} quantised values; it has no integer kernel")
        operand = next(iter(sources.values()))
        return Table(
            self._kind(), self._outputs(), operand, tuple(self.work), tuple(sources), self.result, constants, out
        )

    def _kind(self) -> str:
        return "+".join(dict.fromkeys(node.op_type for node in self.work))

    def _island(self) -> Op | None:
        """The work in floats, where all of it has formulas; None else."""
        if len(self.quantisers) != 1 or not all(islands.known(node.op_type) for node in self.work):
            return None
        if any(node.op_type == "MatMul" for node in self.work) and len(self.work) == 1:
            return None
        sources: dict[str, Operand] = {}
        constants: dict[str, Array] = {}
        made: set[str] = set()
        for node in self.work:
            for name in filter(None, node.inputs):
                if name in made:
                    continue
                operand = self._operand(name) if name not in self.graph.constant_values else None
                constant = islands.constant(self.graph, name) if operand is None else None
                if operand is not None:
                    sources[name] = operand
                elif constant is not None:
                    constants[name] = constant
                else:
                    return None
            made.update(node.outputs)
        if not sources or self.result not in made:
            return None
        return Island(self._kind(), self._outputs(), sources, tuple(self.work), self.result, constants, self._out())

    def _table_input(self, node: Node, name: str, sources: dict[str, Operand], constants: dict[str, Array]) -> None:
        operand = self._operand(name)
        if operand is not None and operand.constant is None:
            sources[name] = operand
            return
        constant = islands.constant(self.graph, name)
        if constant is None:
            raise CannotLowerError(f"{node.op_type} reads a float")
        if constant.size != 1:
            raise CannotLowerError(f"{node.op_type} with a constant of {constant.size} elements has no integer kernel")
        constants[name] = constant
