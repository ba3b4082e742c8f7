"""TFLite's QUANTIZE from 8-bit codes to 8-bit codes, and LEAKY_RELU, against exact arithmetic: nothing of ours takes part.

    python tests/bench/requantise.py [--ratios N]

Every row: the kernels, the ratio r = s_in / s_out, how many ratios (with random zero points, all 256 codes each), the worst
distance beyond 1/2 LSB, what the formula allows at most there, and how many codes are not those of the formula. Exits 1 where
a code or a distance is not as the formulas have it.

XNNPACK (its unary convert and leaky-ReLU kernels, for r from 2^-8 to 2^7): M = rint(256 r), code = floor((q - z_in) M / 256 +
1/2) + z_out, saturated. So a code is off by at most |q - z_in| * |M / 256 - r| beyond rounding, 255 / 512 at worst.
TFLite's own kernels: r = m * 2^-k with 1/2 <= m < 1, (q - z_in) * m is rounded to whole numbers, then shifted by k and rounded
again: 2^-(k+1) beyond rounding for k >= 1, nothing below it.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tflite_graphs import TfliteGraph

RESOLVERS = {
    "reference": OpResolverType.BUILTIN_REF,
    "builtin": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    "xnnpack": OpResolverType.AUTO,
}
OPERATORS = ("QUANTIZE", "LEAKY_RELU")
SCALE_OUT = np.float32(0.05)
_MULTIPLIER_LEFT = 1e-6  # what 31 bits of TFLite's multiplier leave, times 255 codes


@dataclass(frozen=True)
class Case:
    """A requantisation: scales, zero points, the type of both sides; `alpha` is the slope below zero of a LEAKY_RELU."""

    scale: np.float32
    zero_in: int
    zero_out: int
    dtype: str = "int8"
    alpha: float | None = None

    @property
    def codes(self) -> np.ndarray:
        limits = np.iinfo(self.dtype)
        return np.arange(limits.min, limits.max + 1)

    @property
    def ratio(self) -> float:
        return float(self.scale) / float(SCALE_OUT)

    @property
    def multipliers(self) -> np.ndarray:
        """What each code, less its zero point, is multiplied with."""
        slope = 1.0 if self.alpha is None else float(np.float32(self.alpha))
        return np.where(self.codes < self.zero_in, slope, 1.0) * self.ratio

    @property
    def real(self) -> np.ndarray:
        """The real value in codes of the output, clipped to them."""
        return self._saturated((self.codes - self.zero_in) * self.multipliers + self.zero_out)

    def _saturated(self, codes: np.ndarray) -> np.ndarray:
        limits = np.iinfo(self.dtype)
        return np.clip(codes, limits.min, limits.max)

    def excess(self, made: np.ndarray) -> float:
        """The worst distance of `made` from the real value, beyond 1/2, in LSB."""
        return float(np.max(np.abs(made - self.real)) - 0.5)

    # -- the formulas --------------------------------------------------------------------------------------------------

    def eight_bits(self) -> np.ndarray:
        """XNNPACK's codes."""
        products = (self.codes - self.zero_in) * np.rint(256 * self.multipliers)
        return self._saturated(np.floor(products / 256 + 0.5) + self.zero_out)

    def eight_bits_bound(self) -> float:
        """How far XNNPACK's codes may lie beyond rounding."""
        left = np.abs(np.rint(256 * self.multipliers) / 256 - self.multipliers)
        return float(np.max(np.abs(self.codes - self.zero_in) * left))

    def twice_bound(self) -> float:
        """How far the codes of TFLite's own kernels may lie beyond rounding."""
        _, exponents = np.frexp(self.multipliers)
        below = exponents[exponents < 0]
        return float(np.max(np.ldexp(1.0, below - 1), initial=0.0))

    # -- the engine ----------------------------------------------------------------------------------------------------

    def run(self, kernels: str) -> tuple[np.ndarray, bool]:
        """The codes that LiteRT makes of all codes, and whether XNNPACK made them."""
        graph = TfliteGraph()
        x = graph.input((1, 256), self.scale, self.zero_in, self.dtype)
        operator, options = ("QUANTIZE", {}) if self.alpha is None else ("LEAKY_RELU", {"alpha": self.alpha})
        y = graph.op(operator, [x], (1, 256), SCALE_OUT, self.zero_out, self.dtype, **options)
        interpreter = Interpreter(
            model_content=graph.content(y),
            experimental_op_resolver_type=RESOLVERS[kernels],
            num_threads=1,
        )
        interpreter.allocate_tensors()
        delegated = any(entry["op_name"] == "DELEGATE" for entry in interpreter._get_ops_details())
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], self.codes.astype(self.dtype)[None])
        interpreter.invoke()
        (made,) = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
        return made.astype(np.int64), delegated


def cases(operator: str, count: int, seed: int = 0) -> list[Case]:
    """Ratios from 2^-9 to 2^8, evenly in their logarithm, each with random zero points."""
    random = np.random.default_rng(seed)
    found = []
    for power in np.linspace(-9, 8, count):
        dtype = str(random.choice(["int8", "uint8"]))
        limits = np.iinfo(dtype)
        zeros = random.integers(limits.min, limits.max + 1, 2)
        alpha = None if operator == "QUANTIZE" else float(random.choice([0.01, 0.1, 0.2, 0.3]))
        scale = np.float32(SCALE_OUT * np.float32(2.0**power))
        found.append(Case(scale, int(zeros[0]), int(zeros[1]), dtype, alpha))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratios", type=int, default=1700)
    asked = parser.parse_args()
    columns = ("operator", "asked for", "ran on", "r from", "ratios", "beyond 1/2", "formula", "other codes")
    print("{:10} {:9} {:8} {:>9} {:>6} {:>10} {:>8} {:>11}".format(*columns))
    failed = sum(show(operator, kernels, asked.ratios) for operator in OPERATORS for kernels in RESOLVERS)
    return 1 if failed else 0


def show(operator: str, kernels: str, count: int) -> int:
    """Print a row for each octave of the ratio; how many of them are not as the formulas have it."""
    rows: dict[tuple[bool, int], list[tuple[float, float, int]]] = defaultdict(list)
    for case in cases(operator, count):
        made, delegated = case.run(kernels)
        bound = case.eight_bits_bound() if delegated else case.twice_bound() + _MULTIPLIER_LEFT
        others = int(np.count_nonzero(made != case.eight_bits())) if delegated else 0
        rows[delegated, int(np.floor(np.log2(case.ratio)))].append((case.excess(made), bound, others))
    failed = 0
    for (delegated, octave), found in sorted(rows.items()):
        wrong = sum(others for _, _, others in found)
        broken = wrong > 0 or any(excess > bound + 1e-9 for excess, bound, _ in found)
        failed += broken
        worst, allowed = max(excess for excess, _, _ in found), max(bound for _, bound, _ in found)
        who = "XNNPACK" if delegated else "TFLite"
        print(
            f"{operator:10} {kernels:9} {who:8} {2.0**octave:9.4g} {len(found):6} {max(worst, 0):10.4f} {allowed:8.4f} "
            f"{wrong if delegated else '-':>11}{'   NOT AS THE FORMULA' if broken else ''}"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
