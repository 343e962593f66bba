"""The folder of --state: checkpoints, journal, and which job they are of.

    job.json                  id and options of the job
    checkpoint-0000000042/    all of it at a version (`saved`)
    journal-0000000042.log    what has happened since (`journal`)
    lock                      held by the server that uses the folder

The last `KEPT` checkpoints stay, with all segments since the first of them: if the newest one is damaged,
the one before and its journal lead to the same state. So the folder holds no more than `KEPT` + 1
checkpoints and as many segments, each as large as `segment_limit` says, and what comes until the next
version.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import saved
from ...saved import DamagedError
from .journal import Journal, Record, read, torn

log = logging.getLogger("gradwire.server")

KEPT = 2
JOB = "job.json"
LEAST_SEGMENT_BYTES = 256 << 20
CHECKPOINT, SEGMENT = "checkpoint-", "journal-"


class StateError(Exception):
    """The folder cannot be used: the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that is whole."""

    version: int
    tree: Any


def segment_limit(checkpoint_bytes: int) -> int:
    """Bytes of a segment after which a checkpoint is due, whatever the time."""
    return max(LEAST_SEGMENT_BYTES, 2 * checkpoint_bytes)


class StateFolder:
    """Belongs to one process. Raises StateError where another one has it, or it cannot be written to."""

    def __init__(self, path: Path, *, syncs: bool) -> None:
        self.path = path
        self._syncs = syncs
        self._last = self.segment_path(0), 0  # the last segment that was read, and where it ends
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StateError(
                f"--state {path}: {error.strerror}; choose a folder that can be written to"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StateError(
                f"--state {path}: another gc-server uses it; stop that one, or choose another"
            ) from None

        for left in path.glob(f".{CHECKPOINT}*.partial"):  # of a server that was killed meanwhile
            shutil.rmtree(left, ignore_errors=True)

    def job(self) -> Mapping[str, Any] | None:
        """What was written by `begin`; None in a new folder. Raises StateError."""
        try:
            found: Mapping[str, Any] = json.loads((self.path / JOB).read_text(encoding="utf-8"))
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StateError(f"--state {self.path}: {JOB} cannot be read: {error}") from None

    def begin(self, job: Mapping[str, Any]) -> None:
        """Say which job this is of. Raises StateError."""
        try:
            partial = self.path / f".{JOB}.partial"
            partial.write_text(json.dumps(job, indent=1), encoding="utf-8")
            saved.sync(partial)
            partial.replace(self.path / JOB)
            saved.sync(self.path)
        except OSError as error:
            raise StateError(f"--state {self.path}: {error.strerror}") from None

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole; None if there never was one. Raises StateError if none of
        several is."""
        versions = self._versions(CHECKPOINT)
        for version in reversed(versions):
            folder = self.path / _name(CHECKPOINT, version)
            try:
                tree, _ = saved.read_folder(folder)
            except DamagedError as error:
                log.error("a checkpoint cannot be used, and the one before is taken: %s", error)
                aside = folder.with_name(f"damaged-{folder.name}")  # and not one of those that are kept
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                continue
            return Found(version, tree)
        if versions:
            raise StateError(
                f"--state {self.path}: none of its {len(versions)} checkpoints is whole; begin the job anew "
                "in another folder"
            )
        return None

    def records(self, version: int) -> Iterator[tuple[Record, bool]]:
        """What has happened since the checkpoint of a version, each with whether it is of its own segment.

        Afterwards `journal` goes on where the last one ends.
        """
        segments = [each for each in self._versions(SEGMENT) if each >= version]
        self._last = self.segment_path(version), 0
        for place, each in enumerate(segments):
            path, end = self.segment_path(each), 0
            for record, end in read(path):  # noqa: B007 - where the last one ends
                yield record, each == version
            cut = path.stat().st_size - end
            self._last = path, end
            if cut and torn(path, end):
                log.warning("the last %d bytes of %s are half a record and are cut off", cut, path)
            elif cut:
                log.error("%s is damaged at byte %d: the %d bytes from there on are lost", path, end, cut)
            if cut and place < len(segments) - 1:
                lost = ", ".join(_name(SEGMENT, other, ".log") for other in segments[place + 1 :])
                log.error("%s is damaged: what came after that is lost, with %s", path, lost)
                for other in segments[place + 1 :]:
                    self.segment_path(other).unlink()
                return

    def segment_path(self, version: int) -> Path:
        """Of the segment that begins at a version."""
        return self.path / _name(SEGMENT, version, ".log")

    def journal(self) -> Journal:
        """The segment of which `records` came last, to go on."""
        path, end = self._last
        return Journal(path, syncs=self._syncs, at=end)

    def segment(self, version: int) -> Journal:
        """A new one."""
        journal = Journal(self.segment_path(version), syncs=self._syncs)
        saved.sync(self.path)
        return journal

    def write(self, version: int, tree: Any, about: Mapping[str, Any]) -> int:
        """Write a checkpoint, and forget what it makes superfluous. Returns its bytes. Raises OSError."""
        folder = self.path / _name(CHECKPOINT, version)
        if folder.exists():  # damaged, or the journal that led to it was
            saved.remove_folder(folder)
        written = saved.write_folder(folder, tree, about)
        for old in self._versions(CHECKPOINT)[:-KEPT]:
            saved.remove_folder(self.path / _name(CHECKPOINT, old))
        first = self._versions(CHECKPOINT)[0]
        for old in self._versions(SEGMENT):
            if old < first:
                self.segment_path(old).unlink(missing_ok=True)
        return written

    def _versions(self, prefix: str) -> list[int]:
        """Ascending."""
        names = [each.name.removesuffix(".log") for each in self.path.glob(f"{prefix}*")]
        return sorted(int(name.removeprefix(prefix)) for name in names if name.removeprefix(prefix).isdigit())

    def close(self) -> None:
        os.close(self._lock)


def _name(prefix: str, version: int, suffix: str = "") -> str:
    return f"{prefix}{version:010d}{suffix}"
