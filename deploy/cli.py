"""gc-run: train on this machine with a server and workers, and compare with an uncompressed run."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..exits import Exit
from ..options import UsageError, resolve
from .config import RunOptions
from .daemons import check_daemon_options

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
        options = resolve(
            RunOptions,
            prog="gc-run",
            description=DESCRIPTION,
            argv=sys.argv[1:] if argv is None else argv,
            environ=environ,
            version=__version__,
        ).config
        check_daemon_options(options, environ)
        json_path = _json_path(options)
        directory = _directory(options)
    except UsageError as error:
        return _fail(Exit.USAGE, str(error))

    # Late, so that --help answers at once.
    from .engine import RunError
    from .interrupt import Interrupt, Interrupted

    with Interrupt() as interrupt:
        try:
            return _run(options, directory, json_path, interrupt)
        except RunError as error:
            return _fail(error.code, str(error))
        except Interrupted as interrupted:
            return _fail(128 + interrupted.number, f"stopped by {interrupted}; no process is left")


def _run(options: RunOptions, directory: Path, json_path: Path | None, interrupt: Interrupt) -> int:
    from rich.console import Console

    from .plot import PlotError, write_plot
    from .report import table_of, to_json, write_atomically

    console = Console()
    console.out(
        f"Preparing: checking {options.compressor} and {options.task}, compiling kernels", highlight=False
    )
    _prepare(options, interrupt)
    console.out(f"Logs, report and plot: {directory}/", highlight=False)
    result = _train(options, directory / "run", console, interrupt)
    baseline = None
    if options.baseline and not _is_baseline(options):
        uncompressed = dataclasses.replace(options, compressor="none", downlink="none")
        baseline = _train(uncompressed, directory / "baseline", console, interrupt)

    report = to_json(result, baseline)
    write_atomically(directory / "report.json", report)
    if json_path is not None:
        write_atomically(json_path, report)
    console.print(table_of(result, baseline))
    try:
        write_plot(directory / "plot.png", [result, baseline] if baseline is not None else [result])
    except PlotError as error:
        console.out(error, highlight=False)
    return Exit.DONE


def _prepare(options: RunOptions, interrupt: Interrupt) -> None:
    """Raise `RunError` for a compressor or a task that no worker could use."""
    from .engine import RunError, run_to_end
    from .processes import Children

    with tempfile.TemporaryDirectory() as directory, Children(Path(directory)) as children:
        child = children.start("prepare", "gradwire.deploy.prepare", [options.compressor, options.task])
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
    return options.compressor == "none" and options.downlink == "none"


def _json_path(options: RunOptions) -> Path | None:
    """Where the report goes; what cannot be written is said before hours of training, not after."""
    if not options.json:
        return None
    path = Path(options.json)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--json {path}: expected a file in a directory that exists and can be written to")
    return path


def _directory(options: RunOptions) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{options.task} {options.compressor}")
    path = Path(options.out) if options.out else Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {path}: expected a directory")
    return path


def _fail(code: int, message: str) -> int:
    print(f"gc-run: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
