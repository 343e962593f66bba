"""What a worker has that the server has not: residuals, velocities, what its compressors remember, buffers,
and what its owner adds. Written down in a folder when the server writes down its own state, at the same
version, so that a job of which everything was stopped goes on to the same bits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ... import saved

log = logging.getLogger("gradwire.worker")

KEPT = 2
FOLDER = "worker-"


class OwnState:
    """Of one worker in one job. Folders are written on a thread of their own, one after the other."""

    def __init__(self, path: Path, *, job: str, worker: str) -> None:
        # Each worker has a folder of its own: those of one machine may be told the same place.
        self._path, self._of = path / quote(worker, safe=""), {"job": job, "worker": worker}
        self._writing: threading.Thread | None = None

    def read(self, version: int) -> Any | None:
        """What was written at a version; None if nothing was, or not by this worker in this job."""
        folder = self._folder(version)
        if not folder.exists():
            return None
        try:
            tree, about = saved.read_folder(folder)
        except saved.DamagedError as error:
            log.error("this worker goes on without what it had written down: %s", error)
            return None
        if any(about.get(name) != value for name, value in self._of.items()):
            log.warning(
                "%s is of worker %s in job %s, and is left alone",
                folder,
                about.get("worker"),
                about.get("job"),
            )
            return None
        return tree

    def write(self, version: int, tree: Mapping[str, Any], told: Callable[[str], None]) -> None:
        """Write a tree down meanwhile. told: is given why it could not be, or "", on another thread."""
        self.close()

        def write() -> None:
            try:
                folder = self._folder(version)
                if folder.exists():
                    saved.remove_folder(folder)
                saved.write_folder(folder, tree, {**self._of, "version": version})
                for old in self._versions()[:-KEPT]:
                    saved.remove_folder(self._folder(old))
            except Exception as error:
                log.error("the state of version %d could not be written down: %s", version, error)
                told(str(error) or repr(error))
            else:
                log.info("state of version %d written to %s", version, folder)
                told("")

        self._writing = threading.Thread(target=write, name="own state", daemon=True)
        self._writing.start()

    def _folder(self, version: int) -> Path:
        return self._path / f"{FOLDER}{version:010d}"

    def _versions(self) -> list[int]:
        names = [each.name.removeprefix(FOLDER) for each in self._path.glob(f"{FOLDER}*")]
        return sorted(int(name) for name in names if name.isdigit())

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
