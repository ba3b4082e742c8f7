"""Fixtures that every test may ask for."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared models and cases: EQUIVCHECK_SHARED, or ../shared beside the checkout.

    Skips with the reason where there is none; fails instead when EQUIVCHECK_REQUIRE_SHARED=1.
    """
    place = Path(os.environ.get("EQUIVCHECK_SHARED", ROOT.parent / "shared"))
    if not (place / "models").is_dir():
        reason = f"no shared models and cases at {place}: set EQUIVCHECK_SHARED to their folder"
        if os.environ.get("EQUIVCHECK_REQUIRE_SHARED") == "1":
            pytest.fail(reason)
        print(reason)
        pytest.skip(reason)
    return place


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The folder of the small models that the project keeps."""
    return ROOT / "fixtures"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI nothing is skipped: with EQUIVCHECK_NO_SKIPS=1 a skip is a failure with the same reason."""
    return _failed_where_nothing_may_be_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Nor is a whole file, by an `importorskip` at its top."""
    return _failed_where_nothing_may_be_skipped((yield))


def _failed_where_nothing_may_be_skipped(report: Report) -> Report:
    if report.skipped and os.environ.get("EQUIVCHECK_NO_SKIPS") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"
    return report
