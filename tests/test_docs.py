"""The documentation lists exactly the names that the code has."""

from __future__ import annotations

import dataclasses
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from gradwire.benchmarks import reference as bench_reference
from gradwire.benchmarks.cli import COMMANDS as BENCHES
from gradwire.common.exits import Exit
from gradwire.compressors import Wrapping, create
from gradwire.compressors.registry import BUILT_IN
from gradwire.compressors.wrapping import WRAPPING_KEYS
from gradwire.deploy import reference
from gradwire.server.job.modes.registry import MODES
from gradwire.server.metrics import ServerMetrics

from . import claims

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "papers").rglob("*.md"),
    ]
)
RECORDS = sorted((ROOT / "records").glob("*.md"))  # of their date: what they name may be gone


def test_metrics_are_exported_under_the_names_in_their_tables() -> None:
    registry = ServerMetrics("none").registry
    exported = {
        (metric.name + ("_total" if metric.type == "counter" else ""), metric.type)
        for metric in registry.collect()
        if metric.name.startswith("gradwire_server_")
    }
    assert set(re.findall(r"^\| `(\w+)` \| (\w+) \|", ServerMetrics.table(), re.M)) == exported


def test_every_exit_code_is_listed() -> None:
    table = (REFERENCE / "commands.md").read_text().split("## Exit codes")[1].split("##")[0]
    listed = {
        int(number) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for number in row.split(",")
    }
    assert listed == {int(code) for code in Exit}


def of_this_release(page: Path) -> str:
    """The text of a page; of the changelog what is not released, without what it says is gone."""
    text = page.read_text()
    if page.name == "CHANGELOG.md":
        text = re.sub(r"`[^`]+` is gone", "", text.split("\n## ")[1])
        text = re.sub(r"`gc-bench (\w+)[^`]*`", lambda span: span[0] if span[1] in BENCHES else "", text)
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert claims.problems(of_this_release(page)) == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_says_at_its_top_which_of_its_benchmarks_are_gone(record: Path) -> None:
    text = record.read_text()
    (said,) = re.findall(r"^Gone since then: (.*)\.$", text, re.M) or [""]
    named = set(re.findall(r"\bgc-bench ([a-z]+)\b", text)) - set(BENCHES)
    assert set(re.findall(r"(?<!of )`gc-bench (\w+)`", said)) == named


def test_modules_and_names_in_the_architecture_exist() -> None:
    assert claims.unknown_names((ROOT / "ARCHITECTURE.md").read_text()) == []


def test_what_help_and_messages_name_exists() -> None:
    for path in claims.sources():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests":
            assert claims.in_strings(path.read_text()) == [], path


def test_what_people_are_told_to_install_can_be_installed() -> None:
    checked = 0
    for path in claims.sources():
        if path.suffix in (".md", ".py", ".toml") and path.relative_to(ROOT).parts[0] != "tests":
            text = path.read_text()
            checked += text.count("pip install")
            assert claims.not_installable(text) == [], path
    assert checked > 10


@pytest.mark.parametrize(
    "false",
    [
        "`gc-serve --port 50051`",
        "`gc-server --no-such`",
        "`gc-worker --epochs 3`",  # an option of another command
        "`--mini-workers`",
        "`gc-bench step --jobs 2`",
        "`gc-bench stepp`",
        "    gc-server --mode sync:bound=4\n",
        "    gc-plan --bandwidth fast\n",
        "`make tests`",
        "`make endurance ARGS=--hours`",
        "`GC_EPOCH=3`",
        "`GRADWIRE_DEBUG=1`",
        "`gradwire_server_bytes_total`",
        "`server/durable/states.py`",
        "`python -m gradwire.benchmarks.kernels`",
        "`python -m gradwire.benchmarks.reference --jobs 1`",
        "`python tests/mutations.py --all`",
    ],
)
def test_a_name_that_does_not_exist_is_noticed(false: str) -> None:
    assert len(claims.problems(f"Some text, `gc-server --port 50051`.\n\n{false}\n")) == 1


def test_other_false_claims_are_noticed() -> None:
    assert claims.unknown_names("`worker/flops` and `Conductor.replans`, but `Conductor.replan`") == [
        "no module worker/flops",
        "no name Conductor.replans",
    ]
    assert len(claims.in_strings('"gc-serve --no-such, see docs/none.md"')) == 3
    assert len(claims.not_installable("pip install 'gradwire[certs]'")) == 1
    assert claims.not_installable("pip install '.[cert]' and pip install ./examples/none") == [
        "no extra cert",
        "no folder ./examples/none",
    ]


