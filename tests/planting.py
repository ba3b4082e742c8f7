"""Edits of a QDQ model that stand for faults of an engine: the candidate runs the edited file.

Each edit takes a copy of the model and the index of a Conv whose output is quantised, changes what that one step computes,
and says whether it could be planted there. Nothing here knows how equivcheck judges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper


@dataclass
class Site:
    """A Conv in a model, with the initializers behind its weight, bias and output."""

    model: onnx.ModelProto
    index: int

    @property
    def conv(self) -> onnx.NodeProto:
        return self.model.graph.node[self.index]

    def dequantize_of(self, position: int) -> onnx.NodeProto | None:
        if position >= len(self.conv.input):
            return None
        name = self.conv.input[position]
        return next((n for n in self.model.graph.node if name in n.output and n.op_type == "DequantizeLinear"), None)

    def array(self, name: str) -> np.ndarray:
        return numpy_helper.to_array(next(t for t in self.model.graph.initializer if t.name == name))

    def give_own(self, node: onnx.NodeProto, position: int, array: np.ndarray) -> None:
        """Replace one input of `node` by a constant of its own, so that no other step changes."""
        name = f"planted_{self.index}_{position}_{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        node.input[position] = name

    @property
    def weight(self) -> np.ndarray:
        node = self.dequantize_of(1)
        assert node is not None
        return self.array(node.input[0])

    def set_weight(self, array: np.ndarray) -> None:
        node = self.dequantize_of(1)
        assert node is not None
        self.give_own(node, 0, array.astype(self.weight.dtype))

    def quantize(self) -> onnx.NodeProto | None:
        """The Q behind the Conv (through Relu or Clip)."""
        name = self.conv.output[0]
        for _ in range(3):
            readers = [n for n in self.model.graph.node if name in n.input]
            if len(readers) != 1:
                return None
            if readers[0].op_type == "QuantizeLinear":
                return readers[0]
            name = readers[0].output[0]
        return None


def sign_flipped_channel(site: Site, rng: np.random.Generator) -> bool:
    weight = site.weight.copy().astype(np.int16)
    zero = site.array(site.dequantize_of(1).input[2]).ravel()  # type: ignore[union-attr]  # there, or the test fails
    k = int(np.argmax(np.abs(weight.reshape(weight.shape[0], -1) - zero[0]).sum(axis=1)))
    weight[k] = np.clip(
        2 * int(zero[min(k, zero.size - 1)]) - weight[k],
        np.iinfo(site.weight.dtype).min,
        np.iinfo(site.weight.dtype).max,
    )
    site.set_weight(weight)
    return True


def dropped_bias(site: Site, rng: np.random.Generator) -> bool:
    node = site.dequantize_of(2)
    if node is None or not np.any(site.array(node.input[0])):
        return False
    site.give_own(node, 0, np.zeros_like(site.array(node.input[0])))
    return True


def scales_as_per_tensor(site: Site, rng: np.random.Generator) -> bool:
    node = site.dequantize_of(1)
    assert node is not None
    scale = site.array(node.input[1])
    if scale.size < 2:
        return False
    site.give_own(node, 1, np.full_like(scale, scale.max()))
    return True


def weights_of_four_bits(site: Site, rng: np.random.Generator) -> bool:
    site.set_weight((site.weight.astype(np.int16) >> 4) << 4)
    return True


def flipped_kernel(site: Site, rng: np.random.Generator) -> bool:
    if site.weight.ndim != 4 or max(site.weight.shape[2:]) == 1:
        return False
    site.set_weight(site.weight[:, :, ::-1, ::-1])
    return True


def swapped_channels(site: Site, rng: np.random.Generator) -> bool:
    weight = site.weight.copy()
    if weight.shape[0] < 2:
        return False
    weight[[0, -1]] = weight[[-1, 0]]
    site.set_weight(weight)
    return True


def shifted_pads(site: Site, rng: np.random.Generator) -> bool:
    for attribute in site.conv.attribute:
        if attribute.name == "pads" and any(attribute.ints):
            pads = list(attribute.ints)
            half = len(pads) // 2
            moved = [pads[0] + 1, *pads[1:half], pads[half] - 1, *pads[half + 1 :]]
            if min(moved) < 0:
                moved = [pads[0] - 1, *pads[1:half], pads[half] + 1, *pads[half + 1 :]]
            attribute.ints[:] = moved
            return min(moved) >= 0
    return False


def floor_instead_of_rounding(site: Site, rng: np.random.Generator) -> bool:
    return _shifted_before_quantize(site, lambda scale: -0.5 * scale)


def one_channel_one_lsb_up(site: Site, rng: np.random.Generator) -> bool:
    channels = site.weight.shape[0]

    def shift(scale: float) -> np.ndarray:
        bias = np.zeros((1, channels, *[1] * (site.weight.ndim - 2)), np.float32)
        bias[0, int(rng.integers(channels))] = scale
        return bias

    return _shifted_before_quantize(site, shift)


def scale_off(site: Site, rng: np.random.Generator) -> bool:
    node = site.dequantize_of(1)
    assert node is not None
    site.give_own(node, 1, (site.array(node.input[1]) * np.float32(1.02)).astype(np.float32))
    return True


def zero_point_off_by_one(site: Site, rng: np.random.Generator) -> bool:
    quantize = site.quantize()
    if quantize is None:
        return False
    zero = site.array(quantize.input[2])
    site.give_own(quantize, 2, np.asarray(zero + 1 if int(zero) < 100 else zero - 1, zero.dtype))
    return True


def _shifted_before_quantize(site: Site, shift: Callable[[float], object]) -> bool:
    """Add a constant before the Q."""
    quantize = site.quantize()
    if quantize is None:
        return False
    scale = float(site.array(quantize.input[1]))
    name = f"planted_{site.index}_shift"
    site.model.graph.initializer.append(numpy_helper.from_array(np.asarray(shift(scale), np.float32), name))
    added = helper.make_node("Add", [quantize.input[0], name], [f"{name}_out"], name=name)
    quantize.input[0] = added.output[0]
    position = next(
        k for k, node in enumerate(site.model.graph.node) if node is quantize or node.output[0] == quantize.output[0]
    )
    site.model.graph.node.insert(position, added)
    return True


KINDS: dict[str, Callable[[Site, np.random.Generator], bool]] = {
    kind.__name__: kind
    for kind in (
        sign_flipped_channel,
        dropped_bias,
        scales_as_per_tensor,
        weights_of_four_bits,
        flipped_kernel,
        swapped_channels,
        shifted_pads,
        floor_instead_of_rounding,
        one_channel_one_lsb_up,
        scale_off,
        zero_point_off_by_one,
    )
}


def quantised_convs(model: onnx.ModelProto) -> list[int]:
    """Indices of the Convs whose result is quantised."""
    return [k for k, n in enumerate(model.graph.node) if n.op_type == "Conv" and Site(model, k).quantize() is not None]


def plant(model: onnx.ModelProto, kind: str, seed: int) -> tuple[onnx.ModelProto, str] | None:
    """Return (edited copy, name of the value its step makes), planted at a seeded Conv; None where no Conv takes it."""
    rng = np.random.default_rng(seed)
    for index in rng.permutation(quantised_convs(model)):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        site = Site(copy, int(index))
        quantize = site.quantize()
        assert quantize is not None
        made = quantize.output[0]
        if KINDS[kind](site, rng):
            return copy, made
    return None
