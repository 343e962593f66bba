"""The messages of gradwire.v4 as plain dataclasses. Made from gradwire.proto by `make stubs`: do not edit.

gradwire.proto describes each field and value. Server and worker work with these classes and never see one of
protobuf's; `convert` maps between the two. All may be in stored files, under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.naming import LabelledEnum
from ..common.stored import stored_all

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Reason(LabelledEnum):
    """The reason of a refusal. The gRPC status code follows from it."""

    UNSPECIFIED = 0
    MALFORMED = 1
    PROTOCOL_VERSION = 2
    UNKNOWN_JOB = 3
    JOB_FINISHED = 4
    MODEL = 5
    FENCED = 6
    DUPLICATE_WORKER = 7
    NOT_A_MEMBER = 8
    NOT_INITIALIZED = 9
    ALREADY_INITIALIZED = 10
    TENSOR = 11
    SHAPE = 12
    DTYPE = 13
    ELEMENTS = 14
    PAYLOAD = 15
    NON_FINITE = 16
    CHECKSUM = 17
    CHUNK = 18
    SIZE = 19
    SEQUENCE = 20
    STALE = 21
    PROTECTED = 22
    STOPPING = 23
    PACKET = 24
    PLAN = 26
    REDUNDANT = 25
    TOKEN = 110
    NAME = 111
    GROUP = 27


class EntryKind(LabelledEnum):
    """The kind of a state_dict entry that is not a trainable parameter."""

    UNSPECIFIED = 0
    BUFFER = 1
    FROZEN = 2
    TIED = 3


class DenseEncoding(LabelledEnum):
    """A floating-point format, little-endian."""

    UNSPECIFIED = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3


class CodeEncoding(LabelledEnum):
    """The meaning of the codes of a quantized payload."""

    UNSPECIFIED = 0
    SIGNED_4BIT = 1
    SIGNED_2BIT = 2
    BINARY = 3
    VOTE = 4
    CODEBOOK_8BIT = 5


class IndexEncoding(LabelledEnum):
    """The coding of a sparse payload's indices."""

    UNSPECIFIED = 0
    GAPS = 1
    BITMAP = 2
    SEEDED = 3
    UNIFORM = 4


class Content(LabelledEnum):
    """The effect of an update's payload on the elements of a replica."""

    UNSPECIFIED = 0
    VALUES = 1
    DELTA = 2
    GRADIENT = 3


class Decision(LabelledEnum):
    """The server's decision on a push."""

    UNSPECIFIED = 0
    ACCEPTED = 1
    REFUSED = 2


