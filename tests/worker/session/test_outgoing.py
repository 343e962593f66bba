"""Messages on a stream, and those that are repeated on the next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re

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
    outgoing.open_stream(HELLO)
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


def set_turns(outgoing: Outgoing, *turns: int, credit: int = 0, number: int = 1) -> None:
    """A plan of as many parts."""
    parts = arrange([1] * len(turns), [1] * len(turns), ())
    outgoing.queue.plan = dataclasses.replace(parts, turns=turns, credit=credit, number=number)


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


def described(message: object) -> str:
    """Its kind; of a push, with its number and the part's."""
    match message:
        case m.PartHeader():
            return f"Part {message.seq}.{message.part}"
        case m.Commit() | m.Abandon():
            return f"{type(message).__name__} {message.seq}"
        case _:
            return type(message).__name__


def packet(exchange: int) -> Transfer:
    return transfer(m.Packet(exchange=exchange, index=0, elements=4), 1 << 40)


class Story:
    """Performs the actions of a story, which are methods of this class or of `Outgoing`."""

    def __init__(self) -> None:
        self.outgoing = Outgoing()

    def act(self, action: str) -> None:
        """action: a word, numbers, and named numbers."""
        word, *rest = action.split()
        named = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", action)}
        given = [int(each) if each.isdigit() else each for each in rest if "=" not in each]
        getattr(self if hasattr(self, word) else self.outgoing, word)(*given, **named)

    def ready(self) -> None:
        self.outgoing.ready(MANIFEST)

    def begin(self) -> None:
        self.outgoing.open_stream(HELLO)

    def welcome(self, *stored: str, plan: int = 1) -> None:
        """stored: texts such as "4:0+2" for parts 0 and 2 of push 4."""
        pairs = [each.split(":") for each in stored]
        known = [m.Stored(seq=int(seq), parts=tuple(map(int, re.findall(r"\d+", of)))) for seq, of in pairs]
        self.outgoing.welcome(welcome(*known, plan=plan))

    def end(self) -> None:
        self.outgoing.end_stream()

    def push(self, seq: int, parts: int = 1) -> None:
        push(self.outgoing, seq, parts)

    def part(self, seq: int, number: int, size: int = 16) -> None:
        self.outgoing.queue_part(seq, number, part(seq, number, size))

    def commit(self, seq: int, parts: int = 1) -> None:
        self.outgoing.queue_commit(commit(seq, parts))

    def packet(self, exchange: int) -> None:
        self.outgoing.queue.put(packet(exchange))

    def exchange(self, number: int) -> None:
        self.outgoing.queue.exchange = number

    def resend(self, seq: int, number: int | None = None) -> None:
        self.outgoing.resend(seq, number)

    def stored(self, seq: int, number: int) -> None:
        self.outgoing.stored(seq, (number,))

    def beat(self) -> None:
        self.outgoing.say(BEAT)

    def report(self) -> None:
        self.outgoing.repeat(m.Evaluation(version=1, epoch=1, metrics={}))

    def rate(self, bytes_s: int) -> None:
        self.outgoing.queue.limit_rate(bytes_s)

    def turns(self, *turns: int, credit: int = 0, number: int = 1) -> None:
        set_turns(self.outgoing, *turns, credit=credit, number=number)


