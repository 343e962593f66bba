"""Measurements of the papers behind shaped links, as results for docs/papers. They need root."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...coded.arithmetic import UncodedTimes, fastest, possible, step_seconds
from .. import coded, output
from ..schemes import SCHEMES
from ..shaped import Setup
from ..star import check_network
from . import compressing, emulated, four_bit, local_steps, seamgs, to_target
from .result import Conditions, Panel, Result

WORKERS, QUICK_WORKERS = 4, 2  # three processes rather than five on two cores
MBIT, QUICK_MBIT = 500.0, 2000.0  # shorter exchanges, and so shorter emulated computation
CODED_MBIT, QUICK_NODES = 100.0, 3
Measured = Iterable[tuple[list[emulated.MethodRow], list[emulated.Method]]]


def of_methods(
    models: Sequence[str], measured: Callable[[Setup], Measured], *, steps: int, quick: bool
) -> Result:
    """Measure the methods of a paper on each model.

    Args:
        models: names of the models.
        measured: function from a setup to rows and methods, for each share.
        steps: number of measured steps.
        quick: whether to take fewer workers and wider links.
    """
    check_network()
    workers, mbit = (QUICK_WORKERS, QUICK_MBIT) if quick else (WORKERS, MBIT)
    rows: list[list[str]] = []
    told: list[str] = []
    panels: list[Panel] = []
    for model in models:
        setup = Setup(model=model, workers=workers, mbit=mbit, steps=steps)
        for found, methods in measured(setup):
            rows += [
                [str(cell) for cell in emulated.cells(*each)] for each in zip(found, methods, strict=True)
            ]
            title = f"{model}, {found[0].workers} workers"
            told.append(f"{title}: " + ", ".join(f"{row.method} {row.speedup:.2f}" for row in found))
            numbers = list(range(1, len(found) + 1))
            lines = {"ours": (numbers, [row.speedup for row in found])}
            known = [(number, row.paper[0]) for number, row in zip(numbers, found, strict=True) if row.paper]
            if known:
                lines["paper"] = [x for x, _ in known], [y for _, y in known]
            panels.append(Panel(title=title, x="row of the table", y="speed-up", lines=lines))
            for line in emulated.differences(found):
                output.say(line)
    return Result(
        settings=f"{workers} workers unless said, {mbit:g} Mbit/s, {steps} steps, emulated computation",
        ours="speed-ups of " + "; ".join(told),
        headings=emulated.HEADINGS,
        rows=rows,
        panels=panels,
    )


def sparse_fusion(conditions: Conditions) -> Result:
    """Repeat table 1 of the paper on sparse fusion."""
    models = ["resnet20"] if conditions.quick else [*seamgs.TABLE_1]
    return of_methods(
        models,
        lambda setup: seamgs.measured(setup, seamgs.SHARES),
        steps=4 if conditions.quick else 12,
        quick=conditions.quick,
    )


def speedups_of_4bit(conditions: Conditions) -> Result:
    """Repeat tables 2 and 3 of the 4-bit paper."""
    quick = conditions.quick
    nodes = [QUICK_WORKERS] if quick else four_bit.NODES
    shares = four_bit.SHARES[:1] if quick else four_bit.SHARES
    return of_methods(
        ["resnet56"] if quick else [four_bit.MODEL],
        lambda setup: four_bit.measured(setup, shares, nodes),
        steps=4 if quick else 12,
        quick=quick,
    )


def local(conditions: Conditions) -> Result:
    """Repeat figures 15 and 16 of the multi-step paper."""
    models = ["resnet20"] if conditions.quick else [*local_steps.TABLE_2]
    return of_methods(
        models,
        lambda setup: local_steps.measured(setup, None),
        steps=8 if conditions.quick else 12,
        quick=conditions.quick,
    )


def shares_of_compressing(conditions: Conditions) -> Result:
    """Repeat tables 3.5 and 4.5 of the thesis."""
    check_network()
    models = ["resnet56"] if conditions.quick else [*compressing.TABLE_3_5]
    steps = 3 if conditions.quick else 12
    workers, mbit = (QUICK_WORKERS, QUICK_MBIT) if conditions.quick else (WORKERS, MBIT)
    found = [
        row
        for model in models
        for row in compressing.measured(
            Setup(model=model, workers=workers, mbit=mbit, steps=steps), compressing.SHARE, compressing.RATIO
        )
    ]
    return Result(
        settings=f"ratio {compressing.RATIO}, {workers} workers, {mbit:g} Mbit/s, {steps} steps, "
        "emulated computation",
        ours=", ".join(f"{row.model} {row.name} {100 * row.share:.0f} %" for row in found),
        headings=compressing.HEADINGS,
        rows=[[str(cell) for cell in compressing.cells(row)] for row in found],
    )


def to_accuracies(conditions: Conditions) -> Result:
    """Repeat figure 2 of the paper on sparse fusion."""
    check_network()
    epochs, mbit = (5 if conditions.quick else 30), 1000.0
    workers = QUICK_WORKERS if conditions.quick else WORKERS
    task, seed_list = "digits", conditions.seeds
    found = list(to_target.measured(task=task, seeds=seed_list, workers=workers, epochs=epochs, mbit=mbit))
    seeds = ", ".join(map(str, conditions.seeds))
    rows = [[str(cell) for cell in to_target.cells(row, method)] for row, method in found]
    return Result(
        settings=f"`digits`, {workers} workers, {mbit:g} Mbit/s, {epochs} epochs, seeds {seeds}",
        ours=f"s to {to_target.TARGETS[0]:g}: " + ", ".join(f"{cells[0]} {cells[2]}" for cells in rows),
        headings=to_target.HEADINGS,
        rows=rows,
    )


# ---- the coded paper


def coded_bytes(conditions: Conditions) -> Result:
    """Repeat figures 9 and 11 of the coded paper: bytes of a step by scheme and redundancy."""
    check_network()
    rows: list[list[str]] = []
    lines: dict[str, tuple[list[float], list[float]]] = {}
    steps = 2 if conditions.quick else 4
    for nodes in [QUICK_NODES] if conditions.quick else [2, 4, 8]:
        for scheme in SCHEMES:
            for r in possible(nodes) if scheme == "coded" else [1]:
                row = coded.measure(
                    f"{scheme} {nodes} {r}",
                    f"coded:redundancy={r}",
                    workers=nodes,
                    seconds=0.0,
                    mbit=CODED_MBIT,
                    steps=steps,
                    scheme=scheme,
                )
                up, down = coded.formula(scheme, nodes, r)
                output.say(f"{row.name}: {row.blocks_up:.2f} up, {row.blocks_down:.2f} down")
                rows.append(
                    [
                        *(f"{nodes}", scheme, f"{r}", f"{row.blocks_up:.3f}", f"{up:.3f}"),
                        *(f"{row.blocks_down:.3f}", f"{down:.3f}"),
                    ]
                )
                if scheme == "coded":
                    xs, ys = lines.setdefault(f"CSSGD, {nodes} nodes", ([], []))
                    xs.append(r)
                    ys.append(row.blocks_up)
    return Result(
        settings=f"{coded.ELEMENTS:,} elements, {CODED_MBIT:g} Mbit/s, {steps} steps; in blocks' gradients",
        ours="sent with coding: " + ", ".join(f"r = {row[2]} {row[3]}" for row in rows if row[1] == "coded"),
        headings=("nodes", "exchange", "r", "sent", "paper's formula", "received", "formula"),
        rows=rows,
        panels=[Panel(title="Sent in a step", x="redundancy r", y="gradients of a block", lines=lines)],
    )


def redundancies(conditions: Conditions) -> Result:
    """Repeat figures 12 and 13 of the coded paper: seconds of a step by redundancy."""
    check_network()
    nodes, steps = (QUICK_NODES, 4) if conditions.quick else (8, 10)
    rows: list[list[str]] = []
    panels: list[Panel] = []
    told: list[str] = []
    for regime, slow in coded.REGIMES.items():
        seconds = slow / 4 if conditions.quick else slow
        taken = {
            r: coded.measure(
                regime,
                f"coded:redundancy={r}",
                workers=nodes,
                seconds=seconds,
                mbit=CODED_MBIT,
                steps=steps,
            ).step_seconds
            for r in possible(nodes)
        }
        times = UncodedTimes(seconds * coded.BATCH, taken[1] - seconds * coded.BATCH)
        model = {r: step_seconds(times, nodes, r) for r in taken}
        best = min(taken, key=lambda r: taken[r])
        told.append(f"{regime}: fastest at r = {best}, the model says {fastest(times, nodes)}")
        output.say(told[-1])
        rows += [[regime, f"{r}", f"{each:.3f}", f"{model[r]:.3f}"] for r, each in taken.items()]
        numbers = [float(r) for r in taken]
        lines = {"measured": (numbers, [*taken.values()]), "model, from r = 1": (numbers, [*model.values()])}
        panels.append(Panel(title=regime, x="redundancy r", y="seconds per step", lines=lines))
    return Result(
        settings=f"{nodes} nodes, {coded.ELEMENTS:,} elements, {CODED_MBIT:g} Mbit/s, {steps} steps",
        ours="; ".join(told),
        headings=("regime", "r", "seconds per step", "model"),
        rows=rows,
        panels=panels,
    )


def coded_times(conditions: Conditions) -> Result:
    """Repeat figures 8, 10, 14 and 15 of the coded paper: time to an accuracy of SSGD, ASGD and CSSGD."""
    check_network()
    nodes = [QUICK_NODES] if conditions.quick else [2, 4, 8]
    with tempfile.TemporaryDirectory() as folder:
        found = coded.accuracy_part(nodes, conditions.seeds[0], CODED_MBIT, Path(folder))
    products = [each["steps"] * each["step_seconds"] for each in found]
    by_name = {each["name"]: product for each, product in zip(found, products, strict=True)}
    saved = {name: 100 * (1 - by_name["CSSGD"] / by_name[name]) for name in (coded.SSGD_UNICAST, "ASGD")}
    return Result(
        settings=f"`digits`, {nodes} nodes, {CODED_MBIT:g} Mbit/s; steps to {coded.TARGET} × step",
        ours="time saved by CSSGD against "
        + ", ".join(f"{name} {each:.0f} %" for name, each in saved.items()),
        headings=("nodes", "", "r", "steps", "seconds per step", "product, s"),
        rows=[
            [
                *(f"{each['workers']}", each["name"], each["redundancy"], f"{each['steps']:.0f}"),
                *(f"{each['step_seconds']:.3f}", f"{product:.1f}"),
            ]
            for each, product in zip(found, products, strict=True)
        ],
    )
