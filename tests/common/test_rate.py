"""How often something may happen."""

from __future__ import annotations

from gradwire.common.rate import Rate


def test_a_rate_lets_a_burst_through_and_then_so_many_a_second() -> None:
    rate = Rate(2.0, 3)
    assert [rate.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert [rate.take(at) for at in (100.4, 100.5, 100.6, 101.0, 101.1)] == [False, True, False, True, False]
    assert [rate.take(1000.0) for _ in range(4)] == [True, True, True, False], "no more than the burst"
    assert rate.put_off() == 5
    assert rate.put_off() == 0
