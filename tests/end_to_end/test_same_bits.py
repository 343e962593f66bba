"""The program that compares two checkouts, without its daemons."""

from __future__ import annotations

from same_bits import differences
from same_bits_runs import COMPRESSORS, MATRIX, RUNS

GOOD = {"version": "18", "parameters_sha256": "ab" * 32, "tensors_sha256": "cd" * 32}
OTHER = {**GOOD, "parameters_sha256": "ef" * 32}


def test_runs_have_different_names_and_cover_the_matrix() -> None:
    names = [run.name for run in RUNS]
    assert len(set(names)) == len(names)
    for mode in MATRIX:
        for compressor in ("none",) if "coded" in mode.mode else COMPRESSORS:
            assert {"off", "backward"} <= {
                name.partition("overlap=")[2].partition("/")[0]
                for name in names
                if name.startswith(f"{mode.mode}/{compressor}/")
            }
    assert {run.name for run in RUNS if run.quick} < set(names)


def test_a_run_that_differs_failed_or_is_missing_is_named() -> None:
    here = {"same": GOOD, "other": GOOD, "failed": GOOD, "missing": GOOD, "not asked for": GOOD}
    there = {"same": GOOD, "other": OTHER, "failed": {"failed": "server.log ended with 1"}}
    assert differences(here, there, ["same", "other", "failed", "missing"]) == {
        "other": "parameters_sha256 abababababab != efefefefefef",
        "failed": "there: server.log ended with 1",
        "missing": "there: not in the recording",
    }
