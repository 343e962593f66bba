"""Schedulers of a script that are kept as far as the job is, so that a worker may join late or come back."""

from __future__ import annotations

import logging
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
CLOSE = 0.02  # of a job's steps, by which a schedule may miss them


class Schedules:
    """The schedulers that a script has named to `Job.follow`."""

    def __init__(self) -> None:
        self._each: list[tuple[LRScheduler, Each]] = []
        self._warned: set[int] = set()  # places of those of which the log has said that their length is wrong

    def follow(self, scheduler: object, each: Each) -> None:
        """
        Args:
            each: "step" or "epoch", how often the script steps it; "progress" for a LambdaLR whose function
                asks `job.progress`, which the job steps.

        Raises:
            ScriptError: a scheduler that does not count its steps, or goes by something else.
        """
        if each not in ("step", "epoch", "progress"):
            raise ScriptError(f"job.follow(each={each!r}): expected 'step', 'epoch' or 'progress'")
        name = type(scheduler).__name__
        if not isinstance(scheduler, LRScheduler):
            raise ScriptError(
                f"job.follow: expected a scheduler of torch.optim.lr_scheduler, got a {name}; bring it to "
                "step job.version by itself before the first batch"
            )
        if each == "progress" and not isinstance(scheduler, LambdaLR):
            raise ScriptError(
                f"job.follow(each='progress'): {name} goes by its own count; give a LambdaLR whose function "
                "asks job.progress"
            )
        if taken(scheduler) is None:
            raise ScriptError(
                f"job.follow: {name} goes by what the script measures, which a worker that joins late has "
                "not seen; choose a schedule of steps"
            )
        self._each.append((scheduler, each))

    @property
    def steps(self) -> int:
        """Steps that those by steps have taken."""
        return max((taken(scheduler) or 0 for scheduler, each in self._each if each == "step"), default=0)

    def check(self, steps: int, epochs: int) -> None:
        """Warn of schedules that end clearly before the job does or after it, of each once.

        Args:
            steps, epochs: of the whole job; 0 if nobody knows.
        """
        for place, (scheduler, each) in enumerate(self._each):
            length, of_job = _length(scheduler), {"step": steps, "epoch": epochs}.get(each, 0)
            if not length or not of_job or place in self._warned:
                continue
            # A worker that is away for a moment changes the number of steps by a few.
            if abs(length - of_job) <= CLOSE * of_job:
                continue
            self._warned.add(place)
            log.warning(
                "%s is made for %d %ss, and the job takes %d: its rates %s. Make it for job.total_%ss, or "
                "let it follow job.progress",
                *(type(scheduler).__name__, length, each, of_job),
                "go on past its end" if length < of_job else "do not get to its end",
                each,
            )

    def catch_up(self, steps: int, epoch: int) -> None:
        """Step whatever has taken fewer steps than the job, or begun fewer epochs. What is ahead stays. Those
        by progress are stepped in any case."""
        for scheduler, each in self._each:
            done = taken(scheduler) or 0
            due = 1 if each == "progress" else (steps if each == "step" else epoch) - done
            if due > 0:
                optimizer: Any = scheduler.optimizer
                optimizer._opt_called = (
                    True  # by others: torch would warn of a schedule before the first step
                )
            for _ in range(due):
                scheduler.step()


def _length(scheduler: LRScheduler) -> int:
    """Return the number of steps that a schedule is made for; 0 for one without an end of its own."""
    of: Any = scheduler
    match scheduler:
        case OneCycleLR():
            return int(of.total_steps)
        case CosineAnnealingLR():
            return int(of.T_max)
        case PolynomialLR():
            return int(of.total_iters)
        case LinearLR():  # otherwise it is a warm-up
            return int(of.total_iters) if of.end_factor < of.start_factor else 0
        case SequentialLR():
            last = _length(of._schedulers[-1])
            return int(of._milestones[-1]) + last if last else 0
        case ChainedScheduler():
            return max(map(_length, of._schedulers))
        case _:
            return 0


def taken(scheduler: LRScheduler) -> int | None:
    """How many steps; None if it does not go by steps."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return None
    counting: Any = scheduler
    if isinstance(scheduler, ChainedScheduler):  # it steps all of its own, and has no count
        counting = counting._schedulers[0]
    return int(counting.last_epoch)
