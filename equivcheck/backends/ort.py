"""ONNX Runtime as a backend, observed faithfully: what is recorded is what the untouched model computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx

from equivcheck.backends.base import Backend, Option, Runner, Session
from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineRefused
from equivcheck.models.graph import Array, Graph, Step
from equivcheck.models.onnx.isolate import isolate, real_in_codes, spec_of
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.models.onnx.observe import Located, locate, recode, tag
from equivcheck.recording import Parameters, Recording
from equivcheck.result import Observation, Side

# NhwcTransformer off: bit-identical to ENABLE_ALL and keeps NCHW (6 real and 10 small models). ConstantSharing off: it
# would merge the telling scales again; but without it a Gemm whose weight and activation scales are equal becomes
# MatMulNBits, hence the second attempt.
_ATTEMPTS: tuple[tuple[str, ...], ...] = (("ConstantSharing", "NhwcTransformer"), ("NhwcTransformer",))
# Measured, and read off its kernel: see OrtBackend.legal_excess.
QLINEAR_SOFTMAX = (1.0, "onnxruntime's QLinearSoftmax multiplies by floor(1 / scale), up to 1 LSB low")
T = TypeVar("T")
_BELIEVED_LSB = 1.0  # an uncertain value must reproduce its step at least this well (the wrong value: 77 to 255 LSB)


class OrtBackend(Backend):
    """ONNX Runtime in this process."""

    name = "ort"
    summary = "ONNX Runtime, in this process; as deployed, or at another optimisation level"
    options = {  # noqa: RUF012  # a constant
        "optimization": Option("graph optimisation level", ("all", "extended", "basic", "disable"), "all"),
        "int8": Option("native: s8 kernels instead of s8 re-encoded as u8", ("u8", "native"), "u8"),
        "observe": Option("plain: extra outputs on the model itself", ("faithful", "plain"), "faithful"),
        "provider": Option("execution provider", None, "CPUExecutionProvider"),
        "threads": Option("intra-op threads", None, None, int),
    }

    def open(self, model: OnnxModel) -> Session:
        return _OrtSession(self, model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        engine = OrtEngine()
        _refusing(lambda: engine.load(proto.SerializeToString(), self.engine_options()))

        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            return _refusing(lambda: engine.run(feeds))

        return run

    def legal_excess(self) -> Mapping[str, tuple[float, str]]:
        """QLinearSoftmax uses floor(1 / y_scale): 254 at 1/255, so a probability of 1 becomes 254 (0.93 LSB on ppocr_cls).

        Source: ONNX Runtime, contrib_ops/cpu/quantization/qlinear_softmax.cc. Not at levels that keep a float Softmax.
        """
        return {} if self.chosen["optimization"] in ("disable", "basic") else {"Softmax": QLINEAR_SOFTMAX}

    def engine_options(self) -> dict[str, Any]:
        config = {"session.qdqisint8allowed": "1"} if self.chosen["int8"] == "native" else {}
        return {
            "optimization": self.chosen["optimization"],
            "provider": _provider(self.chosen["provider"]),
            "config": config,
            "threads": self.chosen.get("threads", 0),
        }


def _provider(name: str) -> str:
    """Accept `cuda`, `CUDA` or `CUDAExecutionProvider`; must be one that this onnxruntime has."""
    available = OrtEngine().info()["providers"]
    for provider in available:
        if name.casefold() in (provider.casefold(), provider.casefold().removesuffix("executionprovider")):
            return str(provider)
    raise EngineRefused(
        f"onnxruntime has no execution provider '{name}' here", last_words="available: " + ", ".join(available)
    )


def _refusing(call: Callable[[], T]) -> T:
    """Translate whatever onnxruntime raises into EngineRefused, at the seam."""
    try:
        return call()
    except EngineRefused:
        raise
    except Exception as error:  # onnxruntime raises its own classes, RuntimeError and ValueError
        words = " ".join(str(error).split())
        raise EngineRefused("onnxruntime refused the model", last_words=words[:600]) from error


class _OrtSession(Session):
    def __init__(self, backend: OrtBackend, model: OnnxModel) -> None:
        started = time.perf_counter()
        self.backend = backend
        self.model = model
        self.graph: Graph = model.graph
        self.options = backend.engine_options()
        self.untouched = OrtEngine()
        content = model.proto.SerializeToString()
        _refusing(lambda: self.untouched.load(content, self.options))
        self.tapped = OrtEngine()
        self.located: dict[str, Located] = {}
        self.absent: dict[str, str] = {}
        self.disturbed: bool | None = None
        self.confirmed = False
        self.plain = backend.chosen["observe"] == "plain" or self.options["optimization"] == "disable"
        self.attempts = list(_ATTEMPTS)
        self.timings = {"load": time.perf_counter() - started}

    # -- observing -----------------------------------------------------------------------------------------------------

    def _observe_plain(self) -> None:
        """Extra outputs on the model itself: neutral at ORT_DISABLE_ALL, disturbing above (the final outputs tell)."""
        wanted = [name for name in self.graph.stored if name not in self.graph.inputs]
        self.located = {name: Located(name, "extra output", certain=True) for name in wanted}
        _refusing(lambda: self.tapped.load(_with_outputs(self.model.proto, wanted), self.options))
        self.confirmed = True

    def _observe_faithfully(self, disabled: Sequence[str]) -> None:
        tagged = tag(self.model)
        content = tagged.proto.SerializeToString()
        optimised = onnx.ModelProto()
        optimised.ParseFromString(
            _refusing(lambda: self.tapped.optimise(content, {**self.options, "disabled_optimizers": disabled}))
        )
        self.located, self.absent = locate(tagged, optimised)
        names = dict.fromkeys(place.name for place in self.located.values())
        plain = {**self.options, "optimization": "disable"}
        _refusing(lambda: self.tapped.load(_with_outputs(optimised, names), plain))
        self.confirmed = False

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        started = time.perf_counter()
        outputs = _refusing(lambda: self.untouched.run(feeds))
        self.timings["run"] = time.perf_counter() - started
        values = self._observe(feeds, outputs)
        values = {**feeds, **values}
        how = {name: place.how for name, place in self.located.items() if name in values} | dict.fromkeys(feeds, "fed")
        return Recording(
            sample=sample,
            values=values,
            how=how,
            outputs=outputs,
            absent=dict(self.absent),
            quantisation=parameters(self.graph),
            disturbed=self.disturbed,
        )

    def _observe(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the tapped graph; while its final outputs are not the untouched ones, observe in the next way."""
        while True:
            if not self.located:
                self._prepare()
            got = _refusing(lambda: self.tapped.run(feeds))
            self.disturbed = not all(
                np.array_equal(outputs[name], got[name], equal_nan=_floating(outputs[name])) for name in outputs
            )
            if not self.disturbed or not self.attempts:
                break
            self.located = {}
        values = self._read(got)
        if not self.confirmed:
            self._confirm({**feeds, **values})
            values = {name: array for name, array in values.items() if name in self.located}
            self.confirmed = True
        return values

    def _prepare(self) -> None:
        if self.plain or not self.attempts:
            self.attempts.clear()
            self._observe_plain()
        else:
            self._observe_faithfully(self.attempts.pop(0))

    def _read(self, got: Mapping[str, Array]) -> dict[str, Array]:
        values: dict[str, Array] = {}
        for name, place in list(self.located.items()):
            array = got[place.name]
            quantisation = self.graph.quantisation.get(name)
            codes = recode(array, place, quantisation.dtype) if quantisation is not None else array
            fitted = _fitted(codes, self.graph, name) if codes is not None else None
            if fitted is None:
                self.absent[name] = f"what stands at its place ({array.dtype} {list(array.shape)}) is not its codes"
                del self.located[name]
            else:
                values[name] = fitted
        return values

    def _confirm(self, values: Mapping[str, Array]) -> None:
        """Drop each uncertain value that does not reproduce its own step from this run's inputs."""
        doubtful = [name for name, place in self.located.items() if not place.certain]
        if not doubtful:
            return
        steps: dict[int, Step] = {
            self.graph.step_of_value[name].id: self.graph.step_of_value[name] for name in doubtful
        }
        isolated = isolate(
            self.model, {name: spec_of(array) for name, array in values.items()}, form="real", steps=steps.values()
        )
        engine = OrtEngine()
        got: Mapping[str, Array] = {}
        if isolated.outputs:
            _refusing(lambda: engine.load(isolated.proto.SerializeToString(), {"optimization": "disable"}))
            got = _refusing(lambda: engine.run(isolated.feed(values)))
        for name in doubtful:
            shown = isolated.outputs.get(name)
            result = got[shown] if shown is not None else values[isolated.passthrough[name]]
            if not _reproduces(self.graph, name, values[name], result):
                self.absent[name] = f"found {self.located[name].how}, but that value does not reproduce its own step"
                del self.located[name]

    @property
    def side(self) -> Side:
        info = self.untouched.info()
        plain = self.plain or (self.located and all(place.how == "extra output" for place in self.located.values()))
        return Side(
            spec=str(self.backend.spec),
            engine=info["engine"],
            version=info["version"],
            device=_device(self.options["provider"], info),
            model_sha256=self.model.sha256,
            observation=Observation(
                method="plain" if plain else "faithful",
                disturbed=self.disturbed,
                note=f"optimisation {self.options['optimization']}",
            ),
            warnings=_int8_warnings(self.graph, info["int8_path"]),
            timings_s={key: round(value, 6) for key, value in self.timings.items()},
        )


