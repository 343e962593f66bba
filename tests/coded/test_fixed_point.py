"""Fixed point against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from gradwire.coded.arithmetic import FIXED_POINT_LIMIT, from_fixed_point, to_fixed_point

STEPS = 0x7FFFFFFF


def fixed(values: list[float], scale: float = 1.0) -> tuple[list[int], int]:
    out = np.empty(len(values), np.uint32)
    clipped = to_fixed_point(np.array(values, np.float32), out, scale)
    return out.view(np.int32).tolist(), clipped


def test_the_range_and_its_ends() -> None:
    assert FIXED_POINT_LIMIT == 10
    assert fixed([0.0, -0.0, 10.0, -10.0, 5.0]) == ([0, 0, STEPS, -STEPS, 2**30], 0)


def test_what_is_outside_is_clipped_and_counted() -> None:
    values = [10.001, -11.0, 3e38, -np.inf, np.inf, np.nan, 1e-45]
    assert fixed(values) == ([STEPS, -STEPS, STEPS, -STEPS, STEPS, 0, 0], 6)


@pytest.mark.parametrize("elements", [1, 7, 32767, 32768, 32769, 100_001])
def test_each_value_is_rounded_to_the_nearest_step(elements: int) -> None:
    rng = np.random.default_rng(elements)
    values = (rng.standard_normal(elements) * 10.0 ** rng.integers(-8, 1, elements)).astype(np.float32)
    out = np.empty(elements, np.uint32)
    to_fixed_point(values, out, 0.5)
    for place in rng.integers(0, elements, 50):
        exact = Fraction(float(values[place])) / 2 * STEPS / 10
        exact = max(min(exact, Fraction(STEPS)), Fraction(-STEPS))
        assert abs(int(out.view(np.int32)[place]) - exact) <= Fraction(1, 2) + Fraction(1, 10**6)


def test_sums_come_back_rounded_once() -> None:
    sums = np.array([0, 1, -1, STEPS * 7, -STEPS * 1000, 12345678901], np.int64)
    out = np.empty(sums.size, np.float32)
    from_fixed_point(sums, out, 0.25)
    exact = [float(Fraction(int(each)) * 10 / STEPS / 4) for each in sums]
    np.testing.assert_allclose(out, exact, rtol=1.2e-7)


def test_nothing_to_do() -> None:
    assert fixed([]) == ([], 0)
    from_fixed_point(np.empty(0, np.int64), np.empty(0, np.float32))
