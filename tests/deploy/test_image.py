"""The image file, as far as it can be tested without a container engine.

Its build steps are run in a folder that stands for the root of the build stage, from a copy that holds only
what .dockerignore lets in; the last stage, which only copies, is checked as text.
"""

from __future__ import annotations

import fnmatch
import io
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "deploy" / "image" / "Containerfile"


@dataclass(frozen=True, slots=True)
class Step:
    instruction: str
    value: str


def stages() -> list[list[Step]]:
    """The steps of each stage; what stands before the first one comes with it."""
    parser = DockerfileParser(fileobj=io.StringIO(CONTAINERFILE.read_text()))
    found: list[list[Step]] = [[]]
    for each in parser.structure:
        step = Step(each["instruction"], each["value"])
        if step.instruction == "FROM" and any(earlier.instruction == "FROM" for earlier in found[-1]):
            found.append([])
        if step.instruction != "COMMENT":
            found[-1].append(step)
    return found


def values(stage: list[Step], instruction: str) -> list[str]:
    return [step.value for step in stage if step.instruction == instruction]


def pod_specs() -> list[dict[str, Any]]:
    base = ROOT / "deploy" / "kubernetes" / "base"
    texts = [(base / name).read_text() for name in ("server.yaml", "workers.yaml")]
    documents = [document for text in texts for document in yaml.safe_load_all(text)]
    return [document["spec"]["template"]["spec"] for document in documents if "template" in document["spec"]]


def test_two_stages_of_one_python() -> None:
    build, final = stages()

    assert values(build, "FROM") == ["${PYTHON} AS build"]
    assert values(final, "FROM") == ["${PYTHON}"]


def test_nothing_of_the_build_is_left_but_the_environment_and_the_kernels() -> None:
    _, final = stages()

    assert [value.split()[-2:] for value in values(final, "COPY")] == [
        ["/gradwire", "/gradwire"],
        ["/kernels", "/var/cache/gradwire"],
    ]
    assert all("--from=build" in value for value in values(final, "COPY"))


def test_runs_as_the_user_that_kubernetes_expects() -> None:
    _, final = stages()
    (user,) = values(final, "USER")
    for spec in pod_specs():
        security = spec["securityContext"]
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
    assert final.index(Step("USER", user)) > max(
        index for index, step in enumerate(final) if step.instruction in {"RUN", "COPY"}
    )


def test_kernels_are_where_kubernetes_copies_them_from() -> None:
    _, final = stages()
    (environment,) = values(final, "ENV")
    (cache,) = [word.partition("=")[2] for word in environment.split() if word.startswith("NUMBA_CACHE_DIR=")]
    for spec in pod_specs():
        (kernels,) = spec["initContainers"]
        assert kernels["command"][:2] == ["cp", "--recursive"]
        assert kernels["command"][2] == f"{cache}/."


def context(folder: Path) -> Path:
    """What .dockerignore lets into the build. Reads the few forms that the file uses, and no other."""
    kept: set[str] = set()
    refused: list[str] = []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        if line.startswith("!"):
            kept |= {path.name for path in ROOT.glob(line[1:])}
        elif line.startswith("**/"):
            refused.append(line.removeprefix("**/"))
        else:
            assert line == "*", f"this test does not know {line!r}"
    for name in kept:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(*refused))
        elif not any(fnmatch.fnmatch(name, pattern) for pattern in refused):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


@pytest.mark.timeout(900)
def test_the_build_steps_work(tmp_path: Path) -> None:
    build, _ = stages()
    source = context(tmp_path / "src")
    for command in values(build, "RUN"):
        moved = re.sub(r"(?<![\w.])/(gradwire|wheels|kernels)\b", rf"{tmp_path}/\1", command)
        subprocess.run(["sh", "-euc", moved], cwd=source, check=True)

    for name in ("gc-server", "gc-worker", "gc-run"):
        assert os.access(tmp_path / "gradwire" / "bin" / name, os.X_OK)
    assert list((tmp_path / "kernels").rglob("*.nbi")), "no kernel was compiled"
