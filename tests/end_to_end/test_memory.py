"""The memory that a job needs, measured: docs/reference/memory.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemons import Daemons
from large_task import peak_bytes

from gradwire.compressors import parse_compressor
from gradwire.planning.memory import memory_of

WIDTH = 1448
MODEL_BYTES = 8 * WIDTH * WIDTH * 4
# Free memory that malloc keeps weighs more with a model that is small enough for a test.
MARGIN = 1.75


def peaks(daemons: Daemons, folder: Path, width: int) -> tuple[int, int]:
    """Peaks of the server and of the larger worker."""
    folder.mkdir()
    task = f"large_task:large:folder={folder},width={width}"
    server = daemons.server("--task", task, "--epochs", "1", "--batch-size", "4", "--min-workers", "2")
    for worker in daemons.workers(server, 2, "--task", task):
        assert worker.wait() == 0
    server.wait_for("the job is finished")
    return peak_bytes(server.process.pid), max(int(each.read_text()) for each in folder.iterdir())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_job_needs_the_memory_that_the_table_names(daemons: Daemons, tmp_path: Path) -> None:
    base, large = (peaks(daemons, tmp_path / str(width), width) for width in (16, WIDTH))
    server, worker = ((after - before) / MODEL_BYTES for before, after in zip(base, large, strict=True))
    table = memory_of(
        [(WIDTH, WIDTH)] * 8, 2, parse_compressor("4bit").compression(), feedback=True, task=True
    )
    assert server < table.server_bytes / MODEL_BYTES + MARGIN
    assert worker < table.worker_bytes / MODEL_BYTES + MARGIN
