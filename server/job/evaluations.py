"""Evaluations: which member makes which. Each is made once, one at a time.

An evaluation has a number, which is that of the epoch where every epoch is evaluated:

    due    `JobState.evaluation_due` has reached its number   -> asked
    asked  one member has it as a part of its assignment      -> done, or due again if the member is lost or
                                                                 never received the assignment
    done   reported

What may not happen: an evaluation done twice; two asked at a time; a report counted of a member that was not
asked, or of a later version than it was asked for.
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
    """An evaluation that a member was asked for."""

    by: Name
    epoch: int
    version: int
    asked_at: float
    assignment: int  # id of the assignment that asks for it
    progress: float = 0.0  # epochs trained on by then


@stored("evaluations")
@dataclass(kw_only=True, slots=True)
class Evaluations:
    begun: int = 0  # number of the last evaluation before the job began
    asked: Asked | None = None
    done: list[EpochStatus] = field(default_factory=list[EpochStatus])  # the last ones, by number

    def has(self, epoch: int) -> bool:
        """Return whether this evaluation is done, or older than all that are remembered."""
        if len(self.done) == EVALUATIONS_REMEMBERED and epoch < self.done[0].epoch:
            return True
        return any(done.epoch == epoch for done in reversed(self.done))  # mostly the last

    def wants(self, epoch: int) -> bool:
        """Return whether a member is to be asked for this evaluation. A slow one delays the next."""
        return epoch > self.begun and self.asked is None and not self.has(epoch)

    @property
    def latest(self) -> int:
        """The largest number that was asked for; 0 before the first."""
        asked = 0 if self.asked is None else self.asked.epoch
        return max(asked, self.done[-1].epoch if self.done else self.begun)

    def is_by(self, member: Name) -> bool:
        """Return whether this member was asked and has not reported."""
        return self.asked is not None and self.asked.by == member

    def forget(self, member: Name, assigned: int = -1) -> None:
        """Let another member be asked: this one is lost, or has received assignments up to `assigned` only,
        and not the one that asks for the evaluation."""
        if self.asked is not None and self.asked.by == member and self.asked.assignment > assigned:
            self.asked = None

    def report(
        self, member: Name, epoch: int, version: int, metrics: Mapping[str, float], started_at: float
    ) -> bool:
        """Take a member's report. Return whether the member was asked for it."""
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
