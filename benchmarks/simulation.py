"""A job without server and network: one process trains as all workers and the server would.

Each worker compresses the mean gradient of its samples with its own residual, and a server's store makes
versions and updates from the payloads. Training and compression are real; the bytes are counted instead of
sent. A run takes seconds instead of half a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..common.parts import divide
from ..compressors import (
    DenseFormat,
    LayerRule,
    ModelCompressor,
    Payload,
    dense_payload,
    parse_compressor,
    wire_bytes,
)
from ..optim.optimizer import Optimizer, parse_optimizer
from ..server.job.events import Apply, Contribution, PushKey
from ..server.shard.making import SteppedStore
from ..server.streams.updates import Broadcast
from ..worker.session.replica import Replica
from ..worker.tasks.flops import layer_flops
from ..worker.tasks.task import Task
from .low_rank import mean_of

WORKERS = 4
BATCH = 32
LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The result of a simulated training.

    Attributes:
        metrics: metrics of the validation data after each epoch.
        wire_bytes: bytes of the payloads of all workers and steps.
        down_bytes: bytes of the updates to all workers.
        raw_bytes: bytes of the gradients as float32, of all workers and steps.
    """

    metrics: Sequence[Mapping[str, float]]
    wire_bytes: int
    down_bytes: int
    raw_bytes: int

    @property
    def accuracies(self) -> list[float]:
        """Accuracy on the validation data after each epoch; empty if the task has no accuracy."""
        return [each["accuracy"] for each in self.metrics if "accuracy" in each]


def train(
    task: Task,
    compressor: str,
    *,
    seed: int,
    epochs: int,
    optimizer: str = "sgd",
    downlink: str = "auto",
    learning_rate: float = LEARNING_RATE,
    decay: float = 1.0,
    count: int = WORKERS,
    batch: int = BATCH,
) -> SimulatedRun:
    """Train a task with simulated workers and a simulated server, and return accuracies and bytes.

    Args:
        task: the task.
        compressor: spec of the compressor.
        seed: seed of the initial parameters and of the order of samples.
        epochs: number of epochs.
        optimizer: spec of the optimizer.
        downlink: spec of the compressor of updates.
        learning_rate: learning rate of the first epoch.
        decay: factor of the learning rate from one epoch to the next.
        count: number of workers.
        batch: samples of each worker in a step.
    """
    torch.manual_seed(seed)
    network = task.model()
    replica = Replica(network, task.train_samples)
    specs = list(replica.manifest.specs)
    if parse_compressor(compressor).entry.model_wide:
        flops = layer_flops(network, lambda: task.loss(network, task.batch(np.zeros(1, np.int64))))
        specs = [replace(spec, flops=flops.get(spec.name, 0.0)) for spec in specs]
    elements = [spec.elements for spec in specs]
    plan = divide(elements, 4 * sum(elements))  # in one part: parts do not affect the bits
    workers = [
        ModelCompressor(specs, compressor, LayerRule(), seed, rank, plan=plan) for rank in range(count)
    ]
    steps = parse_optimizer(optimizer)
    values = [parameter.detach().clone().view(-1).numpy() for parameter in replica.parameters]
    store = SteppedStore(
        replica.manifest,
        values,
        downlink,
        lambda parameters: Optimizer(steps, parameters, learning_rate),
        seed,
        plan=plan,
    )
    order = np.random.default_rng(seed)
    per_epoch = task.train_samples // (count * batch)
    metrics: list[Mapping[str, float]] = []
    sent = received = raw = 0
    for epoch in range(epochs):
        network.train()
        samples = order.permutation(task.train_samples)[: per_epoch * count * batch]
        for number, shares in enumerate(samples.reshape(per_epoch, count, batch)):
            pushes: list[list[Payload]] = []
            for worker, share in zip(workers, shares, strict=True):
                loss = task.loss(network, task.batch(share))
                gradients = list(torch.autograd.grad(loss, replica.parameters))
                payloads = worker.compress(
                    gradients,
                    batch,
                    version=epoch * per_epoch + number,
                    epoch=epoch + number / per_epoch,
                    workers=count,
                )
                raw += replica.manifest.raw_bytes
                sent += sum(map(wire_bytes, payloads))
                if payloads:  # empty if the compressor delays the gradient to a later step
                    pushes.append(payloads)
            if workers[0].bases.values:
                pushes = _advanced(workers, pushes)
            if pushes:
                received += count * _step(store, pushes, batch, decay**epoch)
                with torch.no_grad():
                    for parameter, value in zip(replica.parameters, store.replica, strict=True):
                        parameter.copy_(value)
        network.eval()
        with torch.no_grad():
            metrics.append(task.evaluate(network))
    return SimulatedRun(metrics=metrics, wire_bytes=sent, down_bytes=received, raw_bytes=raw)


def _advanced(workers: Sequence[ModelCompressor], pushes: Sequence[list[Payload]]) -> list[list[Payload]]:
    """Return the mean of these pushes as one, in float32, and give all workers the bases of the next version.

    The updates that the store makes from it have the size of those of uncompressed pushes.
    """
    mean, following = mean_of(workers[0].bases, pushes)
    for worker in workers:
        worker.bases = following
    return [[dense_payload(DenseFormat.FLOAT32, mean)]]


def _step(store: SteppedStore, pushes: Sequence[Sequence[Payload]], samples: int, rate_factor: float) -> int:
    """Apply these pushes, each in one part, as the next version, and return the bytes of its update.

    Args:
        store: the server's parameters.
        pushes: payloads of each worker.
        samples: samples of each push.
        rate_factor: factor of the base learning rate.
    """
    parts = tuple(
        Contribution(key=PushKey("worker", 1, rank), rank=rank, samples=samples, loss=0.0)
        for rank in range(len(pushes))
    )
    order = Apply(version=store.version + 1, contributions=parts, rate_factor=rate_factor, opened_at=0.0)
    update = Broadcast(order.version)
    store.apply(order, [{0: payloads} for payloads in pushes], update.add)
    return update.wire_bytes
