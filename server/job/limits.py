"""Limits that end a job before its last epoch, as options and as pure functions of the job's progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...common.spec import SpecError, parse_options, parse_spec
from ...proto.messages import EpochStatus
from ...settings import JobSettings
from .schedule import Cosine, parse_schedule

# Words in the names of metrics of which less is better.
SMALLER_IS_BETTER = ("loss", "error", "perplexity", "nll", "mse", "mae", "rmse")
NO_EPOCHS = 2**32 - 1
EVALUATIONS_REMEMBERED = 1024  # the last ones: a job that never ends must not grow with them


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """patience: evaluations without a new best value. delta: by how much that has to be better."""

    patience: int = 5
    delta: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.patience < EVALUATIONS_REMEMBERED:
            limits = f"1 to {EVALUATIONS_REMEMBERED - 1} evaluations"
            raise ValueError(f"patience: expected {limits}, got {self.patience}")
        if not 0 <= self.delta < math.inf:
            raise ValueError(f"delta: expected a finite number of at least 0, got {self.delta:g}")

    def over(self, values: Sequence[float]) -> bool:
        """Whether the last `patience` values brought nothing better. values: more is better."""
        best, since = -math.inf, 0
        for value in values:
            if value > best + self.delta or best == -math.inf:
                best, since = value, 0
            else:
                since += 1
        return since >= self.patience


def parse_early_stop(text: str) -> tuple[str, EarlyStop] | None:
    """The metric and what is asked of it; None for no text. Raises SpecError."""
    if not text:
        return None
    spec = parse_spec("early stop", text)
    return spec.name, parse_options(EarlyStop, spec)


def check(rules: JobSettings) -> None:
    """Raises SpecError for limits that do not go together."""
    if not rules.epochs and not (rules.max_steps or rules.max_seconds):
        raise SpecError("--epochs 0: expected --max-steps or --max-seconds with it, or the job never ends")
    schedule = parse_schedule(rules.schedule)
    if isinstance(schedule, Cosine) and not rules.epochs and not rules.max_steps:
        raise SpecError(
            f"--schedule {rules.schedule}: a cosine ends with the job; say with --epochs or --max-steps when "
            "that is"
        )


def epochs(rules: JobSettings) -> int:
    """Return the number of epochs, a very large one where other limits end the job."""
    return rules.epochs or NO_EPOCHS


def of_job(rules: JobSettings, epochs_passed: float, steps: float) -> float:
    """Return the fraction of a job that is done, by its nearest limit; 0 if only time ends it."""
    by_epochs = epochs_passed / rules.epochs if rules.epochs else 0.0
    by_steps = steps / rules.max_steps if rules.max_steps else 0.0
    return min(1.0, max(by_epochs, by_steps))


def why_over(rules: JobSettings, version: int, elapsed_s: float, evaluations: Sequence[EpochStatus]) -> str:
    """Return why a job ends now; empty if it continues, or ends with its last epoch.

    evaluations: the last ones, at most `EVALUATIONS_REMEMBERED`, in the order of epochs.
    """
    if rules.max_steps and version >= rules.max_steps:
        return f"--max-steps {rules.max_steps} are done"
    if rules.max_seconds and elapsed_s >= rules.max_seconds:
        return f"--max-seconds {rules.max_seconds:g} are over"
    stop = parse_early_stop(rules.early_stop)
    if stop is None:
        return ""
    name, options = stop
    sign = -1.0 if any(word in name for word in SMALLER_IS_BETTER) else 1.0
    values = [sign * each.metrics[name] for each in evaluations if name in each.metrics]
    if not options.over(values):
        return ""
    return f"{name} has not become better in {options.patience} evaluations (--early-stop)"
