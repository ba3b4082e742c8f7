"""One random model for each operator, by name: what the profiles are proved on."""

from collections.abc import Callable

import numpy as np

from vnpu.graphs import Built, Q, Weight, quantised_model

LOWEST = {"uint8": 0, "int8": -128}


def random_q(rng, dtype, low=1e-3, high=0.2):
    """A scale spread evenly over its logarithm and any zero point."""
    zero = int(rng.integers(LOWEST[dtype], LOWEST[dtype] + 256))
    return Q(float(np.exp(rng.uniform(np.log(low), np.log(high)))), zero, dtype)


def conv(rng, dtype, weights="int8", bias=True, after=(), out=None, rank=2):
    group = int(rng.choice([1, 1, 2, 4]))
    per = int(rng.choice([1, 4]))
    channels, made = per * group, group * int(rng.integers(1, 5))
    x, scales = random_q(rng, dtype), rng.uniform(0.001, 0.02, made).astype(np.float32)
    kernel = [int(rng.integers(1, 4)) for _ in range(rank)]
    low, high = (-128, 128) if weights == "int8" else (0, 256)
    w = rng.integers(low, high, (made, per, *kernel)).astype(weights)
    zero = np.full(made, 0 if weights == "int8" else rng.integers(100, 150))
    inputs = ["x", Weight(w, scales, zero, 0)]
    if bias:
        inputs.append(Weight(rng.integers(-5000, 5000, made).astype(np.int32), np.float32(x.scale) * scales, 0, 0))
    attributes = {
        "group": group,
        "pads": [int(v) for v in rng.integers(0, 2, 2 * rank)],
        "strides": [int(v) for v in rng.integers(1, 3, rank)],
        "dilations": [int(v) for v in rng.integers(1, 3, rank)],
    }
    nodes = [("Conv", inputs, ["y"], attributes), *after]
    last = nodes[-1][2][0]
    shape = (1, channels, *(rng.integers(7, 10, rank).tolist()))
    return quantised_model(nodes, {last: out or random_q(rng, dtype, 0.02, 1)}, {"x": shape}, {"x": x})


def conv_relu(rng, dtype):
    out = Q(float(rng.uniform(0.02, 1)), LOWEST[dtype], dtype)
    return conv(rng, dtype, after=[("Relu", ["y"], ["z"], {})], out=out)


def conv_clip(rng, dtype):
    clip = ("Clip", ["y", np.float32(0), np.float32(6)], ["z"], {})
    return conv(rng, dtype, after=[clip], out=Q(6 / 255, LOWEST[dtype], dtype))


def conv_transpose(rng, dtype):
    x, scales = random_q(rng, dtype), rng.uniform(0.001, 0.02, 6).astype(np.float32)
    inputs = [
        "x",
        Weight(rng.integers(-128, 128, (4, 6, 3, 3)).astype(np.int8), scales, 0, 1),
        Weight(rng.integers(-5000, 5000, 6).astype(np.int32), np.float32(x.scale) * scales, 0, 0),
    ]
    nodes = [("ConvTranspose", inputs, ["y"], {"strides": [2, 2], "pads": [1, 1, 0, 1]})]
    return quantised_model(nodes, {"y": random_q(rng, dtype, 0.02, 1)}, {"x": (1, 4, 7, 8)}, {"x": x})


def gemm(rng, dtype, op_type="Gemm", per_channel=True, own_bias=1.0, transposed=False):
    terms, columns = int(rng.integers(1, 40)), int(rng.integers(1, 20))
    x = random_q(rng, dtype)
    scale = rng.uniform(0.001, 0.02, columns if per_channel else ()).astype(np.float32)
    w = rng.integers(-128, 128, (columns, terms) if transposed else (terms, columns)).astype(np.int8)
    weight = Weight(w, scale, 0, (0 if transposed else 1) if per_channel else None)
    bias = Weight(
        rng.integers(-5000, 5000, columns).astype(np.int32),
        np.float32(x.scale) * scale * np.float32(own_bias),
        0,
        0 if per_channel else None,
    )
    nodes = {
        "Gemm": [("Gemm", ["x", weight, bias], ["y"], {"transB": int(transposed)})],
        "MatMul": [("MatMul", ["x", weight], ["y"], {})],
        "MatMul+Add": [("MatMul", ["x", weight], ["m"], {}), ("Add", ["m", bias], ["y"], {})],
    }[op_type]
    return quantised_model(nodes, {"y": random_q(rng, dtype, 0.02, 1)}, {"x": (5, terms)}, {"x": x})


