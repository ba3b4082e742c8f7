"""`equivcheck split`: cut a model in two, prove the parts, write them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from equivcheck.cli.streams import check_json, progress_line, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equivcheck.parts import SplitInfo, SplitPart, SplitPointInfo

_EPILOG = """\b
Examples:
  equivcheck split model.onnx --at GlobalAveragePool -o parts/
  equivcheck split model.onnx --at 'Conv#12' --cut after -o parts/ -i cat.jpg --preprocess recipe.toml
  equivcheck split model.tflite --at AVERAGE_POOL_2D -o parts/
\b
Writes parts/001_GlobalAveragePool/head.onnx, tail.onnx, and parts/split.json. Head and tail are run and compared with the
model, bit for bit; parts of a .tflite file are .tflite files, run on TFLite's reference kernels.
Exit codes: 0 proved (or not asked for, or it could not be run: said), 1 a part does not reproduce the model, 2 trouble.
"""
# which part is empty -> (the side of the cut it is on, the part that is everything, the other way to cut, where that cuts)
_EMPTY = {"head": ("before", "tail", "after", "behind"), "tail": ("after", "head", "before", "in front of")}


@click.command(
    name="split", epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.argument("model", type=click.Path(path_type=str))
@click.option("--at", metavar="SEL", multiple=True, required=True, help="Where: as --split-at of diff. Repeatable.")
@click.option(
    "--cut",
    type=click.Choice(["before", "after"]),
    default="before",
    show_default=True,
    help="before: the head computes what the node reads; after: what it makes.",
)
@click.option("-o", "--output", metavar="DIR", help="Folder for the parts; new, empty, or an earlier split.")
@click.option("-i", "--input", "inputs", metavar="INPUT", multiple=True, help="Input of the proof (default: random).")
@click.option("--preprocess", metavar="RECIPE", help="How a picture becomes the input, as for diff.")
@click.option("--prove/--no-prove", default=None, help="Run head + tail against the model (default: up to 1 GB).")
@click.option(
    "--json",
    "json_to",
    metavar="FILE|-",
    help="Also write split.json here; - prints it on stdout instead of the table.",
)
def command(
    model: str,
    at: tuple[str, ...],
    cut: str,
    output: str | None,
    inputs: tuple[str, ...],
    preprocess: str | None,
    prove: bool | None,
    json_to: str | None,
) -> int:
    """Cut MODEL at nodes or values into a head and a tail, each a model of its own.

    The boundary is every tensor that crosses, skip connections included, not only the one that was named.
    """
    if output is None:
        raise click.UsageError("where to? give -o DIR")
    check_json(json_to, model)
    from equivcheck.inputs import load_samples
    from equivcheck.models.onnx.load import load_model
    from equivcheck.parts import check_target, split, write
    from equivcheck.recorder import input_specs

    progress = progress_line()
    check_target(output, model)
    whole = load_model(model)
    given = (
        load_samples(list(inputs), input_specs(whole.graph), recipe=preprocess).samples[0].arrays() if inputs else None
    )
    found = split(whole, at, cut="after" if cut == "after" else "before", inputs=given, prove=prove, progress=progress)
    _refuse_empty(found, model)
    info = write(whole, found, output)
    progress("")
    if not write_json(info.to_json(), json_to):
        _show(info, output)
    return 1 if any(point.proved is False for point in info.split_points) else 0


def _refuse_empty(found: Sequence[SplitPart], model: str) -> None:
    """Raise SelectorError where nothing is split at all; among others, an empty part is shown as such."""
    from equivcheck.errors import SelectorError

    if not all(part.parts.cut.empty for part in found):
        return
    cut = found[0].parts.cut
    node = cut.point.node
    what = f"{node.op_type} '{node.label}'" if node is not None else f"'{cut.point.selector}'"
    side, whole, other, there = _EMPTY[cut.empty or ""]
    raise SelectorError(
        f"nothing is computed {side} {what}: the {whole} would be the whole model",
        asked=cut.point.selector,
        hint=f"--cut {other} cuts {there} it"
        if node is not None and cut.place == side
        else f"name a node further inside: equivcheck inspect {shlex.quote(model)}",
    )


def _show(info: SplitInfo, folder: str) -> None:
    for point in info.split_points:
        click.echo(_headline(point))
        click.echo(f"  boundary  {', '.join(point.boundary) or 'nothing crosses'}")
        for name, part in (("head", point.head), ("tail", point.tail)):
            if part is not None:
                ports = f"{', '.join(part.inputs) or 'nothing'} -> {', '.join(part.outputs)}"
                click.echo(f"  {name}      {folder.rstrip('/')}/{part.path}   {part.nodes} nodes   {ports}")
        for name, dtype in point.exchanged.items():
            click.echo(f"  exchange  {name} is {dtype}; it is handed over in a wider type, without loss")
        if point.note:
            click.echo(f"  note      {point.note}")


def _headline(point: SplitPointInfo) -> str:
    """What was proved; a part with nothing in it proves nothing."""
    what = f"{point.op_type} '{point.node}'" if point.node is not None else f"value '{point.selector}'"
    proof = {True: "PROVED", False: "NOT THE MODEL", None: "not proved"}[point.proved]
    where = f"{point.cut} " if point.node is not None else "at "
    if point.empty is not None:
        side, whole, *_ = _EMPTY[point.empty]
        return f"NO SPLIT   {where}{what}   nothing is computed {side} it: the {whole} is the whole model"
    return f"{proof}   {where}{what}" + ("   head + tail = model, bit for bit" if point.proved else "")
