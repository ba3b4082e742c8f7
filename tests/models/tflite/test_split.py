"""`equivcheck split` of a .tflite file: the parts are .tflite files, and head, then tail, is the whole on LiteRT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from equivcheck import parts
from equivcheck.backends.remote import RemoteEngine
from equivcheck.backends.tflite import TfliteBackend
from equivcheck.cli import main
from equivcheck.errors import EngineCrashed, ModelError, SelectorError
from equivcheck.models.onnx.load import load_model
from equivcheck.models.select import Selected
from equivcheck.models.tflite import split as flatbuffer_split
from equivcheck.models.tflite.cut import Part
from equivcheck.models.tflite.load import TfliteModel, tflite_from_bytes
from equivcheck.parts import split
from tflite_graphs import TfliteGraph, feeds_of, small_net

PROVED, NOT_THE_MODEL, TROUBLE, INTERRUPTED = 0, 1, 2, 130
REAL_MODELS = (
    "coral_mobilenet_v1_0.25_128_quant",
    "coral_mobilenet_v2_1.0_224_quant",
    "coral_tf2_mobilenet_v2_1.0_224_ptq",
    "engine_defects/attention_s8_pc",
    "engine_defects/small_s8_pc",
    "furiosa_MNISTnet_uint8_quant_without_softmax",
    "mcunet_vww",
    "tflm_mobilenet_v2_quantized_1x3x224x224",
    "tiny_kws_int8",
    "tiny_resnet8_cifar10_int8",
    "tiny_vww_96_int8",
)
PLACES = 4  # operators of each real model that it is cut at


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model.tflite").write_bytes(small_net())
    return tmp_path / "model.tflite"


def model_of(content: bytes) -> TfliteModel:
    return tflite_from_bytes(content, "small.tflite")


def command(*arguments: object) -> int:
    return main(["split", *map(str, arguments)])


def two_outputs() -> bytes:
    """Two branches of one conv, each of them an output, and a name with slashes between them."""
    g = TfliteGraph()
    a = g.conv(g.input((1, 6, 6, 3), name="image"), 4)
    b = g.op("RELU", [a], (1, 6, 6, 4), 0.1, -5, name="model/branch;StatefulPartitionedCall:0/Relu")
    c = g.op("ADD", [b, a], (1, 6, 6, 4), 0.2, 1, name="first", fusedActivationFunction=0)
    return g.content(c, g.op("MUL", [a, a], (1, 6, 6, 4), 0.4, -10, name="second"))


def run_file(file: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By an interpreter of LiteRT that knows nothing of equivcheck, on those of `feeds` that the file has as inputs."""
    interpreter = Interpreter(str(file), experimental_op_resolver_type=OpResolverType.BUILTIN_REF, num_threads=1)
    interpreter.allocate_tensors()
    for port in interpreter.get_input_details():
        interpreter.set_tensor(port["index"], feeds[port["name"]])
    interpreter.invoke()
    return {port["name"]: interpreter.get_tensor(port["index"]) for port in interpreter.get_output_details()}


# -- real models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_real_model_is_proved_before_and_after_operators_all_over_it(shared: Path, name: str) -> None:
    model = load_model(shared / "models" / f"{name}.tflite")
    nodes = model.graph.originals
    selectors = [f"node:{nodes[k].name}" for k in np.linspace(0, len(nodes) - 1, PLACES).astype(int)]
    for place in ("before", "after"):
        found = split(model, selectors, cut=place)
        assert [part.note for part in found if not part.proved] == []
        assert len(found) == PLACES


