"""Predictions of steps without a server: torch's DistributedDataParallel with its hooks, and `gradwire.ddp`.

Each of N ranks has a link. Of gradients that take S bytes as sent, it carries in each direction:

    torch ddp:             a ring, 2 (N - 1) / N times S, where S is float32, float16, or the factors of
                           PowerSGD, which take two rings one after the other.
    gradwire.ddp gather:   the payloads of all other ranks, (N - 1) times S.
    gradwire.ddp owners:   shares to their owners, and means back, 2 (N - 1) / N times S.

Torch hands over the gradients in buckets while backward continues. Link and processors work at the same time,
so of the shorter one only a part is seen. The constants are fits to `gc-bench step` with 4x1048576, four
ranks and two cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..compressors.projections import LowRankOptions
from ..compressors.sizes import (
    LEAST_SAVED,
    PACKING_BYTES_PER_S,
    PACKING_SHARE,
    CompressionCosts,
    TensorCoding,
    exchange_of,
)
from .job import FRAMING, JobProfile, StepOptions

TORCH, OURS = "torch ddp", "gradwire.ddp"
GATHER, OWNERS = f"{OURS} gather", f"{OURS} owners"
BUCKET_BYTES = 25 << 20  # of a bucket's gradients as float32
COLLECTIVE = 1.08  # time of gloo's collectives, by that of their bytes on the link
VISIBLE = 0.3  # share of the shorter time, of link and processors, that a step takes longer
# Seconds of one core per element, besides compressing.
GATHERED_S, OWNED_S, PROJECTED_S = 9e-9, 10.8e-9, 6.2e-9
STEP_S = 6e-3  # fixed seconds of a step of `gradwire.ddp`

FACTORS = LowRankOptions(rank=4)  # torch's PowerSGD sends the same tensors as factors
HOOKS: Mapping[str, CompressionCosts] = {
    each.name: each
    for each in (
        CompressionCosts(name="fp32 hook", up=TensorCoding(bits=32, dense=True), element_s=3e-9),
        CompressionCosts(name="fp16 hook", up=TensorCoding(bits=16, dense=True), element_s=5.4e-9),
        CompressionCosts(
            name="PowerSGD, rank 4",
            up=TensorCoding(bits=32, coordinates=FACTORS.coordinates),
            element_s=9.5e-9,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class DdpStep:
    """A predicted step of N ranks: its seconds, the bytes on each rank's link, and the seconds of link and
    processors."""

    step_s: float
    carried_bytes: float
    link_s: float
    processors_s: float


def without_server(profile: JobProfile, compressors: Sequence[CompressionCosts]) -> list[StepOptions]:
    """Return each compressor in `gradwire.ddp`, with the exchange that `exchange=auto` takes, and torch's
    hooks."""
    found = list[StepOptions]()
    for each in compressors:
        owners = each.for_means and _exchange(profile, each)[0]
        found.append(StepOptions(compressor=each, mode=OWNERS if owners else GATHER))
    return found + [StepOptions(compressor=each, mode=TORCH) for each in HOOKS.values()]


def predict_ddp(profile: JobProfile, chosen: StepOptions) -> DdpStep:
    """Predict a step in one of the ways that `without_server` returns."""
    sent, ranks, elements = chosen.compressor, profile.workers, sum(profile.elements)
    size, messages, packing_bytes = _sent_bytes(profile, sent), 1, 0.0
    _, gathered, owned = _exchange(profile, sent)
    if chosen.mode == TORCH:
        carried, element_s = owned, sent.element_s
        messages = 4 if sent.up.coordinates is not None else 2
    elif chosen.mode == OWNERS:
        carried, element_s, messages = owned, OWNED_S + sent.element_s, 2
    else:
        own_s = GATHERED_S if sent.up.coordinates is None else PROJECTED_S
        carried, element_s = gathered, own_s + sent.element_s
    rate = profile.worker_bandwidth / FRAMING
    slow = rate < PACKING_BYTES_PER_S * PACKING_SHARE and not sent.up.dense
    packs = chosen.entropy == "on" or (chosen.entropy == "auto" and slow)
    if chosen.mode != TORCH and packs and sent.up.packed <= 1 - LEAST_SAVED:
        packing_bytes = size + carried
        carried *= sent.up.packed
    sharing = ranks / profile.cores if profile.cores else 1.0
    processors_s = elements * element_s + packing_bytes / PACKING_BYTES_PER_S
    fixed_s = 0.0
    if chosen.mode != TORCH:
        costs, tensors, fixed_s = profile.costs, len(profile.shapes), STEP_S
        processors_s += tensors * costs.tensor_s + sent.up.calls(profile.shapes) * costs.worker_run_s
    link_s, processors_s = carried * COLLECTIVE / rate, processors_s * max(1.0, sharing)
    shorter, longer = sorted((link_s, processors_s))
    exchange_s = longer + VISIBLE * shorter + fixed_s + messages * (ranks - 1) * profile.rtt_s / 2
    buckets = max(1, math.ceil(4 * elements / BUCKET_BYTES))
    backward_s = sum(profile.backward_s)
    behind_s = max(backward_s + exchange_s / buckets, backward_s / buckets + exchange_s)
    return DdpStep(sum(profile.forward_s) + behind_s, carried, link_s, processors_s)


def _exchange(profile: JobProfile, sent: CompressionCosts) -> tuple[bool, float, float]:
    """Return the result of `exchange_of` for the profile's tensors."""
    return exchange_of(_sent_bytes(profile, sent), profile.workers, len(profile.shapes))


def _sent_bytes(profile: JobProfile, sent: CompressionCosts) -> float:
    """Return the bytes of a rank's gradients before packing. PowerSGD sends all other tensors as float32."""
    whole = 2 if sent.name in HOOKS else 1
    return sum(
        sent.up.sent_bytes(shape) * (1 if sent.up.carries(shape) else whole) for shape in profile.shapes
    )
