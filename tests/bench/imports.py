"""What starting costs: CPU milliseconds of `equivcheck --help` beside click's own, of `import equivcheck` beside Python's.

    python tests/bench/imports.py [--repeat N]

Each is a process of its own, user + system time, the least of N taken in turns. Exits 1 where a target is missed:
`equivcheck --help` at most 40 ms over a click command that prints its help, `import equivcheck` at most 15 ms over
`python -c pass`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.diff import costs

_CLICK = "import click; click.command(name='x')(lambda: None).main(['--help'], standalone_mode=False)"
_PAIRS = (
    ("equivcheck --help", ["-m", "equivcheck", "--help"], "click", ["-c", _CLICK], 40.0),
    ("import equivcheck", ["-c", "import equivcheck"], "python -c pass", ["-c", "pass"], 15.0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=30)
    repeat = parser.parse_args().repeat
    bad = False
    for name, ours, beside, theirs, allowed in _PAIRS:
        found = costs({"ours": [sys.executable, *ours], "theirs": [sys.executable, *theirs]}, repeat)
        own, base = 1000.0 * found["ours"].cpu_s, 1000.0 * found["theirs"].cpu_s
        print(
            f"{name:20}{own:7.1f} ms   {beside:16}{base:7.1f} ms   over it {own - base:+6.1f} ms (target {allowed:g})"
        )
        bad |= own - base > allowed
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
