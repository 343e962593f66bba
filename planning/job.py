"""A job as planners know it: its measurements, the choices that are open, and the work of a step under both.

A `JobProfile` holds measurements: the tensors, the time that they take to compute, links, workers,
and the costs of processors. `StepOptions` holds choices: compressor, mode, overlap, fusion and order.
`work_of` computes from both the work of a step, which `step` simulates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..common.parts import Plan
from ..compressors.sizes import (
    LEAST_PACKED_BYTES,
    LEAST_SAVED,
    NONE,
    PACKING_BYTES_PER_S,
    PACKING_START_S,
    CompressionCosts,
    TensorCoding,
)
from .choices import parse_fusion, parse_order
from .fusion import Reason, reasons
from .plans import make_plan
from .profile import Layer, Link, layers_of
from .step import Overlap, Piece, StepResources, StepWork, UnitWork

# Bytes on a link per byte of payload: headers of gRPC, HTTP/2, TCP, IP and Ethernet, in frames of 1500 bytes.
FRAMING = 1.055
FASTEST = 1e12  # bytes per second of a link that takes negligible time
# TCP does not share a link equally. The first worker has its update before the last one by this fraction of
# the download time, and pushes while other workers wait. Measured with two to eight workers: 0.1 to 0.5.
UNEVEN = 0.35
# Bytes of a part's header, and of the header of each payload in it.
PART_BYTES, PAYLOAD_BYTES = 60, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Processor times of the work besides forward, backward and compressing, in seconds of one core.

    A run is a group of neighbouring tensors that take one compressor call. The defaults were measured on the
    machine of docs/explanation/performance.md; docs/how-to/planning.md describes how.

    Attributes:
        gradient_s, apply_s: worker's time per element for handing on a gradient, and for applying an update.
        reduce_s, update_s: server's time per element for adding a push, and for the optimizer's step and
            encoding the update.
        tensor_s: worker's time per tensor.
        worker_run_s, server_run_s: time per run: the worker's both ways together, the server's of a push.
        part_s, byte_s: time per part and byte at either end of a connection.
        step_s: fixed time of a step.
        early_s: worker's time per tensor if a forward pass may have to wait for the tensor.
        expand_s: time per element for expanding mean coordinates, at the server and at each worker.
    """

    gradient_s: float = 6.5e-9
    apply_s: float = 0.015e-9
    reduce_s: float = 0.06e-9
    update_s: float = 0.13e-9
    tensor_s: float = 110e-6
    worker_run_s: float = 500e-6
    server_run_s: float = 52e-6
    part_s: float = 340e-6
    byte_s: float = 1.35e-9
    step_s: float = 7e-3
    early_s: float = 200e-6
    expand_s: float = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProfile:
    """The measurements of a job: its model, its links and its processors.

    Attributes:
        shapes: shape of each tensor, in forward order.
        forward_s, backward_s: seconds of each tensor's passes on one worker.
        worker_bandwidth, server_bandwidth: bytes per second of the link, in each direction.
        rtt_s: seconds of a round trip between a worker and the server.
        start_s: seconds that a part takes of a link however short it is.
        cores: number of cores of the machine that all processes share; None if each process has a machine.
        on_cores: fraction of the computation that keeps these cores busy; the rest is a GPU's, or emulated.
        square_norms: squared norm of each gradient, summed over the workers; empty or all 0 if not known.
    """

    shapes: Sequence[tuple[int, ...]]
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    worker_bandwidth: float
    server_bandwidth: float
    workers: int
    rtt_s: float = 0.0
    start_s: float = 0.2e-3
    cores: int | None = None
    on_cores: float = 0.0
    square_norms: Sequence[float] = ()
    costs: Costs = field(default_factory=Costs)

    @property
    def elements(self) -> list[int]:
        """Number of elements of each tensor, in forward order."""
        return list(map(math.prod, self.shapes))

    @property
    def computation_s(self) -> float:
        """Seconds of forward and backward together, on one worker."""
        return sum(self.forward_s) + sum(self.backward_s)

    @property
    def server_byte_s(self) -> float:
        """Seconds of a server's link per byte of payload, in one direction."""
        return FRAMING / self.server_bandwidth

    @property
    def worker_byte_s(self) -> float:
        """Seconds of a worker's link per byte of payload, in one direction."""
        return FRAMING / self.worker_bandwidth


