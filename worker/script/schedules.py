"""Schedulers of a script that follow the job, so that a worker may join late or return."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from .terms import ScriptError

Each = Literal["step", "epoch", "progress"]
log = logging.getLogger("gradwire.worker")
CLOSE = 0.02  # largest difference between a schedule and a job without a warning, as a fraction of its steps


class Schedules:
    """The schedulers that a script has passed to `Job.follow`."""

    def __init__(self) -> None:
        self._each: list[tuple[LRScheduler, Each]] = []
        self._plateaus: list[tuple[ReduceLROnPlateau, str]] = []  # each with the name of its metric
        self._warned: set[int] = set()  # indices of schedulers of whose wrong length the log has warned

    def follow(self, scheduler: object, each: Each, metric: str = "loss") -> None:
        """Add a scheduler, as `Job.follow` says.

        Raises:
            ScriptError: the scheduler does not count its steps, or depends on something else.
        """
        if each not in ("step", "epoch", "progress"):
            raise ScriptError(f"job.follow(each={each!r}): expected 'step', 'epoch' or 'progress'")
        name = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau):
            self._plateaus.append((scheduler, metric))
            return
        if not isinstance(scheduler, LRScheduler):
            raise ScriptError(
                f"job.follow: expected a scheduler of torch.optim.lr_scheduler, got a {name}; advance it to "
                "step job.version yourself before the first batch"
            )
        if each == "progress" and not isinstance(scheduler, LambdaLR):
            raise ScriptError(
                f"job.follow(each='progress'): {name} depends on its own count; pass a LambdaLR whose "
                "function reads job.progress"
            )
        if steps_taken(scheduler) is None:
            raise ScriptError(
                f"job.follow: {name} depends on the script's measurements, which a worker that joins late "
                "has not seen; choose a schedule of steps"
            )
        self._each.append((scheduler, each))

    @property
    def steps(self) -> int:
        """Largest number of steps taken by a scheduler that the script steps once per training step; 0 if
        there is none."""
        return max(
            (steps_taken(scheduler) or 0 for scheduler, each in self._each if each == "step"), default=0
        )

    def check(self, steps: int, epochs: int, accumulate: int = 0) -> None:
        """Warn, once for each, of schedules that end clearly before or after the job.

        Args:
            steps: number of steps of the whole job; 0 if unknown.
            epochs: number of epochs of the whole job; 0 if unknown.
            accumulate: number of batches of a step; 0 for one. With several, a script may take one step less
                in each epoch than `job.total_steps` says.
        """
        for index, (scheduler, each) in enumerate(self._each):
            length, of_job = _length(scheduler), {"step": steps, "epoch": epochs}.get(each, 0)
            if not length or not of_job or index in self._warned:
                continue
            # A worker that is briefly away changes the number of steps slightly.
            close = max(CLOSE * of_job, epochs if accumulate > 1 and each == "step" else 0)
            if abs(length - of_job) <= close:
                continue
            self._warned.add(index)
            log.warning(
                "%s is made for %d %ss, and the job takes %d: its rates %s. Make it for job.total_%ss, or "
                "use a LambdaLR of job.progress",
                *(type(scheduler).__name__, length, each, of_job),
                "continue past its end" if length < of_job else "do not reach its end",
                each,
            )

    def evaluated(self, evaluations: Sequence[Mapping[str, float]]) -> None:
        """Step each ReduceLROnPlateau once for each evaluation that it has not seen; it counts them itself.
        `evaluations` are all of the job so far, oldest first."""
        for scheduler, metric in self._plateaus:
            values = [each[metric] for each in evaluations if metric in each]
            if evaluations and not values and id(scheduler) not in self._warned:
                self._warned.add(id(scheduler))
                log.warning(
                    "job.follow(metric=%r): no such number in the evaluation, which has: %s",
                    *(metric, ", ".join(sorted(evaluations[-1])) or "none"),
                )
            counting: Any = scheduler
            for value in values[int(counting.last_epoch) :]:
                scheduler.step(value)

    def catch_up(self, steps: int, epoch: int) -> None:
        """Step each scheduler that is behind the job; schedulers ahead of it stay. Those by progress are
        stepped once."""
        for scheduler, each in self._each:
            done = steps_taken(scheduler) or 0
            due = 1 if each == "progress" else (steps if each == "step" else epoch) - done
            if due > 0:
                optimizer: Any = scheduler.optimizer
                # Other workers have taken the steps; torch would warn of a schedule before the first one.
                optimizer._opt_called = True
            for _ in range(due):
                scheduler.step()


def _length(scheduler: LRScheduler) -> int:
    """Return the number of steps that a schedule is made for; 0 if it has no end of its own."""
    of: Any = scheduler
    match scheduler:
        case OneCycleLR():
            return int(of.total_steps)
        case CosineAnnealingLR():
            return int(of.T_max)
        case PolynomialLR():
            return int(of.total_iters)
        case LinearLR():  # a rising one is a warm-up, whose end is not the schedule's
            return int(of.total_iters) if of.end_factor < of.start_factor else 0
        case SequentialLR():
            last = _length(of._schedulers[-1])
            return int(of._milestones[-1]) + last if last else 0
        case ChainedScheduler():
            return max(map(_length, of._schedulers))
        case _:
            return 0


def steps_taken(scheduler: LRScheduler) -> int | None:
    """Return the number of steps that a scheduler has taken; None if it does not count steps."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return None
    counting: Any = scheduler
    if isinstance(scheduler, ChainedScheduler):  # it steps all of its own, and has no count
        counting = counting._schedulers[0]
    return int(counting.last_epoch)
