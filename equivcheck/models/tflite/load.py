"""Reads a .tflite file: its first subgraph as tensors and operators, and the model that the rest of equivcheck works on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from equivcheck.errors import ModelError
from equivcheck.models.graph import DEQUANTIZE, QUANTIZE, Array, Graph, Node, Quantisation, Step
from equivcheck.models.onnx.cut import fresh
from equivcheck.models.onnx.load import OnnxModel, graph_of
from equivcheck.models.onnx.rewrite import QdqForm
from equivcheck.models.tflite.schema import IDENTIFIER, OPERATORS, OPTIONS, TENSOR_TYPES, Reader

_ORDERING = ("Transpose", "Reshape")
_CODES = ("int8", "uint8", "int16", "int32", "int64", "int4", "uint4", "int2")


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of the file. `name` is unique; `constant` holds the numbers of weights (int4 codes as int8)."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    quantisation: Quantisation | None = None
    constant: Array | None = None
    variable: bool = False
    sparse: bool = False

    @property
    def numpy_dtype(self) -> np.dtype[Any] | None:
        """What numpy holds it as; None where numpy has no such type."""
        try:
            return np.dtype({"int4": "int8", "uint4": "uint8", "int2": "int8"}.get(self.dtype, self.dtype))
        except TypeError:
            return None


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """An operator of the file: `kind` as TFLite spells it (CONV_2D); inputs of -1 are left out."""

    index: int
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What reports and selectors call it: TFLite operators have no names, only a place."""
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, eq=False)
class Flatbuffer:
    """A .tflite file, and what its first subgraph holds; the others belong to operators that are not supported."""

    content: bytes
    tensors: Sequence[Tensor]
    operators: Sequence[Operator]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    version: int
    description: str

    @cached_property
    def producer(self) -> dict[int, Operator]:
        """Tensor index -> the operator that makes it."""
        return {out: operator for operator in self.operators for out in operator.outputs}

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Tensor name -> its index."""
        return {tensor.name: tensor.index for tensor in self.tensors}


@dataclass(frozen=True, eq=False)
class TfliteModel(OnnxModel):
    """A TFLite model. `proto` is a QDQ ONNX model that says what `source` means (see `view`), its `sha256` that of the file.

    `origins` gives, for each node of `proto`, the operator it was written for; `images` are the tensors that stand in NCHW.
    """

    source: Flatbuffer | None = None
    origins: tuple[int, ...] = ()
    images: frozenset[int] = frozenset()

    format = "tflite"

    @cached_property
    def qdq(self) -> QdqForm:
        return QdqForm(self.proto, self.origins)

    @cached_property
    def graph(self) -> Graph:
        folder = Path(self.path).parent
        return graph_of(self.qdq, self.proto, folder, originals=originals(self.flatbuffer), kind=ViewGraph)

    @property
    def ir_version(self) -> int:
        """The version of the file's schema."""
        return self.flatbuffer.version

    @property
    def opsets(self) -> dict[str, int]:
        return {}

    @property
    def producer(self) -> str:
        return self.flatbuffer.description

    @property
    def flatbuffer(self) -> Flatbuffer:
        assert self.source is not None
        return self.source

    def with_input_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """This model: the shapes of a .tflite file are fixed."""
        return self


class ViewGraph(Graph):
    """The graph of a view: the Transposes and Reshapes that only bring an operator's inputs and outputs into order are no
    work of its step, and what they make of a dequantised value stands for the same stored value.
    """

    @cached_property
    def alias_of(self) -> dict[str, str]:
        found = dict(super().alias_of)
        for node in self.nodes:
            stored = self._dequantised(node.inputs[0]) if node.op_type in _ORDERING else None
            if stored is not None:
                found.setdefault(node.outputs[0], stored)
        return found

    def _dequantised(self, name: str) -> str | None:
        """The stored value that a DequantizeLinear makes `name` of."""
        source = self.producer.get(name)
        moving = source is not None and source.op_type in DEQUANTIZE and source.inputs[0] not in self.constants
        return source.inputs[0] if source is not None and moving else None

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._without_ordering(step) for step in super().steps)

    def _without_ordering(self, step: Step) -> Step:
        work = [k for k in step.nodes if self.nodes[k].op_type not in (*_ORDERING, *QUANTIZE)]
        if not work and self.main_node(step).op_type != "QUANTIZE":  # RESHAPE and the like: ordering is its work
            return step
        work = work or [k for k in step.nodes if self.nodes[k].op_type in QUANTIZE]
        main = step.main if step.main in work else work[-1]
        return replace(step, ops=tuple(self.nodes[k].op_type for k in work), main=main)


def tflite_from_bytes(content: bytes, path: str) -> TfliteModel:
    """Parse a .tflite file; `path` names it in messages.

    Raises ModelError when it breaks off, UnsupportedModel where an operator has no meaning here (with its name).
    """
    from equivcheck.models.tflite.view import view

    source = read_flatbuffer(content, path)
    seen = view(source, path)
    digest = hashlib.sha256(content).hexdigest()
    return TfliteModel(path, digest, seen.proto, source=source, origins=seen.origins, images=seen.images)


