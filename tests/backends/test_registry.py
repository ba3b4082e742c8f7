"""Naming a backend: who is there, and what a mistake is answered with."""

from __future__ import annotations

import pytest

from equivcheck.backends import registry
from equivcheck.backends.base import Backend
from equivcheck.backends.fake import FakeBackend
from equivcheck.backends.ort import OrtBackend
from equivcheck.backends.registry import backend, known
from equivcheck.backends.spec import Spec
from equivcheck.backends.vnpu import VnpuBackend
from equivcheck.errors import BackendUnavailable, EquivcheckError, SpecError, UnknownBackend, UnknownOption


def test_ort_and_the_virtual_npu_are_always_there() -> None:
    assert {"ort", "vnpu"} <= set(known())
    assert isinstance(backend("ort"), OrtBackend)
    assert isinstance(backend("vnpu"), VnpuBackend)
    assert isinstance(backend(Spec("ort")), OrtBackend)


def test_a_backend_is_returned_as_it_is() -> None:
    fake = FakeBackend()
    assert backend(fake) is fake


def test_every_registered_backend_keeps_to_the_protocol() -> None:
    for name, point in known().items():
        kind = point.load()
        assert issubclass(kind, Backend)
        assert kind.name == name
        assert kind.summary
        assert kind.unavailable() is None or isinstance(kind.unavailable(), str)
        for option in kind.options.values():
            assert option.help
            assert option.choices is None or option.default is None or option.default in option.choices


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(UnknownBackend, match="unknown backend 'vnpo'") as caught:
        backend("vnpo:profile=exact")
    assert caught.value.nearest == ("vnpu",)
    assert "ort" in str(caught.value)
    assert isinstance(caught.value, SpecError)


@pytest.mark.parametrize(
    ("spec", "asked", "nearest"),
    [
        ("vnpu:profil=exact", "profil", "profile"),
        ("vnpu:profile=exacte", "exacte", "exact"),
        ("vnpu:target=warbo", "warbo", "warboy"),
        ("ort:optimisation=all", "optimisation", "optimization"),
        ("ort:optimization=disabled", "disabled", "disable"),
    ],
)
def test_an_unknown_option_or_value_is_answered_with_the_nearest(spec: str, asked: str, nearest: str) -> None:
    with pytest.raises(UnknownOption) as caught:
        backend(spec)
    assert caught.value.asked == asked
    assert nearest in caught.value.nearest


@pytest.mark.parametrize("spec", ["ort:timeout=soon", "ort:threads=1.5", "vnpu:timeout="])
def test_a_number_must_be_one(spec: str) -> None:
    with pytest.raises(UnknownOption, match="not a number"):
        backend(spec)


@pytest.mark.parametrize("spec", ["ort:threads=-3", "ort:timeout=nan", "ort:timeout=-1", "vnpu:timeout=0"])
def test_a_number_must_make_sense(spec: str) -> None:
    with pytest.raises(UnknownOption):
        backend(spec)


def test_every_backend_knows_a_timeout() -> None:
    for name, point in known().items():
        if point.load().unavailable() is not None:  # refused before its options are read
            continue
        needed = f"{__file__}," if point.load().positional is not None else ""
        assert backend(f"{name}:{needed}timeout=2.5").chosen["timeout"] == "2.5"


def test_a_bare_value_where_none_is_taken_is_refused() -> None:
    with pytest.raises(SpecError, match="takes no bare value, got 'exact'"):
        backend("vnpu:exact")


@pytest.mark.parametrize("spec", ["vnpu@python=/usr/bin/python3", "vnpu@ssh=root@imx8"])
def test_another_interpreter_is_refused_and_not_ignored(spec: str) -> None:
    with pytest.raises(SpecError, match="@"):
        backend(spec)


def test_one_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrtBackend, "unavailable", classmethod(lambda cls: "no such wheel; pip install it"))
    with pytest.raises(BackendUnavailable, match="no such wheel; pip install it") as caught:
        registry.backend("ort")
    assert isinstance(caught.value, EquivcheckError)
