"""Qualcomm's HTP as a backend: where each step ran, what it refuses and in which words, and what of that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import equivcheck
from builder import Array, Qdq, feeds
from equivcheck.backends.placement import CPU, Loaded, crossings, tagged
from equivcheck.backends.qnn import QnnBackend
from equivcheck.backends.registry import backend
from equivcheck.backends.remote import RemoteEngine
from equivcheck.cli import main
from equivcheck.errors import BackendUnavailable, EngineRefused, SpecError, UnknownOption
from equivcheck.models.onnx.load import OnnxModel, load_model, model_from_bytes
from equivcheck.recording import Recording
from equivcheck.result import Side
from small_models import TRAPS, end, start, zero_of

MODELS = (
    "conv_relu_chain",
    "residual_adds",
    "concat_of_two_scales",
    "codes_are_inputs_and_outputs",
    "inner_dequantised_value_is_an_output_too",
    "transpose_and_flatten",
    "pools_and_softmax",
    "two_readers",
    "float_tail",
    "no_zero_points",
    "mixed_signs",
)


@pytest.fixture(scope="session")
def htp() -> None:
    """Skips where Qualcomm's plugin is not installed."""
    if find_spec("onnxruntime_qnn") is None:
        reason = "no onnxruntime-qnn in this interpreter: pip install 'equivcheck[qnn]'"
        print(reason)
        pytest.skip(reason)


def model_of(proto: onnx.ModelProto) -> OnnxModel:
    return model_from_bytes(proto.SerializeToString(), "small.onnx")


def trap(name: str, dtype: str = "int8") -> OnnxModel:
    return model_of(TRAPS[name](lambda: Qdq(dtype=dtype, seed=1)))


def ran(model: OnnxModel, spec: str = "qnn:arch=73") -> tuple[Recording, Side]:
    with backend(spec).open(model) as session:
        recording = session.run("one", feeds(model.proto))
        return recording, session.side


def places(side: Side) -> list[tuple[str, str, int | None]]:
    return [(place.op_type, place.where, place.partition) for place in side.placement]


def celu_in_the_middle() -> onnx.ModelProto:
    """Conv, Celu, Conv on 1x4x8x8: 1x8x8x8 codes before and after the Celu, which the HTP does not have."""
    m = Qdq(dtype="int8", seed=1)
    before = end(m, m.conv(start(m), 8, x_scale=0.025), 0.06)
    after = end(m, m.op("Celu", [before], alpha=1.0), 0.05)
    return m.model(end(m, m.conv(after, 4, x_scale=0.05), 0.4))


