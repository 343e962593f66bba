"""A new plan between streams, control and shard: what a worker is sent, what becomes of open pushes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pushes import MANIFEST, cut_plan, dense, held
from wired import Message, Wired, accepted, both, reasons, wired

from gradwire.common.parts import arrange
from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import digest, encode_chunks, part_transfer, payload_header
from gradwire.proto.wire import crc32c, decode_envelope
from gradwire.server.calls.pushes import Pushes
from gradwire.server.job import events as e

WHOLE = arrange([3], [1], [])  # one part, where there were three


def adopted(job: Wired, worker: str, seq: int) -> list[Message]:
    """A push of threes under the plan of one part."""
    work = job.core.state.roster.members[worker].work
    assert work is not None
    payload = dense(3, 3, 3)
    header = m.PartHeader(
        seq=seq, assignment=work.assignment.id, part=0, plan=2, payloads=(payload_header(payload),)
    )
    chunks: list[Any] = [
        decode_envelope(message, "WorkerMessage")
        for message in encode_chunks(part_transfer(seq, 0), [payload.data])
    ]
    checksum = digest({0: crc32c((payload.data,))})
    return [header, *chunks, replace(job.commit(worker, seq=seq), parts=1, plan=2, digest=checksum)]


def went_out(job: Wired, worker: str) -> list[tuple[str, int]]:
    """Return the messages queued for a worker so far, in order: plans, and versions of updates."""
    outbox, found = job.conductor.streams[worker].outbox, list[tuple[str, int]]()
    while (message := outbox._next(lambda raw, payload: None)) is not None:  # pyright: ignore[reportPrivateUsage]
        decoded = decode_envelope(message, "ServerMessage")
        if isinstance(decoded, m.PlanAnnouncement):
            found.append(("plan", decoded.number))
        elif isinstance(decoded, m.Update):
            found.append((f"plan {decoded.plan}", decoded.version))
    return found


async def test_a_plan_goes_behind_the_last_update_and_before_the_next() -> None:
    async with wired("sync", "ab") as job:
        assert went_out(job, "a") == went_out(job, "b") == [("plan", 1)]
        job.conductor.replan(WHOLE)
        assert accepted(job.arrive("a", job.push("a"))) == [1]
        assert went_out(job, "a") == []
        assert accepted(job.arrive("b", job.push("b"))) == [1]
        assert await job.reach(1) == [-1, -1, -1]
        for worker in "ab":
            assert went_out(job, worker) == [("plan 1", 1)] * 3 + [("plan", 2)]
            assert accepted(job.arrive(worker, adopted(job, worker, 2))) == [2]
        assert await job.reach(2) == [-4, -4, -4]
        assert went_out(job, "a") == went_out(job, "b") == [("plan 2", 2)]
        assert job.shard.reported.plan.norms == (0.0,), "those of the first parameters"


async def test_a_push_under_the_old_plan_is_stale_and_waits_for_none_of_its_parts() -> None:
    """Some are stored, one was damaged, one has not come, and the commit has."""
    async with wired("async", "a") as job:
        work = job.core.state.roster.members["a"].work
        assert work is not None
        job.arrive("a", [*job.part(0), *job.part(1, damaged=True), job.commit("a")])
        assert len(held(job.conductor.ledger)) == 1
        job.conductor.replan(WHOLE)
        assert job.core.state.plan == 2
        assert len(held(job.conductor.ledger)) == 0
        (stored,) = job.conductor.ledger.stored(("a", 1))
        assert stored.parts == ()
        assert reasons(job.arrive("a", job.part(1)[:1])) == [(1, None, Reason.STALE)]
        assert job.arrive("a", job.part(1)[1:]) == [], "what is left of it is ignored"
        assert job.arrive("a", job.part(2)) == []
        assert len(held(job.conductor.ledger)) == 0
        assert accepted(job.arrive("a", adopted(job, "a", 2))) == [1]
        assert await job.reach(1) == [-3, -3, -3]


async def test_a_commit_alone_is_enough_to_be_told_that_it_is_stale() -> None:
    """The case is a reconnect: for a push under another plan than the present one only that is sent again."""
    async with wired("async", "a") as job:
        commit = job.commit("a")
        job.arrive("a", job.part(0))
        job.conductor.happen(e.Detached("a", 1))
        job.conductor.replan(WHOLE)
        job.attach("a")
        welcome = job.conductor.decide(e.Attached("a", 1)).reply
        assert welcome.plan == 2
        job.conductor.streams["a"].plan = 1  # as it says
        job.conductor.happen(e.Prepared("a", 1, fingerprint=b"m", version=0, assigned=commit.assignment))
        assert reasons(job.arrive("a", [commit])) == [(1, None, Reason.STALE)]
        assert reasons(job.arrive("a", [commit])) == [(1, None, Reason.STALE)], "told again"
        assert went_out(job, "a") == [("plan", 2)]
        assert accepted(job.arrive("a", adopted(job, "a", 2))) == [1]
        await job.reach(1)


async def test_a_part_that_is_being_looked_at_as_the_plan_changes_is_not_stored() -> None:
    async with wired("async", "a") as job:
        header, *_ = job.part(0, float("nan"))
        assert isinstance(header, m.PartHeader)
        assert job.conductor.ledger.arrive(job.conductor.streams["a"], header)
        job.conductor.replan(WHOLE)

        def finish() -> Any:
            raise AssertionError("it does not matter what it holds")

        Pushes(job.conductor, job.conductor.streams["a"])._store(header, 0, finish)  # pyright: ignore[reportPrivateUsage]
        assert len(held(job.conductor.ledger)) == 0
        assert job.conductor.ledger.stored(("a", 1)) == (m.Stored(seq=1, parts=()),)
        job.arrive("a", [m.Abandon(seq=1)])


async def test_who_missed_versions_gets_those_of_the_old_plan_first_and_who_was_away_a_snapshot() -> None:
    async with wired("sync:backup=2", "abcd") as job:
        late = job.commit("c")
        job.conductor.happen(e.Detached("d", 1))
        for worker in "abcd":
            went_out(job, worker)
        job.arrive("a", job.push("a"))
        job.arrive("b", job.push("b"))
        job.core.state.roster.members["d"].work = None
        await job.reach(1)
        assert went_out(job, "c") == []
        job.conductor.replan(WHOLE)
        for worker in "ab":
            job.arrive(worker, job.push(worker, seq=2))
        await job.reach(2)
        assert went_out(job, "c") == [("plan 1", 2)] * 3 + [("plan", 2)], "without loss, the last will do"
        assert reasons(job.arrive("c", [late])) == [(1, None, Reason.STALE)]
        job.attach("d")
        job.conductor.streams["d"].plan = 1
        job.conductor.happen(e.Prepared("d", 1, fingerprint=b"m", version=0, assigned=4))
        for worker in "ab":
            job.arrive(worker, adopted(job, worker, 3))
        await job.reach(3)
        await job.shard.copy()
        await asyncio.sleep(0)
        assert went_out(job, "d") == [("plan", 2), ("plan 2", 3)]
        for worker in "abcd":  # nothing may be left in the end
            assert job.core.state.roster.members[worker].work is not None


async def test_a_round_that_was_given_up_does_not_hold_up_the_plan() -> None:
    async with both("ab") as job:
        job.arrive("a", job.part(0))
        for worker in "ab":
            job.conductor.happen(e.Left(worker, 1, failed=True, reason="crashed"))
        job.conductor.replan(WHOLE)
        job.conductor.forget_gone()
        job.conductor.happen(e.Joined("a", 2, compressor="none"))
        job.conductor.happen(e.Attached("a", 2))
        job.conductor.streams["a"].incarnation = 2  # behind the same queue
        job.conductor.happen(e.Prepared("a", 2, fingerprint=b"m", version=0))
        assert went_out(job, "a") == [("plan", 1), ("plan", 2)]
        assert accepted(job.arrive("a", adopted(job, "a", 1))) == [1]
        assert await job.reach(1) == [-3, -3, -3]


async def test_a_plan_that_the_model_cannot_have_is_refused_before_anybody_hears_of_it() -> None:
    async with wired("sync", "a") as job:
        assert MANIFEST.elements == 3
        for wrong in (cut_plan((1, 2)), cut_plan((4,), (2,))):
            with pytest.raises(Refused, match="plan"):
                job.conductor.replan(wrong)
        assert not job.core.state.planned


async def test_an_update_goes_behind_the_plan_on_a_stream_without_an_assignment_too() -> None:
    async with wired("sync", "ab") as job:
        assert accepted(job.arrive("a", job.push("a"))) == [1]
        job.conductor.happen(e.Detached("a", 1))
        job.attach("a")
        job.conductor.happen(e.Prepared("a", 1, fingerprint=b"m", version=0, assigned=1))
        assert went_out(job, "a") == []
        job.arrive("b", job.push("b"))
        await job.reach(1)
        assert went_out(job, "a") == [("plan", 1)] + [("plan 1", 1)] * 3
