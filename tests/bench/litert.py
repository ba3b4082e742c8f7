"""LiteRT as an engine of its own: the .tflite twin of a QDQ model, every inner tensor paired with a stored value.

A pair has the same scale, zero point and shape (NHWC or NCHW), in the order of operators. Values that only move codes
(the Transposes and Reshapes an ONNX export adds) have no tensor there and are moved here. XNNPACK keeps nothing of the
inside of a delegated partition, so for it every inner tensor is made an output of the file; the final output is compared
with an untouched run, and the recording says where they differ.

tflite-runtime 2.14 (numpy < 2) is run by an interpreter of its own: `EQUIVCHECK_TFLITE_RUNTIME=/path/to/its/python`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx

from equivcheck.backends.base import Backend, Runner, Session
from equivcheck.backends.spec import Spec
from equivcheck.errors import EngineRefused
from equivcheck.models.graph import Array
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.recording import Parameters, Recording
from equivcheck.result import Observation, Side
from equivcheck.vnpu.ir import Move
from equivcheck.vnpu.profiles import load_profile
from equivcheck.vnpu.program import compile_program
from equivcheck.vnpu.targets import load_target

KERNELS = ("reference", "builtin", "xnnpack", "runtime-2.14")
RUNTIME = os.environ.get("EQUIVCHECK_TFLITE_RUNTIME", "")
IN_RUNTIME = """
import sys, numpy
from tflite_runtime.interpreter import Interpreter, OpResolverType
end, found = None, {}
for path in sys.argv[1:3]:
    it = Interpreter(path, experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, num_threads=1)
    it.allocate_tensors()
    it.set_tensor(it.get_input_details()[0]["index"], numpy.load(sys.argv[3]))
    it.invoke()
    outputs = {str(d["index"]): it.get_tensor(d["index"]) for d in it.get_output_details()}
    found.update(outputs)
    end = end if end is not None else outputs
