"""Words that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str, several: str | None = None) -> str:
    """`1 step`, `2 steps`; `several` is the plural where that takes more than an s."""
    return f"{number} {noun if number == 1 else several or noun + 's'}"
