"""The proof of a twin: it must find what is wrong, and where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equivcheck.backends.vnpu import CpuFallback
from equivcheck.models.onnx.load import OnnxModel, load_model
from equivcheck.models.tflite.load import read_flatbuffer
from equivcheck.twins.convert import Converted, convert
from equivcheck.twins.prove import prove
from twins.proving import engine, loaded, proved, random_feeds
from vnpu.cases import CASES
from vnpu.graphs import Q, quantised_model


@pytest.fixture(scope="module")
def digits() -> OnnxModel:
    return load_model(Path(__file__).parents[2] / "fixtures" / "digits_qdq_s8.onnx")


def with_bytes(twin: Converted, tensor: str, change) -> Converted:
    """The twin with the bytes of one constant changed."""
    file = read_flatbuffer(twin.content, "the twin")
    old = np.ascontiguousarray(file.tensors[file.index_of[tensor]].constant)
    assert twin.content.count(old.tobytes()) == 1
    return replace(twin, content=twin.content.replace(old.tobytes(), change(old.copy()).tobytes()))


def weights_of(twin: Converted) -> list[str]:
    return [t.name for t in read_flatbuffer(twin.content, "the twin").tensors if t.name.endswith("/weights")]


def test_one_turned_channel_is_found_at_its_step_and_nowhere_else(digits: OnnxModel) -> None:
    twin = convert(digits)
    name = weights_of(twin)[1]

    def turn(weights):
        weights[0] = -weights[0]
        return weights

    proof = proved(digits, twin=with_bytes(twin, name, turn))
    assert not proof.proved
    (wrong,) = proof.wrong
    assert f"{wrong.value}/weights" == name
    assert wrong.step == digits.graph.step_of_value[wrong.value].id
    assert "LSB beyond rounding" in wrong.reason


def test_a_bias_one_unit_off_is_legal_but_not_the_very_codes(digits: OnnxModel) -> None:
    """A unit of the bias is s_x * s_w, a hundredth of an LSB here: some codes move, none by more than a tie."""
    twin = convert(digits)
    name = weights_of(twin)[0].replace("/weights", "/bias")
    proof = proved(digits, twin=with_bytes(twin, name, lambda bias: bias + 1))
    assert proof.proved
    assert proof.equal + proof.legal == proof.compared


def test_legal_codes_that_are_not_the_profile_s_are_counted_apart() -> None:
    model = loaded(CASES["AveragePool"]["counting pads"](np.random.default_rng(0), "int8").model)
    proof = proved(model)
    assert proof.proved
    assert proof.legal == 1
    assert proof.equal == proof.compared - 1


def test_an_output_that_watching_changes_is_said(digits: OnnxModel) -> None:
    class Disturbed:
        """An engine whose outputs move when all tensors are kept."""

        def __init__(self) -> None:
            self.own, self.watched = engine(), False

        def load(self, model, options):
            self.watched = bool(options["preserve"])
            return self.own.load(model, options)

        def run(self, feeds, outputs=None):
            found = self.own.run(feeds, outputs)
            last = digits.graph.outputs[0]
            return {**found, last: found[last] + 1} if self.watched else found

    proof = prove(digits, convert(digits), Disturbed(), random_feeds(digits.graph), CpuFallback(digits))
    assert proof.wrong[0].reason == "the untouched twin ends in other numbers"
    assert {wrong.op_type for wrong in proof.wrong} == {"output"}


def test_another_scale_or_zero_point_is_wrong_whatever_the_codes() -> None:
    def model(scale: float, zero: int) -> OnnxModel:
        out, x = Q(scale, zero, "uint8"), Q(0.03, 128, "uint8")
        return loaded(quantised_model([("Relu", ["x"], ["y"], {})], {"y": out}, {"x": (2, 3)}, {"x": x}).model)

    zeros = {"x": np.zeros((2, 3), np.float32)}
    assert proved(model(0.2, 5), zeros, convert(model(0.2, 5))).proved
    for other in (model(0.2000001, 5), model(0.2, 6)):
        (reason,) = {
            wrong.reason
            for wrong in proved(model(0.2, 5), zeros, convert(other)).wrong
            if wrong.op_type == "quantisation"
        }
        assert reason.endswith("are not the model's")
