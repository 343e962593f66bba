"""A script's part in a job, as its loop sees it: `gradwire.connect` returns a `Job`.

The script owns the loop; `driver` drives the training steps from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from ...common.addresses import parse_address
from ...common.configuration import Effective
from ...common.naming import own_name
from ...common.telemetry import keep_warnings
from ...settings import JobSettings, WorkerSettings
from ..session.model_state import least_samples
from ..training.data import batch_checksum, data_checksum
from ..training.sharding import Shards
from ..training.work import Gradients
from . import process
from .attached import Attached
from .driver import Driver
from .length import Batches, JobLength, batches_of
from .loading import Loading, explained
from .membership import Membership
from .part import Part
from .schedules import Each, Schedules
from .script_state import Position, State
from .terms import Frozen, Overlap, ScriptError, Steps, check_batch_size

log = logging.getLogger("gradwire.worker")

Model = TypeVar("Model", bound=nn.Module)
Scheduler = TypeVar("Scheduler")

COMPARED = 16  # batches of `steps` that are compared with other workers'


class Job:
    """A script's part in a job, returned by `gradwire.connect`. Use it from one thread. As a context it
    leaves the job.

    Attributes:
        mode: mode of the job, as `gc-server --mode` has it.
        state: values and objects by name that are saved and restored with this worker's state; see `State`.

    Example:
        >>> with gradwire.connect() as job:
        ...     model, optimizer = job.attach(model, optimizer)
        ...     for epoch in job.epochs():
        ...         for x, y in job.batches(dataset):
        ...             loss = torch.nn.functional.mse_loss(model(x), y)
        ...             job.log(loss=loss)
        ...             loss.backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...     print(job.done, job.progress)
        True 1.0
    """

    def __init__(self, effective: Effective[WorkerSettings]) -> None:
        """Join the job with a worker's options."""
        settings = effective.settings
        key = parse_address(settings.server), settings.worker_id or own_name()
        process.make_room(key)
        self._member = member = Membership(effective)
        single = isinstance(member.work, Gradients) and member.work.single
        self._length = JobLength(member.terms, workers=member.reply.workers, single=single)
        self._schedules = Schedules()
        self._driver = Driver(member, self._length, self._schedules)
        self._part = Part(key, member, self._driver)
        self._compared, self._warned_of_repeat = 0, False  # the first: batches with a checksum
        self.mode = member.terms.mode
        self.state = State(member.owner.get("state", {}))
        self._position = Position(member.owner.get("loader"))
        keep_warnings()
        process.add(self._part)

    # ---- membership

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._part.leave_after(error)

    def leave(self, reason: str = "", *, failed: bool = False) -> None:
        """Leave the job, once, with a reason for the server's log; the script's loops end. It is called at
        the end of the process too. With `failed` the server counts this worker as lost."""
        self._part.leave(reason, failed=failed)

    def stop(self, reason: str = "stopped by the script") -> None:
        """End the job early on all ranks, normally: the open step is finished, the last version is evaluated
        and saved, and all loops end. The reason is for the server's log and for workers that come later.

        Raises:
            ScriptError: batches have not begun.
        """
        if self._driver.assignments is None:
            raise ScriptError("job.stop: call it after the first batch; before that, stop gc-server")
        self._part.stops = True
        self._member.connection.stop_job(reason)

    # ---- state of the job

    @property
    def applied(self) -> bool:
        """True if the last `optimizer.step()` counts. False if its gradients were not finite, or arrived too
        late; late gradients are sent again with the next push."""
        return self._driver.applied

    @property
    def done(self) -> bool:
        """True once the job is over."""
        return self._member.done

    @property
    def rank(self) -> int:
        """Rank of this worker: the smallest number from 0 that no other member had when it joined. A member
        that was lost and returns may get another one: ask again in each epoch."""
        return self._member.connection.rank

    @property
    def version(self) -> int:
        """Version of the parameters: the number of steps that the job has taken."""
        assignments = self._driver.assignments
        version = None if assignments is None else assignments.session.replica.version
        return self._member.reply.version if version is None else version

    @property
    def has_default_epochs(self) -> bool:
        """True while the number of epochs is the server's default, so that `epochs` may name it. Unlike
        `total_epochs` this is no use of the number."""
        return self._length.terms.epochs == JobSettings().epochs

    @property
    def total_epochs(self) -> int:
        """Number of epochs of the whole job; 0 if another limit ends it."""
        return self._length.total_epochs

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole job, for schedulers that are stepped once for each `optimizer.step()`
        and passed to `follow`. It changes when workers join or leave; `progress` does not.

        Before the first batch it follows from `--min-workers` and the data set of `batches` or `steps`.

        Raises:
            ScriptError: the number is not known yet, or only time ends the job.
        """
        return self._length.total_steps

    @property
    def progress(self) -> float:
        """Fraction of the job that is done at the present batch, 0 to 1; 0 if only time ends the job. It is
        the same for all workers that compute the same step; in local mode it may differ by less than a step.
        """
        return 1.0 if self.done else self._length.progress

    @property
    def evaluating(self) -> bool:
        """True if the server has asked this worker to evaluate. It reports numbers that are logged now as the
        last epoch's metrics."""
        assignments = self._driver.assignments
        return assignments is not None and assignments.evaluating

    @property
    def evaluation(self) -> Mapping[str, float]:
        """Metrics of the job's last evaluation, by name; empty before the first. All workers that compute the
        same step have the same.

        An epoch is evaluated in the next one: after the loop over its batches this is of the epoch before.
        """
        known = () if self._driver.assignments is None else self._driver.assignments.evaluations
        return known[-1] if known else {}

    @property
    def best(self) -> Mapping[str, float]:
        """Best value of each metric in the evaluations of the job so far, by name; empty before the first.

        For `loss`, `error` and the like the smallest value is the best, for other metrics the largest; the
        option `gc-server --keep` may state another direction. The server sends the values to all workers.
        """
        assignments = self._driver.assignments
        return {} if assignments is None else assignments.session.best

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of this worker by name, for any logger: bytes, seconds and others; NaN for unknown ones."""
        return {"version": float(self.version), **self._member.metrics.numbers()}

    # ---- model and optimizer

    def attach(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float = 0.0,
        steps: Steps = "server",
        overlap: Overlap | None = None,
        frozen: Frozen = "server",
    ) -> tuple[Model, Any]:
        """Attach a model and its optimizer to the job. When batches begin, all workers get the parameters of
        the job's first worker.

        The server's optimizer starts from the state that `optimizer` has when batches begin: loaded by the
        script, or left by earlier steps. The first worker's state counts, as with parameters.

        Args:
            model: its parameters become views of one buffer.
            optimizer: SGD, Adam, AdamW or Adagrad of torch.optim. The server runs it, with the options of its
                parameter groups. Their learning rates, which a scheduler may change, are sent with each step.
            clip_norm: largest norm of the mean gradient of all workers; 0 for the job's (`gc-server
                --clip-norm`). The first worker's counts, as with the optimizer.
            steps: the process that takes the steps. "server": the server. "local": this worker, with any
                optimizer and its own gradients; the server averages the changes of all workers. Mode `local`
                implies "local".
            overlap: "off" to send no gradient before `step()`; None for the job's choice.
            frozen: "server" if the first worker uploads the frozen parameters; "local" if every worker has
                the same, which digests prove: no message and no file of the server has them then.

        Returns:
            The model, and the optimizer that the loop and schedulers must use from now on, a `JobOptimizer`:
            its `step()` pushes the gradients and waits for the new parameters. (Its type is Any, so that a
            script may reuse its own variable.)

        Raises:
            ScriptError: the server cannot run the optimizer, or `clip_norm` or `overlap` contradicts the
                job's options.
            ModelError: a parameter is neither float32 nor bfloat16, or shares memory with another one.
        """
        if self._driver.attached is not None:
            raise ScriptError(
                "job.attach: this job already has a model; attach one torch.nn.ModuleDict of all models, "
                "with one optimizer that has their parameters in groups"
            )
        options: Any = {"clip_norm": clip_norm, "steps": steps, "overlap": overlap, "frozen": frozen}
        attached = Attached(self._member, model, optimizer, self._driver.push, **options)
        self._driver.attached = attached
        self._length.least = least_samples(model)
        return model, attached.optimizer

    def follow(self, scheduler: Scheduler, *, each: Each = "step", metric: str = "loss") -> Scheduler:
        """Register a scheduler and return it. Before each batch it is advanced to the job's present step or
        epoch.

        It is behind if this worker has joined late, has returned, or has missed a step. The job itself steps
        a ReduceLROnPlateau, once for each evaluation, before the same batch on all ranks.

        Args:
            scheduler: scheduler of torch.optim.lr_scheduler. The script steps it as it would without a job.
            each: how often the script steps it: "step" for once per `optimizer.step()`, which in local mode
                is a local step, "epoch" for once per epoch of `job.epochs()`. "progress" is for a LambdaLR
                whose function reads `job.progress`: the job steps it before each batch, and its rates do not
                depend on the number of workers.
            metric: name of the evaluated number for a ReduceLROnPlateau, as in `log`.

        Raises:
            ScriptError: the scheduler depends on something else than steps or evaluations.
        """
        self._schedules.follow(scheduler, each, metric)
        return scheduler

    # ---- the loops

    def epochs(self, total: int | None = None, *, start: int = 0) -> Generator[int]:
        """Iterate over the numbers of the job's epochs, from 0 or from the job's present epoch, until the job
        is done.

        An epoch ends when all of its samples are trained on. If the loop over batches ends earlier, the same
        number is yielded again.

        Args:
            total: number of all epochs of the job; None for the server's. The first worker's counts, as with
                the optimizer. Name it before `total_steps` is read.
            start: number of epochs that the script has trained before, according to a file of its own. The
                first worker's `start` decides where a new job begins; a running job stays where it is.

        Raises:
            ScriptError: `total` contradicts the server or comes late, or `start` is out of range.
        """
        self._member.terms = self._length.choose_epochs(total, start, begun=self._begun)
        driver = self._driver
        if driver.assignments is None and not self._member.reply.version:
            driver.start, driver.first_epoch = start, max(driver.first_epoch, start)
        return self._epochs()

    def _epochs(self) -> Generator[int]:
        member, driver, of_job = self._member, self._driver, self._member.terms.epochs
        if of_job and driver.start >= of_job:
            log.warning(
                "job.epochs(start=%d): the job has %d epochs, and the script trains on none of them. Stop "
                "gc-server, which waits for a worker that does; or start it with more --epochs, which count "
                "those before",
                *(driver.start, of_job),
            )
            return
        while not (self.done or member.left):
            epoch = driver.epoch
            self._length.begin_loop()
            yield epoch
            if member.left:
                return
            if driver.assignments is None:
                raise ScriptError("job.epochs: no batch was trained on; loop over job.batches(...) in it")
            # In stale and async mode the server may interrupt an epoch for an evaluation: no warning then.
            present = driver.assignments.present
            interrupted = present is not None and not present.ranges
            driver.assignments.turn_over()
            if epoch == driver.epoch and not (self.done or interrupted or self._warned_of_repeat):
                self._warned_of_repeat = True
                log.warning(
                    "epoch %d is repeated: the script's loop over batches ended before all samples of the "
                    "epoch were trained on. To end early, call job.stop()",
                    epoch + 1,
                )

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        accumulate: int = 0,
    ) -> Batches:
        """Return this worker's batches of the present epoch, as an iterable with a length.

        Each sample of an epoch goes to one worker, also when workers join or leave. Within the loop the
        length is the number of batches given and still to come, with the present number of workers.

        Args:
            dataset: data set with `len` and `[]`, the same for every worker.
            batch_size: number of samples in a batch, equal to the job's (`gc-server --batch-size`); None for
                the job's. Batches at the end of an epoch may be smaller.
            num_workers: number of processes that fetch the samples of each batch together; 0 to fetch them
                here.
            collate_fn: function that makes a batch from a list of samples.
            accumulate: number of batches whose gradients the script adds up for one `optimizer.step()`; 0 to
                let the server learn it. `total_steps` needs it before the first batch, and so do jobs with
                `--overlap both` or redundancy.

        Raises:
            ScriptError: the batch size or the data set is not the job's. Also while iterating.
            ModelError: while iterating: no parameter requires a gradient, or one is neither float32 nor
                bfloat16.
            Refused: while iterating: the server has ended the membership, or refused a push.
            UnreachableError: while iterating: no server was reached for `give_up_seconds`.
        """
        of_job = self._member.terms.batch_size
        check_batch_size(of_job, batch_size)
        self._length.declare("job.batches", len(dataset), accumulate, begun=self._begun)
        options: dict[str, Any] = {"dataset": dataset, "num_workers": num_workers, "collate_fn": collate_fn}
        attributes = SimpleNamespace(**options, batch_size=of_job, drop_last=False)
        return Batches(partial(self._samples_of, **options), lambda: self._length.batches, attributes)

    @property
    def _begun(self) -> bool:
        return self._driver.assignments is not None

    def _samples_of(
        self, dataset: Any, num_workers: int, collate_fn: Callable[[list[Any]], Any]
    ) -> Generator[Any]:
        here, loading = Loading(dataset, 0), self._part.loading
        if loading.dataset is not dataset or loading.processes != num_workers:
            loading.close()
            loading = self._part.loading = Loading(dataset, num_workers)
        shards, connection = Shards(self._member.terms.seed, len(dataset)), self._member.connection
        fetched = partial(data_checksum, lambda indices: collate_fn(here.fetch(indices)), len(dataset))
        self._driver.begin(len(dataset), fetched, self._image)
        for assignment, batch in self._driver.batches():
            connection.activity = "loading a batch"
            found = collate_fn(loading.fetch(shards.of(assignment)[batch]))
            connection.activity = "computing"
            with self._member.metrics.given():
                yield found

    def steps(self, loader: Iterable[Any], *, per_epoch: int | None = None, accumulate: int = 0) -> Batches:
        """Return the batches of the script's own loader for as long as the epoch lasts, as an iterable with a
        length.

        The loader decides which samples they hold; every batch has the same weight.

        Args:
            loader: iterable of batches; it is iterated again if it ends before the epoch does.
            per_epoch: number of batches of all workers together in an epoch. None for the loader's length,
                times the number of replicas if its sampler divides the samples among replicas.
            accumulate: number of batches whose gradients the script adds up for one `optimizer.step()`, as
                in `batches`.

        Raises:
            ScriptError: the loader has no length and `per_epoch` is None, or it yields no batches (while
                iterating).
            ModelError, Refused, UnreachableError: while iterating, as in `batches`.
        """
        samples = (batches_of(loader) if per_epoch is None else per_epoch) * self._member.terms.batch_size
        self._length.declare("job.steps", samples, accumulate, begun=self._begun)
        return Batches(partial(self._steps_of, loader, samples), lambda: self._length.batches, loader)

    def _steps_of(self, loader: Iterable[Any], samples: int) -> Generator[Any]:
        connection = self._member.connection
        with self._position.iterate(loader) as batches:
            session = self._driver.begin(samples, lambda: 0, self._image).session
            for _ in self._driver.batches():
                connection.activity = "waiting for the script's loader"
                with explained():
                    batch = next(batches)
                connection.activity = "computing"
                # By its checksum the server notices that several workers train on the same batches.
                if not session.batch and self._compared < COMPARED:
                    self._compared += 1
                    session.batch = batch_checksum(batch)
                with self._member.metrics.given():
                    yield batch

    def _image(self) -> dict[str, Any]:
        """Return the script's own part of the state that this worker saves."""
        return {**self._driver.image(), "state": self.state.image(), "loader": self._position.image()}

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add to the gradients; the last one must be outside
        of it.

        It is needed for several backward passes of one batch. For the batches of one optimizer step it only
        saves sending gradients early.
        """
        if self._driver.assignments is None:
            raise ScriptError("job.no_sync: use it in the loop over job.batches(...)")
        return self._driver.adding()

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Log numbers by name. The server shows their means over the epoch for the worker that it asks to
        evaluate.

        Args:
            metrics: numbers or scalar tensors by name. `loss`, logged before `optimizer.step()`, is also the
                step's loss; of several batches, their mean.
        """
        self._driver.log(metrics)
