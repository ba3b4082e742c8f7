"""Engines in another interpreter (`@python=`) or on another machine (`@ssh=`), behind the interface of one in this process.

A worker is a process that this one starts, through ssh or not, in a process group of its own: Ctrl-C reaches only us, and we
end the worker. execnet boots it from nothing but its interpreter and carries messages; `engines.worker` is what runs in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import IO, Any, NoReturn

import execnet
from execnet import gateway_base, gateway_bootstrap

from equivcheck.backends.spec import Spec
from equivcheck.engines.worker import Arena, Stream
from equivcheck.errors import BackendUnavailable, EngineCrashed, EngineTimeout
from equivcheck.models.graph import Array

_log = logging.getLogger(__name__)

DEFAULT_LIMIT = (
    600.0  # seconds for one load or run where `timeout=` does not say: an engine that hangs must end some day
)
_START_LIMIT = 120.0  # seconds until an interpreter answers; importing an engine takes up to 10 s on a slow board
_PARTING = 3.0  # seconds that an idle worker gets to end by itself: drivers release their device
_LAST_LINES = 20
_LOADER = "import sys;exec(eval(sys.stdin.readline()))"
_SSH_OPTIONS = (
    ("BatchMode", "yes"),  # never ask: nobody would see the question
    ("ConnectTimeout", "15"),
    ("ServerAliveInterval", "15"),
    ("ServerAliveCountMax", "4"),
    ("ControlMaster", "no"),  # ours would outlive us; an existing one is used
)
_SSH_TROUBLE = (
    (
        r"host key verification failed|remote host identification has changed",
        "its host key is not the one known here",
        "if you trust it: ssh-keygen -R KNOWN, then connect once by hand",
    ),
    (r"permission denied", "it does not let you in without a password", "install your key: ssh-copy-id HOST"),
    (r"could not resolve|name or service not known", "no machine of that name", "check the name, or ~/.ssh/config"),
    (
        r"refused|timed out|no route to host|unreachable|closed by|reset by",
        "it cannot be reached",
        "check that it is on and that ssh HOST works by hand",
    ),
    (
        r"command not found|: not found|no such file",
        "no such interpreter there",
        "name one: @ssh=HOST@python=/path/python3",
    ),
)


class EngineFailed(Exception):
    """What an engine elsewhere raised, in its own words; the backend translates it as if it came from this process."""


@dataclass(frozen=True)
class Travelling:
    """An engine that is sent over: a file of `equivcheck.engines`, the class in it, and the arguments of that class.

    `needs` is the package that brings the engine, where pip knows it by another name than Python's import does.
    """

    file: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def source(self) -> str:
        return resources.files("equivcheck.engines").joinpath(self.file).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Place:
    """Where a worker runs: an interpreter (default: this one, or `python3` elsewhere), on this machine or on `ssh`."""

    python: str | None = None
    ssh: str | None = None

    @classmethod
    def of(cls, spec: Spec) -> Place:
        """The place a SPEC names. Raises BackendUnavailable when it is on this machine and no program is there."""
        python = spec.python
        if python is not None and spec.ssh is None:
            python = shutil.which(str(Path(python).expanduser()))
            if python is None:
                raise BackendUnavailable(
                    f"{spec}: there is no interpreter at {spec.python}",
                    asked=spec.python,
                    hint="give the path of a python that runs: @python=/path/bin/python",
                )
        return cls(python, spec.ssh)

    def __str__(self) -> str:
        return f"{self.interpreter} on {self.ssh}" if self.ssh is not None else self.interpreter

    @property
    def interpreter(self) -> str:
        return self.python or (sys.executable if self.ssh is None else "python3")

    def command(self) -> list[str]:
        """The program to start, with its arguments; it reads Python from its standard input."""
        if self.ssh is None:
            return [self.interpreter, "-u", "-c", _LOADER]
        host, port = _host_and_port(self.ssh)
        options = [text for key, value in _SSH_OPTIONS for text in ("-o", f"{key}={value}")]
        there = shlex.quote(self.interpreter)
        if self.interpreter.startswith("~/"):
            there = "~/" + shlex.quote(self.interpreter[2:])
        # the shell stays to tell us how its child ended: 128 + signal
        far = f"sh -c {shlex.quote(f'{there} -u -c {shlex.quote(_LOADER)}; exit $?')}"
        ssh = shlex.split(os.environ.get("EQUIVCHECK_SSH") or "ssh")
        return [*ssh, "-T", *options, *(["-p", port] if port else []), "--", host, far]


def _host_and_port(address: str) -> tuple[str, str | None]:
    """Split [USER@]HOST[:PORT]; an IPv6 HOST with a port stands in brackets, one without is left as it is."""
    match = re.fullmatch(r"((?:.*@)?)(?:\[([^\]]+)\]|([^:]+))(?::(\d+))?", address)
    if match is None:
        return address, None
    user, bracketed, host, port = match.groups()
    return user + (bracketed or host), port


class RemoteEngine:
    """An engine in a worker: `info`, `optimise`, `load` and `run` as in `equivcheck.engines`; `close` ends the worker.

    A worker that dies is replaced once per call, with what was loaded; a refusal or a timeout is not repeated.

    Raises EngineFailed (what the engine raised), EngineCrashed, EngineTimeout; and BackendUnavailable when the first worker
    cannot be started: a mistake in the SPEC, or a machine that is off.
    """

    def __init__(self, place: Place, engine: Travelling, limit: float = DEFAULT_LIMIT) -> None:
        self.place = place
        self.engine = engine
        self.limit = limit
        self._worker: Worker | None = None
        self._info: dict[str, Any] | None = None
        self._loaded: tuple[bytes, Mapping[str, Any]] | None = None

    def info(self) -> dict[str, Any]:
        """What the engine says of itself, and `python` and `node`: its interpreter's version and the machine's name."""
        if self._info is None:
            self._ready()
        assert self._info is not None
        return self._info

    def optimise(self, model: bytes, options: Mapping[str, Any]) -> bytes:
        """See `OrtEngine.optimise`."""
        return bytes(self._asked("optimise", model, dict(options)))

    def load(self, model: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
        """Load a serialised model in place of the one before."""
        self._loaded = None
        specs: dict[str, Any] = self._asked("load", model, dict(options))
        self._loaded = (model, dict(options))
        return specs

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Run what was loaded; the arrays are the caller's own."""
        got: dict[str, Array] = self._asked("run", dict(feeds), None if outputs is None else list(outputs))
        return got

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _asked(self, method: str, *arguments: Any) -> Any:
        try:
            return self._once(method, arguments)
        except EngineCrashed as first:
            _log.warning("%s; once more, on a fresh worker", first)
        try:
            return self._once(method, arguments)
        except EngineCrashed as second:
            raise EngineCrashed(f"{second.message} (twice)", last_words=second.last_words) from None

    def _once(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self._worker is None:
            self._ready()
            if method == "run" and self._loaded is not None:
                self._ask("load", self._loaded)
        return self._ask(method, arguments)

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        assert self._worker is not None
        try:
            return self._worker.ask(method, arguments, self.limit)
        except EngineFailed:
            raise
        except BaseException:  # it crashed, hung, or we were interrupted: there is nobody left to talk to
            self._worker.close()
            self._worker = None
            raise

    def _ready(self) -> None:
        try:
            self._worker = Worker(self.place, self.engine)
        except BackendUnavailable as error:
            if self._info is None:
                raise
            raise EngineCrashed("the worker cannot be started again", last_words=error.message) from error
        self._info = self._worker.info


class Worker:
    """One process with one engine in it. Raises BackendUnavailable when it does not come to life."""

    def __init__(self, place: Place, engine: Travelling) -> None:
        self.place = place
        self.engine = engine
        self._busy = True
        local = place.ssh is None
        self._scratch = tempfile.mkdtemp(prefix="equivcheck-") if local else None
        memory = _unnamed_file() if local else None
        self._process = self._started(() if memory is None else (memory,))
        self._words = _LastWords(self._process.stderr)
        self._end = weakref.finalize(self, _end, self._process, self._words, memory, self._scratch)
        self._carrier: Arena | Stream = Stream() if memory is None else Arena(memory, near=True)
        try:
            self._channel = self._booted()
            self.info = self._begun(memory)
        except BaseException:
            self.close()
            raise
        self._busy = False

    def _started(self, files: tuple[int, ...]) -> subprocess.Popen[bytes]:
        command = self.place.command()
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, pass_fds=files
            )
        except OSError as error:
            for file in files:
                os.close(file)
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
            raise BackendUnavailable(
                f"cannot start {command[0]}: {error.strerror}", asked=str(self.place), hint="is it installed?"
            ) from error

    def _booted(self) -> Any:
        """Let execnet take over the pipes; the channel on which `engines.worker` serves."""
        guard = threading.Timer(_START_LIMIT, _kill, (self._process,))
        guard.start()
        try:
            pipes = _Pipes(self._process)
            spec = execnet.XSpec("popen//id=worker//execmodel=thread")
            gateway_bootstrap.bootstrap_exec(pipes, spec)
            if self._process.poll() is not None:  # execnet lets an early end pass
                raise EOFError
            gateway = execnet.Gateway(pipes, spec)
            source = resources.files("equivcheck.engines").joinpath("worker.py").read_text(encoding="utf-8")
            return gateway.remote_exec(source)
        except (EOFError, OSError, AssertionError, gateway_bootstrap.HostNotFound):
            if guard.finished.is_set():
                self._no_answer()
            self._no_start()
        finally:
            guard.cancel()

    def _begun(self, memory: int | None) -> dict[str, Any]:
        order = {
            "source": self.engine.source,
            "file": self.engine.file,
            "kind": self.engine.kind,
            "settings": dict(self.engine.settings),
            "scratch": self._scratch,
            "arena": memory,
        }
        try:
            self._channel.send(order)
            state, answer = self._channel.receive(_START_LIMIT)
        except self._channel.TimeoutError:
            self._no_answer()
        except (EOFError, OSError, self._channel.RemoteError):
            self._no_start()
        if state == "unavailable":
            raise BackendUnavailable(f"{self.place}: {answer}", asked=str(self.place), hint=self._cure(answer))
        return dict(answer)

    def _cure(self, answer: str) -> str:
        missing = re.search(r"No module named '(\w+)", answer)
        if missing is None:
            return ""
        where = f"on {self.place.ssh}: " if self.place.ssh is not None else ""
        package = "numpy" if missing.group(1) == "numpy" else self.engine.needs or missing.group(1)
        return f"{where}{self.place.interpreter} -m pip install {package}"

    def _no_answer(self) -> NoReturn:
        raise BackendUnavailable(
            f"{self.place}: no answer within {_START_LIMIT:g} s",
            asked=str(self.place),
            hint="does it start when you run it by hand?",
        )

    def _no_start(self) -> NoReturn:
        """Say why nothing came to life: ssh's reason where it has one, else the last words."""
        code = self._ended()
        said = self._words.text()
        if self.place.ssh is not None:
            for pattern, problem, cure in _SSH_TROUBLE:
                if re.search(pattern, said, re.IGNORECASE):
                    host, port = _host_and_port(self.place.ssh)
                    name = host.rpartition("@")[2]
                    known = f"'[{name}]:{port}'" if port else name
                    raise BackendUnavailable(
                        f"{self.place}: {problem} ({_last(said)})",
                        asked=self.place.ssh,
                        found=said,
                        hint=cure.replace("KNOWN", known).replace("HOST", host),
                    )
        raise BackendUnavailable(
            f"{self.place}: does not run as a Python interpreter ({_how_ended(code, self.place)}): {_last(said)}",
            asked=str(self.place),
            found=said,
            hint="equivcheck needs Python 3.8 or newer there, and a login that prints nothing",
        )

    def ask(self, method: str, arguments: tuple[Any, ...], limit: float) -> Any:
        """Call `method` of the engine.

        Raises EngineFailed, EngineTimeout, EngineCrashed; after the last two the worker is of no more use.
        """
        self._busy = True
        try:
            self._carrier.send(self._channel, (method, arguments))
            state, answer = self._carrier.receive(self._channel, limit)
        except self._channel.TimeoutError:
            raise EngineTimeout(
                f"the engine did not {method} within {limit:g} s (timeout= sets the limit)",
                last_words=self._words.text(),
            ) from None
        except self._channel.RemoteError as error:
            raise EngineCrashed("the worker failed", last_words=_last(str(error))) from None
        except (EOFError, OSError) as error:
            if self._process.poll() is None and isinstance(error, OSError) and error.errno is not None:
                raise EngineFailed(f"no memory to share with the worker: {error.strerror}") from error
            raise EngineCrashed(
                _how_ended(self._ended(), self.place) + f" in {method}", last_words=self._words.text()
            ) from None
        self._busy = False
        if state == "failed":
            raise EngineFailed(answer)
        return answer

    def _ended(self) -> int | None:
        """The exit code, once the pipes are closed; None when it has to be killed."""
        try:
            return self._process.wait(_PARTING)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the process, politely when it is idle, and remove what it had on this machine."""
        if self._end.alive and not self._busy:
            with contextlib.suppress(OSError):  # it is gone already
                self._channel.gateway._io.close_write()
            self._ended()
        self._end()


def _end(process: subprocess.Popen[bytes], words: _LastWords, memory: int | None, scratch: str | None) -> None:
    """Kill the worker with all it started here, wait for it, free what it had. Runs once, at exit at the latest."""
    if process.poll() is None:
        _kill(process)
        process.wait()
    words.close()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    if memory is not None:
        os.close(memory)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, and the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _unnamed_file() -> int:
    """A file descriptor of memory that no path leads to."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("equivcheck")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Pipes(gateway_base.Popen2IO):
    """The pipes of a process that is already there, as execnet wants them."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process.stdin, process.stdout, gateway_base.get_execmodel("thread"))
        self._process = process

    def wait(self) -> int | None:
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()


class _LastWords:
    """Reads a worker's standard error all the time, so that it never blocks, and keeps the last lines."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while line := self._stream.readline(1000):
                self._lines.append(line)

    def text(self) -> str:
        """The last lines; of a process that has ended, all of it has arrived."""
        self._thread.join(0.5)
        return b"".join(self._lines).decode(errors="replace").strip()[-1500:]

    def close(self) -> None:
        self._thread.join(1.0)


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def _how_ended(code: int | None, place: Place) -> str:
    if code is None:
        return "the worker closed its line"
    if place.ssh is not None and code == 255:
        return f"the connection to {place.ssh} was lost"
    number = -code if code < 0 else code - 128
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"the worker was killed by {signal.Signals(number).name}"
    return f"the worker ended with exit code {code}"
