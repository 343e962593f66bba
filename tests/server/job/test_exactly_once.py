"""Each push counts once, by the sentences of that promise."""

from __future__ import annotations

from dataclasses import replace

from jobs import Job
from stepping import state

from gradwire.proto.messages import Decision
from gradwire.proto.refusal import Reason
from gradwire.server.job import events as e
from gradwire.server.job.roster import OUTCOMES_PER_MEMBER


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
