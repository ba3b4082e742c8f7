"""Profiles are data: what a file may say, and that what it says changes the arithmetic."""

from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from equivcheck.backends.registry import backend
from equivcheck.backends.vnpu import VnpuBackend
from equivcheck.errors import UnknownOption
from equivcheck.vnpu.ir import Accumulate, Binary, Clamp, Codes, Mean, Operand, Pool, Reduce, Softmax, Table
from equivcheck.vnpu.kernels import Kernel
from equivcheck.vnpu.profiles import KEYS, load_profile, parse_profile, profile_names
from vnpu.cases import conv
from vnpu.graphs import random_codes

TEXT = (resources.files("equivcheck.vnpu") / "profiles" / "ort.toml").read_text(encoding="utf-8")


def test_three_profiles_ship_and_name_their_engine():
    assert profile_names() == ("exact", "ort", "tflite-reference")
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.engine
        assert profile.proved_by
        assert all(proof.note for proof in profile.proofs.values())


def test_an_unlisted_operator_is_not_proved():
    assert not load_profile("ort").proof("GridSample").proved


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'rounding = "half-even"',
            'rounding = "nearest"',
            r"requantise.rounding is 'nearest'; it must be half-even \| ",
        ),
        ("bits = 32", 'bits = "32"', "accumulator.bits is '32'; it must be a whole number from 2 to 64"),
        ("[accumulator]", "[acumulator]", r"unknown profile section \[acumulator\]; nearest: accumulator"),
        ("[bias]", "[pools]\n[bias]", r"unknown profile section \[pools\]"),
        ("bits = 32", "bits = 32\nwidth = 3", "unknown profile key accumulator.width"),
        ('name = "ort"', "", "the profile has no name"),
        ("[bias]", "[bias", "the profile is no TOML"),
        ('name = "ort"', 'name = "ort"\nsumary = ""', "unknown profile key sumary; nearest: summary"),
        ('name = "ort"', 'name = "ort"\nbase = "ortt"', "profile key base is 'ortt'; nearest: ort"),
        (
            "double_rounding",
            "multiplier_bits = 15\ndouble_rounding",
            'requantise.multiplier_bits: only multiplier = "fixed"',
        ),
        ("[pool]", '[pool]\nrounding = "floor"', "pool.rounding: arithmetic 'ort' brings its own rounding"),
        ("[pool]", '[pool]\nscale = "input"', "pool.scale: arithmetic 'ort' rounds in the output's scale"),
        ("bits = 32", "bits = 65", "accumulator.bits is 65; it must be a whole number from 2 to 64"),
    ],
)
def test_a_wrong_profile_is_refused_by_the_key(old, new, message):
    with pytest.raises(UnknownOption, match=message):
        parse_profile(TEXT.replace(old, new, 1))


def codes_under(profile, seed=3):
    rng = np.random.default_rng(seed)
    built = conv(rng, "int8")
    (name, q, shape) = built.inputs[0]
    from equivcheck.vnpu.lower import lower

    kernel = Kernel(lower(built.graph, built.graph.steps[-1]), profile)
    inputs = {f"{name}_q": random_codes(rng, q, shape)}
    (made,) = kernel.run(inputs).values()
    (real,) = kernel.real(inputs).values()
    return made, np.clip(real, -128, 127)


