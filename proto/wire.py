"""Messages of the streams <-> bytes.

Chunks carry nearly all bytes, so they are framed by hand: one copy when written and none when read, where
protobuf would make two of each. The frame is the protobuf encoding of WorkerMessage{chunk} (field 1 in
every oneof that holds a chunk), which a test checks against the generated classes. So are batches.

A chunk's checksum is that of its transfer so far, so that one pass over the data serves both. Every other
message of a stream ends with a checksum of its own, because a protobuf with a flipped bit often still parses.
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

# At 1 Mbit/s a chunk takes 4 s, well within a lease: whoever sends one is heard of in time.
CHUNK_BYTES = 512 << 10
# Largest message either side takes: a chunk, or a header with thousands of tensors.
MAX_MESSAGE_BYTES = 8 << 20

# Messages are put together until they are so many bytes, and so many: whatever waits behind a short one goes
# with it, and nothing follows one that is larger.
BATCH_BYTES = 64 << 10
MAX_BATCH = 256

_TAG_BODY_CHUNK = 0x0A  # field 1, length-delimited
_TAG_BODY_BATCH = 0x72  # field 14, length-delimited
_TAG_MESSAGES = 0x0A  # field 1, length-delimited
_TAG_TRANSFER = 0x08  # field 1, varint
_TAG_OFFSET = 0x10  # field 2, varint
_TAG_CRC32C = 0x1D  # field 3, fixed32
_TAG_DATA = 0x22  # field 4, length-delimited


class DamagedMessageError(MalformedError):
    """A message that was changed on its way."""


def crc32c(parts: Iterable[Bytes], value: int = 0) -> int:
    """CRC-32C of the parts laid end to end; `value` is that of what comes before them."""
    for part in parts:
        if part.size:
            value = int(google_crc32c.extend(value, part))  # pyright: ignore[reportUnknownArgumentType]
    return value


def trailer(data: bytes) -> bytes:
    """The field crc32c = 15 for a message that consists of `data` so far."""
    return b"\x7d" + crc32c((np.frombuffer(data, np.uint8),)).to_bytes(4, "little")


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_chunk(transfer: int, offset: int, parts: Sequence[Bytes], checksum: int) -> bytes:
    """A message whose body is a chunk with the parts laid end to end as its data.

    checksum: of the transfer up to the end of this chunk.
    """
    size = sum(part.size for part in parts)
    head = bytearray()
    for tag, value in ((_TAG_TRANSFER, transfer), (_TAG_OFFSET, offset)):
        if value:
            head.append(tag)
            head += varint(value)
    head.append(_TAG_CRC32C)
    head += checksum.to_bytes(4, "little")
    head.append(_TAG_DATA)
    head += varint(size)
    return b"".join(
        (bytes((_TAG_BODY_CHUNK,)), varint(len(head) + size), head, *(part.data for part in parts))
    )


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
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
    """Read the frame that `encode_chunk` writes; None for any other encoding of a chunk."""
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
    if at + size != len(data):
        return None
    return m.Chunk(
        transfer=numbers[_TAG_TRANSFER],
        offset=numbers[_TAG_OFFSET],
        crc32c=checksum,
        data=np.frombuffer(data, np.uint8, size, at),
    )


def batch(messages: Sequence[bytes]) -> bytes:
    """Return one message for several of a stream (`Batch`); a single one unchanged."""
    if len(messages) == 1:
        return messages[0]
    pieces: list[bytes] = []
    for message in messages:
        pieces += (bytes((_TAG_MESSAGES,)) + varint(len(message)), message)
    size = sum(map(len, pieces))
    return b"".join((bytes((_TAG_BODY_BATCH,)), varint(size), *pieces))


def gather(first: bytes, more: Callable[[], bytes | None]) -> bytes:
    """The first message, with those that are there to follow it while it is short. more: takes the next."""
    messages, size = [first], len(first)
    while size < BATCH_BYTES and len(messages) < MAX_BATCH and (message := more()) is not None:
        messages.append(message)
        size += len(message)
    return batch(messages)


def _batched(data: bytes) -> m.Batch:
    """Read what `batch` writes, and nothing else: no checksum covers what stands between the messages.

    Raises IndexError or DamagedError.
    """
    size, at = _read_varint(data, 1)
    messages: list[bytes] = []
    if at + size == len(data):
        while at < len(data) and data[at] == _TAG_MESSAGES and len(messages) < MAX_BATCH:
            size, at = _read_varint(data, at + 1)
            messages.append(data[at : at + size])
            at += size
    if at != len(data) or len(messages) < 2:
        raise DamagedMessageError(f"a batch that does not consist of 2 to {MAX_BATCH} messages")
    return m.Batch(messages=tuple(messages))


def encode_envelope(value: object, envelope: str) -> bytes:
    """The message `envelope` with `value` as its body and its checksum behind."""
    for field in pb.DESCRIPTOR.message_types_by_name[envelope].oneofs_by_name["body"].fields:
        if field.message_type is not None and field.message_type.name == type(value).__name__:
            message: Message = getattr(pb, envelope)(**{field.name: to_message(value)})
            data = message.SerializeToString()
            return data + trailer(data)
    raise TypeError(f"{type(value).__name__} is no body of {envelope}")


def decode_envelope(data: bytes, envelope: str) -> Any:
    """The body of the message `envelope`.

    Raises:
        MalformedError: it is none, or has no body that this version knows.
        DamagedError: its checksum is not that of its bytes.
    """
    if data and data[0] == _TAG_BODY_CHUNK:
        with suppress(IndexError):  # cut short: let protobuf say so
            if fast := _fast_chunk(data):
                return fast
    elif data and data[0] == _TAG_BODY_BATCH:
        try:
            return _batched(data)
        except IndexError:
            raise DamagedMessageError(f"a batch of {len(data)} bytes that is cut short") from None
    else:
        without_trailer(data, envelope)
    body = member_of(parse(data, envelope), "body")
    if body is None:
        raise MalformedError(f"{envelope} without a body that this version knows")
    if isinstance(body, m.Batch):  # of whatever encoding: `_batched` knows the only one, with its limits
        raise MalformedError("a batch that begins with something else")
    return body


def without_trailer(data: bytes, name: str) -> bytes:
    """Return a message without its checksum. Raises DamagedMessageError if that does not match."""
    if data[-TRAILER_BYTES:] != trailer(data[:-TRAILER_BYTES]):
        raise DamagedMessageError(f"a {name} whose checksum is not that of its bytes")
    return data[:-TRAILER_BYTES]


def encode_worker(value: m.WorkerMessage) -> bytes:
    return encode_envelope(value, "WorkerMessage")


def encode_server(value: m.ServerMessage) -> bytes:
    return encode_envelope(value, "ServerMessage")
