"""gc-bench predicted and auto: what is told the cost model, what is made of the times, and the fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.benchmarks import auto, predicted
from gradwire.benchmarks.cli import main
from gradwire.benchmarks.predicted import PredictedRow, distance, ended_early, fit, profile
from gradwire.benchmarks.shaped import Setup
from gradwire.common.exits import Exit
from gradwire.compressors import parse_compressor
from gradwire.deploy.plan import computation_of
from gradwire.planning.job import Costs, StepOptions

SETUP = Setup(model="3x40", workers=2, mbit=0, seconds=0.1, real=0, steps=12, part_bytes=0)
ROW = PredictedRow(
    model="3x40",
    mbit=100.0,
    workers=2,
    choice=StepOptions(),
    computing_s=0.11,
    emulated_s=0.1,
    measured_s=1.0,
    live_s=0.0,
    load=0.0,
)


def test_what_python_takes_is_divided_among_tensors_and_takes_cores() -> None:
    found = profile("vgg16", 100.0, 2, 0.1, 0.3, Costs())
    assert found.computation_s == pytest.approx(0.3)
    assert found.on_cores == pytest.approx(2 / 3)
    assert found.worker_bandwidth == 12.5e6
    each = [forward + backward for forward, backward in zip(found.forward_s, found.backward_s, strict=True)]
    assert min(each) == pytest.approx(0.2 / len(each))  # a bias: nothing of it is emulated
    assert max(each) > 0.1 / len(each)


def test_nothing_is_on_cores_if_all_computation_is_emulated() -> None:
    assert profile("3x40", 0, 2, 0.3, 0.3, Costs()).on_cores == 0
    assert profile("3x40", 0, 2, 0.0, 0.0, Costs()).on_cores == 0


def test_a_run_with_long_steps_takes_fewer_but_none_before_its_plan() -> None:
    assert ended_early(SETUP, 0.1, StepOptions()) == SETUP
    long = ended_early(SETUP, 5.0, StepOptions(fusion="none"))
    assert (long.warm_up, long.steps) == (2, 4)
    planned = ended_early(SETUP, 20.0, StepOptions(fusion="mgwfbp"))
    assert (planned.warm_up, planned.steps) == (predicted.PLANNED, 1)


def test_a_fit_finds_the_costs_that_the_times_were_made_with() -> None:
    models = ("1x4096", "20x4096", "1x4194304")
    choices = [
        StepOptions(compressor=parse_compressor(name).compression(), overlap="off")
        for name in ("none", "4bit")
    ]
    other = Costs()
    true = replace(other, step_s=3 * other.step_s, byte_s=2 * other.byte_s)
    rows = [replace(ROW, model=model, mbit=0.0, choice=choice) for model in models for choice in choices]
    rows = [replace(row, measured_s=row.predicted_s(true)) for row in rows]
    assert distance(rows, true) == 0
    assert distance(rows, other) > 0.02
    assert distance(rows, fit(rows, other)) < 0.002


def test_a_row_says_how_near_the_prediction_came() -> None:
    cells = predicted.cells(ROW)
    assert len(cells) == len(predicted.HEADINGS)
    assert cells[9] == f"{ROW.predicted_s() / ROW.measured_s:.2f}"
    assert cells[10:12] == ["–", "–"]
    assert predicted.cells(replace(ROW, live_s=0.9))[10:12] == ["0.900", "0.90"]
    assert predicted.as_json(ROW)["predicted_s"] == ROW.predicted_s()


def test_computation_is_what_gc_plan_takes_a_model_to_have() -> None:
    assert computation_of("resnet50", 32) == pytest.approx(0.0787, rel=0.1)


def test_the_ideal_is_what_compressing_for_nothing_would_gain() -> None:
    row = auto.AutoRow(share=0.5, none_s=1.0, auto_s=0.625, fewer=8.0)
    assert row.speedup == pytest.approx(1.6)
    assert row.ideal == pytest.approx(1 / (0.5 + 0.5 / 8))
    assert auto.cells(row)[-1] == "0.900"
    never = auto.AutoRow(share=None, none_s=1.0, auto_s=1.02, fewer=1.0)
    assert never.ideal == 1.0
    assert len(auto.cells(never)) == len(auto.HEADINGS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predicted", "--models", "resnet5"], "did you mean"),
        (["predicted", "--mbit", "20,fast"], "finite number"),
        (["predicted", "--runs", "4bti"], "did you mean '4bit'"),
        (["predicted", "--fusion", "mgs,seemgs"], "did you mean 'seamgs'"),
        (["predicted", "--order", "p4"], "known orders"),
        (["predicted", "--runs"], "expected at least one compressor"),
        (["auto", "--compressor", "4bit"], "expected auto"),
        (["auto", "--share", "1.5"], "above 0 and below 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        code = main([*arguments, "--json", str(tmp_path / "rows.json")])
    except SystemExit as ended:
        code = Exit(ended.code)  # type: ignore[arg-type]
    assert code == Exit.USAGE
    assert words in capsys.readouterr().err
