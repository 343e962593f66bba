"""Predictions of the time of a step, for each combination of choices; and the bandwidth below which a
compressor pays.

`rank` predicts and sorts all sensible choices for a profile, and `break_even` computes that bandwidth. The
plan is the one that a server would make (`plans`). Profiles come from a model's table (`models`), or from the
measurements of a running server (`deploy/live`).

A step of a sync job, with slices (`sync:redundancy=R`) too, is simulated (`step`). The other modes do not
pass part by part through a server, and have formulas:

    local:steps=H:  H - 1 steps of computation and one simulated step of sync with the same overlap, divided
                    by H. With fragments=F the exchange but for a round trip, and its bytes, are divided by F,
                    too. With delayed=on, where the exchange runs beside the steps, the longer of both.
    stale, async:   each push is applied by itself. A worker's own step is computation, one push and one
                    update. All steps together take at least the time of the links. Each worker downloads the
                    update of every push, or a snapshot where that is smaller.
    coded:          r times the computation, and the packets of float32 that docs/explanation/coded.md counts,
                    uploaded and downloaded at the same time. There is no compressor, and only r = 1 and
                    r = workers - 1 are ranked.
    torch ddp, gradwire.ddp:    `ddp` has their formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..common.spec import parse_spec
from ..compressors.sizes import NONE, CompressionCosts
from .choices import Merging, Ordering
from .ddp import GATHER, OURS, OWNERS, TORCH, predict_ddp, without_server
from .job import FASTEST, JobProfile, StepOptions, packed, work_of
from .step import Overlap, Timeline, simulate

MOST_TO_SEARCH = 64  # number of parts up to which two-phase is ranked: its search takes time O(parts ** 3)
LEAST_COMPUTING = 0.02  # fraction of a step spent computing, from which the order of parts may matter


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted time of a step, and its causes.

    Attributes:
        choice: the choices for which it holds.
        up_bytes, down_bytes: bytes on the server's link per step; without a server, on each rank's.
        busy_s: seconds per step that each resource would take alone: "computing", "way up" (the upload),
            "server", "way down" (the download) and "processors" (their work besides computing).
        timeline: the simulated step; None if a formula made the prediction.
    """

    choice: StepOptions
    step_s: float
    parts: int
    up_bytes: float
    down_bytes: float
    busy_s: Mapping[str, float]
    timeline: Timeline | None = None

    @property
    def synchronous(self) -> bool:
        """True if each version takes the mean gradient of a whole batch, so that compression alone changes
        how a sample is learned from."""
        return self.choice.mode.startswith(("sync", "coded", TORCH, OURS))

    @property
    def bottleneck(self) -> str:
        """Key of `busy_s` with the largest value."""
        return max(self.busy_s, key=self.busy_s.__getitem__)


def predict(profile: JobProfile, chosen: StepOptions) -> Prediction:
    """Predict the time of a step for one combination of choices; where workers step independently, of one
    worker.

    Raises:
        ValueError: the mode cannot be predicted, or the choices do not go together.
    """
    if chosen.mode in (TORCH, GATHER, OWNERS):
        return _ddp(profile, chosen)
    if chosen.mode.startswith("coded"):
        return _coded(profile, chosen)
    if chosen.mode.startswith("local"):
        return _local(profile, chosen)
    if chosen.mode in ("stale", "async") or chosen.mode.startswith("stale:bound="):
        return _alone(profile, chosen)
    name, _, options = chosen.mode.partition(":")
    if name != "sync" or (options and not options.startswith("redundancy=")) or "," in options:
        raise ValueError(f"mode: no prediction for {chosen.mode}; take a mode that gc-plan lists")
    if profile.workers % chosen.redundancy:
        raise ValueError(
            f"redundancy: expected a divisor of {profile.workers} workers, got {chosen.redundancy}"
        )
    if chosen.overlap == "both" and chosen.redundancy > 1:
        raise ValueError("overlap: both is only possible without redundancy; take backward")
    work, place = work_of(profile, chosen)
    timeline = simulate(work, place)
    up = sum(piece.pushes * piece.up_bytes for piece in work.pieces)
    down = sum(work.workers * piece.down_bytes for piece in work.pieces)
    busy = {
        "computing": chosen.redundancy * profile.computation_s,
        "way up": up * profile.server_byte_s,
        "way down": down * profile.server_byte_s,
        "server": timeline.busy_s("server"),
    }
    slowest = 1 / profile.workers if profile.cores is None else 1 / profile.cores
    busy["processors"] = timeline.cpu_s * slowest
    return Prediction(
        choice=chosen,
        step_s=timeline.step_s,
        parts=len(work.pieces),
        up_bytes=up,
        down_bytes=down,
        busy_s=busy,
        timeline=timeline,
    )


