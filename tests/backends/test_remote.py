"""Engines in another process: the same figures, every way to die, every way not to start, and nothing left behind."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equivcheck
from backends.ssh_server import SshServer
from builder import Qdq, feeds
from equivcheck.backends import remote
from equivcheck.backends.registry import backend
from equivcheck.backends.remote import EngineFailed, Place, RemoteEngine, Travelling
from equivcheck.backends.spec import parse
from equivcheck.cli import main
from equivcheck.engines.worker import Arena, Stream, pack, unpack
from equivcheck.errors import BackendUnavailable, EngineCrashed, EngineTimeout, SpecError, UnknownOption
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from equivcheck.result import Result
from small_models import TRAPS

ENGINES = Path(equivcheck.__file__).parent / "engines"
HANG_WITH_THE_GIL = "import ctypes; ctypes.PyDLL(None).sleep(100)"

pytestmark = pytest.mark.usefixtures("nothing_left")

Script = Callable[..., str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script whose `run` has the given body; its SPEC. `once`: the body meets only the first call of all."""

    def written(body: str, *, once: bool = False) -> str:
        if once:
            been = str(tmp_path / "been")
            body = f"import os\nif not os.path.exists({been!r}):\n    open({been!r}, 'w').close()\n    {body}"
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        path = tmp_path / "board.py"
        path.write_text(f"def run(model_path, feeds):\n{lines}\n    return run_ort(model_path, feeds)\n{RUN_ORT}")
        return f"script:{path}"

    return written


RUN_ORT = (Path(__file__).parent / "scripts" / "run_ort.py").read_text().replace("def run(", "def run_ort(")


def small(name: str = "conv_relu_chain") -> OnnxModel:
    return model_from_bytes(TRAPS[name](lambda: Qdq(seed=1)).SerializeToString(), "small.onnx")


def saved(tmp_path: Path, model: OnnxModel) -> Path:
    path = tmp_path / "small.onnx"
    path.write_bytes(model.proto.SerializeToString())
    return path


def figures(result: Result) -> dict[str, Any]:
    """All of a result but what names the candidate and its run times."""
    found = json.loads(result.to_json())
    for side in ("reference", "candidate"):
        for key in ("spec", "timings_s"):
            del found[side][key]
    del found["again"]
    return found  # type: ignore[no-any-return]  # the array of a dict of Any


# -- the same figures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def digits(fixtures_dir: Path) -> Callable[[str], Result]:
    def run(candidate: str) -> Result:
        picture, recipe = fixtures_dir / "digits" / "03_3.png", fixtures_dir / "digits.toml"
        return equivcheck.diff(
            fixtures_dir / "digits_qdq_s8.onnx", inputs=str(picture), preprocess=str(recipe), candidate=candidate
        )

    return run


def test_another_interpreter_gives_the_very_same_result(digits: Callable[[str], Result]) -> None:
    expected = figures(digits("ort"))
    assert figures(digits(f"ort@python={sys.executable}")) == expected
    assert figures(digits("ort:timeout=60")) == expected


def test_a_board_behind_ssh_gives_the_very_same_result(digits: Callable[[str], Result], board: SshServer) -> None:
    assert figures(digits(f"ort@ssh={board.address}@python={sys.executable}")) == figures(digits("ort"))


def test_a_bare_python_3_8_with_its_own_onnxruntime_is_enough(digits: Callable[[str], Result], python38: str) -> None:
    result = digits(f"ort@python={python38}")
    assert result.equivalent, str(result)
    assert result.candidate.version == "1.19.2"
    assert result.coverage.judged == result.coverage.steps


def test_a_worker_is_the_engines_own_process(tmp_path: Path) -> None:
    engine = RemoteEngine(Place(), Travelling("ort.py", "OrtEngine"))
    try:
        assert engine.info()["engine"] == "onnxruntime"
        assert engine._worker is not None
        assert engine._worker._process.pid != os.getpid()
        assert os.getpgid(engine._worker._process.pid) != os.getpgid(0)
    finally:
        engine.close()
    engine.close()


def test_a_forgotten_worker_ends_with_its_engine() -> None:
    run = backend(f"ort@python={sys.executable}").deploy(small().proto)
    assert list(run(feeds(small().proto))) == list(small().graph.outputs)
    del run  # the fixture looks for what is left


# -- dying ---------------------------------------------------------------------------------------------------------------

