"""A worker's own state: on a disk or at a URL, which may hang."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from gradwire.worker.session import own_state
from gradwire.worker.session.own_state import OwnState

# A disk may not tell upper from lower case, or take an id for a path.
IDS = (
    *("w0", "W0", "..", "../w0", "job.w0", "w0.", "\u00e9", "e\u0301", "a/b", "x" * 128, "X" * 128, "a\nb"),
)


@pytest.fixture(params=["disk", "url"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "state") if request.param == "disk" else f"memory://bucket/{uuid.uuid4().hex}"


def write(own: OwnState, *versions: int, **more: Any) -> None:
    told: list[str] = []
    for version in versions:
        own.write(version, {"version": version, **more}, told.append)
    assert own.close()
    assert told == [""] * len(versions)


def read(where: str, *versions: int, job: str = "job", worker: str = "w0") -> list[Any]:
    """The version that is found for each version."""
    found = [OwnState(where, job=job, worker=worker).read(version) for version in versions]
    assert all(each is None or each[0] == each[1]["version"] for each in found)
    return [each if each is None else each[0] for each in found]


def test_the_last_two_states_are_read_again_by_the_same_worker_alone(where: str) -> None:
    write(OwnState(where, job="job", worker="w0"), 3, 5, 5, 8)
    assert read(where, 3, 5, 8, 7, 99) == [None, 5, 8, 5, 8]
    assert read(where, 8, worker="w1") == read(where, 8, job="another") == [None]


def test_jobs_leave_each_others_states_alone(where: str) -> None:
    """With one --state and one --worker-id, at the same time or one after the other."""
    jobs = {job: OwnState(where, job=job, worker="w0") for job in ("first", "other")}
    for version in (3, 5, 8):
        for job, own in jobs.items():
            write(own, version, of=job)
    for job in jobs:
        assert read(where, 5, 8, job=job) == [5, 8]
        assert OwnState(where, job=job, worker="w0").read(8) == (8, {"of": job, "version": 8})


def test_ids_that_a_disk_might_take_for_others_have_states_of_their_own(where: str, tmp_path: Path) -> None:
    for worker in IDS:
        write(OwnState(where, job="job", worker=worker), 3, of=worker)
    for worker in IDS:
        assert OwnState(where, job="job", worker=worker).read(3) == (3, {"of": worker, "version": 3})
    if not where.startswith("memory"):
        assert len({each.name.casefold() for each in Path(where).iterdir()}) == len(IDS)
        assert list(tmp_path.iterdir()) == [Path(where)]


def test_states_of_lost_versions_and_partial_ones_do_not_stand_in_the_way(where: str) -> None:
    own = OwnState(where, job="job", worker="w0")
    write(own, 100, 200, 3, 5, 4)
    assert read(where, 3, 4) == [3, 4]
    if not where.startswith("memory"):
        (Path(where) / "job.w0" / ".worker-0000000002.partial").mkdir()
        write(OwnState(where, job="job", worker="w0"), 6)
        names = sorted(each.name for each in (Path(where) / "job.w0").iterdir())
        assert names == ["worker-0000000004", "worker-0000000006"]


def test_a_place_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_state, "PATIENCE_S", 0.1)
    own, told, hanging = (
        OwnState("memory://bucket/own", job="job", worker="w0"),
        list[str](),
        threading.Event(),
    )
    backend = vars(own)["_backend"]
    before = backend.write

    def writes(*arguments: object) -> int:
        hanging.wait(60)
        written: int = before(*arguments)
        return written

    monkeypatch.setattr(backend, "write", writes)
    for version in (3, 4, 5):
        own.write(version, {}, told.append)
    assert told == ["the previous state is still being written"] * 2
    hanging.set()
    while len(told) < 3:
        own.close()
    assert told[2] == ""
    write(own, 6)
    assert own.read(6) == (6, {"version": 6})
