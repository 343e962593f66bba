"""A job to which anything may happen: the oracle sees it, and what the server makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from oracle import LEASE_S, Local, Oracle
from pushes import bits, replica_bits, take
from simulated import (
    DIVIDED,
    LARGER,
    MANIFEST_OF,
    PLANS,
    RATE,
    Message,
    Piece,
    Sending,
    Sim,
    computed,
    label,
    parts_of,
    samples_of,
    seq_of,
    values,
)
from stepping import Refuse, copied, step

from gradwire.compressors import arrange
from gradwire.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Abandon, Commit, Decision, Outcome, Part, Phase, Unwanted
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.proto.transfer import Assembly, digest, part_transfer
from gradwire.proto.wire import crc32c
from gradwire.server.conductor import Conductor
from gradwire.server.exchange import NO_MEMBER, WorkerCall
from gradwire.server.job import events as e
from gradwire.server.job.roster import OUTCOMES_PER_MEMBER
from gradwire.server.metrics import Metrics
from gradwire.server.shard.inbox import Inbox
from gradwire.server.shard.store import Store
from gradwire.server.streams import WorkerStream
from gradwire.server.updates import Broadcast

MODEL = b"model"
METRICS = Metrics("none")
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK)
NAMES = ("a", "b", "c", "d")
Pick = Callable[[int], int]  # a number below the given one


def discard(message: bytes) -> None:
    """Of a plan: the world knows what each worker has."""


class Server(Conductor):
    """The shell of a world: control has its oracle, and what is to be done is done there."""

    def __init__(self, world: World, shard: Local) -> None:
        super().__init__(world.core, METRICS, shard=shard)
        self._world = world

    def decide(self, event: e.Event[Any]) -> e.Result[Any]:
        return self._world.decide(event)

    def perform(self, actions: Sequence[e.Action]) -> None:
        self._world.take_in(actions)

    def _work(self, work: Awaitable[None]) -> None:
        """The shard has no thread: it is done already."""

    def _update(self, stream: WorkerStream, version: int, has: int | None) -> None:
        """The world knows what each worker has."""


class World(Oracle):
    """One job. Every method is something that may happen; `act` chooses one by itself."""

    def __init__(
        self,
        pick: Pick,
        mode: str = "sync",
        *,
        epochs: int = 3,
        samples: int = 50,
        batch: int = 4,
        **rules: Any,
    ) -> None:
        super().__init__(mode_of(mode), epochs=epochs, samples=samples, batch=batch, **rules)
        self.pick = pick
        self.incarnations: Counter[str] = Counter()
        self.shard = Local(self)
        self.server = Server(self, self.shard)
        self.call = WorkerCall(self.server)
        self.scans: list[tuple[WorkerStream, Part, Assembly]] = []  # of parts that have come, while they run
        self.growing: list[tuple[Sim, WorkerStream | None]] = []  # whose update is on its way already

    # ---- what may happen

    def act(self) -> None:
        """One of the things below, each with its own likelihood; sometimes a copy of the core goes on."""
        if self.pick(50) == 0:
            self.core = self.server.core = copied(self.core, self.given_mode)
            self.call = WorkerCall(self.server)
        choices: list[tuple[int, Callable[[], None]]] = [
            (9, self.deliver), (6, self.compute), (5, self.publish), (3, self.come), (4, self.beat),
            (2, self.wait), (1, self.repeat), (1, self.damage), (1, self.break_stream), (2, self.evaluate),
            (1, self.reconnect), (1, self.push_nonsense), (2, self.scanned), (1, self.replan),
        ]  # fmt: skip
        if self.in_parts:
            choices.append((1, self.take_in_early))
        if self.pick(8) == 0:
            choices += [(1, self.crash), (1, self.leave), (1, self.jump)]
        at = self.pick(sum(weight for weight, _ in choices))
        for weight, happen in choices:
            if at < weight:
                happen()
                return
            at -= weight

    def come(self) -> None:
        """A worker starts, if it does not run."""
        name = NAMES[self.pick(len(NAMES))]
        if name in self.sims and self.pick(4):
            return
        self.incarnations[name] += 1
        sim = Sim(name=name, incarnation=self.incarnations[name])
        actions = self.step(e.Joined(worker=name, incarnation=sim.incarnation, compressor="none"))
        if any(isinstance(action, Refuse) for action in actions):
            return
        self.sims[name] = sim
        self.attach(sim)
        admits = [action for action in actions if isinstance(action, e.Admission)]
        if admits and admits[0].initialize:
            self.initialize(sim)
        self.prepare(sim)

    def initialize(self, sim: Sim) -> None:
        if self.core.phase is not Phase.EMPTY:
            return
        manifest = Manifest(MANIFEST_OF, self.samples)
        options = parse_optimizer("sgd")
        self.store = Store(
            manifest,
            [np.zeros(spec.elements, np.float32) for spec in manifest.specs],
            "none",
            lambda parameters: Optimizer(options, parameters, RATE),
            plan=DIVIDED,
        )
        self.shard.hold(self.store)
        self.step(
            e.Initialized(
                worker=sim.name,
                incarnation=sim.incarnation,
                fingerprint=MODEL,
                train_samples=self.samples,
            )
        )
        sim.version = 0

    def attach(self, sim: Sim) -> None:
        actions = self.step(e.Attached(worker=sim.name, incarnation=sim.incarnation))
        sim.attached = not any(isinstance(action, Refuse) for action in actions)
        sim.ready = False
        if sim.attached:
            if sim.stream is not None and sim.stream.outbox.ended_with is None:
                self.end(sim.stream)
            outbox: Any = SimpleNamespace(sent=[], ended_with=None, put=discard)
            stream = WorkerStream(sim.name, sim.incarnation, outbox, Inbox(sim.name))
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
        """What comes on it from now on can only be parts that were being scanned."""
        stream.outbox.ended_with = Refusal(reason=Reason.FENCED, message="another stream")

    def prepare(self, sim: Sim) -> None:
        """Say that it is ready, and send again what has no outcome, but for what the server has of it."""
        if not sim.attached:
            return
        sim.ready = True
        stored = {each.seq: each.parts for each in self.server.arrivals(sim.name, sim.incarnation).stored}
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

    def reconnect(self) -> None:
        away = [sim for sim in self.sims.values() if not sim.attached]
        if away:
            sim = away[self.pick(len(away))]
            self.attach(sim)
            self.prepare(sim)

    def break_stream(self) -> None:
        if sim := self.any_sim():
            self.arrive_in_part(sim)
            sim.attached = sim.ready = False
            self.step(e.Detached(worker=sim.name, incarnation=sim.incarnation))

    def crash(self) -> None:
        """The process is gone; some of what it sent still arrives. The server finds out later."""
        if sim := self.any_sim():
            self.arrive_in_part(sim)
            self.sims.pop(sim.name, None)
            self.step(e.Detached(worker=sim.name, incarnation=sim.incarnation))

    def arrive_in_part(self, sim: Sim) -> None:
        """So much of what is on its way still arrives."""
        if sim.attached:
            for _ in range(self.pick(len(sim.queue) + 1)):
                if sim.queue and sim.attached:
                    self.next_of(sim)
        sim.queue.clear()

    def scanned(self) -> None:
        """The scan of a part has come to its end, perhaps long after its stream has."""
        if self.scans:
            stream, part, assembly = self.scans.pop(self.pick(len(self.scans)))
            sim = self.sims.get(stream.worker)
            if sim is not None and sim.stream is not stream:
                self.end(stream)
            finish = (part, assembly.checksum, assembly.finish)
            self.arrive(stream, part, lambda: self.call._store(stream, *finish))  # pyright: ignore[reportPrivateUsage]

    def leave(self) -> None:
        if sim := self.any_sim():
            self.arrive_in_part(sim)
            if self.sims.pop(sim.name, None) is None:
                return
            self.gone.add((self.core.version, sim.name))
            self.given.get(self.core.version, set()).discard(sim.name)
            self.step(e.Left(worker=sim.name, incarnation=sim.incarnation, failed=False, reason="told to"))

    def compute(self) -> None:
        busy = [sim for sim in self.sims.values() if sim.assignments]
        if busy:
            self.answer(busy[self.pick(len(busy))])

    def answer(self, sim: Sim, *, faults: bool = True) -> None:
        """Push for the assignment; sometimes nothing came of the step, or it is given up, or is not valid."""
        assignment = sim.assignments.pop(0)
        # A step begins under the plan of its assignment, but for one that is begun once more.
        plan = self.plans[assignment.plan] if self.pick(4) else sim.plan
        sim.seq += 1
        samples = len(computed(assignment)) if self.pick(10) else 0
        parts: dict[int, Piece] = {}
        if samples:
            gradient = values(f"{sim.name}/{sim.incarnation}/{sim.seq}").tolist()
            for part in sorted(parts_of(assignment, plan)):
                bounds = plan.parts[part]
                whole = tuple(gradient[bounds.start : bounds.end])
                parts[part] = Piece(sim.seq, assignment.id, plan.number, part, whole)
        if self.in_parts and parts and self.pick(6) == 0:  # what is not finite came late: the rest is empty
            for part in list(parts)[1 + self.pick(len(parts)) :]:
                parts[part] = replace(parts[part], values=())
        fault = self.pick(12) if faults else -1
        if fault == 0 and parts:
            part = list(parts)[self.pick(len(parts))]
            parts[part] = replace(parts[part], values=tuple(float("nan") for _ in parts[part].values))
        checksums = {part: crc32c(piece.data) for part, piece in parts.items()}
        commit = Commit(
            seq=sim.seq,
            assignment=assignment.id,
            base_version=assignment.version,
            samples=samples,
            loss=1.0 + self.pick(100) / 100,
            parts=len(parts),
            digest=digest(checksums),
            plan=plan.number if parts else 0,
            computing_seconds=sim.seq % 7 / 10,
        )
        sending = Sending(assignment, parts, commit)
        messages = sending.messages()
        if fault == 1:
            sent = 0 if self.in_parts else self.pick(len(messages))  # what has left may be final
            messages = [*messages[:sent], Abandon(seq=sim.seq)]
            sim.assignments.insert(0, assignment)  # to be answered by the next push
        else:
            sim.open[sim.seq] = sending
        if sim.attached:
            if fault == 2 and parts:  # its commit is not of what it sent, and then comes once more
                messages[-1] = replace(commit, digest=commit.digest ^ 1)
            sim.queue += messages

    def deliver(self) -> None:
        """Some messages of a worker arrive."""
        for _ in range(1 + self.pick(4)):
            busy = [sim for sim in self.sims.values() if sim.queue and sim.attached]
            if busy:
                self.next_of(busy[self.pick(len(busy))])

    def next_of(self, sim: Sim) -> None:
        """Of one push any message comes first; a later push does not overtake it."""
        same = 1
        while same < len(sim.queue) and seq_of(sim.queue[same]) == seq_of(sim.queue[0]):
            same += 1
        message = sim.queue.pop(self.pick(same))
        sim.arrived.append(message)
        assert sim.stream is not None
        self.receive(sim.stream, message)

    def repeat(self) -> None:
        """A copy of anything that ever arrived arrives."""
        senders = [sim for sim in self.sims.values() if sim.arrived and sim.stream is not None]
        if senders:
            sim = senders[self.pick(len(senders))]
            assert sim.stream is not None
            self.receive(sim.stream, sim.arrived[self.pick(len(sim.arrived))])

    def damage(self) -> None:
        """A part is changed on its way."""
        for sim in self.sims.values():
            for place, message in enumerate(sim.queue):
                if isinstance(message, Piece) and message.values and self.pick(3) == 0:
                    sim.queue[place] = replace(message, damaged=True)
                    return

    def push_nonsense(self) -> None:
        """A push that no worker of ours would send."""
        sim = self.any_sim()
        if sim is not None and not sim.open:
            push = e.Pushed(
                worker=sim.name,
                incarnation=sim.incarnation - self.pick(2),
                seq=sim.seq + 1 + self.pick(3),
                assignment=sim.assigned,
                base_version=self.pick(self.core.version + 2),
                samples=self.rules.batch_size * 10 + self.pick(3),
            )
            before = self.state()
            actions = step(self.core, push, self.now)
            if any(isinstance(action, Refuse) for action in actions):
                self.unchanged(before)
            elif push.incarnation == sim.incarnation:  # refused as stale: it has used up a seq, as its own
                (outcome,) = [action.outcome for action in actions if isinstance(action, e.Decided)]
                assert outcome.decision is Decision.REFUSED
                sim.seq = push.seq
                self.answered.update(self.ranges.get(push.assignment, []))
                self.outcomes.setdefault((push.worker, push.incarnation, push.seq), outcome)
                self.take_in(actions)

    def replan(self) -> None:
        """Somebody wants the model divided otherwise."""
        if self.store is not None:
            options = PLANS if self.core.mode.shares_samples else [*PLANS, *LARGER]
            units, cuts = options[self.pick(len(options))]
            self.server.replan(arrange([1, 4, 1], units, cuts))

    def publish(self) -> None:
        """What was to be applied has been."""
        if self.pending is None:
            return
        (apply, pushes), self.pending = self.pending, None
        assert self.store is not None
        for each, push in zip(apply.contributions, pushes, strict=True):
            given = self.pushes[label(each.key)]
            wanted: frozenset[int] = (
                parts_of(self.assignments[given.assignment], self.plan) if given.samples else frozenset()
            )
            assert push.keys() == wanted, f"P: {each.key} is applied with parts {sorted(push)}"
        self.applied_parts = {
            label(each.key): {part: bool(payloads) for part, payloads in push.items()}
            for each, push in zip(apply.contributions, pushes, strict=True)
        }
        sent, self.sent = self.sent, []
        self.store.apply(apply, pushes, sent.append)
        assert len(sent) == len(self.plan.parts)
        if self.replica is not None:
            self.complete_parts(apply)
            update = Broadcast(apply.version)
            update.finish(sent)
            take(self.replica, update)
            assert b"".join(bits(self.replica)) == b"".join(replica_bits(self.store)), (
                "B: the replicas differ"
            )
        self.check_applied(apply)
        for sim, stream in self.growing:
            if sim.attached and sim.stream is stream:
                sim.version = apply.version
        self.growing = []
        self.step(e.Published(version=apply.version))

    def evaluate(self) -> None:
        evaluators = [sim for sim in self.sims.values() if sim.evaluation is not None]
        if evaluators:
            sim = evaluators[self.pick(len(evaluators))]
            sim.report, sim.evaluation = sim.evaluation, None
            self.tell_evaluation(sim)

    def tell_evaluation(self, sim: Sim) -> None:
        """Once; if its stream is broken then, the next one begins with it."""
        if sim.report is None or not sim.attached:
            return
        self.step(
            e.Evaluated(
                worker=sim.name,
                incarnation=sim.incarnation,
                version=sim.report.version,
                epoch=sim.report.evaluate_epoch,
                metrics={"accuracy": 0.5},
            )
        )

    def beat(self) -> None:
        for sim in list(self.sims.values()):
            if sim.attached:
                self.step(e.Heard(worker=sim.name, incarnation=sim.incarnation))

    def wait(self) -> None:
        self.now += 0.01 * (1 + self.pick(200))
        self.tick()

    def jump(self) -> None:
        """The server was asleep: every lease is over."""
        self.now += LEASE_S * (1 + self.pick(3))
        self.tick()

    def tick(self) -> None:
        self.step(e.Tick())
        self.server._forget_arrivals()  # pyright: ignore[reportPrivateUsage]
        self.check_stored()

    def any_sim(self) -> Sim | None:
        return list(self.sims.values())[self.pick(len(self.sims))] if self.sims else None

    def take_in_early(self) -> None:
        """A worker has all parts of a version before the server has the last commit."""
        if len(self.final) == len(self.plan.parts) and self.pending is None and self.following:
            sim, stream = self.following[self.pick(len(self.following))]
            version = self.core.version + 1
            if sim.ready and sim.stream is stream and not sim.assignments and sim.version == version - 1:
                sim.version = version

    # ---- the server, and what it sends

    def receive(self, stream: WorkerStream, message: Message) -> None:
        self.arrive(stream, message, lambda: self.hand_over(stream, message))

    def arrive(self, stream: WorkerStream, message: Message | Part, taking: Callable[[], None]) -> None:
        """Have the server take in a message, and the worker its answers."""
        identity = (*stream.id, seq_of(message))
        before = self.state() if self.pick(16) == 0 else None  # which takes longer than all else
        known, done = self.outcomes.get(identity), (self.decided, self.begun, self.rated)
        member = self.core.roster.members.get(stream.worker)
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
            assert answers == [known], f"E: {identity} got {answers}, and first {known}"
        for outcome in answers:
            assert outcome.refusal is None or outcome.refusal.message, "a refusal says why"
            self.hear(stream, outcome)
        self.check_stored()

    def hand_over(self, stream: WorkerStream, message: Message) -> None:
        """As the reader of a stream does. Nothing so small is waited for."""
        if isinstance(message, Commit):
            self.call._committed(stream, message)  # pyright: ignore[reportPrivateUsage]
        elif isinstance(message, Abandon):
            self.call._abandoned(stream, message)  # pyright: ignore[reportPrivateUsage]
        elif self.pick(6) == 0 and not message.damaged:  # as if it were large
            header, *chunks = message.messages()
            self.call._begin(stream, header)  # pyright: ignore[reportPrivateUsage]
            if stream.inbox.arriving(part_transfer(header.seq, header.part)) is header:
                for chunk in chunks:
                    stream.inbox.add(chunk)
                complete = stream.inbox.take()
                assert complete is not None
                self.scans.append((stream, *complete))
        else:
            for each in message.messages():
                taking = self.call._take(stream, each)  # pyright: ignore[reportPrivateUsage]
                try:
                    taking.send(None)
                except StopIteration:
                    continue
                raise AssertionError("a small part was waited for")

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
        if self.core.phase is Phase.RUNNING:
            # What is computed for rounds that have closed, when the last version is complete.
            works = [each.work for each in self.core.roster.members.values()]
            late = [work for work in works if work is not None and work.late]
            self.late = {sample for work in late for sample in samples_of(work.assignment)}
        for each in self.core.roster.members.values():
            assert len(each.outcomes) <= OUTCOMES_PER_MEMBER, "M"

    def perform(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case e.Adopt():
                    self.adopt(action)
                    self.tell_plan(action)
                case e.Open():
                    self.open_round(action)
                case e.Vacate() | e.Refill() | e.Without():
                    self.tell_shard(action)
                case e.Apply():
                    self.close_round(action)
                    assert self.pending is None, "applied two at a time"
                    ranks = [each.rank for each in action.contributions]
                    assert ranks == sorted(set(ranks)), "rank order"
                    self.pending = action, self.shard.take(action)
                    members = [sim for name in action.members if (sim := self.sims.get(name)) is not None]
                    self.growing = [(sim, sim.stream) for sim in members if sim.ready]
                    self.server.give_up_late()
                case e.Drop():
                    self.shard.drop(action.key)
                case e.Assign():
                    self.assign(action)
                case e.Lost():
                    worker = action.name[-2]
                    self.gone.add((self.core.version, worker))
                    self.given.get(self.core.version, set()).discard(worker)
                case e.Disconnect():
                    sim = self.sims.get(action.worker)
                    if sim is not None and sim.incarnation == action.incarnation:
                        sim.attached = sim.ready = False
                        if action.final:
                            del self.sims[action.worker]
                case _:
                    pass

    def assign(self, action: e.Assign) -> None:
        assignment = replace(action.assignment, parts=self.shard.asked(action.assignment.id))
        assert assignment.version == self.core.version, "work is for the version that there is"
        self.ranges[assignment.id] = samples_of(assignment)
        self.assignments[assignment.id] = assignment
        if assignment.ranges and (assignment.version, action.worker) not in self.gone:
            self.given.setdefault(assignment.version, set()).add(action.worker)
        sim = self.sims.get(action.worker)
        if sim is None or not sim.ready:
            return
        if self.pick(12) == 0:  # lost: its stream breaks
            sim.attached = sim.ready = False
            self.step(e.Detached(worker=sim.name, incarnation=sim.incarnation))
            return
        assert action.has == sim.version, "what it was sent is what it has"
        sim.version, sim.finished = assignment.version, sim.finished or assignment.finished
        assert assignment.plan == self.plan.number, "D: work is for the plan that there is"
        sim.plan = self.plan
        if assignment.evaluate_epoch:
            if sim.report is not None and assignment.evaluate_epoch <= sim.report.evaluate_epoch:
                self.tell_evaluation(sim)
            elif sim.evaluation is None or assignment.evaluate_epoch > sim.evaluation.evaluate_epoch:
                sim.evaluation = assignment
        if assignment.id > sim.assigned and assignment.ranges:
            sim.assignments.append(assignment)
        sim.assigned = max(sim.assigned, assignment.id)

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

    def finish(self) -> None:
        """No more faults: the job has to come to its end, with every sample accounted for."""
        start = self.steps
        while self.core.phase is not Phase.FINISHED:
            assert self.steps - start < 20_000, f"L: no end in sight, {self.core.waiting(self.now)}"
            self.publish()
            while self.scans:
                self.scanned()
            for sim in list(self.sims.values()):
                if not sim.attached:
                    self.attach(sim)
                    self.prepare(sim)
            if sum(sim.ready for sim in self.sims.values()) < self.rules.min_workers:
                self.come()
            for sim in list(self.sims.values()):
                while sim.assignments:
                    self.answer(sim, faults=False)
                # In the order of seq: what had no answer goes out again.
                given_up = [each for each in sim.queue if isinstance(each, Abandon)]
                again = [message for sending in sim.open.values() for message in sending.messages()]
                sim.queue = [*given_up, *again]
                while sim.queue and sim.attached:
                    self.next_of(sim)
            self.evaluate()
            self.beat()
            self.wait()
        self.check_end()


def mode_of(name: str) -> str:
    """Of a setting."""
    return name.split()[0]
