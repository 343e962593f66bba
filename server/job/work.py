"""The work of a member: an assignment that it has not answered yet.

Work (`WorkLife`):

    ASSIGNED | its push becomes part of a version      | -> LATE, REVOKED
    LATE     | its round or plan is over: the push is  | -> REVOKED
             | refused, and the worker keeps the       |
             | gradient in its residual                |
    REVOKED  | taken from a lost member; its samples   | -> ASSIGNED or LATE, if the member returns before
             | are requeued                            |    another member has drawn the samples
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ...common.stored import stored
from ...proto.messages import Assignment
from .samples import Drawn
from .transitions import move


@stored("work-life")
class WorkLife(Enum):
    """State of a member's work.

    The push for ASSIGNED work becomes part of a version. The push for LATE work is refused as stale. REVOKED
    work was taken from a lost member. The table at the head of this file has the transitions.
    """

    ASSIGNED = "assigned"
    LATE = "late"
    REVOKED = "revoked"


_WORK_TRANSITIONS = {
    WorkLife.ASSIGNED: frozenset({WorkLife.LATE, WorkLife.REVOKED}),
    WorkLife.LATE: frozenset({WorkLife.REVOKED}),
    WorkLife.REVOKED: frozenset({WorkLife.ASSIGNED, WorkLife.LATE}),
}


@stored("work")
@dataclass(kw_only=True, slots=True)
class AssignedWork:
    """An assignment that a member has not answered yet."""

    assignment: Assignment  # the assignment, as the member receives it
    drawn: Drawn
    given_at: float  # time of the assignment, in seconds of the job's clock
    share: int = 0  # number of samples due to the member; at the end of an epoch `drawn` may have fewer
    counted: int | None = None  # number of samples that the push stands for; None for all of `drawn`
    life: WorkLife = WorkLife.ASSIGNED
    interrupted: bool = False  # the stream broke since, so the time that the work takes is no measure
    asked: int = 0  # number of further batches that the member waits for; 0 while it computes
    stepped: int = 0  # number of optimizer steps that it had taken when it asked, in local mode

    @property
    def id(self) -> int:
        """Id of the assignment."""
        return self.assignment.id

    @property
    def late(self) -> bool:
        """True if the push for this work will be refused as stale, because its round or plan is over."""
        return self.life is WorkLife.LATE

    @property
    def samples(self) -> int:
        """Number of samples that the push for this work stands for."""
        return self.drawn.count if self.counted is None else self.counted

    @property
    def batches(self) -> tuple[int, ...]:
        """Number of samples of each batch of a script's step."""
        return self.assignment.batches or (self.samples,)

    def extend(self, more: Drawn, batches: tuple[int, ...], **terms: Any) -> None:
        """Add samples of the same epoch to the work, as further batches."""
        all_of_them = (*self.batches, *batches)
        self.drawn, self.asked = self.drawn.with_more(more), 0
        if self.counted is not None:
            self.counted += more.count
        ranges = self.drawn.ranges
        self.assignment = replace(
            self.assignment, ranges=ranges, batches=all_of_them, take_buffers=False, **terms
        )

    @property
    def shared(self) -> bool:
        """True if other members are assigned the same samples."""
        return self.assignment.slices > 1 or self.assignment.stragglers > 0

    def become(self, life: WorkLife) -> None:
        """Change the state of the work to `life`, as `_WORK_TRANSITIONS` allows."""
        self.life = move(self.life, life, _WORK_TRANSITIONS)
