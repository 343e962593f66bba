"""What the documentation lists is what the code has."""

from __future__ import annotations

import dataclasses
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from gradwire.compressors import Wrapping, create
from gradwire.compressors.registry import BUILT_IN
from gradwire.compressors.wrapping import WRAPPING_KEYS
from gradwire.deploy import reference
from gradwire.exits import Exit
from gradwire.server.job.modes.registry import MODES
from gradwire.server.metrics import Metrics as ServerMetrics
from gradwire.settings import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def test_metrics_are_exported_under_the_names_in_their_tables() -> None:
    registry = ServerMetrics("none").registry
    exported = {
        (metric.name + ("_total" if metric.type == "counter" else ""), metric.type)
        for metric in registry.collect()
        if metric.name.startswith("gradwire_server_")
    }
    assert set(re.findall(r"^\| `(\w+)` \| (\w+) \|", ServerMetrics.table(), re.M)) == exported


def test_every_exit_code_is_listed() -> None:
    table = (DOCS / "commands.md").read_text().split("## Exit codes")[1].split("##")[0]
    listed = {
        int(number) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for number in row.split(",")
    }
    assert listed == {int(code) for code in Exit}


def test_options_named_in_the_documentation_exist() -> None:
    known = {field.name for cls in COMMANDS for field in dataclasses.fields(cls)}
    known |= {"help", "print_config", "config", "version"}
    named = set(re.findall(r"`--([a-z-]+)", (DOCS / "commands.md").read_text()))
    assert {name.replace("-", "_").removeprefix("no_") for name in named} <= known


@pytest.mark.parametrize("name", MODES)
def test_every_mode_has_a_row_and_a_section(name: str) -> None:
    page = (DOCS / "modes.md").read_text()
    assert re.search(rf"^\| `{name}` \|", page.split("\n## ")[0], re.M)
    assert re.search(rf"^## {name}$", page, re.M) or (DOCS / f"{name}.md").exists()


def text_of(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def defaults_of(name: str) -> dict[str, str]:
    """The compressor's own options, and what goes around it where that is not what goes around others."""
    entry = BUILT_IN[name]
    own: Any = entry.options()
    options = {field.name: text_of(getattr(own, field.name)) for field in dataclasses.fields(own)}
    for key in WRAPPING_KEYS if entry.wrapping else ():
        value = getattr(entry.wrapping, key)
        if value != getattr(Wrapping(), key):
            options[key] = text_of(value)
    return options


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_compressor_is_documented_with_its_options(name: str) -> None:
    overview, options = (DOCS / "compressors.md").read_text(), defaults_of(name)
    assert len(re.findall(rf"^\| `{name}` \|", overview, re.M)) == 1

    heading = re.compile(rf"^## `{name}`$", re.M)
    pages = [path.read_text() for path in (DOCS / "compressors").glob("*.md")]
    (page,) = [page for page in pages if heading.search(page)]
    section = heading.split(page)[1].partition("\n## ")[0]
    spec = ":".join(filter(None, [name, ",".join(f"{key}={value}" for key, value in options.items())]))
    if BUILT_IN[name].wrapping is not None:
        assert f"Defaults: `{spec}`" in section
    create(spec)

    # A row in the section itself, or in one for all compressors of the page.
    shared = "".join(re.findall(r"^## Options of all of them$.*?(?=^## )", page, re.M | re.S))
    family = (DOCS / "compressors" / "sparsifiers.md").read_text() if "ratio" in options else ""
    shared += "".join(re.findall(r"^## Options of all of them$.*?(?=^## )", family, re.M | re.S))
    rows = set(re.findall(r"^\| `(\w+)` \|", section + shared, re.M))
    assert set(options) - set(WRAPPING_KEYS) <= rows

    # No row for an option that is not there: those before the first table of another kind.
    table = re.search(r"^\| key \| default \| \|\n.*?\n\n", section, re.M | re.S)
    listed = set(re.findall(r"^\| `(\w+)` \|", table.group(), re.M)) if table else set[str]()
    assert listed <= set(options)


def test_every_value_of_an_option_is_documented() -> None:
    text = "".join(path.read_text() for path in (DOCS / "compressors").glob("*.md"))
    for entry in BUILT_IN.values():
        for field in dataclasses.fields(entry.options):
            default: object = getattr(entry.options(), field.name)
            if isinstance(default, Enum):
                assert all(f"`{member.value}`" in text for member in type(default)), field.name


def test_what_goes_around_every_compressor_is_listed() -> None:
    table = (DOCS / "compressors.md").read_text().split("## What goes around it")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.M)) == WRAPPING_KEYS


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.M)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), link
        if anchor:
            assert anchor in anchors(there), link


def test_the_tables_of_options_and_metrics_are_those_of_the_declarations() -> None:
    for path in reference.PAGES:
        assert reference.page(path.read_text()) == path.read_text(), "run make docs"
    text = (DOCS / "commands.md").read_text()
    broken = text.replace("| `--epochs` | at least 1 |", "| `--epochs` | at least 2 |")
    assert reference.page(broken) == text
