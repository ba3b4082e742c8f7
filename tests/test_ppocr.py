"""A mid-size real network that needs no folder of models: the angle classifier of PP-OCR, quantised here.

It ships as float ONNX in the package `rapidocr` (Apache-2.0), which `make test` installs without its dependencies; ten
GlobalAveragePools, 0.6 MB.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest

import equivcheck
from equivcheck.inputs import InputSpec, load_samples

RECIPE = "resize=48x192,scale=1/127.5,mean=1"
SPEC = InputSpec("x", "float32", (1, 3, 48, 192))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, fixtures_dir: Path) -> Path:
    """The classifier at opset 13, as QDQ with u8 activations and s8 weights per channel; a crop of a photo calibrates."""
    found = importlib.util.find_spec("rapidocr")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package rapidocr is not here: pip install --no-deps rapidocr")
    source = Path(found.submodule_search_locations[0]) / "models" / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"
    folder = tmp_path_factory.mktemp("ppocr")
    model = onnx.version_converter.convert_version(onnx.load(source), 13)
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, SPEC.shape, strict=True):
        dim.dim_value = size
    onnx.save(model, folder / "float.onnx")
    return quantised(folder, pictures(fixtures_dir))


def pictures(fixtures_dir: Path) -> list[np.ndarray]:
    return [s.arrays()["x"] for s in load_samples([str(fixtures_dir / "photos")], [SPEC], recipe=RECIPE).samples]


def quantised(folder: Path, calibration: list[np.ndarray]) -> Path:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Pictures(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is untyped
        def __init__(self) -> None:
            self.left = [{"x": picture} for picture in calibration]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    place = folder / "u8.onnx"
    quantize_static(
        folder / "float.onnx",
        place,
        Pictures(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    return place


@pytest.mark.parametrize("candidate", ["vnpu", "vnpu:profile=exact,target=all", "ort:optimization=disable"])
def test_the_angle_classifier_is_equivalent_at_all_ten_pools(
    classifier: Path, fixtures_dir: Path, candidate: str
) -> None:
    result = equivcheck.diff(
        classifier,
        inputs=str(fixtures_dir / "photos" / "china.png"),
        preprocess=RECIPE,
        split_at="GlobalAveragePool",
        candidate=candidate,
    )
    assert result.equivalent, str(result)
    assert len(result.split_points) == 10
    assert result.coverage.judged == result.coverage.steps > 100
    assert result.reference.observation.disturbed is False
