"""Pushes between their stream, control and the shard, in the server's own pieces without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pushes import MANIFEST, assembly, build, dense
from stepping import core_of

from gradwire.proto import messages as m
from gradwire.server.conductor import Conductor
from gradwire.server.exchange import WorkerCall
from gradwire.server.job import events as e
from gradwire.server.metrics import Metrics
from gradwire.server.shard.inbox import Inbox
from gradwire.server.shard.shard import Shard
from gradwire.server.streams import Outbox, WorkerStream


class Wired:
    """A job of attached workers."""

    def __init__(self, mode: str, workers: str) -> None:
        self.core = core_of(mode, min_workers=len(workers), epochs=100)
        self.shard = Shard(build)
        self.conductor = Conductor(self.core, Metrics("none"), shard=self.shard)
        self.call = WorkerCall(self.conductor)
        self.workers = workers

    async def open(self) -> None:
        for worker in self.workers:
            self.conductor.happen(e.Joined(worker, 1, compressor="none"))
            self.conductor.happen(e.Attached(worker, 1))
            self.conductor.streams[worker] = WorkerStream(worker, 1, Outbox(), Inbox(worker))
        opened = e.Initialized("a", 1, fingerprint=b"m", train_samples=400)
        await self.shard.open(MANIFEST, assembly(0, 0, 0), lambda: self.conductor.happen(opened))
        for worker in self.workers:
            self.conductor.happen(e.Prepared(worker, 1, fingerprint=b"m", version=0))

    def push(self, worker: str, seq: int = 1, **fields: Any) -> m.Push:
        work = self.core.roster.members[worker].work
        assert work is not None
        told = work.assignment
        terms: dict[str, Any] = {
            "assignment": told.id,
            "base_version": told.version,
            "samples": 1,
            "loss": 1.0,
        }
        return m.Push(seq=seq, tensors=(), **terms, **fields)

    def arrive(self, worker: str, push: m.Push) -> None:
        """What the stream's reader does once a push has been scanned."""
        given = [dense(1, 1, 1)] if push.exchanged is None else []
        self.call._pushed(self.conductor.streams[worker], push, given)  # pyright: ignore[reportPrivateUsage]

    async def reach(self, version: int) -> None:
        async with asyncio.timeout(60):
            while self.core.version < version:
                assert not self.conductor.failed.is_set(), self.conductor.failure
                await asyncio.sleep(0.01)


def test_a_duplicate_that_arrives_as_its_round_closes_takes_nothing_away() -> None:
    """Both are handled before the reducer begins: `a` has opened another stream and sends its push again."""

    async def run() -> None:
        wired = Wired("sync", "ab")
        await wired.open()
        first, second = wired.push("a"), wired.push("b")
        wired.arrive("a", first)
        wired.arrive("b", second)
        wired.arrive("a", first)
        await wired.reach(1)
        assert wired.shard.stored == 0
        wired.shard.close()

    asyncio.run(run())


def test_a_queued_push_whose_duplicate_arrives_when_it_is_named_is_applied() -> None:
    async def run() -> None:
        wired = Wired("async", "ab")
        await wired.open()
        first, second = wired.push("a"), wired.push("b")
        wired.arrive("a", first)
        wired.arrive("b", second)  # queued behind the first
        publish = wired.conductor.happen

        def happen(event: e.Event[Any]) -> Any:
            done = publish(event)
            if isinstance(event, e.Published) and event.version == 1:
                wired.arrive("b", second)
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wired.conductor, "happen", happen)
            await wired.reach(2)
        wired.shard.close()

    asyncio.run(run())


def test_pushes_of_coded_mode_leave_nothing_in_the_shard() -> None:
    async def run() -> None:
        wired = Wired("coded", "a")
        await wired.open()
        for seq in range(1, 6):
            exchanged = m.Exchanged(crc32c=1, computing_seconds=0.1, clipped=0)
            wired.arrive("a", wired.push("a", seq, exchanged=exchanged))
        assert wired.core.version == 5
        assert wired.shard.stored == 0
        wired.shard.close()

    asyncio.run(run())
