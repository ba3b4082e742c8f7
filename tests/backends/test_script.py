"""A user's own file as a backend: what it may do, and how every mistake in it is answered."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equivcheck
from backends.ssh_server import SshServer
from builder import Qdq, feeds
from equivcheck.backends.registry import backend
from equivcheck.backends.script import ScriptBackend
from equivcheck.cli import main
from equivcheck.engines.script import ScriptEngine
from equivcheck.errors import BackendUnavailable, EngineRefused, SpecError
from equivcheck.models.onnx.cut import dequantised
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from equivcheck.recording import Recording
from equivcheck.result import Result
from small_models import TRAPS, end, start

TEN_LINES = Path(__file__).parent / "scripts" / "run_ort.py"
UNFUSED = Path(__file__).parent / "scripts" / "run_ort_unfused.py"

pytestmark = pytest.mark.usefixtures("nothing_left")

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script of these lines, in which `ort(model_path, feeds)` is ONNX Runtime; its SPEC."""

    def written(text: str) -> str:
        path = tmp_path / "board.py"
        path.write_text(TEN_LINES.read_text().replace("def run(", "def ort(") + text)
        return f"script:{path}"

    return written


def small(name: str = "two_readers") -> OnnxModel:
    return model_from_bytes(TRAPS[name](lambda: Qdq(seed=1)).SerializeToString(), "small.onnx")


def recorded(spec: str, model: OnnxModel) -> Recording:
    with backend(spec).open(model) as session:
        return session.run("one", feeds(model.proto))


# -- the same figures ----------------------------------------------------------------------------------------------------


def figures(result: Result) -> dict[str, Any]:
    """Verdicts and all figures of every tensor and step; not how the values were seen."""
    found = json.loads(result.to_json())
    for tensor in found["tensors"]:
        del tensor["how"]
    kept = ("verdict", "tensors", "steps", "culprits", "reference_culprits", "coverage", "first_mismatch")
    return {key: found[key] for key in kept}


@pytest.mark.parametrize("model", ["digits_qdq_s8", "digits_qop_u8", "detector_qdq_u8"])
def test_ten_lines_of_onnx_runtime_give_the_figures_of_ort(fixtures_dir: Path, model: str) -> None:
    def run(candidate: str) -> Result:
        return equivcheck.diff(fixtures_dir / f"{model}.onnx", candidate=candidate, second_opinion=False)

    result = run(f"script:{TEN_LINES}")
    assert figures(result) == figures(run("ort"))
    assert result.candidate.engine == "run_ort.py"
    assert result.candidate.observation == equivcheck.result.Observation(method="head", disturbed=False)


def test_a_board_behind_ssh_runs_the_script_that_travelled(board: SshServer) -> None:
    model = small()
    far = recorded(f"script:{TEN_LINES}@ssh={board.address}@python={sys.executable}", model)
    near = recorded(f"script:{TEN_LINES}", model)
    assert set(far.values) == set(near.values) == set(model.graph.stored)
    for name, array in near.values.items():
        np.testing.assert_array_equal(far.values[name], array)


def test_python_3_8_is_enough(python38: str) -> None:
    model = small()
    assert set(recorded(f"script:{TEN_LINES}@python={python38}", model).values) == set(model.graph.stored)


# -- ways of observing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observe", ["head", "plain", "outputs"])
def test_an_engine_that_does_not_fuse_is_seen_alike_in_every_way(observe: str) -> None:
    """Lists in the order of the outputs are taken too."""
    model = small()
    expected = recorded("ort:optimization=disable", model)
    found = recorded(f"script:{UNFUSED},observe={observe}", model)
    outputs = {model.graph.store(name) for name in model.graph.outputs}
    seen = set(model.graph.stored) if observe != "outputs" else outputs | set(model.graph.inputs)
    assert set(found.values) == seen
    assert set(found.absent) == set(model.graph.stored) - seen
    assert found.disturbed is (None if observe == "outputs" else False)
    for name, array in found.values.items():
        np.testing.assert_array_equal(array, expected.values[name])


def test_extra_outputs_that_change_the_result_are_noticed(script: Script) -> None:
    """An engine that counts the outputs it is asked for."""
    body = """
def run(model_path, feeds):
    found = ort(model_path, feeds)
    return {name: array + 0.1 * (len(found) > 2) for name, array in found.items()}
"""
    model = small()
    assert recorded(f"{script(body)},observe=plain", model).disturbed
    assert recorded(f"{script(body)},observe=head", model).disturbed is False


def test_a_float_that_is_off_the_grid_is_a_finding(script: Script) -> None:
    body = "\ndef run(model_path, feeds):\n    return {n: a + 0.004 for n, a in ort(model_path, feeds).items()}\n"
    model = small("conv_relu_chain")
    found = recorded(script(body), model)
    quantised = set(model.graph.quantisation) & set(found.values)
    assert quantised
    assert all(found.off_grid[name] > 1e-3 for name in quantised)


