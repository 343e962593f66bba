"""A script's membership of a job, and the loops in which it trains."""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from ... import __version__
from ...compressors import LayerRule, ModelCompressor, advice, compressor_of, model_wide, suited
from ...compressors.registry import names
from ...configuration import Effective, UsageError
from ...optimizer import parse_optimizer
from ...proto import messages as m
from ...proto.job import job_terms
from ...settings import JobTerms, WorkerSettings, names_in, parse_address
from ...spec import SpecError
from ...telemetry import HttpEndpoint
from ..metrics import Metrics
from ..session.compression import Compression
from ..session.connection import Connection
from ..session.groups import ONE_GROUP
from ..session.replica import Replica
from ..session.session import Session
from ..tasks.data import data_checksum
from ..tasks.sharding import Indices, epoch_order, shard
from ..tasks.work import Gradients, parse_work
from .optimizer import JobOptimizer, parameter_groups
from .turn import ScriptError, Turns

log = logging.getLogger("gradwire.worker")

Model = TypeVar("Model", bound=nn.Module)

POLL_S = 1.0


class Job:
    """A script's part in a job, on one thread. Made by `gradwire.connect`. As a context it leaves the job.

    Attributes:
        applied: whether the last `optimizer.step()` counts: not if its gradients could not be used, or came
            too late. What came too late goes out with the next push.
        done: whether the job is over.
    """

    def __init__(self, effective: Effective[WorkerSettings]) -> None:
        settings = effective.settings
        self.applied = self.done = False
        self._settings = settings
        self._metrics = Metrics(settings.compressor.partition(":")[0])
        self._compressor, self._auto = _compressor(settings.compressor)
        self._model: nn.Module | None = None
        self._optimizer: JobOptimizer | None = None
        self._groups = ONE_GROUP
        self._session: Session | None = None
        self._turns: Turns | None = None
        self._next: m.Assignment | None = None  # that came last, until it is answered
        self._order: tuple[int, Indices] | None = None  # of the last epoch asked for
        self._logged: dict[str, list[float]] = {}  # by name, sum and number of what was logged in this epoch
        self._left = False
        self._reported = 0  # the last epoch whose metrics the server has been told
        self._connection = Connection(
            parse_address(settings.server),
            worker=settings.worker_id or f"{socket.gethostname()}-{os.getpid()}",
            incarnation=time.time_ns(),
            connect_s=settings.connect_seconds,
            give_up_s=settings.give_up_seconds,
            sent=self._metrics.wire_up.inc,
            received=self._metrics.wire_down.inc,
        )
        self._http: HttpEndpoint | None = None
        try:
            registry = self._metrics.registry
            self._http = HttpEndpoint(effective, "0.0.0.0", registry, lambda: self.done, lambda: "running")
            self._reply = self._connection.join(__version__, self._compressor, names())
            self._terms = job_terms(self._reply.job)
            self._gradients = _gradients(self._terms)
        except BaseException as error:
            self._end(f"failed: {error}", failed=True)
            raise
        atexit.register(self.leave)
        self._epoch = self._reply.epoch
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
        """Say goodbye to the server, once; the end of the process does so too. failed: it counts as lost."""
        if self._left:
            return
        held = 0.0 if self.done or self._session is None else self._session.held_back
        if held:
            log.warning("leaving with gradients of norm %.3g that the server has not got", held)
        self._end(reason or ("done" if self.done else "the script has ended"), failed=failed)

    def _end(self, reason: str, *, failed: bool) -> None:
        self._left = True
        atexit.unregister(self.leave)
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
        return self._next is not None and self._next.evaluate_epoch > self._reported

    # ---- model and optimizer

    def attach(
        self, model: Model, optimizer: torch.optim.Optimizer, *, clip_norm: float = 0.0
    ) -> tuple[Model, Any]:
        """Have the job train a model. Its first worker's parameters become everybody's when batches begin.

        Args:
            optimizer: SGD, Adam or AdamW of torch.optim. The server runs it, with the options of its
                parameter groups; their learning rates, which a scheduler may change, go with each step.
            clip_norm: largest norm of the mean gradient of all workers, as the job has it
                (`gc-server --clip-norm`); 0 for no limit.

        Returns:
            The model, and an optimizer for the loop and for schedulers: its `step()` pushes the gradients and
            waits for the parameters that the server makes of all workers' gradients. (A `JobOptimizer`; to
            type checkers anything, so that a script may go on using its name.)

        Raises:
            ScriptError: an optimizer that the server does not run, or another `clip_norm` than the job's.
        """
        if self._model is not None:
            raise ScriptError("job.attach: this job has its model already; connect once for each model")
        if clip_norm != self._terms.clip_norm:
            raise ScriptError(
                f"job.attach(clip_norm={clip_norm:g}): the job has {self._terms.clip_norm:g}; start "
                f"gc-server with --clip-norm {clip_norm:g}"
            )
        self._groups = parameter_groups(optimizer, model)
        self._model, self._optimizer = model, JobOptimizer(optimizer, self._step)
        return model, self._optimizer

    def _begin(self, train_samples: int, data: Callable[[], int]) -> tuple[Session, Turns]:
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
        replica = Replica(self._model, train_samples, self._groups, data())
        rule = LayerRule(
            dense=names_in(settings.dense_layers), compressed=names_in(settings.compressed_layers)
        )
        optimizer = parse_optimizer(self._groups.groups[0].optimizer)  # all groups have one of a kind
        chosen = self._compressor if self._auto else suited(self._compressor, optimizer, local=False)
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
        )
        # With `both` parts count when they arrive: a step that the script gives up could not be taken back.
        overlap = terms.overlap == "backward"
        turns = Turns(session, self._optimizer.rates, single=self._gradients.single, overlap=overlap)
        self._session, self._turns = session, turns
        for line in advice(chosen, optimizer, local=False):
            log.warning("%s", line)
        session.begin()
        return session, turns

    # ---- the loops

    def epochs(self) -> Generator[int]:
        """The job's epochs, from 0, or from where the job is, until it is done."""
        while not self.done:
            yield self._epoch
            if self._session is None:
                raise ScriptError("job.epochs: nothing was trained; loop over job.batches(...) in it")
            self._turn_over(self._session)

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> Generator[Any]:
        """This worker's share of the epoch: each sample goes to one worker, also when workers come and go.

        Args:
            dataset: has `len` and `[]`, and is the same for every worker.
            batch_size: samples of a batch, as the job has it (`gc-server --batch-size`). Batches at the end
                of an epoch may be smaller.
            collate_fn: makes a batch of a list of samples.

        Raises:
            ScriptError: a batch size or a data set that is not the job's.
            ModelError: parameters that are not float32, or none that require a gradient.
            Refused: the server has ended the membership, or refused a push.
            UnreachableError: the server was not there for `give_up_seconds`.
        """
        if batch_size not in (None, self._terms.batch_size):
            raise ScriptError(
                f"job.batches(batch_size={batch_size}): the job has {self._terms.batch_size}; start "
                f"gc-server with --batch-size {batch_size}, or leave batch_size out"
            )

        def batch(indices: Indices) -> Any:
            return collate_fn([dataset[int(index)] for index in indices])

        for assignment in self._work(len(dataset), lambda: data_checksum(batch, len(dataset))):
            yield batch(self._indices(assignment, len(dataset)))

    def steps(self, loader: Iterable[Any], *, per_epoch: int | None = None) -> Generator[Any]:
        """Batches of a loader of one's own, for as long as the epoch lasts. Which samples they hold is the
        script's affair; each counts as much as any other.

        Args:
            loader: gives batches; it is begun anew if it ends before the epoch does.
            per_epoch: batches of all workers together that make an epoch; as many as the loader has if None.

        Raises:
            ScriptError: a loader that does not know its length, without `per_epoch`.
            The rest is as in `batches`.
        """
        if per_epoch is None:
            sized: Any = loader
            try:
                per_epoch = len(sized)
            except TypeError:
                raise ScriptError(
                    "job.steps: the loader does not know how many batches it has; say with per_epoch= how "
                    "many make an epoch"
                ) from None
        batches = iter(loader)
        for _ in self._work(per_epoch * self._terms.batch_size, lambda: 0):
            try:
                batch = next(batches)
            except StopIteration:
                return  # the assignment stays, for when `epochs` comes back
            yield batch

    def _work(self, train_samples: int, data: Callable[[], int]) -> Generator[m.Assignment]:
        """The assignments of this epoch. Whoever takes one answers it by `optimizer.step()`."""
        session, turns = self._begin(train_samples, data)
        while True:
            assignment = self._next or self._await(session)
            if assignment.finished or not assignment.ranges or assignment.epoch != self._epoch:
                return
            self._report(session, assignment)
            if not turns.open and not session.is_new(assignment):  # told again after it was answered
                self._await(session)
                continue
            if not turns.open:
                self._metrics.step()
                turns.begin(assignment, sum(each.count for each in assignment.ranges))
            yield assignment
            if turns.open:
                turns.skip("the script went on to the next batch without optimizer.step()")
                self._settle(session)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in it only add to the gradients; one outside of it, and the step, follow."""
        if self._turns is None:
            raise ScriptError("job.no_sync: use it in the loop over job.batches(...)")
        return self._turns.apart()

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Note numbers by name. The server shows their means over the epoch, of the worker that it asks; and
        `loss`, if it comes before `optimizer.step()`, as the step's."""
        for name, value in metrics.items():
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            total = self._logged.setdefault(name, [0.0, 0])
            total[0] += number
            total[1] += 1
            if name == "loss" and self._turns is not None:
                self._turns.loss = number

    # ---- inside

    def _step(self, scale: float, overflow: bool) -> None:
        """`optimizer.step()`: push, and wait for what comes of it."""
        session, turns = self._session, self._turns
        if session is None or turns is None:
            raise ScriptError("optimizer.step(): call it in the loop over job.batches(...)")
        if overflow:
            turns.skip("the GradScaler has found gradients that are not finite")
            usable = False
        else:
            usable = turns.push(scale)
        self._settle(session)
        self.applied = usable and session.last_accepted == session.seq

    def _settle(self, session: Session) -> None:
        """What was assigned is answered: wait for what comes next."""
        self._next = None
        self._await(session)

    def _await(self, session: Session) -> m.Assignment:
        while True:
            assignment = session.next(POLL_S)
            if assignment is None:
                continue
            asked = assignment.evaluate_epoch > self._reported
            if assignment.finished or asked or session.is_new(assignment):
                break
            self._report(session, assignment)  # told again: the report may not have been heard
        self._next = assignment
        self.done = assignment.finished
        return assignment

    def _turn_over(self, session: Session) -> None:
        """The script's loop over batches is over: go on to the epoch that comes next."""
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
        if not epoch:
            return
        means = {name: total / count for name, (total, count) in self._logged.items()}
        finite = {name: value for name, value in means.items() if math.isfinite(value)}
        session.report(m.Evaluation(version=assignment.version, epoch=epoch, metrics=finite))
        self._reported = max(epoch, self._reported)

    def _indices(self, assignment: m.Assignment, samples: int) -> Indices:
        epoch = assignment.epoch
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self._terms.seed, epoch, samples)
        return shard(self._order[1], assignment)


def _compressor(spec: str) -> tuple[str, bool]:
    """Raises UsageError."""
    try:
        compressor, auto = compressor_of(spec)
    except SpecError as error:
        raise UsageError(f"compressor {spec!r}: {error}") from None
    if model_wide(compressor):
        raise UsageError(
            f"compressor {spec!r}: its budgets go by the operations of each layer, which only a task can "
            "count; choose another one"
        )
    return compressor, auto


def _gradients(terms: JobTerms) -> Gradients:
    """Raises ScriptError."""
    if not terms.script:
        raise ScriptError(
            f"the server trains the task {terms.task!r}: join it with gc-worker, or start one for scripts: "
            "gc-server --script"
        )
    work = parse_work(terms.work)
    if not isinstance(work, Gradients):
        raise ScriptError(
            f"mode {terms.mode}: a script pushes the gradients of one batch; start the server with "
            "--mode sync, stale or async"
        )
    return work
