"""A script's membership of a job, and the loops in which it trains.

The script owns the loop, so a training step (`worker/training/step`) is driven from three places here:
`_batches` begins it with each assignment, and skips a batch that the script has passed over;
`_forward_passed` lets gradients leave from then on; `_step`, which is `optimizer.step()`, pushes. After an
assignment's last push the script waits in `_settle` for what the server wants next: another assignment, an
evaluation, or the end.
"""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from ...common.configuration import Effective
from ...common.naming import own_name
from ...common.telemetry import HttpEndpoint
from ...common.version import __version__
from ...compressors import LayerRule, ModelCompressor, advice, suited
from ...compressors.registry import names
from ...optim.optimizer import parse_optimizer
from ...proto import messages as m
from ...proto.job import job_terms
from ...proto.shares import assigned_samples
from ...settings import WorkerSettings, access_files, names_in, parse_address
from ..metrics import WorkerMetrics
from ..session.compression import Compression
from ..session.connection import Connection, Earlier
from ..session.groups import ONE_GROUP, ParameterGroups
from ..session.kernels import tell_of_kernels
from ..session.model_state import least_samples
from ..session.own_state import OwnState
from ..session.replica import Replica
from ..session.session import Session
from ..training.data import data_checksum
from ..training.gradients import GradientStrategy
from ..training.local import LocalStrategy
from ..training.sharding import Indices, epoch_order, shard
from ..training.step import TrainingStep
from ..training.work import Gradients, Local
from .forward import after_forward
from .length import Batches, JobLength
from .loading import Loading
from .moments import moments_of, state_of
from .optimizer import JobOptimizer, averaging, parameter_groups
from .schedules import Each, Schedules
from .script_state import Position, State, go_on_from, random_state
from .terms import Overlap, ScriptError, Steps, check_attached, overlaps, script_compressor, script_work

log = logging.getLogger("gradwire.worker")

Model = TypeVar("Model", bound=nn.Module)
Scheduler = TypeVar("Scheduler")

POLL_S = 1.0
NO_WORK = (
    "optimizer.step(): there is no work to answer; call it once for each batch, in the loop over "
    "job.batches(...)"
)


