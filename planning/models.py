"""Models known by the tensors that they have: what a planner, or a benchmark, can ask about without them.

VGG-16 and -19 (Simonyan and Zisserman) and ResNet-50 (He et al.), all for images of 224 x 224 and 1000
classes; ResNet-20, -56 and -110 (He et al., for CIFAR-10) for images of 32 x 32 and ten classes, whose
shortcuts have no parameters; `NxSIZE`, which is N tensors of SIZE elements. For images of 32 x 32 also
VGG-16 (ten classes) and VGG-19 (100) with batch normalization and one linear layer, and for images of 28 x 28
MXNet's small Inception with batch normalization (ten classes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..common.spec import did_you_mean

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter.

    uses: how often the forward pass of one sample multiplies by each of its elements: the positions that a
        convolution has, 1 of a linear layer. 0 where the work is not worth counting: biases, normalization.
    """

    name: str
    shape: Shape
    uses: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def spread(self) -> float:
        """Standard deviation of the values that training begins with (He et al.): by the inputs, 1 of biases
        and normalization."""
        return math.sqrt(2 / math.prod(self.shape[1:])) if len(self.shape) > 1 else 1.0

    @property
    def square_norm(self) -> float:
        """Of a gradient as large as these values, which is as good a guess as any of its share in all."""
        return self.elements * self.spread**2

    @property
    def multiplications(self) -> int:
        """Of the forward pass of a sample."""
        return self.elements * self.uses


def tensors(model: str) -> list[ModelTensor]:
    """In the order of the forward pass. Raises ValueError for a model that is not known."""
    if model in MODELS:
        return list(MODELS[model]())
    count, _, size = model.partition("x")
    if not (count.isdecimal() and size.isdecimal() and int(count) and int(size)):
        known = ", ".join(MODELS)
        raise ValueError(
            f"model: expected one of {known}, or NxSIZE, got {model!r}{did_you_mean(model, MODELS)}"
        )
    elements = int(size)
    rows = next(rows for rows in range(math.isqrt(elements), 0, -1) if elements % rows == 0)
    shape = rows, elements // rows  # nearly square, as low-rank compression likes it
    return [ModelTensor(f"layer{number}", shape, 1) for number in range(int(count))]


def _normalized(name: str, inputs: int, outputs: int, size: int, side: int) -> Iterator[ModelTensor]:
    """A convolution without bias, and its batch normalization. side: of the square that comes out."""
    yield ModelTensor(f"{name}.weight", (outputs, inputs, size, size), side * side)
    yield ModelTensor(f"{name}.norm.weight", (outputs,), 0)
    yield ModelTensor(f"{name}.norm.bias", (outputs,), 0)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[ModelTensor]:
    yield ModelTensor(f"{name}.weight", (outputs, inputs), 1)
    yield ModelTensor(f"{name}.bias", (outputs,), 0)


def _vgg(convolutions: Sequence[int]) -> Iterator[ModelTensor]:
    """convolutions: how many each of the five blocks has."""
    inputs = 3
    for block, count in enumerate(convolutions):
        outputs, side = min(64 << block, 512), 224 >> block
        for number in range(count):
            name = f"conv{block + 1}_{number + 1}"
            yield ModelTensor(f"{name}.weight", (outputs, inputs, 3, 3), side * side)
            yield ModelTensor(f"{name}.bias", (outputs,), 0)
            inputs = outputs
    for number, (before, after) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)), start=6):
        yield from _linear(f"fc{number}", before, after)


def _biased(name: str, inputs: int, outputs: int, size: int, side: int) -> Iterator[ModelTensor]:
    """A convolution with a bias, and its batch normalization."""
    weight, *norm = _normalized(name, inputs, outputs, size, side)
    yield from (weight, ModelTensor(f"{name}.bias", (outputs,), 0), *norm)


def _small_vgg(convolutions: Sequence[int], classes: int) -> Iterator[ModelTensor]:
    inputs = 3
    for block, count in enumerate(convolutions):
        outputs = min(64 << block, 512)
        for number in range(count):
            yield from _biased(f"conv{block + 1}_{number + 1}", inputs, outputs, 3, 32 >> block)
            inputs = outputs
    yield from _linear("fc", 512, classes)


def _small_inception() -> Iterator[ModelTensor]:
    """Modules of 1 x 1 and 3 x 3 convolutions side by side, or of one of 3 x 3 beside a pooling."""
    yield from _biased("conv1", 3, 96, 3, 28)
    inputs = 96
    modules = {
        **{"in3a": (32, 32, 28), "in3b": (32, 48, 28), "in3c": (0, 80, 14)},
        **{"in4a": (112, 48, 14), "in4b": (96, 64, 14), "in4c": (80, 80, 14), "in4d": (48, 96, 14)},
        **{"in4e": (0, 96, 7), "in5a": (176, 160, 7), "in5b": (176, 160, 7)},
    }
    for name, (narrow, wide, side) in modules.items():
        if narrow:
            yield from _biased(f"{name}.1x1", inputs, narrow, 1, side)
        yield from _biased(f"{name}.3x3", inputs, wide, 3, side)
        inputs = (narrow or inputs) + wide
    yield from _linear("fc", inputs, 10)


def _resnet50() -> Iterator[ModelTensor]:
    yield from _normalized("conv1", 3, 64, 7, 112)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, side = 64 << stage, 56 >> stage
        for block in range(blocks):
            name = f"stage{stage + 1}.{block}"
            # The 3 x 3 convolution of a stage's first block is what halves the image.
            before = 2 * side if stage and not block else side
            yield from _normalized(f"{name}.conv1", inputs, width, 1, before)
            yield from _normalized(f"{name}.conv2", width, width, 3, side)
            yield from _normalized(f"{name}.conv3", width, 4 * width, 1, side)
            if block == 0:
                yield from _normalized(f"{name}.shortcut", inputs, 4 * width, 1, side)
            inputs = 4 * width
    yield from _linear("fc", 2048, 1000)


def _resnet_of_ten_classes(depth: int) -> Iterator[ModelTensor]:
    yield from _normalized("conv1", 3, 16, 3, 32)
    inputs = 16
    for stage, width in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            name = f"stage{stage + 1}.{block}"
            yield from _normalized(f"{name}.conv1", inputs, width, 3, 32 >> stage)
            yield from _normalized(f"{name}.conv2", width, width, 3, 32 >> stage)
            inputs = width
    yield from _linear("fc", 64, 10)


MODELS: dict[str, Callable[[], Iterator[ModelTensor]]] = {
    "vgg16": lambda: _vgg((2, 2, 3, 3, 3)),
    "vgg19": lambda: _vgg((2, 2, 4, 4, 4)),
    "vgg16-cifar": lambda: _small_vgg((2, 2, 3, 3, 3), 10),
    "vgg19-cifar": lambda: _small_vgg((2, 2, 4, 4, 4), 100),
    "inception-cifar": _small_inception,
    "resnet20": lambda: _resnet_of_ten_classes(20),
    "resnet50": _resnet50,
    "resnet56": lambda: _resnet_of_ten_classes(56),
    "resnet110": lambda: _resnet_of_ten_classes(110),
}
