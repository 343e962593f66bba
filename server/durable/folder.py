"""The folder of --state: checkpoints, journal, and the id and options of their job.

    job.json               | id and options of the job
    checkpoint-0000000042/ | the whole state at a version (`storage.checkpoint`)
    journal-0000000042.log | the inputs since then (`journal`)
    lock                   | held by the server that uses the folder
    best-0000000030/       | the best version that was evaluated: model and optimizer, to begin a job with

At a URL (`storage.backends`) there is no lock but `owner`, the last server that claimed the folder, and no
journal.

The last `KEPT` checkpoints stay, with all segments since the first of them. If the newest checkpoint is
damaged, the previous one and its journal lead to the same state. So the folder holds at most `KEPT` + 1
checkpoints and as many segments. A segment has the size that `segment_limit` allows, plus the records that
arrive until the next version.
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

KEPT = 2  # number of checkpoints that stay
JOB = "job.json"
LEAST_SEGMENT_BYTES = 256 << 20  # a smaller segment makes no checkpoint due
CHECKPOINT, SEGMENT, BEST = "checkpoint-", "journal-", "best-"
BEGIN = "begin"  # the first record of a segment, which names the previous segment


class StateError(Exception):
    """The folder of --state cannot be used. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A record of the journal, and where it was read.

    Attributes:
        own: True if it is in the segment that began at the checkpoint; False if it is in a later one.
        where: file, byte and number of the record, for messages.
    """

    record: Record
    own: bool
    where: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that is whole."""

    version: int
    tree: Any
    bytes: int


def segment_limit(checkpoint_bytes: int) -> int:
    """Return the size of a segment, in bytes, from which a checkpoint is due, even before
    `--checkpoint-every`. checkpoint_bytes: size of the last checkpoint."""
    return max(LEAST_SEGMENT_BYTES, 8 * checkpoint_bytes)


