"""The .tflite file that stands for a model: the model itself, or the twin of an ONNX model; and what its tensors hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from equivcheck.errors import EngineRefused, UnsupportedModel
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.models.tflite import cut
from equivcheck.models.tflite.load import Flatbuffer, TfliteModel, read_flatbuffer
from equivcheck.models.tflite.view import IMAGE_AXES

_FILE_AXES = tuple(int(axis) for axis in np.argsort(IMAGE_AXES))


@dataclass(frozen=True, eq=False)
class File:
    """A file, and where it holds the values of `graph`.

    `tensors`: stored value -> tensor. `layout`: axis k of the tensor is axis `layout[k]` of the value; left out where nothing
    is turned. `ends`: graph output -> tensor. Codes may be int8 where the model's are uint8, or the other way round.
    """

    graph: Graph
    source: Flatbuffer
    tensors: Mapping[str, str]
    layout: Mapping[str, Sequence[int]]
    ends: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def fed(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Feeds by input name of the graph, as the file's input tensors take them. Raises EngineRefused for a missing one."""
        missing = [name for name in self.graph.inputs if name not in feeds]
        if missing:
            raise EngineRefused(f"no feed for input '{missing[0]}'")
        return {self.tensors[name]: self.as_tensor(name, feeds[name]) for name in self.graph.inputs}

    def as_tensor(self, name: str, array: Array) -> Array:
        """A stored value as its tensor lies."""
        return array.transpose(self.layout[name]) if name in self.layout else array

    def value(self, name: str, array: Array) -> Array:
        """A stored value (or graph output) from the content of its tensor."""
        stored = self.graph.store(name) or name
        turned = array.transpose(np.argsort(self.layout[stored])) if stored in self.layout else array
        return np.ascontiguousarray(self._own_codes(name, turned)).reshape(turned.shape)

    def _own_codes(self, name: str, array: Array) -> Array:
        quantisation = self.graph.quantisation.get(name)
        return array if quantisation is None else _coded(array, quantisation.dtype.name)

    def in_its_codes(self, tensor: str, array: Array) -> Array:
        """What lies in a tensor, in that tensor's own codes."""
        return _coded(array, self.source.tensors[self.source.index_of[tensor]].dtype)

    def outputs(self, got: Mapping[str, Array]) -> dict[str, Array]:
        """The graph's outputs from the content of the file's."""
        return {name: self.value(name, got[tensor]) for name, tensor in self.ends.items()}


def _coded(array: Array, dtype: str) -> Array:
    """8-bit codes with or without a sign: uint8 codes are int8 codes plus 128, zero points as well."""
    if {dtype, array.dtype.name} != {"int8", "uint8"}:
        return array
    return (array.astype(np.int16) + (128 if dtype == "uint8" else -128)).astype(dtype)


def file_of(model: OnnxModel) -> File:
    """The file to run for `model`. Raises EngineRefused where an ONNX model has no twin, with what cannot be written."""
    if isinstance(model, TfliteModel):
        source = model.flatbuffer
        images = dict.fromkeys((source.tensors[k].name for k in model.images), _FILE_AXES)
        names = {name: name for name in model.graph.stored}
        return File(model.graph, source, names, images, {name: name for name in model.graph.outputs})
    from equivcheck.twins.convert import convert

    try:
        twin = convert(model)
    except UnsupportedModel as error:
        raise EngineRefused("it has no TFLite twin", last_words=str(error)) from error
    source = read_flatbuffer(twin.content, f"the twin of {model.path}")
    ends = [source.tensors[k].name for k in source.outputs]
    return File(
        model.graph,
        source,
        dict(twin.tensors),
        dict(twin.layout),
        dict(zip(model.graph.outputs, ends, strict=True)),
        ("its TFLite twin ran: the same integers, scales and zero points", *twin.notes),
    )


