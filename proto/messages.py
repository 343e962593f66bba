"""The messages of gradwire.v1 as plain dataclasses.

Server and worker work with these and never see a protobuf class; `convert` maps between the two by field
name. What the fields mean is written once, in gradwire.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from .refusal import Refusal

PROTOCOL_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: str
    task: str
    mode: str
    downlink: str
    seed: int
    batch_size: int
    epochs: int
    optimizer: str
    learning_rate: float
    schedule: str
    correction: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    chunk_bytes: int
    lease_seconds: float
    heartbeat_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    state: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestMessage:
    """A manifest as it travels; `manifest.Manifest` is the checked form."""

    tensors: tuple[Tensor, ...]
    train_samples: int
    fingerprint: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    protocol_version: int
    worker: str
    incarnation: int
    software: str = ""
    compressors: tuple[str, ...] = ()
    compressor: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinReply:
    job: Job
    limits: Limits
    rank: int
    version: int
    initialize: bool
    software: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeHeader:
    job: str
    worker: str
    incarnation: int
    manifest: ManifestMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeReply:
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRequest:
    job: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchHeader:
    job: str
    manifest: ManifestMessage
    version: int
    chunk_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """`data`: uint8 view of the received message."""

    transfer: int
    offset: int
    crc32c: int
    data: npt.NDArray[np.uint8]


class DenseFormatCode(IntEnum):
    UNSPECIFIED = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3


class CodeFormatCode(IntEnum):
    UNSPECIFIED = 0
    SIGNED_4BIT = 1
    SIGNED_2BIT = 2
    BINARY = 3
    VOTE = 4


class IndexCodingCode(IntEnum):
    UNSPECIFIED = 0
    GAPS = 1
    BITMAP = 2
    SEEDED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseHeader:
    format: DenseFormatCode


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedHeader:
    format: CodeFormatCode
    levels: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearHeader:
    bits: int
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseHeader:
    count: int
    coding: IndexCodingCode
    low_bits: int = 0
    index_bytes: int = 0
    seed: int = 0
    values: DenseHeader | QuantizedHeader | LinearHeader | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    tensor: int
    elements: int
    kind: DenseHeader | QuantizedHeader | LinearHeader | SparseHeader | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    job: str
    worker: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    fingerprint: bytes
    version: int | None = None
    assigned: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    crc32c: int
    computing_seconds: float = 0.0
    clipped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    seq: int
    base_version: int
    samples: int
    tensors: tuple[TensorHeader, ...]
    loss: float = 0.0
    assignment: int
    exchanged: Exchanged | None = None
    slice: int = 0
    slices: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    exchange: int
    index: int
    elements: int

    @property
    def transfer(self) -> int:
        """What its chunks are marked with."""
        return (self.exchange << 32) + self.index


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    version: int
    leaving: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    activity: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    version: int
    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    failed: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    rank: int
    version: int
    last_seq: int


class Content(IntEnum):
    UNSPECIFIED = 0
    VALUES = 1
    DELTA = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    version: int
    content: Content
    tensors: tuple[TensorHeader, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    start: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    exchange: int
    redundancy: int
    senders: tuple[int, ...] = ()
    present: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    id: int
    version: int
    epoch: int = 0
    ranges: tuple[Range, ...] = ()
    position: int = 0
    world: int = 1
    progress: float = 0.0
    learning_rate: float = 0.0
    evaluate_epoch: int = 0
    finished: bool = False
    slice: int = 0
    slices: int = 0
    stragglers: int = 0
    coding: Coding | None = None
    apply: int = 0

    @property
    def samples(self) -> int:
        """How many there are in all ranges."""
        return sum(each.count for each in self.ranges)


class Decision(IntEnum):
    UNSPECIFIED = 0
    ACCEPTED = 1
    REFUSED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    seq: int
    decision: Decision
    version: int = 0
    refusal: Refusal | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    ranks: tuple[int, ...]
    seconds: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRequest:
    version: int
    apply: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class InitializeRequest:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRequest:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    worker: str
    rank: int
    attached: bool
    heard_seconds: float
    activity: str
    compressor: str
    pushes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LostStatus:
    worker: str
    rank: int
    reason: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStatus:
    epoch: int
    version: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    wire_bytes_up: int = 0
    wire_bytes_down: int = 0
    raw_bytes_up: int = 0
    raw_bytes_down: int = 0
    payload_bytes_up: int = 0
    compressed_payload_bytes_up: int = 0
    compressed_raw_bytes_up: int = 0


class Phase(IntEnum):
    UNSPECIFIED = 0
    EMPTY = 1
    GATHERING = 2
    RUNNING = 3
    FINISHING = 4
    FINISHED = 5
    STOPPING = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusReply:
    job: Job
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
    repeated_samples: int = 0
    redundancy: int = 0
    uncoded_exchanges: int = 0
    clipped_elements: int = 0


WorkerMessage = Chunk | Push | Heartbeat | Hello | Evaluation | Leave | Ready | Packet | Snapshot
ServerMessage = (
    Chunk | Update | Assignment | Outcome | Welcome | Waiting | InitializeRequest | Packet | SnapshotRequest
)
InitializeMessage = Chunk | InitializeHeader
FetchMessage = Chunk | FetchHeader
