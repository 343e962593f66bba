"""Ray Train with two workers, by `make check-ray`; without ray this is skipped."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forkserver
import pytest
from daemons import Daemons

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_digits.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make check-ray installs ray")


@pytest.fixture
def daemons() -> Iterator[Daemons]:
    started = Daemons(forkserver.plain)
    try:
        yield started
    finally:
        started.end()


@pytest.mark.parametrize(("form", "mark"), [("ddp", r"# \+$"), ("job", r"# \+ job$")])
def test_example_trains_with_at_most_four_lines_more(daemons: Daemons, form: str, mark: str) -> None:
    assert 0 < len(re.findall(mark, EXAMPLE.read_text(), re.M)) <= 4
    more = list[str]()
    if form == "job":
        options = ["--script", "--min-workers", "2", "--epochs", "4", "--batch-size", "32"]
        more = ["--server", daemons.server(*options).address]
    trained = subprocess.run(
        [sys.executable, str(EXAMPLE), "--form", form, "--epochs", "4", *more],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
    )
    said = trained.stdout + trained.stderr
    assert trained.returncode == 0, said
    accuracy = re.search(r"accuracy ([\d.]+)", said)
    assert accuracy is not None, said
    assert float(accuracy.group(1)) > 0.4  # by chance 0.1
