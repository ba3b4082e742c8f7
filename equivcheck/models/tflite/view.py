"""What a .tflite file means, as a QDQ ONNX model: every TFLite operator is an island DQ -> op -> Q of its own.

Stored values are the file's tensors, with the same name, scale and zero point. Inputs and outputs have the file's shape
(NHWC); inside, what convolutions, pools and resizes read and make is an *image* and stands in NCHW, and so does what is added
to it, padded or concatenated: whatever knows channels (the limit of each, the worst, those never used) finds them where ONNX
has them. Operators that go by the file's order (RESHAPE, SPLIT) read an image through a Transpose inside their island.

Formulas: what the TFLite reference kernels (tensorflow/lite/kernels/internal/reference) compute in reals. A bias has the
scale s_x * s_w, as those kernels add it to the sum of products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import helper, numpy_helper

from equivcheck.errors import UnsupportedModel
from equivcheck.models.graph import Array, Quantisation
from equivcheck.models.onnx.cut import fresh
from equivcheck.models.tflite.load import Flatbuffer, Operator, Tensor
from equivcheck.models.tflite.schema import ACTIVATIONS, PADDINGS

# Opset and IR version. 16-bit codes need 21; there ONNX Runtime 1.32 refuses s8 models with a Transpose before a Conv, because
# its own rewrite to u8 leaves the new attribute output_dtype as it was.
_EIGHT_BITS, _SIXTEEN_BITS = (20, 9), (21, 10)
_ACTIVATION_CODES = ("int8", "uint8", "int16")
_STATE = ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE", "CALL_ONCE", "HASHTABLE", "HASHTABLE_FIND")
_UNARY: Mapping[str, str] = {
    "LOGISTIC": "Sigmoid",
    "TANH": "Tanh",
    "RELU": "Relu",
    "HARD_SWISH": "HardSwish",
    "ELU": "Elu",
    "EXP": "Exp",
    "LOG": "Log",
    "SQRT": "Sqrt",
    "ABS": "Abs",
    "NEG": "Neg",
    "FLOOR": "Floor",
    "CEIL": "Ceil",
    "ROUND": "Round",
    "SIN": "Sin",
    "COS": "Cos",
}
_BINARY: Mapping[str, str] = {
    "ADD": "Add",
    "SUB": "Sub",
    "MUL": "Mul",
    "DIV": "Div",
    "MAXIMUM": "Max",
    "MINIMUM": "Min",
    "POW": "Pow",
    "PRELU": "PRelu",
}
_SPATIAL = frozenset(
    "CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV AVERAGE_POOL_2D MAX_POOL_2D RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR "
    "DEPTH_TO_SPACE SPACE_TO_DEPTH".split()
)
_BOUNDS: Mapping[str, tuple[float, float | None]] = {
    "RELU": (0.0, None),
    "RELU6": (0.0, 6.0),
    "RELU_N1_TO_1": (-1.0, 1.0),
    "RELU_0_TO_1": (0.0, 1.0),
}
_FOLLOWING = frozenset(
    [*_UNARY, *_BINARY, *_BOUNDS, *"LEAKY_RELU GELU QUANTIZE DEQUANTIZE PAD PADV2 CONCATENATION".split()]
)
IMAGE_AXES = (0, 3, 1, 2)  # the file's axes in the order of an image: NHWC to NCHW
_REDUCTIONS: Mapping[str, str] = {
    "MEAN": "ReduceMean",
    "SUM": "ReduceSum",
    "REDUCE_MAX": "ReduceMax",
    "REDUCE_MIN": "ReduceMin",
    "REDUCE_PROD": "ReduceProd",
}


@dataclass(frozen=True, eq=False)
class View:
    """`proto` says what a file means; `origins` gives for each of its nodes the operator it stands for; `images` are the
    indices of the tensors that stand in NCHW.
    """

    proto: onnx.ModelProto
    origins: tuple[int, ...]
    images: frozenset[int]


def view(source: Flatbuffer, path: str) -> View:
    """Return the ONNX model that says what `source` means.

    Raises UnsupportedModel, which names the operator, where there is no such ONNX model.
    """
    return _View(source, path).build()


class _Image(str):
    """The name of reals in NCHW."""

    __slots__ = ()


def images(source: Flatbuffer) -> frozenset[int]:
    """Tensors of rank 4 that spatial operators read or make, and those that elementwise operators join to them."""
    edges = {*source.inputs, *source.outputs}
    # what a float output dequantises stands for it: the same numbers in the same order
    edges |= {k for op in source.operators if op.kind == "DEQUANTIZE" and op.outputs[0] in edges for k in op.inputs}

    def touched(operator: Operator) -> set[int]:
        found = {k for k in (*operator.inputs, *operator.outputs) if k >= 0 and k not in edges}
        return {k for k in found if len(source.tensors[k].shape) == 4 and source.tensors[k].constant is None}

    found = set[int]().union(*(touched(op) for op in source.operators if op.kind in _SPATIAL))
    joined = [touched(op) for op in source.operators if op.kind in _FOLLOWING]
    grown = True
    while grown:
        before = len(found)
        found = found.union(*(group for group in joined if group & found))
        grown = len(found) > before
    return frozenset(found)


class _View:
    def __init__(self, source: Flatbuffer, path: str) -> None:
        self.source = source
        self.path = path
        self.taken = {tensor.name for tensor in source.tensors}
        self.nodes: list[onnx.NodeProto] = []
        self.origins: list[int] = []
        self.initializers: list[onnx.TensorProto] = []
        self.maker: dict[str, tuple[onnx.NodeProto, int]] = {}
        self.images = images(source)
        self.dequantised_as: dict[int, str] = {}
        self.folded: dict[int, Array] = {}
        self.grids: dict[int, list[str]] = {}
        self.operator = Operator(-1, "", (), (), {})

    def build(self) -> View:
        self._refuse_state()
        for operator in self.source.operators:
            self.operator = operator
            if self._folds():
                continue
            rule = _RULES.get(operator.kind)
            if rule is None:
                self.refuse("is not supported")
            made = rule(self, operator)
            for index, value in zip(operator.outputs, made, strict=True):
                self.store(index, value)
        graph = helper.make_graph(
            self.nodes,
            "main",
            [self._port(k) for k in self.source.inputs],
            [self._port(k) for k in self.source.outputs],
            self.initializers,
            value_info=[self._port(out) for op in self.source.operators for out in op.outputs],
        )
        opset, ir_version = _SIXTEEN_BITS if any(t.dtype == "int16" for t in self.source.tensors) else _EIGHT_BITS
        opsets = [helper.make_opsetid("", opset)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version, producer_name="")
        made.doc_string = self.source.description
        return View(made, tuple(self.origins), self.images)

    def _folds(self) -> bool:
        """Whether the operator is a DEQUANTIZE of weights (float16 ones, say): what it makes is a constant then."""
        if self.operator.kind != "DEQUANTIZE" or self.input(0).constant is None:
            return False
        x, reals = self.input(0), self.constant(0).astype(np.float32)
        if x.quantisation is not None:
            scale, zero = x.quantisation.along(reals.ndim)
            reals = ((reals - zero) * scale).astype(np.float32)
        self.folded[self.operator.outputs[0]] = reals
        return True

    # -- refusing ------------------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> NoReturn:
        raise UnsupportedModel(
            f"{self.path}: operator {self.operator.index} {self.operator.kind} {why}", asked=self.operator.kind
        )

    def _refuse_state(self) -> None:
        kinds = dict.fromkeys(op.kind for op in self.source.operators if op.kind in _STATE)
        if kinds:
            raise UnsupportedModel(
                f"{self.path} keeps state from one run to the next ({', '.join(kinds)}): not supported",
                asked=next(iter(kinds)),
                hint="export it without state: its variables as inputs and outputs",
            )

    # -- tensors -------------------------------------------------------------------------------------------------------

    def tensor(self, index: int) -> Tensor:
        found = self.source.tensors[index]
        if index in self.folded:
            return replace(found, constant=self.folded[index])
        if found.variable:
            self.refuse(f"keeps state in {found.name} from one run to the next")
        if found.sparse:
            self.refuse(f"reads the sparse tensor {found.name}")
        if found.numpy_dtype is None:
            self.refuse(f"reads or makes {found.name}, which is {found.dtype}")
        if any(dim < 0 for dim in found.shape):
            self.refuse(f"has the tensor {found.name}, whose shape is known only at run time")
        return found

    def given(self, position: int) -> Tensor | None:
        """An input of the operator, or None where it is left out."""
        inputs = self.operator.inputs
        return self.tensor(inputs[position]) if len(inputs) > position and inputs[position] >= 0 else None

    def input(self, position: int) -> Tensor:
        found = self.given(position)
        if found is None:
            self.refuse(f"has no input {position}")
        return found

    def output(self, position: int = 0) -> Tensor:
        return self.tensor(self.operator.outputs[position])

    def constant(self, position: int) -> Array:
        """The numbers of an input that must be in the file."""
        found = self.input(position)
        if found.constant is None:
            self.refuse(f"takes {found.name} (input {position}) only at run time")
        return found.constant

    def integers(self, position: int) -> list[int]:
        return [int(k) for k in self.constant(position).ravel()]

    def _port(self, index: int) -> onnx.ValueInfoProto:
        tensor = self.tensor(index)
        element = helper.np_dtype_to_tensor_dtype(tensor.numpy_dtype)
        shape = [tensor.shape[axis] for axis in IMAGE_AXES] if index in self.images else tensor.shape
        return helper.make_tensor_value_info(tensor.name, element, shape)

    # -- writing -------------------------------------------------------------------------------------------------------

    def node(self, op_type: str, inputs: Sequence[str], *, outputs: int = 1, stem: str = "", **attributes: Any) -> Any:
        """Write a node; the name of what it makes, or all names where it makes several."""
        stem = stem or self.source.tensors[self.operator.outputs[0]].name
        names = [self.fresh(f"{stem}/{op_type}") for _ in range(outputs)]
        label = self.fresh(f"{self.operator.name}/{op_type}")
        made = helper.make_node(op_type, list(inputs), names, name=label, **attributes)
        self.nodes.append(made)
        self.origins.append(self.operator.index)
        self.maker.update((name, (made, k)) for k, name in enumerate(names))
        return names if outputs > 1 else names[0]

    def fresh(self, name: str) -> str:
        found = fresh(name, self.taken)
        self.taken.add(found)
        return found

    def initializer(self, name: str, array: Array) -> str:
        unique = self.fresh(name)
        self.initializers.append(numpy_helper.from_array(np.asarray(array, order="C"), unique))
        return unique

    def listed(self, name: str, numbers: Sequence[int]) -> str:
        return self.initializer(f"{self.operator.name}/{name}", np.asarray(numbers, np.int64))

    # -- quantisation --------------------------------------------------------------------------------------------------

    def coded(self, tensor: Tensor) -> Quantisation | None:
        """How its codes stand for reals; None where the tensor holds plain numbers."""
        if tensor.quantisation is None or tensor.dtype not in _ACTIVATION_CODES:
            return None
        if tensor.quantisation.per_channel and tensor.constant is None:
            self.refuse(f"has the activation {tensor.name}, which is quantised per channel")
        return tensor.quantisation

    def grid(self, tensor: Tensor, quantisation: Quantisation) -> list[str]:
        """Names of the scale and the zero point of a tensor."""
        if tensor.index not in self.grids:
            self.grids[tensor.index] = [
                self.initializer(f"{tensor.name}/scale", quantisation.scale),
                self.initializer(f"{tensor.name}/zero_point", quantisation.zero_point),
            ]
        return self.grids[tensor.index]

    def real(self, position: int) -> str:
        """The name of the reals (or plain numbers) of an input, in the file's order."""
        value = self._real(position)
        return self.nhwc(value) if isinstance(value, _Image) else value

    def image(self, position: int) -> _Image:
        """The name of the reals of an input of rank 4, in NCHW."""
        tensor = self.input(position)
        if tensor.constant is not None:
            numbers = tensor.constant.reshape((1,) * (4 - tensor.constant.ndim) + tensor.constant.shape)
            return _Image(self.weights(tensor, numbers.transpose(IMAGE_AXES), 1))
        value = self._real(position)
        return value if isinstance(value, _Image) else self.nchw(value)

    def _real(self, position: int) -> str:
        tensor = self.input(position)
        if tensor.constant is not None:
            if tensor.quantisation is not None and self.coded(tensor) is None:
                self.refuse(f"reads {tensor.name}, {tensor.dtype} codes")
            return self.weights(tensor, tensor.constant, (tensor.quantisation or _NO_AXIS).axis)
        if tensor.index not in self.dequantised_as:
            coded = self.coded(tensor) is not None
            self.dequantised_as[tensor.index] = self.dequantised(tensor) if coded else tensor.name
        value = self.dequantised_as[tensor.index]
        return _Image(value) if tensor.index in self.images else value

    def dequantised(self, tensor: Tensor) -> str:
        """A DequantizeLinear of `tensor`, laid out as that is stored."""
        quantisation = self.coded(tensor)
        if quantisation is None:
            self.refuse(f"reads {tensor.name}, which has no scale")
        return str(self.node("DequantizeLinear", [tensor.name, *self.grid(tensor, quantisation)], stem=tensor.name))

    def follows(self) -> bool:
        """Whether an elementwise operator is to be written in NCHW: its result is an image, and all it reads can be."""
        inputs = [self.input(k) for k in range(len(self.operator.inputs))]
        can = all(t.constant is not None or len(t.shape) == 4 for t in inputs)
        return self.operator.outputs[0] in self.images and can

    def operand(self, position: int) -> str:
        """An input of an elementwise operator, in the order in which that is written."""
        return self.image(position) if self.follows() else self.real(position)

    def same(self, value: str) -> str:
        """`value`, marked as in NCHW where the elementwise operator that made it is."""
        return _Image(value) if self.follows() else value

    def weights(self, tensor: Tensor, numbers: Array, axis: int | None) -> str:
        """A constant, laid out as `numbers`, with its channels along `axis`; the name of its reals."""
        name = self.initializer(f"{tensor.name}/constant", numbers)
        quantisation = tensor.quantisation
        if quantisation is None:
            return name
        more = {"axis": axis} if quantisation.per_channel and axis is not None else {}
        grid = self.grid(tensor, quantisation)
        return str(self.node("DequantizeLinear", [name, *grid], stem=name, **more))

    def store(self, index: int, value: str) -> None:
        """Let tensor `index` be `value`: by a Q, or under the tensor's own name where it is not quantised."""
        tensor = self.tensor(index)
        quantisation = self.coded(tensor)
        if index in self.images and not isinstance(value, _Image):
            value = self.nchw(value)
        elif index not in self.images and isinstance(value, _Image):
            value = self.nhwc(value)
        if quantisation is None:
            node, k = self.maker[value]
            node.output[k] = tensor.name
            return
        made = helper.make_node(
            "QuantizeLinear",
            [value, *self.grid(tensor, quantisation)],
            [tensor.name],
            name=self.fresh(f"{self.operator.name}/QuantizeLinear"),
        )
        self.nodes.append(made)
        self.origins.append(self.operator.index)

    def activated(self, value: str, name: str) -> str:
        """`value` behind a fused activation (or an operator of that name)."""
        if name == "NONE":
            return value
        if name == "RELU":
            return str(self.node("Relu", [value]))
        if name not in _BOUNDS:
            self.refuse(f"with the activation {name} is not supported")
        bounds = [
            "" if b is None else self.initializer(f"{self.operator.name}/bound", np.asarray(b, np.float32))
            for b in _BOUNDS[name]
        ]
        return str(self.node("Clip", [value, *bounds]))

    def fused(self, value: str) -> list[str]:
        return [self.activated(value, ACTIVATIONS[int(self.operator.options.get("fused_activation_function", 0))])]

    # -- layout --------------------------------------------------------------------------------------------------------

    def nchw(self, value: str) -> _Image:
        return _Image(self.node("Transpose", [value], perm=IMAGE_AXES))

    def nhwc(self, value: str) -> str:
        return str(self.node("Transpose", [value], perm=[0, 2, 3, 1]))

    def reshaped(self, value: str, shape: Sequence[int]) -> str:
        return str(self.node("Reshape", [value, self.listed("shape", shape)], allowzero=1))

    # -- operators with weights ----------------------------------------------------------------------------------------

    def convolution(self, operator: Operator) -> list[str]:
        """CONV_2D: weights OHWI. DEPTHWISE_CONV_2D: weights 1HWO. Both become OIHW."""
        self._no_hybrid(1)
        x, weight = self.input(0), self.input(1)
        numbers, channels = self.constant(1), x.shape[3]
        deep = operator.kind == "DEPTHWISE_CONV_2D"
        numbers = numbers.transpose(3, 0, 1, 2) if deep else numbers.transpose(0, 3, 1, 2)
        kernel = [int(k) for k in numbers.shape[2:]]
        strides, dilations = self._strides(), self._dilations()
        inputs = [self.image(0), self.weights(weight, numbers, 0), *self._bias(2, x, weight)]
        made = self.node(
            "Conv",
            inputs,
            kernel_shape=kernel,
            strides=strides,
            dilations=dilations,
            pads=self._pads(x.shape[1:3], kernel, strides, dilations),
            group=channels if deep else channels // numbers.shape[1],
        )
        return [_Image(self.fused(made)[0])]

    def transposed_convolution(self, operator: Operator) -> list[str]:
        """TRANSPOSE_CONV: inputs are the output's shape, weights OHWI, x, bias."""
        self._no_hybrid(1)
        weight, x, out = self.input(1), self.input(2), self.output()
        numbers = self.constant(1).transpose(3, 0, 1, 2)
        kernel, strides = [int(k) for k in numbers.shape[2:]], self._strides()
        full = [(n - 1) * s + k for n, s, k in zip(x.shape[1:3], strides, kernel, strict=True)]
        total = [max(have - want, 0) for have, want in zip(full, out.shape[1:3], strict=True)]
        made = self.node(
            "ConvTranspose",
            [self.image(2), self.weights(weight, numbers, 1), *self._bias(3, x, weight)],
            kernel_shape=kernel,
            strides=strides,
            pads=[t // 2 for t in total] + [t - t // 2 for t in total],
            output_padding=[max(want - have, 0) for have, want in zip(full, out.shape[1:3], strict=True)],
        )
        return [_Image(self.fused(made)[0])]

    def connected(self, operator: Operator) -> list[str]:
        """FULLY_CONNECTED: weights OI; x flattened to rows of I."""
        if operator.options.get("weights_format", 0):
            self.refuse("has shuffled weights: not supported")
        self._no_hybrid(1)
        x, weight, out = self.input(0), self.input(1), self.output()
        depth, rows, rank = weight.shape[1], self.real(0), len(x.shape)
        if not x.shape or x.shape[-1] != depth:
            rows = self.reshaped(rows, [int(np.prod(x.shape)) // depth, depth])
            rank = 2
        bias = self._bias(2, x, weight)
        if rank == 2:
            made = self.node("Gemm", [rows, self.real(1), *bias], transB=1)
        else:
            made = self.node("MatMul", [rows, self._transposed(1)])
            made = self.node("Add", [made, *bias]) if bias else made
        made = self.fused(made)[0]
        return [made if rank == len(out.shape) else self.reshaped(made, out.shape)]

    def _transposed(self, position: int) -> str:
        """A matrix with its axes exchanged: constants as they are stored, others while it runs."""
        matrix = self.input(position)
        if matrix.constant is not None:
            return self.weights(matrix, matrix.constant.T, 1)
        return str(self.node("Transpose", [self.real(position)], perm=[1, 0]))

    def _no_hybrid(self, weights: int) -> None:
        quantised = self.input(weights).quantisation is not None
        if quantised and all(
            self.coded(self.input(k)) is None for k in range(len(self.operator.inputs)) if k != weights
        ):
            self.refuse("quantises its input while it runs (dynamic range): not supported")

    def _bias(self, position: int, x: Tensor, weight: Tensor) -> list[str]:
        tensor = self.given(position)
        if tensor is None:
            return []
        numbers, inputs, weights = self.constant(position), self.coded(x), weight.quantisation
        name = self.initializer(f"{tensor.name}/constant", _as_int32(numbers))
        if inputs is None or weights is None:
            return [name]
        if numbers.dtype.kind != "i":
            self.refuse(f"has the bias {tensor.name}, which is {tensor.dtype}")
        if numbers.dtype.itemsize > 4 and np.any(np.abs(numbers) >= 1 << 31):
            self.refuse(f"has the bias {tensor.name}, which is wider than 32 bits")
        scale = (inputs.scale.astype(np.float64) * weights.scale).astype(np.float32)
        more = {"axis": 0} if weights.per_channel else {}
        grid = self.initializer(f"{tensor.name}/scale", scale)
        return [str(self.node("DequantizeLinear", [name, grid], stem=name, **more))]

    def _strides(self) -> list[int]:
        return [int(self.operator.options["stride_h"]), int(self.operator.options["stride_w"])]

    def _dilations(self) -> list[int]:
        return [int(self.operator.options["dilation_h_factor"]), int(self.operator.options["dilation_w_factor"])]

    def _pads(
        self, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int] = (1, 1)
    ) -> list[int]:
        """Explicit pads; SAME: the output has ceil(n / stride) places, and an odd pad goes behind (as in TensorFlow)."""
        if PADDINGS[int(self.operator.options["padding"])] == "VALID":
            return [0, 0, 0, 0]
        before, behind = [], []
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            before.append(total // 2)
            behind.append(total - total // 2)
        return before + behind

    def product(self, operator: Operator) -> list[str]:
        """BATCH_MATMUL."""
        values = [self.real(0), self.real(1)]
        for k, key in enumerate(("adj_x", "adj_y")):
            if operator.options.get(key):
                axes = list(range(len(self.input(k).shape)))
                values[k] = self.node("Transpose", [values[k]], perm=[*axes[:-2], axes[-1], axes[-2]])
        return [self.node("MatMul", values)]

    # -- pools and reductions ------------------------------------------------------------------------------------------

    def pool(self, operator: Operator) -> list[str]:
        kernel = [int(operator.options["filter_height"]), int(operator.options["filter_width"])]
        strides = self._strides()
        pads = self._pads(self.input(0).shape[1:3], kernel, strides)
        kind = "MaxPool" if operator.kind == "MAX_POOL_2D" else "AveragePool"
        made = self.node(kind, [self.image(0)], kernel_shape=kernel, strides=strides, pads=pads)
        return [_Image(self.fused(made)[0])]

    def reduction(self, operator: Operator) -> list[str]:
        """A MEAN over height and width is a GlobalAveragePool, so that it is found under that name too."""
        rank = len(self.input(0).shape)
        axes = sorted(axis % rank for axis in self.integers(1))
        keep = bool(operator.options.get("keep_dims"))
        if operator.kind == "MEAN" and rank == 4 and axes == [1, 2]:
            made = self.node("GlobalAveragePool", [self.image(0)])
            return [_Image(made) if keep else self.reshaped(made, self.output().shape)]
        return [self.node(_REDUCTIONS[operator.kind], [self.real(0), self.listed("axes", axes)], keepdims=int(keep))]

    def largest(self, operator: Operator) -> list[str]:
        """ARG_MAX and ARG_MIN: the first of equals."""
        axis = self.integers(1)[0] % len(self.input(0).shape)
        made = self.node("ArgMax" if operator.kind == "ARG_MAX" else "ArgMin", [self.real(0)], axis=axis, keepdims=0)
        return [self._cast(made)]

    # -- one real each -------------------------------------------------------------------------------------------------

    def unary(self, operator: Operator) -> list[str]:
        return [self.same(self.node(_UNARY[operator.kind], [self.operand(0)]))]

    def bounded(self, operator: Operator) -> list[str]:
        return [self.same(self.activated(self.operand(0), operator.kind))]

    def binary(self, operator: Operator) -> list[str]:
        made = self.node(_BINARY[operator.kind], [self.operand(0), self.operand(1)])
        return [self.same(self.fused(made)[0])]

    def leaky(self, operator: Operator) -> list[str]:
        return [self.same(self.node("LeakyRelu", [self.operand(0)], alpha=float(operator.options["alpha"])))]

    def gelu(self, operator: Operator) -> list[str]:
        approximate = "tanh" if operator.options.get("approximate") else "none"
        return [self.same(self.node("Gelu", [self.operand(0)], approximate=approximate))]

    def reciprocal_root(self, operator: Operator) -> list[str]:
        return [self.node("Reciprocal", [self.node("Sqrt", [self.real(0)])])]

    def square(self, operator: Operator) -> list[str]:
        x = self.real(0)
        x = x if operator.kind == "SQUARE" else self.node("Sub", [x, self.real(1)])
        return [self.node("Mul", [x, x])]

    def softmax(self, operator: Operator) -> list[str]:
        x, beta = self.real(0), float(operator.options.get("beta", 1.0))
        if operator.kind == "SOFTMAX" and beta != 1.0:
            x = self.node("Mul", [x, self.initializer(f"{operator.name}/beta", np.asarray(beta, np.float32))])
        return [self.node("Softmax" if operator.kind == "SOFTMAX" else "LogSoftmax", [x], axis=-1)]

    def unit_length(self, operator: Operator) -> list[str]:
        return self.fused(self.node("LpNormalization", [self.real(0)], axis=-1, p=2))

    # -- quantisation as an operator -----------------------------------------------------------------------------------

    def quantise(self, operator: Operator) -> list[str]:
        return [self.same(self.operand(0))]

    def dequantise(self, operator: Operator) -> list[str]:
        """A DQ of its own, whose output is the float tensor."""
        x = self.input(0)
        if x.dtype == "float16":
            return [self._cast(self.real(0))]
        value = self.dequantised(x)
        return [_Image(value) if x.index in self.images else value]

    def cast(self, operator: Operator) -> list[str]:
        return [self._cast(self.real(0))]

    def _cast(self, value: str) -> str:
        return str(self.node("Cast", [value], to=helper.np_dtype_to_tensor_dtype(self.output().numpy_dtype)))

    # -- data movement -------------------------------------------------------------------------------------------------

    def reshape(self, operator: Operator) -> list[str]:
        return [self.reshaped(self.real(0), self.output().shape)]

    def transpose(self, operator: Operator) -> list[str]:
        return [self.node("Transpose", [self.real(0)], perm=self.integers(1))]

    def pad(self, operator: Operator) -> list[str]:
        """PAD fills with real 0 (the zero point); PADV2 with a value of its own."""
        pads, axes = self.constant(1), list(range(len(self.input(0).shape)))
        is_image = self.operator.outputs[0] in self.images
        if is_image:
            axes = list(IMAGE_AXES)
        both = [int(pads[axis, side]) for side in (0, 1) for axis in axes]
        fill = [self.reshaped(self.real(2), [])] if operator.kind == "PADV2" else []
        x = self.image(0) if is_image else self.real(0)
        made = self.node("Pad", [x, self.listed("pads", both), *fill], mode="constant")
        return [_Image(made) if is_image else made]

    def concatenation(self, operator: Operator) -> list[str]:
        axis = int(operator.options["axis"]) % len(self.output().shape)
        axis = IMAGE_AXES.index(axis) if self.follows() else axis
        made = self.node("Concat", [self.operand(k) for k in range(len(operator.inputs))], axis=axis)
        return [self.same(self.fused(made)[0])]

    def pack(self, operator: Operator) -> list[str]:
        axis = int(operator.options["axis"]) % len(self.output().shape)
        shape = [*self.input(0).shape[:axis], 1, *self.input(0).shape[axis:]]
        values = [self.reshaped(self.real(k), shape) for k in range(len(operator.inputs))]
        return [self.node("Concat", values, axis=axis)]

    def split(self, operator: Operator) -> list[str]:
        """SPLIT has its axis first, SPLIT_V last; UNPACK drops the axis it splits along."""
        x = 1 if operator.kind == "SPLIT" else 0
        if operator.kind == "UNPACK":
            axis, sizes = int(operator.options["axis"]) % len(self.input(0).shape), [1] * len(operator.outputs)
        else:
            axis = self.integers(0 if operator.kind == "SPLIT" else 2)[0] % len(self.input(x).shape)
            sizes = [self.output(k).shape[axis] for k in range(len(operator.outputs))]
        names = self.node(
            "Split", [self.real(x), self.listed("split", sizes)], outputs=len(operator.outputs), axis=axis
        )
        made = names if isinstance(names, list) else [names]
        if operator.kind == "UNPACK":
            return [self.reshaped(name, self.output(k).shape) for k, name in enumerate(made)]
        return made

    def slice(self, operator: Operator) -> list[str]:
        starts = self.integers(1)
        ends = [a + n for a, n in zip(starts, self.output().shape, strict=True)]
        return [self._sliced(starts, ends, [1] * len(starts))]

    def strided_slice(self, operator: Operator) -> list[str]:
        options, shape = operator.options, self.input(0).shape
        if options.get("ellipsis_mask") or options.get("new_axis_mask"):
            self.refuse("with an ellipsis or a new axis is not supported")
        bounds = []
        for k, (start, end, stride) in enumerate(
            zip(self.integers(1), self.integers(2), self.integers(3), strict=True)
        ):
            first = None if _bit(options["begin_mask"], k) else start
            if _bit(options["shrink_axis_mask"], k):
                place = start % shape[k]
                bounds.append((place, place + 1, 1))
            else:
                found = slice(first, None if _bit(options["end_mask"], k) else end, stride).indices(shape[k])
                bounds.append(found if found[1] >= 0 else (found[0], -shape[k] - 1, found[2]))
        made = self._sliced(*([b[i] for b in bounds] for i in range(3)))
        return [self.reshaped(made, self.output().shape) if options["shrink_axis_mask"] else made]

    def _sliced(self, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]) -> str:
        lists = [
            self.listed(name, numbers)
            for name, numbers in (("starts", starts), ("ends", ends), ("axes", range(len(starts))), ("steps", steps))
        ]
        return str(self.node("Slice", [self.real(0), *lists]))

    def gather(self, operator: Operator) -> list[str]:
        if operator.options.get("batch_dims"):
            self.refuse("with batch_dims is not supported")
        return [self.node("Gather", [self.real(0), self.real(1)], axis=int(operator.options["axis"]))]

    def blocks(self, operator: Operator) -> list[str]:
        kind = "DepthToSpace" if operator.kind == "DEPTH_TO_SPACE" else "SpaceToDepth"
        made = self.node(kind, [self.image(0)], blocksize=int(operator.options["block_size"]))
        return [_Image(made)]

    def resize(self, operator: Operator) -> list[str]:
        """Nearest: floor(x * scale), of the pixel's centre with half_pixel_centers; rounded with align_corners."""
        linear = operator.kind == "RESIZE_BILINEAR"
        centres, corners = bool(operator.options.get("half_pixel_centers")), bool(operator.options.get("align_corners"))
        n, height, width, channels = self.output().shape
        made = self.node(
            "Resize",
            [self.image(0), "", "", self.listed("sizes", [n, channels, height, width])],
            mode="linear" if linear else "nearest",
            coordinate_transformation_mode="align_corners" if corners else "half_pixel" if centres else "asymmetric",
            nearest_mode="round_prefer_ceil" if corners or centres else "floor",
        )
        return [_Image(made)]


_NO_AXIS = Quantisation(np.ones((), np.float32), np.zeros((), np.int8))
_Rule = Callable[[_View, Operator], list[str]]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D"), _View.convolution),
    "TRANSPOSE_CONV": _View.transposed_convolution,
    "FULLY_CONNECTED": _View.connected,
    "BATCH_MATMUL": _View.product,
    **dict.fromkeys(("AVERAGE_POOL_2D", "MAX_POOL_2D"), _View.pool),
    **dict.fromkeys(_REDUCTIONS, _View.reduction),
    **dict.fromkeys(("ARG_MAX", "ARG_MIN"), _View.largest),
    **dict.fromkeys(_UNARY, _View.unary),
    **dict.fromkeys(("RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"), _View.bounded),
    **dict.fromkeys(_BINARY, _View.binary),
    "LEAKY_RELU": _View.leaky,
    "GELU": _View.gelu,
    "RSQRT": _View.reciprocal_root,
    **dict.fromkeys(("SQUARE", "SQUARED_DIFFERENCE"), _View.square),
    **dict.fromkeys(("SOFTMAX", "LOG_SOFTMAX"), _View.softmax),
    "L2_NORMALIZATION": _View.unit_length,
    "QUANTIZE": _View.quantise,
    "DEQUANTIZE": _View.dequantise,
    "CAST": _View.cast,
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "EXPAND_DIMS"), _View.reshape),
    "TRANSPOSE": _View.transpose,
    **dict.fromkeys(("PAD", "PADV2"), _View.pad),
    "CONCATENATION": _View.concatenation,
    "PACK": _View.pack,
    **dict.fromkeys(("SPLIT", "SPLIT_V", "UNPACK"), _View.split),
    "SLICE": _View.slice,
    "STRIDED_SLICE": _View.strided_slice,
    "GATHER": _View.gather,
    **dict.fromkeys(("DEPTH_TO_SPACE", "SPACE_TO_DEPTH"), _View.blocks),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"), _View.resize),
}


def _as_int32(numbers: Array) -> Array:
    """int64 biases (of 16-bit activations) as int32: DequantizeLinear takes no wider codes."""
    return numbers.astype(np.int32) if numbers.dtype == np.int64 else numbers


def _bit(mask: int, k: int) -> bool:
    return bool(int(mask) >> k & 1)
