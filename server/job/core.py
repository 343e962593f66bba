"""The server's decisions: a state machine without I/O.

Everything that changes the course of a job passes through `Core.step(event, now)`, which changes the state
and returns the actions that follow from it. The shell performs them and reports back with further events.
The same events give the same actions, so that every promise below can be tested by a script and any run
replayed.

    EMPTY ─Initialized─> GATHERING ─enough members─> RUNNING ─last epoch─> FINISHING ─evaluated─> FINISHED
                             ^────no members left───────┘                      any ─Stopping─> STOPPING

Here is what all modes have in common: membership, exactly one outcome for each push, evaluations, the end.
Who gets which samples, and when pushes become a version, is the mode's: `rounds`, `arrivals` or `coded`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from ...proto.messages import Assignment, Decision, EpochStatus, LostStatus, Outcome, Phase
from ...proto.refusal import Refusal, Refused
from . import events as e
from . import refusals
from .modes.arrivals import Arrivals
from .modes.coded import Coded
from .modes.mode import Mode
from .modes.rounds import Rounds
from .roster import Member, Roster
from .samples import Samples
from .state import JobState, Rules
from .waiting import Waiting, describe_waiting

REPORT_AFTER_S = 1.0  # a round that waits longer names whom it waits for
REPORT_EVERY_S = 10.0  # and says so again


class Core(JobState):
    """The state of one job and the one function that changes it."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules=rules, roster=Roster(lease_s=rules.lease_s))
        self.mode: Mode
        if rules.mode in ("stale", "async"):
            self.mode = Arrivals(self, rules.staleness if rules.mode == "stale" else None)
        elif rules.mode == "coded":
            self.mode = Coded(self, rules.redundancy)
        else:
            self.mode = Rounds(self)
        self._reported: tuple[str, float] | None = None
        self._handlers: dict[type[Any], Callable[[Any, float], list[e.Action]]] = {
            e.Joined: self._joined,
            e.Initialized: self._initialized,
            e.Attached: self._attached,
            e.Prepared: self._prepared,
            e.Detached: self._detached,
            e.Heard: self._heard,
            e.Pushed: self._pushed,
            **dict.fromkeys(get_args(e.OfCoded), self._of_coded),
            e.Copied: self._copied,
            e.Published: self._published,
            e.Evaluated: self._evaluated,
            e.Left: self._left,
            e.Tick: self._tick,
            e.Stopping: self._stopping,
        }

    def step(self, event: e.Event, now: float) -> list[e.Action]:
        """Take in one event. A refused one changes nothing but the lease of the member it came from."""
        try:
            return self._handlers[type(event)](event, now)
        except Refused as refused:
            return [e.Refuse(refusal=refused.refusal)]

    # ---- membership

    def _joined(self, event: e.Joined, now: float) -> list[e.Action]:
        self._refuse_when_over(event.worker)
        member, replaced = self.roster.join(event.worker, event.incarnation, event.compressor, now)
        actions: list[e.Action] = []
        if replaced is not None:
            why = refusals.fenced(event.worker, replaced.incarnation, event.incarnation)
            gone = e.Disconnect(
                worker=event.worker, incarnation=replaced.incarnation, refusal=why, final=True
            )
            actions += [gone, *self._give_up(replaced, "replaced by a new incarnation", now)]
        if self.phase is Phase.EMPTY and self.initializer is None:
            self.initializer = (member.worker, member.incarnation)
        asked = self.phase is Phase.EMPTY and self.initializer == (member.worker, member.incarnation)
        admit = e.Admit(rank=member.rank, version=self.version, initialize=asked)
        return [
            admit,
            e.Note(text=f"{member.name} joined with {member.compressor or 'no compressor'}"),
            *actions,
        ]

    def _attached(self, event: e.Attached, now: float) -> list[e.Action]:
        self._refuse_when_over(event.worker)
        member = self.roster.find(event.worker, event.incarnation, now, revive=True)
        member.attached, member.listening = True, False
        return [
            e.Greet(worker=member.worker, rank=member.rank, version=self.version, last_seq=member.last_seq)
        ]

    def _prepared(self, event: e.Prepared, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if self.fingerprint:
            self._check_model(event.worker, event.fingerprint)
        member.ready = member.listening = True
        member.fingerprint = event.fingerprint
        member.version = event.version
        self.forget_evaluation(member, event.assigned)
        if self.phase is Phase.EMPTY and self.initializer in (None, (member.worker, member.incarnation)):
            return self._request_initialize(member)
        if self.phase in (Phase.GATHERING, Phase.RUNNING):
            self._reinstate(member, event.assigned)
            return [*self.mode.resume(member, event.assigned, now), *self._advance(now)]
        return self._finish(now)

    def _detached(self, event: e.Detached, now: float) -> list[e.Action]:
        member = self.roster.members.get(event.worker)
        if member is not None and member.incarnation == event.incarnation:
            member.attached = member.listening = False
        return []

    def _heard(self, event: e.Heard, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if event.activity is not None:
            member.activity = event.activity
        return []

    def _left(self, event: e.Left, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        actions = self._give_up(member, event.reason, now, expected=not event.failed)
        return actions if event.failed else [e.Note(text=f"{member.name} left: {event.reason}"), *actions]

    def _give_up(self, member: Member, reason: str, now: float, *, expected: bool = False) -> list[e.Action]:
        """Take a member out of everything that waits for it."""
        actions: list[e.Action] = []
        if self.roster.members.get(member.worker) is member:
            self.roster.remove(member)
        if not expected:
            self.lost.append(
                LostStatus(worker=member.worker, rank=member.rank, reason=reason, version=self.version)
            )
            actions.append(e.Lost(name=member.name, reason=reason))
        if self.phase is Phase.EMPTY and self.initializer == (member.worker, member.incarnation):
            self.initializer = None
            for candidate in self.roster.listening()[:1]:  # otherwise the next one to get ready
                actions += self._request_initialize(candidate)
        self.forget_evaluation(member)
        self.mode.lost(member)
        return [*actions, *self._advance(now)]

    # ---- parameters

    def _initialized(self, event: e.Initialized, now: float) -> list[e.Action]:
        if self.phase is not Phase.EMPTY:
            raise Refused(refusals.already_initialized(event.worker))
        self.roster.find(event.worker, event.incarnation, now)
        self.phase = Phase.GATHERING
        self.fingerprint = event.fingerprint
        self.samples = Samples(event.train_samples, self.rules.epochs)
        self.wait_from(now)
        actions: list[e.Action] = []
        for member in self.roster.ready():  # they said so before there was anything to compare with
            try:
                self._check_model(member.worker, member.fingerprint)
            except Refused as refused:
                actions.append(
                    e.Disconnect(
                        worker=member.worker,
                        incarnation=member.incarnation,
                        refusal=refused.refusal,
                        final=True,
                    )
                )
                actions += self._give_up(member, "has another model", now)
        return actions + self._advance(now)

    def _request_initialize(self, member: Member) -> list[e.Action]:
        self.initializer = (member.worker, member.incarnation)
        return [e.RequestInitialize(worker=member.worker)]

    def check_initialize(self, worker: str, incarnation: int) -> Refusal | None:
        """Whether this worker may upload the initial parameters now."""
        if self.phase is not Phase.EMPTY:
            return refusals.already_initialized(worker)
        if self.initializer != (worker, incarnation):
            return refusals.not_the_initializer(worker, self.initializer[0] if self.initializer else None)
        return None

    def _check_model(self, worker: str, fingerprint: bytes) -> None:
        if fingerprint != self.fingerprint:
            raise Refused(refusals.wrong_model(worker, fingerprint, self.fingerprint))

    # ---- training

    def _advance(self, now: float) -> list[e.Action]:
        """Whatever can happen now: give out work, apply what is complete, begin to wait, or to finish."""
        if self.phase not in (Phase.GATHERING, Phase.RUNNING):
            return self._finish(now) if self.phase is Phase.FINISHING else []
        started = self.started_at is not None
        if started and self.mode.quiet and self.samples.done:
            self.phase = Phase.FINISHING
            self.wait_from(now)
            return self._finish(now)
        needed = 1 if started else self.rules.min_workers
        if self.mode.quiet and len(self.roster.ready()) < needed:
            if self.phase is Phase.RUNNING:
                self.phase = Phase.GATHERING
                self.wait_from(now)
            return []
        if self.phase is Phase.GATHERING:
            self.phase = Phase.RUNNING
            self.wait_from(now)
        if self.started_at is None:
            self.started_at = now
        actions = [*self.mode.offer(now), *self.mode.proceed(now)]
        if self.mode.quiet and not self.roster.ready():
            self.phase = Phase.GATHERING
        return actions

    def _pushed(self, event: e.Pushed, now: float) -> list[e.Action]:
        if self.phase is Phase.STOPPING:
            raise Refused(refusals.stopping(event.worker, "no more pushes"))
        member = self.roster.find(event.worker, event.incarnation, now)
        known = member.outcomes.get(event.seq)
        if known is not None:
            return [e.Answer(worker=member.worker, outcome=known)]
        if event.seq != member.last_seq + 1:
            raise Refused(refusals.sequence(member.worker, event.seq, member.last_seq + 1))
        version, redundant = None, False
        work = member.work
        if work is None or work.assignment.id != event.assignment:
            # What others compute too is not taken from a member but to have it done by somebody else.
            redundant = not self._reclaim(member, event) and self.rules.shares_samples
        else:
            if event.samples > work.samples:
                raise Refused(refusals.samples(member.worker, event.seq, event.samples, work.samples))
            if event.slices and (event.slice, event.slices) != (
                work.assignment.slice,
                work.assignment.slices,
            ):
                raise Refused(refusals.slices(member.worker, event, work.assignment))
            if event.base_version != work.assignment.version:
                raise Refused(
                    refusals.base_version(
                        member.worker, event.seq, event.base_version, work.assignment.version
                    )
                )
            member.work = None
            version = self.mode.take(member, work, event, now)
            redundant = version is None and work.assignment.stragglers > 0
        if version is None:
            self.stale_pushes += 1
            refuse = refusals.redundant if redundant else refusals.stale
            why = refuse(member.worker, event.seq, event.assignment, self.version)
            outcome = Outcome(seq=event.seq, decision=Decision.REFUSED, refusal=why)
        else:
            self.accepted_pushes += 1
            member.pushes += 1
            outcome = Outcome(seq=event.seq, decision=Decision.ACCEPTED, version=version)
        member.remember(outcome)
        return [e.Answer(worker=member.worker, outcome=outcome), *self._advance(now)]

    def _reinstate(self, member: Member, assigned: int) -> None:
        """Who comes back still computing what was taken from it goes on with that, if nobody else has it."""
        void = member.void
        if void is None or member.work is not None or void.assignment.id != assigned:
            return
        late = self.mode.too_late(void)
        if not self.samples.take_back(void.drawn, settled=late):
            return
        if self.samples.done:  # its gradient would wait in its residual for a push that never comes
            self.samples.give_back(void.drawn, settled=True)
            return
        void.settled, void.interrupted = late, True
        member.work, member.void = void, None

    def _reclaim(self, member: Member, event: e.Pushed) -> bool:
        """The gradient goes into the worker's residual: its samples need nobody else, if they still can.
        Returns whether it is one that was taken from the worker."""
        void = member.void
        if void is None or void.assignment.id != event.assignment:
            return False
        if event.samples:
            member.void = None
            if not self.samples.take_back(void.drawn):
                self.repeated_samples += event.samples
        return True

    def _of_coded(self, event: e.OfCoded, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if not isinstance(self.mode, Coded):
            raise Refused(refusals.not_coded(member.worker))
        actions = self.mode.happened(member, event)
        if any(isinstance(action, e.Disconnect) and action.final for action in actions):
            return [*actions, *self._give_up(member, "its packets keep arriving damaged", now)]
        return [*actions, *self._advance(now)]

    def _copied(self, event: e.Copied, now: float) -> list[e.Action]:
        assert isinstance(self.mode, Coded)
        self.mode.copied(event.version)
        return self._advance(now)

    def _published(self, event: e.Published, now: float) -> list[e.Action]:
        self.mode.published(event)
        return self._advance(now)

    # ---- evaluations and the end

    def _finish(self, now: float) -> list[e.Action]:
        """Have the last version evaluated, then send everybody home.

        Called again whenever a member comes back or is lost; telling one twice does no harm. Nobody leaves
        before the evaluation is in, so that another can do it if the evaluator is lost.
        """
        if self.phase is Phase.FINISHED:
            return [self._last_assignment(member, finished=True) for member in self.roster.listening()]
        if self.phase is not Phase.FINISHING:
            return []
        if not self.roster.members:
            self.phase = Phase.FINISHED
            return [e.Note(text="no member is left to evaluate the last version", warning=True), e.Finish()]
        # Whoever is still busy with what comes too late would keep everybody waiting.
        idle_first = sorted(self.roster.listening(), key=lambda member: member.work is not None)
        return [
            self._last_assignment(member, finished=False)
            for member in idle_first
            if self.ask_for_evaluation(member, self.epoch, self.assignments + 1, now)
        ]

    def _last_assignment(self, member: Member, *, finished: bool) -> e.Assign:
        assignment = Assignment(
            id=0,
            version=self.version,
            epoch=self.epoch,
            progress=self.samples.progress,
            evaluate_epoch=0 if finished else self.epoch,
            finished=finished,
            apply=self.applied,
        )
        return self.assign(member, assignment)

    def _evaluated(self, event: e.Evaluated, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if any(done.epoch == event.epoch for done in self.evaluations):
            return []  # told again after a reconnect
        asked = self.evaluation
        if (
            asked is None
            or asked.by is not member
            or asked.epoch != event.epoch
            or event.version > asked.version
        ):
            text = f"an evaluation of epoch {event.epoch} by {member.name} was not asked for and is ignored"
            return [e.Note(text=text, warning=True)]
        self.evaluation = None
        self.evaluations.append(
            EpochStatus(
                epoch=event.epoch,
                version=event.version,
                metrics=event.metrics,
                seconds=asked.asked_at - (self.started_at or 0.0),
            )
        )
        self.evaluations.sort(key=lambda done: done.epoch)
        text = ", ".join(f"{name} {value:.4f}" for name, value in sorted(event.metrics.items()))
        note = e.Note(text=f"epoch {event.epoch}, version {event.version}: {text} (by {member.name})")
        if self.phase is Phase.FINISHING and event.epoch == self.epoch:
            self.phase = Phase.FINISHED
            return [note, e.Finish(), *self._finish(now)]
        return [note, *self._advance(now)]

    def _stopping(self, event: e.Stopping, now: float) -> list[e.Action]:
        if self.phase is not Phase.FINISHED:
            self.phase = Phase.STOPPING
        why = refusals.stopping("", event.reason)
        return [
            e.Disconnect(worker=member.worker, incarnation=member.incarnation, refusal=why, final=True)
            for member in self.roster.attached()
        ]

    def _refuse_when_over(self, worker: str) -> None:
        if self.phase is Phase.STOPPING:
            raise Refused(refusals.stopping(worker, "no new members"))
        if self.phase is Phase.FINISHED or (self.phase is Phase.FINISHING and not self.roster.knows(worker)):
            raise Refused(refusals.finished(worker, self.rules.epochs))

    # ---- time

    def _tick(self, event: e.Tick, now: float) -> list[e.Action]:
        actions: list[e.Action] = []
        for member in self.roster.expired(now):
            silent = now - member.heard_at
            reason = f"not heard of for {silent:.1f} s (lease {self.rules.lease_s:g} s)"
            why = refusals.lease_over(member.worker, silent, self.rules.lease_s)
            if member.attached:
                actions.append(
                    e.Disconnect(
                        worker=member.worker, incarnation=member.incarnation, refusal=why, final=False
                    )
                )
            actions += self._give_up(member, reason, now, expected=self.phase is Phase.FINISHED)
        return actions + self._report(now)

    def waiting(self, now: float) -> Waiting:
        """Whom or what everything waits for."""
        return self.mode.waiting(now) if self.phase is Phase.RUNNING else describe_waiting(self, now)

    def wait_from(self, now: float) -> None:
        super().wait_from(now)
        self._reported = None

    def _report(self, now: float) -> list[e.Action]:
        if self.waiting_since is None:
            self.wait_from(now)
        waiting = self.waiting(now)
        waited = now - (self.waiting_since or now) if waiting.seconds is None else waiting.seconds
        if not waiting.text or waited < (REPORT_AFTER_S if waiting.for_others else REPORT_EVERY_S):
            return []
        if self._reported is not None:
            subject, at = self._reported
            if subject == waiting.subject and now - at < REPORT_EVERY_S:
                return []
        self._reported = (waiting.subject, now)
        return [e.Report(ranks=waiting.ranks, seconds=waited, text=waiting.text)]
