"""When this worker's own state is written, and what it continues from.

The server asks for the state when it writes its own, at a version (`Save`). It is written between two steps,
once the replica is at that version and every push has its outcome: then residuals, buffers and the owner's
state belong to exactly these parameters. If the replica has passed the version by then, the server hears so,
and this worker has no state of that version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from .compression import Compression
from .connection import Connection
from .outcomes import OpenPushes
from .own_state import OwnState
from .replica import Replica
from .state_exchange import StateExchange

log = logging.getLogger("gradwire.worker")


class Saving:
    """The state of one session.

    Attributes:
        by_owner: whether the owner calls `write` itself, so that `Session.next` does not.
        restored: version of the state that the session continues from, until it has work; None for none.
    """

    def __init__(
        self,
        connection: Connection,
        replica: Replica,
        compression: Compression,
        buffers: StateExchange,
        pushes: OpenPushes,
        own: OwnState | None,
    ) -> None:
        """own: where the state is written; None if nowhere."""
        self.by_owner = False
        self.restored: int | None = None
        self._connection, self._replica, self._compression = connection, replica, compression
        self._buffers, self._pushes, self._own = buffers, pushes, own
        self._owner: Callable[[], Mapping[str, Any]] = dict
        self._wanted: int | None = None  # version at which the server wants the state

    def keep(self, image: Callable[[], Mapping[str, Any]], *, by_owner: bool = False) -> None:
        """Write the owner's state, too.

        Args:
            image: returns all that the owner's next step depends on, as `storage.values` takes it; called
                between two steps.
            by_owner: see the class.
        """
        self._owner, self.by_owner = image, by_owner

    def restore(self, version: int, tree: Mapping[str, Any], at: int) -> None:
        """Before `Session.begin`: continue from what was written at a version.

        Args:
            at: the job's version. Residuals and buffers belong to one version of the parameters: if the job's
                is a later one, the residuals are dropped, and the buffers are the job's.
        """
        if version == at:
            self._compression.restore(tree["compression"])
            self._buffers.restore(tree["buffers"])
            self.restored = version
            log.info("continuing from this worker's own state at version %d", version)
        else:
            log.warning(
                "continuing from this worker's own state of version %d in a job at version %d: job.state and "
                "the loader are as they were then; the residual is dropped, and the buffers are the job's",
                *(version, at),
            )

    def begin_work(self, version: int) -> None:
        """The first work has come, at a version: at another one than the restored, the residual is
        dropped."""
        if self.restored not in (None, version):
            log.warning(
                "this worker's state is of version %d, and the job has got to %d: its residual is dropped",
                *(self.restored, version),
            )
            self._compression.ledger.clear()
        self.restored = None

    def ask(self, version: int) -> None:
        """Called when the server wants the state of a version."""
        if version == self.restored:  # nothing has happened since
            self._connection.saved(version, "")
        else:
            self._wanted = version

    @property
    def due(self) -> bool:
        """Whether the server wants the state, and this is the version."""
        at = self._replica.version
        return self._wanted is not None and at is not None and at >= self._wanted and not self._pushes

    def write(self) -> None:
        """Write the state if that is due. Call it between two steps."""
        version, at = self._wanted, self._replica.version
        if version is None or at is None or not self.due:
            return
        self._wanted = None
        if self._own is None or at > version:
            past = f"it had got to version {at} before" if self._own is not None else ""
            self._connection.saved(version, past)
            return
        tree = {
            "owner": dict(self._owner()),
            "compression": self._compression.image(),
            "buffers": self._buffers.image(),
        }
        connection = self._connection
        self._own.write(version, tree, lambda error: connection.saved(version, error))
