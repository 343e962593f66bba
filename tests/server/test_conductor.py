"""Pushes between their stream, control and the shard, in the server's own pieces without sockets."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from pushes import MANIFEST, assembly, build, cut_plan, dense
from stepping import core_of

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import digest, encode_chunks, part_transfer, payload_header
from gradwire.proto.wire import crc32c, decode_envelope
from gradwire.server.conductor import Conductor
from gradwire.server.exchange import WorkerCall
from gradwire.server.job import events as e
from gradwire.server.metrics import Metrics
from gradwire.server.shard.inbox import Inbox
from gradwire.server.shard.shard import Shard
from gradwire.server.streams import Outbox, WorkerStream
from gradwire.server.updates import Broadcast

PLAN = cut_plan((1, 1, 1))
ONES = (1.0, 1.0, 1.0)
Message = m.Part | m.Chunk | m.Commit | m.Abandon


class Wired:
    """A job of attached workers. Three elements are three parts."""

    def __init__(self, mode: str, workers: str, **rules: Any) -> None:
        self.core = core_of(mode, min_workers=len(workers), epochs=100, **rules)
        self.shard = Shard(build)
        self.conductor = Conductor(self.core, Metrics("none"), shard=self.shard)
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
        self.conductor.streams[worker] = WorkerStream(worker, 1, outbox, Inbox(worker))

    def part(
        self, number: int, value: float = 1.0, *, seq: int = 1, damaged: bool = False, assignment: int = 1
    ) -> list[Message]:
        """A part of one element, as messages."""
        payload = dense(value)
        described = (payload_header(payload),)
        header = m.Part(seq=seq, assignment=assignment, part=number, plan=1, payloads=described)
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
        work = self.core.roster.members[worker].work
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
        """What comes on a worker's stream. Returns what is answered."""
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
            while self.core.version < version:
                assert not self.conductor.failed.is_set(), self.conductor.failure
                await asyncio.sleep(0.01)
        values = await self.shard.values()
        chunk = decode_envelope(values.chunks[0], "ServerMessage")
        assert isinstance(chunk, m.Chunk)
        return [float(each) for each in chunk.data.view(np.float32)]


def wired(mode: str, workers: str, test: Callable[[Wired], Coroutine[Any, Any, None]], **rules: Any) -> None:
    """Run a test of an open job; nothing may be left in the shard in the end."""

    async def run() -> None:
        job = Wired(mode, workers, **rules)
        await job.open()
        await test(job)
        assert not job.conductor.failed.is_set(), job.conductor.failure
        assert job.shard.stored == 0
        job.shard.close()

    asyncio.run(run())


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


def test_a_duplicate_that_arrives_as_its_round_closes_takes_nothing_away() -> None:
    """Both are handled before the reducer begins: `a` has opened another stream and sends its push again."""

    async def test(job: Wired) -> None:
        first, second = job.push("a"), job.push("b")
        assert accepted(job.arrive("a", first)) == [1]
        assert accepted(job.arrive("b", second)) == [1]
        assert accepted(job.arrive("a", first)) == [1]
        assert await job.reach(1) == [-1, -1, -1]

    wired("sync", "ab", test)


def test_a_queued_push_whose_duplicate_arrives_when_it_is_named_is_applied() -> None:
    async def test(job: Wired) -> None:
        first, second = job.push("a"), job.push("b")
        job.arrive("a", first)
        job.arrive("b", second)  # queued behind the first
        publish = job.conductor.happen

        def happen(event: e.Event[Any]) -> Any:
            done = publish(event)
            if isinstance(event, e.Published) and event.version == 1:
                job.arrive("b", second)
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job.conductor, "happen", happen)
            await job.reach(2)

    wired("async", "ab", test)


def test_pushes_of_coded_mode_leave_nothing_in_the_shard() -> None:
    async def test(job: Wired) -> None:
        for seq in range(1, 6):
            exchanged = m.Exchanged(crc32c=1, computing_seconds=0.1, clipped=0)
            commit = job.commit("a", (), seq=seq, parts=(), exchanged=exchanged)
            job.arrive("a", [commit])
        assert job.core.version == 5

    wired("coded", "a", test)


