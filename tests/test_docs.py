"""What the documentation lists is what the code has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gradwire.exits import Exit
from gradwire.server.config import ServerConfig
from gradwire.server.metrics import Metrics as ServerMetrics
from gradwire.worker.config import WorkerConfig
from gradwire.worker.metrics import Metrics as WorkerMetrics

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("side", "registry"),
    [("server", ServerMetrics("none").registry), ("worker", WorkerMetrics("4bit").registry)],
)
def test_every_metric_is_listed_with_its_type(side: str, registry: CollectorRegistry) -> None:
    rows = re.findall(rf"^\| `(gradwire_{side}_\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.M)
    offered = {
        (metric.name + ("_total" if metric.type == "counter" else ""), metric.type)
        for metric in registry.collect()
        if metric.name.startswith(f"gradwire_{side}_")
    }
    assert set(rows) == offered
    assert len(rows) == len(offered)


def test_every_exit_code_is_listed() -> None:
    table = (DOCS / "commands.md").read_text().split("## Exit codes")[1].split("##")[0]
    listed = {
        int(number) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for number in row.split(",")
    }
    assert listed == {int(code) for code in Exit}


def test_options_named_in_the_documentation_exist() -> None:
    known = {field.name for cls in (ServerConfig, WorkerConfig) for field in dataclasses.fields(cls)}
    known |= {"help", "print_config", "config", "version"}
    named = set(re.findall(r"`--([a-z-]+)", (DOCS / "commands.md").read_text()))
    assert {name.replace("-", "_").removeprefix("no_") for name in named} <= known
