"""A simulation of one step of a sync job: when each part is computed, sent, summed, stepped and sent back.

A step lasts from the beginning of one backward pass to the beginning of the next. Parts pass through lanes,
each of which handles one part at a time:

    computing:  all workers, which do the same at the same time. Backward takes unit by unit from the last
                tensors to the first. A unit is compressed as soon as backward has all of its gradients. Then
                updates are applied, and the next forward pass runs from the first tensors to the last
    network:    a worker's network thread, which hands a part to its link, and takes one from it
    up:         a server's link, which carries a part from all workers
    loop:       a server's event loop, which receives a part from each worker, and sends its update to each
    server:     a server's reducer, which sums the pushes of a part, steps it, and encodes the update
    down:       a server's link in the other direction, which carries the update of a part to all workers

Each server has lanes of its own for the last four. Of the parts that wait for a lane, the one with the
smallest `turn` is served first. The overlap decides the order of work:

    off:        units are compressed once backward is over. A part is uploaded once it is compressed, and its
                update is downloaded once the whole push has arrived
    backward:   the same, but units are compressed while backward continues
    both:       as `backward`, and the update of a part is downloaded once that part has arrived from all
                workers
    early:      as `both`, and forward of a unit begins once the updates of its own parts are applied,
                without those of the other parts

Lanes share resources: a worker's link, which carries its parts of all servers; and the cores, where all
processes are on one machine. If the busy lanes need more of a resource than there is, each of them slows down
in proportion. Otherwise nothing takes longer than it takes alone.

Latency is half a round trip in each direction, after the bytes, and one round trip for the next assignment. A
part takes `start_s` of a link besides its bytes. The option `credit` limits the parts that may be in flight:
the next part then waits until one has arrived and the worker has been told.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .profile import Link

Overlap = Literal["off", "backward", "both"]
Lane = Literal["computing", "network", "up", "loop", "server", "down"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the plan as work for the lanes, which are links and processors (see the head of this file).

    Attributes:
        unit: number of its unit.
        up_bytes: bytes that one worker uploads.
        down_bytes: bytes that each worker downloads.
        pushes: number of workers that upload it.
        server_s: seconds of the server's reducer.
        apply_s: seconds in which a worker applies the update.
        turn: priority in a lane; the smallest is served first.
        server: number of its server, from 0; always 0 unless gc-plan divides the parts among several.
    """

    unit: int
    up_bytes: float
    down_bytes: float
    pushes: int
    server_s: float = 0.0
    apply_s: float = 0.0
    turn: int = 0
    server: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitWork:
    """A unit of the plan as work: tensors that are compressed at once.

    Attributes:
        parts: numbers of its parts.
        backward_s: seconds of the backward pass through its tensors.
        forward_s: seconds of the forward pass through its tensors.
        encode_s: seconds in which a worker compresses it.
    """

    parts: range
    backward_s: float = 0.0
    forward_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """All the work of one step, the same at each worker.

    Attributes:
        batches: the units, in the order of backward.
        pieces: the parts, by number.
        workers: number of workers.
        servers: number of servers.
        overlap: work that overlaps: "off", "backward" or "both"; see the head of this file.
        early: True if forward of a unit waits for its own updates only.
        credit: number of parts of a worker that may be in flight at once; 0 for no limit.
        computing_cores: cores that forward and backward of all workers keep busy while nothing else needs
            them.
    """

    batches: Sequence[UnitWork]
    pieces: Sequence[Piece]
    workers: int
    servers: int = 1
    overlap: Overlap = "both"
    early: bool = False
    credit: int = 0
    computing_cores: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResources:
    """The links and processors that a step runs on, and fixed costs.

    Attributes:
        server: link of each server, the same in both directions.
        worker: link of each worker, the same in both directions.
        rtt_s: seconds of a round trip between a worker and a server.
        byte_s: processor seconds for each byte that a process sends or receives.
        part_s: processor seconds for each part that a process sends or receives.
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
    """The time that one piece of work spent in its lane.

    Attributes:
        lane: name of the lane.
        server: number of the lane's server; 0 for a worker's lane.
        kind: kind of work: backward, compress, send, up, receive, sum, hand, down, take, apply or forward.
        number: number of its unit (backward, compress, forward) or part (all others).
        start_s: beginning, in seconds since the beginning of backward.
        end_s: end, likewise.
    """

    lane: Lane
    server: int
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
        """Return the seconds that a lane was busy; of several servers, those of the busiest one."""
        found: dict[int, float] = {}
        for span in self.spans:
            if span.lane == lane:
                found[span.server] = found.get(span.server, 0.0) + span.end_s - span.start_s
        return max(found.values(), default=0.0)


# Indices of the resources that lanes share.
_CORES, _WORKER_UP, _WORKER_DOWN = 0, 1, 2


@dataclass(slots=True, eq=False)
class _Job:
    """One piece of work for a lane.

    Attributes:
        kind: work that it is, as in `Span`.
        number: number of its unit or part.
        left: seconds that are left of it, if it runs alone.
        needs: (resource, amount) pairs: the amount of each shared resource that it uses while it runs.
        turn: priority in the lane.
        start: time at which it began.
    """

    kind: str
    number: int
    left: float
    needs: tuple[tuple[int, float], ...] = ()
    turn: int = 0
    start: float = 0.0


@dataclass(slots=True, eq=False)
class _Lane:
    """A lane, which runs one job at a time.

    Attributes:
        ready: heap of (turn, number, job) that wait; unused for "computing", whose next job
            `_next_of_a_worker` determines.
        busy: the job that runs; None if the lane is idle.
    """

    name: Lane
    server: int
    ready: list[tuple[int, int, _Job]] = field(default_factory=list[tuple[int, int, _Job]])
    busy: _Job | None = None


def simulate(work: StepWork, place: StepResources) -> Timeline:
    """Simulate one step of `work` on the resources `place`; return when everything ran, and how long the step
    took."""
    return _Simulation(work, place).run()


class _Simulation:
    """State of one simulated step: the time, the lanes and the events to come."""

    def __init__(self, work: StepWork, place: StepResources) -> None:
        self._work, self._place = work, place
        self._now, self._cpu = 0.0, 0.0
        self._spans: list[Span] = []
        self._later: list[tuple[float, int, str]] = []  # a heap of future events: (time, part, event)
        self._limits = [place.cores or math.inf, 1.0, 1.0]
        self._computing = _Lane("computing", 0)
        self._network = _Lane("network", 0)
        self._loops = [_Lane("loop", server) for server in range(work.servers)]
        self._up = [_Lane("up", server) for server in range(work.servers)]
        self._reducing = [_Lane("server", server) for server in range(work.servers)]
        self._down = [_Lane("down", server) for server in range(work.servers)]
        self._lanes = [
            *(self._computing, self._network),
            *(*self._up, *self._loops, *self._reducing, *self._down),
        ]
        self._held: list[int] = []  # parts that are compressed but not sent
        self._stored: list[int] = []  # parts that are at the server but may not be summed yet
        self._arrived = self._taken = self._travelling = 0
        self._computes = ((_CORES, work.computing_cores),) if work.computing_cores else ()
        self._program = self._of_a_worker()
        self._at, self._forward = (
            0,
            len(work.batches),
        )  # position in the program; last unit that forward began
        self._missing = [len(batch.parts) for batch in work.batches]  # parts whose updates are not applied
        self._updates: list[tuple[int, int]] = []  # a heap of updates to apply: (turn, part)

    def _of_a_worker(self) -> list[_Job]:
        """Return the jobs that a worker runs in a fixed order: backward and compressing. Later ones depend on
        arrivals."""
        work, found = self._work, list[_Job]()
        cores = ((_CORES, float(work.workers)),)
        late = list[_Job]()
        for number, batch in enumerate(work.batches):
            found.append(_Job("backward", number, batch.backward_s, self._computes))
            after = late if work.overlap == "off" else found
            after.append(_Job("compress", number, batch.encode_s, cores))
        return found + late

    def run(self) -> Timeline:
        """Run all lanes until no work is left; return the timeline."""
        while True:
            for lane in self._lanes:
                if lane.busy is None and (lane.ready or lane is self._computing):
                    self._begin(lane)
            busy = [(lane, lane.busy) for lane in self._lanes if lane.busy is not None]
            if not busy and not self._later:
                break
            self._advance(busy)
        assert self._over, "deadlock in the simulated step: a part waits for an event that never happens"
        found = Timeline(tuple(self._spans), 0.0, self._cpu)
        end = self._now + self._place.rtt_s + self._place.step_s - self._ahead(found)
        return Timeline(found.spans, end, self._cpu)

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

    @property
    def _over(self) -> bool:
        """True if backward, compressing and forward of all units have run."""
        return not self._forward and self._at == len(self._program)

    def _begin(self, lane: _Lane) -> None:
        """Start the next job of an idle lane, if there is one."""
        job = self._next_of_a_worker() if lane is self._computing else heapq.heappop(lane.ready)[2]
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
        if self._updates and (work.early or len(self._updates) == len(work.pieces) - self._taken):
            _, part = heapq.heappop(self._updates)
            return _Job("apply", part, work.pieces[part].apply_s, ((_CORES, float(work.workers)),))
        # 3. Forward of the next unit, once the updates of all its parts are applied.
        if not self._forward or self._missing[self._forward - 1]:
            return None
        self._forward -= 1
        return _Job("forward", self._forward, work.batches[self._forward].forward_s, self._computes)

    def _advance(self, busy: Sequence[tuple[_Lane, _Job]]) -> None:
        """Advance the time to the next moment at which a job ends or an event is due, and process these."""
        needed = [0.0] * len(self._limits)
        for _, job in busy:
            for resource, amount in job.needs:
                needed[resource] += amount
        scarce = {
            resource: limit / need
            for resource, (need, limit) in enumerate(zip(needed, self._limits, strict=True))
            if need > limit
        }
        speeds = [
            min((scarce.get(resource, 1.0) for resource, _ in job.needs), default=1.0) for _, job in busy
        ]
        ends = [self._now + job.left / speed for (_, job), speed in zip(busy, speeds, strict=True)]
        until = min([*ends, *(at for at, *_ in self._later[:1])])
        passed, self._now = until - self._now, until
        for (lane, job), speed, end in zip(busy, speeds, ends, strict=True):
            if job.needs and job.needs is not self._computes and job.needs[0][0] == _CORES:
                self._cpu += speed * passed * job.needs[0][1]
            job.left -= speed * passed
            if end <= until:  # not `left <= 0`, which a rounding error may miss
                lane.busy = None
                self._spans.append(Span(lane.name, lane.server, job.kind, job.number, job.start, until))
                self._done(job)
        while self._later and self._later[0][0] <= self._now:
            _, number, event = heapq.heappop(self._later)
            self._happens(event, number)

    def _done(self, job: _Job) -> None:
        """Pass a part on to its next lane or event, now that `job` has ended."""
        work, number = self._work, job.number
        half = self._place.rtt_s / 2
        match job.kind:
            case "compress":
                self._held += work.batches[number].parts
                self._send()
            case "send":
                self._put(self._up, self._carried("up", number))
            case "up":
                self._when(half, "arrived", number)
            case "receive":
                self._stores(number)
            case "sum":
                self._put(self._loops, self._handled("hand", number, work.workers))
            case "hand":
                self._put(self._down, self._carried("down", number))
            case "down":
                self._when(half, "update", number)
            case "take":
                heapq.heappush(self._updates, (work.pieces[number].turn, number))
            case "apply":
                self._taken += 1
                self._missing[work.pieces[number].unit] -= 1
            case _:
                pass

    def _when(self, seconds: float, event: str, number: int) -> None:
        """Schedule an event of part `number` in `seconds` from now."""
        heapq.heappush(self._later, (self._now + seconds, number, event))

    def _happens(self, event: str, number: int) -> None:
        """Process an event of part `number`: "update", "arrived" or "heard"."""
        match event:
            case "update":
                self._put([self._network], self._handled("take", number, 1))
            case "arrived":
                self._put(self._loops, self._handled("receive", number, self._work.pieces[number].pushes))
            case _:  # "heard": the worker learns that the part has arrived, which frees its credit
                self._travelling -= 1
                self._send()

    def _stores(self, number: int) -> None:
        """Record that the server has received a part from all workers; queue the parts that may now be
        summed."""
        work = self._work
        self._arrived += 1
        self._stored.append(number)
        if work.credit:
            self._when(self._place.rtt_s / 2, "heard", number)
        if work.overlap == "both" or self._arrived == len(work.pieces):
            for part in self._stored:
                piece = work.pieces[part]
                self._put(self._reducing, _Job("sum", part, piece.server_s, ((_CORES, 1.0),), piece.turn))
            self._stored.clear()

    def _send(self) -> None:
        """Hand compressed parts to the network thread, in order of their turns, as far as `credit` allows."""
        work = self._work
        self._held.sort(key=lambda part: (work.pieces[part].turn, part))
        while self._held and (not work.credit or self._travelling < work.credit):
            part = self._held.pop(0)
            self._travelling += 1
            self._put([self._network], self._handled("send", part, 1))

    def _put(self, lanes: Sequence[_Lane], job: _Job) -> None:
        """Queue a job in the lane of its part's server; a single lane serves all servers."""
        lane = lanes[self._work.pieces[job.number].server] if len(lanes) > 1 else lanes[0]
        heapq.heappush(lane.ready, (job.turn, job.number, job))

    def _handled(self, kind: str, part: int, copies: int) -> _Job:
        """Return the processor's work for sending or receiving a part at one end of its connections.

        copies: number of connections that one process serves one after another. Workers do it all at the same
        time.
        """
        place, piece = self._place, self._work.pieces[part]
        size = piece.up_bytes if kind in ("send", "receive") else piece.down_bytes
        at_once = 1.0 if kind in ("receive", "hand") else float(self._work.workers)
        seconds = copies * (place.part_s + size * place.byte_s)
        return _Job(kind, part, seconds, ((_CORES, at_once),), piece.turn)

    def _carried(self, direction: Lane, part: int) -> _Job:
        """Return the work of a server's link that carries a part from all workers ("up") or to all workers
        ("down").

        It takes as long as the slower of the server's link and a worker's link. While it runs, the worker's
        link is busy for the fraction of that time that it needs.
        """
        work, place, piece = self._work, self._place, self._work.pieces[part]
        copies = piece.pushes if direction == "up" else work.workers
        size = piece.up_bytes if direction == "up" else piece.down_bytes
        worker = place.worker.seconds(size)
        seconds = max(place.server.seconds(copies * size), worker)
        share = worker / seconds if seconds else 0.0
        needs = (((_WORKER_UP if direction == "up" else _WORKER_DOWN), share),)
        return _Job(direction, part, seconds, needs, piece.turn)