def test_parts_come_in_any_order_and_a_damaged_one_once_more() -> None:
    async def test(job: Wired) -> None:
        values = (1.0, 2.0, 4.0)
        assert job.arrive("a", job.part(2, 4.0)) == []
        assert reasons(job.arrive("a", job.part(0, 1.0, damaged=True))) == [(1, 0, Reason.CHECKSUM)]
        assert job.arrive("a", [job.commit("a", values)]) == []
        assert job.arrive("a", job.part(1, 2.0)) == []
        assert accepted(job.arrive("a", job.part(0, 1.0))) == [1]
        assert await job.reach(1) == [-1, -2, -4]

    wired("sync", "a", test)


def test_a_part_that_is_not_valid_drops_its_push_whole_and_its_commit_gets_the_same_answer() -> None:
    """What follows it on the stream had been sent before the worker heard of it."""

    async def test(job: Wired) -> None:
        messages = job.push("a", (1.0, math.nan, 1.0))
        refused = (1, None, Reason.NON_FINITE)
        assert reasons(job.arrive("a", messages)) == [refused, refused]
        assert job.core.accepted_pushes == 0
        assert reasons(job.arrive("a", messages[-1:])) == [refused], "the first answer may have been lost"
        assert accepted(job.arrive("a", job.push("a", seq=2))) == [1]
        assert await job.reach(1) == [-1, -1, -1]

    wired("sync", "a", test)


@pytest.mark.parametrize("before", range(4))
def test_an_abandoned_push_never_counts_whatever_overtakes_its_abandon(before: int) -> None:
    async def test(job: Wired) -> None:
        *parts, commit = job.push("a")
        job.arrive("a", parts[: 2 * before])
        assert job.arrive("a", [m.Abandon(seq=1)]) == []
        assert job.shard.stored == 0
        assert job.arrive("a", parts[2 * before :]) == []
        assert reasons(job.arrive("a", [commit])) == [(1, None, Reason.SEQUENCE)]
        assert job.core.accepted_pushes == 0
        assert accepted(job.arrive("a", job.push("a", seq=2))) == [1]
        await job.reach(1)

    wired("sync", "a", test)


def test_a_push_that_waits_for_a_part_survives_that_a_later_one_is_given_up() -> None:
    async def test(job: Wired) -> None:
        job.arrive("a", [*job.part(0), *job.part(1, damaged=True), *job.part(2)])
        job.arrive("a", [job.commit("a"), *job.part(0, seq=2), m.Abandon(seq=2)])
        stored = job.conductor.arrivals("a", 1).stored
        assert stored == (m.Stored(seq=1, parts=(0, 2)),)
        assert job.arrive("a", [job.commit("a")]) == [], "told again, it is no more complete"
        assert accepted(job.arrive("a", job.part(1))) == [1]
        assert await job.reach(1) == [-1, -1, -1]

    wired("sync", "a", test)


def test_a_push_with_other_bytes_than_it_committed_has_to_come_again() -> None:
    async def test(job: Wired) -> None:
        *parts, _ = job.push("a")
        wrong, right = job.commit("a", (1.0, 2.0, 1.0)), job.commit("a")
        assert reasons(job.arrive("a", [*parts, wrong])) == [(1, None, Reason.CHECKSUM)]
        assert job.shard.stored == 0
        assert accepted(job.arrive("a", [*parts, right])) == [1]
        await job.reach(1)

    wired("sync", "a", test)


def test_what_is_wrong_after_a_push_was_accepted_takes_nothing_from_it() -> None:
    async def test(job: Wired) -> None:
        first = job.push("a")
        assert accepted(job.arrive("a", first)) == [1]
        again = job.commit("a") if job.core.roster.members["a"].work else first[-1]
        assert isinstance(again, m.Commit)
        assert accepted(job.arrive("a", [replace(again, loss=math.nan)])) == [1]
        job.arrive("a", [m.Abandon(seq=1)])
        assert accepted(job.arrive("b", job.push("b"))) == [1]
        assert await job.reach(1) == [-1, -1, -1]

    wired("sync", "ab", test)


def test_a_worker_whose_lease_is_over_comes_back_to_what_it_had_sent() -> None:
    """It is no member when its push is complete; on its next stream it says only what is missing."""

    async def test(job: Wired) -> None:
        commit = job.commit("a")
        *parts, last = [*job.part(0), *job.part(1), *job.part(2)]
        job.arrive("a", [*parts[:4], commit])
        job.core.step(e.Tick(), time.monotonic() + 60)
        assert "a" not in job.core.roster.members
        stream = job.conductor.streams["a"]
        header = parts[4]
        assert isinstance(header, m.Part)
        inbox = stream.inbox
        inbox.begin(header, MANIFEST, PLAN)
        with pytest.raises(Refused) as caught:
            await job.call._take(stream, last)  # type: ignore[arg-type]
        assert caught.value.refusal.reason is Reason.NOT_A_MEMBER
        job.attach("a")
        job.conductor.happen(e.Prepared("a", 1, fingerprint=b"m", version=0, assigned=commit.assignment))
        assert job.conductor.arrivals("a", 1).stored == (m.Stored(seq=1, parts=(0, 1, 2)),)
        assert reasons(job.arrive("a", [commit])) == [(1, None, Reason.STALE)], "its samples were given back"
        assert job.shard.stored == 0
        assert accepted(job.arrive("a", job.push("a", seq=2))) == [1]
        await job.reach(1)

    wired("sync", "a", test)


