"""Rounds of several local steps: the mode `local`. Its options (`local`) have the formulas of their number.

A share has enough samples for the steps of the round. Workers take them at the rate of the job's schedule,
which counts local steps here; the server averages the changes, at a factor of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ....common.stored import DERIVED
from ..loss_history import mean_loss
from .division import Division
from .round import Round
from .rounds import Rounds


@dataclass
class LocalRounds(Rounds):
    """The mode `local`."""

    next_steps: Callable[[float, float, float], int] = field(kw_only=True, metadata=DERIVED)  # `LocalOptions`
    elastic: bool = field(kw_only=True, metadata=DERIVED)  # the server adds up the members' differences
    _last_steps: int = 1  # local steps of each member in the last round; 1 before the first
    _all_steps: int = 0  # local steps of one member in all rounds that have closed
    _first_loss: float | None = None  # mean training loss at the start of the first round; None before
    _loss: float = math.nan  # mean training loss at the start of the last closed round; NaN before
    _step_s: float = math.nan  # one local step of the slowest member, a running mean
    _exchange_s: float = math.nan  # a round without its steps, a running mean

    takes_local_steps: ClassVar[bool] = True

    @property
    def steps(self) -> int:
        return self._all_steps

    @property
    def status(self) -> Mapping[str, int]:
        return {"local_steps": self._all_steps}

    @property
    def gauges(self) -> Mapping[str, float]:
        return {"local_steps": self._last_steps}

    def _steps(self) -> int:
        factor = self._state.rate_factor(self._state.samples.progress, self._all_steps + 0.5)
        ratio = self._loss / self._first_loss if self._first_loss else math.nan
        times = self._exchange_s / self._step_s if self._step_s > 0 else math.nan
        return self.next_steps(ratio, 1 / factor if factor else math.inf, times)

    def _planned(self, division: Division) -> int:
        if self._state.rules.script:
            return max(part.steps(self._state.accumulation.batches) for part in division.parts)
        return -(-max(part.samples for part in division.parts) // self._state.rules.batch_size)

    def _opened(self, steps: int) -> None:
        self._last_steps = steps

    def _local_rates(self, count: int, steps: int, progress: float, factor: float) -> tuple[float, ...]:
        state = self._state
        if state.rules.script:
            return ()
        factors = [
            state.rate_factor(
                progress + count * part / state.samples.per_epoch, self._all_steps + part * steps, part=part
            )
            for part in ((number + 0.5) / steps for number in range(steps))
        ]
        if all(each == factor for each in factors):
            return ()
        return tuple(state.rules.learning_rate * each for each in factors)

    def _server_factor(self, round_: Round) -> float:
        return 1.0

    def _weights(self, round_: Round) -> Mapping[int, float] | None:
        if self.elastic:  # the sum of the differences of those that have answered
            return dict.fromkeys(round_.answered, 1.0)
        return super()._weights(round_)

    def _closed(self, round_: Round, now: float) -> None:
        """Note the facts that set the number of steps in later rounds: the steps taken, also of contributions
        that were not finite, the loss, and the times."""
        self._note_times(round_, now)
        if round_.contributions:
            self._all_steps += max(round_.stepped.values(), default=0) or round_.steps
        losses = [(each.loss, each.samples) for each in round_.contributions.values() if each.samples]
        if losses:
            self._loss = mean_loss(losses)
            if self._first_loss is None and not math.isnan(self._loss):
                self._first_loss = self._loss

    def _note_times(self, round_: Round, now: float) -> None:
        """Update the mean times of a local step and of an exchange."""
        taken = [each for each in round_.computing.values() if each[1] and math.isfinite(each[0])]
        seconds, samples = max(taken, default=(0.0, 0))
        if not seconds > 0:
            return
        of_step = self._state.rules.batch_size * self._state.accumulation.batches
        step = seconds / -(-samples // of_step)
        exchange = max(0.0, now - round_.opened_at - seconds)
        known = self._step_s > 0
        self._step_s = (self._step_s + step) / 2 if known else step
        self._exchange_s = (self._exchange_s + exchange) / 2 if known else exchange
