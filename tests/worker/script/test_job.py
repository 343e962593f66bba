"""Loops of a script, against a connection that answers at once. Beside real servers:
tests/end_to_end/test_scripts.py."""

from __future__ import annotations

import dataclasses
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from looping import BATCH, DATA, EPOCHS, STEPS, Connect, Server, attached, part_of_an_epoch, take
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradwire
from gradwire import ScriptError
from gradwire.worker import metrics
from gradwire.worker.script import process


def test_each_epoch_comes_once_with_all_of_its_steps(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    seen: list[tuple[int, int]] = []
    for epoch in job.epochs():
        for step, (inputs,) in enumerate(job.batches(DATA)):
            take(model, optimizer, inputs)
            seen.append((epoch, step))
    assert seen == [(epoch, step) for epoch in range(EPOCHS) for step in range(STEPS)]
    assert job.done
    assert [commit.samples for commit, _ in server.pushed] == [BATCH] * (EPOCHS * STEPS)


def test_a_script_may_do_without_the_loop_over_epochs(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    epochs = 0
    while not job.done:
        epochs += 1
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
    assert (epochs, len(server.pushed)) == (EPOCHS, EPOCHS * STEPS)


def test_after_it_has_left_the_loops_end(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
            job.leave("enough")
    assert (len(server.pushed), server.ended) == (1, "enough")
    with pytest.raises(gradwire.ScriptError, match="this script has left the job"):
        optimizer.step()
    assert list(job.batches(DATA)) == list(job.epochs()) == []


def test_a_script_that_never_steps_leaves_before_it_hears_why(connect: Connect) -> None:
    server, job = connect()
    attached(job)
    one = TensorDataset(DATA.tensors[0][:BATCH])
    with pytest.raises(ScriptError, match=r"without optimizer\.step\(\)"):
        list(job.batches(one, num_workers=1))
    part_of_job = job._part  # pyright: ignore
    assert part_of_job not in process.joined.values()
    assert part_of_job.loading._loader is None  # pyright: ignore
    assert server.ended.startswith("the script failed: ScriptError(")
    assert server.failed


def test_a_worker_that_never_gets_the_jobs_parameters_says_so(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(begins=EPOCHS * STEPS - 1)
    ended = dataclasses.replace(server.assignment(), ranges=(), finished=True)

    def ready(*_: Any, **__: Any) -> None:
        server.messages = [*server.messages, ended]

    monkeypatch.setattr(server, "ready", ready)
    _, job = connect(server)
    attached(job)
    assert list(job.batches(DATA)) == []
    assert job.done
    assert "the model still has those of the script" in caplog.text


def test_what_is_logged_after_a_step_says_nothing_of_the_next_one(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server, job = connect()
    model, optimizer = attached(job)
    losses = iter([1.0, math.inf, 3.0, math.nan, 5.0, 6.0])
    for _ in job.epochs():
        for number, (inputs,) in enumerate(job.batches(DATA)):
            if number == 2:
                job.log(loss=7.0)
            take(model, optimizer, inputs)
            assert job.applied
            job.log(loss=next(losses))
    assert [commit.loss for commit, _ in server.pushed] == [None, None, 7, None, None, 7]
    assert sum("before optimizer.step()" in each for each in caplog.messages) == 1


def test_a_loss_that_is_not_finite_leaves_out_its_step(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    applied: list[bool] = []
    for _ in job.epochs():
        for number, (inputs,) in enumerate(job.batches(DATA)):
            job.log(loss=math.nan if number == 1 else 1.0)
            take(model, optimizer, inputs)
            applied.append(job.applied)
    assert applied == [True, False, True] * EPOCHS
    assert "version 1: the loss is nan; this step contributes nothing" in caplog.messages


def test_the_metrics_of_an_epoch_stay_what_they_were_when_they_are_asked_for_again(connect: Connect) -> None:
    server, job = connect()
    server.asks = True
    model, optimizer = attached(job)
    number = 0
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            number += 1
            job.log(number=number)
            take(model, optimizer, inputs)
            if number == STEPS + 1:  # the work was answered, and the stream broke
                server.messages = [server.told[STEPS], *server.messages]
    found = {report.epoch: report.metrics for report in server.reports}
    assert found[1] == {"number": 2.0}
    assert all(report.metrics == found[report.epoch] for report in server.reports)


def test_under_torchrun_the_server_is_where_its_master_is(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    assert connect()[0].address == "10.1.2.3:50051"
    monkeypatch.setenv("GC_SERVER", "10.1.2.4:99")
    assert connect()[0].address == "10.1.2.4:99"


def test_a_loader_is_begun_anew_within_an_epoch(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    epochs: list[int] = []
    loader = DataLoader(TensorDataset(DATA.tensors[0][: 2 * BATCH]), batch_size=BATCH)
    for epoch in job.epochs():
        epochs.append(epoch)
        for (inputs,) in job.steps(loader, per_epoch=STEPS):
            take(model, optimizer, inputs)
    assert epochs == [0, 1]
    assert len(server.pushed) == EPOCHS * STEPS


def test_a_loader_without_batches_is_refused(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    batches = iter(DataLoader(DATA, batch_size=BATCH))
    for _ in zip(job.epochs(), [0], strict=False):
        for (inputs,) in job.steps(batches, per_epoch=STEPS):
            take(model, optimizer, inputs)
    with pytest.raises(gradwire.ScriptError, match=r"run out of them.*not a generator"):
        next(iter(job.steps(batches, per_epoch=STEPS)))


@pytest.mark.parametrize(("replicas", "samples"), [(1, 3 * BATCH), (3, 3 * BATCH)])
def test_an_epoch_has_the_batches_of_all_replicas(connect: Connect, replicas: int, samples: int) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    sampler = DistributedSampler[Any](DATA, replicas, job.rank % replicas)
    for (inputs,) in job.steps(DataLoader(DATA, BATCH, sampler=sampler)):
        take(model, optimizer, inputs)
    assert server.manifest is not None
    assert server.manifest.train_samples == samples


def test_an_epoch_whose_loop_ends_early_comes_again_and_the_log_says_so(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    epochs: list[int] = []
    for epoch in job.epochs(EPOCHS):
        epochs.append(epoch)
        for inputs, _ in zip(job.batches(DATA), range(2), strict=False):
            take(model, optimizer, inputs[0])
    assert epochs == [0, 0, 1, 1]
    assert [record.message for record in caplog.records if "is repeated" in record.message] == [
        "epoch 1 is repeated: the script's loop over batches ended before all samples of the epoch were "
        "trained on. To end early, call job.stop()"
    ]


def test_an_evaluation_that_interrupts_an_epoch_is_no_warning(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server, job = connect()
    server.interrupts = 2
    model, optimizer = attached(job)
    seen: list[tuple[int, int, bool]] = []
    for epoch in job.epochs():
        before = job.version
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
        seen.append((epoch, job.version - before, job.evaluating))
    assert seen == [(0, 2, True), (0, 1, False), (1, 3, False)]
    assert "is repeated" not in caplog.text


def test_what_batches_returns_is_looped_over_in_each_epoch_and_is_no_iterator(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    batches: Any = job.batches(DATA)
    with pytest.raises(TypeError, match="not an iterator"):
        next(batches)
    taken = 0
    while not job.done:
        for (inputs,) in batches:
            take(model, optimizer, inputs)
            taken += 1
    assert taken == EPOCHS * STEPS


def test_batches_and_steps_have_the_attributes_of_a_data_loader(connect: Connect) -> None:
    _, job = connect()
    batches: Any = job.batches(DATA, num_workers=2)
    assert (len(batches.dataset), batches.batch_size, batches.num_workers) == (len(DATA), BATCH, 2)
    assert not batches.drop_last
    assert callable(batches.collate_fn)
    loader = DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 1, 0))
    steps: Any = job.steps(loader)
    assert (steps.dataset, steps.sampler) == (DATA, loader.sampler)
    with pytest.raises(AttributeError, match="nothing"):
        steps.nothing  # noqa: B018


def test_a_script_whose_file_has_all_epochs_of_the_job_is_told_so(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    attached(job)
    assert list(job.epochs(start=EPOCHS)) == []
    (record,) = [record for record in caplog.records if "--epochs" in record.message]
    assert record.levelno == logging.WARNING
    assert record.message.startswith(
        "job.epochs(start=2): the job has 2 epochs, and the script trains on none"
    )


def test_a_script_names_the_number_of_epochs_before_it_is_used(connect: Connect) -> None:
    server, job = connect(epochs=30)
    model, optimizer = attached(job)
    loop, batches = job.epochs(EPOCHS), job.batches(DATA)
    assert (job.total_epochs, job.total_steps) == (EPOCHS, EPOCHS * STEPS)
    parts: list[float] = []
    for _ in loop:
        for (inputs,) in batches:
            parts.append(job.progress)
            take(model, optimizer, inputs)
    assert parts == [step / (EPOCHS * STEPS) for step in range(EPOCHS * STEPS)]
    assert server.manifest is not None
    assert server.manifest.epochs == EPOCHS
    _, late = connect(epochs=30)
    attached(late)
    assert late.total_epochs == 30
    with pytest.raises(gradwire.ScriptError, match=r"job.epochs\(5\): job.total_epochs was read with 30"):
        late.epochs(5)


def test_a_job_that_is_not_as_far_as_the_script_is_refused(connect: Connect) -> None:
    _, job = connect()
    attached(job)
    job.epochs(start=1)
    with pytest.raises(
        gradwire.ScriptError, match=r"start=1\): the job is only in epoch 1, with the parameters"
    ):
        next(iter(job.batches(DATA)))


def test_the_script_knows_how_long_the_job_is(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    with pytest.raises(gradwire.ScriptError, match=r"total_steps: the number of samples .* call job.batches"):
        _ = job.total_steps
    batches = job.batches(DATA)
    assert (len(batches), job.total_steps, job.total_epochs) == (STEPS, EPOCHS * STEPS, EPOCHS)
    parts: list[float] = []
    for _ in job.epochs():
        for (inputs,) in batches:
            parts.append(job.progress)
            take(model, optimizer, inputs)
    assert parts == [step / (EPOCHS * STEPS) for step in range(EPOCHS * STEPS)]
    assert job.progress == 1.0


def test_the_last_number_of_steps_stays_while_the_server_gives_no_work(connect: Connect) -> None:
    """Another one than the estimate, because more workers have joined than --min-workers says."""
    server, job = connect()
    server.interrupts, server.total_steps = 2, 5
    model, optimizer = attached(job)
    found: list[int] = []
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
        found.append(job.total_steps)
    assert found == [5, 5, 5]


def test_a_schedule_of_another_length_than_the_job_is_named(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    schedule = job.follow(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9))
    job.follow(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS), each="epoch")
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
            schedule.step()
    (said,) = [record.message for record in caplog.records if "made for" in record.message]
    assert said.startswith(
        "CosineAnnealingLR is made for 9 steps, and the job takes 6: its rates do not reach"
    )


def test_the_first_batches_of_the_scripts_own_loader_are_reported(connect: Connect) -> None:
    def reported(*, seed: int) -> list[int]:
        server, job = connect()
        model, optimizer = attached(job)
        torch.manual_seed(seed)
        loader = DataLoader(DATA, BATCH, shuffle=True)
        for _ in job.epochs():
            for (inputs,) in job.steps(loader):
                take(model, optimizer, inputs)
        job.leave()
        return [commit.batch for commit, _ in server.pushed]

    first, alike, other = reported(seed=1), reported(seed=1), reported(seed=2)
    assert first == alike
    assert all(first)
    assert len({*first, *other}) == 2 * len(first)


def test_batches_of_the_server_are_not_reported(connect: Connect) -> None:
    server, job = connect()
    part_of_an_epoch(job, lambda: None)
    assert not any(commit.batch for commit, _ in server.pushed)


def test_computing_is_the_time_between_a_batch_and_the_next_without_loading(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    server, job = connect()
    model, optimizer = attached(job)

    def collate(samples: list[Any]) -> torch.Tensor:
        clock.now += 100.0
        return torch.stack([inputs for (inputs,) in samples])

    def step(inputs: torch.Tensor) -> None:
        clock.now += 1.0
        take(model, optimizer, inputs)

    older = [iter(job.batches(DATA, collate_fn=collate))]
    step(next(older[0]))
    for number, inputs in enumerate(job.batches(DATA, collate_fn=collate)):
        if number:
            older.clear()  # closes a loop that has begun before this one
        step(inputs)
    assert job.metrics["computing_seconds"] == STEPS - 1, "the older loop, which never asked again, has none"
    for inputs in job.steps(DataLoader(DATA, BATCH, collate_fn=collate)):
        step(inputs)
    assert (len(server.pushed), job.metrics["computing_seconds"]) == (2 * STEPS, 2 * STEPS - 1)