@pytest.mark.parametrize("multiplier", ["float64", "float32", "fixed"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("rounding", KEYS["requantise"]["rounding"])
def test_every_rounding_of_every_multiplier_stays_on_its_side_of_the_real_value(multiplier, rounding, double):
    profile = replace(
        load_profile("exact"),
        requantise_multiplier=multiplier,
        requantise_rounding=rounding,
        requantise_double_rounding=double,
        accumulator_bits=32,
        bias_conv="rescaled",
    )
    for seed in range(6):
        made, real = codes_under(profile, seed)
        error = made - real
        bias = {"floor": (-1, 0), "truncate": (-1, 1)}.get(rounding, (-0.5, 0.5))
        slack = (0.5 if rounding.startswith("half") else 1.0) if multiplier == "fixed" and double else 0
        assert error.min() >= bias[0] - slack - 1e-4
        assert error.max() <= bias[1] + slack + 1e-4


@pytest.mark.parametrize(
    ("overflow", "expected"), [("wrap", lambda s: (s + 2**15) % 2**16 - 2**15), ("saturate", None)]
)
def test_a_narrow_accumulator_wraps_or_saturates(overflow, expected):
    scale = np.asarray(1.0)
    w = np.full((1, 4, 1, 1), 127, np.int64)
    op = Accumulate(
        "Conv", ("y",), Operand("x", Codes(1.0, 0, False)), w, scale, None, scale, {}, Clamp(), Codes(512.0, 0, True)
    )
    x = np.arange(0, 256, 5, dtype=np.uint8).reshape(1, 1, 1, -1).repeat(4, axis=1)
    sums = x[0, 0, 0].astype(np.int64) * 127 * 4
    kept = expected(sums) if expected else np.clip(sums, -(2**15), 2**15 - 1)
    for multiplier in ("float64", "float32", "fixed"):
        profile = replace(
            load_profile("exact"),
            requantise_multiplier=multiplier,
            requantise_rounding="half-away",
            accumulator_bits=16,
            accumulator_overflow=overflow,
        )
        (made,) = Kernel(op, profile).run({"x": x}).values()
        nearest = np.sign(kept) * ((np.abs(kept) + 256) // 512)
        np.testing.assert_array_equal(made[0, 0, 0], np.clip(nearest, -128, 127))


# -- what each key does, by hand -----------------------------------------------------------------------------------------

EXACT = load_profile("exact")
ONE = Codes(1.0, 0, True)


def one_weight(x, scale, **changed):
    """Codes of a convolution with one weight of 1 and s_x * s_w / s_out = `scale`, under `exact` with changed keys."""
    unit = np.asarray(1.0)
    w = np.ones((1, 1, 1, 1), np.int64)
    op = Accumulate(
        "Conv", ("y",), Operand("x", ONE), w, np.asarray(float(np.float32(scale))), None, unit, {}, Clamp(), ONE
    )
    codes = np.asarray(x, np.int8).reshape(1, 1, 1, -1)
    return Kernel(op, replace(EXACT, **{"accumulator_bits": 32, **changed})).run({"x": codes})["y"].ravel().tolist()


@pytest.mark.parametrize("multiplier", ["float64", "float32", "fixed"])
@pytest.mark.parametrize(
    ("rounding", "expected"),  # of 2.5, -2.5, 1.75, -1.75, 1.25
    [
        ("half-even", [2, -2, 2, -2, 1]),
        ("half-up", [3, -2, 2, -2, 1]),
        ("half-away", [3, -3, 2, -2, 1]),
        ("floor", [2, -3, 1, -2, 1]),
        ("truncate", [2, -2, 1, -1, 1]),
    ],
)
def test_each_rounding_rounds_as_its_name_says(multiplier, rounding, expected):
    changed = {"requantise_multiplier": multiplier, "requantise_rounding": rounding}
    assert one_weight([10, -10, 7, -7, 5], 0.25, **changed) == expected


def test_double_rounding_rounds_the_product_before_the_shift():
    """10 * 0.24 = 2.4. The multiplier is 0.96, the shift 2: 9.6 is rounded to 10, 10 / 4 = 2.5 to 3."""
    fixed = {"requantise_multiplier": "fixed", "requantise_rounding": "half-up"}
    assert one_weight([10], 0.24, **fixed) == [2]
    assert one_weight([10], 0.24, **fixed, requantise_double_rounding=True) == [3]


@pytest.mark.parametrize(("bits", "expected"), [(3, 31), (4, 34), (31, 33)])
def test_a_narrow_multiplier_is_a_scale_of_few_bits(bits, expected):
    """1/3 = 2/3 * 2^-1. In 3 bits 5/8 / 2 = 0.3125, in 4 bits 11/16 / 2 = 0.34375; times 100."""
    assert one_weight([100], 1 / 3, requantise_multiplier="fixed", requantise_multiplier_bits=bits) == [expected]


def pooled(kind, codes, out=ONE, **changed):
    x = np.asarray(codes, np.int8).reshape(1, 1, 1, -1)
    if kind == "AveragePool":
        width = (1, x.size)
        op = Pool(
            kind, ("y",), Operand("x", ONE), width, (1, 1), (0,) * 4, (1, 1), False, False, "NOTSET", Clamp(), out
        )
    elif kind == "ReduceSum":
        op = Reduce(kind, ("y",), Operand("x", ONE), None, True, Clamp(), out)
    else:
        op = Mean(kind, ("y",), Operand("x", ONE), None, True, Clamp(), out)
    return Kernel(op, replace(EXACT, **changed)).run({"x": x})["y"].item()


@pytest.mark.parametrize("kind", ["AveragePool", "GlobalAveragePool", "ReduceMean"])
@pytest.mark.parametrize(
    ("rounding", "expected"),  # of 1.5 and -1.5
    [("half-even", (2, -2)), ("half-up", (2, -1)), ("half-away", (2, -2)), ("floor", (1, -2)), ("truncate", (1, -1))],
)
def test_pools_round_as_the_profile_says(kind, rounding, expected):
    found = pooled(kind, [1, 2], pool_rounding=rounding), pooled(kind, [-1, -2], pool_rounding=rounding)
    assert found == expected


@pytest.mark.parametrize("kind", ["AveragePool", "GlobalAveragePool"])
def test_a_pool_in_the_scale_of_its_input_is_rounded_there_first(kind):
    """The mean of 1, 1, 1, 2, 2 is 1.4: 14 in tenths, but 1 in ones, which is 10 in tenths."""
    tenths = Codes(0.1, 0, True)
    assert pooled(kind, [1, 1, 1, 2, 2], tenths) == 14
    assert pooled(kind, [1, 1, 1, 2, 2], tenths, pool_scale="input") == 10
    assert pooled(kind, [1, 1, 2, 2], tenths, pool_scale="input", pool_rounding="truncate") == 10  # 1.5


def test_the_mean_of_tflite_can_be_a_pool_in_the_scale_of_its_input():
    text = 'name = "tosa"\nbase = "tflite-reference"\n[pool]\nscale = "input"\n'
    profile, tenths = parse_profile(text), Codes(0.1, 0, True)
    op = Mean("GlobalAveragePool", ("y",), Operand("x", ONE), None, True, Clamp(), tenths)
    x = np.asarray([1, 1, 1, 2, 2], np.int8).reshape(1, 1, 1, -1)
    assert Kernel(op, load_profile("tflite-reference")).run({"x": x})["y"].item() == 14
    assert Kernel(op, profile).run({"x": x})["y"].item() == 10


def test_a_sum_is_not_divided():
    assert pooled("ReduceSum", [1, 1, 1, 2, 2], Codes(0.5, 0, True)) == 14


@pytest.mark.parametrize(("rounding", "expected"), [("half-even", 2), ("floor", 1), ("half-up", 2), ("truncate", 1)])
def test_elementwise_operators_tables_and_softmax_round_as_the_profile_says(rounding, expected):
    halves = Operand("x", Codes(0.5, 0, True))
    add = Binary("Add", ("y",), halves, Operand("z", Codes(0.5, 0, True)), Clamp(), ONE)
    fed = {"x": np.array([1], np.int8), "z": np.array([2], np.int8)}  # 0.5 + 1.0
    assert Kernel(add, replace(EXACT, elementwise_rounding=rounding)).run(fed)["y"].item() == expected
    same = Table("QuantizeLinear", ("y",), halves, (), ("x",), "x", {}, ONE)
    assert (
        Kernel(same, replace(EXACT, table_rounding=rounding)).run({"x": np.array([3], np.int8)})["y"].item() == expected
    )
    soft = Softmax("Softmax", ("y",), halves, -1, False, Codes(1 / 3, 0, True))
    made = Kernel(soft, replace(EXACT, softmax_rounding=rounding)).run({"x": np.array([[5, 5]], np.int8)})["y"]
    assert made.tolist() == [[expected, expected]]  # 1/2 is 1.5 thirds


# -- files of one's own --------------------------------------------------------------------------------------------------


def test_a_profile_of_ones_own_starts_from_a_shipped_one(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nbase = "tflite-reference"\n[requantise]\nmultiplier_bits = 15\n'
        '[pool]\narithmetic = "float64"\nrounding = "truncate"\n',
        encoding="utf-8",
    )
    changed = {"requantise_multiplier_bits": 15, "pool_arithmetic": "float64", "pool_rounding": "truncate"}
    shipped = replace(load_profile("tflite-reference"), name="mine", engine="", summary="", proved_by="", proofs={})
    assert load_profile(str(path)) == replace(shipped, **changed)
    assert backend(f'vnpu:profile="{path}"').profile == load_profile(str(path))


def test_a_profile_or_target_file_that_is_not_there_is_named(tmp_path):
    for key in ("profile", "target"):
        with pytest.raises(
            UnknownOption, match=f"{key} {tmp_path}/no.toml: No such file or directory; shipped {key}s: "
        ):
            backend(f'vnpu:{key}="{tmp_path}/no.toml"')


def test_a_target_of_ones_own(tmp_path):
    path = tmp_path / "board.toml"
    path.write_text('name = "board"\nsource = "its manual"\n[operators]\nConv = { max_stride = 2 }\n', encoding="utf-8")
    target = backend(f'vnpu:target="{path}"').target
    assert (target.name, target.source, dict(target.operators)) == ("board", "its manual", {"Conv": {"max_stride": 2}})


def test_a_name_that_is_neither_shipped_nor_a_file_is_refused_with_near_names():
    with pytest.raises(UnknownOption, match="nearest: tflite-reference"):
        backend("vnpu:profile=tflite-referense")


def test_the_list_of_proofs_reads_as_sentences():
    lines = VnpuBackend.proofs()
    assert (
        "ort: Conv: proved: QLinearConv, also with Relu and Clip whose bounds are the ends of the code range" in lines
    )
    assert any(line.startswith("tflite-reference: ReduceSum: NOT PROVED: no oracle") for line in lines)