def job_at(where: Path | str) -> Mapping[str, Any] | None:
    """Return the id and options of the job in a folder of --state, as `StateFolder.put_job` wrote them.

    Args:
        where: path or URL of the folder.

    Returns:
        None if no job was written there.

    Raises:
        StateError: the folder cannot be read.
    """
    try:
        found: Mapping[str, Any] = json.loads(backend_at(where).text(JOB))
        return found
    except BackendError as error:
        raise StateError(f"--state {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"--state {where}: cannot read {JOB}: {error}") from None


def journal_limit(checkpoint_bytes: int) -> int:
    """Return the size of the journal, in bytes, beyond which the server ends itself if checkpoints fail: the
    journal would grow without bound. checkpoint_bytes: size of the last checkpoint."""
    return 4 * segment_limit(checkpoint_bytes)


class StateFolder:
    """The folder of --state, which this process holds. The recorder writes to it, and a recovery reads it.

    Attributes:
        bytes_before: bytes of the segments that `records` read before the last one.
    """

    def __init__(self, where: Path | str, *, syncs: bool) -> None:
        """Open the folder and take its lock.

        Args:
            where: path or URL. A URL has no journal, so methods about segments may not be called.
            syncs: True if journals wait for the disk.

        Raises:
            StateError: another process holds the folder, or it cannot be written to.
        """
        self.path = Path(where)
        self._syncs = syncs
        self._last = self.segment_path(0), 0  # the last segment that was read, and where it ends
        self.bytes_before = 0
        self._recovered: int | None = None  # version of the checkpoint that `newest` returned
        try:
            self._backend = backend_at(where)
            self._backend.hold()
        except BackendError as error:
            raise StateError(f"--state {error}") from None
        except BlockingIOError:
            raise StateError(
                f"--state {where}: another gc-server uses this folder; stop it, or use another folder"
            ) from None
        except OSError as error:
            why = error.strerror or error
            raise StateError(f"--state {where}: {why}; use a folder that can be written to") from None

    @property
    def name(self) -> str:
        """Path or URL of the folder, for messages."""
        return self._backend.name

    def begun(self) -> bool:
        """Return True if a job has begun here: there is a checkpoint or a segment. Raises StateError if the
        folder cannot be read."""
        try:
            return bool(self._checkpoints()) or any(self._segments())
        except OSError as error:
            raise StateError(f"--state {self.name}: {error.strerror or error}") from None

    def claim(self) -> None:
        """Take over a folder at a URL, so that another server, which no lock keeps out, stops writing to it.
        Raises StateError if the other server wrote a checkpoint after `newest` returned an older one. This
        server would continue from the older one, and the next start would take the other server's for the
        newest."""
        try:
            self._backend.claim()
            newest = max(self._checkpoints(), default=None)
        except OSError as error:
            raise StateError(f"--state {self.name}: {error.strerror or error}") from None
        if newest != self._recovered:
            recovered = "none" if self._recovered is None else f"version {self._recovered}"
            raise StateError(
                f"--state {self.name}: another server wrote a checkpoint meanwhile: the newest is version "
                f"{newest}, and this server recovered {recovered}; restart the server"
            )

    def put_job(self, job: Mapping[str, Any]) -> None:
        """Write the id and options of the job. Raises StateError if the folder cannot be written to."""
        try:
            self._backend.put_text(JOB, json.dumps(job, indent=1))
        except OSError as error:
            raise StateError(f"--state {self.name}: {error.strerror or error}") from None

    def newest(self) -> Found | None:
        """Read the newest checkpoint that is whole. Damaged newer ones are set aside.

        Returns:
            None if no checkpoint was ever whole, so that the job has not begun.

        Raises:
            StateError: the folder cannot be read, or all of its checkpoints are damaged.
        """
        try:
            return self._newest()
        except (OSError, FormatError) as error:  # the checkpoint may be whole, so it is not set aside
            raise StateError(f"--state {self.name}: cannot read its checkpoints: {error}") from None

    def _newest(self) -> Found | None:
        versions = self._checkpoints()
        damaged: list[str] = []
        for version in reversed(versions):
            folder = _name(CHECKPOINT, version)
            try:
                tree, about = self._backend.read(folder)
            except DamagedError as error:
                log.error("cannot use a checkpoint, so the previous one is read: %s", error)
                damaged.append(folder)
                continue
            for each in damaged:  # otherwise they would count among the `KEPT` ones that stay
                self._backend.set_aside(each)
            self._recovered = version
            return Found(version, tree, sum(each["bytes"] for each in about["files"].values()))
        # If not even the first checkpoint was ever whole, the job has not begun, and nothing is lost.
        if versions or any(self._segments()):
            raise StateError(
                f"--state {self.name}: none of its {len(versions)} checkpoints is whole; start the job again "
                "in another folder"
            )
        return None

    def records(self, version: int) -> Iterator[Placed]:
        """Yield the records since the checkpoint of a version. Afterwards `journal` continues the last
        segment.

        If the last segment ends with half a record, which a killed server leaves, these bytes do not count:
        the server has never acted on such a record. Half a record anywhere else is an error.

        Raises:
            StateError: a segment is missing, was damaged later, or cannot be decoded. Nothing was changed.
        """
        segments = [each for each in self._segments() if each >= version]
        if segments and segments[0] != version:
            gone, there = (self.segment_path(each).name for each in (version, segments[0]))
            raise StateError(
                f"--state {self.name}: {gone} is missing, and {there} continues it; restore it, or move "
                f"{there} away to resume from the checkpoint alone"
            )
        self._last, self.bytes_before = (self.segment_path(version), 0), 0
        for each in segments:
            path, end = self.segment_path(each), 0
            try:
                for number, (record, upto) in enumerate(read(path)):
                    if record.kind == BEGIN:
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
                log.warning("cutting off the last %d bytes of %s, which are half a record", cut, path)
            if end or each == version:
                self.bytes_before += self._last[1]
                self._last = path, end
            else:  # a server was killed as it began this last segment, so the previous segment continues
                path.unlink()

    def _check_after(self, record: Record, path: Path, *, own: bool) -> None:
        """Raise StateError if a segment does not begin where the previous one has ended.

        Args:
            record: first record of the segment.
            own: True if the segment is that of the checkpoint, which may continue any segment.
        """
        before, end = self._last
        if not own and record.fields["after"] != [before.name, end]:
            name, size = record.fields["after"] or ("a checkpoint", 0)
            raise StateError(
                f"--state {self.name}: {path.name} continues {name} from byte {size}, but the previous "
                f"segment is {before.name} with {end} bytes: records in between are missing. Restore them, "
                f"or move {path.name} and all later segments away to resume without their records"
            )

    def _check_torn(self, path: Path, end: int, *, last: bool) -> None:
        """Raise StateError if the bytes after `end` are more than half a record of a killed process.

        Args:
            end: byte at which its last whole record ends.
            last: True if no later segment follows.
        """
        after = record_after(path, end)
        if after is None and last:
            return
        lost = f"a whole record follows at byte {after}" if after is not None else "later segments follow"
        raise StateError(
            f"--state: {path} is damaged at byte {end}, and {lost}. Restore a copy of it; or, to resume "
            "without all records after that byte, move later segments away and run: "
            f"truncate -s {end} {path}"
        )

    def segment_path(self, version: int) -> Path:
        """Return the path of the segment that follows the checkpoint of a version."""
        return self.path / _name(SEGMENT, version, ".log")

    def journal(self) -> Journal:
        """Return a journal that continues the segment which `records` has read last. Raises OSError if the
        segment cannot be opened."""
        path, end = self._last
        if not end:
            return self._begun(path, None)
        return Journal(path, syncs=self._syncs, at=end)

    def segment(self, version: int, after: Journal | None = None) -> Journal:
        """Begin a new segment and return its journal. Raises OSError if that fails; no file of the segment is
        left then. after: journal of the segment that it continues; None for the first one."""
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
        """Write a checkpoint, and remove the checkpoints and segments that it makes superfluous.

        Args:
            about: facts about the checkpoint that are stored beside it, such as the id of the job.

        Returns:
            The number of bytes written.

        Raises:
            OSError: the checkpoint could not be written.
        """
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
        """Write the best version in place of the previous one. Raises OSError if the version could not be
        written. about: facts about the version that are stored beside it, such as the id of the job."""
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
        """Return the versions of segments, ascending; none at a URL."""
        if is_url(self._backend.name):
            return []
        return _versions(SEGMENT, [each.name.removesuffix(".log") for each in self.path.glob(f"{SEGMENT}*")])

    def close(self) -> None:
        """Release the folder's lock."""
        self._backend.release()


def _versions(prefix: str, names: Sequence[str]) -> list[int]:
    found = [name.removeprefix(prefix) for name in names]
    return sorted(int(name) for name in found if name.isdigit())


def _name(prefix: str, version: int, suffix: str = "") -> str:
    return f"{prefix}{version:010d}{suffix}"
