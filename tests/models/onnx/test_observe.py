"""Tagging and finding values: what is put into the copy, and how codes come back from another encoding."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import Qdq
from equivcheck.engines.ort import OrtEngine
from equivcheck.models.onnx.load import model_from_bytes
from equivcheck.models.onnx.observe import Located, locate, recode, tag
from small_models import TRAPS

OPTIONS = {"optimization": "all", "disabled_optimizers": ("ConstantSharing", "NhwcTransformer")}


@pytest.mark.parametrize("name", [n for n in TRAPS if n != "names_like_our_own"])
def test_a_tagged_copy_is_valid_and_the_model_is_left_alone(name: str) -> None:
    proto = TRAPS[name](lambda: Qdq(dtype="int8", seed=1))
    model = model_from_bytes(proto.SerializeToString(), "m")
    before = model.proto.SerializeToString()
    tagged = tag(model)
    assert model.proto.SerializeToString() == before
    names = [node.name for node in tagged.proto.graph.node]
    assert len(set(names)) == len(names)
    assert set(tagged.tags.values()) <= set(model.graph.stored)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in tagged.proto.graph.initializer}
    for scale, value in tagged.tags.items():
        assert np.array_equal(arrays[scale], model.graph.quantisation[value].scale)
    OrtEngine().load(tagged.proto.SerializeToString(), {"optimization": "disable"})


def test_a_reader_with_another_scale_keeps_it() -> None:
    proto = TRAPS["read_with_another_scale_than_written"](lambda: Qdq(seed=1))
    tagged = tag(model_from_bytes(proto.SerializeToString(), "m"))
    readers = [
        n.input[1] for n in tagged.proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == "conv_q"
    ]
    assert len(readers) == 2
    assert sum(scale in tagged.tags for scale in readers) == 1


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_located_value_exists_in_the_optimised_graph(dtype: str) -> None:
    for name in ("residual_adds", "pools_and_softmax", "split_in_two", "requantised_twice"):
        proto = TRAPS[name](lambda: Qdq(dtype=dtype, seed=1))
        tagged = tag(model_from_bytes(proto.SerializeToString(), "m"))
        optimised = onnx.ModelProto.FromString(OrtEngine().optimise(tagged.proto.SerializeToString(), OPTIONS))
        there = {out for node in optimised.graph.node for out in node.output}
        found, missing = locate(tagged, optimised)
        assert {place.name for places in found.values() for place in places} <= there
        assert not set(found) & set(missing)
        assert set(found) | set(missing) == set(tagged.graph.stored) - set(tagged.graph.inputs)
        assert len({places[0].name for places in found.values()}) == len(found), "two values at one place"


@given(codes=st.lists(st.integers(-128, 127), min_size=1, max_size=20), how=st.sampled_from(["offset", "dtype"]))
def test_codes_re_encoded_as_u8_come_back(codes: list[int], how: str) -> None:
    """ORT's s8-to-u8: code + 128."""
    signed = np.array(codes, np.int8)
    encoded = (signed.astype(int) + 128).astype(np.uint8)
    place = Located("x", "", certain=True, offset=-128 if how == "offset" else 0)
    found = recode(encoded, place, np.dtype(np.int8))
    assert found is not None
    np.testing.assert_array_equal(found, signed)
    assert found.dtype == np.int8
    back = recode(signed, Located("x", "", certain=True, offset=128 if how == "offset" else 0), np.dtype(np.uint8))
    np.testing.assert_array_equal(back, encoded)


def test_what_cannot_be_codes_is_not_made_codes() -> None:
    place = Located("x", "", certain=True)
    for array in (np.zeros(3, np.float32), np.zeros(3, np.int32), np.zeros(3, np.uint16), np.zeros(3, bool)):
        assert recode(array, place, np.dtype(np.int8)) is None


def test_codes_of_the_right_dtype_are_handed_on_as_they_are() -> None:
    array = np.arange(5, dtype=np.uint8)
    assert recode(array, Located("x", "", certain=True), np.dtype(np.uint8)) is array


def test_a_code_that_the_offset_moves_out_of_range_is_refused() -> None:
    place = Located("x", "", certain=True, offset=-128)
    assert recode(np.array([-100], np.int8), place, np.dtype(np.int8)) is None
