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
    """Why something was refused. The gRPC status code follows from the reason."""

    UNSPECIFIED = 0
    MALFORMED = 1  # not a message of this protocol, or a required field is missing
    PROTOCOL_VERSION = 2  # the two sides speak different protocol versions
    UNKNOWN_JOB = 3  # the server runs another job, or was restarted
    JOB_FINISHED = 4  # the job has reached its last epoch
    MODEL = 5  # the worker's manifest is not the job's
    FENCED = 6  # a newer incarnation of this worker has joined
    DUPLICATE_WORKER = 7  # another live process uses this worker id
    NOT_A_MEMBER = 8  # never joined, left, or its lease expired
    NOT_INITIALIZED = 9  # the job has no parameters yet
    ALREADY_INITIALIZED = 10  # the job has its parameters
    TENSOR = 11  # unknown, repeated, missing or out-of-order tensor
    SHAPE = 12  # a tensor's shape is not one that the server takes
    DTYPE = 13  # a tensor is not float32
    ELEMENTS = 14  # element count differs from the manifest
    PAYLOAD = 15  # payload breaks the rules of its kind: code, padding, levels
    NON_FINITE = 16  # NaN or infinity in values, levels or metrics
    CHECKSUM = 17  # bytes were changed on their way
    CHUNK = 18  # chunk of the wrong size, offset or transfer
    SIZE = 19  # over a limit of the server
    SEQUENCE = 20  # a gap in seq, or a seq older than the server remembers
    STALE = 21  # computed at a version whose round has closed
    PROTECTED = 22  # protected mode: remote peers need --insecure on the server
    STOPPING = 23  # the server is shutting down
    PACKET = 24  # a coded packet that is not this worker's to send
    PLAN = 26  # a part that the job's plan does not have, or a plan that the model cannot have
    REDUNDANT = 25  # the round was complete without it: nothing of it is to be sent again
    TOKEN = 110  # no token, or none that is good for this worker
    NAME = 111  # a worker id, or the name of a metric, tensor or compressor, that is none
    GROUP = 27  # a parameter group that cannot be, or learning rates that members disagree on


@stored("EntryKind")
class EntryKind(LabelledEnum):
    """What an entry of the model's state_dict is that is no trainable parameter."""

    UNSPECIFIED = 0
    BUFFER = 1  # changed by training, such as BatchNorm's running statistics
    FROZEN = 2  # a parameter that is not trained
    TIED = 3  # another name of a tensor or of an entry before it


@stored("DenseEncoding")
class DenseEncoding(LabelledEnum):
    """Floating-point formats, little-endian."""

    UNSPECIFIED = 0
    FLOAT32 = 1  # 4 bytes an element
    BFLOAT16 = 2  # 2 bytes an element
    FLOAT16 = 3  # 2 bytes an element


@stored("CodeEncoding")
class CodeEncoding(LabelledEnum):
    """What the codes of a quantized tensor stand for."""

    UNSPECIFIED = 0
    SIGNED_4BIT = 1  # 0 zero, 1..7 minus levels[0..6], 9..15 plus levels[0..6]; 8 never
    SIGNED_2BIT = 2  # 00 zero, 10 minus levels[0], 11 plus levels[0]; 01 never
    BINARY = 3  # 0 levels[0], 1 levels[1], which may have any sign
    VOTE = 4  # 0 minus levels[0], 1 plus levels[0]; counted, not added
    CODEBOOK_8BIT = 5  # 0..255 levels[0..255], which may have any sign and order


@stored("IndexEncoding")
class IndexEncoding(LabelledEnum):
    """How the indices of the elements that are there are written."""

    UNSPECIFIED = 0
    GAPS = 1  # Golomb-Rice codes of the gaps: all low parts, then all quotients in unary
    BITMAP = 2  # a bit per element
    SEEDED = 3  # no bytes: one index in each of `count` equal parts, drawn from the seed
    UNIFORM = 4  # no bytes: `count` different indices, drawn from the seed


@stored("Content")
class Content(LabelledEnum):
    """What becomes of the replica's elements by an update."""

    UNSPECIFIED = 0
    VALUES = 1  # they are replaced; by a sparse payload those that it holds
    DELTA = 2  # they are added to


@stored("Decision")
class Decision(LabelledEnum):
    """Whether a push counts."""

    UNSPECIFIED = 0
    ACCEPTED = 1
    REFUSED = 2


