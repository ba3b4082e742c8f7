"""From a dumped tensor to what a recording holds: the model's shape, then the model's codes.

Nothing is transposed, reshaped, cast or rounded that the user, the model or the file does not call for: what does not fit
is a `Misfit`, whose text says what would make it fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equivcheck.dumps.files import Array, Shape, Tensor, numpy_dtype, read
from equivcheck.dumps.names import Declared
from equivcheck.models.graph import Dim, Quantisation
from equivcheck.recording import Parameters

OFF_GRID = 1e-3  # of a step; what is further off was not quantised there


class Misfit(Exception):
    """A dumped tensor that cannot be taken for the value it is named after; the text says why, and the way out."""


@dataclass(frozen=True)
class Target:
    """What the model says of the value that a tensor is: None and () where there is no model, or it does not say.

    `quantised`: the stored value has codes. `before_q`: the tensor is the float that a Q reads, so it is on no grid.
    """

    name: str
    dtype: str | None = None
    shape: tuple[Dim, ...] | None = None
    quantised: Quantisation | None = None
    before_q: bool = False
    native: bool = False


@dataclass(frozen=True)
class Placement:
    """How a tensor becomes the value: read as `dtype` and `shape`, reshaped to `shape`, axes put in `order`."""

    dtype: np.dtype[Any]
    shape: Shape
    order: tuple[int, ...] | None

    def read(self, tensor: Tensor) -> Array:
        """The numbers in the model's shape. Raises RecordingError."""
        array = read(tensor, self.dtype, self.shape)
        if array.dtype != self.dtype and array.dtype.kind == "V":  # bfloat16 in a .npy comes back as bytes
            array = array.view(self.dtype)
        array = array.reshape(self.shape)
        return array if self.order is None else array.transpose(self.order)


# -- shape -------------------------------------------------------------------------------------------------------------


def place(tensor: Tensor, target: Target, declared: Declared, layout: str | None, option: str) -> Placement:
    """Fit the tensor's shape to the model's by its header alone; `option` is the --...-layout option hints name.

    Raises Misfit.
    """
    forced = declared.layout is not None
    channels_last = (declared.layout or layout) == "nhwc"
    if tensor.dtype is None or tensor.shape is None:
        dtype, shape = _raw_shape(tensor, target, declared, channels_last, forced)
    else:
        dtype, shape = _stored_dtype(tensor, declared), _declared_shape(tensor.shape, declared)
    order = _channels_first(len(shape)) if channels_last else None
    if order is not None and not _is_turned(shape, order, target.shape, forced):
        order = None
    final = shape if order is None else tuple(shape[axis] for axis in order)
    if target.shape is not None and not fits(final, target.shape):
        raise Misfit(_why_not(shape, target, option, forced and channels_last))
    return Placement(dtype, shape, order)


def fits(shape: Sequence[int], model: Sequence[Dim]) -> bool:
    """Whether `shape` is `model`, whose open dimensions take any size."""
    pairs = zip(shape, model, strict=False)
    return len(shape) == len(model) and all(not _known(dim) or dim == size for size, dim in pairs)


def _known(dim: Dim) -> bool:
    return isinstance(dim, int) and dim >= 0


def _channels_first(rank: int) -> tuple[int, ...] | None:
    """The order that brings channels from the end to place 1: (0, 3, 1, 2) for four dimensions."""
    return (0, rank - 1, *range(1, rank - 1)) if rank >= 3 else None


def _is_turned(shape: Shape, order: Sequence[int], model: Sequence[Dim] | None, forced: bool) -> bool:
    """Whether a tensor of a channels-last dump has its channels last: 2-D ones and sequences of vectors do not.

    Where both readings fit, a 4-D tensor is turned, one of another rank only when its own layout is declared.
    """
    if forced or model is None:
        return forced or len(shape) == 4
    return fits([shape[axis] for axis in order], model) and (len(shape) == 4 or not fits(shape, model))


def _stored_dtype(tensor: Tensor, declared: Declared) -> np.dtype[Any]:
    dtype = tensor.dtype
    assert dtype is not None
    if dtype.kind in "biuf" or (dtype.kind == "V" and not dtype.name.startswith("void")):
        return dtype
    own = declared.dtype
    if own is not None and dtype.kind == "V" and dtype.fields is None and own.itemsize == dtype.itemsize:
        return own
    raise Misfit(f"{dtype} holds no plain numbers (bfloat16 in a .npy: declare its dtype in --names)")


