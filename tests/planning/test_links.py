"""The times of a link, found from the times of messages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning import fit

SIZES = [1000.0 * 2**power for power in range(10)]


@given(st.floats(0, 1e-2), st.floats(1e-9, 1e-5))
def test_what_messages_took_gives_back_the_link(start_s: float, byte_s: float) -> None:
    sizes = SIZES * 4
    link = fit(sizes, [start_s + byte_s * size for size in sizes])
    assert link is not None
    assert link.byte_s == pytest.approx(byte_s, rel=1e-6)
    assert link.start_s == pytest.approx(start_s, rel=1e-6, abs=1e-6 * byte_s * SIZES[-1])


def test_a_third_of_messages_that_were_held_up_does_not_move_it_far() -> None:
    draw = random.Random(1)
    sizes = SIZES * 30
    seconds = [1e-3 + 1e-7 * size for size in sizes]
    seconds = [each * (10 if draw.random() < 0.3 else draw.uniform(0.95, 1.05)) for each in seconds]
    link = fit(sizes, seconds)
    assert link is not None
    assert link.byte_s == pytest.approx(1e-7, rel=0.1)
    assert link.start_s == pytest.approx(1e-3, rel=0.2)


def test_messages_of_one_size_give_the_bytes_alone() -> None:
    link = fit([4096.0] * 10, [0.5] * 10)
    assert link is not None
    assert (link.start_s, link.byte_s) == (0.0, 0.5 / 4096)


def test_neither_is_below_zero() -> None:
    faster = fit([1000.0] * 5 + [2000.0] * 5, [2.0] * 5 + [1.0] * 5)
    assert faster is not None
    assert faster.byte_s == 0.0
    assert faster.start_s >= 0.0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([], []), ([1.0, 2.0], [1.0, 1.0]), ([0.0] * 9, [1.0] * 9), ([1.0] * 9, [0.0] * 9)]
)
def test_too_little_is_nothing(sizes: list[float], seconds: list[float]) -> None:
    assert fit(sizes, seconds) is None
