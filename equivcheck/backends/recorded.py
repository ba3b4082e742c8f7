"""A recording in place of a run: ours, or a dump that another tool left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from equivcheck.backends.base import Backend, Option, Runner, Session
from equivcheck.backends.spec import Spec
from equivcheck.errors import EngineRefused, SpecError
from equivcheck.models.graph import Array
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Recording
from equivcheck.result import Observation, Side
from equivcheck.tape import Tape, completed, open_tape


class RecordedBackend(Backend):
    """Plays a recording back, sample by sample."""

    name = "recorded"
    summary = "a recording, or another tool's dump (.npz, .npy, raw, TensorProto), in place of a run"
    positional = "dir"
    second_opinion = False
    options = {  # noqa: RUF012  # a constant
        "dir": Option("the recording's folder, or the dump"),
        "layout": Option("layout of the dump's 4-D tensors", ("nchw", "nhwc")),
        "names": Option("TOML file that maps the dump's names to the model's"),
    }

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if "dir" not in self.chosen:
            raise SpecError("recorded: which recording?", asked=str(spec), hint="recorded:FOLDER")
        self.tape: Tape | None = None
        self.order: Sequence[int] | None = None

    @classmethod
    def of(cls, tape: Tape, order: Sequence[int]) -> RecordedBackend:
        """The backend of a tape that is already open; `order` gives its sample for each run."""
        made = cls(Spec(cls.name, positional=tape.side.spec))
        made.tape, made.order = tape, order
        return made

    def open(self, model: OnnxModel) -> Session:
        if self.tape is None:
            layout, names = self.chosen.get("layout"), self.chosen.get("names")
            self.tape = open_tape(self.chosen["dir"], model.graph, layout=layout, names=names)
        return Replay(self.tape, self.order)

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        """What the recorded engine declares."""
        return {} if self.tape is None else self.tape.declared

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        raise EngineRefused("a recording runs no other model")


class Replay(Session):
    """Answers with what was recorded of a sample. `order` gives the tape's sample for the n-th run, where that is known."""

    def __init__(self, tape: Tape, order: Sequence[int] | None = None) -> None:
        self.tape, self.order = tape, order
        self._runs = 0

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        number = self.order[self._runs] if self.order else self._number(sample)
        self._runs += 1
        return completed(self.tape.read(number), feeds)

    def _number(self, sample: str) -> int:
        """The tape's sample of this id; else the one whose turn it is."""
        ids = [info.id for info in self.tape.samples]
        if sample in ids:
            return ids.index(sample)
        if self._runs < len(ids):
            return self._runs
        raise EngineRefused(f"it holds {len(ids)} samples, none of them {sample}")

    @property
    def side(self) -> Side:
        return self.tape.side


class NoReference(Backend):
    """Nothing to compare with: every step is judged against its own real value only."""

    name = "none"
    summary = "no reference"
    second_opinion = False

    def __init__(self) -> None:
        super().__init__(Spec("none"))

    def open(self, model: OnnxModel) -> Session:
        return _Silent(model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        raise EngineRefused("there is no reference to run")


class _Silent(Session):
    def __init__(self, model: OnnxModel) -> None:
        self.model = model

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        return Recording(sample, values=dict(feeds), how=dict.fromkeys(feeds, "fed"), outputs={})

    @property
    def side(self) -> Side:
        return Side(
            spec="none",
            engine="none",
            version="",
            device="none",
            model_sha256=self.model.sha256,
            observation=Observation(method="none"),
        )
