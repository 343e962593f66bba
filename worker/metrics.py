"""A worker's metrics for Prometheus. docs/reference/metrics.md lists them for operators."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager

from ..common.metrics import MetricSet, counter, gauge, histogram


class WorkerMetrics(MetricSet, prefix="gradwire_worker"):
    """The Prometheus metrics of one worker. The daemon or a script creates them; the session and the driver
    count.

    Attributes:
        wire_up, wire_down: counters of the bytes that this worker sends and receives, with its compressor as
            label.
        raw_up, raw_down: counters of the bytes of its pushes and of the updates, as if sent as float32.
        payload_up, payload_down: counters of the bytes of their payloads.
    """

    info = gauge("info", "1 once the worker has joined; labels name release and mode", "version", "mode")
    _wire = counter(
        "wire_bytes",
        "bytes sent (up) and received (down)",
        "direction",
        "compressor",
    )
    _raw = counter(
        "raw_bytes",
        "the same tensors as float32",
        "direction",
        "compressor",
    )
    _payload = counter(
        "payload_bytes",
        "payloads of accepted pushes, updates and snapshots before packing, without headers",
        "direction",
        "compressor",
    )
    pushes = counter("pushes", "pushes by the server's decision: `accepted` or `refused`", "decision")
    refusals = counter("refusals", "pushes that the server refused, by its reason", "reason")
    skipped = counter("skipped_steps", "steps skipped because the gradient was not finite")
    spikes = counter(
        "spikes",
        "tensors whose gradient was more than 100 times as large as usual",
    )
    clipped = counter(
        "clipped_elements",
        "coded mode: elements of gradients outside ±10",
    )
    ahead = counter(
        "ahead_rounds",
        "local:delayed=on: rounds computed before their assignment arrived, `used` or `discarded`",
        "outcome",
    )
    reconnects = counter("reconnects", "reconnections after the stream to the server broke")
    drifts = counter("drifts", "replicas replaced because their checksum differed from the server's")
    seconds = counter(
        "seconds",
        "seconds of the training thread: `computing`, `compressing`, `pushing`, `waiting`, `applying`, "
        "`evaluating`, `encoding` or `decoding`",
        "activity",
    )
    step_seconds = histogram("step_seconds", "seconds from one assignment to the next")
    version = gauge("version", "version of the parameters in the replica")
    epoch = gauge("epoch", "epoch of the current assignment, counted from 0")
    loss = gauge("train_loss", "training loss of the last step")
    residual_norm = gauge("residual_norm", "Euclidean norm of the residuals, measured every 50 steps")

    def __init__(self, compressor: str) -> None:
        """compressor: name of the compressor without options, the value of the label `compressor`; empty if
        the job is to name it."""
        super().__init__()
        self.name_compressor(compressor or "unattributed")
        self._stepped_at: float | None = None
        self._inside = 0.0  # seconds of the blocks nested in the current block
        self._given: object = None  # identity of the block of `given` whose time counts

    def name_compressor(self, compressor: str) -> None:
        """Set the value of the label `compressor` of all bytes that are counted from now on."""
        self.wire_up = self._wire.labels("up", compressor)
        self.wire_down = self._wire.labels("down", compressor)
        self.raw_up = self._raw.labels("up", compressor)
        self.raw_down = self._raw.labels("down", compressor)
        self.payload_up = self._payload.labels("up", compressor)
        self.payload_down = self._payload.labels("down", compressor)

    def numbers(self) -> dict[str, float]:
        """Return the metrics as plain numbers by name; NaN for a number that is not known yet."""
        bytes_of, raw_of, payload_of = (
            {
                way: sum(each.value for (direction, _), each in metric.series() if direction == way)
                for way in ("up", "down")
            }
            for metric in (self._wire, self._raw, self._payload)
        )
        spent = {activity: series.value for (activity,), series in self.seconds.series()}
        decided = {decision: series.value for (decision,), series in self.pushes.series()}
        steps = sum(self.step_seconds.counts)
        return {
            **{f"bytes_{direction}": total for direction, total in bytes_of.items()},
            **{f"raw_bytes_{direction}": total for direction, total in raw_of.items()},
            **{f"payload_bytes_{direction}": total for direction, total in payload_of.items()},
            **{
                f"ratio_{direction}": raw_of[direction] / total if total else math.nan
                for direction, total in bytes_of.items()
            },
            **{
                f"{activity}_seconds": spent.get(activity, 0.0)
                for activity in ("computing", "compressing", "pushing", "waiting", "applying")
            },
            "step_seconds": self.step_seconds.value / steps if steps else math.nan,
            **{f"{decision}_pushes": decided.get(decision, 0.0) for decision in ("accepted", "refused")},
            "skipped_steps": self.skipped.value,
            "reconnects": self.reconnects.value,
        }

    def step(self) -> None:
        """Mark the start of a step, and observe the seconds since the previous start."""
        now = time.perf_counter()
        if self._stepped_at is not None:
            self.step_seconds.observe(now - self._stepped_at)
        self._stepped_at = now

    @contextmanager
    def during(self, activity: str) -> Generator[None]:
        """Count the time spent in a `with` block as `activity`, without the time of nested `during`
        blocks."""
        started, outside = time.perf_counter(), self._inside
        self._inside = 0.0
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self.seconds.labels(activity).inc(taken - self._inside)
            self._inside = outside + taken

    @contextmanager
    def given(self) -> Generator[None]:
        """Count the time spent in a `with` block, in which a script has a batch, as computing.

        A generator holds the block. A script may close it late, within other blocks: nothing counts then.
        """
        self._given = own = object()
        started, self._inside = time.perf_counter(), 0.0
        try:
            yield
        finally:
            if self._given is own:
                self.seconds.labels("computing").inc(time.perf_counter() - started - self._inside)
                self.take_back()

    def take_back(self) -> None:
        """Count no more time of a block of `given` that is still open: another loop over batches begins."""
        self._given = None
