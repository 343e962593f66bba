"""gc-status: show the state of a running job, once or repeatedly.

Asks the server for the job's progress and time left, the last losses and metrics, the bytes on the wire, the
members, the workers that the job waits for, and the lost workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

from ..common.exits import Exit, command
from ..common.naming import printable
from .arguments import access_files_of, add_server, command_parser

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ..proto.messages import MemberStatus, StatusResponse

EVERY_SECONDS = 2.0  # default of --watch
LOST_SHOWN = 5  # number of lost workers shown, the last ones
STALL_SHOWN_S = 10.0  # a member without progress for longer is marked


def positive_seconds(text: str) -> float:
    """Parse a number of seconds above 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return found


def parser() -> argparse.ArgumentParser:
    """Make gc-status' parser of command-line arguments."""
    found = command_parser("gc-status", __doc__)
    add_server(found, os.environ)
    text = f"repeat until the job is over; SECONDS between two displays, {EVERY_SECONDS:g} if not given"
    found.add_argument(
        "--watch", nargs="?", type=positive_seconds, const=EVERY_SECONDS, metavar="SECONDS", help=text
    )
    found.add_argument("--json", action="store_true", help="print one JSON object per display, on a line")
    return found


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-status with arguments `argv`, by default those of the process; return the exit code."""
    given = parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        files = access_files_of(given)
    except argparse.ArgumentTypeError as error:
        print(f"gc-status: {error}", file=sys.stderr)
        return Exit.USAGE
    from ..proto.messages import Phase
    from ..proto.refusal import Refused
    from .status import asking, why_silent  # late: it imports grpc

    try:
        live = given.watch is not None
        with asking(given.server, files=files) as ask, showing(as_json=given.json, live=live) as show:
            while True:
                status = ask()
                if status is None:
                    why = why_silent(given.server, files)
                    print(f"gc-status: {why.text}", file=sys.stderr)
                    return why.code
                show(status)
                if given.watch is None or status.phase is Phase.FINISHED:
                    return Exit.DONE
                time.sleep(given.watch)
    except Refused as refused:
        print(f"gc-status: {printable(str(refused))}", file=sys.stderr)
        return Exit.REFUSED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


Show = Callable[["StatusResponse"], None]


@contextlib.contextmanager
def showing(*, as_json: bool, live: bool) -> Generator[Show]:
    """Yield a function that prints a status: a line of JSON, or a page, `live` always in its place."""
    if as_json:
        from ..proto.status import to_json_dict

        yield lambda status: print(json.dumps(to_json_dict(status), allow_nan=False), flush=True)
        return
    from rich.live import Live

    from .console import Console

    console = Console()
    if live and console.is_terminal:
        with Live(console=console, auto_refresh=False) as display:
            yield lambda status: display.update(page(status), refresh=True)
    else:
        yield lambda status: console.print(page(status))


def page(status: StatusResponse) -> RenderableType:
    """Return a status as a page that rich can print: facts, a table of members, and lost workers."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..proto.status import printable_texts
    from .texts import traffic

    status = printable_texts(status)
    rows = Table.grid(padding=(0, 2))
    for name, value in facts(status):
        rows.add_row(Text(name, style="bold"), Text(value))
    rows.add_row(Text("bytes", style="bold"), traffic(status))
    parts: list[RenderableType] = [rows]
    if status.members:
        table = Table("rank", "worker", "compressor", "pushes", "heard", "does")
        for member in status.members:
            heard = f"{member.heard_seconds:.1f} s ago" + ("" if member.attached else ", not connected")
            compressor = member.compressor or "–"
            table.add_row(
                *(str(member.rank), Text(member.worker), Text(compressor), f"{member.pushes:,}"),
                *(heard, _doing(member)),
            )
        parts.append(table)
    lines = [f"lost: {each.worker} at version {each.version}: {each.reason}" for each in status.lost]
    parts += [Text(line, style="yellow") for line in lines[-LOST_SHOWN:]]
    return Group(*parts)


def _doing(member: MemberStatus) -> Text:
    """Return text with a member's activity, coloured if it makes no progress."""
    from rich.text import Text

    if member.suspended:
        return Text(
            f"suspended: {member.activity}, no progress for {member.stalled_seconds:.0f} s", style="red"
        )
    if member.stalled_seconds >= STALL_SHOWN_S:
        return Text(f"{member.activity}, no progress for {member.stalled_seconds:.0f} s", style="yellow")
    return Text(member.activity or "–")


def facts(status: StatusResponse) -> Generator[tuple[str, str]]:
    """Yield the lines about the job as a whole, each as a name and a text."""
    from ..proto.job import job_terms
    from ..proto.messages import Phase
    from ..proto.status import seconds_left
    from .texts import duration, metrics, training_loss, when

    job = job_terms(status.job)
    yield "job", f"{'scripts' if job.script else job.task}, mode {job.mode}, gradwire {status.software}"
    yield "phase", status.phase.name.lower()
    if status.waiting:
        yield "waits", status.waiting
    share = f", {status.epoch_progress:.0%} of the next one" if status.phase is Phase.RUNNING else ""
    epochs = f"{status.epoch} of {job.epochs} epochs" if job.epochs else f"{status.epoch} epochs"
    steps = f" of {job.max_steps:,}" if job.max_steps else ""
    yield "progress", f"{epochs}{share}; version {status.version:,}{steps}"
    if status.step_seconds:
        expected = status.predicted_step_seconds
        beside = f" (predicted {1e3 * expected:.3g} ms)" if expected else ""
        unit = "round" if status.local_steps else "step"
        text = f"{1e3 * status.step_seconds:.3g} ms a {unit}{beside}, {1 / status.step_seconds:.3g} {unit}s/s"
        yield "pace", text
    yield "time", f"{duration(status.training_seconds)} so far, {duration(seconds_left(status))} left"
    if status.version:
        rate = f", learning rate {status.learning_rate:.3g}" if status.learning_rate else ""
        yield "training", training_loss(status) + rate
    if status.evaluations:
        last = max(status.evaluations, key=lambda each: each.epoch)
        yield "validation", f"{metrics(last, job) or 'nothing'}  ({when(last, job)})"
    yield "pushes", f"{status.pushes:,} accepted, {status.refused_pushes:,} refused"


if __name__ == "__main__":
    sys.exit(main())
