"""`gc-bench lowrank`: validation loss after equal steps, of `lowrank` beside PowerSGD with float32 factors.

One process computes the gradients of all workers and their mean, after compression with error feedback, and
takes one optimizer's step for all, as the server would; updates are not compressed. Runs with the same seed
share initial parameters and sample order. The bytes are those of one worker's push.

PowerSGD is the algorithm of torch's hook: M = gradient + residual, P = orth(mean M Q), Q = mean M^T P, and
the residual M - P Q^T. It needs two exchanges, one after the other. Vectors, and matrices where it does not
pay, are exchanged in float32.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..compressors import (
    Bases,
    LayerRule,
    ModelCompressor,
    Payload,
    ProjectedPayload,
    TensorSpec,
    create,
    reduce_payloads,
    sum_coordinates,
    wire_bytes,
)
from ..worker.tasks import load
from . import output
from .arguments import at_least_one, json_option, option
from .estimates import estimate, seed_list

POWER_SGD = "powersgd:"
Gradients = list[list[torch.Tensor]]  # by worker and tensor


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A task with its optimizer, as torch's, and the samples of a worker in a step.

    warm_up: number of steps over which the rate grows, before half a cosine brings it to 0 at the end of the
    run; 0 for a constant rate.
    """

    task: str
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: int
    warm_up: int = 0

    def rate_factor(self, done: int, steps: int) -> float:
        """Return the factor on the rate of the step after which `done` of all steps are done."""
        if not self.warm_up:
            return 1.0
        return min(1.0, done / self.warm_up) * (1 + math.cos(math.pi * done / steps)) / 2


EXPERIMENTS: Mapping[str, Experiment] = {
    "digits": Experiment(
        task="digits:model=cnn",
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
        batch=32,
    ),
    "characters": Experiment(
        task="characters:characters=500000",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 3e-3, weight_decay=0.1),
        batch=16,
        warm_up=50,
    ),
    "images": Experiment(  # of the distribution `gradwire-papers`
        task="cifar100:synthetic=2000",
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
        batch=8,
        warm_up=10,
    ),
}
ROWS = (
    *("none", f"{POWER_SGD}4", "lowrank:values=fp16", "lowrank:values=8bit", "lowrank:values=4bit"),
    *("lowrank:rank=2", "lowrank:rank=8", "topk:ratio=100"),
)


class Compressed:
    """The exchange of compressed gradients: each worker's payloads, and their mean."""

    def __init__(self, specs: Sequence[TensorSpec], compressor: str, workers: int, seed: int) -> None:
        self._workers = [ModelCompressor(specs, compressor, LayerRule(), seed, n) for n in range(workers)]
        self._specs, self.push_bytes = specs, 0

    def mean(self, gradients: Gradients, version: int) -> list[torch.Tensor]:
        """Return the mean gradient of each tensor."""
        pairs = zip(self._workers, gradients, strict=True)
        sent = [
            worker.compress(each, samples=1, version=version, workers=len(gradients))
            for worker, each in pairs
        ]
        self.push_bytes = sum(map(wire_bytes, sent[0]))
        found, following = mean_of(self._workers[0].bases, sent)
        for worker in self._workers:
            worker.bases = following
        pieces = torch.split(torch.from_numpy(found), [spec.elements for spec in self._specs])
        return [piece.view(spec.shape) for piece, spec in zip(pieces, self._specs, strict=True)]


def mean_of(bases: Bases, pushes: Sequence[Sequence[Payload]]) -> tuple[npt.NDArray[np.float32], Bases]:
    """Return the mean gradient of pushes of equal weight, and the bases of the next version."""
    starts = np.cumsum([0, *(spec.elements for spec in bases.specs)])
    found, means = np.zeros(starts[-1], np.float32), dict[int, npt.NDArray[np.float32]]()
    weight = 1 / len(pushes)
    for payloads in pushes:
        at = 0
        for payload in payloads:  # a spike travels as float32, also of a tensor that has bases
            if isinstance(payload, ProjectedPayload):
                index = int(np.searchsorted(starts, at))
                mean = means.setdefault(index, np.zeros(payload.count, np.float32))
                sum_coordinates([payload], [weight], mean, keep=True)
            else:
                reduce_payloads([payload], [weight], found[at : at + payload.elements], keep=True)
            at += payload.elements
    for index, mean in means.items():
        expanded = np.empty(bases.specs[index].elements, np.float32)
        bases.expand(index, mean, expanded)
        found[starts[index] : starts[index + 1]] += expanded
    return found, bases.advance(means)


