"""Models that are nothing but their tensors, for times: gradients in backward's order, emulated computation.

`shapes` knows what tensors VGG-16 and -19, ResNet-50 (all for 1000 classes) and ResNet-20, -56 and -110 (for
ten) have, in the order of the forward pass; `200x4096` is 200 tensors of so many elements.

`task` computes for so many seconds per step: a third of it forward, the rest backward, divided among the
tensors by their elements. What comes out as a gradient is noise, another one in every step. Or it computes
with the real network (`networks`), on images that are noise.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..worker.tasks import Task
from ..worker.tasks.task import TaskSpecError
from .networks import NETWORKS, noise
from .traces import Follower

Shape = tuple[int, ...]
FORWARD = 1 / 3  # of the computation
SLACK = 1 << 16  # how many places in the noise a gradient may begin at


def _convolution(inputs: int, outputs: int, size: int) -> Shape:
    return outputs, inputs, size, size


def _normalized(inputs: int, outputs: int, size: int) -> Iterator[Shape]:
    """A convolution without bias, and its batch normalization."""
    yield _convolution(inputs, outputs, size)
    yield (outputs,)
    yield (outputs,)


def _linear(inputs: int, outputs: int) -> Iterator[Shape]:
    yield outputs, inputs
    yield (outputs,)


def _vgg(convolutions: Sequence[int]) -> Iterator[Shape]:
    """convolutions: how many each of the five blocks has."""
    inputs = 3
    for block, count in enumerate(convolutions):
        outputs = min(64 << block, 512)
        for _ in range(count):
            yield _convolution(inputs, outputs, 3)
            yield (outputs,)
            inputs = outputs
    for before, after in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        yield from _linear(before, after)


def _resnet50() -> Iterator[Shape]:
    yield from _normalized(3, 64, 7)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            yield from _normalized(inputs, width, 1)
            yield from _normalized(width, width, 3)
            yield from _normalized(width, 4 * width, 1)
            if block == 0:
                yield from _normalized(inputs, 4 * width, 1)
            inputs = 4 * width
    yield from _linear(2048, 1000)


def _resnet_of_ten_classes(depth: int) -> Iterator[Shape]:
    """He et al.'s for CIFAR-10, whose shortcuts have no parameters."""
    yield from _normalized(3, 16, 3)
    inputs = 16
    for width in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            yield from _normalized(inputs, width, 3)
            yield from _normalized(width, width, 3)
            inputs = width
    yield from _linear(64, 10)


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "vgg16": lambda: _vgg((2, 2, 3, 3, 3)),
    "vgg19": lambda: _vgg((2, 2, 4, 4, 4)),
    "resnet20": lambda: _resnet_of_ten_classes(20),
    "resnet50": _resnet50,
    "resnet56": lambda: _resnet_of_ten_classes(56),
    "resnet110": lambda: _resnet_of_ten_classes(110),
}


def shapes(model: str) -> list[Shape]:
    """In the order of the forward pass. Raises TaskSpecError for a model that is not known."""
    if model in MODELS:
        return list(MODELS[model]())
    count, _, size = model.partition("x")
    if not (count.isdecimal() and size.isdecimal() and int(count) and int(size)):
        raise TaskSpecError(f"model: expected one of {', '.join(MODELS)}, or NxSIZE, got {model!r}")
    elements = int(size)
    rows = next(rows for rows in range(math.isqrt(elements), 0, -1) if elements % rows == 0)
    return [(rows, elements // rows)] * int(count)  # nearly square, as low-rank compression likes it


def sizes(model: str) -> list[int]:
    """Elements of each tensor."""
    return list(map(math.prod, shapes(model)))


class _Layer(torch.autograd.Function):
    """Passes on what it gets. Its parameter's gradient is a piece of the noise."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, weight: Tensor, layer: Layer) -> Tensor:
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
        return passed[0], gradient.clone(), None  # memory of its own: autograd hands it on as it is


class Layer:
    """One tensor's part of the computation. number: of the tensor."""

    def __init__(self, number: int, seconds: float, noise: Tensor) -> None:
        self.number, self.seconds, self.noise = number, seconds, noise
        self.steps = 0


def _compute(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class Layers(nn.Module):
    """Computes as `task` says, for so many seconds per step."""

    def __init__(self, model: str, seconds: float) -> None:
        super().__init__()
        found = shapes(model)
        self._weights = [nn.Parameter(torch.zeros(shape)) for shape in found]
        for number, weight in enumerate(self._weights):
            self.register_parameter(f"layer{number}", weight)
        generator = torch.Generator().manual_seed(os.getpid())
        largest = max(weight.numel() for weight in self._weights)
        gradients = torch.randn(largest + SLACK, generator=generator) * 1e-2
        elements = sum(weight.numel() for weight in self._weights)
        self._layers = [
            Layer(number, seconds * weight.numel() / elements, gradients)
            for number, weight in enumerate(self._weights)
        ]

    def forward(self, passed: Tensor) -> Tensor:
        function: Any = _Layer
        for weight, layer in zip(self._weights, self._layers, strict=True):
            passed = function.apply(passed, weight, layer)
        return passed.sum()


def task(
    model: str = "4x1048576", seconds: float = 0.0, real: int = 0, samples: int = 1024, trace: str = ""
) -> Task:
    """seconds: of emulated computation per step. real: compute with the real network instead, and make so
    many images for it. samples: in an epoch. trace: a folder, in which each process writes down when it
    computes (`traces`); "" for none."""
    shapes(model)
    if real and model not in NETWORKS:
        raise TaskSpecError(f"real: expected a model that is one of {', '.join(NETWORKS)}, got {model!r}")
    images, labels = noise(model, real) if real else (torch.zeros(1, 1), torch.zeros(1))

    def make() -> nn.Module:
        network = NETWORKS[model][0]() if real else Layers(model, seconds)
        if trace:
            Follower(network, Path(trace))
        return network

    def batch(indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.asarray(indices) % len(images))
        return images[rows], labels[rows]

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
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
        loss=loss,
        evaluate=lambda network: {"loss": 0.0},
    )
