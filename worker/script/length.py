"""The length of a job: batches of an epoch, steps of the whole job, and the fraction that is done.

Before the first assignment these are computed from the data set and the number of workers that the server
expects. Afterwards each assignment carries them, for the present number of workers.

A script finds its last batch of an epoch by `i + 1 == len(batches)`. Members may be lost or join within the
epoch, so in a loop the length is the number of batches that the script has got, and of those to come by the
present assignment. After the loop it is the number that there were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

from ...common.spec import parse_spec
from ...proto import messages as m
from ...proto.shares import assigned_samples, draws
from ...settings import JobTerms
from .terms import ScriptError, epochs_of

log = logging.getLogger("gradwire.worker")


class JobLength:
    """The length of one job, from its options, its data set and its assignments.

    Attributes:
        terms: the job's options.
        samples: number of samples in an epoch; 0 before the script has given a data set or a loader.
        least: smallest number of samples that a batch may have.
        done: fraction of the last assignment's samples that come before the present optimizer step, 0 to 1.
        accumulate: number of batches of an optimizer step, as the script has declared it; 0 if it has not.
    """

    def __init__(self, terms: JobTerms, *, workers: int, single: bool) -> None:
        """
        Args:
            workers: number of members that share a step, as known at the join.
            single: True if each push becomes a version by itself.
        """
        self.terms, self._single = terms, single
        self._workers = max(1, workers)
        self._assignment: m.Assignment | None = None  # the last assignment
        self._total_steps = 0  # the last total from the server; 0 before the first
        self._given = self._of_loop = (
            0  # batches of the present loop: given, and all of them; 0 outside of it
        )
        self.samples = 0
        self.least = 1
        self.done = 0.0
        self.accumulate = 0
        self._used = ""  # use of the number of epochs

    def declare(self, call: str, samples: int, accumulate: int, *, begun: bool) -> None:
        """Note the number of samples of an epoch, and that of batches of an optimizer step.

        Args:
            call: call of the script, for the message of an error.
            accumulate: declared number of batches; 0 for none.
            begun: True once batches have begun.

        Raises:
            ScriptError: `accumulate` is no whole number, or another one than before.
        """
        if accumulate < 0 or accumulate != int(accumulate):
            raise ScriptError(f"{call}(accumulate={accumulate!r}): expected a whole number, 1 or more")
        if accumulate and begun and accumulate != self.accumulate:
            raise ScriptError(
                f"{call}(accumulate={accumulate}): before its first batch the script has declared "
                f"{self.accumulate or 'none'}; give every call the same number"
            )
        if call == "job.batches" and not self.samples:
            log.info("batches of %d samples, as the server says (--batch-size)", self.terms.batch_size)
        self.samples, self.accumulate = samples, accumulate or self.accumulate

    def choose_epochs(self, total: int | None, start: int, *, begun: bool) -> JobTerms:
        """Return the job's terms with the number of epochs that the script names, as `Job.epochs` says.

        Raises:
            ScriptError: `total` contradicts the job's options or comes too late, or `start` is out of range.
        """
        epochs = epochs_of(self.terms.epochs, total, start, "batches have begun" if begun else self._used)
        self.terms = replace(self.terms, epochs=epochs)
        return self.terms

    def update(self, assignment: m.Assignment) -> None:
        """Update the numbers from an assignment."""
        self._assignment, self.done = assignment, 0.0
        # Assignments that ask for an evaluation or end the job carry no total.
        self._total_steps = assignment.total_steps or self._total_steps
        if assignment.ranges:
            self._workers = max(1, assignment.world)

    def begin_loop(self) -> None:
        """Begin to count the batches of a loop."""
        self._given = self._of_loop = 0

    def give(self, assignment: m.Assignment, at: int) -> None:
        """Count a batch that the script gets, before which `at` batches of its assignment come."""
        own = max(1, len(assignment.batches))
        # Samples of the epoch that were not settled when this round, of `own` batches of each member, opened.
        left = round(self.samples * (assignment.epoch + 1 - assignment.progress))
        later = max(0, self._divided(left, max(1, assignment.world)) - own)
        self._given += 1
        self._of_loop = self._given + own - 1 - at + later

    @property
    def batches(self) -> int:
        """Number of this worker's batches: of the present loop, or of an epoch outside of it."""
        return self._of_loop or self.of_epoch

    @property
    def of_epoch(self) -> int:
        """Number of this worker's batches in a whole epoch, with the present number of workers."""
        return self._divided(self.samples, self._workers)

    def _divided(self, samples: int, workers: int) -> int:
        """Return the number of each worker's batches of `samples` samples."""
        at_once, enough = self.terms.batch_size * workers, self.least * workers
        whole, rest = divmod(samples, at_once)
        if self._single or not whole or not 0 < rest < enough:
            return draws(samples, at_once, self.least)
        # The last two rounds share the rest equally, if each worker gets enough samples in both.
        return whole + (rest >= self.least or (at_once + rest) // 2 >= enough)

    @property
    def total_epochs(self) -> int:
        """Number of epochs of the whole job; 0 if another limit ends it."""
        self._used = "job.total_epochs was read"
        return self.terms.epochs

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole job, in local mode of local steps. Raises ScriptError while it is
        unknown, or if only time ends the job."""
        self._used, terms = "job.total_steps was read", self.terms
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
        mode = parse_spec("mode", self.terms.mode)
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
        assignment, terms = self._assignment, self.terms
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
        """loader: object with the attributes that a script may read."""
        self._run, self._length, self._loader = run, length, loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        return self._run()


def batches_of(loader: Any) -> int:
    """Return the number of batches in an epoch of a loader, those of all replicas among which its sampler
    divides the samples; raise ScriptError for one without a length."""
    replicas: int = getattr(getattr(loader, "sampler", None), "num_replicas", 1)
    try:
        return len(loader) * replicas
    except TypeError:
        raise ScriptError(
            "job.steps: the loader has no length; pass the number of batches in an epoch as per_epoch="
        ) from None
