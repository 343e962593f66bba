"""Payloads <-> headers and chunks.

A transfer is a header (Push, Update, Initialize, Fetch) that lists tensors, followed by chunks that hold
their bytes laid end to end. The receiver derives every size from the header and the manifest, refuses what
does not fit before it allocates, and then fills one buffer in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..compressors import (
    CodeFormat,
    DenseFormat,
    DensePayload,
    IndexCoding,
    LinearPayload,
    Payload,
    PayloadError,
    QuantizedPayload,
    SparsePayload,
    ValuePayload,
    check_announcement,
    payload_bytes,
    validate,
)
from . import messages as m
from .manifest import Manifest
from .messages import Chunk, DenseHeader, LinearHeader, QuantizedHeader, SparseHeader, TensorHeader
from .refusal import Reason, Refused, refused
from .shares import share
from .wire import CHUNK_BYTES, crc32c, encode_chunk

Bytes = npt.NDArray[np.uint8]

# Both sides name the same things alike.
_FORMATS = {m.DenseFormat[format.name]: format for format in DenseFormat}
_CODE_FORMATS = {m.CodeFormat[format.name]: format for format in CodeFormat}
_CODINGS = {m.IndexCoding[coding.name]: coding for coding in IndexCoding}
_NO_BYTES = np.empty(0, np.uint8)


def tensor_header(tensor: int, payload: Payload) -> TensorHeader:
    """The header that describes `payload` as tensor number `tensor` of the manifest."""
    if isinstance(payload, SparsePayload):
        sparse = SparseHeader(
            count=payload.count,
            coding=m.IndexCoding[payload.coding.name],
            low_bits=payload.low_bits,
            index_bytes=payload.index_bytes,
            seed=payload.seed,
            values=_value_header(payload.values),
        )
        return TensorHeader(tensor=tensor, elements=payload.elements, kind=sparse)
    return TensorHeader(tensor=tensor, elements=payload.elements, kind=_value_header(payload))


def _value_header(payload: ValuePayload) -> DenseHeader | QuantizedHeader | LinearHeader:
    match payload:
        case DensePayload():
            return DenseHeader(format=m.DenseFormat[payload.format.name])
        case QuantizedPayload():
            levels = tuple(payload.levels.tolist())
            return QuantizedHeader(format=m.CodeFormat[payload.format.name], levels=levels)
        case LinearPayload():
            return LinearHeader(bits=payload.bits, bucket=payload.bucket)


def packet_transfer(packet: m.Packet) -> int:
    """The number that a packet's chunks are marked with."""
    return (packet.exchange << 32) + packet.index


