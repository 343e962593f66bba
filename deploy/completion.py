"""Print the completion of every installed gc- command: `python -m gradwire.deploy.completion bash`.

It needs the extra `completion`. docs/reference/commands.md says how bash and zsh load the output.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from ..common.configuration import parser_of
from ..common.exits import Exit
from ..common.presets import PRESETS
from ..compressors.registry import BUILT_IN
from ..server.job.modes.registry import MODES
from ..settings import BUILT_IN_TASKS, COMMANDS

# Values that an option may begin with, where its parser accepts more than a list of values.
VALUES: Mapping[str, Iterable[str]] = {
    "--compressor": BUILT_IN,
    "--mode": MODES,
    "--preset": PRESETS,
    "--task": BUILT_IN_TASKS,
}


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each gc- command of this package and of its papers, by name."""
    daemons = {command: cls for cls, command in COMMANDS.items()}
    found = {entry.name: entry.module for entry in entry_points(group="console_scripts")}
    for name, module in sorted(found.items()):
        if name.startswith("gc-") and module.startswith("gradwire"):
            cls = daemons.get(name)
            yield parser_of(cls, COMMANDS) if cls else import_module(module).parser()


def mark(parser: argparse.ArgumentParser) -> None:
    """Enter into a parser which arguments are files, folders or one of some values."""
    import shtab

    for action in parser._actions:  # pyright: ignore[reportPrivateUsage] (argparse has no other list)
        if isinstance(action.choices, dict):
            for command in cast(dict[str, argparse.ArgumentParser], action.choices).values():
                mark(command)
        shown = str(action.metavar or "")
        if shown:
            action.metavar = re.split(r"[^\w|-]", shown)[0]  # zsh would run the rest of `NAME[:KEY=VALUE]`
        if shown.startswith(("FILE", "DIR")):
            action.complete = shtab.FILE if shown.startswith("FILE") else shtab.DIRECTORY  # type: ignore[attr-defined]
        elif re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", shown):
            action.choices = shown.split("|")
        for flag in action.option_strings:
            if flag in VALUES:
                action.choices = [*VALUES[flag]]


def main(argv: Sequence[str]) -> int:
    """Print the script of the shell that `argv` names; return the exit code."""
    try:
        import shtab
    except ModuleNotFoundError:
        print(
            "the package shtab is not installed; run pip install '.[completion]' in a checkout of Gradwire",
            file=sys.stderr,
        )
        return Exit.USAGE
    if list(argv) not in (["bash"], ["zsh"]):
        print("expected bash or zsh: python -m gradwire.deploy.completion bash", file=sys.stderr)
        return Exit.USAGE
    for parser in parsers():
        mark(parser)
        print(shtab.complete(parser, argv[0]))
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
