"""The rule for `--keep best:METRIC[:min|max]`, which keeps the best evaluated version."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .limits import SMALLER_IS_BETTER


@dataclass(frozen=True, slots=True)
class Keep:
    """The metric that decides which evaluated version is the best."""

    metric: str
    smallest: bool  # True if the smallest value is the best; False if the largest is

    def better(self, value: float, best: float | None) -> bool:
        """Return True if `value` is better than `best`, the best value so far (None before the first).

        An equal value does not replace the first one. NaN and infinity are never better.
        """
        if not math.isfinite(value):
            return False
        return best is None or (value < best if self.smallest else value > best)


def by_name(metric: str) -> Keep:
    """Return the rule for a metric of which only the name is known: see `SMALLER_IS_BETTER`."""
    return Keep(metric, any(word in metric for word in SMALLER_IS_BETTER))


def parse_keep(text: str) -> Keep | None:
    """Parse the text of `--keep`. Return None for an empty text, which keeps no version.

    Without a direction, the smallest value is the best for metrics such as "loss" (`SMALLER_IS_BETTER`).

    Raises:
        ValueError: the text has another form than best:METRIC[:min|max].
    """
    if not text:
        return None
    kind, _, rest = text.partition(":")
    metric, colon, direction = rest.rpartition(":")
    stated = bool(colon) and direction in ("min", "max")
    if kind != "best" or not (metric if stated else rest):
        raise ValueError(f"expected best:METRIC, best:METRIC:min or best:METRIC:max, got {text!r}")
    return Keep(metric, direction == "min") if stated else by_name(rest)
