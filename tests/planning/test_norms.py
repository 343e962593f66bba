"""The versions at which norms are measured."""

from __future__ import annotations

from itertools import groupby

from gradwire.planning import NORM_VERSIONS, is_measured
from gradwire.planning.norms import PERIOD

MOST_DELAY = 1000  # versions between two pushes that `delay` allows


def test_windows_begin_with_the_job_and_have_enough_versions_for_a_mean() -> None:
    measured = [version for version in range(120) if is_measured(version)]
    assert measured == [*range(8), *range(52, 61), *range(105, 114)]
    windows = [len(list(group)) for known, group in groupby(range(10 * PERIOD - 1), is_measured) if known]
    assert min(windows) >= NORM_VERSIONS


def test_no_delay_misses_all_windows() -> None:
    """With a delay of n, versions n - 1, 2n - 1, 3n - 1, ... are sent."""
    for delay in range(1, MOST_DELAY + 1):
        assert any(is_measured(turn * delay - 1) for turn in range(1, PERIOD + 1)), delay
