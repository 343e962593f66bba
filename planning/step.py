"""A step of a sync job, simulated: when each part is computed, sent, summed, stepped and sent back.

A step is what lies between the beginnings of two backward passes. The model's parts pass through lanes, each
of which has one of them at a time:

    computing   of a worker, all of which do the same at the same time: backward, unit by unit from the last
                tensors to the first; compressing a unit, as soon as backward has all of its gradients; taking
                updates in; and the next forward pass, from the first tensors to the last
    network     a worker's network thread, which hands a part to its link, and takes one from it
    up          a link of a server, which carries a part from all workers
    loop        a server's event loop, which takes a part in from each worker, and hands its update to each
    server      sums the pushes of a part, steps it, and encodes what goes down
    down        the link the other way, which carries the update of a part to all workers

Each server has the last four lanes for itself. Of the parts that wait for a lane the one with the least turn
goes first. What has to be done before what:

    off         nothing is compressed before backward is over. Parts go up once they are compressed, and down
                once the push is whole
    backward    the same, but units are compressed while backward goes on
    both        besides, parts go down once they are there from all workers
    early       besides, forward of a unit begins once its own parts are taken in, and not those of all

Lanes share what they need: the link of a worker, which carries its parts of all servers; and, where all
processes are on one machine, its cores. If the lanes that are busy need
more of something than there is, each of them gets its share and takes so much longer. Else nothing takes
longer than what it takes alone.

Latency is half a round trip for each way, behind the bytes, and one round trip for the next assignment. A
part takes `start_s` of a link besides its bytes; with a limit on how many parts may be on their way at once
(`credit`) the next one waits until one is there, and the worker has heard of it.
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
    """A part as work.

    Attributes:
        unit: whose it is.
        up_bytes: that one worker sends; pushes: how many workers do. down_bytes: that each worker is sent.
        server_s: that the server's reducer takes. apply_s: that a worker takes to take it in.
        turn: see above. server: its number.
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
    """A unit as work: what is compressed at once, in `encode_s`. parts: numbers of its pieces. backward_s,
    forward_s: of its tensors."""

    parts: range
    backward_s: float = 0.0
    forward_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """A step.

    Attributes:
        batches: by unit, in the order of backward. pieces: by part.
        workers: how many. servers: how many.
        overlap, early, credit: see the head of this file; credit 0 is no limit.
        computing_cores: that forward and backward of all workers take, while nothing else needs them.
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
    """Where a step is taken.

    Attributes:
        server, worker: the link of each, the same in both directions.
        rtt_s: of a round trip between them.
        byte_s, part_s: of a processor, for a byte, and for a part, that it sends or receives.
        step_s: of a step, whatever it has: commits, outcomes, assignments.
        cores: of the one machine that all processes are on; None for a machine for each.
        uneven: by what share of the way down the first worker has its update before the last.
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
    """Something in its lane. what: backward, compress, send, up, receive, sum, hand, down, take, apply or
    forward. number: of its unit or part."""

    lane: Lane
    server: int
    what: str
    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds from the beginning of backward. cpu_s: that all processors were busy, computing aside."""

    spans: tuple[Span, ...]
    step_s: float
    cpu_s: float

    def busy_s(self, lane: Lane) -> float:
        """Of the busiest server's lane."""
        found: dict[int, float] = {}
        for span in self.spans:
            if span.lane == lane:
                found[span.server] = found.get(span.server, 0.0) + span.end_s - span.start_s
        return max(found.values(), default=0.0)


# Numbers of what lanes share.
_CORES, _WORKER_UP, _WORKER_DOWN = 0, 1, 2


@dataclass(slots=True, eq=False)
class _Job:
    """Something that a lane does. left: seconds, of what it takes alone. needs: of what is shared, how much
    it takes while it runs."""

    what: str
    number: int
    left: float
    needs: tuple[tuple[int, float], ...] = ()
    turn: int = 0
    start: float = 0.0


@dataclass(slots=True, eq=False)
class _Lane:
    """ready: what waits for it, by turn; a worker knows by itself what comes next."""

    name: Lane
    server: int
    ready: list[tuple[int, int, _Job]] = field(default_factory=list[tuple[int, int, _Job]])
    busy: _Job | None = None


def simulate(work: StepWork, place: StepResources) -> Timeline:
    """What becomes of a step."""
    return _Simulation(work, place).run()


