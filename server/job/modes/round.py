"""One round of the modes `sync` and `local`: its slots, who has them, and which contributions have arrived.

A round (`RoundLife`), and where pushes of its work go:

    OPEN     members compute. A push is accepted, or changes nothing   -> CLOSED (`division` says that what
             because its slot has another member.                         has arrived is enough)
    CLOSED   the shard has its `Apply`; a push is refused as            -> gone, once the shard has published
             stale, its work is LATE.                                     the version

A slot of an open round (kept as the sets `open` and `lost`, and the keys of `answered`):

    open                  its member computes                  -> answered, lost
    answered              its push is accepted                 -> stays so, also if its member is lost
    lost                  its member is gone, before or after  -> open (the member returns, or a substitute
                          it answered                            takes the slot), or unused
    lost, not answered    vacant, if the round needs it        -> open, or given up (`unfilled`)

What may not happen: an accepted push left out of the sum of its round; a slot with two members; a part summed
from two members of one slot; the round undone after the shard has begun to apply it (`begun`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ....common.stored import stored
from .. import events as e
from ..roster import Name
from ..transitions import move
from .division import Division, InParts, Sliced, StragglerCoded


@stored("round-life")
class RoundLife(Enum):
    OPEN = "open"
    CLOSED = "closed"


_TRANSITIONS = {RoundLife.OPEN: frozenset({RoundLife.CLOSED}), RoundLife.CLOSED: frozenset[RoundLife]()}


@stored("round-place")
@dataclass(kw_only=True, slots=True)
class Slot:
    """One share of a round. rank: its first member's. work: id of the assignment of its present member."""

    rank: int
    member: Name
    work: int


@stored("round")
@dataclass(kw_only=True, slots=True)
class Round:
    """The slots of a round, in rank order, and what is known of each, by its number."""

    version: int  # at which members compute
    opened_at: float
    progress: float  # of the job, when the round opened
    total_steps: int = 0  # of the whole job, if the number of members stays
    rate_factor: float
    division: Division | InParts | Sliced | StragglerCoded
    parts: bool = False  # the shard may step parts before the round closes
    begun: bool = False  # and has done so
    unfilled: bool = False  # lost slots stay empty: all parts are stepped, or no member could take them
    rates: tuple[float, ...] = ()  # learning rates of the step, by parameter group; none for the job's
    rated_by: str = ""  # the worker that was the first to send them
    life: RoundLife = RoundLife.OPEN
    slots: list[Slot] = field(default_factory=list[Slot])
    slot_of: dict[int, int] = field(default_factory=dict[int, int])  # by id of the work
    contributions: dict[int, e.Contribution] = field(default_factory=dict[int, e.Contribution])
    answered: dict[int, int] = field(default_factory=dict[int, int])  # samples behind each contribution
    computing: dict[int, tuple[float, int]] = field(  # seconds and samples of local steps
        default_factory=dict[int, tuple[float, int]]
    )
    open: set[int] = field(default_factory=set[int])  # neither answered nor lost
    lost: set[int] = field(default_factory=set[int])

    @property
    def vacant(self) -> list[int]:
        """Slots that another member has to take over."""
        if not self.lost or self.unfilled or self.life is not RoundLife.OPEN:
            return []
        return self.division.vacant(self.answered, self.lost, len(self.open))

    @property
    def missing(self) -> list[Slot]:
        """Slots that the round waits for."""
        return [self.slots[number] for number in sorted({*self.open, *self.vacant})]

    @property
    def complete(self) -> bool:
        """Whether enough contributions have arrived."""
        lost = set[int]() if self.unfilled else self.lost
        return self.division.complete(self.answered, lost, len(self.open))

    def fill(self, number: int, rank: int, member: Name, work: int) -> None:
        """Assign a slot to a member; the number after the last one adds a slot."""
        slot = Slot(rank=rank, member=member, work=work)
        self.slots[number : number + 1] = [slot]
        self.slot_of[work] = number
        self.lost.discard(number)
        self.open.add(number)

    def lose(self, number: int) -> None:
        self.lost.add(number)
        self.open.discard(number)

    def reopen(self, number: int) -> None:
        """Return a slot to its lost member, which is back before another member took the slot."""
        self.lost.discard(number)
        self.open.add(number)

    def answer(self, number: int, contribution: e.Contribution) -> None:
        self.contributions[number] = contribution
        self.answered[number] = contribution.samples
        self.open.discard(number)

    def close(self) -> None:
        self.life = move(self.life, RoundLife.CLOSED, _TRANSITIONS)
