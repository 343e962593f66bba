"""Random histories of a job: the real state machine and store, workers that do anything, and an oracle.

Workers join, leave, crash and come back; their streams break; messages are lost, doubled and overtake each
other by any time; the clock jumps. After every step the oracle checks what must always hold:

    E  every acknowledged push is applied exactly once, in the version that its outcome named; a duplicate
       gets the first outcome; the parameters are, bit for bit, what mean and SGD make of the applied log
    S  in stale mode no applied push is more clocks behind the newest one than the bound
    F  the parameters stay finite
    N  what is refused changes nothing but the lease of the worker it came from
    M  what is remembered of a worker is bounded
    L  once faults stop, the job finishes; no sample of any epoch has been lost, none applied twice
    C  where members share samples, the weights of what is applied add up, for each sample and each slice, to
       its part of the mean: what slices and codes make of the pushes is the mean, and each sample is in one

As a program it runs as many steps as it is told to, over all modes:

    python tests/server/histories.py --steps 10000000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from stepping import Refuse, copied, core_of, state, step

from gradwire.compressors import DenseFormat, DensePayload
from gradwire.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Assignment, Decision, Outcome, Phase, Tensor
from gradwire.proto.refusal import Reason
from gradwire.proto.shares import share
from gradwire.server.job import events as e
from gradwire.server.job.modes.arrivals import Arrivals
from gradwire.server.job.modes.registry import parse
from gradwire.server.job.modes.rounds import Rounds
from gradwire.server.job.modes.stale import StaleOptions
from gradwire.server.job.roster import OUTCOMES_PER_MEMBER
from gradwire.server.shard.store import Store
from gradwire.worker.tasks.sharding import coded_parts

LEASE_S = 10.0
MODEL = b"model"
ELEMENTS = 3
RATE = 0.01
NAMES = ("a", "b", "c", "d")
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync:backup=1": {"min_workers": 2},
    "sync:redundancy=2": {"min_workers": 2},
    "sync:redundancy=4": {},
    "sync:stragglers=1": {"min_workers": 2},
    "sync:stragglers=2": {"min_workers": 3},
    "stale:bound=0": {},
    "stale:bound=2": {},
    "async:rate=inverse": {},
    "async:compensation=0.1": {},
    "local:first=2,most=3": {},
}

Pick = Callable[[int], int]  # a number below the given one


@dataclass(kw_only=True, slots=True)
class Sim:
    """A worker: what it knows, which may be less than what the server has sent."""

    name: str
    incarnation: int
    attached: bool = False
    ready: bool = False
    version: int | None = None
    assigned: int = 0
    assignments: list[Assignment] = field(default_factory=list[Assignment])  # still to be answered
    seq: int = 0
    open: dict[int, e.Pushed] = field(default_factory=dict[int, e.Pushed])  # pushes without an outcome
    sent: list[e.Pushed] = field(default_factory=list[e.Pushed])
    evaluation: Assignment | None = None  # still to be done
    report: Assignment | None = None  # the last one done, told again on every new stream
    finished: bool = False


class World:
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
        self.pick = pick
        self.core = core_of(mode, batch_size=batch, epochs=epochs, lease_seconds=LEASE_S, **rules)
        self.given_mode, self.rules = mode, self.core.rules
        options = parse(mode)
        # In clocks, as it was asked for: what the mode makes of it is what is tested.
        self.bound = options.bound if isinstance(options, StaleOptions) else None
        self.now = 0.0
        self.samples, self.epochs = samples, epochs
        self.sims: dict[str, Sim] = {}
        self.incarnations: Counter[str] = Counter()
        self.wire: list[e.Pushed] = []  # on its way, in no order
        self.pending: e.Apply | None = None
        self.outcomes: dict[tuple[str, int, int], Outcome] = {}
        self.accepted: dict[str, int] = {}  # label -> version that was named
        self.applied: dict[str, int] = {}
        self.covered: Counter[tuple[int, int]] = Counter()  # (epoch, sample) in accepted pushes
        self.answered: Counter[tuple[int, int]] = Counter()  # in those that were decided on at all
        self.ranges: dict[int, list[tuple[int, int]]] = {}  # by assignment
        self.assignments: dict[int, Assignment] = {}
        self.elements: Counter[tuple[tuple[int, int], int]] = (
            Counter()
        )  # (sample, element) in what is applied
        self.excused: set[tuple[int, int]] = set()  # nothing came of their step, or it is in a residual
        self.pushes: dict[str, e.Pushed] = {}
        self.given: dict[int, set[str]] = {}  # by version, who was given samples and has not been lost since
        self.gone: set[tuple[int, str]] = set()  # (version, worker) of those that have
        self.late: set[tuple[int, int]] = set()
        self.newest_clock = -1
        self.steps = 0
        self.store: Store | None = None
        self.expected = np.zeros(ELEMENTS, np.float32)

    # ---- what may happen

    def act(self) -> None:
        """One of the things below, each with its own likelihood; sometimes a copy of the core goes on."""
        if self.pick(50) == 0:
            self.core = copied(self.core, self.given_mode)
        choices: list[tuple[int, Callable[[], None]]] = [
            (6, self.deliver), (6, self.compute), (5, self.publish), (3, self.come), (4, self.beat),
            (2, self.wait), (1, self.repeat), (1, self.lose), (1, self.break_stream), (2, self.evaluate),
            (1, self.reconnect), (1, self.push_nonsense),
        ]  # fmt: skip
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
        manifest = Manifest((Tensor(name="w", shape=(ELEMENTS,), dtype="float32"),), self.samples)
        options = parse_optimizer("sgd")
        self.store = Store(
            manifest,
            [np.zeros(ELEMENTS, np.float32)],
            "none",
            lambda parameters: Optimizer(options, parameters, RATE),
        )
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

    def prepare(self, sim: Sim) -> None:
        """Say that it is ready, and send again what has no outcome."""
        if not sim.attached:
            return
        sim.ready = True
        self.wire += sim.open.values()
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
            sim.attached = sim.ready = False
            self.step(e.Detached(worker=sim.name, incarnation=sim.incarnation))

    def crash(self) -> None:
        """The process is gone; what it sent may still arrive. The server finds out later."""
        if sim := self.any_sim():
            del self.sims[sim.name]
            self.step(e.Detached(worker=sim.name, incarnation=sim.incarnation))

    def leave(self) -> None:
        if sim := self.any_sim():
            del self.sims[sim.name]
            self.gone.add((self.core.version, sim.name))
            self.given.get(self.core.version, set()).discard(sim.name)
            self.step(e.Left(worker=sim.name, incarnation=sim.incarnation, failed=False, reason="told to"))

    def compute(self) -> None:
        busy = [sim for sim in self.sims.values() if sim.assignments]
        if busy:
            self.answer(busy[self.pick(len(busy))])

    def answer(self, sim: Sim) -> None:
        """Push for the assignment; sometimes nothing came of the step."""
        assignment = sim.assignments.pop(0)
        sim.seq += 1
        samples = len(computed(assignment)) if self.pick(10) else 0
        push = e.Pushed(
            worker=sim.name,
            incarnation=sim.incarnation,
            seq=sim.seq,
            assignment=assignment.id,
            base_version=assignment.version,
            samples=samples,
            loss=1.0 + self.pick(100) / 100,
            slice=assignment.slice,
            slices=assignment.slices,
        )
        self.pushes[label(push.key)] = push
        sim.open[sim.seq] = push
        sim.sent.append(push)
        if sim.attached:
            self.wire.append(push)

    def deliver(self) -> None:
        """Some message arrives, not necessarily the oldest."""
        if self.wire:
            self.arrive(self.wire.pop(self.pick(len(self.wire))))

    def repeat(self) -> None:
        """A copy of anything ever sent arrives."""
        senders = [sim for sim in self.sims.values() if sim.sent]
        if senders:
            sent = senders[self.pick(len(senders))].sent
            self.arrive(sent[self.pick(len(sent))])

    def lose(self) -> None:
        if self.wire:
            self.wire.pop(self.pick(len(self.wire)))

    def push_nonsense(self) -> None:
        """A push that no worker of ours would send."""
        if sim := self.any_sim():
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
            else:  # refused as stale: it has used up a seq, as a push of the worker's own
                (outcome,) = [action.outcome for action in actions if isinstance(action, e.Decided)]
                assert outcome.decision is Decision.REFUSED
                sim.seq = push.seq
                self.answered.update(self.ranges.get(push.assignment, []))
                self.outcomes.setdefault((push.worker, push.incarnation, push.seq), outcome)
                self.take_in(actions)

    def publish(self) -> None:
        """What was to be applied has been."""
        apply = self.pending
        if apply is None:
            return
        self.pending = None
        assert self.store is not None
        self.store.apply(apply, [[payload(each)] for each in apply.contributions])
        self.check_applied(apply)
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
        self.step(e.Tick())

    def jump(self) -> None:
        """The server was asleep: every lease is over."""
        self.now += LEASE_S * (1 + self.pick(3))
        self.step(e.Tick())

    def any_sim(self) -> Sim | None:
        return list(self.sims.values())[self.pick(len(self.sims))] if self.sims else None

    # ---- the server, and what it sends

    def arrive(self, push: e.Pushed) -> None:
        identity = (push.worker, push.incarnation, push.seq)
        before = self.state() if self.pick(4) == 0 else None  # which takes longer than all else
        member = self.core.roster.members.get(push.worker)
        live = member is not None and member.incarnation == push.incarnation
        remembered = live and push.seq > member.last_seq - OUTCOMES_PER_MEMBER if member else False
        actions = self.step(push)
        answers = [action.outcome for action in actions if isinstance(action, e.Decided)]
        if not answers:
            self.unchanged(before)
            assert not (remembered and identity in self.outcomes), (
                f"E: the outcome of {identity} is forgotten"
            )
            refused = next(action.refusal for action in actions if isinstance(action, Refuse))
            assert refused.message, "a refusal says why"
            return
        (outcome,) = answers
        first = self.outcomes.setdefault(identity, outcome)
        assert outcome == first, f"E: a duplicate of {identity} got {outcome}, the first one {first}"
        sim = self.sims.get(push.worker)
        if sim is not None and sim.incarnation == push.incarnation and sim.attached and self.pick(10):
            sim.open.pop(push.seq, None)  # otherwise the answer is lost on its way

    def step(self, event: e.Event[Any]) -> list[Any]:
        push = event if isinstance(event, e.Pushed) else None
        accepted = self.core.accepted_pushes
        decided = accepted + self.core.stale_pushes
        member = self.core.roster.members.get(push.worker) if push else None
        clock = member.clock if member is not None else None
        actions: list[Any] = step(self.core, event, self.now)
        self.steps += 1
        if push is not None and self.core.accepted_pushes + self.core.stale_pushes > decided:
            samples = self.ranges.get(push.assignment, [])
            self.answered.update(samples)
            (answer,) = [action.outcome for action in actions if isinstance(action, e.Decided)]
            redundant = answer.refusal is not None and answer.refusal.reason is Reason.REDUNDANT
            if not redundant and (answer.refusal is not None or not push.samples):
                self.excused.update(samples)
            if self.core.accepted_pushes > accepted:
                name = label(push.key)
                assert name not in self.accepted, f"E: {name} was accepted twice"
                (outcome,) = [action.outcome for action in actions if isinstance(action, e.Decided)]
                self.accepted[name] = outcome.version
                if not self.core.mode.shares_samples:
                    self.covered.update(samples)
                bound = self.bound
                if clock is not None and bound is not None:
                    behind = self.newest_clock - clock
                    assert behind <= bound, f"S: {name} is {behind} clocks behind"
                    self.newest_clock = max(self.newest_clock, clock)
        self.take_in(actions)
        if self.core.phase is Phase.RUNNING:
            # What is computed for rounds that have closed, when the last version is complete.
            works = [each.work for each in self.core.roster.members.values()]
            late = [work for work in works if work is not None and work.late]
            self.late = {sample for work in late for sample in samples_of(work.assignment)}
        for each in self.core.roster.members.values():
            assert len(each.outcomes) <= OUTCOMES_PER_MEMBER, "M"
        return actions

    def take_in(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case e.Apply():
                    assert self.pending is None, "applied two at a time"
                    ranks = [each.rank for each in action.contributions]
                    assert ranks == sorted(set(ranks)), "rank order"
                    self.pending = action
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
        assignment = action.assignment
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
        if assignment.evaluate_epoch:
            if sim.report is not None and assignment.evaluate_epoch <= sim.report.evaluate_epoch:
                self.tell_evaluation(sim)
            elif sim.evaluation is None or assignment.evaluate_epoch > sim.evaluation.evaluate_epoch:
                sim.evaluation = assignment
        if assignment.id > sim.assigned and assignment.ranges:
            sim.assignments.append(assignment)
        sim.assigned = max(sim.assigned, assignment.id)

    # ---- the oracle

    def state(self) -> Any:
        return state(self.core)

    def unchanged(self, before: Any) -> None:
        assert before is None or self.state() == before, "N: a refused input changed the state"

    def check_applied(self, apply: e.Apply) -> None:
        """Against a plain mean, in the order of the ranks, every product and sum in float32, and SGD."""
        self.check_members(apply)
        given = [each for each in apply.contributions if each.samples and each.weight != 0]
        gradient = np.zeros(ELEMENTS, np.float32)
        for each in given:
            total = sum(other.samples for other in given if other.slice == each.slice)
            weight = each.samples / total * apply.weight if each.weight is None else each.weight
            start, end = share(ELEMENTS, each.slice, max(1, each.slices))
            gradient[start:end] += np.float32(weight) * values(label(each.key))[start:end]
        if self.core.mode.shares_samples:
            self.check_shared(given)
        if given:
            torch.from_numpy(self.expected).add_(torch.from_numpy(gradient), alpha=-RATE * apply.rate_factor)
        for each in apply.contributions:
            name = label(each.key)
            assert name not in self.applied, f"E: {name} was applied twice"
            assert self.accepted.get(name) == apply.version, f"E: {name} is in another version than was said"
            self.applied[name] = apply.version
        assert self.store is not None
        (parameters,) = self.store.values()
        assert parameters.tobytes() == self.expected.tobytes(), "E: the parameters are not those of the log"
        assert np.isfinite(self.expected).all(), "F"

    def check_shared(self, given: Sequence[e.Contribution]) -> None:
        """C: what each sample's gradient comes to in each slice."""
        slices = max((each.slices for each in given), default=0)
        for slice in range(max(1, slices)):
            pushes = [each for each in given if each.slice == slice]
            assigned = {
                label(each.key): self.assignments[self.pushes[label(each.key)].assignment] for each in pushes
            }
            comes_to: defaultdict[tuple[int, int], float] = defaultdict(float)
            total = sum(each.samples for each in pushes)
            for each in pushes:
                assignment = assigned[label(each.key)]
                weight = each.samples / total if each.weight is None else each.weight
                for sample, part in zip(*coefficients(assignment), strict=True):
                    comes_to[sample] += weight * part
            expected = 1 / len(comes_to) if comes_to else 0.0
            for sample, weight in comes_to.items():
                assert abs(weight - expected) < 1e-9, f"C: {sample} weighs {weight}, not {expected}"
            start, end = share(ELEMENTS, slice, max(1, slices))
            for sample in comes_to:
                for element in range(start, end):
                    self.elements[sample, element] += 1
                    assert self.elements[sample, element] == 1, f"C: {sample} is applied twice"

    def check_members(self, apply: e.Apply) -> None:
        """In rounds, that it has everybody who was given work for it and is still there, but for backups; by
        arrival, that it weighs what it should."""
        assert apply.rate_factor == 1.0
        if isinstance(self.core.mode, Arrivals):
            (contribution,) = apply.contributions
            push = self.pushes[label(contribution.key)]
            assert apply.base_version == push.base_version
            weight = 1 / max(1, apply.version - 1 - push.base_version) if self.core.mode.inverse else 1.0
            assert apply.weight == weight or self.bound is not None  # where a slow worker's share is less
            return
        assert apply.weight == 1.0
        if self.core.mode.shares_samples:
            return
        names = {label(each.key).split("/")[0] for each in apply.contributions}
        missing = self.given.get(apply.version - 1, set()) - names
        assert isinstance(self.core.mode, Rounds)
        backup = self.core.mode.wanted.backup
        assert len(missing) <= backup, f"version {apply.version} did not wait for {missing}"

    def finish(self) -> None:
        """No more faults: the job has to come to its end, with every sample accounted for."""
        start = self.steps
        while self.core.phase is not Phase.FINISHED:
            assert self.steps - start < 20_000, f"L: no end in sight, {self.core.waiting(self.now)}"
            self.publish()
            for sim in list(self.sims.values()):
                if not sim.attached:
                    self.attach(sim)
                    self.prepare(sim)
            if sum(sim.ready for sim in self.sims.values()) < self.rules.min_workers:
                self.come()
            for sim in list(self.sims.values()):
                while sim.assignments:
                    self.answer(sim)
            # In the order of seq, as a worker sends again what came behind something that was lost.
            self.wire = [push for sim in self.sims.values() for push in sim.open.values()]
            while self.wire:
                self.arrive(self.wire.pop(0))
            self.evaluate()
            self.beat()
            self.wait()
        self.check_end()

    def check_end(self) -> None:
        for epoch in range(self.epochs):
            for index in range(self.samples):
                sample = (epoch, index)
                assert self.covered[sample] <= 1, f"{sample} was accepted from two workers"
                assert self.answered[sample] or sample in self.late, f"{sample} was lost"
                if self.core.mode.shares_samples and sample not in self.excused | self.late:
                    found = [self.elements[sample, element] for element in range(ELEMENTS)]
                    assert found == [1] * ELEMENTS, f"C: {sample} was lost: {found}"
        assert set(self.applied) == set(self.accepted), "E: acknowledged, but not applied"
        evaluated = [each.epoch for each in self.core.evaluations.done]
        assert evaluated == sorted(set(evaluated))
        assert not self.core.roster.members or evaluated[-1] == self.epochs, "the end is evaluated"


