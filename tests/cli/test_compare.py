"""`equivcheck compare` from outside: exit codes, streams, mistakes, broken recordings, several samples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import equivcheck
from builder import Qdq
from equivcheck.backends.fake import FakeBackend
from equivcheck.recording import load
from equivcheck.result import Result, from_json

COMMAND = [sys.executable, "-m", "equivcheck"]
Run = Callable[..., tuple[int, str, str]]
LOGITS = "logits_QuantizeLinear_Output"
DOWN = "down_relu_QuantizeLinear_Output"
IMAGES = [np.random.default_rng(k).random((1, 1, 8, 8)).astype(np.float32) for k in range(3)]


@pytest.fixture(scope="module")
def kept(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings: cpu, npu (legal), bad (a wrong step), of two samples each; one.npz, no recording of ours; results."""
    place = tmp_path_factory.mktemp("kept")
    for name, spec in (("cpu", "ort"), ("npu", "vnpu"), ("bad", "vnpu:fault=dropped-bias")):
        equivcheck.record(digits, backend=spec, inputs=IMAGES[:2], save_to=place / name)
    values: dict[str, Any] = dict(load(place / "npu").recordings[0].values)
    np.savez(place / "one.npz", **values)
    (place / "good.json").write_bytes(equivcheck.compare(place / "npu", model=digits).to_json())
    (place / "bad.json").write_bytes(equivcheck.compare(place / "bad", model=digits).to_json())
    (place / "text.json").write_text("{}")
    (place / "empty").mkdir()
    (place / "notes.txt").write_text("dear")
    return place


def assert_trouble(got: tuple[int, str, str], *said: str) -> None:
    """Exit 2, nothing on stdout, exactly one line on stderr that says all of `said`."""
    code, out, err = got
    assert (code, out) == (2, ""), got
    assert len(err.splitlines()) == 1, err
    assert err.startswith("equivcheck: ")
    assert "internal error" not in err, err
    for text in said:
        assert text in err, err


# -- exit codes and streams --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "head"),
    [
        (["cpu", "npu", "--model", "M"], 0, "EQUIVALENT   9 of 9 steps judged"),
        (["npu", "--model", "M"], 0, "EQUIVALENT   9 of 9 steps judged"),
        (["one.npz", "--model", "M"], 0, "EQUIVALENT   9 of 9 steps judged"),
        (["cpu", "bad", "--model", "M"], 1, "DIFFERENT   1 culprit: step #9"),
        (["bad", "--model", "M"], 1, "DIFFERENT   1 culprit: step #9"),
        (["cpu", "npu"], 1, "DIFFERENT   "),
        (["cpu", "cpu"], 0, "EQUIVALENT   10 of 10 tensors judged"),
        (["cpu", "npu", "--tolerance", "semantics"], 3, "INCONCLUSIVE"),
        (["cpu", "npu", "--model", "M", "--tolerance", "bitwise"], 1, "DIFFERENT"),
        (["good.json", "bad.json"], 1, "EQUIVALENT became DIFFERENT"),
        (["good.json", "good.json"], 0, "EQUIVALENT in both"),
    ],
)
def test_the_exit_code_is_the_verdict_and_stderr_is_silent(
    run: Run, digits: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, head: str
) -> None:
    monkeypatch.chdir(kept)
    got, out, err = run("compare", *(digits if w == "M" else w for w in words))
    assert (got, err) == (code, ""), err
    assert out.startswith(head), out.splitlines()[0]


def test_json_on_stdout_is_json_alone_and_the_file_the_same(run: Run, digits: Path, kept: Path) -> None:
    words = ["compare", kept / "cpu", kept / "bad", "--model", digits]
    code, out, err = run(*words, "--json", "-")
    assert (code, err) == (1, "")
    result = from_json(out.encode())
    assert result.verdict == "different"
    code, out, err = run(*words, "--json", "r.json")
    assert (code, err) == (1, "")
    assert out.startswith("DIFFERENT")
    there = from_json(Path("r.json").read_bytes())
    assert (there.tensors, there.culprits) == (result.tensors, result.culprits)


