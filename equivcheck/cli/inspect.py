"""`equivcheck inspect`: what a model is made of."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from equivcheck.cli.streams import check_json, write_json

if TYPE_CHECKING:
    from equivcheck.describe import Description, Port


@click.command(name="inspect", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("model", type=click.Path(path_type=str))
@click.option("--json", "json_to", metavar="FILE|-", help="Write it as JSON; - prints that on stdout instead of text.")
def command(model: str, json_to: str | None) -> int:
    """Show what MODEL is made of: ports, operators, quantisation, weights, and where to split it."""
    from equivcheck.describe import describe
    from equivcheck.models.onnx.load import load_model

    check_json(json_to, model)
    found = describe(load_model(model))
    if not write_json(found.to_json(), json_to):
        click.echo("\n".join(_lines(found)))
    return 0


def _lines(found: Description) -> list[str]:
    scheme = found.scheme
    opsets = ", ".join(
        f"{domain} {version}" for domain, version in found.opsets.items() if domain in ("ai.onnx", "com.microsoft")
    )
    things = "operators" if found.format == "tflite" else "nodes"
    version = f"schema {found.ir_version}" if found.format == "tflite" else f"IR {found.ir_version}, {opsets}"
    producer = f", by {found.producer}" if found.producer else ""
    weights = f"{found.parameters:,} parameters, {_size(found.weight_bytes)}"
    outside = f", {_size(found.external_bytes)} of it in external files" if found.external_bytes else ""
    lines = [
        f"{found.path}",
        f"  {found.format:10} {version}{producer}, sha256 {found.sha256[:8]}",
        *(f"  input      {_port(port)}" for port in found.inputs),
        *(f"  output     {_port(port)}" for port in found.outputs),
        f"  graph      {found.nodes} {things}, {found.steps} steps; {weights}{outside}",
        f"  operators  {_counts(found.ops)}",
        f"  quantised  {scheme.form}{'' if not scheme.activations else '; values ' + _counts(scheme.activations)}",
    ]
    if scheme.weights:
        lines.append(f"  weights    {_counts(scheme.weights)}")
    if scheme.not_quantised and scheme.activations:
        shown = ", ".join(scheme.not_quantised[:6]) + (" ..." if len(scheme.not_quantised) > 6 else "")
        lines.append(f"  in float   {len(scheme.not_quantised)} of {found.steps} steps: {shown}")
    if found.functions:
        lines.append(f"  functions  {', '.join(found.functions)}")
    lines += ["", "  split it at (for --split-at, split --at):"] if found.split_points else []
    for point in found.split_points:
        many = f", 1 of {point.count}" if point.count > 1 else ""
        lines.append(f"    {shlex.quote(point.selector):24} {point.op_type}, step #{point.step}{many}")
    return lines


def _port(port: Port) -> str:
    shape = (
        "x".join("?" if dim is None else str(dim) for dim in port.shape) if port.shape is not None else "shape unknown"
    )
    grid = "" if port.scale is None else f", scale {port.scale:.6g}, zero point {port.zero_point}"
    return f"{port.name} {shape or 'scalar'} {port.dtype}{grid}" if port.dtype else f"{port.name} of no tensor type"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _size(count: int) -> str:
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
