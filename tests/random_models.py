"""Random quantised models: a seed in, a small valid QDQ model out. The adversary of hand-picked cases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from builder import Qdq

Grow = Callable[["RandomModel"], "str | None"]
SCALES = (0.04, 0.07, 0.11)


class RandomModel:
    """Grows a model of 1x4x8x8 values, op by op; scales are few, so that many values share one."""

    def __init__(self, seed: int, size: int, *, transposes: bool = True) -> None:
        self.transposes = transposes
        self.rng = np.random.default_rng(seed)
        dtype = str(self.rng.choice(["uint8", "int8"]))
        opset = int(self.rng.choice([13, 17, 21] if dtype == "uint8" else [13, 17, 19]))
        self.m = Qdq(dtype=dtype, opset=opset, per_channel=bool(self.rng.integers(2)), seed=seed)
        self.pool: list[str] = [self.quantised(self.m.input("x", (1, 4, 8, 8)), 0.03)]
        for _ in range(size):
            made = self.grown()
            if made is not None:
                self.pool.append(made)

    def model(self) -> onnx.ModelProto:
        """The model; its outputs are the last value made, and sometimes another one."""
        ends = [self.m.dq(self.pool[-1])]
        if self.rng.integers(3) == 0:
            ends.append(self.pool[int(self.rng.integers(len(self.pool)))])
        return self.m.model(*dict.fromkeys(ends))

    def quantised(self, real: str, scale: float | None = None) -> str:
        limits = np.iinfo(self.m.dtype)
        middle = (int(limits.min) + int(limits.max) + 1) // 2
        zero = middle if self.rng.integers(4) else middle + int(self.rng.integers(-60, 60))
        chosen = float(self.rng.choice(SCALES)) if scale is None else scale
        like = [c for c in self.pool if self.rng.integers(4) == 0] if hasattr(self, "pool") else []
        made = self.m.q(real, chosen, zero, like=like[0] if like else None)
        self.m.channels[made] = 4
        return made

    def pick(self) -> str:
        recent = self.pool[-3:] if self.rng.integers(3) else self.pool
        coded = str(self.rng.choice(recent))
        real = self.m.dq(coded)
        self.m.channels[real] = 4
        return real

    def grown(self) -> str | None:
        kinds = ["conv", "conv", "conv", "add", "mul", "pool", "act", "requant", "concat", "move", "codes"]
        kind = str(self.rng.choice(kinds if self.transposes else kinds[:-2]))
        real = getattr(self, f"_{kind}")()
        if kind == "codes":
            return real
        return self.quantised(real)

    def _conv(self) -> str:
        group = int(self.rng.choice([1, 4]))
        made = self.m.conv(self.pick(), 4, int(self.rng.choice([1, 3])), group=group, w_scale=0.008)
        choice = int(self.rng.integers(6))
        if choice == 0:
            made = self.m.op("Relu", [made])
        elif choice == 1:
            made = self.m.op("MaxPool", [made], kernel_shape=[3, 3], pads=[1] * 4)
        elif choice == 2 and self.transposes:
            made = self.m.op("Transpose", [made], perm=[0, 1, 3, 2])
        return made

    def _add(self) -> str:
        return self.m.op("Add", [self.pick(), self.pick()])

    def _mul(self) -> str:
        return self.m.op("Mul", [self.pick(), self.m.op("Sigmoid", [self.pick()])])

    def _pool(self) -> str:
        op = str(self.rng.choice(["MaxPool", "AveragePool"]))
        return self.m.op(op, [self.pick()], kernel_shape=[3, 3], pads=[1] * 4)

    def _act(self) -> str:
        op = str(self.rng.choice(["Relu", "Sigmoid", "LeakyRelu", "HardSigmoid", "Neg"]))
        return self.m.op(op, [self.pick()])

    def _move(self) -> str:
        return self.m.op("Transpose", [self.pick()], perm=[0, 1, 3, 2])

    def _requant(self) -> str:
        return self.pick()

    def _concat(self) -> str:
        halves = []
        for start in (0, 2):
            bounds = [self.m.constant(np.array([v], np.int64)) for v in (start, start + 2, 1)]
            halves.append(self.m.op("Slice", [self.pick(), *bounds]))
        return self.m.op("Concat", halves, axis=1)

    def _codes(self) -> str:
        source = str(self.rng.choice(self.pool))
        made = self.m.op("Transpose", [source], perm=[0, 1, 3, 2])
        self.m.channels[made] = 4
        return self.m.moved(made, source)