def test_the_list_of_real_models_is_every_tflite_file_that_loads(shared: Path) -> None:
    folder = shared / "models"
    files = {str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.tflite")}
    assert files - set(REAL_MODELS) == {"pymicro_okay_nabu"}
    with pytest.raises(ModelError, match="keeps state"):
        load_model(folder / "pymicro_okay_nabu.tflite")


def test_the_written_parts_of_a_real_model_run_one_after_the_other(shared: Path, tmp_path: Path) -> None:
    file = shared / "models" / "tiny_resnet8_cifar10_int8.tflite"
    assert command(file, "--at", "ADD", "-o", tmp_path / "parts") == PROVED
    feeds = feeds_of(load_model(file).flatbuffer)
    whole = run_file(file, feeds)
    points = json.loads((tmp_path / "parts" / "split.json").read_text())["split_points"]
    assert len(points) == 3
    for point in points:
        crossing = run_file(tmp_path / "parts" / point["head"]["path"], feeds)
        assert set(crossing) == set(point["head"]["outputs"])
        got = run_file(tmp_path / "parts" / point["tail"]["path"], {**feeds, **crossing})
        assert set(got) == set(whole)
        for name, array in whole.items():
            np.testing.assert_array_equal(got[name], array, err_msg=point["node"])


# -- what is cut --------------------------------------------------------------------------------------------------------


def test_every_operator_and_tensor_of_a_small_net(path: Path) -> None:
    model = load_model(path)
    operators = [f"node:{node.name}" for node in model.graph.originals]
    tensors = [f"value:{name}" for node in model.graph.originals for name in node.outputs]
    for place in ("before", "after"):
        found = split(model, [*operators, *tensors], cut=place)
        assert len(found) == len(operators) + len(tensors)
        assert [part.note for part in found if not part.proved] == []


def test_the_boundary_is_every_tensor_that_crosses_and_no_weight(path: Path) -> None:
    """The ADD reads what the depthwise conv reads, and the MUL behind it reads that again."""
    model = load_model(path)
    conv, depthwise, add = (model.graph.originals[k].outputs[0] for k in range(3))
    (part,) = split(model, "ADD", prove=False)
    assert part.parts.cut.point.before == (depthwise, conv)
    assert set(part.boundary) == {conv, depthwise}
    (part,) = split(model, "ADD", cut="after", prove=False)
    assert set(part.boundary) == {conv, add}
    assert set(part.tail.inputs) == set(part.boundary)
    assert (part.head.operators, part.tail.operators) == ((0, 1, 2), (3, 4, 5, 6, 7))


def test_onnx_names_select_operators_too(path: Path) -> None:
    model = load_model(path)
    (one,), (other,) = (split(model, at, prove=False) for at in ("MaxPool", "MAX_POOL_2D"))
    assert one.boundary == other.boundary


def test_the_last_operator_leaves_no_tail(path: Path) -> None:
    (part,) = split(load_model(path), "SOFTMAX", cut="after")
    assert (part.proved, part.tail) == (True, None)
    assert "the head computes everything" in part.note


def test_a_head_of_nothing_hands_the_input_on(path: Path) -> None:
    (part,) = split(load_model(path), "value:image")
    assert part.proved
    assert (part.head.operators, list(part.head.outputs)) == ((), ["image"])
    assert "the head computes nothing" in part.note


def test_of_two_outputs_each_comes_from_the_part_that_makes_it() -> None:
    model = model_of(two_outputs())
    (part,) = split(model, "MUL")
    assert part.proved
    assert list(part.tail.outputs) == ["first", "second"]
    (part,) = split(model, "ADD", cut="after")
    assert part.proved
    assert "first" in part.head.outputs
    assert list(part.tail.outputs) == ["second"]


def test_what_no_input_reaches_is_in_both_parts_and_crosses_nothing() -> None:
    """A DEQUANTIZE of weights, read on both sides of the cut."""
    g = TfliteGraph()
    x = g.input((1, 4), dtype="float32", name="x")
    w = g.op("DEQUANTIZE", [g.constant(np.arange(4, dtype=np.int8).reshape(1, 4), 0.5)], (1, 4), dtype="float32")
    first = g.op("ADD", [x, w], (1, 4), dtype="float32", name="sum", fusedActivationFunction=0)
    model = model_of(g.content(g.op("MUL", [first, w], (1, 4), dtype="float32", name="y")))
    (part,) = split(model, "MUL")
    assert part.proved
    assert part.boundary == ("sum",)
    assert (part.head.operators, part.tail.operators) == ((0, 1), (0, 2))


def test_a_constant_cannot_be_cut_at() -> None:
    model = model_of(small_net())
    weight = next(t.name for t in model.flatbuffer.tensors if t.constant is not None)
    with pytest.raises(SelectorError, match=f"'{weight}' is a constant: nothing can be cut there"):
        flatbuffer_split.find_cut(model.flatbuffer, Selected(weight, None, None, (), (weight,)), "before")


# -- the proof ----------------------------------------------------------------------------------------------------------


def test_a_part_that_gives_other_numbers_is_1_and_the_parts_are_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tail whose weights are not the model's, as a fault of the cutter would make."""
    build = flatbuffer_split.build_parts

    def faulty(*arguments: object) -> flatbuffer_split.TfliteParts:
        made = build(*arguments)  # type: ignore[arg-type]  # checked as it is called
        (weight,) = (t for t in load_model(path).flatbuffer.tensors if t.shape == (6, 8))
        changed = made.tail.content.replace(weight.constant.tobytes(), (-weight.constant).tobytes())
        assert changed != made.tail.content
        tail = Part(changed, made.tail.inputs, made.tail.outputs, made.tail.operators)
        return flatbuffer_split.TfliteParts(made.cut, made.head, tail)

    monkeypatch.setattr(flatbuffer_split, "build_parts", faulty)
    assert command(path, "--at", "MEAN", "-o", tmp_path / "parts") == NOT_THE_MODEL
    said = capsys.readouterr().out
    assert said.startswith("NOT THE MODEL   before MEAN 'MEAN:5'")
    assert "output 'probabilities' differs" in said
    assert json.loads((tmp_path / "parts" / "split.json").read_text())["split_points"][0]["proved"] is False


def test_a_part_that_does_not_run_is_found_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = flatbuffer_split.build_parts

    def faulty(*arguments: object) -> flatbuffer_split.TfliteParts:
        made = build(*arguments)  # type: ignore[arg-type]  # checked as it is called
        broken = Part(made.head.content[:200], made.head.inputs, made.head.outputs, made.head.operators)
        return flatbuffer_split.TfliteParts(made.cut, broken, made.tail)

    monkeypatch.setattr(flatbuffer_split, "build_parts", faulty)
    (part,) = split(load_model(path), "MEAN")
    assert part.proved is False
    assert "a part does not run: TFLite refused the model" in part.note


def test_a_model_on_which_tflite_dies_is_neither_proved_nor_refuted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*arguments: object) -> None:
        raise EngineCrashed("killed by SIGSEGV in run (twice)", last_words="")

    monkeypatch.setattr(RemoteEngine, "run", die)
    (part,) = split(load_model(path), "MEAN")
    assert part.proved is None
    assert "TFLite would not run the model itself" in part.note
    assert "SIGSEGV" in part.note


