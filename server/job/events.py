"""Events, replies and actions: the interface between the state machine and the shell.

`Core.step` refuses an event, or returns a reply (of the type R of `Event[R]`) and actions, which the shell
performs in order. The time `now` is passed with each event, in seconds of any clock that never runs
backwards.

No event or action holds tensors. The shell gives the shard payloads under the key of their push, and
snapshots under their own key, before it raises the event that names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ...common.stored import stored
from ...proto.messages import Assignment, Evaluations, Exchanged, Outcome, Welcome
from ...proto.refusal import Refusal

R = TypeVar("R")


@stored("push-key")
class PushKey(NamedTuple):
    """Identity of a push within a job.

    Attributes:
        seq: number of the push, which the worker uses only once.
    """

    worker: str
    incarnation: int
    seq: int


@stored("snapshot-key")
class SnapshotKey(NamedTuple):
    """Identity of a worker's snapshot of its replica.

    Attributes:
        version: version of the parameters in the snapshot.
    """

    worker: str
    incarnation: int
    version: int


# ---- replies -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The reply to `Joined`.

    Attributes:
        initialize: True if the worker has to upload the initial parameters.
        epoch: the present epoch, from 0.
        workers: number of members that share a step: the present ones, or the number that the job needs to
            begin.
    """

    rank: int
    version: int
    initialize: bool
    epoch: int
    workers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """The reply to `Pushed`.

    Attributes:
        repeated: True if the push was decided before, and this is a duplicate.
    """

    outcome: Outcome
    repeated: bool = False


Targets = tuple[str, ...] | None  # workers that get a packet; None if it is to be discarded

# ---- events ------------------------------------------------------------------------------------


class Event(Generic[R]):
    """An input of `Core.step`; the type parameter R is the type of the reply."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FromWorker(Event[R]):
    """An event that a worker caused."""

    worker: str
    incarnation: int


@stored("joined")
@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(FromWorker[Admission]):
    """A worker asks to join the job.

    Attributes:
        compressor: spec of its compressor, for the log; empty for none.
    """

    compressor: str = ""


@stored("initialized")
@dataclass(frozen=True, kw_only=True, slots=True)
class Initialized(FromWorker[None]):
    """The shard has version 0 of the parameters, which a worker has uploaded with its manifest.

    Attributes:
        train_samples: number of training samples in an epoch.
        data: checksum of some training samples; 0 if they cannot be compared.
        buffers: True if the model has buffers.
        least: smallest batch that the model can train on, in samples.
        epoch: first epoch to train on, from 0; the worker's script has trained on the earlier ones.
        steps: number of steps that the script took in the earlier epochs.
        differences: by worker that is ready already, the first difference of its model, as in `Prepared`.
    """

    fingerprint: bytes
    train_samples: int
    data: int = 0
    buffers: bool = False
    least: int = 1
    epoch: int = 0
    steps: int = 0
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


@stored("attached")
@dataclass(frozen=True, kw_only=True, slots=True)
class Attached(FromWorker[Welcome]):
    """The worker's Exchange stream is open."""


@stored("prepared")
@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(FromWorker[None]):
    """The worker has loaded its model and is ready for assignments.

    Attributes:
        version: version of its replica; None if it has none.
        assigned: id of the last assignment that it received; 0 for none.
        data: checksum of some of its training samples; 0 if they cannot be compared.
        train_samples: number of samples in its epoch; 0 to skip the comparison.
        drifted: version at which its replica differed from the server's, so that it has none now; 0 if it did
            not.
        restored: True if it resumes from its own saved state at the server's version.
        difference: first difference of its model from the job's, in the job's model and in its own; empty if
            there is none, or it is unknown.
        accumulate: number of batches that an optimizer step of its script takes; 0 if not declared.
    """

    fingerprint: bytes
    version: int | None
    assigned: int = 0
    data: int = 0
    train_samples: int = 0
    drifted: int = 0
    restored: bool = False
    difference: tuple[str, str] = ("", "")
    accumulate: int = 0


@stored("detached")
@dataclass(frozen=True, kw_only=True, slots=True)
class Detached(FromWorker[None]):
    """The worker's stream broke; its lease still runs."""


@stored("heard")
@dataclass(frozen=True, kw_only=True, slots=True)
class KeepAlive(FromWorker[None]):
    """The worker is alive, which renews its lease.

    Attributes:
        activity: activity of the training thread, in a heartbeat; None in other messages.
        stalled_s: seconds for which the training thread has made no progress.
    """

    activity: str | None = None
    stalled_s: float = 0.0


@stored("rated")
@dataclass(frozen=True, kw_only=True, slots=True)
class RatesReceived(FromWorker[None]):
    """The first part of a push has arrived; the push has these learning rates for its step.

    Ignored for workers that are not members or hold another assignment: the commit rejects those pushes. Also
    ignored where no part is stepped before the commit: the worker may abandon the push, and send it again
    with other rates.

    Attributes:
        learning_rates: learning rates by parameter group; empty for those of the job.
    """

    seq: int
    assignment: int
    learning_rates: tuple[float, ...]


