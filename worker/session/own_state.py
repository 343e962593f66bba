"""Files of the state that only a worker has: residuals, compressors' states, buffers and its owner's state.

The state is written into a folder at the same version as the server's own state. A job whose server and
workers were all stopped therefore continues to the same bits.
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

KEPT = 2  # number of folders, the newest, that are kept
FOLDER = "worker-"  # prefix of a folder's name; the version follows
PATIENCE_S = 60.0  # seconds to wait for a write


class OwnState:
    """Reads the saved states of one worker in one job, and writes them on another thread, a folder each."""

    def __init__(self, where: Path | str, *, job: str, worker: str) -> None:
        """Raises BackendError if the URL cannot be reached. where: path or URL below which each worker has a
        folder for each job."""
        self._backend = backend_at(below(where, file_name(job, worker)))
        self._of = {"job": job, "worker": worker}
        self._writing: threading.Thread | None = None
        self._patience_s = PATIENCE_S

    def read(self, version: int) -> tuple[int, Any] | None:
        """Read the newest state that this worker saved in this job, up to a version.

        A worker that is restarted alone finds the job at a later version than its own state. States of later
        versions than the job's belong to versions that the server has lost, and are not used. Returns the
        state's version, and the state as it was given to `write`; None if there is none.
        """
        try:
            versions = _versions(self._backend.folders(FOLDER))
        except OSError as error:
            log.error("cannot list this worker's own states, continuing without: %s", error)
            return None
        for found in reversed([each for each in versions if each <= version]):
            folder = _folder(found)
            try:
                tree, about = self._backend.read(folder)
            except (OSError, DamagedError, FormatError) as error:
                log.error("cannot read this worker's own state of version %d: %s", found, error)
                continue
            if all(about.get(name) == value for name, value in self._of.items()):
                return found, tree
            log.warning(
                "%s/%s belongs to worker %s in job %s: not used",
                *(self._backend.name, folder),
                about.get("worker"),
                about.get("job"),
            )
        return None

    def write(self, version: int, tree: Mapping[str, Any], done: Callable[[str], None]) -> None:
        """Write a state on another thread, and remove older ones.

        Args:
            tree: state, as values that `storage.values` can write.
            done: called at the end with the error's text, or "" after success; usually on the other thread.
        """
        if not self.close():
            done("the previous state is still being written")
            return

        def write() -> None:
            try:
                folder, backend = _folder(version), self._backend
                backend.write(folder, tree, {**self._of, "version": version})
                self._forget(version)
            except Exception as error:
                log.error("cannot write this worker's own state of version %d: %s", version, error)
                done(str(error) or repr(error))
            else:
                log.info("own state of version %d written to %s/%s", version, backend.name, folder)
                done("")

        self._writing = threading.Thread(target=write, name="own state", daemon=True)
        self._writing.start()

    def _forget(self, version: int) -> None:
        """Remove all folders but the newest `KEPT` up to a version: the server has lost later versions."""
        kept = [each for each in _versions(self._backend.folders(FOLDER)) if each <= version][-KEPT:]
        for old in _versions(self._backend.left(FOLDER)):
            if old not in kept:
                self._backend.remove(_folder(old))

    def close(self) -> bool:
        """Wait until no state is being written, for at most a minute.

        After a wait in vain, further calls do not wait until the write has ended. Returns True if no state is
        being written.
        """
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
