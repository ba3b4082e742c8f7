"""Reads an ONNX file into an `OnnxModel`: the file as it is, its QDQ form, and the format-free `Graph` of that."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from onnx import helper, numpy_helper

from equivcheck.errors import ModelError, near
from equivcheck.models.graph import Array, Dim, Graph, Node, Value
from equivcheck.models.onnx.external import (
    LARGEST_IN_MEMORY,
    check_external,
    external_bytes,
    external_tensors,
    load_external,
)
from equivcheck.models.onnx.rewrite import QdqForm, to_qdq

_NAMES = {
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.INT4: "int4",
    onnx.TensorProto.UINT4: "uint4",
    onnx.TensorProto.FLOAT8E4M3FN: "float8_e4m3fn",
    onnx.TensorProto.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    onnx.TensorProto.FLOAT8E5M2: "float8_e5m2",
    onnx.TensorProto.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    onnx.TensorProto.STRING: "str",
}


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """One ONNX model. `proto` is the file's content and is never changed; surgery works on copies.

    `external_bytes`: how much of its weights lies in files beside it, whether they were read or not.
    """

    path: str
    sha256: str
    proto: onnx.ModelProto
    external_bytes: int = 0

    format = "onnx"

    @cached_property
    def qdq(self) -> QdqForm:
        """The same model with every QLinear operator written as DQ-op-Q; the file itself where it has none."""
        return to_qdq(self.proto)

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.qdq, self.proto, Path(self.path).parent)

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        """The weights of the QDQ form by name."""
        return {tensor.name: tensor for tensor in self.qdq.proto.graph.initializer}

    @cached_property
    def evaluator(self) -> dict[str, Any]:
        """What evaluated steps of this model last (see `equivcheck.truth`)."""
        return {}

    @property
    def opsets(self) -> dict[str, int]:
        return {entry.domain or "ai.onnx": entry.version for entry in self.proto.opset_import}

    @property
    def ir_version(self) -> int:
        return int(self.proto.ir_version)

    @property
    def producer(self) -> str:
        """What wrote the file, and its version."""
        return f"{self.proto.producer_name} {self.proto.producer_version}".strip()

    @property
    def external(self) -> bool:
        """True where weights stay in files beside the model, because together they do not fit into one protobuf."""
        return bool(external_tensors(self.proto))

    def with_input_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Return this model with the named graph inputs fixed to `shapes`; itself where nothing is symbolic."""
        symbolic = [
            port.name
            for port in self.proto.graph.input
            if port.name in shapes and any(not _fixed(dim) for dim in port.type.tensor_type.shape.dim)
        ]
        if not symbolic:
            return self
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        names: dict[str, int] = {}
        for port in proto.graph.input:
            if port.name in symbolic:
                for dim, size in zip(port.type.tensor_type.shape.dim, shapes[port.name], strict=True):
                    if dim.dim_param:
                        names[dim.dim_param] = size
                    dim.dim_value = size
        for port in proto.graph.output:
            for dim in port.type.tensor_type.shape.dim:
                if dim.dim_param in names:
                    dim.dim_value = names[dim.dim_param]
        del proto.graph.value_info[:]  # they may still speak of the symbol
        return replace(self, proto=proto)


