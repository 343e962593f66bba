"""The memory that gc-plan prints, against the table of docs/reference/memory.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradwire.compressors import parse_compressor
from gradwire.planning.memory import memory_of

SHAPES = [(1024, 1024)] * 100
MODEL = 4 * 100 * 1024 * 1024


@pytest.mark.parametrize(
    ("spec", "more", "worker", "server"),
    [
        ("4bit", {}, 4.25, 2 + 3 / 8),
        ("4bit", {"task": True}, 3.26, 2 + 3 / 8),
        ("4bit", {"overlap": "both", "states": 2}, 6.25, 4 + 3 / 8),
        ("none", {"states": 1}, 2 + 2, 1 + 1 + 3),
    ],
)
def test_memory_is_that_of_the_table(
    spec: str, more: dict[str, object], worker: float, server: float
) -> None:
    compressor = parse_compressor(spec)
    feedback = compressor.wrapping is not None and compressor.wrapping.feedback
    found = memory_of(SHAPES, 2, compressor.compression(), feedback=feedback, **more)  # type: ignore[arg-type]
    assert found.worker_bytes / MODEL == pytest.approx(worker, abs=0.01)
    assert found.server_bytes / MODEL == pytest.approx(server + 0.01, abs=0.01)


def test_the_table_sums_to_what_is_predicted() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "memory.md").read_text()
    sums = re.search(
        r"two workers, SGD\*\* \| \*\*([\d.]+)\*\* \| \*\*([\d.]+); of a task ([\d.]+)\*\*", page
    )
    assert sums is not None
    assert [float(each) for each in sums.groups()] == [2.4, 4.25, 3.3]
