"""Scripts that accumulate gradients, beside the same loops in plain torch: versions, rates and local steps
count optimizer steps, not batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import TASKS, Daemon, Daemons, Server, asked, poll, stop
from test_training import finished

from gradwire.worker.training.sharding import epoch_order

sys.path.append(str(TASKS))
import script_accumulates as accumulates

BATCH, EPOCHS, SEED = 8, 3, 3


def job(daemons: Daemons, workers: int, *more: str) -> Server:
    return daemons.server(
        *("--script", "--min-workers", str(workers), "--epochs", str(EPOCHS), "--batch-size", str(BATCH)),
        *("--seed", str(SEED), "--downlink", "none", *more),
    )


def scripts(
    daemons: Daemons, server: Server, take: int, kind: str, count: int = 1, **environ: str
) -> list[Daemon]:
    program = ("script_accumulates", f"{take} {kind}", server.address, "--compressor", "none")
    return daemons.programs(*program, count=count, environ=environ)


def trained(script: Daemon) -> dict[str, Any]:
    assert script.wait() == 0, script.log
    return script.fields("^trained$")


def epochs(workers: int = 1) -> list[list[Any]]:
    """Return the batches of each epoch: those of all workers together."""
    inputs, targets = accumulates.data().tensors
    found: list[list[Any]] = []
    for epoch in range(EPOCHS):
        order = epoch_order(SEED, epoch, len(inputs))
        pieces = [order[start : start + BATCH * workers] for start in range(0, len(order), BATCH * workers)]
        found.append([(inputs[piece], targets[piece]) for piece in pieces])
    return found


@pytest.mark.parametrize(
    ("take", "mode", "kind", "environ"),
    [
        (1, "sync", "last", {}),
        (2, "sync", "last", {}),
        *((3, "sync", kind, {"NO_SYNC": "1"}) for kind in ("last", "carried")),
        *((3, "async", kind, {}) for kind in ("last", "carried")),
        (2, "local:steps=4,correction=0", "last", {}),
        *((3, "local:steps=4,correction=0", kind, {}) for kind in ("last", "carried")),
    ],
)
def test_one_worker_trains_as_plain_torch(
    daemons: Daemons, take: int, mode: str, kind: str, environ: dict[str, str]
) -> None:
    server = job(daemons, 1, "--mode", mode)
    (script,) = scripts(daemons, server, take, kind, 1, **environ)
    found = trained(script)
    rates, parameters = accumulates.plain(epochs(), take, kind)
    assert found["rates"] == rates
    torch.testing.assert_close(
        torch.tensor(found["parameters"]), torch.tensor(parameters), rtol=1e-4, atol=1e-6
    )
    status = finished(server)
    each = len(rates) // EPOCHS
    assert status.version == (EPOCHS * -(-each // 4) if mode.startswith("local") else len(rates))
    assert "arrived twice" not in script.log


@pytest.mark.parametrize("kind", ["last", "carried"])
@pytest.mark.parametrize(("mode", "each"), [("sync", 1), ("local:steps=4,correction=0", 4)])
def test_two_workers_step_as_often_as_one_alone_with_their_batches(
    daemons: Daemons, mode: str, each: int, kind: str
) -> None:
    server = job(daemons, 2, "--mode", mode)
    found = [trained(script) for script in scripts(daemons, server, 2, kind, 2)]
    rates, parameters = accumulates.plain(epochs(2), 2, kind)
    assert [one["rates"] for one in found] == [rates, rates]
    assert {length for one in found for _, length in one["lengths"]} == {6}
    assert finished(server).version == EPOCHS * -(-len(rates) // EPOCHS // each)
    assert found[0]["parameters"] == found[1]["parameters"]
    if mode == "sync":  # batches of different sizes weigh as the workers' samples do
        close = torch.tensor(found[0]["parameters"]), torch.tensor(parameters)
        torch.testing.assert_close(*close, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("mode", ["sync", "local:steps=4,correction=0"])
def test_the_last_batch_of_an_epoch_is_told_also_when_the_other_worker_is_lost(
    daemons: Daemons, mode: str
) -> None:
    server = job(daemons, 2, "--lease-seconds", "2", "--mode", mode)
    lost, other = scripts(daemons, server, 2, "last", 2, SLOW="0.1", DECLARED="2")
    lost.wait_for("batch 3")
    lost.process.kill()
    assert trained(other)["left"] == [False] * EPOCHS


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_a_declared_number_gives_the_steps_of_the_job_before_the_first_batch(
    daemons: Daemons, overlap: str
) -> None:
    server = job(daemons, 1, "--overlap", overlap)
    (script,) = scripts(daemons, server, 3, "last", 1, DECLARED="3")
    found, (rates, parameters) = trained(script), accumulates.plain(epochs(), 3, "last")
    assert found["rates"] == rates
    assert found["totals"] == [len(rates)] * EPOCHS
    torch.testing.assert_close(
        torch.tensor(found["parameters"]), torch.tensor(parameters), rtol=1e-4, atol=1e-6
    )


def test_gradients_that_an_epoch_leaves_over_are_saved_with_the_workers_state(
    daemons: Daemons, tmp_path: Path
) -> None:
    """Server and worker stop between the last step of an epoch and its last batch, and continue."""
    state = "--state", str(tmp_path / "server")
    server = job(daemons, 1, *state)
    (script,) = scripts(daemons, server, 3, "carried", 1, STATE=str(tmp_path / "w"), SLOW="0.1")
    script.wait_for("batch 10")
    stop(server)
    poll(lambda: any((tmp_path / "w").rglob("worker-*3")), "a state of version 3")
    script.end()
    server = job(daemons, 1, *state)
    (script,) = scripts(daemons, server, 3, "carried", 1, STATE=str(tmp_path / "w"))
    found, (rates, parameters) = trained(script), accumulates.plain(epochs(), 3, "carried")
    assert found["rates"] == rates[3:]
    torch.testing.assert_close(
        torch.tensor(found["parameters"]), torch.tensor(parameters), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("mode", ["sync", "local:steps=4"])
def test_a_script_that_never_steps_ends_with_an_error_that_the_server_names(
    daemons: Daemons, mode: str
) -> None:
    server = job(daemons, 1, "--mode", mode)
    (script,) = scripts(daemons, server, 100, "carried")
    assert script.wait() == 1
    assert "ScriptError: epoch 1: this worker has computed 11 batches, as many as an epoch has" in script.log
    server.wait_for(r"rank 0 .*w0.*the script failed: ScriptError\('epoch 1: .* without optimizer.step\(\)")
    assert asked(server).version == 0
