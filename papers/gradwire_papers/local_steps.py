"""Figures 15 and 16 of the multi-step paper: computing and communicating of an epoch, and speed-ups over
SSGD.

The paper: four nodes with a GPU each, VGG19 and ResNet-20 on CIFAR-100, ResNet-50 on a hundred classes of
ImageNet, batches of 64, 120 epochs, a learning rate that falls to a tenth every 30. The text on figure 16
gives its own method speed-ups of 3.81, 2.51 and 1.49; the times of table 2 give 3.99, 2.55 and 1.67, which
come first in our rows. Errata: the same run differs by 5 s between its tables 2 and 3 (1311 and 1316,
15761 and 15766). The rows of ResNet-20 in table 3 repeat those of Local SGD in table 2.

The share of communication in a step follows from its table 2, where Local SGD with H steps keeps an H-th of
it: about 0.76, 0.64 and 0.33. Nothing overlaps in SSGD and Local SGD here. The paper's own method overlaps
the exchange with the last local step and the next first one (`--overlap both`); it is measured without
overlap too. `delayed` is another method, CoCoD-SGD, whose rounds are stale by one.

The number of steps in an adaptive round depends on the loss and the learning rate. Both are emulated over a
run that stands for the paper's: four epochs, one for each of its learning rates. In every step the loss falls
by the same factor, from the loss of guessing among a hundred classes to the final one in table 2. A real loss
falls faster at first, which makes shorter rounds at first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from gradwire.benchmarks import Setup
from gradwire.planning import tensors

from .emulated import (
    MBIT,
    WORKERS,
    Method,
    MethodRow,
    StepTimings,
    computation,
    exchange_seconds,
    measure,
    of_methods,
    record,
    speedups,
    split,
    timings_of,
)
from .result import Conditions, Result

PARTS, LEAST_PART_BYTES = 32, 1 << 18  # of a model whose exchange overlaps
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
# A method that is not the paper's: the exchange runs beside the next round's steps.
DELAYED = Method(name="Local SGD (H=8), delayed", mode="local:steps=8,correction=0,delayed=on")
# Seconds of the training, in the order of `METHODS`.
TABLE_2: Mapping[str, tuple[float, ...]] = {
    "vgg19-cifar": (5231, 1726, 1522, 1304, 1311),
    "resnet50": (40219, 17015, 16509, 15754, 15761),
    "resnet20": (2237, 1721, 1409, 1334, 1339),
}
# Speed-up and final loss of the last method, by model.
FIGURE_16 = {"vgg19-cifar": 3.81, "resnet50": 2.51, "resnet20": 1.49}
FINAL_LOSS = {"vgg19-cifar": 0.1261, "resnet50": 1.1910, "resnet20": 1.0318}
CLASSES = 100
LARGEST_H = 16
STAGES = 4  # epochs, with a learning rate each


def share_of(model: str) -> float:
    """Return the mean share of communication in a step of SSGD that the paper's table 2 implies.

    One share follows from the time with H = 8, the other from the time with H = 16.
    """
    ssgd, *local = TABLE_2.get(model, TABLE_2["resnet50"])[:3]
    return fmean(
        (1 - seconds / ssgd) / (1 - 1 / steps) for seconds, steps in zip(local, (8, 16), strict=True)
    )


def methods(model: str) -> list[Method]:
    """Return the methods, with the paper's speed-ups if the paper has the model."""
    paper: dict[str, tuple[float, ...]] = dict.fromkeys(METHODS, ())
    if model in TABLE_2:
        of_table = speedups(dict(zip(METHODS, TABLE_2[model], strict=True)))
        paper = {name: (each,) for name, each in of_table.items()}
        paper[CORRECTED] += (FIGURE_16[model],)
    # A model below the default size of a part would be one part, which can overlap with nothing.
    whole_bytes = 4 * sum(tensor.elements for tensor in tensors(model))
    fusion = f"bytes={max(LEAST_PART_BYTES, whole_bytes // PARTS)}"
    overlapped = Method(
        name="Local SGD (H=8), overlapped",
        mode="local:steps=8,correction=0",
        overlap="both",
        fusion=fusion,
    )
    found: list[Method] = []
    for name, mode in METHODS.items():
        if "adaptive" in mode:
            found.append(Method(name=f"{name}, nothing overlaps", mode=mode))
        method = Method(name=name, paper=paper[name], mode=mode)
        # The paper's own method overlaps communication.
        found.append(replace(method, overlap="both", fusion=fusion) if "adaptive" in mode else method)
    return [*found[:2], overlapped, DELAYED, *found[2:]]


def measured(
    conditions: Conditions,
    *,
    models: Sequence[str],
    steps: int,
    shares: Sequence[float] = (),
    workers: int = WORKERS,
    mbit: float = MBIT,
) -> Result:
    """Repeat figures 15 and 16 of the paper. Without `shares` the paper's count. Arguments as for
    `of_methods`."""

    def of(setup: Setup) -> Iterator[tuple[list[MethodRow], list[Method]]]:
        found = methods(setup.model)
        exchange = exchange_seconds(setup, found[0])
        for share in shares or [round(share_of(setup.model), 2)]:
            yield measure(replace(setup, seconds=computation(exchange, share)), share, found, take), found

    return of_methods(models, of, steps=steps, workers=workers, mbit=mbit)


def take(setup: Setup, method: Method) -> StepTimings:
    """Train with one method and return its timings.

    In local mode, a step is a local one, with its part of the exchange. The run has at least `setup.steps`
    counted steps, in whole rounds of the largest H, and one more round before and after them.
    """
    if method.mode == "sync":
        return timings_of(record(setup, method))
    rounds = max(STAGES, math.ceil(setup.steps / LARGEST_H))
    rounds += -(rounds + 2) % STAGES  # every stage has a whole number of rounds
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
    return replace(timings_of(recorded), step_seconds=step_seconds, computing_seconds=computing_seconds)
