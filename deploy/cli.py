"""gc-run: train on this machine with a server and workers, and compare with an uncompressed run."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..configuration import Effective, UsageError, read
from ..exits import Exit
from ..server.checks import SPECS
from ..server.job.modes import registry
from ..settings import COMMANDS, RunSettings
from .daemons import check_together
from .paths import json_path, run_directory

if TYPE_CHECKING:
    from rich.console import Console

    from .engine import Stopped
    from .interrupt import Interrupt, Interrupted
    from .report import Result


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Entry point; returns the exit code."""
    environ = os.environ if environ is None else environ
    try:
        effective = read(
            RunSettings,
            COMMANDS,
            argv=sys.argv[1:] if argv is None else argv,
            environ=environ,
            parsers=SPECS,
            epilog=registry.describe(),
        )
        mode = registry.parse(effective.settings.mode)
        if (mode.work == "exchange" or mode.lossless) and not effective.chosen("compressor"):
            effective = effective.changed("because of --mode", compressor="none")
        settings = effective.settings
        check_together(settings)
        with run_directory(settings) as directory:
            return _checked(effective, directory, json_path(settings))
    except UsageError as error:
        return _fail(Exit.USAGE, str(error))


def _checked(effective: Effective[RunSettings], directory: Path, json: Path | None) -> int:
    # Late, so that --help answers at once.
    from .engine import RunError
    from .interrupt import Interrupt, Interrupted

    with Interrupt() as interrupt:
        try:
            if effective.print_config:
                _prepare(effective.settings, interrupt)
                print(effective.describe())
                return Exit.DONE
            return _run(effective.settings, directory, json, interrupt)
        except RunError as error:
            return _fail(error.code, str(error))
        except Interrupted as interrupted:
            return _fail(128 + interrupted.number, f"stopped by {interrupted}; no process is left")


def _run(settings: RunSettings, directory: Path, json: Path | None, interrupt: Interrupt) -> int:
    from rich.console import Console

    from .interrupt import Interrupted
    from .report import table_of

    console = Console()
    console.out(
        f"Preparing: checking {settings.compressor} and {settings.task}, compiling kernels", highlight=False
    )
    _prepare(settings, interrupt)
    console.out(f"Logs, report and plot: {directory}/", highlight=False)
    result, stopped = _train(settings, directory / "run", console, interrupt)
    baseline = None
    if stopped is None and settings.baseline and not _is_baseline(settings):
        plain = dataclasses.replace(settings, compressor="none", downlink="none")
        if _is_coded(settings):  # there is nothing compressed; what it competes with is the server's sum
            plain = dataclasses.replace(plain, mode="sync")
        try:
            baseline, stopped = _train(plain, directory / "baseline", console, interrupt)
        except Interrupted as interrupted:
            stopped = interrupted
        if stopped is not None:  # half a run is nothing to compare with
            baseline = None

    console.print(table_of(result, baseline))  # first: a full disk must not keep the figures from people
    try:
        _write(result, baseline, directory, json, console)
    except OSError as error:
        return _fail(Exit.INTERNAL, f"the report or the plot cannot be written: {error}")
    console.out(f"plot, report, parameters and logs: {directory}", highlight=False)
    if stopped is not None:
        unfinished = "" if result.finished else " before the job was done; this is what there is"
        return _fail(128 + stopped.number, f"stopped by {stopped}{unfinished}; no process is left")
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


def _prepare(settings: RunSettings, interrupt: Interrupt) -> None:
    """Raise `RunError` for a compressor or a task that no worker could use."""
    from .engine import RunError, run_to_end
    from .processes import Children

    with tempfile.TemporaryDirectory() as directory, Children(Path(directory)) as children:
        child = children.start(
            "prepare", "gradwire.deploy.prepare", [settings.compressor, settings.downlink, settings.task]
        )
        run_to_end(child, interrupt)
        if child.code in (Exit.USAGE, Exit.TASK):
            raise RunError(Exit(child.code), child.last_lines(1))
        if child.code != Exit.DONE:
            raise RunError(Exit.INTERNAL, f"the check ended: {child.ending}\n{child.last_lines()}")


def _train(
    settings: RunSettings, directory: Path, console: Console, interrupt: Interrupt
) -> tuple[Result, Stopped | Interrupted | None]:
    """What the run came to, and the signal if one came before it was done."""
    from .engine import Plan, Stopped, train
    from .progress import progress
    from .report import result_of

    with progress(console, settings.compressor, settings.workers) as watcher:
        try:
            status, stopped = train(Plan(settings=settings, directory=directory), watcher, interrupt), None
        except Stopped as caught:
            status, stopped = caught.status, caught
    return result_of(settings, status), stopped


def _is_coded(settings: RunSettings) -> bool:
    return registry.parse(settings.mode).work == "exchange"


def _is_baseline(settings: RunSettings) -> bool:
    return settings.compressor == "none" and settings.downlink == "none" and not _is_coded(settings)


def _fail(code: int, message: str) -> int:
    print(f"gc-run: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