def _payloads(profile: JobProfile, chosen: StepOptions) -> tuple[float, float, float]:
    """Return the bytes of a push, the bytes of an update made of one push, both as sent, and the processor
    seconds for both, with encoding and both ends of the connections."""
    sent, costs = chosen.compressor, profile.costs
    down = sent.down(1)
    (up_bytes, up_s), (down_bytes, down_s) = (
        packed(profile, chosen, coding, sum(map(coding.sent_bytes, profile.shapes)))
        for coding in (sent.up, down)
    )
    encode_s = sum(profile.elements) * (costs.gradient_s + sent.element_s) + 2 * (up_s + down_s)
    return up_bytes, down_bytes, encode_s + (up_bytes + down_bytes) * 2 * costs.byte_s


# Options of modes that affect the time of a step.
OPTIONS = frozenset({"steps", "delayed", "fragments", "redundancy"})


def predictable(mode: str) -> str:
    """Return the spec of a mode without the options that do not affect the time of a step."""
    spec = parse_spec("mode", mode)
    options = {key: value for key, value in spec.options.items() if key in OPTIONS}
    return str(replace(spec, options=options))


def _local(profile: JobProfile, chosen: StepOptions) -> Prediction:
    """Predict `local:steps=H`, with or without `delayed=on` and `fragments=F`."""
    options = parse_spec("mode", chosen.mode).options
    steps, fragments = options.get("steps", ""), options.get("fragments", "1")
    numbers = all(text.isdecimal() and int(text) for text in (steps, fragments))
    if not numbers or not options.keys() <= {"steps", "delayed", "fragments"}:
        raise ValueError(
            "mode: expected local:steps=H with a number H, delayed=on and fragments=F or not, and nothing "
            f"else, got {chosen.mode!r}"
        )
    delayed = options.get("delayed") == "on"
    exchanges = 1 / (int(steps) * min(int(fragments), len(profile.shapes)))  # of the whole model, for a step
    overlap = "off" if delayed else chosen.overlap
    whole = predict(profile, replace(chosen, mode="sync", overlap=overlap))
    exchange_s = whole.step_s - profile.computation_s
    latency_s = min(profile.rtt_s, exchange_s)  # of each round
    exchange_s = (exchange_s - latency_s) * exchanges + latency_s / int(steps)
    return replace(
        whole,
        choice=replace(chosen, overlap=overlap),
        step_s=max(profile.computation_s, exchange_s) if delayed else profile.computation_s + exchange_s,
        up_bytes=whole.up_bytes * exchanges,
        down_bytes=whole.down_bytes * exchanges,
        busy_s={
            what: seconds if what == "computing" else seconds * exchanges
            for what, seconds in whole.busy_s.items()
        },
        timeline=None,
    )


def _alone(profile: JobProfile, chosen: StepOptions) -> Prediction:
    """Predict `stale` and `async`: each worker takes one step, and receives the updates of all workers'
    pushes."""
    up_bytes, down_bytes, processor_s = _payloads(profile, chosen)
    workers, elements = profile.workers, sum(profile.elements)
    per_worker = min(workers * down_bytes, 4 * elements)
    server_s = elements * (profile.costs.update_s + profile.costs.reduce_s) * workers
    own = (
        profile.computation_s
        + (up_bytes + down_bytes) * max(profile.worker_byte_s, profile.server_byte_s)
        + 2 * profile.rtt_s
        + processor_s
        + profile.costs.step_s
    )
    busy = {
        "computing": profile.computation_s,
        "way up": max(workers * profile.server_byte_s, profile.worker_byte_s) * up_bytes,
        "way down": max(workers * profile.server_byte_s, profile.worker_byte_s) * per_worker,
        "server": server_s,
        "processors": (workers * processor_s + server_s) / (profile.cores or workers),
    }
    return Prediction(
        choice=replace(chosen, overlap="off", fusion="bytes", order="fifo"),
        step_s=max(own, *busy.values()),
        parts=1,
        up_bytes=workers * up_bytes,
        down_bytes=workers * per_worker,
        busy_s=busy,
    )


def _coded(profile: JobProfile, chosen: StepOptions) -> Prediction:
    """Predict `coded:redundancy=R` by the formulas of docs/explanation/coded.md, which count in gradients of
    the model."""
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


