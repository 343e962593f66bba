"""Where the parameters are in coded mode: the server's copy, members that are away, replicas that drift."""

from __future__ import annotations

from typing import Any

from coded_jobs import Job, some

from gradwire.coded.copies import DRIFT_VERSIONS
from gradwire.proto.messages import Phase
from gradwire.server.job import events as e


def test_who_joins_gets_a_copy_that_the_round_waits_for() -> None:
    job = Job(2, redundancy=1)
    job.round()
    job.step(e.Joined(worker="z", incarnation=1))
    assert not some(job.come("z", version=None), e.Assign)
    actions = job.round()
    assert not some(actions, e.Assign)
    (request,) = some(actions, e.RequestSnapshot)
    assert (request.worker, request.version, request.apply) == ("a", 2, 2)
    assert "s for a copy of version 2" in job.core.waiting(job.now).text
    assert job.mode.wants_copy("a", 2)
    assert not job.mode.wants_copy("b", 2)
    actions = job.copied("a", 2)
    has = {assign.worker: assign.has for assign in some(actions, e.Assign)}
    assert has == {"a": 2, "b": 2, "z": None}


def test_who_was_asked_for_the_copy_and_is_lost_is_replaced() -> None:
    job = Job(2, redundancy=1)
    job.round()
    job.step(e.Joined(worker="z", incarnation=1))
    job.come("z", version=None)
    job.round()
    actions = job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    assert [request.worker for request in some(actions, e.RequestSnapshot)] == ["b"]


def test_a_copy_that_has_arrived_counts_whatever_becomes_of_who_sent_it() -> None:
    job = Job(1, redundancy=1)
    job.round()
    job.step(e.Joined(worker="z", incarnation=1))
    job.come("z", version=None)
    job.round()
    arrived = e.SnapshotReceived(worker="a", incarnation=1, version=2)
    assert len(some(job.step(arrived), e.InstallSnapshot)) == 1
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="told to"))
    assert job.core.state.version == 2
    (assign,) = some(job.step(e.SnapshotInstalled(version=2)), e.Assign)
    assert (assign.worker, assign.has, assign.assignment.version) == ("z", None, 2)


def test_who_leaves_may_hand_over_the_only_copy() -> None:
    job = Job(1, redundancy=1)
    job.round()
    job.round()
    arrived = e.SnapshotReceived(worker="a", incarnation=1, version=1, leaving=True)
    assert len(some(job.step(arrived), e.InstallSnapshot)) == 1
    job.step(e.Left(worker="a", incarnation=1, failed=False, reason="told to"))
    assert job.core.state.version == 2  # not before the copy is in place
    (note, *_) = some(job.step(e.SnapshotInstalled(version=1)), e.Note)
    assert "1 version older" in note.text
    assert job.core.state.version == 3


def test_a_snapshot_that_was_not_asked_for_is_not_taken() -> None:
    job = Job(2, redundancy=1)
    job.round()
    assert job.step(e.SnapshotReceived(worker="a", incarnation=1, version=1)) == [
        e.Drop(key=e.SnapshotKey("a", 1, 1))
    ]


def test_everybody_lost_means_back_to_the_copy() -> None:
    job = Job(2, redundancy=1)
    job.round()
    job.round()
    for name in "ab":
        job.step(e.Left(worker=name, incarnation=1, failed=True, reason="told to"))
    assert job.core.state.version == 3
    job.step(e.Joined(worker="z", incarnation=1))
    actions = job.come("z", version=None)
    (assign,) = some(actions, e.Assign)
    assert (assign.has, assign.assignment.version, assign.assignment.apply) == (None, 3, 0)
    (first, *_) = assign.assignment.ranges
    assert first.start == 0


def outage(job: Job) -> list[Any]:
    """Nobody is heard of until all leases are over."""
    return job.step(e.Tick(), after=11.0)


def test_who_joins_waits_for_those_that_are_away_with_the_current_version() -> None:
    job = Job(2, redundancy=1, samples=6000)
    job.round()
    job.round()
    outage(job)
    job.step(e.Joined(worker="z", incarnation=1), after=100.0)
    assert not some(job.come("z", version=None), e.Assign)
    text = job.core.waiting(job.now).text
    assert "s for members that have version 2" in text
    assert "(a, gone), rank 1 (b, gone)" in text
    assert "waited 30 s, training continues from the server's copy, version 0" in text
    for _ in range(5):
        job.step(e.KeepAlive(worker="z", incarnation=1), after=5.0)
        assert all(isinstance(action, e.Report) for action in job.step(e.Tick()))
    actions = job.come("a", version=2, assigned=job.assigned["a"].assignment.id)
    assert [request.worker for request in some(actions, e.RequestSnapshot)] == ["a"]
    assert job.core.state.version == 2
    actions = job.copied("a", 2)
    assert {assign.worker: assign.has for assign in some(actions, e.Assign)} == {"a": 2, "z": None}


