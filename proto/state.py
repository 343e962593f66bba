"""The values of state_dict entries on the wire: little-endian bytes, each in its own dtype, end to end.

They are in the order of the entries. In a transfer of both, frozen parameters precede buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from .entries import entry_bytes, has_value
from .messages import Entry, EntryKind
from .transfer import Bytes, TransferBuffer, encode_chunks

TRANSFER = 1  # transfer number of the chunks


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a copy of a tensor's bytes on the host: flat uint8, empty for a tensor of no elements."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).clone()
    return flat.view(torch.uint8).numpy()


def tensor_of(entry: Entry, data: Bytes) -> torch.Tensor:
    """Return an entry's value as a tensor in new memory; `data` has its bytes, as from `bytes_of`."""
    value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
    value.view(-1).view(torch.uint8).numpy()[:] = data
    return value


def encode_values(entries: Sequence[Entry], values: Mapping[str, Bytes]) -> Iterator[bytes]:
    """Return the chunk messages with the value of each entry.

    Args:
        entries: all entries in manifest order; only those of kind FROZEN are hashed.
        values: bytes of each value, by the entry's name.
    """
    return encode_chunks(TRANSFER, [values[entry.name] for entry in entries])


def frozen_digest(entries: Sequence[Entry], values: Mapping[str, Bytes]) -> bytes:
    """Return the SHA-256 over the values of the frozen parameters.

    Args:
        values: bytes of each value, by the entry's name.
    """
    digest = hashlib.sha256()
    for entry in entries:
        if entry.kind is EntryKind.FROZEN and has_value(entry):
            digest.update(values[entry.name].data)
    return digest.digest()


class EntryValues(TransferBuffer):
    """Buffer for the values of entries while their chunks arrive. The caller has checked the entries."""

    def __init__(self, entries: Sequence[Entry], *, worker: str) -> None:
        super().__init__(TRANSFER, sum(map(entry_bytes, entries)), worker=worker)
        self._entries = entries

    def finish(self) -> dict[str, Bytes]:
        """Return the bytes of each entry by its name, once all have arrived; they share memory."""
        assert self.complete
        found: dict[str, Bytes] = {}
        at = 0
        for entry in self._entries:
            found[entry.name] = self.data[at : at + entry_bytes(entry)]
            at += entry_bytes(entry)
        return found
