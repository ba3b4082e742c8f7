"""The part of the TFLite schema that equivcheck reads and writes: tables by their field numbers, and the enums.

A field's number, type and default never change in a flatbuffer schema (new fields get new numbers), so files of every version
are read by one declaration; what is not declared here is not read, and `cut` leaves it in the file as it is. Why not a
generated module: the one of ai-edge-litert comes with the engine, and a model must be readable without any engine; the
package `tflite` takes 0.12 s to import and ends at the schema of 2.18. Source: tensorflow/compiler/mlir/lite/schema/schema.fbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flatbuffers import number_types
from flatbuffers.table import Table

IDENTIFIER: Final = b"TFL3"

# Index is the BuiltinOperator code.
OPERATORS: Final = tuple(
    """
    ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE EMBEDDING_LOOKUP FLOOR
    FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION LOGISTIC LSH_PROJECTION
    LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1 RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH SVDF TANH
    CONCAT_EMBEDDINGS SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER
    BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE
    BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM
    ARG_MAX MINIMUM LESS NEG PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE
    TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK
    LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL FLOOR_MOD
    RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL REVERSE_V2 ADD_N
    GATHER_ND COS WHERE RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND HARD_SWISH IF WHILE
    NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM BATCH_MATMUL
    PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D CONV_3D IMAG REAL COMPLEX_ABS HASHTABLE
    HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE
    ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU
    DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2
    UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD STABLEHLO_DIVIDE
    STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP STABLEHLO_CONCATENATE
    STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE
    STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG STABLEHLO_MINIMUM
    STABLEHLO_NEGATE STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT STABLEHLO_SELECT
    STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT STABLEHLO_DYNAMIC_SLICE
    STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_PAD STABLEHLO_IOTA STABLEHLO_DOT_GENERAL STABLEHLO_REDUCE_WINDOW
    STABLEHLO_SORT STABLEHLO_WHILE STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE STABLEHLO_RNG_BIT_GENERATOR
    REDUCE_WINDOW STABLEHLO_COMPOSITE STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT STABLEHLO_CASE
    """.split()
)
CODES: Final[Mapping[str, int]] = {name: code for code, name in enumerate(OPERATORS)}
# Index is the TensorType; None has no numpy dtype.
TENSOR_TYPES: Final = tuple(
    """
    float32 float16 int32 uint8 int64 string bool int16 complex64 int8 float64 complex128 uint64 resource variant uint32
    uint16 int4 bfloat16 int2 uint4 float8_e4m3fn float8_e5m2
    """.split()
)
ACTIVATIONS: Final = ("NONE", "RELU", "RELU_N1_TO_1", "RELU6", "TANH", "SIGN_BIT")
PADDINGS: Final = ("SAME", "VALID")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a table: its number, its type (a scalar's, `string`, `T[]` or `table`) and its default."""

    number: int
    kind: str
    default: float = 0


def _fields(text: str) -> dict[str, Field]:
    """Parse `name:kind@number=default, ...`; numbers count from 0 and defaults are 0 where not given."""
    found: dict[str, Field] = {}
    number = 0
    for item in text.replace(",", " ").split():
        name, _, rest = item.partition(":")
        kind, _, default = rest.partition("=")
        kind, _, given = kind.partition("@")
        number = int(given) if given else number
        found[name] = Field(number, kind, float(default or 0) if kind == "float" else int(default or 0))
        number += 1
    return found


