"""A small shard and its pushes, for tests that care for little of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradwire.common.parts import Part, Plan, Unit
from gradwire.compressors import DenseFormat, DensePayload, Payload
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Chunk, Tensor, Update
from gradwire.proto.transfer import Assembly, encode_chunks
from gradwire.proto.updates import NOTHING_SHARED, SharedSizes, update_assembly
from gradwire.proto.wire import CHUNK_BYTES, decode_envelope
from gradwire.server.job.events import Apply, Contribution, PushKey
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.mean import Payloads, Push
from gradwire.server.shard.pending import StepRules
from gradwire.server.shard.store import Float32
from gradwire.server.streams.push_ledger import PushLedger
from gradwire.server.streams.updates import Broadcast
from gradwire.worker.session.replica import Replica

Share = tuple[Contribution, Push]
MANIFEST = Manifest((Tensor(name="weight", shape=(3,), dtype="float32"),), 8)


def build(
    manifest: Manifest,
    values: Sequence[Float32],
    plan: Plan,
    *,
    optimizer: str = "sgd",
    learning_rate: float = 1.0,
    downlink: str = "none",
    takes_norms: bool = False,
) -> SteppedStore:
    options = parse_optimizer(optimizer)
    return SteppedStore(
        manifest,
        values,
        downlink,
        lambda parameters: Optimizer(options, parameters, learning_rate),
        rules=StepRules(keep_last=True, takes_norms=takes_norms),
        plan=plan,
    )


def held(ledger: PushLedger) -> list[PushKey]:
    """Keys of the pushes that have stored parts."""
    return sorted({PushKey(*member, part.seq) for member, part, _, _ in ledger.stored_parts(0)})


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


def cut_plan(*units: Sequence[int]) -> Plan:
    """A plan of small parts: of each tensor, which is a unit of its own, how many elements its parts have."""
    starts = [0]
    for sizes in units:
        starts.append(starts[-1] + sum(sizes))
    parts: list[Part] = []
    found: list[Unit] = []
    for tensor in reversed(range(len(units))):
        first, at = len(parts), starts[tensor]
        for size in units[tensor]:
            parts.append(Part(at, at + size))
            at += size
        found.append(Unit(tensor, tensor + 1, range(first, len(parts)), starts[tensor], at))
    return Plan(tuple(parts), tuple(found), tuple(starts))


class Applied(Broadcast):
    """The update of a version. passed_over: gradients that had no effect."""

    passed_over = 0


def pushed(samples: int, payloads: Payloads | Push, **part: Any) -> Share:
    """payloads: by part, or of the only part. part: fields of the contribution."""
    key = PushKey("w", 1, 1)
    push = payloads if isinstance(payloads, Mapping) else {0: payloads} if payloads else {}
    return Contribution(key=key, rank=0, samples=samples, loss=0.0, **part), push


def apply(
    store: SteppedStore,
    *,
    version: int,
    shares: Sequence[Share],
    learning_rates: Sequence[float] = (),
    **order: Any,
) -> Applied:
    """learning_rates: that came with the pushes. order: other fields of the `Apply`."""
    contributions = tuple(part for part, _ in shares)
    fields: dict[str, Any] = {"rate_factor": 1.0, "opened_at": 0.0, **order}
    given, update = Apply(version=version, contributions=contributions, **fields), Applied(version)
    update.passed_over = store.apply(given, [push for _, push in shares], update.add, learning_rates)
    update.finish()
    return update


def snapshot(store: SteppedStore) -> Broadcast:
    update = Broadcast(store.version)
    update.finish(store.snapshot())
    return update


def receive(
    update: Broadcast, manifest: Manifest, plan: Plan, shared: SharedSizes = NOTHING_SHARED
) -> list[tuple[Update, list[Payload]]]:
    """Decode an update like a worker, from the bytes: part after part."""
    found: list[tuple[Update, list[Payload]]] = []
    messages = [decode_envelope(message, "ServerMessage") for message in update.messages]
    while messages:
        header = messages.pop(0)
        assert isinstance(header, Update)
        assembly = update_assembly(header, plan.parts[header.part], manifest, shared, worker="w")
        while not assembly.complete:
            chunk = messages.pop(0)
            assert isinstance(chunk, Chunk)
            assembly.add(chunk)
        found.append((header, assembly.finish()))
    assert sorted(header.part for header, _ in found) == list(range(len(plan.parts)))
    return found


def take(replica: Replica, update: Broadcast) -> None:
    """Have a worker take in a whole update."""
    shared = NOTHING_SHARED if replica.shared is None else replica.shared.sizes
    for header, payloads in receive(update, replica.manifest, replica.plan, shared):
        replica.apply(header, payloads)


def bits(replica: Replica) -> list[bytes]:
    return [value.tobytes() for value in replica.values()]


def replica_bits(store: SteppedStore) -> list[bytes]:
    return [value.detach().numpy().tobytes() for value in store.replica]
