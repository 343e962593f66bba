"""The picture of a comparison: accuracy over epochs, and over the bytes that it took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import RunResult, heading

_COLORS = ("#1f6feb", "#8c959f")  # the run, the baseline


class PlotError(Exception):
    """No picture can be made; the message says what to do."""


def write_plot(path: Path, runs: Sequence[RunResult]) -> None:
    """Write a PNG with one curve per run (at most two) in each of two panels.

    Raises:
        PlotError: matplotlib is not installed.
    """
    titles = "Accuracy over epochs", "Accuracy over bytes"
    try:
        figure, (over_epochs, over_bytes) = panels(titles, sharey=True)
    except ImportError as error:
        raise PlotError(f"no plot, it needs matplotlib ({error}); pip install 'gradwire[run]'") from error
    for run, color in zip(runs, _COLORS, strict=False):
        points = [
            (epoch, count / 1e6, accuracy)
            for epoch, (count, accuracy) in enumerate(
                zip(run.bytes_by_epoch, run.accuracy_by_epoch, strict=True), start=1
            )
            if accuracy is not None
        ]
        epochs, megabytes, accuracies = zip(*points, strict=True) if points else ((), (), ())
        over_epochs.plot(epochs, accuracies, color=color, label=heading(run))
        over_bytes.plot(megabytes, accuracies, color=color, label=heading(run))
    over_epochs.set(xlabel="epoch", ylabel="validation accuracy")
    over_bytes.set(xlabel="MB on the wire, both directions")
    for axes in (over_epochs, over_bytes):
        axes.grid(alpha=0.25)
    over_epochs.legend(loc="lower right", frameon=False)
    figure.suptitle(f"{runs[0].task}: {runs[0].workers} workers, seed {runs[0].seed}")
    figure.savefig(path, dpi=150)


def panels(titles: Sequence[str], **shared: Any) -> tuple[Any, list[Any]]:
    """A matplotlib figure and its axes, side by side."""
    from matplotlib.figure import Figure

    # A Figure made by hand belongs to no window system: nothing here looks for a display.
    figure: Any = Figure(figsize=(5 * len(titles), 4), layout="constrained")
    found = figure.subplots(1, len(titles), squeeze=False, **shared)[0]
    for axes, title in zip(found, titles, strict=True):
        axes.set(title=title)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(found)
