"""Faults planted in the candidate's model are found, and the step they were planted in is the first culprit."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import equivcheck
from planting import KINDS, plant
from real_models import REAL_MODELS

MODELS = [m for m in REAL_MODELS if m.file.startswith(("tiny_resnet8", "st_mobilenet", "ppocr"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name[:12])
def test_a_planted_fault_is_found_at_its_own_step(shared: Path, tmp_path: Path, model, kind: str) -> None:
    original = onnx.load(shared / "models" / model.file)
    for seed in (0, 1):
        planted = plant(original, kind, seed)
        if planted is None:
            assert (model.name[:11], kind) in NOT_PLANTABLE, f"{kind} found no Conv to be planted in"
            return
        edited, made = planted
        path = tmp_path / f"edited_{seed}.onnx"
        onnx.save(edited, path)
        result = equivcheck.diff(
            shared / "models" / model.file,
            inputs=str(shared / "models" / "images" / model.pictures[0]),
            preprocess=model.recipe,
            candidate="vnpu",
            candidate_model=path,
        )
        assert result.verdict == "different", f"{kind} (seed {seed}) at {made}: {result}"
        first = next(step for step in result.steps if step.id == result.first_culprit)
        assert made in first.outputs, f"{kind} (seed {seed}) planted at {made}, first culprit {first.outputs}"
        assert len(result.culprits) == 1, f"{kind} (seed {seed}): {[c.step for c in result.culprits]}"


# Nothing may be missing here silently: a model without per-channel scales or biases says so by name.
NOT_PLANTABLE: set[tuple[str, str]] = set()
