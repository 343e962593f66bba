"""Models for timing that consist of tensors alone: gradients in backward's order, emulated computation.

The tensors are those of `planning.models`.

`task` computes for a given number of seconds per step: a third of it forward, the rest backward, divided
among the tensors by their multiplications. Weights have the initial spread of He et al. Gradients are noise,
different in every step, as large as the weights of their tensor. The loss follows a given curve.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..planning.models import Shape, tensors
from ..worker.tasks import Task
from ..worker.tasks.task import TaskSpecError
from .traces import TraceWriter

FORWARD = 1 / 3  # share of the forward pass in the computation
SLACK = 1 << 16  # number of offsets in the noise at which a gradient may begin


def shapes(model: str) -> list[Shape]:
    """Return the shapes of a model's tensors in the order of the forward pass.

    Raises:
        TaskSpecError: if the model is unknown.
    """
    try:
        return [tensor.shape for tensor in tensors(model)]
    except ValueError as error:
        raise TaskSpecError(str(error)) from None


def sizes(model: str) -> list[int]:
    """Return the number of elements of each tensor of a model, in the order of the forward pass."""
    return list(map(math.prod, shapes(model)))


class _Layer(torch.autograd.Function):
    """The identity as an autograd function, whose backward returns noise as the parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, weight: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.layer, ctx.shape = layer, weight.shape
        weight.detach()  # a use of the weight: with `--overlap both` it waits for the weight's update
        _compute(layer.seconds * FORWARD)
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *passed: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        _compute(layer.seconds * (1 - FORWARD))
        layer.steps += 1
        start = (layer.steps * 9973 + layer.number * 7919) % SLACK
        gradient = layer.noise[start : start + math.prod(ctx.shape)].view(ctx.shape)
        # The product is in memory of its own; autograd would pass on a view of the noise without a copy.
        return passed[0], gradient * layer.spread, None


class EmulatedLayer:
    """One tensor's part of an emulated computation."""

    def __init__(self, number: int, seconds: float, noise: Tensor, spread: float) -> None:
        """Gradients are pieces of `noise`, float32, one-dimensional, times `spread`."""
        self.number, self.seconds, self.noise, self.spread = number, seconds, noise, spread
        self.steps = 0


def _compute(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class Layers(nn.Module):
    """A model whose layers sleep instead of computing, and whose gradients are noise. `task` returns it."""

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


def task(
    model: str = "4x1048576", seconds: float = 0.0, loss: float = 1.0, samples: int = 1024, trace: str = ""
) -> Task:
    """Return a task for timing.

    Args:
        model: name of the model.
        seconds: emulated computation per step.
        loss: factor of the emulated loss in each step of a worker; it begins at 1.
        samples: number of samples in an epoch.
        trace: folder for each process's trace (`traces`); "" for none.

    Raises:
        TaskSpecError: if the model is unknown.
    """
    shapes(model)

    def make() -> nn.Module:
        network = Layers(model, seconds, loss)
        if trace:
            TraceWriter(network, Path(trace))
        return network

    def found_loss(network: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = network(batch)
        return found

    return Task(
        name=model,
        train_samples=samples,
        model=make,
        batch=lambda indices: torch.zeros(1, requires_grad=True),
        loss=found_loss,
        evaluate=lambda network: {"loss": 0.0},
    )