def load_model(path: str | os.PathLike[str]) -> OnnxModel:
    """Read an ONNX or TFLite model from `path`; of a .tflite file a `models.tflite.load.TfliteModel`.

    Raises ModelError when there is no such file, it is neither, or it breaks off.
    """
    file = Path(path)
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        siblings = (
            [p.name for p in file.parent.glob("*") if p.suffix in (".onnx", ".tflite")] if file.parent.is_dir() else []
        )
        raise ModelError(
            f"no such model: {path}",
            asked=str(path),
            nearest=near(file.name, siblings),
            hint="give the path of an .onnx or .tflite file",
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", asked=str(path)) from error
    return model_from_bytes(content, str(path))


def model_from_bytes(content: bytes, path: str) -> OnnxModel:
    """Parse a serialised ModelProto, or a .tflite file; `path` names it in messages and finds its external data."""
    if content[4:8] == b"TFL3":
        from equivcheck.models.tflite.load import tflite_from_bytes

        return tflite_from_bytes(content, path)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except Exception as error:
        raise ModelError(
            f"{path} is not an ONNX model, or it breaks off ({len(content)} bytes)",
            hint="is the download complete? `python -c 'import onnx; onnx.load(PATH)'` must work",
        ) from error
    if not proto.HasField("graph") or (not proto.graph.node and not proto.graph.output):
        raise ModelError(f"{path} is not an ONNX model: it holds no graph", hint="give an .onnx file")
    outside = external_bytes(proto)
    if outside <= LARGEST_IN_MEMORY:
        load_external(proto, Path(path).parent)
    else:
        check_external(proto, Path(path).parent)
    return OnnxModel(path, hashlib.sha256(content).hexdigest(), proto, outside)


def graph_of(
    form: QdqForm,
    proto: onnx.ModelProto,
    folder: Path,
    originals: Sequence[Node] | None = None,
    kind: type[Graph] = Graph,
) -> Graph:
    """Build the format-free view of a model in QDQ form; `proto` is the file it came from, in `folder`.

    `originals` are the nodes as the file has them, and `kind` the class of the view, where that is not an ONNX file.
    """
    graph = form.proto.graph
    initial = {tensor.name for tensor in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    if originals is None:
        originals = [_node(index, node, -1, _opset(proto)) for index, node in enumerate(proto.graph.node)]
    nodes = [
        _node(index, node, origin, _opset(form.proto))
        for index, (node, origin) in enumerate(zip(graph.node, form.origins, strict=True))
    ]
    return kind(
        nodes=nodes,
        values=_values(form.proto),
        inputs=[port.name for port in graph.input if port.name not in initial],
        outputs=[port.name for port in graph.output],
        constants=Constants(graph, folder),
        originals=originals,
        captured={i: names for i, node in enumerate(graph.node) if (names := captured_names(node))},
        inner=inner_names(proto),
    )


def inner_names(proto: onnx.ModelProto) -> dict[str, str]:
    """Names of values and nodes inside bodies and local functions -> the node or function that holds them."""
    found: dict[str, str] = {}
    for node in proto.graph.node:
        for body in bodies(node):
            _note_inner(body.node, f"the body of {node.op_type} '{node.name or node.output[0]}'", found)
    for function in proto.functions:
        _note_inner(function.node, f"the local function {function.name}", found)
    return found


def _note_inner(nodes: Iterable[onnx.NodeProto], holder: str, found: dict[str, str]) -> None:
    for node in nodes:
        for name in [node.name, *node.output]:
            if name:
                found.setdefault(name, holder)
        for body in bodies(node):
            _note_inner(body.node, holder, found)


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs that a node carries as attributes (If, Loop, Scan)."""
    return [
        body
        for attribute in node.attribute
        for body in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    ]


def _opset(proto: onnx.ModelProto) -> int:
    return next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)


def _node(index: int, node: onnx.NodeProto, origin: int, opset: int) -> Node:
    attributes = _attributes(node)
    if node.op_type in FLAT_BELOW_13 and opset < 13:
        attributes = {"axis": 1, **attributes, "flat": True}
    return Node(
        index=index,
        name=node.name,
        op_type=node.op_type,
        domain="" if node.domain == "ai.onnx" else node.domain,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes=attributes,
        origin=origin,
    )


# Below opset 13 these take all axes from `axis` (1 by default) on as one: "flat" says so, to readers that know no opset.
FLAT_BELOW_13 = ("Softmax", "LogSoftmax", "Hardmax")


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS, onnx.AttributeProto.TENSOR):
            continue
        value = helper.get_attribute_value(attribute)
        found[attribute.name] = value.decode(errors="replace") if isinstance(value, bytes) else value
        if attribute.name == "output_dtype" and attribute.i:
            found["output_dtype_name"] = dtype_name(attribute.i)
    return found


class Constants(Mapping[str, Array]):
    """The constants of a graph by name, decoded when they are first asked for: many are never looked at."""

    def __init__(self, graph: onnx.GraphProto, folder: Path) -> None:
        self._folder = folder
        self._sources: dict[str, onnx.TensorProto | onnx.AttributeProto | str] = {t.name: t for t in graph.initializer}
        self._sources |= {s.values.name: s.values for s in graph.sparse_initializer}
        self._known: dict[str, Array] = {}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name in _CONSTANT_ATTRIBUTES:
                self._sources[node.output[0]] = node.attribute[0]
            elif node.op_type == "Identity" and node.input[0] in self._sources:
                self._sources[node.output[0]] = node.input[0]

    def __getitem__(self, name: str) -> Array:
        if name not in self._known:
            source = self._sources[name]
            if isinstance(source, str):
                return self[source]
            self._known[name] = self._decoded(source)
        return self._known[name]

    def _decoded(self, source: onnx.TensorProto | onnx.AttributeProto) -> Array:
        if isinstance(source, onnx.TensorProto):
            return numpy_helper.to_array(source, str(self._folder))
        if source.name == "value":
            return numpy_helper.to_array(source.t, str(self._folder))
        dtype = np.float32 if source.name.startswith("value_float") else np.int64
        return np.asarray(helper.get_attribute_value(source), dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


_CONSTANT_ATTRIBUTES = ("value", "value_float", "value_floats", "value_int", "value_ints")


def _values(proto: onnx.ModelProto) -> dict[str, Value]:
    try:
        graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    except Exception:  # inference is a help, not a judge: an op it does not know must not stop us
        graph = proto.graph
    found = {port.name: _value(port) for port in [*graph.value_info, *graph.output, *graph.input]}
    for tensor in proto.graph.initializer:
        found[tensor.name] = Value(tensor.name, dtype_name(tensor.data_type), tuple(tensor.dims))
    return found


def _value(port: onnx.ValueInfoProto) -> Value:
    tensor = port.type.tensor_type
    shape: tuple[Dim, ...] | None = None
    if tensor.HasField("shape"):
        shape = tuple(dim.dim_value if _fixed(dim) else (dim.dim_param or None) for dim in tensor.shape.dim)
    return Value(port.name, dtype_name(tensor.elem_type) if tensor.elem_type else None, shape)


def _fixed(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Whether a dimension has a size; Paddle exports write -1 for "any"."""
    return bool(dim.HasField("dim_value")) and dim.dim_value >= 0


def dtype_name(elem_type: int) -> str:
    """Return the name of an ONNX element type as numpy would write it ("int8", "bfloat16", "int4")."""
    if elem_type in _NAMES:
        return _NAMES[elem_type]
    try:
        return str(helper.tensor_dtype_to_np_dtype(elem_type))
    except (KeyError, TypeError):
        return str(onnx.TensorProto.DataType.Name(elem_type)).lower()


def captured_names(node: onnx.NodeProto) -> frozenset[str]:
    """Names that the bodies of `node` (If, Loop, Scan) read from the graph around them, at any depth."""
    captured: set[str] = set()
    for body in bodies(node):
        own = {port.name for port in body.input} | {tensor.name for tensor in body.initializer}
        own |= {s.values.name for s in body.sparse_initializer}
        used: set[str] = {port.name for port in body.output}
        for inner in body.node:
            used.update(name for name in inner.input if name)
            used.update(captured_names(inner))
            own.update(inner.output)
        captured |= used - own
    return frozenset(captured - {""})
