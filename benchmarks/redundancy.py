"""What redundancy costs and saves with paced workers, one of which may be slow: the table of docs/modes.md.

    python -m gradwire.benchmarks.redundancy

As `modes`, real processes and sockets and made computing time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..deploy.report import result_of
from ..settings import RunSettings
from . import output
from .jobs import DIGITS_SAMPLES, one_slower, run_job

TASK = "gradwire.benchmarks.paced:digits:seconds=0.004"
MODES = ("sync", "sync:redundancy=2", "sync:stragglers=1")


def main() -> None:
    headings = "", "workers", "ms per batch", "of even", "payload MB up", "accuracy", "not needed"
    print(output.table(headings, []))
    for mode in MODES:
        run = RunSettings(task=TASK, epochs=3, compressor="none", mode=mode)
        even = 0.0
        for situation, slower in (("even", 1.0), ("one slow", 10.0)):
            with tempfile.TemporaryDirectory() as directory:
                status = run_job(run, Path(directory), worker=one_slower(run.workers, slower))
            found = result_of(run, status)
            # A batch is as many samples as a batch for each worker.
            seconds = found.seconds * run.workers * run.batch_size / (found.epochs * DIGITS_SAMPLES)
            even = even or seconds
            times = f"{seconds * 1e3:.0f}", f"{seconds / even:.2f}"
            sent = f"{found.payload_bytes_up / 1e6:.2f}", f"{found.validation_accuracy or 0.0:.3f}"
            print(output.row((f"`{mode}`", situation, *times, *sent, found.refused_pushes)), flush=True)


if __name__ == "__main__":
    main()
