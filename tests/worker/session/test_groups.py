"""Parameter groups, from mappings as torch's optimizers take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradwire.optim.optimizer import parse_optimizer
from gradwire.proto.messages import Group
from gradwire.worker.session.groups import parameter_groups
from gradwire.worker.session.replica import Replica

ADAMW = parse_optimizer("adamw:weight_decay=0.1")
AS_THE_JOB = Group(optimizer="adamw:beta1=0.9,beta2=0.999,eps=1e-08,weight_decay=0.1")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def test_parameters_in_no_group_are_as_the_job_says() -> None:
    made = model()
    plain = [each for each in made.parameters() if each.dim() < 2]
    found = parameter_groups(made, [{"params": plain, "weight_decay": 0}], ADAMW)
    without = Group(optimizer=AS_THE_JOB.optimizer.replace("weight_decay=0.1", "weight_decay=0.0"))
    assert found.groups == (without, AS_THE_JOB)
    replica = Replica(made, 10, found)
    assert replica.manifest.groups == found.groups
    assert {tensor.name: tensor.group for tensor in replica.manifest.tensors} == {
        **{"0.weight": 1, "0.bias": 0, "1.weight": 0, "1.bias": 0, "2.weight": 1, "2.bias": 0}
    }


def test_groups_are_those_that_torch_takes_in_their_order() -> None:
    made = model()
    first, second = [*made[0].parameters()], made[2].weight
    made[1].requires_grad_(False)
    made[2].bias.requires_grad_(False)
    given: list[dict[str, Any]] = [
        {"params": (each for each in first), "lr": 0.5, "betas": (0.8, 0.9)},
        {"params": second},
    ]
    found = parameter_groups(made, given, ADAMW)
    other = "adamw:beta1=0.8,beta2=0.9,eps=1e-08,weight_decay=0.1"
    assert found.groups == (Group(optimizer=other, learning_rate=0.5), AS_THE_JOB)
    assert found.number_of == {"0.weight": 0, "0.bias": 0, "2.weight": 1}
    assert parameter_groups(made, [], ADAMW).groups == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": -1.0}, "parameter group 1: lr: expected a finite number of at least 0, got -1"),
        ({"lr": "fast"}, "parameter group 1: lr: expected a number, got 'fast'"),
        ({"decay": 0.1}, "parameter group 1: unknown option 'decay'"),
        ({"params": [torch.zeros(2)]}, r"parameters of the model, got a foreign one, of shape \(2,\)"),
        ({"params": ["0.bias"]}, "parameters of the model, got a str"),
        ({"params": 3}, "parameter group 1: 'int' object is not iterable"),
        ({"params": "taken"}, "parameter group 1: params: '0.weight' is in group 0 already"),
    ],
)
def test_groups_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    made = model()
    if change.get("params") == "taken":
        change = {"params": made[0].weight}
    with pytest.raises(ValueError, match=words):
        parameter_groups(made, [{"params": made[0].weight}, {"params": made[0].bias, **change}], ADAMW)
