"""A wheel built from the checkout, and a new environment that holds it and its dependencies."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A wheel and the folder that it was built from."""

    source: Path
    wheel: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build from a copy of what git would take, so that neither build/ nor another leftover can help.

    `build` makes the wheel from the source distribution: both are shown to be complete.
    """
    source = tmp_path_factory.mktemp("source") / "gradwire"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():  # neither the link in .typing nor a file just deleted
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "build", source], check=True)
    (wheel,) = (source / "dist").glob("*.whl")
    return Built(source=source, wheel=wheel)


@pytest.fixture(scope="session")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel in it, dependencies resolved as for any user."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = folder / "bin" / "pip"
    subprocess.run([pip, "install", "-q", "-c", ROOT / "constraints.txt", built.wheel], check=True)
    return folder
