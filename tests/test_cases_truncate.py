"""The `t*` cases of ../shared/cases: situations that people met when they cut models, each with what is right there.

Every key of every expect.json is either checked here or listed as another command's (`OTHERS`); an unknown one fails.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import cut_models
from equivcheck import split
from equivcheck.cli import main
from equivcheck.errors import SelectorError
from equivcheck.models.onnx.load import OnnxModel, dtype_name, load_model
from equivcheck.parts import SplitPart

PREFIX = {"op_type": "op:", "node": "node:", "tensor": "value:"}
TOP = {
    "splits", "error_for", "ambiguous", "tail_from", "cwd_independent", "user_inputs", "all_models", "part_keeps",
    "same_values_for_all", "time_limit_s", "note",
}  # fmt: skip
AT_A_SPLIT = {
    "selector", "by", "tensors", "note", "head_nodes", "head_inputs", "head_inputs_required", "head_keeps_initializers",
    "tail_inputs", "tail_boundary", "functions_needed", "dtypes", "values", "count",
}  # fmt: skip
OTHERS = {"first_divergent", "equal", "metrics", "verdict", "verdict_code", "max_lsb_gap_q", "tol"}  # of `compare`
NAMES = [
    "t01_skip_two_branches", "t03_op_type_five_times", "t05_duplicate_node_names", "t07_multi_output_node",
    "t09_if_outer_scope", "t11_local_function", "t13_external_data", "t15_ir3_weights_are_inputs", "t18_symbolic_dims",
    "t21_opset_matrix", "t22_qdq_split_at_gap", "t23_dead_node_and_typo", "t25_cut_inside_qdq_pair",
    "t27_diamond_ladder", "t30_cut_at_int4",
]  # fmt: skip


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expect: dict[str, Any] = json.loads((folder / "expect.json").read_text())["expect"]
        self.path = folder / "model.onnx"
        self.model: OnnxModel = load_model(self.path)
        self.splits: list[dict[str, Any]] = self.expect.get("splits", [])

    def runs(self) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """(feeds, every tensor as computed by hand) of each input file."""
        return [
            (dict(np.load(path)), dict(np.load(path.with_name(path.name.replace("inputs", "expected")))))
            for path in sorted(self.folder.glob("inputs*.npz"))
        ]

    def after(self, selector: str) -> list[SplitPart]:
        """Cut after what `selector` finds; the proof has a test of its own."""
        return split(self.model, selector, cut="after", prove=False)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, shared: Path) -> Case:
    return Case(shared / "cases" / request.param)


def tensors(found: list[SplitPart]) -> list[str]:
    return [name for part in found for name in part.parts.cut.point.after]


def test_all_cases_of_the_folder_are_here(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = sorted(path.name for path in (shared / "cases").glob("t*"))
    with capsys.disabled():
        print(f"\n{len(found)} t cases")
    assert found == NAMES


def test_nothing_that_a_case_says_is_ignored(case: Case) -> None:
    assert case.expect.keys() <= TOP | OTHERS
    for item in case.splits:
        assert item.keys() <= AT_A_SPLIT


def test_selectors_find_these_tensors_plain_and_with_their_prefix(case: Case) -> None:
    for item in case.splits:
        for selector in (item["selector"], PREFIX[item["by"]] + item["selector"]):
            found = case.after(selector)
            assert len(found) == item.get("count", len(found))
            if "tensors" in item:
                assert tensors(found) == item["tensors"]


def test_head_and_tail_are_the_model_on_every_input_of_the_case(case: Case) -> None:
    for item in case.splits:
        for place in ("before", "after"):
            for feeds, _ in case.runs():
                for part in split(case.model, item["selector"], cut=place, inputs=feeds)[:6]:
                    assert part.proved, part.note
                    cut_models.assert_whole(case.model.proto, part, feeds)
                    for made in (part.head, *([part.tail] if part.tail else [])):
                        cut_models.assert_valid(made)
                        cut_models.assert_minimal(made)
                        cut_models.assert_kept(case.model.proto, made)


def test_the_head_gives_the_values_computed_by_hand(case: Case) -> None:
    for item in case.splits:
        for feeds, expected in case.runs():
            for part in case.after(item["selector"])[:12]:
                got = cut_models.run(part.head, feeds)
                for name in set(part.parts.cut.point.after) & expected.keys():
                    assert_close(got[name], expected[name])


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_each_part_has_what_the_case_says(case: Case) -> None:
    for item in case.splits:
        for part in case.after(item["selector"]):
            assert_head(part, item)
            assert_boundary(part, item)
            assert_types(part, item, case)


def assert_head(part: SplitPart, item: dict[str, Any]) -> None:
    graph = part.head.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [port.name for port in graph.input if port.name not in weights]
    for key in ("head_inputs", "head_inputs_required"):
        assert inputs == item.get(key, inputs)
    if "head_nodes" in item:
        assert [node.name for node in graph.node] == item["head_nodes"]
    if "head_keeps_initializers" in item:
        assert weights == set(item["head_keeps_initializers"])
    if "functions_needed" in item:
        assert {function.name for function in part.head.functions} == set(item["functions_needed"])


def assert_boundary(part: SplitPart, item: dict[str, Any]) -> None:
    if "tail_boundary" in item:
        assert set(part.boundary) == set(item["tail_boundary"])
    if "tail_inputs" in item:
        assert part.tail is not None
        assert [port.name for port in part.tail.graph.input] == item["tail_inputs"]


def assert_types(part: SplitPart, item: dict[str, Any], case: Case) -> None:
    types = {port.name: dtype_name(port.type.tensor_type.elem_type) for port in part.head.graph.output}
    types |= part.parts.exchanged
    for name, dtype in zip(item.get("tensors", []), item.get("dtypes", [])):
        assert types[name] == dtype
    for name, values in zip(item.get("tensors", []), item.get("values", [])):
        assert cut_models.run(part.head, case.runs()[0][0])[name].ravel().tolist() == np.ravel(values).tolist()


def test_what_is_ambiguous_selects_all_of_it(case: Case) -> None:
    for selector, expected in case.expect.get("ambiguous", {}).items():
        assert tensors(case.after(selector)) == expected


def test_what_the_tail_needs_crosses_or_is_computed_there(case: Case) -> None:
    """Cut at a value, the tail computes what the head had no need of; cut before its reader, all that it reads crosses."""
    if "tail_from" in case.expect:
        (cut,), needs = case.expect["tail_from"]["cut"], set(case.expect["tail_from"]["needs"])
        (part,) = case.after(cut)
        assert part.tail is not None
        assert needs <= set(part.boundary) | {out for node in part.tail.graph.node for out in node.output}
        (reader,) = [node.name for node in case.model.proto.graph.node if cut in node.input]
        (part,) = split(case.model, f"node:{reader}", inputs=case.runs()[0][0])
        assert set(part.boundary) == needs


def test_a_wrong_selector_is_a_clear_error_and_no_difference(
    case: Case, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for selector in case.expect.get("error_for", {}):
        if selector == "missing w.bin":
            continue  # has a test of its own
        with pytest.raises(SelectorError) as caught:
            case.after(selector)
        words = {
            "else_sub": "the body of If 'branch'",
            "e0": "the body of If 'branch'",
            "f_relu": "the local function",
            "GlobalAvergePool": "nothing in this model is called",
            "relu": "nearest: Relu",
        }[selector]
        assert words in str(caught.value)
        assert main(["split", str(case.path), "--at", selector, "-o", str(tmp_path / "parts")]) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "parts").exists()


def test_the_inputs_are_those_that_a_user_must_give(case: Case) -> None:
    if "user_inputs" in case.expect:
        assert list(case.model.graph.inputs) == case.expect["user_inputs"]


def test_all_models_of_a_case_keep_their_opset_and_give_the_same_values(case: Case) -> None:
    values = []
    for name in case.expect.get("all_models", []):
        model = load_model(case.folder / name)
        for item in case.splits or [{"selector": "Conv"}]:
            feeds, expected = case.runs()[0]
            (part, *_) = split(model, item["selector"], cut="after", inputs=feeds)
            assert part.proved, part.note
            for made in (part.head, *([part.tail] if part.tail else [])):
                for key in case.expect["part_keeps"]:
                    assert getattr(made, key) == getattr(model.proto, key)
                cut_models.assert_valid(made)
            got = cut_models.run(part.head, feeds)
            values.append(got)
            for tensor in got.keys() & expected.keys():
                assert_close(got[tensor], expected[tensor])
    if case.expect.get("same_values_for_all"):
        assert len(values) == len(case.expect["all_models"])
        for got in values:
            assert got.keys() == values[0].keys()
            for tensor, array in got.items():
                np.testing.assert_array_equal(array, values[0][tensor])


def test_a_case_with_a_time_limit_keeps_it(case: Case) -> None:
    if "time_limit_s" in case.expect:
        started = time.perf_counter()
        for item in case.splits:
            split(case.model, item["selector"], cut="after", prove=False)
        assert time.perf_counter() - started < case.expect["time_limit_s"]


def test_the_working_directory_does_not_matter(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for item in case.splits[:1]:
        assert (
            main(["split", str(case.path), "--at", item["selector"], "-o", "parts", "--cut", "after", *given(case)])
            == 0
        )
        written = json.loads((tmp_path / "parts" / "split.json").read_text())["split_points"]
        assert all(point["proved"] for point in written)
        head = onnx.load(tmp_path / "parts" / written[0]["head"]["path"])
        onnx.checker.check_model(head)


def given(case: Case) -> list[str]:
    return ["-i", str(case.folder / "inputs.npz")]


def test_missing_external_data_is_an_error_that_names_file_and_tensor(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(shared / "cases" / "t13_external_data" / "model.onnx", tmp_path)
    assert main(["split", str(tmp_path / "model.onnx"), "--at", "Relu", "-o", str(tmp_path / "parts")]) == 2
    said = capsys.readouterr().err
    assert "w.bin" in said
    assert "'w1'" in said


def test_open_dimensions_ask_for_a_shape(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shared / "cases" / "t18_symbolic_dims" / "model.onnx"
    assert main(["split", str(path), "--at", "GlobalAveragePool", "-o", str(tmp_path / "parts")]) == 0
    said = capsys.readouterr().out
    assert "not proved" in said
    assert "needs a shape" in said


def test_a_dead_node_is_cut_and_the_note_says_so(shared: Path) -> None:
    case = Case(shared / "cases" / "t23_dead_node_and_typo")
    (part,) = split(case.model, "dead_node", cut="after")
    assert part.proved
    assert "no model output depends on dead" in part.note
