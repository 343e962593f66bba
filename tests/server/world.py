"""A job to which anything may happen: the oracle sees it, and what the server makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from network import MODEL, Network, Pick
from oracle import LEASE_S
from pushes import bits, replica_bits, take
from simulated import (
    DIVIDED,
    LARGER,
    MANIFEST_OF,
    PLANS,
    RATE,
    Piece,
    Sending,
    Sim,
    computed,
    label,
    parts_of,
    seq_of,
    values,
)
from stepping import Refuse, copied, step

from gradwire.common.parts import arrange
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Abandon, Assignment, Commit, Decision, Phase
from gradwire.proto.transfer import digest
from gradwire.proto.wire import crc32c
from gradwire.server.calls.pushes import Pushes
from gradwire.server.job import events as e
from gradwire.server.job.modes.local_rounds import LocalRounds
from gradwire.server.shard.making import SteppedStore
from gradwire.server.streams.updates import Broadcast

NAMES = ("a", "b", "c", "d")


class World(Network):
    """One job. Every method is something that may happen; `act` chooses one by itself."""

    def __init__(
        self,
        pick: Pick,
        mode: str = "sync",
        *,
        epochs: int = 3,
        samples: int = 50,
        batch: int = 4,
        accumulates: bool = False,
        **rules: Any,
    ) -> None:
        super().__init__(
            pick, mode_of(mode), epochs=epochs, samples=samples, batch=batch, script=accumulates, **rules
        )
        self.accumulates = accumulates
        self.incarnations: Counter[str] = Counter()

    # ---- what may happen

    def act(self) -> None:
        """One of the things below, each with its own likelihood; sometimes a copy of the core goes on."""
        if self.pick(50) == 0:
            self.core = self.server.core = self.server.ledger.core = copied(self.core, self.given_mode)
        choices: list[tuple[int, Callable[[], None]]] = [
            (9, self.deliver), (6, self.compute), (5, self.publish), (3, self.come), (4, self.beat),
            (2, self.wait), (1, self.repeat), (1, self.damage), (1, self.break_stream), (2, self.evaluate),
            (1, self.reconnect), (1, self.push_nonsense), (2, self.scanned), (1, self.replan),
        ]  # fmt: skip
        if self.in_parts:
            choices.append((1, self.take_in_early))
        if self.pick(8) == 0:
            choices += [(1, self.crash), (1, self.leave), (1, self.jump), (1, self.hang)]
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
        if self.core.state.phase is not Phase.EMPTY:
            return
        manifest = Manifest(MANIFEST_OF, self.samples)
        options = parse_optimizer("sgd")
        self.store = SteppedStore(
            manifest,
            [np.zeros(spec.elements, np.float32) for spec in manifest.specs],
            "none",
            lambda parameters: Optimizer(options, parameters, RATE),
            plan=DIVIDED,
        )
        self.shard.hold(self.store)
        self.step(
            e.Initialized(
                worker=sim.name, incarnation=sim.incarnation, fingerprint=MODEL, train_samples=self.samples
            )
        )
        sim.version = 0

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
        """Deliver a part of the messages that are on their way."""
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
            self.arrive(stream, part, lambda: Pushes(self.server, stream)._store(*finish))  # pyright: ignore[reportPrivateUsage]

    def leave(self) -> None:
        if sim := self.any_sim():
            self.arrive_in_part(sim)
            if self.sims.pop(sim.name, None) is None:
                return
            self.gone.add((self.core.state.version, sim.name))
            self.given.get(self.core.state.version, set()).discard(sim.name)
            self.step(e.Left(worker=sim.name, incarnation=sim.incarnation, failed=False, reason="told to"))

    def compute(self) -> None:
        busy = [sim for sim in self.sims.values() if sim.assignments]
        if busy:
            self.answer(busy[self.pick(len(busy))])

    def answer(self, sim: Sim, *, faults: bool = True) -> None:
        """Push for the assignment; sometimes nothing came of the step, or it is given up, or is not valid."""
        if sim.asking is not None:
            return
        if self.accumulates and self.pick(2) and self.ask(sim):
            return
        assignment = sim.assignments.pop(0)
        # A step begins under the plan of its assignment, but for one that is begun once more.
        plan = self.plans[assignment.plan] if self.pick(4) else sim.plan
        sim.seq += 1
        given = assignment.batches or (len(computed(assignment)),)
        batches = 1 + self.pick(len(given)) if self.may_cut(assignment) else 0
        covered = sum(given[:batches]) or len(computed(assignment))
        samples = covered if self.pick(10) else 0
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
            batches=batches,
            steps=self.pick(3) if assignment.batches else 0,
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

    def may_cut(self, assignment: Assignment) -> bool:
        """Return True if a push for it may stand for fewer batches."""
        fixed = self.in_parts or self.core.mode.shares_samples
        return self.accumulates and not fixed and not assignment.exhausted

    def ask(self, sim: Sim) -> bool:
        """Its script goes on to the next batch without a step. Returns True if it waits for more."""
        assignment = sim.assignments[0]
        epoch_over = not self.core.state.samples.has_more_of(assignment.epoch)
        fixed = self.in_parts or self.core.mode.shares_samples
        if (
            assignment.exhausted
            or not sim.attached
            or not sim.ready
            or sim.queue
            or (fixed and not epoch_over)
        ):
            return False
        stepped = self.pick(2) if isinstance(self.core.mode, LocalRounds) else 0
        event = e.MoreWanted(
            worker=sim.name,
            incarnation=sim.incarnation,
            assignment=assignment.id,
            batches=max(1, len(assignment.batches)),
            wanted=1 + self.pick(2),
            steps=stepped,
        )
        self.tell_asking(sim, event)
        return True

    def deliver(self) -> None:
        """Some messages of a worker arrive."""
        for _ in range(1 + self.pick(4)):
            busy = [sim for sim in self.sims.values() if sim.queue and sim.attached]
            if busy:
                self.next_of(busy[self.pick(len(busy))])

    def next_of(self, sim: Sim) -> None:
        """Deliver the messages of one push in any order; a later push does not overtake it."""
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
                base_version=self.pick(self.core.state.version + 2),
                samples=10 * self.samples + self.pick(3),
            )
            before = self.state()
            actions = step(self.core, push, self.now)
            if any(isinstance(action, Refuse) for action in actions):
                self.unchanged(before)
            elif push.incarnation == sim.incarnation:  # refused as stale: it has used up a seq, as its own
                (outcome,) = [action.outcome for action in actions if isinstance(action, e.Decided)]
                assert outcome.decision is Decision.REFUSED
                sim.seq = push.seq
                claimed = self.ranges.get(push.assignment, [])
                self.answered.update(claimed)
                self.excused.update(claimed)  # it says that its residual has their gradient
                self.outcomes.setdefault((push.worker, push.incarnation, push.seq), outcome)
                self.take_in(actions)

    def replan(self) -> None:
        """Somebody wants the model divided otherwise."""
        if self.store is not None:
            options = PLANS if self.core.mode.shares_samples else [*PLANS, *LARGER]
            units, cuts = options[self.pick(len(options))]
            self.server.replan(arrange([1, 4, 1], units, cuts))

    def publish(self) -> None:
        """Publish the version whose apply has ended."""
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

    def beat(self) -> None:
        for sim in list(self.sims.values()):
            if sim.attached:
                self.step(e.KeepAlive(worker=sim.name, incarnation=sim.incarnation))

    def wait(self) -> None:
        self.now += 0.01 * (1 + self.pick(200))
        self.tick()

    def jump(self) -> None:
        """The server was asleep: every lease is over."""
        self.now += LEASE_S * (1 + self.pick(3))
        self.tick()

    def hang(self) -> None:
        """A training thread makes no progress, for longer than any limit; its stream is there."""
        sim = self.any_sim()
        if sim is not None and sim.attached:
            stalled_s = 100 * self.rules.progress_seconds
            self.step(e.KeepAlive(sim.name, sim.incarnation, activity="computing", stalled_s=stalled_s))
            self.tick()

    def tick(self) -> None:
        self.step(e.Tick())
        self.server.forget_gone()
        self.check_stored()

    def any_sim(self) -> Sim | None:
        return list(self.sims.values())[self.pick(len(self.sims))] if self.sims else None

    def take_in_early(self) -> None:
        """A worker has all parts of a version before the server has the last commit."""
        if len(self.final) == len(self.plan.parts) and self.pending is None and self.following:
            sim, stream = self.following[self.pick(len(self.following))]
            version = self.core.state.version + 1
            if sim.ready and sim.stream is stream and not sim.assignments and sim.version == version - 1:
                sim.version = version

    def finish(self) -> None:
        """No more faults: the job has to come to its end, with every sample accounted for."""
        start, self.accumulates = self.steps, False
        while self.core.state.phase is not Phase.FINISHED:
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
                while sim.assignments and sim.asking is None:
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
    """Return the mode of a setting."""
    return name.split()[0]
