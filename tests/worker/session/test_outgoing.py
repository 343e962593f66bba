"""Messages on a stream, and those that are repeated on the next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gradwire.common.parts import arrange
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.transfer import part_transfer
from gradwire.proto.wire import decode_envelope
from gradwire.worker.session.outgoing import Outgoing
from gradwire.worker.session.sending import Transfer

BEAT = m.Heartbeat(activity="computing")
HELLO = m.Hello(job="j", worker="w", incarnation=1)
MANIFEST = Manifest((m.Tensor(name="weight", shape=(4,), dtype="float32"),), 8)


def welcome(*stored: m.Stored, plan: int = 1) -> m.Welcome:
    return m.Welcome(rank=0, version=0, last_seq=0, stored=stored, plan=plan)


def streaming() -> Outgoing:
    """With a stream that has been welcomed."""
    outgoing = Outgoing()
    outgoing.begin(HELLO)
    outgoing.welcome(welcome())
    return outgoing


def transfer(header: m.PartHeader | m.Packet, number: int, size: int = 16) -> Transfer:
    return Transfer(header, number, [np.zeros(size, np.uint8)], 1024)


def part(seq: int, number: int = 0, size: int = 16) -> Transfer:
    header = m.PartHeader(seq=seq, assignment=1, part=number, plan=1, payloads=())
    return transfer(header, part_transfer(seq, number), size)


def commit(seq: int, parts: int = 1) -> m.Commit:
    return m.Commit(seq=seq, assignment=1, base_version=0, samples=1, parts=parts, digest=0)


def push(outgoing: Outgoing, seq: int, parts: int = 1) -> None:
    for number in range(parts):
        outgoing.queue_part(seq, number, part(seq, number))
    outgoing.queue_commit(commit(seq, parts))


def packet(exchange: int) -> Transfer:
    return transfer(m.Packet(exchange=exchange, index=0, elements=4), 1 << 40)


async def drained(outgoing: Outgoing, most: int = 99) -> list[object]:
    """The messages that are queued."""
    found: list[object] = []
    while not outgoing.queue.idle and len(found) < most:
        try:
            message = await asyncio.wait_for(outgoing.queue.next(), 0.01)
        except TimeoutError:
            break
        found.append(decode_envelope(message, "WorkerMessage"))
    return found


Kinds = Callable[..., list[str]]
Said = Callable[..., list[str]]


def described(message: object) -> str:
    """Its kind; of a push, with its number and the part's."""
    match message:
        case m.PartHeader():
            return f"Part {message.seq}.{message.part}"
        case m.Commit() | m.Abandon():
            return f"{type(message).__name__} {message.seq}"
        case _:
            return type(message).__name__


@pytest.fixture
def said(kinds: Kinds) -> Said:
    """Return the queued messages without chunks; at most so many."""

    def without_chunks(outgoing: Outgoing, most: int = 99) -> list[str]:
        return [each for each in kinds(outgoing, most) if each != "Chunk"]

    return without_chunks


@pytest.fixture
def kinds() -> Iterator[Kinds]:
    """Yield the kinds of queued messages; always on the same event loop."""
    with asyncio.Runner() as runner:

        def all_kinds(outgoing: Outgoing, most: int = 99) -> list[str]:
            return [described(each) for each in runner.run(drained(outgoing, most))]

        yield all_kinds


def test_a_new_stream_hears_everything_that_is_still_true(said: Said) -> None:
    outgoing = Outgoing()
    outgoing.ready(MANIFEST)  # before there is a stream
    push(outgoing, 1, parts=2)
    push(outgoing, 2)
    outgoing.report(m.Evaluation(version=1, epoch=1, metrics={}))
    open_pushes = ["Part 1.0", "Part 1.1", "Commit 1", "Part 2.0", "Commit 2"]
    for _ in range(2):
        outgoing.begin(HELLO)
        assert said(outgoing) == ["Hello", "Ready", "Evaluation"]
        outgoing.welcome(welcome())
        assert said(outgoing) == open_pushes
        outgoing.end()
    outgoing.settle(1)
    outgoing.begin(HELLO)
    outgoing.welcome(welcome())
    assert said(outgoing) == ["Hello", "Ready", "Evaluation", "Part 2.0", "Commit 2"]


