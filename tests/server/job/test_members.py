"""Members that are lost, come back or are replaced."""

from __future__ import annotations

import pytest
from jobs import LEASE_S, MODEL, Job
from stepping import core_of, state

from gradwire.proto.messages import Decision, Phase, Range, Welcome
from gradwire.proto.refusal import Reason
from gradwire.server.job import events as e


def test_what_a_lost_member_had_pushed_is_still_applied() -> None:
    job = Job(3)
    job.push("w1")
    job.push("w0")
    job.tick(LEASE_S - 1)
    job.heartbeat("w0", "w2")
    job.tick(1.5)
    assert not job.all(e.Apply)
    job.push("w2")
    assert [c.key.worker for c in job.one(e.Apply).contributions] == ["w0", "w1", "w2"]


def test_a_round_counts_on_a_member_that_is_reconnecting_when_it_opens() -> None:
    job = Job(2)
    job.push("w0")
    job.push("w1")
    job.step(e.Detached(worker="w1", incarnation=1))
    job.publish()
    assert set(job.assignments) == {"w0"}
    assert job.assignments["w0"].world == 2
    job.attach("w1")
    assert not job.assignments
    job.ready("w1", version=0)
    assert job.assignments["w1"].version == 1
    assert job.one(e.Assign).has == 0


def test_a_member_that_comes_back_after_its_lease_hears_what_became_of_its_push() -> None:
    job = Job(2)
    job.push("w1", seq=1)
    accepted = job.outcome()
    job.tick(LEASE_S - 1)
    job.heartbeat("w0")
    job.tick(2)
    assert "w1" not in job.core.state.roster.members
    job.attach("w1")
    assert job.one(Welcome).last_seq == 1
    job.push("w1", seq=1)
    assert job.outcome() == accepted


def test_messages_of_a_member_whose_lease_is_over_are_refused_with_that_reason() -> None:
    job = Job(2)
    job.tick(LEASE_S - 1)
    job.heartbeat("w0")
    job.tick(2)
    job.step(e.KeepAlive(worker="w1", incarnation=1))
    assert job.refused().field == "lease"
    assert job.refused().remedy == "reconnect"


def test_who_comes_back_to_find_its_rank_taken_gets_another() -> None:
    job = Job(2)
    job.tick(LEASE_S - 1)
    job.heartbeat("w0")
    job.tick(2)
    job.bring("new")
    assert job.core.state.roster.members["new"].rank == 1
    job.attach("w1")
    assert job.one(Welcome).rank == 2


def test_what_a_member_was_sent_counts_as_what_it_has() -> None:
    job = Job(1, samples=400)
    for version in range(3):
        assert job.round(["w0"]).members == ("w0",)
        assert job.one(e.Assign).has == version + 1
        assert job.assignments["w0"].version == version + 1


def test_who_is_away_when_a_round_closes_gets_the_update_with_its_next_assignment() -> None:
    job = Job(3, samples=400)
    job.push("w0")
    job.step(e.Detached(worker="w0", incarnation=1))
    job.push("w1")
    job.push("w2")
    assert job.one(e.Apply).members == ("w1", "w2")
    job.publish()
    assert {action.worker: action.has for action in job.all(e.Assign)} == {"w1": 1, "w2": 1}
    job.attach("w0")
    job.ready("w0", version=0)
    assert (job.one(e.Assign).has, job.one(e.Assign).assignment.version) == (0, 1)


def test_a_new_incarnation_fences_the_old_one() -> None:
    job = Job(2)
    job.step(e.Detached(worker="w1", incarnation=1))
    job.join("w1", incarnation=2)
    assert job.one(e.Admission).rank == 1
    job.push("w1", incarnation=1, seq=1)
    assert job.refused().reason is Reason.FENCED
    job.push("w0")
    assert [c.key.worker for c in job.one(e.Apply).contributions] == ["w0"]


def test_what_the_old_incarnation_had_completed_stays_applied() -> None:
    job = Job(2)
    job.push("w1")
    job.step(e.Detached(worker="w1", incarnation=1))
    job.join("w1", incarnation=2)
    job.push("w0")
    assert [c.key.worker for c in job.one(e.Apply).contributions] == ["w0", "w1"]


def test_an_older_incarnation_is_refused() -> None:
    job = Job()
    job.bring("a", incarnation=5)
    before = state(job.core)
    job.join("a", incarnation=4)
    assert job.refused().reason is Reason.FENCED
    assert state(job.core) == before


def test_of_two_live_workers_with_one_id_the_second_is_refused() -> None:
    job = Job(2)
    before = state(job.core)
    job.join("w1", incarnation=2)
    assert job.refused().reason is Reason.DUPLICATE_WORKER
    assert state(job.core) == before


