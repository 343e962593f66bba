"""A worker's metrics for Prometheus. docs/reference/metrics.md lists them for operators."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from ..common.metrics import MetricSet, counter, gauge, histogram


class WorkerMetrics(MetricSet, prefix="gradwire_worker"):
    info = gauge("info", "1; the labels say what runs, once it has joined", "version", "mode", "job")
    _wire = counter("wire_bytes", "bytes on the wire", "direction", "compressor")
    _raw = counter(
        "raw_bytes",
        "float32 bytes of accepted pushes, of updates applied, and of the initial parameters if this worker "
        "sent them",
        "direction",
        "compressor",
    )
    pushes = counter("pushes", "`accepted`, `refused`", "decision")
    refusals = counter("refusals", "pushes that the server refused", "reason")
    skipped = counter("skipped_steps", "steps without a usable gradient")
    spikes = counter(
        "spikes",
        "gradients of tensors that were more than 100 times as large as usual, and were sent whole, as "
        "float32",
    )
    clipped = counter(
        "clipped_elements",
        "coded mode: elements of gradients that were outside of ±10 and were clipped",
    )
    ahead = counter(
        "ahead_rounds",
        "local:delayed=on: rounds computed before their assignment came, `used` or `discarded`",
        "outcome",
    )
    reconnects = counter("reconnects", "times the stream was opened again")
    drifts = counter("drifts", "times the replica was not the server's, and was replaced")
    seconds = counter(
        "seconds",
        "where the training thread's time goes: `computing`, `compressing`, `pushing`, `waiting`, "
        "`applying`, `evaluating`; in coded mode `encoding` and `decoding`",
        "activity",
    )
    step_seconds = histogram("step_seconds", "from an assignment to the next one")
    version = gauge("version", "parameter version of the replica")
    epoch = gauge("epoch", "epoch of the current assignment")
    loss = gauge("train_loss", "training loss of the last step")
    residual_norm = gauge(
        "residual_norm", "Euclidean norm of what is still to be sent, measured every 50 steps"
    )

    def __init__(self, compressor: str) -> None:
        """compressor: its name without options."""
        super().__init__()
        self.wire_up = self._wire.labels("up", compressor)
        self.wire_down = self._wire.labels("down", compressor)
        self.raw_up = self._raw.labels("up", compressor)
        self.raw_down = self._raw.labels("down", compressor)
        self._stepped_at: float | None = None
        self._inside = 0.0  # time of the blocks within the one that is being counted

    def step(self) -> None:
        """A step begins."""
        now = time.perf_counter()
        if self._stepped_at is not None:
            self.step_seconds.observe(now - self._stepped_at)
        self._stepped_at = now

    @contextmanager
    def during(self, activity: str) -> Generator[None]:
        """Count the time of a block, but for blocks within it."""
        started, outside = time.perf_counter(), self._inside
        self._inside = 0.0
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self.seconds.labels(activity).inc(taken - self._inside)
            self._inside = outside + taken
