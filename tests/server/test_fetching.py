"""Clients that fetch the parameters do not hinder each other (finding F9)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gradwire.common.parts import Plan
from gradwire.compressors import DenseFormat, DensePayload, Payload
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Chunk, FetchHeader, Tensor
from gradwire.proto.refusal import Refused
from gradwire.proto.transfer import Assembly, encode_chunks
from gradwire.proto.wire import CHUNK_BYTES, decode_envelope
from gradwire.server.calls import fetching
from gradwire.server.calls.fetching import AT_ONCE, Fetches
from gradwire.server.shard.lent import Lent
from gradwire.server.shard.local import LocalShard
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.store import Float32

MANIFEST = Manifest((Tensor(name="weight", shape=(600, 600), dtype="float32"),), 8)


def assembly(value: int = 0) -> Assembly:
    """Parameters whose bytes are all of one value."""
    empty: list[Payload] = [
        DensePayload(format=DenseFormat.FLOAT32, elements=spec.elements, data=np.empty(0, np.uint8))
        for spec in MANIFEST.specs
    ]
    made = Assembly(0, empty, chunk_bytes=CHUNK_BYTES, worker="w", names=["weight"])
    for message in encode_chunks(0, [np.full(spec.elements * 4, value, np.uint8) for spec in MANIFEST.specs]):
        chunk = decode_envelope(message, "ServerMessage")
        assert isinstance(chunk, Chunk)
        made.add(chunk)
    return made


async def opened() -> LocalShard:
    def build(manifest: Manifest, values: Sequence[Float32], plan: Plan) -> SteppedStore:
        options = parse_optimizer("sgd")
        return SteppedStore(manifest, values, "none", lambda ps: Optimizer(options, ps, 0.1), plan=plan)

    shard = LocalShard(build)
    await shard.open(MANIFEST, assembly(), MANIFEST.plan(), lambda: None)
    return shard


async def test_clients_that_stall_are_cut_off_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STALLED_S", 0.1)

    fetches, ours = Fetches("job"), await opened()

    async def stall(message: Any) -> None:
        await asyncio.Event().wait()

    read: list[Any] = []

    async def take(message: Any) -> None:
        read.append(message)

    stalling = [asyncio.create_task(fetches.send(ours, MANIFEST, stall)) for _ in range(AT_ONCE)]
    await asyncio.sleep(0)
    await asyncio.wait_for(fetches.send(ours, MANIFEST, take), 10)
    assert isinstance(read[0], FetchHeader)
    assert len(read) == 1 + 3  # chunks of 512 KiB
    for task in stalling:
        with pytest.raises(Refused, match="expected a chunk read every"):
            await task
    ours.close()


async def test_a_fetch_sends_the_version_that_it_began_with_and_copies_it_only_if_that_changes() -> None:
    fetches, ours = Fetches("job"), await opened()
    writing, go_on = asyncio.Event(), asyncio.Event()
    chunks: list[list[bytes]] = [[], [], []]

    async def fetch(place: int, *, wait: bool) -> None:
        async def write(message: Any) -> None:
            if isinstance(message, bytes):
                chunks[place].append(message)
            writing.set()
            if wait:
                await go_on.wait()

        await fetches.send(ours, MANIFEST, write)

    first = asyncio.create_task(fetch(0, wait=True))
    await writing.wait()
    await fetch(1, wait=False)
    values = await ours.values()
    assert isinstance(values.chunks, Lent)
    assert values.chunks.shares_memory
    await ours.replace(1, assembly(1))
    go_on.set()
    await first
    await fetch(2, wait=False)
    assert chunks[0] == chunks[1] != chunks[2]
    assert not values.chunks.shares_memory
    ours.close()
