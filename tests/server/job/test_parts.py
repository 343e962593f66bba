"""Rounds of which parts are stepped one by one (`--overlap both`): who is waited for, and what becomes of the
samples."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jobs import LEASE_S, Job
from stepping import copied, core_of

from gradwire.proto.messages import Phase, Range
from gradwire.proto.shares import assigned_samples
from gradwire.server.job import events as e


def both(workers: int, mode: str = "sync", *, samples: int = 40, epochs: int = 2, **rules: Any) -> Job:
    terms: dict[str, Any] = {"lease_seconds": LEASE_S, "epochs": epochs, "overlap": "both", **rules}
    return Job(workers, samples=samples, core=core_of(mode, min_workers=workers, **terms))


def told(job: Job, worker: str) -> int:
    return job.told[worker].id


def begin(job: Job) -> None:
    """The shard has stepped the first part."""
    job.step(e.ApplyStarted(version=job.core.state.version + 1))


def lose(job: Job, *workers: str) -> None:
    """Their leases end, and those of no others."""
    members = job.core.state.roster.members
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
            version=job.core.state.version if version is None else version,
            assigned=told(job, worker),
        )
    )


def without(job: Job) -> list[tuple[int, ...]]:
    """Return the assignments that the round no longer waits for."""
    return [each.assignments for each in job.all(e.Exclude)]


def vacant(job: Job) -> list[int]:
    return [assignment for each in job.all(e.MemberLost) for assignment in each.assignments]


def whole(job: Job) -> None:
    """The shard has stepped every part."""
    job.step(e.ApplyStarted(version=job.core.state.version + 1, whole=True))


# ---- which rounds


def test_the_server_steps_the_parts_of_local_changes_at_its_own_rate() -> None:
    """The schedule is for the local steps."""
    job = both(2, "local:steps=2", schedule="cosine", batch_size=4, epochs=3)
    rates: list[float] = []
    for _ in range(2):
        assert [each.rate_factor for each in job.all(e.Open)] == [1.0]
        rates.append(job.told["w0"].learning_rate)
        job.round(["w0", "w1"])
    assert rates[0] > rates[1]


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
        ("sync", {"clip_norm": 1.0}, False),
        ("sync:backup=1", {}, False),
        ("sync:redundancy=2", {}, False),
        ("sync:redundancy=4", {}, False),
        ("sync:stragglers=1", {}, False),
        ("local", {}, True),
        ("local", {"aggregation": "median"}, True),
        ("local", {"clip_norm": 1.0}, False),
        ("local:delayed=on", {}, False),
        ("local:steps=2,elastic=0.1,correction=0", {}, False),
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
    assert bool(job.all(e.MemberLost)) == opens


# ---- what is likely to follow


def following(job: Job) -> dict[str, tuple[Range, ...]]:
    return {worker: assignment.next for worker, assignment in job.assignments.items()}


def test_members_are_told_what_the_next_round_will_give_them() -> None:
    """40 samples for three members: four rounds of an epoch, the last with 4 samples."""
    job = both(3)
    for _ in range(2):
        for _ in range(3):
            expected = following(job)
            job.round(("w0", "w1", "w2"))
            given = {worker: assignment.ranges for worker, assignment in job.assignments.items()}
            assert given == expected
        assert set(following(job).values()) == {()}, "an evaluation comes between"
        job.round(("w0", "w1", "w2"))


@pytest.mark.parametrize(
    ("mode", "rounds"), [("local:steps=1", 4), ("local:steps=2", 2), ("local:first=2", 2)]
)
def test_members_whose_steps_may_begin_early_are_told_what_the_next_round_will_give_them(
    mode: str, rounds: int
) -> None:
    job = both(3, f"{mode},delayed=on", overlap="backward")
    for _ in range(2):
        for _ in range(rounds - 1):
            expected = following(job)
            assert all(expected.values())
            job.round(("w0", "w1", "w2"))
            assert {worker: each.ranges for worker, each in job.assignments.items()} == expected
        assert set(following(job).values()) == {()}, "an evaluation comes between"
        job.round(("w0", "w1", "w2"))
    assert not any(following(both(3, mode, overlap="backward")).values())


@pytest.mark.parametrize("rules", [{"overlap": "backward"}, {"aggregation": "krum:wrong=1"}])
def test_nothing_is_said_to_follow_where_versions_come_whole(rules: dict[str, Any]) -> None:
    assert not any(following(both(3, **rules)).values())


def test_nothing_is_said_to_follow_samples_that_were_given_back() -> None:
    job = both(2)
    lose(job, "w0", "w1")
    job.bring("w2")
    assert not any(following(job).values())
    job = both(3)
    job.push("w0")
    lose(job, "w1")
    assert following(job) == {"w0": ()}, "who takes another's place"


# ---- who is waited for


def test_parts_do_not_wait_for_a_member_that_pushes_nothing() -> None:
    job = both(3)
    job.push("w0", samples=0)
    assert without(job) == [(told(job, "w0"),)]
    job.push("w1")
    job.push("w2")
    assert without(job) == []
    assert [each.samples for each in job.one(e.Apply).contributions] == [0, 4, 4]


def test_nothing_is_stepped_before_a_lost_members_place_is_taken() -> None:
    job = both(3)
    one, other = told(job, "w1"), told(job, "w2")
    lose(job, "w1", "w2")
    assert vacant(job) == [one, other]
    assert without(job) == []
    job.tick(0.1)
    assert vacant(job) == [], "it is told once"


def test_the_shard_hears_that_a_round_is_given_up_although_nobody_is_left() -> None:
    job = both(2)
    both_of = (told(job, "w0"), told(job, "w1"))
    lose(job, "w0", "w1")
    assert without(job) == [both_of]
    assert not job.all(e.Apply)
    assert job.phase() is Phase.GATHERING
    job = both(1)
    job.step(e.Left(worker="w0", incarnation=1, failed=True, reason="crashed"))
    assert without(job) == [(told(job, "w0"),)]


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


# ---- a lost member's place


def test_a_newcomer_cannot_take_a_place_because_it_cannot_get_the_version() -> None:
    job = both(2, epochs=1, samples=8)
    begin(job)
    lose(job, "w1")
    job.bring("w2")
    assert not job.all(e.Substitute)
    assert "w2" not in job.told
    lose(job, "w0")
    assert without(job) == [(1, 2)]
    assert job.one(e.Apply).contributions == ()


def test_a_place_waits_for_a_member_that_is_reconnecting() -> None:
    job = both(2)
    job.push("w0")
    begin(job)
    job.step(e.Detached(worker="w0", incarnation=1))
    job.now += LEASE_S / 2 + 1
    job.heartbeat("w0")
    job.now += LEASE_S / 2
    job.step(e.Tick())
    assert (vacant(job), job.all(e.Substitute), job.all(e.Apply)) == ([told(job, "w1")], [], [])
    come_back(job, "w0")
    assert job.one(e.Substitute).worker == "w0"


# ---- parts are final


def test_a_round_that_has_begun_closes_when_nobody_is_left_in_it() -> None:
    job = both(2, epochs=1, samples=8)
    begin(job)
    lose(job, "w0", "w1")
    apply = job.one(e.Apply)
    assert (apply.version, apply.contributions) == (1, ())
    job.publish()
    assert job.core.state.version == 1
    assert job.core.state.samples.done, "what parts may hold of them cannot be taken out"


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
    job.push("w0")
    job.core = copied(job.core, "sync")
    come_back(job, "w2")
    assert not job.assignments, "its place is another's"
    job.push("w1")
    job.push("w0")
    assert sum(each.samples for each in job.one(e.Apply).contributions) == 12
    job.publish()
    assert job.core.state.samples.done
    assert assigned_samples(job.told["w2"]) == 4