found["same"] = numpy.array(all(numpy.array_equal(found[k], end[k]) for k in end))
numpy.savez(sys.argv[4], **found)
"""
MOVED = ("Transpose", "Reshape", "Squeeze", "Flatten", "Unsqueeze")


class LitertBackend(Backend):
    """`kernels` is one of KERNELS; `twin` the .tflite file. Gives no second opinion: it reads no ONNX."""

    name = "litert"
    summary = "the .tflite twin of a model, in the bench"
    second_opinion = False

    def __init__(self, kernels: str, twin: Path) -> None:
        super().__init__(Spec("litert"))
        self.kernels = kernels
        self.twin = twin

    def open(self, model: OnnxModel) -> Session:
        return _LitertSession(self, model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        raise EngineRefused("LiteRT reads no ONNX")


class _LitertSession(Session):
    def __init__(self, backend: LitertBackend, model: OnnxModel) -> None:
        self.backend = backend
        self.model = model
        self.graph = model.graph
        self.content = backend.twin.read_bytes()
        self.tensors = _inner(self.content)
        keeps_all = backend.kernels in ("reference", "builtin")
        self.watched = self.content if keeps_all else _all_outputs(self.content, list(self.tensors))
        self.inner = _interpreter(self.watched, backend.kernels, preserve=keeps_all)
        self.untouched = _interpreter(self.content, backend.kernels, preserve=False)
        self.moves = compile_program(
            self.graph, profile=load_profile("exact"), target=load_target("all"), fallback=_no_fallback
        )
        self.disturbed: bool | None = None

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        get = self._in_runtime(feeds) if self.backend.kernels == "runtime-2.14" else self._here(feeds)
        values = self._paired(feeds, get)
        return Recording(
            sample=sample,
            values=values,
            how=dict.fromkeys(values, "the twin's tensor"),
            outputs={},
            absent={name: "no tensor of the twin" for name in self.graph.stored if name not in values},
            quantisation={
                n: Parameters(q.scale, q.zero_point, q.axis) for n, q in self.graph.quantisation.items() if n in values
            },
            disturbed=self.disturbed,
        )

    def _here(self, feeds: Mapping[str, Array]) -> Callable[[int], Array]:
        outputs = []
        for interpreter in (self.inner, self.untouched):
            (port,), end = interpreter.get_input_details(), self.untouched.get_output_details()[0]["index"]
            interpreter.set_tensor(port["index"], _only(feeds).astype(port["dtype"]))
            interpreter.invoke()
            outputs.append(interpreter.get_tensor(end))
        self.disturbed = not np.array_equal(*outputs)
        return self.inner.get_tensor

    def _in_runtime(self, feeds: Mapping[str, Array]) -> Callable[[int], Array]:
        (port,) = self.inner.get_input_details()
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            (place / "as_it_is.tflite").write_bytes(self.content)
            (place / "watched.tflite").write_bytes(self.watched)
            np.save(place / "x.npy", _only(feeds).astype(port["dtype"]))
            files = [str(place / name) for name in ("as_it_is.tflite", "watched.tflite", "x.npy", "found.npz")]
            ran = subprocess.run([RUNTIME, "-c", IN_RUNTIME, *files], capture_output=True, text=True, check=False)
            if ran.returncode:
                raise EngineRefused("tflite-runtime", last_words=ran.stderr[-400:])
            with np.load(place / "found.npz") as found:
                arrays = {name: found[name] for name in found.files}
        self.disturbed = not bool(arrays["same"])
        return lambda index: arrays[str(index)]

    def _paired(self, feeds: Mapping[str, Array], get: Callable[[int], Array]) -> dict[str, Array]:
        found: dict[str, Array] = dict(feeds)
        left = [name for name in self.graph.stored if name not in feeds]
        details = {d["index"]: d for d in self.inner.get_tensor_details()}
        for index in self.tensors:
            detail = details[index]
            scale, zero = detail["quantization"]
            for name in left:
                q = self.graph.quantisation.get(name)
                if q is None or q.scale.size != 1 or self._only_moves(name):
                    continue
                if np.float32(scale) != q.scale.reshape(()) or zero != int(q.zero_point.reshape(())):
                    continue
                array = self._shaped(name, get(index))
                if array is None or array.dtype != q.dtype:
                    continue
                found[name] = array
                left.remove(name)
                break
        for step in self.graph.steps:
            missing = [n for n in step.outputs if n not in found]
            if missing and all(n in found for n in step.inputs) and self._only_moves(missing[0]):
                made = self._move(step, found)
                found.update(made)
        return {name: found[name] for name in self.graph.stored if name in found}

    def _only_moves(self, name: str) -> bool:
        return all(op in MOVED for op in self.graph.step_of_value[name].ops)

    def _move(self, step, found):
        if isinstance(self.moves.op(step), Move):
            return self.moves.run_step(step, found)
        (node,) = [self.graph.nodes[i] for i in step.nodes if self.graph.nodes[i].op_type in MOVED]
        source = found[step.inputs[0]]
        if node.op_type == "Transpose":
            return {step.outputs[0]: np.ascontiguousarray(source.transpose(node.attributes["perm"]))}
        return {}

    def _shaped(self, name: str, array: Array) -> Array | None:
        """The tensor in the ONNX value's shape, NCHW where the twin has NHWC; None where neither fits."""
        value = self.graph.values.get(name)
        wanted = tuple(value.shape) if value is not None and value.shape is not None else None
        if wanted is None:
            return None

        def fits(shape):
            sizes = zip(wanted, shape, strict=False)
            return len(shape) == len(wanted) and all(w == s or not isinstance(w, int) for w, s in sizes)

        if array.ndim == 4 and fits(array.transpose(0, 3, 1, 2).shape):
            return np.ascontiguousarray(array.transpose(0, 3, 1, 2))
        if fits(array.shape):
            return np.ascontiguousarray(array)
        squeezed = array.reshape(array.shape[0], -1)
        if array.size == array.shape[0] * array.shape[-1] and len(wanted) in (2, 3, 4):
            grown = squeezed.reshape(*squeezed.shape, *[1] * (len(wanted) - 2))
            return grown if fits(grown.shape) else None
        return None

    @property
    def side(self) -> Side:
        return Side(
            spec=f"litert:{self.backend.kernels}",
            engine="litert",
            version=self.backend.kernels,
            device="cpu",
            model_sha256="",
            observation=Observation(method="preserve-all", disturbed=self.disturbed),
        )


def _only(feeds: Mapping[str, Array]) -> Array:
    (array,) = feeds.values()
    return array


def _no_fallback(step, inputs):
    raise NotImplementedError(step.op_type)


def _inner(content: bytes) -> list[int]:
    """Outputs of all operators, in their order."""
    from ai_edge_litert import schema_py_generated as schema

    graph = schema.ModelT.InitFromPackedBuf(content, 0).subgraphs[0]
    return [int(out) for operator in graph.operators for out in operator.outputs]


def _all_outputs(content: bytes, tensors: list[int]) -> bytes:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(content, 0)
    graph = model.subgraphs[0]
    ends = [int(o) for o in graph.outputs]
    graph.outputs = [*ends, *(t for t in tensors if t not in ends)]
    model.signatureDefs = None
    builder = flatbuffers.Builder(len(content) + 1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _interpreter(content: bytes, kernels: str, *, preserve: bool):
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    resolver = {
        "reference": OpResolverType.BUILTIN_REF,
        "builtin": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        "xnnpack": OpResolverType.AUTO,
        "runtime-2.14": OpResolverType.BUILTIN_REF,  # only asked what its tensors are
    }[kernels]
    interpreter = Interpreter(
        model_content=content,
        experimental_op_resolver_type=resolver,
        experimental_preserve_all_tensors=preserve,
        num_threads=1,
    )
    interpreter.allocate_tensors()
    return interpreter
