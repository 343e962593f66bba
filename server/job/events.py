"""Events and replies, and (`actions`) actions: the interface between the state machine and the shell.

`Core.step` refuses an event, or returns a reply (of the type R of `Event[R]`) and actions, which the shell
performs in order. The time `now` is passed with each event, in seconds of any clock that never runs
backwards.

No event or action holds tensors. The shell gives the shard payloads under the key of their push, and
snapshots under their own key, before it raises the event that names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...common.stored import stored
from ...proto.messages import Exchanged, Outcome, Welcome
from ...proto.refusal import Refusal
from .actions import Action as Action
from .actions import Adopt as Adopt
from .actions import Apply as Apply
from .actions import Assign as Assign
from .actions import Best as Best
from .actions import Contribution as Contribution
from .actions import Disconnect as Disconnect
from .actions import Drop as Drop
from .actions import ExchangeCompleted as ExchangeCompleted
from .actions import Exclude as Exclude
from .actions import Finish as Finish
from .actions import InstallSnapshot as InstallSnapshot
from .actions import LossReported as LossReported
from .actions import MemberLost as MemberLost
from .actions import Note as Note
from .actions import Open as Open
from .actions import Paused as Paused
from .actions import PushKey as PushKey
from .actions import Relabel as Relabel
from .actions import Report as Report
from .actions import RequestInitialize as RequestInitialize
from .actions import RequestSnapshot as RequestSnapshot
from .actions import SnapshotKey as SnapshotKey
from .actions import Substitute as Substitute
from .actions import TellEvaluations as TellEvaluations

R = TypeVar("R")


# ---- replies -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The reply to `Joined`."""

    rank: int
    version: int
    initialize: bool  # True if the worker has to upload the initial parameters
    epoch: int  # the present epoch, from 0
    workers: int = 1  # members that share a step, or the number that the job needs to begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """The reply to `Pushed`."""

    outcome: Outcome
    repeated: bool = False  # True if the push was decided before, and this is a duplicate


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
    """A worker asks to join the job."""

    compressor: str = ""  # spec of its compressor, for the log; empty for none


@stored("initialized")
@dataclass(frozen=True, kw_only=True, slots=True)
class Initialized(FromWorker[None]):
    """The shard has version 0 of the parameters, which a worker has uploaded with its manifest.

    Attributes:
        differences: by worker that is ready already, the first difference of its model, as in `Prepared`.
    """

    fingerprint: bytes
    train_samples: int  # number of training samples in an epoch
    data: int = 0  # checksum of some training samples; 0 if they cannot be compared
    buffers: bool = False  # True if the model has buffers
    least: int = 1  # smallest batch that the model can train on, in samples
    epoch: int = 0  # first epoch to train on, from 0; the worker's script has trained on the earlier ones
    steps: int = 0  # number of steps that the script took in the earlier epochs
    epochs: int = 0  # number of epochs of the job, with the earlier ones; 0 for the server's
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
        difference: first difference of its model from the job's, in the job's model and in its own; empty if
            there is none, or it is unknown.
    """

    fingerprint: bytes
    version: int | None  # version of its replica; None if it has none
    assigned: int = 0  # id of the last assignment that it received; 0 for none
    data: int = 0  # checksum of some of its training samples; 0 if they cannot be compared
    train_samples: int = 0  # number of samples in its epoch; 0 to skip the comparison
    drifted: int = 0  # version at which its replica differed from the server's; 0 if it did not
    restored: bool = False  # True if it resumes from its own saved state at the server's version
    difference: tuple[str, str] = ("", "")
    accumulate: int = 0  # number of batches that an optimizer step of its script takes; 0 if not declared


@stored("detached")
@dataclass(frozen=True, kw_only=True, slots=True)
class Detached(FromWorker[None]):
    """The worker's stream broke; its lease still runs."""


@stored("heard")
@dataclass(frozen=True, kw_only=True, slots=True)
class KeepAlive(FromWorker[None]):
    """The worker is alive, which renews its lease."""

    activity: str | None = None  # activity of the training thread, in a heartbeat; None in other messages
    stalled_s: float = 0.0  # seconds for which the training thread has made no progress


