"""The figures of the shared cases, which their authors computed in float64 or exact integers, with one relative bound."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from equivcheck.metrics import Grid, Tally, tally

CLOSE = 1e-9
FINITE = 2.0**500  # squares of what is greater overflow in the float64 in which the cases' figures were computed
FIGURES = (
    "n", "n_mismatch", "n_finite_pairs", "max_abs", "mean_abs", "rmse", "bias", "argmax", "cosine", "snr_db",
    "nan_ref", "nan_cand", "nan_mismatch", "inf_ref", "inf_cand", "inf_mismatch",
)  # fmt: skip


def figures(found: Tally) -> dict[str, Any]:
    """Our figures under the cases' names: the maximum of nothing is 0, the SNR of equal tensors infinite."""
    got = found.finish()
    notes = {"equal": math.inf, "reference is zero": -math.inf, "empty": None}
    return {
        "n": got.n,
        "n_mismatch": got.mismatched,
        "n_finite_pairs": found.finite,
        "max_abs": 0.0 if got.max_abs is None else got.max_abs,
        "mean_abs": got.mean_abs,
        "rmse": got.rmse,
        "bias": got.bias,
        "argmax": None if got.argmax is None else int(np.ravel_multi_index(got.argmax, found.shape)),
        "cosine": got.cosine,
        "snr_db": got.snr_db if got.snr_note is None else notes[got.snr_note],
        "nan_ref": got.nan[0],
        "nan_cand": got.nan[1],
        "nan_mismatch": got.nan_mismatch,
        "inf_ref": got.inf[0],
        "inf_cand": got.inf[1],
        "inf_mismatch": got.inf_mismatch,
    }


def agree(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, str):
        wanted = float(wanted)
    if got is None or wanted is None:
        return got is wanted
    return got == wanted or math.isclose(got, wanted, rel_tol=CLOSE)


def recordings(folder: Path) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """(reference, candidate) by tensor name: the .npz files, and the same as TensorProto where the type needs one."""

    def arrays(name: str) -> dict[str, np.ndarray]:
        with np.load(folder / name) as file:
            return {key: file[key] for key in file.files}

    def proto(name: str) -> dict[str, np.ndarray]:
        return {"t": numpy_helper.to_array(onnx.TensorProto.FromString((folder / name).read_bytes()))}

    reference = "ref.npz" if (folder / "ref.npz").exists() else "expected.npz"
    found = [(arrays(reference), arrays("cand.npz"))]
    return [*found, (proto("ref_t.pb"), proto("cand_t.pb"))] if (folder / "ref_t.pb").exists() else found


def expectations(shared: Path, pattern: str) -> list[tuple[Path, dict[str, Any]]]:
    folders = [f for f in sorted((shared / "cases").glob(pattern)) if (f / "cand.npz").exists()]
    return [(f, json.loads((f / "expect.json").read_text(encoding="utf-8"))["expect"]) for f in folders]


def compared(folder: Path, expect: dict[str, Any]) -> tuple[int, list[str]]:
    """(figures checked, those that differ) of one case."""
    checked, problems = 0, []
    for reference, candidate in recordings(folder):
        for name, wanted in expect.get("metrics", {}).items():
            if name not in reference or name not in candidate:
                continue
            a, b = reference[name], candidate[name]
            if not wanted.get("comparable", True):
                with pytest.raises(ValueError, match="shapes differ"):
                    tally(a, b)
                checked += 1
                continue
            got = figures(tally(a, b))
            for key in FIGURES:
                overflowed = key == "rmse" and wanted.get(key) == math.inf and np.abs(a).max() > FINITE
                if key in wanted and not overflowed:
                    checked += 1
                    if not agree(got[key], wanted[key]):
                        problems.append(f"{folder.name}/{name} {key}: {got[key]!r}, the case says {wanted[key]!r}")
    return checked, problems


@pytest.mark.parametrize(("pattern", "cases", "least"), [("m*", 26, 290), ("[qt]*", 17, 460)])
def test_the_cases_have_the_figures_that_their_authors_computed(
    shared: Path, pattern: str, cases: int, least: int
) -> None:
    results = [compared(folder, expect) for folder, expect in expectations(shared, pattern)]
    problems = [problem for _, found in results for problem in found]
    checked = sum(count for count, _ in results)
    print(f"{pattern}: {checked} figures of {len(results)} cases checked, relative bound {CLOSE:g}")
    assert not problems
    assert len(results) >= cases
    assert checked >= least


def test_an_overflow_of_the_cases_own_float64_is_no_overflow_here(shared: Path) -> None:
    reference, candidate = recordings(shared / "cases" / "m21_f64_square_overflow")[0]
    errors = [float(b) - float(a) for a, b in zip(reference["t"].flat, candidate["t"].flat, strict=True)]
    assert tally(reference["t"], candidate["t"]).finish().rmse == pytest.approx(
        math.hypot(*errors) / len(errors) ** 0.5
    )


def test_a_case_with_another_layout_is_equal_once_that_is_undone(shared: Path) -> None:
    checked = 0
    for folder, expect in expectations(shared, "[mq]*"):
        undo = expect.get("exact_after", {})
        order, shape = undo.get("cand_transpose"), undo.get("cand_reshape")
        reference, candidate = recordings(folder)[0]
        for name in reference.keys() & candidate.keys() if undo else ():
            a, b = reference[name], candidate[name]
            if b.ndim != len(order or shape):
                continue
            assert tally(a, b.transpose(order) if order else b.reshape(shape)).finish().identical, folder.name
            checked += 1
    assert checked >= 3


def test_a_quantised_case_has_the_figures_of_its_real_values(shared: Path) -> None:
    checked = 0
    for folder, expect in expectations(shared, "m*"):
        if "metrics_dequantized" not in expect:
            continue
        quant, wanted = expect["quant"], expect["metrics_dequantized"]
        reference, candidate = recordings(folder)[0]
        grid = Grid(np.array(quant["scale"]), np.array(quant["zero_point"]))
        got = tally(reference["t"], candidate["t"], grid).finish()
        assert got.cosine == pytest.approx(wanted["cosine"], rel=CLOSE)
        assert got.snr_db == pytest.approx(wanted["snr_db"], rel=CLOSE)
        assert (got.max_lsb or 0) * quant["scale"] == pytest.approx(wanted["max_abs"], rel=CLOSE)
        checked += 1
    assert checked >= 1
