"""Random histories of a job: the real state machine and store, workers that do anything, and an oracle.

Workers join, leave, crash and come back; their streams break; the clock jumps. A push is parts and a commit,
which arrive in any order before those of the next push; what has arrived arrives again at any time. A part is
damaged, or not valid; a commit is not of what was sent; a push is given up before, between and after its
parts; a stream ends between any two of them. What takes all this in is the server's own `WorkerCall`, with
its `Arrivals`, inboxes and shard. After every step the oracle checks what must always hold:

    E  every acknowledged push is applied exactly once, in the version that its outcome named; a duplicate
       gets the first outcome; the parameters are, bit for bit, what mean and SGD make of the applied log
    S  in stale mode no applied push is more clocks behind the newest one than the bound
    F  the parameters stay finite
    N  what is refused changes nothing but the lease of the worker it came from
    M  what is remembered of a worker is bounded
    L  once faults stop, the job finishes; no sample of any epoch has been lost, none applied twice
    C  where members share samples, the weights of what is applied add up, for each sample and each slice, to
       its part of the mean: what slices and codes make of the pushes is the mean, and each sample is in one
    B  with `--overlap both`: a part is stepped as soon as all members that are not given up have stored it,
       in rank order, and once; each part of a push is in one version at most; a push that is refused as stale
       is told which of its parts count, and no other does after that; samples behind a part that counts are
       not given to anybody else; what goes out makes of a replica what the server has
    P  the shard has every part of what it is to apply, and nothing but that and parts of pushes that are open

As a program it runs as many steps as it is told to, over all modes:

    python tests/server/histories.py --steps 10000000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pushes import bits, cut_plan, dense, replica_bits, take
from stepping import Refuse, copied, core_of, state, step

from gradwire.compressors import Payload, Plan
from gradwire.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import (
    Abandon,
    Assignment,
    Chunk,
    Commit,
    Decision,
    Outcome,
    Part,
    Phase,
    Tensor,
)
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.proto.transfer import PLAN, Assembly, digest, part_transfer, payload_header
from gradwire.proto.wire import crc32c
from gradwire.server.conductor import Conductor
from gradwire.server.exchange import NO_MEMBER, WorkerCall
from gradwire.server.job import events as e
from gradwire.server.job.modes.arrivals import Arrivals
from gradwire.server.job.modes.registry import parse
from gradwire.server.job.modes.rounds import RoundLife, Rounds
from gradwire.server.job.modes.stale import StaleOptions
from gradwire.server.job.roster import OUTCOMES_PER_MEMBER
from gradwire.server.metrics import Metrics
from gradwire.server.shard.inbox import Inbox
from gradwire.server.shard.mean import Push, Share
from gradwire.server.shard.shard import Shard
from gradwire.server.shard.store import Encoded, Float32, Store
from gradwire.server.streams import WorkerStream
from gradwire.server.updates import Broadcast
from gradwire.worker.session.replica import Replica
from gradwire.worker.tasks.sharding import coded_parts

LEASE_S = 10.0
MODEL = b"model"
DIVIDED = cut_plan((1,), (2, 2), (1,))
ELEMENTS = DIVIDED.elements
MANIFEST_OF = tuple(
    Tensor(name=name, shape=(size,), dtype="float32") for name, size in (("u", 1), ("v", 4), ("w", 1))
)
METRICS = Metrics("none")
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK)
RATE = 0.01
NAMES = ("a", "b", "c", "d")
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync overlap=both": {"overlap": "both"},
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


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a push as it travels. values: none if it is empty. damaged: whether its bytes change on the
    way."""

    seq: int
    assignment: int
    part: int
    values: tuple[float, ...]
    damaged: bool = False

    @property
    def data(self) -> list[Any]:
        return [dense(*self.values).data] if self.values else []

    def messages(self) -> tuple[Part] | tuple[Part, Chunk]:
        payload = dense(*self.values)
        described = (payload_header(payload),) if self.values else ()
        header = Part(seq=self.seq, assignment=self.assignment, part=self.part, plan=PLAN, payloads=described)
        if not self.values:
            return (header,)
        checksum = crc32c((payload.data,)) ^ self.damaged
        transfer = part_transfer(self.seq, self.part)
        return header, Chunk(transfer=transfer, offset=0, data=payload.data, crc32c=checksum)


