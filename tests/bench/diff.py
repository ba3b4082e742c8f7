"""What a whole `equivcheck diff` costs: CPU seconds and peak memory, beside the least it could be and beside Polygraphy.

    python tests/bench/diff.py [--repeat N] [--no-second-opinion] [--no-polygraphy] [-m SUBSTRING] [MODELS]

MODELS is the folder with the models and `images/` (default: $EQUIVCHECK_MODELS, else models/ of the shared folder). The
reference is `ort`, the candidate `ort:optimization=disable`, the input one photo; every value is judged, its own step and
since the input. Rows:

* `diff`: `equivcheck diff`, the whole process;
* `bare`: `bare_run.py`, which makes exactly the engine calls of that `diff` (recorded beforehand), its sessions set up
  alike, and reads every output once; `bare, as is`: the same with what ONNX Runtime does by default (threads that spin while
  they wait, a memory arena a session), which is what a plain script pays;
* `polygraphy`: `polygraphy run --onnxrt --onnxrt --onnx-outputs mark all` on random input. It measures less: two equal
  sessions, values since the input only. It needs the package polygraphy beside onnx and onnxruntime.

CPU seconds are user + system of the child, its own children included, the least of N runs taken in turns; memory is its
peak resident size. Exits 1 where a target is missed: at most 1.25 times `bare, as is`; Polygraphy at least 4 times the CPU (5
times without the second opinion), and no less memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from real_models import REAL_MODELS, RealModel, shared_folder

MODELS = ("coral_tf2_mobilenet_v2_1.0_224_ptq_qdq.onnx", "efficientnet_lite0_int8_qdq_s8s8_pc.onnx")
OVER_BARE = 1.25
UNDER_POLYGRAPHY = {True: 4.0, False: 5.0}  # by: with a second opinion


@dataclass(frozen=True)
class Cost:
    """CPU seconds (user + system, children included) and the peak resident memory in MB of one command."""

    cpu_s: float
    peak_mb: float


def costs(commands: Mapping[str, Sequence[str]], repeat: int) -> dict[str, Cost]:
    """Run the commands in turns, `repeat` times; the least of each figure. Raises RuntimeError where one fails.

    In turns, because a processor's speed changes over minutes. A first round is not counted: it compiles Python's byte code,
    as an installation does, into a folder of its own (a checkout may have none, and the environment may forbid to write it).
    """
    with tempfile.TemporaryDirectory(prefix="equivcheck-bench-") as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        rounds = [{name: _once(command, environment) for name, command in commands.items()} for _ in range(1 + repeat)][
            1:
        ]
    return {
        name: Cost(min(each[name].cpu_s for each in rounds), min(each[name].peak_mb for each in rounds))
        for name in commands
    }


def _once(command: Sequence[str], environment: Mapping[str, str]) -> Cost:
    with tempfile.TemporaryFile() as said:
        actions = [(os.POSIX_SPAWN_DUP2, said.fileno(), 1), (os.POSIX_SPAWN_DUP2, said.fileno(), 2)]
        child = os.posix_spawn(command[0], command, environment, file_actions=actions)
        _, status, used = os.wait4(child, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)}\n{said.read().decode(errors='replace')}")
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def diff_arguments(model: RealModel, folder: Path, second_opinion: bool) -> list[str]:
    return [
        "diff", str(folder / model.file), "-c", "ort:optimization=disable",
        "-i", str(folder / "images" / model.pictures[0]), "--preprocess", model.recipe,
        "--second-opinion" if second_opinion else "--no-second-opinion",
    ]  # fmt: skip


# -- recording the engine calls ----------------------------------------------------------------------------------------


class _Recorder:
    """Writes down what is asked of `OrtEngine`, in a form that `bare_run.py` repeats."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[dict[str, Any]] = []
        self.engines: list[object] = []  # kept, so that no two share an id

    def _note(self, do: str, engine: object, suffix: str, content: bytes, **more: Any) -> None:
        if not any(engine is known for known in self.engines):
            self.engines.append(engine)
        number = next(k for k, known in enumerate(self.engines) if known is engine)
        name = f"{len(self.calls):03}.{suffix}"
        (self.folder / name).write_bytes(content)
        self.calls.append({"do": do, "engine": number, "feeds" if do == "run" else "model": name, **more})

    def model(self, do: str, engine: object, content: bytes | str, options: Mapping[str, Any]) -> None:
        self._note(do, engine, "onnx", content if isinstance(content, bytes) else Path(content).read_bytes(),
                   options={key: options[key] for key in options if key != "provider"})  # fmt: skip

    def run(self, engine: object, feeds: Mapping[str, np.ndarray]) -> None:
        ports, content = [], bytearray()
        for name, array in feeds.items():
            ports.append({"name": name, "dtype": str(array.dtype), "size": array.size, "shape": array.shape,
                          "at": len(content)})  # fmt: skip
            content += array.tobytes()
            content += bytes(-len(content) % 64)
        self._note("run", engine, "bin", bytes(content), ports=ports)