def test_the_process_of_the_proof_is_ended_when_a_cut_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    close = RemoteEngine.close
    monkeypatch.setattr(RemoteEngine, "close", lambda self: ended.append(close(self)))

    def refuse(*arguments: object) -> None:
        raise SelectorError("no")

    monkeypatch.setattr(flatbuffer_split, "build_parts", refuse)
    with pytest.raises(SelectorError):
        split(load_model(path), "MEAN")
    assert len(ended) == 1


def test_the_proof_is_on_the_given_input(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = RemoteEngine.run

    def spy(self: RemoteEngine, feeds: dict[str, np.ndarray], outputs: object = None) -> dict[str, np.ndarray]:
        seen.append(feeds)
        return run(self, feeds)

    monkeypatch.setattr(RemoteEngine, "run", spy)
    given = np.full((1, 9, 9, 3), 7, np.int8)
    split(load_model(path), "MEAN", inputs=given)
    assert len(seen) == 3, "the model, the head, the tail"
    np.testing.assert_array_equal(seen[0]["image"], given)
    assert list(seen[2]) == [load_model(path).graph.originals[4].outputs[0]], "the tail has what the head gave"


def test_without_tflite_the_parts_are_written_unproved_and_that_is_said(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "none of ai-edge-litert, tflite-runtime and tensorflow is installed: pip install 'equivcheck[tflite]'"
    monkeypatch.setattr(TfliteBackend, "unavailable", lambda: reason)
    assert command(path, "--at", "MEAN", "-o", tmp_path / "parts") == PROVED
    said = capsys.readouterr().out
    assert said.startswith("not proved   before MEAN 'MEAN:5'\n")
    assert f"  note      not proved: {reason}\n" in said
    (point,) = json.loads((tmp_path / "parts" / "split.json").read_text())["split_points"]
    assert point["proved"] is None
    assert point["note"] == f"not proved: {reason}"
    assert load_model(tmp_path / "parts" / "001_MEAN" / "tail.tflite").format == "tflite"


def test_a_file_above_the_limit_is_proved_only_when_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LARGEST_IN_MEMORY", 1000)
    model = load_model(path)
    assert split(model, "MEAN")[0].proved is None
    assert split(model, "MEAN", prove=True)[0].proved


# -- the command --------------------------------------------------------------------------------------------------------


def test_the_screen_and_split_json_say_what_was_cut(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(path, "--at", "MEAN", "-o", tmp_path / "parts") == PROVED
    crossing = load_model(path).graph.originals[4].outputs[0]
    assert capsys.readouterr().out.splitlines() == [
        "PROVED   before MEAN 'MEAN:5'   head + tail = model, bit for bit",
        f"  boundary  {crossing}",
        f"  head      {tmp_path}/parts/001_MEAN/head.tflite   5 nodes   image -> {crossing}",
        f"  tail      {tmp_path}/parts/001_MEAN/tail.tflite   3 nodes   {crossing} -> probabilities",
    ]
    written = json.loads((tmp_path / "parts" / "split.json").read_text())
    assert written["schema"] == "equivcheck-split/1"
    (point,) = written["split_points"]
    assert (point["node"], point["op_type"], point["cut"], point["proved"]) == ("MEAN:5", "MEAN", "before", True)
    assert (point["before"], point["boundary"], point["exchanged"]) == ([crossing], [crossing], {})
    names = {str(p.relative_to(tmp_path / "parts")) for p in (tmp_path / "parts").rglob("*") if p.is_file()}
    assert names == {"split.json", "001_MEAN/head.tflite", "001_MEAN/tail.tflite"}


def test_a_name_with_slashes_and_semicolons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model/branch;StatefulPartitionedCall:0/Relu"
    (tmp_path / "two.tflite").write_bytes(two_outputs())
    for selector in (name, f"value:{name}"):
        assert command(tmp_path / "two.tflite", "--at", selector, "-o", tmp_path / "parts", "--json", "-") == PROVED
        (point,) = json.loads(capsys.readouterr().out)["split_points"]
        assert name in point["boundary"]
        assert point["head"]["path"] == "001_value/head.tflite"
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["001_value", "split.json"]


def test_a_tail_can_be_split_again(path: Path, tmp_path: Path) -> None:
    assert command(path, "--at", "MEAN", "-o", tmp_path / "once") == PROVED
    tail = tmp_path / "once" / "001_MEAN" / "tail.tflite"
    assert command(tail, "--at", "FULLY_CONNECTED", "--cut", "after", "-o", tmp_path / "twice") == PROVED
    (point,) = json.loads((tmp_path / "twice" / "split.json").read_text())["split_points"]
    assert (point["head"]["nodes"], point["tail"]["nodes"], point["boundary"]) == (2, 1, ["logits"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--at", "MEEN"], "nothing in this model is called 'MEEN'; nearest: MEAN"),
        (["--at", "MEAN#2"], "no 'MEAN#2': this model has 1 MEAN"),
        (["--at", "MEAN", "-i", "missing.npy"], "missing.npy"),
    ],
)
def test_mistakes_are_2_and_nothing_is_left_behind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert command("model.tflite", "-o", "parts", *arguments) == TROUBLE
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert words in said.err
    assert [p.name for p in tmp_path.iterdir()] == ["model.tflite"]


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), INTERRUPTED), (OSError(28, "No space left"), TROUBLE)]
)
def test_what_stops_while_writing_leaves_nothing_behind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    write_bytes = Path.write_bytes

    def breaking(self: Path, content: bytes) -> int:
        if self.name == "tail.tflite":
            raise error
        return write_bytes(self, content)

    monkeypatch.setattr(Path, "write_bytes", breaking)
    assert command(path, "--at", "MEAN", "-o", tmp_path / "parts") == code
    assert [p.name for p in tmp_path.iterdir()] == ["model.tflite"]


def test_a_file_that_breaks_off_is_2(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(small_net()[:300])
    assert command(path, "--at", "MEAN", "-o", tmp_path / "parts") == TROUBLE
    assert "model.tflite" in capsys.readouterr().err
    assert not (tmp_path / "parts").exists()
