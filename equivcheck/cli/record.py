"""`equivcheck record`: run a model on one backend and keep every stored value."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.interrupt import saying_what_is_kept
from equivcheck.cli.shown import not_empty
from equivcheck.cli.streams import progress_line
from equivcheck.words import counted

if TYPE_CHECKING:
    from equivcheck.inputs import Sample
    from equivcheck.models.onnx.load import OnnxModel

_EPILOG = """\b
Examples:
  equivcheck record model.onnx -b ort -i 'photos/*.jpg' --preprocess recipe.toml -o cpu
  equivcheck record model.onnx -b vnpu -i cat.npy -o npu
  equivcheck compare cpu npu --model model.onnx
  equivcheck record model.onnx -b script:board.py -i cat.npy --bundle carry    to run there by hand: python3 run.py
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
@click.option("-o", "--output", metavar="DIR", help="The folder for the recording.")
@click.option(
    "--bundle",
    metavar="DIR",
    help="Run nothing here: write a folder to carry to a board, with models, inputs and run.py (needs Python 3.8, numpy and "
    "the engine there). SPEC is ort or script:FILE.",
)
def command(
    model: str, spec: str, inputs: tuple[str, ...], preprocess: str | None, output: str | None, bundle: str | None
) -> int:
    """Run MODEL on one backend and keep every stored value in DIR, to be judged later by compare."""
    not_empty({"--output": output, "--preprocess": preprocess, "--backend": spec, "--bundle": bundle})
    if output is not None and bundle is not None:
        raise click.UsageError("-o DIR records here, --bundle DIR writes what is carried to a board: give one of them")
    if bundle is not None:
        return _bundle(model, spec, inputs, preprocess, Path(bundle))
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output' (record here), or '--bundle' (carry it to a board)")
    from equivcheck.backends.registry import backend
    from equivcheck.models.onnx.load import load_model
    from equivcheck.recorder import record_samples

    progress = progress_line()
    engine, loaded_model = backend(spec), load_model(model)
    samples = _samples(loaded_model, inputs, preprocess)
    with saying_what_is_kept(Path(output)):
        place = record_samples(loaded_model, engine, samples, Path(output), progress)
    progress("")
    click.echo(f"{place}: {counted(len(samples), 'sample')} on {engine.spec}, {_megabytes(place)}")
    click.echo("next: " + shlex.join(["equivcheck", "compare", "OTHER", str(place), "--model", model]))
    return 0


def _bundle(model: str, spec: str, inputs: tuple[str, ...], preprocess: str | None, folder: Path) -> int:
    """Write what is carried to a board."""
    from equivcheck.bundle import runs, write_bundle
    from equivcheck.models.onnx.load import load_model

    progress = progress_line()
    what, loaded_model = runs(spec), load_model(model)
    samples = _samples(loaded_model, inputs, preprocess)
    place = write_bundle(loaded_model, what, samples, folder, progress)
    progress("")
    click.echo(f"{place}: {counted(len(samples), 'sample')} for {what.spec}, {_megabytes(place)}")
    click.echo("carry it to the board, and there: python3 run.py")
    results = str(place / "results")
    click.echo(f"then carry {results} back: " + shlex.join(["equivcheck", "compare", results, "--model", model]))
    return 0


def _samples(model: OnnxModel, inputs: tuple[str, ...], preprocess: str | None) -> list[Sample]:
    from equivcheck.inputs import load_samples
    from equivcheck.recorder import input_specs

    loaded = load_samples(list(inputs), input_specs(model.graph), recipe=preprocess)
    for note in loaded.notes:
        click.echo(f"equivcheck: {note}", err=True)
    return loaded.samples


def _megabytes(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 2**20:.1f} MB"
