"""The commands of an installed wheel, in the image's environment and outside the checkout."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Image

pytestmark = pytest.mark.timeout(900)

COMMANDS = ("gc-server", "gc-worker", "gc-run", "gc-plan", "gc-status", "gc-doctor", "gc-certs")
# Each takes longer to import than --help may take in all; the record of speed has the time itself.
HEAVY = ("torch", "grpc", "numba", "sklearn", "matplotlib")


def run(image: Image, *command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = command
    return subprocess.run(
        [image.environment / "bin" / program, *arguments],
        cwd=cwd,
        env={"PATH": os.defpath, "HOME": str(cwd), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, image: Image, tmp_path: Path) -> None:
    done = run(image, command, "--help", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {command}")
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_version(command: str, image: Image, tmp_path: Path) -> None:
    done = run(image, command, "--version", cwd=tmp_path)

    assert re.fullmatch(rf"{command} \d+\.\d+\.\d+\S*\n", done.stdout), done


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str, image: Image, tmp_path: Path) -> None:
    done = run(image, command, "--help", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}

    assert "gradwire" in imported
    assert imported.isdisjoint(HEAVY)


# The image has what an extra needs too. Here that is hidden, with all else that the wheel does not ask for.
IMPORT_ALL = """
import importlib, pkgutil, sys
from importlib.metadata import distribution, packages_distributions
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

asked_for = set()

def follow(name, extras):
    if (name, extras) in asked_for:
        return
    asked_for.add((name, extras))
    for requirement in map(Requirement, distribution(name).requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            follow(canonicalize_name(requirement.name), frozenset(requirement.extras))

follow("gradwire", frozenset())
names = {name for name, _ in asked_for}

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not names.intersection(providers.get(name.partition(".")[0], names)):
            raise ModuleNotFoundError(f"{name} is no dependency", name=name)

providers = {top: set(map(canonicalize_name, found)) for top, found in packages_distributions().items()}
assert {"matplotlib", "sklearn"} <= providers.keys(), "there would be nothing to hide"
sys.meta_path.insert(0, Hidden)

import gradwire
extra = {"gradwire.compressors.kernels.cuda", "gradwire.compressors.kernels.triton_loops"}
extra |= {f"gradwire.integrations.{name}" for name in ("accelerate", "lightning", "ray", "transformers")}
for module in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
    if module.name not in extra and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def test_every_module_can_be_imported(image: Image, tmp_path: Path) -> None:
    """No module needs a file, or a dependency, that the wheel does not bring, except that of an extra."""
    done = run(image, "python", "-W", "error::ImportWarning", "-c", IMPORT_ALL, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
