"""The tflite backend's contract, in every interpreter that has TFLite; and real delegates, right, wrong and broken."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import equivcheck
from backends.test_contract import assert_sound
from builder import Qdq, feeds
from environments import TFLITE_RUNTIME
from equivcheck.backends import registry
from equivcheck.backends.spec import parse
from equivcheck.backends.tflite import TfliteBackend
from equivcheck.engines.tflite import TfliteEngine
from equivcheck.errors import EngineCrashed, EngineError, EngineRefused, EquivcheckError, SpecError, UnknownOption
from equivcheck.models.onnx.cut import codes_of, head
from equivcheck.models.onnx.load import load_model, model_from_bytes
from equivcheck.models.tflite.load import TfliteModel, tflite_from_bytes
from equivcheck.opinions import SecondOpinion, random_codes
from equivcheck.recording import Recording
from equivcheck.result import Result
from small_models import TRAPS, end, start
from tflite_graphs import TfliteGraph, feeds_of, small_net

# The last tflite-runtime there is: Python up to 3.11, numpy below 2. What boards have.
PLACES = ("ai-edge-litert", "tflite-runtime")
KERNELS = ("reference", "builtin", "xnnpack")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    """What to put behind a SPEC: nothing, or the interpreter that has tflite-runtime 2.14."""
    return "" if request.param == "ai-edge-litert" else _runtime()


def _runtime() -> str:
    given = os.environ.get("EQUIVCHECK_TFLITE_RUNTIME") or (
        str(TFLITE_RUNTIME.interpreter) if TFLITE_RUNTIME.ready else ""
    )
    if not given:
        reason = f"no tflite-runtime: EQUIVCHECK_TFLITE_RUNTIME names an interpreter that has it; nor {TFLITE_RUNTIME.folder}"
        print(reason)
        pytest.skip(reason)
    return f"@python={given}"


def engine(text: str) -> TfliteBackend:
    return TfliteBackend(parse(text))


def net() -> TfliteModel:
    return tflite_from_bytes(small_net(), "net.tflite")


def recorded(spec: str, model: TfliteModel, given: Mapping[str, np.ndarray]) -> Recording:
    with engine(spec).open(model) as session:
        return session.run("one", given)


def assert_equal(one: Recording, other: Recording) -> None:
    assert set(one.values) == set(other.values)
    for name, array in one.values.items():
        np.testing.assert_array_equal(array, other.values[name], err_msg=name)


# -- the contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_stored_value_is_recorded_as_the_model_has_it(place: str, kernels: str) -> None:
    model = net()
    given = feeds_of(model.flatbuffer)
    recording = recorded(f"tflite:kernels={kernels}{place}", model, given)
    assert_sound(model, recording, given)
    assert set(recording.values) == set(model.graph.stored)
    assert recording.disturbed is False
    (output,) = model.graph.outputs
    np.testing.assert_array_equal(recording.outputs[output], recording.values[output])


@pytest.mark.parametrize("kernels", KERNELS)
def test_all_neutral_ways_of_looking_see_the_same(place: str, kernels: str) -> None:
    model = net()
    given = feeds_of(model.flatbuffer)
    heads = recorded(f"tflite:kernels={kernels},observe=head{place}", model, given)
    assert_equal(heads, recorded(f"tflite:kernels={kernels},observe=outputs{place}", model, given))
    if not place and kernels != "xnnpack":
        assert_equal(heads, recorded(f"tflite:kernels={kernels},observe=preserve", model, given))


def test_what_lies_inside_a_delegated_partition_is_never_read_from_kept_memory() -> None:
    """The interpreter hands out such tensors without a word: memory that nobody wrote."""
    model = net()
    given = feeds_of(model.flatbuffer)
    kept = recorded("tflite:kernels=xnnpack,observe=preserve", model, given)
    seen = recorded("tflite:kernels=xnnpack,observe=head", model, given)
    assert_sound(model, kept, given)
    assert len(kept.absent) >= 4
    assert set(kept.absent.values()) == {"inside a partition of the delegate: nothing is kept there"}
    for name, array in kept.values.items():
        np.testing.assert_array_equal(array, seen.values[name], err_msg=name)


def test_tflite_runtime_gives_overwritten_inputs_of_add_and_mul_when_it_preserves_all() -> None:
    """Why that way is not taken there: the final output is right, and what the interpreter shows inside is not."""
    model = net()
    given = feeds_of(model.flatbuffer)
    spec = f"tflite:kernels=reference,observe={{}}{_runtime()}"
    kept, seen = (recorded(spec.format(way), model, given) for way in ("preserve", "outputs"))
    assert kept.disturbed is False
    wrong = {name for name, array in seen.values.items() if not np.array_equal(array, kept.values[name])}
    source = model.flatbuffer
    inputs = {source.tensors[k].name for op in source.operators if op.kind in ("ADD", "MUL") for k in op.inputs}
    assert wrong
    assert wrong <= inputs


def test_two_runs_and_two_sessions_are_equal_and_a_recording_is_not_overwritten(place: str) -> None:
    model = net()
    one, other = feeds_of(model.flatbuffer, 1), feeds_of(model.flatbuffer, 2)
    with engine(f"tflite:kernels=reference{place}").open(model) as session:
        first = session.run("one", one)
        kept = {name: array.copy() for name, array in first.values.items()}
        second = session.run("two", other)
        again = session.run("three", one)
    for name, array in kept.items():
        np.testing.assert_array_equal(first.values[name], array)
    assert any(not np.array_equal(second.values[name], array) for name, array in kept.items())
    assert_equal(first, again)
    assert_equal(first, recorded(f"tflite:kernels=reference{place}", model, one))


def test_feeds_may_be_read_only_and_need_not_be_contiguous(place: str) -> None:
    model = net()
    given = feeds_of(model.flatbuffer)
    strange = {name: np.asfortranarray(array) for name, array in given.items()}
    for array in strange.values():
        array.flags.writeable = False
    assert_equal(recorded(f"tflite{place}", model, given), recorded(f"tflite{place}", model, strange))


@pytest.mark.parametrize(
    "bad", [{}, {"image": np.zeros((1, 9, 8, 3), np.int8)}, {"image": np.zeros((1, 9, 9, 3), np.float32)}]
)
def test_a_missing_feed_a_wrong_shape_and_a_wrong_type_are_errors_of_ours(bad: dict[str, np.ndarray]) -> None:
    with engine("tflite").open(net()) as session, pytest.raises((EngineError, EquivcheckError)):
        session.run("bad", bad)


def test_a_float_input_and_output_are_as_the_file_has_them(place: str) -> None:
    g = TfliteGraph()
    x = g.op("QUANTIZE", [g.input((1, 4, 4, 3), dtype="float32", name="x")], (1, 4, 4, 3))
    y = g.op("DEQUANTIZE", [g.conv(x, 4)], (1, 4, 4, 4), dtype="float32", name="y")
    model = tflite_from_bytes(g.content(y), "f.tflite")
    given = feeds_of(model.flatbuffer)
    recording = recorded(f"tflite:kernels=reference{place}", model, given)
    assert_sound(model, recording, given)
    codes, distance = codes_of(recording.outputs["y"], model.graph, model.graph.store("y") or "")
    np.testing.assert_array_equal(codes, recording.values[model.graph.store("y") or ""])
    assert distance < 1e-3


def test_closing_twice_is_no_mistake_and_a_side_says_who_ran(place: str) -> None:
    model = net()
    session = engine(f"tflite:kernels=reference,threads=2{place}").open(model)
    session.run("one", feeds_of(model.flatbuffer))
    side = session.side
    session.close()
    session.close()
    assert (side.engine, side.model_sha256) == ("tflite-runtime" if place else "ai-edge-litert", model.sha256)
    assert side.observation.method == ("outputs" if place else "preserve")
    assert not side.placement
    assert not side.warnings


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_an_onnx_model_runs_as_its_twin_and_its_values_keep_names_shapes_and_codes(place: str, dtype: str) -> None:
    model = model_from_bytes(TRAPS["residual_adds"](lambda: Qdq(seed=1, dtype=dtype)).SerializeToString(), "small.onnx")
    given = feeds(model.proto)
    with engine(f"tflite:kernels=reference{place}").open(model) as session:
        recording = session.run("one", given)
        side = session.side
    assert_sound(model, recording, given)
    assert set(recording.values) == set(model.graph.stored)
    assert any("twin" in note for note in side.notes)
    result = equivcheck.diff(model, candidate=engine(f"tflite:kernels=builtin{place}"), inputs="random:1")
    assert result.verdict == "equivalent", str(result)
    assert result.coverage.judged == result.coverage.steps


def test_an_onnx_model_without_a_twin_is_refused_with_what_cannot_be_written() -> None:
    m = Qdq(seed=1)
    y = m.op("Einsum", [start(m)], equation="abcd->abdc")
    m.channels[y] = 4
    model = model_from_bytes(m.model(end(m, y, 0.1)).SerializeToString(), "odd.onnx")
    with pytest.raises(EngineRefused, match=r"no TFLite twin: .*Einsum"):
        engine("tflite").open(model)


def test_memory_that_is_no_output_is_not_read() -> None:
    source = net().flatbuffer
    inner = {"inner": source.operators[0].outputs[0]}
    own = TfliteEngine()
    with pytest.raises(ValueError, match="what stands in its memory is not its value"):
        own.load(source.content, {"kernels": "reference", "outputs": inner})


# -- other cuts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_second_opinion_computes_every_step_on_what_it_is_fed(place: str, kernels: str) -> None:
    """On random codes: what the isolated model gives is, within a code, what the virtual NPU gives step by step."""
    model = net()
    backend = engine(f"tflite:kernels={kernels}{place}")
    given = feeds_of(model.flatbuffer)
    with backend.open(model) as session:
        values = session.run("one", given).values
    opinion = SecondOpinion(backend, model, values)
    for name, array in opinion.run(values).items():
        np.testing.assert_array_equal(array, values[name], err_msg=name)
    codes = random_codes(model.graph, values)
    found = opinion.run(codes)
    assert set(found) == set(model.graph.stored) - set(model.graph.inputs)
    exact = SecondOpinion(registry.backend("vnpu:profile=exact,target=all"), model, codes).run(codes)
    for name, array in found.items():
        assert np.max(np.abs(array.astype(int) - exact[name])) <= 1, name


def test_a_head_cut_from_the_view_is_run_as_the_same_cut_of_the_file(place: str) -> None:
    model = net()
    backend = engine(f"tflite:kernels=reference{place}")
    given = feeds_of(model.flatbuffer)
    with backend.open(model) as session:
        values = session.run("one", given).values
    for name in model.graph.stored[1::3]:
        (array,) = backend.deploy(head(model, [name]))(given).values()
        codes, distance = codes_of(array, model.graph, name) if array.dtype.kind == "f" else (array, 0.0)
        np.testing.assert_array_equal(codes, values[name])
        assert distance < 1e-3


@pytest.mark.parametrize("name", ["residual_adds", "conv_relu_chain", "transpose_and_flatten", "swish", "two_readers"])
def test_a_second_opinion_on_a_twin_is_the_same_cut_of_the_twin(name: str) -> None:
    """Also where a Transpose vanished and two values lie in one tensor: such outputs are left out, never wrong."""
    model = model_from_bytes(TRAPS[name](lambda: Qdq(seed=1)).SerializeToString(), "small.onnx")
    backend = engine("tflite:kernels=reference")
    with backend.open(model) as session:
        values = session.run("one", feeds(model.proto)).values
    opinion, codes = SecondOpinion(backend, model, values), random_codes(model.graph, values)
    found = opinion.run(codes)
    exact = SecondOpinion(registry.backend("vnpu:profile=exact,target=all"), model, codes).run(codes)
    assert len(found) >= len(model.graph.steps) // 2
    for value, array in found.items():
        assert np.max(np.abs(array.astype(float) - exact[value])) <= 1, value


def test_another_model_with_the_same_names_is_not_taken_for_the_opened_one() -> None:
    one, other = (
        model_from_bytes(TRAPS["two_readers"](lambda seed=s: Qdq(seed=seed)).SerializeToString(), "m.onnx")
        for s in (1, 2)
    )
    backend, given = engine("tflite:kernels=reference"), feeds(one.proto)
    assert one.graph.stored == other.graph.stored
    with backend.open(one) as session:
        first = session.run("one", given).outputs
    second = backend.deploy(other.proto)(given)
    with engine("tflite:kernels=reference").open(other) as session:
        expected = session.run("one", given).outputs
    assert any(not np.array_equal(first[name], expected[name]) for name in expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(second[name], array)


# -- options and placement ---------------------------------------------------------------------------------------------


def test_options_of_a_delegate_are_passed_on_and_others_are_checked(tmp_path: Path) -> None:
    library = tmp_path / "libsome.so"
    library.touch()
    backend = engine(f"tflite:delegate={library},delegate.cache_dir=kept/here,delegate.level=2")
    options = backend.engine_options()
    assert options["delegate"] == str(library)
    assert options["delegate_options"] == {"cache_dir": "kept/here", "level": "2"}
    assert options["kernels"] == "builtin"
    assert str(parse(str(backend.spec))) == str(backend.spec)
    assert engine("tflite").engine_options()["kernels"] == "xnnpack"
    assert engine("tflite:delegate=libvx_delegate.so").delegate == "libvx_delegate.so"
    with pytest.raises(SpecError, match="without a delegate"):
        engine("tflite:delegate.level=2")
    with pytest.raises(UnknownOption, match="no option 'kernel'"):
        engine("tflite:kernel=builtin")
    with pytest.raises(UnknownOption, match="not one of reference, builtin, xnnpack"):
        engine("tflite:kernels=fast")
    with pytest.raises(UnknownOption, match=r"no delegate at .*libsme\.so; nearest: libsome\.so"):
        engine(f"tflite:delegate={tmp_path / 'libsme.so'}")


def test_what_xnnpack_took_is_said(place: str) -> None:
    """LiteRT's XNNPACK takes all but the RESHAPE of such a net; that of tflite-runtime 2.14 takes no int8, and that is said."""
    model = net()
    with engine(f"tflite{place}").open(model) as session:
        session.run("one", feeds_of(model.flatbuffer))
        side = session.side
    assert [p.node for p in side.placement] == [op.name for op in model.flatbuffer.operators]
    assert {p.where for p in side.placement} == {"cpu"}
    if place:
        assert {p.reason for p in side.placement} == {"TFLite's own kernel"}
        assert side.warnings == ["XNNPACK took none of the 8 operators: TFLite's own kernels ran all"]
    else:
        assert sum(p.reason == "XNNPACK" for p in side.placement) >= 6
        assert [p.step for p in side.placement] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert not side.warnings


