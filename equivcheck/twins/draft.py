"""A .tflite model in the making: ONNX values held as tensors, each in one or more layouts and signednesses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from equivcheck.models.graph import Array
from equivcheck.models.tflite.schema import ACTIVATIONS
from equivcheck.models.tflite.write import Operator, Tensor
from equivcheck.vnpu.ir import Clamp, Codes, Operand
from equivcheck.vnpu.rounding import code_bounds

Layout = tuple[int, ...]
Shape = tuple[int, ...]
FUSED = {"NONE": Clamp(), "RELU": Clamp(low=0.0), "RELU_N1_TO_1": Clamp(-1.0, 1.0), "RELU6": Clamp(0.0, 6.0)}


class CannotExpressError(Exception):
    """Why TFLite has no exact form of a step; its text completes "cannot be written: ..."."""


def native(rank: int) -> Layout:
    return tuple(range(rank))


def channels_last(rank: int) -> Layout:
    """TFLite's order: the axis behind the batch goes last."""
    return (0, *range(2, rank), 1) if rank > 2 else native(rank)


def in_kind(codes: Codes, signed: bool) -> Codes:
    """The same reals as int8 or uint8: codes and zero point move together by 128."""
    if codes.bits != 8:
        raise CannotExpressError(f"{codes.bits}-bit codes")
    return (
        codes if codes.signed == signed else replace(codes, zero=codes.zero + (-128 if signed else 128), signed=signed)
    )


def bounds(clamp: Clamp, out: Codes) -> tuple[int, int]:
    """Code bounds as TFLite's CalculateActivationRangeQuantized finds them: float32, half away from zero."""
    return code_bounds(clamp, out, "float32", "half-away")


def fused(clamp: Clamp, out: Codes) -> int | None:
    """The fused activation that leaves the same codes as `clamp`, or None."""
    wanted = bounds(clamp, out)
    return next((ACTIVATIONS.index(name) for name, one in FUSED.items() if bounds(one, out) == wanted), None)


@dataclass(frozen=True, slots=True)
class Held:
    """One form of a value: axis `k` of the tensor is axis `layout[k]` of the ONNX value. `codes` None: a float."""

    tensor: int
    layout: Layout
    codes: Codes | None


@dataclass(frozen=True, slots=True)
class Stage:
    """One operator of a pipeline. It reads what the stage before made, between the tensors `before` and `behind`.

    Its output has `shape` (as the tensor lies) and `codes`, or, without codes, `dtype`.
    """

    kind: str
    shape: Shape
    codes: Codes | None
    behind: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0
    dtype: str = "float32"


