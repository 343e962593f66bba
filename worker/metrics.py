"""What a worker counts, for Prometheus. docs/metrics.md lists it for operators."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    def __init__(self, compressor: str) -> None:
        """compressor: its name without options."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"gradwire_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"gradwire_worker_{name}", text, registry=registry)

        wire = counter(
            "wire_bytes", "Bytes of messages with gRPC and HTTP/2 framing", "direction", "compressor"
        )
        raw = counter("raw_bytes", "Bytes that the same tensors take as float32", "direction", "compressor")
        self._wire_up = wire.labels("up", compressor)
        self._wire_down = wire.labels("down", compressor)
        self.raw_up = raw.labels("up", compressor)
        self.raw_down = raw.labels("down", compressor)
        self.pushes = counter("pushes", "Pushes by what the server decided", "decision")
        self.refusals = counter("refusals", "Pushes that the server refused", "reason")
        self.skipped = counter("skipped_steps", "Steps without a usable gradient")
        self.clipped = counter("clipped_elements", "Of gradients outside of the range of fixed point")
        self.reconnects = counter("reconnects", "Times the stream was opened again")
        self.seconds = counter("seconds", "Where the time goes; waiting_* is waiting", "activity")
        self.step_seconds = Histogram(
            "gradwire_worker_step_seconds",
            "From an assignment to the next one",
            buckets=_SECONDS,
            registry=registry,
        )
        self.version = gauge("version", "Parameter version of the replica")
        self.epoch = gauge("epoch", "Epoch of the current assignment")
        self.loss = gauge("train_loss", "Training loss of the last step")
        self.residual_norm = gauge("residual_norm", "Euclidean norm of what is still to be sent")

    def sent(self, wire_bytes: int) -> None:
        self._wire_up.inc(wire_bytes)

    def received(self, wire_bytes: int) -> None:
        self._wire_down.inc(wire_bytes)

    @contextmanager
    def during(self, activity: str) -> Generator[None]:
        """Count the time of a block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.labels(activity).inc(time.perf_counter() - started)
