"""A recording comes back from disk as it was, is written whole or not at all, and says what is wrong with a broken one."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from equivcheck.errors import OutputError, RecordingError
from equivcheck.recording import Parameters, Recording, key_of, load, save
from equivcheck.result import FeedInfo, Model, Observation, SampleInfo, Side

MODEL = Model(path="m.onnx", sha256="0" * 64, format="onnx", ir_version=8, opsets={"": 17}, nodes=3)
SIDE = Side(
    spec="fake", engine="fake", version="0", device="memory", model_sha256="0" * 64,
    observation=Observation(method="told", disturbed=False),
)  # fmt: skip
FEED = FeedInfo(name="x", dtype="float32", shape=[1], sha256="1" * 64, source="array")
ODD_NAME = "a/b;c d\"'\\\n" + "long/" * 200


def recording(sample: str = "1", **values: np.ndarray) -> Recording:
    return Recording(
        sample=sample,
        values=values,
        how=dict.fromkeys(values, "told"),
        outputs={name: array for name, array in values.items() if name == "y"},
        absent={"gone": "fused into y"},
        quantisation={"x": Parameters(np.float32(0.5), np.array(3, np.int8), None)},
        disturbed=False,
    )


def write(folder: Path, *recordings: Recording) -> Path:
    samples = [SampleInfo(id=r.sample, feeds=[FEED]) for r in recordings]
    return save(folder, recordings, model=MODEL, side=SIDE, samples=samples, versions={"numpy": np.__version__})


DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (1, 2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    kept = load(write(tmp_path / "r", recording(x=array))).recordings[0].values["x"]
    assert (kept.dtype, kept.shape, kept.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_nan_and_infinity_and_negative_zero_come_back_bit_for_bit(tmp_path: Path) -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324])
    assert load(write(tmp_path / "r", recording(y=array))).recordings[0].values["y"].tobytes() == array.tobytes()


@pytest.mark.parametrize("view", [lambda a: a[::2], lambda a: a.T, np.asfortranarray, lambda a: a[:, ::-1]])
def test_strided_arrays_are_written_in_their_logical_order(tmp_path: Path, view) -> None:
    array = view(np.arange(24, dtype=np.int16).reshape(4, 6))
    np.testing.assert_array_equal(load(write(tmp_path / "r", recording(x=array))).recordings[0].values["x"], array)


def test_big_endian_arrays_keep_their_numbers(tmp_path: Path) -> None:
    array = np.array([1, 256, -2], ">i4")
    np.testing.assert_array_equal(load(write(tmp_path / "r", recording(x=array))).recordings[0].values["x"], array)


def test_bfloat16_comes_back_as_bfloat16(tmp_path: Path) -> None:
    array = np.array([1.0, -2.5], ml_dtypes.bfloat16)
    kept = load(write(tmp_path / "r", recording(x=array))).recordings[0].values["x"]
    assert kept.dtype == array.dtype
    np.testing.assert_array_equal(kept.astype(np.float32), [1.0, -2.5])


def test_what_a_recording_knows_of_its_values_comes_back(tmp_path: Path) -> None:
    one = recording("a.png", x=np.zeros(2, np.int8), y=np.ones(2, np.float32))
    two = recording("b.png", x=np.ones(2, np.int8), y=np.zeros(2, np.float32))
    kept = load(write(tmp_path / "r", one, two))
    assert (kept.model, kept.side) == (MODEL, SIDE)
    assert [s.id for s in kept.samples] == ["a.png", "b.png"]
    assert kept.samples[0].feeds == [FEED]
    first = kept.recordings[0]
    assert (first.sample, dict(first.how), dict(first.absent)) == ("a.png", {"x": "told", "y": "told"}, one.absent)
    assert first.disturbed is False
    assert first.quantisation["x"].scale == np.float32(0.5)
    assert (first.quantisation["x"].zero_point, first.quantisation["x"].zero_point.dtype) == (3, np.int8)
    np.testing.assert_array_equal(kept.recordings[1].outputs["y"], [0, 0])


def test_per_channel_parameters_come_back_with_their_axis(tmp_path: Path) -> None:
    scale, zero = np.array([0.1, 0.2, 0.3], np.float32), np.array([0, 1, -128], np.int8)
    given = Recording("1", {"x": np.zeros((1, 3), np.int8)}, {}, {}, quantisation={"x": Parameters(scale, zero, 1)})
    kept = load(write(tmp_path / "r", given)).recordings[0].quantisation["x"]
    assert (kept.scale.tobytes(), kept.zero_point.tobytes(), kept.axis) == (scale.tobytes(), zero.tobytes(), 1)


def test_names_may_be_long_and_hold_anything(tmp_path: Path) -> None:
    kept = load(write(tmp_path / "r", recording(**{ODD_NAME: np.arange(3)})))
    np.testing.assert_array_equal(kept.recordings[0].values[ODD_NAME], [0, 1, 2])
    assert key_of(ODD_NAME) != key_of(ODD_NAME + "/")


def test_a_failed_value_comes_back_as_failed(tmp_path: Path) -> None:
    given = Recording("1", {}, {}, {}, failed={"y": "the worker died"})
    assert dict(load(write(tmp_path / "r", given)).recordings[0].failed) == {"y": "the worker died"}


def test_a_value_that_only_the_second_sample_has_comes_back_there_alone(tmp_path: Path) -> None:
    one, two = recording("1", x=np.zeros(1)), recording("2", x=np.zeros(1), z=np.ones(1))
    kept = load(write(tmp_path / "r", one, two)).recordings
    assert [sorted(r.values) for r in kept] == [["x"], ["x", "z"]]


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_second_save_replaces_the_first_and_leaves_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "r", recording("1", x=np.zeros(1)), recording("2", x=np.zeros(1)))
    write(tmp_path / "r", recording("3", x=np.ones(1)))
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["0000.safetensors", "manifest.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["r"]
    assert load(tmp_path / "r").samples[0].id == "3"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists and is not a recording; name a new or empty folder"):
        write(tmp_path / "r", recording(x=np.zeros(1)))
    assert [p.name for p in tmp_path.rglob("*")] == ["r", "thesis.txt"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    assert load(write(tmp_path / "r", recording(x=np.zeros(1)))).recordings


def test_a_file_in_the_way_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    with pytest.raises(OutputError):
        write(tmp_path / "r", recording(x=np.zeros(1)))
    assert (tmp_path / "r").read_text() == "mine"


def test_a_failed_write_leaves_the_older_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "r", recording("old", x=np.zeros(1)))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write(tmp_path / "r", recording("new", x=np.zeros(1)))
    assert load(tmp_path / "r").samples[0].id == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


# -- reading what is broken --------------------------------------------------------------------------------------------


def test_a_folder_without_a_manifest_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"is not a recording: it has no manifest.json"):
        load(tmp_path)
    with pytest.raises(RecordingError, match="is not a recording"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 3}', '{"schema": "equivcheck-recording/1"}'])
def test_a_broken_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RecordingError, match=r"manifest.json cannot be read"):
        load(tmp_path)


def test_a_recording_of_another_version_is_refused_with_both_schemas(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", recording(x=np.zeros(1)))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": "equivcheck-recording/9"}))
    with pytest.raises(RecordingError, match=r"'equivcheck-recording/9', this version reads 'equivcheck-recording/1'"):
        load(folder)


@pytest.mark.parametrize("damage", ["missing", "cut", "garbage"])
def test_a_damaged_file_of_values_is_named(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path / "r", recording(x=np.zeros(100)))
    file = folder / "0000.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:-8] if damage == "cut" else b"\xff" * 64)
    with pytest.raises(RecordingError, match=r"0000.safetensors cannot be read"):
        load(folder)


def test_a_flipped_bit_is_found_when_the_sample_is_read_and_the_others_can_be(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", recording("1", x=np.zeros(100)), recording("2", x=np.zeros(100)))
    file = folder / "0001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 128
    file.write_bytes(content)
    kept = load(folder)
    assert kept.recordings[0].sample == "1"
    written = json.loads((folder / "manifest.json").read_text())["samples"][1]["crc32"]
    with pytest.raises(RecordingError, match=rf"0001.safetensors is not .* is {zlib.crc32(content):08x}, .* {written}"):
        kept.recordings[1]


def test_the_manifest_has_the_crc32_of_each_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", recording("1", x=np.arange(70_000)), recording("2", x=np.zeros(0)))
    for sample in json.loads((folder / "manifest.json").read_text())["samples"]:
        assert sample["crc32"] == f"{zlib.crc32((folder / sample['file']).read_bytes()):08x}"


def test_an_older_recording_without_checksums_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", recording(x=np.arange(3)))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["samples"][0]["crc32"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    np.testing.assert_array_equal(load(folder).recordings[0].values["x"], [0, 1, 2])