@stored("pushed")
@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed(FromWorker[Decided]):
    """A push is committed, and the shard has all of its parts, which are valid.

    Attributes:
        assignment: id of the assignment that it answers.
        base_version: version at which it was computed.
        samples: number of samples that it stands for; 0 for a skipped step.
        loss: mean training loss over these samples; None if unknown.
        exchanged: in coded mode, the worker's report of the exchange; None where pushes carry payloads.
        plan: number of the plan that its parts belong to.
        computing_s: seconds that its local steps took; 0 if unknown.
        learning_rates: learning rates by parameter group; empty for those of the job.
        local_rates: learning rates of a script's last local step, by parameter group; empty for other steps.
        batch: checksum of its batch, which other workers should not have; 0 if it is not compared.
        batches: number of the assignment's batches that the push stands for, from the first; 0 for all.
        steps: number of optimizer steps that a script has taken with them; 0 if unknown.
    """

    seq: int
    assignment: int
    base_version: int
    samples: int
    loss: float | None = None
    exchanged: Exchanged | None = None
    plan: int = 1
    computing_s: float = 0.0
    learning_rates: tuple[float, ...] = ()
    local_rates: tuple[float, ...] = ()
    batch: int = 0
    batches: int = 0
    steps: int = 0

    @property
    def key(self) -> PushKey:
        """Identity of the push."""
        return PushKey(self.worker, self.incarnation, self.seq)


@stored("more-wanted")
@dataclass(frozen=True, kw_only=True, slots=True)
class MoreWanted(FromWorker[None]):
    """A worker has computed all batches of its assignment, and its script accumulates gradients of more.

    Attributes:
        batches: number of batches that the worker has of it.
        wanted: number of further batches.
        steps: number of optimizer steps that it has taken with these batches, in local mode; otherwise 0.
    """

    assignment: int
    batches: int
    wanted: int = 1
    steps: int = 0


@stored("published")
@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Event[None]):
    """The shard has carried out an `Apply`: its parameters are at this version.

    Attributes:
        version: the new version.
    """

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyStarted(Event[None]):
    """The shard has started to apply the open round, which can no longer be rolled back.

    Attributes:
        version: version that the round produces.
        whole: True if every part of the round has been stepped.
    """

    version: int
    whole: bool = False


@stored("planned")
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrepared(Event[None]):
    """The shard has prepared the plan with the next number."""


@stored("packet-begun")
@dataclass(frozen=True, kw_only=True, slots=True)
class PacketStarted(FromWorker[Targets]):
    """The header of a coded packet has arrived.

    Attributes:
        index: index of the packet in the exchange's plan.
        checksums: checksums of the blocks that it combines, one for each; empty where blocks are not
            compared.
    """

    exchange: int
    index: int
    checksums: Sequence[int] = ()


@stored("packet-relayed")
@dataclass(frozen=True, kw_only=True, slots=True)
class PacketRelayed(FromWorker[None]):
    """All of a coded packet has been forwarded.

    Attributes:
        index: index of the packet in the exchange's plan.
    """

    exchange: int
    index: int


@stored("packet-damaged")
@dataclass(frozen=True, kw_only=True, slots=True)
class PacketDamaged(FromWorker[None]):
    """A coded packet was refused; some of its bytes may have been forwarded."""

    exchange: int
    refusal: Refusal


@stored("copy-arrived")
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotReceived(FromWorker[None]):
    """The shard has all of a worker's snapshot.

    Attributes:
        version: version of the parameters in the snapshot.
        leaving: True if the worker sent it without a request, because it leaves.
    """

    version: int
    leaving: bool = False

    @property
    def key(self) -> SnapshotKey:
        """Identity of the snapshot."""
        return SnapshotKey(self.worker, self.incarnation, self.version)


OfExchange = PacketRelayed | PacketDamaged | SnapshotReceived


@stored("copied")
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotInstalled(Event[None]):
    """The shard has carried out an `InstallSnapshot`: its parameters are at this version."""

    version: int


@stored("evaluated")
@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReported(FromWorker[None]):
    """A worker has evaluated a version."""

    version: int
    epoch: int
    metrics: Mapping[str, float]


@stored("left")
@dataclass(frozen=True, kw_only=True, slots=True)
class Left(FromWorker[None]):
    """The worker leaves the job.

    Attributes:
        failed: True if it leaves because of an error.
    """

    failed: bool
    reason: str


@stored("stop-requested")
@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested(FromWorker[None]):
    """The worker's script ends the job early."""

    reason: str


@stored("tick")
@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(Event[None]):
    """Time has passed: leases and limits of time are checked."""


