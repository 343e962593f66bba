"""The server's decisions: a state machine without I/O.

Everything that changes the course of a job passes through `Core.step(event, now)`. It refuses the event, or
changes the state and returns a reply and actions. The shell performs the actions and reports back with
further events. The same events give the same actions, so a script can test every promise below, and any run
can be replayed. The method `save` returns the whole state as plain values; a core that has loaded them
continues identically.

A job (`Phase`):

    EMPTY     | no parameters yet; one member is asked to upload them | -> GATHERING (`Initialized`)
    GATHERING | waits for enough ready members                        | -> RUNNING
    RUNNING   | the mode assigns samples and makes versions           | -> GATHERING (members lost), FINISHING
    FINISHING | a member evaluates the last version                   | -> FINISHED
    FINISHED  | members are told to leave                             |
    STOPPING  | the server shuts down; entered from any phase but     |
              | FINISHED (`Stopping`)                                 |

This file has the rules that all modes share: membership, outcomes of pushes, evaluations, the end. The mode
decides which samples each member gets and when pushes become a version (`modes.mode`).

Invariants:

- A push has one outcome.
- No push is accepted that its assignment does not allow (version, samples, plan).
- No new plan comes into force while an accepted push of the old plan is still to be applied.
- No member is told to leave before the last version is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...common.spec import parse_spec
from ...proto.messages import (
    Assignment,
    Decision,
    EpochStatus,
    Evaluations,
    LostStatus,
    Outcome,
    Phase,
    Welcome,
)
from ...proto.refusal import Refusal, Refused
from ...settings import ServerSettings, parse_evaluate_every
from ...storage import values
from . import events as e
from . import limits, progress, refusals
from .best_policy import parse_keep
from .modes import registry
from .modes.mode import Mode
from .modes.options import ModeOptions
from .roster import BROKEN, OPENED, AssignedWork, Life, Member, Roster, WorkLife
from .same_batches import SameBatches
from .samples import Samples
from .schedule import parse_schedule
from .state import LOST_REMEMBERED, JobState
from .waiting import Awaited, describe_reunion, describe_waiting

R = TypeVar("R")

ASSIGNMENTS_SKIPPED = 1 << 32  # Number of assignment ids that a restarted server leaves out.
RETURN_S = 60.0  # Time that members have to return to a restarted server, in addition to their leases.
EMPTY_PUSHES = 10  # Pushes without samples, in a row, after which a member is named.
REPORT_AFTER_S = 1.0  # A round that waits longer is reported, with the members it waits for.
REPORT_EVERY_S = 10.0  # Interval at which the same report is repeated.


class Core(JobState):
    """The state of one job, and `step`, the one function that changes it. The conductor creates and drives
    it."""

    def __init__(self, rules: ServerSettings, options: ModeOptions) -> None:
        super().__init__(
            rules=rules,
            schedule=parse_schedule(rules.schedule),
            evaluate_every=parse_evaluate_every(rules.evaluate_every),
            roster=Roster(lease_s=rules.lease_seconds),
        )
        self.mode: Mode = registry.create(options, self)
        self._same_batches = SameBatches()
        self._handlers: dict[type[Any], Callable[[Any, float], e.Result[Any] | list[e.Action]]] = {
            e.Joined: self._joined,
            e.Attached: self._attached,
            e.RatesReceived: self._rates_received,
            e.Pushed: self._pushed,
            e.MoreWanted: self._more_wanted,
            e.PacketStarted: self._packet_started,
            e.Initialized: self._initialized,
            e.Prepared: self._prepared,
            e.Detached: self._detached,
            e.KeepAlive: self._keep_alive,
            e.PacketRelayed: self._exchange_event,
            e.PacketDamaged: self._exchange_event,
            e.SnapshotReceived: self._exchange_event,
            e.SnapshotInstalled: self._order_done,
            e.Published: self._order_done,
            e.ApplyStarted: self._apply_started,
            e.PlanPrepared: self._plan_prepared,
            e.EvaluationReported: self._evaluation_reported,
            e.StopRequested: self._stop_requested,
            e.Left: self._left,
            e.Tick: self._tick,
            e.Restarted: self._restarted,
            e.PauseRequested: self._pause_requested,
            e.Stopping: self._stopping,
        }

    def step(self, event: e.Event[R], now: float) -> e.Result[R]:
        """Process one event: refuse it, or change the state of the job.

        Args:
            event: the event, of a type in `events`.
            now: time in seconds of the job's clock, never less than in an earlier call.

        Returns:
            The reply to the event's sender, and the actions for the shell to perform in order.

        Raises:
            Refused: the event is not allowed. Nothing has changed but the lease of the member that sent it.
        """
        done = self._handlers[type(event)](event, now)
        nothing: Any = None
        return done if isinstance(done, e.Result) else e.Result(reply=nothing, actions=done)

    def save(self) -> values.Plain:
        """Return the whole state as plain values, which share nothing with it."""
        return {"job": values.pack_fields(self), "mode": values.pack_fields(self.mode)}

    def load(self, plain: values.Plain) -> None:
        """Replace the state by the one that `save` returned in a core with the same rules."""
        values.restore(self, plain["job"])
        values.restore(self.mode, plain["mode"])
        self.mode.restored()

    @property
    def newest(self) -> int:
        """Latest version of which a worker can have parts: `version`, or the next one while it is being
        made."""
        return self.version if self.mode.quiet else self.version + 1

    # ---- membership

    def _joined(self, event: e.Joined, now: float) -> e.Result[e.Admission]:
        self._raise_if_over(event.worker)
        member, replaced = self.roster.join(event.worker, event.incarnation, event.compressor, now)
        actions: list[e.Action] = [
            e.Note(text=f"{member.name} joined with {member.compressor or 'no compressor'}")
        ]
        if replaced is not None:
            why = refusals.fenced(event.worker, replaced.incarnation, event.incarnation)
            gone = e.Disconnect(*replaced.id, refusal=why, final=True)
            actions += [gone, *self._lose(replaced, "replaced by a new incarnation", now)]
        if self.phase is Phase.EMPTY and self.initializer is None:
            self.initializer = member.id
        admission = e.Admission(
            rank=member.rank,
            version=self.version,
            initialize=self.phase is Phase.EMPTY and self.initializer == member.id,
            epoch=self.epoch,
            workers=max(self.rules.min_workers if self.started_at is None else 1, len(self.roster.members)),
        )
        return e.Result(reply=admission, actions=actions)

    def _attached(self, event: e.Attached, now: float) -> e.Result[Welcome]:
        self._raise_if_over(event.worker)
        member = self.roster.find(event.worker, event.incarnation, now, revive=True)
        self.roster.become(member, OPENED[member.life])
        welcome = Welcome(
            rank=member.rank,
            version=self.version,
            last_seq=member.last_seq,
            plan=self.plan,
            newest=self.newest,
            evaluations=self._told(self.evaluations.done) if self.rules.script else None,
        )
        return e.Result(reply=welcome, actions=[])

    def _prepared(self, event: e.Prepared, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if self.fingerprint:
            self._check_model(
                event.worker, event.fingerprint, event.data, event.train_samples, event.difference
            )
        self.accumulation.declare(event.worker, event.accumulate)
        self.roster.become(member, Life.LISTENING)
        member.fingerprint, member.data = event.fingerprint, event.data
        member.train_samples = event.train_samples
        # The worker may have a version that was lost together with an earlier server.
        lost = event.version is not None and event.version > self.newest
        member.version = None if lost else event.version
        self.evaluations.forget(member.id, event.assigned, member.version)
        notes: list[e.Action] = []
        if member.suspended:
            notes.append(e.Note(text=f"{member.name} makes progress again and takes part"))
            member.suspended, member.named_s = False, 0.0
        if event.drifted:
            text = (
                f"version {event.drifted}: the replica of {member.name} differed from the server's; "
                "a snapshot replaces it"
            )
            notes.append(e.Note(text=text, warning=True))
        if self.phase is Phase.EMPTY and self.initializer in (None, member.id):
            return self._request_initialize(member)
        if self.phase in (Phase.GATHERING, Phase.RUNNING):
            if member.version is None and self.started_at is not None and not event.restored:
                self.buffers.joined(member)
            self._reinstate(member, event.assigned)
            return [*notes, *self.mode.resume(member, event.assigned, now), *self._advance(now)]
        return [*notes, *self._finish(now), *self._release([member])]

    def _detached(self, event: e.Detached, now: float) -> list[e.Action]:
        member = self.roster.members.get(event.worker)
        if member is not None and member.incarnation == event.incarnation:
            self.roster.become(member, BROKEN[member.life])
        return []

    def _keep_alive(self, event: e.KeepAlive, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if event.activity is None:
            return []
        return progress.note_activity(self, member, event.activity, event.stalled_s)

    def _stop_requested(self, event: e.StopRequested, now: float) -> list[e.Action]:
        """End the job like a limit does: without more work, with an evaluation of the last version."""
        member = self.roster.find(event.worker, event.incarnation, now)
        if self.phase not in (Phase.GATHERING, Phase.RUNNING) or self.stopped:
            return []  # repeated after a reconnect, or too late
        self.stopped = f"{event.reason} (asked for by {member.name})"
        return self._advance(now)

    def _left(self, event: e.Left, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        actions = self._lose(member, event.reason, now, expected=not event.failed)
        if event.failed:
            return actions
        nothing = [_empty_handed(member)] if member.empty == member.pushes > 0 else []
        return [e.Note(text=f"{member.name} left: {event.reason}"), *nothing, *actions]

    def _lose(self, member: Member, reason: str, now: float, *, expected: bool = False) -> list[e.Action]:
        """Remove one member for good, and continue without it."""
        return [*self._remove(member, reason, expected=expected, away=False), *self._advance(now)]

    def _remove(self, member: Member, reason: str, *, expected: bool, away: bool) -> list[e.Action]:
        """Remove a member from everything that waits for it. After the last removal of an event, call
        `_advance`.

        Args:
            reason: cause of the loss, for the log and the status.
            expected: True if the member is not to be reported as lost.
            away: True if the same incarnation may return.
        """
        actions: list[e.Action] = []
        if self.roster.members.get(member.worker) is member:
            self.roster.remove(member)
        if not expected:
            lost = LostStatus(worker=member.worker, rank=member.rank, reason=reason, version=self.version)
            self.lost = [*self.lost, lost][-LOST_REMEMBERED:]
            actions.append(
                e.LossReported(name=member.name, worker=member.worker, rank=member.rank, reason=reason)
            )
        if self.phase is Phase.EMPTY and self.initializer == member.id:
            self.initializer = None
            # If no member is listening, the next one to become ready is asked (`_prepared`).
            for candidate in self.roster.listening()[:1]:
                actions += self._request_initialize(candidate)
        self.evaluations.forget(member.id)
        self.mode.lost(member, away=away)
        return actions

    # ---- parameters

    def _initialized(self, event: e.Initialized, now: float) -> list[e.Action]:
        if self.phase is not Phase.EMPTY:
            raise Refused(refusals.already_initialized(event.worker))
        self.roster.find(event.worker, event.incarnation, now)
        self.phase = Phase.GATHERING
        self.fingerprint, self.data = event.fingerprint, event.data
        self.samples = Samples.beginning(
            event.train_samples, limits.epochs(self.rules), event.least, event.epoch
        )
        self.earlier_steps = event.steps
        self.evaluations.begun = self.evaluations_passed  # the script has made the earlier evaluations
        how = self.rules.buffers
        self.buffers.wanted = event.buffers and how != "local"
        self.buffers.first_alone = how == "rank0"
        self.mode.restored()
        self.wait_from(now)
        actions: list[e.Action] = []
        for member in self.roster.ready():  # they became ready before there was a model to compare with
            try:
                self._check_model(
                    *(member.worker, member.fingerprint, member.data, member.train_samples),
                    event.differences.get(member.worker, ("", "")),
                )
            except Refused as refused:
                actions.append(e.Disconnect(*member.id, refusal=refused.refusal, final=True))
                actions += self._lose(member, refusals.brief(refused.refusal), now)
        return actions + self._advance(now)

    def _request_initialize(self, member: Member) -> list[e.Action]:
        self.initializer = member.id
        return [e.RequestInitialize(worker=member.worker)]

    def check_initialize(self, worker: str, incarnation: int) -> Refusal | None:
        """Return the refusal if this worker may not upload the initial parameters now; None if it may.

        Args:
            worker: id of the worker.
            incarnation: incarnation of the worker.
        """
        if self.phase is not Phase.EMPTY:
            return refusals.already_initialized(worker)
        if self.initializer != (worker, incarnation):
            return refusals.not_the_initializer(worker, self.initializer[0] if self.initializer else None)
        return None

    def _check_model(
        self, worker: str, fingerprint: bytes, data: int, train_samples: int, difference: tuple[str, str]
    ) -> None:
        if fingerprint != self.fingerprint:
            raise Refused(refusals.wrong_model(worker, fingerprint, self.fingerprint, difference))
        if train_samples and train_samples != self.samples.per_epoch:
            size = self.rules.batch_size
            raise Refused(refusals.wrong_epoch(worker, train_samples, self.samples.per_epoch, size))
        if data and self.data and data != self.data:
            raise Refused(refusals.wrong_data(worker, data, self.data))

    def _plan_prepared(self, event: e.PlanPrepared, now: float) -> list[e.Action]:
        if not self.mode.pushes_parts:
            return [e.Note(text="ignored a new plan: workers do not push parts in this mode", warning=True)]
        self.planned = True
        return self._advance(now)

    def _adopt_plan(self) -> list[e.Action]:
        """Put the prepared plan in force, unless accepted pushes of the old plan are still to be applied."""
        if not self.plan_due or not self.mode.quiet:
            return []
        self.plan, self.planned = self.plan + 1, False
        self.mode.plan_adopted()
        members: dict[str, int] = {}
        for member in self.roster.listening():
            if member.version is not None:
                members[member.worker], member.version = member.version, self.version
        return [
            e.Note(text=f"plan {self.plan} is in force from version {self.version}"),
            e.Adopt(plan=self.plan, version=self.version, members=members),
        ]

    # ---- training

    def _advance(self, now: float) -> list[e.Action]:
        """Take all steps that are possible now: assign work, apply complete rounds, change the phase."""
        return [*self._train(now), *self._paused()]

    def _train(self, now: float) -> list[e.Action]:
        if self.phase not in (Phase.GATHERING, Phase.RUNNING):
            return self._finish(now) if self.phase is Phase.FINISHING else []
        started = self.started_at is not None
        self.check_limits(now)
        # 1. Training is complete: evaluate the last version.
        if started and self.mode.quiet and self.done:
            self.phase = Phase.FINISHING
            self.last_evaluation = max(self.evaluations_passed, self.evaluations.latest + 1)
            self.wait_from(now)
            why: list[e.Action] = [e.Note(text=f"the job ends: {self.stopped}")] if self.stopped else []
            members = self.roster.by_rank()
            why += [_empty_handed(each) for each in members if each.empty == each.pushes > 0]
            return [*why, *self._finish(now), *self._release(self.roster.listening())]
        # 2. Too few members are ready: wait for more.
        needed = 1 if started else self.rules.min_workers
        if self.mode.quiet and self.roster.ready_members < needed:
            if self.phase is Phase.RUNNING:
                self.phase = Phase.GATHERING
                self.wait_from(now)
            return []
        # 3. Train.
        if self.phase is Phase.GATHERING:
            self.phase = Phase.RUNNING
            self.wait_from(now)
        if self.started_at is None:
            self.started_at = now
        self.reunion = self.apart
        actions = [*self._adopt_plan(), *self.mode.advance(now)]
        if self.mode.quiet and self.done:  # the last round was dissolved
            return [*actions, *self._train(now)]
        if self.mode.quiet and not self.roster.ready_members:
            self.phase = Phase.GATHERING
            self.wait_from(now)
        return actions

    def _pushed(self, event: e.Pushed, now: float) -> e.Result[e.Decided]:
        if self.phase is Phase.STOPPING:
            raise Refused(refusals.stopping(event.worker, "it accepts no more pushes"))
        member = self.roster.find(event.worker, event.incarnation, now)
        # 1. A duplicate of a decided push: repeat its outcome.
        known = member.outcomes.get(event.seq)
        if known is not None:
            waits = known.decision is Decision.ACCEPTED and self.mode.holds(event.key)
            drop: list[e.Action] = [] if waits else [e.Drop(key=event.key)]
            return e.Result(reply=e.Decided(outcome=known, repeated=True), actions=drop)
        # 2. An older push, whose outcome is forgotten. A gap is allowed: abandoned pushes leave gaps.
        if event.seq <= member.last_seq:
            raise Refused(refusals.sequence(member.worker, event.seq, member.last_seq + 1))
        version, redundant = None, False
        work = member.work
        if work is None or work.assignment.id != event.assignment:
            # 3. A push for work that the member no longer has. Shared work is revoked only when another
            # member does it, so the push is redundant then, and stale otherwise.
            elsewhere = self.mode.shares_samples or event.assignment in member.succeeded
            revoked = member.revoked
            if revoked is not None and revoked.id == event.assignment:
                elsewhere = False
                if event.samples:
                    self._reclaim(member, revoked, event.batches or len(revoked.batches))
            redundant = elsewhere
        else:
            # 4. A push for the member's work: the mode decides.
            if event.batches > len(work.batches):  # extended by an earlier server, whose machine lost power
                self.repeated_samples += max(0, event.samples - work.samples)
                event = replace(event, samples=min(event.samples, work.samples), batches=0)
            if event.samples > work.samples:
                raise Refused(refusals.samples(member.worker, event.seq, event.samples, work.samples))
            if event.base_version != work.assignment.version:
                got, expected = event.base_version, work.assignment.version
                raise Refused(refusals.base_version(member.worker, event.seq, got, expected))
            if event.plan != self.plan and event.samples and not work.late and self.mode.pushes_parts:
                raise Refused(refusals.plan(member.worker, event.seq, event.plan, self.plan))
            if event.samples and not work.late:
                self.mode.check_rates(event)
                self.mode.check_batches(work, event)
            self.roster.relieve(member)
            version = self.mode.take(member, work, event, now)
            redundant = version is None and work.assignment.stragglers > 0
        actions: list[e.Action] = []
        if version is None:
            self.stale_pushes += 1
            actions = [e.Drop(key=event.key)]
            refuse = refusals.redundant if redundant else refusals.stale
            why = refuse(member.worker, event.seq, event.assignment, self.version)
            outcome = Outcome(seq=event.seq, decision=Decision.REFUSED, refusal=why)
        else:
            self.accepted_pushes += 1
            member.pushes += 1
            actions = self._note_push(member, event)
            outcome = Outcome(seq=event.seq, decision=Decision.ACCEPTED, version=version)
            actions += self._compare_batches(member, event)
        member.remember(outcome)
        return e.Result(reply=e.Decided(outcome=outcome), actions=actions + self._advance(now))

    def _note_push(self, member: Member, event: e.Pushed) -> list[e.Action]:
        """Return the lines of the log about an accepted push that says too little."""
        if event.samples:
            member.empty = 0
            if event.loss is not None or self.unlogged or not self.rules.script:
                return []
            self.unlogged = True
            text = (
                f"{member.name} does not know its training loss, so none is shown: its script can call "
                "job.log(loss=loss) before optimizer.step()"
            )
            return [e.Note(text=text)]
        member.empty += 1
        spec = parse_spec("compressor", member.compressor or self.rules.compressor)
        delay = spec.options.get("delay", "1")  # a push is empty as long as a compressor holds gradients back
        limit = EMPTY_PUSHES * (int(delay) if delay.isdecimal() else 1)
        return [_empty_handed(member)] if member.empty == limit else []

    def _rates_received(self, event: e.RatesReceived, now: float) -> list[e.Action]:
        work = self._work_of(event.worker, event.incarnation)
        if work is not None and work.id == event.assignment and not work.late:
            self.mode.check_rates(event)
        return []

    def _work_of(self, worker: str, incarnation: int) -> AssignedWork | None:
        member = self.roster.present((worker, incarnation))
        return None if member is None else member.work

    def collects(self, worker: str, incarnation: int, collection: int) -> bool:
        """Return True if this worker's present assignment asks for buffers for this collection.

        Args:
            worker: id of the worker.
            incarnation: incarnation of the worker.
            collection: number of the collection of buffers.
        """
        work = self._work_of(worker, incarnation)
        return work is not None and work.assignment.collection == collection > 0

    def evaluates(self, worker: str, incarnation: int, epoch: int) -> bool:
        """Return True if this worker was asked for evaluation `epoch` and has not reported it.

        Args:
            worker: id of the worker.
            incarnation: incarnation of the worker.
            epoch: number of the evaluation.
        """
        asked = self.evaluations.asked
        return asked is not None and (asked.by, asked.epoch) == ((worker, incarnation), epoch)

    def unwanted(self, worker: str, incarnation: int, assignment: int) -> bool:
        """Return True if a push for this assignment would be refused as stale or redundant if it were
        committed now.

        Args:
            worker: id of the worker that pushes.
            incarnation: incarnation of the worker.
            assignment: id of the assignment that the push answers.

        Returns:
            False for a worker that is not a member: it may return and get its work back.
        """
        if self.roster.present((worker, incarnation)) is None:
            return False
        work = self._work_of(worker, incarnation)
        return work is None or work.id != assignment or work.late

    def _reinstate(self, member: Member, assigned: int) -> None:
        """Give a returning member its revoked work back, unless another member has drawn its samples.

        Args:
            assigned: id of the last assignment that the member received.
        """
        revoked = member.revoked
        if revoked is None or member.work is not None or revoked.assignment.id != assigned:
            return
        late = self.mode.too_late(revoked)
        if not self.samples.take_back(revoked.drawn, settled=late):
            return
        if self.done:  # no further push would carry the gradient, which would stay in the member's residual
            self.samples.give_back(revoked.drawn, settled=True)
            return
        revoked.become(WorkLife.LATE if late else WorkLife.ASSIGNED)
        revoked.interrupted, member.revoked = True, None
        self.roster.assign(member, revoked)

    def _compare_batches(self, member: Member, event: e.Pushed) -> list[e.Action]:
        """Return a warning if another member trains on the same batches."""
        if not event.batch:
            return []
        other = self._same_batches.other(member.worker, event.batch, self.roster.members)
        if not other:
            return []
        text = (
            f"{member.name} and {self.roster.members[other].name} train on the same batches, so the job "
            "learns from the samples of one: give each rank samples of its own, by job.batches(dataset), by "
            "a DistributedSampler with rank=job.rank, or by a seed that depends on job.rank"
        )
        return [e.Note(text=text, warning=True)]

    def _more_wanted(self, event: e.MoreWanted, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        work = member.work
        if work is not None and work.id == event.assignment:
            return [*self.mode.more(member, work, event), *self._advance(now)]
        # It no longer has this work. The gradients of its batches go into its next step.
        revoked = member.revoked
        if revoked is not None and revoked.id == event.assignment:
            self._reclaim(member, revoked, event.batches)
        return self._advance(now)

    def _reclaim(self, member: Member, revoked: AssignedWork, batches: int) -> None:
        """Settle the samples of revoked work whose gradient its worker has, unless they were drawn again.

        The worker keeps the gradient, in its residual or for its script's next step. A later push sends it.

        Args:
            member: member that has computed the work.
            revoked: the work.
            batches: number of its batches that the member has computed.
        """
        member.revoked = None
        if self.samples.take_back(revoked.drawn):
            self.requeue_rest(revoked.drawn, revoked.batches, batches, settled=True)
        else:
            self.repeated_samples += sum(revoked.batches[:batches])

    def _packet_started(self, event: e.PacketStarted, now: float) -> e.Result[e.Targets]:
        member = self.roster.find(event.worker, event.incarnation, now)
        return e.Result(reply=self.mode.targets(member, event), actions=[])

    def _exchange_event(self, event: e.OfExchange, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        actions = self.mode.exchange_event(member, event)
        if any(isinstance(action, e.Disconnect) and action.final for action in actions):
            return [*actions, *self._lose(member, "repeatedly sent damaged packets", now)]
        return [*actions, *self._advance(now)]

    def _apply_started(self, event: e.ApplyStarted, now: float) -> list[e.Action]:
        self.mode.apply_started(event.version, whole=event.whole)
        return []

    def _order_done(self, event: e.Published | e.SnapshotInstalled, now: float) -> list[e.Action]:
        """Tell the mode that the shard has carried out its order, and continue."""
        self.mode.done(event)
        return self.mode.drain(now) if self.phase is Phase.STOPPING else self._advance(now)

    # ---- evaluations and the end

    def _finish(self, now: float) -> list[e.Action]:
        """Ask a member to evaluate the last version, then tell all members to leave.

        Called again whenever a member returns or is lost; telling a member twice is harmless. Members stay
        until the evaluation has arrived, so that another one can evaluate if the first is lost.
        """
        if self.phase is Phase.FINISHED:
            return [self._last_assignment(member, finished=True) for member in self.roster.listening()]
        if self.phase is not Phase.FINISHING:
            return []
        if all(member.suspended for member in self.roster.members.values()):
            self.phase = Phase.FINISHED
            # Scripts that leave without an evaluation do not want one.
            lost = any(each.version == self.version for each in self.lost)
            text = "no member is left to evaluate the last version"
            return [e.Note(text=text, warning=lost), e.Finish()]
        # A member that still computes a late push would keep all others waiting.
        idle_first = sorted(self.roster.listening(), key=lambda member: member.work is not None)
        return [
            self._last_assignment(member, evaluate=self.last_evaluation)
            for member in idle_first
            if self.ask_for_evaluation(member, self.last_evaluation, self.assignments + 1, now)
        ]

    def _release(self, members: Sequence[Member]) -> list[e.Action]:
        """Tell scripts that training is over, except the one that evaluates: their loops over batches end,
        and do not wait for the evaluation, which may wait for another job of the same scripts."""
        if self.phase is not Phase.FINISHING or not self.rules.script:
            return []
        asked = self.evaluations.asked
        return [
            self._last_assignment(member)
            for member in members
            if member.listening and (asked is None or member.id != asked.by)
        ]

    def _last_assignment(self, member: Member, *, evaluate: int = 0, finished: bool = False) -> e.Assign:
        assignment = Assignment(
            id=0,
            version=self.version,
            epoch=self.epoch,
            progress=self.samples.progress,
            evaluate_epoch=evaluate,
            finished=finished,
            apply=self.applied,
            trained=True,
            evaluations=self.evaluations.newest,
        )
        return self.assign(member, assignment)

    def _evaluation_reported(self, event: e.EvaluationReported, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if self.evaluations.has(event.epoch):
            return []  # repeated after a reconnect
        started_at, keep = self.started_at or 0.0, parse_keep(self.rules.keep)
        if not self.evaluations.report(
            member.id, event.epoch, event.version, event.metrics, started_at, keep
        ):
            text = f"evaluation {event.epoch} by {member.name} was not asked for and is ignored"
            return [e.Note(text=text, warning=True)]
        found = ", ".join(f"{name} {value:.4f}" for name, value in sorted(event.metrics.items()))
        text = found or "no metric was logged"
        label = f"evaluation {event.epoch}"
        if (
            self.rules.evaluate_every == "1epoch" and not self.stopped
        ):  # the number is that of complete epochs
            label = f"after {event.epoch} epoch{'s' if event.epoch != 1 else ''}"
        label += f", version {event.version}"
        noted = [e.Note(text=f"{label}: {text} (by {member.name})"), *self._keep_best(event)]
        if self.rules.script:
            results = [each for each in self.evaluations.done if each.epoch == event.epoch]
            noted.append(e.TellEvaluations(evaluations=self._told(results)))
        if self.phase is Phase.FINISHING and event.epoch == self.last_evaluation:
            self.phase = Phase.FINISHED
            return [*noted, e.Finish(), *self._finish(now)]
        return [*noted, *self._advance(now)]

    def _told(self, results: Sequence[EpochStatus]) -> Evaluations:
        """Return the message to scripts with these results."""
        return Evaluations(results=tuple(results), best=dict(self.evaluations.best))

    def _keep_best(self, event: e.EvaluationReported) -> list[e.Action]:
        keep = parse_keep(self.rules.keep)
        if keep is None:
            return []
        value = event.metrics.get(keep.metric)
        if value is None:
            names = ", ".join(sorted(event.metrics)) or "none"
            text = (
                f"--keep {self.rules.keep}: no metric {keep.metric!r} in the evaluation, which has: {names}"
            )
            return [e.Note(text=text, warning=True)]
        if not keep.better(value, self.best):
            return []
        self.best = value
        return [e.Best(epoch=event.epoch, version=event.version)]

    def _stopping(self, event: e.Stopping, now: float) -> list[e.Action]:
        drained: list[e.Action] = []
        if self.phase is not Phase.FINISHED:
            self.phase = Phase.STOPPING
            drained = [] if event.failed else self.mode.drain(now)
        why = refusals.stopping("", event.reason)
        ends = [e.Disconnect(*member.id, refusal=why, final=True) for member in self.roster.attached()]
        return [*ends, *drained]

    def _raise_if_over(self, worker: str) -> None:
        if self.phase is Phase.STOPPING:
            raise Refused(refusals.stopping(worker, "it accepts no new members"))
        if self.phase is Phase.FINISHED or (self.phase is Phase.FINISHING and not self.roster.knows(worker)):
            raise Refused(self._finished(worker))

    def _finished(self, worker: str) -> Refusal:
        return refusals.finished(worker, self.stopped or f"all of its {self.rules.epochs} epochs are done")

    # ---- time

    def _tick(self, event: e.Tick, now: float) -> list[e.Action]:
        actions: list[e.Action] = []
        expired = self.roster.expired(now)
        for member in expired:
            silent = now - member.heard_at
            reason = f"no message for {silent:.1f} s (lease {self.rules.lease_seconds:g} s)"
            why = refusals.lease_over(member.worker, silent, self.rules.lease_seconds)
            if member.attached:
                actions.append(e.Disconnect(*member.id, refusal=why, final=False))
            finished = self.phase is Phase.FINISHED
            actions += self._remove(member, reason, expected=finished, away=True)
        hanging: list[Member] = []
        if self.phase is Phase.FINISHED:
            actions += self._dismiss_hanging()
        elif self.phase is not Phase.STOPPING:
            hanging = progress.to_suspend(self)
            for member in hanging:
                actions += self._suspend(member)
            actions += progress.name_slow(self)
        ends = self.phase is Phase.RUNNING and 0 < self.rules.max_seconds <= now - (self.started_at or now)
        if expired or hanging or self.mode.due(now) or (ends and not self.stopped):
            actions += self._advance(now)
        return actions + self._report(now)

    def _restarted(self, event: e.Restarted, now: float) -> list[e.Action]:
        for member in self.roster.by_rank():
            self.roster.become(member, BROKEN[member.life])
            member.heard_at = now + RETURN_S
        self.closing, self.reunion = False, True
        # If the machine lost power, the journal may lack the last assignments that it sent. New ids must
        # differ from theirs.
        self.assignments += ASSIGNMENTS_SKIPPED
        return []

    def _pause_requested(self, event: e.PauseRequested, now: float) -> list[e.Action]:
        self.closing = True
        return self._paused()

    def _paused(self) -> list[e.Action]:
        """Report a requested pause once no accepted push is left to apply and no round is open."""
        return [e.Paused()] if self.closing and (self.phase is not Phase.RUNNING or self.mode.quiet) else []

    def _suspend(self, member: Member) -> list[e.Action]:
        """Stop waiting for a member whose training thread hangs. Its worker reconnects once the thread makes
        progress."""
        self.suspensions += 1
        limit_s = progress.limit_of(self, member)
        why = refusals.no_progress(member.worker, member.activity, member.stalled_s, limit_s)
        member.suspended = True
        cut = e.Disconnect(*member.id, refusal=why, final=False)
        return [cut, *self._remove(member, progress.describe(member), expected=False, away=True)]

    def _dismiss_hanging(self) -> list[e.Action]:
        """Remove hanging members from a finished job, so that the server does not wait for them."""
        actions: list[e.Action] = []
        for member in list(self.roster.by_rank()):
            if progress.hangs(self, member):
                actions.append(e.Disconnect(*member.id, refusal=self._finished(member.worker), final=True))
                actions += self._remove(member, progress.describe(member), expected=True, away=False)
        return actions

    def waiting(self, now: float) -> Awaited:
        """Return the condition that the job waits for now, with the awaited ranks and a text for the log
        and the status."""
        if self.phase is Phase.RUNNING and self.apart and self.mode.quiet:
            return describe_reunion(self, now)
        return self.mode.waiting(now) if self.phase is Phase.RUNNING else describe_waiting(self, now)

    def wait_from(self, now: float) -> None:
        super().wait_from(now)
        self.reported = None

    def _report(self, now: float) -> list[e.Action]:
        if self.waiting_since is None:
            self.wait_from(now)
        waiting = self.waiting(now)
        waited = now - (self.waiting_since or now) if waiting.seconds is None else waiting.seconds
        if not waiting.text or waited < (REPORT_AFTER_S if waiting.for_others else REPORT_EVERY_S):
            return []
        if self.reported is not None:
            subject, at = self.reported
            if subject == waiting.subject and now - at < REPORT_EVERY_S:
                return []
        self.reported = (waiting.subject, now)
        return [e.Report(ranks=waiting.ranks, seconds=waited, text=waiting.text, usual=waiting.usual)]


def _empty_handed(member: Member) -> e.Note:
    """Return the warning that names a member whose pushes contribute nothing."""
    text = (
        f"{member.name} contributes nothing: its last {member.empty} pushes had no gradient that counts; its "
        "own log says why"
    )
    return e.Note(text=text, warning=True)