def test_every_command_and_benchmark_and_each_of_their_options_has_a_row() -> None:
    """The rows are made from the declarations; here every table is asked for by a page."""
    text = "".join(path.read_text() for path in {*DOCS.rglob("*.md"), *reference.PAGES})
    asked_for = set(re.findall(r"<!-- (.*), by make docs -->$", text, re.M))
    assert asked_for == {*reference.tables(), *bench_reference.tables()}
    overview = (REFERENCE / "commands.md").read_text().split("\n## ")[0]
    for command in claims.SCRIPTS:
        assert re.search(rf"^\| \[?`{command}( NAME)?`", overview, re.M), command
        assert command in ("gc-bench", "gc-paper") or f"options of {command}" in asked_for


def test_every_base_module_is_in_the_architecture_and_two_modules_are_at_the_root() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "settings"}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    modules = [
        path.stem for room in ("common", "storage", "optim") for path in (ROOT / room).glob("[!_]*.py")
    ]
    assert [name for name in modules if f"`{name}`" not in text] == ["version"]


@pytest.mark.parametrize("name", MODES)
def test_every_mode_has_a_row_and_a_page(name: str) -> None:
    overview = (REFERENCE / "modes.md").read_text().split("\n## ")[0]
    assert f"\n| [`{name}`](modes/{name}.md) |" in overview
    assert (REFERENCE / "modes" / f"{name}.md").read_text().startswith(f"# Mode {name}\n")


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
    overview, options = (REFERENCE / "compressors.md").read_text(), defaults_of(name)
    assert len(re.findall(rf"^\| `{name}` \|", overview, re.M)) == 1

    heading = re.compile(rf"^## `{name}`$", re.M)
    pages = [path.read_text() for path in (REFERENCE / "compressors").glob("*.md")]
    (page,) = [page for page in pages if heading.search(page)]
    section = heading.split(page)[1].partition("\n## ")[0]
    spec = ":".join(filter(None, [name, ",".join(f"{key}={value}" for key, value in options.items())]))
    if BUILT_IN[name].wrapping is not None:
        assert f"Defaults: `{spec}`" in section
    create(spec)

    # A row in the section itself, or in one for all compressors of the page.
    shared = "".join(re.findall(r"^## Options of all of them$.*?(?=^## )", page, re.M | re.S))
    family = (REFERENCE / "compressors" / "sparsifiers.md").read_text() if "ratio" in options else ""
    shared += "".join(re.findall(r"^## Options of all of them$.*?(?=^## )", family, re.M | re.S))
    rows = set(re.findall(r"^\| `(\w+)` \|", section + shared, re.M))
    assert set(options) - set(WRAPPING_KEYS) <= rows

    # No row for an option that is not there: those before the first table of another kind.
    table = re.search(r"^\| key \| default \| \|\n.*?\n\n", section, re.M | re.S)
    listed = set(re.findall(r"^\| `(\w+)` \|", table.group(), re.M)) if table else set[str]()
    assert listed <= set(options)


def test_every_value_of_an_option_is_documented() -> None:
    text = "".join(path.read_text() for path in (REFERENCE / "compressors").glob("*.md"))
    for entry in BUILT_IN.values():
        for field in dataclasses.fields(entry.options):
            default: object = getattr(entry.options(), field.name)
            if isinstance(default, Enum):
                assert all(f"`{member.value}`" in text for member in type(default)), field.name


def test_what_goes_around_every_compressor_is_listed() -> None:
    table = (REFERENCE / "compressors.md").read_text().split("## What goes around it")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.M)) == WRAPPING_KEYS


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.M)
    }


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=lambda page: str(page.relative_to(ROOT)))
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
    tables = {**reference.tables(), **bench_reference.tables()}
    for path in (*reference.PAGES, *bench_reference.PAGES):
        assert reference.filled(path.read_text(), tables) == path.read_text(), "run make docs"
    text = (REFERENCE / "commands.md").read_text()
    broken = text.replace("| `--epochs` | at least 0 |", "| `--epochs` | at least 2 |")
    assert broken != text
    assert reference.filled(broken, tables) == text
