"""A new plan: control puts it in force when nothing that was accepted is of the old one."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Job
from stepping import core_of

from gradwire.proto.messages import Decision
from gradwire.proto.refusal import Reason
from gradwire.server.job import events as e


def planned(job: Job) -> list[Any]:
    return job.step(e.PlanPrepared())


def job_of(mode: str, workers: str, *, samples: int = 400, **rules: Any) -> Job:
    job = Job(core=core_of(mode, min_workers=len(workers), **rules), samples=samples)
    for worker in workers:
        job.bring(worker)
    return job


def test_between_rounds_and_before_the_next_assignment() -> None:
    job = job_of("sync", "ab")
    assert planned(job) == []
    job.push("a")
    assert not job.all(e.Adopt)
    job.push("b")
    assert not job.all(e.Adopt), "the round is being applied"
    done = [action for action in job.publish() if isinstance(action, e.Adopt | e.Assign)]
    adopt, *assigns = done
    assert adopt == e.Adopt(plan=2, version=1, members={"a": 1, "b": 1})
    assert [each.assignment.plan for each in assigns if isinstance(each, e.Assign)] == [2, 2]
    assert (job.core.state.plan, job.core.state.planned) == (2, False)


def test_at_once_where_nobody_works() -> None:
    job = Job(core=core_of(min_workers=2))
    job.bring("a")
    planned(job)
    assert job.core.state.plan == 1, "there is nothing to be done under it either"
    job.bring("b")
    assert job.one(e.Adopt).plan == 2
    assert {each.plan for each in job.assignments.values()} == {2}


def test_several_plans_that_wait_are_one() -> None:
    job = job_of("sync", "a")
    planned(job)
    planned(job)
    job.round("a")
    assert job.one(e.Adopt).plan == 2
    job.round("a")
    assert not job.all(e.Adopt)


def test_who_is_late_is_sent_what_it_missed_and_is_stale() -> None:
    job = job_of("sync:backup=1", "abc", batch_size=2)
    late = job.assignments["c"]
    planned(job)
    job.round("ab")
    assert job.one(e.Adopt).members == {"a": 1, "b": 1, "c": 0}
    job.push("c", to=late)
    refusal = job.outcome().refusal
    assert refusal is not None
    assert refusal.reason is Reason.STALE


@pytest.mark.parametrize("mode", ["async", "stale:bound=9"])
def test_where_pushes_are_applied_one_by_one_all_that_were_accepted_are_first(mode: str) -> None:
    job = job_of(mode, "abc")
    job.push("a")
    job.push("b")
    planned(job)
    assert not job.all(e.Adopt)
    job.push("c")  # too late: it would have to be applied as well
    assert job.outcome().decision is Decision.REFUSED
    job.publish()
    assert not job.all(e.Adopt)
    assert not job.all(e.Assign), "it would come too late"
    job.publish()
    assert job.one(e.Adopt).plan == 2
    assert {each.plan for each in job.assignments.values()} == {2}
    assert sorted(job.assignments) == ["a", "b", "c"]


@pytest.mark.parametrize("mode", ["async", "stale:bound=9"])
def test_what_is_being_computed_is_late_and_its_samples_go_out_to_nobody_else(mode: str) -> None:
    job = job_of(mode, "ab")
    old = {worker: job.told[worker] for worker in "ab"}
    planned(job)
    assert job.core.state.plan == 2
    for worker in "ab":
        job.push(worker, to=old[worker])
        refusal = job.outcome().refusal
        assert refusal is not None
        assert refusal.reason is Reason.STALE
        new = job.assignments[worker]
        assert new.plan == 2
        assert not {each.start for each in new.ranges} & {each.start for each in old[worker].ranges}


def test_who_comes_back_after_its_lease_goes_on_with_work_of_an_older_plan_and_is_stale() -> None:
    job = job_of("async", "ab")
    old = job.told["a"]
    job.heartbeat("b")
    job.tick(8)
    job.heartbeat("b")
    job.tick(8)
    assert "a" not in job.core.state.roster.members
    planned(job)
    assert job.core.state.plan == 2
    job.attach("a")
    job.step(e.Prepared(worker="a", incarnation=1, fingerprint=b"model", version=0, assigned=old.id))
    job.push("a", to=old)
    refusal = job.outcome().refusal
    assert refusal is not None
    assert refusal.reason is Reason.STALE


@pytest.mark.parametrize(("samples", "comes"), [(8, False), (28, False), (32, True)])
def test_a_plan_comes_only_if_everybody_is_sure_to_push_again(samples: int, comes: bool) -> None:
    """A push that is under way when the plan comes into force goes out with the next push."""
    job = job_of("async", "ab", samples=samples, batch_size=4, epochs=1)
    planned(job)
    assert job.core.state.plan == 1 + comes
    for worker in "ab":
        job.push(worker)
        assert (job.outcome().decision is Decision.ACCEPTED) == (not comes)


def test_a_push_under_another_plan_than_its_assignments_is_refused() -> None:
    job = job_of("sync", "a")
    told = job.told["a"]
    push = e.Pushed("a", 1, seq=1, assignment=told.id, base_version=0, samples=1, plan=2)
    job.step(push)
    assert job.refused().reason is Reason.PLAN
    assert "plan: expected 1, got 2" in job.refused().message


def test_coded_mode_ignores_a_plan() -> None:
    job = job_of("coded", "ab")
    (note,) = planned(job)
    assert "ignored a new plan" in note.text
    assert (job.core.state.plan, job.core.state.planned) == (1, False)


@pytest.mark.parametrize("mode", ["async", "stale:bound=9"])
def test_who_was_told_before_it_had_the_version_and_lost_its_stream_is_told_anew(mode: str) -> None:
    """An assignment overtakes the update that it waits for."""
    job = job_of(mode, "ab")
    job.push("a")
    job.publish()
    lost = job.told["a"]
    assert lost.version == 1
    job.step(e.Detached("a", 1))
    job.attach("a")
    job.step(e.Prepared("a", 1, fingerprint=b"model", version=0, assigned=lost.id))
    told = job.one(e.Assign)
    assert (told.assignment.version, told.has) == (1, 0)
    assert told.assignment.id > lost.id
    assert told.assignment.ranges == lost.ranges
