"""gc-run: train on this machine with a server and workers, and compare with an uncompressed run."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..common import presets
from ..common.configuration import UsageError, read
from ..common.exits import Exit, command
from ..server.checks import SPECS, adapted
from ..server.job.modes import registry
from ..settings import COMMANDS, RunSettings
from .daemons import check_together
from .interrupt import Interrupt, Interrupted
from .paths import json_path, run_directory
from .processes import PROGRESS, WARNING, Child, Children, RunError

if TYPE_CHECKING:
    from .console import Console
    from .live import LiveJob
    from .report import RunResult


@command
def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run gc-run with arguments and variables, by default those of the process; return the exit code."""
    try:
        effective = adapted(
            read(
                RunSettings,
                COMMANDS,
                argv=sys.argv[1:] if argv is None else argv,
                environ=os.environ if environ is None else environ,
                parsers=SPECS,
                epilog=f"{registry.describe()}\n{presets.listed()}",
            )
        )
        settings = effective.settings
        presets.check(effective)
        check_together(settings)
        with run_directory(settings) as directory:
            json = json_path(settings)
            with Interrupt() as interrupt:
                if not effective.print_config:
                    if effective.foreign:
                        print(f"gc-run: {effective.foreign}", file=sys.stderr, flush=True)
                    if settings.preset:
                        print(f"gc-run: {presets.describe(effective)}", file=sys.stderr, flush=True)
                    return _run(settings, directory, json, interrupt)
                _prepare(settings, interrupt)
                print(effective.describe())
                return Exit.DONE
    except UsageError as error:
        return _fail(Exit.USAGE, str(error))
    except RunError as error:
        return _fail(error.code, str(error))
    except Interrupted as interrupted:
        return _fail(128 + interrupted.number, f"stopped by {interrupted}; no process is left")


def baseline_of(settings: RunSettings) -> RunSettings | None:
    """Return the settings of the uncompressed run to compare with; None if `settings` are uncompressed."""
    mode = registry.parse(settings.mode).baseline or settings.mode
    plain = dataclasses.replace(settings, preset="", mode=mode, compressor="none", downlink="none")
    # With compressor none, downlink auto sends float32, so it equals none.
    same = (
        settings.downlink in ("auto", "none")
        and dataclasses.replace(settings, preset="", downlink="none") == plain
    )
    return None if same else plain


def _run(settings: RunSettings, directory: Path, json: Path | None, interrupt: Interrupt) -> int:
    """Train with `settings` and with those of the baseline, show and write the results, the report also to
    `json`; return the exit code."""
    from .console import Console  # late, like all slow imports, so that --help is fast
    from .plot import PlotError, write_plot
    from .report import table_of, to_json, write_atomically
    from .worth import remark

    console = Console()
    what = f"{settings.compressor} and {settings.task}"
    console.out(f"Preparing: checking {what}", highlight=False)
    for warning in _prepare(settings, interrupt):
        console.print(f"Warning: {warning}", style="yellow", highlight=False, markup=False)
    console.out(f"Logs, report and plot: {directory}/", highlight=False)
    result, job, stopped = _train(settings, directory / "run", console, interrupt)
    plain, baseline = baseline_of(settings), None
    if stopped is None and settings.baseline and plain is not None:
        try:
            baseline, _, stopped = _train(plain, directory / "baseline", console, interrupt)
        except Interrupted as interrupted:
            stopped = interrupted
        if stopped is not None:  # an unfinished baseline is not comparable
            baseline = None

    # Files first: an output that fails must not cost the results of the training.
    failure: Exception | None = None
    try:
        report = to_json(result, baseline)
        for path in filter(None, (directory / "report.json", json)):
            write_atomically(path, report)
        write_plot(directory / "plot.png", [result, baseline] if baseline is not None else [result])
    except (PlotError, OSError) as error:
        failure = error
    console.print(table_of(result, baseline))
    if said := remark(result, baseline, job):
        console.print(said, highlight=False, markup=False)
    if isinstance(failure, PlotError):
        console.out(failure, highlight=False)
    elif failure is not None:
        return _fail(Exit.INTERNAL, f"the report or the plot cannot be written: {failure}")
    console.out(f"plot, report, parameters and logs: {directory}", highlight=False)
    if stopped is not None:
        unfinished = "" if result.finished else " before the job was done; the results are those so far"
        return _fail(128 + stopped.number, f"stopped by {stopped}{unfinished}; no process is left")
    return Exit.DONE


def _lines(child: Child, prefix: str) -> list[str]:
    """Return the complete lines of a process's log that begin with `prefix`, without the prefix."""
    lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    whole = (line for line in lines if line.startswith(prefix) and line[-1] == "\n")
    return [line.removeprefix(prefix).rstrip() for line in whole]


def _prepare(settings: RunSettings, interrupt: Interrupt) -> list[str]:
    """Check compressor and task in a process of their own, showing its progress; return its warnings.

    Raises:
        RunError: if no worker could use the compressor or the task.
    """
    with tempfile.TemporaryDirectory() as directory, Children(Path(directory)) as children:
        child = children.start(
            "prepare",
            "gradwire.deploy.prepare",
            [
                *(settings.compressor, settings.downlink, settings.task, settings.optimizer),
                registry.parse(settings.mode).work,
            ],
        )
        shown = 0
        while child.code is None:
            interrupt.pause(0.05)
            lines = _lines(child, PROGRESS)
            for line in lines[shown:]:
                print(f"Preparing: {line}", file=sys.stderr, flush=True)
            shown = len(lines)
        if child.code in (Exit.USAGE, Exit.TASK):
            raise RunError(Exit(child.code), child.last_lines(1))
        if child.code != Exit.DONE:
            raise RunError(Exit.INTERNAL, f"the check failed: {child.ending}\n{child.last_lines()}")
        return _lines(child, WARNING)


def _train(
    settings: RunSettings, directory: Path, console: Console, interrupt: Interrupt
) -> tuple[RunResult, LiveJob | None, Interrupted | None]:
    """Train once and show the progress. Return the result, the job as its server has measured it, and the
    signal that stopped the run early; None for too few measurements, and for no signal."""
    from .engine import RunPlan, train
    from .live import live_job_of
    from .progress import progress
    from .report import result_of

    stopped = None
    with progress(console, settings.compressor, settings.workers) as watcher:
        try:
            status = train(RunPlan(settings=settings, directory=directory), watcher, interrupt)
        except Interrupted as caught:
            if caught.status is None:
                raise
            status, stopped = caught.status, caught
    return result_of(settings, status), live_job_of(status, workers=settings.workers), stopped


def _fail(code: int, message: str) -> int:
    """Print an error message of gc-run and return `code`."""
    print(f"gc-run: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
