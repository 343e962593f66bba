"""What a worker writes down for itself: on a disk or at a URL, which may hang."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest

from gradwire.worker.session import own_state
from gradwire.worker.session.own_state import OwnState


@pytest.mark.parametrize("kind", ["disk", "url"])
def test_the_last_two_states_are_read_again_by_the_same_worker_alone(tmp_path: Path, kind: str) -> None:
    where = str(tmp_path) if kind == "disk" else f"memory://bucket/{uuid.uuid4().hex}"
    own, told = OwnState(where, job="job", worker="w0"), list[str]()
    for version in (3, 5, 5, 8):
        own.write(version, {"version": version}, told.append)
    assert own.close()
    assert told == [""] * 4
    again = OwnState(where, job="job", worker="w0")
    assert [again.read(version) for version in (3, 5, 8)] == [
        None,
        (5, {"version": 5}),
        (8, {"version": 8}),
    ]
    assert [again.read(version) for version in (7, 99)] == [(5, {"version": 5}), (8, {"version": 8})]
    assert OwnState(where, job="job", worker="w1").read(8) is None
    assert OwnState(where, job="another", worker="w0").read(8) is None


@pytest.mark.parametrize("kind", ["disk", "url"])
def test_jobs_leave_each_others_states_alone(tmp_path: Path, kind: str) -> None:
    """With one --state and one --worker-id, at the same time or one after the other."""
    where = str(tmp_path) if kind == "disk" else f"memory://bucket/{uuid.uuid4().hex}"
    told: list[str] = []
    jobs = {job: OwnState(where, job=job, worker="w0") for job in ("first", "other")}
    for version in (3, 5, 8):
        for job, own in jobs.items():
            own.write(version, {"of": job, "version": version}, told.append)
            assert own.close()
    assert told == [""] * 6
    for job in jobs:
        again = OwnState(where, job=job, worker="w0")
        assert [again.read(version) for version in (5, 8)] == [(v, {"of": job, "version": v}) for v in (5, 8)]


@pytest.mark.parametrize("kind", ["disk", "url"])
def test_ids_that_a_disk_might_take_for_others_have_states_of_their_own(tmp_path: Path, kind: str) -> None:
    """One that does not tell upper from lower case, or takes the id for a path."""
    where = str(tmp_path / "in" / "state") if kind == "disk" else f"memory://bucket/{uuid.uuid4().hex}"
    ids = (
        "w0",
        "W0",
        "..",
        "../w0",
        "job.w0",
        "w0.",
        "\u00e9",
        "e\u0301",
        "a/b",
        "x" * 128,
        "X" * 128,
        "a\nb",
    )
    told: list[str] = []
    for worker in ids:
        own = OwnState(where, job="job", worker=worker)
        own.write(3, {"of": worker}, told.append)
        assert own.close()
    assert told == [""] * len(ids)
    assert [OwnState(where, job="job", worker=worker).read(3) for worker in ids] == [
        (3, {"of": each}) for each in ids
    ]
    if kind == "disk":
        names = [each.name for each in (tmp_path / "in" / "state").iterdir()]
        assert len({name.casefold() for name in names}) == len(ids)
        assert list(tmp_path.iterdir()) == [tmp_path / "in"]
        assert list((tmp_path / "in").iterdir()) == [tmp_path / "in" / "state"]


@pytest.mark.parametrize("kind", ["disk", "url"])
def test_what_is_of_versions_that_are_lost_does_not_stand_in_the_way(tmp_path: Path, kind: str) -> None:
    """Nor what was never whole."""
    where = str(tmp_path) if kind == "disk" else f"memory://bucket/{uuid.uuid4().hex}"
    told: list[str] = []
    own = OwnState(where, job="job", worker="w0")
    for version in (100, 200, 3, 5, 4):
        own.write(version, {"version": version}, told.append)
    assert own.close()
    assert told == [""] * 5
    again = OwnState(where, job="job", worker="w0")
    assert [again.read(version) for version in (3, 4)] == [
        (3, {"version": 3}),
        (4, {"version": 4}),
    ]
    if kind == "disk":
        (tmp_path / "job.w0" / ".worker-0000000002.partial").mkdir()
        again.write(6, {}, told.append)
        assert again.close()
        assert sorted(each.name for each in (tmp_path / "job.w0").iterdir()) == [
            "worker-0000000004",
            "worker-0000000006",
        ]


def test_a_place_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_state, "PATIENCE_S", 0.1)
    own, told, hanging = (
        OwnState("memory://bucket/own", job="job", worker="w0"),
        list[str](),
        threading.Event(),
    )
    write = vars(own)["_backend"].write

    def writes(*arguments: object) -> int:
        hanging.wait(60)
        written: int = write(*arguments)
        return written

    monkeypatch.setattr(vars(own)["_backend"], "write", writes)
    for version in (3, 4, 5):
        own.write(version, {}, told.append)
    assert told == ["the previous state is still being written"] * 2
    hanging.set()
    while len(told) < 3:
        own.close()
    assert told[2] == ""
    assert own.close()
    own.write(6, {}, told.append)
    assert own.close()
    assert own.read(6) == (6, {})
