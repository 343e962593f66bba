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
    """The reason of a refusal. The gRPC status code follows from it.

    Attributes:
        MALFORMED: not a message of this protocol, or a required field is missing.
        PROTOCOL_VERSION: the two sides speak different protocol versions.
        UNKNOWN_JOB: the server runs another job, or was restarted.
        JOB_FINISHED: the job has completed its last epoch.
        MODEL: the worker's manifest differs from the job's.
        FENCED: a newer incarnation of this worker has joined.
        DUPLICATE_WORKER: another live process uses this worker id.
        NOT_A_MEMBER: the worker has never joined, has left, or its lease has expired.
        NOT_INITIALIZED: the job has no parameters yet.
        ALREADY_INITIALIZED: the job already has its parameters.
        TENSOR: unknown, repeated, missing or out-of-order tensor.
        SHAPE: shape of a tensor that the server does not accept.
        DTYPE: dtype of a tensor other than float32.
        ELEMENTS: number of elements that differs from the manifest.
        PAYLOAD: payload that breaks the rules of its kind: code, padding, levels.
        NON_FINITE: naN or infinity in values, levels or metrics.
        CHECKSUM: bytes that were changed in transit.
        CHUNK: chunk of the wrong size, offset or transfer.
        SIZE: size or count above a limit of the server.
        SEQUENCE: a gap in seq, or a seq older than the outcomes that the server remembers.
        STALE: push computed at a version whose round has closed.
        PROTECTED: remote peer in protected mode; the server's --insecure admits it.
        STOPPING: the server is shutting down.
        PACKET: coded packet that another worker has to send.
        PLAN: part that the job's plan does not have, or a plan that does not fit the model.
        REDUNDANT: push without which the round was complete; none of it is to be sent again.
        TOKEN: missing token, or one that is not valid for this worker.
        NAME: invalid worker id, or invalid name of a metric, tensor or compressor.
        GROUP: invalid parameter group, or learning rates on which members disagree.
    """

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


@stored("EntryKind")
class EntryKind(LabelledEnum):
    """The kind of a state_dict entry that is not a trainable parameter.

    Attributes:
        BUFFER: tensor that training changes, such as BatchNorm's running statistics.
        FROZEN: parameter that is not trained.
        TIED: another name of an earlier tensor or entry, without a value of its own.
    """

    UNSPECIFIED = 0
    BUFFER = 1
    FROZEN = 2
    TIED = 3


@stored("DenseEncoding")
class DenseEncoding(LabelledEnum):
    """A floating-point format, little-endian.

    Attributes:
        FLOAT32: 4 bytes per element.
        BFLOAT16: 2 bytes per element.
        FLOAT16: 2 bytes per element.
    """

    UNSPECIFIED = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3


@stored("CodeEncoding")
class CodeEncoding(LabelledEnum):
    """The meaning of the codes of a quantized payload.

    Attributes:
        SIGNED_4BIT: code 0: zero; 1 to 7: minus levels[0] to levels[6]; 9 to 15: plus levels[0] to levels[6];
            8: never sent.
        SIGNED_2BIT: code 00: zero; 10: minus levels[0]; 11: plus levels[0]; 01: never sent.
        BINARY: code 0: levels[0]; 1: levels[1]; each may have any sign.
        VOTE: code 0: minus levels[0]; 1: plus levels[0]; votes are counted, not added.
        CODEBOOK_8BIT: code 0 to 255: levels[0] to levels[255], which may have any sign and order.
    """

    UNSPECIFIED = 0
    SIGNED_4BIT = 1
    SIGNED_2BIT = 2
    BINARY = 3
    VOTE = 4
    CODEBOOK_8BIT = 5


@stored("IndexEncoding")
class IndexEncoding(LabelledEnum):
    """The coding of a sparse payload's indices.

    Attributes:
        GAPS: golomb-Rice codes of the gaps: all low parts, then all quotients in unary.
        BITMAP: one bit per element.
        SEEDED: no bytes: one index in each of `count` equal parts, drawn from the seed.
        UNIFORM: no bytes: `count` different indices, drawn from the seed.
    """

    UNSPECIFIED = 0
    GAPS = 1
    BITMAP = 2
    SEEDED = 3
    UNIFORM = 4


@stored("Content")
class Content(LabelledEnum):
    """The effect of an update's payload on the elements of a replica.

    Attributes:
        VALUES: values that replace the elements; a sparse payload replaces only those that it holds.
        DELTA: differences that are added to the elements.
    """

    UNSPECIFIED = 0
    VALUES = 1
    DELTA = 2


@stored("Decision")
class Decision(LabelledEnum):
    """The server's decision on a push.

    Attributes:
        ACCEPTED: the push counts.
        REFUSED: the push does not count.
    """

    UNSPECIFIED = 0
    ACCEPTED = 1
    REFUSED = 2