class CutFile:
    """A model cut from an opened one (a head, the isolated model), as the same cut of its file.

    A twin may hold two values, a Transpose apart, in one tensor: then that is fed the later one, and outputs of steps that read
    the other are left out. Raises EngineRefused for an output that is no stored value.
    """

    def __init__(self, file: File, own: Mapping[str, onnx.NodeProto], proto: onnx.ModelProto) -> None:
        self.file = file
        self._feeds = _fed(proto, own, file.graph)
        place = {name: k for k, name in enumerate(file.graph.stored)}
        self._held = {file.tensors[name]: name for name in sorted(self._feeds.values(), key=place.__getitem__)}
        shown = {port.name: _stored(port.name, proto, file.graph) for port in proto.graph.output}
        self._shown = {name: value for name, value in shown.items() if self._computed(value)}
        wanted = [file.tensors[value] for value in self._shown.values()]
        self.part = cut.part(
            file.source,
            inputs=self._held,
            outputs=wanted,
            operators=cut.needed(file.source, wanted, self._held),
        )

    def _computed(self, value: str) -> bool:
        """Whether an operator makes the value, from tensors that hold what its step is fed."""
        if self.file.source.index_of[self.file.tensors[value]] not in self.file.source.producer:
            return False
        reads = self.file.graph.step_of_value[value].inputs
        return all(self._held.get(self.file.tensors[name], name) == name for name in reads)

    def fed(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Feeds by input name of the cut model, as the part takes them."""
        values = {value: feeds[port] for port, value in self._feeds.items()}
        held = {tensor: self.file.as_tensor(value, values[value]) for tensor, value in self._held.items()}
        return {tensor: self.file.in_its_codes(tensor, held[tensor]) for tensor in self.part.inputs}

    def outputs(self, got: Mapping[str, Array]) -> dict[str, Array]:
        """The cut model's outputs from the content of the part's."""
        return {name: self._result(name, value, got[self.file.tensors[value]]) for name, value in self._shown.items()}

    def _result(self, name: str, value: str, array: Array) -> Array:
        codes, quantisation = self.file.value(value, array), self.file.graph.quantisation.get(value)
        if name == value or quantisation is None:
            return codes
        scale, zero = quantisation.scale.reshape(()), quantisation.zero_point.astype(np.int32).reshape(())
        return np.asarray((codes.astype(np.int32) - zero).astype(np.float32) * scale)


def nodes_by_output(model: OnnxModel) -> dict[str, onnx.NodeProto]:
    """The nodes of a model's QDQ form by the first value that each makes: cutting keeps those names."""
    return {node.output[0]: node for node in model.qdq.proto.graph.node if node.output}


def cut_from(proto: onnx.ModelProto, model: OnnxModel, own: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether `proto` holds nothing but nodes and weights of `model`, and DequantizeLinears behind its values."""

    def same(node: onnx.NodeProto) -> bool:
        before = own.get(node.output[0])
        if before is None:
            return node.op_type == "DequantizeLinear" and (node.input[0] in own or node.input[0] in model.graph.inputs)
        return (node.op_type, node.domain, node.output, node.attribute) == (
            before.op_type,
            before.domain,
            before.output,
            before.attribute,
        )

    weights = model.initializers
    return all(same(node) for node in proto.graph.node) and all(
        weights.get(tensor.name) == tensor for tensor in proto.graph.initializer
    )


def _fed(proto: onnx.ModelProto, own: Mapping[str, onnx.NodeProto], graph: Graph) -> dict[str, str]:
    """Input of the cut model -> the stored value it stands for: what the model's own node reads at the same place."""
    found = {
        port.name: port.name
        for port in proto.graph.input
        if port.name in graph.step_of_value or port.name in graph.inputs
    }
    for node in proto.graph.node:
        before = own.get(node.output[0])
        for now, then in zip(node.input, before.input if before is not None else (), strict=False):
            if now != then:
                found[now] = then
    return found


def _stored(name: str, proto: onnx.ModelProto, graph: Graph) -> str:
    """The stored value that an output of the cut model shows: itself, or what its DequantizeLinear reads."""
    if name in graph.step_of_value:
        return name
    node = next((node for node in proto.graph.node if name in node.output), None)
    if node is None or node.op_type != "DequantizeLinear" or node.input[0] not in graph.step_of_value:
        raise EngineRefused(f"TFLite has no tensor for '{name}'")
    return str(node.input[0])
