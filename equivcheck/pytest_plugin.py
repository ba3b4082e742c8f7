"""The pytest plugin: a fixture `equivcheck` with `diff` and `assert_equivalent`.

It is imported in every pytest run of an environment that has equivcheck, so it loads nothing before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from equivcheck.result import Result


class Equivcheck:
    """What the fixture gives. Both methods take what `equivcheck.diff` takes."""

    def diff(self, model: Any, **options: Any) -> Result:
        """Run and judge; return the Result, whatever its verdict."""
        from equivcheck.check import diff

        return diff(model, **options)

    def assert_equivalent(self, model: Any, **options: Any) -> Result:
        """Return the Result; fail the test with the first screen when they differ, raise Inconclusive without a verdict."""
        __tracebackhide__ = True
        from equivcheck.check import assert_equivalent

        return assert_equivalent(model, **options)


@pytest.fixture(scope="session")
def equivcheck() -> Equivcheck:
    """Numerical equivalence of a model on two backends: `equivcheck.assert_equivalent("model.onnx", candidate="...")`."""
    return Equivcheck()