def _declared_shape(shape: Shape, declared: Declared) -> Shape:
    if declared.shape is None:
        return shape
    if math.prod(declared.shape) != math.prod(shape):
        raise Misfit(f"shape {list(shape)} cannot be the declared {list(declared.shape)}: other number of elements")
    return declared.shape


def _raw_shape(
    tensor: Tensor, target: Target, declared: Declared, channels_last: bool, forced: bool
) -> tuple[np.dtype[Any], Shape]:
    """The dtype and shape of a raw file: as declared, else the model's, with the dtype that its size allows."""
    shape: tuple[Dim, ...] | None = declared.shape if declared.shape is not None else target.shape
    if shape is None:
        raise Misfit(_undeclared(target.name, "its shape is not known"))
    order = _channels_first(len(shape)) if channels_last and (forced or len(shape) == 4) else None
    if declared.shape is None and order is not None:
        shape = (shape[0], *shape[2:], shape[1])
    if sum(not _known(dim) for dim in shape) > 1:
        raise Misfit(_undeclared(target.name, f"{_text(shape)} has more than one open dimension"))
    one = math.prod(dim for dim in shape if isinstance(dim, int) and dim >= 0)
    choices = _raw_dtypes(target, declared)
    for dtype in choices:
        if all(_known(dim) for dim in shape):
            if tensor.size == one * dtype.itemsize:
                return dtype, tuple(dim for dim in shape if isinstance(dim, int))
        elif one and tensor.size % (one * dtype.itemsize) == 0:
            open_dim = tensor.size // (one * dtype.itemsize)
            return dtype, tuple(dim if isinstance(dim, int) and dim >= 0 else open_dim for dim in shape)
    wanted = " or ".join(f"{one * d.itemsize} as {d}" for d in choices)
    several = "" if all(_known(dim) for dim in shape) else "a multiple of "
    raise Misfit(
        f"{tensor.size} bytes; {_text(shape)} takes {several}{wanted}: is it truncated, padded, or another shape?"
    )


def _raw_dtypes(target: Target, declared: Declared) -> list[np.dtype[Any]]:
    """What a raw file may hold, the likelier first: tools write dequantised float32 unless asked for their own codes."""
    if declared.dtype is not None:
        return [declared.dtype]
    own = target.quantised.dtype if target.quantised is not None else None
    if own is None and target.dtype in (None, "str"):
        raise Misfit(_undeclared(target.name, f"its dtype is {target.dtype or 'not known'}"))
    named = own if own is not None else numpy_dtype(target.dtype or "")
    if target.native or (own is None and named.kind != "f") or named.itemsize == 4:
        return [named]
    return [np.dtype(np.float32), named]


def _undeclared(name: str, why: str) -> str:
    return f'a raw file, and {why}: declare [[tensor]] name = "{name}" dtype = "..." shape = [...] in --names'


def _declare(target: Target, line: str) -> str:
    return f'[[tensor]] name = "{target.name}" {line} in --names'


def _declare_dtype(target: Target, dtype: np.dtype[Any]) -> str:
    return _declare(target, f'dtype = "{dtype}"')


def _text(shape: Sequence[Dim]) -> str:
    return "[" + ",".join("?" if dim is None else str(dim) for dim in shape) + "]"


def _why_not(shape: Shape, target: Target, option: str, forced: bool) -> str:
    """Why the shape is not the model's, and what would make it so."""
    model = target.shape or ()
    there, wanted = _text(shape), _text(model)
    order = _channels_first(len(shape))
    if forced and fits(shape, model):
        return f"shape {there} is the model's as it is: it is not channels last, as declared"
    if order is not None and fits([shape[axis] for axis in order], model):
        return f"shape {there} is {wanted} with channels last: {option} nhwc"
    fixed = [dim for dim in model if isinstance(dim, int) and dim >= 0]
    if len(fixed) < len(model) or math.prod(shape) != math.prod(fixed):
        return f"shape {there}, the model has {wanted}: {_which_differs(shape, model)}"
    sides, other = [dim for dim in shape if dim != 1], [dim for dim in fixed if dim != 1]
    if sides != other and Counter(sides) == Counter(other):
        return f"shape {there} is {wanted} with its axes in another order: transpose it and dump it again"
    return f"shape {there} is not {wanted}: if only the shape differs, declare {_declare(target, f'shape = {fixed}')}"


