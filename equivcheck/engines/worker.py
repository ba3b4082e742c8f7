"""The far end of an engine in another interpreter or on another machine, and how both ends exchange arrays.

This file travels: its text is sent through execnet, which runs it in the other interpreter; the engine's file follows. It
needs Python 3.8 and numpy there, nothing of ours. The near end (`backends.remote`) imports it for the carriers.

A message is a tree of tuples, lists, dicts, numbers, text, bytes and arrays. Its small parts go through the execnet channel;
its arrays and bytes go through an `Arena` (same machine) or, in pieces, through the channel (`Stream`).
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import types
from typing import Any, Callable, Dict, List, Optional, Tuple

try:
    import numpy as np
except ImportError:  # said in an answer, see `_begin`
    np = None  # type: ignore[assignment]  # told to the near end, which then says what is missing

_ALIGNMENT = 64  # bytes; a cache line, and what vector loads of engines like
_PIECE = 4 << 20  # bytes of one channel message: small enough for a slow line to show that it lives
_STALLED = 60.0  # seconds without one piece of a message that has begun

# A second, tiny process. It ends the worker when the near end has hung up (even if native code holds the worker's GIL),
# and when the worker is gone, however it went, it ends what the worker started and removes its files.
_WATCHDOG = """
import os, select, shutil, signal, sys, time
worker, line, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
signs = select.poll()
signs.register(line, getattr(select, "POLLRDHUP", 0))
while os.getppid() == worker and not signs.poll(500):
    pass
for _ in range(30):
    if os.getppid() != worker:
        break
    time.sleep(0.1)
try:
    os.killpg(worker, signal.SIGKILL)
except OSError:
    pass
shutil.rmtree(scratch, ignore_errors=True)
"""


# -- messages ------------------------------------------------------------------------------------------------------------


def pack(message: Any) -> Tuple[Any, List[Any]]:
    """Return (skeleton, arrays): the tree with what execnet can send, and the arrays that it refers to by number."""
    arrays: List[Any] = []
    return _packed(message, arrays), arrays


def _packed(item: Any, arrays: List[Any]) -> Any:
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if isinstance(item, (list, tuple)):
        return ("list" if isinstance(item, list) else "tuple", [_packed(part, arrays) for part in item])
    if isinstance(item, dict):
        return ("dict", [(_packed(key, arrays), _packed(value, arrays)) for key, value in item.items()])
    if isinstance(item, bytes):
        arrays.append(np.frombuffer(item, np.uint8))
        return ("bytes", len(arrays) - 1)
    if isinstance(item, np.generic):
        return _packed(item.item(), arrays)
    if isinstance(item, np.ndarray) and not item.dtype.hasobject:
        arrays.append(item)
        return ("array", len(arrays) - 1)
    if isinstance(item, np.ndarray):  # texts
        return ("objects", [_packed(part, arrays) for part in item.ravel().tolist()], list(item.shape))
    return f"<{type(item).__name__}>"


def unpack(skeleton: Any, arrays: List[Any]) -> Any:
    """The inverse of `pack`; what could not be sent is its type's name in angle brackets."""
    if not isinstance(skeleton, tuple):
        return skeleton
    kind, content = skeleton[:2]
    if kind == "list":
        return [unpack(part, arrays) for part in content]
    if kind == "tuple":
        return tuple(unpack(part, arrays) for part in content)
    if kind == "dict":
        return {unpack(key, arrays): unpack(value, arrays) for key, value in content}
    if kind == "bytes":
        return arrays[content].tobytes()
    if kind == "array":
        return arrays[content]
    made = np.empty(len(content), object)
    made[:] = [unpack(part, arrays) for part in content]
    return made.reshape(skeleton[2])


