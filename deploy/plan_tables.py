"""Output of gc-plan for people: tables of predictions, and a picture of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..planning.job import JobProfile
from ..planning.predictions import Prediction
from .console import Console
from .plan_presets import Measured
from .plot import panels

WIDTH = 120  # columns of a table that is not printed to a terminal
FEW = 2  # compressors shown for each mode but sync
LANES = ("computing", "network", "up", "loop", "server", "down")  # rows of the picture, from the top
_COLORS = {
    **{"backward": "#1f6feb", "compress": "#8250df", "apply": "#bf8700", "forward": "#54aeff"},
    **{"up": "#2da44e", "sum": "#cf222e", "down": "#4ac26b"},
    **{"send": "#6e7781", "receive": "#6e7781", "hand": "#afb8c1", "take": "#afb8c1"},
}


def show(model: str, profile: JobProfile, ranked: Sequence[Prediction], chosen: Prediction) -> None:
    """Print tables of predictions: the fastest options of each compressor and mode, then a second table.

    The second table has all options of the recommended compressor and mode.

    Args:
        model: name of the model or task.
        profile: the job.
        ranked: all predictions, the fastest first.
        chosen: the recommended prediction, printed in bold.
    """
    console = _console()
    title = (
        f"{model}: {sum(profile.elements):,} parameters, {profile.workers} workers, "
        f"computation {profile.computation_s:.3g} s"
    )
    console.print(_table(title, best_few(ranked), chosen))
    ours = [
        each
        for each in ranked
        if each.choice.compressor == chosen.choice.compressor and each.choice.mode == chosen.choice.mode
    ]
    if len(ours) > 1:
        console.print(_table(f"{chosen.choice.compressor}, {chosen.choice.mode}", ours, chosen))


def show_presets(ranked: Mapping[str, Prediction], results: Sequence[Measured]) -> None:
    """Print the table of presets, and a line for each measured loss.

    Args:
        ranked: predicted step by the preset's name, the fastest first.
        results: measured losses, each in a line of its preset's row.
    """
    console = _console()
    table = Table(title="presets", caption="MB: per step, on the link of the busiest server; *: see below")
    table.add_column("preset", no_wrap=True)
    for name in ("s per step", "MB up", "MB down", "loss, measured"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of which kind of model")
    for name, each in ranked.items():
        ours = [result for result in results if result.preset == name]
        losses = "\n".join(
            f"{result.loss_percent:+.1f} %{'*' if result.conditions else ''}" for result in ours
        )
        table.add_row(
            *(
                name,
                f"{each.step_s:.4g}",
                f"{each.up_bytes / 1e6:.4g}",
                f"{each.down_bytes / 1e6:.4g}",
                losses or "not measured",
            ),
            Text(
                "\n".join(
                    f"{result.model}, {result.parameters:,}; {result.workers} workers" for result in ours
                )
            ),
        )
    console.print(table)
    for result in results:
        console.print(str(result), highlight=False, markup=False)


def _console() -> Console:
    """Return the console to print tables on, `WIDTH` columns wide unless it is a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def best_few(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest prediction of each compressor and mode.

    Of modes other than sync, only the `FEW` fastest compressors are included.

    Args:
        ranked: all predictions, the fastest first.
    """
    found: list[Prediction] = []
    seen: dict[str, set[str]] = {}
    for each in ranked:
        mode = each.choice.mode
        mode = mode if mode.startswith("sync") else mode.partition(":")[0]
        compressors = seen.setdefault(mode, set())
        name = each.choice.compressor.name
        if name not in compressors and (mode == "sync" or len(compressors) < FEW):
            compressors.add(name)
            found.append(each)
    return found


def _table(title: str, rows: Sequence[Prediction], chosen: Prediction) -> Table:
    """Make a table with a row for each prediction; the row of `chosen` is bold."""
    # Text, because rich would read brackets in the name of a model or compressor as markup.
    table = Table(
        title=Text(title, style="table.title"), caption="MB: per step, on the link of the busiest server"
    )
    for name in ("compressor", "mode", "overlap", "fusion", "order"):
        table.add_column(name, no_wrap=True)
    for name in ("s per step", "MB up", "MB down"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("takes longest", no_wrap=True)
    for each in rows:
        choice = each.choice
        table.add_row(
            *map(Text, (choice.compressor.name, choice.mode, choice.overlap, choice.fusion, choice.order)),
            *(f"{each.step_s:.4g}", f"{each.up_bytes / 1e6:.4g}", f"{each.down_bytes / 1e6:.4g}"),
            each.bottleneck,
            style="bold" if each is chosen else None,
        )
    return table


def draw(path: Path, model: str, prediction: Prediction) -> None:
    """Draw a Gantt chart of a predicted step and write it as PNG to `path`. Needs matplotlib.

    Args:
        path: file to write.
        model: name of the model or task, for the title.
        prediction: prediction of the step.
    """
    choice = prediction.choice
    figure, (axes,) = panels([f"{model}: {choice.compressor}, {choice.overlap}, {prediction.step_s:.3g} s"])
    figure.set_size_inches(10, 3.5)
    spans = prediction.timeline.spans if prediction.timeline else ()
    for what, color in _COLORS.items():
        for lane in LANES:
            bars = [
                (span.start_s, span.end_s - span.start_s)
                for span in spans
                if span.kind == what and span.lane == lane
            ]
            if bars:
                place = LANES[::-1].index(lane)
                axes.broken_barh(
                    bars, (place - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.3, label=what
                )
    axes.set(yticks=range(len(LANES)), yticklabels=LANES[::-1], xlabel="seconds", xlim=(0, prediction.step_s))
    axes.legend(frameon=False, ncols=len(_COLORS), loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.savefig(path, dpi=150)
