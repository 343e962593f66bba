"""What the server counts, for Prometheus and for the Status call. docs/metrics.md lists it for operators.

Labels are bounded: directions, refusal reasons, and the names of built-in compressors ("other" for the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from ..compressors import Payload
from ..compressors.registry import BUILT_IN
from ..proto.messages import Phase, Traffic
from ..proto.refusal import Reason
from .shard.store import compressed_bytes

# Whose messages the current task is reading: the name of the worker's compressor.
SENDER: ContextVar[str] = ContextVar("SENDER", default="unattributed")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def compressor_label(spec: str) -> str:
    """The name of a compressor spec as a label value."""
    name = spec.partition(":")[0]
    return name if name in BUILT_IN else "other"


class Metrics:
    def __init__(self, downlink: str) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._downlink = downlink
        self._up = self._down = self._raw_up = self._raw_down = 0
        self._payload = self._compressed = self._compressed_raw = 0
        self.accepted = self.refused = 0
        self.train_loss = float("nan")

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"gradwire_server_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"gradwire_server_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"gradwire_server_{name}", text, buckets=buckets, registry=registry)

        self._wire_bytes = counter(
            "wire_bytes", "Bytes of messages with gRPC and HTTP/2 framing", "direction", "compressor"
        )
        self._raw_bytes = counter(
            "raw_bytes", "Bytes that the same tensors take as float32", "direction", "compressor"
        )
        self._pushes = counter("pushes", "Pushes accepted", "compressor")
        self._refusals = counter("refusals", "Messages and calls refused", "reason")
        self._rounds = counter("rounds", "Rounds closed")
        self._samples = counter("samples", "Training samples in closed rounds")
        self.lost_members = counter("members_lost", "Members lost before the job was done")
        self.round_seconds = histogram("round_seconds", "From a round's opening to its version")
        self.passed_over = counter(
            "rounds_passed_over", "Rounds with fewer gradients than the aggregation needs; nothing changed"
        )
        self.reduce_seconds = histogram("reduce_seconds", "Reducing a round, optimizer step, encoding")
        self.waiting_seconds = counter("waiting_seconds", "Time in which nothing could proceed", "cause")
        self.staleness = histogram(
            "staleness_versions", "Versions applied between a push's base and it", (0, 1, 2, 4, 8, 16, 32)
        )
        self.staleness_clocks = histogram(
            "staleness_clocks", "Clocks that a push was behind the newest one", (0, 1, 2, 4, 8, 16, 32)
        )
        self.staleness_bound = gauge(
            "staleness_bound_clocks", "Clocks that a push may be behind, --staleness"
        )
        self.staleness_largest = gauge(
            "staleness_largest", "Of all pushes accepted: clocks in stale mode, versions in async mode"
        )
        self.repeated = gauge(
            "repeated_samples", "Samples trained on by who had lost them as well as by who got them then"
        )
        self.local_steps = gauge("local_steps", "Steps that each worker takes in the last round opened")
        self.redundancy = gauge("redundancy", "Workers that compute the same, in the last round closed")
        self.uncoded = gauge("uncoded_exchanges", "Exchanges of packets that were replaced by uncoded ones")
        self.drifting = gauge("drifting_replicas", "Members whose sums differ from the first one's")
        self.members = gauge("members", "Members that hold a lease")
        self.missing = gauge("round_missing_members", "Members that the open round waits for")
        self.version = gauge("version", "Parameter version")
        self.epoch = gauge("epoch", "Epochs completed, with the part of the running one")
        self.phase = gauge("phase", "1 for the phase that the job is in", "phase")
        self.loss = gauge("train_loss", "Sample-weighted mean training loss of the last closed round")
        self.validation = gauge("validation", "Last validation metrics reported", "metric")
        for direction in ("up", "down"):
            self._wire_bytes.labels(direction, "unattributed" if direction == "up" else downlink)

    def received(self, wire_bytes: int) -> None:
        self._up += wire_bytes
        self._wire_bytes.labels("up", SENDER.get()).inc(wire_bytes)

    def sent(self, wire_bytes: int) -> None:
        self._down += wire_bytes
        self._wire_bytes.labels("down", self._downlink).inc(wire_bytes)

    def sent_raw(self, raw_bytes: int) -> None:
        self._raw_down += raw_bytes
        self._raw_bytes.labels("down", self._downlink).inc(raw_bytes)

    def copied(self, raw_bytes: int) -> None:
        """All parameters have come from a worker."""
        self._raw_up += raw_bytes
        self._raw_bytes.labels("up", SENDER.get()).inc(raw_bytes)

    def push_accepted(self, payloads: Sequence[Payload], versions_stale: int) -> None:
        raw = sum(payload.elements for payload in payloads) * 4
        self.accepted += 1
        self._raw_up += raw
        self._payload += sum(int(payload.data.size) for payload in payloads)
        compressed, compressed_raw = compressed_bytes(payloads)
        self._compressed += compressed
        self._compressed_raw += compressed_raw
        self._raw_bytes.labels("up", SENDER.get()).inc(raw)
        self._pushes.labels(SENDER.get()).inc()
        self.staleness.observe(versions_stale)

    def relayed(self, payload_bytes: int, targets: int) -> None:
        """A coded packet has come, and has been handed on to so many."""
        self._payload += payload_bytes
        self._raw_up += payload_bytes
        self._raw_bytes.labels("up", SENDER.get()).inc(payload_bytes)
        self.sent_raw(payload_bytes * targets)

    def push_refused(self, reason: Reason) -> None:
        self.refused += 1
        self.refusal(reason)

    def refusal(self, reason: Reason) -> None:
        self._refusals.labels(reason.label).inc()

    def round_closed(self, seconds: float, samples: int, loss: float) -> None:
        self._rounds.inc()
        self._samples.inc(samples)
        self.round_seconds.observe(seconds)
        if samples:
            self.train_loss = loss
            self.loss.set(loss)

    def set_phase(self, phase: Phase) -> None:
        for one in Phase:
            if one is not Phase.UNSPECIFIED:
                self.phase.labels(one.name.lower()).set(one is phase)

    def traffic(self) -> Traffic:
        return Traffic(
            wire_bytes_up=self._up,
            wire_bytes_down=self._down,
            raw_bytes_up=self._raw_up,
            raw_bytes_down=self._raw_down,
            payload_bytes_up=self._payload,
            compressed_payload_bytes_up=self._compressed,
            compressed_raw_bytes_up=self._compressed_raw,
        )
