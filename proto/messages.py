"""The messages of gradwire.v4 as plain dataclasses. Made from gradwire.proto by `make stubs`: do not edit.

Server and worker work with these and never see a protobuf class; `convert` maps between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.naming import LabelledEnum
from ..common.stored import stored

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@stored("Reason")
class Reason(LabelledEnum):
    """The reason of a refusal. The gRPC status code follows from it."""

    UNSPECIFIED = 0
    MALFORMED = 1  # not a message of this protocol, or a required field is missing
    PROTOCOL_VERSION = 2  # the two sides speak different protocol versions
    UNKNOWN_JOB = 3  # the server runs another job, or was restarted
    JOB_FINISHED = 4  # the job has completed its last epoch
    MODEL = 5  # the worker's manifest differs from the job's
    FENCED = 6  # a newer incarnation of this worker has joined
    DUPLICATE_WORKER = 7  # another live process uses this worker id
    NOT_A_MEMBER = 8  # the worker has never joined, has left, or its lease has expired
    NOT_INITIALIZED = 9  # the job has no parameters yet
    ALREADY_INITIALIZED = 10  # the job already has its parameters
    TENSOR = 11  # unknown, repeated, missing or out-of-order tensor
    SHAPE = 12  # shape of a tensor that the server does not accept
    DTYPE = 13  # dtype of a tensor other than float32
    ELEMENTS = 14  # number of elements that differs from the manifest
    PAYLOAD = 15  # payload that breaks the rules of its kind: code, padding, levels
    NON_FINITE = 16  # NaN or infinity in values, levels or metrics
    CHECKSUM = 17  # bytes that were changed in transit
    CHUNK = 18  # chunk of the wrong size, offset or transfer
    SIZE = 19  # size or count above a limit of the server
    SEQUENCE = 20  # a gap in seq, or a seq older than the outcomes that the server remembers
    STALE = 21  # push computed at a version whose round has closed
    PROTECTED = 22  # remote peer in protected mode; the server's --insecure admits it
    STOPPING = 23  # the server is shutting down
    PACKET = 24  # coded packet that another worker has to send
    PLAN = 26  # part that the job's plan does not have, or a plan that does not fit the model
    REDUNDANT = 25  # push without which the round was complete; none of it is to be sent again
    TOKEN = 110  # missing token, or one that is not valid for this worker
    NAME = 111  # invalid worker id, or invalid name of a metric, tensor or compressor
    GROUP = 27  # invalid parameter group, or learning rates on which members disagree


@stored("EntryKind")
class EntryKind(LabelledEnum):
    """The kind of a state_dict entry that is not a trainable parameter."""

    UNSPECIFIED = 0
    BUFFER = 1  # tensor that training changes, such as BatchNorm's running statistics
    FROZEN = 2  # parameter that is not trained
    TIED = 3  # another name of an earlier tensor or entry, without a value of its own


@stored("DenseEncoding")
class DenseEncoding(LabelledEnum):
    """A floating-point format, little-endian."""

    UNSPECIFIED = 0
    FLOAT32 = 1  # 4 bytes per element
    BFLOAT16 = 2  # 2 bytes per element
    FLOAT16 = 3  # 2 bytes per element


@stored("CodeEncoding")
class CodeEncoding(LabelledEnum):
    """The meaning of the codes of a quantized payload."""

    UNSPECIFIED = 0
    # code 0: zero; 1 to 7: minus levels[0] to levels[6]; 9 to 15: plus levels[0] to levels[6]; 8: never sent
    SIGNED_4BIT = 1
    SIGNED_2BIT = 2  # code 00: zero; 10: minus levels[0]; 11: plus levels[0]; 01: never sent
    BINARY = 3  # code 0: levels[0]; 1: levels[1]; each may have any sign
    VOTE = 4  # code 0: minus levels[0]; 1: plus levels[0]; votes are counted, not added
    CODEBOOK_8BIT = 5  # code 0 to 255: levels[0] to levels[255], which may have any sign and order


@stored("IndexEncoding")
class IndexEncoding(LabelledEnum):
    """The coding of a sparse payload's indices."""

    UNSPECIFIED = 0
    GAPS = 1  # Golomb-Rice codes of the gaps: all low parts, then all quotients in unary
    BITMAP = 2  # one bit per element
    SEEDED = 3  # no bytes: one index in each of `count` equal parts, drawn from the seed
    UNIFORM = 4  # no bytes: `count` different indices, drawn from the seed