class Phase(LabelledEnum):
    """The phase of the job."""

    UNSPECIFIED = 0
    EMPTY = 1
    GATHERING = 2
    RUNNING = 3
    FINISHING = 4
    FINISHED = 5
    STOPPING = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A refusal of a call or a push: text for people, and fields by which a program decides."""

    reason: Reason
    message: str
    worker: str = ""
    field: str = ""
    limit: str = ""
    value: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDescription:
    """The identity and settings of a job. The server sends them to every worker that joins."""

    id: str
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that the server enforces on a member."""

    chunk_bytes: int
    lease_seconds: float
    heartbeat_seconds: float
    progress_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One tensor of the manifest: a parameter, or a tensor of the optimizer's state if workers run the
    optimizer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    state: bool = False
    group: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that share an optimizer and a learning rate, as in torch's param_groups."""

    optimizer: str
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelManifest:
    """The description of a model: every parameter tensor, in the order in which payloads refer to them."""

    tensors: tuple[Tensor, ...]
    train_samples: int
    fingerprint: bytes
    groups: tuple[Group, ...] = ()
    entries: tuple[Entry, ...] = ()
    data: int = 0
    clip_norm: float = 0.0
    epochs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry of the model's state_dict that is not a trainable parameter."""

    name: str
    kind: EntryKind
    shape: tuple[int, ...] = ()
    dtype: str = ""
    tied_to: str = ""
    digest: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A worker's request to become a member of the job."""

    worker: str
    incarnation: int
    software: str = ""
    compressors: tuple[str, ...] = ()
    compressor: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinResponse:
    """The server's answer to a worker that has become a member."""

    job: JobDescription
    limits: Limits
    rank: int
    version: int
    initialize: bool
    software: str = ""
    epoch: int = 0
    workers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeHeader:
    """The header of an Initialize upload: its sender and the contents of the chunks that follow."""

    job: str
    worker: str
    incarnation: int
    manifest: ModelManifest
    least_samples: int = 0
    moments: tuple[Moment, ...] = ()
    epoch: int = 0
    steps: int = 0
    digest: bytes = b""
    held: int = 0
    asks: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One tensor of the optimizer's state for one parameter, such as Adam's "exp_avg". It is float32 with
    as many elements as the parameter, except "step", the number of steps taken, which is one number.
    """

    tensor: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GetOptimizerRequest:
    """A request for the state of the server's optimizer."""

    job: str
    worker: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerHeader:
    """The header of a GetOptimizer download: the contents of the chunks that follow."""

    version: int
    moments: tuple[Moment, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeResponse:
    """The server's answer to an Initialize upload that it has received completely, or to a header that
    asks.
    """

    version: int
    replaced: bool = False
    held: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StateHeader:
    """The header of a PutState upload or a GetState download: its sender and the contents of the chunks
    that follow.
    """

    job: str
    worker: str = ""
    incarnation: int = 0
    seq: int = 0
    collection: int = 0
    epoch: int = 0
    frozen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PutStateResponse:
    """The server's answer to a PutState upload that it has stored."""



@dataclass(frozen=True, kw_only=True, slots=True)
class GetStateRequest:
    """A request for the model's buffers and frozen parameters."""

    job: str
    epoch: int = 0
    frozen: bytes = b""
    worker: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRequest:
    """A client's request to download the parameters."""

    job: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Several messages of an Exchange stream in one gRPC message, because each gRPC message costs as much
    as many bytes. The receiver reads them as if they had arrived one by one.
    """

    messages: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchHeader:
    """The header of a Fetch download: the contents of the chunks that follow."""

    job: str
    manifest: ModelManifest
    version: int
    chunk_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """A piece of the payload bytes of one transfer. Chunks of a transfer arrive in order."""

    transfer: int
    offset: int
    crc32c: int
    data: npt.NDArray[np.uint8]
    packed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseHeader:
    """The description of a dense payload, which holds every element."""

    format: DenseEncoding


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedHeader:
    """The description of a quantized payload: codes of a fixed number of bits, in 32-bit words padded with
    code 0.
    """

    format: CodeEncoding
    levels: tuple[float, ...]
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearHeader:
    """The description of a linear payload: one float32 scale for each bucket of elements, then signed
    integers of a fixed number of bits, of which the most negative is never sent, or signs.
    """

    bits: int
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseHeader:
    """The description of a sparse payload, which holds some elements; all others are zero. First come the
    bytes of the indices, then those of the values.
    """

    count: int
    coding: IndexEncoding
    low_bits: int = 0
    index_bytes: int = 0
    seed: int = 0
    values: DenseHeader | QuantizedHeader | LinearHeader | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedHeader:
    """The description of a projected payload: the coordinates of a whole tensor in the job's bases of the
    version.
    """

    count: int
    exponent: int = 0
    values: DenseHeader | QuantizedHeader | LinearHeader | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsentHeader:
    """The description of a payload without elements and bytes. In a push, it stands for whole tensors
    without a gradient, as far as they lie in the part; in an update, for elements that do not change.
    """



@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadHeader:
    """The description of one payload of a part: some consecutive elements. Their bytes follow those of the
    payloads before.
    """

    elements: int
    kind: DenseHeader | QuantizedHeader | LinearHeader | SparseHeader | AbsentHeader | ProjectedHeader | None
    content: Content = Content.UNSPECIFIED


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message on an Exchange stream, which binds it to one worker. From here on the worker's
    lease is renewed, even while it still loads its task and data.
    """

    job: str
    worker: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker's notice that it has its model and can take assignments. It is sent again after a
    reconnect.
    """

    fingerprint: bytes
    train_samples: int = 0
    version: int | None = None
    assigned: int = 0
    plan: int = 0
    data: int = 0
    drifted: int = 0
    restored: bool = False
    model: ModelManifest | None = None
    accumulate: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class More:
    """A worker's request for further batches of its assignment: its script has computed all of them, and
    has not called optimizer.step(). The server sends the assignment again, with more batches or as
    exhausted, or another assignment.
    """

    assignment: int
    batches: int
    wanted: int
    steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PartHeader:
    """The header of a part of a push; chunks with transfer seq * 2^16 + part follow. If its plan is older
    than the job's, the server drops the part and will refuse the push as stale.
    """

    seq: int
    assignment: int
    part: int
    plan: int
    payloads: tuple[PayloadHeader, ...]
    waited: bool = False
    learning_rates: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The commit of a push, sent after all of its parts. Without it the push does not count."""

    seq: int
    assignment: int
    base_version: int
    samples: int
    parts: int
    digest: int
    loss: float | None = None
    exchanged: Exchanged | None = None
    plan: int = 0
    computing_seconds: float = 0.0
    local_rates: tuple[float, ...] = ()
    batch: int = 0
    batches: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Abandon:
    """A worker's notice that it gives up a push: the server drops its parts. The next push answers the
    same assignment.
    """

    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """A worker's result of an exchange of packets. Its replica takes the step when a later assignment says
    so.
    """

    crc32c: int
    computing_seconds: float = 0.0
    clipped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """The header of one packet of an exchange: a sum of slices of gradients in fixed point, little-endian
    uint32. The server relays it, chunk by chunk, to its targets. Chunks with transfer 2^63 + exchange *
    2^32 + index follow.
    """

    exchange: int
    index: int
    elements: int
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The header of a worker's replica: all tensors of the manifest as float32, sent when the server asks
    for it. Chunks with transfer = version follow.
    """

    version: int
    leaving: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A worker's measurement of its steps: means over the last ones. The server divides the model by it."""

    steps: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    densities: tuple[float, ...]
    sent_bytes: int
    compressing_seconds: float
    step_seconds: float
    processor_share: float = 0.0
    machine: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A worker's sign of life, sent at least every Limits.heartbeat_seconds."""

    activity: str = ""
    stalled_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The metrics that the worker chosen for an evaluation measured on the validation data."""

    version: int
    epoch: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A script's request to end the job early. The server evaluates the version that is complete then, and
    ends normally.
    """

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """A worker's notice that it leaves the job. The server expects nothing more of it."""

    failed: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The server's answer to Hello."""

    rank: int
    version: int
    last_seq: int
    newest: int = 0
    stored: tuple[Stored, ...] = ()
    plan: int = 0
    evaluations: Evaluations | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """The results of evaluations: in Welcome those so far, later each new one. The server sends them to
    scripts.
    """

    results: tuple[EpochStatus, ...] = ()
    best: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The parts of an undecided push that the server has stored, so that the worker need not send them
    again. If the plan has a credit, it is also sent for each part as soon as it is stored, or no longer
    needed.
    """

    seq: int
    parts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnnouncement:
    """The division of the model into parts, from the next update and the next assignment on. The flat
    order is the elements of all tensors, end to end in manifest order. A unit is one or several
    neighbouring tensors. A unit is one part, but a unit of one tensor may be cut into several. Parts are
    numbered from 0, unit by unit, ascending within a unit.
    """

    number: int
    tensors: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    merged: bool = False
    turns: tuple[int, ...] = ()
    credit: int = 0
    norms: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The header of an update of one part: its new values, or their change. Chunks with transfer version *
    2^16 + part follow. A replica is at the version when it has all parts.
    """

    version: int
    part: int
    plan: int
    whole: bool = False
    payloads: tuple[PayloadHeader, ...]
    beside: tuple[Beside, ...] = ()
    learning_rates: tuple[float, ...] = ()
    clip: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """State of the job of one tensor, beside the tensor's values: of its bases, or of the optimizer."""

    tensor: int
    name: str = ""
    start: int = 0
    end: int = 0
    payload: PayloadHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Consecutive samples in the order of an epoch, which is a permutation drawn from (seed, epoch)."""

    start: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A worker's task at one version. A worker has one assignment at a time. If it holds samples, the
    worker answers it with one push.
    """

    version: int
    epoch: int = 0
    position: int = 0
    world: int = 0
    evaluate_epoch: int = 0
    finished: bool = False
    id: int
    ranges: tuple[Range, ...] = ()
    progress: float = 0.0
    learning_rate: float = 0.0
    slice: int = 0
    slices: int = 0
    stragglers: int = 0
    coding: Coding | None = None
    apply: int = 0
    pace: int = 0
    parts: tuple[int, ...] = ()
    plan: int = 0
    next: tuple[Range, ...] = ()
    checked: int = 0
    checksum: int = 0
    collection: int = 0
    take_buffers: bool = False
    total_steps: int = 0
    earlier_steps: int = 0
    local_rates: tuple[float, ...] = ()
    local_steps: int = 0
    trained: bool = False
    evaluations: int = 0
    batches: tuple[int, ...] = ()
    steps: int = 0
    accumulate: int = 0
    exhausted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """The parameters of coded mode for one exchange. From these numbers both sides derive the blocks of
    the assigned samples, the workers that compute each, and the packets to exchange. Workers are numbered
    by Assignment.position, out of Assignment.world.
    """

    exchange: int
    redundancy: int
    senders: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a push, sent to its worker once the server has decided."""

    seq: int
    decision: Decision
    version: int = 0
    refusal: Refusal | None = None
    part: int | None = None
    counted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unwanted:
    """A hint that the server would refuse this push in its present state, because its round has closed or
    other workers compute its samples. The worker stops sending its parts; the outcome follows its commit.
    """

    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """The server's request, while it saves its own state, that the worker saves its state at this version
    before it computes anything else.
    """

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A worker's answer to Save, once its state is written."""

    version: int
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """The workers for which all other workers wait, and for how long."""

    ranks: tuple[int, ...]
    seconds: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRequest:
    """The server's request for a snapshot of the replica. A worker whose replica is at another version
    does not answer.
    """

    version: int
    apply: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeRequest:
    """The server's request to upload the manifest and the initial parameters, because the worker that it
    asked before is gone.
    """



@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRequest:
    """A request for the state of the job."""

    measured: bool = False
    losses: bool = False
    departed: bool = False
    padding: bytes = b""
    echo: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The server's measurements of its job's steps, as inputs of planning."""

    tensors: tuple[Tensor, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    part_seconds: float
    byte_seconds: float
    compressor: str
    fusion: str
    order: str
    part_bytes: int
    cores: int
    processor_share: float = 0.0
    square_norms: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """The state of one member, as the server sees it."""

    worker: str
    rank: int
    attached: bool
    heard_seconds: float
    activity: str
    compressor: str
    pushes: int
    stalled_seconds: float = 0.0
    suspended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LostStatus:
    """A member that was lost before the job was done."""

    worker: str
    rank: int
    reason: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStatus:
    """The result of one evaluation, as part of StatusResponse."""

    epoch: int
    version: int
    metrics: Mapping[str, float]
    seconds: float = 0.0
    epochs: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPoint:
    """The mean training loss of several consecutive versions."""

    version: int
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that the server has received (up) and sent (down)."""

    wire_bytes_up: int = 0
    wire_bytes_down: int = 0
    raw_bytes_up: int = 0
    raw_bytes_down: int = 0
    payload_bytes_up: int = 0
    compressed_payload_bytes_up: int = 0
    compressed_raw_bytes_up: int = 0
    payload_bytes_down: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusResponse:
    """The state of the job: members, progress, evaluations and traffic."""

    job: JobDescription
    phase: Phase
    waiting: str
    version: int
    epoch: int
    epoch_progress: float
    members: tuple[MemberStatus, ...]
    lost: tuple[LostStatus, ...]
    departed: tuple[MemberStatus, ...] = ()
    evaluations: tuple[EpochStatus, ...]
    traffic: Traffic
    pushes: int
    refused_pushes: int
    train_loss: float
    training_seconds: float
    parameters_sha256: str
    software: str
    local_steps: int = 0
    largest_staleness: int = 0
    redundancy: int = 0
    uncoded_exchanges: int = 0
    clipped_elements: int = 0
    repeated_samples: int = 0
    measured: Measured | None = None
    step_seconds: float = 0.0
    predicted_step_seconds: float = 0.0
    learning_rate: float = 0.0
    losses: tuple[LossPoint, ...] = ()
    unix_seconds: float = 0.0
    padding: bytes = b""


InitializeMessage = Chunk | InitializeHeader
OptimizerMessage = Chunk | OptimizerHeader
StateMessage = Chunk | StateHeader
FetchMessage = Chunk | FetchHeader
WorkerMessage = (
    Chunk | PartHeader | Heartbeat | Hello | Evaluation | Leave | Ready | Packet | Snapshot | Commit | Abandon | Profile | Saved | Stop | More | Batch
)
ServerMessage = (
    Chunk | Update | Assignment | Outcome | Welcome | Waiting | InitializeRequest | Packet | SnapshotRequest | PlanAnnouncement | Unwanted | Stored | Save | Evaluations | Batch
)

stored_all(globals(), {"ModelManifest": "Manifest"})
