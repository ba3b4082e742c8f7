"""One side of a comparison while it runs: opens a backend, records sample by sample, and survives what happens to it."""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from equivcheck.backends.base import Backend, Session
from equivcheck.backends.long import KeptHeads, LongSession
from equivcheck.backends.registry import backend as find_backend
from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineError, InputError, ModelError
from equivcheck.inputs import InputSpec, Sample, samples_from_python
from equivcheck.models.graph import Array, Graph
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.recording import Parameters, Recording, Writer, finished_samples, unfinished
from equivcheck.result import Model, Observation, Side, ValueInfo
from equivcheck.words import counted

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

Progress = Callable[[str], None]


class Recorder:
    """Runs samples on one backend. An engine's failure ends in `broke` (its last words) and in `lost` (by sample), not in an
    exception.

    With a `writer`, every recorded sample is kept at once, and samples that an interrupted job has finished are not run;
    of a sample that takes many runs (`LongSession`), what those gave is kept until the sample is whole. `progress` hears
    how far such a sample is.
    """

    def __init__(
        self,
        backend: Backend,
        model: OnnxModel,
        writer: Writer | None = None,
        progress: Progress = lambda text: None,
    ) -> None:
        self.backend = backend
        self.model = model
        self.writer = writer
        self.progress = progress
        self.broke: str | None = None
        self.lost: dict[str, str] = {}
        self.last: Recording | None = None
        self.delivered: dict[str, ValueInfo] = {}
        self.absent: dict[str, str] = {}
        self.resumed = 0
        self._session: Session | None = None
        self._closed = False
        self._resumed_side: Side | None = None

    def record(self, sample: Sample) -> Recording | None:
        """Return the recording of `sample`, or None where the engine failed."""
        try:
            self.last = self._finished(sample) or self._run(sample)
        except EngineError as error:
            self.lose(sample.id, str(error))
            return None
        self.absent |= self.last.absent
        for name, array in self.last.values.items():
            if name not in self.delivered:
                self.delivered[name] = value_info(array, self.last.quantisation.get(name))
        return self.last

    def lose(self, sample: str, reason: str) -> None:
        """Keep why there is nothing of `sample`."""
        self.broke = reason
        self.lost[sample] = reason

    @property
    def opened(self) -> bool:
        """Whether the engine took the model, now or in the job that this one goes on with."""
        return self._session is not None or self._resumed_side is not None

    def _finished(self, sample: Sample) -> Recording | None:
        found = None if self.writer is None else self.writer.finished(sample.info)
        if found is None:
            return None
        self.resumed += 1
        recording, self._resumed_side = found
        return recording

    def _run(self, sample: Sample) -> Recording:
        if self._session is None:
            self._session = self.backend.open(self.model)
        kept = self._kept(sample)
        if isinstance(self._session, LongSession):
            self._session.tell = lambda text: self.progress(f"{sample.id}, {self.backend.name}: {text}")
            self._session.kept = None if kept is None else KeptHeads(kept)
        recording = _tensors_only(self._session.run(sample.id, sample.arrays()))
        if self.writer is not None and kept is not None:
            self.writer.add(recording, sample.info, self._session.side)
            shutil.rmtree(kept.parent, ignore_errors=True)
        return recording

    def _kept(self, sample: Sample) -> Path | None:
        """Where parts of this sample are kept: beside the unfinished recording, by what was fed."""
        if self.writer is None:
            return None
        fed = "".join(f"{feed.name} {feed.sha256} " for feed in sample.info.feeds)
        return _heads(self.writer.scratch) / hashlib.sha256(fed.encode()).hexdigest()[:16]

    @property
    def side(self) -> Side:
        """What the backend says of itself by now."""
        if self._session is not None:
            return self._session.side
        return self._resumed_side or Side(
            spec=str(self.backend.spec),
            engine=self.backend.name,
            version="?",
            device="?",
            model_sha256=self.model.sha256,
            observation=Observation(method="none"),
        )

    def close(self) -> None:
        """Free the engine; an unfinished recording that holds a sample is left to go on from."""
        if self.writer is not None:
            self.writer.abandon()
        if self._session is not None and not self._closed:
            self._closed = True
            self._session.close()


