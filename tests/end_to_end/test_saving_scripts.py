"""Scripts that write files of their own: these have what torch's own optimizer would remember, and a new job
continues from them to the bit. Also what scripts are told of the lengths of epochs, and of ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import TASKS, Daemon, Daemons, Server
from test_scripts import BATCH, EPOCHS, SEED, job
from torch import nn
from torch.nn.functional import mse_loss

from gradwire.worker.training.sharding import epoch_order

sys.path.append(str(TASKS))
import script_loops as loops


def scripts(
    daemons: Daemons, server: Server, loop: str, count: int, saves: Path, until: int = -1
) -> list[Daemon]:
    environ = {"SAVES": str(saves), "UNTIL": str(until), "WORKERS": str(count)}
    program = ("script_loops", loop, server.address, "--compressor", "none")
    return daemons.programs(*program, count=count, environ=environ)


def plain(loop: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same in plain torch, alone."""
    model: nn.Module = loops.network()
    optimizer = loops.LOOPS[loop][1](model)
    inputs, targets = loops.data().tensors
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(inputs) // BATCH)
    for epoch in range(EPOCHS):
        order = epoch_order(SEED, epoch, len(inputs))
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            optimizer.zero_grad()
            mse_loss(model(inputs[indices]), targets[indices]).backward()
            optimizer.step()
            schedule.step()
    return model, optimizer


@pytest.mark.parametrize("loop", ["saved", "saved_adam", "saved_adamw", "saved_adagrad"])
def test_the_state_of_the_optimizer_is_that_of_torch_alone(
    daemons: Daemons, tmp_path: Path, loop: str
) -> None:
    (script,) = scripts(daemons, job(daemons, 1), loop, 1, tmp_path / "file.pt")
    assert script.wait() == 0, script.log
    model, optimizer = plain(loop)
    found: dict[str, Any] = torch.load(tmp_path / "file.pt")
    expected = optimizer.state_dict()
    assert found["optimizer"]["param_groups"] == expected["param_groups"]
    assert found["optimizer"]["state"].keys() == expected["state"].keys()
    for place, remembered in expected["state"].items():
        assert found["optimizer"]["state"][place].keys() == remembered.keys()
        for name, value in remembered.items():
            torch.testing.assert_close(
                found["optimizer"]["state"][place][name], value, rtol=1e-4, atol=1e-6, msg=f"{place} {name}"
            )
    # Torch's own optimizer goes on from it.
    optimizer.load_state_dict(found["optimizer"])
    mse_loss(model(loops.data().tensors[0]), loops.data().tensors[1]).backward()
    optimizer.step()


def test_a_new_job_continues_from_a_scripts_file_to_the_bit(daemons: Daemons, tmp_path: Path) -> None:
    """With a schedule by steps and SGD; the full example has one by progress, and AdamW."""
    parameters, workers = dict[str, Any](), list[Daemon]()
    for name, stops in (("never", (-1,)), ("once", (1, -1))):
        for until in stops:
            workers = scripts(daemons, job(daemons, 2), "saved", 2, tmp_path / name, until)
            assert [worker.wait() for worker in workers] == [0, 0], workers[0].log
            last = EPOCHS - 1 if until < 0 else 0
            told = [worker.fields(f"epoch {last}, 12 steps") for worker in workers]
            assert told[0]["sums"] == told[1]["sums"]
        parameters[name] = [worker.fields("^trained$")["parameters"] for worker in workers]
    assert parameters["once"] == parameters["never"]
    never, once = (torch.load(tmp_path / name) for name in ("never", "once"))
    for place, remembered in never["optimizer"]["state"].items():
        for name, value in remembered.items():
            assert torch.equal(once["optimizer"]["state"][place][name], value)
    assert once["schedule"] == never["schedule"]
