"""How much of a gradient lies beyond the highest level that `4bit:levels=groups` selects for it.

    python -m gradwire.benchmarks.tails [--task digits] [--seed 1] [--epochs 30]

Trains in one process with the real compressors, as four workers with batches of 32 and SGD at 0.1 would, and
prints for each compressed tensor the share of such elements, as a mean over the steps of an epoch and the
workers. What lies beyond is sent as that level, and the rest waits in the residual.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from ..compressors import LayerRule, ModelCompressor, Payload, QuantizedPayload, TensorSpec, reduce_payloads
from ..worker.tasks import load

COMPRESSOR = "4bit:levels=groups"
WORKERS, BATCH, RATE = 4, 32, 0.1


def shares_beyond(task_name: str, seed: int, epochs: int) -> list[dict[str, float]]:
    """The mean share by tensor, for each epoch."""
    task = load(task_name)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model = task.model()
    parameters = dict(model.named_parameters())
    specs = [TensorSpec(name=name, shape=tuple(p.shape)) for name, p in parameters.items()]
    workers = [ModelCompressor(specs, COMPRESSOR, LayerRule(), seed, rank) for rank in range(WORKERS)]
    order = np.random.default_rng(seed)
    by_epoch: list[dict[str, float]] = []
    for _ in range(epochs):
        shares: dict[str, list[float]] = defaultdict(list)
        steps = task.train_samples // (WORKERS * BATCH)
        samples = order.permutation(task.train_samples)[: steps * WORKERS * BATCH]
        for step in samples.reshape(steps, WORKERS, BATCH):
            pushes: list[list[Payload]] = []
            for worker, indices in zip(workers, step, strict=True):
                loss = task.loss(model, task.batch(indices))
                gradients = torch.autograd.grad(loss, list(parameters.values()))
                pushes.append(worker.compress(gradients, BATCH, version=0))
                for name, gradient, payload in zip(parameters, gradients, pushes[-1], strict=True):
                    if isinstance(payload, QuantizedPayload):
                        beyond = gradient.abs() > float(payload.levels[-1])
                        shares[name].append(beyond.float().mean().item())
            for parameter, *payloads in zip(parameters.values(), *pushes, strict=True):
                mean = torch.empty(parameter.numel())
                reduce_payloads(payloads, [1 / WORKERS] * WORKERS, mean.numpy())
                parameter.data -= RATE * mean.view_as(parameter)
        by_epoch.append({name: statistics.fmean(values) for name, values in shares.items()})
    return by_epoch


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.benchmarks.tails",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=30)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    by_epoch = shares_beyond(given.task, given.seed, given.epochs)
    print("epoch  " + "  ".join(f"{name:>12}" for name in by_epoch[0]))
    for epoch, shares in enumerate(by_epoch, start=1):
        print(f"{epoch:5}  " + "  ".join(f"{share:12.3f}" for share in shares.values()))


if __name__ == "__main__":
    main()