@stored("rated")
@dataclass(frozen=True, kw_only=True, slots=True)
class RatesReceived(FromWorker[None]):
    """The first part of a push has arrived; the push has these learning rates for its step.

    Ignored for workers that are not members or hold another assignment: the commit rejects those pushes. Also
    ignored where no part is stepped before the commit: the worker may abandon the push, and send it again
    with other rates.
    """

    seq: int
    assignment: int
    learning_rates: tuple[float, ...]  # learning rates by parameter group; empty for those of the job


@stored("pushed")
@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed(FromWorker[Decided]):
    """A push is committed, and the shard has all of its parts, which are valid."""

    seq: int
    assignment: int  # id of the assignment that it answers
    base_version: int  # version at which it was computed
    samples: int  # number of samples that it stands for; 0 for a skipped step
    loss: float | None = None  # mean training loss over these samples; None if unknown
    exchanged: Exchanged | None = None  # report of the exchange; None where pushes carry payloads
    plan: int = 1  # number of the plan that its parts belong to
    computing_s: float = 0.0  # seconds that its local steps took; 0 if unknown
    learning_rates: tuple[float, ...] = ()  # learning rates by parameter group; empty for those of the job
    local_rates: tuple[float, ...] = ()  # of a script's last local step; empty for other steps
    batch: int = 0  # checksum of its batch, which other workers should not have; 0 if it is not compared
    batches: int = 0  # number of the assignment's batches that the push stands for, from the first; 0 for all
    steps: int = 0  # number of optimizer steps that a script has taken with them; 0 if unknown

    @property
    def key(self) -> PushKey:
        """Identity of the push."""
        return PushKey(self.worker, self.incarnation, self.seq)


@stored("more-wanted")
@dataclass(frozen=True, kw_only=True, slots=True)
class MoreWanted(FromWorker[None]):
    """A worker has computed all batches of its assignment, and its script accumulates gradients of more."""

    assignment: int
    batches: int  # number of batches that the worker has of it
    wanted: int = 1  # number of further batches
    steps: int = 0  # local steps taken with these batches


@stored("published")
@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Event[None]):
    """The shard has carried out an `Apply`: its parameters are at this version."""

    version: int  # the new version


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyStarted(Event[None]):
    """The shard has started to apply the open round, which can no longer be rolled back."""

    version: int  # version that the round produces
    whole: bool = False  # True if every part of the round has been stepped


@stored("planned")
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrepared(Event[None]):
    """The shard has prepared the plan with the next number."""


@stored("packet-begun")
@dataclass(frozen=True, kw_only=True, slots=True)
class PacketStarted(FromWorker[Targets]):
    """The header of a coded packet has arrived."""

    exchange: int
    index: int  # index of the packet in the exchange's plan
    checksums: Sequence[int] = ()  # of the blocks that it combines; empty where these are not compared


@stored("packet-relayed")
@dataclass(frozen=True, kw_only=True, slots=True)
class PacketRelayed(FromWorker[None]):
    """All of a coded packet has been forwarded."""

    exchange: int
    index: int  # index of the packet in the exchange's plan


@stored("packet-damaged")
@dataclass(frozen=True, kw_only=True, slots=True)
class PacketDamaged(FromWorker[None]):
    """A coded packet was refused; some of its bytes may have been forwarded."""

    exchange: int
    refusal: Refusal


@stored("copy-arrived")
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotReceived(FromWorker[None]):
    """The shard has all of a worker's snapshot."""

    version: int  # version of the parameters in the snapshot
    leaving: bool = False  # True if the worker sent it without a request, because it leaves

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
    """The worker leaves the job."""

    failed: bool  # True if it leaves because of an error
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
    """The server shuts down."""

    reason: str
    failed: bool = False  # True if the shard has failed and can apply no more pushes


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Generic[R]):
    """The consequences of an event."""

    reply: R  # reply to the event's sender, which is sent before any action is performed
    actions: list[Action]  # actions for the shell, in order
