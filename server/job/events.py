"""What happens to the state machine, and what it wants done.

Events go in, actions come out; neither does anything by itself. `now` is seconds on any clock that only
goes forward; it comes with each event and is never read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...proto.messages import Assignment, Outcome
from ...proto.refusal import Refusal

# ---- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    worker: str
    incarnation: int
    compressor: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Initialized:
    """The manifest and version 0 of the parameters are in place."""

    worker: str
    incarnation: int
    fingerprint: bytes
    train_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """The worker's Exchange stream is open."""

    worker: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The worker has its model; `version` is that of its replica, None without one.

    assigned: id of the last assignment that it got.
    """

    worker: str
    incarnation: int
    fingerprint: bytes
    version: int | None
    assigned: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Detached:
    """The stream broke; the lease goes on."""

    worker: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """Any sign of life."""

    worker: str
    incarnation: int
    activity: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """A push is complete and its payloads are valid. `content` is opaque here.

    slice, slices: which part of each tensor it holds; 0 slices for all of it.
    """

    worker: str
    incarnation: int
    seq: int
    assignment: int
    base_version: int
    samples: int
    loss: float = 0.0
    slice: int = 0
    slices: int = 0
    content: object = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The shard has applied what was handed to it: its parameters are this version."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketBegun:
    """The first bytes of a coded packet are here."""

    worker: str
    incarnation: int
    exchange: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketRelayed:
    """A coded packet has been handed on whole."""

    worker: str
    incarnation: int
    exchange: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketDamaged:
    """A coded packet was refused; part of it may have been handed on."""

    worker: str
    incarnation: int
    exchange: int
    refusal: Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyArrived:
    """All bytes of a worker's snapshot are here. `content` is opaque."""

    worker: str
    incarnation: int
    version: int
    content: object = field(repr=False)
    leaving: bool = False


OfCoded = PacketBegun | PacketRelayed | PacketDamaged | CopyArrived


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """The server's parameters are those of a snapshot that had arrived."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    worker: str
    incarnation: int
    version: int
    epoch: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    worker: str
    incarnation: int
    failed: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping:
    """The server was told to shut down."""

    reason: str


Event = (
    Joined
    | Initialized
    | Attached
    | Prepared
    | Detached
    | Heard
    | Pushed
    | PacketBegun
    | PacketRelayed
    | PacketDamaged
    | CopyArrived
    | Copied
    | Published
    | Evaluated
    | Left
    | Tick
    | Stopping
)

# ---- actions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """Answer a Join."""

    rank: int
    version: int
    initialize: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Greet:
    """Answer a Hello."""

    worker: str
    rank: int
    version: int
    last_seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """Answer the event with a refusal; nothing has changed."""

    refusal: Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInitialize:
    worker: str


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
class Answer:
    """Tell a worker what became of its push."""

    worker: str
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """slice, slices: the part of each tensor that it speaks for, if slices is not 0. whole: all the same it
    holds all of each; outside of its slice that is what its worker had held back. weight: in the sum; None
    for its part of the samples."""

    rank: int
    samples: int
    loss: float
    slice: int = 0
    slices: int = 0
    whole: bool = False
    weight: float | None = None
    content: object = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """Reduce the contributions, in this order, and turn version - 1 into version.

    rate_factor: what the base learning rate is multiplied with. weight: what the mean gradient is.
    opened_at: when the work was given out.
    base_version: at which the gradient of a single contribution was computed, if pushes are applied singly.
    bases: other versions at which gradients are being computed, besides those not yet published.
    clocks_stale: clocks that it is behind the newest push, where they are bounded.
    """

    version: int
    contributions: tuple[Contribution, ...]
    rate_factor: float
    opened_at: float
    weight: float = 1.0
    base_version: int | None = None
    bases: frozenset[int] = frozenset()
    clocks_stale: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """Hand a packet that has begun on to these workers."""

    targets: tuple[str, ...]


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

    version: int
    content: object = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relabel:
    """The server's parameters, unchanged, are this version from now on."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """A member is gone before the job was done."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A line for the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The job is done; nothing will change any more."""


Action = (
    Admit
    | Greet
    | Lost
    | Refuse
    | RequestInitialize
    | Assign
    | Answer
    | Apply
    | Relay
    | Closed
    | RequestCopy
    | TakeCopy
    | Relabel
    | Disconnect
    | Report
    | Note
    | Finish
)
