"""Accuracy over epochs of the compressors, without server and network: seconds a run instead of minutes.

    python -m gradwire.benchmarks.simulated_accuracy [--seeds 5] [--epochs 30] [--model mlp|cnn] [SPEC ...]

One process trains `digits` as four workers would: each compresses the mean gradient of its 32 samples with
its own residual, the payloads are summed as the server sums them, and plain SGD takes the step. Compressors,
codes and sums are the real ones; the way back is without loss. For choosing between compressors; what we
claim is measured by `benchmarks.accuracy`, with real processes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..compressors import LayerRule, ModelCompressor, TensorSpec, reduce_payloads
from ..worker.tasks.digits import digits
from ..worker.tasks.task import Task

WORKERS = 4
BATCH = 32
LEARNING_RATE = 0.1
SPECS = ["none", "4bit:levels=running", "4bit:levels=group1", "4bit:levels=groups", "2bit"]


def train(task: Task, spec: str, seed: int, epochs: int) -> list[float]:
    """Validation accuracy after each epoch."""
    torch.manual_seed(seed)
    network = task.model()
    parameters = dict(network.named_parameters())
    specs = [TensorSpec(name=name, shape=tuple(p.shape)) for name, p in parameters.items()]
    workers = [ModelCompressor(specs, spec, LayerRule(), seed, rank) for rank in range(WORKERS)]
    order = np.random.default_rng(seed)
    accuracies: list[float] = []
    for _ in range(epochs):
        rounds = order.permutation(task.train_samples)
        rounds = rounds[: len(rounds) // (WORKERS * BATCH) * WORKERS * BATCH].reshape(-1, WORKERS, BATCH)
        for shares in rounds:
            pushes = [
                worker.compress(_gradients(task, network, share), BATCH, version=0)
                for worker, share in zip(workers, shares, strict=True)
            ]
            for parameter, *payloads in zip(parameters.values(), *pushes, strict=True):
                mean = torch.empty(parameter.numel())
                reduce_payloads(payloads, [1 / WORKERS] * WORKERS, mean.numpy())
                parameter.data -= LEARNING_RATE * mean.view_as(parameter)
        with torch.no_grad():
            accuracies.append(task.evaluate(network)["accuracy"])
    return accuracies


def _gradients(task: Task, network: torch.nn.Module, indices: Any) -> list[torch.Tensor]:
    loss = task.loss(network, task.batch(indices))
    return list(torch.autograd.grad(loss, list(network.parameters())))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", help=f"compressors (default: {' '.join(SPECS)})")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 1 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    task = digits(options.model)
    print(f"digits ({options.model}), {WORKERS} workers, {options.epochs} epochs, {options.seeds} seeds")
    print("| compressor | mean over epochs | difference to the first, ± standard error | last epoch |")
    print("|---|---|---|---|")
    first: list[float] = []
    for spec in options.specs or SPECS:
        runs = [train(task, spec, seed, options.epochs) for seed in range(1, options.seeds + 1)]
        means = [statistics.fmean(run) for run in runs]
        first = first or means
        differences = [mean - base for mean, base in zip(means, first, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        mean, difference = statistics.fmean(means), statistics.fmean(differences)
        last = statistics.fmean(run[-1] for run in runs)
        print(f"| `{spec}` | {mean:.4f} | {difference:+.4f} ± {error:.4f} | {last:.3f} |", flush=True)


if __name__ == "__main__":
    main()
