"""`equivcheck diff`: parse what was asked, run it, show it."""

from __future__ import annotations

from pathlib import Path

import click

from equivcheck.cli.interrupt import saying_what_is_kept
from equivcheck.cli.shown import EXIT, again, not_empty, show, writable
from equivcheck.cli.streams import progress_line

_EPILOG = """\b
Examples:
  equivcheck diff model.onnx --split-at GlobalAveragePool
  equivcheck diff model.onnx --split-at '#60' -i cat.jpg --preprocess resize=224x224,scale=1/127.5,mean=1
  equivcheck diff model.onnx -c ort:optimization=disable -i 'photos/*.jpg'
  equivcheck diff model.onnx --candidate-model export2.onnx -c ort
\b
Exit codes: 0 equivalent, 1 different, 2 trouble (no result), 3 inconclusive (no verdict), 130 interrupted.
"""


@click.command(
    name="diff", epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.argument("model", type=click.Path(path_type=str))
@click.option(
    "--split-at",
    metavar="SEL",
    multiple=True,
    help="Show both sides of a node: an op_type (GlobalAveragePool), a node or value name, #N (step N), Conv#2, a glob. "
    "Repeatable.",
)
@click.option("-r", "--reference", metavar="SPEC", default="ort", show_default=True, help="The trusted backend.")
@click.option(
    "-c",
    "--candidate",
    metavar="SPEC",
    default=None,
    help="The examined backend, NAME[:KEY=VALUE,...]. Default: vnpu:profile=tflite-reference,target=warboy (a software NPU). "
    "See: equivcheck backends.",
)
@click.option(
    "--candidate-model",
    metavar="FILE",
    help="The candidate runs this file instead: another export with the same value names.",
)
@click.option(
    "-i",
    "--input",
    "inputs",
    metavar="INPUT",
    multiple=True,
    help="A sample: a picture, .npy, .npz, .pb, raw, folder, glob or random:SEED; NAME=INPUT where the model has several "
    "inputs. Repeatable. Default: seeded random.",
)
@click.option(
    "--preprocess",
    metavar="RECIPE",
    help="How a picture becomes the input: a TOML file, or resize=224x224,scale=1/255,...",
)
@click.option(
    "--values",
    type=click.Choice(["all", "splits", "outputs"]),
    default="all",
    show_default=True,
    help="Which stored values to judge.",
)
@click.option(
    "--tolerance", metavar="PRESET|FILE", help="semantics (default), bitwise, close, or a TOML file with rules."
)
@click.option(
    "--second-opinion/--no-second-opinion",
    default=None,
    help="Also run the candidate's steps on the reference's values and on random codes (default: where a run is cheap).",
)
@click.option(
    "--json", "json_to", metavar="FILE|-", help="Write the result as JSON; - writes it to stdout instead of the screen."
)
@click.option("--save", "save_to", metavar="DIR", help="Keep both recordings in DIR.")
@click.option(
    "--keep-going",
    is_flag=True,
    help="Where an engine fails on a sample, go on with the next (exit 3 all the same, or 1).",
)
@click.option("-v", "--verbose", is_flag=True, help="Every judged tensor, with full names.")
def command(
    model: str,
    split_at: tuple[str, ...],
    reference: str,
    candidate: str | None,
    candidate_model: str | None,
    inputs: tuple[str, ...],
    preprocess: str | None,
    values: str,
    tolerance: str | None,
    second_opinion: bool | None,
    json_to: str | None,
    save_to: str | None,
    keep_going: bool,
    verbose: bool,
) -> int:
    """Run MODEL on a CPU reference and an NPU candidate with the same input, and judge every step.

    A step is judged against its own real value, on the inputs that side itself had: rounding differently is legal, anything
    beyond is not. The first screen says which step is the first that is not, on which side, and how much was judged.
    """
    not_empty({"--save": save_to, "--json": json_to, "--candidate-model": candidate_model, "--preprocess": preprocess})
    writable(json_to, save_to, [model, candidate_model, preprocess, tolerance, *inputs])
    from equivcheck.backends.registry import backend
    from equivcheck.check import DEFAULT_CANDIDATE, Request, run
    from equivcheck.inputs import load_samples
    from equivcheck.models.onnx.load import load_model
    from equivcheck.recorder import input_specs
    from equivcheck.tolerance import load_tolerance

    progress = progress_line()
    reference_backend, candidate_backend = (
        backend(reference),
        backend(DEFAULT_CANDIDATE if candidate is None else candidate),
    )
    limits = load_tolerance(tolerance)
    loaded_model = load_model(model)
    other = load_model(candidate_model) if candidate_model else None
    loaded = load_samples(list(inputs), input_specs(loaded_model.graph), recipe=preprocess)
    request = Request(
        model=loaded_model,
        samples=loaded.samples,
        split_at=split_at,
        reference=reference_backend,
        candidate=candidate_backend,
        candidate_model=other,
        values=values,  # type: ignore[arg-type]  # click.Choice has checked it
        tolerance=limits,
        second_opinion=second_opinion,
        save_to=Path(save_to) if save_to else None,
        keep_going=keep_going,
        notes=[*loaded.notes, *([] if candidate else _other_npus())],
        again=again(),
        progress=progress,
    )
    with saying_what_is_kept(*([Path(save_to, side) for side in ("reference", "candidate")] if save_to else [])):
        result = run(request)
    progress("")
    show(result, json_to, verbose)
    return EXIT[result.verdict]


def _other_npus() -> list[str]:
    """A note for who took the default candidate while the software of a real NPU is installed beside it."""
    from importlib.util import find_spec

    found = find_spec("onnxruntime_qnn") is not None
    return ["the software of a real NPU is here too: -c qnn:arch=73 (Qualcomm's HTP, emulated)"] if found else []
