"""The journal: the inputs of control and shard since a checkpoint, in order, so that they can be replayed.

A segment is a file of records. It continues the state of a checkpoint, whose version is in its name. A record
is in the file, and on the disk if the options ask for it, before anything that follows from it leaves the
server. A process that is killed leaves at most one record half written, at the end: reading stops there, and
the next process writes in its place. Nothing else is ever cut off (`record_after`).

A record is a head of 32 bytes, little-endian (magic, bytes of the text and of the data, crc32c of each and of
these fields), the text, which is JSON (`storage.values`), and the data.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...common import failpoints
from ...proto.transfer import Bytes
from ...proto.wire import crc32c
from ...storage.values import DamagedError, pack, unpack

MAGIC = b"GWJ3"  # the last character is the format; 2 had names of Python classes
# A journal is not read while its server lives: after so many bytes the system is told to write them and to
# free their pages. Otherwise they would fill all free memory.
CACHED_BYTES = 16 << 20
_FIELDS = struct.Struct("<4sQQII")
_HEAD_BYTES = _FIELDS.size + 4
_ONE_WRITE = 512  # buffers, below what any system takes


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """what: its kind. fields: values by name. data: uint8, shape (bytes,)."""

    what: str
    fields: Mapping[str, Any]
    data: Bytes


class JournalError(Exception):
    """The journal cannot be written any more, so the server may decide nothing more."""


class UnreadableError(Exception):
    """A segment cannot be read although its bytes are as they were written, such as one of another format.
    The message names file, byte and record, and what to do. Nothing may be cut off."""


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
        """Write a record. Raises JournalError, which says what to do, from the first failure on."""
        self._check()
        text = _encode([what, pack(fields)]).encode()
        size = sum(each.size for each in data)
        sums = crc32c((np.frombuffer(text, np.uint8),)), crc32c(data)
        buffers = [_head(len(text), size, *sums) + text, *(each.data for each in data if each.size)]
        try:
            self._write(buffers)
            failpoints.reached("journal.appended")
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self.bytes)  # nothing follows from half a record
            self._failure = JournalError(
                f"the journal {self.path} cannot be written: {error.strerror or error}; what it has is "
                "whole. Make room, or have its folder writable, and start gc-server with the same --state"
            )
            raise self._failure from None
        self.bytes += _HEAD_BYTES + len(text) + size
        self._dirty = True
        if self.bytes - self._cached >= CACHED_BYTES:
            self._evict_page_cache()

    def _evict_page_cache(self) -> None:
        """Have the system write the last bytes, and free the pages of those that it has written."""
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
        """Wait until all records are on the disk, if the options ask for it. Raises JournalError."""
        self._check()
        if not self._syncs or not self._dirty:
            return
        try:
            os.fdatasync(self._file)
            failpoints.reached("journal.synced")
        except OSError as error:  # the content of the disk is unknown, and a second try would not reveal it
            self._failure = JournalError(f"the journal {self.path} did not reach the disk: {error.strerror}")
            raise self._failure from None
        self._dirty = False

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[tuple[Record, int]]:
    """Yield the records of a segment, each with where it ends in the file, up to the first that is not whole
    or not as it was written.

    Raises:
        UnreadableError: a record is as it was written, and cannot be decoded.
    """
    if not path.stat().st_size:
        return
    data = _mapped(path)
    _check_format(path, data)
    at = number = 0
    while (found := _whole(data, at)) is not None:
        text, body = found
        try:
            what, fields = _decoded(text)
        except (DamagedError, ValueError, TypeError, RecursionError) as error:
            raise UnreadableError(
                f"{path}: record {number}, at byte {at}, is as it was written and cannot be decoded "
                f"({error}); start the release of gradwire that wrote it, and report this"
            ) from None
        at += _HEAD_BYTES + text.size + body.size
        number += 1
        yield Record(what, fields, body), at


def _decoded(text: Bytes) -> tuple[str, dict[str, Any]]:
    """Raises DamagedError, ValueError, TypeError or RecursionError."""
    what, fields = unpack(json.loads(text.tobytes()))
    if what.__class__ is not str or fields.__class__ is not dict:
        raise TypeError("expected a kind and its fields")
    return what, fields


def record_after(path: Path, at: int) -> int | None:
    """Return the byte at which a whole record begins somewhere behind byte `at`, where `read` has stopped.

    A process that ends while it writes leaves nothing whole behind what it was writing. So None means that
    the rest is half a record, which may be cut off; anything else was damaged later.
    """
    if path.stat().st_size <= at:
        return None
    data = _mapped(path)
    head = _head_at(data, at)
    if at + _HEAD_BYTES > data.size or (head is not None and head.end > data.size):
        return None  # whatever its data may look like
    step = 1 << 24
    for begin in range(at + 1 if head is None else head.end, data.size, step):
        piece = data[begin : begin + step + len(MAGIC) - 1].tobytes()
        place = piece.find(MAGIC)
        while place >= 0:
            if _whole(data, begin + place) is not None:
                return begin + place
            place = piece.find(MAGIC, place + 1)
    return None


def _mapped(path: Path) -> Bytes:
    return np.memmap(path, np.uint8, "r")  # a segment may be larger than the free memory


def _check_format(path: Path, data: Bytes) -> None:
    """Raises UnreadableError for a segment of another format."""
    begin = data[: len(MAGIC)].tobytes()
    if begin == b"WGWJ" or (begin[:3] == MAGIC[:3] and begin[3:].isdigit() and begin != MAGIC):
        number = 1 if begin == b"WGWJ" else int(begin[3:])
        raise UnreadableError(
            f"{path}: record 0, at byte 0, has format {number}, and this release reads {MAGIC[3:].decode()}; "
            "start the release of gradwire that wrote it"
        )


class _Head(NamedTuple):
    begin: int  # of the data, behind the text
    end: int
    text: tuple[int, int]  # its first byte, and its crc32c
    data_sum: int


def _head(text_bytes: int, data_bytes: int, text_sum: int, data_sum: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, text_bytes, data_bytes, text_sum, data_sum)
    return fields + crc32c((np.frombuffer(fields, np.uint8),)).to_bytes(4, "little")


def _head_at(data: Bytes, at: int) -> _Head | None:
    """The head that begins at a byte; None if it is not whole, or not as it was written."""
    raw = data[at : at + _HEAD_BYTES].tobytes()
    if len(raw) < _HEAD_BYTES:
        return None
    magic, text_bytes, data_bytes, text_sum, data_sum = _FIELDS.unpack_from(raw)
    if magic != MAGIC or raw != _head(text_bytes, data_bytes, text_sum, data_sum):
        return None
    begin = at + _HEAD_BYTES + text_bytes
    return _Head(begin, begin + data_bytes, (at + _HEAD_BYTES, text_sum), data_sum)


def _whole(data: Bytes, at: int) -> tuple[Bytes, Bytes] | None:
    """Text and data of the record that begins at a byte; None if it is not whole, or not as written."""
    head = _head_at(data, at)
    if head is None or head.end > data.size:
        return None
    text, body = data[head.text[0] : head.begin], data[head.begin : head.end]
    if crc32c((text,)) != head.text[1] or crc32c((body,)) != head.data_sum:
        return None
    return text, body


_encode = json.JSONEncoder(separators=(",", ":")).encode
