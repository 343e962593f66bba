"""Limits that end a job before its last epoch: their options, and pure functions of the job's progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...common.spec import SpecError, parse_options, parse_spec
from ...proto.messages import EpochStatus
from ...settings import JobSettings
from .schedule import parse_schedule

# A metric whose name contains one of these words is better when it is smaller.
SMALLER_IS_BETTER = ("loss", "error", "perplexity", "nll", "mse", "mae", "rmse")
NO_EPOCHS = 2**32 - 1  # number of epochs of a job that another limit ends
EVALUATIONS_REMEMBERED = 1024  # only the last ones, so that memory stays bounded in a job without end


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """The options of `--early-stop`: end the job when a metric stops improving."""

    patience: int = 5  # number of evaluations in a row without a new best value after which the job ends
    delta: float = 0.0  # amount by which a value has to exceed the best one to count as better

    def __post_init__(self) -> None:
        if not 1 <= self.patience < EVALUATIONS_REMEMBERED:
            limits = f"1 to {EVALUATIONS_REMEMBERED - 1} evaluations"
            raise ValueError(f"patience: expected {limits}, got {self.patience}")
        if not 0 <= self.delta < math.inf:
            raise ValueError(f"delta: expected a finite number of at least 0, got {self.delta:g}")

    def over(self, values: Sequence[float]) -> bool:
        """Return True if the last `patience` values brought no improvement of more than `delta`.

        Args:
            values: the metric at each evaluation, oldest first, with the sign that makes larger values
                better.
        """
        best, since = -math.inf, 0
        for value in values:
            if value > best + self.delta or best == -math.inf:
                best, since = value, 0
            else:
                since += 1
        return since >= self.patience


def parse_early_stop(text: str) -> tuple[str, EarlyStop] | None:
    """Parse `--early-stop METRIC[:patience=,delta=]` into the metric's name and the options.

    Returns:
        None for an empty text, which means no early stop.

    Raises:
        SpecError: an option is unknown or out of range.
    """
    if not text:
        return None
    spec = parse_spec("early stop", text)
    return spec.name, parse_options(EarlyStop, spec)


def check(rules: JobSettings) -> None:
    """Raise SpecError if the job would never end, or if its schedule needs an end that is unknown."""
    if not rules.epochs and not (rules.max_steps or rules.max_seconds):
        raise SpecError("--epochs 0: expected --max-steps or --max-seconds with it, or the job never ends")
    if parse_schedule(rules.schedule).needs_end and not rules.epochs and not rules.max_steps:
        raise SpecError(
            f"--schedule {rules.schedule}: it ends with the job; set the job's end with --epochs or "
            "--max-steps"
        )


def epochs(rules: JobSettings) -> int:
    """Return the number of epochs of the job; `NO_EPOCHS`, a very large number, where other limits end it."""
    return rules.epochs or NO_EPOCHS


def fraction_done(rules: JobSettings, epochs_passed: float, steps: float) -> float:
    """Return the fraction of the job that is done, 0 to 1, by the limit that is nearest.

    Returns:
        0 if only time ends the job.
    """
    by_epochs = epochs_passed / rules.epochs if rules.epochs else 0.0
    by_steps = steps / rules.max_steps if rules.max_steps else 0.0
    return min(1.0, max(by_epochs, by_steps))


def why_over(rules: JobSettings, version: int, elapsed_s: float, evaluations: Sequence[EpochStatus]) -> str:
    """Return the reason for which the job ends now; empty if it continues, or ends with its last epoch."""
    if rules.max_steps and version >= rules.max_steps:
        return f"reached --max-steps {rules.max_steps}"
    if rules.max_seconds and elapsed_s >= rules.max_seconds:
        return f"reached --max-seconds {rules.max_seconds:g}"
    stop = parse_early_stop(rules.early_stop)
    if stop is None:
        return ""
    name, options = stop
    sign = -1.0 if any(word in name for word in SMALLER_IS_BETTER) else 1.0
    values = [sign * each.metrics[name] for each in evaluations if name in each.metrics]
    if not options.over(values):
        return ""
    return f"{name} has not improved in {options.patience} evaluations (--early-stop)"
