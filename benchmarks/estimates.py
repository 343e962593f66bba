"""Means over seeds with their 95 % intervals."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import whole_numbers

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
MOST_SEEDS = len(_STUDENT) + 1


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds with its uncertainty.

    Attributes:
        mean: mean of the values.
        half_width: half-width of the mean's 95 % interval; None for a single seed.
    """

    mean: float
    half_width: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.half_width is None else f"{self.mean:.3f} ± {self.half_width:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of 1 to `MOST_SEEDS` values, with its 95 % interval.

    Raises:
        ValueError: if there are more values.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean=mean, half_width=None)
    if len(values) > MOST_SEEDS:
        raise ValueError(f"expected at most {MOST_SEEDS} values, got {len(values)}; extend the quantiles")
    quantile = _STUDENT[len(values) - 2]
    return Estimate(mean=mean, half_width=quantile * statistics.stdev(values) / len(values) ** 0.5)


def seed_list(text: str) -> list[int]:
    """Parse seeds such as `1,2,3`: distinct whole numbers from 0, at most `MOST_SEEDS` of them."""
    seeds = whole_numbers(text)
    if not 1 <= len(set(seeds)) == len(seeds) <= MOST_SEEDS or min(seeds) < 0:
        raise argparse.ArgumentTypeError(
            f"expected 1 to {MOST_SEEDS} distinct numbers from 0, separated by commas, got {text!r}"
        )
    return seeds
