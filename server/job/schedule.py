"""Learning-rate schedules: pure functions of the epochs completed, so they have no state to save.

Given as `name[:key=value,...]`. Every schedule takes `warmup`, in epochs, over which the rate grows linearly
from nothing to the base rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...spec import parse_one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """The base rate throughout."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < math.inf:
            raise ValueError(f"warmup: expected a finite number of at least 0 epochs, got {self.warmup:g}")

    def factor(self, epoch: float, epochs: int) -> float:
        """What the base rate is multiplied with when `epoch` (fractional, the middle of a round) of `epochs`
        have passed."""
        ramp = min(1.0, epoch / self.warmup) if self.warmup else 1.0
        return ramp * self.decay(epoch, epochs)

    def decay(self, epoch: float, epochs: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(Constant):
    """Half a cosine from the base rate to nothing at the last epoch."""

    def decay(self, epoch: float, epochs: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / epochs)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Constant):
    """Multiplied with gamma after every so many epochs."""

    every: int = 10
    gamma: float = 0.1

    def __post_init__(self) -> None:
        # Named, because a dataclass with slots is not the class that super() would look for.
        Constant.__post_init__(self)
        if self.every < 1:
            raise ValueError(f"every: expected at least 1 epoch, got {self.every}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma: expected above 0 and at most 1, got {self.gamma:g}")

    def decay(self, epoch: float, epochs: int) -> float:
        return float(self.gamma ** (int(epoch) // self.every))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponential(Step):
    """Multiplied with gamma after every epoch; the 4-bit paper uses 0.94."""

    every: int = 1
    gamma: float = 0.94


SCHEDULES: Mapping[str, type[Constant]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": Step,
    "exponential": Exponential,
}


def parse_schedule(text: str) -> Constant:
    """Raises SpecError, which lists what is known."""
    return parse_one_of("schedule", text, SCHEDULES)
