"""A job that a test tells, event by event. No sockets, no clock: `now` is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from stepping import Refuse, core_of, step

from gradwire.proto.messages import Assignment, Outcome, Phase
from gradwire.proto.refusal import Refusal
from gradwire.proto.shares import assigned_samples
from gradwire.server.job import events as e
from gradwire.server.job.core import Core

A = TypeVar("A")
MODEL = b"model"
LEASE_S = 10.0


class Job:
    """A core with a clock, and the actions of the last event."""

    def __init__(
        self,
        workers: int = 0,
        *,
        min_workers: int | None = None,
        epochs: int = 2,
        samples: int = 40,
        batch: int = 4,
        core: Core | None = None,
    ) -> None:
        needed = workers if min_workers is None else min_workers
        self.core = core or core_of(
            min_workers=max(1, needed), batch_size=batch, epochs=epochs, lease_seconds=LEASE_S
        )
        self.now = 100.0
        self.actions: list[Any] = []
        self.seq: dict[str, int] = {}
        self.told: dict[str, Assignment] = {}  # the last one of each worker
        self.samples = samples
        for index in range(workers):
            self.bring(f"w{index}")

    def step(self, event: e.Event[Any]) -> list[Any]:
        self.actions = step(self.core, event, self.now)
        self.told |= self.assignments
        return self.actions

    def all(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    def phase(self) -> Phase:
        return self.core.state.phase

    def one(self, kind: type[A]) -> A:
        (action,) = self.all(kind)
        return action

    def join(self, worker: str, incarnation: int = 1) -> list[Any]:
        return self.step(e.Joined(worker=worker, incarnation=incarnation, compressor="4bit"))

    def attach(self, worker: str, incarnation: int = 1) -> list[Any]:
        return self.step(e.Attached(worker=worker, incarnation=incarnation))

    def ready(
        self, worker: str, incarnation: int = 1, version: int | None = None, model: bytes = MODEL
    ) -> list[Any]:
        return self.step(
            e.Prepared(worker=worker, incarnation=incarnation, fingerprint=model, version=version)
        )

    def initialize(self, worker: str) -> list[Any]:
        return self.step(
            e.Initialized(worker=worker, incarnation=1, fingerprint=MODEL, train_samples=self.samples)
        )

    def bring(self, worker: str, incarnation: int = 1) -> None:
        """Join, attach, initialize if asked, be ready."""
        self.join(worker, incarnation)
        initialize = self.one(e.Admission).initialize
        self.attach(worker, incarnation)
        if initialize:
            self.initialize(worker)
        self.ready(worker, incarnation, version=0 if initialize else None)

    def push(
        self,
        worker: str,
        *,
        incarnation: int = 1,
        seq: int | None = None,
        to: Assignment | None = None,
        samples: int | None = None,
        computing_s: float = 0.0,
        loss: float | None = 1.0,
        rates: tuple[float, ...] = (),
        batch: int = 0,
        batches: int = 0,
        steps: int = 0,
    ) -> list[Any]:
        """Without other words: the next push, for what it was told last, with all samples of that."""
        if to is None:
            to = self.told.get(worker, Assignment(id=0, version=self.core.state.version))
        if seq is None:
            seq = self.seq.get(worker, 0) + 1
        self.seq[worker] = max(seq, self.seq.get(worker, 0))
        return self.step(
            e.Pushed(
                worker=worker,
                incarnation=incarnation,
                seq=seq,
                assignment=to.id,
                base_version=to.version,
                loss=loss,
                samples=assigned_samples(to) if samples is None else samples,
                plan=to.plan or self.core.state.plan,
                computing_s=computing_s,
                learning_rates=rates,
                batch=batch,
                batches=batches,
                steps=steps,
            )
        )

    def ask(self, worker: str, *, wanted: int = 1, steps: int = 0) -> list[Any]:
        """Ask for further batches of what it was told last."""
        to = self.told[worker]
        return self.step(
            e.MoreWanted(
                worker, 1, assignment=to.id, batches=len(to.batches) or 1, wanted=wanted, steps=steps
            )
        )

    def publish(self) -> list[Any]:
        return self.step(e.Published(version=self.core.state.version + 1))

    def round(self, workers: Iterable[str]) -> e.Apply:
        """Everybody pushes, the round is applied and published."""
        for worker in workers:
            self.push(worker)
        apply = self.one(e.Apply)
        self.publish()
        return apply

    def tick(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.step(e.Tick())

    def heartbeat(self, *workers: str) -> None:
        for worker in workers:
            self.step(e.KeepAlive(worker=worker, incarnation=1))

    @property
    def assignments(self) -> dict[str, Assignment]:
        return {action.worker: action.assignment for action in self.all(e.Assign)}

    def refused(self) -> Refusal:
        return self.one(Refuse).refusal

    def outcome(self) -> Outcome:
        return self.one(e.Decided).outcome