class PowerSgd:
    """The exchange of PowerSGD, with float32 factors."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, workers: int, seed: int) -> None:
        drawn, self.push_bytes = torch.Generator().manual_seed(seed), 0
        self._bases: list[torch.Tensor | None] = []
        for spec in specs:
            rows, columns = (spec.shape[0], spec.elements // spec.shape[0]) if len(spec.shape) > 1 else (1, 1)
            pays = rank * (rows + columns) < rows * columns
            self._bases.append(torch.randn(columns, rank, generator=drawn) if pays else None)
            self.push_bytes += 4 * (rank * (rows + columns) if pays else spec.elements)
        self._residuals = [[torch.zeros(spec.shape) for spec in specs] for _ in range(workers)]

    def mean(self, gradients: Gradients, version: int) -> list[torch.Tensor]:
        """Return the mean gradient of each tensor."""
        found = list[torch.Tensor]()
        for index, basis in enumerate(self._bases):
            each = [given[index] for given in gradients]
            if basis is None:
                found.append(torch.stack(each).mean(dim=0))
                continue
            totals = [g + kept[index] for g, kept in zip(each, self._residuals, strict=True)]
            matrices = [total.reshape(total.shape[0], -1) for total in totals]
            products = torch.stack([matrix @ basis for matrix in matrices]).mean(dim=0)
            linalg: Any = torch.linalg  # annotated only in part
            left: torch.Tensor = linalg.qr(products).Q
            self._bases[index] = right = torch.stack([m.T @ left for m in matrices]).mean(dim=0)
            found.append((left @ right.T).view(totals[0].shape))
            for residuals, total in zip(self._residuals, totals, strict=True):
                residuals[index] = total - found[-1]
        return found


def trained(name: str, spec: str, seed: int, steps: int, workers: int) -> tuple[float, int]:
    """Train, and return the loss on the validation data and the bytes of a push."""
    chosen, task = EXPERIMENTS[name], load(EXPERIMENTS[name].task)
    torch.manual_seed(seed)
    network = task.model()
    named = list(network.named_parameters())
    specs = [TensorSpec(name=name, shape=tuple(each.shape)) for name, each in named]
    parameters = [each for _, each in named]
    exchange: Compressed | PowerSgd
    if spec.startswith(POWER_SGD):
        exchange = PowerSgd(specs, int(spec.removeprefix(POWER_SGD)), workers, seed)
    else:
        exchange = Compressed(specs, spec, workers, seed)
    optimizer, order = chosen.optimizer(parameters), np.random.default_rng(seed)
    network.train()
    for version in range(steps):
        shares = order.integers(task.train_samples, size=(workers, chosen.batch))
        gradients = [
            list(torch.autograd.grad(task.loss(network, task.batch(share)), parameters)) for share in shares
        ]
        for parameter, mean in zip(parameters, exchange.mean(gradients, version), strict=True):
            parameter.grad = mean
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("rate", group["lr"]) * chosen.rate_factor(version + 1, steps)
        optimizer.step()
    network.eval()
    with torch.no_grad():
        return task.evaluate(network)["loss"], exchange.push_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task", choices=[*EXPERIMENTS], default="digits", help="task (default: %(default)s)"
    )
    parser.add_argument("--compressors", nargs="+", default=ROWS, metavar="SPEC", help="rows of the table")
    option(parser, "--seeds", seed_list, "1,2,3,4,5", "LIST", "seeds")
    option(parser, "--steps", at_least_one, 300, "N", "optimizer steps")
    option(parser, "--workers", at_least_one, 4, "N", "simulated workers")
    json_option(parser)


def run(given: argparse.Namespace) -> None:
    """Train every row with every seed, and print a table."""
    for spec in given.compressors:
        if not spec.startswith(POWER_SGD):
            create(spec)  # a misspelt one before anything is trained
    rows = list[dict[str, Any]]()
    for spec in given.compressors:
        runs = [trained(given.task, spec, seed, given.steps, given.workers) for seed in given.seeds]
        losses = [loss for loss, _ in runs]
        rows.append({"compressor": spec, "bytes": runs[0][1], "losses": losses})
        base = rows[0]["losses"]
        more = fmean(loss / other - 1 for loss, other in zip(losses, base, strict=True))
        shown = [f"{loss:.4f}" for loss in losses]
        cells = [f"`{spec}`", f"{runs[0][1]:,}", *shown, estimate(losses), f"{100 * more:+.1f} %"]
        if len(rows) == 1:
            seeds = [f"seed {seed}" for seed in given.seeds]
            output.say(output.table(["compressor", "bytes of a push", *seeds, "mean", "paired"], [cells]))
        else:
            output.say(output.row(cells))
    output.write_json(given.json, rows)
