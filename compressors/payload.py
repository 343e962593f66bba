"""Payload kinds: the form in which a compressor hands over a tensor, and which a server can sum.

A payload describes itself. A receiver looks at its kind and never at the name of the algorithm that made it,
so a new compressor needs no change on the server. The kinds are few:

* `DensePayload`: every element, as float32, bfloat16 or float16.
* `QuantizedPayload`: codes of a fixed number of bits per element, indices into a small table of levels; of
  one tensor, or of several consecutive ones, each with a table of its own.
* `LinearPayload`: signed integers of a fixed number of bits, or signs, times a scale per bucket of elements.
* `SparsePayload`: some of the elements: their indices, and their values as a payload of one of the kinds
  above.
* `ProjectedPayload`: a tensor's coordinates in bases that the whole job shares, as a payload of one of the
  first three kinds. It cannot be decoded without the bases (`bases`).
* `AbsentPayload`: no data: these elements have no gradient, or do not change.

Byte order is little-endian throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]


class PayloadError(ValueError):
    """A payload that breaks a rule of its kind: the field, the expected value and the actual one, as text.

    Example:
        >>> from gradwire.compressors import DenseFormat, DensePayload, validate
        >>> data = numpy.zeros(4, numpy.uint8)
        >>> try:
        ...     validate(DensePayload(format=DenseFormat.FLOAT32, elements=3, data=data))
        ... except gradwire.PayloadError as error:
        ...     print(error)
        data: expected 12 bytes for 3 elements, got 4 bytes
    """

    def __init__(self, field: str, limit: str, value: str) -> None:
        super().__init__(f"{field}: expected {limit}, got {value}")
        self.field = field
        self.limit = limit
        self.value = value


def code_bytes(bits: int, elements: int) -> int:
    """Return the bytes of `elements` packed codes, in whole 32-bit words."""
    return -(-elements * bits // 32) * 4


def code_words(bits: int, sizes: Int64) -> Int64:
    """Return the 32-bit words of the packed codes of each block, given the blocks' numbers of elements."""
    per_word = 32 // bits
    words: Int64 = sizes // per_word + (sizes % per_word > 0)
    return words


def pack_codes(bits: int, codes: npt.NDArray[np.integer]) -> Bytes:
    """Pack the codes of one block for the data of a quantized payload.

    The lowest `bits` bits of each code follow each other without gaps, the first one in the lowest bits;
    zeros fill the last 32-bit word.
    """
    separate = (codes[:, None] >> np.arange(bits)) & 1
    packed = np.zeros(code_bytes(bits, codes.size), np.uint8)
    filled = np.packbits(separate.astype(np.uint8).reshape(-1), bitorder="little")
    packed[: filled.size] = filled
    return packed


def unpack_codes(bits: int, data: Bytes, elements: int) -> npt.NDArray[np.int32]:
    """Return the `elements` codes, from 0 to 2**bits - 1, that `pack_codes` has packed into `data`."""
    separate = np.unpackbits(data, count=elements * bits, bitorder="little").reshape(-1, bits)
    codes: npt.NDArray[np.int32] = (separate.astype(np.int32) << np.arange(bits, dtype=np.int32)).sum(
        axis=1, dtype=np.int32
    )
    return codes


