"""The conductor performs control's actions: messages to workers, orders to the shard.

All state is touched on one event loop. Reducing, encoding and checking of large parts run on other threads in
nogil code, while the loop answers heartbeats.

Nothing leaves the server that a restarted server could contradict. Four rules ensure that, in the order of a
push's life:

1. A part is in the journal before it is stored, reaches the shard, or is reported to its worker
   (`PushLedger.store`; the journal is synced there while parts of a round are stepped one by one).
2. A decision is in the journal, and synced, before its outcome leaves and before an order follows from it
   (`Conductor.decide`; `Recorder.event` syncs each event that has actions).
3. The shard gets an order before any part of its update leaves: `_begin_apply` and `_open_round` open the
   broadcast, and only the shard adds to it.
4. A version is published once the shard has reported it as applied (`Conductor._apply`, `publish`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..common import failpoints
from ..common.parts import Plan
from ..common.spec import SpecError
from ..compressors import known_compressor
from ..planning.job import StepOptions
from ..proto import messages as m
from ..proto.manifest import first_difference
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
from .job.loss_history import mean_loss
from .metrics import ServerMetrics
from .plans.planner import Planner
from .plans.rate_control import PartArrival, RateControl
from .plans.replanning import Replanning, fixed
from .reporting import count_waiting, shortened, update_durability, update_gauges
from .shard.model_state import Deposit, ModelState, Values
from .shard.reports import Applied, Final
from .shard.shard import Shard
from .shard.store import DivergedError
from .streams.final_parts import FinalParts
from .streams.outbox import WorkerStream, end_stalled
from .streams.publishing import Publishing
from .streams.push_ledger import PushLedger
from .streams.updates import Broadcast

log = logging.getLogger("gradwire.server")
R = TypeVar("R")

Told = e.Report | e.LossReported | e.Note  # actions that only inform people or members

TICK_S = 0.25  # time between ticks


class Conductor:
    """The owner of control, shard, push ledger and streams: it feeds events to control and performs the
    resulting actions. The daemon creates it; it belongs to one event loop.

    A recovery drives it through the methods that live traffic calls, and replaces `clock`, `applied` and
    `tell` in the meantime.

    Attributes:
        clock: returns the time in seconds; live, the monotonic clock.
        applied: called when the shard has applied a version; live, `publish`.
        tell: called with actions that only inform; live, log, metrics and members get them.
        core: control.
        metrics: metrics of the server.
        recorder: journal and checkpoints; without a folder for a job that is not stored.
        shard: owner of the parameters.
        streams: streams of the connected workers, by worker.
        state: buffers and frozen parameters.
        rate_control: rates at which workers may send.
        ledger: pushes that are not applied yet.
        plans: measurements and new plans.
        prepared: plan with the next number, which waits for `Adopt`; None without one.
        copies: workers' snapshots that are not installed yet.
        output: files of the final and the best parameters.
        finished: set once the job is finished and its parameters are saved, if that was possible.
        failed: set once the job cannot continue.
        failure: reason why the job cannot continue; "" if it can.
        diverged: whether the reason is that parameters are not finite.
        unwritten: whether the reason is that the journal cannot be written.
        uploaded: share of the initial model that has arrived, as a text that follows the waiting text; "" if
            no worker uploads it.
        parameters_sha256: SHA-256 of the final parameters in hexadecimal; "" before they are saved.
        paused: set once a requested pause is complete: nothing is in progress, and no work is assigned.
        working: background tasks that are running.
        started_at: time of the first assignment; None before it.
        ended_at: time of the last version; None before the first.
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
            core: control of the job.
            metrics: metrics of the server.
            shard: owner of the parameters.
            planner: decides when the model gets a new plan; None for the first plan only.
            output: file for the final parameters; None for no file.
            keep_best: store the best evaluated version as well, beside `output` and in the recorder's folder.
            recorder: journals the job's inputs; None for a job that is not stored.
            checkpoint: writes a checkpoint of this conductor when the recorder says that one is due, and
                returns once the state may change again. Required with a recorder that keeps the job."""
        self.clock: Callable[[], float] = time.monotonic
        self.applied: Callable[[int], Awaitable[None]] = self.publish
        self.tell: Callable[[Told], None] = self._tell
        self.recorder, self._checkpoint = recorder or Recorder(), checkpoint
        self.recorder.broken = self._journal_failed
        self.core = core
        self.metrics = metrics
        self.shard = shard
        self.streams: dict[str, WorkerStream] = {}
        self.state = ModelState()
        self.rate_control = RateControl()
        self._publishing = Publishing(shard, self.streams, work=self._work)
        self.prepared: Plan | None = None  # has the next number
        self.plans = Replanning(
            planner or fixed(),
            shard,
            metrics,
            adopt=self.replan,
            work=self._work,
            chosen=self._chosen,
        )
        self.copies: dict[e.SnapshotKey, Assembly] = {}  # their values are not checked yet
        self.final_parts = FinalParts()
        self.ledger = PushLedger(
            core, shard, self.streams, self.recorder, self.final_parts, lambda event: self.happen(event)
        )
        self.output = Output(output, shard, self.state, self.recorder, keep_best=keep_best)
        self.finished = asyncio.Event()
        self._stopped = False
        self.failed = asyncio.Event()
        self.failure = self.uploaded = ""
        self.diverged = False
        self.unwritten = False
        self.parameters_sha256 = ""
        self.paused = asyncio.Event()
        self.working: set[asyncio.Future[None]] = set()
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def training_seconds(self) -> float:
        """Time from the first assignment to the last version, in seconds of the job's clock; 0 before the
        first assignment."""
        if self.started_at is None:
            return 0.0
        over = self.core.state.phase in (m.Phase.FINISHING, m.Phase.FINISHED)
        end = self.ended_at if over and self.ended_at is not None else self.now()
        return end - self.started_at

    def now(self) -> float:
        """Return the time of the job's clock in seconds. The clock stands still while no server runs."""
        return self.clock()

    def forget_gone(self) -> None:
        """Drop measurements, buffers and stored parts of members that are gone."""
        roster = self.core.state.roster
        self.plans.planner.keep([member.id for member in roster.members.values()])
        self.state.keep(lambda name: roster.get(name) is not None)
        self.ledger.forget_gone()

    def _chosen(self) -> tuple[StepOptions, int] | None:
        """Return the options of the job's steps, with the first member's compressor, and the number of
        members. None if these steps cannot be predicted."""
        rules, members = self.core.state.rules, self.core.state.roster.by_rank()
        compressor = known_compressor(members[0].compressor) if members else None
        if compressor is None:
            return None
        try:
            sent = compressor.compression()
        except SpecError:  # steps with this compressor cannot be predicted
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
        """Store buffers that arrived with a push, after the journal has them.

        Args:
            key: identity of the push.
            deposit: the buffers.

        Raises:
            JournalError: the journal cannot be written.
        """
        member = key.worker, key.incarnation
        self.recorder.buffers(member, key.seq, deposit.collection, deposit.values)
        self.state.put(key, deposit)

    def put_evaluated(self, epoch: int, values: Values) -> None:
        """Make the buffers that an epoch was evaluated with the job's buffers, after the journal has them.

        Args:
            epoch: number of the evaluation.
            values: bytes of each buffer, by name.

        Raises:
            JournalError: the journal cannot be written.
        """
        self.recorder.evaluated(epoch, values)
        self.state.evaluated(epoch, values)

    def push(self, event: e.Pushed) -> tuple[m.Outcome, Sequence[e.Action]]:
        """Have control decide on a complete push, and record the decision in ledger, metrics and buffers.

        Returns:
            The outcome, and the actions, which the caller performs after it has sent the outcome.

        Raises:
            Refused: control refuses the event.
            JournalError: the decision cannot be journaled, so nothing may follow from it.
        """
        result = self.decide(event)
        outcome, repeated = result.reply.outcome, result.reply.repeated
        accepted = outcome.decision is m.Decision.ACCEPTED
        payloads, counted = self.ledger.decided(event.key, outcome, repeated=repeated)
        if not repeated:
            if accepted:
                self.metrics.push_accepted(payloads, outcome.version - 1 - event.base_version)
            else:
                self.metrics.push_refused(outcome.refusal.reason if outcome.refusal else Reason.STALE)
            member = self.core.state.roster.get((event.worker, event.incarnation))
            rank = 0 if member is None else member.rank
            self.state.decided(event.key, accepted=accepted, rank=rank, samples=event.samples)
        failpoints.reached("push.decided")
        return replace(outcome, counted=counted) if counted else outcome, result.actions

    def arrived(self, arrival: PartArrival) -> None:
        """Record the arrival of a part, for rate control and planner."""
        self.rate_control.arrived(arrival)
        self.plans.arrived(arrival)

    def decide(self, event: e.Event[R]) -> e.Result[R]:
        """Have control decide on an event, and journal the event. The caller performs the actions.

        Returns:
            The reply, and the actions that follow.

        Raises:
            Refused: control refuses the event.
            JournalError: the event cannot be journaled, so nothing may follow from it.
        """
        now = self.now()
        leases = self.recorder.leases(self.core, event)
        result = self.core.step(event, now)
        self.recorder.event(event, now, result, leases)
        return result

    def _journal_failed(self, why: str) -> None:
        """Fail the job, because the journal cannot be written, and end all streams. Workers may wait for
        another server."""
        if not self.failed.is_set():
            self.failure, self.unwritten = why, True
            self.failed.set()
        refusal = refusals.stopping("", "its journal cannot be written")
        for stream in self.streams.values():
            stream.outbox.end(refusal, final=False)

    def differences(self, model: m.ModelManifest | None = None) -> dict[str, tuple[str, str]]:
        """Return the first difference of each worker's model from the job's, by worker; see
        `first_difference`.

        Args:
            model: the job's manifest that is not opened yet; None for the shard's.
        """
        if model is None and self.shard.reported.manifest is not None:
            model = self.shard.reported.manifest.to_message()
        if model is None:
            return {}
        return {
            stream.worker: first_difference(model, stream.model)
            for stream in self.streams.values()
            if stream.model is not None and stream.model.fingerprint != model.fingerprint
        }

    def happen(self, event: e.Event[R]) -> R:
        """Have control decide on an event, perform the actions that follow, and return the reply.

        Raises:
            Refused: control refuses the event.
            JournalError: the event cannot be journaled, so nothing may follow from it.
        """
        result = self.decide(event)
        self.perform(result.actions)
        if isinstance(event, e.EvaluationReported):
            self.output.judged()
        return result.reply

    def perform(self, actions: Sequence[e.Action]) -> None:
        """Perform actions of control, in order."""
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
                    self._substitute(action)
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
                    self.metrics.round_closed(seconds, action.samples, action.loss, self.core.state.version)
                    self.metrics.redundancy.set(action.redundancy)
                case e.RequestSnapshot():
                    self._send(action.worker, m.SnapshotRequest(version=action.version, apply=action.apply))
                case e.InstallSnapshot():
                    self._work(self._install_snapshot(action.key))
                case e.Relabel():
                    self._publishing.drop_snapshot()
                    self._work(self.shard.replace(action.version))
                case e.Disconnect():
                    stream = self.streams.get(action.worker)
                    if stream is not None and stream.incarnation == action.incarnation:
                        stream.outbox.end(action.refusal, final=action.final)
                case e.Report() | e.LossReported() | e.Note():
                    self.tell(action)
                case e.TellEvaluations():
                    for worker in self.streams:
                        self._send(worker, action.evaluations)
                case e.Best():
                    self.output.best(action.epoch, action.version)
                case e.Paused():
                    self.paused.set()
                case e.Finish():
                    self._work(self._finish())

    def _tell(self, action: Told) -> None:
        """Inform log, metrics and members."""
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
        """Tell operators and members for whom a round waits, unless it waits no longer than healthy rounds
        do."""
        if self.core.state.phase is m.Phase.RUNNING and self.metrics.healthy(action.seconds):
            return
        text = action.text + self.uploaded
        log.log(logging.INFO if action.usual else logging.WARNING, "%s", shortened(text))
        waiting = m.Waiting(ranks=action.ranks, seconds=action.seconds, text=text)
        for worker in self.streams:
            self._send(worker, waiting)

    def _send(self, worker: str, message: m.ServerMessage) -> None:
        """Send a message to a worker, if it is connected. Otherwise its next stream gets the same information
        in reply to `Prepared`."""
        stream = self.streams.get(worker)
        if stream is not None:
            stream.outbox.send(message)

    def _assign(self, action: e.Assign) -> None:
        """Send a worker its assignment, after the plan and the updates that it needs."""
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
            parts=self.final_parts.asked(action.assignment.id),
            checked=checked,
            checksum=checksum,
        )
        self._publishing.send_plan_if_stale(stream)
        if action.has != assignment.version:
            self._publishing.update(stream, assignment.version, action.has)
        if not assignment.parts:  # a substitute is not limited, for the round waits for its parts alone
            assignment = replace(assignment, pace=self.rate_control.rate(action.worker))
        stream.outbox.send(assignment)

    def replan(self, plan: Plan) -> None:
        """Put a plan in force as soon as the mode is quiet. It gets the next number, and replaces a plan that
        is still waiting. Near the end of a job it may never come into force.

        Args:
            plan: division of the model; its own number is ignored.

        Raises:
            Refused: PLAN, the model cannot be divided by this plan.
        """
        self.prepare(plan)
        self.recorder.plan(encode_server(plan_message(plan)))
        self.happen(e.PlanPrepared())

    def prepare(self, plan: Plan) -> None:
        """Store a plan under the next number, for `Adopt`. The job must have parameters.

        Raises:
            Refused: PLAN, the model cannot be divided by this plan.
        """
        known = self.shard.reported
        assert known.manifest is not None, "a plan needs the parameters"
        following = replace(plan, number=known.plan.number + 1, norms=known.plan.norms)
        self.prepared = plan_of(plan_message(following), known.manifest)

    def _adopt(self, action: e.Adopt) -> None:
        """Put the prepared plan in force: bring members to the present version, drop stored parts, and send
        the plan."""
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
        self.ledger.adopt_plan()
        self._work(self.shard.adopt(plan))
        for stream, _ in members:
            self._publishing.send_plan_if_stale(stream)

    def _open_round(self, action: e.Open) -> None:
        """Open a round whose parts are stepped one by one, and send each part of its update as soon as it is
        encoded."""
        listening: list[str] = []  # other members may still have to get this version first
        for worker, incarnation, _ in action.members.values():
            member = self.core.state.roster.present((worker, incarnation))
            if member is not None and member.listening:
                listening.append(worker)
        growing = self._publishing.open(action.version, listening)
        self.rate_control.open((worker for worker, _, _ in action.members.values()), time.monotonic())
        self.final_parts.open_round()
        self.shard.open_round(action, growing.add, self._final)

    def _final(self, report: Final) -> None:
        """Record a part that is about to be stepped, and tell control about the first and the last one."""
        self.final_parts.record(report)
        if report.first or report.last:
            self.happen(e.ApplyStarted(version=report.version, whole=report.last))

    def _substitute(self, action: e.Substitute) -> None:
        """Give a lost member's slot to a worker, and determine the parts that a substitute has to push."""
        if action.assignment != action.lost:
            parts = len(self.shard.reported.plan.parts)
            missing = self.final_parts.ask(action.assignment, parts)
            log.info("worker %r pushes the missing parts: %d of %d", action.worker, missing, parts)
        self.shard.change_round(action)

    def _begin_apply(self, action: e.Apply) -> None:
        """Order the shard to apply pushes, and send the update while it grows."""
        self.rate_control.close()
        broadcast = self._publishing.close(action.version, action.members)
        pushes, rates = self.ledger.take(action)
        applying = self.shard.apply(action, pushes, broadcast.add, rates)
        self._work(self._apply(action, broadcast, applying))

    async def _apply(self, action: e.Apply, broadcast: Broadcast, applying: Awaitable[Applied]) -> None:
        """Complete a version once the shard has applied it: metrics, kept updates, and the call of
        `applied`."""
        started = self.now()
        report = await applying
        failpoints.reached("version.applied")
        broadcast.finish()
        self.ended_at = self.now()
        if report.passed_over:
            self.metrics.passed_over.inc()
            log.warning(
                "version %d: %d gradients are too few for the aggregation; the parameters stay unchanged",
                action.version,
                report.passed_over,
            )
        self.metrics.gradient_norm.set(report.gradient_norm)
        self.metrics.reduce_seconds.observe(self.ended_at - started)
        self._publishing.published(broadcast)
        samples = sum(each.samples for each in action.contributions)
        loss = mean_loss([(each.loss, each.samples) for each in action.contributions])
        if action.clocks_stale is not None:
            self.metrics.clocks_stale(action.clocks_stale)
        self.metrics.round_closed(self.ended_at - action.opened_at, samples, loss, action.version)
        await self.applied(action.version)

    async def publish(self, version: int) -> None:
        """Tell control that the shard has applied a version. Write a checkpoint of it first if one is due."""
        if self.recorder.due(version, self.now(), self.core.state.samples.progress):
            assert self._checkpoint is not None
            await self._checkpoint(self)
        failpoints.reached("version.announced")
        self.happen(e.Published(version=version))
        self.plans.published(version)

    async def _finish(self) -> None:
        """Save the final parameters, and mark the job as finished."""
        if self.shard.reported.manifest is not None:
            await self._save(finished=True)
            if self.output.unsaved and not self._stopped:
                log.error(
                    "the final parameters are not saved; fetch them before you stop the server, or free disk "
                    "space: the server tries again when it stops"
                )
        log.info("the job is finished at version %d", self.core.state.version)
        self._show()
        self.finished.set()

    async def _save(self, *, finished: bool) -> None:
        """Write the files of the last version. finished: whether the job is finished, which decides the
        buffers that are written."""

        def buffers() -> Awaitable[Values]:
            return self.state.of(self.core.state.last_evaluation) if finished else self.state.newest()

        self.parameters_sha256 = await self.output.write(buffers, finished=finished)

    async def dispersed(self) -> None:
        """Return once the job is finished, its parameters are saved, and all members have left."""
        await self.finished.wait()
        while self.core.state.roster.members or self.output.unsaved:
            await asyncio.sleep(TICK_S)

    async def _install_snapshot(self, key: e.SnapshotKey) -> None:
        """Replace the parameters by a worker's snapshot."""
        await self.shard.replace(key.version, self.copies.pop(key))
        assert self.shard.reported.manifest is not None
        self.metrics.received_raw(self.shard.reported.manifest.raw_bytes)
        self._publishing.drop_snapshot()
        self.happen(e.SnapshotInstalled(version=key.version))

    # ---- tasks

    def _work(self, work: Awaitable[None]) -> None:
        """Run an awaitable in the background. Its failure fails the job."""
        task = asyncio.ensure_future(work)
        self.working.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Future[None]) -> None:
        """Fail the job if a background task has failed: a round that cannot be applied would never close, and
        without ticks no lease would end."""
        self.working.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self.failed.is_set():
            return
        # While stopping, this is no failure: another server will produce that version from the journal.
        if self._stopped and isinstance(error, JournalError):
            return
        self.diverged = isinstance(error, DivergedError)
        if self.diverged:
            self.failure = f"{error}; lower --learning-rate, or check the data"
        else:
            self.failure = f"the job cannot continue: {error!r}"
            log.error("%s", self.failure, exc_info=error)
        self.failed.set()

    def _show(self) -> None:
        """Update the gauges."""
        parts = len(self.shard.reported.plan.parts) if self.shard.reported.manifest is not None else 0
        update_gauges(self.metrics, self.core, parts, self.now())
        update_durability(self.metrics, self.recorder)

    def start(self) -> None:
        """Start the shard, and begin to tick."""
        self.shard.start()
        self._ticker = asyncio.create_task(self._tick())
        self._ticker.add_done_callback(self._worked)

    def tick(self) -> None:
        """Let control react to the passing of time, and drop the data of members that are gone."""
        self.happen(e.Tick())
        self.forget_gone()

    async def _tick(self) -> None:
        """Tick forever, and end stalled streams."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()
            end_stalled(self.streams.values(), self.core.state.rules.lease_seconds, time.monotonic())
            self._show()
            count_waiting(self.metrics, self.core, self.now(), TICK_S)

    async def stop(self, reason: str, *, resumable: bool = False) -> None:
        """Complete the orders in progress, end all streams with a reason, and save the parameters.

        Args:
            reason: why the server stops, for people.
            resumable: whether another server may continue the job. Members then wait for it; otherwise they
                leave.
        """
        self._stopped = True
        if self._ticker is not None:
            self._ticker.cancel()
        if resumable:
            self.recorder.stop()
            why = refusals.stopping("", f"{reason}, and another server may continue the job")
            for stream in self.streams.values():
                stream.outbox.end(why, final=False)
        else:
            self.happen(e.Stopping(reason=reason, failed=self.failed.is_set()))
        while self.working:
            await asyncio.wait(set(self.working))
        finished = self.finished.is_set()
        if self.shard.reported.manifest is not None and (self.output.unsaved or not finished):
            await self._save(finished=finished)
        await asyncio.to_thread(self.shard.close)  # waits for a kernel that is being compiled
