"""Small quantised models for the tests: Q-DQ around every input, DQ-op(s)-Q, DQ at the end, as exporters write them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from equivcheck.engines.ort import OrtEngine
from equivcheck.models.graph import Array, Graph, Step
from equivcheck.models.onnx.load import load_model, model_from_bytes
from equivcheck.vnpu.profiles import load_profile
from equivcheck.vnpu.program import Program, compile_program
from equivcheck.vnpu.targets import load_target


@dataclass(frozen=True)
class Q:
    """Quantisation of one value; `dtype` "int8" or "uint8"."""

    scale: float
    zero: int
    dtype: str = "uint8"

    def float_of(self, codes: Array) -> Array:
        """Floats that QuantizeLinear turns into exactly these codes."""
        return ((codes.astype(np.int64) - self.zero) * np.float64(np.float32(self.scale))).astype(np.float32)


@dataclass(frozen=True)
class Weight:
    """Constant codes behind a DequantizeLinear; `scale` and `zero` one number, or one a channel along `axis`."""

    codes: Array
    scale: Any
    zero: Any = 0
    axis: int | None = None


@dataclass
class Built:
    """The model with float inputs (`deployed`), and its graph."""

    model: bytes
    graph: Graph
    inputs: list[tuple[str, Q, tuple[int, ...]]] = field(default_factory=list)
    outputs: list[tuple[str, Q]] = field(default_factory=list)


def quantised_model(
    nodes: Sequence[tuple[str, Sequence[Any], Sequence[str], Mapping[str, Any]]],
    out: Mapping[str, Q],
    shapes: Mapping[str, tuple[int, ...]],
    quantisation: Mapping[str, Q],
    opset: int = 21,
) -> Built:
    """`nodes`: (op_type, inputs, outputs, attributes); an input is a name (of `shapes`, an earlier output), Weight or array."""
    made: list[Any] = []
    initializers: list[Any] = []

    def constant(name: str, array: Any) -> str:
        initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def parameters(name: str, q: Q) -> list[str]:
        return [constant(f"{name}_scale", np.float32(q.scale)), constant(f"{name}_zero", np.asarray(q.zero, q.dtype))]

    for name, q in quantisation.items():
        ends = parameters(name, q)
        made.append(helper.make_node("QuantizeLinear", [name, *ends], [f"{name}_q"], name=f"{name}_Q"))
        made.append(helper.make_node("DequantizeLinear", [f"{name}_q", *ends], [f"{name}_dq"], name=f"{name}_DQ"))
    for k, (op_type, inputs, outputs, attributes) in enumerate(nodes):
        names = []
        for j, given in enumerate(inputs):
            if isinstance(given, str):
                names.append(f"{given}_dq" if given in quantisation else given)
            elif isinstance(given, Weight):
                stem = f"w{k}_{j}"
                constant(f"{stem}_s", np.asarray(given.scale, np.float32))
                constant(f"{stem}_z", np.broadcast_to(np.asarray(given.zero, given.codes.dtype), np.shape(given.scale)))
                axis = {} if given.axis is None else {"axis": given.axis}
                made.append(
                    helper.make_node(
                        "DequantizeLinear",
                        [constant(stem, given.codes), f"{stem}_s", f"{stem}_z"],
                        [f"{stem}_dq"],
                        **axis,
                    )
                )
                names.append(f"{stem}_dq")
            else:
                names.append(constant(f"c{k}_{j}", given))
        made.append(helper.make_node(op_type, names, list(outputs), name=f"n{k}_{op_type}", **attributes))
    for name, q in out.items():
        ends = parameters(f"{name}_out", q)
        made.append(
            helper.make_node("QuantizeLinear", [f"{name}_dq" if name in quantisation else name, *ends], [f"{name}_oq"])
        )
        made.append(helper.make_node("DequantizeLinear", [f"{name}_oq", *ends], [f"{name}_float"]))
    graph = helper.make_graph(
        made,
        "small",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(f"{name}_float", TensorProto.FLOAT, None) for name in out],
        initializers,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)], ir_version=10
    )
    content = model.SerializeToString()
    inputs_ = [(name, quantisation[name], shape) for name, shape in shapes.items() if name in quantisation]
    return Built(
        content, model_from_bytes(content, "small.onnx").graph, inputs_, [(f"{n}_oq", q) for n, q in out.items()]
    )


def no_fallback(step: Step, inputs: Mapping[str, Array]) -> dict[str, Array]:
    raise AssertionError(f"step {step.id} {step.ops} fell back")


def compiled(graph: Graph, profile: str, target: str = "all", fallback: Any = no_fallback) -> Program:
    return compile_program(graph, profile=load_profile(profile), target=load_target(target), fallback=fallback)


def random_codes(rng: np.random.Generator, q: Q, shape: tuple[int, ...]) -> Array:
    """Codes over the whole range, its ends included."""
    limits = np.iinfo(q.dtype)
    codes = rng.integers(limits.min, limits.max + 1, shape).astype(q.dtype)
    codes.reshape(-1)[: min(2, codes.size)] = [limits.min, limits.max][: min(2, codes.size)]
    return codes


def run_ort(built: Built, feeds: Mapping[str, Array], optimization: str = "all") -> dict[str, Array]:
    """The outputs' codes as ONNX Runtime computes them on the untouched model."""
    engine = OrtEngine()
    engine.load(built.model, {"optimization": optimization})
    found = engine.run(feeds)
    return {
        name: np.rint(values / np.float32(q.scale)).astype(np.int64) + q.zero
        for (name, q), values in zip(built.outputs, found.values(), strict=True)
    }


def shared_model(name: str) -> Any:
    """A real model of the shared folder, or a skip that says where it was looked for."""
    root = Path(os.environ.get("EQUIVCHECK_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    path = root / "models" / name
    if not path.exists():
        reason = f"{name} is not under EQUIVCHECK_SHARED or ../shared"
        print(reason)
        pytest.skip(reason)
    return load_model(path)