def test_the_server_has_to_say_first_what_it_has_of_open_pushes(said: Said) -> None:
    """Pushes until then go out with the rest, once."""
    outgoing = Outgoing()
    outgoing.begin(HELLO)
    outgoing.queue_part(1, 0, part(1, 0))
    outgoing.resend(1, 0)
    assert said(outgoing) == ["Hello"]
    outgoing.queue_part(1, 1, part(1, 1))
    outgoing.welcome(welcome())
    outgoing.queue_part(1, 2, part(1, 2))
    outgoing.queue_commit(commit(1, 3))
    assert said(outgoing) == ["Part 1.0", "Part 1.1", "Part 1.2", "Commit 1"]


def test_what_the_server_has_is_not_sent_again(said: Said) -> None:
    """The commit is, which is small and may have been lost."""
    outgoing = Outgoing()
    for seq in (4, 5, 6):
        push(outgoing, seq, parts=3)
    outgoing.queue_part(7, 0, part(7))
    outgoing.begin(HELLO)
    stored = {4: (0, 2), 5: (0, 1, 2), 7: (0,)}
    outgoing.welcome(welcome(*(m.Stored(seq=seq, parts=parts) for seq, parts in stored.items())))
    assert said(outgoing) == [
        "Hello",
        *("Part 4.1", "Commit 4"),
        "Commit 5",
        *("Part 6.0", "Part 6.1", "Part 6.2", "Commit 6"),
    ]


def test_a_push_that_only_the_server_knows_is_abandoned(said: Said) -> None:
    """It was abandoned while there was no stream, or on one that broke."""
    outgoing = Outgoing()
    outgoing.queue_part(1, 0, part(1))
    outgoing.abandon(1)
    push(outgoing, 2)
    outgoing.begin(HELLO)
    outgoing.welcome(welcome(m.Stored(seq=1, parts=(0,)), m.Stored(seq=2, parts=())))
    assert said(outgoing) == ["Hello", "Abandon 1", "Part 2.0", "Commit 2"]


def test_a_damaged_part_is_sent_again_by_itself_and_a_damaged_push_whole(said: Said) -> None:
    outgoing = streaming()
    push(outgoing, 1, parts=2)
    assert len(said(outgoing)) == 4
    outgoing.resend(1, 1)
    assert said(outgoing) == ["Part 1.1"]
    outgoing.resend(1, None)
    assert said(outgoing) == ["Part 1.0", "Part 1.1", "Commit 1"]
    outgoing.resend(1, 9)
    outgoing.settle(1)
    outgoing.resend(1, None)
    outgoing.resend(1, 0)
    assert said(outgoing) == []


async def test_the_first_part_on_each_stream_has_the_rates_of_the_push() -> None:
    outgoing = streaming()

    async def rated() -> list[tuple[int, tuple[float, ...]]]:
        headers = [each for each in await drained(outgoing) if isinstance(each, m.PartHeader)]
        return [(each.part, each.learning_rates) for each in headers]

    rates = (0.1, 0.2)
    for number in range(3):
        header = m.PartHeader(seq=1, assignment=1, part=number, plan=1, payloads=(), learning_rates=rates)
        outgoing.queue_part(1, number, transfer(header, part_transfer(1, number)))
    assert await rated() == [(0, rates), (1, ()), (2, ())]
    outgoing.resend(1, 2)
    assert await rated() == [(2, rates)]
    outgoing.begin(HELLO)
    outgoing.welcome(welcome(m.Stored(seq=1, parts=(0,))))
    assert await rated() == [(1, rates), (2, ())]


