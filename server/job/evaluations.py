"""Evaluations of the model: which member makes each one. Each is made once, and one at a time.

An evaluation has a number. Where every epoch is evaluated, this is the number of complete epochs.

    due   | `JobState.evaluation_due` has reached its number | -> asked
    asked | one member has it as a part of its assignment    | -> done, or due again if the member is lost or
          |                                                  |    never received the assignment
    done  | reported                                         |

Invariants:

- No evaluation is done twice.
- At most one evaluation is asked for at a time.
- A report counts only from the member that was asked, for the version that it was asked for or an earlier
  one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...common.stored import stored
from ...proto.messages import EpochStatus
from .best_policy import Keep, by_name
from .limits import EVALUATIONS_REMEMBERED
from .roster import Name

BEST_REMEMBERED = 256  # workers choose the names of metrics


@stored("asked-evaluation")
@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The request to one member to evaluate a version, which is still unanswered."""

    by: Name
    epoch: int
    version: int  # version of the parameters when the member was asked
    asked_at: float  # time of the request, in seconds of the job's clock
    assignment: int  # id of the assignment that carries the request
    progress: float = 0.0  # epochs trained on until the request, with a fraction


@stored("evaluations")
@dataclass(kw_only=True, slots=True)
class Evaluations:
    """The evaluations of a job that are done, and the one that a member is asked for."""

    begun: int = 0  # number of the last evaluation before the job began; 0 if there was none
    asked: Asked | None = None  # the request that is unanswered; None if there is none
    done: list[EpochStatus] = field(default_factory=list[EpochStatus])  # in the order of their numbers
    best: dict[str, float] = field(default_factory=dict[str, float])  # by metric

    def has(self, epoch: int) -> bool:
        """Return True if evaluation `epoch` is done, or is older than all results that are remembered."""
        if len(self.done) == EVALUATIONS_REMEMBERED and epoch < self.done[0].epoch:
            return True
        return any(done.epoch == epoch for done in reversed(self.done))  # duplicates repeat recent ones

    def wants(self, epoch: int) -> bool:
        """Return True if a member should be asked for evaluation `epoch`: it is not done, and no other is
        running."""
        return epoch > self.begun and self.asked is None and not self.has(epoch)

    @property
    def latest(self) -> int:
        """Largest number of an evaluation that was asked for; 0 before the first."""
        asked = 0 if self.asked is None else self.asked.epoch
        return max(asked, self.done[-1].epoch if self.done else self.begun)

    @property
    def newest(self) -> int:
        """Number of the last evaluation that is done; 0 before the first."""
        return self.done[-1].epoch if self.done else 0

    def is_by(self, member: Name) -> bool:
        """Return True if `member` was asked for an evaluation and has not reported it."""
        return self.asked is not None and self.asked.by == member

    def forget(self, member: Name, assigned: int = -1, version: int | None = None) -> None:
        """Withdraw the request from `member`, so that it or another member can be asked again.

        Args:
            assigned: id of the last assignment that the member received; -1 if it is lost.
            version: version of its replica; None without one. The request stays if the member has received it
                and has the version to evaluate. A member without it waits, for the version and the request.
        """
        asked = self.asked
        if asked is None or asked.by != member:
            return
        if asked.assignment > assigned or version is None or version < asked.version:
            self.asked = None

    def report(
        self,
        member: Name,
        epoch: int,
        version: int,
        metrics: Mapping[str, float],
        started_at: float,
        keep: Keep | None = None,
    ) -> bool:
        """Store the metrics that `member` reports for evaluation `epoch` of `version`.

        Returns:
            True if the report was stored; False if the member was not asked for this evaluation, or reports a
                later version than it was asked for.
        """
        asked = self.asked
        if asked is None or (asked.by, asked.epoch) != (member, epoch) or version > asked.version:
            return False
        self.asked = None
        seconds = asked.asked_at - started_at
        status = EpochStatus(
            epoch=epoch, version=version, metrics=metrics, seconds=seconds, epochs=asked.progress
        )
        self.done.append(status)
        for name, value in metrics.items():
            rule = keep if keep is not None and keep.metric == name else by_name(name)
            if (name in self.best or len(self.best) < BEST_REMEMBERED) and rule.better(
                value, self.best.get(name)
            ):
                self.best[name] = value
        self.done.sort(key=lambda done: done.epoch)
        del self.done[:-EVALUATIONS_REMEMBERED]
        return True
