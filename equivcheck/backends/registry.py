"""Finds backends: entry points of the group `equivcheck.backends`, so that another package can bring its own."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from equivcheck.backends.base import Backend
from equivcheck.backends.spec import Spec, parse
from equivcheck.errors import BackendUnavailable, UnknownBackend, near

GROUP = "equivcheck.backends"


def known() -> dict[str, EntryPoint]:
    """All registered backends by name; nothing of them is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def backend(spec: str | Spec | Backend) -> Backend:
    """Return the backend that `spec` names (a Backend is returned as it is).

    Raises SpecError, UnknownBackend, UnknownOption, BackendUnavailable.
    """
    if isinstance(spec, Backend):
        return spec
    parsed = parse(spec) if isinstance(spec, str) else spec
    points = known()
    if parsed.name not in points:
        raise UnknownBackend(
            f"unknown backend '{parsed.name}'",
            asked=parsed.name,
            found=", ".join(points),
            nearest=near(parsed.name, points),
            hint="known here: " + ", ".join(sorted(points)),
        )
    kind = points[parsed.name].load()
    here = parsed.python is None and parsed.ssh is None
    reason = kind.unavailable() if here else None
    if reason is not None:
        raise BackendUnavailable(f"backend '{parsed.name}' cannot run here: {reason}", asked=parsed.name)
    made = kind(parsed)
    assert isinstance(made, Backend)
    return made
