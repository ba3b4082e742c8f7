"""The view of a .tflite file means what LiteRT's reference kernels compute: one operator at a time, codes against reals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from equivcheck.engines.tflite import TfliteEngine
from equivcheck.errors import UnsupportedModel
from equivcheck.judge import step_limit
from equivcheck.models.onnx.isolate import real_in_codes
from equivcheck.models.select import select
from equivcheck.models.tflite.cut import whole
from equivcheck.models.tflite.load import TfliteModel, tflite_from_bytes
from equivcheck.models.tflite.view import IMAGE_AXES
from equivcheck.truth import StepResults, specs_of
from tflite_graphs import TfliteGraph, feeds_of, small_net

Make = Callable[[TfliteGraph], object]
IMAGE = (1, 7, 8, 6)


def _conv(g: TfliteGraph) -> int:
    return g.conv(g.input((1, 9, 8, 3)), 5, stride=2, fusedActivationFunction=3)


def _dilated_valid(g: TfliteGraph) -> int:
    x = g.input((1, 9, 8, 3))
    w = g.weights((5, 3, 2, 3), 5, 0)
    return g.op(
        "CONV_2D",
        [x, w, g.bias(x, w)],
        (1, 5, 6, 5),
        0.2,
        0,
        padding=1,
        strideW=1,
        strideH=1,
        dilationHFactor=2,
        dilationWFactor=2,
    )


def _grouped(g: TfliteGraph) -> int:
    x = g.input((1, 6, 6, 8))
    w = g.weights((4, 3, 3, 4), 4, 0)
    return g.op("CONV_2D", [x, w, g.bias(x, w)], (1, 6, 6, 4), 0.3, 0, strideW=1, strideH=1)


def _conv_u8(g: TfliteGraph) -> int:
    x = g.input((1, 8, 8, 3), 0.02, 128, "uint8")
    w = g.weights((4, 3, 3, 3), 4, 0, "uint8")
    return g.op("CONV_2D", [x, w, g.bias(x, w)], (1, 4, 4, 4), 0.1, 100, "uint8", strideW=2, strideH=2)


def _depthwise(g: TfliteGraph) -> int:
    x = g.input((1, 7, 7, 4))
    w = g.weights((1, 3, 3, 8), 8, 3)
    return g.op(
        "DEPTHWISE_CONV_2D", [x, w, g.bias(x, w)], (1, 4, 4, 8), 0.1, 0, strideW=2, strideH=2, depthMultiplier=2
    )


def _transposed(padding: int, size: int) -> Make:
    def make(g: TfliteGraph) -> object:
        w = g.weights((4, 3, 3, 5), 4, 0)
        x = g.input((1, 5, 5, 5))
        shape = (1, size, size, 4)
        return g.op(
            "TRANSPOSE_CONV",
            [g.integers(*shape), w, x, g.bias(x, w)],
            shape,
            0.2,
            0,
            padding=padding,
            strideW=2,
            strideH=2,
        )

    return make


def _connected(shape: tuple[int, ...], out: tuple[int, ...], *, bias: bool = True, **options: object) -> Make:
    def make(g: TfliteGraph) -> object:
        x = g.input(shape)
        depth = int(np.prod(shape)) // int(np.prod(out[:-1]))
        w = g.weights((out[-1], depth), out[-1], 0)
        inputs = [x, w, g.bias(x, w) if bias else -1]
        return g.op("FULLY_CONNECTED", inputs, out, 0.3, 0, **options)

    return make


def _product(adj_x: bool, adj_y: bool) -> Make:
    def make(g: TfliteGraph) -> object:
        a, b = g.input((2, 4, 5) if not adj_x else (2, 5, 4)), g.input((2, 5, 3) if not adj_y else (2, 3, 5), 0.04)
        return g.op("BATCH_MATMUL", [a, b], (2, 4, 3), 0.3, 0, adjX=adj_x, adjY=adj_y)

    return make


def _binary(kind: str, *shapes: tuple[int, ...], scale: float = 0.09, same: bool = False, **options: object) -> Make:
    def make(g: TfliteGraph) -> object:
        scales = (0.05, 0.05) if same else (0.05, 0.03)
        inputs = [g.input(shape, s) for shape, s in zip(shapes, scales, strict=True)]
        return g.op(kind, inputs, np.broadcast_shapes(*shapes), 0.05 if same else scale, 3 if same else -4, **options)

    return make


def _with_constant(kind: str, shape: tuple[int, ...], scale: float = 0.03) -> Make:
    def make(g: TfliteGraph) -> object:
        numbers = g.random.integers(-128, 128, shape).astype(np.int8)
        return g.op(kind, [g.input(IMAGE), g.constant(numbers, scale, 5)], IMAGE, 0.08, 1)

    return make


def _pool(kind: str, padding: int) -> Make:
    def make(g: TfliteGraph) -> object:
        size = (4, 4) if padding == 0 else (3, 3)
        return g.op(
            kind, [g.input(IMAGE)], (1, *size, 6), padding=padding, strideW=2, strideH=2, filterWidth=3, filterHeight=3
        )

    return make


def _reduced(kind: str, axes: tuple[int, ...], keep: bool, scale: float = 0.05, zero: int = 3) -> Make:
    def make(g: TfliteGraph) -> object:
        kept = [1 if k in axes else n for k, n in enumerate(IMAGE) if keep or k not in axes]
        return g.op(kind, [g.input(IMAGE), g.integers(*axes)], kept, scale, zero, keepDims=keep)

    return make


def _one(kind: str, scale: float = 0.05, zero: int = 3, shape: tuple[int, ...] = IMAGE, **options: object) -> Make:
    return lambda g: g.op(kind, [g.input(shape)], shape, scale, zero, **options)


def _listed(kind: str, out: tuple[int, ...], *lists: tuple[int, ...], **options: object) -> Make:
    return lambda g: g.op(kind, [g.input(IMAGE), *(g.integers(*numbers) for numbers in lists)], out, **options)


def _padded(g: TfliteGraph) -> object:
    pads = g.constant(np.asarray([[0, 0], [1, 2], [0, 1], [2, 0]], np.int32))
    return g.op("PAD", [g.input(IMAGE), pads], (1, 10, 9, 8))


def _padded_with_a_value(g: TfliteGraph) -> object:
    pads = g.constant(np.asarray([[0, 0], [1, 2], [0, 1], [2, 0]], np.int32))
    return g.op("PADV2", [g.input(IMAGE), pads, g.constant(np.asarray([-70], np.int8), 0.05, 3)], (1, 10, 9, 8))


def _joined(axis: int) -> Make:
    def make(g: TfliteGraph) -> object:
        shape = [n * 2 if k == axis % 4 else n for k, n in enumerate(IMAGE)]
        return g.op("CONCATENATION", [g.input(IMAGE), g.input(IMAGE)], shape, axis=axis)

    return make


def _split(kind: str, outputs: int, out: tuple[int, ...], **options: object) -> Make:
    def make(g: TfliteGraph) -> object:
        x = g.input(IMAGE)
        inputs = {"SPLIT": [g.integers(3), x], "SPLIT_V": [x, g.integers(2, 2, 2), g.integers(3)], "UNPACK": [x]}[kind]
        return g.op(kind, inputs, out, outputs=outputs, **options)

    return make


def _strided(
    begin: tuple[int, ...], end: tuple[int, ...], stride: tuple[int, ...], out: tuple[int, ...], **masks: int
) -> Make:
    return _listed("STRIDED_SLICE", out, begin, end, stride, **masks)


def _resized(kind: str, height: int, width: int, **options: bool) -> Make:
    return lambda g: g.op(kind, [g.input(IMAGE), g.integers(height, width)], (1, height, width, 6), **options)


CASES: dict[str, Make] = {
    "conv, SAME, stride 2 on an odd and an even size, RELU6": _conv,
    "conv, VALID, dilated": _dilated_valid,
    "conv, grouped": _grouped,
    "conv, uint8 with a zero point of its weights": _conv_u8,
    "depthwise, multiplier 2": _depthwise,
    "transposed conv, SAME": _transposed(0, 10),
    "transposed conv, VALID": _transposed(1, 11),
    "fully connected": _connected((3, 7), (3, 4)),
    "fully connected, RELU, no bias": _connected((3, 7), (3, 4), bias=False, fusedActivationFunction=1),
    "fully connected, flattens": _connected((1, 2, 3, 4), (1, 5)),
    "fully connected, keeps dimensions": _connected((1, 3, 7), (1, 3, 4), keepNumDims=True),
    "product": _product(False, False),
    "product of transposed": _product(True, True),
    "add": _binary("ADD", IMAGE, IMAGE),
    "add, one number a channel": _binary("ADD", IMAGE, (1, 1, 1, 6), fusedActivationFunction=1),
    "add, a vector": _with_constant("ADD", (6,)),
    "add, a scalar": _with_constant("ADD", ()),
    "sub": _binary("SUB", IMAGE, (1, 7, 8, 1)),
    "mul, RELU6": _binary("MUL", IMAGE, IMAGE, scale=0.06, fusedActivationFunction=3),
    "mul, an image": _with_constant("MUL", IMAGE),
    "maximum": _binary("MAXIMUM", IMAGE, IMAGE, same=True),
    "minimum": _binary("MINIMUM", IMAGE, IMAGE, same=True),
    "prelu": _with_constant("PRELU", (1, 1, 6)),
    "average pool, SAME": _pool("AVERAGE_POOL_2D", 0),
    "average pool, VALID": _pool("AVERAGE_POOL_2D", 1),
    "max pool, SAME": _pool("MAX_POOL_2D", 0),
    "mean over the image, kept": _reduced("MEAN", (1, 2), True, 0.01, 0),
    "mean over the image": _reduced("MEAN", (1, 2), False, 0.01, 0),
    "mean over channels": _reduced("MEAN", (3,), False, 0.02, 0),
    "sum": _reduced("SUM", (1,), False, 0.2, 0),
    "largest": _reduced("REDUCE_MAX", (1, 2), False),
    "smallest": _reduced("REDUCE_MIN", (3,), True),
    "logistic": _one("LOGISTIC", 1 / 256, -128),
    "tanh": _one("TANH", 1 / 128, 0),
    "hard swish": _one("HARD_SWISH", 0.04, -20),
    "relu": _one("RELU", 0.03, -128),
    "relu6": _one("RELU6", 6 / 255, -128),
    "relu -1 to 1": _one("RELU_N1_TO_1", 0.05, 3),
    "leaky relu": _one("LEAKY_RELU", 0.04, -40, alpha=0.1),
    "gelu": _one("GELU", 0.03, -100),
    "exp": _one("EXP", 2.0, -128),
    "softmax": _one("SOFTMAX", 1 / 256, -128, (4, 9), beta=1.0),
    "softmax, beta 2, of an image": _one("SOFTMAX", 1 / 256, -128, beta=2.0),
    "log softmax": _one("LOG_SOFTMAX", 16 / 256, 127, (4, 9)),
    "quantise into another scale": _one("QUANTIZE", 0.07, -9),
    "concatenation of channels": _joined(3),
    "concatenation of rows": _joined(1),
    "pad": _padded,
    "pad with a value": _padded_with_a_value,
    "transpose": _listed("TRANSPOSE", (6, 7, 1, 8), (3, 1, 0, 2)),
    "gather": _listed("GATHER", (1, 7, 3, 6), (7, 0, 2), axis=2),
    "slice": _listed("SLICE", (1, 3, 8, 4), (0, 2, 0, 1), (1, 3, -1, 4)),
    "strided slice": _strided((0, 1, 0, 0), (1, 7, 8, 5), (1, 2, 3, 1), (1, 3, 3, 5)),
    "strided slice, masks": _strided((0, 1, 3, 2), (1, 3, 5, 4), (1, 1, 1, 1), (1, 3, 2, 4), beginMask=0b1010),
    "strided slice, backwards and a dropped axis": _strided(
        (0, 6, 2, 0), (1, 0, 3, 6), (1, -2, 1, 1), (1, 4, 6), endMask=0b0010, shrinkAxisMask=0b0100
    ),
    "split": _split("SPLIT", 3, (1, 7, 8, 2), numSplits=3),
    "split, sizes given": _split("SPLIT_V", 3, (1, 7, 8, 2), numSplits=3),
    "unpack": _split("UNPACK", 7, (1, 8, 6), num=7, axis=1),
    "pack": lambda g: g.op("PACK", [g.input((2, 3)), g.input((2, 3))], (2, 2, 3), valuesCount=2, axis=1),
    "reshape": _listed("RESHAPE", (1, 56, 6), (1, 56, 6)),
    "squeeze": lambda g: g.op("SQUEEZE", [g.input(IMAGE)], (7, 8, 6), squeezeDims=[0]),
    "expand": lambda g: g.op("EXPAND_DIMS", [g.input((3, 4)), g.integers(1)], (3, 1, 4)),
    "depth to space": lambda g: g.op("DEPTH_TO_SPACE", [g.input((1, 3, 2, 8))], (1, 6, 4, 2), blockSize=2),
    "space to depth": lambda g: g.op("SPACE_TO_DEPTH", [g.input((1, 6, 4, 2))], (1, 3, 2, 8), blockSize=2),
    **{
        f"{kind}, {height}x{width}, {','.join(options) or 'plain'}": _resized(kind, height, width, **options)
        for kind in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")
        for height, width in ((14, 16), (5, 3))
        for options in ({}, {"alignCorners": True}, {"halfPixelCenters": True})
    },
}


def _between_pools(g: TfliteGraph, made: list[int]) -> list[int]:
    """Put an identity MAX_POOL_2D before every input and behind every output of rank 4: what lies between are images."""
    one = {"padding": 1, "strideW": 1, "strideH": 1, "filterWidth": 1, "filterHeight": 1}
    (operator,) = g.graph.operators
    for k in list(g.graph.inputs):
        tensor = g.graph.tensors[k]
        if len(tensor.shape) == 4:
            grid = tensor.quantization.scale[0], tensor.quantization.zeroPoint[0]
            pooled = g.op("MAX_POOL_2D", [k], tensor.shape, *grid, dtype=_dtype(tensor), **one)
            operator.inputs = [pooled if read == k else read for read in operator.inputs]
    g.graph.operators.append(g.graph.operators.pop(0))
    ends = []
    for k in made:
        tensor = g.graph.tensors[k]
        grid = (tensor.quantization.scale[0], tensor.quantization.zeroPoint[0])
        ends.append(
            g.op("MAX_POOL_2D", [k], tensor.shape, *grid, dtype=_dtype(tensor), **one) if len(tensor.shape) == 4 else k
        )
    return ends


def _dtype(tensor: object) -> str:
    return {9: "int8", 3: "uint8"}[tensor.type]


# LiteRT 2.3.0's reference kernel of SUM into another scale is 192 LSB off its own built-in one, which is right.
KERNELS = {"sum": "builtin"}
# The integer kernel of RESIZE_BILINEAR has coordinates of 10 fractional bits, from a ratio rounded to them: at the last of n
# places a coordinate is n / 2 units of 2^-10 off, and across one place the codes may differ by 255.
COORDINATES = {
    case: 255 * (height + width) / 2 / 1024
    for case, height, width in (
        ("RESIZE_BILINEAR, 14x16, alignCorners", 14, 16),
        ("RESIZE_BILINEAR, 5x3, alignCorners", 5, 3),
    )
}


def _run(model: TfliteModel, feeds: dict[str, np.ndarray], kernels: str = "reference") -> dict[str, np.ndarray]:
    """Every stored value by LiteRT's reference kernels, in the order of the graph."""
    engine, source = TfliteEngine(), model.flatbuffer
    names = {source.tensors[k].name: k for op in source.operators for k in op.outputs}
    options = {"kernels": kernels, "preserve": True, "inputs": whole(source).inputs, "outputs": names}
    engine.load(source.content, options)
    got = engine.run(feeds)
    images = {name: array.transpose(IMAGE_AXES) for name, array in got.items() if names[name] in model.images}
    return {**feeds, **got, **images}