def _device(provider: str, info: Mapping[str, Any]) -> str:
    if provider != "CPUExecutionProvider":
        return provider
    return {"vnni": "CPU with VNNI", "pair-sums": "CPU without VNNI"}.get(info["int8_path"], f"CPU {info['machine']}")


def _int8_warnings(graph: Graph, path: str) -> list[str]:
    """u8 activations times s8 weights lose sums beyond 16 bits on x86 without VNNI (126 instead of 250)."""
    if path != "pair-sums" or not any(q.dtype == np.uint8 for q in graph.quantisation.values()):
        return []
    return ["this CPU has no VNNI: u8*s8 sums can saturate at 16 bits in ONNX Runtime, so the reference may be wrong"]


def _with_outputs(proto: onnx.ModelProto, names: Sequence[str] | Mapping[str, None]) -> bytes:
    """Append name-only outputs to a serialised model without parsing it: protobuf merges a second graph field."""
    have = {port.name for port in proto.graph.output}
    extra = onnx.ModelProto()
    extra.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    return bytes(proto.SerializeToString() + extra.SerializeToString())


def _fitted(array: Array, graph: Graph, name: str) -> Array | None:
    """Reshape to the shape the model gives the value (MatMul+Add becomes a Gemm of two dimensions), or None."""
    value = graph.values.get(name)
    shape = value.shape if value is not None else None
    if shape is None or not all(isinstance(dim, int) for dim in shape) or shape == array.shape:
        return array
    fixed = tuple(dim for dim in shape if isinstance(dim, int))
    return array.reshape(fixed) if int(np.prod(fixed)) == array.size else None


def _reproduces(graph: Graph, name: str, array: Array, result: Array) -> bool:
    if array.size != result.size:
        return False
    if array.dtype.kind == "f":
        spread = float(np.max(np.abs(result), initial=0.0))
        return bool(np.allclose(array, result.reshape(array.shape), rtol=1e-3, atol=1e-3 * spread, equal_nan=True))
    if array.dtype.kind not in "iu":
        return bool(np.array_equal(array, result.reshape(array.shape)))
    real = real_in_codes(graph, name, result).reshape(array.shape)
    bounds = np.iinfo(array.dtype)
    return bool(np.max(np.abs(array - np.clip(real, bounds.min, bounds.max)), initial=0.0) <= 0.5 + _BELIEVED_LSB)


def _floating(array: Array) -> bool:
    return array.dtype.kind == "f"


def parameters(graph: Graph) -> dict[str, Parameters]:
    """Scale and zero point of every stored value, as recordings keep them."""
    return {
        name: Parameters(quantisation.scale, quantisation.zero_point, quantisation.axis)
        for name in graph.stored
        if (quantisation := graph.quantisation.get(name)) is not None
    }
