"""Actions, the consequences of an event: messages to workers, orders to the shard, and notes to operators.

The shell performs actions in order. `events` has the other half of the interface, and all names of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...common.stored import stored
from ...proto.messages import Assignment, Evaluations
from ...proto.refusal import Refusal


@stored("push-key")
class PushKey(NamedTuple):
    """Identity of a push within a job."""

    worker: str
    incarnation: int
    seq: int  # number of the push, which the worker uses only once


@stored("snapshot-key")
class SnapshotKey(NamedTuple):
    """Identity of a worker's snapshot of its replica."""

    worker: str
    incarnation: int
    version: int  # version of the parameters in the snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInitialize:
    """Ask a worker to upload the initial parameters."""

    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Keep this version: its evaluation is the best so far."""

    epoch: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Send a member an assignment, after the parameters of its version.

    Attributes:
        has: version of the member's replica. If it is one less than the assignment's, the update suffices.
            None and other versions but the assignment's own need a snapshot.
    """

    worker: str
    assignment: Assignment
    has: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt:
    """Put the plan that the shard has prepared in force.

    Every push that is still arriving will be refused as stale, so the shard discards the parts that it has
    stored.

    Attributes:
        members: version of the replica of each connected member, by worker id. Members get the updates up to
            `version` before the plan.
    """

    plan: int
    version: int
    members: Mapping[str, int]


@stored("contribution")
@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """One push among those that produce a version.

    Attributes:
        slice: index of the slice of each part that the push contributes, where the members of a group divide
            the parts among themselves. The push may hold other slices too, from its worker's residual.
    """

    key: PushKey
    rank: int  # rank of the slot that the push fills; contributions are summed in rank order
    samples: int  # number of samples that it stands for; 0 for a skipped step
    loss: float | None  # mean training loss over these samples; None if unknown
    slice: int = 0
    weight: float | None = None  # weight of the push in the sum; None for its fraction of the samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """Open a round whose parts are stepped one by one, each as soon as every member's is stored.

    The action `Apply` closes the round.

    Attributes:
        members: worker, incarnation and number of samples of each member, by id of its assignment, in rank
            order.
    """

    version: int  # version that the round produces
    members: Mapping[int, tuple[str, int, int]]
    rate_factor: float  # factor of the base learning rate


@stored("vacate")
@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLost:
    """Stop stepping parts of the open round, because the members with these assignments are lost.

    Stepping continues once each of their slots has a `Substitute`, or is given up with `Exclude`.
    """

    assignments: tuple[int, ...]  # ids of the lost members' assignments


@stored("refill")
@dataclass(frozen=True, kw_only=True, slots=True)
class Substitute:
    """Assign a lost member's slot in the open round to a worker.

    This is the same worker with its old assignment, or another worker with a new one. The substitute pushes
    only parts that have not been stepped; parts stored by the lost member are discarded. Precedes the
    `Assign` of the new assignment.
    """

    lost: int  # id of the lost member's assignment
    assignment: int  # id of the substitute's assignment
    worker: str
    incarnation: int


@stored("without")
@dataclass(frozen=True, kw_only=True, slots=True)
class Exclude:
    """Exclude these assignments from the open round: its parts no longer wait for them, and their stored
    parts are not summed.
    """

    assignments: tuple[int, ...]


@stored("apply")
@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """Reduce the contributions, in this order, and step the parameters from `version` - 1 to `version`.

    Attributes:
        members: workers that get each part of the update as soon as it is made; the other workers get the
            update with their next assignment.
    """

    version: int  # version that the step produces
    contributions: tuple[Contribution, ...]  # pushes to sum
    rate_factor: float  # factor of the base learning rate
    opened_at: float  # time at which the work was assigned, in seconds of the job's clock
    members: tuple[str, ...] = ()
    weight: float = 1.0  # factor of the mean gradient
    base_version: int | None = None  # of the gradient, where pushes are applied one by one; None in rounds
    bases: frozenset[int] = frozenset()  # versions to keep, because gradients are being computed at them
    clocks_stale: int | None = None  # clocks behind the newest push; None where clocks are not bounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Discard a push or a snapshot that will not be applied."""

    key: PushKey | SnapshotKey


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeCompleted:
    """Report that a round of coded mode is complete: each worker takes its step."""

    samples: int  # number of samples behind the sum
    loss: float  # mean training loss over these samples; NaN if unknown
    opened_at: float  # time at which the round opened, in seconds of the job's clock
    redundancy: int  # number of workers that computed each block


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSnapshot:
    """Ask a worker for a snapshot of its replica."""

    worker: str
    version: int
    apply: int  # number of the exchange whose sum the worker applies first, if it has not


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallSnapshot:
    """Replace the server's parameters by a snapshot that has arrived."""

    key: SnapshotKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Relabel:
    """Give the server's parameters, unchanged, this version number."""

    version: int  # the new number


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close a worker's stream."""

    worker: str
    incarnation: int
    refusal: Refusal  # reason that the worker is told
    final: bool  # True if the worker must not reconnect


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Tell operators and members which members the job waits for."""

    ranks: tuple[int, ...]
    seconds: float  # seconds of waiting so far
    text: str  # message for the log and the status
    usual: bool = False  # True if healthy jobs wait like this too; then no warning is logged


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReported:
    """Log the loss of a member."""

    name: str
    worker: str
    rank: int
    reason: str  # cause of the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Write a line to the log."""

    text: str
    warning: bool = False  # True to log it as a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class TellEvaluations:
    """Send all workers the result of an evaluation."""

    evaluations: Evaluations


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused:
    """Report that the requested pause is complete: the server may stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Report that the job is done: its state does not change any more."""


Action = (
    LossReported
    | TellEvaluations
    | RequestInitialize
    | Assign
    | Adopt
    | Open
    | MemberLost
    | Substitute
    | Exclude
    | Apply
    | Drop
    | ExchangeCompleted
    | RequestSnapshot
    | InstallSnapshot
    | Relabel
    | Disconnect
    | Report
    | Best
    | Note
    | Paused
    | Finish
)
