"""`blocks.moments`: numkong has a kernel for each generation of processors; all that this machine runs are held to it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from equivcheck.metrics.blocks import BLOCK, moments

# What `moments` finds with one kernel alone, for every kernel: in a process of its own, because the choice is global.
EVERY_KERNEL = """
import json, sys
import numkong
import numpy as np
from equivcheck.metrics.blocks import BLOCK, Scratch, count_above, moments
arrays = np.load(sys.argv[1])
able = [name for name, has in numkong.get_capabilities().items() if has and name != "serial"]
found = {}
for kernel in ["serial", *able]:
    for name in able:
        (numkong.enable_capability if name == kernel else numkong.disable_capability)(name)
    found[kernel] = {name: [float(x).hex() for x in moments(array)] for name, array in arrays.items()}
    ones = np.ones(6 * BLOCK, np.uint8)
    found[kernel]["counted"] = [float(count_above(ones, 0, Scratch(ones.size, 6))).hex()]
print(json.dumps(found))
"""
rng = np.random.default_rng(7)
CODES = {
    f"{kind} {name} of {size}": array
    for size in (1, 63, 1000, BLOCK - 1, BLOCK, 4 * BLOCK, 4 * BLOCK + 77)
    for name in ("int8", "uint8")
    for kind, array in {
        "least": np.full(size, np.iinfo(name).min, name),
        "greatest": np.full(size, np.iinfo(name).max, name),
        "any": rng.integers(np.iinfo(name).min, np.iinfo(name).max + 1, size, name),
    }.items()
}
FLOATS = {
    f"{kind} of {size}": array.astype(np.float32)
    for size in (1, 63, 1000, 2 * BLOCK)
    for kind, array in {
        "normal": rng.normal(size=size),
        "positive": rng.uniform(0.5, 1.5, size),
        "wild": rng.normal(size=size) * 10.0 ** rng.uniform(-18, 18, size),
        "subnormal": rng.uniform(-1e-39, 1e-39, size),
        "greatest": np.full(size, np.finfo(np.float32).max),
    }.items()
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    place = tmp_path_factory.mktemp("moments") / "arrays.npz"
    np.savez(place, **CODES, **FLOATS)
    ran = subprocess.run([sys.executable, "-c", EVERY_KERNEL, str(place)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = {
        kernel: {name: [float.fromhex(x) for x in both] for name, both in of.items()}
        for kernel, of in json.loads(ran.stdout).items()
    }
    assert "serial" in found
    return found


@pytest.mark.parametrize("name", CODES)
def test_sums_of_codes_are_exact_with_every_kernel(kernels: dict, name: str) -> None:
    codes = CODES[name].astype(np.int64)
    wanted = [int(codes.sum()), int((codes * codes).sum())]  # below 2^53: float64 holds them
    assert {kernel: of[name] for kernel, of in kernels.items()} == dict.fromkeys(kernels, wanted)


def test_every_element_of_the_largest_block_is_counted_with_every_kernel(kernels: dict) -> None:
    assert {kernel: of["counted"] for kernel, of in kernels.items()} == {kernel: [6 * BLOCK] for kernel in kernels}


@pytest.mark.parametrize("name", FLOATS)
def test_sums_of_float32_are_summed_in_float64_with_every_kernel(kernels: dict, name: str) -> None:
    wide = FLOATS[name].astype(np.longdouble)
    for kernel, of in kernels.items():
        for found, terms in zip(of[name], (wide, wide * wide), strict=True):
            assert abs(found - terms.sum()) <= 1e-13 * np.abs(terms).sum(), kernel


def test_a_nan_or_an_infinity_is_in_the_sum_of_squares() -> None:
    for value in (np.nan, np.inf, -np.inf):
        values = np.ones(1000, np.float32)
        values[777] = value
        assert not np.isfinite(moments(values)[1])
