"""A script's part in a job, as its loop sees it: `gradwire.connect` returns a `Job`.

The script owns the loop, so a training step (`worker/training/step`) is driven from three places here:

- `_batches` begins a step with each assignment, and asks for further batches of a step that accumulates.
- `_forward_passed` lets gradients leave from then on.
- `_push`, which is `optimizer.step()`, pushes.

`assignments` decides which assignment is next and when the loops end. `membership` joins and leaves.
`attached` makes the session from model and optimizer. No assignment is answered twice here: after its last
push the worker waits for the next assignment before `optimizer.step()` returns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from ...common.configuration import Effective
from ...common.naming import own_name
from ...common.telemetry import keep_warnings
from ...proto import messages as m
from ...proto.shares import assigned_samples
from ...settings import WorkerSettings, parse_address
from ..session.connection import MAX_ERROR_CHARACTERS, Earlier
from ..session.model_state import least_samples
from ..training.data import batch_checksum, data_checksum
from ..training.sharding import Indices, Shards
from ..training.step import TrainingStep
from ..training.work import Gradients, Local
from . import process
from .assignments import Assignments
from .attached import Attached
from .length import Batches, JobLength
from .loading import Loading, explained
from .membership import Membership
from .schedules import Each, Schedules
from .script_state import Position, State, copied, random_state, restore_random_state
from .terms import Overlap, ScriptError, Steps

log = logging.getLogger("gradwire.worker")

Model = TypeVar("Model", bound=nn.Module)
Scheduler = TypeVar("Scheduler")

COMPARED = 16  # batches of `steps` that are compared with other workers'
NO_WORK = (
    "optimizer.step(): no batch is open; call it in the loop over job.batches(...), at most once for each "
    "batch. For a last step of fewer batches than the others, call it in the loop when i + 1 == len(batches)"
)
NEVER_STEPPED = (
    "epoch %d: this worker has computed %d batches, as many as an epoch has, without optimizer.step(), so it "
    "would train nothing: in each epoch call step() of the optimizer that job.attach returned, and do not "
    "change parameters in its place"
)
UNLOGGED = "the server cannot show a training loss: call job.log(loss=loss) before optimizer.step()"


class Job:
    """A script's part in a job, returned by `gradwire.connect`. Use it from one thread. As a context it
    leaves the job.

    Attributes:
        applied: True if the last `optimizer.step()` counts. False if its gradients were not finite, or
            arrived too late; late gradients are sent again with the next push.
        state: values and objects by name that are saved and restored with this worker's state; see `State`.
    """

    def __init__(self, effective: Effective[WorkerSettings]) -> None:
        """Join the job with a worker's options."""
        self.applied = False
        settings = effective.settings
        self.key = parse_address(settings.server), settings.worker_id or own_name()
        self.thread = threading.current_thread()
        process.make_room(self.key)
        self._member = member = Membership(effective)
        self._attached: Attached | None = None
        self._assignments: Assignments | None = None  # set at the first batch
        self._step: TrainingStep | None = None  # the last step that was begun

        self._compared = 0  # number of batches of which a checksum was taken
        self._given = False  # True from handing out a batch until `optimizer.step()`
        self._losses: dict[int, float] = {}  # logged since the last optimizer.step(), by batch
        self._unstepped = 0  # batches since then
        self._told_unlogged = False
        self._only_adding = False  # True within `no_sync`: backward passes only add to the gradients
        self._schedules = Schedules()
        self._loading = Loading((), 0)
        owner = member.owner
        self.state = State(owner.get("state", {}))
        self._position = Position(owner.get("loader"))
        self._random: Mapping[str, Any] | None = owner.get("random")  # restored once batches begin
        self._logged: dict[str, list[float]] = {}  # shared with the assignments
        self._stops = False
        self._start = 0  # number of epochs that the script has trained before this job
        self._first_epoch: int = owner.get("epoch", member.reply.epoch)  # the job may be past it
        self._samples_arrived = False  # True once an assignment with samples has arrived
        self._warned_of_repeat = False
        single = isinstance(member.work, Gradients) and member.work.single
        self._length = JobLength(member.terms, workers=member.reply.workers, single=single)
        self._error_before = process.last_error()
        keep_warnings()
        process.add(self)

    # ---- membership

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the job; after an exception other than an interrupt, as a failed worker."""
        self._leave_after(error)

    def leave_with_script(self) -> None:
        """Leave the job at the end of the script, or of the notebook's cell, that has joined it."""
        error = process.last_error()
        self._leave_after(None if error is self._error_before else error)

    def _leave_after(self, error: BaseException | None) -> None:
        """Leave the job after an exception that ends the script; None without one."""
        if isinstance(error, Exception):
            self.leave(f"the script failed: {error!r}"[:MAX_ERROR_CHARACTERS], failed=True)
        elif isinstance(error, SystemExit) and not process.stopped_by():
            failed = error.code not in (None, 0)
            self.leave(f"the script has ended with exit code {error.code}" if failed else "", failed=failed)
        elif error is not None:
            self.leave(process.stopped_by() or f"stopped by {type(error).__name__}")
        else:
            self.leave()

    def leave(self, reason: str = "", *, failed: bool = False) -> None:
        """Leave the job, once; the script's loops end. It is called at the end of the process too.

        Args:
            reason: text for the server's log; empty for a default.
            failed: True if the server is to count this worker as lost.
        """
        member, assignments = self._member, self._assignments
        if member.left:
            return
        if assignments is not None and not self.done:
            if not (failed or reason):
                assignments.report_last()
            session = assignments.session
            if (held := session.held_back) and session.saving.kept is None:
                log.warning("leaving with residuals of norm %.3g, which the server has not received", held)
            present = assignments.present
            has_work = present is None or bool(present.ranges)
            if has_work and not (failed or self._stops):
                of = f" of {member.terms.epochs}" if member.terms.epochs else ""
                log.warning("leaving in epoch %d%s: the script ends before the job", self._epoch + 1, of)
        process.remove(self)
        self._loading.close()
        default = "done" if self.done else process.stopped_by() or "the script has ended"
        member.end(reason or default, failed=failed)

    def forget(self) -> None:
        """Note in a forked child that the job is its parent's."""
        self._member.left = True

    # ---- the last push

    @property
    def leave_s(self) -> float:
        """Seconds in which to push the residual after SIGTERM."""
        return self._member.settings.leave_seconds

    @property
    def away_s(self) -> float:
        """Seconds without a stream to the server; 0 while there is one."""
        return self._member.connection.away_s

    @property
    def owes(self) -> bool:
        """Whether a step is open, or part of a residual is not pushed, of a worker that leaves."""
        if self._assignments is None or self._member.left or self.done:
            return False
        step_open = self._step is not None and self._step.open
        return step_open or not self._assignments.session.finished_leaving

    def make_last_push(self) -> None:
        """Have the next step push the whole residual; the job is left after its outcome."""
        if self._assignments is not None:
            self._assignments.session.leave()

    def stop(self, reason: str = "stopped by the script") -> None:
        """End the job early on all ranks, normally: the open step is finished, the last version is evaluated
        and saved, and all loops end.

        Args:
            reason: text for the server's log and for workers that come later.

        Raises:
            ScriptError: batches have not begun.
        """
        if self._assignments is None:
            raise ScriptError("job.stop: call it after the first batch; before that, stop gc-server")
        self._stops = True
        self._member.connection.stop_job(reason)

    @property
    def done(self) -> bool:
        """True once the job is over."""
        return self._member.done

    @property
    def rank(self) -> int:
        """Rank of this worker: the smallest number from 0 that no other member had when it joined.

        A member that was lost and returns may get another rank: ask again in each epoch.
        """
        return self._member.connection.rank

    @property
    def version(self) -> int:
        """Version of the parameters: the number of steps that the job has taken."""
        version = None if self._assignments is None else self._assignments.session.replica.version
        return self._member.reply.version if version is None else version

    @property
    def total_epochs(self) -> int:
        """Number of epochs of the whole job (`gc-server --epochs`); 0 if another limit ends it."""
        return self._member.terms.epochs

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole job, with the present number of workers, for schedulers that are
        stepped once for each `optimizer.step()` and passed to `follow`.

        It changes when workers join or leave; `progress` does not. Before the first batch it is computed from
        `--min-workers` and the data set that was last passed to `batches` or `steps`.

        Raises:
            ScriptError: the number is not known yet, or only time ends the job.
        """
        return self._length.total_steps

    @property
    def progress(self) -> float:
        """Fraction of the job that is done at the present batch, 0 to 1; 0 if only time ends the job.

        It does not depend on the number of workers, and is the same for all workers that compute the same
        step; in local mode it may differ by less than a local step.
        """
        return 1.0 if self.done else self._length.progress

    @property
    def evaluating(self) -> bool:
        """True if the server has asked this worker to evaluate. It reports numbers that are logged now as the
        last epoch's metrics."""
        return self._assignments is not None and self._assignments.evaluating

    @property
    def evaluation(self) -> Mapping[str, float]:
        """Metrics of the job's last evaluation, by name; empty before the first.

        All workers that compute the same step have the same. The evaluation of an epoch is made while the
        next one has begun, so after the loop over an epoch's batches this is the one of the epoch before.
        """
        known = () if self._assignments is None else self._assignments.evaluations
        return known[-1] if known else {}

    @property
    def best(self) -> Mapping[str, float]:
        """Best value of each metric in the evaluations of the job so far, by name; empty before the first.

        The smallest value is the best of `loss`, `error` and the like, and the largest of others, as for
        `gc-server --keep`, which may state it. It belongs to the job, so any worker that evaluates knows it.
        """
        return {} if self._assignments is None else self._assignments.session.best

    @property
    def _epoch(self) -> int:
        """Present epoch, from 0."""
        return self._first_epoch if self._assignments is None else self._assignments.epoch

    # ---- model and optimizer

    def attach(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float = 0.0,
        steps: Steps = "server",
        overlap: Overlap | None = None,
    ) -> tuple[Model, Any]:
        """Attach a model and its optimizer to the job. When batches begin, all workers get the parameters of
        the job's first worker.

        The server's optimizer starts from the state that `optimizer` has when batches begin: loaded by the
        script, or left by earlier steps. The first worker's state counts, as with parameters.

        Args:
            model: model to train; its parameters become views of one buffer.
            optimizer: SGD, Adam, AdamW or Adagrad of torch.optim. The server runs it, with the options of its
                parameter groups. Their learning rates, which a scheduler may change, are sent with each step.
            clip_norm: largest norm of the mean gradient of all workers, equal to the job's (`gc-server
                --clip-norm`); 0 for no limit.
            steps: the process that takes the steps. "server": the server. "local": this worker, with any
                optimizer and its own gradients; the server averages the changes of all workers. Mode `local`
                implies "local".
            overlap: "off" to send no gradient before `step()`; None for the job's choice.

        Returns:
            The model, and the optimizer that the loop and schedulers must use from now on, a `JobOptimizer`.
                Its `step()`
            pushes the gradients and waits for the new parameters. (Its type is Any, so that a script may
                reuse its own
            variable.)

        Raises:
            ScriptError: the server cannot run the optimizer, or `clip_norm` or `overlap` contradicts the
                job's options.
            ModelError: a parameter is neither float32 nor bfloat16, or shares memory with another one.
        """
        if self._attached is not None:
            raise ScriptError(
                "job.attach: this job already has a model; attach one torch.nn.ModuleDict of all models, "
                "with one optimizer that has their parameters in groups"
            )
        self._attached = Attached(
            self._member, model, optimizer, self._push, clip_norm=clip_norm, steps=steps, overlap=overlap
        )
        self._length.least = least_samples(model)
        return model, self._attached.optimizer

    def follow(self, scheduler: Scheduler, *, each: Each = "step", metric: str = "loss") -> Scheduler:
        """Register a scheduler, so that before each batch it is advanced to the job's present step or epoch.

        It is behind if this worker has joined late, has returned, or has missed a step. The job itself steps
        a ReduceLROnPlateau, once for each evaluation, before the same batch on all ranks.

        Args:
            scheduler: scheduler of torch.optim.lr_scheduler. The script steps it as it would without a job.
            each: how often the script steps it: "step" for once per `optimizer.step()`, which in local mode
                is a local step, "epoch" for once per
                epoch of `job.epochs()`. "progress" is for a LambdaLR whose function reads `job.progress`: the
                job steps it before each batch, and its rates do not depend on the number of workers.
            metric: name of the evaluated number for a ReduceLROnPlateau, as in `log`.

        Returns:
            The same scheduler.

        Raises:
            ScriptError: the scheduler depends on something else than steps or evaluations.
        """
        self._schedules.follow(scheduler, each, metric)
        return scheduler

    def _begin(self, train_samples: int, data: Callable[[], int]) -> Assignments:
        """Begin to train with a data set at the first call, and return the assignments; later calls only
        check its size.

        Args:
            train_samples: number of samples in an epoch.
            data: function that computes the checksum of the data set.
        """
        member, attached = self._member, self._attached
        if self._assignments is not None:
            given = self._assignments.session.replica.manifest.train_samples
            if given != train_samples:
                raise ScriptError(
                    f"job.batches: the data set has {train_samples} samples, but the first one had {given}. "
                    "A job counts the samples of one data set: pass a torch.utils.data.ConcatDataset, or "
                    "draw batches of other data in the loop over this one"
                )
            return self._assignments
        if attached is None:
            raise ScriptError("job.batches: call job.attach(model, optimizer) first")

        def earlier() -> Earlier:
            return Earlier(attached.moments(), epoch=self._start, steps=self._schedules.steps)

        session, strategy = attached.begin(
            train_samples, data(), forward_passed=self._forward_passed, earlier=earlier
        )
        session.accumulate = self._length.accumulate
        session.saving.keep(self._image, by_owner=True)
        if member.restored is not None:
            version, tree = member.restored
            session.saving.restore(version, tree, member.reply.version)
            strategy.restore(member.owner["strategy"])
            self._logged = dict(member.owner["logged"])
            for parameter, gradient in zip(
                session.replica.parameters, member.owner["gradients"], strict=False
            ):
                parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
            self._unstepped = member.owner["unstepped"]
            member.restored = None  # frees memory: the state is as large as the model
        self._assignments = Assignments(
            member, session, strategy, self._length, epoch=self._first_epoch, logged=self._logged
        )
        session.begin()
        return self._assignments

    def _image(self) -> dict[str, Any]:
        """Return the script's own part of the state that this worker saves."""
        assert self._assignments is not None
        return {
            "epoch": self._epoch,
            "strategy": self._assignments.strategy.image(),
            "logged": deepcopy(self._logged),
            "state": self.state.image(),
            "loader": self._position.image(),
            "random": random_state(),
            "unstepped": self._unstepped,
            "gradients": copied([each.grad for each in self._assignments.session.replica.parameters])
            if self._unstepped  # the next epoch's first step adds to them
            else [],
        }

    # ---- the loops

    def epochs(self, total: int | None = None, *, start: int = 0) -> Generator[int]:
        """Iterate over the numbers of the job's epochs, from 0 or from the job's present epoch, until the job
        is done.

        An epoch ends when all of its samples are trained on. If the loop over batches ends earlier, the same
        number is yielded again.

        Args:
            total: number of epochs that the script expects; None for the job's. It must equal the job's.
            start: number of epochs that the script has trained before, according to a file of its own. The
                first worker's `start` decides where a new job begins; a running job stays where it is.

        Raises:
            ScriptError: `total` is not the job's number of epochs, or `start` is out of range.
        """
        of_job = self._member.terms.epochs
        if total not in (None, of_job):
            raise ScriptError(
                f"job.epochs({total}): the job has {of_job} epochs; start gc-server with --epochs {total}, "
                "or leave the number out"
            )
        if start < 0 or (of_job and start > of_job):
            most = f"0 to {of_job}, the job's number of epochs" if of_job else "0 or more"
            raise ScriptError(
                f"job.epochs(start={start}): expected {most}; start gc-server with --epochs that include "
                "earlier epochs"
            )
        if self._assignments is None and not self._member.reply.version:
            self._start = start
            self._first_epoch = max(self._first_epoch, start)
        return self._epochs()

    def _epochs(self) -> Generator[int]:
        """Yield the number of each epoch until the job is done; between two, report evaluations that are
        asked for."""
        member, of_job = self._member, self._member.terms.epochs
        if of_job and self._start >= of_job:
            log.warning(
                "job.epochs(start=%d): the job has %d epochs, and the script trains on none of them. Stop "
                "gc-server, which waits for a worker that does; or start it with more --epochs, which count "
                "those before",
                *(self._start, of_job),
            )
            return
        while not (self.done or member.left):
            epoch = self._epoch
            yield epoch
            if member.left:
                return
            if self._assignments is None:
                raise ScriptError("job.epochs: no batch was trained on; loop over job.batches(...) in it")
            # In stale and async mode the server may interrupt an epoch for an evaluation: no warning then.
            present = self._assignments.present
            interrupted = present is not None and not present.ranges
            self._assignments.turn_over()
            if epoch == self._epoch and not (self.done or interrupted or self._warned_of_repeat):
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

        Each sample of an epoch goes to one worker, also when workers join or leave. The length is for the
        present number of workers.

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
        if batch_size not in (None, self._member.terms.batch_size):
            raise ScriptError(
                f"job.batches(batch_size={batch_size}): the job has {self._member.terms.batch_size}; start "
                f"gc-server with --batch-size {batch_size}, or leave out batch_size"
            )
        self._declare("job.batches", accumulate)
        self._length.samples = len(dataset)
        run = partial(self._samples_of, dataset, num_workers, collate_fn)
        attributes = SimpleNamespace(
            dataset=dataset,
            batch_size=self._member.terms.batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            drop_last=False,
        )
        return Batches(run, lambda: self._length.batches, attributes)

    def _samples_of(
        self, dataset: Any, num_workers: int, collate_fn: Callable[[list[Any]], Any]
    ) -> Generator[Any]:
        """Yield the collated batches of a data set for this epoch's assignments."""
        here, loading = Loading(dataset, 0), self._loading
        if loading.dataset is not dataset or loading.processes != num_workers:
            loading.close()
            loading = self._loading = Loading(dataset, num_workers)
        shards = Shards(self._member.terms.seed, len(dataset))

        def together(loading: Loading, indices: Indices) -> Any:
            return collate_fn(loading.fetch(indices))

        checksum = partial(data_checksum, partial(together, here), len(dataset))
        for assignment, batch in self._batches(len(dataset), checksum):
            connection = self._member.connection
            connection.activity = "loading a batch"
            found = together(loading, shards.of(assignment)[batch])
            connection.activity = "computing"
            yield found

    def _declare(self, call: str, accumulate: int) -> None:
        """Note the number of batches of an optimizer step; raise ScriptError for another than before."""
        known = self._length.accumulate
        if accumulate < 0 or accumulate != int(accumulate):
            raise ScriptError(f"{call}(accumulate={accumulate!r}): expected a whole number, 1 or more")
        if accumulate and self._assignments is not None and accumulate != known:
            raise ScriptError(
                f"{call}(accumulate={accumulate}): before its first batch the script has declared "
                f"{known or 'none'}; give every call the same number"
            )
        self._length.accumulate = accumulate or known

    def steps(self, loader: Iterable[Any], *, per_epoch: int | None = None, accumulate: int = 0) -> Batches:
        """Return the batches of the script's own loader for as long as the epoch lasts, as an iterable with a
        length.

        The loader decides which samples they hold; every batch has the same weight. The length is for the
        present number of workers.

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
        if per_epoch is None:
            sized: Any = loader
            replicas: int = getattr(getattr(sized, "sampler", None), "num_replicas", 1)
            try:
                per_epoch = len(sized) * replicas
            except TypeError:
                raise ScriptError(
                    "job.steps: the loader has no length; pass the number of batches in an epoch as "
                    "per_epoch="
                ) from None
        self._declare("job.steps", accumulate)
        self._length.samples = samples = per_epoch * self._member.terms.batch_size
        return Batches(partial(self._steps_of, loader, samples), lambda: self._length.batches, loader)

    def _steps_of(self, loader: Iterable[Any], samples: int) -> Generator[Any]:
        """Yield one batch of the loader for each batch of this epoch's assignments."""
        connection = self._member.connection
        with self._position.iterate(loader) as batches:
            for _ in self._batches(samples, lambda: 0):
                connection.activity = "waiting for the script's loader"
                with explained():
                    batch = next(batches)
                connection.activity = "computing"
                self._compare(batch)
                yield batch

    def _compare(self, batch: Any) -> None:
        """Have the next commit report a checksum of one of the script's first batches, by which the server
        notices that several workers train on the same ones."""
        session = self._assignments.session if self._assignments is not None else None
        if session is not None and not session.batch and self._compared < COMPARED:
            self._compared += 1
            session.batch = batch_checksum(batch)

    def _batches(self, train_samples: int, data: Callable[[], int]) -> Generator[tuple[m.Assignment, slice]]:
        """Yield the assignments of this epoch, or of the next if this one is over, each with a slice of its
        samples.

        `optimizer.step()` answers each one.

        Args:
            train_samples: number of samples in an epoch.
            data: function that computes the checksum of the data set.
        """
        assignments = self._begin(train_samples, data)
        session, strategy = assignments.session, assignments.strategy
        keep_warnings()  # in each epoch, because a script may set up its logging at any time
        self._begin_anew()
        assignments.turn_over()  # here too, because a script need not use `epochs`
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
        while not self._member.left:
            step = self._step
            if step is not None and step.open and step.lacking:
                if self._unstepped >= self._length.batches:
                    error = ScriptError(NEVER_STEPPED % (assignments.epoch + 1, self._unstepped))
                    self.leave(f"the script failed: {error!r}", failed=True)
                    raise error
                assignments.ask(step)
                continue
            if step is None or not step.open:
                session.saving.write()  # now, because the script's code after its last step is done
            assignment = assignments.present or assignments.wait()
            if assignment.ranges and not self._samples_arrived:
                self._samples_arrived = True
                self._compare_epochs(assignments, assignment)
            if assignment.finished or not assignment.ranges or assignment.epoch != assignments.epoch:
                assignments.begin_evaluation()
                return
            assignments.report(assignment)
            step = step if step is not None and step.open else None
            if step is None and not session.is_new(assignment):  # an answered assignment was sent again
                assignments.wait()
                continue
            if step is None:
                self._member.metrics.step()
                step = self._step = strategy.begin(assignment, assigned_samples(assignment))
            strategy.times.begin()
            before = assignment.local_steps if isinstance(self._member.work, Local) else assignment.version
            self._length.done = step.done
            self._schedules.check(assignment.total_steps, self._member.terms.epochs)
            self._schedules.catch_up(before + step.taken + assignment.earlier_steps, assignment.epoch)
            self._schedules.evaluated(assignments.evaluations)
            if not self._unstepped:  # numbers logged after the last step belong to no step
                self._losses.clear()
            at = step.at
            self._unstepped += 1
            self._given = True
            yield assignment, step.batch
            session.replica.check()
            if step.open and step.at == at and not self._member.left:  # the script has not stepped
                if self._gives_nothing(step):
                    step.skip("the script has passed over its batch")
                    assignments.settle()
                else:
                    step.accumulate()

    def _gives_nothing(self, step: TrainingStep) -> bool:
        """Return True if a batch was passed over where the server has divided a round for good: the step then
        contributes nothing, and does not ask for another batch."""
        assert self._assignments is not None
        final, replica = self._assignments.strategy.final, self._assignments.session.replica
        if not step.last or not (final or step.assignment.slices > 1):
            return False
        return all(parameter.grad is None for parameter in replica.parameters)

    def _begin_anew(self) -> None:
        """Take back the gradients of a batch that an earlier loop has begun and left without a step.

        A `break` or an exception has ended that loop, such as an interrupt in a notebook's cell. The batches
        since the last optimizer step are handed out again, so their gradients must not count twice.
        """
        step, attached = self._step, self._attached
        if not self._given or step is None or not step.open or attached is None:
            return
        if step.lacking and self._assignments is not None:  # it was interrupted while it asked
            self._assignments.ask(step)
        self._given = False
        if not step.open:  # the gradients go into the next step
            return
        attached.optimizer.zero_grad()
        self._losses.clear()
        self._unstepped = 0
        before = step.at
        step.restart()
        if step.withdraw() or step.at < before:
            log.warning(
                "the step at version %d was interrupted, and begins anew with the same batches; its "
                "gradients are discarded",
                step.assignment.version,
            )

    def _compare_epochs(self, assignments: Assignments, first: m.Assignment) -> None:
        """Compare the epoch of the first assignment with the script's, warn of a later one, and move the
        script there.

        Raises:
            ScriptError: the job is in an earlier epoch than the script's `start`.
        """
        if first.epoch < self._start:
            raise ScriptError(
                f"job.epochs(start={self._start}): the job is only in epoch {first.epoch + 1}, with the "
                "parameters of another worker's script; start a new gc-server, and have every worker load "
                "the same file"
            )
        if first.epoch > assignments.epoch and not self._member.reply.version:
            log.warning(
                "the job begins with epoch %d, the choice of its first worker, and not with epoch %d; if a "
                "script continues from a file, all workers must load it",
                *(first.epoch + 1, assignments.epoch + 1),
            )
            assignments.epoch = first.epoch

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add to the gradients; the last one must be outside
        of it.

        It is needed for several backward passes of one batch. For the batches of one optimizer step it only
        saves sending gradients early.
        """
        if self._assignments is None:
            raise ScriptError("job.no_sync: use it in the loop over job.batches(...)")
        return self._adding()

    @contextmanager
    def _adding(self) -> Generator[None]:
        """Withdraw gradients that were already sent, and send none until the context ends."""
        if self._step is not None:
            self._step.withdraw()
        self._only_adding = True
        try:
            yield
        finally:
            self._only_adding = False

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Log numbers by name. The server shows their means over the epoch for the worker that it asks to
        evaluate.

        Args:
            metrics: numbers or scalar tensors by name. `loss`, logged before `optimizer.step()`, is also the
                step's loss; of several batches, their mean.
        """
        if self._assignments is not None:
            self._assignments.session.moved()
        for name, value in metrics.items():
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            total = self._logged.setdefault(name, [0.0, 0])
            total[0] += number
            total[1] += 1
            if name == "loss":
                self._losses[self._unstepped] = number

    def _loss(self) -> float | None:
        """Return the mean of the losses that were logged since the last `optimizer.step()`; None without
        one."""
        return sum(self._losses.values()) / len(self._losses) if self._losses else None

    # ---- called by the optimizer and the model

    def _push(self, scale: float, overflow: bool, evaluate: Callable[[], Any] | None) -> None:
        """Push the gradients, as `optimizer.step()`; after an assignment's last batch, wait for the next
        assignment.

        Args:
            scale: factor by which the gradients are too large.
            overflow: True if they are not finite, so that the step is skipped.
            evaluate: function that computes the gradients; None if they were computed before.
        """
        assignments, step = self._assignments, self._step
        if assignments is None:
            raise ScriptError("optimizer.step(): call it in the loop over job.batches(...)")
        if self._member.left:
            raise ScriptError("optimizer.step(): this script has left the job")
        if step is None or not step.open or step.lacking:
            raise ScriptError(NO_WORK)
        session = assignments.session
        self._error_before, self._given = process.last_error(), False
        session.moved()
        session.replica.check()
        if overflow:
            step.skip("the GradScaler has found gradients that are not finite")
            usable = False
        else:
            usable = step.push(self._loss, scale, evaluate)
        if not self._losses and not self._told_unlogged:
            self._told_unlogged = True
            log.info(UNLOGGED)
        self._losses.clear()
        self._unstepped = 0
        if step.open:
            self.applied = usable
            return
        assignments.settle()
        self.applied = usable and session.last_accepted == session.seq

    def _forward_passed(self) -> None:
        """Called after the model's forward pass: gradients may be sent from now on, because learning rates
        are set."""
        assignments, step = self._assignments, self._step
        if assignments is None:
            return
        assignments.session.moved()
        if step is None or not step.open or step.lacking or self._only_adding or not torch.is_grad_enabled():
            return
        assignments.strategy.times.forward()
        step.follow()
