"""The phases of steps, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gradwire.worker.session.timing import FIRST, FULL, StepTimes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(
    times: StepTimes, clock: Clock, forward: float, backward: Sequence[float], idle: float = 0.0
) -> None:
    """backward: by tensor; each takes another second to be compressed."""
    times.begin()
    clock.now += forward
    times.forward()
    for place in reversed(range(len(backward))):
        clock.now += backward[place]
        times.gradient(place)
        clock.now += 1.0
        times.handed()
    times.end()
    clock.now += idle


def test_a_profile_holds_the_means_without_what_lies_between() -> None:
    clock = Clock()
    times = StepTimes(3, clock)
    step(times, clock, 99.0, [99.0] * 3)  # the first takes longer, and does not count
    for number in range(FIRST):
        assert not times.due
        step(times, clock, 6.0, [1.0 + number % 2, 2.0, 0.0], idle=5.0)
    assert times.due
    profile = times.profile((0.25, 0.5, 1.0), 55)
    assert (profile.steps, profile.densities, profile.sent_bytes) == (FIRST, (0.25, 0.5, 1.0), 55)
    assert profile.backward_seconds == pytest.approx((1.4, 2.0, 0.0))
    assert sum(profile.forward_seconds) == pytest.approx(6.0)
    assert profile.forward_seconds[0] == pytest.approx(6.0 * 1.4 / 3.4)
    assert profile.compressing_seconds == pytest.approx(3.0)


def test_a_profile_says_how_much_of_the_computation_took_a_processor() -> None:
    clock, processor = Clock(), Clock()
    times = StepTimes(1, clock, processor)
    for _ in range(FIRST + 1):
        times.begin()
        clock.now += 3.0  # asleep, or at a device
        times.forward()
        clock.now += 1.0
        processor.now += 1.0
        times.gradient(0)
        clock.now += 5.0
        processor.now += 5.0  # compressing is none of it
        times.handed()
        times.end()
    assert times.profile((1.0,), 1).processor_share == pytest.approx(0.25)


def test_the_next_profiles_are_of_fifty_steps_each() -> None:
    clock = Clock()
    times = StepTimes(1, clock)
    due: list[int] = []
    profile = None
    for number in range(3 * FULL + 1):
        step(times, clock, 1.0, [float(number > FULL)])
        if times.due:
            due.append(number)
            profile = times.profile((1.0,), 1)
    assert due == [FIRST, FULL, 2 * FULL, 3 * FULL]
    assert profile is not None
    assert profile.steps == FULL
    assert profile.backward_seconds == (1.0,)


def test_a_step_that_is_broken_off_does_not_count() -> None:
    clock = Clock()
    times = StepTimes(1, clock)
    step(times, clock, 1.0, [1.0])
    for _ in range(FIRST):
        times.begin()
        clock.now += 50.0
        times.forward()
        step(times, clock, 1.0, [1.0])
    assert times.profile((1.0,), 1).forward_seconds == (1.0,)


def test_a_gradient_outside_of_a_step_is_nobodys() -> None:
    times = StepTimes(1)
    times.gradient(0)
    times.handed()
    times.end()
    assert not times.due