def read_flatbuffer(content: bytes, path: str) -> Flatbuffer:
    """Return what a .tflite file holds. Raises ModelError when it is none, or breaks off."""
    if content[4:8] != IDENTIFIER:
        raise ModelError(f"{path} is not a TFLite model", hint="give a .tflite file")
    try:
        return _read(content)
    except (struct.error, IndexError, ValueError, OverflowError, TypeError) as error:
        raise ModelError(
            f"{path} is not a TFLite model, or it breaks off ({len(content)} bytes)", hint="is the download complete?"
        ) from error


def _read(content: bytes) -> Flatbuffer:
    model = Reader.root(content)
    graph = model.tables("subgraphs", "SubGraph")[0]
    buffers = model.tables("buffers", "Buffer")
    taken: set[str] = set()
    tensors: list[Tensor] = []
    for index, table in enumerate(graph.tables("tensors", "Tensor")):
        name = fresh(table.text("name") or f"tensor_{index}", taken)
        taken.add(name)
        tensors.append(_tensor(index, name, table, buffers))
    kinds = [_kind(code) for code in model.tables("operator_codes", "OperatorCode")]
    return Flatbuffer(
        content=content,
        tensors=tensors,
        operators=[_operator(k, table, kinds) for k, table in enumerate(graph.tables("operators", "Operator"))],
        inputs=_indices(graph, "inputs"),
        outputs=_indices(graph, "outputs"),
        version=int(model.number("version")),
        description=model.text("description"),
    )


def _indices(table: Reader, name: str) -> tuple[int, ...]:
    found = table.vector(name)
    return () if found is None else tuple(int(k) for k in found)


def _kind(code: Reader) -> str:
    """The operator's name. Codes above 126 have a wider field since schema 3a; the larger of the two counts."""
    number = max(int(code.number("builtin_code")), int(code.number("deprecated_builtin_code")))
    kind = OPERATORS[number] if 0 <= number < len(OPERATORS) else f"OPERATOR_{number}"
    return f"CUSTOM {code.text('custom_code')}" if kind == "CUSTOM" else kind


def _operator(index: int, table: Reader, kinds: Sequence[str]) -> Operator:
    name = OPTIONS.get(int(table.number("builtin_options_type")))
    options = table.table("builtin_options", name) if name else None
    return Operator(
        index=index,
        kind=kinds[int(table.number("opcode_index"))],
        inputs=_indices(table, "inputs"),
        outputs=_indices(table, "outputs"),
        options={} if options is None else options.values(),
    )


def _tensor(index: int, name: str, table: Reader, buffers: Sequence[Reader]) -> Tensor:
    number = int(table.number("type"))
    dtype = TENSOR_TYPES[number] if number < len(TENSOR_TYPES) else f"type_{number}"
    made = Tensor(
        index=index,
        name=name,
        dtype=dtype,
        shape=_indices(table, "shape"),
        variable=bool(table.number("is_variable")),
        sparse=table.has("sparsity"),
    )
    constant = None if made.sparse else _constant(made, buffers[int(table.number("buffer"))])
    return replace(made, quantisation=_quantisation(made, table), constant=constant)


def _quantisation(tensor: Tensor, table: Reader) -> Quantisation | None:
    parameters = table.table("quantization", "QuantizationParameters")
    scale = None if parameters is None else parameters.vector("scale")
    codes = tensor.numpy_dtype
    if parameters is None or scale is None or not scale.size or tensor.dtype not in _CODES or codes is None:
        return None
    zero = parameters.vector("zero_point")
    zero = np.zeros(scale.size, codes) if zero is None or not zero.size else zero.astype(codes)
    if scale.size == 1:
        return Quantisation(scale.reshape(()), zero[:1].reshape(()))
    zero = np.broadcast_to(zero, scale.shape)  # some converters write one zero point for all channels
    return Quantisation(scale, zero, int(parameters.number("quantized_dimension")))


def _constant(tensor: Tensor, buffer: Reader) -> Array | None:
    stored = buffer.vector("data")
    if stored is None and buffer.number("offset") > 1:
        start = int(buffer.number("offset"))
        stored = np.frombuffer(buffer.content, np.uint8, int(buffer.number("size")), start)
    dtype = tensor.numpy_dtype
    if stored is None or not stored.size or dtype is None:
        return None
    if tensor.dtype in ("int4", "uint4"):
        return _nibbles(stored, tensor)
    return stored.view(dtype).reshape(tensor.shape)


def _nibbles(stored: Array, tensor: Tensor) -> Array:
    """Two codes a byte, the first in the lower half."""
    halves = np.stack([stored & 15, stored >> 4], axis=-1).reshape(-1)[: int(np.prod(tensor.shape))]
    signed = ((halves ^ 8).astype(np.int8) - 8) if tensor.dtype == "int4" else halves
    return signed.reshape(tensor.shape)


def originals(source: Flatbuffer) -> list[Node]:
    """The operators as nodes: what selectors and reports speak of."""

    def names(indices: Sequence[int]) -> tuple[str, ...]:
        return tuple(source.tensors[k].name if k >= 0 else "" for k in indices)

    return [
        Node(
            index=operator.index,
            name=operator.name,
            op_type=operator.kind,
            domain="",
            inputs=names(operator.inputs),
            outputs=names(operator.outputs),
            attributes=operator.options,
        )
        for operator in source.operators
    ]
