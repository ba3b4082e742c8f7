"""Where two files of a network hold other weights: integers, scales or biases that another tool rounded otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equivcheck.models.graph import Array
from equivcheck.pairing.bundles import Bundle, Bundles, Weights
from equivcheck.pairing.match import Pairing
from equivcheck.pairing.order import layouts


def different_weights(pairing: Pairing) -> dict[str, str]:
    """Values of the model whose step has other weights in the other file, in graph order, with what differs."""
    found: dict[str, str] = {}
    for bundle, other in _pairs(pairing):
        mine, theirs = pairing.own.weights(bundle), pairing.other.weights(other)
        if mine is None or theirs is None:
            continue
        words = _difference(mine, theirs, _rows(pairing, bundle))
        if words is not None:
            found[bundle.first] = words
    return found


def _pairs(pairing: Pairing) -> Iterator[tuple[Bundle, Bundle]]:
    for own in sorted(pairing.bundles):
        yield pairing.own.found[own], pairing.other.found[pairing.bundles[own]]


def _rows(pairing: Pairing, bundle: Bundle) -> Array | None:
    """In which order the other file has the rows of a matrix: that of the flattened image before it."""
    sources = pairing.own.sources[bundle.index]
    match = pairing.matches.get(_read(pairing.own, bundle, sources[0])) if len(sources) == 1 else None
    value = None if match is None else pairing.other.graph.values.get(match.theirs)
    if match is None or value is None or value.shape is None or not all(isinstance(n, int) for n in value.shape):
        return None
    shape = tuple(int(n) for n in value.shape if isinstance(n, int))
    return match.order.apply(np.arange(int(np.prod(shape))).reshape(shape)).ravel()


def _read(side: Bundles, bundle: Bundle, source: Bundle) -> str:
    assert bundle.step is not None  # it reads `source`
    return next(name for name in bundle.step.inputs if name in source.members)


def _difference(mine: Weights, theirs: Weights, rows: Array | None) -> str | None:
    """What differs, the way they lie that fits best; None where nothing does."""
    ways = [theirs.codes.reshape(mine.codes.shape)] if mine.codes.size == theirs.codes.size else []
    ways = [order.apply(theirs.codes) for order in layouts(theirs.codes.shape, mine.codes.shape)] or ways
    if rows is not None and mine.codes.ndim == 2 and rows.size in mine.codes.shape:
        ways += [way.take(rows, axis=mine.codes.shape.index(rows.size)) for way in list(ways)]
    if not ways:
        return f"weights of shape {list(theirs.codes.shape)} against {list(mine.codes.shape)}"
    differing = min(int(np.count_nonzero(way != mine.codes)) for way in ways)
    found = [f"{differing} of {mine.codes.size} weights differ"] if differing else []
    found += _scales(mine.scale, theirs.scale)
    if mine.bias is not None and theirs.bias is not None and mine.bias.size == theirs.bias.size:
        other = int(np.count_nonzero(mine.bias.ravel() != theirs.bias.ravel()))
        found += [f"{other} of {mine.bias.size} biases differ"] if other else []
    return "; ".join(found) or None


def _scales(mine: Array | None, theirs: Array | None) -> list[str]:
    if mine is None or theirs is None:
        return []
    if mine.size != theirs.size and 1 not in (mine.size, theirs.size):
        return [f"{theirs.size} weight scales against {mine.size}"]
    a, b = np.broadcast_arrays(mine.ravel(), theirs.ravel())
    differing = np.flatnonzero(a != b)
    if not differing.size:
        return []
    k = int(differing[np.argmax(np.abs(b[differing] / a[differing] - 1))])
    return [f"{differing.size} of {a.size} weight scales differ (such as {b[k]:.6g} against {a[k]:.6g})"]
