"""How many local steps a round has: `local:steps=8`, or `local:steps=adaptive,first=4,most=16`.

Adaptive, per round s, with the training loss F and the learning rate η of round 0 and of round s:

    H_s = ceil(sqrt((η_0 / η_s) · (F_s / F_0)) · H_0), at least 1 and at most `most`

so that workers exchange their changes rarely while the loss is high, and often where it matters. Source: the
multi-step paper, with H_0 outside the root as in the work that it cites; under the root, as printed, H would
be the root of H_0 at s = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....spec import SpecError, parse_options, parse_spec

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


def parse_local_steps(text: str) -> LocalSteps:
    """Raises SpecError, which lists what is known."""
    if text.isascii() and text.isdigit():
        try:
            return Fixed(steps=int(text))
        except ValueError as error:
            raise SpecError(str(error)) from None
    spec = parse_spec("local steps", text)
    if spec.name != "adaptive":
        raise SpecError(f"unknown local steps {spec.name!r}; expected a whole number, or adaptive")
    return parse_options(Adaptive, spec)
