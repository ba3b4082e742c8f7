"""External data: only the ranges that are needed, holes kept, and nothing outside of the model's folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cut_models import run, session
from equivcheck.errors import ModelError, OutputError
from equivcheck.models.onnx import external, load
from equivcheck.models.onnx.external import carry_external, external_bytes, external_tensors, load_external, range_of
from equivcheck.models.onnx.load import load_model
from equivcheck.parts import split, write

SIZE = 4096  # floats of a weight, 16 KB: more than the padding that counts as a file used whole


def weight(name: str, location: str, offset: int, *, length: bool = True) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[SIZE], data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": offset} | ({"length": SIZE * 4} if length else {})
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def floats(number: float) -> bytes:
    return np.full(SIZE, number, np.float32).tobytes()


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Three Adds, each of a weight k + 1: two in one file, in a folder below, and one in a file of its own."""
    place = tmp_path / "model"
    (place / "data").mkdir(parents=True)
    (place / "data" / "two.bin").write_bytes(floats(1) + floats(2))
    (place / "one.bin").write_bytes(floats(3))
    weights = [
        weight("w0", "data/two.bin", 0),
        weight("w1", "data/two.bin", SIZE * 4, length=False),
        weight("w2", "one.bin", 0),
    ]
    nodes = [helper.make_node("Add", [f"v{k}", f"w{k}"], [f"v{k + 1}"], name=f"add{k}") for k in range(3)]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE]) for name in ("v0", "v3")]
    proto = helper.make_model(
        helper.make_graph(nodes, "chain", ports[:1], ports[1:], weights),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17)],
    )
    (place / "model.onnx").write_bytes(proto.SerializeToString())
    return place / "model.onnx"


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model with external data count as too big for memory."""
    monkeypatch.setattr(external, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(load, "LARGEST_IN_MEMORY", 0)


def loaded(path: Path) -> onnx.ModelProto:
    onnx.checker.check_model(str(path), full_check=True)
    return onnx.load(path)


def test_small_external_data_is_read_into_the_model_and_its_parts(chain: Path, tmp_path: Path) -> None:
    model = load_model(chain)
    assert not model.external
    (part,) = split(model, "add1", cut="after")
    assert part.proved, part.note
    write(model, [part], tmp_path / "parts")
    head = loaded(tmp_path / "parts" / "001_Add" / "head.onnx")
    assert not external_tensors(head)
    np.testing.assert_array_equal(run(head, {"v0": np.zeros(SIZE, np.float32)})["v2"], np.full(SIZE, 3, np.float32))


@pytest.mark.usefixtures("outside")
def test_big_external_data_stays_outside_and_only_the_needed_ranges_are_copied(chain: Path, tmp_path: Path) -> None:
    model = load_model(chain)
    assert model.external
    (part,) = split(model, "add0", cut="after", prove=True)
    assert part.proved, part.note
    write(model, [part], tmp_path / "parts")
    place = tmp_path / "parts" / "001_Add"
    assert (place / "data" / "head-two.bin").read_bytes() == floats(1)
    assert (place / "data" / "tail-two.bin").read_bytes() == floats(2)
    assert not (place / "head-one.bin").exists()
    for name, output, expected in (("head", "v1", 1), ("tail", "v3", 6)):
        made = loaded(place / f"{name}.onnx")
        values = np.full(SIZE, 0 if name == "head" else 1, np.float32)
        (array,) = run(made, {made.graph.input[0].name: values}).values()
        np.testing.assert_array_equal(array, np.full(SIZE, expected, np.float32), err_msg=output)


@pytest.mark.usefixtures("outside")
def test_a_file_used_whole_shares_blocks_where_it_can_but_is_no_hard_link(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnx 1.21 and later refuse a file with two hard links, and would refuse the model's own from then on."""
    cloned = []

    def clone(target: int, request: int, source: int) -> None:
        cloned.append(request)
        os.pwrite(target, os.pread(source, 1 << 20, 0), 0)

    monkeypatch.setattr(external.fcntl, "ioctl", clone)
    model = load_model(chain)
    write(model, split(model, "add2", cut="before", prove=False), tmp_path / "parts")
    assert cloned == [0x40049409] * 2
    place = tmp_path / "parts" / "001_Add"
    for name, source in (("data/head-two.bin", "data/two.bin"), ("tail-one.bin", "one.bin")):
        assert (place / name).read_bytes() == (chain.parent / source).read_bytes()
        assert (place / name).stat().st_nlink == (chain.parent / source).stat().st_nlink == 1
    for path in (place / "head.onnx", place / "tail.onnx", chain):
        assert session_of_file(path)


