"""Models and their buffers over a real socket: what cannot be is refused, and changes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from daemons import MANIFEST, TENSORS, Daemons, Raw, refusal_without_effect, refusing, state_of, status, talk

from gradwire.common.parts import ALIGNMENT, LEAST_BYTES
from gradwire.compressors import parse_compressor
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import MAX_PARTS
from gradwire.proto.wire import crc32c, encode_chunk


def buffer(
    name: str = "b",
    *,
    kind: m.EntryKind = m.EntryKind.BUFFER,
    shape: tuple[int, ...] = (2,),
    dtype: str = "float32",
    digest: bytes = b"",
) -> m.Entry:
    return m.Entry(name=name, kind=kind, shape=shape, dtype=dtype, digest=digest)


def tied(to: str) -> m.Entry:
    return m.Entry(name="t", kind=m.EntryKind.TIED, tied_to=to)


BAD_MANIFESTS = [
    (Manifest((), 64), Reason.TENSOR, "at least one parameter tensor"),
    (Manifest((m.Tensor(name="w", shape=(2,), dtype="float16"),), 64), Reason.DTYPE, "got float16"),
    (Manifest((m.Tensor(name="w", shape=(2**38,), dtype="float32"),), 64), Reason.SIZE, "bytes"),
    (Manifest((m.Tensor(name="w", shape=(2**62, 4), dtype="float32"),), 64), Reason.SHAPE, "dimensions"),
    (
        Manifest((m.Tensor(name="w", shape=(2,), dtype="float32", group=1),), 64),
        Reason.GROUP,
        "'w': expected a parameter group below 1",
    ),
    (
        Manifest((m.Tensor(name="w", shape=(2,), dtype="float32"),), 64, (m.Group(optimizer="sgd:a=1"),)),
        Reason.GROUP,
        "unknown key 'a'",
    ),
    (
        Manifest((m.Tensor(name="w\n", shape=(2,), dtype="float32"),), 64),
        Reason.NAME,
        "tensor name: expected",
    ),
    *(
        (Manifest(TENSORS, 64, entries=entries), reason, words)
        for entries, reason, words in (
            ((buffer("weight"),), Reason.TENSOR, "entry 'weight': expected a name of its own"),
            ((buffer("b"), buffer("b")), Reason.TENSOR, "entry 'b': expected a name of its own"),
            (
                (buffer(kind=m.EntryKind.UNSPECIFIED),),
                Reason.TENSOR,
                "a buffer, a frozen parameter or a tied",
            ),
            ((buffer(digest=b"a" * 32),), Reason.TENSOR, "a digest of 32 bytes, of a frozen parameter"),
            ((buffer("a\x1b[2J"),), Reason.NAME, "entry name: expected 1 to 1024 printable"),
            ((buffer(dtype="object"),), Reason.DTYPE, "got object"),
            ((buffer(shape=(2**62, 4)),), Reason.SHAPE, "dimensions"),
            ((buffer(shape=(2**36,)),), Reason.SIZE, "entry 'b': expected"),
            ((tied("nothing"),), Reason.TENSOR, "got 'nothing'"),
        )
    ),
]


async def test_bad_manifests_are_refused_before_anything_is_allocated(
    address: str, subtests: pytest.Subtests
) -> None:
    async with talk(address) as make:
        raw = make()
        await raw.join()
        for manifest, reason, words in BAD_MANIFESTS:
            with subtests.test(words):
                async with refusal_without_effect(raw, reason, re.escape(words)):
                    await _initialize_header(raw, manifest)
        # A job cannot begin after its last epoch.
        late = r"first epoch: expected at most \d+, the epochs of the job, got 429"
        async with refusal_without_effect(raw, match=late):
            await _initialize_header(raw, MANIFEST, epoch=2**32 - 1)
        await raw.initialize()


async def test_a_model_of_more_parts_than_have_numbers_is_refused(daemons: Daemons) -> None:
    server = daemons.server("--part-bytes", "4", "--task", "digits")
    manifest = Manifest((m.Tensor(name="w", shape=(MAX_PARTS + 1, ALIGNMENT), dtype="float32"),), 64)

    async with talk(server.address) as make:
        raw = make()
        await raw.join()
        with pytest.raises(Refused, match=r"65536 parts, got 65537.*--part-bytes"):
            await _initialize_header(raw, manifest)


async def test_the_compressor_of_who_uploads_the_model_decides_how_large_parts_are_for_everybody(
    address: str,
) -> None:
    elements = 2 * parse_compressor("topk:ratio=10").least_part_bytes // 4 // ALIGNMENT * ALIGNMENT
    assert elements > 2 * LEAST_BYTES // 4
    manifest = Manifest((m.Tensor(name="w", shape=(elements,), dtype="float32"),), 64)

    async with talk(address) as make:
        workers = make("a"), make("b")
        for worker, compressor in zip(workers, ("topk:ratio=10", "none"), strict=True):
            await worker.join(compressor=compressor)
            await worker.attach()
            await worker.receive(m.Welcome)
        first, second = workers
        await first.initialize(manifest)
        await first.ready(manifest.fingerprint)
        await second.ready(manifest.fingerprint, None)
        plan = await first.receive(m.PlanAnnouncement)
        assert plan == m.PlanAnnouncement(number=1, tensors=(1,), cuts=(elements // 2,), norms=(0.0,))
        await first.send(m.Leave(failed=True, reason="test"))
        assert (await second.receive(m.Assignment)).plan == 1  # it overtakes what is longer
        assert await second.receive(m.PlanAnnouncement) == plan


async def _initialize_header(raw: Raw, manifest: Manifest, epoch: int = 0) -> None:
    header = m.InitializeHeader(
        job=raw.job,
        worker=raw.worker,
        incarnation=raw.incarnation,
        manifest=manifest.to_message(),
        epoch=epoch,
    )

    async def stream() -> AsyncIterator[Any]:
        yield header

    await refusing(raw.stub.initialize(stream(), timeout=20))


STATEFUL = Manifest(TENSORS, 64, entries=(buffer("mean"), tied("weight"), buffer("count", dtype="int64")))


async def put_state(raw: Raw, data: bytes, **fields: Any) -> None:
    """Upload bytes as buffers."""
    of_worker: dict[str, Any] = {"job": raw.job, "worker": raw.worker, "incarnation": raw.incarnation}
    of_worker |= {"seq": 1, "collection": 1, **fields}
    header = m.StateHeader(**of_worker)
    array = np.frombuffer(data, np.uint8)

    async def stream() -> AsyncIterator[Any]:
        yield header
        if array.size:
            yield encode_chunk(1, 0, (array,), crc32c((array,)))

    await refusing(raw.stub.put_state(stream(), timeout=20))


BAD_BUFFERS: list[tuple[int, dict[str, Any], Reason, str]] = [
    (24, {"collection": 2}, Reason.STALE, "got buffers of push 1 for collection 2"),
    (24, {"collection": 0}, Reason.STALE, "buffers that the worker was asked for"),
    (24, {"seq": 0, "epoch": 1}, Reason.STALE, "got buffers of the evaluation of epoch 1"),
    (0, {"frozen": True}, Reason.TENSOR, "got frozen parameters"),
    (0, {"worker": "nobody"}, Reason.NOT_A_MEMBER, "'nobody'"),
    (0, {"job": "another"}, Reason.UNKNOWN_JOB, "got another"),
    (23, {}, Reason.CHUNK, "24 bytes"),
    (0, {}, Reason.MALFORMED, "expected Chunk, got the end of the stream"),
]


async def test_buffers_are_those_that_were_asked_for(daemons: Daemons, subtests: pytest.Subtests) -> None:
    server = daemons.server("--min-workers", "1", "--task", "digits", "--batch-size", "64")

    async with talk(server.address) as make:
        raw = make()
        await raw.join()
        await raw.attach()
        await raw.receive(m.Welcome)
        await raw.initialize(STATEFUL)
        await raw.ready(STATEFUL.fingerprint)
        assert (await raw.receive(m.Assignment)).collection == 1, "the whole epoch is one round"
        for size, fields, reason, words in BAD_BUFFERS:
            with subtests.test(words):
                async with refusal_without_effect(raw, reason, words):
                    await put_state(raw, bytes(size), **fields)
        await put_state(raw, bytes(24))


async def test_another_model_is_refused(address: str) -> None:
    async with talk(address) as make:
        first, other = make("first"), make("other")
        await first.train()
        await first.receive(m.Assignment)
        await other.join()
        await other.attach()
        await other.receive(m.Welcome)
        before = state_of(await status(first))
        await other.ready(fingerprint=Manifest(MANIFEST.tensors[:1], 64).fingerprint)
        with pytest.raises(Refused) as caught:
            await other.receive(m.Assignment)
        assert caught.value.refusal.reason is Reason.MODEL
        assert "same task, options and code" in caught.value.refusal.remedy
        # Nothing else changes; others that wait for workers hear why this one is gone.
        found = await status(first)
        assert state_of(found)[:4] == before[:4]
        assert [member.worker for member in found.members] == ["first"]
        assert found.lost[-1].reason.startswith("refused: model fingerprint: ")


@pytest.mark.parametrize("early", [False, True])
async def test_the_first_tensor_that_differs_is_named_to_both_sides(daemons: Daemons, early: bool) -> None:
    """A worker may be ready before the job has a model, and is compared with it later."""
    first_tensor = MANIFEST.tensors[0]
    wider = dataclasses.replace(first_tensor, shape=(*first_tensor.shape[:-1], first_tensor.shape[-1] + 1))
    another = Manifest((wider, *MANIFEST.tensors[1:]), MANIFEST.train_samples)
    ours, theirs = (f"{first_tensor.name!r} of float32 {list(each.shape)}" for each in (first_tensor, wider))
    server = daemons.server("--min-workers", "2", "--task", "digits", "--batch-size", "64")
    async with talk(server.address) as make:
        first, other = make("first"), make("other")
        for raw in (first, other):
            await raw.join()
            await raw.attach()
            await raw.receive(m.Welcome)
        if not early:
            await first.initialize()
        await other.ready(another.fingerprint, None, another.to_message())
        if early:
            await asyncio.sleep(0.3)  # until the server has read it, on another stream
            await first.initialize()
        with pytest.raises(Refused) as caught:
            await other.receive(m.Assignment)
        assert caught.value.refusal.message.endswith(
            f"model: expected parameter {ours}, got parameter {theirs}"
        )
        await first.ready()
        found = await status(first)
        assert (
            f"other is lost: refused: model: parameter {theirs}, expected parameter {ours}" in found.waiting
        )
