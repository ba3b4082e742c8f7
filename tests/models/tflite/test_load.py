"""Reading .tflite files: what they hold, what is refused, and what reading costs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as generated

from equivcheck.cli import main
from equivcheck.describe import describe
from equivcheck.errors import EquivcheckError, ModelError
from equivcheck.models.onnx.load import load_model, model_from_bytes
from equivcheck.models.tflite import schema
from equivcheck.models.tflite.load import TfliteModel, read_flatbuffer
from tflite_graphs import TfliteGraph, small_net

GENERATED = files("ai_edge_litert").joinpath("schema_py_generated.py").read_text(encoding="utf-8")
_KINDS = {
    "Bool": "bool", "Int8": "byte", "Uint8": "ubyte", "Int32": "int", "Uint32": "uint", "Uint64": "ulong",
    "Float32": "float",
}  # fmt: skip


def _slots(table: str) -> dict[str, tuple[int, str, str]]:
    """Field -> (number, kind, default) as the generated builder functions of a table have them."""
    pattern = rf"def {table}Add(\w+)\(builder, .*\):\s+builder\.Prepend(\w+)Slot\((\d+), .*, ([^,)]+)\)"
    return {name: (int(number), kind, default) for name, kind, number, default in re.findall(pattern, GENERATED)}


@pytest.mark.parametrize("table", schema.TABLES)
def test_fields_have_the_numbers_types_and_defaults_of_the_generated_schema(table: str) -> None:
    theirs = {name.lower(): slot for name, slot in _slots(table).items()}
    assert theirs
    for name, field in schema.TABLES[table].items():
        number, kind, default = theirs[name.replace("_", "").lower()]
        assert field.number == number, name
        expected = _KINDS.get(kind)
        assert field.kind == expected if expected else field.kind in ("string", "table") or field.kind.endswith("[]")
        assert float(field.default) == float(default), name


def test_enums_are_those_of_the_generated_schema() -> None:
    def members(enum: type) -> dict[int, str]:
        return {value: name for name, value in vars(enum).items() if isinstance(value, int)}

    assert dict(enumerate(schema.OPERATORS)) == members(generated.BuiltinOperator)
    assert dict(enumerate(schema.ACTIVATIONS)) == members(generated.ActivationFunctionType)
    assert dict(enumerate(schema.PADDINGS)) == members(generated.Padding)
    types = members(generated.TensorType)
    assert [name.lower() for _, name in sorted(types.items())] == list(schema.TENSOR_TYPES)
    options = members(generated.BuiltinOptions)
    assert all(options[number] == name for number, name in schema.OPTIONS.items())


def test_a_tflite_file_is_loaded_as_a_model_of_its_own_format(tmp_path: Path) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(small_net())
    model = load_model(path)
    assert isinstance(model, TfliteModel)
    assert (model.format, model.ir_version, model.producer) == ("tflite", 3, "built by hand")
    assert model.graph.inputs == ("image",)
    assert model.graph.outputs == ("probabilities",)
    source = model.flatbuffer
    assert [op.kind for op in source.operators][:3] == ["CONV_2D", "DEPTHWISE_CONV_2D", "ADD"]
    made = {source.tensors[k].name for op in source.operators for k in op.outputs}
    assert set(model.graph.stored) == {"image", *made}
    for name in made:
        ours, theirs = source.tensors[source.index_of[name]].quantisation, model.graph.quantisation[name]
        assert ours is not None
        assert ours.same_as(theirs)


def test_shapes_are_the_files_outside_and_nchw_inside() -> None:
    graph = model_from_bytes(small_net(), "net.tflite").graph
    shapes = {name: graph.values[name].shape for name in graph.stored}
    assert shapes["image"] == (1, 9, 9, 3)
    assert shapes[graph.stored[1]] == (1, 8, 5, 5)
    assert shapes["probabilities"] == (1, 6)


def test_tensors_that_share_a_name_or_have_none_get_names_of_their_own() -> None:
    g = TfliteGraph()
    x = g.input((2, 3), name="x")
    y = g.op("LOGISTIC", [x], (2, 3), 1 / 256, -128, name="x")
    z = g.op("LOGISTIC", [y], (2, 3), 1 / 256, -128)
    g.graph.tensors[z].name = None
    source = read_flatbuffer(g.content(z), "names.tflite")
    assert [tensor.name for tensor in source.tensors] == ["x", "x_2", "tensor_2"]


def test_weights_of_four_bits_are_two_a_byte_the_lower_half_first() -> None:
    g = TfliteGraph()
    packed = g.constant(np.asarray([0x1F, 0x80], np.uint8))
    g.graph.tensors[packed].type = generated.TensorType.INT4
    g.graph.tensors[packed].shape = [3]
    source = read_flatbuffer(g.content(g.op("LOGISTIC", [g.input((1,))], (1,))), "w.tflite")
    found = source.tensors[packed].constant
    assert found is not None
    assert found.tolist() == [-1, 1, 0]


def test_a_file_that_breaks_off_anywhere_is_an_error_of_ours() -> None:
    content = small_net()
    for size in range(0, len(content) - 1, 97):
        with pytest.raises(EquivcheckError):
            model_from_bytes(content[:size], "short.tflite")


def test_bytes_that_are_no_tflite_file_are_refused() -> None:
    with pytest.raises(ModelError, match="not a TFLite model"):
        read_flatbuffer(b"\x08\x00\x00\x00ABCD" + bytes(40), "other.tflite")
    with pytest.raises(ModelError, match="breaks off"):
        read_flatbuffer(b"\xff\xff\x00\x00TFL3" + bytes(40), "far.tflite")


def test_neither_an_engine_is_needed_to_read_one_nor_this_package_to_read_onnx(tmp_path: Path) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(small_net())
    code = f"""
import sys
import equivcheck.models.onnx.load as load
assert not [m for m in sys.modules if "flatbuffers" in m or "equivcheck.models.tflite" in m]
load.load_model({str(path)!r})
assert not [m for m in sys.modules if m.split(".")[0] in ("ai_edge_litert", "tflite_runtime", "tensorflow", "onnxruntime")]
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_inspect_speaks_of_operators_and_suggests_selectors_in_tflites_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(small_net())
    found = describe(load_model(path))
    assert (found.format, found.nodes, found.steps, found.opsets) == ("tflite", 8, 8, {})
    assert found.ops["CONV_2D"] == 1
    assert found.scheme.activations == {"int8 per tensor": 9}
    assert [point.selector for point in found.split_points] == ["MEAN", "SOFTMAX", "FULLY_CONNECTED"]
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "  tflite     schema 3, by built by hand, sha256 " in shown
    assert "  graph      8 operators, 8 steps" in shown


def test_every_shared_model_is_read_and_its_operators_are_its_steps(shared: Path) -> None:
    for path in sorted((shared / "models").rglob("*.tflite")):
        if path.name.startswith("pymicro"):
            with pytest.raises(ModelError, match="VAR_HANDLE"):
                load_model(path)
            continue
        model = load_model(path)
        assert isinstance(model, TfliteModel)
        aliases = sum(op.kind == "DEQUANTIZE" for op in model.flatbuffer.operators)
        assert len(model.graph.steps) == len(model.flatbuffer.operators) - aliases, path
