"""Pictures that went wrong on the way to a model are recognised by what turns the right one into them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equivcheck.wrong_input import explain_input

MEAN, STD = (np.array(v).reshape(1, 3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))


def photo(path: Path) -> np.ndarray:
    """NCHW, uint8, not square."""
    picture = Image.open(path).convert("RGB").resize((40, 30))
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1)[None])


@pytest.fixture(params=["photo", "random"])
def picture(request: pytest.FixtureRequest, fixtures_dir: Path) -> np.ndarray:
    if request.param == "photo":
        return photo(fixtures_dir / "photos" / "flower.png")
    return np.random.default_rng(0).integers(0, 256, (1, 3, 30, 40)).astype(np.uint8)


def normalised(x: np.ndarray) -> np.ndarray:
    return ((x / 255 - MEAN) / STD).astype(np.float32)


def unit(x: np.ndarray) -> np.ndarray:
    return (x / 255).astype(np.float32)


CASES: dict[str, tuple[Callable, Callable, str]] = {
    "colours": (lambda x: x, lambda x: x[:, ::-1], "reversed colour order"),
    "left to right": (unit, lambda x: unit(x[..., ::-1]), "mirrored left to right"),
    "upside down": (lambda x: x, lambda x: x[:, :, ::-1], "upside down"),
    "turned": (lambda x: x, lambda x: np.rot90(x, 1, (2, 3)), "turned left by 90 degrees"),
    "to NHWC": (lambda x: x, lambda x: x.transpose(0, 2, 3, 1), "transposed to channels last"),
    "to NCHW": (lambda x: x.transpose(0, 2, 3, 1), lambda x: x, "transposed to channels first"),
    "NHWC bytes": (
        lambda x: x,
        lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape),
        r"channels last \(NHWC\) in memory",
    ),
    "NCHW bytes": (lambda x: x.transpose(0, 2, 3, 1), lambda x: x.reshape(1, 30, 40, 3), "channels first .* in memory"),
    "1/255": (lambda x: x.astype(np.float32), unit, r"times 1/255 \("),
    "1/127.5": (lambda x: x.astype(np.float32), lambda x: x / 127.5 - 1, r"times 1/127.5 .* and minus 1"),
    "not divided": (unit, lambda x: x.astype(np.float32), "times 255"),
    "signedness": (lambda x: x, lambda x: (x.astype(int) - 128).astype(np.int8), "128 off"),
    "same bytes": (lambda x: x, lambda x: x.view(np.int8), "bytes taken for the other signedness"),
    "not normalised": (normalised, unit, r"without ImageNet's mean and std, as values of 0 to 1:"),
    "not normalised at all": (normalised, lambda x: x, r"without ImageNet's mean and std, as values of 0 to 255"),
    "normalised": (unit, normalised, r"by ImageNet's mean and std for values of 0 to 1"),
    "other means": (unit, lambda x: x / 255 - MEAN, r"minus \[0.485, 0.456, 0.406\] by channel"),
    "colours and scale": (unit, lambda x: x[:, ::-1] / 127.5 - 1, "reversed colour order .* times 2 and minus 1"),
    "layout and scale": (unit, lambda x: (x / 127.5 - 1).transpose(0, 2, 3, 1), "channels last .* times 2 and minus 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_change_is_found_and_counted(picture: np.ndarray, case: str) -> None:
    wanted, got, words = CASES[case]
    cause = explain_input(wanted(picture), got(picture))
    assert cause is not None
    assert cause.kind == "wrong_input"
    assert re.search(words, cause.evidence), cause.evidence
    explained, of = cause.explains
    assert explained == of > 0
    assert f"explains {explained} of {of} elements" in cause.evidence


def test_one_picture_in_a_batch_and_shapes_without_a_batch(picture: np.ndarray) -> None:
    batch = np.concatenate([picture, picture[..., ::-1]])
    for wanted in (batch, picture[0]):
        cause = explain_input(wanted, wanted[..., ::-1, :])
        assert cause is not None
        assert "upside down" in cause.evidence


def test_quantised_pictures_are_recognised_through_their_rounding(picture: np.ndarray) -> None:
    real = normalised(picture) / 0.03 - 10
    got = np.clip(np.rint(real[:, ::-1]), -128, 127).astype(np.int8)
    assert "reversed colour order" in explain_input(real, got).evidence  # type: ignore[union-attr]  # there, or the test fails


def test_offsets_of_codes_are_told_in_the_reals_they_stand_for(picture: np.ndarray) -> None:
    real = picture / 255 / 0.01 - 50
    got = np.clip(np.rint((picture / 255 - 0.5) / 0.01 - 50), -128, 127).astype(np.int8)
    cause = explain_input(real, got, scale=0.01, zero_point=-50)
    assert cause is not None
    assert re.search(r"minus 0\.(5|5001|4999):", cause.evidence), cause.evidence


def test_equal_pictures_have_no_cause(picture: np.ndarray) -> None:
    assert explain_input(picture, picture) is None
    assert explain_input(picture / 255, unit(picture)) is None


def test_what_no_formula_explains_is_not_claimed(fixtures_dir: Path, picture: np.ndarray) -> None:
    other = photo(fixtures_dir / "photos" / "china.png")
    assert explain_input(picture, other) is None
    shifted = np.roll(picture, 1, axis=-1)
    assert explain_input(picture, shifted) is None
    if picture.std() and np.abs(np.diff(picture[0, 0].astype(int))).mean() < 40:  # the photo: a filter changes it
        small = Image.fromarray(picture[0].transpose(1, 2, 0))
        filtered = [np.asarray(small.resize((20, 15), f)).transpose(2, 0, 1)[None] for f in (2, 0)]
        assert explain_input(*filtered) is None


def test_a_few_other_elements_are_no_other_picture(picture: np.ndarray) -> None:
    got = picture.copy()
    got.reshape(-1)[::200] ^= 1 << 6
    assert explain_input(picture, got) is None


def test_another_rounding_is_no_other_input(picture: np.ndarray) -> None:
    real = picture * 0.37 + 3.1
    assert explain_input(real, np.floor(real).astype(np.uint8)) is None


def test_flat_tiny_and_unlike_arrays_have_no_cause(picture: np.ndarray) -> None:
    assert explain_input(np.zeros((1, 3, 8, 8)), np.ones((1, 3, 8, 8))) is None
    assert explain_input(np.arange(4.0), np.arange(4.0) * 2) is None
    assert explain_input(picture, picture[..., 1:]) is None
    assert explain_input(np.full(picture.shape, np.nan), picture) is None


def test_of_two_changes_that_explain_alike_the_simpler_is_named() -> None:
    gray = np.repeat(np.random.default_rng(0).integers(0, 256, (1, 1, 9, 9)), 3, axis=1).astype(np.uint8)
    cause = explain_input(gray, gray[:, ::-1, :, ::-1])
    assert cause is not None
    assert "colour" not in cause.evidence


def test_the_photos_of_the_shared_models(shared: Path) -> None:
    for path in sorted((shared / "models" / "images").glob("*.jpg")):
        wanted = photo(path)
        for got, words in ((wanted[:, ::-1], "colour"), (wanted.transpose(0, 2, 3, 1), "channels last")):
            cause = explain_input(wanted, got)
            assert cause is not None, path.name
            assert words in cause.evidence, path.name
