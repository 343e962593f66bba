"""The folder of --state: checkpoints, journal, and the id and options of their job.

    job.json                  id and options of the job
    checkpoint-0000000042/    all of it at a version (`storage.checkpoint`)
    journal-0000000042.log    the inputs since then (`journal`)
    lock                      held by the server that uses the folder
    best-0000000030/          the best version that was evaluated: model and optimizer, to begin a job with

At a URL (`storage.backends`) there is no lock but `owner`, the server that came last, and no journal.

The last `KEPT` checkpoints stay, with all segments since the first of them: if the newest one is damaged,
the one before it and its journal lead to the same state. So the folder holds at most `KEPT` + 1 checkpoints
and as many segments, each of the size that `segment_limit` allows and what arrives until the next version.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...storage import checkpoint
from ...storage.backends import BackendError, backend_at, is_url
from ...storage.checkpoint import FormatError
from ...storage.values import DamagedError
from .journal import Journal, JournalError, Record, UnreadableError, read, record_after

log = logging.getLogger("gradwire.server")

KEPT = 2
JOB = "job.json"
LEAST_SEGMENT_BYTES = 256 << 20
CHECKPOINT, SEGMENT, BEST = "checkpoint-", "journal-", "best-"
BEGIN = "begin"  # the first record of a segment, which names the segment before it


class StateError(Exception):
    """The folder cannot be used: the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A record of the journal, and where it was read.

    Attributes:
        own: whether its segment is that of the checkpoint.
        where: file, byte and record, for messages.
    """

    record: Record
    own: bool
    where: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that is whole, and its size."""

    version: int
    tree: Any
    bytes: int


def segment_limit(checkpoint_bytes: int) -> int:
    """Return the bytes of a segment after which a checkpoint is due at any time."""
    return max(LEAST_SEGMENT_BYTES, 8 * checkpoint_bytes)


