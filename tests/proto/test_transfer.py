"""Transfers: what fits the manifest arrives whole, anything else is refused before it is allocated."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gradwire.common.parts import Part
from gradwire.compressors import (
    AbsentPayload,
    CodeFormat,
    DenseFormat,
    DensePayload,
    Payload,
    ProjectedPayload,
    QuantizedPayload,
    payload_bytes,
)
from gradwire.compressors.packing import pack
from gradwire.proto import messages as m
from gradwire.proto.announced import NO_BYTES, announced_payloads
from gradwire.proto.convert import MalformedError
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import (
    MAX_PARTS,
    PACKETS,
    Assembly,
    chunk_checksums,
    digest,
    encode_chunks,
    part_transfer,
    payload_header,
)
from gradwire.proto.wire import CHUNK_BYTES, crc32c, decode_envelope

MANIFEST = Manifest(
    (
        m.Tensor(name="weight", shape=(3, 7), dtype="float32"),
        m.Tensor(name="bias", shape=(5,), dtype="float32"),
    ),
    100,
)
PART = Part(0, 26)
LEVELS = np.linspace(0.125, 0.875, 7, dtype=np.float32)


def payloads() -> list[Payload]:
    codes = np.zeros(CodeFormat.SIGNED_4BIT.code_bytes(21), np.uint8)
    codes[:3] = (0x91, 0x07, 0xF2)
    weight = QuantizedPayload(format=CodeFormat.SIGNED_4BIT, elements=21, levels=LEVELS, data=codes)
    values = np.arange(5, dtype=np.float32)
    bias = DensePayload(format=DenseFormat.FLOAT32, elements=5, data=values.view(np.uint8))
    return [weight, bias]


def headers() -> list[m.PayloadHeader]:
    return [payload_header(payload) for payload in payloads()]


def assemble(transfer: int, announced: list[Payload]) -> Assembly:
    names = ["tensor 'weight'", "tensor 'bias'"][: len(announced)]
    return Assembly(transfer, announced, chunk_bytes=CHUNK_BYTES, worker="w", names=names)


def receive(messages: list[bytes], announced: list[Payload]) -> list[Payload]:
    assembly = assemble(4, announced)
    for message in messages:
        chunk = decode_envelope(message, "WorkerMessage")
        assert isinstance(chunk, m.Chunk)
        assembly.add(chunk)
    return assembly.finish()


def test_a_transfer_arrives_as_it_was_sent() -> None:
    sent = payloads()
    parts = [payload.data for payload in sent]
    announced = announced_payloads(headers(), PART, MANIFEST, worker="w")
    got = receive(list(encode_chunks(4, parts)), announced)

    assert [payload.data.tobytes() for payload in got] == [part.tobytes() for part in parts]
    assert isinstance(got[0], QuantizedPayload)
    assert got[0].levels.tobytes() == LEVELS.tobytes()


def test_absent_tensors_arrive_without_bytes() -> None:
    bias = payloads()[1]
    announced = announced_payloads([ABSENT, headers()[1]], PART, MANIFEST, worker="w")
    absent, whole = receive(list(encode_chunks(4, [bias.data])), announced)
    assert isinstance(absent, AbsentPayload)
    assert (absent.elements, absent.data.size) == (21, 0)
    assert whole.data.tobytes() == bias.data.tobytes()
    assert payload_header(absent) == ABSENT


def test_bytes_of_what_is_absent_are_refused() -> None:
    for sent in ([np.zeros(84, np.uint8)], [np.zeros(1, np.uint8)]):
        announced = announced_payloads([dataclasses.replace(ABSENT, elements=26)], PART, MANIFEST, worker="w")
        with pytest.raises(Refused) as caught:
            receive(list(encode_chunks(4, sent)), announced)
        assert caught.value.refusal.reason is Reason.CHUNK


@pytest.mark.parametrize(("part", "fits"), [(Part(0, 8), True), (Part(8, 21), True), (Part(8, 26), False)])
def test_of_a_tensor_that_is_cut_all_of_a_part_may_be_absent(part: Part, fits: bool) -> None:
    """But not up to a border where neither a tensor ends nor the part."""
    bounds = [part.elements] if fits else [part.elements - 6, 6]
    sent = [dataclasses.replace(ABSENT, elements=elements) for elements in bounds]
    if fits:
        (payload,) = announced_payloads(sent, part, MANIFEST, worker="w")
        assert payload.elements == part.elements
        return
    with pytest.raises(Refused, match="'weight'"):
        announced_payloads(sent, part, MANIFEST, worker="w")


IN_BASES = payload_header(
    ProjectedPayload(
        elements=21,
        values=DensePayload(format=DenseFormat.FLOAT32, elements=10, data=NO_BYTES),
        data=NO_BYTES,
    )
)


@pytest.mark.parametrize(
    ("sent", "coordinates", "limit"),
    [
        ([IN_BASES], {0: 10}, ""),
        ([IN_BASES], {}, "a payload that decodes by itself"),
        ([IN_BASES], {0: 11}, "11 coordinates of the whole tensor"),
        ([dataclasses.replace(IN_BASES, elements=20)], {0: 10}, "of the whole tensor"),
    ],
)
def test_coordinates_stand_for_a_whole_tensor_that_has_bases(
    sent: list[m.PayloadHeader], coordinates: dict[int, int], limit: str
) -> None:
    part = Part(0, sum(each.elements for each in sent))
    if limit:
        with pytest.raises(Refused, match=limit) as caught:
            announced_payloads(sent, part, MANIFEST, worker="w", coordinates=coordinates)
        assert caught.value.refusal.reason is Reason.PAYLOAD
        return
    (payload,) = announced_payloads(sent, part, MANIFEST, worker="w", coordinates=coordinates)
    assert payload_header(payload) == IN_BASES
    assert payload_bytes(payload) == 40


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 17))
def test_chunks_hold_the_parts_end_to_end(sizes: list[int], chunk_bytes: int) -> None:
    data = np.arange(sum(sizes), dtype=np.uint8)
    parts = np.split(data, np.cumsum(sizes[:-1])) if sizes else []
    chunks = [decode_envelope(message, "WorkerMessage") for message in encode_chunks(1, parts, chunk_bytes)]
    together = b""
    for chunk in chunks:
        assert isinstance(chunk, m.Chunk)
        assert chunk.offset == len(together)
        assert 0 < chunk.data.size <= chunk_bytes
        together += chunk.data.tobytes()
    assert together == data.tobytes()
    assert len(chunks) == -(-data.size // chunk_bytes)
    checksums = chunk_checksums(parts, chunk_bytes)
    assert list(encode_chunks(1, parts, chunk_bytes, checksums)) == list(encode_chunks(1, parts, chunk_bytes))
    assert (checksums[-1] if checksums else 0) == crc32c([data])


def altered(place: int, **changes: Any) -> list[m.PayloadHeader]:
    changed = headers()
    changed[place] = dataclasses.replace(changed[place], **changes)
    return changed


EMPTY = m.PayloadHeader(elements=0, kind=m.DenseHeader(format=m.DenseEncoding.FLOAT32))

ABSENT = m.PayloadHeader(elements=21, kind=m.AbsentHeader())  # of the weight


def in_blocks(*sizes: int, levels: int = 0) -> list[m.PayloadHeader]:
    """The weight in blocks. levels: in all, as many as they take if 0."""
    kind = m.QuantizedHeader(
        format=m.CodeEncoding.SIGNED_4BIT,
        levels=(*LEVELS.tolist(),) * len(sizes) if not levels else (1.0,) * levels,
        sizes=sizes,
    )
    return altered(0, kind=kind)


@pytest.mark.parametrize(
    ("sent", "reason", "words"),
    [
        (headers()[:1], Reason.ELEMENTS, "part from tensor 'weight': expected payloads of 26 elements"),
        ([*headers(), headers()[1]], Reason.ELEMENTS, "got 31 elements"),
        ([*headers(), EMPTY], Reason.ELEMENTS, "none empty"),
        ([EMPTY, *headers()], Reason.ELEMENTS, "none empty"),
        (altered(0, elements=20), Reason.ELEMENTS, "got 25 elements"),
        (altered(0, elements=2**40), Reason.ELEMENTS, "got 1099511627781 elements"),
        (altered(0, kind=None), Reason.PAYLOAD, "tensor 'weight' kind"),
        (altered(1, kind=None), Reason.PAYLOAD, "tensor 'bias' kind"),
        (in_blocks(21, 1), Reason.PAYLOAD, "sizes"),
        (in_blocks(20), Reason.PAYLOAD, "sizes"),
        (in_blocks(22), Reason.PAYLOAD, "sizes: expected blocks of at most 21 elements, got 22"),
        (in_blocks(2**63, 2**63, 21), Reason.PAYLOAD, "sizes"),
        (in_blocks(10, 11, levels=7), Reason.PAYLOAD, "levels"),
        ([ABSENT], Reason.ELEMENTS, "got 21 elements"),
        ([ABSENT, altered(1, elements=6)[1]], Reason.ELEMENTS, "got 27 elements"),
        ([ABSENT, dataclasses.replace(ABSENT, elements=0), headers()[1]], Reason.ELEMENTS, "none empty"),
        (
            [dataclasses.replace(ABSENT, elements=20), altered(1, elements=6)[1]],
            Reason.PAYLOAD,
            "tensor 'weight': expected a tensor that is absent as a whole or not at all, "
            "got an absent piece of it",
        ),
        (
            [altered(1, elements=22)[1], dataclasses.replace(ABSENT, elements=4)],
            Reason.PAYLOAD,
            "tensor 'bias': expected a tensor that is absent as a whole or not at all, "
            "got an absent piece of it",
        ),
        (altered(1, kind=m.DenseHeader(format=m.DenseEncoding.UNSPECIFIED)), Reason.PAYLOAD, "kind"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    sent: list[m.PayloadHeader], reason: Reason, words: str
) -> None:
    with pytest.raises(Refused) as caught:
        announced_payloads(sent, PART, MANIFEST, worker="w")
    assert caught.value.refusal.reason is reason
    assert words in caught.value.refusal.message
    assert "'w'" in caught.value.refusal.message


def test_payloads_may_lie_across_tensors_and_begin_within_one() -> None:
    """A part is a range of the flat order; what is refused names the tensor that it begins in."""
    sent = [payload_header(values_of(size)) for size in (3, 20)]
    part = Part(3, 26)
    assert [each.elements for each in announced_payloads(sent, part, MANIFEST, worker="w")] == [3, 20]
    sent[1] = dataclasses.replace(sent[1], kind=None)
    with pytest.raises(Refused, match="tensor 'weight' kind"):
        announced_payloads(sent, part, MANIFEST, worker="w")
    with pytest.raises(Refused, match="part from tensor 'bias': expected payloads of 5 elements"):
        announced_payloads(sent, Part(21, 26), MANIFEST, worker="w")


def test_a_part_without_elements_has_no_payloads() -> None:
    assert announced_payloads([], Part(26, 26), MANIFEST, worker="w") == []
    with pytest.raises(Refused, match="none empty"):
        announced_payloads([EMPTY], Part(26, 26), MANIFEST, worker="w")


def test_blocks_of_a_payload_have_levels_of_their_own() -> None:
    weight, _ = announced_payloads(in_blocks(10, 0, 11), PART, MANIFEST, worker="w")
    assert isinstance(weight, QuantizedPayload)
    assert weight.block_sizes().tolist() == [10, 0, 11]
    assert weight.levels.size == 3 * LEVELS.size


def test_transfers_of_parts_have_numbers_of_their_own() -> None:
    pairs = [(number, part) for number in (0, 1, 2, 2**40) for part in (0, 1, MAX_PARTS - 1)]
    assert len({part_transfer(*pair) for pair in pairs}) == len(pairs)
    assert max(part_transfer(*pair) for pair in pairs) < PACKETS


def test_the_digest_is_over_the_checksums_in_the_order_of_the_parts() -> None:
    checksums = {2: 30, 0: 10, 1: 2**32 - 1}
    expected = crc32c((np.array([10, 2**32 - 1, 30], "<u4").view(np.uint8),))
    assert digest(checksums) == digest(dict(sorted(checksums.items()))) == expected
    assert digest({}) == 0
    others = [{0: 10, 1: 30, 2: 2**32 - 1}, {0: 10, 1: 2**32 - 1}, {**checksums, 0: 11}]
    assert expected not in map(digest, others)


def values_of(elements: int) -> Payload:
    values = np.ones(elements, np.float32)
    return DensePayload(format=DenseFormat.FLOAT32, elements=elements, data=values.view(np.uint8))


def with_levels(levels: tuple[float, ...]) -> list[m.PayloadHeader]:
    kind = m.QuantizedHeader(format=m.CodeEncoding.SIGNED_4BIT, levels=levels)
    return altered(0, kind=kind)


def refused_content(sent: list[Payload], sent_headers: list[m.PayloadHeader]) -> Reason:
    parts = [payload.data for payload in sent]

    def take() -> None:
        announced = announced_payloads(sent_headers, PART, MANIFEST, worker="w")
        receive(list(encode_chunks(4, parts)), announced)

    with pytest.raises(Refused) as caught:
        take()
    assert caught.value.refusal.worker == "w"
    assert "tensor '" in caught.value.refusal.message
    return caught.value.refusal.reason


def test_code_8_is_refused() -> None:
    sent = payloads()
    sent[0].data[0] = 0x08
    assert refused_content(sent, headers()) is Reason.PAYLOAD


def test_padding_is_refused() -> None:
    sent = payloads()
    sent[0].data[-1] = 0x10
    assert refused_content(sent, headers()) is Reason.PAYLOAD


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_levels_that_are_not_finite_are_refused(bad: float) -> None:
    levels = (*LEVELS[:6].tolist(), bad)
    assert refused_content(payloads(), with_levels(levels)) is Reason.NON_FINITE


@pytest.mark.parametrize(
    "levels", [(), (1.0,), (1.0,) * 7, tuple(LEVELS[::-1].tolist()), (-1.0, *range(1, 7))]
)
def test_levels_of_the_wrong_form_are_refused(levels: tuple[float, ...]) -> None:
    assert refused_content(payloads(), with_levels(levels)) is Reason.PAYLOAD


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    sent = payloads()
    sent[1].data.view(np.float32)[2] = bad
    assert refused_content(sent, headers()) is Reason.NON_FINITE


@given(st.data())
def test_no_changed_byte_of_a_transfer_goes_unnoticed(draw: st.DataObject) -> None:
    messages = [bytearray(message) for message in encode_chunks(4, [p.data for p in payloads()], 7)]
    victim = messages[draw.draw(st.integers(0, len(messages) - 1))]
    victim[draw.draw(st.integers(0, len(victim) - 1))] ^= draw.draw(st.integers(1, 255))
    checksum = 0
    for index, message in enumerate(messages):
        try:
            got = decode_envelope(bytes(message), "WorkerMessage")
        except MalformedError:
            return
        if not isinstance(got, m.Chunk) or (got.transfer, got.offset) != (4, 7 * index):
            return
        checksum = crc32c((got.data,), checksum)
        if checksum != got.crc32c:
            return
    raise AssertionError("the change went unnoticed")


def chunk(offset: int, size: int, *, transfer: int = 4, damage: bool = False) -> m.Chunk:
    data = np.full(offset + size, 3, np.uint8)
    checksum = crc32c((data,)) ^ int(damage)
    return m.Chunk(transfer=transfer, offset=offset, crc32c=checksum, data=data[offset:])


BIG = DensePayload(format=DenseFormat.FLOAT32, elements=CHUNK_BYTES // 4 + 10, data=np.empty(0, np.uint8))


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([chunk(0, CHUNK_BYTES, transfer=5)], Reason.CHUNK),
        ([chunk(40, CHUNK_BYTES)], Reason.CHUNK),
        ([chunk(0, 100)], Reason.CHUNK),
        ([chunk(0, CHUNK_BYTES + 40)], Reason.CHUNK),
        ([chunk(0, CHUNK_BYTES), chunk(0, CHUNK_BYTES)], Reason.CHUNK),
        ([chunk(0, CHUNK_BYTES), chunk(CHUNK_BYTES, 41)], Reason.CHUNK),
        ([chunk(0, CHUNK_BYTES), chunk(CHUNK_BYTES, 40), chunk(CHUNK_BYTES + 40, 0)], None),
        ([chunk(0, CHUNK_BYTES, damage=True)], Reason.CHECKSUM),
    ],
)
def test_chunks_come_in_order_and_in_full(chunks: list[m.Chunk], reason: Reason | None) -> None:
    assembly = assemble(4, [BIG])
    got: Reason | None = None
    try:
        for one in chunks:
            assembly.add(one)
    except Refused as refused:
        got = refused.refusal.reason
    assert got is reason


def test_an_empty_transfer_is_complete_at_once() -> None:
    assembly = assemble(1, [])
    assert assembly.complete
    assert assembly.finish() == []


HALF = np.random.default_rng(1).integers(0, 16, CHUNK_BYTES + 40, np.uint8)  # half of its bits are empty
HELD = DensePayload(format=DenseFormat.FLOAT32, elements=HALF.size // 4, data=np.empty(0, np.uint8))


def packed_chunks() -> list[m.Chunk]:
    cuts = [HALF[:1000], HALF[1000:]]
    return [decode_envelope(each, "WorkerMessage") for each in encode_chunks(4, cuts, pack=pack)]


def test_packed_chunks_arrive_as_they_were() -> None:
    chunks, assembly = packed_chunks(), assemble(4, [HELD])
    assert [each.packed for each in chunks] == [True, False]  # the second is too small
    assert chunks[0].data.size < 0.6 * CHUNK_BYTES
    for chunk in chunks:
        assembly.add(chunk)
    assert assembly.complete
    assert assembly.data.tobytes() == HALF.tobytes()
    assert assembly.checksum == crc32c((HALF,))


def test_a_packed_chunk_of_other_bytes_is_refused_before_memory_is_taken() -> None:
    first, _ = packed_chunks()
    bomb = np.frombuffer(zstandard.compress(bytes(64 << 20)), np.uint8)
    changed = {
        "CRC": dataclasses.replace(first, crc32c=first.crc32c ^ 1),
        "bomb": dataclasses.replace(first, data=bomb),
        "cut": dataclasses.replace(first, data=first.data[:-1]),
        "raw": dataclasses.replace(first, data=HALF[:CHUNK_BYTES]),
        "not packed": dataclasses.replace(first, packed=False),
        "of another offset": dataclasses.replace(first, offset=1),
    }
    for name, chunk in changed.items():
        assembly = assemble(4, [HELD])
        tracemalloc.start()
        with pytest.raises(Refused) as refused:
            assembly.add(chunk)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        reason = Reason.CHECKSUM if name == "CRC" else Reason.CHUNK
        assert (refused.value.refusal.reason, assembly.arrived) == (reason, 0), name
        assert most < 2 * CHUNK_BYTES, name
