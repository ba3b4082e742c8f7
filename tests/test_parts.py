"""`equivcheck.split` and writing parts: proof, notes, and a folder that is written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import cut_models
import equivcheck
from builder import Qdq
from cut_models import KINDS
from equivcheck import parts
from equivcheck.errors import InputError, ModelError, OutputError, SelectorError
from equivcheck.models.onnx.load import OnnxModel, load_model, model_from_bytes
from equivcheck.parts import check_target, split, write
from small_models import TRAPS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(KINDS["skips_that_cross_every_cut"](), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def model_of(name: str) -> OnnxModel:
    return model_from_bytes(KINDS[name]().SerializeToString(), "small.onnx")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- the proof ----------------------------------------------------------------------------------------------------------


def test_split_takes_a_path_one_selector_or_several(path: Path) -> None:
    (one,) = equivcheck.split(path, "second")
    assert one.proved
    assert [part.boundary for part in equivcheck.split(str(path), ["first", "third"], cut="after")] == [
        ("a",),
        ("a", "c"),
    ]


def test_no_selector_is_an_error(path: Path) -> None:
    with pytest.raises(SelectorError, match="nothing is selected"):
        split(path, [])


def test_without_proof_nothing_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.OrtEngine, "run", None)
    (one,) = split(path, "second", prove=False)
    assert one.proved is None


def test_the_proof_is_on_the_given_input(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    seen = []
    run = parts.OrtEngine.run

    def spy(self: object, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append(feeds)
        return run(self, feeds)  # type: ignore[arg-type]  # checked as it is called

    monkeypatch.setattr(parts.OrtEngine, "run", spy)
    given = np.full((2, 3), 7, np.float32)
    split(path, "second", inputs=given)
    np.testing.assert_array_equal(seen[0]["x"], given)
    assert len(seen) == 3, "the model, the head, the tail"


def test_a_given_input_that_does_not_fit_is_an_error(path: Path) -> None:
    with pytest.raises(InputError):
        split(path, "second", inputs=np.zeros((5, 5), np.float32))


def test_the_model_runs_once_for_all_split_points(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    load = parts.OrtEngine.load

    def spy(self: object, *args: object) -> object:
        loads.append(args)
        return load(self, *args)  # type: ignore[arg-type]  # checked as it is called

    monkeypatch.setattr(parts.OrtEngine, "load", spy)
    found = split(model_of("diamonds"), "Add", cut="after")
    assert len(found) == 4
    assert len(loads) == 1 + 3 * 2 + 1, "the last cut has no tail"


def test_open_dimensions_without_an_input_are_not_proved_and_say_why() -> None:
    (one,) = split(model_of("symbolic_dimensions"), "relu")
    assert one.proved is None
    assert "needs a shape" in one.note
    (one,) = split(model_of("symbolic_dimensions"), "relu", inputs=cut_models.FEEDS["symbolic_dimensions"])
    assert one.proved


def test_a_part_that_gives_other_numbers_is_found_out(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A tail with another operator in it, as a fault of the cutter would make."""
    build = parts.build_parts

    def faulty(*args: object) -> parts.Parts:
        made = build(*args)  # type: ignore[arg-type]  # checked as it is called
        assert made.tail is not None
        made.tail.graph.node[-1].op_type = "Add"
        return made

    monkeypatch.setattr(parts, "build_parts", faulty)
    (one,) = split(path, "third")
    assert one.proved is False
    assert "output 'y' differs" in one.note


