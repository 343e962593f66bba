"""Events, the answers to them, and actions: what passes between the state machine and the shell.

An event goes in. It is refused, or answered with a reply (`Event[R]` says of which type) and followed by
actions, which the shell carries out. `now` is seconds on any clock that only goes forward; it comes with each
event and is never read here.

No event or action holds tensors: the shell hands payloads to the shard under the key of their push, and
snapshots under the key of theirs, before it raises the event that names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ...proto.messages import Assignment, Exchanged, Outcome, Welcome
from ...proto.refusal import Refusal

R = TypeVar("R")


class PushKey(NamedTuple):
    """Names one push of a job."""

    worker: str
    incarnation: int
    seq: int


class CopyKey(NamedTuple):
    """Names a worker's snapshot of a version."""

    worker: str
    incarnation: int
    version: int


# ---- replies -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Answers `Joined`. initialize: the worker has to upload the initial parameters. epoch: that samples are
    given out of, from 0."""

    rank: int
    version: int
    initialize: bool
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """Answers `Pushed`. repeated: the outcome of a push that had come before."""

    outcome: Outcome
    repeated: bool = False


Targets = tuple[str, ...] | None  # workers that get a packet; None: it is of no use

# ---- events ------------------------------------------------------------------------------------


class Event(Generic[R]):
    """R: type of the reply."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FromWorker(Event[R]):
    """What a worker has said or done."""

    worker: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(FromWorker[Admission]):
    compressor: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Initialized(FromWorker[None]):
    """The manifest and version 0 of the parameters are in place. buffers: whether the model has any. least:
    samples that a batch of it must have."""

    fingerprint: bytes
    train_samples: int
    data: int = 0
    buffers: bool = False
    least: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached(FromWorker[Welcome]):
    """The worker's Exchange stream is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(FromWorker[None]):
    """The worker has its model; `version` is that of its replica, None without one.

    assigned: id of the last assignment that it got. data: checksum of some of its training samples; 0 if they
    cannot be compared. drifted: version at which its replica was not the server's, so that it has none now; 0
    if it never was. restored: it goes on from what it had written down at the server's version.
    """

    fingerprint: bytes
    version: int | None
    assigned: int = 0
    data: int = 0
    drifted: int = 0
    restored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Detached(FromWorker[None]):
    """The stream broke; the lease goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard(FromWorker[None]):
    """Any sign of life. A heartbeat says what the training thread does, and for how long without progress."""

    activity: str | None = None
    still_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rated(FromWorker[None]):
    """A part of a push for this assignment has come, for a step at these learning rates, by parameter group;
    none: at those of the job. Of who is no member, or has other work, nothing is said before the commit; nor
    where nothing is stepped before that: the push may be abandoned, and come again at other rates."""

    seq: int
    assignment: int
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed(FromWorker[Decided]):
    """A push is committed, and the shard has all of its parts, which are valid.

    exchanged: what came of an exchange of packets, in place of payloads. plan: that its parts are of.
    computing_s: seconds that the worker says its local steps took; 0 if it does not say. learning_rates: as
    in `Rated`.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Event[None]):
    """The shard has applied what was handed to it: its parameters are this version."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun(Event[None]):
    """The shard steps a part of the round that is open: there is no way back. whole: it is the last one."""

    version: int
    whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(Event[None]):
    """The shard has a plan ready under the next number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketBegun(FromWorker[Targets]):
    """The first bytes of a coded packet are here. checksums: of the blocks behind its terms."""

    exchange: int
    index: int
    checksums: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketRelayed(FromWorker[None]):
    """A coded packet has been handed on whole."""

    exchange: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketDamaged(FromWorker[None]):
    """A coded packet was refused; part of it may have been handed on."""

    exchange: int
    refusal: Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyArrived(FromWorker[None]):
    """The shard has all bytes of a worker's snapshot. leaving: nobody had asked for it."""

    version: int
    leaving: bool = False

    @property
    def key(self) -> CopyKey:
        return CopyKey(self.worker, self.incarnation, self.version)


