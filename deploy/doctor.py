"""gc-doctor: find out why a worker on this machine cannot reach or use a server.

Checks the name, the port, TLS, the version of the protocol, access, the round trip, the clocks and the
bandwidth. Each check prints a line: its state, its finding, and the remedy. The first check that fails is the
last, because later ones would fail for the same reason.

Exit codes: 0 if a worker could use the server, 4 if it cannot be reached, 3 if it is reached and refuses, 2
for a wrong command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from ..common.exits import Exit, command
from ..common.naming import printable
from ..proto.findings import Finding, Target
from .arguments import access_files_of, add_server, command_parser

if TYPE_CHECKING:
    from rich.text import Text

STYLES = {"ok": "green", "warning": "yellow", "wrong": "red"}


def parser() -> argparse.ArgumentParser:
    """Make gc-doctor's parser of command-line arguments."""
    found = command_parser("gc-doctor", __doc__)
    add_server(found, os.environ)
    found.add_argument("--json", action="store_true", help="one JSON object with all findings")
    return found


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-doctor with arguments `argv`, by default those of the process; return the exit code."""
    given = parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        files = access_files_of(given)
    except argparse.ArgumentTypeError as error:
        print(f"gc-doctor: {error}", file=sys.stderr)
        return Exit.USAGE
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the findings contain gRPC's errors
    target = Target.at(given.server, **files)
    findings: list[Finding] = []
    for finding in examine(target):
        findings.append(finding)
        if not given.json:
            _show(finding)
    wrong = next((each for each in findings if each.state == "wrong"), None)
    code = Exit.DONE if wrong is None else Exit.UNREACHABLE if wrong.unreachable else Exit.REFUSED
    if given.json:
        plain = [dataclasses.asdict(each) for each in findings]
        print(json.dumps({"server": given.server, "usable": wrong is None, "findings": plain}))
    return code


def examine(target: Target) -> Generator[Finding]:
    """Run all checks of a server in order, and yield the finding of each, until one fails."""
    from ..proto.reaching import reach

    last: Finding | None = None
    for last in reach(target):
        yield last
    if last is not None and last.state == "wrong":
        return
    from .service_checks import check_service  # late: it imports grpc

    yield from check_service(target)


def _show(finding: Finding) -> None:
    """Print a finding as one line."""
    from rich.text import Text

    from .console import Console

    line: Text = Text.assemble(
        (f"{finding.state:8}", STYLES[finding.state]),
        (f"{finding.check:12}", "bold"),
        printable(finding.text),
    )
    if finding.remedy:
        line.append(f"; {printable(finding.remedy)}")
    Console(soft_wrap=True).print(line)


if __name__ == "__main__":
    sys.exit(main())
