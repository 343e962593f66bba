"""Which pushes bring their workers' buffers along, such as BatchNorm's statistics: a *collection*.

The buffers of a version are wanted when it is evaluated or saved, and when somebody joins. Control knows that
some steps before, and asks for them with assignments, so that they come with pushes, and count if these do:
with all that are among the last of an epoch or before an evaluation, and with one of each member when another
one has joined, or again and again where time decides. The
newcomer's own are not those of a model that was trained for long: it is asked for none until it has taken
over the others', with its second assignment.
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
    """wanted: whether the model has any and they are collected. first_alone: whether those of the member of
    lowest rank will do. number: of the last collection. epoch: the first whose end has had none. evaluation:
    number of the last one for which there was any. next_s: when time is over until the next."""

    wanted: bool = False
    first_alone: bool = False
    number: int = 0
    epoch: int = 0
    evaluation: int = 0
    next_s: float = EVERY_S

    def joined(self, member: Member) -> None:
        """A member has come to a job that has begun."""
        if self.wanted:
            member.newcomer = NEWCOMER
            self.number += 1

    def passed(self, elapsed_s: float) -> None:
        """So much time has passed, in a job in which that decides about evaluations or the end."""
        if self.wanted and elapsed_s >= self.next_s:
            self.number += 1
            self.next_s = max(elapsed_s + EVERY_S, elapsed_s * GROWTH)

    def ask(
        self, member: Member, drawn: Drawn, left: int, roster: Roster, evaluation: int = 0
    ) -> tuple[int, bool]:
        """With an assignment for samples of which there are `left` others in the epoch. evaluation: number of
        the one that is due after this push or few others; 0 if none is.

        Returns the collection that it is to be a part of, 0 for none, and whether the member takes over the
        job's buffers first.
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
