#!/usr/bin/env python3
"""Runs every model of this bundle on every input and keeps what comes out, for `equivcheck compare` on another machine.

    python3 run.py                    with the engine that was named when the bundle was made
    python3 run.py --script FILE      with your own `def run(model_path, feeds): return {output name: array}`

Needs Python 3.8, numpy and that engine. Started again, it goes on where it was stopped. Exit codes: 0 all ran, 1 some models
failed (the rest is there), 2 nothing could run, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

try:
    import numpy as np
except ImportError:
    print(
        f"run.py: numpy is not installed for {sys.executable}: {sys.executable} -m pip install numpy", file=sys.stderr
    )
    sys.exit(2)

BUNDLE = "bundle.json"  # what is in it; a copy lies with the results
RUN = "run.json"  # in the results: what ran
INPUTS = "inputs.npz"  # in the folder of each sample: what it was fed
_LOG = "engine.log"
_UNAVAILABLE, _CANNOT_WRITE = 69, 73  # exit codes of the child, from sysexits.h: the trouble is not the model's
_START_LIMIT = 300.0  # seconds until the engine is imported; 10 s were seen on a slow board
_GIVE_UP = 3  # models in a row on which the engine died or hung: something else is wrong then
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_GRAPH, _INITIALIZER = b"\x3a", b"\x2a"  # protobuf tags: field 7 of ModelProto, field 5 of GraphProto, both of bytes


class Trouble(Exception):
    """Nothing can run; the text says why and what to do."""


# -- what is in the bundle ---------------------------------------------------------------------------------------------


class Bundle:
    """The files of a bundle, and those of its results. Model 0 is the whole model, the others are heads."""

    def __init__(self, folder: str, results: str) -> None:
        self.folder, self.results = folder, results
        path = os.path.join(folder, BUNDLE)
        try:
            with open(path, encoding="utf-8") as file:
                self.about: Dict[str, Any] = json.load(file)
        except (OSError, ValueError) as error:
            raise Trouble(f"{path} cannot be read ({error}): carry the whole folder over once more") from None
        self.models: List[Dict[str, Any]] = self.about["models"]
        self.samples: List[Dict[str, Any]] = self.about["samples"]

    def check(self) -> None:
        """Raise Trouble when a file is not what was packed."""
        for file, digest in self.about["files"].items():
            path = os.path.join(self.folder, *file.split("/"))
            try:
                found = _sha256(path)
            except OSError as error:
                raise Trouble(f"{path}: {error.strerror}: carry the whole folder over once more") from None
            if found != digest:
                raise Trouble(f"{path} is not what was packed: carry the whole folder over once more, in binary mode")

    def model(self, number: int) -> bytes:
        """One serialised model. What heads share, their larger weights, is kept once and put in here.

        Protobuf joins the parts of a message that come one after the other, so nothing has to be parsed.
        """
        about = self.models[number]
        with open(os.path.join(self.folder, *about["file"].split("/")), "rb") as file:
            content = file.read()
        if not about["weights"]:
            return content
        tensors = []
        with open(os.path.join(self.folder, *self.about["weights"].split("/")), "rb") as file:
            for offset, size in about["weights"]:
                file.seek(offset)
                tensors.append(_INITIALIZER + _varint(size) + file.read(size))
        graph = b"".join(tensors)
        return content + _GRAPH + _varint(len(graph)) + graph

    def feeds(self, sample: int) -> Dict[str, Any]:
        """The arrays of one sample by input name."""
        return read_arrays(os.path.join(self.folder, *self.samples[sample]["file"].split("/")))

    def place(self, number: int, sample: int) -> str:
        """Where the result of one model on one sample goes, without its ending."""
        return os.path.join(self.results, result_name(number, sample))

    def left(self) -> List[Tuple[int, int]]:
        """(model, sample) of what has neither run nor failed, in the order of running."""
        every = [(number, sample) for number in range(len(self.models)) for sample in range(len(self.samples))]
        return [pair for pair in every if not self.settled(*pair)]

    def settled(self, number: int, sample: int) -> bool:
        """Has it run, or failed?"""
        place = self.place(number, sample)
        return os.path.exists(place + ".npz") or os.path.exists(place + ".failed")

    def failed(self) -> Iterator[Tuple[int, int, str]]:
        """(model, sample, reason) of what failed."""
        for number in range(len(self.models)):
            for sample in range(len(self.samples)):
                path = self.place(number, sample) + ".failed"
                if os.path.exists(path):
                    with open(path, encoding="utf-8") as file:
                        yield number, sample, file.read()

    def fail(self, number: int, samples: Sequence[int], reason: str) -> None:
        """Keep why there is no result."""
        for sample in samples:
            write_whole(self.place(number, sample) + ".failed", reason.encode("utf-8", "replace"))


def result_name(number: int, sample: int) -> str:
    """The file, without its ending, of the result of one model on one sample, below the results."""
    return os.path.join(f"{sample:04d}", f"{number:04d}")


def read_arrays(path: str) -> Dict[str, Any]:
    """The arrays of an .npz file by name."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def write_arrays(path: str, arrays: Mapping[str, Any]) -> None:
    """Write an .npz file, whole or not at all. `np.savez` takes no array of the name `file`, and models have such values."""
    with _whole(path) as half, zipfile.ZipFile(half, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def write_whole(path: str, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with _whole(path) as half, open(half, "wb") as file:
        file.write(content)


@contextlib.contextmanager
def _whole(path: str) -> Iterator[str]:
    half = path + ".half"
    try:
        yield half
        os.replace(half, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(half)
        raise


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def _varint(number: int) -> bytes:
    """A number as protobuf writes lengths: seven bits a byte, the lowest first, the top bit set on all but the last."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


# -- how long ----------------------------------------------------------------------------------------------------------


class Clock:
    """Says how far a long work of `total` pieces is, and how long the rest will take if it goes on like this."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what = total, what
        self._skipped = 0
        self._started = time.monotonic()

    def skip(self) -> None:
        """One piece took no time: it was kept from before."""
        self._skipped += 1

    def at(self, done: int, label: str) -> str:
        """Describe the piece that begins after `done` others."""
        ran = done - self._skipped
        seconds = (self.total - done) * (time.monotonic() - self._started) / ran if ran > 0 else 0.0
        rest = f"; about {spoken(seconds)} left" if seconds else ""
        return f"{self.what} {done + 1} of {self.total}: {label}{rest}"


def spoken(seconds: float) -> str:
    """A duration as one says it: `4 s`, `12 min`, `2 h 10 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


# -- the child: an engine may take its process with it -----------------------------------------------------------------


def _child(bundle: Bundle, script: Optional[str], scratch: str) -> int:
    """Run what is left, with one engine; the exit code. What it prints last is for the user."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        engine, options = _engine(bundle, script)
    except (Exception, SystemExit) as error:
        print(_missing(error), file=sys.stderr)
        return _UNAVAILABLE
    open(os.path.join(scratch, "ready"), "wb").close()
    pending: Dict[int, List[int]] = {}
    for number, sample in bundle.left():
        pending.setdefault(number, []).append(sample)
    for number, samples in pending.items():
        try:
            _run_model(bundle, engine, options, number, samples)
        except OSError as error:
            print(f"{error.strerror or error}: {error.filename or bundle.results}", file=sys.stderr)
            return _CANNOT_WRITE
    return 0


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, however that went: nobody would stop an engine that hangs."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _run_model(bundle: Bundle, engine: Any, options: Dict[str, Any], number: int, samples: List[int]) -> None:
    """Run one model on its samples; what the engine raises is kept as the reason. Raises OSError when it cannot write."""
    about = bundle.models[number]
    content = bundle.model(number)
    try:
        engine.load(content, {**options, "outputs": about["outputs"]})
    except (Exception, SystemExit) as error:
        bundle.fail(number, samples, _reason(error))
        return
    for sample in samples:
        feeds = bundle.feeds(sample)
        try:
            found = engine.run({name: feeds[name] for name in about["inputs"]})
        except (Exception, SystemExit) as error:
            bundle.fail(number, [sample], _reason(error))
            continue
        write_arrays(bundle.place(number, sample) + ".npz", found)


def _reason(error: BaseException) -> str:
    """What the engine said, in one line. Raises the error itself where the disk is to blame."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        raise error
    return " ".join(str(error).split())[:1000] or type(error).__name__


def _engine(bundle: Bundle, script: Optional[str]) -> Tuple[Any, Dict[str, Any]]:
    """The engine and its options; what it says of itself is kept in `run.json`. Raises what the engine raises, and Trouble."""
    digest = ""
    options: Dict[str, Any] = {}
    if script is None:
        engine = _imported(bundle, "ort").OrtEngine()
        options = dict(bundle.about["options"])
        options["provider"] = _provider(str(options["provider"]), engine.info()["providers"])
    else:
        with open(script, "rb") as file:
            source = file.read()
        digest = hashlib.sha256(source).hexdigest()
        folder, name = os.path.split(script)
        engine = _imported(bundle, "script").ScriptEngine(source, name, folder)
    info = {"python": platform.python_version(), "node": platform.node(), "numpy": np.__version__, **engine.info()}
    _settle(bundle, {**info, "script_sha256": digest})
    return engine, options


def _imported(bundle: Bundle, name: str) -> Any:
    """An engine's file from the bundle."""
    spec = importlib.util.spec_from_file_location(
        f"bundle_{name}", os.path.join(bundle.folder, "engines", f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _provider(asked: str, available: Sequence[str]) -> str:
    """The full name of an execution provider of this onnxruntime, asked for with or without its ending."""
    for name in available:
        if asked.lower() in (name.lower(), name.lower().replace("executionprovider", "")):
            return name
    raise Trouble(f"this onnxruntime has no execution provider '{asked}'; it has {', '.join(available)}")


def _settle(bundle: Bundle, info: Dict[str, Any]) -> None:
    """Keep what runs; results of two engines in one folder would be nobody's."""
    path = os.path.join(bundle.results, RUN)
    if not os.path.exists(path):
        write_whole(path, json.dumps(info, indent=1).encode())
        return
    with open(path, encoding="utf-8") as file:
        before = json.load(file)
    for key in ("engine", "version", "machine", "script_sha256"):
        if before.get(key) != info.get(key):
            other = f"{before.get('engine')} {before.get('version')}"
            raise Trouble(
                f"{bundle.results} holds a run of {other}, this is {info['engine']} {info['version']}: "
                "name another folder with --results, or remove that one"
            )


def _missing(error: BaseException) -> str:
    """Why there is no engine, in one line, with the way out."""
    if isinstance(error, ImportError) and error.name == "onnxruntime":
        install = f"{sys.executable} -m pip install onnxruntime"
        return f"onnxruntime is not installed for {sys.executable}: {install}; or your own engine: run.py --script FILE"
    said = " ".join(str(error).split()) or type(error).__name__
    return said if isinstance(error, Trouble) else f"the engine does not start: {said}"


# -- the parent: starts the engine, watches, starts it again -----------------------------------------------------------


class Watch:
    """Keeps a child running until nothing is left; a model on which it dies or hangs is named as failed."""

    def __init__(self, bundle: Bundle, script: Optional[str], limit: float) -> None:
        self.bundle, self.script, self.limit = bundle, script, limit
        self.left = bundle.left()
        self.shown = -1
        self.started = time.monotonic()
        self.models = sorted({number for number, _ in self.left})
        self.clock = Clock(len(self.models), "model")

    def run(self) -> None:
        """Raises Trouble when nothing can run, or the engine dies on everything."""
        deaths = 0
        while self.left:
            before = len(self.left)
            how = self._once()
            deaths = 1 if len(self.left) < before else deaths + 1
            if not self.left:
                return
            number = self.left[0][0]
            rest = [k for n, k in self.left if n == number]
            self.bundle.fail(number, rest, how)
            print(f"    failed: {how}", flush=True)
            self.left = self.bundle.left()
            if deaths >= _GIVE_UP and self.left:
                raise Trouble(
                    f"the engine died or hung on {deaths} models in a row: is the board in order? "
                    f"Start again to go on with the {len(self.left)} runs that are left"
                )

    def _once(self) -> str:
        """Start a child and follow it until it ends; how it ended, where that was early."""
        scratch = tempfile.mkdtemp(prefix="bundle-")
        log = os.path.join(self.bundle.results, _LOG)
        command = [
            sys.executable,
            "-u",
            os.path.abspath(__file__),
            "--child",
            scratch,
            "--results",
            self.bundle.results,
        ]
        command += [] if self.script is None else ["--script", self.script]
        try:
            with open(log, "wb") as said:
                environment = {**os.environ, "TMPDIR": scratch}
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for us; we end the child
                )
                try:
                    ended = self._followed(child, os.path.join(scratch, "ready"))
                finally:
                    _kill(child)
            return self._how(ended, log, os.path.exists(os.path.join(scratch, "ready")))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _followed(self, child: Any, ready: str) -> Optional[int]:
        """Tell what is finished until the child ends; its exit code, or None where it hung."""
        since = time.monotonic()
        while True:
            code = child.poll()
            if self._advance():
                since = time.monotonic()
            if code is not None:
                return int(code)
            limit = self.limit if os.path.exists(ready) else _START_LIMIT
            if time.monotonic() - since > limit:
                return None
            time.sleep(0.02)

    def _advance(self) -> bool:
        """Take from the list what is settled by now, and announce what runs."""
        moved = False
        while self.left and self.bundle.settled(*self.left[0]):
            self._estimate(*self.left.pop(0))
            moved = True
        if self.left and self.left[0][0] != self.shown:
            self.shown = self.left[0][0]
            label = self.bundle.models[self.shown]["label"]
            print(self.clock.at(self.models.index(self.shown), label), flush=True)
        return moved

    def _estimate(self, number: int, sample: int) -> None:
        """After the first run of the whole model: how long all will take."""
        if (number, sample) == (0, 0):
            took = time.monotonic() - self.started
            print(
                f"    the whole model took {spoken(took)} with loading; {len(self.left)} runs are left: "
                f"at most about {spoken(took * len(self.left))}",
                flush=True,
            )

    def _how(self, code: Optional[int], log: str, ready: bool) -> str:
        """How the child ended, with its last words. Raises Trouble where no model is to blame."""
        with open(log, "rb") as file:
            lines = [line.strip() for line in file.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        if code == _UNAVAILABLE:
            raise Trouble(last)
        if code == _CANNOT_WRITE:
            raise Trouble(f"{last}: make room, and start again to go on")
        if code is None:
            how = f"no answer within {self.limit if ready else _START_LIMIT:g} s"
        else:
            how = _ended(code)
        words = f"{how}: {' | '.join(lines[-3:])[-600:]}" if lines else how
        if not ready:
            raise Trouble(f"the engine does not start: {words}")
        return words


def _ended(code: int) -> str:
    """How a process ended, in words."""
    with contextlib.suppress(ValueError):
        if code < 0:
            return f"the engine was killed by {signal.Signals(-code).name}"
    return f"the engine ended its process with exit code {code}"


def _kill(child: Any) -> None:
    """End the child with all it started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()


# -- the command line --------------------------------------------------------------------------------------------------


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run it; the exit code."""
    folder = os.path.dirname(os.path.abspath(__file__))
    chosen = _parsed(arguments, folder)
    try:
        bundle = Bundle(folder, os.path.abspath(chosen.results))
        script = _script(bundle, chosen.script)
        if chosen.child:
            return _child(bundle, script, chosen.child)
        return _watched(bundle, script, chosen)
    except Trouble as trouble:
        print(f"run.py: {trouble}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"run.py: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run.py: stopped; start it again to go on", file=sys.stderr)
        return 130


def _parsed(arguments: Optional[Sequence[str]], folder: str) -> argparse.Namespace:
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--script", metavar="FILE", help="your own run(model_path, feeds), instead of the bundle's engine"
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        default=os.path.join(folder, "results"),
        help="where the results go (default: results, beside run.py)",
    )
    parser.add_argument("--timeout", metavar="S", type=float, help="seconds for one model on one input")
    parser.add_argument("--again", action="store_true", help="also try again what failed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _script(bundle: Bundle, given: Optional[str]) -> Optional[str]:
    """The user's file: the one named now, else the one in the bundle; None where ONNX Runtime runs the models."""
    if given is not None:
        path = os.path.abspath(given)
        if not os.path.isfile(path):
            raise Trouble(f"there is no file {path}")
        return path
    packed = bundle.about["script"]
    return None if packed is None else os.path.join(bundle.folder, *packed.split("/"))


def _watched(bundle: Bundle, script: Optional[str], chosen: argparse.Namespace) -> int:
    for name in ("SIGTERM", "SIGHUP"):  # a console that is closed must not leave the engine behind
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    bundle.check()
    _prepare(bundle)
    if chosen.again:
        for number, sample, _ in list(bundle.failed()):
            os.unlink(bundle.place(number, sample) + ".failed")
    limit = float(chosen.timeout or bundle.about["timeout"])
    Watch(bundle, script, limit).run()
    return _summary(bundle)


def _prepare(bundle: Bundle) -> None:
    """Make the folders of the results, with what `compare` needs in them. Raises Trouble when that cannot be."""
    try:
        for number, sample in enumerate(bundle.samples):
            folder = os.path.join(bundle.results, f"{number:04d}")
            os.makedirs(folder, exist_ok=True)
            with _whole(os.path.join(folder, INPUTS)) as half:
                shutil.copyfile(os.path.join(bundle.folder, *sample["file"].split("/")), half)
        with open(os.path.join(bundle.folder, BUNDLE), "rb") as file:
            write_whole(os.path.join(bundle.results, BUNDLE), file.read())
    except OSError as error:
        raise Trouble(
            f"cannot write {error.filename or bundle.results}: {error.strerror}; name another folder: --results DIR"
        ) from None


def _summary(bundle: Bundle) -> int:
    failed = list(bundle.failed())
    models, samples = len(bundle.models), len(bundle.samples)
    names = list(dict.fromkeys(number for number, _, _ in failed))
    print(f"{models - len(names)} of {models} models ran on {samples} {'input' if samples == 1 else 'inputs'}")
    for number in names[:5]:
        reason = next(why for k, _, why in failed if k == number)
        print(f"  failed: {bundle.models[number]['label']}: {reason[:200]}")
    if len(names) > 5:
        print(f"  and {len(names) - 5} more failed")
    if failed:
        print("  try these once more: run.py --again")
    print(f"carry back {bundle.results}, then: equivcheck compare RESULTS --model MODEL")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
