"""The journal: records that are whole come back, and the rest is cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.proto.refusal import Reason, Refusal
from gradwire.server.durable import journal as module
from gradwire.server.durable.journal import Journal, JournalError, UnreadableError, read, record_after
from gradwire.server.job import events as e

RECORDS: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("event", {"now": 1.5, "event": e.Tick(), "bytes": b"\x00\xff"}, []),
    (
        "part",
        {"member": ["w", 1]},
        [np.arange(200, dtype=np.uint8), np.empty(0, np.uint8), np.ones(3, np.uint8)],
    ),
    ("closed", {"refusal": None}, [np.zeros(1, np.uint8)] * 700),  # more buffers than one write takes
]


def written(path: Path) -> Journal:
    journal = Journal(path, syncs=True)
    for what, fields, data in RECORDS:
        journal.append(what, fields, data)
    journal.sync()
    return journal


def found(path: Path) -> list[tuple[str, bytes]]:
    return [(record.kind, record.data.tobytes()) for record, _ in read(path)]


WHOLE = [(what, b"".join(each.tobytes() for each in data)) for what, _, data in RECORDS]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    records = [record for record, _ in read(tmp_path / "j")]
    assert found(tmp_path / "j") == WHOLE
    assert [record.fields for record in records] == [fields for _, fields, _ in RECORDS]
    assert journal.bytes == (tmp_path / "j").stat().st_size


def test_wherever_the_file_ends_the_records_before_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path).close()
    data = path.read_bytes()
    ends = [end for _, end in read(path)]
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert found(path) == WHOLE[: sum(end <= size for end in ends)]
        if size:
            assert record_after(path, max((end for end in ends if end <= size), default=0)) is None


def test_wherever_a_bit_changes_the_records_before_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path).close()
    data = path.read_bytes()
    ends = [end for _, end in read(path)]
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :])
        assert found(path) == WHOLE[: sum(end <= at for end in ends)]


@pytest.mark.parametrize("at", [2, 6, 30, 40, 100])  # of the second record: head, its checksum, text, data
def test_what_follows_a_damaged_record_is_found(tmp_path: Path, at: int) -> None:
    """Such a record is not taken for half a record of a process that was killed, which is cut off."""
    path = tmp_path / "j"
    written(path).close()
    data, ends = path.read_bytes(), [end for _, end in read(path)]
    place = ends[0] + at
    path.write_bytes(data[:place] + bytes((data[place] ^ 0x10,)) + data[place + 1 :])
    assert found(path) == WHOLE[:1]
    assert record_after(path, ends[0]) == ends[1]


def test_half_a_record_is_torn_whatever_its_data_look_like(tmp_path: Path) -> None:
    """A worker chooses the bytes of its pushes."""
    path, inner = tmp_path / "j", tmp_path / "inner"
    written(inner).close()
    journal = written(path)
    end = journal.bytes
    journal.append("part", {}, [np.frombuffer(inner.read_bytes() * 3, np.uint8)])
    journal.close()
    os.truncate(path, path.stat().st_size - 1)
    assert record_after(path, end) is None


# ---- names and values that look like the format

HOSTILE = st.sampled_from(
    ["$bytes", "$$bytes", "$", "$tuple", "$dict", "bytes", "base64", "dict", "tensor", "", "\x00\n\x1b["]
)
NAMES = HOSTILE | st.text()
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
@example({"heard": {"base64": "AA=="}})
@example({"heard": {"$bytes": "AA=="}})
@example({"$bytes": {"$bytes": b"\x00"}, "$$bytes": "AA=="})
def test_no_name_is_taken_for_structure(tmp_path_factory: pytest.TempPathFactory, fields: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "named"
    path.unlink(missing_ok=True)
    journal = Journal(path, syncs=False)
    for what in ("event", "part"):
        journal.append(what, fields)
    journal.close()
    assert [(record.kind, record.fields) for record, _ in read(path)] == [("event", fields), ("part", fields)]


@given(NAMES, NAMES)
@example("base64", '{"base64": "AA=="}')
def test_events_come_back_whatever_a_worker_calls_itself(
    tmp_path_factory: pytest.TempPathFactory, one: str, other: str
) -> None:
    events: tuple[e.Event[Any], ...] = (
        e.Joined(one, 1, compressor=other),
        e.EvaluationReported(one, 1, version=3, epoch=1, metrics={one: 1.0, other: 2.0}),
        e.Left(one, 1, failed=True, reason=other),
        e.KeepAlive(one, 1, activity=other, stalled_s=0.5),
    )
    refusal = Refusal(reason=Reason.STALE, message=one, worker=other)
    path = tmp_path_factory.getbasetemp() / "events"
    path.unlink(missing_ok=True)
    journal = Journal(path, syncs=False)
    for event in events:
        journal.append("event", {"event": event, "heard": {one: 1.0, other: 2.0}})
    journal.append("closed", {"member": (one, 1), "refusal": refusal})
    journal.close()
    *records, closed = (record.fields for record, _ in read(path))
    assert [fields["event"] for fields in records] == [*events]
    assert all(fields["heard"] == {one: 1.0, other: 2.0} for fields in records)
    assert closed == {"member": (one, 1), "refusal": refusal}


@pytest.mark.parametrize("fields", [{"a": e.Stopping(reason="")}, {"a": np.zeros(1)}, {"a": object()}])
def test_what_would_come_back_as_something_else_is_not_written(tmp_path: Path, fields: Any) -> None:
    with pytest.raises(TypeError, match="cannot be saved"):
        Journal(tmp_path / "j", syncs=False).append("event", fields)
    assert (tmp_path / "j").stat().st_size == 0


@pytest.mark.parametrize(
    "text",
    [
        *("[1, {}]", "[]", '["event", []]', "{}", "no JSON", "[" * 99_999),
        *('["event", {"a": {"$bytes": "?"}}]', '["event", {"a": {"$": "os:system"}}]'),
    ],
)
def test_a_whole_record_that_cannot_be_decoded_is_named_and_nothing_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "j"
    journal = written(path)
    end = journal.bytes
    with monkeypatch.context() as patch:
        patch.setattr(module, "_encode", Says(text))
        journal.append("event", {})
    journal.append(*RECORDS[0])
    size = path.stat().st_size
    with pytest.raises(UnreadableError, match=rf"j: record 3, at byte {end}, .*cannot be decoded.*start the"):
        list(read(path))
    assert path.stat().st_size == size


@pytest.mark.parametrize(("begin", "number"), [(b"WGWJ", 1), (b"GWJ2", 2), (b"GWJ9", 9), (b"GWJC", 12)])
def test_another_format_is_named(tmp_path: Path, begin: bytes, number: int) -> None:
    path = tmp_path / "j"
    written(path).close()
    path.write_bytes(begin + path.read_bytes()[4:])
    with pytest.raises(UnreadableError, match=f"format {number}, and this release reads 11"):
        list(read(path))


class Says:
    """Called with anything, it says the same."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __call__(self, *_: object) -> Any:
        return self._answer