def job_at(where: Path | str) -> Mapping[str, Any] | None:
    """Return the job that `StateFolder.put_job` wrote; None where there is none. Raises StateError."""
    try:
        found: Mapping[str, Any] = json.loads(backend_at(where).text(JOB))
        return found
    except BackendError as error:
        raise StateError(f"--state {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"--state {where}: {JOB} cannot be read: {error}") from None


def journal_limit(checkpoint_bytes: int) -> int:
    """Return the bytes of all segments since the last whole checkpoint at which a server ends whose
    checkpoints fail."""
    return 4 * segment_limit(checkpoint_bytes)


class StateFolder:
    """The folder, held by one process."""

    def __init__(self, where: Path | str, *, syncs: bool) -> None:
        """Raises StateError if another process holds the folder, or it cannot be written to.

        Args:
            where: path or URL. A URL has no journal, so methods about segments may not be called.
            syncs: whether journals wait for the disk.
        """
        self.path = Path(where)
        self._syncs = syncs
        self._last = self.segment_path(0), 0  # the last segment that was read, and where it ends
        self.bytes_before = 0  # of the segments that were read before it
        self._recovered: int | None = None  # version of the checkpoint that `newest` returned
        try:
            self._backend = backend_at(where)
            self._backend.hold()
        except BackendError as error:
            raise StateError(f"--state {error}") from None
        except BlockingIOError:
            raise StateError(
                f"--state {where}: another gc-server uses it; stop that one, or choose another"
            ) from None
        except OSError as error:
            why = error.strerror or error
            raise StateError(f"--state {where}: {why}; choose a folder that can be written to") from None

    @property
    def name(self) -> str:
        """For people."""
        return self._backend.name

    def begun(self) -> bool:
        """Return whether a job has begun here: it has, or had, a checkpoint. Raises StateError."""
        try:
            return bool(self._checkpoints()) or any(self._segments())
        except OSError as error:
            raise StateError(f"--state {self.name}: {error.strerror or error}") from None

    def claim(self) -> None:
        """Stop another server at the same URL, which no lock keeps out, from writing.

        Raises StateError if it wrote a checkpoint after `newest` returned an older one: this server would
        continue from that older one, and the next start would take the other server's for the newest.
        """
        try:
            self._backend.claim()
            newest = max(self._checkpoints(), default=None)
        except OSError as error:
            raise StateError(f"--state {self.name}: {error.strerror or error}") from None
        if newest != self._recovered:
            recovered = "none" if self._recovered is None else f"version {self._recovered}"
            raise StateError(
                f"--state {self.name}: another server wrote a checkpoint meanwhile: the newest is version "
                f"{newest}, and this server recovered {recovered}; start again"
            )

    def put_job(self, job: Mapping[str, Any]) -> None:
        """Write the id and options of the job. Raises StateError."""
        try:
            self._backend.put_text(JOB, json.dumps(job, indent=1))
        except OSError as error:
            raise StateError(f"--state {self.name}: {error.strerror or error}") from None

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole; None if there never was one. Raises StateError if none of
        several is."""
        try:
            return self._newest()
        except (OSError, FormatError) as error:  # it may be whole all the same
            raise StateError(f"--state {self.name}: its checkpoints cannot be read: {error}") from None

    def _newest(self) -> Found | None:
        versions = self._checkpoints()
        damaged: list[str] = []
        for version in reversed(versions):
            folder = _name(CHECKPOINT, version)
            try:
                tree, about = self._backend.read(folder)
            except DamagedError as error:
                log.error("a checkpoint cannot be used, and the one before is taken: %s", error)
                damaged.append(folder)
                continue
            for each in damaged:  # and not among those that are kept
                self._backend.set_aside(each)
            self._recovered = version
            return Found(version, tree, sum(each["bytes"] for each in about["files"].values()))
        # If not even the first checkpoint was ever whole, the job has not begun, and nothing is lost.
        if versions or any(self._segments()):
            raise StateError(
                f"--state {self.name}: none of its {len(versions)} checkpoints is whole; begin the job anew "
                "in another folder"
            )
        return None

    def records(self, version: int) -> Iterator[Placed]:
        """Yield the records since the checkpoint of a version. Afterwards `journal` continues the last
        segment.

        Only half a record at the end of the last segment is cut off, from which nothing can have followed.

        Raises:
            StateError: something is missing, was damaged later, or cannot be decoded; nothing was changed.
        """
        segments = [each for each in self._segments() if each >= version]
        if segments and segments[0] != version:
            gone, there = (self.segment_path(each).name for each in (version, segments[0]))
            raise StateError(
                f"--state {self.name}: {gone} is gone, without which {there} leads nowhere; put it back, or "
                f"move {there} away to go on from the checkpoint alone"
            )
        self._last, self.bytes_before = (self.segment_path(version), 0), 0
        for each in segments:
            path, end = self.segment_path(each), 0
            try:
                for number, (record, upto) in enumerate(read(path)):
                    if record.what == BEGIN:
                        self._check_after(record, path, own=each == version)
                    else:
                        yield Placed(record, each == version, f"{path}, byte {end}, record {number}")
                    end = upto
            except UnreadableError as error:
                raise StateError(f"--state: {error}") from None
            cut = path.stat().st_size - end
            if cut or not end:
                self._check_torn(path, end, last=each == segments[-1])
            if cut:
                log.warning("the last %d bytes of %s are half a record and are cut off", cut, path)
            if end or each == version:
                self.bytes_before += self._last[1]
                self._last = path, end
            else:  # the last one: a server was killed as it began it, and continues the previous segment
                path.unlink()

    def _check_after(self, record: Record, path: Path, *, own: bool) -> None:
        """Raises StateError for a segment that does not begin where the previous one has ended."""
        before, end = self._last
        if not own and record.fields["after"] != [before.name, end]:
            name, size = record.fields["after"] or ("a checkpoint", 0)
            raise StateError(
                f"--state {self.name}: {path.name} continues {name} from byte {size} on, and what is there "
                f"is {before.name} with {end} bytes: something in between is gone. Put it back, or move "
                f"{path.name} and all later segments away to go on without what they have"
            )

    def _check_torn(self, path: Path, end: int, *, last: bool) -> None:
        """Raises StateError if more follows after a byte than half a record of a killed process."""
        after = record_after(path, end)
        if after is None and last:
            return
        lost = f"a whole record follows at byte {after}" if after is not None else "later segments follow"
        raise StateError(
            f"--state: {path} is damaged at byte {end}, and {lost}. Put a copy of it back; or, to go on "
            "without all that was accepted after that byte, move later segments away and run: "
            f"truncate -s {end} {path}"
        )

    def segment_path(self, version: int) -> Path:
        return self.path / _name(SEGMENT, version, ".log")

    def journal(self) -> Journal:
        """Continue the segment that `records` has read last. Raises OSError."""
        path, end = self._last
        if not end:
            return self._begun(path, None)
        return Journal(path, syncs=self._syncs, at=end)

    def segment(self, version: int, after: Journal | None = None) -> Journal:
        """Begin a new segment. after: the one that it continues. Raises OSError, and there is none."""
        return self._begun(self.segment_path(version), after)

    def _begun(self, path: Path, after: Journal | None) -> Journal:
        journal = Journal(path, syncs=self._syncs)
        try:
            where = None if after is None or after.path == path else [after.path.name, after.bytes]
            journal.append(BEGIN, {"after": where})
            checkpoint.sync(self.path)
        except (OSError, JournalError) as error:
            journal.close()
            path.unlink(missing_ok=True)
            raise OSError(str(error)) from None
        return journal

    def write(self, version: int, tree: Any, about: Mapping[str, Any]) -> int:
        """Write a checkpoint, and remove those and the segments that it makes superfluous. Return its bytes.
        Raises OSError."""
        written = self._backend.write(_name(CHECKPOINT, version), tree, about)
        kept = self._checkpoints()[-KEPT:]
        for old in _versions(CHECKPOINT, self._backend.left(CHECKPOINT)):
            if old not in kept:
                self._backend.remove(_name(CHECKPOINT, old))
        for old in self._segments():
            if old < kept[0]:
                self.segment_path(old).unlink(missing_ok=True)
        return written

    def write_best(self, version: int, tree: Any, about: Mapping[str, Any]) -> None:
        """Write the best version in place of the previous one. Raises OSError."""
        name = _name(BEST, version)
        if name not in self._backend.folders(BEST):
            self._backend.write(name, tree, about)
        for old in _versions(BEST, self._backend.left(BEST)):
            if old != version:
                self._backend.remove(_name(BEST, old))

    def _checkpoints(self) -> list[int]:
        """Return the versions of whole checkpoints, ascending."""
        return _versions(CHECKPOINT, self._backend.folders(CHECKPOINT))

    def _segments(self) -> list[int]:
        if is_url(self._backend.name):
            return []
        return _versions(SEGMENT, [each.name.removesuffix(".log") for each in self.path.glob(f"{SEGMENT}*")])

    def close(self) -> None:
        self._backend.release()


def _versions(prefix: str, names: Sequence[str]) -> list[int]:
    found = [name.removeprefix(prefix) for name in names]
    return sorted(int(name) for name in found if name.isdigit())


def _name(prefix: str, version: int, suffix: str = "") -> str:
    return f"{prefix}{version:010d}{suffix}"
