"""A worker that only pushes, and a server for it: what the benchmarks of the wire share."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..compressors import Payload
from ..deploy.processes import Children
from ..proto import messages as m
from ..proto.manifest import Manifest
from ..proto.transfer import tensor_header
from ..worker.session.connection import Connection
from ..worker.session.receiving import Received
from .arguments import BenchError


class Pusher:
    """A worker whose model is one tensor; it pushes the same payload again and again."""

    def __init__(self, address: str, payload: Payload) -> None:
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
        self._payload = payload
        self._seq = 0
        tensor = m.Tensor(name="weight", shape=(payload.elements,), dtype="float32")
        manifest = Manifest((tensor,), 1 << 40)
        try:
            self._connection.join("benchmark", "none", ())
            self._connection.initialize(manifest, [np.zeros(payload.elements * 4, np.uint8)])
            self._connection.ready(manifest)
            self._next_assignment()
        except BaseException:
            self.close()
            raise

    def push(self) -> None:
        """Push, and wait until the server's answer is here."""
        header = m.Push(
            seq=self._seq,
            assignment=self._assignment.id,
            base_version=self._assignment.version,
            samples=1,
            tensors=(tensor_header(0, self._payload),),
        )
        self._connection.push(header, [self._payload])
        outcome = self._wait_for(m.Outcome)
        assert outcome.decision is m.Decision.ACCEPTED, outcome

    def settle(self) -> None:
        """Wait for the round that the push has closed."""
        self._wait_for(Received)
        self._next_assignment()

    def _next_assignment(self) -> None:
        self._assignment: m.Assignment = self._wait_for(m.Assignment)
        self._seq += 1

    def _wait_for(self, kind: type[Any]) -> Any:
        while True:
            message = self._connection.next(60)
            assert message is not None, f"no {kind.__name__} within a minute"
            if isinstance(message, kind):
                return message


@contextlib.contextmanager
def start_server(*arguments: str, prefix: Sequence[str] = ()) -> Generator[int]:
    """The port of a gc-server that lives as long as the context, with a job that does not end.

    prefix: a command to run it under. Raises BenchError if it does not start.
    """
    options = ("--port=0", "--http-port=-1", "--epochs=1000000", "--batch-size=1")
    with tempfile.TemporaryDirectory() as directory, Children(Path(directory)) as children:
        server = children.start("server", "gradwire.server.cli", [*options, *arguments], prefix)
        while not (found := re.search(r"listening on \S+:(\d+)\b", server.log.read_text())):
            if server.code is not None:
                raise BenchError(f"gc-server did not start: {server.last_lines()}")
            time.sleep(0.02)
        yield int(found.group(1))
