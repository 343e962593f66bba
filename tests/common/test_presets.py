"""Presets: each sets what it says, anything overrides it, and what does not suit it is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gradwire.common import presets
from gradwire.common.configuration import Effective, UsageError, options_of, read
from gradwire.common.exits import Exit
from gradwire.common.presets import PRESETS
from gradwire.compressors import compressor_of, parse_downlink
from gradwire.deploy.daemons import check_together, server_arguments
from gradwire.optim.optimizer import parse_optimizer
from gradwire.optim.steps import OPTIMIZERS
from gradwire.server import checks
from gradwire.server import cli as server
from gradwire.server.job.modes.registry import MODES
from gradwire.settings import COMMANDS, JobOptions, JobSettings, RunSettings, ServerSettings


def told(*argv: str, cls: type[Any] = ServerSettings, **environ: str) -> Effective[Any]:
    return read(cls, COMMANDS, argv=argv, environ=environ, parsers=checks.SPECS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says_and_says_it_is_the_origin(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The start's checks pass, those of each option and those of options together."""
    assert server.main(["--preset", name, "--print-config"]) == Exit.DONE
    printed = capsys.readouterr().out.splitlines()
    for option, value in PRESETS[name].sets.items():
        assert option in options_of(JobSettings), "workers hear of it"
        (line,) = [line for line in printed if re.match(rf"{option} +=", line)]
        assert line.partition("= ")[2] == f"{value!r}  # preset {name}"
    check_together(told("--preset", name, cls=RunSettings).settings)


@pytest.mark.parametrize("name", PRESETS)
def test_each_value_of_a_preset_is_of_a_kind_that_suits_it(name: str) -> None:
    preset = PRESETS[name]
    assert preset.purpose
    parse_optimizer(str(preset.sets["optimizer"]))
    compressor_of(str(preset.sets["compressor"]))
    parse_downlink(str(preset.sets["downlink"]))
    assert preset.suits.keys() == {"mode", "optimizer"}
    for option, known in (("mode", MODES), ("optimizer", OPTIMIZERS)):
        assert str(preset.sets[option]).partition(":")[0] in preset.suits[option]
        assert set(preset.suits[option]) <= set(known)


def test_a_flag_a_variable_and_a_file_override_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[server]\npreset = "adam-4bit"\ndownlink = "none"\n')
    found = told("--config", str(file), "--compressor", "8bit", GC_LEARNING_RATE="0.01")
    assert found.settings.compressor == "8bit"
    assert found.settings.learning_rate == 0.01
    assert found.settings.downlink == "none"
    assert found.settings.optimizer == PRESETS["adam-4bit"].sets["optimizer"]
    origins = {name: found.origins[name] for name in PRESETS["adam-4bit"].sets}
    assert origins == {
        "mode": "preset adam-4bit",
        "optimizer": "preset adam-4bit",
        "learning_rate": "environment GC_LEARNING_RATE",
        "compressor": "flag",
        "downlink": "file",
    }
    assert presets.describe(found) == (
        "preset adam-4bit sets --mode sync --optimizer adamw; overridden: --learning-rate 0.01 (environment "
        "GC_LEARNING_RATE) --compressor 8bit (flag) --downlink none (file)"
    )


def test_without_a_preset_nothing_is_set() -> None:
    assert told().settings == ServerSettings()
    assert told("--preset", "", GC_PRESET="adam-4bit").settings == ServerSettings()
    presets.check(told("--optimizer", "adamw"))


def test_scripts_clip_for_themselves() -> None:
    given = told("--preset", "low-communication", "--script")
    found = checks.adapted(given)
    assert found.settings.mode == "local:steps=8,correction=0,overlay=on"
    assert found.origins["mode"] == "because of --script"
    checks.check(found.settings)
    with pytest.raises(UsageError, match="scripts take their own steps"):
        checks.check(given.settings)
    own = told("--preset", "low-communication", "--script", "--mode", "local:clip=2")
    assert checks.adapted(own).settings.mode == "local:clip=2"
    tasks = told("--preset", "low-communication")
    assert checks.adapted(tasks) is tasks


def test_scripts_bring_their_own_optimizer_and_rate() -> None:
    said = presets.describe(told("--preset", "adam-4bit", "--script"))
    assert said == (
        "preset adam-4bit sets --mode sync --compressor 4bit --downlink auto; optimizer, learning rate and "
        "schedule are those of the scripts"
    )


def test_a_script_job_that_only_time_ends_may_have_a_preset_with_a_cosine() -> None:
    given = told("--preset", "low-communication", "--script", "--epochs", "0", "--max-seconds", "9")
    found = checks.adapted(given)
    assert found.settings.schedule == "constant"
    checks.check(found.settings)
    assert "schedule constant" not in presets.describe(found)
    with pytest.raises(UsageError, match="it ends with the job"):
        checks.check(
            checks.adapted(told("--schedule", "cosine", "--epochs", "0", "--max-seconds", "9")).settings
        )


def test_a_compressor_that_no_script_can_use_is_refused_before_workers_join() -> None:
    with pytest.raises(UsageError, match="only a task can count; choose another one with --script"):
        checks.check_compressors(told("--script", "--compressor", "krngc").settings)


def test_gc_run_hands_a_preset_on_with_every_value() -> None:
    settings = told("--preset", "low-communication", "--learning-rate", "0.5", cls=RunSettings).settings
    server_told = told(*server_arguments(settings, 7, Path("p")))
    assert {name: getattr(server_told.settings, name) for name in options_of(JobOptions)} == {
        name: getattr(settings, name) for name in options_of(JobOptions)
    }
    presets.check(server_told)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--preset low-comunication", "did you mean 'low-communication'?"),
        (
            "--preset sparse-sgd --optimizer adamw",
            "--optimizer adamw: --preset sparse-sgd expects sgd; leave --optimizer out, or choose another",
        ),
        (
            "--preset low-communication --mode async",
            "--mode async: --preset low-communication expects local; leave --mode out, or choose another",
        ),
        ("--preset lowest-communication --mode stale:bound=2", "--mode stale:bound=2: --preset lowest"),
        ("--preset low-communication --optimizer sgd", "--optimizer sgd: --preset low-communication expects"),
        ("--preset diloco --mode sync", "--mode sync: --preset diloco expects local"),
        (
            "--preset low-communication --optimizer adamw",
            "has a learning rate for muon, 0.024; give --learning-rate for adamw too",
        ),
        ("--preset adam-4bit --mode local", "expects sync or stale or async"),
        ("--preset adam-4bit --optimizer adam", "has a learning rate for adamw, 0.003; give --learning-rate"),
        (
            "--preset adam-4bit --mode sync:stragglers=1 --min-workers 4",
            "--compressor 4bit: --mode sync:stragglers=1",
        ),
    ],
)
def test_what_does_not_suit_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    assert server.main([*arguments.split(), "--print-config"]) == Exit.USAGE
    assert words in capsys.readouterr().err


def test_another_optimizer_with_a_rate_of_its_own_is_taken() -> None:
    presets.check(told("--preset", "adam-4bit", "--optimizer", "adam", "--learning-rate", "0.001"))


def test_a_mode_without_compression_names_none_to_its_workers() -> None:
    for mode in ("coded", "sync:stragglers=1"):
        found = checks.adapted(told("--mode", mode))
        assert found.settings.compressor == "none"
        assert found.origins["compressor"] == "because of --mode"
    with pytest.raises(UsageError, match="exchanges gradients in fixed point"):
        checks.check_compressors(told("--mode", "coded", "--compressor", "4bit").settings)
