"""Saves and restores this worker's own state, at the versions at which the server saves its state.

The server requests the state of a version (`Save`). The worker writes it between two steps, once the replica
is at that version and every push has its outcome. Then residuals, buffers and the owner's state belong to
exactly these parameters. If the replica has passed the version already, the worker reports that, and writes
no state of that version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from .compression import Compression
from .connection import Connection
from .own_state import OwnState
from .pushes import Pushes
from .replica import Replica
from .state_exchange import StateExchange

log = logging.getLogger("gradwire.worker")


class Saving:
    """Saves and restores the state of one session: residuals, buffers and the owner's state.

    The owner is the training loop or script that drives the session.

    Attributes:
        by_owner: True if the owner calls `write` itself, so that `Session.next` does not.
        restored: version of the restored state, until the first work arrives; None without one.
    """

    def __init__(
        self,
        connection: Connection,
        replica: Replica,
        compression: Compression,
        buffers: StateExchange,
        pushes: Pushes,
        own: OwnState | None,
    ) -> None:
        """own: files of the state; None if the worker writes none."""
        self.by_owner = False
        self.restored: int | None = None
        self._connection, self._replica, self._compression = connection, replica, compression
        self._buffers, self._pushes, self._own = buffers, pushes, own
        self._owner: Callable[[], Mapping[str, Any]] = dict
        self._wanted: int | None = None  # version at which the server wants the state
        self._works = 0  # calls of `begin_work`
        self._written = (0, -1)  # `_works` and the version of the state written last; by the writing thread

    def keep(self, image: Callable[[], Mapping[str, Any]], *, by_owner: bool = False) -> None:
        """Register the function that returns the owner's state, which is written together with the residuals.
        image: returns all state on which the owner's next step depends, as values that `storage.values` can
        write; called between two steps.
        """
        self._owner, self.by_owner = image, by_owner

    def restore(self, version: int, tree: Mapping[str, Any], at: int) -> None:
        """Restore residuals and buffers from a state that was written; call it before `Session.begin`.

        Residuals and buffers belong to one version of the parameters. If the job is at another version, the
        residuals are dropped, a warning is logged, and the buffers will be the job's.
        """
        if version == at:
            self._compression.restore(tree["compression"])
            self._buffers.restore(tree["buffers"])
            self.restored = version
            log.info("continuing from this worker's own state at version %d", version)
        else:
            log.warning(
                "continuing from this worker's own state of version %d in a job at version %d: what its "
                "script, loader or local optimizer kept there is restored; the residual is dropped, and the "
                "buffers are the job's",
                *(version, at),
            )

    def begin_work(self, version: int) -> None:
        """Drop the restored residual and the carried changes if they belong to another version. Called when
        work at `version` begins, and before a state is written.
        """
        if self.restored not in (None, version):
            log.warning(
                "this worker's own state is of version %d, the job is at version %d: its residual is dropped",
                *(self.restored, version),
            )
            self._compression.drop()
        self.restored = None
        self._works += 1

    @property
    def kept(self) -> int | None:
        """Version of the state in this worker's files, if that state still holds the present residual; None
        if the residual has changed since, or no state was written."""
        works, version = self._written
        return version if self.restored is None and works == self._works and version >= 0 else self.restored

    def request(self, version: int) -> None:
        """Note that the server requests the state of a version; `write` writes that state once it is due."""
        if version == self.restored:  # no work has arrived since: the files hold this state
            self._connection.saved(version, "")
        else:
            self._wanted = version

    @property
    def due(self) -> bool:
        """True if `write` would act now: the requested version is reached, and every push has its outcome."""
        at = self._replica.version
        return self._wanted is not None and at is not None and at >= self._wanted and not self._pushes

    def write(self) -> None:
        """Write the requested state if it is due, and report to the server. Call it between two steps.

        1. No state is requested, or it is not due yet: do nothing.
        2. The replica has passed the requested version, or this worker writes no files: report only.
        3. Otherwise: write on another thread, and report when that has ended.
        """
        version, at = self._wanted, self._replica.version
        if version is None or at is None or not self.due:
            return
        self._wanted = None
        if self._own is None or at > version:
            past = f"the worker was at version {at} already" if self._own is not None else ""
            self._connection.saved(version, past)
            return
        self.begin_work(at)  # a residual of another version must not pass for one of this
        tree = {
            "owner": dict(self._owner()),
            "compression": self._compression.image(),
            "buffers": self._buffers.image(),
        }

        works = self._works

        def done(error: str) -> None:
            if not error:
                self._written = works, version
            self._connection.saved(version, error)

        self._own.write(version, tree, done)