def _ddp(profile: JobProfile, chosen: StepOptions) -> Prediction:
    """Predict a step without a server; its bytes are those on each rank's link."""
    found = predict_ddp(profile, chosen)
    busy = {
        "computing": profile.computation_s,
        "way up": found.link_s,
        "processors": found.processors_s,
    }
    carried = found.carried_bytes
    return Prediction(
        choice=chosen, step_s=found.step_s, parts=1, up_bytes=carried, down_bytes=carried, busy_s=busy
    )


SLOWEST = 1e4  # bytes per second of the slowest link considered
HALVINGS = 14  # bisections between the slowest link and the fastest: accurate to a few percent


def break_even(profile: JobProfile, chosen: StepOptions, *, taken_s: float, plain_s: float) -> float:
    """Return the bandwidth of every machine's link below which a compressor makes steps shorter.

    The time of a step without the limit of a link is measured; the time that a link adds to it is predicted.

    Args:
        profile: measurements of the job. Its bandwidths are ignored, and each worker counts as a machine of
            its own.
        taken_s, plain_s: measured seconds of a step without the limit of a link, and without compression.

    Returns:
        Bytes per second in each direction; 0 if the compressor pays on no link, infinity if it pays on all.

    Raises:
        ValueError: the mode, the fusion or the order cannot be predicted.
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
    """Predict all combinations of choices that may be worthwhile; return the predictions, the fastest first.

    For each compressor: each overlap; with the best overlap each fusion; with the best of those each order;
    slices; local steps; pushes that are applied by themselves; `gradwire.ddp`. Coded modes and torch's hooks
    are added once.
    """
    found: dict[StepOptions, Prediction] = {}

    def best(*choices: StepOptions) -> StepOptions:
        """Predict choices, and return the fastest; of equally fast ones the first."""
        for choice in choices:
            if choice not in found:
                found[choice] = predict(profile, choice)
        return min(choices, key=lambda choice: found[choice].step_s)

    overlaps: tuple[Overlap, ...] = ("backward", "both", "off")
    for compressor in compressors:
        first = StepOptions(compressor=compressor)
        chosen = best(*(replace(first, overlap=overlap) for overlap in overlaps))
        chosen = best(chosen, *(replace(chosen, fusion=fusion) for fusion in Merging))
        fused = found[chosen]
        if fused.parts > 1 and profile.computation_s >= LEAST_COMPUTING * fused.step_s:
            many = fused.parts > MOST_TO_SEARCH
            orders = [order for order in Ordering if not (many and order is Ordering.TWO_PHASE)]
            best(*(replace(fused.choice, order=order) for order in orders))
        if compressor.up.coordinates is not None:  # bases are for whole pushes at the newest version
            continue
        modes = [f"sync:redundancy={r}" for r in (2, 4) if profile.workers % r == 0]
        ways = [replace(first, mode=mode) for mode in modes]
        if profile.workers > 1:
            ways += [replace(first, mode="local:steps=8", overlap=overlap) for overlap in overlaps]
        best(*ways, replace(first, mode="stale", overlap="off"))
    if 2 <= profile.workers <= 16:
        redundancies = (1, profile.workers - 1)
        best(*(StepOptions(mode=f"coded:redundancy={r}", overlap="off") for r in redundancies))
    if profile.workers > 1:
        best(*without_server(profile, compressors))
    return sorted(found.values(), key=lambda each: each.step_s)


def faster_than(chosen: Prediction, ranked: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest of all modes, the fastest of sync modes and the fastest without a server, as far as
    they are faster than `chosen`.

    ranked: all predictions, the fastest first.
    """
    alone = [each for each in ranked if each.choice.without_server]
    ours = [each for each in ranked if not each.choice.without_server]
    in_sync = next(each for each in ours if each.choice.mode.startswith("sync"))
    fastest = [ours[0], *([] if ours[0] is in_sync else [in_sync]), *alone[:1]]
    return [each for each in fastest if each.step_s < chosen.step_s]


# A recommended step may be longer than the fastest by this fraction, if it sends more of the gradients or is
# closer to the defaults.
WORTH = 0.03


def recommend(ranked: Sequence[Prediction]) -> Prediction:
    """Return the prediction to recommend among those of sync modes.

    Of those that are at most a few percent slower than the fastest, it prefers those that send the most of a
    gradient, then the fewest settings that differ from the defaults.
    """
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
