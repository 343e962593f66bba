"""Joining, and rounds from their samples to their version, by the sentences of their promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import LEASE_S, MODEL, Job
from stepping import Refuse, core_of, state

from gradwire.proto.messages import Decision, Phase
from gradwire.proto.refusal import Reason
from gradwire.proto.shares import assigned_samples
from gradwire.server.job import events as e
from gradwire.server.job import initial, refusals

# ---- joining


def test_the_first_worker_to_join_initialises_the_parameters() -> None:
    job = Job()
    job.join("a")
    assert job.one(e.Admission) == e.Admission(rank=0, version=0, initialize=True, epoch=0)
    job.join("b")
    assert job.one(e.Admission) == e.Admission(rank=1, version=0, initialize=False, epoch=0, workers=2)


def test_a_repeated_join_gets_the_same_answer() -> None:
    job = Job()
    job.join("a")
    first = job.one(e.Admission)
    job.join("a")
    assert job.one(e.Admission) == first
    assert len(job.core.state.roster.members) == 1


def test_when_the_initialiser_is_lost_another_is_asked() -> None:
    job = Job()
    for worker in ("a", "b"):
        job.join(worker)
        job.attach(worker)
    job.ready("b")
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="crashed"))
    assert job.one(e.RequestInitialize).worker == "b"
    assert initial.check_uploader(job.core.state, "b", 1) is None
    refused = initial.check_uploader(job.core.state, "a", 1)
    assert refused is not None
    assert refused.reason is Reason.NOT_A_MEMBER


def test_who_gets_ready_is_asked_for_the_parameters_if_nobody_else_is() -> None:
    job = Job()
    for worker in ("a", "b"):
        job.join(worker)
    job.attach("a")
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="crashed"))
    assert not job.all(e.RequestInitialize)  # nobody to ask yet
    job.attach("b")
    job.ready("b")
    assert job.one(e.RequestInitialize).worker == "b"
    job.ready("b")  # its stream broke before it heard
    assert job.one(e.RequestInitialize).worker == "b"


def test_parameters_are_initialised_once() -> None:
    job = Job(2)
    before = state(job.core)
    job.initialize("w1")
    assert job.refused().reason is Reason.ALREADY_INITIALIZED
    assert state(job.core) == before


def test_a_worker_with_another_model_is_refused_and_nothing_changes() -> None:
    job = Job(2)
    job.join("x")
    job.attach("x")
    before = state(job.core)
    job.ready("x", model=b"other")
    assert job.refused().reason is Reason.MODEL
    assert state(job.core) == before


def test_a_model_that_was_announced_before_the_first_is_checked_afterwards() -> None:
    job = Job()
    for worker in ("a", "b"):
        job.join(worker)
        job.attach(worker)
    job.ready("b", model=b"other")
    job.initialize("a")
    gone = job.one(e.Disconnect)
    assert (gone.worker, gone.final, gone.refusal.reason) == ("b", True, Reason.MODEL)
    assert job.one(e.LossReported).reason == refusals.brief(gone.refusal)


def test_an_epoch_of_another_length_is_refused_by_both_numbers_and_the_others_hear_why_they_wait() -> None:
    job = Job(1, min_workers=2)
    job.join("b")
    job.attach("b")
    job.step(e.Prepared(worker="b", incarnation=1, fingerprint=MODEL, version=None, train_samples=99))
    refused = job.refused()
    assert refused.field == "epoch"
    assert refused.value == "99 samples (25 batches of 4)"
    assert refused.limit == "40 samples (10 batches of 4), as worker 'w0' has"
    assert "per_epoch=" in refused.remedy
    job.step(e.Left(worker="b", incarnation=1, failed=True, reason="refused: epoch: 99 samples"))
    job.tick(1.5)
    assert job.one(e.Report).text.endswith("; b is lost: refused: epoch: 99 samples")


def test_a_job_that_a_script_begins_later_counts_epochs_and_steps_from_there() -> None:
    job = Job(epochs=30, samples=16)
    for worker in "ab":
        job.join(worker)
        job.attach(worker)
    names: dict[str, Any] = {"worker": "a", "incarnation": 1, "fingerprint": MODEL, "train_samples": 16}
    job.step(e.Initialized(**names, epoch=2, steps=9, epochs=3))
    job.ready("b")
    told = job.told["b"]
    assert (told.epoch, told.progress, told.earlier_steps, told.evaluate_epoch) == (2, 2.0, 9, 0)
    # One worker is ready as the first round opens; of the twelve samples that are left two take four each.
    assert told.total_steps == 9 + 1 + 2


def test_the_first_round_waits_for_enough_workers_and_says_so() -> None:
    job = Job(2, min_workers=3)
    assert job.phase() is Phase.GATHERING
    job.tick(1.5)
    assert "have 2 of 3" in job.one(e.Report).text
    job.bring("w2")
    assert job.phase() is Phase.RUNNING
    assert set(job.assignments) == {"w0", "w1", "w2"}


# ---- rounds


@pytest.mark.parametrize(
    ("samples", "workers", "batch"), [(40, 3, 4), (41, 3, 4), (7, 4, 2), (5, 2, 50), (3, 5, 1)]
)
def test_an_epoch_uses_every_sample_once(samples: int, workers: int, batch: int) -> None:
    job = Job(workers, epochs=1, samples=samples, batch=batch)
    assert job.assignments
    covered: list[int] = []
    while job.phase() is Phase.RUNNING:
        given = job.assignments
        for assignment in given.values():
            assert 0 < assigned_samples(assignment) <= batch
            covered += [each.start + i for each in assignment.ranges for i in range(each.count)]
        job.round(given)
    assert covered == list(range(samples))


def test_a_push_counts_no_more_samples_than_its_worker_was_given() -> None:
    """They are its weight in the mean: with any number, one worker could outweigh all others."""
    job = Job(2, batch=4)
    job.push("w0", samples=5)
    refusal = job.refused()
    assert (refusal.reason, refusal.worker) == (Reason.MALFORMED, "w0")
    assert "at most 4" in refusal.message
    assert "5" in refusal.message
    job.push("w0", seq=1, samples=0)  # less is allowed: a step that was skipped
    assert job.outcome().decision is Decision.ACCEPTED
    job.push("w1")
    assert [c.samples for c in job.one(e.Apply).contributions] == [0, 4]


def test_who_comes_back_while_its_round_is_applied_is_told_the_next_one() -> None:
    """A snapshot for the round that closes would be taken after it was applied, of the next version."""
    job = Job(2)
    job.push("w0")
    job.push("w1")
    assert job.all(e.Apply)
    job.step(e.Detached(worker="w1", incarnation=1))
    job.attach("w1")
    job.ready("w1", version=None)
    assert not job.assignments
    job.publish()
    assert {name: a.version for name, a in job.assignments.items()} == {"w0": 1, "w1": 1}


def test_a_worker_with_other_data_is_refused_and_nothing_changes() -> None:
    job = Job()
    for worker in "abc":
        job.join(worker)
        job.attach(worker)
    ready = e.Prepared(worker="c", incarnation=1, fingerprint=MODEL, version=None, data=7)
    job.step(ready)
    job.step(e.Initialized(worker="a", incarnation=1, fingerprint=MODEL, train_samples=8, data=5))
    gone = job.one(e.Disconnect)
    assert (gone.worker, gone.final, gone.refusal.field) == ("c", True, "checksum of training samples")
    before = state(job.core)
    job.step(replace(ready, worker="b"))
    assert job.refused().field == "checksum of training samples"
    assert state(job.core) == before
    for unknown_or_same in (0, 5):
        job.step(replace(ready, worker="b", data=unknown_or_same))
        assert not job.all(Refuse)


def test_a_replica_that_was_not_the_servers_is_named_and_begins_anew() -> None:
    job = Job(2)
    job.step(e.Detached(worker="w1", incarnation=1))
    job.attach("w1")
    job.step(e.Prepared(worker="w1", incarnation=1, fingerprint=MODEL, version=None, assigned=2, drifted=64))
    (note,) = [each for each in job.all(e.Note) if each.warning]
    assert "version 64" in note.text
    assert "w1" in note.text
    assign = job.one(e.Assign)
    assert (assign.worker, assign.has) == ("w1", None)


def test_a_center_of_elastic_averaging_moves_by_the_sum_of_those_that_answered() -> None:
    """Also of shares of different sizes, and without one that is lost."""
    terms = {"batch_size": 4, "epochs": 9, "lease_seconds": LEASE_S, "min_workers": 3}
    for lost in (False, True):
        job = Job(3, samples=11, core=core_of("local:steps=1,correction=0,elastic=0.1", **terms))
        job.push("w0")
        job.push("w1")
        if lost:
            job.step(e.Left(worker="w2", incarnation=1, failed=True, reason=""))
        else:
            job.push("w2")
        found = job.one(e.Apply).contributions
        assert [each.weight for each in found] == [1.0] * (2 if lost else 3)
        assert lost or len({each.samples for each in found}) == 2