async def test_it_is_the_same_bytes_that_go_out_again() -> None:
    outgoing, sent = Outgoing(), list[list[bytes]]()
    data = np.arange(3000, dtype=np.uint16).view(np.uint8)
    header = m.PartHeader(seq=1, assignment=1, part=0, plan=1, payloads=())
    outgoing.queue_part(1, 0, Transfer(header, part_transfer(1, 0), [data], 1024))
    for _ in range(2):
        outgoing.begin(HELLO)
        outgoing.welcome(welcome())
        sent.append([await outgoing.queue.next() for _ in range(8)])
        outgoing.end()
    assert sent[0] == sent[1]


def test_what_is_short_overtakes_the_chunks_of_a_transfer(kinds: Kinds) -> None:
    outgoing = streaming()
    outgoing.queue_part(1, 0, part(1, 0, 3000))
    outgoing.queue_part(1, 1, part(1, 1))
    outgoing.queue_commit(commit(1, 2))
    assert kinds(outgoing, 3) == ["Hello", "Part 1.0", "Chunk"]
    outgoing.say(BEAT)
    outgoing.report(m.Evaluation(version=1, epoch=1, metrics={}))
    assert kinds(outgoing) == [
        *("Heartbeat", "Evaluation"),
        *("Chunk", "Chunk", "Part 1.1", "Chunk", "Commit 1"),  # in the order in which they came
    ]


def test_a_pace_holds_back_chunks_and_nothing_that_is_short(kinds: Kinds) -> None:
    outgoing = streaming()
    outgoing.queue.limit_rate(10_000)  # a chunk takes 0.1 s
    for number in range(2):
        outgoing.queue_part(1, number, part(1, number, 6000))
    assert kinds(outgoing) == ["Hello", "Part 1.0", "Chunk"]
    outgoing.say(BEAT)
    assert kinds(outgoing) == ["Heartbeat"]
    outgoing.queue.limit_rate(0)
    assert kinds(outgoing) == [*["Chunk"] * 5, "Part 1.1", *["Chunk"] * 6]


def test_a_commit_does_not_wait_for_the_pace(kinds: Kinds) -> None:
    outgoing = streaming()
    outgoing.queue.limit_rate(1000)
    outgoing.queue_part(1, 0, part(1, 0, 1024))
    outgoing.queue_commit(commit(1))
    assert kinds(outgoing) == ["Hello", "Part 1.0", "Chunk", "Commit 1"]


async def test_another_pace_wakes_who_waits_for_an_older_one() -> None:
    outgoing = streaming()
    outgoing.queue.limit_rate(10_000)
    outgoing.queue_part(1, 0, part(1, 0, 2048))
    assert len(await drained(outgoing)) == 3
    waiting = asyncio.ensure_future(outgoing.queue.next())
    await asyncio.sleep(0)
    outgoing.queue.limit_rate(0)
    assert isinstance(decode_envelope(await asyncio.wait_for(waiting, 0.05), "WorkerMessage"), m.Chunk)


def test_chunks_go_at_the_pace_also_if_one_is_late() -> None:
    async def seconds() -> float:
        outgoing = streaming()
        outgoing.queue.limit_rate(100_000)
        outgoing.queue_part(1, 0, part(1, 0, 20 * 1024))
        began = asyncio.get_running_loop().time()
        while not outgoing.queue.idle:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(outgoing.queue.next(), 0.05)
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(seconds()) > 0.15


def test_a_part_says_whether_it_had_to_wait_for_another() -> None:
    async def waited() -> list[bool]:
        outgoing = streaming()
        found: list[bool] = []
        for number in (0, 2):
            outgoing.queue_part(1, number, part(1, number))
            outgoing.queue_part(1, number + 1, part(1, number + 1))
            found += [each.waited for each in await drained(outgoing) if isinstance(each, m.PartHeader)]
        return found

    assert asyncio.run(waited()) == [False, True, False, True]


def test_a_stream_that_breaks_in_a_transfer_leaves_nothing_for_the_next(kinds: Kinds) -> None:
    outgoing = streaming()
    outgoing.queue_part(1, 0, part(1, 0, 3000))
    outgoing.queue_part(1, 1, part(1, 1))
    assert kinds(outgoing, 3) == ["Hello", "Part 1.0", "Chunk"]
    outgoing.say(BEAT)
    outgoing.end()
    outgoing.begin(HELLO)
    assert kinds(outgoing) == ["Hello"]
    outgoing.welcome(welcome(m.Stored(seq=1, parts=(1,))))
    assert kinds(outgoing) == ["Part 1.0", "Chunk", "Chunk", "Chunk"]