def test_what_a_member_that_is_gone_had_not_committed_is_forgotten() -> None:
    async def test(job: Wired) -> None:
        job.arrive("a", job.part(0))
        assert job.shard.stored == 1
        job.conductor.happen(e.Detached("a", 1))
        job.conductor.happen(e.Joined("a", 2, compressor="none"))
        job.conductor._forget_arrivals()  # pyright: ignore[reportPrivateUsage]

    wired("sync", "a", test)


@pytest.mark.parametrize(
    ("parts", "right"), [((0,), True), ((0, 1, 2), True), ((1, 2), False), ((1,), False), ((0, 1), False)]
)
def test_a_member_of_a_group_pushes_its_parts_or_all_of_them(parts: tuple[int, ...], right: bool) -> None:
    async def test(job: Wired) -> None:
        work = job.core.roster.members["a"].work
        assert work is not None
        assert (work.assignment.slice, work.assignment.slices) == (0, 2)
        assert PLAN.slice(0, 2) == {0}
        messages = [message for part in parts for message in job.part(part)]
        outcomes = job.arrive("a", [*messages, job.commit("a", [1.0] * len(parts), parts=parts)])
        if not right:
            assert reasons(outcomes) == [(1, None, Reason.TENSOR)]
            return
        assert accepted(outcomes) == [1]
        commit = job.commit("b", (2.0, 2.0), parts=(1, 2))
        told = commit.assignment
        second = [*job.part(1, 2.0, assignment=told), *job.part(2, 2.0, assignment=told), commit]
        assert accepted(job.arrive("b", second)) == [1]
        await job.reach(1)

    wired("sync:redundancy=2", "ab", test)


def test_updates_grow_at_the_members_of_a_round_and_the_others_get_them_whole() -> None:
    async def test(job: Wired) -> None:
        given: dict[str, list[Broadcast]] = {worker: [] for worker in "ab"}
        for worker in "ab":
            outbox = job.conductor.streams[worker].outbox
            outbox.broadcast = partial(_note, given[worker])  # type: ignore[method-assign]
        job.arrive("b", job.push("b"))
        job.conductor.happen(e.Detached("b", 1))
        job.arrive("a", job.push("a"))
        (early,) = given["a"]
        assert not early.complete
        assert given["b"] == []
        await job.reach(1)
        assert (early.complete, early.version, len(early.messages)) == (True, 1, 6)
        assert given["a"] == [early]
        job.conductor.happen(e.Attached("b", 1))
        job.conductor.happen(e.Prepared("b", 1, fingerprint=b"m", version=0))
        assert given["b"] == [early]

    wired("sync", "ab", test)


def _note(given: list[Broadcast], update: Broadcast, *, counted: bool = True) -> None:
    given.append(update)


# ---- parts of updates while others are still on their way up


def both(workers: str, test: Callable[[Wired], Coroutine[Any, Any, None]]) -> None:
    wired("sync", workers, test, overlap="both")


def up(job: Wired, worker: str, *parts: int, seq: int = 1, value: float = 1.0) -> None:
    """Parts arrive of what a worker was told to compute."""
    work = job.core.roster.members[worker].work
    assert work is not None
    for part in parts:
        assert job.arrive(worker, job.part(part, value, seq=seq, assignment=work.id)) == []


async def gone_out(job: Wired, worker: str) -> list[tuple[int, int]]:
    """Versions and parts of what a stream has been sent of updates by now."""
    await job.shard.digest()
    await asyncio.sleep(0)
    outbox, found = job.conductor.streams[worker].outbox, list[tuple[int, int]]()
    while (message := outbox._next(lambda raw: None)) is not None:  # pyright: ignore[reportPrivateUsage]
        decoded = decode_envelope(message, "ServerMessage")
        if isinstance(decoded, m.Update):
            found.append((decoded.version, decoded.part))
    return found


