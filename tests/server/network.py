"""The server of a random history, and what passes between it and its workers: streams, pushes, answers, work;
some of it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from oracle import Local, Oracle
from simulated import Message, Piece, Sim, samples_of, seq_of
from stepping import Refuse

from gradwire.common.parts import Plan
from gradwire.proto.messages import Abandon, Assignment, Commit, Outcome, PartHeader, Phase, Unwanted
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.proto.transfer import Assembly, part_transfer
from gradwire.server.calls.pushes import NO_MEMBER, Pushes
from gradwire.server.conductor import Conductor
from gradwire.server.job import events as e
from gradwire.server.job.roster import OUTCOMES_PER_MEMBER
from gradwire.server.metrics import ServerMetrics
from gradwire.server.plans.replanning import Replanning, fixed
from gradwire.server.streams.arriving import ArrivingParts
from gradwire.server.streams.outbox import WorkerStream
from gradwire.server.streams.publishing import Publishing
from gradwire.server.tasks import Tasks

MODEL = b"model"
METRICS = ServerMetrics("none")
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK)
Pick = Callable[[int], int]  # a number below the given one


def discard(message: bytes) -> None:
    """Discard a plan: the network knows what each worker has."""


class Known(Publishing):
    """Nobody has to be sent what it lacks: the network knows what each worker has."""

    def update(self, stream: WorkerStream, version: int, has: int | None) -> None:
        pass


class Done(Tasks):
    def run(self, work: Awaitable[None]) -> None:
        """The shard has no thread: it is done already."""


class Numbered(Replanning):
    def prepare(self, plan: Plan) -> Plan:
        self.prepared = replace(plan, number=self._reported.plan.number + 1)  # too small to be checked
        return self.prepared


class Server(Conductor):
    """The shell: control has its oracle, and what is to be done is done by the network."""

    def __init__(self, network: Network, shard: Local) -> None:
        super().__init__(network.core, METRICS, shard=shard)
        self.tasks = Done()
        self._publishing = Known(shard, self.streams, work=self.tasks.run)
        self.plans = Numbered(fixed(), shard, METRICS, adopt=self.replan, work=self.tasks.run)
        self._network = network

    def decide(self, event: e.Event[Any]) -> e.Result[Any]:
        return self._network.decide(event)

    def perform(self, actions: Sequence[e.Action]) -> None:
        self._network.take_in(actions)


class Network(Oracle):
    """Between one server and its workers."""

    def __init__(self, pick: Pick, mode: str, **rules: Any) -> None:
        super().__init__(mode, **rules)
        self.pick = pick
        self.shard = Local(self)
        self.server = Server(self, self.shard)
        self.scans: list[tuple[WorkerStream, PartHeader, Assembly]] = []  # of parts, while they run
        self.growing: list[tuple[Sim, WorkerStream | None]] = []  # whose update is on its way already

    # ---- streams

    def attach(self, sim: Sim) -> None:
        actions = self.step(e.Attached(worker=sim.name, incarnation=sim.incarnation))
        sim.attached = not any(isinstance(action, Refuse) for action in actions)
        sim.ready = False
        if sim.attached:
            if sim.stream is not None and sim.stream.outbox.ended_with is None:
                self.end(sim.stream)
            outbox: Any = SimpleNamespace(sent=[], ended_with=None, put=discard)
            stream = WorkerStream(sim.name, sim.incarnation, outbox, ArrivingParts(sim.name))
            outbox.send = partial(self.say, stream)
            sim.stream = self.server.streams[sim.name] = stream

    def say(self, stream: WorkerStream, message: Any) -> None:
        """The server says something; that a push is unwanted may come when all of it has been sent."""
        outbox: Any = stream.outbox
        if not isinstance(message, Unwanted):
            outbox.sent.append(message)
            return
        self.hints += 1
        sim = self.sims.get(stream.worker)
        if sim is not None and sim.stream is stream and self.pick(4):
            unwanted = [each for each in sim.queue if isinstance(each, Piece) and each.seq == message.seq]
            sim.queue = [each for each in sim.queue if each not in unwanted]

    def end(self, stream: WorkerStream) -> None:
        """End a stream. Later arrivals on it can only be parts that were being scanned."""
        stream.outbox.ended_with = Refusal(reason=Reason.FENCED, message="another stream")

    def prepare(self, sim: Sim) -> None:
        """Say that it is ready, and send again what has no outcome, but for what the server has of it."""
        if not sim.attached:
            return
        sim.ready = True
        stored = {each.seq: each.parts for each in self.server.ledger.stored((sim.name, sim.incarnation))}
        sim.queue = [Abandon(seq=seq) for seq in stored.keys() - sim.open.keys()]
        for seq, sending in sorted(sim.open.items()):
            told = self.plan.number if self.pick(4) else None  # or there is a new one right after it is told
            sim.queue += sending.messages(stored.get(seq, ()), told)
        self.step(
            e.Prepared(
                worker=sim.name,
                incarnation=sim.incarnation,
                fingerprint=MODEL,
                version=sim.version,
                assigned=sim.assigned,
            )
        )
        self.tell_evaluation(sim)
        if sim.asking is not None:
            self.tell_asking(sim, sim.asking)

    def tell_evaluation(self, sim: Sim) -> None:
        """Once; if its stream is broken then, the next one begins with it."""
        if sim.report is None or not sim.attached:
            return
        self.step(
            e.EvaluationReported(
                worker=sim.name,
                incarnation=sim.incarnation,
                version=sim.report.version,
                epoch=sim.report.evaluate_epoch,
                metrics={"accuracy": 0.5},
            )
        )

    # ---- to the server

    def receive(self, stream: WorkerStream, message: Message) -> None:
        self.arrive(stream, message, lambda: self.hand_over(stream, message))

    def arrive(self, stream: WorkerStream, message: Message | PartHeader, taking: Callable[[], None]) -> None:
        """Have the server take in a message, and the worker its answers."""
        identity = (*stream.id, seq_of(message))
        before = self.state() if self.pick(16) == 0 else None  # which takes longer than all else
        known, done = self.outcomes.get(identity), (self.decided, self.begun, self.rated)
        member = self.core.state.roster.members.get(stream.worker)
        live = member is not None and member.incarnation == stream.incarnation
        remembered = member is not None and identity[2] > member.last_seq - OUTCOMES_PER_MEMBER
        outbox: Any = stream.outbox
        outbox.sent.clear()
        try:
            taking()
        except Refused as refused:
            if refused.refusal.reason not in NO_MEMBER:
                raise AssertionError(f"the stream ends: {refused}") from None
            self.end(stream)
            sim = self.sims.get(stream.worker)
            if sim is not None and sim.stream is stream:
                sim.attached = sim.ready = False
        if (self.decided, self.begun, self.rated) == done:
            self.unchanged(before)
        answers = [self.check_counted(stream, outcome) for outcome in outbox.sent]
        if isinstance(message, Commit) and known is not None and live and remembered:
            assert answers[:1] == [known], f"E: {identity} got {answers}, and first {known}"
            assert all(each.seq > known.seq for each in answers[1:]), "E: only later pushes follow"
        for outcome in answers:
            assert outcome.refusal is None or outcome.refusal.message, "a refusal says why"
            self.hear(stream, outcome)
        self.check_stored()

    def hand_over(self, stream: WorkerStream, message: Message) -> None:
        """Hand over a message like the reader of a stream. Nothing so small is waited for."""
        pushes = Pushes(self.server, stream)
        if isinstance(message, Commit):
            pushes.committed(message)
        elif isinstance(message, Abandon):
            pushes.abandoned(message)
        elif self.pick(6) == 0 and not message.damaged:  # as if it were large
            header, *chunks = message.messages()
            pushes._begin(header)  # pyright: ignore[reportPrivateUsage]
            if stream.arriving.header(part_transfer(header.seq, header.part)) is header:
                for chunk in chunks:
                    stream.arriving.add(chunk)
                complete = stream.arriving.take()
                assert complete is not None
                self.scans.append((stream, *complete))
        else:
            for each in message.messages():
                taking = pushes.take(each)
                try:
                    taking.send(None)
                except StopIteration:
                    continue
                raise AssertionError("a small part was waited for")

    def step(self, event: e.Event[Any]) -> list[Any]:
        try:
            result = self.decide(event)
        except Refused as refused:
            return [Refuse(refused.refusal)]
        self.take_in(result.actions)
        answer: Any = result.reply
        return [*([] if answer is None else [answer]), *result.actions]

    def take_in(self, actions: Sequence[Any]) -> None:
        self.perform(actions)
        if self.core.state.phase is Phase.RUNNING:
            # What is computed for rounds that have closed, when the last version is complete.
            works = [each.work for each in self.core.state.roster.members.values()]
            late = [work for work in works if work is not None and work.late]
            self.late = {sample for work in late for sample in samples_of(work.assignment)}
        for each in self.core.state.roster.members.values():
            assert len(each.outcomes) <= OUTCOMES_PER_MEMBER, "M"

    def perform(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case e.Adopt():
                    self.adopt(action)
                    self.tell_plan(action)
                case e.Open():
                    self.open_round(action)
                case e.MemberLost() | e.Substitute() | e.Exclude():
                    self.tell_shard(action)
                case e.Apply():
                    self.close_round(action)
                    assert self.pending is None, "applied two at a time"
                    ranks = [each.rank for each in action.contributions]
                    assert ranks == sorted(set(ranks)), "rank order"
                    self.shard.close_round()
                    self.pending = action, self.server.ledger.take(action)[0]
                    members = [sim for name in action.members if (sim := self.sims.get(name)) is not None]
                    self.growing = [(sim, sim.stream) for sim in members if sim.ready]
                case e.Drop():
                    self.shard.drop(action.key)
                case e.Assign():
                    self.assign(action)
                case e.LossReported():
                    worker = action.name[-2]
                    self.gone.add((self.core.state.version, worker))
                    self.given.get(self.core.state.version, set()).discard(worker)
                case e.Disconnect():
                    sim = self.sims.get(action.worker)
                    if sim is not None and sim.incarnation == action.incarnation:
                        sim.attached = sim.ready = False
                        if action.final:
                            del self.sims[action.worker]
                case _:
                    pass

    # ---- to the workers

    def hear(self, stream: WorkerStream, outcome: Outcome) -> None:
        """A worker gets an answer, unless it is lost on its way."""
        sim = self.sims.get(stream.worker)
        if sim is None or sim.stream is not stream or not sim.attached or self.pick(10) == 0:
            return
        sending = sim.open.get(outcome.seq)
        if sending is None:
            return
        if outcome.refusal is None or outcome.refusal.reason in (Reason.STALE, Reason.REDUNDANT):
            del sim.open[outcome.seq]
        elif outcome.refusal.reason in DAMAGED:
            sim.queue += sending.messages() if outcome.part is None else [sending.parts[outcome.part]]
        else:
            assert outcome.refusal.reason is Reason.NON_FINITE, outcome
            del sim.open[outcome.seq]
            if self.in_parts:  # as a worker of ours does: parts of it may be final
                del self.sims[sim.name]
                self.step(e.Left(worker=sim.name, incarnation=sim.incarnation, failed=True, reason="refused"))
                return
            sim.assignments.insert(0, sending.assignment)

    def assign(self, action: e.Assign) -> None:
        assignment = replace(action.assignment, parts=self.server.final_parts.asked(action.assignment.id))
        again = assignment.id in self.assignments
        assert again or assignment.version == self.core.state.version, "work is for the version that there is"
        self.ranges[assignment.id] = samples_of(assignment)
        self.assignments[assignment.id] = assignment
        works = assignment.ranges and assignment.id not in self.ended
        if works and (assignment.version, action.worker) not in self.gone:
            self.given.setdefault(assignment.version, set()).add(action.worker)
        sim = self.sims.get(action.worker)
        if sim is None or not sim.ready:
            return
        if self.pick(12) == 0:  # lost: its stream breaks
            sim.attached = sim.ready = False
            self.step(e.Detached(worker=sim.name, incarnation=sim.incarnation))
            return
        assert action.has == sim.version, "what it was sent is what it has"
        if self.pick(16) == 0:  # it arrives, at a replica that has drifted: the next stream wants a snapshot
            begun = assignment.id <= sim.assigned and assignment.id != sim.unread
            sim.unread = 0 if begun else assignment.id
            sim.assigned, sim.version = max(sim.assigned, assignment.id), None
            sim.attached = sim.ready = False
            self.step(e.Detached(worker=sim.name, incarnation=sim.incarnation))
            return
        sim.version, sim.finished = assignment.version, sim.finished or assignment.finished
        assert assignment.plan == self.plan.number, "D: work is for the plan that there is"
        sim.plan = self.plan
        if assignment.evaluate_epoch:
            if sim.report is not None and assignment.evaluate_epoch <= sim.report.evaluate_epoch:
                self.tell_evaluation(sim)
            elif sim.evaluation is None or assignment.evaluate_epoch > sim.evaluation.evaluate_epoch:
                sim.evaluation = assignment
        if sim.asking is not None and assignment.id >= sim.asking.assignment:
            self.answer_asked(sim, sim.asking, assignment)
        if assignment.ranges and (assignment.id > sim.assigned or assignment.id == sim.unread):
            sim.assignments.append(assignment)
        sim.unread = 0
        sim.assigned = max(sim.assigned, assignment.id)

    def tell_asking(self, sim: Sim, asking: e.MoreWanted) -> None:
        """A worker asks for further batches. Where its work is late or revoked, that ends it."""
        sim.asking = asking
        member = self.core.state.roster.members.get(sim.name)
        assert member is not None or not sim.attached
        present, revoked = (None, None) if member is None else (member.work, member.revoked)
        for work in (present if present is not None and present.late else None, revoked):
            if work is not None and work.id == asking.assignment:
                samples = samples_of(sim.assignments[0])
                self.answered.update(samples)
                self.excused.update(samples)
        refused = any(isinstance(action, Refuse) for action in self.step(asking))
        assert not refused or not sim.attached, "G: it may ask"

    @staticmethod
    def answer_asked(sim: Sim, asked: e.MoreWanted, assignment: Assignment) -> None:
        """A worker that asked for further batches gets an answer: some, none, or other work."""
        sim.asking = None
        if assignment.id == asked.assignment and (asked.steps or not assignment.exhausted):
            sim.assignments[0] = assignment
        else:
            sim.assignments.pop(0)

    def tell_plan(self, action: e.Adopt) -> None:
        """To those who can hear it, unless it is lost: then their streams break."""
        for worker, has in action.members.items():
            sim = self.sims.get(worker)
            if sim is None or not sim.ready:
                continue
            if self.pick(12) == 0:
                sim.attached = sim.ready = False
                self.step(e.Detached(worker=sim.name, incarnation=sim.incarnation))
                continue
            assert has == sim.version, "D: what it was sent is what it has"
            sim.version, sim.plan = action.version, self.plan
