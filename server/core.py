"""The server's decisions: a state machine without I/O.

Everything that changes the course of a job passes through `Core.step(event, now)`, which changes the state
and returns the actions that follow from it. The shell performs them and reports back with further events.
The same events give the same actions, so that every promise below can be tested by a script and any run
replayed.

    EMPTY ─Initialized─> GATHERING ─enough members─> RUNNING ─last epoch─> FINISHING ─evaluated─> FINISHED
                             ^────no members left───────┘                      any ─Stopping─> STOPPING

A round, in sync mode: when it opens, the ready members are frozen as its members and each is told its
share of the next samples. It closes when each of them has contributed or is lost; contributions are handed
on in rank order whatever order they came in. Its partitions close one by one, and the version is complete
when all of them are published. A worker that joins meanwhile takes part from the next round on.

An accepted push stays accepted, also when its worker is lost before the round closes. A push that comes
too late for its round is refused as stale, and its worker takes the gradient back into its residual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..proto.messages import Assignment, Decision, EpochStatus, LostStatus, Outcome, Phase
from ..proto.refusal import Refusal, Refused
from ..proto.shares import share
from . import events as e
from . import refusals
from .roster import Member, Roster
from .state import Evaluation, JobState, Round, Rules
from .waiting import Waiting, describe_waiting

REPORT_AFTER_S = 1.0  # a round that waits longer names whom it waits for
REPORT_EVERY_S = 10.0  # and says so again


class Core(JobState):
    """The state of one job and the one function that changes it."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules=rules, roster=Roster(lease_s=rules.lease_s))
        self._reported: tuple[str, float] | None = None
        self._handlers: dict[type[Any], Callable[[Any, float], list[e.Action]]] = {
            e.Joined: self._joined,
            e.Initialized: self._initialized,
            e.Attached: self._attached,
            e.Prepared: self._prepared,
            e.Detached: self._detached,
            e.Heard: self._heard,
            e.Pushed: self._pushed,
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
        last_seq = max(member.last_seq.values(), default=0)
        return [e.Greet(worker=member.worker, rank=member.rank, version=self.version, last_seq=last_seq)]

    def _prepared(self, event: e.Prepared, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if self.fingerprint:
            self._check_model(event.worker, event.fingerprint)
        member.ready = member.listening = True
        member.fingerprint = event.fingerprint
        member.version = event.version
        if self.phase is Phase.EMPTY and self.initializer in (None, (member.worker, member.incarnation)):
            return self._request_initialize(member)
        if self.phase in (Phase.FINISHING, Phase.FINISHED):
            return self._finish(now)
        if self.round is None:
            return self._open_round_if_possible(now)
        if self.round.closed:  # it is being applied: the next round is told when it opens
            return []
        rank = self.round.rank_of(member)
        # Back within its round: what it was told may not have arrived.
        return [] if rank is None else [self._assign(member, rank, self.round)]

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
        done = self.phase in (Phase.FINISHING, Phase.FINISHED) and not event.failed
        actions = self._give_up(member, event.reason, now, expected=done)
        return [e.Note(text=f"{member.name} left: {event.reason}"), *actions] if done else actions

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
        identity = (member.worker, member.incarnation)
        if self.phase is Phase.EMPTY and self.initializer == identity:
            self.initializer = None
            for candidate in self.roster.listening()[:1]:  # otherwise the next one to get ready
                actions += self._request_initialize(candidate)
        if self.evaluation is not None and self.evaluation.by == identity:
            self.evaluation = None
        if self.round is not None:
            rank = self.round.rank_of(member)
            if rank is not None:
                self.round.lost.add(rank)
                actions += self._close_complete_partitions(now)
        if self.phase is Phase.FINISHING:
            actions += self._finish(now)
        return actions

    # ---- parameters

    def _initialized(self, event: e.Initialized, now: float) -> list[e.Action]:
        if self.phase is not Phase.EMPTY:
            raise Refused(refusals.already_initialized(event.worker))
        self.roster.find(event.worker, event.incarnation, now)
        self.phase = Phase.GATHERING
        self.fingerprint = event.fingerprint
        self.train_samples = event.train_samples
        self.partitions = event.partitions
        self._wait_from(now)
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
        return actions + self._open_round_if_possible(now)

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

    # ---- rounds

    def _open_round_if_possible(self, now: float) -> list[e.Action]:
        if self.round is not None or self.phase not in (Phase.GATHERING, Phase.RUNNING):
            return []
        members = self.roster.ready()
        needed = 1 if self.started else self.rules.min_workers
        if len(members) < needed:
            if self.phase is Phase.RUNNING:
                self.phase = Phase.GATHERING
                self._wait_from(now)
            return []
        self.phase = Phase.RUNNING
        self.started = True
        self.round = Round(
            version=self.version,
            epoch=self.epoch,
            start=self.start,
            samples=min(self.rules.batch_size * len(members), self.train_samples - self.start),
            opened_at=now,
            members={member.rank: (member.worker, member.incarnation) for member in members},
            contributions=[{} for _ in range(self.partitions)],
        )
        self._wait_from(now)
        # Whoever is reconnecting hears of it when it is back.
        return [self._assign(member, member.rank, self.round) for member in members if member.listening]

    def _assign(self, member: Member, rank: int, round_: Round) -> e.Assign:
        """The member's part in the round. Afterwards its replica is at the round's version."""
        position = sorted(round_.members).index(rank)
        evaluate = position == 0 and self._ask_for_evaluation(member, round_.epoch, round_.version)
        assignment = Assignment(
            version=round_.version,
            epoch=round_.epoch,
            start=round_.start,
            samples=round_.samples,
            position=position,
            world=len(round_.members),
            evaluate_epoch=round_.epoch if evaluate else 0,
        )
        has, member.version = member.version, round_.version
        return e.Assign(worker=member.worker, assignment=assignment, has=has)

    def _pushed(self, event: e.Pushed, now: float) -> list[e.Action]:
        if self.phase is Phase.STOPPING:
            raise Refused(refusals.stopping(event.worker, "no more pushes"))
        member = self.roster.find(event.worker, event.incarnation, now)
        known = member.outcomes.get((event.seq, event.partition))
        if known is not None:
            return [e.Answer(worker=member.worker, outcome=known)]
        last = member.last_seq.get(event.partition, 0)
        if event.seq != last + 1:
            raise Refused(refusals.sequence(member.worker, event.seq, last + 1))
        round_ = self.round
        rank = round_.rank_of(member) if round_ is not None else None
        if (
            round_ is None
            or rank is None
            or event.base_version != round_.version
            or event.partition in round_.closed
            or rank in round_.contributions[event.partition]  # one each: a second would undo the first
        ):
            self.stale_pushes += 1
            why = refusals.stale(member.worker, event.seq, event.base_version, self.version)
            outcome = Outcome(
                seq=event.seq, partition=event.partition, decision=Decision.REFUSED, refusal=why
            )
            member.remember(outcome)
            return [e.Answer(worker=member.worker, outcome=outcome)]
        start, end = share(round_.samples, sorted(round_.members).index(rank), len(round_.members))
        if event.samples > end - start:
            raise Refused(refusals.samples(member.worker, event.seq, event.samples, end - start))
        outcome = Outcome(
            seq=event.seq,
            partition=event.partition,
            decision=Decision.ACCEPTED,
            version=round_.version + 1,
        )
        member.remember(outcome)
        member.pushes += 1
        self.accepted_pushes += 1
        round_.contributions[event.partition][rank] = e.Contribution(
            rank=rank, samples=event.samples, content=event.content
        )
        return [e.Answer(worker=member.worker, outcome=outcome), *self._close_complete_partitions(now)]

    def _close_complete_partitions(self, now: float) -> list[e.Action]:
        round_ = self.round
        if round_ is None:
            return []
        if not any(round_.contributions) and set(round_.members) <= round_.lost:
            # Everyone is gone and nothing came. The samples are drawn again, but under a new version, so that
            # a push for the old division of them is recognised as stale.
            round_.samples = 0
        actions: list[e.Action] = []
        for partition in range(self.partitions):
            if partition in round_.closed or round_.missing(partition):
                continue
            round_.closed.add(partition)
            self._wait_from(now)
            in_rank_order = sorted(round_.contributions[partition].items())
            actions.append(
                e.Apply(
                    partition=partition,
                    version=round_.version + 1,
                    contributions=tuple(contribution for _, contribution in in_rank_order),
                    epoch=round_.epoch + (round_.start + round_.samples / 2) / self.train_samples,
                )
            )
        return actions

    def _published(self, event: e.Published, now: float) -> list[e.Action]:
        round_ = self.round
        assert round_ is not None
        assert event.version == round_.version + 1
        assert event.partition in round_.closed
        round_.published.add(event.partition)
        if len(round_.published) < self.partitions:
            return []
        self.round = None
        self.version = round_.version + 1
        self.start = round_.start + round_.samples
        if self.start >= self.train_samples:
            self.start = 0
            self.epoch += 1
        if self.epoch < self.rules.epochs:
            return self._open_round_if_possible(now)
        if self.phase is Phase.RUNNING:
            self.phase = Phase.FINISHING
            self._wait_from(now)
        return self._finish(now)

    # ---- evaluations and the end

    def _ask_for_evaluation(self, member: Member, epoch: int, version: int) -> bool:
        """Whether this member shall evaluate the epoch: once, unless who was asked before is lost."""
        if epoch == 0 or any(done.epoch == epoch for done in self.evaluations):
            return False
        identity = (member.worker, member.incarnation)
        if self.evaluation is not None and self.evaluation.epoch == epoch:
            return self.evaluation.by == identity  # asked before; perhaps it did not hear
        self.evaluation = Evaluation(by=identity, epoch=epoch, version=version)
        return True

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
        return [
            self._last_assignment(member, finished=False)
            for member in self.roster.listening()
            if self._ask_for_evaluation(member, self.epoch, self.version)
        ]

    def _last_assignment(self, member: Member, *, finished: bool) -> e.Assign:
        assignment = Assignment(
            version=self.version,
            epoch=self.epoch,
            start=0,
            samples=0,
            position=0,
            world=1,
            evaluate_epoch=0 if finished else self.epoch,
            finished=finished,
        )
        has, member.version = member.version, self.version
        return e.Assign(worker=member.worker, assignment=assignment, has=has)

    def _evaluated(self, event: e.Evaluated, now: float) -> list[e.Action]:
        member = self.roster.find(event.worker, event.incarnation, now)
        if any(done.epoch == event.epoch for done in self.evaluations):
            return []  # told again after a reconnect
        asked = Evaluation(by=(member.worker, member.incarnation), epoch=event.epoch, version=event.version)
        if self.evaluation != asked:
            text = f"an evaluation of epoch {event.epoch} by {member.name} was not asked for and is ignored"
            return [e.Note(text=text, warning=True)]
        self.evaluation = None
        self.evaluations.append(EpochStatus(epoch=event.epoch, version=event.version, metrics=event.metrics))
        self.evaluations.sort(key=lambda done: done.epoch)
        text = ", ".join(f"{name} {value:.4f}" for name, value in sorted(event.metrics.items()))
        note = e.Note(text=f"epoch {event.epoch}, version {event.version}: {text} (by {member.name})")
        if self.phase is Phase.FINISHING and event.epoch == self.epoch:
            self.phase = Phase.FINISHED
            return [note, e.Finish(), *self._finish(now)]
        return [note]

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
        return describe_waiting(self, now)

    def _wait_from(self, now: float) -> None:
        """Something new is waited for."""
        self.waiting_since = now
        self._reported = None

    def _report(self, now: float) -> list[e.Action]:
        if self.waiting_since is None:
            self._wait_from(now)
        waiting = self.waiting(now)
        waited = now - (self.waiting_since or now)
        if not waiting.text or waited < (REPORT_AFTER_S if waiting.for_others else REPORT_EVERY_S):
            return []
        if self._reported is not None:
            subject, at = self._reported
            if subject == waiting.subject and now - at < REPORT_EVERY_S:
                return []
        self._reported = (waiting.subject, now)
        return [e.Report(ranks=waiting.ranks, seconds=waited, text=waiting.text)]
