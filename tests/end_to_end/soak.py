"""One job under random faults for as long as it is told to, and whether anything grows meanwhile.

    python tests/end_to_end/soak.py --minutes 60 --seed 1

Real daemons train digits. Links go through a relay that cuts, resets, delays, stalls, damages and swallows;
workers are killed, stopped, started again and joined by others; partitions come and go. Resident memory,
file descriptors and threads of the server and of one worker that stays are sampled every second. At the end
it prints how much each grows in an hour, with the standard error of twelve means over equal times, so that
what goes up and down within minutes is noise. The exit status is 1 if the job did not end well, or
something grew by more than three errors and by more than it may.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import forkserver
import numpy as np
from daemons import Daemon, Daemons, Server, asked
from relay import Plan, Relay

MEASURES = ("memory, MiB", "descriptors", "threads")
MAY_GROW = (4.0, 2.0, 1.0)  # over the whole run: what a heap takes before it settles; a reconnect under way
MEANS = 12
WARM_UP = 0.2  # of the time, which does not count
PAUSE_S = (2.0, 10.0)  # between two things that happen
MAX_GONE_S = 8.0
KINDS = ("cut", "partition", "kill", "leave", "join", "freeze", "freeze the server")


def measured(pid: int) -> tuple[float, float, float] | None:
    """Return memory, descriptors and threads of a process; None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        said = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
        return int(said["VmRSS"].split()[0]) / 1024, descriptors, int(said["Threads"])
    except (OSError, KeyError):
        return None


def slope(at: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Return the slope of a line through the means of `MEANS` equal stretches, and its standard error.

    Args:
        at: where each value was taken, ascending; the slope is per unit of it.
        values: of the same shape.
    """
    places = np.array_split(np.arange(at.size), MEANS)
    x = np.array([at[place].mean() for place in places])
    y = np.array([values[place].mean() for place in places])
    x -= x.mean()
    rise = float((x * y).sum() / (x * x).sum())
    rest = y - y.mean() - rise * x
    return rise, float(np.sqrt((rest * rest).sum() / (MEANS - 2) / (x * x).sum()))


@dataclass
class Series:
    """Samples of a process."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list[float])
    values: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])

    def sample(self, at: float) -> None:
        found = measured(self.pid)
        if found is not None:
            self.times.append(at)
            self.values.append(found)

    def report(self) -> bool:
        """Print how much each measure grows; whether none does."""
        keep = [place for place, at in enumerate(self.times) if at >= WARM_UP * self.times[-1]]
        times, steady = np.array(self.times)[keep], True
        for place, (measure, may) in enumerate(zip(MEASURES, MAY_GROW, strict=True)):
            values = np.array([self.values[at][place] for at in keep])
            rise, error = slope(times / 3600, values)
            hours = (times[-1] - times[0]) / 3600
            grows = rise > 3 * error and rise * hours > may
            steady &= not grows
            print(
                f"{self.name}, {measure}: {rise:+.2f} ± {error:.2f} an hour; from {values[0]:.0f} to "
                f"{values[-1]:.0f}, at most {values.max():.0f}{'  GROWS' if grows else ''}",
                flush=True,
            )
        return steady


class Soak:
    def __init__(self, seconds: float, seed: int) -> None:
        self.chance = random.Random(seed)
        self.daemons = Daemons()
        self.server: Server = self.daemons.server(
            *("--task", "small_tasks:slow_digits:slow=0.05", "--epochs", "1000000", "--min-workers", "1"),
            *("--max-seconds", f"{seconds:.0f}", "--lease-seconds", "4", "--seed", str(seed)),
            *("--learning-rate", "0.05"),
        )
        plan = Plan(seed=seed, gap_bytes=(100_000, 5_000_000), hold_s=3)
        self.relays = [Relay(self.server.port, plan=plan) for _ in range(2)]
        self.number = 0
        self.happened: dict[str, int] = {}
        self.steady = self.start("steady", 0)
        self.others = {name: self.start(name, place % 2) for place, name in enumerate(("w1", "w2"))}

    def start(self, name: str, relay: int) -> Daemon:
        address = f"127.0.0.1:{self.relays[relay].port}"
        compressor = self.chance.choice(("4bit", "topk:ratio=20", "none", "8bit"))
        arguments = ("--worker-id", name, "--give-up-seconds", "120", "--compressor", compressor)
        return self.daemons.worker(address, *arguments)

    def act(self) -> None:
        """Have one thing happen."""
        relay, name = self.chance.choice(self.relays), self.chance.choice(sorted(self.others))
        worker, seconds = self.others[name], self.chance.uniform(0.5, MAX_GONE_S)
        what = self.chance.choice(
            ("cut", "partition", "kill", "leave", "join", "freeze", "freeze the server")
        )
        self.happened[what] = self.happened.get(what, 0) + 1
        match what:
            case "cut":
                relay.cut()
            case "partition":
                relay.partition(*self.chance.choice((("up",), ("down",), ("up", "down"))))
                time.sleep(seconds)
                relay.heal()
            case "kill":
                worker.signal(signal.SIGKILL)
                worker.wait()
                self.others[name] = self.start(name, self.chance.randrange(2))
            case "leave" if len(self.others) > 1:
                worker.signal(signal.SIGTERM)
                del self.others[name]
            case "join" if len(self.others) < 4:
                self.number += 1
                self.others[f"late{self.number}"] = self.start(f"late{self.number}", self.number % 2)
            case "freeze" | "freeze the server":
                frozen = worker if what == "freeze" else self.server
                frozen.signal(signal.SIGSTOP)
                time.sleep(seconds)
                frozen.signal(signal.SIGCONT)
            case _:
                pass
        for name, worker in list(self.others.items()):
            if worker.process.poll() is not None:  # an unlucky one gave up, or its job was over
                self.others[name] = self.start(name, 0)

    def end(self) -> None:
        self.daemons.end()
        for relay in self.relays:
            relay.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    soak = Soak(given.minutes * 60, given.seed)
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    series = [Series("server", soak.server.process.pid), Series("worker", soak.steady.process.pid)]
    begun = time.monotonic()
    due = 30.0
    try:
        while (at := time.monotonic() - begun) < given.minutes * 60:
            for each in series:
                each.sample(at)
            if at >= due:
                soak.act()
                due = time.monotonic() - begun + soak.chance.uniform(*PAUSE_S)
            assert soak.server.process.poll() is None, f"the server has ended:\n{soak.server.log[-3000:]}"
            assert soak.steady.process.poll() in (None, 0), f"the worker:\n{soak.steady.log[-3000:]}"
            time.sleep(1)
        for relay in soak.relays:
            relay.heal()
        soak.server.wait_for("the job is finished")
        reply = asked(soak.server)
        faults = sum(len(relay.happened) for relay in soak.relays)
        others = ", ".join(f"{count} × {what}" for what, count in sorted(soak.happened.items()))
        print(
            f"version {reply.version}, {reply.pushes} pushes, {reply.refused_pushes} refused; "
            f"{faults} faults of links, and {others}"
        )
        assert np.isfinite(reply.train_loss)
        code = soak.steady.wait()
        assert code == 0, soak.steady.log[-3000:]
    finally:
        soak.end()
        forkserver.end()
    steady = [each.report() for each in series]
    return 0 if all(steady) else 1


if __name__ == "__main__":
    sys.exit(main())
