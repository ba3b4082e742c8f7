"""`equivcheck diff` from outside: exit codes, streams, one line for every mistake, and the screens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from builder import Qdq
from equivcheck.backends.base import Session
from equivcheck.backends.fake import FakeBackend
from equivcheck.backends.registry import backend
from equivcheck.check import Request
from equivcheck.errors import InputError
from equivcheck.models.onnx.load import OnnxModel
from equivcheck.result import Result, from_json

COMMAND = [sys.executable, "-m", "equivcheck"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def picture(fixtures_dir: Path) -> list[object]:
    return ["-i", fixtures_dir / "digits" / "00_0.png", "--preprocess", fixtures_dir / "digits.toml"]


def assert_trouble(got: tuple[int, str, str], *said: str) -> None:
    """Exit 2, nothing on stdout, exactly one line on stderr that says all of `said`."""
    code, out, err = got
    assert (code, out) == (2, ""), (code, out, err)
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    assert err.startswith("equivcheck: ")
    assert "Traceback" not in err
    assert "internal error" not in err, err
    for text in said:
        assert text in err, err


# -- exit codes --------------------------------------------------------------------------------------------------------


def test_equivalent_is_0_and_the_screen_is_all_there_is(run: Run, digits: Path, picture: list[object]) -> None:
    code, out, err = run("diff", digits, *picture)
    assert (code, err) == (0, "")
    assert out.startswith("EQUIVALENT   9 of 9 steps judged")
    assert max(len(line) for line in out.splitlines() if not line.startswith("  again")) <= 125


def test_different_is_1(run: Run, digits: Path, fixtures_dir: Path) -> None:
    code, out, err = run("diff", digits, "-c", "ort", "--candidate-model", fixtures_dir / "digits_qdq_s8_floor.onnx")
    assert (code, err) == (1, "")
    assert out.startswith("DIFFERENT   1 culprit: step #7 GlobalAveragePool")


def test_no_verdict_is_3(run: Run, digits: Path, fixtures_dir: Path) -> None:
    code, out, err = run("diff", digits, "-c", "ort", "--candidate-model", fixtures_dir / "digits_float.onnx")
    assert (code, err) == (3, "")
    assert out.startswith("INCONCLUSIVE   0 of 9 steps judged")


def test_an_uncaught_error_is_2_and_asks_for_a_report(run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("equivcheck.check.run", broken)
    code, out, err = run("diff", digits)
    assert (code, out) == (2, "")
    assert err == (
        "equivcheck: internal error, please report it: RuntimeError: two lines (EQUIVCHECK_DEBUG=1 shows where)\n"
    )


def test_running_out_of_memory_is_2_with_advice(run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(request: object) -> None:
        raise MemoryError

    monkeypatch.setattr("equivcheck.check.run", starved)
    assert_trouble(run("diff", digits), "out of memory", "--values splits")


# -- mistakes: one line each -------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "no model": (["diff"], ["Missing argument 'MODEL'", "--help"]),
    "no such command": (["dif", "M"], ["no command 'dif'", "did you mean 'diff'"]),
    "no such file": (
        ["diff", "digit.onnx"],
        ["no such model: digit.onnx", "give the path of an .onnx or .tflite file"],
    ),
    "near file": (["diff", "good.onx"], ["no such model: good.onx", "nearest: good.onnx"]),
    "a folder": (["diff", "."], ["cannot read .", "Is a directory"]),
    "empty file": (["diff", "empty.onnx"], ["empty.onnx is not an ONNX model", "give an .onnx file"]),
    "text": (["diff", "text.onnx"], ["text.onnx is not an ONNX model", "is the download complete?"]),
    "truncated": (
        ["diff", "cut.onnx"],
        ["cut.onnx is not an ONNX model, or it breaks off", "is the download complete?"],
    ),
    "cut by a byte": (["diff", "cut1.onnx"], ["cut1.onnx is not an ONNX model, or it breaks off"]),
    "unknown selector": (["diff", "M", "--split-at", "Softmax"], ["called 'Softmax'", "operators here: Add, Conv"]),
    "near selector": (["diff", "M", "--split-at", "GlobalAveragePol"], ["nearest: GlobalAveragePool"]),
    "empty selector": (["diff", "M", "--split-at", ""], ["empty selector", "--split-at GlobalAveragePool"]),
    "no such step": (["diff", "M", "--split-at", "#99"], ["no step #99", "steps #1 to #9"]),
    "step 0": (["diff", "M", "--split-at", "#0"], ["no step #0", "steps #1 to #9"]),
    "fifth Conv": (["diff", "M", "--split-at", "Conv#5"], ["no 'Conv#5'", "this model has 4 Conv"]),
    "ambiguous": (["diff", "ambiguous.onnx", "--split-at", "Relu"], ["'Relu'", "op:Relu", "node:Relu"]),
    "wrong name": (["diff", "M", "-i", "foto=ok.npy"], ["foto is no input", "the model's inputs: image"]),
    "wrong npz key": (["diff", "M", "-i", "other.npz"], ["'foo' is no input of the model", "image"]),
    "wrong shape": (["diff", "M", "-i", "small.npy"], ["1x1x4x4", "image (float32 1x1x8x8)", "reshape"]),
    "wrong dtype": (["diff", "M", "-i", "double.npy"], ["float64", 'array.astype("float32")']),
    "nan into codes": (["diff", "M", "-i", "nan.npy", "-c", "ort"], ["nan.npy holds 1 NaN", "#1 QuantizeLinear"]),
    "no such input": (["diff", "M", "-i", "okk.npy"], ["no file okk.npy", "nearest: ok.npy"]),
    "picture for two": (["diff", "two.onnx", "-i", "ok.npy"], ["for one input", "a (float32 1x3x8x8)", "-i NAME=FILE"]),
    "open dimensions": (["diff", "open.onnx"], ["open dimensions", "random:0:1x3x"]),
    "unknown backend": (
        ["diff", "M", "-c", "snpe"],
        ["unknown backend 'snpe'", "known here: ort, qnn, recorded, script"],
    ),
    "near backend": (["diff", "M", "-c", "vpnu"], ["unknown backend 'vpnu'", "nearest: vnpu"]),
    "unknown reference": (["diff", "M", "-r", "snpe"], ["unknown backend 'snpe'"]),
    "unknown option": (["diff", "M", "-c", "ort:optimisation=all"], ["no option 'optimisation'", "optimization"]),
    "unknown choice": (["diff", "M", "-c", "ort:optimization=max"], ["not one of all, extended, basic, disable"]),
    "not a number": (["diff", "M", "-c", "ort:threads=two"], ["threads=two is not a number"]),
    "bad spec": (["diff", "M", "-c", "ort:"], ["column 5", "expected KEY=VALUE"]),
    "no transport": (["diff", "M", "-c", "ort@ssh=board.invalid"], ["no machine of that name", "check the name"]),
    "json to nowhere": (["diff", "M", "--json", "no/x.json"], ["cannot write no/x.json", "no folder no", "make it"]),
    "json to a folder": (["diff", "M", "--json", "."], ["it is a folder", "name a file"]),
    "save over a file": (["diff", "M", "--save", "ok.npy"], ["cannot write", "ok.npy"]),
    "save over others": (["diff", "M", "--save", "foreign"], ["is not a recording", "name a new or empty folder"]),
    "unknown preset": (
        ["diff", "M", "--tolerance", "strict"],
        ["no such tolerance: strict", "semantics, bitwise, close"],
    ),
    "bad rule": (["diff", "M", "--tolerance", "bad.toml"], ["rule[0]: unknown key 'tensr'", "nearest: tensor"]),
    "bad toml": (["diff", "M", "--tolerance", "cut.toml"], ["cut.toml cannot be read"]),
    "unknown recipe key": (["diff", "M", "-i", "P", "--preprocess", "resise=8x8"], ["unknown key resise", "resize"]),
    "no such recipe": (["diff", "M", "-i", "P", "--preprocess", "no.toml"], ["no recipe file no.toml", "inline keys"]),
    "bad recipe file": (["diff", "M", "-i", "P", "--preprocess", "recipe.toml"], ["unknown key image.foo"]),
    "unknown values": (["diff", "M", "--values", "some"], ["'all', 'splits', 'outputs'"]),
    "unknown flag": (["diff", "M", "--frobnicate"], ["--frobnicate", "diff --help"]),
    "two models": (["diff", "M", "M"], ["unexpected extra argument"]),
    "other inputs": (
        ["diff", "M", "--candidate-model", "two.onnx"],
        ["input 'a' of the candidate model fits no input of the model"],
    ),
    "empty candidate": (["diff", "M", "-c", ""], ["expected the name of a backend"]),
    "empty tolerance": (["diff", "M", "--tolerance", ""], ["semantics, bitwise, close"]),
    "no such provider": (["diff", "M", "-c", "ort:provider=cuda"], ["cuda", "CPUExecutionProvider"]),
    "empty save": (["diff", "M", "--save", ""], ["--save"]),
    "no candidate model": (["diff", "M", "--candidate-model", "no.onnx"], ["no such model: no.onnx"]),
}


@pytest.fixture
def bad_files(tmp_path: Path, digits: Path) -> Path:
    whole = digits.read_bytes()
    (tmp_path / "good.onnx").write_bytes(whole)
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "text.onnx").write_text("not a model\n" * 20)
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut1.onnx").write_bytes(whole[:-1])
    np.save(tmp_path / "ok.npy", np.zeros((1, 1, 8, 8), np.float32))
    image = np.zeros((1, 1, 8, 8), np.float32)
    image[0, 0, 1, 1] = np.nan
    np.save(tmp_path / "nan.npy", image)
    np.save(tmp_path / "small.npy", np.zeros((1, 1, 4, 4), np.float32))
    np.save(tmp_path / "double.npy", np.zeros((1, 1, 8, 8)))
    np.savez(tmp_path / "other.npz", foo=np.zeros((1, 1, 8, 8), np.float32))
    (tmp_path / "bad.toml").write_text('[[rule]]\ntensr = "x"\nexcess = 1\n')
    (tmp_path / "cut.toml").write_text("[[rule]\n")
    (tmp_path / "recipe.toml").write_text("[image]\nfoo = 1\n")
    (tmp_path / "foreign" / "reference").mkdir(parents=True)
    (tmp_path / "foreign" / "reference" / "thesis.txt").write_text("mine")
    m = Qdq(dtype="int8")
    a, b = (m.qdq(m.input(name, (1, 3, 8, 8)), 0.02) for name in "ab")
    onnx.save(m.model(m.qdq(m.op("Add", [a, b]), 0.04)), tmp_path / "two.onnx")
    m = Qdq(dtype="int8")
    onnx.save(m.model(m.qdq(m.conv(m.qdq(m.input("x", (1, 3, "H", "W")), 0.02), 4), 0.3)), tmp_path / "open.onnx")
    m = Qdq(dtype="int8")
    x = m.qdq(m.input("x", (1, 3)), 0.02)
    x = m.qdq(m.op("Relu", [x], name="first"), 0.02)
    onnx.save(m.model(m.qdq(m.op("LeakyRelu", [x], name="Relu"), 0.02)), tmp_path / "ambiguous.onnx")
    return tmp_path


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_answered_in_one_line_that_names_the_way_out(
    run: Run, bad_files: Path, digits: Path, fixtures_dir: Path, what: str
) -> None:
    arguments, said = MISTAKES[what]
    paths = {"M": digits, "P": fixtures_dir / "digits" / "00_0.png"}
    before = sorted(bad_files.rglob("*"))
    assert_trouble(run(*(paths.get(a, a) for a in arguments)), *said)
    assert sorted(bad_files.rglob("*")) == before, "a refused command leaves nothing behind"


def test_a_model_of_another_network_ends_without_a_verdict(run: Run, digits: Path, fixtures_dir: Path) -> None:
    """Its input has the same name and another shape: found out only by running it."""
    code, out, err = run("diff", digits, "--candidate-model", fixtures_dir / "detector_qdq_s8.onnx")
    assert "internal error" not in err
    assert code in (2, 3)
    assert out.startswith("INCONCLUSIVE") == (code == 3)


def test_no_command_shows_the_commands_on_stderr(run: Run) -> None:
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "Usage: equivcheck" in err
    assert all(command in err for command in ("diff", "split", "inspect", "backends"))


def test_the_help_shows_its_examples_one_a_line(run: Run) -> None:
    _, out, _ = run("--help")
    assert "\\b" not in out
    assert any(line.strip() == "equivcheck diff model.onnx --split-at GlobalAveragePool" for line in out.splitlines())


# -- interrupted, cut off ----------------------------------------------------------------------------------------------


def test_ctrl_c_is_130_and_leaves_no_half_written_file(fixtures_dir: Path, tmp_path: Path) -> None:
    samples = [a for k in range(2000) for a in ("-i", f"random:{k}")]
    arguments = ["diff", str(fixtures_dir / "detector_qdq_s8.onnx"), *samples, "--json", "r.json", "--save", "kept"]
    process = subprocess.Popen([*COMMAND, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    maps = Path(f"/proc/{process.pid}/maps")
    while "onnxruntime" not in maps.read_text() and time.monotonic() < deadline:  # wait until it is past its imports
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), err  # for a shell both are 130
    assert out == b""
    kept = len(list(tmp_path.glob("kept/.*.unfinished/[0-9]*.json")))
    said = r"\d+ finished samples? kept beside kept/reference.*; the same command goes on behind that"
    assert re.fullmatch(f"equivcheck: interrupted; {said if kept else 'nothing was written'}\n", err.decode()), err
    assert [path.name for path in tmp_path.iterdir()] in ([], ["kept"])
    assert not list(tmp_path.glob("kept/*/manifest.json"))


def test_ctrl_c_says_one_line(run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(request: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("equivcheck.check.run", interrupted)
    assert run("diff", digits) == (130, "", "equivcheck: interrupted; nothing was written\n")


def test_ctrl_c_says_what_is_kept_of_either_side(run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stops(FakeBackend):
        def open(self, model: OnnxModel) -> Session:
            raise KeyboardInterrupt

    monkeypatch.setattr("equivcheck.backends.registry.backend", lambda spec: Stops() if spec == "fake" else ort)
    ort = backend("ort")
    assert run("diff", digits, "-i", "random:1", "-c", "fake", "--save", "kept") == (
        130,
        "",
        "equivcheck: interrupted; 1 finished sample kept beside kept/reference; the same command goes on behind that\n",
    )


# -- a long run --------------------------------------------------------------------------------------------------------


def slow(request: Request) -> Result:
    request.progress("sample 1 of 1: cat.png")
    time.sleep(0.4)
    raise InputError("enough")


def test_a_long_run_shows_life_in_a_log_by_whole_lines(
    run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("equivcheck.cli.streams._PERIOD", 0.1)
    monkeypatch.setattr("equivcheck.check.run", slow)
    code, out, err = run("diff", digits, "-i", "random:1")
    assert (code, out) == (2, "")
    *life, last = err.splitlines()
    assert last == "equivcheck: enough"
    assert 1 <= len(life) <= 4
    assert set(life) == {"equivcheck: 0:00 sample 1 of 1: cat.png"}
    assert "\r" not in err
    time.sleep(0.3)
    assert capfd.readouterr().err == "", "it goes on after the command has ended"


def test_on_a_terminal_an_error_stands_on_a_line_of_its_own(
    run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equivcheck.check.run", slow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, err = run("diff", digits, "-i", "random:1")
    assert err == "\r\x1b[Ksample 1 of 1: cat.png\r\x1b[Kequivcheck: enough\n"


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    "arguments", [["diff", "M", "-c", "ort"], ["diff", "M", "-c", "ort", "--json", "-"], ["--help"]]
)
def test_a_reader_that_leaves_is_never_exit_code_1(digits: Path, arguments: list[str]) -> None:
    pipe = closed_pipe()
    given = [str(digits) if a == "M" else a for a in arguments]
    done = subprocess.run([*COMMAND, *given], stdout=pipe, stderr=subprocess.PIPE, timeout=60)
    os.close(pipe)
    assert b"Traceback" not in done.stderr
    assert done.returncode != 1


def test_head_takes_the_first_line_and_nobody_complains(digits: Path) -> None:
    command = f"'{sys.executable}' -m equivcheck diff '{digits}' -c ort -v | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("EQUIVALENT")
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_said_as_that(digits: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "diff", str(digits), "-c", "ort"], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 2
    assert b"No space left" in done.stderr
    assert b"internal error" not in done.stderr


# -- JSON and recordings -----------------------------------------------------------------------------------------------


def test_json_on_stdout_is_json_and_nothing_else(run: Run, digits: Path, picture: list[object]) -> None:
    code, out, err = run("diff", digits, *picture, "--json", "-")
    assert (code, err) == (0, "")
    parsed = json.loads(out)
    assert (parsed["schema"], parsed["verdict"]) == ("equivcheck/1", "equivalent")
    assert from_json(out.encode()).equivalent


def test_json_to_a_file_keeps_the_screen_and_the_exit_code(run: Run, digits: Path, fixtures_dir: Path) -> None:
    floor = fixtures_dir / "digits_qdq_s8_floor.onnx"
    Path("r.json").write_text("older")
    code, out, err = run("diff", digits, "-c", "ort", "--candidate-model", floor, "--json", "r.json")
    assert (code, err) == (1, "")
    result = from_json(Path("r.json").read_bytes())
    assert result.verdict == "different"
    assert out == f"{result}\n"
    assert [p.name for p in Path.cwd().iterdir()] == ["r.json"]


def test_save_may_be_repeated_and_says_so_twice(run: Run, digits: Path) -> None:
    for _ in range(2):
        assert run("diff", digits, "-c", "ort", "--save", "kept")[0] == 0
    names = sorted(str(p.relative_to(Path.cwd())) for p in Path("kept").absolute().rglob("*") if p.is_file())
    assert names == [
        f"kept/{side}/{f}" for side in ("candidate", "reference") for f in ("0000.safetensors", "manifest.json")
    ]


def test_the_last_line_repeats_the_run(run: Run, digits: Path, picture: list[object]) -> None:
    code, out, _ = run("diff", digits, *picture, "--split-at", "#6", "-c", "vnpu:profile=ort,target=all")
    again = next(line for line in out.splitlines() if line.startswith("  again"))
    shown = again.removeprefix("  again").strip()
    done = subprocess.run(
        shown.replace("equivcheck", f"'{sys.executable}' -m equivcheck", 1), shell=True, capture_output=True, text=True
    )
    assert done.returncode == code
    assert done.stdout.splitlines()[:-1] == out.splitlines()[:-1]


# -- screens -----------------------------------------------------------------------------------------------------------


def plain(screen: str) -> str:
    """The screen without what belongs to the machine (versions, CPU, paths) or to the model's numbers (dB, LSB)."""
    screen = re.sub(r"\d+\.\d dB", "NN.N dB", re.sub(r"sha256 [0-9a-f]{8}", "sha256 SHA", screen))
    screen = re.sub(r"\d LSB", "N LSB", re.sub(r"Bits differ in \d\.", "Bits differ in N.", screen))
    screen = re.sub(r"ort \d[\w.]*, CPU[^,]*", "ort VERSION, CPU", screen)
    screen = re.sub(r" +note +the software of a real NPU is here too.*\n", "", screen)
    return re.sub(r"equivcheck diff .*", "equivcheck diff ...", screen)