@stored("Phase")
class Phase(LabelledEnum):
    """The phase of the job.

    Attributes:
        EMPTY: the job has no parameters yet.
        GATHERING: the server waits for enough members.
        RUNNING: rounds open and close.
        FINISHING: the last version is published, its evaluation is outstanding.
        FINISHED: the job is done.
        STOPPING: the server is shutting down.
    """

    UNSPECIFIED = 0
    EMPTY = 1
    GATHERING = 2
    RUNNING = 3
    FINISHING = 4
    FINISHED = 5
    STOPPING = 6


@stored("Refusal")
@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A refusal of a call or a push: text for people, and fields by which a program decides.

    Attributes:
        reason: reason, for programs.
        message: one sentence for people that names worker, field, limit and value.
        worker: id of the refused worker; empty if unknown.
        field: name of the refused field or tensor; empty if there is none.
        limit: description of the values that would have been accepted; empty if there is none.
        value: value that was received; empty if there is none.
        remedy: action that mends it; empty if there is none.
    """

    reason: Reason
    message: str
    worker: str = ""
    field: str = ""
    limit: str = ""
    value: str = ""
    remedy: str = ""


@stored("JobDescription")
@dataclass(frozen=True, kw_only=True, slots=True)
class JobDescription:
    """The identity and settings of a job. The server sends them to every worker that joins.

    Attributes:
        id: id of the job, unique per server start.
        settings: options that settings.py declares as the job's, and the mode's kind of work as "work";
            values as text.
    """

    id: str
    settings: Mapping[str, str]


@stored("Limits")
@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that the server enforces on a member.

    Attributes:
        chunk_bytes: bytes of payload in every chunk but the last, which may be shorter.
        lease_seconds: seconds without a message after which a member is lost.
        heartbeat_seconds: longest interval between two heartbeats, in seconds.
        progress_seconds: seconds without progress of the training thread after which a member is suspended;
            0: never.
    """

    chunk_bytes: int
    lease_seconds: float
    heartbeat_seconds: float
    progress_seconds: float = 0.0


@stored("Tensor")
@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One tensor of the manifest: a parameter, or a tensor of the optimizer's state if workers run the
    optimizer.

    Attributes:
        name: name of the tensor, unique in the manifest.
        shape: number of elements in each dimension; empty for a scalar.
        dtype: always "float32".
        state: true for a tensor of the optimizer's state, false for a parameter.
        group: number of the tensor's parameter group, from 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    state: bool = False
    group: int = 0


@stored("Group")
@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that share an optimizer and a learning rate, as in torch's param_groups.

    Attributes:
        optimizer: optimizer with its hyperparameters, as a spec: "adamw:weight_decay=0.1".
        learning_rate: base learning rate that the job's schedule scales; absent: the job's.
    """

    optimizer: str
    learning_rate: float | None = None


@stored("Manifest")
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelManifest:
    """The description of a model: every parameter tensor, in the order in which payloads refer to them.

    Attributes:
        tensors: all tensors, parameters first.
        train_samples: number of samples in one epoch.
        fingerprint: SHA-256 over names, shapes, dtypes, groups and entries.
        groups: parameter groups, by number; none: one group, with the job's optimizer and learning rate.
        entries: entries of the model's state_dict besides the tensors, in its order.
        data: checksum of some of the training samples; 0: they cannot be compared.
    """

    tensors: tuple[Tensor, ...]
    train_samples: int
    fingerprint: bytes
    groups: tuple[Group, ...] = ()
    entries: tuple[Entry, ...] = ()
    data: int = 0


@stored("Entry")
@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry of the model's state_dict that is not a trainable parameter.

    Attributes:
        name: name of the entry, unique among tensors and entries.
        kind: kind of the entry.
        shape: number of elements in each dimension; empty for a scalar or a tied entry.
        dtype: name of torch's dtype, such as "int64"; empty for a tied entry.
        tied_to: name of the tensor or entry that a tied entry repeats; empty for other kinds.
    """

    name: str
    kind: EntryKind
    shape: tuple[int, ...] = ()
    dtype: str = ""
    tied_to: str = ""


