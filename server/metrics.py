"""Metrics of the server, for Prometheus and for the Status call. docs/reference/metrics.md lists them for
operators.

Labels are bounded: directions, refusal reasons, and the names of built-in compressors ("other" for the rest).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter as Counts
from collections import OrderedDict, deque
from collections.abc import Container, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ..common.metrics import Counter, MetricSet, counter, gauge, histogram
from ..compressors import AbsentPayload, DensePayload, Payload, wire_bytes
from ..compressors.registry import AUTO, BUILT_IN
from ..proto.messages import Phase, Traffic
from ..proto.refusal import Reason
from .history import History
from .job.loss_history import LossHistory
from .job.roster import MAX_MEMBERS
from .plans.planner import Measurements


@dataclass(slots=True)
class Sender:
    """A worker of a stream, and the figures that this server has counted of it."""

    compressor: str = "unattributed"  # label
    wire_bytes_up: int = 0
    wire_bytes_down: int = 0
    raw_bytes_up: int = 0
    refused_pushes: int = 0


# The worker whose stream the current task reads or writes.
SENDER: ContextVar[Sender] = ContextVar("SENDER", default=Sender())  # noqa: B039

NAMES = 32  # most names of metrics that tasks report
PATIENCE_S = 1.0  # a shorter wait of a round is never overdue
_STEPS = (0, 1, 2, 4, 8, 16, 32)


def compressor_label(spec: str) -> str:
    """Return the name of a compressor spec as a label value; "other" for one that is not built in."""
    name = spec.partition(":")[0]
    return name if name in BUILT_IN or name == AUTO else "other"


class ServerMetrics(MetricSet, prefix="gradwire_server"):
    """The metrics of one server. Calls, conductor and reporting record them; operators scrape them.

    Attributes:
        accepted: number of accepted pushes.
        refused: number of refused pushes.
        train_loss: mean loss of the last round; NaN before the first.
        loss_history: losses of the job by version, which Status returns.
        history: time and bytes by version, since this server started.
        senders: figures of workers that have opened a stream to this server.
    """

    info = gauge("info", "always 1; the labels name version and mode", "version", "mode")
    _wire_bytes = counter(
        "wire_bytes",
        "bytes on the wire without those of Status; `unattributed` outside of a worker's stream",
        "direction",
        "compressor",
    )
    _raw_bytes = counter(
        "raw_bytes",
        "the same tensors as float32: accepted pushes, updates, snapshots, initial parameters",
        "direction",
        "compressor",
    )
    _payload_bytes = counter(
        "payload_bytes",
        "payloads of accepted pushes, updates and snapshots before packing, without headers",
        "direction",
        "compressor",
    )
    _pushes = counter("pushes", "accepted pushes", "compressor")
    _refusals = counter("refusals", "refused pushes and calls", "reason")
    _rounds = counter("rounds", "closed rounds; in stale and async mode, applied pushes")
    _samples = counter("samples", "training samples in closed rounds")
    repeated_samples = counter(
        "repeated_samples",
        "samples trained on twice, because a worker returned after its lease",
    )
    lost_members = counter("members_lost", "members lost before the job was finished")
    suspensions = counter("suspensions", "times that a member was suspended because its training thread hung")
    stalled_seconds = gauge("stalled_seconds", "longest time without progress of a member's training thread")
    round_seconds = histogram("round_seconds", "time from a round's opening to its version")
    passed_over = counter(
        "rounds_passed_over",
        "rounds with fewer gradients than `--aggregation` needs",
    )
    reduce_seconds = histogram("reduce_seconds", "time of reduction, optimizer step and encoding of a round")
    waiting_seconds = counter(
        "waiting_seconds",
        "time of rounds beyond twice the median of the last ones and beyond 1 s",
    )
    staleness_versions = histogram(
        "staleness_versions",
        "versions applied between an accepted push and its base; 0 in sync and local mode",
        _STEPS,
    )
    staleness_clocks = histogram(
        "staleness_clocks", "stale mode: clocks that an applied push was behind the newest one", _STEPS
    )
    staleness_bound = gauge("staleness_bound_clocks", "stale mode: the bound; NaN in other modes")
    staleness_largest = gauge("staleness_largest_versions", "greatest staleness of accepted pushes")
    staleness_largest_clocks = gauge(
        "staleness_largest_clocks", "stale mode: greatest staleness of applied pushes"
    )
    checkpoint_version = gauge(
        "checkpoint_version", "with --state: version of the last checkpoint; NaN before the first"
    )
    checkpoint_timestamp = gauge(
        "checkpoint_timestamp_seconds",
        "with --state: time of the last checkpoint, since the epoch; NaN before the first",
    )
    checkpoint_bytes = gauge("checkpoint_bytes", "with --state: size of the last checkpoint, in bytes")
    journal_bytes = gauge(
        "journal_bytes", "with --state: size of the journal since the last whole checkpoint, in bytes"
    )
    checkpoint_failures = counter("checkpoint_failures", "checkpoints that could not be written")
    state_free_bytes = gauge(
        "state_free_bytes", "free space of the disk of --state, in bytes; NaN without, and for a URL"
    )
    local_steps = gauge("local_steps", "local mode: local steps of the last opened round; 1 in other modes")
    redundancy = gauge("redundancy", "coded mode: workers that computed each block in the last round")
    uncoded_exchanges = counter(
        "uncoded_exchanges",
        "coded mode: exchanges replaced by whole gradients",
    )
    drifting = gauge(
        "drifting_replicas",
        "coded mode: members whose replica differs from the first member's",
    )
    plans = counter("plans", "new plans put in force")
    parts = gauge("parts", "number of parts in the plan")
    forward_seconds = gauge("forward_seconds", "forward pass of a step, mean of the workers")
    backward_seconds = gauge("backward_seconds", "backward pass of a step, mean of the workers")
    compressing_share = gauge(
        "compressing_share", "fraction of the time between steps that compressing takes"
    )
    predicted_step_seconds = gauge("predicted_step_seconds", "predicted time of a step; 0 if unknown")
    link_part_seconds = gauge("link_part_seconds", "upload time of a part of any size (alpha)")
    link_byte_seconds = gauge("link_byte_seconds", "additional upload time of each byte of a part (beta)")
    members = gauge("members", "members that hold a lease")
    min_workers = gauge("min_workers", "workers that `--min-workers` expects")
    missing = gauge(
        "round_missing_members",
        "members that others wait for",
    )
    version = gauge("version", "parameter version")
    epoch = gauge("epoch", "completed epochs, with the fraction of the running one")
    target_version = gauge("target_version", "version at which the job ends; NaN without `--max-steps`")
    target_epoch = gauge("target_epoch", "number of epochs after which the job ends; NaN for no limit")
    phase = gauge("phase", "1 for the present phase of the job, 0 for all others", "phase")
    gradient_norm = gauge(
        "gradient_norm",
        "norm of the last mean gradient before `--clip-norm`; NaN without",
    )
    certificate_expiry = gauge(
        "certificate_expiry_seconds",
        "end of the validity of `--tls-cert`, since the epoch; NaN without TLS",
    )
    loss = gauge("train_loss", "sample-weighted mean training loss of the last round; NaN before the first")
    learning_rate = gauge("learning_rate", "learning rate of the next step; NaN where scripts set it")
    _validation = gauge("validation", f"metrics of the last evaluation, for at most {NAMES} names", "metric")

    def __init__(self, downlink: str) -> None:
        """
        Args:
            downlink: compressor of the updates, which labels the bytes sent."""
        super().__init__()
        self._downlink = downlink
        self._traffic: Counts[str] = Counts()  # bytes by field of `Traffic`
        self._most_versions = self._most_clocks = 0
        self._followed: dict[Counter, int] = {}
        self._recent: deque[float] = deque(maxlen=32)  # seconds that each of the last rounds took
        self._apart: deque[float] = deque(maxlen=32)  # seconds between the ends of the last rounds
        self._closed_at: float | None = None
        self._names: set[str] = set()
        self.loss_history, self.history = LossHistory(), History()
        self.senders: OrderedDict[str, Sender] = OrderedDict()  # the last `MAX_MEMBERS`
        self.accepted = self.refused = 0
        self.train_loss = float("nan")
        for unknown in (
            *(self.staleness_bound, self.gradient_norm, self.learning_rate, self.loss),
            *(self.target_version, self.target_epoch, self.certificate_expiry),
            *(self.checkpoint_version, self.checkpoint_timestamp, self.state_free_bytes),
        ):
            unknown.set(float("nan"))
        for direction in ("up", "down"):
            self._wire_bytes.labels(direction, "unattributed" if direction == "up" else downlink)

    def received(self, wire_bytes: int) -> None:
        """Count received bytes on the wire."""
        self._traffic["wire_bytes_up"] += wire_bytes
        sender = SENDER.get()
        sender.wire_bytes_up += wire_bytes
        self._wire_bytes.labels("up", sender.compressor).inc(wire_bytes)

    def sent(self, wire_bytes: int) -> None:
        """Count sent bytes on the wire."""
        self._traffic["wire_bytes_down"] += wire_bytes
        SENDER.get().wire_bytes_down += wire_bytes
        self._wire_bytes.labels("down", self._downlink).inc(wire_bytes)

    def sent_raw(self, raw_bytes: int) -> None:
        """Count the bytes that sent elements take as float32."""
        self._traffic["raw_bytes_down"] += raw_bytes
        self._raw_bytes.labels("down", self._downlink).inc(raw_bytes)

    def sent_update(self, raw_bytes: int, payload_bytes: int) -> None:
        """Count a sent update or snapshot: bytes of its elements as float32, and of its payloads."""
        self.sent_raw(raw_bytes)
        self._traffic["payload_bytes_down"] += payload_bytes
        self._payload_bytes.labels("down", self._downlink).inc(payload_bytes)

    def received_raw(self, raw_bytes: int) -> None:
        """Count the bytes that received elements take as float32."""
        self._traffic["raw_bytes_up"] += raw_bytes
        sender = SENDER.get()
        sender.raw_bytes_up += raw_bytes
        self._raw_bytes.labels("up", sender.compressor).inc(raw_bytes)

    def image(self) -> dict[str, Any]:
        """Return the figures that belong to the job, which a checkpoint keeps, as opposed to those of this
        process."""
        return {
            "accepted": self.accepted,
            "refused": self.refused,
            "loss_history": deepcopy(self.loss_history),
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the figures of the job by those that `image` returned."""
        self.accepted, self.refused = image["accepted"], image["refused"]
        self.loss_history = image["loss_history"]

    def push_accepted(self, payloads: Sequence[Payload], versions_stale: int) -> None:
        """Count an accepted push.

        Args:
            payloads: all payloads of the push.
            versions_stale: number of versions applied since the one that the gradient was computed at.
        """
        self.accepted += 1
        size = sum(int(payload.data.size) for payload in payloads)
        self._received_push(sum(payload.elements for payload in payloads) * 4, size)
        compressed = [each for each in payloads if not isinstance(each, DensePayload | AbsentPayload)]
        self._traffic["compressed_payload_bytes_up"] += sum(map(wire_bytes, compressed))
        self._traffic["compressed_raw_bytes_up"] += 4 * sum(each.elements for each in compressed)
        self._pushes.labels(SENDER.get().compressor).inc()
        self.staleness_versions.observe(versions_stale)
        self._most_versions = max(self._most_versions, versions_stale)
        self.staleness_largest.set(self._most_versions)

    def relayed(self, payload_bytes: int, targets: int) -> None:
        """Count a coded packet that was received and forwarded. payload_bytes: its size. targets: number of
        workers that got it."""
        self._received_push(payload_bytes, payload_bytes)
        self.sent_update(payload_bytes * targets, payload_bytes * targets)

    def _received_push(self, raw_bytes: int, payload_bytes: int) -> None:
        self.received_raw(raw_bytes)
        self._traffic["payload_bytes_up"] += payload_bytes
        self._payload_bytes.labels("up", SENDER.get().compressor).inc(payload_bytes)

    def push_refused(self, reason: Reason) -> None:
        """Count a refused push."""
        self.refused += 1
        SENDER.get().refused_pushes += 1
        self.refusal(reason)

    def refusal(self, reason: Reason) -> None:
        """Count a refused push or call by its reason."""
        self._refusals.labels(reason.label).inc()

    def refusals(self) -> dict[str, float]:
        """Return the numbers of refused pushes and calls by reason."""
        return {reason: each.value for (reason,), each in self._refusals.series()}

    def sender(self, worker: str, compressor: str, attached: Container[str] = ()) -> Sender:
        """Return the figures of a worker, which uses `compressor` from now on. attached: workers that have a
        stream, whose figures are kept."""
        found = self.senders.setdefault(worker, Sender())
        found.compressor = compressor_label(compressor)
        self.senders.move_to_end(worker)
        if len(self.senders) > MAX_MEMBERS:
            del self.senders[next((name for name in self.senders if name not in attached), worker)]
        return found

    def clocks_stale(self, clocks: int) -> None:
        """Record the staleness of an applied push in stale mode. clocks: number of clocks that it was behind
        the newest one."""
        self.staleness_clocks.observe(clocks)
        self._most_clocks = max(self._most_clocks, clocks)
        self.staleness_largest_clocks.set(self._most_clocks)

    def follow(self, counter: Counter, total: int) -> None:
        """Increase a counter to a total that another component keeps."""
        counter.inc(total - self._followed.get(counter, 0))
        self._followed[counter] = total

    def follow_mode(self, values: Mapping[str, float]) -> None:
        """Update the metrics of the job's mode to these values, by attribute of this class."""
        for name, value in values.items():
            metric = getattr(self, name)
            if isinstance(metric, Counter):
                self.follow(metric, int(value))
            else:
                metric.set(value)

    def overdue(self, seconds: float) -> bool:
        """Return True when a wait of `seconds` is longer than the last rounds usually took; False before the
        first round."""
        return bool(self._recent) and not self.healthy(seconds)

    def healthy(self, seconds: float) -> bool:
        """Return True if a round of `seconds` is normal: at most twice the median of the last rounds, or at
        most 1 s. False before the first round."""
        return bool(self._recent) and seconds <= max(PATIENCE_S, 2 * statistics.median(self._recent))

    @property
    def step_seconds(self) -> float:
        """Median time between the last rounds, in seconds; 0 before there are two."""
        return statistics.median(self._apart) if self._apart else 0.0

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation by name; names beyond the first `NAMES` are ignored, which
        bounds the labels."""
        for name, value in metrics.items():
            if name in self._names or len(self._names) < NAMES:
                self._names.add(name)
                self._validation.labels(name).set(value)

    def round_closed(self, seconds: float, samples: int, loss: float, version: int) -> None:
        """Record a closed round.

        Args:
            seconds: time from the round's opening to its version.
            samples: number of samples in the round.
            loss: mean loss over these samples; NaN if unknown.
            version: version that the round produced.
        """
        now, last = time.monotonic(), self._closed_at
        if last is not None:
            self._apart.append(now - last)
        self._closed_at = now
        self._recent.append(seconds)
        self.history.add(version, now, self._traffic["wire_bytes_up"], self._traffic["wire_bytes_down"])
        self._rounds.inc()
        self._samples.inc(samples)
        self.round_seconds.observe(seconds)
        if samples:
            self.train_loss = loss
            self.loss.set(loss)
            self.loss_history.add(version, samples, loss)

    def measured(self, measured: Measurements) -> None:
        """Record the times of steps and of the link."""
        self.forward_seconds.set(sum(layer.forward_s for layer in measured.layers))
        self.backward_seconds.set(sum(layer.backward_s for layer in measured.layers))
        self.compressing_share.set(measured.compressing_share)
        self.link_part_seconds.set(measured.link.start_s)
        self.link_byte_seconds.set(measured.link.byte_s)

    def set_phase(self, phase: Phase) -> None:
        """Set the gauge of the job's phase."""
        for one in Phase:
            if one is not Phase.UNSPECIFIED:
                self.phase.labels(one.name.lower()).set(one is phase)

    def traffic(self) -> Traffic:
        """Return the bytes counted so far, for Status."""
        return Traffic(**self._traffic)
