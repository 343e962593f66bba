"""One job whose server is killed hundreds of times, and whether anything is lost or counts twice.

    python tests/end_to_end/kills.py --kills 200 --seed 1 [--workers] [--preset]

Real daemons train digits in `sync` mode, with `4bit` both ways and momentum; or, with --preset, in local
steps. SIGKILL ends the server again and again: half of the times at a random moment, half at the points of
common/failpoints.py in turn. Some kills come while the server reads the state of its predecessor. It is
started again at once with the same --state.

The final parameters must be those of a calm run, bit for bit. With --workers half of the kills are of
workers, which return as new incarnations without residuals and without the state of their optimizer. Their
parameters differ, and the accuracy must be within a hundredth of the calm run's. In both cases an oracle
(`replaying`) must get the same bits from the log, and every outcome that a worker received must be in the
log. The exit status is 1 otherwise, and the job's files stay."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import forkserver
import grpc.aio
from daemons import Daemon, Daemons, status, talk
from replaying import Archive, Replay

from gradwire.common.failpoints import POINTS, VARIABLE
from gradwire.deploy.daemons import free_port
from gradwire.proto import messages as m
from gradwire.server.durable.folder import CHECKPOINT, KEPT, SEGMENT, segment_limit
from gradwire.settings import ServerSettings

WORKERS = 4
MOMENTUM, RATE, LEASE_S = 0.9, 0.05, 60.0
JOB = (
    *("--task", "small_tasks:slow_digits:slow=0.02", "--min-workers", str(WORKERS)),
    # A worker that is killed is replaced before its lease ends, and nobody else is lost on a busy machine.
    *("--lease-seconds", str(LEASE_S)),
)
SYNC = (
    *("--optimizer", f"sgd:momentum={MOMENTUM}", "--learning-rate", str(RATE), "--schedule", "cosine"),
    *("--downlink", "4bit"),
)
PRESETS_DOWNLINK = "1bit:block=4096"  # what `auto` becomes there; the oracle needs it by name
PRESET = (
    *("--preset", "low-communication", "--downlink", PRESETS_DOWNLINK),
    *("--batch-size", "4"),  # with which an epoch has `ROUNDS_PER_EPOCH` rounds of local steps
)
ROUNDS_PER_EPOCH = 11
ROUNDS_PER_KILL = 4  # more rounds than there are between two kills
# These points are reached only with a URL, and only with a long journal.
NOT_HERE = ("checkpoint.stored", "journal.read")
CHECKPOINTS = ("1steps", "2steps", "3steps", "7steps", "40steps")  # one of them for each server
MOST_ROUNDS = 4  # from the start of a server to its end
IN_RECOVERY, RECOVERY_S = 0.2, 1.0  # of kills at random moments, how many come so soon after the start
PATIENCE_S = 180.0
ACCURACY = 0.01
BEGAN = time.monotonic()


def asked(address: str) -> m.StatusResponse | None:
    """The server's status; None if it does not answer."""

    async def ask() -> m.StatusResponse:
        async with talk(address) as make:
            return await status(make())

    try:
        return asyncio.run(ask())
    except grpc.aio.AioRpcError:
        return None


