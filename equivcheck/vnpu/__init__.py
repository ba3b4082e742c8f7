"""The virtual NPU: int8 models on real engines' integer arithmetic, with the placement of a real NPU."""

from __future__ import annotations

from equivcheck.vnpu.faults import KINDS as FAULT_KINDS
from equivcheck.vnpu.faults import Fault
from equivcheck.vnpu.profiles import Profile, Proof, load_profile, parse_profile, profile_names
from equivcheck.vnpu.program import Crossing, Fallback, Placement, Program, compile_program
from equivcheck.vnpu.targets import Target, load_target, parse_target, target_names

__all__ = [
    "FAULT_KINDS",
    "Crossing",
    "Fallback",
    "Fault",
    "Placement",
    "Profile",
    "Program",
    "Proof",
    "Target",
    "compile_program",
    "load_profile",
    "load_target",
    "parse_profile",
    "parse_target",
    "profile_names",
    "target_names",
]
