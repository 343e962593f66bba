"""The contract between control and a shard, as `Shard` states it, on the one in the server's process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from pushes import MANIFEST, assembly, build, cut_plan, dense

from gradwire.compressors import Payload, Plan
from gradwire.compressors.kernels import saying
from gradwire.proto.messages import Update
from gradwire.proto.wire import decode_envelope
from gradwire.server.job.events import Apply, Contribution, Exclude, MemberLost, Open, PushKey, Substitute
from gradwire.server.shard.reports import Applied, Final
from gradwire.server.shard.shard import EncodedValues, Shard
from gradwire.server.shard.store import DivergedError, Encoded


def order(version: int, *keys: PushKey, rate_factor: float = 1.0) -> Apply:
    contributions = tuple(
        Contribution(key=key, rank=rank, samples=1, loss=0.0) for rank, key in enumerate(keys)
    )
    return Apply(version=version, contributions=contributions, rate_factor=rate_factor, opened_at=0.0)


class Storing(Shard):
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


@asynccontextmanager
async def opened(plan: Plan | None = None) -> AsyncGenerator[Storing]:
    """A shard whose parameters are zeros; every stored push has to be gone in the end."""
    local = Storing()
    try:
        assert local.reported.manifest is None
        assert await local.open(MANIFEST, assembly(0, 0, 0), plan or MANIFEST.plan(), lambda: True)
        assert local.reported.manifest is MANIFEST
        assert local.reported.version == 0
        yield local
    finally:
        local.close()
    assert local.held == {}


def version_of(part: Encoded) -> int:
    header = decode_envelope(part.messages[0], "ServerMessage")
    assert isinstance(header, Update)
    return header.version


async def parameters(shard: Shard) -> list[float]:
    values = await shard.values()
    message: Any = decode_envelope(values.chunks[0], "ServerMessage")
    return [float(each) for each in np.frombuffer(bytes(message.data), np.float32)]


async def test_what_control_names_is_applied_and_what_it_drops_is_forgotten() -> None:
    async with opened() as shard:
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


async def test_what_is_asked_between_two_applications_is_of_the_version_between() -> None:
    async with opened() as shard:
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


async def test_a_failed_application_leaves_the_version_before_it() -> None:
    async with opened() as shard:
        keys = [PushKey("a", 1, seq) for seq in (1, 2)]
        shard.put(keys[0], 0, [dense(1, 1, 1)])
        shard.put(keys[1], 0, [dense(1, 3e38, 1)])
        await shard.apply_held(order(1, keys[0]), lambda part: None)
        with pytest.raises(DivergedError):
            await shard.apply_held(order(2, keys[1], rate_factor=10.0), lambda part: None)
        assert shard.reported.version == 1
        assert await parameters(shard) == [-1, -1, -1]


async def test_a_snapshot_of_a_worker_replaces_the_parameters_unless_it_is_not_finite() -> None:
    async with opened() as shard:
        await shard.replace(5, assembly(1, 2, 3))
        with pytest.raises(DivergedError):
            await shard.replace(6, assembly(1, float("nan"), 3))
        assert (shard.reported.version, await parameters(shard)) == (5, [1, 2, 3])
        await shard.replace(7)
        assert (shard.reported.version, await parameters(shard)) == (7, [1, 2, 3])


# ---- parts that are stepped one by one

BOTH = cut_plan((1, 1, 1))
A, B, C = PushKey("a", 1, 1), PushKey("b", 1, 1), PushKey("c", 1, 1)
MEMBERS = {1: ("a", 1, 1), 2: ("b", 1, 2), 3: ("c", 1, 5)}


class Steps:
    """A round with parts of one element, of a shard whose parameters are zeros."""

    def __init__(self, shard: Storing, version: int = 1) -> None:
        self.shard = shard
        self.begun = 0
        self.whole: list[bool] = []
        self.finals: list[Final] = []
        self.sent: list[int] = []
        self.keys = {1: A, 2: B, 3: C}
        self.version = version
        shard.open_round(Open(version=version, members=MEMBERS, rate_factor=1.0), self.send, self.report)

    def send(self, part: Encoded) -> None:
        header = decode_envelope(part.messages[0], "ServerMessage")
        assert isinstance(header, Update)
        assert header.version == self.version
        self.sent.append(header.part)

    def report(self, final: Final) -> None:
        assert final.version == self.version
        self.finals.append(final)
        if final.first or final.last:
            self.begun += not self.whole or not final.last
            self.whole.append(final.last)

    def counted(self, key: PushKey) -> set[int]:
        """Parts in which a push counts."""
        return {final.part for final in self.finals if key in final.keys}

    @property
    def missing(self) -> tuple[int, ...]:
        """Parts that are not final."""
        return tuple(sorted({0, 1, 2} - {final.part for final in self.finals}))

    def put(self, part: int, *assignments: int) -> None:
        """The gradient of each member is the number of its assignment."""
        for assignment in assignments:
            self.shard.put(self.keys[assignment], part, [dense(assignment)], assignment)

    async def settled(self) -> list[int]:
        """Parts that have gone out by now, in order."""
        await self.shard.digest()
        await asyncio.sleep(0)
        return self.sent

    async def close(self, *assignments: int) -> list[float]:
        """The round closes with the pushes of these members. Returns the parameters."""
        contributions = tuple(
            Contribution(key=self.keys[each], rank=each - 1, samples=MEMBERS[each][2], loss=0.0)
            for each in assignments
        )
        given = Apply(version=self.version, contributions=contributions, rate_factor=1.0, opened_at=0.0)
        await self.shard.apply_held(given, self.send)
        assert sorted(await self.settled()) == [0, 1, 2], "each part goes out once"
        return [-each for each in await parameters(self.shard)]


ALL = (1 * 1 + 2 * 2 + 3 * 5) / 8
WITHOUT_B = (1 * 1 + 3 * 5) / 6


@asynccontextmanager
async def in_parts() -> AsyncGenerator[Steps]:
    async with opened(plan=BOTH) as shard:
        yield Steps(shard)


def near(*expected: float) -> Any:
    return pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_a_part_is_stepped_and_sent_as_soon_as_the_last_member_has_stored_it(
    order: tuple[int, ...],
) -> None:
    async with in_parts() as steps:
        for done, part in enumerate(order):
            steps.put(part, 3, 1)
            assert await steps.settled() == list(order[:done])
            assert steps.begun == bool(done)
            assert True not in steps.whole
            steps.put(part, 2)
            assert steps.begun == 1
            assert await steps.settled() == list(order[: done + 1])
        assert steps.shard.reported.version == 0
        assert await steps.close(1, 2, 3) == near(ALL, ALL, ALL)


async def test_what_is_stored_twice_is_stepped_once() -> None:
    async with in_parts() as steps:
        for _ in range(2):
            steps.put(1, 1, 2, 3)
        assert await steps.settled() == [1]
        steps.put(0, 1, 2, 3)
        steps.put(2, 1, 2, 3)
        assert await steps.close(1, 2, 3) == near(ALL, ALL, ALL)


@pytest.mark.parametrize("before", range(4))
async def test_a_member_that_is_given_up_counts_in_the_parts_that_were_final_and_in_no_other(
    before: int,
) -> None:
    async with in_parts() as steps:
        for part in range(3):
            steps.put(part, 2)  # all of its push is here
        for part in range(before):
            steps.put(part, 1, 3)
        steps.shard.change_round(Exclude(assignments=(2,)))
        assert steps.counted(B) == set(range(before))
        for part in range(before, 3):
            steps.put(part, 1, 3)
        assert await steps.settled() == [0, 1, 2]
        steps.shard.drop(B)
        assert steps.counted(B) == set(range(before)), "told again as often as it is asked for"
        expected = [ALL] * before + [WITHOUT_B] * (3 - before)
        assert await steps.close(1, 3) == near(*expected)


async def test_parts_that_waited_for_nobody_else_are_final_when_that_member_is_given_up() -> None:
    async with in_parts() as steps:
        steps.put(0, 1, 3)
        steps.put(2, 1, 3)
        steps.put(1, 1)
        steps.shard.change_round(Exclude(assignments=(2,)))
        assert await steps.settled() == [0, 2]
        steps.put(1, 3)
        assert await steps.close(1, 3) == near(WITHOUT_B, WITHOUT_B, WITHOUT_B)


async def test_of_members_who_are_given_up_at_once_nothing_is_stepped() -> None:
    """The round may be given up with them, and their samples go out again."""
    async with in_parts() as steps:
        steps.put(0, 1, 2)
        steps.put(1, 2, 3)
        steps.shard.change_round(
            Exclude(
                assignments=(
                    1,
                    3,
                    2,
                )
            )
        )
        assert (steps.begun, await steps.settled()) == (0, [])
        steps.put(2, 1, 2, 3)
        assert steps.begun == 0, "nobody is waited for, and nothing comes of it"
        for key in (A, B, C):
            steps.shard.drop(key)
        again = Steps(steps.shard)
        again.keys = {each: PushKey(key.worker, 2, 1) for each, key in steps.keys.items()}
        for part in (2, 1, 0):
            again.put(part, 2, 3, 1)
        assert steps.sent == []
        assert again.begun == 1
        assert await again.close(1, 2, 3) == near(ALL, ALL, ALL)


async def test_nothing_is_stepped_while_a_place_is_vacant() -> None:
    """Its member is lost, and had stored everything; then it is back."""
    async with in_parts() as steps:
        for part in range(3):
            steps.put(part, 2)
        steps.put(0, 1, 3)
        steps.shard.change_round(MemberLost(assignments=(2,)))
        steps.put(1, 1, 3)
        assert await steps.settled() == [0]
        steps.shard.change_round(Substitute(lost=2, assignment=2, worker="b", incarnation=1))
        assert await steps.settled() == [0, 1]
        steps.put(2, 1, 3)
        assert await steps.close(1, 2, 3) == near(ALL, ALL, ALL)


@pytest.mark.parametrize("before", range(3))
async def test_who_takes_a_lost_members_place_pushes_what_is_not_final_in_its_rank(before: int) -> None:
    async with in_parts() as steps:
        other = PushKey("c", 1, 2)
        for part in range(3):
            steps.put(part, 2, 3)
        for part in range(before):
            steps.put(part, 1)
        steps.shard.change_round(MemberLost(assignments=(2,)))
        steps.put(before, 1)
        steps.shard.change_round(Substitute(lost=2, assignment=9, worker="c", incarnation=1))
        assert steps.missing == tuple(range(before, 3))
        steps.put(2, 1)
        steps.put(2, 2)  # it is back, and does not know
        assert await steps.settled() == list(range(before))
        steps.shard.drop(B)
        for part in range(before + 1, 3):
            steps.put(part, 1)
        for part in range(before, 3):
            steps.shard.put(other, part, [dense(2)], 9)
            assert await steps.settled() == list(range(part + 1))
        assert steps.whole == [False, True]
        assert steps.counted(B) == set(range(before))
        assert steps.counted(other) == set(range(before, 3))
        steps.keys[2] = other
        assert await steps.close(1, 2, 3) == near(ALL, ALL, ALL)
        assert steps.counted(B) == set(range(before)), "it will ask when it is back"


async def test_if_the_next_one_is_lost_too_another_takes_its_place() -> None:
    async with in_parts() as steps:
        one, other = PushKey("a", 1, 2), PushKey("c", 1, 2)
        for part in range(3):
            steps.put(part, 1, 3)
        steps.shard.change_round(MemberLost(assignments=(2,)))
        steps.shard.change_round(Substitute(lost=2, assignment=8, worker="a", incarnation=1))
        steps.shard.put(one, 1, [dense(2)], 8)
        steps.shard.change_round(MemberLost(assignments=(8,)))
        steps.shard.change_round(Substitute(lost=8, assignment=9, worker="c", incarnation=1))
        assert steps.missing == (0, 2)
        for part in (0, 2):
            steps.shard.put(other, part, [dense(2)], 9)
        steps.shard.drop(one)
        assert steps.counted(one) == {1}
        steps.keys[2] = other
        assert await steps.close(1, 2, 3) == near(ALL, ALL, ALL)


async def test_a_place_that_nobody_takes_is_given_up() -> None:
    async with in_parts() as steps:
        steps.put(0, 1, 2, 3)
        steps.shard.change_round(MemberLost(assignments=(2,)))
        for part in (1, 2):
            steps.put(part, 1, 3)
        assert await steps.settled() == [0]
        steps.shard.change_round(Exclude(assignments=(2,)))
        steps.shard.change_round(Substitute(lost=2, assignment=2, worker="b", incarnation=1))
        assert await steps.settled() == [0, 1, 2]
        steps.shard.drop(B)
        assert await steps.close(1, 3) == near(ALL, WITHOUT_B, WITHOUT_B)


async def test_an_empty_part_contributes_nothing_and_its_weight_goes_to_the_others() -> None:
    async with in_parts() as steps:
        for part in range(3):
            steps.put(part, 1, 3)
        steps.put(0, 2)
        for part in (1, 2):
            steps.shard.put(B, part, [], 2)
        assert await steps.settled() == [0, 1, 2]
        assert await steps.close(1, 2, 3) == near(ALL, WITHOUT_B, WITHOUT_B)


async def test_a_part_of_which_everybody_sends_nothing_stays_as_it_is() -> None:
    async with in_parts() as steps:
        for key, assignment in ((A, 1), (B, 2), (C, 3)):
            steps.shard.put(key, 1, [], assignment)
        for part in (0, 2):
            steps.put(part, 1, 2, 3)
        assert await steps.close(1, 2, 3) == near(ALL, 0, ALL)


async def test_a_push_that_is_dropped_counts_in_the_parts_that_were_final_alone() -> None:
    """Dropping what is stored, and not final, has the part wait for what comes in its place."""
    async with in_parts() as steps:
        steps.put(0, 1, 2, 3)
        steps.put(1, 2)
        steps.shard.drop(B)
        steps.put(1, 1, 3)
        assert await steps.settled() == [0]
        later = PushKey("b", 1, 2)
        for part in range(3):
            steps.shard.put(later, part, [dense(20)], 2)
        steps.put(2, 1, 3)
        assert await steps.settled() == [0, 1, 2]
        assert steps.counted(B) == {0}
        assert steps.counted(later) == {1, 2}
        steps.keys[2] = later
        other = (1 * 1 + 20 * 2 + 3 * 5) / 8
        assert await steps.close(1, 2, 3) == near(ALL, other, other)


async def test_what_is_not_final_when_the_round_closes_is_stepped_then() -> None:
    """Of a member that was given up, and had pushed everything before."""
    async with in_parts() as steps:
        steps.put(1, 1, 2, 3)
        steps.put(0, 1, 3)
        steps.put(2, 1, 3)
        assert await steps.settled() == [1]
        assert await steps.close(1, 3) == near(WITHOUT_B, ALL, WITHOUT_B)
        steps.shard.drop(B)


async def test_a_round_that_nobody_is_left_in_leaves_the_other_parts_alone() -> None:
    async with in_parts() as steps:
        steps.put(1, 1, 2, 3)
        steps.shard.change_round(
            Exclude(
                assignments=(
                    1,
                    2,
                    3,
                )
            )
        )
        for key in (A, B, C):
            steps.shard.drop(key)
        assert await steps.close() == near(0, ALL, 0)
        assert steps.shard.reported.version == 1


async def test_who_asks_for_the_parameters_gets_none_of_a_version_that_is_half_made() -> None:
    async with in_parts() as steps:
        assert (await steps.shard.values()).version == 0
        steps.put(0, 1, 2, 3)
        asked = asyncio.ensure_future(parameters(steps.shard))
        await steps.settled()
        assert not asked.done()
        steps.put(1, 1, 2, 3)
        steps.put(2, 1, 2, 3)
        await steps.settled()
        assert not asked.done()
        await steps.close(1, 2, 3)
        assert [-each for each in await asked] == near(ALL, ALL, ALL)


async def test_a_part_that_diverges_fails_the_version_when_the_round_closes() -> None:
    async with opened(plan=BOTH) as shard:
        members = {1: ("a", 1, 1)}
        sent: list[Encoded] = []
        shard.open_round(Open(version=1, members=members, rate_factor=10.0), sent.append, lambda final: None)
        for part, value in enumerate((1.0, 3e38, 1.0)):
            shard.put(A, part, [dense(value)], 1)
        await shard.digest()
        assert len(sent) == 1, "nothing goes out behind it"
        with pytest.raises(DivergedError):
            await shard.apply_held(order(1, A, rate_factor=10.0), sent.append)
        assert (shard.reported.version, await parameters(shard)) == (0, [0, 0, 0])


async def test_going_back_takes_out_the_parts_of_a_version_that_is_not_whole() -> None:
    async with in_parts() as steps:
        for part in range(3):
            steps.put(part, 1, 2, 3)
        whole = await steps.close(1, 2, 3)
        other = Steps(steps.shard, version=2)
        other.keys = {each: PushKey(key.worker, 1, 2) for each, key in steps.keys.items()}
        other.put(2, 1, 2, 3)
        other.put(0, 1, 2, 3)
        assert await other.settled() == [2, 0]
        await steps.shard.undo()
        assert steps.shard.reported.version == 1
        for key in other.keys.values():
            steps.shard.drop(key)
        values = await steps.shard._run(  # pyright: ignore[reportPrivateUsage]
            lambda: [float(each) for each in steps.shard._opened.parameters[0]]  # pyright: ignore[reportPrivateUsage]
        )
        assert [-each for each in values] == whole


def test_plans_say_the_norms_of_the_first_parameters() -> None:
    async def test() -> None:
        await local.open(MANIFEST, assembly(3, 0, -4), MANIFEST.plan(), lambda: True)
        assert local.reported.plan.norms == (5.0,)

    local = Shard(build)
    try:
        asyncio.run(test())
    finally:
        local.close()


# ---- learning rates that come with pushes


async def test_a_version_is_stepped_at_the_rates_of_its_pushes() -> None:
    async with opened() as shard:
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


async def test_parts_are_stepped_at_the_rates_of_their_pushes() -> None:
    async with in_parts() as steps:
        for part in (2, 0, 1):
            for assignment, key in steps.keys.items():
                steps.shard.put(key, part, [dense(8)], assignment, (0.5,))
        assert await steps.settled() == [2, 0, 1]
        assert await steps.close(1, 2, 3) == [4, 4, 4]


def test_a_shard_says_that_it_compiles_and_leaves_the_rest_when_it_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warm_up(stopped: Callable[[], bool]) -> None:
        saying.compiling()
        while not stopped():
            time.sleep(0.01)

    caplog.set_level("INFO")
    monkeypatch.setattr("gradwire.server.shard.shard.warm_up", warm_up)
    shard = Shard(build)
    shard.start()
    shard.close()
    assert saying.COMPILING in caplog.messages
