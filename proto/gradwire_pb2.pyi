from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_MALFORMED: _ClassVar[Reason]
    REASON_PROTOCOL_VERSION: _ClassVar[Reason]
    REASON_UNKNOWN_JOB: _ClassVar[Reason]
    REASON_JOB_FINISHED: _ClassVar[Reason]
    REASON_MODEL: _ClassVar[Reason]
    REASON_FENCED: _ClassVar[Reason]
    REASON_DUPLICATE_WORKER: _ClassVar[Reason]
    REASON_NOT_A_MEMBER: _ClassVar[Reason]
    REASON_NOT_INITIALIZED: _ClassVar[Reason]
    REASON_ALREADY_INITIALIZED: _ClassVar[Reason]
    REASON_TENSOR: _ClassVar[Reason]
    REASON_SHAPE: _ClassVar[Reason]
    REASON_DTYPE: _ClassVar[Reason]
    REASON_ELEMENTS: _ClassVar[Reason]
    REASON_PAYLOAD: _ClassVar[Reason]
    REASON_NON_FINITE: _ClassVar[Reason]
    REASON_CHECKSUM: _ClassVar[Reason]
    REASON_CHUNK: _ClassVar[Reason]
    REASON_SIZE: _ClassVar[Reason]
    REASON_SEQUENCE: _ClassVar[Reason]
    REASON_STALE: _ClassVar[Reason]
    REASON_PROTECTED: _ClassVar[Reason]
    REASON_STOPPING: _ClassVar[Reason]
    REASON_PACKET: _ClassVar[Reason]
    REASON_PLAN: _ClassVar[Reason]
    REASON_REDUNDANT: _ClassVar[Reason]
    REASON_TOKEN: _ClassVar[Reason]
    REASON_NAME: _ClassVar[Reason]
    REASON_GROUP: _ClassVar[Reason]

class EntryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENTRY_KIND_UNSPECIFIED: _ClassVar[EntryKind]
    ENTRY_KIND_BUFFER: _ClassVar[EntryKind]
    ENTRY_KIND_FROZEN: _ClassVar[EntryKind]
    ENTRY_KIND_TIED: _ClassVar[EntryKind]

class DenseEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DENSE_ENCODING_UNSPECIFIED: _ClassVar[DenseEncoding]
    DENSE_ENCODING_FLOAT32: _ClassVar[DenseEncoding]
    DENSE_ENCODING_BFLOAT16: _ClassVar[DenseEncoding]
    DENSE_ENCODING_FLOAT16: _ClassVar[DenseEncoding]

class CodeEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODE_ENCODING_UNSPECIFIED: _ClassVar[CodeEncoding]
    CODE_ENCODING_SIGNED_4BIT: _ClassVar[CodeEncoding]
    CODE_ENCODING_SIGNED_2BIT: _ClassVar[CodeEncoding]
    CODE_ENCODING_BINARY: _ClassVar[CodeEncoding]
    CODE_ENCODING_VOTE: _ClassVar[CodeEncoding]
    CODE_ENCODING_CODEBOOK_8BIT: _ClassVar[CodeEncoding]

class IndexEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEX_ENCODING_UNSPECIFIED: _ClassVar[IndexEncoding]
    INDEX_ENCODING_GAPS: _ClassVar[IndexEncoding]
    INDEX_ENCODING_BITMAP: _ClassVar[IndexEncoding]
    INDEX_ENCODING_SEEDED: _ClassVar[IndexEncoding]
    INDEX_ENCODING_UNIFORM: _ClassVar[IndexEncoding]