def test_two_results_give_json_of_their_own_schema(run: Run, kept: Path) -> None:
    code, out, err = run("compare", kept / "good.json", kept / "bad.json", "--json", "-")
    assert (code, err) == (1, "")
    assert json.loads(out)["schema"] == "equivcheck-between/1"
    code, out, _ = run("compare", kept / "good.json", kept / "bad.json", "--json", "b.json")
    assert (code, out.splitlines()[0].split()[0]) == (1, "EQUIVALENT")
    assert json.loads(Path("b.json").read_text())["verdicts"] == ["equivalent", "different"]


def test_the_split_point_is_shown_from_both_sides(run: Run, digits: Path, kept: Path) -> None:
    code, out, _ = run("compare", kept / "cpu", kept / "npu", "--model", digits, "--split-at", "GlobalAveragePool")
    assert code == 0
    assert "before" in out
    assert "after" in out


def test_the_last_line_repeats_the_comparison(run: Run, digits: Path, kept: Path, tmp_path: Path) -> None:
    (tmp_path / "a b").symlink_to(kept / "npu")
    code, out, _ = run("compare", "a b", "--model", digits)
    again = next(line for line in out.splitlines() if line.startswith("  again")).removeprefix("  again").strip()
    done = subprocess.run(
        again.replace("equivcheck", f"'{sys.executable}' -m equivcheck", 1), shell=True, capture_output=True, text=True
    )
    assert done.returncode == code
    assert done.stdout.splitlines()[:-1] == out.splitlines()[:-1]


