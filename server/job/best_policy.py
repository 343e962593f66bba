"""Which evaluated version is the best so far: `--keep best:METRIC[:min|max]`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .limits import SMALLER_IS_BETTER


@dataclass(frozen=True, slots=True)
class Keep:
    """metric: name of it. smallest: whether the smallest is the best."""

    metric: str
    smallest: bool

    def better(self, value: float, best: float | None) -> bool:
        """Whether a version with this value takes the place of the best one. Of equals the first stays."""
        if not math.isfinite(value):
            return False
        return best is None or (value < best if self.smallest else value > best)


def parse_keep(text: str) -> Keep | None:
    """None for "", which keeps nothing. Raises ValueError."""
    if not text:
        return None
    kind, _, rest = text.partition(":")
    metric, colon, direction = rest.rpartition(":")
    if direction not in ("min", "max") or not colon:
        metric, direction = rest, "min" if any(word in rest for word in SMALLER_IS_BETTER) else "max"
    if kind != "best" or not metric:
        raise ValueError(f"expected best:METRIC, best:METRIC:min or best:METRIC:max, got {text!r}")
    return Keep(metric, direction == "min")
