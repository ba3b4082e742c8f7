"""`equivcheck backends`: what can run here."""

from __future__ import annotations

import click


@click.command(name="backends", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "-v", "--verbose", is_flag=True, help="Options of each backend, and what its arithmetic is proved against."
)
def command(verbose: bool) -> int:
    """What can run here, and why not: one line a backend."""
    from equivcheck.backends.registry import known

    for name, point in sorted(known().items()):
        try:
            kind = point.load()
            reason = kind.unavailable()
        except ImportError as error:
            click.echo(f"{name:<10} not here: {error}")
            continue
        click.echo(f"{name:<10} {kind.summary if reason is None else f'not here: {reason}'}")
        if verbose:
            for key, option in kind.options.items():
                choices = f" ({', '.join(option.choices)})" if option.choices else ""
                default = f", default {option.default}" if option.default else ""
                click.echo(f"{'':<10}   {key}=  {option.help}{choices}{default}")
            for line in getattr(kind, "proofs", list)():
                click.echo(f"{'':<10}   {line}")
    return 0