def record(
    model: str | os.PathLike[str] | OnnxModel,
    *,
    backend: str | Backend = "ort",
    inputs: object = None,
    save_to: str | os.PathLike[str],
    preprocess: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Run `model` on one backend and keep every stored value in the folder `save_to`, which is returned.

    `inputs` as in `equivcheck.diff`. Raises EquivcheckError for a mistake in what was asked, EngineError when the engine
    fails; the samples recorded until then stay beside `save_to`, and the same call goes on behind them.
    """
    whole = model if isinstance(model, OnnxModel) else load_model(model)
    loaded = samples_from_python(inputs, input_specs(whole.graph), recipe=preprocess)
    return record_samples(whole, find_backend(backend), loaded.samples, Path(save_to), progress or (lambda text: None))


def record_samples(
    model: OnnxModel, backend: Backend, samples: Sequence[Sample], folder: Path, progress: Progress
) -> Path:
    """As `record`, with everything parsed and found."""
    check_feeds(model.graph, samples)
    fixed = model.with_input_shapes(input_shapes(samples))
    writer = writer_for(folder, fixed, backend)
    recorder = Recorder(backend, fixed, writer, progress)
    try:
        for number, sample in enumerate(samples, 1):
            progress(f"sample {number} of {len(samples)}: {sample.id}")
            if recorder.record(sample) is None:
                raise EngineError(recorder.broke or "it did not say why")
        return writer.finish(recorder.side)
    finally:
        recorder.close()


def left_behind(folder: Path) -> str:
    """What an interrupted job has left of the recording that was to come to `folder`, in words; nothing, where nothing is."""
    samples = finished_samples(folder)
    heads = sum(1 for _ in _heads(unfinished(folder)).glob("*/*.safetensors"))
    parts = [counted(samples, "finished sample")] * bool(samples) + [counted(heads, "head")] * bool(heads)
    return f"{' and '.join(parts)} kept beside {folder}" if parts else ""


def _heads(scratch: Path) -> Path:
    """Where heads of an unfinished sample are kept."""
    return scratch.with_name(scratch.name + ".heads")


def writer_for(folder: Path, model: OnnxModel, backend: Backend, runs: str = "") -> Writer:
    """What keeps the recordings of `model` on `backend` in `folder`; `runs` is the digest of another file that it runs.

    Raises OutputError.
    """
    return Writer(
        folder,
        model=model_info(model),
        spec=str(backend.spec),
        versions=versions() | ({"runs": runs} if runs else {}),
        declared=backend.legal_excess(),
    )


# -- what was asked ----------------------------------------------------------------------------------------------------


def input_specs(graph: Graph) -> list[InputSpec]:
    """What the model asks for, as the inputs package takes it."""
    specs = []
    for name in graph.inputs:
        value = graph.values.get(name)
        if value is None or value.dtype is None or value.shape is None:
            raise ModelError(
                f"input '{name}' has no type or shape in the model", asked=name, hint="declare it in the export"
            )
        specs.append(InputSpec(name, value.dtype, value.shape))
    return specs


def input_shapes(samples: Sequence[Sample]) -> dict[str, tuple[int, ...]]:
    """The shapes of the feeds; all samples must agree, because the model is fixed to them."""
    shapes = {name: array.shape for name, array in samples[0].arrays().items()}
    for sample in samples[1:]:
        for name, array in sample.arrays().items():
            if array.shape != shapes.get(name, array.shape):
                first = f"{list(shapes[name])} in {samples[0].id}"
                raise InputError(
                    f"samples differ in shape: '{name}' is {list(array.shape)} in {sample.id}, {first}",
                    hint="run them apart, or resize them alike (--preprocess)",
                )
    return shapes


def check_feeds(graph: Graph, samples: Sequence[Sample]) -> None:
    """Refuse NaN in a feed that the model quantises: it has no code, and engines disagree on what to make of it."""
    for sample in samples:
        for name, array in sample.arrays().items():
            readers = graph.consumers.get(name, ())
            quantised = next((reader for reader in readers if reader.op_type == "QuantizeLinear"), None)
            count = int(np.count_nonzero(np.isnan(array))) if quantised is not None and array.dtype.kind == "f" else 0
            if count and quantised is not None:
                step = graph.step_of_node[quantised.index].id
                raise InputError(
                    f"input '{name}' of {sample.id} holds {count} NaN, and step #{step} QuantizeLinear has no code for NaN",
                    asked=name,
                    hint="clean the input, or look at what made it",
                )


# -- descriptions ------------------------------------------------------------------------------------------------------


def _tensors_only(recording: Recording) -> Recording:
    """Name sequences, maps and optionals among the absent: they are no tensors."""
    others = {
        n: f"a {type(v).__name__} is no tensor" for n, v in recording.values.items() if not isinstance(v, np.ndarray)
    }
    if not others:
        return recording
    kept = {name: array for name, array in recording.values.items() if name not in others}
    return replace(recording, values=kept, absent={**recording.absent, **others})


def value_info(array: Array, parameters: Parameters | None) -> ValueInfo:
    """dtype, shape and quantisation of one recorded value."""
    return ValueInfo(
        dtype=str(array.dtype),
        shape=list(array.shape),
        scale=None if parameters is None else [float(s) for s in parameters.scale.ravel()],
        zero_point=None if parameters is None else [int(z) for z in parameters.zero_point.ravel()],
        axis=None if parameters is None else parameters.axis,
    )


def model_info(model: OnnxModel) -> Model:
    """What a report says of the model file."""
    return Model(
        path=model.path,
        sha256=model.sha256,
        format=model.format,
        ir_version=model.ir_version,
        opsets=model.opsets,
        nodes=len(model.graph.originals),
        scheme=scheme(model),
    )


def scheme(model: OnnxModel) -> str:
    """How the model is quantised, in a word: `int8 QDQ`, `uint8 QOperator`, `float`."""
    counts: dict[str, int] = {}
    for name in model.graph.stored:
        quantisation = model.graph.quantisation.get(name)
        if quantisation is not None:
            counts[str(quantisation.dtype)] = counts.get(str(quantisation.dtype), 0) + 1
    if not counts:
        return "not quantised"
    form = "TFLite" if model.format == "tflite" else "QDQ" if model.qdq.proto is model.proto else "QOperator"
    return f"{max(counts, key=lambda d: counts[d])} {form}"


def versions() -> dict[str, str]:
    """Versions of what decided the figures."""
    import onnx

    from equivcheck import __version__

    return {
        "equivcheck": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": OrtEngine().info()["version"],
    }