class Draft:
    """Tensors and operators so far, and the forms in which each ONNX value is there.

    `signed` is the kind of codes preferred: int8, or uint8 where the weights need TFLite's uint8 kernels. `values` are the
    names that only the tensors of those ONNX values may bear. `older_engines`: only what TFLite 2.14 reads too.
    """

    def __init__(self, signed: bool, values: Collection[str], older_engines: bool = False) -> None:
        self.signed = signed
        self.older_engines = older_engines
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.forms: dict[str, list[Held]] = {}
        self.rewrites: list[str] = []
        self._taken = set(values)

    # -- tensors -------------------------------------------------------------------------------------------------------

    def tensor(
        self, name: str, shape: Shape, codes: Codes | None, dtype: str = "float32", constant: Array | None = None,
        *, value: bool = False,
    ) -> int:  # fmt: skip
        """Add a tensor with per-tensor codes, or (codes None) plain numbers of `dtype`. A `value` keeps its name."""
        scale = None if codes is None else np.asarray([codes.scale], np.float32)
        zero = None if codes is None else np.asarray([codes.zero])
        dtype = dtype if codes is None else codes.dtype.name
        return self.add_tensor(Tensor(name, shape, dtype, scale, zero, constant=constant), value=value)

    def add_tensor(self, tensor: Tensor, *, value: bool = False) -> int:
        name, count = tensor.name, 1
        while not value and name in self._taken:
            count += 1
            name = f"{tensor.name}/{count}"
        self._taken.add(name)
        self.tensors.append(replace(tensor, name=name))
        return len(self.tensors) - 1

    def constant(self, array: Array, codes: Codes | None = None, name: str = "constant") -> int:
        kind = array.dtype if codes is None else codes.dtype
        return self.tensor(name, array.shape, codes, kind.name, array.astype(kind))

    def ints(self, values: npt.ArrayLike) -> int:
        return self.constant(np.asarray(values, np.int32))

    # -- values --------------------------------------------------------------------------------------------------------

    def hold(self, name: str, held: Held) -> Held:
        """`held` is the value `name`; the first form is the one that bears its name."""
        self.forms.setdefault(name, []).append(held)
        return held

    def shape(self, held: Held) -> Shape:
        """The shape of the ONNX value."""
        lies = self.tensors[held.tensor].shape
        return tuple(lies[held.layout.index(axis)] for axis in range(len(lies)))

    def shape_of(self, operand: Operand) -> Shape:
        return operand.constant.shape if operand.constant is not None else self.shape(self.forms[operand.name][0])

    def layout_of(self, operand: Operand) -> Layout:
        return native(operand.constant.ndim) if operand.constant is not None else self.forms[operand.name][0].layout

    def read(self, operand: Operand, signed: bool, layout: Layout | None = None) -> Held:
        """The operand as int8 or uint8 codes in `layout` (as it lies where None); QUANTIZE, TRANSPOSE as needed, once."""
        wanted = in_kind(operand.codes, signed)
        if operand.constant is not None:
            codes = operand.constant.astype(np.int64) + (wanted.zero - operand.codes.zero)
            order = layout or native(codes.ndim)
            return Held(self.constant(codes.transpose(order), wanted), order, wanted)
        forms = self.forms[operand.name]
        order = layout or forms[0].layout
        found = next((form for form in forms if form.codes == wanted and form.layout == order), None)
        return found or self.hold(operand.name, self.relaid(self._read_as(forms, wanted), order))

    def _read_as(self, forms: Sequence[Held], wanted: Codes) -> Held:
        found = next((form for form in forms if form.codes == wanted), None)
        if found is not None:
            return found
        held = forms[0]
        assert held.codes is not None
        alike = in_kind(held.codes, wanted.signed)
        if alike != held.codes:
            held = self.after(held, Stage("QUANTIZE", self.tensors[held.tensor].shape, alike))
        if alike != wanted:
            self.rewrites.append("RESHAPE gives the codes the scale they are read with")
            held = self.after(held, self.reshape(self.tensors[held.tensor].shape, wanted))
        return held

    def relaid(self, held: Held, layout: Layout) -> Held:
        """The same value in another layout: a RESHAPE where no element moves, else a TRANSPOSE."""
        if held.layout == layout:
            return held
        return replace(self.after(held, self.turn(held, layout)), layout=layout)

    def turn(self, held: Held, layout: Layout) -> Stage:
        """The stage that brings `held` into `layout`."""
        shape = self.tensors[held.tensor].shape
        order = [held.layout.index(axis) for axis in layout]
        turned = tuple(shape[k] for k in order)
        moving = [k for k in order if shape[k] > 1]
        if moving == sorted(moving):
            return self.reshape(turned, held.codes)
        return Stage("TRANSPOSE", turned, held.codes, (self.ints(order),))

    def in_native_order(self, held: Held) -> int:
        """A tensor whose elements lie in the order of the ONNX value, whatever its shape."""
        return self.relaid(held, native(len(held.layout))).tensor if self._moves(held) else held.tensor

    def _moves(self, held: Held) -> bool:
        shape = self.tensors[held.tensor].shape
        moving = [axis for k, axis in enumerate(held.layout) if shape[k] > 1]
        return moving != sorted(moving)

    # -- operators -----------------------------------------------------------------------------------------------------

    def after(self, held: Held, stage: Stage) -> Held:
        """What one more operator makes of `held`, under a name of its own."""
        made = self._append((held.tensor,), stage, f"{self.tensors[held.tensor].name}/{stage.kind.lower()}")
        return Held(made, held.layout, stage.codes)

    def run(self, inputs: Sequence[int], stages: Sequence[Stage], name: str, layout: Layout) -> Held:
        """A pipeline whose last operator makes the value `name`; the first reads all of `inputs`."""
        tensors = tuple(inputs)
        for stage in stages[:-1]:
            tensors = (self._append(tensors, stage, f"{name}/{stage.kind.lower()}"),)
        return self.hold(name, Held(self._append(tensors, stages[-1], name, value=True), layout, stages[-1].codes))

    def _append(self, inputs: tuple[int, ...], stage: Stage, name: str, *, value: bool = False) -> int:
        made = self.tensor(name, stage.shape, stage.codes, stage.dtype, value=value)
        reads = (*stage.before, *inputs, *stage.behind)
        self.operators.append(Operator(stage.kind, reads, (made,), stage.options, stage.version))
        return made

    def reshape(self, shape: Shape, codes: Codes | None, dtype: str = "float32") -> Stage:
        return Stage("RESHAPE", shape, codes, (self.ints(shape),), options={"new_shape": shape}, dtype=dtype)

    def requantise(self, shape: Shape, source: Codes | None, out: Codes) -> list[Stage]:
        return [] if source == out else [Stage("QUANTIZE", shape, out)]

    def limits(self, clamp: Clamp, shape: Shape, out: Codes) -> list[Stage]:
        """MAXIMUM and MINIMUM with one code each: bounds that no fused activation has."""
        found = []
        for kind, bound, idle in zip(("MAXIMUM", "MINIMUM"), bounds(clamp, out), (out.low, out.high), strict=True):
            if bound != idle:
                found.append(Stage(kind, shape, out, (self.constant(np.asarray([bound]), out),)))
        return found

    def activated(self, clamp: Clamp, shape: Shape, out: Codes) -> tuple[int, list[Stage]]:
        """The fused activation of an operator, and the stages that must follow it instead where there is none."""
        activation = fused(clamp, out)
        return (activation, []) if activation is not None else (0, self.limits(clamp, shape, out))