def samples_of(assignment: Assignment) -> list[tuple[int, int]]:
    """As (epoch, place in its order)."""
    return [(assignment.epoch, each.start + i) for each in assignment.ranges for i in range(each.count)]


def computed(assignment: Assignment) -> list[tuple[int, int]]:
    """The samples behind a push for it."""
    return list(coefficients(assignment)[0])


def coefficients(assignment: Assignment) -> tuple[list[tuple[int, int]], list[float]]:
    """The samples behind a push for it, and what the gradient of each counts in the push."""
    samples = samples_of(assignment)
    if not assignment.stragglers:
        return samples, [1 / len(samples)] * len(samples) if samples else []
    order = np.arange(len(samples))
    parts = coded_parts(order, assignment)
    places: list[int] = [place for part in parts for place in part.indices.tolist()]
    chosen = [samples[place] for place in places]
    return chosen, [part.weight / len(part.indices) for part in parts for _ in part.indices]


def label(key: e.PushKey) -> str:
    return "/".join(map(str, key))


def values(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The gradient of a push: anything, as long as it is always the same."""
    return np.random.default_rng(list(name.encode())).standard_normal(ELEMENTS).astype(np.float32)


def payload(given: e.Contribution) -> DensePayload:
    start, end = share(ELEMENTS, given.slice, max(1, given.slices))
    found = (values(label(given.key)) if given.whole else values(label(given.key))[start:end]).copy()
    return DensePayload(format=DenseFormat.FLOAT32, elements=found.size, data=found.view(np.uint8))


def run(mode: str, steps: int, seed: int) -> tuple[int, int]:
    """As many jobs as it takes for so many steps. Returns steps and pushes applied."""
    done = applied = epochs = evaluated = 0
    while done < steps:
        seed += 1
        chance = random.Random(f"{mode}/{seed}")
        world = World(chance.randrange, mode, epochs=1 + chance.randrange(20), **MODES[mode])
        try:
            for _ in range(chance.randrange(3000)):
                world.act()
                if world.core.phase is Phase.FINISHED:
                    break
            world.finish()
        except AssertionError as error:
            raise AssertionError(f"mode {mode!r}, seed {seed}, step {world.steps}: {error}") from error
        done += world.steps
        applied += len(world.applied)
        epochs += world.epochs
        evaluated += len(world.core.evaluations.done)
    assert evaluated > epochs / 2, (
        f"mode {mode!r}, from seed {seed}: only {evaluated} of {epochs} epochs evaluated"
    )
    return done, applied


def main() -> None:
    parser = argparse.ArgumentParser(description="Random histories of jobs, checked by an oracle.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for mode in MODES:
        started = time.perf_counter()
        steps, applied = run(mode, given.steps // len(MODES), given.seed)
        print(
            f"{mode}: {steps} steps, {applied} pushes applied, {time.perf_counter() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
