"""A worker's part in the buffers of its job: its own go up with some pushes; those of the job come down when
it joins, when it evaluates, and when the server says so."""

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
    """Takes part in what the server collects. `how` is the job's `--buffers`."""

    def __init__(self, connection: Connection, replica: Replica, how: str) -> None:
        self._connection = connection
        self._replica = replica
        self._how = how
        self._frozen = b""  # SHA-256 of this worker's frozen parameters
        self._begun = False

    def image(self) -> dict[str, Bytes]:
        """This worker's buffers, by name."""
        return self._replica.state.values(frozen=False)

    def restore(self, image: Mapping[str, Bytes]) -> None:
        """Go on with buffers that this worker had."""
        self._replica.state.put(image)
        self._begun = True

    def begun(self) -> None:
        """This worker's initial state is the job's."""
        self._begun = True

    def before(self, assignment: m.Assignment) -> None:
        """Work is about to begin: take over the job's state, the first time, and when the server says so."""
        if self._replica.state.has_values and (not self._begun or assignment.take_buffers):
            self._take()
        self._begun = True

    def with_push(self, seq: int, collection: int) -> None:
        """A push is about to be committed. collection: that its assignment asks for."""
        if collection:
            self._put(seq=seq, collection=collection)

    @contextmanager
    def evaluated(self, epoch: int) -> Generator[None]:
        """In it the model is the one that the server saves, with the buffers of the job."""
        state = self._replica.state
        if not state.has_buffers:
            yield
        elif self._how == "local":
            self._put(epoch=epoch)
            yield
        else:
            own = state.values(frozen=False)
            self._take(epoch)
            try:
                yield
            finally:
                state.put(own)

    def _put(self, **of: int) -> None:
        state = self._replica.state
        entries = of_kind(state.entries, frozen=False)
        self._connection.put_state(entries, state.values(frozen=False), **of)

    def _take(self, epoch: int = 0) -> None:
        state = self._replica.state
        values = self._connection.get_state(self._replica.manifest, epoch, self._digest())
        frozen = [
            each.name for each in of_kind(state.entries, frozen=True) if each.kind is m.EntryKind.FROZEN
        ]
        others = [name for name in frozen if name in values]
        if others:
            log.warning(
                "frozen parameters differ from those of the job and are set to them: %s",
                ", ".join(map(repr, others[:3])) + (", …" if len(others) > 3 else ""),
            )
            self._frozen = b""
        state.put(values)

    def _digest(self) -> bytes:
        """Return the SHA-256 of the frozen parameters, computed once."""
        if not self._frozen:
            self._frozen = frozen_digest(self._replica.state.entries, self._replica.state.values(frozen=True))
        return self._frozen
