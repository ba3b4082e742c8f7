"""Random float graphs with all that makes cutting hard, and a random cut of each, for hypothesis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

SHAPE = (2, 4)
UNARY = ("Relu", "Sigmoid", "Neg", "Identity", "Abs")
BINARY = ("Add", "Mul", "Sub", "Max")


@dataclass(frozen=True)
class Drawn:
    proto: onnx.ModelProto
    feeds: Mapping[str, np.ndarray]
    selector: str
    place: Literal["before", "after"]

    def __repr__(self) -> str:
        return f"{self.place} {self.selector} of\n{onnx.printer.to_text(self.proto)}"


def port(name: str, shape: tuple[int, ...] = SHAPE, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))


class _Growing:
    """A graph in the making: every value of `pool` is a float 2x4 that may be read."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.weights = [numpy_helper.from_array(np.full(SHAPE, k + 0.5, np.float32), f"w{k}") for k in range(2)]
        self.weights += [
            numpy_helper.from_array(np.array(2), "trips"),
            numpy_helper.from_array(np.array(True), "go"),
            numpy_helper.from_array(np.array([2, 2]), "sizes"),
        ]
        self.inputs = ["x", "unread", "x2"][: draw(st.integers(1, 3))]
        self.pool = [*self.inputs, "w0", "w1"]
        self.functions: set[str] = set()
        self.count = 0

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def pick(self) -> str:
        """Recent values more often than old ones: long graphs rather than wide ones."""
        recent = self.pool[-4:] if self.draw(st.booleans()) else self.pool
        return self.draw(st.sampled_from(recent))

    def node(self, op_type: str, inputs: list[str], outputs: list[str], **attributes: object) -> None:
        name = self.draw(st.sampled_from(["", "layer", f"{op_type}/{outputs[0] or outputs[-1]}"]))
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, **attributes))

    def grow(self) -> None:
        kind = self.draw(
            st.sampled_from(["unary", "binary", "binary", "split", "branch", "loop", "call", "constant", "left_out"])
        )
        self.pool += getattr(self, f"_{kind}")()

    def _unary(self) -> list[str]:
        out = self.fresh()
        self.node(self.draw(st.sampled_from(UNARY)), [self.pick()], [out])
        return [out]

    def _binary(self) -> list[str]:
        out = self.fresh()
        self.node(self.draw(st.sampled_from(BINARY)), [self.pick(), self.pick()], [out])
        return [out]

    def _split(self) -> list[str]:
        one, other, out = self.fresh("half"), self.fresh("half"), self.fresh()
        self.node("Split", [self.pick(), "sizes"], [one, other], axis=1)
        self.node("Concat", [other, one], [out], axis=1)
        return [out]

    def _constant(self) -> list[str]:
        out = self.fresh("c")
        value = numpy_helper.from_array(np.full(SHAPE, self.count, np.float32))
        self.node("Constant", [], [out], value=value)
        return [out]

    def _left_out(self) -> list[str]:
        out = self.fresh()
        high = self.fresh("high")
        self.node("ReduceMax", [self.pick()], [high], keepdims=0)
        self.node("Clip", [self.pick(), "", high], [out])
        return [out]

    def _branch(self) -> list[str]:
        out, flag, total = self.fresh("z"), self.fresh("flag"), self.fresh("total")
        self.node("ReduceSum", [self.pick()], [total], keepdims=0)
        self.node("Cast", [total], [flag], to=TensorProto.BOOL)
        bodies = {name: self._body(name, depth=self.draw(st.integers(0, 1)), flag=flag) for name in ("then", "else")}
        self.node("If", [flag], [out], then_branch=bodies["then"], else_branch=bodies["else"])
        return [out]

    def _body(self, name: str, *, depth: int, flag: str) -> onnx.GraphProto:
        out, inner = self.fresh(name), self.fresh(name)
        nodes = [helper.make_node(self.draw(st.sampled_from(BINARY)), [self.pick(), self.pick()], [inner])]
        if depth:
            deeper = {n: self._body(n, depth=depth - 1, flag=flag) for n in ("then", "else")}
            chosen = self.fresh("z")
            branches = {"then_branch": deeper["then"], "else_branch": deeper["else"]}
            nodes.append(helper.make_node("If", [flag], [chosen], **branches))
            nodes.append(helper.make_node("Add", [inner, chosen], [out]))
        elif self.draw(st.booleans()):
            self.functions.add("Twice")
            nodes.append(helper.make_node("Twice", [inner], [out], domain="local"))
        else:
            nodes.append(helper.make_node("Neg", [inner], [out]))
        return helper.make_graph(nodes, f"{name}{self.fresh()}", [], [port(out)])

    def _loop(self) -> list[str]:
        out, state, following, i, on, more = (self.fresh(s) for s in ("z", "s", "n", "i", "on", "more"))
        body = helper.make_graph(
            [
                helper.make_node("Identity", [on], [more]),
                helper.make_node(self.draw(st.sampled_from(BINARY)), [state, self.pick()], [following]),
            ],
            "again",
            [port(i, (), TensorProto.INT64), port(on, (), TensorProto.BOOL), port(state)],
            [port(more, (), TensorProto.BOOL), port(following)],
        )
        self.node("Loop", ["trips", "go", self.pick()], [out], body=body)
        return [out]

    def _call(self) -> list[str]:
        name = self.draw(st.sampled_from(["Twice", "Quad"]))
        self.functions |= {"Twice", name}
        out = self.fresh()
        self.node(name, [self.pick()], [out], domain="local")
        return [out]


_FUNCTIONS = {
    "Twice": ([("Add", ["u", "u"], ["v"], "")], [("", 17)]),
    "Quad": ([("Twice", ["u"], ["w"], "local"), ("Twice", ["w"], ["v"], "local")], [("", 17), ("local", 1)]),
}


def _function(name: str) -> onnx.FunctionProto:
    nodes, opsets = _FUNCTIONS[name]
    made = [helper.make_node(op, inputs, outputs, domain=domain) for op, inputs, outputs, domain in nodes]
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets]
    return helper.make_function("local", name, ["u"], ["v"], made, imports)


@st.composite
def graphs_and_cuts(draw: st.DrawFn) -> Drawn:
    """A graph of up to a dozen steps, with outputs that may be anything of it, and where to cut it."""
    growing = _Growing(draw)
    for _ in range(draw(st.integers(1, 12))):
        growing.grow()
    others = draw(st.lists(st.sampled_from(growing.pool), max_size=2))
    outputs = list(dict.fromkeys([*others, growing.pool[-1]]))
    graph = helper.make_graph(
        growing.nodes, "random", [port(n) for n in growing.inputs], [port(n) for n in outputs], growing.weights
    )
    proto = helper.make_model(
        graph,
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
        functions=[_function(name) for name in sorted(growing.functions)],
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    feeds = {name: rng.normal(0, 1, SHAPE).astype(np.float32) for name in growing.inputs}
    made = [out for node in growing.nodes for out in node.output if out]
    names = st.sampled_from([*growing.inputs, "w0", *made])
    kinds = st.sampled_from([f"op:{node.op_type}" for node in growing.nodes])
    selector = draw(st.one_of(names.map("value:{}".format), kinds))
    return Drawn(proto, feeds, selector, draw(st.sampled_from(["before", "after"])))