def record(folder: Path, arguments: list[str]) -> int:
    """Run the command line in this process with every engine call written to `folder`."""
    from equivcheck.cli import main
    from equivcheck.engines.ort import OrtEngine

    recorder = _Recorder(folder)
    load, optimise, run = OrtEngine.load, OrtEngine.optimise, OrtEngine.run

    def noted_load(self: OrtEngine, model: bytes | str, options: Mapping[str, Any]) -> Any:
        recorder.model("load", self, model, options)
        return load(self, model, options)

    def noted_optimise(self: OrtEngine, model: bytes, options: Mapping[str, Any]) -> bytes:
        recorder.model("optimise", self, model, options)
        return optimise(self, model, options)

    def noted_run(self: OrtEngine, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, Any]:
        recorder.run(self, feeds)
        return run(self, feeds, outputs)

    OrtEngine.load, OrtEngine.optimise, OrtEngine.run = noted_load, noted_optimise, noted_run  # type: ignore[method-assign]  # watched on purpose
    code = main(arguments)
    (folder / "calls.json").write_text(json.dumps(recorder.calls))
    return code


# -- the table ---------------------------------------------------------------------------------------------------------


def measure(model: RealModel, folder: Path, second_opinion: bool, repeat: int, polygraphy: bool) -> dict[str, Cost]:
    arguments = diff_arguments(model, folder, second_opinion)
    with tempfile.TemporaryDirectory(prefix="equivcheck-bench-") as scratch:
        _once([sys.executable, __file__, "--record", scratch, *arguments], os.environ)
        bare = [sys.executable, str(Path(__file__).with_name("bare_run.py")), scratch]
        commands = {
            "diff": [sys.executable, "-m", "equivcheck", *arguments],
            "bare": bare,
            "bare, as is": [*bare, "--defaults"],
        }
        if polygraphy:
            twice = ["--onnxrt", "--onnxrt", "--onnx-outputs", "mark", "all"]
            tool = str(Path(sys.executable).with_name("polygraphy"))
            commands["polygraphy"] = [tool, "run", str(folder / model.file), *twice]
        return costs(commands, repeat)


def missed(found: Mapping[str, Cost], second_opinion: bool) -> list[str]:
    ours, bare, peer = found["diff"], found["bare, as is"], found.get("polygraphy")
    lines = []
    if ours.cpu_s > OVER_BARE * bare.cpu_s:
        lines.append(f"{ours.cpu_s / bare.cpu_s:.2f} times bare (as is), the target is {OVER_BARE}")
    if peer is not None and peer.cpu_s < UNDER_POLYGRAPHY[second_opinion] * ours.cpu_s:
        wanted = UNDER_POLYGRAPHY[second_opinion]
        lines.append(f"Polygraphy takes {peer.cpu_s / ours.cpu_s:.2f} times our CPU, the target is {wanted}")
    if peer is not None and ours.peak_mb > peer.peak_mb:
        lines.append(f"{ours.peak_mb - peer.peak_mb:.0f} MB more than Polygraphy, the target is none")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="?", default=os.environ.get("EQUIVCHECK_MODELS"))
    parser.add_argument("-m", "--model", default="", help="only models whose name holds this")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-second-opinion", action="store_true", help="only without; default: with and without")
    parser.add_argument("--no-polygraphy", action="store_true")
    arguments = parser.parse_args()
    shared = shared_folder()
    if arguments.models is None and shared is None:
        print("no folder of real models: give one, or set EQUIVCHECK_MODELS", file=sys.stderr)
        return 2
    folder = Path(arguments.models) if arguments.models is not None else shared / "models"
    bad = False
    for model in REAL_MODELS:
        if model.file not in MODELS or arguments.model not in model.file:
            continue
        for second_opinion in (False,) if arguments.no_second_opinion else (True, False):
            found = measure(model, folder, second_opinion, arguments.repeat, not arguments.no_polygraphy)
            print(f"{model.name}, {'with' if second_opinion else 'without'} second opinion")
            for name, figures in found.items():
                times = figures.cpu_s / found["diff"].cpu_s
                print(f"  {name:12}{figures.cpu_s:7.2f} s CPU{times:7.2f} x diff{figures.peak_mb:8.0f} MB", flush=True)
            for line in missed(found, second_opinion):
                bad = True
                print(f"  MISSED: {line}")
    return int(bad)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        sys.exit(record(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
