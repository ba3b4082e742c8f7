"""Puts the real output of each console session into the README: run it after changing the screen."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    readme = ROOT / "README.md"

    def rerun(match: re.Match[str]) -> str:
        words = shlex.split(match[1])
        ran = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        shown = re.sub(r" +note +the software of a real NPU is here too.*\n", "", ran.stdout)  # not on every machine
        return f"```console\n$ {match[1]}\n{shown.rstrip()}\n```"

    text = re.sub(r"```console\n\$ (.+?)\n(.*?)```", rerun, readme.read_text(encoding="utf-8"), flags=re.S)
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
