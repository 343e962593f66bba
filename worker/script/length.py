"""The length of a job: batches of an epoch, steps of the whole job, and the fraction that is done.

Before the first assignment these are computed from the data set and the number of workers that the server
expects. Afterwards each assignment carries them, for the present number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from ...common.spec import parse_spec
from ...proto import messages as m
from ...proto.shares import assigned_samples, draws
from ...settings import JobTerms
from .terms import ScriptError


class JobLength:
    """The length of one job, from its options, its data set and its assignments.

    Attributes:
        samples: number of samples in an epoch; 0 before the script has given a data set or a loader.
        least: smallest number of samples that a batch may have.
        done: fraction of the last assignment's samples that come before the present optimizer step, 0 to 1.
        accumulate: number of batches of an optimizer step, as the script has declared it; 0 if it has not.
    """

    def __init__(self, terms: JobTerms, *, workers: int, single: bool) -> None:
        """
        Args:
            terms: the job's options.
            workers: number of members that share a step, as known at the join.
            single: True if each push becomes a version by itself.
        """
        self._terms, self._single = terms, single
        self._workers = max(1, workers)
        self._assignment: m.Assignment | None = None  # the last assignment
        self._total_steps = 0  # the last total from the server; 0 before the first
        self.samples = 0
        self.least = 1
        self.done = 0.0
        self.accumulate = 0

    def update(self, assignment: m.Assignment) -> None:
        """Update the numbers from an assignment."""
        self._assignment, self.done = assignment, 0.0
        # Assignments that ask for an evaluation or end the job carry no total.
        self._total_steps = assignment.total_steps or self._total_steps
        if assignment.ranges:
            self._workers = max(1, assignment.world)

    @property
    def batches(self) -> int:
        """Number of this worker's batches in an epoch, with the present number of workers."""
        at_once, enough = self._terms.batch_size * self._workers, self.least * self._workers
        whole, rest = divmod(self.samples, at_once)
        if self._single or not whole or not 0 < rest < enough:
            return draws(self.samples, at_once, self.least)
        # The last two rounds share the rest equally, if each worker gets enough samples in both.
        return whole + (rest >= self.least or (at_once + rest) // 2 >= enough)

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole job, in local mode of local steps. Raises ScriptError while it is
        unknown, or if only time ends the job."""
        terms = self._terms
        if self._total_steps:
            return self._total_steps
        if not terms.epochs and not terms.max_steps:
            raise ScriptError(
                "job.total_steps: only time ends this job; start gc-server with --epochs or --max-steps"
            )
        most = terms.max_steps * self._local_steps() if terms.max_steps else 0
        if not terms.epochs:
            return most
        if not self.samples:
            raise ScriptError(
                "job.total_steps: the number of samples in an epoch is not known yet; call "
                "job.batches(dataset) or job.steps(loader) first, and loop over its result later"
            )
        at_once = terms.batch_size * (1 if self._single else self._workers) * (self.accumulate or 1)
        total = terms.epochs * draws(self.samples, at_once, self.least)
        return min(total, most) if most else total

    def _local_steps(self) -> int:
        """Return the number of steps in a version: that of local steps in local mode, else 1.

        Raises:
            ScriptError: the rounds of a job of local mode have different numbers of steps.
        """
        mode = parse_spec("mode", self._terms.mode)
        if mode.name != "local":
            return 1
        steps = mode.options.get("steps", "adaptive")
        if not steps.isdecimal():
            raise ScriptError(
                "job.total_steps: --max-steps counts rounds, whose number of steps is not known before the "
                "first batch; use a LambdaLR of job.progress, or start gc-server with --mode local:steps=N"
            )
        return int(steps)

    @property
    def progress(self) -> float:
        """Fraction of the job that is done, 0 to 1, by the limit that is reached first; 0 if only time ends
        the job.

        It is the same for all workers that compute the same step, and in local mode differs by less than one
        local step.
        """
        assignment, terms = self._assignment, self._terms
        if assignment is None:
            return 0.0
        if assignment.finished:
            return 1.0
        of_round = assigned_samples(assignment) * assignment.world * self.done / (self.samples or 1)
        by_epochs = (assignment.progress + of_round) / terms.epochs if terms.epochs else 0.0
        by_steps = (assignment.version + self.done) / terms.max_steps if terms.max_steps else 0.0
        return min(1.0, max(by_epochs, by_steps))


class Batches:
    """The batches of an epoch. Like a DataLoader it has a length and attributes such as `dataset`, and may be
    looped over again in every epoch."""

    def __init__(self, run: Callable[[], Generator[Any]], length: Callable[[], int], loader: Any) -> None:
        """
        Args:
            run: function that yields the batches of the present epoch.
            length: function that returns their number.
            loader: object with the attributes that a script may read.
        """
        self._run, self._length, self._loader = run, length, loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        return self._run()
