"""Fetch: the parameters for anyone who asks.

They are encoded once per version, however many ask for it, and sent to a few at a time. A client that takes
nothing for `STALLED_S` is cut off: none can keep the others waiting, or a copy of the model, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from ..proto.messages import FetchHeader
from ..proto.refusal import Reason, Refused, refusal
from ..proto.transfer import encode_chunks
from ..proto.wire import CHUNK_BYTES
from .shard.store import Store

AT_ONCE = 8  # clients; each may hold a copy of another version
STALLED_S = 20.0  # for one chunk to be taken


class _Encoded:
    """One version, kept for as long as somebody is being sent it."""

    def __init__(self, header: FetchHeader, chunks: Sequence[bytes]) -> None:
        self.header, self.chunks = header, chunks


class Fetches:
    """Sends the parameters of one job."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._free = asyncio.Semaphore(AT_ONCE)
        self._encoded = WeakValueDictionary[int, _Encoded]()

    async def send(
        self,
        store: Store,
        on_reducer: Callable[[Callable[[Store], _Encoded], Store], Awaitable[_Encoded]],
        write: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Write the header and all chunks.

        Raises:
            Refused: the client has taken nothing for `STALLED_S`.
        """
        async with self._free:
            encoded = await on_reducer(self._encode, store)
            for message in (encoded.header, *encoded.chunks):
                try:
                    await asyncio.wait_for(write(message), STALLED_S)
                except TimeoutError:
                    limit, got = f"a chunk read every {STALLED_S:g} s", "none"
                    raise Refused(
                        refusal(Reason.CHUNK, field="fetch of the parameters", limit=limit, value=got)
                    ) from None

    def _encode(self, store: Store) -> _Encoded:
        """On the reducer thread, which has the store to itself."""
        encoded = self._encoded.get(store.version)
        if encoded is None:
            header = FetchHeader(
                job=self._job,
                manifest=store.manifest.to_message(),
                version=store.version,
                chunk_bytes=CHUNK_BYTES,
            )
            encoded = _Encoded(header, list(encode_chunks(store.version, store.values())))
            self._encoded[store.version] = encoded
        return encoded
