"""The parameter groups that a task names, and the optimizer of workers that take the job's steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ...optim.optimizer import Optimizer, OptimizerGroup, parse_optimizer
from ...optim.steps import Muon
from ...proto.manifest import optimizer_groups
from ...settings import JobTerms
from ..session.groups import ONE_GROUP, ParameterGroups, parameter_groups
from ..session.replica import Replica
from .computation import guarded
from .task import Task, TaskError


def task_groups(task: Task, model: nn.Module, job: JobTerms) -> ParameterGroups:
    """Return the parameter groups that a task gives for its model; `ONE_GROUP` if it gives none.

    With Muon they are divided further, into matrices and other parameters, and the log says how.

    Raises:
        TaskError: the groups are not valid.
        TaskFailedError: the task raised an exception.
    """
    groups, options = task.groups, parse_optimizer(job.optimizer)
    if groups is None and not isinstance(options, Muon):
        return ONE_GROUP
    given: list[Mapping[str, Any]] = []
    if groups is not None:
        given = guarded(f"task {task.name!r}: groups", lambda: [*groups(model)])
    try:
        return parameter_groups(model, given, options)
    except ValueError as error:
        raise TaskError(f"task {task.name!r}: groups: {error}") from None


def workers_optimizer(replica: Replica, job: JobTerms) -> Optimizer:
    """Return the job's optimizer for modes in which workers take its steps.

    Its `follow` takes the learning rate of each assignment. A group with a rate of its own multiplies that by
    the ratio of its rate to the job's.

    Raises:
        TaskError: a group has a rate of its own and the job's learning rate is 0.
    """
    base = job.learning_rate
    groups: list[OptimizerGroup] = []
    of_job = OptimizerGroup(options=parse_optimizer(job.optimizer), learning_rate=base)
    for number, group in enumerate(optimizer_groups(replica.groups, of_job)):
        if group.learning_rate != base and not base:
            raise TaskError(
                f"parameter group {number}: lr: expected none with --learning-rate 0 and --mode {job.mode}, "
                f"got {group.learning_rate:g}; set --learning-rate above 0"
            )
        share = group.learning_rate / base if group.learning_rate != base else 1.0
        groups.append(replace(group, learning_rate=share))
    return Optimizer.of_groups(groups, replica.parameters, replica.group_of)