def product(rng, dtype):
    terms = int(rng.integers(1, 40))
    shapes = {"a": (2, 5, terms), "b": (2, terms, 4)}
    out = {"y": random_q(rng, dtype, 0.02, 1)}
    return quantised_model([("MatMul", ["a", "b"], ["y"], {})], out, shapes, {n: random_q(rng, dtype) for n in shapes})


def binary(op_type, b=(2, 37, 40), a=(2, 37, 40), relu=False) -> Callable[..., Built]:
    def make(rng, dtype):
        nodes = [(op_type, ["a", "b"], ["y"], {})]
        out = random_q(rng, dtype, 0.01, 0.2)
        if relu:
            nodes.append(("Relu", ["y"], ["z"], {}))
            out = Q(out.scale, LOWEST[dtype], dtype)
        quantisation = {"a": random_q(rng, dtype), "b": random_q(rng, dtype)}
        return quantised_model(nodes, {nodes[-1][2][0]: out}, {"a": a, "b": b}, quantisation)

    return make


def unary(op_type, attributes=None, shape=(3, 400), extra=(), out=None, same=False) -> Callable[..., Built]:
    """`out`: scale of an output that starts at the lowest code; `same`: output quantised as the input."""

    def make(rng, dtype):
        x = random_q(rng, dtype)
        result = Q(out, LOWEST[dtype], dtype) if out else x if same else random_q(rng, dtype, 0.01, 0.2)
        return quantised_model(
            [(op_type, ["x", *extra], ["y"], attributes or {})], {"y": result}, {"x": shape}, {"x": x}
        )

    return make


def chain(rng, dtype):
    """x * HardSigmoid(x) / 3, between one DQ and one Q."""
    nodes = [
        ("HardSigmoid", ["x"], ["h"], {"alpha": 1 / 6, "beta": 0.5}),
        ("Mul", ["x", "h"], ["m"], {}),
        ("Div", ["m", np.float32(3)], ["y"], {}),
    ]
    return quantised_model(nodes, {"y": random_q(rng, dtype, 0.01, 0.1)}, {"x": (3, 400)}, {"x": random_q(rng, dtype)})


def concat(rng, dtype):
    shapes = {"a": (2, 3, 40), "b": (2, 4, 40), "c": (2, 1, 40)}
    nodes = [("Concat", list(shapes), ["y"], {"axis": 1})]
    return quantised_model(nodes, {"y": random_q(rng, dtype)}, shapes, {n: random_q(rng, dtype) for n in shapes})


def split(rng, dtype):
    x = random_q(rng, dtype)
    nodes = [("Split", ["x"], ["p", "r"], {"axis": 1, "num_outputs": 2})]
    return quantised_model(nodes, {"p": x, "r": x}, {"x": (2, 5, 6)}, {"x": x})


def requantise(rng, dtype):
    return quantised_model([], {"x": random_q(rng, dtype)}, {"x": (3, 400)}, {"x": random_q(rng, dtype)})


def resize(
    mode="linear", coordinates="half_pixel", nearest="round_prefer_floor", factors=None, sizes=None, roi=(), same=True
):
    """A (1, 3, 9, 10) image along its last two axes, by factors or to sizes."""
    given = [np.asarray(roi, np.float32)]
    if sizes is None:
        given.append(np.asarray([1, 1, *(factors or (2, 2))], np.float32))
    else:
        given += ["", np.asarray([1, 3, *sizes], np.int64)]
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
    return unary("Resize", attributes, (1, 3, 9, 10), given, same=same)


def prelu(rng, dtype):
    slope = Weight(rng.integers(-128, 128, (5, 1, 1)).astype(np.int8), float(rng.uniform(0.001, 0.02)), 0)
    return quantised_model(
        [("PRelu", ["x", slope], ["y"], {})], {"y": random_q(rng, dtype)}, {"x": IMAGE}, {"x": random_q(rng, dtype)}
    )


def pool_and_add(rng, dtype):
    nodes = [
        ("AveragePool", ["x"], ["p"], {"kernel_shape": [3, 3]}),
        ("Add", ["p", rng.normal(size=(5, 1, 1)).astype(np.float32)], ["y"], {}),
    ]
    return quantised_model(nodes, {"y": random_q(rng, dtype)}, {"x": IMAGE}, {"x": random_q(rng, dtype)})


def two_of_one(rng, dtype):
    """Softmax(a) * b: an island of two quantised values."""
    nodes = [("Softmax", ["a"], ["s"], {"axis": -1}), ("Mul", ["s", "b"], ["y"], {})]
    shapes = {"a": (3, 50), "b": (3, 50)}
    return quantised_model(
        nodes, {"y": random_q(rng, dtype, 1e-3, 0.01)}, shapes, {n: random_q(rng, dtype) for n in shapes}
    )


