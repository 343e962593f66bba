"""Jobs whose compressor has bases, with real daemons: kills of servers and workers, joiners, and --resume."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from daemons import Daemon, Daemons, Server, asked, poll

import gradwire

TASK = "small_tasks:regression:slow=0.01,samples=1920"
JOB = (
    *("--task", TASK, "--compressor", "lowrank:rank=1", "--min-workers", "2", "--learning-rate", "0.01"),
    # Where a member is lost the bits are others, and a machine that is busy enough loses one.
    *("--lease-seconds", "60"),
)


def begun(daemons: Daemons, *options: str, steps: int, port: int = 0) -> Server:
    return daemons.server(*JOB, "--max-steps", str(steps), "--port", str(port), *options)


def joined(daemons: Daemons, server: Server, *options: str) -> list[Daemon]:
    """Two workers, whose ranks are in the order of their names."""
    workers: list[Daemon] = []
    for name in ("w0", "w1"):
        workers.append(daemons.worker(server.address, "--worker-id", name, *options))
        server.wait_for(rf"\({name}\) joined")
    return workers


def reach(server: Server, version: int) -> None:
    poll(lambda: asked(server).version >= version, "no progress")


@pytest.mark.parametrize(
    "options",
    [
        ("--optimizer", "sgd"),
        ("--optimizer", "adam", "--clip-norm", "1"),
        ("--overlap", "both", "--downlink", "none"),
    ],
    ids=["sgd", "adam, clipped", "parts count at once, values down"],
)
def test_a_job_whose_server_is_killed_ends_with_the_same_bits(
    daemons: Daemons, tmp_path: Path, options: tuple[str, ...]
) -> None:
    found: list[str] = []
    for kills in ((), (3, 9)):
        state = ("--state", str(tmp_path), "--checkpoint-every", "4steps") if kills else ()
        server = begun(daemons, *options, *state, steps=20)
        workers = joined(daemons, server)
        for version in kills:
            reach(server, version)
            server.signal(signal.SIGKILL)
            server.wait()
            server = begun(daemons, *options, *state, steps=20, port=server.port)
            server.wait_for("resuming at version")
        assert [worker.wait() for worker in workers] == [0, 0]
        found.append(asked(server).parameters_sha256)
    assert found[0] == found[1]


def test_workers_that_return_or_join_have_the_job_s_bases_and_optimizer_s_state(
    daemons: Daemons, tmp_path: Path
) -> None:
    """The checksum of version 64 compares their parameters with the server's. Another job continues from the
    checkpoint."""
    server = begun(daemons, "--optimizer", "adam", "--overlap", "both", "--state", str(tmp_path), steps=70)
    first, second = joined(daemons, server)
    server.wait_for("each replica takes the optimizer's step itself")
    reach(server, 5)
    first.signal(signal.SIGKILL)
    first.wait()
    again = daemons.worker(server.address, "--worker-id", "w0")
    reach(server, 15)
    late = daemons.worker(server.address, "--worker-id", "late")
    assert [worker.wait() for worker in (again, second, late)] == [0, 0, 0]
    assert asked(server).version == 70
    assert "differed from the server's" not in server.log
    other = begun(daemons, "--optimizer", "adam", "--resume", str(tmp_path), steps=66)
    assert [worker.wait() for worker in joined(daemons, other)] == [0, 0]
    assert "optimizer state, adam" in other.log
    assert "differed from the server's" not in other.log


def test_auto_takes_lowrank_where_the_model_and_the_optimizer_allow_it(daemons: Daemons) -> None:
    found: list[str] = []
    for compressor in ("lowrank:values=8bit", "auto"):
        chosen = ("--task", "digits", "--compressor", compressor)
        server = daemons.server(*JOB, "--max-steps", "6", *chosen)
        workers = joined(daemons, server, *(("--compressor", "auto") if compressor == "auto" else ()))
        assert [worker.wait() for worker in workers] == [0, 0]
        found.append(asked(server).parameters_sha256)
    assert found[0] == found[1]
    for daemon in (server, *workers):
        daemon.wait_for(r"compressor auto: lowrank:values=8bit, because 0\.0.. MB .* instead of 0\.029 MB")


@pytest.mark.parametrize("script", [False, True], ids=["task", "script"])
def test_with_adam_the_server_has_the_rank_of_its_workers(daemons: Daemons, script: bool) -> None:
    options = ("--compressor", "lowrank", "--max-steps", "3", "--batch-size", "8")
    if script:
        server = daemons.server("--script", *options)
        with gradwire.connect(server.address) as job:
            model = torch.nn.Linear(64, 64)
            model, optimizer = job.attach(model, torch.optim.AdamW(model.parameters()))
            for batch in job.batches(torch.utils.data.TensorDataset(torch.ones(64, 64))):
                model(batch[0]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    else:
        server = daemons.server("--task", "digits", "--optimizer", "adam", *options)
        worker = daemons.worker(server.address)
        assert worker.wait() == 0
        assert "using compressor lowrank:rank=8,values=8bit, because" in worker.log
    assert asked(server).version == 3
