"""What the state machine remembers of a job. Plain data: `core` changes it, others may look."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..proto.messages import EpochStatus, LostStatus, Phase
from .events import Contribution
from .roster import Member, Roster

LOST_REMEMBERED = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the job's configuration means for decisions."""

    min_workers: int
    batch_size: int
    epochs: int
    lease_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Who was asked to evaluate what."""

    by: tuple[str, int]  # (worker, incarnation)
    epoch: int
    version: int


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


@dataclass(kw_only=True)
class JobState:
    """One job."""

    rules: Rules
    roster: Roster
    phase: Phase = Phase.EMPTY
    initializer: tuple[str, int] | None = None  # (worker, incarnation) that was asked for the parameters
    fingerprint: bytes = b""
    train_samples: int = 0
    partitions: int = 1
    version: int = 0
    epoch: int = 0  # epochs completed
    start: int = 0  # samples of the running epoch consumed
    round: Round | None = None
    started: bool = False  # the first round has opened: from then on any number of members will do
    evaluation: Evaluation | None = None  # asked for and not yet reported
    evaluations: list[EpochStatus] = field(default_factory=list[EpochStatus])
    lost: deque[LostStatus] = field(default_factory=lambda: deque[LostStatus](maxlen=LOST_REMEMBERED))
    accepted_pushes: int = 0
    stale_pushes: int = 0
    waiting_since: float | None = None  # when whatever is waited for began

    @property
    def epoch_progress(self) -> float:
        """Part of the running epoch that is done, 0 to 1."""
        return self.start / self.train_samples if self.train_samples else 0.0

    def snapshot(self) -> Mapping[str, object]:
        """Everything that decides what happens next, as plain values, to compare two states."""
        return {
            "phase": self.phase,
            "version": self.version,
            "epoch": self.epoch,
            "start": self.start,
            "fingerprint": self.fingerprint,
            "initializer": self.initializer,
            "round": repr(self.round),
            "members": {
                m.worker: (m.incarnation, m.rank, m.listening, m.version, dict(m.last_seq), list(m.outcomes))
                for m in self.roster.by_rank()
            },
            "evaluation": self.evaluation,
            "evaluations": list(self.evaluations),
        }
