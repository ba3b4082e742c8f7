"""`equivcheck backends`: one line each, works or why not, and with -v what is known to be wrong."""

from __future__ import annotations

import platform
from importlib.metadata import EntryPoint

import onnxruntime
import pytest

from equivcheck.backends import registry
from equivcheck.backends.known import defects
from equivcheck.backends.ort import OrtBackend
from equivcheck.backends.registry import known as registered
from equivcheck.cli import main
from equivcheck.errors import BackendUnavailable


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["backends", *options]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def line_of(name: str, text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{name} "))


def test_every_backend_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = listed(capsys)
    assert [line.split()[0] for line in text.splitlines()] == sorted(registered())
    assert all(line.split()[1] in ("yes", "no") for line in text.splitlines())


def test_a_line_names_version_interpreter_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    line = line_of("ort", listed(capsys))
    assert line.startswith(
        f"ort        yes onnxruntime {onnxruntime.__version__}, Python {platform.python_version()}, CPU "
    )


def test_a_backend_that_is_not_installed_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equivcheck.backends.qnn.find_spec", lambda name: None)
    line = line_of("qnn", listed(capsys))
    assert line.split()[1] == "no"
    assert "pip install 'equivcheck[qnn]'" in line


def test_an_engine_that_is_there_but_does_not_start_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: OrtBackend) -> None:
        raise BackendUnavailable("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(OrtBackend, "engine", broken)
    line = line_of("ort", listed(capsys))
    assert line == "ort        no  does not start: libgomp.so.1: cannot open shared object file"


def test_a_backend_of_another_package_that_cannot_be_imported_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = EntryPoint("gone", "no_such_package:Backend", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [gone])
    assert listed(capsys) == "gone       no  not here: No module named 'no_such_package'\n"


def test_verbose_lists_options_proofs_and_what_is_known_to_be_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    text = listed(capsys, "-v")
    assert "optimization=  graph optimisation level (all, extended, basic, disable), default all" in text
    assert "tflite-reference: Conv: proved" in text
    words = " ".join(text.split())
    for defect in defects():
        assert defect.what in words
        assert f"cure {defect.cure}" in words
        assert f"source {defect.source}" in words


def test_what_is_known_of_the_version_here_stands_beside_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    text = listed(capsys, "-v")
    own = text[text.index("ort  ") : text.index("qnn  ")]
    assert "KNOWN here: u8 activations times s8 weights on an x86 CPU without VNNI" in own
