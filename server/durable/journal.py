"""The journal: the inputs of control and shard since a checkpoint, in order, so that they can be replayed.

A segment is a file of records. It continues the state of a checkpoint, whose version is in its name. A record
is in the file before anything that follows from it leaves the server; it is also on the disk if the options
ask for it. A process that is killed leaves at most one record half written, at the end: reading stops there,
and the next process overwrites it. Nothing else is ever cut off (`record_after`).

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

MAGIC = b"GWJB"  # the last character is the format, in hexadecimal; A had no epochs in the manifest
# A journal is not read while its server lives. After this number of bytes the system is told to write them
# and to free their pages. Otherwise they would fill all free memory.
CACHED_BYTES = 16 << 20
_FIELDS = struct.Struct("<4sQQII")
_HEAD_BYTES = _FIELDS.size + 4
_ONE_WRITE = 512  # buffers in one system call, below the limit of any system


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One record of the journal.

    Attributes:
        fields: values by name.
        data: bytes that belong to the record, uint8, shape (bytes,).
    """

    kind: str
    fields: Mapping[str, Any]
    data: Bytes


class JournalError(Exception):
    """The journal cannot be written any more, so the server may not decide anything more."""


class UnreadableError(Exception):
    """A segment is undamaged but cannot be read, for instance because it has another format.

    The message names file, byte and record, and the remedy. Nothing may be cut off."""


class Journal:
    """Writes one segment. Belongs to one thread; only `sync` may be called from another."""

    def __init__(self, path: Path, *, syncs: bool, at: int = 0) -> None:
        """
        Args:
            path: path of the segment, which is created if it does not exist.
            syncs: True if `sync` waits for the disk. Otherwise records survive the process, and not the
                machine.
            at: number of bytes that stay; the bytes after them are cut off."""
        self.path = path
        self.bytes = at
        self._syncs, self._dirty = syncs, False
        self._failure: JournalError | None = None  # the first failure, which every later call raises again
        self._cached = at  # position up to which the system was told to write and free pages
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, at)
        os.lseek(self._file, at, os.SEEK_SET)

    def append(self, kind: str, fields: Mapping[str, Any], data: Sequence[Bytes] = ()) -> None:
        """Write a record to the file.

        Args:
            fields: values by name.
            data: bytes that belong to the record, end to end.

        Raises:
            JournalError: this record or an earlier one could not be written. The message has the remedy.
        """
        self._check()
        text = _encode([kind, pack(fields)]).encode()
        size = sum(each.size for each in data)
        sums = crc32c((np.frombuffer(text, np.uint8),)), crc32c(data)
        buffers = [_head(len(text), size, *sums) + text, *(each.data for each in data if each.size)]
        try:
            self._write(buffers)
            failpoints.reached("journal.appended")
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self.bytes)  # removes the half of the record that was written
            self._failure = JournalError(
                f"cannot write the journal {self.path}: {error.strerror or error}; its records are whole. "
                "Free disk space, or make its folder writable, and start gc-server with the same --state"
            )
            raise self._failure from None
        self.bytes += _HEAD_BYTES + len(text) + size
        self._dirty = True
        if self.bytes - self._cached >= CACHED_BYTES:
            self._evict_page_cache()

    def _evict_page_cache(self) -> None:
        """Make the system write the last bytes, and free the pages of bytes that it has written."""
        if hasattr(os, "posix_fadvise"):
            before = max(0, self._cached - 2 * CACHED_BYTES)
            with suppress(OSError):  # some file systems do not support the advice
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
        """Wait until all records are on the disk, if the options ask for it. Raises JournalError if the
        records may not be on the disk, or an earlier write has failed."""
        self._check()
        if not self._syncs or not self._dirty:
            return
        try:
            os.fdatasync(self._file)
            failpoints.reached("journal.synced")
        except OSError as error:  # the content of the disk is unknown, and a second try would not reveal it
            self._failure = JournalError(f"cannot sync the journal {self.path} to disk: {error.strerror}")
            raise self._failure from None
        self._dirty = False

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[tuple[Record, int]]:
    """Yield the records of the segment at `path`, each with the byte at which it ends in the file.

    Reading stops at the first record that is incomplete or damaged.

    Raises:
        UnreadableError: a record is undamaged, and cannot be decoded.
    """
    if not path.stat().st_size:
        return
    data = _mapped(path)
    _check_format(path, data)
    at = number = 0
    while (found := _whole(data, at)) is not None:
        text, body = found
        try:
            kind, fields = _decoded(text)
        except (DamagedError, ValueError, TypeError, RecursionError) as error:
            raise UnreadableError(
                f"{path}: record {number}, at byte {at}, is undamaged but cannot be decoded ({error}); "
                "start the release of gradwire that wrote it, and report this"
            ) from None
        at += _HEAD_BYTES + text.size + body.size
        number += 1
        yield Record(kind, fields, body), at


