"""One round of the modes `sync` and `local`: its places, who has them, and what has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .. import events as e
from ..lives import move
from ..roster import Name
from .division import Division, InParts, Sliced, StragglerCoded


class RoundLife(Enum):
    OPEN = "open"
    CLOSED = "closed"


_LIVES = {RoundLife.OPEN: frozenset({RoundLife.CLOSED}), RoundLife.CLOSED: frozenset[RoundLife]()}


@dataclass(kw_only=True, slots=True)
class Place:
    """One part of a round. rank: that of its member when the round opened. work: id of its assignment."""

    rank: int
    member: Name
    work: int


@dataclass(kw_only=True, slots=True)
class Round:
    """Places are in rank order. contributions, answered, with the samples behind each, and computing, with
    seconds and samples of local steps, are by place.

    rates: learning rates of the step, by parameter group, as the worker `rated_by` was the first to say; none
    for those of the job.
    open: places that have neither answered nor been lost. lost: places whose member is, or was. parts:
    whether the shard may step parts before the round closes. begun: whether it has. unfilled: whether lost
    members' places stay empty, because it has stepped all parts, or nobody is left who could take them.
    """

    version: int
    opened_at: float
    progress: float  # of the job, when it opened
    rate_factor: float
    division: Division | InParts | Sliced | StragglerCoded
    parts: bool = False
    begun: bool = False
    unfilled: bool = False
    rates: tuple[float, ...] = ()
    rated_by: str = ""
    life: RoundLife = RoundLife.OPEN
    places: list[Place] = field(default_factory=list[Place])
    place_of: dict[int, int] = field(default_factory=dict[int, int])  # by id of the work
    contributions: dict[int, e.Contribution] = field(default_factory=dict[int, e.Contribution])
    answered: dict[int, int] = field(default_factory=dict[int, int])
    computing: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    open: set[int] = field(default_factory=set[int])
    lost: set[int] = field(default_factory=set[int])

    @property
    def vacant(self) -> list[int]:
        """Places that have to be given to somebody else."""
        if not self.lost or self.unfilled or self.life is not RoundLife.OPEN:
            return []
        return self.division.vacant(self.answered, self.lost, len(self.open))

    @property
    def missing(self) -> list[Place]:
        """Places that have not answered."""
        return [self.places[number] for number in sorted({*self.open, *self.vacant})]

    @property
    def complete(self) -> bool:
        """Whether it waits for nobody."""
        lost = set[int]() if self.unfilled else self.lost
        return self.division.complete(self.answered, lost, len(self.open))

    def fill(self, number: int, rank: int, member: Name, work: int) -> None:
        """Give a place, which may be a new one, to a member."""
        place = Place(rank=rank, member=member, work=work)
        self.places[number : number + 1] = [place]
        self.place_of[work] = number
        self.lost.discard(number)
        self.open.add(number)

    def lose(self, number: int) -> None:
        self.lost.add(number)
        self.open.discard(number)

    def reopen(self, number: int) -> None:
        """The member of a place is back, and nobody else has been given it."""
        self.lost.discard(number)
        self.open.add(number)

    def answer(self, number: int, contribution: e.Contribution) -> None:
        self.contributions[number] = contribution
        self.answered[number] = contribution.samples
        self.open.discard(number)

    def close(self) -> None:
        """What has come is enough."""
        self.life = move(self.life, RoundLife.CLOSED, _LIVES)
