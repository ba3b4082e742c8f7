"""One-operator int8 and uint8 .tflite models, run on LiteRT's reference kernels: the oracle of the fixed-point tests.

A model holds one operator. Its activations are graph inputs, its weights, biases, axes and sizes constants. Built with
the object API of the schema that ships inside `ai_edge_litert`, so no TensorFlow is needed.
"""

import dataclasses
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

TYPES = {
    "int8": schema.TensorType.INT8,
    "uint8": schema.TensorType.UINT8,
    "int16": schema.TensorType.INT16,
    "int64": schema.TensorType.INT64,
    "int32": schema.TensorType.INT32,
    "float32": schema.TensorType.FLOAT32,
}

# operator -> (options class, version): the lowest version whose contract covers int8
OPERATORS = {
    "ADD": ("AddOptions", 2),
    "SUB": ("SubOptions", 3),
    "MUL": ("MulOptions", 2),
    "CONV_2D": ("Conv2DOptions", 3),
    "DEPTHWISE_CONV_2D": ("DepthwiseConv2DOptions", 3),
    "FULLY_CONNECTED": ("FullyConnectedOptions", 4),
    "BATCH_MATMUL": ("BatchMatMulOptions", 2),
    "AVERAGE_POOL_2D": ("Pool2DOptions", 2),
    "MAX_POOL_2D": ("Pool2DOptions", 2),
    "MEAN": ("ReducerOptions", 2),
    "QUANTIZE": ("QuantizeOptions", 2),
    "DEQUANTIZE": ("DequantizeOptions", 2),
    "SOFTMAX": ("SoftmaxOptions", 2),
    "LOGISTIC": (None, 2),
    "TANH": (None, 2),
    "RELU": (None, 2),
    "RELU6": (None, 2),
    "RELU_N1_TO_1": (None, 1),
    "LEAKY_RELU": ("LeakyReluOptions", 2),
    "HARD_SWISH": ("HardSwishOptions", 1),
    "PRELU": (None, 1),
    "CONCATENATION": ("ConcatenationOptions", 2),
    "PAD": ("PadOptions", 2),
    "TRANSPOSE_CONV": ("TransposeConvOptions", 3),
    "REDUCE_MAX": ("ReducerOptions", 2),
    "REDUCE_MIN": ("ReducerOptions", 2),
    "MAXIMUM": ("MaximumMinimumOptions", 2),
    "MINIMUM": ("MaximumMinimumOptions", 2),
    "EXP": ("ExpOptions", 2),
    "GELU": ("GeluOptions", 2),
    "DEPTH_TO_SPACE": ("DepthToSpaceOptions", 1),
    "SPACE_TO_DEPTH": ("SpaceToDepthOptions", 2),
    "TRANSPOSE": ("TransposeOptions", 2),
    "GATHER": ("GatherOptions", 2),
    "SLICE": ("SliceOptions", 2),
    "RESHAPE": ("ReshapeOptions", 1),
    "RESIZE_BILINEAR": ("ResizeBilinearOptions", 3),
    "RESIZE_NEAREST_NEIGHBOR": ("ResizeNearestNeighborOptions", 3),
}


@dataclasses.dataclass
class Tensor:
    """An array with its quantisation; a constant of the model or one of its inputs."""

    array: np.ndarray
    scale: Any = None  # a float or one for each channel
    zero: int = 0
    axis: int = 0  # of the channels
    constant: bool = False


def constant(array, scale=None, zero=0, axis=0):
    return Tensor(np.asarray(array), scale, zero, axis, constant=True)


def run_reference(operator: str, inputs: list[Tensor | None], output: Tensor, **options) -> np.ndarray:
    """What LiteRT's reference kernel of `operator` makes of `inputs`; `output.array` gives shape and dtype only."""
    interpreter = Interpreter(
        model_content=build(operator, inputs, output, options),
        experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
        num_threads=1,
    )
    interpreter.allocate_tensors()
    fed = [tensor for tensor in inputs if tensor is not None and not tensor.constant]
    for detail, tensor in zip(interpreter.get_input_details(), fed, strict=True):
        interpreter.set_tensor(detail["index"], tensor.array)
    interpreter.invoke()
    result = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    assert result.shape == output.array.shape, (operator, result.shape, output.array.shape)
    return result


def build(operator: str, inputs: list[Tensor | None], output: Tensor, options: dict) -> bytes:
    model = schema.ModelT()
    model.version, model.description = 3, b"one operator"
    model.buffers, model.signatureDefs = [schema.BufferT()], None
    graph = schema.SubGraphT()
    graph.tensors, graph.inputs, model.subgraphs = [], [], [graph]
    indices = []
    for tensor in inputs:
        if tensor is None:
            indices.append(-1)
            continue
        indices.append(_add_tensor(model, graph, tensor))
        if not tensor.constant:
            graph.inputs.append(indices[-1])
    graph.outputs = [_add_tensor(model, graph, output)]
    _add_operator(model, graph, operator, indices, options)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _add_tensor(model, graph, tensor: Tensor) -> int:
    packed = schema.TensorT()
    packed.name = f"t{len(graph.tensors)}".encode()
    packed.shape = list(tensor.array.shape)
    packed.hasRank = True
    packed.type = TYPES[tensor.array.dtype.name]
    packed.buffer = 0
    if tensor.scale is not None:
        scales = np.atleast_1d(np.asarray(tensor.scale, np.float32))
        packed.quantization = schema.QuantizationParametersT()
        packed.quantization.scale = [float(s) for s in scales]
        packed.quantization.zeroPoint = [int(tensor.zero)] * scales.size
        packed.quantization.quantizedDimension = tensor.axis
    if tensor.constant:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(np.ascontiguousarray(tensor.array).tobytes(), np.uint8)
        model.buffers.append(buffer)
        packed.buffer = len(model.buffers) - 1
    graph.tensors.append(packed)
    return len(graph.tensors) - 1


def _add_operator(model, graph, operator: str, indices: list[int], options: dict) -> None:
    options_name, version = OPERATORS[operator]
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, operator)
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    code.version = version
    model.operatorCodes = [code]
    node = schema.OperatorT()
    node.opcodeIndex, node.inputs, node.outputs = 0, indices, graph.outputs
    if options_name is not None:
        node.builtinOptionsType = getattr(schema.BuiltinOptions, options_name)
        node.builtinOptions = getattr(schema, options_name + "T")()
        for name, value in options.items():
            assert hasattr(node.builtinOptions, name), (options_name, name)
            setattr(node.builtinOptions, name, value)
    graph.operators = [node]
