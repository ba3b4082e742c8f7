"""Profiles are data: what a file may say, and that what it says changes the arithmetic."""

from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from equivcheck.errors import UnknownOption
from equivcheck.vnpu import load_profile, parse_profile, profile_names
from equivcheck.vnpu.kernels import Kernel
from equivcheck.vnpu.profiles import KEYS
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
    assert not load_profile("ort").proof("Resize").proved


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'rounding = "half-even"',
            'rounding = "nearest"',
            r"requantise.rounding is 'nearest'; it must be half-even \| ",
        ),
        ("bits = 32", 'bits = "32"', "accumulator.bits is '32'; it must be int"),
        ("[accumulator]", "[acumulator]", "accumulator.bits is None"),
        ("[bias]", "[pools]\n[bias]", r"unknown profile section \[pools\]"),
        ("bits = 32", "bits = 32\nwidth = 3", "unknown profile key accumulator.width"),
        ('name = "ort"', "", "the profile has no name"),
        ("[bias]", "[bias", "the profile is no TOML"),
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


@pytest.mark.parametrize("multiplier", ["float64", "float32", "fixed31"])
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
        slack = (0.5 if rounding.startswith("half") else 1.0) if multiplier == "fixed31" and double else 0
        assert error.min() >= bias[0] - slack - 1e-4
        assert error.max() <= bias[1] + slack + 1e-4


@pytest.mark.parametrize(
    ("overflow", "expected"), [("wrap", lambda s: (s + 2**15) % 2**16 - 2**15), ("saturate", None)]
)
def test_a_narrow_accumulator_wraps_or_saturates(overflow, expected):
    from equivcheck.vnpu.ir import Accumulate, Clamp, Codes, Operand

    scale = np.asarray(1.0)
    w = np.full((1, 4, 1, 1), 127, np.int64)
    op = Accumulate(
        "Conv", ("y",), Operand("x", Codes(1.0, 0, False)), w, scale, None, scale, {}, Clamp(), Codes(512.0, 0, True)
    )
    x = np.arange(0, 256, 5, dtype=np.uint8).reshape(1, 1, 1, -1).repeat(4, axis=1)
    sums = x[0, 0, 0].astype(np.int64) * 127 * 4
    kept = expected(sums) if expected else np.clip(sums, -(2**15), 2**15 - 1)
    for multiplier in ("float64", "float32", "fixed31"):
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
