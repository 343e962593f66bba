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


def test_every_delay_sends_at_versions_of_both_kinds() -> None:
    """With a delay of n, versions n - 1, 2n - 1, 3n - 1, ... are sent. Unmeasured ones carry the residual."""
    for delay in range(1, MOST_DELAY + 1):
        kinds = {is_measured(turn * delay - 1, delay) for turn in range(1, 2 * PERIOD + 1)}
        assert kinds == {False, True}, delay