class Huge(np.ndarray[Any, Any]):
    """Claims more bytes than a number of 32 bits counts, and has one."""

    @property
    def size(self) -> int:
        return (1 << 32) + 5


def test_a_part_may_have_more_than_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its size is written here, and the file has a hole for the rest."""
    monkeypatch.setattr(module, "crc32c", Says(7))
    path = tmp_path / "j"
    journal = Journal(path, syncs=False)
    journal.append("part", {}, [np.zeros(1, np.uint8).view(Huge)])
    journal.close()
    os.truncate(path, journal.bytes)
    [(record, end)] = read(path)
    assert record.data.size == (1 << 32) + 5
    assert end == journal.bytes


def test_the_next_process_goes_on_in_place_of_half_a_record(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path).close()
    ends = [end for _, end in read(path)]
    path.write_bytes(path.read_bytes()[: ends[1] + 30])
    journal = Journal(path, syncs=False, at=ends[1])
    journal.append(*RECORDS[0])
    assert found(path) == [*WHOLE[:2], WHOLE[0]]


def test_a_journal_that_cannot_be_written_says_so_and_stays_whole(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    journal.close()
    with pytest.raises(JournalError, match=r"cannot write the journal .*: .*Free disk space"):
        journal.append(*RECORDS[0])
    assert found(tmp_path / "j") == WHOLE


def test_after_a_failure_nothing_more_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, buffers: list[Any]) -> int:
        os.write(file, bytes(buffers[0])[:7])
        raise OSError(errno.ENOSPC, "no room")

    def unsynced(file: int) -> None:
        raise OSError(errno.EIO, "a bad disk")

    for name, broken in (("writev", full), ("fdatasync", unsynced)):
        journal = written(tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, broken)
            with pytest.raises(JournalError):  # noqa: PT012 - the second needs the first
                journal.append("one", {})
                journal.sync()
        for again in (lambda journal=journal: journal.append("two", {}), journal.sync):
            with pytest.raises(JournalError):
                again()
        size = (tmp_path / name).stat().st_size
        assert journal.bytes == size, "half a record is taken back"
        assert found(tmp_path / name)[: len(WHOLE)] == WHOLE
