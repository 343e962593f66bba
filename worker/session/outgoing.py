"""What a worker says on its stream, and says again when the stream is a new one. No I/O.

A push is kept until it is settled, so that a new stream, or a request after damage, gets the same bytes. A
coded packet or a snapshot is not kept: if the stream breaks, the server asks for it anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.transfer import encode_chunks
from ...proto.wire import encode_worker


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A header and the bytes that follow it. Nobody may write to them until they are sent; those of a push
    stay as they are until the server has decided on it.

    They are framed while they are sent, chunk by chunk: that overlaps with the network, and keeps no second
    copy.
    """

    header: m.Push | m.Packet | m.Snapshot
    number: int
    data: Sequence[npt.NDArray[np.uint8]]
    chunk_bytes: int

    def messages(self) -> Iterator[bytes]:
        yield encode_worker(self.header)
        yield from encode_chunks(self.number, self.data, self.chunk_bytes)


class Outgoing:
    """The queue of the present stream, and what outlives it. Belongs to the event loop.

    Attributes:
        manifest: None until work may come.
        version: that the replica has, or has when everything that came is applied; None before the first.
        assigned: id of the last assignment that came.
        exchange: that it is about; packets of earlier ones are not sent any more.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.version: int | None = None
        self.assigned = 0
        self.exchange = 0
        self._pushes: dict[int, Transfer] = {}  # that are not settled, in order of seq
        self._evaluation: m.Evaluation | None = None
        self._queue: asyncio.Queue[bytes | Transfer] | None = None
        self._writing = False

    @property
    def idle(self) -> bool:
        """Whether everything has been written, or there is no stream to write to."""
        return self._queue is None or (self._queue.empty() and not self._writing)

    def begin(self, hello: m.Hello) -> None:
        """A stream has been opened."""
        self._queue, self._writing = asyncio.Queue(), False
        self.say(hello)
        if self.manifest is not None:
            self._say_ready(self.manifest)
        if self._evaluation is not None:
            self.say(self._evaluation)
        self.resend()

    def end(self) -> None:
        """The stream is gone. What is said meanwhile is lost, unless it is one of those that are kept."""
        self._queue = None

    def say(self, message: m.WorkerMessage) -> bool:
        """Returns whether there is a stream to say it on."""
        return self._put(encode_worker(message))

    def beat(self, activity: str) -> None:
        """A sign of life, unless the server hears of this worker anyway."""
        if self._queue is not None and self._queue.empty():
            self.say(m.Heartbeat(activity=activity))

    def ready(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._say_ready(manifest)

    def report(self, evaluation: m.Evaluation) -> None:
        self._evaluation = evaluation
        self.say(evaluation)

    def send(self, transfer: Transfer) -> None:
        """Once, on this stream."""
        self._put(transfer)

    def push(self, transfer: Transfer) -> None:
        """Now, and again until it is settled."""
        self._pushes[transfer.number] = transfer
        self._put(transfer)

    def settle(self, seq: int) -> None:
        self._pushes.pop(seq, None)

    def resend(self) -> None:
        """Every push that is not settled, in order."""
        for transfer in self._pushes.values():
            self._put(transfer)

    async def next(self) -> Iterable[bytes]:
        """The messages of what goes out next."""
        assert self._queue is not None
        self._writing = False
        while True:
            item = await self._queue.get()
            if isinstance(item, bytes):
                self._writing = True
                return (item,)
            if not (isinstance(item.header, m.Packet) and item.header.exchange < self.exchange):
                self._writing = True
                return item.messages()

    def _say_ready(self, manifest: Manifest) -> None:
        self.say(m.Ready(fingerprint=manifest.fingerprint, version=self.version, assigned=self.assigned))

    def _put(self, item: bytes | Transfer) -> bool:
        if self._queue is not None:
            self._queue.put_nowait(item)
        return self._queue is not None
