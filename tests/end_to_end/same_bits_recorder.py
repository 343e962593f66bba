"""The part of `same_bits.py` that trains: `same_bits_recorder.py CHECKOUT FILE RUN...`.

The Python of the checkout's .venv runs it. It uses nothing of the checkout's code but its commands,
`gradwire.connect`, and `gradwire.worker.tasks.Task`, so that modules may have any names. The processes of a
run are forked from this one, which has imported what a server and a worker import: that saves seconds of
processor time for each. It has one thread, without which no fork would be safe.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Generator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from same_bits_runs import RUNS, Run

import gradwire

JOBS = "same_bits_jobs"  # the module of tasks and scripts
AT_ONCE = 1 + (os.cpu_count() or 1)  # runs; their processes wait for each other much of the time
PATIENCE_S = 180.0  # for one run, on a busy machine
POLL_S = 0.01
PR_SET_PDEATHSIG = 1  # of Linux: a signal to get when the process that forked is gone
ALL = (
    *("--host", "127.0.0.1", "--threads", "1", "--seed", "3", "--epochs", "2", "--batch-size", "8"),
    # Nobody is lost on a busy machine: the bits would be others.
    *("--part-bytes", "16384", "--checkpoint-every", "5steps", "--lease-seconds", "120"),
)
STEPS = "--optimizer", "sgd:weight_decay=1e-3", "--learning-rate", "0.05", "--schedule", "cosine"  # of tasks
Found = dict[str, str]  # of a run: values by what they are
Command = Callable[[], object]
Waiting = Generator[None, None, None]  # a function that yields until it may continue


class RunError(Exception):
    """A run has not come to its end; the message says why."""


class Child:
    """A forked process that calls a function."""

    def __init__(
        self, name: str, folder: Path, arguments: Sequence[str], call: Command, **environ: str
    ) -> None:
        """
        Args:
            name: of its log, without suffix, in `folder`, which is its working directory.
            environ: further variables.
        """
        self.log = folder / f"{name}.log"
        self.code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for fd in (1, 2):
                    os.dup2(log, fd)
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                os.chdir(folder)
                os.environ.update(environ)
                sys.argv[1:] = arguments
                code = int(call() or 0)  # type: ignore[call-overload]
            except SystemExit as ending:
                code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # the interpreter's own end would take longer than many a run

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended it; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def report(self) -> str:
        """Return how it ended, with the last lines of its log."""
        lines = self.log.read_text().splitlines()[-5:]
        return "\n    ".join([f"{self.log.name} ended with {self.code}:", *lines])


class Job:
    """One run: its processes, and what it comes to."""

    def __init__(self, run: Run, folder: Path, commands: dict[str, Command]) -> None:
        self.run, self.folder, self._commands = run, folder, commands
        self.port, self.http_port = free_port(), free_port()
        self._output = folder / "output"
        self._children: list[Child] = []

    def play(self) -> Generator[None, None, Found]:
        """Yield until the job is done; return what it ended with. Raises RunError."""
        yield from self._train()
        if self.run.resumes:
            self._output.unlink()
            yield from self._train("--resume", "server")
        return found_in(self._output)

    def _train(self, *options: str) -> Waiting:
        run = self.run
        kept = run.state and not options
        server = self._serve(*options, kept=kept)
        yield from self._until(answers, self.port)
        workers = [self._work(number, kept=kept) for number in range(run.workers - run.hangs)]
        if run.hangs:  # the last to join, so that it has the last rank
            yield from self._until(self._reached, server, "members", len(workers))
            workers.append(self._work(len(workers), HANGS="1"))
        for version in run.kills:
            yield from self._until(self._reached, server, "version", version)
            server.signal(signal.SIGKILL)
            yield from self._ended(server, -signal.SIGKILL)
            server = self._serve(kept=kept)
        for version in run.stops:
            yield from self._until(self._reached, server, "version", version)
            server.signal(signal.SIGTERM)
            yield from self._ended(server, 128 + signal.SIGTERM)
            for worker in workers:
                yield from self._until(self._has_written, worker)
                worker.signal(signal.SIGKILL)
            server = self._serve(kept=kept)
            workers = [self._work(number, kept=kept) for number in range(run.workers)]
        if run.hangs:
            yield from self._until(self._output.exists)
            workers.pop().signal(signal.SIGKILL)
        for worker in workers:
            yield from self._ended(worker)
        yield from self._until(self._output.exists)
        server.signal(signal.SIGTERM)  # it would stay for some seconds
        yield from self._ended(server)

    def end(self) -> None:
        """Kill what still runs."""
        for child in self._children:
            child.signal(signal.SIGKILL)
            while child.poll() is None:
                time.sleep(POLL_S)

    def _serve(self, *options: str, kept: bool) -> Child:
        run = self.run
        what = ("--script",) if run.script else ("--task", f"{JOBS}:{run.task}", *STEPS)
        state = ("--state", "server") if kept else ()
        http = self.http_port if run.kills or run.stops or run.hangs else -1
        arguments = (
            *(*ALL, *what, *state, "--min-workers", str(run.workers), "--output", "output"),
            *("--port", str(self.port), "--http-port", str(http), *run.options, *options),
        )
        return self._start("gc-server", "server", arguments)

    def _work(self, number: int, *, kept: bool = False, **environ: str) -> Child:
        run, name = self.run, f"w{number}"
        options = {"server": f"127.0.0.1:{self.port}", "worker-id": name, "compressor": run.compressor}
        options |= {"threads": "1", "http-port": "-1"} | ({"state": name} if kept else {})
        if run.script:  # as from a shell
            given = {f"GC_{key.replace('-', '_').upper()}": value for key, value in options.items()}
            return self._start(run.script, name, (), **given, **environ)
        arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
        arguments += ["--allow-task", JOBS, *run.worker_options]
        return self._start("gc-worker", name, arguments, TURNS=str(self.folder), **environ)

    def _start(self, command: str, name: str, arguments: Sequence[str], **environ: str) -> Child:
        call = self._commands.get(command) or getattr(importlib.import_module(JOBS), f"script_{command}")
        child = Child(name, self.folder, arguments, call, **environ)
        self._children.append(child)
        return child

    def _until(self, condition: Callable[..., bool], *arguments: object) -> Waiting:
        """Yield until the condition holds. Raises RunError if a process has failed meanwhile."""
        while not condition(*arguments):
            for child in self._children:
                if child.poll() not in (None, 0, -signal.SIGKILL, 128 + signal.SIGTERM):
                    raise RunError(child.report())
            yield

    def _ended(self, child: Child, expected: int = 0) -> Waiting:
        """Yield until a process has ended. Raises RunError if it ended otherwise than expected."""
        yield from self._until(lambda: child.poll() is not None)
        if child.code != expected:
            raise RunError(child.report())

    def _has_written(self, worker: Child) -> bool:
        """Return whether a worker has written its state of the version at which the server was stopped."""
        return newest(self.folder / worker.log.stem) == newest(self.folder / "server")

    def _reached(self, server: Child, metric: str, value: float) -> bool:
        """Return whether a metric of the server is that large. Raises RunError if the server has ended."""
        if server.poll() is not None:
            raise RunError(f"{metric} has not reached {value:g}: {server.report()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=5) as reply:
                text: str = reply.read().decode()
        except OSError:
            return False  # it does not listen yet
        found = re.search(rf"^gradwire_server_{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return found is not None and float(found[1]) >= value


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def newest(state: Path) -> int:
    """Return the largest version in the names of a --state's folders; -1 if there is none."""
    found = (re.search(r"-(\d+)$", each.name) for each in state.rglob("*") if each.is_dir())
    return max((int(each[1]) for each in found if each is not None), default=-1)


