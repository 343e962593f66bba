"""The commands of an installed wheel, in a new environment and outside the checkout."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

COMMANDS = ("gc-server", "gc-worker", "gc-run")
# Each takes longer to import than --help may take in all; see benchmarks/startup.py for the time itself.
HEAVY = ("torch", "grpc", "numba", "sklearn", "matplotlib")


def run(environment: Path, *command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = command
    return subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=cwd,
        env={"PATH": os.defpath, "HOME": str(cwd), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, environment: Path, tmp_path: Path) -> None:
    done = run(environment, command, "--help", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {command}")
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_version(command: str, environment: Path, tmp_path: Path) -> None:
    done = run(environment, command, "--version", cwd=tmp_path)

    assert re.fullmatch(rf"{command} \d+\.\d+\.\d+\S*\n", done.stdout), done


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str, environment: Path, tmp_path: Path) -> None:
    done = run(environment, command, "--help", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}

    assert "gradwire" in imported
    assert imported.isdisjoint(HEAVY)


def test_every_module_can_be_imported(environment: Path, tmp_path: Path) -> None:
    """No module needs a file, or a dependency, that the wheel does not bring, except that of an extra."""
    program = """
import importlib, pkgutil, gradwire
extra = {"gradwire.compressors.kernels.cuda", "gradwire.compressors.kernels.triton_loops"}
for module in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
    if module.name not in extra and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    done = run(environment, "python", "-W", "error::ImportWarning", "-c", program, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
