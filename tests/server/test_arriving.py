"""Parts of pushes that arrive on one stream, a few at a time."""

from __future__ import annotations

from typing import Any

import pytest
from pushes import cut_plan, dense

from gradwire.compressors import Payload
from gradwire.compressors.packing import Packing
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import MAX_ARRIVING, encode_chunks, part_transfer, payload_header
from gradwire.proto.wire import decode_envelope
from gradwire.server.streams.arriving import ArrivingParts

SHAPES = ((5, 3), (2,), ())
MANIFEST = Manifest(
    tuple(m.Tensor(name=f"t{i}", shape=shape, dtype="float32") for i, shape in enumerate(SHAPES)), 100
)
PARTS = cut_plan((8, 7), (2,), (1,))


# ---- parts on one stream


def header(part: int, payloads: list[Payload], **changes: Any) -> m.PartHeader:
    fields: dict[str, Any] = {"seq": 1, "assignment": 3, "part": part, "plan": 1}
    return m.PartHeader(**{**fields, **changes}, payloads=tuple(map(payload_header, payloads)))


def chunks(given: m.PartHeader, payloads: list[Payload], entropy: str = "off") -> list[m.Chunk]:
    transfer = part_transfer(given.seq, given.part)
    found: list[m.Chunk] = []
    for message in encode_chunks(transfer, [payload.data for payload in payloads], pack=Packing(entropy)):
        chunk = decode_envelope(message, "WorkerMessage")
        assert isinstance(chunk, m.Chunk)
        found.append(chunk)
    return found


def test_a_part_is_complete_with_its_last_byte_and_may_hold_several_payloads() -> None:
    arriving, payloads = ArrivingParts("w"), [dense(1, 2, 3), dense(4, 5, 6, 7, 8)]
    given = header(2, payloads)
    arriving.begin(given, MANIFEST, PARTS)
    assert arriving.header(part_transfer(1, 2)) is given
    assert arriving.take() is None
    for chunk in chunks(given, payloads):
        arriving.add(chunk)
    complete = arriving.take()
    assert complete is not None
    assert complete[0] is given
    assert [bytes(payload.data) for payload in complete[1].finish()] == [bytes(p.data) for p in payloads]
    assert arriving.header(part_transfer(1, 2)) is None
    assert arriving.take() is None


