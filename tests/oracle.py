"""An evaluation of a model's nodes that owes nothing to equivcheck or to ONNX Runtime.

QuantizeLinear and DequantizeLinear are written out in numpy from the operators' definition (rint(x / s) + z, saturated;
(c - z) * s), everything else is onnx's own reference implementation, one node at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array = npt.NDArray[Any]


class Oracle:
    """Evaluates values of `proto` from given ones. `known` values stop the walk back: that is what makes it local."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto
        self.constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
        self.producer = {out: node for node in proto.graph.node for out in node.output if out}

    def evaluate(self, name: str, known: Mapping[str, Array]) -> Array:
        """Evaluate `name` from `known` values and constants; the producers of `known` values are not looked at."""
        return self._value(name, {**self.constants, **known})

    def again(self, name: str, known: Mapping[str, Array]) -> Array:
        """Evaluate `name` by its own producer, though it is known: does the value reproduce its step?"""
        return self._value(name, {**self.constants, **{n: a for n, a in known.items() if n != name}})

    def real_again(self, name: str, known: Mapping[str, Array]) -> Array:
        """The value that goes into the Q of `name`, in codes of `name`: not rounded, not clipped, float64."""
        node = self.producer[name]
        assert node.op_type == "QuantizeLinear"
        memory = {**self.constants, **{n: a for n, a in known.items() if n != name}}
        source = self._value(node.input[0], memory).astype(np.float64)
        scale, zero, _ = self._parameters(node, memory, source.ndim)
        return source / scale.astype(np.float64) + zero

    def _value(self, name: str, memory: dict[str, Array]) -> Array:
        if name in memory:
            return memory[name]
        stack = [name]
        while stack:
            wanted = stack[-1]
            node = self.producer[wanted]
            missing = [i for i in reads(node) if i not in memory]
            if missing:
                stack += missing
                continue
            stack.pop()
            if wanted not in memory:
                for out, array in zip(node.output, self._run(node, memory), strict=False):
                    memory.setdefault(out, array)
        return memory[name]

    def _parameters(self, node: onnx.NodeProto, memory: Mapping[str, Array], ndim: int) -> tuple[Array, Array, Any]:
        scale = memory[node.input[1]]
        zero = memory[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros(scale.shape, np.uint8)
        dtype = zero.dtype
        if scale.ndim == 1 and scale.size > 1:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % ndim
            shape = [1] * ndim
            shape[axis] = -1
        else:
            shape = []
        return scale.reshape(shape), zero.astype(np.int64).reshape(shape), dtype

    def _run(self, node: onnx.NodeProto, memory: Mapping[str, Array]) -> list[Array]:
        if node.op_type == "QuantizeLinear":
            real = memory[node.input[0]]
            scale, zero, dtype = self._parameters(node, memory, real.ndim)
            limits = np.iinfo(dtype)
            return [np.clip(np.rint(real / scale) + zero, limits.min, limits.max).astype(dtype)]
        if node.op_type == "DequantizeLinear":
            codes = memory[node.input[0]]
            scale, zero, _ = self._parameters(node, memory, codes.ndim)
            return [((codes.astype(np.int64) - zero).astype(np.float32) * scale).astype(np.float32)]
        if node.op_type == "If":
            chosen = "then_branch" if bool(memory[node.input[0]]) else "else_branch"
            body = next(a.g for a in node.attribute if a.name == chosen)
            inside = Oracle(onnx.ModelProto(graph=body, opset_import=self.proto.opset_import))
            return [inside.evaluate(port.name, memory) for port in body.output]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        names = [i for i in node.input if i]
        model = helper.make_model(
            helper.make_graph(
                [copy],
                "one",
                [
                    helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(memory[n].dtype), None)
                    for n in dict.fromkeys(names)
                ],
                [onnx.ValueInfoProto(name=o) for o in node.output if o],
            ),
            opset_imports=self.proto.opset_import,
        )
        found = ReferenceEvaluator(model).run(None, {n: memory[n] for n in names})
        return [np.asarray(array) for array in found]


def reads(node: onnx.NodeProto) -> list[str]:
    """What a node reads, with what the bodies of an If capture from around it."""
    found = dict.fromkeys(name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            made = {t.name for t in attribute.g.initializer}
            for inner in attribute.g.node:
                found.update(dict.fromkeys(name for name in reads(inner) if name not in made))
                made.update(inner.output)
    return list(found)