class DenseFormat(Enum):
    """The element format of a dense payload; the value is its name in messages and logs."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def element_bytes(self) -> int:
        return 4 if self is DenseFormat.FLOAT32 else 2


class CodeFormat(Enum):
    """The code format of a quantized payload: how a code stands for a level.

    SIGNED_4BIT: 0 is zero, 1…7 are -levels[0…6], 9…15 are +levels[0…6]; 8 is never sent.
    SIGNED_2BIT: 00 is zero, 10 is -levels[0], 11 is +levels[0]; 01 is never sent.
    BINARY: 0 is levels[0], 1 is levels[1].
    CODEBOOK_8BIT: a code is the index of its level, of any sign and order. It is meant for third parties'
    compressors, and for large tensors: a table takes 1 KiB.
    VOTE: as BINARY, for -levels[0] and levels[0]. Votes are counted: an element of their sum has the sign of
    the majority, 0 if there is none, and the weighted mean of the levels as its magnitude.

    Codes fill 32-bit words, the first in the lowest bits. The last word is padded with code 0.
    """

    SIGNED_4BIT = "signed-4bit"
    SIGNED_2BIT = "signed-2bit"
    BINARY = "binary"
    VOTE = "vote"
    CODEBOOK_8BIT = "codebook-8bit"

    @cached_property
    def bits(self) -> int:
        bits = {CodeFormat.SIGNED_4BIT: 4, CodeFormat.SIGNED_2BIT: 2, CodeFormat.CODEBOOK_8BIT: 8}
        return bits.get(self, 1)

    @cached_property
    def level_count(self) -> int:
        counts = {CodeFormat.SIGNED_4BIT: 7, CodeFormat.BINARY: 2, CodeFormat.CODEBOOK_8BIT: 256}
        return counts.get(self, 1)

    @cached_property
    def forbidden_code(self) -> int | None:
        """Code that is never sent; None where every code stands for a level."""
        return {CodeFormat.SIGNED_4BIT: 8, CodeFormat.SIGNED_2BIT: 1}.get(self)

    def code_bytes(self, elements: int) -> int:
        return code_bytes(self.bits, elements)

    def table(self, levels: Float32) -> Float32:
        """Return the row of `tables` of one block."""
        table: Float32 = self.tables(levels)[0]
        return table

    def tables(self, levels: Float32) -> Float32:
        """Return the value of each code in each block, given the levels of all: float32, shape (blocks,
        2**bits). A forbidden code is 0."""
        each = levels.reshape(-1, self.level_count)
        tables = np.zeros((len(each), 2**self.bits), np.float32)
        match self:
            case CodeFormat.SIGNED_4BIT:
                tables[:, 1:8] = -each
                tables[:, 9:] = each
            case CodeFormat.SIGNED_2BIT:
                tables[:, 2:3], tables[:, 3:] = -each, each
            case CodeFormat.BINARY | CodeFormat.CODEBOOK_8BIT:
                tables[:] = each
            case CodeFormat.VOTE:
                tables[:, :1], tables[:, 1:] = -each, each
        return tables


class IndexCoding(Enum):
    """The coding of a sparse payload's indices; `kernels.sparse` has the formats.

    GAPS: Golomb-Rice codes of the distances between neighbouring indices.
    BITMAP: a bit per element.
    SEEDED: no data; one index in each of `count` equal ranges, drawn from a seed.
    UNIFORM: no data; `count` indices drawn from a seed, each set of them equally likely.
    """

    GAPS = "gaps"
    BITMAP = "bitmap"
    SEEDED = "seeded"
    UNIFORM = "uniform"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DensePayload:
    """All elements of a tensor, as floating-point numbers."""

    format: DenseFormat
    elements: int
    data: Bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedPayload:
    """Packed codes, and the table of levels to which they decode.

    The elements may be those of several tensors, one after another: blocks, each with levels of its own.

    Attributes:
        levels: float32, `format.level_count` finite values for each block, one block after another. Those of
            a block ascend, and are positive magnitudes (BINARY: of any sign; CODEBOOK_8BIT: of any sign and
            order). A code decodes to its level exactly: any scale, such as the division by the batch size, is
            already in it.
        sizes: int64, number of elements of each block, at least 0; None for a single block of all elements.
        data: uint8, the codes of each block, `format.code_bytes` of its size, one block after another.
    """

    format: CodeFormat
    elements: int
    levels: Float32
    sizes: Int64 | None = None
    data: Bytes

    def block_sizes(self) -> Int64:
        """Return the number of elements of each block: int64, shape (blocks,)."""
        return np.array([self.elements], np.int64) if self.sizes is None else self.sizes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearPayload:
    """Integer codes, and a scale for each bucket of consecutive elements: an element is its code times the
    scale.

    Attributes:
        bits: bits of a code, within `LINEAR_BITS`. A code of 1 bit is a sign: 1 stands for +1, 0 for -1.
            Others are in two's complement; the most negative one is never sent.
        bucket: number of elements that share a scale, a multiple of 32 up to `MAX_BUCKET`; the last bucket
            may be shorter.
        data: uint8: a float32 scale per bucket, finite and not negative; then the codes, element i at bit i *
            bits, lowest bits first, padded with zeros to a whole 32-bit word.
    """

    elements: int
    bits: int
    bucket: int
    data: Bytes

    @property
    def buckets(self) -> int:
        return -(-self.elements // self.bucket)

    def scales(self) -> Float32:
        """Return the scale of each bucket: a copy, because received data may lie at any alignment."""
        return self.data[: 4 * self.buckets].copy().view(np.float32)

    def codes(self) -> Bytes:
        return self.data[4 * self.buckets :]


LINEAR_BITS = (1, 8)
BUCKET_STEP = 32  # a bucket then begins with a whole word, for any number of bits
MAX_BUCKET = 1 << 24


def check_linear(bits: int, bucket: int, *, fewest: int = LINEAR_BITS[0]) -> None:
    """Raise `PayloadError` if linear payloads cannot have these bits per code, at least `fewest`, or elements
    per bucket."""
    most = LINEAR_BITS[1]
    if not fewest <= bits <= most:
        raise PayloadError("bits", f"{fewest} to {most}", str(bits))
    if not BUCKET_STEP <= bucket <= MAX_BUCKET or bucket % BUCKET_STEP:
        limit = f"a multiple of {BUCKET_STEP} from {BUCKET_STEP} to {MAX_BUCKET}"
        raise PayloadError("bucket", limit, str(bucket))


ValuePayload = DensePayload | QuantizedPayload | LinearPayload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparsePayload:
    """Some of the elements of a tensor; all other elements are 0.

    Attributes:
        low_bits: for GAPS, number of low bits of a gap that are not coded in unary; otherwise 0.
        index_bytes: bytes of the indices at the beginning of `data`; 0 for SEEDED and UNIFORM.
        seed: for SEEDED and UNIFORM, seed of the indices, below 2**64. For GAPS and BITMAP, the seed of the
            draw from which the indices were cut, or 0 if they were chosen by values.
        values: form of the values: a payload of `count` elements with empty data.
        data: uint8: the indices, then the data of the values.
    """

    elements: int
    count: int
    coding: IndexCoding
    low_bits: int = 0
    index_bytes: int = 0
    seed: int = 0
    values: ValuePayload
    data: Bytes

    def index_data(self) -> Bytes:
        return self.data[: self.index_bytes]

    def value_payload(self) -> ValuePayload:
        return replace(self.values, data=self.data[self.index_bytes :])


NO_BYTES: Bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProjectedPayload:
    """The coordinates of a whole tensor in bases that the server and all workers of a job share.

    It is linear: the sum of several workers' coordinates is the coordinates of the sum. It cannot be decoded
    without the bases, cut, or joined with its neighbours.

    Attributes:
        elements: number of elements of the tensor.
        values: form of the coordinates: a payload of `count` elements with empty data.
        exponent: a coordinate is its value times 2**exponent, within `EXPONENTS`; other than 0 for FLOAT16
            only.
        data: uint8, the data of the values.
    """

    elements: int
    values: ValuePayload
    exponent: int = 0
    data: Bytes

    @property
    def count(self) -> int:
        return self.values.elements

    def filled(self, data: Bytes) -> ProjectedPayload:
        """Return the payload with this data, in a fifth of the time of `replace`."""
        values, exponent = self.values, self.exponent
        return ProjectedPayload(elements=self.elements, values=values, exponent=exponent, data=data)

    def value_payload(self) -> ValuePayload:
        return replace(self.values, data=self.data)


EXPONENTS = (-126, 111)  # so that the factor, and every product of it and a float16, is a finite float32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AbsentPayload:
    """Elements without a gradient, where torch's `grad` is None; in an update, elements that do not change.

    It decodes to zeros, and a sum counts it as zeros. Elements that are absent in every summed payload have
    no sum, and the optimizer skips them.
    """

    elements: int
    data: Bytes = field(default_factory=lambda: NO_BYTES)


Payload = ValuePayload | SparsePayload | ProjectedPayload | AbsentPayload


def payload_bytes(payload: Payload) -> int:
    """Return the number of bytes that `payload.data` must have, computed from the payload's other fields."""
    match payload:
        case DensePayload():
            return payload.elements * payload.format.element_bytes
        case QuantizedPayload():
            if payload.sizes is None:
                return payload.format.code_bytes(payload.elements)
            return 4 * int(code_words(payload.format.bits, payload.sizes).sum())
        case LinearPayload():
            return 4 * payload.buckets + code_bytes(payload.bits, payload.elements)
        case SparsePayload():
            return payload.index_bytes + payload_bytes(payload.values)
        case ProjectedPayload():
            return payload_bytes(payload.values)
        case AbsentPayload():
            return 0


def wire_bytes(payload: Payload) -> int:
    """Return the bytes of a payload's data and levels on the wire. The rest of its header is not counted."""
    values = payload.values if isinstance(payload, SparsePayload | ProjectedPayload) else payload
    levels = values.levels.nbytes if isinstance(values, QuantizedPayload) else 0
    return payload.data.size + levels