def bandwidth_of(link: Link, workers: int) -> float:
    """Return the bytes per second of a link that a server has measured while all workers sent at once.

    It is not known which link on the path is the slowest: a profile assumes the server's.
    """
    return FRAMING * workers / link.byte_s if link.byte_s else FASTEST


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """The choices by which a step is taken, as in the options of these names.

    Attributes:
        mode: mode of a server; or one of those of `ddp`, without a server.
        entropy: "auto", "on" or "off".
        part_bytes: size of the largest part as float32, in bytes; 0 for the default.
    """

    compressor: CompressionCosts = NONE
    mode: str = "sync"
    overlap: Overlap = "backward"
    fusion: str = "bytes"
    order: str = "fifo"
    part_bytes: int = 0
    entropy: str = "auto"

    @property
    def without_server(self) -> bool:
        return "ddp" in self.mode

    @property
    def redundancy(self) -> int:
        """Number of workers that compute each sample in mode `sync:redundancy=R`; 1 in all other modes."""
        return int(self.mode.partition("redundancy=")[2] or 1) if self.mode.startswith("sync") else 1


def plan_of(profile: JobProfile, chosen: StepOptions) -> Plan:
    """Return the plan that a server with these measurements would make."""
    sent = chosen.compressor
    return make_plan(
        profile.elements,
        parse_fusion(chosen.fusion),
        parse_order(chosen.order),
        layers=_layers(profile, chosen),
        link=_shared_link(profile),
        part_bytes=chosen.part_bytes,
        slices=chosen.redundancy,
        least_bytes=sent.least_part_bytes,
        uncut=sent.up.uncut(profile.shapes),
    )


def seamgs_reasons(profile: JobProfile, chosen: StepOptions) -> list[Reason | None]:
    """Return for each tensor but the last why `--fusion seamgs` would not merge it with the next one; None
    where it would."""
    return reasons(_layers(profile, chosen), _shared_link(profile))


def _shared_link(profile: JobProfile) -> Link:
    """Return the link to the server with all workers sending, as the planners of fusion and order take it."""
    return Link(
        # However fast the link is, the server receives a part from each worker, one after another.
        start_s=max(profile.start_s, profile.workers * profile.costs.part_s),
        byte_s=profile.workers * profile.server_byte_s,
    )


def _layers(profile: JobProfile, chosen: StepOptions) -> list[Layer]:
    """Return the model's layers, as the planners of fusion and order take them."""
    sent = chosen.compressor
    return layers_of(
        profile.elements,
        [sent.up.density if sent.up.carries(shape) else 1.0 for shape in profile.shapes],
        sent_bytes=[
            packed(profile, chosen, sent.up, sent.up.sent_bytes(shape))[0] for shape in profile.shapes
        ],
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        square_norms=profile.square_norms if any(profile.square_norms) else (),
    )


def packed(
    profile: JobProfile, chosen: StepOptions, coding: TensorCoding, size: float
) -> tuple[float, float]:
    """Return the bytes of a part in this coding as it is sent, and the seconds in which one end packs or
    unpacks it; 0 where it leaves as it is.

    size: bytes of the part before packing.
    """
    saved, taken_s = (1 - coding.packed) * size, PACKING_START_S + size / PACKING_BYTES_PER_S
    byte_s = max(profile.worker_byte_s, profile.workers * profile.server_byte_s)
    pays = chosen.entropy == "on" or (chosen.entropy == "auto" and saved * byte_s > taken_s)
    if not pays or size < LEAST_PACKED_BYTES or coding.packed > 1 - LEAST_SAVED:
        return size, 0.0
    return size - saved, taken_s


