"""Models that are nothing but their tensors, for times: gradients in backward's order, emulated computation.

The tensors are those of `planning.models`.

`task` computes for so many seconds per step: a third of it forward, the rest backward, divided among the
tensors by their multiplications. Weights are as He et al. begin with them. What comes out as a gradient is
noise, another one in every step, as large as the weights of its tensor, and the loss falls as it is told to.
Or it computes with the real network (`worker.tasks.networks`), on images that are noise.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..planning.models import Shape, tensors
from ..worker.tasks import Task
from ..worker.tasks.networks import NETWORKS, noise
from ..worker.tasks.task import TaskSpecError
from .traces import Follower

FORWARD = 1 / 3  # of the computation
SLACK = 1 << 16  # how many places in the noise a gradient may begin at


def shapes(model: str) -> list[Shape]:
    """Return the shapes in the order of the forward pass. Raises TaskSpecError for an unknown model."""
    try:
        return [tensor.shape for tensor in tensors(model)]
    except ValueError as error:
        raise TaskSpecError(str(error)) from None


def sizes(model: str) -> list[int]:
    return list(map(math.prod, shapes(model)))


class _Layer(torch.autograd.Function):
    """The identity, whose parameter's gradient is a piece of the noise."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, weight: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.layer, ctx.shape = layer, weight.shape
        weight.detach()  # used: with `--overlap both` this waits until it is here
        _compute(layer.seconds * FORWARD)
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *passed: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        _compute(layer.seconds * (1 - FORWARD))
        layer.steps += 1
        start = (layer.steps * 9973 + layer.number * 7919) % SLACK
        gradient = layer.noise[start : start + math.prod(ctx.shape)].view(ctx.shape)
        # In memory of its own: autograd hands it on as it is.
        return passed[0], gradient * layer.spread, None


class EmulatedLayer:
    """A tensor's part of the computation. spread: of its gradient, relative to the noise."""

    def __init__(self, number: int, seconds: float, noise: Tensor, spread: float) -> None:
        self.number, self.seconds, self.noise, self.spread = number, seconds, noise, spread
        self.steps = 0


def _compute(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class Layers(nn.Module):
    """A model that computes as `task` says."""

    def __init__(self, model: str, seconds: float, loss: float) -> None:
        super().__init__()
        self._loss, self._steps = loss, 0
        found = tensors(model)
        begin = torch.Generator().manual_seed(0)
        self._weights = [
            nn.Parameter(torch.randn(each.shape, generator=begin) * each.spread) for each in found
        ]
        for number, weight in enumerate(self._weights):
            self.register_parameter(f"layer{number}", weight)
        generator = torch.Generator().manual_seed(os.getpid())
        largest = max(weight.numel() for weight in self._weights)
        gradients = torch.randn(largest + SLACK, generator=generator) * 1e-2
        work = sum(each.multiplications for each in found)
        self._layers = [
            EmulatedLayer(number, seconds * each.multiplications / work, gradients, each.spread)
            for number, each in enumerate(found)
        ]

    def forward(self, passed: Tensor) -> Tensor:
        function: Any = _Layer
        for weight, layer in zip(self._weights, self._layers, strict=True):
            passed = function.apply(passed, weight, layer)
        self._steps += 1
        return passed.sum() + self._loss**self._steps


def _real(model: str) -> nn.Module:
    network = NETWORKS[model]
    return network.make(3, network.classes)


def task(
    model: str = "4x1048576",
    seconds: float = 0.0,
    real: int = 0,
    loss: float = 1.0,
    samples: int = 1024,
    trace: str = "",
) -> Task:
    """Return a task that computes for times only.

    Args:
        seconds: emulated computation per step.
        real: number of images with which the real network computes instead; 0 for none.
        loss: factor of the emulated loss in each step of a worker; it begins at 1.
        samples: samples in an epoch.
        trace: folder for each process's trace (`traces`); "" for none.
    """
    shapes(model)
    if real and model not in NETWORKS:
        raise TaskSpecError(f"real: expected a model that is one of {', '.join(NETWORKS)}, got {model!r}")
    images, labels = noise(model, real) if real else (torch.zeros(1, 1), torch.zeros(1))

    def make() -> nn.Module:
        network = _real(model) if real else Layers(model, seconds, loss)
        if trace:
            Follower(network, Path(trace))
        return network

    def batch(indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.asarray(indices) % len(images))
        return images[rows], labels[rows]

    def found_loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        if real:
            return functional.cross_entropy(network(images), labels)
        found: Tensor = network(torch.zeros(1, requires_grad=True))
        return found

    return Task(
        name=model,
        train_samples=samples,
        model=make,
        batch=batch,
        loss=found_loss,
        evaluate=lambda network: {"loss": 0.0},
    )
