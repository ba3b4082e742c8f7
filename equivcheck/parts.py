"""Splits a model for the user: cuts it, proves that head and tail together are the model, writes the parts.

The proof runs the model, the head, and the tail on what the head gave, without optimisation, and compares the model's
outputs X 1 GB are not proved unless it is asked for.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
from onnx import helper

from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import (
    BackendUnavailable,
    EngineError,
    EngineRefused,
    EquivcheckError,
    InputError,
    OutputError,
    SelectorError,
)
from equivcheck.inputs import Sample, samples_from_python
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.cut import part
from equivcheck.models.onnx.external import LARGEST_IN_MEMORY, carry_external, is_external
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.models.onnx.rewrite import TWINS
from equivcheck.models.onnx.split import Parts, Place, build_parts, find_cut, readable
from equivcheck.models.select import Selected, select
from equivcheck.models.tflite import cut as flatbuffer
from equivcheck.models.tflite import split as flatbuffer_split
from equivcheck.models.tflite.load import TfliteModel

if TYPE_CHECKING:
    import os

    from equivcheck.backends.remote import RemoteEngine

SCHEMA = "equivcheck-split/1"
_PLAIN = {"optimization": "disable"}
_SCRATCH = ".equivcheck-split-"
_SMALL_WEIGHT = 1 << 16  # bytes; shapes, axes and the like, which types may depend on, are smaller


class PartInfo(msgspec.Struct, frozen=True):
    path: str
    inputs: list[str]
    outputs: list[str]
    nodes: int


class SplitPointInfo(msgspec.Struct, frozen=True):
    """One entry of split.json. `before`, `after` and `boundary` are values of the file; `proved` None: not tried.

    `empty` is the part ("head" or "tail") that has nothing to compute.
    """

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
    empty: str | None = None


class SplitInfo(msgspec.Struct, frozen=True):
    schema: str
    model: str
    split_points: list[SplitPointInfo]

    def to_json(self) -> bytes:
        """Return split.json (UTF-8), indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


@dataclass(frozen=True, eq=False)
class SplitPart:
    """One split point with its parts. `proved`: head + tail = model, bit for bit; None where that was not tried.

    `head` and `tail` are ModelProtos, or of a .tflite file `models.tflite.cut.Part`s, whose `content` is a file of its own.
    """

    parts: Parts | flatbuffer_split.TfliteParts
    proved: bool | None
    note: str

    @property
    def head(self) -> onnx.ModelProto | flatbuffer.Part:
        return self.parts.head

    @property
    def tail(self) -> onnx.ModelProto | flatbuffer.Part | None:
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
    wanted = not _is_big(whole) if prove is None else prove
    announced = _announced(points, progress)
    if isinstance(whole, TfliteModel):
        return list(_split_tflite(whole, announced, cut, inputs, wanted))
    return list(_split_onnx(whole, announced, cut, inputs, wanted))


def _is_big(model: OnnxModel) -> bool:
    return model.external or (isinstance(model, TfliteModel) and len(model.flatbuffer.content) > LARGEST_IN_MEMORY)


def _announced(points: Sequence[Selected], progress: Callable[[str], None]) -> Iterator[Selected]:
    for number, point in enumerate(points, 1):
        progress(f"split point {number} of {len(points)}: {point.selector}")
        yield point


def _split_onnx(
    model: OnnxModel, points: Iterator[Selected], cut: Place, inputs: object, prove: bool
) -> Iterator[SplitPart]:
    proof = _Proof(model, inputs) if prove else None
    for point in points:
        parts = build_parts(model, find_cut(model, point, cut), _types_by_engine)
        proved, note = proof.of(parts) if proof is not None else (None, "")
        yield SplitPart(parts, proved, _joined(*parts.cut.notes, note))


