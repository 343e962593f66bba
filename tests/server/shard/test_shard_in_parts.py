"""Parts that a shard steps one by one, while members are lost, replaced and given up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from pushes import MANIFEST, assembly, build, cut_plan, dense

from gradwire.proto.messages import Update
from gradwire.proto.wire import decode_envelope
from gradwire.server.job.events import Apply, Contribution, Exclude, MemberLost, Open, PushKey, Substitute
from gradwire.server.shard.local import LocalShard
from gradwire.server.shard.reports import Final
from gradwire.server.shard.store import DivergedError, Encoded

from .test_shard import Storing, opened, parameters
from .test_shard import order as order_of

BOTH = cut_plan((1, 1, 1))
Order = Callable[[], Any]
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
        header = decode_envelope(next(iter(part.messages)), "ServerMessage")
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
        await self.shard.copy()
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


def in_parts(test: Callable[[Steps], Coroutine[Any, Any, None]]) -> LocalShard:
    async def run(shard: Storing) -> None:
        await test(Steps(shard))

    return opened(run, plan=BOTH)


def near(*expected: float) -> Any:
    return pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_part_is_stepped_and_sent_as_soon_as_the_last_member_has_stored_it(order: tuple[int, ...]) -> None:
    async def test(steps: Steps) -> None:
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

    in_parts(test)


def test_what_is_stored_twice_is_stepped_once() -> None:
    async def test(steps: Steps) -> None:
        for _ in range(2):
            steps.put(1, 1, 2, 3)
        assert await steps.settled() == [1]
        steps.put(0, 1, 2, 3)
        steps.put(2, 1, 2, 3)
        assert await steps.close(1, 2, 3) == near(ALL, ALL, ALL)

    in_parts(test)


@pytest.mark.parametrize("before", range(4))
def test_a_member_that_is_given_up_counts_in_the_parts_that_were_final_and_in_no_other(before: int) -> None:
    async def test(steps: Steps) -> None:
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

    in_parts(test)


def test_of_members_who_are_given_up_at_once_nothing_is_stepped() -> None:
    """The round may be given up with them, and their samples go out again."""

    async def test(steps: Steps) -> None:
        steps.put(0, 1, 2)
        steps.put(1, 2, 3)
        steps.shard.change_round(Exclude(assignments=(1, 3, 2)))
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

    in_parts(test)


def test_nothing_is_stepped_while_a_place_is_vacant() -> None:
    """Its member is lost, and had stored everything; then it is back."""

    async def test(steps: Steps) -> None:
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

    in_parts(test)


@pytest.mark.parametrize("before", range(3))
def test_who_takes_a_lost_members_place_pushes_what_is_not_final_in_its_rank(before: int) -> None:
    async def test(steps: Steps) -> None:
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

    in_parts(test)


def test_an_empty_part_contributes_nothing_and_its_weight_goes_to_the_others() -> None:
    async def test(steps: Steps) -> None:
        for part in range(3):
            steps.put(part, 1, 3)
        steps.put(0, 2)
        for part in (1, 2):
            steps.shard.put(B, part, [], 2)
        assert await steps.settled() == [0, 1, 2]
        assert await steps.close(1, 2, 3) == near(ALL, WITHOUT_B, WITHOUT_B)

    in_parts(test)


def test_a_round_that_nobody_is_left_in_leaves_the_other_parts_alone() -> None:
    async def test(steps: Steps) -> None:
        steps.put(1, 1, 2, 3)
        steps.shard.change_round(Exclude(assignments=(1, 2, 3)))
        for key in (A, B, C):
            steps.shard.drop(key)
        assert await steps.close() == near(0, ALL, 0)
        assert steps.shard.reported.version == 1

    in_parts(test)


def test_who_asks_for_the_parameters_gets_none_of_a_version_that_is_half_made() -> None:
    async def test(steps: Steps) -> None:
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

    in_parts(test)


def test_a_part_that_diverges_fails_the_version_when_the_round_closes() -> None:
    async def test(shard: Storing) -> None:
        members = {1: ("a", 1, 1)}
        sent: list[Encoded] = []
        shard.open_round(Open(version=1, members=members, rate_factor=10.0), sent.append, lambda final: None)
        for part, value in enumerate((1.0, 3e38, 1.0)):
            shard.put(A, part, [dense(value)], 1)
        await shard.copy()
        assert len(sent) == 1, "nothing goes out behind it"
        with pytest.raises(DivergedError):
            await shard.apply_held(order_of(1, A, rate_factor=10.0), sent.append)
        assert (shard.reported.version, await parameters(shard)) == (0, [0, 0, 0])

    opened(test, plan=BOTH)


def test_going_back_takes_out_the_parts_of_a_version_that_is_not_whole() -> None:
    async def test(steps: Steps) -> None:
        for part in range(3):
            steps.put(part, 1, 2, 3)
        whole = await steps.close(1, 2, 3)
        other = Steps(steps.shard, version=2)
        other.keys = {each: PushKey(key.worker, 1, 2) for each, key in steps.keys.items()}
        other.put(2, 1, 2, 3)
        other.put(0, 1, 2, 3)
        assert await other.settled() == [2, 0]
        await steps.shard.copy(undo=True)
        assert steps.shard.reported.version == 1
        for key in other.keys.values():
            steps.shard.drop(key)
        values = await steps.shard._run(  # pyright: ignore[reportPrivateUsage]
            lambda: [float(each) for each in steps.shard._opened.parameters[0]]  # pyright: ignore[reportPrivateUsage]
        )
        assert [-each for each in values] == whole

    in_parts(test)


def history(shard: LocalShard, sent: list[Encoded], finals: list[Final], random: Random) -> list[Order]:
    """Orders of four versions: rounds in which a member loses its parts and its stream and sends the parts
    again; measured norms; a new plan; a version that gets another number."""
    orders: list[Order] = []
    plan = BOTH
    for version in (1, 2, 4, 5):
        keys = {10 * version + rank: PushKey("abc"[rank], 1, version) for rank in range(3)}
        pushes = {
            assignment: {
                part: [dense(*(random.random() for _ in range(bounds.elements)))]
                for part, bounds in enumerate(plan.parts)
            }
            for assignment in keys
        }
        puts: dict[int, list[Order]] = {
            assignment: [
                partial(shard.put, keys[assignment], part, payloads, assignment)
                for part, payloads in push.items()
            ]
            for assignment, push in pushes.items()
        }
        lost = random.choice([*keys])
        round_ = [put for each in puts.values() for put in each]
        round_.append(partial(shard.drop, keys[lost]))
        round_.append(partial(shard.change_round, MemberLost(assignments=(lost,))))
        random.shuffle(round_)
        back = Substitute(lost=lost, assignment=lost, worker=keys[lost].worker, incarnation=1)
        members = {each: (key.worker, 1, rank + 1) for rank, (each, key) in enumerate(keys.items())}
        opening = Open(version=version, members=members, rate_factor=1.0)
        contributions = tuple(
            Contribution(key=key, rank=rank, samples=rank + 1, loss=0.0)
            for rank, key in enumerate(keys.values())
        )
        closing = Apply(version=version, contributions=contributions, rate_factor=1.0, opened_at=0.0)
        orders += [
            partial(shard.open_round, opening, sent.append, finals.append),
            *round_,
            partial(shard.change_round, back),
            *puts[lost],
            partial(shard.apply, closing, [*pushes.values()], sent.append),
        ]
        if version == 2:
            plan = replace(cut_plan((2, 1)), number=plan.number + 1)
            orders += [partial(shard.adopt, plan), partial(shard.replace, 3)]
    return orders


@pytest.mark.parametrize("seed", range(8))
def test_orders_that_are_repeated_change_nothing(seed: int) -> None:
    def run(repeats: Random | None) -> Any:
        shard, sent, finals = LocalShard(partial(build, takes_norms=True)), list[Encoded](), list[Final]()

        async def carry_out(orders: Sequence[Order]) -> None:
            for order in orders:
                answer = order()
                if answer is not None:
                    await answer

        async def everything() -> Any:
            await shard.open(MANIFEST, assembly(0, 0, 0), BOTH, lambda: None)
            orders = history(shard, sent, finals, Random(seed))
            opening, settled = orders[0], 0  # the last `open_round`; orders up to the last `apply`
            for number, order in enumerate(orders):
                await carry_out([order])
                method = getattr(order, "func", None)
                if method == shard.open_round:
                    opening = order
                if method == shard.apply:
                    settled = number + 1
                if repeats is not None:
                    await carry_out([order, opening])
                    if not repeats.randrange(4):
                        await carry_out(orders[: repeats.randrange(settled + 1)])
            image: Any = await shard.image()
            await asyncio.sleep(0)
            reported = shard.reported
            assert reported.version == image["version"] == 5
            assert any(reported.square_norms)
            bits = image["parameters"].tolist(), image["norms"]
            return bits, [part.messages for part in sent], finals, reported.square_norms

        try:
            return asyncio.run(everything())
        finally:
            shard.close()

    calm = run(None)
    assert len(calm[1]) == 3 + 3 + 2 + 2, "each part of an update is sent once"
    assert run(Random(seed + 100)) == calm


def test_parts_are_stepped_at_the_rates_of_their_pushes() -> None:
    async def test(steps: Steps) -> None:
        for part in (2, 0, 1):
            for assignment, key in steps.keys.items():
                steps.shard.put(key, part, [dense(8)], assignment, (0.5,))
        assert await steps.settled() == [2, 0, 1]
        assert await steps.close(1, 2, 3) == [4, 4, 4]

    in_parts(test)