def test_a_part_that_does_not_run_is_found_out(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    build = parts.build_parts

    def faulty(*args: object) -> parts.Parts:
        made = build(*args)  # type: ignore[arg-type]  # checked as it is called
        made.head.graph.node[0].op_type = "NoSuchOperator"
        return made

    monkeypatch.setattr(parts, "build_parts", faulty)
    (one,) = split(path, "third")
    assert one.proved is False
    assert "a part does not run" in one.note


def test_an_output_that_one_bit_tells_apart_differs(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    run = parts._run
    calls = []

    def flipped(*args: object) -> dict[str, np.ndarray]:
        got = run(*args)  # type: ignore[arg-type]  # checked as it is called
        calls.append(got)
        if len(calls) == 3:
            got["y"].view(np.uint32)[0, 0] ^= 1
        return got

    monkeypatch.setattr(parts, "_run", flipped)
    assert split(path, "third")[0].proved is False


def test_nan_is_the_same_as_nan_and_minus_zero_is_not_zero() -> None:
    nan = np.array([np.nan, 0.0], np.float32)
    assert parts._same_bits(nan, nan.copy())
    assert not parts._same_bits(np.array([0.0]), np.array([-0.0]))
    assert not parts._same_bits(np.array([1.0]), np.array([1.0], np.float32))
    assert not parts._same_bits(np.zeros((1, 2)), np.zeros((2, 1)))
    assert parts._same_bits([nan, nan], [nan, nan.copy()])
    assert not parts._same_bits([np.arange(5000.0)], [np.where(np.arange(5000) == 2500, -1.0, np.arange(5000.0))])
    assert not parts._same_bits([nan], [nan, nan])
    assert parts._same_bits({1: nan}, {1: nan.copy()})


def test_a_model_that_does_not_run_itself_is_not_proved_nor_refuted() -> None:
    proto = cut_models.text(
        "g (float[3] x) => (float[3] y) { a = Neg(x) b = own.Mystery(a) y = Neg(b) }", domains=', "own": 1'
    )
    (one,) = split(model_from_bytes(proto.SerializeToString(), "m.onnx"), "value:a")
    assert one.proved is None
    assert "would not run the model itself" in one.note


def test_types_come_from_the_engine_in_all_their_kinds() -> None:
    kinds = {
        "tensor(float)": "tensor_type", "tensor(bfloat16)": "tensor_type", "seq(tensor(int64))": "sequence_type",
        "optional(seq(tensor(string)))": "optional_type", "map(int64,tensor(float))": "map_type",
        "seq(map(string,tensor(double)))": "sequence_type", "sparse_tensor(float)": "sparse_tensor_type",
    }  # fmt: skip
    for kind, field in kinds.items():
        assert parts._type(kind, [2, "N"]).WhichOneof("value") == field
    assert parts._type("opaque(a,b)", []).WhichOneof("value") is None


def test_quantised_models_are_cut_at_every_stored_value() -> None:
    for name in ("residual_adds", "concat_of_two_scales", "if_body_with_codes", "split_of_codes"):
        model = model_from_bytes(TRAPS[name](lambda: Qdq(dtype="int8", seed=1)).SerializeToString(), "m.onnx")
        for value in model.graph.stored:
            for part in split(model, f"value:{value}"):
                assert part.proved, part.note


# -- writing ------------------------------------------------------------------------------------------------------------


def test_the_folder_holds_the_parts_and_split_json_and_says_what_is_there(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    info = write(model, split(model, ["second", "value:c"], cut="after"), tmp_path / "new" / "parts")
    names = {"split.json", *(f"{d}/{p}.onnx" for d in ("001_Sigmoid", "002_value") for p in ("head", "tail"))}
    assert set(tree(tmp_path / "new" / "parts")) == names
    written = json.loads((tmp_path / "new" / "parts" / "split.json").read_text())
    assert written == json.loads(info.to_json())
    assert written["schema"] == "equivcheck-split/1"
    first, second = written["split_points"]
    assert (first["node"], first["op_type"], first["cut"]) == ("second", "Sigmoid", "after")
    assert (first["before"], first["after"], first["boundary"]) == (["a"], ["b"], ["a", "b"])
    assert first["head"] == {"path": "001_Sigmoid/head.onnx", "inputs": ["x"], "outputs": ["b", "a"], "nodes": 2}
    assert first["tail"]["inputs"] == ["x", "a", "b"]
    assert (second["node"], second["op_type"], second["proved"]) == (None, None, True)
    for name in names - {"split.json"}:
        onnx.checker.check_model(str(tmp_path / "new" / "parts" / name), full_check=True)


def test_a_head_that_is_everything_has_no_tail_file(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    info = write(model, split(model, "fifth", cut="after"), tmp_path / "parts")
    assert info.split_points[0].tail is None
    assert set(tree(tmp_path / "parts")) == {"split.json", "001_Sub/head.onnx"}


def test_an_earlier_split_is_replaced_whole(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    write(model, split(model, ["first", "second", "third"], prove=False), tmp_path / "parts")
    inode = (tmp_path / "parts").stat().st_ino
    write(model, split(model, "fourth", prove=False), tmp_path / "parts")
    assert set(tree(tmp_path / "parts")) == {"split.json", "001_Mul/head.onnx", "001_Mul/tail.onnx"}
    assert (tmp_path / "parts").stat().st_ino == inode, "it may be a mount, or where the shell is"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "parts"]


@pytest.mark.parametrize(
    "names", [["notes.txt"], ["split.json", "001_Add/head.onnx", "recordings/a.npz"], ["001_Add/x"]]
)
def test_a_folder_with_anything_else_is_left_alone(path: Path, tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / "parts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "parts" / name).write_text("mine")
    before = tree(tmp_path)
    model = load_model(path)
    with pytest.raises(OutputError, match="exists and holds"):
        write(model, split(model, "second", prove=False), tmp_path / "parts")
    assert tree(tmp_path) == before


def test_a_part_may_not_be_split_into_the_folder_it_is_in(path: Path, tmp_path: Path) -> None:
    """That would delete it."""
    model = load_model(path)
    write(model, split(model, "third", prove=False), tmp_path / "parts")
    tail = load_model(tmp_path / "parts" / "001_Add" / "tail.onnx")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match="holds the model itself"):
        write(tail, split(tail, "fourth", prove=False), tmp_path / "parts")
    assert tree(tmp_path) == before


def test_a_file_is_no_folder(path: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").write_text("a file")
    model = load_model(path)
    with pytest.raises(OutputError, match="is a file"):
        write(model, split(model, "second", prove=False), tmp_path / "parts")
    with pytest.raises(OutputError, match="cannot write"):
        write(model, split(model, "second", prove=False), tmp_path / "parts" / "below")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), RuntimeError("a bug")])
@pytest.mark.parametrize("earlier", [False, True])
def test_what_stops_midway_leaves_everything_as_it_was(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, earlier: bool
) -> None:
    model = load_model(path)
    found = split(model, ["second", "third"], prove=False)
    if earlier:
        write(model, found[:1], tmp_path / "parts")
    before = tree(tmp_path)
    write_bytes, count = Path.write_bytes, iter(range(99))

    def breaking(self: Path, content: bytes) -> int:
        if next(count) == 2:
            raise error
        return write_bytes(self, content)

    monkeypatch.setattr(Path, "write_bytes", breaking)
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        write(model, found, tmp_path / "parts")
    assert tree(tmp_path) == before
    assert (tmp_path / "parts").exists() == earlier
    assert not list(tmp_path.glob(".equivcheck*"))


def test_an_exchange_that_stops_midway_is_taken_back(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(path)
    found = split(model, ["second", "third"], prove=False)
    write(model, found, tmp_path / "parts")
    before = tree(tmp_path)
    replace = Path.replace

    def breaking(self: Path, target: Path) -> Path:
        if self.name == "split.json" and self.parent.name == "new":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", breaking)
    with pytest.raises(KeyboardInterrupt):
        write(model, found[1:], tmp_path / "parts")
    monkeypatch.undo()
    assert tree(tmp_path) == before


def test_the_working_directory_may_be_the_folder(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = load_model("../model.onnx")
    for selector in ("second", "third"):
        write(model, split(model, selector, prove=False), ".")
        assert Path("split.json").exists()


def test_a_link_to_a_folder_is_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "parts").symlink_to("real")
    model = load_model(path)
    for _ in range(2):
        write(model, split(model, "second", prove=False), tmp_path / "parts")
    assert (tmp_path / "parts").is_symlink()
    assert (tmp_path / "real" / "split.json").exists()


def test_a_folder_name_of_the_greatest_length_is_fine(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    write(model, split(model, "second", prove=False), tmp_path / ("p" * 255))
    assert (tmp_path / ("p" * 255) / "split.json").exists()


def test_a_target_that_refuses_is_named(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(parts.tempfile, "mkdtemp", refuse)
    model = load_model(path)
    with pytest.raises(OutputError, match=r"cannot write to .*: Read-only file system"):
        write(model, split(model, "second", prove=False), tmp_path / "parts")


def test_operator_names_make_safe_folder_names(tmp_path: Path) -> None:
    proto = cut_models.text(
        "g (float[3] x) => (float[3] y) { a = Neg(x) y = local.Twice(a) }",
        """<domain: "local", opset_import: ["": 17]> Twice (u) => (v) { v = Add(u, u) }""",
        domains=', "local": 1',
    )
    name = "../weird op/" + "x" * 300
    proto.functions[0].name = proto.graph.node[1].op_type = name
    model = model_from_bytes(proto.SerializeToString(), "m.onnx")
    info = write(
        model, split(model, "value:y", prove=False) + split(model, f"op:{name}", prove=False), tmp_path / "parts"
    )
    folders = sorted(p.name for p in (tmp_path / "parts").iterdir() if p.is_dir())
    assert folders == sorted(Path(point.head.path).parts[0] for point in info.split_points)
    assert all(len(Path(point.head.path).parts) == 2 for point in info.split_points)


def test_a_new_folder_is_fine_and_nothing_is_said(tmp_path: Path) -> None:
    check_target(tmp_path / "new", tmp_path / "model.onnx")
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty", tmp_path / "model.onnx")


# -- one step: If, Loop, local functions in diff ------------------------------------------------------------------------


NOT_JUDGED = {name for name in KINDS if name.startswith("float8")}  # ONNX Runtime's Python does not hand them over


@pytest.mark.parametrize(
    "name",
    [name for name in KINDS if name != "constants_alone_make_every_output"],
)
def test_diff_of_every_kind_of_model_ends_in_a_verdict(name: str) -> None:
    """ONNX Runtime without optimisation against the deployed one: an If, a Loop, a local function is one step like any."""
    feeds = cut_models.FEEDS.get(name)
    result = equivcheck.diff(model_of(name), candidate="ort:optimization=disable", inputs=feeds and dict(feeds))
    assert result.verdict == ("inconclusive" if name in NOT_JUDGED else "equivalent"), str(result)
    assert result.coverage.judged or name in NOT_JUDGED


def test_diff_of_a_model_that_computes_nothing_from_its_input_is_an_error() -> None:
    with pytest.raises(ModelError, match="computes nothing"):
        equivcheck.diff(model_of("constants_alone_make_every_output"), candidate="ort:optimization=disable")


@pytest.mark.parametrize("case", ["t09_if_outer_scope", "t11_local_function", "t05_duplicate_node_names"])
def test_diff_of_the_cases_with_bodies_and_functions_is_equivalent(shared: Path, case: str) -> None:
    folder = shared / "cases" / case
    result = equivcheck.diff(folder / "model.onnx", candidate="ort:optimization=disable", inputs=folder / "inputs.npz")
    assert result.verdict == "equivalent", str(result)


def test_an_if_a_loop_and_a_function_are_one_step_each() -> None:
    for name, op in (
        ("an_if_in_a_loop_in_an_if", "If"),
        ("a_loop_with_scan_outputs", "Loop"),
        ("nested_local_functions_without_value_info", "Quad"),
    ):
        steps = model_of(name).graph.steps
        (step,) = [step for step in steps if op in step.ops]
        assert step.ops == (op,)
        result = equivcheck.diff(model_of(name), candidate="ort:optimization=disable", split_at=op)
        assert [point.step for point in result.split_points] == [step.id]


def test_a_body_that_is_faulty_on_one_side_is_the_culprit(tmp_path: Path) -> None:
    """The candidate runs another file, in whose If one number is off."""
    proto = KINDS["an_if_that_computes_its_condition"]()
    onnx.save(proto, tmp_path / "model.onnx")
    for attribute in proto.graph.node[4].attribute:
        for node in attribute.g.node:
            node.op_type = {"Mul": "Add", "Neg": "Abs"}.get(node.op_type, node.op_type)
    onnx.save(proto, tmp_path / "other.onnx")
    result = equivcheck.diff(
        tmp_path / "model.onnx", candidate="ort:optimization=disable", candidate_model=tmp_path / "other.onnx"
    )
    assert result.verdict == "different", str(result)
    assert [culprit.op_type for culprit in result.culprits] == ["If"]