def test_the_help_has_an_example_of_each_use(run: Run) -> None:
    code, out, err = run("compare", "--help")
    assert (code, err) == (0, "")
    assert "\\b" not in out
    for example in (
        "compare cpu npu --model model.onnx ", "compare board_dump.npz --model", "--candidate-layout nhwc",
        "compare a.npz b.npz ", "compare sdk1.json sdk2.json ", "Exit codes: 0 equivalent, 1 different, 2 trouble",
    ):  # fmt: skip
        assert example in out


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "nothing": ([], ["Missing argument '[REF] CAND'"]),
    "three": (["cpu", "npu", "bad"], ["one or two recordings, got 3"]),
    "missing": (["no", "--model", "M"], ["no", "give a folder or a file"]),
    "missing reference": (["no", "npu"], ["no", "give a folder or a file"]),
    "empty folder": (["empty", "--model", "M"], ["empty holds no tensors"]),
    "text": (["notes.txt", "npu"], ["notes.txt is no dump", ".npz"]),
    "alone": (["npu"], ["only be judged with its model", "--model"]),
    "one result": (["good.json"], ["two results are compared"]),
    "no result": (["good.json", "text.json"], ["text.json is not a result", "diff --json FILE"]),
    "missing result": (["good.json", "no.json"], ["no.json cannot be read"]),
    "result and recording": (["good.json", "npu"], ["good.json"]),
    "split without model": (["cpu", "npu", "--split-at", "Conv"], ["need --model"]),
    "input without model": (["cpu", "npu", "-i", "random:1"], ["need --model"]),
    "recipe without model": (["cpu", "npu", "--preprocess", "scale=1"], ["--model"]),
    "values without model": (["cpu", "npu", "--values", "outputs"], ["--model"]),
    "results with a model": (["good.json", "bad.json", "--model", "M"], ["--model"]),
    "results with a tolerance": (["good.json", "bad.json", "--tolerance", "close"], ["--tolerance"]),
    "no such model": (["npu", "--model", "no.onnx"], ["no such model: no.onnx"]),
    "unknown selector": (["npu", "--model", "M", "--split-at", "Convv"], ["Convv", "nearest: Conv"]),
    "unknown tolerance": (["npu", "--model", "M", "--tolerance", "strict"], ["no such tolerance: strict"]),
    "layout of our own": (["npu", "--model", "M", "--candidate-layout", "nhwc"], ["its layout and names are in it"]),
    "unknown layout": (["one.npz", "--model", "M", "--candidate-layout", "nhw"], ["'nchw', 'nhwc'"]),
    "no names file": (["one.npz", "--model", "M", "--names", "no.toml"], ["no.toml"]),
    "empty names": (["one.npz", "--model", "M", "--names", ""], ["--names is empty"]),
    "empty reference names": (["one.npz", "one.npz", "--reference-names", ""], ["--reference-names is empty"]),
    "empty model": (["npu", "--model", ""], ["--model is empty"]),
    "unwritable": (["npu", "--model", "M", "--json", "/nowhere/r.json"], ["cannot write /nowhere/r.json"]),
    "json to a folder": (["npu", "--model", "M", "--json", "empty"], ["empty"]),
    "other inputs": (["npu", "--model", "M", "-i", "random:7"], ["different samples: 1 (random:7) against 2"]),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_answered_in_one_line(
    run: Run, digits: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(kept)
    before = sorted(kept.rglob("*"))
    words, said = MISTAKES[what]
    assert_trouble(run("compare", *(digits if w == "M" else w for w in words)), *said)
    assert sorted(kept.rglob("*")) == before


@pytest.mark.parametrize("sides", [["npu"], ["cpu", "npu"]])
def test_a_recording_of_another_network_blames_no_step(
    run: Run, kept: Path, fixtures_dir: Path, sides: list[str]
) -> None:
    """Both networks have an input `image`, and its Q's output has the same name; the shapes are others."""
    other = fixtures_dir / "detector_qdq_s8.onnx"
    code, out, err = run("compare", *(kept / side for side in sides), "--model", other, "--json", "-")
    if code == 2:
        assert "internal error" not in err
        assert "recorded from digits_qdq_s8.onnx" in err
        return
    result = from_json(out.encode())
    assert result.culprits == []
    assert any("another model file: digits_qdq_s8.onnx" in note for note in result.notes)


def test_a_recording_of_another_export_says_so(run: Run, kept: Path, fixtures_dir: Path) -> None:
    _, out, err = run("compare", kept / "npu", "--model", fixtures_dir / "digits_qdq_u8.onnx")
    assert err == ""
    assert "another model file: digits_qdq_s8.onnx" in out


# -- broken recordings -------------------------------------------------------------------------------------------------


def length_of_header(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def rewritten(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    """Write the file with another header over the same data."""
    content, length = path.read_bytes(), length_of_header(path)
    table = json.loads(content[8 : 8 + length])
    header = json.dumps(change(table) or table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def each(**fields: object) -> Callable[[dict[str, dict[str, object]]], None]:
    def change(table: dict[str, dict[str, object]]) -> None:
        for entry in table.values():
            entry.update(fields)

    return change


def in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, Callable[[Path], object]] = {
    "one byte short": lambda p: os.truncate(p, p.stat().st_size - 1),
    "half": lambda p: os.truncate(p, p.stat().st_size // 2),
    "in its header": lambda p: os.truncate(p, 40),
    "in its length": lambda p: os.truncate(p, 4),
    "empty": lambda p: os.truncate(p, 0),
    "gone": lambda p: p.unlink(),
    "a folder": in_its_place,
    "a huge header": lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]),
    "no json": lambda p: p.write_bytes(p.read_bytes()[:8] + b"\xff" * (p.stat().st_size - 8)),
    "a header that is a number": lambda p: p.write_bytes((1).to_bytes(8, "little") + b"5"),
    "a header that is a list": lambda p: rewritten(p, lambda table: [1]),
    "another shape": lambda p: rewritten(p, each(shape=[7, 7, 7])),
    "an unknown dtype": lambda p: rewritten(p, each(dtype="Q3")),
    "no dtype": lambda p: rewritten(p, lambda t: {k: {"data_offsets": e["data_offsets"]} for k, e in t.items()}),
    "offsets the wrong way round": lambda p: rewritten(p, each(data_offsets=[64, 0])),
    "offsets below zero": lambda p: rewritten(p, each(data_offsets=[-64, 0])),
    "an offset alone": lambda p: rewritten(p, each(data_offsets=[0])),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_broken_file_of_tensors_is_trouble_and_named(
    run: Run, digits: Path, kept: Path, tmp_path: Path, harm: str
) -> None:
    shutil.copytree(kept / "npu", tmp_path / "broken")
    HARMS[harm](tmp_path / "broken" / "0001.safetensors")
    assert_trouble(run("compare", kept / "cpu", "broken", "--model", digits), "broken/0001.safetensors")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("words", [["cpu", "broken", "--model", "M"], ["broken", "--model", "M"], ["broken", "cpu"]])
def test_a_flipped_bit_is_a_broken_copy_not_a_wrong_engine(
    run: Run, digits: Path, kept: Path, tmp_path: Path, words: list[str]
) -> None:
    shutil.copytree(kept / "cpu", tmp_path / "cpu")
    shutil.copytree(kept / "npu", tmp_path / "broken")
    flipped(tmp_path / "broken" / "0001.safetensors")
    got = run("compare", *(digits if word == "M" else word for word in words))
    assert_trouble(got, "broken/0001.safetensors is not what was recorded", "copy it again, in binary mode")


MANIFESTS: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "a newer schema": lambda text: text.replace("equivcheck-recording/1", "equivcheck-recording/2"),
    "an unknown dtype": lambda text: text.replace('"dtype": "int8"', '"dtype": "int9"'),
    "a zero point too many": lambda text: text.replace('"zero_point": [', '"zero_point": [300, '),
}


@pytest.mark.parametrize("harm", MANIFESTS)
def test_a_broken_manifest_is_trouble_and_named(run: Run, digits: Path, kept: Path, tmp_path: Path, harm: str) -> None:
    shutil.copytree(kept / "npu", tmp_path / "broken")
    manifest = tmp_path / "broken" / "manifest.json"
    text = MANIFESTS[harm](manifest.read_text())
    assert text != manifest.read_text()
    manifest.write_text(text)
    assert_trouble(run("compare", kept / "cpu", "broken", "--model", digits), "broken")


# -- odd values --------------------------------------------------------------------------------------------------------


def test_names_with_slashes_and_two_inputs_are_judged(run: Run, tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    a = m.q(m.input("in/a:0", (1, 3, 4, 4)), 0.02, 1, out="/q/a")
    b = m.q(m.input("in/b", (1, 3, 4, 4)), 0.02, 1, out="../q/b")
    onnx.save(m.model(m.dq(m.q(m.op("Add", [m.dq(a), m.dq(b)]), 0.04, 0, out="sum'\"/x"))), tmp_path / "two.onnx")
    rng = np.random.default_rng(0)
    feeds = {name: rng.random((1, 3, 4, 4)).astype(np.float32) for name in ("in/a:0", "in/b")}
    equivcheck.record(tmp_path / "two.onnx", inputs=feeds, save_to=tmp_path / "r")
    recorded: dict[str, Any] = dict(load(tmp_path / "r").recordings[0].values)
    np.savez(tmp_path / "dump.npz", **recorded)
    for sides in (["r"], ["dump.npz"], ["r", "dump.npz"]):
        code, out, err = run("compare", *sides, "--model", "two.onnx")
        assert (code, err) == (0, ""), err
        assert out.startswith("EQUIVALENT   3 of 3 steps judged")
    swapped = recorded | {"in/a:0": recorded["in/b"], "in/b": recorded["in/a:0"]}
    np.savez(tmp_path / "swapped.npz", **swapped)
    code, out, _ = run("compare", "r", "swapped.npz", "--model", "two.onnx", "--json", "-")
    assert code == 1
    assert "not fed the same" in from_json(out.encode()).reason or from_json(out.encode()).culprits


def test_a_nan_in_the_recorded_input_is_refused(run: Run, digits: Path, kept: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {n: a.copy() for n, a in load(kept / "npu").recordings[0].values.items()}
    values["image"][0, 0, 0, 0] = np.nan
    np.savez(tmp_path / "dump.npz", **values)
    assert_trouble(run("compare", "dump.npz", "--model", digits), "NaN", "image")


# -- several samples ---------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def fake(changes: Sequence[Change]) -> FakeBackend:
    """A backend whose n-th run is falsified by the n-th of `changes`."""
    turn = iter(changes)
    return FakeBackend(lambda values: next(turn)(values))


def right(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return values


def wrong_down(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values[DOWN][0, 3] ^= 64
    return values


def without_down(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in values.items() if name != DOWN}


def recorded(digits: Path, folder: Path, changes: Sequence[Change]) -> Path:
    return equivcheck.record(digits, backend=fake(changes), inputs=IMAGES, save_to=folder)


def both(digits: Path, tmp_path: Path, changes: Sequence[Change]) -> list[Result]:
    """Judged against a right reference, and alone."""
    ref = recorded(digits, tmp_path / "ref", [right] * 3)
    cand = recorded(digits, tmp_path / "cand", changes)
    return [equivcheck.compare(ref, cand, model=digits), equivcheck.compare(cand, model=digits)]


@pytest.mark.parametrize("bad", range(3))
def test_a_culprit_that_one_sample_of_three_shows_is_found_and_its_sample_named(
    digits: Path, tmp_path: Path, bad: int
) -> None:
    changes = [wrong_down if k == bad else right for k in range(3)]
    for result in both(digits, tmp_path, changes):
        assert (result.verdict, [c.outputs for c in result.culprits]) == ("different", [[DOWN]])
        by_sample = result.tensor(DOWN).by_sample
        excess = [one.local.candidate.excess if one.local.candidate else None for one in by_sample]
        assert [e is not None and e > 10 for e in excess] == [k == bad for k in range(3)]
        assert [one.sample for one in by_sample] == [sample.id for sample in result.samples]
        total = result.tensor(DOWN).local.candidate
        assert total is not None
        assert total.n == sum(one.local.candidate.n for one in by_sample if one.local.candidate)
        assert all(len(row.by_sample) == 3 for row in result.tensors)


@pytest.mark.parametrize("lacking", range(3))
def test_a_value_that_one_sample_lacks_is_said_and_judged_from_the_others(
    digits: Path, tmp_path: Path, lacking: int
) -> None:
    for result in both(digits, tmp_path, [without_down if k == lacking else right for k in range(3)]):
        assert result.verdict in ("equivalent", "inconclusive")
        assert DOWN in [absent.name for absent in result.coverage.absent]


@pytest.mark.parametrize("lacking", range(3))
def test_a_wrong_step_is_found_where_another_sample_lacks_its_value(digits: Path, tmp_path: Path, lacking: int) -> None:
    changes = [without_down if k == lacking else wrong_down for k in range(3)]
    for result in both(digits, tmp_path, changes):
        assert (result.verdict, [c.outputs for c in result.culprits]) == ("different", [[DOWN]])


def test_the_order_of_samples_does_not_matter(digits: Path, tmp_path: Path) -> None:
    ref = equivcheck.record(digits, inputs=IMAGES, save_to=tmp_path / "ref")
    cand = equivcheck.record(digits, backend="vnpu", inputs=IMAGES[::-1], save_to=tmp_path / "cand")
    same = equivcheck.record(digits, backend="vnpu", inputs=IMAGES, save_to=tmp_path / "same")
    turned, straight = equivcheck.compare(ref, cand, model=digits), equivcheck.compare(ref, same, model=digits)
    assert (turned.verdict, turned.tensors) == ("equivalent", straight.tensors)
    assert equivcheck.compare(ref, cand).tensors == equivcheck.compare(ref, same).tensors


def test_samples_that_the_reference_lacks_are_not_dropped_in_silence(run: Run, digits: Path, tmp_path: Path) -> None:
    ref = equivcheck.record(digits, inputs=IMAGES[0], save_to=tmp_path / "ref")
    cand = recorded(digits, tmp_path / "cand", [right, wrong_down, right])
    code, out, err = run("compare", ref, cand, "--model", digits)
    assert (code, err) == (0, "")
    assert any("sample" in line for line in out.splitlines() if line.startswith("  note")), out
