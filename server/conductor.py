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
from ..compressors.packing import Packing
from ..proto import messages as m
from ..proto.plans import plan_message
from ..proto.refusal import Reason, Refused
from ..proto.transfer import Assembly
from ..proto.wire import encode_server
from .durable.output import Output
from .durable.recorder import Recorder
from .job import events as e
from .job import refusals
from .job.core import Core
from .metrics import ServerMetrics
from .plans.planner import Planner
from .plans.rate_control import PartArrival, RateControl
from .plans.replanning import Replanning, chosen_steps, fixed
from .reporting import Told, count_version, count_waiting, inform, update_durability, update_gauges
from .shard.model_state import Deposit, ModelState, Values
from .shard.reports import Applied, Final
from .shard.shard import Shard
from .streams.final_parts import FinalParts
from .streams.outbox import WorkerStream, end_stalled
from .streams.publishing import Publishing
from .streams.push_ledger import PushLedger
from .streams.updates import Broadcast
from .tasks import Tasks

log = logging.getLogger("gradwire.server")
R = TypeVar("R")

TICK_S = 0.25  # time between ticks


class Conductor:
    """The owner of control, shard, push ledger and streams: it feeds events to control and performs the
    resulting actions. The daemon creates it; it belongs to one event loop. A recovery drives it through the
    methods that live traffic calls, and replaces `clock`, `applied` and `tell` in the meantime.

    Attributes:
        clock: returns the time in seconds; live, the monotonic clock.
        applied: called when the shard has applied a version; live, `publish`.
        tell: called with actions that only inform; live, log, metrics and members get them.
        copies: workers' snapshots, not installed yet and not checked.
        uploaded: text on the arrived share of the initial model; "" if no worker uploads it.
        parameters_sha256: SHA-256 of the final parameters in hexadecimal; "" before they are saved.
        paused: set once a requested pause is complete: nothing is in progress, and no work is assigned.
        started_at: time of the first assignment; None before it.
        ended_at: time of the last version; None before the first.
    """

    def __init__(
        self,
        core: Core,
        metrics: ServerMetrics,
        *,
        shard: Shard,
        packing: Packing | None = None,
        planner: Planner | None = None,
        output: Path | None = None,
        keep_best: bool = False,
        recorder: Recorder | None = None,
        checkpoint: Callable[[Conductor], Awaitable[object]] | None = None,
    ) -> None:
        """
        Args:
            packing: packs the updates; it learns the rates of the workers' links.
            planner: makes new plans; None for the first plan only.
            output: file for the final parameters; None for no file.
            keep_best: store the best evaluated version as well, beside `output` and in the recorder's folder.
            recorder: journals the job's inputs; None for a job that is not stored.
            checkpoint: writes a checkpoint of this conductor when the recorder says that one is due, and
                returns once the state may change again. Required with a recorder that keeps the job."""
        self.clock: Callable[[], float] = time.monotonic
        self.applied: Callable[[int], Awaitable[None]] = self.publish
        self.tell: Callable[[Told], None] = self._tell
        self.tasks = Tasks()
        self.recorder, self._checkpoint = recorder or Recorder(), checkpoint
        self.recorder.broken = self._journal_failed
        self.core, self.metrics = core, metrics
        self.shard, self.packing = shard, packing or Packing()
        self.streams: dict[str, WorkerStream] = {}
        self.state, self.rate_control = ModelState(), RateControl()
        self._publishing = Publishing(shard, self.streams, work=self.tasks.run)
        self.plans = Replanning(
            planner or fixed(),
            shard,
            metrics,
            adopt=self.replan,
            work=self.tasks.run,
            chosen=lambda: chosen_steps(self.core.state, shard.reported.manifest),
        )
        self.copies: dict[e.SnapshotKey, Assembly] = {}
        self.final_parts = FinalParts()
        self.ledger = PushLedger(
            core, shard, self.streams, self.recorder, self.final_parts, lambda event: self.happen(event)
        )
        self.output = Output(output, shard, self.state, self.recorder, keep_best=keep_best)
        self.finished, self.paused = asyncio.Event(), asyncio.Event()
        self.uploaded = self.parameters_sha256 = ""
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
        """Return the time in seconds of the job's clock, which stands still while no server runs."""
        return self.clock()

    def forget_gone(self) -> None:
        """Drop measurements, buffers and stored parts of members that are gone."""
        roster = self.core.state.roster
        self.plans.planner.keep([member.id for member in roster.members.values()])
        self.state.keep(lambda name: roster.get(name) is not None)
        self.ledger.forget_gone()

    def put_buffers(self, key: e.PushKey, deposit: Deposit) -> None:
        """Store buffers that arrived with a push, after the journal has them. Raises JournalError."""
        member = key.worker, key.incarnation
        self.recorder.buffers(member, key.seq, deposit.collection, deposit.values)
        self.state.put(key, deposit)

    def put_evaluated(self, epoch: int, values: Values) -> None:
        """Make the buffers that an epoch was evaluated with the job's, after the journal has them. Raises
        JournalError. values: bytes of each buffer, by name."""
        self.recorder.evaluated(epoch, values)
        self.state.evaluated(epoch, values)

    def push(self, event: e.Pushed) -> tuple[m.Outcome, Sequence[e.Action]]:
        """Have control decide on a complete push, and record it. Return the outcome, and the actions, which
        the caller performs once it has sent the outcome. Raises as `decide`."""
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

    def arrived(self, arrival: PartArrival, unpacked: int) -> None:
        self.rate_control.arrived(arrival)
        self.plans.arrived(arrival._replace(size=unpacked))  # plans are predicted by bytes before packing

    def decide(self, event: e.Event[R]) -> e.Result[R]:
        """Have control decide on an event, and journal it. Return the reply, and the actions for the caller.
        Raises Refused and JournalError, after which nothing may follow from the event. Any other exception
        fails the job, because control's state may have changed in part."""
        now = self.now()
        leases = self.recorder.leases(self.core, event)
        try:
            result = self.core.step(event, now)
        except Exception as error:
            if not isinstance(error, Refused):
                self.tasks.fail(error)
            raise
        self.recorder.event(event, now, result, leases)
        return result

    def _journal_failed(self, why: str) -> None:
        """Fail the job and end all streams. Workers may wait for another server."""
        self.tasks.cannot_write(why)
        refusal = refusals.stopping("", "its journal cannot be written")
        for stream in self.streams.values():
            stream.outbox.end(refusal, final=False)

    def happen(self, event: e.Event[R]) -> R:
        """Have control decide on an event, perform the actions, and return the reply. Raises as `decide`."""
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
                    self.tasks.run(self._install_snapshot(action.key))
                case e.Relabel():
                    self._publishing.drop_snapshot()
                    self.tasks.run(self.shard.replace(action.version))
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
                    self.tasks.run(self._finish())

    def _tell(self, action: Told) -> None:
        told = inform(action, self.metrics, self.core.state.phase, self.uploaded)
        if told is not None:
            for worker in self.streams:
                self._send(worker, told)

    def _send(self, worker: str, message: m.ServerMessage) -> None:
        """Send a message to a connected worker. Others get it on their next stream, after `Prepared`."""
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
        is still waiting. Near the end of a job it may never come into force. Raises Refused (PLAN) if the
        model cannot be divided by this plan."""
        self.plans.prepare(plan)
        self.recorder.plan(encode_server(plan_message(plan)))
        self.happen(e.PlanPrepared())

    def _adopt(self, action: e.Adopt) -> None:
        """Put the prepared plan in force, between the updates under the old plan and later messages."""
        plan = self.plans.take_prepared(action.plan)
        members = [
            (stream, has)
            for worker, has in action.members.items()
            if (stream := self.streams.get(worker)) is not None
        ]
        self._publishing.finish_plan(action.version, members)
        self.metrics.plans.inc()
        self.ledger.adopt_plan()
        self.tasks.run(self.shard.adopt(plan))
        for stream, _ in members:
            self._publishing.send_plan_if_stale(stream)

    def _open_round(self, action: e.Open) -> None:
        """Open a round whose parts are stepped one by one, and send its update as it grows."""
        workers = [worker for worker, _, _ in action.members.values()]
        # Other members may still have to get this version first.
        listening = {member.worker for member in self.core.state.roster.listening()}
        growing = self._publishing.open(action.version, [each for each in workers if each in listening])
        self.rate_control.open(workers, time.monotonic())
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
        broadcast = self._publishing.close(action.version, action.members, self.core.state.roster.versions)
        pushes, rates = self.ledger.take(action)
        applying = self.shard.apply(action, pushes, broadcast.add, rates)
        self.tasks.run(self._apply(action, broadcast, applying))

    async def _apply(self, action: e.Apply, broadcast: Broadcast, applying: Awaitable[Applied]) -> None:
        """Complete a version once the shard has applied it."""
        started = self.now()
        report = await applying
        failpoints.reached("version.applied")
        broadcast.finish()
        self.ended_at = self.now()
        self._publishing.published(broadcast, self.core.state.roster.versions)
        count_version(self.metrics, action, report, started, self.ended_at)
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
            self.parameters_sha256 = await self.output.write(self.core.state.last_evaluation)
            if self.output.unsaved and not self.tasks.stopping:
                log.error(
                    "the final parameters are not saved; fetch them before you stop the server, or free disk "
                    "space: the server tries again when it stops"
                )
        log.info("the job is finished at version %d", self.core.state.version)
        self._show()
        self.finished.set()

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

    def _show(self) -> None:
        parts = len(self.shard.reported.plan.parts) if self.shard.reported.manifest is not None else 0
        update_gauges(self.metrics, self.core, parts, self.now())
        update_durability(self.metrics, self.recorder)

    def start(self) -> None:
        """Start the shard, and begin to tick."""
        self.shard.start()
        self._ticker = asyncio.create_task(self._tick())
        self.tasks.watch(self._ticker)

    def tick(self) -> None:
        """Let control react to the passing of time, and drop the data of departed members."""
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
        """Complete the orders in progress, end all streams with a reason for people, and save the parameters.
        resumable: whether another server may continue the job, for which members then wait."""
        self.tasks.stopping = True
        if self._ticker is not None:
            self._ticker.cancel()
        if resumable:
            self.recorder.stop()
            why = refusals.stopping("", f"{reason}, and another server may continue the job")
            for stream in self.streams.values():
                stream.outbox.end(why, final=False)
        else:
            self.happen(e.Stopping(reason=reason, failed=self.tasks.failed.is_set()))
        await self.tasks.wait()
        finished = self.finished.is_set()
        if self.shard.reported.manifest is not None and (self.output.unsaved or not finished):
            epoch = self.core.state.last_evaluation if finished else None
            self.parameters_sha256 = await self.output.write(epoch)
        await asyncio.to_thread(self.shard.close)  # waits for a kernel that is being compiled
