"""The conductor carries out control's actions: messages to workers, orders to the shard.

All state is touched on one event loop. Reducing, encoding and scanning run on other threads in nogil code,
while the loop answers heartbeats.

Nothing leaves the server that a restarted server could contradict. Four rules, in the order of a push's life:

1. A part is in the journal before it is stored, reaches the shard, or is reported to its worker
   (`PushLedger.store`; synced there while parts of a round are stepped one by one).
2. A decision is in the journal, and synced, before its outcome leaves and before an order follows from it
   (`Conductor.decide`; `Recorder.event` syncs whatever has actions).
3. An order is given to the shard before anything of its update leaves: `_begin_apply` and `_open_round` open
   the broadcast, and the shard alone adds to it.
4. A version is published once the shard has reported it as applied (`Conductor._apply`, `published`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..common import failpoints
from ..common.spec import SpecError
from ..compressors import Plan, known_compressor
from ..planning.job import StepOptions
from ..proto import messages as m
from ..proto.plans import plan_message, plan_of
from ..proto.refusal import Reason
from ..proto.transfer import Assembly
from ..proto.wire import encode_server
from .durable.journal import JournalError
from .durable.output import Output
from .durable.recorder import Recorder
from .job import events as e
from .job import refusals
from .job.core import Core
from .metrics import ServerMetrics
from .plans.planner import Planner
from .plans.rate_control import Came, Pacing
from .plans.replanning import Replanning, fixed
from .reporting import count_waiting, shortened, update_durability, update_gauges
from .shard.model_state import Deposit, ModelState, Values
from .shard.reports import Applied, Final
from .shard.shard import Shard
from .shard.store import DivergedError
from .streams.outbox import WorkerStream
from .streams.publishing import Publishing
from .streams.push_ledger import PushLedger
from .streams.updates import Broadcast

log = logging.getLogger("gradwire.server")
R = TypeVar("R")

Told = e.Report | e.LossReported | e.Note  # actions that only tell somebody something

TICK_S = 0.25


class Conductor:
    """Feeds events to the core and performs its actions. Belongs to one event loop.

    A recovery drives it through the methods that live traffic calls, and replaces these three meanwhile:

    Attributes:
        clock: returns the seconds of `now`.
        applied: called when the shard has applied a version. Live, `publish`.
        tell: called with what is only to be told. Live, the log, the metrics and the members get it.
    """

    def __init__(
        self,
        core: Core,
        metrics: ServerMetrics,
        *,
        shard: Shard,
        planner: Planner | None = None,
        output: Path | None = None,
        keep_best: bool = False,
        recorder: Recorder | None = None,
        checkpoint: Callable[[Conductor], Awaitable[object]] | None = None,
    ) -> None:
        """
        Args:
            planner: says when the model is to be divided otherwise; None for never.
            output: where the final parameters go.
            keep_best: keep another file beside it, of the best version that was evaluated, and one where the
                recorder writes.
            recorder: writes down what happens; None for a job that ends with its server.
            checkpoint: writes a checkpoint of this conductor when the recorder says that one is due, and
                returns once the state may change again. Needed with a recorder that keeps the job.
        """
        self.clock: Callable[[], float] = time.monotonic
        self.applied: Callable[[int], Awaitable[None]] = self.publish
        self.tell: Callable[[Told], None] = self._tell
        self.recorder, self._checkpoint = recorder or Recorder(), checkpoint
        self.recorder.broken = self._unwritten
        self.core = core
        self.metrics = metrics
        self.shard = shard
        self.streams: dict[str, WorkerStream] = {}
        self.state = ModelState()
        self.pacing = Pacing()
        self._publishing = Publishing(shard, self.streams, work=self._work)
        self.prepared: Plan | None = None  # under the next number, for `Adopt`
        self.plans = Replanning(
            planner or fixed(),
            shard,
            metrics,
            adopt=self.replan,
            work=self._work,
            chosen=self._chosen,
        )
        self.copies: dict[e.SnapshotKey, Assembly] = {}  # workers' snapshots, not checked yet
        self.ledger = PushLedger(core, shard, self.streams, self.recorder)
        self.output = Output(output, shard, self.state, self.recorder, keep_best=keep_best)
        self.finished = asyncio.Event()  # and saved, as far as that was possible
        self._stopped = False
        self.failed = asyncio.Event()
        self.failure = ""  # why the job cannot go on
        self.diverged = False  # is why
        self.unwritten = False  # what it has to write down is why
        self.parameters_sha256 = ""  # of the final parameters, once they are saved
        self.paused = asyncio.Event()  # nothing is under way, and no work is given out
        self.working: set[asyncio.Future[None]] = set()
        self.started_at: float | None = None  # when work was first given out
        self.ended_at: float | None = None  # when the last version was made
        self._ticker: asyncio.Task[None] | None = None

    @property
    def training_seconds(self) -> float:
        """From the opening of the first round to the last version."""
        if self.started_at is None:
            return 0.0
        over = self.core.phase in (m.Phase.FINISHING, m.Phase.FINISHED)
        end = self.ended_at if over and self.ended_at is not None else self.now()
        return end - self.started_at

    def now(self) -> float:
        """Seconds of the job's clock, which stands still while there is no server."""
        return self.clock()

    def forget_gone(self) -> None:
        """Keep nothing that came from members who are gone."""
        roster = self.core.roster
        self.plans.planner.keep([member.id for member in roster.members.values()])
        self.state.keep(lambda name: roster.get(name) is not None)
        self.ledger.forget_gone()

    def _chosen(self) -> tuple[StepOptions, int] | None:
        """How the job runs, as far as its first worker shows it, and with how many workers."""
        rules, members = self.core.rules, self.core.roster.by_rank()
        compressor = known_compressor(members[0].compressor) if members else None
        if compressor is None:
            return None
        try:
            sent = compressor.compression()
        except SpecError:  # steps with it cannot be predicted
            return None
        choice = StepOptions(
            compressor=sent,
            mode=rules.mode,
            overlap=rules.overlap,
            fusion=rules.fusion,
            order=rules.order,
            part_bytes=rules.part_bytes,
        )
        return choice, len(members)

    def put_buffers(self, key: e.PushKey, deposit: Deposit) -> None:
        """Buffers have come that belong to a push. Raises Refused."""
        member = key.worker, key.incarnation
        self.recorder.buffers(member, key.seq, deposit.collection, deposit.values)
        self.state.put(key, deposit)

    def put_evaluated(self, epoch: int, values: Values) -> None:
        """Buffers have come with which an epoch is evaluated. Raises Refused."""
        self.recorder.evaluated(epoch, values)
        self.state.evaluated(epoch, values)

    def push(self, event: e.Pushed) -> e.Result[e.Decided]:
        """Decide on a push that is committed and whole. Like `decide`, but the ledger takes the decision."""
        payloads = self.ledger.payloads(event.key)
        result = self.decide(event)
        outcome = result.reply.outcome
        accepted = outcome.decision is m.Decision.ACCEPTED
        self.ledger.decided(event.key, accepted=accepted and not result.reply.repeated)
        if not result.reply.repeated:
            if accepted:
                self.metrics.push_accepted(payloads, outcome.version - 1 - event.base_version)
            else:
                self.metrics.push_refused(outcome.refusal.reason if outcome.refusal else Reason.STALE)
            member = self.core.roster.get((event.worker, event.incarnation))
            rank = 0 if member is None else member.rank
            self.state.decided(event.key, accepted=accepted, rank=rank, samples=event.samples)
        failpoints.reached("push.decided")
        return result

    def arrived(self, came: Came) -> None:
        """A part of a push is there."""
        self.pacing.arrived(came)
        self.plans.arrived(came)

    def decide(self, event: e.Event[R]) -> e.Result[R]:
        """The reply to an event, and actions still to be performed. Raises Refused; JournalError, and nothing
        may follow from it."""
        now = self.now()
        leases = self.recorder.leases(self.core, event)
        result = self.core.step(event, now)
        self.recorder.event(event, now, result, leases)
        return result

    def _unwritten(self, why: str) -> None:
        """Nothing can be written down any more."""
        if not self.failed.is_set():
            self.failure, self.unwritten = why, True
            self.failed.set()
        refusal = refusals.stopping("", "its journal cannot be written")
        for stream in self.streams.values():
            stream.outbox.end(refusal, final=False)

    def happen(self, event: e.Event[R]) -> R:
        """Decide and perform. Raises Refused."""
        result = self.decide(event)
        self.perform(result.actions)
        if isinstance(event, e.EvaluationReported):
            self.output.judged()
        return result.reply

    def perform(self, actions: Sequence[e.Action]) -> None:
        for action in actions:
            match action:
                case e.RequestInitialize():
                    self._send(action.worker, m.InitializeRequest())
                case e.Assign():
                    self._assign(action)
                case e.Adopt():
                    self._adopt(action)
                case e.Open():
                    self._open_round(action)
                case e.Substitute():
                    self._refill(action)
                case e.MemberLost() | e.Exclude():
                    self.shard.change_round(action)
                case e.Apply():
                    self._begin_apply(action)
                case e.Drop():
                    if isinstance(action.key, e.PushKey):
                        self.shard.drop(action.key)
                    else:
                        self.copies.pop(action.key, None)
                case e.ExchangeCompleted():
                    self.ended_at = self.now()
                    seconds = self.ended_at - action.opened_at
                    self.metrics.round_closed(seconds, action.samples, action.loss, self.core.version)
                    self.metrics.redundancy.set(action.redundancy)
                case e.RequestSnapshot():
                    self._send(action.worker, m.SnapshotRequest(version=action.version, apply=action.apply))
                case e.InstallSnapshot():
                    self._work(self._take_copy(action.key))
                case e.Relabel():
                    self._publishing.drop_snapshot()
                    self._work(self.shard.replace(action.version))
                case e.Disconnect():
                    stream = self.streams.get(action.worker)
                    if stream is not None and stream.incarnation == action.incarnation:
                        stream.outbox.end(action.refusal, final=action.final)
                case e.Report() | e.LossReported() | e.Note():
                    self.tell(action)
                case e.Best():
                    self.output.best(action.epoch, action.version)
                case e.Paused():
                    self.paused.set()
                case e.Finish():
                    self._work(self._finish())

    def _tell(self, action: Told) -> None:
        match action:
            case e.Report():
                self._report(action)
            case e.LossReported():
                self.metrics.lost_members.inc()
                about = {"worker": action.worker, "rank": action.rank}
                log.warning("%s is lost: %s", action.name, action.reason, extra=about)
            case e.Note():
                log.log(logging.WARNING if action.warning else logging.INFO, "%s", action.text)

    def _report(self, action: e.Report) -> None:
        """Say whom a round waits for, unless it waits as long as every healthy round does."""
        if self.core.phase is m.Phase.RUNNING and self.metrics.healthy(action.seconds):
            return
        log.log(logging.INFO if action.usual else logging.WARNING, "%s", shortened(action.text))
        waiting = m.Waiting(ranks=action.ranks, seconds=action.seconds, text=action.text)
        for worker in self.streams:
            self._send(worker, waiting)

    def _send(self, worker: str, message: m.ServerMessage) -> None:
        """Send to a worker that may have gone: its next stream learns all it needs from `Prepared`."""
        stream = self.streams.get(worker)
        if stream is not None:
            stream.outbox.send(message)

    def _assign(self, action: e.Assign) -> None:
        if self.started_at is None:
            self.started_at = self.now()
        if action.assignment.evaluate_epoch:
            self.state.pin(action.assignment.evaluate_epoch, action.assignment.version)
            self.output.evaluated(action.assignment.evaluate_epoch, action.assignment.version)
        stream = self.streams.get(action.worker)
        if stream is None:
            return
        checked, checksum = self.shard.reported.checked
        assignment = replace(
            action.assignment,
            parts=self.ledger.asked_parts(action.assignment.id),
            checked=checked,
            checksum=checksum,
        )
        self._publishing.send_plan_if_stale(stream)
        if action.has != assignment.version:
            self._publishing.update(stream, assignment.version, action.has)
        if not assignment.parts:  # nobody else sends what a lost worker left
            assignment = replace(assignment, pace=self.pacing.rate(action.worker))
        stream.outbox.send(assignment)

    def replan(self, plan: Plan) -> None:
        """Have the model divided otherwise as soon as no push is open, in a job that has its parameters. In
        force it has the next number, whatever its own. A plan that still waits gives way to this one; one
        that comes shortly before the end of the job does not come into force.

        Raises Refused: PLAN, if the model cannot be divided so.
        """
        self.prepare(plan)
        self.recorder.plan(encode_server(plan_message(plan)))
        self.happen(e.PlanPrepared())

    def prepare(self, plan: Plan) -> None:
        """Have a plan ready under the next number. Raises Refused: PLAN if the model cannot be divided so."""
        known = self.shard.reported
        assert known.manifest is not None, "there is nothing to divide yet"
        following = replace(plan, number=known.plan.number + 1, norms=known.plan.norms)
        self.prepared = plan_of(plan_message(following), known.manifest)

    def _adopt(self, action: e.Adopt) -> None:
        plan, self.prepared = self.prepared, None
        assert plan is not None
        assert plan.number == action.plan
        members = [
            (stream, has)
            for worker, has in action.members.items()
            if (stream := self.streams.get(worker)) is not None
        ]
        self._publishing.finish_plan(action.version, members)
        self.metrics.plans.inc()
        self.ledger.forget_parts()
        self._work(self.shard.adopt(plan))
        self.ledger.stop_late_pushes()
        for stream, _ in members:
            self._publishing.send_plan_if_stale(stream)

    def _open_round(self, action: e.Open) -> None:
        """Parts of the update go out as soon as they are there."""
        listening: list[str] = []  # others may still have to be sent this version
        for worker, incarnation, _ in action.members.values():
            member = self.core.roster.present((worker, incarnation))
            if member is not None and member.listening:
                listening.append(worker)
        growing = self._publishing.open(action.version, listening)
        self.pacing.open((worker for worker, _, _ in action.members.values()), time.monotonic())
        self.ledger.open_round()
        self.shard.open_round(action, growing.add, self._final)

    def _final(self, report: Final) -> None:
        self.ledger.final(report)
        if report.first or report.last:
            self.happen(e.ApplyStarted(version=report.version, whole=report.last))

    def _refill(self, action: e.Substitute) -> None:
        if action.assignment != action.lost:
            parts = len(self.shard.reported.plan.parts)
            missing = len(self.ledger.ask_substitute(action.assignment, parts))
            log.info("%s pushes the %d of %d parts that are missing", action.worker, missing, parts)
        self.shard.change_round(action)

    def _begin_apply(self, action: e.Apply) -> None:
        self.pacing.close()
        broadcast = self._publishing.close(action.version, action.members)
        pushes, rates = self.ledger.take(action)
        applying = self.shard.apply(action, pushes, broadcast.add, rates)
        self._work(self._apply(action, broadcast, applying))
        if action.base_version is None:  # a round has closed
            self.ledger.stop_late_pushes()

    async def _apply(self, action: e.Apply, broadcast: Broadcast, applying: Awaitable[Applied]) -> None:
        started = self.now()
        report = await applying
        failpoints.reached("version.applied")
        broadcast.finish()
        self.ended_at = self.now()
        if report.passed_over:
            self.metrics.passed_over.inc()
            log.warning(
                "version %d: %d gradients are too few for the aggregation; the parameters stay as they are",
                action.version,
                report.passed_over,
            )
        self.metrics.gradient_norm.set(report.gradient_norm)
        self.metrics.reduce_seconds.observe(self.ended_at - started)
        self._publishing.published(broadcast)
        samples = sum(each.samples for each in action.contributions)
        loss = sum(each.loss * each.samples for each in action.contributions if each.samples)
        mean_loss = loss / samples if samples else math.nan
        if action.clocks_stale is not None:
            self.metrics.clocks_stale(action.clocks_stale)
        self.metrics.round_closed(self.ended_at - action.opened_at, samples, mean_loss, action.version)
        await self.applied(action.version)

    async def publish(self, version: int) -> None:
        """Tell control that the shard has a version, and take a checkpoint of it first if one is due."""
        if self.recorder.due(version, self.now(), self.core.samples.progress):
            assert self._checkpoint is not None
            await self._checkpoint(self)
        failpoints.reached("version.announced")
        self.happen(e.Published(version=version))
        self.plans.published(version)

    async def _finish(self) -> None:
        if self.shard.reported.manifest is not None:
            await self._conclude(finished=True)
            if self.output.unsaved and not self._stopped:
                log.error(
                    "fetch them before stopping the server, or make room: it tries again when it is stopped"
                )
        log.info("the job is finished at version %d", self.core.version)
        self._show()
        self.finished.set()

    async def _conclude(self, *, finished: bool) -> None:
        def buffers() -> Awaitable[Values]:
            return self.state.of(self.core.last_evaluation) if finished else self.state.newest()

        self.parameters_sha256 = await self.output.write(buffers, finished=finished)

    async def dispersed(self) -> None:
        """Return once the job is finished and saved, and no member has yet to hear of it."""
        await self.finished.wait()
        while self.core.roster.members or self.output.unsaved:
            await asyncio.sleep(TICK_S)

    async def _take_copy(self, key: e.SnapshotKey) -> None:
        await self.shard.replace(key.version, self.copies.pop(key))
        assert self.shard.reported.manifest is not None
        self.metrics.received_raw(self.shard.reported.manifest.raw_bytes)
        self._publishing.drop_snapshot()
        self.happen(e.SnapshotInstalled(version=key.version))

    # ---- tasks

    def _work(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.working.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Future[None]) -> None:
        """A round that cannot be applied would never close, and without ticks no lease would end: give up."""
        self.working.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self.failed.is_set():
            return
        if self._stopped and isinstance(error, JournalError):  # the next server makes that version
            return
        self.diverged = isinstance(error, DivergedError)
        if self.diverged:
            self.failure = f"{error}; lower --learning-rate, or check the data"
        else:
            self.failure = f"the job cannot go on: {error!r}"
            log.error("%s", self.failure, exc_info=error)
        self.failed.set()

    def _show(self) -> None:
        parts = len(self.shard.reported.plan.parts) if self.shard.reported.manifest is not None else 0
        update_gauges(self.metrics, self.core, parts, self.now())
        update_durability(self.metrics, self.recorder)

    def start(self) -> None:
        """Let time pass from now on."""
        self.shard.start()
        self._ticker = asyncio.create_task(self._tick())
        self._ticker.add_done_callback(self._worked)

    def tick(self) -> None:
        """Let control look at the time, and forget members that are gone."""
        self.happen(e.Tick())
        self.forget_gone()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()
            self.ledger.end_stalled(time.monotonic())
            self._show()
            count_waiting(self.metrics, self.core, self.now(), TICK_S)

    async def stop(self, reason: str, *, comes_back: bool = False) -> None:
        """Apply what was accepted, tell the members, let them go, and save what there is.

        comes_back: the members are to wait for the next server instead.
        """
        self._stopped = True
        if self._ticker is not None:
            self._ticker.cancel()
        if comes_back:
            self.recorder.stop()
            why = refusals.stopping("", f"{reason}, and may come back")
            for stream in self.streams.values():
                stream.outbox.end(why, final=False)
        else:
            self.happen(e.Stopping(reason=reason, failed=self.failed.is_set()))
        while self.working:
            await asyncio.wait(set(self.working))
        finished = self.finished.is_set()
        if self.shard.reported.manifest is not None and (self.output.unsaved or not finished):
            await self._conclude(finished=finished)
        await asyncio.to_thread(self.shard.close)  # it may wait for a kernel that is being compiled
