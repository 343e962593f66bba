"""The rule by which the best evaluated version is kept: `--keep best:METRIC[:min|max]`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .limits import SMALLER_IS_BETTER


@dataclass(frozen=True, slots=True)
class Keep:
    metric: str
    smallest: bool  # is the best

    def better(self, value: float, best: float | None) -> bool:
        """Return whether a value beats the best one so far. Of equal ones the first stays."""
        if not math.isfinite(value):
            return False
        return best is None or (value < best if self.smallest else value > best)


def parse_keep(text: str) -> Keep | None:
    """Parse the option; None for an empty one, which keeps nothing. Raises ValueError."""
    if not text:
        return None
    kind, _, rest = text.partition(":")
    metric, colon, direction = rest.rpartition(":")
    if direction not in ("min", "max") or not colon:
        metric, direction = rest, "min" if any(word in rest for word in SMALLER_IS_BETTER) else "max"
    if kind != "best" or not metric:
        raise ValueError(f"expected best:METRIC, best:METRIC:min or best:METRIC:max, got {text!r}")
    return Keep(metric, direction == "min")
