"""A script's membership of a job, and the loops in which it trains."""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from ... import __version__
from ...compressors import LayerRule, ModelCompressor, advice, suited
from ...compressors.registry import names
from ...configuration import Effective
from ...optimizer import parse_optimizer
from ...proto import messages as m
from ...proto.job import job_terms
from ...settings import WorkerSettings, access_files, names_in, parse_address
from ...telemetry import HttpEndpoint
from ..metrics import Metrics
from ..session.compression import Compression
from ..session.connection import Connection
from ..session.groups import ONE_GROUP
from ..session.own_state import OwnState
from ..session.replica import Replica
from ..session.session import Session
from ..tasks.data import data_checksum
from ..tasks.sharding import Indices, epoch_order, shard
from ..tasks.work import Local
from .keeping import Position, State, go_on_from, random_state
from .loading import Loading
from .local import LocalTurns
from .optimizer import JobOptimizer, averaging, parameter_groups
from .schedules import Each, Schedules
from .terms import Overlap, Steps, check_attached, overlaps, script_compressor, script_work
from .turn import ScriptError, Turns

log = logging.getLogger("gradwire.worker")

Model = TypeVar("Model", bound=nn.Module)
Scheduler = TypeVar("Scheduler")

POLL_S = 1.0


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
        self._metrics = Metrics(settings.compressor.partition(":")[0])
        self._compressor, self._auto = script_compressor(settings.compressor)
        self._model: nn.Module | None = None
        self._optimizer: JobOptimizer | None = None
        self._groups = ONE_GROUP
        self._schedules = Schedules()
        self._session: Session | None = None
        self._turns: Turns | LocalTurns | None = None
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
            worker=settings.worker_id or f"{socket.gethostname()}-{os.getpid()}",
            incarnation=time.time_ns(),
            connect_s=settings.connect_seconds,
            give_up_s=settings.give_up_seconds,
            sent=self._metrics.wire_up.inc,
            received=self._metrics.wire_down.inc,
            files=access_files(settings),
        )
        self._http: HttpEndpoint | None = None
        self._own: OwnState | None = None
        self._restored: Mapping[str, Any] | None = None  # this worker's own state, until the session has it
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
            self._reply = self._connection.join(__version__, self._compressor, names())
            self._terms = job_terms(self._reply.job)
            self._work = script_work(self._terms)
            if settings.state:
                self._own = OwnState(settings.state, job=self._terms.id, worker=self._connection.worker)
                self._restored = None if self._reply.initialize else self._own.read(self._reply.version)
        except BaseException as error:
            self._end(f"failed: {error}", failed=True)
            raise
        owner: Mapping[str, Any] = {} if self._restored is None else self._restored["owner"]
        self.state = State(owner.get("state", {}))
        self._position = Position(owner.get("loader"))
        self._random: Mapping[str, Any] | None = owner.get("random")  # to go on from, once batches begin
        atexit.register(self.leave)
        self._epoch: int = owner.get("epoch", self._reply.epoch)  # the job may be past it, the script not
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
        """The smallest number from 0 that no other member had when this one came."""
        return self._reply.rank

    @property
    def version(self) -> int:
        """Of the parameters: how many steps the job has taken."""
        version = None if self._session is None else self._session.replica.version
        return self._reply.version if version is None else version

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
        local = isinstance(self._work, Local)
        self._steps_here = local or steps == "local"
        groups = (averaging if self._steps_here else parameter_groups)(optimizer, model)
        self._groups = ONE_GROUP if local else groups
        remembered = {what for each in optimizer.state.values() for what in each}
        if remembered and not self._steps_here:
            log.warning(
                "the server's optimizer begins anew, without the %s of this one", ", ".join(remembered)
            )
        self._model, self._optimizer = model, JobOptimizer(optimizer, self._step, here=self._steps_here)
        return model, self._optimizer

    def follow(self, scheduler: Scheduler, *, each: Each = "step") -> Scheduler:
        """Keep a scheduler as far as the job is: before each batch it is given the steps that it lacks,
        because this worker has joined late or come back, or has missed a step of the others.

        Args:
            scheduler: of torch.optim.lr_scheduler. The script steps it as it would alone.
            each: how often: once for each `optimizer.step()`, or once for each of `job.epochs()`.

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

    def _begin(self, train_samples: int, data: Callable[[], int]) -> tuple[Session, Turns | LocalTurns]:
        """Join in with a data set. data: finds its checksum."""
        if self._session is not None and self._turns is not None:
            given = self._session.replica.manifest.train_samples
            if given != train_samples:
                raise ScriptError(
                    f"job.batches: the data set has {train_samples} samples, and had {given} before; "
                    "connect once for each data set"
                )
            return self._session, self._turns
        if self._model is None or self._optimizer is None:
            raise ScriptError("job.batches: call job.attach(model, optimizer) first")
        settings, terms = self._settings, self._terms
        replica = Replica(self._model, train_samples, self._groups, data(), masters=not self._steps_here)
        rule = LayerRule(
            dense=names_in(settings.dense_layers), compressed=names_in(settings.compressed_layers)
        )
        local = self._steps_here  # otherwise all groups have optimizers of one kind
        optimizer = parse_optimizer("sgd" if local else self._groups.groups[0].optimizer)
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
            auto=self._compressor if self._auto else "",
            buffers=terms.buffers,
            own=self._own,
        )
        turns = self._turns_of(session, self._optimizer)
        session.keep(self._image, when_told=True)
        if self._restored is not None:
            owner = session.restore(self._reply.version, self._restored)
            turns.restore(owner["turns"])
            self._logged, self._restored = dict(owner["logged"]), None
        self._session, self._turns = session, turns
        for line in advice(chosen, optimizer, local=local):
            log.warning("%s", line)
        session.begin()
        return session, turns

    def _image(self) -> dict[str, Any]:
        """All that the next step depends on, and the server has not got."""
        assert self._turns is not None
        return {
            "epoch": self._epoch,
            "turns": self._turns.image(),
            "logged": deepcopy(self._logged),
            "state": self.state.image(),
            "loader": self._position.image(),
            "random": random_state(),
        }

    def _turns_of(self, session: Session, optimizer: JobOptimizer) -> Turns | LocalTurns:
        work = self._work
        if isinstance(work, Local):
            size = self._terms.batch_size
            return LocalTurns(session, optimizer, batch_size=size, correction=work.correction)
        if self._steps_here:
            return LocalTurns(session, optimizer, batch_size=None, single=work.single, rates=(1.0,))
        final = self._terms.overlap == "both"
        return Turns(session, optimizer.rates, single=work.single, overlap=self._overlap, final=final)

    # ---- the loops

    def epochs(self) -> Generator[int]:
        """The job's epochs, from 0, or from where the job is, until it is done."""
        while not (self.done or self._left):
            yield self._epoch
            if self._left:
                return
            if self._session is None:
                raise ScriptError("job.epochs: nothing was trained; loop over job.batches(...) in it")
            self._turn_over(self._session)

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> Generator[Any]:
        """This worker's share of the epoch: each sample goes to one worker, also when workers come and go.

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

    def steps(self, loader: Iterable[Any], *, per_epoch: int | None = None) -> Generator[Any]:
        """Batches of a loader of one's own, for as long as the epoch lasts. Which samples they hold is the
        script's affair; each counts as much as any other.

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
        work = self._batches(per_epoch * self._terms.batch_size, lambda: 0)
        with self._position.passing(loader) as batches:
            for _, batch in zip(work, batches, strict=False):
                yield batch

    def _batches(self, train_samples: int, data: Callable[[], int]) -> Generator[tuple[m.Assignment, slice]]:
        """The batches of this epoch, or of the next one where this one is over, as assignments and which of
        their samples. Whoever takes one answers it by `optimizer.step()`."""
        session, turns = self._begin(train_samples, data)
        self._turn_over(session)  # a script may do without `epochs`
        if self._random is not None:
            go_on_from(self._random)
            self._random = None
        while not self._left:
            session.write_down()  # the script has done all that belongs to its last step
            assignment = self._next or self._await(session)
            if assignment.finished or not assignment.ranges or assignment.epoch != self._epoch:
                self._begin_evaluation(session)
                return
            self._report(session, assignment)
            if not turns.open and not session.is_new(assignment):  # told again after it was answered
                self._await(session)
                continue
            self._schedules.catch_up(assignment.version, assignment.epoch)
            if not turns.open:
                self._metrics.step()
                turns.begin(assignment, sum(each.count for each in assignment.ranges))
            batch = turns.batch
            yield assignment, batch
            if turns.open and turns.batch == batch and not self._left:
                turns.skip("the script went on to the next batch without optimizer.step()")
                if not turns.open:
                    self._settle(session)

    def _begin_evaluation(self, session: Session) -> None:
        """The script may evaluate now. If the server has asked for it, the model is the one that it has."""
        session.doing("evaluating" if self.evaluating else "between epochs")
        if self.evaluating and self._next is not None:
            self._evaluation.close()
            self._evaluation.enter_context(session.evaluated(self._next.evaluate_epoch))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in it only add to the gradients; one outside of it, and the step, follow."""
        if self._turns is None:
            raise ScriptError("job.no_sync: use it in the loop over job.batches(...)")
        return self._turns.apart()

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
            if name == "loss" and self._turns is not None:
                self._turns.loss = number

    # ---- inside

    def _doing(self, activity: str) -> None:
        if self._session is not None:
            self._session.doing(activity)

    def _step(self, scale: float, overflow: bool, evaluate: Callable[[], Any] | None) -> None:
        """`optimizer.step()`: push, and wait for what comes of it; in local mode with the round's last."""
        session, turns = self._session, self._turns
        if session is None or turns is None:
            raise ScriptError("optimizer.step(): call it in the loop over job.batches(...)")
        if self._left:
            raise ScriptError("optimizer.step(): this script has left the job")
        session.moved()
        if overflow:
            turns.skip("the GradScaler has found gradients that are not finite")
            usable = False
        else:
            usable = turns.push(scale, evaluate)
        if turns.open:
            self.applied = usable
            return
        self._settle(session)
        self.applied = usable and session.last_accepted == session.seq

    def _settle(self, session: Session) -> None:
        """What was assigned is answered: wait for what comes next, or until this worker's state is to be
        written down, which has to wait for what the script does after its step."""
        self._next = None
        while self._next is None and not session.save_due:
            self._take(session)

    def _await(self, session: Session) -> m.Assignment:
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
            self.done = assignment.finished
        elif assignment.evaluate_epoch:  # told again: the report may not have been heard
            session.report(self._reported)

    def _turn_over(self, session: Session) -> None:
        """If the epoch is over, go on to the one that comes next."""
        self._evaluation.close()
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
