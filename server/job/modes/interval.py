"""How many local steps a round has: `local:steps=8`, or `local:steps=adaptive,first=4,most=16`.

Adaptive, for round s:

    H_s = ceil(sqrt((η_0 / η_s) · (F_s / F_0)) · H_0), at least 1 and at most H_max

F is the training loss, η_0 the base learning rate and η_s that of the schedule when the round begins. So H
falls when the loss falls, and rises when the rate falls: workers drift apart by about H times the rate.
Source: the multi-step paper, formula (1), with H_0 outside the root as in the work that it cites; under the
root, as printed, H would be the root of H_0 at s = 0. Its text says that H falls with the rate; its formula
says what is done here.

Three things are ours. The values of H_0 and H_max, 4 and 16. The first round has H_0 steps whatever a warm-up
makes of its rate. And nobody knows the loss at the start of a round before workers have begun it: F_s is the
loss at the start of the last round that has closed, the mean over the first local step of each member.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_STEPS = 10_000


def _check_steps(name: str, steps: int) -> None:
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"{name}: expected 1 to {MOST_STEPS} steps, got {steps}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """The same for every round."""

    steps: int = 1

    def __post_init__(self) -> None:
        _check_steps("local steps", self.steps)

    @property
    def first(self) -> int:
        return self.steps

    def following(self, loss_ratio: float, rate_ratio: float) -> int:
        return self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive:
    """first: H_0. most: H_max."""

    first: int = 4
    most: int = 16

    def __post_init__(self) -> None:
        _check_steps("first", self.first)
        _check_steps("most", self.most)
        if self.first > self.most:
            raise ValueError(f"first: expected at most `most`, which is {self.most}, got {self.first}")

    def following(self, loss_ratio: float, rate_ratio: float) -> int:
        """H_s. loss_ratio: F_s / F_0. rate_ratio: η_0 / η_s, infinite where η_s is 0."""
        ratio = loss_ratio * rate_ratio
        if not ratio >= 0:  # no number, or a loss below zero: nothing to go by
            return self.first
        wanted = math.sqrt(ratio) * self.first
        # The product of two roundings may lie a little above a whole number that it should be.
        return max(1, min(self.most, math.ceil(min(wanted, MOST_STEPS) * (1 - 1e-12))))


LocalSteps = Fixed | Adaptive
