"""Pushes that are too late: their workers hear of it before the commit, and nothing is kept of them."""

from __future__ import annotations

import pytest
from pushes import held
from wired import Message, Wired, accepted, hints, reasons, wired

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason
from gradwire.server.calls.pushes import Pushes


def late(job: Wired) -> tuple[list[Message], int]:
    """`c` has sent one part and the header of another when its round closes without it. Returns all of its
    push, and how many messages of it have come."""
    push = job.push("c")
    job.arrive("c", push[:3])
    job.arrive("a", job.push("a"))
    assert hints(job, "c") == []
    job.arrive("b", job.push("b"))
    return push, 3


async def test_a_push_is_unwanted_as_soon_as_its_round_has_closed() -> None:
    async with wired("sync:backup=1", "abc") as job:
        push, come = late(job)
        assert hints(job, "c") == [1], "at once, not with its next part"
        assert await job.reach(1) == [-1, -1, -1]
        assert len(held(job.conductor.ledger)) == 0
        assert job.arrive("c", push[come : come + 1]) == [], "the rest of the part that was arriving"
        assert hints(job, "c") == [1]
        assert job.arrive("c", push[come + 1 : -1]) == []
        assert hints(job, "c") == [1], "once on each stream"
        assert len(held(job.conductor.ledger)) == 0
        assert reasons(job.arrive("c", push[-1:])) == [(1, None, Reason.STALE)]


@pytest.mark.parametrize("rest", [0, 1])
async def test_an_unwanted_push_is_decided_on_without_its_parts(rest: int) -> None:
    """Its worker skips them; or gives it up."""
    async with wired("sync:backup=1", "abc") as job:
        push, _ = late(job)
        if rest:
            assert job.arrive("c", [m.Abandon(seq=1)]) == []
            assert job.arrive("c", push[:2]) == []
            assert hints(job, "c") == [1], "it is over"
        else:
            assert reasons(job.arrive("c", push[-1:])) == [(1, None, Reason.STALE)]
            assert reasons(job.arrive("c", push[-1:])) == [(1, None, Reason.STALE)], "told again"
        assert job.conductor.ledger.stored(("c", 1)) == ()


async def test_a_part_that_is_being_scanned_when_its_push_is_unwanted_is_not_stored() -> None:
    async with wired("sync:backup=1", "abc") as job:
        header, chunk, *_ = job.push("c")
        assert isinstance(header, m.PartHeader)
        assert isinstance(chunk, m.Chunk)
        stream = job.conductor.streams["c"]
        pushes = Pushes(job.conductor, stream)
        pushes._begin(header)  # pyright: ignore[reportPrivateUsage]
        stream.arriving.add(chunk)
        complete = stream.arriving.take()
        assert complete is not None
        job.arrive("a", job.push("a"))
        job.arrive("b", job.push("b"))
        await pushes._scan(*complete)  # pyright: ignore[reportPrivateUsage]
        assert await job.reach(1) == [-1, -1, -1]


async def test_what_was_unwanted_is_asked_for_again_where_it_would_be_accepted() -> None:
    """A member was lost, and what it was given was taken from it; then it had that back."""
    async with wired("sync", "a") as job:
        push = job.push("a")
        job.arrive("a", push[:2])
        member = job.core.state.roster.members["a"]
        work = job.core.state.roster.relieve(member)
        assert work is not None
        job.arrive("a", push[2:4])
        assert (hints(job, "a"), held(job.conductor.ledger)) == ([1], [])
        job.core.state.roster.assign(member, work)
        job.arrive("a", push[4:-1])
        assert (hints(job, "a"), held(job.conductor.ledger)) == ([1], []), "dropped is dropped"
        assert reasons(job.arrive("a", push[-1:])) == [(1, None, Reason.CHUNK)]
        assert accepted(job.arrive("a", push)) == [1]
        assert await job.reach(1) == [-1, -1, -1]
