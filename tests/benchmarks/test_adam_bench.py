"""gc-bench adam: a run of each kind, and the table."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.benchmarks import adam
from gradwire.benchmarks.adam import BASELINE, GROUPS, Run, Setup, claimed_ratio, measure, table
from gradwire.benchmarks.cli import main
from gradwire.compressors import create
from gradwire.compressors.registry import BUILT_IN
from gradwire.deploy.daemons import check_together
from gradwire.deploy.processes import RunError
from gradwire.exits import Exit
from gradwire.settings import RunSettings

FOUR = Setup(compressor="4bit")


def runs_of(setup: Setup, losses: dict[int, float | None], size: int = 1000) -> list[Run]:
    return [
        Run(setup=setup, seed=seed, loss=loss, bytes_up=size, bytes_down=2 * size)
        for seed, loss in losses.items()
    ]


def test_losses_are_set_against_the_uncompressed_run_of_the_same_seed() -> None:
    local = Setup(compressor="1bit", mode="local:steps=8", clip_norm=0.0)
    runs = [
        *runs_of(BASELINE, {1: 2.0, 2: 4.0}, 8000),
        *runs_of(FOUR, {1: 2.2, 2: 4.0}),
        *runs_of(local, {2: 3.0}, 500),
        *runs_of(Setup(compressor="dgc"), {1: None}),
    ]
    lines = [line.strip("| ").split(" | ") for line in table(runs).splitlines()[2:]]
    assert lines[1][0] == "`4bit`"
    assert lines[1][2:] == ["+5.0 %", "1/8.0", "1/8.0"]
    assert lines[2] == [
        "`1bit` `--mode local:steps=8` `--clip-norm 0.0`",
        "3.000",
        "-25.0 %",
        "1/16.0",
        "1/16.0",
    ]
    assert lines[3] == ["`dgc`", "diverged", "–", "–", "–"]
    assert claimed_ratio(runs) == pytest.approx(1.05)
    assert claimed_ratio([*runs_of(BASELINE, {1: 2.0}), *runs_of(FOUR, {1: None})]) == float("inf")
    assert claimed_ratio(runs_of(BASELINE, {1: 2.0})) is None


def test_every_compressor_has_a_row_and_every_row_is_a_job_that_can_be() -> None:
    setups = [setup for group in GROUPS.values() for setup in group]
    assert {setup.compressor.partition(":")[0] for setup in setups} == set(BUILT_IN)
    for setup in setups:
        create(setup.compressor)
        check_together(
            RunSettings(
                compressor=setup.compressor,
                mode=setup.mode,
                optimizer=setup.optimizer,
                clip_norm=setup.clip_norm,
            )
        )


def test_a_job_is_measured_with_real_processes(tmp_path: Path) -> None:
    given = Namespace(task="characters:characters=6000,context=8,layers=1,width=32", epochs=1, batch_size=16)
    run = measure(FOUR, 3, given, tmp_path)
    assert run.loss is not None
    assert 2 < run.loss < 6
    assert run.bytes_up < 4 * 25_000 * 12


def test_a_claim_that_does_not_hold_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loss = 1.02

    def measured(setup: Setup, seed: int, given: Namespace, directory: Path) -> Run:
        return Run(
            setup=setup, seed=seed, loss=2.0 * (loss if setup == FOUR else 1.0), bytes_up=8, bytes_down=8
        )

    monkeypatch.setattr(adam, "measure", measured)
    argv = ["adam", "--seeds", "1", "--compressors", "4bit", "--json", str(tmp_path / "runs.json")]
    assert main(argv) == 1
    assert "does not hold: 4bit has 1.0200" in capsys.readouterr().out
    loss = 1.005
    assert main(argv) == Exit.DONE


def test_training_that_diverges_is_a_row_and_what_else_fails_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = Namespace(task="characters", epochs=1, batch_size=16)
    code = Exit.DIVERGED

    def fails(*_: object) -> None:
        raise RunError(code, "gone")

    monkeypatch.setattr(adam, "train", fails)
    assert measure(replace(FOUR, compressor="dgc"), 1, given, tmp_path).loss is None
    code = Exit.INTERNAL
    with pytest.raises(RunError, match="gone"):
        measure(FOUR, 1, given, tmp_path)
