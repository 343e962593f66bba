"""Framing: chunks by hand and by protobuf say the same, and bad bytes are malformed and nothing worse."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.proto import gradwire_pb2 as pb
from gradwire.proto import messages as m
from gradwire.proto import wire
from gradwire.proto.convert import MalformedError

sizes = st.integers(0, 2**63)


def parts_of(data: bytes, cuts: list[int]) -> list[wire.Bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    whole = np.frombuffer(data, np.uint8)
    return [whole[a:b] for a, b in pairwise(edges)]


@given(sizes, st.integers(0, 2**32 - 1), sizes, st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_a_chunk_framed_by_hand_is_the_protobuf_message(
    transfer: int, partition: int, offset: int, data: bytes, cuts: list[int]
) -> None:
    encoded = wire.encode_chunk(transfer, partition, offset, parts_of(data, cuts))

    parsed = pb.WorkerMessage.FromString(encoded).chunk
    assert (parsed.transfer, parsed.partition, parsed.offset) == (transfer, partition, offset)
    assert parsed.data == data
    assert parsed.crc32c == wire.crc32c((np.frombuffer(data, np.uint8),))
    for container in (pb.ServerMessage, pb.InitializeMessage, pb.FetchMessage):
        assert container.FromString(encoded).chunk.data == data


@given(sizes, st.integers(0, 2**32 - 1), sizes, st.binary(max_size=300))
def test_a_chunk_is_read_alike_however_protobuf_orders_its_fields(
    transfer: int, partition: int, offset: int, data: bytes
) -> None:
    by_hand = wire.encode_chunk(transfer, partition, offset, [np.frombuffer(data, np.uint8)])
    message = pb.WorkerMessage.FromString(by_hand)
    by_protobuf = message.SerializeToString()
    # Fields in another order are as valid: here data comes first.
    first = pb.Chunk(data=message.chunk.data).SerializeToString()
    rest = pb.Chunk(
        transfer=transfer, partition=partition, offset=offset, crc32c=message.chunk.crc32c
    ).SerializeToString()
    body = first + rest
    reordered = b"\x0a" + _varint(len(body)) + body

    for encoded in (by_hand, by_protobuf, reordered):
        chunk = wire.decode_worker(encoded)
        assert isinstance(chunk, m.Chunk)
        assert (chunk.transfer, chunk.partition, chunk.offset) == (transfer, partition, offset)
        assert chunk.data.tobytes() == data
        assert chunk.crc32c == message.chunk.crc32c


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for decode in (wire.decode_worker, wire.decode_server, wire.decode_initialize, wire.decode_fetch):
        try:
            decode(data)
        except MalformedError:
            continue


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_damaged_chunk_is_malformed_or_another_chunk(data: bytes, draw: st.DataObject) -> None:
    encoded = bytearray(wire.encode_chunk(3, 0, 1 << 20, [np.frombuffer(data, np.uint8)]))
    at = draw.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= draw.draw(st.integers(1, 255))
    try:
        message = wire.decode_worker(bytes(encoded))
    except MalformedError:
        return
    if isinstance(message, m.Chunk) and (message.transfer, message.partition, message.offset) == (
        3,
        0,
        1 << 20,
    ):
        intact = message.data.tobytes() == data
        assert intact or wire.crc32c((message.data,)) != message.crc32c


@pytest.mark.parametrize("end", [0, 1, 2, 5, 8, -1])
def test_a_truncated_chunk_is_malformed(end: int) -> None:
    encoded = wire.encode_chunk(300, 1, 70000, [np.arange(20, dtype=np.uint8)])
    with pytest.raises(MalformedError):
        wire.decode_worker(encoded[:end])


def test_a_stream_takes_only_its_own_messages() -> None:
    with pytest.raises(TypeError, match="no body of WorkerMessage"):
        wire.encode_worker(m.Waiting(ranks=(), seconds=0, text=""))  # type: ignore[arg-type]
