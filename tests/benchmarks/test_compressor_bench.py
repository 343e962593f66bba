"""gc-bench: its table of setups, small runs of both commands, and a help that imports nothing heavy."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.benchmarks import cli
from gradwire.benchmarks.compressor_accuracy import SETUPS, Row, Setup, control_of
from gradwire.benchmarks.compressors import default_specs
from gradwire.benchmarks.simulation import Run, train
from gradwire.compressors import create
from gradwire.compressors.registry import BUILT_IN
from gradwire.optimizer import parse_optimizer
from gradwire.spec import parse_spec
from gradwire.worker.tasks.digits import digits

KEYS = {
    *("name", "device", "dtype", "elements", "seconds", "bytes_moved", "ratio_to_add", "wire_bytes"),
    *("raw_bytes", "promised_ratio", "achieved_ratio", "error_norm"),
}


def test_every_compressor_is_in_both_tables() -> None:
    for specs in ([setup.compressor for setup in SETUPS], default_specs()):
        for spec in specs:
            create(spec)
        assert {parse_spec("compressor", spec).name for spec in specs} == set(BUILT_IN)
    for setup in SETUPS:
        parse_optimizer(setup.optimizer)


def test_the_rows_of_the_speed_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, drawing = tmp_path / "rows.json", tmp_path / "plot.svg"
    specs = ["none", "4bit", "qsgd", "topk:ratio=10", "threshold"]
    arguments = ["--elements", "5000", "--repeats", "1", "--json", str(path), "--plot", str(drawing)]
    code = cli.main(["compressors", *arguments, "--dtypes", "float32,float16", "--compressors", *specs])
    assert code == 0
    rows = json.loads(path.read_text())
    assert [row["name"] for row in rows] == specs * 2
    for row in rows:
        assert set(row) == KEYS
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["seconds"] > 0
        assert row["raw_bytes"] == 20_000
        if row["promised_ratio"] is not None:
            assert row["achieved_ratio"] > 0.9 * row["promised_ratio"]
    assert drawing.read_text().startswith("<?xml")
    assert "bits per index / entropy" in capsys.readouterr().out


def test_a_training_in_one_process() -> None:
    run = train(digits("mlp"), "krngc:ratio=10,delay=2", seed=1, epochs=2)
    assert len(run.accuracies) == 2
    assert 0 < run.wire_bytes < run.raw_bytes
    assert 0 < run.down_bytes < run.raw_bytes
    again = train(digits("mlp"), "krngc:ratio=10,delay=2", seed=1, epochs=2)
    assert again == run


def test_the_accuracy_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.json"
    arguments = ["--seeds", "1", "--epochs", "1", "--models", "mlp", "--jobs", "1", "--json", str(path)]
    assert cli.main(["accuracy", *arguments, "--compressors", "none", "1bit"]) == 0
    _, one_bit = json.loads(path.read_text())
    assert one_bit["compressor"] == "1bit"
    assert one_bit["control_wire_bytes"][0] == pytest.approx(one_bit["wire_bytes"][0], rel=0.05)
    assert "| `1bit` |" in capsys.readouterr().out


def test_a_claim_that_does_not_hold_is_named() -> None:
    base, bad = [
        Run(accuracies=[accuracy], wire_bytes=1, down_bytes=1, raw_bytes=10) for accuracy in (0.95, 0.90)
    ]

    def row(setup: Setup) -> Row:
        return Row(setup=setup, runs=[bad], baseline=[base], control=None, control_runs=[])

    assert row(Setup(compressor="topk", within=0.1)).broken_claim is None
    assert "claimed within 0.01" in str(row(Setup(compressor="topk", within=0.01)).broken_claim)
    assert "claimed to stay below 0.5" in str(row(Setup(compressor="krngc", below=0.5)).broken_claim)


def test_no_control_has_fewer_bytes_than_the_small_tensors() -> None:
    probe = Run(accuracies=[0.5], wire_bytes=1100, down_bytes=1, raw_bytes=100_000)
    assert control_of(600, probe, 100.0, 100) == pytest.approx(200.0)
    assert control_of(100, probe, 100.0, 100) is None


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
