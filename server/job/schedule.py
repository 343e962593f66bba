"""Learning-rate schedules: pure functions of the job's progress, without state.

A schedule is written as `name[:key=value,...]`. Every schedule takes `warmup`, over which the rate grows
linearly from 0 to the base rate, and `minimum`, a fraction of the base rate below which it does not decay.
Lengths are in epochs, in steps, which are versions, and in local mode local steps, or in percent of the job:
`warmup=2`, `warmup=200steps`, `warmup=10%`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...common.spec import Length, parse_one_of

NOTHING, EPOCH, TEN_EPOCHS = (Length(number, "epochs") for number in (0, 1, 10))


@dataclass(frozen=True, slots=True)
class Passed:
    """Progress of a job in the middle of a step."""

    epochs: float  # trained on, with a fraction
    steps: float = 0.0  # with a fraction; in local mode, local steps of one worker
    of_job: float = 0.0  # fraction that is done, 0 to 1; 0 if the job's end is unknown

    def lengths(self, length: Length) -> float:
        """Return the progress as a multiple of `length`, in its unit."""
        passed = {"epochs": self.epochs, "steps": self.steps, "percent": 100 * self.of_job}
        return passed[length.unit] / length.number


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """The schedule `constant`: the base rate after the warm-up. It is the base class of the other
    schedules."""

    warmup: Length = NOTHING  # 0 for none
    minimum: float = 0.0  # fraction of the base rate below which the rate does not decay

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= 1:
            raise ValueError(f"minimum: expected 0 to 1, a fraction of the base rate, got {self.minimum:g}")

    @property
    def needs_end(self) -> bool:
        """True if the schedule depends on the end of the job."""
        return self.warmup.unit == "percent"

    def factor(self, passed: Passed) -> float:
        """Return the factor by which to multiply the base rate, warm-up included."""
        ramp = min(1.0, passed.lengths(self.warmup)) if self.warmup.number else 1.0
        return ramp * max(self.minimum, self.decay(passed))

    def decay(self, passed: Passed) -> float:
        """Return the factor of the base rate without warm-up and without the minimum."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(Constant):
    """The schedule `cosine`: half a cosine, from the base rate at the end of the warm-up to the minimum at
    the end of the job."""

    @property
    def needs_end(self) -> bool:
        return True

    def decay(self, passed: Passed) -> float:
        # Warm-up and job may have different units. The ratio of their progress gives the warm-up as a
        # fraction of the job.
        warmed = passed.lengths(self.warmup) if self.warmup.number else math.inf
        begin = passed.of_job / warmed if warmed else 1.0
        if passed.of_job <= begin:
            return 1.0
        part = min(1.0, (passed.of_job - begin) / (1 - begin)) if begin < 1 else 1.0
        return self.minimum + (1 - self.minimum) * 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDecay(Constant):
    """The schedule `step`: the rate is multiplied by gamma at regular intervals."""

    every: Length = TEN_EPOCHS  # at least 1
    gamma: float = 0.1  # above 0, at most 1

    def __post_init__(self) -> None:
        # `slots=True` creates a new class, which super() without arguments would not find.
        Constant.__post_init__(self)
        if self.every.number < 1:
            raise ValueError(f"every: expected at least 1, got {self.every.number:g}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma: expected above 0 and at most 1, got {self.gamma:g}")

    @property
    def needs_end(self) -> bool:
        return "percent" in (self.warmup.unit, self.every.unit)

    def decay(self, passed: Passed) -> float:
        return float(self.gamma ** int(passed.lengths(self.every)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponential(StepDecay):
    """The schedule `exponential`: the rate is multiplied by gamma after every epoch. The 4-bit paper uses
    0.94."""

    every: Length = EPOCH
    gamma: float = 0.94


SCHEDULES: Mapping[str, type[Constant]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": StepDecay,
    "exponential": Exponential,
}


def parse_schedule(text: str) -> Constant:
    """Parse the text of `--schedule`.

    Raises:
        SpecError: the schedule is unknown (the message lists those that exist), or an option is out of range.
    """
    return parse_one_of("schedule", text, SCHEDULES)
