"""`equivcheck record`: run a model on one backend and keep every stored value."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from equivcheck.cli.shown import not_empty
from equivcheck.cli.streams import progress_line

_EPILOG = """\b
Examples:
  equivcheck record model.onnx -b ort -i 'photos/*.jpg' --preprocess recipe.toml -o cpu
  equivcheck record model.onnx -b vnpu -i cat.npy -o npu
  equivcheck compare cpu npu --model model.onnx
\b
Exit codes: 0 recorded, 2 trouble, 130 interrupted. What was finished is kept: the same command goes on behind it.
"""


@click.command(
    name="record", epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.argument("model", type=click.Path(path_type=str))
@click.option("-b", "--backend", "spec", metavar="SPEC", default="ort", show_default=True, help="What runs it.")
@click.option(
    "-i",
    "--input",
    "inputs",
    metavar="INPUT",
    multiple=True,
    help="A sample, as in diff. Repeatable. Default: seeded random.",
)
@click.option("--preprocess", metavar="RECIPE", help="How a picture becomes the input, as in diff.")
@click.option("-o", "--output", metavar="DIR", required=True, help="The folder for the recording.")
def command(model: str, spec: str, inputs: tuple[str, ...], preprocess: str | None, output: str) -> int:
    """Run MODEL on one backend and keep every stored value in DIR, to be judged later by compare."""
    not_empty({"--output": output, "--preprocess": preprocess, "--backend": spec})
    from equivcheck.backends.registry import backend
    from equivcheck.inputs import load_samples
    from equivcheck.models.onnx.load import load_model
    from equivcheck.recorder import input_specs, record_samples

    progress = progress_line()
    engine, loaded_model = backend(spec), load_model(model)
    loaded = load_samples(list(inputs), input_specs(loaded_model.graph), recipe=preprocess)
    for note in loaded.notes:
        click.echo(f"equivcheck: {note}", err=True)
    place = record_samples(loaded_model, engine, loaded.samples, Path(output), progress)
    progress("")
    size = sum(file.stat().st_size for file in place.iterdir())
    many = "1 sample" if len(loaded.samples) == 1 else f"{len(loaded.samples)} samples"
    click.echo(f"{place}: {many} on {engine.spec}, {size / 2**20:.1f} MB")
    click.echo("next: " + shlex.join(["equivcheck", "compare", "OTHER", str(place), "--model", model]))
    return 0
