"""Fetch: sends the parameters to any client that may read them.

The shard encodes them once for each version, for all clients, and at most `AT_ONCE` clients are served at a
time. A client that reads nothing for `STALLED_S` is disconnected. No client can therefore delay the others
for long, or keep a copy of the model in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Any

from ...proto.manifest import Manifest
from ...proto.messages import FetchHeader, OptimizerHeader
from ...proto.refusal import Reason, refused
from ...proto.wire import CHUNK_BYTES
from ..shard.shard import Shard

AT_ONCE = 8  # most clients at a time; each may need a copy of another version
STALLED_S = 20.0  # longest wait for a client to read one chunk


class Fetches:
    """Sends large replies of one job, at most `AT_ONCE` at a time. `Service` creates it."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._free = asyncio.Semaphore(AT_ONCE)

    async def send(self, shard: Shard, manifest: Manifest, write: Callable[[Any], Awaitable[None]]) -> None:
        """Write the parameters to a client: the header, then all chunks. Raises Refused (CHUNK) if the client
        has read nothing for `STALLED_S`."""
        async with self._free:
            values = await shard.values()
            header = FetchHeader(
                job=self._job,
                manifest=manifest.to_message(),
                version=values.version,
                chunk_bytes=CHUNK_BYTES,
            )
            await self._write(chain((header,), values.chunks), write)

    async def send_moments(self, shard: Shard, write: Callable[[Any], Awaitable[None]]) -> int:
        """Write the optimizer's state to a client, the header and all chunks, and return the bytes of the
        chunks. Raises Refused (CHUNK) if the client has read nothing for `STALLED_S`."""
        async with self._free:
            found = await shard.values(moments=True)
            header = OptimizerHeader(version=found.version, moments=tuple(found.moments))
            return await self._write(chain((header,), found.chunks), write)

    async def write(self, messages: Iterable[Any], write: Callable[[Any], Awaitable[None]]) -> None:
        """Write messages to a client, within the limit of `AT_ONCE` clients. Raises Refused (CHUNK) if the
        client has read nothing for `STALLED_S`."""
        async with self._free:
            await self._write(messages, write)

    @staticmethod
    async def _write(messages: Iterable[Any], write: Callable[[Any], Awaitable[None]]) -> int:
        """Write messages one by one, and return the bytes of the encoded ones. Raises Refused if the client
        has read nothing for `STALLED_S`."""
        sent = 0
        for message in messages:
            sent += len(message) if isinstance(message, bytes) else 0
            try:
                await asyncio.wait_for(write(message), STALLED_S)
            except TimeoutError:
                field, limit = "fetch of the parameters", f"a chunk read every {STALLED_S:g} s"
                raise refused(Reason.CHUNK, field=field, limit=limit, value="none") from None
        return sent
