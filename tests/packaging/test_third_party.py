"""The examples of a third party's packages: installed as users would, found by their entry points, used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire.compressors import decode, validate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "third_party_compressor"
MODE = ROOT / "examples" / "third_party_mode"
CHECK = EXAMPLE / "check.py"
GUIDE = ROOT / "docs" / "how-to" / "own-compressor.md"

pytestmark = pytest.mark.timeout(300)  # a busy machine starts processes slowly


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the packages are installed in, and nothing else: the rest is what runs this test."""
    sources, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    copies = [shutil.copytree(each, sources / each.name) for each in (EXAMPLE, MODE)]  # a build leaves files
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder, *copies], check=True)
    return folder


def run(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_uses_only_what_is_public() -> None:
    source = (EXAMPLE / "gradwire_ternary.py").read_text()
    assert set(re.findall(r"from (gradwire[\w.]*) import", source)) == {"gradwire.compressors"}
    assert "import gradwire" not in source.replace("from gradwire.compressors import", "")
    assert len(source.splitlines()) <= 80


@pytest.mark.parametrize("name", ["ternary:factor=1", "lowrank:rank=2"])
def test_the_check_passes(site: Path, tmp_path: Path, name: str) -> None:
    done = run(site, "-c", CHECK.read_text(), name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("holds\n")


# By its fault, the line of the example that has it, and the words of the check.
FAULTY = {
    "only flat tensors": ("return None", "return 0.0 if spec.shape[0] else None", "IndexError"),
    "a global generator": (
        "level = max(level,",
        "level = max(level * (1 + np.random.rand()),",
        "depends? on more",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_the_check_notices(site: Path, tmp_path: Path, fault: str) -> None:
    right, wrong, words = FAULTY[fault]
    shutil.copytree(site, tmp_path / "site")
    module = tmp_path / "site" / "gradwire_ternary.py"
    assert module.read_text().count(right) == 1
    module.write_text(module.read_text().replace(right, wrong))
    done = run(tmp_path / "site", "-c", CHECK.read_text(), "ternary", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(words, done.stderr)


def test_the_codebook_of_the_guide_reaches_every_size() -> None:
    (code,) = re.findall(
        r"```python\n(from gradwire.compressors import CodeFormat.*?)```", GUIDE.read_text(), re.S
    )
    for values in (np.array([3e38, -5.0, 0.0, 40.0, -2e20]), np.zeros(3), np.zeros(0)):
        found: dict[str, Any] = {"np": np, "values": values.astype(np.float32)}
        exec(code, found)
        validate(found["payload"])
        decoded = decode(found["payload"])
        assert (decoded[values == 0] == 0).all()
        ratios = decoded[values != 0] / values[values != 0]
        assert ((ratios > 0.7) & (ratios < 1.5)).all()


def test_the_guide_shows_the_example_as_it_is() -> None:
    assert f"```python\n{(EXAMPLE / 'gradwire_ternary.py').read_text()}```" in GUIDE.read_text()


def test_it_trains_through_real_daemons(site: Path, tmp_path: Path) -> None:
    arguments = ["--compressor", "ternary:factor=1", "--downlink", "ternary", "--workers", "2"]
    once = ["--epochs", "1", "--no-baseline", "--out", "here", "--json", "report.json"]
    done = run(site, "-m", "gradwire.deploy.cli", *arguments, *once, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 22
    assert report["refused_pushes"] == 0
    # Two bits per weight: a sixteenth of float32, less a level per tensor.
    assert 15.9 < report["compressed_raw_bytes_up"] / report["compressed_payload_bytes_up"] < 16
    assert report["raw_bytes_down"] / report["wire_bytes_down"] > 8


def test_plans_know_it_by_its_declaration_and_need_no_torch(site: Path, tmp_path: Path) -> None:
    job = [
        "--model",
        "resnet20",
        "--bandwidth",
        "100mbit",
        "--json",
        "-",
        "--compressors",
        "none",
        "ternary:factor=1",
    ]
    plan = f"import sys; from gradwire.deploy.plan import main; main({job})"
    program = f"{plan}; print('torch' in sys.modules)"
    done = run(site, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text, _, imported = done.stdout.strip().rpartition("\n")
    assert imported == "False"
    found = {each["compressor"]: each for each in json.loads(text)["predictions"] if each["mode"] == "sync"}
    # Two bits of 32, and vectors as bfloat16.
    assert found["none"]["up_bytes"] / found["ternary:factor=1"]["up_bytes"] == pytest.approx(15, abs=1)


def test_an_option_that_it_refuses_is_named(site: Path, tmp_path: Path) -> None:
    done = run(site, "-m", "gradwire.deploy.cli", "--compressor", "ternary:memory=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "memory: expected at least 0 and below 1, got 2" in done.stderr


def test_its_mode_trains_through_real_daemons(site: Path, tmp_path: Path) -> None:
    arguments = ["--mode", "turns:batches=2", "--workers", "2", "--batch-size", "128", "--epochs", "1"]
    once = ["--no-baseline", "--out", "here", "--json", "report.json"]
    done = run(site, "-m", "gradwire.deploy.cli", *arguments, *once, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 6  # 1,438 samples in turns of 256
    told = run(site, "-m", "gradwire.server.cli", "--help", cwd=tmp_path)
    assert "  turns:batches=1" in told.stdout
