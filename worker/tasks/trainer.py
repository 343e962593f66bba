"""The training loop: do what the server assigns, push the gradient, apply the update.

The server decides what comes next; the loop takes one message after the other from the client and never
waits for anything else, so that it cannot hang without the server saying whom it waits for.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...compressors import (
    Compressed,
    LayerRule,
    ModelCompressor,
    NonFiniteGradient,
    TensorSpec,
    lossless,
    model_wide,
    wrapping_of,
)
from ...optimizer import parse_optimizer
from ...proto import messages as m
from ...proto.job import job_terms
from ...proto.refusal import Reason, Refused, sentence
from ...proto.transfer import tensor_header
from ..metrics import Metrics
from ..session.client import Client
from ..session.compression import Compression
from ..session.receiving import Received, ReceivedPacket
from ..session.replica import Replica
from . import Task
from .coded import CodedTraining, Step
from .computation import Computation, TaskFailedError, guarded
from .flops import layer_flops
from .local import LocalTraining
from .sharding import Indices, batches
from .work import Exchange, Gradients, Local, parse_work

log = logging.getLogger("gradwire.worker")

POLL_S = 1.0
MAX_RESENDS = 3  # of a push that arrives damaged
MAX_SKIPPED_STEPS = 10  # in a row, without a usable gradient
RESIDUAL_EVERY = 50  # steps between measurements of the residual, which reads all of it


class _UnusableError(Exception):
    """A step whose loss or gradient is not finite."""


class Trainer:
    """One worker's training. Not for several threads."""

    def __init__(
        self,
        client: Client,
        reply: m.JoinResponse,
        task: Task,
        replica: Replica,
        *,
        device: torch.device,
        compressor: str,
        rule: LayerRule,
        metrics: Metrics,
    ) -> None:
        self._client = client
        self._job = job = job_terms(reply.job)
        self._replica = replica
        self._computation = Computation(task, replica, device, job.seed)
        self._metrics = metrics
        specs: Sequence[TensorSpec] = replica.manifest.specs
        if model_wide(compressor):
            what = f"task {task.name!r}: the loss of one sample, for counting its operations,"
            flops = guarded(what, lambda: layer_flops(replica.model, self._computation.probe))
            specs = [replace(spec, flops=flops.get(spec.name, 0.0)) for spec in specs]

        self._compression = Compression(specs, ModelCompressor(specs, compressor, rule, job.seed, reply.rank))
        self._lossy = not lossless(compressor)
        wrapping = wrapping_of(compressor)
        work = parse_work(job.work)
        if wrapping is not None and wrapping.momentum and isinstance(work, Local):
            log.warning(
                "the momentum of %s acts on the changes that local steps make, besides what --optimizer and "
                "the mode's outer optimizer have; give it momentum=0 unless that is meant",
                compressor,
            )
        elif wrapping is not None and wrapping.momentum and parse_optimizer(job.optimizer).has_momentum:
            log.warning(
                "momentum is applied twice: by %s and by the server's optimizer %s; "
                "start the server with plain sgd, or give the compressor momentum=0",
                compressor,
                job.optimizer,
            )
        self._must_initialize = reply.initialize
        # Whether a version may be computed at by one worker twice, or not at all.
        self._by_arrival = isinstance(work, Gradients) and work.single
        self._local = (
            LocalTraining(replica.parameters, job.optimizer, work.correction)
            if isinstance(work, Local)
            else None
        )
        self._coded = (
            CodedTraining(client, replica, self._computation, job, metrics)
            if isinstance(work, Exchange)
            else None
        )
        self._leaving = False
        self._raw_arrived = 0
        self._seq = 0
        self._last_answered = 0  # id of the assignment that was pushed for last
        self._in_flight: dict[int, Compressed] = {}  # by seq, until the outcome is known
        self._resends = 0
        self._skipped = 0
        self._held = 0  # steps since the last that was pushed
        self._warned_of_code = False
        self._seen_reconnects = 0
        self._evaluation: m.Evaluation | None = None  # the last one
        self._assigned_at: float | None = None

    @property
    def held_back(self) -> float:
        """Euclidean norm of what this worker has computed and the server has not got."""
        return self._compression.ledger.norm()

    @property
    def _awaited(self) -> bool:
        """Whether other workers wait for this one's part in an exchange."""
        return self._coded is not None and self._coded.exchanging

    def leave(self) -> None:
        """Make the next push the last, and whole, so that nothing is lost that is in the residual. Only sets
        a flag, so that a signal handler may call it."""
        self._leaving = True

    def run(self) -> bool:
        """Train until the server says that the job is done, or `leave` was called and all is handed over.

        Returns whether the job is done.

        Raises:
            Refused, UnreachableError: from the client.
            TaskFailedError: the task raised, or its gradients stay unusable.
        """
        if self._must_initialize:
            self._initialize()
        self._client.ready(self._replica.manifest)
        while True:
            if self._leaving and not self._in_flight and not self.held_back and not self._awaited:
                if self._coded is not None:
                    self._coded.hand_over()
                return False
            self._client.activity = "waiting"
            with self._metrics.during("waiting"):
                message = self._client.next(POLL_S)
            match message:
                case Received():
                    self._apply(message)
                case ReceivedPacket():
                    assert self._coded is not None
                    self._report(self._coded.take(message))
                case m.SnapshotRequest():
                    assert self._coded is not None
                    self._coded.send_snapshot(message)
                case m.Assignment():
                    if self._assignment(message):
                        return True
                case m.Outcome():
                    self._outcome(message)
                case m.Waiting():
                    log.warning("the server says: %s", message.text)
                case m.InitializeRequest():
                    self._initialize()
                    self._client.ready(self._replica.manifest)
                case None:
                    pass
            self._metrics.reconnects.inc(self._client.reconnects - self._seen_reconnects)
            self._seen_reconnects = self._client.reconnects

    def _initialize(self) -> None:
        log.info("uploading the initial parameters: %d elements", self._replica.manifest.elements)
        self._client.activity = "uploading initial parameters"
        if self._client.initialize(self._replica.manifest, self._replica.values()):
            self._replica.version = 0
            self._metrics.raw_up.inc(self._replica.manifest.raw_bytes)

    def _apply(self, received: Received) -> None:
        with self._metrics.during("applying"):
            self._replica.apply(received.update, received.payloads)
        self._metrics.version.set(received.update.version)
        # Of several updates in a row, uncompressed, the last alone would have done.
        self._raw_arrived = sum(payload.elements for payload in received.payloads) * 4

    def _assignment(self, assignment: m.Assignment) -> bool:
        """Returns whether the job is done."""
        if self._coded is not None:
            self._coded.apply(assignment.apply, assignment.version)
        if assignment.finished:
            if self._held:
                log.warning(
                    "the gradients of the last %d steps were held back by the compressor's delay "
                    "and are not in the parameters",
                    self._held,
                )
            return True
        if assignment.version != self._replica.version:
            raise RuntimeError(
                f"told to work at version {assignment.version} with a replica of {self._replica.version}"
            )
        self._metrics.raw_down.inc(self._raw_arrived)
        self._raw_arrived = 0
        self._metrics.epoch.set(assignment.epoch)
        self._maybe_evaluate(assignment)
        if not assignment.ranges or assignment.id <= self._last_answered:
            return False  # nothing to compute, or told again; the push is on its way
        now = time.perf_counter()
        if self._assigned_at is not None:
            self._metrics.step_seconds.observe(now - self._assigned_at)
        self._assigned_at = now
        if self._coded is not None:
            self._last_answered = assignment.id
            self._report(self._coded.exchange(assignment))
        else:
            self._step(assignment)
        return False

    def _report(self, step: Step | None) -> None:
        """Say that everything of a step has been decoded, if it has."""
        if step is None:
            return
        assert self._coded is not None
        self._seq += 1
        header = m.Push(
            seq=self._seq,
            assignment=step.assignment.id,
            base_version=step.assignment.version,
            samples=step.samples,
            tensors=(),
            loss=step.loss,
            exchanged=self._coded.exchanged(step),
        )
        self._in_flight[self._seq] = Compressed()
        self._client.push(header, [])

    def _step(self, assignment: m.Assignment) -> None:
        indices = self._computation.indices(assignment)
        sent, (slice, slices) = Compressed(), (0, 0)
        samples, loss = 0, 0.0
        try:
            self._client.activity = "computing"
            with self._metrics.during("computing"):
                samples, loss, gradients = self._compute(assignment, indices)
            self._client.activity = "compressing"
            with self._metrics.during("compressing"):
                sent, (slice, slices) = self._compress(assignment, gradients, samples, loss)
            self._skipped = 0
            self._held = 0 if sent.payloads else self._held + 1
            if not sent.payloads:  # held back until a later version, which then speaks for itself
                samples = 0
        except _UnusableError as error:
            self._skip(assignment, error)
            samples, loss = 0, 0.0
        self._seq += 1
        header = m.Push(
            seq=self._seq,
            assignment=assignment.id,
            base_version=assignment.version,
            samples=samples,
            tensors=tuple(tensor_header(i, payload) for i, payload in enumerate(sent.payloads)),
            loss=loss,
            slice=slice,
            slices=slices,
        )
        self._in_flight[self._seq] = sent
        self._last_answered = assignment.id
        with self._metrics.during("pushing"):
            self._client.push(header, sent.payloads)
        self._metrics.loss.set(loss)
        if self._seq % RESIDUAL_EVERY == 1:
            self._metrics.residual_norm.set(self._compression.ledger.norm())

    def _compute(self, assignment: m.Assignment, indices: Indices) -> tuple[int, float, list[torch.Tensor]]:
        """How many samples are this worker's, the mean loss over them, and its gradient, or the change of its
        local steps, or what stands for the gradients of the parts of a coded round.

        Raises:
            TaskFailedError
        """
        if assignment.stragglers:
            self._warn_of_code()
            samples, loss = self._computation.combined_loss(assignment, indices)
            return samples, loss, self._replica.gradients()
        place = self._place(assignment)

        def gradients(step: int, batch: Indices) -> float:
            return self._computation.loss(batch, *place, *((step,) if step else ()))

        if self._local is None:
            return len(indices), gradients(0, indices), self._replica.gradients()
        parts = batches(indices, self._job.batch_size)
        return len(indices), *self._local.change(parts, assignment.learning_rate, gradients)

    def _warn_of_code(self) -> None:
        if self._lossy and not self._warned_of_code:
            self._warned_of_code = True
            log.warning(
                "a code for stragglers with a compressor that holds back: what is sent later is weighed as "
                "that later round is decoded; only --compressor none is exact"
            )

    def _place(self, assignment: m.Assignment) -> tuple[int, int]:
        """What random numbers depend on, besides the job's seed: the version and the place in its round where
        all compute at it together, because ranks are given anew when a worker comes back after its lease, and
        otherwise the assignment."""
        if self._by_arrival:
            return assignment.id, 0
        return assignment.version, assignment.position

    def _compress(
        self, assignment: m.Assignment, gradients: list[torch.Tensor], samples: int, loss: float
    ) -> tuple[Compressed, tuple[int, int]]:
        if not math.isfinite(loss):
            raise _UnusableError(f"the loss is {loss}")
        version, rank = self._place(assignment)
        try:
            return self._compression.compress(
                assignment,
                gradients,
                samples,
                rank=rank,
                version=version,
                step=self._seq if self._by_arrival else assignment.version,
                leaving=self._leaving,
            )
        except NonFiniteGradient as error:
            raise _UnusableError(str(error)) from None

    def _skip(self, assignment: m.Assignment, error: _UnusableError) -> None:
        self._skipped += 1
        self._metrics.skipped.inc()
        if self._local is not None:
            self._local.reset()
        log.warning("version %d: %s; this step contributes nothing", assignment.version, error)
        if self._skipped >= MAX_SKIPPED_STEPS:
            raise TaskFailedError(
                f"{error} in {self._skipped} steps in a row: "
                "lower --learning-rate, or check the data and the loss"
            )

    def _maybe_evaluate(self, assignment: m.Assignment) -> None:
        if assignment.evaluate_epoch == 0:
            return
        if self._evaluation is not None and assignment.evaluate_epoch <= self._evaluation.epoch:
            self._client.report(self._evaluation)  # told again: the report may not have been heard
        elif not (self._leaving and assignment.ranges):  # who leaves has better things to do if it can
            self._evaluation = self._evaluate(assignment)
            self._client.report(self._evaluation)

    def _evaluate(self, assignment: m.Assignment) -> m.Evaluation:
        self._client.activity = "evaluating"
        with self._metrics.during("evaluating"):
            metrics = self._computation.evaluate()
        text = ", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
        log.info("epoch %d: %s", assignment.evaluate_epoch, text)
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return m.Evaluation(version=assignment.version, epoch=assignment.evaluate_epoch, metrics=metrics)

    def _outcome(self, outcome: m.Outcome) -> None:
        """Settle a push. Its outcome may come when later pushes are on their way, or more than once."""
        sent = self._in_flight.get(outcome.seq)
        if sent is None:
            return
        if outcome.decision is m.Decision.ACCEPTED:
            del self._in_flight[outcome.seq]
            self._resends = 0
            self._metrics.pushes.labels("accepted").inc()
            self._metrics.raw_up.inc(sum(payload.elements for payload in sent.payloads) * 4)
            return
        assert outcome.refusal is not None
        self._metrics.pushes.labels("refused").inc()
        self._metrics.refusals.labels(outcome.refusal.reason.label).inc()
        if outcome.refusal.reason is Reason.STALE and self._coded is not None:
            log.info("report %d was of an exchange that has been replaced", outcome.seq)
        elif outcome.refusal.reason is Reason.STALE:
            log.info("push %d came too late; its gradient goes out with the next push", outcome.seq)
        elif outcome.refusal.reason is Reason.REDUNDANT:
            log.info("push %d was not needed: others have pushed its gradient", outcome.seq)
        else:
            log.warning("push %d was refused: %s", outcome.seq, sentence(outcome.refusal))
        match outcome.refusal.reason:
            case Reason.STALE:  # its round has closed: the gradient goes out with the next push
                self._client.settle(outcome.seq)
                self._compression.ledger.put_back(sent)
                del self._in_flight[outcome.seq]
            case Reason.REDUNDANT:  # others have pushed the gradient
                self._client.settle(outcome.seq)
                self._compression.ledger.forget(sent)
                del self._in_flight[outcome.seq]
            # Damaged on its way, or behind one that was: everything that is open goes out again, in order.
            case Reason.CHECKSUM | Reason.CHUNK | Reason.SEQUENCE if self._resends < MAX_RESENDS:
                self._resends += 1
                self._client.resend()
            case _:
                raise Refused(outcome.refusal)
