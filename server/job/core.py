"""The server's decisions: a state machine without I/O.

Everything that changes the course of a job passes through `Core.step(event, now)`. It refuses the event, or
changes the state and returns a reply and actions. The shell performs the actions and reports back with
further events. The same events give the same actions, so a script can test every promise below, and any run
can be replayed. The method `save` returns the whole state as plain values; a core that has loaded them
continues identically.

`JobState` is the data that all modes share; it decides nothing. A `Mode` decides which samples each member
gets, and when pushes become a version; its own data are its fields. `Core` has one of each, calls the mode,
and has the rules that all modes share: here membership and time, in `advancing` the order of steps, in
`deciding` the outcomes of pushes, in `initial` the job's model, in `ending` evaluations and the end.

A job (`Phase`):

    EMPTY     | no parameters yet; one member is asked to upload them | -> GATHERING (`Initialized`)
    GATHERING | waits for enough ready members                        | -> RUNNING
    RUNNING   | the mode assigns samples and makes versions           | -> GATHERING (members lost), FINISHING
    FINISHING | a member evaluates the last version                   | -> FINISHED
    FINISHED  | members are told to leave                             |
    STOPPING  | the server shuts down; entered from any phase but     |
              | FINISHED (`Stopping`)                                 |

Invariants:

- A push has one outcome.
- No push is accepted that its assignment does not allow (version, samples, plan).
- No new plan comes into force while an accepted push of the old plan is still to be applied.
- No member is told to leave before the last version is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ...proto.messages import LostStatus, Phase, Welcome
from ...proto.refusal import Refusal, Refused
from ...settings import ServerSettings, parse_evaluate_every
from ...storage import values
from . import advancing, deciding, ending, initial, progress, refusals
from . import events as e
from .modes.mode import Mode
from .modes.options import ModeOptions
from .roster import BROKEN, OPENED, Life, Member, Roster
from .schedule import parse_schedule
from .state import LOST_REMEMBERED, JobState
from .waiting import Awaited, describe_reunion, describe_waiting, report

R = TypeVar("R")

ASSIGNMENTS_SKIPPED = 1 << 32  # Number of assignment ids that a restarted server leaves out.
RETURN_S = 60.0  # Time that members have to return to a restarted server, in addition to their leases.


class Core:
    """The decisions about one job. The conductor creates and drives it."""

    def __init__(self, rules: ServerSettings, options: ModeOptions) -> None:
        self.state = JobState(
            rules=rules,
            schedule=parse_schedule(rules.schedule),
            evaluate_every=parse_evaluate_every(rules.evaluate_every),
            roster=Roster(lease_s=rules.lease_seconds),
        )
        self.mode: Mode = options.create(self.state)
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
        return {"job": values.pack_fields(self.state), "mode": values.pack_fields(self.mode)}

    def load(self, plain: values.Plain) -> None:
        """Replace the state by the one that `save` returned in a core with the same rules."""
        values.restore(self.state, plain["job"])
        if self.state.fingerprint and self.state.rules.epochs:  # scripts may have named another number
            self.state.rules = replace(self.state.rules, epochs=self.state.samples.epochs)
        values.restore(self.mode, plain["mode"])
        self.mode.restored()

    # ---- questions of the shell

    @property
    def newest(self) -> int:
        """Latest version of which a worker can have parts: the present one, or the next one while it is being
        made."""
        return self.state.version if self.mode.quiet else self.state.version + 1

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step; 0 where scripts choose it."""
        state = self.state
        if state.rules.script:
            return 0.0
        return state.rules.learning_rate * state.rate_factor(state.samples.progress, self.mode.steps + 0.5)

    def waiting(self, now: float) -> Awaited:
        """Return the condition that the job waits for now, with the awaited ranks and a text for the log
        and the status."""
        state = self.state
        if state.phase is Phase.RUNNING and state.apart and self.mode.quiet:
            return describe_reunion(state, now)
        return self.mode.waiting(now) if state.phase is Phase.RUNNING else describe_waiting(state, now)

    def _sender(self, event: e.FromWorker[Any], now: float) -> Member:
        """Return the member that sent the event, and renew its lease. Raises Refused."""
        return self.state.roster.find(event.worker, event.incarnation, now)

    # ---- membership

    def _joined(self, event: e.Joined, now: float) -> e.Result[e.Admission]:
        state = self.state
        self._raise_if_over(event.worker)
        member, replaced = state.roster.join(event.worker, event.incarnation, event.compressor, now)
        actions: list[e.Action] = [
            e.Note(text=f"{member.name} joined with {member.compressor or 'no compressor'}")
        ]
        if replaced is not None:
            why = refusals.fenced(event.worker, replaced.incarnation, event.incarnation)
            gone = e.Disconnect(*replaced.id, refusal=why, final=True)
            actions += [gone, *self._lose(replaced, "replaced by a new incarnation", now)]
        if state.phase is Phase.EMPTY and state.initializer is None:
            state.initializer = member.id
        admission = e.Admission(
            rank=member.rank,
            version=state.version,
            initialize=state.phase is Phase.EMPTY and state.initializer == member.id,
            epoch=state.epoch,
            workers=max(
                state.rules.min_workers if state.started_at is None else 1, len(state.roster.members)
            ),
        )
        return e.Result(reply=admission, actions=actions)

    def _attached(self, event: e.Attached, now: float) -> e.Result[Welcome]:
        state = self.state
        self._raise_if_over(event.worker)
        member = state.roster.find(event.worker, event.incarnation, now, revive=True)
        state.roster.become(member, OPENED[member.life])
        welcome = Welcome(
            rank=member.rank,
            version=state.version,
            last_seq=member.last_seq,
            plan=state.plan,
            newest=self.newest,
            evaluations=ending.told(state, state.evaluations.done) if state.rules.script else None,
        )
        return e.Result(reply=welcome, actions=[])

    def _prepared(self, event: e.Prepared, now: float) -> list[e.Action]:
        state, member = self.state, self._sender(event, now)
        if state.fingerprint:
            initial.check_model(state, event.worker, event, event.difference)
        state.accumulation.declare(event.worker, event.accumulate)
        state.roster.become(member, Life.LISTENING)
        member.fingerprint, member.data = event.fingerprint, event.data
        member.train_samples = event.train_samples
        # The worker may have a version that was lost together with an earlier server.
        lost = event.version is not None and event.version > self.newest
        member.version = None if lost else event.version
        state.evaluations.forget(member.id, event.assigned, member.version)
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
        if state.phase is Phase.EMPTY and state.initializer in (None, member.id):
            return initial.request(state, member)
        if state.training:
            if member.version is None and state.started_at is not None and not event.restored:
                state.buffers.joined(member)
            deciding.reinstate(state, self.mode, member, event.assigned)
            return [*notes, *self.mode.resume(member, event.assigned, now), *self._advance(now)]
        return [
            *notes,
            *ending.finish(state, self.mode, now),
            *ending.release(state, self.mode, [member]),
        ]

    def _detached(self, event: e.Detached, now: float) -> list[e.Action]:
        member = self.state.roster.present((event.worker, event.incarnation))
        if member is not None:
            self.state.roster.become(member, BROKEN[member.life])
        return []

    def _keep_alive(self, event: e.KeepAlive, now: float) -> list[e.Action]:
        member = self._sender(event, now)
        if event.activity is None:
            return []
        return progress.note_activity(self.state, member, event.activity, event.stalled_s)

    def _stop_requested(self, event: e.StopRequested, now: float) -> list[e.Action]:
        """End the job like a limit does: without more work, with an evaluation of the last version."""
        member = self._sender(event, now)
        if not self.state.training or self.state.stopped:
            return []  # repeated after a reconnect, or too late
        self.state.stopped = f"{event.reason} (asked for by {member.name})"
        return self._advance(now)

    def _left(self, event: e.Left, now: float) -> list[e.Action]:
        member = self._sender(event, now)
        actions = self._lose(member, event.reason, now, expected=not event.failed)
        if event.failed:
            return actions
        return [e.Note(text=f"{member.name} left: {event.reason}"), *deciding.empty_handed(member), *actions]

    def _lose(self, member: Member, reason: str, now: float, *, expected: bool = False) -> list[e.Action]:
        """Remove one member for good, and continue without it."""
        return [*self._remove(member, reason, expected=expected, away=False), *self._advance(now)]

    def _remove(self, member: Member, reason: str, *, expected: bool, away: bool) -> list[e.Action]:
        """Remove a member from everything that waits for it. After the last removal of an event, call
        `_advance`.

        Args:
            away: True if the same incarnation may return.
        """
        state = self.state
        actions: list[e.Action] = []
        if state.roster.members.get(member.worker) is member:
            state.roster.remove(member)
        if not expected:
            lost = LostStatus(worker=member.worker, rank=member.rank, reason=reason, version=state.version)
            state.lost = [*state.lost, lost][-LOST_REMEMBERED:]
            actions.append(
                e.LossReported(name=member.name, worker=member.worker, rank=member.rank, reason=reason)
            )
        if state.phase is Phase.EMPTY and state.initializer == member.id:
            state.initializer = None
            # If no member is listening, the next one to become ready is asked (`_prepared`).
            for candidate in state.roster.listening()[:1]:
                actions += initial.request(state, candidate)
        state.evaluations.forget(member.id)
        self.mode.lost(member, away=away)
        return actions

    def _raise_if_over(self, worker: str) -> None:
        state = self.state
        if state.phase is Phase.STOPPING:
            raise Refused(refusals.stopping(worker, "it accepts no new members"))
        known = state.phase is Phase.FINISHING and state.roster.knows(worker)
        if state.phase in (Phase.FINISHING, Phase.FINISHED) and not known:
            raise Refused(ending.over(state, worker))

    # ---- parameters and plans

    def _initialized(self, event: e.Initialized, now: float) -> list[e.Action]:
        state = self.state
        if state.phase is not Phase.EMPTY:
            raise Refused(refusals.already_initialized(event.worker))
        self._sender(event, now)
        others = initial.begin(state, event, now)
        self.mode.restored()
        actions: list[e.Action] = []
        for member, why in others:
            actions.append(e.Disconnect(*member.id, refusal=why, final=True))
            actions += self._lose(member, refusals.brief(why), now)
        return actions + self._advance(now)

    def _plan_prepared(self, event: e.PlanPrepared, now: float) -> list[e.Action]:
        if not self.mode.pushes_parts:
            return [e.Note(text="ignored a new plan: workers do not push parts in this mode", warning=True)]
        self.state.planned = True
        return self._advance(now)

    # ---- training

    def _advance(self, now: float) -> list[e.Action]:
        return advancing.advance(self.state, self.mode, now)

    def _pushed(self, event: e.Pushed, now: float) -> e.Result[e.Decided]:
        if self.state.phase is Phase.STOPPING:
            raise Refused(refusals.stopping(event.worker, "it accepts no more pushes"))
        decided = deciding.decide(self.state, self.mode, self._sender(event, now), event, now)
        if not decided.reply.repeated:
            decided.actions.extend(self._advance(now))
        return decided

    def _rates_received(self, event: e.RatesReceived, now: float) -> list[e.Action]:
        work = self.state.work_of(event.worker, event.incarnation)
        if work is not None and work.id == event.assignment and not work.late:
            self.mode.check_rates(event)
        return []

    def _more_wanted(self, event: e.MoreWanted, now: float) -> list[e.Action]:
        member = self._sender(event, now)
        work = member.work
        answer: list[e.Action] = []
        if not self.mode.pushes_parts:
            raise Refused(refusals.not_extended(member.worker))
        if work is None or work.id != event.assignment:
            # It no longer has this work. The gradients of its batches go into its next step.
            deciding.reclaim(self.state, member, event.assignment, event.batches)
        elif work.late:
            deciding.end_late(self.state, self.mode, member, work, event.batches)
        elif event.batches < len(work.batches):  # the extended assignment was lost with a stream
            answer = [self.state.send(member, work.assignment)]
        else:
            answer = self.mode.more(member, work, event)
        return [*answer, *self._advance(now)]

    def _apply_started(self, event: e.ApplyStarted, now: float) -> list[e.Action]:
        self.mode.apply_started(event.version, whole=event.whole)
        return []

    def _order_done(self, event: e.Published | e.SnapshotInstalled, now: float) -> list[e.Action]:
        """Tell the mode that the shard has carried out its order, and continue."""
        self.mode.done(event)
        return self.mode.drain(now) if self.state.phase is Phase.STOPPING else self._advance(now)

    def _packet_started(self, event: e.PacketStarted, now: float) -> e.Result[e.Targets]:
        member = self._sender(event, now)
        return e.Result(reply=self.mode.exchanging(member.worker).targets(member, event), actions=[])

    def _exchange_event(self, event: e.OfExchange, now: float) -> list[e.Action]:
        member = self._sender(event, now)
        actions = self.mode.exchanging(member.worker).received(member, event)
        if any(isinstance(action, e.Disconnect) and action.final for action in actions):
            return [*actions, *self._lose(member, "repeatedly sent damaged packets", now)]
        return [*actions, *self._advance(now)]

    # ---- evaluations and the end

    def _evaluation_reported(self, event: e.EvaluationReported, now: float) -> list[e.Action]:
        member = self._sender(event, now)
        if self.state.evaluations.has(event.epoch):
            return []  # repeated after a reconnect
        actions, counts = ending.evaluated(self.state, member, event)
        if not counts:
            return actions
        if self.state.phase is Phase.FINISHED:
            return [*actions, e.Finish(), *ending.finish(self.state, self.mode, now)]
        return [*actions, *self._advance(now)]

    def _stopping(self, event: e.Stopping, now: float) -> list[e.Action]:
        state = self.state
        drained: list[e.Action] = []
        if state.phase is not Phase.FINISHED:
            state.phase = Phase.STOPPING
            drained = [] if event.failed else self.mode.drain(now)
        why = refusals.stopping("", event.reason)
        ends = [e.Disconnect(*member.id, refusal=why, final=True) for member in state.roster.attached()]
        return [*ends, *drained]

    def _pause_requested(self, event: e.PauseRequested, now: float) -> list[e.Action]:
        self.state.closing = True
        return advancing.paused(self.state, self.mode)

    def _restarted(self, event: e.Restarted, now: float) -> list[e.Action]:
        state = self.state
        for member in state.roster.by_rank():
            state.roster.become(member, BROKEN[member.life])
            member.heard_at = now + RETURN_S
        state.closing, state.reunion = False, True
        # If the machine lost power, the journal may lack the last assignments that it sent. New ids must
        # differ from theirs.
        state.assignments += ASSIGNMENTS_SKIPPED
        return []

    # ---- time

    def _tick(self, event: e.Tick, now: float) -> list[e.Action]:
        state, lease_s = self.state, self.state.rules.lease_seconds
        actions: list[e.Action] = []
        over = state.phase is Phase.FINISHED
        expired = state.roster.expired(now)
        for member in expired:
            silent = now - member.heard_at
            reason = f"no message for {silent:.1f} s (lease {lease_s:g} s)"
            why = refusals.lease_over(member.worker, silent, lease_s)
            actions += self._expel(member, why, reason, expected=over)
        hanging: list[Member] = []
        if over:  # the server does not wait for hanging members
            for member in [each for each in state.roster.by_rank() if progress.hangs(state, each)]:
                why = ending.over(state, member.worker)
                actions += self._expel(member, why, progress.describe(member), expected=True, final=True)
        elif state.phase is not Phase.STOPPING:
            hanging = progress.to_suspend(state)
            for member in hanging:  # its worker reconnects once the training thread makes progress
                limit_s = progress.limit_of(state, member)
                why = refusals.no_progress(member.worker, member.activity, member.stalled_s, limit_s)
                state.suspensions, member.suspended = state.suspensions + 1, True
                actions += self._expel(member, why, progress.describe(member), expected=False)
            actions += progress.name_slow(state)
        ends = state.phase is Phase.RUNNING and 0 < state.rules.max_seconds <= now - (state.started_at or now)
        if expired or hanging or self.mode.due(now) or (ends and not state.stopped):
            actions += self._advance(now)
        if state.waiting_since is None:
            state.wait_from(now)
        return actions + report(state, self.waiting(now), now)

    def _expel(
        self, member: Member, why: Refusal, reason: str, *, expected: bool, final: bool = False
    ) -> list[e.Action]:
        """Disconnect a member, and remove it. It may return unless this is final."""
        cut: list[e.Action] = []
        if member.attached:
            cut.append(e.Disconnect(*member.id, refusal=why, final=final))
        return [*cut, *self._remove(member, reason, expected=expected, away=not final)]
