"""What a worker has that the server has not: residuals, velocities, what its compressors remember, buffers,
and what its owner adds. Written down in a folder when the server writes down its own state, at the same
version, so that a job of which everything was stopped goes on to the same bits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ... import saved
from ...places import place_at

log = logging.getLogger("gradwire.worker")

KEPT = 2
FOLDER = "worker-"
PATIENCE_S = 60.0


class OwnState:
    """Of one worker in one job. Folders are written on a thread of their own, one after the other."""

    def __init__(self, where: Path | str, *, job: str, worker: str) -> None:
        """where: path or URL, in which each worker has a folder of its own. Raises PlaceError for a URL that
        cannot be reached from here."""
        self._place = place_at(f"{where}/{quote(worker, safe='')}")
        self._of = {"job": job, "worker": worker}
        self._writing: threading.Thread | None = None
        self._patience_s = PATIENCE_S

    def read(self, version: int) -> Any | None:
        """What was written at a version; None if nothing was, or not by this worker in this job."""
        folder = _folder(version)
        try:
            if folder not in self._place.folders(FOLDER):
                return None
            tree, about = self._place.read(folder)
        except (OSError, saved.DamagedError, saved.FormatError) as error:
            log.error("this worker goes on without what it had written down: %s", error)
            return None
        if any(about.get(name) != value for name, value in self._of.items()):
            log.warning(
                "%s/%s is of worker %s in job %s, and is left alone",
                *(self._place.name, folder),
                about.get("worker"),
                about.get("job"),
            )
            return None
        return tree

    def write(self, version: int, tree: Mapping[str, Any], told: Callable[[str], None]) -> None:
        """Write a tree down meanwhile. told: is given why it could not be, or "", on another thread."""
        if not self.close():
            told("the state before this one is still being written")
            return

        def write() -> None:
            try:
                folder, place = _folder(version), self._place
                place.write(folder, tree, {**self._of, "version": version})
                self._forget(version)
            except Exception as error:
                log.error("the state of version %d could not be written down: %s", version, error)
                told(str(error) or repr(error))
            else:
                log.info("state of version %d written to %s/%s", version, place.name, folder)
                told("")

        self._writing = threading.Thread(target=write, name="own state", daemon=True)
        self._writing.start()

    def _forget(self, version: int) -> None:
        """All but the last up to a version: what is of later ones is of another job, or of a future that the
        server has lost."""
        kept = [each for each in _versions(self._place.folders(FOLDER)) if each <= version][-KEPT:]
        for old in _versions(self._place.left(FOLDER)):
            if old not in kept:
                self._place.remove(_folder(old))

    def close(self) -> bool:
        """Wait for what is being written, once, unless that hangs. Returns whether nothing is."""
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
