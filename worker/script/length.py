"""How long a job is: batches of an epoch, steps of the whole job, and how much of it is done.

Before the first assignment these are computed from the data set and the number of workers that the server
expects; afterwards the server says them with each assignment, for as many workers as there are by then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from ...proto import messages as m
from ...proto.shares import draws
from ...settings import JobTerms
from .terms import ScriptError


class JobLength:
    """The length of one job.

    Attributes:
        samples: samples in an epoch; 0 before the script has given a data set or a loader.
        least: samples that a batch must have.
    """

    def __init__(self, terms: JobTerms, *, workers: int, single: bool) -> None:
        """
        Args:
            workers: members that steps are divided among, as far as is known at the join.
            single: whether each push becomes a version by itself.
        """
        self._terms, self._single = terms, single
        self._workers = max(1, workers)
        self._assignment: m.Assignment | None = None  # the last one
        self._total_steps = 0  # the last number from the server; 0 before the first
        self.samples = 0
        self.least = 1

    def update(self, assignment: m.Assignment) -> None:
        """Take over the numbers of an assignment."""
        self._assignment = assignment
        # Those that ask for an evaluation, or end the job, have no number.
        self._total_steps = assignment.total_steps or self._total_steps
        if assignment.ranges:
            self._workers = max(1, assignment.world)

    @property
    def batches(self) -> int:
        """Batches of this worker in an epoch, with as many workers as there are now."""
        return draws(self.samples, self._terms.batch_size * self._workers, self.least)

    @property
    def total_steps(self) -> int:
        """Steps of the whole job. Raises ScriptError where nobody knows them."""
        terms = self._terms
        if self._total_steps:
            return self._total_steps
        if not terms.epochs and not terms.max_steps:
            raise ScriptError(
                "job.total_steps: only time ends this job; start gc-server with --epochs or --max-steps"
            )
        if not terms.epochs:
            return terms.max_steps
        if not self.samples:
            raise ScriptError(
                "job.total_steps: nobody knows yet how many samples an epoch has; call job.batches(dataset) "
                "or job.steps(loader) first, and loop over what it returns later"
            )
        at_once = terms.batch_size * (1 if self._single else self._workers)
        total = terms.epochs * draws(self.samples, at_once, self.least)
        return min(total, terms.max_steps) if terms.max_steps else total

    @property
    def progress(self) -> float:
        """Part of the job that is done, 0 to 1, by the limit that comes first; 0 if only time ends it. The
        same for all workers that are given work together."""
        assignment, terms = self._assignment, self._terms
        if assignment is None:
            return 0.0
        if assignment.finished:
            return 1.0
        by_epochs = assignment.progress / terms.epochs if terms.epochs else 0.0
        by_steps = assignment.version / terms.max_steps if terms.max_steps else 0.0
        return min(1.0, max(by_epochs, by_steps))


class Batches:
    """The batches of an epoch. Like a DataLoader it has a length and may be looped over in every epoch."""

    def __init__(self, run: Callable[[], Generator[Any]], length: Callable[[], int]) -> None:
        """
        Args:
            run: goes through the batches of the present epoch.
            length: number of them.
        """
        self._run, self._length = run, length

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        return self._run()