EQUIVALENT = """\
EQUIVALENT   9 of 9 steps judged; every judged step is a legal evaluation of the model. Bits differ in N.

  model      digits_qdq_s8.onnx, int8 QDQ, 36 nodes, sha256 SHA
  input      00_0.png -> image 1x1x8x8 float32, sha256 SHA; the same bytes for both
  reference  ort VERSION, CPU, optimisation all; measuring did not change its result
  candidate  vnpu tflite-reference, target warboy: A SOFTWARE NPU, NOT YOUR BOARD (see: equivcheck backends)
  ran on     NPU 8 steps, CPU 1 (GlobalAveragePool is not on warboy's list); 2 crossings, 544 B per inference

            step                             type  on   beyond rounding (limit)  off  since the input      SNR
  split GlobalAveragePool_pooled (GlobalAveragePool)
    before  #6 Conv               down_relu  int8  NPU              0.00 (0.15)    0            N LSB  NN.N dB  equivalent
    after   #7 GlobalAveragePool  pooled     int8  CPU              0.00 (0.30)    0            N LSB  NN.N dB  equivalent
  model output
    output  #9 Gemm               logits     int8  NPU              0.00 (0.15)    0            N LSB  NN.N dB  equivalent

  task       top-1 the same (0), margin 7N LSB; top-5 5 of 5
  LSB = one quantisation step of that tensor; limits: semantics
  next       -v all 9 steps   --json -   --save DIR keeps the recordings
  again      equivcheck diff ...
"""