@stored("Phase")
class Phase(LabelledEnum):
    """How far the job is."""

    UNSPECIFIED = 0
    EMPTY = 1  # no parameters yet
    GATHERING = 2  # waiting for enough members
    RUNNING = 3  # rounds open and close
    FINISHING = 4  # last version published, its evaluation outstanding
    FINISHED = 5  # nothing is left to do
    STOPPING = 6  # the server is shutting down


@stored("Refusal")
@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A refusal that a person can act on and a program can branch on."""

    reason: Reason  # why; for programs
    message: str  # one sentence that names worker, field, limit, value
    worker: str = ""  # Id of the worker that is refused, if known
    field: str = ""  # Which field or tensor
    limit: str = ""  # What would have been accepted
    value: str = ""  # What was got
    remedy: str = ""  # What to do about it


@stored("JobDescription")
@dataclass(frozen=True, kw_only=True, slots=True)
class JobDescription:
    """What the server decides for everyone."""

    id: str  # unique per server start
    # options that settings.py declares as the job's, and the mode's "work", as text
    settings: Mapping[str, str]


@stored("Limits")
@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that the server enforces."""

    chunk_bytes: int  # bytes of payload per chunk; every chunk but the last has exactly this size
    lease_seconds: float  # a member not heard of for this long is lost
    heartbeat_seconds: float  # how often a member should be heard of
    progress_seconds: float = 0.0  # without progress of the training thread, a member is suspended; 0: never


@stored("Tensor")
@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter tensor."""

    name: str  # unique in the manifest
    shape: tuple[int, ...]  # elements in each dimension; none for a scalar
    dtype: str  # "float32"
    state: bool = False  # Not a parameter: what the optimizer remembers, where workers run it
    group: int = 0  # Number of its parameter group


@stored("Group")
@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that are stepped alike, as in torch's param_groups. Parts hold tensors of one group."""

    optimizer: str  # with its hyperparameters, as a spec: "adamw:weight_decay=0.1"
    learning_rate: float | None = None  # that the job's schedule goes by; if absent, the job's


@stored("Manifest")
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelManifest:
    """Every parameter tensor, in the order in which payloads refer to them."""

    tensors: tuple[Tensor, ...]  # parameters first
    train_samples: int  # samples in one epoch
    fingerprint: bytes  # SHA-256 over names, shapes, dtypes, groups and entries
    groups: tuple[Group, ...] = ()  # By number; none: one group, with the job's optimizer and learning rate
    entries: tuple[Entry, ...] = ()  # Of the model's state_dict, besides the tensors, in its order
    data: int = 0  # Of some of the training samples; 0: they cannot be compared


@stored("Entry")
@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry of the model's state_dict that is no trainable parameter."""

    name: str  # unique among tensors and entries
    kind: EntryKind  # of the entry
    shape: tuple[int, ...] = ()  # Elements in each dimension; of a tied one not given
    dtype: str = ""  # As torch calls it, "int64"; of a tied one not given
    tied_to: str = ""  # Name of the tensor or entry that a tied one is


