"""Writes a .tflite file of one subgraph: tensors and operators, packed into the flatbuffer that TFLite reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import flatbuffers
import numpy as np

from equivcheck.models.graph import Array
from equivcheck.models.tflite.schema import CODES, IDENTIFIER, OPTION_NUMBERS, TABLES, TENSOR_TYPES, Field

SCHEMA_VERSION: Final = 3
DATA_ALIGNMENT: Final = 16  # `force_align: 16` of Buffer.data
LARGEST_DEPRECATED_CODE: Final = 127  # greater operator codes are in `builtin_code` alone
METADATA: Final = {"name": Field(0, "string"), "buffer": Field(1, "uint")}

# operator -> (version whose contract covers 8-bit codes, options table). No table: its kernel reads none.
OPERATORS: Final[Mapping[str, tuple[int, str]]] = {
    "ADD": (2, "AddOptions"),
    "AVERAGE_POOL_2D": (2, "Pool2DOptions"),
    "BATCH_MATMUL": (2, "BatchMatMulOptions"),
    "CAST": (1, ""),
    "CONCATENATION": (2, "ConcatenationOptions"),
    "CONV_2D": (3, "Conv2DOptions"),
    "DEPTHWISE_CONV_2D": (3, "DepthwiseConv2DOptions"),
    "DEPTH_TO_SPACE": (1, "DepthToSpaceOptions"),
    "DEQUANTIZE": (2, ""),
    "EXP": (2, ""),
    "FULLY_CONNECTED": (4, "FullyConnectedOptions"),
    "GATHER": (2, "GatherOptions"),
    "GELU": (2, "GeluOptions"),
    "HARD_SWISH": (1, ""),
    "LEAKY_RELU": (2, "LeakyReluOptions"),
    "LOGISTIC": (2, ""),
    "MAXIMUM": (2, ""),
    "MAX_POOL_2D": (2, "Pool2DOptions"),
    "MEAN": (2, "ReducerOptions"),
    "MINIMUM": (2, ""),
    "MUL": (2, "MulOptions"),
    "PAD": (2, ""),
    "PADV2": (2, ""),
    "PRELU": (1, ""),
    "QUANTIZE": (2, ""),
    "REDUCE_MAX": (2, "ReducerOptions"),
    "REDUCE_MIN": (2, "ReducerOptions"),
    "RELU": (2, ""),
    "RELU6": (2, ""),
    "RELU_N1_TO_1": (1, ""),
    "RESHAPE": (1, "ReshapeOptions"),
    "RESIZE_BILINEAR": (3, "ResizeBilinearOptions"),
    "RESIZE_NEAREST_NEIGHBOR": (3, "ResizeNearestNeighborOptions"),
    "SLICE": (2, ""),
    "SOFTMAX": (2, "SoftmaxOptions"),
    "SPACE_TO_DEPTH": (2, "SpaceToDepthOptions"),
    "SUB": (3, "SubOptions"),
    "TANH": (2, ""),
    "TILE": (3, ""),
    "TRANSPOSE": (2, ""),
    "TRANSPOSE_CONV": (3, "TransposeConvOptions"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor of the file. `scale` (float32) and `zero` have one entry, or one a slice along `axis`; None: no codes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: Array | None = None
    zero: Array | None = None
    axis: int = 0
    constant: Array | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator: `inputs` and `outputs` are indices of tensors, `options` fields of its options table.

    `version` is that of OPERATORS, unless what it does needs a later one: an engine that is too old then refuses to load.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0


def write_model(
    tensors: Sequence[Tensor],
    operators: Sequence[Operator],
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    description: str,
    metadata: Mapping[str, bytes],
) -> bytes:
    """Return the .tflite file. `metadata` entries are kept under their names; engines ignore those they do not know."""
    return _Packer().pack(tensors, operators, inputs, outputs, description, metadata)


class _Packer:
    """Flatbuffers are built from the leaves up: whatever a table points to is made before it."""

    def __init__(self) -> None:
        self.builder = flatbuffers.Builder(1 << 16)
        self.buffers: list[int] = [self._table(TABLES["Buffer"], {})]  # buffer 0 is the empty one, by convention

    def pack(
        self,
        tensors: Sequence[Tensor],
        operators: Sequence[Operator],
        inputs: Sequence[int],
        outputs: Sequence[int],
        description: str,
        metadata: Mapping[str, bytes],
    ) -> bytes:
        codes: dict[tuple[str, int], int] = {}
        subgraph = {
            "tensors": [self._tensor(tensor) for tensor in tensors],
            "inputs": inputs,
            "outputs": outputs,
            "operators": [self._operator(operator, codes) for operator in operators],
            "name": "main",
        }
        model = {
            "version": SCHEMA_VERSION,
            "operator_codes": [self._code(kind, version) for kind, version in codes],
            "subgraphs": [self._table(TABLES["SubGraph"], subgraph)],
            "description": description,
            "metadata": [
                self._table(METADATA, {"name": name, "buffer": self._buffer(content)})
                for name, content in metadata.items()
            ],
            "buffers": self.buffers,
        }
        self.builder.Finish(self._table(TABLES["Model"], model), IDENTIFIER)
        return bytes(self.builder.Output())

    def _tensor(self, tensor: Tensor) -> int:
        fields: dict[str, Any] = {
            "shape": tensor.shape,
            "type": TENSOR_TYPES.index(tensor.dtype),
            "name": tensor.name,
            "has_rank": True,
        }
        if tensor.constant is not None:
            fields["buffer"] = self._buffer(np.ascontiguousarray(tensor.constant).tobytes())
        if tensor.scale is not None and tensor.zero is not None:
            codes = {
                "scale": tensor.scale.ravel().tolist(),
                "zero_point": tensor.zero.ravel().tolist(),
                "quantized_dimension": tensor.axis,
            }
            fields["quantization"] = self._table(TABLES["QuantizationParameters"], codes)
        return self._table(TABLES["Tensor"], fields)

    def _operator(self, operator: Operator, codes: dict[tuple[str, int], int]) -> int:
        version, options = OPERATORS[operator.kind]
        fields: dict[str, Any] = {
            "opcode_index": codes.setdefault((operator.kind, operator.version or version), len(codes)),
            "inputs": operator.inputs,
            "outputs": operator.outputs,
        }
        if options:
            fields["builtin_options_type"] = OPTION_NUMBERS[options]
            fields["builtin_options"] = self._table(TABLES[options], operator.options)
        return self._table(TABLES["Operator"], fields)

    def _code(self, kind: str, version: int) -> int:
        code = CODES[kind]
        fields = {
            "deprecated_builtin_code": min(code, LARGEST_DEPRECATED_CODE),
            "version": version,
            "builtin_code": code,
        }
        return self._table(TABLES["OperatorCode"], fields)

    def _buffer(self, content: bytes) -> int:
        self.builder.StartVector(1, len(content), DATA_ALIGNMENT)
        self.builder.head -= len(content)
        self.builder.Bytes[self.builder.head : self.builder.head + len(content)] = content
        self.buffers.append(self._table(TABLES["Buffer"], {"data": self.builder.EndVector()}))
        return len(self.buffers) - 1

    def _table(self, declared: Mapping[str, Field], values: Mapping[str, Any]) -> int:
        """Write a table. Numbers are written as such, vectors and texts made; an int for a table is its offset."""
        ready = {name: self._made(declared[name], value) for name, value in values.items()}
        self.builder.StartObject(1 + max(entry.number for entry in declared.values()))
        for name, value in ready.items():
            entry = declared[name]
            if entry.kind in _SCALARS:
                getattr(self.builder, f"Prepend{_SCALARS[entry.kind]}Slot")(entry.number, value, entry.default)
            else:
                self.builder.PrependUOffsetTRelativeSlot(entry.number, value, 0)
        return int(self.builder.EndObject())

    def _made(self, entry: Field, value: Any) -> Any:
        if entry.kind == "string":
            return self.builder.CreateString(value)
        if entry.kind == "ubyte[]" or not entry.kind.endswith("[]"):
            return value
        size, prepend = _VECTORS[entry.kind.removesuffix("[]")]
        return self._vector(list(value), size, getattr(self.builder, f"Prepend{prepend}"))

    def _vector(self, values: Sequence[Any], size: int, prepend: Callable[[Any], None]) -> int:
        self.builder.StartVector(size, len(values), size)
        for value in reversed(values):
            prepend(value)
        return int(self.builder.EndVector())


_SCALARS: Final = {
    "bool": "Bool",
    "byte": "Int8",
    "ubyte": "Uint8",
    "int": "Int32",
    "uint": "Uint32",
    "float": "Float32",
}
_VECTORS: Final = {
    "int": (4, "Int32"),
    "long": (8, "Int64"),
    "float": (4, "Float32"),
    "table": (4, "UOffsetTRelative"),
}
