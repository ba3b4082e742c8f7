"""Small .tflite models, built with the object API of the schema that ships inside `ai_edge_litert`: an independent writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

# operator -> (options class, version whose contract covers int8)
OPERATORS: dict[str, tuple[str | None, int]] = {
    "CONV_2D": ("Conv2DOptions", 3),
    "DEPTHWISE_CONV_2D": ("DepthwiseConv2DOptions", 3),
    "TRANSPOSE_CONV": ("TransposeConvOptions", 3),
    "FULLY_CONNECTED": ("FullyConnectedOptions", 4),
    "BATCH_MATMUL": ("BatchMatMulOptions", 2),
    "ADD": ("AddOptions", 2),
    "SUB": ("SubOptions", 3),
    "MUL": ("MulOptions", 2),
    "DIV": ("DivOptions", 2),
    "MAXIMUM": (None, 2),
    "MINIMUM": (None, 2),
    "PRELU": (None, 1),
    "AVERAGE_POOL_2D": ("Pool2DOptions", 2),
    "MAX_POOL_2D": ("Pool2DOptions", 2),
    "MEAN": ("ReducerOptions", 2),
    "SUM": ("ReducerOptions", 2),
    "REDUCE_MAX": ("ReducerOptions", 2),
    "REDUCE_MIN": ("ReducerOptions", 2),
    "LOGISTIC": (None, 2),
    "TANH": (None, 2),
    "HARD_SWISH": (None, 1),
    "RELU": (None, 2),
    "RELU6": (None, 2),
    "RELU_N1_TO_1": (None, 1),
    "LEAKY_RELU": ("LeakyReluOptions", 2),
    "GELU": ("GeluOptions", 2),
    "ELU": (None, 1),
    "EXP": (None, 2),
    "RSQRT": (None, 2),
    "SOFTMAX": ("SoftmaxOptions", 2),
    "LOG_SOFTMAX": (None, 2),
    "L2_NORMALIZATION": ("L2NormOptions", 2),
    "QUANTIZE": (None, 2),
    "DEQUANTIZE": (None, 2),
    "CONCATENATION": ("ConcatenationOptions", 2),
    "PAD": (None, 2),
    "PADV2": (None, 2),
    "TRANSPOSE": (None, 2),
    "GATHER": ("GatherOptions", 2),
    "SLICE": (None, 2),
    "STRIDED_SLICE": ("StridedSliceOptions", 2),
    "SPLIT": ("SplitOptions", 2),
    "SPLIT_V": ("SplitVOptions", 2),
    "PACK": ("PackOptions", 2),
    "UNPACK": ("UnpackOptions", 2),
    "RESHAPE": ("ReshapeOptions", 1),
    "SQUEEZE": ("SqueezeOptions", 1),
    "EXPAND_DIMS": (None, 1),
    "DEPTH_TO_SPACE": ("DepthToSpaceOptions", 1),
    "SPACE_TO_DEPTH": ("SpaceToDepthOptions", 2),
    "RESIZE_BILINEAR": ("ResizeBilinearOptions", 3),
    "RESIZE_NEAREST_NEIGHBOR": ("ResizeNearestNeighborOptions", 3),
    "ARG_MAX": ("ArgMaxOptions", 2),
    "CAST": ("CastOptions", 1),
    "VAR_HANDLE": ("VarHandleOptions", 1),
    "TOPK_V2": (None, 2),
}


class TfliteGraph:
    """A model being built. Tensors are numbers; scales and zero points as in the file."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.model = schema.ModelT()
        self.model.version, self.model.description = 3, b"built by hand"
        self.model.buffers, self.model.operatorCodes = [schema.BufferT()], []
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []
        self.graph.inputs, self.graph.outputs = [], []
        self.model.subgraphs = [self.graph]

    def tensor(
        self, shape: Sequence[int], dtype: str = "int8", scale: Any = None, zero: int = 0, axis: int = 0, name: str = ""
    ) -> int:
        packed = schema.TensorT()
        packed.name = (name or f"t{len(self.graph.tensors)}").encode()
        packed.shape, packed.hasRank = list(shape), True
        packed.type, packed.buffer = getattr(schema.TensorType, dtype.upper()), 0
        if scale is not None:
            packed.quantization = schema.QuantizationParametersT()
            packed.quantization.scale = [float(s) for s in np.atleast_1d(np.asarray(scale, np.float32))]
            packed.quantization.zeroPoint = [int(zero)] * len(packed.quantization.scale)
            packed.quantization.quantizedDimension = axis
        self.graph.tensors.append(packed)
        return len(self.graph.tensors) - 1

    def input(self, shape: Sequence[int], scale: Any = 0.05, zero: int = 3, dtype: str = "int8", name: str = "") -> int:
        made = self.tensor(shape, dtype, scale if dtype != "float32" else None, zero, name=name)
        self.graph.inputs.append(made)
        return made

    def constant(self, array: Any, scale: Any = None, zero: int = 0, axis: int = 0) -> int:
        array = np.ascontiguousarray(array)
        made = self.tensor(array.shape, array.dtype.name, scale, zero, axis)
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        self.graph.tensors[made].buffer = len(self.model.buffers) - 1
        return made

    def integers(self, *numbers: int) -> int:
        return self.constant(np.asarray(numbers, np.int32))

    def op(
        self, kind: str, inputs: Sequence[int], shape: Sequence[int], scale: Any = 0.05, zero: int = 3,
        dtype: str = "int8", outputs: int = 1, name: str = "", **options: Any,
    ) -> Any:  # fmt: skip
        """Add an operator; the tensor it makes, or all of them (of one shape) where it makes several."""
        made = [
            self.tensor(shape, dtype, scale if dtype not in ("float32", "int32", "int64") else None, zero, name=name)
            for _ in range(outputs)
        ]
        node = schema.OperatorT()
        node.opcodeIndex, node.inputs, node.outputs = self._code(kind), list(inputs), made
        options_name = OPERATORS[kind][0]
        if options_name is not None:
            node.builtinOptionsType = getattr(schema.BuiltinOptions, options_name)
            node.builtinOptions = getattr(schema, options_name + "T")()
            for key, value in options.items():
                assert hasattr(node.builtinOptions, key), (options_name, key)
                setattr(node.builtinOptions, key, value)
        self.graph.operators.append(node)
        return made if outputs > 1 else made[0]

    def _code(self, kind: str) -> int:
        code = schema.OperatorCodeT()
        code.builtinCode = getattr(schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), OPERATORS[kind][1]
        self.model.operatorCodes.append(code)
        return len(self.model.operatorCodes) - 1

    def weights(self, shape: Sequence[int], channels: int, axis: int, dtype: str = "int8") -> int:
        """Random weights: int8 with a scale for each of `channels` along `axis`, uint8 with one scale and a zero point."""
        if dtype == "uint8":
            return self.constant(self.random.integers(0, 256, shape).astype(np.uint8), 0.01, 120)
        codes = self.random.integers(-127, 128, shape).astype(np.int8)
        return self.constant(codes, self.random.uniform(0.005, 0.02, channels), 0, axis)

    def bias(self, x: int, weight: int) -> int:
        one, other = (np.asarray(self.graph.tensors[k].quantization.scale, np.float32) for k in (x, weight))
        shape = self.graph.tensors[weight].shape
        count = shape[self.graph.tensors[weight].quantization.quantizedDimension] if other.size > 1 else shape[0]
        return self.constant(self.random.integers(-3000, 3000, count).astype(np.int32), one * other)

    def conv(self, x: int, channels: int, kernel: int = 3, stride: int = 1, scale: float = 0.1, **options: Any) -> int:
        """CONV_2D with padding SAME."""
        n, height, width, depth = self.graph.tensors[x].shape
        weight = self.weights((channels, kernel, kernel, depth), channels, 0)
        shape = (n, -(-height // stride), -(-width // stride), channels)
        return int(
            self.op(
                "CONV_2D",
                [x, weight, self.bias(x, weight)],
                shape,
                scale,
                -5,
                strideW=stride,
                strideH=stride,
                **options,
            )
        )

    def content(self, *outputs: int) -> bytes:
        """The file, with `outputs`."""
        self.graph.outputs = list(outputs)
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def feeds_of(source: Any, seed: int = 1) -> dict[str, np.ndarray]:
    """Random codes (or normal floats) for every input of a `Flatbuffer`."""
    random = np.random.default_rng(seed)
    found = {}
    for k in source.inputs:
        tensor = source.tensors[k]
        if tensor.dtype == "float32":
            found[tensor.name] = random.normal(size=tensor.shape).astype(np.float32)
        else:
            limits = np.iinfo(tensor.dtype)
            found[tensor.name] = random.integers(limits.min, limits.max, tensor.shape, tensor.dtype, endpoint=True)
    return found


def small_net() -> bytes:
    """Conv, depthwise, a residual ADD, MUL, pool, MEAN, FULLY_CONNECTED, SOFTMAX: one of each kind, int8 per channel."""
    g = TfliteGraph()
    x = g.input((1, 9, 9, 3), name="image")
    a = g.conv(x, 8, stride=2, fusedActivationFunction=1)
    depthwise = g.weights((1, 3, 3, 8), 8, 3)
    b = g.op(
        "DEPTHWISE_CONV_2D", [a, depthwise, g.bias(a, depthwise)], (1, 5, 5, 8), 0.1, 2, strideW=1, strideH=1, depthMultiplier=1
    )  # fmt: skip
    c = g.op("ADD", [b, a], (1, 5, 5, 8), 0.15, 0, fusedActivationFunction=0)
    d = g.op("MUL", [c, a], (1, 5, 5, 8), 0.4, -10)
    e = g.op("MAX_POOL_2D", [d], (1, 2, 2, 8), 0.4, -10, padding=1, strideW=2, strideH=2, filterWidth=2, filterHeight=2)
    f = g.op("MEAN", [e, g.integers(1, 2)], (1, 8), 0.2, -20, keepDims=False)
    weight = g.weights((6, 8), 6, 0)
    h = g.op("FULLY_CONNECTED", [f, weight, g.bias(f, weight)], (1, 6), 0.1, 0, name="logits")
    return g.content(g.op("SOFTMAX", [h], (1, 6), 1 / 256, -128, beta=1.0, name="probabilities"))