def _which_differs(shape: Shape, model: Sequence[Dim]) -> str:
    if len(shape) != len(model):
        return f"{len(shape)} dimensions for {len(model)}, {math.prod(shape)} elements"
    pairs = [(axis, s, m) for axis, (s, m) in enumerate(zip(shape, model, strict=True)) if _known(m) and s != m]
    return ", ".join(f"axis {axis} is {size} for {dim}" for axis, size, dim in pairs)


# -- numbers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Coded:
    """A value as a recording holds it, with how it was got; `off_grid` in steps, None where it was no float of a grid."""

    array: Array
    how: str
    parameters: Parameters | None = None
    off_grid: float | None = None


def coded(array: Array, target: Target, declared: Declared) -> Coded:
    """Bring numbers in the model's shape to the model's dtype: codes for a quantised value. Raises Misfit.

    Integers of a quantised value are codes, and stay as they are; floats are reals on its grid, and are divided back. A
    float further than 1e-3 of a step from the grid is rounded, and `off_grid` says how far it was.
    """
    how = f"dumped {array.dtype}"
    if declared.dtype is not None and array.dtype != declared.dtype:
        array = _exactly(array, declared.dtype)
        how += f", declared {declared.dtype}"
    if array.dtype.name in ("int4", "uint4", "int2", "uint2"):
        array = array.astype(np.uint8 if array.dtype.name.startswith("u") else np.int8)
    grid = _grid(target, declared)
    if grid is not None and grid.per_channel and array.shape[grid.axis or 0 : (grid.axis or 0) + 1] != grid.scale.shape:
        raise Misfit(f"{grid.scale.size} scales along axis {grid.axis} of shape {_text(array.shape)}")
    if grid is None:
        return Coded(_as_model(array, target), how, _parameters(declared, array))
    if array.dtype.kind in "iub":
        return Coded(_codes(array, grid, target, declared), how, Parameters(grid.scale, _typed(grid, array), grid.axis))
    return _divided(array, grid, target, how)


def _grid(target: Target, declared: Declared) -> Quantisation | None:
    """The quantisation of the dumped numbers: the dump's own where declared, else the model's."""
    own = target.quantised
    if own is None or own.dtype.kind not in "iu":
        return None
    if declared.scale is None and declared.zero_point is None:
        return own
    scale = own.scale if declared.scale is None else _vector(declared.scale, np.dtype(np.float32))
    if declared.zero_point is None:
        zero: Array = own.zero_point
    else:
        zero = _vector(declared.zero_point, np.dtype(np.int64))
        fitting = (own.dtype, *(np.dtype(d) for d in ("int8", "uint8", "int16", "uint16")))
        dtype = next((d for d in fitting if _within(zero, d)), own.dtype)
        zero = zero.astype(declared.dtype if declared.dtype is not None and declared.dtype.kind in "iu" else dtype)
    several = max(scale.size, zero.size)
    if not {scale.size, zero.size} <= {1, several}:
        raise Misfit(f"{scale.size} scales with {zero.size} zero points declared")
    if several == 1:
        return Quantisation(scale, zero)
    axis = next((a for a in (declared.axis, own.axis) if a is not None), 1)
    return Quantisation(np.broadcast_to(scale, several), np.broadcast_to(zero, several), axis)


def _vector(numbers: Sequence[float], dtype: np.dtype[Any]) -> Array:
    array = np.asarray(numbers, dtype)
    return array.reshape(()) if array.size == 1 else array


def _within(array: Array, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return array.size == 0 or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)


def _typed(grid: Quantisation, codes: Array) -> Array:
    """The zero point in the dtype of the codes, as recordings keep it."""
    return grid.zero_point.astype(codes.dtype) if _within(grid.zero_point, codes.dtype) else grid.zero_point


def _parameters(declared: Declared, array: Array) -> Parameters | None:
    """What is declared of a value that the model does not quantise, or of any value where there is no model."""
    if declared.scale is None or array.dtype.kind not in "iu":
        return None
    scale = _vector(declared.scale, np.dtype(np.float32))
    zero = _vector(declared.zero_point or (0,), np.dtype(np.int64)).astype(array.dtype)
    return Parameters(scale, np.broadcast_to(zero, scale.shape), declared.axis)


