"""Tables of predictions, as gc-plan prints them for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from ..planning.job import JobProfile
from ..planning.predictions import Prediction
from .console import Console, add_row, table
from .plan_losses import Losses

WIDTH = 156  # columns of a table that is not printed to a terminal
FEW = 2  # compressors shown for each mode but sync
CAPTION = "MB: per step, on the server's link; of DDP on each rank's"
LOSS = "; loss with {}, against no compression"
TIMES = ("s per step", "MB up", "MB down")


def show(
    model: str,
    profile: JobProfile,
    ranked: Sequence[Prediction],
    chosen: Prediction,
    presets: Mapping[str, Prediction],
    losses: Losses,
) -> None:
    """Print the fastest options of each compressor and mode, all options of the recommended compressor and
    mode, and the presets.

    Args:
        model: name of the model or task.
        profile: the job.
        ranked: all predictions, the fastest first.
        chosen: the recommended prediction, printed in bold.
        presets: prediction of each preset by its name; empty to leave them out.
        losses: losses of the compressors with the job's optimizer.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    title = (
        f"{model}: {sum(profile.elements):,} parameters, {profile.workers} workers, "
        f"computation {profile.computation_s:.3g} s"
    )
    console.print(_table(title, best_few(ranked), chosen, losses))
    choice = chosen.choice
    ours = [
        each
        for each in ranked
        if each.choice.compressor == choice.compressor and each.choice.mode == choice.mode
    ]
    if len(ours) > 1:
        console.print(_table(f"{choice.compressor}, {choice.mode}", ours, chosen))
    if presets:
        rows = table("presets", ("preset",), TIMES, caption=CAPTION)
        for name, each in presets.items():
            add_row(rows, name, *_times(each))
        console.print(rows)


def best_few(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest prediction of each compressor and mode, from predictions of which the fastest is
    first. Of other modes with a server only the `FEW` fastest compressors are included.
    """
    found: list[Prediction] = []
    seen: dict[str, set[str]] = {}
    for each in ranked:
        mode = each.choice.mode
        mode = mode if mode.startswith("sync") else mode.partition(":")[0]
        compressors = seen.setdefault(mode, set())
        name = each.choice.compressor.name
        many = mode == "sync" or each.choice.without_server
        if name not in compressors and (many or len(compressors) < FEW):
            compressors.add(name)
            found.append(each)
    return found


def _table(
    title: str,
    rows: Sequence[Prediction],
    chosen: Prediction,
    losses: Losses | None = None,
) -> Table:
    """Make a table with a row for each prediction, with a column of `losses` if there are any; the row of
    `chosen` is bold."""
    options = ("compressor", "mode", "overlap", "fusion", "order")
    texts = ("takes longest",) if losses is None else ("takes longest", "loss")
    task = "" if losses is None else LOSS.format("Adam, a small GPT" if losses.with_adam else "SGD, digits")
    found = table(title, options, TIMES, texts, caption=CAPTION + task)
    for each in rows:
        choice = each.choice
        add_row(
            found,
            *(choice.compressor.name, choice.mode, choice.overlap, choice.fusion, choice.order),
            *_times(each),
            each.bottleneck,
            *([] if losses is None else [losses.text(each)]),
            style="bold" if each is chosen else None,
        )
    return found


def _times(each: Prediction) -> list[str]:
    """Return the cells of the columns `TIMES`."""
    return [f"{each.step_s:.4g}", f"{each.up_bytes / 1e6:.4g}", f"{each.down_bytes / 1e6:.4g}"]