class Job:
    """One job, with or without kills.

    Attributes:
        seen: the last version that was asked for.
        killed: how often, by what: a point, `server` or `worker` at a random moment.
        up_s, on_s: from the start of a server until it answers, and until the next version is made.
    """

    def __init__(self, folder: Path, seed: int, epochs: int, *, lasting: bool, preset: bool = False) -> None:
        """lasting: whether there is a --state, as it takes to be killed. preset: whether the job has the
        options `PRESET` instead of `SYNC`."""
        self.daemons, self.chance = Daemons(), random.Random(seed)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.preset = preset
        of_kind = PRESET if preset else SYNC
        self.options = (*JOB, *of_kind, "--seed", str(seed), "--epochs", str(epochs))
        self.told = folder / "told"
        self.state = folder / "state"
        self.archive: Archive | None = None
        if lasting:
            self.state.mkdir()
            self.archive = Archive(self.state, folder / "archive")
        self.seen = 0
        self.killed: Counter[str] = Counter()
        self.up_s: list[float] = []
        self.on_s: list[float] = []
        self.begin()
        self.server.wait_for("listening on")
        self.workers: dict[str, Daemon] = {}
        for name in (f"w{number}" for number in range(WORKERS)):  # so that ranks are in the order of names
            self.workers[name] = self.work(name)
            self.server.wait_for(rf"\({name}\) joined")

    def begin(self, point: str = "") -> None:
        """Start a server, which ends itself at a point."""
        self.point, self.first = point, -1
        kept: tuple[str, ...] = ()
        every, times = self.chance.choice(CHECKPOINTS), MOST_ROUNDS
        if self.archive is not None:
            if point.startswith("checkpoint"):
                every, times = self.chance.choice(CHECKPOINTS[:2]), 2
            elif not point.startswith("version"):  # several in a round
                times *= WORKERS
            durability = "fsync" if point == "journal.synced" else "journal"
            kept = ("--state", str(self.state), "--checkpoint-every", every, "--durability", durability)
        armed = f"{point}=kill@{self.chance.randint(1, times)}" if point else ""
        arguments = ("--host", "127.0.0.1", "--port", str(self.port), "--stay", *self.options, *kept)
        self.server = self.daemons.plain("gradwire.server.cli", *arguments, environ={VARIABLE: armed})
        self.began = time.monotonic()

    def work(self, name: str) -> Daemon:
        compressor = () if self.preset else ("--compressor", "4bit")
        arguments = ("--worker-id", name, *compressor, "--give-up-seconds", "600")
        return self.daemons.program("noting_worker", str(self.told), self.address, *arguments)

    def version(self) -> int | None:
        """None while the server does not answer."""
        found = asked(self.address)
        if found is None:
            return None
        over = found.phase in (m.Phase.FINISHING, m.Phase.FINISHED)
        assert not over, f"the job was over after {self.killed.total()} kills: give it more --epochs"
        self.seen = found.version
        if self.first < 0:
            self.first = found.version
            self.up_s.append(time.monotonic() - self.began)
        if len(self.on_s) < len(self.up_s) and found.version > self.first:
            self.on_s.append(time.monotonic() - self.began)
        return found.version

    def passed(self, rounds: float) -> bool:
        """Return after so many rounds, with True; or with False once the server has ended."""
        deadline, goal = time.monotonic() + PATIENCE_S, math.inf
        while self.server.process.poll() is None:
            version = self.version()
            if version is not None:
                goal = min(goal, version + rounds)
                if version >= goal:
                    return True
            assert time.monotonic() < deadline, f"no progress at version {version}, point {self.point!r}"
            time.sleep(0.02)
        return False

    def kill_worker(self) -> None:
        name = self.chance.choice(sorted(self.workers))
        self.workers[name].signal(signal.SIGKILL)
        self.workers[name].wait()
        self.workers[name] = self.work(name)
        self.killed["worker"] += 1

    def kill(self, workers: int, following: str) -> None:
        """Kill so many workers and the server, and start another one, which ends itself at a point if one
        follows."""
        while workers and self.passed(self.chance.randint(0, 3)):
            self.kill_worker()
            workers -= 1
        for _ in range(workers):  # the server has ended meanwhile
            self.kill_worker()
        if self.point:
            ended = not self.passed(math.inf)
            assert ended
        else:
            if self.chance.random() < IN_RECOVERY:
                time.sleep(self.chance.uniform(0, RECOVERY_S))
            else:
                self.passed(self.chance.randint(0, MOST_ROUNDS))
                time.sleep(self.chance.uniform(0, 0.1))
            self.server.signal(signal.SIGKILL)
        code = self.server.wait()
        assert code == -signal.SIGKILL, f"a server ended by itself, with {code}"
        self.killed[self.point or "server"] += 1
        assert self.archive is not None
        self.archive.note()
        self.begin(following)

    def finish(self) -> m.StatusResponse:
        """Wait for the end of the job, and return its last status."""
        for worker in self.workers.values():
            code = worker.wait(3600)
            assert code == 0, f"a worker ended with {code}:\n{worker.log[-3000:]}"
        found = asked(self.address)
        assert found is not None
        assert found.phase is m.Phase.FINISHED
        return found

    def end(self) -> None:
        self.daemons.end()
        if self.archive is not None:
            self.archive.end()


def killed(job: Job, kills: int, *, workers: bool) -> None:
    """Have so many kills happen."""
    servers = kills - kills // 2 if workers else kills
    meanwhile = [0] * servers
    for _ in range(kills - servers):
        meanwhile[job.chance.randrange(servers)] += 1
    points = itertools.cycle(each for each in POINTS if each not in NOT_HERE)
    for number, others in enumerate(meanwhile):
        last = number == servers - 1
        job.kill(others, "" if last or number % 2 else next(points))
        if job.killed.total() % 20 < 1 + others:
            passed_s = time.monotonic() - BEGAN
            print(f"{job.killed.total()} kills, {passed_s:.0f} s, version {job.seen}", flush=True)