@stored("Content")
class Content(LabelledEnum):
    """The effect of an update's payload on the elements of a replica."""

    UNSPECIFIED = 0
    VALUES = 1  # values that replace the elements; a sparse payload replaces only those that it holds
    DELTA = 2  # differences that are added to the elements


@stored("Decision")
class Decision(LabelledEnum):
    """The server's decision on a push."""

    UNSPECIFIED = 0
    ACCEPTED = 1  # the push counts
    REFUSED = 2  # the push does not count


@stored("Phase")
class Phase(LabelledEnum):
    """The phase of the job."""

    UNSPECIFIED = 0
    EMPTY = 1  # the job has no parameters yet
    GATHERING = 2  # the server waits for enough members
    RUNNING = 3  # rounds open and close
    FINISHING = 4  # the last version is published, its evaluation is outstanding
    FINISHED = 5  # the job is done
    STOPPING = 6  # the server is shutting down


@stored("Refusal")
@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A refusal of a call or a push: text for people, and fields by which a program decides."""

    reason: Reason  # reason, for programs
    message: str  # one sentence for people that names worker, field, limit and value
    worker: str = ""  # Id of the refused worker; empty if unknown
    field: str = ""  # Name of the refused field or tensor; empty if there is none
    limit: str = ""  # Description of the values that would have been accepted; empty if there is none
    value: str = ""  # Value that was received; empty if there is none
    remedy: str = ""  # Action that mends it; empty if there is none


@stored("JobDescription")
@dataclass(frozen=True, kw_only=True, slots=True)
class JobDescription:
    """The identity and settings of a job. The server sends them to every worker that joins."""

    id: str  # id of the job, unique per server start
    # options that settings.py declares as the job's, and the mode's kind of work as "work"; values as text
    settings: Mapping[str, str]


@stored("Limits")
@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that the server enforces on a member."""

    chunk_bytes: int  # bytes of payload in every chunk but the last, which may be shorter
    lease_seconds: float  # seconds without a message after which a member is lost
    heartbeat_seconds: float  # longest interval between two heartbeats, in seconds
    # Seconds without progress of the training thread after which a member is suspended; 0: never
    progress_seconds: float = 0.0


@stored("Tensor")
@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One tensor of the manifest: a parameter, or a tensor of the optimizer's state if workers run the
    optimizer.
    """

    name: str  # name of the tensor, unique in the manifest
    shape: tuple[int, ...]  # number of elements in each dimension; empty for a scalar
    dtype: str  # always "float32"
    state: bool = False  # True for a tensor of the optimizer's state, false for a parameter
    group: int = 0  # Number of the tensor's parameter group, from 0


@stored("Group")
@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that share an optimizer and a learning rate, as in torch's param_groups. A part holds
    tensors of one group.
    """

    optimizer: str  # optimizer with its hyperparameters, as a spec: "adamw:weight_decay=0.1"
    learning_rate: float | None = None  # base learning rate that the job's schedule scales; absent: the job's


@stored("Manifest")
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelManifest:
    """The description of a model: every parameter tensor, in the order in which payloads refer to them."""

    tensors: tuple[Tensor, ...]  # all tensors, parameters first
    train_samples: int  # number of samples in one epoch
    fingerprint: bytes  # SHA-256 over names, shapes, dtypes, groups and entries
    # Parameter groups, by number; none: one group, with the job's optimizer and learning rate
    groups: tuple[Group, ...] = ()
    entries: tuple[Entry, ...] = ()  # Entries of the model's state_dict besides the tensors, in its order
    data: int = 0  # Checksum of some of the training samples; 0: they cannot be compared


@stored("Entry")
@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry of the model's state_dict that is not a trainable parameter."""

    name: str  # name of the entry, unique among tensors and entries
    kind: EntryKind  # kind of the entry
    shape: tuple[int, ...] = ()  # Number of elements in each dimension; empty for a scalar or a tied entry
    dtype: str = ""  # Name of torch's dtype, such as "int64"; empty for a tied entry
    tied_to: str = ""  # Name of the tensor or entry that a tied entry repeats; empty for other kinds


