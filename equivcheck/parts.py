"""Splits a model for the user: cuts it, proves that head and tail together are the model, writes the parts.

The proof runs the model, the head, and the tail on what the head gave, without optimisation, and compares the model's
outputs bit for bit. Models above 1 GB are not proved unless it is asked for.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
from onnx import helper

from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineError, EngineRefused, InputError, OutputError, SelectorError
from equivcheck.inputs import Sample, samples_from_python
from equivcheck.models.graph import Array
from equivcheck.models.onnx.cut import part
from equivcheck.models.onnx.external import carry_external
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.models.onnx.rewrite import TWINS
from equivcheck.models.onnx.split import Parts, Place, build_parts, find_cut
from equivcheck.models.select import select

if TYPE_CHECKING:
    import os

SCHEMA = "equivcheck-split/1"
_PLAIN = {"optimization": "disable"}


class PartInfo(msgspec.Struct, frozen=True):
    path: str
    inputs: list[str]
    outputs: list[str]
    nodes: int


class SplitPointInfo(msgspec.Struct, frozen=True):
    """One entry of split.json. `before`, `after` and `boundary` are ONNX values of the file; `proved` None: not tried."""

    selector: str
    node: str | None
    op_type: str | None
    cut: str
    before: list[str]
    after: list[str]
    boundary: list[str]
    head: PartInfo
    tail: PartInfo | None
    proved: bool | None
    note: str
    exchanged: dict[str, str] = {}


class SplitInfo(msgspec.Struct, frozen=True):
    schema: str
    model: str
    split_points: list[SplitPointInfo]

    def to_json(self) -> bytes:
        """Return split.json (UTF-8), indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


@dataclass(frozen=True, eq=False)
class SplitPart:
    """One split point with its parts. `proved`: head + tail = model, bit for bit; None where that was not tried."""

    parts: Parts
    proved: bool | None
    note: str

    @property
    def head(self) -> onnx.ModelProto:
        return self.parts.head

    @property
    def tail(self) -> onnx.ModelProto | None:
        return self.parts.tail

    @property
    def boundary(self) -> tuple[str, ...]:
        return self.parts.cut.boundary


