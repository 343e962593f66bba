"""A script's part in a job, as its loop sees it: `gradwire.connect` returns a `Job`.

The script owns the loop, so a training step (`worker/training/step`) is driven from three places here:
`_batches` begins it with each assignment, and skips a batch that the script has passed over;
`_forward_passed` lets gradients leave from then on; `_push`, which is `optimizer.step()`, pushes. Which
assignment comes next, and when the loops end, is told in `assignments`; `membership` joins and leaves, and
`attached` makes of model and optimizer what the session trains. Here no assignment is answered twice: after
its last push the worker waits for the next one before `optimizer.step()` returns.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from ...common.configuration import Effective
from ...proto import messages as m
from ...proto.shares import assigned_samples
from ...settings import WorkerSettings
from ..session.connection import Earlier
from ..session.model_state import least_samples
from ..training.data import data_checksum
from ..training.sharding import Indices, Shards
from ..training.step import TrainingStep
from ..training.work import Gradients, Local
from .assignments import Assignments
from .attached import Attached
from .length import Batches, JobLength
from .loading import Loading
from .membership import Membership
from .schedules import Each, Schedules
from .script_state import Position, State, random_state, restore_random_state
from .terms import Overlap, ScriptError, Steps

log = logging.getLogger("gradwire.worker")

Model = TypeVar("Model", bound=nn.Module)
Scheduler = TypeVar("Scheduler")

NO_WORK = (
    "optimizer.step(): there is no work to answer; call it once for each batch, in the loop over "
    "job.batches(...)"
)


class Job:
    """A script's part in a job, on one thread. Made by `gradwire.connect`. As a context it leaves the job.

    Attributes:
        applied: whether the last `optimizer.step()` counts: not if its gradients could not be used, or came
            too late. What came too late goes out with the next push.
        state: what the script wants to find again when all of the job is started again, by name; see `State`.
    """

    def __init__(self, effective: Effective[WorkerSettings]) -> None:
        self.applied = False
        self._member = member = Membership(effective)
        self._attached: Attached | None = None
        self._assignments: Assignments | None = None  # from the first batch on
        self._step: TrainingStep | None = None  # the last one that was begun
        self._loss = 0.0  # logged for the present batch
        self._only_adding = False  # whether backward passes only add to the gradients
        self._schedules = Schedules()
        self._loading = Loading((), 0)
        owner = member.owner
        self.state = State(owner.get("state", {}))
        self._position = Position(owner.get("loader"))
        self._random: Mapping[str, Any] | None = owner.get("random")  # restored once batches begin
        self._logged: dict[str, list[float]] = {}  # shared with the assignments
        self._start = 0  # the epoch that the script wants to begin a job with
        self._first_epoch: int = owner.get("epoch", member.reply.epoch)  # the job may be past it
        self._samples_came = False  # whether an assignment with samples has arrived
        self._warned_of_repeat = False
        single = isinstance(member.work, Gradients) and member.work.single
        self._length = JobLength(member.terms, workers=member.reply.workers, single=single)
        atexit.register(self.leave)

    # ---- membership

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = kind is not None and issubclass(kind, Exception)
        reason = ""
        if kind is not None:
            reason = f"the script failed: {error!r}" if failed else f"stopped by {kind.__name__}"
        self.leave(reason, failed=failed)

    def leave(self, reason: str = "", *, failed: bool = False) -> None:
        """Say goodbye to the server, once; the end of the process does so too, and the loops end with it.
        failed: it counts as lost."""
        member, assignments = self._member, self._assignments
        if member.left:
            return
        if assignments is not None and not self.done:
            if held := assignments.session.held_back:
                log.warning("leaving with gradients of norm %.3g that the server has not got", held)
            present = assignments.present
            if not failed and (present is None or present.ranges):  # otherwise there was nothing to do
                of = f" of 0 to {member.terms.epochs - 1}" if member.terms.epochs else ""
                log.warning("leaving in epoch %d%s: the script ends before the job", self._epoch, of)
        atexit.unregister(self.leave)
        self._loading.close()
        member.end(reason or ("done" if self.done else "the script has ended"), failed=failed)

    @property
    def done(self) -> bool:
        """Whether the job is over."""
        return self._member.done

    @property
    def rank(self) -> int:
        """The smallest number from 0 that no other member had when this one came. A member that was lost and
        comes back may have another one: ask again in each epoch."""
        return self._member.connection.rank

    @property
    def version(self) -> int:
        """Version of the parameters: how many steps the job has taken."""
        version = None if self._assignments is None else self._assignments.session.replica.version
        return self._member.reply.version if version is None else version

    @property
    def total_epochs(self) -> int:
        """Epochs of the whole job, as `gc-server --epochs` says; 0 if it ends by something else."""
        return self._member.terms.epochs

    @property
    def total_steps(self) -> int:
        """Steps of the whole job, as a schedule counts them that the script steps once for each
        `optimizer.step()` and names to `follow`. With as many workers as there are now: where some come or go
        it becomes another number, and `progress` does not.

        Before the first batch it is computed from `--min-workers` and the data set that was given last to
        `batches` or `steps`.

        Raises:
            ScriptError: nobody knows it yet, or only time ends the job.
        """
        return self._length.total_steps

    @property
    def progress(self) -> float:
        """Part of the job that is done, 0 to 1, whoever comes or goes; 0 if only time ends it. It is that of
        the present batch, and the same for all workers that compute together."""
        return 1.0 if self.done else self._length.progress

    @property
    def evaluating(self) -> bool:
        """Whether the server shows what this worker logs now, as the metrics of the epoch that has ended."""
        return self._assignments is not None and self._assignments.evaluating

    @property
    def _epoch(self) -> int:
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
        """Have the job train a model. Its first worker's parameters become everybody's when batches begin.

        Args:
            optimizer: SGD, Adam, AdamW or Adagrad of torch.optim. The server runs it, with the options of its
                parameter groups; their learning rates, which a scheduler may change, go with each step.
            clip_norm: largest norm of the mean gradient of all workers, as the job has it
                (`gc-server --clip-norm`); 0 for no limit.
            steps: who takes them. "local": this worker does, with any optimizer, by its own gradients, and
                the server averages what all workers' steps change; in mode `local` it is so in any case.
            overlap: "off" if no gradient is to leave before `step()`; None for what the job has.

        What the optimizer remembers when batches begin, because the script has loaded its state or has taken
        steps with it, is what the server's begins with: that of the job's first worker, as with parameters.

        Returns:
            The model, and an optimizer for the loop and for schedulers: its `step()` pushes the gradients and
            waits for the parameters that the server makes of all workers' gradients. (A `JobOptimizer`; to
            type checkers anything, so that a script may go on using its name.)

        Raises:
            ScriptError: an optimizer that the server does not run, or another `clip_norm` or more overlap
                than the job has.
        """
        if self._attached is not None:
            raise ScriptError("job.attach: this job has its model already; connect once for each model")
        self._attached = Attached(
            self._member, model, optimizer, self._push, clip_norm=clip_norm, steps=steps, overlap=overlap
        )
        self._length.least = least_samples(model)
        return model, self._attached.optimizer

    def follow(self, scheduler: Scheduler, *, each: Each = "step") -> Scheduler:
        """Keep a scheduler as far as the job is: before each batch it is given the steps that it lacks,
        because this worker has joined late or come back, or has missed a step of the others.

        Args:
            scheduler: of torch.optim.lr_scheduler. The script steps it as it would alone.
            each: how often: once for each `optimizer.step()`, or once for each of `job.epochs()`. "progress"
                for a LambdaLR whose function asks `job.progress` instead of counting: the job steps it,
                before each batch, and its rates are right whoever comes or goes.

        Returns:
            The scheduler.

        Raises:
            ScriptError: a scheduler that goes by something else, such as ReduceLROnPlateau.
        """
        if each == "step" and isinstance(self._member.work, Local):
            raise ScriptError(
                "job.follow: in local mode workers take steps of their own, and the job does not count them; "
                "step the scheduler once for each epoch and say each='epoch'"
            )
        self._schedules.follow(scheduler, each)
        return scheduler

    def _begin(self, train_samples: int, data: Callable[[], int]) -> Assignments:
        """Begin to train with a data set, the first time. data: computes its checksum."""
        member, attached = self._member, self._attached
        if self._assignments is not None:
            given = self._assignments.session.replica.manifest.train_samples
            if given != train_samples:
                raise ScriptError(
                    f"job.batches: the data set has {train_samples} samples, and had {given} before; "
                    "connect once for each data set"
                )
            return self._assignments
        if attached is None:
            raise ScriptError("job.batches: call job.attach(model, optimizer) first")

        def earlier() -> Earlier:
            return Earlier(attached.moments(), epoch=self._start, steps=self._schedules.steps)

        session, strategy = attached.begin(
            train_samples, data(), forward_passed=self._forward_passed, earlier=earlier
        )
        session.saving.keep(self._image, by_owner=True)
        if member.restored is not None:
            version, tree = member.restored
            session.saving.restore(version, tree, member.reply.version)
            strategy.restore(member.owner["strategy"])
            self._logged = dict(member.owner["logged"])
            member.restored = None  # it is as large as the model
        self._assignments = Assignments(
            member, session, strategy, self._length, epoch=self._first_epoch, logged=self._logged
        )
        session.begin()
        return self._assignments

    def _image(self) -> dict[str, Any]:
        """Return all that the next step depends on, and the server has not got."""
        assert self._assignments is not None
        return {
            "epoch": self._epoch,
            "strategy": self._assignments.strategy.image(),
            "logged": deepcopy(self._logged),
            "state": self.state.image(),
            "loader": self._position.image(),
            "random": random_state(),
        }

    # ---- the loops

    def epochs(self, total: int | None = None, *, start: int = 0) -> Generator[int]:
        """The job's epochs, from 0, or from where the job is, until it is done. An epoch is over when all of
        its samples are trained on: a loop over batches that ends early is given the same epoch again.

        Args:
            total: epochs of the job, if the script has a number of its own: it has to be that of the server.
            start: the first epoch that the script has not trained on, where it continues from a file of its
                own. The job's first worker says with it where the job begins; a job that has begun is
                where it is.

        Raises:
            ScriptError: another number of epochs than the job has, or one that there is not.
        """
        of_job = self._member.terms.epochs
        if total not in (None, of_job):
            raise ScriptError(
                f"job.epochs({total}): the job has {of_job}; start gc-server with --epochs {total}, or leave "
                "the number out"
            )
        if start < 0 or (of_job and start > of_job):
            most = f"0 to {of_job}, the job's number of epochs" if of_job else "0 or more"
            raise ScriptError(
                f"job.epochs(start={start}): expected {most}; start gc-server with --epochs that count those "
                "before, too"
            )
        if self._assignments is None and not self._member.reply.version:
            self._start = start
            self._first_epoch = max(self._first_epoch, start)
        return self._epochs()

    def _epochs(self) -> Generator[int]:
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
                raise ScriptError("job.epochs: nothing was trained; loop over job.batches(...) in it")
            # In stale and async mode an evaluation may interrupt an epoch, and is not the script's doing.
            present = self._assignments.present
            interrupted = present is not None and not present.ranges
            self._assignments.turn_over()
            if epoch == self._epoch and not (self.done or interrupted or self._warned_of_repeat):
                self._warned_of_repeat = True
                log.warning(
                    "epoch %d comes again: the script's loop over batches ended before all samples of the "
                    "epoch were trained on. To end early, call job.leave()",
                    epoch,
                )

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> Batches:
        """This worker's share of the epoch: each sample goes to one worker, also when workers come and go.
        Its `len` is how many batches that is with as many workers as there are now.

        Args:
            dataset: has `len` and `[]`, and is the same for every worker.
            batch_size: samples of a batch, as the job has it (`gc-server --batch-size`). Batches at the end
                of an epoch may be smaller.
            num_workers: processes that fetch the samples of each batch between them; 0 to do that here.
            collate_fn: makes a batch of a list of samples.

        Raises:
            ScriptError: a batch size or a data set that is not the job's.
            ModelError: parameters that are neither float32 nor bfloat16, or none that require a gradient.
            Refused: the server has ended the membership, or refused a push.
            UnreachableError: the server was not there for `give_up_seconds`.
        """
        if batch_size not in (None, self._member.terms.batch_size):
            raise ScriptError(
                f"job.batches(batch_size={batch_size}): the job has {self._member.terms.batch_size}; start "
                f"gc-server with --batch-size {batch_size}, or leave batch_size out"
            )
        self._length.samples = len(dataset)
        run = partial(self._samples_of, dataset, num_workers, collate_fn)
        return Batches(run, lambda: self._length.batches)

    def _samples_of(
        self, dataset: Any, num_workers: int, collate_fn: Callable[[list[Any]], Any]
    ) -> Generator[Any]:
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

    def steps(self, loader: Iterable[Any], *, per_epoch: int | None = None) -> Batches:
        """Batches of a loader of one's own, for as long as the epoch lasts. Which samples they hold is the
        script's affair; each counts as much as any other. `len` is as for `batches`.

        Args:
            loader: gives batches; it is begun anew if it ends before the epoch does.
            per_epoch: batches of all workers together that make an epoch. If None, as many as the loader has,
                or where its sampler divides the samples among replicas, as the loaders of all of these have.

        Raises:
            ScriptError: a loader that does not know its length, without `per_epoch`; one that has no batches,
                or none any more.
            The rest is as in `batches`.
        """
        if per_epoch is None:
            sized: Any = loader
            replicas: int = getattr(getattr(sized, "sampler", None), "num_replicas", 1)
            try:
                per_epoch = len(sized) * replicas
            except TypeError:
                raise ScriptError(
                    "job.steps: the loader does not know how many batches it has; say with per_epoch= how "
                    "many make an epoch"
                ) from None
        self._length.samples = samples = per_epoch * self._member.terms.batch_size
        return Batches(partial(self._steps_of, loader, samples), lambda: self._length.batches)

    def _steps_of(self, loader: Iterable[Any], samples: int) -> Generator[Any]:
        work = self._batches(samples, lambda: 0)
        with self._position.passing(loader) as batches:
            for _, batch in zip(work, batches, strict=False):
                yield batch

    def _batches(self, train_samples: int, data: Callable[[], int]) -> Generator[tuple[m.Assignment, slice]]:
        """Give the batches of this epoch, or of the next one where this one is over, as assignments and which
        of their samples. `optimizer.step()` answers each."""
        assignments = self._begin(train_samples, data)
        session, strategy = assignments.session, assignments.strategy
        assignments.turn_over()  # a script may do without `epochs`
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
        while not self._member.left:
            session.saving.write()  # the script has done all that belongs to its last step
            assignment = assignments.present or assignments.wait()
            if assignment.ranges and not self._samples_came:
                self._samples_came = True
                self._compare_epochs(assignments, assignment)
            if assignment.finished or not assignment.ranges or assignment.epoch != assignments.epoch:
                assignments.begin_evaluation()
                return
            assignments.report(assignment)
            step = self._step if self._step is not None and self._step.open else None
            if step is None and not session.is_new(assignment):  # sent again after it was answered
                assignments.wait()
                continue
            self._schedules.check(assignment.total_steps, self._member.terms.epochs)
            self._schedules.catch_up(assignment.version + assignment.earlier_steps, assignment.epoch)
            if step is None:
                self._member.metrics.step()
                step = self._step = strategy.begin(assignment, assigned_samples(assignment))
                strategy.times.begin()
            self._loss, batch = 0.0, step.batch
            yield assignment, batch
            session.replica.check()
            if step.open and step.batch == batch and not self._member.left:
                step.skip("the script went on to the next batch without optimizer.step()")
                if not step.open:
                    assignments.settle()

    def _compare_epochs(self, assignments: Assignments, first: m.Assignment) -> None:
        """Compare where the job is at the first batch with where the script is. Raises ScriptError if the job
        has not got that far."""
        if first.epoch < self._start:
            raise ScriptError(
                f"job.epochs(start={self._start}): the job is in epoch {first.epoch}, with the "
                "parameters of another worker's script; start a new gc-server, and have every worker load "
                "the same file"
            )
        if first.epoch > assignments.epoch and not self._member.reply.version:
            log.warning(
                "the job begins with epoch %d, as its first worker says, and not with %d; where a script "
                "continues from a file, all workers have to load it",
                *(first.epoch, assignments.epoch),
            )
            assignments.epoch = first.epoch

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in it only add to the gradients; one outside of it, and the step, follow."""
        if self._assignments is None:
            raise ScriptError("job.no_sync: use it in the loop over job.batches(...)")
        return self._adding()

    @contextmanager
    def _adding(self) -> Generator[None]:
        if self._step is not None:
            self._step.withdraw()
        self._only_adding = True
        try:
            yield
        finally:
            self._only_adding = False

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Note numbers by name. The server shows their means over the epoch, of the worker that it asks; and
        `loss`, if it comes before `optimizer.step()`, as the step's."""
        if self._assignments is not None:
            self._assignments.session.moved()
        for name, value in metrics.items():
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            total = self._logged.setdefault(name, [0.0, 0])
            total[0] += number
            total[1] += 1
            if name == "loss":
                self._loss = number

    # ---- called by the optimizer and the model

    def _push(self, scale: float, overflow: bool, evaluate: Callable[[], Any] | None) -> None:
        """`optimizer.step()`: push the gradients; after an assignment's last batch, wait for what follows."""
        assignments, step = self._assignments, self._step
        if assignments is None:
            raise ScriptError("optimizer.step(): call it in the loop over job.batches(...)")
        if self._member.left:
            raise ScriptError("optimizer.step(): this script has left the job")
        if step is None or not step.open:
            raise ScriptError(NO_WORK)
        session = assignments.session
        session.moved()
        session.replica.check()
        if overflow:
            step.skip("the GradScaler has found gradients that are not finite")
            usable = False
        else:
            usable = step.push(self._loss, scale, evaluate)
        if step.open:
            self.applied = usable
            return
        assignments.settle()
        self.applied = usable and session.last_accepted == session.seq

    def _forward_passed(self) -> None:
        """Called after the model's forward pass: gradients may follow, and learning rates are set by now."""
        assignments, step = self._assignments, self._step
        if assignments is None:
            return
        assignments.session.moved()
        if step is None or not step.open or self._only_adding or not torch.is_grad_enabled():
            return
        assignments.strategy.times.forward()
        step.follow()