def assert_means_the_same(model: TfliteModel, kernels: str = "reference", more: float = 0.0) -> None:
    values = _run(model, feeds_of(model.flatbuffer), kernels)
    stored = {name: values[name] for name in model.graph.stored}
    results = StepResults(model, specs_of(stored)).evaluate(stored)
    for name in model.graph.stored[len(model.graph.inputs) :]:
        codes = stored[name]
        assert model.graph.values[name].shape == codes.shape, name
        limits = np.iinfo(codes.dtype)
        real = np.clip(real_in_codes(model.graph, name, results[name]), limits.min, limits.max)
        excess = np.max(np.abs(codes - real)) - 0.5 - more
        assert excess <= float(np.max(step_limit(model.graph, name, {}).limits(1))), (name, excess)
        assert np.unique(codes).size > 1, "a constant result shows nothing"


@pytest.mark.parametrize("pooled", [False, True], ids=["alone", "between images"])
@pytest.mark.parametrize("case", CASES)
def test_an_operator_means_what_the_reference_kernel_computes(case: str, pooled: bool) -> None:
    g = TfliteGraph()
    made = CASES[case](g)
    ends = made if isinstance(made, list) else [made]
    if pooled:
        ends = _between_pools(g, ends)
    model = tflite_from_bytes(g.content(*ends), "one.tflite")
    onnx.checker.check_model(model.proto, full_check=True)
    assert len(model.graph.steps) == len(g.graph.operators)
    assert_means_the_same(model, KERNELS.get(case, "reference"), COORDINATES.get(case, 0.0))