@pytest.mark.usefixtures("outside")
def test_where_blocks_cannot_be_shared_the_file_is_copied(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(external.fcntl, "ioctl", refuse)
    model = load_model(chain)
    write(model, split(model, "add2", prove=False), tmp_path / "parts")
    copy = tmp_path / "parts" / "001_Add" / "tail-one.bin"
    assert copy.read_bytes() == floats(3)


@pytest.mark.usefixtures("outside")
def test_the_source_is_as_it_was_and_survives_an_overwritten_split(chain: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in chain.parent.rglob("*") if path.is_file()}
    for selector in ("add2", "add1", "add0"):
        model = load_model(chain)
        write(model, split(model, selector, prove=False), tmp_path / "parts")
    assert {path: path.read_bytes() for path in chain.parent.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("outside")
def test_a_data_file_may_be_called_like_a_part(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "onnx").write_bytes(floats(1))
    node = helper.make_node("Add", ["x", "w"], ["y"])
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [weight("w", "onnx", 0)])
    path = tmp_path / "m" / "model.onnx"
    path.write_bytes(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    )
    model = load_model(path)
    write(model, split(model, "Add", cut="after", prove=False), tmp_path / "parts")
    assert (tmp_path / "m" / "onnx").read_bytes() == floats(1)
    assert session_of_file(tmp_path / "parts" / "001_Add" / "head.onnx")


def session_of_file(path: Path) -> bool:
    """Load from the file, as a user would: the working directory is somewhere else."""
    made = onnx.load(path)  # reads the external data of the part's own folder
    return session(made) is not None


@pytest.mark.usefixtures("outside")
def test_relative_paths_and_another_working_directory(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(chain.parent)
    model = load_model("model.onnx")
    (part,) = split(model, "add1", prove=True)
    assert part.proved, part.note
    write(model, [part], "../parts")
    assert session_of_file(tmp_path / "parts" / "001_Add" / "tail.onnx")
    monkeypatch.chdir(tmp_path)
    model = load_model("model/model.onnx")
    write(model, split(model, "add1", prove=True), "other/parts")
    assert session_of_file(tmp_path / "other" / "parts" / "001_Add" / "head.onnx")


@pytest.mark.usefixtures("outside")
def test_weights_of_bodies_and_of_constant_nodes_stay_outside_too(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(floats(1) + floats(2))
    value = weight("", "w.bin", 0)
    body_weight = weight("w", "w.bin", SIZE * 4)
    port = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE]) for name in ("t", "e", "x", "y")]
    then = helper.make_graph([helper.make_node("Add", ["x", "w"], ["t"])], "then", [], port[:1], [body_weight])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "else", [], port[1:2])
    nodes = [
        helper.make_node("If", ["flag"], ["z"], then_branch=then, else_branch=other),
        helper.make_node("Constant", [], ["c"], value=value),
        helper.make_node("Add", ["z", "c"], ["y"]),
    ]
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [port[2], flag], port[3:])
    path = tmp_path / "model.onnx"
    path.write_bytes(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    )
    model = load_model(path)
    assert model.external
    (part,) = split(
        model, "If", cut="after", inputs={"x": np.zeros(SIZE, np.float32), "flag": np.array(True)}, prove=True
    )
    assert part.proved, part.note
    write(model, [part], tmp_path / "parts")
    assert (tmp_path / "parts" / "001_If" / "head-w.bin").read_bytes() == floats(2)
    assert (tmp_path / "parts" / "001_If" / "tail-w.bin").read_bytes() == floats(1)


# -- holes and ranges ---------------------------------------------------------------------------------------------------


def part_with(*tensors: TensorProto) -> onnx.ModelProto:
    return onnx.ModelProto(graph=onnx.GraphProto(initializer=tensors))


@pytest.mark.parametrize("filled", [(), (0,), (5,), (9,), (0, 9), (3, 4, 7)])
def test_holes_stay_holes_and_bytes_stay_bytes(tmp_path: Path, filled: tuple[int, ...]) -> None:
    """A weight of ten blocks in the middle of a sparse file, some of them with content."""
    block, start, blocks = 1 << 16, 3 << 16, 10
    source = tmp_path / "sparse.bin"
    with source.open("wb") as file:
        file.truncate(start + blocks * block + (5 << 16))
        for k in filled:
            file.seek(start + k * block)
            file.write(bytes([k + 1]) * block)
    tensor = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[blocks * block])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "sparse.bin"), ("offset", start), ("length", blocks * block)):
        tensor.external_data.add(key=key, value=str(value))
    (tmp_path / "out").mkdir()
    made = part_with(tensor)
    carry_external(made, tmp_path, tmp_path / "out")
    copy = tmp_path / "out" / "sparse.bin"
    expected = b"".join(bytes([k + 1 if k in filled else 0]) * block for k in range(blocks))
    assert copy.read_bytes() == expected
    assert range_of(made.graph.initializer[0]).offset == 0
    if source.stat().st_blocks * 512 < source.stat().st_size:  # this file system knows holes
        assert copy.stat().st_blocks * 512 <= (len(filled) + 1) * block


