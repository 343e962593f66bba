"""A job as planners know it: what it has to compute and to send, and what can be decided about that.

A profile is what is known: its tensors and what they take to compute, links, workers, servers, and what
processors take for the rest. A choice is what can be decided: compressor, mode, overlap, which tensors travel
together, and in which order. `work_of` makes of both the work of a step (`step`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .choices import parse_fusion, parse_order
from .compression import NONE, CompressionCosts
from .parts import Plan
from .plans import make_plan
from .profile import Layer, Link, layers_of
from .step import Overlap, Piece, StepResources, StepWork, UnitWork

# Bytes on a link for each of a payload: headers of gRPC, HTTP/2, TCP, IP and Ethernet, in frames of 1500.
FRAMING = 1.055
FASTEST = 1e12  # bytes per second, of a link that takes no time that counts
# TCP does not share a link equally: the first worker has its update before the last by this share of the way
# down, and pushes while the others wait. Between 0.1 and 0.5 was measured, of two to eight workers.
UNEVEN = 0.35
# Of what a part is announced with, and of each payload in it.
PART_BYTES, PAYLOAD_BYTES = 60, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What processors take, in seconds: of an element, a run of neighbouring tensors that take one call, a
    part, a byte, a step. The figures are of one core of the machine of docs/explanation/performance.md; docs/how-to/planning.md
    says how they were found.

    Attributes:
        gradient_s: a worker, to hand on an element beside compressing it. apply_s: to take one in.
        reduce_s: the server, to add an element of a push. update_s: to step one and encode it.
        tensor_s: a worker, for a tensor. worker_run_s: for a run, up and down.
        server_run_s: the server, for one of a push.
        part_s, byte_s: either end of a connection, for what it sends or receives.
        step_s: all that a step takes whatever it has.
        early_s: a worker, for a tensor that a forward pass may have to wait for.
    """

    gradient_s: float = 6.5e-9
    apply_s: float = 0.015e-9
    reduce_s: float = 0.06e-9
    update_s: float = 0.13e-9
    tensor_s: float = 110e-6
    worker_run_s: float = 670e-6
    server_run_s: float = 52e-6
    part_s: float = 340e-6
    byte_s: float = 1.35e-9
    step_s: float = 11.4e-3
    early_s: float = 200e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProfile:
    """What is known of a job.

    Attributes:
        shapes: of its tensors, in forward order.
        forward_s, backward_s: of each, on one worker.
        square_norms: of each gradient, summed over the workers; empty if that is not known.
        groups: parameter group of each; all of one if empty.
        worker_bandwidth, server_bandwidth: bytes per second, in each direction.
        start_s: that a part takes of a link, however short it is.
        rtt_s: of a round trip between a worker and a server.
        cores: of the one machine that all processes are on; None for a machine for each.
        on_cores: the share of the computation that takes them; the rest is a GPU's, or emulated.
    """

    shapes: Sequence[tuple[int, ...]]
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    worker_bandwidth: float
    server_bandwidth: float
    workers: int
    servers: int = 1
    rtt_s: float = 0.0
    start_s: float = 0.2e-3
    cores: int | None = None
    on_cores: float = 0.0
    square_norms: Sequence[float] = ()
    groups: Sequence[int] = ()
    costs: Costs = field(default_factory=Costs)

    @property
    def elements(self) -> list[int]:
        return list(map(math.prod, self.shapes))

    @property
    def computation_s(self) -> float:
        return sum(self.forward_s) + sum(self.backward_s)

    @property
    def server_byte_s(self) -> float:
        return FRAMING / self.server_bandwidth

    @property
    def worker_byte_s(self) -> float:
        return FRAMING / self.worker_bandwidth


