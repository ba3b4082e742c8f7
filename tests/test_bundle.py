"""Bundles: what is carried to a board, what `run.py` survives there, and what `compare` says of what comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

import equivcheck
from builder import Qdq, feeds
from environments import PYTHON38
from equivcheck.backends.registry import backend
from equivcheck.bundle import pack_bundle
from equivcheck.engines.bundle_runner import Bundle, Clock, spoken
from equivcheck.errors import InputError, OutputError, RecordingError, SpecError
from equivcheck.models.onnx.cut import dequantised
from equivcheck.models.onnx.heads import head_to, wanted_values
from equivcheck.models.onnx.load import OnnxModel, load_model, model_from_bytes
from equivcheck.recording import Recording
from equivcheck.result import Result
from equivcheck.tape import open_tape
from small_models import TRAPS

TEN_LINES = Path(__file__).parent / "backends" / "scripts" / "run_ort.py"
Script = Callable[[str], Path]


@dataclass(frozen=True)
class Ran:
    """How `run.py` ended."""

    code: int
    out: str
    err: str


def run(folder: Path, *arguments: object, python: str = sys.executable, env: dict[str, str] | None = None) -> Ran:
    """Start `run.py` as by hand."""
    command = [python, "run.py", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=120, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def small(name: str = "two_readers") -> OnnxModel:
    return model_from_bytes(TRAPS[name](lambda: Qdq(seed=1)).SerializeToString(), f"{name}.onnx")


def packed(model: OnnxModel, folder: Path, backend: str = "ort", samples: int = 1) -> Path:
    inputs = [feeds(model.proto, seed) for seed in range(samples)]
    return pack_bundle(model, backend=backend, inputs=inputs, save_to=folder)


def came_back(folder: Path, model: OnnxModel, sample: int = 0) -> Recording:
    return open_tape(folder, model.graph).read(sample)


def live(spec: str, model: OnnxModel, seed: int = 0) -> Recording:
    with backend(spec).open(model) as session:
        return session.run("one", feeds(model.proto, seed))


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script of these lines, in which `ort(model_path, feeds)` is ONNX Runtime, and `ends(path)` a model's outputs."""

    def written(text: str) -> Path:
        path = tmp_path / "board.py"
        path.write_text(
            TEN_LINES.read_text().replace("def run(", "def ort(")
            + "\ndef ends(path):\n    return [o.name for o in onnxruntime.InferenceSession(path).get_outputs()]\n"
            + text
        )
        return path

    return written


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment for `run.py`; afterwards no process of it lives, and its folder of temporary files is empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield {"TMPDIR": str(folder)}
    mark = f"TMPDIR={folder}".encode()
    deadline = time.monotonic() + 5
    while (left := [*folder.iterdir(), *_living(mark)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _living(mark: bytes) -> list[str]:
    """Command lines of processes, other than this one, in whose environment a variable begins with the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marked = any(line.startswith(mark) for line in (process / "environ").read_bytes().split(b"\0"))
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if marked and int(process.name) != os.getpid() and state != "Z":
                found.append((process / "cmdline").read_text(errors="replace"))
        except OSError:
            continue  # it ended meanwhile
    return found


# -- there and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["digits_qdq_s8", "digits_qop_u8", "detector_qdq_u8"])
def test_a_bare_python_3_8_that_ran_it_by_hand_gives_the_verdict_of_a_live_run(
    fixtures_dir: Path, tmp_path: Path, form: str
) -> None:
    if not PYTHON38.ready:
        reason = f"no {PYTHON38.folder}: python tests/environments.py builds it"
        print(reason)
        pytest.skip(reason)
    model = fixtures_dir / f"{form}.onnx"
    folder = pack_bundle(model, inputs=["random:1", "random:2"], save_to=tmp_path / "carry")
    ran = run(folder, python=str(PYTHON38.interpreter))
    assert (ran.code, ran.err) == (0, "")
    (folder / "results").rename(tmp_path / "back")  # nothing else is carried back

    result = equivcheck.compare(tmp_path / "back", model=model)
    expected = equivcheck.diff(model, candidate="ort", inputs=["random:1", "random:2"], second_opinion=False)
    assert (result.verdict, result.coverage.judged) == (expected.verdict, expected.coverage.judged)
    assert [sample.feeds for sample in result.samples] == [sample.feeds for sample in expected.samples]
    assert result.candidate.version == "1.19.2"
    assert "Python 3.8" in result.candidate.device
    assert result.candidate.observation.disturbed is False


@pytest.mark.parametrize("form", ["digits_qdq_s8", "digits_qop_u8", "detector_qdq_s8"])
def test_the_same_engine_gives_the_same_figures_as_live(fixtures_dir: Path, tmp_path: Path, form: str) -> None:
    model = fixtures_dir / f"{form}.onnx"
    folder = pack_bundle(model, inputs="random:1", save_to=tmp_path / "carry")
    reference = equivcheck.record(model, inputs="random:1", save_to=tmp_path / "cpu")
    assert run(folder).code == 0

    def figures(result: Result) -> object:
        return [
            (
                t.name,
                t.verdict,
                t.local.candidate if t.local else None,
                t.accumulated.mismatched if t.accumulated else 0,
            )
            for t in result.tensors
        ]

    result = equivcheck.compare(reference, folder, model=model)
    assert result.verdict == "equivalent"
    assert figures(result) == figures(equivcheck.diff(model, candidate="ort", inputs="random:1", second_opinion=False))


SMALL = (
    "two_readers codes_are_outputs codes_are_inputs_and_outputs if_body_with_codes float_tail split_of_codes "
    "inner_dequantised_value_is_an_output_too read_with_another_scale_than_written input_quantised_twice swish"
).split()


@pytest.mark.parametrize("name", SMALL)
def test_every_small_model_comes_back_as_a_script_sees_it_live(tmp_path: Path, name: str) -> None:
    model = small(name)
    assert run(packed(model, tmp_path / "carry", f"script:{TEN_LINES}")).code == 0
    found, expected = came_back(tmp_path / "carry", model), live(f"script:{TEN_LINES}", model)
    assert found.failed == expected.failed
    assert found.off_grid == expected.off_grid
    assert found.disturbed == expected.disturbed
    for ours, theirs in ((found.values, expected.values), (found.outputs, expected.outputs)):
        assert set(ours) == set(theirs)
        for key, array in theirs.items():
            np.testing.assert_array_equal(ours[key], array)


@pytest.mark.parametrize("name", ["two_readers", "one_weight_for_two_convs", "if_body_with_codes"])
def test_models_keep_their_opset_and_ir_and_every_weight(tmp_path: Path, name: str) -> None:
    """A head is put together on the board; it is the very model that would run here."""
    model = small(name)
    bundle = Bundle(str(packed(model, tmp_path / "carry")), str(tmp_path / "results"))
    whole = onnx.ModelProto.FromString(bundle.model(0))
    assert whole == model.proto
    for number, value in enumerate(wanted_values(model.graph), 1):
        made = onnx.ModelProto.FromString(bundle.model(number))
        expected = head_to(model, [dequantised(model.graph, value)])
        assert (made.ir_version, list(made.opset_import)) == (model.proto.ir_version, list(model.proto.opset_import))
        for proto in (made, expected):
            tensors = sorted(proto.graph.initializer, key=lambda tensor: tensor.name)
            copies = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in tensors]
            del proto.graph.initializer[:]
            proto.graph.initializer.extend(copies)
        assert made == expected


def test_heads_share_their_weights_on_disk(fixtures_dir: Path, tmp_path: Path) -> None:
    model = load_model(fixtures_dir / "detector_qdq_u8.onnx")
    folder = packed(model, tmp_path / "carry")
    heads = sum(len(Bundle(str(folder), "").model(number)) for number in range(1, len(wanted_values(model.graph)) + 1))
    stored = sum(path.stat().st_size for path in (folder / "models").iterdir() if path.name != "model.onnx")
    assert (folder / "models" / "weights.bin").stat().st_size < model.proto.ByteSize()
    assert stored < heads / 2


def test_a_value_may_be_called_file(tmp_path: Path) -> None:
    """`numpy.savez` cannot take that name."""
    m = Qdq(seed=1)
    x = m.q(m.input("file", (1, 3, 8, 8)), 0.02)
    model = model_from_bytes(m.model(m.dq(m.q(m.conv(m.dq(x), 4), 0.05))).SerializeToString(), "file.onnx")
    assert run(packed(model, tmp_path / "carry")).code == 0
    assert set(came_back(tmp_path / "carry", model).values) == set(model.graph.stored)


def test_limits_that_a_script_or_the_engine_declares_come_back(tmp_path: Path, script: Script) -> None:
    path = script("\nLEGAL_EXCESS = {'Softmax': (1.0, 'rounds down')}\nrun = ort\n")
    model = small("pools_and_softmax")
    assert run(packed(model, tmp_path / "one", f"script:{path}")).code == 0
    assert open_tape(tmp_path / "one", model.graph).declared == {"Softmax": (1.0, "rounds down")}
    assert run(packed(model, tmp_path / "two")).code == 0
    assert open_tape(tmp_path / "two", model.graph).declared == backend("ort").legal_excess()


# -- what happens on a board ---------------------------------------------------------------------------------------------


def test_a_head_that_takes_the_interpreter_with_it_costs_that_value_only(
    tmp_path: Path, script: Script, alone: dict[str, str]
) -> None:
    model = small()
    fatal = dequantised(model.graph, wanted_values(model.graph)[1])
    path = script(
        f"""
import os, sys
def run(model_path, feeds):
    if ends(model_path) == [{fatal!r}]:
        print("driver: no such layer", file=sys.stderr, flush=True)
        os.abort()
    return ort(model_path, feeds)
"""
    )
    folder = packed(model, tmp_path / "carry", f"script:{path}", samples=2)
    ran = run(folder, env=alone)
    assert ran.code == 1
    assert "failed: the engine was killed by SIGABRT: driver: no such layer" in ran.out
    assert "run.py --again" in ran.out
    for sample in range(2):
        found = came_back(folder, model, sample)
        assert list(found.failed) == [wanted_values(model.graph)[1]]
        assert "SIGABRT" in found.failed[wanted_values(model.graph)[1]]
        assert set(found.values) | set(found.failed) == set(model.graph.stored)
    proto = tmp_path / "model.onnx"
    onnx.save(model.proto, proto)
    result = equivcheck.compare(folder, model=proto)
    assert result.verdict == "inconclusive"
    assert result.coverage.judged > 0


def test_one_that_hangs_is_ended_and_named(tmp_path: Path, script: Script, alone: dict[str, str]) -> None:
    model = small()
    slow = dequantised(model.graph, wanted_values(model.graph)[0])
    path = script(
        f"\nimport time\ndef run(model_path, feeds):\n"
        f"    time.sleep(600 * (ends(model_path) == [{slow!r}]))\n    return ort(model_path, feeds)\n"
    )
    folder = packed(model, tmp_path / "carry", f"script:{path},timeout=3")
    ran = run(folder, env=alone)
    assert ran.code == 1
    assert came_back(folder, model).failed == {
        wanted_values(model.graph)[0]: f"on {os.uname().nodename}: no answer within 3 s"
    }


def test_after_three_deaths_in_a_row_it_stops_and_goes_on_when_started_again(
    tmp_path: Path, script: Script, alone: dict[str, str]
) -> None:
    model = small("residual_adds")
    path = script("\nimport os\ndef run(model_path, feeds):\n    os.kill(os.getpid(), 9)\n")
    folder = packed(model, tmp_path / "carry", f"script:{path}")
    ran = run(folder, env=alone)
    assert ran.code == 2
    assert "died or hung on 3 models in a row" in ran.err
    assert len(list((folder / "results").rglob("*.failed"))) == 3
    assert run(folder, env=alone).code == 2
    assert len(list((folder / "results").rglob("*.failed"))) == 6


def test_what_the_engine_refuses_is_named_in_its_words(tmp_path: Path, script: Script) -> None:
    model = small()
    path = script(
        "\ndef run(model_path, feeds):\n    if len(ends(model_path)) == 1:\n"
        "        raise NotImplementedError('no Relu on this board')\n    return ort(model_path, feeds)\n"
    )
    folder = packed(model, tmp_path / "carry", f"script:{path}")
    assert run(folder).code == 1
    found = came_back(folder, model)
    assert set(found.failed) == set(wanted_values(model.graph))
    assert all("no Relu on this board" in reason for reason in found.failed.values())
    assert set(found.outputs) == set(model.graph.outputs)


def test_half_the_outputs_are_kept(tmp_path: Path, script: Script) -> None:
    model = small()
    first, second = model.graph.outputs
    path = script(
        f"\ndef run(model_path, feeds):\n    found = ort(model_path, feeds)\n"
        f"    return {{n: a for n, a in found.items() if n != {second!r} or len(found) == 1}}\n"
    )
    folder = packed(model, tmp_path / "carry", f"script:{path}")
    assert run(folder).code == 0
    found = came_back(folder, model)
    assert list(found.outputs) == [first]
    assert set(found.values) == set(model.graph.stored)


def test_stopped_in_the_middle_it_goes_on_where_it_was(tmp_path: Path, script: Script, alone: dict[str, str]) -> None:
    model = small("residual_adds")
    log = tmp_path / "log"
    path = script(
        f"\nimport time\ndef run(model_path, feeds):\n    print(*ends(model_path), file=open({str(log)!r}, 'a'))\n"
        f"    time.sleep(0.3)\n    return ort(model_path, feeds)\n"
    )
    folder = packed(model, tmp_path / "carry", f"script:{path}")
    started = subprocess.Popen(
        [sys.executable, "run.py"], cwd=folder, env={**os.environ, **alone}, stderr=subprocess.PIPE, text=True
    )
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=20)
    assert (started.returncode, said) == (130, "run.py: stopped; start it again to go on\n")
    assert "not run yet" in str(came_back(folder, model).failed)

    assert run(folder, env=alone).code == 0
    models = len(wanted_values(model.graph)) + 1
    assert models <= len(log.read_text().splitlines()) <= models + 1  # the one that was cut off runs twice
    assert not came_back(folder, model).failed
    assert not list(folder.rglob("*.half"))


def test_killed_outright_it_leaves_no_engine_behind(tmp_path: Path, script: Script, alone: dict[str, str]) -> None:
    """Its folder of temporary files is all that nobody can remove then."""
    path = script(
        f"\nimport time\ndef run(model_path, feeds):\n    open({str(tmp_path / 'runs')!r}, 'w').close()\n    time.sleep(600)\n"
    )
    folder = packed(small(), tmp_path / "carry", f"script:{path}")
    started = subprocess.Popen([sys.executable, "run.py"], cwd=folder, env={**os.environ, **alone})
    while not (tmp_path / "runs").exists():
        time.sleep(0.02)
    started.kill()
    started.wait()
    deadline = time.monotonic() + 5
    while _living(f"TMPDIR={alone['TMPDIR']}".encode()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _living(f"TMPDIR={alone['TMPDIR']}".encode())
    for left in Path(alone["TMPDIR"]).iterdir():
        shutil.rmtree(left)


def test_it_says_how_far_it_is_and_how_long_it_will_take(tmp_path: Path, script: Script) -> None:
    model = small()
    path = script(
        "\nimport time\ndef run(model_path, feeds):\n    time.sleep(0.2)\n    return ort(model_path, feeds)\n"
    )
    ran = run(packed(model, tmp_path / "carry", f"script:{path}", samples=2))
    models = len(wanted_values(model.graph)) + 1
    assert f"model 1 of {models}: the whole model\n" in ran.out
    assert f"{2 * models - 1} runs are left: at most about " in ran.out
    assert f"model {models} of {models}: #" in ran.out
    assert " left\n" in ran.out
    assert f"{models} of {models} models ran on 2 inputs" in ran.out


def test_what_failed_is_tried_again_when_that_is_asked(tmp_path: Path, script: Script) -> None:
    model = small()
    path = script(
        f"\nimport os\ndef run(model_path, feeds):\n    if not os.path.exists({str(tmp_path / 'power')!r}):\n"
        "        raise RuntimeError('no power')\n    return ort(model_path, feeds)\n"
    )
    folder = packed(model, tmp_path / "carry", f"script:{path}")
    assert run(folder).code == 1
    (tmp_path / "power").touch()
    assert run(folder).code == 1
    assert run(folder, "--again").code == 0
    assert not came_back(folder, model).failed


# -- trouble -------------------------------------------------------------------------------------------------------------


def assert_trouble(ran: Ran, said: str) -> None:
    """Exit code 2, and one line that says it."""
    assert ran.code == 2, ran
    assert ran.err.startswith("run.py: ")
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A Python into which nothing is installed; the folder for what is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return next((tmp_path / "bare" / "lib").glob("python3*")) / "site-packages"


def test_a_board_without_onnxruntime_is_told_how_to_get_it(tmp_path: Path, bare: Path, alone: dict[str, str]) -> None:
    for package in Path(np.__file__).parents[1].glob("numpy*"):
        (bare / package.name).symlink_to(package)
    folder = packed(small(), tmp_path / "carry")
    python = str(tmp_path / "bare" / "bin" / "python")
    ran = run(folder, python=python, env=alone)
    assert_trouble(ran, f"onnxruntime is not installed for {python}: {python} -m pip install onnxruntime")
    assert "run.py --script FILE" in ran.err
    assert not list((folder / "results").rglob("*.failed"))


def test_a_board_without_numpy_is_told_so(tmp_path: Path, bare: Path) -> None:
    python = str(tmp_path / "bare" / "bin" / "python")
    assert bare.is_dir()
    ran = run(packed(small(), tmp_path / "carry"), python=python)
    assert_trouble(ran, f"numpy is not installed for {python}: {python} -m pip install numpy")


def test_a_script_that_does_not_start_is_told_and_nothing_is_blamed_on_a_model(tmp_path: Path, script: Script) -> None:
    folder = packed(small(), tmp_path / "carry")
    assert_trouble(run(folder, "--script", script("\nimport vendor_sdk_9\n")), "No module named 'vendor_sdk_9'")
    assert_trouble(run(folder, "--script", script("\nimport os\nos.abort()\n")), "killed by SIGABRT")
    assert_trouble(run(folder, "--script", "nowhere.py"), "there is no file")
    assert not list((folder / "results").rglob("*.failed"))


def test_a_script_named_there_takes_the_place_of_the_engine(tmp_path: Path) -> None:
    model = small()
    folder = packed(model, tmp_path / "carry")
    assert run(folder, "--script", TEN_LINES).code == 0
    assert open_tape(folder, model.graph).side.engine == "run_ort.py"


def test_results_of_two_engines_are_not_mixed(tmp_path: Path) -> None:
    folder = packed(small(), tmp_path / "carry")
    assert run(folder).code == 0
    next((folder / "results").rglob("0001.npz")).unlink()
    assert_trouble(run(folder, "--script", TEN_LINES), "holds a run of onnxruntime")
    assert run(folder, "--script", TEN_LINES, "--results", tmp_path / "other").code == 0


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    folder = packed(small(), tmp_path / "carry")
    ran = run(folder, "--results", "/proc/results")
    assert_trouble(ran, "cannot write /proc/results")
    assert "--results DIR" in ran.err


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        reason = f"no small disk without the right to mount: {mounted.stderr.strip()}"
        print(reason)
        pytest.skip(reason)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_stops_it_and_it_goes_on_when_there_is_room(
    tmp_path: Path, full_disk: Path, alone: dict[str, str]
) -> None:
    model = small()
    folder = packed(model, tmp_path / "carry", samples=3)
    (full_disk / "other").write_bytes(bytes(200_000))
    ran = run(folder, "--results", full_disk / "results", env=alone)
    assert_trouble(ran, "No space left on device")
    assert not list(full_disk.rglob("*.failed"))
    (full_disk / "other").unlink()
    assert run(folder, "--results", full_disk / "results", env=alone).code == 0
    assert not came_back(full_disk / "results", model).failed


@pytest.mark.parametrize("file", ["models/0001.head", "models/weights.bin", "inputs/0000.npz"])
def test_a_file_that_was_damaged_on_the_way_is_found_first(tmp_path: Path, file: str) -> None:
    folder = packed(small(), tmp_path / "carry")
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-1] + b"\x00\x0d")
    assert_trouble(run(folder), f"{file} is not what was packed")
    (folder / file).unlink()
    assert_trouble(run(folder), f"{file}: No such file")


def test_a_provider_that_only_the_board_has_may_be_asked_for(tmp_path: Path) -> None:
    folder = packed(small(), tmp_path / "carry", "ort:provider=VSINPU")
    assert_trouble(run(folder), "this onnxruntime has no execution provider 'VSINPU'; it has ")
    assert run(packed(small(), tmp_path / "cpu", "ort:provider=cpu,optimization=disable")).code == 0


# -- mistakes here -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("vnpu", "a bundle runs ort or script:FILE, not vnpu"),
        ("ort@ssh=board", "a bundle is carried by hand"),
        ("ort:observe=plain", "a bundle observes by heads"),
        ("ort:optimization=most", "is not one of"),
        ("script:nowhere.py", "No such file"),
    ],
)
def test_a_backend_that_cannot_be_carried_is_refused(tmp_path: Path, spec: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        packed(small(), tmp_path / "carry", spec)
    assert not list(tmp_path.iterdir())


def test_an_input_that_is_no_number_is_refused(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(InputError, match="NaN"):
        pack_bundle(
            model, inputs={name: array * np.nan for name, array in feeds(model.proto).items()}, save_to=tmp_path / "b"
        )


def test_what_lies_in_a_folder_is_not_overwritten_but_for_an_older_bundle(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(OutputError, match="exists and is no bundle"):
        packed(small(), tmp_path / "notes")
    folder = packed(small("residual_adds"), tmp_path / "carry")
    packed(small(), folder)
    assert json.loads((folder / "bundle.json").read_text())["model"]["path"] == "two_readers.onnx"
    assert run(folder).code == 0
    with pytest.raises(OutputError, match="holds results"):
        packed(small(), folder)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "carry"}


def test_results_that_are_not_there_or_broken_are_told(tmp_path: Path) -> None:
    model = small()
    folder = packed(model, tmp_path / "carry")
    with pytest.raises(RecordingError, match=r"has no results; run `python3 run\.py`"):
        open_tape(folder, model.graph)
    assert run(folder).code == 0
    with pytest.raises(RecordingError, match="judged with the model; give --model"):
        open_tape(folder, None)
    with pytest.raises(RecordingError, match="leave out the layout"):
        open_tape(folder, model.graph, layout="nhwc")
    broken = folder / "results" / "0000" / "0001.npz"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(RecordingError, match=r"0001.npz cannot be read"):
        came_back(folder, model)
    (folder / "results" / "0000" / "inputs.npz").unlink()
    with pytest.raises(RecordingError, match=r"inputs.npz is missing"):
        came_back(folder, model)
    (folder / "results" / "run.json").write_text("{}")
    with pytest.raises(RecordingError, match=r"run.json cannot be read"):
        open_tape(folder, model.graph)


# -- durations -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (7800, "2 h 10 min")]
)
def test_durations_are_said_as_one_says_them(seconds: float, said: str) -> None:
    assert spoken(seconds) == said


def test_the_time_left_is_that_of_the_pieces_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four ran in 20 s, one was kept: 10 s each."""
    now = iter([100.0, 120.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    clock = Clock(4, "head")
    clock.skip()
    assert clock.at(3, "conv") == "head 4 of 4: conv; about 10 s left"
