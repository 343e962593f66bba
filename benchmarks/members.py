"""`gc-bench members`: time of the server's control per event, with 8, 64 and 256 members, in every mode.

Members are emulated: the events of their messages go straight to `Core.step`, and no tensor or socket is
involved. The figures are the mean seconds of one step, which should not grow with the number of members.
Those of pushes include their share of opening, closing and publishing rounds. Coded mode also exchanges
packets, among 8 and among 32 members; each block has two holders.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict, deque
from typing import Any

from ..coding import plan
from ..proto.messages import Assignment, Exchanged
from ..server.job import events as e
from ..server.job.core import Core
from ..server.job.modes.registry import parse
from ..settings import ServerSettings
from . import output
from .arguments import json_option

MODES = ("sync", "sync:backup=1", "sync:redundancy=2", "sync:stragglers=1", "stale:bound=4", "async", "local")
MEMBERS = (8, 64, 256)
CODED_MEMBERS = (8, 32)
ROUNDS = 20
BATCH = 4


class EmulatedJob:
    """The control of a job, with emulated members that answer every assignment. It times each event.

    Attributes:
        core: control of the job.
        names: worker ids of the members.
        assigned: worker ids and assignments that have not been answered, oldest first.
        seq: number of pushes so far, by worker id.
        now: time on the job's clock in seconds.
        seconds: CPU seconds of control, by kind of event.
        steps: number of events, by kind.
    """

    def __init__(self, mode: str, members: int) -> None:
        """Start a job and have all members join it. mode: spec of the mode. members: number of members."""
        rules = ServerSettings(min_workers=members, batch_size=BATCH, epochs=1, lease_seconds=1e6)
        self.core = Core(rules, parse(mode))
        self.names = [f"w{index}" for index in range(members)]
        self.assigned: deque[tuple[str, Assignment]] = deque()
        self.seq = dict.fromkeys(self.names, 0)
        self.now = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps: defaultdict[str, int] = defaultdict(int)
        for name in self.names:
            self.step("join", e.Joined(worker=name, incarnation=1))
        samples = members * BATCH * 20 * ROUNDS
        first = self.names[0]
        self.step("join", e.Initialized(worker=first, incarnation=1, fingerprint=b"", train_samples=samples))
        for name in self.names:
            self.step("join", e.Attached(worker=name, incarnation=1))
            self.step("join", e.Prepared(worker=name, incarnation=1, fingerprint=b"", version=0))

    def step(self, kind: str, event: e.Event[Any]) -> None:
        """Hand an event to control, time it, and perform the actions that follow.

        Args:
            kind: name under which the time is counted.
            event: the event.
        """
        self.now += 0.01
        started = time.thread_time()
        actions = self.core.step(event, self.now).actions
        self.seconds[kind] += time.thread_time() - started
        self.steps[kind] += not isinstance(event, e.Published)  # its time is part of the pushes' time
        for action in actions:
            match action:
                case e.Assign(worker=worker, assignment=assignment):
                    self.assigned.append((worker, assignment))
                case e.Apply(version=version):
                    self.step("push", e.Published(version=version))
                case _:
                    pass

    def beat(self) -> None:
        """Send one heartbeat of each member."""
        for name in self.names:
            self.step("heartbeat", e.KeepAlive(worker=name, incarnation=1))

    def answer(self) -> None:
        """Have the member with the oldest open assignment send its packets, if any, and a push."""
        name, to = self.assigned.popleft()
        if not to.ranges:
            return
        if to.coding is not None:
            self.exchange(name, to)
        self.seq[name] += 1
        self.step(
            "push",
            e.Pushed(
                worker=name,
                incarnation=1,
                seq=self.seq[name],
                assignment=to.id,
                base_version=to.version,
                samples=1,
                loss=1.0,
                exchanged=None if to.coding is None else Exchanged(crc32c=0),
            ),
        )

    def exchange(self, name: str, to: Assignment) -> None:
        """Send all packets of one member in a coded exchange.

        Args:
            name: worker id of the member.
            to: its assignment.
        """
        assert to.coding is not None
        made = plan(to.world, to.coding.redundancy)
        for index in made.sent_by[to.position]:
            terms = made.packets[index].terms if to.coding.redundancy > 1 else ()
            checksums = [block for block, _ in terms]
            names: dict[str, Any] = {"worker": name, "incarnation": 1, "exchange": to.coding.exchange}
            self.step("packet", e.PacketStarted(**names, index=index, checksums=checksums))
            self.step("packet", e.PacketRelayed(**names, index=index))

    def microseconds(self, kind: str) -> str:
        """Return the mean microseconds of control per event of this kind, as text; "" if there was none."""
        return f"{self.seconds[kind] / self.steps[kind] * 1e6:.0f}" if self.steps[kind] else ""


def measure(mode: str, members: int, rounds: int = ROUNDS) -> EmulatedJob:
    """Run an emulated job in which each member sends `rounds` pushes and heartbeats; return the job."""
    job = EmulatedJob(mode, members)
    for _ in range(rounds):
        job.beat()
        for _ in range(min(members, len(job.assigned))):
            job.answer()
    return job


add_arguments = json_option


def run(given: argparse.Namespace) -> None:
    """Measure every mode with each number of members, and print the table."""
    headings = ("mode", "members", "µs per heartbeat", "µs per push", "µs per packet event")
    print(output.table(headings, []))
    cases = [(mode, members, ROUNDS) for mode in MODES for members in MEMBERS]
    cases += [("coded:redundancy=2", members, 3) for members in CODED_MEMBERS]
    rows: list[dict[str, object]] = []
    for mode, members, rounds in cases:
        job = measure(mode, members, rounds)
        figures = [job.microseconds(kind) for kind in ("heartbeat", "push", "packet")]
        print(output.row((f"`{mode}`", members, *figures)), flush=True)
        rows.append({"mode": mode, "members": members, "microseconds": figures})
    output.write_json(given.json, rows)
