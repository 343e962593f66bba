"""Features of users' scripts, in a job and alone: the rows of the table in docs/reference/scripts.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import TASKS, Daemon, Daemons, Server
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

sys.path.append(str(TASKS))
import script_rows as rows

ROUNDED = ("narrow", "mixed")  # what goes through bfloat16 depends on how batches are divided


def job(daemons: Daemons, workers: int, *more: str) -> Server:
    return daemons.server(
        *("--script", "--min-workers", str(workers), "--epochs", str(rows.EPOCHS)),
        *("--batch-size", str(rows.BATCH), "--seed", str(rows.SEED), "--downlink", "none", *more),
    )


def scripts(daemons: Daemons, server: Server, loop: str, workers: int) -> list[Daemon]:
    return daemons.programs("script_rows", loop, server.address, "--compressor", "none", count=workers)


def trained(scripts: list[Daemon]) -> list[dict[str, Any]]:
    """Return the last report of each script."""
    assert [script.wait() for script in scripts] == [0] * len(scripts), scripts[0].log
    return [script.fields("^trained$") for script in scripts]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_row_trains_as_it_would_alone(daemons: Daemons, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    server = job(daemons, 2, "--output", str(output))
    first, second = trained(scripts(daemons, server, "everyday", 2))
    assert first["parameters"] == second["parameters"]
    expected, losses = rows.alone("everyday", 2)
    before = rows.by_name(rows.Everyday())
    assert first["parameters"].keys() == expected.keys()
    for name, values in first["parameters"].items():
        tolerance = 0.02 if name.startswith(ROUNDED) else 1e-5
        torch.testing.assert_close(torch.tensor(values), expected[name], rtol=tolerance, atol=tolerance)
        moved = float((expected[name] - before[name]).abs().max())
        assert (moved == 0) if name.startswith("unreached") else (moved > 0.03), name
    means = [sum(pair) / 2 for pair in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(losses, rel=2e-3)
    server.wait_for("parameters of version 12 written")
    masters = load_file(output)["narrow.weight"]
    assert not torch.equal(masters, masters.to(torch.bfloat16).float())
    assert masters.to(torch.bfloat16).tolist() == first["parameters"]["narrow.weight"]


@pytest.mark.parametrize(
    ("loop", "workers"),
    [("compiled", 1), ("unscaled", 1), ("gathered", 2), ("adapters", 2), ("sharpness", 1)],
)
def test_a_loop_trains_as_it_would_alone(daemons: Daemons, loop: str, workers: int, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    server = job(daemons, workers, "--output", str(output))
    found = scripts(daemons, server, loop, workers)
    said = trained(found)
    expected, losses = rows.alone(loop, workers)
    for name, values in said[0]["parameters"].items():
        torch.testing.assert_close(torch.tensor(values), expected[name], rtol=1e-4, atol=1e-5)
    means = [sum(each) / workers for each in zip(*(one["losses"] for one in said), strict=True)]
    assert means == pytest.approx(losses, rel=1e-4)
    changed = "from now on gradients leave after the backward pass" in found[0].log
    assert changed == (loop == "unscaled")
    assert not any("in place" in script.log for script in found)
    server.wait_for("parameters of version .* written")
    assert load_file(output).keys() == said[0]["parameters"].keys() - {"base.weight", "base.bias"}


def test_groups_that_come_later_are_refused_by_name(daemons: Daemons) -> None:
    (script,) = scripts(daemons, job(daemons, 1), "growing", 1)
    assert script.wait() == 1
    script.wait_for(r"optimizer\.add_param_group: the groups of a job are fixed by job\.attach")
