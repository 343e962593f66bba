"""Writes the tables of options and metrics into docs/commands.md and docs/metrics.md: `make docs`.

    python -m gradwire.deploy.reference [--check]

They come from their declarations. A table stands between two comments that name what it lists. Needs the
checkout, not a wheel.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..configuration import REQUIRED, Option, options_of
from ..metrics import MetricSet
from ..server.job.modes import registry
from ..server.metrics import Metrics as ServerMetrics
from ..settings import COMMANDS, RunSettings
from ..worker.metrics import Metrics as WorkerMetrics

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "commands.md", DOCS / "metrics.md")
_TABLE = re.compile(r"(<!-- ((?:options|metrics) of [\w-]+), by make docs -->\n).*?(<!-- end -->)", re.S)


def page(text: str) -> str:
    """The page with the tables that its comments ask for."""
    tables = {f"options of {command}": _of_command(cls) for cls, command in COMMANDS.items()}
    tables["options of modes"] = _of_modes()
    tables["metrics of gc-server"] = _of_metrics(ServerMetrics)
    tables["metrics of gc-worker"] = _of_metrics(WorkerMetrics)
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text)


def _of_command(cls: type[object]) -> str:
    options = options_of(cls)
    taken_over: set[str] = set()
    if cls is RunSettings:  # listed where they are declared, except those that gc-run has alone
        daemons = (options_of(other) for other in COMMANDS if other is not RunSettings)
        taken_over = {name for theirs in daemons for name in theirs} & options.keys()
    rows = [_row(each) for name, each in options.items() if name not in taken_over]
    if taken_over:
        flags = ", ".join(f"`{options[name].flag}`" for name in options if name in taken_over)
        rows.append(f"\nAnd, as above: {flags}.")
    return "\n".join(["| option | values | default | meaning |", "|---|---|---|---|", *rows])


def _of_modes() -> str:
    rows: list[str] = []
    for name, mode in registry.MODES.items():
        for key, each in options_of(mode).items():
            accepted = ("on", "off") if each.kind is bool else each.choices
            choices = ", ".join(f"`{choice}`" for choice in accepted)
            rows.append(
                f"| `{name}` | `{key}` | {choices or each.notes} | `{each.default_text}` | {each.help} |"
            )
    return "\n".join(["| mode | key | values | default | meaning |", "|---|---|---|---|---|", *rows])


def _of_metrics(metrics: type[MetricSet]) -> str:
    return "\n".join(["| name | type | labels | |", "|---|---|---|---|", metrics.table()])


def _row(option: Option) -> str:
    values = "switch" if option.kind is bool else ", ".join(f"`{choice}`" for choice in option.choices)
    values = values or "; ".join(filter(None, [option.metavar and f"`{option.metavar}`", option.notes]))
    default = "required" if option.default is REQUIRED else option.default_text and f"`{option.default_text}`"
    return f"| `{option.flag}` | {values} | {default} | {option.help} |".replace("*", r"\*")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether the pages are current")
    given = parser.parse_args(argv)
    for path in PAGES:
        text = path.read_text()
        current = page(text)
        if given.check and text != current:
            print(f"{path} is not current; run make docs", file=sys.stderr)
            return 1
        path.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
