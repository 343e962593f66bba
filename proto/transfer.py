"""Conversion between payloads and their headers and chunks.

A transfer is a header (PartHeader, Update, InitializeHeader, FetchHeader) that describes its bytes, followed
by chunks that contain these bytes end to end. The receiver derives every size from the header and the
manifest. It refuses a header that does not fit before it allocates memory, and then fills one buffer in
order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ..common.parts import Part
from ..compressors import (
    AbsentPayload,
    DenseFormat,
    DensePayload,
    LinearPayload,
    Payload,
    PayloadError,
    ProjectedPayload,
    QuantizedPayload,
    SparsePayload,
    ValuePayload,
    check_data,
    check_projected_data,
    payload_bytes,
)
from ..compressors.packing import unpack
from . import messages as m
from .announced import NO_BASES, NO_BYTES, announced_payloads, invalid, names_of
from .manifest import Manifest
from .messages import (
    AbsentHeader,
    Chunk,
    DenseHeader,
    LinearHeader,
    PayloadHeader,
    ProjectedHeader,
    QuantizedHeader,
    SparseHeader,
)
from .refusal import Reason, Refused, refused
from .wire import CHUNK_BYTES, crc32c, encode_chunk

Bytes = npt.NDArray[np.uint8]
Pack = Callable[[Sequence[Bytes]], Bytes | None]  # returns pieces as one frame; None to send them as they are

PACKETS = 1 << 63  # least transfer number of a coded packet
MAX_ARRIVING = 4  # limit for a worker's unfinished parts, each overtaken by the next
MAX_PARTS = 1 << 16  # limit for the parts of a plan


def payload_header(payload: Payload, content: m.Content = m.Content.UNSPECIFIED) -> PayloadHeader:
    """Return the header that describes a payload.

    Args:
        content: effect of the payload on a replica, in an update; UNSPECIFIED in a push.
    """
    if isinstance(payload, SparsePayload):
        sparse = SparseHeader(
            count=payload.count,
            coding=m.IndexEncoding[payload.coding.name],
            low_bits=payload.low_bits,
            index_bytes=payload.index_bytes,
            seed=payload.seed,
            values=_value_header(payload.values),
        )
        return PayloadHeader(elements=payload.elements, kind=sparse, content=content)
    if isinstance(payload, ProjectedPayload):
        values = _value_header(payload.values)
        projected = ProjectedHeader(count=payload.count, exponent=payload.exponent, values=values)
        return PayloadHeader(elements=payload.elements, kind=projected, content=content)
    kind = AbsentHeader() if isinstance(payload, AbsentPayload) else _value_header(payload)
    return PayloadHeader(elements=payload.elements, kind=kind, content=content)


def _value_header(payload: ValuePayload) -> DenseHeader | QuantizedHeader | LinearHeader:
    """Return the header of a payload that holds the value of every element."""
    match payload:
        case DensePayload():
            return DenseHeader(format=m.DenseEncoding[payload.format.name])
        case QuantizedPayload():
            sizes = () if payload.sizes is None else tuple(payload.sizes.tolist())
            format = m.CodeEncoding[payload.format.name]
            return QuantizedHeader(format=format, levels=tuple(payload.levels.tolist()), sizes=sizes)
        case LinearPayload():
            return LinearHeader(bits=payload.bits, bucket=payload.bucket)


def packet_transfer(packet: m.Packet) -> int:
    """Return the transfer number of a coded packet."""
    return PACKETS + (packet.exchange << 32) + packet.index


def part_transfer(number: int, part: int) -> int:
    """Return the transfer number of a part.

    Args:
        number: seq of the part's push, or version of its update.
    """
    return (number << 16) + part


def part_header(
    seq: int,
    assignment: int,
    plan: int,
    part: int,
    payloads: Sequence[Payload],
    learning_rates: Sequence[float] = (),
) -> m.PartHeader:
    """Return the header of a part of a push.

    Args:
        assignment: id of the assignment that the push answers.
        plan: number of the plan that defines the part.
        part: number of the part in the plan.
        payloads: payloads of the part, end to end over its elements.
        learning_rates: learning rates of the step, by parameter group; empty for those of the job.
    """
    return m.PartHeader(
        seq=seq,
        assignment=assignment,
        part=part,
        plan=plan,
        payloads=tuple(map(payload_header, payloads)),
        learning_rates=tuple(learning_rates),
    )


def digest(checksums: Mapping[int, int]) -> int:
    """Return the checksum of a push: the CRC-32C over the checksums of its parts, in order of the parts.

    Args:
        checksums: CRC-32C of each part's bytes, by the number of the part.
    """
    in_order = np.array([checksums[part] for part in sorted(checksums)], "<u4")
    return crc32c((in_order.view(np.uint8),))


def chunk_checksums(parts: Sequence[Bytes], chunk_bytes: int = CHUNK_BYTES) -> list[int]:
    """Return the checksum of each chunk of a transfer: the CRC-32C of all its bytes up to the chunk's end.

    Args:
        parts: bytes of the transfer, in pieces.
    """
    found: list[int] = []
    for pieces in _chunks(parts, chunk_bytes):
        found.append(crc32c(pieces, found[-1] if found else 0))
    return found


def encode_chunks(
    transfer: int,
    parts: Sequence[Bytes],
    chunk_bytes: int = CHUNK_BYTES,
    checksums: Sequence[int] | None = None,
    pack: Pack | None = None,
) -> Iterator[bytes]:
    """Yield chunk messages with the bytes of a transfer, in chunks of `chunk_bytes`; the last may be shorter.

    Args:
        parts: bytes of the transfer, in pieces that are laid end to end.
        checksums: checksum of each chunk, from `chunk_checksums`; None to compute each with its chunk.
        pack: packs the pieces of a chunk; None for no packing.
    """
    offset = checksum = 0
    for index, pieces in enumerate(_chunks(parts, chunk_bytes)):
        checksum = crc32c(pieces, checksum) if checksums is None else checksums[index]
        packed = None if pack is None else pack(pieces)
        sent = pieces if packed is None else [packed]
        yield encode_chunk(transfer, offset, sent, checksum, packed=packed is not None)
        offset += sum(piece.size for piece in pieces)


def _chunks(parts: Sequence[Bytes], chunk_bytes: int) -> Iterator[list[Bytes]]:
    """Yield for each chunk the pieces of the parts that it contains."""
    filled = 0
    pieces: list[Bytes] = []
    for part in parts:
        at = 0
        while at < part.size:
            piece = part[at : at + chunk_bytes - filled]
            pieces.append(piece)
            at += piece.size
            filled += piece.size
            if filled == chunk_bytes:
                yield pieces
                pieces, filled = [], 0
    if filled:
        yield pieces


def part_assembly(
    transfer: int,
    headers: Sequence[PayloadHeader],
    part: Part,
    manifest: Manifest,
    *,
    worker: str,
    coordinates: Mapping[int, int] = NO_BASES,
) -> Assembly:
    """Check the headers of a part's payloads, and return an assembly that receives their bytes.

    coordinates: as for `announced_payloads`.

    Raises:
        Refused: ELEMENTS or PAYLOAD, before memory is allocated.
    """
    payloads = announced_payloads(headers, part, manifest, worker=worker, coordinates=coordinates)
    names = names_of(payloads, part, manifest)
    return Assembly(transfer, payloads, chunk_bytes=CHUNK_BYTES, worker=worker, names=names)


def received_payloads(
    headers: Sequence[PayloadHeader],
    data: Bytes,
    part: Part,
    manifest: Manifest,
    *,
    worker: str,
    coordinates: Mapping[int, int] = NO_BASES,
) -> list[Payload]:
    """Return the checked payloads of a part whose bytes arrived in one piece; they share its memory.

    Args:
        data: bytes of all payloads, end to end.
        coordinates: as for `announced_payloads`.

    Raises:
        Refused: ELEMENTS, PAYLOAD or NON_FINITE, naming the tensor; CHUNK if `data` has another number of
            bytes than the headers announce.
    """
    payloads = announced_payloads(headers, part, manifest, worker=worker, coordinates=coordinates)
    return filled_payloads(payloads, data, names_of(payloads, part, manifest), worker=worker)


def filled_payloads(
    announced: Sequence[Payload], data: Bytes, names: Sequence[str], *, worker: str
) -> list[Payload]:
    """Return announced payloads with their bytes, as `received_payloads` does.

    names: name of the tensor in which each payload begins.
    """
    sizes = [*map(payload_bytes, announced)]
    if data.size != sum(sizes):
        limit, value = f"{sum(sizes)} bytes", f"{data.size} bytes"
        raise refused(Reason.CHUNK, worker=worker, field="payloads", limit=limit, value=value)
    ends = [*accumulate(sizes)]
    whole: list[Payload] = [
        payload.filled(data[end - size : end])
        if isinstance(payload, ProjectedPayload)
        else dataclasses.replace(payload, data=data[end - size : end])
        for payload, size, end in zip(announced, sizes, ends, strict=True)
    ]
    # Coordinates of many tensors are checked in one call, and one by one only for the name of a bad one.
    try:
        check_projected_data([each for each in whole if isinstance(each, ProjectedPayload)])
        for payload in whole:
            if not isinstance(payload, ProjectedPayload):
                check_data(payload)
    except PayloadError:
        for name, payload in zip(names, whole, strict=True):
            try:
                check_data(payload)
            except PayloadError as error:
                raise invalid(error, worker, name) from None
        raise
    return whole


def values_assembly(transfer: int, manifest: Manifest, *, worker: str) -> Assembly:
    """Return an assembly that receives the values of all tensors of a manifest, as float32."""
    payloads: list[Payload] = [
        DensePayload(format=DenseFormat.FLOAT32, elements=spec.elements, data=NO_BYTES)
        for spec in manifest.specs
    ]
    names = [f"tensor {spec.name!r}" for spec in manifest.specs]
    return Assembly(transfer, payloads, chunk_bytes=CHUNK_BYTES, worker=worker, names=names)


@dataclasses.dataclass(eq=False)
class ChunkValidator:
    """A check of the chunks of one transfer as they arrive; it keeps none of their bytes.

    Chunks must arrive in order and, except the last, in full size, each with the checksum of all bytes up to
    its end. Every other chunk is refused.

    Attributes:
        size: bytes of the whole transfer.
        chunk_bytes: bytes of every chunk but the last.
    """

    transfer: int
    size: int
    _: dataclasses.KW_ONLY
    chunk_bytes: int = CHUNK_BYTES
    worker: str
    _filled: int = dataclasses.field(default=0, init=False)
    _crc32c: int = dataclasses.field(default=0, init=False)

    @property
    def complete(self) -> bool:
        """True once all bytes of the transfer have arrived."""
        return self._filled == self.size

    @property
    def arrived(self) -> int:
        """Bytes that have arrived."""
        return self._filled

    @property
    def checksum(self) -> int:
        """CRC-32C over the bytes that have arrived."""
        return self._crc32c

    def add(self, chunk: Chunk) -> Bytes:
        """Check the next chunk of the transfer, and count its bytes. Returns them, unpacked.

        Raises:
            Refused: CHUNK, for a chunk of another transfer, offset or size, or a frame of another size, for
                which no memory is taken; CHECKSUM, for damaged bytes.
        """
        size = min(self.chunk_bytes, self.size - self._filled)
        expected = (self.transfer, self._filled, size)
        got = (chunk.transfer, chunk.offset, size if chunk.packed else int(chunk.data.size))
        if got != expected:
            text = "transfer {}, offset {}, {} bytes"
            raise self._refuse(Reason.CHUNK, "chunk", text.format(*expected), text.format(*got))
        where = f"chunk at offset {chunk.offset}"
        try:
            data = unpack(chunk.data, size) if chunk.packed else chunk.data
        except PayloadError as error:
            raise self._refuse(Reason.CHUNK, where, error.limit, error.value) from None
        actual = crc32c((data,), self._crc32c)
        if actual != chunk.crc32c:
            raise self._refuse(Reason.CHECKSUM, where, f"crc32c {chunk.crc32c:08x}", f"{actual:08x}")
        self._crc32c = actual
        self._filled += size
        return data

    def _refuse(self, reason: Reason, field: str, limit: str, value: str) -> Refused:
        what = f"transfer {self.transfer}, {field}"
        return refused(reason, worker=self.worker, field=what, limit=limit, value=value)


@dataclasses.dataclass(eq=False)
class TransferBuffer(ChunkValidator):
    """Buffer that receives the bytes of one transfer. It is allocated at construction, so check the header
    first.

    Attributes:
        data: bytes of the transfer, uint8 (size,), filled up to the last chunk.
    """

    def __post_init__(self) -> None:
        self.data: Bytes = np.empty(self.size, np.uint8)

    def add(self, chunk: Chunk) -> Bytes:
        """Check the next chunk of the transfer, copy its bytes to the buffer, and return them.

        Raises:
            Refused: CHUNK or CHECKSUM, as `ChunkValidator.add`.
        """
        at = self._filled
        data = super().add(chunk)
        self.data[at : self._filled] = data
        return data


class Assembly(TransferBuffer):
    """Buffer that receives the payloads of one transfer, whose headers have been checked."""

    def __init__(
        self,
        transfer: int,
        payloads: Sequence[Payload],
        *,
        chunk_bytes: int,
        worker: str,
        names: Sequence[str],
    ) -> None:
        """Args:
        payloads: payloads that the header announces, without bytes.
        chunk_bytes: bytes of every chunk but the last.
        names: name of the tensor in which each payload begins, for messages.
        """
        size = sum(map(payload_bytes, payloads))
        super().__init__(transfer, size, chunk_bytes=chunk_bytes, worker=worker)
        self._payloads = payloads
        self._names = names

    def finish(self) -> list[Payload]:
        """Return the payloads, once all bytes have arrived, after a check of codes, padding, levels and
        finite values.

        The check reads every byte once and releases the interpreter lock. Call it outside the event loop for
        large transfers.

        Raises:
            Refused: PAYLOAD or NON_FINITE, naming the tensor.
        """
        assert self.complete
        return filled_payloads(self._payloads, self.data, self._names, worker=self.worker)