@pytest.mark.parametrize(
    ("given", "reason", "text"),
    [
        (header(4, [dense(1)]), Reason.PLAN, "a part below 4"),
        (header(0, [dense(1)], plan=2), Reason.PLAN, "plan 1"),
        (header(0, [dense(1, 2)]), Reason.ELEMENTS, "2 elements"),
        (header(3, [dense(1, 2), dense(3)]), Reason.ELEMENTS, "7 elements"),
        (header(1, [dense(1, 2), dense()]), Reason.ELEMENTS, "none empty"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_before_memory_is_taken_and_its_chunks_are_dropped(
    given: m.PartHeader, reason: Reason, text: str
) -> None:
    arriving = ArrivingParts("w")
    with pytest.raises(Refused, match=text) as caught:
        arriving.begin(given, MANIFEST, PARTS)
    assert caught.value.refusal.reason is reason
    assert caught.value.refusal.worker == "w"
    assert arriving.header(part_transfer(given.seq, given.part)) is None
    for chunk in chunks(given, [dense(1, 2, 3)]):
        arriving.add(chunk)
    assert arriving.take() is None


LARGE = 200_000  # elements, which travel in two chunks
LARGE_MANIFEST = Manifest(
    tuple(m.Tensor(name=f"t{i}", shape=(LARGE,), dtype="float32") for i in range(6)), 100
)
LARGE_PARTS = cut_plan(*[(LARGE,)] * 6)


def large(part: int, seq: int = 1, **changes: Any) -> tuple[m.PartHeader, m.Chunk, m.Chunk]:
    payloads: list[Payload] = [dense(*range(part, part + LARGE))]
    given = header(part, payloads, seq=seq, **changes)
    first, second = chunks(given, payloads)
    return given, first, second


def test_a_part_that_begins_anew_takes_the_place_of_what_had_arrived() -> None:
    arriving, (given, first, second) = ArrivingParts("w"), large(1)
    for _ in range(2):
        arriving.begin(given, LARGE_MANIFEST, LARGE_PARTS)
        arriving.add(first)
    arriving.add(second)
    assert arriving.take() is not None
    arriving.begin(given, LARGE_MANIFEST, LARGE_PARTS)
    arriving.add(first)
    arriving.drop(given)
    arriving.add(second)
    assert arriving.take() is None


def test_a_part_may_be_overtaken_by_others_between_its_chunks() -> None:
    arriving, parts = ArrivingParts("w"), [large(number) for number in range(MAX_ARRIVING)]
    for given, first, _ in parts:
        arriving.begin(given, LARGE_MANIFEST, LARGE_PARTS)
        arriving.add(first)
        assert arriving.take() is None
    assert [arriving.header(part_transfer(1, number)) for number in range(4)] == [each[0] for each in parts]
    with pytest.raises(Refused, match="4 incomplete parts at once") as caught:
        arriving.begin(large(5)[0], LARGE_MANIFEST, LARGE_PARTS)
    assert caught.value.refusal.reason is Reason.SIZE
    for given, _, second in reversed(parts):
        arriving.add(second)
        complete = arriving.take()
        assert complete is not None
        assert complete[0] is given
        (payload,) = complete[1].finish()
        assert bytes(payload.data) == bytes(dense(*range(given.part, given.part + LARGE)).data)
        assert arriving.take() is None


def test_of_a_push_that_is_of_no_use_all_parts_are_dropped() -> None:
    arriving, parts = ArrivingParts("w"), [large(0), large(1), large(2, seq=2)]
    for given, first, _ in parts:
        arriving.begin(given, LARGE_MANIFEST, LARGE_PARTS)
        arriving.add(first)
    arriving.drop_push(1)
    for _, _, second in parts[:2]:
        arriving.add(second)
        assert arriving.take() is None
    arriving.add(parts[2][2])
    assert arriving.take() is not None


def test_it_says_how_many_bytes_came_since_the_part_before_and_whether_without_a_pause() -> None:
    """Bytes of a part before another overtook it arrived in the time of the other."""
    arriving, size = ArrivingParts("w"), 4 * LARGE

    def taken() -> tuple[int, bool]:
        assert arriving.take() is not None
        size, unpacked, waited = arriving.since()
        assert size == unpacked
        return size, waited

    def begin(part: int, waited: bool) -> tuple[m.Chunk, m.Chunk]:
        given, *both = large(part, waited=waited)
        arriving.begin(given, LARGE_MANIFEST, LARGE_PARTS)
        arriving.add(both[0])
        return both[0], both[1]

    for waited in (False, True):
        arriving.add(begin(0, waited)[1])
        assert taken() == (size, waited)
    first, overtaken = begin(1, False)
    arriving.add(begin(2, True)[1])
    assert taken() == (size + len(first.data), False), "nothing was on its way before the first of them"
    arriving.add(overtaken)
    assert taken() == (size - len(first.data), True)
    arriving.add(begin(3, True)[1])
    assert taken() == (size, True)


def test_it_says_how_many_bytes_came_packed_and_how_many_they_were_before() -> None:
    arriving, payloads = ArrivingParts("w"), [dense(*range(8000))]
    given = header(0, payloads)
    arriving.begin(
        given, Manifest((m.Tensor(name="t", shape=(8000,), dtype="float32"),), 1), cut_plan((8000,))
    )
    (chunk,) = chunks(given, payloads, "on")
    arriving.add(chunk)
    complete = arriving.take()
    assert complete is not None
    assert [bytes(each.data) for each in complete[1].finish()] == [bytes(payloads[0].data)]
    assert chunk.packed
    assert arriving.since() == (chunk.data.size, 32_000, False)


def test_a_chunk_before_any_part_is_refused() -> None:
    with pytest.raises(Refused, match="the header of a part first"):
        ArrivingParts("w").add(chunks(header(0, [dense(1)]), [dense(1)])[0])
