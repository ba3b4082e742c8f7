"""What the IR's operators mean, by other means than an engine: rational numbers, laws, and the reasons of a fallback."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equivcheck.vnpu import resize
from equivcheck.vnpu.ir import Chain, Codes, Island, Operand, Resize
from equivcheck.vnpu.moves import move
from vnpu.cases import CASES, IMAGE, LOWEST, conv, moved, random_q
from vnpu.cases import resize as resized
from vnpu.graphs import Q, Weight, compiled, quantised_model, random_codes, run_ort

# -- exact, in rational numbers ------------------------------------------------------------------------------------------


def run(built, profile="exact", seed=0):
    rng = np.random.default_rng(seed)
    feeds = {name: q.float_of(random_codes(rng, q, shape)) for name, q, shape in built.inputs}
    program = compiled(built.graph, profile)
    return program, program.run(feeds)


def rational(q: Q, codes):
    scale = Fraction(float(np.float32(q.scale)))
    return np.vectorize(lambda code: (int(code) - q.zero) * scale, otypes=[object])(codes)


def nearest_codes(real, q: Q):
    """round() of a Fraction is half-even."""
    limits, scale = np.iinfo(q.dtype), Fraction(float(np.float32(q.scale)))
    return np.vectorize(lambda r: min(max(round(r / scale) + q.zero, limits.min), limits.max))(real)


def weights_of(size, length):
    """Half-pixel linear interpolation as exact weights (length x size)."""
    found = np.full((length, size), Fraction(0), object)
    for i in range(length):
        place = min(max((i + Fraction(1, 2)) * size / length - Fraction(1, 2), Fraction(0)), Fraction(size - 1))
        lower = min(int(place), size - 2)
        found[i, lower] += 1 - (place - lower)
        found[i, lower + 1] += place - lower
    return found


def made_by(kind, reals):
    x = reals[0]
    if kind in ("Add", "Sub", "Mul", "Max", "Min"):
        functions = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum}
        return functions[kind](*reals)
    if kind == "AveragePool":
        windows = [x[:, :, i : i + 2, j : j + 3] for i, j in product(range(3), range(2))]
        return np.stack([w.sum(axis=(2, 3)) / 6 for w in windows], -1).reshape(*x.shape[:2], 3, 2)
    if kind == "ReduceSum":
        return x.sum(axis=(2, 3), keepdims=True)
    if kind == "GlobalAveragePool":
        return x.sum(axis=(2, 3), keepdims=True) / (x.shape[2] * x.shape[3])
    along = np.tensordot(weights_of(x.shape[2], 7), x, (1, 2))  # (7, n, c, w)
    return np.tensordot(along, weights_of(x.shape[3], 5), (3, 1)).transpose(1, 2, 0, 3)


ATTRIBUTES = {
    "AveragePool": ({"kernel_shape": [2, 3]}, []),
    "ReduceSum": ({}, [np.array([2, 3])]),
    "Resize": ({"mode": "linear"}, [np.zeros(0, np.float32), np.zeros(0, np.float32), np.array([1, 2, 7, 5])]),
}


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(
    "kind", ["Add", "Sub", "Mul", "Max", "Min", "AveragePool", "ReduceSum", "GlobalAveragePool", "Resize"]
)
def test_exact_is_the_nearest_code_of_the_rational_number(kind, dtype):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        names = ["a", "b"] if kind in ("Add", "Sub", "Mul", "Max", "Min") else ["a"]
        quantisation, out = {name: random_q(rng, dtype) for name in names}, random_q(rng, dtype)
        attributes, extra = ATTRIBUTES.get(kind, ({}, []))
        nodes = [(kind, [*names, *extra], ["y"], attributes)]
        built = quantised_model(nodes, {"y": out}, dict.fromkeys(names, (1, 2, 4, 4)), quantisation)
        _, found = run(built, seed=seed)
        real = made_by(kind, [rational(quantisation[name], found[f"{name}_q"]) for name in names])
        np.testing.assert_array_equal(found["y_oq"], nearest_codes(real, out))


def test_equal_scales_keep_a_tie_a_tie():
    """0.1 * 10 / 4 / 0.1 is 2.4999999999999996 in float64; the mean of 1, 2, 3, 4 codes is 2.5, and goes to 2."""
    q = Q(0.1, 0, "int8")
    for kind, codes in (("GlobalAveragePool", [1, 2, 3, 4]), ("AveragePool", [1, 2, 3, 4])):
        attributes = {"kernel_shape": [1, 4]} if kind == "AveragePool" else {}
        built = quantised_model([(kind, ["x"], ["y"], attributes)], {"y": q}, {"x": (1, 1, 1, 4)}, {"x": q})
        found = compiled(built.graph, "exact").run({"x": q.float_of(np.array(codes).reshape(1, 1, 1, 4))})
        assert found["y_oq"].item() == 2


# -- laws ----------------------------------------------------------------------------------------------------------------

COORDINATES = st.sampled_from(sorted(resize.COORDINATES - {"tf_crop_and_resize"}))
CODES = Codes(1.0, 0, True)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 30), COORDINATES, st.sampled_from(sorted(resize.NEAREST)), st.integers(0, 2**31)
)
def test_resizing_keeps_within_the_image_and_a_constant_constant(size, length, coordinates, nearest, seed):
    x = np.random.default_rng(seed).normal(size=(2, size))
    for mode, place in (("linear", resize.linear), ("nearest", resize.nearest)):
        op = Resize(
            "Resize", ("y",), Operand("x", CODES), mode, coordinates, nearest, (1,), (length,), None, None, 0.0, CODES
        )
        made = place(op, x, 0.0)
        assert made.shape == (2, length)
        assert (made >= x.min(axis=1, keepdims=True) - 1e-12).all()
        assert (made <= x.max(axis=1, keepdims=True) + 1e-12).all()
        if length == size:
            np.testing.assert_array_equal(made, x)
        if mode == "nearest":
            assert np.isin(made, x).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_depth_to_space_undoes_space_to_depth(batch, channels, height, width, block):
    x = np.arange(batch * channels * height * width * block**2).reshape(batch, channels, height * block, width * block)
    (deep,) = move("SpaceToDepth", [x], {"blocksize": block}, {}, 0, 1)
    (back,) = move("DepthToSpace", [deep], {"blocksize": block, "mode": "DCR"}, {}, 0, 1)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("profile", ["exact", "ort", "tflite-reference"])
def test_moves_in_the_step_of_an_operator_are_moves_of_its_codes(profile):
    """The same operator alone, its codes moved by numpy."""
    for seed in range(3):
        behind = [("Transpose", ["{}"], {"perm": [0, 2, 3, 1]}), ("MaxPool", ["{}"], {"kernel_shape": [1, 2]})]
        built = moved(behind=behind)(np.random.default_rng(seed), "int8")
        alone = moved()(np.random.default_rng(seed), "int8")
        program, found = run(built, profile, seed)
        _, plain = run(alone, profile, seed)
        assert isinstance(program.op(built.graph.steps[-1]), Chain)
        turned = plain["v0_oq"].transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(found["v2_oq"], np.maximum(turned[..., :-1], turned[..., 1:]))


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize("profile", ["exact", "ort"])
def test_below_opset_13_a_softmax_takes_all_axes_from_one_on(kind, opset, profile):
    """Its axis is 1 there by default, and the axes from it on are one; from opset 13 on it is the last axis alone."""
    q = Q(0.05, 3, "int8")
    out = Q(1 / 256, -128, "int8") if kind == "Softmax" else Q(0.1, 127, "int8")
    built = quantised_model([(kind, ["x"], ["y"], {})], {"y": out}, {"x": (2, 3, 4)}, {"x": q}, opset=opset)
    program, found = run(built, profile)
    expected = run_ort(built, {"x": q.float_of(found["x_q"])}, "disable")["y_oq"]
    step = built.graph.steps[-1]
    assert np.abs(np.clip(program.real(step, found)["y_oq"], -128, 127) - expected).max() <= 0.5 + 2e-3
    assert np.abs(found["y_oq"] - expected).max() <= 1


# -- how steps are lowered, and why some are not ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (CASES["AveragePool+Add"][""], Island),
        (CASES["LogSoftmax"][""], Island),
        (CASES["Conv+MaxPool"][""], Chain),
        (CASES["Transpose+Sigmoid+Reshape"][""], Chain),
        (CASES["Resize"]["linear half_pixel"], Resize),
    ],
)
def test_a_step_becomes_the_operator_it_is(case, kind):
    built = case(np.random.default_rng(0), "int8")
    assert isinstance(compiled(built.graph, "exact").op(built.graph.steps[-1]), kind)


def reason(nodes, shape=IMAGE):
    q = Q(0.05, 3, "int8")
    built = quantised_model(nodes, {nodes[-1][2][0]: q}, {"x": shape}, {"x": q})
    return compiled(built.graph, "exact", fallback=lambda step, inputs: {}).placement[-1].reason


def resize_reason(**attributes):
    extra = [np.zeros(0, np.float32), np.array([1, 1, 2, 2], np.float32)]
    return reason([("Resize", ["x", *extra], ["y"], attributes)])


def test_what_has_no_integer_kernel_says_why():
    assert resize_reason(mode="cubic") == "Resize with mode cubic, half_pixel, round_prefer_floor has no integer kernel"
    assert resize_reason(mode="linear", antialias=1) == "Resize with antialias has no integer kernel"
    w = Weight(np.ones((4, 5, 1, 1), np.int8), 0.01)
    fused = [("Conv", ["x", w], ["c"], {}), ("Sigmoid", ["c"], ["y"], {})]
    assert reason(fused) == "Conv+Sigmoid has no integer kernel as one step"
    assert reason([("CumSum", ["x", np.array(1)], ["y"], {})]) == "CumSum has no integer kernel"
    wide = Weight(np.ones((4, 5, 1, 1), np.int16), 0.01)
    assert reason([("Conv", ["x", wide], ["y"], {})]) == "weights w0_1_dq have int16 codes"


def test_resize_to_a_size_of_the_run_is_left_to_the_cpu():
    built = resized(sizes=(13, 17))(np.random.default_rng(0), "int8")
    assert compiled(built.graph, "exact").placement[-1].reason == ""
    import onnx

    from equivcheck.models.onnx.load import model_from_bytes

    proto = onnx.load_from_string(built.model)
    sizes = next(n for n in proto.graph.node if n.op_type == "Resize").input[3]
    kept = [t for t in proto.graph.initializer if t.name != sizes]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    proto.graph.input.append(onnx.helper.make_tensor_value_info(sizes, onnx.TensorProto.INT64, [4]))
    graph = model_from_bytes(proto.SerializeToString(), "sizes.onnx").graph
    placed = compiled(graph, "exact", fallback=lambda step, inputs: {}).placement[-1]
    assert placed.reason == f"Resize with {sizes} known only at run time"


def test_a_convolution_is_not_disturbed_by_the_shape_of_what_follows():
    """Conv, Relu, Reshape in one step: codes of Conv and Relu, reshaped."""
    after = [("Relu", ["y"], ["r"], {}), ("Flatten", ["r"], ["z"], {})]
    for profile in ("exact", "ort", "tflite-reference"):
        rng, again = np.random.default_rng(5), np.random.default_rng(5)
        out = Q(0.1, LOWEST["int8"], "int8")
        _, flat = run(conv(rng, "int8", after=after, out=out), profile)
        _, plain = run(conv(again, "int8", after=after[:1], out=out), profile)
        np.testing.assert_array_equal(flat["z_oq"], plain["r_oq"].reshape(1, -1))