def test_when_nobody_comes_back_with_the_current_version_training_goes_on_from_the_copy() -> None:
    job = Job(2, redundancy=1, samples=6000)
    job.round()
    job.round()
    outage(job)
    job.step(e.Joined(worker="z", incarnation=1))
    job.come("z", version=None)
    actions: list[Any] = []
    while not some(actions, e.Relabel):
        job.step(e.KeepAlive(worker="z", incarnation=1), after=5.0)
        actions = job.step(e.Tick())
    assert 10.0 + 30.0 < job.now <= 10.0 + 30.0 + 6.0
    (assign,) = some(actions, e.Assign)
    assert (assign.worker, assign.has, assign.assignment.version) == ("z", None, 3)
    (first, *_) = assign.assignment.ranges
    assert first.start == 0


def test_those_that_came_back_as_another_incarnation_are_not_waited_for() -> None:
    job = Job(1, redundancy=1, samples=6000)
    job.round()
    outage(job)
    job.step(e.Joined(worker="a", incarnation=2))
    job.step(e.Attached(worker="a", incarnation=2))
    prepared = e.Prepared(worker="a", incarnation=2, fingerprint=b"", version=None, assigned=0)
    (assign,) = some(job.step(prepared), e.Assign)
    assert (assign.has, assign.assignment.version) == (None, 2)


def test_replicas_that_drift_are_named_and_brought_together_when_the_epoch_ends() -> None:
    job = Job(3, samples=12)
    (note,) = some(job.round("001"), e.Note)
    assert "replicas of rank 2 (c) differ from that of rank 0 (a)" in note.text
    assert job.mode.gauges["drifting"] == 1
    actions = job.round("001")  # the epoch is over
    assert not some(actions, e.Assign)
    assert len(some(actions, e.RequestSnapshot)) == 1
    actions = job.copied("a", 2)
    assert {assign.worker: assign.has for assign in some(actions, e.Assign)} == {"a": 2, "b": 2, "c": None}
    job.round("000")
    assert job.mode.gauges["drifting"] == 0


def test_drift_does_not_go_on_for_ever() -> None:
    job = Job(2, redundancy=1, samples=10_000)
    rounds = 0
    while not some(job.round("01"), e.RequestSnapshot):
        rounds += 1
        assert rounds <= DRIFT_VERSIONS
    assert rounds > DRIFT_VERSIONS / 2


def test_the_job_ends_with_a_copy_of_the_last_version() -> None:
    job = Job(2, redundancy=1, samples=4, epochs=1)
    actions = job.round()
    phases = [job.core.state.phase]
    assert len(some(actions, e.RequestSnapshot)) == 1
    job.copied("a", 1)
    phases.append(job.core.state.phase)
    actions = job.step(e.EvaluationReported(worker="a", incarnation=1, version=1, epoch=1, metrics={}))
    phases.append(job.core.state.phase)
    assert phases == [Phase.RUNNING, Phase.FINISHING, Phase.FINISHED]
    assert len(some(actions, e.Finish)) == 1


def come_back(job: Job, name: str, version: int) -> None:
    job.step(e.Joined(worker=name, incarnation=1))
    job.come(name, version=version, assigned=job.assigned[name].assignment.id)


def test_an_outage_longer_than_the_lease_loses_nothing_if_members_come_back_with_the_version() -> None:
    """Finding F3: training went back to the last copy, here version 0."""
    job = Job(3, samples=600)
    for _ in range(50):
        job.round()
    progress = job.core.state.samples.progress
    actions = job.step(e.Tick(), after=10.5)
    assert [lost.name for lost in some(actions, e.LossReported)] == ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)"]
    assert job.core.state.version == 50
    assert "rank 0 (a, gone)" in job.core.waiting(job.now).text
    come_back(job, "b", 50)
    come_back(job, "a", 50)
    come_back(job, "c", 50)
    assert job.core.state.version == 50
    assert {job.assigned[name].assignment.version for name in "abc"} == {50}
    assert job.core.state.samples.progress == progress


def test_members_that_had_not_taken_the_last_step_come_back_with_its_sum() -> None:
    job = Job(2, redundancy=1, samples=600)
    job.round()
    job.step(e.Tick(), after=10.5)
    come_back(job, "a", 0)
    assert job.core.state.version == 1
    assert job.assigned["a"].assignment.apply == 1