def test_the_screen_of_an_equivalent_run(run: Run, digits: Path, picture: list[object]) -> None:
    """Golden. The pool is on the CPU: 32 x 4 x 4 codes go there, 32 come back, 544 B."""
    _, out, _ = run("diff", digits, "--split-at", "GlobalAveragePool", *picture)
    assert plain(out) == EQUIVALENT


def test_the_screen_of_a_culprit_names_it_shows_evidence_and_what_next(
    run: Run, digits: Path, fixtures_dir: Path, picture: list[object]
) -> None:
    floor = fixtures_dir / "digits_qdq_s8_floor.onnx"
    _, out, _ = run("diff", digits, "-c", "ort", "--candidate-model", floor, *picture)
    lines = plain(out).splitlines()
    assert re.match(
        r"DIFFERENT   1 culprit: step #7 GlobalAveragePool 'GlobalAveragePool_pooled'\. 8 other steps", lines[0]
    )
    assert lines[2] == "  #7 GlobalAveragePool GlobalAveragePool_pooled   int8 1x32x1x1"
    assert re.search(r"the candidate is 0\.\d[\dN] LSB beyond correct rounding, the limit is 0\.30", lines[3])
    assert any("the reference rounds right on all 32" in line for line in lines)
    assert any("that would also hide truncation in this step" in line for line in lines)
    assert "             runs another model file, sha256 SHA" in lines
    assert any(line.startswith("  next       --split-at '#7'") for line in lines)


