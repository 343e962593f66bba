"""`gc-bench startup`: wall time of `--help`, by command, and CPU time of a daemon until it is ready.

Prints the medians over --runs of the wall time of `--help`, with a goal under 0.5 s, and of the CPU time of
daemons, user and system. The goal is at most 2 s for a server that listens, and 3 s for a worker that has
loaded `digits` and is ready for work. Both stand beside their ratio to the least possible time: that of
`python -c pass`, and of `import torch`. Tests forbid imports instead, because a time fails on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from .arguments import at_least_one, option
from .pusher import start_server

COMMANDS = {
    "empty Python": ("-c", "pass"),
    "gc-server --help": ("-m", "gradwire.server.cli", "--help"),
    "gc-worker --help": ("-m", "gradwire.worker.cli", "--help"),
    "gc-run --help": ("-m", "gradwire.deploy.cli", "--help"),
    "gc-plan --help": ("-m", "gradwire.deploy.plan", "--help"),
    "gc-bench --help": ("-m", "gradwire.benchmarks.cli", "--help"),
}


def wall_seconds(arguments: Sequence[str]) -> float:
    """Run Python with these arguments, which must succeed, and return the wall time in seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


# Arguments of Python for each daemon, and the text that it prints when it is ready.
DAEMONS = {
    "import torch": (("-c", "import torch, time; print('ready', flush=True); time.sleep(60)"), "ready"),
    "gc-server": (
        ("-m", "gradwire.server.cli", "--host=127.0.0.1", "--http-port=-1", "--port=0"),
        "listening on",
    ),
    "gc-worker": (("-m", "gradwire.worker.cli", "--http-port=-1"), "ready for work"),
}


def cpu_seconds(arguments: Sequence[str], ready: str) -> float:
    """Run Python with these arguments until it prints `ready`, end it, and return its CPU seconds."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with process.stdout as lines:
        is_ready = any(ready in line for line in lines)
        process.send_signal(signal.SIGKILL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # tells Popen not to wait for the process again
    if not is_ready:
        raise RuntimeError(f"{' '.join(arguments)}: ended without {ready!r}")
    return usage.ru_utime + usage.ru_stime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--runs", at_least_one, 9, "N", "runs of each command; their median counts")


def run(given: argparse.Namespace) -> None:
    """Time the commands and the daemons, and print the medians."""
    # Alternately, so that other work on the machine affects all commands alike.
    rounds = [{name: wall_seconds(command) for name, command in COMMANDS.items()} for _ in range(given.runs)]
    for name in COMMANDS:
        seconds = statistics.median(one[name] for one in rounds)
        ratio = statistics.median(one[name] / one["empty Python"] for one in rounds)
        print(f"{name:<18}{seconds * 1e3:7.0f} ms{ratio:6.1f} x")
    with start_server("--host=127.0.0.1", "--min-workers=1000") as port:  # a job that never starts
        os.environ["GC_SERVER"] = f"127.0.0.1:{port}"
        starts = [{name: cpu_seconds(*daemon) for name, daemon in DAEMONS.items()} for _ in range(given.runs)]
    for name in DAEMONS:
        seconds = statistics.median(one[name] for one in starts)
        ratio = statistics.median(one[name] / one["import torch"] for one in starts)
        print(f"{name:<18}{seconds:7.2f} s of CPU{ratio:6.2f} x")
