"""`equivcheck backends`: what can run here."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from equivcheck.backends.base import Backend

_INDENT = " " * 13


@click.command(name="backends", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Options of each backend, what its arithmetic is proved against, and versions of engines that are known to be "
    "wrong, with the cure.",
)
def command(verbose: bool) -> int:
    """What can run here, and why not: one line a backend, with version, interpreter and device."""
    from equivcheck.backends.registry import known as registered

    for name, point in sorted(registered().items()):
        try:
            kind = point.load()
        except ImportError as error:
            click.echo(f"{name:<10} no  not here: {error}")
            continue
        state = _state(kind)
        click.echo(f"{name:<10} {'yes' if state.works else 'no '} {state.text}")
        if verbose:
            _details(kind, state)
    if verbose:
        _known_broken()
    return 0


@dataclass(frozen=True)
class _State:
    """Whether a backend works here, and its line; `engine` and `version` where it was asked."""

    works: bool
    text: str
    engine: str = ""
    version: str = ""


def _state(kind: type[Backend]) -> _State:
    """Start the backend's engine, and let it say what it is; one that needs to be told more is not started."""
    from equivcheck.backends.spec import Spec
    from equivcheck.errors import EquivcheckError

    reason = kind.unavailable()
    if reason is not None:
        return _State(False, f"not here: {reason}")
    if kind.positional is not None or not hasattr(kind, "engine"):
        return _State(True, kind.summary)
    try:
        with contextlib.closing(kind(Spec(kind.name)).engine()) as engine:  # type: ignore[attr-defined]  # asked above
            said = engine.info()
    except EquivcheckError as error:
        return _State(False, f"does not start: {error}")
    return _State(True, f"{_about(said)}; {kind.summary}", said["engine"], said["version"])


def _about(said: dict[str, Any]) -> str:
    """An engine's version, interpreter and device in one line."""
    import platform

    parts = [f"{said['engine']} {said['version']}"]
    if "runtime" in said:
        parts.append(f"onnxruntime {said['runtime']}")
    parts.append(f"Python {said.get('python', platform.python_version())}")
    parts.append(str(said.get("device", f"CPU {said['machine']}")))
    return ", ".join(parts)


def _details(kind: type[Backend], state: _State) -> None:
    from equivcheck.backends import known
    from equivcheck.backends.base import TIMEOUT

    for key, option in {**kind.options, "timeout": TIMEOUT}.items():
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        default = f", default {option.default}" if option.default else ""
        click.echo(f"{_INDENT}{key}=  {option.help}{choices}{default}")
    for line in getattr(kind, "proofs", list)():
        click.echo(f"{_INDENT}{line}")
    for defect in known.broken(state.engine, state.version) if state.engine else ():
        click.echo(f"{_INDENT}KNOWN here: {defect.what}; {defect.cure}")


def _known_broken() -> None:
    from equivcheck.backends import known

    click.echo("\nversions known to be wrong, or to refuse")
    for defect in known.defects():
        version = "all versions" if defect.versions == "*" else defect.versions
        click.echo(f"  {defect.engine} {version}: {defect.what}")
        click.echo(f"      why     {defect.reason}")
        click.echo(f"      cure    {defect.cure}")
        click.echo(f"      source  {defect.source}")