Message = Piece | Commit | Abandon


@dataclass(slots=True)
class Sending:
    """A push without an outcome."""

    assignment: Assignment
    parts: dict[int, Piece]
    commit: Commit

    def messages(self, known: Iterable[int] = ()) -> list[Message]:
        """What the server has to hear of it that knows some parts."""
        return [*(piece for part, piece in self.parts.items() if part not in known), self.commit]


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
    open: dict[int, Sending] = field(default_factory=dict[int, Sending])
    stream: WorkerStream | None = None  # the server's end of the last one
    queue: list[Message] = field(default_factory=list[Message])  # on its way
    arrived: list[Message] = field(default_factory=list[Message])  # at any time
    evaluation: Assignment | None = None  # still to be done
    report: Assignment | None = None  # the last one done, told again on every new stream
    finished: bool = False


class Server(Conductor):
    """The shell of a world: control has its oracle, and what is to be done is done there."""

    def __init__(self, world: World) -> None:
        super().__init__(world.core, METRICS, shard=Local(world))
        self._world = world

    def decide(self, event: e.Event[Any]) -> e.Result[Any]:
        return self._world.decide(event)

    def perform(self, actions: Sequence[e.Action]) -> None:
        self._world.take_in(actions)


class Local(Shard):
    """One without a thread, whose store the world has."""

    def __init__(self, world: World) -> None:
        self._world = world

        def build(manifest: Manifest, given: Sequence[Float32], plan: Plan) -> Store:
            raise AssertionError("the world makes the store, and `hold` takes it")

        super().__init__(build)

    def hold(self, store: Store) -> None:
        self._store = store

    def take(self, order: e.Apply) -> list[Push]:
        """As `apply` does."""
        for each in order.contributions:
            assert not each.samples or each.key in self._pushes, f"P: nothing is stored of {each.key}"
        return self._taken(order)

    @staticmethod
    def _on_loop(send: Any) -> Any:
        return send

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        if len(arguments) == 3:
            self._world.check_final(*arguments[:2])
        function(*arguments)

    def put(self, key: e.PushKey, part: int, payloads: Sequence[Payload], assignment: int = 0) -> None:
        self._world.storing(key, part, assignment)
        super().put(key, part, payloads, assignment)
        self._world.check_prompt()

    def drop(self, key: Any) -> None:
        self._world.forgetting(key)
        super().drop(key)

    def stored_part(self, key: e.PushKey, part: int) -> Sequence[Payload]:
        return self._pushes[key][part]

    @property
    def keys(self) -> list[e.PushKey]:
        return list(self._pushes)


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
        mode = mode_of(mode)
        self.core = core_of(mode, batch_size=batch, epochs=epochs, lease_seconds=LEASE_S, **rules)
        self.given_mode, self.rules = mode, self.core.rules
        options = parse(mode)
        # In clocks, as it was asked for: what the mode makes of it is what is tested.
        self.bound = options.bound if isinstance(options, StaleOptions) else None
        self.now = 0.0
        self.samples, self.epochs = samples, epochs
        self.sims: dict[str, Sim] = {}
        self.incarnations: Counter[str] = Counter()
        self.server = Server(self)
        self.shard: Local = self.server.shard  # type: ignore[assignment]
        self.call = WorkerCall(self.server)
        self.scans: list[tuple[WorkerStream, Part, Assembly]] = []  # of parts that have come, while they run
        self.pending: tuple[e.Apply, list[Push]] | None = None
        self.growing: list[tuple[Sim, WorkerStream | None]] = []  # whose update is on its way already
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
        self.decided = 0
        self.newest_clock = -1
        self.steps = 0
        self.store: Store | None = None
        self.expected = np.zeros(ELEMENTS, np.float32)
        # Of rounds that are stepped in parts. The one that is open, or the last: members by assignment, those
        # that are waited for, what they have stored by part, and what is stepped of it.
        self.in_parts = self.rules.overlap == "both"
        self.members: dict[int, tuple[str, int, int]] = {}
        self.waited: set[int] = set()
        self.has: defaultdict[int, dict[int, e.PushKey]] = defaultdict(dict)
        self.final: dict[int, list[tuple[str, int]]] = {}
        self.sent: list[Encoded] = []
        self.following: list[tuple[Sim, WorkerStream | None]] = []
        self.begun = 0  # rounds, and whether this one has while it was open
        self.begun_open = False
        self.counts: defaultdict[str, dict[int, int]] = defaultdict(dict)  # version, by push and part
        self.assignment_of: dict[str, int] = {}  # of those
        self.told_stale: set[str] = set()
        self.given_up: set[tuple[int, int]] = set()  # samples of members lost in rounds that had begun
        self.applied_parts: dict[str, dict[int, bool]] = {}  # which are not empty
        self.replica = replica() if self.in_parts else None

    # ---- what may happen

    def act(self) -> None:
        """One of the things below, each with its own likelihood; sometimes a copy of the core goes on."""
        if self.pick(50) == 0:
            self.core = self.server.core = copied(self.core, self.given_mode)
            self.call = WorkerCall(self.server)
        choices: list[tuple[int, Callable[[], None]]] = [
            (9, self.deliver), (6, self.compute), (5, self.publish), (3, self.come), (4, self.beat),
            (2, self.wait), (1, self.repeat), (1, self.damage), (1, self.break_stream), (2, self.evaluate),
            (1, self.reconnect), (1, self.push_nonsense), (2, self.scanned),
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
            outbox: Any = SimpleNamespace(sent=[], ended_with=None)
            outbox.send = outbox.sent.append
            sim.stream = WorkerStream(sim.name, sim.incarnation, outbox, Inbox(sim.name))

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
            sim.queue += sending.messages(known=stored.get(seq, ()))
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
        sim.seq += 1
        samples = len(computed(assignment)) if self.pick(10) else 0
        parts: dict[int, Piece] = {}
        if samples:
            gradient = values(f"{sim.name}/{sim.incarnation}/{sim.seq}").tolist()
            for part in sorted(parts_of(assignment)):
                bounds = DIVIDED.parts[part]
                whole = tuple(gradient[bounds.start : bounds.end])
                parts[part] = Piece(sim.seq, assignment.id, part, whole)
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

    def publish(self) -> None:
        """What was to be applied has been."""
        if self.pending is None:
            return
        (apply, pushes), self.pending = self.pending, None
        assert self.store is not None
        for each, push in zip(apply.contributions, pushes, strict=True):
            given = self.pushes[label(each.key)]
            wanted: frozenset[int] = (
                parts_of(self.assignments[given.assignment]) if given.samples else frozenset()
            )
            assert push.keys() == wanted, f"P: {each.key} is applied with parts {sorted(push)}"
        self.applied_parts = {
            label(each.key): {part: bool(payloads) for part, payloads in push.items()}
            for each, push in zip(apply.contributions, pushes, strict=True)
        }
        sent, self.sent = self.sent, []
        self.store.apply(apply, pushes, sent.append)
        assert len(sent) == len(DIVIDED.parts)
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

    # ---- the server, and what it sends

    def receive(self, stream: WorkerStream, message: Message) -> None:
        self.arrive(stream, message, lambda: self.hand_over(stream, message))

    def arrive(self, stream: WorkerStream, message: Message | Part, taking: Callable[[], None]) -> None:
        """Have the server take in a message, and the worker its answers."""
        identity = (*stream.id, seq_of(message))
        before = self.state() if self.pick(16) == 0 else None  # which takes longer than all else
        known, decided, begun = self.outcomes.get(identity), self.decided, self.begun
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
        if (self.decided, self.begun) == (decided, begun):
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
            if stream.inbox.current is header:
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

    def decide(self, event: e.Event[Any]) -> e.Result[Any]:
        """What control says. Raises Refused."""
        push = event if isinstance(event, e.Pushed) else None
        accepted = self.core.accepted_pushes
        before = accepted + self.core.stale_pushes
        member = self.core.roster.members.get(push.worker) if push else None
        clock = member.clock if member is not None else None
        self.steps += 1
        result = self.core.step(event, self.now)
        if isinstance(event, e.Begun):
            self.check_begun(event)
        if push is not None and self.core.accepted_pushes + self.core.stale_pushes > before:
            self.decided += 1
            self.pushes[label(push.key)] = push
            samples = self.ranges.get(push.assignment, [])
            self.answered.update(samples)
            answer: Outcome = result.reply.outcome
            redundant = answer.refusal is not None and answer.refusal.reason is Reason.REDUNDANT
            if not redundant and (answer.refusal is not None or not push.samples):
                self.excused.update(samples)
            if self.core.accepted_pushes > accepted:
                name = label(push.key)
                assert name not in self.accepted, f"E: {name} was accepted twice"
                self.accepted[name] = answer.version
                if not self.core.mode.shares_samples:
                    self.covered.update(samples)
                bound = self.bound
                if clock is not None and bound is not None:
                    behind = self.newest_clock - clock
                    assert behind <= bound, f"S: {name} is {behind} clocks behind"
                    self.newest_clock = max(self.newest_clock, clock)
        if push is not None:
            identity = (push.worker, push.incarnation, push.seq)
            first = self.outcomes.setdefault(identity, result.reply.outcome)
            assert result.reply.outcome == first, f"E: a duplicate of {identity} got another outcome"
        return result

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
                case e.Open():
                    self.open_round(action)
                case e.Wait():
                    self.wait_for(action)
                case e.Apply():
                    self.close_round(action)
                    assert self.pending is None, "applied two at a time"
                    ranks = [each.rank for each in action.contributions]
                    assert ranks == sorted(set(ranks)), "rank order"
                    self.pending = action, self.shard.take(action)
                    members = [sim for name in action.members if (sim := self.sims.get(name)) is not None]
                    self.growing = [(sim, sim.stream) for sim in members if sim.ready]
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

    # ---- rounds that are stepped in parts

    def open_round(self, action: e.Open) -> None:
        assert action.version == self.core.version + 1
        assert self.pending is None
        assert not self.final or (self.store is not None and self.store.version == self.core.version)
        self.members, self.waited = dict(action.members), set(action.members)
        self.has.clear()
        self.final.clear()
        assert not self.sent, "B: parts of a round that was given up have gone out"
        self.begun_open = False
        listening = {member.worker for member in self.core.roster.listening()}
        names = [name for name, _, _ in action.members.values()]
        sims = [self.sims[name] for name in names if name in listening and name in self.sims]
        self.following = [(sim, sim.stream) for sim in sims if sim.ready]
        begun = e.Begun(version=action.version)
        self.shard.open_round(action, self.sent.append, lambda: self.server.happen(begun))

    def wait_for(self, action: e.Wait) -> None:
        for each in action.assignments:
            if not action.on:
                self.waited.discard(each)
                for stored in self.has.values():
                    stored.pop(each, None)
            elif each in self.members:
                assert not self.final, "B: who comes back after a part was final is too late"
                self.waited.add(each)
        self.shard.wait(action.assignments, on=action.on)
        self.check_prompt()

    def close_round(self, action: e.Apply) -> None:
        """Samples of which nothing more can come; what has gone out early went to those who have it."""
        if not self.in_parts:
            return
        pushed = {self.pushes[label(each.key)].assignment for each in action.contributions}
        if self.begun_open:
            round_ = self.core.mode.round if isinstance(self.core.mode, Rounds) else None
            assert round_ is not None
            for each in self.members.keys() - pushed:  # some may never have heard of it
                drawn = round_.division.parts[round_.place_of[each]].drawn
                ranges = [
                    (drawn.epoch, first.start + i) for first in drawn.ranges for i in range(first.count)
                ]
                self.given_up.update(ranges)
        for sim, stream in self.following:
            if sim.ready and sim.stream is stream and self.sims.get(sim.name) is sim:
                assert sim.name in action.members, (
                    f"B: {sim.name} has a version that control does not know of"
                )
        self.waited.clear()
        self.following.clear()

    def take_in_early(self) -> None:
        """A worker has all parts of a version before the server has the last commit."""
        if len(self.final) == len(DIVIDED.parts) and self.pending is None and self.following:
            sim, stream = self.following[self.pick(len(self.following))]
            version = self.core.version + 1
            if sim.ready and sim.stream is stream and not sim.assignments and sim.version == version - 1:
                sim.version = version

    def storing(self, key: e.PushKey, part: int, assignment: int) -> None:
        if assignment in self.waited:
            self.has[part].setdefault(assignment, key)

    def forgetting(self, key: Any) -> None:
        for stored in self.has.values():
            for assignment in [each for each, other in stored.items() if other == key]:
                del stored[assignment]

    def check_begun(self, event: e.Begun) -> None:
        round_ = self.core.mode.round if isinstance(self.core.mode, Rounds) else None
        assert round_ is not None, "B: a round that was given up is stepped"
        assert round_.version + 1 == event.version == self.core.version + 1
        self.begun += 1
        self.begun_open = round_.life is RoundLife.OPEN

    def check_prompt(self) -> None:
        for part, stored in self.has.items():
            complete = bool(self.waited) and self.waited <= stored.keys()
            assert part in self.final or not complete, f"B: part {part} is not stepped"

    def check_final(self, part: int, shares: Sequence[Share]) -> None:
        """A part is about to be stepped."""
        assert part not in self.final, f"B: part {part} is stepped twice"
        stored = self.has[part]
        assert self.waited <= stored.keys(), f"B: part {part} does not wait for everybody"
        given = [(each, stored[each]) for each in self.members if each in self.waited]
        round_ = self.core.mode.round if isinstance(self.core.mode, Rounds) else None
        assert round_ is not None, "B: a round that was given up is stepped"
        for assignment, key in given:
            assert round_.place_of[assignment] not in round_.lost, f"B: {key} was given up"
            self.count(label(key), part, self.core.version + 1, assignment)
        full = [
            (label(key), self.members[each][2]) for each, key in given if self.shard.stored_part(key, part)
        ]
        assert [(label(share.key), share.samples) for share, _ in shares] == full, "B: rank order"
        self.final[part] = full

    def count(self, name: str, part: int, version: int, assignment: int) -> None:
        assert part not in self.counts[name], f"B: part {part} of {name} is in two versions"
        assert name not in self.told_stale, f"B: part {part} of {name} counts although it was refused"
        self.counts[name][part] = version
        assert self.assignment_of.setdefault(name, assignment) == assignment

    def complete_parts(self, apply: e.Apply) -> None:
        """What was not final before is what was pushed."""
        for part in range(len(DIVIDED.parts)):
            if part in self.final:
                continue
            self.final[part] = []
            for each in apply.contributions:
                if each.samples:
                    name = label(each.key)
                    self.count(name, part, apply.version, self.pushes[name].assignment)
                    if self.applied_parts[name][part]:
                        self.final[part].append((name, each.samples))

    def check_counted(self, stream: WorkerStream, outcome: Outcome) -> Outcome:
        """The outcome as control gave it."""
        name = label(e.PushKey(*stream.id, outcome.seq))
        stale = outcome.refusal is not None and outcome.refusal.reason is Reason.STALE
        if stale:
            assert set(outcome.counted) == self.counts[name].keys(), f"B: {name} is told {outcome.counted}"
            self.told_stale.add(name)
        else:
            assert not outcome.counted
        return replace(outcome, counted=())

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
        if self.in_parts:
            gradient = self.gradient_of_parts()
        for each in given if not self.in_parts else ():
            total = sum(other.samples for other in given if other.slice == each.slice)
            weight = each.samples / total * apply.weight if each.weight is None else each.weight
            held = elements_of(self.assignments[self.pushes[label(each.key)].assignment])
            gradient[held] += np.float32(weight) * values(label(each.key))[held]
        if self.core.mode.shares_samples:
            self.check_shared(given)
        if given or self.in_parts:
            torch.from_numpy(self.expected).add_(torch.from_numpy(gradient), alpha=-RATE * apply.rate_factor)
        for each in apply.contributions:
            name = label(each.key)
            assert name not in self.applied, f"E: {name} was applied twice"
            assert self.accepted.get(name) == apply.version, f"E: {name} is in another version than was said"
            self.applied[name] = apply.version
        assert self.store is not None
        parameters = b"".join(value.tobytes() for value in self.store.values())
        assert parameters == self.expected.tobytes(), "E: the parameters are not those of the log"
        assert np.isfinite(self.expected).all(), "F"

    def gradient_of_parts(self) -> Float32:
        """The mean of each part over those who count in it."""
        gradient = np.zeros(ELEMENTS, np.float32)
        for part, given in self.final.items():
            here = slice(DIVIDED.parts[part].start, DIVIDED.parts[part].end)
            total = sum(samples for _, samples in given)
            for name, samples in given:
                gradient[here] += np.float32(samples / total) * values(name)[here]
        return gradient

    def check_shared(self, given: Sequence[e.Contribution]) -> None:
        """C: what each sample's gradient comes to in each slice."""
        for slice in {each.slice for each in given}:
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
            (held,) = {tuple(elements_of(assignment)) for assignment in assigned.values()}
            for sample in comes_to:
                for element in held:
                    self.elements[sample, element] += 1
                    assert self.elements[sample, element] == 1, f"C: {sample} is applied twice"

    def check_stored(self) -> None:
        """P: no part is left without owner."""
        for key in self.shard.keys:
            arrivals = self.server.arrivals(key.worker, key.incarnation)
            waits = label(key) in self.accepted and label(key) not in self.applied
            assert key.seq in arrivals.open or waits, f"P: {key} is left in the shard"

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
                sim.queue = [message for sending in sim.open.values() for message in sending.messages()]
                while sim.queue and sim.attached:
                    self.next_of(sim)
            self.evaluate()
            self.beat()
            self.wait()
        self.check_end()

    def check_end(self) -> None:
        for name, parts in self.counts.items():
            if name in self.accepted:
                whole = dict.fromkeys(range(len(DIVIDED.parts)), self.accepted[name])
                assert parts == whole, f"B: of {name} count {parts}"
            elif parts:  # nobody else may compute it
                self.covered.update(self.ranges[self.assignment_of[name]])
        for epoch in range(self.epochs):
            for index in range(self.samples):
                sample = (epoch, index)
                assert self.covered[sample] <= 1, f"{sample} was accepted from two workers"
                answered = self.answered[sample] or sample in self.late | self.given_up
                assert answered, f"{sample} was lost"
                if self.core.mode.shares_samples and sample not in self.excused | self.late:
                    found = [self.elements[sample, element] for element in range(ELEMENTS)]
                    assert found == [1] * ELEMENTS, f"C: {sample} was lost: {found}"
        assert set(self.applied) == set(self.accepted), "E: acknowledged, but not applied"
        self.server._forget_arrivals()  # pyright: ignore[reportPrivateUsage]
        for key in self.shard.keys:  # of a late worker, which may still be sending
            assert key.seq in self.server.arrivals(key.worker, key.incarnation).open
            self.shard.drop(key)
        assert self.shard.stored == 0, "P: something is left in the shard"
        evaluated = [each.epoch for each in self.core.evaluations.done]
        assert evaluated == sorted(set(evaluated))
        assert not self.core.roster.members or evaluated[-1] == self.epochs, "the end is evaluated"


def mode_of(name: str) -> str:
    """Of a setting."""
    return name.split()[0]


def replica() -> Replica:
    """A worker's, at version 0, divided as the server's."""
    model = torch.nn.Module()
    for tensor in MANIFEST_OF:
        model.register_parameter(tensor.name, torch.nn.Parameter(torch.zeros(tensor.shape)))
    made = Replica(model, 1)
    made.plan = DIVIDED
    made._versions = [0] * len(DIVIDED.parts)  # pyright: ignore[reportPrivateUsage]
    made.version = 0
    return made


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


def parts_of(assignment: Assignment) -> frozenset[int]:
    """That are pushed for it."""
    return DIVIDED.slice(assignment.slice, max(1, assignment.slices))


def elements_of(assignment: Assignment) -> list[int]:
    bounds = [DIVIDED.parts[part] for part in parts_of(assignment)]
    return sorted(element for part in bounds for element in range(part.start, part.end))


def seq_of(message: Message | Part) -> int:
    return message.seq


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
