"""Data movement on codes, in numpy: the ONNX operators that change no number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from equivcheck.models.graph import Array

MOVES = frozenset(
    "Reshape Flatten Squeeze Unsqueeze Transpose Slice Split Gather Identity Expand DepthToSpace SpaceToDepth Tile Concat "
    "Pad".split()
)
Constants = Mapping[int, Array]
Attributes = Mapping[str, Any]


def move(
    kind: str, arrays: Sequence[Array], attributes: Attributes, constants: Constants, fill: float, outputs: int
) -> list[Array]:
    """Run the operator `kind`; `fill` is the code Pad fills with. Results are C-contiguous."""
    if kind == "Concat":
        made = [np.concatenate(list(arrays), axis=int(attributes["axis"]))]
    elif kind == "Split":
        made = _split(arrays[0], attributes, constants, outputs)
    elif kind == "Pad":
        made = [_pad(arrays[0], attributes, constants, fill)]
    else:
        made = [_ONE[kind](arrays[0], attributes, constants)]
    return [np.ascontiguousarray(array) for array in made]


def _ints(attributes: Attributes, key: str, constants: Constants, position: int) -> list[int] | None:
    """A list that is an attribute in old opsets and an input in new ones."""
    if position in constants:
        return [int(v) for v in constants[position].ravel()]
    given = attributes.get(key)
    return None if given is None else [int(v) for v in given]


def _reshape(x: Array, attributes: Attributes, constants: Constants) -> Array:
    wanted = _ints(attributes, "shape", constants, 1) or []
    if not attributes.get("allowzero", 0):
        wanted = [x.shape[k] if size == 0 else size for k, size in enumerate(wanted)]
    return x.reshape(wanted)


def _flatten(x: Array, attributes: Attributes, constants: Constants) -> Array:
    axis = int(attributes.get("axis", 1))
    axis += x.ndim if axis < 0 else 0
    return x.reshape(int(np.prod(x.shape[:axis])), -1)


def _squeeze(x: Array, attributes: Attributes, constants: Constants) -> Array:
    axes = _ints(attributes, "axes", constants, 1)
    return np.squeeze(x, None if axes is None else tuple(axes))


def _unsqueeze(x: Array, attributes: Attributes, constants: Constants) -> Array:
    return np.expand_dims(x, tuple(_ints(attributes, "axes", constants, 1) or ()))


def _transpose(x: Array, attributes: Attributes, constants: Constants) -> Array:
    return np.transpose(x, attributes.get("perm"))


def _slice(x: Array, attributes: Attributes, constants: Constants) -> Array:
    starts = _ints(attributes, "starts", constants, 1) or []
    ends = _ints(attributes, "ends", constants, 2) or []
    axes = _ints(attributes, "axes", constants, 3) or list(range(len(starts)))
    steps = _ints(attributes, "steps", constants, 4) or [1] * len(starts)
    cut: list[slice] = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        if step < 0 and end < -size:
            cut[axis] = slice(start, None, step)  # an end before the first element: down to it
        else:
            cut[axis] = slice(start, end, step)
    return x[tuple(cut)]


def _gather(x: Array, attributes: Attributes, constants: Constants) -> Array:
    return np.take(x, constants[1].astype(np.int64), axis=int(attributes.get("axis", 0)))


def _expand(x: Array, attributes: Attributes, constants: Constants) -> Array:
    shape = tuple(int(v) for v in constants[1].ravel())
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, shape))


def _tile(x: Array, attributes: Attributes, constants: Constants) -> Array:
    return np.tile(x, tuple(int(v) for v in constants[1].ravel()))


def _depth_to_space(x: Array, attributes: Attributes, constants: Constants) -> Array:
    n, c, h, w = x.shape
    b = int(attributes["blocksize"])
    if _text(attributes.get("mode", "DCR")) == "DCR":
        y = x.reshape(n, b, b, c // b**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // b**2, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // b**2, h * b, w * b)


def _space_to_depth(x: Array, attributes: Attributes, constants: Constants) -> Array:
    n, c, h, w = x.shape
    b = int(attributes["blocksize"])
    return x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


def _split(x: Array, attributes: Attributes, constants: Constants, outputs: int) -> list[Array]:
    axis = int(attributes.get("axis", 0))
    sizes = _ints(attributes, "split", constants, 1)
    if sizes is None:
        each = -(-x.shape[axis] // outputs)  # the last piece is the smaller one where it does not divide (opset 18)
        sizes = [each] * outputs
    return np.split(x, np.cumsum(sizes)[:-1], axis=axis)


def _pad(x: Array, attributes: Attributes, constants: Constants, fill: float) -> Array:
    pads = _ints(attributes, "pads", constants, 1) or []
    axes = [int(a) % x.ndim for a in constants[3].ravel()] if 3 in constants else list(range(x.ndim))
    widths = [(0, 0)] * x.ndim
    for k, axis in enumerate(axes):
        widths[axis] = (pads[k], pads[k + len(axes)])
    cut = tuple(slice(-min(a, 0), x.shape[k] + min(b, 0)) for k, (a, b) in enumerate(widths))  # negative pads cut
    grown = [(max(a, 0), max(b, 0)) for a, b in widths]
    mode = _text(attributes.get("mode", "constant"))
    if mode == "constant":
        return np.pad(x[cut], grown, constant_values=fill)
    return np.pad(x[cut], grown, mode={"reflect": "reflect", "edge": "edge", "wrap": "wrap"}[mode])  # type: ignore[call-overload]  # numpy wants a literal


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


_ONE: dict[str, Callable[[Array, Attributes, Constants], Array]] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Slice": _slice,
    "Gather": _gather,
    "Identity": lambda x, attributes, constants: x,
    "Expand": _expand,
    "Tile": _tile,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
}
