"""A tensor's error since the input, held against thresholds: those of a rule, or of the presets `bitwise` and `close`."""

from __future__ import annotations

from collections.abc import Mapping

from equivcheck.metrics import Tally
from equivcheck.result import Limit, TensorVerdict
from equivcheck.tolerance import LOWER_BOUNDS, Tolerance

CLOSE = (1e-3, 1e-3)  # of the preset, for floats; integers must be equal
Held = tuple[TensorVerdict, str, Limit | None]


def closeness(tolerance: Tolerance, given: Mapping[str, float], *, coded: bool) -> tuple[float, float] | None:
    """(atol, rtol) that a tensor's elements are held to, by the rules `given` or the preset; None where by neither."""
    if "atol" in given or "rtol" in given:
        return given.get("atol", 0.0), given.get("rtol", 0.0)
    if tolerance.preset != "close":
        return None
    return (0.0, 0.0) if coded else CLOSE


def figures(tally: Tally) -> dict[str, float | None]:
    """The figures that a rule may limit, by its key; None where one does not exist.

    Of codes whose quantisation is not known, one code counts as one LSB.
    """
    metrics = tally.finish()
    lsb = metrics.domain == "codes"
    bias = metrics.bias if lsb else metrics.bias_lsb
    return {
        "max_abs": metrics.max_abs,
        "max_lsb": metrics.max_abs if lsb else metrics.max_lsb,
        "bias_lsb": None if bias is None else abs(bias),
        "mismatch_share": metrics.mismatched / metrics.n if metrics.n else 0.0,
        "cosine": metrics.cosine if metrics.snr_note != "equal" else 1.0,
        "snr_db": metrics.snr_db if metrics.snr_note != "equal" else float("inf"),
    }


def by_rules(given: Mapping[str, float], tally: Tally, source: str) -> Held | None:
    """Apply the limits that rules of `source` give this tensor (metric -> limit); None where none is given.

    NaN or Inf on one side only, or of another sign, breaks every rule.
    """
    limits = dict(given)
    limits.pop("excess", None)
    if not limits:
        return None
    rule = f"rule of {source}"
    odd = not_finite_alike(tally)
    if odd is not None:
        return "different", odd, Limit(metric="mismatch_share", rule=rule, max=0.0)
    if tally.mismatched == 0:
        return "identical", "every element is equal since the input", Limit(metric=next(iter(limits)), rule=rule)
    found = figures(tally)
    if found["max_lsb"] is None and tally.finite:  # a float without a scale: no rule in LSB speaks of it
        limits = {key: limit for key, limit in limits.items() if not key.endswith("_lsb")}
        if not limits:
            return None
    held = Limit(metric=next(iter(limits)), rule=rule)
    close = {key: limits.pop(key) for key in ("atol", "rtol") if key in limits}
    if close and tally.far:
        text = " + ".join(f"{key} {value:g}" for key, value in close.items())
        limit = Limit(metric="atol", rule=rule, max=close.get("atol", 0.0))
        return "different", f"{tally.far} of {tally.n} elements lie beyond {text}{_worst(tally)}", limit
    for metric, limit_value in limits.items():
        value = found.get(metric)
        if value is None:
            none = Limit(metric=metric, rule=rule)
            return "different", f"{metric} since the input does not exist here, so the rule is not met", none
        low = metric in LOWER_BOUNDS
        held = Limit(metric=metric, rule=rule, **({"min": limit_value} if low else {"max": limit_value}))
        if value < limit_value if low else value > limit_value:
            return "different", f"{metric} since the input is {value:.6g}, the rule allows {limit_value:g}", held
    verdict: TensorVerdict = "identical" if tally.mismatched == 0 else "equivalent"
    return verdict, f"within the rule's limits ({', '.join([*close, *limits])}) since the input", held


def by_preset(tolerance: Tolerance, tally: Tally | None) -> Held:
    """Apply preset `bitwise` or `close`. Equal NaNs pass, and equal infinities; their counts are in the metrics."""
    if tally is None:
        return "unjudged", "there is no reference value to compare with", None
    bitwise = tolerance.preset == "bitwise"
    count = tally.mismatched if bitwise else tally.far
    limit = Limit(metric="mismatch_share", rule=f"preset {tolerance.preset}", max=0.0)
    odd = not_finite_alike(tally)
    if odd is not None:
        return "different", odd, limit
    if count:
        what = "differ" if bitwise else "lie beyond the tolerance"
        return "different", f"{count} of {tally.n} elements {what}{_worst(tally)}", limit
    nans = f"; {tally.nan[0]} NaN in the same places on both sides" if tally.nan[0] else ""
    return ("identical" if tally.mismatched == 0 else "equivalent"), f"every element within the tolerance{nans}", limit


def _worst(tally: Tally) -> str:
    metrics = tally.finish()
    return "" if metrics.argmax is None else f", the furthest by {metrics.max_abs:.6g} at {metrics.argmax}"


def not_finite_alike(tally: Tally) -> str | None:
    """A sentence where NaN or Inf lie in other places on the two sides, else None."""
    if tally.nan_mismatch:
        return (
            f"NaN in {tally.nan_mismatch} places on one side only (reference {tally.nan[0]}, candidate {tally.nan[1]})"
        )
    if tally.inf_mismatch:
        return f"infinities disagree in {tally.inf_mismatch} places"
    return None