def found_in(output: Path) -> Found:
    """Return what a file of parameters says: their version and checksum, and another of everything in it."""
    data = output.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    digest = hashlib.sha256()
    for name in sorted(header):
        entry = header[name]
        first, last = entry["data_offsets"]
        digest.update(f"{name} {entry['dtype']} {entry['shape']} ".encode())
        digest.update(data[8 + size + first : 8 + size + last])
    return {
        "version": metadata["version"],
        "parameters_sha256": metadata["sha256"],
        "tensors_sha256": digest.hexdigest(),
    }


def record(runs: Sequence[Run], folder: Path, commands: dict[str, Command]) -> dict[str, Found]:
    """Play the runs, some at once. Returns what each came to, or why it failed."""
    found: dict[str, Found] = {}
    waiting = list(enumerate(runs))
    active: dict[Job, tuple[Generator[None, None, Found], float]] = {}
    try:
        while waiting or active:
            while waiting and len(active) < AT_ONCE:
                number, run = waiting.pop(0)
                own = folder / str(number)
                own.mkdir()
                job = Job(run, own, commands)
                active[job] = job.play(), time.monotonic() + PATIENCE_S
            for job, (playing, deadline) in list(active.items()):
                try:
                    if time.monotonic() > deadline:
                        raise RunError(f"still running after {PATIENCE_S:g} s; logs are in {job.folder}")
                    next(playing)
                    continue
                except StopIteration as ending:
                    found[job.run.name] = ending.value
                    shutil.rmtree(job.folder)
                except RunError as error:
                    found[job.run.name] = {"failed": str(error)}
                    say(f"{job.run.name}: {error}")
                del active[job]
                job.end()
                say(f"{len(found)} of {len(runs)}: {job.run.name}")
            time.sleep(POLL_S)
    finally:
        for job in active:
            job.end()
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def preload(folder: Path, commands: dict[str, Command]) -> None:
    """Import what the processes of a small job have imported in the end, whatever the modules are called."""

    def noting(name: str) -> Command:
        def run() -> object:
            try:
                return commands[name]()
            finally:
                Path(f"{name}.modules").write_text("\n".join(sys.modules))

        return run

    own = folder / "first"
    own.mkdir()
    job = Job(Run("first", ("--epochs", "1"), workers=1), own, {name: noting(name) for name in commands})
    playing, names = job.play(), set[str]()
    try:
        for _ in playing:
            time.sleep(POLL_S)
    finally:
        job.end()
    for name in commands:
        names.update((own / f"{name}.modules").read_text().split())
    for name in sorted(name for name in names if name.split(".")[0] == "gradwire"):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "gradwire"]:
        getattr(sys.modules[name], "warm_up", bool)()  # the kernels, compiled by now


def main(checkout: str, output: str, *names: str) -> None:
    """Record the runs in a file, as JSON."""
    if (installed := Path(gradwire.__file__).resolve().parent) != Path(checkout):
        sys.exit(f"same_bits: {sys.executable} runs {installed}; install {checkout} with `pip install -e`")
    # As a worker has it before it imports grpc: what this forks would die of grpc's handlers.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    commands: dict[str, Command] = {
        each.name: each.load()
        for each in entry_points(group="console_scripts")
        if each.name in ("gc-server", "gc-worker")
    }
    with tempfile.TemporaryDirectory(prefix="same-bits-", ignore_cleanup_errors=True) as folder:
        importlib.import_module(JOBS)
        preload(Path(folder), commands)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a fork would lose {len(threads) - 1} threads that an import has started"
        gc.collect()
        gc.freeze()
        found = record([run for run in RUNS if run.name in names], Path(folder), commands)
    Path(output).write_text(json.dumps({name: found[name] for name in names}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
