"""What redundancy costs and saves: `measure` runs one job of paced workers, one of which may be slow.

As `modes`, real processes and sockets and made computing time. As a program it prints the table of
docs/modes.md: `python -m gradwire.benchmarks.redundancy`.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..deploy.report import result_of
from ..settings import RunSettings
from . import output
from .jobs import Program, run_job


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One job. seconds_per_batch: of training, for as many samples as a batch for each worker."""

    seconds: float
    rounds: int
    seconds_per_batch: float
    payload_bytes_up: int
    accuracy: float
    refused_pushes: int


def measure(
    *,
    workers: int = 4,
    slower: float = 1.0,
    epochs: int = 3,
    seconds_per_sample: float = 0.004,
    batch_size: int = 32,
    compressor: str = "none",
    mode: str = "sync",
) -> Outcome:
    """Train digits once. slower: factor of the last worker.

    Raises BenchError when the job does not come to its end.
    """
    run = RunSettings(
        task=f"gradwire.benchmarks.paced:digits:seconds={seconds_per_sample}",
        workers=workers,
        epochs=epochs,
        batch_size=batch_size,
        compressor=compressor,
        mode=mode,
    )

    def worker(rank: int) -> Program:
        return "gradwire.benchmarks.paced", str(slower if rank == workers - 1 else 1.0)

    with tempfile.TemporaryDirectory() as directory:
        status = run_job(run, Path(directory), worker=worker)
    result = result_of(run, status)
    batches = status.epoch * SAMPLES / (workers * batch_size)
    return Outcome(
        seconds=status.training_seconds,
        rounds=status.version,
        seconds_per_batch=status.training_seconds / batches,
        payload_bytes_up=status.traffic.payload_bytes_up,
        accuracy=result.validation_accuracy or 0.0,
        refused_pushes=status.refused_pushes,
    )


SAMPLES = 1408  # of digits, in an epoch
CASES = ("sync", "sync:redundancy=2", "sync:stragglers=1")


def main() -> int:
    print(
        output.table(
            ("", "workers", "ms per batch", "of even", "payload MB up", "accuracy", "not needed"), []
        )
    )
    for mode in CASES:
        even = 0.0
        for situation, slower in (("even", 1.0), ("one slow", 10.0)):
            found = measure(mode=mode, slower=slower)
            even = even or found.seconds_per_batch
            times = (f"{found.seconds_per_batch * 1e3:.0f}", f"{found.seconds_per_batch / even:.2f}")
            sent = (f"{found.payload_bytes_up / 1e6:.2f}", f"{found.accuracy:.3f}", found.refused_pushes)
            print(output.row((f"`{mode}`", situation, *times, *sent)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
