"""The presets with the papers' settings: each is a file that gc-run accepts."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PRESETS = sorted((Path(__file__).parents[1] / "presets").glob("*.toml"))


def test_every_paper_has_a_preset() -> None:
    assert {path.name[:3] for path in PRESETS} == {"000", "001", "002", "003", "004"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_gc_run_accepts_the_preset_and_has_its_values(preset: Path, tmp_path: Path) -> None:
    given = tomllib.loads(preset.read_text())["run"]
    command: list[str | Path] = [
        Path(sys.executable).parent / "gc-run",
        "--config",
        preset,
        "--print-config",
        "--out",
        tmp_path,
    ]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for option, value in given.items():
        name = option.replace("-", "_")
        line = next(line for line in shown.splitlines() if line.split(" ")[0] == name)
        assert line.partition("= ")[2].strip() == f"{value!r}  # file", line


def test_the_presets_have_the_papers_settings() -> None:
    found = {path.stem: tomllib.loads(path.read_text())["run"] for path in PRESETS}
    thesis = found["000-gcac"]
    assert (thesis["batch-size"], thesis["epochs"], thesis["learning-rate"]) == (128, 200, 0.01)
    assert thesis["optimizer"] == "sgd:momentum=0.9,weight_decay=0.0005"
    assert "warmup=5,delay=3" in found["000-krngc"]["compressor"]
    assert found["002-4bit"]["schedule"] == "exponential:gamma=0.94"
    assert (found["004-multi-step"]["batch-size"], found["004-multi-step"]["epochs"]) == (64, 120)
