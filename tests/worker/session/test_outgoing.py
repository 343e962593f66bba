"""What is said on a stream, and what is said again on the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.wire import decode_envelope
from gradwire.worker.session.outgoing import Outgoing, Transfer

HELLO = m.Hello(job="j", worker="w", incarnation=1)
MANIFEST = Manifest((m.Tensor(name="weight", shape=(4,), dtype="float32"),), 8)


def transfer(header: m.Push | m.Packet, number: int) -> Transfer:
    return Transfer(header, number, [np.zeros(16, np.uint8)], 1024)


def push(seq: int) -> Transfer:
    return transfer(m.Push(seq=seq, assignment=1, base_version=0, samples=1, tensors=()), seq)


def packet(exchange: int) -> Transfer:
    return transfer(m.Packet(exchange=exchange, index=0, elements=4), 1 << 40)


async def drained(outgoing: Outgoing) -> list[object]:
    """The headers of everything that is queued."""
    found: list[object] = []
    while not outgoing.idle:
        try:
            first, *_ = await asyncio.wait_for(outgoing.next(), 0.01)
        except TimeoutError:
            break
        found.append(decode_envelope(first, "WorkerMessage"))
    return found


Kinds = Callable[[Outgoing], list[str]]


@pytest.fixture
def kinds() -> Iterator[Kinds]:
    """What is queued, by kind; always on the same event loop."""
    with asyncio.Runner() as runner:
        yield lambda outgoing: [type(each).__name__ for each in runner.run(drained(outgoing))]


def test_a_new_stream_hears_everything_that_is_still_true(kinds: Kinds) -> None:
    outgoing = Outgoing()
    outgoing.ready(MANIFEST)  # before there is a stream
    outgoing.push(push(1))
    outgoing.push(push(2))
    outgoing.report(m.Evaluation(version=1, epoch=1, metrics={}))
    for _ in range(2):
        outgoing.begin(HELLO)
        assert kinds(outgoing) == ["Hello", "Ready", "Evaluation", "Push", "Push"]
        outgoing.end()
    outgoing.settle(1)
    outgoing.begin(HELLO)
    assert kinds(outgoing) == ["Hello", "Ready", "Evaluation", "Push"]


def test_what_is_sent_once_is_lost_with_its_stream(kinds: Kinds) -> None:
    outgoing = Outgoing()
    outgoing.send(packet(1))
    outgoing.begin(HELLO)
    outgoing.send(packet(1))
    assert kinds(outgoing) == ["Hello", "Packet"]


def test_packets_of_an_exchange_that_was_given_up_do_not_go_out(kinds: Kinds) -> None:
    outgoing = Outgoing()
    outgoing.begin(HELLO)
    outgoing.send(packet(1))
    outgoing.send(packet(2))
    outgoing.exchange = 2
    assert kinds(outgoing) == ["Hello", "Packet"]


@pytest.mark.parametrize("busy", [False, True])
def test_a_heartbeat_goes_out_only_where_nothing_else_does(busy: bool, kinds: Kinds) -> None:
    outgoing = Outgoing()
    outgoing.beat("computing")  # to nobody
    outgoing.begin(HELLO)
    if not busy:
        assert kinds(outgoing) == ["Hello"]
    outgoing.beat("computing")
    assert kinds(outgoing) == (["Hello"] if busy else ["Heartbeat"])


def test_it_is_idle_when_everything_has_been_written() -> None:
    async def run() -> None:
        outgoing = Outgoing()
        assert outgoing.idle
        outgoing.begin(HELLO)
        assert not outgoing.idle
        await outgoing.next()
        assert not outgoing.idle  # that message is being written
        waiting = asyncio.create_task(outgoing.next())
        await asyncio.sleep(0)
        assert outgoing.idle
        waiting.cancel()

    asyncio.run(run())
