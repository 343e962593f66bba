"""Any bytes that arrive are refused, or is a payload that decodes; and nothing that is compressed gets
lost."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import plain_codes
import plain_linear
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.common.parts import Part
from gradwire.compressors import (
    AbsentPayload,
    CodeFormat,
    DenseFormat,
    DensePayload,
    IndexCoding,
    LinearPayload,
    Payload,
    PayloadError,
    ProjectedPayload,
    QuantizedPayload,
    SparsePayload,
    ValuePayload,
    check_announcement,
    decode,
    pack_codes,
    payload_bytes,
    reduce_payloads,
    sum_coordinates,
    unpack_codes,
    validate,
)
from gradwire.compressors.indices import decode_indices, seeded_payload
from gradwire.compressors.kernels import sparse
from gradwire.proto import messages as m
from gradwire.proto.announced import announced_payloads
from gradwire.proto.convert import decode as from_wire
from gradwire.proto.convert import encode as to_wire
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import Assembly, encode_chunks, payload_header
from gradwire.proto.wire import decode_envelope

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[np.float32]

NO_BYTES = np.empty(0, np.uint8)
CHUNK = 64  # bytes, so that small transfers take several

CODES = {"4bit": CodeFormat.SIGNED_4BIT, "2bit": CodeFormat.SIGNED_2BIT, "binary": CodeFormat.BINARY}
FORMATS = {form.value: form for form in DenseFormat}
LINEAR = {"linear1": 1, "linear2": 2, "linear5": 5, "linear8": 8}
VALUES = [*FORMATS, *CODES, *LINEAR]
CUT = [
    *VALUES,
    "vote",
    "absent",
    *(f"{coding.value} {values}" for coding in IndexCoding for values in VALUES),
]
KINDS = [*CUT, *(f"projected {values}" for values in VALUES)]


def values_of(kind: str, elements: int, rng: np.random.Generator) -> ValuePayload:
    """A valid payload whose codes are drawn from all that are allowed."""
    if kind in FORMATS:
        form = FORMATS[kind]
        data = np.zeros(elements * form.element_bytes, np.uint8)
        values = (rng.standard_normal(elements) * 10.0 ** rng.integers(-9, 5)).astype(np.float32)
        plain_codes.encode_dense(form, values, np.zeros_like(values), data)
        return DensePayload(format=form, elements=elements, data=data)
    if kind in LINEAR:
        bits, bucket = LINEAR[kind], 32 * int(rng.integers(1, 3))
        most = 2 ** (bits - 1) - 1
        scales = rng.random(-(-elements // bucket)).astype(np.float32)
        drawn = rng.integers(-most, most + 1, elements) if bits > 1 else rng.integers(2, size=elements)
        codes = pack_codes(bits, drawn.astype(np.int32))
        data = np.concatenate([scales.view(np.uint8), codes])
        return LinearPayload(elements=elements, bits=bits, bucket=bucket, data=data)
    format = CODES.get(kind, CodeFormat.VOTE)
    allowed = np.array(sorted({*range(2**format.bits)} - {format.forbidden_code}))
    levels = np.cumsum(rng.random(format.level_count) + 0.01).astype(np.float32)
    if format is CodeFormat.BINARY:
        levels -= 1
    data = pack(format, rng.choice(allowed, elements))
    return QuantizedPayload(format=format, elements=elements, levels=levels, data=data)


def pack(format: CodeFormat, codes: npt.NDArray[np.integer]) -> Bytes:
    return pack_codes(format.bits, codes.astype(np.int32))


def payload_of(kind: str, elements: int, seed: int) -> Payload:
    if kind == "absent":
        return AbsentPayload(elements=elements)
    rng = np.random.default_rng(seed)
    coding, _, inner = kind.rpartition(" ")
    if not coding:
        return values_of(kind, elements, rng)
    count = int(rng.integers(elements + 1))
    if coding == "projected":
        values = values_of(inner, max(count, 1), rng)
        exponent = int(rng.integers(-126, 112)) if inner == "float16" else 0
        form = dataclasses.replace(values, data=NO_BYTES)
        return ProjectedPayload(elements=max(elements, 1), values=form, exponent=exponent, data=values.data)
    values = values_of(inner, count, rng)
    if coding in ("seeded", "uniform"):
        return seeded_payload(elements, int(rng.integers(2**63)), values, IndexCoding(coding))
    where = np.sort(rng.permutation(elements)[:count]).astype(np.uint32)
    low_bits = sparse.gaps_low_bits(elements, count)
    data = sparse.encode_bitmap(where, elements)
    if coding == "gaps":
        data = sparse.encode_gaps(where, elements, low_bits)
    return SparsePayload(
        elements=elements,
        count=count,
        coding=IndexCoding(coding),
        low_bits=low_bits if coding == "gaps" else 0,
        index_bytes=data.size,
        values=dataclasses.replace(values, data=NO_BYTES),
        data=np.concatenate([data, values.data]),
    )


def encoded_again(payload: Payload) -> bytes:
    """The one way to write down what the payload holds."""
    match payload:
        case DensePayload():
            values = decode(payload)
            if payload.format is DenseFormat.FLOAT16:
                return values.astype(np.float16).tobytes()
            words = values.view(np.uint32)
            short = payload.format is DenseFormat.BFLOAT16
            return (words >> 16).astype(np.uint16).tobytes() if short else words.tobytes()
        case QuantizedPayload():
            bits, blocks, at = payload.format.bits, list[bytes](), 0
            for size in payload.block_sizes().tolist():
                data = payload.data[at : at + payload.format.code_bytes(size)]
                codes = unpack_codes(bits, data, size)
                assert payload.format.forbidden_code not in codes.tolist()
                blocks.append(pack_codes(bits, codes).tobytes())
                at += len(blocks[-1])
            return b"".join(blocks)
        case LinearPayload():
            codes = plain_linear.unpack_signed(payload.bits, payload.codes(), payload.elements)
            assert payload.bits == 1 or -(2 ** (payload.bits - 1)) not in codes.tolist()
            codes = (codes + 1) // 2 if payload.bits == 1 else codes
            return payload.scales().tobytes() + pack_codes(payload.bits, codes).tobytes()
        case AbsentPayload():
            return b""
        case ProjectedPayload():
            return encoded_again(payload.value_payload())
        case SparsePayload():
            where = decode_indices(payload)
            assert (np.diff(where.astype(np.int64), prepend=-1) > 0).all()
            head = NO_BYTES
            if payload.coding is IndexCoding.GAPS:
                head = sparse.encode_gaps(where, payload.elements, payload.low_bits)
            elif payload.coding is IndexCoding.BITMAP:
                head = sparse.encode_bitmap(where, payload.elements)
            return head.tobytes() + encoded_again(payload.value_payload())


def sum_of(payloads: list[Payload], weights: list[float]) -> Array:
    """The weighted sum of payloads, or of their coordinates."""
    projected = [each for each in payloads if isinstance(each, ProjectedPayload)]
    out = np.empty(projected[0].count if projected else payloads[0].elements, np.float32)
    if projected:
        sum_coordinates(projected, weights, out)
    else:
        reduce_payloads(payloads, weights, out)
    return out


def check_accepted(payload: Payload, elements: int) -> None:
    assert payload.elements == elements
    assert np.isfinite(sum_of([payload], [1.0])).all()
    assert np.isfinite(sum_of([payload, payload], [0.5, 0.5])).all()
    assert encoded_again(payload) == payload.data.tobytes()


def receive(header: m.PayloadHeader, data: Bytes) -> Payload:
    """Return a payload as a server takes it from the wire. Missing bytes are zeros, surplus ones are left
    out."""
    manifest = Manifest((m.Tensor(name="w", shape=(header.elements,), dtype="float32"),), 1)
    header = from_wire(to_wire(header), m.PayloadHeader)
    count = {0: header.kind.count} if isinstance(header.kind, m.ProjectedHeader) else {}
    announced = announced_payloads(
        [header], Part(0, header.elements), manifest, worker="w", coordinates=count
    )
    size = payload_bytes(announced[0])
    # An index takes 32 bits and a bit per element, a value 4 bytes; and there is some padding.
    assert size <= 9 * header.elements + 16
    whole = np.zeros(size, np.uint8)
    whole[: min(size, data.size)] = data[:size]
    assembly = Assembly(1, announced, chunk_bytes=CHUNK, worker="w", names=["tensor 'w'"])
    for message in encode_chunks(1, [whole], CHUNK):
        chunk = decode_envelope(message, "WorkerMessage")
        assert isinstance(chunk, m.Chunk)
        assembly.add(chunk)
    (payload,) = assembly.finish()
    return payload


FLOATS = st.floats(width=32)
HOSTILE: dict[str, st.SearchStrategy[Any]] = {
    "levels": st.lists(FLOATS, max_size=8).map(lambda levels: tuple(sorted(levels))),
    "bits": st.integers(0, 9) | st.integers(0, 2**32 - 1),
    "bucket": st.integers(0, 5).map(lambda n: 32 * n) | st.integers(0, 2**59 - 1).map(lambda n: 32 * n),
    "count": st.integers(0, 70) | st.integers(0, 2**64 - 1),
    "coding": st.sampled_from(list(m.IndexEncoding)),
    "low_bits": st.integers(0, 33) | st.integers(0, 2**32 - 1),
    "index_bytes": st.integers(0, 70) | st.integers(0, 2**64 - 1),
    "seed": st.integers(0, 2**64 - 1),
    "exponent": st.integers(-130, 120) | st.integers(-(2**31), 2**31 - 1),
    "sizes": st.lists(st.integers(0, 70) | st.integers(0, 2**64 - 1), max_size=4).map(tuple),
}
NESTED = ("kind", "values")


def changed(header: Any, draw: st.DataObject) -> Any:
    """One field of a header, at any depth, as somebody else might fill it in."""
    if isinstance(header, m.AbsentHeader):
        return header
    names = [
        field.name for field in dataclasses.fields(header) if field.name in {*HOSTILE, *NESTED, "format"}
    ]
    name = draw.draw(st.sampled_from(names))
    if name in NESTED:
        return dataclasses.replace(header, **{name: changed(getattr(header, name), draw)})
    formats = m.CodeEncoding if isinstance(header, m.QuantizedHeader) else m.DenseEncoding
    values = st.sampled_from(list(formats)) if name == "format" else HOSTILE[name]
    return dataclasses.replace(header, **{name: draw.draw(values)})


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 70), st.integers(0, 1 << 30), st.data())
def test_whatever_arrives_is_refused_or_decodes(
    kind: str, elements: int, seed: int, draw: st.DataObject
) -> None:
    """A valid payload arrives as it was sent. Then a header, bits of the data, or all of the data change."""
    payload = payload_of(kind, elements, seed)
    header, data = payload_header(payload), payload.data.copy()
    arrived = receive(header, data)
    assert arrived.data.tobytes() == data.tobytes()
    assert sum_of([arrived], [1.0]).tobytes() == sum_of([payload], [1.0]).tobytes()
    check_accepted(arrived, elements)

    what = draw.draw(st.sampled_from(["header", "bits", "bytes"]))
    if what == "header":
        header = cast(m.PayloadHeader, changed(header, draw))
    elif what == "bytes":
        data = np.frombuffer(np.random.default_rng(seed).bytes(data.size), np.uint8)
    elif data.size:
        for bit in draw.draw(st.lists(st.integers(0, 8 * data.size - 1), min_size=1, max_size=3)):
            data[bit // 8] ^= np.uint8(1 << bit % 8)
    try:
        arrived = receive(header, data)
    except Refused as error:
        refused = error.refusal
    else:
        check_accepted(arrived, elements)
        return
    assert refused.reason in (Reason.PAYLOAD, Reason.NON_FINITE)
    assert refused.field.startswith("tensor 'w' ")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(st.integers(0, 70), st.integers(0, 1 << 30), st.integers(-3, 3))
def test_a_payload_of_any_other_length_is_refused(kind: str, elements: int, seed: int, more: int) -> None:
    payload = payload_of(kind, elements, seed)
    data = np.concatenate([payload.data, np.zeros(3, np.uint8)])[: max(0, payload.data.size + more)]
    if data.size != payload.data.size:
        with pytest.raises(PayloadError):
            validate(dataclasses.replace(payload, data=data.copy()))


@given(st.sampled_from(KINDS), st.integers(1, 70), st.integers(0, 1 << 30), st.data())
def test_no_byte_of_a_payload_is_beyond_what_is_checked(
    kind: str, elements: int, seed: int, draw: st.DataObject
) -> None:
    """A changed byte is refused or says something else: none is free to hold anything."""
    payload = payload_of(kind, elements, seed)
    if payload.data.size == 0:
        return
    data = payload.data.copy()
    data[draw.draw(st.integers(0, data.size - 1))] ^= np.uint8(draw.draw(st.integers(1, 255)))
    other = dataclasses.replace(payload, data=data)
    try:
        validate(other)
    except PayloadError:
        return
    check_accepted(other, elements)


# Announcements that are larger than the model

SMALL_VALUES = DensePayload(format=DenseFormat.FLOAT32, elements=4, data=NO_BYTES)
SMALL = SparsePayload(
    elements=1000, count=4, coding=IndexCoding.GAPS, index_bytes=4, values=SMALL_VALUES, data=NO_BYTES
)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("elements", {"elements": 2**40}),
        ("elements", {"elements": 2**32}),
        ("count", {"count": 1001}),
        ("count", {"count": 2**63}),
        ("count", {"count": -1}),
        ("values", {"count": 5}),
        ("values", {"values": dataclasses.replace(SMALL_VALUES, elements=2**40)}),
        ("index_bytes", {"index_bytes": 2**40}),
        ("index_bytes", {"index_bytes": 127}),
        ("index_bytes", {"index_bytes": -1}),
        ("index_bytes", {"coding": IndexCoding.BITMAP, "index_bytes": 126}),
        ("index_bytes", {"coding": IndexCoding.SEEDED}),
        ("index_bytes", {"coding": IndexCoding.UNIFORM}),
        ("low_bits", {"low_bits": 32}),
        ("low_bits", {"low_bits": -1}),
    ],
)
def test_what_a_sparse_payload_announces_is_bounded_by_its_elements(
    field: str, changes: dict[str, Any]
) -> None:
    check_announcement(SMALL)
    tracemalloc.start()
    with pytest.raises(PayloadError) as refusal:
        check_announcement(dataclasses.replace(SMALL, **changes))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refusal.value.field == field
    assert most < 1 << 16


@pytest.mark.parametrize("bucket", [2**63, 2**64 - 32])
def test_a_bucket_of_any_size_is_refused_or_decodes(bucket: int) -> None:
    """The wire has 64 bits for it, machine code has 63."""
    data = np.array([0, 0, 0, 63, 1, 0, 0, 0], np.uint8)
    header = m.PayloadHeader(elements=1, kind=m.LinearHeader(bits=8, bucket=bucket))
    try:
        payload = receive(header, data)
    except Refused:
        return
    assert decode(payload).tolist() == [0.5]


def test_votes_are_not_values_of_a_sparse_payload() -> None:
    """They could not be counted where only some workers sent one."""
    votes = values_of("vote", 4, np.random.default_rng(0))
    with pytest.raises(PayloadError, match="values that can be added"):
        check_announcement(dataclasses.replace(SMALL, values=votes))


# Specs of any compressor

PLAIN = ["1bit", "2bit", "4bit", "4bit:levels=groups", "8bit", "bf16", "fp16", "signsgd", "terngrad"]
MORE = [
    "1bit:block=32",
    "1bit:block=4096",
    "threshold",
    "threshold:scale=mean,tau=1e-3",
    "qsgd",
    "qsgd:norm=l2,bits=3,bucket=32",
]
SPARSE = ["topk", "l1", "gcac", "randk", "dgc", "krngc", "krngc:reading=literal"]
CODERS = ["bf16", "fp16", "float32", "8bit", "4bit", "1bit"]


@st.composite
def specs(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from([*PLAIN, *MORE, *SPARSE]))
    options = [f"decay={draw(st.sampled_from([1, 0.5]))},momentum={draw(st.sampled_from([0, 0.5]))}"]
    if name in SPARSE:
        options.append(f"ratio={draw(st.sampled_from([1, 2, 5]))},values={draw(st.sampled_from(CODERS))}")
    return f"{name}{',' if ':' in name else ':'}feedback=on,{','.join(options)}"
