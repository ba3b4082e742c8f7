"""equivcheck: is the difference between a CPU and an NPU rounding, or is something wrong - and where, and why?

`equivcheck.diff(...)` runs and judges; `equivcheck.assert_equivalent(...)` raises where they differ;
`equivcheck.record(...)` and `equivcheck.compare(...)` keep the values of a run, and judge what was kept. The import is lazy:
neither numpy nor an engine is loaded before a name is used, because the pytest plugin is imported in every pytest run.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers know it; `typing` itself would be most of what this import costs
if TYPE_CHECKING:
    from typing import Any

    from equivcheck.bundle import pack_bundle
    from equivcheck.check import assert_equivalent, diff
    from equivcheck.errors import EquivcheckError, Inconclusive
    from equivcheck.parts import split
    from equivcheck.recorder import record
    from equivcheck.replay import compare
    from equivcheck.result import Result

__version__ = "0.1.0"
__all__ = [
    "EquivcheckError",
    "Inconclusive",
    "Result",
    "__version__",
    "assert_equivalent",
    "compare",
    "diff",
    "pack_bundle",
    "record",
    "split",
]

_HOMES = {
    "diff": "equivcheck.check",
    "assert_equivalent": "equivcheck.check",
    "compare": "equivcheck.replay",
    "pack_bundle": "equivcheck.bundle",
    "record": "equivcheck.recorder",
    "split": "equivcheck.parts",
    "Result": "equivcheck.result",
    "EquivcheckError": "equivcheck.errors",
    "Inconclusive": "equivcheck.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'equivcheck' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
