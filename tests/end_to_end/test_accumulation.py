"""Scripts that accumulate gradients, beside the same loops in plain torch: versions, rates and local steps
count optimizer steps, not batches."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from daemons import TASKS, Daemon, Daemons, Server
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
    return [
        daemons.program(
            *("script_accumulates", f"{take} {kind}", server.address, "--worker-id", f"w{number}"),
            *("--compressor", "none"),
            environ=environ,
        )
        for number in range(count)
    ]


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


@pytest.mark.parametrize("kind", ["last", "carried"])
@pytest.mark.parametrize(
    ("take", "mode", "environ"),
    [
        (1, "sync", {}),
        (2, "sync", {}),
        (3, "sync", {"NO_SYNC": "1"}),
        (3, "async", {}),
        (2, "local:steps=4,correction=0", {}),
        (3, "local:steps=4,correction=0", {}),
    ],
)
def test_one_worker_trains_as_plain_torch(
    daemons: Daemons, take: int, mode: str, environ: dict[str, str], kind: str
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
