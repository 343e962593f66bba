"""What the state machine's actions do: messages to workers, work for the shard.

All state is touched on one event loop; reducing, encoding and scanning run on other threads in nogil code
while the loop goes on answering heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .. import failpoints
from ..compressors import Payload, Plan
from ..planning.job import Choice
from ..proto import messages as m
from ..proto.manifest import Manifest
from ..proto.plans import plan_message
from ..proto.refusal import Reason, Refusal, Refused
from ..proto.wire import encode_server
from .best import BestFile
from .durable.image import image_of, restore, stored_of
from .durable.journal import JournalError
from .durable.recorder import Recorder
from .ending import written
from .job import events as e
from .job import refusals as job_refusals
from .job.core import Core
from .metrics import Metrics
from .model_state import Deposit, ModelState, Values, complete
from .pacing import Came, Pacing
from .planner import Planner
from .publishing import Publishing
from .replanning import Replanning, fixed
from .reporting import count_waiting, shortened, update_durability, update_gauges
from .shard.inbox import Arrivals
from .shard.shard import Image, Shard
from .shard.store import DivergedError
from .streams import WorkerStream
from .updates import Broadcast

log = logging.getLogger("gradwire.server")
R = TypeVar("R")

TICK_S = 0.25
FAREWELL_POLL_S = 0.02


class Conductor:
    """Feeds events to the core and performs its actions. Belongs to one event loop."""

    def __init__(
        self,
        core: Core,
        metrics: Metrics,
        *,
        shard: Shard,
        planner: Planner | None = None,
        output: Path | None = None,
        keep_best: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """
        Args:
            planner: says when the model is to be divided otherwise; None for never.
            output: where the final parameters go. Those of a job that ends before it is finished go to a file
                beside it, so that no finished model is lost to them, or mistaken for them.
            keep_best: keep another file beside it, of the best version that was evaluated.
            recorder: writes down what happens; None for a job that ends with its server.
        """
        self._recorder = recorder
        self._clock: Callable[[], float] = time.monotonic
        self._again: list[int] | None = None  # versions that came again, while a recovery goes on
        self.core = core
        self.metrics = metrics
        self.shard = shard
        self.streams: dict[str, WorkerStream] = {}
        self.state = ModelState()
        self.pacing = Pacing()
        self._publishing = Publishing(shard, self.streams, work=self._work)
        self.plans = Replanning(
            planner or fixed(),
            shard,
            metrics,
            adopt=self.replan,
            work=self._work,
            chosen=self._chosen,
        )
        self.finished = asyncio.Event()  # and saved, as far as that was possible
        self.unsaved = False  # the last parameters are not where they were to be written
        self._stopped = False
        self.failed = asyncio.Event()
        self.failure = ""  # why the job cannot go on
        self.diverged = False  # is why
        self.unwritten = False  # what it has to write down is why
        self.parameters_sha256 = ""  # of the final parameters, once they are saved
        self._paused = asyncio.Event()
        self._arrivals: dict[tuple[str, int], Arrivals] = {}
        self._output = output
        self._best: BestFile | None = None
        if keep_best and output is not None:
            best = output.with_name(f"{output.stem}.best{output.suffix}")
            self._best = BestFile(best, shard, self.state)
        self._working: set[asyncio.Future[None]] = set()
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def training_seconds(self) -> float:
        """From the opening of the first round to the last version."""
        if self._started_at is None:
            return 0.0
        over = self.core.phase in (m.Phase.FINISHING, m.Phase.FINISHED)
        end = self._ended_at if over and self._ended_at is not None else self.now()
        return end - self._started_at

    @property
    def all_arrivals(self) -> Mapping[tuple[str, int], Arrivals]:
        """By worker and incarnation."""
        return self._arrivals

    @property
    def times(self) -> tuple[float | None, float | None]:
        """When work was first given out, and when the last version was made."""
        return self._started_at, self._ended_at

    @times.setter
    def times(self, times: tuple[float | None, float | None]) -> None:
        self._started_at, self._ended_at = times

    @property
    def keeps(self) -> bool:
        """Whether the job outlives its server."""
        return self._recorder is not None

    def now(self) -> float:
        """Seconds of the job's clock, which stands still while there is no server."""
        return self._clock()

    def arrivals(self, worker: str, incarnation: int) -> Arrivals:
        """What has come of a member's pushes that are not decided on."""
        found = self._arrivals.get((worker, incarnation))
        if found is None:
            member = self.core.roster.get((worker, incarnation))  # which may be set aside, and come back
            found = Arrivals(worker, member.last_seq if member is not None else 0)
            self._arrivals[worker, incarnation] = found
        return found

    def _forget_arrivals(self) -> None:
        """Parts of open pushes of members who are gone; who is set aside may send them again."""
        roster = self.core.roster
        self.plans.planner.keep([member.id for member in roster.members.values()])
        self.state.keep(lambda name: roster.get(name) is not None)
        for name, arrivals in list(self._arrivals.items()):
            member = roster.members.get(name[0])
            if member is not None and member.incarnation == name[1]:
                continue
            for seq in arrivals.open:
                self.shard.drop(e.PushKey(*name, seq))
                arrivals.forget(seq)
            if roster.get(name) is None:
                del self._arrivals[name]

    def _chosen(self) -> tuple[Choice, int] | None:
        """How the job runs, as far as its first worker shows it, and with how many workers."""
        rules, members = self.core.rules, self.core.roster.by_rank()
        if not members:
            return None
        choice = Choice(
            compressor=members[0].compressor,
            mode=rules.mode,
            overlap=rules.overlap,
            fusion=rules.fusion,
            order=rules.order,
            part_bytes=rules.part_bytes,
        )
        return choice, len(members)

    def store(
        self, member: tuple[str, int], part: m.Part, checksum: int, payloads: Sequence[Payload]
    ) -> bool:
        """A part is here whole and valid. Returns False if it is not needed any more. Raises Refused."""
        if not self.arrivals(*member).store(part.seq, part.part, checksum):
            return False
        if self._recorder is not None and self._again is None:
            with self._promising():
                self._recorder.part(member, part, checksum, payloads)
                if self.shard.steps_parts:
                    self._recorder.sync()
        key = e.PushKey(*member, part.seq)
        self.shard.put(key, part.part, payloads, part.assignment, part.learning_rates)
        return True

    def close_push(
        self, member: tuple[str, int], seq: int, refusal: Refusal | None = None, *, again: bool = False
    ) -> None:
        """A push is abandoned or refused. again: only what is stored of it, and all of it may come again."""
        if self._recorder is not None and self._again is None:
            with self._promising():
                self._recorder.closed(member, seq, refusal, again=again)
        arrivals = self.arrivals(*member)
        if again:
            arrivals.forget(seq)
        else:
            arrivals.close(seq, refusal)
        self.shard.drop(e.PushKey(*member, seq))

    def put_buffers(self, key: e.PushKey, deposit: Deposit) -> None:
        """Buffers have come that belong to a push. Raises Refused."""
        if self._recorder is not None:
            with self._promising():
                member = key.worker, key.incarnation
                self._recorder.buffers(member, key.seq, deposit.collection, deposit.values)
        self.state.put(key, deposit)

    def put_evaluated(self, epoch: int, values: Values) -> None:
        """Buffers have come with which an epoch is evaluated. Raises Refused."""
        if self._recorder is not None:
            with self._promising():
                self._recorder.evaluated(epoch, values)
        self.state.evaluated(epoch, values)

    def push(self, event: e.Pushed) -> e.Result[e.Decided]:
        """Decide on a push that is committed and whole: as `decide`. Raises Refused."""
        payloads = self.shard.payloads(event.key)
        result = self.decide(event)
        outcome = result.reply.outcome
        accepted = outcome.decision is m.Decision.ACCEPTED
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

    def give_up(self, stream: WorkerStream, seq: int) -> None:
        """Keep nothing of a push that would be refused, and tell its worker to send no more of it."""
        stream.inbox.drop_push(seq)
        self.do_without(stream.id, seq)
        arrivals = self.arrivals(*stream.id)
        if seq not in stream.unwanted:
            stream.unwanted = (stream.unwanted & {*arrivals.open}) | {seq}
            stream.outbox.send(m.Unwanted(seq=seq))

    def do_without(self, member: tuple[str, int], seq: int) -> None:
        """The parts of a push are of no use."""
        if self._recorder is not None and self._again is None:
            with self._promising():
                self._recorder.unwanted(member, seq, self.arrivals(*member).assignment(seq))
        self.arrivals(*member).give_up(seq)
        self.shard.drop(e.PushKey(*member, seq))

    def give_up_late(self) -> None:
        """A round has closed, or there is a new plan: what still comes for it is too late."""
        for stream in self.streams.values():
            for seq, assignment in self.arrivals(*stream.id).coming.items():
                if self.core.unwanted(*stream.id, assignment):
                    self.give_up(stream, seq)

    def decide(self, event: e.Event[R]) -> e.Result[R]:
        """The reply to an event, and actions still to be performed. Raises Refused."""
        now, recorder = self.now(), self._recorder
        if recorder is None or self._again is not None:
            return self.core.step(event, now)
        leases = recorder.leases(self.core, event)
        result = self.core.step(event, now)
        with self._promising():
            recorder.event(event, now, result, leases)
        return result

    def _cannot_write(self, why: str) -> None:
        if not self.failed.is_set():
            self.failure, self.unwritten = why, True
            self.failed.set()

    @contextmanager
    def _promising(self) -> Generator[None]:
        """In it something is written down. If it cannot be, nothing follows from it: the server ends, and
        workers wait for the next, which goes on. Raises JournalError."""
        try:
            yield
        except JournalError as error:
            self._cannot_write(str(error))
            why = job_refusals.stopping("", "its journal cannot be written")
            for stream in self.streams.values():
                stream.outbox.end(why, final=False)
            raise

    def happen(self, event: e.Event[R]) -> R:
        """Decide and perform. Raises Refused."""
        result = self.decide(event)
        self.perform(result.actions)
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
                case e.Vacate():
                    self.shard.vacate(action.assignments)
                case e.Refill():
                    self._refill(action)
                case e.Without():
                    self.shard.without(action.assignments)
                case e.Apply():
                    self._begin_apply(action)
                case e.Drop():
                    self.shard.drop(action.key)
                case e.Closed():
                    self._ended_at = self.now()
                    seconds = self._ended_at - action.opened_at
                    self.metrics.round_closed(seconds, action.samples, action.loss, self.core.version)
                    self.metrics.redundancy.set(action.redundancy)
                case e.RequestCopy():
                    self._send(action.worker, m.SnapshotRequest(version=action.version, apply=action.apply))
                case e.TakeCopy():
                    self._work(self._take_copy(action.key))
                case e.Relabel():
                    self._publishing.replaced()
                    self._work(self.shard.relabel(action.version))
                case e.Disconnect():
                    stream = self.streams.get(action.worker)
                    if stream is not None and stream.incarnation == action.incarnation:
                        stream.outbox.end(action.refusal, final=action.final)
                case e.Report() | e.Lost() | e.Note() if self._again is not None:
                    pass  # it was said then
                case e.Report():
                    self._report(action)
                case e.Best():
                    if self._best is not None:
                        self._best.best(action.epoch, action.version)
                case e.Lost():
                    self.metrics.lost_members.inc()
                    about = {"worker": action.worker, "rank": action.rank}
                    log.warning("%s is lost: %s", action.name, action.reason, extra=about)
                case e.Note():
                    log.log(logging.WARNING if action.warning else logging.INFO, "%s", action.text)
                case e.Paused():
                    self._paused.set()
                case e.Finish():
                    self._work(self._finish())

    def _report(self, action: e.Report) -> None:
        """Say whom a round waits for, unless it waits as long as every healthy round does."""
        if self.core.phase is m.Phase.RUNNING and self.metrics.healthy(action.seconds):
            return
        log.warning("%s", shortened(action.text))
        waiting = m.Waiting(ranks=action.ranks, seconds=action.seconds, text=action.text)
        for worker in self.streams:
            self._send(worker, waiting)

    def _send(self, worker: str, message: m.ServerMessage) -> None:
        """To a worker that may have gone: its next stream learns all it needs from `Prepared`."""
        stream = self.streams.get(worker)
        if stream is not None:
            stream.outbox.send(message)

    def _assign(self, action: e.Assign) -> None:
        if self._started_at is None:
            self._started_at = self.now()
        if action.assignment.evaluate_epoch:
            self.state.pin(action.assignment.evaluate_epoch, action.assignment.version)
            if self._best is not None:
                self._best.evaluated(action.assignment.evaluate_epoch, action.assignment.version)
        stream = self.streams.get(action.worker)
        if stream is None:
            return
        checked, checksum = self.shard.checked
        assignment = replace(
            action.assignment,
            parts=self.shard.asked(action.assignment.id),
            checked=checked,
            checksum=checksum,
        )
        self._publishing.divide(stream)
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
        self.shard.prepare(plan)
        if self._recorder is not None:
            with self._promising():
                self._recorder.plan(encode_server(plan_message(plan)))
        self.happen(e.Planned())

    def _adopt(self, action: e.Adopt) -> None:
        members = [
            (stream, has)
            for worker, has in action.members.items()
            if (stream := self.streams.get(worker)) is not None
        ]
        self._publishing.conclude(action.version, members)
        self.metrics.plans.inc()
        for arrivals in self._arrivals.values():
            arrivals.forget_parts()
        self._work(self.shard.adopt(action.plan))
        self.give_up_late()
        for stream, _ in members:
            self._publishing.divide(stream)

    def _open_round(self, action: e.Open) -> None:
        """Parts of the update go out as soon as they are there."""
        listening: list[str] = []  # others may still have to be sent this version
        for worker, incarnation, _ in action.members.values():
            member = self.core.roster.present((worker, incarnation))
            if member is not None and member.listening:
                listening.append(worker)
        growing = self._publishing.open(action.version, listening)
        self.pacing.open((worker for worker, _, _ in action.members.values()), time.monotonic())
        version = action.version

        def begun(whole: bool) -> None:
            self.happen(e.Begun(version=version, whole=whole))

        self.shard.open_round(action, growing.add, begun)

    def _refill(self, action: e.Refill) -> None:
        self.shard.refill(action.lost, action.assignment, (action.worker, action.incarnation))
        missing, parts = len(self.shard.asked(action.assignment)), len(self.shard.plan.parts)
        if action.assignment != action.lost:
            log.info("%s pushes the %d of %d parts that are missing", action.worker, missing, parts)

    def _begin_apply(self, action: e.Apply) -> None:
        self.pacing.close()
        broadcast = self._publishing.close(action.version, action.members)
        self._work(self._apply(action, broadcast, self.shard.apply(action, broadcast.add)))
        if action.base_version is None:  # a round has closed
            self.give_up_late()

    async def _apply(self, action: e.Apply, broadcast: Broadcast, applying: Awaitable[int]) -> None:
        started = self.now()
        passed_over = await applying
        failpoints.reached("version.applied")
        broadcast.finish()
        self._ended_at = self.now()
        if passed_over:
            self.metrics.passed_over.inc()
            log.warning(
                "version %d: %d gradients are too few for the aggregation; the parameters stay as they are",
                action.version,
                passed_over,
            )
        self.metrics.gradient_norm.set(self.shard.gradient_norm)
        self.metrics.reduce_seconds.observe(self._ended_at - started)
        self._publishing.published(broadcast)
        samples = sum(each.samples for each in action.contributions)
        loss = sum(each.loss * each.samples for each in action.contributions if each.samples)
        mean_loss = loss / samples if samples else math.nan
        if action.clocks_stale is not None:
            self.metrics.clocks_stale(action.clocks_stale)
        self.metrics.round_closed(self._ended_at - action.opened_at, samples, mean_loss, action.version)
        if self._again is not None:  # it happens when it is the turn of its record
            self._again.append(action.version)
            return
        await self._published(action.version)

    async def _published(self, version: int) -> None:
        now, progress = self.now(), self.core.samples.progress
        if self._recorder is not None and self._recorder.due(version, now, progress):
            with self._promising():
                await self.checkpoint(announced=False)
        failpoints.reached("version.announced")
        self.happen(e.Published(version=version))
        self.plans.published(version)

    async def _finish(self) -> None:
        if self.shard.manifest is not None:
            self.parameters_sha256 = await self._conclude(finished=True)
        log.info("the job is finished at version %d", self.core.version)
        self._show()
        self.finished.set()

    async def _conclude(self, *, finished: bool) -> str:
        """Write the parameters, if somebody wants them. Returns their SHA-256."""
        shard, path = self.shard, self._output
        if self._best is not None:
            await self._best.close()
        if not finished:
            await shard.undo()
        digest = await shard.digest()
        if path is None:
            return digest
        if not finished and shard.version == 0:
            log.info("no parameters written: there is no version after the initial one")
            return digest
        if not finished:
            path = path.with_name(f"{path.stem}.unfinished-v{shard.version}{path.suffix}")
        try:
            buffers = await (self.state.of(self.core.last_evaluation) if finished else self.state.newest())
        except Exception as error:
            log.error("the parameters are saved without buffers: %s", error)
            buffers = {}
        values = {**self.state.frozen, **buffers}
        entries = self.state.entries
        self.unsaved = not await written(
            path,
            shard.version,
            lambda file: shard.save(
                file, digest, finished=finished, complete=lambda tensors: complete(tensors, entries, values)
            ),
        )
        if self.unsaved and finished and not self._stopped:
            log.error(
                "fetch them before stopping the server, or make room: it tries again when it is stopped"
            )
        return digest

    async def dispersed(self) -> None:
        """Return once the job is finished and saved, and no member has yet to hear of it."""
        await self.finished.wait()
        while self.core.roster.members or self.unsaved:
            await asyncio.sleep(TICK_S)

    async def _take_copy(self, key: e.CopyKey) -> None:
        await self.shard.load(key)
        assert self.shard.manifest is not None
        self.metrics.received_raw(self.shard.manifest.raw_bytes)
        self._publishing.replaced()
        self.happen(e.Copied(version=key.version))

    # ---- what outlives the server

    async def checkpoint(self, *, announced: bool = True) -> Awaitable[None]:
        """Write down all that there is, here and at the workers. What control hears of from now on is in the
        next segment. announced: whether it has heard of the newest version. Returns the writing. Raises
        JournalError."""
        assert self._recorder is not None
        image = await self.shard.image()
        await self.state.settled()
        assert self.shard.manifest is not None
        tree = image_of(self, self.shard.manifest, self.shard.plan, image, self.state)
        tree["announced"] = announced
        progress, version = self.core.samples.progress, self.shard.version
        writing = self._recorder.checkpoint(version, tree, stored_of(self), self.now(), progress)
        for worker in self.streams:
            self._send(worker, m.Save(version=version))
        return writing

    def saved(self, stream: WorkerStream, message: m.Saved) -> None:
        """A worker has written down its state, or could not."""
        if message.error:
            text = "worker %r could not write down its state at version %d, and will go on without: %s"
            log.error(text, stream.worker, message.version, shortened(message.error))
        stream.saved = message.version

    async def pause(self, grace_s: float) -> None:
        """Let what has begun come to its end, then write all down, here and at the workers. What takes longer
        than `grace_s` is as if the server had been killed: the journal has it."""
        assert self._recorder is not None
        self.happen(e.Closing())
        try:
            async with asyncio.timeout(grace_s):
                await self._paused.wait()
                if self.shard.manifest is None or self.finished.is_set():
                    return
                with self._promising():
                    await (await self.checkpoint())
                listening = [member.worker for member in self.core.roster.listening()]
                streams = [self.streams[worker] for worker in listening if worker in self.streams]
                while any(stream.saved < self.shard.version for stream in streams):
                    await asyncio.sleep(FAREWELL_POLL_S)
        except TimeoutError:
            log.warning("the job is not at rest after %g s, and stops where it is", grace_s)
        else:
            log.info("paused at version %d; gc-server with the same --state goes on", self.core.version)

    async def first_checkpoint(self, manifest: Manifest, image: Image, plan: Plan, state: Values) -> None:
        """Before control hears of the parameters. Raises Refused where it cannot be written."""
        assert self._recorder is not None
        first = ModelState()
        first.open(manifest.entries, state)
        try:
            await self._recorder.first(image_of(self, manifest, plan, image, first), self.now())
        except OSError as error:
            self._cannot_write(f"the first checkpoint cannot be written: {error}")
            raise Refused(job_refusals.stopping("", self.failure)) from None

    async def take_over(self, tree: Mapping[str, Any]) -> None:
        """Be as the conductor was that has written this down. From then on things happen by `again`."""
        self._again = []
        self._clock = lambda: tree["now"]
        await restore(self, tree)
        if not tree["announced"]:
            self._again.append(self.shard.version)

    async def again(self, event: e.Event[Any], now: float, heard: Mapping[str, float]) -> None:
        """Have happen what has happened. heard: when members were."""
        assert self._again is not None
        self._clock = lambda: now
        self.core.roster.hear(heard)
        match event:
            case e.Published():
                while event.version not in self._again:
                    if self.failed.is_set() or not self._working:
                        why = self.failure or "nothing leads to it"
                        raise ValueError(f"version {event.version} does not come: {why}")
                    await asyncio.wait(set(self._working), return_when=asyncio.FIRST_COMPLETED)
                self._again.remove(event.version)
                self.happen(event)
            case e.Pushed():
                result = self.push(event)
                self.arrivals(event.worker, event.incarnation).close(event.seq)
                self.perform(result.actions)
            case e.Tick():
                self.happen(event)
                self._forget_arrivals()
            case _:
                self.happen(event)

    async def caught_up(self) -> None:
        """The recovery is over: what follows happens now."""
        assert self._recorder is not None
        while self._working:
            await asyncio.wait(set(self._working))
        published, self._again = self._again, None
        last, began = self.now(), time.monotonic()
        self._clock = lambda: last + time.monotonic() - began
        self._recorder.go_on(self.core.version, last, self.core.samples.progress)
        self.happen(e.Restarted())
        for version in published or ():
            await self._published(version)

    # ---- tasks

    def _work(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Future[None]) -> None:
        """A round that cannot be applied would never close, and without ticks no lease would end: give up."""
        self._working.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self.failed.is_set():
            return
        self.diverged = isinstance(error, DivergedError)
        if self.diverged:
            self.failure = f"{error}; lower --learning-rate, or check the data"
        else:
            self.failure = f"the job cannot go on: {error!r}"
            log.error("%s", self.failure, exc_info=error)
        self.failed.set()

    def _show(self) -> None:
        parts = len(self.shard.plan.parts) if self.shard.manifest is not None else 0
        update_gauges(self.metrics, self.core, parts, self.now())
        if self._recorder is not None:
            update_durability(self.metrics, self._recorder)

    def start(self) -> None:
        """Let time pass from now on."""
        self.shard.start()
        self._ticker = asyncio.create_task(self._tick())
        self._ticker.add_done_callback(self._worked)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.happen(e.Tick())
            self._forget_arrivals()
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
            why = job_refusals.stopping("", f"{reason}, and may come back")
            for stream in self.streams.values():
                stream.outbox.end(why, final=False)
        else:
            self.happen(e.Stopping(reason=reason, failed=self.failed.is_set()))
        while self._working:
            await asyncio.wait(set(self._working))
        finished = self.finished.is_set()
        if self.shard.manifest is not None and (self.unsaved or not finished):
            await self._conclude(finished=finished)
        await asyncio.to_thread(self.shard.close)  # it may wait for a kernel that is being compiled
