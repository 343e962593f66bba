"""Live progress of a run: a display on a terminal, log lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..proto.job import job_terms
from ..proto.messages import StatusResponse
from ..proto.status import fraction
from .engine import Watcher
from .texts import members, metrics, reached, speed, traffic, training_loss, when

WAITING_SECONDS = 5.0  # without a new version, before a line names the workers that the job waits for


def headline(status: StatusResponse) -> str:
    """Return text with the training loss and the last metrics; `starting` if none are known yet."""
    evaluation = max(status.evaluations, key=lambda one: one.epoch, default=None)
    parts = [training_loss(status)] if status.version else []
    if evaluation is not None:
        parts.append(metrics(evaluation, job_terms(status.job)))
    return "  ".join(parts) or "starting"


class LiveProgress(Watcher):
    """A watcher that redraws one run's progress in place on a terminal."""

    def __init__(self, live: Live, label: str, workers: int) -> None:
        self._live = live
        self._label = label
        self._workers = workers

    def update(self, status: StatusResponse, alive: int) -> None:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self._label, style="bold"),
            ProgressBar(total=1, completed=fraction(status) or 0.0, width=40),
            reached(job_terms(status.job), status.epoch, status.version),
        )
        lines = headline(status), speed(status), traffic(status), members(status, alive, self._workers)
        self._live.update(Group(bar, *(Text(f"  {line}") for line in lines if line)))

    def note(self, text: str) -> None:
        self._live.console.print(Text(text, style="yellow"))


class LineProgress(Watcher):
    """A watcher that prints a line per evaluation, and lines that name the workers that the job waits for."""

    def __init__(
        self, console: Console, label: str, workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._label = label
        self._workers = workers
        self._clock = clock
        self._epoch = 0
        self._state: tuple[int, int] | None = None  # phase and version
        self._next_waiting = 0.0  # time of the next line about waiting; the interval doubles
        self._wait = WAITING_SECONDS

    def update(self, status: StatusResponse, alive: int) -> None:
        for evaluation in sorted(status.evaluations, key=lambda one: one.epoch):
            if evaluation.epoch > self._epoch:
                self._epoch = evaluation.epoch
                job = job_terms(status.job)
                where, logged = when(evaluation, job), metrics(evaluation, job)
                parts = (where, training_loss(status), logged, speed(status), traffic(status))
                self.note("  ".join(filter(None, parts)))
        now, state = self._clock(), (int(status.phase), status.version)
        if state != self._state:
            self._state, self._wait = state, WAITING_SECONDS
            self._next_waiting = now + self._wait
        if status.waiting and now >= self._next_waiting:
            self.note(members(status, alive, self._workers))
            self._wait *= 2
            self._next_waiting = now + self._wait

    def note(self, text: str) -> None:
        # Console.print would wrap long lines.
        self._console.out(f"{self._label}: {text}", highlight=False)


@contextlib.contextmanager
def progress(console: Console, label: str, workers: int) -> Generator[Watcher]:
    """Yield a watcher that shows the progress of a run, which `label` names: a live display on a terminal,
    lines elsewhere."""
    if console.is_terminal:
        with Live(Text(f"{label}: starting the server"), console=console, refresh_per_second=8) as live:
            yield LiveProgress(live, label, workers)
    else:
        yield LineProgress(console, label, workers)
