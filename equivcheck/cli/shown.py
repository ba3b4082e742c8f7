"""What commands with a Result have in common: exit codes, and where the result goes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from equivcheck.result import Result

EXIT = {"equivalent": 0, "different": 1, "inconclusive": 3}


def show(result: Result, json_to: str | None, verbose: bool) -> None:
    """Print the first screen, or the JSON; a file gets the JSON beside the screen."""
    if json_to == "-":
        sys.stdout.buffer.write(result.to_json())
        return
    if json_to is not None:
        from equivcheck.render.files import write_whole

        write_whole(Path(json_to), result.to_json())
    from equivcheck.render.text import first_screen

    click.echo(first_screen(result, verbose=verbose))


def not_empty(given: dict[str, str | None]) -> None:
    """An empty value is an unset shell variable far more often than a wish."""
    for option, value in given.items():
        if value == "":
            raise click.UsageError(f"{option} is empty; leave it out, or say what")


def writable(json_to: str | None, save_to: str | None = None, read: Iterable[str | None] = ()) -> None:
    """Find out that a result cannot be written before the work, not after. `read` are files that the command reads."""
    from equivcheck.render.files import check_folder, check_writable

    if json_to not in (None, "-"):
        check_writable(Path(str(json_to)), read)
    if save_to is not None:
        check_folder(Path(save_to))


def again() -> str:
    """The command line that was given, to repeat it."""
    return shlex.join(["equivcheck", *click.get_current_context().find_root().obj])
