"""Versions known to be broken: which versions a line means, and that the file says why and how to get round it."""

from __future__ import annotations

import pytest

from equivcheck.backends import known
from equivcheck.backends.known import Broken


def defect(versions: str, *, always: bool = False) -> Broken:
    return Broken(engine="x", versions=versions, what="w", reason="r", cure="c", source="s", always=always)


@pytest.mark.parametrize(
    ("versions", "inside", "outside"),
    [
        ("*", ["0.1", "2026.4.1"], []),
        ("<2.6.0-1", ["2.5.0", "2.6.0", "2.6.0rc1", "2.6.0-0"], ["2.6.0-1", "2.6.1", "2.10.0"]),
        ("==2.14", ["2.14", "2.14.0", "2.14.3"], ["2.1", "2.140", "2.15.0"]),
        (">=2025.4.1,<=2026.4.1", ["2025.4.1", "2026.0", "2026.4.1"], ["2025.4.0", "2026.4.2"]),
        (">1.9, <1.10", ["1.9.1"], ["1.9", "1.10", "1.10.0"]),
        ("!=1.2", ["1.3", "1.20"], ["1.2", "1.2.5"]),
        ("==2.0", ["2", "2.0", "2.0.1"], ["2.1", "20"]),
        ("<3.0", ["3.0rc1", "3.0a2", "2.9"], ["3.0", "3"]),
    ],
)
def test_versions_are_compared_as_releases_are_ordered(versions: str, inside: list[str], outside: list[str]) -> None:
    assert [version for version in inside if not defect(versions).includes(version)] == []
    assert [version for version in outside if defect(versions).includes(version)] == []


def test_every_line_of_the_file_can_be_read_and_says_all_it_must() -> None:
    assert len(known.defects()) >= 10
    for line in known.defects():
        assert isinstance(line.includes("1.0"), bool), line
        for text in (line.engine, line.what, line.reason, line.cure, line.source):
            assert text.strip() == text
            assert text


@pytest.mark.parametrize(
    ("engine", "version", "word"),
    [
        ("tflite-runtime", "2.5.0", "VX delegate"),
        ("imx_lib", "2.1.9", "VX delegate"),
        ("tflite-runtime", "2.14.0", "FULLY_CONNECTED"),
        ("openvino", "2026.4.1", "Concat"),
        ("onnxruntime", "1.32.0", "VNNI"),
        ("rknn-toolkit2", "2.5.0", "optimization_level 3"),
    ],
)
def test_what_was_measured_is_in_it(engine: str, version: str, word: str) -> None:
    assert any(word in line.what for line in known.broken(engine, version))


def test_an_engine_that_is_right_has_no_lines() -> None:
    assert known.broken("ai-edge-litert", "2.3.0") == []
    assert known.broken("tflite-runtime", "2.13.0") == []


def test_a_report_is_warned_of_what_concerns_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "defects", lambda: (defect("<2", always=True), defect("*")))
    assert known.warnings("x", "1.5") == ["x 1.5: w; c"]
    assert known.warnings("x", "2.0") == []
    assert known.warnings("y", "1.5") == []


def test_a_line_that_is_no_list_of_versions_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="is no list of versions"):
        defect("about 2").includes("2")
