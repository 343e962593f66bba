"""Bad input of coded mode over a real socket: a typed refusal, and no change of state."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from daemons import MANIFEST, Daemons, Raw, gradient, state_of, status, talk

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.transfer import encode_chunks, packet_transfer

ELEMENTS = MANIFEST.elements


@asynccontextmanager
async def two(daemons: Daemons, mode: str) -> AsyncGenerator[tuple[Raw, Raw]]:
    """Two workers in training; their server lives on."""
    server = daemons.server("--min-workers", "2", "--mode", mode, "--lease-seconds", "30")
    async with talk(server.address) as make:
        first, second = make("a"), make("b")
        await first.train()
        await second.train()
        await first.receive(m.Assignment)
        await second.receive(m.Assignment)
        yield first, second
    assert server.process.poll() is None


@pytest.mark.parametrize(("index", "elements"), [(1, ELEMENTS), (0, 1 << 50)])
async def test_packets_that_are_wrong_end_the_stream(daemons: Daemons, index: int, elements: int) -> None:
    """The first is the other worker's."""
    async with two(daemons, "coded") as (first, second):
        before = await status(second)
        await first.send(m.Packet(exchange=1, index=index, elements=elements))
        with pytest.raises(Refused) as caught:
            await first.receive(m.Outcome)
        assert caught.value.refusal.reason is Reason.PACKET
        assert caught.value.refusal.worker == "a"
        assert state_of(await status(second))[:4] == state_of(before)[:4]


async def test_a_packet_is_handed_on_as_it_is(daemons: Daemons) -> None:
    async with two(daemons, "coded") as (first, second):
        data = np.arange(ELEMENTS, dtype=np.uint32)
        packet = m.Packet(exchange=1, index=0, elements=ELEMENTS)
        await first.send(packet)
        for chunk in encode_chunks(packet_transfer(packet), [data.view(np.uint8)]):
            await first.send(chunk)
        assert await second.receive(m.Packet) == packet
        chunk = await second.receive(m.Chunk)
        while chunk.transfer != packet_transfer(packet):  # of the parameters, which the packet may overtake
            chunk = await second.receive(m.Chunk)
        np.testing.assert_array_equal(chunk.data.view(np.uint32), data)


def report(samples: int) -> m.Commit:
    """Return the report of a finished exchange."""
    exchanged = m.Exchanged(crc32c=0)
    return m.Commit(
        seq=1, assignment=1, base_version=0, samples=samples, parts=0, digest=0, exchanged=exchanged
    )


async def test_a_push_of_tensors_is_refused_in_coded_mode(daemons: Daemons) -> None:
    async with two(daemons, "coded") as (first, second):
        before = await status(second)
        for chunk in await first.push(gradient()):
            await first.send(chunk)
        outcome = await first.receive(m.Outcome)
        assert outcome.refusal is not None
        assert outcome.refusal.reason is Reason.PACKET
        assert state_of(await status(second)) == state_of(before)


async def test_a_report_of_an_exchange_is_refused_in_other_modes(daemons: Daemons) -> None:
    async with two(daemons, "sync") as (first, second):
        before = await status(second)
        await first.send(report(samples=4))
        outcome = await first.receive(m.Outcome)
        assert outcome.refusal is not None
        assert outcome.refusal.reason is Reason.PACKET
        assert state_of(await status(second)) == state_of(before)


@pytest.mark.parametrize("mode", ["sync", "coded"])
async def test_a_snapshot_that_nobody_asked_for_is_refused(daemons: Daemons, mode: str) -> None:
    async with two(daemons, mode) as (first, second):
        before = await status(second)
        await first.send(m.Snapshot(version=0))
        with pytest.raises(Refused) as caught:
            await first.receive(m.Outcome)
        assert caught.value.refusal.reason is Reason.PACKET
        assert state_of(await status(second))[:4] == state_of(before)[:4]