def test_a_net_of_several_operators_has_one_step_for_each_named_as_tflite_does() -> None:
    model = tflite_from_bytes(small_net(), "net.tflite")
    assert_means_the_same(model)
    kinds = [model.graph.main_node(step).op_type for step in model.graph.steps]
    assert kinds == [op.kind for op in model.flatbuffer.operators]
    assert [step.op_type for step in model.graph.steps] == [
        "Conv",
        "Conv",
        "Add",
        "Mul",
        "MaxPool",
        "GlobalAveragePool",
        "Gemm",
        "Softmax",
    ]


@pytest.mark.parametrize(
    ("selector", "step"),
    [
        ("MEAN", 6),
        ("GlobalAveragePool", 6),
        ("CONV_2D", 1),
        ("op:SOFTMAX", 8),
        ("Conv#2", 2),
        ("logits", 7),
        ("ADD:2", 3),
    ],
)
def test_operators_are_selected_by_tflites_names_and_by_onnxs(selector: str, step: int) -> None:
    graph = tflite_from_bytes(small_net(), "net.tflite").graph
    (point,) = select(graph, [selector], {})
    assert point.step is graph.steps[step - 1]


def test_a_float_input_is_quantised_and_a_float_output_stands_for_its_codes() -> None:
    g = TfliteGraph()
    x = g.op("QUANTIZE", [g.input((1, 4, 4, 3), dtype="float32", name="x")], (1, 4, 4, 3))
    y = g.op("DEQUANTIZE", [g.conv(x, 4)], (1, 4, 4, 4), dtype="float32", name="y")
    model = tflite_from_bytes(g.content(y), "f.tflite")
    assert [step.op_type for step in model.graph.steps] == ["QuantizeLinear", "Conv"]
    assert model.graph.store("y") == model.graph.steps[-1].outputs[0]
    feeds = feeds_of(model.flatbuffer)
    values = _run(model, feeds)
    stored = {name: values[name] for name in model.graph.stored}
    results = StepResults(model, specs_of(stored)).evaluate(stored)
    quantised, convolved = model.graph.stored[1:]
    real = np.clip(real_in_codes(model.graph, quantised, results[quantised]), -128, 127)
    assert np.max(np.abs(values[quantised] - real)) <= 0.5 + 1e-4
    real = np.clip(real_in_codes(model.graph, convolved, results[convolved]), -128, 127)
    assert np.max(np.abs(values[convolved] - real)) <= 0.75


