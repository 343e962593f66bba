"""Clients that fetch the parameters do not hinder each other (finding F9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradwire.optimizer import build_optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import FetchHeader, Tensor
from gradwire.proto.refusal import Refused
from gradwire.server import fetching
from gradwire.server.fetching import AT_ONCE, Fetches
from gradwire.server.shard.store import Store

MANIFEST = Manifest((Tensor(name="weight", shape=(600, 600), dtype="float32"),), 8)


def store() -> Store:
    values = [np.zeros(spec.elements, np.float32) for spec in MANIFEST.specs]
    options = parse_optimizer("sgd")
    return Store(MANIFEST, values, "none", lambda parameters: build_optimizer(options, parameters, 0.1))


async def at_once(function: Callable[[Store], Any], argument: Store) -> Any:
    return function(argument)


def test_clients_that_stall_are_cut_off_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STALLED_S", 0.1)

    async def run() -> None:
        fetches, ours = Fetches("job"), store()

        async def stall(message: Any) -> None:
            await asyncio.Event().wait()

        read: list[Any] = []

        async def take(message: Any) -> None:
            read.append(message)

        stalling = [asyncio.create_task(fetches.send(ours, at_once, stall)) for _ in range(AT_ONCE)]
        await asyncio.sleep(0)
        await asyncio.wait_for(fetches.send(ours, at_once, take), 10)
        assert isinstance(read[0], FetchHeader)
        assert len(read) == 1 + 3  # chunks of 512 KiB
        for task in stalling:
            with pytest.raises(Refused, match="expected a chunk read every"):
                await task

    asyncio.run(run())


def test_one_version_is_encoded_once_and_kept_only_while_it_is_sent() -> None:
    async def run() -> None:
        fetches, ours = Fetches("job"), store()
        writing, go_on = asyncio.Event(), asyncio.Event()
        chunks: list[list[bytes]] = [[], [], []]

        async def fetch(place: int, *, wait: bool) -> None:
            async def write(message: Any) -> None:
                if isinstance(message, bytes):
                    chunks[place].append(message)
                writing.set()
                if wait:
                    await go_on.wait()

            await fetches.send(ours, at_once, write)

        first = asyncio.create_task(fetch(0, wait=True))
        await writing.wait()
        await fetch(1, wait=False)
        go_on.set()
        await first
        assert [id(one) for one in chunks[0]] == [id(one) for one in chunks[1]]
        await fetch(2, wait=False)
        assert chunks[2] == chunks[0]
        assert chunks[2][0] is not chunks[0][0]

    asyncio.run(run())
