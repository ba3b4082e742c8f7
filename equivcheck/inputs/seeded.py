"""Seeded random feeds: `random:SEED` and `random:SEED:1x3x48x192`."""

from __future__ import annotations

import re

import numpy as np

from equivcheck.errors import InputError
from equivcheck.inputs.files import numpy_dtype
from equivcheck.inputs.fitting import fits
from equivcheck.inputs.sample import Array, InputSpec, Notes, known, shape_text

PREFIX = "random:"
_FORM = re.compile(r"random:(\d{1,18})(?::(\d+(?:x\d+)*))?")
_SMALL = 10  # 32 and 64-bit integers are mostly indices and token ids: 0..9 is valid for nearly every table


def is_random(text: str) -> bool:
    """Whether an argument asks for a random feed (a file of that name is `./random:0`)."""
    return text.startswith(PREFIX)


def parse_random(text: str) -> tuple[int, tuple[int, ...] | None]:
    """Seed and shape of `random:SEED[:SHAPE]`. Raises InputError."""
    match = _FORM.fullmatch(text)
    if match is None:
        message = f"{text} is not random:SEED or random:SEED:SHAPE"
        raise InputError(message, asked=text, hint="such as random:0:1x3x48x192")
    return int(match[1]), tuple(int(side) for side in match[2].split("x")) if match[2] else None


def random_array(spec: InputSpec, position: int, seed: int, shape: tuple[int, ...] | None, notes: Notes) -> Array:
    """The random feed of `spec`, the `position`-th input (from 0) of its model. Raises InputError.

    Floats are standard normal; 8 and 16-bit integers uniform over their range; wider ones 0..9; bools fair. The first
    input draws from `np.random.Generator(np.random.PCG64(seed))`, the others from children of that seed, so that two
    inputs of one shape differ. Same seed, same bytes, wherever numpy keeps its streams.
    """
    sizes = _sizes(spec, seed, notes) if shape is None else _checked(spec, shape)
    dtype = numpy_dtype(spec)
    key = (position,) if position else ()
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
    try:
        if dtype.kind == "f":
            return np.asarray(generator.standard_normal(sizes)).astype(dtype)
        if dtype.kind == "b":
            return np.asarray(generator.integers(0, 2, sizes, dtype=np.uint8)).astype(dtype)
        low, high = (0, _SMALL) if dtype.itemsize > 2 else (np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
        return np.asarray(generator.integers(low, high, sizes, dtype=np.int64)).astype(dtype)
    except (MemoryError, ValueError) as error:
        message = f"input {spec.name}: no memory for a random {shape_text(sizes)}"
        raise InputError(message, asked=shape_text(sizes), hint="give a smaller shape") from error


def _sizes(spec: InputSpec, seed: int, notes: Notes) -> tuple[int, ...]:
    if any(not known(dim) for dim in spec.shape[1:]):
        guess = "x".join(str(dim) if known(dim) else "1" if axis == 0 else "64" for axis, dim in enumerate(spec.shape))
        message = f"input {spec} has open dimensions, so a random feed needs a shape"
        raise InputError(message, asked=spec.name, hint=f"such as -i {spec.name}=random:{seed}:{guess}")
    if spec.shape and not known(spec.shape[0]):
        notes.add(f"input {spec.name}: dimension {shape_text(spec.shape[:1])} taken as 1")
    return tuple(dim if isinstance(dim, int) and known(dim) else 1 for dim in spec.shape)


def _checked(spec: InputSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not fits(shape, spec):
        message = f"random shape {shape_text(shape)} does not fit input {spec}"
        hint = "keep the fixed dimensions"
        raise InputError(message, asked=shape_text(shape), found=shape_text(spec.shape), hint=hint)
    return shape
