"""A job without server and network: one process trains as all workers and the server would.

Each worker compresses the mean gradient of its samples with its own residual, the payloads are summed as the
server sums them, and torch's optimizer takes the step. Compressors, codes, sums and steps are the real ones;
the bytes are counted instead of sent, without headers; the way back is without loss. A run takes seconds
instead of half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..compressors import (
    LayerRule,
    ModelCompressor,
    Payload,
    TensorSpec,
    model_wide,
    reduce_payloads,
    wire_bytes,
)
from ..optimizer import Optimizer, parse_optimizer
from ..worker.tasks.flops import layer_flops
from ..worker.tasks.task import Task

WORKERS = 4
BATCH = 32
LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """accuracies: on the validation data after each epoch. Bytes: of payloads, over all workers and steps."""

    accuracies: Sequence[float]
    wire_bytes: int
    raw_bytes: int

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.wire_bytes


def train(
    task: Task,
    compressor: str,
    *,
    seed: int,
    epochs: int,
    optimizer: str = "sgd",
    watch: Callable[[int, Sequence[torch.Tensor], Sequence[Payload]], None] | None = None,
) -> Run:
    """Train from the initial parameters and in the sample order of `seed`.

    watch: called with the epoch, a worker's gradients and their payloads, at every step of every worker.
    """
    torch.manual_seed(seed)
    network = task.model()
    parameters = dict(network.named_parameters())
    specs = [TensorSpec(name=name, shape=tuple(p.shape)) for name, p in parameters.items()]
    if model_wide(compressor):
        flops = layer_flops(network, lambda: task.loss(network, task.batch(np.zeros(1, np.int64))))
        specs = [replace(spec, flops=flops.get(spec.name, 0.0)) for spec in specs]
    workers = [ModelCompressor(specs, compressor, LayerRule(), seed, rank) for rank in range(WORKERS)]
    step = Optimizer(parse_optimizer(optimizer), list(parameters.values()), LEARNING_RATE).step
    order = np.random.default_rng(seed)
    per_epoch = task.train_samples // (WORKERS * BATCH)
    accuracies: list[float] = []
    sent = raw = 0
    for epoch in range(epochs):
        samples = order.permutation(task.train_samples)[: per_epoch * WORKERS * BATCH]
        for number, shares in enumerate(samples.reshape(per_epoch, WORKERS, BATCH)):
            pushes: list[list[Payload]] = []
            for worker, share in zip(workers, shares, strict=True):
                loss = task.loss(network, task.batch(share))
                gradients = list(torch.autograd.grad(loss, list(parameters.values())))
                payloads = worker.compress(
                    gradients,
                    BATCH,
                    version=epoch * per_epoch + number,
                    epoch=epoch + number / per_epoch,
                    workers=WORKERS,
                )
                if watch is not None:
                    watch(epoch, gradients, payloads)
                raw += 4 * sum(spec.elements for spec in specs)
                sent += sum(map(wire_bytes, payloads))
                if payloads:  # otherwise held back for a later step
                    pushes.append(payloads)
            if pushes:
                _aggregate(list(parameters.values()), pushes)
                step()
        with torch.no_grad():
            accuracies.append(task.evaluate(network)["accuracy"])
    return Run(accuracies=accuracies, wire_bytes=sent, raw_bytes=raw)


def _aggregate(parameters: Sequence[torch.Tensor], pushes: Sequence[Sequence[Payload]]) -> None:
    """The mean of the pushes becomes the parameters' gradient."""
    for parameter, *payloads in zip(parameters, *pushes, strict=True):
        mean = torch.empty(parameter.numel())
        reduce_payloads(payloads, [1 / len(pushes)] * len(pushes), mean.numpy())
        parameter.grad = mean.view_as(parameter)
