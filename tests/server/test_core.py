"""The state machine, by the sentences of its promises. No sockets, no clock: `now` is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from stepping import Refuse, core_of, state, step

from gradwire.proto.messages import Assignment, Decision, EpochStatus, Outcome, Phase, Range, Welcome
from gradwire.proto.refusal import Reason, Refusal
from gradwire.proto.shares import assigned_samples
from gradwire.server.job import events as e
from gradwire.server.job.core import Core
from gradwire.server.job.roster import OUTCOMES_PER_MEMBER
from gradwire.server.job.schedule import parse_schedule

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
            min_workers=max(1, needed), batch_size=batch, epochs=epochs, lease_s=LEASE_S
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
        return self.core.phase

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
            e.Initialized(
                worker=worker,
                incarnation=1,
                fingerprint=MODEL,
                train_samples=self.samples,
            )
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
    ) -> list[Any]:
        """Without other words: the next push, for what it was told last, with all samples of that."""
        if to is None:
            to = self.told.get(worker, Assignment(id=0, version=self.core.version))
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
                loss=1.0,
                samples=assigned_samples(to) if samples is None else samples,
            )
        )

    def publish(self) -> list[Any]:
        return self.step(e.Published(version=self.core.version + 1))

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
            self.step(e.Heard(worker=worker, incarnation=1))

    @property
    def assignments(self) -> dict[str, Assignment]:
        return {action.worker: action.assignment for action in self.all(e.Assign)}

    def refused(self) -> Refusal:
        return self.one(Refuse).refusal

    def outcome(self) -> Outcome:
        return self.one(e.Decided).outcome


# ---- joining


def test_the_first_worker_to_join_initialises_the_parameters() -> None:
    job = Job()
    job.join("a")
    assert job.one(e.Admission) == e.Admission(rank=0, version=0, initialize=True)
    job.join("b")
    assert job.one(e.Admission) == e.Admission(rank=1, version=0, initialize=False)


def test_a_repeated_join_gets_the_same_answer() -> None:
    job = Job()
    job.join("a")
    first = job.one(e.Admission)
    job.join("a")
    assert job.one(e.Admission) == first
    assert len(job.core.roster.members) == 1


def test_when_the_initialiser_is_lost_another_is_asked() -> None:
    job = Job()
    for worker in ("a", "b"):
        job.join(worker)
        job.attach(worker)
    job.ready("b")
    job.step(e.Left(worker="a", incarnation=1, failed=True, reason="crashed"))
    assert job.one(e.RequestInitialize).worker == "b"
    assert job.core.check_initialize("b", 1) is None
    refused = job.core.check_initialize("a", 1)
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


def test_the_first_round_waits_for_enough_workers_and_says_so() -> None:
    job = Job(2, min_workers=3)
    assert job.phase() is Phase.GATHERING
    job.tick(1.5)
    assert "have 2 of 3" in job.one(e.Report).text
    job.bring("w2")
    assert job.phase() is Phase.RUNNING
    assert set(job.assignments) == {"w0", "w1", "w2"}


# ---- rounds


@pytest.mark.parametrize("order", list(itertools.permutations(["w0", "w1", "w2"])))
def test_contributions_are_applied_in_rank_order_whatever_order_they_came_in(order: tuple[str, ...]) -> None:
    job = Job(3)
    apply = job.round(order)
    assert [contribution.key.worker for contribution in apply.contributions] == ["w0", "w1", "w2"]
    assert apply.version == 1


def test_a_round_closes_when_every_member_has_pushed_and_not_before() -> None:
    job = Job(3)
    job.push("w2")
    assert not job.all(e.Apply)
    job.push("w0")
    assert not job.all(e.Apply)
    job.push("w1")
    assert job.one(e.Apply).version == 1


def test_the_next_round_opens_when_the_version_is_published() -> None:
    job = Job(2)
    job.round(["w0", "w1"])
    assert {assignment.version for assignment in job.assignments.values()} == {1}


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


def test_who_joins_during_a_round_takes_part_from_the_next_one_on() -> None:
    job = Job(2)
    job.bring("late")
    assert not job.assignments
    job.push("late")
    assert job.outcome().decision is Decision.REFUSED
    job.round(["w0", "w1"])
    assert set(job.assignments) == {"w0", "w1", "late"}
    assert [a.position for a in job.assignments.values()] == [0, 1, 2]
    assert next(a for a in job.all(e.Assign) if a.worker == "late").has is None


def test_a_push_without_samples_counts_as_having_pushed() -> None:
    job = Job(2)
    job.push("w0", samples=0)
    job.push("w1")
    assert [c.samples for c in job.one(e.Apply).contributions] == [0, 4]


# ---- exactly once


def test_a_duplicate_gets_the_original_outcome_while_the_first_waits_and_after() -> None:
    job = Job(2)
    job.push("w0", seq=1)
    first = job.outcome()
    job.push("w0", seq=1)
    assert job.outcome() == first
    job.push("w1")
    apply = job.one(e.Apply)
    assert [contribution.key.worker for contribution in apply.contributions] == ["w0", "w1"]
    job.push("w0", seq=1)
    assert job.outcome() == first
    job.publish()
    job.push("w0", seq=1)
    assert job.outcome() == first
    assert job.core.accepted_pushes == 2


@pytest.mark.parametrize("seq", [0, 2, 9])
def test_a_gap_in_seq_is_refused_and_changes_nothing(seq: int) -> None:
    job = Job(2)
    before = state(job.core)
    job.push("w0", seq=seq)
    assert job.refused().reason is Reason.SEQUENCE
    assert state(job.core) == before


def test_a_push_for_a_closed_round_is_refused_as_stale_and_stays_refused() -> None:
    job = Job(2)
    old = job.told["w0"]
    job.round(["w0", "w1"])
    job.push("w0", to=old)
    stale = job.outcome()
    assert stale.decision is Decision.REFUSED
    assert stale.refusal is not None
    assert stale.refusal.reason is Reason.STALE
    job.push("w0", seq=2, to=old)
    assert job.outcome() == stale
    job.push("w0", seq=3)
    assert job.outcome().decision is Decision.ACCEPTED


def test_a_push_says_at_which_version_it_was_told_to_compute() -> None:
    job = Job(2)
    before = state(job.core)
    job.push("w0", to=replace(job.told["w0"], version=3))
    assert job.refused().reason is Reason.MALFORMED
    assert job.refused().field == "push 1 base_version"
    assert state(job.core) == before


def test_a_second_push_in_one_round_is_refused_and_the_first_one_stands() -> None:
    job = Job(2)
    job.push("w0")
    job.push("w0")
    assert job.outcome().decision is Decision.REFUSED
    job.push("w1")
    keys = [c.key for c in job.one(e.Apply).contributions]
    assert keys == [("w0", 1, 1), ("w1", 1, 1)]


def test_outcomes_are_bounded_and_a_forgotten_duplicate_is_refused() -> None:
    job = Job(1, epochs=100, samples=4)
    for _ in range(OUTCOMES_PER_MEMBER + 5):
        job.round(["w0"])
    assert len(job.core.roster.members["w0"].outcomes) == OUTCOMES_PER_MEMBER
    job.push("w0", seq=1)
    assert job.refused().reason is Reason.SEQUENCE


# ---- losing members


def test_a_lost_members_round_closes_without_it_after_its_lease() -> None:
    job = Job(3)
    job.push("w0")
    job.push("w2")
    job.tick(LEASE_S - 1)
    job.heartbeat("w0", "w2")
    assert not job.all(e.Apply)
    job.tick(1.5)
    assert [c.rank for c in job.one(e.Apply).contributions] == [0, 2]
    assert "rank 1 (w1)" in job.one(e.Lost).name
    assert [lost.worker for lost in job.core.lost] == ["w1"]


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


def test_a_member_that_comes_back_within_its_lease_hears_what_to_do_again() -> None:
    job = Job(2)
    job.step(e.Detached(worker="w1", incarnation=1))
    job.attach("w1")
    job.ready("w1", version=0)
    assign = job.one(e.Assign)
    assert (assign.worker, assign.assignment.version, assign.has) == ("w1", 0, 0)
    assert assign.assignment.position == 1


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
    assert "w1" not in job.core.roster.members
    job.attach("w1")
    assert job.one(Welcome).last_seq == 1
    job.push("w1", seq=1)
    assert job.outcome() == accepted


def test_messages_of_a_member_whose_lease_is_over_are_refused_with_that_reason() -> None:
    job = Job(2)
    job.tick(LEASE_S - 1)
    job.heartbeat("w0")
    job.tick(2)
    job.step(e.Heard(worker="w1", incarnation=1))
    assert job.refused().field == "lease"
    assert job.refused().remedy == "reconnect"


def test_who_comes_back_to_find_its_rank_taken_gets_another() -> None:
    job = Job(2)
    job.tick(LEASE_S - 1)
    job.heartbeat("w0")
    job.tick(2)
    job.bring("new")
    assert job.core.roster.members["new"].rank == 1
    job.attach("w1")
    assert job.one(Welcome).rank == 2


def test_what_a_member_was_sent_counts_as_what_it_has() -> None:
    job = Job(1, samples=400)
    for version in range(3):
        job.round(["w0"])
        assert job.one(e.Assign).has == version
        assert job.assignments["w0"].version == version + 1


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


def test_when_everyone_is_lost_the_job_waits_and_goes_on_with_who_comes() -> None:
    job = Job(2)
    job.round(["w0", "w1"])
    job.tick(LEASE_S + 1)
    assert not job.all(e.Apply)
    assert job.phase() is Phase.GATHERING
    job.bring("new")
    assert job.phase() is Phase.RUNNING
    assert job.told["new"].ranges == (Range(start=8, count=4),)
    job.round(["new"])
    assert job.core.version == 2


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


def test_what_a_lost_member_did_not_answer_for_goes_to_others_in_the_same_epoch() -> None:
    job = Job(2, epochs=1, samples=16)
    lost = job.told["w1"].ranges
    job.push("w0")
    job.step(e.Left(worker="w1", incarnation=1, failed=True, reason="crashed"))
    job.publish()
    assert job.told["w0"].ranges == lost
    job.round(["w0"])
    job.round(["w0"])
    assert job.phase() is Phase.RUNNING
    job.round(["w0"])
    assert job.phase() is Phase.FINISHING
    assert job.core.epoch == 1


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
    assert job.core.repeated_samples == 0


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
    assert job.core.repeated_samples == 4


def test_a_round_that_everyone_left_with_pushes_made_is_applied() -> None:
    job = Job(2)
    job.push("w0")
    job.tick(LEASE_S + 1)
    assert [c.key.worker for c in job.one(e.Apply).contributions] == ["w0"]
    job.publish()
    assert job.core.version == 1
    assert job.phase() is Phase.GATHERING


def test_a_lease_that_ran_out_while_the_round_is_applied_does_no_harm() -> None:
    job = Job(2)
    job.push("w0")
    job.push("w1")
    job.tick(LEASE_S + 1)
    job.publish()
    assert job.core.version == 1
    assert job.phase() is Phase.GATHERING


# ---- saying whom it waits for


def test_a_round_names_whom_it_waits_for_within_two_seconds() -> None:
    job = Job(3)
    job.push("w1")
    job.step(e.Heard(worker="w2", incarnation=1, activity="computing"))
    reports: list[list[e.Report]] = []
    for _ in range(8):
        job.tick(0.25)
        reports.append(job.all(e.Report))
    first = next(report for found in reports for report in found)
    assert first.ranks == (0, 2)
    assert first.seconds <= 2
    assert "rank 0 (w0" in first.text
    assert "rank 2 (w2, connected, heard" in first.text
    assert "computing" in first.text


def test_a_round_that_takes_long_to_apply_is_said() -> None:
    job = Job(1)
    job.push("w0")
    job.heartbeat("w0")
    job.tick(5)
    assert not job.all(e.Report)
    job.heartbeat("w0")
    job.tick(5.5)
    assert "version 1 is being computed since 10.5 s" in job.one(e.Report).text


def test_a_new_reason_to_wait_is_said_within_two_seconds_of_its_beginning() -> None:
    job = Job(2, epochs=1, samples=8)
    job.push("w1")
    job.tick(1.5)
    assert job.one(e.Report).ranks == (0,)
    job.push("w0")
    job.publish()
    job.tick(1.5)
    assert "w0) to evaluate the last version" in job.one(e.Report).text
    job.step(e.Detached(worker="w0", incarnation=1))
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="x"))
    job.step(e.Detached(worker="w1", incarnation=1))
    job.tick(1.5)
    assert "to evaluate the last version" in job.one(e.Report).text


def test_it_is_said_again_when_it_changes_and_every_ten_seconds() -> None:
    job = Job(3)
    job.tick(1.5)
    assert len(job.all(e.Report)) == 1
    job.tick(1)
    assert not job.all(e.Report)
    job.push("w1")
    job.tick(0.25)
    assert job.one(e.Report).ranks == (0, 2)
    said = 0
    for _ in range(84):
        job.heartbeat("w0", "w2")
        job.tick(0.25)
        said += len(job.all(e.Report))
    assert said == 2


# ---- the end


def test_after_the_last_epoch_rank_0_evaluates_and_then_everybody_may_go() -> None:
    job = Job(2, epochs=1, samples=8)
    job.round(["w0", "w1"])
    assert job.phase() is Phase.FINISHING
    told = job.assignments
    assert set(told) == {"w0"}
    assert (told["w0"].evaluate_epoch, told["w0"].finished, told["w0"].ranges) == (1, False, ())
    job.step(e.Evaluated(worker="w0", incarnation=1, version=1, epoch=1, metrics={"accuracy": 0.5}))
    assert job.all(e.Finish)
    assert job.phase() is Phase.FINISHED
    assert {worker: a.finished for worker, a in job.assignments.items()} == {"w0": True, "w1": True}
    job.join("w9")
    assert job.refused().reason is Reason.JOB_FINISHED


def test_who_gets_ready_when_the_job_is_over_may_go() -> None:
    job = Job(1, epochs=1, samples=4)
    job.join("slow")
    job.attach("slow")
    job.round(["w0"])
    job.step(e.Evaluated(worker="w0", incarnation=1, version=1, epoch=1, metrics={}))
    job.ready("slow")
    assert job.assignments["slow"].finished


def test_an_epoch_whose_evaluator_is_lost_is_evaluated_in_the_next_round() -> None:
    job = Job(2, epochs=3, samples=16)
    job.round(["w0", "w1"])
    job.round(["w0", "w1"])
    assert job.assignments["w0"].evaluate_epoch == 1
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="crashed"))
    job.push("w1")
    job.publish()
    assert job.assignments["w1"].evaluate_epoch == 1
    job.step(e.Evaluated(worker="w1", incarnation=1, version=3, epoch=1, metrics={"loss": 1.0}))
    assert [done.epoch for done in job.core.evaluations.done] == [1]


@pytest.mark.parametrize(("worker", "version", "epoch"), [("w1", 1, 1), ("w0", 2, 1), ("w0", 1, 3)])
def test_an_evaluation_that_was_not_asked_for_changes_nothing(worker: str, version: int, epoch: int) -> None:
    job = Job(2, epochs=3, samples=8)
    job.round(["w0", "w1"])
    before = state(job.core)
    job.step(e.Evaluated(worker=worker, incarnation=1, version=version, epoch=epoch, metrics={"loss": 1.0}))
    assert state(job.core) == before
    assert "not asked for" in job.one(e.Note).text


def test_an_epochs_evaluation_is_asked_of_the_first_position_at_its_start() -> None:
    job = Job(2, epochs=2, samples=8)
    job.round(["w0", "w1"])
    assert [a.evaluate_epoch for a in job.assignments.values()] == [1, 0]


def test_when_the_evaluator_is_lost_the_next_one_evaluates() -> None:
    job = Job(2, epochs=1, samples=8)
    job.round(["w0", "w1"])
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="crashed"))
    assert job.assignments["w1"].evaluate_epoch == 1
    job.step(e.Left(worker="w1", incarnation=1, failed=True, reason="crashed"))
    assert job.all(e.Finish)


def test_an_evaluator_that_reconnects_is_told_again() -> None:
    job = Job(2, epochs=1, samples=8)
    job.round(["w0", "w1"])
    job.step(e.Detached(worker="w0", incarnation=1))
    job.attach("w0")
    job.ready("w0", version=1)
    assert job.assignments["w0"].evaluate_epoch == 1
    assert job.one(e.Assign).has == 1
    assert not job.core.lost


def test_a_repeated_evaluation_counts_once() -> None:
    job = Job(1, epochs=2, samples=4)
    job.round(["w0"])
    for _ in range(2):
        job.step(e.Evaluated(worker="w0", incarnation=1, version=1, epoch=1, metrics={"loss": 1.0}))
    assert len(job.core.evaluations.done) == 1


def test_stopping_sends_everybody_home_and_takes_no_more_pushes() -> None:
    job = Job(2)
    job.step(e.Stopping(reason="maintenance"))
    job.push("w0")
    assert job.refused().reason is Reason.STOPPING
    job.step(e.Stopping(reason="maintenance"))
    assert {action.worker for action in job.all(e.Disconnect)} == {"w0", "w1"}
    assert all(action.refusal.reason is Reason.STOPPING for action in job.all(e.Disconnect))
    job.join("w3")
    assert job.refused().reason is Reason.STOPPING


def test_adaptive_local_steps_rise_as_the_rate_decays_and_begin_at_the_base_rate() -> None:
    """Formula (1), √((η₀/η) · (F/F₀)) · first, with the base rate as η₀. With the rate of the first round,
    which a warm-up makes next to nothing, there was one step for ever (finding F12)."""

    def steps(schedule: str, epochs: int) -> list[int]:
        core = core_of("local:first=4,most=16", epochs=epochs, schedule=parse_schedule(schedule))
        job = Job(core=core, samples=64)
        job.bring("w0")
        found: list[int] = []
        while job.core.phase is Phase.RUNNING:
            found.append(job.core.local_steps)
            job.round(["w0"])
        return found

    warm = steps("constant:warmup=1", 8)
    assert warm[0] == 4
    assert max(warm[1:3]) > 4  # the rate is below the base rate
    assert set(warm[len(warm) // 2 :]) == {4}
    decaying = steps("step:every=2,gamma=0.25", 8)
    assert decaying[0] == 4
    assert max(decaying) == 16
    assert decaying == sorted(decaying)


def test_an_epoch_is_evaluated_once_though_later_ones_have_been() -> None:
    """A member that comes back with an old assignment would be asked again, and its answer ignored."""
    job = Job(1)
    job.core.evaluations.done += [
        EpochStatus(epoch=epoch, version=epoch, metrics={}, seconds=1.0) for epoch in (1, 2)
    ]
    assert not job.core.evaluations.wants(1)
    assert not job.core.evaluations.wants(2)
    assert job.core.evaluations.wants(3)
