"""The contract between control and a shard, as `Shard` states it, on the one in the server's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from pushes import MANIFEST, assembly, build, dense

from gradwire.proto.messages import Update
from gradwire.proto.wire import decode_envelope
from gradwire.server.job.events import Apply, Contribution, CopyKey, PushKey
from gradwire.server.shard.shard import Shard, Values
from gradwire.server.shard.store import DivergedError, Encoded


def order(version: int, *keys: PushKey, rate_factor: float = 1.0) -> Apply:
    contributions = tuple(
        Contribution(key=key, rank=rank, samples=1, loss=0.0) for rank, key in enumerate(keys)
    )
    return Apply(version=version, contributions=contributions, rate_factor=rate_factor, opened_at=0.0)


def opened(test: Callable[[Shard], Coroutine[Any, Any, None]]) -> Shard:
    """Run a test on a shard whose parameters are zeros; every stored push has to be gone in the end."""
    local = Shard(build)

    async def run() -> None:
        assert local.manifest is None
        assert await local.open(MANIFEST, assembly(0, 0, 0), lambda: True)
        assert local.manifest is MANIFEST
        assert local.version == 0
        await test(local)

    try:
        asyncio.run(run())
    finally:
        local.close()
    assert local.stored == 0
    return local


def version_of(part: Encoded) -> int:
    header = decode_envelope(part.messages[0], "ServerMessage")
    assert isinstance(header, Update)
    return header.version


async def parameters(shard: Shard) -> list[float]:
    values = await shard.values()
    message: Any = decode_envelope(values.chunks[0], "ServerMessage")
    return [float(each) for each in np.frombuffer(bytes(message.data), np.float32)]


def test_what_control_names_is_applied_and_what_it_drops_is_forgotten() -> None:
    async def test(shard: Shard) -> None:
        first, second, other = PushKey("a", 1, 1), PushKey("b", 1, 1), PushKey("b", 2, 1)
        shard.put(first, 0, [dense(1, 2, 3)])
        shard.put(second, 0, [dense(3, 2, 1)])
        shard.put(second, 0, [dense(9, 9, 9)])  # a duplicate changes nothing
        shard.put(other, 0, [dense(7, 7, 7)])  # an incarnation of its own
        assert shard.stored == 3
        shard.drop(other)
        shard.drop(other)
        parts: list[Encoded] = []
        assert await shard.apply(order(1, first, second), parts.append) == 0
        assert ([part.whole for part in parts], shard.version) == ([True], 1)
        assert await parameters(shard) == [-2, -2, -2]

    opened(test)


def test_what_is_asked_between_two_applications_is_of_the_version_between() -> None:
    async def test(shard: Shard) -> None:
        keys = [PushKey("a", 1, seq) for seq in range(1, 4)]
        for key in keys:
            shard.put(key, 0, [dense(1, 1, 1)])
        parts: list[Encoded] = []
        applied: list[asyncio.Future[int]] = []
        snapshots: list[asyncio.Future[list[Encoded]]] = []
        values: list[asyncio.Future[Values]] = []
        for version, key in enumerate(keys, start=1):
            applied.append(asyncio.ensure_future(shard.apply(order(version, key), parts.append)))
            snapshots.append(asyncio.ensure_future(shard.snapshot()))
            values.append(asyncio.ensure_future(shard.values()))
        await asyncio.gather(*applied)
        assert [version_of(part) for part in parts] == [1, 2, 3]
        assert [version_of(part) for (part,) in await asyncio.gather(*snapshots)] == [1, 2, 3]
        assert [each.version for each in await asyncio.gather(*values)] == [1, 2, 3]

    opened(test)


def test_a_failed_application_leaves_the_version_before_it() -> None:
    async def test(shard: Shard) -> None:
        keys = [PushKey("a", 1, seq) for seq in (1, 2)]
        shard.put(keys[0], 0, [dense(1, 1, 1)])
        shard.put(keys[1], 0, [dense(1, 3e38, 1)])
        await shard.apply(order(1, keys[0]), lambda part: None)
        with pytest.raises(DivergedError):
            await shard.apply(order(2, keys[1], rate_factor=10.0), lambda part: None)
        assert shard.version == 1
        assert await parameters(shard) == [-1, -1, -1]

    opened(test)


def test_a_snapshot_of_a_worker_replaces_the_parameters_unless_it_is_not_finite() -> None:
    async def test(shard: Shard) -> None:
        good, bad, late = (CopyKey("a", 1, version) for version in (5, 6, 7))
        shard.put_copy(good, assembly(1, 2, 3))
        shard.put_copy(bad, assembly(1, float("nan"), 3))
        shard.put_copy(late, assembly(1, 2, 3))
        shard.drop(late)
        await shard.load(good)
        with pytest.raises(DivergedError):
            await shard.load(bad)
        assert (shard.version, await parameters(shard)) == (5, [1, 2, 3])

    opened(test)
