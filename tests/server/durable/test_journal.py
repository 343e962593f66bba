"""The journal: records that are whole come back, and the rest is cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire.server.durable.journal import Journal, JournalError, read, torn

RECORDS: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("event", {"now": 1.5, "event": {"type": "Tick"}, "bytes": b"\x00\xff"}, []),
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
    return [(record.what, record.data.tobytes()) for record, _ in read(path)]


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
        assert torn(path, max((end for end in ends if end <= size), default=0))


def test_wherever_a_bit_changes_the_records_before_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path).close()
    data = path.read_bytes()
    ends = [end for _, end in read(path)]
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :])
        assert found(path) == WHOLE[: sum(end <= at for end in ends)]
    path.write_bytes(data[: ends[0] + 25] + b"x" + data[ends[0] + 26 :])
    assert not torn(path, ends[0])


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
    with pytest.raises(JournalError, match=r"cannot be written: .*Make room"):
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