class _Simulation:
    def __init__(self, work: StepWork, place: StepResources) -> None:
        self._work, self._place = work, place
        self._now, self._cpu = 0.0, 0.0
        self._spans: list[Span] = []
        self._later: list[tuple[float, int, str]] = []  # when, to which part, what
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
        self._held: list[int] = []  # compressed, and not on their way
        self._stored: list[int] = []  # at the server, and not yet to be summed
        self._arrived = self._taken = self._travelling = 0
        self._computes = ((_CORES, work.computing_cores),) if work.computing_cores else ()
        self._program = self._of_a_worker()
        self._at, self._forward = 0, len(work.batches)  # in the program; the last unit that forward began
        self._missing = [len(batch.parts) for batch in work.batches]  # parts that have not been taken in
        self._updates: list[tuple[int, int]] = []  # that have come, by turn

    def _of_a_worker(self) -> list[_Job]:
        """Backward and compressing, in order; the rest depends on what comes when."""
        work, found = self._work, list[_Job]()
        cores = ((_CORES, float(work.workers)),)
        late = list[_Job]()
        for number, batch in enumerate(work.batches):
            found.append(_Job("backward", number, batch.backward_s, self._computes))
            after = late if work.overlap == "off" else found
            after.append(_Job("compress", number, batch.encode_s, cores))
        return found + late

    def run(self) -> Timeline:
        while True:
            for lane in self._lanes:
                if lane.busy is None and (lane.ready or lane is self._computing):
                    self._begin(lane)
            busy = [(lane, lane.busy) for lane in self._lanes if lane.busy is not None]
            if not busy and not self._later:
                break
            self._advance(busy)
        assert self._over, "a part waits for what never comes"
        found = Timeline(tuple(self._spans), 0.0, self._cpu)
        end = self._now + self._place.rtt_s + self._place.step_s - self._ahead(found)
        return Timeline(found.spans, end, self._cpu)

    def _ahead(self, found: Timeline) -> float:
        """Seconds by which the first worker's push precedes that of the last, if all of a push goes up after
        the update is down: as much of the way up as others wait for."""
        if self._work.overlap == "both":
            return 0.0
        compressed = max((span.end_s for span in found.spans if span.what == "compress"), default=0.0)
        up = max((span.end_s for span in found.spans if span.what == "up"), default=0.0) - compressed
        others = 1 - 1 / max(1, self._work.workers)
        return max(0.0, min(self._place.uneven * found.busy_s("down"), others * up))

    @property
    def _over(self) -> bool:
        return not self._forward and self._at == len(self._program)

    def _begin(self, lane: _Lane) -> None:
        job = self._next_of_a_worker() if lane is self._computing else heapq.heappop(lane.ready)[2]
        if job is not None:
            job.start = self._now
            lane.busy = job

    def _next_of_a_worker(self) -> _Job | None:
        work = self._work
        if self._at < len(self._program):
            self._at += 1
            return self._program[self._at - 1]
        if self._updates and (work.early or len(self._updates) == len(work.pieces) - self._taken):
            _, part = heapq.heappop(self._updates)
            return _Job("apply", part, work.pieces[part].apply_s, ((_CORES, float(work.workers)),))
        if not self._forward or self._missing[self._forward - 1]:
            return None
        self._forward -= 1
        return _Job("forward", self._forward, work.batches[self._forward].forward_s, self._computes)

    def _advance(self, busy: Sequence[tuple[_Lane, _Job]]) -> None:
        """To the next moment at which something ends."""
        needed = [0.0] * len(self._limits)
        for _, job in busy:
            for what, much in job.needs:
                needed[what] += much
        scarce = {
            what: limit / need
            for what, (need, limit) in enumerate(zip(needed, self._limits, strict=True))
            if need > limit
        }
        paces = [min((scarce.get(what, 1.0) for what, _ in job.needs), default=1.0) for _, job in busy]
        ends = [self._now + job.left / pace for (_, job), pace in zip(busy, paces, strict=True)]
        until = min([*ends, *(at for at, *_ in self._later[:1])])
        passed, self._now = until - self._now, until
        for (lane, job), pace, end in zip(busy, paces, ends, strict=True):
            if job.needs and job.needs is not self._computes and job.needs[0][0] == _CORES:
                self._cpu += pace * passed * job.needs[0][1]
            job.left -= pace * passed
            if end <= until:  # what is left by then may be no more than a rounding error, or less
                lane.busy = None
                self._spans.append(Span(lane.name, lane.server, job.what, job.number, job.start, until))
                self._done(job)
        while self._later and self._later[0][0] <= self._now:
            _, number, event = heapq.heappop(self._later)
            self._happens(event, number)

    def _done(self, job: _Job) -> None:
        work, number = self._work, job.number
        half = self._place.rtt_s / 2
        match job.what:
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

    def _when(self, seconds: float, what: str, number: int) -> None:
        heapq.heappush(self._later, (self._now + seconds, number, what))

    def _happens(self, what: str, number: int) -> None:
        match what:
            case "update":
                self._put([self._network], self._handled("take", number, 1))
            case "arrived":
                self._put(self._loops, self._handled("receive", number, self._work.pieces[number].pushes))
            case _:  # heard
                self._travelling -= 1
                self._send()

    def _stores(self, number: int) -> None:
        """The server has a part from all workers."""
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
        """Hand parts to the links, as many as may be on their way."""
        work = self._work
        self._held.sort(key=lambda part: (work.pieces[part].turn, part))
        while self._held and (not work.credit or self._travelling < work.credit):
            part = self._held.pop(0)
            self._travelling += 1
            self._put([self._network], self._handled("send", part, 1))

    def _put(self, lanes: Sequence[_Lane], job: _Job) -> None:
        """In the lane of the job's server; a worker has one for all."""
        lane = lanes[self._work.pieces[job.number].server] if len(lanes) > 1 else lanes[0]
        heapq.heappush(lane.ready, (job.turn, job.number, job))

    def _handled(self, what: str, part: int, copies: int) -> _Job:
        """A part at either end of a connection. copies: one after the other; workers do the same at once."""
        place, piece = self._place, self._work.pieces[part]
        size = piece.up_bytes if what in ("send", "receive") else piece.down_bytes
        at_once = 1.0 if what in ("receive", "hand") else float(self._work.workers)
        seconds = copies * (place.part_s + size * place.byte_s)
        return _Job(what, part, seconds, ((_CORES, at_once),), piece.turn)

    def _carried(self, what: Lane, part: int) -> _Job:
        """A part on a server's link, from or to all workers: as long as what takes longest of that link and a
        worker's, which is busy as far as it has to be."""
        work, place, piece = self._work, self._place, self._work.pieces[part]
        copies = piece.pushes if what == "up" else work.workers
        size = piece.up_bytes if what == "up" else piece.down_bytes
        worker = place.worker.seconds(size)
        seconds = max(place.server.seconds(copies * size), worker)
        share = worker / seconds if seconds else 0.0
        needs = (((_WORKER_UP if what == "up" else _WORKER_DOWN), share),)
        return _Job(what, part, seconds, needs, piece.turn)
