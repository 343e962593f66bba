"""A worker that only pushes, and a server for it, for the benchmarks of the wire."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..common.parts import Plan
from ..compressors import Payload, cut
from ..deploy.engine import LISTENING
from ..deploy.processes import Children
from ..proto import messages as m
from ..proto.manifest import Manifest
from ..proto.transfer import digest, part_header
from ..proto.wire import crc32c
from ..worker.session.connection import Connection
from ..worker.session.receiving import Received
from .jobs import wait_for


class Pusher:
    """A worker whose model is one tensor. It pushes the same payload again and again."""

    def __init__(self, address: str, payload: Payload) -> None:
        """Join the job and wait for the first assignment.

        Args:
            address: host:port of the server.
            payload: of the whole tensor.
        """
        self._connection = Connection(
            address,
            worker="pusher",
            incarnation=1,
            connect_s=30,
            give_up_s=0,
            sent=lambda size: None,
            received=lambda size: None,
        )
        self.close = self._connection.close
        tensor = m.Tensor(name="weight", shape=(payload.elements,), dtype="float32")
        manifest = Manifest((tensor,), 1 << 40)
        try:
            self._connection.join("benchmark", "none", ())
            self._connection.initialize(manifest, [np.zeros(payload.elements * 4, np.uint8)])
            self._connection.stepped(0)
            self._connection.ready(manifest)
            plan: Plan | None = None
            message: m.Assignment | None = None
            while plan is None or message is None:  # an assignment may arrive before the plan
                arrived = self._next()
                plan = arrived if isinstance(arrived, Plan) else plan
                message = arrived if isinstance(arrived, m.Assignment) else message
        except BaseException:
            self.close()
            raise
        self._plan, self._assignment, self._seq = plan, message, 1
        self._parts = [cut(payload, part.start, part.end) for part in plan.parts]
        self._versions = [0] * len(plan.parts)

    def push(self) -> None:
        """Push the payload, and wait until the server has accepted it."""
        checksums: dict[int, int] = {}
        for number, payloads in enumerate(self._parts):
            checksums[number] = crc32c(payload.data for payload in payloads)
            header = part_header(self._seq, self._assignment.id, self._plan.number, number, payloads)
            self._connection.queue_part(header, payloads)
        commit = m.Commit(
            seq=self._seq,
            assignment=self._assignment.id,
            base_version=self._assignment.version,
            samples=1,
            parts=len(checksums),
            digest=digest(checksums),
            plan=self._plan.number,
        )
        self._connection.queue_commit(commit)
        while not isinstance(message := self._next(), m.Outcome):
            self._take(message)
        assert message.decision is m.Decision.ACCEPTED, message
        self._connection.settle(self._seq)

    def settle(self) -> None:
        """Wait for the update of the round that the last push has closed, and for the next assignment."""
        version = self._assignment.version + 1
        while min(self._versions) < version or self._assignment.version < version:
            self._take(self._next())
        self._seq += 1
        self._connection.stepped(version)

    def _take(self, message: Any) -> None:
        """Record an update or an assignment; both may arrive before the outcome."""
        if isinstance(message, Received):
            self._versions[message.update.part] = message.update.version
        elif isinstance(message, m.Assignment):
            self._assignment = message

    def _next(self) -> Any:
        message = self._connection.next(60)
        assert message is not None, "no message arrived within a minute"
        return message


@contextlib.contextmanager
def start_server(*arguments: str, prefix: Sequence[str] = ()) -> Generator[int]:
    """Start a gc-server with an endless job and yield its port, in a with block; end it afterwards.

    Args:
        arguments: further arguments of gc-server.
        prefix: command to run it under.

    Raises:
        BenchError: if it does not start.
    """
    options = ("--port=0", "--http-port=-1", "--epochs=1000000", "--batch-size=1")
    with tempfile.TemporaryDirectory() as directory, Children(Path(directory)) as children:
        server = children.start("server", "gradwire.server.cli", [*options, *arguments], prefix)
        found = wait_for(lambda: server.logged(LISTENING), [server])
        yield int(found[1])
