"""The image file: its steps, and what its build may see."""

from __future__ import annotations

import fnmatch
import io
import shutil
from dataclasses import dataclass
from pathlib import Path

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


def context(folder: Path) -> Path:
    """Copy the files that .dockerignore admits to the build. Reads the few forms that the file uses, and no
    other."""
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