def test_weights_that_an_operator_dequantises_are_constants() -> None:
    """What float16 and weight-only files look like: DEQUANTIZE of a constant, then an operator in floats."""
    g = TfliteGraph()
    x = g.input((2, 3), dtype="float32", name="x")
    half = g.constant(g.random.normal(size=(4, 3)).astype(np.float16))
    weight = g.op("DEQUANTIZE", [half], (4, 3), dtype="float32")
    model = tflite_from_bytes(g.content(g.op("FULLY_CONNECTED", [x, weight, -1], (2, 4), dtype="float32")), "w.tflite")
    assert [step.op_type for step in model.graph.steps] == ["Gemm"]
    feeds = feeds_of(model.flatbuffer)
    values = _run(model, feeds)
    results = StepResults(model, specs_of({n: values[n] for n in model.graph.stored})).evaluate(values)
    (output,) = model.graph.outputs
    np.testing.assert_allclose(results[output], values[output], rtol=1e-5, atol=1e-5)


def test_the_index_of_the_largest_is_an_integer_output() -> None:
    g = TfliteGraph()
    made = g.op("ARG_MAX", [g.input((3, 9)), g.integers(1)], (3,), dtype="int32", outputType=2)
    model = tflite_from_bytes(g.content(made), "a.tflite")
    values = _run(model, feeds_of(model.flatbuffer))
    results = StepResults(model, specs_of(values)).evaluate(values)
    (output,) = model.graph.outputs
    np.testing.assert_array_equal(results[output], values[output])


