"""Well-known models as lists of their tensors, for planners and benchmarks that need shapes but no model.

VGG-16 and -19 (Simonyan and Zisserman) and ResNet-50 (He et al.) are those for images of 224 x 224 and 1000
classes. ResNet-20, -56 and -110 (He et al., for CIFAR-10) are for images of 32 x 32 and ten classes; their
shortcuts have no parameters. VGG-16 (ten classes) and VGG-19 (100) also exist for images of 32 x 32, with
batch normalization and one linear layer. MXNet's small Inception is for images of 28 x 28, with batch
normalization (ten classes). `NxSIZE` stands for N tensors of SIZE elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..common.spec import did_you_mean

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter tensor of a model.

    Attributes:
        uses: number of multiplications with each of its elements in the forward pass of one sample. That is
            the number of positions of a convolution, and 1 for a linear layer. It is 0 where the work is
            negligible: biases, normalization.
    """

    name: str
    shape: Shape
    uses: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def spread(self) -> float:
        """Standard deviation of the initial values (He et al.): sqrt(2 / inputs); 1 for biases and
        normalization."""
        return math.sqrt(2 / math.prod(self.shape[1:])) if len(self.shape) > 1 else 1.0

    @property
    def square_norm(self) -> float:
        """Squared norm of a gradient as large as the initial values: a guess of the tensor's share."""
        return self.elements * self.spread**2

    @property
    def multiplications(self) -> int:
        """Number of multiplications in the forward pass of one sample."""
        return self.elements * self.uses


def tensors(model: str) -> list[ModelTensor]:
    """Return the parameter tensors of a known model, or of `NxSIZE`, in the order of the forward pass.

    Raises:
        ValueError: the model is not known.
    """
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
    """Yield the tensors of a convolution without bias and of its batch normalization; `size` is the side of
    its kernel, `side` that of its images."""
    yield ModelTensor(f"{name}.weight", (outputs, inputs, size, size), side * side)
    yield ModelTensor(f"{name}.norm.weight", (outputs,), 0)
    yield ModelTensor(f"{name}.norm.bias", (outputs,), 0)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[ModelTensor]:
    """Yield the weight and the bias of a linear layer."""
    yield ModelTensor(f"{name}.weight", (outputs, inputs), 1)
    yield ModelTensor(f"{name}.bias", (outputs,), 0)


def _vgg(convolutions: Sequence[int]) -> Iterator[ModelTensor]:
    """Yield the tensors of a VGG. convolutions: number of convolutions in each of the five blocks."""
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
    """Yield the tensors of a convolution with a bias and of its batch normalization."""
    weight, *norm = _normalized(name, inputs, outputs, size, side)
    yield from (weight, ModelTensor(f"{name}.bias", (outputs,), 0), *norm)


def _small_vgg(convolutions: Sequence[int], classes: int) -> Iterator[ModelTensor]:
    """Yield the tensors of a VGG for images of 32 x 32, with these convolutions in each of five blocks."""
    inputs = 3
    for block, count in enumerate(convolutions):
        outputs = min(64 << block, 512)
        for number in range(count):
            yield from _biased(f"conv{block + 1}_{number + 1}", inputs, outputs, 3, 32 >> block)
            inputs = outputs
    yield from _linear("fc", 512, classes)


def _small_inception() -> Iterator[ModelTensor]:
    """Yield the tensors of the small Inception: modules with a 1 x 1 and a 3 x 3 convolution side by side, or
    with a 3 x 3 convolution beside a pooling."""
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
            # The 3 x 3 convolution of a stage's first block halves the image, after the first 1 x 1.
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
