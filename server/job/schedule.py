"""Learning-rate schedules: pure functions of the job's progress, without state.

A schedule is given as `name[:key=value,...]`. Every one takes `warmup`, over which the rate grows linearly
from 0 to the base rate, and `minimum`, a fraction of the base rate below which it does not decay. Lengths are
in epochs or in steps, which are versions: `warmup=2`, `warmup=200steps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...common.spec import Length, parse_one_of

NOTHING, EPOCH, TEN_EPOCHS = (Length(number, "epochs") for number in (0, 1, 10))


@dataclass(frozen=True, slots=True)
class Passed:
    """Progress of a job in the middle of a step. of_job: fraction of the job, 0 if its end is unknown."""

    epochs: float
    steps: float = 0.0
    of_job: float = 0.0

    def lengths(self, length: Length) -> float:
        """Return the progress as a multiple of a length."""
        return (self.epochs if length.unit == "epochs" else self.steps) / length.number


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """The base rate throughout."""

    warmup: Length = NOTHING
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= 1:
            raise ValueError(f"minimum: expected 0 to 1, a part of the base rate, got {self.minimum:g}")

    def factor(self, passed: Passed) -> float:
        """Return the factor of the base rate."""
        ramp = min(1.0, passed.lengths(self.warmup)) if self.warmup.number else 1.0
        return ramp * max(self.minimum, self.decay(passed))

    def decay(self, passed: Passed) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(Constant):
    """Half a cosine from the base rate, where the warm-up ends, to the minimum, where the job does."""

    def decay(self, passed: Passed) -> float:
        # The progress of warm-up and job gives the warm-up as a fraction of the job, whatever their units.
        warmed = passed.lengths(self.warmup) if self.warmup.number else math.inf
        begin = passed.of_job / warmed if warmed else 1.0
        if passed.of_job <= begin:
            return 1.0
        part = min(1.0, (passed.of_job - begin) / (1 - begin)) if begin < 1 else 1.0
        return self.minimum + (1 - self.minimum) * 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDecay(Constant):
    """Multiplied with gamma after each interval `every`."""

    every: Length = TEN_EPOCHS
    gamma: float = 0.1

    def __post_init__(self) -> None:
        # Named, because a dataclass with slots is not the class that super() would look for.
        Constant.__post_init__(self)
        if self.every.number < 1:
            raise ValueError(f"every: expected at least 1, got {self.every.number:g}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma: expected above 0 and at most 1, got {self.gamma:g}")

    def decay(self, passed: Passed) -> float:
        return float(self.gamma ** int(passed.lengths(self.every)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponential(StepDecay):
    """Multiplied with gamma after every epoch; the 4-bit paper uses 0.94."""

    every: Length = EPOCH
    gamma: float = 0.94


SCHEDULES: Mapping[str, type[Constant]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": StepDecay,
    "exponential": Exponential,
}


def parse_schedule(text: str) -> Constant:
    """Raises SpecError, which lists what is known."""
    return parse_one_of("schedule", text, SCHEDULES)
