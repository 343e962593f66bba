"""Exchange of the model's buffers between a worker and the server.

The worker uploads its buffers with some pushes. It downloads the job's when it joins, when it evaluates, and
when an assignment requires it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from ...proto import messages as m
from ...proto.entries import of_kind
from ...proto.state import frozen_digest
from ...proto.transfer import Bytes
from .connection import Connection
from .replica import Replica

log = logging.getLogger("gradwire.worker")


class StateExchange:
    """Uploads and downloads buffers and frozen parameters for one session."""

    def __init__(self, connection: Connection, replica: Replica, how: str) -> None:
        """how: the job's `--buffers`: "local" if each worker keeps its own buffers."""
        self._connection = connection
        self._replica = replica
        self._how = how
        self._frozen = b""  # SHA-256 of this worker's frozen parameters; empty if it is not computed
        self._current = False  # whether the model has the job's buffers, or restored ones

    def image(self) -> dict[str, Bytes]:
        """Return the bytes of this worker's buffers, by name, for `restore`."""
        return self._replica.state.values(frozen=False)

    def restore(self, image: Mapping[str, Bytes]) -> None:
        """Overwrite the model's buffers with those that `image` returned, and do not download the job's."""
        self._replica.state.put(image)
        self._current = True

    def mark_current(self) -> None:
        """Note that the job begins with this worker's buffers, so that it need not download them."""
        self._current = True

    def before_work(self, assignment: m.Assignment) -> None:
        """Download the job's buffers and frozen parameters before the first work, or if `assignment` asks."""
        if self._replica.state.has_values and (not self._current or assignment.take_buffers):
            self._download()
        self._current = True

    def before_commit(self, seq: int, collection: int) -> None:
        """Upload the model's buffers, such as BatchNorm's statistics, with a push; do nothing if `collection`
        is 0. collection: number of the server's request for buffers, from the assignment; 0 for no request.
        """
        if collection:
            self._upload(seq=seq, collection=collection)

    @contextmanager
    def evaluated(self, epoch: int) -> Generator[None]:
        """Give the model the job's buffers for the block, and restore this worker's own afterwards.

        With `--buffers local`, upload this worker's buffers instead: they become the evaluated ones.
        """
        state = self._replica.state
        state.warn_of_new()
        if not state.has_buffers:
            yield
        elif self._how == "local":
            self._upload(epoch=epoch)
            yield
        else:
            own = state.values(frozen=False)
            self._download(epoch)
            try:
                yield
            finally:
                state.put(own)

    def _upload(self, **of: int) -> None:
        """Upload this worker's buffers. of: fields of the header, which name the push or the evaluation."""
        state = self._replica.state
        entries = of_kind(state.entries, frozen=False)
        self._connection.put_state(entries, state.values(frozen=False), **of)

    def _download(self, epoch: int = 0) -> None:
        """Overwrite the model's buffers, and frozen parameters that differ, with the job's.

        Warns of frozen parameters that differ. epoch: number of the evaluation; 0 for the newest buffers.
        """
        state = self._replica.state
        values = self._connection.get_state(self._replica.manifest, epoch, self._digest())
        frozen = [
            each.name for each in of_kind(state.entries, frozen=True) if each.kind is m.EntryKind.FROZEN
        ]
        others = [name for name in frozen if name in values]
        if others:
            log.warning(
                "frozen parameters differ from the job's, and are overwritten with the job's: %s",
                ", ".join(map(repr, others[:3])) + (", …" if len(others) > 3 else ""),
            )
            self._frozen = b""
        state.put(values)

    def _digest(self) -> bytes:
        """Return the SHA-256 of the frozen parameters; it is computed only once."""
        if not self._frozen:
            self._frozen = frozen_digest(self._replica.state.entries, self._replica.state.values(frozen=True))
        return self._frozen