def settings(job: Job) -> ServerSettings:
    """Options of a job, as its folder has them."""
    options: dict[str, Any] = json.loads((job.state / "job.json").read_text())["options"]
    options["lease_seconds"] = LEASE_S
    return ServerSettings(**options)


def accuracy(found: m.StatusResponse) -> float:
    return found.evaluations[-1].metrics["accuracy"]


def replayed(job: Job) -> Replay:
    """Replay the log of a job that has ended."""
    assert job.archive is not None
    assert not job.archive.shrunk, f"records were lost again of {job.archive.shrunk}"
    if not job.preset:
        return Replay(job.archive.folder, settings(job), rate=RATE, momentum=MOMENTUM, downlink="4bit")
    # The server subtracts the mean change.
    return Replay(job.archive.folder, settings(job), rate=1.0, momentum=0.0, downlink=PRESETS_DOWNLINK)


def report(job: Job, found: m.StatusResponse) -> bool:
    """Print how it went; whether the folder stayed within its bound."""
    assert job.archive is not None
    print("kills: " + ", ".join(f"{count} × {what}" for what, count in sorted(job.killed.items())))
    up_s, on_s = statistics.median(job.up_s), statistics.median(job.on_s)
    print(f"a server answers {up_s:.1f} s after it is started, and makes a version after {on_s:.1f} s")
    checkpoint, segment = (job.archive.largest_of[prefix] for prefix in (CHECKPOINT, SEGMENT))
    bound = (KEPT + 1) * checkpoint + KEPT * segment_limit(checkpoint)
    print(
        f"the folder had up to {job.archive.largest / 1e6:.1f} MB, of a bound of {bound / 1e6:.0f} MB; a "
        f"checkpoint {checkpoint / 1e6:.1f} MB, a segment up to {segment / 1e6:.1f} MB"
    )
    print(f"version {found.version}, {found.pushes} pushes, {found.refused_pushes} refused")
    return job.archive.largest <= bound


def compared(given: argparse.Namespace, folder: Path, jobs: list[Job]) -> bool:
    """Run the job calmly and with kills, and print whether that is as it should be. jobs: those begun."""

    def job(*, lasting: bool) -> Job:
        jobs.append(Job(folder, given.seed, epochs, lasting=lasting, preset=given.preset))
        return jobs[-1]

    rounds = given.kills * ROUNDS_PER_KILL
    epochs = given.epochs or math.ceil(rounds / ROUNDS_PER_EPOCH)
    print(f"seed {given.seed}, {epochs} epochs of {ROUNDS_PER_EPOCH} rounds, {WORKERS} workers", flush=True)
    calm = job(lasting=False)
    expected = calm.finish()
    calm.end()
    calm.told.unlink()
    print(f"the calm run: {time.monotonic() - BEGAN:.0f} s, accuracy {accuracy(expected):.4f}", flush=True)
    other = job(lasting=True)
    killed(other, given.kills, workers=given.workers)
    found = other.finish()
    other.end()
    right = report(other, found)
    replay = replayed(other)
    told = replay.check_told(other.told)
    same = {"the log's": replay.reference.sha256()}
    if not given.workers:
        same["the calm run's"] = expected.parameters_sha256
    for whose, digest in same.items():
        equal = digest == found.parameters_sha256
        right &= equal
        print(f"parameters: {'' if equal else 'NOT '}{whose}, bit for bit")
    print(f"{told} outcomes were told, and all of them are in the log")
    difference = accuracy(found) - accuracy(expected)
    print(f"accuracy {accuracy(found):.4f}, {difference:+.4f}; {time.monotonic() - BEGAN:.0f} s in all")
    return right and replay.reference.version == found.version and abs(difference) <= ACCURACY


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", action="store_true", help="half of the kills are of workers")
    text = "a job with --preset low-communication instead of sync with 4bit"
    parser.add_argument("--preset", action="store_true", help=text)
    parser.add_argument("--epochs", type=int, default=0, help="by default enough for all kills")
    given = parser.parse_args()
    folder, jobs, right = Path(tempfile.mkdtemp(prefix="kills-")), list[Job](), False
    try:
        right = compared(given, folder, jobs)
    except AssertionError:
        for job in jobs[-1:]:
            for name, daemon in {"server": job.server, **job.workers}.items():
                print(f"---- {name}\n{daemon.log[-3000:]}", file=sys.stderr)
        raise
    finally:
        for job in jobs:
            job.end()
        forkserver.end()
        if right:
            shutil.rmtree(folder)
        else:
            print(f"what it has left is in {folder}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
