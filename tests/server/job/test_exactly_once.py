"""Each push counts once, by the sentences of that promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import Job
from stepping import state

from gradwire.proto.messages import Decision
from gradwire.proto.refusal import Reason
from gradwire.server.job import events as e
from gradwire.server.job.roster import OUTCOMES_PER_MEMBER


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
    assert job.core.state.accepted_pushes == 2


@pytest.mark.parametrize("seq", [0, 2, 8])
def test_a_push_may_leave_out_numbers_and_none_of_them_comes_later(seq: int) -> None:
    """Those between were given up."""
    job = Job(2)
    job.push("w0", seq=9)
    assert job.outcome().decision is Decision.ACCEPTED
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
    assert len(job.core.state.roster.members["w0"].outcomes) == OUTCOMES_PER_MEMBER
    job.push("w0", seq=1)
    assert job.refused().reason is Reason.SEQUENCE