def test_what_is_sent_once_is_lost_with_its_stream(said: Said) -> None:
    outgoing = Outgoing()
    outgoing.queue.put(packet(1))
    outgoing.begin(HELLO)
    outgoing.queue.put(packet(1))
    assert said(outgoing) == ["Hello", "Packet"]


def test_packets_of_an_exchange_that_was_given_up_do_not_go_out(said: Said) -> None:
    outgoing = Outgoing()
    outgoing.begin(HELLO)
    outgoing.queue.put(packet(1))
    outgoing.queue.put(packet(2))
    outgoing.queue.exchange = 2
    assert said(outgoing) == ["Hello", "Packet"]


def test_a_heartbeat_goes_out_where_there_is_a_stream(said: Said) -> None:
    outgoing = Outgoing()
    outgoing.say(BEAT)  # to nobody
    outgoing.begin(HELLO)
    assert said(outgoing) == ["Hello"]
    outgoing.say(BEAT)
    assert said(outgoing) == ["Heartbeat"]


async def test_it_is_idle_when_everything_has_been_written() -> None:
    outgoing = Outgoing()
    assert outgoing.queue.idle
    outgoing.begin(HELLO)
    assert not outgoing.queue.idle
    await outgoing.queue.next()
    assert not outgoing.queue.idle  # that message is being written
    waiting = asyncio.create_task(outgoing.queue.next())
    await asyncio.sleep(0)
    assert outgoing.queue.idle
    waiting.cancel()


def test_of_a_push_under_another_plan_than_the_servers_only_the_commit_is_sent_again(said: Said) -> None:
    outgoing = Outgoing()
    push(outgoing, 1, parts=2)
    push(outgoing, 2, parts=1)
    outgoing.begin(HELLO)
    outgoing.welcome(welcome(m.Stored(seq=2, parts=()), plan=2))
    assert said(outgoing) == ["Hello", "Commit 1", "Commit 2"]


# ---- pushes that the server does without


def test_no_more_goes_out_of_an_unwanted_push_than_its_commit(kinds: Kinds) -> None:
    """Neither what is queued, nor the rest of the part that is being written, nor what is made later."""
    outgoing = streaming()
    outgoing.queue_part(1, 0, part(1, 0, 3000))
    outgoing.queue_part(1, 1, part(1, 1))
    assert kinds(outgoing, 3) == ["Hello", "Part 1.0", "Chunk"]
    outgoing.unwanted(1)
    outgoing.unwanted(1)
    outgoing.queue_part(1, 2, part(1, 2))
    outgoing.resend(1, 0)
    outgoing.queue_commit(commit(1, 3))
    push(outgoing, 2)
    assert kinds(outgoing) == ["Commit 1", "Part 2.0", "Chunk", "Commit 2"]


def test_an_unwanted_push_that_is_given_up_or_settled_says_no_more(said: Said) -> None:
    outgoing = streaming()
    outgoing.queue_part(1, 0, part(1))
    outgoing.unwanted(1)
    outgoing.abandon(1)
    outgoing.unwanted(1)
    push(outgoing, 2)
    outgoing.settle(2)
    outgoing.unwanted(2)
    assert said(outgoing) == ["Hello", "Abandon 1", "Part 2.0", "Commit 2"]


def test_an_unwanted_push_goes_out_whole_if_it_is_asked_for_after_all(said: Said) -> None:
    outgoing = streaming()
    push(outgoing, 1, parts=2)
    outgoing.unwanted(1)
    assert said(outgoing) == ["Hello", "Commit 1"]
    outgoing.resend(1, None)
    assert said(outgoing) == ["Part 1.0", "Part 1.1", "Commit 1"]


