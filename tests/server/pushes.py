"""Pushes as the shard gets them, for tests that care for little of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.compressors import Payload
from gradwire.server.job.events import Apply, Contribution, PushKey
from gradwire.server.shard.mean import Share
from gradwire.server.shard.store import Broadcast, Store


def pushed(samples: int, payloads: Sequence[Payload], **part: Any) -> Share:
    """part: fields of the contribution."""
    key = PushKey("w", 1, 1)
    return Contribution(key=key, rank=0, samples=samples, loss=0.0, **part), payloads


def apply(store: Store, *, version: int, shares: Sequence[Share], **order: Any) -> Broadcast:
    """order: other fields of the `Apply`."""
    contributions = tuple(part for part, _ in shares)
    fields: dict[str, Any] = {"rate_factor": 1.0, "opened_at": 0.0, **order}
    given = Apply(version=version, contributions=contributions, **fields)
    return store.apply(given, [payloads for _, payloads in shares])
