"""TOML files of one kind: those that ship with equivcheck, by name, and those of the user, by path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from equivcheck.errors import UnknownOption, near


def names(kind: str) -> tuple[str, ...]:
    """Names of the `kind` ("profile", "target") files that ship."""
    folder = resources.files(__package__) / f"{kind}s"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def text(kind: str, name: str) -> str:
    """The text of the shipped `name`, or of the user's file `name` (ending in .toml).

    Raises UnknownOption with the nearest names where there is none, or where the file cannot be read.
    """
    known = names(kind)
    if name.endswith(".toml"):
        return _of_the_user(kind, name, known)
    if name not in known:
        raise UnknownOption(
            f"no {kind} named {name!r}",
            asked=name,
            nearest=near(name, known),
            hint=f"{kind}s: {', '.join(known)}, or a file ending in .toml",
        )
    return (resources.files(__package__) / f"{kind}s" / f"{name}.toml").read_text(encoding="utf-8")


def _of_the_user(kind: str, path: str, known: tuple[str, ...]) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownOption(
            f"{kind} {path}: {getattr(error, 'strerror', None) or 'not a text file'}",
            asked=path,
            hint=f"shipped {kind}s: {', '.join(known)}",
        ) from error
