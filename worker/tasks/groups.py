"""The parameter groups that a task names, and how a worker that takes the job's steps itself steps them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...optim.optimizer import Optimizer, OptimizerGroup, parse_optimizer
from ...settings import JobTerms
from ..session.groups import ONE_GROUP, ParameterGroups, parameter_groups
from ..session.replica import Replica
from .computation import guarded
from .task import Task, TaskError


def task_groups(task: Task, model: nn.Module, job: JobTerms) -> ParameterGroups:
    """Raises TaskError for groups that there cannot be, TaskFailedError if the task raises."""
    groups = task.groups
    if groups is None:
        return ONE_GROUP
    given = guarded(f"task {task.name!r}: groups", lambda: [*groups(model)])
    try:
        return parameter_groups(model, given, parse_optimizer(job.optimizer))
    except ValueError as error:
        raise TaskError(f"task {task.name!r}: groups: {error}") from None


def workers_optimizer(replica: Replica, job: JobTerms) -> Optimizer:
    """The job's optimizer where workers take its steps: `follow` the learning rate of an assignment, of which
    groups with a rate of their own take as many times as theirs is of the job's.

    Raises TaskError for such groups in a job whose learning rate is 0.
    """
    manifest, base = replica.manifest, job.learning_rate
    groups: list[OptimizerGroup] = []
    of_job = OptimizerGroup(options=parse_optimizer(job.optimizer), learning_rate=base)
    for number, group in enumerate(manifest.optimizer_groups(of_job)):
        if group.learning_rate != base and not base:
            raise TaskError(
                f"parameter group {number}: lr: expected none with --learning-rate 0 and --mode {job.mode}, "
                f"got {group.learning_rate:g}; give the job a learning rate"
            )
        share = group.learning_rate / base if group.learning_rate != base else 1.0
        groups.append(replace(group, learning_rate=share))
    return Optimizer.of_groups(groups, replica.parameters, manifest.group_of[: len(replica.parameters)])
