"""Profiles: which engine's integer arithmetic the virtual NPU reproduces, as data (profiles/*.toml), and what is proved."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from equivcheck.errors import UnknownOption, near

# Every key a profile file may hold, with the values it may take (a type, where any value of it is allowed).
KEYS: dict[str, dict[str, Any]] = {
    "requantise": {
        "multiplier": ("float32", "float64", "fixed31"),
        "rounding": ("half-even", "half-up", "half-away", "floor", "truncate"),
        "double_rounding": bool,
    },
    "accumulator": {"bits": int, "overflow": ("wrap", "saturate")},
    "bias": {"conv": ("own", "codes", "rescaled"), "gemm": ("own", "codes", "rescaled")},
    "elementwise": {"arithmetic": ("float64", "ort", "tflite")},
    "pool": {"arithmetic": ("float64", "ort", "tflite")},
    "table": {"arithmetic": ("float64", "ort", "tflite")},
    "softmax": {"arithmetic": ("float64", "ort", "tflite")},
    "quantise": {
        "precision": ("float32", "float64"),
        "rounding": ("half-even", "half-up", "half-away", "floor", "truncate"),
    },
}


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether one operator of a profile is bit-exact against its engine.

    `note` names what it was compared with (proved) or says why it was not. The test, the engine's version and how many
    codes were compared are the profile's `proved_by`.
    """

    operator: str
    proved: bool
    note: str


@dataclass(frozen=True, slots=True)
class Profile:
    """One arithmetic. Field names are the TOML's `section_key`; `proofs` by operator (ONNX op_type)."""

    name: str
    engine: str
    summary: str
    requantise_multiplier: str
    requantise_rounding: str
    requantise_double_rounding: bool
    accumulator_bits: int
    accumulator_overflow: str
    bias_conv: str
    bias_gemm: str
    elementwise_arithmetic: str
    pool_arithmetic: str
    table_arithmetic: str
    softmax_arithmetic: str
    quantise_precision: str
    quantise_rounding: str
    proved_by: str = ""
    proofs: Mapping[str, Proof] = field(default_factory=dict)

    def proof(self, kind: str) -> Proof:
        """What is known of operator `kind`; unlisted ones are not proved."""
        return self.proofs.get(kind) or Proof(kind, False, "not compared with the engine")


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that ship with equivcheck."""
    folder = resources.files(__package__) / "profiles"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def load_profile(name: str) -> Profile:
    """Return the shipped profile `name`; UnknownOption with the nearest names otherwise."""
    known = profile_names()
    if name not in known:
        raise UnknownOption(
            f"no profile named {name!r}", asked=name, nearest=near(name, known), hint="profiles: " + ", ".join(known)
        )
    text = (resources.files(__package__) / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_profile(text)


def parse_profile(text: str) -> Profile:
    """Read one profile from TOML text; UnknownOption names the key that is missing, unknown or out of range."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnknownOption(f"the profile is no TOML: {error}") from error
    fields = {f"{section}_{key}": _checked(found, section, key) for section, keys in KEYS.items() for key in keys}
    for section, keys in found.items():
        if isinstance(keys, dict) and section not in ("proved", "unproved"):
            _refuse_unknown(section, keys)
    named: dict[str, Any] = {key: str(found.get(key, "")) for key in ("name", "engine", "summary", "proved_by")}
    if not named["name"]:
        raise UnknownOption("the profile has no name", hint='it needs name = "..." at the top')
    proofs = {
        kind: Proof(kind, section == "proved", note)
        for section in ("proved", "unproved")
        for kind, note in found.get(section, {}).items()
    }
    return Profile(**named, proofs=proofs, **fields)


def _checked(found: Mapping[str, Any], section: str, key: str) -> Any:
    allowed = KEYS[section][key]
    value = found.get(section, {}).get(key)
    fits = isinstance(value, allowed) if isinstance(allowed, type) else value in allowed
    if not fits:
        wanted = allowed.__name__ if isinstance(allowed, type) else " | ".join(allowed)
        raise UnknownOption(f"profile key {section}.{key} is {value!r}; it must be {wanted}", asked=str(value))
    return value


def _refuse_unknown(section: str, keys: Mapping[str, Any]) -> None:
    allowed = KEYS.get(section)
    if allowed is None:
        raise UnknownOption(f"unknown profile section [{section}]", asked=section, nearest=near(section, KEYS))
    for key in keys:
        if key not in allowed:
            raise UnknownOption(f"unknown profile key {section}.{key}", asked=key, nearest=near(key, allowed))
