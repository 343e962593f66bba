"""State that a worker has and the server has not: residuals, velocities, the compressors' state, buffers, and
its owner's state. Written in a folder when the server writes down its own state, at the same
version, so that a job of which everything was stopped goes on to the same bits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.naming import file_name
from ...storage.backends import backend_at, below
from ...storage.checkpoint import FormatError
from ...storage.values import DamagedError

log = logging.getLogger("gradwire.worker")

KEPT = 2
FOLDER = "worker-"
PATIENCE_S = 60.0


class OwnState:
    """State of one worker in one job. A thread of its own writes folders, one after the other."""

    def __init__(self, where: Path | str, *, job: str, worker: str) -> None:
        """where: path or URL, in which a worker has a folder for each job. Raises BackendError for a URL that
        cannot be reached from here."""
        self._backend = backend_at(below(where, file_name(job, worker)))
        self._of = {"job": job, "worker": worker}
        self._writing: threading.Thread | None = None
        self._patience_s = PATIENCE_S

    def read(self, version: int) -> tuple[int, Any] | None:
        """Return the newest state that this worker wrote in this job, up to a version, with the version that
        it was written at; None if there is none.

        A worker that is started again alone finds the job at a later version than its own state. What is of a
        later version than the job's was lost with the server, and is not used.
        """
        try:
            versions = _versions(self._backend.folders(FOLDER))
        except OSError as error:
            log.error("this worker continues without its own state: %s", error)
            return None
        for found in reversed([each for each in versions if each <= version]):
            folder = _folder(found)
            try:
                tree, about = self._backend.read(folder)
            except (OSError, DamagedError, FormatError) as error:
                log.error("this worker's own state of version %d cannot be used: %s", found, error)
                continue
            if all(about.get(name) == value for name, value in self._of.items()):
                return found, tree
            log.warning(
                "%s/%s is of worker %s in job %s, and is left alone",
                *(self._backend.name, folder),
                about.get("worker"),
                about.get("job"),
            )
        return None

    def write(self, version: int, tree: Mapping[str, Any], done: Callable[[str], None]) -> None:
        """Write a tree on another thread, which calls `done` with the error, or ""."""
        if not self.close():
            done("the state before this one is still being written")
            return

        def write() -> None:
            try:
                folder, backend = _folder(version), self._backend
                backend.write(folder, tree, {**self._of, "version": version})
                self._forget(version)
            except Exception as error:
                log.error("the state of version %d could not be written down: %s", version, error)
                done(str(error) or repr(error))
            else:
                log.info("state of version %d written to %s/%s", version, backend.name, folder)
                done("")

        self._writing = threading.Thread(target=write, name="own state", daemon=True)
        self._writing.start()

    def _forget(self, version: int) -> None:
        """Remove all but the last up to a version: later ones are of a future that the server has lost."""
        kept = [each for each in _versions(self._backend.folders(FOLDER)) if each <= version][-KEPT:]
        for old in _versions(self._backend.left(FOLDER)):
            if old not in kept:
                self._backend.remove(_folder(old))

    def close(self) -> bool:
        """Wait once until nothing is being written, for at most a minute. Returns whether nothing is."""
        if self._writing is not None:
            self._writing.join(self._patience_s)
            self._patience_s = 0.0
            if self._writing.is_alive():
                return False
            self._writing, self._patience_s = None, PATIENCE_S
        return True


def _versions(folders: Sequence[str]) -> list[int]:
    names = [each.removeprefix(FOLDER) for each in folders]
    return sorted(int(name) for name in names if name.isdigit())


def _folder(version: int) -> str:
    return f"{FOLDER}{version:010d}"
