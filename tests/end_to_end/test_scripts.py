"""Scripts of users, as processes of their own, beside the same loops in plain torch."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from daemons import TASKS, Daemon, Daemons, Server
from test_training import finished
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from gradwire.worker.training.sharding import epoch_order

sys.path.append(str(TASKS))
import script_loops as loops

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS, BATCH, SEED = 2, 8, 3


def job(daemons: Daemons, workers: int, *more: str) -> Server:
    return daemons.server(
        *("--script", "--min-workers", str(workers), "--epochs", str(EPOCHS), "--batch-size", str(BATCH)),
        *("--seed", str(SEED), "--fusion", "none", "--downlink", "none", *more),  # a part for each tensor
    )


def scripts(daemons: Daemons, server: Server, loop: str, count: int, *more: str) -> list[Daemon]:
    program = ("script_loops", loop, server.address, "--compressor", "none")
    return daemons.programs(*program, *more, count=count)


def parameters(scripts: list[Daemon]) -> torch.Tensor:
    """Return the parameters that all scripts have at the end."""
    assert [script.wait() for script in scripts] == [0] * len(scripts)
    first, *others = [script.fields("^trained$")["parameters"] for script in scripts]
    assert all(other == first for other in others)
    return torch.tensor(first)


def plain(
    workers: int,
    optimizer_of: str = "sgd",
    *,
    scheduled: bool = False,
    clip_norm: float = 0.0,
    without: int = 0,
) -> torch.Tensor:
    """The same without Gradwire, at the batch of all workers together. without: a step that is not taken."""
    model = loops.MODELS.get(optimizer_of, loops.network)()
    optimizer = getattr(loops, optimizer_of)(model)
    schedule = loops.warm_up(optimizer) if scheduled or optimizer_of == "adamw" else None
    inputs, targets = loops.data().tensors
    steps = 0
    for epoch in range(EPOCHS):
        order = epoch_order(SEED, epoch, len(inputs))
        for start in range(0, len(order), BATCH * workers):
            indices = order[start : start + BATCH * workers]
            optimizer.zero_grad()
            mse_loss(model(inputs[indices]), targets[indices]).backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            steps += 1
            if steps != without:
                optimizer.step()
            if schedule is not None:
                schedule.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def plain_local(workers: int, steps: int, correction: float, optimizer_of: str) -> torch.Tensor:
    """Rounds of local steps of so many workers, whose changes are averaged."""
    models = [loops.network() for _ in range(workers)]
    optimizers = [loops.LOOPS[optimizer_of][1](model) for model in models]
    inputs, targets = loops.data().tensors
    at = [parameter.detach().clone() for parameter in models[0].parameters()]
    for epoch in range(EPOCHS):
        order = epoch_order(SEED, epoch, len(inputs))
        for start in range(0, len(order), steps * BATCH * workers):
            for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                for step in range(steps):
                    first = start + (place * steps + step) * BATCH
                    indices = order[first : first + BATCH]
                    optimizer.zero_grad()
                    mse_loss(model(inputs[indices]), targets[indices]).backward()
                    pairs = [*zip(model.parameters(), at, strict=True)]
                    pulls = [(p.detach() - began) * (correction if step else 0.0) for p, began in pairs]
                    optimizer.step()
                    with torch.no_grad():
                        for parameter, pull in zip(model.parameters(), pulls, strict=True):
                            parameter.sub_(pull)
            together = zip(*(model.parameters() for model in models), strict=True)
            at = [torch.stack([each.detach() for each in of_one]).mean(0) for of_one in together]
            with torch.no_grad():
                for model in models:
                    for parameter, mean in zip(model.parameters(), at, strict=True):
                        parameter.copy_(mean)
    return torch.cat([value.reshape(-1) for value in at])


@pytest.mark.parametrize(
    ("loop", "mode", "steps", "correction"),
    [
        ("trained", "local:steps=2,correction=0.1", 2, 0.1),
        *(("steps_here", "sync", 1, 0.0), ("rmsprop", "sync", 1, 0.0)),
    ],
)
def test_local_steps_are_those_of_the_scripts_own_optimizers(
    daemons: Daemons, loop: str, mode: str, steps: int, correction: float
) -> None:
    server = job(daemons, 2, "--mode", mode)
    found = parameters(scripts(daemons, server, loop, 2))
    expected = plain_local(2, steps, correction, loop)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert finished(server).version == EPOCHS * 96 // (2 * steps * BATCH)


@pytest.mark.parametrize("loop", ["groups", "accumulated", "scaled", "twice"])
def test_local_steps_of_one_worker_are_those_of_the_plain_script(daemons: Daemons, loop: str) -> None:
    found = parameters(scripts(daemons, job(daemons, 1, "--mode", "local:steps=5,correction=0"), loop, 1))
    expected = plain(1, "adamw" if loop == "groups" else "sgd", without=3 if loop == "scaled" else 0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_round_is_over_with_its_last_optimizer_step(daemons: Daemons) -> None:
    """One batch has none, so its round gets another batch."""
    server = job(daemons, 1, "--mode", "local:steps=4", "--epochs", "1")
    (script,) = scripts(daemons, server, "rounds", 1)
    assert script.wait() == 0
    versions = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]
    assert [each for each in script.messages if "samples" in each] == [
        f"{BATCH} samples, version {version}, applied" for version in versions
    ]


def test_an_optimizer_that_computes_gradients_by_itself_steps_here(daemons: Daemons) -> None:
    (script,) = scripts(daemons, job(daemons, 1), "closures", 1)
    parameters([script])
    found = [float(line.removeprefix("loss ")) for line in script.messages if line.startswith("loss ")]
    assert len(found) == EPOCHS * 96 // BATCH
    assert found[-1] < 0.2 * found[0]


def test_no_gradient_leaves_early_if_the_script_says_so(daemons: Daemons) -> None:
    (script,) = scripts(daemons, job(daemons, 1), "at_the_step", 1)
    torch.testing.assert_close(parameters([script]), plain(1), rtol=1e-4, atol=1e-5)
    assert "from now on gradients leave" not in script.log


@pytest.mark.parametrize(
    ("loop", "optimizer", "late"),
    [
        *(("trained", "sgd", ""), ("groups", "adamw", ""), ("accumulated", "sgd", "")),
        ("twice", "sgd", "a gradient arrived twice in one step"),
        ("doubled", "sgd", "changes gradients between backward() and step() ("),
        *(("adagrad", "adagrad", ""), ("swapped", "sgd", ""), ("many_groups", "many_groups", "")),
    ],
)
def test_a_script_trains_as_it_would_alone_at_the_batch_of_all(
    daemons: Daemons, loop: str, optimizer: str, late: str
) -> None:
    """Parts leave during backward, until the script changes gradients (`late`)."""
    count = 1 if loop == "many_groups" else 2
    server = job(daemons, count)
    workers = scripts(daemons, server, loop, count)
    torch.testing.assert_close(parameters(workers), plain(count, optimizer), rtol=1e-4, atol=1e-5)
    assert finished(server).version == EPOCHS * 96 // (count * BATCH)
    for worker in workers:
        said = [each for each in worker.messages if "from now on gradients leave after the backward" in each]
        assert len(said) == bool(late)
        assert all(late in each for each in said)


@pytest.mark.parametrize("mode", ["sync", "local:steps=2"])
def test_torchs_defaults_do_not_affect_the_bits(daemons: Daemons, mode: str) -> None:
    loops = ("adamw", "other_defaults")
    servers = [job(daemons, 1, "--mode", mode, "--downlink", "1bit") for _ in loops]
    found = [
        scripts(daemons, server, loop, 1, "--compressor", "dgc:ratio=10,momentum=0.5")
        for server, loop in zip(servers, loops, strict=True)
    ]
    assert torch.equal(*map(parameters, found))


def test_rates_that_are_set_just_before_the_step_are_those_of_the_step(daemons: Daemons) -> None:
    workers = scripts(daemons, job(daemons, 2), "rated_late", 2)
    torch.testing.assert_close(parameters(workers), plain(2, scheduled=True), rtol=1e-4, atol=1e-5)
    assert all("changes learning rates between the forward pass" in worker.log for worker in workers)


def test_rates_by_version_are_everybodys_also_where_a_worker_misses_rounds(daemons: Daemons) -> None:
    workers = scripts(daemons, job(daemons, 3, "--mode", "sync:backup=1"), "rated_by_version", 3)
    assert [worker.wait() for worker in workers] == [0, 0, 0]


def test_a_scaler_trains_as_alone(daemons: Daemons) -> None:
    found = parameters(scripts(daemons, job(daemons, 1), "scaled", 1))
    torch.testing.assert_close(found, plain(1, without=3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["sync", "local:steps=5,correction=0"])
def test_losses_are_those_of_the_plain_script_step_by_step(daemons: Daemons, mode: str) -> None:
    (script,) = scripts(daemons, job(daemons, 1, "--mode", mode), "own_loader", 1)
    parameters([script])
    found = [float(line.removeprefix("loss ")) for line in script.messages if line.startswith("loss ")]
    model: nn.Module = loops.network()
    optimizer, expected = loops.sgd(model), list[float]()
    batches = loops.loader(0)  # a fork of this process, which has threads, may hang
    for _ in range(EPOCHS):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_mean_gradient_is_clipped_as_alone(daemons: Daemons) -> None:
    server = job(daemons, 2)
    found = parameters(scripts(daemons, server, "clipped", 2))
    torch.testing.assert_close(found, plain(2, clip_norm=0.5), rtol=1e-4, atol=1e-5)
    server.wait_for("the scripts have the mean gradient clipped to a norm of 0.5")


@pytest.mark.parametrize("mode", ["sync", "stale:bound=2", "async", "local:steps=2"])
def test_a_step_that_overflows_is_left_out_and_nobody_waits(daemons: Daemons, mode: str) -> None:
    server = job(daemons, 2, "--mode", mode)
    workers = scripts(daemons, server, "scaled", 2)
    assert [worker.wait() for worker in workers] == [0, 0]
    for worker in workers:
        worker.wait_for("step 3: not applied")
        worker.wait_for("step 2: applied")
    status = finished(server)
    assert status.refused_pushes == 0


def test_a_worker_that_is_killed_and_started_again_goes_on_in_the_schedule(daemons: Daemons) -> None:
    server = job(daemons, 2, "--epochs", str(loops.LONG), "--lease-seconds", "60")  # the other one waits
    staying, dying = scripts(daemons, server, "cosine", 2)
    dying.wait_for("version 5, rate ")
    dying.signal(signal.SIGKILL)
    again = daemons.program(
        *("script_loops", "cosine", server.address, "--worker-id", "w1", "--compressor", "none")
    )
    assert int(again.wait_for(r"comes at version (\d+)").group(1)) >= 5
    parameters([staying, again])
    assert {each for each in again.messages if ", rate " in each} < set(staying.messages)
    assert finished(server).refused_pushes == 0


def test_what_a_script_logs_is_the_jobs(daemons: Daemons) -> None:
    server = job(daemons, 2)
    workers = scripts(daemons, server, "logged", 2)
    assert [worker.wait() for worker in workers] == [0, 0]
    status = finished(server)
    assert [each.epoch for each in status.evaluations] == [1, 2]
    for each in status.evaluations:
        assert set(each.metrics) == {"loss", "batch", "error", "epoch"}
        assert (each.metrics["batch"], each.metrics["epoch"]) == (BATCH, each.epoch - 1)


def test_scripts_and_tasks_do_not_mix(daemons: Daemons) -> None:
    worker = daemons.worker(job(daemons, 1).address)
    assert worker.wait() == 2
    worker.wait_for("its workers are scripts.*gradwire.connect")
    server = daemons.server("--task", "small_tasks:regression", "--epochs", "1")
    script = daemons.program("script_loops", "trained", server.address)
    assert script.wait() == 1
    script.wait_for("the server trains the task 'small_tasks:regression'.*gc-server --script")


class InTheJobsOrder(DataLoader[Any]):
    """Batches of the samples as the server gives them out, epoch by epoch."""

    _epochs = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        size, dataset = self.batch_size or 1, cast(TensorDataset, self.dataset)
        order = epoch_order(SEED, self._epochs, len(dataset)).tolist()
        self._epochs += 1
        for start in range(0, len(order), size):
            yield dataset[order[start : start + size]]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """Arguments of the example for four batches of 32 in each epoch, and the losses of the plain one."""
    text = tmp_path_factory.mktemp("example") / "text.txt"
    text.write_text("".join(f"{number} all work and no play. " for number in range(400))[: 65 + 134 * 64])
    arguments, said = f"--data {text} --steps 8 --every 1", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(torch.utils.data, "DataLoader", InTheJobsOrder)
        patch.setattr(sys, "argv", ["plain_gpt.py", *arguments.split(), "--batch-size", "32"])
        runpy.run_path(str(EXAMPLES / "plain_gpt.py"), run_name="__main__")
    return arguments, losses(said.getvalue())


def losses(said: str) -> list[float]:
    """Return the losses of the training, by step."""
    return [float(found) for found in re.findall(r"^step \d+: loss ([\d.]+)", said, re.MULTILINE)]


@pytest.mark.parametrize("workers", [1, 4])
def test_the_example_has_the_losses_of_the_plain_one_at_the_batch_of_all(
    daemons: Daemons, example: tuple[str, list[float]], workers: int
) -> None:
    arguments, expected = example
    server = daemons.server(
        *("--script", "--min-workers", str(workers), "--batch-size", str(32 // workers), "--epochs", "2"),
        *("--seed", str(SEED), "--downlink", "none"),
    )
    program = ("script_example", arguments, server.address, "--compressor", "none")
    scripts = daemons.programs(*program, count=workers)
    assert [script.wait() for script in scripts] == [0] * workers
    found = [losses(script.log) for script in scripts]
    means = [sum(each) / workers for each in zip(*found, strict=True)]
    assert len(means) == 8
    assert means == pytest.approx(expected, rel=1e-4)
    server.wait_for("left: done")
