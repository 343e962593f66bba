"""Write the tables of options and metrics into the pages of docs/: `make docs`.

    python -m gradwire.deploy.reference [--check]

The tables come from the declarations. A table stands between two comments, the first of which names what the
table lists. Needs the checkout, not a wheel. The tables of gc-bench are written by `benchmarks.reference`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..common.configuration import REQUIRED, Option, options_of
from ..common.metrics import MetricSet
from ..server.job.modes import registry
from ..server.metrics import ServerMetrics
from ..settings import COMMANDS, RunSettings
from ..worker.metrics import WorkerMetrics
from . import certs, doctor, plan, watch

DOCS = Path(__file__).resolve().parents[1] / "docs"
REFERENCE = DOCS / "reference"
PAGES = (REFERENCE / "commands.md", REFERENCE / "metrics.md", DOCS / "how-to" / "planning.md")
# Commands whose options argparse declares.
PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "gc-plan": plan.parser,
    "gc-status": watch.parser,
    "gc-doctor": doctor.parser,
    "gc-certs": certs.parser,
}
_TABLE = re.compile(r"(<!-- ((?:options|metrics) of [\w -]+), by make docs -->\n).*?(<!-- end -->)", re.S)


def tables() -> dict[str, str]:
    """Return every table of `PAGES` by the name in its comment."""
    found = {f"options of {command}": _of_command(cls) for cls, command in COMMANDS.items()}
    found |= {f"options of {command}": of_parser(make()) for command, make in PARSERS.items()}
    found["options of modes"] = _of_modes()
    found["metrics of gc-server"] = _of_metrics(ServerMetrics)
    found["metrics of gc-worker"] = _of_metrics(WorkerMetrics)
    return found


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with these tables between the comments that name them."""
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text)


def of_parser(parser: argparse.ArgumentParser) -> str:
    """Return the table of an argparse parser's arguments, without --help and --version."""
    rows = ["| option | meaning |", "|---|---|"]
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage] (argparse has no other list)
        if action.dest in ("help", "version"):
            continue
        metavar = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
        value = {0: "", "?": f"[{metavar}]", "+": f"{metavar} ...", "*": f"[{metavar} ...]"}.get(
            "" if action.nargs is None else action.nargs, str(metavar)
        )
        usage = " ".join(filter(None, [*action.option_strings, value]))
        help_text = (action.help or "") % {"default": action.default}
        rows.append(_cells(f"`{usage}`", help_text))
    return "\n".join(rows)


def _cells(*texts: str) -> str:
    """Return a row of a table. GitHub ends a cell at a bare |, also within backquotes."""
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def _of_command(cls: type[object]) -> str:
    options = options_of(cls)
    from_daemons: set[str] = set()
    if cls is RunSettings:  # the daemons' tables list the options that gc-run shares with them
        daemons = (options_of(other) for other in COMMANDS if other is not RunSettings)
        from_daemons = {name for theirs in daemons for name in theirs} & options.keys()
    rows = [_row(each) for name, each in options.items() if name not in from_daemons]
    if from_daemons:
        flags = ", ".join(f"`{options[name].flag}`" for name in options if name in from_daemons)
        rows.append(f"| others | | | as of `gc-server` and `gc-worker`: {flags} |")
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
    return _cells(f"`{option.flag}`", values, default, option.help).replace("*", r"\*")


def main(argv: Sequence[str]) -> int:
    return write(argv, __doc__, PAGES, tables())


def write(argv: Sequence[str], about: str | None, pages: Sequence[Path], tables: Mapping[str, str]) -> int:
    """Write the tables into the pages, or with --check compare them. about: description for --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are current")
    given = parser.parse_args(argv)
    for path in pages:
        text = path.read_text()
        current = filled(text, tables)
        if given.check and text != current:
            print(f"{path} is not current; run make docs", file=sys.stderr)
            return 1
        path.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
