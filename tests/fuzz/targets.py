"""The targets of fuzzing: everything that turns bytes of somebody else's into values of ours.

A target takes any bytes. It may refuse them, by the exceptions that its callers expect, and nothing else may
happen: no other exception, no allocation beyond what the model takes, no value that is not finite. What it
does not refuse has to come out the same when it is written down and read again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from gradwire.common.parts import Part
from gradwire.compressors import (
    Payload,
    PayloadError,
    ProjectedPayload,
    decode,
    payload_bytes,
    reduce_payloads,
    sum_coordinates,
)
from gradwire.compressors.packing import unpack
from gradwire.compressors.payload import Bytes
from gradwire.proto import convert, wire
from gradwire.proto import messages as m
from gradwire.proto.announced import announced_payloads
from gradwire.proto.convert import MalformedError
from gradwire.proto.job import job_terms
from gradwire.proto.manifest import Manifest
from gradwire.proto.plans import plan_message, plan_of
from gradwire.proto.refusal import Refused
from gradwire.proto.transfer import encode_chunks, payload_header, received_payloads
from gradwire.server.durable import journal
from gradwire.server.streams.arriving import ArrivingParts
from gradwire.storage import values
from gradwire.worker.session.attempts import BrokenError
from gradwire.worker.session.receiving import Receiver

Target = Callable[[bytes], None]

TENSORS = (
    m.Tensor(name="weight", shape=(9, 7), dtype="float32"),
    m.Tensor(name="bias", shape=(7,), dtype="float32"),
)
MANIFEST = Manifest(TENSORS, 64)
ELEMENTS = MANIFEST.elements
PLAN = MANIFEST.plan()
WHOLE = Part(0, ELEMENTS)
COORDINATES = {0: 32}  # of the weight, in bases of rank 2
MAX_MODEL_BYTES = 1 << 20
ENVELOPES = ("WorkerMessage", "ServerMessage", "InitializeMessage", "FetchMessage", "StateMessage")


def checked(data: bytes) -> bytes:
    """With the checksum that would have come with it, so that more than checksums is tried."""
    return data + wire.trailer(data)


def plain(value: Any) -> str:
    """To compare messages by, with NaN equal to itself and maps in any order."""
    if isinstance(value, dict):
        return str(sorted((key, plain(each)) for key, each in value.items()))  # pyright: ignore
    if isinstance(value, tuple):
        return str([plain(each) for each in value])  # pyright: ignore[reportUnknownVariableType]
    if dataclasses.is_dataclass(value):
        return str([type(value), *(plain(getattr(value, each.name)) for each in dataclasses.fields(value))])
    return repr(value)


def streams(data: bytes) -> None:
    """A message of any stream, with and without its checksum."""
    for envelope in ENVELOPES:
        for encoded in (data, checked(data)):
            try:
                value = wire.decode_envelope(encoded, envelope)
            except MalformedError:
                continue
            if isinstance(value, m.Batch):
                for each in value.messages:
                    assert len(each) <= len(encoded)
            elif not isinstance(value, m.Chunk):
                again = wire.decode_envelope(wire.encode_envelope(value, envelope), envelope)
                assert plain(again) == plain(value)


def calls(data: bytes) -> None:
    """Requests and responses of the other calls."""
    for cls in (
        *(m.JoinRequest, m.JoinResponse, m.InitializeResponse, m.FetchRequest, m.GetStateRequest),
        m.GetOptimizerRequest,
    ):
        try:
            value: Any = convert.decode(data, cls)
        except MalformedError:
            continue
        assert plain(convert.decode(convert.encode(value), cls)) == plain(value)
        if isinstance(value, m.JoinResponse):
            try:
                job_terms(value.job)
            except Refused:
                continue


def uploads(data: bytes) -> None:
    """A manifest, which decides how much memory a job takes."""
    try:
        manifest = Manifest.from_message(
            convert.decode(data, m.ModelManifest), worker="w", max_bytes=MAX_MODEL_BYTES
        )
    except (MalformedError, Refused):
        return
    assert manifest.raw_bytes <= MAX_MODEL_BYTES
    plan = manifest.plan()
    assert sum(part.elements for part in plan.parts) == manifest.elements
    again = Manifest.from_message(manifest.to_message(), worker="w", max_bytes=MAX_MODEL_BYTES)
    assert again.fingerprint == manifest.fingerprint


def plans(data: bytes) -> None:
    try:
        plan = plan_of(convert.decode(data, m.PlanAnnouncement), MANIFEST)
    except (MalformedError, Refused):
        return
    assert sum(part.elements for part in plan.parts) == ELEMENTS
    assert plan_of(plan_message(plan), MANIFEST) == plan


def split(data: bytes) -> tuple[bytes, bytes]:
    """A header and what follows it: the first two bytes say where."""
    size = int.from_bytes(data[:2], "little")
    return data[2 : 2 + size], data[2 + size :]


def payloads(data: bytes) -> None:
    """A part of a push with its bytes, as a server takes it: headers, codes, indices, values."""
    head, body = split(data)
    try:
        headers = convert.decode(head, m.PartHeader).payloads
        announced = announced_payloads(headers, WHOLE, MANIFEST, worker="w", coordinates=COORDINATES)
        size = sum(map(payload_bytes, announced))
        assert size <= 9 * ELEMENTS + 64 * max(1, len(announced)), "more than any coding takes"
        bytes_of = np.zeros(size, np.uint8)
        got = np.frombuffer(body, np.uint8)[:size]
        bytes_of[: got.size] = got
        taken = received_payloads(headers, bytes_of, WHOLE, MANIFEST, worker="w", coordinates=COORDINATES)
    except (MalformedError, Refused, PayloadError):
        return
    for payload in taken:
        if isinstance(payload, ProjectedPayload):
            assert payload.elements == 63
            total = np.empty(COORDINATES[0], np.float32)
            sum_coordinates([payload, payload], [0.5, 0.5], total)
        else:
            values = decode(payload)
            assert values.shape == (payload.elements,)
            assert np.isfinite(values).all()
            total = np.empty(payload.elements, np.float32)
            reduce_payloads([payload, payload], [0.5, 0.5], total)
        assert np.isfinite(total).all()
        assert same(payload, headers)


def same(payload: Payload, headers: Any) -> bool:
    """Whether its header can be written again, and says the same."""
    header = payload_header(payload)
    return any(dataclasses.replace(each, content=header.content) == header for each in headers)


def uplink(data: bytes) -> None:
    """Messages of one stream, one after the other, each with its length before it, as a server reads them."""
    inbox = ArrivingParts("w")
    for message in _several(data, "WorkerMessage"):
        try:
            match message:
                case m.PartHeader():
                    inbox.begin(message, MANIFEST, PLAN)
                case m.Chunk():
                    inbox.add(message)
                    if (taken := inbox.take()) is not None:
                        taken[1].finish()
                case _:
                    pass
        except Refused:
            continue


def frames(data: bytes) -> None:
    """A packed chunk: its size as the headers announce it, then its frame."""
    size, frame = int.from_bytes(data[:3], "little"), np.frombuffer(data[3:], np.uint8)
    try:
        unpacked = unpack(frame, size)
    except PayloadError:
        return
    assert unpacked.size == size


def downlink(data: bytes) -> None:
    """The same as a worker reads them: plans, updates, packets."""
    receiver, plan = Receiver("w"), PLAN
    for message in _several(data, "ServerMessage"):
        try:
            match message:
                case m.PlanAnnouncement():
                    plan = receiver.plan(message, MANIFEST)
                case m.Update():
                    receiver.begin_update(message, MANIFEST, plan)
                case m.Packet():
                    receiver.begin_packet(message, MANIFEST)
                case m.Chunk():
                    receiver.add(message)
                case _:
                    pass
            if (complete := receiver.take_update()) is not None:
                for payload in complete[1].finish():
                    assert np.isfinite(decode(payload)).all()
        except (Refused, BrokenError):
            continue


def _several(data: bytes, envelope: str) -> list[Any]:
    found: list[Any] = []
    while data and len(found) < 64:
        message, data = split(data)
        is_chunk = message[:1] == b"\x0a"
        try:
            found.append(wire.decode_envelope(message if is_chunk else checked(message), envelope))
        except MalformedError:
            continue
    return found


def journals(data: bytes) -> None:
    """A segment of a journal: whole records up to the first that is not, and nothing of what follows; or a
    refusal."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal-0000000000.log"
        path.write_bytes(data)
        last = 0
        with contextlib.suppress(journal.UnreadableError):
            for record, end in journal.read(path):
                assert last < end <= len(data)
                assert record.data.size <= end - last
                last = end
        if data:
            journal.record_after(path, last)


