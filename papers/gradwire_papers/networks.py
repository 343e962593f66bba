"""Image networks by name: ResNet-20, -56, -110 and -50, VGG-16 and -19, and a small Inception.

The image tasks train them. Their tensors are those that `gradwire.planning.tensors` lists. A test compares
the two.

Sources: He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), section 4.2 for the ResNets of
small images. Simonyan and Zisserman, "Very Deep Convolutional Networks" (ICLR 2015), here with batch
normalization and one linear layer, as usual for 32 x 32 pixels. Szegedy et al., "Going Deeper with
Convolutions" (CVPR 2015), in the small form of MXNet's examples for 28 x 28 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network that `NETWORKS` lists.

    Attributes:
        make: returns a new network, given the channels of its images and its number of classes.
        side: pixels of a side of the images that it was designed for; a larger or smaller side works too.
        classes: number of classes in the paper.
    """

    make: Callable[[int, int], nn.Module]
    side: int
    classes: int

    def build(self) -> nn.Module:
        """Return a new network for color images in the paper's number of classes."""
        return self.make(3, self.classes)


def _normalized(
    inputs: int, outputs: int, size: int, stride: int = 1, *, bias: bool = False
) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=bias)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Padded(nn.Module):
    """A shortcut without parameters: every other pixel, with zeros in the new channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._channels = channels

    def forward(self, passed: Tensor) -> Tensor:
        return functional.pad(passed[:, :, ::2, ::2], (0, 0, 0, 0, 0, self._channels))


class _Residual(nn.Module):
    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path, self.shortcut = path, shortcut

    def forward(self, passed: Tensor) -> Tensor:
        path: Tensor = self.path(passed)
        return functional.relu(path + self.shortcut(passed))


class _SideBySide(nn.Module):
    """Paths whose channels are concatenated."""

    def __init__(self, *paths: nn.Module) -> None:
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def forward(self, passed: Tensor) -> Tensor:
        return torch.cat([path(passed) for path in self.paths], dim=1)


def _head(inputs: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]


def _resnet50(channels: int, classes: int) -> nn.Module:
    found: list[nn.Module] = [_normalized(channels, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            path = nn.Sequential(
                *(_normalized(inputs, width, 1), nn.ReLU()),
                *(_normalized(width, width, 3, stride), nn.ReLU()),
                _normalized(width, 4 * width, 1),
            )
            shortcut = nn.Identity() if block else _normalized(inputs, 4 * width, 1, stride)
            found.append(_Residual(path, shortcut))
            inputs = 4 * width
    return nn.Sequential(*found, *_head(2048, classes))


def _small_resnet(depth: int, channels: int, classes: int) -> nn.Module:
    found: list[nn.Module] = [_normalized(channels, 16, 3), nn.ReLU()]
    inputs = 16
    for width in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            stride = 1 if inputs == width else 2
            path = nn.Sequential(
                _normalized(inputs, width, 3, stride), nn.ReLU(), _normalized(width, width, 3)
            )
            found.append(_Residual(path, nn.Identity() if stride == 1 else _Padded(width - inputs)))
            inputs = width
    return nn.Sequential(*found, *_head(64, classes))


def _small_vgg(convolutions: Sequence[int], channels: int, classes: int) -> nn.Module:
    """convolutions: number in each of the five blocks, each of which ends by halving the image."""
    found: list[nn.Module] = []
    inputs = channels
    for block, count in enumerate(convolutions):
        outputs = min(64 << block, 512)
        for _ in range(count):
            found += [_normalized(inputs, outputs, 3, bias=True), nn.ReLU()]
            inputs = outputs
        found.append(nn.MaxPool2d(2, ceil_mode=True))  # 28 pixels end as 1, as 32 do
    return nn.Sequential(*found, *_head(512, classes))


def _small_inception(channels: int, classes: int) -> nn.Module:
    """Modules of 1 x 1 and 3 x 3 convolutions side by side, or of a 3 x 3 one beside a pooling, both of which
    halve the image."""

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(_normalized(inputs, outputs, size, stride, bias=True), nn.ReLU())

    found: list[nn.Module] = [convolution(channels, 96, 3)]
    inputs = 96
    modules = ((32, 32), (32, 48), (0, 80), (112, 48), (96, 64), (80, 80), (48, 96), (0, 96))
    for narrow, wide in (*modules, (176, 160), (176, 160)):
        if narrow:
            found.append(_SideBySide(convolution(inputs, narrow, 1), convolution(inputs, wide, 3)))
        else:
            found.append(_SideBySide(convolution(inputs, wide, 3, 2), nn.MaxPool2d(3, 2, 1)))
        inputs = (narrow or inputs) + wide
    return nn.Sequential(*found, *_head(inputs, classes))


NETWORKS: dict[str, Network] = {
    "resnet20": Network(make=partial(_small_resnet, 20), side=32, classes=10),
    "resnet50": Network(make=_resnet50, side=224, classes=1000),
    "resnet56": Network(make=partial(_small_resnet, 56), side=32, classes=10),
    "resnet110": Network(make=partial(_small_resnet, 110), side=32, classes=10),
    "vgg16-cifar": Network(make=partial(_small_vgg, (2, 2, 3, 3, 3)), side=32, classes=10),
    "vgg19-cifar": Network(make=partial(_small_vgg, (2, 2, 4, 4, 4)), side=32, classes=100),
    "inception-cifar": Network(make=_small_inception, side=28, classes=10),
}
