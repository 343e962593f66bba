"""Bad input over a real socket: a typed refusal, a readable message, and no change of state."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from daemons import MANIFEST, Daemons, Raw, Server, gradient, state_of, status, talk

from gradwire.compressors import DensePayload, QuantizedPayload
from gradwire.proto import gradwire_pb2 as pb
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.proto.wire import crc32c, encode_chunk, encode_worker


@pytest.fixture
def address(daemons: Daemons) -> str:
    server: Server = daemons.server("--min-workers", "1", "--task", "digits")
    return server.address


async def in_training(address: str) -> AsyncIterator[Raw]:
    async with talk(address) as make:
        raw = make()
        await raw.train()
        await raw.receive(m.Assignment)
        yield raw


async def refused_push(raw: Raw, alter: Any) -> Refusal:
    """What the server says to a push that `alter(payloads, fields)` has spoilt. Nothing may change."""
    before = await status(raw)
    payloads, fields = gradient(), dict[str, Any]()
    alter(payloads, fields)
    for chunk in await raw.push(payloads, **fields):
        await raw.send(chunk)
    outcome = await raw.receive(m.Outcome)
    after = await status(raw)
    assert state_of(after) == state_of(before)
    assert after.refused_pushes == before.refused_pushes + 1
    assert outcome.decision is m.Decision.REFUSED
    assert outcome.refusal is not None
    assert outcome.refusal.worker == "raw"
    assert "'raw'" in outcome.refusal.message
    refusal: Refusal = outcome.refusal
    return refusal


def code_8(payloads: list[Any], fields: dict[str, Any]) -> None:
    payloads[0].data[3] = 0x80


def nan_level(payloads: list[Any], fields: dict[str, Any]) -> None:
    levels = payloads[0].levels.copy()
    levels[6] = np.nan
    payloads[0] = dataclasses.replace(payloads[0], levels=levels)


def infinite_value(payloads: list[Any], fields: dict[str, Any]) -> None:
    payloads[1].data[:2] = (0x80, 0x7F)  # bfloat16 infinity


def wrong_shape(payloads: list[Any], fields: dict[str, Any]) -> None:
    assert isinstance(payloads[0], QuantizedPayload)
    payloads[0] = dataclasses.replace(payloads[0], elements=40, data=payloads[0].data[:20].copy())


def wrong_dtype(payloads: list[Any], fields: dict[str, Any]) -> None:
    headers = [dataclasses.replace(h) for h in _headers(payloads)]
    headers[1] = dataclasses.replace(headers[1], kind=m.DenseHeader(format=m.DenseFormat.UNSPECIFIED))
    fields["tensors"] = tuple(headers)


def _headers(payloads: list[Any]) -> list[m.TensorHeader]:
    from gradwire.proto.transfer import tensor_header

    return [tensor_header(i, payload) for i, payload in enumerate(payloads)]


def missing_tensor(payloads: list[Any], fields: dict[str, Any]) -> None:
    del payloads[1]


def huge_tensor(payloads: list[Any], fields: dict[str, Any]) -> None:
    headers = _headers(payloads)
    headers[0] = dataclasses.replace(headers[0], elements=2**40)
    fields["tensors"] = tuple(headers)


def gap(payloads: list[Any], fields: dict[str, Any]) -> None:
    fields["seq"] = 3


def infinite_loss(payloads: list[Any], fields: dict[str, Any]) -> None:
    fields["loss"] = float("inf")


def samples_without_tensors(payloads: list[Any], fields: dict[str, Any]) -> None:
    payloads.clear()


BAD_PUSHES: list[tuple[Any, Reason, str]] = [
    (code_8, Reason.PAYLOAD, "code 8"),
    (nan_level, Reason.NON_FINITE, "nan"),
    (infinite_value, Reason.NON_FINITE, "an infinity or a NaN"),
    (wrong_shape, Reason.ELEMENTS, "'weight': expected 48 elements (shape (8, 6)), got 40 elements"),
    (wrong_dtype, Reason.PAYLOAD, "'bias' kind"),
    (missing_tensor, Reason.TENSOR, "each of the 2 tensors"),
    (huge_tensor, Reason.ELEMENTS, "got 1099511627776 elements"),
    (gap, Reason.SEQUENCE, "push seq: expected 1, got 3"),
    (infinite_loss, Reason.NON_FINITE, "loss"),
    (samples_without_tensors, Reason.TENSOR, "got 0 tensors"),
]


def test_bad_pushes_are_refused_and_a_good_one_under_the_same_number_is_accepted(
    address: str, subtests: pytest.Subtests
) -> None:
    async def run() -> None:
        async for raw in in_training(address):
            for alter, reason, words in BAD_PUSHES:
                with subtests.test(alter.__name__):
                    refusal = await refused_push(raw, alter)
                    assert refusal.reason is reason
                    assert words in refusal.message
            for chunk in await raw.push(gradient()):
                await raw.send(chunk)
            accepted = await raw.receive(m.Outcome)
            assert (accepted.seq, accepted.decision) == (1, m.Decision.ACCEPTED)

    asyncio.run(run())


def test_a_push_without_samples_is_accepted(address: str) -> None:
    async def run() -> None:
        async for raw in in_training(address):
            await raw.push([], samples=0)
            assert (await raw.receive(m.Outcome)).decision is m.Decision.ACCEPTED
            assert (await raw.receive(m.Assignment)).version == 1

    asyncio.run(run())


def test_a_damaged_chunk_is_refused_and_the_same_bytes_are_accepted(address: str) -> None:
    async def run() -> None:
        async for raw in in_training(address):
            (chunk,) = await raw.push(gradient())
            damaged = bytearray(chunk)
            damaged[-1] ^= 1
            await raw.send(bytes(damaged))
            outcome = await raw.receive(m.Outcome)
            assert outcome.refusal.reason is Reason.CHECKSUM
            (again,) = await raw.push(gradient())
            assert again == chunk
            await raw.send(again)
            assert (await raw.receive(m.Outcome)).decision is m.Decision.ACCEPTED

    asyncio.run(run())


def test_chunks_that_belong_nowhere_end_the_stream(address: str) -> None:
    async def run() -> None:
        async for raw in in_training(address):
            await raw.send(encode_chunk(9, 0, [np.zeros(4, np.uint8)], 0))
            with pytest.raises(Refused, match="expected a push header first, got transfer 9"):
                await raw.receive(m.Outcome)

    asyncio.run(run())


def test_bytes_that_are_no_message_end_the_stream(address: str) -> None:
    async def run() -> None:
        async for raw in in_training(address):
            await raw.send(_with_trailer(b"\xff\xff\xff\xff"))
            with pytest.raises(Refused) as caught:
                await raw.receive(m.Outcome)
            assert caught.value.refusal.reason is Reason.MALFORMED

    asyncio.run(run())


def _with_trailer(data: bytes) -> bytes:
    return data + b"\x7d" + crc32c((np.frombuffer(data, np.uint8),)).to_bytes(4, "little")


def test_a_header_with_one_byte_changed_ends_the_stream(address: str) -> None:
    async def run() -> None:
        async for raw in in_training(address):
            push = bytearray(
                encode_worker(m.Push(seq=1, assignment=1, base_version=0, samples=0, tensors=(), loss=0.5))
            )
            push[3] ^= 1
            before = state_of(await status(raw))
            await raw.send(bytes(push))
            with pytest.raises(Refused) as caught:
                await raw.receive(m.Outcome)
            assert caught.value.refusal.reason is Reason.CHECKSUM
            assert state_of(await status(raw)) == before

    asyncio.run(run())


def test_an_evaluation_is_finite_and_of_what_was_asked(address: str) -> None:
    async def run() -> None:
        async for raw in in_training(address):
            before = state_of(await status(raw))
            await raw.send(m.Evaluation(version=77, epoch=30, metrics={"accuracy": 1.0}))
            await raw.send(m.Evaluation(version=0, epoch=1, metrics={"loss": float("nan")}))
            with pytest.raises(Refused, match=r"evaluation metric 'loss': expected a finite number, got nan"):
                await raw.receive(m.Outcome)
            assert state_of(await status(raw)) == before

    asyncio.run(run())


def test_a_header_of_countless_tensors_is_refused_before_it_becomes_objects(address: str) -> None:
    async def run() -> None:
        async for raw in in_training(address):
            bomb = pb.WorkerMessage(push=pb.Push(seq=1, tensors=[pb.TensorHeader()] * 200_000))
            await raw.send(_with_trailer(bomb.SerializeToString()))
            with pytest.raises(Refused, match=r"Push.tensors: expected up to 16384 members, got 200000"):
                await raw.receive(m.Outcome)

    asyncio.run(run())


def refused_join(address: str, **changes: Any) -> Refusal:
    async def run() -> Refusal:
        async with talk(address) as make:
            raw = make()
            before = state_of(await status(raw))
            with pytest.raises(Refused) as caught:
                await raw.join(**changes)
            assert state_of(await status(raw)) == before
            return caught.value.refusal

    return asyncio.run(run())


@pytest.mark.parametrize("worker", ["", "x" * 200])
def test_a_worker_id_has_a_size(address: str, worker: str) -> None:
    assert refused_join(address, worker=worker).reason is Reason.SIZE


BAD_MANIFESTS = [
    (Manifest((), 64), Reason.TENSOR, "at least one parameter tensor"),
    (Manifest((m.Tensor(name="w", shape=(2,), dtype="float16"),), 64), Reason.DTYPE, "got float16"),
    (Manifest((m.Tensor(name="w", shape=(2**38,), dtype="float32"),), 64), Reason.SIZE, "bytes"),
    (Manifest((m.Tensor(name="w", shape=(2**62, 4), dtype="float32"),), 64), Reason.SHAPE, "dimensions"),
]


def test_bad_manifests_are_refused_before_anything_is_allocated(
    address: str, subtests: pytest.Subtests
) -> None:
    async def run() -> None:
        async with talk(address) as make:
            raw = make()
            await raw.join()
            before = state_of(await status(raw))
            for manifest, reason, words in BAD_MANIFESTS:
                with subtests.test(words):
                    with pytest.raises(Refused) as caught:
                        await _initialize_header(raw, manifest)
                    assert caught.value.refusal.reason is reason
                    assert words in caught.value.refusal.message
                    assert state_of(await status(raw)) == before
            await raw.initialize()

    asyncio.run(run())


async def _initialize_header(raw: Raw, manifest: Manifest) -> None:
    from daemons import refusing

    header = m.InitializeHeader(
        job=raw.job,
        worker=raw.worker,
        incarnation=raw.incarnation,
        manifest=manifest.to_message(),
    )

    async def stream() -> AsyncIterator[Any]:
        yield header

    await refusing(raw.stub.initialize(stream(), timeout=20))


def test_another_model_is_refused(address: str) -> None:
    async def run() -> None:
        async with talk(address) as make:
            first, other = make("first"), make("other")
            await first.train()
            await first.receive(m.Assignment)
            await other.join()
            await other.attach()
            await other.receive(m.Welcome)
            before = state_of(await status(first))
            await other.ready(fingerprint=Manifest(MANIFEST.tensors, 65).fingerprint)
            with pytest.raises(Refused) as caught:
                await other.receive(m.Assignment)
            assert caught.value.refusal.reason is Reason.MODEL
            assert "same task, options and code" in caught.value.refusal.remedy
            assert state_of(await status(first)) == before

    asyncio.run(run())


def test_another_job_and_strangers_are_refused(address: str) -> None:
    async def run() -> None:
        async with talk(address) as make:
            raw = make()
            await raw.attach(job="other")
            with pytest.raises(Refused) as caught:
                await raw.receive(m.Welcome)
            assert caught.value.refusal.reason is Reason.UNKNOWN_JOB
            await raw.attach()
            with pytest.raises(Refused) as caught:
                await raw.receive(m.Welcome)
            assert caught.value.refusal.reason is Reason.NOT_A_MEMBER

    asyncio.run(run())


def test_of_two_live_workers_with_one_id_exactly_one_is_accepted(address: str) -> None:
    async def run() -> None:
        async with talk(address) as make:
            first, second = make("same", 1), make("same", 2)
            await first.train()
            await first.receive(m.Assignment)
            with pytest.raises(Refused) as caught:
                await second.join()
            assert caught.value.refusal.reason is Reason.DUPLICATE_WORKER
            assert "--worker-id" in caught.value.refusal.remedy
            for chunk in await first.push(gradient()):
                await first.send(chunk)
            assert (await first.receive(m.Outcome)).decision is m.Decision.ACCEPTED

    asyncio.run(run())


def test_fetch_before_there_are_parameters_is_refused(address: str) -> None:
    async def run() -> None:
        from daemons import refusing

        async with talk(address) as make:
            call = make().stub.fetch(m.FetchRequest())
            with pytest.raises(Refused) as caught:
                await refusing(call.read())
            assert caught.value.refusal.reason is Reason.NOT_INITIALIZED

    asyncio.run(run())


def test_a_dense_payload_keeps_its_type() -> None:
    """The fixtures above rely on it: the bias travels as bfloat16."""
    assert isinstance(gradient()[1], DensePayload)