def test_a_new_stream_does_not_rely_on_what_was_unwanted_before(said: Said) -> None:
    """Nothing says that the server still knows; otherwise it says so again."""
    outgoing = streaming()
    push(outgoing, 1, parts=2)
    outgoing.unwanted(1)
    assert said(outgoing) == ["Hello", "Commit 1"]
    outgoing.end()
    outgoing.begin(HELLO)
    outgoing.welcome(welcome(m.Stored(seq=1, parts=())))
    assert said(outgoing) == ["Hello", "Part 1.0", "Part 1.1", "Commit 1"]
    outgoing.queue_part(1, 2, part(1, 2))
    assert said(outgoing) == ["Part 1.2"]


# ---- turns and a credit


def by_turns(*turns: int, credit: int = 0) -> Outgoing:
    """With a stream that has been welcomed, under a plan of as many parts."""
    outgoing = streaming()
    parts = arrange([1] * len(turns), [1] * len(turns), ())
    outgoing.queue.plan = dataclasses.replace(parts, turns=turns, credit=credit)
    return outgoing


def test_of_parts_that_wait_the_one_with_the_least_turn_goes_first(said: Said) -> None:
    outgoing = by_turns(3, 0, 2, 1)
    push(outgoing, 1, parts=4)
    assert said(outgoing) == ["Hello", "Part 1.1", "Part 1.3", "Part 1.2", "Part 1.0", "Commit 1"]


def test_no_part_overtakes_the_commit_of_an_earlier_push(said: Said) -> None:
    outgoing = by_turns(1, 0)
    push(outgoing, 1, parts=2)
    push(outgoing, 2, parts=2)
    assert said(outgoing) == ["Hello", "Part 1.1", "Part 1.0", "Commit 1", "Part 2.1", "Part 2.0", "Commit 2"]


def test_parts_overtake_one_another_only_so_often(kinds: Kinds) -> None:
    outgoing = by_turns(*reversed(range(6)))
    assert kinds(outgoing) == ["Hello"]
    sent: list[str] = []
    for number in range(6):
        outgoing.queue_part(1, number, part(1, number, 2000))
        sent += kinds(outgoing, 2)
    sent += kinds(outgoing)
    begun = [each for each in sent if each != "Chunk"]
    assert begun == [f"Part 1.{number}" for number in range(6)]
    assert sent[:8] == [each for number in range(4) for each in (f"Part 1.{number}", "Chunk")]
    assert sent[8:10] == ["Chunk", "Part 1.4"], "one had to be through first"
    assert sent.count("Chunk") == 12


def test_chunks_of_parts_that_overtook_one_another_are_of_the_right_transfer() -> None:
    async def run() -> list[int]:
        outgoing = by_turns(1, 0)
        outgoing.queue_part(1, 0, part(1, 0, 2000))
        found = await drained(outgoing, 3)
        outgoing.queue_part(1, 1, part(1, 1, 2000))
        found += await drained(outgoing)
        return [each.transfer - part_transfer(1, 0) for each in found if isinstance(each, m.Chunk)]

    assert asyncio.run(run()) == [0, 1, 1, 0]


def test_after_a_reconnect_what_is_missing_goes_in_the_order_of_turns(said: Said) -> None:
    outgoing = by_turns(3, 1, 2, 0)
    push(outgoing, 1, parts=4)
    assert said(outgoing, 2) == ["Hello", "Part 1.3"]
    outgoing.end()
    outgoing.begin(HELLO)
    outgoing.welcome(welcome(m.Stored(seq=1, parts=(2,))))
    assert said(outgoing) == ["Hello", "Part 1.3", "Part 1.1", "Part 1.0", "Commit 1"]


def test_a_damaged_part_that_has_been_overtaken_begins_anew(kinds: Kinds) -> None:
    outgoing = by_turns(1, 0)
    assert kinds(outgoing) == ["Hello"]
    outgoing.queue_part(1, 0, part(1, 0, 3000))
    assert kinds(outgoing, 2) == ["Part 1.0", "Chunk"]
    outgoing.queue_part(1, 1, part(1, 1, 2000))
    assert kinds(outgoing, 2) == ["Part 1.1", "Chunk"]
    outgoing.resend(1, 0)
    assert kinds(outgoing) == ["Chunk", "Part 1.0", *["Chunk"] * 3]


