"""The wheel holds the package, all of it and nothing else."""

from __future__ import annotations

import os
import re
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .conftest import Built

pytestmark = pytest.mark.timeout(600)

# Folders of the checkout that are no part of the package.
OUTSIDE = {"docs", "examples", "papers", "records", "tests", "build", "dist"}
ROOT = Path(__file__).resolve().parents[2]
DATA = {".html", ".json", ".proto", ".pyi", ".typed"}


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def setuptools_table(source: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def test_every_folder_of_code_is_listed(built: Built) -> None:
    """An unlisted one works in an editable install and is missing from the wheel."""
    rooms = {path.parent.relative_to(built.source) for path in built.source.rglob("__init__.py")}
    inside = {room for room in rooms if not room.parts or room.parts[0] not in OUTSIDE}

    assert {".".join(("gradwire", *room.parts)) for room in inside} == set(
        setuptools_table(built.source)["packages"]
    )


def test_wheel_holds_exactly_the_listed_packages(built: Built) -> None:
    expected: set[str] = set()
    for package in setuptools_table(built.source)["packages"]:
        folder = Path(*package.split(".")[1:])
        for path in (built.source / folder).iterdir():
            if path.suffix == ".py" or path.suffix in DATA:
                expected.add(str("gradwire" / folder / path.name))

    assert files_of(built.wheel) == expected
    assert {
        "gradwire/py.typed",
        "gradwire/proto/gradwire.proto",
        "gradwire/proto/gradwire_pb2.pyi",
    } <= expected


def test_no_test_code_is_shipped(built: Built) -> None:
    """A conftest.py beside pyproject.toml would be, as part of the package."""
    names = {Path(name).name for name in files_of(built.wheel)}

    assert not [name for name in names if name.startswith(("test_", "conftest")) or name == "setup.py"]


def test_licence_is_shipped(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]


def test_every_place_that_names_the_release_names_this_one() -> None:
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
    ]
    places = [path for path in pages if path.suffix in ("", ".md", ".yaml")]
    places += [ROOT / "CITATION.cff", ROOT / "pyproject.toml", ROOT / "papers" / "pyproject.toml"]
    named = {
        path: set(
            re.findall(
                r'(?:\bgradwire:|newTag: "|^version: |^version = ")(\d+\.\d+\.\d+)', path.read_text(), re.M
            )
        )
        for path in places
    }
    (version,) = named[ROOT / "pyproject.toml"]
    assert {path: found for path, found in named.items() if found - {version}} == {}
    assert sum(map(bool, named.values())) > 4


def test_one_process_makes_the_wheel_for_all_tests(built: Built, request: pytest.FixtureRequest) -> None:
    """With a pytest that pytest-xdist does not know, groups of tests are ignored and all is made twice."""
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@packages")
