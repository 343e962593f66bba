"""gc-bench compressors: its rows, a training in one process, and a help that imports nothing heavy."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.benchmarks import cli
from gradwire.benchmarks.compressors import default_specs
from gradwire.benchmarks.simulation import train
from gradwire.common.spec import parse_spec
from gradwire.compressors import create
from gradwire.compressors.registry import BUILT_IN
from gradwire.worker.tasks.digits import digits

KEYS = {
    *("name", "device", "elements", "seconds", "bytes_moved", "ratio_to_add", "wire_bytes"),
    *("raw_bytes", "promised_ratio", "achieved_ratio", "error_norm"),
}


def test_every_compressor_is_in_the_table() -> None:
    for spec in default_specs():
        create(spec)
    assert {parse_spec("compressor", spec).name for spec in default_specs()} == set(BUILT_IN)


def test_the_rows_of_the_speed_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    specs = ["none", "4bit", "qsgd", "topk:ratio=10", "threshold"]
    arguments = ["--elements", "5000", "--repeats", "1", "--json", str(path)]
    code = cli.main(["compressors", *arguments, "--compressors", *specs])
    assert code == 0
    rows = json.loads(path.read_text())
    assert [row["name"] for row in rows] == specs
    for row in rows:
        assert set(row) == KEYS
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["seconds"] > 0
        assert row["raw_bytes"] == 20_000
        if row["promised_ratio"] is not None:
            assert row["achieved_ratio"] > 0.9 * row["promised_ratio"]
    printed = capsys.readouterr().out
    assert "bits per index / entropy" in printed
    assert "sum of 16 4-bit pushes" in printed


def test_a_training_in_one_process() -> None:
    run = train(digits("mlp"), "krngc:ratio=10,delay=2", seed=1, epochs=2)
    assert len(run.accuracies) == 2
    assert 0 < run.wire_bytes < run.raw_bytes
    assert 0 < run.down_bytes < run.raw_bytes
    again = train(digits("mlp"), "krngc:ratio=10,delay=2", seed=1, epochs=2)
    assert again == run


def test_help_answers_without_torch() -> None:
    code = """
import sys
from gradwire.benchmarks.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "compressors" in done.stdout
    assert "accuracy" in done.stdout