def test_operators_of_a_twin_are_placed_in_the_steps_they_were_written_for() -> None:
    model = model_from_bytes(TRAPS["residual_adds"](lambda: Qdq(seed=1)).SerializeToString(), "small.onnx")
    with engine("tflite").open(model) as session:
        placed = [p.step for p in session.side.placement]
    assert None not in placed
    assert placed == sorted(placed, key=lambda step: step or 0)
    assert set(placed) == {step.id for step in model.graph.steps}


def test_a_backend_without_any_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TfliteBackend.unavailable() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'equivcheck[tflite]'" in (TfliteBackend.unavailable() or "")


# -- delegates ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def delegate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A delegate that takes int8 CONV_2D; see delegates/conv_delegate.c for its modes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("delegate") / "libconv_delegate.so"
    source = Path(__file__).parent / "delegates" / "conv_delegate.c"
    subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", made, "-lm"], check=True)
    return made


def judged(tmp_path: Path, candidate: str, *, second_opinion: bool = True) -> Result:
    path = tmp_path / "convs.tflite"
    path.write_bytes(convs())
    return equivcheck.diff(
        path,
        reference=engine("tflite:kernels=reference"),
        candidate=engine(candidate),
        inputs="random:3",
        second_opinion=second_opinion,
    )


def convs() -> bytes:
    """Three CONV_2D, two of them neighbours, and an ADD and a MEAN that no conv delegate takes."""
    g = TfliteGraph()
    a = g.conv(g.input((1, 9, 9, 3), name="image"), 8, scale=0.2, fusedActivationFunction=1)
    b = g.conv(a, 8, scale=0.5, stride=2)
    c = g.op("ADD", [b, b], (1, 5, 5, 8), 1.0, -5)
    d = g.conv(c, 4, scale=4.0)
    return g.content(g.op("MEAN", [d, g.integers(1, 2)], (1, 4), 3.0, 0, keepDims=False, name="means"))