def test_the_screen_without_an_input_says_that_a_real_picture_tests_more(run: Run, digits: Path) -> None:
    _, out, _ = run("diff", digits, "-c", "ort")
    assert "RANDOM (seed 0): a real picture tests more (-i photo.jpg --preprocess recipe.toml)" in out


def test_verbose_lists_every_step_with_its_full_name(run: Run, digits: Path, picture: list[object]) -> None:
    _, out, _ = run("diff", digits, *picture, "-v")
    codes = [n.output[0] for n in onnx.load(digits).graph.node if n.op_type == "QuantizeLinear"]
    assert [line.split()[3] for line in out.splitlines() if line.startswith(("    tap", "    output  #9 Gemm "))][
        -9:
    ] == codes


def test_a_name_of_800_characters_does_not_widen_the_screen(run: Run, tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    x = m.qdq(m.input("x", (1, 3, 4, 4)), 0.02)
    made = m.conv(x, 4, out="/".join(["module"] * 120) + "/last")
    onnx.save(m.model(m.dq(m.q(made, 0.3, 0, out=made + "_q"))), tmp_path / "long.onnx")
    _, out, _ = run("diff", "long.onnx", "--split-at", "Conv")
    assert max(map(len, out.splitlines())) < 140


def test_names_beyond_ascii_are_selected_and_shown_as_they_are(run: Run, tmp_path: Path, digits: Path) -> None:
    model = onnx.load(digits)
    for node in model.graph.node:
        if node.name == "GlobalAveragePool_pooled":
            node.name = "pool/größe ∑"
    onnx.save(model, tmp_path / "utf8.onnx")
    code, out, _ = run("diff", "utf8.onnx", "--split-at", "pool/größe ∑", "-c", "ort")
    assert code == 0
    assert "größe ∑" in out


def test_the_help_names_the_exit_codes_and_shows_examples(run: Run) -> None:
    code, out, err = run("diff", "--help")
    assert (code, err) == (0, "")
    assert "Exit codes: 0 equivalent, 1 different, 2 trouble" in out
    assert "equivcheck diff model.onnx --split-at GlobalAveragePool" in out


def test_a_changed_weight_is_still_read_from_the_file_given(run: Run, tmp_path: Path, digits: Path) -> None:
    """Two runs in one process share nothing: the second sees the second file."""
    model = onnx.load(digits)
    onnx.save(model, tmp_path / "m.onnx")
    assert run("diff", digits, "-c", "ort", "--candidate-model", "m.onnx")[0] == 0
    conv = next(n for n in model.graph.node if n.op_type == "Conv")
    weight = next(n for n in model.graph.node if n.output[0] == conv.input[1]).input[0]
    tensor = next(t for t in model.graph.initializer if t.name == weight)
    tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), weight))
    onnx.save(model, tmp_path / "m.onnx")
    assert run("diff", digits, "-c", "ort", "--candidate-model", "m.onnx")[0] == 1


# -- files that must not be lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["diff", "{}", "--json", "{}"], ["inspect", "{}", "--json", "{}"], ["convert", "{}", "-o", "{}"]]
)
def test_a_command_does_not_write_over_the_model_it_reads(
    run: Run, digits: Path, tmp_path: Path, command: list[str]
) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(digits.read_bytes())
    assert_trouble(run(*[word.format(model) for word in command]), "cannot write", "the command reads it")
    assert model.read_bytes() == digits.read_bytes()


def test_a_recording_of_another_model_is_not_replaced(
    run: Run, digits: Path, fixtures_dir: Path, tmp_path: Path
) -> None:
    assert run("record", digits, "-i", "random:1", "-o", tmp_path / "kept")[0] == 0
    other = fixtures_dir / "detector_qdq_s8.onnx"
    assert_trouble(
        run("record", other, "-i", "random:1", "-o", tmp_path / "kept"),
        "holds a recording of another model",
        "digits_qdq_s8.onnx",
    )
    assert_trouble(run("diff", other, "--save", tmp_path / "kept"), "it is a recording", "both sides")