def test_samples_that_are_drawn_again_are_for_another_push() -> None:
    """The old division among two and the new one for whoever comes back first do not mix."""
    job = Job(2)
    old = job.told["w1"]
    job.tick(LEASE_S + 1)
    job.attach("w1")
    job.ready("w1", version=0)
    new = job.told["w1"]
    assert (new.version, new.ranges, new.world) == (0, (Range(start=0, count=4),), 1)
    job.push("w1", to=old)
    assert job.outcome().decision is Decision.REFUSED
    job.push("w1", to=new)
    assert job.outcome().decision is Decision.ACCEPTED


def test_who_comes_back_with_its_push_before_its_samples_are_given_to_others_takes_them_back() -> None:
    job = Job(2, samples=400)
    old = job.told["w1"]
    job.tick(LEASE_S - 1)
    job.heartbeat("w0")
    job.tick(2)
    job.push("w0")
    job.attach("w1")
    job.push("w1", to=old)  # the round is closed: the gradient goes into its residual
    assert job.outcome().decision is Decision.REFUSED
    job.publish()
    assert job.told["w0"].ranges == (Range(start=8, count=4),)
    assert job.core.state.repeated_samples == 0


def test_samples_that_were_trained_on_by_two_are_counted() -> None:
    job = Job(2, samples=400)
    old = job.told["w1"]
    job.tick(LEASE_S - 1)
    job.heartbeat("w0")
    job.tick(2)
    job.push("w0")
    job.publish()
    assert job.told["w0"].ranges == old.ranges
    job.attach("w1")
    job.push("w1", to=old)
    assert job.core.state.repeated_samples == 4


def test_a_round_that_everyone_left_with_pushes_made_is_applied() -> None:
    job = Job(2)
    job.push("w0")
    job.tick(LEASE_S + 1)
    assert [c.key.worker for c in job.one(e.Apply).contributions] == ["w0"]
    job.publish()
    assert job.core.state.version == 1
    assert job.phase() is Phase.GATHERING


def test_a_lease_that_ran_out_while_the_round_is_applied_does_no_harm() -> None:
    job = Job(2)
    job.push("w0")
    job.push("w1")
    job.tick(LEASE_S + 1)
    job.publish()
    assert job.core.state.version == 1
    assert job.phase() is Phase.GATHERING


@pytest.mark.parametrize("mode", ["async:compensation=0.1", "stale:bound=9,compensation=0.1"])
def test_work_taken_back_after_a_lease_needs_no_version_that_the_shard_has_forgotten(mode: str) -> None:
    """Three are lost; what one of them began with is kept no longer when it comes back two versions later."""
    job = Job(core=core_of(mode, lease_seconds=LEASE_S))
    workers = ("w0", "w1", "w2", "w3")
    for worker in workers:
        job.bring(worker)
    began = job.told["w3"]
    for worker in workers[1:]:
        job.step(e.Detached(worker=worker, incarnation=1))
    job.tick(LEASE_S / 2)
    job.heartbeat("w0")
    job.tick(LEASE_S / 2 + 1)
    for _ in range(2):
        job.push("w0")
        job.publish()
    job.attach("w3")
    job.step(
        e.Prepared(worker="w3", incarnation=1, fingerprint=MODEL, version=began.version, assigned=began.id)
    )
    job.push("w3", to=began)
    why = job.outcome().refusal
    assert why is not None
    assert why.reason is Reason.STALE
    assert not job.all(e.Apply)
    assert job.told["w3"].version == 2, "it goes on with the current version"


@pytest.mark.parametrize("mode", ["async", "async:compensation=0.1", "stale:bound=9,compensation=0.1"])
def test_samples_of_work_taken_back_after_a_lease_are_trained_on(mode: str) -> None:
    """Nothing has been applied meanwhile, so its push counts, and the job waits for it."""
    job = Job(core=core_of(mode, lease_seconds=LEASE_S, epochs=1, batch_size=4), samples=8)
    for worker in ("w0", "w1"):
        job.bring(worker)
    began = job.told["w1"]
    job.step(e.Detached(worker="w1", incarnation=1))
    job.tick(LEASE_S / 2)
    job.heartbeat("w0")
    job.tick(LEASE_S / 2 + 1)
    job.attach("w1")
    job.step(
        e.Prepared(worker="w1", incarnation=1, fingerprint=MODEL, version=began.version, assigned=began.id)
    )
    job.push("w0")
    job.publish()
    assert job.phase() is Phase.RUNNING
    job.push("w1", to=began)
    assert job.outcome().decision is Decision.ACCEPTED
