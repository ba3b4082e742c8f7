"""Cuts a .tflite file: heads, tails, parts and the isolated model, in the flatbuffer itself.

A flatbuffer refers only forward. So a cut file is a new head (model, subgraph, lists of tensors and operators) laid before the
old file, whose tensors, operators, options and weights it refers to: whatever equivcheck does not know of them stays as it
is, byte for byte, and nothing is parsed and written again. What the new head does not refer to is no longer part of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flatbuffers import Builder

from equivcheck.errors import ModelError, UnsupportedModel
from equivcheck.models.tflite.load import Flatbuffer, Operator
from equivcheck.models.tflite.schema import IDENTIFIER, SCALARS, Reader

_ALIGNMENT = 16  # bytes: what the schema asks for weights
_ROOM = 4096  # bytes for a new head; it grows where that is not enough


@dataclass(frozen=True, eq=False)
class Part:
    """A .tflite file cut from another. `inputs` and `outputs`: names of the whole file's tensors -> indices in this one.

    `operators` are the indices, in the whole file, of the operators it holds, in order.
    """

    content: bytes
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    operators: tuple[int, ...]


def whole(source: Flatbuffer) -> Part:
    """The file as it is, its inputs and outputs by name."""
    inputs, outputs = ({source.tensors[k].name: k for k in ports} for ports in (source.inputs, source.outputs))
    return Part(source.content, inputs, outputs, tuple(operator.index for operator in source.operators))


def head(source: Flatbuffer, outputs: Iterable[str]) -> Part:
    """The model from its start to the tensors `outputs`."""
    return part(source, inputs=[source.tensors[k].name for k in source.inputs], outputs=outputs)


def tail(source: Flatbuffer, inputs: Iterable[str]) -> Part:
    """The model from the tensors `inputs` to its end; of its own inputs those that are still needed stay."""
    return part(source, inputs=inputs, outputs=[source.tensors[k].name for k in source.outputs])


def part(
    source: Flatbuffer, *, inputs: Iterable[str], outputs: Iterable[str], operators: Collection[int] | None = None
) -> Part:
    """The operators that make `outputs` from `inputs` (or `operators`, where given), as a file of its own.

    A tensor that is fed and made by one of its operators is there twice: its readers read the fed copy. That makes the
    isolated model: all operators, all tensors fed, all of them outputs.

    Raises ModelError for a name that the file does not have, or an output that nothing in the part makes or feeds.
    """
    fed, wanted = _indices(source, inputs), _indices(source, outputs)
    kept = _makers(source, wanted, set(fed)) if operators is None else sorted(operators)
    chosen = [source.operators[k] for k in kept]
    made = {out for operator in chosen for out in operator.outputs}
    copies = {k: len(source.tensors) + n for n, k in enumerate(k for k in fed if k in made)}
    reads = {k for operator in chosen for k in operator.inputs if k >= 0}
    ports = {k: copies.get(k, k) for k in fed if k in reads or k in wanted or k in source.inputs}
    ports |= {k: k for k in source.inputs if k in reads and k not in ports}
    lost = [k for k in wanted if k not in made and k not in ports]
    if lost:
        raise ModelError(
            f"nothing in this part makes '{source.tensors[lost[0]].name}'", asked=source.tensors[lost[0]].name
        )
    content = _Head(source).write(chosen, copies, list(ports.values()), wanted)
    names = {k: source.tensors[k].name for k in {*ports, *wanted}}
    return Part(content, {names[k]: port for k, port in ports.items()}, {names[k]: k for k in wanted}, tuple(kept))


def _indices(source: Flatbuffer, names: Iterable[str]) -> list[int]:
    try:
        return [source.index_of[name] for name in dict.fromkeys(names)]
    except KeyError as error:
        raise ModelError(f"no tensor '{error.args[0]}' in the model", asked=str(error.args[0])) from None


def needed(source: Flatbuffer, outputs: Iterable[str], fed: Iterable[str]) -> list[int]:
    """The operators that `outputs` depend on, not looking behind `fed`; an output that is fed is made all the same."""
    return _makers(source, _indices(source, outputs), set(_indices(source, fed)))


def _makers(source: Flatbuffer, outputs: Iterable[int], fed: Collection[int]) -> list[int]:
    found: set[int] = set()
    pending = list(outputs)
    while pending:
        operator = source.producer.get(pending.pop())
        if operator is not None and operator.index not in found:
            found.add(operator.index)
            pending += [k for k in operator.inputs if k >= 0 and k not in fed]
    return sorted(found)


@dataclass
class _Head:
    """Writes a new head before the file of `source`. Flatbuffers are written back to front, so the old file comes first."""

    source: Flatbuffer
    builder: Builder = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        old = self.source.content
        self.size = -(-len(old) // _ALIGNMENT) * _ALIGNMENT
        self.builder = Builder(0)
        self.builder.Bytes = bytearray(_ROOM) + old + bytes(self.size - len(old))
        self.builder.head = _ROOM
        self.builder.minalign = _ALIGNMENT

    def write(
        self, operators: Sequence[Operator], copies: Mapping[int, int], inputs: Sequence[int], outputs: Sequence[int]
    ) -> bytes:
        model = Reader.root(self.source.content)
        if any(buffer.number("offset") > 1 for buffer in model.tables("buffers", "Buffer")):
            raise UnsupportedModel("weights behind the flatbuffer (a file above 2 GB) cannot be cut")
        main, *others = model.tables("subgraphs", "SubGraph")
        tensors, old = main.tables("tensors", "Tensor"), main.tables("operators", "Operator")
        new_tensors = [self._old(t.position) for t in tensors] + [self._fed_copy(tensors[k]) for k in copies]
        new_operators = [self._reading(old[op.index], op, copies) for op in operators]
        subgraph = self._copied(
            main,
            {
                "tensors": self._offsets(new_tensors),
                "operators": self._offsets(new_operators),
                "inputs": self._integers(inputs),
                "outputs": self._integers(outputs),
            },
        )
        subgraphs = self._offsets([subgraph, *(self._old(other.position) for other in others)])
        # signatures speak of the old inputs and outputs
        root = self._copied(model, {"subgraphs": subgraphs}, without=("signature_defs",))
        self.builder.Finish(root, IDENTIFIER)
        return bytes(self.builder.Output())

    def _old(self, position: int) -> int:
        """What the builder calls a place of the old file: its distance from the end."""
        return self.size - position

    def _fed_copy(self, tensor: Reader) -> int:
        return self._copied(tensor, {"name": self.builder.CreateString(f"{tensor.text('name')}/fed")})

    def _reading(self, old: Reader, operator: Operator, copies: Mapping[int, int]) -> int:
        if not copies.keys() & set(operator.inputs):
            return self._old(old.position)
        return self._copied(old, {"inputs": self._integers([copies.get(k, k) for k in operator.inputs])})

    def _copied(self, table: Reader, replaced: Mapping[str, int], without: Collection[str] = ()) -> int:
        """A table with the fields of an old one, but for those replaced; what a field refers to is not copied."""
        builder = self.builder
        builder.StartObject(1 + max(declared.number for declared in table.fields.values()))
        for name, declared in table.fields.items():
            if name in replaced:
                builder.PrependUOffsetTRelative(replaced[name])
            elif not table.has(name) or name in without:
                continue
            elif declared.kind in SCALARS:
                builder.Prepend(SCALARS[declared.kind], table.number(name))
            else:
                builder.PrependUOffsetTRelative(self._old(table.target(name)))
            builder.Slot(declared.number)
        return int(builder.EndObject())

    def _offsets(self, targets: Sequence[int]) -> int:
        self.builder.StartVector(4, len(targets), 4)
        for target in reversed(targets):
            self.builder.PrependUOffsetTRelative(target)
        return int(self.builder.EndVector())

    def _integers(self, numbers: Sequence[int]) -> int:
        self.builder.StartVector(4, len(numbers), 4)
        for number in reversed(numbers):
            self.builder.PrependInt32(number)
        return int(self.builder.EndVector())
