"""Bytes and times of the paper on coded exchanges, by `gc-bench coded`'s measurements."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from gradwire.benchmarks import check_network, coded, say
from gradwire.coded.arithmetic import UncodedTimes, fastest, possible, step_seconds

from .result import Conditions, Panel, Result

MBIT = 100.0
SCHEMES = ("coded", "uncoded", "unicast", "multicast", "summed")


def exchanged(conditions: Conditions, *, nodes: Sequence[int], steps: int, mbit: float = MBIT) -> Result:
    """Repeat figures 9 and 11: bytes of a step by scheme and redundancy, with each number of `nodes`."""
    check_network()
    rows: list[list[str]] = []
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for workers in nodes:
        for scheme in SCHEMES:
            for r in possible(workers) if scheme == "coded" else [1]:
                row = coded.measure(
                    f"{scheme} {workers} {r}",
                    f"coded:redundancy={r}",
                    workers=workers,
                    seconds=0.0,
                    mbit=mbit,
                    steps=steps,
                    scheme=scheme,
                )
                up, down = coded.formula(scheme, workers, r)
                say(f"{row.name}: {row.blocks_up:.2f} up, {row.blocks_down:.2f} down")
                rows.append(
                    [
                        *(f"{workers}", scheme, f"{r}", f"{row.blocks_up:.3f}", f"{up:.3f}"),
                        *(f"{row.blocks_down:.3f}", f"{down:.3f}"),
                    ]
                )
                if scheme == "coded":
                    xs, ys = lines.setdefault(f"CSSGD, {workers} nodes", ([], []))
                    xs.append(r)
                    ys.append(row.blocks_up)
    return Result(
        settings=f"{coded.ELEMENTS:,} elements, {mbit:g} Mbit/s, {steps} steps; in blocks' gradients",
        ours="sent with coding: " + ", ".join(f"r = {row[2]} {row[3]}" for row in rows if row[1] == "coded"),
        headings=("nodes", "exchange", "r", "sent", "paper's formula", "received", "formula"),
        rows=rows,
        panels=[Panel(title="Sent in a step", x="redundancy r", y="gradients of a block", lines=lines)],
    )


def redundancies(
    conditions: Conditions, *, workers: int, steps: int, mbit: float = MBIT, faster: float = 1.0
) -> Result:
    """Repeat figures 12 and 13: seconds of a step by redundancy. `faster` divides the computation."""
    check_network()
    rows: list[list[str]] = []
    panels: list[Panel] = []
    told: list[str] = []
    for regime, slow in coded.REGIMES.items():
        seconds = slow / faster
        taken = {
            r: coded.measure(
                regime,
                f"coded:redundancy={r}",
                workers=workers,
                seconds=seconds,
                mbit=mbit,
                steps=steps,
            ).step_seconds
            for r in possible(workers)
        }
        times = UncodedTimes(seconds * coded.BATCH, taken[1] - seconds * coded.BATCH)
        model = {r: step_seconds(times, workers, r) for r in taken}
        best = min(taken, key=lambda r: taken[r])
        told.append(f"{regime}: fastest at r = {best}, the model says {fastest(times, workers)}")
        say(told[-1])
        rows += [[regime, f"{r}", f"{each:.3f}", f"{model[r]:.3f}"] for r, each in taken.items()]
        numbers = [float(r) for r in taken]
        lines = {"measured": (numbers, [*taken.values()]), "model, from r = 1": (numbers, [*model.values()])}
        panels.append(Panel(title=regime, x="redundancy r", y="seconds per step", lines=lines))
    return Result(
        settings=f"{workers} nodes, {coded.ELEMENTS:,} elements, {mbit:g} Mbit/s, {steps} steps",
        ours="; ".join(told),
        headings=("regime", "r", "seconds per step", "model"),
        rows=rows,
        panels=panels,
    )


def times(conditions: Conditions, *, nodes: Sequence[int], mbit: float = MBIT) -> Result:
    """Repeat figures 8, 10, 14 and 15: time to an accuracy of SSGD, ASGD and CSSGD, with the first seed."""
    check_network()
    with tempfile.TemporaryDirectory() as folder:
        found = coded.accuracy_part(nodes, conditions.seeds[0], mbit, Path(folder))
    products = [each["steps"] * each["step_seconds"] for each in found]
    by_name = {each["name"]: product for each, product in zip(found, products, strict=True)}
    saved = {name: 100 * (1 - by_name["CSSGD"] / by_name[name]) for name in (coded.SSGD_UNICAST, "ASGD")}
    return Result(
        settings=f"`digits`, {nodes} nodes, {mbit:g} Mbit/s; steps to {coded.TARGET} × step",
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