@stored("JoinRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A worker's request to become a member of the job.

    Attributes:
        worker: id of the worker, unique in the job.
        incarnation: number of the worker process, greater than that of every earlier process with this id.
        software: release of gradwire on the worker, for messages; empty if unknown.
        compressors: names of the compressors that the worker can use.
        compressor: spec of the compressor that the worker will use; empty for the job's.
    """

    worker: str
    incarnation: int
    software: str = ""
    compressors: tuple[str, ...] = ()
    compressor: str = ""


@stored("JoinResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinResponse:
    """The server's answer to a worker that has become a member.

    Attributes:
        job: description of the job that the worker has joined.
        limits: limits that the server enforces.
        rank: rank of the member, from 0: the smallest number that no other member holds.
        version: current parameter version.
        initialize: true if this worker must call Initialize.
        software: release of gradwire on the server, for messages; empty if unknown.
        epoch: epoch whose samples are being assigned, counted from 0.
        workers: number of members that share a step: the current ones, at least --min-workers.
    """

    job: JobDescription
    limits: Limits
    rank: int
    version: int
    initialize: bool
    software: str = ""
    epoch: int = 0
    workers: int = 0


@stored("InitializeHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeHeader:
    """The header of an Initialize upload: its sender and the contents of the chunks that follow.

    Attributes:
        job: id of the job.
        worker: id of the worker.
        incarnation: incarnation with which the worker joined.
        manifest: manifest of the model.
        least_samples: least number of samples in a batch: 2 if BatchNorm takes its statistics from it,
            otherwise 1.
        moments: moments with which the optimizer continues; a tensor without moments starts anew.
        epoch: first epoch of the job, counted from 0; the worker's script has trained on the earlier ones.
        steps: number of steps that the worker's script took in the earlier epochs.
        digest: SHA-256 over the chunk messages that follow: an upload that broke continues under the same
            digest.
        held: number of chunks that the server holds already; this call sends the later ones.
        asks: true if no chunks follow: the worker asks how many of them the server holds.
    """

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


@stored("Moment")
@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One tensor of the optimizer's state for one parameter, such as Adam's "exp_avg". It is float32 with
    as many elements as the parameter, except "step", the number of steps taken, which is one number.

    Attributes:
        tensor: index of the parameter in the manifest.
        name: name of the tensor in the state_dict of torch's optimizer.
    """

    tensor: int
    name: str


@stored("GetOptimizerRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class GetOptimizerRequest:
    """A request for the state of the server's optimizer.

    Attributes:
        job: id of the job.
        worker: id of the worker that asks; empty for other clients.
    """

    job: str
    worker: str = ""


@stored("OptimizerHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerHeader:
    """The header of a GetOptimizer download: the contents of the chunks that follow.

    Attributes:
        version: version of the parameters that the moments belong to.
        moments: moments in ascending order of tensors; none for a tensor that was never stepped.
    """

    version: int
    moments: tuple[Moment, ...] = ()


@stored("InitializeResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeResponse:
    """The server's answer to an Initialize upload that it has received completely, or to a header that
    asks.

    Attributes:
        version: version of the uploaded parameters.
        replaced: true if the job begins with other parameters, which follow as a snapshot.
        held: number of chunks of the upload that the server holds, if the header asks.
    """

    version: int
    replaced: bool = False
    held: int = 0


@stored("StateHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class StateHeader:
    """The header of a PutState upload or a GetState download: its sender and the contents of the chunks
    that follow.

    Attributes:
        job: id of the job.
        worker: id of the worker that uploads; empty in a download.
        incarnation: incarnation with which the worker joined; 0 in a download.
        seq: seq of the push that the buffers belong to; 0: the buffers of an evaluation.
        collection: number of the collection of buffers, as in the assignment; 0 with seq 0.
        epoch: number of the evaluation that the buffers belong to, with seq 0.
        frozen: true if the values of the frozen parameters come first.
    """

    job: str
    worker: str = ""
    incarnation: int = 0
    seq: int = 0
    collection: int = 0
    epoch: int = 0
    frozen: bool = False


@stored("PutStateResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class PutStateResponse:
    """The server's answer to a PutState upload that it has stored."""



@stored("GetStateRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class GetStateRequest:
    """A request for the model's buffers and frozen parameters.

    Attributes:
        job: id of the job.
        epoch: number of the evaluation whose buffers are requested; 0: the newest buffers.
        frozen: SHA-256 of the asker's frozen parameters; the server sends them only if its own differ.
        worker: id of the worker that asks; empty for other clients.
    """

    job: str
    epoch: int = 0
    frozen: bytes = b""
    worker: str = ""


@stored("FetchRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRequest:
    """A client's request to download the parameters.

    Attributes:
        job: id of the job; empty: the job that the server runs.
    """

    job: str = ""


@stored("Batch")
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Several messages of an Exchange stream in one gRPC message, because each gRPC message costs as much
    as many bytes. The receiver reads them as if they had arrived one by one.

    Attributes:
        messages: messages in order, each a WorkerMessage or a ServerMessage with its checksum; no batches.
    """

    messages: tuple[bytes, ...]


@stored("FetchHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class FetchHeader:
    """The header of a Fetch download: the contents of the chunks that follow.

    Attributes:
        job: id of the job.
        manifest: manifest of the model.
        version: version of the parameters that follow.
        chunk_bytes: bytes of every chunk but the last, which may be shorter.
    """

    job: str
    manifest: ModelManifest
    version: int
    chunk_bytes: int


@stored("Chunk")
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """A piece of the payload bytes of one transfer. Chunks of a transfer arrive in order.

    Attributes:
        transfer: number of the transfer. Part of a push: seq * 2^16 + part; part of an update: version * 2^16
            + part; parameters of Initialize: 0. The comments of Packet, Snapshot and the other streams'
            messages give theirs.
        offset: number of bytes of the transfer before this chunk.
        crc32c: CRC-32C over the bytes of the transfer up to the end of this chunk.
        data: bytes of the chunk, at most Limits.chunk_bytes.
    """

    transfer: int
    offset: int
    crc32c: int
    data: npt.NDArray[np.uint8]


@stored("DenseHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class DenseHeader:
    """The description of a dense payload, which holds every element.

    Attributes:
        format: floating-point format of every element.
    """

    format: DenseEncoding


@stored("QuantizedHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedHeader:
    """The description of a quantized payload: codes of a fixed number of bits, in 32-bit words padded with
    code 0.

    Attributes:
        format: meaning of every code.
        levels: values that the codes stand for, finite, as many for each block. They ascend except for
            CODEBOOK_8BIT, and are positive except for CODEBOOK_8BIT and BINARY.
        sizes: number of elements of each block, which has levels of its own and begins with a new word; none:
            one block.
    """

    format: CodeEncoding
    levels: tuple[float, ...]
    sizes: tuple[int, ...] = ()


@stored("LinearHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class LinearHeader:
    """The description of a linear payload: one float32 scale for each bucket of elements, then signed
    integers of a fixed number of bits, of which the most negative is never sent, or signs.

    Attributes:
        bits: bits of a code, 1 to 8; 1 bit is a sign, 1 for +1 and 0 for -1; others are two's complement.
        bucket: number of elements that share a scale, a multiple of 32, at most 2^24.
    """

    bits: int
    bucket: int


@stored("SparseHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class SparseHeader:
    """The description of a sparse payload, which holds some elements; all others are zero. First come the
    bytes of the indices, then those of the values.

    Attributes:
        count: number of elements in the payload.
        coding: coding of the indices.
        low_bits: with GAPS, bits of a gap that are not in unary, 0 to 31; otherwise 0.
        index_bytes: bytes of the indices; 0 if they are drawn from the seed.
        seed: seed of SEEDED and UNIFORM; otherwise that of the draw that was cut, or 0.
        values: header of the values; there are `count` of them.
    """

    count: int
    coding: IndexEncoding
    low_bits: int = 0
    index_bytes: int = 0
    seed: int = 0
    values: DenseHeader | QuantizedHeader | LinearHeader | None


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

    Attributes:
        elements: number of elements of the payload, which covers one tensor, several, or a piece of one.
        kind: header of the payload's kind; absent if this version does not know it.
        content: effect on the replica, in an update; unspecified in a push.
    """

    elements: int
    kind: DenseHeader | QuantizedHeader | LinearHeader | SparseHeader | AbsentHeader | None
    content: Content = Content.UNSPECIFIED


@stored("Hello")
@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message on an Exchange stream, which binds it to one worker. From here on the worker's
    lease is renewed, even while it still loads its task and data.

    Attributes:
        job: id of the job.
        worker: id of the worker.
        incarnation: incarnation with which the worker joined.
    """

    job: str
    worker: str
    incarnation: int


@stored("Ready")
@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker's notice that it has its model and can take assignments. It is sent again after a
    reconnect.

    Attributes:
        fingerprint: fingerprint of the worker's manifest.
        train_samples: number of samples in one epoch, as in ModelManifest; 0: not compared.
        version: version of the worker's replica; absent if it has none.
        assigned: id of the last assignment that the worker has received; 0 for none.
        plan: number of the last plan that the worker has received; 0 for none.
        data: checksum of some of the training samples, as in ModelManifest; 0: not compared.
        drifted: version at which the replica differed from the server's parameters, and was discarded; 0: it
            did not differ.
        restored: true if the worker continues from its own saved state at the server's version, buffers
            included.
        model: the worker's manifest, if it has no version and the manifest is short; a refusal names the
            first difference from the job's.
        accumulate: number of batches whose gradients the worker's script adds up for one optimizer step; 0:
            not declared.
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


@stored("More")
@dataclass(frozen=True, kw_only=True, slots=True)
class More:
    """A worker's request for further batches of its assignment: its script has computed all of them, and
    has not called optimizer.step(). The server sends the assignment again, with more batches or as
    exhausted, or another assignment.

    Attributes:
        assignment: id of the assignment.
        batches: number of batches that the worker has of it.
        wanted: number of further batches, at least 1.
        steps: number of optimizer steps taken with these batches, in local mode; otherwise 0.
    """

    assignment: int
    batches: int
    wanted: int
    steps: int = 0


@stored("PartHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class PartHeader:
    """The header of a part of a push; chunks with transfer seq * 2^16 + part follow. If its plan is older
    than the job's, the server drops the part and will refuse the push as stale.

    Attributes:
        seq: seq of the push, which grows by one per push of this incarnation, from 1.
        assignment: id of the assignment that the push answers.
        part: number of the part in the plan, from 0.
        plan: number of the plan that defines the part.
        payloads: descriptions of the payloads, end to end over the elements of the part.
        waited: true if the part waited until another part had been sent completely.
        learning_rates: learning rates of the step, by parameter group, if the worker has its own scheduler; a
            single one is that of all groups. The first header of a push on a stream has them for the whole
            push, and the others none. They are equal in all pushes that are applied together. None at all:
            the job's schedule applies.
    """

    seq: int
    assignment: int
    part: int
    plan: int
    payloads: tuple[PayloadHeader, ...]
    waited: bool = False
    learning_rates: tuple[float, ...] = ()


@stored("Commit")
@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The commit of a push, sent after all of its parts. Without it the push does not count.

    Attributes:
        seq: seq of the push.
        assignment: id of the assignment that the push answers.
        base_version: version of the parameters at which the gradient was computed.
        samples: number of samples behind the mean gradient; 0, without parts: the worker contributes nothing.
        parts: number of parts that were sent.
        digest: CRC-32C over the CRC-32Cs of the parts' bytes, in order of the parts.
        loss: mean training loss at the base version; absent if unknown.
        exchanged: result of an exchange of packets, in coded mode instead of parts.
        plan: number of the plan that defines the parts; 0 without parts.
        computing_seconds: seconds that the worker took for local steps; 0 in other modes.
        local_rates: learning rates of a script's last local step, by parameter group, which the server
            compares.
        batch: checksum of the (first) batch, if the worker has chosen it and is to choose another one than
            other workers; 0: not compared.
        batches: number of the assignment's batches that the push stands for, from the first; 0: all. The
            others are assigned anew.
        steps: number of optimizer steps that a script has taken with them; 0: unknown.
    """

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


@stored("Abandon")
@dataclass(frozen=True, kw_only=True, slots=True)
class Abandon:
    """A worker's notice that it gives up a push: the server drops its parts. The next push answers the
    same assignment.

    Attributes:
        seq: seq of the abandoned push.
    """

    seq: int


@stored("Exchanged")
@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """A worker's result of an exchange of packets. Its replica takes the step when a later assignment says
    so.

    Attributes:
        crc32c: CRC-32C over the replica's parameters, then the sum of all gradients as int64.
        computing_seconds: seconds that the worker took for the gradients of its blocks.
        clipped: number of elements of these gradients that were clipped to the range of fixed point.
    """

    crc32c: int
    computing_seconds: float = 0.0
    clipped: int = 0


@stored("Packet")
@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """The header of one packet of an exchange: a sum of slices of gradients in fixed point, little-endian
    uint32. The server relays it, chunk by chunk, to its targets. Chunks with transfer 2^63 + exchange *
    2^32 + index follow.

    Attributes:
        exchange: number of the exchange, as in Coding.
        index: number of the packet in the exchange's schedule, which follows from Coding.
        elements: number of elements of the packet, 4 bytes each.
        checksums: CRC-32C of each term's whole block in fixed point, as its sender computed it. Workers that
            compute the same block must agree. None in an exchange of whole blocks.
    """

    exchange: int
    index: int
    elements: int
    checksums: tuple[int, ...] = ()


@stored("Snapshot")
@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The header of a worker's replica: all tensors of the manifest as float32, sent when the server asks
    for it. Chunks with transfer = version follow.

    Attributes:
        version: version of the worker's replica.
        leaving: true if the server has not asked: the worker leaves, and may hold the last copy.
    """

    version: int
    leaving: bool = False


@stored("Profile")
@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A worker's measurement of its steps: means over the last ones. The server divides the model by it.

    Attributes:
        steps: number of measured steps, at least 1.
        forward_seconds: by tensor of the manifest: seconds of computation until its layer's forward pass is
            complete.
        backward_seconds: by tensor: seconds of computation from the previous gradient to its own.
        densities: by tensor: fraction of its elements that is sent, above 0, up to 1.
        sent_bytes: bytes of a step's payloads.
        compressing_seconds: seconds of compression per step.
        step_seconds: seconds from one step to the next.
        processor_share: fraction of the computation that used a processor, 0 to 1; 0: none, or not measured.
        machine: identity of the worker's machine; empty if unknown.
    """

    steps: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    densities: tuple[float, ...]
    sent_bytes: int
    compressing_seconds: float
    step_seconds: float
    processor_share: float = 0.0
    machine: str = ""


@stored("Heartbeat")
@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A worker's sign of life, sent at least every Limits.heartbeat_seconds.

    Attributes:
        activity: activity of the worker for people, such as "computing" or "waiting".
        stalled_seconds: seconds without progress of the training thread; 0 while it waits.
    """

    activity: str = ""
    stalled_seconds: float = 0.0


@stored("Evaluation")
@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The metrics that the worker chosen for an evaluation measured on the validation data.

    Attributes:
        version: version of the evaluated parameters.
        epoch: number of the evaluation, as in Assignment.evaluate_epoch.
        metrics: values by name: "loss", "accuracy", ….
    """

    version: int
    epoch: int
    metrics: Mapping[str, float]


@stored("Stop")
@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A script's request to end the job early. The server evaluates the version that is complete then, and
    ends normally.

    Attributes:
        reason: reason for people, one sentence.
    """

    reason: str


@stored("Leave")
@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """A worker's notice that it leaves the job. The server expects nothing more of it.

    Attributes:
        failed: true if the worker failed; false if it was told to stop, or the job is done.
        reason: reason for people, one sentence; empty if there is none.
    """

    failed: bool = False
    reason: str = ""


@stored("Welcome")
@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The server's answer to Hello.

    Attributes:
        rank: rank of the member, from 0, as in JoinResponse.
        version: current parameter version.
        last_seq: seq of the last push that the server has decided on; 0 for none.
        newest: latest version that a worker can have. A worker with a later version discards its replica,
            because that version is lost.
        stored: stored parts of the pushes after last_seq.
        plan: number of the job's plan; parts of other plans are unused; 0 for none.
        evaluations: the last 1024 evaluations; absent where workers are no scripts.
    """

    rank: int
    version: int
    last_seq: int
    newest: int = 0
    stored: tuple[Stored, ...] = ()
    plan: int = 0
    evaluations: Evaluations | None = None


@stored("Evaluations")
@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """The results of evaluations: in Welcome those so far, later each new one. The server sends them to
    scripts.

    Attributes:
        results: results in order of their numbers.
        best: best value of each metric so far, by name.
    """

    results: tuple[EpochStatus, ...] = ()
    best: Mapping[str, float]


@stored("Stored")
@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The parts of an undecided push that the server has stored, so that the worker need not send them
    again. If the plan has a credit, it is also sent for each part as soon as it is stored, or no longer
    needed.

    Attributes:
        seq: seq of the push.
        parts: numbers of the parts, ascending.
    """

    seq: int
    parts: tuple[int, ...]


@stored("PlanAnnouncement")
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnnouncement:
    """The division of the model into parts, from the next update and the next assignment on. The flat
    order is the elements of all tensors, end to end in manifest order. A unit is one or several
    neighbouring tensors. A unit is one part, but a unit of one tensor may be cut into several. Parts are
    numbered from 0, unit by unit, ascending within a unit.

    Attributes:
        number: number of the plan, which grows by one with each plan of the job, from 1.
        tensors: number of tensors of each unit, at least 1. Units are in backward order: the last tensors
            first.
        cuts: positions in the flat order, ascending, at which another part of a unit begins. Counted from the
            beginning of their tensor, they are multiples of 4096.
        merged: true if sparsifiers choose among all elements of a unit; false if among those of each tensor.
        turns: priority of each part, a permutation of the part numbers: of the parts that wait, the one with
            the least is sent first. None: parts are sent in the order in which they are ready.
        credit: number of a worker's parts that may be in transit at once; 0: no limit.
        norms: for each tensor, the Euclidean norm of its initial parameters, in manifest order; or none.
    """

    number: int
    tensors: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    merged: bool = False
    turns: tuple[int, ...] = ()
    credit: int = 0
    norms: tuple[float, ...] = ()


@stored("Update")
@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The header of an update of one part: its new values, or their change. Chunks with transfer version *
    2^16 + part follow. A replica is at the version when it has all parts.

    Attributes:
        version: version of the part after the update.
        part: number of the part in the plan, from 0.
        plan: number of the plan that defines the part.
        whole: true if the update replaces every element, so that a replica at any version can apply it.
        payloads: descriptions of the payloads, end to end over the elements of the part.
    """

    version: int
    part: int
    plan: int
    whole: bool = False
    payloads: tuple[PayloadHeader, ...]


@stored("Range")
@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Consecutive samples in the order of an epoch, which is a permutation drawn from (seed, epoch).

    Attributes:
        start: position of the first sample, from 0.
        count: number of samples.
    """

    start: int
    count: int


@stored("Assignment")
@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A worker's task at one version. A worker has one assignment at a time. If it holds samples, the
    worker answers it with one push.

    Attributes:
        version: version of the parameters to compute at.
        epoch: epoch of the samples, from 0.
        position: position of this worker among the workers that share the work, from 0.
        world: number of the workers that share the work; 0: there is nothing to compute.
        evaluate_epoch: number of the evaluation of this version to run first and report; 0: none.
        finished: true if the job is done and the worker leaves.
        id: id of the assignment, which grows with every assignment of the job, from 1.
        ranges: samples to train on; none: nothing to compute.
        progress: number of epochs that the job has trained on so far.
        learning_rate: learning rate of local steps, and in coded mode of the step that follows; 0 in other
            modes.
        slice: number of the slice of the parts to push, from 0.
        slices: number of slices into which the parts are divided, one per worker of a group; 0: push all
            parts.
        stragglers: number of stragglers without which a round may close: push a sum coded for that many; 0:
            none.
        coding: blocks and packets of coded mode; absent in other modes.
        apply: in coded mode, number of the exchange whose sum produces the version; 0: none.
        pace: sending rate in bytes per second; 0: no limit.
        parts: numbers of the only parts to push, ascending: those that a lost worker had not pushed; none:
            all parts.
        plan: number of the job's plan; the worker begins when it has this plan; 0: none.
        next: samples of this epoch that the next assignment will hold if nothing changes.
        checked: last version of which there is a checksum; 0: none.
        checksum: CRC-32C over all values of a replica at that version.
        collection: number of the collection, which grows with each, for which the worker uploads its buffers
            before the commit; 0: no upload.
        take_buffers: true if the worker first downloads the job's buffers, because other workers' are newer.
        total_steps: number of steps that the job will have taken at its end with the current number of
            members; 0: unknown.
        earlier_steps: number of steps that scripts took before version 0, as in InitializeHeader.steps.
        local_rates: learning rate of each local step, in order; none: learning_rate for all of them.
        local_steps: number of local steps of one worker in all rounds before; 0 outside local mode.
        trained: true if the job trains no more, and ends once the last version is evaluated.
        evaluations: number of the last evaluation whose result was known when the work of this version was
            assigned, so that all workers of the version choose equal learning rates by it; 0: none.
        batches: number of samples of each batch, in order, together those of the ranges; none: one batch, or
            in local mode as many as local steps.
        steps: number of optimizer steps after which a script answers; 0: one for each batch.
        accumulate: number of batches that an optimizer step is expected to take; 0: one.
        exhausted: true if the epoch has no further batches: answer with the optimizer steps taken so far.
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


@stored("Coding")
@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """The parameters of coded mode for one exchange. From these numbers both sides derive the blocks of
    the assigned samples, the workers that compute each, and the packets to exchange. Workers are numbered
    by Assignment.position, out of Assignment.world.

    Attributes:
        exchange: number of the exchange, which grows with every exchange of the job, from 1.
        redundancy: number of workers that compute the same block.
        senders: not empty after an exchange has failed: for each block, the position of the worker that sends
            its whole gradient to all other workers in `present`, even to those that computed it; 2^32 - 1:
            the block is left out.
        present: positions of the workers that take part in the repeated exchange; none without senders.
        sizes: number of samples of each block, in order, together those of the ranges; none: blocks are
            equally large.
    """

    exchange: int
    redundancy: int
    senders: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@stored("Outcome")
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a push, sent to its worker once the server has decided.

    Attributes:
        seq: seq of the push.
        decision: decision of the server.
        version: version that contains an accepted push; 0 for a refused one.
        refusal: reason of a refused push; absent for an accepted one.
        part: number of the part that caused the refusal, and may be sent again; absent if the whole push is
            refused.
        counted: numbers of a refused push's parts that are in a version all the same.
    """

    seq: int
    decision: Decision
    version: int = 0
    refusal: Refusal | None = None
    part: int | None = None
    counted: tuple[int, ...] = ()


@stored("Unwanted")
@dataclass(frozen=True, kw_only=True, slots=True)
class Unwanted:
    """A hint that the server would refuse this push in its present state, because its round has closed or
    other workers compute its samples. The worker stops sending its parts; the outcome follows its commit.

    Attributes:
        seq: seq of the push.
    """

    seq: int


@stored("Save")
@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """The server's request, while it saves its own state, that the worker saves its state at this version
    before it computes anything else.

    Attributes:
        version: version of the parameters.
    """

    version: int


@stored("Saved")
@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A worker's answer to Save, once its state is written.

    Attributes:
        version: version of the parameters.
        error: reason that nothing was written; empty if the state was written.
    """

    version: int
    error: str = ""


@stored("Waiting")
@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """The workers for which all other workers wait, and for how long.

    Attributes:
        ranks: ranks of the workers for which the others wait.
        seconds: seconds since the others began to wait.
        text: description of the wait for people, one sentence.
    """

    ranks: tuple[int, ...]
    seconds: float
    text: str


@stored("SnapshotRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRequest:
    """The server's request for a snapshot of the replica. A worker whose replica is at another version
    does not answer.

    Attributes:
        version: version that the replica must have.
        apply: in coded mode, number of the exchange whose sum the replica applies first, as in Assignment; 0:
            none.
    """

    version: int
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
    """A request for the state of the job.

    Attributes:
        measured: true to include the measurements of the job's steps.
        losses: true to include the history of the training loss.
        padding: meaningless bytes that measure the upload; with echo, also the download.
        echo: true to return the padding in the response.
    """

    measured: bool = False
    losses: bool = False
    padding: bytes = b""
    echo: bool = False


@stored("Measured")
@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The server's measurements of its job's steps, as inputs of planning.

    Attributes:
        tensors: tensors of the model.
        forward_seconds: by tensor: seconds of forward computation, mean over the workers, as in Profile.
        backward_seconds: by tensor: seconds of backward computation, mean over the workers, as in Profile.
        part_seconds: seconds that each part takes to upload in addition to its bytes.
        byte_seconds: seconds that each byte takes to upload while all workers send.
        compressor: compressor spec of the first worker.
        fusion: server's option fusion.
        order: server's option order.
        part_bytes: server's option part_bytes, in bytes.
        cores: number of cores of the one machine that all workers share; 0: each has a machine of its own.
        processor_share: fraction of the computation that used a processor, 0 to 1; 0: none, or not measured.
        square_norms: by tensor: squared Euclidean norm of the mean gradient; 0: not measured.
    """

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


@stored("MemberStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """The state of one member, as the server sees it.

    Attributes:
        worker: id of the worker.
        rank: rank of the member, from 0, as in JoinResponse.
        attached: true while its Exchange stream is open.
        heard_seconds: seconds since its last message.
        activity: activity from its last heartbeat, for people.
        compressor: spec of the compressor that it uses.
        pushes: number of accepted pushes.
        stalled_seconds: seconds without progress of its training thread.
        suspended: true if no round waits for the member, until its hung training thread continues.
    """

    worker: str
    rank: int
    attached: bool
    heard_seconds: float
    activity: str
    compressor: str
    pushes: int
    stalled_seconds: float = 0.0
    suspended: bool = False


@stored("LostStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class LostStatus:
    """A member that was lost before the job was done.

    Attributes:
        worker: id of the worker.
        rank: rank that the member had, from 0.
        reason: reason of the loss for people, one sentence.
        version: version at which the server gave the member up.
    """

    worker: str
    rank: int
    reason: str
    version: int


@stored("EpochStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStatus:
    """The result of one evaluation, as part of StatusResponse.

    Attributes:
        epoch: number of the evaluation; if every epoch is evaluated, the number of completed epochs.
        version: version of the evaluated parameters.
        metrics: values by name: "loss", "accuracy", ….
        seconds: seconds from the opening of the first round to this version; 0: unknown.
        epochs: number of epochs that the job had trained on when the evaluation was requested.
    """

    epoch: int
    version: int
    metrics: Mapping[str, float]
    seconds: float = 0.0
    epochs: float = 0.0


@stored("LossPoint")
@dataclass(frozen=True, kw_only=True, slots=True)
class LossPoint:
    """The mean training loss of several consecutive versions.

    Attributes:
        version: last of these versions.
        loss: mean training loss, weighted by samples.
    """

    version: int
    loss: float


@stored("Traffic")
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that the server has received (up) and sent (down).

    Attributes:
        wire_bytes_up: bytes of messages from workers, with gRPC and HTTP/2 framing.
        wire_bytes_down: bytes of messages to workers, with gRPC and HTTP/2 framing.
        raw_bytes_up: bytes that the tensors from workers would take as bare float32.
        raw_bytes_down: bytes that the tensors to workers would take as bare float32.
        payload_bytes_up: bytes of the payloads of accepted pushes, without headers and framing.
        compressed_payload_bytes_up: bytes of those payloads that are not dense, with their levels.
        compressed_raw_bytes_up: bytes that the elements of those payloads would take as float32.
    """

    wire_bytes_up: int = 0
    wire_bytes_down: int = 0
    raw_bytes_up: int = 0
    raw_bytes_down: int = 0
    payload_bytes_up: int = 0
    compressed_payload_bytes_up: int = 0
    compressed_raw_bytes_up: int = 0


@stored("StatusResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class StatusResponse:
    """The state of the job: members, progress, evaluations and traffic.

    Attributes:
        job: description of the job that the server runs.
        phase: phase of the job.
        waiting: worker or event that the job waits for; empty while it progresses.
        version: current parameter version.
        epoch: number of completed epochs.
        epoch_progress: fraction of the running epoch that is done, 0 to 1.
        members: members, in order of rank.
        lost: lost members, in order of time.
        evaluations: the last 1024 evaluations, in order of epoch.
        traffic: bytes since the server started.
        pushes: number of accepted pushes of all workers.
        refused_pushes: number of refused pushes of all workers.
        train_loss: training loss of the last closed round, mean weighted by samples; NaN if unknown.
        training_seconds: seconds from the opening of the first round to the last version.
        parameters_sha256: SHA-256 of the final parameters in manifest order, in hex; empty until the job is
            done.
        software: release of gradwire on the server.
        local_steps: number of steps that each worker took in local mode, over all rounds; 0 in other modes.
        largest_staleness: largest staleness of an accepted push: in clocks in stale mode, in versions in
            async mode.
        redundancy: number of workers that computed each block in the last round of coded mode; 0 in other
            modes.
        uncoded_exchanges: number of uncoded exchanges that replaced failed ones in coded mode.
        clipped_elements: number of gradient elements that all workers clipped in coded mode.
        repeated_samples: number of samples that a lost worker and its substitute both trained on.
        measured: measurements of the job's steps; absent unless they were requested and suffice.
        step_seconds: seconds from one round to the next, median of the last ones; 0: unknown.
        predicted_step_seconds: seconds that a step should take according to the measurements; 0: unknown.
        learning_rate: learning rate of the next step, by the job's schedule; 0 if the workers' scripts set
            it.
        losses: training losses in order of version; none unless requested.
        unix_seconds: time of the server's clock, seconds since 1970.
        padding: the request's padding, if the request asked for its echo.
    """

    job: JobDescription
    phase: Phase
    waiting: str
    version: int
    epoch: int
    epoch_progress: float
    members: tuple[MemberStatus, ...]
    lost: tuple[LostStatus, ...]
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