def test_a_delegate_that_is_right_is_equivalent_and_its_placement_is_known(
    place: str, delegate: Path, tmp_path: Path
) -> None:
    result = judged(tmp_path, f"tflite:delegate={delegate}{place}")
    assert result.verdict == "equivalent", str(result)
    assert result.coverage.judged == result.coverage.steps == 5
    side = result.candidate
    assert side.observation.method == "head"
    assert side.observation.disturbed is False
    assert [(p.op_type, p.where, p.partition) for p in side.placement] == [
        ("CONV_2D", "npu", 1),
        ("CONV_2D", "npu", 1),
        ("ADD", "cpu", None),
        ("CONV_2D", "npu", 2),
        ("MEAN", "cpu", None),
    ]
    assert [c.direction for c in side.crossings] == ["npu->cpu", "cpu->npu", "npu->cpu"]


@pytest.mark.parametrize("operator", [0, 1, 3])
def test_a_delegate_with_one_faulty_conv_is_caught_at_that_conv(
    place: str, delegate: Path, tmp_path: Path, operator: int
) -> None:
    """Also inside a partition, where TFLite itself has no value between the two convs."""
    result = judged(tmp_path, f"tflite:delegate={delegate},delegate.mode=faulty,delegate.node={operator}{place}")
    assert result.verdict == "different"
    assert [culprit.node for culprit in result.culprits] == [f"CONV_2D:{operator}"]
    assert not result.reference_culprits


