"""Which pushes carry their worker's buffers, such as BatchNorm's statistics. Those asked for together are a
*collection*.

The buffers of a version are needed when it is evaluated or saved, and when a worker joins. Control knows that
some steps earlier and asks for them with assignments, so that they arrive with pushes and count if these do.
A new collection begins

    with the last assignments of an epoch, or before an evaluation     every push carries buffers
    when a member has joined, or at growing intervals of time where    one push of each member does
    time decides about evaluations or the end

The buffers of a newcomer are those of an untrained model: it is asked for none until it has taken over the
job's, with its second assignment.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...common.stored import stored
from .roster import Member, Roster
from .samples import Drawn

EVERY_S = 1.0
GROWTH = 1.05
NEWCOMER = 2  # assignments until it takes over the job's buffers


@stored("buffers")
@dataclass(kw_only=True, slots=True)
class Buffers:
    wanted: bool = False  # the model has buffers, and they are collected
    first_alone: bool = False  # only from the member of lowest rank
    number: int = 0  # of the last collection
    epoch: int = 0  # the first epoch without a collection at its end
    evaluation: int = 0  # the last evaluation with a collection
    next_s: float = EVERY_S  # when the next collection by time is due

    def joined(self, member: Member) -> None:
        """Called when a member joins a job that has begun."""
        if self.wanted:
            member.newcomer = NEWCOMER
            self.number += 1

    def passed(self, elapsed_s: float) -> None:
        """Called as time passes, in a job in which time decides about evaluations or the end."""
        if self.wanted and elapsed_s >= self.next_s:
            self.number += 1
            self.next_s = max(elapsed_s + EVERY_S, elapsed_s * GROWTH)

    def ask(
        self, member: Member, drawn: Drawn, left: int, roster: Roster, evaluation: int = 0
    ) -> tuple[int, bool]:
        """Decide about buffers for an assignment.

        Args:
            left: samples of the same epoch that are left to draw.
            evaluation: number of the evaluation that is due after this push or few others; 0 if none is.

        Returns:
            The collection that the push belongs to, 0 for none, and whether the member takes over the job's
            buffers first.
        """
        if not self.wanted:
            return 0, False
        last = left < drawn.count * roster.ready_members
        if last and drawn.epoch >= self.epoch:
            self.number, self.epoch = self.number + 1, drawn.epoch + 1
        if evaluation > self.evaluation:
            self.number, self.evaluation = self.number + 1, evaluation
        last = last or evaluation > 0
        take = member.newcomer == 1
        member.newcomer = max(0, member.newcomer - 1)
        if member.newcomer or not (last or member.collection < self.number):
            return 0, take
        if self.first_alone and any(each.rank < member.rank and not each.newcomer for each in roster.ready()):
            return 0, take
        member.collection = self.number
        return self.number, take
