"""Values that are lent to calls which send them: encoded while they are read, and copied only if the store
changes them before."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from ...proto.transfer import Bytes, Pack
from ...proto.wire import CHUNK_BYTES, crc32c, encode_chunk


class Lent:
    """The messages of one transfer, which may be read several times and on any thread.

    Attributes:
        start: first element, in flat order.
        elements: number of elements, float32.
        shares_memory: True until `keep`.
    """

    def __init__(
        self,
        transfer: int,
        values: Bytes,
        head: Sequence[bytes],
        start: int,
        beside: Sequence[Bytes] = (),
        pack: Pack | None = None,
    ) -> None:
        """
        Args:
            values: memory of the store; it calls `keep` before it changes the values.
            head: messages before the chunks.
            beside: bytes after the values, which do not change.
            pack: packs the chunks, as in `encode_chunks`."""
        self._beside = np.concatenate([*beside, np.empty(0, np.uint8)])
        self.start, self.elements = start, values.size // 4
        self._transfer, self._values, self._head = transfer, values, head
        self._lock, self._pack = threading.Lock(), pack
        self.shares_memory = True

    def keep(self) -> None:
        """Copy the values, because their memory is about to change."""
        with self._lock:
            self._values, self.shares_memory = np.array(self._values), False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._head
        at = checksum = 0
        size = 4 * self.elements
        while at < size + self._beside.size:
            after = at + CHUNK_BYTES
            with self._lock:
                rest = self._beside[max(0, at - size) : max(0, after - size)]
                pieces = [piece for piece in (self._values[at:after], rest) if piece.size]
                checksum = crc32c(pieces, checksum)
                packed = None if self._pack is None else self._pack(pieces)
                sent = pieces if packed is None else [packed]
                message = encode_chunk(self._transfer, at, sent, checksum, packed=packed is not None)
            yield message
            at = min(after, size + self._beside.size)
