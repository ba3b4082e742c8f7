"""What an import costs: a pytest plugin is imported in every pytest run, and --help must not wait for an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import equivcheck

HEAVY = ("numpy", "onnx", "onnxruntime", "scipy", "PIL", "safetensors", "ml_dtypes", "google.protobuf", "msgspec")


def loaded_by(code: str, *, alone: tuple[str, ...] = HEAVY) -> list[str]:
    """Run `code` in a new interpreter; return which of `alone` it has loaded."""
    script = f"{code}\nimport sys\nprint(*sorted(set({alone!r}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip().splitlines()[-1].split() if done.stderr.strip() else []


def test_importing_equivcheck_loads_nothing_heavy() -> None:
    assert loaded_by("import equivcheck; equivcheck.__version__; dir(equivcheck)") == []


def test_importing_the_plugin_loads_nothing_heavy() -> None:
    assert loaded_by("import equivcheck.pytest_plugin") == []


def test_importing_the_errors_loads_nothing_heavy() -> None:
    assert loaded_by("import equivcheck; equivcheck.EquivcheckError, equivcheck.Inconclusive") == []


@pytest.mark.parametrize("arguments", [["--help"], ["diff", "--help"], ["split", "--help"], ["--version"]])
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    code = f"from equivcheck.cli import main\nassert main({arguments!r}) == 0"
    assert loaded_by(code) == []


def test_every_public_name_is_there_and_only_those() -> None:
    assert dir(equivcheck) == sorted(equivcheck.__all__)
    for name in equivcheck.__all__:
        assert getattr(equivcheck, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'difff'"):
        _ = equivcheck.difff


def test_no_submodule_hides_a_public_function(fixtures_dir: Path) -> None:
    """Import all submodules, then call each public function: a module of the same name would have replaced it."""
    model = str(fixtures_dir / "digits_qdq_s8.onnx")
    code = f"""
import importlib, pkgutil, equivcheck
for module in pkgutil.walk_packages(equivcheck.__path__, "equivcheck."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:  # an engine that is not installed; never a module of ours
        assert not missing.name.startswith("equivcheck"), missing
assert equivcheck.diff({model!r}, candidate="ort").verdict == "equivalent"
assert equivcheck.assert_equivalent({model!r}, candidate="ort").equivalent
assert len(equivcheck.split({model!r}, "GlobalAveragePool")) == 1
assert isinstance(equivcheck.diff({model!r}, candidate="ort"), equivcheck.Result)
assert issubclass(equivcheck.EquivcheckError, Exception) and issubclass(equivcheck.Inconclusive, Exception)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
