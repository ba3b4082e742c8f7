"""Does an array fit the input it is for? Strict: nothing is cast, broadcast or transposed behind the user's back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from equivcheck.errors import InputError
from equivcheck.inputs.sample import Array, Feed, InputSpec, Notes, frozen, known, shape_text


def fitted(array: Array, spec: InputSpec, source: str, notes: Notes, recipe: str | None = None) -> Feed:
    """The feed made of `array`: dtype and shape checked, what makes it a poor test noted. Raises InputError."""
    if array.dtype.hasobject or array.dtype.fields is not None:
        message = f"{source} for input {spec} holds Python objects or records, not numbers"
        raise InputError(message, asked=str(array.dtype), hint=f'np.asarray(values, dtype="{spec.dtype}")')
    if array.dtype.name != spec.dtype:
        message = f"{source} is {array.dtype.name}, input {spec} wants {spec.dtype}"
        hint = f'nothing is cast silently: array.astype("{spec.dtype}"), if that keeps its meaning'
        raise InputError(message, asked=spec.dtype, found=array.dtype.name, hint=hint)
    if not fits(array.shape, spec):
        message = f"{source} has shape {shape_text(array.shape)}, input {spec} wants {shape_text(spec.shape)}"
        hint = _way_out(array.shape, spec)
        raise InputError(message, asked=shape_text(spec.shape), found=shape_text(array.shape), hint=hint)
    feed = Feed(spec.name, frozen(array), source, recipe)
    _remark(feed, notes)
    return feed


def fits(shape: Sequence[int], spec: InputSpec) -> bool:
    """Whether the input takes this shape: same rank, fixed dimensions equal, the others of any size."""
    pairs = zip(spec.shape, shape, strict=False)
    return len(shape) == len(spec.shape) and all(not known(dim) or dim == side for dim, side in pairs)


def _way_out(shape: tuple[int, ...], spec: InputSpec) -> str:
    if fits((1, *shape), spec):
        return "array[np.newaxis] adds the batch dimension"
    if len(shape) == 4:
        for order in ((0, 3, 1, 2), (0, 2, 3, 1)):
            if fits([shape[axis] for axis in order], spec):
                return f"array.transpose{order} changes the layout"
    return "reshape, crop or pad it first"


def _remark(feed: Feed, notes: Notes) -> None:
    array, about = feed.array, f"input {feed.name}"
    if array.size == 0:
        notes.add(f"{about} is empty ({shape_text(array.shape)}): it tests nothing", feed.source)
    elif array.dtype.kind == "f" and not np.isfinite(array).all():
        nan, inf = int(np.isnan(array).sum()), int(np.isinf(array).sum())
        notes.add(f"{about} holds {nan} NaN and {inf} Inf of {array.size} elements", feed.source)
    elif array.dtype.kind in "iu" and array.size > 1 and (array == array.flat[0]).all():
        notes.add(f"{about} is constant (all {array.flat[0]}): it tests little", feed.source)
