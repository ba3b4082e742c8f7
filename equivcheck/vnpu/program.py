"""A compiled model: which step runs where, what crosses between NPU and CPU, and running it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from equivcheck.errors import InputError
from equivcheck.models.graph import Array, Graph, Step
from equivcheck.vnpu.faults import Fault, Planted, plant
from equivcheck.vnpu.ir import Op
from equivcheck.vnpu.kernels import Kernel
from equivcheck.vnpu.lower import lower
from equivcheck.vnpu.profiles import Profile
from equivcheck.vnpu.targets import Target

NPU, CPU = "npu", "cpu"


class Fallback(Protocol):
    """Runs one step in float on the CPU (the host gives it): stored values in (codes), stored values out."""

    def __call__(self, step: Step, inputs: Mapping[str, Array]) -> dict[str, Array]: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one step runs. `partition` numbers the pieces of either side from 1; `reason` says why it is on the CPU."""

    step: int
    where: str
    partition: int
    reason: str


@dataclass(frozen=True, slots=True)
class Crossing:
    """A stored value that is carried between NPU and CPU memory, once a direction; `direction` is "npu->cpu" or "cpu->npu".

    `bytes` is 0 where a dimension is symbolic. Graph inputs and outputs start and end on the CPU; `model_edge` marks what
    crosses for that reason alone, so the rest is what the fallbacks cost.
    """

    value: str
    direction: str
    bytes: int
    model_edge: bool = False


def compile_program(
    graph: Graph, *, profile: Profile, target: Target, fallback: Fallback, fault: Fault | None = None
) -> Program:
    """Lower every step, place it, and prepare weights, multipliers and tables once.

    `fault` is planted at one step of the NPU; raises UnknownOption where it cannot be.
    """
    lowered = {step.id: lower(graph, step) for step in graph.steps}
    placement = _place(graph, lowered, target)
    program = Program(graph, lowered, placement, profile, fallback)
    return program if fault is None else program.with_fault(fault)


class Program:
    """One model compiled for one profile and target. Runs are independent of each other."""

    def __init__(
        self,
        graph: Graph,
        lowered: Mapping[int, Op | str],
        placement: tuple[Placement, ...],
        profile: Profile,
        fallback: Fallback,
    ) -> None:
        self.graph = graph
        self.planted: Planted | None = None
        self.profile = profile
        self.placement = placement
        self.crossings = _crossings(graph, placement)
        self._where = {placed.step: placed.where for placed in placement}
        self._lowered = lowered
        self._fallback = fallback
        self._kernels: dict[int, Kernel] = {}
        for step in graph.steps:
            if self._where[step.id] == NPU:
                self._kernel(step)

    def _kernel(self, step: Step) -> Kernel | None:
        op = self._lowered.get(step.id)
        if op is None or isinstance(op, str):
            return None
        if step.id not in self._kernels:
            self._kernels[step.id] = Kernel(op, self.profile)
        return self._kernels[step.id]

    def with_fault(self, fault: Fault) -> Program:
        """This program with `fault` at one step of the NPU; everything else is shared.

        Raises UnknownOption where it cannot be planted.
        """
        on_cpu = {placed.step: placed.reason for placed in self.placement if placed.where == CPU}
        on_npu = {s: op for s, op in self._lowered.items() if s not in on_cpu and not isinstance(op, str)}
        faulty = copy(self)
        faulty.planted = plant(fault, self.graph, on_npu, on_cpu, self.profile)
        return faulty

    def op(self, step: Step) -> Op | None:
        """The IR operator of a step, or None where it has none."""
        found = self._lowered.get(step.id)
        return None if isinstance(found, str) else found

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Every stored value of the graph (codes; floats where it stores floats), C-contiguous, by name."""
        missing = [name for name in self.graph.inputs if name not in feeds]
        if missing:
            raise InputError(f"no feed for input {missing[0]}", asked=missing[0], nearest=list(feeds)[:3])
        values = {name: np.asarray(feeds[name], order="C") for name in self.graph.inputs}
        for step in self.graph.steps:
            values.update(self.run_step(step, values))
        return {name: values[name] for name in self.graph.stored if name in values}

    def run_step(self, step: Step, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of one step, on the stored values it reads."""
        if self.planted is not None and self.planted.step.id == step.id:
            return self.planted.run(inputs)
        kernel = self._kernel(step) if self._where[step.id] == NPU else None
        if kernel is not None:
            return kernel.run(inputs)
        made = self._fallback(step, {name: inputs[name] for name in step.inputs})
        return {name: np.asarray(made[name], order="C") for name in step.outputs}

    def real(self, step: Step, inputs: Mapping[str, Array]) -> dict[str, Array] | None:
        """What a step's outputs would be without rounding, in codes (float64, zero point included, before saturation).

        None where the step has no integer operator. Steps placed on the CPU by the target still have one.
        """
        kernel = self._kernel(step)
        return None if kernel is None else kernel.real(inputs)


def _place(graph: Graph, lowered: Mapping[int, Op | str], target: Target) -> tuple[Placement, ...]:
    """Steps of one side that no step of the other side lies between share a partition: level by level, no cycles."""
    reasons: dict[int, str] = {}
    for step in graph.steps:
        op = lowered[step.id]
        reasons[step.id] = target.refuses(graph, step) or (op if isinstance(op, str) else "")
    where = {step.id: CPU if reasons[step.id] else NPU for step in graph.steps}
    levels: dict[int, int] = {}
    for step in graph.steps:
        sources = [graph.step_of_value[name] for name in step.inputs if name in graph.step_of_value]
        start = 0 if where[step.id] == NPU else 1
        levels[step.id] = max([start, *(levels[s.id] + (where[s.id] != where[step.id]) for s in sources)])
    number: dict[tuple[str, int], int] = {}
    counted = {NPU: 0, CPU: 0}
    for step in graph.steps:
        key = (where[step.id], levels[step.id])
        if key not in number:
            counted[key[0]] += 1
            number[key] = counted[key[0]]
    return tuple(
        Placement(s.id, where[s.id], number[where[s.id], levels[s.id]], reasons[s.id]) for s in graph.steps
    )  # fmt: skip


def _crossings(graph: Graph, placement: tuple[Placement, ...]) -> tuple[Crossing, ...]:
    where = {placed.step: placed.where for placed in placement}
    outputs = {graph.store(name) for name in graph.outputs}
    found: dict[tuple[str, str], Crossing] = {}
    made_by = {name: where[step.id] for name, step in graph.step_of_value.items()}
    for step in graph.steps:
        for name in step.inputs:
            source = made_by.get(name, CPU)
            if source != where[step.id]:
                direction = f"{source}->{where[step.id]}"
                edge = name not in made_by
                found.setdefault((name, direction), Crossing(name, direction, _bytes(graph, name), edge))
    for name in graph.stored:
        if name in outputs and made_by.get(name) == NPU:
            found.setdefault((name, "npu->cpu"), Crossing(name, "npu->cpu", _bytes(graph, name), True))
    order = {name: k for k, name in enumerate(graph.stored)}
    return tuple(sorted(found.values(), key=lambda c: (order.get(c.value, -1), c.direction)))


def _bytes(graph: Graph, name: str) -> int:
    value = graph.values.get(name)
    if value is None or value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return 0
    quantisation = graph.quantisation.get(name)
    try:
        width = quantisation.dtype.itemsize if quantisation is not None else np.dtype(value.dtype or "float32").itemsize
    except TypeError:
        width = 4
    return width * int(np.prod([dim for dim in value.shape if isinstance(dim, int)]))