def work_of(profile: JobProfile, chosen: StepOptions) -> tuple[StepWork, StepResources]:
    """Return the work of one step of a sync job, and the resources on which it runs, both for
    `step.simulate`."""
    sent = chosen.compressor
    plan = plan_of(profile, chosen)
    copies = chosen.redundancy
    pushes = profile.workers // copies
    down = sent.down(pushes)
    costs = profile.costs
    early = chosen.overlap == "both"
    batches, pieces = list[UnitWork](), list[Piece]()
    for number, unit in enumerate(plan.units):
        shapes = profile.shapes[unit.first : unit.last]
        elements, parts = unit.end - unit.start, len(unit.parts)
        runs = 1 if plan.merged and sent.merges else sent.up.runs(shapes)
        up_bytes = sum(map(sent.up.sent_bytes, shapes)) + PAYLOAD_BYTES * max(parts, runs)
        down_bytes = sum(map(down.sent_bytes, shapes)) + PAYLOAD_BYTES * max(parts, down.runs(shapes))
        # A sparse update is stepped and applied only at the elements that it holds.
        held = sum(math.prod(shape) * (down.density if down.carries(shape) else 1.0) for shape in shapes)
        expanded = sum(math.prod(shape) for shape in shapes if sent.up.coordinates and sent.up.carries(shape))
        pushed = pushes * (elements * sent.up.density * costs.reduce_s + runs * costs.server_run_s)
        pushed += expanded * costs.expand_s
        taken = held * costs.apply_s + early * len(shapes) * costs.early_s + expanded * costs.expand_s
        encode_s = elements * (costs.gradient_s + sent.element_s)
        encode_s += len(shapes) * costs.tensor_s + runs * costs.worker_run_s
        backward = slice(unit.first, unit.last)
        if sent.whole:  # charge all of backward to the first unit, so that every unit waits for it
            backward = slice(0, 0) if number else slice(None)
        batches.append(
            UnitWork(
                parts=unit.parts,
                backward_s=copies * sum(profile.backward_s[backward]),
                forward_s=copies * sum(profile.forward_s[unit.first : unit.last]),
                encode_s=encode_s / copies,
            )
        )
        for part in unit.parts:
            share = plan.parts[part].elements / max(1, elements)
            up_part, up_packing_s = packed(profile, chosen, sent.up, share * up_bytes)
            down_part, down_packing_s = packed(profile, chosen, down, share * down_bytes)
            pieces.append(
                Piece(
                    unit=number,
                    up_bytes=PART_BYTES + up_part,
                    down_bytes=PART_BYTES + down_part,
                    up_packing_s=up_packing_s,
                    down_packing_s=down_packing_s,
                    pushes=pushes,
                    server_s=share * (held * costs.update_s + pushed),
                    apply_s=share * taken,
                    turn=plan.turns[part] if plan.turns else part,
                )
            )
    work = StepWork(
        batches=batches,
        pieces=pieces,
        workers=profile.workers,
        overlap=chosen.overlap,
        early=early,
        credit=plan.credit,
        # As many cores as the workers kept busy when forward_s and backward_s were measured.
        computing_cores=profile.on_cores * min(profile.workers, profile.cores or profile.workers),
    )
    place = StepResources(
        server=Link(start_s=profile.start_s, byte_s=profile.server_byte_s),
        worker=Link(start_s=0.0, byte_s=profile.worker_byte_s),
        rtt_s=profile.rtt_s,
        byte_s=costs.byte_s,
        part_s=costs.part_s,
        step_s=costs.step_s,
        cores=profile.cores,
        uneven=UNEVEN if profile.workers * profile.server_byte_s > profile.worker_byte_s else 0.0,
    )
    return work, place
