"""Pushes that carry their workers' buffers (`server/job/buffers`)."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import MODEL, Job
from stepping import core_of

from gradwire.server.job import events as e


class WithBuffers(Job):
    """Two workers train a model that has some: five rounds of 8 samples in an epoch."""

    def __init__(self, mode: str = "sync", how: str = "mean", samples: int = 40, **rules: Any) -> None:
        core = core_of(mode, min_workers=2, batch_size=4, epochs=2, buffers=how, **rules)
        super().__init__(2, core=core, samples=samples)

    def initialize(self, worker: str) -> list[Any]:
        return self.step(
            e.Initialized(
                worker=worker, incarnation=1, fingerprint=MODEL, train_samples=self.samples, buffers=True
            )
        )

    def collections(self, *workers: str) -> list[int]:
        return [self.told[worker].collection for worker in workers]


def test_the_last_round_of_an_epoch_brings_them() -> None:
    job = WithBuffers()
    found: list[list[int]] = []
    for _ in range(10):
        found.append(job.collections("w0", "w1"))
        assert job.core.state.collects("w0", 1, found[-1][0]) == (found[-1][0] > 0)
        job.round(("w0", "w1"))
    assert found == [*[[0, 0]] * 4, [1, 1], *[[0, 0]] * 4, [2, 2]]


def test_where_each_push_is_a_version_the_last_of_each_worker_does() -> None:
    job = WithBuffers("async")
    found: list[tuple[str, int]] = []
    while job.core.state.epoch < 1:
        worker = ("w0", "w1")[len(found) % 2]
        found.append((worker, job.told[worker].collection))
        job.push(worker)
        job.publish()
    assert found[-2:] == [("w0", 1), ("w1", 1)]
    assert sum(collection > 0 for _, collection in found) <= 4


@pytest.mark.parametrize(("how", "expected"), [("rank0", [1, 0]), ("local", [0, 0])])
def test_no_more_come_than_are_wanted(how: str, expected: list[int]) -> None:
    job = WithBuffers(how=how)
    for _ in range(4):
        job.round(("w0", "w1"))
    assert job.collections("w0", "w1") == expected


def test_a_newcomer_takes_over_those_of_the_others_before_its_own_count() -> None:
    job = WithBuffers(samples=80)
    job.bring("w2")
    job.round(("w0", "w1"))  # which had begun
    assert job.collections("w0", "w1", "w2") == [1, 1, 0], "those of the others are wanted"
    assert not job.told["w2"].take_buffers, "they are not there yet"
    job.round(("w0", "w1", "w2"))
    assert [job.told[worker].take_buffers for worker in ("w0", "w1", "w2")] == [False, False, True]
    assert job.collections("w0", "w1") == [0, 0]
    while job.told["w0"].collection != 2:
        job.round(("w0", "w1", "w2"))
    assert job.collections("w0", "w1", "w2") == [2, 2, 2], "at the epoch's end"
    assert not job.told["w2"].take_buffers


def test_the_first_that_is_back_does_not_speak_for_the_others() -> None:
    job = WithBuffers(how="rank0")
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="lost"))
    job.push("w1")
    job.publish()
    job.bring("w0", 2)
    assert job.core.state.roster.members["w0"].rank == 0
    job.round(("w1",))
    assert job.collections("w0", "w1") == [0, 1]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"evaluate_every": "4steps"}, [0, 0, 1, 1, 2, 0, 3, 3]),
        ({"evaluate_every": "0.5epochs"}, [0, 0, 1, 0, 3, 0, 0, 4]),
        ({"max_steps": 3}, [0, 1, 1]),
    ],
)
def test_they_come_before_an_evaluation_by_steps_or_parts_of_epochs_and_before_the_last_step(
    rules: dict[str, Any], expected: list[int]
) -> None:
    """With two workers 2 steps before, which may be pushes of either."""
    job = WithBuffers(**rules)
    found: list[int] = []
    for _ in expected:
        assigned = job.told["w0"]
        found.append(assigned.collection)
        if assigned.evaluate_epoch:
            report = e.EvaluationReported(
                worker="w0",
                incarnation=1,
                version=assigned.version,
                epoch=assigned.evaluate_epoch,
                metrics={},
            )
            job.step(report)
        job.round(("w0", "w1"))
    assert found == expected


def test_they_come_every_second_where_time_decides() -> None:
    job = WithBuffers(max_seconds=100.0)
    found: list[int] = []
    for _ in range(4):
        found.append(job.told["w0"].collection)
        job.now += 0.6
        job.round(("w0", "w1"))
    assert found == [0, 0, 1, 0]
