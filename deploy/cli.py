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
from ..common.configuration import Effective, UsageError, read
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
    from .engine import RunPlan
    from .live import LiveJob
    from .report import RunResult


@command
def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run gc-run with arguments and variables, by default those of the process; return the exit code."""
    environ = os.environ if environ is None else environ
    try:
        effective = adapted(
            read(
                RunSettings,
                COMMANDS,
                argv=sys.argv[1:] if argv is None else argv,
                environ=environ,
                parsers=SPECS,
                epilog=f"{registry.describe()}\n{presets.listed()}",
            )
        )
        presets.check(effective)
        if effective.settings.script:
            effective = for_script(effective, environ)
        settings = effective.settings
        check_together(settings)
        with run_directory(settings) as directory:
            json = json_path(settings)
            with Interrupt() as interrupt:
                if not effective.print_config:
                    if effective.foreign:
                        print(f"gc-run: {effective.foreign}", file=sys.stderr, flush=True)
                    if settings.preset:
                        print(f"gc-run: {presets.describe(effective)}", file=sys.stderr, flush=True)
                    return _run(effective, environ, directory, json, interrupt)
                _prepare(settings, interrupt)
                print(effective.describe())
                return Exit.DONE
    except UsageError as error:
        return _fail(Exit.USAGE, str(error))
    except RunError as error:
        return _fail(error.code, str(error))
    except Interrupted as interrupted:
        return _fail(interrupted.code, f"stopped by {interrupted}; no process is left")


def baseline_of(settings: RunSettings) -> RunSettings | None:
    """Return the settings of the uncompressed run to compare with; None if `settings` are uncompressed."""
    mode = registry.parse(settings.mode).baseline or settings.mode
    bare = dataclasses.replace(settings, preset="", downlink="none", entropy="off")
    plain = dataclasses.replace(bare, mode=mode, compressor="none")
    # With compressor none, downlink auto sends float32, so it equals none.
    return None if settings.downlink in ("auto", "none") and bare == plain else plain


def for_script(effective: Effective[RunSettings], environ: Mapping[str, str]) -> Effective[RunSettings]:
    """Return the options of a run of a script, which is compared only on request.

    Raises:
        UsageError: the command does not exist, or there is a task, too.
    """
    from .scripts import command_of

    settings = effective.settings
    if effective.chosen("task"):
        raise UsageError(f"--task {settings.task}: not with --script, which brings the model; leave one out")
    command_of(settings, environ)
    return (
        effective
        if effective.chosen("baseline")
        else effective.changed("because of --script", baseline=False)
    )


def _run(
    effective: Effective[RunSettings],
    environ: Mapping[str, str],
    directory: Path,
    json: Path | None,
    interrupt: Interrupt,
) -> int:
    """Train with the options and with those of the baseline, show and write the results, the report also to
    `json`; return the exit code."""
    from .console import Console  # late, like all slow imports, so that --help is fast
    from .engine import RunPlan
    from .plot import PlotError, write_plot
    from .report import table_of, to_json, write_atomically
    from .worth import remark

    console, settings = Console(), effective.settings
    fixed = settings.baseline or effective.chosen("compressor")  # no script may name another compressor
    what = f"{settings.compressor} and {settings.script or settings.task}"
    console.out(f"Preparing: checking {what}", highlight=False)
    for warning in _prepare(settings, interrupt):
        console.print(f"Warning: {warning}", style="yellow", highlight=False, markup=False)
    console.out(f"Logs, report and plot: {directory}/", highlight=False)
    plan = RunPlan(settings=settings, directory=directory / "run", environ=environ, compressor_fixed=fixed)
    result, job, stopped = _train(plan, console, interrupt)
    plain, baseline = baseline_of(settings), None
    if stopped is None and settings.baseline and plain is not None:
        try:
            plan = dataclasses.replace(plan, settings=plain, directory=directory / "baseline")
            baseline, _, stopped = _train(plan, console, interrupt)
        except (Interrupted, RunError) as error:
            stopped = error
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
    if isinstance(stopped, RunError):
        return _fail(stopped.code, str(stopped))
    if stopped is not None:
        unfinished = "" if result.finished else " before the job was done; the results are those so far"
        return _fail(stopped.code, f"stopped by {stopped}{unfinished}; no process is left")
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
                *(settings.compressor, settings.downlink),
                *("" if settings.script else settings.task, settings.optimizer),
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
    plan: RunPlan, console: Console, interrupt: Interrupt
) -> tuple[RunResult, LiveJob | None, Interrupted | RunError | None]:
    """Train once and show the progress. Return the result, the job as its server has measured it, and the
    signal or failure that ended the run early; None for too few measurements, and for none."""
    from .engine import train
    from .live import live_job_of
    from .progress import progress
    from .report import result_of
    from .scripts import with_own_compressor

    settings, stopped = plan.settings, None
    with progress(console, settings.compressor, settings.workers) as watcher:
        try:
            status = train(plan, watcher, interrupt)
        except (Interrupted, RunError) as caught:
            if caught.status is None:
                raise
            status, stopped = caught.status, caught
    if settings.script:
        settings = with_own_compressor(settings, status)
    return result_of(settings, status), live_job_of(status, workers=settings.workers), stopped


def _fail(code: int, message: str) -> int:
    """Print an error message of gc-run and return `code`."""
    print(f"gc-run: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
