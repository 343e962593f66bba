"""A simulation of one step of a sync job: when each part is computed, sent, summed, stepped and sent back.

A step lasts from the beginning of one backward pass to the beginning of the next. Parts pass through lanes,
each of which handles one part at a time:

    computing:  all workers, which do the same at the same time. Backward takes unit by unit from the last
                tensors to the first. A unit is compressed as soon as backward has all of its gradients. Then
                updates are applied, and the next forward pass runs from the first tensors to the last
    network:    a worker's network thread, which hands a part to its link, and takes one from it
    up:         the server's link, which carries a part from all workers
    loop:       the server's event loop, which receives a part from each worker, and sends its update to each
    server:     the server's reducer, which sums the pushes of a part, steps it, and encodes the update
    down:       the server's link in the other direction, which carries the update of a part to all workers

Of the parts that wait for a lane, the one with the smallest `turn` is served first. The overlap decides the
order of work:

    off:        units are compressed once backward is over. A part is uploaded once it is compressed, and its
                update is downloaded once the whole push has arrived
    backward:   the same, but units are compressed while backward continues
    both:       as `backward`, and the update of a part is downloaded once that part has arrived from all
                workers
    early:      as `both`, and forward of a unit begins once the updates of its own parts are applied,
                without those of the other parts

Where all processes are on one machine, lanes share its cores. If the busy lanes need more of them than there
are, each slows down in proportion. Otherwise nothing takes longer than it takes alone.

A part's way is one kind of work after the other, each in its lane. Between "up" and "receive", and between
"down" and "take", it travels for half a round trip:

    compress, computing: a whole unit at once
    send, network: the worker hands the part to its link, as far as `credit` allows
    up, up: its bytes, from all workers
    receive, loop: from all workers; the part then waits until the overlap lets it be summed
    sum, server: sum, step and encoding of the update
    hand, loop: the update, to each worker
    down, down: its bytes, to all workers
    take, network: the worker takes the update from its link
    apply, computing: the update is there for the next forward pass

A part takes `start_s` of a link besides its bytes, and the next assignment takes one round trip. The option
`credit` limits the parts that may be in flight: the next part then waits until one has been received and the
worker has been told, half a round trip later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from .profile import Link

Overlap = Literal["off", "backward", "both"]
Lane = Literal["computing", "network", "up", "loop", "server", "down"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the plan as work for the lanes.

    Attributes:
        up_bytes, down_bytes: bytes that each worker uploads and downloads.
        up_packing_s, down_packing_s: seconds in which one end packs or unpacks it.
        pushes: number of workers that upload it.
        server_s: seconds of the server's reducer.
        apply_s: seconds in which a worker applies the update.
        turn: priority in a lane; the smallest is served first.
    """

    unit: int
    up_bytes: float
    down_bytes: float
    pushes: int
    server_s: float = 0.0
    apply_s: float = 0.0
    turn: int = 0
    up_packing_s: float = 0.0
    down_packing_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitWork:
    """A unit of the plan, whose tensors are compressed at once: its parts, and seconds of one worker."""

    parts: range
    backward_s: float = 0.0
    forward_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """All the work of one step, the same at each worker.

    Attributes:
        batches: the units, in the order of backward.
        early: True if forward of a unit waits for its own updates only.
        credit: number of parts of a worker that may be in flight at once; 0 for no limit.
        computing_cores: cores that forward and backward of all workers keep busy while nothing else needs
            them.
    """

    batches: Sequence[UnitWork]
    pieces: Sequence[Piece]
    workers: int
    overlap: Overlap = "both"
    early: bool = False
    credit: int = 0
    computing_cores: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResources:
    """The links and processors that a step runs on, and fixed costs.

    Attributes:
        server, worker: link of the server and of each worker, the same in both directions.
        byte_s, part_s: processor seconds for each byte and part that a process sends or receives.
        step_s: fixed seconds of a step, for commits, outcomes and assignments.
        cores: number of cores of the machine that all processes share; None if each process has a machine.
        uneven: fraction of the download time by which the first worker has its update before the last one.
    """

    server: Link
    worker: Link
    rtt_s: float = 0.0
    byte_s: float = 0.0
    part_s: float = 0.0
    step_s: float = 0.0
    cores: int | None = None
    uneven: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """The time that one piece of work spent in its lane, in seconds since the beginning of backward.

    Attributes:
        kind: backward, forward, or one of the part's way; see the head of this file.
        number: number of its unit (backward, compress, forward) or part (all others).
    """

    lane: Lane
    kind: str
    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes:
        spans: all work, in the order in which it ended.
        step_s: seconds from the beginning of backward to the beginning of the next one.
        cpu_s: core seconds of all processors, without forward and backward.
    """

    spans: tuple[Span, ...]
    step_s: float
    cpu_s: float

    def busy_s(self, lane: Lane) -> float:
        """Return the seconds that a lane was busy."""
        return sum((span.end_s - span.start_s for span in self.spans if span.lane == lane), 0.0)


# The lane of each kind of work on a part's way.
_LANE_OF: Mapping[str, Lane] = {
    **{"send": "network", "take": "network", "up": "up", "down": "down"},
    **{"receive": "loop", "hand": "loop", "sum": "server"},
}
# The next kind of work on the way, where the part need not wait for other parts.
_NEXT = {"send": "up", "up": "receive", "sum": "hand", "hand": "down", "down": "take"}
_HEARD = "heard"  # in place of a kind of work: the worker is told that the part was received


@dataclass(slots=True, eq=False)
class _Job:
    """One piece of work for a lane.

    Attributes:
        left: seconds that are left of it, if it runs alone.
        cores: number of cores that it keeps busy.
    """

    kind: str
    number: int
    left: float
    cores: float = 0.0
    start: float = 0.0


@dataclass(slots=True, eq=False)
class _Lane:
    """A lane, which runs one job at a time.

    Attributes:
        ready: heap of (turn, number, job) that wait; unused for "computing", whose next job
            `_next_of_a_worker` determines.
    """

    name: Lane
    ready: list[tuple[int, int, _Job]] = field(default_factory=list[tuple[int, int, _Job]])
    busy: _Job | None = None


def simulate(work: StepWork, place: StepResources) -> Timeline:
    """Simulate one step of `work` on the resources `place`; return when everything ran, and how long the step
    took."""
    return _Simulation(work, place).run()


class _Simulation:
    """State of one simulated step: the time, the lanes, and the parts that travel."""

    def __init__(self, work: StepWork, place: StepResources) -> None:
        self._work, self._place = work, place
        self._now, self._cpu = 0.0, 0.0
        self._spans: list[Span] = []
        self._travelling: list[tuple[float, int, str]] = []  # a heap: (arrival, part, its next kind of work)
        self._lanes = {name: _Lane(name) for name in get_args(Lane)}
        self._unsent: list[int] = []  # parts that are compressed but not sent
        self._unsummed: list[int] = []  # parts that are at the server but may not be summed yet
        self._received = self._applied = self._in_flight = 0  # numbers of parts
        self._program = self._backward()
        self._at = 0  # position in the program
        self._forward = len(work.batches)  # last unit that forward began
        self._missing = [len(batch.parts) for batch in work.batches]  # parts whose updates are not applied
        self._updates: list[tuple[int, int]] = []  # a heap of updates to apply: (turn, part)

    def _backward(self) -> list[_Job]:
        """Return the jobs that a worker runs in a fixed order, backward and compressing. Later ones depend on
        arrivals."""
        work, found = self._work, list[_Job]()
        late = list[_Job]()
        for number, batch in enumerate(work.batches):
            found.append(_Job("backward", number, batch.backward_s, work.computing_cores))
            after = late if work.overlap == "off" else found
            after.append(_Job("compress", number, batch.encode_s, work.workers))
        return found + late

    def run(self) -> Timeline:
        """Run all lanes until no work is left; return the timeline."""
        while True:
            for lane in self._lanes.values():
                if lane.busy is None and (lane.ready or lane.name == "computing"):
                    self._begin(lane)
            busy = [(lane, lane.busy) for lane in self._lanes.values() if lane.busy is not None]
            if not busy and not self._travelling:
                break
            self._advance(busy)
        over = not self._forward and self._at == len(self._program)
        assert over, "deadlock in the simulated step: a part waits for an event that never happens"
        found = Timeline(tuple(self._spans), 0.0, self._cpu)
        end = self._now + self._place.rtt_s + self._place.step_s - self._ahead(found)
        return replace(found, step_s=end)

    def _ahead(self, found: Timeline) -> float:
        """Return the seconds by which the first worker's push precedes the last one's.

        A worker that has its update first also begins its upload first, if pushes go up as a whole after the
        update is down. The gain is at most the time for which other workers' uploads delay this one.
        """
        if self._work.overlap == "both":
            return 0.0
        compressed = max((span.end_s for span in found.spans if span.kind == "compress"), default=0.0)
        up = max((span.end_s for span in found.spans if span.kind == "up"), default=0.0) - compressed
        others = 1 - 1 / max(1, self._work.workers)
        return max(0.0, min(self._place.uneven * found.busy_s("down"), others * up))

    def _begin(self, lane: _Lane) -> None:
        """Start the next job of an idle lane, if there is one."""
        job = self._next_of_a_worker() if lane.name == "computing" else heapq.heappop(lane.ready)[2]
        if job is not None:
            job.start = self._now
            lane.busy = job

    def _next_of_a_worker(self) -> _Job | None:
        """Return the next job of the computing lane; return None if it has to wait for an update."""
        work = self._work
        # 1. Backward and compressing, in their fixed order.
        if self._at < len(self._program):
            self._at += 1
            return self._program[self._at - 1]
        # 2. Apply an update: at once if forward may begin early, otherwise when all of them have arrived.
        if self._updates and (work.early or len(self._updates) == len(work.pieces) - self._applied):
            _, part = heapq.heappop(self._updates)
            return _Job("apply", part, work.pieces[part].apply_s, work.workers)
        # 3. Forward of the next unit, once the updates of all its parts are applied.
        if not self._forward or self._missing[self._forward - 1]:
            return None
        self._forward -= 1
        return _Job("forward", self._forward, work.batches[self._forward].forward_s, work.computing_cores)

    def _advance(self, busy: Sequence[tuple[_Lane, _Job]]) -> None:
        """Advance the time to the next moment at which a job ends or a part arrives, and process these."""
        need, limit = sum(job.cores for _, job in busy), self._place.cores or math.inf
        shared = limit / need if need > limit else 1.0
        speeds = [shared if job.cores else 1.0 for _, job in busy]
        ends = [self._now + job.left / speed for (_, job), speed in zip(busy, speeds, strict=True)]
        until = min([*ends, *(at for at, *_ in self._travelling[:1])])
        passed, self._now = until - self._now, until
        for (lane, job), speed, end in zip(busy, speeds, ends, strict=True):
            if job.kind not in ("backward", "forward"):
                self._cpu += speed * passed * job.cores
            job.left -= speed * passed
            if end <= until:  # not `left <= 0`, which a rounding error may miss
                lane.busy = None
                self._spans.append(Span(lane.name, job.kind, job.number, job.start, until))
                self._ended(job)
        while self._travelling and self._travelling[0][0] <= self._now:
            _, part, kind = heapq.heappop(self._travelling)
            if kind == _HEARD:
                self._in_flight -= 1
                self._send()
            else:
                self._queue(kind, part)

    def _ended(self, job: _Job) -> None:
        """Have the parts that waited for the end of this job go on."""
        work, number = self._work, job.number
        match job.kind:
            case "compress":
                self._unsent += work.batches[number].parts
                self._send()
            case "up" | "down":
                self._travel(number, _NEXT[job.kind])
            case "send" | "sum" | "hand":
                self._queue(_NEXT[job.kind], number)
            case "receive":
                self._sum_after(number)
            case "take":
                heapq.heappush(self._updates, (work.pieces[number].turn, number))
            case "apply":
                self._applied += 1
                self._missing[work.pieces[number].unit] -= 1
            case _:  # backward and forward: `_next_of_a_worker` continues
                pass

    def _travel(self, part: int, kind: str) -> None:
        """Have a part be on its way for half a round trip, to this kind of work."""
        heapq.heappush(self._travelling, (self._now + self._place.rtt_s / 2, part, kind))

    def _sum_after(self, received: int) -> None:
        """Queue the parts that the server may sum now that it has received this one from all workers."""
        work = self._work
        self._received += 1
        self._unsummed.append(received)
        if work.credit:
            self._travel(received, _HEARD)
        if work.overlap == "both" or self._received == len(work.pieces):
            for part in self._unsummed:
                self._queue("sum", part)
            self._unsummed.clear()

    def _send(self) -> None:
        """Hand compressed parts to the network thread, in order of their turns, as far as `credit` allows."""
        work = self._work
        self._unsent.sort(key=lambda part: (work.pieces[part].turn, part))
        while self._unsent and (not work.credit or self._in_flight < work.credit):
            self._in_flight += 1
            self._queue("send", self._unsent.pop(0))

    def _queue(self, kind: str, part: int) -> None:
        """Have a part wait for the lane of this kind of work."""
        lane, piece = self._lanes[_LANE_OF[kind]], self._work.pieces[part]
        place, workers = self._place, self._work.workers
        up = kind in ("send", "up", "receive")
        size, packing_s = (
            (piece.up_bytes, piece.up_packing_s) if up else (piece.down_bytes, piece.down_packing_s)
        )
        handled_s = place.part_s + size * place.byte_s  # of a processor at one end of a connection
        match kind:
            case "send" | "take":  # all workers at the same time
                left, cores = handled_s + packing_s, workers
            case "receive":  # the server, for one worker after the other
                left, cores = piece.pushes * (handled_s + packing_s), 1
            case "hand":  # packed once for all workers
                left, cores = workers * handled_s + packing_s, 1
            case "sum":
                left, cores = piece.server_s, 1
            case _:  # "up", "down": as long as the slower of the server's link and a worker's
                copies = piece.pushes if kind == "up" else workers
                left, cores = max(place.server.seconds(copies * size), place.worker.seconds(size)), 0
        heapq.heappush(lane.ready, (piece.turn, part, _Job(kind, part, left, cores)))
