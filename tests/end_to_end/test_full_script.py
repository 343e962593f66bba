"""The full example of docs/how-to/scripts.md: all of its lines run, and a job continues from its file, bit
for bit."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from daemons import Daemon, Daemons, Server

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "full_training.py"
EPOCHS, WORKERS, STEPS = 2, 2, 22  # 1408 samples, 32 for each of two workers


def start(daemons: Daemons, folder: Path) -> tuple[Server, list[Daemon]]:
    """A server, and the example as its workers."""
    server = daemons.server(
        *("--script", "--min-workers", str(WORKERS), "--epochs", str(EPOCHS), "--batch-size", "32"),
        *("--downlink", "none", "--lease-seconds", "60"),
    )
    options = ("--compressor", "none")
    return server, daemons.programs("script_full", str(folder), server.address, *options, count=WORKERS)


def executable(code: CodeType) -> Iterator[int]:
    """Line numbers of what is run of a module, as tracing reports them: without the first line of a function,
    which is a call."""
    for _, _, line in code.co_lines():
        if line and line != code.co_firstlineno:
            yield line
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from executable(constant)


def state(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path)
    return loaded


def test_every_line_runs_and_a_job_continues_from_its_last_file_to_the_bit(
    daemons: Daemons, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    ran: set[int] = set()
    _, workers = start(daemons, whole)
    assert [worker.wait() for worker in workers] == [0] * WORKERS
    ran.update(*(worker.fields("^lines$")["ran"] for worker in workers))

    server, killed = start(daemons, stopped)
    server.wait_for("after 1 epoch, version")
    for each in (server, *killed):
        each.signal(signal.SIGKILL)
        each.wait()
    assert state(stopped / "last.pt")["epoch"] < EPOCHS - 1
    server, workers = start(daemons, stopped)
    assert [worker.wait() for worker in workers] == [0] * WORKERS
    ran.update(*(worker.fields("^lines$")["ran"] for worker in workers))
    assert "the optimizer continues from the state that" in server.log
    begun = int(server.wait_for(r"the job begins with epoch (\d), after 0 steps").group(1)) - 1

    # Exactly where it would be if nobody had stopped it; buffers are means over the ranks, who began anew.
    expected, found = state(whole / "last.pt"), state(stopped / "last.pt")
    assert found["epoch"] == expected["epoch"] == EPOCHS - 1
    for name, value in expected["model"].items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(found["model"][name], value), name
    for place, remembered in expected["optimizer"]["state"].items():
        for name, value in remembered.items():
            assert torch.equal(found["optimizer"]["state"][place][name], value), (place, name)
    assert expected["optimizer"]["state"][0]["step"] == EPOCHS * STEPS
    assert expected["best"] > 0.8

    # What each rank sees.
    logs = {worker.wait_for(r"rank (\d) ends at").group(1): worker.log for worker in workers}
    assert sorted(logs) == ["0", "1"]
    for rank, log in logs.items():
        assert f"rank {rank} ends at version {(EPOCHS - begun) * STEPS}" in log
        assert re.search(rf"rank {rank}, epoch {begun}: .*/{STEPS} ", log)
    assert [": accuracy " in logs[rank] for rank in ("0", "1")] == [True, False]

    source = EXAMPLE.read_text()
    never = sorted({*executable(compile(source, str(EXAMPLE), "exec"))} - ran)
    assert [source.splitlines()[line - 1].strip() for line in never] == []
