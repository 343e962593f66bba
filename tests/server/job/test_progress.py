"""Members whose training threads make no progress. The story of one is scripts/progress.txt."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Job
from stepping import core_of

from gradwire.common.liveness import FIRST, TIMES, limit_s
from gradwire.proto.messages import Phase
from gradwire.proto.refusal import Reason
from gradwire.server.job import events as e

STATED_S = 600.0


def hang(job: Job, worker: str, seconds: float, activity: str = "computing") -> None:
    job.step(e.KeepAlive(worker=worker, incarnation=1, activity=activity, stalled_s=seconds))
    job.step(e.Tick())


def stepped(workers: int = 2, **rules: Any) -> Job:
    """Everybody has finished a step, and has the next work."""
    core = core_of(min_workers=workers, batch_size=4, epochs=2, **rules)
    job = Job(workers, core=core)
    job.round([f"w{index}" for index in range(workers)])
    return job


def test_the_limit_is_what_was_stated_unless_the_same_took_long_before() -> None:
    assert limit_s(STATED_S, 1.0, first=False) == STATED_S
    assert limit_s(STATED_S, STATED_S, first=False) == TIMES * STATED_S
    assert limit_s(STATED_S, 0.0, first=True) == FIRST * STATED_S
    assert limit_s(0.0, 9.0, first=True) == float("inf")


def test_an_evaluation_that_hangs_is_made_by_another_one() -> None:
    job = stepped()
    while not any(each.evaluate_epoch for each in job.assignments.values()):
        job.round(["w0", "w1"])
    (by,) = [worker for worker, each in job.assignments.items() if each.evaluate_epoch]
    other = "w1" if by == "w0" else "w0"
    hang(job, by, STATED_S + 1, "evaluating")
    job.push(other)
    job.publish()
    assert job.assignments[other].evaluate_epoch == 1


def test_a_job_ends_although_the_only_member_left_hangs_in_the_last_evaluation() -> None:
    job = stepped(1)
    while job.phase() is not Phase.FINISHING:
        job.round(["w0"])
    hang(job, "w0", STATED_S + 1, "evaluating")
    assert job.all(e.Finish)
    assert job.phase() is Phase.FINISHED


def test_nobody_waits_for_who_hangs_when_the_job_is_over() -> None:
    job = stepped()
    hang(job, "w1", STATED_S + 1)
    job.attach("w1")
    while job.phase() is not Phase.FINISHING:
        job.round(["w0"])
    while (asked := job.core.state.evaluations.asked) is not None:
        version, epoch = asked.version, asked.epoch
        job.step(e.EvaluationReported(worker="w0", incarnation=1, version=version, epoch=epoch, metrics={}))
    assert job.phase() is Phase.FINISHED
    job.step(e.Tick())
    cut = job.one(e.Disconnect)
    assert (cut.worker, cut.final, cut.refusal.reason) == ("w1", True, Reason.JOB_FINISHED)
    assert "w1" not in job.core.state.roster.members


def test_what_took_long_once_is_given_more_time() -> None:
    job = stepped()
    hang(job, "w1", 500)
    hang(job, "w1", 1)
    hang(job, "w1", 4 * STATED_S)
    assert not job.all(e.Disconnect)
    hang(job, "w1", TIMES * 500 + 1)
    assert job.one(e.Disconnect).worker == "w1"


def test_other_activities_are_not_given_more_time_for_that() -> None:
    job = stepped()
    hang(job, "w1", 500, "evaluating")
    hang(job, "w1", 1)
    hang(job, "w1", STATED_S + 1)
    assert job.one(e.Disconnect).worker == "w1"


def test_without_a_limit_nobody_is_suspended() -> None:
    job = stepped(progress_seconds=0.0)
    hang(job, "w1", 1e6)
    assert not job.all(e.Disconnect)


def test_who_loads_its_data_is_waited_for() -> None:
    job = Job(1, min_workers=2)
    job.join("w1")
    job.attach("w1")
    hang(job, "w1", 1e5, "loading the task")
    assert not job.all(e.Disconnect)


def test_a_first_worker_that_hangs_does_not_keep_the_parameters_from_others() -> None:
    job = Job()
    for name in ("w0", "w1"):
        job.join(name)
        job.attach(name)
    hang(job, "w0", 1e5, "loading the task")
    assert not job.all(e.Disconnect)
    job.ready("w1")
    hang(job, "w0", 1e5, "loading the task")
    assert job.one(e.RequestInitialize).worker == "w1"


@pytest.mark.parametrize("seconds", [301.0, STATED_S])
def test_whoever_is_waited_for_is_named_with_the_time_without_progress(seconds: float) -> None:
    job = stepped()
    job.push("w0")
    hang(job, "w1", seconds)
    assert f"w1) has made no progress for {seconds:.0f} s (computing); limit 600 s" in job.one(e.Note).text
    assert f"computing, no progress for {seconds:.0f} s" in job.core.waiting(job.now).text


def test_a_member_that_is_suspended_is_named_where_everybody_is_waited_for() -> None:
    job = stepped(1)
    hang(job, "w0", STATED_S + 1)
    job.attach("w0")
    assert "suspended because their training threads hang: rank 0 (w0)" in job.core.waiting(job.now).text
