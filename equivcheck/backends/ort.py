"""ONNX Runtime as a backend, observed faithfully: what is recorded is what the untouched model computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx

from equivcheck.backends.base import Backend, Engine, Option, Runner, Session
from equivcheck.backends.spec import Spec
from equivcheck.engines.ort import OrtEngine
from equivcheck.errors import EngineError, EngineRefused, EquivcheckError, UnknownOption
from equivcheck.models.graph import Array, Graph, Step
from equivcheck.models.onnx.cut import uniquely_named
from equivcheck.models.onnx.isolate import real_in_codes
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.models.onnx.observe import Located, locate, recode, tag
from equivcheck.recording import Parameters, Recording
from equivcheck.result import Observation, Side
from equivcheck.truth import StepResults, specs_of, step_results

# NhwcTransformer off: bit-identical to ENABLE_ALL and keeps NCHW (6 real and 10 small models). ConstantSharing off: it
# would merge the telling scales again; but without it a Gemm whose weight and activation scales are equal becomes
# MatMulNBits, hence the second attempt.
_ATTEMPTS: tuple[tuple[str, ...], ...] = (("ConstantSharing", "NhwcTransformer"), ("NhwcTransformer",))
# Measured, and read off its kernel: see OrtBackend.legal_excess.
QLINEAR_SOFTMAX = (1.0, "onnxruntime's QLinearSoftmax multiplies by floor(1 / scale), up to 1 LSB low")
_CPU = "CPUExecutionProvider"
T = TypeVar("T")
_BELIEVED_LSB = 1.0  # a value must reproduce its step at least this well (a wrong one: 77 to 255 LSB off)
_MERGED_LSB = 3.0  # the median, where a value before it is missing: legal values stay below 1, wrong ones are far off


class OptimisingEngine(Engine, Protocol):
    """An engine that can show its own graph."""

    def optimise(self, model: bytes, options: Mapping[str, Any]) -> bytes:
        """The graph as it would run it, serialised."""


class OrtBackend(Backend):
    """ONNX Runtime in this process, or in a worker: another interpreter, another machine, or under a time limit."""

    name = "ort"
    summary = "ONNX Runtime, in this process or elsewhere; as deployed, or at another optimisation level"
    travels = True
    options = {  # noqa: RUF012  # a constant
        "optimization": Option("graph optimisation level", ("all", "extended", "basic", "disable"), "all"),
        "int8": Option("native: s8 kernels instead of s8 re-encoded as u8", ("u8", "native"), "u8"),
        "observe": Option("plain: extra outputs on the model itself", ("faithful", "plain"), "faithful"),
        "provider": Option("execution provider", None, _CPU),
        "threads": Option("intra-op threads", None, None, int),
    }

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._in_worker = spec.python is not None or spec.ssh is not None or "timeout" in self.chosen
        if self._in_worker:
            from equivcheck.backends.remote import Place

            self._place = Place.of(spec)
        else:
            _ = self.provider  # a mistake in it is told before anything runs

    def engine(self) -> OptimisingEngine:
        """A new engine where the SPEC wants it."""
        if not self._in_worker:
            return OrtEngine()
        from equivcheck.backends.remote import DEFAULT_LIMIT, RemoteEngine, Travelling

        limit = float(self.chosen.get("timeout", DEFAULT_LIMIT))
        return RemoteEngine(self._place, Travelling("ort.py", "OrtEngine"), limit)

    @cached_property
    def provider(self) -> str:
        """The execution provider's full name. Raises UnknownOption where its onnxruntime does not have it."""
        if self.chosen["provider"] == _CPU:
            return _CPU
        with contextlib.closing(self.engine()) as engine:
            return _provider(self.chosen["provider"], engine.info()["providers"])

    def open(self, model: OnnxModel) -> Session:
        return _OrtSession(self, model)

    def deploy(self, proto: onnx.ModelProto) -> Runner:
        engine = self.engine()
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
            "provider": self.provider,
            "config": config,
            "threads": self.chosen.get("threads", 0),
        }


def _provider(name: str, available: Sequence[str]) -> str:
    """Accept `cuda`, `CUDA` or `CUDAExecutionProvider`; must be one that this onnxruntime has."""
    for provider in available:
        if name.casefold() in (provider.casefold(), provider.casefold().removesuffix("executionprovider")):
            return str(provider)
    raise UnknownOption(
        f"onnxruntime has no execution provider '{name}' here", asked=name, hint="available: " + ", ".join(available)
    )