def test_no_more_goes_out_of_an_unwanted_push_whose_parts_have_overtaken_one_another(kinds: Kinds) -> None:
    outgoing = by_turns(2, 1, 0)
    assert kinds(outgoing) == ["Hello"]
    for number in range(3):
        outgoing.queue_part(1, number, part(1, number, 3000))
        assert kinds(outgoing, 2) == [f"Part 1.{number}", "Chunk"]
    outgoing.unwanted(1)
    outgoing.queue_commit(commit(1, 3))
    assert kinds(outgoing) == ["Commit 1"]


def test_under_another_plan_a_part_has_no_turn(said: Said) -> None:
    outgoing = by_turns(1, 0)
    assert outgoing.queue.plan is not None
    outgoing.queue.plan = dataclasses.replace(outgoing.queue.plan, number=2)
    push(outgoing, 1, parts=2)
    assert said(outgoing) == ["Hello", "Part 1.0", "Part 1.1", "Commit 1"]


def test_with_a_credit_only_so_many_parts_are_on_their_way(said: Said) -> None:
    outgoing = by_turns(2, 1, 0, credit=2)
    push(outgoing, 1, parts=3)
    assert said(outgoing) == ["Hello", "Part 1.2", "Part 1.1"]
    outgoing.say(BEAT)
    assert said(outgoing) == ["Heartbeat"]
    outgoing.stored(1, (1,))
    assert said(outgoing) == ["Part 1.0", "Commit 1"]
    push(outgoing, 2, parts=3)
    assert said(outgoing) == [], "two are still on their way"
    outgoing.settle(1)
    assert said(outgoing) == ["Part 2.2", "Part 2.1"]


@pytest.mark.parametrize("event", ["damage", "unwanted", "abandon", "reconnect", "settle"])
def test_a_credit_comes_back_whatever_becomes_of_a_part(said: Said, event: str) -> None:
    outgoing = by_turns(0, 1, credit=1)
    push(outgoing, 1, parts=1)
    push(outgoing, 2, parts=2)
    assert said(outgoing) == ["Hello", "Part 1.0", "Commit 1"]
    expected = ["Part 2.0"]
    match event:
        case "damage":
            outgoing.resend(1, 0)
        case "unwanted":
            outgoing.unwanted(1)
        case "abandon":
            outgoing.abandon(1)
        case "settle":
            outgoing.settle(1)
        case _:
            outgoing.end()
            outgoing.begin(HELLO)
            outgoing.welcome(welcome(m.Stored(seq=1, parts=(0,))))
            expected = ["Hello", "Commit 1", "Part 2.0"]
    assert said(outgoing) == expected


async def test_who_waits_for_a_credit_wakes_when_it_comes() -> None:
    outgoing = by_turns(0, 1, credit=1)
    push(outgoing, 1, parts=2)
    await drained(outgoing)
    waiting = asyncio.ensure_future(outgoing.queue.next())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    outgoing.stored(1, (0,))
    assert isinstance(decode_envelope(await asyncio.wait_for(waiting, 0.05), "WorkerMessage"), m.PartHeader)


async def test_a_worker_whose_thread_hangs_is_ready_once_that_goes_on_and_before_it_pushes() -> None:
    outgoing = Outgoing()
    outgoing.ready(MANIFEST)
    outgoing.begin(HELLO, ready=False)
    outgoing.welcome(welcome())
    outgoing.say(m.Heartbeat(activity="computing", stalled_seconds=700.0))
    assert await drained(outgoing) == [HELLO, m.Heartbeat(activity="computing", stalled_seconds=700.0)]
    push(outgoing, 1)
    first, *others = await drained(outgoing)
    assert isinstance(first, m.Ready)
    assert not any(isinstance(other, m.Ready) for other in others)
    assert commit(1) in others
    outgoing.wake()
    assert not await drained(outgoing)
