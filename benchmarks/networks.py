"""Real networks with the tensors of `layers`: ResNet-20, -56 and -110 for small images, ResNet-50 for large
ones.

Source: He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


def _normalized(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Make a convolution followed by batch normalization."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Padded(nn.Module):
    """A shortcut without parameters: every other pixel, with zeros in the new channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._channels = channels

    def forward(self, passed: Tensor) -> Tensor:
        return functional.pad(passed[:, :, ::2, ::2], (0, 0, 0, 0, 0, self._channels))


class _Residual(nn.Module):
    """A residual block: the sum of a path and a shortcut, followed by ReLU."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path, self.shortcut = path, shortcut

    def forward(self, passed: Tensor) -> Tensor:
        path: Tensor = self.path(passed)
        return functional.relu(path + self.shortcut(passed))


def _head(inputs: int, classes: int) -> list[nn.Module]:
    """Make the layers from feature maps to the scores of the classes."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]


def _resnet50() -> nn.Module:
    found: list[nn.Module] = [_normalized(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
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
    return nn.Sequential(*found, *_head(2048, 1000))


def _resnet_of_ten_classes(depth: int) -> nn.Module:
    found: list[nn.Module] = [_normalized(3, 16, 3), nn.ReLU()]
    inputs = 16
    for width in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            stride = 1 if inputs == width else 2
            path = nn.Sequential(
                _normalized(inputs, width, 3, stride), nn.ReLU(), _normalized(width, width, 3)
            )
            found.append(_Residual(path, nn.Identity() if stride == 1 else _Padded(width - inputs)))
            inputs = width
    return nn.Sequential(*found, *_head(64, 10))


# By name: function that makes the network, pixels per side of its images, and number of classes.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "resnet20": (partial(_resnet_of_ten_classes, 20), 32, 10),
    "resnet50": (_resnet50, 224, 1000),
    "resnet56": (partial(_resnet_of_ten_classes, 56), 32, 10),
    "resnet110": (partial(_resnet_of_ten_classes, 110), 32, 10),
}


def noise(name: str, samples: int) -> tuple[Tensor, Tensor]:
    """Return images and labels of noise for a network of `NETWORKS`, the same ones in every call.

    Args:
        name: name of the network.
        samples: number of images.

    Returns:
        Images, float32 (samples, 3, side, side), and labels, int64 (samples,).
    """
    _, side, classes = NETWORKS[name]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, side, side, generator=generator)
    return images, torch.randint(classes, (samples,), generator=generator)