def trees(data: bytes) -> None:
    """Read a checkpoint's description of its values, as if its checksum were right."""
    try:
        values.unpack(json.loads(data), {"t0": torch.zeros(4, dtype=torch.uint8)})
    except (ValueError, RecursionError, values.DamagedError):
        return


TARGETS: dict[str, Target] = {
    "journals": journals,
    "trees": trees,
    "streams": streams,
    "calls": calls,
    "uploads": uploads,
    "plans": plans,
    "payloads": payloads,
    "frames": frames,
    "uplink": uplink,
    "downlink": downlink,
}


# ---- what to begin with


def _joined(*messages: bytes) -> bytes:
    return b"".join(len(each).to_bytes(2, "little") + each for each in messages)


def _frame(pieces: Sequence[Bytes]) -> Bytes:
    """Pack also what `pack` would leave as it is."""
    data = zstandard.ZstdCompressor().compress(b"".join(each.tobytes() for each in pieces))
    return np.frombuffer(data, np.uint8)


def valid() -> dict[str, list[bytes]]:
    """Return valid bytes of each target: messages of every kind, payloads of every compressor."""
    from gradwire.compressors import LayerRule, ModelCompressor

    found: dict[str, list[bytes]] = {name: [] for name in TARGETS}
    generator = torch.Generator().manual_seed(1)
    specs = (
        "none",
        "4bit",
        "2bit",
        "1bit",
        "8bit",
        "bf16",
        "fp16",
        "signsgd",
        "terngrad",
        "qsgd:bits=3",
        "1bit:block=32",
    )
    sparse = ("topk:ratio=4", "randk:ratio=4", "randk:ratio=4,draw=uniform", "dgc:ratio=4,values=4bit")
    for spec in (*specs, *sparse, "topk:ratio=2,values=1bit", "topk:ratio=2,values=8bit"):
        compressor = ModelCompressor(MANIFEST.specs, spec, LayerRule(), 1, 0)
        gradients = [torch.randn(t.shape, generator=generator) for t in TENSORS]
        made = compressor.compress(gradients, 4, version=0)
        headers = tuple(map(payload_header, made))
        part = m.PartHeader(seq=1, assignment=1, part=0, plan=1, payloads=headers)
        data = [payload.data for payload in made]
        found["payloads"].append(_joined(convert.encode(part)) + b"".join(each.tobytes() for each in data))
        bare = wire.encode_worker(part)[: -wire.TRAILER_BYTES]
        for pack in (None, _frame):
            found["uplink"].append(_joined(bare, *encode_chunks(1 << 16, data, pack=pack)))
        update = m.Update(version=1, plan=1, part=0, payloads=headers)
        bare = wire.encode_server(update)[: -wire.TRAILER_BYTES]
        for pack in (None, _frame):
            found["downlink"].append(_joined(bare, *encode_chunks(1 << 16, data, pack=pack)))
        found["streams"].append(convert.encode(part))
        size = sum(each.size for each in data)
        found["frames"].append(size.to_bytes(3, "little") + _frame(data).tobytes())
    said = (
        m.Hello(job="j", worker="w", incarnation=5),
        m.Heartbeat(activity="computing"),
        m.Ready(fingerprint=b"1234", version=7),
        m.Commit(seq=3, assignment=5, base_version=2, samples=32, parts=2, digest=9, loss=0.5),
        m.Evaluation(version=3, epoch=1, metrics={"accuracy": 0.5}),
        m.Leave(failed=True, reason="x"),
    )
    encoded = [wire.encode_worker(each) for each in said]
    found["streams"] += [each[: -wire.TRAILER_BYTES] for each in encoded]
    found["streams"].append(wire.batch(encoded))
    limits = m.Limits(chunk_bytes=1, lease_seconds=10, heartbeat_seconds=2)
    job = m.JobDescription(id="j", settings={"work": "gradients", "learning_rate": "0.1", "seed": "1"})
    join = m.JoinRequest(worker="w", incarnation=2**63, compressors=("none", "4bit"), compressor="4bit")
    answer = m.JoinResponse(job=job, limits=limits, rank=0, version=0, initialize=True)
    found["calls"] += [convert.encode(join), convert.encode(answer)]
    entries = (
        m.Entry(name="b", kind=m.EntryKind.BUFFER, dtype="float32", shape=(3,)),
        m.Entry(name="t", kind=m.EntryKind.TIED, tied_to="weight", dtype="", shape=()),
    )
    groups = (m.Group(optimizer="sgd:momentum=0.9", learning_rate=0.1),)
    for manifest in (MANIFEST, Manifest(TENSORS, 9, groups=groups, entries=entries)):
        found["uploads"].append(convert.encode(manifest.to_message()))
    found["journals"] += _segments()
    tree = {"a": (1, 2.5, b"x"), "m": m.Heartbeat(activity="a"), "n": np.zeros(1, np.float32)}
    found["trees"].append(json.dumps(values.pack(tree, {})).encode())
    found["plans"] += [convert.encode(plan_message(PLAN)), convert.encode(plan_message(MANIFEST.plan(64)))]
    return found


def _segments() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment"
        writer = journal.Journal(path, syncs=False)
        for number in range(3):
            writer.append("event", {"now": number / 3, "bytes": b"ab"}, [np.arange(9, dtype=np.uint8)])
        writer.close()
        return [path.read_bytes()]