def test_parts_go_out_to_all_members_before_the_last_push_is_whole() -> None:
    async def test(job: Wired) -> None:
        up(job, "a", 0, 1, 2)
        assert accepted(job.arrive("a", [job.commit("a")])) == [1]
        assert await gone_out(job, "a") == []
        up(job, "b", 2)
        assert await gone_out(job, "a") == await gone_out(job, "b") == [(1, 2)]
        up(job, "b", 0)
        assert await gone_out(job, "a") == await gone_out(job, "b") == [(1, 0)]
        assert job.core.version == 0
        up(job, "b", 1)
        assert accepted(job.arrive("b", [job.commit("b")])) == [1]
        assert await job.reach(1) == [-1, -1, -1]
        assert await gone_out(job, "a") == await gone_out(job, "b") == [(1, 1)]

    both("ab", test)


def test_a_member_on_a_new_stream_gets_the_whole_update() -> None:
    async def test(job: Wired) -> None:
        up(job, "a", 0)
        up(job, "b", 0)
        assert await gone_out(job, "b") == [(1, 0)]
        job.conductor.happen(e.Detached("b", 1))
        job.attach("b")
        job.conductor.happen(e.Prepared("b", 1, fingerprint=b"m", version=0, assigned=2))
        for worker in "ab":
            up(job, worker, 1, 2)
            assert accepted(job.arrive(worker, [job.commit(worker)])) == [1]
        await job.reach(1)
        assert sorted(await gone_out(job, "b")) == [(1, 0), (1, 1), (1, 2)]

    both("ab", test)


def test_the_update_to_a_version_never_waits_behind_the_one_from_it() -> None:
    """A member that is reconnecting as a round opens has to be sent the version first that it begins with."""

    async def test(job: Wired) -> None:
        for worker in "ab":
            up(job, worker, 0, 1, 2)
            commit = job.commit(worker)
            if worker == "b":
                job.conductor.happen(e.Detached("a", 1))
                job.attach("a")  # and does not say yet what it has
            assert accepted(job.arrive(worker, [commit])) == [1]
        await job.reach(1)
        work = job.core.roster.members["a"].work
        assert work is not None
        assert work.assignment.version == 1
        job.conductor.happen(e.Prepared("a", 1, fingerprint=b"m", version=0))
        assert sorted(await gone_out(job, "a")) == [(1, 0), (1, 1), (1, 2)]
        for worker in "ab":
            up(job, worker, 0, 1, 2, seq=2)
            assert accepted(job.arrive(worker, [job.commit(worker, seq=2)])) == [2]
        await job.reach(2)
        assert sorted(await gone_out(job, "a")) == [(2, 0), (2, 1), (2, 2)]

    both("ab", test)


def test_a_round_that_was_given_up_does_not_hold_up_the_next_ones_updates() -> None:
    async def test(job: Wired) -> None:
        up(job, "a", 0)
        outboxes = {worker: job.conductor.streams[worker].outbox for worker in "ab"}
        for worker in "ab":
            job.conductor.happen(e.Left(worker, 1, failed=True, reason="crashed"))
        job.conductor._forget_arrivals()  # pyright: ignore[reportPrivateUsage]
        for worker in "ab":
            job.conductor.happen(e.Joined(worker, 2, compressor="none"))
            job.conductor.happen(e.Attached(worker, 2))
            stream = WorkerStream(worker, 2, outboxes[worker], Inbox(worker))  # behind the same queue
            job.conductor.streams[worker] = stream
        for worker in "ab":
            job.conductor.happen(e.Prepared(worker, 2, fingerprint=b"m", version=0))
        up(job, "a", 1)
        assert await gone_out(job, "a") == [(1, 1)]
        up(job, "a", 0, 2)
        assert accepted(job.arrive("a", [job.commit("a")])) == [1]
        assert await job.reach(1) == [-1, -1, -1]
        assert sorted(await gone_out(job, "a")) == [(1, 0), (1, 2)]

    both("ab", test)


