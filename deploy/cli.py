"""gc-run: train on this machine with a server and workers, and compare with an uncompressed run."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..exits import Exit
from ..options import UsageError, resolve
from .config import RunOptions
from .daemons import check_daemon_options
from .paths import json_path, run_directory

if TYPE_CHECKING:
    from rich.console import Console

    from .interrupt import Interrupt
    from .report import Result

DESCRIPTION = (
    "Train with one server and several workers on this machine, and compare with an uncompressed run."
)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Entry point; returns the exit code."""
    environ = os.environ if environ is None else environ
    try:
        given = resolve(
            RunOptions,
            prog="gc-run",
            description=DESCRIPTION,
            argv=sys.argv[1:] if argv is None else argv,
            environ=environ,
            version=__version__,
        )
        options = given.config
        if options.mode == "coded" and given.origins["compressor"] == "default":
            options = dataclasses.replace(options, compressor="none")
        check_daemon_options(options, environ)
        with run_directory(options) as directory:
            return _checked(options, directory, json_path(options))
    except UsageError as error:
        return _fail(Exit.USAGE, str(error))


def _checked(options: RunOptions, directory: Path, json: Path | None) -> int:
    # Late, so that --help answers at once.
    from .engine import RunError
    from .interrupt import Interrupt, Interrupted

    with Interrupt() as interrupt:
        try:
            return _run(options, directory, json, interrupt)
        except RunError as error:
            return _fail(error.code, str(error))
        except Interrupted as interrupted:
            return _fail(128 + interrupted.number, f"stopped by {interrupted}; no process is left")


def _run(options: RunOptions, directory: Path, json: Path | None, interrupt: Interrupt) -> int:
    from rich.console import Console

    from .report import table_of

    console = Console()
    console.out(
        f"Preparing: checking {options.compressor} and {options.task}, compiling kernels", highlight=False
    )
    _prepare(options, interrupt)
    console.out(f"Logs, report and plot: {directory}/", highlight=False)
    result = _train(options, directory / "run", console, interrupt)
    baseline = None
    if options.baseline and not _is_baseline(options):
        plain = dataclasses.replace(options, compressor="none", downlink="none")
        if options.mode == "coded":  # there is nothing compressed; what it competes with is the server's sum
            plain = dataclasses.replace(plain, mode="sync", redundancy="1")
        baseline = _train(plain, directory / "baseline", console, interrupt)

    console.print(table_of(result, baseline))  # first: a full disk must not keep the figures from people
    try:
        _write(result, baseline, directory, json, console)
    except OSError as error:
        return _fail(Exit.INTERNAL, f"the report or the plot cannot be written: {error}")
    console.out(f"plot, report, parameters and logs: {directory}", highlight=False)
    return Exit.DONE


def _write(
    result: Result, baseline: Result | None, directory: Path, json: Path | None, console: Console
) -> None:
    from .plot import PlotError, write_plot
    from .report import to_json, write_atomically

    report = to_json(result, baseline)
    write_atomically(directory / "report.json", report)
    if json is not None:
        write_atomically(json, report)
    try:
        write_plot(directory / "plot.png", [result, baseline] if baseline is not None else [result])
    except PlotError as error:
        console.out(error, highlight=False)


def _prepare(options: RunOptions, interrupt: Interrupt) -> None:
    """Raise `RunError` for a compressor or a task that no worker could use."""
    from .engine import RunError, run_to_end
    from .processes import Children

    with tempfile.TemporaryDirectory() as directory, Children(Path(directory)) as children:
        child = children.start(
            "prepare", "gradwire.deploy.prepare", [options.compressor, options.downlink, options.task]
        )
        run_to_end(child, interrupt)
        if child.code in (Exit.USAGE, Exit.TASK):
            raise RunError(Exit(child.code), child.last_lines(1))
        if child.code != Exit.DONE:
            raise RunError(Exit.INTERNAL, f"the check ended: {child.ending}\n{child.last_lines()}")


def _train(options: RunOptions, directory: Path, console: Console, interrupt: Interrupt) -> Result:
    from .engine import Plan, train
    from .progress import progress
    from .report import result_of

    with progress(console, options.compressor, options.workers) as watcher:
        status = train(Plan(options=options, directory=directory), watcher, interrupt)
    return result_of(options, status)


def _is_baseline(options: RunOptions) -> bool:
    return options.compressor == "none" and options.downlink == "none" and options.mode != "coded"


def _fail(code: int, message: str) -> int:
    print(f"gc-run: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
