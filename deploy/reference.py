"""Write the tables of options and metrics into pages of docs/, and the rules into a manifest: `make docs`.

    python -m gradwire.deploy.reference [--check]

The tables come from the declarations in the code. In a page, a table stands between two comments; the first
one gives the table's name. The program needs the checkout, not a wheel. `benchmarks.reference` writes the
tables of gc-bench.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..common.configuration import REQUIRED, Option, options_of
from ..common.metrics import MetricSet
from ..common.presets import PRESETS
from ..server.job.modes import registry
from ..server.metrics import ServerMetrics
from ..settings import COMMANDS
from ..worker.metrics import WorkerMetrics
from . import certs, doctor, plan, watch

DOCS = Path(__file__).resolve().parents[1] / "docs"
REFERENCE = DOCS / "reference"
DEPLOY = Path(__file__).parent
PAGES = (
    DEPLOY / "kubernetes" / "rules" / "prometheus-rule.yaml",
    REFERENCE / "commands.md",
    REFERENCE / "metrics.md",
    DOCS / "how-to" / "planning.md",
    *(REFERENCE / "modes" / f"{name}.md" for name in registry.MODES),
)
# Commands whose options are declared with argparse rather than in settings.py: each command's parser.
PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "gc-status": watch.parser,
    "gc-doctor": doctor.parser,
    "gc-certs": certs.parser,
    "gc-plan": plan.parser,
}
PARSER_HEAD = "| option | meaning |"
_TABLE = re.compile(
    r"(<!-- ((?:options|metrics|rules) of [\w -]+), by make docs -->\n).*?((?:# )?<!-- end -->)", re.S
)


def tables() -> dict[str, str]:
    """Return the Markdown of every table of `PAGES`, by name, such as "options of gc-plan"."""
    declared = {
        command: [(f"`{each.flag}`", _row(each)) for each in options_of(cls).values()]
        for cls, command in COMMANDS.items()
    }
    found = tables_of(declared, "| option | values | default | meaning |")
    found |= tables_of({name: rows_of(make()) for name, make in PARSERS.items()}, PARSER_HEAD)
    found |= {f"options of mode {name}": _of_mode(mode) for name, mode in registry.MODES.items()}
    rules = (DEPLOY / "prometheus" / "gradwire.rules.yml").read_text(encoding="utf-8")
    found["rules of Prometheus"] = textwrap.indent(rules[rules.index("groups:") :].rstrip(), "  ")
    found["options of presets"] = _of_presets()
    found["metrics of gc-server"] = _of_metrics(ServerMetrics)
    found["metrics of gc-worker"] = _of_metrics(WorkerMetrics)
    return found


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with the table of each pair of comments replaced by the one in `tables`.

    Args:
        text: Markdown of the page.
        tables: Markdown of the tables, by the name in the first comment.
    """
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text)


def rows_of(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return the name and the table row of each of a parser's arguments."""
    rows: list[tuple[str, str]] = []
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage] (argparse has no other list)
        if action.dest in ("help", "version"):
            continue
        metavar = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
        value = {0: "", "?": f"[{metavar}]", "+": f"{metavar} ...", "*": f"[{metavar} ...]"}.get(
            "" if action.nargs is None else action.nargs, str(metavar)
        )
        usage = " ".join(filter(None, [*action.option_strings, value]))
        help_text = (action.help or "") % {"default": action.default}
        name = action.option_strings[0] if action.option_strings else usage
        rows.append((f"`{name}`", _cells(f"`{usage}`", help_text)))
    return rows


def _cells(*texts: str) -> str:
    """Return a row of a Markdown table. A bare | would end a cell on GitHub, also in backquotes, so it is
    escaped.
    """
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def tables_of(commands: Mapping[str, Sequence[tuple[str, str]]], head: str) -> dict[str, str]:
    """Return a table for each command. A row that an earlier table has is named in the last rows only.

    Args:
        commands: name and row of each option, by the command's name.
        head: the first row.
    """
    found: dict[str, str] = {}
    owners: dict[str, str] = {}  # the command whose table has the row
    cells = head.count("|") - 1
    for command, options in commands.items():
        own, others = list[str](), dict[str, list[str]]()
        for name, row in options:
            if row in owners:
                others.setdefault(owners[row], []).append(name)
            else:
                own.append(row)
        owners |= dict.fromkeys(own, command)
        last = [
            f"| as of `{owner}` |{' |' * (cells - 2)} {', '.join(names)} |" for owner, names in others.items()
        ]
        found[f"options of {command}"] = "\n".join([head, f"|{'---|' * cells}", *own, *last])
    return found


def _of_mode(mode: type[object]) -> str:
    """Return the table of the options in a mode's spec."""
    rows: list[str] = []
    for key, each in options_of(mode).items():
        accepted = ("on", "off") if each.kind is bool else each.choices
        choices = ", ".join(f"`{choice}`" for choice in accepted)
        rows.append(f"| `{key}` | {choices or each.notes} | `{each.default_text}` | {each.help} |")
    return "\n".join(["| key | values | default | meaning |", "|---|---|---|---|", *rows])


def _of_presets() -> str:
    """Return the table of presets: purpose, values that each sets, and the alternatives that suit it."""
    rows: list[str] = []
    for name, each in PRESETS.items():
        values = ", ".join(f"`--{option.replace('_', '-')} {value}`" for option, value in each.sets.items())
        suits = "; ".join(
            f"`--{option}` {', '.join(f'`{one}`' for one in names)}" for option, names in each.suits.items()
        )
        rows.append(_cells(f"`{name}`", each.purpose, values, suits))
    return "\n".join(["| preset | for | sets | suits |", "|---|---|---|---|", *rows])


def _of_metrics(metrics: type[MetricSet]) -> str:
    """Return the table of a daemon's metrics."""
    return "\n".join(["| name | type | labels | |", "|---|---|---|---|", metrics.table()])


def _row(option: Option) -> str:
    """Return the table row of one option."""
    values = "switch" if option.kind is bool else ", ".join(f"`{choice}`" for choice in option.choices)
    values = values or "; ".join(filter(None, [option.metavar and f"`{option.metavar}`", option.notes]))
    default = "required" if option.default is REQUIRED else option.default_text and f"`{option.default_text}`"
    return _cells(f"`{option.flag}`", values, default, option.help).replace("*", r"\*")


def main(argv: Sequence[str]) -> int:
    """Write or check the tables of `PAGES`, as the arguments `argv` say; return the exit code."""
    return write(argv, __doc__, PAGES, tables())


def write(argv: Sequence[str], about: str | None, pages: Sequence[Path], tables: Mapping[str, str]) -> int:
    """Write tables into pages or, with --check, compare; return 1 if a page is not current, else 0.

    Args:
        argv: command-line arguments.
        about: description of the program for --help.
        pages: files to write.
        tables: Markdown of each table, by its name.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    given = parser.parse_args(argv)
    for path in pages:
        text = path.read_text(encoding="utf-8")
        current = filled(text, tables)
        if given.check and text != current:
            print(f"{path} is not current; run make docs", file=sys.stderr)
            return 1
        path.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