def _decoded(text: Bytes) -> tuple[str, dict[str, Any]]:
    """Decode a record's text into its kind and its fields. Raises DamagedError, ValueError, TypeError or
    RecursionError."""
    kind, fields = unpack(json.loads(text.tobytes()))
    if kind.__class__ is not str or fields.__class__ is not dict:
        raise TypeError("expected a kind and its fields")
    return kind, fields


def record_after(path: Path, at: int) -> int | None:
    """Find a whole record behind the byte at which `read` has stopped.

    A process that ends while it writes leaves nothing whole behind the record that it was writing. So None
    means that the rest is half a record, which may be cut off; otherwise the file was damaged later.

    Args:
        at: byte at which `read` has stopped.

    Returns:
        The byte at which the record begins; None if there is none.
    """
    if path.stat().st_size <= at:
        return None
    data = _mapped(path)
    head = _head_at(data, at)
    if at + _HEAD_BYTES > data.size or (head is not None and head.end > data.size):
        return None  # the head or the data of the record at `at` reach beyond the end of the file
    step = 1 << 24
    for begin in range(at + 1 if head is None else head.end, data.size, step):
        piece = data[begin : begin + step + len(MAGIC) - 1].tobytes()
        index = piece.find(MAGIC)
        while index >= 0:
            if _whole(data, begin + index) is not None:
                return begin + index
            index = piece.find(MAGIC, index + 1)
    return None


def _mapped(path: Path) -> Bytes:
    return np.memmap(path, np.uint8, "r")  # a segment may be larger than the free memory


def _check_format(path: Path, data: Bytes) -> None:
    """Raise UnreadableError if the segment has another format."""
    begin = data[: len(MAGIC)].tobytes()
    others = {b"GWJ%X" % number for number in range(16)} - {MAGIC}
    if begin == b"WGWJ" or begin in others:
        number = 1 if begin == b"WGWJ" else int(begin[3:], 16)
        raise UnreadableError(
            f"{path}: record 0, at byte 0, has format {number}, and this release reads {int(MAGIC[3:], 16)}; "
            "start the release of gradwire that wrote it"
        )


class _Head(NamedTuple):
    """The decoded head of a record.

    Attributes:
        begin: byte at which the data begin, behind the text.
        end: byte at which the record ends.
        text: byte at which the text begins, and its crc32c.
        data_sum: crc32c of the data.
    """

    begin: int
    end: int
    text: tuple[int, int]
    data_sum: int


def _head(text_bytes: int, data_bytes: int, text_sum: int, data_sum: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, text_bytes, data_bytes, text_sum, data_sum)
    return fields + crc32c((np.frombuffer(fields, np.uint8),)).to_bytes(4, "little")


def _head_at(data: Bytes, at: int) -> _Head | None:
    """Return the head that begins at a byte; None if it is not whole, or not as it was written."""
    raw = data[at : at + _HEAD_BYTES].tobytes()
    if len(raw) < _HEAD_BYTES:
        return None
    magic, text_bytes, data_bytes, text_sum, data_sum = _FIELDS.unpack_from(raw)
    if magic != MAGIC or raw != _head(text_bytes, data_bytes, text_sum, data_sum):
        return None
    begin = at + _HEAD_BYTES + text_bytes
    return _Head(begin, begin + data_bytes, (at + _HEAD_BYTES, text_sum), data_sum)


def _whole(data: Bytes, at: int) -> tuple[Bytes, Bytes] | None:
    """Return text and data of the record that begins at a byte; None if it is not whole, or not as it was
    written."""
    head = _head_at(data, at)
    if head is None or head.end > data.size:
        return None
    text, body = data[head.text[0] : head.begin], data[head.begin : head.end]
    if crc32c((text,)) != head.text[1] or crc32c((body,)) != head.data_sum:
        return None
    return text, body


_encode = json.JSONEncoder(separators=(",", ":")).encode
