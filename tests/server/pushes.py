"""A small shard and its pushes, for tests that care for little of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.compressors import DenseFormat, DensePayload, Payload
from gradwire.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Chunk, Tensor
from gradwire.proto.transfer import Assembly, encode_chunks
from gradwire.proto.wire import CHUNK_BYTES, decode_envelope
from gradwire.server.job.events import Apply, Contribution, PushKey
from gradwire.server.shard.mean import Share
from gradwire.server.shard.store import Broadcast, Float32, Store

MANIFEST = Manifest((Tensor(name="weight", shape=(3,), dtype="float32"),), 8)


def build(manifest: Manifest, values: Sequence[Float32]) -> Store:
    options = parse_optimizer("sgd")
    return Store(manifest, values, "none", lambda ps: Optimizer(options, ps, 1.0), keep_last=True)


def dense(*values: float) -> Payload:
    data = np.array(values, np.float32)
    return DensePayload(format=DenseFormat.FLOAT32, elements=data.size, data=data.view(np.uint8))


def assembly(*values: float) -> Assembly:
    empty = DensePayload(format=DenseFormat.FLOAT32, elements=3, data=np.empty(0, np.uint8))
    found = Assembly(0, [empty], chunk_bytes=CHUNK_BYTES, worker="w", names=["weight"])
    for message in encode_chunks(0, [np.array(values, np.float32).view(np.uint8)]):
        chunk = decode_envelope(message, "ServerMessage")
        assert isinstance(chunk, Chunk)
        found.add(chunk)
    return found


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