def _split_tflite(
    model: TfliteModel, points: Iterator[Selected], cut: Place, inputs: object, prove: bool
) -> Iterator[SplitPart]:
    proof = _TfliteProof(model, inputs) if prove else None
    try:
        for point in points:
            parts = flatbuffer_split.build_parts(model.flatbuffer, point, cut)
            proved, note = proof.of(parts) if proof is not None else (None, "")
            yield SplitPart(parts, proved, _joined(*parts.cut.notes, note))
    finally:
        if proof is not None:
            proof.close()


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _types_by_engine(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Types of a model's untyped outputs, as ONNX Runtime works them out when it loads it."""
    engine = OrtEngine()
    try:
        loaded = engine.load(_without_weights(proto).SerializeToString(), _PLAIN)
    except Exception as error:  # onnxruntime raises its own classes, RuntimeError and ValueError
        raise EngineRefused("onnxruntime does not know the type of a cut value", last_words=str(error)[:400]) from error
    return {name: helper.make_value_info(name, _type(kind, shape)) for name, kind, shape in loaded["outputs"]}


def _without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose big and external weights are inputs: types do not depend on them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    ports = {port.name for port in copy.graph.input}
    kept = []
    for tensor in copy.graph.initializer:
        if not is_external(tensor) and tensor.ByteSize() < _SMALL_WEIGHT:
            kept.append(tensor)
        elif tensor.name not in ports:
            copy.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    return copy


def _type(kind: str, shape: Sequence[Any]) -> onnx.TypeProto:
    """ONNX Runtime's `seq(tensor(float))` and shape as a TypeProto. No shape can mean a scalar as well as an unknown rank."""
    match = re.fullmatch(r"(tensor|sparse_tensor|seq|optional|map)\((.+)\)", kind)
    if match is None:
        return onnx.TypeProto()
    outer, inner = match.groups()
    if outer == "seq":
        return helper.make_sequence_type_proto(_type(inner, ()))
    if outer == "optional":
        return helper.make_optional_type_proto(_type(inner, ()))
    if outer == "map":
        key, value = inner.split(",", 1)
        return helper.make_map_type_proto(_element(key), _type(value, ()))
    make = helper.make_tensor_type_proto if outer == "tensor" else helper.make_sparse_tensor_type_proto
    return make(_element(inner), list(shape) if shape else None)


def _element(name: str) -> int:
    return int(onnx.TensorProto.DataType.Value(name.upper()))


class _Proof:
    """Runs the model once, then head and tail of each cut, on the same feeds."""

    def __init__(self, model: OnnxModel, inputs: object) -> None:
        self.model = model
        self.whole: dict[str, Array] | None = None
        self.feeds, self.refused = _feeds(model.graph, inputs)
        if self.refused:
            return
        ports = dict.fromkeys(model.graph.inputs)
        outputs = [port.name for port in model.proto.graph.output]
        whole = part(model.proto, inputs=ports, outputs=outputs)
        del whole.graph.output[:]
        whole.graph.output.extend(model.proto.graph.output)
        try:
            self.whole = _run(whole, self.feeds, model)
        except EngineError as error:
            self.refused = f"not proved: ONNX Runtime would not run the model itself ({error})"

    def of(self, parts: Parts) -> tuple[bool | None, str]:
        """(proved, what to say): None where the model itself does not run."""
        if self.whole is None:
            return None, self.refused
        try:
            got = _run(parts.head, self.feeds, self.model)
            _fit_shapes(parts.head, got)
            if parts.tail is not None:
                _fit_shapes(parts.tail, got)
                got |= _run(parts.tail, {**self.feeds, **got}, self.model)
                _fit_shapes(parts.tail, got)
        except EngineError as error:
            return False, f"a part does not run: {error}"
        return _compared(self.whole, got)


class _TfliteProof:
    """As `_Proof`, on TFLite's reference kernels; `close` ends their process."""

    def __init__(self, model: TfliteModel, inputs: object) -> None:
        from equivcheck.backends.spec import Spec
        from equivcheck.backends.tflite import TfliteBackend

        self.engine: RemoteEngine | None = None
        self.whole: dict[str, Array] | None = None
        self.feeds, self.refused = _feeds(model.graph, inputs)
        missing = TfliteBackend.unavailable()
        if missing is not None:
            self.refused = f"not proved: {missing}"
        if self.refused:
            return
        backend = TfliteBackend(Spec("tflite", {"kernels": "reference"}))
        self.engine, self.options = backend.engine(), backend.engine_options()
        try:
            self.whole = self._run(flatbuffer.whole(model.flatbuffer), self.feeds)
        except (EngineError, BackendUnavailable) as error:
            self.refused = f"not proved: TFLite would not run the model itself ({error})"

    def of(self, parts: flatbuffer_split.TfliteParts) -> tuple[bool | None, str]:
        """(proved, what to say): None where the model itself does not run."""
        if self.whole is None:
            return None, self.refused
        try:
            got = self._run(parts.head, self.feeds)
            if parts.tail is not None:
                got |= self._run(parts.tail, {**self.feeds, **got})
        except EngineError as error:
            return False, f"a part does not run: {error}"
        return _compared(self.whole, got)

    def _run(self, part: flatbuffer.Part, feeds: Mapping[str, Array]) -> dict[str, Array]:
        from equivcheck.backends.tflite import loaded, translated

        assert self.engine is not None
        engine = self.engine
        loaded(engine, part, self.options)
        return translated(lambda: engine.run({name: feeds[name] for name in part.inputs}))

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def _feeds(graph: Graph, inputs: object) -> tuple[dict[str, Array], str]:
    """(what to feed, why there is nothing to feed); raises InputError where given `inputs` do not fit."""
    from equivcheck.recorder import input_specs

    try:
        sample: Sample = samples_from_python(inputs, input_specs(graph)).samples[0]
    except InputError as error:
        if inputs is not None:
            raise
        return {}, f"not proved: {error}"
    return sample.arrays(), ""


def _compared(whole: Mapping[str, Array], got: Mapping[str, Array]) -> tuple[bool, str]:
    """Whether the parts gave every output of the model, bit for bit; and the first that they did not."""
    for name, array in whole.items():
        if name not in got:
            return False, f"output '{name}' comes out of neither part"
        if not _same_bits(array, got[name]):
            return False, f"output '{name}' differs"
    return True, ""


def _run(proto: onnx.ModelProto, feeds: Mapping[str, Array], model: OnnxModel) -> dict[str, Array]:
    """Run `proto` on those of `feeds` that it asks for; outputs that numpy cannot hold come in their exchange type."""
    engine = OrtEngine()
    shown = readable(proto)
    try:
        if model.external:
            with tempfile.TemporaryDirectory(prefix="equivcheck-") as scratch:
                copy = _copied(shown)
                carry_external(copy, Path(model.path).parent, Path(scratch))
                path = Path(scratch) / "part.onnx"
                path.write_bytes(copy.SerializeToString())
                asked = engine.load(str(path), _PLAIN)["inputs"]
                return engine.run({name: feeds[name] for name, _, _ in asked if name in feeds})
        asked = engine.load(shown.SerializeToString(), _PLAIN)["inputs"]
        return engine.run({name: feeds[name] for name, _, _ in asked if name in feeds})
    except EquivcheckError:
        raise
    except Exception as error:  # onnxruntime raises its own classes, RuntimeError and ValueError
        raise EngineRefused("onnxruntime", last_words=" ".join(str(error).split())[:400]) from error


def _fit_shapes(made: onnx.ModelProto, arrays: Mapping[str, Any]) -> None:
    """Give ports without a shape the rank they were seen with, and open the dimensions that turned out to be wrong.

    onnx.checker wants a shape of every port; and a stale value_info must not make a tail refuse what its head gives.
    """
    for port in [*made.graph.input, *made.graph.output]:
        array, kind = arrays.get(port.name), port.type.tensor_type
        if not isinstance(array, np.ndarray) or not port.type.HasField("tensor_type"):
            continue
        if not kind.HasField("shape") or len(kind.shape.dim) != array.ndim:
            kind.shape.CopyFrom(onnx.TensorShapeProto(dim=[onnx.TensorShapeProto.Dimension()] * array.ndim))
        for dim, size in zip(kind.shape.dim, array.shape, strict=True):
            if dim.HasField("dim_value") and dim.dim_value != size:
                dim.Clear()


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):  # sequences, maps
        return _same_items(one, other)
    if one.dtype.kind in "OUS":
        return bool(np.array_equal(one, other))
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _same_items(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_bits, one, other))
    return repr(one) == repr(other)


