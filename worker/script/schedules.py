"""Schedulers of a script that are kept as far as the job is, so that a worker may join late or come back."""

from __future__ import annotations

from typing import Any, Literal

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from .turn import ScriptError

Each = Literal["step", "epoch"]


class Schedules:
    """Those that a script has named, which goes on stepping them as it would alone."""

    def __init__(self) -> None:
        self._each: list[tuple[LRScheduler, Each]] = []

    def follow(self, scheduler: object, each: Each) -> None:
        """each: "step" or "epoch", how often the script steps it.

        Raises ScriptError for a scheduler that does not count its steps, or goes by something else.
        """
        if each not in ("step", "epoch"):
            raise ScriptError(f"job.follow(each={each!r}): expected 'step' or 'epoch'")
        name = type(scheduler).__name__
        if not isinstance(scheduler, LRScheduler):
            raise ScriptError(
                f"job.follow: expected a scheduler of torch.optim.lr_scheduler, got a {name}; bring it to "
                "step job.version by itself before the first batch"
            )
        if taken(scheduler) is None:
            raise ScriptError(
                f"job.follow: {name} goes by what the script measures, which a worker that joins late has "
                "not seen; choose a schedule of steps"
            )
        self._each.append((scheduler, each))

    def catch_up(self, version: int, epoch: int) -> None:
        """Step whatever has taken fewer steps than the job, or begun fewer epochs. What is ahead stays."""
        for scheduler, each in self._each:
            due = (version if each == "step" else epoch) - (taken(scheduler) or 0)
            if due > 0:
                optimizer: Any = scheduler.optimizer
                optimizer._opt_called = (
                    True  # by others: torch would warn of a schedule before the first step
                )
            for _ in range(due):
                scheduler.step()


def taken(scheduler: LRScheduler) -> int | None:
    """How many steps; None if it does not go by steps."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return None
    counting: Any = scheduler
    if isinstance(scheduler, ChainedScheduler):  # it steps all of its own, and has no count
        counting = counting._schedulers[0]
    return int(counting.last_epoch)
