"""Events, replies and actions: the interface between the state machine and the shell.

`Core.step` refuses an event, or returns a reply (of the type R of `Event[R]`) and actions, which the shell
carries out in order. `now` is passed with each event, in seconds of any clock that never goes back.

No event or action holds tensors: the shell gives the shard payloads under the key of their push, and
snapshots under their own key, before it raises the event that names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ...common.stored import stored
from ...proto.messages import Assignment, Exchanged, Outcome, Welcome
from ...proto.refusal import Refusal

R = TypeVar("R")


@stored("push-key")
class PushKey(NamedTuple):
    """Names one push of a job."""

    worker: str
    incarnation: int
    seq: int


@stored("snapshot-key")
class SnapshotKey(NamedTuple):
    """Names a worker's snapshot of a version."""

    worker: str
    incarnation: int
    version: int


# ---- replies -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Answers `Joined`.

    Attributes:
        initialize: whether the worker has to upload the initial parameters.
        epoch: the present one, from 0.
        workers: members that share a step: the present ones, or as many as the job needs to begin.
    """

    rank: int
    version: int
    initialize: bool
    epoch: int
    workers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """Answers `Pushed`. repeated: the push was decided before."""

    outcome: Outcome
    repeated: bool = False


Targets = tuple[str, ...] | None  # workers that get a packet; None: discard it

# ---- events ------------------------------------------------------------------------------------


class Event(Generic[R]):
    """R: type of the reply."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FromWorker(Event[R]):
    """An event that a worker caused."""

    worker: str
    incarnation: int


@stored("joined")
@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(FromWorker[Admission]):
    compressor: str = ""


@stored("initialized")
@dataclass(frozen=True, kw_only=True, slots=True)
class Initialized(FromWorker[None]):
    """The manifest and version 0 of the parameters are in place.

    Attributes:
        buffers: whether the model has any.
        least: smallest batch that it can train on, in samples.
        epoch: the first epoch to train on, from 0; the worker's script has trained on the earlier ones.
        steps: number of steps that the script took in those.
    """

    fingerprint: bytes
    train_samples: int
    data: int = 0
    buffers: bool = False
    least: int = 1
    epoch: int = 0
    steps: int = 0


@stored("attached")
@dataclass(frozen=True, kw_only=True, slots=True)
class Attached(FromWorker[Welcome]):
    """The worker's Exchange stream is open."""


@stored("prepared")
@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(FromWorker[None]):
    """The worker has loaded its model; `version` is that of its replica, None without one.

    Attributes:
        assigned: id of the last assignment that it received.
        data: checksum of some of its training samples; 0 if they cannot be compared.
        train_samples: number of samples in its epoch; 0 not to compare it.
        drifted: version at which its replica differed from the server's, so it has none now; 0 if none.
        restored: whether it resumes from its own saved state at the server's version.
    """

    fingerprint: bytes
    version: int | None
    assigned: int = 0
    data: int = 0
    train_samples: int = 0
    drifted: int = 0
    restored: bool = False


@stored("detached")
@dataclass(frozen=True, kw_only=True, slots=True)
class Detached(FromWorker[None]):
    """The worker's stream broke; its lease still runs."""


@stored("heard")
@dataclass(frozen=True, kw_only=True, slots=True)
class KeepAlive(FromWorker[None]):
    """The worker is alive, which renews its lease.

    Attributes:
        activity: of the training thread, in a heartbeat.
        stalled_s: seconds for which that thread has made no progress.
    """

    activity: str | None = None
    stalled_s: float = 0.0


@stored("rated")
@dataclass(frozen=True, kw_only=True, slots=True)
class RatesReceived(FromWorker[None]):
    """A part of a push for this assignment has arrived, with the learning rates to step it at.

    Ignored for workers that are not members or hold another assignment: the commit rejects those pushes.
    Also ignored where no part is stepped before the commit: the worker may abandon the push, and send it
    again with other rates.

    Attributes:
        learning_rates: by parameter group; empty for those of the job.
    """

    seq: int
    assignment: int
    learning_rates: tuple[float, ...]


@stored("pushed")
@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed(FromWorker[Decided]):
    """A push is committed, and the shard has all of its parts, which are valid.

    Attributes:
        exchanged: the worker's report of an exchange of packets, in place of payloads.
        plan: number of the plan that its parts belong to.
        computing_s: seconds that its local steps took; 0 if unknown.
        learning_rates: by parameter group; empty for those of the job.
    """

    seq: int
    assignment: int
    base_version: int
    samples: int
    loss: float = 0.0
    exchanged: Exchanged | None = None
    plan: int = 1
    computing_s: float = 0.0
    learning_rates: tuple[float, ...] = ()

    @property
    def key(self) -> PushKey:
        return PushKey(self.worker, self.incarnation, self.seq)


@stored("published")
@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Event[None]):
    """The shard has carried out an `Apply`: its parameters are this version."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyStarted(Event[None]):
    """The shard has started to apply the open round, which produces `version` and can no longer be undone.

    Attributes:
        whole: whether every part of the round has been stepped.
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
    """The header of a coded packet has arrived. checksums: one for each block that it combines, if any."""

    exchange: int
    index: int
    checksums: Sequence[int] = ()


@stored("packet-relayed")
@dataclass(frozen=True, kw_only=True, slots=True)
class PacketRelayed(FromWorker[None]):
    """All of a coded packet has been forwarded."""

    exchange: int
    index: int