def test_what_a_lost_member_left_is_asked_of_another_and_it_is_told_what_counts() -> None:
    async def test(job: Wired) -> None:
        def paced(worker: str) -> int:
            return 7

        pacing: Any = job.conductor.pacing
        pacing.rate = paced
        up(job, "a", 0, 1, value=4.0)
        commit = job.commit("a", (4.0, 4.0, 4.0))
        up(job, "b", 1)
        now = time.monotonic()
        job.core.step(e.Heard("b", 1), now + 60)
        job.conductor.perform(job.core.step(e.Tick(), now + 60).actions)
        up(job, "b", 0, 2)
        assert await gone_out(job, "b") == [(1, 1)]
        assert accepted(job.arrive("b", [job.commit("b")])) == [1]
        (first, second) = [each for each in job.sent["b"] if isinstance(each, m.Assignment)]
        assert (first.parts, second.parts, second.version) == ((), (0, 2), 0)
        assert second.pace == 0, "nobody else sends"
        job.conductor._forget_arrivals()  # pyright: ignore[reportPrivateUsage]
        job.attach("a")
        job.conductor.happen(e.Prepared("a", 1, fingerprint=b"m", version=0, assigned=1))
        for _ in range(2):
            for part in range(3):
                job.arrive("a", job.part(part, 4.0))
            (outcome,) = job.arrive("a", [commit])
            assert reasons([outcome]) == [(1, None, Reason.REDUNDANT)]
            assert outcome.counted == (1,)
        assert hints(job, "a") == [1]
        job.conductor.happen(e.Detached("b", 1))
        job.attach("b")
        job.conductor.happen(e.Prepared("b", 1, fingerprint=b"m", version=0, assigned=1))
        assert [each for each in job.sent["b"] if isinstance(each, m.Assignment)][-1] == second, "told again"
        up(job, "b", 0, 2, value=4.0, seq=2)
        rest = job.commit("b", (4.0, 4.0), seq=2, parts=(0, 2))
        assert accepted(job.arrive("b", [rest])) == [1]
        assert await job.reach(1) == [-2.5, -2.5, -2.5]
        assert job.arrive("a", [commit])[0].counted == (1,)

    both("ab", test)


def test_who_takes_a_place_pushes_the_parts_that_it_is_asked_for() -> None:
    async def test(job: Wired) -> None:
        for worker in "ab":
            up(job, worker, 1)
        job.conductor.happen(e.Left("a", 1, failed=True, reason="crashed"))
        up(job, "b", 0, 2)
        assert accepted(job.arrive("b", [job.commit("b")])) == [1]
        up(job, "b", 0, 1, 2, seq=2)
        assert reasons(job.arrive("b", [job.commit("b", seq=2)])) == [(2, None, Reason.TENSOR)]
        up(job, "b", 0, 2, seq=3)
        assert accepted(job.arrive("b", [job.commit("b", ONES[:2], seq=3, parts=(0, 2))])) == [1]
        assert await job.reach(1) == [-1, -1, -1]
        job.conductor._forget_arrivals()  # pyright: ignore[reportPrivateUsage]

    both("ab", test)


def test_nothing_is_stepped_of_a_round_whose_members_are_lost_at_once() -> None:
    """Also not when parts of theirs are found valid after that: others compute their samples."""

    async def test(job: Wired) -> None:
        up(job, "a", 0)
        up(job, "b", 1)
        up(job, "c", 0, 1)
        now = time.monotonic()
        job.conductor.perform(job.core.step(e.Tick(), now + 60).actions)
        for worker, assignment in (("a", 1), ("b", 2), ("c", 3)):
            for part in range(3):
                job.shard.put(e.PushKey(worker, 1, 1), part, [dense(1.0)], assignment)
        assert not job.shard._round.final  # type: ignore[union-attr]  # pyright: ignore
        for worker in "abc":
            job.shard.drop(e.PushKey(worker, 1, 1))
        values = await job.shard.values()
        assert values.version == 0

    both("abc", test)


# ---- pushes that are too late


def hints(job: Wired, worker: str) -> list[int]:
    return [each.seq for each in job.sent[worker] if isinstance(each, m.Unwanted)]


def late(job: Wired) -> tuple[list[Message], int]:
    """`c` has sent one part and the header of another when its round closes without it. Returns all of its
    push, and how many messages of it have come."""
    push = job.push("c")
    job.arrive("c", push[:3])
    job.arrive("a", job.push("a"))
    assert hints(job, "c") == []
    job.arrive("b", job.push("b"))
    return push, 3


def test_a_push_is_unwanted_as_soon_as_its_round_has_closed() -> None:
    async def test(job: Wired) -> None:
        push, come = late(job)
        assert hints(job, "c") == [1], "at once, not with its next part"
        assert await job.reach(1) == [-1, -1, -1]
        assert job.shard.stored == 0
        assert job.arrive("c", push[come : come + 1]) == [], "the rest of the part that was arriving"
        assert hints(job, "c") == [1]
        assert job.arrive("c", push[come + 1 : -1]) == []
        assert hints(job, "c") == [1], "once on each stream"
        assert job.shard.stored == 0
        assert reasons(job.arrive("c", push[-1:])) == [(1, None, Reason.STALE)]

    wired("sync:backup=1", "abc", test)