class Stream:
    """Carries the arrays of a message through the channel, in pieces."""

    def send(self, channel: Any, message: Any) -> None:
        """Send one message. Raises OSError or EOFError when the line is down."""
        skeleton, arrays = pack(message)
        channel.send((skeleton, [(array.dtype.str, list(array.shape)) for array in arrays]))
        for array in arrays:
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for start in range(0, len(content), _PIECE):
                channel.send(bytes(content[start : start + _PIECE]))

    def receive(self, channel: Any, timeout: Optional[float] = None) -> Any:
        """Wait for one message; `timeout` seconds for it to begin. Raises what execnet raises."""
        skeleton, specs = channel.receive(timeout)
        arrays = [self._array(channel, np.dtype(dtype), shape, timeout) for dtype, shape in specs]
        return unpack(skeleton, arrays)

    def _array(self, channel: Any, dtype: Any, shape: List[int], timeout: Optional[float]) -> Any:
        array = np.empty(shape, dtype)
        content = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
        for start in range(0, content.size, _PIECE):
            piece = channel.receive(None if timeout is None else _STALLED)
            content[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        return array


class Arena:
    """Carries the arrays of a message in memory that both processes map: one file without a name, reused, grown when needed.

    What the near end receives is copied out, because the next message overwrites it. What the far end receives are views;
    its answer is laid behind them.
    """

    def __init__(self, file: int, *, near: bool) -> None:
        self.file = file
        self.near = near
        self._map: Optional[mmap.mmap] = None
        self._taken = 0

    def send(self, channel: Any, message: Any) -> None:
        """Send one message. Raises OSError when there is no memory for it, or the other process is gone."""
        skeleton, arrays = pack(message)
        places = []
        end = 0 if self.near else self._taken
        for array in arrays:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            places.append((start, array.dtype.str, list(array.shape)))
            end = start + array.nbytes
        self._reach(end)
        for (start, _, _), array in zip(places, arrays):
            if array.size:
                np.ndarray(array.shape, array.dtype, self._map, start)[...] = array
        channel.send((skeleton, places, end))

    def receive(self, channel: Any, timeout: Optional[float] = None) -> Any:
        """Wait for one message; `timeout` seconds. Raises what execnet raises."""
        skeleton, places, self._taken = channel.receive(timeout)
        self._reach(self._taken)
        return unpack(skeleton, [self._array(*place) for place in places])

    def _array(self, start: int, dtype: str, shape: List[int]) -> Any:
        if 0 in shape:
            return np.empty(shape, dtype)
        view = np.ndarray(shape, dtype, self._map, start)
        if self.near:
            return view.copy()
        view.flags.writeable = False
        return view

    def _reach(self, size: int) -> None:
        """Let the file and the mapping have at least `size` bytes. Views of the mapping before keep that one alive."""
        if self._map is not None and len(self._map) >= size:
            return
        have = os.fstat(self.file).st_size
        if have < size:
            if hasattr(os, "posix_fallocate"):  # without it, a full memory is a SIGBUS at the first touch
                os.posix_fallocate(self.file, have, size - have)
            else:
                os.ftruncate(self.file, size)
        if size:
            self._map = mmap.mmap(self.file, os.fstat(self.file).st_size)


# -- the far end ---------------------------------------------------------------------------------------------------------


def serve(channel: Any) -> None:
    """Host one engine until the channel closes.

    The first message is a dict: the engine's file (`source`, `file`), its class (`kind`) and that class's arguments
    (`settings`), where to put files (`scratch`, or None to choose) and the file descriptor of the arena (`arena`, or None).
    Every other one is (method of the engine, its arguments). Each is answered by ("done", result), ("failed", words), or at
    the start ("unavailable", words).
    """
    os.dup2(2, 1)  # what native code prints must not be lost, nor mistaken for an answer
    order = channel.receive()
    scratch = order["scratch"] or tempfile.mkdtemp(prefix="equivcheck-")
    _watch(channel, scratch)
    carrier: Any = Stream()
    if order["arena"] is not None:
        os.set_inheritable(order["arena"], False)
        carrier = Arena(order["arena"], near=False)
    try:
        tempfile.tempdir = os.environ["TMPDIR"] = scratch
        answer, engine = _begin(order)
        channel.send(answer)
        while engine is not None:
            method, arguments = carrier.receive(channel)
            answer = _answer(getattr(engine, method), arguments, scratch)
            try:
                carrier.send(channel, answer)
            except OSError as error:
                carrier.send(channel, ("failed", _words(error, scratch)))
            del arguments, answer
    except EOFError:
        pass  # the near end has what it wanted
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _watch(channel: Any, scratch: str) -> None:
    """Become the head of a process group, and start the watchdog over it, with the line to the near end in its hands."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    line = channel.gateway._io.infile.fileno()
    arguments = [str(os.getpid()), str(line), scratch]
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHDOG, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(line,),
        start_new_session=True,
        cwd="/",
    )


def _begin(order: Dict[str, Any]) -> Tuple[Any, Any]:
    """Bring the engine to life: its answer to the near end, and the engine, or None."""
    if np is None:
        return ("unavailable", "No module named 'numpy'"), None
    module = types.ModuleType("equivcheck_engine")
    sys.modules[module.__name__] = module
    try:
        exec(compile(order["source"], order["file"], "exec"), module.__dict__)
        engine = getattr(module, order["kind"])(**order["settings"])
        return ("done", {"python": platform.python_version(), "node": platform.node(), **engine.info()}), engine
    except Exception as error:
        return ("unavailable", str(error) or type(error).__name__), None


def _answer(method: Callable[..., Any], arguments: Tuple[Any, ...], scratch: str) -> Tuple[str, Any]:
    try:
        return ("done", method(*arguments))
    except (
        Exception,
        SystemExit,
        KeyboardInterrupt,
    ) as error:  # engines raise their own; a user's script may call exit()
        return ("failed", _words(error, scratch))


def _words(error: BaseException, scratch: str) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full there ({scratch}): free some space, or set TMPDIR to a folder with more"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "not enough memory there"
    return str(error) or type(error).__name__


if __name__ == "__channelexec__":
    serve(channel)  # type: ignore[name-defined]  # noqa: F821  # execnet puts it there
