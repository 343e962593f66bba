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
MESSAGES: list[m.WorkerMessage] = [
    m.Hello(job="j", worker="w", incarnation=5),
    m.Heartbeat(activity="computing"),
    m.Ready(fingerprint=b"1234", version=7),
    m.PartHeader(
        seq=3,
        assignment=5,
        part=1,
        plan=1,
        payloads=(
            m.PayloadHeader(
                elements=9, kind=m.QuantizedHeader(format=m.CodeEncoding.SIGNED_2BIT, levels=(0.25,))
            ),
        ),
    ),
    m.Commit(seq=3, assignment=5, base_version=2, samples=32, parts=2, digest=9, loss=0.5),
    m.Abandon(seq=3),
    m.Evaluation(version=3, epoch=1, metrics={"accuracy": 0.5}),
    m.Profile(
        steps=50,
        forward_seconds=(0.25,),
        backward_seconds=(0.5,),
        densities=(0.25,),
        sent_bytes=14,
        compressing_seconds=0.125,
        step_seconds=2.0,
    ),
    m.Leave(failed=True, reason="x"),
    m.Stop(reason="x"),
]


def parts_of(data: bytes, cuts: list[int]) -> list[wire.Bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    whole = np.frombuffer(data, np.uint8)
    return [whole[a:b] for a, b in pairwise(edges)]


@given(sizes, sizes, st.binary(max_size=300), st.lists(st.integers(0, 300)), st.booleans())
def test_a_chunk_framed_by_hand_is_the_protobuf_message(
    transfer: int, offset: int, data: bytes, cuts: list[int], packed: bool
) -> None:
    encoded = wire.encode_chunk(transfer, offset, parts_of(data, cuts), 77, packed=packed)

    parsed = pb.WorkerMessage.FromString(encoded).chunk
    assert (parsed.transfer, parsed.offset) == (transfer, offset)
    assert parsed.data == data
    assert (parsed.crc32c, parsed.packed) == (77, packed)
    for container in (pb.ServerMessage, pb.InitializeMessage, pb.FetchMessage):
        assert container.FromString(encoded).chunk.data == data


@given(sizes, sizes, st.binary(max_size=300), st.booleans())
def test_a_chunk_is_read_alike_however_protobuf_orders_its_fields(
    transfer: int, offset: int, data: bytes, packed: bool
) -> None:
    by_hand = wire.encode_chunk(transfer, offset, [np.frombuffer(data, np.uint8)], 77, packed=packed)
    message = pb.WorkerMessage.FromString(by_hand)
    by_protobuf = message.SerializeToString()
    # Fields in another order are as valid: here data comes first.
    first = pb.Chunk(data=message.chunk.data, packed=packed).SerializeToString()
    rest = pb.Chunk(transfer=transfer, offset=offset, crc32c=message.chunk.crc32c).SerializeToString()
    body = first + rest
    reordered = b"\x0a" + _varint(len(body)) + body

    for encoded in (by_hand, by_protobuf, reordered):
        chunk = wire.decode_envelope(encoded, "WorkerMessage")
        assert isinstance(chunk, m.Chunk)
        assert (chunk.transfer, chunk.offset) == (transfer, offset)
        assert chunk.data.tobytes() == data
        assert (chunk.crc32c, chunk.packed) == (77, packed)


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for envelope in ("WorkerMessage", "ServerMessage", "InitializeMessage", "FetchMessage"):
        try:
            wire.decode_envelope(data, envelope)
        except MalformedError:
            continue


@given(st.sampled_from(MESSAGES), st.data())
def test_no_changed_byte_of_a_message_goes_unnoticed(message: m.WorkerMessage, draw: st.DataObject) -> None:
    encoded = bytearray(wire.encode_worker(message))
    assert wire.decode_envelope(bytes(encoded), "WorkerMessage") == message
    encoded[draw.draw(st.integers(0, len(encoded) - 1))] ^= draw.draw(st.integers(1, 255))
    try:
        changed = wire.decode_envelope(bytes(encoded), "WorkerMessage")
    except MalformedError:
        return
    # Only a first byte that turns it into a chunk gets through, and a chunk has a checksum of its own.
    assert isinstance(changed, m.Chunk)
    assert wire.crc32c((changed.data,)) != changed.crc32c or not changed.data.size


@given(st.sampled_from(MESSAGES), st.integers(1, 5))
def test_a_message_without_its_trailer_is_damaged(message: m.WorkerMessage, missing: int) -> None:
    with pytest.raises(wire.DamagedMessageError):
        wire.decode_envelope(wire.encode_worker(message)[:-missing], "WorkerMessage")


def test_the_trailer_is_the_containers_last_field() -> None:
    encoded = wire.encode_worker(MESSAGES[0])
    parsed = pb.WorkerMessage.FromString(encoded)
    assert parsed.crc32c == wire.crc32c((np.frombuffer(encoded[:-5], np.uint8),))
    assert parsed.SerializeToString() == encoded


@pytest.mark.parametrize("end", [0, 1, 2, 5, 8, -1])
def test_a_truncated_chunk_is_malformed(end: int) -> None:
    encoded = wire.encode_chunk(300, 70000, [np.arange(20, dtype=np.uint8)], 77)
    with pytest.raises(MalformedError):
        wire.decode_envelope(encoded[:end], "WorkerMessage")


def test_a_stream_takes_only_its_own_messages() -> None:
    with pytest.raises(TypeError, match="no body of WorkerMessage"):
        wire.encode_worker(m.Waiting(ranks=(), seconds=0, text=""))  # type: ignore[arg-type]


def test_a_batch_put_together_by_hand_is_the_protobuf_message() -> None:
    chunk = wire.encode_chunk(300, 0, [np.arange(200, dtype=np.uint8)], 77)
    encoded = [*map(wire.encode_worker, MESSAGES), chunk]
    batch = wire.batch(encoded)
    assert list(pb.WorkerMessage.FromString(batch).batch.messages) == encoded
    assert list(pb.ServerMessage.FromString(batch).batch.messages) == encoded
    assert wire.decode_envelope(batch, "WorkerMessage") == m.Batch(messages=tuple(encoded))
    assert wire.batch(encoded[:1]) == encoded[0]


def test_a_damaged_batch_is_noticed_wherever_it_was_damaged() -> None:
    """The batch itself notices it, or the checksums of its messages and chunks do."""
    encoded = list(map(wire.encode_worker, MESSAGES))
    batch = wire.batch(encoded)
    for place in range(len(batch)):
        for bit in range(8):
            changed = bytearray(batch)
            changed[place] ^= 1 << bit
            assert not passes(bytes(changed)), (place, bit)


def passes(batch: bytes) -> bool:
    try:
        read = wire.decode_envelope(batch, "WorkerMessage")
        several = [wire.decode_envelope(each, "WorkerMessage") for each in read.messages]
    except MalformedError:
        return False
    return not any(isinstance(each, m.Chunk) for each in several)


@pytest.mark.parametrize(
    "data",
    [b"\x72", b"\x72\x00", b"\x72\x80", b"\x72\x02\x0a", b"\x72\x02\x0a\x7f", b"\x72\x04" + b"\x12\x00" * 2],
)
def test_what_is_no_batch_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        wire.decode_envelope(data, "WorkerMessage")


def test_a_batch_has_room_for_so_many_messages() -> None:
    wire.decode_envelope(
        b"\x72" + wire.varint(2 * wire.MAX_BATCH) + b"\x0a\x00" * wire.MAX_BATCH, "WorkerMessage"
    )
    over = wire.MAX_BATCH + 1
    with pytest.raises(MalformedError, match="2 to 256 messages"):
        wire.decode_envelope(b"\x72" + wire.varint(2 * over) + b"\x0a\x00" * over, "WorkerMessage")


def test_short_messages_are_gathered_up_to_the_first_that_fills_the_batch() -> None:
    short, long = b"s" * 100, b"l" * wire.BATCH_BYTES
    waiting = [short, long, short]
    batch = wire.decode_envelope(
        wire.gather(short, lambda: waiting.pop(0) if waiting else None), "WorkerMessage"
    )
    assert batch.messages == (short, short, long)
    assert wire.gather(long, lambda: waiting.pop(0)) == long
    endless = wire.gather(b"", lambda: b"")
    assert len(wire.decode_envelope(endless, "WorkerMessage").messages) == wire.MAX_BATCH


def test_a_batch_in_another_encoding_is_malformed() -> None:
    """Its messages would be as many as fit."""
    batch = b"\x68\x00" + wire.batch([wire.encode_worker(MESSAGES[0])] * 2)  # an unknown field first
    checked = batch + b"\x7d" + wire.crc32c((np.frombuffer(batch, np.uint8),)).to_bytes(4, "little")
    assert len(pb.WorkerMessage.FromString(checked).batch.messages) == 2
    with pytest.raises(MalformedError, match="not the first field of its message"):
        wire.decode_envelope(checked, "WorkerMessage")
