"""The journal's segments: which lead on, which are refused, and what may be cut off."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gradwire.server.durable import journal as module
from gradwire.server.durable.folder import StateError, StateFolder
from gradwire.server.durable.journal import Journal

SEGMENTS = (0, 3, 6)
RECORDS = 4  # in each


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    """With three segments, as a server leaves them that is killed before any checkpoint but the first is
    whole."""
    made = StateFolder(tmp_path, syncs=False)
    journal: Journal | None = None
    for version in SEGMENTS:
        journal = made.segment(version, journal)
        for number in range(RECORDS):
            journal.append("event", {"number": number}, [np.arange(50, dtype=np.uint8)])
    return made


def path_of(folder: StateFolder, version: int) -> Path:
    return folder.segment_path(version)


def says_nothing(_: object) -> str:
    return "no JSON"


def files(folder: StateFolder) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.path.glob("*.log"))}


def numbers(folder: StateFolder, version: int) -> list[tuple[int, bool]]:
    return [(each.record.fields["number"], each.own) for each in folder.records(version)]


def test_segments_that_continue_each_other_are_read_in_order(folder: StateFolder) -> None:
    assert numbers(folder, 0) == [(number, version == 0) for version in SEGMENTS for number in range(RECORDS)]
    assert numbers(folder, 3) == [(number, version == 3) for version in (3, 6) for number in range(RECORDS)]
    journal = folder.journal()
    assert journal.path == path_of(folder, 6)
    journal.append("event", {"number": 9})
    assert numbers(folder, 6)[-1] == (9, True)


def test_a_segment_that_is_gone_between_others_is_named(folder: StateFolder) -> None:
    path_of(folder, 3).unlink()
    before = files(folder)
    with pytest.raises(StateError) as refused:
        numbers(folder, 0)
    for text in ("journal-0000000006.log continues journal-0000000003.log", "Restore them, or move"):
        assert text in str(refused.value)
    assert files(folder) == before
    assert numbers(folder, 6), "the checkpoint of that version needs no other"


@pytest.mark.parametrize("cut", [1, 91])  # half a record, and a whole one
def test_a_segment_that_has_lost_its_end_is_refused(folder: StateFolder, cut: int) -> None:
    path = path_of(folder, 3)
    data = path.read_bytes()
    ends = [end for _, end in module.read(path)]
    os.truncate(path, len(data) - 1 if cut == 1 else ends[-2])
    before = files(folder)
    with pytest.raises(StateError, match=r"later segments follow|records in between are missing"):
        numbers(folder, 0)
    assert files(folder) == before


@pytest.mark.parametrize("size", [0, 10])
@pytest.mark.parametrize("version", SEGMENTS[:-1])
def test_an_emptied_segment_before_others_is_refused_and_stays(
    folder: StateFolder, version: int, size: int
) -> None:
    path = path_of(folder, version)
    os.truncate(path, size)
    before = files(folder)
    for _ in range(2):  # a supervisor starts the server again
        with pytest.raises(StateError, match=rf"{path.name} is damaged at byte 0, and later segments follow"):
            numbers(folder, 0)
        assert files(folder) == before
    for later in SEGMENTS[SEGMENTS.index(version) + 1 :]:  # as the message says
        path_of(folder, later).unlink()
    os.truncate(path, 0)
    assert len(numbers(folder, 0)) == RECORDS * SEGMENTS.index(version)


def test_damage_before_whole_records_stops_the_start_and_nothing_is_cut(folder: StateFolder) -> None:
    path = path_of(folder, 6)
    ends = [end for _, end in module.read(path)]
    data = path.read_bytes()
    path.write_bytes(data[: ends[1] + 40] + b"?" + data[ends[1] + 41 :])
    before = files(folder)
    said = ""
    for _ in range(2):  # nor at the second start, as by a supervisor
        with pytest.raises(StateError) as refused:
            numbers(folder, 6)
        assert files(folder) == before
        said = str(refused.value)
    assert f"journal-0000000006.log is damaged at byte {ends[1]}" in said
    assert f"a whole record follows at byte {ends[2]}" in said
    os.truncate(path, ends[1])  # as the message says
    assert f"truncate -s {ends[1]} {path}" in said
    assert numbers(folder, 6) == [(0, True)]


def test_a_record_that_cannot_be_decoded_stops_the_start(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers(folder, 6)
    journal = folder.journal()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_encode", says_nothing)
        journal.append("event", {})
    before = files(folder)
    with pytest.raises(StateError, match=r"06.log: record 5, at byte \d+, .*cannot be decoded"):
        numbers(folder, 0)
    assert files(folder) == before


def test_half_a_record_at_the_end_is_cut(folder: StateFolder) -> None:
    path = path_of(folder, 6)
    os.truncate(path, path.stat().st_size - 1)
    assert numbers(folder, 6) == [(number, True) for number in range(RECORDS - 1)]
    folder.journal().append("event", {"number": 7})
    assert numbers(folder, 6)[-1] == (7, True)


@pytest.mark.parametrize("size", [0, 10, 40])
def test_a_segment_of_a_server_that_was_killed_as_it_began_it_is_no_segment(
    folder: StateFolder, size: int
) -> None:
    path = path_of(folder, 6)
    os.truncate(path, size)
    assert len(numbers(folder, 0)) == 2 * RECORDS
    journal = folder.journal()
    assert journal.path == path_of(folder, 3)
    journal.append("event", {"number": 8})
    folder.segment(9, journal)
    assert numbers(folder, 0)[-1] == (8, False)


def test_a_segment_that_cannot_be_begun_leaves_nothing(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers(folder, 0)
    journal, before = folder.journal(), files(folder)

    def full(file: int, buffers: object) -> int:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(OSError, match="no room"):
            folder.segment(9, journal)
    assert files(folder) == before
