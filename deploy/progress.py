"""Live progress of a run: a display on a terminal, log lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..proto.job import job_terms
from ..proto.messages import EpochStatus, StatusResponse
from .engine import Watcher
from .eta import duration, fraction, reached, seconds_left, when
from .report import ratio, size

WAITING_SECONDS = 5.0  # without a new version, before a line names the workers that the job waits for


def headline(status: StatusResponse) -> str:
    """Return text with the training loss and the last metrics; `starting` if none are known yet."""
    evaluation = max(status.evaluations, key=lambda one: one.epoch, default=None)
    parts = [training_loss(status)] if status.version else []
    if evaluation is not None:
        parts.append(metrics(evaluation))
    return "  ".join(parts) or "starting"


def training_loss(status: StatusResponse) -> str:
    """Return text with the training loss of the last round."""
    known = math.isfinite(status.train_loss)
    return f"training loss {status.train_loss:.4f}" if known else "training loss unknown"


def metrics(evaluation: EpochStatus) -> str:
    """Return text with the metrics of an evaluation: loss and accuracy first, the other metrics by name."""
    first = [name for name in ("loss", "accuracy") if name in evaluation.metrics]
    names = [*first, *sorted(evaluation.metrics.keys() - {*first})]
    return "  ".join(f"validation {name} {evaluation.metrics[name]:.4f}" for name in names)


def speed(status: StatusResponse) -> str:
    """Return text with the learning rate, the steps per second and the time left, as far as known."""
    rate = f"learning rate {status.learning_rate:.3g}" if status.learning_rate else ""
    unit = "rounds" if status.local_steps else "steps"
    steps = f"{1 / status.step_seconds:.3g} {unit}/s" if status.step_seconds else ""
    left = seconds_left(status)
    return "  ".join(filter(None, [rate, steps, f"{duration(left)} left" if left else ""]))


def traffic(status: StatusResponse) -> str:
    """Return text with the bytes on the wire in each direction, and their ratio to float32."""
    count = status.traffic
    return (
        f"up {size(count.wire_bytes_up)} ({ratio(count.raw_bytes_up, count.wire_bytes_up)})  "
        f"down {size(count.wire_bytes_down)} ({ratio(count.raw_bytes_down, count.wire_bytes_down)})"
    )


def members(status: StatusResponse, alive: int, workers: int) -> str:
    """Return text with the number of running workers and the server's reason for waiting, if it waits.

    Args:
        status: status of the server.
        alive: number of worker processes that run.
        workers: number of workers that were started.
    """
    text = f"workers {alive}/{workers}"
    return f"{text}  {status.waiting}" if status.waiting else text


class LiveProgress(Watcher):
    """A watcher that redraws one run's progress in place on a terminal."""

    def __init__(self, live: Live, label: str, workers: int) -> None:
        """Args:
        live: rich's display.
        label: name of the run, such as its compressor.
        workers: number of workers that were started.
        """
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
        """Args:
        console: receives the lines.
        label: name of the run, such as its compressor; begins each line.
        workers: number of workers that were started.
        clock: function that returns the time in seconds; tests replace it.
        """
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
                where = when(evaluation, job_terms(status.job))
                parts = (where, training_loss(status), metrics(evaluation), speed(status), traffic(status))
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
    """Yield a watcher that shows a run's progress: a live display on a terminal, lines elsewhere.

    Args:
        console: console that shows the progress.
        label: name of the run, such as its compressor.
        workers: number of workers that were started.
    """
    if console.is_terminal:
        with Live(Text(f"{label}: starting the server"), console=console, refresh_per_second=8) as live:
            yield LiveProgress(live, label, workers)
    else:
        yield LineProgress(console, label, workers)