def moved(*before, operator=("Sigmoid", ["{}"], {}), behind=()):
    """Moves before and behind an operator, all between one DQ and one Q."""

    def make(rng, dtype):
        source, nodes = "x", []
        for k, (op_type, inputs, attributes) in enumerate((*before, operator, *behind)):
            names = [source if isinstance(given, str) and given == "{}" else given for given in inputs]
            source = f"v{k}"
            nodes.append((op_type, names, [source], attributes))
        return quantised_model(nodes, {source: random_q(rng, dtype)}, {"x": IMAGE}, {"x": random_q(rng, dtype)})

    return make


def conv_and_pool(rng, dtype):
    return conv(rng, dtype, after=[("MaxPool", ["y"], ["z"], {"kernel_shape": [2, 2], "strides": [2, 2]})])


WINDOWS = {
    "plain": {"kernel_shape": [3, 3]},
    "padded": {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]},
    "counting pads": {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "count_include_pad": 1},
    "ceil": {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    "same": {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
}
IMAGE = (2, 5, 10, 11)
COORDINATE_MODES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric", "align_corners")
NEAREST_MODES = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def pool(op_type, window):
    attributes = {k: v for k, v in WINDOWS[window].items() if op_type == "AveragePool" or k != "count_include_pad"}
    return unary(op_type, attributes, IMAGE)


# operator as the proofs name it -> {what is special: model maker}
CASES: dict[str, dict[str, Callable[..., Built]]] = {
    "Conv": {
        "": conv,
        "no bias": lambda r, d: conv(r, d, bias=False),
        "u8 weights": lambda r, d: conv(r, d, weights="uint8"),
        "1-d": lambda r, d: conv(r, d, rank=1),
        "3-d": lambda r, d: conv(r, d, rank=3),
        "Relu": conv_relu,
        "Clip": conv_clip,
    },
    "ConvTranspose": {"": conv_transpose},
    "Gemm": {
        "": gemm,
        "per tensor": lambda r, d: gemm(r, d, per_channel=False),
        "transB": lambda r, d: gemm(r, d, transposed=True),
    },
    "MatMul": {
        "": lambda r, d: gemm(r, d, "MatMul"),
        "per tensor": lambda r, d: gemm(r, d, "MatMul", per_channel=False),
        "bias": lambda r, d: gemm(r, d, "MatMul+Add", per_channel=False),
        "activations": product,
    },
    **{
        kind: {
            "": binary(kind),
            "Relu": binary(kind, relu=True),
            **{f"b {b}": binary(kind, b) for b in ((1,), (2, 37, 1), (1, 37, 1), (37, 40), (1, 1, 40))},
            "a scalar": binary(kind, a=(2, 37, 1)),
        }
        for kind in ("Add", "Sub", "Mul", "Div", "Max", "Min")
    },
    "AveragePool": {name: pool("AveragePool", name) for name in WINDOWS},
    "MaxPool": {name: pool("MaxPool", name) for name in WINDOWS if name != "counting pads"},
    "GlobalAveragePool": {
        "": unary("GlobalAveragePool", shape=(2, 33, 7, 9)),
        "1-d": unary("GlobalAveragePool", shape=(2, 33, 7)),
    },
    "ReduceMean": {
        "2, 3": unary("ReduceMean", shape=(2, 33, 7, 9), extra=(np.array([2, 3]),)),
        "-1": unary("ReduceMean", shape=(2, 33, 79), extra=(np.array([-1]),)),
        "dropped": unary("ReduceMean", {"keepdims": 0}, (2, 33, 7, 9), (np.array([2, 3]),)),
    },
    **{
        kind: {
            "2, 3": unary(kind, reduced, IMAGE, axes),
            "dropped": unary(kind, {**reduced, "keepdims": 0}, IMAGE, axes),
            "same": unary(kind, reduced, IMAGE, axes, same=True),
            "all": unary(kind, shape=IMAGE),
        }
        for kind in ("ReduceSum", "ReduceMax", "ReduceMin")
        for reduced, axes in [({}, (np.array([2, 3]),))]
    },
    "GlobalMaxPool": {"": unary("GlobalMaxPool", shape=IMAGE), "same": unary("GlobalMaxPool", shape=IMAGE, same=True)},
    "Resize": {
        **{
            f"{mode} {coordinates}{' rescaled' * (not same)}": resize(mode, coordinates, sizes=(13, 17), same=same)
            for mode in ("linear", "nearest")
            for coordinates in COORDINATE_MODES
            for same in (True, False)
        },
        **{f"nearest {n}": resize("nearest", "half_pixel", n, sizes=(13, 4)) for n in NEAREST_MODES},
        **{f"nearest asymmetric {n}": resize("nearest", "asymmetric", n, (2, 3)) for n in NEAREST_MODES},
        **{f"linear by {f}": resize(factors=f) for f in ((2, 2), (1.5, 0.7), (1, 3))},
        "crop": resize("linear", "tf_crop_and_resize", sizes=(6, 7), roi=(0, 0, 0.1, -0.2, 1, 1, 0.8, 0.9), same=False),
        "crop nearest": resize("nearest", "tf_crop_and_resize", sizes=(6, 7), roi=(0, 0, 0.1, 0.2, 1, 1, 0.8, 1.2)),
    },
    "PRelu": {"": prelu},
    "LogSoftmax": {
        "": unary("LogSoftmax", {"axis": -1}, (7, 50)),
        "axis 1": unary("LogSoftmax", {"axis": 1}, (2, 11, 3, 4)),
    },
    "LpNormalization": {
        "": unary("LpNormalization", {"axis": 1}, (7, 50)),
        "p 1": unary("LpNormalization", {"axis": 1, "p": 1}, (7, 50)),
    },
    "AveragePool+Add": {"": pool_and_add},
    "Softmax+Mul": {"": two_of_one},
    "Pow": {"2": unary("Pow", extra=(np.float32(2),)), "0.5": unary("Pow", extra=(np.float32(0.5),))},
    "DepthToSpace": {
        mode: unary("DepthToSpace", {"blocksize": 2, "mode": mode}, (2, 8, 3, 5), same=True) for mode in ("DCR", "CRD")
    },
    "SpaceToDepth": {"": unary("SpaceToDepth", {"blocksize": 2}, (2, 3, 6, 4), same=True)},
    "Gather": {"": unary("Gather", {"axis": 1}, IMAGE, (np.array([[3, 0], [-1, 2]]),), same=True)},
    "Tile": {"": unary("Tile", shape=IMAGE, extra=(np.array([1, 2, 1, 3]),), same=True)},
    "Expand": {"": unary("Expand", shape=(5, 1, 3), extra=(np.array([2, 1, 4, 1]),), same=True)},
    "Sigmoid+MaxPool": {"": moved(behind=[("MaxPool", ["{}"], {"kernel_shape": [2, 2]})])},
    "Transpose+Sigmoid+Reshape": {
        "": moved(("Transpose", ["{}"], {"perm": [0, 2, 3, 1]}), behind=[("Reshape", ["{}", np.array([-1, 5])], {})])
    },
    "Conv+MaxPool": {"": conv_and_pool},
    "Softmax": {
        "rows": unary("Softmax", {"axis": -1}, (7, 50), out=1 / 256),
        "1/255": unary("Softmax", {"axis": -1}, (7, 50), out=1 / 255),
        "long": unary("Softmax", {"axis": -1}, (3, 1000), out=1 / 256),
        "axis 1": unary("Softmax", {"axis": 1}, (2, 11, 3, 4)),
    },
    **{
        kind: {"": unary(kind)}
        for kind in (
            "Sigmoid",
            "Tanh",
            "LeakyRelu",
            "Relu",
            "HardSigmoid",
            "HardSwish",
            "Exp",
            "Elu",
            "Gelu",
            "Softplus",
            "Erf",
        )
    },
    "Sqrt": {"": unary("Sqrt")},
    "Clip": {"": unary("Clip", extra=(np.float32(-0.5), np.float32(1.5)))},
    "HardSigmoid+Mul+Div": {"": chain},
    "Concat": {"": concat},
    "Split": {"": split},
    "Pad": {
        "": unary("Pad", shape=IMAGE, extra=(np.array([0, 0, 1, 2, 0, 0, 0, 1]),)),
        "same": unary("Pad", shape=IMAGE, extra=(np.array([0, 0, 1, 2, 0, 0, 0, 1]),), same=True),
        "value": unary("Pad", shape=IMAGE, extra=(np.array([0, 0, 1, 2, 0, 0, 0, 1]), np.float32(0.7))),
    },
    "Transpose": {
        "": unary("Transpose", {"perm": [0, 2, 3, 1]}, IMAGE),
        "same": unary("Transpose", {"perm": [0, 2, 3, 1]}, IMAGE, same=True),
    },
    "Reshape": {"same": unary("Reshape", shape=IMAGE, extra=(np.array([2, 0, -1]),), same=True)},
    "Slice": {"same": unary("Slice", shape=IMAGE, extra=(np.array([1]), np.array([-1]), np.array([2])), same=True)},
    "QuantizeLinear": {"": requantise},
}
