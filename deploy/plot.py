"""The picture of a run and its baseline: a metric over epochs and over bytes, and the loss over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.naming import printable
from .report import RunResult, heading

_COLORS = ("#1f6feb", "#8c959f")  # the run, the baseline


class PlotError(Exception):
    """A picture cannot be drawn; the message names the remedy."""


def write_plot(path: Path, runs: Sequence[RunResult]) -> None:
    """Draw a PNG with one curve per run in each of three panels, and write it to `path`.

    Raises:
        PlotError: if matplotlib is not installed.
    """
    name = shown_metric(runs)
    titles = f"{name.capitalize()} over epochs", f"{name.capitalize()} over bytes", "Training loss over steps"
    try:
        figure, (over_epochs, over_bytes, losses) = panels(titles)
    except ImportError as error:
        raise PlotError(
            f"no plot: {error}; for matplotlib run pip install '.[run]' in a checkout of Gradwire"
        ) from error
    for run, color in zip(runs, _COLORS, strict=False):
        points = [
            (each.epochs, run.bytes_at(each.version) / 1e6, each.metrics[name])
            for each in run.evaluations
            if name in each.metrics
        ]
        epochs, megabytes, values = zip(*points, strict=True) if points else ((), (), ())
        over_epochs.plot(epochs, values, color=color, label=literal(heading(run)))
        over_bytes.plot(megabytes, values, color=color, label=literal(heading(run)))
        versions, training = zip(*run.losses, strict=True) if run.losses else ((), ())
        losses.plot(versions, training, color=color, label=literal(heading(run)))
    over_epochs.set(xlabel="epoch", ylabel=literal(f"{runs[0].metrics_kind} {name}"))
    over_bytes.set(xlabel="MB on the wire, both directions", ylim=over_epochs.get_ylim())
    losses.set(xlabel="step", ylabel="training loss")
    for axes in (over_epochs, over_bytes, losses):
        axes.grid(alpha=0.25)
    over_epochs.legend(loc="best", frameon=False)
    figure.suptitle(literal(f"{runs[0].task}: {runs[0].workers} workers, seed {runs[0].seed}"))
    figure.savefig(path, dpi=150)


def shown_metric(runs: Sequence[RunResult]) -> str:
    """Return the name of the metric to plot: `accuracy` if it is reported, else `loss`, else the first."""
    names = sorted({name for run in runs for each in run.evaluations for name in each.metrics})
    return next((name for name in ("accuracy", "loss", *names) if name in names), "accuracy")


def literal(text: str) -> str:
    """Return text escaped for matplotlib, which would read text between two dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def panels(titles: Sequence[str], **shared: Any) -> tuple[Any, list[Any]]:
    """Make a matplotlib figure with one panel for each title, side by side; return it and the axes of each.

    `shared` are further arguments of `Figure.subplots`, such as `sharey`.
    """
    from matplotlib.figure import Figure

    # Not through pyplot, which would look for a display.
    figure: Any = Figure(figsize=(5 * len(titles), 4), layout="constrained")
    found = figure.subplots(1, len(titles), squeeze=False, **shared)[0]
    for axes, title in zip(found, titles, strict=True):
        axes.set(title=literal(title))
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(found)
