"""Random lives of a job in coded mode, against what must hold at every step.

A cluster without sockets: the real state machine and the real exchanges, workers whose replicas are a few
integers, and streams that keep their order, break, come back and lose what was on them. Gradients depend on
the replica, so that whoever computes at another state than the rest is found out.

    python tests/server/coded_histories.py --steps 1000000 [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from stepping import Refuse, Relay, copied, core_of, step, written

from gradwire.benchmarks.schemes import SCHEMES
from gradwire.coded.arithmetic import Exchange, ExchangePlan, plan, planning_with, resent
from gradwire.coded.copies import HOPE_LEASES
from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal
from gradwire.proto.shares import block_share
from gradwire.server.job import events as e
from gradwire.server.job import initial

SAMPLES, EPOCHS, BATCH, ELEMENTS = 37, 3, 2, 5
LEASE_S = 10.0
Words = npt.NDArray[np.uint32]
Trained = tuple[tuple[int, int], ...]  # (epoch, sample) in the order in which they went in


@dataclass(frozen=True)
class Replica:
    """version: of the job. trained: everything that is in it."""

    version: int | None
    values: tuple[int, ...]
    trained: Trained


def gradient(epoch: int, sample: int, values: Sequence[int]) -> Words:
    """Return the gradient of one sample at a replica: anything that depends on all of it."""
    mixed = [epoch, sample, *values]
    return np.random.default_rng(mixed).integers(0, 2**32, ELEMENTS, dtype=np.uint32)


def stepped(replica: Replica, version: int, sums: npt.NDArray[np.int64], trained: Trained) -> Replica:
    values = (np.array(replica.values, np.int64) * 3 + sums) & 0xFFFFFFFF
    return Replica(version, tuple(map(int, values)), replica.trained + trained)


@dataclass
class Worker:
    name: str
    incarnation: int
    alive: bool = True
    connected: bool = False
    connection: int = 0
    prepared: bool = False
    assigned: int = 0
    seq: int = 0
    replica: Replica | None = None
    down: deque[Any] = field(default_factory=deque[Any])
    up: deque[Any] = field(default_factory=deque[Any])
    pending: dict[int, Any] = field(default_factory=dict[int, Any])  # reports without an outcome
    assignment: m.Assignment | None = None
    blocks: dict[int, Words] = field(default_factory=dict[int, Words])
    blocks_of: object = None
    plan: ExchangePlan | None = None
    exchange: Exchange | None = None
    evaluation: tuple[str, int, int] | None = None  # the last one
    finished: bool = False


class Cluster:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        self.members = chance.randint(1, 5)
        self.scheme = SCHEMES[chance.choice(["coded", "coded", "uncoded", "multicast"])]
        self.unseeded = chance.choice([0.0, 0.0, 0.02, 0.5])  # how often a block comes out differently
        self.steps = 0
        self.calm_from = chance.choice([0, 300, 600, 10**9])  # step from which nothing goes wrong any more
        min_workers = chance.randint(1, self.members)
        self.mode = f"coded:redundancy={chance.choice(['auto', 1, 2, 3])}"
        if not self.mode.endswith("auto") and self.scheme is not SCHEMES["multicast"]:
            self.mode += chance.choice(["", ",blocks=speed"])
        self.core = core_of(
            self.mode, min_workers=min_workers, batch_size=BATCH, epochs=EPOCHS, lease_seconds=LEASE_S
        )
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.incarnations = 0
        first = Replica(0, (1,) * ELEMENTS, ())
        self.first = first
        self.store: Replica | None = None
        self.versions: dict[int, Replica] = {}  # what each version is, as first seen
        self.copies: dict[e.SnapshotKey, Replica] = {}  # snapshots that have arrived
        self.loading: e.InstallSnapshot | None = None  # one that is being taken over

    # ---- the server's shell

    def happen(self, event: e.Event[Any]) -> list[Any]:
        actions: list[Any] = step(self.core, event, self.now)
        for action in actions:
            match action:
                case e.RequestInitialize():
                    self._send(action.worker, "initialize")
                case e.Assign():
                    self._assign(action)
                case e.Decided():
                    assert isinstance(event, e.Pushed)
                    self._send(event.worker, action.outcome)
                case e.RequestSnapshot():
                    self._send(action.worker, action)
                case e.Drop():
                    if isinstance(action.key, e.SnapshotKey):
                        del self.copies[action.key]
                case e.InstallSnapshot():
                    self.loading = action
                case e.Relabel():
                    assert self.loading is None, "the copy becomes another version while it is replaced"
                    assert self.store is not None
                    self._check_going_back(action.version - 1)
                    self.store = Replica(action.version, self.store.values, self.store.trained)
                    self.versions[action.version] = self.store
                case e.Disconnect():
                    worker = self.workers[action.worker]
                    if worker.incarnation == action.incarnation:
                        self._break(worker, report=False)
                case Refuse():
                    # Of what this cluster does, only a push for what is over, or of who is no member, may be.
                    assert action.refusal.reason in (
                        *(Reason.NOT_A_MEMBER, Reason.FENCED, Reason.DUPLICATE_WORKER, Reason.SEQUENCE),
                        *(Reason.JOB_FINISHED, Reason.ALREADY_INITIALIZED),
                    ), action.refusal
                case _:
                    pass
        return actions

    def _check_going_back(self, version: int) -> None:
        """Nobody who still has the version could have been waited for a little longer."""
        for member in self.core.state.roster.departed.values():
            worker = self.workers[member.worker]
            if not worker.alive or worker.replica is None or worker.incarnation != member.incarnation:
                continue
            waited = self.now - member.heard_at > HOPE_LEASES * LEASE_S
            assert waited or worker.replica.version != version, f"{worker.name} has version {version}"

    def _send(self, name: str, message: Any) -> None:
        worker = self.workers[name]
        if worker.connected:
            worker.down.append(message)

    def _assign(self, action: e.Assign) -> None:
        if action.has != action.assignment.version:
            assert self.store is not None
            assert self.store.version == action.assignment.version, "a snapshot of another version"
            self._send(action.worker, self.store)
        self._send(action.worker, action.assignment)

    # ---- workers

    def join(self, name: str) -> None:
        old = self.workers.get(name)
        if old is not None and old.alive:
            return
        self.incarnations += 1
        worker = Worker(name, self.incarnations)
        if old is not None and old.connected:
            self._break(old)
        self.workers[name] = worker
        actions = self.happen(e.Joined(worker=name, incarnation=worker.incarnation))
        if any(isinstance(action, Refuse) for action in actions):
            worker.alive = False
            return
        for action in actions:
            if isinstance(action, e.Admission) and action.initialize:
                worker.replica = self.first

    def connect(self, worker: Worker) -> None:
        actions = self.happen(e.Attached(worker=worker.name, incarnation=worker.incarnation))
        if any(isinstance(action, Refuse) for action in actions):
            worker.alive = False
            return
        worker.connected, worker.connection = True, worker.connection + 1
        worker.down.clear()
        worker.up.clear()
        worker.up.append(("prepared",))
        if worker.evaluation is not None:  # it may not have been heard
            worker.up.append(worker.evaluation)
        worker.up.extend(worker.pending.values())

    def _break(self, worker: Worker, *, report: bool = True) -> None:
        worker.connected = False
        if worker.down and isinstance(worker.down[0], Replica) and self.chance.random() < 0.5:
            worker.replica = None  # it had begun to come: what was there is overwritten in part
        worker.down.clear()
        worker.up.clear()
        if report:
            self.happen(e.Detached(worker=worker.name, incarnation=worker.incarnation))

    def hear(self, worker: Worker) -> None:
        """The worker takes in the next message."""
        message = worker.down.popleft()
        match message:
            case "initialize":
                worker.replica = self.first
                worker.up.append(("initialize",))
                worker.up.append(("prepared",))
            case Replica():
                worker.replica = message
            case m.Assignment():
                worker.assigned = max(worker.assigned, message.id)
                self._work(worker, message)
            case m.Outcome():
                worker.pending.pop(message.seq, None)
            case e.RequestSnapshot():
                self._apply(worker, message.apply, message.version)
                if worker.replica is not None and worker.replica.version == message.version:
                    worker.up.append(("snapshot", worker.replica))
            case ("packet", exchange, index, data):
                assignment = worker.assignment
                if assignment is None or assignment.coding is None or worker.exchange is None:
                    return
                if assignment.coding.exchange == exchange and not worker.exchange.complete:
                    worker.exchange.take(index, data)
                    if worker.exchange.complete:
                        self._report(worker)
            case _:
                raise AssertionError(message)

    def _apply(self, worker: Worker, exchange: int, version: int) -> None:
        replica, assignment = worker.replica, worker.assignment
        if not exchange or replica is None or replica.version == version or assignment is None:
            return
        coding = assignment.coding
        if coding is None or coding.exchange != exchange or replica.version != version - 1:
            return
        assert worker.exchange is not None
        assert worker.plan is not None
        assert worker.exchange.complete
        assert assignment.version == replica.version
        trained: list[tuple[int, int]] = []
        samples = samples_of(assignment)
        for block in worker.plan.blocks:
            start, end = block_share(coding, len(samples), block, len(worker.plan.holders))
            trained += [(assignment.epoch, sample) for sample in samples[start:end]]
        worker.replica = stepped(replica, version, worker.exchange.sums(), tuple(trained))
        known = self.versions.setdefault(version, worker.replica)
        assert known == worker.replica, f"replicas differ at version {version}"

    def _work(self, worker: Worker, assignment: m.Assignment) -> None:
        if assignment.finished:
            worker.finished, worker.alive = True, False
            worker.up.append(("left",))
            return
        self._apply(worker, assignment.apply, assignment.version)
        assert worker.replica is not None
        assert worker.replica.version == assignment.version, "told to work at a version that it has not"
        if assignment.evaluate_epoch:
            worker.evaluation = ("evaluation", assignment.version, assignment.evaluate_epoch)
            worker.up.append(worker.evaluation)
        coding = assignment.coding
        if coding is None or (worker.assignment is not None and assignment.id <= worker.assignment.id):
            return
        worker.assignment = assignment
        original = plan(assignment.world, coding.redundancy)
        key = (
            assignment.version,
            assignment.ranges,
            assignment.position,
            assignment.world,
            coding.redundancy,
            coding.sizes,
        )
        if worker.blocks_of != key:
            samples = samples_of(assignment)
            worker.blocks_of, worker.blocks = key, {}
            for block in original.held[assignment.position]:
                start, end = block_share(coding, len(samples), block, len(original.holders))
                total = np.zeros(ELEMENTS, np.uint32)
                for sample in samples[start:end]:
                    total += gradient(assignment.epoch, sample, worker.replica.values)
                if self.scheme is SCHEMES["coded"] and self.chance.random() < self.unseeded:
                    total += np.uint32(self.steps)  # as with a NaN, or augmentation without a seed
                worker.blocks[block] = total
        worker.plan = resent(original, coding.senders, coding.present) if coding.senders else original
        worker.exchange = Exchange(worker.plan, assignment.position, worker.blocks, ELEMENTS)
        for index in worker.plan.sent_by[assignment.position]:
            terms = worker.plan.packets[index].terms if coding.redundancy > 1 and not coding.senders else ()
            checksums = [zlib.crc32(worker.blocks[block].tobytes()) for block, _ in terms]
            worker.up.append(("begin", coding.exchange, index, checksums))
            worker.up.append(("end", coding.exchange, index, worker.exchange.encoded(index)))
        if worker.exchange.complete:
            self._report(worker)

    def _report(self, worker: Worker) -> None:
        assert worker.assignment is not None
        worker.seq += 1
        report = ("report", worker.seq, worker.assignment.id, worker.assignment.version)
        worker.pending[worker.seq] = report
        worker.up.append(report)

    # ---- what arrives at the server

    def receive(self, worker: Worker) -> None:
        message = worker.up.popleft()
        names: dict[str, Any] = {"worker": worker.name, "incarnation": worker.incarnation}
        match message:
            case ("prepared",):
                if worker.replica is None and self.core.state.version == 0 and self.store is None:
                    worker.replica = None
                version = None if worker.replica is None else worker.replica.version
                if self.store is None and worker.replica is not None:
                    worker.up.appendleft(("initialize",))
                    worker.up.insert(1, ("prepared",))
                    return
                self.happen(e.Prepared(**names, fingerprint=b"", version=version, assigned=worker.assigned))
            case ("initialize",):
                if initial.check_uploader(self.core.state, worker.name, worker.incarnation) is None:
                    self.store = self.versions[0] = self.first
                    self.happen(e.Initialized(**names, fingerprint=b"", train_samples=SAMPLES))
                elif self.store is None:
                    worker.replica = None
            case ("begin", exchange, index, checksums):
                actions = self.happen(
                    e.PacketStarted(**names, exchange=exchange, index=index, checksums=checksums)
                )
                relay = next((action for action in actions if isinstance(action, Relay)), None)
                targets = [] if relay is None else [self.workers[name] for name in relay.targets]
                self._targets = [(target, target.connection) for target in targets if target.connected]
                if self.troubled and relay is not None and self.chance.random() < 0.02:
                    worker.up.popleft()
                    why = Refusal(reason=Reason.CHECKSUM, message="damaged")
                    self.happen(e.PacketDamaged(**names, exchange=exchange, refusal=why))
                else:
                    kind, *_, data = worker.up.popleft()
                    assert kind == "end"
                    worker.up.appendleft(("end", exchange, index, data, self._targets, relay is not None))
            case ("end", exchange, index, data, targets, relayed):
                for target, connection in targets:
                    if target.connected and target.connection == connection:
                        target.down.append(("packet", exchange, index, data.copy()))
                if relayed:
                    self.happen(e.PacketRelayed(**names, exchange=exchange, index=index))
            case ("report", seq, assignment, version):
                exchanged = m.Exchanged(crc32c=0, computing_seconds=self.chance.choice([0.1, 0.1, 0.5]))
                self.happen(
                    e.Pushed(
                        **names,
                        seq=seq,
                        assignment=assignment,
                        base_version=version,
                        samples=1,
                        exchanged=exchanged,
                    )
                )
            case ("snapshot", replica):
                arrived = e.SnapshotReceived(**names, version=replica.version)
                self.copies[arrived.key] = replica
                self.happen(arrived)
            case ("evaluation", version, epoch):
                self.happen(e.EvaluationReported(**names, version=version, epoch=epoch, metrics={}))
            case ("left",):
                self.happen(e.Left(**names, failed=False, reason="done"))
            case _:
                raise AssertionError(message)

    # ---- time

    @property
    def troubled(self) -> bool:
        return self.steps < self.calm_from

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def step(self) -> None:
        """One random thing."""
        chance = self.chance
        self.steps += 1
        if chance.random() < 0.02:
            self.core = copied(self.core, self.mode)
        self.now += chance.expovariate(20.0)
        if self.loading is not None and chance.random() < 0.1:
            taken, self.loading = self.loading, None
            self.store = self.copies.pop(taken.key)
            self.happen(e.SnapshotInstalled(version=taken.key.version))
            return
        busy = [worker for worker in self.workers.values() if worker.connected and (worker.up or worker.down)]
        trouble = self.troubled and chance.random() < 0.02
        if trouble and self.live():
            worker = chance.choice(self.live())
            what = chance.random()
            if what < 0.6 and worker.connected:
                self._break(worker)
            elif what < 0.8:
                worker.alive = False
                if worker.connected:
                    self._break(worker)
            elif what < 0.9:
                self.now += LEASE_S * 1.1  # everybody is silent
                if chance.random() < 0.5:  # and the server notices before it hears of anybody again
                    self.happen(e.Tick())
            return
        if busy and chance.random() < 0.9:
            worker = chance.choice(busy)
            if worker.up and (not worker.down or chance.random() < 0.5):
                self.receive(worker)
            else:
                self.hear(worker)
            return
        away = [worker for worker in self.live() if not worker.connected]
        if away and chance.random() < 0.5:
            self.connect(chance.choice(away))
            return
        if len(self.live()) < self.members and self.core.state.phase not in (
            m.Phase.FINISHING,
            m.Phase.FINISHED,
        ):
            self.join(f"w{chance.randrange(self.members)}")
            return
        for worker in self.live():
            if worker.connected:
                self.happen(e.KeepAlive(worker=worker.name, incarnation=worker.incarnation))
        self.happen(e.Tick())

    def run(self, most: int) -> int:
        """To the end of the job, within `most` steps once nothing goes wrong; returns how many it took."""
        while self.steps < most or (self.troubled and self.steps < 50 * most):
            if self.core.state.phase is m.Phase.FINISHED:
                self.check()
                return self.steps
            self.step()
        raise AssertionError(f"not done after {most} steps: {written(self.core)}")

    def check(self) -> None:
        """Each sample of each epoch is in the final parameters once."""
        assert self.store is not None
        assert self.store.version == self.core.state.version
        expected = [(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)]
        assert sorted(self.store.trained) == expected
        assert self.store == self.versions[self.core.state.version]


def samples_of(assignment: m.Assignment) -> list[int]:
    return [sample for each in assignment.ranges for sample in range(each.start, each.start + each.count)]


def run(steps: int, seed: int, most: int = 5_000) -> int:
    """Whole jobs until so many steps are done; returns how many jobs there were."""
    done = jobs = 0
    while done < steps:
        cluster = Cluster(seed + jobs)
        try:
            with planning_with(cluster.scheme):
                done += cluster.run(most)
        except Exception as error:
            raise AssertionError(f"seed {seed + jobs}: {error}") from error
        jobs += 1
    return jobs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(run(given.steps, given.seed), "jobs")
