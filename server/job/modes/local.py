"""Options of the mode `local`: rounds (`rounds`) of a number of local steps, `local:steps=8`, or adaptive.

Adaptive (`local:steps=adaptive,first=4,most=16`), for round s:

    H_s = ceil(sqrt((η_0 / η_s) · (F_s / F_0)) · H_0), at least 1 and at most H_max

F is the training loss, η_0 the base learning rate and η_s that of the schedule when the round begins. So H
falls when the loss falls, and rises when the rate falls: workers drift apart by about H times the rate.
Source: the multi-step paper, formula (1), with H_0 outside the root as in the work that it cites; under the
root, as printed, H would be the root of H_0 at s = 0. Its text says that H falls with the rate; its formula
says what is done here.

With `by=time`, which is ours, H is what hides the exchange: as many steps as take as long as it does,

    H = ceil(exchange / step), at least 1 and at most H_max

both as means of the rounds so far, of which each weighs half of the one after it. A step is what the slowest
member of a round says its steps took, by their number; the exchange is the rest of the round, from giving out
the work to the last push. The paper's text says that H uses both times (§1, §2.3), and its formula does not.
`by=both` takes the smaller of the two: the loss says how far workers may drift apart, the times how long a
round has to be to hide the exchange.

Three things are ours in formula (1). The values of H_0 and H_max, 4 and 16. The first round has H_0 steps
whatever a warm-up makes of its rate. And nobody knows the loss at the start of a round before workers have
begun it: F_s is the loss at the start of the last round that has closed, the mean over the first local step
of each member.

With `delayed=on` workers are told the samples of the round that follows, and begin its steps early
(`worker/training/local`). So its H has to be known by then, and is found one round earlier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ....common.configuration import option
from ....optim.optimizer import parse_optimizer
from ....optim.steps import OptimizerOptions
from ....settings import ServerSettings
from .options import ModeOptions, needs_workers

MOST_STEPS = 10_000


def _check_steps(name: str, steps: int) -> None:
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"{name}: expected 1 to {MOST_STEPS} steps, got {steps}")


def _parse_steps(text: str) -> None:
    if text != "adaptive":
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"expected a whole number, or adaptive, got {text!r}")
        _check_steps("local steps", int(text))


def _parse_outer(text: str) -> OptimizerOptions:
    """An optimizer inside of a spec, where slashes stand for the colon and the commas."""
    return parse_optimizer(text.replace("/", ":", 1).replace("/", ","))


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions(ModeOptions):
    """Rounds of several local steps each, whose changes are averaged."""

    steps: str = option("adaptive", "local steps of a round, a number or adaptive", parse=_parse_steps)
    first: int = option(4, "adaptive steps of the first round", least=1)
    most: int = option(16, "limit of adaptive steps", least=1)
    by: Literal["loss", "time", "both"] = option(
        "loss", "what adaptive steps follow: the training loss, the exchange's time, or the smaller of both"
    )
    correction: float = option(
        0.1, "part of the way back to the global model that each step takes", least=0, most=1
    )
    outer: str = option(
        "sgd",
        "optimizer that is applied to the mean change, such as sgd/momentum=0.9/nesterov=on",
        parse=_parse_outer,
    )
    outer_rate: float = option(1.0, "learning rate of the outer optimizer", least=0)
    delayed: bool = option(
        False, "whether workers begin the next round's steps while the changes of this one are exchanged"
    )

    def __post_init__(self) -> None:
        _check_steps("first", self.first)
        _check_steps("most", self.most)
        if self.first > self.most:
            raise ValueError(f"first: expected at most `most`, which is {self.most}, got {self.first}")
        if self.by != "loss" and self.steps != "adaptive":
            raise ValueError(f"by: expected steps=adaptive with {self.by}, got steps={self.steps}")
        if self.delayed and self.steps == "adaptive" and self.by != "loss":
            raise ValueError(
                f"by: expected loss with delayed=on, got {self.by}: steps that are computed meanwhile hide "
                "how long the exchange takes; give a number of steps instead"
            )

    @property
    def workers_step(self) -> bool:
        return True

    @property
    def work(self) -> str:
        delayed = "on" if self.delayed else "off"
        return f"local:correction={self.correction!r},delayed={delayed}"

    def following(self, loss_ratio: float, rate_ratio: float, time_ratio: float = math.nan) -> int:
        """H_s, of the next round.

        loss_ratio: F_s / F_0, NaN before the first. rate_ratio: η_0 / η_s, infinite where η_s is 0.
        time_ratio: seconds of the exchange by those of a step, NaN where nobody knows.
        """
        if self.steps != "adaptive":
            return int(self.steps)
        if self.by == "loss":
            return self._by_loss(loss_ratio, rate_ratio)
        if self.by == "time":
            return self._by_time(time_ratio)
        return min(self._by_loss(loss_ratio, rate_ratio), self._by_time(time_ratio))

    def _by_time(self, ratio: float) -> int:
        if not ratio >= 0:
            return self.first
        return max(1, min(self.most, math.ceil(min(ratio, MOST_STEPS) * (1 - 1e-9))))  # as below

    def _by_loss(self, loss_ratio: float, rate_ratio: float) -> int:
        ratio = loss_ratio * rate_ratio
        if not ratio >= 0:  # no number, or a loss below zero: nothing to go by
            return self.first
        wanted = math.sqrt(ratio) * self.first
        # The product of two roundings may lie a little above a whole number that it should be.
        return max(1, min(self.most, math.ceil(min(wanted, MOST_STEPS) * (1 - 1e-12))))

    def check(self, settings: ServerSettings) -> None:
        needs_workers(settings, 1)

    def optimizer(self, settings: ServerSettings) -> tuple[OptimizerOptions, float]:
        return _parse_outer(self.outer), self.outer_rate
