"""The journal: what has happened since a checkpoint, in order, so that it can happen again.

A segment is a file of records. It begins with the state that a checkpoint holds, and has its version in its
name. A record is in the file, and on the disk if that is asked for, before anything that follows from it
leaves the server. A process that is killed leaves at most one record half written, at the end: reading stops
there, and the next process goes on writing in its place.

A record is a head of 20 bytes, little-endian (magic, bytes of the text and of the data, crc32c of each),
the text, which is JSON, and the data.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import failpoints
from ...proto.transfer import Bytes
from ...proto.wire import crc32c

MAGIC = 0x4A57_4757
# Nobody reads a journal while its server lives: after so many bytes the system is told to write them, and to
# use their memory for the next ones. Otherwise it fills all that is free, one fresh page after the other.
CACHED_BYTES = 16 << 20
MAX_TEXT_BYTES = 64 << 20
_HEAD = struct.Struct("<IIIII")
_ONE_WRITE = 512  # buffers, below what any system takes


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """what: its kind. fields: plain values. data: uint8, shape (bytes,)."""

    what: str
    fields: Mapping[str, Any]
    data: Bytes


class JournalError(Exception):
    """Nothing can be written down any more, so nothing more can be promised."""


class Journal:
    """Writes one segment. Belongs to one thread, but for `sync`."""

    def __init__(self, path: Path, *, syncs: bool, at: int = 0) -> None:
        """
        Args:
            syncs: whether `sync` waits for the disk; otherwise what is written survives the process alone.
            at: bytes that stay; what follows them is cut off.
        """
        self.path = path
        self.bytes = at
        self._syncs, self._dirty = syncs, False
        self._failure: JournalError | None = None  # after which nothing more is promised
        self._cached = at  # bytes of the file before those that the system was told of last
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, at)
        os.lseek(self._file, at, os.SEEK_SET)

    def append(self, what: str, fields: Mapping[str, Any], data: Sequence[Bytes] = ()) -> None:
        """Raises JournalError, which says what to do; again for all that comes after it."""
        self._check()
        text = _encode([what, fields]).encode()
        size = sum(each.size for each in data)
        sums = crc32c((np.frombuffer(text, np.uint8),)), crc32c(data)
        buffers = [
            _HEAD.pack(MAGIC, len(text), size, *sums) + text,
            *(each.data for each in data if each.size),
        ]
        try:
            self._write(buffers)
            failpoints.reached("journal.appended")
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self.bytes)  # nobody has been told of half a record
            self._failure = JournalError(
                f"the journal {self.path} cannot be written: {error.strerror or error}; what it has is "
                "whole. Make room, or have its folder writable, and start gc-server with the same --state"
            )
            raise self._failure from None
        self.bytes += _HEAD.size + len(text) + size
        self._dirty = True
        if self.bytes - self._cached >= CACHED_BYTES:
            self._pass_on()

    def _pass_on(self) -> None:
        """What is not on the disk yet is begun to be written, and what is there leaves the memory: of the
        bytes before these, too, which were begun last time."""
        if hasattr(os, "posix_fadvise"):
            before = max(0, self._cached - 2 * CACHED_BYTES)
            with suppress(OSError):  # advice, which some file systems do not take
                os.posix_fadvise(self._file, before, self.bytes - before, os.POSIX_FADV_DONTNEED)
        self._cached = self.bytes

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write(self, buffers: list[Any]) -> None:
        while buffers:
            written = os.writev(self._file, buffers[:_ONE_WRITE])
            while buffers and written >= len(buffers[0]):
                written -= len(buffers.pop(0))
            if written:
                buffers[0] = memoryview(buffers[0])[written:]

    def sync(self) -> None:
        """Have all of it on the disk, if that is asked for. Raises JournalError."""
        self._check()
        if not self._syncs or not self._dirty:
            return
        try:
            os.fdatasync(self._file)
            failpoints.reached("journal.synced")
        except OSError as error:  # what the disk has is not known, and another try would not tell
            self._failure = JournalError(f"the journal {self.path} did not reach the disk: {error.strerror}")
            raise self._failure from None
        self._dirty = False

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[tuple[Record, int]]:
    """The records of a segment, each with where it ends in the file, up to the first that is not whole or not
    as it was written."""
    if not path.stat().st_size:
        return
    data: Bytes = np.memmap(path, np.uint8, "r")  # a segment may be larger than what is free
    at = 0
    while at + _HEAD.size <= data.size:
        magic, text_bytes, data_bytes, text_sum, data_sum = _HEAD.unpack_from(data.data, at)
        begin = at + _HEAD.size + text_bytes
        end = begin + data_bytes
        if magic != MAGIC or text_bytes > MAX_TEXT_BYTES or end > data.size:
            return
        text, body = data[begin - text_bytes : begin], data[begin:end]
        if crc32c((text,)) != text_sum or crc32c((body,)) != data_sum:
            return
        try:
            what, fields = json.loads(text.tobytes(), object_hook=_from_json)
        except (ValueError, TypeError):
            return
        yield Record(what, fields, body), end
        at = end


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(f"not plain: {value!r:.100}")


_encode = json.JSONEncoder(default=_to_json, separators=(",", ":")).encode


def _from_json(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["base64"]) if value.keys() == {"base64"} else value


def torn(path: Path, at: int) -> bool:
    """Whether what lies from there on is one record that was being written when the process ended, as opposed
    to records that were damaged later."""
    with path.open("rb") as file:
        file.seek(at)
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return True
    magic, text_bytes, data_bytes, _, _ = _HEAD.unpack(head)
    end: int = at + _HEAD.size + text_bytes + data_bytes
    return bool(magic == MAGIC) and end > path.stat().st_size