# -- writing -----------------------------------------------------------------------------------------------------------


def write(model: OnnxModel, found: Sequence[SplitPart], folder: str | os.PathLike[str]) -> SplitInfo:
    """Write each split point's head and tail (.onnx, or .tflite) into a folder `<nnn>_<op_type>` of its own, and split.json.

    `folder` is written whole or not at all; it must not exist, be empty, or hold an earlier split. Raises OutputError.
    """
    check_target(folder, model.path)
    place = Path(folder)
    home = (
        place if place.exists() else place.parent
    )  # an existing folder may be a mount, or where the shell is: it stays
    try:
        home.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=home))
    except OSError as error:
        raise OutputError(f"cannot write to {home}: {error.strerror}", asked=str(place)) from error
    try:
        made = scratch / "new"
        made.mkdir()
        info = SplitInfo(SCHEMA, model.path, [_write_one(model, k, one, made) for k, one in enumerate(found, 1)])
        (made / "split.json").write_bytes(info.to_json())
        if home == place:
            _exchange_entries(place, made, scratch / "old")
        else:
            made.replace(place)
    except OSError as error:
        raise OutputError(f"cannot write {place}: {error.strerror}", asked=str(place)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return info


def check_target(folder: str | os.PathLike[str], model: str | os.PathLike[str]) -> None:
    """Raise OutputError unless a split of `model` may be written to `folder`: new, empty, or an earlier split and no more."""
    place = Path(folder)
    if not place.exists():
        return
    if not place.is_dir():
        raise OutputError(f"{place} is a file", asked=str(place), hint="name a new or empty folder")
    if Path(model).resolve().is_relative_to(place.resolve()):
        raise OutputError(f"{place} holds the model itself", asked=str(place), hint="name a new or empty folder")
    names = [entry.name for entry in place.iterdir() if not entry.name.startswith(_SCRATCH)]
    foreign = [name for name in names if name != "split.json" and not re.match(r"\d{3,}_", name)]
    if names and ("split.json" not in names or foreign):
        what = f"more than an earlier split ({foreign[0]})" if "split.json" in names else "no earlier split"
        raise OutputError(f"{place} exists and holds {what}", asked=str(place), hint="name a new or empty folder")


def _exchange_entries(place: Path, made: Path, old: Path) -> None:
    """Put what `made` holds into `place`, in exchange for what is there; all as it was when that fails midway."""
    old.mkdir()
    moves = [(entry, old / entry.name) for entry in place.iterdir() if not entry.name.startswith(_SCRATCH)]
    moves += [(entry, place / entry.name) for entry in sorted(made.iterdir())]
    done = 0
    try:
        for done, (source, target) in enumerate(moves):  # noqa: B007  # where it stopped
            source.replace(target)
    except BaseException:
        for source, target in reversed(moves[:done]):
            target.replace(source)
        raise


def _write_one(model: OnnxModel, number: int, one: SplitPart, folder: Path) -> SplitPointInfo:
    cut, point = one.parts.cut, one.parts.cut.point
    kind = point.node.op_type if point.node is not None else "value"
    name = f"{number:03d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', kind)[:80]}"
    (folder / name).mkdir()
    head = _write_part(model, one.head, folder, f"{name}/head.{model.format}")
    tail = _write_part(model, one.tail, folder, f"{name}/tail.{model.format}") if one.tail is not None else None
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
        exchanged=dict(one.parts.exchanged) if isinstance(one.parts, Parts) else {},
        empty=cut.empty,
    )


def _write_part(model: OnnxModel, proto: onnx.ModelProto | flatbuffer.Part, folder: Path, relative: str) -> PartInfo:
    path = folder / relative
    if isinstance(proto, flatbuffer.Part):
        path.write_bytes(proto.content)
        return PartInfo(relative, list(proto.inputs), list(proto.outputs), len(proto.operators))
    if model.external:
        proto = _copied(proto)
        carry_external(proto, Path(model.path).parent, path.parent, prefix=f"{path.stem}-")
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
