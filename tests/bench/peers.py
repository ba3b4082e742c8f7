"""Polygraphy's comparisons on the same two runs: simple (atol, rtol), cosine similarity and SNR, at its own defaults.

It compares each tensor since the model's input, as reals. It is handed the values equivcheck observed, which is more than
it would see by tapping the model itself (that stops ONNX Runtime from fusing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import util

from equivcheck.models.graph import Array

COMPARISONS = ("simple", "cosine", "snr")


def available() -> bool:
    return util.find_spec("polygraphy") is not None


def first_failing(
    reference: Mapping[str, Array], candidate: Mapping[str, Array], order: Sequence[str]
) -> dict[str, str]:
    """Comparison -> the first tensor in graph order that fails it, "" where all pass."""
    from polygraphy.comparator import CosineSimilarityCompareFunc, IterationResult, SimpleCompareFunc, SnrCompareFunc
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    names = [n for n in order if n in reference and n in candidate and reference[n].dtype.kind == "f"]
    sides = [IterationResult(outputs={n: side[n] for n in names}) for side in (reference, candidate)]
    functions = (SimpleCompareFunc, CosineSimilarityCompareFunc, SnrCompareFunc)
    found = {}
    for kind, function in zip(COMPARISONS, functions, strict=True):
        results = function(fail_fast=True)(*sides)
        found[kind] = next((name for name, passed in results.items() if not passed), "")
    return found
