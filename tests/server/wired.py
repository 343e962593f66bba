"""A job of attached workers in the server's own pieces without sockets: what they send arrives, what they are
answered is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pushes import MANIFEST, assembly, build, cut_plan, dense, held
from stepping import core_of

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason
from gradwire.proto.transfer import digest, encode_chunks, part_transfer, payload_header
from gradwire.proto.wire import crc32c, decode_envelope
from gradwire.server.calls.exchange import WorkerCall
from gradwire.server.conductor import Conductor
from gradwire.server.job import events as e
from gradwire.server.metrics import ServerMetrics
from gradwire.server.shard.local import LocalShard
from gradwire.server.streams.arriving import ArrivingParts
from gradwire.server.streams.outbox import Outbox, WorkerStream

PLAN = cut_plan((1, 1, 1))
ONES = (1.0, 1.0, 1.0)
Message = m.PartHeader | m.Chunk | m.Commit | m.Abandon


class Wired:
    """A job of attached workers. Three elements are three parts."""

    def __init__(self, mode: str, workers: Sequence[str], **rules: Any) -> None:
        self.core = core_of(mode, **{"min_workers": len(workers), "epochs": 100, **rules})
        self.shard = LocalShard(build)
        self.conductor = Conductor(self.core, ServerMetrics("none"), shard=self.shard)
        self.call = WorkerCall(self.conductor)
        self.workers = workers
        self.sent: dict[str, list[Any]] = {worker: [] for worker in workers}

    async def open(self) -> None:
        for worker in self.workers:
            self.conductor.happen(e.Joined(worker, 1, compressor="none"))
            self.attach(worker)
        opened = e.Initialized("a", 1, fingerprint=b"m", train_samples=400)
        await self.shard.open(MANIFEST, assembly(0, 0, 0), PLAN, lambda: self.conductor.happen(opened))
        for worker in self.workers:
            self.conductor.happen(e.Prepared(worker, 1, fingerprint=b"m", version=0))

    def attach(self, worker: str) -> None:
        self.conductor.happen(e.Attached(worker, 1))
        outbox = Outbox()
        outbox.send = self.sent[worker].append  # type: ignore[method-assign, assignment]
        self.conductor.streams[worker] = WorkerStream(worker, 1, outbox, ArrivingParts(worker))

    def part(
        self, number: int, value: float = 1.0, *, seq: int = 1, damaged: bool = False, assignment: int = 1
    ) -> list[Message]:
        """A part of one element, as messages."""
        payload = dense(value)
        described = (payload_header(payload),)
        header = m.PartHeader(seq=seq, assignment=assignment, part=number, plan=1, payloads=described)
        (chunk,) = [
            decode_envelope(message, "WorkerMessage")
            for message in encode_chunks(part_transfer(seq, number), [payload.data])
        ]
        assert isinstance(chunk, m.Chunk)
        return [header, replace(chunk, crc32c=chunk.crc32c ^ 1) if damaged else chunk]

    def commit(
        self,
        worker: str,
        values: Sequence[float] = ONES,
        *,
        seq: int = 1,
        parts: Sequence[int] = (0, 1, 2),
        **fields: Any,
    ) -> m.Commit:
        work = self.core.state.roster.members[worker].work
        assert work is not None
        told = work.assignment
        checksums = {part: crc32c((dense(value).data,)) for part, value in zip(parts, values, strict=True)}
        terms: dict[str, Any] = {
            "assignment": told.id,
            "base_version": told.version,
            "samples": 1,
            "loss": 1.0,
            "parts": len(checksums),
            "digest": digest(checksums),
            "plan": 1,
        }
        return m.Commit(seq=seq, **{**terms, **fields})

    def push(self, worker: str, values: Sequence[float] = ONES, *, seq: int = 1) -> list[Message]:
        """All of a push."""
        commit = self.commit(worker, values, seq=seq)
        told = commit.assignment
        parts = [
            message
            for part in range(3)
            for message in self.part(part, values[part], seq=seq, assignment=told)
        ]
        return [*parts, commit]

    def arrive(self, worker: str, messages: Sequence[Message]) -> list[m.Outcome]:
        """Deliver messages on a worker's stream, and return the outcomes."""
        stream, answered = self.conductor.streams[worker], len(self.sent[worker])

        async def requests() -> AsyncIterator[Any]:
            for message in messages:
                yield message

        reading = self.call._read(stream, requests())  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(StopIteration):
            reading.send(None)  # nothing so small is waited for
        return [each for each in self.sent[worker][answered:] if isinstance(each, m.Outcome)]

    async def reach(self, version: int) -> list[float]:
        """The parameters of a version, once it is published."""
        async with asyncio.timeout(60):
            while self.core.state.version < version:
                assert not self.conductor.tasks.failed.is_set(), self.conductor.tasks.failure
                await asyncio.sleep(0.01)
        values = await self.shard.values()
        chunk = decode_envelope(next(iter(values.chunks)), "ServerMessage")
        assert isinstance(chunk, m.Chunk)
        return [float(each) for each in chunk.data.view(np.float32)]


@asynccontextmanager
async def wired(mode: str, workers: Sequence[str], **rules: Any) -> AsyncGenerator[Wired]:
    """An open job; nothing may be left in the shard in the end."""
    job = Wired(mode, workers, **rules)
    await job.open()
    yield job
    assert not job.conductor.tasks.failed.is_set(), job.conductor.tasks.failure
    assert len(held(job.conductor.ledger)) == 0
    job.shard.close()


def both(workers: str) -> AbstractAsyncContextManager[Wired]:
    return wired("sync", workers, overlap="both")


def up(job: Wired, worker: str, *parts: int, seq: int = 1, value: float = 1.0) -> None:
    """Parts arrive of what a worker was told to compute."""
    work = job.core.state.roster.members[worker].work
    assert work is not None
    for part in parts:
        assert job.arrive(worker, job.part(part, value, seq=seq, assignment=work.id)) == []


def accepted(outcomes: Sequence[m.Outcome]) -> list[int]:
    """Versions that were named; nothing else may have been answered."""
    assert all(outcome.decision is m.Decision.ACCEPTED for outcome in outcomes), outcomes
    return [outcome.version for outcome in outcomes]


def reasons(outcomes: Sequence[m.Outcome]) -> list[tuple[int, int | None, Reason]]:
    """Seq and part of what was refused, and why."""
    return [
        (outcome.seq, outcome.part, outcome.refusal.reason)
        for outcome in outcomes
        if outcome.refusal is not None
    ]


def hints(job: Wired, worker: str) -> list[int]:
    return [each.seq for each in job.sent[worker] if isinstance(each, m.Unwanted)]
