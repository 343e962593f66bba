"""A model of 15,000 tensors with real processes: every limit fits it (finding F22)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from daemons import TASKS, Daemons, Server, asked, poll
from relay import Relay
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from test_redundancy import replayed
from test_training import finished

TASK = "small_tasks:many_tensors"
TENSORS = 15_000


def both_have_pushed(server: Server) -> bool:
    reply = asked(server)
    return reply.pushes > reply.version


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


def test_a_job_of_many_tensors_comes_to_the_parameters_of_a_plain_one(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker begins, another one joins late and gets a snapshot, and all connections are cut."""
    output, batches = tmp_path / "model", tmp_path / "batches"
    server = daemons.server(
        *("--task", TASK, "--min-workers", "1", "--epochs", "1", "--batch-size", "8", "--seed", "3"),
        *("--output", str(output), "--lease-seconds", "60"),
        program=("batches_server", str(batches)),
    )
    relay = Relay(server.port)
    arguments = (f"127.0.0.1:{relay.port}", "--compressor", "4bit")
    first = daemons.worker(*arguments, "--worker-id", "first")
    poll(lambda: asked(server).version > 0, "no progress")
    first.signal(signal.SIGSTOP)  # or it might be through before the other one comes
    late = daemons.worker(*arguments, "--worker-id", "late")
    late.wait_for("ready for work")
    first.signal(signal.SIGCONT)
    poll(lambda: both_have_pushed(server), "no push of the late one")
    assert relay.cut() >= 2
    reply = finished(server)
    assert [first.wait(), late.wait()] == [0, 0]
    relay.close()
    server.wait_for(f"{TENSORS} tensors, ")
    monkeypatch.syspath_prepend(str(TASKS))
    rounds = [json.loads(line) for line in batches.read_text().splitlines()]
    assert len(rounds) == reply.version
    expected, initial = flat(replayed(TASK, rounds)), flat(replayed(TASK, []))
    found = flat(load_file(output))
    assert torch.dist(found, expected) < 0.2 * torch.dist(expected, initial)
