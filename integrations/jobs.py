"""A job of gc-server in a trainer that owns the loop: its batches, its optimizer, and the end of training.

The trainer counts epochs itself, by the length of its loader. `JobLoader` gives it the job's batches, and
ends its epoch with the job's. After the last step of an epoch it waits (`end_epoch`), so that the model has
the job's buffers while the trainer evaluates; `finish` makes the end of the trainer the end of the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from ..worker.script.job import Job
from ..worker.script.length import Batches
from ..worker.script.terms import ScriptError, Steps

ONCE = (
    "this trainer has trained in its job before, and joins a job once; train in a new process, with a new "
    "gc-server"
)
_EPOCH, _OVER = object(), object()  # in place of a batch, at the end of an epoch and of the job


def attach(
    job: Job, model: nn.Module, optimizer: Any, *, clip_norm: float, scaler: Any, steps: Steps, **options: Any
) -> tuple[Any, bool]:
    """Attach a trainer's model and optimizer. Return the optimizer of the job, and True if the job clips the
    mean gradient, so that the trainer must not.

    Args:
        clip_norm: the trainer's own limit of the norm of gradients; 0 for none.
        scaler: the trainer's GradScaler; None without one.
        options: others of `Job.attach`.

    Raises:
        ScriptError: mixed precision is float16, or the mode is not one of rounds; and as `Job.attach`.
        ModelError: as `Job.attach`.
    """
    mode = job.mode.partition(":")[0]
    if mode not in ("sync", "local"):
        raise ScriptError(
            f"gradwire.integrations: mode {job.mode}: a trainer counts its own batches, and workers without "
            "rounds take different numbers; start gc-server with --mode sync or local"
        )
    if scaler is not None:
        raise ScriptError("gradwire.integrations: float16 with a GradScaler is untried in jobs; use bfloat16")
    clips = mode == "sync" and steps == "server"
    _, attached = job.attach(model, optimizer, clip_norm=clip_norm if clips else 0.0, steps=steps, **options)
    return attached, clips


def follow(job: Job, scheduler: Any, each: Any = "step") -> None:
    """Have the job advance a trainer's scheduler where this worker is late; raise ScriptError for one that
    follows this worker's own metric."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ScriptError(
            "gradwire.integrations: ReduceLROnPlateau follows this worker's own metric, so that rates would "
            "differ; use another scheduler, or job.follow(scheduler, metric=...) in a loop of your own"
        )
    job.follow(scheduler, each=each)


class JobLoader:
    """The batches of a job for a trainer.

    Attributes:
        batches: the trainer's loader: an iterable with a length, the batches of an epoch.
    """

    def __init__(
        self,
        job: Job,
        loader: Any,
        *,
        epochs: int | None,
        accumulate: int,
        max_steps: int = 0,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            loader: the trainer's DataLoader, whose data set the job divides among its workers; or
                `job.batches(...)` or `job.steps(...)` themselves.
            epochs: number of epochs that the trainer expects; None if another limit ends it.
            accumulate: number of batches of an optimizer step.
            max_steps: number of optimizer steps after which the trainer ends; 0 if it does not count them.
            over: called when the trainer asks for a batch after the end of the job.

        Raises:
            ScriptError: the loader's batch size or number of epochs is not the job's, or its sampler decides
                which samples are in a batch.
        """
        self._job = job
        inner = loader if isinstance(loader, Batches) else _divided(job, loader, accumulate)
        self.batches = Batches(self._epoch, lambda: len(inner), inner)
        if epochs is None and max_steps > 0 and job.has_default_epochs:
            epochs = math.ceil(max_steps / math.ceil(len(inner) / accumulate))
        self._of_job = self._items(job.epochs(epochs), inner)
        self._over = over
        self._ahead: Any = None  # fetched before the trainer has asked for it

    @staticmethod
    def _items(epochs: Generator[int], batches: Batches) -> Generator[Any]:
        for _ in epochs:
            yield from batches
            yield _EPOCH

    def _next(self) -> Any:
        self.end_epoch()
        item, self._ahead = self._ahead, None
        return item

    def _epoch(self) -> Generator[Any]:
        given, length = 0, len(self.batches)
        while given < length:
            item = self._next()
            if item is _OVER:
                self._over()
                return
            if item is _EPOCH and given:
                return
            if item is not _EPOCH:
                given += 1
                yield item

    def end_epoch(self) -> None:
        """Called before the trainer evaluates, after a step: take the job's next batch or the end of its
        epoch."""
        if self._ahead is None:
            self._ahead = next(self._of_job, _OVER)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Report a trainer's numbers, if the server has asked this worker for them."""
        if self._job.evaluating:
            # The mean of `loss` is that of training steps.
            numbers = {"valid_loss" if name == "loss" else name: value for name, value in metrics.items()}
            self._job.log(**{name: float(value) for name, value in numbers.items()})

    def finish(self) -> None:
        """Leave the job when the trainer ends; before the end of the job, stop it on all ranks."""
        item = self._next()
        while item is _EPOCH:
            item = self._next()
        if item is not _OVER:
            self._job.stop("the trainer has ended")
        self._job.leave()


def _divided(job: Job, loader: Any, accumulate: int) -> Batches:
    """Return the job's batches of a DataLoader's data set."""
    batches: Any = getattr(loader, "batch_sampler", None)
    whole = RandomSampler, SequentialSampler, DistributedSampler
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, whole):
        kind = type(loader if batches is None else getattr(batches, "sampler", batches)).__name__
        raise ScriptError(
            f"gradwire.integrations: {kind} decides which samples a worker trains on; the job divides a data "
            "set itself: use a DataLoader with batch_size= and no sampler of its own, or pass "
            "job.steps(loader, per_epoch=...) as the loader"
        )
    return job.batches(
        loader.dataset,
        batch_size=batches.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        accumulate=accumulate if accumulate > 1 else 0,
    )


def single(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the only optimizer of a trainer; raise ScriptError if it has several."""
    if len(optimizers) != 1:
        raise ScriptError(
            f"gradwire.integrations: expected one optimizer, got {len(optimizers)}; a job steps one: give it "
            "the parameters of all models in groups, and train the models in turn, batch by batch, by "
            "requires_grad_; for both on the same batch pass job.steps(loader, per_epoch=...) of a loader "
            "that gives each batch twice"
        )
    return optimizers[0]