OfExchange = PacketRelayed | PacketDamaged | CopyArrived


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied(Event[None]):
    """The server's parameters are those of a snapshot that had arrived."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(FromWorker[None]):
    version: int
    epoch: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Left(FromWorker[None]):
    failed: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(Event[None]):
    """Time has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarted(Event[None]):
    """The server was away, and has read what it had written down: no stream is open, and no member is to
    blame for its silence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing(Event[None]):
    """The server is about to stop, and to go on later: what has begun is to end, and nothing to begin.
    Answered by `Paused`, at once or later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping(Event[None]):
    """The server shuts down. failed: because nothing can be applied any more."""

    reason: str
    failed: bool = False


# ---- actions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInitialize:
    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """What was evaluated of a version at the end of an epoch is better than all before."""

    epoch: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Tell a member what to do at a version, after it has got the version.

    has: version of the member's replica. One less than the assignment's: the update will do; None or
        anything else but the assignment's own: it needs a snapshot.
    """

    worker: str
    assignment: Assignment
    has: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt:
    """From now on the model is divided by the plan that the shard has ready. No push is open but those that
    are refused as stale whatever comes of them, so what is stored of pushes is of no use.

    plan: its number. version: of the parameters. members: who can be told, and the version that each has:
        they get the updates up to the present one before they get the plan.
    """

    plan: int
    version: int
    members: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """One push of an application.

    slice: of the parts, that it speaks for, if the members of a group divide these among them. It may hold
    others
    all the same: what its worker had held back. weight: in the sum; None for its part of the samples.
    """

    key: PushKey
    rank: int
    samples: int
    loss: float
    slice: int = 0
    weight: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """A round has opened whose parts may be stepped one by one, each as soon as every member has stored it.
    `Apply` closes it.

    members: by id of the assignment, in rank order: worker, incarnation, and samples behind the gradient.
    rate_factor: as in `Apply`.
    """

    version: int
    members: Mapping[int, tuple[str, int, int]]
    rate_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Vacate:
    """The members with these assignments are lost: no part of the round that is open is stepped until
    somebody has each place, or it is given up."""

    assignments: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refill:
    """The place of a member that was lost is taken: by itself, with the same assignment, or by another one,
    that is to push the parts that are not stepped. Goes before the `Assign` of that."""

    lost: int
    assignment: int
    worker: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Without:
    """Parts of the round that is open do not wait for the members with these assignments any more."""

    assignments: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """Reduce the contributions, in this order, and turn version - 1 into version.

    members: workers that get each part of the update as soon as it is there; others get it with their next
    assignment.
    rate_factor: what the base learning rate is multiplied with. weight: what the mean gradient is.
    opened_at: when the work was given out.
    base_version: at which the gradient of a single contribution was computed, if pushes are applied singly.
    bases: other versions at which gradients are being computed, besides those not yet published, if the
    shard has to keep them.
    clocks_stale: clocks that it is behind the newest push, where they are bounded.
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
    """Have the shard forget a push or a snapshot that will not be applied."""

    key: PushKey | CopyKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """A round is over whose steps the workers take. samples: behind the step. loss: their mean."""

    samples: int
    loss: float
    opened_at: float
    redundancy: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCopy:
    """Ask a worker for a snapshot of its replica, after it has applied the sum of an exchange."""

    worker: str
    version: int
    apply: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeCopy:
    """Make a snapshot that has arrived the server's parameters."""

    key: CopyKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Relabel:
    """The server's parameters, unchanged, are this version from now on."""

    version: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a worker's stream. final: it shall not come back; otherwise it may reconnect."""

    worker: str
    incarnation: int
    refusal: Refusal
    final: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Tell operators and members whom the job waits for."""

    ranks: tuple[int, ...]
    seconds: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A member is gone before the job was done. name: worker and rank as a person reads them."""

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
    """Nothing is under way, and nothing will be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The job is done; nothing will change any more."""


Action = (
    Lost
    | RequestInitialize
    | Assign
    | Adopt
    | Open
    | Vacate
    | Refill
    | Without
    | Apply
    | Drop
    | Closed
    | RequestCopy
    | TakeCopy
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
    """What follows from an event. reply: goes to the event's sender before anything of the actions."""

    reply: R
    actions: list[Action]
