"""The group of commands; each is imported when it is used, so that `--help` pays for none of them."""

from __future__ import annotations

from importlib import import_module

import click

_COMMANDS = {
    "diff": ("equivcheck.cli.diff", "Run a model on two backends and judge every step: the main job."),
    "record": ("equivcheck.cli.record", "Run a model on one backend and keep every stored value."),
    "compare": ("equivcheck.cli.compare", "Judge recordings and other tools' dumps; two results against each other."),
    "split": (
        "equivcheck.cli.split",
        "Cut a model in two at a node, and prove that both parts together are the model.",
    ),
    "inspect": ("equivcheck.cli.inspect", "What a model is made of: quantisation, operators, where to split it."),
    "convert": ("equivcheck.cli.convert", "A quantised ONNX model as a .tflite file that computes the same, proved."),
    "backends": ("equivcheck.cli.backends", "What can run here, and what its arithmetic is proved against."),
}


class _Lazy(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = import_module(_COMMANDS[name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            from equivcheck.errors import near

            hint = near(args[0], _COMMANDS)
            looks = f"; did you mean '{hint[0]}'?" if hint else f"; commands: {', '.join(_COMMANDS)}"
            raise click.UsageError(f"no command '{args[0]}'{looks}", context)
        return super().resolve_command(context, args)


def _version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from equivcheck import __version__

        click.echo(f"equivcheck {__version__}")
        context.exit()


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def root() -> None:
    """Is the difference between a CPU and an NPU rounding, or is something wrong - and where, and why?

    \b
    equivcheck diff model.onnx --split-at GlobalAveragePool
    equivcheck diff model.onnx --split-at GlobalAveragePool -i cat.jpg --preprocess recipe.toml
    """  # noqa: D301  # click wants the control character, not its name