TABLES: Final[Mapping[str, Mapping[str, Field]]] = {
    name: _fields(text)
    for name, text in {
        "Model": "version:uint, operator_codes:table[], subgraphs:table[], description:string, buffers:table[], "
        "metadata_buffer:int[], metadata:table[], signature_defs:table[], external_buffer_groups:table[], "
        "external_buffers:table[]",
        "OperatorCode": "deprecated_builtin_code:byte, custom_code:string, version:int=1, builtin_code:int",
        "SubGraph": "tensors:table[], inputs:int[], outputs:int[], operators:table[], name:string, "
        "debug_metadata_index:int=-1",
        "Tensor": "shape:int[], type:byte, buffer:uint, name:string, quantization:table, is_variable:bool, sparsity:table, "
        "shape_signature:int[], has_rank:bool, variant_tensors:table[], external_buffer:uint",
        "QuantizationParameters": "min:float[], max:float[], scale:float[], zero_point:long[], quantized_dimension:int@6",
        "Buffer": "data:ubyte[], offset:ulong, size:ulong",
        "Operator": "opcode_index:uint, inputs:int[], outputs:int[], builtin_options_type:ubyte, builtin_options:table, "
        "custom_options:ubyte[], custom_options_format:byte, mutating_variable_inputs:bool[], intermediates:int[], "
        "large_custom_options_offset:ulong, large_custom_options_size:ulong, builtin_options_2_type:ubyte, "
        "builtin_options_2:table, debug_metadata_index:int=-1",
        "Conv2DOptions": "padding:byte, stride_w:int, stride_h:int, fused_activation_function:byte, "
        "dilation_w_factor:int=1, dilation_h_factor:int=1",
        "DepthwiseConv2DOptions": "padding:byte, stride_w:int, stride_h:int, depth_multiplier:int, "
        "fused_activation_function:byte, dilation_w_factor:int=1, dilation_h_factor:int=1",
        "TransposeConvOptions": "padding:byte, stride_w:int, stride_h:int, fused_activation_function:byte",
        "Pool2DOptions": "padding:byte, stride_w:int, stride_h:int, filter_width:int, filter_height:int, "
        "fused_activation_function:byte",
        "FullyConnectedOptions": "fused_activation_function:byte, weights_format:byte, keep_num_dims:bool",
        "SoftmaxOptions": "beta:float",
        "ConcatenationOptions": "axis:int, fused_activation_function:byte",
        "AddOptions": "fused_activation_function:byte, pot_scale_int16:bool=1",
        "SubOptions": "fused_activation_function:byte, pot_scale_int16:bool=1",
        "MulOptions": "fused_activation_function:byte",
        "DivOptions": "fused_activation_function:byte",
        "ReshapeOptions": "new_shape:int[]",
        "ResizeBilinearOptions": "align_corners:bool@2, half_pixel_centers:bool",
        "ResizeNearestNeighborOptions": "align_corners:bool, half_pixel_centers:bool",
        "ReducerOptions": "keep_dims:bool",
        "StridedSliceOptions": "begin_mask:int, end_mask:int, ellipsis_mask:int, new_axis_mask:int, shrink_axis_mask:int",
        "SplitOptions": "num_splits:int",
        "SplitVOptions": "num_splits:int",
        "BatchMatMulOptions": "adj_x:bool, adj_y:bool",
        "LeakyReluOptions": "alpha:float",
        "GatherOptions": "axis:int, batch_dims:int",
        "PackOptions": "values_count:int, axis:int",
        "UnpackOptions": "num:int, axis:int",
        "SqueezeOptions": "squeeze_dims:int[]",
        "DepthToSpaceOptions": "block_size:int",
        "SpaceToDepthOptions": "block_size:int",
        "GeluOptions": "approximate:bool",
    }.items()
}
# Members of the union BuiltinOptions that are declared above, by their number.
OPTIONS: Final[Mapping[int, str]] = {
    1: "Conv2DOptions",
    2: "DepthwiseConv2DOptions",
    5: "Pool2DOptions",
    8: "FullyConnectedOptions",
    9: "SoftmaxOptions",
    10: "ConcatenationOptions",
    11: "AddOptions",
    15: "ResizeBilinearOptions",
    17: "ReshapeOptions",
    19: "SpaceToDepthOptions",
    21: "MulOptions",
    23: "GatherOptions",
    27: "ReducerOptions",
    28: "SubOptions",
    29: "DivOptions",
    30: "SqueezeOptions",
    32: "StridedSliceOptions",
    35: "SplitOptions",
    49: "TransposeConvOptions",
    59: "PackOptions",
    64: "UnpackOptions",
    74: "ResizeNearestNeighborOptions",
    75: "LeakyReluOptions",
    79: "SplitVOptions",
    94: "DepthToSpaceOptions",
    101: "BatchMatMulOptions",
    116: "GeluOptions",
}
OPTION_NUMBERS: Final[Mapping[str, int]] = {name: number for number, name in OPTIONS.items()}

SCALARS: Final[Mapping[str, Any]] = {
    "bool": number_types.BoolFlags,
    "byte": number_types.Int8Flags,
    "ubyte": number_types.Uint8Flags,
    "int": number_types.Int32Flags,
    "uint": number_types.Uint32Flags,
    "ulong": number_types.Uint64Flags,
    "float": number_types.Float32Flags,
}
_VECTORS: Final[Mapping[str, str]] = {
    "bool": "?",
    "ubyte": "u1",
    "int": "<i4",
    "long": "<i8",
    "float": "<f4",
}


class Reader:
    """One table of a flatbuffer, read field by field as it is asked for.

    Raises struct.error, IndexError or ValueError where the bytes break off.
    """

    def __init__(self, content: bytes, position: int, table: str) -> None:
        self.content = content
        self.position = position
        self.fields = TABLES[table]
        self._table = Table(content, position)

    @classmethod
    def root(cls, content: bytes) -> Reader:
        """The Model of a .tflite file."""
        return cls(content, int.from_bytes(content[:4], "little"), "Model")

    def _offset(self, name: str) -> int:
        return int(self._table.Offset(4 + 2 * self.fields[name].number))

    def has(self, name: str) -> bool:
        """Whether the field is in the file."""
        return bool(self._offset(name))

    def target(self, name: str) -> int:
        """Where the vector, text or table that a field refers to begins."""
        return int(self._table.Indirect(self.position + self._offset(name)))

    def number(self, name: str) -> Any:
        """A scalar, or its default."""
        field, offset = self.fields[name], self._offset(name)
        return self._table.Get(SCALARS[field.kind], self.position + offset) if offset else field.default

    def text(self, name: str) -> str:
        """A string; empty where it is left out."""
        offset = self._offset(name)
        return self._table.String(self.position + offset).decode(errors="replace") if offset else ""

    def vector(self, name: str) -> np.ndarray[Any, Any] | None:
        """A vector of numbers as a view of the file, or None where it is left out."""
        offset = self._offset(name)
        if not offset:
            return None
        dtype = np.dtype(_VECTORS[self.fields[name].kind.removesuffix("[]")])
        return np.frombuffer(self.content, dtype, self._table.VectorLen(offset), self._table.Vector(offset))

    def table(self, name: str, kind: str) -> Reader | None:
        """A table, read as `kind`; None where it is left out."""
        offset = self._offset(name)
        return Reader(self.content, self._table.Indirect(self.position + offset), kind) if offset else None

    def tables(self, name: str, kind: str) -> list[Reader]:
        """A vector of tables."""
        offset = self._offset(name)
        if not offset:
            return []
        start, count = self._table.Vector(offset), self._table.VectorLen(offset)
        return [Reader(self.content, self._table.Indirect(start + 4 * k), kind) for k in range(count)]

    def values(self) -> dict[str, Any]:
        """All scalars and vectors of numbers of the table by name, defaults included."""
        return {
            name: self.vector(name) if field.kind.endswith("[]") else self.number(name)
            for name, field in self.fields.items()
        }
