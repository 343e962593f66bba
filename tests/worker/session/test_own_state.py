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
    assert [again.read(version) for version in (3, 5, 8)] == [None, {"version": 5}, {"version": 8}]
    assert OwnState(where, job="job", worker="w1").read(8) is None
    assert OwnState(where, job="another", worker="w0").read(8) is None


@pytest.mark.parametrize("kind", ["disk", "url"])
def test_what_an_earlier_job_has_left_does_not_stand_in_the_way(tmp_path: Path, kind: str) -> None:
    """Nor what is of versions that the server has lost, or was never whole."""
    where = str(tmp_path) if kind == "disk" else f"memory://bucket/{uuid.uuid4().hex}"
    told: list[str] = []
    for job, versions in (("earlier", (100, 200)), ("job", (3, 5, 4))):
        own = OwnState(where, job=job, worker="w0")
        for version in versions:
            own.write(version, {"version": version}, told.append)
        assert own.close()
    assert told == [""] * 5
    again = OwnState(where, job="job", worker="w0")
    assert [again.read(version) for version in (3, 4)] == [{"version": 3}, {"version": 4}]
    if kind == "disk":
        (tmp_path / "w0" / ".worker-0000000002.partial").mkdir()
        again.write(6, {}, told.append)
        assert again.close()
        assert sorted(each.name for each in (tmp_path / "w0").iterdir()) == [
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
    write = vars(own)["_place"].write

    def writes(*arguments: object) -> int:
        hanging.wait(60)
        written: int = write(*arguments)
        return written

    monkeypatch.setattr(vars(own)["_place"], "write", writes)
    for version in (3, 4, 5):
        own.write(version, {}, told.append)
    assert told == ["the state before this one is still being written"] * 2
    hanging.set()
    while len(told) < 3:
        own.close()
    assert told[2] == ""
    assert own.close()
    own.write(6, {}, told.append)
    assert own.close()
    assert own.read(6) == {}
