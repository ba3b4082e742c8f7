"""The seam between the conductor and whatever runs a model.

A `Backend` opens a model and gives a `Session`; a session runs samples and gives `Recording`s. The backend does all
surgery through `equivcheck.models`, chooses the way of observing that its engine does not notice, and names what it could
not get, with the reason. It raises `EngineError` where the engine failed; a user's mistake is an `EquivcheckError`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import onnx

from equivcheck.backends.spec import Spec
from equivcheck.errors import SpecError, UnknownOption, near
from equivcheck.models.graph import Array
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Recording
from equivcheck.result import Side

Runner = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class Option:
    """One KEY of a backend: what it means, and which values it takes (None: any)."""

    help: str
    choices: tuple[str, ...] | None = None
    default: str | None = None
    kind: type = str


TIMEOUT = Option("seconds for one load or run; 600 in a process of its own", kind=float)


class Engine(Protocol):
    """What a backend drives, here (`equivcheck.engines`) or elsewhere (`backends.remote`). Methods raise as they like."""

    def info(self) -> dict[str, Any]:
        """Name, version, what it runs on."""

    def load(self, model: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
        """Load a serialised model; its inputs and outputs."""

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Run once; arrays by output name."""

    def close(self) -> None:
        """Free it; closing twice is no mistake."""


class Backend(abc.ABC):
    """One way to run a model. Subclasses declare what they take; `__init__` checks a SPEC against that.

    `travels`: its engine can run in another interpreter or on another machine.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[Mapping[str, Option]] = {}
    positional: ClassVar[str | None] = None
    second_opinion: ClassVar[bool] = True
    travels: ClassVar[bool] = False

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.chosen = self._checked(spec)

    def _checked(self, spec: Spec) -> dict[str, str]:
        known = {**self.options, "timeout": TIMEOUT}
        given = dict(spec.options)
        if spec.positional is not None:
            if self.positional is None:
                raise SpecError(
                    f"backend '{self.name}' takes no bare value, got '{spec.positional}'",
                    asked=str(spec),
                    hint="options: " + ", ".join(f"{key}=" for key in known),
                )
            given[self.positional] = spec.positional
        for key, value in given.items():
            if key not in known:
                raise UnknownOption(
                    f"backend '{self.name}' has no option '{key}'",
                    asked=key,
                    nearest=near(key, known),
                    hint="options: " + ", ".join(f"{name}=" for name in known),
                )
            self._check_value(key, known[key], value)
        if not self.travels and (spec.ssh is not None or spec.python is not None):
            raise SpecError(
                f"{spec}: backend '{self.name}' runs in this process only", hint="leave out @python= and @ssh="
            )
        defaults = {key: option.default for key, option in known.items() if option.default is not None}
        return {**defaults, **given}

    def _check_value(self, key: str, option: Option, value: str) -> None:
        if option.choices is not None and value not in option.choices:
            raise UnknownOption(
                f"backend '{self.name}': {key}={value} is not one of {', '.join(option.choices)}",
                asked=value,
                nearest=near(value, option.choices),
            )
        if option.kind in (int, float):
            try:
                number = option.kind(value)
            except ValueError:
                raise UnknownOption(f"backend '{self.name}': {key}={value} is not a number", asked=value) from None
            if not 0 < number < math.inf:
                raise UnknownOption(f"backend '{self.name}': {key}={value} must be positive", asked=value)

    @classmethod
    def unavailable(cls) -> str | None:
        """Why it cannot run here and how to install it, or None when it can."""
        return None

    @abc.abstractmethod
    def open(self, model: OnnxModel) -> Session:
        """Prepare `model` for running; input shapes are fixed. Raises EngineError where the engine refuses it."""

    @abc.abstractmethod
    def deploy(self, proto: onnx.ModelProto) -> Runner:
        """Load `proto` as this engine would deploy it, unobserved; return a function from feeds to its outputs.

        Second opinions run the isolated model through this. Raises EngineError.
        """

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        """Wider limits of legal excess (LSB) that this engine declares: op_type -> (limit, reason)."""
        return {}


class Session(abc.ABC):
    """A model opened by a backend. A context manager: leaving it frees the engine."""

    @abc.abstractmethod
    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        """Run one sample (its id, and its feeds by input name). Raises EngineError."""

    @property
    @abc.abstractmethod
    def side(self) -> Side:
        """Engine, version, device, observation, placement; complete after the first run."""

    def close(self) -> None:  # noqa: B027  # most have nothing to free
        """Free the engine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