def split(
    model: str | os.PathLike[str] | OnnxModel,
    at: str | Sequence[str],
    *,
    cut: Place = "before",
    inputs: object = None,
    prove: bool | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[SplitPart]:
    """Cut `model` at every split point of the selectors `at`; `cut` before or after the node.

    `inputs` (as for `equivcheck.diff`) feed the proof; None: seeded random. `prove` None: unless weights exceed 1 GB.
    Raises SelectorError, ModelError; InputError where the proof needs a shape that is not known.
    """
    whole = model if isinstance(model, OnnxModel) else load_model(model)
    points = select(whole.graph, [at] if isinstance(at, str) else list(at), TWINS, stored=False)
    if not points:
        raise SelectorError("nothing is selected", hint="name at least one split point: --at GlobalAveragePool")
    wanted = not whole.external if prove is None else prove
    found = []
    proof = _Proof(whole, inputs) if wanted else None
    for number, point in enumerate(points, 1):
        progress(f"split point {number} of {len(points)}: {point.selector}")
        parts = build_parts(whole, find_cut(whole, point, cut), _types_by_engine)
        proved, note = proof.of(parts) if proof is not None else (None, "")
        found.append(SplitPart(parts, proved, "; ".join(filter(None, [*parts.cut.notes, note]))))
    return found


def _types_by_engine(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Types of a model's untyped outputs, as ONNX Runtime works them out when it loads it."""
    engine = OrtEngine()
    try:
        loaded = engine.load(proto.SerializeToString(), _PLAIN)
    except Exception as error:  # onnxruntime raises its own classes, RuntimeError and ValueError
        raise EngineRefused("onnxruntime does not know the type of a cut value", last_words=str(error)[:400]) from error
    return {name: _port(name, kind, shape) for name, kind, shape in loaded["outputs"]}


def _port(name: str, kind: str, shape: Sequence[Any]) -> onnx.ValueInfoProto:
    """ONNX Runtime's `tensor(float)` and shape as a ValueInfoProto; sequences and maps stay untyped."""
    match = re.fullmatch(r"tensor\((\w+)\)", kind)
    names = {"float": "FLOAT", "double": "DOUBLE"}
    if match is None:
        return onnx.ValueInfoProto(name=name)
    element = onnx.TensorProto.DataType.Value(names.get(match[1], match[1].upper()))
    return helper.make_tensor_value_info(name, element, list(shape) if shape else None)


class _Proof:
    """Runs the model once, then head and tail of each cut, on the same feeds."""

    def __init__(self, model: OnnxModel, inputs: object) -> None:
        from equivcheck.check import input_specs

        self.model = model
        self.feeds: dict[str, Array] = {}
        self.whole: dict[str, Array] | None = None
        self.refused = ""
        try:
            sample: Sample = samples_from_python(inputs, input_specs(model.graph)).samples[0]
        except InputError as error:
            if inputs is not None:
                raise
            self.refused = f"not proved: {error}"
            return
        self.feeds = sample.arrays()
        ports = {port.name: None for port in model.proto.graph.input}
        outputs = [port.name for port in model.proto.graph.output]
        try:
            self.whole = _run(part(model.proto, inputs=ports, outputs=outputs), self.feeds, model)
        except EngineError as error:
            self.refused = f"not proved: ONNX Runtime would not run the model itself ({error})"

    def of(self, parts: Parts) -> tuple[bool | None, str]:
        """(proved, what to say): None where the model itself does not run."""
        if self.whole is None:
            return None, self.refused
        try:
            got = _run(parts.head, self.feeds, self.model)
            if parts.tail is not None:
                ports = {port.name for port in parts.tail.graph.input}
                got |= _run(parts.tail, {n: a for n, a in {**self.feeds, **got}.items() if n in ports}, self.model)
        except EngineError as error:
            return False, f"a part does not run: {error}"
        for name, array in self.whole.items():
            if name not in got:
                return False, f"output '{name}' comes out of neither part"
            if not _same_bits(array, got[name], exchanged=name in parts.exchanged):
                return False, f"output '{name}' differs"
        return True, ""


def _run(proto: onnx.ModelProto, feeds: Mapping[str, Array], model: OnnxModel) -> dict[str, Array]:
    engine = OrtEngine()
    ports = {port.name for port in proto.graph.input}
    try:
        if model.external:
            with tempfile.TemporaryDirectory(prefix="equivcheck-") as scratch:
                copy = onnx.ModelProto()
                copy.CopyFrom(proto)
                carry_external(copy, Path(model.path).parent, Path(scratch))
                path = Path(scratch) / "part.onnx"
                path.write_bytes(copy.SerializeToString())
                engine.load(str(path), _PLAIN)
                return engine.run({name: array for name, array in feeds.items() if name in ports})
        engine.load(proto.SerializeToString(), _PLAIN)
        return engine.run({name: array for name, array in feeds.items() if name in ports})
    except Exception as error:  # onnxruntime raises its own classes, RuntimeError and ValueError
        raise EngineRefused("onnxruntime", last_words=" ".join(str(error).split())[:400]) from error


def _same_bits(one: Any, other: Any, *, exchanged: bool) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):  # sequences, maps
        return repr(one) == repr(other)
    if one.dtype.kind in "OUS" or exchanged:
        return bool(np.array_equal(one, other)) if not exchanged else one.shape == other.shape
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# -- writing -----------------------------------------------------------------------------------------------------------


def write(model: OnnxModel, found: Sequence[SplitPart], folder: str | os.PathLike[str]) -> SplitInfo:
    """Write each split point's head.onnx and tail.onnx into a folder `<nnn>_<op_type>` of its own, and split.json.

    `folder` is written whole or not at all; it must not exist, be empty, or hold an earlier split. Raises OutputError.
    """
    place = Path(folder)
    if place.exists() and (not place.is_dir() or (any(place.iterdir()) and not (place / "split.json").exists())):
        raise OutputError(
            f"{place} exists and holds no earlier split", asked=str(place), hint="name a new or empty folder"
        )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise OutputError(f"cannot write to {place.parent}: {error.strerror}", asked=str(place)) from error
    try:
        info = SplitInfo(SCHEMA, model.path, [_write_one(model, k, one, scratch) for k, one in enumerate(found, 1)])
        (scratch / "split.json").write_bytes(info.to_json())
        scratch.chmod(0o755)
        if place.exists():
            shutil.rmtree(place)
        scratch.replace(place)
    except OSError as error:
        raise OutputError(f"cannot write {place}: {error.strerror}", asked=str(place)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return info


def _write_one(model: OnnxModel, number: int, one: SplitPart, folder: Path) -> SplitPointInfo:
    cut, point = one.parts.cut, one.parts.cut.point
    kind = point.node.op_type if point.node is not None else "value"
    name = f"{number:03d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', kind)}"
    (folder / name).mkdir()
    head = _write_part(model, one.head, folder, f"{name}/head.onnx")
    tail = _write_part(model, one.tail, folder, f"{name}/tail.onnx") if one.tail is not None else None
    return SplitPointInfo(
        selector=point.selector,
        node=point.node.label if point.node is not None else None,
        op_type=point.node.op_type if point.node is not None else None,
        cut=cut.place,
        before=list(point.before),
        after=list(point.after),
        boundary=list(cut.boundary),
        head=head,
        tail=tail,
        proved=one.proved,
        note=one.note,
        exchanged=dict(one.parts.exchanged),
    )


def _write_part(model: OnnxModel, proto: onnx.ModelProto, folder: Path, relative: str) -> PartInfo:
    path = folder / relative
    if model.external:
        proto = _copied(proto)
        carry_external(proto, Path(model.path).parent, path.parent, prefix=f"{path.stem}.")
    path.write_bytes(proto.SerializeToString())
    constants = {tensor.name for tensor in proto.graph.initializer}
    return PartInfo(
        path=relative,
        inputs=[port.name for port in proto.graph.input if port.name not in constants],
        outputs=[port.name for port in proto.graph.output],
        nodes=len(proto.graph.node),
    )


def _copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return copy
