"""`gc-bench startup`: wall time of `--help`, command by command, and CPU of a daemon until it is ready.

Prints the medians of --runs wall times of `--help` (goal under 0.5 s), and of as many CPU
times, user and system, of daemons (goal at most 2 s for a server that listens, 3 s for a worker that has
loaded `digits` and is ready for work). Both have their ratio to the fastest there can be: `python -c pass`,
and `import torch`. Tests forbid imports instead, because a time fails on a busy machine.
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
    """Return the seconds of Python with these arguments; it must succeed."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


# A daemon, with what it says when it is ready.
DAEMONS = {
    "import torch": (("-c", "import torch, time; print('ready', flush=True); time.sleep(60)"), "ready"),
    "gc-server": (
        ("-m", "gradwire.server.cli", "--host=127.0.0.1", "--http-port=-1", "--port=0"),
        "listening on",
    ),
    "gc-worker": (("-m", "gradwire.worker.cli", "--http-port=-1"), "ready for work"),
}


def cpu_seconds(arguments: Sequence[str], ready: str) -> float:
    """Return the CPU seconds of Python with these arguments until it prints `ready`; then end it."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with process.stdout as lines:
        said = any(ready in line for line in lines)
        process.send_signal(signal.SIGKILL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # it has been waited for
    if not said:
        raise RuntimeError(f"{' '.join(arguments)}: ended without {ready!r}")
    return usage.ru_utime + usage.ru_stime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--runs", at_least_one, 9, "N", "runs of each command, of which the median counts")


def run(given: argparse.Namespace) -> None:
    # In turn, so that whatever else the machine does meets all of them alike.
    rounds = [{name: wall_seconds(command) for name, command in COMMANDS.items()} for _ in range(given.runs)]
    for name in COMMANDS:
        seconds = statistics.median(one[name] for one in rounds)
        ratio = statistics.median(one[name] / one["empty Python"] for one in rounds)
        print(f"{name:<18}{seconds * 1e3:7.0f} ms{ratio:6.1f} x")
    with start_server("--host=127.0.0.1", "--min-workers=1000") as port:  # it never has enough of them
        os.environ["GC_SERVER"] = f"127.0.0.1:{port}"
        starts = [{name: cpu_seconds(*daemon) for name, daemon in DAEMONS.items()} for _ in range(given.runs)]
    for name in DAEMONS:
        seconds = statistics.median(one[name] for one in starts)
        ratio = statistics.median(one[name] / one["import torch"] for one in starts)
        print(f"{name:<18}{seconds:7.2f} s of CPU{ratio:6.2f} x")