@stored("JoinRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A worker's request to become a member of the job."""

    worker: str  # id of the worker, unique in the job
    incarnation: int  # number of the worker process, greater than that of every earlier process with this id
    software: str = ""  # Release of gradwire on the worker, for messages; empty if unknown
    compressors: tuple[str, ...] = ()  # Names of the compressors that the worker can use
    compressor: str = ""  # Spec of the compressor that the worker will use; empty if not decided


@stored("JoinResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinResponse:
    """The server's answer to a worker that has become a member."""

    job: JobDescription  # description of the job that the worker has joined
    limits: Limits  # limits that the server enforces
    rank: int  # rank of the member, from 0: the smallest number that no other member holds
    version: int  # current parameter version
    initialize: bool  # true if this worker must call Initialize
    software: str = ""  # Release of gradwire on the server, for messages; empty if unknown
    epoch: int = 0  # Epoch whose samples are being assigned, counted from 0
    workers: int = 0  # Number of members that share a step: the current ones, at least --min-workers


@stored("InitializeHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeHeader:
    """The header of an Initialize upload: its sender and the contents of the chunks that follow."""

    job: str  # id of the job
    worker: str  # id of the worker
    incarnation: int  # incarnation with which the worker joined
    manifest: ModelManifest  # manifest of the model
    # Least number of samples in a batch: 2 if BatchNorm takes its statistics from it, otherwise 1
    least_samples: int = 0
    # Moments with which the optimizer continues; a tensor without moments starts anew
    moments: tuple[Moment, ...] = ()
    # First epoch of the job, counted from 0; the worker's script has trained on the earlier ones
    epoch: int = 0
    steps: int = 0  # Number of steps that the worker's script took in the earlier epochs


@stored("Moment")
@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One tensor of the optimizer's state for one parameter, such as Adam's "exp_avg". It is float32 with
    as many elements as the parameter, except "step", the number of steps taken, which is one number.
    """

    tensor: int  # index of the parameter in the manifest
    name: str  # name of the tensor in the state_dict of torch's optimizer


@stored("GetOptimizerRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class GetOptimizerRequest:
    """A request for the state of the server's optimizer."""

    job: str  # id of the job
    worker: str = ""  # Id of the worker that asks; empty for other clients


@stored("OptimizerHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerHeader:
    """The header of a GetOptimizer download: the contents of the chunks that follow."""

    version: int  # version of the parameters that the moments belong to
    # Moments in ascending order of tensors; none for a tensor that was never stepped
    moments: tuple[Moment, ...] = ()


@stored("InitializeResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeResponse:
    """The server's answer to an Initialize upload that it has received completely."""

    version: int  # version of the uploaded parameters
    replaced: bool = False  # True if the job begins with other parameters, which follow as a snapshot


@stored("StateHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class StateHeader:
    """The header of a PutState upload or a GetState download: its sender and the contents of the chunks
    that follow.
    """

    job: str  # id of the job
    worker: str = ""  # Id of the worker that uploads; empty in a download
    incarnation: int = 0  # Incarnation with which the worker joined; 0 in a download
    seq: int = 0  # Seq of the push that the buffers belong to; 0: the buffers of an evaluation
    collection: int = 0  # Number of the collection of buffers, as in the assignment; 0 with seq 0
    epoch: int = 0  # Number of the evaluation that the buffers belong to, with seq 0
    frozen: bool = False  # True if the values of the frozen parameters come first


@stored("PutStateResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class PutStateResponse:
    """The server's answer to a PutState upload that it has stored."""



@stored("GetStateRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class GetStateRequest:
    """A request for the model's buffers and frozen parameters."""

    job: str  # id of the job
    epoch: int = 0  # Number of the evaluation whose buffers are requested; 0: the newest buffers
    # SHA-256 of the asker's frozen parameters; the server sends them only if its own differ
    frozen: bytes = b""
    worker: str = ""  # Id of the worker that asks; empty for other clients


@stored("FetchRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRequest:
    """A request for the parameters."""

    job: str = ""  # Id of the job; empty: the job that the server runs


@stored("Batch")
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Several messages of an Exchange stream in one gRPC message, because each gRPC message costs as much
    as many bytes. The receiver reads them as if they had arrived one by one.
    """

    # messages in order, each a WorkerMessage or a ServerMessage with its checksum; no batches
    messages: tuple[bytes, ...]


@stored("FetchHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class FetchHeader:
    """The header of a Fetch download: the contents of the chunks that follow."""

    job: str  # id of the job
    manifest: ModelManifest  # manifest of the model
    version: int  # version of the parameters that follow
    chunk_bytes: int  # bytes of every chunk but the last, which may be shorter


@stored("Chunk")
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """A piece of the payload bytes of one transfer. Chunks of a transfer arrive in order."""

    # number of the transfer. Part of a push: seq * 2^16 + part; part of an update: version * 2^16 + part;
    # parameters of Initialize: 0. The comments of Packet, Snapshot and the other streams' messages give
    # theirs.
    transfer: int
    offset: int  # number of bytes of the transfer before this chunk
    crc32c: int  # CRC-32C over the bytes of the transfer up to the end of this chunk
    data: npt.NDArray[np.uint8]  # bytes of the chunk, at most Limits.chunk_bytes


@stored("DenseHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class DenseHeader:
    """The description of a dense payload, which holds every element."""

    format: DenseEncoding  # floating-point format of every element


@stored("QuantizedHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedHeader:
    """The description of a quantized payload: codes of a fixed number of bits, in 32-bit words padded with
    code 0.
    """

    format: CodeEncoding  # meaning of every code
    # values that the codes stand for, finite, as many for each block. They ascend except for CODEBOOK_8BIT,
    # and are positive except for CODEBOOK_8BIT and BINARY.
    levels: tuple[float, ...]
    # Number of elements of each block, which has levels of its own and begins with a new word; none: one
    # block
    sizes: tuple[int, ...] = ()


@stored("LinearHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class LinearHeader:
    """The description of a linear payload: one float32 scale for each bucket of elements, then signed
    integers of a fixed number of bits.
    """

    bits: int  # bits of a code, 2 to 8; two's complement, the most negative code is never sent
    bucket: int  # number of elements that share a scale, a multiple of 32, at most 2^24


@stored("SparseHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class SparseHeader:
    """The description of a sparse payload, which holds some elements; all others are zero. First come the
    bytes of the indices, then those of the values.
    """

    count: int  # number of elements in the payload
    coding: IndexEncoding  # coding of the indices
    low_bits: int = 0  # With GAPS, bits of a gap that are not in unary, 0 to 31; otherwise 0
    index_bytes: int = 0  # Bytes of the indices; 0 if they are drawn from the seed
    seed: int = 0  # Seed of SEEDED and UNIFORM; otherwise 0
    values: DenseHeader | QuantizedHeader | LinearHeader | None  # `count` of them


@stored("AbsentHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class AbsentHeader:
    """The description of a payload without elements and bytes. In a push, it stands for whole tensors
    without a gradient, as far as they lie in the part; in an update, for elements that do not change.
    """



@stored("PayloadHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadHeader:
    """The description of one payload of a part: some consecutive elements. Their bytes follow those of the
    payloads before.
    """

    elements: int  # number of elements of the payload, which covers one tensor, several, or a piece of one
    kind: DenseHeader | QuantizedHeader | LinearHeader | SparseHeader | AbsentHeader | None
    content: Content = Content.UNSPECIFIED  # Effect on the replica, in an update; unspecified in a push


@stored("Hello")
@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message on an Exchange stream, which binds it to one worker. From here on the worker's
    lease is renewed, even while it still loads its task and data.
    """

    job: str  # id of the job
    worker: str  # id of the worker
    incarnation: int  # incarnation with which the worker joined


@stored("Ready")
@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker's notice that it has its model and can take assignments. It is sent again after a
    reconnect.
    """

    fingerprint: bytes  # fingerprint of the worker's manifest
    train_samples: int = 0  # Number of samples in one epoch, as in ModelManifest; 0: not compared
    version: int | None = None  # version of the worker's replica; absent if it has none
    assigned: int = 0  # Id of the last assignment that the worker has received; 0 for none
    plan: int = 0  # Number of the last plan that the worker has received; 0 for none
    data: int = 0  # Checksum of some of the training samples, as in ModelManifest; 0: not compared
    # Version at which the replica differed from the server's parameters, and was discarded; 0: it did not
    # differ
    drifted: int = 0
    # True if the worker continues from its own saved state at the server's version, buffers included
    restored: bool = False


@stored("PartHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class PartHeader:
    """The header of a part of a push; chunks with transfer seq * 2^16 + part follow. If its plan is older
    than the job's, the server drops the part and will refuse the push as stale.
    """

    seq: int  # seq of the push, which grows by one per push of this incarnation, from 1
    assignment: int  # id of the assignment that the push answers
    part: int  # number of the part in the plan, from 0
    plan: int  # number of the plan that defines the part
    # descriptions of the payloads, end to end over the elements of the part
    payloads: tuple[PayloadHeader, ...]
    waited: bool = False  # True if the part waited until another part had been sent completely
    # Learning rates of the step, by parameter group, if the worker has its own scheduler. They are equal in
    # all parts of a push, and in all pushes that are applied together. None: the job's schedule applies.
    learning_rates: tuple[float, ...] = ()


@stored("Commit")
@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The commit of a push, sent after all of its parts. Without it the push does not count."""

    seq: int  # seq of the push
    assignment: int  # id of the assignment that the push answers
    base_version: int  # version of the parameters at which the gradient was computed
    # number of samples behind the mean gradient; 0, without parts: the worker contributes nothing
    samples: int
    parts: int  # number of parts that were sent
    digest: int  # CRC-32C over the CRC-32Cs of the parts' bytes, in order of the parts
    loss: float = 0.0  # Mean training loss at the base version
    exchanged: Exchanged | None = None  # result of an exchange of packets, in coded mode instead of parts
    plan: int = 0  # Number of the plan that defines the parts; 0 without parts
    computing_seconds: float = 0.0  # Seconds that the worker took for local steps; 0 in other modes


@stored("Abandon")
@dataclass(frozen=True, kw_only=True, slots=True)
class Abandon:
    """A worker's notice that it gives up a push: the server drops its parts. The next push answers the
    same assignment.
    """

    seq: int  # seq of the abandoned push


@stored("Exchanged")
@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """A worker's result of an exchange of packets. Its replica takes the step when a later assignment says
    so.
    """

    crc32c: int  # CRC-32C over the replica's parameters, then the sum of all gradients as int64
    computing_seconds: float = 0.0  # Seconds that the worker took for the gradients of its blocks
    clipped: int = 0  # Number of elements of these gradients that were clipped to the range of fixed point


@stored("Packet")
@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """The header of one packet of an exchange: a sum of slices of gradients in fixed point, little-endian
    uint32. The server relays it, chunk by chunk, to its targets. Chunks with transfer 2^63 + exchange *
    2^32 + index follow.
    """

    exchange: int  # number of the exchange, as in Coding
    index: int  # number of the packet in the exchange's schedule, which follows from Coding
    elements: int  # number of elements of the packet, 4 bytes each
    # CRC-32C of each term's whole block in fixed point, as its sender computed it. Workers that compute the
    # same block must agree. None in an exchange of whole blocks.
    checksums: tuple[int, ...] = ()


@stored("Snapshot")
@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The header of a worker's replica: all tensors of the manifest as float32, sent when the server asks
    for it. Chunks with transfer = version follow.
    """

    version: int  # version of the worker's replica
    leaving: bool = False  # True if the server has not asked: the worker leaves, and may hold the last copy


@stored("Profile")
@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A worker's measurement of its steps: means over the last ones. The server divides the model by it."""

    steps: int  # number of measured steps, at least 1
    # by tensor of the manifest: seconds of computation until its layer's forward pass is complete
    forward_seconds: tuple[float, ...]
    # by tensor: seconds of computation from the previous gradient to its own
    backward_seconds: tuple[float, ...]
    densities: tuple[float, ...]  # by tensor: fraction of its elements that is sent, above 0, up to 1
    sent_bytes: int  # bytes of a step's payloads
    compressing_seconds: float  # seconds of compression per step
    step_seconds: float  # seconds from one step to the next
    # Fraction of the computation that used a processor, 0 to 1; 0: none, or not measured
    processor_share: float = 0.0
    machine: str = ""  # Identity of the worker's machine; empty if unknown


@stored("Heartbeat")
@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A worker's sign of life, sent at least every Limits.heartbeat_seconds."""

    activity: str = ""  # Activity of the worker for people, such as "computing" or "waiting"
    stalled_seconds: float = 0.0  # Seconds without progress of the training thread; 0 while it waits


@stored("Evaluation")
@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The metrics that the worker chosen for an evaluation measured on the validation data."""

    version: int  # version of the evaluated parameters
    epoch: int  # number of the evaluation, as in Assignment.evaluate_epoch
    metrics: Mapping[str, float]  # values by name: "loss", "accuracy", …


@stored("Leave")
@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """A worker's notice that it leaves the job. The server expects nothing more of it."""

    failed: bool = False  # True if the worker failed; false if it was told to stop, or the job is done
    reason: str = ""  # Reason for people, one sentence; empty if there is none


@stored("Welcome")
@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The server's answer to Hello."""

    rank: int  # rank of the member, from 0, as in JoinResponse
    version: int  # current parameter version
    last_seq: int  # seq of the last push that the server has decided on; 0 for none
    # Latest version that a worker can have. A worker with a later version discards its replica, because that
    # version is lost.
    newest: int = 0
    stored: tuple[Stored, ...] = ()  # Stored parts of the pushes after last_seq
    plan: int = 0  # Number of the job's plan; parts of other plans are unused; 0 for none


@stored("Stored")
@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The parts of an undecided push that the server has stored, so that the worker need not send them
    again. If the plan has a credit, also sent for each part as soon as it is stored, or no longer needed.
    """

    seq: int  # seq of the push
    parts: tuple[int, ...]  # numbers of the parts, ascending


@stored("PlanAnnouncement")
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnnouncement:
    """The division of the model into parts, from the next update and the next assignment on. The flat
    order is the elements of all tensors, end to end in manifest order. A unit is one or several
    neighbouring tensors of one parameter group. A unit is one part, but a unit of one tensor may be cut
    into several. Parts are numbered from 0, unit by unit, ascending within a unit.
    """

    number: int  # number of the plan, which grows by one with each plan of the job, from 1
    # number of tensors of each unit, at least 1. Units are in backward order: the last tensors first
    tensors: tuple[int, ...]
    # Positions in the flat order, ascending, at which another part of a unit begins. Counted from the
    # beginning of their tensor, they are multiples of 4096.
    cuts: tuple[int, ...] = ()
    # True if sparsifiers choose among all elements of a unit; false if among those of each tensor
    merged: bool = False
    # Priority of each part, a permutation of the part numbers: of the parts that wait, the one with the least
    # is sent first. None: parts are sent in the order in which they are ready.
    turns: tuple[int, ...] = ()
    credit: int = 0  # Number of a worker's parts that may be in transit at once; 0: no limit
    # Euclidean norm of each tensor's initial parameters, in manifest order; or none
    norms: tuple[float, ...] = ()


@stored("Update")
@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The header of an update of one part: its new values, or their change. Chunks with transfer version *
    2^16 + part follow. A replica is at the version when it has all parts.
    """

    version: int  # version of the part after the update
    part: int  # number of the part in the plan, from 0
    plan: int  # number of the plan that defines the part
    # True if the update replaces every element, so that a replica at any version can apply it
    whole: bool = False
    # descriptions of the payloads, end to end over the elements of the part
    payloads: tuple[PayloadHeader, ...]


@stored("Range")
@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Consecutive samples in the order of an epoch, which is a permutation drawn from (seed, epoch)."""

    start: int  # position of the first sample, from 0
    count: int  # number of samples


@stored("Assignment")
@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A worker's task at one version. A worker has one assignment at a time. If it holds samples, the
    worker answers it with one push.
    """

    version: int  # version of the parameters to compute at
    epoch: int = 0  # Epoch of the samples, from 0
    position: int = 0  # Position of this worker among the workers that share the work, from 0
    world: int = 0  # Number of the workers that share the work; 0: there is nothing to compute
    evaluate_epoch: int = 0  # Number of the evaluation of this version to run first and report; 0: none
    finished: bool = False  # True if the job is done and the worker leaves
    id: int  # id of the assignment, which grows with every assignment of the job, from 1
    ranges: tuple[Range, ...] = ()  # Samples to train on; none: nothing to compute
    progress: float = 0.0  # Number of epochs that the job has trained on so far
    # Learning rate of local steps, and in coded mode of the step that follows; 0 in other modes
    learning_rate: float = 0.0
    slice: int = 0  # Number of the slice of the parts to push, from 0
    # Number of slices into which the parts are divided, one per worker of a group; 0: push all parts
    slices: int = 0
    # Number of stragglers without which a round may close: push a sum coded for that many; 0: none
    stragglers: int = 0
    coding: Coding | None = None  # blocks and packets of coded mode; absent in other modes
    apply: int = 0  # In coded mode, number of the exchange whose sum produces the version; 0: none
    pace: int = 0  # Sending rate in bytes per second; 0: no limit
    # Numbers of the only parts to push, ascending: those that a lost worker had not pushed; none: all parts
    parts: tuple[int, ...] = ()
    plan: int = 0  # Number of the job's plan; the worker begins when it has this plan; 0: none
    # Samples of this epoch that the next assignment will hold if nothing changes
    next: tuple[Range, ...] = ()
    checked: int = 0  # Last version of which there is a checksum; 0: none
    checksum: int = 0  # CRC-32C over all values of a replica at that version
    # Number of the collection, which grows with each, for which the worker uploads its buffers before the
    # commit; 0: no upload
    collection: int = 0
    # True if the worker first downloads the job's buffers, because other workers' are newer
    take_buffers: bool = False
    # Number of steps that the job will have taken at its end with the current number of members; 0: unknown
    total_steps: int = 0
    earlier_steps: int = 0  # Number of steps that scripts took before version 0, as in InitializeHeader.steps


@stored("Coding")
@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """The parameters of coded mode for one exchange. From these numbers both sides derive the blocks of
    the assigned samples, the workers that compute each, and the packets to exchange. Workers are numbered
    by Assignment.position, out of Assignment.world.
    """

    exchange: int  # number of the exchange, which grows with every exchange of the job, from 1
    redundancy: int  # number of workers that compute the same block
    # Not empty after an exchange has failed: for each block, the position of the worker that sends its whole
    # gradient to all other workers in `present`, even to those that computed it; 2^32 - 1: the block is left
    # out.
    senders: tuple[int, ...] = ()
    # Positions of the workers that take part in the repeated exchange; none without senders
    present: tuple[int, ...] = ()


@stored("Outcome")
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a push, sent to its worker once the server has decided."""

    seq: int  # seq of the push
    decision: Decision  # decision of the server
    version: int = 0  # Version that contains an accepted push; 0 for a refused one
    refusal: Refusal | None = None  # reason of a refused push; absent for an accepted one
    # number of the part that caused the refusal, and may be sent again; absent if the whole push is refused
    part: int | None = None
    counted: tuple[int, ...] = ()  # Numbers of a refused push's parts that are in a version all the same


@stored("Unwanted")
@dataclass(frozen=True, kw_only=True, slots=True)
class Unwanted:
    """A hint that the server would refuse this push in its present state, because its round has closed or
    other workers compute its samples. The worker stops sending its parts; the outcome follows its commit.
    """

    seq: int  # seq of the push


@stored("Save")
@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """The server's request, while it saves its own state, that the worker saves its state at this version
    before it computes anything else.
    """

    version: int  # version of the parameters


@stored("Saved")
@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A worker's answer to Save, once its state is written."""

    version: int  # version of the parameters
    error: str = ""  # Reason that nothing was written; empty if the state was written


@stored("Waiting")
@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """The workers for which all other workers wait, and for how long."""

    ranks: tuple[int, ...]  # ranks of the workers for which the others wait
    seconds: float  # seconds since the others began to wait
    text: str  # description of the wait for people, one sentence


@stored("SnapshotRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRequest:
    """The server's request for a snapshot of the replica. A worker whose replica is at another version
    does not answer.
    """

    version: int  # version that the replica must have
    # In coded mode, number of the exchange whose sum the replica applies first, as in Assignment; 0: none
    apply: int = 0


@stored("InitializeRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeRequest:
    """The server's request to upload the manifest and the initial parameters, because the worker that it
    asked before is gone.
    """



@stored("StatusRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRequest:
    """A request for the state of the job."""

    measured: bool = False  # True to include the measurements of the job's steps
    losses: bool = False  # True to include the history of the training loss
    padding: bytes = b""  # Meaningless bytes that measure the upload; with echo, also the download
    echo: bool = False  # True to return the padding in the response


@stored("Measured")
@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The server's measurements of its job's steps, as inputs of planning."""

    tensors: tuple[Tensor, ...]  # tensors of the model
    # by tensor: seconds of forward computation, mean over the workers, as in Profile
    forward_seconds: tuple[float, ...]
    # by tensor: seconds of backward computation, mean over the workers, as in Profile
    backward_seconds: tuple[float, ...]
    part_seconds: float  # seconds that each part takes to upload in addition to its bytes
    byte_seconds: float  # seconds that each byte takes to upload while all workers send
    compressor: str  # compressor spec of the first worker
    fusion: str  # server's option fusion
    order: str  # server's option order
    part_bytes: int  # server's option part_bytes, in bytes
    cores: int  # number of cores of the one machine that all workers share; 0: each has a machine of its own
    # Fraction of the computation that used a processor, 0 to 1; 0: none, or not measured
    processor_share: float = 0.0
    # By tensor: squared Euclidean norm of the mean gradient; 0: not measured
    square_norms: tuple[float, ...] = ()


@stored("MemberStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """The state of one member, as the server sees it."""

    worker: str  # id of the worker
    rank: int  # rank of the member, from 0, as in JoinResponse
    attached: bool  # true while its Exchange stream is open
    heard_seconds: float  # seconds since its last message
    activity: str  # activity from its last heartbeat, for people
    compressor: str  # spec of the compressor that it uses
    pushes: int  # number of accepted pushes
    stalled_seconds: float = 0.0  # Seconds without progress of its training thread
    suspended: bool = False  # True if no round waits for the member, until its hung training thread continues


@stored("LostStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class LostStatus:
    """A member that was lost before the job was done."""

    worker: str  # id of the worker
    rank: int  # rank that the member had, from 0
    reason: str  # reason of the loss for people, one sentence
    version: int  # version at which the server gave the member up


@stored("EpochStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStatus:
    """The result of one evaluation."""

    epoch: int  # number of the evaluation; if every epoch is evaluated, the number of completed epochs
    version: int  # version of the evaluated parameters
    metrics: Mapping[str, float]  # values by name: "loss", "accuracy", …
    seconds: float = 0.0  # Seconds from the opening of the first round to this version; 0: unknown
    epochs: float = 0.0  # Number of epochs that the job had trained on when the evaluation was requested


@stored("LossPoint")
@dataclass(frozen=True, kw_only=True, slots=True)
class LossPoint:
    """The mean training loss of several consecutive versions."""

    version: int  # last of these versions
    loss: float  # mean training loss, weighted by samples


@stored("Traffic")
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that the server has received (up) and sent (down)."""

    wire_bytes_up: int = 0  # Bytes of messages from workers, with gRPC and HTTP/2 framing
    wire_bytes_down: int = 0  # Bytes of messages to workers, with gRPC and HTTP/2 framing
    raw_bytes_up: int = 0  # Bytes that the tensors from workers would take as bare float32
    raw_bytes_down: int = 0  # Bytes that the tensors to workers would take as bare float32
    payload_bytes_up: int = 0  # Bytes of the payloads of accepted pushes, without headers and framing
    compressed_payload_bytes_up: int = 0  # Bytes of those payloads that are not dense, with their levels
    compressed_raw_bytes_up: int = 0  # Bytes that the elements of those payloads would take as float32


@stored("StatusResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class StatusResponse:
    """The state of the job: members, progress, evaluations and traffic."""

    job: JobDescription  # description of the job that the server runs
    phase: Phase  # phase of the job
    waiting: str  # worker or event that the job waits for; empty while it progresses
    version: int  # current parameter version
    epoch: int  # number of completed epochs
    epoch_progress: float  # fraction of the running epoch that is done, 0 to 1
    members: tuple[MemberStatus, ...]  # members, in order of rank
    lost: tuple[LostStatus, ...]  # lost members, in order of time
    evaluations: tuple[EpochStatus, ...]  # the last 1024 evaluations, in order of epoch
    traffic: Traffic  # bytes since the server started
    pushes: int  # number of accepted pushes of all workers
    refused_pushes: int  # number of refused pushes of all workers
    train_loss: float  # training loss of the last closed round, mean weighted by samples
    training_seconds: float  # seconds from the opening of the first round to the last version
    # SHA-256 of the final parameters in manifest order, in hex; empty until the job is done
    parameters_sha256: str
    software: str  # release of gradwire on the server
    # Number of steps that each worker took in local mode, over all rounds; 0 in other modes
    local_steps: int = 0
    # Largest staleness of an accepted push: in clocks in stale mode, in versions in async mode
    largest_staleness: int = 0
    # Number of workers that computed each block in the last round of coded mode; 0 in other modes
    redundancy: int = 0
    uncoded_exchanges: int = 0  # Number of uncoded exchanges that replaced failed ones in coded mode
    clipped_elements: int = 0  # Number of gradient elements that all workers clipped in coded mode
    repeated_samples: int = 0  # Number of samples that a lost worker and its substitute both trained on
    # measurements of the job's steps; absent unless they were requested and suffice
    measured: Measured | None = None
    step_seconds: float = 0.0  # Seconds from one round to the next, median of the last ones; 0: unknown
    # Seconds that a step should take according to the measurements; 0: unknown
    predicted_step_seconds: float = 0.0
    # Learning rate of the next step, by the job's schedule; 0 if the workers' scripts set it
    learning_rate: float = 0.0
    losses: tuple[LossPoint, ...] = ()  # Training losses in order of version; none unless requested
    unix_seconds: float = 0.0  # Time of the server's clock, seconds since 1970
    padding: bytes = b""  # The request's padding, if the request asked for its echo


InitializeMessage = Chunk | InitializeHeader
OptimizerMessage = Chunk | OptimizerHeader
StateMessage = Chunk | StateHeader
FetchMessage = Chunk | FetchHeader
WorkerMessage = (
    Chunk | PartHeader | Heartbeat | Hello | Evaluation | Leave | Ready | Packet | Snapshot | Commit | Abandon | Profile | Saved | Batch
)
ServerMessage = (
    Chunk | Update | Assignment | Outcome | Welcome | Waiting | InitializeRequest | Packet | SnapshotRequest | PlanAnnouncement | Unwanted | Stored | Save | Batch
)
