"""`equivcheck convert`: a quantised ONNX model as a .tflite twin, proved before it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivcheck.cli.shown import not_empty
from equivcheck.cli.streams import progress_line

if TYPE_CHECKING:
    from equivcheck.models.graph import Array
    from equivcheck.models.onnx.load import OnnxModel
    from equivcheck.twins.convert import Converted
    from equivcheck.twins.prove import Proof

_EPILOG = """\b
Examples:
  equivcheck convert model.onnx -o model.tflite
  equivcheck convert model.onnx -o model.tflite -i cat.jpg --preprocess recipe.toml
\b
The twin has the integers, scales and zero points of the model, and the names of its values; 4-D tensors lie channels last.
It is run on TFLite's reference kernels and every step judged on the inputs the twin itself had.
Exit codes: 0 proved (or not asked for, or no TFLite here: said), 1 a step is not the model's (nothing is written), 2 trouble.
"""
SHOWN = 6


@click.command(
    name="convert", epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.argument("model", type=click.Path(path_type=str))
@click.option("-o", "--output", metavar="FILE", required=True, help="The .tflite file to write.")
@click.option("-i", "--input", "inputs", metavar="INPUT", multiple=True, help="Input of the proof (default: random).")
@click.option("--preprocess", metavar="RECIPE", help="How a picture becomes the input, as for diff.")
@click.option("--prove/--no-prove", default=True, help="Run the twin and judge every step of it (default).")
@click.option("--older-engines", is_flag=True, help="Write only what TFLite 2.14, found on many boards, can read.")
@click.option("-v", "--verbose", is_flag=True, help="List every rewritten step and every value without a tensor.")
def command(
    model: str,
    output: str,
    inputs: tuple[str, ...],
    preprocess: str | None,
    prove: bool,
    older_engines: bool,
    verbose: bool,
) -> int:
    """Write the quantised ONNX MODEL as a .tflite file that computes the same, value by value."""
    not_empty({"--output": output, "--preprocess": preprocess})
    from equivcheck.errors import ModelError
    from equivcheck.inputs import load_samples
    from equivcheck.models.onnx.load import load_model
    from equivcheck.recorder import input_specs
    from equivcheck.render.files import check_writable, write_whole
    from equivcheck.twins.convert import convert

    check_writable(Path(output), [model, preprocess, *inputs])
    progress = progress_line()
    whole = load_model(model)
    if whole.format != "onnx":
        raise ModelError(f"{model} is a TFLite model already", asked=model, hint="give an .onnx file")
    progress(f"converting {model}")
    twin = convert(whole, older_engines=older_engines)
    proof = None
    if prove and _runs_here():
        samples = load_samples(list(inputs), input_specs(whole.graph), recipe=preprocess)
        for note in samples.notes:
            click.echo(f"equivcheck: {note}", err=True)
        progress("running the twin")
        proof = _proved(whole, twin, samples.samples[0].arrays())
    progress("")
    if proof is None or proof.proved:
        write_whole(Path(output), twin.content)
    _show(model, output, twin, proof, prove, verbose)
    return 0 if proof is None or proof.proved else 1


def _runs_here() -> bool:
    from equivcheck.engines.tflite import PACKAGES

    return any(find_spec(module.partition(".")[0]) is not None for _, module in PACKAGES)


def _proved(model: OnnxModel, twin: Converted, feeds: Mapping[str, Array]) -> Proof:
    """In a process of its own: a TFLite that aborts must not take this one with it."""
    from equivcheck.backends.remote import EngineFailed, Place, RemoteEngine, Travelling
    from equivcheck.backends.vnpu import CpuFallback
    from equivcheck.errors import EngineRefused
    from equivcheck.twins.prove import prove

    engine = RemoteEngine(Place(), Travelling("tflite.py", "TfliteEngine"))
    try:
        return prove(model, twin, engine, feeds, CpuFallback(model))
    except EngineFailed as error:
        raise EngineRefused("TFLite does not run the twin", last_words=str(error)) from error
    finally:
        engine.close()


def _show(model: str, output: str, twin: Converted, proof: Proof | None, asked: bool, verbose: bool) -> None:
    click.echo(_headline(model, output, proof, asked))
    for wrong in proof.wrong[: None if verbose else SHOWN] if proof is not None else ():
        click.echo(f"  wrong      #{wrong.step} {wrong.op_type} {wrong.value}: {wrong.reason}")
    held = len(twin.tensors) - len(twin.missing)
    click.echo(
        f"  tensors    {held} of {len(twin.tensors)} values under their own names; {len(twin.layout)} lie in another order"
    )
    missing = list(twin.missing.items())
    for name, why in missing if verbose else missing[:SHOWN]:
        click.echo(f"  no tensor  {name}: {why}" if verbose else f"  no tensor  {_last(name)}: {why}")
    if not verbose and len(missing) > SHOWN:
        click.echo(f"             and {len(missing) - SHOWN} more (-v)")
    if verbose:
        for step, texts in twin.rewrites.items():
            click.echo(f"  rewritten  #{step}: {'; '.join(texts)}")
    else:
        counted = Counter(text for texts in twin.rewrites.values() for text in texts)
        for text, steps in counted.most_common():
            click.echo(f"  rewritten  {steps} step{'s' * (steps > 1)}: {text}")
    for note in twin.notes:
        click.echo(f"  note       {note}")


def _headline(model: str, output: str, proof: Proof | None, asked: bool) -> str:
    if proof is None:
        why = "no TFLite here: pip install 'equivcheck[tflite]'" if asked else "not asked for"
        return f"NOT PROVED   {model} -> {output}   {why}"
    if not proof.proved:
        wrong = len({wrong.value for wrong in proof.wrong})
        return f"NOT THE MODEL   {model}: {wrong} of {proof.compared} values are wrong; nothing was written"
    others = f", {proof.legal} more within legal rounding" if proof.legal else ""
    return f"PROVED   {model} -> {output}   {proof.equal} of {proof.compared} values: the very codes{others}"


def _last(name: str) -> str:
    """The last piece of a name: real names reach 800 characters."""
    return name.replace(";", "/").rstrip("/").split("/")[-1]
