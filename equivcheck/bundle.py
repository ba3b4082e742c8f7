"""Bundles, for boards that nothing but a hand reaches: models, inputs and one script to run there.

A folder with `run.py` (needs Python 3.8, numpy and the engine there), `models/` (the untouched model and one head a stored
value), `inputs/`, `engines/`, perhaps `script/`, and `bundle.json` with what they are and their sha256. `run.py` fills
`results/`, which `equivcheck.carried` reads.

Heads share their weights: each larger one is stored once, in `models/weights.bin`, and `run.py` puts it in.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import BinaryIO

import msgspec
import onnx

from equivcheck.backends.ort import OrtBackend
from equivcheck.backends.registry import backend as find_backend
from equivcheck.backends.remote import DEFAULT_LIMIT
from equivcheck.backends.script import ScriptBackend
from equivcheck.backends.spec import Spec, parse
from equivcheck.carried import BUNDLE, SCHEMA, Packed, PackedModel, PackedSample
from equivcheck.engines.bundle_runner import write_arrays
from equivcheck.errors import OutputError, SpecError
from equivcheck.inputs import Sample, samples_from_python
from equivcheck.models.graph import Graph
from equivcheck.models.onnx.cut import dequantised, uniquely_named
from equivcheck.models.onnx.heads import head_to, wanted_values
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.recorder import Progress, check_feeds, input_shapes, input_specs, model_info, versions

_APART = 1024  # bytes; smaller initializers stay in the head
_WEIGHTS = "models/weights.bin"


@dataclass(frozen=True)
class Runs:
    """What will run the models on the board: a user's script (name and text), or ONNX Runtime with `options`."""

    spec: str
    limit: float
    script: tuple[str, bytes] | None = None
    options: Mapping[str, str | int | dict[str, str]] = field(default_factory=dict)
    declared: Mapping[str, tuple[float, str]] = field(default_factory=dict)


def runs(spec: str) -> Runs:
    """What a SPEC, `ort` or `script:FILE`, means on a board that cannot be reached.

    Raises SpecError for another backend, for a place (`@ssh=`), and for a way of observing other than by heads.
    """
    asked = parse(spec)
    if asked.name not in ("ort", "script"):
        raise SpecError(
            f"a bundle runs ort or script:FILE, not {asked.name}", asked=spec, hint="script:FILE runs whatever you have"
        )
    if asked.ssh is not None or asked.python is not None:
        raise SpecError(f"{spec}: a bundle is carried by hand", asked=spec, hint="leave out @ssh= and @python=")
    if asked.options.get("observe", "head") != "head":
        raise SpecError(
            f"{spec}: a bundle observes by heads, one truncated model a value", asked=spec, hint="leave out observe="
        )
    return _script(asked) if asked.name == "script" else _ort(asked)


def _script(spec: Spec) -> Runs:
    backend = find_backend(str(spec))
    assert isinstance(backend, ScriptBackend)
    limit = float(backend.chosen.get("timeout", DEFAULT_LIMIT))
    return Runs(str(spec), limit, script=(backend.path.name, backend.source))


def _ort(spec: Spec) -> Runs:
    """The provider is the board's: this machine need not have it."""
    here = {key: value for key, value in spec.options.items() if key not in ("provider", "timeout", "observe")}
    backend = OrtBackend(replace(spec, options=here))
    provider = spec.options.get("provider")
    options = {**backend.engine_options(), **({"provider": provider} if provider else {})}
    limit = float(
        OrtBackend(Spec("ort", {"timeout": spec.options.get("timeout", str(DEFAULT_LIMIT))})).chosen["timeout"]
    )
    return Runs(str(spec), limit, options=options, declared=backend.legal_excess())


