"""How fast workers of unlike speed get through a job in stale mode: the real state machine, and time that is
only counted.

A worker's step takes `overhead` seconds and so many per sample, give or take `noise`; the server applies one
push after the other. As a program it compares one slow worker with even ones:

    python tests/server/paced.py --slower 10
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from stepping import core_of, step

from gradwire.proto.messages import Assignment
from gradwire.proto.shares import assigned_samples
from gradwire.server.job import events as e

BATCH = 32
PER_EPOCH = 1408
BOUND = 4
SECONDS_PER_SAMPLE = 0.001
PUBLISH_S = 0.001
EVALUATION_S = 0.02


@dataclass
class Job:
    """A job of some workers.

    Attributes:
        slower: factor of each worker's computing.
        overhead: seconds of each of its steps that do not depend on samples.
        noise: part by which a step may take more or less time.
        settled: (seconds, samples) of each push, when it was accepted.
        most_stale: clocks that the most belated push was behind.
        shares: samples of each assignment of the last worker.
    """

    slower: Sequence[float]
    overhead: Sequence[float]
    epochs: int
    noise: float = 0.1
    settled: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    most_stale: int = 0
    shares: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self._core = core_of(
            f"stale:bound={BOUND}",
            min_workers=len(self.slower),
            batch_size=BATCH,
            epochs=self.epochs,
            lease_seconds=1e9,
        )
        self._now = 0.0
        self._chance = random.Random(1)
        self._queue: list[tuple[float, int, e.Event[Any]]] = []  # by time, then in order
        self._number = 0
        self._seq = [0] * len(self.slower)

    def run(self) -> Job:
        names = [f"{rank}" for rank in range(len(self.slower))]
        for name in names:
            self._step(e.Joined(worker=name, incarnation=1))
            self._step(e.Attached(worker=name, incarnation=1))
        self._step(e.Initialized(worker="0", incarnation=1, fingerprint=b"m", train_samples=PER_EPOCH))
        for name in names:
            self._step(e.Prepared(worker=name, incarnation=1, fingerprint=b"m", version=0))
        while self._queue:
            self._now, _, event = heappop(self._queue)
            self._step(event)
        return self

    def pace(self, since: float = 0.0, until: float = 1.0) -> float:
        """Samples per second between two parts of the job's time."""
        end = self.settled[-1][0]
        inside = sum(samples for at, samples in self.settled if since * end < at <= until * end)
        return inside / ((until - since) * end)

    def _step(self, event: e.Event[Any]) -> None:
        for action in step(self._core, event, self._now):
            match action:
                case e.Assign(worker=worker, assignment=assignment):
                    self._work(int(worker), assignment)
                case e.Apply(version=version, clocks_stale=clocks):
                    self.most_stale = max(self.most_stale, clocks or 0)
                    self._later(PUBLISH_S, e.Published(version=version))
                case _:
                    pass
        if isinstance(event, e.Pushed):
            self.settled.append((self._now, event.samples))

    def _work(self, rank: int, assignment: Assignment) -> None:
        seconds = 0.0
        if assignment.evaluate_epoch:
            seconds += EVALUATION_S
            evaluated = e.EvaluationReported(
                worker=f"{rank}",
                incarnation=1,
                version=assignment.version,
                epoch=assignment.evaluate_epoch,
                metrics={},
            )
            self._later(seconds, evaluated)
        samples = assigned_samples(assignment)
        if not samples:
            return
        if rank == len(self.slower) - 1:
            self.shares.append(samples)
        computing = samples * SECONDS_PER_SAMPLE * self.slower[rank]
        seconds += (computing + self.overhead[rank]) * self._chance.uniform(1 - self.noise, 1 + self.noise)
        self._seq[rank] += 1
        self._later(
            seconds,
            e.Pushed(
                worker=f"{rank}",
                incarnation=1,
                seq=self._seq[rank],
                assignment=assignment.id,
                base_version=assignment.version,
                samples=samples,
            ),
        )

    def _later(self, seconds: float, event: e.Event[Any]) -> None:
        self._number += 1
        heappush(self._queue, (self._now + seconds, self._number, event))


def even(epochs: int, overhead: float = 0.02) -> Job:
    return Job(slower=[1] * 4, overhead=[overhead] * 4, epochs=epochs).run()


def one_slow(epochs: int, overhead: float = 0.02, slower: float = 10) -> Job:
    return Job(slower=[1, 1, 1, slower], overhead=[overhead] * 4, epochs=epochs).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--slower", type=float, default=10.0)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    print("overhead  even  one slow  of even  its second half  due  stale  shares")
    for overhead in (0.0, 0.01, 0.02, 0.05):
        usual, job = even(given.epochs, overhead), one_slow(given.epochs, overhead, given.slower)
        rest = job.pace(0.5) / usual.pace(0.5)
        print(
            f"{overhead:8.3f} {usual.pace():5.0f} {job.pace():9.0f} {job.pace() / usual.pace():8.2f}"
            f" {rest:16.2f} {(3 + 1 / given.slower) / 4:4.2f} {job.most_stale:6}"
            f"  {job.shares[:12]} … {job.shares[-6:]}"
        )