def _refusing(call: Callable[[], T]) -> T:
    """Translate whatever onnxruntime raises into EngineRefused, at the seam."""
    try:
        return call()
    except (EngineError, EquivcheckError):
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
        self.runnable = uniquely_named(model.proto)
        self.untouched, self.tapped = backend.engine(), backend.engine()
        try:
            _refusing(lambda: self.untouched.load(self.runnable.SerializeToString(), self.options))
        except BaseException:
            self.close()
            raise
        self.places: dict[str, list[Located]] = {}
        self.never: dict[str, str] = {}
        self.disturbed: bool | None = None
        self.faithful = backend.chosen["observe"] == "faithful" and self.options["optimization"] != "disable"
        self.attempts = list(_ATTEMPTS) if self.faithful else []
        self.steps: StepResults | None = None
        self.timings = {"load": time.perf_counter() - started}

    # -- observing -----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Tap in the next way that is left: the optimised graph, or the model itself."""
        wanted = [name for name in self.graph.stored if name not in self.graph.inputs]
        self.never = {name: why for name in wanted if (why := not_for_python(self.graph, name))}
        if self.attempts:
            self._tap_optimised(self.attempts.pop(0))
            return
        self.faithful = False
        self.places = {name: [Located(name, "extra output", certain=True)] for name in wanted if name not in self.never}
        _refusing(lambda: self.tapped.load(_with_outputs(self.runnable, list(self.places)), self.options))

    def _tap_optimised(self, disabled: Sequence[str]) -> None:
        tagged = tag(self.model)
        content = tagged.proto.SerializeToString()
        options = {**self.options, "disabled_optimizers": disabled}
        optimised = onnx.ModelProto()
        optimised.ParseFromString(_refusing(lambda: self.tapped.optimise(content, options)))
        found, missing = locate(tagged, optimised)
        self.places = {name: places for name, places in found.items() if name not in self.never}
        self.never = {**missing, **self.never}
        names = dict.fromkeys(place.name for places in self.places.values() for place in places)
        plain = {**self.options, "optimization": "disable"}
        _refusing(lambda: self.tapped.load(_with_outputs(optimised, names), plain))

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, sample: str, feeds: Mapping[str, Array]) -> Recording:
        started = time.perf_counter()
        outputs = _refusing(lambda: self.untouched.run(feeds))
        self.timings["run"] = time.perf_counter() - started
        seen = _Seen(self.graph, self._tapped_run(feeds, outputs), self.places, feeds)
        results = self._believe(seen) if self.faithful else None
        return Recording(
            sample=sample,
            values=seen.values,
            how=seen.how,
            outputs=outputs,
            absent={**self.never, **seen.absent},
            quantisation=parameters(self.graph),
            disturbed=self.disturbed,
            results=results,
        )

    def _tapped_run(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the tapped graph; while its final outputs are not the untouched ones, tap in the next way."""
        while True:
            if not self.places:
                self._prepare()
            got = _refusing(lambda: self.tapped.run(feeds))
            self.disturbed = not all(_same(outputs[name], got[name]) for name in outputs)
            if not self.disturbed or not self.faithful:
                return got
            self.places = {}

    def _believe(self, seen: _Seen) -> dict[str, Array]:
        """Keep of the seen values those that reproduce their own steps; return the results of the steps on them.

        Of a step that is not reproduced, other candidates are tried; if none fits, the value is dropped and its readers are
        evaluated without it. Steps behind a doubtful value wait for the next round. A kernel's own output is kept as it is
        where no Transpose could have reordered it: there, ONNX Runtime is not the model, and the report must say so.
        """
        reordered = any(node.op_type == "Transpose" for node in self.graph.nodes)
        while True:
            if self.steps is None or not self.steps.fits(seen.values):
                self.steps = step_results(self.model, specs_of(seen.values), seen.made())
            results = _refusing(partial(self.steps.evaluate, seen.values))
            if not seen.amend(results, reordered):
                return results

    def close(self) -> None:
        self.untouched.close()
        self.tapped.close()
        self.steps = None

    @property
    def side(self) -> Side:
        info = self.untouched.info()
        return Side(
            spec=str(self.backend.spec),
            engine=info["engine"],
            version=info["version"],
            device=_device(self.options["provider"], info),
            model_sha256=self.model.sha256,
            observation=Observation(
                method="faithful" if self.faithful else "plain",
                disturbed=self.disturbed,
                note=f"optimisation {self.options['optimization']}",
            ),
            warnings=_int8_warnings(self.graph, info["int8_path"]),
            timings_s={key: round(value, 6) for key, value in self.timings.items()},
        )


class _Seen:
    """What one tapped run showed: the values believed so far, and for each the candidates that are left."""

    def __init__(
        self, graph: Graph, got: Mapping[str, Array], places: Mapping[str, list[Located]], feeds: Mapping[str, Array]
    ) -> None:
        self.graph = graph
        self.got = got
        self.values: dict[str, Array] = dict(feeds)
        self.how: dict[str, str] = dict.fromkeys(feeds, "fed")
        self.absent: dict[str, str] = {}
        self.left = {name: list(found) for name, found in places.items()}
        self.chosen: dict[str, Located] = {}
        for name in places:
            self._take_next(name)

    def made(self) -> list[Step]:
        """The steps that make at least one of the values."""
        return [step for step in self.graph.steps if any(out in self.values for out in step.outputs)]

    def _take_next(self, name: str, result: Array | None = None) -> bool:
        """Take the next candidate that can be this value's codes (and reproduces `result`, where given)."""
        while self.left[name]:
            place = self.left[name].pop(0)
            array = self._read(name, place)
            if array is not None and (result is None or _reproduces(self.graph, name, array, result, _BELIEVED_LSB)):
                self.values[name], self.how[name], self.chosen[name] = array, place.how, place
                return True
        return False

    def _read(self, name: str, place: Located) -> Array | None:
        array = self.got[place.name]
        if not isinstance(array, np.ndarray):
            self.absent[name] = f"a {type(array).__name__} is no tensor: not compared"
            return None
        quantisation = self.graph.quantisation.get(name)
        codes = recode(array, place, quantisation.dtype) if quantisation is not None else array
        fitted = _fitted(codes, self.graph, name) if codes is not None else None
        if fitted is None:
            self.absent[name] = f"what stands at its place ({array.dtype} {list(array.shape)}) is not its codes"
        else:
            self.absent.pop(name, None)
        return fitted

    def amend(self, results: Mapping[str, Array], reordered: bool) -> bool:
        """Replace or drop values that do not reproduce their step; True when something changed."""
        changed = False
        doubtful: set[str] = set()
        for step in self.graph.steps:
            waits = any(name in doubtful for name in step.inputs)
            missing = any(name not in self.values for name in step.inputs)
            for name in step.outputs:
                if name not in self.values or name not in results:
                    continue
                if waits:
                    doubtful.add(name)
                elif not reordered and self.chosen[name].certain:
                    continue
                elif not self._holds(name, results[name], missing):
                    doubtful.add(name)
                    changed = True
                    if not self._take_next(name, None if missing else results[name]):
                        self._drop(name)
        return changed

    def _holds(self, name: str, result: Array, merged: bool) -> bool:
        """Does the value reproduce its step? Behind a missing value only roughly: legal dumps are 14 to 22 LSB off there."""
        return _reproduces(self.graph, name, self.values[name], result, _MERGED_LSB if merged else _BELIEVED_LSB)

    def _drop(self, name: str) -> None:
        self.absent[name] = f"found {self.how.pop(name)}, but that value does not reproduce its own step"
        del self.values[name]


def _device(provider: str, info: Mapping[str, Any]) -> str:
    if provider != _CPU:
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


def not_for_python(graph: Graph, name: str) -> str:
    """Why ONNX Runtime cannot hand this value to Python, or nothing."""
    value = graph.values.get(name)
    dtype = value.dtype if value is not None else None
    exotic = dtype is not None and dtype.startswith(("int4", "uint4", "int2", "uint2", "bfloat16", "float4"))
    return f"onnxruntime cannot hand {dtype} to Python" if exotic else ""


def _fitted(array: Array, graph: Graph, name: str) -> Array | None:
    """Bring to the shape the model gives the value (MatMul+Add becomes a Gemm of two dimensions), or None.

    Dimensions may be merged or split, never put in another order: that would be other codes at every place.
    """
    value = graph.values.get(name)
    shape = value.shape if value is not None else None
    if shape is None or not all(isinstance(dim, int) for dim in shape) or shape == array.shape:
        return array
    fixed = tuple(dim for dim in shape if isinstance(dim, int))
    return array.reshape(fixed) if _regrouped(array.shape, fixed) else None


def _regrouped(one: Sequence[int], other: Sequence[int]) -> bool:
    """Is one shape the other with neighbouring dimensions merged (dimensions of 1 do not count)?"""
    short, long = sorted(([d for d in one if d != 1], [d for d in other if d != 1]), key=len)
    at = 0
    for size in short:
        product = 1
        while at < len(long) and product < size:
            product *= long[at]
            at += 1
        if product != size:
            return False
    return at == len(long)


def _reproduces(graph: Graph, name: str, array: Array, result: Array, limit: float) -> bool:
    """Are the codes within 1/2 + `limit` LSB of the result of their step? Floats: within 0.1 % of its spread."""
    if array.size != result.size:
        return False
    result = result.reshape(array.shape)
    if array.dtype.kind == "f":
        spread = float(np.max(np.abs(result), initial=0.0, where=np.isfinite(result)))
        return bool(np.allclose(array, result, rtol=1e-3, atol=1e-3 * spread, equal_nan=True))
    if array.dtype.kind not in "iu" or name not in graph.quantisation:
        return bool(np.array_equal(array, result))
    bounds = np.iinfo(array.dtype)
    distance = np.abs(array - np.clip(real_in_codes(graph, name, result), bounds.min, bounds.max))
    if limit == _MERGED_LSB:
        return bool(np.median(distance) <= limit) if distance.size else True
    return bool(np.max(distance, initial=0.0) <= 0.5 + limit)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):  # sequences and maps
        return repr(one) == repr(other)
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def parameters(graph: Graph) -> dict[str, Parameters]:
    """Scale and zero point of every stored value, as recordings keep them."""
    return {
        name: Parameters(quantisation.scale, quantisation.zero_point, quantisation.axis)
        for name in graph.stored
        if (quantisation := graph.quantisation.get(name)) is not None
    }
