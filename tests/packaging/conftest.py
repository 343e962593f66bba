"""A wheel built from the checkout, and what the steps of the image build: made once for all tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from .containerfile import context, stages, values

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Results of the image's build stage: its environment, its wheel and its compiled kernels."""

    environment: Path
    wheel: Path
    kernels: Path


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Run the build steps in a folder that stands for the root, from what .dockerignore lets in.

    The environment begins with links to what is installed here, so that pip has only the wheel to install: to
    unpack torch again would take longer than all the rest. Kernels are compiled without optimizations: only
    tests of the folders read them.
    """
    root = tmp_path_factory.mktemp("image")
    build, *_ = stages()
    source = context(root / "src")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root / "gradwire")}))
    packages.mkdir(parents=True)
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"__editable__|__pycache__|_?gradwire|pip\b", installed.name):
            (packages / installed.name).symlink_to(installed)
    for command in values(build, "RUN"):
        without_mounts = re.sub(r"^(--mount=\S+ )+", "", command)
        moved = re.sub(r"(?<![\w.])/(gradwire|wheels|kernels)\b", rf"{root}/\1", without_mounts)
        subprocess.run(["sh", "-euc", moved], cwd=source, check=True, env={**os.environ, "NUMBA_OPT": "0"})
    (wheel,) = (root / "wheels").glob("*.whl")
    return Image(environment=root / "gradwire", wheel=wheel, kernels=root / "kernels")