class Content(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTENT_UNSPECIFIED: _ClassVar[Content]
    CONTENT_VALUES: _ClassVar[Content]
    CONTENT_DELTA: _ClassVar[Content]
    CONTENT_GRADIENT: _ClassVar[Content]

class Decision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_UNSPECIFIED: _ClassVar[Decision]
    DECISION_ACCEPTED: _ClassVar[Decision]
    DECISION_REFUSED: _ClassVar[Decision]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_EMPTY: _ClassVar[Phase]
    PHASE_GATHERING: _ClassVar[Phase]
    PHASE_RUNNING: _ClassVar[Phase]
    PHASE_FINISHING: _ClassVar[Phase]
    PHASE_FINISHED: _ClassVar[Phase]
    PHASE_STOPPING: _ClassVar[Phase]
REASON_UNSPECIFIED: Reason
REASON_MALFORMED: Reason
REASON_PROTOCOL_VERSION: Reason
REASON_UNKNOWN_JOB: Reason
REASON_JOB_FINISHED: Reason
REASON_MODEL: Reason
REASON_FENCED: Reason
REASON_DUPLICATE_WORKER: Reason
REASON_NOT_A_MEMBER: Reason
REASON_NOT_INITIALIZED: Reason
REASON_ALREADY_INITIALIZED: Reason
REASON_TENSOR: Reason
REASON_SHAPE: Reason
REASON_DTYPE: Reason
REASON_ELEMENTS: Reason
REASON_PAYLOAD: Reason
REASON_NON_FINITE: Reason
REASON_CHECKSUM: Reason
REASON_CHUNK: Reason
REASON_SIZE: Reason
REASON_SEQUENCE: Reason
REASON_STALE: Reason
REASON_PROTECTED: Reason
REASON_STOPPING: Reason
REASON_PACKET: Reason
REASON_PLAN: Reason
REASON_REDUNDANT: Reason
REASON_TOKEN: Reason
REASON_NAME: Reason
REASON_GROUP: Reason
ENTRY_KIND_UNSPECIFIED: EntryKind
ENTRY_KIND_BUFFER: EntryKind
ENTRY_KIND_FROZEN: EntryKind
ENTRY_KIND_TIED: EntryKind
DENSE_ENCODING_UNSPECIFIED: DenseEncoding
DENSE_ENCODING_FLOAT32: DenseEncoding
DENSE_ENCODING_BFLOAT16: DenseEncoding
DENSE_ENCODING_FLOAT16: DenseEncoding
CODE_ENCODING_UNSPECIFIED: CodeEncoding
CODE_ENCODING_SIGNED_4BIT: CodeEncoding
CODE_ENCODING_SIGNED_2BIT: CodeEncoding
CODE_ENCODING_BINARY: CodeEncoding
CODE_ENCODING_VOTE: CodeEncoding
CODE_ENCODING_CODEBOOK_8BIT: CodeEncoding
INDEX_ENCODING_UNSPECIFIED: IndexEncoding
INDEX_ENCODING_GAPS: IndexEncoding
INDEX_ENCODING_BITMAP: IndexEncoding
INDEX_ENCODING_SEEDED: IndexEncoding
INDEX_ENCODING_UNIFORM: IndexEncoding
CONTENT_UNSPECIFIED: Content
CONTENT_VALUES: Content
CONTENT_DELTA: Content
CONTENT_GRADIENT: Content
DECISION_UNSPECIFIED: Decision
DECISION_ACCEPTED: Decision
DECISION_REFUSED: Decision
PHASE_UNSPECIFIED: Phase
PHASE_EMPTY: Phase
PHASE_GATHERING: Phase
PHASE_RUNNING: Phase
PHASE_FINISHING: Phase
PHASE_FINISHED: Phase
PHASE_STOPPING: Phase

class Refusal(_message.Message):
    __slots__ = ("reason", "message", "worker", "field", "limit", "value", "remedy")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    message: str
    worker: str
    field: str
    limit: str
    value: str
    remedy: str
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., worker: _Optional[str] = ..., field: _Optional[str] = ..., limit: _Optional[str] = ..., value: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class JobDescription(_message.Message):
    __slots__ = ("id", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    id: str
    settings: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("chunk_bytes", "lease_seconds", "heartbeat_seconds", "progress_seconds")
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    chunk_bytes: int
    lease_seconds: float
    heartbeat_seconds: float
    progress_seconds: float
    def __init__(self, chunk_bytes: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., heartbeat_seconds: _Optional[float] = ..., progress_seconds: _Optional[float] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype", "state", "group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    state: bool
    group: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., state: bool = ..., group: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("optimizer", "learning_rate")
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    optimizer: str
    learning_rate: float
    def __init__(self, optimizer: _Optional[str] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class ModelManifest(_message.Message):
    __slots__ = ("tensors", "train_samples", "fingerprint", "groups", "entries", "data", "clip_norm", "epochs")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    train_samples: int
    fingerprint: bytes
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    data: int
    clip_norm: float
    epochs: int
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., train_samples: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., data: _Optional[int] = ..., clip_norm: _Optional[float] = ..., epochs: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("name", "kind", "shape", "dtype", "tied_to", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TIED_TO_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: EntryKind
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    tied_to: str
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[EntryKind, str]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., tied_to: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "software", "compressors", "compressor")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSORS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    software: str
    compressors: _containers.RepeatedScalarFieldContainer[str]
    compressor: str
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., software: _Optional[str] = ..., compressors: _Optional[_Iterable[str]] = ..., compressor: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("job", "limits", "rank", "version", "initialize", "software", "epoch", "workers")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    job: JobDescription
    limits: Limits
    rank: int
    version: int
    initialize: bool
    software: str
    epoch: int
    workers: int
    def __init__(self, job: _Optional[_Union[JobDescription, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., rank: _Optional[int] = ..., version: _Optional[int] = ..., initialize: bool = ..., software: _Optional[str] = ..., epoch: _Optional[int] = ..., workers: _Optional[int] = ...) -> None: ...

class InitializeMessage(_message.Message):
    __slots__ = ("chunk", "header", "crc32c")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    header: InitializeHeader
    crc32c: int
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., header: _Optional[_Union[InitializeHeader, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class InitializeHeader(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "manifest", "least_samples", "moments", "epoch", "steps", "digest", "held", "asks")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LEAST_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: str
    incarnation: int
    manifest: ModelManifest
    least_samples: int
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    epoch: int
    steps: int
    digest: bytes
    held: int
    asks: bool
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., manifest: _Optional[_Union[ModelManifest, _Mapping]] = ..., least_samples: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., epoch: _Optional[int] = ..., steps: _Optional[int] = ..., digest: _Optional[bytes] = ..., held: _Optional[int] = ..., asks: bool = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("tensor", "name")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    name: str
    def __init__(self, tensor: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class GetOptimizerRequest(_message.Message):
    __slots__ = ("job", "worker")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: str
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[str] = ...) -> None: ...

class OptimizerMessage(_message.Message):
    __slots__ = ("chunk", "header", "crc32c")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    header: OptimizerHeader
    crc32c: int
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., header: _Optional[_Union[OptimizerHeader, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class OptimizerHeader(_message.Message):
    __slots__ = ("version", "moments")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    def __init__(self, version: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ...) -> None: ...

class InitializeResponse(_message.Message):
    __slots__ = ("version", "replaced", "held")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    version: int
    replaced: bool
    held: int
    def __init__(self, version: _Optional[int] = ..., replaced: bool = ..., held: _Optional[int] = ...) -> None: ...

class StateMessage(_message.Message):
    __slots__ = ("chunk", "header", "crc32c")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    header: StateHeader
    crc32c: int
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., header: _Optional[_Union[StateHeader, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("job", "worker", "incarnation", "seq", "collection", "epoch", "frozen")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: str
    incarnation: int
    seq: int
    collection: int
    epoch: int
    frozen: bool
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ..., collection: _Optional[int] = ..., epoch: _Optional[int] = ..., frozen: bool = ...) -> None: ...

class PutStateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("job", "epoch", "frozen", "worker")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    frozen: bytes
    worker: str
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., frozen: _Optional[bytes] = ..., worker: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class FetchMessage(_message.Message):
    __slots__ = ("chunk", "header", "crc32c")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    header: FetchHeader
    crc32c: int
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., header: _Optional[_Union[FetchHeader, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, messages: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("job", "manifest", "version", "chunk_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    manifest: ModelManifest
    version: int
    chunk_bytes: int
    def __init__(self, job: _Optional[str] = ..., manifest: _Optional[_Union[ModelManifest, _Mapping]] = ..., version: _Optional[int] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("transfer", "offset", "crc32c", "data", "packed")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    offset: int
    crc32c: int
    data: bytes
    packed: bool
    def __init__(self, transfer: _Optional[int] = ..., offset: _Optional[int] = ..., crc32c: _Optional[int] = ..., data: _Optional[bytes] = ..., packed: bool = ...) -> None: ...

class DenseHeader(_message.Message):
    __slots__ = ("format",)
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    format: DenseEncoding
    def __init__(self, format: _Optional[_Union[DenseEncoding, str]] = ...) -> None: ...

class QuantizedHeader(_message.Message):
    __slots__ = ("format", "levels", "sizes")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    format: CodeEncoding
    levels: _containers.RepeatedScalarFieldContainer[float]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, format: _Optional[_Union[CodeEncoding, str]] = ..., levels: _Optional[_Iterable[float]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class LinearHeader(_message.Message):
    __slots__ = ("bits", "bucket")
    BITS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    bits: int
    bucket: int
    def __init__(self, bits: _Optional[int] = ..., bucket: _Optional[int] = ...) -> None: ...

class SparseHeader(_message.Message):
    __slots__ = ("count", "coding", "low_bits", "index_bytes", "seed", "dense", "quantized", "linear")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    LOW_BITS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZED_FIELD_NUMBER: _ClassVar[int]
    LINEAR_FIELD_NUMBER: _ClassVar[int]
    count: int
    coding: IndexEncoding
    low_bits: int
    index_bytes: int
    seed: int
    dense: DenseHeader
    quantized: QuantizedHeader
    linear: LinearHeader
    def __init__(self, count: _Optional[int] = ..., coding: _Optional[_Union[IndexEncoding, str]] = ..., low_bits: _Optional[int] = ..., index_bytes: _Optional[int] = ..., seed: _Optional[int] = ..., dense: _Optional[_Union[DenseHeader, _Mapping]] = ..., quantized: _Optional[_Union[QuantizedHeader, _Mapping]] = ..., linear: _Optional[_Union[LinearHeader, _Mapping]] = ...) -> None: ...

class ProjectedHeader(_message.Message):
    __slots__ = ("count", "exponent", "dense", "quantized", "linear")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZED_FIELD_NUMBER: _ClassVar[int]
    LINEAR_FIELD_NUMBER: _ClassVar[int]
    count: int
    exponent: int
    dense: DenseHeader
    quantized: QuantizedHeader
    linear: LinearHeader
    def __init__(self, count: _Optional[int] = ..., exponent: _Optional[int] = ..., dense: _Optional[_Union[DenseHeader, _Mapping]] = ..., quantized: _Optional[_Union[QuantizedHeader, _Mapping]] = ..., linear: _Optional[_Union[LinearHeader, _Mapping]] = ...) -> None: ...

class AbsentHeader(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PayloadHeader(_message.Message):
    __slots__ = ("elements", "dense", "quantized", "linear", "sparse", "absent", "projected", "content")
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZED_FIELD_NUMBER: _ClassVar[int]
    LINEAR_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    PROJECTED_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    elements: int
    dense: DenseHeader
    quantized: QuantizedHeader
    linear: LinearHeader
    sparse: SparseHeader
    absent: AbsentHeader
    projected: ProjectedHeader
    content: Content
    def __init__(self, elements: _Optional[int] = ..., dense: _Optional[_Union[DenseHeader, _Mapping]] = ..., quantized: _Optional[_Union[QuantizedHeader, _Mapping]] = ..., linear: _Optional[_Union[LinearHeader, _Mapping]] = ..., sparse: _Optional[_Union[SparseHeader, _Mapping]] = ..., absent: _Optional[_Union[AbsentHeader, _Mapping]] = ..., projected: _Optional[_Union[ProjectedHeader, _Mapping]] = ..., content: _Optional[_Union[Content, str]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("chunk", "part", "heartbeat", "hello", "evaluation", "leave", "ready", "packet", "snapshot", "commit", "abandon", "profile", "saved", "stop", "more", "batch", "crc32c")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PACKET_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    part: PartHeader
    heartbeat: Heartbeat
    hello: Hello
    evaluation: Evaluation
    leave: Leave
    ready: Ready
    packet: Packet
    snapshot: Snapshot
    commit: Commit
    abandon: Abandon
    profile: Profile
    saved: Saved
    stop: Stop
    more: More
    batch: Batch
    crc32c: int
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., part: _Optional[_Union[PartHeader, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., packet: _Optional[_Union[Packet, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., more: _Optional[_Union[More, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("job", "worker", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: str
    incarnation: int
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("fingerprint", "train_samples", "version", "assigned", "plan", "data", "drifted", "restored", "model", "accumulate")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DRIFTED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    train_samples: int
    version: int
    assigned: int
    plan: int
    data: int
    drifted: int
    restored: bool
    model: ModelManifest
    accumulate: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., train_samples: _Optional[int] = ..., version: _Optional[int] = ..., assigned: _Optional[int] = ..., plan: _Optional[int] = ..., data: _Optional[int] = ..., drifted: _Optional[int] = ..., restored: bool = ..., model: _Optional[_Union[ModelManifest, _Mapping]] = ..., accumulate: _Optional[int] = ...) -> None: ...

class More(_message.Message):
    __slots__ = ("assignment", "batches", "wanted", "steps")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    assignment: int
    batches: int
    wanted: int
    steps: int
    def __init__(self, assignment: _Optional[int] = ..., batches: _Optional[int] = ..., wanted: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class PartHeader(_message.Message):
    __slots__ = ("seq", "assignment", "part", "plan", "payloads", "waited", "learning_rates")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    seq: int
    assignment: int
    part: int
    plan: int
    payloads: _containers.RepeatedCompositeFieldContainer[PayloadHeader]
    waited: bool
    learning_rates: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, seq: _Optional[int] = ..., assignment: _Optional[int] = ..., part: _Optional[int] = ..., plan: _Optional[int] = ..., payloads: _Optional[_Iterable[_Union[PayloadHeader, _Mapping]]] = ..., waited: bool = ..., learning_rates: _Optional[_Iterable[float]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("seq", "assignment", "base_version", "samples", "parts", "digest", "loss", "exchanged", "plan", "computing_seconds", "local_rates", "batch", "batches", "steps")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RATES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    assignment: int
    base_version: int
    samples: int
    parts: int
    digest: int
    loss: float
    exchanged: Exchanged
    plan: int
    computing_seconds: float
    local_rates: _containers.RepeatedScalarFieldContainer[float]
    batch: int
    batches: int
    steps: int
    def __init__(self, seq: _Optional[int] = ..., assignment: _Optional[int] = ..., base_version: _Optional[int] = ..., samples: _Optional[int] = ..., parts: _Optional[int] = ..., digest: _Optional[int] = ..., loss: _Optional[float] = ..., exchanged: _Optional[_Union[Exchanged, _Mapping]] = ..., plan: _Optional[int] = ..., computing_seconds: _Optional[float] = ..., local_rates: _Optional[_Iterable[float]] = ..., batch: _Optional[int] = ..., batches: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Exchanged(_message.Message):
    __slots__ = ("crc32c", "computing_seconds", "clipped")
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_FIELD_NUMBER: _ClassVar[int]
    crc32c: int
    computing_seconds: float
    clipped: int
    def __init__(self, crc32c: _Optional[int] = ..., computing_seconds: _Optional[float] = ..., clipped: _Optional[int] = ...) -> None: ...

class Packet(_message.Message):
    __slots__ = ("exchange", "index", "elements", "checksums")
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    exchange: int
    index: int
    elements: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, exchange: _Optional[int] = ..., index: _Optional[int] = ..., elements: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("version", "leaving")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    version: int
    leaving: bool
    def __init__(self, version: _Optional[int] = ..., leaving: bool = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("steps", "forward_seconds", "backward_seconds", "densities", "sent_bytes", "compressing_seconds", "step_seconds", "processor_share", "machine")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DENSITIES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPRESSING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SHARE_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    steps: int
    forward_seconds: _containers.RepeatedScalarFieldContainer[float]
    backward_seconds: _containers.RepeatedScalarFieldContainer[float]
    densities: _containers.RepeatedScalarFieldContainer[float]
    sent_bytes: int
    compressing_seconds: float
    step_seconds: float
    processor_share: float
    machine: str
    def __init__(self, steps: _Optional[int] = ..., forward_seconds: _Optional[_Iterable[float]] = ..., backward_seconds: _Optional[_Iterable[float]] = ..., densities: _Optional[_Iterable[float]] = ..., sent_bytes: _Optional[int] = ..., compressing_seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., processor_share: _Optional[float] = ..., machine: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("activity", "stalled_seconds")
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    activity: str
    stalled_seconds: float
    def __init__(self, activity: _Optional[str] = ..., stalled_seconds: _Optional[float] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("version", "epoch", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("failed", "reason")
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    failed: bool
    reason: str
    def __init__(self, failed: bool = ..., reason: _Optional[str] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("chunk", "update", "assignment", "outcome", "welcome", "waiting", "initialize", "packet", "snapshot", "plan", "unwanted", "stored", "save", "evaluations", "batch", "crc32c")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    PACKET_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    update: Update
    assignment: Assignment
    outcome: Outcome
    welcome: Welcome
    waiting: Waiting
    initialize: InitializeRequest
    packet: Packet
    snapshot: SnapshotRequest
    plan: PlanAnnouncement
    unwanted: Unwanted
    stored: Stored
    save: Save
    evaluations: Evaluations
    batch: Batch
    crc32c: int
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., update: _Optional[_Union[Update, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., initialize: _Optional[_Union[InitializeRequest, _Mapping]] = ..., packet: _Optional[_Union[Packet, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., plan: _Optional[_Union[PlanAnnouncement, _Mapping]] = ..., unwanted: _Optional[_Union[Unwanted, _Mapping]] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., evaluations: _Optional[_Union[Evaluations, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("rank", "version", "last_seq", "newest", "stored", "plan", "evaluations")
    RANK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    version: int
    last_seq: int
    newest: int
    stored: _containers.RepeatedCompositeFieldContainer[Stored]
    plan: int
    evaluations: Evaluations
    def __init__(self, rank: _Optional[int] = ..., version: _Optional[int] = ..., last_seq: _Optional[int] = ..., newest: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[Stored, _Mapping]]] = ..., plan: _Optional[int] = ..., evaluations: _Optional[_Union[Evaluations, _Mapping]] = ...) -> None: ...

class Evaluations(_message.Message):
    __slots__ = ("results", "best")
    class BestEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EpochStatus]
    best: _containers.ScalarMap[str, float]
    def __init__(self, results: _Optional[_Iterable[_Union[EpochStatus, _Mapping]]] = ..., best: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("seq", "parts")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanAnnouncement(_message.Message):
    __slots__ = ("number", "tensors", "cuts", "merged", "turns", "credit", "norms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    number: int
    tensors: _containers.RepeatedScalarFieldContainer[int]
    cuts: _containers.RepeatedScalarFieldContainer[int]
    merged: bool
    turns: _containers.RepeatedScalarFieldContainer[int]
    credit: int
    norms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, number: _Optional[int] = ..., tensors: _Optional[_Iterable[int]] = ..., cuts: _Optional[_Iterable[int]] = ..., merged: bool = ..., turns: _Optional[_Iterable[int]] = ..., credit: _Optional[int] = ..., norms: _Optional[_Iterable[float]] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("version", "part", "plan", "whole", "payloads", "beside", "learning_rates", "clip")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    version: int
    part: int
    plan: int
    whole: bool
    payloads: _containers.RepeatedCompositeFieldContainer[PayloadHeader]
    beside: _containers.RepeatedCompositeFieldContainer[Beside]
    learning_rates: _containers.RepeatedScalarFieldContainer[float]
    clip: float
    def __init__(self, version: _Optional[int] = ..., part: _Optional[int] = ..., plan: _Optional[int] = ..., whole: bool = ..., payloads: _Optional[_Iterable[_Union[PayloadHeader, _Mapping]]] = ..., beside: _Optional[_Iterable[_Union[Beside, _Mapping]]] = ..., learning_rates: _Optional[_Iterable[float]] = ..., clip: _Optional[float] = ...) -> None: ...

class Beside(_message.Message):
    __slots__ = ("tensor", "name", "start", "end", "payload")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    name: str
    start: int
    end: int
    payload: PayloadHeader
    def __init__(self, tensor: _Optional[int] = ..., name: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., payload: _Optional[_Union[PayloadHeader, _Mapping]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("start", "count")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("version", "epoch", "position", "world", "evaluate_epoch", "finished", "id", "ranges", "progress", "learning_rate", "slice", "slices", "stragglers", "coding", "apply", "pace", "parts", "plan", "next", "checked", "checksum", "collection", "take_buffers", "total_steps", "earlier_steps", "local_rates", "local_steps", "trained", "evaluations", "batches", "steps", "accumulate", "exhausted")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    TAKE_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RATES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    position: int
    world: int
    evaluate_epoch: int
    finished: bool
    id: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    progress: float
    learning_rate: float
    slice: int
    slices: int
    stragglers: int
    coding: Coding
    apply: int
    pace: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    plan: int
    next: _containers.RepeatedCompositeFieldContainer[Range]
    checked: int
    checksum: int
    collection: int
    take_buffers: bool
    total_steps: int
    earlier_steps: int
    local_rates: _containers.RepeatedScalarFieldContainer[float]
    local_steps: int
    trained: bool
    evaluations: int
    batches: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    accumulate: int
    exhausted: bool
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., world: _Optional[int] = ..., evaluate_epoch: _Optional[int] = ..., finished: bool = ..., id: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., progress: _Optional[float] = ..., learning_rate: _Optional[float] = ..., slice: _Optional[int] = ..., slices: _Optional[int] = ..., stragglers: _Optional[int] = ..., coding: _Optional[_Union[Coding, _Mapping]] = ..., apply: _Optional[int] = ..., pace: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ..., plan: _Optional[int] = ..., next: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., checked: _Optional[int] = ..., checksum: _Optional[int] = ..., collection: _Optional[int] = ..., take_buffers: bool = ..., total_steps: _Optional[int] = ..., earlier_steps: _Optional[int] = ..., local_rates: _Optional[_Iterable[float]] = ..., local_steps: _Optional[int] = ..., trained: bool = ..., evaluations: _Optional[int] = ..., batches: _Optional[_Iterable[int]] = ..., steps: _Optional[int] = ..., accumulate: _Optional[int] = ..., exhausted: bool = ...) -> None: ...

class Coding(_message.Message):
    __slots__ = ("exchange", "redundancy", "senders", "present", "sizes")
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    REDUNDANCY_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    exchange: int
    redundancy: int
    senders: _containers.RepeatedScalarFieldContainer[int]
    present: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, exchange: _Optional[int] = ..., redundancy: _Optional[int] = ..., senders: _Optional[_Iterable[int]] = ..., present: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("seq", "decision", "version", "refusal", "part", "counted")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    decision: Decision
    version: int
    refusal: Refusal
    part: int
    counted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., decision: _Optional[_Union[Decision, str]] = ..., version: _Optional[int] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., part: _Optional[int] = ..., counted: _Optional[_Iterable[int]] = ...) -> None: ...

class Unwanted(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("version", "error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    version: int
    error: str
    def __init__(self, version: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("ranks", "seconds", "text")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    text: str
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("version", "apply")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    version: int
    apply: int
    def __init__(self, version: _Optional[int] = ..., apply: _Optional[int] = ...) -> None: ...

class InitializeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("measured", "losses", "departed", "padding", "echo")
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    measured: bool
    losses: bool
    departed: bool
    padding: bytes
    echo: bool
    def __init__(self, measured: bool = ..., losses: bool = ..., departed: bool = ..., padding: _Optional[bytes] = ..., echo: bool = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("tensors", "forward_seconds", "backward_seconds", "part_seconds", "byte_seconds", "compressor", "fusion", "order", "part_bytes", "cores", "processor_share", "square_norms")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PART_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    FUSION_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SHARE_FIELD_NUMBER: _ClassVar[int]
    SQUARE_NORMS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    forward_seconds: _containers.RepeatedScalarFieldContainer[float]
    backward_seconds: _containers.RepeatedScalarFieldContainer[float]
    part_seconds: float
    byte_seconds: float
    compressor: str
    fusion: str
    order: str
    part_bytes: int
    cores: int
    processor_share: float
    square_norms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., forward_seconds: _Optional[_Iterable[float]] = ..., backward_seconds: _Optional[_Iterable[float]] = ..., part_seconds: _Optional[float] = ..., byte_seconds: _Optional[float] = ..., compressor: _Optional[str] = ..., fusion: _Optional[str] = ..., order: _Optional[str] = ..., part_bytes: _Optional[int] = ..., cores: _Optional[int] = ..., processor_share: _Optional[float] = ..., square_norms: _Optional[_Iterable[float]] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("worker", "rank", "attached", "heard_seconds", "activity", "compressor", "pushes", "stalled_seconds", "suspended")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    HEARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rank: int
    attached: bool
    heard_seconds: float
    activity: str
    compressor: str
    pushes: int
    stalled_seconds: float
    suspended: bool
    def __init__(self, worker: _Optional[str] = ..., rank: _Optional[int] = ..., attached: bool = ..., heard_seconds: _Optional[float] = ..., activity: _Optional[str] = ..., compressor: _Optional[str] = ..., pushes: _Optional[int] = ..., stalled_seconds: _Optional[float] = ..., suspended: bool = ...) -> None: ...

class LostStatus(_message.Message):
    __slots__ = ("worker", "rank", "reason", "version")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rank: int
    reason: str
    version: int
    def __init__(self, worker: _Optional[str] = ..., rank: _Optional[int] = ..., reason: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class EpochStatus(_message.Message):
    __slots__ = ("epoch", "version", "metrics", "seconds", "epochs")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    metrics: _containers.ScalarMap[str, float]
    seconds: float
    epochs: float
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., seconds: _Optional[float] = ..., epochs: _Optional[float] = ...) -> None: ...

class LossPoint(_message.Message):
    __slots__ = ("version", "loss")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    version: int
    loss: float
    def __init__(self, version: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("wire_bytes_up", "wire_bytes_down", "raw_bytes_up", "raw_bytes_down", "payload_bytes_up", "compressed_payload_bytes_up", "compressed_raw_bytes_up", "payload_bytes_down")
    WIRE_BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_PAYLOAD_BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_RAW_BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    wire_bytes_up: int
    wire_bytes_down: int
    raw_bytes_up: int
    raw_bytes_down: int
    payload_bytes_up: int
    compressed_payload_bytes_up: int
    compressed_raw_bytes_up: int
    payload_bytes_down: int
    def __init__(self, wire_bytes_up: _Optional[int] = ..., wire_bytes_down: _Optional[int] = ..., raw_bytes_up: _Optional[int] = ..., raw_bytes_down: _Optional[int] = ..., payload_bytes_up: _Optional[int] = ..., compressed_payload_bytes_up: _Optional[int] = ..., compressed_raw_bytes_up: _Optional[int] = ..., payload_bytes_down: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("job", "phase", "waiting", "version", "epoch", "epoch_progress", "members", "lost", "departed", "evaluations", "traffic", "pushes", "refused_pushes", "train_loss", "training_seconds", "parameters_sha256", "software", "local_steps", "largest_staleness", "redundancy", "uncoded_exchanges", "clipped_elements", "repeated_samples", "measured", "step_seconds", "predicted_step_seconds", "learning_rate", "losses", "unix_seconds", "padding")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PUSHES_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOSS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_SHA256_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_STALENESS_FIELD_NUMBER: _ClassVar[int]
    REDUNDANCY_FIELD_NUMBER: _ClassVar[int]
    UNCODED_EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    REPEATED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    job: JobDescription
    phase: Phase
    waiting: str
    version: int
    epoch: int
    epoch_progress: float
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    lost: _containers.RepeatedCompositeFieldContainer[LostStatus]
    departed: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    evaluations: _containers.RepeatedCompositeFieldContainer[EpochStatus]
    traffic: Traffic
    pushes: int
    refused_pushes: int
    train_loss: float
    training_seconds: float
    parameters_sha256: str
    software: str
    local_steps: int
    largest_staleness: int
    redundancy: int
    uncoded_exchanges: int
    clipped_elements: int
    repeated_samples: int
    measured: Measured
    step_seconds: float
    predicted_step_seconds: float
    learning_rate: float
    losses: _containers.RepeatedCompositeFieldContainer[LossPoint]
    unix_seconds: float
    padding: bytes
    def __init__(self, job: _Optional[_Union[JobDescription, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., waiting: _Optional[str] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., epoch_progress: _Optional[float] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[LostStatus, _Mapping]]] = ..., departed: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., evaluations: _Optional[_Iterable[_Union[EpochStatus, _Mapping]]] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., pushes: _Optional[int] = ..., refused_pushes: _Optional[int] = ..., train_loss: _Optional[float] = ..., training_seconds: _Optional[float] = ..., parameters_sha256: _Optional[str] = ..., software: _Optional[str] = ..., local_steps: _Optional[int] = ..., largest_staleness: _Optional[int] = ..., redundancy: _Optional[int] = ..., uncoded_exchanges: _Optional[int] = ..., clipped_elements: _Optional[int] = ..., repeated_samples: _Optional[int] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., step_seconds: _Optional[float] = ..., predicted_step_seconds: _Optional[float] = ..., learning_rate: _Optional[float] = ..., losses: _Optional[_Iterable[_Union[LossPoint, _Mapping]]] = ..., unix_seconds: _Optional[float] = ..., padding: _Optional[bytes] = ...) -> None: ...
