"""The training loop: take the server's assignments, evaluate when asked to, until the job is done.

The server decides which assignment is next. The loop takes one after the other from the session and never
waits for anything else. It therefore cannot hang without the server naming the worker that it waits for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...compressors import CompressorSpec, LayerRule, TensorSpec
from ...optim.optimizer import parse_optimizer
from ...proto import messages as m
from ...proto.job import job_terms
from ...settings import JobTerms
from ..metrics import WorkerMetrics
from ..session.compression import compression_of, for_model
from ..session.connection import Connection
from ..session.own_state import OwnState
from ..session.replica import Replica
from ..session.session import Session
from ..training.coded import CodedStrategy
from ..training.gradients import GradientStrategy
from ..training.local import LocalStrategy
from ..training.overlapped import OverlappedStrategy
from ..training.work import CodedExchange, Gradients, Local, Work, parse_work
from . import Task
from .computation import Computation, TaskFailedError, guarded
from .driver import TaskDriver, WorkersOptimizer
from .flops import layer_flops
from .groups import workers_optimizer

log = logging.getLogger("gradwire.worker")

POLL_S = 1.0


class Trainer:
    """One worker's training of a task, by one thread. The daemon creates and runs it."""

    def __init__(
        self,
        connection: Connection,
        reply: m.JoinResponse,
        task: Task,
        replica: Replica,
        *,
        device: torch.device,
        compressor: CompressorSpec,
        auto: bool = False,
        rule: LayerRule,
        metrics: WorkerMetrics,
        own: OwnState | None = None,
    ) -> None:
        """
        Args:
            connection: has joined the job.
            reply: the server's, to the join.
            auto: True if the compressor is to be turned off where it loses time.
            rule: decides which parameters are compressed.
            own: storage for this worker's own state, such as residuals; None to store none.
        """
        job = job_terms(reply.job)
        work = parse_work(job.work)
        self._metrics = metrics
        self._computation = Computation(
            task, replica, device, job.seed, partial(setattr, connection, "activity")
        )
        specs = _measured(self._computation, replica, task.name) if compressor.entry.model_wide else None
        specs = specs or replica.manifest.specs
        compressor, auto = for_model(compressor, auto=auto, specs=specs, terms=job)
        compression = compression_of(
            compressor,
            auto=auto,
            optimizer=parse_optimizer(job.optimizer),
            local=isinstance(work, Local),
            specs=specs,
            rule=rule,
            terms=job,
            rank=reply.rank,
            fragments=work.fragments if isinstance(work, Local) else 1,
        )
        self.session = Session(
            connection,
            replica,
            compression,
            metrics,
            initialize=reply.initialize,
            auto=str(compressor) if auto else "",
            buffers=job.buffers,
            own=own,
        )
        self._driver = _driver(work, job, self.session, self._computation, metrics)
        self._evaluation: m.Evaluation | None = None  # the last report
        self.session.saving.keep(self._image)
        found = None if own is None or reply.initialize else own.read(reply.version)
        if found is not None:
            version, tree = found
            self.session.saving.restore(version, tree, reply.version)
            self._driver.strategy.restore(tree["owner"]["strategy"])
            torch.set_rng_state(tree["owner"]["random"])

    def run(self) -> bool:
        """Train until the job is done (True), or until a leaving worker has pushed its residuals (False).

        Raises:
            Refused, UnreachableError: from the session.
            TaskFailedError: the task raised an exception, or too many steps in a row were not finite.
        """
        self.session.begin()
        while not (self.session.finished_leaving and not self._driver.strategy.busy):
            assignment = self.session.next(POLL_S)
            if assignment is None:
                continue
            self._driver.undo_unexpected(assignment)
            if assignment.finished:
                self._driver.strategy.finish()
                return True
            self._evaluate(assignment)
            if self.session.is_new(assignment):
                self._metrics.step()
                self._driver.work(assignment)
        self._driver.strategy.hand_over()
        return False

    def _image(self) -> dict[str, Any]:
        return {"strategy": self._driver.image(), "random": torch.get_rng_state()}

    def _evaluate(self, assignment: m.Assignment) -> None:
        """Evaluate and report, if the assignment asks for it; a report is sent again, not made again."""
        epoch = assignment.evaluate_epoch
        if epoch == 0:
            return
        last = self._evaluation
        if last is not None and epoch <= last.epoch and last.version <= assignment.version:
            self.session.report(last)  # sent again: the report may not have arrived
        elif not (self.session.leaving and assignment.ranges):  # a leaving worker makes its last push instead
            self._evaluation = self._measure(assignment)
            self.session.report(self._evaluation)

    def _measure(self, assignment: m.Assignment) -> m.Evaluation:
        """Evaluate the model and return the report, with finite metrics only."""
        self.session.doing("evaluating")
        epoch = assignment.evaluate_epoch
        with self._metrics.during("evaluating"), self.session.evaluated(epoch):
            metrics = self._computation.evaluate()
        text = ", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
        log.info("evaluation %d: %s", epoch, text)
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return m.Evaluation(version=assignment.version, epoch=epoch, metrics=metrics)


def _driver(
    work: Work, job: JobTerms, session: Session, computation: Computation, metrics: WorkerMetrics
) -> TaskDriver:
    replica = session.replica
    match work:
        case Gradients():
            gradients = GradientStrategy(
                session,
                metrics,
                give_up=TaskFailedError,
                single=work.single,
                overlap=job.overlap != "off",
                final=job.overlap == "both",
            )
            return TaskDriver(session, computation, metrics, gradients)
        case Local():
            optimizer = WorkersOptimizer(workers_optimizer(replica, job), replica.parameters)
            after_last_step = work.elastic or work.clip or work.fragments > 1
            strategy = LocalStrategy if job.overlap == "off" or after_last_step else OverlappedStrategy
            local = strategy(
                session,
                metrics,
                optimizer,
                give_up=TaskFailedError,
                batch_size=job.batch_size,
                work=work,
                final=job.overlap == "both",
            )
            return TaskDriver(session, computation, metrics, local, optimizer=optimizer, delayed=work.delayed)
        case CodedExchange():
            optimizer_of_job = workers_optimizer(replica, job)
            coded = CodedStrategy(session, metrics, optimizer_of_job, give_up=TaskFailedError)
            return TaskDriver(session, computation, metrics, coded)


def _measured(computation: Computation, replica: Replica, task: str) -> Sequence[TensorSpec]:
    """Return the specs of the model's tensors with the operations of their layers, measured on one sample."""
    name = f"task {task!r}: the loss of one sample, computed to count its operations,"
    flops = guarded(name, lambda: layer_flops(replica.model, computation.probe))
    return [replace(spec, flops=flops.get(spec.name, 0.0)) for spec in replica.manifest.specs]
