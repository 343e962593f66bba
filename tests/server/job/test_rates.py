"""Learning rates that come with pushes: members of a round have the same ones."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Job
from stepping import copied, core_of, state

from gradwire.proto.messages import Phase
from gradwire.proto.refusal import Reason
from gradwire.proto.shares import assigned_samples
from gradwire.server.job import events as e


def job_of(mode: str, workers: int = 2, overlap: str = "both", *, script: bool = True) -> Job:
    """Make a job of scripts, in rounds whose parts are stepped as they come, without other words."""
    return Job(workers, core=core_of(mode, min_workers=workers, overlap=overlap, script=script))


def rate(job: Job, worker: str, *rates: float, assignment: int = 0) -> list[Any]:
    """The first part of a push comes."""
    given = assignment or job.told[worker].id
    return job.step(
        e.RatesReceived(worker=worker, incarnation=1, seq=7, assignment=given, learning_rates=tuple(rates))
    )


def test_the_same_rates_are_taken_and_others_are_refused_by_name_of_worker_group_and_values() -> None:
    job = job_of("sync", 3)
    assert rate(job, "w0", 0.1, 0.05) == []
    assert rate(job, "w1", 0.1, 0.05) == []
    rate(job, "w2", 0.1, 0.2)
    refusal = job.refused()
    assert (refusal.reason, refusal.worker) == (Reason.GROUP, "w2")
    assert refusal.message == (
        "worker 'w2', push 7 learning rate of parameter group 1: expected 0.05, as worker 'w0' has it in this"
        " round, got 0.2"
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((), (0.1,), "group 0: expected that of the job, as worker 'w0' has it in this round, got 0.1"),
        ((0.1,), (), "group 0: expected 0.1, as worker 'w0' has it in this round, got that of the job"),
    ],
)
def test_all_or_none_have_rates_of_their_own(first: Any, second: Any, words: str) -> None:
    job = job_of("sync")
    assert rate(job, "w0", *first) == []
    rate(job, "w1", *second)
    assert words in job.refused().message
    assert rate(job, "w1", *first) == []  # a push that comes after


def test_each_round_has_rates_of_its_own() -> None:
    job = job_of("sync")
    before = job.told["w1"].id
    rate(job, "w0", 0.1)
    job.push("w0", rates=(0.1,))
    job.push("w1", rates=(0.1,))
    job.publish()
    rate(job, "w1", 0.3, assignment=before)  # a part that comes late: nothing asks for it
    assert rate(job, "w1", 0.2) == []
    rate(job, "w0", 0.1)
    assert "expected 0.2" in job.refused().message


def test_where_no_part_is_stepped_early_the_rates_of_what_is_committed_count() -> None:
    job = job_of("sync", overlap="backward")
    assert rate(job, "w0", 0.1) == rate(job, "w1", 0.1) == []
    assert rate(job, "w0", 0.2) == []  # it has abandoned that push, and begun another one
    job.push("w0", rates=(0.2,))
    before = state(job.core)
    job.push("w1", rates=(0.1,))
    assert "worker 'w1'" in job.refused().message
    assert "group 0: expected 0.2, as worker 'w0' has it in this round, got 0.1" in job.refused().message
    assert state(job.core) == before
    job.push("w1", rates=(0.2,))
    assert job.one(e.Apply).version == 1


def test_who_pushes_nothing_has_no_rates() -> None:
    job = job_of("sync", overlap="backward")
    job.push("w0", samples=0)
    job.push("w1", rates=(0.2,))
    assert job.one(e.Apply).version == 1


def test_rates_are_written_down_with_the_state() -> None:
    job = job_of("sync")
    rate(job, "w0", 0.1, 0.2)
    job.core = copied(job.core, "sync")
    rate(job, "w1", 0.1, 0.3)
    assert "expected 0.2, as worker 'w0'" in job.refused().message


@pytest.mark.parametrize("mode", ["async", "stale:bound=1"])
def test_pushes_that_are_applied_by_themselves_may_have_any(mode: str) -> None:
    job = job_of(mode)
    assert rate(job, "w0", 0.1) == rate(job, "w1", 0.2) == []


@pytest.mark.parametrize(("mode", "script"), [("local", True), ("sync", False)])
def test_where_workers_step_or_no_script_does_the_server_takes_none(mode: str, script: bool) -> None:
    job = job_of(mode, script=script)
    assert rate(job, "w0") == []
    rate(job, "w0", 0.1)
    assert job.refused().reason is Reason.GROUP
    assert "none in local mode, where workers take the steps" in job.refused().message


def test_who_is_no_member_hears_of_that_with_its_commit() -> None:
    job = job_of("sync")
    assert rate(job, "w9", 0.1, assignment=1) == []
    assert rate(job, "w0", 0.2) == []


@pytest.mark.parametrize(("batch", "samples"), [(4, 9), (4, 17), (2, 13), (3, 13)])
def test_a_script_has_a_step_in_every_round_so_that_schedulers_count_alike(batch: int, samples: int) -> None:
    core = core_of("sync", min_workers=3, batch_size=batch, epochs=2, script=True)
    job = Job(3, core=core, samples=samples)
    given = list[int]()
    while job.phase() is Phase.RUNNING:
        assert len(job.assignments) == 3
        given += [assigned_samples(each) for each in job.assignments.values()]
        job.round(("w0", "w1", "w2"))
    assert sum(given) == 2 * samples
    assert max(given) <= batch