def _unsupported() -> dict[str, tuple[Make, str]]:
    def hybrid(g: TfliteGraph) -> object:
        x = g.input((2, 3), dtype="float32")
        return g.op("FULLY_CONNECTED", [x, g.weights((4, 3), 1, 0), -1], (2, 4), dtype="float32")

    def kept(g: TfliteGraph) -> object:
        x = g.tensor(IMAGE, scale=0.05)
        g.graph.tensors[x].isVariable = True
        return g.op("LOGISTIC", [x], IMAGE, 1 / 256, -128)

    def at_run_time(g: TfliteGraph) -> object:
        axes = g.tensor((1,), "int32")
        g.graph.inputs.append(axes)
        return g.op("MEAN", [g.input(IMAGE), axes], (1, 7, 8), keepDims=False)

    return {
        "no rule": (lambda g: g.op("TOPK_V2", [g.input((2, 5)), g.integers(2)], (2, 2), outputs=2)[0], "TOPK_V2"),
        "state": (lambda g: g.op("VAR_HANDLE", [], (), dtype="float32"), "VAR_HANDLE"),
        "dynamic range": (hybrid, "FULLY_CONNECTED"),
        "axes only at run time": (at_run_time, "MEAN"),
        "a tensor that outlives the run": (kept, "LOGISTIC"),
        "an activation the schema does not fuse": (_binary("ADD", IMAGE, IMAGE, fusedActivationFunction=4), "ADD"),
    }


@pytest.mark.parametrize("case", _unsupported())
def test_what_has_no_meaning_here_is_refused_with_the_operators_name(case: str) -> None:
    make, kind = _unsupported()[case]
    g = TfliteGraph()
    with pytest.raises(UnsupportedModel, match=kind) as caught:
        tflite_from_bytes(g.content(make(g)), "odd.tflite")
    assert "odd.tflite" in str(caught.value)
    assert caught.value.asked == kind
