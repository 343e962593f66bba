"""The values of entries as they travel: little-endian bytes, each in its own dtype, end to end in the order
of the entries; frozen parameters first where both they and buffers do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from .entries import entry_bytes
from .messages import Entry, EntryKind
from .transfer import Bytes, TransferBuffer, encode_chunks

TRANSFER = 1  # number of their chunks


def encode_values(entries: Sequence[Entry], values: Mapping[str, Bytes]) -> Iterator[bytes]:
    """Chunks with the value of each entry. values: by name."""
    return encode_chunks(TRANSFER, [values[entry.name] for entry in entries])


def frozen_digest(entries: Sequence[Entry], values: Mapping[str, Bytes]) -> bytes:
    """SHA-256 over the values of the frozen parameters."""
    digest = hashlib.sha256()
    for entry in entries:
        if entry.kind is EntryKind.FROZEN:
            digest.update(values[entry.name].data)
    return digest.digest()


class EntryValues(TransferBuffer):
    """The values of entries while their bytes arrive. The entries have been checked."""

    def __init__(self, entries: Sequence[Entry], *, worker: str) -> None:
        super().__init__(TRANSFER, sum(map(entry_bytes, entries)), worker=worker)
        self._entries = entries

    def finish(self) -> dict[str, Bytes]:
        """The bytes of each, by name; they share memory."""
        assert self.complete
        found: dict[str, Bytes] = {}
        at = 0
        for entry in self._entries:
            found[entry.name] = self.data[at : at + entry_bytes(entry)]
            at += entry_bytes(entry)
        return found
