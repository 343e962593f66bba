"""Figures 15 and 16 of the multi-step paper: an epoch's computing and communicating, and speed-ups over SSGD.

The paper: four nodes with a GPU each, VGG19 and ResNet-20 on CIFAR-100, ResNet-50 on a hundred classes of
ImageNet, batches of 64, 120 epochs, a learning rate that falls to a tenth every 30. The text on figure 16
gives its own method 3.81, 2.51 and 1.49; the times of table 2 give 3.99, 2.55 and 1.67, which come first.

What share of a step communication takes follows from its table 2, where Local SGD with H steps leaves an H-th
of it: about 0.76, 0.64 and 0.33. Nothing overlaps in SSGD and Local SGD here.

How many steps an adaptive round has depends on the loss and the learning rate. Both are emulated over a run
that stands for the paper's: four epochs, one for each of its learning rates, in which the loss falls by the
same factor in every step from that of guessing among a hundred classes to what table 2 ends with. A loss that
falls fast at first, as a real one does, makes shorter rounds at first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ..shaped import Setup
from .emulated import (
    Method,
    MethodRow,
    StepTimings,
    computation,
    exchange_seconds,
    measure,
    record,
    speedups,
    split,
    taken,
)

SSGD = "SSGD (H=1)"
ADAPTIVE = "adaptive, without correction"
CORRECTED = "adaptive"
METHODS = {
    SSGD: "sync",
    "Local SGD (H=8)": "local:steps=8,correction=0",
    "Local SGD (H=16)": "local:steps=16,correction=0",
    ADAPTIVE: "local:steps=adaptive,correction=0",
    CORRECTED: "local:steps=adaptive,correction=0.1",
}
# Ours: the exchange runs beside the next round's steps.
DELAYED = Method(name="Local SGD (H=8), delayed", mode="local:steps=8,correction=0,delayed=on")
# Seconds of the training, in the order of `METHODS`.
TABLE_2: Mapping[str, tuple[float, ...]] = {
    "vgg19-cifar": (5231, 1726, 1522, 1304, 1311),
    "resnet50": (40219, 17015, 16509, 15754, 15761),
    "resnet20": (2237, 1721, 1409, 1334, 1339),
}
FIGURE_16 = {"vgg19-cifar": 3.81, "resnet50": 2.51, "resnet20": 1.49}  # of the last
FINAL_LOSS = {"vgg19-cifar": 0.1261, "resnet50": 1.1910, "resnet20": 1.0318}  # of the last
CLASSES = 100
LARGEST_H = 16
STAGES = 4  # with a learning rate each


def share_of(model: str) -> float:
    """Return the share of communication in SSGD by table 2: the mean of what H = 8 and H = 16 save."""
    ssgd, *local = TABLE_2.get(model, TABLE_2["resnet50"])[:3]
    return fmean(
        (1 - seconds / ssgd) / (1 - 1 / steps) for seconds, steps in zip(local, (8, 16), strict=True)
    )


def methods(model: str) -> list[Method]:
    paper: dict[str, tuple[float, ...]] = dict.fromkeys(METHODS, ())
    if model in TABLE_2:
        of_table = speedups(dict(zip(METHODS, TABLE_2[model], strict=True)))
        paper = {name: (each,) for name, each in of_table.items()}
        paper[CORRECTED] += (FIGURE_16[model],)
    found = [
        # What overlaps in the paper's own method is whatever can overlap here.
        Method(name=name, paper=paper[name], mode=mode, overlap="both" if "adaptive" in mode else "off")
        for name, mode in METHODS.items()
    ]
    return [*found[:2], DELAYED, *found[2:]]


def measured(setup: Setup, shares: Sequence[float] | None) -> Iterator[tuple[list[MethodRow], list[Method]]]:
    """Yield rows and ways for each share, by default the paper's, on the model of the setup."""
    found = methods(setup.model)
    exchange = exchange_seconds(setup, found[0])
    for share in shares or [round(share_of(setup.model), 2)]:
        computing = replace(setup, seconds=computation(exchange, share))
        yield measure(computing, share, found, take), found


def take(setup: Setup, method: Method) -> StepTimings:
    """Run one way. In local mode a step is a local one, with its part of the round's exchange.

    A run has at least `setup.steps` counted steps, in whole rounds of the largest H, and one more round
    before and after them.
    """
    if method.mode == "sync":
        return taken(record(setup, method))
    rounds = max(STAGES, math.ceil(setup.steps / LARGEST_H))
    rounds += -(rounds + 2) % STAGES  # so that all stages are of whole rounds
    all_steps = (rounds + 2) * LARGEST_H
    final = FINAL_LOSS.get(setup.model, FINAL_LOSS["resnet50"]) / math.log(CLASSES)
    local = replace(
        setup,
        warm_up=LARGEST_H,
        steps=all_steps - LARGEST_H - 1,
        epochs=STAGES,
        schedule="step:every=1,gamma=0.1",
        loss=round(final ** (1 / all_steps), 9),
    )
    recorded = record(local, method)
    step_seconds, computing_seconds = split(recorded, LARGEST_H, all_steps - LARGEST_H)
    return replace(taken(recorded), step_seconds=step_seconds, computing_seconds=computing_seconds)
