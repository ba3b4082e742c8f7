"""Wider limits that a user's script declares: checked, carried, printed with their reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import equivcheck
from builder import Qdq
from equivcheck.backends.registry import backend
from equivcheck.errors import BackendUnavailable
from equivcheck.models.onnx.load import OnnxModel, model_from_bytes
from equivcheck.recording import load
from small_models import end, start

TEN_LINES = Path(__file__).parent / "scripts" / "run_ort.py"
STEP = 1 / 128
Script = Callable[[str], str]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def board(tmp_path: Path) -> Script:
    """The SPEC of a board whose Tanh is one code too high wherever there is room, with these lines before it."""

    def written(declared: str) -> str:
        path = tmp_path / "board.py"
        path.write_text(
            TEN_LINES.read_text().replace("def run(", "def ort(")
            + f"""
import numpy as np
{declared}
def run(model_path, feeds):
    top = np.float32(127 * {STEP})
    return {{n: np.minimum(a + np.float32({STEP}), top) if "tanh" in n else a for n, a in ort(model_path, feeds).items()}}
"""
        )
        return f"script:{path}"

    return written


@pytest.fixture
def tanh() -> OnnxModel:
    m = Qdq(dtype="int8", seed=1)
    return model_from_bytes(m.model(end(m, m.op("Tanh", [start(m)]), STEP)).SerializeToString(), "tanh.onnx")


def test_without_a_declaration_the_step_is_a_culprit(board: Script, tanh: OnnxModel) -> None:
    result = equivcheck.diff(tanh, candidate=board(""))
    assert result.verdict == "different"
    assert [culprit.op_type for culprit in result.culprits] == ["Tanh"]


def test_a_declared_limit_holds_and_its_reason_is_printed(board: Script, tanh: OnnxModel) -> None:
    spec = board('LEGAL_EXCESS = {"Tanh": (1.0, "its table is read one entry too high")}')
    result = equivcheck.diff(tanh, candidate=spec)
    assert result.verdict == "equivalent"
    assert "its table is read one entry too high" in str(result)


def test_a_limit_that_is_too_narrow_does_not_help(board: Script, tanh: OnnxModel) -> None:
    spec = board('LEGAL_EXCESS = {"Tanh": (0.4, "nearly exact")}')
    assert equivcheck.diff(tanh, candidate=spec).verdict == "different"


def test_it_is_kept_with_the_recording(board: Script, tanh: OnnxModel, tmp_path: Path) -> None:
    spec = board('LEGAL_EXCESS = {"Tanh": (1, "high")}')
    place = equivcheck.record(tanh, backend=spec, inputs="random:1", save_to=tmp_path / "npu")
    assert load(place).declared == {"Tanh": (1.0, "high")}
    assert equivcheck.compare(place, model=tanh).verdict == "equivalent"


def test_python_3_8_tells_it_too(board: Script, python38: str) -> None:
    spec = board('LEGAL_EXCESS = {"Tanh": (1, "high")}')
    assert backend(f"{spec}@python={python38}").legal_excess() == {"Tanh": (1.0, "high")}


@pytest.mark.parametrize(
    "given",
    [
        "['Tanh']",
        "{'Tanh': 1.0}",
        "{'Tanh': (1.0,)}",
        "{'Tanh': (1.0, ' ')}",
        "{'Tanh': ('1', 'high')}",
        "{'Tanh': (-1, 'high')}",
        "{'Tanh': (float('nan'), 'high')}",
        "{'Tanh': (float('inf'), 'high')}",
        "{'Tanh': (True, 'high')}",
        "{7: (1.0, 'high')}",
    ],
)
def test_a_declaration_without_a_number_and_a_reason_is_the_users_mistake(
    board: Script, tanh: OnnxModel, given: str
) -> None:
    spec = board(f"LEGAL_EXCESS = {given}")
    with pytest.raises(BackendUnavailable, match=r"LEGAL_EXCESS must be \{op_type: \(limit in LSB, \"reason\"\)\}"):
        backend(spec).open(tanh)
