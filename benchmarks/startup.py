"""How long `--help` takes, command by command, beside an empty Python.

    python -m gradwire.benchmarks.startup [RUNS]

Prints the median of RUNS wall times (default 9) and the ratio to `python -c pass`. The goal is under 0.5 s.
Importing torch alone exceeds that; a test forbids the import, because a wall time fails on a busy machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

COMMANDS = {
    "empty Python": ("-c", "pass"),
    "gc-server --help": ("-m", "gradwire.server.cli", "--help"),
    "gc-worker --help": ("-m", "gradwire.worker.cli", "--help"),
    "gc-run --help": ("-m", "gradwire.deploy.cli", "--help"),
    "gc-bench --help": ("-m", "gradwire.benchmarks.cli", "--help"),
}


def wall_seconds(arguments: Sequence[str]) -> float:
    """How long Python takes with these arguments; it must succeed."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    # In turn, so that whatever else the machine does meets all of them alike.
    rounds = [{name: wall_seconds(command) for name, command in COMMANDS.items()} for _ in range(runs)]
    for name in COMMANDS:
        seconds = statistics.median(one[name] for one in rounds)
        ratio = statistics.median(one[name] / one["empty Python"] for one in rounds)
        print(f"{name:<18}{seconds * 1e3:7.0f} ms{ratio:6.1f} x")


if __name__ == "__main__":
    main()