# Each line: actions, then the messages that are written; after `>>` with the chunks, after `>>N` at most N
# messages. A story begins without a stream.
OPENED = "begin, welcome > Hello\n"
STORIES = {
    "a new stream hears everything that is still true": """
        ready, push 1 2, push 2, report
        begin > Hello, Ready, Evaluation
        welcome > Part 1.0, Part 1.1, Commit 1, Part 2.0, Commit 2
        end, begin > Hello, Ready, Evaluation
        welcome > Part 1.0, Part 1.1, Commit 1, Part 2.0, Commit 2
        end, settle 1, begin, welcome > Hello, Ready, Evaluation, Part 2.0, Commit 2
    """,
    "the server has to say first what it has of open pushes": """
        begin, part 1 0, resend 1 0 > Hello
        part 1 1, welcome, part 1 2, commit 1 3 > Part 1.0, Part 1.1, Part 1.2, Commit 1
    """,
    "parts that the server has are not sent again, and commits are": """
        push 4 3, push 5 3, push 6 3, part 7 0, begin > Hello
        welcome 4:0+2 5:0+1+2 7:0 > Part 4.1, Commit 4, Commit 5, Part 6.0, Part 6.1, Part 6.2, Commit 6
    """,
    "a push that only the server knows is abandoned": """
        part 1 0, abandon 1, push 2, begin > Hello
        welcome 1:0 2: > Abandon 1, Part 2.0, Commit 2
    """,
    "a damaged part is sent again by itself, and a damaged push whole": f"""
        {OPENED}
        push 1 2 > Part 1.0, Part 1.1, Commit 1
        resend 1 1 > Part 1.1
        resend 1 > Part 1.0, Part 1.1, Commit 1
        resend 1 9, settle 1, resend 1, resend 1 0 >
    """,
    "a short message overtakes the chunks of a transfer": f"""
        {OPENED}
        part 1 0 3000, part 1 1, commit 1 2 >>2 Part 1.0, Chunk
        beat, report >> Heartbeat, Evaluation, Chunk, Chunk, Part 1.1, Chunk, Commit 1
    """,
    "a pace holds back chunks and nothing that is short": f"""
        {OPENED}
        rate 1000, part 1 0 6000, part 1 1 6000 >> Part 1.0, Chunk
        beat >> Heartbeat
        rate 0 >> 5*Chunk, Part 1.1, 6*Chunk
    """,
    "a commit does not wait for the pace": f"""
        {OPENED}
        rate 1000, part 1 0 1024, commit 1 >> Part 1.0, Chunk, Commit 1
    """,
    "a stream that breaks in a transfer leaves nothing for the next": f"""
        {OPENED}
        part 1 0 3000, part 1 1 >>2 Part 1.0, Chunk
        beat, end, begin >> Hello
        welcome 1:1 >> Part 1.0, 3*Chunk
    """,
    "a message that is sent once is lost with its stream": """
        packet 1, begin, packet 1 > Hello, Packet
    """,
    "packets of an exchange that was given up do not go out": """
        begin, packet 1, packet 2, exchange 2 > Hello, Packet
    """,
    "a heartbeat goes out where there is a stream": """
        beat, begin > Hello
        beat > Heartbeat
    """,
    "of a push under another plan than the server's only the commit is sent again": """
        push 1 2, push 2, begin > Hello
        welcome 2: plan=2 > Commit 1, Commit 2
    """,
    # Neither queued parts, nor the rest of the part that is being written, nor later ones.
    "no more goes out of an unwanted push than its commit": f"""
        {OPENED}
        part 1 0 3000, part 1 1 >>2 Part 1.0, Chunk
        unwanted 1, unwanted 1, part 1 2, resend 1 0, commit 1 3, push 2
            >> Commit 1, Part 2.0, Chunk, Commit 2
    """,
    "an unwanted push that is given up or settled says no more": f"""
        {OPENED}
        part 1 0, unwanted 1, abandon 1, unwanted 1, push 2, settle 2, unwanted 2
            > Abandon 1, Part 2.0, Commit 2
    """,
    "an unwanted push goes out whole if it is asked for after all": f"""
        {OPENED}
        push 1 2, unwanted 1 > Commit 1
        resend 1 > Part 1.0, Part 1.1, Commit 1
    """,
    "a new stream does not rely on what was unwanted before": f"""
        {OPENED}
        push 1 2, unwanted 1 > Commit 1
        end, begin > Hello
        welcome 1: > Part 1.0, Part 1.1, Commit 1
        part 1 2 > Part 1.2
    """,
    "of parts that wait the one with the least turn goes first": f"""
        {OPENED}
        turns 3 0 2 1, push 1 4 > Part 1.1, Part 1.3, Part 1.2, Part 1.0, Commit 1
    """,
    "no part overtakes the commit of an earlier push": f"""
        {OPENED}
        turns 1 0, push 1 2, push 2 2 > Part 1.1, Part 1.0, Commit 1, Part 2.1, Part 2.0, Commit 2
    """,
    "parts overtake one another only four deep": f"""
        {OPENED}
        turns 5 4 3 2 1 0
        part 1 0 2000 >>2 Part 1.0, Chunk
        part 1 1 2000 >>2 Part 1.1, Chunk
        part 1 2 2000 >>2 Part 1.2, Chunk
        part 1 3 2000 >>2 Part 1.3, Chunk
        part 1 4 2000 >>2 Chunk, Part 1.4
        part 1 5 2000 > Part 1.5
    """,
    "after a reconnect missing parts go in the order of turns": f"""
        {OPENED}
        turns 3 1 2 0, push 1 4 >>1 Part 1.3
        end, begin > Hello
        welcome 1:2 > Part 1.3, Part 1.1, Part 1.0, Commit 1
    """,
    "a damaged part that has been overtaken begins anew": f"""
        {OPENED}
        turns 1 0, part 1 0 3000 >>2 Part 1.0, Chunk
        part 1 1 2000 >>2 Part 1.1, Chunk
        resend 1 0 >> Chunk, Part 1.0, 3*Chunk
    """,
    "no more goes out of an unwanted push whose parts have overtaken one another": f"""
        {OPENED}
        turns 2 1 0, part 1 0 3000 >>2 Part 1.0, Chunk
        part 1 1 3000 >>2 Part 1.1, Chunk
        part 1 2 3000 >>2 Part 1.2, Chunk
        unwanted 1, commit 1 3 >> Commit 1
    """,
    "under another plan a part has no turn": f"""
        {OPENED}
        turns 1 0 number=2, push 1 2 > Part 1.0, Part 1.1, Commit 1
    """,
    "with a credit only so many parts are on their way": f"""
        {OPENED}
        turns 2 1 0 credit=2, push 1 3 > Part 1.2, Part 1.1
        beat > Heartbeat
        stored 1 1 > Part 1.0, Commit 1
        push 2 3 >
        settle 1 > Part 2.2, Part 2.1
    """,
    **{
        f"a credit comes back after {event}": f"""
        {OPENED}
        turns 0 1 credit=1, push 1, push 2 2 > Part 1.0, Commit 1
        {event} > {first}Part 2.0
    """
        for event, first in (
            ("resend 1 0", ""),
            ("unwanted 1", ""),
            ("abandon 1", ""),
            ("settle 1", ""),
            ("end, begin, welcome 1:0", "Hello, Commit 1, "),
        )
    },
}


