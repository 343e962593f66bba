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
    "gc-server --help": "gradwire.server.cli",
    "gc-worker --help": "gradwire.worker.cli",
    "gc-run --help": "gradwire.deploy.cli",
}


def median_seconds(command: Sequence[str], runs: int) -> float:
    """The median wall time of a command that must succeed."""
    times: list[float] = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    empty = median_seconds([sys.executable, "-c", "pass"], runs)
    print(f"{'empty Python':<18}{empty * 1e3:7.0f} ms")
    for name, module in COMMANDS.items():
        seconds = median_seconds([sys.executable, "-m", module, "--help"], runs)
        print(f"{name:<18}{seconds * 1e3:7.0f} ms{seconds / empty:6.1f} x")


if __name__ == "__main__":
    main()
