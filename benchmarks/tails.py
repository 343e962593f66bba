"""How much of a gradient lies beyond the highest level that `4bit:levels=groups` selects for it.

    python -m gradwire.benchmarks.tails [--task digits] [--seed 1] [--epochs 30]

Trains in one process (`simulation`: four workers, batches of 32, SGD at 0.1) and
prints for each compressed tensor the share of such elements, as a mean over the steps of an epoch and the
workers. What lies beyond is sent as that level, and the rest waits in the residual.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch

from ..compressors import Payload, QuantizedPayload
from ..worker.tasks import load
from .arguments import program
from .simulation import train

COMPRESSOR = "4bit:levels=groups"


def shares_beyond(task_name: str, seed: int, epochs: int) -> list[dict[str, float]]:
    """The mean share by tensor, for each epoch."""
    task = load(task_name)
    names = [name for name, _ in task.model().named_parameters()]
    shares: list[dict[str, list[float]]] = [defaultdict(list) for _ in range(epochs)]

    def watch(epoch: int, gradients: Sequence[torch.Tensor], payloads: Sequence[Payload]) -> None:
        for name, gradient, payload in zip(names, gradients, payloads, strict=True):
            if isinstance(payload, QuantizedPayload):
                beyond = gradient.abs() > float(payload.levels[-1])
                shares[epoch][name].append(beyond.float().mean().item())

    train(task, COMPRESSOR, seed=seed, epochs=epochs, watch=watch)
    return [{name: statistics.fmean(values) for name, values in each.items()} for each in shares]


def main(argv: Sequence[str] | None = None) -> None:
    parser = program(__doc__)
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
