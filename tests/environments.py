"""Other interpreters that tests need, each with its pins, under EQUIVCHECK_ENVS (default ~/.cache/equivcheck-envs).

    python tests/environments.py        builds those that are not there; .ci/run does this before the tests

A folder's name holds the hash of its pins, so a changed pin is a new folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """A virtual environment: the version of its Python and what pip puts there."""

    name: str
    python: str
    pins: tuple[str, ...]

    @property
    def folder(self) -> Path:
        root = Path(os.environ.get("EQUIVCHECK_ENVS") or Path.home() / ".cache" / "equivcheck-envs")
        key = hashlib.sha256("\n".join([self.python, *self.pins]).encode()).hexdigest()[:12]
        return root / f"{self.name}-{key}"

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def ready(self) -> bool:
        return (self.folder / "complete").exists()

    def build(self) -> None:
        """Make it; what an earlier attempt left is removed first. Raises FileNotFoundError without that Python."""
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([_python(self.python), "-m", "venv", self.folder], check=True)
        subprocess.run([self.interpreter, "-m", "pip", "install", "--quiet", *self.pins], check=True)
        (self.folder / "complete").touch()


# The oldest Python that the travelling files promise to run on, with the last onnxruntime that was built for it.
PYTHON38 = Environment("python38", "3.8", ("numpy==1.24.4", "onnxruntime==1.19.2"))
# The last tflite-runtime, as boards have it: Python below 3.12, numpy below 2.
TFLITE_RUNTIME = Environment("tflite-runtime", "3.11", ("numpy==1.26.4", "tflite-runtime==2.14.0"))
ENVIRONMENTS = (PYTHON38, TFLITE_RUNTIME)


def _python(version: str) -> str:
    """Where a Python of that version is: on the path, or where pyenv keeps it."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    for found in filter(None, candidates):
        asked = subprocess.run([found, "-c", "import venv"], check=False, capture_output=True)
        if asked.returncode == 0:  # a shim of pyenv may name a version that is not selected
            return found
    raise FileNotFoundError(f"no Python {version} here: put python{version} on the path, or: pyenv install {version}")


def main() -> int:
    for environment in ENVIRONMENTS:
        if not environment.ready:
            print(f"building {environment.folder}: Python {environment.python}, {', '.join(environment.pins)}")
            environment.build()
    return 0


if __name__ == "__main__":
    sys.exit(main())
