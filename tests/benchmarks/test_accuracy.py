"""gc-bench accuracy: the arithmetic of its tables on made-up runs, and a small run of each kind."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradwire.benchmarks import accuracy, jobs
from gradwire.benchmarks.accuracy import (
    AccuracyRow,
    TrainingJob,
    TrainingRun,
    broken_claims,
    markdown,
    simulate,
    train,
)
from gradwire.benchmarks.cli import main
from gradwire.benchmarks.estimates import MOST_SEEDS, estimate
from gradwire.benchmarks.suites import ADAM, COMPRESSORS, LEVELS, SUITES, Suite, TrainingSetup
from gradwire.common.exits import Exit
from gradwire.common.spec import parse_spec
from gradwire.compressors import create
from gradwire.compressors.registry import BUILT_IN
from gradwire.deploy.daemons import check_together
from gradwire.deploy.processes import RunError
from gradwire.settings import RunSettings

GIVEN = argparse.Namespace(downlink="none", epochs=1, seeds=[1, 2])
SMALL = "characters:characters=6000,context=8,layers=1,width=32"


def runs_of(*scores: float | None, size: int = 1000) -> list[TrainingRun]:
    return [
        TrainingRun(score=score, by_epoch=(score or 0.0,), bytes_up=size, bytes_down=2 * size)
        for score in scores
    ]


def row_of(suite: Suite, compressor: str, runs: Sequence[TrainingRun]) -> AccuracyRow:
    setups = (each for each in suite.setups if each.compressor == compressor)
    return AccuracyRow(setup=next(setups), runs=runs)


def lines_of(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]


def test_interval_is_students() -> None:
    five = estimate([0.90, 0.91, 0.92, 0.93, 0.94])
    assert five.mean == pytest.approx(0.92)
    assert five.half_width == pytest.approx(2.776 * 0.0158114 / 5**0.5, rel=1e-4)
    assert str(five) == "0.920 ± 0.020"
    assert str(estimate([0.9])) == "0.900"


def test_quantiles_are_exact_for_as_many_seeds_as_are_taken() -> None:
    student = pytest.importorskip("scipy.stats").t
    for count in range(2, MOST_SEEDS + 1):
        values = [float(value) for value in range(count)]
        exact = student.ppf(0.975, count - 1) * statistics.stdev(values) / count**0.5
        assert estimate(values).half_width == pytest.approx(exact, rel=3e-4)
    with pytest.raises(ValueError, match="at most 30 values, got 31"):
        estimate([0.5] * (MOST_SEEDS + 1))


@pytest.mark.parametrize("text", ["", "1,2,x", "1,1", "-1", ",".join(map(str, range(31)))])
def test_seeds_to_correct_are_said_before_any_run(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["accuracy", "levels", f"--seeds={text}"])
    assert caught.value.code == 2
    assert "expected 1 to 30 distinct numbers" in capsys.readouterr().err


@pytest.mark.parametrize("suite", [COMPRESSORS, ADAM])
def test_every_compressor_has_a_row(suite: Suite) -> None:
    names = {parse_spec("compressor", setup.compressor).name for setup in suite.setups}
    assert names == set(BUILT_IN)


@pytest.mark.parametrize("name", SUITES)
def test_every_row_is_a_job_that_can_be_and_every_claim_has_rows(name: str) -> None:
    suite = SUITES[name]
    for setup in suite.setups:
        create(setup.compressor)
        check_together(
            RunSettings(
                compressor=setup.compressor,
                mode=setup.mode,
                optimizer=setup.optimizer,
                clip_norm=setup.clip_norm,
            )
        )
    compressors = {setup.compressor for setup in suite.setups}
    assert {spec for claim in suite.claims for spec in (claim.compressor, claim.against)} <= compressors


def test_an_order_is_judged_on_runs_with_the_same_seed() -> None:
    # Between seeds the accuracy varies far more than between compressors.
    order = "none", "4bit:levels=groups,scale=mean", "4bit:levels=group1,scale=mean", "2bit:scale=mean"
    rows = [
        row_of(LEVELS, spec, runs_of(*(0.2 + seed / 10 - rank / 100 for seed in (1, 2, 3))))
        for rank, spec in enumerate(order)
    ]
    assert broken_claims(LEVELS.claims, rows, LEVELS) == []
    rows[1:3] = [AccuracyRow(setup=one.setup, runs=other.runs) for one, other in (rows[1:3], rows[2:0:-1])]
    (sentence,) = broken_claims(LEVELS.claims, rows, LEVELS)
    assert sentence == f"{order[1]} against {order[2]}: -0.0100, claimed at least +0"


def test_a_loss_of_accuracy_beyond_the_claim_is_named() -> None:
    rows = [row_of(COMPRESSORS, "none", runs_of(0.95)), row_of(COMPRESSORS, "4bit", runs_of(0.945))]
    assert broken_claims(COMPRESSORS.claims, rows, COMPRESSORS) == []
    rows[1] = row_of(COMPRESSORS, "4bit", runs_of(0.93))
    (sentence,) = broken_claims(COMPRESSORS.claims, rows, COMPRESSORS)
    assert sentence == "4bit against none: -0.0200, claimed at least -0.01"


def test_losses_are_set_against_the_baseline_of_the_same_seed() -> None:
    local = next(setup for setup in ADAM.setups if setup.mode != "sync" and setup.compressor == "1bit")
    rows = [
        row_of(ADAM, "none", runs_of(2.0, 4.0, size=8000)),
        row_of(ADAM, "4bit", runs_of(2.2, 4.0)),
        AccuracyRow(setup=local, runs=runs_of(1.5, 3.0, size=500)),
        row_of(ADAM, "dgc", runs_of(None, 3.0)),
    ]
    lines = lines_of(markdown("t", rows, ADAM, GIVEN))
    assert lines[1][0] == "`4bit`"
    assert lines[1][2:] == ["+5.0 %", "1/8.0", "1/8.0"]
    assert lines[2][0] == "`1bit` `--mode local:steps=8,correction=0` `--clip-norm 0.0`"
    assert lines[2][2:] == ["-25.0 %", "1/16.0", "1/16.0"]
    assert lines[3] == ["`dgc`", "diverged", "–", "–", "–"]
    assert broken_claims(ADAM.claims, rows, ADAM) == ["4bit against none: -0.0500, claimed at least -0.01"]
    rows[1] = row_of(ADAM, "4bit", runs_of(2.0, None))
    assert broken_claims(ADAM.claims, rows, ADAM) == ["4bit against none: -inf, claimed at least -0.01"]


def test_digits_are_trained_without_daemons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.json"
    arguments = ["--seeds", "1", "--epochs", "1", "--jobs", "1", "--json", str(path)]
    chosen = ["--tasks", "digits:model=mlp", "--compressors", "1bit"]
    assert main(["accuracy", "compressors", *arguments, *chosen]) == Exit.DONE
    _, one_bit = json.loads(path.read_text())
    assert one_bit["compressor"] == "1bit"
    assert one_bit["runs"][0]["by_epoch"] == [one_bit["runs"][0]["score"]]
    assert "| `1bit` |" in capsys.readouterr().out


def test_a_level_is_judged_by_the_mean_over_its_epochs() -> None:
    job = TrainingJob(
        task="digits",
        setup=TrainingSetup(compressor="2bit"),
        seed=1,
        epochs=2,
        downlink="none",
        score=LEVELS.score,
    )
    run = simulate(job)
    assert run.score == statistics.fmean(run.by_epoch)
    row = AccuracyRow(setup=job.setup, runs=[run])
    text = markdown("digits", [row], LEVELS, argparse.Namespace(downlink="none", epochs=2, seeds=[1]))
    assert "| compressor | epoch 1 | mean accuracy | against `none` |" in text


JOB = TrainingJob(task=SMALL, setup=ADAM.setups[1], seed=3, epochs=1, downlink="auto", score=ADAM.score)


def test_a_job_is_measured_with_real_processes() -> None:
    run = train(JOB)
    assert run.score is not None
    assert 2 < run.score < 6
    assert run.bytes_up < 4 * 25_000 * 12


def test_a_claim_that_does_not_hold_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = 1.02

    def measured(job: TrainingJob) -> TrainingRun:
        return runs_of(2.0 * (loss if job.setup.compressor == "4bit" else 1.0))[0]

    monkeypatch.setattr(accuracy, "train", measured)
    argv = ["accuracy", "adam", "--seeds", "1", "--compressors", "4bit"]
    assert main(argv) == 1
    assert "does not hold: characters:characters=500000: 4bit against none: -0.02" in capsys.readouterr().out
    assert main([*argv, "--epochs", "2"]) == Exit.DONE, "fewer epochs than the claim is about"
    loss = 1.005
    assert main(argv) == Exit.DONE


def test_training_that_diverges_is_a_row_and_what_else_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    code = Exit.DIVERGED

    def fails(*_: object) -> None:
        raise RunError(code, "gone")

    monkeypatch.setattr(jobs, "train", fails)
    assert train(JOB).score is None
    code = Exit.INTERNAL
    with pytest.raises(RunError, match="gone"):
        train(JOB)
