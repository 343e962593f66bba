"""One version in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Contribution
from .roster import Member


@dataclass(kw_only=True, slots=True)
class Round:
    """A round of sync mode: members are frozen when it opens; `contributions[partition][rank]`."""

    version: int
    epoch: int
    start: int
    samples: int
    opened_at: float
    members: dict[int, tuple[str, int]]  # rank -> (worker, incarnation)
    lost: set[int] = field(default_factory=set[int])
    contributions: list[dict[int, Contribution]] = field(default_factory=list[dict[int, Contribution]])
    closed: set[int] = field(default_factory=set[int])  # partitions handed over to be applied
    published: set[int] = field(default_factory=set[int])

    def missing(self, partition: int) -> list[int]:
        """Ranks that this partition still waits for."""
        return sorted(set(self.members) - self.lost - set(self.contributions[partition]))

    def rank_of(self, member: Member) -> int | None:
        """The member's rank in this round, None if it takes no part."""
        for rank, identity in self.members.items():
            if identity == (member.worker, member.incarnation):
                return rank
        return None
