"""What a step will take, for each way to take it: `rank` of a profile; and `break_even`, the bandwidth below
which a compressor pays. The plan is the one that a server would make (`plans`). Profiles come from a model's
table (`models`), or from what a running server has measured (`deploy/live`).

For sync jobs, with slices (`sync:redundancy=R`) too, a step is simulated (`step`). For what does not go
through a server part by part there are formulas:

    local:steps=H   H - 1 steps of computation, and one without overlap, divided by H; with delayed=on, where
                    the exchange runs beside the steps, the longer of both
    stale, async    each push is applied by itself. A worker's own step is computation, a push and an update,
                    of one worker alone; all of them take no less than the links do, of which the way down
                    carries each push's update to every worker, or snapshots where these are smaller
    coded           r times the computation, and the packets of float32 as docs/explanation/coded.md counts them, up and
                    down at the same time; no compressor, and only r = 1 and r = workers - 1
    ring            what a ring all-reduce carries over each link at least, 2 (W - 1) / W of the model, while
                    backward goes on: none of Gradwire's ways, for comparison
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .choices import Merging, Ordering
from .compression import NONE, CompressionCosts
from .job import FASTEST, JobProfile, StepOptions, work_of
from .step import Overlap, Timeline, simulate

MOST_TO_SEARCH = 64  # parts that two-phase looks for the order of: that takes their cube
LEAST_COMPUTING = 0.02  # share of a step, from which on the order of parts is worth a look


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """step_s: seconds. parts: that the model travels in. up_bytes, down_bytes: of a step, on the link of the
    busiest server. busy_s: of a step, what each of them takes by itself: computing, the way up, server, the
    way down, and the processors, for what is not computing. timeline: None where a formula says it."""

    choice: StepOptions
    step_s: float
    parts: int
    up_bytes: float
    down_bytes: float
    busy_s: Mapping[str, float]
    timeline: Timeline | None = None

    @property
    def limit(self) -> str:
        """Of these, which takes longest."""
        return max(self.busy_s, key=self.busy_s.__getitem__)


def predict(profile: JobProfile, chosen: StepOptions) -> Prediction:
    """What a step takes that is taken so; of several workers one.

    Raises:
        ValueError: nothing is known of the mode, fusion or order, or they do not go together.
    """
    if chosen.mode.startswith("ring"):
        return _ring(profile, chosen)
    if chosen.mode.startswith("coded"):
        return _coded(profile, chosen)
    if chosen.mode.startswith("local"):
        return _local(profile, chosen)
    if chosen.mode in ("stale", "async") or chosen.mode.startswith("stale:bound="):
        return _alone(profile, chosen)
    name, _, options = chosen.mode.partition(":")
    if name != "sync" or (options and not options.startswith("redundancy=")) or "," in options:
        raise ValueError(f"mode: nothing is known of what {chosen.mode} takes")
    if profile.workers % chosen.redundancy:
        raise ValueError(
            f"redundancy: expected a divisor of {profile.workers} workers, got {chosen.redundancy}"
        )
    if chosen.overlap == "both" and chosen.redundancy > 1:
        raise ValueError("overlap: both goes without redundancy only; take backward")
    work, place = work_of(profile, chosen)
    timeline = simulate(work, place)
    up, down = [0.0] * work.servers, [0.0] * work.servers
    for piece in work.pieces:
        up[piece.server] += piece.pushes * piece.up_bytes
        down[piece.server] += work.workers * piece.down_bytes
    busy = {
        "computing": chosen.redundancy * profile.computation_s,
        "way up": max(up) * profile.server_byte_s,
        "way down": max(down) * profile.server_byte_s,
        "server": timeline.busy_s("server"),
    }
    slowest = 1 / profile.workers if profile.cores is None else 1 / profile.cores
    busy["processors"] = timeline.cpu_s * slowest
    return Prediction(
        choice=chosen,
        step_s=timeline.step_s,
        parts=len(work.pieces),
        up_bytes=max(up),
        down_bytes=max(down),
        busy_s=busy,
        timeline=timeline,
    )


def _payloads(profile: JobProfile, chosen: StepOptions) -> tuple[float, float, float]:
    """Bytes of a push, and of an update made of one; what processors take for both, at both ends."""
    sent, costs = chosen.compressor, profile.costs
    down = sent.down(1)
    up_bytes = sum(map(sent.up.sent_bytes, profile.shapes))
    down_bytes = sum(map(down.sent_bytes, profile.shapes))
    encode_s = sum(profile.elements) * (costs.gradient_s + sent.element_s)
    return up_bytes, down_bytes, encode_s + (up_bytes + down_bytes) * 2 * costs.byte_s


def _local(profile: JobProfile, chosen: StepOptions) -> Prediction:
    text, _, rest = chosen.mode.partition("steps=")[2].partition(",")
    if not text.isdecimal() or not int(text) or rest not in ("", "delayed=on"):
        raise ValueError(
            f"mode: expected local:steps=H with a number H, or local:steps=H,delayed=on, got {chosen.mode!r}"
        )
    steps = int(text)
    whole = predict(profile, replace(chosen, mode="sync", overlap="off"))
    exchange_s = (whole.step_s - profile.computation_s) / steps
    return replace(
        whole,
        choice=replace(chosen, overlap="off"),
        step_s=max(profile.computation_s, exchange_s) if rest else profile.computation_s + exchange_s,
        up_bytes=whole.up_bytes / steps,
        down_bytes=whole.down_bytes / steps,
        busy_s={
            what: seconds if what == "computing" else seconds / steps
            for what, seconds in whole.busy_s.items()
        },
        timeline=None,
    )


def _alone(profile: JobProfile, chosen: StepOptions) -> Prediction:
    """Of as many pushes as there are workers: each has one step, and all the updates."""
    up_bytes, down_bytes, processor_s = _payloads(profile, chosen)
    workers, elements = profile.workers, sum(profile.elements)
    per_worker = min(workers * down_bytes, 4 * elements)
    server_s = elements * (profile.costs.update_s + profile.costs.reduce_s) * workers / profile.servers
    own = (
        profile.computation_s
        + (up_bytes + down_bytes) * max(profile.worker_byte_s, profile.server_byte_s)
        + 2 * profile.rtt_s
        + processor_s
        + profile.costs.step_s
    )
    busy = {
        "computing": profile.computation_s,
        "way up": max(workers / profile.servers * profile.server_byte_s, profile.worker_byte_s) * up_bytes,
        "way down": max(workers / profile.servers * profile.server_byte_s, profile.worker_byte_s)
        * per_worker,
        "server": server_s,
        "processors": (workers * processor_s + server_s) / (profile.cores or workers),
    }
    return Prediction(
        choice=replace(chosen, overlap="off", fusion="bytes", order="fifo"),
        step_s=max(own, *busy.values()),
        parts=1,
        up_bytes=workers * up_bytes / profile.servers,
        down_bytes=workers * per_worker / profile.servers,
        busy_s=busy,
    )


def _coded(profile: JobProfile, chosen: StepOptions) -> Prediction:
    """Formulas of docs/explanation/coded.md, in gradients of the model."""
    n, text = profile.workers, chosen.mode.partition("redundancy=")[2]
    r = int(text) if text.isdecimal() else 0
    if not 1 <= r < n:
        raise ValueError(f"mode: expected coded:redundancy=R with R from 1 to {n - 1}, got {chosen.mode!r}")
    size = 4 * sum(profile.elements)
    up = math.comb(n, r + 1) * (r + 1) / r * size
    down = math.comb(n, r) * (n - r) * size
    processor_s = 2 * (up + down) * profile.costs.byte_s
    busy = {
        "computing": r * profile.computation_s,
        "way up": max(up * profile.server_byte_s, up / n * profile.worker_byte_s),
        "way down": max(down * profile.server_byte_s, down / n * profile.worker_byte_s),
        "server": 0.0,
        "processors": processor_s / (profile.cores or n),
    }
    exchange = max(busy["way up"], busy["way down"], busy["processors"])
    step_s = busy["computing"] + exchange + 2 * profile.rtt_s + profile.costs.step_s
    choice = StepOptions(mode=chosen.mode, overlap="off")
    return Prediction(choice=choice, step_s=step_s, parts=1, up_bytes=up, down_bytes=down, busy_s=busy)


def _ring(profile: JobProfile, chosen: StepOptions) -> Prediction:
    value_bytes = {"ring fp32": 4, "ring fp16": 2}[chosen.mode]
    carried = 2 * (profile.workers - 1) / profile.workers * value_bytes * sum(profile.elements)
    backward_s = sum(profile.backward_s)
    busy = {"computing": profile.computation_s, "way up": carried * profile.worker_byte_s}
    latency = 2 * (profile.workers - 1) * profile.rtt_s / 2
    step_s = sum(profile.forward_s) + max(backward_s, busy["way up"]) + latency
    choice = StepOptions(mode=chosen.mode, overlap="backward")
    return Prediction(
        choice=choice, step_s=step_s, parts=1, up_bytes=carried, down_bytes=carried, busy_s=busy
    )


SLOWEST = 1e4  # bytes per second: no link that anybody trains over is slower
HALVINGS = 14  # of the range between the slowest link and the fastest: to within a few percent


def break_even(profile: JobProfile, chosen: StepOptions, *, taken_s: float, plain_s: float) -> float:
    """Return the bandwidth below which a compressor makes steps shorter, of every machine's link.

    Without the limit of a link a step takes what was measured. What a link adds to it is predicted.

    Args:
        profile: of the job. Its bandwidths do not matter; each worker counts as a machine of its own.
        chosen: how it runs, with the compressor.
        taken_s: measured seconds of a step, without the limit of a link.
        plain_s: likewise, without compression.

    Returns:
        Bytes per second in each direction; 0 if the compressor pays on no link, infinity if it pays on all.

    Raises:
        ValueError: nothing is known of the mode, the fusion or the order.
    """
    plain = replace(chosen, compressor=NONE)

    def added_s(way: StepOptions, bandwidth: float) -> float:
        apart = replace(profile, worker_bandwidth=bandwidth, server_bandwidth=bandwidth, cores=None)
        return predict(apart, way).step_s

    fixed_s = (taken_s - added_s(chosen, FASTEST)) - (plain_s - added_s(plain, FASTEST))

    def loses(bandwidth: float) -> bool:
        return added_s(chosen, bandwidth) - added_s(plain, bandwidth) + fixed_s >= 0

    if loses(SLOWEST):
        return 0.0
    if not loses(FASTEST):
        return math.inf
    low, high = SLOWEST, FASTEST
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if loses(middle) else (middle, high)
    return math.sqrt(low * high)


def rank(profile: JobProfile, compressors: Sequence[CompressionCosts]) -> list[Prediction]:
    """Every way that is worth a look, the fastest first.

    Of each compressor: each overlap; with the best of these each fusion, and with the best of those each
    order; slices, local steps, and pushes that are applied by themselves.
    """
    found: dict[StepOptions, Prediction] = {}
    for compressor in compressors:
        for choices in _rounds(profile, compressor, found):
            for choice in choices:
                if choice not in found:
                    found[choice] = predict(profile, choice)
    for mode in ("coded:redundancy=1", f"coded:redundancy={profile.workers - 1}"):
        if 2 <= profile.workers <= 16:
            choice = StepOptions(mode=mode, overlap="off")
            found[choice] = predict(profile, choice)
    for mode in ("ring fp32", "ring fp16"):
        if profile.workers > 1:
            found[StepOptions(mode=mode)] = predict(profile, StepOptions(mode=mode))
    return sorted(found.values(), key=lambda each: each.step_s)


def _rounds(
    profile: JobProfile, compressor: CompressionCosts, found: Mapping[StepOptions, Prediction]
) -> Iterator[list[StepOptions]]:
    """Choices to look at; what was found of them is in `found` when the next ones are asked for."""

    def best() -> StepOptions:
        ours = [each for choice, each in found.items() if choice.compressor == compressor]
        return min((each for each in ours if each.choice.mode == "sync"), key=lambda each: each.step_s).choice

    first = StepOptions(compressor=compressor)
    overlaps: tuple[Overlap, ...] = ("backward", "both", "off")
    yield [replace(first, overlap=overlap) for overlap in overlaps]
    yield [replace(best(), fusion=fusion) for fusion in Merging]
    fused = found[best()]
    if fused.parts > 1 and profile.computation_s >= LEAST_COMPUTING * fused.step_s:
        many = fused.parts > MOST_TO_SEARCH
        orders = [order for order in Ordering if not (many and order is Ordering.TWO_PHASE)]
        yield [replace(fused.choice, order=order) for order in orders]
    copies = [r for r in (2, 4) if profile.workers % r == 0 and r <= profile.workers]
    yield [replace(first, mode=f"sync:redundancy={r}") for r in copies]
    others = ["local:steps=8"] if profile.workers > 1 else []
    yield [replace(first, mode=mode, overlap="off") for mode in (*others, "stale")]


# A step may be so much longer than the fastest if less is lost of the gradients, or less is unusual.
WORTH = 0.03


def recommend(ranked: Sequence[Prediction]) -> Prediction:
    """Of the sync ways the fastest; of those that take about as long, the one that sends most of a gradient,
    and then the one that is nearest to the defaults."""
    ours = [each for each in ranked if each.choice.mode.startswith("sync")]
    least = min(each.step_s for each in ours)

    def unusual(each: Prediction) -> int:
        first = StepOptions(compressor=each.choice.compressor)
        fields = "mode", "overlap", "fusion", "order"
        return sum(getattr(each.choice, name) != getattr(first, name) for name in fields)

    near = [each for each in ours if each.step_s <= (1 + WORTH) * least]
    most = max(each.choice.compressor.up.element_bytes for each in near)
    exact = [each for each in near if each.choice.compressor.up.element_bytes == most]
    return min(exact, key=lambda each: (unusual(each), each.step_s))