def _codes(array: Array, grid: Quantisation, target: Target, declared: Declared) -> Array:
    """Integers are codes; those of another dtype need a word on what they are."""
    own = target.quantised
    assert own is not None
    if array.dtype == own.dtype:
        return array
    if declared.zero_point is not None and array.dtype.itemsize == own.dtype.itemsize:
        return array  # other signedness, with its zero point: the reader of the recording shifts it
    if array.dtype.itemsize == own.dtype.itemsize:
        shift = 1 << (8 * own.dtype.itemsize - 1)
        zero = int(grid.zero_point.ravel()[0]) + (shift if own.dtype.kind == "i" else -shift)
        raise Misfit(
            f"{array.dtype} where the model's codes are {own.dtype}: if the engine's are "
            f"{shift} {'higher' if own.dtype.kind == 'i' else 'lower'}, declare {_declare(target, f'zero_point = {zero}')}"
        )
    raise Misfit(
        f"{array.dtype} where the model's codes are {own.dtype}: "
        f"if they are codes in a wider type, declare {_declare_dtype(target, own.dtype)}"
    )


def _divided(array: Array, grid: Quantisation, target: Target, how: str) -> Coded:
    """Codes from reals: rint(real / scale) + zero point, with how far from the nearest code that was."""
    unfit = array.size - int(np.count_nonzero(np.isfinite(array)))
    if unfit:
        raise Misfit(f"{unfit} of {array.size} numbers are NaN or infinite: no {grid.dtype} code stands for them")
    scale, zero = grid.along(array.ndim)
    if not np.all(scale):
        raise Misfit(f"{array.dtype} where the model's scale is 0: only its codes could be compared")
    exact = array.astype(np.float64) / scale + zero
    limits = np.iinfo(grid.dtype)
    codes = np.clip(np.rint(exact), limits.min, limits.max)
    nearest = np.rint(exact) if target.before_q else codes  # a Q saturates; what a DQ shows is a code
    off = np.abs(exact - nearest)
    own_rounding = np.abs(exact - zero) * _unit(array.dtype)
    distance = float(np.max(off, where=off > own_rounding, initial=0.0))
    if distance > OFF_GRID:
        if not target.before_q and _look_like_codes(array, grid.dtype):
            raise Misfit(
                f"{array.dtype} whole numbers off the model's grid (scale {float(grid.scale.ravel()[0]):.6g}): "
                f"if they are codes, declare {_declare_dtype(target, grid.dtype)}"
            )
        how += f", up to {distance:.3g} of a step off the grid, rounded"
    parameters = Parameters(grid.scale, grid.zero_point, grid.axis)
    return Coded(codes.astype(grid.dtype), how, parameters, distance)


def _look_like_codes(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whole numbers of as many bits as the codes have, signed or not."""
    span = 1 << (8 * dtype.itemsize)
    return bool(array.min() >= -span // 2 and array.max() < span and np.all(array == np.rint(array)))


def _unit(dtype: np.dtype[Any]) -> float:
    """The spacing of a float type at 1."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)


def _as_model(array: Array, target: Target) -> Array:
    """A value without codes in the model's dtype, where that keeps the numbers; floats may be rounded to a shorter float."""
    if target.dtype is None or array.dtype.name == target.dtype:
        return array
    try:
        wanted = numpy_dtype(target.dtype)
    except TypeError:
        return array
    hand_made = array.dtype in (np.int64, np.uint64)  # Python's and numpy's own integers, which no engine computes in
    if array.dtype.kind in "iu" and _is_float(wanted) and not hand_made:
        raise Misfit(
            f"{array.dtype} where the model has {wanted}: if they are those numbers, declare "
            f"{_declare_dtype(target, wanted)}"
        )
    if _is_float(array.dtype) and _is_float(wanted):
        with np.errstate(over="ignore"):  # counted in the next line
            made = array.astype(wanted)
        if np.count_nonzero(np.isfinite(made)) == np.count_nonzero(np.isfinite(array)):
            return made
        raise Misfit(f"{array.dtype} numbers beyond the range of the model's {wanted}")
    return _exactly(array, wanted)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name.startswith(("float", "bfloat"))


def _exactly(array: Array, dtype: np.dtype[Any]) -> Array:
    """The same numbers in another dtype. Raises Misfit when one of them would change."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and what is out of range show in the comparison below
        made = array.astype(dtype)
        same = (made.astype(array.dtype) == array) | (made != made)
    if not np.all(same):
        raise Misfit(f"{array.dtype} numbers that are no {dtype} (such as {array.ravel()[int(np.argmin(same))]})")
    return made
