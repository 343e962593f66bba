"""The contract between control and a shard, as `Shard` states it, on the one in the server's process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from pushes import MANIFEST, assembly, build, dense

from gradwire.common.parts import Plan
from gradwire.compressors import Payload
from gradwire.compressors.kernels import notices
from gradwire.proto.messages import Update
from gradwire.proto.wire import decode_envelope
from gradwire.server.job.events import Apply, Contribution, PushKey
from gradwire.server.shard.local import LocalShard
from gradwire.server.shard.reports import Applied
from gradwire.server.shard.shard import EncodedValues
from gradwire.server.shard.store import DivergedError, Encoded


def order(version: int, *keys: PushKey, rate_factor: float = 1.0) -> Apply:
    contributions = tuple(
        Contribution(key=key, rank=rank, samples=1, loss=0.0) for rank, key in enumerate(keys)
    )
    return Apply(version=version, contributions=contributions, rate_factor=rate_factor, opened_at=0.0)


class Storing(LocalShard):
    """A shard with the parts of pushes, which the push ledger has otherwise."""

    def __init__(self) -> None:
        super().__init__(build)
        self.held: dict[PushKey, dict[int, Sequence[Payload]]] = {}
        self.rates: dict[PushKey, Sequence[float]] = {}

    def put(
        self,
        key: PushKey,
        part: int,
        payloads: Sequence[Payload],
        assignment: int = 0,
        learning_rates: Sequence[float] = (),
    ) -> None:
        self.rates[key] = learning_rates
        self.held.setdefault(key, {}).setdefault(part, payloads)
        super().put(key, part, payloads, assignment, learning_rates)

    def drop(self, key: PushKey) -> None:
        self.held.pop(key, None)
        super().drop(key)

    def apply_held(self, order: Apply, send: Callable[[Encoded], None]) -> Awaitable[Applied]:
        pushes = [self.held.pop(each.key) if each.samples else {} for each in order.contributions]
        rates = next((rates for each in order.contributions if (rates := self.rates.get(each.key))), ())
        return self.apply(order, pushes, send, rates)


def opened(test: Callable[[Storing], Coroutine[Any, Any, None]], plan: Plan | None = None) -> LocalShard:
    """Run a test on a shard whose parameters are zeros; every stored push has to be gone in the end."""
    local = Storing()

    async def run() -> None:
        assert local.reported.manifest is None
        assert await local.open(MANIFEST, assembly(0, 0, 0), plan or MANIFEST.plan(), lambda: True)
        assert local.reported.manifest is MANIFEST
        assert local.reported.version == 0
        await test(local)

    try:
        asyncio.run(run())
    finally:
        local.close()
    assert local.held == {}
    return local


def version_of(part: Encoded) -> int:
    header = decode_envelope(next(iter(part.messages)), "ServerMessage")
    assert isinstance(header, Update)
    return header.version


async def parameters(shard: LocalShard) -> list[float]:
    values = await shard.values()
    message: Any = decode_envelope(next(iter(values.chunks)), "ServerMessage")
    return [float(each) for each in np.frombuffer(bytes(message.data), np.float32)]


def test_what_control_names_is_applied_and_what_it_drops_is_forgotten() -> None:
    async def test(shard: Storing) -> None:
        first, second, other = PushKey("a", 1, 1), PushKey("b", 1, 1), PushKey("b", 2, 1)
        shard.put(first, 0, [dense(1, 2, 3)])
        shard.put(second, 0, [dense(3, 2, 1)])
        shard.put(second, 0, [dense(9, 9, 9)])  # a duplicate changes nothing
        shard.put(other, 0, [dense(7, 7, 7)])  # an incarnation of its own
        assert len(shard.held) == 3
        shard.drop(other)
        shard.drop(other)
        parts: list[Encoded] = []
        report = await shard.apply_held(order(1, first, second), parts.append)
        assert (report.version, report.passed_over) == (1, 0)
        assert ([part.whole for part in parts], shard.reported.version) == ([True], 1)
        assert await parameters(shard) == [-2, -2, -2]

    opened(test)


def test_what_is_asked_between_two_applications_is_of_the_version_between() -> None:
    async def test(shard: Storing) -> None:
        keys = [PushKey("a", 1, seq) for seq in range(1, 4)]
        for key in keys:
            shard.put(key, 0, [dense(1, 1, 1)])
        parts: list[Encoded] = []
        applied: list[asyncio.Future[Applied]] = []
        snapshots: list[asyncio.Future[list[Encoded]]] = []
        values: list[asyncio.Future[EncodedValues]] = []
        for version, key in enumerate(keys, start=1):
            applied.append(asyncio.ensure_future(shard.apply_held(order(version, key), parts.append)))
            snapshots.append(asyncio.ensure_future(shard.snapshot()))
            values.append(asyncio.ensure_future(shard.values()))
        await asyncio.gather(*applied)
        assert [version_of(part) for part in parts] == [1, 2, 3]
        assert [version_of(part) for (part,) in await asyncio.gather(*snapshots)] == [1, 2, 3]
        assert [each.version for each in await asyncio.gather(*values)] == [1, 2, 3]

    opened(test)


def test_a_failed_application_leaves_the_version_before_it() -> None:
    async def test(shard: Storing) -> None:
        keys = [PushKey("a", 1, seq) for seq in (1, 2)]
        shard.put(keys[0], 0, [dense(1, 1, 1)])
        shard.put(keys[1], 0, [dense(1, 3e38, 1)])
        await shard.apply_held(order(1, keys[0]), lambda part: None)
        with pytest.raises(DivergedError):
            await shard.apply_held(order(2, keys[1], rate_factor=10.0), lambda part: None)
        assert shard.reported.version == 1
        assert await parameters(shard) == [-1, -1, -1]

    opened(test)


def test_a_snapshot_of_a_worker_replaces_the_parameters_unless_it_is_not_finite() -> None:
    async def test(shard: Storing) -> None:
        await shard.replace(5, assembly(1, 2, 3))
        with pytest.raises(DivergedError):
            await shard.replace(6, assembly(1, float("nan"), 3))
        assert (shard.reported.version, await parameters(shard)) == (5, [1, 2, 3])
        await shard.replace(7)
        assert (shard.reported.version, await parameters(shard)) == (7, [1, 2, 3])

    opened(test)


def test_plans_say_the_norms_of_the_first_parameters() -> None:
    async def test() -> None:
        await local.open(MANIFEST, assembly(3, 0, -4), MANIFEST.plan(), lambda: True)
        assert local.reported.plan.norms == (5.0,)

    local = LocalShard(build)
    try:
        asyncio.run(test())
    finally:
        local.close()


# ---- learning rates that come with pushes


def test_a_version_is_stepped_at_the_rates_of_its_pushes() -> None:
    async def test(shard: Storing) -> None:
        for version, rates in enumerate([(0.5,), (), (0.25,)], start=1):
            key = PushKey("w", 1, version)
            shard.put(key, 0, [dense(4, 4, 4)], 0, rates)
            await shard.apply_held(order(version, key, rate_factor=2.0), lambda part: None)
        assert await parameters(shard) == [-4 * (0.5 + 2.0 + 0.25)] * 3
        dropped, other = PushKey("w", 1, 8), PushKey("v", 1, 1)
        shard.put(dropped, 0, [dense(4, 4, 4)], 0, (0.5,))
        shard.drop(dropped)
        shard.put(dropped, 0, [dense(4, 4, 4)])  # the same again, without
        shard.put(other, 0, [dense(4, 4, 4)])
        await shard.apply_held(order(4, dropped, other), lambda part: None)
        assert await parameters(shard) == [-4 * (0.5 + 2.0 + 0.25 + 1.0)] * 3

    opened(test)


def test_a_shard_says_that_it_compiles_and_leaves_the_rest_when_it_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warm_up(stopped: Callable[[], bool]) -> None:
        notices.compiling()
        while not stopped():
            time.sleep(0.01)

    caplog.set_level("INFO")
    monkeypatch.setattr("gradwire.server.shard.local.warm_up", warm_up)
    shard = LocalShard(build)
    shard.start()
    shard.close()
    assert notices.COMPILING in caplog.messages