def test_codes_are_taken_in_place_of_the_reals_they_stand_for(script: Script) -> None:
    """NPU tools often hand out int8."""
    m = Qdq(dtype="int8", seed=1)
    model = model_from_bytes(m.model(end(m, m.op("Relu", [start(m)]), 0.02)).SerializeToString(), "relu.onnx")
    scales = {dequantised(model.graph, n): float(q.scale) for n, q in model.graph.quantisation.items()}
    body = f"""
import numpy as np
def run(model_path, feeds):
    scales = {scales!r}
    return {{n: np.rint(a / np.float32(scales[n])).astype(np.int8) for n, a in ort(model_path, feeds).items()}}
"""
    found, expected = recorded(script(body), model), recorded("ort", model)
    assert not found.failed
    for name, array in expected.values.items():
        np.testing.assert_array_equal(found.values[name], array)


def test_every_model_has_a_path_of_its_own_and_types_on_its_outputs(script: Script, tmp_path: Path) -> None:
    """So that a script may keep what it compiled by path; compilers of vendors want types."""
    log = tmp_path / "log"
    body = f"""
import os
def run(model_path, feeds):
    session = onnxruntime.InferenceSession(model_path)
    with open({str(log)!r}, "a") as file:
        shapes = [output.shape for output in session.get_outputs()]
        beside = len(os.listdir(os.path.dirname(model_path)))
        print(model_path, shapes, beside, file=file)
    return ort(model_path, feeds)
"""
    model = small("conv_relu_chain")
    recorded(script(body), model)
    lines = log.read_text().splitlines()
    whole, *heads = (line.split(" ", 1) for line in lines)
    assert len(heads) == len(model.graph.stored) - len(model.graph.inputs)
    assert len({path for path, _ in heads}) == len(heads)
    assert {shapes.rpartition(" ")[2] for _, shapes in [whole, *heads]} == {"1"}
    assert all(re.fullmatch(r"\[\[1, \d+, \d+, \d+\]\] 1", shapes) for _, shapes in heads)


def test_what_lies_beside_the_script_can_be_imported(script: Script, tmp_path: Path) -> None:
    (tmp_path / "vendor_sdk.py").write_text("from board import ort as compute\n")
    spec = script(
        "\ndef run(model_path, feeds):\n    import vendor_sdk\n    return vendor_sdk.compute(model_path, feeds)\n"
    )
    assert not recorded(spec, small()).failed


def test_a_script_that_was_changed_within_the_second_is_not_taken_from_pythons_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same size, same time: what an import keeps in `__pycache__` looks current."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a worker removes what its engine leaves
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "board.py"
    for number in (1, 2):
        source = f"__version__ = {number}\ndef run(model_path, feeds):\n    return []\n".encode()
        path.write_bytes(source)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        engine = ScriptEngine(source, path.name, str(path.parent))
        assert engine.info()["version"] == str(number)
    assert [file.name for file in path.parent.iterdir()] == ["board.py"]


def test_what_a_script_does_to_its_feeds_is_its_own_affair(script: Script) -> None:
    body = (
        "\ndef run(model_path, feeds):\n    found = ort(model_path, feeds)\n    feeds['x'][:] = 0\n    return found\n"
    )
    model = small("conv_relu_chain")
    expected = recorded("ort", model)
    for name, array in recorded(script(body), model).values.items():
        np.testing.assert_array_equal(array, expected.values[name])


def test_it_gives_no_second_opinion_unless_asked_and_then_it_can(fixtures_dir: Path) -> None:
    assert not ScriptBackend.second_opinion
    result = equivcheck.diff(fixtures_dir / "digits_qdq_s8.onnx", candidate=f"script:{TEN_LINES}", second_opinion=True)
    assert any(tensor.local is not None and tensor.local.fed is not None for tensor in result.tensors)


# -- half of it ----------------------------------------------------------------------------------------------------------


def test_half_the_outputs_are_kept_and_the_rest_named(script: Script) -> None:
    body = """
def run(model_path, feeds):
    found = ort(model_path, feeds)
    return {name: array for k, (name, array) in enumerate(found.items()) if k % 2 == 0}
"""
    model = small()
    assert len(model.graph.outputs) == 2
    found = recorded(f"{script(body)},observe=plain", model)
    assert found.values
    assert found.failed
    assert set(found.values) | set(found.failed) == set(model.graph.stored)
    assert all(re.match(r"run\(\) returned no '", why) for why in found.failed.values())
    assert list(found.outputs) == [model.graph.outputs[0]]


