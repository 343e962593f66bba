"""Rounds of which parts are stepped one by one (`--overlap both`): who is waited for, and what becomes of the
samples."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jobs import LEASE_S, Job
from stepping import copied, core_of

from gradwire.proto.messages import Decision, Phase
from gradwire.proto.refusal import Reason
from gradwire.proto.shares import assigned_samples
from gradwire.server.job import events as e


def both(workers: int, mode: str = "sync", *, samples: int = 40, epochs: int = 2, **rules: Any) -> Job:
    terms: dict[str, Any] = {"lease_seconds": LEASE_S, "epochs": epochs, "overlap": "both", **rules}
    return Job(workers, samples=samples, core=core_of(mode, min_workers=workers, **terms))


def told(job: Job, worker: str) -> int:
    return job.told[worker].id


def begin(job: Job) -> None:
    """The shard has stepped the first part."""
    job.step(e.Begun(version=job.core.version + 1))


def lose(job: Job, *workers: str) -> None:
    """Their leases end, and those of no others."""
    members = job.core.roster.members
    job.now += LEASE_S / 2 + 1
    job.heartbeat(*(members.keys() - set(workers)))
    job.now += LEASE_S / 2
    job.step(e.Tick())


def come_back(job: Job, worker: str, version: int | None = None) -> None:
    job.attach(worker)
    job.step(
        e.Prepared(
            worker=worker,
            incarnation=1,
            fingerprint=b"model",
            version=job.core.version if version is None else version,
            assigned=told(job, worker),
        )
    )


def waits(job: Job) -> list[tuple[tuple[int, ...], bool]]:
    return [(each.assignments, each.on) for each in job.all(e.Wait)]


# ---- which rounds


def test_a_round_says_to_the_shard_who_is_in_it_behind_the_assignments() -> None:
    job = both(3)
    order = [type(action) for action in job.actions if isinstance(action, e.Assign | e.Open)]
    assert order == [e.Assign, e.Assign, e.Assign, e.Open]
    opened = job.one(e.Open)
    assert (opened.version, opened.rate_factor) == (1, 1.0)
    assert list(opened.members.items()) == [(told(job, name), (name, 1, 4)) for name in ("w0", "w1", "w2")]


@pytest.mark.parametrize(
    ("mode", "rules", "opens"),
    [
        ("sync", {}, True),
        ("sync", {"aggregation": "median"}, True),
        ("sync", {"aggregation": "trimmed:wrong=1"}, True),
        ("sync", {"aggregation": "krum:wrong=1"}, False),
        ("sync", {"overlap": "backward"}, False),
        ("sync", {"overlap": "off"}, False),
        ("sync:backup=1", {}, False),
        ("sync:redundancy=2", {}, False),
        ("sync:redundancy=4", {}, False),
        ("sync:stragglers=1", {}, False),
        ("local", {}, False),
        ("stale", {}, False),
        ("async", {}, False),
    ],
)
def test_only_plain_rounds_of_an_aggregation_by_coordinate_are_stepped_in_parts(
    mode: str, rules: dict[str, Any], opens: bool
) -> None:
    job = both(3, mode, **rules)
    assert bool(job.all(e.Open)) == opens
    lose(job, "w2")
    assert bool(job.all(e.Wait)) == opens


# ---- who is waited for


def test_parts_do_not_wait_for_a_member_that_is_lost_or_pushes_nothing() -> None:
    job = both(3)
    job.push("w0", samples=0)
    assert waits(job) == [((told(job, "w0"),), False)]
    lose(job, "w1")
    assert waits(job) == [((told(job, "w1"),), False)]
    job.push("w2")
    assert waits(job) == []
    assert [each.samples for each in job.one(e.Apply).contributions] == [0, 4]


def test_members_who_are_lost_at_once_are_given_up_at_once() -> None:
    """One after the other, a part could be stepped with the gradient of the next one to go."""
    job = both(3)
    job.push("w0")
    one, other = told(job, "w1"), told(job, "w2")
    lose(job, "w1", "w2")
    assert waits(job) == [((one, other), False)]
    assert [each.key.worker for each in job.one(e.Apply).contributions] == ["w0"]


def test_the_shard_hears_that_a_round_is_given_up_although_nobody_is_left() -> None:
    job = both(2)
    both_of = (told(job, "w0"), told(job, "w1"))
    lose(job, "w0", "w1")
    assert waits(job) == [(both_of, False)]
    assert not job.all(e.Apply)
    assert job.phase() is Phase.GATHERING
    job = both(1)
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="crashed"))
    assert waits(job) == [((told(job, "w0"),), False)]


def test_who_is_told_the_shard_once_is_not_told_again() -> None:
    job = both(2)
    lose(job, "w1")
    assert len(waits(job)) == 1
    job.tick(0.1)
    assert waits(job) == []


# ---- nothing is final yet


def test_a_round_that_everybody_leaves_before_anything_is_final_gives_its_samples_out_again() -> None:
    job = both(2)
    first = {name: job.told[name].ranges for name in ("w0", "w1")}
    lose(job, "w0", "w1")
    job.bring("w2")
    job.bring("w3")
    opened = job.all(e.Open)
    again = [each for name in ("w2", "w3") if name in job.told for each in job.told[name].ranges]
    assert again[0].start == first["w0"][0].start
    assert opened == [] or opened[0].version == 1


def test_who_comes_back_before_anything_is_final_is_waited_for_again() -> None:
    job = both(2)
    lose(job, "w1")
    come_back(job, "w1")
    assert waits(job) == [((told(job, "w1"),), True)]
    assert job.assignments["w1"] == job.told["w1"]
    job.push("w0")
    assert not job.all(e.Apply)
    job.push("w1")
    assert job.outcome().version == 1
    assert [each.key.worker for each in job.one(e.Apply).contributions] == ["w0", "w1"]


def test_samples_of_a_lost_member_go_out_again_if_nothing_was_final() -> None:
    job = both(2)
    lost = job.told["w1"]
    lose(job, "w1")
    job.push("w0")
    job.publish()
    assert job.told["w0"].ranges == lost.ranges


# ---- parts are final


def test_who_comes_back_after_a_part_was_final_is_too_late_and_nobody_computes_its_samples() -> None:
    job = both(2, epochs=1, samples=8)
    begin(job)
    lose(job, "w1")
    come_back(job, "w1")
    assert not job.assignments
    assert waits(job) == []
    job.push("w1", to=job.told["w1"])
    assert job.outcome().decision is Decision.REFUSED
    refusal = job.outcome().refusal
    assert refusal is not None
    assert refusal.reason is Reason.STALE
    assert len(job.all(e.Drop)) == 1
    job.push("w0")
    job.publish()
    assert job.core.samples.done
    assert job.phase() is Phase.FINISHING


def test_a_round_that_has_begun_closes_when_nobody_is_left_in_it() -> None:
    job = both(2, epochs=1, samples=8)
    begin(job)
    lose(job, "w0", "w1")
    apply = job.one(e.Apply)
    assert (apply.version, apply.contributions) == (1, ())
    job.publish()
    assert job.core.version == 1
    assert job.core.samples.done, "what parts may hold of them cannot be taken out"


def test_what_was_pushed_counts_although_its_worker_is_lost_before_the_round_closes() -> None:
    job = both(2)
    job.push("w0")
    begin(job)
    lose(job, "w0")
    assert waits(job) == []
    job.push("w1")
    assert [each.key.worker for each in job.one(e.Apply).contributions] == ["w0", "w1"]


def test_a_member_that_has_the_next_version_already_is_told_nothing_again() -> None:
    """All parts are final, and its commit was lost with its stream: what it waits for is the outcome."""
    job = both(2)
    begin(job)
    job.step(e.Detached(worker="w1", incarnation=1))
    come_back(job, "w1", version=1)
    assert not job.assignments
    job.push("w0")
    assert not job.all(e.Apply)
    job.push("w1")
    assert job.one(e.Apply).members == ("w0",)
    job.publish()
    given = {each.worker: each.has for each in job.all(e.Assign)}
    assert given == {"w0": 1, "w1": 1}


def test_the_state_is_written_and_read_in_the_middle_of_a_round() -> None:
    job = both(3, epochs=1, samples=12)
    begin(job)
    lose(job, "w2")
    job.core = copied(job.core, "sync")
    json.dumps(job.core.save()["mode"])
    come_back(job, "w2")
    assert not job.assignments, "that parts are final is remembered"
    job.push("w0")
    job.push("w1")
    assert sum(each.samples for each in job.one(e.Apply).contributions) == 8
    job.publish()
    assert job.core.samples.done
    assert assigned_samples(job.told["w2"]) == 4
