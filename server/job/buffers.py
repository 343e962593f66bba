"""Buffers of the model, such as BatchNorm's statistics: which pushes carry those of their worker. Buffers
that are asked for together form a *collection*.

The buffers of a version are needed when it is evaluated or saved, and when a worker joins. Control knows some
steps earlier that this will happen, and asks for the buffers in assignments. So they arrive with pushes, and
count if the pushes do. A new collection begins

    with the last assignments of an epoch, or before an evaluation   | every push carries buffers
    when a member has joined, or at growing intervals of time where  | one push of each member does
    time decides about evaluations or the end                        |

The buffers of a newcomer are those of an untrained model. It is asked for none until it has taken over the
job's buffers, with its second assignment.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...common.stored import stored
from .roster import Member, Roster
from .samples import Drawn

EVERY_S = 1.0  # shortest interval between collections by time
GROWTH = 1.05  # the next collection by time is due when the elapsed time has grown by this factor
NEWCOMER = 2  # assignments until a new member takes over the job's buffers


@stored("buffers")
@dataclass(kw_only=True, slots=True)
class Buffers:
    """Decides which assignments ask for the worker's buffers."""

    wanted: bool = False  # True if the model has buffers and the job collects them
    first_alone: bool = False  # `--buffers rank0`: only the member of lowest rank contributes
    number: int = 0  # number of the last collection; 0 before the first
    epoch: int = 0  # first epoch, from 0, without a collection at its end
    evaluation: int = 0  # number of the last evaluation that has a collection
    next_s: float = EVERY_S  # when the next collection by time is due, since the job began

    def joined(self, member: Member) -> None:
        """Called when a member joins a job that has begun: begin a new collection, without the newcomer."""
        if self.wanted:
            member.newcomer = NEWCOMER
            self.number += 1

    def passed(self, elapsed_s: float) -> None:
        """Begin a new collection if one is due by time. Called only where time decides about evaluations or
        the end.
        """
        if self.wanted and elapsed_s >= self.next_s:
            self.number += 1
            self.next_s = max(elapsed_s + EVERY_S, elapsed_s * GROWTH)

    def ask(
        self, member: Member, drawn: Drawn, left: int, roster: Roster, evaluation: int = 0
    ) -> tuple[int, bool]:
        """Decide whether the push for a new assignment carries buffers.

        Args:
            evaluation: number of an evaluation that is due after this push or a few others; 0 if none is.

        Returns:
            The number of the collection that the push contributes to (0 for none), and True if the member
                first takes over the job's buffers.
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