@stored("restarted")
@dataclass(frozen=True, kw_only=True, slots=True)
class Restarted(Event[None]):
    """The server has restarted from its state folder. No stream is open, and members get time to return."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseRequested(Event[None]):
    """The server will stop and later resume: no more work is assigned.

    The action `Paused` follows once accepted pushes are applied and no round is open.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping(Event[None]):
    """The server shuts down.

    Attributes:
        failed: True if the shard has failed and can apply no more pushes.
    """

    reason: str
    failed: bool = False


# ---- actions -----------------------------------------------------------------------------------


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
        rank: rank of the slot that the push fills; contributions are summed in rank order.
        samples: number of samples that it stands for; 0 for a skipped step.
        loss: mean training loss over these samples; None if unknown.
        slice: index of the slice of each part that the push contributes, where the members of a group divide
            the parts among themselves. The push may hold other slices too, from its worker's residual.
        weight: weight of the push in the sum; None for its fraction of the samples.
    """

    key: PushKey
    rank: int
    samples: int
    loss: float | None
    slice: int = 0
    weight: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """Open a round whose parts are stepped one by one, each as soon as every member's is stored.

    The action `Apply` closes the round.

    Attributes:
        version: version that the round produces.
        members: worker, incarnation and number of samples of each member, by id of its assignment, in rank
            order.
        rate_factor: factor of the base learning rate.
    """

    version: int
    members: Mapping[int, tuple[str, int, int]]
    rate_factor: float


@stored("vacate")
@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLost:
    """Stop stepping parts of the open round, because the members with these assignments are lost.

    Stepping continues once each of their slots has a `Substitute`, or is given up with `Exclude`.

    Attributes:
        assignments: ids of the lost members' assignments.
    """

    assignments: tuple[int, ...]


@stored("refill")
@dataclass(frozen=True, kw_only=True, slots=True)
class Substitute:
    """Assign a lost member's slot in the open round to a worker.

    This is the same worker with its old assignment, or another worker with a new one. The substitute pushes
    only parts that have not been stepped; parts stored by the lost member are discarded. Precedes the
    `Assign` of the new assignment.

    Attributes:
        lost: id of the lost member's assignment.
        assignment: id of the substitute's assignment.
    """

    lost: int
    assignment: int
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
        version: version that the step produces.
        contributions: pushes to sum.
        members: workers that get each part of the update as soon as it is made; the other workers get the
            update with their next assignment.
        rate_factor: factor of the base learning rate.
        weight: factor of the mean gradient.
        opened_at: time at which the work was assigned, in seconds of the job's clock.
        base_version: version that the gradient was computed at, where pushes are applied one by one; None in
            rounds.
        bases: versions that the shard has to keep, because gradients are being computed at them.
        clocks_stale: number of clocks that the push is behind the newest one; None where clocks are not
            bounded.
    """

    version: int
    contributions: tuple[Contribution, ...]
    rate_factor: float
    opened_at: float
    members: tuple[str, ...] = ()
    weight: float = 1.0
    base_version: int | None = None
    bases: frozenset[int] = frozenset()
    clocks_stale: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Discard a push or a snapshot that will not be applied."""

    key: PushKey | SnapshotKey


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeCompleted:
    """Report that a round of coded mode is complete: each worker takes its step.

    Attributes:
        samples: number of samples behind the sum.
        loss: mean training loss over these samples; NaN if unknown.
        opened_at: time at which the round opened, in seconds of the job's clock.
        redundancy: number of workers that computed each block.
    """

    samples: int
    loss: float
    opened_at: float
    redundancy: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSnapshot:
    """Ask a worker for a snapshot of its replica.

    Attributes:
        apply: number of the exchange whose sum the worker applies first, if it has not.
    """

    worker: str
    version: int
    apply: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallSnapshot:
    """Replace the server's parameters by a snapshot that has arrived."""

    key: SnapshotKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Relabel:
    """Give the server's parameters, unchanged, this version number.

    Attributes:
        version: the new number.
    """

    version: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close a worker's stream.

    Attributes:
        refusal: reason that the worker is told.
        final: True if the worker must not reconnect.
    """

    worker: str
    incarnation: int
    refusal: Refusal
    final: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Tell operators and members which members the job waits for.

    Attributes:
        seconds: seconds of waiting so far.
        text: message for the log and the status.
        usual: True if healthy jobs wait like this too; then no warning is logged.
    """

    ranks: tuple[int, ...]
    seconds: float
    text: str
    usual: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReported:
    """Log the loss of a member.

    Attributes:
        reason: cause of the loss.
    """

    name: str
    worker: str
    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Write a line to the log.

    Attributes:
        warning: True to log it as a warning.
    """

    text: str
    warning: bool = False


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Generic[R]):
    """The consequences of an event.

    Attributes:
        reply: reply to the event's sender, which is sent before any action is performed.
        actions: actions for the shell, in order.
    """

    reply: R
    actions: list[Action]