@stored("JoinRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A worker asks to become a member."""

    worker: str  # id, unique in the job
    incarnation: int  # grows each time a worker with this id starts
    software: str = ""  # Version of the worker, for messages
    compressors: tuple[str, ...] = ()  # Payload-producing compressors that this worker has
    compressor: str = ""  # The one it will use


@stored("JoinResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinResponse:
    """What a new member needs to know."""

    job: JobDescription  # the job that it has joined
    limits: Limits  # that the server enforces
    rank: int  # smallest number that no other member holds
    version: int  # current parameter version
    initialize: bool  # this worker must call Initialize
    software: str = ""  # Version of the server, for messages
    epoch: int = 0  # That samples are given out of, from 0
    workers: int = 0  # Members that steps are divided among: those now, at least --min-workers


@stored("InitializeHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeHeader:
    """What the chunks that follow are, and whose."""

    job: str  # id of the job
    worker: str  # id of the worker
    incarnation: int  # that it joined with
    manifest: ModelManifest  # of the model
    least_samples: int = 0  # Of a batch: 2 where BatchNorm takes its statistics from it; otherwise 1
    moments: tuple[Moment, ...] = ()  # That the optimizer continues from; a tensor without any begins anew
    epoch: int = 0  # That the job begins with, from 0: the worker's script has trained on those before
    steps: int = 0  # That the worker's script took in those


@stored("Moment")
@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One of the tensors that an optimizer remembers for a parameter: "exp_avg" of Adam, for instance. As
    float32; it has as many elements as the parameter, but for "step", the number of steps taken, which is
    one number.
    """

    tensor: int  # number of the parameter in the manifest
    name: str  # as in the state_dict of torch's optimizer


@stored("GetOptimizerRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class GetOptimizerRequest:
    """Ask for what the server's optimizer remembers."""

    job: str  # id of the job
    worker: str = ""  # Id of the worker that asks


@stored("OptimizerHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerHeader:
    """The content of the chunks that follow."""

    version: int  # of the parameters that the moments belong to
    # In ascending order of tensors; of a tensor that was never stepped, none
    moments: tuple[Moment, ...] = ()


@stored("InitializeResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeResponse:
    """The upload has been taken in whole."""

    version: int  # of the parameters that were uploaded
    replaced: bool = False  # The job begins with others, which follow as a snapshot


@stored("StateHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class StateHeader:
    """What the chunks that follow are, and whose."""

    job: str  # id of the job
    worker: str = ""  # Id of the worker that uploads
    incarnation: int = 0  # That it joined with
    seq: int = 0  # Of the push that the buffers are of; 0: those that were evaluated
    collection: int = 0  # As the assignment says
    epoch: int = 0  # That they were evaluated for, with seq 0
    frozen: bool = False  # The values of the frozen parameters come first


@stored("PutStateResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class PutStateResponse:
    """The buffers have been taken in."""



@stored("GetStateRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class GetStateRequest:
    """Ask for what belongs to the model besides its parameters."""

    job: str  # id of the job
    epoch: int = 0  # As it is evaluated for this epoch; 0: the newest
    frozen: bytes = b""  # SHA-256 of the asker's frozen parameters: they come only if it is another
    worker: str = ""  # Id of the worker that asks


@stored("FetchRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRequest:
    """Ask for the parameters."""

    job: str = ""  # Empty: whatever job the server runs


@stored("Batch")
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Several messages of an Exchange stream, in order, as one message of gRPC, each of which costs as
    much as many bytes. Whoever reads the stream reads them as if they had come one by one.
    """

    messages: tuple[bytes, ...]  # each a WorkerMessage or a ServerMessage, with its checksum; no batches


@stored("FetchHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class FetchHeader:
    """What the chunks that follow are."""

    job: str  # id of the job
    manifest: ModelManifest  # of the model
    version: int  # of the parameters that follow
    chunk_bytes: int  # size of every chunk but the last


@stored("Chunk")
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """Part of the concatenated payload bytes of a transfer, in order."""

    # Of a part of a push: seq * 2^16 + part; of an update: version * 2^16 + part. 0 in Initialize. Of a
    # packet or snapshot: see there.
    transfer: int
    offset: int  # bytes before this chunk
    crc32c: int  # over the data of the transfer up to the end of this chunk
    data: npt.NDArray[np.uint8]  # at most Limits.chunk_bytes


@stored("DenseHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class DenseHeader:
    """Every element, in the given format."""

    format: DenseEncoding  # of every element


@stored("QuantizedHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedHeader:
    """Codes of a fixed number of bits, in 32-bit words padded with code 0."""

    format: CodeEncoding  # of every code
    # Finite: what the codes decode to. As many for each block; ascending but for CODEBOOK_8BIT, and positive
    # but for that and BINARY.
    levels: tuple[float, ...]
    # Elements of each block, which has levels of its own and begins with a whole word; one block if none.
    sizes: tuple[int, ...] = ()


@stored("LinearHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class LinearHeader:
    """Signed integers of a fixed number of bits, after one float32 scale for each bucket of elements."""

    bits: int  # of a code, 2 to 8; two's complement, the most negative code is never sent
    bucket: int  # elements that share a scale, a multiple of 32, at most 2^24


@stored("SparseHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class SparseHeader:
    """Some of the elements, the others are zero: first the bytes of the indices, then those of the values."""

    count: int  # of the elements that are there
    coding: IndexEncoding  # of the indices
    low_bits: int = 0  # With gaps: bits of a gap that are not in unary, 0 to 31
    index_bytes: int = 0  # Of the indices
    seed: int = 0  # With seeded
    values: DenseHeader | QuantizedHeader | LinearHeader | None  # `count` of them


@stored("AbsentHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class AbsentHeader:
    """Nothing: in a push whole tensors that have no gradient, as far as they lie in the part; in an update
    elements that stay as they are. It has no bytes.
    """



@stored("PayloadHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadHeader:
    """Some consecutive elements of a part. Their bytes follow those of the payloads before."""

    elements: int  # of one tensor or several, or of a piece of one
    kind: DenseHeader | QuantizedHeader | LinearHeader | SparseHeader | AbsentHeader | None
    content: Content = Content.UNSPECIFIED  # Of an update


@stored("Hello")
@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message on the stream; binds it to one worker. From here on the worker is heard of while
    it still loads its task and data.
    """

    job: str  # id of the job
    worker: str  # id of the worker
    incarnation: int  # that it joined with


@stored("Ready")
@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The worker has its model and may be given work. Sent again after a reconnect."""

    fingerprint: bytes  # of the worker's manifest
    train_samples: int = 0  # As in ModelManifest; 0: not compared
    version: int | None = None  # version of the worker's replica; absent when it has none
    assigned: int = 0  # Id of the last assignment that the worker has got; 0 for none
    plan: int = 0  # Number of the last plan that the worker has got; 0 for none
    data: int = 0  # As in ModelManifest
    drifted: int = 0  # Version at which the replica was not the server's; the worker has let go of it
    restored: bool = False  # The worker goes on from its own state at the server's version, buffers included


@stored("PartHeader")
@dataclass(frozen=True, kw_only=True, slots=True)
class PartHeader:
    """A part of a push; chunks with transfer = seq * 2^16 + part follow. One of an older plan than the
    job's is of no use: its push will be refused as stale.
    """

    seq: int  # of the push; grows by one per push of this incarnation, from 1
    assignment: int  # id of the assignment that the push answers
    part: int  # number of the part
    plan: int  # number of the plan that it is a part of
    payloads: tuple[PayloadHeader, ...]  # end to end over the elements of the part
    waited: bool = False  # Behind another part, until all of that was sent
    # Of the step that the push is for, by parameter group, where the worker has a scheduler of its own; the
    # same with each part of a push, and of all pushes that are applied together. None: the job's schedule has
    # a say.
    learning_rates: tuple[float, ...] = ()


@stored("Commit")
@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """By this a push counts: all of its parts have been sent."""

    seq: int  # of the push
    assignment: int  # id of the assignment that it answers
    base_version: int  # parameters that the gradient was computed at
    samples: int  # behind the mean gradient; 0 with no parts: nothing to contribute
    parts: int  # how many have been sent
    digest: int  # crc32c over the crc32c of each part's bytes, in order of the parts
    loss: float = 0.0  # Mean training loss at the base version
    exchanged: Exchanged | None = None  # in coded mode, instead of parts
    plan: int = 0  # Number of the plan that the parts are of; 0 with none
    computing_seconds: float = 0.0  # That the worker took for local steps


@stored("Abandon")
@dataclass(frozen=True, kw_only=True, slots=True)
class Abandon:
    """Nothing will come of a push: forget its parts. Its assignment is answered by the next push."""

    seq: int  # of the push


@stored("Exchanged")
@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """What a worker got out of an exchange of packets. Its replica takes the step when an assignment says
    so.
    """

    crc32c: int  # over the replica's parameters, then the sum of all gradients as int64
    computing_seconds: float = 0.0  # That the worker took for the gradients of its blocks
    clipped: int = 0  # Elements of those that were outside of the range of fixed point


@stored("Packet")
@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """One packet of an exchange: a sum of slices of gradients in fixed point, little-endian uint32. The
    server relays it, chunk by chunk, to its targets. Chunks with transfer = 2^63 + exchange * 2^32 + index
    follow.
    """

    exchange: int  # as Coding says
    index: int  # in the plan that follows from Coding
    elements: int  # of 4 bytes
    # Of the block behind each term, as its sender computed it: crc32c over all of its elements in fixed
    # point. Where several workers compute a block, theirs must be equal. None in an exchange of whole blocks.
    checksums: tuple[int, ...] = ()


@stored("Snapshot")
@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All tensors of the manifest as float32, when the server asks for them; chunks with transfer =
    version follow.
    """

    version: int  # of the worker's replica
    leaving: bool = False  # Nobody has asked for it; the worker leaves, and may be the last to have it


@stored("Profile")
@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What a worker's steps are made of: means over the last ones. The server plans by it how the model is
    divided.
    """

    steps: int  # at least 1
    # by tensor of the manifest: of computation before its layer is through
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]  # by tensor: of computation from the gradient before to its own
    densities: tuple[float, ...]  # by tensor: share of its elements that is sent, above 0, up to 1
    sent_bytes: int  # of the payloads of a step
    compressing_seconds: float  # per step
    step_seconds: float  # from one step to the next
    processor_share: float = 0.0  # Of the computation: that took a processor; 0 to 1
    machine: str = ""  # That the worker is on


@stored("Heartbeat")
@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Sent at least every Limits.heartbeat_seconds, whatever else is going on."""

    activity: str = ""  # "computing", "waiting", …, for people
    stalled_seconds: float = 0.0  # for which the training thread has made no progress; 0 while it waits


@stored("Evaluation")
@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What the worker that was asked to evaluate measured on the validation data."""

    version: int  # that was evaluated
    epoch: int  # its number, as in Assignment.evaluate_epoch
    metrics: Mapping[str, float]  # "loss", "accuracy", …


@stored("Leave")
@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """The worker goes; nothing more is expected of it."""

    failed: bool = False  # It cannot go on; otherwise it was told to stop, or the job is done
    reason: str = ""  # One sentence for people


@stored("Welcome")
@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """Answer to Hello."""

    rank: int  # as in JoinResponse
    version: int  # current parameter version
    last_seq: int  # last push that the server has decided on; 0 for none
    # The latest version that a worker can have; who has a later one lets go of it: it is lost
    newest: int = 0
    stored: tuple[Stored, ...] = ()  # What has come of later ones
    plan: int = 0  # Number of the job's plan: parts of another are of no use any more


@stored("Stored")
@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What the server has of a push that it has not decided on: that need not be sent again. Where the
    plan has a credit, also said of each part as soon as it is there, or is of no use any more.
    """

    seq: int  # of the push
    parts: tuple[int, ...]  # ascending


@stored("PlanAnnouncement")
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnnouncement:
    """How the model is divided, from the next update and the next assignment on. The elements of all
    tensors, end to end in manifest order, are the flat order. A unit is neighbouring tensors of one
    parameter group. It is one part; if it is one tensor, it may be cut into several. Parts are numbered
    from 0: unit by unit, ascending within one.
    """

    number: int  # grows by one with each plan of the job, from 1
    tensors: tuple[int, ...]  # of each unit, at least 1. Units come in backward order: the last tensors first
    # Elements in flat order, ascending, that begin another part of their unit. Counted from the beginning of
    # their tensor they are multiples of 4096.
    cuts: tuple[int, ...] = ()
    merged: bool = False  # Sparsifiers choose among all elements of a unit, not of each tensor by itself
    # By part its turn, each number below that of the parts once: of parts that wait to be sent, the one with
    # the least goes first. None: they go as they come.
    turns: tuple[int, ...] = ()
    credit: int = 0  # Parts of a worker that may be on their way at once; 0: as many as there are
    # Euclidean norm of each tensor's first parameters, in the order of the manifest; or none.
    norms: tuple[float, ...] = ()


@stored("Update")
@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A part of the parameters, or the change of it; chunks with transfer = version * 2^16 + part follow.
    A replica is at the version once it has all parts.
    """

    version: int  # that the part is at after it
    part: int  # number of the part
    plan: int  # number of the plan that it is a part of
    whole: bool = False  # It replaces every element, so a replica at any version can take it in
    payloads: tuple[PayloadHeader, ...]  # end to end over the elements of the part


@stored("Range")
@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Consecutive samples in the order of an epoch, which is a permutation drawn from (seed, epoch)."""

    start: int  # position of the first sample
    count: int  # samples


@stored("Assignment")
@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What to do at a version. A worker has one at a time, and answers it with one push, if there are
    samples.
    """

    version: int  # of the parameters to compute at
    epoch: int = 0  # Of the samples, from 0
    position: int = 0  # Of this worker among those that were given work together
    world: int = 0  # How many those are; 0: there is nothing to compute
    evaluate_epoch: int = 0  # Evaluate this version first, report it under this number; 0: do not
    finished: bool = False  # The job is done: leave
    id: int  # grows with every assignment of the job, from 1
    ranges: tuple[Range, ...] = ()  # The samples to train on; none: nothing to compute
    progress: float = 0.0  # Epochs that the job has trained on so far
    learning_rate: float = 0.0  # Of local steps, and in coded mode of the step that follows
    slice: int = 0  # Which slice of the parts to push
    slices: int = 0  # Of the parts, one per worker of a group; 0: push all
    stragglers: int = 0  # That a round may close without: push a sum coded for so many
    coding: Coding | None = None  # in coded mode: what to compute and to exchange
    apply: int = 0  # In coded mode: the exchange whose sum leads to the version; 0: none
    pace: int = 0  # Bytes per second to send at; 0: as fast as it goes
    parts: tuple[int, ...] = ()  # To push alone, ascending: what a lost worker left of its push; none: all
    plan: int = 0  # Number of the job's plan: not to be begun before that is here
    # Samples of this epoch that the next assignment will have if nothing happens
    next: tuple[Range, ...] = ()
    checked: int = 0  # The last version of which there is a checksum; 0: none
    checksum: int = 0  # crc32c over all values that a replica has at that version
    # Upload the buffers before the commit, as part of this collection, which grows with each; 0: do not.
    collection: int = 0
    take_buffers: bool = False  # Take over the job's buffers first: those of other workers are newer
    total_steps: int = 0  # That the job will have taken at its end with as many members as now; 0: unknown
    earlier_steps: int = 0  # That scripts took before version 0, as InitializeHeader.steps says


@stored("Coding")
@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """The blocks that the ranges of an assignment are divided into, who computes which, and the packets
    that are exchanged: both sides derive them from these numbers. The nodes are Assignment.position and
    .world.
    """

    exchange: int  # grows with every exchange of the job, from 1
    redundancy: int  # workers that compute the same block
    # If not empty, an exchange has failed, and of each block its gradient goes whole from its sender (2^32 -
    # 1: it is left out) to all others that are present, also those that have computed it.
    senders: tuple[int, ...] = ()
    present: tuple[int, ...] = ()  # Positions of the workers that take part in that
    # Samples of each block, in order; together those of the ranges. None: blocks are equally large
    sizes: tuple[int, ...] = ()


@stored("Outcome")
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a push."""

    seq: int  # of the push
    decision: Decision  # of the server
    version: int = 0  # Accepted: the version that contains it
    refusal: Refusal | None = None  # refused: why
    part: int | None = None  # refused because of this part of the push, which may be sent again
    counted: tuple[int, ...] = ()  # Refused: parts that are in a version all the same


@stored("Unwanted")
@dataclass(frozen=True, kw_only=True, slots=True)
class Unwanted:
    """A hint: this push would be refused as it stands, because its round has closed or others compute its
    samples. Its parts are not needed; what becomes of it is said when it is committed.
    """

    seq: int  # of the push


@stored("Save")
@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """The server writes its state down: the worker is to write down its own, as it is at this version
    before anything else is computed.
    """

    version: int  # of the parameters


@stored("Saved")
@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Answer to Save, once it is written."""

    version: int  # of the parameters
    error: str = ""  # Why nothing was written; empty if it was


@stored("Waiting")
@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """The workers that all others wait for."""

    ranks: tuple[int, ...]  # of the workers that are waited for
    seconds: float  # since when
    text: str  # one sentence for people


@stored("SnapshotRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRequest:
    """Send a snapshot of the replica. A worker whose replica is at another version does not answer."""

    version: int  # that the replica must be at
    apply: int = 0  # As in Assignment


@stored("InitializeRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeRequest:
    """Upload the manifest and initial parameters: the worker that was asked before is gone."""



@stored("StatusRequest")
@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRequest:
    """Ask what the job is doing."""

    measured: bool = False  # Also say what has been measured of the job's steps
    losses: bool = False  # Also say how the training loss went
    padding: bytes = b""  # of no meaning, to measure the way up; and, with echo, the way down
    echo: bool = False  # Send the padding back


@stored("Measured")
@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the server knows of the steps of its job, to plan by."""

    tensors: tuple[Tensor, ...]  # of the model
    forward_seconds: tuple[float, ...]  # by tensor, mean of the workers
    backward_seconds: tuple[float, ...]  # by tensor, mean of the workers
    part_seconds: float  # that a part takes on its way up however small it is
    byte_seconds: float  # that each byte adds, with all workers sending
    compressor: str  # of the first worker
    fusion: str  # as the server was started with
    order: str  # as the server was started with
    part_bytes: int  # as the server was started with
    cores: int  # of the one machine that all are on; 0: a machine for each
    processor_share: float = 0.0  # Of the computation: that took a processor
    square_norms: tuple[float, ...] = ()  # By tensor, of the mean gradient; 0 if it was not measured


@stored("MemberStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """A member as the server sees it."""

    worker: str  # id of the worker
    rank: int  # as in JoinResponse
    attached: bool  # its Exchange stream is open
    heard_seconds: float  # since its last message
    activity: str  # from its last heartbeat
    compressor: str  # that it uses
    pushes: int  # accepted
    stalled_seconds: float = 0.0  # for which its training thread has made no progress
    suspended: bool = False  # it hangs: nobody waits for it until its training thread goes on


@stored("LostStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class LostStatus:
    """A member that is gone before the job was done."""

    worker: str  # id of the worker
    rank: int  # that it had
    reason: str  # one sentence for people
    version: int  # at which it was given up


@stored("EpochStatus")
@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStatus:
    """An evaluation."""

    epoch: int  # its number; if every epoch is evaluated, the epochs completed
    version: int  # that was evaluated
    metrics: Mapping[str, float]  # "loss", "accuracy", …
    seconds: float = 0.0  # From the first round's opening to this version
    epochs: float = 0.0  # That had been trained on when it was asked for


@stored("LossPoint")
@dataclass(frozen=True, kw_only=True, slots=True)
class LossPoint:
    """Mean training loss of some versions in a row."""

    version: int  # the last of them
    loss: float  # weighted by samples


@stored("Traffic")
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes at the server."""

    wire_bytes_up: int = 0  # Messages with gRPC and HTTP/2 framing, from workers
    wire_bytes_down: int = 0  # The same, to workers
    raw_bytes_up: int = 0  # What the tensors from workers would take as bare float32
    raw_bytes_down: int = 0  # The same, to workers
    payload_bytes_up: int = 0  # Payloads of accepted pushes alone
    compressed_payload_bytes_up: int = 0  # Of those, the ones that are not dense, with their levels
    compressed_raw_bytes_up: int = 0  # Float32 size of the tensors that they are of


@stored("StatusResponse")
@dataclass(frozen=True, kw_only=True, slots=True)
class StatusResponse:
    """The job as a whole."""

    job: JobDescription  # the job that the server runs
    phase: Phase  # of the job
    waiting: str  # whom or what the job waits for; empty while it moves
    version: int  # current parameter version
    epoch: int  # epochs completed
    epoch_progress: float  # part of the running epoch, 0 to 1
    members: tuple[MemberStatus, ...]  # in order of rank
    lost: tuple[LostStatus, ...]  # in order of time
    evaluations: tuple[EpochStatus, ...]  # the last 1024, in order of epoch
    traffic: Traffic  # since the server started
    pushes: int  # accepted
    refused_pushes: int  # of all workers
    train_loss: float  # sample-weighted mean of the last closed round
    training_seconds: float  # from the first round's opening to the last version
    parameters_sha256: str  # of the final parameters in manifest order; empty before
    software: str  # version of the server
    local_steps: int = 0  # That each worker took, in local mode: over all rounds
    largest_staleness: int = 0  # Of accepted pushes: clocks in stale mode, versions in async
    redundancy: int = 0  # Of the last round of coded mode
    uncoded_exchanges: int = 0  # Of coded mode: that replaced one which could not end
    clipped_elements: int = 0  # Of gradients in coded mode, by all workers
    repeated_samples: int = 0  # Trained on by a lost worker and by its successor
    measured: Measured | None = None  # if it was asked for, and enough is known
    step_seconds: float = 0.0  # From one round to the next, median of the last ones
    predicted_step_seconds: float = 0.0  # What a step should take, by what has been measured; 0: not known
    learning_rate: float = 0.0  # Of the next step, by the job's schedule; 0 where scripts say it
    losses: tuple[LossPoint, ...] = ()  # If they were asked for: training losses, in order of version
    unix_seconds: float = 0.0  # Of the server's clock, since 1970
    padding: bytes = b""  # That of the request, if it was to be sent back


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