def pack_bundle(
    model: str | os.PathLike[str] | OnnxModel,
    *,
    backend: str = "ort",
    inputs: object = None,
    save_to: str | os.PathLike[str],
    preprocess: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a bundle of `model` and `inputs` (as in `equivcheck.diff`) to the folder `save_to`, which is returned.

    `backend` is a SPEC of `ort` or `script`. Raises EquivcheckError for a mistake in what was asked, or a full disk.
    """
    whole = model if isinstance(model, OnnxModel) else load_model(model)
    loaded = samples_from_python(inputs, input_specs(whole.graph), recipe=preprocess)
    return write_bundle(whole, runs(backend), loaded.samples, Path(save_to), progress or (lambda text: None))


def write_bundle(model: OnnxModel, what: Runs, samples: Sequence[Sample], folder: Path, progress: Progress) -> Path:
    """As `pack_bundle`, with everything parsed. The folder appears whole or not at all; an older bundle there is replaced."""
    check_feeds(model.graph, samples)
    fixed = model.with_input_shapes(input_shapes(samples))
    if folder.exists() and not (folder / BUNDLE).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise OutputError(f"{folder} exists and is no bundle", asked=str(folder), hint="name a new or empty folder")
    if (folder / "results").exists():
        raise OutputError(
            f"{folder} holds results", asked=str(folder), hint="judge or move them, or name another folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _Packer(fixed, what, scratch, progress).pack(samples)
            scratch.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            scratch.replace(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}", asked=str(folder)) from error
    return folder


class _Packer:
    """Writes the files of one bundle."""

    def __init__(self, model: OnnxModel, what: Runs, folder: Path, progress: Progress) -> None:
        self.model, self.what, self.folder, self.progress = model, what, folder, progress
        self.graph: Graph = model.graph

    def pack(self, samples: Sequence[Sample]) -> None:
        script = None
        if self.what.script is not None:
            name, source = self.what.script
            script = f"script/{name}"
            self._write(script, source)
        for name in ("ort.py", "script.py"):
            self._write(f"engines/{name}", _engine_text(name))
        self._write("run.py", _engine_text("bundle_runner.py"))
        (self.folder / "run.py").chmod(0o755)
        models = self._models()
        packed_samples = [self._sample(number, sample) for number, sample in enumerate(samples)]
        packed = Packed(
            schema=SCHEMA,
            model=model_info(self.model),
            spec=self.what.spec,
            script=script,
            options=dict(self.what.options),
            timeout=self.what.limit,
            models=models,
            weights=_WEIGHTS,
            samples=packed_samples,
            files=self._digests(),
            declared=dict(self.what.declared),
            versions=versions(),
        )
        self._write(BUNDLE, msgspec.json.format(msgspec.json.encode(packed), indent=1))

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)

    def _sample(self, number: int, sample: Sample) -> PackedSample:
        name = f"inputs/{number:04d}.npz"
        (self.folder / "inputs").mkdir(exist_ok=True)
        write_arrays(str(self.folder / name), sample.arrays())
        return PackedSample(sample.id, sample.info.feeds, name)

    def _models(self) -> list[PackedModel]:
        """Write the whole model and its heads."""
        whole = uniquely_named(self.model.proto)
        self._write("models/model.onnx", whole.SerializeToString())
        found = [
            PackedModel(
                "models/model.onnx", "the whole model", None, list(self.graph.inputs), list(self.graph.outputs), []
            )
        ]
        wanted = wanted_values(self.graph)
        with (self.folder / _WEIGHTS).open("wb") as file:
            weights = _Weights(file)
            for number, name in enumerate(wanted, 1):
                self.progress(f"head {number} of {len(wanted)}: {name}")
                found.append(self._head(number, name, weights))
        return found

    def _head(self, number: int, name: str, weights: _Weights) -> PackedModel:
        step = self.graph.step_of_value[name]
        op_type = self.graph.nodes[step.main].op_type
        made = head_to(self.model, [dequantised(self.graph, name)])
        inputs = [
            port.name for port in made.graph.input if port.name in self.graph.inputs
        ]  # IR 3: weights are there too
        outputs = [port.name for port in made.graph.output]
        apart = weights.move_out(made)
        file = f"models/{number:04d}.head"
        self._write(file, made.SerializeToString())
        return PackedModel(file, f"#{step.id} {op_type} {name[-60:]}", name, inputs, outputs, apart)

    def _digests(self) -> dict[str, str]:
        """sha256 of every file that is there by now."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): _sha256(path) for path in files}


class _Weights:
    """The larger initializers of all heads, each written once to `file`."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._places: dict[bytes, tuple[int, int]] = {}

    def move_out(self, proto: onnx.ModelProto) -> list[tuple[int, int]]:
        """Take them out of `proto`; (offset, bytes) of each in the file."""
        stay, found = [], []
        for tensor in proto.graph.initializer:
            if tensor.ByteSize() < _APART:
                stay.append(tensor)
                continue
            content = tensor.SerializeToString()
            key = hashlib.sha256(content).digest()
            if key not in self._places:
                self._places[key] = self.file.tell(), len(content)
                self.file.write(content)
            found.append(self._places[key])
        kept = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in stay]
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(kept)
        return found


def _engine_text(name: str) -> bytes:
    return resources.files("equivcheck.engines").joinpath(name).read_bytes()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
