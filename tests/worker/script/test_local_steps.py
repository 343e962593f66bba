"""Scripts whose optimizer steps are local steps of rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from looping import BATCH, DATA, EPOCHS, STEPS, Connect, Server, network, take
from torch.optim.lr_scheduler import LambdaLR

import gradwire
from gradwire.compressors import decode
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.settings import JobTerms
from gradwire.worker.script.schedules import Each

EACH = 2  # local steps of a round
WORK = "local:correction=0.0,delayed=off"
Make = Callable[[torch.optim.Optimizer, gradwire.Job], LambdaLR]
OF_JOB = EPOCHS * STEPS * EACH


class LocalServer(Server):
    """Gives out rounds of two local steps."""

    def __init__(self, *, begins: int = 0) -> None:
        super().__init__(begins=begins)
        terms = JobTerms(
            id="j", work=WORK, mode="local", script=True, batch_size=BATCH // EACH, epochs=EPOCHS
        )
        self.job, self.total_steps = job_message(terms), OF_JOB

    def assignment(self) -> m.Assignment:
        found = super().assignment()
        return dataclasses.replace(found, local_steps=EACH * found.version)


def trained(connect: Connect, begins: int, make: Make, each: Each, optimizer: Any = None) -> list[Any]:
    """The rate of each step, and the job's progress then."""
    server, job = connect(LocalServer(begins=begins))
    model = network()
    model, step = job.attach(model, optimizer or torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = job.follow(make(step, job), each=each)
    found: list[Any] = []
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            found.append((scheduler.get_last_lr()[0], job.progress))
            take(model, step, inputs)
            if each == "step":
                scheduler.step()
    assert [commit.samples for commit, _ in server.pushed] == [BATCH] * (EPOCHS * STEPS - begins)
    return found


@pytest.mark.parametrize("begins", [0, 2])
def test_a_scheduler_of_steps_counts_local_steps_also_of_rounds_before_a_worker_joined(
    connect: Connect, begins: int
) -> None:
    found = trained(connect, begins, lambda step, _: LambdaLR(step, lambda number: 1 / (1 + number)), "step")
    assert [rate for rate, _ in found] == [1 / (1 + number) for number in range(EACH * begins, OF_JOB)]


def test_progress_moves_with_each_local_step(connect: Connect) -> None:
    found = trained(connect, 0, lambda step, job: LambdaLR(step, lambda _: 1 - job.progress), "progress")
    assert [part for _, part in found] == pytest.approx([number / OF_JOB for number in range(OF_JOB)])
    assert [rate for rate, _ in found] == pytest.approx([1 - number / OF_JOB for number in range(OF_JOB)])


def test_muon_takes_the_steps_of_a_round(connect: Connect) -> None:
    """Here the pushed change is that of the helper's optimizer without any job."""
    server, job = connect(LocalServer())
    model, plain = network(), network()
    model, step = job.attach(model, gradwire.optim.muon(model, 0.1))
    alone = gradwire.optim.muon(plain, 0.1)
    before = [each.detach().clone() for each in plain.parameters()]
    batches = job.batches(DATA)
    for number, (inputs,) in enumerate(batches):
        take(model, step, inputs)
        if number < EACH:
            take(plain, alone, inputs)
    pushed = [np.asarray(decode(each)) for each in server.pushed[0][1]]
    for began, ended, change in zip(before, plain.parameters(), pushed, strict=True):
        expected = (began - ended.detach()).numpy().reshape(-1)
        np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-7)


def test_muon_where_the_server_steps_is_refused_with_a_remedy(connect: Connect) -> None:
    _, job = connect()
    model = network()
    with pytest.raises(gradwire.ScriptError, match=r"MuonWithAdamW: the server steps .* steps='local'"):
        job.attach(model, gradwire.optim.muon(model, 0.1))