@stored("packet-damaged")
@dataclass(frozen=True, kw_only=True, slots=True)
class PacketDamaged(FromWorker[None]):
    """A coded packet was refused; part of it may have been forwarded."""

    exchange: int
    refusal: Refusal


@stored("copy-arrived")
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotReceived(FromWorker[None]):
    """The shard has all of a worker's snapshot. leaving: whether a worker that leaves sent it unasked."""

    version: int
    leaving: bool = False

    @property
    def key(self) -> SnapshotKey:
        return SnapshotKey(self.worker, self.incarnation, self.version)


OfExchange = PacketRelayed | PacketDamaged | SnapshotReceived


@stored("copied")
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotInstalled(Event[None]):
    """The shard has carried out an `InstallSnapshot`: its parameters are this version."""

    version: int


@stored("evaluated")
@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReported(FromWorker[None]):
    version: int
    epoch: int
    metrics: Mapping[str, float]


@stored("left")
@dataclass(frozen=True, kw_only=True, slots=True)
class Left(FromWorker[None]):
    failed: bool
    reason: str


@stored("tick")
@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(Event[None]):
    """Time has passed."""


@stored("restarted")
@dataclass(frozen=True, kw_only=True, slots=True)
class Restarted(Event[None]):
    """The server has restarted from its state folder. No stream is open, and members get time to return."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseRequested(Event[None]):
    """The server will stop, and resume later: assign nothing more. The action `Paused` follows once accepted
    pushes are applied and no round is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping(Event[None]):
    """The server shuts down. failed: because the shard can apply nothing more."""

    reason: str
    failed: bool = False


# ---- actions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInitialize:
    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Keep this version: its evaluation is the best so far."""

    epoch: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Send a member an assignment, after its version.

    has: version of the member's replica. If it is one less than the assignment's, the update suffices; None
        and other versions but the assignment's own need a snapshot.
    """

    worker: str
    assignment: Assignment
    has: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt:
    """Put the plan that the shard has prepared in force. Every push that is still arriving will be refused as
    stale, so the shard discards the parts that it has stored.

    Attributes:
        plan: number of the plan.
        version: of the parameters.
        members: connected members, with the version that each one has. They get the updates up to `version`
            before they get the plan.
    """

    plan: int
    version: int
    members: Mapping[str, int]


@stored("contribution")
@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """One push among those that produce a version.

    Attributes:
        slice: number of the slice of each part that this push contributes, where the members of a group
            divide the parts among themselves. The push may hold other slices too, from its worker's
            residual.
        weight: of the push in the sum; None for its share of the samples.
    """

    key: PushKey
    rank: int
    samples: int
    loss: float
    slice: int = 0
    weight: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """Open a round whose parts are stepped one by one, each as soon as every member's is stored. `Apply`
    closes it.

    Attributes:
        members: by id of the assignment, in rank order: worker, incarnation, and samples of the gradient.
        rate_factor: multiplies the base learning rate.
    """

    version: int
    members: Mapping[int, tuple[str, int, int]]
    rate_factor: float


@stored("vacate")
@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLost:
    """The members with these assignments are lost. Step no part of the open round until each of their slots
    has a `Substitute`, or is given up with `Exclude`."""

    assignments: tuple[int, ...]


@stored("refill")
@dataclass(frozen=True, kw_only=True, slots=True)
class Substitute:
    """Assign a lost member's slot in the open round to a worker: the same one with its old assignment, or
    another one with a new assignment. The substitute pushes only parts that have not been stepped; parts
    stored by the lost member are discarded. Precedes the `Assign` of the new assignment.

    Attributes:
        lost: id of the lost member's assignment.
        assignment: id of the substitute's.
    """

    lost: int
    assignment: int
    worker: str
    incarnation: int


@stored("without")
@dataclass(frozen=True, kw_only=True, slots=True)
class Exclude:
    """Exclude these assignments from the open round: its parts no longer wait for them, and their stored
    parts are not summed."""

    assignments: tuple[int, ...]


@stored("apply")
@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """Reduce the contributions, in this order, and turn version - 1 into version.

    Attributes:
        members: workers that get each part of the update as soon as it is made; others get the update with
            their next assignment.
        rate_factor: multiplies the base learning rate.
        weight: multiplies the mean gradient.
        opened_at: when the work was assigned.
        base_version: version that the gradient was computed at, where pushes are applied singly.
        bases: versions that the shard has to keep, because gradients are being computed at them.
        clocks_stale: clocks that the push is behind the newest one; None where these are not bounded.
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
    """A round of coded mode is complete: each worker takes its step. loss: mean over these samples."""

    samples: int
    loss: float
    opened_at: float
    redundancy: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSnapshot:
    """Ask a worker for a snapshot of its replica. apply: the exchange whose sum it applies before."""

    worker: str
    version: int
    apply: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallSnapshot:
    """Replace the server's parameters by a snapshot that has arrived."""

    key: SnapshotKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Relabel:
    """Give the server's parameters, unchanged, this version number."""

    version: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a worker's stream. final: whether the worker must not reconnect."""

    worker: str
    incarnation: int
    refusal: Refusal
    final: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Tell operators and members whom the job waits for. usual: healthy jobs wait like this too."""

    ranks: tuple[int, ...]
    seconds: float
    text: str
    usual: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReported:
    """Log the loss of a member. name: its worker and rank, for people."""

    name: str
    worker: str
    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A line for the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused:
    """The pause that was requested is complete: the server may stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The job is done; its state does not change any more."""


Action = (
    LossReported
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
    """The consequences of an event. reply: goes to the event's sender before any of the actions."""

    reply: R
    actions: list[Action]
