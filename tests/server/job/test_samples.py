"""The ledger of samples: each one out once, back if nobody answered for it, and out again before new ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.proto.messages import Range
from gradwire.server.job.samples import Drawn, Samples


def numbers(drawn: Drawn) -> list[tuple[int, int]]:
    return [(drawn.epoch, each.start + i) for each in drawn.ranges for i in range(each.count)]


def draw(samples: Samples, most: int) -> Drawn:
    drawn = samples.draw(most)
    assert drawn is not None
    return drawn


def test_samples_go_out_in_order_and_an_epoch_ends_with_fewer() -> None:
    samples = Samples(10, 2)
    assert [numbers(draw(samples, 4)) for _ in range(4)] == [
        [(0, 0), (0, 1), (0, 2), (0, 3)],
        [(0, 4), (0, 5), (0, 6), (0, 7)],
        [(0, 8), (0, 9)],
        [(1, 0), (1, 1), (1, 2), (1, 3)],
    ]
    draw(samples, 100)
    assert samples.draw(1) is None
    assert not samples.done


def test_what_comes_back_goes_out_before_anything_new_and_with_it() -> None:
    samples = Samples(10, 1)
    first, second = draw(samples, 3), draw(samples, 3)
    samples.give_back(second)
    samples.give_back(first)
    assert draw(samples, 2).ranges == (Range(start=0, count=2),)
    assert draw(samples, 5).ranges == (Range(start=2, count=4), Range(start=6, count=1))


def test_what_comes_next_is_known_while_nothing_has_come_back() -> None:
    samples = Samples(10, 2)
    for most in (4, 4, 4, 4, 6):
        expected = samples.peek(most)
        assert samples.peek(most) == expected is not None
        assert draw(samples, most) == expected
    assert samples.peek(4) is None
    samples = Samples(10, 1)
    samples.give_back(draw(samples, 4))
    assert samples.peek(4) is None


@pytest.mark.parametrize("seed", range(40))
def test_nobody_is_left_with_fewer_samples_than_a_batch_must_have(seed: int) -> None:
    """After any sequence of draws, divisions and returns, each share has 2, and each sample is settled
    once."""
    chance = random.Random(seed)
    per_epoch = chance.randrange(2, 30)
    samples = Samples(per_epoch, 3, 2)
    settled: list[tuple[int, int]] = []
    out: list[Drawn] = []
    while not samples.done:
        if out and chance.random() < 0.5:
            each = out.pop(chance.randrange(len(out)))
            if chance.random() < 0.3:
                samples.give_back(each)
            else:
                samples.settle(each)
                settled += numbers(each)
        elif samples.left:
            most = chance.randrange(1, 12)
            expected = samples.peek(most)
            drawn = samples.draw(most)
            assert expected in (None, drawn)
            if drawn is not None:
                out += drawn.divided(chance.randrange(1, 6), 2)
        assert all(each.count >= 2 for each in out)
    assert sorted(settled) == [(epoch, place) for epoch in range(3) for place in range(per_epoch)]


def test_older_epochs_are_not_mixed_with_the_running_one() -> None:
    samples = Samples(4, 2)
    first = draw(samples, 4)
    draw(samples, 2)
    samples.give_back(first)
    assert draw(samples, 10).epoch == 0
    assert draw(samples, 10) == Drawn(epoch=1, ranges=(Range(start=2, count=2),))


def test_an_epoch_is_complete_when_all_of_it_is_settled() -> None:
    samples = Samples(4, 2)
    first, second, third = draw(samples, 2), draw(samples, 2), draw(samples, 2)
    samples.settle(third)
    samples.settle(first)
    assert samples.completed == 0
    assert samples.progress == pytest.approx(1.0)
    samples.settle(second)
    assert samples.completed == 1
    samples.settle(draw(samples, 2))
    assert samples.completed == 2
    assert samples.done


def test_what_was_given_back_can_be_taken_back_until_somebody_has_it() -> None:
    samples = Samples(8, 1)
    first, second = draw(samples, 2), draw(samples, 2)
    samples.give_back(first)
    assert samples.take_back(first)
    assert not samples.take_back(first)
    samples.give_back(second)
    samples.draw(1)
    assert not samples.take_back(second)


def test_what_was_given_back_is_found_among_its_neighbours() -> None:
    samples = Samples(12, 1)
    first, second, third = draw(samples, 3), draw(samples, 3), draw(samples, 3)
    for each in (third, first, second):
        samples.give_back(each)
    assert samples.take_back(second)
    assert draw(samples, 100).ranges == (
        Range(start=0, count=3),
        Range(start=6, count=3),
        Range(start=9, count=3),
    )


def test_what_was_settled_too_early_can_still_come_back() -> None:
    samples = Samples(4, 1)
    drawn = draw(samples, 4)
    samples.settle(drawn)
    assert samples.done
    samples.give_back(drawn, settled=True)
    assert not samples.done
    assert samples.completed == 1  # once said, it stays said
    samples.settle(draw(samples, 4))
    assert samples.done


@pytest.mark.parametrize("world", [1, 2, 3, 7, 9])
def test_what_is_drawn_is_divided_evenly(world: int) -> None:
    drawn = Drawn(epoch=3, ranges=(Range(start=5, count=2), Range(start=20, count=5)))
    parts = drawn.divided(world)
    assert [number for part in parts for number in numbers(part)] == numbers(drawn)
    assert len(parts) == min(world, 7)
    assert max(part.count for part in parts) - min(part.count for part in parts) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_settled_once_whatever_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    samples = Samples(chance.randrange(1, 60), 3)
    out: list[Drawn] = []
    settled: list[tuple[int, int]] = []
    while not samples.done:
        drawn = samples.draw(chance.randrange(1, 9))
        if drawn is not None:
            out.append(drawn)
        if out and (drawn is None or chance.random() < 0.6):
            one = out.pop(chance.randrange(len(out)))
            if chance.random() < 0.4:
                samples.give_back(one)
            else:
                samples.settle(one)
                settled += numbers(one)
    assert sorted(settled) == [(epoch, i) for epoch in range(3) for i in range(samples.per_epoch)]
    assert samples.progress == pytest.approx(3.0)


@given(
    per_epoch=st.integers(1, 40),
    epochs=st.integers(1, 3),
    least=st.integers(1, 2),
    most=st.integers(1, 12),
    before=st.integers(0, 9),
    back=st.booleans(),
)
def test_it_is_known_how_often_samples_can_be_drawn(
    per_epoch: int, epochs: int, least: int, most: int, before: int, back: bool
) -> None:
    samples = Samples(per_epoch, epochs, least)
    for _ in range(before):
        drawn = samples.draw(most)
        if drawn is not None and back:
            samples.give_back(drawn)
            back = False
    expected, times = samples.draws(most), 0
    while samples.draw(most) is not None:
        times += 1
    assert times == expected


def test_a_job_may_begin_with_a_later_epoch() -> None:
    samples = Samples.beginning(10, 3, 1, 2)
    assert (samples.progress, samples.completed, samples.left) == (2.0, 2, 10)
    drawn = samples.draw(99)
    assert drawn is not None
    assert drawn.epoch == 2
    samples.settle(drawn)
    assert samples.done