def encode_chunks(transfer: int, parts: Sequence[Bytes], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Messages with the parts laid end to end, in chunks of `chunk_bytes` (the last may be shorter)."""
    offset = filled = checksum = 0
    pieces: list[Bytes] = []
    for part in parts:
        at = 0
        while at < part.size:
            piece = part[at : at + chunk_bytes - filled]
            pieces.append(piece)
            at += piece.size
            filled += piece.size
            if filled == chunk_bytes:
                checksum = crc32c(pieces, checksum)
                yield encode_chunk(transfer, offset, pieces, checksum)
                offset += filled
                pieces, filled = [], 0
    if filled:
        yield encode_chunk(transfer, offset, pieces, crc32c(pieces, checksum))


def _empty_payload(header: TensorHeader) -> Payload:
    """The payload that a header announces, checked, with no bytes yet. Raises PayloadError."""
    payload: Payload
    if isinstance(header.kind, SparseHeader):
        sparse = header.kind
        if sparse.coding not in _CODINGS:
            raise PayloadError("coding", "gaps, bitmap or seeded", str(int(sparse.coding)))
        payload = SparsePayload(
            elements=header.elements,
            count=sparse.count,
            coding=_CODINGS[sparse.coding],
            low_bits=sparse.low_bits,
            index_bytes=sparse.index_bytes,
            seed=sparse.seed,
            values=_empty_values(sparse.values, sparse.count),
            data=_NO_BYTES,
        )
    else:
        payload = _empty_values(header.kind, header.elements)
    check_announcement(payload)
    return payload


def _empty_values(header: DenseHeader | QuantizedHeader | LinearHeader | None, elements: int) -> ValuePayload:
    match header:
        case DenseHeader(format=code) if code in _FORMATS:
            return DensePayload(format=_FORMATS[code], elements=elements, data=_NO_BYTES)
        case QuantizedHeader(format=code, levels=levels) if code in _CODE_FORMATS:
            return QuantizedPayload(
                format=_CODE_FORMATS[code],
                elements=elements,
                levels=np.array(levels, np.float32),
                data=_NO_BYTES,
            )
        case LinearHeader(bits=bits, bucket=bucket):
            return LinearPayload(elements=elements, bits=bits, bucket=bucket, data=_NO_BYTES)
        case _:
            expected = "dense, quantized, linear or sparse, of a known format"
            raise PayloadError("kind", expected, "none that this side knows")


def announced_payloads(
    headers: Sequence[TensorHeader],
    manifest: Manifest,
    *,
    worker: str,
    slice: int = 0,
    slices: int = 1,
) -> list[Payload]:
    """Check the headers of a transfer against the manifest; return its payloads, still without bytes.

    A transfer holds every tensor once, in manifest order, or that slice of each. Nothing is allocated here.

    Raises:
        Refused: TENSOR, ELEMENTS or PAYLOAD, naming the tensor.
    """
    expected = tuple(range(len(manifest.tensors)))
    got = tuple(header.tensor for header in headers)
    if got != expected:
        limit = f"each of the {len(expected)} tensors once, in manifest order"
        first = next((place for place, tensor in enumerate(got[: len(expected)]) if tensor != place), None)
        value = f"{len(got)} tensors" if first is None else f"tensor {got[first]} in place {first}"
        raise refused(Reason.TENSOR, worker=worker, field="tensors", limit=limit, value=value)
    payloads: list[Payload] = []
    for header in headers:
        spec = manifest.specs[header.tensor]
        field = f"tensor {spec.name!r}"
        start, end = share(spec.elements, slice, slices)
        if header.elements != end - start:
            limit = (
                f"{end - start} elements ({f'slice {slice} of {slices}, ' * (slices > 1)}shape {spec.shape})"
            )
            value = f"{header.elements} elements"
            raise refused(Reason.ELEMENTS, worker=worker, field=field, limit=limit, value=value)
        try:
            payloads.append(_empty_payload(header))
        except PayloadError as error:
            raise _refused(error, worker, field) from None
    return payloads


def values_assembly(transfer: int, manifest: Manifest, *, worker: str) -> Assembly:
    """For the values of all tensors of a manifest, as float32."""
    payloads: list[Payload] = [
        DensePayload(format=DenseFormat.FLOAT32, elements=spec.elements, data=_NO_BYTES)
        for spec in manifest.specs
    ]
    names = [spec.name for spec in manifest.specs]
    return Assembly(transfer, payloads, chunk_bytes=CHUNK_BYTES, worker=worker, names=names)


def _refused(error: PayloadError, worker: str, field: str) -> Refused:
    reason = Reason.NON_FINITE if "finite" in error.limit else Reason.PAYLOAD
    return refused(
        reason, worker=worker, field=f"{field} {error.field}", limit=error.limit, value=error.value
    )


@dataclasses.dataclass(eq=False)
class Passage:
    """One transfer while its bytes pass by.

    Chunks come in order and, but for the last, in full size, each with the checksum of everything up to its
    end; anything else is refused.

    size: bytes in all. chunk_bytes: of every chunk but the last. worker: whom to name in a refusal.
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
        return self._filled == self.size

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises Refused: CHUNK or CHECKSUM."""
        expected = (self.transfer, self._filled, min(self.chunk_bytes, self.size - self._filled))
        got = (chunk.transfer, chunk.offset, int(chunk.data.size))
        if got != expected:
            text = "transfer {}, offset {}, {} bytes"
            raise self._refuse(Reason.CHUNK, "chunk", text.format(*expected), text.format(*got))
        actual = crc32c((chunk.data,), self._crc32c)
        if actual != chunk.crc32c:
            where = f"chunk at offset {chunk.offset}"
            raise self._refuse(Reason.CHECKSUM, where, f"crc32c {chunk.crc32c:08x}", f"{actual:08x}")
        self._crc32c = actual
        self._filled += chunk.data.size

    def _refuse(self, reason: Reason, field: str, limit: str, value: str) -> Refused:
        what = f"transfer {self.transfer}, {field}"
        return refused(reason, worker=self.worker, field=what, limit=limit, value=value)


@dataclasses.dataclass(eq=False)
class Collection(Passage):
    """The bytes of one transfer. The buffer is allocated at construction, so check the header first."""

    def __post_init__(self) -> None:
        self.data: Bytes = np.empty(self.size, np.uint8)

    def add(self, chunk: Chunk) -> None:
        at = self._filled
        super().add(chunk)
        self.data[at : self._filled] = chunk.data


class Assembly(Collection):
    """The payloads of one transfer while their bytes arrive; their headers have been checked."""

    def __init__(
        self,
        transfer: int,
        payloads: Sequence[Payload],
        *,
        chunk_bytes: int,
        worker: str,
        names: Sequence[str],
    ) -> None:
        """
        Args:
            payloads: as announced, without bytes.
            worker, names: whom and which tensors to name in a refusal.
        """
        self._sizes = [payload_bytes(payload) for payload in payloads]
        super().__init__(transfer, sum(self._sizes), chunk_bytes=chunk_bytes, worker=worker)
        self._payloads = payloads
        self._names = names

    def finish(self) -> list[Payload]:
        """The payloads, checked: codes, padding, levels, finite values.

        Reads every byte once, in nogil code; call it off the event loop for large transfers.

        Raises:
            Refused: PAYLOAD or NON_FINITE, naming the tensor.
        """
        assert self.complete
        whole: list[Payload] = []
        at = 0
        for name, payload, size in zip(self._names, self._payloads, self._sizes, strict=True):
            filled = dataclasses.replace(payload, data=self.data[at : at + size])
            at += size
            try:
                validate(filled)
            except PayloadError as error:
                raise _refused(error, self.worker, f"tensor {name!r}") from None
            whole.append(filled)
        return whole