def observed(
    shapes: Sequence[tuple[int, ...]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    link: Link,
    workers: int,
    rtt_s: float = 0.0,
    cores: int | None = None,
    on_cores: float = 0.0,
    square_norms: Sequence[float] = (),
    groups: Sequence[int] = (),
) -> JobProfile:
    """The profile of a job that runs.

    link: as a server has measured it while all workers sent. Which of the links on the way limits what comes
    is not known: it is taken to be the server's.
    """
    rate = FRAMING * workers / link.byte_s if link.byte_s else FASTEST
    return JobProfile(
        shapes=shapes,
        forward_s=forward_s,
        backward_s=backward_s,
        worker_bandwidth=rate,
        server_bandwidth=rate,
        workers=workers,
        rtt_s=rtt_s,
        start_s=link.start_s,
        cores=cores,
        on_cores=on_cores,
        square_norms=square_norms if any(square_norms) else (),
        groups=groups,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """How a step is taken. mode: as --mode has it; "ring fp32" and "ring fp16" for comparison. part_bytes: of
    the largest part, as float32; 0 for the default."""

    compressor: CompressionCosts = NONE
    mode: str = "sync"
    overlap: Overlap = "backward"
    fusion: str = "bytes"
    order: str = "fifo"
    part_bytes: int = 0

    @property
    def redundancy(self) -> int:
        return int(self.mode.partition("redundancy=")[2] or 1) if self.mode.startswith("sync") else 1


def plan_of(profile: JobProfile, chosen: StepOptions) -> Plan:
    """How the model is divided, and in which order parts travel: as a server does it that has measured this
    profile. Raises SpecError for a fusion or an order that is not known."""
    sent = chosen.compressor
    return make_plan(
        profile.elements,
        parse_fusion(chosen.fusion),
        parse_order(chosen.order),
        layers=_layers(profile, sent),
        link=Link(
            # However fast the link is, the server takes a part in from each worker, one after the other.
            start_s=max(profile.start_s, profile.workers * profile.costs.part_s),
            byte_s=profile.workers * profile.server_byte_s,
        ),
        part_bytes=chosen.part_bytes,
        slices=chosen.redundancy,
        groups=profile.groups,
        least_bytes=sent.least_part_bytes,
    )


def _layers(profile: JobProfile, sent: CompressionCosts) -> list[Layer]:
    """Return the model's layers, as the planners of fusion and order know them."""
    return layers_of(
        profile.elements,
        [sent.up.density if sent.up.carries(shape) else 1.0 for shape in profile.shapes],
        sent_bytes=[sent.up.sent_bytes(shape) for shape in profile.shapes],
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        square_norms=profile.square_norms,
        groups=profile.groups,
    )


def work_of(profile: JobProfile, chosen: StepOptions) -> tuple[StepWork, StepResources]:
    """A step of a sync job as work, and where it is taken."""
    sent = chosen.compressor
    plan = plan_of(profile, chosen)
    copies = chosen.redundancy
    pushes = profile.workers // copies
    down = sent.down(pushes)
    costs = profile.costs
    early = chosen.overlap == "both"
    servers = _spread([part.elements for part in plan.parts], profile.servers)
    batches, pieces = list[UnitWork](), list[Piece]()
    for number, unit in enumerate(plan.units):
        shapes = profile.shapes[unit.first : unit.last]
        elements, parts = unit.end - unit.start, len(unit.parts)
        runs = 1 if plan.merged and sent.merges else sent.up.runs(shapes)
        up_bytes = sum(map(sent.up.sent_bytes, shapes)) + PAYLOAD_BYTES * max(parts, runs)
        down_bytes = sum(map(down.sent_bytes, shapes)) + PAYLOAD_BYTES * max(parts, down.runs(shapes))
        # What is sparse is stepped and taken in where it holds elements.
        held = sum(math.prod(shape) * (down.density if down.carries(shape) else 1.0) for shape in shapes)
        pushed = pushes * (elements * sent.up.density * costs.reduce_s + runs * costs.server_run_s)
        taken = held * costs.apply_s + early * len(shapes) * costs.early_s
        encode_s = elements * (costs.gradient_s + sent.element_s)
        encode_s += len(shapes) * costs.tensor_s + runs * costs.worker_run_s
        backward = slice(unit.first, unit.last)
        if sent.whole:  # the first unit that is compressed waits for all of backward
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
            pieces.append(
                Piece(
                    unit=number,
                    up_bytes=PART_BYTES + share * up_bytes,
                    down_bytes=PART_BYTES + share * down_bytes,
                    pushes=pushes,
                    server_s=share * (held * costs.update_s + pushed),
                    apply_s=share * taken,
                    turn=plan.turns[part] if plan.turns else part,
                    server=servers[part],
                )
            )
    work = StepWork(
        batches=batches,
        pieces=pieces,
        workers=profile.workers,
        servers=profile.servers,
        overlap=chosen.overlap,
        early=early,
        credit=plan.credit,
        # It was measured beside as much as that.
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


def _spread(sizes: Sequence[int], servers: int) -> list[int]:
    """The server of each part: the largest first, each to the one that has least."""
    held, found = [0] * servers, [0] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda part: (-sizes[part], part)):
        found[part] = held.index(min(held))
        held[found[part]] += sizes[part]
    return found