@pytest.mark.parametrize("story", STORIES.values(), ids=[name.replace(" ", "_") for name in STORIES])
def test_stories(story: str) -> None:
    told = Story()
    with asyncio.Runner() as runner:
        for line in re.sub(r"\n\s+>", " >", story).split("\n"):
            actions, arrow, expected = re.fullmatch(r"([^>]*)(>>?\d*|)(.*)", line.strip()).groups()  # type: ignore[union-attr]
            for action in filter(None, map(str.strip, actions.split(","))):
                told.act(action)
            if not arrow:
                continue
            most = re.search(r"\d+", arrow)
            sent = map(described, runner.run(drained(told.outgoing, int(most[0]) if most else 99)))
            wanted = re.sub(r"(\d+)\*(\w+)", lambda found: ", ".join([found[2]] * int(found[1])), expected)
            found = [each for each in sent if ">>" in arrow or each != "Chunk"]
            assert found == [*filter(None, map(str.strip, wanted.split(",")))], line


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
    outgoing.open_stream(HELLO)
    outgoing.welcome(welcome(m.Stored(seq=1, parts=(0,))))
    assert await rated() == [(1, rates), (2, ())]


async def test_it_is_the_same_bytes_that_go_out_again() -> None:
    outgoing, sent = Outgoing(), list[list[bytes]]()
    data = np.arange(3000, dtype=np.uint16).view(np.uint8)
    header = m.PartHeader(seq=1, assignment=1, part=0, plan=1, payloads=())
    outgoing.queue_part(1, 0, Transfer(header, part_transfer(1, 0), [data], 1024))
    for _ in range(2):
        outgoing.open_stream(HELLO)
        outgoing.welcome(welcome())
        sent.append([await outgoing.queue.next() for _ in range(8)])
        outgoing.end_stream()
    assert sent[0] == sent[1]


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


async def test_it_is_idle_when_everything_has_been_written() -> None:
    outgoing = Outgoing()
    assert outgoing.queue.idle
    outgoing.open_stream(HELLO)
    assert not outgoing.queue.idle
    await outgoing.queue.next()
    assert not outgoing.queue.idle  # that message is being written
    waiting = asyncio.create_task(outgoing.queue.next())
    await asyncio.sleep(0)
    assert outgoing.queue.idle
    waiting.cancel()


def test_chunks_of_parts_that_overtook_one_another_are_of_the_right_transfer() -> None:
    async def run() -> list[int]:
        outgoing = streaming()
        set_turns(outgoing, 1, 0)
        outgoing.queue_part(1, 0, part(1, 0, 2000))
        found = await drained(outgoing, 3)
        outgoing.queue_part(1, 1, part(1, 1, 2000))
        found += await drained(outgoing)
        return [each.transfer - part_transfer(1, 0) for each in found if isinstance(each, m.Chunk)]

    assert asyncio.run(run()) == [0, 1, 1, 0]


async def test_who_waits_for_a_credit_wakes_when_it_comes() -> None:
    outgoing = streaming()
    set_turns(outgoing, 0, 1, credit=1)
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
    outgoing.open_stream(HELLO, ready=False)
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
