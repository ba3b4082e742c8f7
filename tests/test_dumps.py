"""Dumps of other tools are read for what they are; what does not fit says what would make it fit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from safetensors.numpy import save_file

from builder import Qdq
from equivcheck.backends.registry import backend
from equivcheck.dumps import Dump, load_dump
from equivcheck.dumps.names import collapsed, sanitised
from equivcheck.errors import RecordingError
from equivcheck.models.graph import Graph, Quantisation
from equivcheck.models.onnx.load import OnnxModel, load_model, model_from_bytes
from equivcheck.recording import Recording

CONV, CONV_REAL, CONV_BEFORE = "/conv/Conv_output_0_q", "/conv/Conv_output_0_dq", "/conv/Conv_output_0"
SCALE, ZERO = np.float32(0.05), -3  # of CONV
VALUES = {"x_q": (1, 3, 4, 6), CONV: (1, 5, 4, 6), "7": (1, 5, 1, 1)}
Values = Mapping[str, np.ndarray]


def model(dtype: str = "int8", batch: int | str = 1, zero: int = ZERO) -> OnnxModel:
    """Input x, then x_q, a Conv with names as PyTorch exports them, a pool whose codes are called 7, and the output y."""
    m = Qdq(dtype=dtype, seed=1)
    x = m.dq(m.q(m.input("x", (batch, 3, 4, 6)), 0.02, 4, out="x_q"))
    conv = m.dq(m.q(m.conv(x, 5, out=CONV_BEFORE), float(SCALE), zero, out=CONV), out=CONV_REAL)
    pooled = m.op("GlobalAveragePool", [conv], "pooled")
    return model_from_bytes(m.model(m.dq(m.q(pooled, 0.03, 1, out="7"), out="y")).SerializeToString(), "m.onnx")


GRAPH = model().graph
GRAPHS = {dtype: model(dtype, zero=5).graph for dtype in ("int8", "uint8", "int16")}


def codes(seed: int = 0, dtype: str = "int8", batch: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    return {n: rng.integers(limits.min, limits.max + 1, (batch, *s[1:])).astype(dtype) for n, s in VALUES.items()}


def reals(values: Values, graph: Graph = GRAPH, dtype: str = "float32") -> dict[str, np.ndarray]:
    """What the DQ of each value shows."""
    found = {}
    for name, array in values.items():
        scale, zero = graph.quantisation[name].along(array.ndim)
        found[name] = ((array - zero) * scale).astype(dtype)
    return found


def only(dump: Dump) -> Recording:
    (sample,) = dump.samples
    return sample.recording()


def assert_holds(recording: Recording, values: Values) -> None:
    assert dict(recording.failed) == {}
    assert sorted(recording.values) == sorted(values)
    for name, array in values.items():
        found = recording.values[name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)


# -- writers, one a format ---------------------------------------------------------------------------------------------


def npz(folder: Path, values: Values) -> Path:
    np.savez(folder / "s.npz", **values)
    return folder / "s.npz"


def npy(folder: Path, values: Values) -> Path:
    for name, array in values.items():
        np.save(folder / f"{sanitised(name)}.npy", array)
    return folder


def nested_npy(folder: Path, values: Values) -> Path:
    """Slashes of names as folders."""
    for name, array in values.items():
        place = folder / f"{name.strip('/')}.npy"
        place.parent.mkdir(parents=True, exist_ok=True)
        np.save(place, array)
    return folder


def raw(folder: Path, values: Values, ending: str = ".raw") -> Path:
    for name, array in values.items():
        (folder / f"{collapsed(name)}{ending}").write_bytes(array.tobytes())
    return folder


def qnn(folder: Path, values: Values) -> Path:
    """As qnn-net-run writes: a folder a sample, and a name may not begin with a digit."""
    (folder / "Result_0").mkdir(exist_ok=True)
    for name, array in values.items():
        native = "" if array.dtype.kind == "f" else "_native"
        stem = f"_{name}" if name[0].isdigit() else sanitised(name)
        (folder / "Result_0" / f"{stem}{native}.raw").write_bytes(array.tobytes())
    return folder


def pb(folder: Path, values: Values) -> Path:
    """The name inside."""
    for k, (name, array) in enumerate(values.items()):
        (folder / f"tensor_{k}.pb").write_bytes(numpy_helper.from_array(array, name).SerializeToString())
    return folder


def nameless_pb(folder: Path, values: Values) -> Path:
    for name, array in values.items():
        (folder / f"{sanitised(name)}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
    return folder


def safetensors(folder: Path, values: Values) -> Path:
    save_file(dict(values), folder / "s.safetensors")
    return folder


FORMATS: list[Callable[[Path, Values], Path]] = [npz, npy, nested_npy, raw, qnn, pb, nameless_pb, safetensors]


@pytest.mark.parametrize("write", FORMATS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(["int8", "uint8", "int16"]), real=st.booleans())
def test_a_recording_comes_back_from_every_format_as_codes_or_as_floats(
    tmp_path_factory: pytest.TempPathFactory, write, seed: int, dtype: str, real: bool
) -> None:
    graph = GRAPHS[dtype]
    values = codes(seed, dtype)
    recording = only(load_dump(write(tmp_path_factory.mktemp("d"), reals(values, graph) if real else values), graph))
    assert_holds(recording, values)
    assert recording.absent == {}
    assert all(distance <= 1e-3 for distance in recording.off_grid.values())
    assert set(recording.off_grid) == (set(values) if real else set())
    for name in values:
        found = recording.quantisation[name]
        assert graph.quantisation[name].same_as(Quantisation(found.scale, found.zero_point, found.axis))


@pytest.mark.parametrize("write", [npz, npy, pb, safetensors])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"]),
    shape=st.lists(st.integers(0, 4), max_size=5),
    seed=st.integers(0, 99),
)
def test_without_a_model_every_dtype_and_shape_comes_back_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, write, dtype: str, shape: list[int], seed: int
) -> None:
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
    assert_holds(only(load_dump(write(tmp_path_factory.mktemp("d"), {"t": array}))), {"t": array})


def test_the_recording_of_a_real_run_comes_back_from_its_dequantised_values(tmp_path: Path, fixtures_dir: Path) -> None:
    whole = load_model(fixtures_dir / "digits_qdq_s8.onnx")
    ort = backend("ort")
    feeds = {"image": np.random.default_rng(3).normal(0, 1, (1, 1, 8, 8)).astype(np.float32)}
    with ort.open(whole) as session:
        ran = session.run("s", feeds)
    quantised = {n: a for n, a in ran.values.items() if n in whole.graph.quantisation}
    shown = {next(iter(whole.graph.aliases(n)), n): a for n, a in reals(quantised, whole.graph).items()}
    assert len(quantised) >= 8
    assert_holds(only(load_dump(npz(tmp_path, {**shown, **feeds}), whole.graph)), {**quantised, **feeds})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floats_of_any_width_are_on_the_grid_within_their_own_rounding(tmp_path: Path, dtype: str) -> None:
    values = codes()
    shown = {name: array.astype(dtype) for name, array in reals(values, dtype="float64").items()}
    recording = only(load_dump(pb(tmp_path, shown), GRAPH))
    assert_holds(recording, values)
    assert max(recording.off_grid.values()) == 0.0


# -- samples -----------------------------------------------------------------------------------------------------------


def test_results_of_qnn_net_run_are_samples_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for k in (10, 2, 0):
        folder = tmp_path / f"Result_{k}"
        folder.mkdir()
        raw(folder, codes(k))
    dump = load_dump(tmp_path, GRAPH)
    assert [sample.id for sample in dump.samples] == ["Result_0", "Result_2", "Result_10"]
    for sample, k in zip(dump.samples, (0, 2, 10), strict=True):
        assert_holds(sample.recording(), codes(k))


@pytest.mark.parametrize("folders", [False, True])
def test_several_npz_are_samples_in_one_folder_or_one_folder_each(tmp_path: Path, folders: bool) -> None:
    for k in range(2):
        place = tmp_path / f"s{k}" if folders else tmp_path
        place.mkdir(exist_ok=True)
        np.savez(place / f"s{k}.npz", **codes(k))
    dump = load_dump(tmp_path, GRAPH)
    assert [sample.id for sample in dump.samples] == ["s0", "s1"]
    assert_holds(dump.samples[1].recording(), codes(1))


def test_samples_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    for k in range(2):
        np.savez(tmp_path / f"s{k}.npz", **codes(k))
    dump = load_dump(tmp_path, GRAPH)
    (tmp_path / "s0.npz").unlink()
    assert_holds(dump.samples[1].recording(), codes(1))
    with pytest.raises(RecordingError, match=r"s0\.npz cannot be read: No such file"):
        dump.samples[0].recording()


@pytest.mark.parametrize("write", [npy, raw])
def test_codes_in_npy_and_raw_files_are_mapped_not_copied(tmp_path: Path, write) -> None:
    array = only(load_dump(write(tmp_path, codes()), GRAPH)).values[CONV]
    bases = []
    while array is not None:
        bases.append(type(array))
        array = getattr(array, "base", None)
    assert np.memmap in bases


def test_one_file_of_one_tensor_is_a_sample(tmp_path: Path) -> None:
    np.save(tmp_path / "x_q.npy", codes()["x_q"])
    dump = load_dump(tmp_path / "x_q.npy", GRAPH)
    assert_holds(only(dump), {"x_q": codes()["x_q"]})


def test_what_the_dump_lacks_is_absent_but_a_graph_input_is_simply_not_there(tmp_path: Path) -> None:
    recording = only(load_dump(npz(tmp_path, {"x_q": codes()["x_q"]}), GRAPH))
    assert dict(recording.absent) == {CONV: "not in the dump", "7": "not in the dump"}
    assert "x" not in recording.values


def test_one_value_of_a_sample_can_be_read_alone(tmp_path: Path) -> None:
    shown = reals(codes())
    shown["x_q"][0, 0, 0, 0] = np.nan
    (sample,) = load_dump(npz(tmp_path, shown), GRAPH).samples
    np.testing.assert_array_equal(sample.read(CONV), codes()[CONV])  # type: ignore[arg-type]  # None fails too
    assert sample.read("x_q") is None
    assert sample.read("x") is None


def test_the_graph_input_and_output_are_kept_as_floats(tmp_path: Path) -> None:
    values = codes()
    x = np.random.default_rng(0).normal(0, 1, VALUES["x_q"]).astype(np.float32)
    y = reals(values)["7"]
    recording = only(load_dump(npz(tmp_path, {"x": x, "y": y.astype(np.float64)}), GRAPH))
    np.testing.assert_array_equal(recording.values["x"], x)
    np.testing.assert_array_equal(recording.values["7"], values["7"])
    assert recording.outputs["y"].dtype == np.float32
    np.testing.assert_array_equal(recording.outputs["y"], y)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dumped",
    [
        CONV, CONV_REAL, "_conv_Conv_output_0_q", "conv_Conv_output_0_dq", "conv/Conv_output_0_q", "conv.Conv_output_0_q",
        "_conv_Conv_output_0_q_native", "025_ConvClip_conv_Conv_output_0_q_shape_1_5_4_6_int8",
    ],
)  # fmt: skip
def test_names_are_known_as_tools_write_them(tmp_path: Path, dumped: str) -> None:
    assert_holds(only(load_dump(npz(tmp_path, {dumped: codes()[CONV]}), GRAPH)), {CONV: codes()[CONV]})


def test_a_name_that_could_be_two_values_is_neither(tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    x = m.dq(m.q(m.input("x", (1, 3)), 0.02, 0, out="a/b"))
    y = m.dq(m.q(m.op("Relu", [x]), 0.02, 0, out="a.b"), out="y")
    graph = model_from_bytes(m.model(y).SerializeToString(), "m.onnx").graph
    array = np.zeros((1, 3), np.int8)
    dump = load_dump(npz(tmp_path, {"a_b": array, "x": array.astype(np.float32)}), graph)
    assert dump.unmatched == ("a_b",)
    assert any("could be a/b or a.b" in note for note in dump.notes)
    assert "a/b" in only(dump).absent
    assert_holds(only(load_dump(npz(tmp_path, {"a/b_native": array}), graph)), {"a/b": array})


def test_the_exact_codes_are_used_where_a_value_is_shown_twice(tmp_path: Path) -> None:
    values = codes()
    wrong = reals(values)[CONV] + SCALE
    dump = load_dump(npz(tmp_path, {CONV_REAL: wrong, CONV: values[CONV]}), GRAPH)
    np.testing.assert_array_equal(only(dump).values[CONV], values[CONV])
    assert any("second showing" in note for note in dump.notes)


def test_native_codes_are_used_where_floats_lie_beside_them(tmp_path: Path) -> None:
    raw(tmp_path, reals(codes(1)))
    raw(tmp_path, codes(2), "_native.raw")
    assert_holds(only(load_dump(tmp_path, GRAPH)), codes(2))


def test_a_second_showing_serves_where_the_first_cannot_be_read(tmp_path: Path) -> None:
    values = codes()
    recording = only(
        load_dump(npz(tmp_path, {CONV: values[CONV].view(np.uint8), CONV_REAL: reals(values)[CONV]}), GRAPH)
    )
    assert_holds(recording, {CONV: values[CONV]})


def test_weights_and_unknown_names_are_noted(tmp_path: Path) -> None:
    dump = load_dump(npz(tmp_path, {**codes(), "weight": np.zeros(3), "conv_out": np.zeros(3)}), GRAPH)
    assert dump.unmatched == ("conv_out",)
    assert any(note.startswith("weight: weights") for note in dump.notes)
    assert any(note.startswith("conv_out: no value of the model") for note in dump.notes)
    assert_holds(only(dump), codes())


def test_long_names_are_shown_by_their_ends(tmp_path: Path) -> None:
    (note,) = load_dump(npz(tmp_path, {**codes(), "a/" * 300 + "end": np.zeros(3)}), GRAPH).notes
    assert note.split(":")[0] == "..." + "a/" * 21 + "end"


def test_other_files_are_left_alone_and_that_is_said(tmp_path: Path) -> None:
    npy(tmp_path, codes())
    (tmp_path / "run.log").write_text("ok")
    (tmp_path / ".DS_Store").write_text("")
    dump = load_dump(tmp_path, GRAPH)
    assert dump.notes == ("1 other files left alone, such as run.log",)


def snapshot(root: Path, lines: Callable[[str, str], str]) -> Path:
    for side in ("golden", "simulator"):
        (root / side / "npy").mkdir(parents=True)
        for k, array in enumerate(reals(codes()).values()):
            np.save(root / side / "npy" / f"{500 + k}.npy", array)
    written = [lines(name, f"{500 + k}.npy") for k, name in enumerate(VALUES)]
    (root / "map_name_to_file.txt").write_text("layer_name   file_name\n" + "\n".join(written))
    return root


@pytest.mark.parametrize(
    "lines",
    [lambda n, f: f"[Conv] {n}    {f}", lambda n, f: f"{n}: {f}", lambda n, f: f"'{f}' -> '{n}'"],
    ids=["operator", "colon", "arrow"],
)
def test_a_side_of_an_rknn_snapshot_is_read_by_its_map_of_names(tmp_path: Path, lines) -> None:
    assert_holds(only(load_dump(snapshot(tmp_path, lines) / "simulator", GRAPH)), codes())


def test_a_whole_rknn_snapshot_asks_for_a_side(tmp_path: Path) -> None:
    snapshot(tmp_path, lambda n, f: f"{n} {f}")
    with pytest.raises(
        RecordingError, match=r"whole accuracy_analysis snapshot.*name one side: .*golden or .*simulator"
    ):
        load_dump(tmp_path, GRAPH)


def test_sides_of_a_snapshot_whose_map_is_gone_are_no_samples(tmp_path: Path) -> None:
    (snapshot(tmp_path, lambda n, f: f"{n} {f}") / "map_name_to_file.txt").unlink()
    with pytest.raises(RecordingError, match="whole accuracy_analysis snapshot, with golden and simulator"):
        load_dump(tmp_path, GRAPH)


# -- layout and shape --------------------------------------------------------------------------------------------------


def channels_last(values: Values) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(array.transpose(0, 2, 3, 1)) for name, array in values.items()}


@pytest.mark.parametrize("write", [npz, raw])
def test_a_declared_nhwc_dump_is_turned_to_the_model(tmp_path: Path, write) -> None:
    assert_holds(only(load_dump(write(tmp_path, channels_last(codes())), GRAPH, layout="nhwc")), codes())


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_an_undeclared_nhwc_dump_is_incomparable_with_the_option_to_use(tmp_path: Path, side) -> None:
    dump = load_dump(npz(tmp_path, channels_last(codes())), GRAPH, side=side)
    want = f"shape [1,4,6,5] is [1,5,4,6] with channels last: --{side}-layout nhwc"
    assert dump.incomparable[CONV] == want
    assert only(dump).incomparable[CONV] == want


def sequences() -> Graph:
    """A value of three dimensions, 4x6, and one of 4x4."""
    m = Qdq(dtype="int8")
    a = m.dq(m.q(m.input("x", (1, 4, 6)), 0.02, 0, out="oblong"))
    b = m.dq(m.q(m.op("MatMul", [a, m.dq(m.q(m.input("z", (1, 6, 4)), 0.02, 0, out="other"))]), 0.02, 0, out="square"))
    return model_from_bytes(m.model(b).SerializeToString(), "m.onnx").graph


def test_of_other_ranks_only_what_fits_so_alone_is_turned(tmp_path: Path) -> None:
    oblong = np.arange(24, dtype=np.int8).reshape(1, 4, 6)
    square = np.arange(16, dtype=np.int8).reshape(1, 4, 4)
    dumped = {"oblong": oblong.transpose(0, 2, 1), "square": square}
    assert_holds(
        only(load_dump(npz(tmp_path, dumped), sequences(), layout="nhwc")), {"oblong": oblong, "square": square}
    )


def test_a_layout_declared_for_one_tensor_turns_it_alone(tmp_path: Path) -> None:
    square = np.arange(16, dtype=np.int8).reshape(1, 4, 4)
    names = tmp_path / "names.toml"
    names.write_text('[[tensor]]\nname = "square"\nlayout = "nhwc"\n')
    recording = only(load_dump(npz(tmp_path, {"square": square}), sequences(), names=names))
    np.testing.assert_array_equal(recording.values["square"], square.transpose(0, 2, 1))


def test_a_declared_layout_that_cannot_be_is_incomparable(tmp_path: Path) -> None:
    names = names_file(tmp_path, f'[[tensor]]\nname = "{CONV}"\nlayout = "nhwc"\n')
    dump = load_dump(npz(tmp_path, {CONV: codes()[CONV]}), GRAPH, names=names)
    assert dump.incomparable[CONV].endswith("is the model's as it is: it is not channels last, as declared")


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((1, 5, 6, 4), "axes in another order: transpose it"),
        ((1, 5, 4, 7), "axis 3 is 7 for 6"),
        ((5, 4, 6), '[[tensor]] name = "/conv/Conv_output_0_q" shape = [1, 5, 4, 6]'),
        ((120,), "shape = [1, 5, 4, 6]"),
        ((1, 5), "2 dimensions for 4, 5 elements"),
    ],
)
def test_a_shape_that_does_not_fit_says_what_would(tmp_path: Path, shape: tuple[int, ...], hint: str) -> None:
    dump = load_dump(npz(tmp_path, {CONV: np.zeros(shape, np.int8)}), GRAPH)
    assert hint in dump.incomparable[CONV]
    assert CONV not in only(dump).values
    assert CONV not in only(dump).absent


def test_a_declared_shape_makes_it_fit(tmp_path: Path) -> None:
    names = tmp_path / "names.toml"
    names.write_text(f'[[tensor]]\nname = "{CONV}"\nshape = [1, 5, 4, 6]\n')
    values = codes()
    dump = load_dump(npz(tmp_path, {CONV: values[CONV].ravel()}), GRAPH, names=names)
    assert_holds(only(dump), {CONV: values[CONV]})


@pytest.mark.parametrize("stored", [np.asfortranarray, lambda a: a.astype(a.dtype.newbyteorder(">"))])
def test_fortran_order_and_the_other_byte_order_keep_their_numbers(tmp_path: Path, stored) -> None:
    shown = {name: stored(array) for name, array in reals(codes()).items()}
    assert_holds(only(load_dump(npy(tmp_path, shown), GRAPH)), codes())


# -- raw files ---------------------------------------------------------------------------------------------------------


def test_a_raw_file_of_the_wrong_size_says_the_right_ones(tmp_path: Path) -> None:
    raw(tmp_path, codes())
    (tmp_path / "conv_Conv_output_0_q.raw").write_bytes(b"\0" * 119)
    dump = load_dump(tmp_path, GRAPH)
    assert dump.incomparable[CONV].startswith("119 bytes; [1,5,4,6] takes 480 as float32 or 120 as int8")


def test_the_size_of_a_raw_file_decides_the_open_dimension(tmp_path: Path) -> None:
    graph = model(batch="N").graph
    values = codes(batch=3)
    assert_holds(only(load_dump(raw(tmp_path, values), graph)), values)


def test_a_raw_file_that_is_no_multiple_of_a_row_is_incomparable(tmp_path: Path) -> None:
    (tmp_path / "x_q.raw").write_bytes(b"\0" * 73)
    dump = load_dump(tmp_path, model(batch="N").graph)
    assert dump.incomparable["x_q"].startswith("73 bytes; [N,3,4,6] takes a multiple of 288 as float32 or 72 as int8")


def test_native_raw_codes_of_an_open_batch_are_codes_though_floats_would_fit(tmp_path: Path) -> None:
    graph = model(batch="N").graph
    assert_holds(only(load_dump(raw(tmp_path, codes(batch=4), "_native.raw"), graph)), codes(batch=4))


def test_without_a_model_a_raw_file_needs_a_declaration(tmp_path: Path) -> None:
    (tmp_path / "t.raw").write_bytes(np.arange(6, dtype="<i2").tobytes())
    with pytest.raises(RecordingError, match=r't\.raw: a raw file.*declare \[\[tensor\]\] name = "t".*--model MODEL'):
        load_dump(tmp_path)
    names = tmp_path / "names.toml"
    names.write_text('[[tensor]]\nname = "t"\ndtype = "int16"\nshape = [2, 3]\n')
    assert_holds(only(load_dump(tmp_path, names=names)), {"t": np.arange(6, dtype=np.int16).reshape(2, 3)})


def test_text_is_no_raw_file(tmp_path: Path) -> None:
    m = Qdq()
    port = onnx.helper.make_tensor_value_info("t", onnx.TensorProto.STRING, [1, 3])
    m.ports.append(port)
    m.op("Identity", ["t"], "y")
    m.op("Neg", [m.input("x", (1, 3))], "z")
    proto = m.model("z", "y")
    (tmp_path / "y.raw").write_bytes(b"abc")
    dump = load_dump(tmp_path, model_from_bytes(proto.SerializeToString(), "m.onnx").graph)
    assert "a raw file, and its dtype is str" in dump.incomparable["y"]


def test_a_raw_file_of_no_elements_is_empty(tmp_path: Path) -> None:
    (tmp_path / "t.raw").write_bytes(b"")
    names = names_file(tmp_path, '[[tensor]]\nname = "t"\ndtype = "int8"\nshape = [0, 4]\n')
    assert_holds(only(load_dump(tmp_path / "t.raw", names=names)), {"t": np.zeros((0, 4), np.int8)})


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_float_off_the_grid_is_rounded_and_its_distance_is_told(tmp_path: Path) -> None:
    values = {CONV: np.clip(codes()[CONV], -100, 100)}
    shown = reals(values)[CONV]
    shown[0, 2, 1, 3] += 0.3 * SCALE
    recording = only(load_dump(npz(tmp_path, {CONV_REAL: shown}), GRAPH))
    assert recording.off_grid[CONV] == pytest.approx(0.3, abs=1e-4)
    assert "0.3 of a step off the grid, rounded" in recording.how[CONV]
    np.testing.assert_array_equal(recording.values[CONV], values[CONV])


def test_a_dequantised_float_beyond_the_codes_is_off_the_grid(tmp_path: Path) -> None:
    shown = np.full(VALUES[CONV], (140 - ZERO) * SCALE, np.float32)  # 13 codes above 127
    recording = only(load_dump(npz(tmp_path, {CONV_REAL: shown}), GRAPH))
    assert recording.off_grid[CONV] == pytest.approx(13, abs=1e-3)


def test_the_float_before_a_q_saturates_as_the_q_does(tmp_path: Path) -> None:
    shown = np.full(VALUES[CONV], (140 - ZERO) * SCALE, np.float32)
    recording = only(load_dump(npz(tmp_path, {CONV_BEFORE: shown}), GRAPH))
    assert recording.off_grid[CONV] <= 1e-3
    assert (recording.values[CONV] == 127).all()


def test_numbers_of_the_other_byte_order_come_back_in_this_machines(tmp_path: Path) -> None:
    array = np.array([1, 256, -2], ">i4")
    assert_holds(only(load_dump(npz(tmp_path, {"t": array}))), {"t": array.astype(np.int32)})


def float_graph(dtype: str = "float32") -> Graph:
    """A value y of no quantisation, of the given dtype."""
    m = Qdq()
    made = m.model(m.op("Neg", [m.input("x", (1, 3), dtype)], "y"))
    return model_from_bytes(made.SerializeToString(), "m.onnx").graph


def test_longer_floats_are_rounded_to_the_models_unless_they_are_beyond_it(tmp_path: Path) -> None:
    array = np.array([[0.1, -np.inf, 1e300]])
    assert only(load_dump(npz(tmp_path, {"y": array}), float_graph())).failed == {
        "y": "float64 numbers beyond the range of the model's float32"
    }
    array[0, 2] = 1e30
    assert_holds(only(load_dump(npz(tmp_path, {"y": array}), float_graph())), {"y": array.astype(np.float32)})


def test_integers_of_a_float_value_need_a_word(tmp_path: Path) -> None:
    array = np.array([[1, 2, 3]], np.int8)
    want = 'declare [[tensor]] name = "y" dtype = "float32" in --names'
    assert want in only(load_dump(npz(tmp_path, {"y": array}), float_graph())).failed["y"]
    names = names_file(tmp_path, '[[tensor]]\nname = "y"\ndtype = "float32"\n')
    recording = only(load_dump(npz(tmp_path, {"y": array}), float_graph(), names=names))
    assert_holds(recording, {"y": array.astype(np.float32)})


def test_a_scale_of_zero_tells_no_codes(tmp_path: Path) -> None:
    m = Qdq(dtype="int8")
    graph = model_from_bytes(
        m.model(m.dq(m.q(m.input("x", (1, 3)), 0.0, 0, out="q"), out="y")).SerializeToString(), "m.onnx"
    ).graph
    recording = only(load_dump(npz(tmp_path, {"y": np.zeros((1, 3), np.float32)}), graph))
    assert recording.failed["q"] == "float32 where the model's scale is 0: only its codes could be compared"


@pytest.mark.parametrize(("given", "zero"), [("", 0), ("zero_point = 128\n", 128)])
def test_what_is_declared_without_a_model_is_recorded(tmp_path: Path, given: str, zero: int) -> None:
    names = names_file(tmp_path, f'[[tensor]]\nname = "t"\nscale = 0.0625\n{given}')
    parameters = only(load_dump(npz(tmp_path, {"t": np.zeros(3, np.uint8)}), names=names)).quantisation["t"]
    assert (parameters.scale, parameters.zero_point, parameters.zero_point.dtype) == (0.0625, zero, np.uint8)


def test_nan_where_codes_are_due_is_a_failure_with_their_number(tmp_path: Path) -> None:
    shown = reals(codes())
    shown[CONV].ravel()[:2] = np.nan, np.inf
    recording = only(load_dump(npz(tmp_path, shown), GRAPH))
    assert recording.failed == {CONV: "2 of 120 numbers are NaN or infinite: no int8 code stands for them"}


def names_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "names.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("wide", ["int32", "int64", "float32"])
def test_codes_in_a_wider_type_are_believed_when_declared(tmp_path: Path, wide: str) -> None:
    values = codes()
    path = npz(tmp_path, {CONV: values[CONV].astype(wide)})
    assert f'declare [[tensor]] name = "{CONV}" dtype = "int8" in --names' in only(load_dump(path, GRAPH)).failed[CONV]
    names = names_file(tmp_path, f'[[tensor]]\nname = "{CONV}"\ndtype = "int8"\n')
    assert_holds(only(load_dump(path, GRAPH, names=names)), {CONV: values[CONV]})


def test_declared_codes_that_are_none_say_which(tmp_path: Path) -> None:
    path = npz(tmp_path, {CONV: np.full(VALUES[CONV], 200, np.int32)})
    names = names_file(tmp_path, f'[[tensor]]\nname = "{CONV}"\ndtype = "int8"\n')
    assert only(load_dump(path, GRAPH, names=names)).failed[CONV] == "int32 numbers that are no int8 (such as 200)"


def test_codes_of_the_other_signedness_keep_the_zero_point_that_is_declared(tmp_path: Path) -> None:
    values = codes()
    shifted = (values[CONV].astype(np.int16) + 128).astype(np.uint8)
    path = npz(tmp_path, {CONV: shifted})
    assert "if the engine's are 128 higher" in only(load_dump(path, GRAPH)).failed[CONV]
    assert f"zero_point = {ZERO + 128}" in only(load_dump(path, GRAPH)).failed[CONV]
    names = names_file(tmp_path, f'[[tensor]]\nname = "{CONV}"\nzero_point = {ZERO + 128}\n')
    recording = only(load_dump(path, GRAPH, names=names))
    assert_holds(recording, {CONV: shifted})
    parameters = recording.quantisation[CONV]
    assert (parameters.scale, parameters.zero_point, parameters.zero_point.dtype) == (SCALE, ZERO + 128, np.uint8)


def test_a_grid_of_its_own_is_what_floats_are_divided_by(tmp_path: Path) -> None:
    values = codes()
    shown = {CONV_REAL: ((values[CONV] - 10.0) * np.float64(np.float32(0.07))).astype(np.float32)}
    names = names_file(tmp_path, f'[[tensor]]\nname = "{CONV}"\nscale = 0.07\nzero_point = 10\n')
    recording = only(load_dump(npz(tmp_path, shown), GRAPH, names=names))
    assert recording.failed == {}, "the declaration goes by the stored value's name too"
    np.testing.assert_array_equal(recording.values[CONV], values[CONV])
    assert recording.quantisation[CONV].scale == np.float32(0.07)


def test_as_many_scales_as_channels_or_it_is_said(tmp_path: Path) -> None:
    names = names_file(tmp_path, f'[[tensor]]\nname = "{CONV}"\nscale = [0.1, 0.2]\naxis = 1\n')
    recording = only(load_dump(npz(tmp_path, {CONV: codes()[CONV]}), GRAPH, names=names))
    assert recording.failed[CONV] == "2 scales along axis 1 of shape [1,5,4,6]"


def test_bfloat16_in_a_npy_comes_back_when_declared(tmp_path: Path) -> None:
    array = np.array([1.0, -2.5], ml_dtypes.bfloat16)
    np.save(tmp_path / "t.npy", array.view("V2"))
    with pytest.raises(RecordingError, match="declare its dtype"):
        load_dump(tmp_path / "t.npy")
    names = names_file(tmp_path, '[[tensor]]\nname = "t"\ndtype = "bfloat16"\n')
    np.testing.assert_array_equal(only(load_dump(tmp_path / "t.npy", names=names)).values["t"], array)


# -- the names file ----------------------------------------------------------------------------------------------------


def test_a_names_file_maps_names(tmp_path: Path) -> None:
    names = names_file(tmp_path, f'[names]\n"layer 12" = "{CONV}"\n')
    assert_holds(only(load_dump(npz(tmp_path, {"layer 12": codes()[CONV]}), GRAPH, names=names)), {CONV: codes()[CONV]})


def test_a_names_file_maps_names_without_a_model(tmp_path: Path) -> None:
    names = names_file(tmp_path, '[names]\n"a" = "b"\n')
    assert_holds(only(load_dump(npz(tmp_path, {"a": np.arange(3)}), names=names)), {"b": np.arange(3)})


def test_names_that_the_dump_lacks_are_noted(tmp_path: Path) -> None:
    names = names_file(tmp_path, '[[tensor]]\nname = "x_qq"\ndtype = "int8"\n')
    dump = load_dump(npz(tmp_path, codes()), GRAPH, names=names)
    assert "x_qq: in the names file, but in neither the dump nor the model (x_q?)" in dump.notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[names", r"names\.toml cannot be read"),
        ('[naems]\n"a" = "b"', "unknown key 'naems'; nearest: names"),
        ('[names]\n"a" = 1', "maps dump names to model names"),
        ('[names]\n"a" = "x_qq"', "'x_qq', which is no value of the model; nearest: x_q"),
        ("[[tensor]]\ndtype = 'int8'", "every tensor is a table with a name"),
        ("[[tensor]]\nname = 't'\ndtyp = 'int8'", "unknown key 'dtyp'; nearest: dtype"),
        ("[[tensor]]\nname = 't'\ndtype = 'int9'", "dtype 'int9' is unknown"),
        ("[[tensor]]\nname = 't'\nshape = '3'", "shape = '3' is no number"),
        ("[[tensor]]\nname = 't'\nzero_point = 1.5", r"zero_point = 1\.5 is no number"),
        ("[[tensor]]\nname = 't'\nlayout = 'chw'", "layout 'chw' is unknown"),
        ("[[tensor]]\nname = 't'\naxis = 'c'", "axis 'c' is no number from 0 on"),
        ("[[tensor]]\nname = 't'\naxis = -1", "axis -1 is no number from 0 on"),
        ("[[tensor]]\nname = 't'\nscale = 0", "scale 0 is not positive"),
    ],
)
def test_a_mistake_in_the_names_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        load_dump(npz(tmp_path, codes()), GRAPH, names=names_file(tmp_path, text))


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_a_path_that_is_not_there_is_named_with_its_neighbours(tmp_path: Path) -> None:
    npz(tmp_path, codes())
    with pytest.raises(RecordingError, match=r"no dump .*s\.npx; nearest: .*s\.npz"):
        load_dump(tmp_path / "s.npx", GRAPH)


@pytest.mark.parametrize("names", [[], ["run.log", "sub/x.txt"]])
def test_a_folder_without_tensors_is_empty(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(RecordingError, match=r"holds no tensors; a dump holds \.npy, \.npz"):
        load_dump(tmp_path, GRAPH)


def test_a_recording_of_our_own_is_no_dump(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(RecordingError, match="is a recording of equivcheck"):
        load_dump(tmp_path, GRAPH)


def test_two_files_for_one_value_are_both_named(tmp_path: Path) -> None:
    np.save(tmp_path / "x_q.npy", codes()["x_q"])
    (tmp_path / "x.q.raw").write_bytes(codes()["x_q"].tobytes())
    with pytest.raises(RecordingError, match=r"x\.q\.raw and .*x_q\.npy are both 'x_q'"):
        load_dump(tmp_path, GRAPH)


def test_a_sample_file_beside_single_tensors_is_refused(tmp_path: Path) -> None:
    npz(tmp_path, codes())
    npy(tmp_path, codes())
    with pytest.raises(RecordingError, match=r"holds both s\.npz .* and .*\.npy"):
        load_dump(tmp_path, GRAPH)


def test_a_dump_of_another_model_is_refused_with_near_names(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"none of its tensors \(x_qq\).*nearest: x_q"):
        load_dump(npz(tmp_path, {"x_qq": np.zeros(3)}), GRAPH)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pb", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"not what the name says", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"x_q{suffix}"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=rf"x_q\{suffix} cannot be read: .*is it a whole \{suffix} file"):
        load_dump(tmp_path, GRAPH)


def test_a_file_of_another_kind_is_no_dump(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2 3")
    with pytest.raises(RecordingError, match=r"a\.txt is no dump"):
        load_dump(tmp_path / "a.txt", GRAPH)


def test_a_truncated_npy_is_named_with_its_sizes(tmp_path: Path) -> None:
    np.save(tmp_path / "x_q.npy", codes()["x_q"])
    (tmp_path / "x_q.npy").write_bytes((tmp_path / "x_q.npy").read_bytes()[:-5])
    with pytest.raises(RecordingError, match=r"breaks off: 67 bytes of numbers, its header says 72"):
        load_dump(tmp_path, GRAPH)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_pickles_are_refused_and_not_run(tmp_path: Path, suffix: str) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    assert pickle.dumps(Trap())
    objects = np.array([Trap()], object)
    path = tmp_path / f"x_q{suffix}"
    np.save(path, objects, allow_pickle=True) if suffix == ".npy" else np.savez(path, x_q=objects)
    with pytest.raises(RecordingError, match=r"Python objects \(a pickle\).*refused"):
        load_dump(path, GRAPH)
    assert not (tmp_path / "ran").exists()


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no layout 'nchw4'; one of nhwc, nchw"):
        load_dump(npz(tmp_path, codes()), GRAPH, layout="nchw4")


# -- cases from public reports -----------------------------------------------------------------------------------------


def cases(shared: Path) -> list[Path]:
    return [path for letter in ("m*", "q*", "t22*") for path in sorted((shared / "cases").glob(letter))]


def load_case(case: Path, which: str) -> Recording:
    graph = load_model(case / "model.onnx").graph if (case / "model.onnx").exists() else None
    layout = "nhwc" if case.name.startswith("q25") and which == "cand.npz" else None
    return only(load_dump(case / which, graph, layout=layout))


def test_every_dump_of_the_cases_is_read(shared: Path) -> None:
    unread = {}
    for case in cases(shared):
        for path in (path for name in ("ref*", "cand*", "expected*") for path in sorted(case.glob(name))):
            recording = load_case(case, path.name)
            assert recording.values, path
            unread |= {(case.name, path.name, name): why for name, why in recording.failed.items()}
    (only_one,) = unread  # its codes are of the other signedness, and it does not say its zero point
    assert only_one == ("q07_uint8_zp0_vs_int8_zp128", "cand.npz", "xq")


def test_the_channels_last_case_is_the_reference_after_turning(shared: Path) -> None:
    case = shared / "cases" / "q25_all_dumps_nhwc"
    assert_holds(load_case(case, "cand.npz"), load_case(case, "expected.npz").values)
    undeclared = load_dump(case / "cand.npz", load_model(case / "model.onnx").graph)
    assert set(undeclared.incomparable) == {"t0", "t1", "t2", "t3"}
    assert "--candidate-layout nhwc" in undeclared.incomparable["t0"]


@pytest.mark.parametrize("name", ["m23_bfloat16", "m25_float8_e5m2_equal"])
def test_low_precision_tensors_are_read_with_their_own_dtype(shared: Path, name: str) -> None:
    case = shared / "cases" / name
    for side in ("ref", "cand"):
        tensor = onnx.TensorProto.FromString((case / f"{side}_t.pb").read_bytes())
        found = load_case(case, f"{side}_t.pb").values["t"]
        wanted = numpy_helper.to_array(tensor)
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted.tobytes()


def test_missing_and_extra_tensors_stay_so(shared: Path) -> None:
    case = shared / "cases" / "m46_missing_and_extra_tensors"
    assert list(load_case(case, "ref.npz").values) == ["conv1", "conv2", "out"]
    assert list(load_case(case, "cand.npz").values) == ["conv1", "out", "dbg"]


def test_four_bit_codes_are_held_in_eight_bits_as_the_graph_holds_them(shared: Path) -> None:
    found = load_case(shared / "cases" / "m27_uint4_wrap", "ref_t.pb").values["t"]
    bits = np.load(shared / "cases" / "m27_uint4_wrap" / "ref.npz")["t__bits"]
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, bits)
