"""How chunks keep to a rate."""

from __future__ import annotations

import pytest

from gradwire.worker.session.throttle import LATE_S, Throttle


def test_without_a_rate_nothing_waits() -> None:
    throttle = Throttle()
    throttle.sent(1 << 30, 1.0)
    assert throttle.pause(1.0) == 0


def test_a_chunk_waits_as_long_as_the_one_before_takes() -> None:
    throttle = Throttle()
    throttle.set(1000)
    throttle.sent(500, 1.0)
    assert throttle.pause(1.0) == pytest.approx(0.5 - LATE_S)
    assert throttle.pause(2.0) == 0


def test_what_goes_late_is_caught_up_with_and_no_more_than_a_little() -> None:
    throttle, now, sent = Throttle(), 0.0, 0
    throttle.set(1000)
    while now < 10:
        throttle.sent(100, now)
        sent += 100
        now += throttle.pause(now) + LATE_S / 2  # every pause ends late
    assert sent == pytest.approx(10_000, rel=0.03)
    throttle.sent(100, 100.0)  # after a long time without anything
    assert throttle.pause(100.0) == pytest.approx(0.1 - LATE_S)


def test_another_rate_begins_at_once() -> None:
    throttle = Throttle()
    throttle.set(1)
    throttle.sent(1000, 0.0)
    throttle.set(1000)
    assert throttle.pause(0.0) == 0