@pytest.mark.parametrize("rest", [0, 1])
def test_an_unwanted_push_is_decided_on_without_its_parts(rest: int) -> None:
    """Its worker skips them; or gives it up."""

    async def test(job: Wired) -> None:
        push, _ = late(job)
        if rest:
            assert job.arrive("c", [m.Abandon(seq=1)]) == []
            assert job.arrive("c", push[:2]) == []
            assert hints(job, "c") == [1], "it is over"
        else:
            assert reasons(job.arrive("c", push[-1:])) == [(1, None, Reason.STALE)]
            assert reasons(job.arrive("c", push[-1:])) == [(1, None, Reason.STALE)], "told again"
        assert job.conductor.arrivals("c", 1).stored == ()

    wired("sync:backup=1", "abc", test)


def test_a_part_that_is_being_scanned_when_its_push_is_unwanted_is_not_stored() -> None:
    async def test(job: Wired) -> None:
        header, chunk, *_ = job.push("c")
        assert isinstance(header, m.Part)
        assert isinstance(chunk, m.Chunk)
        stream = job.conductor.streams["c"]
        job.call._begin(stream, header)  # pyright: ignore[reportPrivateUsage]
        stream.inbox.add(chunk)
        complete = stream.inbox.take()
        assert complete is not None
        job.arrive("a", job.push("a"))
        job.arrive("b", job.push("b"))
        await job.call._scan(stream, *complete)  # pyright: ignore[reportPrivateUsage]
        assert await job.reach(1) == [-1, -1, -1]

    wired("sync:backup=1", "abc", test)


def test_what_was_unwanted_is_asked_for_again_where_it_would_be_accepted() -> None:
    """A member was lost, and what it was given was taken from it; then it had that back."""

    async def test(job: Wired) -> None:
        push = job.push("a")
        job.arrive("a", push[:2])
        member = job.core.roster.members["a"]
        work = job.core.roster.relieve(member)
        assert work is not None
        job.arrive("a", push[2:4])
        assert (hints(job, "a"), job.shard.stored) == ([1], 0)
        job.core.roster.give(member, work)
        job.arrive("a", push[4:-1])
        assert (hints(job, "a"), job.shard.stored) == ([1], 0), "what is dropped once stays dropped"
        assert reasons(job.arrive("a", push[-1:])) == [(1, None, Reason.CHUNK)]
        assert accepted(job.arrive("a", push)) == [1]
        assert await job.reach(1) == [-1, -1, -1]

    wired("sync", "a", test)


@pytest.mark.parametrize("credit", [0, 2])
def test_with_a_credit_workers_are_told_what_has_become_of_each_part(credit: int) -> None:
    """Also of one that comes again; a damaged one has its answer."""

    async def test(job: Wired) -> None:
        job.shard._plan = replace(PLAN, credit=credit)  # pyright: ignore[reportPrivateUsage]
        damaged, *again = job.part(0, damaged=True), *job.part(1), *job.part(1)
        outcomes = job.arrive("a", [*damaged, *again])
        assert [each.part for each in outcomes] == [0]
        told = [each for each in job.sent["a"] if isinstance(each, m.Stored)]
        assert told == ([m.Stored(seq=1, parts=(1,))] * 2 if credit else [])
        assert accepted(job.arrive("a", job.push("a"))) == [1]
        await job.reach(1)

    wired("sync", "a", test)


def test_parts_may_be_on_their_way_at_once_and_an_abandoned_push_takes_up_no_room() -> None:
    async def test(job: Wired) -> None:
        stream = job.conductor.streams["a"]
        parts = [job.part(number) for number in range(3)]
        job.arrive("a", [header for header, _ in parts])
        job.arrive("a", [m.Abandon(seq=1)])
        assert not any(stream.inbox.arriving(part_transfer(1, number)) for number in range(3))
        again = [job.part(number, seq=2, assignment=1) for number in range(3)]
        job.arrive("a", [header for header, _ in again])
        chunks = [chunk for _, chunk in reversed(again)]
        assert accepted(job.arrive("a", [*chunks, job.commit("a", seq=2)])) == [1]
        assert await job.reach(1) == [-1, -1, -1]

    wired("sync", "a", test)
