"""The parameter groups of a task, and how workers step them where they take the steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.optim import muon
from gradwire.settings import JobTerms
from gradwire.worker.session.groups import ONE_GROUP
from gradwire.worker.session.replica import Replica
from gradwire.worker.tasks import Task, TaskError
from gradwire.worker.tasks.computation import TaskFailedError
from gradwire.worker.tasks.groups import task_groups, workers_optimizer

JOB = JobTerms(id="j", work="local", optimizer="sgd:momentum=0.9,weight_decay=0.1", learning_rate=0.1)


def task(groups: Any) -> Task:
    def nothing(*arguments: Any) -> Any:
        raise AssertionError("nobody asks for this")

    return Task(
        name="t",
        train_samples=64,
        model=lambda: nn.Linear(6, 5),
        batch=nothing,
        loss=nothing,
        evaluate=nothing,
        groups=groups,
    )


def biases(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [each for each in model.parameters() if each.dim() == 1], "weight_decay": 0.0, "lr": 0.3}
    ]


def none(model: nn.Module) -> list[dict[str, Any]]:
    return []


def misspelt(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), "momentun": 0.9}]


def failing(model: nn.Module) -> list[dict[str, Any]]:
    raise OSError("not here")


def test_a_task_need_not_have_groups() -> None:
    assert task_groups(task(None), nn.Linear(6, 5), JOB) is ONE_GROUP
    assert task_groups(task(none), nn.Linear(6, 5), JOB) == ONE_GROUP


def test_steps_that_workers_take_are_torchs() -> None:
    """At the rates that assignments name, of which a group's own is as many times as it is of the job's."""
    torch.manual_seed(1)
    model, plain = nn.Linear(6, 5), nn.Linear(6, 5)
    plain.load_state_dict(model.state_dict())
    replica = Replica(model, 64, task_groups(task(biases), model, JOB))
    ours = workers_optimizer(replica, JOB)
    groups: list[dict[str, Any]] = [{"params": plain.weight}, {"params": plain.bias, "weight_decay": 0.0}]
    reference = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
    for rate in (0.1, 0.1, 0.05, 0.0, 0.2):
        ours.follow(rate)
        reference.param_groups[0]["lr"], reference.param_groups[1]["lr"] = rate, 0.3 / 0.1 * rate
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            one.grad = torch.ones_like(one)
            other.grad = torch.ones_like(other)
        ours.step()
        reference.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_rate_that_is_a_part_of_nothing_is_refused() -> None:
    model, still = nn.Linear(6, 5), dataclasses.replace(JOB, learning_rate=0.0)
    replica = Replica(model, 64, task_groups(task(biases), model, still))
    with pytest.raises(TaskError, match="parameter group 0: lr: expected none with --learning-rate 0"):
        workers_optimizer(replica, still)


def test_groups_that_cannot_be_are_refused_by_name_of_the_task() -> None:
    with pytest.raises(TaskError, match="task 't': groups: parameter group 0: unknown option 'momentun'"):
        task_groups(task(misspelt), nn.Linear(6, 5), JOB)
    with pytest.raises(TaskFailedError, match="task 't': groups"):
        task_groups(task(failing), nn.Linear(6, 5), JOB)
    with pytest.raises(TaskError, match="task 't': groups: expected a function, got a list"):
        task([{"params": []}])


MUON = dataclasses.replace(JOB, optimizer="muon:weight_decay=0.2")


def three_layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))


def split_first(model: nn.Module) -> list[dict[str, Any]]:
    layers: Any = model
    return [{"params": layers[0].weight, "split": 5}]


@pytest.mark.parametrize("groups", [None, split_first])
def test_muon_needs_no_groups_and_the_server_hears_of_none(
    groups: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = three_layers(), three_layers()
    with caplog.at_level("INFO"):
        found = task_groups(task(groups), model, MUON)
    (line,) = caplog.messages
    assert line.startswith(
        "optimizer muon: Muon steps 2 parameters of 50 elements (*.weight); AdamW steps 4 "
    )
    replica = Replica(model, 64, found)
    assert replica.manifest.groups == ()
    assert set(replica.manifest.group_of) == {0}
    assert len(replica.manifest.plan().parts) == len(Replica(three_layers(), 64).manifest.plan().parts)
    ours = workers_optimizer(replica, MUON)
    given: list[dict[str, Any]] = [] if groups is None else groups(plain)
    reference = muon(plain, 0.1, given, weight_decay=0.2)
    for rate in (0.1, 0.05, 0.2):
        ours.follow(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        ours.step()
        reference.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_groups_declare_for_muon_means_nothing_without_it() -> None:
    assert task_groups(task(split_first), three_layers(), JOB) == ONE_GROUP
