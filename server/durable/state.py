"""The folder of --state: checkpoints, journal, and which job they are of.

    job.json                  id and options of the job
    checkpoint-0000000042/    all of it at a version (`saved`)
    journal-0000000042.log    what has happened since (`journal`)
    lock                      held by the server that uses the folder
    best-0000000030/          the best version that was evaluated: model and optimizer, to begin a job with

At a URL (`places`) there is no lock but `owner`, the server that came last, and no journal.

The last `KEPT` checkpoints stay, with all segments since the first of them: if the newest one is damaged,
the one before and its journal lead to the same state. So the folder holds no more than `KEPT` + 1
checkpoints and as many segments, each as large as `segment_limit` says, and what comes until the next
version.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import saved
from ...places import PlaceError, is_url, place_at
from ...saved import DamagedError, FormatError
from .journal import Journal, Record, read, torn

log = logging.getLogger("gradwire.server")

KEPT = 2
JOB = "job.json"
LEAST_SEGMENT_BYTES = 256 << 20
CHECKPOINT, SEGMENT, BEST = "checkpoint-", "journal-", "best-"


class StateError(Exception):
    """The folder cannot be used: the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that is whole."""

    version: int
    tree: Any


def segment_limit(checkpoint_bytes: int) -> int:
    """Bytes of a segment after which a checkpoint is due, whatever the time."""
    return max(LEAST_SEGMENT_BYTES, 8 * checkpoint_bytes)


def job_at(where: Path | str) -> Mapping[str, Any] | None:
    """What was written by `StateFolder.begin`; None where there is no job. Raises StateError."""
    try:
        found: Mapping[str, Any] = json.loads(place_at(where).text(JOB))
        return found
    except PlaceError as error:
        raise StateError(f"--state {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"--state {where}: {JOB} cannot be read: {error}") from None


class StateFolder:
    """Belongs to one process. Raises StateError where another one has it, or it cannot be written to."""

    def __init__(self, where: Path | str, *, syncs: bool) -> None:
        """where: path or URL. With a URL nothing may be asked for that has to do with a journal."""
        self.path = Path(where)
        self._place = place_at(where)
        self._syncs = syncs
        self._last = self.segment_path(0), 0  # the last segment that was read, and where it ends
        try:
            self._place.hold()
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
        return self._place.name

    def begin(self, job: Mapping[str, Any]) -> None:
        """Say which job this is of. Raises StateError."""
        try:
            self._place.put_text(JOB, json.dumps(job, indent=1))
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
                tree, _ = self._place.read(folder)
            except DamagedError as error:
                log.error("a checkpoint cannot be used, and the one before is taken: %s", error)
                damaged.append(folder)
                continue
            for each in damaged:  # and not among those that are kept
                self._place.set_aside(each)
            return Found(version, tree)
        # A first one that was never whole is nothing to go on from, and nothing lost.
        if versions or any(self._segments()):
            raise StateError(
                f"--state {self.name}: none of its {len(versions)} checkpoints is whole; begin the job anew "
                "in another folder"
            )
        return None

    def records(self, version: int) -> Iterator[tuple[Record, bool]]:
        """What has happened since the checkpoint of a version, each with whether it is of its own segment.

        Afterwards `journal` goes on where the last one ends.
        """
        segments = [each for each in self._segments() if each >= version]
        if segments and segments[0] != version:
            gone, there = (self.segment_path(each).name for each in (version, segments[0]))
            raise StateError(
                f"--state {self.name}: {gone} is gone, without which {there} leads nowhere; put it back, or "
                f"move {there} away to go on from the checkpoint alone"
            )
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
        written = self._place.write(_name(CHECKPOINT, version), tree, about)
        kept = self._checkpoints()[-KEPT:]
        for old in _versions(CHECKPOINT, self._place.left(CHECKPOINT)):
            if old not in kept:
                self._place.remove(_name(CHECKPOINT, old))
        for old in self._segments():
            if old < kept[0]:
                self.segment_path(old).unlink(missing_ok=True)
        return written

    def write_best(self, version: int, tree: Any, about: Mapping[str, Any]) -> None:
        """Write the best version, instead of the one before. Raises OSError."""
        name = _name(BEST, version)
        if name not in self._place.folders(BEST):
            self._place.write(name, tree, about)
        for old in _versions(BEST, self._place.left(BEST)):
            if old != version:
                self._place.remove(_name(BEST, old))

    def _checkpoints(self) -> list[int]:
        """Their versions, ascending."""
        return _versions(CHECKPOINT, self._place.folders(CHECKPOINT))

    def _segments(self) -> list[int]:
        if is_url(self._place.name):
            return []
        return _versions(SEGMENT, [each.name.removesuffix(".log") for each in self.path.glob(f"{SEGMENT}*")])

    def close(self) -> None:
        self._place.release()


def _versions(prefix: str, names: Sequence[str]) -> list[int]:
    found = [name.removeprefix(prefix) for name in names]
    return sorted(int(name) for name in found if name.isdigit())


def _name(prefix: str, version: int, suffix: str = "") -> str:
    return f"{prefix}{version:010d}{suffix}"
