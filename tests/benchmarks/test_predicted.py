"""gc-bench predicted: what is told the cost model, and what is made of the times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.benchmarks import predicted
from gradwire.benchmarks.cli import main
from gradwire.benchmarks.predicted import PredictedRow, ended_early, profile
from gradwire.benchmarks.shaped import Setup
from gradwire.common.exits import Exit
from gradwire.deploy.plan import computation_of
from gradwire.planning.job import StepOptions

SETUP = Setup(model="3x40", workers=2, mbit=0, seconds=0.1, steps=12, part_bytes=0)
ROW = PredictedRow(
    model="3x40",
    mbit=100.0,
    workers=2,
    choice=StepOptions(),
    computing_s=0.11,
    measured_s=1.0,
    predicted_s=0.8,
    live_s=0.0,
    load=0.0,
)


def test_what_python_takes_is_divided_among_tensors_and_takes_cores() -> None:
    found = profile(replace(SETUP, model="vgg16", mbit=100.0), 0.3)
    assert found.computation_s == pytest.approx(0.3)
    assert found.on_cores == pytest.approx(2 / 3)
    assert found.worker_bandwidth == 12.5e6
    each = [forward + backward for forward, backward in zip(found.forward_s, found.backward_s, strict=True)]
    assert min(each) == pytest.approx(0.2 / len(each))  # a bias: nothing of it is emulated
    assert max(each) > 0.1 / len(each)


def test_nothing_is_on_cores_if_all_computation_is_emulated() -> None:
    assert profile(SETUP, SETUP.seconds).on_cores == 0
    assert profile(replace(SETUP, seconds=0.0), 0.0).on_cores == 0


def test_a_run_with_long_steps_takes_fewer_but_none_before_its_plan() -> None:
    assert ended_early(SETUP, 0.1, StepOptions()) == SETUP
    long = ended_early(SETUP, 5.0, StepOptions(fusion="none"))
    assert (long.warm_up, long.steps) == (2, 4)
    planned = ended_early(SETUP, 20.0, StepOptions(fusion="mgwfbp"))
    assert (planned.warm_up, planned.steps) == (predicted.PLANNED, 1)


def test_a_row_says_how_near_the_prediction_came() -> None:
    cells = predicted.cells(ROW)
    assert len(cells) == len(predicted.HEADINGS)
    assert cells[8:10] == ["0.800", "0.80"]
    assert cells[10:12] == ["–", "–"]
    assert predicted.cells(replace(ROW, live_s=0.9))[10:12] == ["0.900", "0.90"]


def test_computation_is_what_gc_plan_takes_a_model_to_have() -> None:
    assert computation_of("resnet50", 32) == pytest.approx(0.0787, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "resnet5"], "did you mean"),
        (["--mbit", "20,fast"], "finite number"),
        (["--runs", "4bti"], "did you mean '4bit'"),
        (["--fusion", "mgs,seemgs"], "did you mean 'seamgs'"),
        (["--order", "p4"], "known orders"),
        (["--runs"], "expected at least one compressor"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        code = main(["predicted", *arguments, "--json", str(tmp_path / "rows.json")])
    except SystemExit as ended:
        code = Exit(ended.code)  # type: ignore[arg-type]
    assert code == Exit.USAGE
    assert words in capsys.readouterr().err
