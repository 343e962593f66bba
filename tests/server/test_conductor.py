"""Pushes between their stream, control and the shard, in the server's own pieces without sockets."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
from pushes import MANIFEST, held
from stepping import core_of
from wired import PLAN, Wired, accepted, reasons, wired

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import part_transfer
from gradwire.server.calls.pushes import Pushes
from gradwire.server.job import events as e
from gradwire.server.streams.outbox import STALLED_S, end_stalled


async def test_a_duplicate_that_arrives_as_its_round_closes_takes_nothing_away() -> None:
    """Both are handled before the reducer begins: `a` has opened another stream and sends its push again."""
    async with wired("sync", "ab") as job:
        first, second = job.push("a"), job.push("b")
        assert accepted(job.arrive("a", first)) == [1]
        assert accepted(job.arrive("b", second)) == [1]
        assert accepted(job.arrive("a", first)) == [1]
        assert await job.reach(1) == [-1, -1, -1]


async def test_a_queued_push_whose_duplicate_arrives_when_it_is_named_is_applied() -> None:
    async with wired("async", "ab") as job:
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


async def test_an_exception_within_a_decision_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: Any, **__: Any) -> None:
        raise KeyError("missing")

    job = Wired("sync", "ab")
    await job.open()
    job.arrive("a", job.push("a"))
    monkeypatch.setattr(job.conductor.core.mode, "take", take)
    with pytest.raises(KeyError, match="missing"):
        job.arrive("b", job.push("b"))
    assert job.conductor.tasks.failed.is_set()
    assert job.conductor.tasks.failure == "the job cannot continue: KeyError('missing')"
    job.shard.close()


async def test_pushes_of_coded_mode_leave_nothing_in_the_shard() -> None:
    async with wired("coded", "a") as job:
        for seq in range(1, 6):
            exchanged = m.Exchanged(crc32c=1, computing_seconds=0.1, clipped=0)
            commit = job.commit("a", (), seq=seq, parts=(), exchanged=exchanged)
            job.arrive("a", [commit])
        assert job.core.state.version == 5


async def test_parts_come_in_any_order_and_a_damaged_one_once_more() -> None:
    async with wired("sync", "a") as job:
        values = (1.0, 2.0, 4.0)
        assert job.arrive("a", job.part(2, 4.0)) == []
        assert reasons(job.arrive("a", job.part(0, 1.0, damaged=True))) == [(1, 0, Reason.CHECKSUM)]
        assert job.arrive("a", [job.commit("a", values)]) == []
        assert job.arrive("a", job.part(1, 2.0)) == []
        assert accepted(job.arrive("a", job.part(0, 1.0))) == [1]
        assert await job.reach(1) == [-1, -2, -4]


async def test_a_part_that_is_not_valid_drops_its_push_whole_and_its_commit_gets_the_same_answer() -> None:
    """Messages behind it on the stream had been sent before the worker heard of it."""
    async with wired("sync", "a") as job:
        messages = job.push("a", (1.0, math.nan, 1.0))
        refused = (1, None, Reason.NON_FINITE)
        assert reasons(job.arrive("a", messages)) == [refused, refused]
        assert job.core.state.accepted_pushes == 0
        assert reasons(job.arrive("a", messages[-1:])) == [refused], "the first answer may have been lost"
        assert accepted(job.arrive("a", job.push("a", seq=2))) == [1]
        assert await job.reach(1) == [-1, -1, -1]


@pytest.mark.parametrize("before", range(4))
async def test_an_abandoned_push_never_counts_whatever_overtakes_its_abandon(before: int) -> None:
    async with wired("sync", "a") as job:
        *parts, commit = job.push("a")
        job.arrive("a", parts[: 2 * before])
        assert job.arrive("a", [m.Abandon(seq=1)]) == []
        assert len(held(job.conductor.ledger)) == 0
        assert job.arrive("a", parts[2 * before :]) == []
        assert reasons(job.arrive("a", [commit])) == [(1, None, Reason.SEQUENCE)]
        assert job.core.state.accepted_pushes == 0
        assert accepted(job.arrive("a", job.push("a", seq=2))) == [1]
        await job.reach(1)


async def test_a_part_has_the_time_of_a_lease_to_go_on() -> None:
    """The link takes minutes for a chunk, between two of which there are no heartbeats."""
    async with wired("sync", "a", lease_seconds=3 * STALLED_S) as job:
        job.arrive("a", [job.part(0)[0]])
        outbox, began = job.conductor.streams["a"].outbox, job.conductor.streams["a"].chunk_at
        end_stalled([job.conductor.streams["a"]], 3 * STALLED_S, began + 3 * STALLED_S)
        assert outbox.ended_with is None
        end_stalled([job.conductor.streams["a"]], 3 * STALLED_S, began + 3 * STALLED_S + 1)
        assert outbox.ended_with is not None


async def test_a_part_of_which_nothing_follows_ends_its_stream_and_comes_again() -> None:
    async with wired("sync", "a") as job:
        header, chunk = job.part(0)
        job.arrive("a", [header])
        outbox = job.conductor.streams["a"].outbox
        began = job.conductor.streams["a"].chunk_at
        end_stalled(job.conductor.streams.values(), 10.0, began + STALLED_S)
        assert outbox.ended_with is None
        end_stalled(job.conductor.streams.values(), 10.0, began + STALLED_S + 1)
        assert outbox.ended_with is not None
        assert not outbox.final
        assert "worker 'a', push 1, part 0: expected the rest of it" in outbox.ended_with.message
        job.attach("a")
        assert accepted(job.arrive("a", [header, chunk, *job.part(1), *job.part(2), job.commit("a")])) == [1]
        end_stalled(job.conductor.streams.values(), 10.0, began + 1000)
        assert job.conductor.streams["a"].outbox.ended_with is None, "nothing is on its way"
        await job.reach(1)


async def test_what_is_wrong_after_a_push_was_accepted_takes_nothing_from_it() -> None:
    async with wired("sync", "ab") as job:
        first = job.push("a")
        assert accepted(job.arrive("a", first)) == [1]
        again = job.commit("a") if job.core.state.roster.members["a"].work else first[-1]
        assert isinstance(again, m.Commit)
        assert accepted(job.arrive("a", [replace(again, loss=math.nan)])) == [1]
        job.arrive("a", [m.Abandon(seq=1)])
        assert accepted(job.arrive("b", job.push("b"))) == [1]
        assert await job.reach(1) == [-1, -1, -1]


async def test_a_worker_whose_lease_is_over_comes_back_to_what_it_had_sent() -> None:
    """It is no member when its push is complete; on its next stream it says only what is missing."""
    async with wired("sync", "a") as job:
        commit = job.commit("a")
        *parts, last = [*job.part(0), *job.part(1), *job.part(2)]
        job.arrive("a", [*parts[:4], commit])
        job.core.step(e.Tick(), time.monotonic() + 60)
        assert "a" not in job.core.state.roster.members
        stream = job.conductor.streams["a"]
        header = parts[4]
        assert isinstance(header, m.PartHeader)
        arriving = stream.arriving
        arriving.begin(header, MANIFEST, PLAN)
        with pytest.raises(Refused) as caught:
            await Pushes(job.conductor, stream).take(last)  # type: ignore[arg-type]
        assert caught.value.refusal.reason is Reason.NOT_A_MEMBER
        job.attach("a")
        job.conductor.happen(e.Prepared("a", 1, fingerprint=b"m", version=0, assigned=commit.assignment))
        assert job.conductor.ledger.stored(("a", 1)) == (m.Stored(seq=1, parts=(0, 1, 2)),)
        assert reasons(job.arrive("a", [commit])) == [(1, None, Reason.STALE)], "its samples were given back"
        assert len(held(job.conductor.ledger)) == 0
        assert accepted(job.arrive("a", job.push("a", seq=2))) == [1]
        await job.reach(1)


async def test_what_a_member_that_is_gone_had_not_committed_is_forgotten() -> None:
    async with wired("sync", "a") as job:
        job.arrive("a", job.part(0))
        assert len(held(job.conductor.ledger)) == 1
        job.conductor.happen(e.Detached("a", 1))
        job.conductor.happen(e.Joined("a", 2, compressor="none"))
        job.conductor.forget_gone()


@pytest.mark.parametrize(
    ("parts", "right"), [((0,), True), ((0, 1, 2), True), ((1, 2), False), ((1,), False), ((0, 1), False)]
)
async def test_a_member_of_a_group_pushes_its_parts_or_all_of_them(
    parts: tuple[int, ...], right: bool
) -> None:
    async with wired("sync:redundancy=2", "ab") as job:
        work = job.core.state.roster.members["a"].work
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


@pytest.mark.parametrize("credit", [0, 2])
async def test_with_a_credit_workers_are_told_what_has_become_of_each_part(credit: int) -> None:
    """Also of one that comes again; a damaged one has its answer."""
    async with wired("sync", "a") as job:
        job.shard.reported.plan = replace(PLAN, credit=credit)
        damaged, *again = job.part(0, damaged=True), *job.part(1), *job.part(1)
        outcomes = job.arrive("a", [*damaged, *again])
        assert [each.part for each in outcomes] == [0]
        told = [each for each in job.sent["a"] if isinstance(each, m.Stored)]
        assert told == ([m.Stored(seq=1, parts=(1,))] * 2 if credit else [])
        assert accepted(job.arrive("a", job.push("a"))) == [1]
        await job.reach(1)


async def test_parts_may_be_on_their_way_at_once_and_an_abandoned_push_takes_up_no_room() -> None:
    async with wired("sync", "a") as job:
        stream = job.conductor.streams["a"]
        parts = [job.part(number) for number in range(3)]
        job.arrive("a", [header for header, _ in parts])
        job.arrive("a", [m.Abandon(seq=1)])
        assert not any(stream.arriving.header(part_transfer(1, number)) for number in range(3))
        again = [job.part(number, seq=2, assignment=1) for number in range(3)]
        job.arrive("a", [header for header, _ in again])
        chunks = [chunk for _, chunk in reversed(again)]
        assert accepted(job.arrive("a", [*chunks, job.commit("a", seq=2)])) == [1]
        assert await job.reach(1) == [-1, -1, -1]


@pytest.mark.parametrize(
    ("mode", "rules", "came", "versions"),
    [
        *(("async", {}, "abc", 3), ("stale:bound=3", {}, "abc", 3)),
        *(("sync", {"overlap": each}, "ab", 1) for each in ("backward", "both")),
        ("sync", {}, "", 0),
    ],
)
async def test_what_has_come_when_a_server_is_told_to_stop_is_applied(
    mode: str, rules: dict[str, Any], came: str, versions: int
) -> None:
    """Pushes that are queued, or an open round of those that have pushed; without any it is not closed."""
    async with wired(mode, "abc", **rules) as job:
        for worker in came:
            assert accepted(job.arrive(worker, job.push(worker)))
        await job.conductor.stop("it was told to")
        assert job.core.state.version == job.shard.reported.version == versions
        store: Any = job.shard._opened  # pyright: ignore[reportPrivateUsage]
        assert [value for values in store.parameters for value in values.reshape(-1).tolist()] == [
            -versions
        ] * 3


@pytest.mark.parametrize("mode", ["sync:redundancy=3", "sync:stragglers=1"])
def test_pushes_that_are_of_no_use_by_themselves_are_left_at_a_stop(mode: str) -> None:
    job = core_of(mode, min_workers=3)
    assert job.mode.drain(0.0) == []


async def test_nothing_is_applied_by_a_server_that_stops_because_it_cannot() -> None:
    async with wired("sync", "abc") as job:
        job.arrive("a", job.push("a"))
        job.conductor.tasks.failed.set()
        await job.conductor.stop("it cannot go on")
        assert job.core.state.version == 0
        job.conductor.tasks.failed.clear()
        assert held(job.conductor.ledger) == [e.PushKey("a", 1, 1)]
        job.conductor.ledger.adopt_plan()