# -- options and refusals --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("htp")
@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("qnn:arch=99", UnknownOption, "arch=99 is not one of 68, 69, 73"),
        ("qnn:architecture=73", UnknownOption, "no option 'architecture'"),
        ("qnn:arch=73,soc=SM8550", SpecError, "soc= says the architecture already"),
        ("qnn@python=/no/such/python", BackendUnavailable, "no interpreter at /no/such/python"),
    ],
)
def test_a_mistake_in_the_spec_is_told_before_anything_runs(spec: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        backend(spec)


@pytest.mark.usefixtures("htp")
@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("qnn:soc=junk", UnknownOption, "Unrecognized soc_model 'junk'"),
        ("qnn:soc=9999", BackendUnavailable, "Invalid config values"),
        ("qnn:library=/no/such/libQnnHtp.so", BackendUnavailable, "cannot open shared object file"),
    ],
)
def test_what_the_engine_would_silently_run_on_the_cpu_is_an_error_in_its_words(
    nothing_left: Path, spec: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        backend(spec).open(trap("conv_relu_chain"))


@pytest.mark.usefixtures("htp")
def test_a_missing_library_is_trouble_not_a_verdict(fixtures_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = "qnn:library=/no/such/libQnnHtp.so"
    assert main(["diff", str(fixtures_dir / "digits_qdq_u8.onnx"), "-i", "random:0", "-c", spec]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "cannot open shared object file" in said.err


@pytest.mark.usefixtures("htp")
def test_no_node_on_the_npu_is_a_refusal_in_the_engines_words(nothing_left: Path) -> None:
    m = Qdq(dtype="int8", seed=1)
    model = model_of(m.model(end(m, m.op("Celu", [start(m)], alpha=1.0), 0.05)))
    with pytest.raises(EngineRefused, match=r"no node of the model runs on the NPU: .*not supported") as caught:
        backend("qnn:arch=73").open(model)
    assert "Q nodes that consume a graph input" in caught.value.last_words
    result = equivcheck.diff(model, candidate="qnn:arch=73", inputs=feeds(model.proto))
    assert result.verdict == "inconclusive"
    assert "no node of the model runs on the NPU" in result.reason


def test_without_the_package_the_way_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equivcheck.backends.qnn.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'equivcheck\[qnn\]'"):
        backend("qnn")


# -- observing -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("htp")
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_every_stored_value_is_seen_and_looking_changes_nothing(nothing_left: Path, name: str, dtype: str) -> None:
    model = trap(name, dtype)
    recording, side = ran(model)
    assert recording.disturbed is False
    assert set(recording.values) == set(model.graph.stored)
    assert list(recording.outputs) == list(model.graph.outputs)
    for stored, quantisation in model.graph.quantisation.items():
        if stored in recording.values:
            assert recording.values[stored].dtype == quantisation.dtype, stored
    assert [place.step for place in side.placement] == [step.id for step in model.graph.steps]
    assert any(place.where == "npu" for place in side.placement)
    assert all(place.reason for place in side.placement if place.where != "npu")


@pytest.mark.usefixtures("htp")
@pytest.mark.parametrize("arch", ["68", "73"])
def test_a_trained_network_is_equivalent_on_the_npu(fixtures_dir: Path, arch: str) -> None:
    result = equivcheck.diff(
        fixtures_dir / "digits_qdq_s8.onnx",
        inputs=sorted(map(str, (fixtures_dir / "digits").glob("*.png"))),
        preprocess=str(fixtures_dir / "digits.toml"),
        candidate=f"qnn:arch={arch}",
    )
    assert result.verdict == "equivalent", str(result)
    assert (result.coverage.judged, result.coverage.steps) == (9, 9)
    assert Counter(place.where for place in result.candidate.placement) == {"npu": 8, "cpu": 1}
    assert result.candidate.observation.disturbed is False
    assert result.candidate.warnings == []


@pytest.mark.usefixtures("htp")
def test_the_architectures_round_differently() -> None:
    model = trap("residual_adds")
    codes = {arch: ran(model, f"qnn:arch={arch}")[0].values for arch in ("68", "73")}
    assert any(not np.array_equal(codes["68"][name], codes["73"][name]) for name in model.graph.stored)


@pytest.mark.usefixtures("htp")
def test_a_qoperator_file_runs_in_qdq_form_with_its_moves_on_the_npu(fixtures_dir: Path) -> None:
    model = load_model(fixtures_dir / "digits_qop_u8.onnx")
    recording, side = ran(model)
    assert set(recording.values) == set(model.graph.stored)
    where = {op_type: where for op_type, where, _ in places(side)}
    assert where["Flatten"] == where["QGemm"] == "npu"


@pytest.mark.usefixtures("htp")
def test_what_is_compiled_is_kept_in_the_context_folder_and_gives_the_same(tmp_path: Path) -> None:
    model = trap("residual_adds")
    kept = tmp_path / "compiled"
    first, side = ran(model, f"qnn:arch=73,context={kept}")
    made = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert len(made) == 4  # untouched and observed: a model and what was said of it each
    again, other = ran(model, f"qnn:arch=73,context={kept}")
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == made
    assert other.placement == side.placement
    for name in model.graph.stored:
        np.testing.assert_array_equal(first.values[name], again.values[name])


# -- placement -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("htp")
def test_an_operator_the_npu_lacks_splits_it_in_two_with_the_bytes_that_cross() -> None:
    model = model_of(celu_in_the_middle())
    recording, side = ran(model)
    assert recording.disturbed is False
    assert places(side) == [
        ("QuantizeLinear", "cpu", None),
        ("Conv", "npu", 1),
        ("Celu", "cpu", None),
        ("Conv", "npu", 2),
    ]
    assert "not supported" in (side.placement[2].reason or "")
    celu = next(node for node in model.graph.nodes if node.op_type == "Celu")
    assert [(c.value, c.bytes, c.direction) for c in side.crossings] == [
        # the plugin takes the DQ in front of the Celu and the Q behind it: float32 goes over
        (celu.inputs[0], 4 * 8 * 8 * 8, "npu->cpu"),
        (celu.outputs[0], 4 * 8 * 8 * 8, "cpu->npu"),
    ]


@pytest.mark.usefixtures("htp")
def test_few_steps_on_the_npu_are_said_on_the_first_screen() -> None:
    m = Qdq(dtype="int8", seed=1)
    real = end(m, m.conv(start(m), 8, x_scale=0.025), 0.06)
    for _ in range(3):
        real = end(m, m.op("Celu", [real], alpha=1.0), 0.05)
    model = model_of(m.model(real))
    result = equivcheck.diff(model, candidate="qnn:arch=73", inputs=feeds(model.proto))
    assert any("only 1 of 5 steps ran on the NPU" in warning for warning in result.candidate.warnings)
    assert "only 1 of 5 steps ran on the NPU" in " ".join(str(result).split())


def test_crossings_count_what_really_goes_over() -> None:
    model = model_of(celu_in_the_middle())
    graph = model.graph
    sizes = dict.fromkeys(graph.stored, 512)
    celu = next(node for node in graph.nodes if node.op_type == "Celu")
    before, after = graph.producer[celu.inputs[0]], graph.consumers[celu.outputs[0]][0]

    def bytes_with(**others: frozenset[int]) -> list[tuple[int, str]]:
        index = {"celu": celu.index, "dq": before.index, "q": after.index}
        where = {node.index: frozenset({1}) for node in graph.nodes}
        where |= {index[name]: places for name, places in others.items()}
        return [(crossing.bytes, crossing.direction) for crossing in crossings(graph, where, sizes)]

    cpu, both = frozenset({CPU}), frozenset({CPU, 1})
    assert bytes_with() == []
    assert bytes_with(celu=cpu, dq=cpu, q=cpu) == [(512, "npu->cpu"), (512, "cpu->npu")]
    assert bytes_with(celu=cpu, q=cpu) == [(2048, "npu->cpu"), (512, "cpu->npu")]  # the DQ stayed: float32 goes over
    assert bytes_with(celu=cpu, dq=both) == [(512, "npu->cpu"), (2048, "cpu->npu")]  # the DQ was duplicated
    everywhere = dict.fromkeys((node.index for node in graph.nodes), cpu)
    assert crossings(graph, everywhere, sizes) == []


def test_names_that_the_engine_appended_to_still_say_which_node_it_was() -> None:
    answer = {
        "npu": [["eqvn3x", "eqvn4x_token_55"], ["eqvn5x/duplicated", "Transpose_token_9"]],
        "cpu": ["eqvn5x", "eqvn60x_MatMulAddFusion"],
        "refused": [("Celu", ["eqvn5x", "eqvn60x"], "Failed to add node.")],
        "trouble": ["a.cc:1: QNN failed for node `eqvn60x_2` of type `Celu` with error code 3110"],
    }
    loaded = Loaded.of(answer)
    assert loaded.places == {3: {1}, 4: {1}, 5: {CPU, 2}, 60: {CPU}}
    assert loaded.partitions == 2
    assert loaded.reasons[60] == "QNN failed for node `eqvn60x_2` of type `Celu` with error code 3110"


def test_tags_are_on_a_copy() -> None:
    proto = celu_in_the_middle()
    before = proto.SerializeToString()
    assert [node.name for node in tagged(proto).graph.node] == [f"eqvn{k}x" for k in range(len(proto.graph.node))]
    assert proto.SerializeToString() == before


# -- where the engine is wrong, or refuses ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("htp")
def test_a_model_refused_as_a_whole_is_judged_in_pieces_and_never_passes(nothing_left: Path) -> None:
    """A hard swish that divides by a float constant: the HTP takes the Div alone, and none behind it."""
    m = Qdq(dtype="int8", seed=1)
    x = end(m, m.conv(start(m), 8, x_scale=0.025), 0.06)
    divided = end(m, m.op("Div", [x, m.constant(np.float32(6))]), 0.01)
    model = model_of(m.model(end(m, m.conv(divided, 4, x_scale=0.01), 0.06)))
    result = equivcheck.diff(model, candidate="qnn:arch=73", inputs=feeds(model.proto))
    assert result.verdict == "inconclusive", str(result)
    failed = {row.name: row.reason for row in result.coverage.failed}
    assert list(failed) == [model.graph.steps[-1].outputs[0]]
    assert "Failed to finalize QNN graph" in failed[model.graph.steps[-1].outputs[0]]
    assert result.coverage.judged == 3
    assert Counter(place.where for place in result.candidate.placement) == {"npu": 3, "cpu": 1}
    assert any("the model as a whole is refused by QNN" in warning for warning in result.candidate.warnings)


@pytest.mark.usefixtures("htp")
def test_where_only_looking_is_refused_it_looks_in_pieces_at_the_model_as_deployed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = trap("residual_adds")
    whole, _ = ran(model)
    load = QnnBackend.load

    def grudging(self: QnnBackend, engine: RemoteEngine, proto: onnx.ModelProto) -> Loaded:
        if len(proto.graph.output) > 3:
            raise EngineRefused("too many outputs")
        return load(self, engine, proto)

    monkeypatch.setattr(QnnBackend, "load", grudging)
    pieces, side = ran(model)
    assert side.observation.note is not None
    assert "pieces" in side.observation.note
    assert pieces.disturbed is False
    assert pieces.failed == {}
    assert {place.partition for place in side.placement} <= {None, 1}  # as deployed, not of the pieces
    for name in model.graph.stored:
        np.testing.assert_array_equal(pieces.values[name], whole.values[name])


@pytest.mark.usefixtures("htp")
def test_a_step_that_is_refused_alone_is_named_and_the_rest_judged(fixtures_dir: Path) -> None:
    model = load_model(fixtures_dir / "detector_qop_u8.onnx")
    recording, side = ran(model)
    resize = next(step for step in model.graph.steps if step.op_type == "Resize")
    assert "Node 'Resize_raised' OpType:Resize" in recording.failed[resize.outputs[0]]
    outputs = {model.graph.store(name) for name in model.graph.outputs}
    assert set(recording.failed) == {resize.outputs[0], *outputs}
    assert set(recording.values) == set(model.graph.stored) - set(recording.failed)
    assert next(place for place in side.placement if place.step == resize.id).where == "cpu"


@pytest.mark.usefixtures("htp")
def test_weights_that_do_not_fit_s8_are_a_culprit_and_the_screen_says_why() -> None:
    """The HTP rounds a channel anew whose u8 weights leave -128..127 around their zero point: no legal evaluation."""
    m = Qdq(dtype="uint8", seed=1)
    x = start(m, (1, 24, 16, 16))
    codes = m.rng.integers(60, 150, (32, 24, 1, 1)).astype(np.uint8)
    codes[7, 3] = 255
    weight = m.op(
        "DequantizeLinear",
        [m.constant(codes, "w"), m.constant(np.float32(0.01), "w_scale"), m.constant(np.uint8(104), "w_zero")],
    )
    m.channels[made := m.op("Conv", [x, weight])] = 32
    model = model_of(m.model(m.dq(m.q(made, 0.03, zero_of(m)))))
    result = equivcheck.diff(model, candidate="qnn:arch=73", inputs=feeds(model.proto))
    assert [culprit.op_type for culprit in result.culprits] == ["Conv"], str(result)
    error = result.culprits[0].local.candidate
    assert error is not None
    assert error.worst_channel is not None
    assert error.worst_channel.index == 7
    assert any("u8 weights of #2 Conv leave -128..127" in warning for warning in result.candidate.warnings)


@pytest.mark.usefixtures("htp")
def test_second_opinions_run_on_the_npu_too() -> None:
    proto = TRAPS["conv_relu_chain"](lambda: Qdq(dtype="int8", seed=1))
    given = feeds(proto)
    run: Callable[[dict[str, Array]], dict[str, Array]] = backend("qnn:arch=73").deploy(proto)
    recording, _ = ran(model_of(proto))
    for name, array in run(given).items():
        np.testing.assert_array_equal(array, recording.outputs[name])


def test_the_limit_it_declares_has_a_reason_and_stays_below_truncation() -> None:
    declared = QnnBackend.legal_excess(SimpleNamespace())  # type: ignore[arg-type]  # it reads nothing of itself
    limit, reason = declared["Conv"]
    assert limit < 0.5  # truncation is 1/2 beyond correct rounding
    assert "offset" in reason
