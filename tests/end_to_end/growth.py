"""Resident memory of server, workers and DDP ranks over many versions of a tiny model, without faults.

    python tests/end_to_end/growth.py --versions 20000

A server with one worker each for `4bit`, `topk:ratio=4` and `8bit`; then two ranks of torch's DDP with
gradwire's hook for each of them. It prints how much the memory of each process grows per 1,000 versions, with
the standard error of twelve means; the first tenth, in which heaps and caches fill, does not count. The exit
status is 1 if a process grows by more than three errors and by more than it may.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import forkserver
import numpy as np
from daemons import Daemons, asked
from soak import measured, slope

from gradwire.deploy.daemons import free_port

COMPRESSORS = ("4bit", "topk:ratio=4", "8bit")
MODEL = "8x512"  # of a rank: tensors and elements of each
WARM_UP = 0.1  # of the versions
MAY_GROW_MIB = 1.0  # over all that counts: what a heap takes before it settles
PAUSE_S = 1.0

Samples = dict[str, list[tuple[float, float]]]  # by process: version, MiB


def follow(processes: Mapping[str, Any], version: Callable[[], float], samples: Samples) -> None:
    """Take samples of every process until the first of them ends.

    processes: by name, each with `pid` and `poll`.
    """
    while all(process.poll() is None for process in processes.values()):
        at = version()
        for name, process in processes.items():
            found = measured(process.pid)
            if found is not None:
                samples.setdefault(name, []).append((at, found[0]))
        time.sleep(PAUSE_S)


def job(versions: int, samples: Samples) -> None:
    """Train with three workers, each with a compressor of its own."""
    daemons = Daemons()
    try:
        server = daemons.server(
            *("--task", "small_tasks:regression", "--batch-size", "8", "--max-steps", str(versions)),
            *("--epochs", "0", "--min-workers", "3", "--learning-rate", "0.001", "--threads", "1"),
            # The server remembers the last 1,024 evaluations: that many are to be made during the warm-up.
            *("--evaluate-every", "1steps"),
        )
        workers = [daemons.worker(server.address, "--compressor", each) for each in COMPRESSORS]
        named = {f"worker {each}": worker.process for each, worker in zip(COMPRESSORS, workers, strict=True)}
        follow({"server": server.process, **named}, lambda: asked(server).version, samples)
        for worker in workers:
            assert worker.wait() == 0, worker.log[-3000:]
    finally:
        daemons.end()


def ranks(compressor: str, steps: int, samples: Samples) -> None:
    """Train with two ranks of DDP. They do not tell where they are: steps are taken to be evenly spread."""
    address, begun = f"127.0.0.1:{free_port()}", time.monotonic()
    program = sys.executable, "-m", "gradwire.benchmarks.ddp", MODEL, "0", "", str(steps)
    hook = f"gradwire:{compressor}"
    processes = {
        f"rank {rank} {compressor}": subprocess.Popen([*program, str(rank), "2", address, hook])
        for rank in range(2)
    }
    found: Samples = {}
    try:
        follow(processes, lambda: time.monotonic() - begun, found)
        for process in processes.values():
            assert process.wait(60) == 0
    finally:
        for process in processes.values():
            process.kill()
    for name, values in found.items():
        samples[name] = [(steps * at / values[-1][0], mib) for at, mib in values]


def grows(name: str, found: list[tuple[float, float]], versions: int) -> bool:
    """Print how much a process grows; return whether that is more than noise."""
    at, mib = np.array([each for each in found if each[0] >= WARM_UP * versions]).T
    rise, error = slope(at / 1000, mib)
    much = rise > 3 * error and rise * (at[-1] - at[0]) / 1000 > MAY_GROW_MIB
    print(
        f"{name}: {1024 * rise:+.2f} ± {1024 * error:.2f} KiB per 1,000 versions; from {mib[0]:.1f} to "
        f"{mib[-1]:.1f} MiB in {at[-1] - at[0]:,.0f} versions{'  GROWS' if much else ''}",
        flush=True,
    )
    return bool(much)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--versions", type=int, default=20_000)
    given = parser.parse_args()
    growing = False
    try:
        runs: list[Callable[[int, Samples], None]] = [job, *(partial(ranks, each) for each in COMPRESSORS)]
        for run in runs:
            samples: Samples = {}
            run(given.versions, samples)
            for name, found in samples.items():
                growing |= grows(name, found, given.versions)
    finally:
        forkserver.end()
    return int(growing)


if __name__ == "__main__":
    sys.exit(main())