def test_a_delegate_that_looking_provokes_is_not_looked_at_that_way(delegate: Path, tmp_path: Path) -> None:
    """It floors while a partition has several outputs: truncated models do not provoke that, extra outputs do."""
    spec = f"tflite:delegate={delegate},delegate.mode=extra,delegate.node=0"
    assert judged(tmp_path, spec, second_opinion=False).verdict == "equivalent"
    provoked = judged(tmp_path, f"{spec},observe=outputs", second_opinion=False)
    assert provoked.verdict != "equivalent"
    assert provoked.candidate.observation.disturbed is True


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("nonsense", EngineRefused, "the conv delegate has no such mode"),
        ("refuse", EngineRefused, "the conv delegate does not like this model"),
        ("abort", EngineCrashed, "SIGABRT in load"),
    ],
)
def test_a_delegate_that_fails_is_told_in_its_own_words(
    place: str, delegate: Path, mode: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        engine(f"tflite:delegate={delegate},delegate.mode={mode}{place}").open(tflite_from_bytes(convs(), "c.tflite"))


def test_a_delegate_that_dies_of_truncated_models_costs_the_values_only(delegate: Path) -> None:
    """After two deaths in a row no more are tried: each would take as long."""
    model = tflite_from_bytes(convs(), "convs.tflite")
    given = feeds_of(model.flatbuffer)
    recording = recorded(f"tflite:delegate={delegate},delegate.mode=short,delegate.node=4", model, given)
    assert_sound(model, recording, given)
    reasons = [recording.failed[name] for name in model.graph.stored[1:]]
    assert ["SIGABRT" in reason for reason in reasons[:2]] == [True, True]
    assert all(reason == "not tried after the engine died or hung on 2 values in a row" for reason in reasons[2:])
    assert list(recording.outputs) == ["means"]


def test_an_abort_leaves_a_result_without_a_verdict(delegate: Path, tmp_path: Path) -> None:
    result = judged(tmp_path, f"tflite:delegate={delegate},delegate.mode=abort")
    assert result.verdict == "inconclusive"
    assert "SIGABRT" in result.reason


def test_what_is_no_delegate_is_told_from_what_is_not_there(place: str, tmp_path: Path) -> None:
    text = tmp_path / "libtext.so"
    text.write_text("not ELF")
    model = net()
    with pytest.raises(EngineRefused, match="cannot be loaded"):
        engine(f"tflite:delegate={text}{place}").open(model)
    with pytest.raises(EngineRefused, match="cannot be loaded"):
        engine(f"tflite:delegate=libnowhere_delegate.so{place}").open(model)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        empty = tmp_path / "libempty.so"
        subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", empty], check=True)
        with pytest.raises(EngineRefused, match="is no TFLite delegate"):
            engine(f"tflite:delegate={empty}{place}").open(model)


# -- real models -------------------------------------------------------------------------------------------------------

_PHOTOS = ("cat_chelsea.jpg", "grace_hopper.jpg")
REAL = {
    "coral_mobilenet_v1_0.25_128_quant.tflite": (_PHOTOS, "resize=128x128,layout=NHWC"),
    "coral_mobilenet_v2_1.0_224_quant.tflite": (_PHOTOS, "resize=224x224,layout=NHWC"),
    "coral_tf2_mobilenet_v2_1.0_224_ptq.tflite": (_PHOTOS, "resize=224x224,layout=NHWC"),
    "engine_defects/attention_s8_pc.tflite": ((), None),
    "engine_defects/small_s8_pc.tflite": (_PHOTOS, "resize=32x32,layout=NHWC"),
    "furiosa_MNISTnet_uint8_quant_without_softmax.tflite": (("mnist_nine.bmp",), "resize=28x28,color=GRAY,layout=NHWC"),
    "mcunet_vww.tflite": (_PHOTOS, "resize=80x80,scale=1/127.5,mean=1,layout=NHWC"),
    "tflm_mobilenet_v2_quantized_1x3x224x224.tflite": (_PHOTOS, "resize=224x224"),
    "tiny_kws_int8.tflite": ((), None),
    "tiny_resnet8_cifar10_int8.tflite": (_PHOTOS, "resize=32x32,layout=NHWC"),
    "tiny_vww_96_int8.tflite": (_PHOTOS, "resize=96x96,layout=NHWC"),
}


def compared(shared: Path, file: str, reference: str, candidate: str) -> Result:
    pictures, recipe = REAL[file]
    return equivcheck.diff(
        shared / "models" / file,
        inputs=[str(shared / "models" / "images" / picture) for picture in pictures] or None,
        preprocess=recipe,
        reference=engine(reference),
        candidate=engine(candidate) if candidate.startswith("tflite") else candidate,
    )


@pytest.mark.parametrize("candidate", ["tflite:kernels=xnnpack", "tflite:kernels=builtin"])
@pytest.mark.parametrize("file", REAL)
def test_litert_is_equivalent_to_its_reference_kernels_on_a_real_model(shared: Path, file: str, candidate: str) -> None:
    result = compared(shared, file, "tflite:kernels=reference", candidate)
    assert result.verdict == "equivalent", str(result)
    assert result.coverage.judged == result.coverage.steps
    assert not result.reference_culprits
    assert not result.coverage.absent
    assert not result.candidate.warnings
    assert result.reference.observation.disturbed is result.candidate.observation.disturbed is False


@pytest.mark.parametrize("file", REAL)
def test_the_tflite_profile_gives_every_code_of_the_reference_kernels(shared: Path, file: str) -> None:
    result = compared(shared, file, "tflite:kernels=reference", "vnpu:profile=tflite-reference,target=all")
    values = [tensor for tensor in result.tensors if tensor.accumulated is not None]
    assert len(values) == len(load_model(shared / "models" / file).graph.stored) - 1
    assert [tensor.name for tensor in values if tensor.accumulated and tensor.accumulated.mismatched] == []


@pytest.mark.parametrize("file", REAL)
def test_tflite_runtime_is_right_but_for_its_fully_connected_per_channel(shared: Path, file: str) -> None:
    result = compared(shared, file, "tflite:kernels=reference", f"tflite:kernels=reference{_runtime()}")
    if "attention" not in file:
        assert result.verdict == "equivalent", str(result)
        assert result.candidate.observation.disturbed is False
        return
    assert result.verdict == "different"
    assert {culprit.op_type for culprit in result.culprits} == {"FULLY_CONNECTED"}
    assert max(culprit.local.candidate.max_lsb for culprit in result.culprits if culprit.local.candidate) >= 128
    assert not result.reference_culprits
    assert any("other outputs when it is run again" in warning for warning in result.candidate.warnings)
