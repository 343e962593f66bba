"""`gc-bench members`: time of the server's control per event, with 8, 64 and 256 members, in every mode.

Members are emulated: the events of their messages go straight to `Core.step`, and no tensor or socket is
touched. The figures are the mean seconds of one step, which should not grow with the members; those of pushes
include their share of opening, closing and publishing rounds. Coded mode exchanges packets as well: among 8
and among 32 members, which hold each block twice.
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
    """A core with emulated members, which answer every assignment."""

    def __init__(self, mode: str, members: int) -> None:
        rules = ServerSettings(min_workers=members, batch_size=BATCH, epochs=1, lease_seconds=1e6)
        self.core = Core(rules, parse(mode))
        self.names = [f"w{index}" for index in range(members)]
        self.told: deque[tuple[str, Assignment]] = deque()
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

    def step(self, what: str, event: e.Event[Any]) -> None:
        """Time a step of the core and carry out its actions."""
        self.now += 0.01
        started = time.thread_time()
        actions = self.core.step(event, self.now).actions
        self.seconds[what] += time.thread_time() - started
        self.steps[what] += not isinstance(event, e.Published)  # which counts as a part of the pushes
        for action in actions:
            match action:
                case e.Assign(worker=worker, assignment=assignment):
                    self.told.append((worker, assignment))
                case e.Apply(version=version):
                    self.step("push", e.Published(version=version))
                case _:
                    pass

    def beat(self) -> None:
        for name in self.names:
            self.step("heartbeat", e.KeepAlive(worker=name, incarnation=1))

    def answer(self) -> None:
        """Let the member with the oldest assignment send its packets, if any, and push."""
        name, to = self.told.popleft()
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
        assert to.coding is not None
        made = plan(to.world, to.coding.redundancy)
        for index in made.sent_by[to.position]:
            terms = made.packets[index].terms if to.coding.redundancy > 1 else ()
            checksums = [block for block, _ in terms]
            names: dict[str, Any] = {"worker": name, "incarnation": 1, "exchange": to.coding.exchange}
            self.step("packet", e.PacketStarted(**names, index=index, checksums=checksums))
            self.step("packet", e.PacketRelayed(**names, index=index))

    def microseconds(self, what: str) -> str:
        return f"{self.seconds[what] / self.steps[what] * 1e6:.0f}" if self.steps[what] else ""


def measure(mode: str, members: int, rounds: int = ROUNDS) -> EmulatedJob:
    """Send this many pushes of each member, and as many heartbeats."""
    job = EmulatedJob(mode, members)
    for _ in range(rounds):
        job.beat()
        for _ in range(min(members, len(job.told))):
            job.answer()
    return job


add_arguments = json_option


def run(given: argparse.Namespace) -> None:
    headings = ("mode", "members", "µs per heartbeat", "µs per push", "µs per packet event")
    print(output.table(headings, []))
    cases = [(mode, members, ROUNDS) for mode in MODES for members in MEMBERS]
    cases += [("coded:redundancy=2", members, 3) for members in CODED_MEMBERS]
    rows: list[dict[str, object]] = []
    for mode, members, rounds in cases:
        job = measure(mode, members, rounds)
        figures = [job.microseconds(what) for what in ("heartbeat", "push", "packet")]
        print(output.row((f"`{mode}`", members, *figures)), flush=True)
        rows.append({"mode": mode, "members": members, "microseconds": figures})
    output.write_json(given.json, rows)