DEATHS = {
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGABRT": "import os; os.abort()",
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_that_dies_once_is_replaced(script: Script, death: str) -> None:
    model = small()
    with backend(script(DEATHS[death], once=True)).open(model) as session:
        recording = session.run("one", feeds(model.proto))
    assert set(recording.values) == set(model.graph.stored)


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_that_dies_twice_says_how_and_its_last_words(script: Script, death: str) -> None:
    model = small()
    body = f"import sys; print('device lost', file=sys.stderr)\n{DEATHS[death]}"
    with backend(script(body)).open(model) as session, pytest.raises(EngineCrashed) as caught:
        session.run("one", feeds(model.proto))
    assert f"the worker was killed by {death} in run (twice)" in caught.value.message
    assert "device lost" in caught.value.last_words


def test_an_exit_code_is_told_too(script: Script) -> None:
    model = small()
    with backend(script("import os; os._exit(7)")).open(model) as session, pytest.raises(EngineCrashed) as caught:
        session.run("one", feeds(model.proto))
    assert "exit code 7" in caught.value.message


def test_what_was_recorded_before_a_crash_is_kept(tmp_path: Path, script: Script) -> None:
    """Of two samples the second kills the engine: the first is in the result, which has no verdict."""
    model = small()
    shape = next(iter(feeds(model.proto).values())).shape
    inputs = [np.zeros(shape, np.float32), np.ones(shape, np.float32)]
    spec = script("import os\nif feeds['x'].any(): os.abort()")
    result = equivcheck.diff(saved(tmp_path, model), inputs=inputs, candidate=spec)
    assert result.verdict == "inconclusive"
    assert "SIGABRT" in str(result)
    assert result.coverage.judged == result.coverage.steps


@pytest.mark.parametrize("body", ["import time; time.sleep(100)", HANG_WITH_THE_GIL], ids=["sleeping", "with_the_GIL"])
def test_an_engine_that_hangs_is_ended_after_its_time_limit(script: Script, body: str) -> None:
    model = small()
    started = time.monotonic()
    with backend(f"{script(body)},timeout=1").open(model) as session, pytest.raises(EngineTimeout, match="within 1 s"):
        session.run("one", feeds(model.proto))
    assert time.monotonic() - started < 10


def test_a_session_goes_on_after_a_timeout(script: Script) -> None:
    model = small()
    with backend(f"{script('import time; time.sleep(100)', once=True)},timeout=2").open(model) as session:
        with pytest.raises(EngineTimeout):
            session.run("one", feeds(model.proto))
        assert set(session.run("two", feeds(model.proto)).values) == set(model.graph.stored)


NOISES = {
    "python": "print('x' * 100000)",
    "descriptor": "import os; [os.write(1, b'\\x00\\xff\\n' * 1000) for _ in range(100)]",
    "C": "import ctypes; libc = ctypes.CDLL(None); libc.printf(b'hello from C\\n'); libc.fflush(None)",
    "child": "import subprocess; subprocess.run(['echo', 'hello from a child'], check=True)",
}


@pytest.mark.parametrize("noise", NOISES)
def test_garbage_on_stdout_does_not_disturb(script: Script, noise: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = small()
    with backend(script(NOISES[noise])).open(model) as session:
        recording = session.run("one", feeds(model.proto))
    assert set(recording.values) == set(model.graph.stored)
    assert capfd.readouterr() == ("", "")


def test_what_an_engine_started_ends_with_it(script: Script) -> None:
    """A server that a vendor's tool leaves behind, say; the fixture looks for it."""
    model = small()
    body = "import subprocess; subprocess.Popen(['sleep', '1000'])"
    with backend(script(body)).open(model) as session:
        session.run("one", feeds(model.proto))


@pytest.mark.parametrize("how", ["DIES", "HANGS"])
def test_an_engine_that_fails_ends_in_exit_code_3_with_clear_words(
    tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    body, said = {"DIES": ("import os; os.abort()", "SIGABRT"), "HANGS": (HANG_WITH_THE_GIL, "within 1 s")}[how]
    code = main(["diff", str(saved(tmp_path, small())), "-c", f"{script(body)},timeout=1"])
    assert code == 3
    assert said in capsys.readouterr().out


# -- interrupted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["import time; time.sleep(100)", HANG_WITH_THE_GIL], ids=["sleeping", "with_the_GIL"])
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_a_host_that_is_interrupted_or_killed_leaves_nothing(
    tmp_path: Path, script: Script, sign: signal.Signals, body: str
) -> None:
    """Ctrl-C reaches the whole foreground group of a terminal; the worker is in none of it."""
    begun = tmp_path / "begun"
    spec = script(f"open({str(begun)!r}, 'w').close()\n{body}")
    command = [sys.executable, "-m", "equivcheck", "diff", str(saved(tmp_path, small())), "-c", spec]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as host:
        while not begun.exists() and host.poll() is None:
            time.sleep(0.05)
        os.killpg(host.pid, sign)
        out, err = host.communicate(timeout=20)
    if sign == signal.SIGINT:
        assert (host.returncode, out) == (130, "")
        assert err.splitlines()[-1].startswith("equivcheck: interrupted")
        assert "Traceback" not in err


# -- ssh -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("death", ["SIGKILL", "SIGABRT"])
def test_a_worker_that_dies_on_a_board_says_so(script: Script, board: SshServer, death: str) -> None:
    model = small()
    spec = f"{script(DEATHS[death])}@ssh={board.address}@python={sys.executable}"
    with backend(spec).open(model) as session, pytest.raises(EngineCrashed, match=f"killed by {death}"):
        session.run("one", feeds(model.proto))


@pytest.mark.parametrize("body", ["import time; time.sleep(100)", HANG_WITH_THE_GIL], ids=["sleeping", "with_the_GIL"])
def test_a_worker_that_hangs_on_a_board_is_ended_there(script: Script, board: SshServer, body: str) -> None:
    model = small()
    spec = f"{script(body)},timeout=2@ssh={board.address}@python={sys.executable}"
    with backend(spec).open(model) as session, pytest.raises(EngineTimeout):
        session.run("one", feeds(model.proto))


def test_a_lost_connection_is_made_again_once(script: Script, board: SshServer) -> None:
    model = small()
    spec = f"{script('pass')}@ssh={board.address}@python={sys.executable}"
    with backend(spec).open(model) as session:
        before = session.run("one", feeds(model.proto))
        session.engine._worker._process.kill()  # type: ignore[attr-defined]  # outside of the public types
        after = session.run("two", feeds(model.proto))
        assert set(after.values) == set(before.values) == set(model.graph.stored)


def test_a_board_that_went_away_ends_in_no_verdict(
    script: Script, board: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    with backend(f"{script('pass')}@ssh={board.address}@python={sys.executable}").open(model) as session:
        session.run("one", feeds(model.proto))
        session.engine._worker._process.kill()  # type: ignore[attr-defined]  # outside of the public types
        monkeypatch.setenv("EQUIVCHECK_SSH", board.ssh + " -p 1")
        with pytest.raises(EngineCrashed, match="cannot be started again"):
            session.run("two", feeds(model.proto))


def unreachable(board: SshServer) -> str:
    return f"ort@ssh={board.address.rpartition(':')[0]}:1"


def stranger(board: SshServer) -> str:
    """The board's key is another than the known one."""
    other = board.known_hosts.parent / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    name = board.known_hosts.read_text().split()[0]
    board.known_hosts.write_text(f"{name} {other.with_suffix('.pub').read_text()}")
    return f"ort@ssh={board.address}"


def unknown(board: SshServer) -> str:
    board.known_hosts.write_text("")
    return f"ort@ssh={board.address}"


def locked_out(board: SshServer) -> str:
    """Our key is another than the one that the board lets in."""
    board.key.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", board.key], input=b"y\n", check=True)
    return f"ort@ssh={board.address}"


MISTAKES: dict[str, tuple[Callable[[SshServer], str], str, str]] = {
    "wrong_host_key": (stranger, "host key is not the one known here", "ssh-keygen -R"),
    "unknown_host_key": (unknown, "host key is not the one known here", "connect once by hand"),
    "wrong_key": (locked_out, "does not let you in", "ssh-copy-id"),
    "nobody_listens": (unreachable, "cannot be reached", "check that it is on"),
    "no_such_host": (lambda board: "ort@ssh=root@nowhere.invalid", "no machine of that name", "check the name"),
    "no_interpreter": (
        lambda board: f"ort@ssh={board.address}@python=/nowhere/python3",
        "no such interpreter there",
        "@python=",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_board_that_cannot_be_used_is_exit_code_2_and_one_line_with_the_way_out(
    tmp_path: Path, board: SshServer, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    spec, problem, cure = MISTAKES[mistake]
    code = main(["diff", str(saved(tmp_path, small())), "-c", spec(board)])
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("equivcheck: ")]
    assert (code, out) == (2, "")
    assert problem in line
    assert cure in line


# -- not starting --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without numpy."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin" / "python")


def test_an_interpreter_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(BackendUnavailable, match=r"no interpreter at /nowhere/python; give the path"):
        backend("ort@python=/nowhere/python")


@pytest.mark.parametrize("program", ["/bin/cat", "/bin/false", "/bin/true"])
def test_a_program_that_is_no_python_is_named(program: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"{program}: does not run as a Python interpreter"):
        backend(f"ort@python={program}").open(small())


def test_a_program_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nsleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(remote, "_START_LIMIT", 1.0)
    with pytest.raises(BackendUnavailable, match="no answer within 1 s"):
        backend(f"ort@python={program}").open(small())


def test_an_engine_that_does_not_come_to_life_is_ended(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = script("pass")
    path = Path(spec.partition(":")[2])
    path.write_text("import time; time.sleep(100)\n" + path.read_text())
    monkeypatch.setattr(remote, "_START_LIMIT", 1.5)
    with pytest.raises(BackendUnavailable, match=r"no answer within 1\.5 s"):
        backend(spec).open(small())


def test_an_interpreter_without_numpy_is_named_with_the_cure(bare: str) -> None:
    with pytest.raises(BackendUnavailable, match="No module named 'numpy'") as caught:
        backend(f"ort@python={bare}").open(small())
    assert caught.value.hint == f"{bare} -m pip install numpy"


def test_an_interpreter_without_the_engine_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import onnxruntime_of_another_name\nclass OrtEngine: ..."
    monkeypatch.setattr(Travelling, "source", source)
    with pytest.raises(BackendUnavailable) as caught:
        backend(f"ort@python={sys.executable}").open(small())
    assert isinstance(caught.value, SpecError)
    assert f"{sys.executable} -m pip install onnxruntime_of_another_name" in str(caught.value)


def test_a_provider_that_the_other_onnxruntime_lacks_is_answered_with_those_it_has() -> None:
    with pytest.raises(UnknownOption, match=r"available: .*CPUExecutionProvider"):
        backend(f"ort:provider=nonsense@python={sys.executable}").open(small())


def test_a_backend_that_stays_here_says_so() -> None:
    with pytest.raises(SpecError, match="'vnpu' runs in this process only; leave out @python="):
        backend("vnpu@ssh=board")


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("board", "board", None),
        ("root@board:2222", "root@board", "2222"),
        ("root@[fe80::1]:22", "root@fe80::1", "22"),
        ("[::1]", "::1", None),
        ("fe80::1", "fe80::1", None),
        ("me@home@board:22", "me@home@board", "22"),
    ],
)
def test_an_address_is_split_as_ssh_wants_it(address: str, host: str, port: str | None) -> None:
    command = Place("/opt/py 3/python", address).command()
    assert command[command.index("--") + 1] == host
    assert ("-p" in command) == (port is not None)
    assert port is None or command[command.index("-p") + 1] == port
    assert "BatchMode=yes" in command


def test_the_ssh_command_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIVCHECK_SSH", "ssh -J 'jump host'")
    assert Place(None, "board").command()[:3] == ["ssh", "-J", "jump host"]


@pytest.mark.parametrize("python", ["/opt/it's here/python", "~/venv with space/bin/python", "python3.8"])
def test_the_far_shell_reads_back_the_interpreters_path(python: str) -> None:
    outer = shlex.split(Place(python, "board").command()[-1])
    assert outer[:2] == ["sh", "-c"]
    assert shlex.split(outer[2])[:3] == [python, "-u", "-c"]


# -- a full disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        reason = f"a tiny file system cannot be mounted here ({mounted.stderr.strip()}): run as root"
        print(reason)
        pytest.skip(reason)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def large() -> OnnxModel:
    """A model of more than 64 KiB."""
    m = Qdq(seed=1)
    x = m.dq(m.q(m.input("x", (1, 128, 4, 4)), 0.025, 128))
    model = model_from_bytes(m.model(m.dq(m.q(m.conv(x, 128), 0.4, 128))).SerializeToString(), "large.onnx")
    assert len(model.proto.SerializeToString()) > 100_000
    return model


@pytest.mark.parametrize("engine", ["script", "ort"])
def test_a_full_disk_on_the_other_side_is_told_in_clear_words(
    tmp_path: Path, script: Script, full_disk: Path, board: SshServer, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    spec = script("pass") if engine == "script" else "ort"
    there = f"env TMPDIR={full_disk} {sys.executable}"
    program = tmp_path / "python_there"
    program.write_text(f'#!/bin/sh\nexec {there} "$@"\n')
    program.chmod(0o755)
    code = main(["diff", str(saved(tmp_path, large())), "-c", f"{spec}@ssh={board.address}@python={program}"])
    out = capsys.readouterr().out
    assert code == 3
    assert re.search("disk is full|No space left", " ".join(out.split())), out
    assert not list(full_disk.iterdir())


# -- messages ------------------------------------------------------------------------------------------------------------


class Loop:
    """A channel whose two ends are one queue; it takes only what execnet can send."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def send(self, item: object) -> None:
        self._check(item)
        self.items.append(item)

    def receive(self, timeout: float | None = None) -> Any:
        return self.items.pop(0)

    def _check(self, item: object) -> None:
        assert type(item) in (type(None), bool, int, float, str, bytes, list, tuple, dict), type(item)
        if isinstance(item, (list, tuple)):
            for part in item:
                self._check(part)


MESSAGE = (
    "run",
    {
        "a": np.arange(24, dtype=np.int8).reshape(2, 3, 4),
        "strided": np.arange(24.0).reshape(4, 6)[::2, ::3],
        "transposed": np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)),
        "scalar": np.float32(1.5).reshape(()),
        "empty": np.zeros((0, 3), np.int64),
        "texts": np.array([["a", "ü"], ["", "c"]], object),
        "half": np.array([1, np.nan, np.inf], np.float16),
        "truth": np.array([True, False]),
        "model": b"\x00\xff" * 3_000_000,
        "nothing": b"",
    },
    [None, True, 3, 2.5, "ü", (1, [2, {"deep": np.int32(7)}])],
)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


def test_a_message_arrives_as_it_was_sent_through_the_channel() -> None:
    channel = Loop()
    Stream().send(channel, MESSAGE)
    assert_same(MESSAGE, Stream().receive(channel))
    assert not channel.items


def test_a_message_arrives_as_it_was_sent_through_the_arena_and_the_answer_too() -> None:
    file = os.memfd_create("test")
    near, far, channel = Arena(file, near=True), Arena(file, near=False), Loop()
    near.send(channel, MESSAGE)
    received = far.receive(channel)
    assert_same(MESSAGE, received)
    far.send(channel, received)  # an engine may return the very arrays it was fed
    answer = near.receive(channel)
    assert_same(MESSAGE, answer)
    near.send(channel, np.full(20_000_000, 7, np.uint8))  # grows, and overwrites what was there
    assert_same(MESSAGE, answer)
    assert int(far.receive(channel).sum()) == 140_000_000
    with pytest.raises(ValueError, match="read-only"):
        received[1]["a"][0] = 0
    os.close(file)


def test_what_cannot_be_sent_arrives_as_its_types_name() -> None:
    assert unpack(*pack({"sparse": object()})) == {"sparse": "<object>"}


def test_an_arena_without_memory_is_an_error_and_not_a_death() -> None:
    settings = {"source": b"def run(model_path, feeds): pass", "name": "s.py"}
    engine = RemoteEngine(Place(), Travelling("script.py", "ScriptEngine", settings))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        engine.load(b"", {"outputs": ["y"]})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(EngineFailed, match="no memory to share with the worker"):
            engine.run({"x": np.zeros(1 << 21, np.uint8)})
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(EngineFailed, match="run\\(\\) returned a NoneType"):
            engine.run({"x": np.zeros(1, np.uint8)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        engine.close()


# -- what travels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["worker.py", "ort.py", "script.py"])
def test_what_travels_is_python_3_8_and_imports_nothing_of_ours(file: str) -> None:
    tree = ast.parse((ENGINES / file).read_text(), feature_version=(3, 8))
    found = set()
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        found |= {name.split(".")[0] for name in names}
    engine = {"onnxruntime"} if file == "ort.py" else set()
    assert found - engine - {"numpy"} <= sys.stdlib_module_names


def test_the_spec_of_a_worker_round_trips() -> None:
    text = "ort:timeout=5@ssh=root@board:2222@python=/opt/py/bin/python"
    assert str(backend(text).spec) == text == str(parse(text))