class Job:
    """A script's part in a job, on one thread. Made by `gradwire.connect`. As a context it leaves the job.

    Attributes:
        applied: whether the last `optimizer.step()` counts: not if its gradients could not be used, or came
            too late. What came too late goes out with the next push.
        done: whether the job is over.
        state: what the script wants to find again when all of the job is started again, by name; see `State`.
    """

    def __init__(self, effective: Effective[WorkerSettings]) -> None:
        settings = effective.settings
        if settings.state and not settings.worker_id:
            raise ScriptError(
                "state: expected a worker_id, too, by which this worker finds again what it has written down"
            )
        self.applied = self.done = False
        self._settings = settings
        self._metrics = WorkerMetrics(settings.compressor.partition(":")[0])
        self._compressor, self._auto = script_compressor(settings.compressor)
        self._model: nn.Module | None = None
        self._optimizer: JobOptimizer | None = None
        self._first = True  # until the first batch
        self._said_again = self._newer_state = False  # what the log says once
        self._schedules = Schedules()
        self._session: Session | None = None
        self._strategy: GradientStrategy | LocalStrategy | None = None
        self._training: TrainingStep | None = None  # the last one that was begun
        self._loss = 0.0  # logged for the present batch
        self._apart = False  # whether backward passes only add to the gradients
        self._steps_here = self._overlap = False
        self._next: m.Assignment | None = None  # that came last, until it is answered
        self._order: tuple[int, Indices] | None = None  # of the last epoch asked for
        self._logged: dict[str, list[float]] = {}  # by name, sum and number of what was logged in this epoch
        self._loading = Loading((), 0)
        self._left = False
        self._reported = m.Evaluation(version=0, epoch=0, metrics={})  # what the server has been told last
        self._evaluation = ExitStack()  # while the script may evaluate
        self._connection = Connection(
            parse_address(settings.server),
            worker=settings.worker_id or own_name(),
            incarnation=time.time_ns(),
            connect_s=settings.connect_seconds,
            give_up_s=settings.give_up_seconds,
            sent=self._metrics.wire_up.inc,
            received=self._metrics.wire_down.inc,
            files=access_files(settings),
        )
        self._http: HttpEndpoint | None = None
        self._own: OwnState | None = None
        self._restored: tuple[int, Mapping[str, Any]] | None = None  # own state, until the session has it
        try:
            registry = self._metrics.registry
            hung = self._connection.progress.hung
            self._http = HttpEndpoint(
                effective,
                settings.http_host or "127.0.0.1",
                registry,
                lambda: self.done,
                lambda: "running",
                hung,
            )
            self._reply = self._connection.join(__version__, str(self._compressor), names())
            self._terms = job_terms(self._reply.job)
            self._work = script_work(self._terms)
            if settings.state:
                self._own = OwnState(settings.state, job=self._terms.id, worker=self._connection.worker)
                self._restored = None if self._reply.initialize else self._own.read(self._reply.version)
        except BaseException as error:
            self._end(f"failed: {error}", failed=True)
            raise
        owner: Mapping[str, Any] = {} if self._restored is None else self._restored[1]["owner"]
        self.state = State(owner.get("state", {}))
        older = self._restored is not None and self._restored[0] < self._reply.version
        if older and owner["epoch"] < self._reply.epoch:  # the pass over the loader is over
            owner = {**owner, "epoch": self._reply.epoch, "loader": None, "logged": {}}
        self._owner = owner  # of which the rest is taken over once batches begin
        self._position = Position(owner.get("loader"))
        self._random: Mapping[str, Any] | None = owner.get("random")  # to go on from, once batches begin
        atexit.register(self.leave)
        self._epoch: int = owner.get("epoch", self._reply.epoch)  # the job may be past it, the script not
        self._start = 0  # the epoch that the script wants to begin a job with
        single = isinstance(self._work, Gradients) and self._work.single
        self._length = JobLength(self._terms, workers=self._reply.workers, single=single)
        self._metrics.info.labels(__version__, self._terms.mode, self._terms.id).set(1)

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
        if self._left:
            return
        held = 0.0 if self.done or self._session is None else self._session.held_back
        if held:
            log.warning("leaving with gradients of norm %.3g that the server has not got", held)
        left = self._next is None or bool(self._next.ranges)  # not where there is nothing to do any more
        if self._session is not None and left and not self.done and not failed:
            of = f" of 0 to {self._terms.epochs - 1}" if self._terms.epochs else ""
            log.warning("leaving in epoch %d%s: the script ends before the job", self._epoch, of)
        self._end(reason or ("done" if self.done else "the script has ended"), failed=failed)

    def _end(self, reason: str, *, failed: bool) -> None:
        self._left = True
        atexit.unregister(self.leave)
        self._loading.close()
        self._connection.leave(reason, failed=failed)
        self._connection.close()
        if self._http is not None:
            self._http.close()

    @property
    def rank(self) -> int:
        """The smallest number from 0 that no other member had when this one came. A member that was lost and
        comes back may have another one: ask again in each epoch."""
        return self._connection.rank

    @property
    def version(self) -> int:
        """Of the parameters: how many steps the job has taken."""
        version = None if self._session is None else self._session.replica.version
        return self._reply.version if version is None else version

    @property
    def total_epochs(self) -> int:
        """Epochs of the whole job, as `gc-server --epochs` says; 0 if it ends by something else."""
        return self._terms.epochs

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
        return self._next is not None and self._next.evaluate_epoch > self._reported.epoch

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
        if self._model is not None:
            raise ScriptError("job.attach: this job has its model already; connect once for each model")
        check_attached(self._terms, self._work, clip_norm, steps)
        self._overlap = overlaps(self._terms, overlap)
        self._steps_here = isinstance(self._work, Local) or steps == "local"
        found = JobOptimizer(optimizer, self._step, self._remembered, here=self._steps_here)
        self._groups_of(found, model)  # refuses what the server cannot run
        self._model, self._optimizer = model, found
        self._length.least = least_samples(model)
        return model, self._optimizer

    def _groups_of(self, optimizer: JobOptimizer, model: nn.Module) -> ParameterGroups:
        """The parameter groups as the server steps them. Raises ScriptError."""
        of = optimizer.of
        groups = averaging(of, model) if self._steps_here else parameter_groups(of, model)
        return ONE_GROUP if isinstance(self._work, Local) else groups

    def _remembered(self) -> Mapping[torch.Tensor, Mapping[str, torch.Tensor]]:
        """What the server's optimizer remembers, by parameter."""
        if self._left or self._session is None:
            raise ScriptError(
                "optimizer.state_dict(): this script has left the job, and the state is the server's; call "
                "it before that, in `with gradwire.connect() as job`"
            )
        replica = self._session.replica
        version, moments = self._connection.get_optimizer(replica.manifest)
        if version != self.version and not self._newer_state:
            self._newer_state = True
            log.warning(
                "optimizer.state_dict(): the state is that of version %d, and this worker's parameters are "
                "those of version %d: in mode %s the job goes on meanwhile",
                *(version, self.version, self._terms.mode),
            )
        return state_of(moments, replica)

    def _earlier(self) -> Earlier:
        """What this script brings from another job, if it begins this one."""
        assert self._session is not None
        assert self._optimizer is not None
        loaded: Mapping[torch.Tensor, Mapping[str, Any]] = {}
        if not self._steps_here:
            loaded = self._optimizer.loaded
        moments = moments_of(loaded, self._session.replica)
        return Earlier(moments, epoch=self._start, steps=self._schedules.steps)

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
        if each == "step" and isinstance(self._work, Local):
            raise ScriptError(
                "job.follow: in local mode workers take steps of their own, and the job does not count them; "
                "step the scheduler once for each epoch and say each='epoch'"
            )
        self._schedules.follow(scheduler, each)
        return scheduler

    def _begin(
        self, train_samples: int, data: Callable[[], int]
    ) -> tuple[Session, GradientStrategy | LocalStrategy]:
        """Join in with a data set. data: finds its checksum."""
        if self._session is not None and self._strategy is not None:
            given = self._session.replica.manifest.train_samples
            if given != train_samples:
                raise ScriptError(
                    f"job.batches: the data set has {train_samples} samples, and had {given} before; "
                    "connect once for each data set"
                )
            return self._session, self._strategy
        if self._model is None or self._optimizer is None:
            raise ScriptError("job.batches: call job.attach(model, optimizer) first")
        settings, terms = self._settings, self._terms
        tell_of_kernels(self._connection, logging.WARNING)  # shown also where no logging is set up
        groups = self._groups_of(self._optimizer, self._model)
        self._optimizer.begin()
        replica = Replica(self._model, train_samples, groups, data(), masters=not self._steps_here)
        rule = LayerRule(
            dense=names_in(settings.dense_layers), compressed=names_in(settings.compressed_layers)
        )
        local = self._steps_here  # otherwise all groups have optimizers of one kind
        optimizer = parse_optimizer("sgd" if local else groups.groups[0].optimizer)
        chosen = self._compressor if self._auto else suited(self._compressor, optimizer, local=local)
        if chosen != self._compressor:
            log.info("compressor %s, because the server's optimizer is an Adam", chosen)
        compressor = ModelCompressor(replica.manifest.specs, chosen, rule, terms.seed, self._reply.rank)
        session = Session(
            self._connection,
            replica,
            Compression(compressor, in_parts=terms.overlap == "both"),
            self._metrics,
            initialize=self._reply.initialize,
            auto=str(self._compressor) if self._auto else "",
            buffers=terms.buffers,
            own=self._own,
            earlier=self._earlier,
        )
        strategy = self._strategy_of(session, self._optimizer)
        session.keep(self._image, when_told=True)
        if self._restored is not None:
            version, tree = self._restored
            session.restore(version, tree, self._reply.version)
            strategy.restore(self._owner["strategy"])
            self._logged, self._restored = dict(self._owner["logged"]), None
        self._session, self._strategy = session, strategy
        for line in advice(chosen, optimizer, local=local):
            log.warning("%s", line)
        session.begin()
        return session, strategy

    def _image(self) -> dict[str, Any]:
        """All that the next step depends on, and the server has not got."""
        assert self._strategy is not None
        return {
            "epoch": self._epoch,
            "strategy": self._strategy.image(),
            "logged": deepcopy(self._logged),
            "state": self.state.image(),
            "loader": self._position.image(),
            "random": random_state(),
        }

    def _strategy_of(self, session: Session, optimizer: JobOptimizer) -> GradientStrategy | LocalStrategy:
        work, terms = self._work, self._terms
        if isinstance(work, Local):
            return LocalStrategy(
                session,
                self._metrics,
                optimizer,
                give_up=ScriptError,
                batch_size=terms.batch_size,
                correction=work.correction,
            )
        final = terms.overlap == "both"
        if self._steps_here:
            return LocalStrategy(
                session,
                self._metrics,
                optimizer,
                give_up=ScriptError,
                batch_size=None,
                single=work.single,
                final=final,
                rates=(1.0,),
            )
        if self._overlap:
            after_forward(session.replica.model, self._forward_passed)
        return GradientStrategy(
            session,
            self._metrics,
            give_up=ScriptError,
            single=work.single,
            final=final,
            overlap=self._overlap,
            rates=optimizer.rates,
            user_steps=True,
            remedy="; put all but the last backward pass under job.no_sync()",
        )

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
        of_job = self._terms.epochs
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
        if self._session is None and not self._reply.version:
            self._start = start
            self._epoch = max(self._epoch, start)
        return self._epochs()

    def _epochs(self) -> Generator[int]:
        if self._terms.epochs and self._start >= self._terms.epochs:
            log.warning(
                "job.epochs(start=%d): the job has %d epochs, and the script trains on none of them. Stop "
                "gc-server, which waits for a worker that does; or start it with more --epochs, which count "
                "those before",
                *(self._start, self._terms.epochs),
            )
            return
        while not (self.done or self._left):
            epoch = self._epoch
            yield epoch
            if self._left:
                return
            if self._session is None:
                raise ScriptError("job.epochs: nothing was trained; loop over job.batches(...) in it")
            # In stale and async mode an evaluation may interrupt an epoch, and is not the script's doing.
            interrupted = self._next is not None and not self._next.ranges
            self._turn_over(self._session)
            if epoch == self._epoch and not (self.done or interrupted or self._said_again):
                self._said_again = True
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
        if batch_size not in (None, self._terms.batch_size):
            raise ScriptError(
                f"job.batches(batch_size={batch_size}): the job has {self._terms.batch_size}; start "
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

        def together(loading: Loading, indices: Indices) -> Any:
            return collate_fn(loading.fetch(indices))

        checksum = partial(data_checksum, partial(together, here), len(dataset))
        for assignment, batch in self._batches(len(dataset), checksum):
            self._doing("loading a batch")
            found = together(loading, self._indices(assignment, len(dataset))[batch])
            self._doing("computing")
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
        self._length.samples = samples = per_epoch * self._terms.batch_size
        return Batches(partial(self._steps_of, loader, samples), lambda: self._length.batches)

    def _steps_of(self, loader: Iterable[Any], samples: int) -> Generator[Any]:
        work = self._batches(samples, lambda: 0)
        with self._position.passing(loader) as batches:
            for _, batch in zip(work, batches, strict=False):
                yield batch

    def _batches(self, train_samples: int, data: Callable[[], int]) -> Generator[tuple[m.Assignment, slice]]:
        """The batches of this epoch, or of the next one where this one is over, as assignments and which of
        their samples. Whoever takes one answers it by `optimizer.step()`."""
        session, strategy = self._begin(train_samples, data)
        self._turn_over(session)  # a script may do without `epochs`
        if self._random is not None:
            go_on_from(self._random)
            self._random = None
        while not self._left:
            session.write_down()  # the script has done all that belongs to its last step
            assignment = self._next or self._await(session)
            if self._first and assignment.ranges:
                self._begin_epochs(assignment)
            if assignment.finished or not assignment.ranges or assignment.epoch != self._epoch:
                self._begin_evaluation(session)
                return
            self._report(session, assignment)
            step = self._training if self._training is not None and self._training.open else None
            if step is None and not session.is_new(assignment):  # sent again after it was answered
                self._await(session)
                continue
            self._schedules.check(assignment.total_steps, self._terms.epochs)
            self._schedules.catch_up(assignment.version + assignment.earlier_steps, assignment.epoch)
            if step is None:
                self._metrics.step()
                step = self._training = strategy.begin(assignment, assigned_samples(assignment))
                strategy.times.begin()
            self._loss, batch = 0.0, step.batch
            yield assignment, batch
            session.replica.check()
            if step.open and step.batch == batch and not self._left:
                step.skip("the script went on to the next batch without optimizer.step()")
                if not step.open:
                    self._settle(session)

    def _begin_epochs(self, assignment: m.Assignment) -> None:
        """The first batch comes. Raises ScriptError for a job that is not as far as the script."""
        self._first = False
        if assignment.epoch < self._start:
            raise ScriptError(
                f"job.epochs(start={self._start}): the job is in epoch {assignment.epoch}, with the "
                "parameters of another worker's script; start a new gc-server, and have every worker load "
                "the same file"
            )
        if assignment.epoch > self._epoch and not self._reply.version:
            log.warning(
                "the job begins with epoch %d, as its first worker says, and not with %d; where a script "
                "continues from a file, all workers have to load it",
                *(assignment.epoch, self._epoch),
            )
            self._epoch = assignment.epoch

    def _begin_evaluation(self, session: Session) -> None:
        """The script may evaluate now. If the server has asked for it, the model is the one that it has."""
        session.doing("evaluating" if self.evaluating else "between epochs")
        if self.evaluating and self._next is not None:
            self._evaluation.close()
            self._evaluation.enter_context(session.evaluated(self._next.evaluate_epoch))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in it only add to the gradients; one outside of it, and the step, follow."""
        if self._strategy is None:
            raise ScriptError("job.no_sync: use it in the loop over job.batches(...)")
        return self._only_adding()

    @contextmanager
    def _only_adding(self) -> Generator[None]:
        if self._training is not None:
            self._training.withdraw()
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Note numbers by name. The server shows their means over the epoch, of the worker that it asks; and
        `loss`, if it comes before `optimizer.step()`, as the step's."""
        if self._session is not None:
            self._session.moved()
        for name, value in metrics.items():
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            total = self._logged.setdefault(name, [0.0, 0])
            total[0] += number
            total[1] += 1
            if name == "loss":
                self._loss = number

    # ---- inside

    def _doing(self, activity: str) -> None:
        if self._session is not None:
            self._session.doing(activity)

    def _step(self, scale: float, overflow: bool, evaluate: Callable[[], Any] | None) -> None:
        """`optimizer.step()`: push the gradients; after an assignment's last batch, wait for what follows."""
        session, step = self._session, self._training
        if session is None:
            raise ScriptError("optimizer.step(): call it in the loop over job.batches(...)")
        if self._left:
            raise ScriptError("optimizer.step(): this script has left the job")
        if step is None or not step.open:
            raise ScriptError(NO_WORK)
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
        self._settle(session)
        self.applied = usable and session.last_accepted == session.seq

    def _forward_passed(self) -> None:
        """Called after the model's forward pass: gradients may follow, and rates are set by now."""
        session, strategy, step = self._session, self._strategy, self._training
        if session is None or strategy is None:
            return
        session.moved()
        if step is None or not step.open or self._apart or not torch.is_grad_enabled():
            return
        strategy.times.forward()
        step.follow()

    def _settle(self, session: Session) -> None:
        """Wait for what follows the assignment that was answered, or until this worker's state is to be
        written down: that has to wait for what the script does after its step."""
        self._next = None
        while self._next is None and not session.save_due:
            self._take(session)

    def _await(self, session: Session) -> m.Assignment:
        """Return what the server wants next, instead of the assignment that there is."""
        self._next = None
        while self._next is None:
            session.write_down()
            self._take(session)
        return self._next

    def _take(self, session: Session) -> None:
        """Wait for a while for the next assignment."""
        assignment = session.next(POLL_S)
        if assignment is None:
            return
        asked = assignment.evaluate_epoch > self._reported.epoch
        if assignment.finished or asked or session.is_new(assignment):
            self._next = assignment
            self._length.heard(assignment)
            self.done = assignment.finished
            if self.done and self._strategy is not None:
                self._strategy.finish()
        elif assignment.evaluate_epoch:  # told again: the report may not have been heard
            session.report(self._reported)

    def _turn_over(self, session: Session) -> None:
        """If the epoch is over, go on to the one that comes next."""
        self._evaluation.close()
        session.replica.check()
        while self._next is not None and not self.done:
            self._report(session, self._next)
            if self._next.ranges:
                if self._next.epoch != self._epoch:
                    self._epoch = self._next.epoch
                    self._logged.clear()
                return
            self._await(session)

    def _report(self, session: Session, assignment: m.Assignment) -> None:
        """Tell the server what was logged, if it asks for the metrics of an epoch."""
        epoch = assignment.evaluate_epoch
        if epoch <= self._reported.epoch:
            return
        means = {name: total / count for name, (total, count) in self._logged.items()}
        finite = {name: value for name, value in means.items() if math.isfinite(value)}
        self._reported = m.Evaluation(version=assignment.version, epoch=epoch, metrics=finite)
        session.report(self._reported)

    def _indices(self, assignment: m.Assignment, samples: int) -> Indices:
        epoch = assignment.epoch
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self._terms.seed, epoch, samples)
        return shard(self._order[1], assignment)