def test_a_file_system_without_holes_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(22, "Invalid argument")

    (tmp_path / "w.bin").write_bytes(floats(1) + floats(2))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(external.os, "lseek", refuse)
    carry_external(part_with(weight("w", "w.bin", SIZE * 4)), tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "w.bin").read_bytes() == floats(2)


def test_two_weights_of_one_range_are_stored_once(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(floats(1) + floats(2) + floats(3))
    (tmp_path / "out").mkdir()
    made = part_with(weight("a", "w.bin", SIZE * 4), weight("b", "w.bin", SIZE * 4))
    carry_external(made, tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "w.bin").read_bytes() == floats(2)
    assert range_of(made.graph.initializer[0]) == range_of(made.graph.initializer[1])


def test_ranges_that_overlap_are_both_right(tmp_path: Path) -> None:
    content = np.arange(3 * SIZE, dtype=np.float32).tobytes()
    (tmp_path / "w.bin").write_bytes(content)
    (tmp_path / "out").mkdir()
    made = part_with(weight("a", "w.bin", SIZE * 4), weight("b", "w.bin", SIZE * 4 + 400))
    carry_external(made, tmp_path, tmp_path / "out")
    for tensor, offset in zip(made.graph.initializer, (SIZE * 4, SIZE * 4 + 400)):
        array = numpy_helper.to_array(tensor, str(tmp_path / "out"))
        assert array.tobytes() == content[offset : offset + SIZE * 4]


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "a/../../w.bin", ""])
def test_data_outside_of_the_models_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "w.bin").write_bytes(floats(1))
    for refuse in (load_external, lambda made, place: carry_external(made, place, tmp_path / "out")):
        with pytest.raises(ModelError, match="outside of the model's folder"):
            refuse(part_with(weight("w", location, 0)), tmp_path / "m")


def test_a_missing_file_is_named_with_its_tensor(tmp_path: Path) -> None:
    for refuse in (load_external, lambda made, place: carry_external(made, place, tmp_path / "out")):
        with pytest.raises(ModelError, match=r"'w'.*missing.*w\.bin"):
            refuse(part_with(weight("w", "w.bin", 0)), tmp_path)


def test_a_file_that_breaks_off_is_named_with_its_tensor(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(floats(1)[:-1])
    (tmp_path / "out").mkdir()
    for refuse in (load_external, lambda made, place: carry_external(made, place, tmp_path / "out")):
        with pytest.raises(ModelError, match=r"w\.bin ends before the data of 'w'"):
            refuse(part_with(weight("w", "w.bin", 0)), tmp_path)


@pytest.mark.parametrize(("key", "value"), [("offset", "many"), ("length", "-1"), ("offset", "-4"), ("length", "1e3")])
def test_a_range_that_is_no_range_is_an_error_of_the_model(tmp_path: Path, key: str, value: str) -> None:
    (tmp_path / "w.bin").write_bytes(floats(1))
    tensor = weight("w", "w.bin", 0)
    for entry in tensor.external_data:
        if entry.key == key:
            entry.value = value
    with pytest.raises(ModelError, match="no valid offset and length"):
        load_external(part_with(tensor), tmp_path)


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(floats(1) + floats(2))
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match=r"cannot write .*w\.bin"):
        carry_external(part_with(weight("w", "w.bin", 0)), tmp_path, tmp_path / "out")


def test_bytes_outside_are_counted(tmp_path: Path) -> None:
    made = part_with(weight("a", "w.bin", 0), weight("b", "w.bin", SIZE * 4))
    assert external_bytes(made) == 2 * SIZE * 4
    assert external_bytes(part_with(numpy_helper.from_array(np.ones(3), "c"))) == 0


# -- 2.25 GB ------------------------------------------------------------------------------------------------------------


def test_a_model_above_2_gb_is_cut_without_reading_it(tmp_path: Path) -> None:
    from bench.cut_speed import BLOCK, TENSORS, big_model

    path = big_model(tmp_path)
    model = load_model(path)
    assert model.external
    assert external_bytes(model.proto) == BLOCK * 4 * TENSORS > 2 << 30
    (part,) = split(model, "gather12")
    assert part.proved is None
    write(model, [part], tmp_path / "parts")
    head, tail = (tmp_path / "parts" / "001_Gather" / f"{name}-weights.bin" for name in ("head", "tail"))
    assert head.stat().st_size == 12 * BLOCK * 4
    assert tail.stat().st_size == (TENSORS - 12) * BLOCK * 4
    if (tmp_path / "weights.bin").stat().st_blocks < 1 << 20:
        assert tail.stat().st_blocks * 512 < 16 << 20
    onnx.checker.check_model(str(tmp_path / "parts" / "001_Gather" / "head.onnx"))


@pytest.mark.usefixtures("outside")
def test_the_parts_of_a_small_cousin_of_it_are_the_model(tmp_path: Path) -> None:
    from bench.cut_speed import big_model

    (part,) = split(load_model(big_model(tmp_path, tensors=3)), "gather1", prove=True)
    assert part.proved, part.note
