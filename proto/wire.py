"""Conversion between stream messages and bytes.

Chunks hold nearly all bytes, so this file frames them by hand: one copy to write them and none to read them,
where protobuf would make two of each. The frame is the protobuf encoding of WorkerMessage{chunk}; every oneof
with a chunk has it as field 1. A test compares it with the generated classes. Batches are framed by hand,
too.

The checksum of a chunk covers its transfer up to the chunk's end, so that one pass over the data serves both.
Every other stream message ends with a checksum of its own, because a protobuf with a flipped bit often still
parses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from . import gradwire_pb2 as pb
from . import messages as m
from .convert import MalformedError, member_of, parse, to_message

TRAILER_BYTES = 5  # tag and checksum

Bytes = npt.NDArray[np.uint8]

# At 1 Mbit/s a chunk takes 4 s, well within a lease: each renews the lease of its sender in time.
CHUNK_BYTES = 512 << 10
PROBE_BYTES = 17 << 16  # more than the 1 MiB to which proxies limit requests unless told otherwise
# Largest message that either side accepts: a chunk, or a header with thousands of tensors.
MAX_MESSAGE_BYTES = 8 << 20

# Messages are joined in a batch until it has BATCH_BYTES bytes or MAX_BATCH messages. So all messages that
# wait behind a short one join it, and none follows one of BATCH_BYTES or more.
BATCH_BYTES = 64 << 10
MAX_BATCH = 256

_TAG_BODY_CHUNK = 0x0A  # field 1, length-delimited
_TAG_BODY_BATCH = 0x72  # field 14, length-delimited
_TAG_MESSAGES = 0x0A  # field 1, length-delimited
_TAG_TRANSFER = 0x08  # field 1, varint
_TAG_OFFSET = 0x10  # field 2, varint
_TAG_CRC32C = 0x1D  # field 3, fixed32
_TAG_DATA = 0x22  # field 4, length-delimited
_PACKED = b"\x28\x01"  # field 5, true


class DamagedMessageError(MalformedError):
    """A message whose checksum shows that its bytes changed in transit."""


def crc32c(parts: Iterable[Bytes], value: int = 0) -> int:
    """Return the CRC-32C of the parts laid end to end.

    Args:
        value: CRC-32C of the bytes that precede the parts; 0 for none.
    """
    for part in parts:
        if part.size:
            value = int(google_crc32c.extend(value, part))  # pyright: ignore[reportUnknownArgumentType]
    return value


def trailer(data: bytes) -> bytes:
    """Return the encoded field crc32c = 15 that ends a message with the bytes `data`."""
    return b"\x7d" + crc32c((np.frombuffer(data, np.uint8),)).to_bytes(4, "little")


def varint(value: int) -> bytes:
    """Return a non-negative integer as a protobuf varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_chunk(
    transfer: int, offset: int, parts: Sequence[Bytes], checksum: int, *, packed: bool = False
) -> bytes:
    """Return an envelope message whose body is a chunk with the parts, laid end to end, as its data.

    Args:
        offset: number of bytes of the transfer before this chunk.
        checksum: CRC-32C of the transfer up to the end of this chunk.
        packed: True if the data is a zstd frame.
    """
    size = sum(part.size for part in parts)
    tail = _PACKED if packed else b""
    head = bytearray()
    for tag, value in ((_TAG_TRANSFER, transfer), (_TAG_OFFSET, offset)):
        if value:
            head.append(tag)
            head += varint(value)
    head.append(_TAG_CRC32C)
    head += checksum.to_bytes(4, "little")
    head.append(_TAG_DATA)
    head += varint(size)
    length = varint(len(head) + size + len(tail))
    return b"".join((bytes((_TAG_BODY_CHUNK,)), length, head, *(part.data for part in parts), tail))


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at index `at`, and the index after it."""
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedError("varint of more than 64 bits")


def _fast_chunk(data: bytes) -> m.Chunk | None:
    """Return the chunk in a frame that `encode_chunk` wrote; None for any other encoding of a chunk."""
    length, at = _read_varint(data, 1)
    if at + length != len(data):
        return None
    numbers = {_TAG_TRANSFER: 0, _TAG_OFFSET: 0}
    while data[at] in numbers:
        tag = data[at]
        numbers[tag], at = _read_varint(data, at + 1)
    if data[at] != _TAG_CRC32C or data[at + 5] != _TAG_DATA:
        return None
    checksum = int.from_bytes(data[at + 1 : at + 5], "little")
    size, at = _read_varint(data, at + 6)
    packed = data[at + size :] == _PACKED
    if at + size + len(_PACKED) * packed != len(data):
        return None
    return m.Chunk(
        transfer=numbers[_TAG_TRANSFER],
        offset=numbers[_TAG_OFFSET],
        crc32c=checksum,
        data=np.frombuffer(data, np.uint8, size, at),
        packed=packed,
    )


def batch(messages: Sequence[bytes]) -> bytes:
    """Return one `Batch` message that contains the messages, in order; a single message is returned
    unchanged.
    """
    if len(messages) == 1:
        return messages[0]
    pieces: list[bytes] = []
    for message in messages:
        pieces += (bytes((_TAG_MESSAGES,)) + varint(len(message)), message)
    size = sum(map(len, pieces))
    return b"".join((bytes((_TAG_BODY_BATCH,)), varint(size), *pieces))


def gather(first: bytes, more: Callable[[], bytes | None]) -> bytes:
    """Return `first` and the messages that wait behind it as one message, up to the limits of a batch.

    Args:
        more: returns the next waiting message; None if there is none.
    """
    messages, size = [first], len(first)
    while size < BATCH_BYTES and len(messages) < MAX_BATCH and (message := more()) is not None:
        messages.append(message)
        size += len(message)
    return batch(messages)


def _batched(data: bytes) -> m.Batch:
    """Return the batch in a frame that `batch` wrote.

    No checksum covers the bytes between the messages, so any other encoding is refused.

    Raises:
        IndexError: the batch is cut short.
        DamagedMessageError: the bytes are not those that `batch` writes.
    """
    size, at = _read_varint(data, 1)
    messages: list[bytes] = []
    if at + size == len(data):
        while at < len(data) and data[at] == _TAG_MESSAGES and len(messages) < MAX_BATCH:
            size, at = _read_varint(data, at + 1)
            messages.append(data[at : at + size])
            at += size
    if at != len(data) or len(messages) < 2:
        raise DamagedMessageError(f"damaged batch: expected 2 to {MAX_BATCH} messages")
    return m.Batch(messages=tuple(messages))


def encode_envelope(value: object, envelope: str) -> bytes:
    """Return the encoded message `envelope` with `value` as its body, followed by its checksum."""
    for field in pb.DESCRIPTOR.message_types_by_name[envelope].oneofs_by_name["body"].fields:
        if field.message_type is not None and field.message_type.name == type(value).__name__:
            message: Message = getattr(pb, envelope)(**{field.name: to_message(value)})
            data = message.SerializeToString()
            return data + trailer(data)
    raise TypeError(f"{type(value).__name__} is no body of {envelope}")


def decode_envelope(data: bytes, envelope: str) -> Any:
    """Return the body of an encoded message `envelope`.

    Raises:
        MalformedError: the bytes are no such message, or its body is unknown to this version.
        DamagedMessageError: the checksum does not match the bytes.
    """
    if data and data[0] == _TAG_BODY_CHUNK:
        with suppress(IndexError):  # cut short: the protobuf parser below reports it
            if fast := _fast_chunk(data):
                return fast
    elif data and data[0] == _TAG_BODY_BATCH:
        try:
            return _batched(data)
        except IndexError:
            raise DamagedMessageError(f"damaged batch: cut short after {len(data)} bytes") from None
    else:
        without_trailer(data, envelope)
    body = member_of(parse(data, envelope), "body")
    if body is None:
        raise MalformedError(f"{envelope} without a body that this version knows")
    # Another encoding of a batch would bypass the limits that `_batched` checks.
    if isinstance(body, m.Batch):
        raise MalformedError("a batch that is not the first field of its message")
    return body


def without_trailer(data: bytes, name: str) -> bytes:
    """Return a message without the checksum at its end.

    Args:
        name: name of the message, for the error.

    Raises:
        DamagedMessageError: the checksum does not match the bytes.
    """
    if data[-TRAILER_BYTES:] != trailer(data[:-TRAILER_BYTES]):
        raise DamagedMessageError(f"damaged {name}: its checksum does not match its bytes")
    return data[:-TRAILER_BYTES]


def encode_worker(value: m.WorkerMessage) -> bytes:
    """Return an encoded WorkerMessage with `value` as its body."""
    return encode_envelope(value, "WorkerMessage")


def encode_server(value: m.ServerMessage) -> bytes:
    """Return an encoded ServerMessage with `value` as its body."""
    return encode_envelope(value, "ServerMessage")