def test_half_the_outputs_end_in_exit_code_3_with_the_rest_judged(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
def run(model_path, feeds):
    found = ort(model_path, feeds)
    return dict(list(found.items())[len(found) // 2:])
"""
    path = tmp_path / "small.onnx"
    path.write_bytes(small().proto.SerializeToString())
    assert main(["diff", str(path), "-c", f"{script(body)},observe=plain", "--json", str(tmp_path / "r.json")]) == 3
    result = json.loads((tmp_path / "r.json").read_text())
    assert 0 < result["coverage"]["judged"] < result["coverage"]["steps"]
    assert any("run() returned no" in failed["reason"] for failed in result["coverage"]["failed"])
    assert "inconclusive" in capsys.readouterr().out.casefold()


def test_a_head_that_the_script_refuses_costs_that_value_only(script: Script) -> None:
    body = """
seen = []
def run(model_path, feeds):
    seen.append(model_path)
    if len(seen) == 3:
        raise NotImplementedError("no Relu on this board")
    return ort(model_path, feeds)
"""
    model = small("conv_relu_chain")
    found = recorded(script(body), model)
    (reason,) = found.failed.values()
    assert "no Relu on this board" in reason
    assert set(found.values) | set(found.failed) == set(model.graph.stored)


def test_after_two_deaths_in_a_row_the_other_values_are_not_tried(script: Script) -> None:
    body = """
import os
count = 0
def run(model_path, feeds):
    global count
    count += 1
    if len(onnxruntime.InferenceSession(model_path).get_outputs()) == 1:
        os.abort()
    return ort(model_path, feeds)
"""
    model = small("two_readers")
    found = recorded(script(body), model)
    reasons = list(found.failed.values())
    assert ["SIGABRT" in reason for reason in reasons[:2]] == [True, True]
    assert all("not tried" in reason for reason in reasons[2:])
    assert len(reasons) > 2
    assert list(found.outputs) == list(model.graph.outputs)


# -- mistakes ------------------------------------------------------------------------------------------------------------

RETURNS = {
    "nothing": ("None", "returned a NoneType: return {name: array}"),
    "an array": ("next(iter(found.values()))", "returned a ndarray: return {name: array}"),
    "too many": ("[*found.values(), 1]", "returned 3 arrays for outputs"),
    "other names": ("{'logits': list(found.values())[0]}", r"returned logits; the model's outputs are \w+, \w+"),
    "no names": ("{}", "returned nothing; the model's outputs are"),
    "a text": ("{name: 'high' for name in found}", "returned a str for '.*', not an array of numbers"),
    "objects": ("{n: a.astype(object) for n, a in found.items()}", "object array for '.*', not an array of numbers"),
    "an exit": ("exit(4)", "board.py, line .*, in run: .*SystemExit: 4"),
    "an error": ("found['missing']", r"board.py, line \d+, in run: return found\['missing'\]: KeyError: 'missing'"),
}


@pytest.mark.parametrize("what", RETURNS)
def test_what_cannot_be_used_is_answered_in_clear_words(script: Script, what: str) -> None:
    returned, said = RETURNS[what]
    spec = script(f"\ndef run(model_path, feeds):\n    found = ort(model_path, feeds)\n    return {returned}\n")
    with pytest.raises(EngineRefused, match=said) as caught:
        recorded(spec, small())
    assert caught.value.message == "board.py failed"


MISFITS = {
    "NHWC": (
        "a.transpose(0, 2, 3, 1)",
        r"returned shape \[1, 8, 8, 4\] for '.*', the model says \[1, 4, 8, 8\] \(another",
    ),
    "flat": ("a.ravel()", r"returned shape \[\d+\] for"),
    "integers": ("a.astype('int32')", "returned int32 for '.*', neither reals nor its codes"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_an_array_that_does_not_fit_is_not_forced(script: Script, what: str) -> None:
    changed, said = MISFITS[what]
    spec = script(
        f"\ndef run(model_path, feeds):\n    return {{n: {changed} for n, a in ort(model_path, feeds).items()}}\n"
    )
    found = recorded(spec, small("residual_adds"))
    assert any(re.search(said, reason) for reason in found.failed.values()), found.failed


BROKEN = {
    "no run": ("def main(): ...", "board.py defines no function run"),
    "a syntax error": ("\ndef run(:\n", "board.py: .*SyntaxError"),
    "an import": (
        "\nimport vendor_sdk_9\n",
        "board.py, line .*No module named 'vendor_sdk_9'; .*pip install vendor_sdk_9",
    ),
    "an exit": ("\nexit('no board')\n", "no board"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_script_that_cannot_be_imported_is_the_users_mistake(script: Script, what: str) -> None:
    text, said = BROKEN[what]
    with pytest.raises(BackendUnavailable, match=said):
        backend(script(text)).open(small())


def test_a_script_that_is_not_there_is_answered_with_what_is(tmp_path: Path) -> None:
    (tmp_path / "run_board.py").touch()
    with pytest.raises(SpecError, match="No such file") as caught:
        backend(f"script:{tmp_path}/run_bord.py")
    assert caught.value.nearest == ("run_board.py",)
    with pytest.raises(SpecError, match="directory"):
        backend(f"script:{tmp_path}")
    with pytest.raises(SpecError, match="which file"):
        backend("script")
