"""`equivcheck compare`: judge recordings and dumps, or two results."""

from __future__ import annotations

import click

from equivcheck.cli.shown import EXIT, again, not_empty, show, writable
from equivcheck.cli.streams import progress_line

_EPILOG = """\b
Examples:
  equivcheck compare cpu npu --model model.onnx            every step of both, on the inputs each had
  equivcheck compare board_dump.npz --model model.onnx     one side alone: each step against its real value
  equivcheck compare cpu Result_0 --model model.onnx --candidate-layout nhwc
  equivcheck compare a.npz b.npz                           no model: tensors by name, preset close
  equivcheck compare sdk1.json sdk2.json                   two results of diff --json
\b
Exit codes: 0 equivalent, 1 different, 2 trouble (no result), 3 inconclusive (no verdict), 130 interrupted.
"""


@click.command(
    name="compare", epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.argument("recordings", metavar="[REF] CAND", nargs=-1, required=True, type=click.Path(path_type=str))
@click.option("--model", metavar="FILE", help="The recorded model: judges every step. Needed when CAND stands alone.")
@click.option(
    "--split-at", metavar="SEL", multiple=True, help="Show both sides of a node, as in diff. Needs --model. Repeatable."
)
@click.option(
    "-i", "--input", "inputs", metavar="INPUT", multiple=True, help="What was fed, for dumps that do not hold it."
)
@click.option("--preprocess", metavar="RECIPE", help="How a picture became the input, as in diff.")
@click.option("--reference-layout", type=click.Choice(["nchw", "nhwc"]), help="Layout of a foreign REF's 4-D tensors.")
@click.option("--candidate-layout", type=click.Choice(["nchw", "nhwc"]), help="Layout of a foreign CAND's 4-D tensors.")
@click.option("--names", metavar="FILE", help="TOML: the dumps' names, and dtypes, shapes, scales they do not tell.")
@click.option("--reference-names", metavar="FILE", help="Another one for REF.")
@click.option(
    "--values",
    type=click.Choice(["all", "splits", "outputs"]),
    default="all",
    show_default=True,
    help="Which stored values to judge.",
)
@click.option(
    "--tolerance",
    metavar="PRESET|FILE",
    help="semantics (default with --model), close (default without), bitwise, or a TOML file with rules.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write the result as JSON; - for stdout.")
@click.option("-v", "--verbose", is_flag=True, help="Every judged tensor, with full names.")
def command(
    recordings: tuple[str, ...],
    model: str | None,
    split_at: tuple[str, ...],
    inputs: tuple[str, ...],
    preprocess: str | None,
    reference_layout: str | None,
    candidate_layout: str | None,
    names: str | None,
    reference_names: str | None,
    values: str,
    tolerance: str | None,
    json_to: str | None,
    verbose: bool,
) -> int:
    """Judge what was recorded: folders of record and diff --save, or dumps of other tools (.npz, .npy, raw, .pb).

    With --model, each side's steps are judged against their real values, on the inputs that side itself had: the same
    verdicts and culprits as diff. Values that a dump lacks merge their steps. REF may be left out then.
    """
    not_empty(
        {
            "--model": model,
            "--names": names,
            "--reference-names": reference_names,
            "--json": json_to,
            "--preprocess": preprocess,
        }
    )
    writable(json_to, read=[model, names, reference_names, preprocess, tolerance, *recordings, *inputs])
    if len(recordings) > 2:
        raise click.UsageError(f"compare takes one or two recordings, got {len(recordings)}")
    given = click.get_current_context()
    said = {p.opts[0] for p in given.command.params if _is_given(given, p.name or "")}
    if all(path.endswith(".json") for path in recordings):
        if idle := sorted(said - {"--json", "recordings"}):
            raise click.UsageError(f"two results are compared as they are: {idle[0]} belongs to recordings")
        return _compare_results(recordings, json_to)
    if model is None and (idle := sorted(said & {"--split-at", "-i", "--preprocess", "--values"})):
        raise click.UsageError(f"{' and '.join(idle)} need --model")
    from equivcheck.replay import compare

    progress = progress_line()
    result = compare(
        *recordings,
        model=model,
        inputs=list(inputs) or None,
        preprocess=preprocess,
        split_at=split_at,
        values=values,  # type: ignore[arg-type]  # click.Choice has checked it
        tolerance=tolerance,
        reference_layout=reference_layout,
        candidate_layout=candidate_layout,
        names=names,
        reference_names=reference_names,
        progress=progress,
        again=again(),
    )
    progress("")
    show(result, json_to, verbose)
    return EXIT[result.verdict]


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _compare_results(paths: tuple[str, ...], json_to: str | None) -> int:
    if len(paths) != 2:
        raise click.UsageError("two results are compared: compare A.json B.json")
    from equivcheck.between import compare_results

    found = compare_results(*paths)
    if json_to == "-":
        click.echo(found.to_json().decode(), nl=False)
        return found.exit_code
    if json_to is not None:
        from pathlib import Path

        from equivcheck.render.files import write_whole

        write_whole(Path(json_to), found.to_json())
    click.echo(str(found))
    return found.exit_code
