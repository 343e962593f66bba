"""Who makes which evaluation: each once, one at a time, and by another member if the first one is lost.

They are known by number, which is that of the epoch where every epoch is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...common.stored import stored
from ...proto.messages import EpochStatus
from .limits import EVALUATIONS_REMEMBERED
from .roster import Name


@stored("asked-evaluation")
@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A member that was asked to evaluate, as part of an assignment."""

    by: Name
    epoch: int
    version: int
    asked_at: float
    assignment: int  # its id
    progress: float = 0.0  # epochs that had been trained on


@stored("evaluations")
@dataclass(kw_only=True, slots=True)
class Evaluations:
    """asked: not yet reported. done: the last `EVALUATIONS_REMEMBERED`, in the order of epochs. begun: the
    largest number that nobody is asked for, because the job began after it."""

    begun: int = 0
    asked: Asked | None = None
    done: list[EpochStatus] = field(default_factory=list[EpochStatus])

    def has(self, epoch: int) -> bool:
        """Return whether this epoch was evaluated, or is older than all that are remembered."""
        if len(self.done) == EVALUATIONS_REMEMBERED and epoch < self.done[0].epoch:
            return True
        return any(done.epoch == epoch for done in reversed(self.done))  # mostly the last

    def wants(self, epoch: int) -> bool:
        """Whether a member is to be asked for this epoch. One is at a time: a slow one delays the next."""
        return epoch > self.begun and self.asked is None and not self.has(epoch)

    @property
    def latest(self) -> int:
        """The largest number that was asked for; 0 before the first."""
        asked = 0 if self.asked is None else self.asked.epoch
        return max(asked, self.done[-1].epoch if self.done else self.begun)

    def is_by(self, member: Name) -> bool:
        """Whether this member was asked, and has not reported."""
        return self.asked is not None and self.asked.by == member

    def forget(self, member: Name, assigned: int = -1) -> None:
        """Another one may be asked: this member is lost, or `assigned` is the last assignment it has heard of
        and is not the one to evaluate."""
        if self.asked is not None and self.asked.by == member and self.asked.assignment > assigned:
            self.asked = None

    def report(
        self, member: Name, epoch: int, version: int, metrics: Mapping[str, float], started_at: float
    ) -> bool:
        """Take in what a member reports. Returns whether it was asked for."""
        asked = self.asked
        if asked is None or (asked.by, asked.epoch) != (member, epoch) or version > asked.version:
            return False
        self.asked = None
        seconds = asked.asked_at - started_at
        status = EpochStatus(
            epoch=epoch, version=version, metrics=metrics, seconds=seconds, epochs=asked.progress
        )
        self.done.append(status)
        self.done.sort(key=lambda done: done.epoch)
        del self.done[:-EVALUATIONS_REMEMBERED]
        return True
