"""Updates that go out while they grow: who is sent which part, and who computes what a lost member left."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from pushes import dense
from wired import ONES, Wired, accepted, both, hints, reasons, up, wired

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason
from gradwire.proto.wire import decode_envelope
from gradwire.server.job import events as e
from gradwire.server.streams.arriving import ArrivingParts
from gradwire.server.streams.outbox import WorkerStream
from gradwire.server.streams.updates import Broadcast


async def test_updates_grow_at_the_members_of_a_round_and_the_others_get_them_whole() -> None:
    async with wired("sync", "ab") as job:
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


async def test_an_update_that_all_members_have_is_dropped_when_the_next_one_begins() -> None:
    async with wired("sync", "ab") as job:
        kept = job.conductor._publishing._updates  # pyright: ignore[reportPrivateUsage]
        for version, before in enumerate(([], [1])):
            assert [each.version for each in kept] == before
            for worker in "ab":
                job.arrive(worker, job.push(worker, seq=version + 1))
            assert not kept
            await job.reach(version + 1)


def _note(given: list[Broadcast], update: Broadcast, *, counted: bool = True) -> None:
    given.append(update)


# ---- parts of updates while others are still on their way up


async def gone_out(job: Wired, worker: str) -> list[tuple[int, int]]:
    """Versions and parts of what a stream has been sent of updates by now."""
    await job.shard.copy()
    await asyncio.sleep(0)
    outbox, found = job.conductor.streams[worker].outbox, list[tuple[int, int]]()
    while (message := outbox._next(lambda raw, payload: None)) is not None:  # pyright: ignore[reportPrivateUsage]
        decoded = decode_envelope(message, "ServerMessage")
        if isinstance(decoded, m.Update):
            found.append((decoded.version, decoded.part))
    return found


async def test_parts_go_out_to_all_members_before_the_last_push_is_whole() -> None:
    async with both("ab") as job:
        up(job, "a", 0, 1, 2)
        assert accepted(job.arrive("a", [job.commit("a")])) == [1]
        assert await gone_out(job, "a") == []
        up(job, "b", 2)
        assert await gone_out(job, "a") == await gone_out(job, "b") == [(1, 2)]
        up(job, "b", 0)
        assert await gone_out(job, "a") == await gone_out(job, "b") == [(1, 0)]
        assert job.core.state.version == 0
        up(job, "b", 1)
        assert accepted(job.arrive("b", [job.commit("b")])) == [1]
        assert await job.reach(1) == [-1, -1, -1]
        assert await gone_out(job, "a") == await gone_out(job, "b") == [(1, 1)]


async def test_a_member_on_a_new_stream_gets_the_whole_update() -> None:
    async with both("ab") as job:
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


async def test_the_update_to_a_version_never_waits_behind_the_one_from_it() -> None:
    """A member that is reconnecting as a round opens has to be sent the version first that it begins with."""
    async with both("ab") as job:
        for worker in "ab":
            up(job, worker, 0, 1, 2)
            commit = job.commit(worker)
            if worker == "b":
                job.conductor.happen(e.Detached("a", 1))
                job.attach("a")  # and does not say yet what it has
            assert accepted(job.arrive(worker, [commit])) == [1]
        await job.reach(1)
        work = job.core.state.roster.members["a"].work
        assert work is not None
        assert work.assignment.version == 1
        job.conductor.happen(e.Prepared("a", 1, fingerprint=b"m", version=0))
        assert sorted(await gone_out(job, "a")) == [(1, 0), (1, 1), (1, 2)]
        for worker in "ab":
            up(job, worker, 0, 1, 2, seq=2)
            assert accepted(job.arrive(worker, [job.commit(worker, seq=2)])) == [2]
        await job.reach(2)
        assert sorted(await gone_out(job, "a")) == [(2, 0), (2, 1), (2, 2)]


async def test_a_round_that_was_given_up_does_not_hold_up_the_next_ones_updates() -> None:
    async with both("ab") as job:
        up(job, "a", 0)
        outboxes = {worker: job.conductor.streams[worker].outbox for worker in "ab"}
        for worker in "ab":
            job.conductor.happen(e.Left(worker, 1, failed=True, reason="crashed"))
        job.conductor.forget_gone()
        for worker in "ab":
            job.conductor.happen(e.Joined(worker, 2, compressor="none"))
            job.conductor.happen(e.Attached(worker, 2))
            stream = WorkerStream(worker, 2, outboxes[worker], ArrivingParts(worker))  # behind the same queue
            job.conductor.streams[worker] = stream
        for worker in "ab":
            job.conductor.happen(e.Prepared(worker, 2, fingerprint=b"m", version=0))
        up(job, "a", 1)
        assert await gone_out(job, "a") == [(1, 1)]
        up(job, "a", 0, 2)
        assert accepted(job.arrive("a", [job.commit("a")])) == [1]
        assert await job.reach(1) == [-1, -1, -1]
        assert sorted(await gone_out(job, "a")) == [(1, 0), (1, 2)]


async def test_what_a_lost_member_left_is_asked_of_another_and_it_is_told_what_counts() -> None:
    async with both("ab") as job:

        def paced(worker: str) -> int:
            return 7

        pacing: Any = job.conductor.rate_control
        pacing.rate = paced
        up(job, "a", 0, 1, value=4.0)
        commit = job.commit("a", (4.0, 4.0, 4.0))
        up(job, "b", 1)
        now = time.monotonic()
        job.core.step(e.KeepAlive("b", 1), now + 60)
        job.conductor.perform(job.core.step(e.Tick(), now + 60).actions)
        up(job, "b", 0, 2)
        assert await gone_out(job, "b") == [(1, 1)]
        assert accepted(job.arrive("b", [job.commit("b")])) == [1]
        (first, second) = [each for each in job.sent["b"] if isinstance(each, m.Assignment)]
        assert (first.parts, second.parts, second.version) == ((), (0, 2), 0)
        assert second.pace == 0, "nobody else sends"
        job.conductor.forget_gone()
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


async def test_who_takes_a_place_pushes_the_parts_that_it_is_asked_for() -> None:
    async with both("ab") as job:
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
        job.conductor.forget_gone()


async def test_nothing_is_stepped_of_a_round_whose_members_are_lost_at_once() -> None:
    """Also not when parts of theirs are found valid after that: others compute their samples."""
    async with both("abc") as job:
        up(job, "a", 0)
        up(job, "b", 1)
        up(job, "c", 0, 1)
        now = time.monotonic()
        job.conductor.perform(job.core.step(e.Tick(), now + 60).actions)
        for worker, assignment in (("a", 1), ("b", 2), ("c", 3)):
            for part in range(3):
                job.shard.put(e.PushKey(worker, 1, 1), part, [dense(1.0)], assignment)
        assert not job.shard._round.final  # type: ignore[union-attr]  # pyright: ignore
        job.conductor.forget_gone()
        values = await job.shard.values()
        assert values.version == 0
