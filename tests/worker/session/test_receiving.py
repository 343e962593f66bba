"""Messages down a stream, in the orders in which they may arrive."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from gradwire.common.parts import divide
from gradwire.compressors import DenseFormat, DensePayload, decode
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.plans import plan_message
from gradwire.proto.refusal import Refused
from gradwire.proto.transfer import encode_chunks, packet_transfer, part_transfer, payload_header
from gradwire.proto.wire import decode_envelope
from gradwire.worker.session.attempts import BrokenError
from gradwire.worker.session.receiving import Receiver

CHUNK_BYTES = 512 * 1024
ELEMENTS = CHUNK_BYTES // 4 * 2 + 1  # three chunks
MANIFEST = Manifest((m.Tensor(name="weight", shape=(ELEMENTS,), dtype="float32"),), 8)


def chunks_of(packet: m.Packet) -> list[m.Chunk]:
    data = np.arange(packet.elements, dtype=np.uint32).view(np.uint8)
    decoded = [
        decode_envelope(message, "ServerMessage")
        for message in encode_chunks(packet_transfer(packet), [data])
    ]
    return [chunk for chunk in decoded if isinstance(chunk, m.Chunk)]


def packet(exchange: int, index: int = 0, elements: int = ELEMENTS) -> m.Packet:
    return m.Packet(exchange=exchange, index=index, elements=elements)


def test_packets_may_come_chunk_by_chunk_beside_each_other() -> None:
    receiver = Receiver("w")
    both = packet(1, 0), packet(1, 1)
    for each in both:
        assert receiver.begin_packet(each, MANIFEST) is None
    finished = [receiver.add(chunk) for pair in zip(*map(chunks_of, both), strict=True) for chunk in pair]
    assert finished[:4] == [None] * 4
    for each, received in zip(both, finished[4:], strict=True):
        assert received is not None
        assert received.header == each
        np.testing.assert_array_equal(received.data, np.arange(ELEMENTS))


def test_the_rest_of_an_exchange_that_was_given_up_is_passed_over() -> None:
    receiver = Receiver("w")
    old, new = packet(1), packet(2)
    receiver.begin_packet(old, MANIFEST)
    first, *rest = chunks_of(old)
    assert receiver.add(first) is None
    receiver.begin_packet(new, MANIFEST)
    assert [receiver.add(chunk) for chunk in rest] == [None, None]
    assert receiver.add(chunks_of(new)[0]) is None


def test_an_empty_packet_is_whole_at_once() -> None:
    received = Receiver("w").begin_packet(packet(1, elements=0), MANIFEST)
    assert received is not None
    assert received.data.shape == (0,)


PLAN_OF_MODEL = divide([ELEMENTS], 4 * 4096)


def part_of_update(part: int, version: int = 3) -> tuple[m.Update, list[m.Chunk]]:
    """Its number in every element."""
    elements = PLAN_OF_MODEL.parts[part].elements
    data = np.full(elements, part, np.float32).view(np.uint8)
    header = payload_header(DensePayload(format=DenseFormat.FLOAT32, elements=elements, data=data))
    messages = encode_chunks(part_transfer(version, part), [data])
    chunks = [decode_envelope(message, "ServerMessage") for message in messages]
    update = m.Update(version=version, part=part, plan=1, payloads=(header,))
    return update, [chunk for chunk in chunks if isinstance(chunk, m.Chunk)]


def test_parts_of_an_update_come_one_by_one() -> None:
    receiver = Receiver("w")
    for part in (len(PLAN_OF_MODEL.parts) - 1, 0, 2):
        update, chunks = part_of_update(part)
        receiver.begin_update(update, MANIFEST, PLAN_OF_MODEL)
        assert receiver.take_update() is None
        for chunk in chunks:
            receiver.add(chunk)
        complete = receiver.take_update()
        assert complete is not None
        assert complete[0] is update
        (payload,) = complete[1].finish()
        assert set(decode(payload).tolist()) == {part}
        assert receiver.take_update() is None


def test_a_chunk_of_another_part_is_refused() -> None:
    receiver = Receiver("w")
    receiver.begin_update(part_of_update(0)[0], MANIFEST, PLAN_OF_MODEL)
    for other in (part_of_update(1), part_of_update(0, version=4)):
        with pytest.raises(Refused, match="transfer"):
            receiver.add(other[1][0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"part": len(PLAN_OF_MODEL.parts)}, "expected one of 65 parts of plan 1, got part"),
        ({"part": 2**32 - 1}, "expected one of 65 parts of plan 1, got part"),
        ({"plan": 2}, "of plan 2"),
    ],
)
def test_a_part_that_the_plan_does_not_have_breaks_the_stream(changes: dict[str, Any], words: str) -> None:
    update = dataclasses.replace(part_of_update(0)[0], **changes)
    with pytest.raises(BrokenError, match=words):
        Receiver("w").begin_update(update, MANIFEST, PLAN_OF_MODEL)
    with pytest.raises(BrokenError, match="before this worker was ready"):
        Receiver("w").begin_update(part_of_update(0)[0], None, None)


def test_what_is_larger_than_the_model_or_belongs_nowhere_breaks_the_stream() -> None:
    receiver = Receiver("w")
    with pytest.raises(BrokenError, match=f"expected at most {ELEMENTS} elements"):
        receiver.begin_packet(packet(1, elements=ELEMENTS + 1), MANIFEST)
    with pytest.raises(BrokenError, match="expected at most 0 elements"):
        receiver.begin_packet(packet(1), None)
    stray = m.Chunk(transfer=3, offset=0, crc32c=0, data=np.zeros(4, np.uint8))
    with pytest.raises(BrokenError, match="without an update"):
        receiver.add(stray)


def test_a_plan_is_checked_against_the_model() -> None:
    receiver, message = Receiver("w"), plan_message(PLAN_OF_MODEL)
    assert receiver.plan(message, MANIFEST) == PLAN_OF_MODEL
    with pytest.raises(BrokenError, match="before this worker was ready"):
        receiver.plan(message, None)
    with pytest.raises(Refused, match="worker 'w', plan tensors: expected"):
        receiver.plan(dataclasses.replace(message, tensors=(9,)), MANIFEST)
